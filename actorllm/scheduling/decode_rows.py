"""`DecodeRows`: the decode rows of the step that is being planned, and which of them need another block for it.

Found anew for every step, by column: that is most of what a steady step costs. Invariant: `growing` are rows of the step, and
each of them gets one block before the plan is built. Owned by Scheduler.
"""

from __future__ import annotations

import numpy as np

from actorllm.kvcache.manager import KVCacheManager
from actorllm.messages import I32, NO_I32
from actorllm.scheduling.batch import Batch, Rows
from actorllm.scheduling.lanes import RowLanes


class DecodeRows:
    """spare: tokens that a row needs room for beyond the one that a step samples. lanes: those of the current one only."""

    def __init__(self, batch: Batch, kv: KVCacheManager, spare: int, lanes: RowLanes | None = None) -> None:
        self._all = batch.rows if lanes is None else lanes.rows
        self.rows: Rows = batch.rows()
        """Those that can get a token now."""
        self.computed: I32 = NO_I32
        """How many tokens each of them has computed."""
        self.growing: I32 = NO_I32
        """Slots of those that need a block."""
        self._batch = batch
        self._kv = kv
        self._reach: I32 = np.array(2 + spare, np.int32)

    def find(self) -> None:
        """After whatever has changed: all of them."""
        batch = self._batch
        self.rows = rows = self._all()
        # Room for the token computed now, the one it samples, and what the result may carry beyond that.
        self.computed = batch.num_computed[rows.index]
        # None of them reaches beyond its limit: a row whose last token is in flight decodes no more.
        self.growing = rows.slots[self.computed + self._reach > self._kv.capacity[rows.index]]

    def choose(self, wanted: I32 | None) -> Rows:
        """Find them again after preemptions; of these slots only, if not None. Returns the rows that decode."""
        self.find()
        if wanted is None:
            return self.rows
        wanted = wanted[self._batch.is_decoding[wanted]]
        self.growing = self.growing[np.isin(self.growing, wanted)]
        return self._batch.select(wanted.astype(np.intp))
