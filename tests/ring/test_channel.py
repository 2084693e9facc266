"""Senders, receivers and links: order, wholeness, bounds, fairness, and what happens when the peer lies or goes."""

from __future__ import annotations

import asyncio
import os
import struct
import sys
import threading
import time
from collections.abc import Callable, Iterator
from dataclasses import replace
from types import FrameType
from typing import Any

import anyio
import numpy as np
import pytest
import uvloop
from numpy.typing import NDArray

from actorllm.errors import CorruptLinkError, PeerLostError, TransportError, WouldBlock
from actorllm.ring import layout
from actorllm.ring.channel import (
    BATCH_FRAMES,
    BATCHES_PER_TURN,
    Hub,
    Receiver,
    Sender,
    Spoke,
    create_link,
    open_hub,
    open_spoke,
)
from tests.ring.polls import pass_by

SMALL = 4096


class Link:
    """A hub and its spokes in one process, with everything they were told."""

    def __init__(self, num_spokes: int, capacity: int, **options: Any) -> None:
        ends = create_link(capacity, capacity, num_spokes, generation=5)
        self.at_hub: list[tuple[int, int, Any, list[NDArray[Any]]]] = []
        self.at_spoke: list[list[tuple[int, Any, list[NDArray[Any]]]]] = [[] for _ in range(num_spokes)]
        self.errors: list[Any] = []
        self.batches = 0
        self.changed = asyncio.Event()
        self.hub: Hub = open_hub(
            ends.hub, on_frame=self._at_hub, on_error=self._on_hub_error, on_batch=self._on_batch, **options
        )
        self.spokes: list[Spoke] = [
            open_spoke(
                end, on_frame=self._hears(index), on_error=self._on_spoke_error, on_batch=self._on_batch, **options
            )
            for index, end in enumerate(ends.spokes)
        ]

    def _at_hub(self, spoke: int, kind: int, scalars: Any, arrays: list[NDArray[Any]]) -> None:
        self.at_hub.append((spoke, kind, scalars, arrays))

    def _hears(self, index: int) -> Callable[[int, Any, list[NDArray[Any]]], None]:
        return lambda kind, scalars, arrays: self.at_spoke[index].append((kind, scalars, arrays))

    def _on_batch(self) -> None:
        self.batches += 1
        self.changed.set()

    def _on_hub_error(self, spoke: int | None, error: TransportError) -> None:
        self.errors.append((spoke, error))
        self.changed.set()

    def _on_spoke_error(self, error: TransportError) -> None:
        self.errors.append(error)
        self.changed.set()

    def start(self) -> None:
        self.hub.start()
        for spoke in self.spokes:
            spoke.start()

    async def until(self, condition: Callable[[], bool]) -> None:
        with anyio.fail_after(10):
            while not condition():
                self.changed.clear()
                await self.changed.wait()

    def close(self) -> None:
        self.hub.close()
        for spoke in self.spokes:
            spoke.close()


@pytest.fixture
def make_link() -> Iterator[Callable[..., Link]]:
    links: list[Link] = []

    def make(num_spokes: int = 1, capacity: int = SMALL, **options: Any) -> Link:
        links.append(Link(num_spokes, capacity, **options))
        return links[-1]

    yield make
    for link in links:
        link.close()


def column(index: int, size: int) -> NDArray[np.int32]:
    return np.arange(index, index + size, dtype=np.int32)


# Carrying messages ----------------------------------------------------------------------------------------------------


