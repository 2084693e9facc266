"""Threads with loops, the engine thread's start and stop, and the loops of callers."""

from __future__ import annotations

import asyncio
import concurrent.futures
import os
import signal
import sys
import threading
import time
from collections.abc import Callable, Iterator
from typing import Any

import anyio
import pytest
import trio
import uvloop

from actorllm.actors import engine_thread
from actorllm.actors.engine_thread import (
    AsyncioLoop,
    EngineThread,
    EventWaiter,
    HostLoop,
    LoopThread,
    ThreadHost,
    TrioLoop,
    current_loop,
    serves_loops,
)
from actorllm.client.engine import CACHE_MEMORY
from actorllm.errors import EngineShutdownError, ForkedProcessError


@pytest.fixture
def thread() -> Iterator[LoopThread]:
    thread = LoopThread("test")
    thread.start_thread()
    yield thread
    thread.request_stop()
    assert thread.join(30)


class TestLoopThread:
    def test_calls_return_results_and_exceptions(self, thread: LoopThread) -> None:
        async def double(x: int) -> int:
            await anyio.sleep(0.001)
            return 2 * x

        def fail(*, why: str) -> None:
            raise ValueError(why)

        assert thread.call(double, 21).result(30) == 42
        assert thread.call(threading.get_ident).result(30) == thread._thread.ident
        with pytest.raises(ValueError, match="because"):
            thread.call(fail, why="because").result(30)

    def test_posts_run_in_order(self, thread: LoopThread) -> None:
        seen: list[int] = []
        for number in range(1000):
            thread.post(seen.append, number)
        thread.call(lambda: None).result(30)
        assert seen == list(range(1000))

    def test_a_posted_function_finds_anyio(self, thread: LoopThread) -> None:
        """Also from a thread in which another async library runs."""
        found: list[str] = []

        async def host() -> None:
            done = anyio.Event()
            token = HostLoop.current()

            def look() -> None:
                found.append(type(anyio.CancelScope()).__module__)
                token.call_soon_threadsafe(done.set)

            thread.post(look)
            await done.wait()

        trio.run(host)
        assert found == ["anyio._backends._asyncio"]

    def test_cancelling_the_future_cancels_the_coroutine(self, thread: LoopThread) -> None:
        ended = threading.Event()
        began = threading.Event()

        async def forever() -> None:
            began.set()
            try:
                await anyio.sleep_forever()
            finally:
                ended.set()

        future = thread.call(forever)
        assert began.wait(30)
        assert future.cancel()
        assert ended.wait(30)

    def test_the_end_of_the_loop_resolves_every_call(self) -> None:
        thread = LoopThread("short")
        thread.start_thread()
        waiting = thread.call(anyio.sleep_forever)
        thread.request_stop()
        assert thread.join(30)
        with pytest.raises(EngineShutdownError):
            waiting.result(30)
        with pytest.raises(EngineShutdownError):
            thread.call(lambda: None)
        with pytest.raises(EngineShutdownError):
            thread.post(lambda: None)
        thread.request_stop()

    def test_calls_that_race_with_the_end_are_resolved(self) -> None:
        thread = LoopThread("racing")
        thread.start_thread()
        futures: list[concurrent.futures.Future[Any]] = []

        def call_until_refused() -> None:
            try:
                for _ in range(1000):
                    futures.append(thread.call(lambda: None))  # noqa: PERF401 - what was called before the end counts
            except EngineShutdownError:
                pass

        callers = [threading.Thread(target=call_until_refused) for _ in range(2)]
        for caller in callers:
            caller.start()
        thread.post(thread.request_stop)
        assert thread.join(20)
        for caller in callers:
            caller.join()
        done, undone = concurrent.futures.wait(futures, 10)
        assert not undone
        assert {type(future.exception()) for future in done} <= {type(None), EngineShutdownError}


