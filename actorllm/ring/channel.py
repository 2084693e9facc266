"""What actors use: messages sent and received over rings by the running loop, and links as data.

Owns the outbox of a sender, the reassembly of a receiver, and which descriptor of a link means what. A message is
`(kind, scalars, arrays)`: a small integer, one JSON value, one-dimensional numpy arrays.

A link joins a hub with N spokes: one ring down, which every spoke reads, and one ring up per spoke. N = 1 is a plain
duplex link. `create_link` makes all of it as descriptors; every end goes to the process that opens it.

Invariants: messages of one sender arrive in order, whole, and once. Sending never blocks. What the ring has no room for
waits in a bounded outbox that the space doorbell flushes. Beyond the bound `send_nowait` raises WouldBlock with
nothing of the message sent. Nothing polls: an idle channel costs nothing. Corruption stops the channel and is reported
once; it never raises into the loop.

All objects belong to the thread of the loop they were started on and are not re-entrant. Call them neither from other
threads nor from signal handlers or finalizers. Callers: actorllm.actors.
"""

from __future__ import annotations

import os
import secrets
from collections import deque
from collections.abc import AsyncIterator, Callable, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass
from functools import partial
from typing import Any, TypeAlias

import anyio
from numpy.typing import NDArray

from actorllm.errors import CorruptLinkError, PeerLostError, TransportError, WouldBlock
from actorllm.ring import layout
from actorllm.ring.codec import decode, encode
from actorllm.ring.doorbell import Doorbell
from actorllm.ring.layout import MORE
from actorllm.ring.ring import Frame, ReaderStatistics, RingReader, RingWriter, WriterStatistics
from actorllm.ring.segment import Segment, create_segment

DEFAULT_CAPACITY = 4 << 20
"""Bytes of a ring between a frontend and the scheduler, and of the ring that carries plans."""
RESULT_CAPACITY = 1 << 20
"""Bytes of the ring that carries one worker's results."""
DEFAULT_MAX_OUTBOX_BYTES = 16 << 20
DEFAULT_MAX_MESSAGE_BYTES = 64 << 20

BATCH_FRAMES = 64
"""Frames dispatched before the next look at the ring."""
BATCHES_PER_TURN = 4
"""Batches before the loop's other callbacks get their turn."""

Message: TypeAlias = tuple[int, Any, list[NDArray[Any]]]
"""(kind, scalars, arrays)."""
OnFrame: TypeAlias = Callable[[int, Any, list[NDArray[Any]]], object]
OnBody: TypeAlias = Callable[[int, bytes | memoryview], object]
"""(kind, body as `codec.encode` made it)."""
OnError: TypeAlias = Callable[[TransportError], object]


@dataclass(frozen=True, slots=True)
class SenderStatistics:
    """Of one sender since it was made."""

    messages: int
    chunked_messages: int
    refused: int
    """Times that a message did not fit the outbox: WouldBlock, or a wait of `send`."""
    outbox_frames: int
    outbox_bytes: int
    max_outbox_bytes: int
    flushes: int
    rechecks_needed: int
    """Times that `recheck` found room for which no bell had rung; more than a few mean that doorbells get lost."""
    ring: WriterStatistics


@dataclass(frozen=True, slots=True)
class ReceiverStatistics:
    """Of one receiver since it was made."""

    messages: int
    chunked_messages: int
    wake_ups: int
    turns_cut_short: int
    """Times that the loop's other callbacks were let in before the ring was empty."""
    rechecks_needed: int
    """Times that `recheck` found messages for which no bell had rung; more than a few mean that doorbells get lost."""
    ring: ReaderStatistics


