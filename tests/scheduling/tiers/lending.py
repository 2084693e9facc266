"""Two engines driven by hand: one computes prompts and leases their blocks, the other one copies them and decodes."""

from __future__ import annotations

import random
from typing import Any

import numpy as np

from actorllm.actors.memory_file import MemoryFile
from actorllm.actors.tiers.lease_board import LeaseBoard, Lent, num_bytes
from actorllm.scheduling.tiers.transfers import BlockLoad, NoTiers
from tests.scheduling.conftest import Engine

MAX_BLOCKS = 10


class Replica(Engine):
    """With a row of the board. Copies are carried out in two parts, so that anything may happen between them."""

    def __init__(self, number: int, board: LeaseBoard, **overrides: Any) -> None:
        self.number, self.board = number, board
        num_blocks = overrides.setdefault("num_blocks", 16)
        self.lender = board.lender(number, num_blocks)
        super().__init__(tiers=NoTiers(), lends=self.lender, **overrides)
        self.copies: list[tuple[BlockLoad, Lent | None]] = []
        self.begin_era()

    @property
    def transfers(self) -> Any:
        return self.scheduler.transfers

    def begin_era(self) -> None:
        """Its workers are new, and say so."""
        self.transfers.leases.era = self.board.begin_era(self.number)

    def offers(self) -> list[Any]:
        return list(self.transfers.leases.new_offers(self.now))

    def launch(self) -> Any:
        self.begin_copies()
        return super().launch()

    def begin_copies(self) -> None:
        for job in self.transfers.next(self.now, self.scheduler.is_idle):
            lease = job.source.lease.tolist()
            self.copies.append((job, self.board.read(*lease, job.source.digest)))
        while self.transfers.given_back:
            self.board.take(*self.transfers.given_back.pop().tolist())
        for lease in self.transfers.renewals(self.now):
            self.board.renew(*lease.tolist())

    def finish_copy(self, lender: Replica) -> None:
        """The oldest one: what the lender's blocks have now, if the lease is still there."""
        job, lent = self.copies.pop(0)
        if lent is None:
            self.transfers.loaded(job, 0, 0.01, self.now)
            return
        first = job.found.size
        for source, target in zip(lent.blocks[first:].tolist(), job.blocks.tolist(), strict=False):
            for at in range(self.worker.block_size):
                self.worker.kv[target, at] = lender.worker.kv.get((source, at), random.randrange(1 << 32))
        number = job.blocks.size if self.board.is_valid(lent) else 0
        self.transfers.loaded(job, number, 0.01, self.now)
        self.scheduler.check_integrity()

    def lose_workers(self) -> None:
        self.copies.clear()
        super().lose_workers()
        self.begin_era()

    def has_work(self) -> bool:
        return bool(self.results or self.copies or not self.scheduler.is_idle)


class Pair:
    """A lender and a borrower, and the requests that are on their way from one to the other."""

    def __init__(self, **overrides: Any) -> None:
        self.memory = MemoryFile("leases", num_bytes(MAX_BLOCKS))
        self.board = LeaseBoard(self.memory.path, MAX_BLOCKS)
        self.first, self.second = Replica(0, self.board, **overrides), Replica(1, self.board, **overrides)
        self.prompts: dict[int, list[int]] = {}

    def submit(self, rid: int, prompt: list[int], max_tokens: int = 6) -> None:
        self.prompts[rid] = prompt
        self.first.submit(rid, prompt, max_tokens=max_tokens, ignore_eos=True, hands_off=True)

    def move(self) -> int:
        """Requests that are offered go on at the other one, as a dispatcher moves them. How many were."""
        offers = self.first.offers()
        for offer in offers:
            rid = offer.key[1]
            output = np.array(self.first.streams[rid], np.int32)
            sequence = self.first.scheduler.sequence((0, rid))
            if sequence is None:
                continue
            submit = sequence.submit
            self.first.abort(rid)
            del self.first.ends[rid]
            self.second.submit(
                rid,
                self.prompts[rid],
                max_tokens=submit.max_tokens,
                ignore_eos=True,
                output=output,
                is_resumed=True,
                kv_lease=offer.lease,
            )
        return len(offers)

    def turn(self, replica: Replica) -> None:
        """A step is planned, or a result applied."""
        if (replica.launch() is None and replica.results) or len(replica.results) > 1:
            replica.complete()

    def run(self) -> None:
        for _ in range(3000):
            if not (self.first.has_work() or self.second.has_work()):
                return
            for replica in (self.first, self.second):
                self.turn(replica)
            self.move()
            if self.second.copies:
                self.second.finish_copy(self.first)
        raise AssertionError("requests wait for ever")

    def streams(self) -> dict[int, list[int]]:
        return self.first.streams | self.second.streams
