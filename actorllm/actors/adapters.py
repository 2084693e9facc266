"""Adapters of requests: a request is blocked until the workers have its adapter, which they load beside their steps.

`Residency` decides which adapter gets which slot. This part of the loop asks the workers to load it, and lets the requests go on.
Workers that take the place of others load what requests use before they get a step. A request whose adapter cannot be loaded
fails with the reason. Used by SchedulerActor.
"""

from __future__ import annotations

import logging
import math
from collections.abc import Callable, Coroutine
from dataclasses import replace
from typing import Any, Protocol

from actorllm.actors.link import Link
from actorllm.actors.loop_parts import LoopPart
from actorllm.clock import now
from actorllm.config import LoRAConfig
from actorllm.errors import EngineError, InvalidParameterError, PeerLostError
from actorllm.messages import INVALID, Submit
from actorllm.scheduling.events import End
from actorllm.scheduling.residency import AdapterSlot, Residency
from actorllm.scheduling.scheduler import Scheduler
from actorllm.scheduling.sequence import Key, Sequence, State
from actorllm.types.adapter_folder import Adapter

logger = logging.getLogger(__name__)

BLOCKED_ON = "adapter"


class AdapterHost(Protocol):
    """What the adapters ask of the actor whose loop they belong to."""

    scheduler: Scheduler
    has_workers: bool

    def wake(self) -> None: ...
    def start_soon(self, function: Callable[..., Coroutine[Any, Any, None]], *args: Any) -> None: ...
    def send_ends(self, ends: list[End]) -> None: ...
    async def ask_all(self, link: Link, verb: str, timeout: float = ..., **arguments: Any) -> list[Any]: ...


class AdapterLoading(LoopPart):
    """See the module docstring."""

    def __init__(self, host: AdapterHost, config: LoRAConfig | None, go_on: Callable[[Sequence], None]) -> None:
        """config: None where there are no adapters. go_on: what becomes of a request that has its adapter."""
        self._host = host
        self._config = config
        self._go_on = go_on
        self._residency = Residency(0 if config is None else config.max_loras, host.scheduler.ledger)
        self._refused: list[Sequence] = []
        """Until the next turn of the loop."""
        self._link: Link
        self._num_loads = 0
        self._num_failed = 0

    # Requests

    @staticmethod
    def blocked(submit: Submit) -> Submit:
        """The request as the scheduler takes it."""
        return replace(submit, blocked_on=BLOCKED_ON)

    def add(self, sequence: Sequence) -> None:
        """A blocked request wants its adapter."""
        submit = sequence.submit
        if self._config is None or submit.adapter is None or submit.adapter_path is None:
            self._refused.append(sequence)
            return
        self._residency.add(sequence, Adapter(submit.adapter, submit.adapter_path))

    def is_loading(self, key: Key) -> bool:
        """Whether a request waits for its adapter: nothing else can unblock it."""
        sequence = self._host.scheduler.sequence(key)
        return sequence is not None and sequence in self._residency.waiting

    # The loop

    def before_plan(self) -> None:
        if self._refused:
            self._refuse()
        if not self._residency.waiting or not self._host.has_workers:
            return
        is_loaded = True
        while is_loaded:
            is_loaded = False
            for found in self._residency.next():
                if isinstance(found, AdapterSlot):
                    self._host.start_soon(self._load, found, self._link)
                    is_loaded |= found.is_ready  # where there is no loop, it was loaded at once
                else:
                    sequence, slot = found
                    sequence.adapter_slot = slot.number
                    self._go_on(sequence)

    def _refuse(self) -> None:
        """What a frontend of this engine never sends."""
        refused, self._refused = self._refused, []
        text = "the engine takes no adapters; build it with enable_lora=True"
        ends = [self._host.scheduler.unblock(sequence.key, text, now()) for sequence in refused]
        self._host.send_ends([end._replace(details={"kind": INVALID}) for end in ends if end is not None])

    async def _load(self, slot: AdapterSlot, link: Link) -> None:
        await self._ask_for(slot, link)
        self._host.wake()

    async def _ask_for(self, slot: AdapterSlot, link: Link) -> bool:
        """Have the workers fill a slot, from one folder after the other if one is gone. False: the workers are gone."""
        while (adapter := slot.adapter) is not None:
            try:
                # As long as reading a file takes, beside a step of any length.
                await self._host.ask_all(
                    link, "load_adapter", math.inf, slot=slot.number, digest=adapter.digest, path=adapter.path
                )
            except PeerLostError:
                return False
            except Exception as error:  # of the files: it is the requests that hear of it
                if link is not self._link or slot.adapter is not adapter:
                    return True
                self._fail(slot, error)
                continue
            if link is not self._link or slot.adapter is not adapter:
                return False
            self._num_loads += 1
            self._residency.loaded(slot)
            break
        return True

    def _fail(self, slot: AdapterSlot, error: Exception) -> None:
        self._num_failed += 1
        text = f"its adapter cannot be used: {error}"
        logger.warning("adapter %s cannot be loaded: %s", slot.adapter, error)
        ends: list[End] = []
        at, scheduler = now(), self._host.scheduler
        for sequence in self._residency.failed(slot):
            if sequence.state is State.BLOCKED:
                end = scheduler.unblock(sequence.key, text, at)
                ends += [] if end is None else [end]
            else:
                ends += [end._replace(error=text) for end in scheduler.finish([(sequence, "error", None)], at)]
        self._host.send_ends([end._replace(details={"kind": INVALID}) for end in ends])

    # Workers

    def lose_workers(self) -> None:
        """They are gone, and the adapters that they held."""
        self._residency.lose_workers()

    def on_workers(self, link: Link, ready: Callable[[], None]) -> None:
        """Others take their place: they load what requests use, and are ready then."""
        self._link = link
        slots = self._residency.lose_workers()
        if not slots:
            ready()
            return
        self._host.start_soon(self._restore, slots, link, ready)

    async def _restore(self, slots: list[AdapterSlot], link: Link, ready: Callable[[], None]) -> None:
        for slot in slots:
            if not await self._ask_for(slot, link):
                return
        if link is self._link:
            ready()

    # Controls

    async def answer(self, verb: str, digest: str, path: str) -> Any:
        """add_adapter and pin_adapter: the workers have read it; remove_adapter: whether they had it."""
        if self._config is None:
            raise InvalidParameterError("the engine takes no adapters; build it with enable_lora=True")
        if not self._host.has_workers:
            raise EngineError("the workers are being started again; try again in a moment")
        if verb == "remove_adapter":
            self._residency.forget(digest)
        found = await self._host.ask_all(self._link, verb, math.inf, digest=digest, path=path)
        return all(found)

    async def digests(self) -> list[str]:
        """Of the adapters that the workers keep."""
        if self._config is None or not self._host.has_workers:
            return []
        return list((await self._host.ask_all(self._link, "list_adapters"))[0])

    def statistics(self) -> dict[str, Any] | None:
        """None where there are no adapters."""
        if self._config is None:
            return None
        residency = self._residency
        return {
            "num_waiting": len(residency.waiting),
            "num_resident": sum(slot.is_ready for slot in residency.slots),
            "max_loras": self._config.max_loras,
            "num_loads": self._num_loads,
            "num_failed": self._num_failed,
        }