class Sender:
    """The sending end of a channel: a ring writer and a bounded outbox for what finds the ring full."""

    __slots__ = (
        "_error",
        "_lock",
        "_max_message_bytes",
        "_max_outbox_bytes",
        "_num_chunked",
        "_num_flushes",
        "_num_messages",
        "_num_rechecks_needed",
        "_num_refused",
        "_num_waiting",
        "_on_error",
        "_outbox",
        "_outbox_bytes",
        "_room",
        "writer",
    )

    def __init__(
        self,
        writer: RingWriter,
        *,
        max_outbox_bytes: int = DEFAULT_MAX_OUTBOX_BYTES,
        max_message_bytes: int = DEFAULT_MAX_MESSAGE_BYTES,
        on_error: OnError | None = None,
    ) -> None:
        """on_error: told once when the peer's words turn out to be impossible while the outbox is flushed.

        Calls of `send` and `send_nowait` raise that error in any case.
        """
        self.writer = writer
        self._max_outbox_bytes = max_outbox_bytes
        self._max_message_bytes = max_message_bytes
        self._on_error = on_error
        self._outbox: deque[Frame] = deque()  # oldest first
        self._outbox_bytes = 0
        self._room: anyio.Event | None = None
        self._lock: anyio.Lock | None = None
        self._num_waiting = 0
        self._error: TransportError | None = None
        self._num_messages = self._num_chunked = self._num_refused = self._num_flushes = self._num_rechecks_needed = 0

    def start(self) -> None:
        """Flushes the outbox from the running asyncio or uvloop loop whenever the peer makes room.

        May be called again; `send` does it when it has to wait.
        """
        if self._error is None and not self.writer.space_bell.is_watched:
            self.writer.space_bell.watch(self._on_space)
        self._flush_safely()

    def send_nowait(self, kind: int, scalars: object, arrays: Sequence[NDArray[Any]] = ()) -> None:
        """Sends, or queues behind what is queued. Never blocks; afterwards the arrays may be changed.

        WouldBlock: ring and outbox are full; nothing was sent. ValueError: the message is longer than the limit.
        TypeError: it cannot be encoded. PeerLostError: the sender is closed. CorruptLinkError: the link must be dropped.
        """
        if not self._try_send(kind, encode(scalars, arrays)):
            raise WouldBlock(
                f"the ring is full and {self._outbox_bytes} bytes wait in the outbox (limit {self._max_outbox_bytes})"
            )

    def send_body_nowait(self, kind: int, body: bytes | memoryview) -> None:
        """As `send_nowait`, of what is encoded already: for relays."""
        if not self._try_send(kind, [body]):
            raise WouldBlock(f"the ring is full and {self._outbox_bytes} bytes wait in the outbox")

    async def send(self, kind: int, scalars: object, arrays: Sequence[NDArray[Any]] = ()) -> None:
        """Like `send_nowait`, but waits for room, callers first come first served. Does not yield when there is room.

        Cancelled while it waits, nothing was sent. The arrays must not change before it returns.
        """
        buffers = encode(scalars, arrays)
        if not self._num_waiting and self._try_send(kind, buffers):
            return
        async with self._take_place():
            while not self._try_send(kind, buffers):
                await self._wait_for_room()

    async def wait_flushed(self) -> None:
        """Returns when the outbox is empty: everything sent so far is in the ring."""
        if not self._outbox:
            return
        async with self._take_place():
            while self._outbox:
                await self._wait_for_room()
            if self._error is not None:
                raise self._error

    @asynccontextmanager
    async def _take_place(self) -> AsyncIterator[None]:
        """In the queue of the tasks that wait for room; one at a time does."""
        if self._lock is None:
            self._lock = anyio.Lock()
        self._num_waiting += 1
        try:
            async with self._lock:
                yield
        finally:
            self._num_waiting -= 1

    async def _wait_for_room(self) -> None:
        bell = self.writer.space_bell
        if bell.is_watched:
            if self._room is None:
                self._room = anyio.Event()
            await self._room.wait()
        elif bell.can_watch():
            self.start()
        else:
            # Under trio there are no callbacks: this task does what the loop would do.
            await bell.wait()
            self._on_space()

    def _try_send(self, kind: int, buffers: list[bytes | memoryview]) -> bool:
        """True: the message is in the ring or in the outbox, whole. False: it is nowhere."""
        if self._error is not None:
            raise self._error
        try:
            return self._send_or_queue(kind, buffers)
        except CorruptLinkError as error:
            self._stop(error)
            raise

    def _send_or_queue(self, kind: int, buffers: list[bytes | memoryview]) -> bool:
        if self._outbox:
            self.flush()  # what is still queued after it will be flushed by the space bell
        writer = self.writer
        length = 0
        for buffer in buffers:
            length += len(buffer)
        if length <= writer.max_payload:
            if not self._outbox and writer.try_write(kind, *buffers):
                self._num_messages += 1
                return True
            if self._outbox_bytes + length > self._max_outbox_bytes:
                if not self._outbox:  # nothing is queued that would have asked for room
                    writer.want_space()
                    if writer.try_write(kind, *buffers):
                        self._num_messages += 1
                        return True
                self._num_refused += 1
                return False
            self._outbox.append((kind, 0, b"".join(buffers)))
        else:
            if length > self._max_message_bytes:
                raise ValueError(f"a message of {length} bytes exceeds the limit of {self._max_message_bytes}")
            # What the ring cannot take waits in the outbox. Into an empty outbox a message of any length is let, else
            # one that exceeds its bound could never be sent.
            if self._outbox and self._outbox_bytes + length > self._max_outbox_bytes:
                self._num_refused += 1
                return False
            body = memoryview(b"".join(buffers))
            step = layout.chunk_payload(writer.capacity)
            for start in range(0, length, step):
                more = MORE if start + step < length else 0
                self._outbox.append((kind, more, body[start : start + step]))
            self._num_chunked += 1
        self._num_messages += 1
        self._outbox_bytes += length
        self.flush()
        return True

    def flush(self) -> None:
        """Moves queued frames into the ring while there is room; asks to be rung when some are left."""
        if not self._outbox:
            return
        self._num_flushes += 1
        self._move_queued()
        if self._outbox:
            self.writer.want_space()
            self._move_queued()

    def _move_queued(self) -> None:
        outbox = self._outbox
        for _ in range(self.writer.write_many(outbox)):
            self._outbox_bytes -= len(outbox.popleft()[2])

    def _on_space(self) -> None:
        """The peer made room."""
        self.writer.space_bell.clear()
        self._flush_safely()

    def _flush_safely(self) -> None:
        if self._error is not None:
            return
        try:
            self.flush()
        except CorruptLinkError as error:
            self._stop(error)
            if self._on_error is not None:
                self._on_error(error)
        self._wake_waiters()

    def _wake_waiters(self) -> None:
        room, self._room = self._room, None
        if room is not None:
            room.set()

    def recheck(self) -> bool:
        """Called now and then by the actor runtime: flushes if a doorbell was missed. True if something was moved."""
        if not self._outbox or self._error is not None:
            return False
        was_rung = self.writer.space_bell.clear()  # a doorbell that rings and was not heard yet was not missed
        before = len(self._outbox)
        self._flush_safely()
        has_moved = len(self._outbox) != before
        self._num_rechecks_needed += has_moved and not was_rung
        return has_moved

    def exclude_reader(self, index: int) -> None:
        """The spoke is dead: it holds the sender back no more."""
        if self._error is None:
            self.writer.exclude_reader(index)
            self._flush_safely()

    def _stop(self, error: TransportError) -> None:
        if self._error is None:
            self._error = error
        self.writer.space_bell.unwatch()
        self._outbox.clear()
        self._outbox_bytes = 0

    def close(self) -> None:
        """Ends the channel for good; frames in the ring stay readable, those in the outbox are dropped.

        A task that waits in `send` gets PeerLostError. `await wait_flushed()` first where the peer is to get everything.
        """
        self._stop(PeerLostError("the channel is closed"))
        self.writer.close()
        self._wake_waiters()

    @property
    def outbox_bytes(self) -> int:
        return self._outbox_bytes

    def statistics(self) -> SenderStatistics:
        return SenderStatistics(
            messages=self._num_messages,
            chunked_messages=self._num_chunked,
            refused=self._num_refused,
            outbox_frames=len(self._outbox),
            outbox_bytes=self._outbox_bytes,
            max_outbox_bytes=self._max_outbox_bytes,
            flushes=self._num_flushes,
            rechecks_needed=self._num_rechecks_needed,
            ring=self.writer.statistics(),
        )


