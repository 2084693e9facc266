"""`NodeStream`: one connection between two machines, with its heartbeats, its bounds and its clock offset.

Owns the socket, what waits to be sent, and the timer. From its outbox, frames go out by lanes: heartbeats first, then
messages in their order. Now and then a chunk of what may be overtaken goes out. What the peer has not taken is bounded by
its window, so that a reader that is slow holds up its writer, and no heartbeat. A full outbox refuses.
A peer that sends beyond the window of this side is at fault.

Invariants: each side sends a heartbeat each half second, whatever else goes on. Where one comes and the own one is due soon, it
goes out at once: an idle connection wakes its sides once for both. A side from which nothing has come for
`timeout_s` is gone, whatever its kernel says. A stall of this process does not count as the peer's silence. The end is told once;
nothing is resumed. Nothing raises into the loop. All of it belongs to the thread of the loop it was started on.
"""

from __future__ import annotations

import contextlib
import errno
import socket
import ssl
from collections import deque
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import Any

import anyio

from actorllm.actors.engine_thread import AsyncioLoop, Timer, current_loop
from actorllm.clock import now
from actorllm.errors import CorruptLinkError, PeerLostError, TransportError
from actorllm.fleet.nodes.clock_offset import ClockOffset
from actorllm.fleet.nodes.frames import (
    BEAT,
    BEAT_BODY,
    BULK,
    CHUNK_BYTES,
    CONTROL,
    HEADER,
    NUM_LANES,
    ORDERED,
    PING,
    URGENT,
    FrameParser,
    StreamMessage,
    chunks_of,
)
from actorllm.ring.channel import DEFAULT_CAPACITY, DEFAULT_MAX_MESSAGE_BYTES, DEFAULT_MAX_OUTBOX_BYTES
from actorllm.ring.codec import decode, encode

BEAT_S = 0.5
ANSWER_SLACK_S = 0.1
"""By which the next heartbeat of a side that answers is later, so that the other side's comes before it."""
TIMEOUT_S = 3.0
WINDOW_BYTES = DEFAULT_CAPACITY
"""That may be on their way to a peer which has not taken them, as in a ring."""
READ_BYTES = 256 << 10
READS_PER_TURN = 4
"""Before the loop's other callbacks get their turn."""
SEND_BYTES = 128 << 10
"""Handed to the kernel at a time, so that a heartbeat waits behind no more."""
ORDERED_PER_BULK = 4
"""Frames of messages for each chunk of what they overtake."""
NUM_PINGS = 4

OnMessage = Callable[[int, int, bytes, int], bool]
"""(generation, kind, body, its bytes of the window); False: it is kept, and `release` tells when it is taken."""


@dataclass(frozen=True, slots=True)
class StreamStatistics:
    """A snapshot of one end."""

    num_sent: int
    num_received: int
    """Messages, heartbeats left out."""
    bytes_sent: int
    bytes_received: int
    outbox_bytes: int
    offset_s: float
    """The peer's clock minus this one."""
    offset_error_s: float
    silent_s: float
    """Since anything came."""


