"""Engines on the emulated device that sleep: memory goes, addresses and graphs stay, and streams are those before."""

from __future__ import annotations

import gc
import io
import json
import os
import signal
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path
from typing import Any

import anyio
import pytest
import torch

import actorllm.client.engine_supervisor
from actorllm import LLM, AsyncLLM, LoRARequest, SamplingParams
from actorllm.actors.topology import engine_topology
from actorllm.actors.worker import WorkerActor
from actorllm.config import EngineConfig
from actorllm.errors import ConfigError, CorruptModelError, EngineError, UnsupportedModelError
from actorllm.model.cuda import sleeping_weights
from actorllm.model.cuda.device import HostDevice
from actorllm.model.cuda.proof.self_check import Copies
from actorllm.model.cuda.runner import CudaRunner
from actorllm.model.cuda.sleeping_weights import MovedMemory, SleepingWeights, tensors_below
from actorllm.model.cuda.weight_copies import pairs
from tests.effort import grid
from tests.model.adapters.lora_folders import linear_layers, shapes_of, write_adapter
from tests.model.cpu.draft_head_oracle import save_eagle
from tests.model.cuda import host_memory
from tests.model.cuda.delayed_device import DelayedDevice
from tests.model.cuda.drafting_engine import config as drafts_of
from tests.model.cuda.host_engine import ARGUMENTS, generate
from tests.model.cuda.host_memory import PIECE, HostMemory, signal_of, sleeping
from tests.model.cuda.host_processes import on_the_host
from tests.model.cuda.mixtures import DEEPSEEK_V3, QWEN3
from tests.model.cuda.saved_models import saved
from tests.model.cuda.twins import prompt
from tests.model.updates.weight_folders import STORYTELLER

pytestmark = [
    pytest.mark.timeout(240),
    pytest.mark.skipif(host_memory.COMPILER is None, reason="needs a C compiler for the driver's library"),
    pytest.mark.filterwarnings("ignore:.*multi-threaded:DeprecationWarning"),  # of fork
]

SLEEPS: dict[str, Any] = ARGUMENTS | {"enable_sleep_mode": True, "load_format": "auto"}
KINDS: dict[str, tuple[dict[str, Any], dict[str, Any]]] = {
    "dense": ({}, {}),
    "tied": ({"tie_word_embeddings": True}, {}),
    "int8": ({}, {"quantization": "int8"}),
    "experts": (QWEN3, {}),
    "latents": (DEEPSEEK_V3, {}),
}
TOLD = SamplingParams(max_tokens=24, temperature=0.9, seed=4, ignore_eos=True, detokenize=False)


@pytest.fixture
def anyio_backend() -> str:
    return "asyncio"


Build = Callable[..., tuple[LLM, CudaRunner]]


@pytest.fixture
def build(memory: HostMemory, monkeypatch: pytest.MonkeyPatch) -> Iterator[Build]:
    """An engine in this process, and its runner with all graphs that it wants."""
    engines: list[LLM] = []
    runners: list[CudaRunner] = []

    def load(self: WorkerActor, config: EngineConfig) -> CudaRunner:
        runners.append(host_memory.load(self, config))
        return runners[-1]

    monkeypatch.setattr(WorkerActor, "_load", load)

    def build(path: Path | str, **arguments: Any) -> tuple[LLM, CudaRunner]:
        engines.append(LLM(str(path), **(SLEEPS | arguments)))
        # Its worker records them in its thread, and tells its statistics between two of them.
        while engines[-1].stats() and runners[-1].graphs.next_wanted() is not None:
            pass
        assert engines[-1].stats()
        return engines[-1], runners[-1]

    yield build
    for engine in engines:
        engine.shutdown()


def addresses(runner: CudaRunner) -> list[int]:
    """Of all weights, and of the pool."""
    return [runner.pool.data_ptr(), *(tensor.data_ptr() for tensor in tensors_below(runner.model))]


