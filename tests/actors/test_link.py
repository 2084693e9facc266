"""Links in memory, over rings and over streams mean the same: order, no loss, bounds, batches, broadcast, the end."""

from __future__ import annotations

import socket
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field

import anyio
import numpy as np
import pytest
from anyio.lowlevel import checkpoint

from actorllm.actors.engine_thread import LoopThread
from actorllm.actors.link import Broadcast, Link, LinkInfo, connect_in_memory, open_ring
from actorllm.actors.topology import LinkSpec
from actorllm.errors import CorruptLinkError, PeerLostError, WouldBlock
from actorllm.messages import Abort, Message, StepPlan, StepResult
from actorllm.ring.channel import create_link
from tests.fleet.nodes.stream_pairs import over_streams

PAIR = LinkSpec.pair("hub", "a")
BROADCAST = LinkSpec.broadcast("both", "hub", ["a", "b"], capacity_down=1 << 16, capacity_up=1 << 16)
RANK_OF = {"hub": 5, "a": 0, "b": 1}

Connect = Callable[[LinkSpec], list[Link]]


@dataclass
class Box:
    """An inbox that writes down what it gets."""

    received: list[tuple[Link, Message]] = field(default_factory=list)
    batches: list[int] = field(default_factory=list)
    errors: list[BaseException] = field(default_factory=list)

    def deliver(self, link: Link, message: Message) -> None:
        self.received.append((link, message))

    def end_batch(self) -> None:
        self.batches.append(len(self.received))

    def break_link(self, link: Link, error: BaseException) -> None:
        self.errors.append(error)

    @property
    def steps(self) -> list[int]:
        return [m.step for _, m in self.received if isinstance(m, StepPlan | StepResult)]


def over_rings(spec: LinkSpec) -> list[Link]:
    infos = spec.infos(RANK_OF, 3)
    ends = create_link(spec.capacity_down, spec.capacity_up, len(spec.spokes), 3)
    return [open_ring(info, end) for info, end in zip(infos, (ends.hub, *ends.spokes), strict=True)]


def in_memory(spec: LinkSpec) -> list[Link]:
    return connect_in_memory(spec.infos(RANK_OF, 3))


def over_tcp(spec: LinkSpec) -> list[Link]:
    return over_streams(spec.infos(RANK_OF, 3))


def over_a_unix_socket(spec: LinkSpec) -> list[Link]:
    return over_streams(spec.infos(RANK_OF, 3), socket.socketpair)


def connecting(transport: Callable[[LinkSpec], list[Link]]) -> Iterator[Connect]:
    made: list[Link] = []

    def make(spec: LinkSpec) -> list[Link]:
        links = transport(spec)
        made.extend(links)
        return links

    yield make
    for link in made:
        link.close()


@pytest.fixture(params=[in_memory, over_rings, over_tcp, over_a_unix_socket])
def connect_pair(request: pytest.FixtureRequest) -> Iterator[Connect]:
    """Of every transport."""
    yield from connecting(request.param)


@pytest.fixture(params=[in_memory, over_rings])
def connect(request: pytest.FixtureRequest) -> Iterator[Connect]:
    """Of those that have broadcasts."""
    yield from connecting(request.param)


async def until(condition: Callable[[], bool]) -> None:
    with anyio.fail_after(10):
        while not condition():
            await checkpoint()


def send_until_full(link: Link, message: Message) -> int:
    for num_sent in range(1_000_000):
        try:
            link.send_nowait(message)
        except WouldBlock:
            return num_sent
    raise AssertionError("the link has no bound")


async def test_everything_arrives_once_in_order_and_in_batches(connect_pair: Connect) -> None:
    hub, spoke = connect_pair(PAIR)
    box = Box()
    hub.send_nowait(StepPlan(step=0))  # before the receiver opens its end
    spoke.open(box)
    hub.open(Box())
    for step in range(1, 2000):
        hub.send_nowait(StepPlan(step=step, freed=np.arange(step % 50, dtype=np.int32)))
    await until(lambda: len(box.received) == 2000)
    assert box.steps == list(range(2000))
    assert all(link is spoke for link, _ in box.received)
    last = box.received[-1][1]
    assert isinstance(last, StepPlan)
    assert last.freed.tolist() == list(range(1999 % 50))
    assert box.batches[-1] == 2000
    assert len(box.batches) < 200
    assert hub.statistics().num_sent == 2000
    assert spoke.statistics().num_received == 2000


async def test_both_ends_know_whom_they_talk_to(connect_pair: Connect) -> None:
    hub, spoke = connect_pair(PAIR)
    assert (hub.peer, hub.rank, hub.generation) == ("a", 0, 3)
    assert (spoke.peer, spoke.rank, spoke.generation) == ("hub", 5, 3)
    assert list(hub.spokes) == [hub]
    assert "to a generation 3 open" in repr(hub)


