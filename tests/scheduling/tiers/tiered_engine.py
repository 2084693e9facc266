"""`TieredEngine`: an engine driven by hand whose scheduler has a tier, and whose worker moves what it has in its blocks."""

from __future__ import annotations

from typing import Any

from actorllm.kvcache.prefix_index import HASH_BYTES
from actorllm.scheduling.tiers.transfers import BlockLoad, BlockStore
from tests.scheduling.conftest import Engine

Content = list[int | None]


def split(hashes: bytes) -> list[bytes]:
    return [hashes[at : at + HASH_BYTES] for at in range(0, len(hashes), HASH_BYTES)]


class Tier:
    """A directory, and what is behind it."""

    def __init__(self) -> None:
        self.contents: dict[bytes, Content] = {}
        self.is_lying = False
        """It promises what it does not have any more."""
        self.lost: set[bytes] = set()

    def count(self, hashes: bytes) -> int:
        number = 0
        for one in split(hashes):
            if one not in self.contents and not (self.is_lying and one in self.lost):
                break
            number += 1
        return number

    def missing(self, hashes: bytes) -> list[bool]:
        return [one not in self.contents for one in split(hashes)]

    def remove(self, hashes: bytes) -> None:
        for one in split(hashes):
            self.contents.pop(one, None)
            self.lost.discard(one)

    def forget_all(self) -> None:
        self.contents.clear()
        self.lost.clear()

    def lose(self, number: int) -> None:
        """What some slots have is corrupt, and a look at their data will tell."""
        for one in list(self.contents)[::number]:
            self.lost.add(one)
            del self.contents[one]
        self.is_lying = True


class TieredEngine(Engine):
    """Moves are begun before each plan, and carried out when the test says so, or when nothing else is left to do."""

    def __init__(self, tier: Tier | None = None, **overrides: Any) -> None:
        self.tier = Tier() if tier is None else tier
        super().__init__(tiers=self.tier, **overrides)
        self.moves: list[BlockLoad | BlockStore] = []

    @property
    def transfers(self) -> Any:
        return self.scheduler.transfers

    def begin_moves(self) -> None:
        self.moves += self.transfers.next(self.now, self.scheduler.is_idle)
        self.scheduler.check_integrity()

    def finish_move(self) -> None:
        """The oldest one is carried out, and its end is told."""
        move = self.moves.pop(0)
        if isinstance(move, BlockStore):
            self._store(move)
        else:
            self._load(move)
        self.scheduler.check_integrity()

    def _store(self, move: BlockStore) -> None:
        for one, block in zip(split(move.hashes), move.blocks.tolist(), strict=True):
            self.tier.contents[one] = [self.worker.kv.get((block, at)) for at in range(self.worker.block_size)]
        self.transfers.stored(move, move.blocks.size, 0.01)

    def _load(self, move: BlockLoad) -> None:
        num_good = 0
        for one, block in zip(split(move.wanted), move.blocks.tolist(), strict=True):
            content = self.tier.contents.get(one)
            if content is None:
                self.tier.lost.discard(one)
                break
            for at, entry in enumerate(content):
                if entry is not None:
                    self.worker.kv[block, at] = entry
            num_good += 1
        self.transfers.loaded(move, num_good, 0.001 * num_good, self.now)

    def launch(self) -> Any:
        self.begin_moves()
        return super().launch()

    def lose_workers(self) -> None:
        self.moves.clear()
        super().lose_workers()

    def run(self) -> None:
        for _ in range(1000):
            super().run()
            self.begin_moves()
            if not self.moves:
                if self.scheduler.is_idle:
                    return
                self.now = max(self.now, min(self.transfers.next_deadline, self.now + 60.0))
                continue
            while self.moves:
                self.finish_move()
        raise AssertionError(f"{self.scheduler.statistics()} wait for ever")
