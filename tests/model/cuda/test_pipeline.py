"""An engine whose worker launches ahead: the same tokens as on the CPU, whatever waits for what."""

from __future__ import annotations

import gc
import weakref
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from actorllm import LLM, EngineArgs, LLMEngine, SamplingParams
from actorllm.actors.worker import WorkerActor
from actorllm.errors import RequestError
from actorllm.messages import Submit
from actorllm.model.cuda.runner import CudaHandle, CudaRunner
from tests.model.cuda.host_engine import (
    ARGUMENTS,
    CountingRunner,
    generate,
    load,
)


@pytest.fixture
def build(monkeypatch: pytest.MonkeyPatch, folder: Callable[..., Path]) -> Callable[..., LLM]:
    """An engine on the tiny model; launching ahead unless is_plain."""
    path = folder()

    def make(*, is_plain: bool = False, **arguments: Any) -> LLM:
        with monkeypatch.context() as patch:
            if not is_plain:
                patch.setattr(WorkerActor, "_load", load)
            llm = LLM(str(path), **(ARGUMENTS | arguments))
            llm.generate([[1]], SamplingParams(max_tokens=1, detokenize=False), use_tqdm=False)  # starts it
        return llm

    return make


statistics: list[dict[str, Any]] = []
"""Of every run."""


def run(llm: LLM, max_tokens: int = 8) -> list[Any]:
    with llm:
        streams = generate(llm, max_tokens)
        statistics.append(llm.stats())
    return streams


@pytest.mark.timeout(120)
@pytest.mark.parametrize("arguments", [{}, {"max_num_batched_tokens": 32}, {"kv_cache_memory_bytes": 5 * 65536}])
def test_streams_are_those_of_the_cpu(build: Callable[..., LLM], arguments: dict[str, Any]) -> None:
    """Also with prompts in small chunks, and with so small a cache that requests give way to each other."""
    expected = run(build(is_plain=True))
    CountingRunner.most_under_way = 0
    assert run(build(**arguments)) == expected
    assert CountingRunner.most_under_way == 2
    assert statistics[-1]["scheduler"]["scheduler"]["num_preemptions"] > 0 or "kv_cache_memory_bytes" not in arguments
    (worker,) = statistics[-1]["workers"]
    assert worker["num_graph_replays"] + worker["num_parts_launched"] > 0


def test_all_sizes_are_recorded_once_nothing_is_asked_for(build: Callable[..., LLM]) -> None:
    params = SamplingParams(max_tokens=3, temperature=1.0, seed=1, top_p=0.5, ignore_eos=True, detokenize=False)
    with build() as llm:
        llm.generate([[1]], params, use_tqdm=False)
        while llm.stats()["workers"][0]["num_graphs_wanted"]:
            pass  # the pytest timeout ends a worker that never finds the time
        (worker,) = llm.stats()["workers"]
    assert worker["num_graphs"] == 5 + 7  # four sizes, and one row that is sampled from its logits; with prompts, seven
    assert worker["num_graphs_refused"] == 0


def test_an_engine_that_its_caller_steps(
    build: Callable[..., LLM], folder: Callable[..., Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    """With no loop to wait on, every step is waited for."""
    with build(is_plain=True) as llm:
        params = SamplingParams(max_tokens=4, temperature=1.0, seed=1, ignore_eos=True, detokenize=False)
        (expected,) = llm.generate([[5, 6, 7]], params, use_tqdm=False)
    monkeypatch.setattr(WorkerActor, "_load", load)
    engine = LLMEngine.from_engine_args(EngineArgs(str(folder()), **ARGUMENTS))
    try:
        engine.add_request("0", {"prompt_token_ids": [5, 6, 7]}, params)
        outputs = []
        while engine.has_unfinished_requests():
            outputs += engine.step()
    finally:
        engine.shutdown()
    assert outputs[-1].outputs[0].token_ids == expected.outputs[0].token_ids


def test_an_engine_that_its_caller_steps_gives_its_model_back(
    folder: Callable[..., Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    """When it is shut down: the next one in this process finds the memory free."""
    monkeypatch.setattr(WorkerActor, "_load", load)
    engine = LLMEngine.from_engine_args(EngineArgs(str(folder()), **ARGUMENTS))
    engine.add_request("0", {"prompt_token_ids": [5, 6, 7]}, SamplingParams(max_tokens=1, detokenize=False))
    engine.step()
    stepper = engine._engine.stepper
    assert stepper is not None
    runner: Any = stepper._worker.runner
    model, pool = weakref.ref(runner.model), weakref.ref(runner._pool)
    gc.collect()
    gc.disable()
    try:
        engine.shutdown()
        assert (model(), pool()) == (None, None)
    finally:
        gc.enable()


def test_late_inputs_follow_the_results_they_depend_on(
    build: Callable[..., LLM], monkeypatch: pytest.MonkeyPatch
) -> None:
    expected = run(build(is_plain=True), 4)
    right = Submit.__init__

    def late(self: Submit, **columns: Any) -> None:
        right(self, **columns | {"needs_late_inputs": True})

    monkeypatch.setattr(Submit, "__init__", late)
    assert run(build(), 4) == expected


def test_a_failing_step_is_reported_in_its_place(build: Callable[..., LLM], monkeypatch: pytest.MonkeyPatch) -> None:
    llm = build()
    launch = CudaRunner._launch_prefill

    def fail(self: CudaRunner, handle: CudaHandle) -> None:
        if (handle.inputs.token_ids == 66).any():
            raise RuntimeError("the model does not like token 66")
        launch(self, handle)

    monkeypatch.setattr(CudaRunner, "_launch_prefill", fail)
    params = SamplingParams(max_tokens=6, temperature=0.0, ignore_eos=True, detokenize=False)
    with llm:
        (alone,) = llm.generate([[5, 4]], params, use_tqdm=False)
        with pytest.raises(RequestError, match="does not like token 66"):
            llm.generate([[5, 4], [66]], params, use_tqdm=False)
        (again,) = llm.generate([[5, 4]], params, use_tqdm=False)
    assert again.outputs[0].token_ids == alone.outputs[0].token_ids


@pytest.mark.parametrize("arguments", [{}, {"kv_cache_memory_bytes": 5 * 65536}])
def test_processors_see_every_token_of_a_step_that_was_launched_ahead(
    build: Callable[..., LLM], arguments: dict[str, Any]
) -> None:
    """The logits of a step wait for the tokens of the one before, and a request that gave way comes with its output."""
    changers = "tests.api.logits_processors.changers"
    paths = [f"{changers}:NoRepeats", f"{changers}:Target"]
    extras: list[dict[str, Any]] = [{"no_repeats": True}, {"target": 7}, {}, {"no_repeats": True, "target": 9}]
    params = [
        SamplingParams(max_tokens=24, ignore_eos=True, detokenize=False, temperature=0.7, seed=i, extra_args=extra)
        for i, extra in enumerate(extras)
    ]
    prompts = [{"prompt_token_ids": [*range(1, 60 - i)]} for i in range(4)]
    found = []
    for is_plain in (True, False):
        with build(is_plain=is_plain, logits_processors=paths, **arguments) as llm:
            outputs = llm.generate(prompts, params, use_tqdm=False)
            found.append([output.outputs[0].token_ids for output in outputs])
            preempted = llm.stats()["scheduler"]["scheduler"]["num_preemptions"]
            assert preempted > 0 or "kv_cache_memory_bytes" not in arguments
    assert found[0] == found[1]
    assert len(set(found[0][0])) == 24
    assert set(found[0][1][2::3]) == {7}
