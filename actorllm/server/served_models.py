"""`ServedModels`: what requests may call the model, and which of these names are adapters'.

The engine's model has one name or several, and they never change. Each adapter has one more (`--lora-modules`), and names of
adapters come and go while the server runs where that is allowed (`adapter_routes`). A name belongs to one API process.
Used by `ServerState` and by batches, which are read without a server.
"""

from __future__ import annotations

import itertools
import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, TypeAlias

from actorllm.errors import ActorLLMError, ConfigError, shown
from actorllm.server.envelope import ApiError
from actorllm.types.adapter_folder import check_files
from actorllm.types.lora_request import LoRARequest

MAX_ADAPTERS = 4096
"""Names of adapters at a time."""
MAX_NAMED = 8
"""Names that an error lists."""

LoRAModule: TypeAlias = str | Mapping[str, Any]
"""'name=path', or a JSON object with name, path and, if it is to be shown, base_model_name; as text, or read."""

_FIELDS = {"name": "lora_name", "path": "lora_path", "base_model_name": "base_model_name"}


class ServedModels:
    """See the module docstring."""

    def __init__(
        self, names: Sequence[str], lora_modules: Sequence[LoRAModule] | None = None, *, adapts: bool = False
    ) -> None:
        """names: of the engine's model; the first is in answers to those that call it nothing. adapts: the engine takes adapters.

        Raises ConfigError.
        """
        self.names = tuple(names)
        self.adapters: dict[str, LoRARequest] = {}
        self._numbers = itertools.count(1)
        if lora_modules and not adapts:
            raise ConfigError(
                "lora_modules: this engine takes no adapters; build it with enable_lora=True (--enable-lora)"
            )
        for module in lora_modules or ():
            given = _module_of(module)
            try:
                adapter = self.new_adapter(**given)
                check_files(Path(adapter.lora_path))
                self.add(adapter)
            except ActorLLMError as error:
                raise ConfigError(f"lora_modules: {error}") from error
            except ApiError as error:
                raise ConfigError(f"lora_modules: {error.message}") from error

    def check(self, name: str | None, tag: str = "") -> str:
        """What answers call the model: as the request did. tag: what may stand behind its name. Raises ApiError for another one."""
        if not name:
            return self.names[0]
        if self._own_name(name, tag) is None:
            known = [*self.names, *itertools.islice(self.adapters, MAX_NAMED)]
            more = len(self.names) + len(self.adapters) - len(known)
            listed = ", ".join(map(repr, known)) + (f" and {more} more" if more else "")
            raise ApiError(404, f"model={name!r:.120} does not exist; this server has {listed}", "model")
        return name

    def arguments_of(self, name: str, tag: str = "") -> dict[str, Any]:
        """What the engine is told of a request that calls the model so. name, tag: as `check` has let them pass."""
        adapter = self.adapters.get(self._own_name(name, tag) or "")
        return {} if adapter is None else {"lora_request": adapter}

    def new_adapter(self, **given: Any) -> LoRARequest:
        """An adapter with a number of its own, or with that of the adapter of its name; `add` makes it known.

        given: fields of `LoRARequest`. Raises InvalidParameterError.
        """
        replaced = self.adapters.get(given["lora_name"]) if isinstance(given["lora_name"], str) else None
        number = next(self._numbers) if replaced is None else replaced.lora_int_id
        return LoRARequest(lora_int_id=number, **given)

    def add(self, adapter: LoRARequest, *, replaces: bool = False) -> None:
        """Let requests name it. replaces: another adapter may have had the name. Raises ApiError."""
        self.check_addition(adapter, replaces=replaces)
        self.adapters[adapter.lora_name] = adapter

    def check_addition(self, adapter: LoRARequest, *, replaces: bool = False) -> None:
        """Raises ApiError for what `add` does not take."""
        name = adapter.lora_name
        if name in self.names:
            raise ApiError(400, f"the name {name!r} is that of the model itself; give the adapter another", "lora_name")
        if name in self.adapters:
            if not replaces:
                told = (
                    f"The lora adapter {name!r} has already been loaded. If you want to load the adapter in place, set"
                )
                raise ApiError(400, f"{told} 'load_inplace' to True.", "lora_name")
        elif len(self.adapters) >= MAX_ADAPTERS:
            raise ApiError(400, f"there are {MAX_ADAPTERS} adapters, and there can be no more; unload one", "lora_name")

    def _own_name(self, name: str, tag: str) -> str | None:
        for own in (name, name.removesuffix(tag)):
            if own in self.names or own in self.adapters:
                return own
        return None


def _module_of(module: LoRAModule) -> dict[str, Any]:
    """Fields of `LoRARequest`. Raises ConfigError."""
    tree: Any = module
    if isinstance(module, str):
        name, equals, path = module.partition("=")
        if equals and not module.lstrip().startswith("{"):
            return {"lora_name": name, "lora_path": path}
        try:
            tree = json.loads(module)
        except ValueError:
            tree = None
    if not isinstance(tree, Mapping) or not {"name", "path"} <= set(tree) <= set(_FIELDS):
        fix = 'name=path, or JSON like {"name": "sql", "path": "adapters/sql", "base_model_name": "base"}'
        raise ConfigError(f"lora_modules: {shown(module)} must be {fix}")
    given = {_FIELDS[key]: value for key, value in tree.items()}
    base = given.get("base_model_name")
    if base is not None and not isinstance(base, str):
        raise ConfigError(f"lora_modules: base_model_name={shown(base)} must be a string")
    return given
