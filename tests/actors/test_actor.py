"""The life cycle of an actor and the promise that every ask ends, with links in memory on one loop."""

from __future__ import annotations

import threading
import time
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from typing import Any

import anyio
import pytest
from anyio.abc import TaskGroup
from anyio.lowlevel import checkpoint

from actorllm.actors.actor import Actor, Failure, Runner
from actorllm.actors.engine_thread import HostLoop
from actorllm.actors.link import Link, connect_in_memory
from actorllm.actors.topology import LinkSpec
from actorllm.errors import CorruptLinkError, EngineError, PeerLostError, PeerRestartedError, UnsupportedModelError
from actorllm.messages import Message, Reply, StepPlan
from tests.actors.echo import EchoActor, EchoConfig


class Recorder(EchoActor):
    """Writes down its life."""

    def __init__(self, name: str, rank: int = 0) -> None:
        super().__init__(name, rank)
        self.life: list[str] = []
        self.messages: list[Message] = []
        self.lost: list[BaseException | None] = []

    async def on_start(self, config: EchoConfig) -> dict[str, Any]:
        self.life.append("start")
        return await super().on_start(config)

    def on_configure(self, config: EchoConfig) -> None:
        self.life.append("configure")

    def on_link(self, link: Link) -> None:
        self.life.append(f"link {link.peer} {link.generation}")

    async def run(self) -> None:
        self.life.append("run")
        await super().run()
        self.life.append("returned")

    def on_message(self, link: Link, message: Message) -> None:
        self.messages.append(message)

    def on_peer_lost(self, link: Link) -> None:
        self.life.append(f"lost {link.peer} {link.generation}")
        self.lost.append(link.lost)

    async def on_stop(self) -> None:
        self.life.append("stop")

    def on_failure(self, error: BaseException) -> None:
        self.life.append(f"failure {error}")


class Pair:
    """Two recorders, linked."""

    def __init__(self) -> None:
        self.a, self.b = Recorder("a"), Recorder("b")
        self.ends: list[BaseException | None] = []
        self.runners = {actor.name: Runner(actor, self.ends.append) for actor in (self.a, self.b)}

    def link(self, generation: int = 1) -> None:
        infos = LinkSpec.pair("a", "b").infos({"a": 0, "b": 1}, generation)
        for actor, link in zip((self.a, self.b), connect_in_memory(infos), strict=True):
            self.runners[actor.name].install(link)

    @property
    def to_b(self) -> Link:
        return self.a.links["b"]


@asynccontextmanager
async def running_pair() -> AsyncIterator[Pair]:
    pair = Pair()
    async with anyio.create_task_group() as tasks:
        for runner in pair.runners.values():
            await bring_to_life(tasks, runner)
            await runner.start(EchoConfig())
            await runner.configure(EchoConfig())
        pair.link()
        for runner in pair.runners.values():
            runner.run()
        yield pair
        for runner in pair.runners.values():
            runner.stop()


async def bring_to_life(tasks: TaskGroup, runner: Runner) -> None:
    alive = anyio.Event()
    tasks.start_soon(runner.live, alive.set)
    await alive.wait()


async def turns(number: int = 10) -> None:
    for _ in range(number):
        await checkpoint()


async def until(condition: Callable[[], bool]) -> None:
    with anyio.fail_after(10):
        while not condition():
            await checkpoint()


async def test_setup_running_teardown() -> None:
    async with running_pair() as pair:
        pair.a.links["b"].send_nowait(StepPlan(step=1))
        await turns()
        assert pair.b.is_running
    assert pair.b.life == ["start", "configure", "link a 1", "run", "returned", "stop"]
    assert pair.b.num_batches == 1
    assert pair.b.links == {}
    assert pair.ends == []


async def test_an_exception_in_a_handler_ends_the_actor() -> None:
    async with running_pair() as pair:

        def handler(link: Link, message: Message) -> None:
            raise RuntimeError("cannot")

        pair.b.on_message = handler  # type: ignore[method-assign]
        pair.to_b.send_nowait(StepPlan(step=1))
        pair.to_b.send_nowait(StepPlan(step=2))
        await turns()
    assert [str(end) for end in pair.ends] == ["cannot"]
    assert pair.b.life[-1] == "failure cannot"
    assert "stop" not in pair.b.life
    assert pair.runners["b"].failure is pair.ends[0]


