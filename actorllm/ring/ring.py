"""A byte ring in shared memory: one writer, N readers that each see every frame (N = 1: a plain queue).

Owns the protocol: which side stores which word, in which order, and what is checked when a peer's word is read. Positions are
absolute byte counts: `tail_position` of the writer, `head_position` of a reader.

Invariants
  1. Every word has one writer. SLEEP and SPACE_WANTED are set by the sleeper and cleared by the waker, which then rings.
  2. 0 <= TAIL - HEAD <= capacity and all positions are multiples of 16; checked at every read of a peer's word. A
     violation, like any other impossible value, raises CorruptLinkError before anything is used: drop the link.
  3. TAIL is the only commit. A writer killed in a frame leaves bytes beyond TAIL, which are never looked at.
  4. A frame never wraps, and the room of the PAD before it is accounted before anything is written.
  5. A reader's HEAD moves after the reads of what it releases; a successor gets the unreleased frames again.
  6. A side that is about to sleep sets its word, fences, and looks again; the other side stores, fences, and looks at that
     word. One of the two sees the other (Dekker), so no wake-up is lost.

The fence is the release and the acquisition of a lock that is always held. In that order it is a full barrier on x86
and ARMv8 alike: everything before the unlock is ordered before everything after the lock. Without it 27 of 600,000
trials lost a wake-up on x86. The two ends of each pairing carry the same SYNC POINT name.

One object belongs to one thread, and is not re-entrant: never call it from a signal handler or a finalizer. Callers:
channel.Sender and channel.Receiver.
"""

from __future__ import annotations

import os
import threading
import weakref
import zlib
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from typing import Any, TypeAlias

import numpy as np

from actorllm.errors import CorruptLinkError, PeerLostError
from actorllm.ring.doorbell import Doorbell
from actorllm.ring.layout import (
    ACTIVE,
    CHECKSUM,
    CLOSED_WORD,
    DEAD,
    EXPECTED,
    FRAME_HEADER,
    FRAME_HEADER_BYTES,
    HEAD,
    HEADER_BYTES,
    KNOWN_FLAGS,
    MAX_READERS,
    PAD,
    READER_PID,
    READER_START,
    SLEEP,
    SPACE_WANTED_WORD,
    STAMP_MASK,
    STATE,
    TAIL_WORD,
    WRITER_PID_WORD,
    WRITER_START_WORD,
    max_payload,
    reader_word,
)
from actorllm.ring.segment import Segment, process_start_time

Frame: TypeAlias = tuple[int, int, bytes | memoryview]
"""(kind, flags, payload)."""

RELEASED_BYTE = 0xDB
"""What debug readers fill released bytes with, so that a view that was kept shows nonsense and not the next frame."""

_pack_frame_header = FRAME_HEADER.pack_into
_unpack_frame_header = FRAME_HEADER.unpack_from


@dataclass(frozen=True, slots=True)
class WriterStatistics:
    """Of one writer object; positions are bytes since the ring was made, frame headers and pads included."""

    frames: int
    tail_position: int
    capacity: int
    bytes_used: int
    """Committed and not yet released by the slowest living reader."""
    times_full: int
    bells_rung: int
    live_readers: int


@dataclass(frozen=True, slots=True)
class ReaderStatistics:
    """Of one reader, since it was made."""

    frames: int
    head_position: int
    capacity: int
    bytes_waiting: int
    """Committed by the writer and not yet read."""
    batches: int
    space_bells_rung: int


