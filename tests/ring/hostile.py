"""A hostile peer: structure-aware changes to every word, frame, body and message that reaches an end of a link.

Each trial is one change at one place, named by its target ("word TAIL", "frame length", "body table", "Submit.seed" ...),
under ordinary traffic. What must hold:

- whatever is found wrong is one of our errors, told once, and nothing is delivered after it;
- what is delivered was sent, in order, each once; only a frame whose payload was changed may carry something else, and
  not even that where it has a checksum;
- nothing else is raised, and no call takes longer than the bytes that there are.

`run(trials, seed)` returns how often each target was hit and what came of it. Used by test_fuzz.py and
bench/fuzz_rings.py.
"""

from __future__ import annotations

import os
import random
import struct
from collections import Counter
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field, fields
from typing import Any

import numpy as np
import orjson
from numpy.typing import NDArray

from actorllm.errors import CorruptLinkError, PeerLostError, TransportError, WouldBlock
from actorllm.messages import (
    KINDS,
    Abort,
    Ask,
    Begun,
    Drafted,
    KvOffer,
    LateInputs,
    Message,
    Outputs,
    PauseChanged,
    ProbeGroup,
    Reply,
    StepFailed,
    StepPlan,
    StepResult,
    Submit,
    Unblock,
    WeightsChanged,
    pack,
    unpack,
)
from actorllm.messages.embeds import EMBEDDED
from actorllm.messages.logit_rules import SamplingRules
from actorllm.ring import codec, layout
from actorllm.ring.channel import Receiver, Sender
from actorllm.ring.codec import encode
from actorllm.ring.doorbell import Doorbell
from actorllm.ring.ring import RingReader, RingWriter
from actorllm.ring.segment import Segment, create_segment

EMBEDDING_BYTES = 1024
"""Of one position of a prompt, for the storyteller in float32."""

CAPACITY = 4096
MAX_MESSAGE_BYTES = 1 << 16

STATIC = {
    "MAGIC": layout.MAGIC_WORD,
    "VERSION": layout.VERSION_WORD,
    "CAPACITY": layout.CAPACITY_WORD,
    "NUM_READERS": layout.NUM_READERS_WORD,
    "LINK_ID": layout.LINK_ID_WORD,
    "LINK_ID 2": layout.LINK_ID_WORD + 1,
    "GENERATION": layout.GENERATION_WORD,
    "FLAGS": layout.FLAGS_WORD,
}
"""Words that are read once, when an end attaches."""

