"""A relay between a ring and a stream means the same as the ring, however the bytes of the stream are cut."""

from __future__ import annotations

import socket
from collections.abc import Callable
from typing import Any

import anyio
import anyio.lowlevel
import numpy as np
from hypothesis import given, settings
from hypothesis import strategies as st

from actorllm.actors.engine_thread import run_loop
from actorllm.actors.link import Link, LinkInfo, open_ring
from actorllm.actors.topology import ActorSpec
from actorllm.errors import WouldBlock
from actorllm.fleet.nodes.frames import CHUNK_BYTES
from actorllm.fleet.nodes.node_stream import NodeStream
from actorllm.fleet.nodes.relay import REPLY, Relay, RelayChild
from actorllm.fleet.nodes.stream_link import StreamLink
from actorllm.messages import Message, Reply, Submit, pack
from actorllm.ring.channel import create_link, open_hub
from actorllm.ring.codec import encode
from tests.effort import examples
from tests.fleet.nodes.stream_pairs import tcp_pair
from tests.ring.hostile import MESSAGES

INFO = LinkInfo("scheduler-frontend", "scheduler", 0, 4)


class Collected:
    """An inbox, and what was delivered to it as bytes."""

    def __init__(self) -> None:
        self.bodies: list[tuple[int, bytes]] = []

    def deliver(self, link: Link, message: Message) -> None:
        kind, scalars, arrays = pack(message)
        self.bodies.append((kind, b"".join(encode(scalars, arrays))))

    def end_batch(self) -> None:
        pass

    def break_link(self, link: Link, error: BaseException) -> None:
        raise error


class SmallSocket(socket.socket):
    """Takes and gives so many bytes at a time."""

    sizes: list[int]

    @classmethod
    def of(cls, sock: socket.socket, sizes: list[int]) -> SmallSocket:
        made = cls(fileno=sock.detach())
        made.sizes = sizes
        return made

    def _next(self) -> int:
        self.sizes.append(self.sizes.pop(0))
        return self.sizes[-1]

    def recv_into(self, buffer: Any, nbytes: int = 0, flags: int = 0) -> int:
        return super().recv_into(memoryview(buffer)[: self._next()], nbytes, flags)

    def send(self, data: bytes | memoryview, flags: int = 0) -> int:  # type: ignore[override]
        return super().send(memoryview(data)[: self._next()], flags)


def bodies_of(messages: list[Message]) -> list[tuple[int, bytes]]:
    box = Collected()
    for message in messages:
        box.deliver(None, message)  # type: ignore[arg-type]
    return box.bodies


async def relayed(down: list[Message], up: list[Message], sizes: list[int], capacity: int) -> None:
    """Messages of a scheduler to a frontend elsewhere, and back, with a relay between."""
    near, far = tcp_pair()
    ends = create_link(capacity, capacity, 1, INFO.generation)
    scheduler = open_ring(LinkInfo("scheduler-frontend", "frontend", 0, INFO.generation), ends.hub)
    relays: list[Relay] = []
    stream = NodeStream(
        SmallSocket.of(near, list(sizes)),
        on_message=lambda *args: relays[0].take(*args),
        on_room=lambda: relays[0].on_room(),
        max_outbox_bytes=1 << 16,
        window_bytes=1 << 17,
    )
    links: list[StreamLink] = []
    there = NodeStream(
        SmallSocket.of(far, list(sizes)),
        on_message=lambda generation, kind, body, size: links[0].take(kind, body, size),
        on_batch=lambda: links[0].end_batch(),
        window_bytes=1 << 17,
    )
    relays.append(Relay(INFO.generation, stream, ends.spokes[0], lambda error: None))
    links.append(StreamLink(INFO, there, is_translating=False))
    stream.start()
    there.start()
    relays[0].start()
    at_scheduler, at_frontend = Collected(), Collected()
    scheduler.open(at_scheduler)
    links[0].open(at_frontend)
    pending = [(scheduler, message) for message in down] + [(links[0], message) for message in up]
    with anyio.fail_after(30):
        while pending:
            rest = []
            blocked: set[int] = set()
            for link, message in pending:
                try:
                    if id(link) in blocked:
                        raise WouldBlock("in order")
                    link.send_nowait(message)
                except WouldBlock:
                    blocked.add(id(link))
                    rest.append((link, message))
            pending = rest
            await anyio.lowlevel.checkpoint()
        while len(at_frontend.bodies) < len(down) or len(at_scheduler.bodies) < len(up):
            await anyio.sleep(0.0005)
    assert_same(at_scheduler.bodies, up)
    assert_same(at_frontend.bodies, down)
    relays[0].close()
    stream.close()
    there.close()
    scheduler.close()
    links[0].close()


