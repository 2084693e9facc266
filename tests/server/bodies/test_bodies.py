"""Bodies of HTTP requests: what is large is parsed elsewhere, with the same result, in turns, and the process for it ends."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import threading
from collections.abc import AsyncIterator, Iterator
from pathlib import Path
from typing import Any

import anyio
import anyio.lowlevel
import anyio.to_thread
import numpy as np
import orjson
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from starlette.requests import Request

from actorllm.server.bodies import limits, reader
from actorllm.server.bodies.body_codec import pack, question, unpack
from actorllm.server.bodies.limits import BodyRefusal
from actorllm.server.bodies.parse_process import MAX_RESIDENT_KIB, NICENESS
from actorllm.server.bodies.reader import BodyReader, is_small
from actorllm.server.envelope import ApiError
from actorllm.types.params import MAX_N
from tests.effort import examples

pytestmark = pytest.mark.anyio

TOKEN_FIELDS = ("prompt", "tokens")
PADDING = {"user": "a" * (reader.ALWAYS_LARGE + 1)}


def reply(body: Any) -> Any:
    """What comes out of the parse process, without the process."""
    data = bytearray(body if isinstance(body, bytes) else orjson.dumps(body))
    parts = pack(bytearray(b"".join(question(data, TOKEN_FIELDS))))
    return unpack(bytearray(b"".join(bytes(part) for part in parts)))


def plain(value: Any) -> Any:
    if isinstance(value, np.ndarray):
        return value.tolist()
    return [plain(one) for one in value] if isinstance(value, list) else value


def request(body: bytes) -> Request:
    """Of a client that stays."""
    messages = iter([{"type": "http.request", "body": body}])

    async def receive() -> Any:
        for message in messages:
            return message
        return await anyio.sleep_forever()

    return Request({"type": "http", "method": "POST", "headers": []}, receive)


def large(**fields: Any) -> Request:
    return request(orjson.dumps({**fields, **PADDING}))


@pytest.fixture
async def bodies() -> AsyncIterator[BodyReader]:
    made = BodyReader()
    yield made
    made.close()


def pid_of(bodies: BodyReader) -> int:
    assert bodies.process is not None
    return bodies.process.pid


def is_there(pid: int) -> bool:
    return os.path.exists(f"/proc/{pid}")


# What crosses ---------------------------------------------------------------------------------------------------------


VALUES = st.recursive(
    st.none()
    | st.booleans()
    | st.integers(-(2**63), 2**64 - 1)
    | st.floats(allow_nan=False, allow_infinity=False)
    | st.text(),
    lambda inner: st.lists(inner, max_size=4) | st.dictionaries(st.text(), inner, max_size=4),
    max_leaves=20,
)


@given(st.dictionaries(st.sampled_from(["prompt", "tokens", "user", "stop"]), VALUES))
@settings(max_examples=examples(33, 100), deadline=None)
def test_a_body_is_the_same_after_its_way(tree: dict[str, Any]) -> None:
    assert reply(tree) == orjson.loads(orjson.dumps(tree))


@pytest.mark.parametrize(
    "value",
    [
        list(range(5000)),
        [-(2**63), 2**63 - 1] * 600,
        [[1, 2], [], list(range(3000)), [7]],
        [[]] * 2000,
        ["a"] * 2000,
        [1] * 2000 + ["a"],
        [1] * 2000 + [True],
        [1] * 2000 + [2**64 - 1],
        [1] * 2000 + [1.0],
        [[1] * 2000, ["a"]],
        [[1] * 2000, "a"],
        "漢\0\U0001f600é" * 1000,
    ],
    ids=lambda value: str(value)[:10],
)
def test_what_is_long_is_the_same_after_its_way(value: Any) -> None:
    tree = {"prompt": value, "user": value, "n": 1}
    found = reply(tree)
    assert {name: plain(one) for name, one in found.items()} == tree
    assert list(found) == list(tree)
    assert not isinstance(found["user"], np.ndarray)


def test_long_lists_of_token_ids_are_arrays() -> None:
    assert isinstance(reply({"prompt": [5] * 2000})["prompt"], np.ndarray)
    assert all(isinstance(one, np.ndarray) for one in reply({"prompt": [[5] * 2000, [6]]})["prompt"])


@pytest.mark.parametrize(
    ("tree", "told", "param"),
    [
        ({"prompt": ["a"] * 20_000}, "prompt has 20000 items, and the limit is 16384", "prompt"),
        (
            {"logit_bias": {str(i): 1 for i in range(5000)}},
            "logit_bias has 5000 items, and the limit is 4096",
            "logit_bias",
        ),
        ({str(i): 1 for i in range(2000)}, "the body has 2000 fields, and the limit is 1024", None),
        ({"prompt": [1] * 70_000 + ["a"]}, 'item 70000 of it is "a", which is no token id', "prompt"),
        ({"prompt": [1] * 70_000 + [2**64 - 1]}, f"item 70000 of it is {2**64 - 1}, which is no token id", "prompt"),
        ({"prompt": [[1] * 70_000, [1, {}]]}, "item 1 of it holds one in which item 1 of it is an object", "prompt"),
        ({"metadata": {str(i): [1] for i in range(40_000)}}, "metadata has more than 65536 items", "metadata"),
        (
            b'{"prompt":' + b"[" * 500 + b"]" * 500 + b"}",
            "prompt is nested too deeply: the limit is 200 levels",
            "prompt",
        ),
        (b'{"prompt":' + b"[" * 100_000, "not valid JSON", None),
        (b"[1]", "must be a JSON object", None),
    ],
    ids=lambda value: str(value)[:20],
)
def test_what_is_too_much_is_refused_by_its_count(tree: Any, told: str, param: str | None) -> None:
    found = reply(tree)
    assert isinstance(found, BodyRefusal)
    assert told in found.message
    assert found.param == param


def test_limits_fit_those_of_the_engine() -> None:
    assert limits.MAX_PROMPTS == MAX_N


def test_what_is_small() -> None:
    assert is_small(bytearray(b"[" * reader.ALWAYS_SMALL))
    assert not is_small(bytearray(b"[" * (reader.ALWAYS_SMALL + 1)))
    assert is_small(bytearray(b"a" * reader.ALWAYS_LARGE))
    assert not is_small(bytearray(b"a" * (reader.ALWAYS_LARGE + 1)))
    assert not is_small(bytearray(b"a" * 100_000 + b":" * (reader.MAX_SEPARATORS + 1)))


# The process ----------------------------------------------------------------------------------------------------------


async def test_one_process_for_all(bodies: BodyReader) -> None:
    assert (await bodies.read(request(b'{"n":1}')))["n"] == 1
    assert bodies.process is None
    assert (await bodies.read(large(n=1)))["n"] == 1
    pid = pid_of(bodies)
    assert (await bodies.read(large(n=2)))["n"] == 2
    assert pid_of(bodies) == pid
    bodies.close()
    assert not is_there(pid)
    assert (await bodies.read(large(n=3)))["n"] == 3


async def test_the_thread_that_starts_a_process_lives_as_long_as_it(bodies: BodyReader) -> None:
    """The parent-death signal follows that thread."""
    await bodies.read(large(n=1))
    (starter,) = [thread for thread in threading.enumerate() if thread.name == "actorllm:starter"]
    assert starter is not threading.current_thread()
    await bodies.read(large(n=2))
    assert starter.is_alive()
    bodies.close()
    await anyio.to_thread.run_sync(starter.join)


async def test_a_process_that_cannot_be_started_is_told(bodies: BodyReader, monkeypatch: pytest.MonkeyPatch) -> None:
    def fail(*arguments: Any, **more: Any) -> None:
        raise OSError("too many")

    monkeypatch.setattr(subprocess.Popen, "__init__", fail)
    with pytest.raises(ApiError, match="no process for a body of this size") as caught:
        await bodies.read(large(n=1))
    assert caught.value.status == 503
    monkeypatch.undo()
    assert (await bodies.read(large(n=1)))["n"] == 1


async def test_a_process_that_dies_with_a_body_is_replaced(bodies: BodyReader) -> None:
    await bodies.read(large(n=1))
    pid = pid_of(bodies)
    os.kill(pid, signal.SIGSTOP)
    found: list[Any] = []

    async def ask() -> None:
        found.append(await bodies.read(large(n=2)))

    async with anyio.create_task_group() as tasks:
        tasks.start_soon(ask)
        await _busy(bodies)
        os.kill(pid, signal.SIGKILL)
    assert found[0]["n"] == 2
    assert pid_of(bodies) != pid


async def test_a_process_that_hangs_is_killed(bodies: BodyReader, monkeypatch: pytest.MonkeyPatch) -> None:
    await bodies.read(large(n=1))
    pid = pid_of(bodies)
    os.kill(pid, signal.SIGSTOP)
    monkeypatch.setattr(reader, "PARSE_TIMEOUT_S", 0.05)
    with pytest.raises(ApiError, match="could not be parsed in time") as caught:
        await bodies.read(large(n=2))
    assert caught.value.status == 503
    assert not is_there(pid)
    monkeypatch.undo()
    assert (await bodies.read(large(n=3)))["n"] == 3


async def test_short_ones_go_before_long_ones_and_no_more_wait_than_there_is_room_for(
    bodies: BodyReader, monkeypatch: pytest.MonkeyPatch
) -> None:
    await bodies.read(large(n=1))
    monkeypatch.setattr(reader, "MAX_WAITING", 3)
    os.kill(pid_of(bodies), signal.SIGSTOP)
    order: list[int] = []

    async def ask(number: int, size: int) -> None:
        await bodies.read(request(orjson.dumps({"n": number, "user": "a" * size})))
        order.append(number)

    async with anyio.create_task_group() as tasks:
        tasks.start_soon(ask, 1, 2_000_000)
        await _busy(bodies)
        for number, size in ((2, 8_000_000), (3, 4_000_000), (4, 2_000_000)):
            tasks.start_soon(ask, number, size)
            while bodies.num_waiting < number - 1:
                await anyio.lowlevel.checkpoint()
        with pytest.raises(ApiError, match="3 large bodies wait") as caught:
            await bodies.read(large(n=5))
        assert caught.value.status == 429
        os.kill(pid_of(bodies), signal.SIGCONT)
    assert order == [1, 4, 3, 2]


async def test_who_waits_and_leaves_takes_no_turn(bodies: BodyReader) -> None:
    await bodies.read(large(n=1))
    os.kill(pid_of(bodies), signal.SIGSTOP)
    done: list[int] = []

    async def ask(number: int) -> None:
        await bodies.read(large(n=number))
        done.append(number)

    async with anyio.create_task_group() as tasks:
        tasks.start_soon(ask, 1)
        await _busy(bodies)
        async with anyio.create_task_group() as leaving:
            leaving.start_soon(ask, 2)
            while not bodies.num_waiting:
                await anyio.lowlevel.checkpoint()
            leaving.cancel_scope.cancel()
        assert not bodies.num_waiting
        tasks.start_soon(ask, 3)
        while not bodies.num_waiting:
            await anyio.lowlevel.checkpoint()
        os.kill(pid_of(bodies), signal.SIGCONT)
    assert done == [1, 3]


async def _busy(bodies: BodyReader) -> None:
    while bodies.process is None or bodies.process.is_idle:
        await anyio.lowlevel.checkpoint()


OWNER = """
import sys
from actorllm.server.bodies.owned_process import OwnedProcess
one = OwnedProcess("actorllm.server.bodies.parse_process")
print(one.pid, flush=True)
sys.stdin.read()
"""


@pytest.fixture
def owner() -> Iterator[subprocess.Popen[str]]:
    with subprocess.Popen(
        [sys.executable, "-c", OWNER], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True, start_new_session=True
    ) as started:
        yield started
        started.kill()


def test_it_ends_with_its_owner_and_not_by_signals_of_a_terminal(owner: subprocess.Popen[str]) -> None:
    assert owner.stdout is not None
    stat = Path(f"/proc/{int(owner.stdout.readline())}/stat")
    while "(actorllm:bodies" not in stat.read_text():  # it has begun
        os.sched_yield()
    for number in (signal.SIGINT, signal.SIGTERM):
        os.kill(int(stat.parent.name), number)
    assert stat.exists()
    owner.kill()
    owner.wait()
    while stat.exists() and stat.read_text().rpartition(")")[2].split()[0] != "Z":
        os.sched_yield()


# Memory ---------------------------------------------------------------------------------------------------------------


async def test_bodies_that_arrive_are_bounded_together(bodies: BodyReader, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(reader, "MAX_HELD_BYTES", 100_000)
    half, going_on = anyio.Event(), anyio.Event()

    async def slowly() -> Any:
        if not half.is_set():
            half.set()
            return {"type": "http.request", "body": b'{"user":"' + b"a" * 90_000, "more_body": True}
        await going_on.wait()
        return {"type": "http.request", "body": b'"}', "more_body": False}

    found: list[Any] = []

    async def ask() -> None:
        found.append(await bodies.read(Request({"type": "http", "method": "POST", "headers": []}, slowly)))

    async with anyio.create_task_group() as tasks:
        tasks.start_soon(ask)
        await half.wait()
        with pytest.raises(ApiError, match="take 90009 bytes already") as caught:
            await bodies.read(request(b" " * 50_000))
        assert caught.value.status == 429
        assert await bodies.read(request(b"{}")) == {}
        going_on.set()
    assert len(found[0]["user"]) == 90_000
    assert (
        len((await bodies.read(request(orjson.dumps({"user": "a" * 200_000}))))["user"]) == 200_000
    )  # alone, any size


async def test_a_large_owner_does_not_make_its_process_end(bodies: BodyReader) -> None:
    """What the owner has held counts for nothing: an application with a model in it is larger than the limit."""
    held = b"x" * (MAX_RESIDENT_KIB << 10)
    assert (await bodies.read(large(n=1)))["n"] == 1
    pid = pid_of(bodies)
    assert (await bodies.read(large(n=2)))["n"] == 2
    assert pid_of(bodies) == pid
    del held


@pytest.mark.skipif(not Path("/proc/self/autogroup").exists(), reason="the kernel does not group processes by session")
async def test_its_process_gives_way_to_all_that_computes(bodies: BodyReader) -> None:
    """Niceness counts within a session only, and the actors have sessions of their own."""
    assert (await bodies.read(large(n=1)))["n"] == 1
    pid = pid_of(bodies)
    assert os.getsid(pid) == pid
    assert session_niceness(pid) == NICENESS


def session_niceness(pid: int) -> int:
    return int(Path(f"/proc/{pid}/autogroup").read_text().split()[-1])
