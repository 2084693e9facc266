"""The classes of the argument `logits_processors`, as paths by which a worker finds them (`types.import_path`)."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from actorllm.errors import ConfigError, shown
from actorllm.types.import_path import MAIN, load_object, path_of
from actorllm.types.logits_processors.interface import LogitsProcessor

MAX_PROCESSORS = 64


def paths_of(given: Any) -> tuple[str, ...]:
    """The argument `logits_processors` as paths. Raises ConfigError for what names no class."""
    if given is None:
        return ()
    if isinstance(given, str) or not isinstance(given, Sequence) or len(given) > MAX_PROCESSORS:
        raise ConfigError(
            f"logits_processors={shown(given)} must be a list of at most {MAX_PROCESSORS} classes or paths 'module:Class'"
        )
    return tuple(_path_of(one) for one in given)


def _path_of(given: Any) -> str:
    if isinstance(given, str):
        if given.count(":") != 1 or not all(given.split(":")):
            raise ConfigError(f"logits_processors: {shown(given)} must be written as 'module:Class'")
        return given
    if not isinstance(given, type) or not issubclass(given, LogitsProcessor):
        raise ConfigError(
            f"logits_processors: {shown(given)} must be a subclass of LogitsProcessor or AdapterLogitsProcessor, or a path "
            f"'module:Class'"
        )
    name, path = given.__qualname__, path_of(given)
    if path is None:
        raise ConfigError(
            f"logits_processors: {name} must be defined at the top of its module, where a worker finds it"
        )
    if given.__module__ == MAIN:
        raise ConfigError(
            f"logits_processors: the program that defines {name} is run again in the worker; put what it does behind "
            f'`if __name__ == "__main__":`, or {name} into a module of its own'
        )
    return path


def load(path: str) -> type[LogitsProcessor]:
    """The class. Raises ConfigError with what is wrong."""
    try:
        found = load_object(path)
    except Exception as error:  # whatever the application's module raises
        hint = "; the worker is another program: define the class in a module" if path.startswith("__main__:") else ""
        raise ConfigError(
            f"logits_processors: {path!r} cannot be loaded: {type(error).__name__}: {error}{hint}"
        ) from error
    if not isinstance(found, type) or not issubclass(found, LogitsProcessor):
        raise ConfigError(f"logits_processors: {path!r} is no subclass of LogitsProcessor or AdapterLogitsProcessor")
    return found
