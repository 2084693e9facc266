"""The program that parses large bodies: a frame with a question in, a frame with the reply of `body_codec.pack` out.

One at a time, in the order in which the owner asks; the owner knows which request waits for which. It runs at a lower priority
than the processes that compute. Invariants: it never outlives its owner (parent-death signal, and the end of the socket).
Signals of a terminal are the owner's. No body changes how the next one is parsed. What a body of many items took is given back
by ending.
"""

from __future__ import annotations

import gc
import os
import signal
import socket
import sys

from actorllm.actors.child import FOR_THE_OWNER, die_with_owner, name_process, set_session_niceness
from actorllm.server.bodies.body_codec import pack
from actorllm.server.bodies.frames import receive_whole, send_whole

NICENESS = 15
MAX_RESIDENT_KIB = 512 << 10
"""A process that has held more than this ends behind its answer, and the next one is small."""


def main() -> None:
    """argv: the descriptor of the socket, the owner's pid."""
    control = socket.socket(fileno=int(sys.argv[1]))
    die_with_owner(int(sys.argv[2]))
    control.set_inheritable(False)
    for number in FOR_THE_OWNER:
        signal.signal(number, signal.SIG_IGN)
    signal.pthread_sigmask(signal.SIG_UNBLOCK, FOR_THE_OWNER)
    name_process("actorllm:bodies")
    os.setsid()  # niceness counts within a session, and between sessions
    os.nice(NICENESS)
    set_session_niceness(NICENESS)
    gc.disable()  # JSON has no cycles, and collecting while millions of lists are made takes most of the time
    while (asked := receive_whole(control)) is not None:
        reply = pack(asked)
        del asked
        send_whole(control, reply)
        del reply
        if peak_resident_kib() > MAX_RESIDENT_KIB:
            break


def peak_resident_kib() -> int:
    """Of this program alone: what getrusage tells began with the memory of the process that started it."""
    with open("/proc/self/status") as status:
        return next((int(line.split()[1]) for line in status if line.startswith("VmHWM:")), 0)
