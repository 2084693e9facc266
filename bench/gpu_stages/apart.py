"""Work in processes of its own: shared out among several, or one piece after the other with whatever happens to a process.

A process that has lost its GPU can do nothing more with it. One that waits for a GPU which does not answer cannot be told to stop.
So both are left or ended, and another goes on. Functions given here are named by their module: processes are spawned.
"""

from __future__ import annotations

import multiprocessing
import os
import time
from collections.abc import Callable, Iterator, Sequence
from multiprocessing.connection import Connection
from typing import Any

MAX_PROCESSES = 8
"""Each has a context on the GPU, and compiles with several threads."""


END_S = 20.0
"""A process may take so long to end; the driver holds one whose kernels do not end."""


def num_processes() -> int:
    """For work that compiles: half of the processors, as each compiler has more than one thread."""
    return max(1, min(MAX_PROCESSES, (os.cpu_count() or 1) // 2))


def share_out(work: Callable[..., None], count: int, limit_s: float, *arguments: Any) -> None:
    """Call `work(first, count, *arguments)` in `count` processes, with first from 0. Whatever they raise is ignored.

    limit_s: seconds after which those that still work are ended.
    """
    context = multiprocessing.get_context("spawn")
    processes = [context.Process(target=work, args=(first, count, *arguments), daemon=True) for first in range(count)]
    for process in processes:
        process.start()
    end = time.monotonic() + limit_s
    for process in processes:
        process.join(max(0.0, end - time.monotonic()))
        if process.is_alive():
            process.kill()
            process.join(END_S)


def one_by_one(
    work: Callable[..., tuple[dict[str, Any], bool]], names: Sequence[str], limit_s: float, *arguments: Any
) -> Iterator[tuple[str, dict[str, Any]]]:
    """Each name with the row that `work(name, *arguments)` gives for it; one process for as many as it survives.

    work: returns the row, and whether the process can go on. limit_s: seconds for one name; a process that takes longer is ended.
    A name whose process ended, or was ended, gets a row with the reason as its "problem".
    """
    context = multiprocessing.get_context("spawn")
    left = list(names)
    while left:
        ours, theirs = context.Pipe(duplex=False)
        process = context.Process(target=_serve, args=(theirs, work, left, arguments), daemon=True)
        process.start()
        theirs.close()
        can_go_on = True
        while left and can_go_on:
            row: dict[str, Any]
            if not ours.poll(limit_s):
                row, can_go_on = {"problem": f"it was ended after {limit_s:g} s"}, False
            else:
                try:
                    row, can_go_on = ours.recv()
                except EOFError:
                    process.join(10)
                    row, can_go_on = {"problem": f"its process ended with {process.exitcode}"}, False
            yield left.pop(0), row
        if not can_go_on:
            process.kill()
        process.join(END_S)
        ours.close()


def _serve(
    connection: Connection, work: Callable[..., tuple[dict[str, Any], bool]], names: list[str], arguments: Any
) -> None:
    for name in names:
        row, can_go_on = work(name, *arguments)
        connection.send((row, can_go_on))
        if not can_go_on:
            os._exit(1)  # what is left of a lost GPU may not let the process end by itself
