"""`together`: one function on several threads at once, which take pieces of a shared iterator, for moving many bytes."""

from __future__ import annotations

import threading
from collections.abc import Callable


def together(work: Callable[[], None], num_threads: int) -> None:
    """Call a function on so many threads, of which this is one. Returns when all have returned; raises what one of them raised.

    The iterator that they share must be one that Python steps in one operation, such as `iter(range(n))`.
    """
    failed: list[BaseException] = []

    def beside() -> None:
        try:
            work()
        except BaseException as error:  # it is raised where the work was asked for
            failed.append(error)

    started: list[threading.Thread] = []
    try:
        for _ in range(num_threads - 1):
            thread = threading.Thread(target=beside, name="kv-move")
            try:
                thread.start()
            except RuntimeError:  # no more threads are to be had: those that there are do all of it
                break
            started.append(thread)
        work()
    finally:
        for thread in started:
            thread.join()  # until then it writes
    if failed:
        raise failed[0]
