"""Frames of a stream: whole messages come out however the bytes are cut, and nothing else does."""

from __future__ import annotations

import random

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from actorllm.errors import CorruptLinkError
from actorllm.fleet.nodes.frames import BEAT, BEAT_BODY, BULK, CHUNK_BYTES, HEADER, MORE, ORDERED, URGENT, FrameParser
from tests.effort import examples
from tests.fleet.nodes import hostile_frames
from tests.fleet.nodes.hostile_frames import frames_of, received


@settings(max_examples=examples(20, 60), deadline=None)
@given(st.integers(0, 2**32), st.lists(st.integers(0, 4 * CHUNK_BYTES), max_size=12))
def test_messages_come_out_whole_however_the_bytes_are_cut(seed: int, places: list[int]) -> None:
    messages = hostile_frames.traffic(random.Random(seed), is_long=seed % 4 == 0)
    data = b"".join(frames_of(messages))
    cuts = sorted(place % (len(data) + 1) for place in places)
    parser = FrameParser()
    found = received(parser, data, cuts)
    assert [(m.lane, m.kind, m.generation, m.body) for m in found if m.kind is not None] == messages
    assert sum(m.num_bytes for m in found) == len(data)
    assert parser.num_waiting_bytes == 0


def test_a_heartbeat_comes_between_the_chunks_of_a_message() -> None:
    body = bytes(2 * CHUNK_BYTES + 1)
    first, second, third = frames_of([(ORDERED, 8, 1, body)])
    beat = HEADER.pack(BEAT_BODY.size, BEAT, 0, URGENT, 0, 1) + bytes(BEAT_BODY.size)
    renumbered = [
        HEADER.pack(*HEADER.unpack_from(frame)[:5], n) + frame[HEADER.size :] for n, frame in ((2, second), (3, third))
    ]
    found = [m for m in FrameParser().feed(b"".join([first, beat, *renumbered])) if m.kind is not None]
    assert [m.kind for m in found] == [BEAT, 8]
    assert found[1].body == body


def test_a_message_is_bounded_before_it_is_whole() -> None:
    parser = FrameParser(max_message_bytes=2 * CHUNK_BYTES)
    chunks = [HEADER.pack(CHUNK_BYTES, 8, MORE, BULK, 1, n) + bytes(CHUNK_BYTES) for n in range(3)]
    assert len(list(parser.feed(b"".join(chunks[:2])))) == 2
    with pytest.raises(CorruptLinkError, match="more than"):
        list(parser.feed(chunks[2]))


@pytest.mark.parametrize(
    ("header", "what"),
    [
        ((0, 8, 0, ORDERED, 1, 7), "frame 7 of the stream, 0 expected"),
        ((CHUNK_BYTES + 1, 8, 0, ORDERED, 1, 0), "a chunk of 65537 bytes"),
        ((3, 8, MORE, ORDERED, 1, 0), "a chunk of 3 bytes"),
        ((0, 8, 0, 3, 1, 0), "in lane 3"),
        ((0, 8, 0, URGENT, 1, 0), "kind 8 with flags 0x0 in lane 0"),
        ((0, 0, 0, ORDERED, 1, 0), "kind 0"),
        ((1, BEAT, 0, URGENT, 0, 0), "a heartbeat of 1 bytes"),
    ],
)
def test_a_wrong_header_is_named_before_its_payload_is_waited_for(header: tuple[int, ...], what: str) -> None:
    with pytest.raises(CorruptLinkError, match=what):
        list(FrameParser().feed(HEADER.pack(*header)))


def test_changed_frames_are_refused_or_harmless() -> None:
    outcomes = hostile_frames.run(100_000, seed=1)
    refused = sum(number for name, number in outcomes.items() if name.endswith("refused"))
    assert 0.3 < refused / outcomes.total() < 0.95, "or one half of it is not tried"
    assert not outcomes["sequence accepted"] or outcomes["sequence refused"] > 5 * outcomes["sequence accepted"]


@pytest.mark.slow(reason="a million changed streams of frames")
@pytest.mark.timeout(600)
def test_a_million_changed_frames() -> None:
    assert hostile_frames.run(1_000_000, seed=2).total() == 1_000_000
