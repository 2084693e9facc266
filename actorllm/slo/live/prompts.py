"""Token ids for the requests of a workload, which knows only how long prompts are and which of them begin alike.

Prompts with the same first k prefix ids begin with the same k blocks of tokens; everything else is random. Request i has the
same ids in every run with the same seed, so that two policies are given the same work. Pure.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

import numpy as np

from actorllm.messages import I32
from actorllm.slo.workload import Prefixes, Workload, seed_stream

NUM_KEPT = 4096
"""Blocks of shared prefixes that are kept; the others are made again."""


class Prompts:
    """Ids from first_id (the ones below are often special) to vocab_size - 1."""

    def __init__(self, workload: Workload, vocab_size: int, seed: int = 0) -> None:
        self._workload = workload
        self._low = min(100, vocab_size // 2)
        self._high = vocab_size
        self._seeds = seed_stream(seed, "prompts").integers(0, 2**63, 2).tolist()
        self._blocks: dict[int, I32] = {}

    def _draw(self, kind: int, number: int, size: int) -> I32:
        rng = np.random.Generator(np.random.Philox(key=[self._seeds[kind], number]))
        ids: I32 = rng.integers(self._low, self._high, size, dtype=np.int32)
        return ids

    def _block(self, number: int, size: int) -> I32:
        found = self._blocks.get(number)
        if found is None:
            if len(self._blocks) >= NUM_KEPT:
                del self._blocks[next(iter(self._blocks))]
            found = self._blocks[number] = self._draw(0, number, size)
        return found

    def ids(self, request: int, history: Sequence[int] = ()) -> I32:
        """[num_prompt] of this request. history: what it begins with, as far as there is room; empty: nothing was said before."""
        size = int(self._workload.num_prompt[request])
        if len(history):
            said = np.array(history[:size], np.int32)
            return np.concatenate((said, self._draw(1, request, size - said.size)))
        prefixes = self._workload.prefixes
        if prefixes is None:
            return self._draw(1, request, size)
        numbers = prefixes.of(request)[: -(-size // prefixes.block_tokens)].tolist()
        parts = [self._block(number, prefixes.block_tokens) for number in numbers]
        shared = np.concatenate(parts)[:size] if parts else np.zeros(0, np.int32)
        if shared.size < size:
            shared = np.concatenate((shared, self._draw(1, request, size - shared.size)))
        ids: I32 = shared
        return ids


def with_lengths_scaled(workload: Workload, factor: float) -> Workload:
    """Prompts, outputs and blocks of prefixes so many times as long, and at least a token: for a model that is small."""

    def scaled(values: I32) -> I32:
        tokens: I32 = np.maximum(np.rint(values * factor), 1).astype(np.int32)
        return tokens

    prefixes = workload.prefixes
    if prefixes is not None:
        prefixes = Prefixes(prefixes.ids, prefixes.starts, max(1, round(prefixes.block_tokens * factor)))
    return replace(
        workload, num_prompt=scaled(workload.num_prompt), num_output=scaled(workload.num_output), prefixes=prefixes
    )
