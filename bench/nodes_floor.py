"""The floor of `bench/nodes.py`: what a relay costs that does nothing but copy, in plain Python without an event loop.

    python nodes_floor.py BATCHES

Prints, as JSON, the median of microseconds from a send to its receipt: by an eventfd alone, and by a relay that is woken by one and
writes to a TCP connection. Each end is a process. A batch of 900 bytes goes every six milliseconds.
"""

from __future__ import annotations

import json
import mmap
import os
import select
import socket
import statistics
import struct
import sys
import time
from collections.abc import Callable

PAUSE_S = 0.006
BODY = bytes(900)
STAMP = struct.Struct("<d")


def forked(function: Callable[[], object]) -> int:
    pid = os.fork()
    if not pid:
        try:
            function()
        finally:
            os._exit(0)
    return pid


def woken(fd: int) -> Callable[[], bool]:
    """Waits until it is readable; False: nothing comes any more."""
    poll = select.epoll()
    poll.register(fd, select.EPOLLIN)
    return lambda: bool(poll.poll(2.0))


def measure(num_batches: int, has_relay: bool) -> float:
    memory, bell = mmap.mmap(-1, mmap.PAGESIZE), os.eventfd(0, os.EFD_NONBLOCK)
    with socket.create_server(("127.0.0.1", 0)) as listener:
        near = socket.create_connection(listener.getsockname())
        far, _ = listener.accept()
    near.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
    read_end, write_end = os.pipe()

    def relay() -> None:
        is_woken = woken(bell)
        while is_woken():
            os.eventfd_read(bell)
            near.send(memory[: STAMP.size] + BODY)

    def receive() -> None:
        is_woken, buffer = woken(far.fileno() if has_relay else bell), bytearray(1 << 16)
        while is_woken():
            if has_relay:
                far.recv_into(buffer)
            else:
                os.eventfd_read(bell)
                buffer[: STAMP.size] = memory[: STAMP.size]
            os.write(write_end, STAMP.pack(time.monotonic() - STAMP.unpack_from(buffer)[0]))

    pids = [forked(receive), *([forked(relay)] if has_relay else [])]
    os.close(write_end)
    for sock in (near, far):
        sock.close()
    time.sleep(0.2)
    for _ in range(num_batches):
        time.sleep(PAUSE_S)
        memory[: STAMP.size] = STAMP.pack(time.monotonic())
        os.eventfd_write(bell, 1)
    with os.fdopen(read_end, "rb") as file:
        found = [1e6 * one for (one,) in STAMP.iter_unpack(file.read())]
    for pid in pids:
        os.waitpid(pid, 0)
    return statistics.median(found)


def main() -> None:
    num_batches = int(sys.argv[1])
    print(json.dumps({"bell": measure(num_batches, False), "relay": measure(num_batches, True)}))


if __name__ == "__main__":
    main()
