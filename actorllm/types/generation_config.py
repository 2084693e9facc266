"""generation_config.json: what the author of a model recommends for sampling, and which ids end its text.

Owns how that file is found (`generation_config=`), read and overridden, as vLLM does it. 'auto' takes the file of the model's
folder, and a folder takes the file there. 'vllm' takes nothing of it but the end-of-text ids. The result is part of
`EngineConfig`, so nothing reads the file again. Called by actorllm.config when an engine is configured, and by the front
doors when a request brings no parameters.
"""

from __future__ import annotations

import os
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from actorllm.errors import ConfigError, InvalidParameterError
from actorllm.types.model_files import read_object
from actorllm.types.params import SamplingParams

RECOMMENDED = (
    "repetition_penalty",
    "presence_penalty",
    "frequency_penalty",
    "temperature",
    "top_k",
    "top_p",
    "min_p",
    "max_new_tokens",
)
"""What is taken of the file, as vLLM does; max_new_tokens is called max_tokens in SamplingParams."""


def read_generation_config(model_path: Path, source: Any) -> dict[str, Any] | None:
    """The file as it is, None if there is none. source: 'auto', 'vllm' (both: the model's own) or a folder.

    Raises ConfigError for another source, CorruptModelError for an unusable file.
    """
    if not isinstance(source, str | os.PathLike):
        raise ConfigError(
            f"generation_config={source!r} must be 'auto', 'vllm' or a folder with generation_config.json"
        )
    folder = model_path if source in ("auto", "vllm") else Path(source).expanduser()
    file = folder / "generation_config.json"
    if not file.is_file():
        if folder is not model_path:
            raise ConfigError(
                f"generation_config={os.fspath(source)!r} is neither 'auto' nor 'vllm' nor a folder with "
                f"generation_config.json"
            )
        return None
    return read_object(file)


def sampling_defaults(tree: Mapping[str, Any], source: Any, override: Any) -> dict[str, Any]:
    """Sampling parameters that differ from the defaults of SamplingParams; override: values that win over the file's."""
    if override is not None and not isinstance(override, Mapping):
        raise ConfigError(f"override_generation_config={override!r} must be a mapping")
    merged = {**({} if source == "vllm" else tree), **(override or {})}
    found = {name: merged[name] for name in RECOMMENDED if merged.get(name) is not None}
    if "max_new_tokens" in found:
        found["max_tokens"] = found.pop("max_new_tokens")
    return found


def sampling_params_of(defaults: Mapping[str, Any]) -> SamplingParams:
    """Raises InvalidParameterError, naming the file, where it holds what cannot be used."""
    try:
        return SamplingParams(**defaults)
    except InvalidParameterError as error:
        raise InvalidParameterError(
            f"the model's generation_config.json: {error} (give sampling_params, override_generation_config, or "
            f"generation_config='vllm')"
        ) from error
