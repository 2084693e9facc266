"""What trainers call of vLLM's workers to bring new weights.

    llm.llm_engine.model_executor.driver_worker.model_runner.model.load_weights(model.state_dict().items())
    llm.collective_rpc("reload_weights")

The model itself is in another process, so there is nothing else at the end of the path. Both are updates of the engine
(`update_weights_from_tensors`, `update_weights_from_disk`), which outlive the death of a worker.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from types import SimpleNamespace
from typing import Any, NoReturn

from actorllm.config import EngineConfig
from actorllm.errors import InvalidParameterError

RELOAD, UPDATE_CONFIG = "reload_weights", "update_config"
LOADED = ("auto", "hf", "safetensors")
"""Formats that are read from the folder of the model."""


def is_reload(method: object, config: EngineConfig) -> bool:
    """Whether `collective_rpc` is asked for one of vLLM's two methods. An application's own worker may have them itself.

    Arguments:
        method: as it is given.
        config: of the engine.
    """
    return method in (RELOAD, UPDATE_CONFIG) and config.worker_cls is None and config.worker_extension_cls is None


def folder_to_reload(
    method: str, args: Sequence[Any], kwargs: Mapping[str, Any] | None, config: EngineConfig
) -> str | None:
    """The folder to read again; None: nothing is to be done.

    Arguments:
        method: one of the two.
        args, kwargs: of the call. `update_config` takes {"load_config": {"load_format": "auto"}}, which is what a reload does.
        config: of the engine.

    Raises:
        InvalidParameterError: they ask for something else.
    """
    given = [*args, *(kwargs or {}).values()]
    if method == RELOAD:
        if given:
            raise InvalidParameterError(f"{RELOAD} takes no arguments here; use update_weights_from_disk(folder)")
        return str(config.model.path)
    load = given[0].get("load_config") if len(given) == 1 and isinstance(given[0], Mapping) else None
    if not isinstance(load, Mapping) or set(given[0]) != {"load_config"} or set(load) - {"load_format"}:
        raise InvalidParameterError(
            f"{UPDATE_CONFIG}: only load_format of load_config can change while the engine runs"
        )
    if load.get("load_format") not in LOADED:
        raise InvalidParameterError(
            f"{UPDATE_CONFIG}: load_format={load.get('load_format')!r:.80} must be one of {LOADED}"
        )
    return None


class ModelOfWorkers:
    """The model, as far as a trainer needs it."""

    def __init__(self, update: Callable[[dict[str, Any]], object]) -> None:
        self._update = update

    def load_weights(self, weights: Iterable[tuple[str, Any]]) -> set[str]:
        """Compute with these tensors from now on. Each call is an update, so bring many at a time. Returns their names.

        Arguments:
            weights: pairs of a name in the checkpoint and a tensor; what is not given stays as it was.

        Raises:
            As `update_weights_from_tensors`.
        """
        tensors = dict(weights)
        self._update(tensors)
        return set(tensors)

    def __getattr__(self, name: str) -> NoReturn:
        raise AttributeError(
            f"the model is in another process, and has no {name!r} here: call a function on it by apply_model or collective_rpc"
        )


def model_executor(update: Callable[[dict[str, Any]], object]) -> Any:
    """The path to the model of an engine.

    Arguments:
        update: `update_weights_from_tensors` of the engine.
    """
    runner = SimpleNamespace(model=ModelOfWorkers(update))
    worker = SimpleNamespace(model_runner=runner, get_model=lambda: runner.model)
    worker.worker = worker
    return SimpleNamespace(driver_worker=worker)
