"""A draft model on a device: the streams of the CPU (float32), and as many of its drafts are right as there."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest

from actorllm import LLM, SamplingParams
from actorllm.actors.worker import WorkerActor
from actorllm.config import EngineConfig
from actorllm.model.cuda.device import HostDevice
from actorllm.model.cuda.draft_model import DeviceDraftModel
from actorllm.model.cuda.runner import CudaRunner

pytestmark = pytest.mark.timeout(120)

ARGUMENTS: dict[str, Any] = {
    "dtype": "float32",
    "device": "cpu",
    "num_threads": 1,
    "topology": "inline",
    "max_num_seqs": 8,
    "block_size": 64,
    "max_model_len": 256,
}
BLOCK_BYTES = 64 * 4 * 2 * (4 * 2 * 64 + 32)
"""Of both models in float32."""
OPENINGS = ("Once upon a time there was", "The old king called his three sons", "One evening in winter the fox")
KINDS: list[dict[str, Any]] = [
    {"temperature": 0.8, "seed": 5},
    {"temperature": 0.0},
    {"temperature": 1.0, "seed": 6, "n": 2},
]


def run(**arguments: Any) -> tuple[list[list[int]], dict[str, Any]]:
    params = [SamplingParams(max_tokens=48, ignore_eos=True, detokenize=False, **kind) for kind in KINDS]
    with LLM("storyteller", **(ARGUMENTS | arguments)) as llm:
        outputs = llm.generate(OPENINGS, params, use_tqdm=False)
        statistics = llm.stats()["scheduler"]["scheduler"]
    return [list(c.token_ids) for output in outputs for c in output.outputs], statistics


def config(**more: Any) -> dict[str, Any]:
    ranges = {"num_speculative_tokens_per_batch_size": [[1, 8, 3]]}
    return {"method": "draft_model", "model": "storyteller-draft", "num_speculative_tokens": 3, **ranges, **more}


def share_of(statistics: dict[str, Any]) -> float:
    counts = statistics["speculation"]
    return float(counts["num_accepted_tokens"] / counts["num_draft_tokens"])


@pytest.fixture
def on_device(monkeypatch: pytest.MonkeyPatch) -> Callable[..., tuple[list[list[int]], dict[str, Any]]]:
    def load(self: WorkerActor, config: EngineConfig) -> CudaRunner:
        runner = CudaRunner(config, self.rank, show_progress=False, device=HostDevice())
        runner.load()
        return runner

    def on_device(**arguments: Any) -> tuple[list[list[int]], dict[str, Any]]:
        with monkeypatch.context() as patch:
            patch.setattr(WorkerActor, "_load", load)
            return run(**arguments)

    return on_device


@pytest.fixture(scope="module")
def on_cpu() -> tuple[list[list[int]], dict[str, Any]]:
    return run(speculative_config=config())


def test_streams_and_shares_of_right_drafts_are_those_of_the_cpu(
    on_device: Callable[..., tuple[list[list[int]], dict[str, Any]]], on_cpu: tuple[list[list[int]], dict[str, Any]]
) -> None:
    """Greedy, seeded, and several sequences of one prompt, with steps that were not drafted for between."""
    streams, statistics = on_device(speculative_config=config())
    assert streams == on_cpu[0]
    assert statistics["speculation"]["num_accepted_tokens"] > 15
    assert share_of(statistics) == pytest.approx(share_of(on_cpu[1]), abs=0.03)


def watch(monkeypatch: pytest.MonkeyPatch, every: int, *, forgets: bool = False) -> list[tuple[list[int], list[int]]]:
    """Tokens of a row, and what was drafted behind them.

    every: of so many steps one drafts. forgets: what the model lags behind is left out.
    """
    draft = DeviceDraftModel.draft
    found: list[tuple[list[int], list[int]]] = []
    calls: list[int] = []

    def watching(self: DeviceDraftModel, batch: Any, histories: Any, slots: Any, wanted: Any) -> list[list[int]]:
        calls.append(int((batch.columns.num_known[slots] - self.computed[slots]).max()))
        if len(calls) % every:
            return [[] for _ in slots]
        if forgets:
            self.computed[slots] = batch.columns.num_known[slots] - 1
        drafts = draft(self, batch, histories, slots, wanted)
        found.extend(
            (histories.of(slot).tokens.tolist(), row) for slot, row in zip(slots.tolist(), drafts, strict=True)
        )
        return drafts

    monkeypatch.setattr(DeviceDraftModel, "draft", watching)
    return found


def are_its_own(found: list[tuple[list[int], list[int]]]) -> bool:
    """Whether drafts are what the draft model says by itself, of greedy rows."""
    found = [(tokens, drafts) for tokens, drafts in found if drafts]
    assert len(found) > 10
    params = [
        SamplingParams(max_tokens=len(row), temperature=0.0, ignore_eos=True, detokenize=False) for _, row in found
    ]
    with LLM("storyteller-draft", skip_tokenizer_init=True, **ARGUMENTS) as llm:
        outputs = llm.generate([{"prompt_token_ids": tokens} for tokens, _ in found], params, use_tqdm=False)
    return [list(output.outputs[0].token_ids) for output in outputs] == [row for _, row in found]


@pytest.mark.parametrize("forgets", [False, True], ids=["right", "planted"])
def test_a_draft_model_that_lags_behind_is_brought_forward(
    on_device: Callable[..., tuple[list[list[int]], dict[str, Any]]], monkeypatch: pytest.MonkeyPatch, forgets: bool
) -> None:
    """After some steps without drafts, and where requests were preempted. Keys that are missing change drafts alone."""
    monkeypatch.setitem(globals(), "KINDS", [{"temperature": 0.0}] * 3)
    monkeypatch.setitem(globals(), "OPENINGS", [f"{opening}. " * 4 for opening in OPENINGS])
    found = watch(monkeypatch, 3, forgets=forgets)
    streams, statistics = on_device(speculative_config=config(), kv_cache_memory_bytes=5 * BLOCK_BYTES)
    assert statistics["num_preemptions"] > 0
    assert are_its_own(found) != forgets
    assert streams == run()[0]
