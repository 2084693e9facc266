"""The beginning of a connection between machines: both ends show that they know the key of the fleet. Neither sends it.

    listener → caller   "actorllm", u16 version of this format, 32 random bytes
    caller → listener   the same with random bytes of its own, HMAC-SHA256 of all of these by the key
    listener → caller   1, HMAC of the same by the key; or 0, and the end

Before that nothing but these bytes is read. A proof is of one side and of one connection, so none can be played back. What
follows is neither encrypted nor signed: on a network that others can write to, give an `ssl_context`.
"""

from __future__ import annotations

import hmac
import os
import secrets
import socket
import ssl
import stat
from collections.abc import Callable
from pathlib import Path
from typing import TypeVar

import anyio

from actorllm.errors import AttachError, ConfigError

MAGIC = b"actorllm"
WIRE_VERSION = 1
"""Of this handshake, of frames and of control frames."""
NONCE_BYTES = PROOF_BYTES = 32
GREETING_BYTES = len(MAGIC) + 2 + NONCE_BYTES
MIN_KEY_BYTES, MAX_KEY_BYTES = 16, 4096
HANDSHAKE_TIMEOUT_S = 5.0
"""How long the two messages of the other side may take, TLS included."""

T = TypeVar("T")


def read_key(path: str | os.PathLike[str]) -> bytes:
    """The key of a fleet: what a file of this user holds, that others cannot read.

    Raises ConfigError: it cannot be read, others can read it, or it is too short.
    """
    file = Path(path).expanduser()
    try:
        with file.open("rb") as opened:
            found = os.fstat(opened.fileno())
            key = opened.read(MAX_KEY_BYTES + 1).strip()
    except OSError as error:
        raise ConfigError(
            f"node_key_file={str(path)!r} cannot be read: {error.strerror}; make one with: "
            f"(umask 077; openssl rand -hex 32 > {path}), and copy it to every node"
        ) from None
    if not stat.S_ISREG(found.st_mode) or found.st_mode & 0o077 or found.st_uid not in (os.geteuid(), 0):
        raise ConfigError(
            f"node_key_file={str(path)!r} has mode {stat.S_IMODE(found.st_mode):#o} and is of uid {found.st_uid}; others must "
            f"not read a key: chmod 600 {path}"
        )
    if not MIN_KEY_BYTES <= len(key) <= MAX_KEY_BYTES:
        raise ConfigError(
            f"node_key_file={str(path)!r} holds {len(key)} bytes; a key has {MIN_KEY_BYTES} to {MAX_KEY_BYTES}: "
            f"openssl rand -hex 32 makes one"
        )
    return key


def _greeting() -> bytes:
    return MAGIC + WIRE_VERSION.to_bytes(2, "little") + secrets.token_bytes(NONCE_BYTES)


def _proof(key: bytes, side: bytes, listener: bytes, caller: bytes) -> bytes:
    return hmac.digest(key, side + listener + caller, "sha256")


def _check_greeting(greeting: bytes, peer: str) -> None:
    if not greeting.startswith(MAGIC):
        raise AttachError(f"{peer} is no node of actorllm: it said {greeting[:16]!r}")
    version = int.from_bytes(greeting[len(MAGIC) : len(MAGIC) + 2], "little")
    if version != WIRE_VERSION:
        raise AttachError(
            f"{peer} speaks version {version} of the protocol between nodes and this process version {WIRE_VERSION}; use "
            f"the same version of actorllm on all nodes"
        )


async def answer_caller(sock: socket.socket, key: bytes, peer: str, tls: ssl.SSLContext | None = None) -> socket.socket:
    """The listener's side. Returns the socket to go on with, which the caller owns as before.

    Raises AttachError; it is closed then.
    """
    with _told(peer), _Closing(sock) as closing:
        with anyio.fail_after(HANDSHAKE_TIMEOUT_S):
            sock = closing.sock = await _secured(sock, tls, is_server=True)
            mine = _greeting()
            await _send_all(sock, mine)
            theirs = await _read(sock, GREETING_BYTES)
            _check_greeting(theirs, peer)
            proof = await _read(sock, PROOF_BYTES)
            if not hmac.compare_digest(proof, _proof(key, b"caller", mine, theirs)):
                await _send_all(sock, b"\0")
                raise AttachError(f"{peer} has another key")
            await _send_all(sock, b"\1" + _proof(key, b"listener", mine, theirs))
    return sock