class RingWriter:
    """The writing end. Owns the segment's mapping, the readers' bells (to ring) and the space bell (to wait on)."""

    __slots__ = (
        "_capacity",
        "_checksum",
        "_debug",
        "_fence_acquire",
        "_fence_release",
        "_limit",
        "_mask",
        "_max_need",
        "_memory",
        "_num_bells_rung",
        "_num_frames",
        "_num_full",
        "_owner",
        "_published_position",
        "_segment",
        "_sleepers",
        "_slowest_head",
        "_words",
        "bells",
        "is_closed",
        "max_payload",
        "space_bell",
        "tail_position",
    )

    def __init__(
        self,
        segment: Segment,
        bells: Sequence[Doorbell],
        space_bell: Doorbell,
        *,
        checksum: bool = False,
        debug: bool = False,
    ) -> None:
        """Goes on at the committed tail, whichever writer was there before.

        checksum: put a crc32 into every frame (0.2 µs at 200 B, 9 µs at 64 KiB; tests and debugging).
        debug: assert that one thread uses the object.
        """
        if len(bells) != segment.num_readers:
            raise ValueError(f"{segment.num_readers} readers need as many bells, not {len(bells)}")
        self._segment = segment
        self._memory = segment.memory
        self._words = words = segment.words
        self._capacity = segment.capacity
        self._mask = segment.capacity - 1
        self._max_need = segment.capacity >> 1
        self.max_payload = max_payload(segment.capacity)
        self.bells = tuple(bells)
        self.space_bell = space_bell
        self._sleepers = tuple((reader_word(i) + SLEEP, bell) for i, bell in enumerate(bells))
        self._checksum = checksum
        self._debug = debug
        self._owner: int | None = None
        lock = threading.Lock()
        lock.acquire()
        self._fence_release: Callable[[], object] = lock.release
        self._fence_acquire: Callable[[], object] = lock.acquire
        self._num_frames = self._num_full = self._num_bells_rung = 0
        self.is_closed = False
        self.tail_position = self._published_position = words[TAIL_WORD]
        if self.tail_position % 16:
            raise CorruptLinkError(f"tail {self.tail_position} is not a multiple of 16")
        self._slowest_head = 0
        self._slowest_head = self._read_heads()
        # Up to here frames fit behind tail_position without a pad and without another look at the heads.
        self._limit = self.tail_position
        pid = os.getpid()
        words[WRITER_START_WORD] = process_start_time(pid) or 0
        words[WRITER_PID_WORD] = pid

    @property
    def has_unpublished(self) -> bool:
        return self.tail_position != self._published_position

    @property
    def capacity(self) -> int:
        return self._capacity

    def try_write(self, kind: int, *buffers: Any, flags: int = 0, publish: bool = True) -> bool:
        """Writes one frame whose payload is the buffers one after the other; False when there is no room for it.

        kind, flags: 16 bits; of the flags only MORE is the caller's. buffers: contiguous, of single bytes. With publish
        False the frame stays invisible until `publish`, or until the ring is full. ValueError: longer than max_payload.
        """
        if self._debug:
            self._assert_owner()
        length = len(buffers[0]) if len(buffers) == 1 else sum(map(len, buffers))
        need = (length + 31) & -16  # header and fill included
        tail = self.tail_position
        limit = self._limit
        if tail + need > limit or need > self._max_need:
            tail, limit = self._make_room(tail, need)
            if not limit:
                self._num_full += 1
                if self.tail_position != self._published_position:
                    self.publish()
                return False
        stamp = tail >> 4 & STAMP_MASK
        checksum = 0
        if self._checksum:
            flags |= CHECKSUM
            checksum = stamp
            for buffer in buffers:
                checksum = zlib.crc32(buffer, checksum)
        memory = self._memory
        position = HEADER_BYTES + (tail & self._mask)
        _pack_frame_header(memory, position, length, kind, flags, stamp, checksum)
        position += FRAME_HEADER_BYTES
        for buffer in buffers:
            end = position + len(buffer)
            memory[position:end] = buffer
            position = end
        self.tail_position = tail + need
        self._limit = limit
        self._num_frames += 1
        if publish:
            self.publish()
        return True

    def write_many(self, frames: Iterable[Frame]) -> int:
        """Writes as many of the frames as there is room for, the first ones; returns how many. Commits them together.

        For messages that are all there already: one commit and at most one bell per reader for the lot, 0.25 µs per
        frame of 200 B where `try_write` takes 0.8. Readers see none before the last is written, so the shorter the
        batches the sooner they begin. Arguments as for `try_write`; an exception, and none of the frames is written.
        """
        if self._debug:
            self._assert_owner()
        memory, mask, max_need, has_checksum = self._memory, self._mask, self._max_need, self._checksum
        tail, limit = self.tail_position, self._limit
        count = checksum = 0
        for kind, flags, payload in frames:
            length = len(payload)
            need = (length + 31) & -16
            if tail + need > limit or need > max_need:
                start, new_limit = self._make_room(tail, need)
                if not new_limit:
                    self._num_full += 1
                    break
                tail, limit = start, new_limit
            stamp = tail >> 4 & STAMP_MASK
            if has_checksum:
                flags |= CHECKSUM
                checksum = zlib.crc32(payload, stamp)
            position = HEADER_BYTES + (tail & mask)
            _pack_frame_header(memory, position, length, kind, flags, stamp, checksum)
            position += FRAME_HEADER_BYTES
            end = position + length
            memory[position:end] = payload
            tail += need
            count += 1
        self.tail_position = tail
        self._limit = limit
        self._num_frames += count
        if tail != self._published_position:
            self.publish()
        return count

    def _make_room(self, tail: int, need: int) -> tuple[int, int]:
        """Where `need` bytes can be written, at `tail` or behind a pad that is due, and the `_limit` that holds there.

        A limit of 0: there is no room. Changes nothing but bytes beyond TAIL: the caller stores both once its frames are
        whole, together, since a limit is of one lap; so frames that fail half-way leave no trace.
        """
        capacity = self._capacity
        if need > self._max_need:
            raise ValueError(f"a frame of {need} bytes: a payload has up to {self.max_payload}, send it in chunks")
        offset = tail & self._mask
        room_to_end = capacity - offset
        total = need if need <= room_to_end else need + room_to_end
        if tail + total - self._slowest_head > capacity:
            self._slowest_head = self._read_heads()
            if tail + total - self._slowest_head > capacity:
                return tail, 0
        if total != need:
            stamp = tail >> 4 & STAMP_MASK
            _pack_frame_header(self._memory, HEADER_BYTES + offset, room_to_end - 16, 0, PAD, stamp, 0)
            tail += room_to_end
        return tail, min(self._slowest_head + capacity, (tail | self._mask) + 1)

    def publish(self) -> None:
        """Commits all frames written so far and wakes the readers that sleep."""
        words = self._words
        release, acquire = self._fence_release, self._fence_acquire
        tail = self.tail_position
        release()
        acquire()
        words[TAIL_WORD] = tail  # SYNC POINT commit: the payload before TAIL
        self._published_position = tail
        release()
        acquire()
        for sleep_word, bell in self._sleepers:
            sleeps = words[sleep_word]  # SYNC POINT sleep: TAIL before the look at SLEEP
            if sleeps:
                if sleeps != 1:
                    raise CorruptLinkError(f"a reader's sleep word is {sleeps:#x}")
                words[sleep_word] = 0
                self._num_bells_rung += 1
                bell.ring()

    def want_space(self) -> None:
        """Asks to be rung at the next release. Try once more after it: room made meanwhile rings no bell."""
        self._words[SPACE_WANTED_WORD] = 1
        self._fence_release()
        self._fence_acquire()  # SYNC POINT space: SPACE_WANTED before the look at HEAD

    def free_bytes(self) -> int:
        """Room for frames, their headers and pads; only grows until the next write."""
        self._slowest_head = self._read_heads()
        return self._capacity - (self.tail_position - self._slowest_head)

    def _read_heads(self) -> int:
        """The position that the slowest living reader has released; with none alive, the tail: nothing waits."""
        words = self._words
        slowest = published = self._published_position
        for index in range(len(self.bells)):
            base = reader_word(index)
            state = words[base + STATE]
            if state == DEAD:
                continue
            if state > DEAD:
                raise CorruptLinkError(f"reader {index} is in the unknown state {state}")
            head = words[base + HEAD]
            used = published - head
            if used & 15 or not 0 <= used <= self._capacity:
                raise CorruptLinkError(f"reader {index} released up to {head}, the tail is at {published}")
            if head < slowest:
                slowest = head
        if slowest < self._slowest_head:
            raise CorruptLinkError(f"a reader moved its head back from {self._slowest_head} to {slowest}")
        self._fence_release()
        self._fence_acquire()  # SYNC POINT reclaim: HEAD before the bytes it releases are overwritten
        return slowest

    def exclude_reader(self, index: int) -> None:
        """The reader is dead: the writer waits for it no more. If it lives nevertheless, it is told at its release."""
        if not 0 <= index < len(self.bells):
            raise ValueError(f"there is no reader {index}")
        self._words[reader_word(index) + STATE] = DEAD

    def check_integrity(self) -> None:
        """Asserts the invariants on the writer's side; for tests."""
        words = self._words
        assert words[TAIL_WORD] == self._published_position, "another writer moved TAIL"
        assert self.tail_position % 16 == 0
        assert 0 <= self.tail_position - self._published_position <= self._capacity
        slowest = self._read_heads()
        assert 0 <= self.tail_position - slowest <= self._capacity, "bytes were overwritten before their release"

    def statistics(self) -> WriterStatistics:
        bases = [] if self.is_closed else [reader_word(index) for index in range(len(self.bells))]
        living = [base for base in bases if self._words[base + STATE] != DEAD]
        slowest = min((self._words[base + HEAD] for base in living), default=self.tail_position)
        return WriterStatistics(
            frames=self._num_frames,
            tail_position=self.tail_position,
            capacity=self._capacity,
            bytes_used=min(max(self.tail_position - slowest, 0), self._capacity),
            times_full=self._num_full,
            bells_rung=self._num_bells_rung,
            live_readers=len(living),
        )

    def close(self) -> None:
        """Tells the readers that nothing will follow, and gives mapping and doorbells back. Frames stay readable."""
        if self.is_closed:
            return
        self.is_closed = True
        self._words[CLOSED_WORD] = 1
        self._fence_release()
        self._fence_acquire()
        for bell in self.bells:
            bell.ring()
            bell.close()
        self.space_bell.close()
        self._segment.close()

    def _assert_owner(self) -> None:
        thread = threading.get_ident()
        if self._owner is None:
            self._owner = thread
        assert self._owner == thread, "a ring end belongs to the thread that used it first"


