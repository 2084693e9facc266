"""Starting and stopping engines again and again in one process: nothing grows."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from tests.actors.scripted_topology import LIGHT_WORKERS

ROOT = Path(__file__).parents[2]

PROGRAM = """
import gc, json, os, sys, threading, time
from pathlib import Path
from actorllm import LLM, SamplingParams

topology, count = sys.argv[1], int(sys.argv[2])
several = {"fleet": {"data_parallel_size": 2, "ready_replicas": 2}, "ranks": {"tensor_parallel_size": 2}}
how = several.get(topology) or {"topology": topology}
params = SamplingParams(max_tokens=4, ignore_eos=True)

most_threads = None

def read_status():
    return dict(line.split(":", 1) for line in Path("/proc/self/status").read_text().splitlines())

def counts():
    global most_threads
    gc.collect()
    status = read_status()
    for _ in range(500):  # the kernel lets go of a thread a moment after it has been joined
        if most_threads is None or int(status["Threads"]) <= most_threads:
            break
        time.sleep(0.01)
        status = read_status()
    most_threads = int(status["Threads"])
    children = [
        child for task in Path("/proc/self/task").iterdir() for child in (task / "children").read_text().split()
    ]
    return {
        "fds": len(os.listdir("/proc/self/fd")),
        "threads": int(status["Threads"]),
        "children": len(children),
        "segments": sum(name.startswith(f"allm-{os.getpid():x}-") for name in os.listdir("/dev/shm")),
        "objects": len(gc.get_objects()),
        "kib": int(status["VmRSS"].split()[0]),
    }

for number in range(count):
    llm = LLM("storyteller", **how, num_threads=1, kv_cache_memory_bytes=4 << 20, max_model_len=128)
    outputs = llm.generate(["Once", "Twice"], params, use_tqdm=False)
    assert [len(output.outputs[0].token_ids) for output in outputs] == [4, 4]
    ways = [llm.shutdown, lambda: llm.__exit__(), lambda: llm.drain() and llm.shutdown(), lambda: None]
    ways[number % 4]()
    del llm, outputs, ways
    for _ in range(2000):  # one that was dropped ends meanwhile
        if not [thread for thread in threading.enumerate() if thread.name.startswith("actorllm")]:
            break
        time.sleep(0.01)
    print(json.dumps(counts()), flush=True)
"""


def counts_after_each(program: str, topology: str, count: int) -> list[dict[str, Any]]:
    done = subprocess.run(
        [sys.executable, "-c", program, topology, str(count)],
        capture_output=True,
        text=True,
        timeout=900,
        env=os.environ | {"PYTHONPATH": str(ROOT)},
        check=False,
    )
    assert (done.returncode, done.stderr) == (0, "")
    return [json.loads(line) for line in done.stdout.splitlines()]


def check(counts: list[dict[str, Any]], settled: int, max_kib: int) -> None:
    """The first starts load libraries and fill caches; from then on everything stays as it is."""
    first, last = counts[settled], counts[-1]
    for name in ("fds", "threads", "children", "segments"):
        assert {count[name] for count in counts[settled:]} == {first[name]}, name
    assert first["children"] == first["segments"] == 0
    assert last["objects"] - first["objects"] < 200 + (len(counts) - settled), "objects are left behind"
    assert last["kib"] - first["kib"] < max_kib, [count["kib"] for count in counts]


@pytest.mark.parametrize(("topology", "count"), [("inline", 4), ("process", 4), ("fleet", 4), ("ranks", 4)])
def test_a_few_times(topology: str, count: int) -> None:
    """What is counted is in the owner: worker processes need no model."""
    check(counts_after_each(LIGHT_WORKERS + PROGRAM, topology, count), settled=2, max_kib=12_000)


@pytest.mark.slow(reason="twenty starts with the model; the quick test has some")
@pytest.mark.timeout(400)
@pytest.mark.parametrize("topology", ["inline", "process"])
def test_twenty_times_from_the_second_on(topology: str) -> None:
    """The allocator settles within some starts, at a few megabytes more."""
    check(counts_after_each(PROGRAM, topology, 20), settled=1, max_kib=24_000)


@pytest.mark.slow(reason="a hundred starts; the quick test has some")
@pytest.mark.timeout(1000)
@pytest.mark.parametrize("topology", ["inline", "process"])
def test_a_hundred_times(topology: str) -> None:
    check(counts_after_each(PROGRAM, topology, 100), settled=20, max_kib=16_000)
