"""`MediaTower`: the tower and the projector of a model, which make rows of images or of audio.

They are transformers' own modules with its own attention. The language model of the same folder is the worker's. Called by the
encoder actor (`intake.media.media_encoder`), on its thread or in its process.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch
from transformers import AutoModelForMultimodalLM
from transformers.masking_utils import create_bidirectional_mask

from actorllm.config import ModelConfig
from actorllm.errors import InvalidPromptError
from actorllm.messages import U8
from actorllm.model.hf.loading import LANGUAGE_PARTS, check_tensors, drawn, from_checkpoint, read_config
from actorllm.model.runner import DTYPES
from actorllm.types.model_files import overridden, read_object


class MediaTower:
    """Of one model. Raises ModelError where it cannot be loaded."""

    def __init__(self, model: ModelConfig) -> None:
        config = read_config(model, overridden(read_object(Path(model.path) / "config.json"), model.overrides))
        dtype = DTYPES[model.dtype]
        auto = AutoModelForMultimodalLM
        with torch.no_grad():
            if model.load_format == "dummy":
                loaded = drawn(auto, config, "eager", dtype, model.seed)
            else:
                loaded, report = from_checkpoint(auto, config, "eager", dtype, model.path, False)
                check_tensors(model.path, report["missing_keys"], report["unexpected_keys"], report["mismatched_keys"])
        self._model: Any = loaded.eval().requires_grad_(False).model
        self._width: int = config.get_text_config().hidden_size
        self._dtype = dtype
        for name in LANGUAGE_PARTS:
            if hasattr(self._model, name):
                setattr(self._model, name, None)  # the worker has it

    @torch.inference_mode()
    def encode(self, arrays: dict[str, Any]) -> U8:
        """The rows of one item, in the bytes of the model's dtype: [num_rows * hidden_size * item size].

        A row may have more vectors behind the first, one for each of the first layers of the language model.

        Arguments:
            arrays: what the model's processor made of it, by name; numpy.

        Raises:
            InvalidPromptError: the rows are not finite.
        """
        given = {name: torch.from_numpy(array) for name, array in arrays.items()}
        given = {name: x.to(self._dtype) if x.is_floating_point() else x for name, x in given.items()}
        rows = (self._of_audio if hasattr(self._model, "audio_tower") else self._of_image)(**given).contiguous()
        if not rows.isfinite().all():
            raise InvalidPromptError("the model makes NaN or infinity of this item; send another one")
        packed: U8 = rows.view(torch.uint8).reshape(-1).numpy().copy()
        return packed

    def _of_image(self, **given: torch.Tensor) -> torch.Tensor:
        output = self._model.get_image_features(**given, return_dict=True)
        vectors = [output.pooler_output, *(getattr(output, "deepstack_features", None) or ())]
        return torch.cat([torch.cat([part.reshape(-1, self._width) for part in one]) for one in vectors], 1)

    def _of_audio(self, input_features: torch.Tensor, feature_attention_mask: torch.Tensor) -> torch.Tensor:
        """Of one recording, which is padded to the length that the tower takes."""
        tower = self._model.audio_tower
        num_inner, num_rows = tower._get_feat_extract_output_lengths(feature_attention_mask.sum(-1))
        length = (input_features.shape[2] - 2) // 2 + 1
        mask = create_bidirectional_mask(
            config=tower.config,
            inputs_embeds=input_features.new_zeros(1, length, 1),
            attention_mask=(torch.arange(length) < num_inner[:, None]).long(),
        )
        states = tower(input_features, attention_mask=mask).last_hidden_state
        rows: torch.Tensor = self._model.multi_modal_projector(states)[0, : int(num_rows)]
        return rows

    def close(self) -> None:
        """Give back the weights."""
        self._model = None
