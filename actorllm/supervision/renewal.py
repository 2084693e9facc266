"""What changes in an engine's configuration before its processes are started again.

A start of several ranks gets a new meeting place (`MeetingPlace`). A scheduler that was stuck in a policy of the user's
own is followed by one without that policy (`without_endless_policies`). Used by the supervisor.
"""

from __future__ import annotations

import importlib.util
import logging
import socket
from dataclasses import replace

from actorllm.actors.memory_file import MemoryFile
from actorllm.config import EngineConfig
from actorllm.scheduling.policy_fallback import FALLBACK
from actorllm.supervision.death import ActorDeath
from actorllm.supervision.hang_detector import CAUGHT

logger = logging.getLogger(__name__)


class MeetingPlace:
    """Where the ranks of one start find each other: a file in memory, and a port of this machine where some are elsewhere. Of one
    rank nothing is made."""

    def __init__(self) -> None:
        self._file: MemoryFile | None = None

    def renewed(self, config: EngineConfig) -> EngineConfig:
        """Before workers are started: several get a new place to meet. Raises OSError."""
        if config.num_workers == 1:
            return config
        self.close()
        if config.rank_nodes:
            return replace(config, rendezvous=_free_port(config.rank_nodes[0]))
        self._file = MemoryFile("rendezvous")
        return replace(config, rendezvous=self._file.path)

    def close(self) -> None:
        """Release the place. Idempotent; not while processes are started."""
        file, self._file = self._file, None
        if file is not None:
            file.close()


def _free_port(node: str) -> str:
    """A port on the address of this machine by which it reaches a node: rank 0 listens there soon after."""
    host, _, port = node.rpartition(":")
    family, kind, _, _, where = socket.getaddrinfo(host.strip("[]"), int(port), type=socket.SOCK_DGRAM)[0]
    with socket.socket(family, kind) as probe:
        probe.connect(where)  # sends nothing
        own = str(probe.getsockname()[0])
    with socket.create_server((own, 0), family=family) as listener:
        return f"tcp://{f'[{own}]' if ':' in own else own}:{listener.getsockname()[1]}"


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
