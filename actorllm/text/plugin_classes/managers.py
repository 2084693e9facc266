"""`PluginManager`: how vLLM's plug-in files give their classes names.

A name is noted on the class itself (`types.plugin_file`), so nothing is kept of a file that is not used.
"""

from __future__ import annotations

import importlib
from collections.abc import Callable, Sequence
from typing import Any, TypeVar

from actorllm.types.plugin_file import NAMES

T = TypeVar("T", bound=type)


class PluginManager:
    """`register_module`, as a decorator or called."""

    @classmethod
    def register_module(
        cls, name: str | Sequence[str] | None = None, force: bool = True, module: type | None = None
    ) -> Any:
        """The class, or a decorator of it.

        Arguments:
            name: one, or several; None: that of the class.
            force: without effect.
            module: the class; None: it is decorated.
        """
        if module is not None:
            return _noted(module, name)

        def decorator(decorated: T) -> T:
            return _noted(decorated, name)

        made: Callable[[T], T] = decorator
        return made

    @classmethod
    def register_lazy_module(cls, name: str, module_path: str, class_name: str) -> None:
        """Name a class of another module, which is imported now.

        Arguments:
            name: the new one.
            module_path: the module.
            class_name: the class in it.
        """
        _noted(getattr(importlib.import_module(module_path), class_name), name)


class ToolParserManager(PluginManager):
    """Of parsers of tool calls."""


class ReasoningParserManager(PluginManager):
    """Of parsers of thoughts."""


def _noted(cls: T, name: str | Sequence[str] | None) -> T:
    names = [cls.__name__] if name is None else [name] if isinstance(name, str) else list(name)
    setattr(cls, NAMES, (*vars(cls).get(NAMES, ()), *names))
    return cls
