"""What vLLM's own tests of its asynchronous engine hold, on ours; the rest of them is spread over the suite.

test_async_llm.py has load, abort, cancellation and output kinds, test_bad_input.py requests that fail alone,
test_parallel_sampling.py n > 1, supervision/test_lifecycle.py death and shutdown, supervision/test_signals.py SIGTERM at
any time, client/test_draining.py and client/test_overload.py their names, supervision/test_broken_workers.py models that raise,
server/test_operations.py dead engines.
"""

from __future__ import annotations

import asyncio
import copy
import itertools
import os
import pickle
import signal
from collections.abc import Iterator
from pathlib import Path

import anyio
import pytest

from actorllm import (
    AsyncEngineArgs,
    AsyncLLM,
    AsyncLLMEngine,
    EngineArgs,
    LLMEngine,
    RequestOutput,
    RequestOutputKind,
    SamplingParams,
)
from actorllm.errors import EngineDeadError, EngineError, EngineShutdownError, InvalidParameterError

PROMPT = "Once upon a time"


@pytest.fixture
def anyio_backend() -> str:
    return "asyncio"


@pytest.fixture(scope="module")
def engine() -> Iterator[AsyncLLMEngine]:
    arguments = AsyncEngineArgs("storyteller", dtype="float32", num_threads=1, max_num_seqs=64)
    made = AsyncLLMEngine.from_engine_args(arguments)
    made.start_background_loop()
    anyio.run(made.start)
    yield made
    made.shutdown_background_loop()


def params_of(kind: RequestOutputKind, max_tokens: int | None, n: int = 1) -> SamplingParams:
    return SamplingParams(max_tokens=max_tokens, ignore_eos=True, output_kind=kind, seed=33, n=n, temperature=0.5)


async def count(
    engine: AsyncLLM, request_id: str, kind: RequestOutputKind, max_tokens: int | None, n: int = 1, leave_at: int = 0
) -> int:
    """Tokens of a request; of CUMULATIVE and FINAL_ONLY those of the last output of every sequence."""
    counts = dict.fromkeys(range(n), 0)
    async for output in engine.generate(PROMPT, params_of(kind, max_tokens, n), request_id):
        for completion in output.outputs:
            new = len(completion.token_ids)
            counts[completion.index] = counts[completion.index] + new if kind is RequestOutputKind.DELTA else new
        await asyncio.sleep(0)
        if leave_at and sum(counts.values()) >= leave_at:
            break
    return sum(counts.values())


async def num_unfinished(engine: AsyncLLM) -> int:
    stats = await engine.stats()
    scheduler = stats["scheduler"]["scheduler"]
    return int(stats["frontend"]["num_requests"] + scheduler["num_running"] + scheduler["num_waiting"])


async def becomes_idle(engine: AsyncLLM) -> None:
    with anyio.fail_after(20):
        while await num_unfinished(engine):
            await anyio.sleep(0.005)


@pytest.mark.parametrize("kind", [RequestOutputKind.DELTA, RequestOutputKind.FINAL_ONLY])
async def test_load(engine: AsyncLLM, kind: RequestOutputKind) -> None:
    """Many streams at once, all through one engine, and each gets what it asked for."""
    counts = await asyncio.gather(*(count(engine, f"load-{i}", kind, 10) for i in range(100)))
    assert counts == [10] * 100
    assert await num_unfinished(engine) == 0


@pytest.mark.parametrize("kind", [RequestOutputKind.DELTA, RequestOutputKind.FINAL_ONLY])
async def test_cancelled_tasks_and_finished_ones_side_by_side(engine: AsyncLLM, kind: RequestOutputKind) -> None:
    """Every other task is cancelled; with and without siblings. The others lose nothing, and ids are free again."""
    tasks = [
        asyncio.create_task(count(engine, f"cancel-{i}", kind, None if i % 2 else 10, n=3 if i % 4 == 1 else 1))
        for i in range(24)
    ]
    with anyio.fail_after(20):
        while not all(task.done() for task in tasks[::2]):
            await anyio.sleep(0.005)
    for task in tasks[1::2]:
        task.cancel()
    results = await asyncio.gather(*tasks, return_exceptions=True)
    assert results[::2] == [10] * 12
    assert all(isinstance(result, asyncio.CancelledError) for result in results[1::2])
    await becomes_idle(engine)
    assert await count(engine, "cancel-1", kind, 5) == 5


