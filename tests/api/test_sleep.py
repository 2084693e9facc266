"""`sleep` and `wake_up`: memory is given back and measured, streams are as without, and what comes meanwhile waits or not."""

from __future__ import annotations

import contextlib
import json
import os
import signal
from collections.abc import Iterator
from functools import partial
from pathlib import Path
from typing import Any

import anyio
import pytest

from actorllm import LLM, AsyncLLM, LLMEngine, LoRARequest, SamplingParams
from actorllm.errors import ConfigError, CorruptModelError, EngineError, EngineSleepingError, InvalidParameterError
from tests.model.updates.weight_folders import ENGINE, PROMPT, STORYTELLER, changed, greedy, stream_of_fresh, write

pytestmark = [pytest.mark.timeout(240), pytest.mark.usefixtures("computed_as_asked")]

SLEEPS: dict[str, Any] = {**ENGINE, "enable_sleep_mode": True}
SHAPE = {
    "architectures": ["LlamaForCausalLM"],
    "model_type": "llama",
    "hidden_size": 512,
    "intermediate_size": 2048,
    "num_hidden_layers": 4,
    "num_attention_heads": 8,
    "num_key_value_heads": 8,
    "max_position_embeddings": 512,
    "vocab_size": 8000,
    "rms_norm_eps": 1e-5,
    "tie_word_embeddings": True,
}
WEIGHT_BYTES = 4 * (2 * 8000 * 512 + 4 * (4 * 512 * 512 + 3 * 512 * 2048))
"""float32; the head is a packed copy of the embeddings."""
KV_BYTES_PER_TOKEN = 4 * 4 * 2 * 512


@pytest.fixture
def anyio_backend() -> str:
    return "asyncio"


@pytest.fixture(scope="module")
def llm() -> Iterator[LLM]:
    with LLM("storyteller", topology="inline", **SLEEPS) as engine:
        yield engine


def tell(llm: LLM, **more: Any) -> Any:
    return llm.generate(PROMPT, greedy(), use_tqdm=False, **more)[0]


@pytest.mark.parametrize("level", [1, 2])
def test_streams_after_waking_are_those_before(llm: LLM, level: Any) -> None:
    expected = tell(llm).outputs[0].token_ids
    assert not llm.is_sleeping()
    assert isinstance(llm.sleep(level), int)
    assert llm.is_sleeping()
    with pytest.raises(EngineSleepingError, match="wake_up"):
        tell(llm)
    assert llm.sleep(level) >= 0, "asked again, it sleeps on"
    llm.wake_up(["kv_cache"])
    assert llm.is_sleeping(), "the weights do"
    llm.wake_up(["weights"])
    assert not llm.is_sleeping()
    output = tell(llm)
    assert output.outputs[0].token_ids == expected
    assert output.num_cached_tokens == 0, "nothing that was given back is found again"
    llm.wake_up()


