"""`break_connections`: ends the TCP connections of this process to a peer, so that what waits for its answer fails.

For calls of libraries that wait for as long as it takes, and do not tell their sockets.
"""

from __future__ import annotations

import contextlib
import ctypes
import os
import socket
import stat

NUM_ADDRESS_BYTES = 128
"""Of the longest address of a socket."""
PLACES = {socket.AF_INET: slice(4, 8), socket.AF_INET6: slice(8, 24)}
"""Where an address is in what the system tells of a peer; its port is before it."""


def break_connections(address: str, port: int) -> None:
    """Shut down all connections to a port of a host. Descriptors stay open: other code closes them."""
    try:
        known = {str(told[0]).partition("%")[0] for *_, told in socket.getaddrinfo(address, port)}
    except OSError:  # its name is none any more
        return
    libc = ctypes.CDLL(None, use_errno=True)
    for name in os.listdir("/proc/self/fd"):
        fd = int(name)
        with contextlib.suppress(OSError):  # it was closed meanwhile
            if stat.S_ISSOCK(os.fstat(fd).st_mode) and _peer_of(libc, fd) in {(one, port) for one in known}:
                libc.shutdown(fd, socket.SHUT_RDWR)


def _peer_of(libc: ctypes.CDLL, fd: int) -> tuple[str, int] | None:
    """Of a TCP connection, an IPv4 address in its own form; None: it is none.

    By the system itself: a `socket.socket` of another's descriptor may change whether it blocks.
    """
    told = ctypes.create_string_buffer(NUM_ADDRESS_BYTES)
    size = ctypes.c_uint32(NUM_ADDRESS_BYTES)
    if libc.getpeername(fd, told, ctypes.byref(size)):
        return None
    family = int(ctypes.c_uint16.from_buffer(told).value)
    place = PLACES.get(family)  # type: ignore[call-overload]
    if place is None:
        return None
    address = socket.inet_ntop(family, told.raw[place]).removeprefix("::ffff:")
    return address, int.from_bytes(told.raw[2:4], "big")
