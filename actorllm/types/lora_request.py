"""`LoRARequest`: which adapter a request is computed with, by vLLM's fields."""

from __future__ import annotations

import os
from dataclasses import dataclass
from typing import Any

from actorllm.errors import InvalidParameterError, shown
from actorllm.types.params import MAX_LABEL, is_text

MAX_PATH = 4096
"""Characters of the path of an adapter, as of any path."""


@dataclass(frozen=True, slots=True)
class LoRARequest:
    """A LoRA adapter: a folder that peft has written.

    What a request is computed with is the content of the folder. Neither name nor number decides it: two programs may give
    one number to two adapters, and a folder that was written anew is another adapter.

    Arguments:
        lora_name: what answers and statistics call it.
        lora_int_id: the caller's number for it, 1 or more; `remove_lora` and `pin_lora` take it.
        lora_path: the folder with adapter_config.json and adapter_model.safetensors, on the machine of the engine.
        base_model_name: accepted and not used, as in vLLM.
        tensorizer_config_dict: accepted at None.
        load_inplace: accepted: a folder whose files have changed is read again in any case.

    Raises:
        InvalidParameterError: a field that is none of this.
    """

    lora_name: str
    lora_int_id: int
    lora_path: str = ""
    base_model_name: str | None = None
    tensorizer_config_dict: dict[str, Any] | None = None
    load_inplace: bool = False

    def __post_init__(self) -> None:
        if not is_text(self.lora_name) or not 0 < len(self.lora_name) <= MAX_LABEL:
            raise InvalidParameterError(
                f"lora_name={shown(self.lora_name)} must be a string of 1 to {MAX_LABEL} characters"
            )
        number = self.lora_int_id
        if isinstance(number, bool) or not isinstance(number, int) or not 1 <= number < 2**63:
            raise InvalidParameterError(f"lora_int_id={shown(number)} must be an integer of at least 1")
        path = os.fspath(self.lora_path) if isinstance(self.lora_path, str | os.PathLike) else None
        if not isinstance(path, str) or not is_text(path) or not 0 < len(path) <= MAX_PATH or "\0" in path:
            raise InvalidParameterError(f"lora_path={shown(self.lora_path)} must be the folder of an adapter")
        object.__setattr__(self, "lora_path", path)
        if self.tensorizer_config_dict is not None:
            raise InvalidParameterError("tensorizer_config_dict is not supported; leave it at None")

    @property
    def adapter_id(self) -> int:
        """As `lora_int_id`; vLLM's name."""
        return self.lora_int_id

    @property
    def name(self) -> str:
        """As `lora_name`; vLLM's name."""
        return self.lora_name

    @property
    def path(self) -> str:
        """As `lora_path`; vLLM's name."""
        return self.lora_path
