"""`named_class`: a class that users choose by a name, or bring as 'module:Class'."""

from __future__ import annotations

import importlib
from collections.abc import Iterable, Mapping
from typing import TypeVar

from actorllm.errors import ConfigError, nearest_name
from actorllm.types.plugin_file import class_in, plugin_module

T = TypeVar("T")


def named_class(
    option: str, name: str, base: type[T], paths: Mapping[str, str], others: Iterable[str] = (), adapter: str = ""
) -> type[T]:
    """A subclass of `base`.

    option: what errors call the argument that has the name. paths: 'module:Class' by name. others: names that the caller
    knows besides, which errors list first. adapter: 'module:function', which makes a subclass of `base` of a class with vLLM's
    interface, and None of any other; empty: there is no such interface. Raises ConfigError for an unknown name, and for a class
    that cannot be had.
    """
    module, _, attribute = paths.get(name, name).partition(":")
    if not attribute:
        known = [*others, *paths]
        raise ConfigError(
            f"{option}={name!r:.120} is not known{nearest_name(name, known)}; there are {', '.join(map(repr, known))}, or a "
            f"class as 'module:Class'"
        )
    try:
        if name in paths:
            found = getattr(importlib.import_module(module), attribute)
        else:
            found = class_in(plugin_module(module), attribute)
    except ModuleNotFoundError as error:
        told = f"{option}={name!r:.120} cannot be loaded: {type(error).__name__}: {error}"
        if (error.name or "").partition(".")[0] == "vllm":
            told += f"; it is written for vLLM: derive the class from {base.__name__} of {base.__module__} instead"
        raise ConfigError(told) from error
    except Exception as error:  # whatever the module raises is the caller's
        raise ConfigError(f"{option}={name!r:.120} cannot be loaded: {type(error).__name__}: {error}") from error
    if adapter and isinstance(found, type) and not issubclass(found, base):
        home, _, function = adapter.partition(":")
        found = getattr(importlib.import_module(home), function)(found) or found
    if not (isinstance(found, type) and issubclass(found, base)):
        raise ConfigError(f"{option}={name!r:.120} must be a subclass of {base.__name__} ({base.__module__})")
    return found
