"""Requests that are data of a plug-in (`io_processor_plugin`): how the plug-in is found, and how it is called.

The plug-in makes prompts of the data and an answer of their vectors; between the two are ordinary requests for vectors. Called
by the front doors and by the server.
"""

from __future__ import annotations

import inspect
import threading
from collections.abc import Mapping, Sequence
from importlib.metadata import EntryPoint, entry_points
from typing import Any

from actorllm.config import EngineConfig
from actorllm.errors import ConfigError, InvalidParameterError, nearest_name
from actorllm.intake.tokenization import Prompt, PromptReader
from actorllm.types.io_processor import IOProcessor
from actorllm.types.params import PoolingParams
from actorllm.types.plugin_file import class_in, plugin_module
from actorllm.types.pooling_outputs import PoolingOutput, PoolingRequestOutput

GROUP = "vllm.io_processor_plugins"
"""The entry points of installed plug-ins: functions that return the path of a class, 'package.module.Class'."""
TASK = "plugin"
"""What a task is called that the plug-in leaves to the engine, and `encode` with data."""


class PromptRenderer:
    """What a plug-in is given of the engine's tokenizer: vLLM's renderer, as far as plug-ins use it."""

    def __init__(self, config: EngineConfig, prompts: PromptReader) -> None:
        self.config = config
        self._prompts = prompts

    @property
    def tokenizer(self) -> Any:
        """As `get_tokenizer`."""
        return self.get_tokenizer()

    def get_tokenizer(self) -> Any:
        """The tokenizer as transformers has it. Raises InvalidPromptError: the engine has none (skip_tokenizer_init)."""
        return self._prompts.transformers_tokenizer


class PluginData:
    """The plug-in of an engine. Its methods call that of the plug-in, and raise what it raises."""

    def __init__(self, processor: IOProcessor[Any, Any]) -> None:
        self.processor = processor
        self._lock = threading.Lock()
        """Plug-ins keep notes from one call to the next, so no other request comes between."""

    @classmethod
    def of(cls, config: EngineConfig, prompts: PromptReader) -> PluginData | None:
        """None: the engine has none. Raises ConfigError."""
        name = config.model.io_processor_plugin
        if name is None:
            return None
        found = _plugin_class(name)
        renderer = PromptRenderer(config, prompts)
        try:
            arguments = (config, renderer) if _takes(found, 2) else (config,)
            return cls(found(*arguments))
        except Exception as error:  # whatever the plug-in raises is the caller's
            raise ConfigError(f"io_processor_plugin={name!r:.120}: {type(error).__name__}: {error}") from error

    def prompts_of(self, raw: Any) -> list[Prompt]:
        """As a list: what `pre_process` has given may be one prompt. Raises ValueError: there is none."""
        is_one = isinstance(raw, str | bytes | Mapping) or (
            isinstance(raw, Sequence) and bool(raw) and all(isinstance(token, int) for token in raw)
        )
        prompts = [raw] if is_one else list(raw)
        if not prompts:
            raise ValueError("the plug-in made no prompt of the data")
        return prompts

    def params_for(self, prompts: Sequence[Prompt], given: PoolingParams | None) -> list[PoolingParams]:
        """How each prompt becomes a vector; where the plug-in says no task it is the first of the model."""
        merged = [self.processor.merge_pooling_params(None if given is None else given.clone()) for _ in prompts]
        for params in merged:
            if not isinstance(params, PoolingParams):
                raise RuntimeError(f"merge_pooling_params must return PoolingParams, not {type(params).__name__}")
            if params.task == TASK:
                params.task = None
        return merged

    def asked(
        self, data: object, params: PoolingParams | None, request_id: str | None = None
    ) -> tuple[list[Prompt], list[PoolingParams]]:
        """The prompts of a request, and how each becomes a vector."""
        with self._lock:
            raw = self.processor.pre_process(self.processor.parse_data(data), request_id)
            prompts = self.prompts_of(raw)
            return prompts, self.params_for(prompts, params)

    def made(self, outputs: Sequence[PoolingRequestOutput[PoolingOutput]], request_id: str | None = None) -> Any:
        """What the plug-in makes of the vectors of a request's prompts."""
        with self._lock:
            return self.processor.post_process(outputs, request_id)

    def answered(
        self, outputs: Sequence[PoolingRequestOutput[PoolingOutput]], request_id: str | None = None
    ) -> PoolingRequestOutput[Any]:
        """The same as one output. Of a request that has failed it is nothing, with its error."""
        failed = next((output for output in outputs if output.error is not None), None)
        if failed is not None:
            name = request_id or ""
            return PoolingRequestOutput(name, None, [], 0, finished=True, error=failed.error, metrics=failed.metrics)
        made = self.made(outputs, request_id)
        return PoolingRequestOutput(request_id or "", made, [], getattr(made, "num_cached_tokens", 0), finished=True)


def data_of(prompts: object, task: str | None) -> list[Any] | None:
    """The data of each request of a call of `encode`; None: it has prompts.

    Raises InvalidParameterError: task says that they are data, and they are not.
    """
    several = list(prompts) if isinstance(prompts, list | tuple) else [prompts]
    found = [prompt["data"] for prompt in several if isinstance(prompt, Mapping) and prompt.get("data") is not None]
    if several and len(found) == len(several):
        return found
    if task == TASK:
        raise InvalidParameterError(
            f"pooling_task={TASK!r} is for data of a plug-in: give {{'data': ...}}, or a list of such mappings"
        )
    return None


def _plugin_class(name: str) -> type[IOProcessor[Any, Any]]:
    option = f"io_processor_plugin={name!r:.120}"
    try:
        module, _, attribute = (name if ":" in name else _path_of(name)).rpartition(":")
        found = class_in(plugin_module(module), attribute)
    except ConfigError:
        raise
    except Exception as error:  # whatever the module raises is the caller's
        raise ConfigError(f"{option} cannot be loaded: {type(error).__name__}: {error}") from error
    if not (isinstance(found, type) and issubclass(found, IOProcessor)):
        raise ConfigError(f"{option} must be a subclass of IOProcessor ({IOProcessor.__module__})")
    return found


def _path_of(name: str) -> str:
    """'module:Class' of an installed plug-in. Raises ConfigError, and what it raises."""
    installed = {entry.name: entry for entry in entry_points(group=GROUP)}
    if name not in installed:
        there = f"installed are {', '.join(map(repr, sorted(installed)))}" if installed else "none is installed"
        raise ConfigError(
            f"io_processor_plugin={name!r:.120} is not known{nearest_name(name, installed)}; {there}; or give a class as "
            f"'module:Class'"
        )
    path = _loaded(installed[name])()
    module, _, attribute = str(path).rpartition(".")
    return f"{module}:{attribute}"


def _loaded(entry: EntryPoint) -> Any:
    found: Any = plugin_module(entry.module)
    for attribute in filter(None, (entry.attr or "").split(".")):
        found = getattr(found, attribute)
    return found


def _takes(found: type, number: int) -> bool:
    try:
        inspect.signature(found).bind(*range(number))
    except TypeError:
        return False
    return True
