"""`PooledStates`: from the final states of prompts, which come in chunks, to one vector per prompt, or per token.

The last state of a prompt is what a step gives for its result rows anyway. For the mean of all states, and for the first one,
something is kept by slot from chunk to chunk. It begins with a prompt's first token, since such a prompt never reads the prefix
cache. It is dropped when its vector is made or its slot is freed. Sums are float32, in the order of the tokens, and depend on
nothing else in the batch. All states are kept only of prompts that come whole. Called by the runner, under inference mode.
"""

from __future__ import annotations

from collections.abc import Callable

import numpy as np
import torch
from numpy.typing import NDArray

from actorllm.messages import I32, POOLING_CODES
from actorllm.model.inputs import StepInputs

I64 = NDArray[np.int64]

LAST, MEAN, CLS, ALL = (POOLING_CODES[kind] for kind in ("last", "mean", "cls", "all"))


class PooledStates:
    def __init__(self) -> None:
        self._kept: dict[int, torch.Tensor] = {}
        """By slot, float32 [hidden_size]: the sum of all states so far, or the first one; or all, [num_tokens, hidden_size]."""

    def __len__(self) -> int:
        return len(self._kept)

    def clear(self) -> None:
        self._kept.clear()

    def drop(self, slots: I32) -> None:
        """These were freed."""
        if self._kept:
            for slot in slots.tolist():
                self._kept.pop(slot, None)

    def observe(self, inputs: StepInputs, pooling: NDArray[np.uint8], final: Callable[[I64], torch.Tensor]) -> None:
        """Take in a step's chunks. pooling: the codes of the prefill rows; final: the final states of tokens of the step.

        Raises ValueError for a chunk whose beginning was never here.
        """
        for row in np.flatnonzero(pooling == CLS).tolist():
            if not inputs.prefill_first[row]:
                first = np.array([inputs.prefill_starts[row]], np.int64)
                self._kept[inputs.prefill_slots[row]] = final(first)[0].float()
        for row in np.flatnonzero(pooling == ALL).tolist():
            if inputs.prefill_first[row]:
                raise ValueError(
                    f"slot {inputs.prefill_slots[row]} is to give a vector of each token, and is not whole"
                )
            start = inputs.prefill_starts[row]
            where = np.arange(start, start + inputs.prefill_counts[row])
            self._kept[inputs.prefill_slots[row]] = final(where).float()
        rows = np.flatnonzero(pooling == MEAN).tolist()
        if not rows:
            return
        counts = np.array([inputs.prefill_counts[row] for row in rows], np.int64)
        starts = [inputs.prefill_starts[row] for row in rows]
        where = np.concatenate([np.arange(start, start + count) for start, count in zip(starts, counts, strict=True)])
        states = final(where).float()
        bags = torch.from_numpy(np.cumsum(counts) - counts).to(states.device)
        # one sum of consecutive rows per prompt, token after token
        order = torch.arange(len(where), device=states.device)
        sums: torch.Tensor = torch.embedding_bag(states, order, bags, False, 0)[0]
        for row, total in zip(rows, sums, strict=True):
            slot = inputs.prefill_slots[row]
            if not inputs.prefill_first[row]:
                self._kept[slot] = total.clone()
            elif slot in self._kept:
                self._kept[slot] += total
            else:
                raise ValueError(
                    f"slot {slot} is to be pooled over all of its tokens, and its first ones are not known"
                )

    def take(self, slots: I32, pooling: NDArray[np.uint8], num_tokens: I32, last: torch.Tensor) -> torch.Tensor:
        """The vectors of slots whose prompts are through, [num_vectors, hidden_size]: one each, or one per token.

        pooling, num_tokens: codes and lengths by slot. last: their last final states, float32 [num_slots, hidden_size], which
        is what is returned, with other rows in place of those that are pooled otherwise.
        """
        parts: list[torch.Tensor] = []
        for i, (slot, code) in enumerate(zip(slots.tolist(), pooling.tolist(), strict=True)):
            if code != LAST:
                kept = self._kept.pop(slot)
                if code == ALL:
                    parts.append(kept)
                    continue
                last[i] = kept / int(num_tokens[i]) if code == MEAN else kept
            parts.append(last[i : i + 1])
        return torch.cat(parts) if (pooling == ALL).any() else last
