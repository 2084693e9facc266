"""How a worker finds what an application defines: 'module:name', or 'file.py:name' for what the main program defines.

The main program has no name by which another process could import it. So its file is run there once more, under the name
MAIN, as `multiprocessing` does. What it does behind `if __name__ == "__main__"` is not done again.
"""

from __future__ import annotations

import importlib
import importlib.util
import re
import sys
from pathlib import Path
from typing import Any

from actorllm.errors import ConfigError

MAIN = "__actorllm_main__"
"""What the main program of the application is called in a worker."""

MAX_PATH = 1000
"""Characters of a path."""

_NAME = r"[^\W\d]\w*(?:\.[^\W\d]\w*)*"
_PATH = re.compile(rf"(?:{_NAME}|[^:\0]+\.py):{_NAME}")


def is_import_path(text: object) -> bool:
    """Whether it is written as a path."""
    return isinstance(text, str) and len(text) <= MAX_PATH and _PATH.fullmatch(text) is not None


def with_colon(text: str) -> str:
    """A path that may be written as vLLM writes it, 'module.Class', in the form 'module:Class'; all else as it is."""
    if ":" in text or "." not in text:
        return text
    module, _, name = text.rpartition(".")
    return f"{module}:{name}"


def path_of(defined: Any) -> str | None:
    """Under which a worker finds a class or a function; None: under none, since it is not at the top of its module."""
    name, module = getattr(defined, "__qualname__", None), getattr(defined, "__module__", None)
    if not isinstance(name, str) or not isinstance(module, str) or "<" in name:
        return None
    file = getattr(sys.modules.get("__main__"), "__file__", None)
    if module == "__main__" and file is not None:
        return f"{Path(file).resolve()}:{name}"
    return f"{module}:{name}"


def load_object(path: str) -> Any:
    """What is behind a path. Raises whatever its module raises, AttributeError and ImportError."""
    module, _, names = path.rpartition(":")
    found: Any = main_module(module) if module.endswith(".py") else importlib.import_module(module)
    for name in names.split("."):
        found = getattr(found, name)
    return found


def load_class(option: str, path: str) -> type:
    """A class behind a path. Raises ConfigError, which names the option."""
    try:
        found = load_object(path)
    except Exception as error:  # whatever the application's module raises
        raise ConfigError(f"{option}={path!r} cannot be loaded: {type(error).__name__}: {error}") from error
    if not isinstance(found, type):
        raise ConfigError(f"{option}={path!r} is {type(found).__name__} and no class")
    return found


def main_module(file: str) -> Any:
    """The main program of the application, as a module of this process."""
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