def graphs(runner: CudaRunner) -> dict[Any, Any]:
    """What is recorded."""
    return dict(runner.graphs._replays)


def copied(runner: CudaRunner) -> int:
    """Bytes that the host keeps of the weights."""
    assert runner._sleeping is not None
    return sum(len(part) for _, part in runner._sleeping._kept or ())


def tell_of(llm: LLM, **more: Any) -> list[int]:
    prompts = [{"prompt_token_ids": prompt(70, 1)}]
    return list(llm.generate(prompts, TOLD, use_tqdm=False, **more)[0].outputs[0].token_ids)


@pytest.mark.parametrize(("level", "kind"), grid([1, 2], list(KINDS)))
def test_streams_graphs_and_addresses_are_those_before(
    kind: str, level: Any, build: Build, memory: HostMemory, tmp_path: Path
) -> None:
    shape, arguments = KINDS[kind]
    llm, runner = build(saved(tmp_path / "model", 1, **shape), **arguments)
    expected, where, recorded = generate(llm), addresses(runner), graphs(runner)
    assert recorded
    weights = {held.data_ptr(): held.nbytes for held, _ in pairs(runner.model, runner.model)}
    held, replays = memory.held, runner.graphs.num_replays
    for _ in range(2):
        freed = llm.sleep(level)
        assert memory.held == 0
        assert freed == held, "what the driver got back"
        assert freed >= 0.9 * (sum(weights.values()) + runner.pool.nbytes)
        assert runner._sleeping is not None
        left_out = runner._sleeping.num_bytes - copied(runner)
        assert (left_out > 0.9 * sum(weights.values())) == (level == 2), "of what is read again there is no copy"
        assert llm.sleep(level) == 0, "asked again, it sleeps on"
        llm.wake_up(["weights"])
        assert llm.is_sleeping()
        llm.wake_up(["kv_cache"])
        llm.wake_up()
        assert memory.held == held
        assert copied(runner) == 0
        assert not runner.pool.any()
        assert generate(llm) == expected
    assert addresses(runner) == where
    now = graphs(runner)
    assert all(now[key] is replay for key, replay in recorded.items())
    assert runner.graphs.num_replays > replays


def test_random_weights_are_copied_at_both_levels(build: Build, tmp_path: Path) -> None:
    """A GPU draws others than the host, where they would be drawn again."""
    saved(tmp_path / "model", 1)
    llm, runner = build(tmp_path / "model", load_format="dummy")
    expected = generate(llm)
    llm.sleep(2)
    assert copied(runner) >= sum(held.nbytes for held, _ in pairs(runner.model, runner.model))
    llm.wake_up()
    assert generate(llm) == expected


def test_a_replay_before_waking_ends_the_process(build: Build, tmp_path: Path) -> None:
    """What the emulated device shows is that a graph has the addresses that memory is given back of."""
    llm, runner = build(saved(tmp_path / "model", 1))
    key = next(iter(graphs(runner)))

    @torch.inference_mode()
    def replay() -> None:
        runner.graphs.run(*key)

    def read() -> None:
        runner.pool.sum()

    assert (signal_of(replay), signal_of(read)) == (0, 0)
    llm.sleep()
    assert (signal_of(replay), signal_of(read)) == (signal.SIGSEGV, signal.SIGSEGV)
    llm.wake_up(["kv_cache"])
    assert (signal_of(replay), signal_of(read)) == (signal.SIGSEGV, 0)
    llm.wake_up()
    assert (signal_of(replay), signal_of(read)) == (0, 0)


