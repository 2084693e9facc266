"""Where nodes are: addresses, and which replica is where. Pure but for `connect_to`, which makes a connection."""

from __future__ import annotations

import socket
import ssl
from collections.abc import Callable, Sequence
from typing import NamedTuple

import anyio
from anyio import to_thread

from actorllm.errors import AttachError, ConfigError, shown
from actorllm.fleet.nodes.handshake import HANDSHAKE_TIMEOUT_S, call


class NodeAddress(NamedTuple):
    """Of an agent. A host that begins with / is the path of a unix socket, and the port is 0 then."""

    host: str
    port: int

    def __str__(self) -> str:
        return (
            self.host
            if not self.port
            else f"[{self.host}]:{self.port}"
            if ":" in self.host
            else f"{self.host}:{self.port}"
        )


class Located(NamedTuple):
    """An agent that was found, or started."""

    address: NodeAddress
    key: bytes
    watch: Callable[[Callable[[str], object]], None] | None = None
    """Tells, from any thread, when it or one of the following has ended; None: only its connection does."""
    rank_nodes: tuple[str, ...] = ()
    """The agents that have ranks of its replica beside it, as "host:port"; they have the same key."""


def read_address(text: object, argument: str = "nodes") -> NodeAddress:
    """From "host:port", "[v6 address]:port" or "/path/of/a.socket". Raises ConfigError."""
    if isinstance(text, str) and text.startswith("/"):
        return NodeAddress(text, 0)
    if isinstance(text, str):
        host, _, port = text.rpartition(":")
        host = host.removeprefix("[").removesuffix("]")
        if host and port.isdecimal() and 0 < int(port) < 1 << 16:
            return NodeAddress(host, int(port))
    raise ConfigError(f'{argument}={shown(text)} is no address; write "host:port", such as "10.0.0.2:7040"')


def place_of(number: int, num_local: int, nodes: Sequence[str]) -> str | None:
    """The node of a replica; None: this machine, which has the first ones. The others go to one node after the other."""
    return None if number < num_local or not nodes else nodes[(number - num_local) % len(nodes)]


def node_of_rank(rank: int, num_ranks: int, nodes: Sequence[str]) -> str | None:
    """The node of a rank; None: this machine, which has the first ones. All machines have equally many."""
    machine = rank // (num_ranks // (1 + len(nodes)))
    return None if machine == 0 else nodes[machine - 1]


def tls_of(ca_file: str | None) -> ssl.SSLContext | None:
    """By which agents are called; None: in the clear. ca_file: certificates in PEM. Raises ConfigError."""
    if ca_file is None:
        return None
    try:
        return ssl.create_default_context(cafile=ca_file)
    except OSError as error:
        raise ConfigError(
            f"node_ca_file={ca_file!r} cannot be used: {error.strerror or error}; it has certificates in PEM"
        ) from error


async def connect_to(address: NodeAddress, key: bytes, tls: ssl.SSLContext | None, timeout_s: float) -> socket.socket:
    """A connection to an agent that knows the key. Raises AttachError, which names the node."""
    peer = f"node {address}"
    try:
        with anyio.fail_after(timeout_s):
            sock = await _connected(address)
    except (OSError, TimeoutError) as error:
        reason = f"not within {timeout_s:g} s" if isinstance(error, TimeoutError) else error.strerror or str(error)
        raise AttachError(
            f"{peer} cannot be reached: {reason}; does `actorllm node --listen HOST:{address.port}` run there, and is the "
            f"port open?"
        ) from error
    try:
        return await call(sock, key, peer, tls, address.host)
    except BaseException:
        sock.close()
        raise


async def _connected(address: NodeAddress) -> socket.socket:
    if not address.port:
        return await _connected_to(socket.AF_UNIX, address.host)
    found = await to_thread.run_sync(
        lambda: socket.getaddrinfo(address.host, address.port, type=socket.SOCK_STREAM), abandon_on_cancel=True
    )
    failure: OSError | None = None
    for family, _, _, _, where in found:
        try:
            return await _connected_to(family, where)
        except OSError as error:  # the next address may be reachable
            failure = error
    raise failure or OSError("it has no address")


async def _connected_to(family: int, where: object) -> socket.socket:
    sock = socket.socket(family, socket.SOCK_STREAM)
    try:
        sock.setblocking(False)
        try:
            sock.connect(where)  # type: ignore[arg-type]
        except BlockingIOError:
            await anyio.wait_writable(sock)
            number = sock.getsockopt(socket.SOL_SOCKET, socket.SO_ERROR)
            if number:
                import os

                raise OSError(number, os.strerror(number)) from None
        return sock
    except BaseException:
        sock.close()
        raise


CONNECT_TIMEOUT_S = HANDSHAKE_TIMEOUT_S
