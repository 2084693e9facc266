"""A hostile peer of a stream: one change at a random place of good frames, or bytes of no meaning.

What must hold: whatever is found wrong is a CorruptLinkError, and nothing is delivered after it. What was delivered before was
sent, in its order. What waits is bounded by what came. `run(trials, seed)` counts both outcomes.
"""

from __future__ import annotations

import random
from collections import Counter

from actorllm.errors import CorruptLinkError
from actorllm.fleet.nodes.frames import (
    BEAT,
    BEAT_BODY,
    BULK,
    CHUNK_BYTES,
    CONTROL,
    HEADER,
    ORDERED,
    URGENT,
    FrameParser,
    StreamMessage,
    chunks_of,
)

MAX_MESSAGE_BYTES = 3 * CHUNK_BYTES
FIELDS = ("length", "kind", "flags", "lane", "generation", "sequence")
EDGES = (0, 1, 2, 3, 7, 0xFF, 0xFFFF, CHUNK_BYTES, CHUNK_BYTES + 1, 0xFFFFFFFF)


def frames_of(messages: list[tuple[int, int, int, bytes]]) -> list[bytes]:
    """Of (lane, kind, generation, body), the frames that a good writer makes."""
    frames: list[bytes] = []
    for lane, kind, generation, body in messages:
        for flags, payload in chunks_of(body):
            header = HEADER.pack(len(payload), kind, flags, lane, generation, len(frames))
            frames.append(header + payload)
    return frames


def traffic(rng: random.Random, *, is_long: bool = False) -> list[tuple[int, int, int, bytes]]:
    """A few messages of all lanes."""
    messages = []
    for _ in range(rng.randint(1, 6)):
        lane = rng.choice((URGENT, ORDERED, ORDERED, BULK))
        if lane == URGENT:
            messages.append((lane, BEAT, 0, BEAT_BODY.pack(rng.random(), 0.0, 0.0, 0)))
        else:
            size = rng.choice((0, 1, 50, 700)) if not is_long else rng.randint(CHUNK_BYTES, 2 * CHUNK_BYTES + 5)
            messages.append((lane, rng.choice((1, 8, 10, CONTROL)), rng.randint(1, 3), rng.randbytes(size)))
    return messages


def _changed(rng: random.Random, frames: list[bytes]) -> tuple[str, bytes]:
    """One change, and what was changed."""
    at = rng.randrange(len(frames))
    frame = bytearray(frames[at])
    target = rng.choice((*FIELDS, *FIELDS, "cut", "twice", "left out", "swapped", "bit", "garbage"))
    frames = list(frames)
    if target in FIELDS:
        values = list(HEADER.unpack_from(frame))
        place = FIELDS.index(target)
        bits = (32, 16, 8, 8, 32, 32)[place]
        values[place] = rng.choice((rng.getrandbits(bits), *(edge & ((1 << bits) - 1) for edge in EDGES)))
        HEADER.pack_into(frame, 0, *values)
        frames[at] = bytes(frame)
    elif target == "cut":
        frames[at] = bytes(frame[: rng.randrange(len(frame))])
    elif target == "twice":
        frames.insert(at, bytes(frame))
    elif target == "left out":
        del frames[at]
    elif target == "swapped":
        other = rng.randrange(len(frames))
        frames[at], frames[other] = frames[other], frames[at]
    elif target == "bit":
        frame[rng.randrange(len(frame))] ^= 1 << rng.randrange(8)
        frames[at] = bytes(frame)
    else:
        frames[at] = rng.randbytes(rng.randint(1, 200))
    return target, b"".join(frames)


def received(parser: FrameParser, data: bytes, cuts: list[int]) -> list[StreamMessage]:
    """What a parser makes of bytes that come in pieces."""
    found: list[StreamMessage] = []
    for start, end in zip([0, *cuts], [*cuts, len(data)], strict=True):
        found += parser.feed(data[start:end])
        assert parser.num_waiting_bytes <= end
    return found


def run(trials: int, seed: int) -> Counter[str]:
    """How many trials were refused and how many accepted, by what was changed."""
    rng = random.Random(seed)
    outcomes: Counter[str] = Counter()
    for trial in range(trials):
        messages = traffic(rng, is_long=trial % 50 == 0)
        target, data = _changed(rng, frames_of(messages))
        parser = FrameParser(MAX_MESSAGE_BYTES)
        cut = rng.randint(0, len(data))
        found: list[StreamMessage] = []
        try:
            for piece in (data[:cut], data[cut:]):
                found.extend(parser.feed(piece))
        except CorruptLinkError:
            outcomes[f"{target} refused"] += 1
        else:
            outcomes[f"{target} accepted"] += 1
        assert parser.num_waiting_bytes <= len(data)
        assert sum(len(message.body) for message in found) <= len(data)
        whole = [(m.lane, m.kind, m.generation, m.body) for m in found if m.kind is not None]
        if target == "cut":  # the frame that was cut may have taken what follows for its end
            whole = whole[:-1]
        if target in ("sequence", "cut", "twice", "left out"):  # what came whole before the change is what was sent
            assert whole == messages[: len(whole)], target
    return outcomes