def test_at_least_nine_tenths_of_weights_and_kv_are_given_back(tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text(json.dumps(SHAPE))
    arguments: dict[str, Any] = {"load_format": "dummy", "skip_tokenizer_init": True, "dtype": "float32"}
    with LLM(str(tmp_path), enable_sleep_mode=True, topology="inline", **arguments) as llm:
        prompts = [{"prompt_token_ids": [i] * 400} for i in range(6)]
        params = SamplingParams(max_tokens=4, temperature=0)
        before = [o.outputs[0].token_ids for o in llm.generate(prompts, params, use_tqdm=False)]
        wanted = 0.9 * (WEIGHT_BYTES + 6 * 400 * KV_BYTES_PER_TOKEN)
        assert llm.sleep() >= wanted
        llm.wake_up()
        assert [o.outputs[0].token_ids for o in llm.generate(prompts, params, use_tqdm=False)] == before
        assert llm.sleep(level=2) >= wanted, "it was taken again, and is given back again"


def test_an_engine_that_is_stepped_keeps_its_requests() -> None:
    engine = LLMEngine("storyteller", topology="inline", **SLEEPS)
    engine.add_request("one", PROMPT, greedy())
    tokens = engine.step()[0].outputs[0].token_ids
    engine.sleep(mode="keep")
    with pytest.raises(EngineSleepingError):
        engine.add_request("two", PROMPT, greedy())
    assert engine.is_sleeping()
    engine.wake_up()
    while engine.has_unfinished_requests():
        tokens = engine.step()[0].outputs[0].token_ids
    engine.add_request("three", PROMPT, greedy())
    while engine.has_unfinished_requests():
        undisturbed = engine.step()[0].outputs[0].token_ids
    assert tokens == undisturbed
    engine.shutdown()


def test_updates_wake_the_weights_and_a_changed_folder_is_told(llm: LLM, tmp_path: Path) -> None:
    folder = write(tmp_path / "one", changed(1))
    expected = stream_of_fresh(folder)
    llm.sleep(level=2)
    llm.update_weights_from_disk(folder, version="one")
    assert llm.is_sleeping()
    llm.wake_up(["kv_cache"])
    assert not llm.is_sleeping()
    assert tell(llm).outputs[0].token_ids == expected
    llm.sleep()
    os.utime(folder / "model.safetensors")
    with pytest.raises(CorruptModelError, match="has changed since"):
        llm.wake_up()
    assert llm.is_sleeping()
    llm.update_weights_from_disk(write(tmp_path / "two", changed(1)))
    llm.wake_up()
    assert tell(llm).outputs[0].token_ids == expected


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        ({"level": 0}, "level=0 must be 1 or 2; pause_generation"),
        ({"level": True}, "level=True must be 1 or 2"),
        ({"mode": "now"}, "mode='now' must be one of 'abort', 'wait', 'keep'"),
    ],
)
def test_bad_arguments_are_named(llm: LLM, arguments: dict[str, Any], said: str) -> None:
    with pytest.raises(InvalidParameterError, match=said):
        llm.sleep(**arguments)
    for tags, told in {
        "weights": "must be a list of",
        ("kvcache",): "'kvcache' is not one of 'weights', 'kv_cache'",
    }.items():
        with pytest.raises(InvalidParameterError, match=told):
            llm.wake_up(tags)  # type: ignore[arg-type]
    assert not llm.is_sleeping()


def test_what_cannot_sleep_says_so() -> None:
    with (
        LLM("storyteller", topology="inline", **ENGINE) as llm,
        pytest.raises(ConfigError, match="enable_sleep_mode=True"),
    ):
        llm.sleep()
    with pytest.raises(ConfigError, match="enable_sleep_mode='yes' must be True or False"):
        LLM("storyteller", enable_sleep_mode="yes")  # type: ignore[arg-type]


def test_other_models_sleep_too(tmp_path: Path) -> None:
    """Through transformers, quantized, with adapters."""
    from transformers import AutoModelForCausalLM

    from tests.model.adapters.lora_folders import linear_layers, shapes_of, write_adapter

    write_adapter(
        tmp_path, shapes_of(linear_layers(AutoModelForCausalLM.from_pretrained(STORYTELLER))), seed=1, size=1.0, r=8
    )
    kinds: list[tuple[dict[str, Any], dict[str, Any]]] = [
        ({"model_impl": "transformers"}, {}),
        ({"quantization": "int8"}, {}),
        ({"enable_lora": True}, {"lora_request": LoRARequest("a", 1, str(tmp_path))}),
    ]
    for arguments, more in kinds:
        with LLM("storyteller", topology="inline", **SLEEPS, **arguments) as llm:
            expected = tell(llm, **more).outputs[0].token_ids
            llm.sleep()
            llm.wake_up()
            assert tell(llm, **more).outputs[0].token_ids == expected


async def test_requests_wait_and_replicas_sleep_together() -> None:
    async with AsyncLLM("storyteller", data_parallel_size=2, **SLEEPS) as llm:
        expected = [o async for o in llm.generate(PROMPT, greedy(48))][-1].outputs[0].token_ids
        stream = llm.generate(PROMPT, greedy(48))
        await anext(stream)
        assert await llm.sleep(mode="keep") > 0
        assert await llm.is_sleeping()
        told: list[Any] = []

        async def wait() -> None:
            told[:] = [o async for o in llm.generate(PROMPT, greedy(48))]

        async with anyio.create_task_group() as tasks:
            tasks.start_soon(wait)
            with pytest.raises(EngineError, match="the engine sleeps; wake_up"):
                await llm.resume_generation()
            await llm.wake_up()
            assert [o async for o in stream][-1].outputs[0].token_ids == expected
        assert told[-1].outputs[0].token_ids == expected
        await llm.sleep(requests="refuse")
        with pytest.raises(EngineSleepingError):
            await anext(llm.generate(PROMPT, greedy()))
        await llm.wake_up()