async def test_multi_abort(engine: AsyncLLM) -> None:
    """Several ids in one call: those requests end with 'abort' and what they had, the others go on."""
    limits = {f"multi-{i}": None if i % 3 else 20 for i in range(12)}
    streams = {
        request_id: engine.generate(PROMPT, params_of(RequestOutputKind.DELTA, limit), request_id)
        for request_id, limit in limits.items()
    }
    for stream in streams.values():
        await stream.__anext__()
    aborted = [request_id for request_id, limit in limits.items() if limit is None]
    await engine.abort(aborted)
    for request_id, stream in streams.items():
        *_, last = [output async for output in stream]
        assert last.finished
        assert last.outputs[0].finish_reason == ("abort" if request_id in aborted else "length")
    await becomes_idle(engine)


@pytest.mark.parametrize("kind", [RequestOutputKind.DELTA, RequestOutputKind.CUMULATIVE])
async def test_mid_stream_cancellation(engine: AsyncLLM, kind: RequestOutputKind) -> None:
    """Consumers leave in the middle; the same ids can be used at once for requests that run through."""
    counts = await asyncio.gather(*(count(engine, f"mid-{i}", kind, 500, leave_at=10) for i in range(30)))
    assert all(10 <= found < 500 for found in counts)
    counts = await asyncio.gather(*(count(engine, f"mid-{i}", kind, 10) for i in range(30)))
    assert counts == [10] * 30
    await becomes_idle(engine)


@pytest.mark.parametrize("n", [1, 3])
async def test_finished_flag(engine: AsyncLLM, n: int) -> None:
    outputs = [output async for output in engine.generate(PROMPT, params_of(RequestOutputKind.DELTA, 8, n))]
    assert [output.finished for output in outputs] == [False] * (len(outputs) - 1) + [True]


async def test_leaving_after_the_finished_flag(engine: AsyncLLM) -> None:
    """As streaming examples do: `if output.finished: break`."""
    async for output in engine.generate(prompt=PROMPT, sampling_params=params_of(RequestOutputKind.DELTA, 4)):
        if output.finished:
            break
    assert output.finished
    assert await num_unfinished(engine) == 0


async def test_add_request_takes_its_arguments_in_the_other_order(engine: AsyncLLM) -> None:
    stream = await engine.add_request("added", PROMPT, params_of(RequestOutputKind.FINAL_ONLY, 3))
    (output,) = [output async for output in stream]
    assert (output.request_id, len(output.outputs[0].token_ids)) == ("added", 3)


async def test_arguments_by_their_place_in_vllm(engine: AsyncLLM) -> None:
    params = params_of(RequestOutputKind.FINAL_ONLY, 3)
    kwargs = {"truncate_prompt_tokens": 2}
    stream = await engine.add_request("by-place", PROMPT, params, 1_000.0, None, kwargs, None, 5, None, None)
    (output,) = [output async for output in stream]
    assert len(output.prompt_token_ids) == 2
    assert output.metrics is not None
    assert output.metrics.arrival_time == pytest.approx(1_000.0, abs=1e-3)
    with pytest.raises(InvalidParameterError, match="reasoning_parser_kwargs"):
        await engine.add_request("no", PROMPT, params, reasoning_parser_kwargs={"a": 1})  # type: ignore[arg-type]
    stream = engine.generate(PROMPT, params_of(RequestOutputKind.DELTA, 900), "endless")
    await anext(stream)
    await engine.abort(["endless"], False)
    assert [output.outputs[0].finish_reason async for output in stream][-1] == "abort"
    assert await engine.reset_prefix_cache(False, reset_connector=False)


def test_engines_from_a_configuration() -> None:
    config = EngineArgs("storyteller", topology="inline", num_threads=1).create_engine_config()
    engine = AsyncLLM.from_vllm_config(config, False, None, None, False, False, True, None, 1, 0)
    assert engine.config is config
    with pytest.raises(InvalidParameterError, match="client_count=2 is not supported; leave it at 1"):
        AsyncLLM.from_vllm_config(vllm_config=config, client_count=2)
    by_hand = LLMEngine.from_vllm_config(config, None, None, disable_log_stats=True)
    assert by_hand.get_num_unfinished_requests() == 0
    by_hand.shutdown()


