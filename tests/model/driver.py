"""A hand-driven runner: makes the step plans that a scheduler would send, over random block tables."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import torch

from actorllm.messages import LateInputs, NewRow, StepPlan, StepResult, pack_rows
from actorllm.model.cpu.runner import CpuRunner

TINY_LLAMA = {
    "architectures": ["LlamaForCausalLM"],
    "vocab_size": 97,
    "hidden_size": 48,
    "intermediate_size": 80,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 16,
    "max_position_embeddings": 128,
    "rms_norm_eps": 1e-5,
    "hidden_act": "silu",
    "tie_word_embeddings": False,
    "dtype": "float32",
}


def int32(values: Sequence[int]) -> np.ndarray[Any, np.dtype[np.int32]]:
    return np.array(values, np.int32)


@dataclass
class Request:
    """What the driver knows of a slot."""

    tokens: list[int]
    num_computed: int
    blocks: list[int]


@dataclass
class Driver:
    """Keeps the block tables and turns wishes into plans."""

    runner: CpuRunner
    num_blocks: int = 64
    seed: int = 0
    requests: dict[int, Request] = field(default_factory=dict)
    num_steps: int = 0

    def __post_init__(self) -> None:
        self.free = list(range(self.num_blocks))
        np.random.default_rng(self.seed).shuffle(self.free)
        self.block_size = self.runner.config.cache.block_size
        self.pending: dict[str, Any] = {}
        self.logits: torch.Tensor | None = None
        self.rows: list[int] = []

    def add(self, slot: int, tokens: Sequence[int], *, num_outputs: int = 0, **parameters: Any) -> None:
        """A new request, part of the next step. parameters: columns of the plan without their `new_`."""
        blocks = [self.free.pop() for _ in range(-(-len(tokens) // self.block_size))]
        self.requests[slot] = Request(list(tokens), 0, blocks)
        columns = self.pending.setdefault("new", [])
        stop_ids = parameters.pop("stop_ids", [])
        columns.append((slot, tokens, num_outputs, blocks, stop_ids, parameters))

    def fork(self, slot: int, source: int, **parameters: Any) -> tuple[int, int] | None:
        """A new request with the prompt of another one, which ends in the next step. Returns the copy that comes after it."""
        other = self.requests[source]
        self.add(slot, other.tokens, source=source, **parameters)
        num_full = len(other.tokens) // self.block_size
        blocks = self.requests[slot].blocks
        self.free[:0] = blocks[:num_full]
        blocks[:num_full] = other.blocks[:num_full]
        return (other.blocks[num_full], blocks[num_full]) if len(other.tokens) % self.block_size else None

    def remove(self, *slots: int) -> None:
        for slot in slots:
            self.free[:0] = self.requests.pop(slot).blocks
        self.pending.setdefault("freed", []).extend(slots)

    def step(
        self,
        prefill: Mapping[int, int] | None = None,
        decode: Sequence[int] | None = None,
        late: Callable[[int], LateInputs] | None = None,
        **more: Any,
    ) -> StepResult:
        """One step: `prefill` tokens per slot, `decode` rows (None: unchanged). Leaves the logits in `self.logits`."""
        plan = self.plan(prefill or {}, decode, **more)
        handle = self.runner.execute(plan)
        if handle.logits is not None:
            self.logits = handle.logits.clone()
        result = self.runner.sample(handle, late(plan.step) if late is not None else None)
        self.runner.batch.check_integrity()
        counts = result.counts if result.counts.size else np.ones(len(result.tokens), np.int32)
        tokens = iter(result.tokens.tolist())
        assert len(counts) == len(self.rows)
        for slot, count in zip(self.rows, counts.tolist(), strict=True):
            self.requests[slot].tokens += [next(tokens) for _ in range(count)]
            self.requests[slot].num_computed += max(0, count - 1)  # drafts that were right
        return result

    def plan(self, prefill: Mapping[int, int], decode: Sequence[int] | None, **more: Any) -> StepPlan:
        new = self.pending.get("new", [])
        columns: dict[str, Any] = {"freed": int32(self.pending.get("freed", []))}
        self.pending = {}
        if new:
            columns |= {
                "new_rows": pack_rows(
                    NewRow(slot, len(tokens), num_outputs=num_outputs, num_stop_ids=len(stop_ids), **fields)
                    for slot, tokens, num_outputs, _, stop_ids, fields in new
                ),
                "new_tokens": int32([t for n in new for t in n[1]]),
                "new_num_blocks": int32([len(n[3]) for n in new]),
                "new_blocks": int32([b for n in new for b in n[3]]),
                "new_stop_ids": int32([i for n in new for i in n[4]]),
            }
            for n in new:
                self.requests[n[0]].num_computed = n[5].get("num_computed", 0)
        if decode is not None:
            self.decode = list(decode)
            columns["decode_slots"] = int32(decode)
        extended: list[tuple[int, int]] = []
        self.rows = list(getattr(self, "decode", []))
        for slot in self.rows:
            request = self.requests[slot]
            while request.num_computed + more.get("max_drafts", 0) >= len(request.blocks) * self.block_size:
                request.blocks.append(self.free.pop())
                extended.append((slot, request.blocks[-1]))
            request.num_computed += 1
        for slot, count in prefill.items():
            request = self.requests[slot]
            request.num_computed += count
            if request.num_computed == len(request.tokens):
                self.rows.append(slot)
        for slot, tokens, _, _, _, fields in new:
            if "source" in fields:
                self.requests[slot].num_computed = len(tokens)
                self.rows.append(slot)
        self.num_steps += 1
        return StepPlan(
            step=self.num_steps,
            extended_slots=int32([e[0] for e in extended]),
            extended_blocks=int32([e[1] for e in extended]),
            prefill_slots=int32(list(prefill)),
            prefill_counts=int32(list(prefill.values())),
            **columns,
            **more,
        )
