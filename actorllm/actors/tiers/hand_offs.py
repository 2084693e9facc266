"""Hand-offs of the scheduler actor: tells frontends which prompts other replicas may copy. A part of the loop.

Leases are `scheduling.tiers.leases`. A lease names the era of the memory that it is of, which the workers of the time say once
they are linked. After them come others with another era, so what the dead ones had is lent by no mistake.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Protocol

from actorllm.actors.link import Link
from actorllm.actors.loop_parts import LoopPart
from actorllm.actors.outlet import ForFrontend, Outlet
from actorllm.actors.tiers.lease_board import LeaseBoard, era_of
from actorllm.actors.tiers.tier_transfers import TransferHost
from actorllm.clock import now
from actorllm.errors import EngineError, PeerLostError
from actorllm.messages import KvOffer
from actorllm.scheduling.events import Events
from actorllm.scheduling.tiers.leases import Offer


class HandOffHost(TransferHost, Protocol):
    """What it asks of the actor whose loop it belongs to, beside what transfers ask."""

    def send_to(self, outlet: Outlet, outputs: ForFrontend) -> None: ...


class HandOffs(LoopPart):
    """See the module docstring."""

    def __init__(
        self, host: HandOffHost, board: LeaseBoard, outlets: dict[int, Outlet], link: Callable[[], Link]
    ) -> None:
        """outlets: by frontend. link: to the workers of the time."""
        self._host, self._board, self._outlets, self._link = host, board, outlets, link
        self._asked: Link | None = None

    def before_plan(self) -> None:
        transfers = self._host.scheduler.transfers
        assert transfers is not None
        while transfers.given_back:
            self._board.take(*transfers.given_back.pop().tolist())
        for lease in transfers.renewals(now()):
            self._board.renew(*lease.tolist())
        if transfers.leases is not None and self._host.has_workers and self._asked is not self._link():
            self._asked = self._link()
            self._host.start_soon(self._ask_era, self._asked)

    def next_deadline(self) -> float:
        transfers = self._host.scheduler.transfers
        return math.inf if transfers is None else transfers.next_renewal

    async def _ask_era(self, link: Link) -> None:
        try:
            eras = await self._host.ask_all(
                link, "cache_era", math.inf
            )  # answered between steps, however long these are
        except (PeerLostError, EngineError):  # the workers end, and the scheduler is told of it
            return
        transfers = self._host.scheduler.transfers
        if link is self._link() and transfers is not None and transfers.leases is not None:
            transfers.leases.era = era_of([int(era) for era in eras])
            self._offer()

    def before_send(self, events: Events) -> None:
        """A gateway is told with the end of its request, which had its prompt computed and nothing else."""
        transfers = self._host.scheduler.transfers
        assert transfers is not None
        if transfers.leases is not None and transfers.leases.num_expected:
            for end in events.ends:
                if end.reason in ("length", "stop"):
                    self._tell(transfers.leases.offer_at_end(end.sequence, now()))

    def after_result(self, events: Events) -> None:
        self._offer()

    def _offer(self) -> None:
        transfers = self._host.scheduler.transfers
        assert transfers is not None
        if transfers.leases is None or not transfers.leases.num_expected:
            return
        for offer in transfers.leases.new_offers(now()):
            self._tell(offer)

    def _tell(self, offer: Offer | None) -> None:
        outlet = None if offer is None else self._outlets.get(offer.key[0])
        if offer is not None and outlet is not None:
            told = KvOffer(rid=offer.key[1], lease=offer.lease, blocks=offer.blocks, num_cached=offer.num_cached)
            self._host.send_to(outlet, told)
