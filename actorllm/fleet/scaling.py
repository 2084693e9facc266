"""`DemandScaling`: asks the `Autoscaler` once in a period how many replicas are wanted, and has the fleet change their number.

The fleet's dispatcher tells it of arrivals, its frontends of ends. The decision is pure (`scheduling.autoscaler`). Runs on the
engine thread.
"""

from __future__ import annotations

import logging
from collections.abc import Awaitable, Callable, Mapping
from typing import Any

import anyio

from actorllm.clock import now
from actorllm.config import EngineConfig
from actorllm.errors import ActorLLMError
from actorllm.fleet.dispatcher import Dispatcher
from actorllm.fleet.replica import ReplicaFrontend, RoutedReplica
from actorllm.scheduling.autoscaler import Autoscaler, ScalingPolicy

logger = logging.getLogger(__name__)


class DemandScaling:
    """See the module docstring.

    Arguments:
        config: of the engine.
        dispatcher: whose views are shown.
        replicas: by number, changed by the fleet.
        resize: changes their number; it does not wait for starts.
    """

    def __init__(
        self,
        config: EngineConfig,
        dispatcher: Dispatcher,
        replicas: Mapping[int, RoutedReplica],
        resize: Callable[[int], Awaitable[object]],
    ) -> None:
        self.autoscaler = Autoscaler(
            config.min_replicas,
            config.max_replicas,
            config.target_attainment,
            ScalingPolicy.of(config.autoscaling),
            config.data_parallel_size,
        )
        self._dispatcher, self._replicas, self._resize = dispatcher, replicas, resize
        self._counted: dict[int, tuple[ReplicaFrontend, int, int]] = {}
        """By replica: its frontend, and how many sequences and tokens of it are counted."""
        self._scope: anyio.CancelScope | None = None
        dispatcher.on_arrival = lambda request, views: self.autoscaler.note(request, views, now())

    async def run(self) -> None:
        """Until `stop`."""
        with anyio.CancelScope() as self._scope:
            while True:
                await anyio.sleep(self.autoscaler.policy.period_s)
                if not self._dispatcher.is_paused:  # else what waits says nothing
                    await self.look()

    def stop(self) -> None:
        """From the loop."""
        if self._scope is not None:
            self._scope.cancel()

    async def look(self) -> None:
        """Decide once."""
        self._count_ends()
        before = self.autoscaler.wanted
        try:
            wanted = self.autoscaler.decide(self._dispatcher.views(), now(), keeps_all=self._is_last_pinned())
        except Exception:  # a defect of the arithmetic: it costs a decision, and not the engine
            logger.exception("the number of replicas was not decided")
            return
        if wanted != before:
            needed = self.autoscaler.needed
            logger.warning("%d replicas are wanted, not %d: the demand needs %.2f", wanted, before, needed)
        elif wanted == len(self._replicas):
            return
        try:
            await self._resize(wanted)
        except ActorLLMError as error:  # the engine ends, or the next look finds it as it is
            logger.error("the number of replicas was not changed: %s", error)

    def _is_last_pinned(self) -> bool:
        """Whether the replica that would go first has requests that are pinned to it, and would fail."""
        return self._dispatcher.num_pinned(max(self._replicas)) > 0

    def _count_ends(self) -> None:
        counted = {}
        for number, replica in self._replicas.items():
            frontend = replica.frontend
            known, num_ends, num_tokens = self._counted.get(number, (None, 0, 0))
            if known is not frontend:
                num_ends = num_tokens = 0
            sequences, tokens = frontend.finished
            self.autoscaler.note_ends(sequences - num_ends, tokens - num_tokens)
            counted[number] = frontend, sequences, tokens
        self._counted = counted

    def statistics(self) -> dict[str, Any]:
        """What is wanted, and why. From any thread."""
        scaler = self.autoscaler
        return {
            "min_replicas": scaler.min_replicas,
            "max_replicas": scaler.max_replicas,
            "num_wanted": scaler.wanted,
            "num_needed": scaler.needed,
            "predicted_attainment": scaler.predicted_attainment,
        }