def assert_same(found: list[tuple[int, bytes]], sent: list[Message]) -> None:
    """Everything in its order; long replies may be overtaken by other messages."""

    def is_long(body: tuple[int, bytes]) -> bool:
        return body[0] == REPLY and len(body[1]) > CHUNK_BYTES

    wanted = bodies_of(sent)
    for may_be_overtaken in (True, False):
        assert [one for one in found if is_long(one) == may_be_overtaken] == [
            one for one in wanted if is_long(one) == may_be_overtaken
        ]


def with_size(message: Message, size: int) -> Message:
    if isinstance(message, Submit):
        return Submit(rid=message.rid, arrival=1.0, prompt=np.arange(size, dtype=np.int32), max_tokens=1)
    if isinstance(message, Reply):
        return Reply(id=message.id, data=np.full(size, 3, np.uint8))
    return message


MESSAGE = st.builds(with_size, st.sampled_from(MESSAGES), st.sampled_from([0, 1, 100, 20_000, 150_000]))
SIZES = st.lists(st.sampled_from([1, 3, 16, 17, 1000, 65_536, 200_000]), min_size=1, max_size=4).filter(
    lambda sizes: sum(sizes) > 500
)


@settings(max_examples=examples(8, 25), deadline=None)
@given(st.lists(MESSAGE, max_size=25), st.lists(MESSAGE, max_size=25), SIZES, st.sampled_from([1 << 15, 1 << 20]))
def test_a_relay_means_the_same_as_its_ring(
    down: list[Message], up: list[Message], sizes: list[int], capacity: int
) -> None:
    run_loop(relayed, down, up, sizes, capacity)


async def test_what_belongs_to_a_link_of_before_is_dropped() -> None:
    near, far = tcp_pair()
    ends = create_link(1 << 16, 1 << 16, 1, INFO.generation)
    scheduler = open_ring(LinkInfo("scheduler-frontend", "frontend", 0, INFO.generation), ends.hub)
    relays: list[Relay] = []
    stream = NodeStream(near, on_message=lambda *args: relays[0].take(*args))
    there = NodeStream(far, on_message=lambda *_: True)
    relays.append(Relay(INFO.generation, stream, ends.spokes[0], lambda error: None))
    stream.start()
    there.start()
    box = Collected()
    relays[0].start()
    scheduler.open(box)
    for generation in (INFO.generation - 1, INFO.generation):
        link = StreamLink(LinkInfo("scheduler-frontend", "scheduler", 0, generation), there, is_translating=False)
        link.send_nowait(Reply(id=generation))
    await arrived(lambda: bool(box.bodies))
    assert box.bodies == bodies_of([Reply(id=INFO.generation)])
    for part in (relays[0], stream, there, scheduler):
        part.close()