async def test_extras_of_vllm(engine: AsyncLLM) -> None:
    params = params_of(RequestOutputKind.FINAL_ONLY, 2)
    stream = engine.generate(PROMPT, params, "extras", lora_request=None, trace_headers=None, priority=2)
    assert [output.finished async for output in stream] == [True]
    stream = engine.generate(PROMPT, params, trace_headers={"a": "b"})
    assert [output.finished async for output in stream] == [True]
    with pytest.raises(InvalidParameterError, match="trace_headers=5 must be a mapping of text to text"):
        engine.generate(PROMPT, params, trace_headers=5)


async def test_what_programs_ask_of_the_engine(engine: AsyncLLM) -> None:
    assert engine.get_tokenizer().encode(PROMPT) == (await engine.complete(PROMPT)).prompt_token_ids
    tokenizer = await engine.get_tokenizer()  # a coroutine in older releases of vLLM
    assert tokenizer is engine.get_tokenizer()
    assert pickle.loads(pickle.dumps(tokenizer)).encode(PROMPT) == copy.deepcopy(tokenizer).encode(PROMPT)
    assert (await engine.get_model_config()).max_model_len == engine.model_config.max_model_len == 1024
    assert await engine.get_supported_tasks() == ("generate",)
    assert await engine.get_vllm_config() is engine.vllm_config is engine.config
    assert not await engine.is_tracing_enabled()
    await engine.do_log_stats()


async def test_check_health() -> None:
    engine = AsyncLLM("storyteller", num_threads=1, on_failure="raise")
    await engine.check_health()
    assert (engine.is_running, engine.is_stopped, engine.errored) == (False, False, False)
    stream = engine.generate(PROMPT, params_of(RequestOutputKind.DELTA, None))
    await stream.__anext__()
    await engine.check_health()
    assert (engine.is_running, engine.is_stopped, engine.errored) == (True, False, False)
    os.kill(engine._engine.pids["worker0"], signal.SIGKILL)
    with pytest.raises(EngineDeadError, match="worker0"):
        async for _ in stream:
            pass
    assert (engine.is_running, engine.is_stopped, engine.errored) == (False, True, True)
    with pytest.raises(EngineDeadError, match="worker0"):
        await engine.check_health()
    assert "worker0" in str(engine.dead_error)
    engine.shutdown()


async def test_health_after_shutdown() -> None:
    engine = AsyncLLM("storyteller")
    engine.shutdown()
    assert (engine.is_running, engine.is_stopped, engine.errored) == (False, True, False)
    with pytest.raises(EngineShutdownError):
        await engine.check_health()


@pytest.mark.parametrize("n", [1, 3])
async def test_abort_races_with_the_final_step(engine: AsyncLLM, n: int) -> None:
    """Whichever wins, there is one last output, and nothing is left."""
    for number, delay in itertools.product(range(4), (0, 0.001, 0.003)):
        request_id = f"race-{number}-{delay}"
        stream = engine.generate(PROMPT, params_of(RequestOutputKind.FINAL_ONLY, 1 + number, n), request_id)
        await anyio.sleep(delay)
        await engine.abort(request_id)
        outputs: list[RequestOutput] = [output async for output in stream]
        assert len(outputs) == 1
        assert len(outputs[0].outputs) == n
        for completion in outputs[0].outputs:
            assert completion.finish_reason in ("abort", "length")
            assert (completion.finish_reason == "length") == (len(completion.token_ids) == 1 + number)
    await becomes_idle(engine)


@pytest.mark.filterwarnings("ignore::UserWarning")
async def test_profiles_that_are_started_and_stopped_at_once(tmp_path: Path) -> None:
    """One caller of each kind gets what he asked for, the others an error, and requests go on."""
    config = {"profiler": "torch", "torch_profiler_dir": str(tmp_path)}
    async with AsyncLLM("storyteller", topology="inline", num_threads=1, profiler_config=config) as engine:
        stream = engine.generate(PROMPT, params_of(RequestOutputKind.DELTA, 40))
        await anext(stream)
        for calls in ([engine.start_profile] * 4, [engine.stop_profile] * 4):
            results = await asyncio.gather(*(call() for call in calls), return_exceptions=True)
            assert sum(result is None for result in results) == 1
            assert sum(isinstance(result, EngineError) for result in results) == 3
        *_, last = [output async for output in stream]
        assert last.outputs[0].finish_reason == "length"
    assert len(os.listdir(tmp_path)) == 1
