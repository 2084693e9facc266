"""`model_executor` of an `LLMEngine`: the path by which trainers give vLLM's model its new weights.

    llm.llm_engine.model_executor.driver_worker.model_runner.model.load_weights(model.state_dict().items())

The model itself is in another process, so there is nothing else at the end of the path.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from types import SimpleNamespace
from typing import Any, NoReturn


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
