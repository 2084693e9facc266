"""Run by test_processes.py in a process of its own (`python ring_processes.py MODE ARGUMENTS`); prints one line of JSON.

It forks: unlike the test process it has one thread only, and a fork is ready to be killed within a millisecond where a
new interpreter takes 200. Every frame carries a checksum.
"""

from __future__ import annotations

import json
import os
import random
import select
import signal
import struct
import sys
import time
import traceback
from typing import NoReturn

from actorllm.ring import layout
from actorllm.ring.channel import LinkEnd, open_spoke
from actorllm.ring.doorbell import Doorbell
from actorllm.ring.ring import Frame, RingReader, RingWriter
from actorllm.ring.segment import Segment, create_segment

CAPACITY = 1 << 18
LABEL = struct.Struct("<QQ")  # generation, number
LENGTHS = (0, 5, 16, 100, 200, 1000, 4000, 20_000, 60_000)


class Ring:
    """A ring that both sides of a fork open for themselves."""

    def __init__(self, num_readers: int = 1) -> None:
        self.fd = create_segment(CAPACITY, num_readers=num_readers)
        self.bells = [Doorbell.create() for _ in range(num_readers)]
        self.space = Doorbell.create()

    def writer(self) -> RingWriter:
        return RingWriter(Segment.attach(self.fd), self.bells, self.space, checksum=True)

    def reader(self, index: int = 0) -> RingReader:
        return RingReader(Segment.attach(self.fd), self.bells[index], self.space, index=index)


def fork(child: object, *arguments: object) -> int:
    pid = os.fork()
    if pid == 0:
        try:
            child(*arguments)  # type: ignore[operator]
        except BaseException:
            traceback.print_exc()
        finally:
            os._exit(1)
    return pid


def kill(pid: int) -> None:
    """It must have been alive: a child that failed by itself fails the test."""
    os.kill(pid, signal.SIGKILL)
    status = os.waitpid(pid, 0)[1]
    assert os.WIFSIGNALED(status), f"the child had ended by itself with status {status}"


def wait(bell: Doorbell, timeout_s: float) -> None:
    select.select([bell.fd], [], [], timeout_s)
    bell.clear()


def write_for_ever(ring: Ring, generation: int) -> NoReturn:
    """Frames numbered from 0, singly and in batches, as the ring takes them; sleeps on the space bell when it is full."""
    writer = ring.writer()
    choose = random.Random(generation)
    blob = choose.randbytes(max(LENGTHS))
    number = 0

    def write(frames: list[Frame]) -> None:
        """As many as there is room for; those are taken out of the list."""
        if len(frames) > 1:
            del frames[: writer.write_many(frames)]
        elif writer.try_write(1, frames[0][2][:16], frames[0][2][16:]):
            frames.clear()

    while True:
        lengths = choose.choices(LENGTHS, k=choose.choice((1, 1, 2, 9)))
        frames: list[Frame] = [
            (1, 0, LABEL.pack(generation, number + index) + blob[:length]) for index, length in enumerate(lengths)
        ]
        while frames:
            write(frames)
            if frames:
                writer.want_space()
                left = len(frames)
                write(frames)
                if len(frames) == left:
                    wait(ring.space, 10)
        number += len(lengths)


def kill_writers(kills: int) -> dict[str, int]:
    """Writers die at random instants on one ring: every one's frames are 0, 1, 2 ... and whole, and nothing else is."""
    ring = Ring()
    reader = ring.reader()
    choose = random.Random(1)
    frames = half_written = 0
    for generation in range(kills):
        pid = fork(write_for_ever, ring, generation)
        expected = 0
        end = time.monotonic() + choose.uniform(0.002, 0.03)
        while True:
            is_over = time.monotonic() > end
            if is_over:
                kill(pid)
            for _, _, payload in reader.drain(1 << 30 if is_over else 64):
                assert LABEL.unpack_from(payload) == (generation, expected), (LABEL.unpack_from(payload), expected)
                expected += 1
            reader.check_integrity()
            if is_over:
                break
        # Did it die inside a frame, whose header stood behind the tail already?
        header = layout.FRAME_HEADER.unpack_from(
            Segment.attach(ring.fd).memory, layout.HEADER_BYTES + reader.head_position % CAPACITY
        )
        half_written += header[3] == reader.head_position >> 4 & layout.STAMP_MASK
        frames += expected
    return {"kills": kills, "frames": frames, "half_written": half_written}


