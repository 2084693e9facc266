"""Rings between processes: under load, when either end is killed, and over descriptors passed to a child."""

from __future__ import annotations

import asyncio
import json
import os
import signal
import subprocess
import sys
from collections.abc import Callable, Iterator
from dataclasses import asdict
from pathlib import Path
from typing import Any

import anyio
import numpy as np
import pytest
from numpy.typing import NDArray

from actorllm.ring.channel import Hub, create_link, open_hub

SCRIPT = Path(__file__).with_name("ring_processes.py")
ROOT = Path(__file__).parents[2]


def environment() -> dict[str, str]:
    """The repository on the path, and one thread: the script forks."""
    return {**os.environ, "PYTHONPATH": str(ROOT), "OPENBLAS_NUM_THREADS": "1", "OMP_NUM_THREADS": "1"}


def run(*arguments: object, timeout_s: float = 50) -> dict[str, Any]:
    finished = subprocess.run(
        [sys.executable, str(SCRIPT), *map(str, arguments)],
        env=environment(),
        capture_output=True,
        text=True,
        timeout=timeout_s,
        check=False,
    )
    assert finished.returncode == 0, finished.stderr
    result: dict[str, Any] = json.loads(finished.stdout)
    return result


def test_writers_killed_at_any_instant_leave_only_whole_frames() -> None:
    result = run("kill_writers", 20)
    assert result["kills"] == 20
    assert result["frames"] > 0


def test_readers_killed_at_any_instant_lose_nothing() -> None:
    result = run("kill_readers", 20)
    assert result["processed"] > 0


@pytest.mark.parametrize("num_readers", [1, 3])
def test_two_seconds_of_random_frames(num_readers: int) -> None:
    result = run("stream", 2 / num_readers, num_readers)
    assert result["frames"] > 100
    assert result["lost_wake_ups"] == 0


@pytest.mark.slow(reason="hundreds of kills and ten seconds of streams; the quick tests have some")
def test_killing_and_streaming_at_length() -> None:
    assert run("kill_writers", 300)["kills"] == 300
    assert run("kill_readers", 300)["kills"] == 300
    assert run("stream", 10, 2)["lost_wake_ups"] == 0


class Children:
    """A hub in this process and an echo per spoke in a child of its own."""

    def __init__(self, num_spokes: int) -> None:
        ends = create_link(1 << 14, 1 << 14, num_spokes, generation=3)
        self.got: list[tuple[int, int, Any, list[NDArray[Any]]]] = []
        self.errors: list[Any] = []
        self.changed = asyncio.Event()
        self.hub: Hub = open_hub(
            ends.hub,
            on_frame=lambda *message: self.got.append(message),
            on_error=lambda *error: self.errors.append(error),
            on_batch=self.changed.set,
            checksum=True,
        )
        self.processes = []
        for end in ends.spokes:
            self.processes.append(
                subprocess.Popen(
                    [sys.executable, str(SCRIPT), "echo", json.dumps(asdict(end))],
                    pass_fds=end.fds,
                    env=environment(),
                )
            )
            end.close()

    async def until(self, condition: Callable[[], bool]) -> None:
        with anyio.fail_after(30):
            while not condition():
                self.changed.clear()
                await self.changed.wait()

    def close(self) -> None:
        self.hub.close()
        for process in self.processes:
            process.kill()
            process.wait()


@pytest.fixture
def make_children() -> Iterator[Callable[[int], Children]]:
    made: list[Children] = []

    def make(num_spokes: int) -> Children:
        made.append(Children(num_spokes))
        return made[-1]

    yield make
    for children in made:
        children.close()


async def test_a_link_works_across_processes(make_children: Callable[[int], Children]) -> None:
    children = make_children(2)
    children.hub.start()
    total = 300
    for index in range(total):
        await children.hub.sender.send(1 + index % 7, {"i": index}, [np.arange(index * (index % 5), dtype=np.int32)])
    await children.until(lambda: len(children.got) == 2 * total)
    for spoke in range(2):
        back = [message for message in children.got if message[0] == spoke]
        for index, (_, kind, scalars, arrays) in enumerate(back):
            assert (kind, scalars) == (1 + index % 7, {"i": index})
            assert (arrays[0] == np.arange(index * (index % 5))).all()
    await children.hub.sender.send(0, None)
    with anyio.fail_after(30):
        for process in children.processes:
            assert await asyncio.to_thread(process.wait) == 0
    assert all(receiver.reader.is_writer_closed() for receiver in children.hub.receivers)
    assert children.errors == []


async def test_a_killed_child_leaves_its_committed_messages(make_children: Callable[[int], Children]) -> None:
    children = make_children(2)
    children.hub.start()
    await children.hub.sender.send(1, "are you there")
    await children.until(lambda: len(children.got) == 2)
    killed = children.processes[1]
    killed.send_signal(signal.SIGSTOP)  # commits nothing from now on; the hub does not notice
    count = 0
    while children.hub.sender.outbox_bytes == 0:
        children.hub.sender.send_nowait(1, count, [np.arange(100, dtype=np.int32)])
        count += 1
        await asyncio.sleep(0)
    killed.kill()
    await asyncio.to_thread(killed.wait)
    children.hub.exclude_spoke(1)
    children.hub.receivers[1].drain_nowait()
    await children.until(lambda: sum(message[0] == 0 for message in children.got) == count + 1)
    from_killed = [message[2] for message in children.got if message[0] == 1]
    assert from_killed == ["are you there", *range(len(from_killed) - 1)]
    assert children.errors == []
