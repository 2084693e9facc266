"""KV transfers of the scheduler actor: has the workers move the blocks that `Transfers` chooses. A part of the loop."""

from __future__ import annotations

import logging
import math
from collections.abc import Callable, Coroutine, Sequence
from typing import Any, Protocol

import numpy as np
from numpy.typing import NDArray

from actorllm.actors.link import Link
from actorllm.actors.loop_parts import LoopPart
from actorllm.actors.step_gate import StepGate
from actorllm.actors.tiers.tier_files import TierDirectory
from actorllm.clock import now
from actorllm.errors import EngineError, PeerLostError
from actorllm.scheduling.scheduler import Scheduler
from actorllm.scheduling.tiers.transfers import BlockLoad, BlockStore, Borrowed

logger = logging.getLogger(__name__)


class TransferHost(Protocol):
    """What it asks of the actor whose loop it belongs to."""

    scheduler: Scheduler
    has_workers: bool

    def wake(self) -> None: ...
    def start_soon(self, function: Callable[..., Coroutine[Any, Any, None]], *args: Any) -> None: ...
    async def ask_all(self, link: Link, verb: str, timeout: float = ..., **arguments: Any) -> list[Any]: ...


class TierTransfers(LoopPart):
    """See the module docstring."""

    def __init__(
        self, host: TransferHost, gate: StepGate, directory: TierDirectory | None, link: Callable[[], Link]
    ) -> None:
        """directory: None: KV comes from other replicas alone. link: to the workers of the time."""
        self._host = host
        self._gate = gate
        self._directory = directory
        self._link = link

    def before_plan(self) -> None:
        transfers = self._host.scheduler.transfers
        assert transfers is not None
        if not self._host.has_workers or self._gate.num_holders:
            return
        while jobs := transfers.next(now(), self._host.scheduler.is_idle):
            for job in jobs:
                if isinstance(job, BlockLoad) and job.source is not None:
                    self._host.start_soon(self._pull, job, job.source, self._link())
                    continue
                assert self._directory is not None
                # The keys of now: after `forget_all` there are others.
                keys = self._directory.keys(job.wanted if isinstance(job, BlockLoad) else job.hashes)
                self._host.start_soon(self._move, job, keys, self._link())
            if transfers.is_moving:  # else there is no loop, and all was done at once
                return

    async def _pull(self, job: BlockLoad, source: Borrowed, link: Link) -> None:
        """Copy what another replica has leased."""
        try:
            answers = await self._host.ask_all(
                link,
                "pull_blocks",
                math.inf,
                lease=source.lease.tolist(),
                first=job.found.size,
                blocks=job.blocks.tolist(),
                data=np.frombuffer(source.digest, np.uint8),
            )
        except PeerLostError:  # the scheduler is told of it
            return
        except EngineError as error:
            answers = [_failed(error)]
        number, seconds = _of_ranks(answers)
        transfers = self._host.scheduler.transfers
        assert transfers is not None
        transfers.loaded(job, number, seconds, now())
        self._host.wake()

    async def _move(self, job: BlockLoad | BlockStore, keys: NDArray[np.uint64], link: Link) -> None:
        transfers = self._host.scheduler.transfers
        assert transfers is not None
        assert self._directory is not None
        try:
            answers = await self._host.ask_all(
                link,
                "load_blocks" if isinstance(job, BlockLoad) else "store_blocks",
                math.inf,  # as long as a disk takes; requests do not wait for longer than computing takes
                blocks=job.blocks.tolist(),
                data=np.frombuffer(keys.tobytes(), np.uint8),
            )
        except PeerLostError:  # the scheduler is told of it
            if isinstance(job, BlockStore):  # what was forgotten meanwhile is not told any more
                self._directory.remove_keys(keys)
            return
        except EngineError as error:
            answers = [_failed(error)]
            if isinstance(job, BlockStore):
                self._directory.remove_keys(keys)
        number, seconds = _of_ranks(answers)
        if isinstance(job, BlockLoad):
            transfers.loaded(job, number, seconds, now())
        else:
            transfers.stored(job, number, seconds)
            if job.is_void:  # by these keys, and not by those of now
                self._directory.remove_keys(keys)
        self._host.wake()

    def next_deadline(self) -> float:
        transfers = self._host.scheduler.transfers
        return math.inf if transfers is None else transfers.next_deadline


def _failed(error: EngineError) -> tuple[int, float]:
    """As of a rank that has moved nothing: it could not, or it ends, of which the scheduler is told apart."""
    logger.warning("KV blocks were not moved: %s", error)
    return 0, 0.0


def _of_ranks(answers: Sequence[tuple[int, float]]) -> tuple[int, float]:
    """How many blocks all ranks have moved, and the seconds of the slowest."""
    return min(number for number, _ in answers), max(seconds for _, seconds in answers)