def kill_readers(kills: int) -> dict[str, int]:
    """Readers die at random instants: the successor goes on with the released head; nothing is lost or skipped."""
    ring = Ring()
    writer_pid = fork(write_for_ever, ring, 0)
    report, log = os.pipe()

    def read_for_ever() -> NoReturn:
        reader = ring.reader()
        while True:
            frames = reader.drain(copy=False)
            for _, _, payload in frames:
                os.write(log, struct.pack("<Q", LABEL.unpack_from(payload)[1]))  # processed, not yet released
            if frames:
                frames.clear()
                reader.release()
            elif reader.arm():
                wait(ring.bells[0], 10)
                reader.disarm()

    choose = random.Random(2)
    expected = processed = redelivered = 0
    os.set_blocking(report, False)
    for _ in range(kills):
        pid = fork(read_for_ever)
        time.sleep(choose.uniform(0.002, 0.03))
        kill(pid)
        is_first = True
        while True:
            try:
                data = os.read(report, 8)
            except BlockingIOError:
                break
            (number,) = struct.unpack("<Q", data)
            if is_first:
                assert number <= expected, f"frames {expected} to {number} were lost"
                redelivered += expected - number
                expected = number
                is_first = False
            assert number == expected
            expected += 1
            processed += 1
    kill(writer_pid)
    return {"kills": kills, "processed": processed, "redelivered": redelivered}


def stream(seconds: float, num_readers: int) -> dict[str, int]:
    """One writer, some readers that sleep and wake, random lengths: every frame arrives at each, in order and whole."""
    ring = Ring(num_readers)
    writer_pid = fork(write_for_ever, ring, 0)
    report, log = os.pipe()
    deadline = time.monotonic() + seconds

    def read_until(index: int) -> None:
        reader = ring.reader(index)
        expected = sleeps = lost_wake_ups = 0
        while time.monotonic() < deadline:
            for _, _, payload in reader.drain():
                assert LABEL.unpack_from(payload) == (0, expected)
                expected += 1
            if reader.arm():
                sleeps += 1
                if not select.select([ring.bells[index].fd], [], [], 1)[0] and reader.has_frames:
                    lost_wake_ups += 1
                ring.bells[index].clear()
                reader.disarm()
        reader.close()
        os.write(log, struct.pack("<QQQ", expected, sleeps, lost_wake_ups))
        os._exit(0)

    for pid in [fork(read_until, index) for index in range(num_readers)]:
        assert os.waitpid(pid, 0)[1] == 0
    kill(writer_pid)
    frames, sleeps, lost = map(sum, zip(*struct.iter_unpack("<QQQ", os.read(report, 24 * num_readers)), strict=True))
    return {"frames": frames, "sleeps": sleeps, "lost_wake_ups": lost}


def echo(text: str) -> None:
    """The spoke of a link that was passed by descriptor number: sends back what it hears, until told to stop."""
    import anyio

    end = json.loads(text)

    async def main() -> None:
        stopped = anyio.Event()

        def on_frame(kind: int, scalars: object, arrays: list) -> None:  # type: ignore[type-arg]
            if kind == 0:
                stopped.set()
            else:
                spoke.sender.send_nowait(kind, scalars, arrays)

        spoke = open_spoke(
            LinkEnd(end["generation"], end["num_spokes"], end["index"], tuple(end["fds"])),
            on_frame=on_frame,
            checksum=True,
        )
        spoke.start()
        await stopped.wait()
        await spoke.sender.wait_flushed()
        spoke.close()

    anyio.run(main, backend_options={"use_uvloop": True})


if __name__ == "__main__":
    mode, *rest = sys.argv[1:]
    if mode == "echo":
        echo(rest[0])
    elif mode == "kill_writers":
        print(json.dumps(kill_writers(int(rest[0]))))
    elif mode == "kill_readers":
        print(json.dumps(kill_readers(int(rest[0]))))
    elif mode == "stream":
        print(json.dumps(stream(float(rest[0]), int(rest[1]))))