class Receiver:
    """The receiving end of a channel. Either `start` it with an `on_frame` callback, or call `receive`.

    Frames are copied out of the ring before they are decoded: arrays may be kept, and a hostile peer cannot change what
    was validated.
    """

    __slots__ = (
        "_error",
        "_frames",
        "_is_paused",
        "_is_turn_scheduled",
        "_max_message_bytes",
        "_num_chunked",
        "_num_cut_short",
        "_num_messages",
        "_num_rechecks_needed",
        "_num_wake_ups",
        "_on_batch",
        "_on_body",
        "_on_error",
        "_on_frame",
        "_partial",
        "_partial_bytes",
        "_partial_kind",
        "reader",
    )

    def __init__(
        self,
        reader: RingReader,
        on_frame: OnFrame | None = None,
        on_error: OnError | None = None,
        *,
        on_batch: Callable[[], object] | None = None,
        on_body: OnBody | None = None,
        max_message_bytes: int = DEFAULT_MAX_MESSAGE_BYTES,
    ) -> None:
        """on_frame(kind, scalars, arrays) runs once per message, in order, and may close the receiver.

        on_body(kind, body) runs in its place, with what nothing has decoded.
        on_batch() runs after each batch of messages that was dispatched: wake the actor there, not per message.
        on_error(error) runs once, when the link must be dropped: CorruptLinkError (something impossible was read, or
        on_frame called `fail`), or PeerLostError (the writer gave this reader up). Nothing is dispatched after it.
        An exception of on_frame goes to the loop's exception handler; the messages behind it are still dispatched.
        """
        self.reader = reader
        self._on_frame = on_frame
        self._on_error = on_error
        self._on_batch = on_batch
        self._on_body = on_body
        self._is_paused = False
        self._max_message_bytes = max_message_bytes
        self._frames: deque[Frame] = deque()  # copied out of the ring, not yet dispatched
        self._partial: list[bytes | memoryview] = []  # chunks of a message whose end has not come
        self._partial_bytes = 0
        self._partial_kind = 0
        self._is_turn_scheduled = False
        self._error: TransportError | None = None
        self._num_messages = self._num_chunked = self._num_wake_ups = 0
        self._num_cut_short = self._num_rechecks_needed = 0

    def start(self) -> None:
        """Dispatches from the running asyncio or uvloop loop, beginning with what is there, until `close`."""
        if self._on_frame is None and self._on_body is None:
            raise RuntimeError("a receiver without on_frame is read with receive()")
        self.reader.bell.watch(self._on_bell)
        self._schedule_turn()

    def pause(self) -> None:
        """Dispatch nothing more until `resume`; the writer finds the ring full, in time."""
        self._is_paused = True

    def resume(self) -> None:
        """Go on."""
        if self._is_paused:
            self._is_paused = False
            if self._error is None:
                self._schedule_turn()

    def _on_bell(self) -> None:
        """The doorbell rang. Cleared before the look at the ring: a frame committed after the look rings again."""
        self.reader.bell.clear()
        self._num_wake_ups += 1
        self._take_turn()

    def _schedule_turn(self) -> None:
        if not self._is_turn_scheduled:
            self._is_turn_scheduled = True
            self.reader.bell.call_soon(self._scheduled_turn)

    def _scheduled_turn(self) -> None:
        self._is_turn_scheduled = False
        self._take_turn()

    def _take_turn(self) -> None:
        """Dispatches a bounded number of batches; asleep afterwards, or scheduled again for the rest."""
        if self._error is not None or self._is_paused:
            return
        reader = self.reader
        try:
            for _ in range(BATCHES_PER_TURN):
                if (
                    self._dispatch_batch() < BATCH_FRAMES
                    and not self._is_paused
                    and (self._error is not None or reader.arm())
                ):
                    return
                if self._is_paused:
                    return
        except BaseException:
            # The handler's bug, and the loop's to report. The frames behind the failed one still have to go out.
            if self._error is None:
                self._schedule_turn()
            raise
        if self._error is not None:
            return
        self._num_cut_short += 1
        self._schedule_turn()

    def _dispatch_batch(self) -> int:
        """Drains one batch and dispatches it; returns its number of frames."""
        frames = self._frames
        on_frame, on_body = self._on_frame, self._on_body
        if on_frame is None and on_body is None:
            raise RuntimeError("a receiver without on_frame is read with receive()")
        if not frames:
            try:
                frames.extend(self.reader.drain(BATCH_FRAMES))
            except TransportError as error:
                self.fail(error)
        count = len(frames)
        if not count:
            return 0
        try:
            while frames and not self._is_paused:  # emptied by whatever stops the receiver
                try:
                    found = self._assemble(frames.popleft())
                    message = None if found is None or on_body is not None else (found[0], *decode(found[1]))
                except CorruptLinkError as error:
                    self.fail(error)
                    break
                if found is None:
                    continue
                self._num_messages += 1
                if message is None:
                    assert on_body is not None
                    on_body(*found)
                else:
                    assert on_frame is not None
                    on_frame(*message)
        finally:
            if self._on_batch is not None:
                self._on_batch()
        return count

    def _assemble(self, frame: Frame) -> tuple[int, bytes | memoryview] | None:
        """Kind and body of the message that the frame is, or ends; None when more frames belong to it."""
        kind, flags, payload = frame
        if flags & MORE or self._partial:
            payload_or_none = self._join_chunk(kind, flags, payload)
            if payload_or_none is None:
                return None
            payload = payload_or_none
        return kind, payload

    def _join_chunk(self, kind: int, flags: int, payload: bytes | memoryview) -> bytes | None:
        if self._partial and kind != self._partial_kind:
            raise CorruptLinkError(f"a chunk of kind {kind} in a message of kind {self._partial_kind}")
        if flags & MORE and len(payload) != layout.chunk_payload(self.reader.capacity):
            raise CorruptLinkError(
                f"a chunk of {len(payload)} bytes, {self.reader.capacity // 8} less a header expected"
            )
        self._partial_kind = kind
        self._partial.append(payload)
        self._partial_bytes += len(payload)
        if self._partial_bytes > self._max_message_bytes:
            raise CorruptLinkError(f"a message of more than {self._max_message_bytes} bytes")
        if flags & MORE:
            return None
        body = b"".join(self._partial)
        self._partial.clear()
        self._partial_bytes = 0
        self._num_chunked += 1
        return body

    def fail(self, error: TransportError) -> None:
        """Stops the receiver and reports `error` to on_error; for an on_frame that got an impossible message."""
        if self._error is not None:
            return
        self._stop(error)
        if self._on_error is not None:
            self._on_error(error)

    def drain_nowait(self) -> int:
        """Dispatches every message committed at this moment; returns how many. For a peer that died: they are valid.

        A handler that pauses the receiver ends it; what is left is dispatched after `resume`.
        """
        if self._error is not None:
            return 0
        self._is_paused = False
        before = self._num_messages
        try:
            target = self.reader.committed_position()
        except TransportError as error:
            self.fail(error)
            return 0
        while self._dispatch_batch() and self._error is None and self.reader.head_position < target:
            if self._is_paused:
                break
        return self._num_messages - before

    def receive_nowait(self) -> Message:
        """The next message. WouldBlock: there is none. PeerLostError: closed, here or by the writer."""
        frames = self._frames
        if self._error is not None:
            raise self._error
        try:
            while True:
                if not frames:
                    frames.extend(self.reader.drain(BATCH_FRAMES))
                    if not frames:
                        # Closed first, then empty: what was committed before the close is delivered.
                        if self.reader.is_writer_closed() and not self.reader.has_frames:
                            raise PeerLostError("the writer closed the channel")
                        raise WouldBlock("no message")
                found = self._assemble(frames.popleft())
                if found is not None:
                    scalars, arrays = decode(found[1])
                    self._num_messages += 1
                    return found[0], scalars, arrays
        except (CorruptLinkError, PeerLostError) as error:
            self._stop(error)
            raise

    async def receive(self) -> Message:
        """Waits for the next message, on asyncio, uvloop and trio; one task at a time. Errors as `receive_nowait`."""
        while True:
            self.reader.disarm()
            self.reader.bell.clear()
            try:
                return self.receive_nowait()
            except WouldBlock:
                if self.reader.arm():
                    await self.reader.bell.wait()
                    self._num_wake_ups += 1
                    if self._error is not None:
                        raise self._error from None

    def recheck(self) -> bool:
        """Called now and then by the actor runtime: dispatches if a doorbell was missed. True if something was there."""
        if self._error is not None or self._is_turn_scheduled or self._is_paused or not self.reader.has_frames:
            return False
        # A doorbell that rings and was not heard yet was not missed.
        self._num_rechecks_needed += not self.reader.bell.clear()
        self._take_turn()
        return True

    def _stop(self, error: TransportError) -> None:
        if self._error is None:
            self._error = error
        self.reader.bell.unwatch()
        self._frames.clear()
        self._partial.clear()
        self._partial_bytes = 0

    def close(self) -> None:
        """Ends the channel for good; what was not dispatched is dropped (`drain_nowait` first, where it counts)."""
        self._stop(PeerLostError("the channel is closed"))
        self.reader.close()

    def statistics(self) -> ReceiverStatistics:
        return ReceiverStatistics(
            messages=self._num_messages,
            chunked_messages=self._num_chunked,
            wake_ups=self._num_wake_ups,
            turns_cut_short=self._num_cut_short,
            rechecks_needed=self._num_rechecks_needed,
            ring=self.reader.statistics(),
        )