class Stub:
    """A service that starts and stops as told."""

    def __init__(self, start_s: float = 0.0, error: Exception | None = None, is_deaf: bool = False) -> None:
        self.start_s = start_s
        self.error = error
        self.is_deaf = is_deaf
        self.events: list[str] = []
        self.may_end = threading.Event()
        self.stop: anyio.Event | None = None

    async def run(self, on_ready: Callable[[], object]) -> None:
        self.stop = anyio.Event()
        self.events.append("run")
        try:
            with anyio.move_on_after(self.start_s):
                await self.stop.wait()
            if self.error is not None:
                raise self.error
            if self.stop.is_set():
                raise EngineShutdownError("stopped while it started")
            on_ready()
            self.events.append("ready")
            await self.stop.wait()
            if self.is_deaf:
                self.may_end.wait(30)
        finally:
            with anyio.CancelScope(shield=True):
                await anyio.sleep(0.01)
            self.events.append("clean")

    def request_stop(self, timeout: float) -> None:
        if self.stop is not None:
            self.stop.set()

    def kill(self) -> None:
        self.events.append("kill")
        self.may_end.set()


class TestEngineThread:
    def test_start_call_stop(self) -> None:
        stub = Stub()
        thread = EngineThread(stub)
        thread.start()
        thread.start()  # is started already
        assert thread.call(lambda: 5).result() == 5
        thread.stop()
        thread.stop()
        assert stub.events == ["run", "ready", "clean"]
        assert not thread.is_alive
        with pytest.raises(EngineShutdownError):
            thread.post(print)

    def test_an_error_of_the_start_is_the_callers(self) -> None:
        stub = Stub(error=ValueError("no"))
        thread = EngineThread(stub)
        with pytest.raises(ValueError, match="no"):
            thread.start()
        assert stub.events in (["run", "clean"], [])
        assert not thread.is_alive

    def test_a_start_that_takes_too_long_is_undone(self) -> None:
        stub = Stub(start_s=60)
        thread = EngineThread(stub)
        with pytest.raises(TimeoutError):
            thread.start(timeout=0.02)
        assert stub.events in (["run", "clean"], [])
        assert not thread.is_alive

    def test_stop_ends_a_start_that_is_under_way(self) -> None:
        stub = Stub(start_s=60)
        thread = EngineThread(stub)
        future = thread.start_nowait()
        thread.stop()
        with pytest.raises((EngineShutdownError, concurrent.futures.CancelledError)):
            future.result(0)
        assert stub.events in (["run", "clean"], [])

    def test_cancelling_the_start_undoes_it(self) -> None:
        stub = Stub(start_s=60)
        thread = EngineThread(stub)
        future = thread.start_nowait()
        thread.call(checkpoints).result()
        assert future.cancel()
        thread.stop()
        assert stub.events in (["run", "clean"], [])

    def test_stop_before_start(self) -> None:
        thread = EngineThread(Stub())
        thread.stop()
        with pytest.raises(EngineShutdownError):
            thread.start()

    def test_stop_from_its_own_thread_only_asks(self) -> None:
        thread = EngineThread(Stub())
        thread.start()
        thread.post(thread.stop)
        assert thread.join(30)

    def test_a_service_that_does_not_stop_is_killed(self, caplog: pytest.LogCaptureFixture) -> None:
        stub = Stub(is_deaf=True)
        thread = EngineThread(stub)
        thread.start()
        thread.stop(timeout=0.1)
        assert "did not stop within 0.1 s" in caplog.text
        assert thread.join(20)
        assert stub.events == ["run", "ready", "kill", "clean"]

    def test_a_fork_may_not_use_it(self) -> None:
        thread = EngineThread(Stub())
        thread.start()
        read_end, write_end = os.pipe()
        pid = os.fork()
        if pid == 0:
            code = 1
            try:
                for use in (thread.post, thread.call):
                    try:
                        use(print)
                    except ForkedProcessError as error:
                        os.write(write_end, str(error).encode()[:60])
                        code = 0
                thread.stop()  # not the child's: does nothing
            finally:
                os._exit(code)
        _, status = os.waitpid(pid, 0)
        os.close(write_end)
        text = os.read(read_end, 1000).decode()
        os.close(read_end)
        assert os.waitstatus_to_exitcode(status) == 0
        assert text.count(f"this engine belongs to process {os.getpid()}") == 2
        assert thread.call(lambda: "alive").result() == "alive"
        thread.stop()


@pytest.mark.parametrize("lock", ["hosts", "memory"])
def test_a_fork_has_locks_of_its_own(lock: str) -> None:
    """Whatever thread of the parent held them at that moment: engines of the child need them."""
    held = engine_thread._hosts_lock if lock == "hosts" else CACHE_MEMORY._lock
    with held:
        pid = os.fork()
        if pid == 0:
            code = 1
            try:
                signal.alarm(5)
                serves_loops()
                CACHE_MEMORY.release(CACHE_MEMORY)
                code = 0
            finally:
                os._exit(code)
    assert os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]) == 0


