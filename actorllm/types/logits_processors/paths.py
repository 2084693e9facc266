"""How a worker finds a class of the application: 'module:Class', or 'file.py:Class' for a class of the main program.

The main program has no name by which another process could import it. So its file is run there once more, under the name
MAIN, as `multiprocessing` does. What it does behind `if __name__ == "__main__"` is not done again.
"""

from __future__ import annotations

import importlib
import importlib.util
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from actorllm.errors import ConfigError, shown
from actorllm.types.logits_processors.interface import LogitsProcessor

MAIN = "__actorllm_main__"
"""What the main program of the application is called in a worker."""

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
    name = given.__qualname__
    if "<" in name:
        raise ConfigError(
            f"logits_processors: {name} must be defined at the top of its module, where a worker finds it"
        )
    if given.__module__ == MAIN:
        raise ConfigError(
            f"logits_processors: the program that defines {name} is run again in the worker; put what it does behind "
            f'`if __name__ == "__main__":`, or {name} into a module of its own'
        )
    file = getattr(sys.modules.get("__main__"), "__file__", None)
    if given.__module__ == "__main__" and file is not None:
        return f"{Path(file).resolve()}:{name}"
    return f"{given.__module__}:{name}"


def load(path: str) -> type[LogitsProcessor]:
    """The class. Raises ConfigError with what is wrong."""
    module_name, _, class_name = path.rpartition(":")
    try:
        found: Any = _main_module(module_name) if module_name.endswith(".py") else importlib.import_module(module_name)
        for name in class_name.split("."):
            found = getattr(found, name)
    except Exception as error:  # whatever the application's module raises
        hint = "; the worker is another program: define the class in a module" if module_name == "__main__" else ""
        raise ConfigError(
            f"logits_processors: {path!r} cannot be loaded: {type(error).__name__}: {error}{hint}"
        ) from error
    if not isinstance(found, type) or not issubclass(found, LogitsProcessor):
        raise ConfigError(f"logits_processors: {path!r} is no subclass of LogitsProcessor or AdapterLogitsProcessor")
    return found


def _main_module(file: str) -> Any:
    main = sys.modules.get("__main__")
    if getattr(main, "__file__", None) is not None and Path(str(main.__file__)).resolve() == Path(file):  # type: ignore[union-attr]
        return main
    known = sys.modules.get(MAIN)
    if known is not None and known.__file__ == file:
        return known
    spec = importlib.util.spec_from_file_location(MAIN, file)
    if spec is None or spec.loader is None:
        raise ImportError(f"{file!r} is no Python program")
    module = sys.modules[MAIN] = importlib.util.module_from_spec(spec)
    try:
        spec.loader.exec_module(module)
    except BaseException:
        del sys.modules[MAIN]
        raise
    return module
