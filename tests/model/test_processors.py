"""What logits processors are told of a batch that changes."""

from __future__ import annotations

import random
from typing import Any

import numpy as np
import pytest
import torch

from actorllm import SamplingParams
from actorllm.config import EngineConfig
from actorllm.messages import NewRow, StepPlan, pack_rows
from actorllm.model.processors import Processors
from actorllm.types.logits_processors import BatchUpdate, LogitsProcessor, MoveDirectionality
from actorllm.types.logits_processors.travel import encode_params, encode_rows


class Mirror(LogitsProcessor):
    """Keeps the batch as it is told of it, and adds to each row what its parameters say."""

    last: Mirror

    def __init__(self, vllm_config: Any, device: torch.device, is_pin_memory: bool) -> None:
        self.rows: dict[int, tuple[int, list[int]]] = {}
        Mirror.last = self

    def is_argmax_invariant(self) -> bool:
        return False

    def update_state(self, batch_update: BatchUpdate | None) -> None:
        if batch_update is None:
            return
        for index in batch_update.removed:
            del self.rows[index]
        for index, params, _, output in batch_update.added:
            assert params.extra_args is not None
            self.rows[index] = (params.extra_args["number"], output)
        for source, target, direction in batch_update.moved:
            assert direction is MoveDirectionality.UNIDIRECTIONAL
            self.rows[target] = self.rows.pop(source)
        assert sorted(self.rows) == list(range(batch_update.batch_size))

    def apply(self, logits: torch.Tensor) -> torch.Tensor:
        assert len(logits) == len(self.rows)
        for index, (number, output) in self.rows.items():
            logits[index] += 1000 * number + len(output)
        return logits


def plan_of(freed: list[int], new: dict[int, int]) -> StepPlan:
    """new: the number of each slot."""
    texts = {s: encode_params(SamplingParams(extra_args={"number": number})) for s, number in new.items()}
    return StepPlan(
        step=0,
        freed=np.array(freed, np.int32),
        new_rows=pack_rows(NewRow(slot, 3, num_outputs=1) for slot in new),
        new_processed=encode_rows(texts.items()) if new else np.zeros(0, np.uint8),
    )


@pytest.mark.parametrize("seed", range(5))
def test_a_batch_is_told_as_it_changes(seed: int) -> None:
    """Requests come, leave, change hands, and miss steps, in any order: each row gets what is its own."""
    draw = random.Random(seed)
    path = f"{__name__}:Mirror"
    config = EngineConfig.from_arguments("storyteller", logits_processors=[path], device="cpu")
    processors = Processors(config, torch.float32, torch.device("cpu"))
    mirror, held = Mirror.last, {}
    lengths: dict[int, int] = {}
    for number in range(60):
        freed = [slot for slot in held if draw.random() < 0.25]
        for slot in freed:
            del held[slot]
        free = [slot for slot in range(8) if slot not in held]
        new = {slot: 100 * number + slot for slot in draw.sample(free, draw.randrange(min(3, len(free)) + 1))}
        known = {slot: np.array([5, 6, 7], np.int32) for slot in new}
        processors.apply_plan(plan_of(freed, new), known)
        held |= new
        lengths |= dict.fromkeys(new, 1)
        slots = np.array(
            draw.sample([*held], len(held) if draw.random() < 0.7 else draw.randrange(len(held) + 1)), np.int32
        )
        logits = torch.zeros(len(slots) + 1, 4)  # the last row is of a request without parameters
        assert processors.apply(logits, np.append(slots, 9).astype(np.int32), np.ones(len(slots) + 1, np.float32)) == {}
        expected = [1000 * held[slot] + lengths[slot] for slot in slots.tolist()]
        assert logits[:, 0].tolist() == [*expected, 0]
        processors.store(slots, slots)
        for slot in slots.tolist():
            lengths[slot] += 1
    assert Mirror.last is mirror, "nothing has failed"
