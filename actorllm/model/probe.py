"""The last part of the guard: does a loaded model, in chunks and through our cache, say what transformers says?

Two sequences of random ids run together: the first in two chunks, the second as a prefill and then a decode row, over
blocks in no order. The logits of every token must be those that the stock model with transformers' own eager attention
has for the whole sequence. What this finds is state that is kept outside of keys and values, or that mixes neighbours
in the batch, whatever the model calls it. Called once by `transformers_backend.load`.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np
import torch

from actorllm.errors import UnsupportedModelError
from actorllm.model.attention import KVCache
from actorllm.model.inputs import StepInputs

if TYPE_CHECKING:
    from actorllm.model.transformers_backend import TransformersDecoder

BLOCK_SIZE = 4
FIRST, CUT = 20, 13
"""Tokens of the first sequence, and of its first chunk."""
SECOND = 7
"""Tokens of the second sequence; the last one is decoded."""

TOLERANCES = {torch.float32: 1e-3, torch.bfloat16: 0.15}
"""Of the root mean square error of a token's logits, in standard deviations of logits: the median over the tokens, so
that one expert chosen otherwise by rounding does not decide. What is really missing costs 0.1 to 1.4."""


@torch.inference_mode()
def probe(decoder: TransformersDecoder) -> None:
    """Raises UnsupportedModelError if the logits differ, or if either of the two ways fails."""
    config = decoder.config
    try:
        ours, stock = _ours_and_stock(decoder)
    except Exception as error:
        reason = f"it cannot be run over the paged cache: {type(error).__name__}: {error}"
        raise UnsupportedModelError(f"architecture {config.architecture!r} is not supported: {reason}") from error
    distance = relative_error(ours, stock)
    if not distance <= TOLERANCES[decoder.dtype]:
        raise UnsupportedModelError(
            f"architecture {config.architecture!r} is not supported: in chunks its logits differ from transformers' own "
            f"(by {distance:.2g} standard deviations), so it keeps state outside of keys and values"
        )


def relative_error(ours: torch.Tensor, stock: torch.Tensor) -> float:
    """For two [num_tokens, vocab_size]; see TOLERANCES."""
    spread = stock.std(1).clamp_min(1e-30)
    return float(((ours - stock).square().mean(1).sqrt() / spread).median())


def _ours_and_stock(decoder: TransformersDecoder) -> tuple[torch.Tensor, torch.Tensor]:
    """Logits of those tokens that come after a border of chunks, float32 [num_tokens, vocab_size], twice."""
    config = decoder.config
    rng = np.random.default_rng(0)
    first, second = rng.integers(0, config.vocab_size, FIRST), rng.integers(0, config.vocab_size, SECOND)
    with decoder.stock() as model:
        whole = [
            model(input_ids=torch.from_numpy(ids)[None], use_cache=False).logits[0].float() for ids in (first, second)
        ]
    tables = [np.array([5, 0, 3, 6, 1], np.int32), np.array([4, 2], np.int32)]
    cache = KVCache(config.num_layers, config.num_kv_heads, config.head_dim, 7, BLOCK_SIZE, decoder.dtype)
    step = _inputs(None, [(first[:CUT], 0, tables[0]), (second[:-1], 0, tables[1])])
    decoder.forward(step, cache)
    step = _inputs((int(second[-1]), SECOND - 1, tables[1]), [(first[CUT:], CUT, tables[0])])
    hidden = decoder.select(decoder.forward(step, cache), np.arange(1 + FIRST - CUT))
    return decoder.logits(hidden), torch.cat((whole[1][-1:], whole[0][CUT:]))


def _inputs(
    decode: tuple[int, int, np.ndarray] | None, prefills: list[tuple[np.ndarray, int, np.ndarray]]
) -> StepInputs:
    """A step of one decode row (token, position, block table) and some chunks (tokens, first position, block table)."""
    chunks = [(np.array([decode[0]]), decode[1], decode[2])] if decode is not None else []
    chunks += prefills
    positions = [first + np.arange(len(tokens)) for tokens, first, _ in chunks]
    slots = [
        table[where // BLOCK_SIZE].astype(np.int64) * BLOCK_SIZE + where % BLOCK_SIZE
        for where, (_, _, table) in zip(positions, chunks, strict=True)
    ]
    num_decodes = len(chunks) - len(prefills)
    counts = [len(tokens) for tokens, _, _ in prefills]
    decoded = np.array([decode[1]] if decode is not None else [], np.int64)
    return StepInputs(
        token_ids=np.concatenate([tokens for tokens, _, _ in chunks]).astype(np.int64),
        positions=np.concatenate(positions),
        kv_slots=np.concatenate(slots),
        num_decodes=num_decodes,
        decode_slots=np.arange(num_decodes, dtype=np.int32),
        decode_lengths=decoded + 1,
        decode_positions=decoded,
        decode_version=0,
        decode_table=decode[2][None] if decode is not None else np.zeros((0, 0), np.int32),
        is_sorted=False,
        prefill_slots=list(range(num_decodes, len(chunks))),
        prefill_starts=[num_decodes + sum(counts[:i]) for i in range(len(counts))],
        prefill_counts=counts,
        prefill_first=[first for _, first, _ in prefills],
        prefill_tables=[table for _, _, table in prefills],
        result_slots=np.zeros(0, np.int32),
        result_tokens=np.zeros(0, np.int64),
        rows_version=0,
    )
