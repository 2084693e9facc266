"""`Aligner`: when each token of a transcription was said, by what the decoder of Whisper looked at while it wrote the token.

Some heads of cross attention follow the recording (`alignment_heads` of generation_config.json; without these, all heads of the
later half of the layers). A pass over the finished text gives their weights, [tokens, rows of the encoder]. They are normalised by
row of the encoder, smoothed, and averaged over heads. The cheapest path through them, by dynamic time warping, never goes back
in the recording. It enters each token at some row of the encoder, which is when the token begins. These are the definitions of
openai-whisper. Called by `encoder_tower`.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch.nn import functional

from actorllm.config import ModelConfig
from actorllm.errors import CorruptModelError, RequestFailedError, UnsupportedModelError
from actorllm.types.model_files import read_object

MEDIAN_WIDTH = 7
"""Rows of the encoder that a weight is smoothed over, where config.json says none."""


class Aligner:
    """Of one model."""

    def __init__(self, loaded: Any, model: ModelConfig) -> None:
        """loaded: the modules, as transformers has them, with attention that shows its weights.

        Raises:
            CorruptModelError: generation_config.json names heads that the decoder does not have.
            UnsupportedModelError: the decoder is not one of Whisper.
        """
        self._encoder, self._decoder = loaded.get_encoder(), loaded.get_decoder()
        config = loaded.config
        if not hasattr(config, "num_mel_bins"):
            raise UnsupportedModelError(f"architecture {model.architecture!r} writes no text of recordings")
        self._width = int(getattr(config, "median_filter_width", MEDIAN_WIDTH))
        tree = read_object(Path(model.path) / "generation_config.json", is_optional=True)
        self._heads = alignment_heads(tree, int(config.decoder_layers), int(config.decoder_attention_heads))

    def starts(
        self, features: torch.Tensor, ids: torch.Tensor, first: int, stop: int, num_rows: int
    ) -> NDArray[np.int64]:
        """The rows of the encoder at which the tokens of the text begin, and at which the last one ends: [stop - first].

        Arguments:
            features: of the recording, [1, num_bins, num_frames].
            ids: int64 [1, num_tokens]: what the decoder begins with, the text, and the token of its end.
            first, stop: the tokens that the text, and then its end, are written behind.
            num_rows: of the encoder that are of the recording; those behind are of silence.

        Raises RequestFailedError: the model computes no numbers for this recording.
        """
        seen = self._weights(features, ids)[..., :num_rows]  # [num_heads, num_tokens, num_rows]
        # In float16 a token that looks at silence may have no weight left for the recording: it is 0 everywhere.
        seen = seen / seen.sum(-1, keepdim=True).clamp(min=torch.finfo(seen.dtype).tiny)
        std, mean = torch.std_mean(seen, -2, keepdim=True, correction=0)
        seen = (seen - mean) / std.masked_fill(std == 0, 1)
        seen = median_filtered(seen, self._width).mean(0)[first:stop]
        if not seen.isfinite().all():
            raise RequestFailedError(
                "the attention of the model holds NaN or infinity for this recording, so its words have no times; "
                "ask for segments, or build the engine with dtype='float32'"
            )
        return entered(-seen.double().numpy())

    def _weights(self, features: torch.Tensor, ids: torch.Tensor) -> torch.Tensor:
        """float32 [num_heads, num_tokens, num_rows] of the heads that follow the recording."""
        found: list[torch.Tensor] = []
        rows = self._encoder(features).last_hidden_state
        with self._watched(found):
            self._decoder(input_ids=ids, encoder_hidden_states=rows, use_cache=False)
        return torch.cat(found)

    @contextmanager
    def _watched(self, found: list[torch.Tensor]) -> Iterator[None]:
        """Collect the weights of these heads, layer by layer."""

        def keep(heads: list[int]) -> Any:
            def hook(module: Any, inputs: Any, output: Any) -> None:
                found.append(output[1][0, heads].float())

            return hook

        layers = self._decoder.layers
        hooks = [layers[layer].encoder_attn.register_forward_hook(keep(heads)) for layer, heads in self._heads.items()]
        try:
            yield
        finally:
            for hook in hooks:
                hook.remove()


def alignment_heads(tree: dict[str, Any], num_layers: int, num_heads: int) -> dict[int, list[int]]:
    """Heads by layer. tree: generation_config.json. Raises CorruptModelError."""
    given = tree.get("alignment_heads")
    if given is None:
        return {layer: list(range(num_heads)) for layer in range(num_layers // 2, num_layers)}
    found: dict[int, list[int]] = {}
    limits = (num_layers, num_heads)
    for pair in given if isinstance(given, list) else [given]:
        is_pair = isinstance(pair, list) and len(pair) == 2 and all(type(one) is int for one in pair)
        if not is_pair or not all(0 <= one < most for one, most in zip(pair, limits, strict=True)):
            raise CorruptModelError(
                f"generation_config.json: alignment_heads has {pair!r:.80}; pairs of layer and head are needed, below {limits}"
            )
        found.setdefault(pair[0], []).append(pair[1])
    if not found:
        raise CorruptModelError(
            "generation_config.json: alignment_heads is empty; one pair of layer and head is needed"
        )
    return dict(sorted(found.items()))


def median_filtered(x: torch.Tensor, width: int) -> torch.Tensor:
    """The median of each number and its neighbours in the last dimension, mirrored at both ends. width: odd."""
    around = width // 2
    if x.shape[-1] <= around:
        return x
    return functional.pad(x, (around, around), mode="reflect").unfold(-1, width, 1).sort()[0][..., around]


def entered(cost: NDArray[np.float64]) -> NDArray[np.int64]:
    """The column at which the cheapest path enters each row of [num_rows, num_columns].

    A step of the path goes on by a row, a column, or both. Sums are float32; of equal ones, staying in the row is taken.
    """
    num_rows, num_columns = cost.shape
    total = np.full((num_rows + 1, num_columns + 1), np.inf, np.float32)
    total[0, 0] = 0
    came = np.zeros(total.shape, np.int8)
    """0: from both; 1: from the row before; 2: from the column before."""
    for diagonal in range(2, num_rows + num_columns + 1):
        i = np.arange(max(1, diagonal - num_columns), min(num_rows, diagonal - 1) + 1)
        j = diagonal - i
        both, row, column = total[i - 1, j - 1], total[i - 1, j], total[i, j - 1]
        is_both = (both < row) & (both < column)
        is_row = (row < both) & (row < column)
        came[i, j] = np.where(is_both, 0, np.where(is_row, 1, 2))
        total[i, j] = cost[i - 1, j - 1] + np.where(is_both, both, np.where(is_row, row, column))
    came[0], came[:, 0] = 2, 1
    starts = np.zeros(num_rows, np.int64)
    i, j = num_rows, num_columns
    while i > 0 or j > 0:
        if i > 0:
            starts[i - 1] = max(j - 1, 0)
        step = came.item(i, j)
        i, j = i - (step != 2), j - (step != 1)
    return starts