# Links as data --------------------------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class LinkEnd:
    """One end of a link as descriptors, to be passed to the process that opens it. The holder owns the descriptors.

    fds: ring down, space bell of it; then for every spoke of this end: data bell down, ring up, data bell up, space bell
    up. A spoke's end lists one spoke, itself. Over a socket the numbers change: `replace(end, fds=received)`.
    """

    generation: int
    num_spokes: int
    index: int | None
    """Which spoke this is; None: the hub."""
    fds: tuple[int, ...]

    def close(self) -> None:
        """For the process that created the link and passed the end on (or could not)."""
        for fd in self.fds:
            os.close(fd)


@dataclass(frozen=True, slots=True)
class LinkEnds:
    """A whole link, as made by `create_link`. Each end has descriptors of its own and is opened or closed by itself."""

    hub: LinkEnd
    spokes: tuple[LinkEnd, ...]

    def close(self) -> None:
        self.hub.close()
        for spoke in self.spokes:
            spoke.close()


def create_link(
    capacity_down: int = DEFAULT_CAPACITY,
    capacity_up: int = DEFAULT_CAPACITY,
    num_spokes: int = 1,
    generation: int = 0,
) -> LinkEnds:
    """A fresh link: one ring of capacity_down bytes from the hub to every spoke, one of capacity_up from each spoke.

    generation: checked by both ends when they open; every (re)start gets a new one. Raises SharedMemoryError.
    """
    link_id = secrets.randbits(64), secrets.randbits(64)
    hub: list[int] = []
    spokes: list[list[int]] = [[] for _ in range(num_spokes)]

    def share(fd: int, *others: list[int]) -> None:
        hub.append(fd)
        for fds in others:
            fds.append(os.dup(fd))

    try:
        share(create_segment(capacity_down, num_readers=num_spokes, generation=generation, link_id=link_id), *spokes)
        share(Doorbell.create().fd, *spokes)
        for spoke in spokes:
            share(Doorbell.create().fd, spoke)
            share(create_segment(capacity_up, generation=generation, link_id=link_id), spoke)
            share(Doorbell.create().fd, spoke)
            share(Doorbell.create().fd, spoke)
    except BaseException:
        for fd in [*hub, *(fd for spoke in spokes for fd in spoke)]:
            os.close(fd)
        raise
    return LinkEnds(
        LinkEnd(generation, num_spokes, None, tuple(hub)),
        tuple(LinkEnd(generation, num_spokes, i, tuple(fds)) for i, fds in enumerate(spokes)),
    )