@pytest.mark.parametrize("how", ["run", "task", "hook", "unhandled"])
async def test_other_ways_to_fail(how: str) -> None:
    pair = Pair()

    async def fail() -> None:
        async with anyio.create_task_group() as group:  # the error arrives in a group of one
            group.start_soon(explode)

    async def explode() -> None:
        raise ValueError("boom")

    def hook() -> None:
        raise ValueError("boom")

    if how == "run":
        pair.b.run = fail  # type: ignore[method-assign]
    if how == "hook":
        pair.b.on_batch = hook  # type: ignore[method-assign]
    if how == "unhandled":
        pair.b.on_message = lambda link, message: Actor.on_message(pair.b, link, message)  # type: ignore[method-assign]
    async with anyio.create_task_group() as tasks:
        for runner in pair.runners.values():
            await bring_to_life(tasks, runner)
        pair.link()
        pair.runners["b"].run()
        if how == "task":
            pair.b.start_soon(fail)
        if how in ("hook", "unhandled"):
            pair.to_b.send_nowait(StepPlan(step=1))
        await until(lambda: bool(pair.ends))
        pair.runners["a"].stop()
    (end,) = pair.ends
    if how == "unhandled":
        assert "b does not handle StepPlan (from a)" in str(end)
    else:
        assert isinstance(end, ValueError)
        assert pair.b.life[-1] == "failure boom"


async def test_work_beside_the_loop_is_counted_and_its_panic_is_a_failure() -> None:
    """A panic in a Rust library is no `Exception`: it fails the actor as an error does, and does not end the loop."""

    class Panic(BaseException):
        pass

    def panic() -> None:
        raise Panic("retry-limit-in-match over")

    async with running_pair() as pair:
        go, done = threading.Event(), anyio.Event()
        pair.a.work_aside(go.wait, lambda _: done.set())
        await until(lambda: pair.a.statistics()["longest_aside_s"] > 0)
        assert pair.a.statistics()["num_aside_running"] == 1
        go.set()
        await done.wait()
        assert pair.a.statistics()["num_aside_running"] == 0
        assert pair.a.statistics()["num_aside_done"] == 1
        pair.a.work_aside(panic, lambda _: None)
        await until(lambda: bool(pair.ends))
        assert "Panic: retry-limit-in-match over" in str(pair.ends[0])
        assert isinstance(pair.ends[0], EngineError)
        assert pair.runners["a"].counters()["num_aside_failed"] == 1
        assert pair.b.is_running


async def test_run_that_returns_is_an_end_without_error() -> None:
    pair = Pair()

    async def run() -> None:
        return None

    pair.b.run = run  # type: ignore[method-assign]
    async with anyio.create_task_group() as tasks:
        await bring_to_life(tasks, pair.runners["b"])
        pair.runners["b"].run()
    assert pair.ends == [None]
    assert pair.b.life[-1] == "stop"


async def test_ask_and_reply() -> None:
    async with running_pair() as pair:
        assert await pair.a.ask(pair.to_b, "ping") == "b"
        assert await pair.a.ask(pair.to_b, "echo", x=1, y=[None, "z"]) == {"x": 1, "y": [None, "z"]}
        assert await pair.a.ask(pair.to_b, "later", seconds=0.001) == "after 0.001 s"
        assert (await pair.a.ask(pair.to_b, "statistics"))["name"] == "b"
        assert await pair.b.ask(pair.b.links["a"], "ping") == "a"


async def test_the_error_of_an_answer_is_the_askers() -> None:
    async with running_pair() as pair:
        with pytest.raises(EngineError, match=r"b has no answer for 'pong'; did you mean 'ping'\?"):
            await pair.a.ask(pair.to_b, "pong")
        with pytest.raises(UnsupportedModelError, match=r"^Parrot: no$"):
            await pair.a.ask(pair.to_b, "raise", text="Parrot: no")
        with pytest.raises(EngineError, match="b failed to answer 'later': KeyError: 'seconds'"):
            await pair.a.ask(pair.to_b, "later")
        assert await pair.a.ask(pair.to_b, "ping") == "b"


async def test_an_answer_that_cannot_be_sent_is_an_error_of_the_ask(monkeypatch: pytest.MonkeyPatch) -> None:
    async with running_pair() as pair:
        link = pair.b.links["a"]
        send = link.send_nowait

        def refuse(message: Message) -> None:
            if isinstance(message, Reply) and message.value is not None:
                raise ValueError("a message of 99 bytes exceeds the limit of 9")
            send(message)

        monkeypatch.setattr(link, "send_nowait", refuse)
        with pytest.raises(EngineError, match="the answer cannot be sent: a message of 99 bytes"):
            await pair.a.ask(pair.to_b, "ping")
        monkeypatch.undo()
        assert await pair.a.ask(pair.to_b, "ping") == "b"


async def test_an_ask_times_out_and_the_late_reply_is_counted() -> None:
    async with running_pair() as pair:
        with pytest.raises(TimeoutError, match=r"no answer to 'later' from b within 0.001 s"):
            await pair.a.ask(pair.to_b, "later", 0.001, seconds=0.02)
        await until(lambda: pair.a.statistics()["num_late_replies"] == 1)
        assert pair.a.statistics()["num_asks_open"] == 0


