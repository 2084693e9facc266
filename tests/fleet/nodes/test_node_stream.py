"""A stream between two ends: bounds, lanes, heartbeats, clocks, TLS, and what ends it."""

from __future__ import annotations

import contextlib
import os
import signal
import socket
import subprocess
import sys
from collections.abc import Callable

import anyio
import numpy as np
import pytest
from anyio.lowlevel import checkpoint

from actorllm.actors.engine_thread import current_loop
from actorllm.actors.link import LinkInfo
from actorllm.clock import now
from actorllm.errors import CorruptLinkError, PeerLostError, WouldBlock
from actorllm.fleet.nodes.clock_offset import ClockOffset
from actorllm.fleet.nodes.frames import CHUNK_BYTES, CONTROL, HEADER, ORDERED
from actorllm.fleet.nodes.node_stream import NodeStream
from actorllm.messages import Message, Outputs, Reply, Submit
from tests.fleet.nodes.stream_pairs import end_of, shifted, tcp_pair

INFOS = LinkInfo("scheduler-frontend", "frontend", 0, 1), LinkInfo("scheduler-frontend", "scheduler", 0, 1)


class Inbox:
    def __init__(self) -> None:
        self.received: list[Message] = []
        self.errors: list[BaseException] = []

    def deliver(self, link: object, message: Message) -> None:
        self.received.append(message)

    def end_batch(self) -> None:
        pass

    def break_link(self, link: object, error: BaseException) -> None:
        self.errors.append(error)


async def until(condition: Callable[[], bool]) -> None:
    with anyio.fail_after(20):
        while not condition():
            await anyio.sleep(0.001)


def outputs(text: str = "") -> Outputs:
    one = np.ones(1, np.int32)
    return Outputs(rids=one, index=one, tokens=one, text=text, emitted=now())


async def test_outputs_overtake_a_long_reply_and_nothing_else_is_overtaken() -> None:
    scheduler, frontend = [end_of(info, sock) for info, sock in zip(INFOS, tcp_pair(), strict=True)]
    box = Inbox()
    scheduler.open(Inbox())
    scheduler.send_nowait(Reply(id=1, data=np.zeros(12 << 20, np.uint8)))
    for number in range(50):
        scheduler.send_nowait(outputs(str(number)))
    scheduler.send_nowait(Reply(id=2))
    frontend.open(box)
    await until(lambda: len(box.received) == 52)
    kinds = [type(message) for message in box.received]
    assert kinds.index(Outputs) < kinds.index(Reply)
    assert [message.text for message in box.received if isinstance(message, Outputs)] == [str(n) for n in range(50)]
    assert {message.id: message.data.size for message in box.received if isinstance(message, Reply)} == {
        1: 12 << 20,
        2: 0,
    }
    scheduler.close()
    frontend.close()


async def test_heartbeats_pass_a_reader_that_takes_nothing() -> None:
    """An inbox that is not open takes nothing: the window is full, and neither end takes the other for dead."""
    near, far = [end_of(info, sock, timeout_s=0.7) for info, sock in zip(INFOS, tcp_pair(), strict=True)]
    box, here = Inbox(), Inbox()
    near.open(here)
    num_sent = 0
    with contextlib.suppress(WouldBlock):
        while num_sent < 10_000:
            near.send_nowait(Reply(id=num_sent, data=np.zeros(100_000, np.uint8)))
            num_sent += 1
    assert 100 < num_sent < 10_000
    began = near.stream.statistics().bytes_received
    await until(
        lambda: near.stream.statistics().bytes_received > began + 4 * 64
    )  # four heartbeats, more than the timeout
    assert near.stream.is_open
    assert far.stream.is_open
    far.open(box)
    await until(lambda: len(box.received) == num_sent)
    assert sorted(message.id for message in box.received if isinstance(message, Reply)) == list(range(num_sent))
    near.close()
    far.close()


async def test_times_are_translated_between_clocks_that_differ() -> None:
    ahead_s = 5000.0
    sockets = tcp_pair()
    frontend = end_of(INFOS[1], sockets[0], is_translating=True)
    scheduler = end_of(INFOS[0], sockets[1], clock=shifted(ahead_s))
    here, there = Inbox(), Inbox()
    frontend.open(here)
    scheduler.open(there)
    await frontend.stream.synchronize()
    statistics = frontend.stream.statistics()
    assert abs(statistics.offset_s - ahead_s) <= statistics.offset_error_s + 1e-6
    at = now()
    prompt = np.ones(3, np.int32)
    frontend.send_nowait(Submit(rid=1, arrival=at, deadline=at + 60.0, prompt=prompt, max_tokens=1))
    scheduler.send_nowait(Outputs(rids=prompt, index=prompt, tokens=prompt, emitted=at + ahead_s + 1.0))
    await until(lambda: bool(there.received) and bool(here.received))
    (submit,), (found,) = there.received, here.received
    assert isinstance(submit, Submit)
    assert isinstance(found, Outputs)
    assert submit.deadline is not None
    assert submit.deadline - (at + ahead_s) == pytest.approx(60.0, abs=2 * statistics.offset_error_s + 1e-3)
    assert submit.deadline - submit.arrival == pytest.approx(60.0, abs=1e-9)
    assert found.emitted == pytest.approx(at + 1.0, abs=2 * statistics.offset_error_s + 1e-3)
    frontend.close()
    scheduler.close()


