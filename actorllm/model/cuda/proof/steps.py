"""Steps of made-up requests, with every kind of launch that a runner makes."""

from __future__ import annotations

from dataclasses import replace
from typing import Protocol

import numpy as np
import torch
from numpy.typing import NDArray

from actorllm.config import EngineConfig
from actorllm.messages import POOLING_CODES, NewRow, StepPlan, StepResult, pack_rows
from actorllm.messages.logit_rules import SamplingRules, encode_rules
from actorllm.model.cuda import ops
from actorllm.model.cuda.device import Device
from actorllm.model.cuda.graphs import DecodeGraphs, GraphPart
from actorllm.model.cuda.sampling import MAX_HEAD_ROWS
from actorllm.model.registry import Plan


class StepMaker(Protocol):
    """A runner, as it is seen here."""

    config: EngineConfig
    model_config: Plan
    device: Device
    graphs: DecodeGraphs

    @property
    def pool(self) -> torch.Tensor: ...
    def step(self, plan: StepPlan) -> StepResult: ...
    def launch_decode(self, part: GraphPart | None, size: int, slots: NDArray[np.int32]) -> None: ...
    def warm_prefill(self) -> None: ...


NUM_BLOCKS = 16
"""Of the cache that they need."""
FILTERS: tuple[dict[str, float], ...] = ({}, {"temperature": 0.8}, {"top_k": 20, "top_p": 0.9}, {"min_p": 0.05})
LENGTHS = (70, 3, 17, 9)
"""Of prompts: the first goes on in a second block."""
MAX_SAMPLED = 16
NUM_LAUNCHES = 40
"""More tokens than all steps here compute for a row."""


def make_steps(runner: StepMaker) -> None:
    """On a runner with a cache of NUM_BLOCKS, and without requests; what it has computed then is of no worth."""
    config = runner.config
    size, longest = config.cache.block_size, config.model.max_model_len
    pools = config.model.pooler is not None
    num_rows = min(len(LENGTHS), config.scheduler.max_num_seqs)
    room = max(1, longest - NUM_LAUNCHES)
    counts = np.minimum(LENGTHS[:num_rows], room).astype(np.int32)
    per_row = -(-np.minimum(counts + NUM_LAUNCHES, longest) // size).astype(np.int32)
    while per_row.sum() > NUM_BLOCKS:  # of a cache with small blocks
        counts, per_row = np.maximum(1, counts // 2), np.maximum(1, per_row // 2)
    slots = np.arange(num_rows, dtype=np.int32)
    # The end of the first prompt is computed beside the other rows: there, decode rows have builds of their own.
    ends = 0 if pools or num_rows == 1 else int(counts[0]) // 2
    first = counts.copy()
    first[0] -= ends
    tokens = np.random.default_rng(0).integers(0, runner.model_config.vocab_size, counts.sum()).astype(np.int32)
    pooling = POOLING_CODES["mean"] if pools else 0
    adapter = 0 if config.lora is None else 1  # in some rows
    plan = StepPlan(
        step=0,
        new_rows=pack_rows(
            NewRow(slot, count, seed=slot, pooling=pooling, adapter_id=adapter * (slot % 2 == 0), **FILTERS[slot])  # type: ignore[arg-type]
            for slot, count in enumerate(counts.tolist())
        ),
        new_tokens=tokens,
        new_num_blocks=per_row,
        new_blocks=np.arange(per_row.sum(), dtype=np.int32),
        prefill_slots=slots,
        prefill_counts=first,
    )
    if not pools:
        rules, numbers = encode_rules([(0, int(counts[0]) + 1, SamplingRules(repetition_penalty=1.1, num_logprobs=2))])
        plan = replace(plan, new_rules=rules, new_rule_numbers=numbers)
    runner.step(plan)
    if not pools:
        if ends:
            runner.step(
                StepPlan(
                    step=1, prefill_slots=slots[:1], prefill_counts=np.array([ends], np.int32), decode_slots=slots[1:]
                )
            )
        runner.step(StepPlan(step=2, decode_slots=slots))
        _launch_kinds(runner, slots)
    with runner.device.active():
        runner.warm_prefill()
        ops.kv_copy(runner.pool, runner.device.upload(np.array([[0, 1]], np.int32)))


def _launch_kinds(runner: StepMaker, slots: NDArray[np.int32]) -> None:
    """Decode steps of every size that is compiled for itself."""
    with runner.device.active():
        for size in runner.graphs.kinds:
            # The choice of many rows takes torch long, and is made by the same builds.
            part = None if size <= MAX_SAMPLED or size == MAX_HEAD_ROWS else GraphPart.FORWARD
            runner.launch_decode(part, size, slots[:size])
            if runner.config.lora is not None:
                runner.launch_decode(GraphPart.ADAPTED_FORWARD, size, slots[:size])
        for part in (GraphPart.LOGITS, GraphPart.FORWARD, GraphPart.CHOICE):
            size = runner.graphs.sizes[0]
            runner.launch_decode(part, size, slots[:size])