class _End:
    """What both kinds of end have in common: one sender, some receivers, and one life for all of them."""

    __slots__ = ("generation", "receivers", "sender")

    def __init__(self, generation: int, sender: Sender, receivers: tuple[Receiver, ...]) -> None:
        self.generation = generation
        self.sender = sender
        self.receivers = receivers

    def start(self) -> None:
        """On the running loop: flush when there is room, dispatch what arrives."""
        self.sender.start()
        for receiver in self.receivers:
            receiver.start()

    def recheck(self) -> bool:
        """Makes up for missed doorbells; True if there were any."""
        found = self.sender.recheck()
        for receiver in self.receivers:
            found |= receiver.recheck()
        return found

    def drain_nowait(self) -> int:
        """Dispatches what the peers committed; returns the number of messages."""
        return sum(receiver.drain_nowait() for receiver in self.receivers)

    def close(self) -> None:
        """Stops both directions and closes every descriptor. May be called more than once."""
        self.sender.close()
        for receiver in self.receivers:
            receiver.close()


class Hub(_End):
    """The opened hub: `sender` reaches every spoke, `receivers[i]` hears spoke i."""

    __slots__ = ()

    def exclude_spoke(self, index: int) -> None:
        """The spoke is dead: sending does not wait for it any more, and what it had committed can still be drained."""
        self.sender.exclude_reader(index)


