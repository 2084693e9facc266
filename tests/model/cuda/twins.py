"""The CPU's runner and the GPU's, given the same requests; what they answer must be the same."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from actorllm.messages import LateInputs, StepResult
from actorllm.messages.logprobs import spans_of
from actorllm.model.cpu.runner import CpuRunner
from actorllm.model.cuda.runner import CudaRunner
from tests.model.driver import Driver

TINY: dict[str, Any] = {
    "architectures": ["Qwen3ForCausalLM"],
    "vocab_size": 300,
    "hidden_size": 64,
    "intermediate_size": 96,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 32,
    "max_position_embeddings": 256,
    "rms_norm_eps": 1e-6,
    "hidden_act": "silu",
    "tie_word_embeddings": False,
    "dtype": "float32",
}


class DeviceDriver(Driver):
    """Drives a CudaRunner."""

    def step(
        self,
        prefill: Mapping[int, int] | None = None,
        decode: Sequence[int] | None = None,
        late: Callable[[int], LateInputs] | None = None,
        **more: Any,
    ) -> StepResult:
        plan = self.plan(prefill or {}, decode, **more)
        rows = self.rows
        result = self.runner.step(plan, late(plan.step) if late is not None else None)
        self.runner.batch.check_integrity()
        counts = result.counts if result.counts.size else np.ones(len(result.tokens), np.int32)
        tokens = iter(result.tokens.tolist())
        for slot, count in zip(rows, counts.tolist(), strict=True):
            self.requests[slot].tokens += [next(tokens) for _ in range(count)]
            self.requests[slot].num_computed += max(0, count - 1)  # drafts that were right
        return result


@dataclass
class Twins:
    """Calls of one driver, made on two."""

    cpu_runner: CpuRunner
    runner: CudaRunner

    def __post_init__(self) -> None:
        self.cpu = Driver(self.cpu_runner, num_blocks=96)
        self.device = DeviceDriver(self.runner, num_blocks=24)

    def add(self, slot: int, tokens: Sequence[int], **parameters: Any) -> None:
        self.cpu.add(slot, tokens, **parameters)
        self.device.add(slot, tokens, **parameters)

    def remove(self, *slots: int) -> None:
        self.cpu.remove(*slots)
        self.device.remove(*slots)

    def step(self, *args: Any, **more: Any) -> StepResult:
        """The device's result, once it is found equal to the CPU's."""
        expected, result = self.cpu.step(*args, **more), self.device.step(*args, **more)
        assert result.tokens.tolist() == expected.tokens.tolist()
        assert result.counts.tolist() == expected.counts.tolist()
        assert result.nonfinite_rows.tolist() == expected.nonfinite_rows.tolist()
        assert result.nonfinite_prefills.tolist() == expected.nonfinite_prefills.tolist()
        assert result.vector_rows.tolist() == expected.vector_rows.tolist()
        np.testing.assert_allclose(result.vectors, expected.vectors, atol=1e-4)
        ours = {(span.row, span.position): span for span in spans_of(result)}
        theirs = {(span.row, span.position): span for span in spans_of(expected)}
        assert ours.keys() == theirs.keys()
        for key, span in ours.items():
            assert span.ids.tolist() == theirs[key].ids.tolist()
            assert span.ranks.tolist() == theirs[key].ranks.tolist()
            np.testing.assert_allclose(span.values, theirs[key].values, atol=1e-4)
        return result

    def tokens(self, slot: int) -> list[int]:
        return self.device.requests[slot].tokens


def prompt(length: int, seed: int = 0) -> list[int]:
    tokens: list[int] = np.random.default_rng(seed).integers(0, TINY["vocab_size"], length).tolist()
    return tokens
