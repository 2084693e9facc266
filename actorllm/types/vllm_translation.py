"""Arguments of vLLM that say what other arguments say here: `task`, `scheduler_cls`, `structured_outputs_config`.

`translate` replaces them in the arguments of an engine, before the configuration is made. Standard library only.
"""

from __future__ import annotations

import warnings
from collections.abc import Mapping
from typing import Any

from actorllm.errors import ConfigError, nearest_name
from actorllm.types.options import DEFAULTS


def translate(given: dict[str, Any]) -> None:
    """Puts what these say where it is looked for.

    Arguments:
        given: all arguments of an engine; changed.

    Raises:
        ConfigError: a value is not known, or contradicts the argument that takes its place.
    """
    _translate_task(given)
    _translate_formats(given)
    _translate_scheduler(given)
    given["structured_outputs_config"] = _structured_outputs(given)


TASKS: dict[str, dict[str, str]] = {
    "auto": {},
    "generate": {"runner": "generate"},
    "embed": {"runner": "pooling", "convert": "embed"},
    "embedding": {"runner": "pooling", "convert": "embed"},
    "score": {"runner": "pooling"},
    "classify": {"runner": "pooling", "convert": "classify"},
    "reward": {"runner": "pooling"},
}
"""What vLLM's older argument `task` says in those that took its place."""


def _translate_task(given: dict[str, Any]) -> None:
    """Of one that is said twice, both must say the same."""
    task = given["task"]
    if task is None:
        return
    if task not in TASKS:
        raise ConfigError(f"task={task!r:.80} is not supported; use one of {', '.join(map(repr, TASKS))}")
    for name, value in TASKS[task].items():
        if given[name] not in ("auto", value):
            raise ConfigError(
                f"task={task!r} says {name}={value!r}, and {name}={given[name]!r} is given; leave task out"
            )
        given[name] = value


READERS = ("hf", "fastsafetensors", "runai_streamer", "instanttensor")
"""Ways of vLLM's to read the same files."""


def _translate_formats(given: dict[str, Any]) -> None:
    """Values that ask for what is done anyway, or for the same bytes by another way."""
    if given["load_format"] in READERS:
        told = f"load_format={given['load_format']!r} is taken and has no effect: weights are mapped from their files"
        warnings.warn(told, stacklevel=6)
        given["load_format"] = "auto"
    if given["kv_cache_dtype"] is not None and given["kv_cache_dtype"] == given["dtype"] != "auto":
        given["kv_cache_dtype"] = "auto"


SCHEDULERS = ("Scheduler", "AsyncScheduler")
"""Names of vLLM's own, which a program may give where it means the default."""


def _translate_scheduler(given: dict[str, Any]) -> None:
    """vLLM's name for the class that decides what runs next, which is a policy here."""
    wanted = given["scheduler_cls"]
    if wanted is None:
        return
    path = f"{wanted.__module__}:{wanted.__qualname__}" if isinstance(wanted, type) else wanted
    if not isinstance(path, str) or not path:
        raise ConfigError(f"scheduler_cls={wanted!r:.80} must be a class or its path 'module:Class'")
    module, _, name = path.replace(":", ".").rpartition(".")
    if module.startswith("vllm.") and name in SCHEDULERS:
        return
    if given["scheduling_policy"] not in (DEFAULTS["scheduling_policy"], f"{module}:{name}"):
        raise ConfigError("scheduler_cls and scheduling_policy are one argument here; leave scheduler_cls out")
    given["scheduling_policy"] = f"{module}:{name}"


STRUCTURED_OUTPUTS = (
    "disable_any_whitespace",
    "disable_additional_properties",
    "enable_in_reasoning",
    "disable_fallback",
)
BACKENDS = ("auto", "guidance", "xgrammar", "outlines", "lm-format-enforcer")
"""Of structured outputs in vLLM. Here one backend compiles every grammar."""


def _structured_outputs(given: dict[str, Any]) -> dict[str, bool]:
    """What holds for every structured output; a parser of thoughts that is named there counts as that argument."""
    told = {} if given["structured_outputs_config"] is None else given["structured_outputs_config"]
    if not isinstance(told, Mapping):
        raise ConfigError(f"structured_outputs_config={told!r:.80} must be a mapping")
    known = (*STRUCTURED_OUTPUTS, "backend", "reasoning_parser", "reasoning_parser_plugin")
    for name, value in told.items():
        if name not in known:
            raise ConfigError(f"structured_outputs_config: there is no {name!r:.80}{nearest_name(str(name), known)}")
        if name in STRUCTURED_OUTPUTS and not isinstance(value, bool):
            raise ConfigError(f"structured_outputs_config: {name}={value!r:.80} must be True or False")
    if told.get("backend", "auto") not in BACKENDS:
        raise ConfigError(
            f"structured_outputs_config: backend={told['backend']!r:.80} is none of {', '.join(BACKENDS)}"
        )
    for name in ("reasoning_parser", "reasoning_parser_plugin"):
        if value := told.get(name):
            if given[name] not in ("", None, value):
                raise ConfigError(
                    f"{name} is given twice, and differs in structured_outputs_config; leave it out there"
                )
            given[name] = value
    return {name: True for name in STRUCTURED_OUTPUTS[:3] if told.get(name)}
