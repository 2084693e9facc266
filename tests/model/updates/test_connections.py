"""`break_connections`: what waits for a peer fails, and all others go on."""

from __future__ import annotations

import os
import socket
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager

import pytest

from actorllm.model.updates.connections import break_connections


@contextmanager
def connected(host: str, family: socket.AddressFamily) -> Iterator[tuple[socket.socket, socket.socket, int]]:
    """Both ends, and the port of the second one."""
    with socket.create_server((host, 0), family=family) as listening:
        port = listening.getsockname()[1]
        with socket.create_connection((host, port)) as near, listening.accept()[0] as far:
            yield near, far, port


@pytest.mark.parametrize(
    ("host", "name", "family"), [("127.0.0.1", "localhost", socket.AF_INET), ("::1", "::1", socket.AF_INET6)]
)
def test_connections_to_one_peer_end(host: str, name: str, family: socket.AddressFamily) -> None:
    with ExitStack() as stack:
        try:
            near, far, port = stack.enter_context(connected(host, family))
        except OSError:
            if family != socket.AF_INET6:
                raise
            pytest.skip("this machine has no IPv6")
        other, other_far, other_port = stack.enter_context(connected(host, family))
        reading, writing = socket.socketpair()
        stack.enter_context(reading), stack.enter_context(writing)
        before = sorted(os.listdir("/proc/self/fd"))
        break_connections("no-such-host.invalid", port)
        break_connections("192.0.2.1", port)
        far.sendall(b"a")
        assert near.recv(1) == b"a", "others than the peer were named"
        break_connections(name, port)
        assert near.recv(1) == b""
        assert sorted(os.listdir("/proc/self/fd")) == before
        other_far.sendall(b"b")
        writing.sendall(b"c")
        assert (other.recv(1), reading.recv(1)) == (b"b", b"c")
        assert other_port != port
