"""How an engine begins and ends: orderly, by accident, by violence. Nothing is ever left behind."""

from __future__ import annotations

import gc
import os
import signal
import subprocess
import sys
import threading
import time
import weakref
from collections.abc import Callable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

import anyio
import anyio.to_thread
import pytest

import actorllm.client.engine
import actorllm.client.engine_supervisor
from actorllm import LLM, AsyncLLM, EngineDeadError, RequestOutputKind, RequestStream, SamplingParams
from actorllm.client.engine import Engine
from actorllm.errors import EngineShutdownError
from actorllm.intake.job import FunctionJob
from tests import programs
from tests.actors.scripted_topology import LIGHT_WORKERS, with_workers
from tests.supervision.processes import is_gone

ROOT = Path(__file__).parents[2]
PROMPT = "Once upon a time"
ENDLESS = SamplingParams(max_tokens=None, ignore_eos=True, seed=1, temperature=0.5)


@pytest.fixture
def anyio_backend() -> str:
    return "asyncio"


@pytest.fixture(autouse=True)
def workers(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> None:
    """Worker processes without torch, where a test does not ask for `real_workers`: what they compute does not matter."""
    if "real_workers" not in request.fixturenames:
        light = with_workers("SlowWorkerActor", inline_too=False)
        monkeypatch.setattr(actorllm.client.engine_supervisor, "engine_topology", light)


@pytest.fixture
def real_workers() -> None:
    """The worker processes of users."""


@pytest.fixture
def make_llm() -> Iterator[Callable[..., AsyncLLM]]:
    """Engines that are shut down when the test is over, whatever became of it."""
    engines: list[AsyncLLM] = []

    def make(**arguments: Any) -> AsyncLLM:
        engines.append(AsyncLLM("storyteller", **({"num_threads": 1} | arguments)))
        return engines[-1]

    yield make
    for engine in engines:
        engine.shutdown()


def pids_of(llm: AsyncLLM | LLM) -> dict[str, int]:
    return llm._engine.pids


def wait_until(is_true: Callable[[], bool], timeout_s: float = 30) -> bool:
    deadline = time.monotonic() + timeout_s
    while not is_true():
        if time.monotonic() > deadline:
            return False
        time.sleep(0.01)
    return True


async def first_of(stream: RequestStream) -> None:
    await stream.__anext__()


async def drain(stream: RequestStream) -> BaseException | None:
    """Take everything; returns the error that it ended with."""
    try:
        async for _ in stream:
            pass
    except Exception as error:
        return error
    return None


# Start ----------------------------------------------------------------------------------------------------------------


@pytest.mark.usefixtures("real_workers")
async def test_the_first_request_starts_the_engine(make_llm: Callable[..., AsyncLLM]) -> None:
    llm = make_llm()
    assert pids_of(llm) == {}
    assert llm.config.cache.num_blocks is None
    assert [piece async for piece in llm.stream(PROMPT, SamplingParams(max_tokens=4))]
    assert set(pids_of(llm)) == {"scheduler", "worker0"}
    assert llm.config.cache.num_blocks
    await llm.start()  # it runs: nothing happens


async def test_requests_and_aborts_before_the_start(make_llm: Callable[..., AsyncLLM]) -> None:
    llm = make_llm()
    aborted = llm.generate(PROMPT, ENDLESS, request_id="a")
    stays = llm.generate(PROMPT, SamplingParams(max_tokens=3, ignore_eos=True))
    dropped = llm.generate(PROMPT, ENDLESS)
    await llm.abort("a")
    del dropped
    *_, output = [output async for output in aborted]
    assert output.outputs[0].finish_reason == "abort"
    *_, output = [output async for output in stays]
    assert len(output.outputs[0].token_ids) == 3
    assert (await llm.stats())["frontend"]["num_requests"] == 0


async def test_who_waits_for_the_start_may_go(make_llm: Callable[..., AsyncLLM]) -> None:
    llm = make_llm()
    with anyio.move_on_after(0.005) as scope:
        await llm.start()
    assert scope.cancelled_caught
    output = await llm.complete(PROMPT, SamplingParams(max_tokens=3, ignore_eos=True))
    assert len(output.outputs[0].token_ids) == 3


@pytest.mark.parametrize("topology", ["process", "inline"])
async def test_a_cancelled_start_is_stopped_and_can_be_begun_again(
    make_llm: Callable[..., AsyncLLM], topology: str
) -> None:
    llm = make_llm(topology=topology, name="again")
    threads = sorted(engine_threads())
    pids: dict[str, int] = {}

    def is_under_way() -> bool:
        pids.update(pids_of(llm))
        return len(pids) == (2 if topology == "process" else 0) and "actorllm:engine" in engine_threads()

    for _ in range(2):
        async with anyio.create_task_group() as tasks:
            tasks.start_soon(llm.start)
            assert await anyio.to_thread.run_sync(wait_until, is_under_way)
            tasks.cancel_scope.cancel()
        assert all(is_gone(pid) for pid in pids.values())
        assert pids_of(llm) == {}
        assert (await llm.stats())["scheduler"] is None, "as if nobody had asked"
        pids.clear()
    assert wait_until(lambda: all("intake" in name for name in set(engine_threads()) - set(threads)))
    output = await llm.complete(PROMPT, SamplingParams(max_tokens=3, ignore_eos=True))
    assert len(output.outputs[0].token_ids) == 3


async def test_a_start_that_somebody_else_waits_for_goes_on(make_llm: Callable[..., AsyncLLM]) -> None:
    llm = make_llm()
    stream = llm.generate(PROMPT, SamplingParams(max_tokens=3, ignore_eos=True))
    async with anyio.create_task_group() as others, anyio.create_task_group() as tasks:
        tasks.start_soon(llm.start)
        others.start_soon(llm.start)
        assert await anyio.to_thread.run_sync(wait_until, lambda: len(pids_of(llm)) == 2)
        pids = pids_of(llm)
        tasks.cancel_scope.cancel()
    *_, output = [output async for output in stream]
    assert len(output.outputs[0].token_ids) == 3
    assert pids_of(llm) == pids


@pytest.mark.usefixtures("real_workers")
async def test_two_engines_in_one_process(make_llm: Callable[..., AsyncLLM]) -> None:
    engines = [make_llm(dtype="float32"), make_llm(dtype="float32", topology="inline")]
    texts: list[str] = []

    async def one(llm: AsyncLLM) -> None:
        params = SamplingParams(max_tokens=8, ignore_eos=True, seed=3)
        texts.append((await llm.complete(PROMPT, params, request_id="same")).outputs[0].text)

    async with anyio.create_task_group() as tasks:
        for llm in engines:
            tasks.start_soon(one, llm)
    assert texts[0] == texts[1]
    engines[0].shutdown()
    assert len((await engines[1].complete(PROMPT, SamplingParams(max_tokens=2))).outputs[0].token_ids) == 2


# Shutdown -------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("topology", ["process", "inline"])
async def test_shutdown_ends_open_streams_and_refuses_new_ones(
    make_llm: Callable[..., AsyncLLM], topology: str
) -> None:
    llm = make_llm(topology=topology)
    streams = [llm.generate(PROMPT, ENDLESS) for _ in range(3)]
    streams.append(llm.generate(PROMPT, SamplingParams(max_tokens=None, output_kind=RequestOutputKind.FINAL_ONLY)))
    await first_of(streams[0])
    pids = pids_of(llm)
    errors: list[BaseException | None] = []

    async def consume(stream: RequestStream) -> None:
        errors.append(await drain(stream))

    async with anyio.create_task_group() as tasks:
        for stream in streams[:2]:
            tasks.start_soon(consume, stream)
        await anyio.wait_all_tasks_blocked()
        await anyio.to_thread.run_sync(llm.shutdown)  # from another thread than the one that streams
    errors += [await drain(stream) for stream in streams[2:]]
    assert len(errors) == 4
    assert {type(error) for error in errors} == {EngineShutdownError}
    assert len({id(error) for error in errors}) == 4, "an exception that many tasks raise has but one traceback"
    assert all(is_gone(pid) for pid in pids.values())
    assert pids_of(llm) == {}
    for call in (llm.start, llm.stats, lambda: llm.complete(PROMPT), lambda: llm.abort("x")):
        with pytest.raises(EngineShutdownError, match="shut down"):
            await call()
    with pytest.raises(EngineShutdownError, match="build a new one"):
        llm.generate(PROMPT)
    llm.shutdown()


def test_shutdown_from_many_threads(make_llm: Callable[..., AsyncLLM]) -> None:
    llm = make_llm()
    anyio.run(llm.start)
    with ThreadPoolExecutor(4) as pool:
        for future in [pool.submit(llm.shutdown) for _ in range(4)]:
            future.result(20)
    assert pids_of(llm) == {}


def test_shutdown_of_what_never_ran(make_llm: Callable[..., AsyncLLM]) -> None:
    llm = make_llm()
    llm.shutdown()
    llm.shutdown()
    with pytest.raises(EngineShutdownError):
        llm.generate(PROMPT)


async def test_shutdown_in_the_middle_of_the_start(make_llm: Callable[..., AsyncLLM]) -> None:
    llm = make_llm()
    stream = llm.generate(PROMPT, ENDLESS)
    errors: list[BaseException | None] = []

    async def consume() -> None:
        errors.append(await drain(stream))

    async with anyio.create_task_group() as tasks:
        tasks.start_soon(consume)
        assert await anyio.to_thread.run_sync(wait_until, lambda: bool(pids_of(llm)))
        await anyio.to_thread.run_sync(llm.shutdown)
    assert isinstance(errors[0], EngineShutdownError)


async def test_leaving_async_with_by_an_exception(make_llm: Callable[..., AsyncLLM]) -> None:
    llm = make_llm()
    streams: list[RequestStream] = []
    pids: dict[str, int] = {}

    async def fail_within() -> None:
        async with llm:
            streams.append(llm.generate(PROMPT, ENDLESS))
            await first_of(streams[0])
            pids.update(pids_of(llm))
            raise ZeroDivisionError

    with pytest.raises(ZeroDivisionError):
        await fail_within()
    assert len(pids) == 2
    assert all(is_gone(pid) for pid in pids.values())
    assert isinstance(await drain(streams[0]), EngineShutdownError)


async def test_cancelling_async_with_stops_the_processes(make_llm: Callable[..., AsyncLLM]) -> None:
    llm = make_llm()
    pids: dict[str, int] = {}
    with anyio.CancelScope() as scope:
        async with llm:
            pids |= pids_of(llm)
            scope.cancel()
            await anyio.sleep_forever()
    assert len(pids) == 2
    assert all(is_gone(pid) for pid in pids.values())


async def test_cancelling_async_with_on_the_way_in(make_llm: Callable[..., AsyncLLM]) -> None:
    llm = make_llm()
    pids: dict[str, int] = {}

    async def enter() -> None:
        async with llm:
            pytest.fail("it was cancelled before")

    def are_spawned() -> bool:
        pids.update(pids_of(llm))
        return len(pids) == 2

    async with anyio.create_task_group() as tasks:
        tasks.start_soon(enter)
        assert await anyio.to_thread.run_sync(wait_until, are_spawned)
        tasks.cancel_scope.cancel()
    assert all(is_gone(pid) for pid in pids.values())
    with pytest.raises(EngineShutdownError):
        await llm.start()


# Death of a process ---------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("victim", ["scheduler", "worker0"])
async def test_every_stream_hears_of_a_killed_process(make_llm: Callable[..., AsyncLLM], victim: str) -> None:
    llm = make_llm(on_failure="raise")
    kinds = [RequestOutputKind.CUMULATIVE, RequestOutputKind.DELTA, RequestOutputKind.FINAL_ONLY]
    streams = [
        llm.generate(PROMPT, SamplingParams(max_tokens=None, ignore_eos=True, output_kind=kind))
        for kind in kinds
        for _ in range(3)
    ]
    await first_of(streams[0])
    pids = pids_of(llm)
    errors: list[BaseException | None] = []

    async def consume(stream: RequestStream) -> None:
        errors.append(await drain(stream))

    with anyio.fail_after(20):  # nothing but the death itself tells of it so early
        async with anyio.create_task_group() as tasks:
            for stream in streams:
                tasks.start_soon(consume, stream)
            await anyio.wait_all_tasks_blocked()
            os.kill(pids[victim], signal.SIGKILL)
    assert len(errors) == 9
    for error in errors:
        assert isinstance(error, EngineDeadError)
        assert f"{victim} was killed by signal 9 (SIGKILL)" in str(error)
    for call in (lambda: llm.complete(PROMPT), llm.stats, llm.start):
        with pytest.raises(EngineDeadError, match=f"{victim} was killed"):
            await call()
    with pytest.raises(EngineDeadError, match=victim):
        llm.generate(PROMPT)
    assert await anyio.to_thread.run_sync(wait_until, lambda: all(is_gone(pid) for pid in pids.values()))
    llm.shutdown()


@pytest.mark.usefixtures("real_workers")
def test_a_killed_process_ends_generate_of_llm() -> None:
    """Half an output is not an output: the error comes, though tokens had come before it."""
    with LLM("storyteller", num_threads=1, on_failure="raise") as llm:
        errors: list[BaseException] = []

        def generate() -> None:
            try:
                llm.generate([PROMPT] * 3, SamplingParams(max_tokens=None, ignore_eos=True), use_tqdm=False)
            except BaseException as error:
                errors.append(error)

        thread = threading.Thread(target=generate)
        thread.start()
        assert wait_until(lambda: llm.stats()["scheduler"]["scheduler"]["num_output_tokens"] > 6)
        os.kill(pids_of(llm)["worker0"], signal.SIGKILL)
        thread.join(10)
        assert len(errors) == 1
        assert isinstance(errors[0], EngineDeadError)
        with pytest.raises(EngineDeadError):
            llm.generate(PROMPT)


# Owners of every kind -------------------------------------------------------------------------------------------------

OWNER = """
import os, sys
from actorllm import AsyncLLM, LLM, SamplingParams
llm = LLM("storyteller", num_threads=1)
(output,) = llm.generate("Once", SamplingParams(max_tokens=2, ignore_eos=True), use_tqdm=False)
print("tokens", len(output.outputs[0].token_ids))
print("pids", *llm._engine.pids.values(), flush=True)
"""
"""Without a guard for __main__, and without an end."""


@contextmanager
def running(*arguments: str, stdin: str = "") -> Iterator[subprocess.Popen[str]]:
    process = programs.popen(
        [sys.executable, *arguments],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        env=os.environ | {"PYTHONPATH": str(ROOT)},
    )
    assert process.stdin is not None
    try:
        process.stdin.write(stdin)
        process.stdin.close()
        yield process
    finally:
        process.kill()
        process.wait()
        for stream in (process.stdout, process.stderr):
            assert stream is not None
            stream.close()


def run(*arguments: str, stdin: str = "", code: int = 0) -> str:
    """The standard output of a program that ends with this exit code, and its processes' end."""
    with running(*arguments, stdin=stdin) as process:
        assert process.stdout is not None
        assert process.stderr is not None
        errors: list[str] = []
        reader = threading.Thread(target=lambda: errors.append(process.stderr.read()))
        reader.start()
        output = process.stdout.read()
        process.wait(20)
        reader.join(20)
    assert process.returncode == code, errors
    assert "Traceback" not in errors[0] or code != 0, errors
    for pid in engine_pids(output):
        assert wait_until(lambda pid=pid: is_gone(pid)), f"process {pid} was left"
    return output


def engine_pids(output: str) -> list[int]:
    return [int(pid) for line in output.splitlines() if line.startswith("pids") for pid in line.split()[1:]]


def shared_memory() -> set[str]:
    return {name for name in os.listdir("/dev/shm") if name.startswith("allm-")}


@pytest.mark.parametrize("kind", ["-c", "stdin", "script"])
def test_every_kind_of_program_may_own_an_engine_and_forget_it(kind: str, tmp_path: Path) -> None:
    script = tmp_path / "program.py"
    script.write_text(OWNER)  # with the worker of users
    light = LIGHT_WORKERS + OWNER
    arguments = {"-c": ("-c", light), "stdin": ("-i", "-q"), "script": (str(script),)}[kind]
    output = run(*arguments, stdin=light if kind == "stdin" else "")
    assert "tokens 2" in output
    assert len(engine_pids(output)) == 2


def test_an_exception_that_nobody_catches_leaves_nothing() -> None:
    output = run("-c", LIGHT_WORKERS + OWNER + "raise SystemExit(3)", code=3)
    assert len(engine_pids(output)) == 2


@pytest.mark.parametrize("signal_number", [signal.SIGKILL, signal.SIGTERM])
def test_the_end_of_the_owner_is_the_end_of_the_engine(signal_number: signal.Signals) -> None:
    names = shared_memory()
    light = LIGHT_WORKERS if signal_number == signal.SIGTERM else ""
    with running("-c", light + OWNER + "import signal; signal.pause()") as process:
        assert process.stdout is not None
        pids: list[int] = []
        while not pids:
            line = process.stdout.readline()
            assert line, "it ended"
            pids = engine_pids(line)
        assert len(pids) == 2
        process.send_signal(signal_number)
        process.wait(30)
        for pid in pids:
            assert wait_until(lambda pid=pid: is_gone(pid)), f"process {pid} outlived its owner"
    assert shared_memory() <= names


FORK = """
import os, traceback
from actorllm import LLM, SamplingParams
from actorllm.errors import ForkedProcessError
llm = LLM("storyteller", num_threads=1)
params = SamplingParams(max_tokens=2, ignore_eos=True)
pid = os.fork()
if pid == 0:
    code = 0
    for call in (lambda: llm.generate("Once", params), llm.stats, lambda: llm._engine.abort("x"), llm._engine.start):
        try:
            call()
            code = 1
        except ForkedProcessError as error:
            if str(os.getpid()) not in str(error):
                code = 2
    llm.shutdown()
    del llm
    os._exit(code)
_, status = os.waitpid(pid, 0)
print("child", os.waitstatus_to_exitcode(status))
print("tokens", len(llm.generate("Once", params, use_tqdm=False)[0].outputs[0].token_ids))
"""


def test_a_forked_child_is_told_and_does_no_harm() -> None:
    output = run("-W", "ignore::DeprecationWarning", "-c", LIGHT_WORKERS + FORK)
    assert "child 0" in output
    assert "tokens 2" in output


async def test_a_stream_that_outlives_its_engine_object(make_llm: Callable[..., AsyncLLM]) -> None:
    """The stream is what one holds on to; the object that made it may be gone."""
    llm = make_llm()
    stream = llm.generate(PROMPT, SamplingParams(max_tokens=3, ignore_eos=True))
    del llm
    gc.collect()
    *_, output = [output async for output in stream]
    assert len(output.outputs[0].token_ids) == 3


# Dropped without a shutdown -------------------------------------------------------------------------------------------


def engine_threads() -> list[str]:
    return [thread.name for thread in threading.enumerate() if thread.name.startswith("actorllm:")]


@pytest.mark.parametrize("kind", ["counted", "in a cycle"])
def test_an_engine_that_is_dropped_stops(kind: str) -> None:
    before = engine_threads()
    llm = LLM("storyteller", num_threads=1)
    llm.generate(PROMPT, SamplingParams(max_tokens=2, ignore_eos=True), use_tqdm=False)
    pids = pids_of(llm)
    engine = weakref.ref(llm._engine)
    assert len(pids) == 2
    if kind == "in a cycle":
        llm.itself = llm  # type: ignore[attr-defined]
    for pid in pids.values():
        os.kill(pid, signal.SIGSTOP)
    del llm
    gc.collect()
    assert not any(is_gone(pid) for pid in pids.values()), "who drops it does not wait for the processes"
    for pid in pids.values():
        os.kill(pid, signal.SIGCONT)
    assert wait_until(lambda: all(is_gone(pid) for pid in pids.values()))
    assert wait_until(lambda: sorted(engine_threads()) == sorted(before))
    assert wait_until(lambda: gc.collect() >= 0 and engine() is None), "something still holds the engine"


async def test_a_dropped_engine_ends_with_its_last_stream() -> None:
    llm = AsyncLLM("storyteller", num_threads=1)
    params = SamplingParams(max_tokens=30, ignore_eos=True)
    stream, text, left = llm.generate(PROMPT, params), llm.stream(PROMPT, params), llm.generate(PROMPT, ENDLESS)
    await first_of(stream)
    pids = pids_of(llm)
    del llm
    gc.collect()
    await left.aclose()
    *_, output = [output async for output in stream]
    assert len(output.outputs[0].token_ids) == 30
    assert not any(is_gone(pid) for pid in pids.values()), "one stream is still open"
    assert [piece async for piece in text]
    assert await anyio.to_thread.run_sync(wait_until, lambda: all(is_gone(pid) for pid in pids.values()))


async def test_a_stream_that_ended_and_was_not_read_holds_no_engine() -> None:
    llm = AsyncLLM("storyteller", num_threads=1)
    stream = llm.generate(PROMPT, SamplingParams(max_tokens=30, ignore_eos=True))
    assert await anyio.to_thread.run_sync(wait_until, lambda: stream.has_ended)
    engine, pids = llm._engine, pids_of(llm)
    assert len(pids) == 2
    del llm
    gc.collect()
    assert await anyio.to_thread.run_sync(wait_until, lambda: all(is_gone(pid) for pid in pids.values()))
    *_, output = [output async for output in stream]
    assert len(output.outputs[0].token_ids) == 30
    assert output.finished
    assert await anyio.to_thread.run_sync(wait_until, lambda: not engine._thread.is_alive)


async def test_dropped_with_its_stream_while_it_starts() -> None:
    llm = AsyncLLM("storyteller", num_threads=1)
    engine = llm._engine
    stream = llm.generate(PROMPT, ENDLESS)
    assert await anyio.to_thread.run_sync(wait_until, lambda: bool(engine.pids))
    del llm, stream
    gc.collect()
    assert await anyio.to_thread.run_sync(wait_until, lambda: engine._is_shut_down and not engine.pids)


def test_a_drop_at_the_exit_is_clean() -> None:
    output = run("-c", LIGHT_WORKERS + OWNER + "import gc\ndel llm\ngc.collect()\n")
    assert len(engine_pids(output)) == 2


# Races with the shutdown ----------------------------------------------------------------------------------------------


def test_every_start_in_the_background_is_answered() -> None:
    for _ in range(20):
        llm = AsyncLLM("storyteller", topology="inline", num_threads=1)
        engine = llm._engine
        futures: list[Future[None]] = []
        go = threading.Barrier(3)

        def ask(engine: Engine = engine, futures: list[Future[None]] = futures, go: threading.Barrier = go) -> None:
            go.wait()
            with suppress(EngineShutdownError):
                for _ in range(50):
                    futures.append(engine.start_in_background())  # noqa: PERF401 - those before a refusal count

        threads = [threading.Thread(target=ask) for _ in range(2)]
        for thread in threads:
            thread.start()
        go.wait()
        engine.shutdown()
        for thread in threads:
            thread.join()
        for future in futures:
            error = future.exception(10)
            assert error is None or isinstance(error, EngineShutdownError)


def test_the_jobs_behind_a_slow_one_are_ended(make_llm: Callable[..., AsyncLLM]) -> None:
    engine = make_llm()._engine
    go = threading.Event()
    for _ in range(3):  # on every lane
        engine._enqueue(FunctionJob(lambda: bool(go.wait(30))))
    try:
        future = engine.start_in_background()
        engine.shutdown(timeout=0.1)
        assert isinstance(future.exception(10), EngineShutdownError)
    finally:
        go.set()
    assert wait_until(lambda: not any("intake" in name for name in engine_threads())), engine_threads()
