"""Whether the bits of a row depend on anything but its request here: found out by steps, before `batch_invariant=True` is promised.

One request is computed alone and in one piece. It is computed again beside others, in chunks, with each number of threads, and as a
request that comes back with its output. All logits must have the same bits. Functions that treat the last numbers of an array in
another way than the rest are tried on every number of bfloat16.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
import torch

from actorllm.errors import UnsupportedModelError
from actorllm.messages import NewRow, StepPlan, pack_rows
from actorllm.model.runner import ModelRunner

PROMPTS = (77, 3, 40, 1, 18)
"""Tokens of the prompts: that of the request that is looked at, and those beside it."""

NUM_OUTPUTS = 4

NUM_STEPS_APART = (0, 1, 2, 3, 4)
"""In which step the prompt of each begins, where there are several."""

CHUNK = 50


class _Runs:
    """Steps of some requests in a cache of their own."""

    def __init__(
        self, runner: ModelRunner[Any, Any], prompts: tuple[int, ...], chunk: int, known: tuple[int, ...] = ()
    ) -> None:
        """known: output of the first request that it comes back with."""
        self.runner, self.chunk = runner, chunk
        size = runner.config.cache.block_size
        per_row = -(-(max(prompts) + 2 * NUM_OUTPUTS + 4) // size)
        runner.allocate(per_row * len(prompts))
        self.known = known
        random, vocabulary = np.random.default_rng(1), runner.model_config.vocab_size
        self.prompts = [random.integers(0, vocabulary, count).astype(np.int32) for count in prompts]
        self.blocks = [np.arange(per_row, dtype=np.int32) + per_row * row for row in range(len(prompts))]
        self.tokens: list[int] = list(known)
        self.logits: list[torch.Tensor] = []

    def run(self) -> None:
        done = [0] * len(self.prompts)
        inputs = [np.concatenate((prompt, np.array(self.known if row == 0 else (), np.int32))).astype(np.int32)
                  for row, prompt in enumerate(self.prompts)]  # fmt: skip
        step = 0
        while len(self.tokens) < NUM_OUTPUTS + len(self.known):
            new = [row for row in range(len(inputs)) if NUM_STEPS_APART[row] == step]
            prefills = {
                row: min(self.chunk, inputs[row].size - done[row])
                for row in range(len(inputs))
                if NUM_STEPS_APART[row] <= step and done[row] < inputs[row].size
            }
            decodes = [row for row in range(len(inputs)) if NUM_STEPS_APART[row] <= step and row not in prefills]
            plan = StepPlan(
                step=step,
                new_rows=pack_rows(
                    NewRow(row, inputs[row].size, num_outputs=inputs[row].size - self.prompts[row].size) for row in new
                ),
                new_tokens=np.concatenate([inputs[row] for row in new]) if new else np.zeros(0, np.int32),
                new_num_blocks=np.array([self.blocks[row].size for row in new], np.int32),
                new_blocks=np.concatenate([self.blocks[row] for row in new]) if new else np.zeros(0, np.int32),
                decode_slots=np.array(decodes, np.int32),
                prefill_slots=np.array(list(prefills), np.int32),
                prefill_counts=np.array(list(prefills.values()), np.int32),
            )
            handle = self.runner.execute(plan)
            for row, count in prefills.items():
                done[row] += count
            rows = handle.inputs.result_slots.tolist()
            if 0 in rows:
                assert handle.logits is not None
                self.logits.append(handle.logits[rows.index(0)].clone())
            result = self.runner.sample(handle)
            if 0 in rows:
                self.tokens.append(int(result.tokens[rows.index(0)]))
            step += 1


@torch.inference_mode()
def check(
    runner: ModelRunner[Any, Any],
    sizes: Sequence[int],
    use: Callable[[int], None],
    activation: Callable[[torch.Tensor], torch.Tensor],
) -> None:
    """Computes steps in caches that the runner is left with the last one of.

    Arguments:
        runner: has its weights.
        sizes: the numbers of threads that it may compute with.
        use: lets it compute with so many from now on.
        activation: of its model.

    Raises UnsupportedModelError, saying what a row depends on.
    """

    def compute(size: int, prompts: tuple[int, ...], chunk: int, known: tuple[int, ...] = ()) -> _Runs:
        use(size)
        runs = _Runs(runner, prompts, chunk, known)
        runs.run()
        return runs

    alone = compute(sizes[0], PROMPTS[:1], max(PROMPTS))
    for size in sizes:
        threads = f"with {size} thread{'s' if size > 1 else ''}"
        _compare(alone, compute(size, PROMPTS[:1], CHUNK), f"its chunks {threads}")
        _compare(alone, compute(size, PROMPTS, CHUNK), f"its batch {threads}")
        again = compute(size, PROMPTS, max(PROMPTS) + NUM_OUTPUTS, tuple(alone.tokens[:-1]))
        if not torch.equal(alone.logits[-1], again.logits[0]):
            raise _refusal(f"whether it was preempted ({threads})")
    if runner.dtype == torch.bfloat16 and not _is_even(activation):
        raise _refusal("where its numbers lie, in the activation function")


def _compare(alone: _Runs, other: _Runs, what: str) -> None:
    if not all(map(torch.equal, alone.logits, other.logits)):
        raise _refusal(what)


def _refusal(what: str) -> UnsupportedModelError:
    return UnsupportedModelError(
        f"batch_invariant=True does not hold here: the bits of a row depend on {what}; leave it out, or try another dtype"
    )


def _is_even(function: Callable[[torch.Tensor], torch.Tensor]) -> bool:
    """Whether each number of bfloat16 has the same result alone and among many."""
    numbers = torch.arange(-(1 << 15), 1 << 15, dtype=torch.int32).to(torch.int16).view(torch.bfloat16)
    numbers = numbers[numbers.isfinite()]
    together = function(numbers)
    # In rows of 3 of a wider array, each is computed like the end of an array.
    wide = torch.zeros(len(numbers) // 3, 8, dtype=torch.bfloat16)
    wide[:, :3] = numbers[: len(wide) * 3].view(-1, 3)
    apart = function(wide[:, :3]).reshape(-1)
    return torch.equal(together[: len(apart)].view(torch.int16), apart.view(torch.int16))
