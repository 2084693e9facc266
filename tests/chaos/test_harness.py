"""The chaos harness counts a kill when all its victims lived and are gone, and says what it did not do."""

from __future__ import annotations

import importlib
import os
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from actorllm import SamplingParams
from tests.chaos import harness
from tests.chaos.harness import Chaos, Request, is_parked, own_mib


@pytest.fixture
def anyio_backend() -> str:
    return "asyncio"


class Tree:
    """An engine as the harness sees it: actors that are processes, whose deaths are noticed when the test says so."""

    def __init__(self) -> None:
        self.processes: list[subprocess.Popen[bytes]] = []
        self.pids: dict[str, int | None] = {"scheduler": self.spawn(), "worker0": self.spawn()}
        self.state = "running"

    def spawn(self) -> int:
        self.processes.append(subprocess.Popen(["sleep", "1000"]))
        return self.processes[-1].pid

    def health(self) -> Any:
        actors = {name: SimpleNamespace(pid=pid) for name, pid in self.pids.items()}
        return SimpleNamespace(state=self.state, actors=actors)


@pytest.fixture
def tree() -> Iterator[Tree]:
    tree = Tree()
    yield tree
    for process in tree.processes:
        process.kill()
        process.wait()


async def kill(chaos: Chaos, *victims: str, enough: int = 0) -> None:
    await chaos.kill(victims, in_prefill=False, enough=enough, is_patient=False)


def is_killed(chaos: Chaos, *victims: str) -> bool:
    """At once, or not."""
    num_kills = len(chaos.figures.kills)
    has_killed = chaos._kill_now(victims, in_prefill=False, enough=0) is not None
    assert len(chaos.figures.kills) == num_kills + has_killed
    return has_killed


def test_who_was_killed_is_not_killed_again(tree: Tree) -> None:
    """Its owner may not have noticed yet; and who has died of itself is no victim either."""
    chaos: Any = Chaos(tree, seed=1)  # type: ignore[arg-type]
    assert is_killed(chaos, "worker")
    assert tree.processes[1].wait() == -9
    assert not is_killed(chaos, "worker")
    tree.pids["worker0"] = None
    tree.state = "recovering"
    assert not is_killed(chaos, "worker")
    tree.pids["worker0"] = other = tree.spawn()
    os.kill(other, 9)
    os.waitid(os.P_PID, other, os.WEXITED | os.WNOWAIT)
    assert not is_killed(chaos, "worker")
    tree.processes[-1].wait()  # now there is no such process
    assert not is_killed(chaos, "worker")
    tree.pids["worker0"] = tree.spawn()
    assert is_killed(chaos, "worker")
    assert tree.processes[-1].wait() == -9
    assert [found.was_recovering for found in chaos.figures.kills] == [False, True]


def test_both_means_both(tree: Tree) -> None:
    chaos: Any = Chaos(tree, seed=1)  # type: ignore[arg-type]
    tree.pids["worker0"] = None
    assert not is_killed(chaos, "scheduler", "worker")
    assert tree.processes[0].poll() is None
    tree.pids["worker0"] = tree.processes[1].pid
    assert is_killed(chaos, "scheduler", "worker")
    assert [process.wait() for process in tree.processes] == [-9, -9]
    assert chaos.figures.table()["kills by victim"] == {"scheduler+worker": 1}


