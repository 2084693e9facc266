"""Start an engine with so many descriptors at most, for each of these limits: python start_with.py TOPOLOGY LIMIT...

Every start is in a fork of its own, so that what takes long is imported once. Prints a line of JSON for each limit.
"""

from __future__ import annotations

import contextlib
import gc
import json
import os
import resource
import sys
import threading
import time
import traceback
from pathlib import Path

from actorllm import LLM, ActorLLMError, SamplingParams


def outcome_of(topology: str) -> str:
    """What a caller sees."""
    try:
        llm = LLM("storyteller", topology=topology, num_threads=1, max_model_len=64)
        try:
            (output,) = llm.generate("Once", SamplingParams(max_tokens=2, ignore_eos=True), use_tqdm=False)
        finally:
            llm.shutdown()
    except ActorLLMError as error:
        return f"{type(error).__name__}: {error}"
    except BaseException:
        return traceback.format_exc()
    return f"{len(output.outputs[0].token_ids)} tokens"


def descriptors() -> int:
    """Open ones, but for the pair that libuv keeps from the first loop of a process on."""
    gc.collect()
    return len([fd for fd in os.listdir("/proc/self/fd") if os.path.exists(f"/proc/self/fd/{fd}")])


def left_behind(before: int) -> list[str]:
    """Children, shared memory, descriptors, threads."""
    children: list[str] = []
    for task in Path("/proc/self/task").iterdir():
        with contextlib.suppress(FileNotFoundError):  # a thread that ends meanwhile
            children += (task / "children").read_text().split()
    segments = [p.name for p in Path("/dev/shm").iterdir() if p.name.startswith(f"allm-{os.getpid():x}-")]
    threads = [thread.name for thread in threading.enumerate() if thread.name.startswith("actorllm")]
    more = descriptors() - before
    return children + segments + threads + ([f"{more} descriptors"] if more > 2 else [])


def left_after_a_moment(before: int) -> list[str]:
    """The same, once what is ending by itself has had time to: a dropped engine is stopped on a thread of its own."""
    until = time.monotonic() + 10
    while (left := left_behind(before)) and time.monotonic() < until:
        time.sleep(0.02)
    return left


def main() -> None:
    topology, *limits = sys.argv[1:]
    for limit in limits:
        pid = os.fork()
        if pid:
            os.waitpid(pid, 0)
            continue
        before = descriptors()
        soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
        resource.setrlimit(resource.RLIMIT_NOFILE, (int(limit), hard))
        outcome = outcome_of(topology)
        resource.setrlimit(resource.RLIMIT_NOFILE, (soft, hard))
        print(json.dumps({"limit": int(limit), "outcome": outcome, "left": left_after_a_moment(before)}), flush=True)
        os._exit(0)


if __name__ == "__main__":
    main()
