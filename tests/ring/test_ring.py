"""The ring against a model of queues, the model against mutants of the ring, and the ring against corrupt peers."""

from __future__ import annotations

import collections
import importlib.util
import os
import struct
import sys
import threading
import types
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
from hypothesis import HealthCheck, Phase, given, settings
from hypothesis import strategies as st
from hypothesis.stateful import (
    RuleBasedStateMachine,
    initialize,
    invariant,
    precondition,
    rule,
    run_state_machine_as_test,
)

import actorllm.ring.ring
from actorllm.errors import CorruptLinkError, PeerLostError, TransportError
from actorllm.ring import layout
from actorllm.ring.doorbell import Doorbell
from actorllm.ring.segment import Segment, create_segment
from tests.effort import examples

CAPACITY = 512


def make_machine(ring: Any) -> type[RuleBasedStateMachine]:
    """One writer and up to three readers of the given ring module, next to one deque per reader."""

    class Machine(RuleBasedStateMachine):
        @initialize(num_readers=st.integers(1, 3), checksum=st.booleans(), debug=st.booleans())
        def start(self, num_readers: int, checksum: bool, debug: bool) -> None:
            self.fd = create_segment(CAPACITY, num_readers=num_readers)
            self.bells = [Doorbell.create() for _ in range(num_readers)]
            self.space = Doorbell.create()
            self.options = {"checksum": checksum, "debug": debug}
            self.debug = debug
            self.num_readers = num_readers
            self.segments: list[Segment] = []
            self.writer = self.new_writer()
            self.readers = [self.new_reader(index) for index in range(num_readers)]
            self.words = self.attach().words
            self.queues: list[collections.deque[Any]] = [collections.deque() for _ in range(num_readers)]
            self.unpublished: list[Any] = []
            self.dead: set[int] = set()
            self.asleep: set[int] = set()
            self.is_space_wanted = False
            self.count = 0

        def attach(self) -> Segment:
            self.segments.append(Segment.attach(self.fd))
            return self.segments[-1]

        def new_writer(self) -> Any:
            return ring.RingWriter(self.attach(), self.bells, self.space, **self.options)

        def new_reader(self, index: int) -> Any:
            return ring.RingReader(self.attach(), self.bells[index], self.space, index=index, debug=self.debug)

        def living(self, index: int) -> int | None:
            index %= self.num_readers
            return None if index in self.dead else index

        def committed(self) -> None:
            """The writer published: every living reader that sleeps must have been rung."""
            for index in range(self.num_readers):
                if index not in self.dead:
                    self.queues[index].extend(self.unpublished)
                    if self.unpublished and index in self.asleep:
                        assert self.bells[index].clear(), "a sleeping reader was not rung"
                        self.asleep.discard(index)
            self.unpublished.clear()

        def released(self) -> None:
            """A reader released: a writer that wants space must have been rung."""
            if self.is_space_wanted:
                assert self.space.clear(), "the writer was not rung"
                self.is_space_wanted = False

        @rule(
            length=st.integers(0, layout.max_payload(CAPACITY)),
            cut=st.integers(0, 999),
            publish=st.booleans(),
            flags=st.sampled_from([0, layout.MORE]),
        )
        def write(self, length: int, cut: int, publish: bool, flags: int) -> None:
            kind, _, payload = self.new_frame(0, length, flags)
            cut %= length + 1
            has_room = self.tail_behind(self.writer.tail_position, length) is not None
            written = self.writer.try_write(kind, payload[:cut], payload[cut:], flags=flags, publish=publish)
            assert written == has_room
            if written:
                self.unpublished.append((kind, flags, payload))
                self.count += 1
            else:
                assert not self.writer.has_unpublished, "readers cannot make room for frames they do not see"
            if not self.writer.has_unpublished:
                self.committed()

        def new_frame(self, index: int, length: int, flags: int) -> tuple[int, int, bytes]:
            """The frame that is the index-th from now on."""
            number = self.count + index
            return number & 0xFFFF, flags, bytes((number * 37 + i * 11) & 255 for i in range(length))

        def tail_behind(self, tail: int, length: int) -> int | None:
            """Where a frame at `tail` ends; None: there is no room. An oracle that shares no code with the ring."""
            need = -(-(length + 16) // 16) * 16
            to_end = CAPACITY - tail % CAPACITY
            tail += need if need <= to_end else need + to_end
            heads = [self.words[layout.reader_word(i)] for i in range(self.num_readers) if i not in self.dead]
            return tail if tail - min(heads) <= CAPACITY else None

        @rule(
            lengths=st.lists(st.integers(0, layout.max_payload(CAPACITY) // 2), max_size=6),
            flags=st.sampled_from([0, layout.MORE]),
            is_last_bad=st.booleans(),
        )
        def write_many(self, lengths: list[int], flags: int, is_last_bad: bool) -> None:
            frames = [self.new_frame(index, length, flags) for index, length in enumerate(lengths)]
            if is_last_bad:
                frames.append((1 << 16, 0, b""))
            tail: int | None = self.writer.tail_position
            room = 0
            for _, _, payload in frames:
                tail = self.tail_behind(tail, len(payload))
                if tail is None:
                    break
                room += 1
            if is_last_bad and room == len(frames):
                before = self.writer.tail_position, self.writer.has_unpublished
                with pytest.raises(struct.error):
                    self.writer.write_many(frames)
                assert before == (self.writer.tail_position, self.writer.has_unpublished), "half a batch was written"
                return
            assert self.writer.write_many(frames) == room
            self.unpublished.extend(frames[:room])
            self.count += room
            assert not self.writer.has_unpublished
            self.committed()

        @precondition(lambda self: self.unpublished)
        @rule()
        def publish(self) -> None:
            self.writer.publish()
            self.committed()

        @rule()
        def want_space(self) -> None:
            self.space.clear()
            self.writer.want_space()
            self.is_space_wanted = True

        @rule(index=st.integers(0, 2), limit=st.sampled_from([1, 2, 99]), copy=st.booleans())
        def drain(self, index: int, limit: int, copy: bool) -> None:
            if self.living(index) is None:
                return
            index %= self.num_readers
            reader = self.readers[index]
            frames = reader.drain(limit, copy=copy)
            assert len(frames) == min(limit, len(self.queues[index]))
            while frames:
                kind, flags, payload = frames.pop(0)
                assert (kind, flags & ~layout.CHECKSUM, bytes(payload)) == self.queues[index].popleft()
                assert isinstance(payload, bytes) == copy
                del payload
            reader.release()
            self.released()

        @rule(index=st.integers(0, 2))
        def arm(self, index: int) -> None:
            if self.living(index) is None:
                return
            index %= self.num_readers
            self.bells[index].clear()
            is_armed = self.readers[index].arm()
            assert is_armed == (not self.queues[index])
            if is_armed:
                self.asleep.add(index)

        @rule(index=st.integers(0, 2))
        def disarm(self, index: int) -> None:
            if self.living(index) is not None:
                self.readers[index % self.num_readers].disarm()
                self.asleep.discard(index % self.num_readers)

        @rule()
        def writer_is_replaced(self) -> None:
            """What it had not published is gone; what it had is there."""
            self.writer = self.new_writer()
            self.count -= len(self.unpublished)
            self.unpublished.clear()

        @rule(index=st.integers(0, 2), limit=st.integers(1, 4))
        def reader_is_replaced_before_it_released(self, index: int, limit: int) -> None:
            """Its successor gets the same frames again."""
            if self.living(index) is None:
                return
            index %= self.num_readers
            self.readers[index].drain(limit, copy=False)
            self.readers[index] = self.new_reader(index)
            # The flag is that of the place, not of the process: the successor may be rung for its predecessor.

        @precondition(lambda self: len(self.dead) < self.num_readers - 1)
        @rule(index=st.integers(0, 2))
        def reader_dies(self, index: int) -> None:
            index %= self.num_readers
            self.dead.add(index)
            self.writer.exclude_reader(index)

        @invariant()
        def integrity(self) -> None:
            if not hasattr(self, "queues"):
                return
            self.writer.check_integrity()
            for index, reader in enumerate(self.readers):
                if index not in self.dead:
                    reader.check_integrity()

        def teardown(self) -> None:
            if hasattr(self, "queues"):
                for segment in self.segments:
                    segment.close()
                for bell in [*self.bells, self.space]:
                    bell.close()
                os.close(self.fd)

    return Machine


QUICK = settings(
    stateful_step_count=40,
    deadline=None,
    derandomize=True,
    database=None,
    suppress_health_check=list(HealthCheck),
)


def test_the_ring_behaves_like_queues() -> None:
    run_state_machine_as_test(make_machine(actorllm.ring.ring), settings=settings(QUICK, max_examples=40))


@pytest.mark.slow(reason="1,500 long runs; the quick test has 40")
@pytest.mark.timeout(1800)
def test_the_ring_behaves_like_queues_at_length() -> None:
    run_state_machine_as_test(
        make_machine(actorllm.ring.ring),
        settings=settings(QUICK, max_examples=1500, stateful_step_count=80, derandomize=False),
    )


MUTANTS = {
    "the pad is not accounted": (
        "tail + total - self._slowest_head > capacity",
        "tail + need - self._slowest_head > capacity",
        2,
    ),
    "nobody is rung": ("self._num_bells_rung += 1\n                bell.ring()", "pass", 1),
    "arm does not look again": (
        "if words[TAIL_WORD] != self.head_position:  # SYNC POINT sleep",
        "if False:  # SYNC POINT sleep",
        1,
    ),
    "a dead reader counts": ("if state == DEAD:\n                continue", "if False:\n                continue", 1),
    "the pad has a wrong length": ("offset, room_to_end - 16, 0, PAD", "offset, room_to_end, 0, PAD", 1),
    "released too early": ("        if copy:\n            self.release()", "        self.release()", 1),
    "the writer is not rung": ("self.space_bell.ring()\n        if words", "pass\n        if words", 1),
    "full hides what is unpublished": (
        "self.publish()\n                return False",
        "pass\n                return False",
        1,
    ),
    "a batch is not committed": (
        "        if tail != self._published_position:\n            self.publish()\n        return count",
        "        return count",
        1,
    ),
    "a batch skips the frame there is no room for": (
        "self._num_full += 1\n                    break",
        "continue",
        1,
    ),
    "a batch that failed leaves its limit": (
        "tail, limit = start, new_limit",
        "tail, limit = start, new_limit\n                self._limit = limit",
        1,
    ),
    "room is taken for granted beyond the end of the ring": (
        "min(self._slowest_head + capacity, (tail | self._mask) + 1)",
        "self._slowest_head + capacity",
        1,
    ),
    "a frame wraps": ("total = need if need <= room_to_end else need + room_to_end", "total = need", 1),
    "the successor starts at the tail": (
        "self._released_position = words[self._base + HEAD]",
        "self._released_position = words[self._base + HEAD] = words[TAIL_WORD]",
        1,
    ),
}


def mutant_of(old: str, new: str, count: int) -> types.ModuleType:
    path = actorllm.ring.ring.__file__
    with open(path) as file:
        source = file.read()
    assert source.count(old) == count, "the mutation no longer fits the source"
    spec = importlib.util.spec_from_loader("mutant_ring", loader=None)
    assert spec is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules["mutant_ring"] = module  # dataclasses look their module up
    try:
        exec(compile(source.replace(old, new), "mutant_ring.py", "exec"), module.__dict__)
    finally:
        del sys.modules["mutant_ring"]
    return module


@pytest.mark.parametrize("name", MUTANTS)
def test_the_model_notices(name: str) -> None:
    """Were it not to fail for a ring that is wrong in a known way, its passing would mean nothing."""
    machine = make_machine(mutant_of(*MUTANTS[name]))
    with pytest.raises((AssertionError, TransportError, IndexError, ValueError, struct.error)):
        run_state_machine_as_test(
            machine, settings=settings(QUICK, max_examples=1500, phases=[Phase.generate], report_multiple_bugs=False)
        )


# Corrupt peers --------------------------------------------------------------------------------------------------------


def test_frames_arrive_and_batches_are_published_together(make_ring: Callable[..., Any]) -> None:
    ring = make_ring()
    assert ring.writer.try_write(1, b"one", publish=False)
    assert ring.reader.drain() == []
    assert ring.writer.try_write(2, b"", b"t", memoryview(b"wo"))
    assert ring.reader.drain() == [(1, 0, b"one"), (2, 0, b"two")]
    statistics = ring.writer.statistics(), ring.reader.statistics()
    assert statistics[0].frames == statistics[1].frames == 2
    assert statistics[0].tail_position == statistics[1].head_position == 64
    assert statistics[0].bytes_used == statistics[1].bytes_waiting == 0


def test_a_batch_is_written_as_far_as_there_is_room(make_ring: Callable[..., Any]) -> None:
    ring = make_ring()
    frames = [(kind, 0, bytes([kind]) * 100) for kind in range(6)]  # of 128 bytes each: four fit
    assert ring.reader.arm()
    assert ring.writer.write_many(frames) == 4
    statistics = ring.writer.statistics()
    assert (statistics.frames, statistics.times_full, statistics.bells_rung) == (4, 1, 1)
    assert statistics.bytes_used == ring.reader.statistics().bytes_waiting == 512
    assert ring.writer.write_many(frames[4:]) == 0
    assert ring.reader.drain() == frames[:4]
    assert ring.writer.write_many(frames[4:]) == 2
    assert ring.reader.drain() == frames[4:]
    assert ring.writer.statistics().frames == ring.reader.statistics().frames == 6


def test_a_batch_commits_what_was_written_before_it(make_ring: Callable[..., Any]) -> None:
    ring = make_ring()
    assert ring.writer.write_many([]) == 0
    for batch in ([], [(2, layout.MORE, memoryview(b"two"))]):
        assert ring.writer.try_write(1, b"one", publish=False)
        assert ring.writer.write_many(batch) == len(batch)
        assert ring.reader.drain() == [(1, 0, b"one"), *batch]


def test_of_a_batch_with_a_frame_that_cannot_be_written_nothing_is(make_ring: Callable[..., Any]) -> None:
    ring = make_ring()
    for bad, error in (
        ((1 << 16, 0, b""), struct.error),
        ((1, 0, bytes(ring.writer.max_payload + 1)), ValueError),
        ((1, 0, np.arange(4, dtype=np.int32)), (IndexError, TypeError, ValueError)),
    ):
        with pytest.raises(error):
            ring.writer.write_many([(1, 0, b"good"), bad])
        assert ring.reader.drain() == []
    assert ring.writer.statistics().frames == ring.writer.tail_position == 0
    assert ring.writer.write_many([(1, 0, b"next")]) == 1
    assert ring.reader.drain() == [(1, 0, b"next")]


def test_a_payload_beyond_half_the_ring_is_refused(make_ring: Callable[..., Any]) -> None:
    ring = make_ring()
    assert ring.writer.try_write(1, bytes(ring.writer.max_payload))
    with pytest.raises(ValueError, match="chunks"):
        ring.writer.try_write(1, bytes(ring.writer.max_payload + 1))


def test_a_buffer_that_cannot_be_written_changes_nothing(make_ring: Callable[..., Any]) -> None:
    ring = make_ring()
    with pytest.raises((IndexError, TypeError, ValueError)):
        ring.writer.try_write(1, b"good", np.arange(4, dtype=np.int32))  # len() is not its number of bytes
    with pytest.raises(struct.error):
        ring.writer.try_write(1 << 16, b"good")
    assert ring.writer.try_write(1, b"next")
    assert ring.reader.drain() == [(1, 0, b"next")]


@pytest.mark.parametrize("tail", [8, 40, CAPACITY + 16, 2**63, 2**64 - 16])
def test_an_impossible_tail(make_ring: Callable[..., Any], tail: int) -> None:
    ring = make_ring()
    ring.writer.try_write(1, b"payload")
    ring.segment.words[layout.TAIL_WORD] = tail
    assert not ring.reader.arm()
    for call in (ring.reader.drain, ring.reader.committed_position):
        with pytest.raises(CorruptLinkError, match="tail"):
            call()
    assert ring.reader.head_position == 0
    assert ring.reader.statistics().bytes_waiting <= CAPACITY


def test_a_tail_that_moves_back(make_ring: Callable[..., Any]) -> None:
    ring = make_ring()
    for _ in range(2):
        ring.writer.try_write(1, b"payload")
    assert len(ring.reader.drain()) == 2
    ring.segment.words[layout.TAIL_WORD] = 32
    with pytest.raises(CorruptLinkError):
        ring.reader.drain()


@pytest.mark.parametrize("head", [8, 2**64 - 16, 96, 2**63])
def test_an_impossible_head(make_ring: Callable[..., Any], head: int) -> None:
    ring = make_ring()
    for _ in range(2):
        ring.writer.try_write(1, b"payload")
    ring.segment.words[layout.reader_word(0) + layout.HEAD] = head
    with pytest.raises(CorruptLinkError):
        ring.writer.free_bytes()
    assert 0 <= ring.writer.statistics().bytes_used <= CAPACITY


def test_a_head_that_moves_back(make_ring: Callable[..., Any]) -> None:
    ring = make_ring()
    ring.writer.try_write(1, bytes(100))
    ring.reader.drain()
    ring.writer.free_bytes()
    ring.segment.words[layout.reader_word(0) + layout.HEAD] = 0
    with pytest.raises(CorruptLinkError, match="back"):
        ring.writer.free_bytes()


def test_impossible_flag_words(make_ring: Callable[..., Any]) -> None:
    def fresh(word: int) -> Any:
        ring = make_ring()
        ring.segment.words[word] = 7
        return ring

    with pytest.raises(CorruptLinkError, match="sleep word"):
        fresh(layout.reader_word(0) + layout.SLEEP).writer.try_write(1, b"")
    with pytest.raises(CorruptLinkError, match="unknown state"):
        fresh(layout.reader_word(0) + layout.STATE).writer.free_bytes()
    with pytest.raises(CorruptLinkError, match="unknown state"):
        fresh(layout.reader_word(0) + layout.STATE).reader.release()
    with pytest.raises(CorruptLinkError, match="space word"):
        fresh(layout.SPACE_WANTED_WORD).reader.release()
    with pytest.raises(CorruptLinkError, match="closed word"):
        fresh(layout.CLOSED_WORD).reader.is_writer_closed()


class Hasty:
    """Header words in which one is 1 at the first look and cleared by somebody else before the next."""

    def __init__(self, words: memoryview, word: int) -> None:
        self.words, self.word, self.looks = words, word, 0

    def __getitem__(self, word: int) -> int:
        if word == self.word:
            self.looks += 1
            return 1 if self.looks == 1 else 0
        return self.words[word]

    def __setitem__(self, word: int, value: int) -> None:
        self.words[word] = value


def test_a_peers_word_is_looked_at_once(make_ring: Callable[..., Any]) -> None:
    """A reader may disarm, or another reader may ring the writer, between two looks: no reason to cry corruption."""
    ring = make_ring()
    ring.writer._words = Hasty(ring.writer._words, layout.reader_word(0) + layout.SLEEP)
    ring.writer.try_write(1, b"payload")
    assert ring.writer._words.looks == 1
    ring.writer._words = ring.writer._words.words
    ring.reader._words = Hasty(ring.reader._words, layout.SPACE_WANTED_WORD)
    ring.reader.drain()
    assert ring.reader._words.looks == 1
    ring.reader._words = ring.reader._words.words


@pytest.mark.parametrize(
    ("word", "value"),
    [
        (layout.TAIL_WORD, 8),
        (layout.TAIL_WORD, CAPACITY + 16),
        (layout.reader_word(0) + layout.HEAD, 8),
        (layout.reader_word(0) + layout.HEAD, 16),
        (layout.reader_word(0) + layout.STATE, 9),
    ],
)
def test_ends_refuse_to_open_over_impossible_words(make_ring: Callable[..., Any], word: int, value: int) -> None:
    from actorllm.ring.ring import RingReader, RingWriter

    ring = make_ring()
    ring.segment.words[word] = value
    with pytest.raises(CorruptLinkError):
        RingReader(ring.segment, ring.reader.bell, ring.reader.space_bell)
    with pytest.raises(CorruptLinkError):
        RingWriter(ring.segment, ring.writer.bells, ring.writer.space_bell)


GOOD = (7, 3, 0, 0, 0)  # length, kind, flags, stamp, checksum of the first frame below


@pytest.mark.parametrize(
    ("header", "message"),
    [
        ((7, 3, 0, 1, 0), "stamp"),
        ((7, 3, 0, CAPACITY // 16, 0), "stamp"),  # of the next lap
        ((7, 3, 0, 0xDBDBDBDB, 0), "stamp"),
        ((49, 3, 0, 0, 0), "beyond"),
        ((CAPACITY, 3, 0, 0, 0), "beyond"),
        ((2**32 - 1, 3, 0, 0, 0), "beyond"),
        ((7, 3, 8, 0, 0), "flags"),
        ((7, 3, 0x8000, 0, 0), "flags"),
        ((7, 3, layout.PAD | layout.MORE, 0, 0), "flags"),
        ((7, 3, 0, 0, 5), "checksum"),
        ((7, 3, layout.CHECKSUM, 0, 5), "checksum"),
        ((16, 0, layout.PAD, 0, 0), "pad"),  # does not reach the end of the ring
        ((7, 0, layout.PAD, 0, 0), "pad"),
        ((CAPACITY - 16, 0, layout.PAD, 0, 0), "beyond"),
    ],
)
def test_every_field_of_a_frame_header_is_checked(
    make_ring: Callable[..., Any], header: tuple[int, ...], message: str
) -> None:
    ring = make_ring()
    ring.writer.try_write(3, b"payload")
    ring.writer.try_write(3, b"another")
    memory = ring.segment.memory
    assert struct.unpack_from("<IHHII", memory, layout.HEADER_BYTES) == GOOD
    struct.pack_into("<IHHII", memory, layout.HEADER_BYTES, *header)
    for copy in (True, False):
        with pytest.raises(CorruptLinkError, match=message):
            ring.reader.drain(copy=copy)
    assert ring.reader.head_position == 0


@pytest.mark.parametrize("field", [(CAPACITY - 16 - 272, 5, layout.PAD), (CAPACITY, 0, layout.PAD), (8, 0, layout.PAD)])
def test_a_pad_must_be_exact(make_ring: Callable[..., Any], field: tuple[int, int, int]) -> None:
    ring = make_ring()
    ring.writer.try_write(1, bytes(240))
    ring.writer.try_write(1, b"")
    ring.reader.drain()  # 272 bytes
    ring.writer.try_write(1, bytes(240))  # a pad of 240 bytes, then 256
    position = layout.HEADER_BYTES + 272
    assert struct.unpack_from("<IHH", ring.segment.memory, position) == (CAPACITY - 272 - 16, 0, layout.PAD)
    struct.pack_into("<IHH", ring.segment.memory, position, *field)
    with pytest.raises(CorruptLinkError):
        ring.reader.drain()


def test_good_frames_before_a_corrupt_one_are_delivered(make_ring: Callable[..., Any]) -> None:
    ring = make_ring()
    for index in range(3):
        ring.writer.try_write(index, b"payload")
    struct.pack_into("<I", ring.segment.memory, layout.HEADER_BYTES + 2 * 32, 1 << 20)
    assert [kind for kind, _, _ in ring.reader.drain()] == [0, 1]
    for _ in range(2):
        with pytest.raises(CorruptLinkError, match="position 64"):
            ring.reader.drain()


@settings(max_examples=examples(50, 150), deadline=None, derandomize=True, database=None)
@given(
    stores=st.lists(
        st.tuples(
            st.sampled_from([*range(8, 32), *range(64, 80), *range(512, 512 + CAPACITY // 8)]),
            st.one_of(st.integers(0, 64), st.integers(0, 2**64 - 1), st.integers(0, 64).map(lambda n: 16 * n)),
        ),
        max_size=4,
    ),
    lengths=st.lists(st.integers(0, 240), max_size=8),
)
def test_no_store_of_a_peer_does_more_than_raise(stores: list[tuple[int, int]], lengths: list[int]) -> None:
    """Whatever lies in the header and in the ring: delivered, refused, or one of our errors; and positions stay sane."""
    fd = create_segment(CAPACITY)
    bell, space = Doorbell.create(), Doorbell.create()
    ring = actorllm.ring.ring
    segments = [Segment.attach(fd) for _ in range(3)]
    writer = ring.RingWriter(segments[0], [bell], space, checksum=True)
    reader = ring.RingReader(segments[1], bell, space)
    whole = memoryview(segments[2].memory).cast("Q")
    try:
        for length in lengths:
            writer.try_write(1, bytes(length))
            for word, value in stores:
                whole[word] = value
            for _, _, payload in reader.drain(2):
                assert len(payload) <= CAPACITY
            reader.arm()
    except (CorruptLinkError, PeerLostError):
        pass
    finally:
        whole.release()
        for segment in segments:
            segment.close()
        bell.close()
        space.close()
        os.close(fd)


# Life and death -------------------------------------------------------------------------------------------------------


def test_a_closed_writer_is_seen_and_its_frames_are_read(make_ring: Callable[..., Any]) -> None:
    ring = make_ring()
    ring.reader.arm()
    ring.writer.try_write(1, b"last")
    assert ring.reader.bell.clear()
    assert not ring.reader.is_writer_closed()
    ring.writer.close()
    ring.writer.close()
    assert ring.reader.bell.clear(), "a sleeping reader must hear of the end"
    assert ring.reader.is_writer_closed()
    assert ring.reader.drain() == [(1, 0, b"last")]
    assert ring.writer.statistics().live_readers == 0


def test_a_reader_that_leaves_holds_nobody_back(make_ring: Callable[..., Any]) -> None:
    ring = make_ring(num_readers=2)
    while ring.writer.try_write(1, bytes(100)):
        pass
    ring.readers[0].drain()
    assert not ring.writer.try_write(1, bytes(100))
    ring.writer.want_space()
    ring.readers[1].close()
    assert ring.writer.space_bell.clear()
    assert ring.writer.try_write(1, bytes(100))
    assert ring.writer.statistics().live_readers == 1


def test_an_excluded_reader_that_lives_is_told(make_ring: Callable[..., Any]) -> None:
    ring = make_ring(num_readers=2)
    ring.writer.try_write(1, b"payload")
    ring.writer.exclude_reader(1)
    with pytest.raises(PeerLostError, match="gave this reader up"):
        ring.readers[1].drain()
    assert len(ring.readers[0].drain()) == 1
    with pytest.raises(ValueError, match="no reader 2"):
        ring.writer.exclude_reader(2)


# Debug mode -----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("keep", ["payload", "array", "slice", "view"])
def test_debug_mode_finds_a_view_that_was_kept(make_ring: Callable[..., Any], keep: str) -> None:
    ring = make_ring(debug=True)
    ring.writer.try_write(9, bytes(64))
    payload = ring.reader.drain(copy=False)[0][2]
    array = np.frombuffer(payload, np.int32)
    kept = {"payload": payload, "array": array, "slice": array[3:5], "view": array.view(np.int8).reshape(8, 8)}[keep]
    del payload, array
    with pytest.raises(AssertionError, match=r"kinds \[9\]"):
        ring.reader.release()
    del kept


def test_debug_mode_fills_released_bytes(make_ring: Callable[..., Any]) -> None:
    ring = make_ring(debug=True)
    ring.writer.try_write(9, b"secret")
    frames = ring.reader.drain(copy=False)
    assert bytes(frames[0][2]) == b"secret"
    frames.clear()
    ring.reader.release()
    assert ring.segment.memory[layout.HEADER_BYTES : layout.HEADER_BYTES + 32] == b"\xdb" * 32


def test_debug_mode_asserts_one_thread(make_ring: Callable[..., Any]) -> None:
    ring = make_ring(debug=True)
    ring.writer.try_write(1, b"")
    errors: list[BaseException] = []

    def elsewhere() -> None:
        try:
            ring.writer.try_write(1, b"")
        except AssertionError as error:
            errors.append(error)

    thread = threading.Thread(target=elsewhere)
    thread.start()
    thread.join()
    assert len(errors) == 1


def test_ends_check_their_arguments(make_ring: Callable[..., Any]) -> None:
    from actorllm.ring.ring import RingReader, RingWriter

    ring = make_ring(num_readers=2)
    with pytest.raises(ValueError, match="as many bells"):
        RingWriter(ring.segment, ring.writer.bells[:1], ring.writer.space_bell)
    with pytest.raises(ValueError, match="reader 2"):
        RingReader(ring.segment, ring.reader.bell, ring.reader.space_bell, index=2)
