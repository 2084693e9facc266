"""The decoder of a model with an encoder, loaded and checked: its logits must be those of transformers' own modules.

Two requests with other rows of an encoder run together, in chunks that cut rows and tokens, and as decode rows. What their logits
should be says the model as transformers has it, one request at a time. Called by the runner of the CPU.
"""

from __future__ import annotations

from typing import Any

import numpy as np
import torch
from transformers.modeling_outputs import BaseModelOutput

from actorllm.config import ModelConfig
from actorllm.errors import UnsupportedModelError
from actorllm.model.encoder_decoder.cross_decoder import CrossDecoder
from actorllm.model.encoder_decoder.cross_plan import CLASSES, EncoderDecoderPlan
from actorllm.model.encoder_decoder.decoder_parts import DecoderParts
from actorllm.model.hf.loading import check_tensors, drawn, from_checkpoint, refused
from actorllm.model.hf.probe import (
    MAX_NOISE,
    NUM_BLOCKS,
    ROUNDING,
    TOLERANCES,
    check_change,
    relative_error,
    step_inputs,
)
from actorllm.model.quantization import form_of

NUM_ROWS, NUM_TOKENS = (6, 3), (9, 7)
"""Of the encoder and of the decoder, by request."""
CHUNKS = (4, 3, 4, 2, 1, 1)
"""Positions of the first request by step."""


def read_modules(plan: EncoderDecoderPlan, model: ModelConfig, dtype: torch.dtype, show_progress: bool | None) -> Any:
    """The model as transformers has it. Raises ModelError."""
    assert model.encoder_decoder is not None
    auto = CLASSES[model.encoder_decoder.kind]
    if model.load_format == "dummy":
        loaded = drawn(auto, plan.config, "eager", dtype, model.seed)
    else:
        loaded, report = from_checkpoint(auto, plan.config, "eager", dtype, model.path, show_progress)
        check_tensors(model.path, report["missing_keys"], report["unexpected_keys"], report["mismatched_keys"])
    return loaded.eval().requires_grad_(False)


def load(plan: EncoderDecoderPlan, model: ModelConfig, dtype: torch.dtype, show_progress: bool | None) -> CrossDecoder:
    """Raises ModelError."""
    assert model.encoder_decoder is not None
    with torch.inference_mode(False), torch.no_grad():
        loaded = read_modules(plan, model, dtype, show_progress)
        expected, rows, ids = _stock(loaded, plan, dtype)
        try:
            parts = DecoderParts.of(loaded, dtype)
        except Exception as error:  # of modules of another library, with other names
            raise refused(
                plan.architecture, f"its decoder is built otherwise: {type(error).__name__}: {error}"
            ) from error
        del loaded
        decoder = CrossDecoder(plan, parts, dtype, model.max_model_len)
    with torch.inference_mode():
        distance = relative_error(_ours(decoder, rows, ids), expected)
    limit = MAX_NOISE if dtype in ROUNDING else TOLERANCES[dtype]
    if not distance <= limit:
        raise UnsupportedModelError(
            f"architecture {plan.architecture!r} is not supported: its logits differ from transformers' own by {distance:.2g} "
            f"standard deviations"
        )
    if model.quantization is not None:
        del decoder
        with torch.inference_mode(False), torch.no_grad():
            decoder = CrossDecoder(plan, parts.rounded(form_of(model)), dtype, model.max_model_len)
        with torch.inference_mode():
            distance = relative_error(_ours(decoder, rows, ids), expected)
        check_change(plan.architecture, model.quantization, distance)
    if model.encoder_decoder.never:
        decoder.never = torch.tensor(model.encoder_decoder.never)
    return decoder


def _stock(
    loaded: Any, plan: EncoderDecoderPlan, dtype: torch.dtype
) -> tuple[torch.Tensor, list[torch.Tensor], list[np.ndarray[Any, np.dtype[np.int64]]]]:
    """Logits of all tokens of both requests, the rows of their encoder, and their ids."""
    random, rng = torch.Generator().manual_seed(0), np.random.default_rng(0)
    rows = [torch.randn(count, plan.hidden_size, generator=random).to(dtype) for count in NUM_ROWS]
    ids = [rng.integers(0, plan.vocab_size, count) for count in NUM_TOKENS]
    if (padding := getattr(plan.config, "pad_token_id", None)) is not None:  # M2M100 counts no positions for it
        ids = [np.where(one == padding, (padding + 1) % plan.vocab_size, one) for one in ids]
    logits = []
    for one, tokens in zip(rows, ids, strict=True):
        output = loaded(
            encoder_outputs=BaseModelOutput(last_hidden_state=one[None]),
            decoder_input_ids=torch.from_numpy(tokens)[None],
            use_cache=False,
        )
        logits.append(output.logits[0].float())
    return torch.cat(logits), rows, ids


def _ours(
    decoder: CrossDecoder, rows: list[torch.Tensor], ids: list[np.ndarray[Any, np.dtype[np.int64]]]
) -> torch.Tensor:
    """The first request in chunks; the second one at once up to its last tokens, which are decode rows beside them."""
    tables = [np.array([5, 0, 3, 6], np.int32), np.array([4, 2, 1], np.int32)]
    known = [np.concatenate((np.zeros(len(one), np.int64), tokens)) for one, tokens in zip(rows, ids, strict=True)]
    cache = decoder.new_cache(NUM_BLOCKS)
    num_early = len(known[1]) - len(CHUNKS) + 1
    found: tuple[list[torch.Tensor], list[torch.Tensor]] = ([], [])
    start = 0
    for number, count in enumerate(CHUNKS):
        chunk = (known[0][start : start + count], start, tables[0])
        if number:
            where = num_early + number - 1
            inputs = step_inputs(decoder, (int(known[1][where]), where, tables[1]), [chunk])  # type: ignore[arg-type]
            inputs.decode_sources = np.array([len(rows[1])])
            inputs.prefill_sources = [len(rows[0])]
        else:
            inputs = step_inputs(decoder, None, [chunk, (known[1][:num_early], 0, tables[1])])  # type: ignore[arg-type]
            inputs.decode_sources, inputs.prefill_sources = np.zeros(0, np.int64), [len(rows[0]), len(rows[1])]
        new = [rows[0][start : start + count]] if number else [rows[0][start : start + count], rows[1]]
        at = np.concatenate((np.arange(inputs.num_decodes, inputs.num_decodes + len(new[0])),))
        if not number:
            at = np.concatenate((at, count + np.arange(len(rows[1]))))
        packed = torch.cat(new)
        if len(packed):
            inputs.embedded, inputs.embeds = at, packed.contiguous().view(torch.uint8).reshape(-1).numpy()
        states = decoder.forward(inputs, cache)
        owner = np.repeat([0, 1] if not number else [1, 0], [count, num_early] if not number else [1, count])
        is_token = np.ones(len(owner), np.bool_)
        is_token[at] = False
        logits = decoder.logits(decoder.select(states, np.flatnonzero(is_token)))
        for request in (0, 1):
            found[request].append(logits[torch.from_numpy(owner[is_token] == request)])
        start += count
    return torch.cat([torch.cat(one) for one in found])
