"""Logits processors of an application, written against vLLM's interfaces."""

from __future__ import annotations

from typing import Any

import torch

from actorllm import SamplingParams
from actorllm.types.logits_processors import (
    AdapterLogitsProcessor,
    BatchUpdate,
    LogitsProcessor,
    RequestLogitsProcessor,
    process_dict_updates,
)

LEAVES = -4
"""A target whose processor raises SystemExit."""


class NoRepeats(LogitsProcessor):
    """Of a batch: takes out what the output has already, for requests with `no_repeats`."""

    def __init__(self, vllm_config: Any, device: torch.device, is_pin_memory: bool) -> None:
        assert vllm_config.model_config.get_vocab_size() > 0
        assert vllm_config.scheduler_config.max_num_seqs > 0
        self.outputs: dict[int, list[int]] = {}

    @classmethod
    def validate_params(cls, sampling_params: SamplingParams) -> None:
        if not isinstance((sampling_params.extra_args or {}).get("no_repeats", False), bool):
            raise ValueError("no_repeats must be True or False")

    def is_argmax_invariant(self) -> bool:
        return False

    def update_state(self, batch_update: BatchUpdate | None) -> None:
        def state(params: SamplingParams, prompt: list[int] | None, output: list[int]) -> list[int] | None:
            return output if (params.extra_args or {}).get("no_repeats") else None

        process_dict_updates(self.outputs, batch_update, state)

    def apply(self, logits: torch.Tensor) -> torch.Tensor:
        for index, output in self.outputs.items():
            if 666 in output:
                raise RuntimeError("the number of the beast")
            logits[index, output] = -torch.inf
        return logits


class Target(AdapterLogitsProcessor):
    """Of a request: every third token is `target`."""

    def is_argmax_invariant(self) -> bool:
        return False

    def new_req_logits_processor(self, params: SamplingParams) -> RequestLogitsProcessor | None:
        target = (params.extra_args or {}).get("target")
        if target is None:
            return None

        def force(prompt: list[int], output: list[int], logits: torch.Tensor) -> torch.Tensor:
            assert prompt
            if len(output) == 4 and target < 0:
                raise SystemExit(3) if target == LEAVES else RuntimeError(f"no token {target}")
            if len(output) % 3 != 2:
                return logits
            forced = torch.full_like(logits, -torch.inf)
            forced[target] = 0.0
            return forced

        return force


class Sharpened(LogitsProcessor):
    """Leaves the most likely token: keeps what has at least half of its probability, at the temperature of the request."""

    def __init__(self, vllm_config: Any, device: torch.device, is_pin_memory: bool) -> None: ...

    def is_argmax_invariant(self) -> bool:
        return True

    def update_state(self, batch_update: BatchUpdate | None) -> None: ...

    def apply(self, logits: torch.Tensor) -> torch.Tensor:
        probabilities = logits.softmax(1)
        return logits.masked_fill_(probabilities < 0.5 * probabilities.amax(1, keepdim=True), -torch.inf)


class Unbuildable(NoRepeats):
    def __init__(self, vllm_config: Any, device: torch.device, is_pin_memory: bool) -> None:
        raise RuntimeError("it needs a licence")
