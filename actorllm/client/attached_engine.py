"""`AttachedEngine`: an engine of another process, as the front doors of this process use it."""

from __future__ import annotations

import math
import os
from collections.abc import Mapping
from concurrent.futures import Future
from typing import Any

from actorllm.actors.engine_thread import Service
from actorllm.actors.frontend import FrontendActor
from actorllm.attach.client import AttachClient
from actorllm.client.collective_calls import Called
from actorllm.client.engine import Engine
from actorllm.client.transports.jobs import RankJob
from actorllm.client.weight_updates import NewWeights
from actorllm.errors import EngineError
from actorllm.types.weight_version import RunningRequests


class AttachedEngine(Engine):
    """An engine that another process owns and gave a name, joined by this process. `shutdown` leaves it running.

    membership: of the engine, which `attach.client.meet` has found; it is joined by `start`, as any engine is started.
    """

    def __init__(self, membership: AttachClient) -> None:
        self._membership = membership
        self._membership.on_loss = self._on_loss
        super().__init__(self._membership.config)

    def _new_frontend(self) -> FrontendActor:
        return self._membership.frontend

    def _new_supervisor(self) -> AttachClient:
        return self._membership

    def _new_service(self) -> Service:
        return self._membership

    def _on_loss(self, error: EngineError) -> None:
        self._death = error

    def _remake(self) -> bool:
        """There is nothing of ours to be stopped: a program that joined goes on joining."""
        return False

    async def _wait_until_idle(self) -> None:
        """The requests of others are none of our business."""

    async def _abort_all(self) -> None:
        self._frontend.abort_all()

    def update_weights(self, new: NewWeights, version: str | None, running: RunningRequests) -> Future[str]:
        """Raises EngineError: it is not ours."""
        new.close()
        self._check()
        raise EngineError("this engine belongs to another process, which alone can update its weights")

    def join_trainer(self, place: Mapping[str, Any] | None) -> Future[None]:
        """Raises EngineError: it is not ours."""
        self._check()
        raise EngineError("this engine belongs to another process, which alone can have its ranks meet a trainer")

    def bring_weights(self, job: RankJob) -> Future[NewWeights]:
        """Raises EngineError: it is not ours."""
        job.close()
        self._check()
        raise EngineError("this engine belongs to another process, which alone can update its weights")

    def name_weights(self, version: str) -> Future[str]:
        """Raises EngineError: it is not ours."""
        self._check()
        raise EngineError("this engine belongs to another process, which alone can name its weights")

    def sleep(self, level: object, mode: object, requests: object) -> Future[int]:
        """Raises EngineError: it is not ours."""
        self._check()
        raise EngineError("this engine belongs to another process, which alone can let it sleep")

    def wake_up(self, tags: object) -> Future[None]:
        """Raises EngineError: it is not ours."""
        self._check()
        raise EngineError("this engine belongs to another process, which alone can wake it up")

    def set_policy(self, scheduling_policy: object, admission_policy: object) -> Future[None]:
        """Raises EngineError: it is not ours."""
        self._check()
        raise EngineError("this engine belongs to another process, which alone can change its policies")

    def call_workers(
        self, target: str, data: Any, *, is_of_model: bool = False, timeout: float = math.inf
    ) -> Future[Called]:
        """Raises EngineError: it is not ours."""
        self._check()
        raise EngineError("this engine belongs to another process, which alone can call its workers")

    def scale(self, num_replicas: int) -> Future[None]:
        """Raises EngineError: it is not ours."""
        self._check()
        raise EngineError("this engine belongs to another process, which alone can scale it")

    def unload(self, timeout: float = 5.0) -> None:
        """Raises EngineError: it is not ours."""
        self._check()
        raise EngineError("this engine belongs to another process, which alone can unload it; shutdown() leaves it")

    def shutdown(self, timeout: float = 5.0) -> None:
        """End the requests of this process with EngineShutdownError and leave the engine. Idempotent."""
        super().shutdown(timeout)
        if os.getpid() == self._pid and not self._thread.is_alive:
            self._membership.close()
