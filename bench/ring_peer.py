"""One process of `bench/ring.py`: either end of rings, or of ZeroMQ sockets. Runs under both interpreters.

    python ring_peer.py ring|zmq INDEX CONFIGURATION     (INDEX 0: the hub that sends, 1 to N: the spokes)

Reads one command per line (JSON), answers {"ready": true} when it can be sent to, and its result at the end. Times are
CLOCK_MONOTONIC, which all processes share, so one-way times need no echo.
"""

from __future__ import annotations

import asyncio
import gc
import json
import struct
import sys
import time
from collections.abc import Callable, Coroutine
from typing import Any

import numpy as np
import uvloop

STAMP = struct.Struct("<q")
now_ns = time.monotonic_ns
STEP_ROWS = 256
PROMPT_TOKENS = 100_000

Result = dict[str, Any]


def answer(value: Result) -> None:
    print(json.dumps(value), flush=True)


class Latencies:
    """One-way times in microseconds, and an event that is set when `count` of them are there."""

    def __init__(self, count: int) -> None:
        self.values: list[float] = []
        self.count = count
        self.done = asyncio.Event()

    def add(self, sent_ns: int) -> None:
        self.values.append((now_ns() - sent_ns) / 1000)
        if len(self.values) == self.count:
            self.done.set()

    def result(self) -> Result:
        values = sorted(self.values[len(self.values) // 10 :])  # the first tenth warms up
        return {"p50": values[len(values) // 2], "p99": values[len(values) * 99 // 100]}


class Cpu:
    """CPU time of the whole process, helper threads included."""

    def __init__(self) -> None:
        self.start = time.process_time()

    def used(self) -> float:
        return time.process_time() - self.start


# Rings ----------------------------------------------------------------------------------------------------------------


class Rings:
    """The hub, or a spoke, of one broadcast link and of one single link per spoke."""

    def __init__(self, index: int, configuration: dict[str, Any]) -> None:
        from actorllm.ring.channel import LinkEnd, open_hub, open_spoke

        self.index = index
        ends = [
            LinkEnd(end["generation"], end["num_spokes"], end["index"], tuple(end["fds"]))
            for end in configuration["ends"]
        ]
        self.on_frame: Callable[..., object] = lambda *_: None
        if index == 0:
            links: list[Any] = [open_hub(end, on_frame=lambda *message: self.on_frame(*message[1:])) for end in ends]
        else:
            links = [open_spoke(end, on_frame=lambda *message: self.on_frame(*message)) for end in ends]
        self.broadcast, *self.singles = links
        self.all = links

    # Raw frames: a writer and a reader, and the pump that a receiver is, without the codec.

    def watch_raw(self, reader: Any, on_payload: Callable[[bytes], object]) -> Callable[[], None]:
        def pump() -> None:
            reader.bell.clear()
            turn()

        def turn() -> None:
            for _ in range(4):
                frames = reader.drain(64)
                for _, _, payload in frames:
                    on_payload(payload)
                if len(frames) < 64 and reader.arm():
                    return
            reader.bell.call_soon(turn)

        reader.bell.watch(pump)
        reader.bell.call_soon(turn)
        return reader.bell.unwatch  # type: ignore[no-any-return]

    async def write_all(self, writers: list[Any], payload: bytes, count: int) -> None:
        """Every message to every writer, waiting for room on the space bell."""
        room = asyncio.Event()
        for writer in writers:
            writer.space_bell.clear()
            writer.space_bell.watch(room.set)
        for _ in range(count):
            for writer in writers:
                while not writer.try_write(1, payload):
                    room.clear()
                    writer.space_bell.clear()
                    writer.want_space()
                    if writer.try_write(1, payload):
                        break
                    await room.wait()
        for writer in writers:
            writer.space_bell.unwatch()

    async def write_batches(self, writer: Any, payload: bytes, count: int, batch: int) -> None:
        """The same for one writer that is given `batch` messages at a time."""
        room = asyncio.Event()
        writer.space_bell.clear()
        writer.space_bell.watch(room.set)
        for start in range(0, count, batch):
            frames = [(1, 0, payload) for _ in range(min(batch, count - start))]
            while True:
                del frames[: writer.write_many(frames)]
                if not frames:
                    break
                room.clear()
                writer.space_bell.clear()
                writer.want_space()
                del frames[: writer.write_many(frames)]
                if not frames:
                    break
                await room.wait()
        writer.space_bell.unwatch()

    async def one_way(self, command: Result) -> Result:
        link = self.singles[0]
        count, gap_s = command["count"], command["gap_s"]
        reader, writer = link.receivers[0].reader, link.sender.writer
        if self.index == 0:
            payload = bytearray(command["size"])
            replied = asyncio.Event()
            sent = 0

            def send() -> None:
                nonlocal sent
                sent += 1
                STAMP.pack_into(payload, 0, now_ns())
                assert writer.try_write(1, payload)

            def on_reply(_: bytes) -> None:
                if gap_s == 0 and sent < count:
                    send()
                else:
                    replied.set()

            stop = self.watch_raw(reader, on_reply)
            answer({"ready": True})
            while sent < count:
                send()
                await replied.wait()
                replied.clear()
                if gap_s:
                    await asyncio.sleep(gap_s)
            stop()
            return {}
        latencies = Latencies(count)

        def on_payload(payload: bytes) -> None:
            latencies.add(STAMP.unpack_from(payload)[0])
            writer.try_write(1, payload[:8])

        stop = self.watch_raw(reader, on_payload)
        answer({"ready": True})
        await latencies.done.wait()
        stop()
        return latencies.result()

    async def stream(self, command: Result) -> Result:
        return await self._many([self.singles[0]], command, command.get("through") == "channel")

    async def broadcast_ring(self, command: Result) -> Result:
        return await self._many([self.broadcast], command, False)

    async def broadcast_singles(self, command: Result) -> Result:
        return await self._many(self.singles, command, False)

    async def _many(self, links: list[Any], command: Result, with_codec: bool) -> Result:
        count, size = command["count"], command["size"]
        if self.index == 0:
            answer({"ready": True})
            cpu, start = Cpu(), now_ns()
            if with_codec:
                sender, array = links[0].sender, np.zeros(size - 32, np.uint8)
                for _ in range(count):
                    await sender.send(1, None, [array])
                await sender.wait_flushed()
                sender.writer.space_bell.unwatch()
            elif "batch" in command:
                await self.write_batches(links[0].sender.writer, bytes(size), count, command["batch"])
            else:
                await self.write_all([link.sender.writer for link in links], bytes(size), count)
            return {"start_ns": start, "cpu_s": cpu.used()}
        link = links[0]
        done, got = asyncio.Event(), 0

        def on_payload(*_: object) -> None:
            nonlocal got
            got += 1
            if got == count:
                done.set()

        if with_codec:
            self.on_frame = on_payload
            link.receiver.start()
            stop = link.receiver.reader.bell.unwatch
        else:
            stop = self.watch_raw(link.receiver.reader, on_payload)
        answer({"ready": True})
        cpu = Cpu()
        await done.wait()
        end = now_ns()
        stop()
        return {"end_ns": end, "cpu_s": cpu.used()}

    async def end_to_end(self, command: Result) -> Result:
        """Build the message's bytes, send, wake, receive, take apart: as actors do."""
        link, count = self.singles[0], command["count"]
        if self.index == 0:
            arrays = ring_arrays(command["message"])
            replied = asyncio.Event()
            self.on_frame = lambda *_: replied.set()
            link.receivers[0].start()
            answer({"ready": True})
            for _ in range(count):
                await asyncio.sleep(command["gap_s"])
                link.sender.send_nowait(8, [7, 0, now_ns(), 0.5], arrays)
                await replied.wait()
                replied.clear()
            link.receivers[0].reader.bell.unwatch()
            return {}
        latencies = Latencies(count)

        def on_frame(kind: int, scalars: list[Any], arrays: list[Any]) -> None:
            latencies.add(scalars[2])
            link.sender.send_nowait(1, None)

        self.on_frame = on_frame
        link.receiver.start()
        answer({"ready": True})
        await latencies.done.wait()
        link.receiver.reader.bell.unwatch()
        return latencies.result()

    async def paced(self, command: Result) -> Result:
        """CPU while `rate` messages a second arrive (0: idle), with the runtime's re-check four times a second."""
        link = self.singles[0]
        end = time.monotonic() + command["seconds"]
        self.on_frame = lambda *_: None
        for one in self.all:
            one.start()
        answer({"ready": True})
        cpu = Cpu()

        async def recheck() -> None:
            while time.monotonic() < end:
                await asyncio.sleep(0.25)
                for one in self.all:
                    one.recheck()

        task = asyncio.create_task(recheck())
        if self.index == 0 and command["rate"]:
            array = np.zeros(42, np.int32)
            while time.monotonic() < end:
                await asyncio.sleep(1 / command["rate"])
                link.sender.send_nowait(1, None, [array])
        await task
        used = cpu.used()
        if self.index:
            await asyncio.sleep(0.2)  # the hub began later: what it still sends must not be left for the next case
        for one in self.all:
            one.sender.writer.space_bell.unwatch()
            for receiver in one.receivers:
                receiver.reader.bell.unwatch()
        return {"cpu_s": used}


def ring_arrays(message: str) -> list[Any]:
    """The columns of one message, as the engine sends it."""
    rows = STEP_ROWS
    if message == "step output":  # rid, index and token of every row
        return [np.arange(rows, dtype=np.int32) for _ in range(3)]
    if message == "schedule":  # the changes of a step: 2 rows end, 2 begin with 500 tokens each, 16 get a block
        return [
            np.arange(2, dtype=np.int32),
            *(np.arange(2, dtype=np.int32) for _ in range(6)),
            np.arange(1000, dtype=np.int32),
            np.arange(64, dtype=np.int32),
            *(np.arange(16, dtype=np.int32) for _ in range(2)),
            np.arange(rows, dtype=np.int32),
        ]
    return [np.arange(PROMPT_TOKENS, dtype=np.int32)]


# ZeroMQ ---------------------------------------------------------------------------------------------------------------


class Zmq:
    """The same with ZeroMQ: PAIR sockets under uvloop and blocking ones, PUB and SUB for the broadcast."""

    def __init__(self, index: int, configuration: dict[str, Any]) -> None:
        import zmq
        import zmq.asyncio

        self.zmq = zmq
        self.index = index
        folder = configuration["folder"]
        self.context = zmq.asyncio.Context()
        self.blocking_context = zmq.Context()

        def connect(socket: Any, name: str) -> Any:
            socket.set_hwm(configuration["high_water_mark"])
            if index == 0:
                socket.bind(f"ipc://{folder}/{name}")
            else:
                if socket.type == zmq.SUB:
                    socket.subscribe(b"")
                socket.connect(f"ipc://{folder}/{name}")
            return socket

        if index <= 1:
            self.pair = connect(self.context.socket(zmq.PAIR), "pair")
            self.blocking = connect(self.blocking_context.socket(zmq.PAIR), "blocking")
        kind = zmq.PUB if index == 0 else zmq.SUB
        # A publisher drops what exceeds its mark; none is set so that every message counts.
        self.pubsub = self.context.socket(kind)
        self.blocking_pubsub = self.blocking_context.socket(kind)
        configuration["high_water_mark"] = 0
        connect(self.pubsub, "pubsub")
        connect(self.blocking_pubsub, "blocking-pubsub")

    async def one_way(self, command: Result) -> Result:
        if command["transport"] == "zmq blocking":
            return self._one_way_blocking(command)
        count, gap_s, socket = command["count"], command["gap_s"], self.pair
        copy = command["size"] < 65536
        if self.index == 0:
            payload = bytearray(command["size"])
            answer({"ready": True})
            for _ in range(count):
                STAMP.pack_into(payload, 0, now_ns())
                await socket.send(payload, copy=copy)
                await socket.recv()
                if gap_s:
                    await asyncio.sleep(gap_s)
            return {}
        latencies = Latencies(count)
        answer({"ready": True})
        for _ in range(count):
            message = await socket.recv(copy=copy)
            stamp = STAMP.unpack_from(message if copy else message.buffer)[0]
            latencies.add(stamp)
            await socket.send(STAMP.pack(stamp))
        return latencies.result()

    def _one_way_blocking(self, command: Result) -> Result:
        count, gap_s, socket = command["count"], command["gap_s"], self.blocking
        copy = command["size"] < 65536
        if self.index == 0:
            payload = bytearray(command["size"])
            answer({"ready": True})
            for _ in range(count):
                STAMP.pack_into(payload, 0, now_ns())
                socket.send(payload, copy=copy)
                socket.recv()
                if gap_s:
                    time.sleep(gap_s)
            return {}
        latencies = Latencies(count)
        answer({"ready": True})
        for _ in range(count):
            message = socket.recv(copy=copy)
            stamp = STAMP.unpack_from(message if copy else message.buffer)[0]
            latencies.add(stamp)
            socket.send(STAMP.pack(stamp))
        return latencies.result()

    async def stream(self, command: Result) -> Result:
        is_blocking = command["transport"] == "zmq blocking"
        return await self._many(self.blocking if is_blocking else self.pair, is_blocking, command)

    async def broadcast_pubsub(self, command: Result) -> Result:
        is_blocking = command["transport"] == "zmq blocking"
        return await self._many(self.blocking_pubsub if is_blocking else self.pubsub, is_blocking, command)

    async def _many(self, socket: Any, is_blocking: bool, command: Result) -> Result:
        count, payload = command["count"], bytes(command["size"])
        answer({"ready": True})
        cpu, start = Cpu(), now_ns()
        if self.index == 0:
            if is_blocking:
                for _ in range(count):
                    socket.send(payload)
            else:
                for _ in range(count):
                    await socket.send(payload)
            return {"start_ns": start, "cpu_s": cpu.used()}
        if is_blocking:
            for _ in range(count):
                socket.recv()
        else:
            for _ in range(count):
                await socket.recv()
        return {"end_ns": now_ns(), "cpu_s": cpu.used()}

    async def end_to_end(self, command: Result) -> Result:
        """msgspec's fastest form (structs as arrays) in a multipart message, as vLLM's clients send it."""
        import msgspec

        is_blocking = command["transport"] == "zmq blocking"
        socket = self.blocking if is_blocking else self.pair
        kind, build = zmq_message(command["message"])
        count = command["count"]
        if self.index == 0:
            encoder = msgspec.msgpack.Encoder()
            answer({"ready": True})
            for _ in range(count):
                await asyncio.sleep(command["gap_s"])
                message = build(now_ns())
                parts = [b"\x08", encoder.encode(message)]
                if is_blocking:
                    socket.send_multipart(parts, copy=False)
                    socket.recv()
                else:
                    await socket.send_multipart(parts, copy=False)
                    await socket.recv()
            return {}
        decoder = msgspec.msgpack.Decoder(kind)
        latencies = Latencies(count)
        is_prompt_bytes = command["message"] == "100k prompt as bytes"
        answer({"ready": True})
        for _ in range(count):
            frames = socket.recv_multipart(copy=False)
            if not is_blocking:
                frames = await frames
            message = decoder.decode(frames[1].buffer)
            if is_prompt_bytes:
                np.frombuffer(message.prompt_token_ids, np.int32)
            latencies.add(message.stamp)
            reply = socket.send(b"")
            if not is_blocking:
                await reply
        return latencies.result()

    async def paced(self, command: Result) -> Result:
        end = time.monotonic() + command["seconds"]
        answer({"ready": True})
        cpu = Cpu()
        if self.index == 0 and command["rate"]:
            payload = bytes(200)
            while time.monotonic() < end:
                await asyncio.sleep(1 / command["rate"])
                await self.pair.send(payload)
        elif self.index == 1 and command["rate"]:

            async def receive() -> None:
                while True:
                    await self.pair.recv()

            task = asyncio.create_task(receive())
            await asyncio.sleep(command["seconds"] + 0.2)
            task.cancel()
        else:
            await asyncio.sleep(command["seconds"])
        return {"cpu_s": cpu.used()}


def zmq_message(message: str) -> tuple[Any, Callable[[int], Any]]:
    """The same content as rows: a struct per request, ids as strings, token ids as lists."""
    import msgspec

    class Output(msgspec.Struct, array_like=True, omit_defaults=True):  # type: ignore[call-arg,misc]
        request_id: str
        new_token_ids: list[int]
        finish_reason: int | None = None

    class Outputs(msgspec.Struct, array_like=True):  # type: ignore[call-arg,misc]
        stamp: int
        outputs: list[Output]

    class NewRequest(msgspec.Struct, array_like=True):  # type: ignore[call-arg,misc]
        request_id: str
        prompt_token_ids: list[int]
        block_ids: list[int]
        num_computed_tokens: int

    class Schedule(msgspec.Struct, array_like=True):  # type: ignore[call-arg,misc]
        stamp: int
        new: list[NewRequest]
        cached_ids: list[str]
        new_blocks: list[list[int] | None]
        num_computed: list[int]
        num_scheduled: dict[str, int]
        finished: list[str]

    class Prompt(msgspec.Struct, array_like=True):  # type: ignore[call-arg,misc]
        stamp: int
        request_id: str
        prompt_token_ids: list[int]

    class PromptBytes(msgspec.Struct, array_like=True):  # type: ignore[call-arg,misc]
        stamp: int
        request_id: str
        prompt_token_ids: bytes

    for kind in (Output, Outputs, NewRequest, Schedule, Prompt, PromptBytes):
        globals()[kind.__name__] = kind  # msgspec resolves the annotations there
    ids = [f"chatcmpl-{i:08x}" for i in range(STEP_ROWS)]
    if message == "step output":
        return Outputs, lambda stamp: Outputs(stamp, [Output(name, [7]) for name in ids])
    if message == "schedule":
        new = [NewRequest(f"chatcmpl-{i:08x}", list(range(500)), list(range(32)), 0) for i in range(2)]
        blocks: list[list[int] | None] = [[i] if i % 16 == 0 else None for i in range(STEP_ROWS)]
        computed, scheduled = list(range(STEP_ROWS)), dict.fromkeys(ids, 1)
        return Schedule, lambda stamp: Schedule(stamp, new, ids, blocks, computed, scheduled, ids[:2])
    if message == "100k prompt as bytes":
        array = np.arange(PROMPT_TOKENS, dtype=np.int32)
        return PromptBytes, lambda stamp: PromptBytes(stamp, ids[0], array.tobytes())
    tokens = list(range(PROMPT_TOKENS))
    return Prompt, lambda stamp: Prompt(stamp, ids[0], tokens)


async def carry_out(side: Any, command: Result) -> Result:
    method: Coroutine[Any, Any, Result] = getattr(side, command["verb"])(command)
    return await method


def main() -> None:
    name, index, configuration = sys.argv[1], int(sys.argv[2]), json.loads(sys.argv[3])
    loop = uvloop.new_event_loop()
    asyncio.set_event_loop(loop)

    async def build() -> Any:
        return (Rings if name == "ring" else Zmq)(index, configuration)

    side = loop.run_until_complete(build())
    versions = {"uvloop": uvloop.__version__, "numpy": np.__version__, "python": sys.version.split()[0]}
    if name == "zmq":
        import msgspec
        import zmq

        versions |= {"pyzmq": zmq.__version__, "libzmq": zmq.zmq_version(), "msgspec": msgspec.__version__}
    gc.collect()
    gc.freeze()
    answer({"versions": versions})
    for line in sys.stdin:
        answer(loop.run_until_complete(carry_out(side, json.loads(line))))


if __name__ == "__main__":
    main()
