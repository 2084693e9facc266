"""`LentModule`: a model of transformers that the application owns, and lends to an engine (`module=`).

Says what config.json would say of it, and when its parameters have changed. It is asked where the configuration is made and where
prompts are read. Nothing here imports torch: the module brings it.
"""

from __future__ import annotations

import threading
from collections.abc import Iterator
from typing import Any

from actorllm.errors import ConfigError, UnsupportedModelError

TAKES_THE_PLACE_OF = {
    "load_format": "auto",
    "quantization": None,
    "runner": ("auto", "generate"),
    "convert": ("auto", "none"),
    "model_impl": ("auto", "transformers"),
    "device": ("auto", "cpu"),
    "name": None,
    "hf_overrides": None,
    "revision": None,
    "download_dir": None,
    "hf_token": None,
}
"""Arguments of the engine that a module leaves nothing to decide for, and the values at which they agree with it."""


class LentModule:
    """A module of the application, with its weights where they are."""

    def __init__(self, module: Any) -> None:
        """Raises ConfigError for what is no model of transformers, UnsupportedModelError for one that cannot be run here."""
        if not all(hasattr(module, name) for name in ("config", "set_attn_implementation", "named_modules")):
            raise ConfigError(
                f"module={type(module).__name__} must be a decoder of transformers (a PreTrainedModel); take it out of what is "
                f"around it (model.module, model.get_base_model())"
            )
        self.module = module
        parameters = list(module.parameters())
        devices = sorted({parameter.device.type for parameter in parameters})
        if devices != ["cpu"]:
            where = " and ".join(devices) or "nowhere"
            raise UnsupportedModelError(
                f"module={self.architecture}: its parameters are on {where}; only modules on the CPU are run"
            )
        if self.tree.get("quantization_config") is not None or not all(p.is_floating_point() for p in parameters):
            raise UnsupportedModelError(f"module={self.architecture}: quantized weights are not supported")
        # A parameter that takes the place of another is found here, too.
        self._holders: list[dict[str, Any]] = [m._parameters for m in module.modules() if m._parameters]
        self._lock = threading.Lock()
        self._seen: tuple[int, ...] = ()
        self._version = 0

    @property
    def architecture(self) -> str:
        """The class of transformers that it is, or is made from."""
        for kind in type(self.module).__mro__:
            if kind.__module__.startswith("transformers."):
                return kind.__name__
        return type(self.module).__name__

    @property
    def dtype(self) -> str:
        """Of its parameters, as torch calls it."""
        return str(self.module.dtype).removeprefix("torch.")

    @property
    def tree(self) -> dict[str, Any]:
        """What its config.json would say."""
        tree: dict[str, Any] = self.module.config.to_dict()
        return tree | {"architectures": [self.architecture], "dtype": self.dtype}

    @property
    def generation_tree(self) -> dict[str, Any] | None:
        """What its generation_config.json would say."""
        config = getattr(self.module, "generation_config", None)
        tree: dict[str, Any] | None = None if config is None else config.to_diff_dict()
        return tree

    def check_arguments(self, given: dict[str, Any]) -> None:
        """Raises ConfigError for arguments of an engine that do not go together with a module."""
        if given["topology"] != "inline":
            raise ConfigError(
                f"module={self.architecture}: topology={given['topology']!r} would need a copy of the weights in another "
                f"process; use topology='inline'"
            )
        for name, accepted in TAKES_THE_PLACE_OF.items():
            values = accepted if isinstance(accepted, tuple) else (accepted,)
            if given[name] not in values:
                shown = name if name == "hf_token" else f"{name}={given[name]!r}"  # what is raised may end in a log
                raise ConfigError(
                    f"module={self.architecture}: {shown} does not go together with it; leave it at {values[0]!r}"
                )
        if str(given["dtype"]).removeprefix("torch.") not in ("auto", self.dtype):
            raise ConfigError(f"dtype={given['dtype']!r}: the module's parameters are {self.dtype}; leave it at 'auto'")

    def version(self) -> int:
        """Another number than before where a parameter has changed, or lies elsewhere, since the last call. Thread-safe.

        Changes through `parameter.data` are not seen, as torch does not count them.
        """
        seen = tuple(self._signs())
        with self._lock:
            if seen != self._seen:
                self._seen = seen
                self._version += 1
            return self._version

    def salted(self, salt: str | None) -> str:
        """The salt of a prompt's cached blocks: those of other weights are not found."""
        return f"{salt or ''}\0weights {self.version()}"

    def _signs(self) -> Iterator[int]:
        for holder in self._holders:
            for parameter in list(holder.values()):
                if parameter is not None:
                    yield parameter.data_ptr()
                    yield 0 if parameter.is_inference() else parameter._version
