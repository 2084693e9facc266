"""Whatever the owner was doing when it was killed, no process of its engine is left, and its other children are its own."""

from __future__ import annotations

import os
import signal
from pathlib import Path

import pytest

from tests.actors.scripted_topology import LIGHT_WORKERS
from tests.embedding.host_program import PRINT_PIDS, assert_gone, running_host, wait_until
from tests.supervision.processes import is_gone

WITHIN_S = 3.0
"""Nothing is alive after this time, says docs/embedding.md. It is counted as `wait_until` does."""

HEAD = f"""
import subprocess, sys, threading, time
from actorllm import LLM, AsyncLLM, SamplingParams
{PRINT_PIDS}
other = subprocess.Popen([sys.executable, "-c", "import time; print('other runs', flush=True); time.sleep(60)"])
print("other", other.pid, flush=True)
long = SamplingParams(max_tokens=None, ignore_eos=True)
how = {{}}
"""

IDLE = """
llm = LLM("storyteller", num_threads=1)
print_pids(llm)
print("now", flush=True)
time.sleep(60)
"""

STREAMING = """
llm = LLM("storyteller", num_threads=1, **how)
print_pids(llm)
def generate():
    while True:
        llm.generate(["Once"] * 8, long, use_tqdm=False)
threading.Thread(target=generate, daemon=True).start()
while not llm.stats()["scheduler"]["scheduler"]["num_output_tokens"]:
    time.sleep(0.01)
print("now", flush=True)
time.sleep(60)
"""

FLEET = "how = {'data_parallel_size': 2, 'ready_replicas': 2}\n" + STREAMING
RANKS = "how = {'tensor_parallel_size': 2}\n" + STREAMING

LONG_STEP = """
llm = LLM("storyteller", num_threads=1, max_num_batched_tokens=16384, step_timeout_s=600)
print_pids(llm)
prompts = [[1 + i % 4000] * 1000 for i in range(16)]
threading.Thread(target=lambda: llm.generate(prompts, long, use_tqdm=False), daemon=True).start()
while not llm.stats()["scheduler"]["scheduler"]["num_running"]:
    time.sleep(0.01)
print("now", flush=True)
time.sleep(60)
"""

CHILDREN = """
from pathlib import Path
children = lambda: [int(pid) for task in Path("/proc/self/task").iterdir() for pid in (task / "children").read_text().split()]
"""

INLINE = (
    CHILDREN
    + """
llm = LLM("storyteller", topology="inline", num_threads=1)
text = "once upon a time there was a girl " * 50_000
few = {"truncate_prompt_tokens": 10}
def generate():  # long texts are read in a process of their own
    while True:
        llm.generate([text], SamplingParams(max_tokens=1), use_tqdm=False, tokenization_kwargs=few)
threading.Thread(target=generate, daemon=True).start()
while len(children()) < 2:
    time.sleep(0.01)
print("pids", *[pid for pid in children() if pid != other.pid], flush=True)
print("now", flush=True)
time.sleep(60)
"""
)

LOADING = (
    CHILDREN
    + """
def start():
    LLM("storyteller", num_threads=1)
threading.Thread(target=start, daemon=True).start()
while len(children()) < 3:
    time.sleep(0.01)
print("pids", *[pid for pid in children() if pid != other.pid], flush=True)
print("now", flush=True)
time.sleep(60)
"""
)

THREAD_ENDED = """
made = []
def start():
    made.append(LLM("storyteller", num_threads=1))
thread = threading.Thread(target=start)
thread.start()
thread.join()
(llm,) = made
time.sleep(0.5)  # the kernel tells children that asked for it when the thread that made them ends
(output,) = llm.generate("Once", SamplingParams(max_tokens=3, ignore_eos=True), use_tqdm=False)
print("tokens", len(output.outputs[0].token_ids))
print_pids(llm)
print("now", flush=True)
time.sleep(60)
"""


@pytest.mark.parametrize(
    "doing",
    [IDLE, STREAMING, FLEET, RANKS, LONG_STEP, LOADING, THREAD_ENDED, INLINE],
    ids=[
        "idle",
        "streaming",
        "fleet",
        "ranks",
        "long step",
        "loading",
        "after the thread that started it",
        "inline, reading a text",
    ],
)
def test_an_owner_that_is_killed_leaves_nothing(doing: str) -> None:
    light = "" if doing in (LONG_STEP, LOADING) else LIGHT_WORKERS  # those two are about the model's process
    least = {INLINE: 1, FLEET: 4, RANKS: 3}.get(doing, 2)
    # Whose thread has ended: the parent of a copy is the main thread, whatever thread asks for it.
    is_copied = doing not in (LOADING, INLINE, THREAD_ENDED)
    with running_host("-c", light + HEAD + doing, is_copied=is_copied) as host:
        other = int(host.read_until("other ").split()[1])
        try:
            host.read_until("now")
            assert len(host.engine_pids) >= least
            assert not any(map(is_gone, host.engine_pids)), "the engine has ended before its owner"
            host.process.send_signal(signal.SIGKILL)
            host.process.wait()
            assert_gone(host.engine_pids, WITHIN_S)
            assert not is_gone(other), "a child of the application's own was ended"
        finally:
            os.kill(other, signal.SIGKILL)
    assert wait_until(lambda: not segments_of(host.process.pid)), "shared memory is left"
    if doing is THREAD_ENDED:
        assert "tokens 3" in host.output, "the engine did not outlive the thread that started it"


SHUT_DOWN = """
with LLM("storyteller", num_threads=1) as llm:
    print_pids(llm)
    llm.generate("Once", SamplingParams(max_tokens=3), use_tqdm=False)
print("still", other.poll(), flush=True)
other.kill()
other.wait()
"""


def test_a_shutdown_ends_no_child_of_the_applications() -> None:
    with running_host("-c", LIGHT_WORKERS + HEAD + SHUT_DOWN, is_copied=True) as host:
        assert host.read_until("still").split()[1] == "None"
        assert host.wait() == 0, host.errors
        assert_gone(host.engine_pids, WITHIN_S)


def segments_of(owner: int) -> set[str]:
    return {path.name for path in Path("/dev/shm").iterdir() if path.name.startswith(f"allm-{owner:x}-")}