async def checkpoints() -> None:
    for _ in range(5):
        await anyio.sleep(0)  # noqa: ASYNC115


Run = Callable[[Callable[[], Any]], Any]


def run_asyncio(main: Callable[[], Any]) -> Any:
    return asyncio.run(main())


def run_uvloop(main: Callable[[], Any]) -> Any:
    return uvloop.run(main())


def run_trio(main: Callable[[], Any]) -> Any:
    return trio.run(main)


@pytest.mark.parametrize(("run", "kind"), [(run_asyncio, AsyncioLoop), (run_uvloop, AsyncioLoop), (run_trio, TrioLoop)])
class TestHostLoop:
    def test_one_object_per_loop(self, run: Run, kind: type[HostLoop]) -> None:
        async def main() -> HostLoop:
            host = HostLoop.current()
            assert host is HostLoop.current()
            assert type(host) is kind
            return host

        first, second = run(main), run(main)
        assert first is not second

    def test_batches_arrive_by_one_wake_up(self, run: Run, kind: type[HostLoop], thread: LoopThread) -> None:
        async def main() -> list[int]:
            host = HostLoop.current()
            waiter = host.waiter()
            received: list[int] = []

            def take(batch: list[int]) -> None:
                received.extend(batch)
                waiter.set()

            def produce() -> None:
                for first in range(0, 100, 10):
                    assert host.call_soon_threadsafe(take, list(range(first, first + 10)))

            thread.post(produce)
            while len(received) < 100:
                await waiter.wait()
            return received

        assert run(main) == list(range(100))

    def test_a_waiter_resets_itself_and_knows_the_time(self, run: Run, kind: type[HostLoop]) -> None:
        async def main() -> None:
            waiter = HostLoop.current().waiter()
            waiter.set()
            waiter.set()
            assert await waiter.wait() is True
            until = time.monotonic() + 0.005
            assert await waiter.wait(until) is False
            assert time.monotonic() >= until

        run(main)

    def test_the_result_of_a_call(self, run: Run, kind: type[HostLoop], thread: LoopThread) -> None:
        async def work() -> str:
            await anyio.sleep(0.001)
            return "done"

        async def fail() -> None:
            raise ValueError("no")

        async def main() -> str:
            host = HostLoop.current()
            with pytest.raises(ValueError, match="no"):
                await host.result_of(thread.call(fail))
            result: str = await host.result_of(thread.call(work))
            return result

        assert run(main) == "done"

    def test_cancelling_the_wait_cancels_the_call(self, run: Run, kind: type[HostLoop], thread: LoopThread) -> None:
        ended = threading.Event()

        async def forever() -> None:
            try:
                await anyio.sleep_forever()
            finally:
                ended.set()

        async def main() -> None:
            with anyio.move_on_after(0.02):
                await HostLoop.current().result_of(thread.call(forever))

        run(main)
        assert ended.wait(30)

    def test_a_closed_loop_refuses_quietly(self, run: Run, kind: type[HostLoop]) -> None:
        hosts: list[HostLoop] = []
        loops: list[object] = []

        async def main() -> None:
            hosts.append(HostLoop.current())
            loops.append(trio.lowlevel.current_trio_token() if kind is TrioLoop else asyncio.get_running_loop())

        run(main)
        assert hosts[0].call_soon_threadsafe(print) is False
        loops.clear()
        assert hosts[0].call_soon_threadsafe(print) is False

    def test_a_cancelled_wait_loses_no_set(self, run: Run, kind: type[HostLoop]) -> None:
        async def main() -> None:
            waiter = HostLoop.current().waiter()
            for _ in range(2):
                with anyio.move_on_after(0) as scope:
                    await waiter.wait()
                assert scope.cancelled_caught
            waiter.set()
            with anyio.move_on_after(0):
                await waiter.wait()
            assert await waiter.wait(time.monotonic()) in (True, False), (
                "it was there at the first of the two, or is now"
            )
            assert await waiter.wait(time.monotonic()) is False

        run(main)


