"""`Registry`: what users choose by name, built in, registered by them, or given as 'module:Class'.

One for scheduling policies and one for admission policies. Another process knows only what is built in: `path` is what it
is told.
"""

from __future__ import annotations

import importlib
import inspect
from collections.abc import Mapping
from typing import Any

from actorllm.errors import ConfigError, nearest_name
from actorllm.types.import_path import is_import_path


class Registry:
    """kind: what an error calls one of them."""

    def __init__(self, kind: str, built_in: Mapping[str, str]) -> None:
        self.names = dict(built_in)
        """'module:Class' by name."""
        self._kind = kind
        self._built_in = frozenset(built_in)

    def register(self, name: str, given: str | type[Any]) -> None:
        """Give 'module:Class', or a class at the top of its module, a name. Raises ConfigError if it is taken."""
        path = given if isinstance(given, str) else f"{given.__module__}:{given.__qualname__}"
        if path.count(":") != 1 or "<" in path or not name or ":" in name:
            raise ConfigError(
                f"{self._kind} {name!r} must be registered under a name without ':', as 'module:Class' or a class at the "
                f"top of its module, not as {path!r}"
            )
        if self.names.get(name, path) != path:
            raise ConfigError(f"{self._kind} {name!r} exists already: {self.names[name]}")
        self.names[name] = path

    def path(self, name: str) -> str:
        """What another process knows it by: names that were registered mean nothing there."""
        return name if name in self._built_in else self.names.get(name, name)

    def build(self, name: str, **offered: Any) -> Any:
        """A fresh object, by name or as 'module:Class'. Raises ConfigError naming what is wrong.

        offered: arguments for constructors that have them; those that are None are not.
        """
        path = self.names.get(name, name)
        module_name, _, class_name = path.partition(":")
        if not is_import_path(path):
            raise ConfigError(
                f"there is no {self._kind} {name!r}{nearest_name(name, self.names)}; built in: {', '.join(self.names)}; "
                f"your own is named as 'module:Class'"
            )
        try:
            cls = getattr(importlib.import_module(module_name), class_name)
            given = {key: value for key, value in offered.items() if value is not None}
            return cls(**{key: given[key] for key in given if key in inspect.signature(cls).parameters})
        except (Exception, SystemExit) as error:  # whatever the module or the constructor raises is the caller's
            where = " or ".join(
                ["it must be a class that is built without arguments", *(f"with {key}=" for key in offered)]
            )
            if module_name == "__main__":
                where = "with topology='process' the scheduler is another program: use topology='inline', or a module of its own"
            raise ConfigError(
                f"{self._kind} {name!r} cannot be loaded: {type(error).__name__}: {error}; {where}"
            ) from error