OF_WRITER = {
    "TAIL": layout.TAIL_WORD,
    "WRITER_PID": layout.WRITER_PID_WORD,
    "WRITER_START": layout.WRITER_START_WORD,
    "CLOSED": layout.CLOSED_WORD,
    "SPACE_WANTED": layout.SPACE_WANTED_WORD,
}
OF_READER = {
    "HEAD": layout.reader_word(0) + layout.HEAD,
    "SLEEP": layout.reader_word(0) + layout.SLEEP,
    "READER_PID": layout.reader_word(0) + layout.READER_PID,
    "READER_START": layout.reader_word(0) + layout.READER_START,
    "STATE": layout.reader_word(0) + layout.STATE,
}
UNUSED = [w for w in range(8, layout.HEADER_BYTES // 8) if w not in (*OF_WRITER.values(), *OF_READER.values())]

FRAME_FIELDS = {"length": (0, 4), "kind": (4, 2), "flags": (6, 2), "stamp": (8, 4), "checksum": (12, 4)}

GOOD_SUBMIT = Submit(
    rid=7,
    arrival=1.5,
    prompt=np.arange(40, dtype=np.int32),
    output=np.array([3, 1], np.int32),
    max_tokens=16,
    stop=["end"],
    stop_token_ids=[5, 6],
    slo=[0.5, None, None, None],
    tenant="somebody",
    rules=SamplingRules(
        presence_penalty=0.5,
        frequency_penalty=0.1,
        repetition_penalty=1.1,
        bias_ids=(1, 2),
        biases=(0.5, -0.5),
        allowed_ids=(1, 2, 3),
        bad_words=((1, 2), (3,)),
        num_logprobs=2,
        num_prompt_logprobs=1,
        repetition=(4, 1, 3),
    ).to_fields(),
)
GOOD_SUBMITS = (
    GOOD_SUBMIT,
    Submit(
        rid=8, arrival=1.5, prompt=GOOD_SUBMIT.prompt, max_tokens=5, siblings=np.array([9, 10], np.int32), deadline=1e9
    ),
    Submit(
        rid=11,
        arrival=1.5,
        prompt=GOOD_SUBMIT.prompt,
        max_tokens=5,
        grammar={"kind": "json", "text": '{"type": "object"}', "source": "guided_json", "whitespace_pattern": " ?"},
    ),
    Submit(rid=12, arrival=1.5, prompt=GOOD_SUBMIT.prompt, max_tokens=1, pooling="last", is_chunkable=False),
    Submit(
        rid=13,
        arrival=1.5,
        prompt=np.array([5, EMBEDDED, 6, EMBEDDED], np.int32),
        max_tokens=5,
        prompt_embeds=np.zeros(2 * EMBEDDING_BYTES, np.uint8),
    ),
    Submit(rid=14, arrival=1.5, prompt=GOOD_SUBMIT.prompt, max_tokens=5, adapter="a" * 64, adapter_path="/adapters/a"),
)
"""One of each kind: fields that have no place beside one another are changed from a good value, too."""
ONE = np.ones(1, np.int32)
MESSAGES: tuple[Message, ...] = (
    *GOOD_SUBMITS,
    Abort(rids=np.arange(5, dtype=np.int32)),
    Unblock(rid=3, error="no"),
    PauseChanged(mode="keep"),
    WeightsChanged(version="1", identity="ab", rids=ONE, num_tokens=ONE),
    ProbeGroup(rids=ONE, size=3, is_alone=False),
    Begun(rids=ONE),
    KvOffer(rid=3, lease=np.arange(4), blocks=ONE, num_cached=0),
    StepPlan(step=9, freed=ONE, new_tokens=np.arange(33, dtype=np.int32), decode_slots=None),
    LateInputs(step=2, slots=ONE, allowed=np.ones(4, np.uint32)),
    Drafted(step=3, slots=ONE, counts=ONE, tokens=ONE),
    StepResult(step=4, tokens=np.arange(8, dtype=np.int32), vectors=np.ones(3, np.float32), started=0.5),
    StepFailed(step=5, error="broken"),
    Outputs(rids=ONE, index=ONE, tokens=ONE, text="é text", text_ends=ONE, ends=[[0, "stop", None, None]]),
    Ask(id=1, verb="statistics", arguments={"a": [1, {"b": None}]}),
    Ask(id=2, verb="call_workers", data=np.arange(5, dtype=np.uint8)),
    Reply(id=1, value={"a": 1}),
    Reply(id=2, data=np.arange(5, dtype=np.uint8)),
)


@dataclass
class Report:
    """What was tried, and what came of it: by target, how many trials, and how many of them ended with an error."""

    trials: Counter[str] = field(default_factory=Counter)
    refused: Counter[str] = field(default_factory=Counter)

    def note(self, target: str, *, is_refused: bool) -> None:
        self.trials[target] += 1
        self.refused[target] += is_refused

    def __iadd__(self, other: Report) -> Report:
        self.trials += other.trials
        self.refused += other.refused
        return self


def number(random: random.Random, current: int, bits: int) -> int:
    """Another value of a field: near the right one, at a border, one bit off, or anything."""
    most = 1 << bits
    match random.randrange(6):
        case 0:
            value = current + random.choice((-32, -16, -8, -1, 1, 8, 16, 32))
        case 1:
            value = random.choice((0, 1, 2, 3, most - 1, most - 16, most >> 1, (most >> 1) - 1, CAPACITY, 2 * CAPACITY))
        case 2:
            value = current ^ 1 << random.randrange(bits)
        case 3:
            value = 16 * random.randrange(4 * CAPACITY)
        case 4:
            value = random.randrange(1 << random.randrange(1, bits + 1))
        case _:
            value = random.randrange(most)
    return value % most


# One ring, and somebody who writes into it what he likes -----------------------------------------------------------------


class Trial:
    """A fresh ring with an honest writer and reader, and the mapping of a hostile one."""

    _template: bytes | None = None

    def __init__(self, arena: Arena, *, checksum: bool) -> None:
        self.whole = arena.whole
        arena.reset()
        self.errors: list[TransportError] = []
        """Of the receiving end; what else was refused is in `others`."""
        self.others: list[TransportError] = []
        self.received: list[tuple[int, Any, list[NDArray[Any]]]] = []
        self.sent: list[bytes] = []
        self.sender_is_over = False
        self.writer = RingWriter(arena.segments[0], [arena.bell], arena.space, checksum=checksum)
        self.reader = RingReader(arena.segments[1], arena.bell, arena.space)
        self.sender = Sender(
            self.writer,
            max_outbox_bytes=2 * CAPACITY,
            max_message_bytes=MAX_MESSAGE_BYTES,
            on_error=self.others.append,
        )
        self.receiver = Receiver(self.reader, self._on_frame, self.errors.append, max_message_bytes=MAX_MESSAGE_BYTES)

    def _on_frame(self, kind: int, scalars: Any, arrays: list[NDArray[Any]]) -> None:
        assert not self.errors, "delivered after an error"
        self.received.append((kind, scalars, arrays))

    def send(self, random: random.Random) -> None:
        """An ordinary message, of any length that the link takes."""
        size = random.choice((0, 1, 5, 40, 120, 500, 1200))
        scalars = [len(self.sent), "x" * random.randrange(40)]
        arrays = [np.full(size, len(self.sent), np.int32)] if size else []
        try:
            self.sender.send_nowait(3, scalars, arrays)
        except WouldBlock:
            return
        except TransportError:
            if self.sender_is_over:
                return
            self.sender_is_over = True  # the last one may have been committed when the error was found
        self.sent.append(flat(3, scalars, arrays))

    def use(self, random: random.Random) -> None:
        """Something that an end does."""
        match random.randrange(8):
            case 0 | 1:
                self.send(random)
            case 2 | 3:
                self.receiver.drain_nowait()
            case 4:
                self.sender.recheck()
            case 5:
                guarded(self.others, self.reader.arm)
            case 6:
                guarded(self.others, self.reader.is_writer_closed)
            case _:
                self.sender.statistics()
                self.receiver.statistics()

    @property
    def is_refused(self) -> bool:
        return bool(self.errors or self.others) or self.sender._error is not None or self.receiver._error is not None

    def check(self, changed: int | None = None) -> None:
        """What arrived is what was sent, in order; but for the message number `changed`."""
        assert len(self.received) <= len(self.sent), "more was received than sent"
        for index, message in enumerate(self.received):
            if index != changed:
                assert flat(*message) == self.sent[index], f"message {index} is not the one that was sent"


def flat(kind: int, scalars: Any, arrays: list[NDArray[Any]]) -> bytes:
    return b"%d " % kind + b"".join(bytes(part) for part in encode(scalars, arrays))


def guarded(errors: list[TransportError], *calls: Callable[[], object]) -> None:
    """Calls that may find the peer's words impossible: that ends the link like any other way to find out."""
    for call in calls:
        try:
            call()
        except (CorruptLinkError, PeerLostError) as error:
            errors.append(error)
            return


class Arena:
    """The memory of the trials: one segment, made as good as new for each."""

    def __init__(self) -> None:
        self.fd = create_segment(CAPACITY, generation=5, link_id=(1, 2))
        self.segments = [Segment.attach(self.fd) for _ in range(3)]
        self.bell, self.space = Doorbell.create(), Doorbell.create()
        self.whole = memoryview(self.segments[2].memory)
        self.words = self.whole.cast("Q")
        self._fresh = bytes(self.whole)

    def reset(self) -> None:
        self.whole[:] = self._fresh
        self.bell.clear()
        self.space.clear()

    def close(self) -> None:
        self.words.release()
        self.whole.release()
        for segment in self.segments:
            segment.close()
        self.bell.close()
        self.space.close()
        os.close(self.fd)


def try_static_word(arena: Arena, random: random.Random, report: Report) -> None:
    """Attaching to a segment whose header says something else."""
    name, word = random.choice(list(STATIC.items()))
    arena.reset()
    arena.words[word] = value = number(random, arena.words[word], 64)
    refused = True
    try:
        segment = Segment.attach(arena.fd)
        segment.close()
        refused = False
    except CorruptLinkError:
        pass
    may_be_anything = name in ("LINK_ID", "LINK_ID 2", "GENERATION")  # compared with the other rings of the link
    is_possible = name == "NUM_READERS" and 1 <= value <= layout.MAX_READERS
    is_same = value == struct.unpack_from("<Q", arena._fresh, 8 * word)[0]
    assert refused != (may_be_anything or is_possible or is_same), f"{name}={value:#x}"
    report.note(f"word {name}", is_refused=refused)


def try_word(arena: Arena, random: random.Random, report: Report) -> None:
    """A word of the header changes under traffic, once or for good."""
    words = OF_WRITER | OF_READER
    name = random.choice((*words, "unused"))
    word = words.get(name) or random.choice(UNUSED)
    trial = Trial(arena, checksum=random.random() < 0.3)
    for _ in range(random.randrange(6)):
        trial.use(random)
    value = number(random, arena.words[word], 64)
    for _ in range(random.choice((1, 3))):
        arena.words[word] = value
        for _ in range(random.randrange(1, 4)):
            trial.use(random)
    trial.receiver.drain_nowait()
    trial.check()
    report.note(f"word {name}", is_refused=trial.is_refused)


def try_frame(arena: Arena, random: random.Random, report: Report) -> None:
    """A field of a committed frame, or a byte of its payload, changes before it is read."""
    has_checksum = random.random() < 0.5
    trial = Trial(arena, checksum=has_checksum)
    for _ in range(random.randrange(4)):
        trial.use(random)
    trial.receiver.drain_nowait()
    if trial.is_refused:
        raise AssertionError(f"refused without a reason: {trial.errors} {trial.others}")
    while not trial.reader.has_frames:
        trial.send(random)
    for _ in range(random.randrange(3)):
        trial.send(random)
    position = layout.HEADER_BYTES + (trial.reader.head_position & CAPACITY - 1)
    length, _, flags, _, _ = layout.FRAME_HEADER.unpack_from(trial.whole, position)
    name = random.choice((*FRAME_FIELDS, "payload"))
    if name == "payload" and (flags == layout.PAD or not length):
        name = "stamp"
    if name == "payload":
        at, size = position + layout.FRAME_HEADER_BYTES + random.randrange(length), 1
    else:
        at, size = position + FRAME_FIELDS[name][0], FRAME_FIELDS[name][1]
    old = int.from_bytes(trial.whole[at : at + size], "little")
    new = number(random, old, 8 * size)
    trial.whole[at : at + size] = new.to_bytes(size, "little")
    first = len(trial.received)
    trial.receiver.drain_nowait()
    if new == old or name == "kind" or (name == "payload" and not has_checksum) or flags & layout.MORE:
        trial.check(first)  # a peer may say what he likes, as long as it is well formed
    else:
        trial.check()
        assert trial.is_refused or name == "length", f"{name}: {old:#x} became {new:#x} and nobody noticed"
    report.note(f"frame {name}", is_refused=trial.is_refused)


# Bodies and messages ----------------------------------------------------------------------------------------------------


def try_body(random: random.Random, report: Report) -> None:
    """One change to the bytes of a message."""
    message = random.choice(MESSAGES)
    kind, scalars, arrays = pack(message)
    body = bytearray(b"".join(bytes(part) for part in encode(scalars, arrays)))
    text_bytes = struct.unpack_from("<I", body)[0]
    table = 8 + 8 * len(arrays)
    parts = {
        "body text length": (0, 4),
        "body number of arrays": (4, 2),
        "body version": (6, 2),
        "body table": (8 + 4 * random.randrange(2 * len(arrays)) if arrays else 0, 4),
        "body text": (table + random.randrange(text_bytes), 1),
        "body array": (table + text_bytes + random.randrange(max(1, len(body) - table - text_bytes)), 1),
        "body length": (0, 0),
    }
    target = random.choice(list(parts))
    at, size = parts[target]
    if not size:
        body = (
            body[: random.randrange(len(body))]
            if random.random() < 0.5
            else body + random.randbytes(random.choice((1, 8, 16)))
        )
    elif at + size <= len(body):
        old = int.from_bytes(body[at : at + size], "little")
        body[at : at + size] = number(random, old, 8 * size).to_bytes(size, "little")
    report.note(target, is_refused=not takes(kind, bytes(body)))


def takes(kind: int, body: bytes) -> bool:
    """What a link does with a body. False: it is dropped, with one of our errors."""
    try:
        scalars, arrays = codec.decode(body)
    except CorruptLinkError:
        return False
    assert sum(array.nbytes for array in arrays) <= len(body)
    try:
        message = unpack(kind, scalars, arrays)
    except ValueError:
        return False
    assert type(message) is KINDS[kind]
    again, _, _ = pack(message)
    assert again == kind
    return True


NESTED = orjson.loads("[" * 200 + "]" * 200)

STRANGE: tuple[Any, ...] = (
    None,
    True,
    False,
    0,
    1,
    -1,
    7,
    2**31 - 1,
    2**31,
    -(2**31),
    2**32,
    2**63 - 1,
    2**63,
    2**64 - 1,
    -(2**63),
    0.0,
    -0.0,
    0.5,
    1.5,
    -1.0,
    1e-300,
    1e39,
    1e308,
    "",
    "x",
    "a" * 300,
    "\x00",
    "é中🙂",
    "statistics",
    "pause_generation",
    [],
    {},
    [[]],
    [None],
    [0],
    [-1],
    [""],
    ["a", ""],
    [1.5, None, None, None],
    [2**40],
    list(range(300)),
    {"mode": "keep"},
    {"": None},
    {"presence_penalty": "x"},
    {"logit_bias": {"1": 1e39}},
    {"bad_words": [[]]},
    {"num_logprobs": 2**31},
    {"timeout": "soon"},
    NESTED,
    {"text": NESTED},
)


STRANGE_RULES = (
    *STRANGE,
    [1],
    [2**31],
    [2**64],
    [1, 2],
    [0.5, 1e39],
    [[1], [2, 3]],
    [[-1]],
    [[1.5]],
    [[]],
    [3, 1, 2],
    [1, 3, 2],
    [0, 0, 0],
    [2**40, 1, 2],
    ["a", "b", "c"],
)
STRANGE_GRAMMAR = (
    *STRANGE,
    "json",
    "regex",
    "choice",
    "grammar",
    "structural_tag",
    "(",
    "a{1,1000000000}",
    "[]",
    "{",
    '{"type": 7}',
    '{"$ref": "#/a"}',
    '{"format": {"type": "or"}}',
    "start: start",
    "\ud7ff" * 100,
)
STRANGE_PARTS = {"rules": ("SamplingRules", STRANGE_RULES), "grammar": ("Submit.grammar", STRANGE_GRAMMAR)}
"""Of fields that are mappings: what their entries are called, and what these may become."""


def strange_messages(random: random.Random, types: tuple[type[Any], ...]) -> Iterator[tuple[str, Message]]:
    """(target, message) without end: one field of a good message is something else, as its sender could write it."""
    good = [message for message in MESSAGES if isinstance(message, types)]
    dtypes = {name: array.dtype for message in good for name, array in columns(message).items()}
    while True:
        message = random.choice(good)
        values = {f.name: getattr(message, f.name) for f in fields(message)}  # type: ignore[arg-type]
        parts = [name for name in STRANGE_PARTS if values.get(name)]
        name = random.choice((*values, *parts * 10))
        target = f"{type(message).__name__}.{name}"
        if isinstance(values[name], np.ndarray):
            dtype = dtypes[name]
            size = random.choice((0, 1, 2, 31, 32, 33, 64, 200))
            if dtype.kind == "f":
                values[name] = np.array(random.choices((0.0, np.nan, np.inf, -1.0, 1e30), k=size), dtype)
            else:
                info = np.iinfo(dtype)
                choices = (0, 1, 5, info.min, info.max, random.randrange(4096) & info.max)
                values[name] = np.array(random.choices(choices, k=size), dtype)
        elif name in parts and random.random() < 0.9:
            part = random.choice(list(values[name]))
            called, strange = STRANGE_PARTS[name]
            values[name] = values[name] | {part: random.choice(strange)}
            target = f"{called}.{part}"
        else:
            same = [value for value in STRANGE if type(value) is type(values[name])]
            values[name] = random.choice(same if same and random.random() < 0.6 else STRANGE)
        if name != "rid" and "rid" in values:
            values["rid"] = random.randrange(1 << 20)
            if name != "siblings" and "siblings" in values:
                values["siblings"] = values["rid"] + 1 + np.arange(values["siblings"].size, dtype=np.int32)
        yield target, type(message)(**values)


def columns(message: Message) -> dict[str, NDArray[Any]]:
    named = {f.name: getattr(message, f.name) for f in fields(message)}  # type: ignore[arg-type]
    return {name: value for name, value in named.items() if isinstance(value, np.ndarray)}


def through_the_wire(message: Message) -> Message | None:
    """The message as the other end gets it; None when the link is dropped for it."""
    kind, scalars, arrays = pack(message)
    try:
        body = b"".join(bytes(part) for part in encode(scalars, arrays))
    except TypeError:
        return None  # not even a hostile peer can write that down
    scalars, arrays = codec.decode(body)
    try:
        return unpack(kind, scalars, arrays)
    except ValueError:
        return None


def run(trials: int, seed: int) -> Report:
    """So many trials on rings and bodies. AssertionError, or whatever was raised: a defect."""
    chance = random.Random(seed)
    report = Report()
    arena = Arena()
    try:
        for _ in range(trials):
            match chance.randrange(8):
                case 0:
                    try_static_word(arena, chance, report)
                case 1 | 2:
                    try_word(arena, chance, report)
                case 3 | 4:
                    try_frame(arena, chance, report)
                case _:
                    try_body(chance, report)
    finally:
        arena.close()
    return report