async def call(
    sock: socket.socket, key: bytes, peer: str, tls: ssl.SSLContext | None = None, host: str | None = None
) -> socket.socket:
    """The side that connected, as `answer_caller`. host: the name that the certificate of the other one is held against."""
    with _told(peer), _Closing(sock) as closing:
        with anyio.fail_after(HANDSHAKE_TIMEOUT_S):
            sock = closing.sock = await _secured(sock, tls, is_server=False, host=host)
            theirs = await _read(sock, GREETING_BYTES)
            _check_greeting(theirs, peer)
            mine = _greeting()
            await _send_all(sock, mine + _proof(key, b"caller", theirs, mine))
            if await _read(sock, 1) != b"\1":
                raise AttachError(
                    f"{peer} refuses the key; node_key_file must hold the same on all nodes (and the agent reads it when it starts)"
                )
            proof = await _read(sock, PROOF_BYTES)
            if not hmac.compare_digest(proof, _proof(key, b"listener", theirs, mine)):
                raise AttachError(f"{peer} does not know the key: it is not the node that it is taken for")
    return sock


class _Closing:
    """Closes the socket of a handshake that fails. That of TLS has taken the descriptor of the one before."""

    def __init__(self, sock: socket.socket) -> None:
        self.sock = sock

    def __enter__(self) -> _Closing:
        return self

    def __exit__(self, kind: object, error: BaseException | None, traceback: object) -> None:
        if error is not None:
            self.sock.close()


class _told:
    """What goes wrong with the connection becomes an AttachError that names the peer."""

    def __init__(self, peer: str) -> None:
        self._peer = peer

    def __enter__(self) -> None:
        pass

    def __exit__(self, kind: object, error: BaseException | None, traceback: object) -> None:
        if isinstance(error, TimeoutError):
            raise AttachError(f"{self._peer} has not answered within {HANDSHAKE_TIMEOUT_S:g} s") from error
        if isinstance(error, ssl.SSLError):
            raise AttachError(f"{self._peer}: no TLS connection: {error}") from error
        if isinstance(error, OSError | EOFError):
            raise AttachError(f"{self._peer} ended the connection: {error}") from error


async def _secured(
    sock: socket.socket, tls: ssl.SSLContext | None, *, is_server: bool, host: str | None = None
) -> socket.socket:
    sock.setblocking(False)
    if tls is None:
        return sock
    # The wrapped socket takes the descriptor over: from here on closing the other one closes nothing.
    secured = tls.wrap_socket(sock, server_side=is_server, do_handshake_on_connect=False, server_hostname=host)
    try:
        await _when_ready(secured, secured.do_handshake)
    except BaseException:
        secured.close()
        raise
    return secured


async def _when_ready(sock: socket.socket, function: Callable[[], T]) -> T:
    while True:
        try:
            return function()
        except (BlockingIOError, ssl.SSLWantReadError):
            await anyio.wait_readable(sock)
        except ssl.SSLWantWriteError:
            await anyio.wait_writable(sock)


async def _read(sock: socket.socket, size: int) -> bytes:
    data = b""
    while len(data) < size:
        missing = size - len(data)
        piece = await _when_ready(sock, lambda missing=missing: sock.recv(missing))  # type: ignore[misc]
        if not piece:
            raise EOFError(f"after {len(data)} of {size} bytes")
        data += piece
    return data


async def _send_all(sock: socket.socket, data: bytes) -> None:
    view = memoryview(data)
    while view:
        try:
            view = view[sock.send(view) :]
        except (BlockingIOError, ssl.SSLWantWriteError):
            await anyio.wait_writable(sock)
        except ssl.SSLWantReadError:
            await anyio.wait_readable(sock)
