"""What is changed in an engine's configuration before its processes are started, again or for the first time."""

from __future__ import annotations

import importlib.util
import logging
import os
import tempfile
import uuid
from dataclasses import replace
from pathlib import Path

from actorllm.actors.death import ActorDeath
from actorllm.actors.vigil import CAUGHT
from actorllm.config import EngineConfig
from actorllm.scheduling.guard import FALLBACK

logger = logging.getLogger(__name__)


def renewed(config: EngineConfig) -> EngineConfig:
    """Before workers are started: several meet at a place where nobody was before."""
    if config.world_size == 1:
        return config
    end_rendezvous(config)
    return replace(config, rendezvous=f"{tempfile.gettempdir()}/actorllm-{os.getpid()}-{uuid.uuid4().hex}")


def without_endless_policies(config: EngineConfig, death: ActorDeath) -> EngineConfig:
    """The next scheduler has no policy of the user's own in which this one was caught: it would be caught there, too."""
    if death.actor != "scheduler" or CAUGHT not in (death.reason or ""):
        return config
    words = "\n".join(death.last_words)

    def is_in(path: str | None) -> bool:
        if path is None or ":" not in path:
            return False
        try:
            module = importlib.util.find_spec(path.partition(":")[0])
        except (ImportError, ValueError):
            return False
        return module is not None and module.origin is not None and f'File "{module.origin}"' in words

    scheduler = config.scheduler
    if is_in(scheduler.policy):
        logger.error(
            "scheduling policy %r did not return; the next scheduler goes on with %r", scheduler.policy, FALLBACK
        )
        scheduler = replace(scheduler, policy=FALLBACK)
    if is_in(scheduler.admission):
        logger.error("admission policy %r did not return; the next scheduler goes on without", scheduler.admission)
        scheduler = replace(scheduler, admission=None)
    return replace(config, scheduler=scheduler)


def end_rendezvous(config: EngineConfig) -> None:
    """The file is there still if the ranks never met."""
    if config.rendezvous is not None:
        Path(config.rendezvous).unlink(missing_ok=True)
