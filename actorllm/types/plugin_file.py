"""Modules and files of users with parsers in them: how they are imported, and how a class in them is found.

A file that is written for vLLM imports vLLM's base classes. In such a module, and nowhere else, `import vllm` and
`from vllm.reasoning import ...` mean `actorllm.compat`, whether vLLM is installed or not. So nothing of the process changes.
Called by `named_class`, and by the command line for the options of plug-in files.
"""

from __future__ import annotations

import builtins
import functools
import importlib
import importlib.util
import sys
from collections.abc import Container, Mapping, Sequence
from importlib.machinery import SourceFileLoader
from pathlib import Path
from types import ModuleType
from typing import Any

from actorllm.errors import ConfigError

THEIRS = "vllm"
OURS = "actorllm.compat"
NAMES = "PLUGIN_NAMES"
"""The attribute of a class that has the names under which it was registered."""


def plugin_module(name: str) -> ModuleType:
    """The module of this name. One that is not imported yet finds our names where it imports vLLM's, and so do the modules of its
    package that it imports. Raises what it raises.
    """
    if name in sys.modules:
        return sys.modules[name]
    package, _, own = name.rpartition(".")
    if package:
        plugin_module(package)
        if name in sys.modules:  # the package has imported it
            return sys.modules[name]
    spec = importlib.util.find_spec(name)
    if spec is None:
        raise ModuleNotFoundError(f"No module named {name!r}", name=name)
    if not isinstance(spec.loader, SourceFileLoader):
        return importlib.import_module(name)
    module = importlib.util.module_from_spec(spec)
    # Functions take the builtins of the module they are defined in: an import within a function is covered, too.
    importing = functools.partial(_imported, name.partition(".")[0])
    vars(module)["__builtins__"] = {**vars(builtins), "__import__": importing}
    sys.modules[name] = module
    try:
        spec.loader.exec_module(module)
    except BaseException:
        del sys.modules[name]
        raise
    if package:
        setattr(sys.modules[package], own, module)
    return module


def _imported(
    top: str,
    name: str,
    globals: Mapping[str, Any] | None = None,
    locals: Mapping[str, Any] | None = None,
    fromlist: Sequence[str] | None = (),
    level: int = 0,
) -> ModuleType:
    """`__import__` of such a module. top: the outermost package of it."""
    absolute = importlib.util.resolve_name("." * level + name, (globals or {})["__package__"]) if level else name
    outermost = absolute.partition(".")[0]
    if outermost == top:
        _import_as_plugin(absolute, fromlist or ())
    if level or outermost != THEIRS:
        return builtins.__import__(name, globals, locals, fromlist or (), level)
    try:
        found = builtins.__import__(OURS + name.removeprefix(THEIRS), globals, locals, fromlist or (), 0)
    except ModuleNotFoundError as error:
        raise ModuleNotFoundError(f"actorllm.compat has no counterpart of {name}", name=name) from error
    return found if fromlist else importlib.import_module(OURS)


def _import_as_plugin(name: str, fromlist: Sequence[str]) -> None:
    """The module, and those modules of it that are named in `from module import ...`."""
    module = plugin_module(name)
    for item in fromlist if hasattr(module, "__path__") else ():
        if item != "*" and not hasattr(module, item) and importlib.util.find_spec(f"{name}.{item}") is not None:
            plugin_module(f"{name}.{item}")


def class_in(module: ModuleType, name: str) -> Any:
    """What the module calls so, or has registered under this name. Raises AttributeError."""
    for value in vars(module).values():
        if isinstance(value, type) and name in vars(value).get(NAMES, ()):
            return value
    return getattr(module, name)


def parser_of_file(option: str, path: str, name: str | None, known: Container[str]) -> str | None:
    """'module:Class' for a class of a plug-in file, which every process of this engine can then import; other names as they are.

    option: that has the path, as errors call it. name: of a parser. known: names of parsers of the package, which a file may
    define anew. Raises ConfigError.
    """
    file = Path(path).resolve()
    if not file.is_file() or file.suffix != ".py":
        raise ConfigError(f"{option} {path:.200} must be a Python file")
    if name is None or ":" in name:
        return name
    if str(file.parent) not in sys.path:
        sys.path.append(str(file.parent))
    found = importlib.util.find_spec(file.stem) if file.stem.isidentifier() else None
    if found is None or found.origin is None or Path(found.origin).resolve() != file:
        raise ConfigError(f"{option} {path:.200}: another module is called {file.stem!r}; give the file another name")
    if name in known:
        try:
            class_in(plugin_module(file.stem), name)
        except AttributeError:
            return name
        except Exception as error:  # whatever the module raises is the caller's
            raise ConfigError(f"{option} {path:.200} cannot be loaded: {type(error).__name__}: {error}") from error
    return f"{file.stem}:{name}"
