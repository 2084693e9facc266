"""Engines whose worker launches ahead, on the emulated device in this process."""

from __future__ import annotations

import threading
from collections.abc import Callable
from typing import Any

import numpy as np

from actorllm import LLM, SamplingParams
from actorllm.actors.worker import WorkerActor
from actorllm.config import EngineConfig
from actorllm.messages import StepPlan
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


def generate(llm: LLM, max_tokens: int = 8) -> list[Any]:
    """The tokens of each kind of request, and which had log-probabilities."""
    rng = np.random.default_rng(0)
    prompts = [rng.integers(0, TINY["vocab_size"], n).tolist() for n in (62, 3, 30, 125, 61, 9)]
    params = [SamplingParams(max_tokens=max_tokens, ignore_eos=True, detokenize=False, **kind) for kind in KINDS]
    outputs = llm.generate([{"prompt_token_ids": p} for p in prompts], params, use_tqdm=False)
    return [[(o.token_ids, [sorted(step) for step in o.logprobs or ()]) for o in output.outputs] for output in outputs]
