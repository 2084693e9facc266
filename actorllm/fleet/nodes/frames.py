"""Frames of a stream between machines: messages in chunks, by lanes. Pure: bytes in, messages out.

    +0 u32 bytes of payload | +4 u16 kind | +6 u8 flags | +7 u8 lane | +8 u32 generation | +12 u32 sequence | payload

Little-endian. A message is one frame, or chunks of CHUNK_BYTES of which all but the last have MORE. Between two chunks of one
lane come frames of other lanes only, so that nothing large holds up a heartbeat. The body is that of `ring.codec`; nothing
here decodes it. The sequence counts the frames of a stream. A gap, or a byte too much, is found at the next header.

Every word of a header is the peer's: each is checked before it is used. What waits for its end is bounded by the longest message.
"""

from __future__ import annotations

import struct
from collections.abc import Iterator
from typing import NamedTuple

from actorllm.errors import CorruptLinkError
from actorllm.ring.channel import DEFAULT_MAX_MESSAGE_BYTES

HEADER = struct.Struct("<IHBBII")
CHUNK_BYTES = 64 << 10
MORE, PING = 1, 2
"""Flags: the message goes on; of a heartbeat, that it is to be answered at once."""
BEAT, CONTROL = 0xFFFE, 0xFFFF
"""Kinds beside those of `messages.KINDS`."""
URGENT, ORDERED, BULK = 0, 1, 2
"""Lanes: heartbeats; messages in their order; what may be overtaken by those."""
NUM_LANES = 3
BEAT_BODY = struct.Struct("<dddQ")
"""When it was sent; of the last one that came, when that was sent and when it came; bytes taken so far. Seconds by the clocks."""


class StreamMessage(NamedTuple):
    """A whole message, or a chunk that is not the last of one (kind is None then)."""

    kind: int | None
    flags: int
    lane: int
    generation: int
    body: bytes
    num_bytes: int
    """What its last frame took of the sender's room, header included: frames without a body are not free."""


class FrameParser:
    """Makes messages of the bytes of a stream, however they come."""

    def __init__(self, max_message_bytes: int = DEFAULT_MAX_MESSAGE_BYTES) -> None:
        self._max_message_bytes = max_message_bytes
        self._buffer = bytearray()
        self._sequence = 0
        self._parts: list[list[bytes]] = [[] for _ in range(NUM_LANES)]
        self._sizes = [0] * NUM_LANES
        self._begun: list[tuple[int, int]] = [(0, 0)] * NUM_LANES  # kind and generation of what has begun

    @property
    def num_waiting_bytes(self) -> int:
        """That belong to what is not whole yet."""
        return len(self._buffer) + sum(self._sizes)

    def feed(self, data: bytes | memoryview) -> Iterator[StreamMessage]:
        """The messages and chunks that end with these bytes. Raises CorruptLinkError, after what came before is out.

        data: is not to change before the last of them is out.
        """
        buffer = self._buffer
        if buffer:
            buffer += data
        view = memoryview(buffer or data)
        at, size = 0, len(view)
        try:
            while size - at >= HEADER.size:
                length, kind, flags, lane, generation, sequence = HEADER.unpack_from(view, at)
                self._check(length, kind, flags, lane, generation, sequence)
                end = at + HEADER.size + length
                if end > size:
                    return
                body = bytes(view[at + HEADER.size : end])
                at = end
                self._sequence = (self._sequence + 1) & 0xFFFFFFFF
                yield self._joined(kind, flags, lane, generation, body)
        finally:
            if buffer:
                view.release()
                del buffer[:at]
            else:
                buffer += view[at:]

    def _check(self, length: int, kind: int, flags: int, lane: int, generation: int, sequence: int) -> None:
        is_beat = kind == BEAT
        if sequence != self._sequence:
            raise CorruptLinkError(f"frame {sequence} of the stream, {self._sequence} expected")
        if lane >= NUM_LANES or is_beat != (lane == URGENT) or not kind or flags & ~(PING if is_beat else MORE):
            raise CorruptLinkError(f"a frame of kind {kind} with flags {flags:#x} in lane {lane}")
        if is_beat and length != BEAT_BODY.size:
            raise CorruptLinkError(f"a heartbeat of {length} bytes")
        if length > CHUNK_BYTES or (flags & MORE and not is_beat and length != CHUNK_BYTES):
            raise CorruptLinkError(f"a chunk of {length} bytes; whole ones have {CHUNK_BYTES}")
        if self._parts[lane] and self._begun[lane] != (kind, generation):
            raise CorruptLinkError(f"a chunk of kind {kind} in a message of kind {self._begun[lane][0]}")
        if self._sizes[lane] + length > self._max_message_bytes:
            raise CorruptLinkError(f"a message of more than {self._max_message_bytes} bytes")

    def _joined(self, kind: int, flags: int, lane: int, generation: int, body: bytes) -> StreamMessage:
        num_bytes, parts = HEADER.size + len(body), self._parts[lane]
        if flags & MORE and kind != BEAT:
            parts.append(body)
            self._sizes[lane] += len(body)
            self._begun[lane] = kind, generation
            return StreamMessage(None, flags, lane, generation, b"", num_bytes)
        if parts:
            body = b"".join([*parts, body])
            parts.clear()
            self._sizes[lane] = 0
        return StreamMessage(kind, flags, lane, generation, body, num_bytes)


def chunks_of(body: bytes | memoryview) -> Iterator[tuple[int, memoryview]]:
    """The payloads of a message's frames, each with its flags."""
    view = memoryview(body)
    last = max(0, len(view) - 1) // CHUNK_BYTES * CHUNK_BYTES
    for start in range(0, last, CHUNK_BYTES):
        yield MORE, view[start : start + CHUNK_BYTES]
    yield 0, view[last:]