def test_a_clock_that_jumps_is_believed_and_a_slow_answer_is_not() -> None:
    offset = ClockOffset()
    offset.observe(0.0, 100.05, 100.05, 0.1)
    assert offset.seconds == pytest.approx(100.0)
    offset.observe(1.0, 101.001, 101.001, 1.002)
    offset.observe(2.0, 102.4, 102.4, 2.5)  # held up on its way there
    assert (offset.seconds, offset.error_s) == pytest.approx((100.0, 0.001))
    offset.observe(3.0, 603.001, 603.001, 3.002)
    assert offset.seconds == pytest.approx(600.0)


async def test_the_end_of_the_peer_is_told_at_once_and_what_it_sent_comes_first() -> None:
    near, far = [end_of(info, sock) for info, sock in zip(INFOS, tcp_pair(), strict=True)]
    box = Inbox()
    near.open(box)
    far.open(Inbox())
    far.send_nowait(Reply(id=7))
    await far.wait_flushed()
    far.close()
    await until(lambda: bool(box.errors))
    assert [message.id for message in box.received if isinstance(message, Reply)] == [7]
    assert isinstance(box.errors[0], PeerLostError)
    near.close()


async def test_a_stopped_peer_is_found_by_its_silence() -> None:
    """Its kernel acknowledges whatever is sent; only heartbeats tell."""
    with socket.create_server(("127.0.0.1", 0)) as listener:
        program = f"""
import time, socket
sock = socket.create_connection(('127.0.0.1', {listener.getsockname()[1]}))
import anyio
from actorllm.actors.engine_thread import run_loop
from actorllm.fleet.nodes.node_stream import NodeStream
async def main():
    stream = NodeStream(sock, on_message=lambda *a: True)
    stream.start()
    await anyio.sleep(60)
run_loop(main)
"""
        peer = subprocess.Popen([sys.executable, "-c", program])  # noqa: ASYNC220 - returns at once
        try:
            near, _ = listener.accept()
            box = Inbox()
            end = end_of(INFOS[1], near, timeout_s=1.0)
            end.open(box)
            await end.stream.synchronize()
            os.kill(peer.pid, signal.SIGSTOP)
            await until(lambda: bool(box.errors))
            assert "nothing has come from the peer for" in str(box.errors[0])
            end.close()
        finally:
            peer.kill()
            peer.wait()


async def test_bytes_of_no_meaning_end_the_stream_alone() -> None:
    near, other = tcp_pair()
    box = Inbox()
    end = end_of(INFOS[1], near)
    end.open(box)
    other.sendall(b"GET / HTTP/1.1\r\nHost: node\r\n\r\n")
    await until(lambda: bool(box.errors))
    assert isinstance(box.errors[0], CorruptLinkError)
    other.close()


async def test_a_control_frame_of_no_meaning_ends_the_stream() -> None:
    near, other = tcp_pair()
    box = Inbox()
    end = end_of(INFOS[1], near)
    end.open(box)
    other.sendall(HEADER.pack(4, CONTROL, 0, ORDERED, 0, 0) + b"\x00\x01\x02\x03")
    await until(lambda: bool(box.errors))
    assert isinstance(box.errors[0], CorruptLinkError)
    other.close()


async def test_a_message_that_is_longer_than_messages_may_be_fails_alone() -> None:
    near, far = [end_of(info, sock, max_message_bytes=1 << 20) for info, sock in zip(INFOS, tcp_pair(), strict=True)]
    box = Inbox()
    far.open(box)
    near.open(Inbox())
    with pytest.raises(ValueError, match="exceeds the limit of 1048576"):
        near.send_nowait(Reply(id=1, data=np.zeros(2 << 20, np.uint8)))
    near.send_nowait(Reply(id=2, data=np.zeros(3 * CHUNK_BYTES, np.uint8)))
    await until(lambda: len(box.received) == 1)
    near.close()
    far.close()


async def test_a_stall_of_this_process_is_not_the_silence_of_the_peer() -> None:
    near, far = tcp_pair()
    ended: list[BaseException] = []
    stream = NodeStream(near, on_message=lambda *_: True, on_end=ended.append, timeout_s=0.6)
    stream.start()
    stream._heard_at -= 10.0  # as after a SIGSTOP of this process: its timer is as late as its ear
    stream._beat_due -= 10.0
    stream._tick()
    for _ in range(3):
        await checkpoint()
    assert not ended
    stream.close()
    far.close()


