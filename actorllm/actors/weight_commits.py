"""Updates of the weights, as the scheduler actor sees them: staged by all ranks beside the steps, committed between two steps.

This part of the loop knows the version that counts. Workers that take the place of others, or outlive a scheduler, are brought to
it before they get a step. So no step is computed with other weights than those that its tokens and its block hashes are of. A rank
that cannot be brought there is ended, and starts again with the version of the configuration.
"""

from __future__ import annotations

import logging
import math
from collections.abc import Callable, Coroutine, Mapping
from typing import Any, Protocol

import numpy as np

from actorllm.actors.link import Link
from actorllm.actors.loop_parts import LoopPart
from actorllm.actors.outlet import ForFrontend, Outlet
from actorllm.actors.step_gate import StepGate
from actorllm.clock import now
from actorllm.errors import EngineError, PeerLostError
from actorllm.messages import WeightsChanged
from actorllm.scheduling.events import End
from actorllm.scheduling.scheduler import Scheduler
from actorllm.types.weight_version import FIRST_WEIGHTS, RunningRequests, WeightSource

logger = logging.getLogger(__name__)


class WeightHost(Protocol):
    """What updates ask of the actor whose loop they belong to."""

    scheduler: Scheduler
    has_workers: bool

    def take_inbox(self) -> None: ...
    def wake(self) -> None: ...
    def send_ends(self, ends: list[End]) -> None: ...
    def send_to(self, outlet: Outlet, outputs: ForFrontend) -> None: ...
    def start_soon(self, function: Callable[..., Coroutine[Any, Any, None]], *args: Any) -> None: ...
    def report_defect(self, link: Link, what: str) -> None: ...
    def note_new_weights(self) -> None:
        """The workers have those of another version, also where the ones before slept."""

    async def ask_all(self, link: Link, verb: str, timeout: float = ..., **arguments: Any) -> list[Any]: ...


class WeightCommits(LoopPart):
    """See the module docstring. first: the version that the workers start with."""

    def __init__(self, host: WeightHost, gate: StepGate, outlets: Mapping[int, Outlet], first: WeightSource) -> None:
        self._host = host
        self._gate = gate
        self._outlets = outlets
        self.current = first
        self._link: Link | None = None
        self._num_commits = 0

    # Verbs

    async def stage(self, source: WeightSource) -> bool:
        """Have every rank read and check a version, and keep it beside the one that counts. Raises what one of them raised."""
        link = self._link
        if link is None or not self._host.has_workers:
            raise EngineError(
                "the workers are being started again, and nothing was changed; update the weights in a moment"
            )
        try:
            await self._host.ask_all(link, "stage_weights", math.inf, source=source.to_tree())
        except PeerLostError as lost:
            raise EngineError(
                f"a worker ended while it read the new weights, and nothing was changed (they take their memory twice until "
                f"they are committed): {lost}"
            ) from None
        return True

    async def discard(self) -> bool:
        """Have every rank forget what it has staged."""
        if self._link is not None and self._host.has_workers:
            await self._host.ask_all(self._link, "discard_weights", math.inf)
        return True

    async def transfer(self, identity: str, what: str, data: Any) -> list[Any]:
        """Have every rank take part in bringing tensors here (`WeightReceiver`), beside the steps. Raises what one raised."""
        link = self._link
        if link is None or not self._host.has_workers:
            raise EngineError(
                "the workers are being started again, and nothing was changed; bring the weights in a moment"
            )
        try:
            return await self._host.ask_all(link, "transfer_weights", math.inf, identity=identity, what=what, data=data)
        except PeerLostError as lost:
            raise EngineError(
                f"a worker ended while new weights were brought to it, and nothing was changed; start the trainer's group again, "
                f"and call init_weight_transfer_engine: {lost}"
            ) from None

    async def commit(self, source: WeightSource, running: RunningRequests) -> bool:
        """Let the next step be computed with this version. Asked again, it does nothing."""
        if source == self.current:
            return True
        host, is_new = self._host, source.identity != self.current.identity
        async with self._gate.closed():
            host.take_inbox()
            counts = host.scheduler.num_outputs()
            self.current = source
            self._num_commits += 1
            if is_new:  # else they have another name
                host.send_ends(host.scheduler.change_weights(source.identity, running, now()))
            for number, outlet in list(self._outlets.items()):
                known = np.array([(key[1], count) for key, count in counts if key[0] == number], np.int32).reshape(
                    -1, 2
                )
                host.send_to(
                    outlet, self._message(np.ascontiguousarray(known[:, 0]), np.ascontiguousarray(known[:, 1]))
                )
            if (
                is_new and self._link is not None and host.has_workers
            ):  # others that come are brought there by `on_workers`
                await self._bring(self._link)
            if is_new:
                host.note_new_weights()
        return True

    # Workers and frontends

    def on_workers(self, link: Link, ready: Callable[[], None]) -> None:
        """They are ready when they have the version that counts."""
        self._link = link
        if self.current.is_first and link.generation == 1:
            ready()
        else:
            self._host.start_soon(self._bring_then, link, ready)

    async def _bring_then(self, link: Link, ready: Callable[[], None]) -> None:
        if await self._bring(link) and link is self._link:
            ready()

    async def _bring(self, link: Link) -> bool:
        """Whether all ranks of this link have the version that counts."""
        source = self.current
        while True:
            try:
                await self._host.ask_all(link, "commit_weights", math.inf, source=source.to_tree())
            except PeerLostError:
                return False
            except Exception as error:  # a rank is left without the version that counts: none may compute with another
                logger.exception("version %r of the weights is not there", source.version)
                self._host.has_workers = False
                self._host.report_defect(link.spokes[0], f"without version {source.version!r} of the weights: {error}")
                return False
            if source is self.current:
                return True
            source = self.current

    def on_frontend(self, outlet: Outlet) -> None:
        """A frontend is linked, and may know of another version."""
        if self.current != FIRST_WEIGHTS:
            self._host.send_to(outlet, self._message())

    def _message(self, *columns: Any) -> WeightsChanged:
        rids, num_tokens = columns or (np.zeros(0, np.int32),) * 2
        return WeightsChanged(
            version=self.current.version, identity=self.current.identity, rids=rids, num_tokens=num_tokens
        )

    def statistics(self) -> dict[str, Any]:
        return {"version": self.current.version, "num_commits": self._num_commits}
