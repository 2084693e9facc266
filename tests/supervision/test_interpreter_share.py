"""`InterpreterShare`: a thread that waits for the interpreter is told from one that is stuck."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager

import pytest

from actorllm.supervision.interpreter_share import LEAST_SHARE, InterpreterShare
from tests.embedding.host_program import wait_until


@contextmanager
def thread_of(function: Callable[[threading.Event], object]) -> Iterator[InterpreterShare]:
    """What is seen of a thread that runs it; it ends when the event is set."""
    over = threading.Event()
    thread = threading.Thread(target=function, args=(over,))
    thread.start()
    try:
        yield InterpreterShare(thread.ident or 0)
    finally:
        over.set()
        thread.join()


def hog(over: threading.Event) -> None:
    """An application that never sleeps."""
    while not over.is_set():
        sum(range(10_000))


def compute(over: threading.Event) -> None:
    """As torch does: the interpreter is given back at every operation."""
    while not over.is_set():
        time.sleep(0)


@pytest.fixture
def hogged() -> Iterator[None]:
    with thread_of(hog):
        yield


def test_a_thread_that_waits_for_the_interpreter_is_not_blamed(hogged: None) -> None:
    with thread_of(compute) as share:
        assert wait_until(lambda: share.look() < 0.6)


def test_a_thread_that_sleeps_for_good_is(hogged: None) -> None:
    with thread_of(threading.Event.wait) as share:
        # From when it sleeps: until then a look may find it at work, or no other thread at that moment.
        assert wait_until(lambda: [share.look() for _ in range(5)] == [1.0] * 5)


def test_something_counts_in_any_case(hogged: None) -> None:
    with thread_of(compute) as share:
        shares: list[float] = []
        assert wait_until(lambda: shares.append(share.look()) or len(shares) == 20)  # type: ignore[func-returns-value]
        assert min(shares) >= LEAST_SHARE