async def test_a_broadcast_reaches_every_spoke_and_hears_each_apart(connect: Connect) -> None:
    hub, *spokes = connect(BROADCAST)
    assert isinstance(hub, Broadcast)
    hub_box, boxes = Box(), [Box(), Box()]
    hub.open(hub_box)
    for spoke, box in zip(spokes, boxes, strict=True):
        spoke.open(box)
    for step in range(100):
        hub.send_nowait(StepPlan(step=step))
    await until(lambda: all(len(box.received) == 100 for box in boxes))
    assert [box.steps for box in boxes] == [list(range(100))] * 2
    for spoke in spokes:
        spoke.send_nowait(StepResult(step=spoke.info.index))
    await until(lambda: len(hub_box.received) == 2)
    assert sorted((link.peer, link.rank) for link, _ in hub_box.received) == [("a", 0), ("b", 1)]
    assert {link.rank: m.step for link, m in hub_box.received if isinstance(m, StepResult)} == {0: 0, 1: 1}
    assert all(link.group is hub for link, _ in hub_box.received)
    with pytest.raises(TypeError, match="reaches every spoke"):
        hub.spokes[0].send_nowait(StepPlan(step=1))
    assert hub.statistics().num_received == 2


async def test_a_full_link_refuses_and_loses_nothing(connect: Connect) -> None:
    hub, *spokes = connect(BROADCAST)
    boxes = [Box(), Box()]
    hub.open(Box())
    spokes[0].open(boxes[0])
    message = StepPlan(step=1, new_tokens=np.zeros(1 << 10, np.int32))
    num_sent = send_until_full(hub, message)  # the second spoke does not read
    assert num_sent > 1000
    spokes[1].open(boxes[1])
    await until(lambda: all(len(box.received) == num_sent for box in boxes))
    hub.send_nowait(message)
    await until(lambda: all(len(box.received) == num_sent + 1 for box in boxes))


async def test_a_full_pair_refuses_and_loses_nothing(connect_pair: Connect) -> None:
    hub, spoke = connect_pair(PAIR)
    box = Box()
    hub.open(Box())
    message = StepPlan(step=1, new_tokens=np.zeros(1 << 10, np.int32))
    num_sent = send_until_full(hub, message)  # the spoke does not read
    assert num_sent > 1000
    spoke.open(box)
    await until(lambda: len(box.received) == num_sent)
    hub.send_nowait(message)
    await until(lambda: len(box.received) == num_sent + 1)


async def test_finish_delivers_what_a_dead_peer_had_sent(connect_pair: Connect) -> None:
    hub, spoke = connect_pair(PAIR)
    box = Box()
    hub.open(box)
    spoke.open(Box())
    for step in range(10):
        spoke.send_nowait(StepResult(step=step))
    await spoke.wait_flushed()
    hub.finish()
    assert box.steps == list(range(10))
    hub.close()
    hub.close()
    with pytest.raises(PeerLostError):
        hub.send_nowait(Abort(rids=np.zeros(1, np.int32)))
    spoke.send_nowait(StepResult(step=11))  # the sender is not told by the transport
    for _ in range(5):
        await checkpoint()
    assert box.steps == list(range(10))


async def test_memory_links_cross_threads() -> None:
    """Both directions at full speed: nothing is lost between the flag and the queue."""
    hub, spoke = in_memory(PAIR)
    thread = LoopThread("other")
    thread.start_thread()
    try:
        there, here = Box(), Box()
        thread.call(spoke.open, there).result()
        hub.open(here)

        def send_all() -> None:
            for step in range(20_000):
                spoke.send_nowait(StepResult(step=step))

        sending = thread.call(send_all)
        for step in range(20_000):
            hub.send_nowait(StepPlan(step=step))
            if step % 100 == 0:
                await checkpoint()
        await until(lambda: len(here.received) == 20_000 and len(there.received) == 20_000)
        sending.result()
        assert here.steps == there.steps == list(range(20_000))
    finally:
        thread.request_stop()
        assert thread.join(30)


async def test_a_frame_that_is_no_message_breaks_the_link() -> None:
    ends = create_link(1 << 16, 1 << 16, 1, 1)
    hub_info, spoke_info = PAIR.infos(RANK_OF, 1)
    hub, spoke = open_ring(hub_info, ends.hub), open_ring(spoke_info, ends.spokes[0])
    box = Box()
    spoke.open(box)
    hub._channel.sender.send_nowait(99, [0, 0])  # type: ignore[attr-defined]
    await until(lambda: bool(box.errors))
    assert isinstance(box.errors[0], CorruptLinkError)
    assert "kind 99" in str(box.errors[0])
    hub.close()
    spoke.close()


def test_infos_survive_json() -> None:
    import json
    from dataclasses import asdict

    infos: Sequence[LinkInfo] = BROADCAST.infos(RANK_OF, 2)
    assert [LinkInfo.from_json(json.loads(json.dumps(asdict(info)))) for info in infos] == infos