class NodeStream:
    """See the module docstring.

    Arguments:
        sock: connected and past the handshake; TCP, a unix socket or TLS over either. The stream owns it.
        on_message: hears each message of `messages.KINDS`.
        on_control: hears the scalars and arrays of each control frame.
        on_batch: runs after each batch of them.
        on_room: runs when something was sent from a full outbox.
        on_beat: runs after each heartbeat of the peer.
        on_end: hears once why the stream is over; not after `close`.
        timeout_s: how long the peer may be silent.
        clock: of this side, in seconds.
    """

    def __init__(
        self,
        sock: socket.socket,
        *,
        on_message: OnMessage,
        on_control: Callable[[dict[str, Any], list[Any]], object] = lambda fields, arrays: None,
        on_batch: Callable[[], object] = lambda: None,
        on_room: Callable[[], object] = lambda: None,
        on_beat: Callable[[], object] = lambda: None,
        on_end: Callable[[TransportError], object] = lambda error: None,
        timeout_s: float = TIMEOUT_S,
        window_bytes: int = WINDOW_BYTES,
        max_outbox_bytes: int = DEFAULT_MAX_OUTBOX_BYTES,
        max_message_bytes: int = DEFAULT_MAX_MESSAGE_BYTES,
        clock: Callable[[], float] = now,
    ) -> None:
        self.offset = ClockOffset()
        self.is_open = True
        self._sock = sock
        self._on_message, self._on_control, self._on_batch = on_message, on_control, on_batch
        self._on_room, self._on_beat, self._on_end = on_room, on_beat, on_end
        self._timeout_s = timeout_s
        self._window_bytes = window_bytes
        self._max_outbox_bytes = max_outbox_bytes
        self._max_message_bytes = max_message_bytes
        self._clock = clock
        self._parser = FrameParser(max_message_bytes)
        self._read_buffer = memoryview(bytearray(READ_BYTES))
        self._lanes: list[deque[tuple[int, int, int, bytes | memoryview]]] = [deque() for _ in range(NUM_LANES)]
        self._outbox_bytes = 0
        self._unsent: bytes | memoryview = b""  # frames that the kernel has taken a part of
        self._sequence = 0
        self._num_since_bulk = 0
        self._sent_bytes = self._taken_by_peer = 0  # of the window
        self._come_bytes = self._taken_bytes = self._told_bytes = 0
        self._was_refused = False
        self._is_reading = self._is_writing = False
        self._loop: AsyncioLoop | None = None
        self._heard_at = 0.0
        self._read_at = 0.0  # by `clock`
        self._beat_due = 0.0
        self._timer: Timer | None = None  # of the next heartbeat
        self._last_beat: tuple[float, float] = (0.0, 0.0)  # when the peer sent it, and when it came
        self._num_answers = 0
        self._changed: anyio.Event | None = None
        self._num_sent = self._num_received = self._bytes_sent = self._bytes_received = 0
        self.error: TransportError | None = None
        sock.setblocking(False)
        if sock.family != socket.AF_UNIX:
            sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
            with contextlib.suppress(OSError):  # what waits should wait here, where a heartbeat overtakes it
                sock.setsockopt(socket.IPPROTO_TCP, getattr(socket, "TCP_NOTSENT_LOWAT", 25), CHUNK_BYTES)

    def start(self) -> None:
        """From the running loop: receive, send heartbeats, and flush."""
        self._loop = current_loop()
        self._heard_at = now()
        self._loop.watch(self._sock.fileno(), self._on_readable)
        self._beat_due = now()
        self._tick()
        self._loop.call_soon(self._on_readable)  # TLS may hold bytes that no descriptor shows

    async def synchronize(self) -> None:
        """Learn the offset of the peer's clock. Returns also when the stream ends meanwhile."""
        for number in range(NUM_PINGS):
            self._send_beat(PING)
            while self.is_open and self._num_answers <= number:
                await self._wait()

    async def _wait(self) -> None:
        if self._changed is None:
            self._changed = anyio.Event()
        await self._changed.wait()

    def _tell(self) -> None:
        changed, self._changed = self._changed, None
        if changed is not None:
            changed.set()

    # Sending

    def send(self, kind: int, buffers: Iterable[bytes | memoryview], generation: int = 0, lane: int = ORDERED) -> bool:
        """Queue a message. False: the outbox is full, and nothing was sent. Call `flush` behind the last of several.

        Raises ValueError: it is longer than messages may be. PeerLostError: the stream is over.
        """
        if not self.is_open:
            raise PeerLostError(f"the stream is over: {self.error or 'it was closed'}")
        body = b"".join(buffers)
        length = len(body)
        if length > self._max_message_bytes:
            raise ValueError(f"a message of {length} bytes exceeds the limit of {self._max_message_bytes}")
        if self._outbox_bytes and self._outbox_bytes + length > self._max_outbox_bytes:
            self._was_refused = True
            return False
        queue = self._lanes[lane]
        if length <= CHUNK_BYTES:
            queue.append((kind, 0, generation, body))
        else:
            for flags, payload in chunks_of(body):
                queue.append((kind, flags, generation, payload))
        self._outbox_bytes += length
        self._num_sent += 1
        return True

    def control(self, op: str, arrays: Iterable[Any] = (), lane: int = ORDERED, **fields: Any) -> None:
        """Send a control frame. Nothing happens on a stream that is over, and none is refused: there are few."""
        if not self.is_open:
            return
        body = b"".join(encode({"op": op, **fields}, list(arrays)))
        for flags, payload in chunks_of(body):
            self._lanes[lane].append((CONTROL, flags, 0, payload))
        self._outbox_bytes += len(body)
        self.flush()

    @property
    def outbox_bytes(self) -> int:
        """That wait to be sent."""
        return self._outbox_bytes

    @property
    def is_full(self) -> bool:
        """The next message may be refused."""
        return self._outbox_bytes > self._max_outbox_bytes // 2

    def flush(self) -> None:
        """Hand over to the kernel what it and the peer have room for; the rest follows by itself."""
        if self._loop is None or not self.is_open:
            return
        try:
            while True:
                unsent = self._unsent = self._unsent or self._next_frames()
                if not unsent:
                    break
                num_sent = self._sock.send(unsent)
                self._bytes_sent += num_sent
                self._unsent = b"" if num_sent == len(unsent) else memoryview(unsent)[num_sent:]
        except (BlockingIOError, InterruptedError, ssl.SSLWantWriteError, ssl.SSLWantReadError):
            pass
        except OSError as error:
            # The sender must not hear of the end before its call has returned: it is in the midst of its own changes.
            self._loop.call_soon(self._lose, PeerLostError(f"the peer is gone: {error}"))
            return
        self._watch_writable(bool(self._unsent))

    def _lose(self, error: PeerLostError) -> None:
        """Nothing can be sent. What the peer had sent comes first."""
        self.read_now()
        self.fail(error)

    def _next_frames(self) -> bytes:
        """Frames for the kernel, heartbeats first; nothing: there are none, or the peer has no room."""
        pieces: list[bytes | memoryview] = []
        size = 0
        while size < SEND_BYTES:
            lane = self._next_lane()
            if lane is None:
                break
            kind, flags, generation, payload = self._lanes[lane].popleft()
            length = len(payload)
            pieces.append(HEADER.pack(length, kind, flags, lane, generation, self._sequence))
            pieces.append(payload)
            self._sequence = (self._sequence + 1) & 0xFFFFFFFF
            size += HEADER.size + length
            if lane != URGENT:
                self._sent_bytes += HEADER.size + length
                self._outbox_bytes -= length
                self._num_since_bulk = 0 if lane == BULK else self._num_since_bulk + 1
        return b"".join(pieces)

    def _next_lane(self) -> int | None:
        urgent, ordered, bulk = self._lanes
        if urgent:
            return URGENT
        if self._sent_bytes - self._taken_by_peer >= self._window_bytes:
            return None
        if bulk and (not ordered or self._num_since_bulk >= ORDERED_PER_BULK):
            return BULK
        return ORDERED if ordered else None

    def _watch_writable(self, is_wanted: bool) -> None:
        if self._loop is not None and is_wanted != self._is_writing:
            self._is_writing = is_wanted
            if is_wanted:
                self._loop.watch_writable(self._sock.fileno(), self._on_writable)
            else:
                self._loop.unwatch_writable(self._sock.fileno())

    def _on_writable(self) -> None:
        self.flush()
        self._after_room()

    def _after_room(self) -> None:
        if self._was_refused and not self.is_full:
            self._was_refused = False
            self._on_room()
        self._tell()

    async def wait_flushed(self) -> None:
        """Return when everything sent is with the kernel. Raises PeerLostError."""
        while self._outbox_bytes or self._unsent:
            if not self.is_open:
                raise PeerLostError(f"the stream is over: {self.error or 'it was closed'}")
            await self._wait()

    # Heartbeats

    def _send_beat(self, flags: int = 0) -> None:
        self._told_bytes = self._taken_bytes
        urgent = self._lanes[URGENT]
        if urgent:  # it waits for a kernel that takes nothing: this one says the same, later
            flags |= urgent.pop()[1]
        body = BEAT_BODY.pack(self._clock(), *self._last_beat, self._taken_bytes)
        urgent.append((BEAT, flags, 0, body))
        self.flush()

    def _tick(self) -> None:
        if not self.is_open or self._loop is None:
            return
        at = now()
        late_s = max(0.0, at - self._beat_due)
        if late_s > BEAT_S:  # this process stood still: what the peer sent meanwhile is looked at first
            self._heard_at += late_s
        if at - self._heard_at > BEAT_S:
            self._on_readable()
        if at - self._heard_at > self._timeout_s:
            self.fail(PeerLostError(f"nothing has come from the peer for {at - self._heard_at:.1f} s"))
            return
        self._send_beat()
        self._beat_later(BEAT_S)

    def _beat_later(self, delay_s: float) -> None:
        if self._timer is not None:
            self._timer.cancel()
        if self.is_open and self._loop is not None:
            self._beat_due = now() + delay_s
            self._timer = self._loop.call_later(delay_s, self._tick)

    def _take_beat(self, message: StreamMessage) -> None:
        sent, echo_sent, echo_received, taken = BEAT_BODY.unpack(message.body)
        at = self._read_at
        if not self._taken_by_peer <= taken <= self._sent_bytes:
            raise CorruptLinkError(f"the peer has taken {taken} bytes of {self._sent_bytes}")
        self._last_beat = sent, at
        if echo_sent:
            self.offset.observe(echo_sent, echo_received, sent, at)
            self._num_answers += 1
        has_room = taken > self._taken_by_peer
        self._taken_by_peer = taken
        if message.flags & PING:
            self._send_beat()
        elif self._beat_due - now() < BEAT_S / 2:
            self._send_beat()
            self._beat_later(BEAT_S + ANSWER_SLACK_S)
        if has_room:
            self.flush()
            self._after_room()
        self._tell()
        self._on_beat()

    # Receiving

    def release(self, num_bytes: int) -> None:
        """The peer may send as much again."""
        self._taken_bytes += num_bytes
        if self._taken_bytes - self._told_bytes >= self._window_bytes // 4 and self.is_open:
            self._send_beat()

    def read_now(self) -> None:
        """Deliver what is with the kernel at this moment, as far as the window goes."""
        while self.is_open and self._loop is not None and not self._is_reading and self._read():
            pass

    def _on_readable(self) -> None:
        if not self.is_open or self._is_reading:
            return
        for _ in range(READS_PER_TURN):
            if not self._read():
                return
        if isinstance(self._sock, ssl.SSLSocket) and self._loop is not None:
            self._loop.call_soon(self._on_readable)  # it may hold the rest, which no descriptor shows

    def _read(self) -> bool:
        """True: there may be more."""
        if not self.is_open:
            return False
        try:
            num_read = self._sock.recv_into(self._read_buffer)
        except (BlockingIOError, InterruptedError, ssl.SSLWantReadError, ssl.SSLWantWriteError):
            return False
        except OSError as error:
            what = "it reset the connection" if error.errno == errno.ECONNRESET else str(error)
            self.fail(PeerLostError(f"the peer is gone: {what}"))
            return False
        if not num_read:
            self.fail(PeerLostError("the peer is gone: it closed the connection"))
            return False
        self._read_at = self._clock()
        self._heard_at = now()
        self._bytes_received += num_read
        self._is_reading = True
        try:
            for message in self._parser.feed(self._read_buffer[:num_read]):
                self._take(message)
                if not self.is_open:
                    return False
        except CorruptLinkError as error:
            self.fail(error)
            return False
        except Exception as error:  # of what the peer sent: it ends this stream, and nothing raises into the loop
            self.fail(CorruptLinkError(f"what the peer sent makes no sense here: {error!r}"))
            return False
        finally:
            self._is_reading = False
            self._on_batch()
        return num_read == READ_BYTES or isinstance(self._sock, ssl.SSLSocket)

    def _take(self, message: StreamMessage) -> None:
        if message.kind == BEAT:
            self._take_beat(message)
            return
        self._come_bytes += message.num_bytes
        # A writer looks at the window before each frame, so one of them may reach beyond it.
        if self._come_bytes - self._taken_bytes > self._window_bytes + HEADER.size + CHUNK_BYTES:
            raise CorruptLinkError(f"{self._come_bytes - self._taken_bytes} bytes in a window of {self._window_bytes}")
        is_taken = True
        if message.kind == CONTROL:
            self._num_received += 1
            fields, arrays = decode(message.body)
            if not isinstance(fields, dict) or not isinstance(fields.get("op"), str):
                raise CorruptLinkError("a control frame without an op")
            self._on_control(fields, arrays)
        elif message.kind is not None:
            self._num_received += 1
            is_taken = self._on_message(message.generation, message.kind, message.body, message.num_bytes)
        if is_taken:
            self.release(message.num_bytes)

    # The end

    def cut(self) -> None:
        """From any thread: the peer sees the end at once, and this side with its next turn."""
        with contextlib.suppress(OSError):  # that of a TLS socket would have the other thread go on in the clear
            socket.socket.shutdown(self._sock, socket.SHUT_RDWR)

    def fail(self, error: TransportError) -> None:
        """Something impossible was found, or the peer is gone: end it, and tell why."""
        if not self.is_open:
            return
        self.error = error
        self.close()
        self._on_end(error)

    def close(self) -> None:
        """End it; the peer sees the end of the connection. Idempotent."""
        if not self.is_open:
            return
        self.is_open = False
        if self._timer is not None:
            self._timer.cancel()
        if self._loop is not None:
            self._loop.unwatch(self._sock.fileno())
            self._watch_writable(False)
        self._sock.close()
        for lane in self._lanes:
            lane.clear()
        self._outbox_bytes = 0
        self._unsent = b""
        self._tell()

    def statistics(self) -> StreamStatistics:
        return StreamStatistics(
            num_sent=self._num_sent,
            num_received=self._num_received,
            bytes_sent=self._bytes_sent,
            bytes_received=self._bytes_received,
            outbox_bytes=self._outbox_bytes,
            offset_s=self.offset.seconds,
            offset_error_s=self.offset.error_s,
            silent_s=now() - self._heard_at,
        )
