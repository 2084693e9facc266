"""An engine whose worker launches ahead: the same tokens as on the CPU, whatever waits for what."""

from __future__ import annotations

import gc
import threading
import weakref
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from actorllm import LLM, EngineArgs, LLMEngine, SamplingParams
from actorllm.actors.worker import WorkerActor
from actorllm.config import EngineConfig
from actorllm.errors import RequestError
from actorllm.messages import StepPlan, Submit
from actorllm.model.cuda.device import Download, HostDevice
from actorllm.model.cuda.runner import CudaHandle, CudaRunner
from tests.model.cuda.twins import TINY

KINDS: list[dict[str, Any]] = [
    {"temperature": 0.0},
    {"temperature": 1.0, "seed": 3},
    {"temperature": 0.9, "seed": 4, "top_p": 0.8},
    {"temperature": 1.0, "seed": 5, "repetition_penalty": 1.3, "frequency_penalty": 0.3},
    {"temperature": 0.0, "logprobs": 2, "prompt_logprobs": 1},
    {"temperature": 1.0, "seed": 6, "min_tokens": 4, "stop_token_ids": [7], "n": 2},
]


class Lag:
    """Over when the next step is launched, or when there is none for a while."""

    def __init__(self) -> None:
        self.is_overtaken = threading.Event()
        self.is_over = False

    def wait(self) -> None:
        if not self.is_over:
            self.is_overtaken.wait(0.02)
            self.is_over = True


class LaggingDownload(Download):
    def __init__(self, download: Download, lag: Lag) -> None:
        self._download, self._lag = download, lag

    @property
    def is_done(self) -> bool:
        return self._lag.is_over

    def wait(self) -> list[np.ndarray[Any, Any]]:
        self._lag.wait()
        return self._download.wait()

    def waiter(self) -> Callable[[], None]:
        return self._lag.wait


class LaggingDevice(HostDevice):
    last: Lag | None = None

    def download(self, tensors: Any) -> Download:
        if self.last is not None:
            self.last.is_overtaken.set()
        self.last = Lag()
        return LaggingDownload(super().download(tensors), self.last)


class CountingRunner(CudaRunner):
    """Knows how many steps were under way at a time."""

    most_under_way = 0
    num_under_way = 0

    def execute(self, plan: StepPlan) -> CudaHandle:
        handle = super().execute(plan)
        self.num_under_way += 1
        CountingRunner.most_under_way = max(CountingRunner.most_under_way, self.num_under_way)
        return handle

    def finish(self, handle: CudaHandle) -> Any:
        self.num_under_way -= 1
        return super().finish(handle)


ARGUMENTS: dict[str, Any] = {
    "load_format": "dummy",
    "dtype": "float32",
    "device": "cpu",
    "skip_tokenizer_init": True,
    "num_threads": 1,
    "topology": "inline",
    "max_num_seqs": 8,
    "block_size": 64,
    "kv_cache_memory_bytes": 1 << 20,
}


def load(self: WorkerActor, config: EngineConfig) -> CudaRunner:
    """In the place of WorkerActor._load."""
    runner = CountingRunner(config, self.rank, show_progress=False, device=LaggingDevice())
    runner.load()
    return runner


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


def generate(llm: LLM, max_tokens: int = 8) -> list[Any]:
    """The tokens of each kind of request, and which had log-probabilities."""
    rng = np.random.default_rng(0)
    prompts = [rng.integers(0, TINY["vocab_size"], n).tolist() for n in (62, 3, 30, 125, 61, 9)]
    params = [SamplingParams(max_tokens=max_tokens, ignore_eos=True, detokenize=False, **kind) for kind in KINDS]
    outputs = llm.generate([{"prompt_token_ids": p} for p in prompts], params, use_tqdm=False)
    return [[(o.token_ids, [sorted(step) for step in o.logprobs or ()]) for o in output.outputs] for output in outputs]


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
    assert worker["num_graphs"] == 5  # four sizes, and one row that is sampled from its logits
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