@pytest.mark.parametrize("run", [run_asyncio, run_uvloop])
class TestAsyncioWaiter:
    def test_a_task_goes_on_within_the_callback_that_resumes_it(self, run: Run) -> None:
        async def main() -> None:
            loop, waiter = asyncio.get_running_loop(), HostLoop.current().waiter()
            seen: list[object] = []

            async def wait() -> None:
                while len(seen) < 3:
                    await waiter.wait()
                    seen.append(asyncio.current_task())

            def resume() -> None:
                waiter.resume()
                seen.append("resumed")

            task = asyncio.create_task(wait())
            await asyncio.sleep(0)
            for _ in range(2):
                loop.call_soon(resume)
                await asyncio.sleep(0.001)
            await task
            assert seen == [task, "resumed", task, "resumed"]

        run(main)

    def test_within_a_task_nothing_is_entered(self, run: Run) -> None:
        """A loop that was made to run within a task (nest_asyncio) calls its callbacks there."""

        async def main() -> None:
            waiter = HostLoop.current().waiter()
            task = asyncio.ensure_future(waiter.wait())
            await asyncio.sleep(0)
            waiter.resume()
            assert not task.done()
            assert await task is True

        run(main)

    def test_a_task_that_is_cancelled_while_it_is_woken_is_cancelled_once(self, run: Run) -> None:
        async def main() -> None:
            waiter = HostLoop.current().waiter()
            task = asyncio.ensure_future(waiter.wait())
            await asyncio.sleep(0)
            waiter.set()
            task.cancel("by the test")
            with pytest.raises(asyncio.CancelledError, match="by the test"):
                await task
            assert await waiter.wait() is True
            task = asyncio.ensure_future(waiter.wait())
            await asyncio.sleep(0)
            task.cancel("by the test")
            waiter.set()
            with pytest.raises(asyncio.CancelledError, match="by the test"):
                await task
            assert await waiter.wait() is True

        run(main)

    def test_one_task_waits_at_a_time(self, run: Run) -> None:
        async def main() -> None:
            waiter = HostLoop.current().waiter()
            task = asyncio.ensure_future(waiter.wait())
            await asyncio.sleep(0)
            with pytest.raises(RuntimeError, match="two tasks"):
                await waiter.wait()
            waiter.set()
            with pytest.raises(RuntimeError, match="two tasks"):
                await waiter.wait()  # what has come is for the first one, which goes on in a moment
            await task

        run(main)


def test_one_task_of_trio_waits_at_a_time() -> None:
    async def main() -> None:
        waiter, seen = EventWaiter(), []

        async def first() -> None:
            seen.append(await waiter.wait())

        async with anyio.create_task_group() as group:
            group.start_soon(first)
            await anyio.wait_all_tasks_blocked()
            with pytest.raises(RuntimeError, match="two tasks"):
                await waiter.wait()
            waiter.set()
        assert seen == [True]

    anyio.run(main, backend="trio")


class TestThreadHost:
    def test_functions_run_where_they_are_waited_for(self, thread: LoopThread) -> None:
        host = ThreadHost()
        seen: list[int] = []

        def produce() -> None:
            for number in range(10):
                host.call_soon_threadsafe(lambda: seen.append(threading.get_ident()))
                host.call_soon_threadsafe(lambda number=number: seen.append(number))

        thread.post(produce)
        assert host.run_until(lambda: len(seen) == 20, timeout=10)
        assert seen[1::2] == list(range(10))
        assert set(seen[::2]) == {threading.get_ident()}

    def test_timeouts_and_the_end(self) -> None:
        host = ThreadHost()
        assert host.run_pending() == 0
        assert host.run_until(lambda: False, timeout=0.01) is False
        assert host.call_soon_threadsafe(len, "") is True
        assert host.run_pending(1.0) == 1
        host.close()
        assert host.call_soon_threadsafe(print) is False


def test_no_loop() -> None:
    with pytest.raises(RuntimeError, match="no running event loop"):
        HostLoop.current()


async def test_our_loops_only() -> None:
    assert isinstance(current_loop(), AsyncioLoop)


def test_actors_do_not_run_on_trio() -> None:
    async def main() -> None:
        with pytest.raises(RuntimeError, match="not on TrioLoop"):
            current_loop()

    trio.run(main)
    assert "trio" in sys.modules
