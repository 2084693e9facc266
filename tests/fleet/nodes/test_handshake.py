"""Who may speak on a connection between machines."""

from __future__ import annotations

import os
import socket
import ssl
from pathlib import Path

import anyio
import pytest

from actorllm.errors import AttachError, ConfigError, PeerLostError
from actorllm.fleet.nodes import handshake
from actorllm.fleet.nodes.handshake import GREETING_BYTES, MAGIC, PROOF_BYTES, answer_caller, call, read_key
from actorllm.fleet.nodes.node_stream import NodeStream
from tests.fleet.nodes.stream_pairs import tcp_pair, tls_contexts

KEY, OTHER = b"k" * 32, b"o" * 32


async def shake(
    listener_key: bytes, caller_key: bytes, tls: tuple[ssl.SSLContext, ssl.SSLContext] | None = None, host: str = "unix"
) -> tuple[list[socket.socket], list[BaseException]]:
    """Both sides at once: the sockets that came out, and what was raised. All are closed."""
    near, far = tcp_pair()
    sockets: list[socket.socket] = []
    errors: list[BaseException] = []

    async def one(function: object, *args: object) -> None:
        try:
            sockets.append(await function(*args))  # type: ignore[operator]
        except AttachError as error:
            errors.append(error)

    async with anyio.create_task_group() as group:
        group.start_soon(one, answer_caller, far, listener_key, "the caller", tls and tls[0])
        group.start_soon(one, call, near, caller_key, "node a:1", tls and tls[1], tls and host)
    for sock in (near, far, *sockets):
        sock.close()
    return sockets, errors


async def test_the_same_key_on_both_sides() -> None:
    sockets, errors = await shake(KEY, KEY)
    assert len(sockets) == 2
    assert not errors


async def over_tls(tmp_path: Path) -> dict[str, socket.socket]:
    """Both ends of a connection past its handshake."""
    contexts = tls_contexts(tmp_path)
    near, far = tcp_pair()
    ends: dict[str, socket.socket] = {}

    async def answer() -> None:
        ends["far"] = await answer_caller(far, KEY, "the caller", contexts[0])

    async with anyio.create_task_group() as group:
        group.start_soon(answer)
        ends["near"] = await call(near, KEY, "node a:1", contexts[1], "unix")
    return ends


async def test_a_stream_over_tls(tmp_path: Path) -> None:
    ends = await over_tls(tmp_path)
    received: list[tuple[int, bytes]] = []
    streams = [
        NodeStream(ends["near"], on_message=lambda *_: True),
        NodeStream(ends["far"], on_message=lambda _, kind, body, size: received.append((kind, body)) is None),
    ]
    for stream in streams:
        stream.start()
    body = os.urandom(3_000_000)
    assert streams[0].send(10, [body])
    streams[0].flush()
    with anyio.fail_after(20):
        while not received:
            await anyio.sleep(0.002)
    assert received == [(10, body)]
    for stream in streams:
        stream.close()


async def test_a_stream_over_tls_that_another_thread_cuts_is_tls_to_its_end(tmp_path: Path) -> None:
    """What came before is read as TLS. Else the loop, which may be sending just then, would go on in the clear."""
    ends = await over_tls(tmp_path)
    received: list[bytes] = []
    ended: list[Exception] = []
    near = NodeStream(
        ends["near"],
        on_message=lambda _, kind, body, size: received.append(body) is None,
        on_end=ended.append,
    )
    far = NodeStream(ends["far"], on_message=lambda *_: True)
    for stream in (near, far):
        stream.start()
    await near.synchronize()
    far.send(10, [b"before the end"])
    far.flush()
    near.cut()
    with anyio.fail_after(20):
        while not ended:
            await anyio.sleep(0.002)
    assert received == [b"before the end"]
    assert isinstance(ended[0], PeerLostError)
    far.close()


