"""`WindowedWorker`: a `ScriptedWorker` that keeps a second KV group, and looks in it at all that a sliding window sees."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

from actorllm.messages import StepPlan
from tests.scheduling.chained_tokens import Row, ScriptedWorker


@dataclass
class WindowedWorker(ScriptedWorker):
    window: int = 1
    num_window_blocks: int = 1
    partner: dict[int, int] = field(default_factory=dict)
    owner: dict[int, int] = field(default_factory=dict)
    windowed: dict[tuple[int, int], int] = field(default_factory=dict)
    """By block of the second group and offset, the entry of the first group that was written with it."""

    def _apply(self, plan: StepPlan) -> None:
        copies = list(zip(plan.copy_sources.tolist(), plan.copy_targets.tolist(), strict=True))
        contents = [self._content(self.partner[source]) for source, _ in copies]
        for (_, target), content in zip(copies, contents, strict=True):
            self._fill(self.partner[target], content)
        for block, partner in plan.partners.reshape(-1, 2).tolist():
            assert 0 <= partner < self.num_window_blocks
            owner = self.owner.get(partner)
            if owner is not None and self.partner.get(owner) == partner:
                del self.partner[owner]
            self.partner[block], self.owner[partner] = partner, block
            self._fill(partner, {})
        super()._apply(plan)

    def _content(self, partner: int) -> dict[int, int]:
        return {
            offset: self.windowed[partner, offset]
            for offset in range(self.block_size)
            if (partner, offset) in self.windowed
        }

    def _fill(self, partner: int, content: dict[int, int]) -> None:
        for offset in range(self.block_size):
            self.windowed.pop((partner, offset), None)
        self.windowed.update({(partner, offset): entry for offset, entry in content.items()})

    def _compute(self, row: Row, count: int, forks: Sequence[Row] = ()) -> None:
        for _ in range(count):
            position = row.computed
            for seen in range(max(0, position - self.window + 1), position):
                block, offset = divmod(seen, self.block_size)
                entry = self.windowed.get((self.partner[row.blocks[block]], offset))
                assert entry == self._entry(row, seen), f"position {position} sees other KV at {seen}"
            super()._compute(row, 1, forks)
            block, offset = divmod(position, self.block_size)
            partner = self.partner[row.blocks[block]]
            assert self.owner[partner] == row.blocks[block]
            self.windowed[partner, offset] = self._entry(row, position)
