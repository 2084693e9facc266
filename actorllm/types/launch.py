"""Ranks that a launcher such as torchrun has started: what its environment says, and what they are not combined with."""

from __future__ import annotations

import os
import sys
from collections.abc import Mapping
from importlib.metadata import PackageNotFoundError, version
from typing import Any, NamedTuple

from actorllm.errors import ConfigError

EXTERNAL = "external_launcher"
BACKENDS = (None, "mp", "uni", "ray", EXTERNAL)
"""Of distributed_executor_backend."""


class LaunchedRank(NamedTuple):
    """This process among those that were started."""

    rank: int
    world_size: int

    @classmethod
    def of_environment(cls) -> LaunchedRank:
        """Raises ConfigError where no launcher has set the variables."""
        found = []
        for name in ("RANK", "WORLD_SIZE"):
            value = os.environ.get(name, "")
            if not value.isascii() or not value.isdecimal():
                raise ConfigError(
                    f"distributed_executor_backend={EXTERNAL!r}: {name}={value!r} in the environment is no number; start the "
                    f"program with torchrun --nproc-per-node=N"
                )
            found.append(int(value))
        if os.environ.get("MASTER_ADDR") is None or os.environ.get("MASTER_PORT") is None:
            raise ConfigError(
                f"distributed_executor_backend={EXTERNAL!r}: MASTER_ADDR and MASTER_PORT are not set; start the program with "
                f"torchrun --nproc-per-node=N"
            )
        return cls(*found)


def is_placed_by_ray() -> bool:
    """Whether this process runs in a placement group of Ray, as an actor or a task. Ray is not imported to find out."""
    ray: Any = sys.modules.get("ray")
    is_initialized = getattr(ray, "is_initialized", None)  # another module may have that name
    return callable(is_initialized) and bool(is_initialized()) and ray.util.get_current_placement_group() is not None


def has_ray() -> bool:
    """Whether Ray is installed. It is not imported to find out."""
    try:
        version("ray")
    except PackageNotFoundError:
        return False
    return True


def check_launch(given: dict[str, Any]) -> bool:
    """Whether the ranks are started by a launcher. Each then computes in its own process, so the topology is "inline".

    Raises ConfigError for what does not go together with it.
    """
    backend = given["distributed_executor_backend"]
    if backend not in BACKENDS:
        known = ", ".join(map(repr, BACKENDS))
        raise ConfigError(f"distributed_executor_backend={backend!r:.80} is not supported; it may be {known}")
    if backend != EXTERNAL:
        return False
    size, launch = given["tensor_parallel_size"], LaunchedRank.of_environment()
    if launch.world_size != size or launch.rank >= launch.world_size:
        raise ConfigError(
            f"distributed_executor_backend={EXTERNAL!r}: tensor_parallel_size={size}, and the launcher has started "
            f"WORLD_SIZE={launch.world_size} ranks; make them one number"
        )
    _check_combinations(given)
    given["topology"], given["device"] = "inline", "cpu"
    return True


def _check_combinations(given: Mapping[str, Any]) -> None:
    for name, unused in (
        ("pipeline_parallel_size", (1,)),
        ("device", ("auto", "cpu")),
        ("data_parallel_size", (1,)),
        ("max_replicas", (None,)),
        ("enable_lora", (None, False)),
        ("enable_sleep_mode", (None, False)),
        ("name", (None,)),
        ("module", (None,)),
    ):
        if given[name] not in unused:
            raise ConfigError(
                f"distributed_executor_backend={EXTERNAL!r} is not supported with {name}={given[name]!r:.80} yet; leave one of "
                f"them out"
            )
