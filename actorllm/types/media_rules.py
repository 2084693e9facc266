"""`MediaRules`: which images the prompts of an engine may hold, read from config.json and the engine's arguments.

Only architectures that were compared with transformers' `generate` are here. All others that take more than text are refused by
name, where the model is planned. Read by `config`; used by `actorllm.intake.media`.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

import orjson

from actorllm.errors import ConfigError, CorruptModelError, shown

IMAGE_ARCHITECTURES = frozenset({"LlavaForConditionalGeneration"})
"""Whose images enter as rows beside the embeddings of the text, at ordinary positions."""

MODALITIES = ("image", "video", "audio")
"""That vLLM's arguments name; prompts may have images."""

MAX_IMAGES = 64
"""Most that limit_mm_per_prompt may allow."""

DEFAULT_IMAGES = 8


@dataclass(frozen=True, slots=True)
class MediaRules:
    """What the prompts of an engine may hold beside text."""

    image_token_id: int
    """The token that stands where an image is."""
    max_images: int = DEFAULT_IMAGES
    """Of one prompt."""
    processor_kwargs: dict[str, Any] = field(default_factory=dict, hash=False)
    """Keyword arguments of the model's processor (mm_processor_kwargs)."""

    @classmethod
    def read(
        cls, architecture: str, hf: Mapping[str, Any], limits: object, processor_kwargs: object
    ) -> MediaRules | None:
        """Of a model. None: its prompts are text.

        Arguments:
            architecture: of config.json.
            hf: config.json.
            limits: the argument limit_mm_per_prompt.
            processor_kwargs: the argument mm_processor_kwargs.

        Raises:
            ConfigError: one of the arguments is wrong, or the model takes no images.
            CorruptModelError: config.json names no token for images.
        """
        max_images, checked = _max_images(limits), _processor_kwargs(processor_kwargs)
        if architecture not in IMAGE_ARCHITECTURES:
            return None
        token = next((hf[key] for key in ("image_token_index", "image_token_id") if hf.get(key) is not None), None)
        if isinstance(token, bool) or not isinstance(token, int) or token < 0:
            raise CorruptModelError(f"config.json: image_token_index is {token!r}; it must be a token id")
        return cls(token, max_images, checked)


def _max_images(limits: object) -> int:
    tree = _object("limit_mm_per_prompt", limits)
    for name, value in tree.items():
        if name not in MODALITIES:
            raise ConfigError(f"limit_mm_per_prompt: {name!r:.80} is not one of {', '.join(map(repr, MODALITIES))}")
        if isinstance(value, bool) or not isinstance(value, int) or value < 0:
            raise ConfigError(f"limit_mm_per_prompt: {name}={shown(value)} must be a count")
        if name == "image" and value > MAX_IMAGES:
            raise ConfigError(f"limit_mm_per_prompt: image={value} must be at most {MAX_IMAGES}")
    return int(tree.get("image", DEFAULT_IMAGES))


def _processor_kwargs(given: object) -> dict[str, Any]:
    checked = _object("mm_processor_kwargs", given)
    for name, value in checked.items():
        if not isinstance(name, str):
            raise ConfigError(f"mm_processor_kwargs: {name!r:.80} must be the name of an argument")
        if isinstance(value, float) and not math.isfinite(value):
            raise ConfigError(f"mm_processor_kwargs: {name}={value!r} must be finite")
    try:
        orjson.dumps(checked)
    except TypeError as error:
        raise ConfigError(f"mm_processor_kwargs={shown(given)} must be plain values, as in JSON: {error}") from error
    return checked


def _object(name: str, given: object) -> dict[str, Any]:
    """An argument that is a mapping, or that as JSON."""
    if given is None:
        return {}
    if isinstance(given, str):
        try:
            given = orjson.loads(given)
        except orjson.JSONDecodeError as error:
            raise ConfigError(f"{name}={shown(given)} is not JSON: {error}") from error
    if not isinstance(given, Mapping):
        raise ConfigError(f"{name}={shown(given)} must be a mapping, as {{'image': 4}}")
    return dict(given)
