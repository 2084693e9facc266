"""`RecurrentCache`: states of slots, and snapshots of them, beside the keys and values of the layers that attend, if some do."""

from __future__ import annotations

from collections.abc import Iterable, Sequence

import numpy as np
from numpy.typing import NDArray

from actorllm.errors import UnsupportedModelError
from actorllm.model.cpu.attention import I32, I64, AttentionBatch, KVCache, PagedCache
from actorllm.model.cpu.recurrent.states import SlotStates
from actorllm.model.inputs import StepInputs


class RecurrentCache(PagedCache):
    """See the module docstring."""

    def __init__(self, kv: KVCache | None, states: SlotStates, num_blocks: int, block_size: int) -> None:
        """kv: None: no layer attends, and blocks are counted and hold nothing."""
        self.kv, self.states = kv, states
        self.num_blocks, self.block_size, self.padding_block = num_blocks, block_size, num_blocks + 1
        self.dtype = states.dtype
        self.num_kv_heads, self.head_dim = (0, 0) if kv is None else (kv.num_kv_heads, kv.head_dim)

    def release(self) -> None:
        if self.kv is not None:
            self.kv.release()
        self.states.release()

    def block_views(self, block: int) -> list[memoryview]:
        raise UnsupportedModelError("states of recurrent layers are kept by no KV tier yet")

    def block_regions(self) -> list[NDArray[np.uint8]]:
        raise UnsupportedModelError("states of recurrent layers are not handed from one replica to another yet")

    def zero(self, block_ids: I32, slots: I32 | None = None) -> None:
        """States are not cleared: a sequence that begins reads none."""
        if self.kv is not None:
            self.kv.zero(block_ids)

    def clear(self, inputs: StepInputs, tokens: I64) -> None:
        raise UnsupportedModelError("drafts of recurrent layers cannot be taken back yet")

    def copy(self, sources: I32, targets: I32) -> None:
        if self.kv is not None:
            self.kv.copy(sources, targets)

    def fork(self, pairs: Sequence[tuple[int, int]]) -> None:
        both = np.array(pairs, np.int64)
        self.states.copy(both[:, 1], both[:, 0])

    def keep_decoded(self, inputs: StepInputs) -> None:
        """Keep the states behind decoded tokens. Those of prompts are kept where they are worked off (`Piece.store`)."""
        decoded = set(inputs.decode_slots.tolist())
        rows = [(save.slot, self.states.num_slots + save.place) for save in inputs.saves if save.slot in decoded]
        if rows:
            both = np.array(rows, np.int64)
            self.states.copy(both[:, 0], both[:, 1])

    def restore(self, states: Sequence[Sequence[int]]) -> None:
        """Slots begin with what was kept in places. states: a slot and a place, each."""
        if states:
            both = np.array(states, np.int64)
            self.states.copy(self.states.num_slots + both[:, 1], both[:, 0])

    def attention(
        self, inputs: StepInputs, queries_per_kv: int, windows: Iterable[int | None]
    ) -> dict[int | None, AttentionBatch]:
        return {} if self.kv is None else self.kv.attention(inputs, queries_per_kv, windows)
