"""A state table with random sampling parameters, and the CPU sampler's word on the same rows."""

from __future__ import annotations

import numpy as np
import torch
from numpy.typing import NDArray

from actorllm.model.sampler import Sampler, SamplingColumns
from actorllm_kernels.sample_pick import SamplingState

MARGIN = 1e-4


def make_state(num_slots: int, greedy: tuple[int, ...] = (), seed: int = 0) -> SamplingState:
    rng = np.random.default_rng(seed)
    temperature = rng.uniform(0.3, 1.5, num_slots).astype(np.float32)
    temperature[list(greedy)] = 0
    seeds = rng.integers(0, 2**64, num_slots, dtype=np.uint64)
    return SamplingState(
        torch.from_numpy(temperature),
        torch.from_numpy(seeds.view(np.int64)),
        torch.from_numpy(rng.integers(0, 3, num_slots).astype(np.int32)),
        torch.from_numpy(rng.integers(0, 1000, num_slots).astype(np.int32)),
        torch.zeros(num_slots, dtype=torch.int32),
    )


def on_the_cpu(
    logits: torch.Tensor,
    state: SamplingState,
    rows: torch.Tensor,
    top_k: NDArray[np.int32] | None = None,
    top_p: NDArray[np.float32] | None = None,
    min_p: NDArray[np.float32] | None = None,
) -> tuple[NDArray[np.int32], NDArray[np.bool_]]:
    """Tokens, and whether the margin of the choice is large enough for them to be the only right ones."""
    at, count = rows.long(), len(rows)
    columns = SamplingColumns(
        temperature=state.temperature[at].numpy(),
        top_k=np.zeros(count, np.int32) if top_k is None else top_k,
        top_p=np.ones(count, np.float32) if top_p is None else top_p,
        min_p=np.zeros(count, np.float32) if min_p is None else min_p,
        seeds=state.seed[at].numpy().view(np.uint64),
        sample_index=state.sample_index[at].numpy(),
        token_index=state.token_index[at].numpy(),
    )
    tokens, margins = Sampler(logits.shape[1]).sample_with_margin(logits.float(), columns)
    return tokens, margins > MARGIN