async def test_a_writer_that_takes_no_notice_of_the_window_is_at_fault() -> None:
    """Of long messages, and of frames that hold nothing, which would cost the reader memory all the same."""
    for body in (bytes(1000), b""):
        near, other = tcp_pair()
        ended: list[BaseException] = []
        kept: list[bytes] = []
        stream = NodeStream(
            near,
            on_message=lambda _, kind, body, size, kept=kept: kept.append(body) is not None,  # type: ignore[misc]
            on_end=ended.append,
            window_bytes=20_000,
        )
        stream.start()
        frames = b"".join(HEADER.pack(len(body), 8, 0, ORDERED, 1, n) + body for n in range(10_000))
        with contextlib.suppress(BlockingIOError):
            other.setblocking(False)
            other.send(frames)
        await until(lambda: bool(ended))  # noqa: B023
        assert isinstance(ended[0], CorruptLinkError)
        assert "in a window of 20000" in str(ended[0])
        assert len(kept) * (HEADER.size + len(body)) < 20_000 + 2 * CHUNK_BYTES
        other.close()


async def test_whatever_a_message_raises_ends_the_stream_and_not_the_loop() -> None:
    near, other = tcp_pair()
    ended: list[BaseException] = []

    def take(*_: object) -> bool:
        raise AttributeError("of a field that is no object")

    stream = NodeStream(near, on_message=take, on_end=ended.append)
    stream.start()
    other.sendall(HEADER.pack(1, 8, 0, ORDERED, 1, 0) + b"x")
    await until(lambda: bool(ended))
    assert isinstance(ended[0], CorruptLinkError)
    assert not stream.is_open
    other.close()


def test_times_that_no_clock_shows_are_not_believed() -> None:
    offset = ClockOffset()
    offset.observe(0.0, 100.05, 100.05, 0.1)
    for wrong in (float("nan"), float("inf"), -float("inf"), 1.7e308):
        offset.observe(1.0, wrong, wrong, 1.001)
    assert offset.seconds == pytest.approx(100.0)


async def test_who_sends_hears_of_the_end_when_that_call_has_returned() -> None:
    """A frontend takes a message from its queue behind the call, and empties the queue when it hears of the end."""
    near, far = [end_of(info, sock) for info, sock in zip(INFOS, tcp_pair(), strict=True)]
    box = Inbox()
    near.open(box)
    far.open(Inbox())
    far.send_nowait(Reply(id=7))
    await far.wait_flushed()
    near.stream._sock.shutdown(socket.SHUT_WR)  # as a reset that was not read yet: the next call fails with EPIPE
    near.send_nowait(Reply(id=1))
    near.send_nowait(Reply(id=2))
    assert not box.errors
    await until(lambda: bool(box.errors))
    assert len(box.errors) == 1
    assert [message.id for message in box.received if isinstance(message, Reply)] == [7]
    near.close()
    far.close()


class OneWayCable:
    """Between two sockets; what goes back may be swallowed, of which neither end is told."""

    def __init__(self) -> None:
        self.is_cut = False
        (self.near, self._a), (self._b, self.far) = tcp_pair(), tcp_pair()
        self._loop = current_loop()
        for come, gone in ((self._a, self._b), (self._b, self._a)):
            come.setblocking(False)
            self._loop.watch(come.fileno(), self._pass, come, gone)

    def _pass(self, come: socket.socket, gone: socket.socket) -> None:
        data = come.recv(1 << 16)
        if not data:
            self._loop.unwatch(come.fileno())
            gone.shutdown(socket.SHUT_WR)
        elif come is self._a or not self.is_cut:
            gone.sendall(data)

    def close(self) -> None:
        for sock in (self._a, self._b):
            self._loop.unwatch(sock.fileno())
            sock.close()


async def test_a_connection_of_which_one_direction_is_dead_ends_at_both_sides() -> None:
    """What this side sends arrives, and is acknowledged; only what would come back tells."""
    cable = OneWayCable()
    near, far = end_of(INFOS[0], cable.near, timeout_s=0.8), end_of(INFOS[1], cable.far, timeout_s=60.0)
    here, there = Inbox(), Inbox()
    near.open(here)
    far.open(there)
    await near.stream.synchronize()
    cable.is_cut = True
    near.send_nowait(Reply(id=1))
    await until(lambda: bool(here.errors and there.errors))
    assert "nothing has come from the peer for" in str(here.errors[0])
    assert "it closed the connection" in str(there.errors[0])
    assert [message.id for message in there.received if isinstance(message, Reply)] == [1]
    for part in (near, far, cable):
        part.close()