async def test_a_caller_that_waits_no_more_ends_neither_sleep_nor_waking() -> None:
    async with AsyncLLM("storyteller", **SLEEPS) as llm:
        stream = llm.generate(PROMPT, greedy(200))
        await anext(stream)
        calls: list[Any] = [
            partial(llm.sleep, mode="wait", requests="refuse"),
            llm.wake_up,
        ]
        for call in calls:
            async with anyio.create_task_group() as tasks:
                tasks.start_soon(call)
                while not llm._engine.sleep_state._is_under_way:
                    await anyio.sleep(0.001)
                tasks.cancel_scope.cancel()
            async for _ in stream:
                pass
            while llm._engine.sleep_state._is_under_way:
                await anyio.sleep(0.001)
            if call is calls[0]:
                assert await llm.is_sleeping()
                with pytest.raises(EngineSleepingError):
                    await anext(llm.generate(PROMPT, greedy()))
        assert not await llm.is_sleeping()
        assert [o async for o in llm.generate(PROMPT, greedy())][-1].finished


async def test_replicas_that_do_not_all_sleep_go_on() -> None:
    """Requests that are routed to the one that could sleep would wait there."""
    async with AsyncLLM("storyteller", data_parallel_size=2, **SLEEPS) as llm:
        expected = [o async for o in llm.generate(PROMPT, greedy(8))][-1].outputs[0].token_ids
        assert sorted(await llm.collective_rpc("tests.api.worker_functions:refuse_sleep_once")) == [False, True]
        with pytest.raises(EngineError, match="planted: this replica alone cannot sleep"):
            await llm.sleep()
        assert not await llm.is_sleeping()
        told: list[Any] = []

        async def tell_once() -> None:
            told.append([o async for o in llm.generate(PROMPT, greedy(8))][-1].outputs[0].token_ids)

        async with anyio.create_task_group() as tasks:
            for _ in range(4):  # on both
                tasks.start_soon(tell_once)
        assert told == [expected] * 4
        assert await llm.sleep() > 0
        await llm.wake_up()


async def test_weights_that_an_update_has_woken_stay_awake() -> None:
    """Also where the cache was woken before, and where a worker takes the place of the one that was updated."""
    async with AsyncLLM("storyteller", **SLEEPS) as llm:
        await llm.sleep()
        await llm.wake_up(["kv_cache"])
        await llm.update_weights_from_tensors(changed(1))
        assert not await llm.is_sleeping()
        expected = [o async for o in llm.generate(PROMPT, greedy())][-1].outputs[0].token_ids
        await llm.sleep()
        await llm.update_weights_from_tensors(changed(1))
        engine: Any = llm._engine
        os.kill(engine.pids["worker0"], signal.SIGKILL)
        is_woken = False
        while not is_woken:  # until the worker is there again
            with contextlib.suppress(EngineError):
                await llm.wake_up(["kv_cache"])
                is_woken = True
        assert not await llm.is_sleeping()
        assert [o async for o in llm.generate(PROMPT, greedy())][-1].outputs[0].token_ids == expected


MORE = pytest.mark.slow(reason="an engine in processes and kills of it; the quick case has the worker")


@pytest.mark.parametrize(
    "victims",
    [("worker0",), pytest.param(("scheduler",), marks=MORE), pytest.param(("scheduler", "worker0"), marks=MORE)],
)
async def test_a_process_that_dies_while_the_engine_sleeps(victims: tuple[str, ...]) -> None:
    """Its next life sleeps, or is woken with the others; what waits is computed when all are awake."""
    async with AsyncLLM("storyteller", **SLEEPS) as llm:
        expected = [o async for o in llm.generate(PROMPT, greedy(48))][-1].outputs[0].token_ids
        stream = llm.generate(PROMPT, greedy(48))
        await anext(stream)
        await llm.sleep(mode="keep")
        engine: Any = llm._engine
        for name in victims:
            os.kill(engine.pids[name], signal.SIGKILL)
        while await llm.is_sleeping():  # until the workers are there again
            with contextlib.suppress(EngineError):
                await llm.wake_up()
        assert not await llm.is_sleeping()
        assert [o async for o in stream][-1].outputs[0].token_ids == expected
