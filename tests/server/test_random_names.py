"""Names of answers: each another one, in every process."""

from __future__ import annotations

import os
import threading

import pytest

from actorllm.server import random_names
from actorllm.server.random_names import NUM_MADE, random_name


def test_each_is_another_one_in_all_threads() -> None:
    found: list[str] = []

    def make() -> None:
        found.extend([random_name() for _ in range(3 * NUM_MADE)])

    threads = [threading.Thread(target=make) for _ in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert len(set(found)) == len(found) == 12 * NUM_MADE
    assert all(len(name) == 32 and set(name) <= set("0123456789abcdef") for name in found)


def test_the_kernel_is_asked_once_for_many(monkeypatch: pytest.MonkeyPatch) -> None:
    asked: list[int] = []

    def urandom(size: int) -> bytes:
        asked.append(size)
        return bytes(range(256)) * (size // 256)

    monkeypatch.setattr(random_names, "_made", [])
    monkeypatch.setattr(random_names.os, "urandom", urandom)
    for _ in range(NUM_MADE):
        random_name()
    assert len(asked) == 1


@pytest.mark.filterwarnings("ignore:This process .* is multi-threaded:DeprecationWarning")
def test_a_fork_takes_none_of_its_parents_names() -> None:
    random_name()  # some are made
    reading, writing = os.pipe()
    child = os.fork()
    if not child:
        os.write(writing, "".join([random_name() for _ in range(NUM_MADE)]).encode())
        os._exit(0)
    os.close(writing)
    with os.fdopen(reading) as pipe:
        told = pipe.read()
    os.waitpid(child, 0)
    of_child = {told[at : at + 32] for at in range(0, len(told), 32)}
    assert len(of_child) == NUM_MADE
    assert not of_child & {random_name() for _ in range(NUM_MADE)}
