"""`RankWorker`: one rank as the functions of an application see it, which `collective_rpc` and `apply_model` call.

`worker_cls` is a subclass of it, and `worker_extension_cls` a class whose methods are added to it, as in vLLM. One is made
per rank, when its model is loaded, also in a process that takes the place of another. Its methods are called between steps.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any, cast

import torch

from actorllm.config import EngineConfig
from actorllm.errors import ConfigError
from actorllm.model.runner import ModelRunner
from actorllm.types.import_path import load_class


class RankWorker:
    """See the module docstring.

    `model_runner.model.load_weights` takes new weights, as the models of vLLM do. They are a version of the engine once the call is
    over. What a method changes of the weights in another way is no version. The prefix cache goes on holding KV of the weights
    before, and a process that is started again has the weights without the change.
    """

    _brought: dict[str, torch.Tensor] | None = None
    """What the call that is under way has given to `load_weights`."""

    def __init__(self, model_runner: Any) -> None:
        self.model_runner = model_runner
        """A `ModelRunner`: with the model, the KV cache and the batch."""
        model_runner.load_weights = self._bring
        model = getattr(model_runner, "model", None)
        if model is not None and self.config.model.module is None:  # else it is the application's own
            model.load_weights = self._bring

    def _bring(self, weights: Iterable[tuple[str, torch.Tensor]]) -> set[str]:
        """`load_weights` of the model: keeps copies, since a caller may use its memory again. Returns the names.

        All ranks are given the same, of which the engine takes what the first rank of the first replica has.
        So the others keep names alone.

        weights: pairs of a name in the checkpoint and a whole tensor.
        """
        is_first = not self.rank and not self.replica
        brought = {
            name: tensor.detach().to("cpu", copy=True) if is_first else torch.empty(0, dtype=tensor.dtype)
            for name, tensor in weights
        }
        self._brought = {**(self._brought or {}), **brought}
        return set(brought)

    def take_weights(self) -> dict[str, torch.Tensor]:
        """What a call has brought, which is forgotten here. But for the first rank of the first replica the tensors are empty."""
        brought, self._brought = self._brought, None
        return brought or {}

    @property
    def rank(self) -> int:
        """Of this worker among those of its replica."""
        return int(self.model_runner.rank)

    @property
    def local_rank(self) -> int:
        """As `rank`: all ranks are on one machine."""
        return self.rank

    @property
    def replica(self) -> int:
        """The number of the replica."""
        return self.config.replica

    @property
    def device(self) -> torch.device:
        """Where the model computes."""
        return torch.device(self.model_runner.name)

    @property
    def config(self) -> EngineConfig:
        """Of the engine."""
        return cast(EngineConfig, self.model_runner.config)

    @property
    def vllm_config(self) -> EngineConfig:
        """As `config`; vLLM's name."""
        return self.config

    @property
    def model_config(self) -> Any:
        """Of the engine's configuration, the model."""
        return self.config.model

    @property
    def parallel_config(self) -> Any:
        """How many ranks there are."""
        return self.config.parallel_config

    def get_model(self) -> Any:
        """The loaded model: a fused decoder of `actorllm.model`, or what runs a module of transformers (its `module`)."""
        return self.model_runner.model


def make_rank_worker(runner: ModelRunner[Any, Any]) -> RankWorker:
    """Of the classes that the configuration names. Raises ConfigError."""
    config = runner.config
    cls: type[RankWorker] = RankWorker
    if config.worker_cls is not None:
        found = load_class("worker_cls", config.worker_cls)
        if not issubclass(found, RankWorker):
            raise ConfigError(
                f"worker_cls={config.worker_cls!r} must be a subclass of RankWorker (actorllm.model.rank_worker)"
            )
        cls = found
    if config.worker_extension_cls is not None:
        extension = load_class("worker_extension_cls", config.worker_extension_cls)
        for name in vars(extension):
            if not name.startswith("__") and (hasattr(cls, name) or name == "model_runner"):
                raise ConfigError(
                    f"worker_extension_cls={config.worker_extension_cls!r} defines {name!r}, which {cls.__name__} has; rename it"
                )
        cls = cast(type[RankWorker], type(f"{cls.__name__}With{extension.__name__}", (cls, extension), {}))
    try:
        return cls(runner)
    except Exception as error:  # of the application's class
        raise ConfigError(f"{cls.__name__} cannot be built: {type(error).__name__}: {error}") from error
