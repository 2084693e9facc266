"""Bounds for a connection: for the headers of a request, and for requests that are sent before others are answered.

uvicorn keeps what arrives until the headers are whole, and knows no limit of its own with httptools. `Guards` counts them when they
are here.
"""

from __future__ import annotations

from typing import Any

MAX_HEADER_BYTES = 1 << 18
"""Of one request, about: the last piece that the system hands over is counted as a whole."""

MAX_PIPELINED = 128
"""Requests behind the one that is answered. What the system hands over at a time has room for ten thousand, and each costs."""

TOO_LARGE = b"HTTP/1.1 431 Request Header Fields Too Large\r\ncontent-length: 0\r\nconnection: close\r\n\r\n"


def bounded(base: Any) -> Any:
    """uvicorn's protocol class for httptools, or one derived from it, with the bound."""

    class BoundedHeaders(base):  # type: ignore[misc]
        _is_in_headers = True
        _num_header_bytes = 0

        def on_message_begin(self) -> None:
            if len(self.pipeline) >= MAX_PIPELINED:
                raise ConnectionError("too many requests before the answer")  # the parser gives up, and uvicorn closes
            self._is_in_headers, self._num_header_bytes = True, 0
            super().on_message_begin()

        def on_headers_complete(self) -> None:
            self._is_in_headers = False
            super().on_headers_complete()

        def on_header(self, name: bytes, value: bytes) -> None:
            if self._is_in_headers:  # else it is one behind a body in chunks, which nothing here reads
                super().on_header(name, value)

        def data_received(self, data: bytes) -> None:
            super().data_received(data)
            if not self._is_in_headers:
                return
            self._num_header_bytes += len(data)
            if self._num_header_bytes > MAX_HEADER_BYTES and not self.transport.is_closing():
                self.transport.write(TOO_LARGE)
                self.transport.close()

    return BoundedHeaders