class Spoke(_End):
    """The opened spoke: `sender` reaches the hub, `receiver` hears it."""

    __slots__ = ()

    @property
    def receiver(self) -> Receiver:
        return self.receivers[0]


def open_hub(
    end: LinkEnd,
    *,
    on_frame: Callable[[int, int, Any, list[NDArray[Any]]], object] | None = None,
    on_body: OnBody | None = None,
    on_error: Callable[[int | None, TransportError], object] | None = None,
    on_batch: Callable[[], object] | None = None,
    max_outbox_bytes: int = DEFAULT_MAX_OUTBOX_BYTES,
    max_message_bytes: int = DEFAULT_MAX_MESSAGE_BYTES,
    checksum: bool = False,
    debug: bool = False,
) -> Hub:
    """Opens the hub's end and takes its descriptors over, also when it raises. Not started yet.

    on_frame(spoke, kind, scalars, arrays) and on_error(spoke, error) get the spoke's index first; on_error gets None
    when the words of the ring down are impossible and it is not known whose they are. on_body: in the place of on_frame, of a hub
    with one spoke. Raises CorruptLinkError.
    """
    if end.index is not None:
        raise ValueError(f"this is the end of spoke {end.index}")
    parts = _Parts(end)
    with parts:
        writer = RingWriter(
            parts.segment(0),
            [parts.bell(2 + 4 * i) for i in range(end.num_spokes)],
            parts.bell(1),
            checksum=checksum,
            debug=debug,
        )
        readers = [
            RingReader(parts.segment(3 + 4 * i), parts.bell(4 + 4 * i), parts.bell(5 + 4 * i), debug=debug)
            for i in range(end.num_spokes)
        ]
    sender = Sender(
        writer,
        max_outbox_bytes=max_outbox_bytes,
        max_message_bytes=max_message_bytes,
        on_error=None if on_error is None else partial(on_error, None),
    )
    receivers = tuple(
        Receiver(
            reader,
            None if on_frame is None else partial(on_frame, index),
            None if on_error is None else partial(on_error, index),
            on_batch=on_batch,
            on_body=on_body,
            max_message_bytes=max_message_bytes,
        )
        for index, reader in enumerate(readers)
    )
    return Hub(end.generation, sender, receivers)