async def test_messages_of_all_sizes_arrive_in_order_at_every_spoke_and_come_back(
    make_link: Callable[..., Link],
) -> None:
    link = make_link(3, checksum=True, debug=True)
    link.start()
    sizes = [0, 1, 50, 400, 700, 5000, 3, 20000, 1]
    for index, size in enumerate(sizes):
        link.hub.sender.send_nowait(index, {"index": index}, [column(index, size), column(0, 2)])
    await link.until(lambda: all(len(heard) == len(sizes) for heard in link.at_spoke))
    for spoke, heard in zip(link.spokes, link.at_spoke, strict=True):
        for index, (kind, scalars, arrays) in enumerate(heard):
            assert (kind, scalars) == (index, {"index": index})
            assert (arrays[0] == column(index, sizes[index])).all()
            spoke.sender.send_nowait(kind, scalars, arrays)
    await link.until(lambda: len(link.at_hub) == 3 * len(sizes))
    for index in range(3):
        back = [kind for spoke, kind, _, _ in link.at_hub if spoke == index]
        assert back == list(range(len(sizes)))
    assert link.hub.sender.statistics().chunked_messages == sum(4 * size > SMALL // 2 for size in sizes)
    assert link.errors == []


async def test_what_was_sent_before_the_start_arrives(make_link: Callable[..., Link]) -> None:
    link = make_link()
    link.hub.sender.send_nowait(1, "early")
    for size in (10, 10_000):
        link.hub.sender.send_nowait(1, None, [column(0, size)])
    link.start()
    await link.until(lambda: len(link.at_spoke[0]) == 3)


async def test_a_sleeping_receiver_is_woken_each_time(make_link: Callable[..., Link]) -> None:
    link = make_link()
    link.start()
    for index in range(20):
        await link.until(lambda: not link.spokes[0].receiver.reader.has_frames)
        await anyio.wait_all_tasks_blocked()
        link.hub.sender.send_nowait(1, index)
        await link.until(lambda expected=index + 1: len(link.at_spoke[0]) == expected)  # type: ignore[misc]
    assert link.spokes[0].receiver.statistics().wake_ups >= 15
    assert not link.hub.recheck()
    assert not link.spokes[0].recheck()


async def test_a_batch_wakes_the_actor_once(make_link: Callable[..., Link]) -> None:
    link = make_link(capacity=1 << 16)
    for index in range(BATCH_FRAMES + 6):
        link.hub.sender.send_nowait(1, index)
    link.start()
    await link.until(lambda: len(link.at_spoke[0]) == BATCH_FRAMES + 6)
    assert link.batches == 2


async def test_a_long_backlog_lets_other_callbacks_in(make_link: Callable[..., Link]) -> None:
    link = make_link(capacity=1 << 20)
    total = BATCH_FRAMES * BATCHES_PER_TURN * 3 + 1
    for index in range(total):
        link.hub.sender.send_nowait(1, index)
    seen: list[int] = []

    def look() -> None:
        seen.append(len(link.at_spoke[0]))
        if seen[-1] < total:
            asyncio.get_running_loop().call_soon(look)

    link.start()
    asyncio.get_running_loop().call_soon(look)
    await link.until(lambda: len(link.at_spoke[0]) == total)
    turn = BATCH_FRAMES * BATCHES_PER_TURN
    assert {turn, 2 * turn, 3 * turn} <= set(seen)
    assert link.spokes[0].receiver.statistics().turns_cut_short == 3


async def test_arrays_may_be_kept_by_the_receiver_and_changed_by_the_sender(make_link: Callable[..., Link]) -> None:
    link = make_link()
    array = column(0, 400)
    for _ in range(6):  # three in the ring, three in the outbox
        link.hub.sender.send_nowait(1, None, [array])
    array[:] = -1
    assert link.hub.sender.outbox_bytes > 0
    link.start()
    await link.until(lambda: len(link.at_spoke[0]) == 6)
    for _, _, (received,) in link.at_spoke[0]:
        assert (received == column(0, 400)).all()


# Backpressure ---------------------------------------------------------------------------------------------------------


def fill(sender: Sender) -> int:
    """Sends numbered messages until refused; returns how many went."""
    count = 0
    while True:
        try:
            sender.send_nowait(1, count, [column(count, 100 * (count % 7))])
        except WouldBlock:
            return count
        count += 1


async def test_a_full_channel_refuses_and_loses_nothing(make_link: Callable[..., Link]) -> None:
    link = make_link(max_outbox_bytes=10_000)
    sender = link.hub.sender
    count = fill(sender)
    statistics = sender.statistics()
    assert statistics.outbox_bytes <= statistics.max_outbox_bytes
    assert statistics.refused == 1
    assert statistics.ring.times_full > 0
    link.start()
    await link.until(lambda: len(link.at_spoke[0]) == count)
    sender.send_nowait(2, "again")
    await link.until(lambda: len(link.at_spoke[0]) == count + 1)
    assert [scalars for kind, scalars, _ in link.at_spoke[0] if kind == 1] == list(range(count))
    assert sender.statistics().outbox_frames == 0


async def test_without_an_outbox_only_the_ring_counts(make_link: Callable[..., Link]) -> None:
    link = make_link(max_outbox_bytes=0)
    count = fill(link.hub.sender)
    assert link.hub.sender.outbox_bytes == 0
    link.start()
    with anyio.fail_after(10):
        await link.hub.sender.send(2, "waits for the ring")
    await link.until(lambda: len(link.at_spoke[0]) == count + 1)


async def test_a_message_longer_than_ring_and_outbox_goes_through(make_link: Callable[..., Link]) -> None:
    link = make_link(max_outbox_bytes=1000)
    link.hub.sender.send_nowait(1, None, [column(0, 100_000)])
    with pytest.raises(WouldBlock):
        link.hub.sender.send_nowait(2, None, [column(0, 100_000)])
    with pytest.raises(WouldBlock):
        link.hub.sender.send_nowait(2, None)
    link.start()
    await link.until(lambda: len(link.at_spoke[0]) == 1)
    assert (link.at_spoke[0][0][2][0] == column(0, 100_000)).all()


async def test_a_message_beyond_the_limit_is_refused_by_both_ends(make_link: Callable[..., Link]) -> None:
    link = make_link(max_message_bytes=50_000)
    with pytest.raises(ValueError, match="limit"):
        link.hub.sender.send_nowait(1, None, [column(0, 20_000)])
    link.hub.sender._max_message_bytes = 1 << 20
    link.start()
    link.hub.sender.send_nowait(1, None, [column(0, 20_000)])
    await link.until(lambda: bool(link.errors))
    assert "more than 50000 bytes" in str(link.errors[0])


async def test_waiting_senders_are_served_in_order(make_link: Callable[..., Link]) -> None:
    link = make_link(max_outbox_bytes=3000)
    count = fill(link.hub.sender)

    async def one(index: int) -> None:
        await link.hub.sender.send(2, index, [column(0, 300)])

    async with anyio.create_task_group() as tasks:
        for index in range(20):
            tasks.start_soon(one, index)
        await anyio.wait_all_tasks_blocked()
        assert not any(kind == 2 for kind, _, _ in link.at_spoke[0])
        link.start()
    await link.hub.sender.wait_flushed()
    await link.until(lambda: len(link.at_spoke[0]) == count + 20)
    assert [scalars for kind, scalars, _ in link.at_spoke[0] if kind == 2] == list(range(20))


async def test_a_cancelled_send_sent_nothing(make_link: Callable[..., Link]) -> None:
    link = make_link(max_outbox_bytes=3000)
    link.hub.start()
    count = fill(link.hub.sender)
    with anyio.move_on_after(0.02) as scope:
        await link.hub.sender.send(2, None, [column(0, 5000)])
    assert scope.cancelled_caught
    for spoke in link.spokes:
        spoke.start()
    await link.hub.sender.send(3, "after")
    await link.until(lambda: len(link.at_spoke[0]) == count + 1)
    assert [kind for kind, _, _ in link.at_spoke[0]] == [1] * count + [3]


async def test_closing_ends_the_wait_of_a_sender(make_link: Callable[..., Link]) -> None:
    link = make_link(max_outbox_bytes=3000)
    link.hub.start()
    fill(link.hub.sender)

    async def waits() -> None:
        with pytest.raises(PeerLostError):
            await link.hub.sender.send(2, None, [column(0, 700)])

    async with anyio.create_task_group() as tasks:
        tasks.start_soon(waits)
        await anyio.wait_all_tasks_blocked()
        link.hub.close()
    with pytest.raises(PeerLostError):
        link.hub.sender.send_nowait(1, None)
    with pytest.raises(PeerLostError):
        await link.hub.sender.send(1, None)


def test_backpressure_between_two_loops_loses_nothing() -> None:
    """Tiny rings, a slow reader, two threads with a loop each: the shape of two processes."""
    total = 3000
    ends = create_link(1024, 1024)
    got: list[tuple[int, int]] = []
    failures: list[BaseException] = []

    def guarded(main: Callable[[], Any]) -> Callable[[], None]:
        def run() -> None:
            try:
                uvloop.run(main())
            except BaseException as error:
                failures.append(error)

        return run

    async def receiver_side() -> None:
        done = asyncio.Event()

        def on_frame(kind: int, scalars: Any, arrays: list[NDArray[Any]]) -> None:
            assert (arrays[0] == column(scalars, scalars % 500)).all()
            got.append((kind, scalars))
            if scalars % 100 == 0:
                time.sleep(0.001)  # slower than the sender
            spoke.sender.send_nowait(kind, scalars)
            if scalars == total - 1:
                done.set()

        spoke = open_spoke(ends.spokes[0], on_frame=on_frame, on_error=failures.append, debug=True, checksum=True)
        spoke.start()
        with anyio.fail_after(30):
            await done.wait()
            await spoke.sender.wait_flushed()
            await asyncio.to_thread(acknowledged.wait, 20)
        spoke.close()

    async def sender_side() -> None:
        back: list[int] = []
        done = asyncio.Event()

        def on_frame(spoke: int, kind: int, scalars: Any, arrays: list[NDArray[Any]]) -> None:
            back.append(scalars)
            if len(back) == total:
                done.set()

        hub = open_hub(
            ends.hub,
            on_frame=on_frame,
            on_error=lambda _, error: failures.append(error),
            max_outbox_bytes=2000,
            debug=True,
            checksum=True,
        )
        hub.start()
        with anyio.fail_after(30):
            for index in range(total):
                await hub.sender.send(index & 7, index, [column(index, index % 500)])
            await done.wait()
        assert back == list(range(total))
        statistics = hub.sender.statistics()
        assert statistics.ring.times_full > 100
        assert statistics.chunked_messages > 100
        assert statistics.rechecks_needed == 0
        acknowledged.set()
        hub.close()

    acknowledged = threading.Event()
    threads = [threading.Thread(target=guarded(main)) for main in (receiver_side, sender_side)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert failures == []
    assert got == [(index & 7, index) for index in range(total)]


# Wake-ups -------------------------------------------------------------------------------------------------------------


async def test_recheck_makes_up_for_a_lost_doorbell(make_link: Callable[..., Link]) -> None:
    link = make_link(max_outbox_bytes=10_000)
    link.start()
    await anyio.wait_all_tasks_blocked()
    receiver = link.spokes[0].receiver
    receiver.reader.disarm()  # as if the doorbell had been lost: committed, and nobody rung
    count = fill(link.hub.sender)
    await anyio.wait_all_tasks_blocked()
    assert link.at_spoke[0] == []
    assert link.spokes[0].recheck()
    assert len(link.at_spoke[0]) > 0
    link.hub.sender.writer.space_bell.clear()  # and the other way round
    assert link.hub.recheck()
    await link.until(lambda: len(link.at_spoke[0]) == count)
    assert receiver.statistics().rechecks_needed == 1
    assert link.hub.sender.statistics().rechecks_needed == 1


async def test_an_idle_link_does_nothing(make_link: Callable[..., Link]) -> None:
    link = make_link(2)
    link.start()
    await pass_by()
    link.hub.sender.send_nowait(1, None)
    await link.until(lambda: all(link.at_spoke))
    await pass_by()
    wake_ups = [spoke.receiver.statistics().wake_ups for spoke in link.spokes]
    assert wake_ups == [1, 1]
    calls: list[str] = []

    def note(frame: FrameType, event: str, _: Any) -> None:
        if event == "call" and frame.f_code.co_filename.startswith(os.path.dirname(layout.__file__)):
            calls.append(frame.f_code.co_name)

    before = sys.getprofile()
    sys.setprofile(note)
    try:
        await pass_by()
    finally:
        sys.setprofile(before)
    assert calls == []
    assert [spoke.receiver.statistics().wake_ups for spoke in link.spokes] == wake_ups


# Receiving without callbacks ------------------------------------------------------------------------------------------


@pytest.mark.parametrize("backend", ["asyncio", "trio"])
def test_receive_waits_on_every_backend(backend: str) -> None:
    async def main() -> None:
        ends = create_link(SMALL, SMALL)
        hub, spoke = open_hub(ends.hub), open_spoke(ends.spokes[0])
        got: list[Any] = []

        async def read() -> None:
            for _ in range(100):
                _, scalars, _ = await spoke.receiver.receive()
                got.append(scalars)

        with anyio.fail_after(10):
            async with anyio.create_task_group() as tasks:
                tasks.start_soon(read)
                await anyio.wait_all_tasks_blocked()
                for index in range(100):
                    await hub.sender.send(1, index, [column(0, 97 * (index % 20))])
                await hub.sender.wait_flushed()
            assert got == list(range(100))
            with pytest.raises(WouldBlock):
                spoke.receiver.receive_nowait()
            hub.sender.send_nowait(1, "last")
            hub.close()
            assert spoke.receiver.reader.is_writer_closed()
            assert (await spoke.receiver.receive())[1] == "last"
            with pytest.raises(PeerLostError, match="writer closed"):
                await spoke.receiver.receive()
        spoke.close()

    anyio.run(main, backend=backend)


async def test_close_ends_a_receive(make_link: Callable[..., Link]) -> None:
    ends = create_link(SMALL, SMALL)
    hub, spoke = open_hub(ends.hub), open_spoke(ends.spokes[0])

    async def read() -> None:
        with pytest.raises(PeerLostError):
            await spoke.receiver.receive()

    with anyio.fail_after(10):
        async with anyio.create_task_group() as tasks:
            tasks.start_soon(read)
            await anyio.wait_all_tasks_blocked()
            spoke.close()
    with pytest.raises(PeerLostError):
        spoke.receiver.receive_nowait()
    hub.close()


async def test_start_and_receive_need_the_right_kind_of_receiver(make_link: Callable[..., Link]) -> None:
    ends = create_link(SMALL, SMALL)
    hub, spoke = open_hub(ends.hub), open_spoke(ends.spokes[0])
    with pytest.raises(RuntimeError, match=r"receive\(\)"):
        spoke.receiver.start()
    with pytest.raises(RuntimeError, match=r"receive\(\)"):
        hub.drain_nowait()
    hub.close()
    spoke.close()


# Handlers that fail, peers that lie, peers that go --------------------------------------------------------------------


async def test_a_handler_that_raises_goes_to_the_loop_and_nothing_behind_it_is_lost() -> None:
    ends = create_link(SMALL, SMALL)
    hub = open_hub(ends.hub)
    got: list[int] = []
    reported: list[Any] = []
    done = asyncio.Event()

    def on_frame(kind: int, scalars: Any, arrays: list[NDArray[Any]]) -> None:
        if scalars in (3, 4):
            raise WouldBlock("of some other link")
        got.append(scalars)
        if scalars == 9:
            done.set()

    loop = asyncio.get_running_loop()
    loop.set_exception_handler(lambda _, context: reported.append(context["exception"]))
    spoke = open_spoke(ends.spokes[0], on_frame=on_frame, on_error=pytest.fail)
    for index in range(10):
        hub.sender.send_nowait(1, index)
    spoke.start()
    with anyio.fail_after(10):
        await done.wait()
    loop.set_exception_handler(None)
    assert got == [0, 1, 2, 5, 6, 7, 8, 9]
    assert [str(error) for error in reported] == ["of some other link"] * 2
    hub.close()
    spoke.close()


async def test_a_handler_may_close_or_fail_its_own_receiver(make_link: Callable[..., Link]) -> None:
    for action in ("close", "fail"):
        ends = create_link(SMALL, SMALL)
        hub = open_hub(ends.hub)
        got: list[int] = []
        errors: list[TransportError] = []

        opened: list[Spoke] = []

        def on_frame(
            kind: int, scalars: Any, arrays: Any, got: list[int] = got, action: str = action, opened: Any = opened
        ) -> None:
            got.append(scalars)
            if scalars == 2 and action == "close":
                opened[0].close()
            elif scalars == 2:
                opened[0].receiver.fail(CorruptLinkError("no such kind"))

        spoke = open_spoke(ends.spokes[0], on_frame=on_frame, on_error=errors.append)
        opened.append(spoke)
        for index in range(5):
            hub.sender.send_nowait(1, index)
        spoke.start()
        await pass_by()
        assert got == [0, 1, 2]
        assert [str(error) for error in errors] == ([] if action == "close" else ["no such kind"])
        spoke.close()
        hub.close()


async def test_a_handler_that_pauses_ends_a_drain_and_loses_nothing() -> None:
    ends = create_link(1 << 16, 1 << 16)
    hub = open_hub(ends.hub)
    got: list[int] = []

    def take(kind: int, value: int, arrays: object) -> None:
        got.append(value)
        if value == 2:
            spoke.receiver.pause()

    spoke = open_spoke(ends.spokes[0], on_frame=take)
    for index in range(200):
        hub.sender.send_nowait(1, index)
    spoke.start()
    assert spoke.drain_nowait() == 3
    spoke.receiver.resume()
    assert spoke.drain_nowait() == 197
    assert got == list(range(200))
    spoke.close()
    hub.close()


async def test_a_corrupt_frame_is_reported_once_and_ends_the_channel(make_link: Callable[..., Link]) -> None:
    link = make_link()
    writer = link.hub.sender.writer
    link.hub.sender.send_nowait(1, "good")
    struct.pack_into("<I", writer._memory, layout.HEADER_BYTES + writer.tail_position + 8, 0)
    link.start()
    await link.until(lambda: len(link.at_spoke[0]) == 1)
    writer._words[layout.TAIL_WORD] += 8
    link.spokes[0].recheck()
    await link.until(lambda: len(link.errors) == 1)
    assert isinstance(link.errors[0], CorruptLinkError)
    link.hub.sender.writer.bells[0].ring()
    await pass_by()
    assert not link.spokes[0].recheck()
    assert link.spokes[0].drain_nowait() == 0
    assert len(link.errors) == 1
    assert len(link.at_spoke[0]) == 1


@pytest.mark.parametrize("body", [b"", b"garbage!", struct.pack("<IHH", 2, 0, 1) + b"{]", struct.pack("<IHH", 2, 9, 1)])
async def test_a_corrupt_body_is_reported_after_the_good_ones(make_link: Callable[..., Link], body: bytes) -> None:
    link = make_link(2)
    link.hub.sender.send_nowait(1, "good")
    link.hub.sender.writer.try_write(1, body)
    link.hub.sender.send_nowait(1, "too late")
    link.start()
    await link.until(lambda: len(link.errors) == 2)
    assert [len(heard) for heard in link.at_spoke] == [1, 1]


@pytest.mark.parametrize(
    "chunks",
    [
        [(1, layout.MORE, SMALL // 8 - 16), (2, 0, 10)],  # the kind changes
        [(1, layout.MORE, 10), (1, 0, 10)],  # a chunk that is too short
        [(1, layout.MORE, 0), (1, 0, 10)],
        [(1, layout.MORE, SMALL // 8), (1, 0, 10)],
        [(1, layout.MORE, SMALL // 8 - 16), (1, 0, 10)],  # whole, but no body
    ],
)
async def test_corrupt_chunks(make_link: Callable[..., Link], chunks: list[tuple[int, int, int]]) -> None:
    link = make_link()
    for kind, flags, length in chunks:
        assert link.hub.sender.writer.try_write(kind, bytes(length), flags=flags)
    link.start()
    await link.until(lambda: bool(link.errors))
    assert isinstance(link.errors[0], CorruptLinkError)
    assert link.at_spoke[0] == []


async def test_a_sender_that_finds_corruption_raises_from_then_on(make_link: Callable[..., Link]) -> None:
    link = make_link()
    fill(link.hub.sender)
    writer = link.hub.sender.writer
    writer._words[layout.reader_word(0) + layout.HEAD] = 8
    link.hub.start()  # flushes, and finds it
    assert [(spoke, type(error)) for spoke, error in link.errors] == [(None, CorruptLinkError)]
    for _ in range(2):
        with pytest.raises(CorruptLinkError):
            link.hub.sender.send_nowait(1, None)
    with pytest.raises(CorruptLinkError):
        await link.hub.sender.send(1, None)
    assert not link.hub.recheck()
    assert len(link.errors) == 1


async def test_corruption_found_by_a_send_is_raised_there(make_link: Callable[..., Link]) -> None:
    link = make_link(max_outbox_bytes=0)
    fill(link.hub.sender)
    link.hub.sender.writer._words[layout.reader_word(0) + layout.STATE] = 99
    for _ in range(2):
        with pytest.raises(CorruptLinkError):
            link.hub.sender.send_nowait(1, None, [column(0, 400)])


async def test_committed_messages_of_a_dead_peer_are_delivered(make_link: Callable[..., Link]) -> None:
    link = make_link(capacity=1 << 20)
    for index in range(500):
        link.spokes[0].sender.send_nowait(1, index)
    assert link.hub.drain_nowait() == 500
    assert [scalars for _, _, scalars, _ in link.at_hub] == list(range(500))
    assert link.hub.drain_nowait() == 0


async def test_a_dead_spoke_holds_the_others_back_no_more(make_link: Callable[..., Link]) -> None:
    link = make_link(2, max_outbox_bytes=10_000)
    link.hub.start()
    link.spokes[0].start()  # spoke 1 never reads
    count = fill(link.hub.sender)
    await pass_by()
    assert 0 < len(link.at_spoke[0]) < count
    link.hub.exclude_spoke(1)
    await link.until(lambda: len(link.at_spoke[0]) == count)
    assert link.spokes[1].drain_nowait() == 0  # it is told, and uses nothing of what may be overwritten meanwhile
    assert isinstance(link.errors[0], PeerLostError)


async def test_statistics_after_the_end(make_link: Callable[..., Link]) -> None:
    link = make_link()
    link.hub.sender.send_nowait(1, None)
    link.close()
    assert link.hub.sender.statistics().messages == 1
    assert link.spokes[0].receiver.statistics().ring.bytes_waiting == 0


# Links as data --------------------------------------------------------------------------------------------------------


def open_fds() -> int:
    return len(os.listdir("/proc/self/fd"))


def test_links_leave_no_descriptor_behind() -> None:
    before = open_fds()
    create_link(SMALL, SMALL, 3).close()
    assert open_fds() <= before
    ends = create_link(SMALL, SMALL, 3)
    opened: list[Any] = [open_hub(ends.hub), *(open_spoke(end) for end in ends.spokes)]
    for end in opened:
        end.close()
        end.close()
    assert open_fds() <= before


def test_a_link_that_cannot_be_made_leaves_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    before = open_fds()
    with pytest.raises(ValueError, match="power of two"):
        create_link(SMALL, 1000, 2)
    with pytest.raises(ValueError, match="num_readers"):
        create_link(SMALL, SMALL, 0)
    assert open_fds() <= before


def test_an_end_of_another_link_or_generation_is_refused() -> None:
    before = open_fds()

    def ends() -> Any:
        return create_link(SMALL, SMALL, 2, generation=7)

    link = ends()
    with pytest.raises(CorruptLinkError, match="generation 7, 8 expected"):
        open_hub(replace(link.hub, generation=8))
    with pytest.raises(CorruptLinkError, match="generation"):
        open_spoke(replace(link.spokes[0], generation=8))
    link.spokes[1].close()

    link = ends()
    with pytest.raises(CorruptLinkError, match="10 descriptors came with 6"):
        open_hub(replace(link.hub, fds=link.hub.fds[:6]))
    for fd in link.hub.fds[6:]:
        os.close(fd)
    first, second = link.spokes
    other = ends()
    crossed = first.fds[:3] + other.spokes[0].fds[3:]
    with pytest.raises(CorruptLinkError, match="different links"):
        open_spoke(replace(first, fds=crossed))
    for fd in [*first.fds[3:], *second.fds, *other.spokes[0].fds[:3]]:
        os.close(fd)
    other.hub.close()
    other.spokes[1].close()

    link = ends()
    with pytest.raises(ValueError, match="end of spoke 1"):
        open_hub(link.spokes[1])
    with pytest.raises(ValueError, match="hub's end"):
        open_spoke(link.hub)
    shuffled = (link.spokes[0].fds[3], *link.spokes[0].fds[1:3], link.spokes[0].fds[0], *link.spokes[0].fds[4:])
    with pytest.raises(CorruptLinkError, match="readers"):
        open_spoke(replace(link.spokes[0], fds=shuffled))
    link.hub.close()
    link.spokes[1].close()
    assert open_fds() <= before


def test_a_receiver_can_be_built_from_its_parts(make_ring: Callable[..., Any]) -> None:
    ring = make_ring(4096)
    sender, got = Sender(ring.writer), []
    receiver = Receiver(ring.reader, lambda *message: got.append(message))
    sender.send_nowait(3, {"a": 1})
    assert receiver.drain_nowait() == 1
    assert got == [(3, {"a": 1}, [])]
