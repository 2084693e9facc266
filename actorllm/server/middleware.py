"""`middleware_named`: layers around the server that its operator brings, by import path."""

from __future__ import annotations

import importlib
import inspect
from functools import partial
from typing import Any

from starlette.middleware.base import BaseHTTPMiddleware

from actorllm.errors import ConfigError


def middleware_named(path: Any) -> Any:
    """What `add_middleware` takes. path: 'module.name' or 'module:name', of a class of ASGI, or of an asynchronous function of a
    request and of what calls the next layer. Raises ConfigError."""
    if not isinstance(path, str):
        raise ConfigError(f"middleware={path!r:.120} must be an import path like 'module.name'")
    module, _, name = path.partition(":") if ":" in path else path.rpartition(".")
    if not (module and name):
        raise ConfigError(f"middleware={path!r:.120} must be an import path like 'module.name'")
    try:
        found = getattr(importlib.import_module(module), name)
    except Exception as error:  # whatever the module raises is the operator's
        raise ConfigError(f"middleware={path!r:.120} cannot be loaded: {type(error).__name__}: {error}") from error
    if inspect.isclass(found):
        return found
    if inspect.iscoroutinefunction(found):
        return partial(BaseHTTPMiddleware, dispatch=found)
    raise ConfigError(f"middleware={path!r:.120} must be a class, or an asynchronous function of request and next")