def open_spoke(
    end: LinkEnd,
    *,
    on_frame: OnFrame | None = None,
    on_body: OnBody | None = None,
    on_error: OnError | None = None,
    on_batch: Callable[[], object] | None = None,
    max_outbox_bytes: int = DEFAULT_MAX_OUTBOX_BYTES,
    max_message_bytes: int = DEFAULT_MAX_MESSAGE_BYTES,
    checksum: bool = False,
    debug: bool = False,
) -> Spoke:
    """Opens a spoke's end and takes its descriptors over, also when it raises. Not started yet.

    on_error may be called once per direction. Raises CorruptLinkError.
    """
    if end.index is None:
        raise ValueError("this is the hub's end")
    parts = _Parts(end)
    with parts:
        reader = RingReader(parts.segment(0), parts.bell(2), parts.bell(1), index=end.index, debug=debug)
        writer = RingWriter(parts.segment(3), [parts.bell(4)], parts.bell(5), checksum=checksum, debug=debug)
    sender = Sender(writer, max_outbox_bytes=max_outbox_bytes, max_message_bytes=max_message_bytes, on_error=on_error)
    receiver = Receiver(
        reader, on_frame, on_error, on_batch=on_batch, on_body=on_body, max_message_bytes=max_message_bytes
    )
    return Spoke(end.generation, sender, (receiver,))


