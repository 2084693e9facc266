"""The backends, by the names that the argument `device` has for them. A backend is a subclass of `runner.ModelRunner`.

Beside ours there are those of installed packages (`actorllm.types.device.others`): in the pyproject.toml of such a package,

    [project.entry-points."actorllm.backends"]
    npu = "package.module:NpuRunner"

A class is imported where a worker runs. Importing this module needs no torch.
"""

from __future__ import annotations

from importlib.metadata import EntryPoint
from typing import TYPE_CHECKING, Any

from actorllm.errors import ConfigError
from actorllm.types.device import GROUP, others

if TYPE_CHECKING:
    from actorllm.model.runner import ModelRunner

OWN = {"cpu": "actorllm.model.cpu.runner:CpuRunner", "cuda": "actorllm.model.cuda.runner:CudaRunner"}


def load(name: str) -> type[ModelRunner[Any, Any]]:
    """The class of a backend. Raises ConfigError when there is none of that name, or when it cannot be imported."""
    from actorllm.model.runner import ModelRunner

    point = EntryPoint(name, OWN[name], GROUP) if name in OWN else others().get(name)
    if point is None:
        known = ", ".join(map(repr, (*OWN, *sorted(others()))))
        raise ConfigError(f"device={name!r} is no backend here; there are {known}")
    try:
        found = point.load()
    except Exception as error:
        raise ConfigError(
            f"device={name!r}: {point.value} cannot be imported: {type(error).__name__}: {error}"
        ) from error
    if not (isinstance(found, type) and issubclass(found, ModelRunner)):
        raise ConfigError(f"device={name!r}: {point.value} is no subclass of actorllm.model.runner.ModelRunner")
    return found
