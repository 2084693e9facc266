"""Steps with prompts that can be graphs: everything a step of few tokens depends on, in memory that stays where it is.

A step is filled up to the next of SIZES tokens. Its decode rows come first, then its chunks, then padding, which writes no keys.
Decode attention is launched for as many rows as there may be. Prefill attention is launched for as many pieces as chunks may be
cut into. Rows of no slot have no keys, and pieces of no chunk no queries. So the grids are fixed, and lengths are read from the
device. One upload says everything: a packet of integers, which is copied to the place that the graph reads.

Where rows may have adapters, a step in which none has one is another graph than one in which some has.

A graph holds the forward, up to the hidden states and the clearing of what is not finite. What is sampled from them differs from
step to step, and is launched behind it. A step that does not fit is launched kernel by kernel, without padding.

Owned by the runner.
"""

from __future__ import annotations

import copy
from bisect import bisect_left
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray

from actorllm.messages import I32
from actorllm.model.cuda import ops
from actorllm.model.cuda.cache import DeviceCache
from actorllm.model.cuda.decoder import DeviceDecoder, DeviceDecodeRows, PagedAttention, PrefillRows, StepTokens
from actorllm.model.cuda.device import ALIGNMENT, Device
from actorllm.model.cuda.state import StateTable
from actorllm.model.inputs import StepInputs
from actorllm_kernels.attn_prefill import query_tiles

SIZES = (32, 64, 128, 192, 256, 384, 512)
"""Tokens of a step with prompts. Above, the kernels take longer than their launches."""

MAX_CHUNKS = 16
"""Prompts of a step that is a graph."""


@dataclass(slots=True)
class MixedStep:
    """The memory of steps of one size."""

    tokens: StepTokens
    packet: torch.Tensor
    """int32: all that the host tells, in the order of `_lengths`."""
    max_tiles: int
    is_finite: torch.Tensor
    """int32 [size]: of every token's hidden state, once the step has run."""
    states: torch.Tensor
    """The hidden states, [size, hidden_size]."""