@pytest.mark.anyio
async def test_a_victim_that_never_comes_is_an_error(tree: Tree, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(harness, "MOMENT_WITHIN_S", 0.02)
    monkeypatch.setattr(harness, "NO_TOKEN_WITHIN_S", 0.02)
    del tree.pids["worker0"]
    chaos: Any = Chaos(tree, seed=1)  # type: ignore[arg-type]
    with pytest.raises(TimeoutError):
        await kill(chaos, "scheduler", "worker")
    assert chaos.figures.kills == []
    assert tree.processes[0].poll() is None


@pytest.mark.anyio
async def test_a_moment_that_does_not_come_is_told(tree: Tree, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(harness, "MOMENT_WITHIN_S", 0.02)
    chaos: Any = Chaos(tree, seed=1)  # type: ignore[arg-type]
    await kill(chaos, "worker", enough=16)
    await kill(chaos, "scheduler")
    table = chaos.figures.table()
    assert table["kills"] == 2
    assert table["kills at another moment than wanted"] == 1
    assert table["kills with 16 and more running"] == 0


def test_streams_of_other_programs_are_accounted_for(tree: Tree) -> None:
    chaos: Any = Chaos(tree, seed=1)  # type: ignore[arg-type]
    requests = [Request(number, [1, 2], SamplingParams(max_tokens=2, n=2), abort_after=1) for number in range(2)]
    whole = [[5, 6], "ab", "length"]
    chaos.take(requests[0], [whole, whole])
    assert (chaos.figures.requests, chaos.figures.lost) == (1, [])
    chaos.take(requests[1], [whole, [[5], "a", None]])
    assert chaos.figures.lost == ["request 1.1: ended as None after 1 tokens"]
    assert [request.streams for request in chaos._finished] == [[[5, 6], [5, 6]], [[5, 6], [5]]]


@pytest.fixture
def soak(monkeypatch: pytest.MonkeyPatch) -> Any:
    monkeypatch.syspath_prepend(Path(harness.__file__).parents[2] / "bench")
    monkeypatch.setattr(sys, "path", sys.path[:])
    return importlib.import_module("soak")


def test_a_soak_that_has_grown_fails(soak: Any) -> None:
    run = soak.Soak(None, seed=1)
    sample = dict.fromkeys(soak.GROWTH, 0.0) | {soak.PROCESSES: 4, "descriptors of the owner": 30.0}
    more = sample | {soak.PROCESSES: 5, "descriptors of the owner": 33.0}
    run.samples = [dict(sample) for _ in range(40)] + [more] * 10
    assert soak.grown(run.growth()) == [], "a process that waits for the next death has descriptors of its own"
    del run.samples[40:]
    for sample in run.samples[30:]:
        sample["descriptors of the owner"] = 32.0
        sample["memory of the owner, MiB"] = 10.0
    assert soak.grown(run.growth()) == ["descriptors of the owner: 32.0 late, 30.0 early, at most 31.0 allowed"]
    for sample in run.samples[30:]:
        sample["names in /dev/shm"] = 1.0
    assert len(soak.grown(run.growth())) == 2


@pytest.mark.anyio
async def test_the_soak_counts_what_it_did(soak: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    run = soak.Soak(None, seed=1)
    run._events = [(1, "/dev/shm filled", run._fill_shared_memory)]
    run._rng = SimpleNamespace(exponential=lambda _: 0.0, choice=lambda *_, **__: 0)
    monkeypatch.setattr(os, "statvfs", lambda _: SimpleNamespace(f_bavail=1 << 30, f_frsize=4096))
    await run.run(1e-4)
    assert run.counts.keys() == {"/dev/shm filled, not possible here"}


def test_memory_that_leaks_is_counted_and_a_cache_that_fills_is_not() -> None:
    program = (
        "import mmap, sys\n"
        "def write(size):\n"
        "    pages = mmap.mmap(-1, size, flags=mmap.MAP_PRIVATE)\n"
        "    if size > 100 << 20:\n"
        "        pages.madvise(mmap.MADV_HUGEPAGE)  # as a cache; so neighbours are no part of it\n"
        "    pages[: 40 << 20] = bytes(40 << 20)\n"
        "    return pages\n"
        "print(flush=True)\n"
        "for line in sys.stdin:\n"
        "    kept = write(int(line)), globals().get('kept')\n"
        "    print(flush=True)\n"
    )
    child = subprocess.Popen([sys.executable, "-c", program], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)
    with child:
        assert child.stdin is not None
        assert child.stdout is not None

        def used_after(size: int) -> float:
            assert child.stdin is not None
            assert child.stdout is not None
            print(size, file=child.stdin, flush=True)
            child.stdout.readline()
            return own_mib([child.pid], 256 << 20)

        child.stdout.readline()
        first = used_after(64 << 20)
        assert used_after(300 << 20) < first + 4
        assert used_after(64 << 20) > first + 36
        child.stdin.close()


def test_a_parked_process_of_a_replica_is_one() -> None:
    assert is_parked("parked worker0")
    assert is_parked("replica1/parked worker0")
    assert not is_parked("replica1/worker0")