class RingReader:
    """One reading end. Owns the segment's mapping, its bell (to wait on) and a space bell (to ring)."""

    __slots__ = (
        "_base",
        "_capacity",
        "_debug",
        "_fence_acquire",
        "_fence_release",
        "_lent",
        "_mask",
        "_memory",
        "_num_batches",
        "_num_frames",
        "_num_space_bells",
        "_owner",
        "_released_position",
        "_segment",
        "_sleep_word",
        "_state_word",
        "_words",
        "bell",
        "head_position",
        "is_closed",
        "space_bell",
    )

    def __init__(
        self, segment: Segment, bell: Doorbell, space_bell: Doorbell, *, index: int = 0, debug: bool = False
    ) -> None:
        """Goes on at the released head, whichever reader had this index before.

        debug: assert that one thread uses the object, fill released bytes (when this is the only reader), and fail a
        `release` while a view lent by drain(copy=False) is still held.
        """
        if not 0 <= index < segment.num_readers <= MAX_READERS:
            raise ValueError(f"reader {index} of a ring for {segment.num_readers}")
        self._segment = segment
        self._memory = segment.memory
        self._words = words = segment.words
        self._capacity = segment.capacity
        self._mask = segment.capacity - 1
        self._base = reader_word(index)
        self._sleep_word = self._base + SLEEP
        self._state_word = self._base + STATE
        self.bell = bell
        self.space_bell = space_bell
        self._debug = debug
        self._owner: int | None = None
        self._lent: list[tuple[int, weakref.ref[Any]]] = []
        lock = threading.Lock()
        lock.acquire()
        self._fence_release: Callable[[], object] = lock.release
        self._fence_acquire: Callable[[], object] = lock.acquire
        self._num_frames = self._num_batches = self._num_space_bells = 0
        self.is_closed = False
        self.head_position = self._released_position = words[self._base + HEAD]
        if self.head_position % 16:
            raise CorruptLinkError(f"head {self.head_position} is not a multiple of 16")
        self._waiting_bytes(words[TAIL_WORD])
        if words[self._state_word] not in (EXPECTED, ACTIVE):
            raise self._impossible(f"reader {index} is in the unknown state {words[self._state_word]}")
        pid = os.getpid()
        words[self._base + READER_START] = process_start_time(pid) or 0
        words[self._base + READER_PID] = pid
        words[self._state_word] = ACTIVE

    @property
    def capacity(self) -> int:
        return self._capacity

    @property
    def has_frames(self) -> bool:
        return self._words[TAIL_WORD] != self.head_position

    def committed_position(self) -> int:
        """The writer's committed tail."""
        tail = self._words[TAIL_WORD]
        self._waiting_bytes(tail)
        return tail

    def _waiting_bytes(self, tail: int) -> int:
        waiting = tail - self.head_position
        if waiting & 15 or not 0 <= waiting <= self._capacity:
            raise self._impossible(f"the tail is at {tail}, the head at {self.head_position}")
        return waiting

    def _impossible(self, what: str) -> CorruptLinkError | PeerLostError:
        """The writer runs over a reader that it gave up, so that explains whatever such a reader finds."""
        if self._words[self._state_word] == DEAD:
            return PeerLostError("the writer gave this reader up")
        return CorruptLinkError(what)

    def drain(self, limit: int = 64, *, copy: bool = True) -> list[Frame]:
        """Up to `limit` frames, oldest first; [] when there are none.

        With copy the payloads are bytes and the room is released before the return. Without, they are views into the
        ring that are valid until `release`, and a hostile peer may change them under the reader's eyes. Frames before a
        corrupt one are returned; the next call raises CorruptLinkError.
        """
        words = self._words
        head = self.head_position
        tail = words[TAIL_WORD]  # SYNC POINT commit: TAIL before the payload
        if tail == head:
            return []
        if self._debug:
            self._assert_owner()
        waiting = tail - head
        capacity = self._capacity
        # TAIL is the peer's word: a value that cannot be is found here, before any byte is read by it.
        if waiting & 15 or not 0 < waiting <= capacity:
            raise self._impossible(f"the tail is at {tail}, the head at {head}")
        self._fence_release()
        self._fence_acquire()
        frames: list[Frame] = []
        problem = None
        memory, view, unpack = self._memory, self._segment.view, _unpack_frame_header
        while head != tail and limit and problem is None:
            # One run of frames that follow each other in memory: up to the tail, or to the end of the ring.
            offset = head & self._mask
            start = position = HEADER_BYTES + offset
            stop = position + min(tail - head, capacity - offset)
            expected = head >> 4 & STAMP_MASK  # 32 bits overflow between two laps, never within one
            while position != stop and limit:
                length, kind, flags, stamp, checksum = unpack(memory, position)
                need = (length + 31) & -16
                # The header is the peer's as well. Each check bounds what the next one, and the copy, relies on.
                if stamp != expected:
                    problem = f"stamp {stamp:#x}"
                    break
                if need > stop - position:
                    problem = f"a payload of {length} bytes beyond the committed ones"
                    break
                # Rare: a pad at the end of the ring, a checksum in tests, or corruption.
                if flags or checksum:
                    if flags == PAD:
                        if need != capacity + HEADER_BYTES - position or length & 15 or kind or checksum:
                            problem = f"a pad of {length} bytes that does not end with the ring"
                            break
                        position = stop
                        break
                    if flags & ~KNOWN_FLAGS or flags & PAD:
                        problem = f"flags {flags:#x}"
                        break
                    if checksum and not flags & CHECKSUM:
                        problem = f"a checksum {checksum:#x} without its flag"
                        break
                begin = position + FRAME_HEADER_BYTES
                payload: bytes | memoryview
                payload = memory[begin : begin + length] if copy else self._lend(view, begin, length, kind)
                if flags & CHECKSUM and zlib.crc32(payload, stamp) != checksum:
                    problem = f"checksum {checksum:#x}"
                    break
                frames.append((kind, flags, payload))
                limit -= 1
                position += need
                expected += need >> 4
            head += position - start
        self.head_position = head
        self._num_frames += len(frames)
        self._num_batches += 1
        # Good frames before a corrupt one are handed out first. The head stays before it, so the next call raises.
        if problem is not None and not frames:
            raise self._impossible(f"{problem} in the frame at position {head}")
        if copy:
            self.release()
        return frames

    def release(self) -> None:
        """Gives the room of everything drained so far back to the writer. PeerLostError: it gave this reader up."""
        words = self._words
        if self._debug:
            self._check_lent()
            self._fill_released()
        self._fence_release()
        self._fence_acquire()
        # SYNC POINT reclaim: the reads of the payload before HEAD
        words[self._base + HEAD] = self._released_position = self.head_position
        self._fence_release()
        self._fence_acquire()
        wanted = words[SPACE_WANTED_WORD]  # SYNC POINT space: HEAD before the look at SPACE_WANTED
        if wanted:  # looked at once: another reader may clear it meanwhile
            if wanted != 1:
                raise CorruptLinkError(f"the writer's space word is {wanted:#x}")
            words[SPACE_WANTED_WORD] = 0
            self._num_space_bells += 1
            self.space_bell.ring()
        if words[self._state_word] != ACTIVE:
            # What was just copied may have been overwritten under our eyes: the writer does not wait for us any more.
            raise self._impossible(f"this reader is in the unknown state {words[self._state_word]}")

    def arm(self) -> bool:
        """Asks to be rung. True: safe to sleep until the bell rings. False: there are frames, drain them first."""
        words = self._words
        words[self._sleep_word] = 1
        self._fence_release()
        self._fence_acquire()
        if words[TAIL_WORD] != self.head_position:  # SYNC POINT sleep: SLEEP before the look at TAIL
            words[self._sleep_word] = 0
            return False
        return True

    def disarm(self) -> None:
        """Awake: the writer need not ring."""
        self._words[self._sleep_word] = 0

    def is_writer_closed(self) -> bool:
        """The writer said that nothing will follow what is committed."""
        closed = self._words[CLOSED_WORD]
        if closed > 1:
            raise CorruptLinkError(f"the writer's closed word is {closed:#x}")
        return closed == 1

    def check_integrity(self) -> None:
        """Asserts the invariants on the reader's side and walks all committed frames; for tests."""
        words = self._words
        assert words[self._base + HEAD] == self._released_position, "another reader moved HEAD"
        tail = self.committed_position()
        assert 0 <= tail - self._released_position <= self._capacity
        position = self._released_position
        while position != tail:
            offset = position & self._mask
            length, _, flags, stamp, _ = _unpack_frame_header(self._memory, HEADER_BYTES + offset)
            need = (length + 31) & -16
            assert stamp == position >> 4 & STAMP_MASK, "a committed frame was overwritten"
            assert not flags & ~KNOWN_FLAGS
            assert need <= min(tail - position, self._capacity - offset), "a frame wraps"
            assert flags != PAD or need == self._capacity - offset
            position += need

    def statistics(self) -> ReaderStatistics:
        tail = self.head_position if self.is_closed else self._words[TAIL_WORD]
        return ReaderStatistics(
            frames=self._num_frames,
            head_position=self.head_position,
            capacity=self._capacity,
            bytes_waiting=min(max(tail - self.head_position, 0), self._capacity),
            batches=self._num_batches,
            space_bells_rung=self._num_space_bells,
        )

    def close(self) -> None:
        """Leaves: the writer waits for this reader no more. Gives mapping and doorbells back."""
        if self.is_closed:
            return
        self.is_closed = True
        self._words[self._state_word] = DEAD
        self._fence_release()
        self._fence_acquire()
        self.space_bell.ring()
        self.space_bell.close()
        self.bell.close()
        self._segment.close()

    def _lend(self, view: memoryview, position: int, length: int, kind: int) -> memoryview:
        """A view of one payload; in debug mode one whose death can be observed.

        numpy and torch re-wrap a memoryview, so its own reference says nothing about what still looks at the bytes. All
        of them keep the exporting array alive, so that is what is watched.
        """
        if not self._debug:
            return view[position : position + length]
        exporter = np.frombuffer(self._memory, np.uint8, length, position)
        self._lent.append((kind, weakref.ref(exporter)))
        return exporter.data

    def _check_lent(self) -> None:
        kept = [kind for kind, reference in self._lent if reference() is not None]
        self._lent.clear()
        if kept:
            raise AssertionError(f"views of frames of the kinds {kept} are held beyond release()")

    def _fill_released(self) -> None:
        if self._segment.num_readers > 1:
            return  # another reader may still have to see these bytes
        start, end = self._released_position, self.head_position
        while start < end:
            offset = start & self._mask
            count = min(end - start, self._capacity - offset)
            self._memory[HEADER_BYTES + offset : HEADER_BYTES + offset + count] = bytes([RELEASED_BYTE]) * count
            start += count

    def _assert_owner(self) -> None:
        thread = threading.get_ident()
        if self._owner is None:
            self._owner = thread
        assert self._owner == thread, "a ring end belongs to the thread that used it first"
