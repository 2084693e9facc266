"""`EncoderTower`: the encoder of a model with a decoder beside it, which makes rows of one input.

Its modules are those of transformers. The decoder of the same folder is the worker's; the first text whose words get times loads
another one. Called by the encoder actor (`intake.media.media_encoder`), on its thread or in its process.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import torch

from actorllm.config import ModelConfig
from actorllm.errors import InvalidPromptError
from actorllm.messages import U8
from actorllm.model.encoder_decoder.cross_loading import read_modules
from actorllm.model.encoder_decoder.cross_plan import read_plan
from actorllm.model.encoder_decoder.word_alignment import Aligner
from actorllm.model.runner import DTYPES
from actorllm.types.model_files import overridden, read_object


class EncoderTower:
    """Of one model. Raises ModelError where it cannot be loaded."""

    def __init__(self, model: ModelConfig) -> None:
        self._model, self._dtype = model, DTYPES[model.dtype]
        self._encoder: Any = self._modules().get_encoder()
        self._aligner: Aligner | None = None

    def _modules(self) -> Any:
        tree = overridden(read_object(Path(self._model.path) / "config.json"), self._model.overrides)
        with torch.inference_mode(False), torch.no_grad():
            return read_modules(read_plan(self._model, tree), self._model, self._dtype, False)

    @torch.inference_mode()
    def encode(self, arrays: dict[str, Any]) -> U8:
        """The rows of one input, in the bytes of the model's dtype: [num_rows * hidden_size * item size].

        Arguments:
            arrays: `input_ids`, int64 [1, num_tokens], or `input_features`, floats [1, num_bins, num_frames]; numpy.
                With `decoder_input_ids` and `span` beside the latter: int64 [tokens], where the words of this text begin
                (`word_alignment`). span: int64 [3], the arguments `first`, `stop` and `num_rows`.

        Raises:
            InvalidPromptError: the rows are not finite.
        """
        given = {name: torch.from_numpy(array) for name, array in arrays.items()}
        given = {name: x.to(self._dtype) if x.is_floating_point() else x for name, x in given.items()}
        if "decoder_input_ids" in given:
            return self._aligned(given)
        rows = self._encoder(**given).last_hidden_state[0].to(self._dtype).contiguous()
        if not rows.isfinite().all():
            raise InvalidPromptError("the encoder makes NaN or infinity of this input; send another one")
        packed: U8 = rows.view(torch.uint8).reshape(-1).numpy().copy()
        return packed

    def _aligned(self, given: dict[str, torch.Tensor]) -> U8:
        if self._aligner is None:
            loaded = self._modules()
            self._aligner, self._encoder = Aligner(loaded, self._model), loaded.get_encoder()
        features, ids = given["input_features"], given["decoder_input_ids"]
        starts = self._aligner.starts(features, ids, *given["span"].tolist())
        return np.ascontiguousarray(starts).view(np.uint8)

    def close(self) -> None:
        """Give back the weights."""
        self._encoder = self._aligner = None
