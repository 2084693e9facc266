"""Thousands of requests in one piece, sent before the first is answered: the connection is closed at the limit."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import httptools
import pytest

from actorllm.server.header_bytes import MAX_PIPELINED, bounded


class Protocol:
    """What of uvicorn's protocol is needed: none of the requests is answered."""

    def __init__(self) -> None:
        self.pipeline: list[int] = []
        self.transport = SimpleNamespace(is_closing=lambda: False)
        self.parser: Any = httptools.HttpRequestParser(self)

    def on_message_begin(self) -> None: ...

    def on_header(self, name: bytes, value: bytes) -> None: ...

    def on_headers_complete(self) -> None:
        self.pipeline.append(1)

    def data_received(self, data: bytes) -> None:
        self.parser.feed_data(data)


def test_the_parser_gives_up() -> None:
    request = b"GET /version HTTP/1.1\r\nhost: x\r\n\r\n"
    one = bounded(Protocol)()
    one.data_received(request * MAX_PIPELINED)
    with pytest.raises(httptools.HttpParserError):
        one.data_received(request * 5000)
    assert len(one.pipeline) == MAX_PIPELINED