async def test_a_certificate_for_another_host_is_refused(tmp_path: Path) -> None:
    sockets, errors = await shake(KEY, KEY, tls_contexts(tmp_path), "another")
    assert not sockets
    assert any("no TLS connection" in str(error) and "Hostname mismatch" in str(error) for error in errors)


async def test_a_wrong_key_is_told_to_both() -> None:
    sockets, errors = await shake(KEY, OTHER)
    assert not sockets
    assert sorted(str(error)[:30] for error in errors) == [
        "node a:1 refuses the key; node",
        "the caller has another key",
    ]


async def test_a_listener_without_the_key_is_not_believed() -> None:
    """It takes any proof, and cannot give one."""
    near, far = tcp_pair()
    far.setblocking(True)
    far.sendall(MAGIC + (1).to_bytes(2, "little") + bytes(32) + b"\1" + bytes(PROOF_BYTES))
    with pytest.raises(AttachError, match="does not know the key"):
        await call(near, KEY, "node a:1")
    near.close()
    far.close()


async def test_a_proof_of_one_side_is_none_of_the_other() -> None:
    """An attacker in the middle of nothing plays back to the caller what the caller has said."""
    near, far = tcp_pair()

    async def play_back() -> None:
        far.setblocking(False)
        await handshake._send_all(far, MAGIC + (1).to_bytes(2, "little") + bytes(32))
        said = await handshake._read(far, GREETING_BYTES + PROOF_BYTES)
        await handshake._send_all(far, b"\1" + said[GREETING_BYTES:])

    async with anyio.create_task_group() as group:
        group.start_soon(play_back)
        with pytest.raises(AttachError, match="does not know the key"):
            await call(near, KEY, "node a:1")
    near.close()
    far.close()


async def test_another_program_or_version_is_named() -> None:
    for greeting, what in (
        (b"SSH-2.0-OpenSSH_9.6" + bytes(60), "is no node of actorllm: it said b'SSH-2.0-OpenSSH"),
        (MAGIC + (9).to_bytes(2, "little") + bytes(32), "version 9 of the protocol .* this process version 1"),
    ):
        near, far = tcp_pair()
        far.sendall(greeting)
        with pytest.raises(AttachError, match=what):
            await call(near, KEY, "node a:1")
        near.close()
        far.close()


async def test_a_caller_that_dribbles_is_left(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(handshake, "HANDSHAKE_TIMEOUT_S", 0.3)
    near, far = tcp_pair()

    async def dribble() -> None:
        for byte in MAGIC * 20:
            await anyio.sleep(0.05)
            near.send(bytes([byte]))

    async with anyio.create_task_group() as group:
        group.start_soon(dribble)
        with pytest.raises(AttachError, match=r"the caller has not answered within 0.3 s"):
            await answer_caller(far, KEY, "the caller")
        group.cancel_scope.cancel()
    near.close()
    far.close()


def make_key(path: Path, content: bytes = KEY, mode: int = 0o600) -> Path:
    path.write_bytes(content)
    path.chmod(mode)
    return path


def test_a_key_file(tmp_path: Path) -> None:
    assert read_key(make_key(tmp_path / "key", b"\n" + KEY + b"\n")) == KEY
    with pytest.raises(ConfigError, match=r"mode 0o640 .* chmod 600"):
        read_key(make_key(tmp_path / "open", mode=0o640))
    with pytest.raises(ConfigError, match=r"holds 3 bytes; a key has 16 to 4096"):
        read_key(make_key(tmp_path / "short", b"abc"))
    with pytest.raises(ConfigError, match=r"cannot be read: No such file .* openssl rand -hex 32"):
        read_key(tmp_path / "none")
    with pytest.raises(ConfigError, match=r"cannot be read: Is a directory"):
        read_key(tmp_path)


@pytest.mark.skipif(os.geteuid() != 0, reason="only root can give a file to another user")
def test_a_key_of_another_user_is_refused(tmp_path: Path) -> None:
    path = make_key(tmp_path / "key")
    os.chown(path, 12345, 12345)
    with pytest.raises(ConfigError, match="is of uid 12345"):
        read_key(path)