def test_no_step_is_recorded_while_it_sleeps(build: Build, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Not before all is there again: recording launches the step."""
    llm, runner = build(saved(tmp_path / "model", 1))
    monkeypatch.setattr(CudaRunner, "record_next", lambda self: False)  # what is wanted here stays so
    llm.sleep()
    runner.graphs._misses[next(iter(graphs(runner)))] = 1
    assert not runner.wants_to_record
    llm.wake_up(["weights"])
    assert not runner.wants_to_record
    runner._pool.restore()
    assert runner.wants_to_record
    runner.graphs._misses.clear()


def drafting(tmp_path: Path) -> tuple[str, dict[str, Any]]:
    drafts = drafts_of("draft_model", 3) | {"model": "storyteller-draft"}
    return "storyteller", {"speculative_config": drafts, "kv_cache_memory_bytes": 3_000_000, "max_model_len": 256}


def drafting_by_a_head(tmp_path: Path) -> tuple[str, dict[str, Any]]:
    tree = json.loads((STORYTELLER / "config.json").read_text())
    head = save_eagle(tmp_path / "head", tree)
    drafts = drafts_of("eagle", 3) | {"model": str(head)}
    return "storyteller", {"speculative_config": drafts, "kv_cache_memory_bytes": 3_000_000, "max_model_len": 256}


def adapted(tmp_path: Path) -> tuple[str, dict[str, Any]]:
    return "storyteller", {"enable_lora": True, "max_model_len": 256}


def through_transformers(tmp_path: Path) -> tuple[str, dict[str, Any]]:
    return "storyteller", {"model_impl": "transformers", "max_model_len": 256}


OTHERS = [drafting, drafting_by_a_head, adapted, through_transformers]


@pytest.mark.parametrize("make", OTHERS)
def test_every_tensor_of_a_model_is_moved(
    make: Any, build: Build, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """One that was not would go on with memory that nothing updates, and that is never given back."""
    before: list[tuple[int, int]] = []
    kept: list[Any] = []  # so that nothing else gets this memory
    move = SleepingWeights._move

    def watching(self: SleepingWeights, block: MovedMemory) -> None:
        kept.append(block.tensors[0].untyped_storage())
        before.append((block.start, block.end))
        move(self, block)

    monkeypatch.setattr(SleepingWeights, "_move", watching)
    path, arguments = make(tmp_path)
    llm, runner = build(path, **arguments)
    tensors = [one for one in gc.get_objects() if issubclass(type(one), torch.Tensor)]
    left = [
        (tuple(one.shape), one.data_ptr())
        for one in tensors
        if one.device.type == "cpu" and any(start <= one.data_ptr() < end for start, end in before) and one.numel()
    ]
    assert before
    assert left == []
    llm.sleep()
    parameters = sum(end - start for start, end in before)
    assert sum(copied(one) for one in runner._runners) >= parameters


@pytest.mark.parametrize("make", OTHERS)
def test_other_models_sleep_too(make: Any, build: Build, memory: HostMemory, tmp_path: Path) -> None:
    """With drafts, which sleep with the model; with adapters, which stay; and through transformers."""
    path, arguments = make(tmp_path)
    llm, _ = build(path, **arguments)
    more: dict[str, Any] = {}
    if make is adapted:
        from transformers import AutoModelForCausalLM

        shapes = shapes_of(linear_layers(AutoModelForCausalLM.from_pretrained(STORYTELLER)))
        write_adapter(tmp_path / "adapter", shapes, seed=1, size=1.0, r=8)
        more["lora_request"] = LoRARequest("a", 1, str(tmp_path / "adapter"))
    expected, held = tell_of(llm, **more), memory.held
    assert llm.sleep() == held
    assert memory.held == 0
    llm.wake_up()
    assert tell_of(llm, **more) == expected
    if make in (adapted, through_transformers):
        with pytest.raises(UnsupportedModelError, match=r"sleep\(level=2\) drops the weights: .* or use level=1"):
            llm.sleep(2)
        assert not llm.is_sleeping()
    else:
        assert llm.sleep(2) == held
        llm.wake_up()
    assert tell_of(llm, **more) == expected


@pytest.mark.parametrize("level", [1, 2])
def test_updates_while_it_sleeps(level: Any, build: Build, tmp_path: Path) -> None:
    """They wake the weights; the next waking is of the version that counts."""
    one, two = (saved(tmp_path / str(seed), seed) for seed in (1, 2))
    fresh, _ = build(two)
    wanted = generate(fresh)
    fresh.shutdown()
    llm, runner = build(one)
    where = addresses(runner)
    llm.sleep(level)
    llm.update_weights_from_disk(two)
    assert llm.is_sleeping()
    llm.wake_up(["kv_cache"])
    assert generate(llm) == wanted
    llm.sleep(level)
    llm.wake_up()
    assert generate(llm) == wanted
    llm.sleep(2)
    os.utime(two / "model.safetensors")
    with pytest.raises(CorruptModelError, match="has changed since"):
        llm.wake_up()
    assert llm.is_sleeping()
    llm.update_weights_from_disk(saved(tmp_path / "again", 2))
    llm.wake_up()
    assert generate(llm) == wanted
    assert addresses(runner) == where


def test_memory_that_is_not_there_at_waking(build: Build, memory: HostMemory, tmp_path: Path) -> None:
    """It is told, the engine sleeps on with what it had, and may be woken again."""
    llm, runner = build(saved(tmp_path / "model", 1))
    expected, held = generate(llm), memory.held
    llm.sleep()
    memory.limit(2 * PIECE)
    with pytest.raises(EngineError, match=r"cuMemCreate of \d+ bytes on GPU 0 failed: CUDA_ERROR_OUT_OF_MEMORY \(2\)"):
        llm.wake_up()
    assert llm.is_sleeping()
    assert memory.held == 0
    memory.limit(held - PIECE)  # enough for the weights
    with pytest.raises(EngineError, match="CUDA_ERROR_OUT_OF_MEMORY"):
        llm.wake_up()
    assert llm.is_sleeping()
    assert memory.held == held - runner.pool.nbytes
    memory.limit(None)
    llm.wake_up()
    assert not llm.is_sleeping()
    assert generate(llm) == expected


@pytest.mark.parametrize(("name", "after"), [("cuMemUnmap", 1), ("cuMemUnmap", 20), ("cuMemRelease", 1)])
def test_memory_that_cannot_be_given_back(
    name: str, after: int, build: Build, memory: HostMemory, tmp_path: Path
) -> None:
    """Of the weights, and of the cache behind them: nothing sleeps, and generation goes on."""
    llm, runner = build(saved(tmp_path / "model", 1))
    expected, held, where = generate(llm), memory.held, addresses(runner)
    memory.fail(name, after, 999)
    with pytest.raises(EngineError, match=rf"{name} of \d+ bytes on GPU 0 failed: CUDA_ERROR_UNKNOWN \(999\)"):
        llm.sleep()
    assert not llm.is_sleeping()
    assert generate(llm) == expected
    lost = PIECE if name == "cuMemRelease" else 0
    assert memory.held == held + lost
    assert llm.sleep() == held
    llm.wake_up()
    assert generate(llm) == expected
    assert addresses(runner) == where
    if lost:
        llm.shutdown()
        assert [handle for handle in range(1, 200) if not memory._library.cuMemRelease(handle)] == [2]


def test_a_host_without_memory_for_a_copy(
    build: Build, memory: HostMemory, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    llm, runner = build(saved(tmp_path / "model", 1))
    expected, held = generate(llm), memory.held

    def fail(num_bytes: int) -> torch.Tensor:
        raise RuntimeError(f"not enough memory: {num_bytes} bytes")

    monkeypatch.setattr(runner.device, "host_bytes", fail)
    with pytest.raises(EngineError, match=r"not enough memory: \d+ bytes"):
        llm.sleep()
    assert not llm.is_sleeping()
    assert memory.held == held
    assert generate(llm) == expected


def test_a_gpu_without_virtual_memory(build: Build, memory: HostMemory, tmp_path: Path) -> None:
    """Its driver is asked when the weights are there."""
    path = saved(tmp_path / "model", 1)
    memory.fail("cuMemAddressReserve", code=1)
    with pytest.raises(ConfigError, match=r"enable_sleep_mode=True: cuMemAddressReserve .* leave it out"):
        build(path)


def test_memory_that_weights_have_left_is_given_back_while_others_are_moved(
    build: Build, memory: HostMemory, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Else they would be in memory twice."""
    held: list[int] = []
    monkeypatch.setattr(sleeping_weights, "TRIMMED_BYTES", PIECE)
    monkeypatch.setattr(HostDevice, "trim", lambda self: held.append(memory.held))
    _, runner = build(saved(tmp_path / "model", 1))
    assert runner._sleeping is not None
    assert len(held) > 3
    assert held == sorted(held)
    assert held[0] < runner._sleeping.num_bytes, "the first time, some are not moved yet"


def test_copies_of_a_tensor_hold_no_other_weights(build: Build, tmp_path: Path) -> None:
    """The check of kernels copies what a tensor shares its memory with, and a GPU has no room for all weights twice."""
    _, runner = build(saved(tmp_path / "model", 1, tie_word_embeddings=True))
    tensors = [one for one in tensors_below(runner.model) if one.numel()]
    assert len(tensors) > 20
    for tensor in tensors:
        saving, copies = io.BytesIO(), Copies()
        torch.save(tensor, saving)
        copies.of(tensor)
        ((_, copy),) = copies._storages.values()
        assert copy.nbytes <= 2 * tensor.nbytes
        assert len(saving.getvalue()) <= 2 * tensor.nbytes + 4096


def test_a_cache_whose_size_is_measured(build: Build, memory: HostMemory, tmp_path: Path) -> None:
    """That of the measurement is given up: weights and one cache are left."""
    llm, runner = build(saved(tmp_path / "model", 1), kv_cache_memory_bytes=None, gpu_memory_utilization=0.27)
    assert memory.num_ranges == 2
    assert runner.pool.nbytes < runner.device.total_bytes() * 0.03
    expected = tell_of(llm)
    llm.sleep()
    llm.wake_up()
    assert tell_of(llm) == expected


@pytest.mark.parametrize("level", [1, 2])
def test_copies_wait_for_a_device_that_is_late(
    level: Any, memory: HostMemory, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    devices: list[Any] = []

    def load(self: WorkerActor, config: EngineConfig) -> CudaRunner:
        devices.append(sleeping(DelayedDevice, seed=3))
        runner = CudaRunner(config, self.rank, show_progress=False, device=devices[-1])
        runner.load()
        return runner

    monkeypatch.setattr(WorkerActor, "_load", load)
    with LLM(str(saved(tmp_path / "model", 1)), **SLEEPS) as llm:
        expected = tell_of(llm)
        devices[-1].is_late = True
        for _ in range(3):
            llm.sleep(level)
            llm.wake_up()
            assert tell_of(llm) == expected
        assert devices[-1].num_launched > 100
    devices.clear()


# Processes ------------------------------------------------------------------------------------------------------------


@pytest.fixture
def make_llm(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Callable[..., AsyncLLM]]:
    """Engines whose workers are processes with emulated devices."""
    host_memory.library()
    sleepers = partial(on_the_host, worker="tests.model.cuda.host_memory:SleepingWorkerActor")
    monkeypatch.setattr(
        actorllm.client.engine_supervisor, "engine_topology", lambda config: sleepers(engine_topology(config))
    )
    path, engines = saved(tmp_path / "model", 1), []

    def make(**arguments: Any) -> AsyncLLM:
        engines.append(AsyncLLM(str(path), **(SLEEPS | {"topology": "process"} | arguments)))
        return engines[-1]

    yield make
    for engine in engines:
        engine.shutdown()


ASKED: Any = {"prompt_token_ids": prompt(20, 1)}
SHORT = SamplingParams(max_tokens=20, temperature=0.9, seed=1, ignore_eos=True, detokenize=False)


async def tokens_of(stream: Any) -> tuple[list[int], str | None]:
    output = [one async for one in stream][-1].outputs[0]
    return list(output.token_ids), output.finish_reason


async def test_running_requests(make_llm: Callable[..., AsyncLLM]) -> None:
    """They are kept, waited for or ended; what comes meanwhile waits."""
    llm = make_llm()
    await llm.start()
    params = SamplingParams(max_tokens=120, temperature=0.9, seed=1, ignore_eos=True, detokenize=False)
    expected, _ = await tokens_of(llm.generate(ASKED, params))
    told: dict[str, tuple[list[int], str | None]] = {}
    for mode in ("keep", "wait", "abort"):
        stream = llm.generate(ASKED, params)
        await anext(stream)
        assert await llm.sleep(mode=mode) > 0
        assert await llm.collective_rpc("tests.model.cuda.host_memory:held") == [0]

        async def wait(mode: str) -> None:
            told[mode] = await tokens_of(llm.generate(ASKED, params))

        async with anyio.create_task_group() as tasks:
            tasks.start_soon(wait, mode)
            await anyio.lowlevel.checkpoint()
            await llm.wake_up()
            tokens, reason = await tokens_of(stream)
        assert told[mode] == (expected, "length")
        if mode == "abort":
            assert reason == "abort"
            assert tokens == expected[: len(tokens)]
        else:
            assert (tokens, reason) == (expected, "length")


@pytest.mark.parametrize(
    "num_ranks", [1, pytest.param(2, marks=pytest.mark.slow(reason="ranks as processes, which start again"))]
)
async def test_deaths_and_ranks(
    num_ranks: int, make_llm: Callable[..., AsyncLLM], monkeypatch: pytest.MonkeyPatch
) -> None:
    """A worker that ends while it sleeps is followed by one that sleeps; two ranks sleep and wake together."""
    monkeypatch.setenv("ACTORLLM_EXPERIMENTAL", "recorded-ranks")
    llm = make_llm(tensor_parallel_size=num_ranks)
    await llm.start()
    expected = await tokens_of(llm.generate(ASKED, SHORT))
    held = await llm.collective_rpc("tests.model.cuda.host_memory:held")
    assert len(held) == num_ranks
    for level in (1, 2):
        assert await llm.sleep(level) == sum(held)
        assert await llm.collective_rpc("tests.model.cuda.host_memory:held") == [0] * num_ranks
        await llm.wake_up()
        assert await tokens_of(llm.generate(ASKED, SHORT)) == expected
    await llm.sleep()
    engine: Any = llm._engine
    os.kill(engine.pids[f"worker{num_ranks - 1}"], signal.SIGKILL)
    while await llm.is_sleeping():  # until the workers are there again
        try:
            await llm.wake_up()
        except EngineError:
            await anyio.lowlevel.checkpoint()
    assert await tokens_of(llm.generate(ASKED, SHORT)) == expected


async def test_a_worker_that_cannot_come_back_is_started_again(make_llm: Callable[..., AsyncLLM]) -> None:
    """Its weights are unmapped, its cache cannot be, and then there is no memory for the weights: no step may meet that."""
    llm = make_llm()
    await llm.start()
    expected = await tokens_of(llm.generate(ASKED, SHORT))
    engine: Any = llm._engine
    before = engine.pids["worker0"]
    await llm.collective_rpc("tests.model.cuda.host_memory:fail", args=("cuMemUnmap", 1, 999))
    await llm.collective_rpc("tests.model.cuda.host_memory:limit", args=(0,))
    with pytest.raises(EngineError, match=r"cuMemUnmap .* CUDA_ERROR_UNKNOWN \(999\)"):
        await llm.sleep()
    assert not await llm.is_sleeping()
    assert await tokens_of(llm.generate(ASKED, SHORT)) == expected
    assert engine.pids["worker0"] != before