@pytest.mark.parametrize("is_failure", [False, True])
async def test_teardown_ends_every_ask(is_failure: bool) -> None:
    """Owed by b: an ask being answered, and one that lies unread in the inbox. Open at b: an ask of its own.

    What a failed actor owes ends with the loss that its supervisor tells: callers that outlive a kill outlive an exception, too.
    """
    outcomes: list[str] = []
    async with running_pair() as pair:

        async def ask(actor: Actor, link: Link, verb: str) -> None:
            try:
                outcomes.append(await actor.ask(link, verb))
            except (EngineError, PeerLostError) as error:
                outcomes.append(str(error))

        async with anyio.create_task_group() as tasks:
            tasks.start_soon(ask, pair.a, pair.to_b, "never")
            tasks.start_soon(ask, pair.b, pair.b.links["a"], "never")
            await turns()
            if is_failure:
                pair.runners["b"].fail(RuntimeError("boom"))
            else:
                pair.runners["b"].stop()
            tasks.start_soon(ask, pair.a, pair.to_b, "ping")
            if is_failure:
                await until(lambda: not pair.b.links)
                pair.runners["a"].lose("a-b", 1, PeerRestartedError("b failed"))
    reason = "b is gone: b failed" if is_failure else "b has stopped"
    assert len(outcomes) == 3
    assert {"a is gone: b has ended", reason} <= set(outcomes) <= {"a is gone: b has ended", reason, "b"}


async def test_a_lost_peer_fails_asks_and_is_reported_once() -> None:
    async with running_pair() as pair:
        old = pair.to_b
        errors: list[PeerLostError] = []

        async def ask() -> None:
            try:
                await pair.a.ask(old, "never")
            except PeerLostError as error:
                errors.append(error)

        async with anyio.create_task_group() as tasks:
            tasks.start_soon(ask)
            await turns()
            pair.b.links["a"].send_nowait(StepPlan(step=5))
            cause = EngineError("b was killed")
            pair.runners["a"].lose("a-b", 7, cause)  # another generation: nothing happens
            assert pair.to_b is old
            pair.runners["a"].lose("a-b", 1, cause)
            pair.runners["a"].lose("a-b", 1, cause)
        assert [type(m) for m in pair.a.messages] == [StepPlan]  # what it had sent came first
        assert pair.a.life[-1] == "lost b 1"
        assert pair.a.life.count("lost b 1") == 1
        assert pair.a.lost == [cause]
        assert errors[0].__cause__ is cause
        with pytest.raises(PeerLostError):
            old.send_nowait(StepPlan(step=6))


async def test_a_new_generation_replaces_the_old_link() -> None:
    async with running_pair() as pair:
        pair.b.links["a"].send_nowait(StepPlan(step=1))
        pair.link(2)
        assert pair.a.life[-2:] == ["lost b 1", "link b 2"]
        assert [m.step for m in pair.a.messages if isinstance(m, StepPlan)] == [1]
        assert await pair.a.ask(pair.to_b, "ping") == "b"
        assert pair.to_b.generation == 2


async def test_a_corrupt_link_fails_the_actor_unless_it_says_otherwise() -> None:
    async with running_pair() as pair:
        pair.a.on_link_error = lambda link, error: None  # type: ignore[method-assign]
        pair.runners["a"].break_link(pair.to_b, CorruptLinkError("nonsense"))
        assert pair.a.life[-1] == "lost b 1"
        pair.runners["b"].break_link(pair.b.links["a"], CorruptLinkError("nonsense"))
    assert [str(end) for end in pair.ends] == ["nonsense"]


async def test_nothing_more_of_a_peer_is_heard_that_sent_what_cannot_be() -> None:
    """However much of it waits: the actor that drops the link goes on."""
    async with running_pair() as pair:
        heard: list[Message] = []

        def admits(link: Link, message: Message) -> bool:
            heard.append(message)
            pair.b.drop_link(link, CorruptLinkError("nonsense"))
            return False

        pair.b.admits = admits  # type: ignore[method-assign]
        pair.b.on_link_error = lambda link, error: None  # type: ignore[method-assign]
        for step in range(500):
            pair.to_b.send_nowait(StepPlan(step=step))
        await turns()
        assert pair.b.is_running
        assert pair.b.life.count("lost a 1") == 1
        assert len(heard) == 1
    assert pair.ends == []