class _Parts:
    """The descriptors of an end on their way into objects; whatever fails, none is left open.

    As a context: on an error everything is closed; on success segment descriptors are closed (the mappings live on).
    """

    def __init__(self, end: LinkEnd) -> None:
        self._end = end
        self._opened: list[Segment | Doorbell] = []
        self._left = dict(enumerate(end.fds))

    def __enter__(self) -> None:
        expected = 2 + 4 * (self._end.num_spokes if self._end.index is None else 1)
        got = len(self._left)
        if got != expected:
            self.__exit__(CorruptLinkError)
            raise CorruptLinkError(f"an end of {expected} descriptors came with {got}")

    def __exit__(self, error: object, *_: object) -> None:
        for fd in self._left.values():
            os.close(fd)
        self._left.clear()
        if error is not None:
            for part in self._opened:
                part.close()

    def segment(self, position: int) -> Segment:
        segment = Segment.attach(self._left[position])
        self._opened.append(segment)
        if segment.generation != self._end.generation:
            raise CorruptLinkError(f"a ring of generation {segment.generation}, {self._end.generation} expected")
        num_readers = self._end.num_spokes if position == 0 else 1
        if segment.num_readers != num_readers:
            raise CorruptLinkError(f"a ring for {segment.num_readers} readers, {num_readers} expected")
        first = next(part for part in self._opened if isinstance(part, Segment))
        if segment.link_id != first.link_id:
            raise CorruptLinkError("the rings belong to different links")
        return segment

    def bell(self, position: int) -> Doorbell:
        bell = Doorbell.from_fd(self._left.pop(position))
        self._opened.append(bell)
        return bell
