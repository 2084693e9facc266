"""Both ends of a stream within one process."""

from __future__ import annotations

import socket
import ssl
from collections.abc import Callable, Sequence
from functools import partial
from pathlib import Path
from typing import Any

from actorllm.actors.link import Link, LinkInfo
from actorllm.clock import now
from actorllm.errors import TransportError
from actorllm.fleet.nodes.node_stream import NodeStream
from actorllm.fleet.nodes.stream_link import StreamLink
from tests.server import certificates


def tcp_pair() -> tuple[socket.socket, socket.socket]:
    """Connected over the loopback interface."""
    with socket.create_server(("127.0.0.1", 0)) as listener:
        near = socket.create_connection(listener.getsockname())
        far, _ = listener.accept()
    return near, far


def tls_contexts(tmp_path: Path) -> tuple[ssl.SSLContext, ssl.SSLContext]:
    """Of the listener, and of who calls it as `unix`."""
    key, certificate = certificates.certified(tmp_path)
    listener = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    listener.load_cert_chain(certificate, key)
    return listener, ssl.create_default_context(cafile=str(certificate))


class StreamEnd(StreamLink):
    """A link that owns its stream."""

    stream: NodeStream

    def break_link(self, error: TransportError) -> None:
        super().break_link(error)

    def close(self) -> None:
        super().close()
        self.stream.close()


def end_of(info: LinkInfo, sock: socket.socket, *, is_translating: bool = False, **options: Any) -> StreamEnd:
    """One end, which has started. options: of the stream."""
    ends: list[StreamEnd] = []
    stream = NodeStream(
        sock,
        on_message=lambda generation, kind, body, size: ends[0].take(kind, body, size),
        on_batch=lambda: ends[0].end_batch() if ends else None,
        on_end=lambda error: ends[0].break_link(error),
        **options,
    )
    end = StreamEnd(info, stream, is_translating=is_translating)
    end.stream = stream
    ends.append(end)
    stream.start()
    return end


def over_streams(
    infos: Sequence[LinkInfo], connect: Callable[[], tuple[socket.socket, socket.socket]] = tcp_pair
) -> list[Link]:
    """The ends of a pair, hub first."""
    return [end_of(info, sock) for info, sock in zip(infos, connect(), strict=True)]


def shifted(seconds: float) -> Callable[[], float]:
    """A clock that differs from this process's."""
    return partial(_shifted, seconds)


def _shifted(seconds: float) -> float:
    return now() + seconds
