"""`ImageTower`: the vision tower and the projector of a model, which make rows of images.

They are transformers' own modules with its own attention. The language model of the same folder is the worker's. Called by the
encoder actor (`intake.media.image_encoder`), on its thread or in its process.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch
from transformers import AutoModelForImageTextToText

from actorllm.config import ModelConfig
from actorllm.errors import InvalidPromptError
from actorllm.messages import U8
from actorllm.model.hf.loading import check_tensors, drawn, from_checkpoint, read_config
from actorllm.model.runner import DTYPES
from actorllm.types.model_files import overridden, read_object


class ImageTower:
    """Of one model. Raises ModelError where it cannot be loaded."""

    def __init__(self, model: ModelConfig) -> None:
        config = read_config(model, overridden(read_object(Path(model.path) / "config.json"), model.overrides))
        dtype = DTYPES[model.dtype]
        with torch.no_grad():
            if model.load_format == "dummy":
                loaded = drawn(AutoModelForImageTextToText, config, "eager", dtype, model.seed)
            else:
                loaded, report = from_checkpoint(AutoModelForImageTextToText, config, "eager", dtype, model.path, False)
                check_tensors(model.path, report["missing_keys"], report["unexpected_keys"], report["mismatched_keys"])
        self._model: Any = loaded.eval().requires_grad_(False).model
        self._width: int = config.get_text_config().hidden_size
        self._dtype = dtype
        self._model.language_model = None  # the worker has it

    @torch.inference_mode()
    def encode(self, arrays: dict[str, Any]) -> U8:
        """The rows of one image, in the bytes of the model's dtype: [num_rows * hidden_size * item size].

        Arguments:
            arrays: what the model's image processor made of it, by name; numpy.

        Raises:
            InvalidPromptError: the rows are not finite.
        """
        given = {name: torch.from_numpy(array) for name, array in arrays.items()}
        given = {name: x.to(self._dtype) if x.is_floating_point() else x for name, x in given.items()}
        features = self._model.get_image_features(**given, return_dict=True).pooler_output
        rows = torch.cat([part.reshape(-1, self._width) for part in features]).contiguous()
        if not rows.isfinite().all():
            raise InvalidPromptError("the model makes NaN or infinity of this image; send another one")
        packed: U8 = rows.view(torch.uint8).reshape(-1).numpy().copy()
        return packed

    def close(self) -> None:
        """Give back the weights."""
        self._model = None