class MixedSteps:
    """See the module docstring."""

    def __init__(
        self,
        model: DeviceDecoder,
        rows: DeviceDecodeRows,
        attention: PagedAttention,
        cache: DeviceCache,
        state: StateTable,
        device: Device,
        max_tokens: int,
    ) -> None:
        """rows: those of decode steps, whose plans and counters are used here too. max_tokens: of any step."""
        self.sizes = tuple(size for size in SIZES if size < max_tokens) + (
            (max_tokens,) if max_tokens <= SIZES[-1] else ()
        )
        self._model, self._rows, self._attention = model, rows, attention
        self._cache, self._state, self._device = cache, state, device
        self._steps: dict[int, MixedStep] = {}

    def size_for(self, inputs: StepInputs) -> int | None:
        """How many tokens a step of these is launched with; None: kernel by kernel, as it is."""
        count, chunks = len(inputs.token_ids), inputs.prefill_counts
        at = bisect_left(self.sizes, count)
        if at == len(self.sizes) or len(chunks) > MAX_CHUNKS or inputs.embedded is not None or not inputs.prefill_slots:
            return None
        return self.sizes[at] if inputs.num_decodes <= self._rows.num_rows else None

    def step(self, size: int) -> MixedStep:
        """Of so many tokens; all sizes share the memory of what flows through the layers."""
        step = self._steps.get(size)
        if step is None:
            step = self._steps[size] = self._made(size)
            self._put(step, self._packet(step, size))
        return step

    def _made(self, size: int) -> MixedStep:
        on, num_rows = self._device.torch_device, min(size, self._rows.num_rows)
        max_tiles = size // self._attention.tokens_per_tile + MAX_CHUNKS
        lengths = _lengths(size, num_rows, max_tiles)
        packet = torch.zeros(sum(map(_padded, lengths.values())), dtype=torch.int32, device=on)
        parts: dict[str, torch.Tensor] = {}
        start = 0
        for name, length in lengths.items():
            parts[name] = packet[start : start + length]
            start += _padded(length)
        kv_slots = parts["kv_slots"].view(torch.int64)
        rows = copy.copy(self._rows.first(num_rows))
        rows.rows = parts["rows"]
        rows.ids, rows.positions, rows.kv_slots = (
            parts["ids"][:num_rows],
            parts["positions"][:num_rows],
            kv_slots[:num_rows],
        )
        chunks = PrefillRows(
            parts["slots"], parts["seq_lens"], parts["starts"], parts["tiles"].view(-1, 2), counts_all=True
        )
        tokens = StepTokens(parts["ids"], parts["positions"], kv_slots, rows, chunks, token_rows=parts["token_rows"])
        is_finite = torch.zeros(size, dtype=torch.int32, device=on)
        return MixedStep(tokens, packet, max_tiles, is_finite, self._model.states(size))

    def load(self, size: int, inputs: StepInputs) -> MixedStep:
        """Put a step in place."""
        step = self.step(size)
        self._put(step, self._packet(step, size, inputs))
        return step

    def clear(self, size: int) -> None:
        """Put a step without requests in place."""
        step = self.step(size)
        self._put(step, self._packet(step, size))

    def _put(self, step: MixedStep, parts: list[NDArray[np.int32]]) -> None:
        packet = np.zeros(len(step.packet), np.int32)
        start = 0
        for part in parts:
            packet[start : start + part.size] = part
            start += _padded(part.size)
        step.packet.copy_(self._device.upload(packet))

    def _packet(self, step: MixedStep, size: int, inputs: StepInputs | None = None) -> list[NDArray[np.int32]]:
        """The parts in the order of `_lengths`."""
        assert step.tokens.decodes is not None
        num_rows = step.tokens.decodes.num_rows
        kv_slots, ids, positions = np.full(size, -1, np.int64), np.zeros(size, np.int32), np.zeros(size, np.int32)
        token_rows = np.full(size, -1, np.int32)
        rows: I32 = np.full(num_rows, -1, np.int32)
        slots, seq_lens = (np.zeros(MAX_CHUNKS + 1, np.int32) for _ in range(2))
        starts = np.zeros(MAX_CHUNKS + 2, np.int32)
        tiles = np.tile(np.array([MAX_CHUNKS, 0], np.int32), (step.max_tiles, 1))  # of a chunk without tokens
        if inputs is not None:
            count, first, num_chunks = len(inputs.token_ids), inputs.num_decodes, len(inputs.prefill_counts)
            kv_slots[first:count], ids[first:count] = inputs.kv_slots[first:], inputs.token_ids[first:]
            positions[first:count] = inputs.positions[first:]
            rows[:first] = inputs.token_slots
            token_rows[:count] = rows_of_tokens(inputs)
            counts = np.array(inputs.prefill_counts, np.int32)
            slots[:num_chunks] = inputs.prefill_slots
            seq_lens[:num_chunks] = np.array(inputs.prefill_first, np.int32) + counts
            starts[: num_chunks + 1] = first + np.concatenate(([0], np.cumsum(counts)))
            starts[num_chunks + 1 :] = starts[num_chunks]
            found = query_tiles(counts, seq_lens[:num_chunks], self._attention.tokens_per_tile)
            tiles[: len(found)] = found
        return [kv_slots.view(np.int32), ids, positions, token_rows, rows, slots, seq_lens, starts, tiles.reshape(-1)]

    def launch(self, size: int, *, is_adapted: bool, pdl: bool) -> None:
        """All launches of the step that is in place. This is what a graph holds. is_adapted: some token may have an adapter."""
        step, state = self.step(size), self._state
        tokens, rows = step.tokens if is_adapted else replace(step.tokens, token_rows=None), step.tokens.decodes
        assert rows is not None
        ops.step_prep(
            rows.rows,
            state.last_token,
            state.num_computed,
            state.block_table,
            self._cache.block_size,
            rows.ids,
            rows.positions,
            rows.kv_slots,
            rows.seq_lens,
            keeps_padding=True,
            pdl=pdl,
        )
        self._attention.plan(rows, pdl=pdl)
        self._model.mixed(tokens, self._cache, state, pdl=pdl)
        ops.finite_rows(step.states, step.is_finite)
        ops.kv_clear(self._cache.pool, tokens.kv_slots, step.is_finite)


def rows_of_tokens(inputs: StepInputs) -> I32:
    """int32 [num_tokens]: of each token the slot of its request, which is its row of the state table."""
    prefills = np.array(inputs.prefill_slots, np.int32)
    return np.concatenate((inputs.token_slots, np.repeat(prefills, inputs.prefill_counts))).astype(np.int32)


def _lengths(size: int, num_rows: int, max_tiles: int) -> dict[str, int]:
    """Of the parts of a packet, in 32 bits each."""
    return {
        "kv_slots": 2 * size,
        "ids": size,
        "positions": size,
        "token_rows": size,
        "rows": num_rows,
        "slots": MAX_CHUNKS + 1,
        "seq_lens": MAX_CHUNKS + 1,
        "starts": MAX_CHUNKS + 2,
        "tiles": 2 * max_tiles,
    }


def _padded(length: int) -> int:
    """Each part begins at a multiple of ALIGNMENT bytes: a kernel is compiled anew for tensors that do not."""
    return -(-length // (ALIGNMENT // 4)) * (ALIGNMENT // 4)


def supports(model: Any) -> bool:
    """Whether steps of this model can be such graphs: modules of transformers may do more than launch."""
    return isinstance(model, DeviceDecoder) and model.collectives.size == 1