async def test_a_doorbell_that_is_lost_is_made_up_for() -> None:
    near, far = tcp_pair()
    ends = create_link(1 << 16, 1 << 16, 1, INFO.generation)
    scheduler = open_ring(LinkInfo("scheduler-frontend", "frontend", 0, INFO.generation), ends.hub)
    came: list[int] = []
    stream = NodeStream(near, on_message=lambda *_: True)
    there = NodeStream(far, on_message=lambda _, kind, body, size: came.append(kind) is None)
    relay = Relay(INFO.generation, stream, ends.spokes[0], lambda error: None)
    stream.start()
    there.start()
    relay.start()
    scheduler.open(Collected())
    scheduler.send_nowait(Reply(id=1))
    relay._receiver.reader.bell.clear()
    relay.recheck()
    await arrived(lambda: came == [REPLY])
    for part in (relay, stream, there, scheduler):
        part.close()


async def arrived(condition: Callable[[], bool]) -> None:
    with anyio.fail_after(10):
        while not condition():
            await anyio.sleep(0.001)


async def test_a_node_looks_after_its_processes_while_the_other_machine_may_wait() -> None:
    near, far = tcp_pair()
    stream = NodeStream(near, on_message=lambda *_: True)
    child = RelayChild(ActorSpec("frontend", "", placement="owner"), lambda *_: None, stream)
    calls: list[bool] = []
    child.on_work = lambda: calls.append(child.has_work)
    assert not child.has_work
    for _ in range(2):
        child.take(INFO.generation, REPLY, b"", 0)
    assert calls == [True], "the watchdog is woken once"
    child.rest()
    assert not child.has_work
    child.take(INFO.generation, REPLY, b"", 0)
    assert child.has_work
    for sock in (near, far):
        sock.close()


class NarrowStream:
    """Refuses every long message."""

    is_open = True

    def __init__(self) -> None:
        self.bodies: list[tuple[int, bytes]] = []
        self.num_flushes = 0

    def send(self, kind: int, buffers: list[bytes], generation: int, lane: int) -> bool:
        body = b"".join(buffers)
        if len(body) > 1000:
            return False
        self.bodies.append((kind, body))
        return True

    def flush(self) -> None:
        self.num_flushes += 1
        assert self.num_flushes < 1000, "it goes on for ever"


async def test_a_relay_of_a_full_stream_closes_and_leaves_no_gap() -> None:
    """More is in the ring than is read of it at a time, and behind what the stream refuses nothing is sent."""
    ends = create_link(1 << 20, 1 << 20, 1, INFO.generation)
    scheduler = open_ring(LinkInfo("scheduler-frontend", "frontend", 0, INFO.generation), ends.hub)
    stream = NarrowStream()
    relay = Relay(INFO.generation, stream, ends.spokes[0], lambda error: None)  # type: ignore[arg-type]
    lengths = [1, 1, 1000, *[1] * 200]
    messages: list[Message] = [
        Submit(rid=rid, arrival=0.0, prompt=np.ones(length, np.int32), max_tokens=1)
        for rid, length in enumerate(lengths, 1)
    ]
    for message in messages:
        scheduler.send_nowait(message)
    relay.close()
    assert stream.bodies == bodies_of(messages[:2])
    scheduler.close()


async def test_what_is_no_message_is_copied_as_it_is() -> None:
    """So a node pays for no field of what passes, and needs no library that a field is made with."""
    near, far = tcp_pair()
    ends = create_link(1 << 16, 1 << 16, 1, INFO.generation)
    came: list[tuple[int, bytes]] = []
    writer = open_hub(ends.hub, on_body=lambda kind, body: came.append((kind, bytes(body))))
    relays: list[Relay] = []
    stream = NodeStream(near, on_message=lambda *args: relays[0].take(*args))
    there = NodeStream(far, on_message=lambda _, kind, body, size: came.append((kind, body)) is None)
    relays.append(Relay(INFO.generation, stream, ends.spokes[0], lambda error: None))
    for part in (stream, there, relays[0], writer):
        part.start()
    writer.sender.send_body_nowait(7, b"down, no body of a message")
    there.send(7, [b"up, no body of a message"], INFO.generation)
    there.flush()
    await arrived(lambda: len(came) == 2)
    assert sorted(came) == [(7, b"down, no body of a message"), (7, b"up, no body of a message")]
    for part in (relays[0], stream, there, writer):
        part.close()