async def test_a_link_that_turns_out_to_be_corrupt_at_the_end_is_dropped() -> None:
    async with running_pair() as pair:
        b, runner = pair.b, pair.runners["b"]
        _, other = connect_in_memory(LinkSpec.pair("c", "b").infos({"c": 2, "b": 1}, 1))
        runner.install(other)
        link = b.links["a"]

        def finish() -> None:
            link.finish = lambda: None  # type: ignore[method-assign]
            runner.break_link(link, CorruptLinkError("nonsense"))

        b.on_link_error = lambda link, error: None  # type: ignore[method-assign]
        link.finish = finish  # type: ignore[method-assign]
    assert b.life[-3:] == ["returned", "stop", "lost a 1"]
    assert b.links == {}
    assert pair.ends == []


async def test_statistics_may_be_asked_for_while_links_come_and_go() -> None:
    """As another thread does, between any two lines: each may be the one in which a link is replaced, or its memory gone."""
    async with running_pair() as pair:
        link = pair.a.links["b"]
        other = connect_in_memory(LinkSpec.pair("a", "c").infos({"a": 0, "c": 1}, 1))[0]
        closed = connect_in_memory(LinkSpec.pair("a", "d").infos({"a": 0, "d": 1}, 1))[0]
        statistics, words = link.statistics, memoryview(bytearray(8))
        words.release()
        closed.statistics = lambda: words[0]  # type: ignore[method-assign, assignment, return-value]

        def racing() -> Any:
            pair.runners["a"].install(other)
            return statistics()

        link.statistics = racing  # type: ignore[method-assign]
        pair.runners["a"].install(closed)
        assert set(pair.a.statistics()["links"]) == {"b"}
        del link.statistics  # type: ignore[method-assign]
        assert set(pair.a.statistics()["links"]) == {"b", "c"}


async def test_a_reply_that_nobody_asked_for_is_counted() -> None:
    async with running_pair() as pair:
        pair.to_b.send_nowait(Reply(id=12))
        await turns()
        assert pair.b.statistics()["num_late_replies"] == 1


async def test_wait_ends_by_wake_or_by_the_clock() -> None:
    actor = Recorder("alone")
    actor._wakeup = HostLoop.current().waiter()
    actor.wake()
    assert await actor.wait() is True
    for delay in (0.0, 0.0003, 0.001, 0.0027, 0.02):
        until_ = time.monotonic() + delay
        assert await actor.wait(until_) is False
        assert time.monotonic() >= until_
    async with anyio.create_task_group() as tasks:
        tasks.start_soon(_wake, actor)
        assert await actor.wait(time.monotonic() + 10) is True


async def test_a_cancelled_wait_loses_no_wake() -> None:
    actor = Recorder("alone")
    actor._wakeup = HostLoop.current().waiter()
    async with anyio.create_task_group() as tasks:
        tasks.start_soon(actor.wait)
        await turns(2)
        tasks.cancel_scope.cancel()
        actor.wake()
    assert await actor.wait(0.0) is True


async def _wake(actor: Actor) -> None:
    await turns(2)
    actor.wake()


async def test_a_task_that_wakes_itself_starves_nobody() -> None:
    async with running_pair() as pair:
        turned = 0

        async def turn() -> None:
            nonlocal turned
            while turned < 50:
                turned += 1
                await checkpoint()

        class Restless(Recorder):
            async def run(self) -> None:
                while turned < 50:
                    self.wake()
                    await self.wait()

        actor = Restless("restless")
        runner = Runner(actor, pair.ends.append)
        with anyio.fail_after(30):
            async with anyio.create_task_group() as tasks:
                await bring_to_life(tasks, runner)
                runner.run()
                tasks.start_soon(turn)


async def test_the_cost_of_a_wake_up() -> None:
    """Printed, not asserted."""
    rounds = 5000
    one, other = HostLoop.current().waiter(), HostLoop.current().waiter()

    async def pong() -> None:
        for _ in range(rounds):
            await one.wait()
            other.set()

    async with anyio.create_task_group() as tasks:
        tasks.start_soon(pong)
        await checkpoint()
        start = time.perf_counter()
        for _ in range(rounds):
            one.set()
            assert await other.wait(time.monotonic() + 60)
        print(f"\nfrom set to the return of wait: {(time.perf_counter() - start) / rounds / 2 * 1e6:.1f} µs")


def test_failures_cross_processes() -> None:
    try:
        raise UnsupportedModelError("Parrot")
    except UnsupportedModelError as error:
        failure = Failure.of(ExceptionGroup("one", [error]))
    assert failure.summary == "UnsupportedModelError: Parrot"
    restored = failure.to_start_error("worker0")
    assert type(restored) is UnsupportedModelError
    assert str(restored) == "Parrot"
    assert "test_failures_cross_processes" in restored.__notes__[0]
    other = Failure.of(ValueError("no")).to_start_error("worker0")
    assert str(other) == "worker0 failed to start: ValueError: no"
