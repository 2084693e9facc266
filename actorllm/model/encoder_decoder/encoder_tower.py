"""`EncoderTower`: the encoder of a model with a decoder beside it, which makes rows of one input.

Its modules are those of transformers. The decoder of the same folder is the worker's. Called by the
encoder actor (`intake.media.media_encoder`), on its thread or in its process.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch

from actorllm.config import ModelConfig
from actorllm.errors import InvalidPromptError
from actorllm.messages import U8
from actorllm.model.encoder_decoder.cross_loading import read_modules
from actorllm.model.encoder_decoder.cross_plan import read_plan
from actorllm.model.runner import DTYPES
from actorllm.types.model_files import overridden, read_object


class EncoderTower:
    """Of one model. Raises ModelError where it cannot be loaded."""

    def __init__(self, model: ModelConfig) -> None:
        tree = overridden(read_object(Path(model.path) / "config.json"), model.overrides)
        self._dtype = DTYPES[model.dtype]
        with torch.no_grad():
            loaded = read_modules(read_plan(model, tree), model, self._dtype, False)
        self._encoder: Any = loaded.get_encoder()

    @torch.inference_mode()
    def encode(self, arrays: dict[str, Any]) -> U8:
        """The rows of one input, in the bytes of the model's dtype: [num_rows * hidden_size * item size].

        Arguments:
            arrays: `input_ids`, int64 [1, num_tokens], or `input_features`, floats [1, num_bins, num_frames]; numpy.

        Raises:
            InvalidPromptError: the rows are not finite.
        """
        given = {name: torch.from_numpy(array) for name, array in arrays.items()}
        given = {name: x.to(self._dtype) if x.is_floating_point() else x for name, x in given.items()}
        rows = self._encoder(**given).last_hidden_state[0].to(self._dtype).contiguous()
        if not rows.isfinite().all():
            raise InvalidPromptError("the encoder makes NaN or infinity of this input; send another one")
        packed: U8 = rows.view(torch.uint8).reshape(-1).numpy().copy()
        return packed

    def close(self) -> None:
        """Give back the weights."""
        self._encoder = None
