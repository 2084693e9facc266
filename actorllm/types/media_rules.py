"""`MediaRules`: which images or audio the prompts of an engine may hold, read from config.json and the engine's arguments.

Only architectures that were compared with transformers' `generate` are here. All others that take more than text are refused by
name, where the model is planned. Read by `config`; used by `actorllm.intake.media`.
"""

from __future__ import annotations

import math
import re
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal, TypeAlias

import orjson

from actorllm.errors import ConfigError, CorruptModelError, shown

Modality: TypeAlias = Literal["image", "audio"]

RowKind: TypeAlias = Literal["plain", "grid", "whole"]
"""How the rows of an item take part: like tokens of text; at positions on three axes; or attending to each other."""

ARCHITECTURES: dict[str, tuple[Modality, RowKind]] = {
    "Gemma3ForConditionalGeneration": ("image", "whole"),
    "Idefics3ForConditionalGeneration": ("image", "plain"),
    "LlavaForConditionalGeneration": ("image", "plain"),
    "Qwen2AudioForConditionalGeneration": ("audio", "plain"),
    "Qwen2VLForConditionalGeneration": ("image", "grid"),
    "Qwen2_5_VLForConditionalGeneration": ("image", "grid"),
    "Qwen3VLForConditionalGeneration": ("image", "grid"),
    "SmolVLMForConditionalGeneration": ("image", "plain"),
}
"""What each takes beside text."""

TOKEN_KEYS = {"image": ("image_token_index", "image_token_id"), "audio": ("audio_token_index", "audio_token_id")}
"""Where config.json names the token that stands for a row."""

MODALITIES = ("image", "video", "audio")
"""That vLLM's arguments name."""

MAX_ITEMS = 64
"""Most that limit_mm_per_prompt may allow."""

DEFAULT_ITEMS = 8

ITEM_OPTIONS = {"count", "width", "height", "num_frames", "length"}
"""What vLLM takes in the place of a count. The sizes are for its measurement of memory, which is none here."""

DOMAIN = re.compile(r"(?=.{1,253}\Z)[a-z0-9]([a-z0-9-]*[a-z0-9])?(\.[a-z0-9]([a-z0-9-]*[a-z0-9])?)*", re.ASCII)


@dataclass(frozen=True, slots=True)
class MediaRules:
    """What the prompts of an engine may hold beside text."""

    token_id: int
    """The token that stands where a row of an item is."""
    modality: Modality = "image"
    rows: RowKind = "plain"
    num_vectors: int = 1
    """Of a row: its embedding, and what is added to the states behind the first layers."""
    max_items: int = DEFAULT_ITEMS
    """Of one prompt."""
    processor_kwargs: dict[str, Any] = field(default_factory=dict, hash=False)
    """Keyword arguments of the model's processor (mm_processor_kwargs)."""
    local_path: str | None = None
    """Files below this folder may be read (allowed_local_media_path); None: none may be."""
    domains: tuple[str, ...] = ()
    """Hosts that may be asked (allowed_media_domains)."""

    @classmethod
    def from_tree(cls, tree: dict[str, Any] | None) -> MediaRules | None:
        """Of a configuration that was written as JSON."""
        if tree is None:
            return None
        if "image_token_id" in tree:  # of older recordings
            renamed = {"image_token_id": "token_id", "max_images": "max_items"}
            tree = {renamed.get(name, name): value for name, value in tree.items()}
        return cls(**tree | {"domains": tuple(tree.get("domains", ()))})

    @classmethod
    def read(cls, architecture: str, hf: Mapping[str, Any], given: Mapping[str, Any]) -> MediaRules | None:
        """Of a model. None: its prompts are text.

        Arguments:
            architecture: of config.json.
            hf: config.json.
            given: the engine's arguments; limit_mm_per_prompt, mm_processor_kwargs, allowed_local_media_path and
                allowed_media_domains are read.

        Raises:
            ConfigError: one of the arguments is wrong.
            CorruptModelError: config.json names no token for the items, or an impossible tower.
        """
        limits = _limits(given["limit_mm_per_prompt"])
        checked = processor_kwargs("mm_processor_kwargs", given["mm_processor_kwargs"])
        path, domains = (
            checked_folder(given["allowed_local_media_path"]),
            checked_domains(given["allowed_media_domains"]),
        )
        if architecture not in ARCHITECTURES:
            return None
        modality, rows = ARCHITECTURES[architecture]
        keys = TOKEN_KEYS[modality]
        token = next((hf[key] for key in keys if hf.get(key) is not None), None)
        if isinstance(token, bool) or not isinstance(token, int) or token < 0:
            raise CorruptModelError(f"config.json: {keys[0]} is {token!r}; it must be a token id")
        vision = hf.get("vision_config")
        deep = vision.get("deepstack_visual_indexes") if isinstance(vision, Mapping) else None
        if not isinstance(deep or [], list) or len(deep or []) > 16:
            raise CorruptModelError(f"config.json: deepstack_visual_indexes is {deep!r:.80}; it must be a short list")
        return cls(
            token,
            modality,
            rows,
            1 + len(deep or []),
            limits.get(modality, DEFAULT_ITEMS),
            checked,
            path,
            domains,
        )


def _limits(given: object) -> dict[str, int]:
    tree = _object("limit_mm_per_prompt", given)
    for name, value in tree.items():
        if name not in MODALITIES:
            raise ConfigError(f"limit_mm_per_prompt: {name!r:.80} is not one of {', '.join(map(repr, MODALITIES))}")
        if isinstance(value, Mapping) and value.keys() <= ITEM_OPTIONS:
            value = tree[name] = value.get("count", DEFAULT_ITEMS)
        if isinstance(value, bool) or not isinstance(value, int) or value < 0:
            raise ConfigError(f"limit_mm_per_prompt: {name}={shown(value)} must be a count")
        if value > MAX_ITEMS:
            raise ConfigError(f"limit_mm_per_prompt: {name}={value} must be at most {MAX_ITEMS}")
    return tree


def processor_kwargs(name: str, given: object) -> dict[str, Any]:
    """Keyword arguments of a processor, checked. Raises ConfigError, which names them `name`."""
    checked = _object(name, given)
    for key, value in checked.items():
        if not isinstance(key, str):
            raise ConfigError(f"{name}: {key!r:.80} must be the name of an argument")
        if isinstance(value, float) and not math.isfinite(value):
            raise ConfigError(f"{name}: {key}={value!r} must be finite")
    try:
        orjson.dumps(checked)
    except TypeError as error:
        raise ConfigError(f"{name}={shown(given)} must be plain values, as in JSON: {error}") from error
    return checked


def checked_folder(given: object) -> str | None:
    """Of allowed_local_media_path. Raises ConfigError."""
    if given is None or given == "":
        return None
    if not isinstance(given, str | Path) or not Path(given).is_dir():
        raise ConfigError(f"allowed_local_media_path={shown(given)} must be a folder")
    return str(Path(given).resolve())


def checked_domains(given: object) -> tuple[str, ...]:
    """Of allowed_media_domains. Raises ConfigError."""
    if given is None:
        return ()
    if isinstance(given, str) or not isinstance(given, Iterable):
        raise ConfigError(f"allowed_media_domains={shown(given)} must be a list of host names")
    domains = tuple(given)
    for domain in domains:
        if not isinstance(domain, str) or not DOMAIN.fullmatch(domain.lower()):
            raise ConfigError(f"allowed_media_domains: {shown(domain)} is no host name, as 'images.example.com'")
    return tuple(domain.lower() for domain in domains)


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
