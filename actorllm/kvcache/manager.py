"""`KVCacheManager`: the block table of every slot, and what has to be done to blocks before the next step.

Owned by the scheduler. Tables are columns by slot: `tables[0, slot, i]` is the block of tokens i * block_size and following.
The blocks of layers with a window are told by partners (`window_group`). `capacity[slot]` is how many tokens the slot's
blocks hold. Besides the KV, the blocks address the *ids* of sampled tokens: `token_ids[block, offset]`. These are written for
a whole step in one scatter, so that no request needs an array of its own that grows token by token.

With prefix caching, full blocks that were published stay findable after their last request has gone, until the pool runs
out of others. A published block is never written again: a request that takes it over goes on in a block of its own.

A fork (`fork`) shares the full blocks of another slot's tokens as well. The block in which they end is being written by the
step that is planned then, and by no other. The copy is made before the step after that.

Invariants (`check_integrity`): a slot's table entries are distinct allocated blocks; every allocated block is in some table, or is
held beside the tables (`hold`, `reserve`).
A block that is to be copied to belongs to one slot.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from actorllm.kvcache.block_pool import BlockPool
from actorllm.kvcache.prefix_index import BlockRun, PrefixIndex
from actorllm.kvcache.window_group import WindowGroup
from actorllm.messages import I32, NO_I32

NUM_TABLES_SENT = 1
"""Block tables that workers are told of. A second KV group has its blocks by way of these (`window_group`)."""


@dataclass(frozen=True, slots=True)
class KVCacheStatistics:
    num_blocks: int
    num_free: int
    block_size: int
    usage: float
    """Share of the blocks in use."""
    peak_used: int
    num_cached: int
    """Free blocks that keep their KV for the prefix cache."""
    num_evicted: int
    """Blocks that the prefix cache lost to others, since the start."""


@dataclass(slots=True)
class BlockActions:
    """Work on KV blocks that the next plan must carry."""

    zero: list[I32]
    copy: list[tuple[int, int]]
    """(source, target)"""
    copy_later: list[tuple[int, int]]
    """For the plan after the next one."""


class KVCacheManager:
    """Block tables by slot over one pool.

    Columns are indexed with intp throughout: of any other integers numpy makes these first, which takes it many times longer
    than to find the elements of a few dozen rows.
    """

    def __init__(
        self, num_blocks: int, block_size: int, num_slots: int, max_len: int, enable_prefix_caching: bool = False
    ) -> None:
        self.block_size = block_size
        self._size: I32 = np.array(block_size, np.int32)  # for columns: numpy converts a Python integer at each use
        self._one: I32 = np.ones((), np.int32)
        self.max_blocks_per_slot = -(-max_len // block_size)
        self.pool = BlockPool(num_blocks, self._on_evict)
        self.index = PrefixIndex(self.pool, block_size, self._token_ids_of) if enable_prefix_caching else None
        self.tables: NDArray[np.int32] = np.zeros((NUM_TABLES_SENT, num_slots, self.max_blocks_per_slot), np.int32)
        self.num_blocks: I32 = np.zeros(num_slots, np.int32)
        self.capacity: I32 = np.zeros(num_slots, np.int32)
        self._table: I32 = self.tables[0]
        self._flat_table: I32 = self._table.reshape(-1)
        self._index_size: NDArray[np.intp] = np.array(block_size, np.intp)
        self._slot_index_size: NDArray[np.intp] = np.array(block_size * self.max_blocks_per_slot, np.intp)
        # As many tokens as all tables hold, or all blocks: numpy counts them sooner in 32 bits where these are enough.
        most = block_size * max(num_slots * self.max_blocks_per_slot, num_blocks)
        self._place = np.dtype(np.int32 if most <= np.iinfo(np.int32).max else np.int64)
        self._slot_size = np.array(block_size * self.max_blocks_per_slot, self._place)
        self.token_ids: NDArray[np.int32] = np.zeros((num_blocks, block_size), np.int32)
        self._flat_ids: I32 = self.token_ids.reshape(-1)
        self._numbers = np.arange(64, dtype=self._place)
        self._token_slots = np.empty(0, np.intp)
        self._token_places = self._token_slots
        """The slots that last got a token each, and where their tables begin."""
        self._run_slots = self._run_places = NO_I32
        """The slots of the last runs, and where their tables begin."""
        self._actions: BlockActions | None = None
        self._emptied: list[I32] = []
        self.window: WindowGroup | None = None
        """The group of layers with a sliding window; None: there is one group."""
        self._held: I32 | None = None
        """References by block that no table has, once there were some."""
        self.on_evict: Callable[[NDArray[np.intp]], None] | None = None
        """Hears which blocks the prefix cache loses to others."""

    def add_window(self, window: int, num_blocks: int) -> None:
        """A second group of so many blocks, whose layers look at so many tokens. Before any slot has blocks."""
        self.window = WindowGroup(
            window, self.pool.num_blocks, num_blocks, self.block_size, self._table, keeps=self.index is not None
        )

    @property
    def num_free(self) -> int:
        if self._emptied:
            self._release()
        return self.pool.num_free

    def blocks_for(self, num_tokens: int) -> int:
        """How many blocks hold this many tokens."""
        return -(-num_tokens // self.block_size)

    def fill(self, demand: list[tuple[int, int]], shared: dict[int, I32] | None = None) -> I32:
        """Give every (slot, count), an empty slot, so many blocks; the caller has checked `num_free`.

        shared: blocks that some of these slots begin with, part of their count; a reference to each was taken before
        (`share`). Returns all the blocks, one slot after the other.
        """
        if shared:
            blocks = self._fill_in(demand, shared)
        else:
            blocks = self._allocate(sum([count for _, count in demand]))
        start, size = 0, self.block_size
        for slot, count in demand:
            self._table[slot, :count] = blocks[start : start + count]
            self.num_blocks[slot] = count
            self.capacity[slot] = count * size
            start += count
        return blocks

    def _fill_in(self, demand: list[tuple[int, int]], shared: dict[int, I32]) -> I32:
        """The blocks of `fill`, where some of them are there already."""
        new = self._allocate(sum(count for _, count in demand) - sum(blocks.size for blocks in shared.values()))
        parts: list[I32] = []
        at = 0
        for slot, count in demand:
            found = shared.get(slot, NO_I32)
            parts += (found, new[at : at + count - found.size])
            at += count - found.size
        return np.concatenate(parts)

    def share(self, blocks: I32) -> None:
        """One more reference to each of these blocks, which are to be in one more table."""
        if self._emptied:
            self._release()
        self.pool.share(blocks)

    # Blocks beside the tables: those that are copied elsewhere, or filled from there

    def hold(self, blocks: I32) -> None:
        """These (distinct) blocks, referenced or kept, stay what they are until `let_go`."""
        self.share(blocks)
        self._count_held(blocks, 1)

    def reserve(self, count: int) -> I32:
        """So many blocks that no table has, until `let_go`; the caller has checked `num_free`."""
        blocks = self._allocate(count)
        self._count_held(blocks, 1)
        if (
            self._actions is not None and self._actions.zero
        ):  # what fills them must not be cleared by a plan that comes later
            taken = set(blocks.tolist())
            self._actions.zero = [
                np.array([b for b in one.tolist() if b not in taken], np.int32) for one in self._actions.zero
            ]
        return blocks

    def let_go(self, blocks: I32) -> None:
        """As these blocks were held or reserved, they are no more."""
        if not blocks.size:
            return
        if self._emptied:
            self._release()
        self._count_held(blocks, -1)
        self.pool.release(blocks)

    @property
    def num_held(self) -> I32 | int:
        """By block, how often it is held or reserved beside the tables; 0: none ever was."""
        return 0 if self._held is None else self._held

    def _count_held(self, blocks: I32, change: int) -> None:
        if self._held is None:
            self._held = np.zeros(self.pool.num_blocks, np.int32)
        self._held[blocks] += change

    def fork(self, source: int, num_tokens: int, slot: int, count: int) -> I32:
        """As `fill`, of one slot, which begins with the first num_tokens tokens of another. Returns its blocks.

        The next plan computes these tokens to their end. The full blocks are shared; the block that they end in is copied
        with the plan after the next one.
        """
        num_full = num_tokens // self.block_size
        full = self._table[source, :num_full].copy()
        if num_full:
            self.share(full)
        blocks = self.fill([(slot, count)], {slot: full})
        if num_tokens % self.block_size:
            self._pending_actions().copy_later.append(
                (self._table.item(source, num_full), self._table.item(slot, num_full))
            )
        if self.window is not None:
            self.window.fork(source, slot, num_tokens, count)
        return blocks

    def num_exclusive(self, slot: int, besides: I32 = NO_I32) -> int:
        """How many blocks are free once this slot is emptied; besides: not counting these."""
        blocks = self._table[slot, : self.num_blocks[slot]]
        if besides.size:
            blocks = blocks[~np.isin(blocks, besides)]
        return self.pool.num_exclusive(blocks)

    def extend(self, slots: I32) -> I32:
        """One more block for each of these slots, in their order; the caller has checked `num_free`. Returns them."""
        blocks = self._allocate(slots.size)
        index = slots.astype(np.intp)  # numpy makes these from any other integers, at each use
        counts = self.num_blocks[index]
        self._table[index, counts.astype(np.intp)] = blocks
        counts += self._one
        self.num_blocks[index] = counts
        self.capacity[index] = counts * self._size
        return blocks

    def extend_in_order(self, slots: I32) -> None:
        """As many `extend` calls as there are entries, one after the other; a slot may come up several times."""
        blocks = self._allocate(slots.size)
        order = np.argsort(slots, kind="stable")
        sorted_slots = slots[order].astype(np.intp)
        is_first = np.ones(sorted_slots.size, np.bool_)
        np.not_equal(sorted_slots[1:], sorted_slots[:-1], out=is_first[1:])
        firsts = is_first.nonzero()[0]
        if firsts.size == sorted_slots.size:  # no slot comes up twice
            counts = self.num_blocks[sorted_slots]
            self._table[sorted_slots, counts] = blocks[order]
            counts += self._one
        else:
            repeats = np.append(firsts[1:], sorted_slots.size) - firsts
            occurrence = np.arange(sorted_slots.size) - np.repeat(firsts, repeats)
            self._table[sorted_slots, self.num_blocks[sorted_slots] + occurrence] = blocks[order]
            sorted_slots = sorted_slots[firsts]
            counts = self.num_blocks[sorted_slots] + repeats.astype(np.int32)
        self.num_blocks[sorted_slots] = counts
        self.capacity[sorted_slots] = counts * self._size

    def extend_over(self, slots: I32, spare: I32, steps: int) -> None:
        """What so many steps in a row would take: a slot gets a block in step number spare[i], and in every block_size-th after it.

        The caller has checked `num_free`.
        """
        first = int(spare.min())
        if first >= steps:
            return
        if first + self.block_size >= steps:  # no slot gets two
            grown = (spare < steps).nonzero()[0]
            self.extend_in_order(slots[grown[spare[grown].argsort(kind="stable")]])
        else:
            when = spare[:, None] + self.block_size * np.arange(-(-steps // self.block_size) + 1)
            grown, times = np.nonzero(when < steps)
            self.extend_in_order(slots[grown[np.lexsort((grown, when[grown, times]))]])

    def empty(self, slot: int, *, zero: bool = False) -> None:
        """Take all blocks from a slot. zero: their contents are not finite and must be cleared before they are reused."""
        blocks = self._table[slot, : self.num_blocks.item(slot)]  # nothing is written there before they are released
        if self._actions is not None:
            self._drop_copies(self._actions, blocks)
        if self.window is not None:
            self.window.empty(slot)
        if zero:
            self._release()
            freed = self.pool.release(blocks)
            if freed.size:
                self.zero(freed)
        else:
            self._emptied.append(blocks)
        self.num_blocks[slot] = 0
        self.capacity[slot] = 0

    @staticmethod
    def _drop_copies(actions: BlockActions, targets: I32) -> None:
        """What was to be copied to these blocks is not needed any more."""
        if not actions.copy and not actions.copy_later:
            return
        gone = set(targets.tolist())
        actions.copy = [pair for pair in actions.copy if pair[1] not in gone]
        actions.copy_later = [pair for pair in actions.copy_later if pair[1] not in gone]

    def _allocate(self, count: int) -> I32:
        if self._emptied:
            self._release()
        return self.pool.allocate(count)

    def _release(self) -> None:
        """Give back what slots were emptied of: all at once, in the order in which one by one would have given it."""
        emptied, self._emptied = self._emptied, []
        if not emptied:
            return
        if self.pool.has_shared:
            for blocks in emptied:
                self.pool.release(blocks)
        else:
            self.pool.release(np.concatenate(emptied[::-1]) if len(emptied) > 1 else emptied[0])

    # The prefix cache

    def publish(self, slot: int, hashes: bytes, num_blocks: int) -> BlockRun | None:
        """The first blocks of a slot are computed and may be found by these hashes. Returns the run that they end with."""
        if self.index is None:
            return None
        return self.index.publish(hashes, self._table[slot, :num_blocks])

    def publish_output(
        self, slot: int, hashes: bytes, num_blocks: int, known: I32, run: BlockRun | None = None, is_new: bool = False
    ) -> None:
        """The blocks behind those that have hashes (and are published) are computed as well, up to num_blocks.

        They are hashed when a prompt gets that far. known: their first token ids, as many as are not paged. run: what
        `publish` returned, if that was called. is_new: it was not, and nothing in the index begins like this.
        """
        if self.index is None:
            return
        blocks = self._table[slot, :num_blocks]
        if is_new:
            self.index.publish_whole(hashes, blocks, known)
        else:
            self.index.publish_tail(hashes, blocks, known, run)

    def _on_evict(self, blocks: NDArray[np.intp], labels: I32) -> None:
        if self.index is not None:
            self.index.on_evict(blocks, labels)
        if self.on_evict is not None:
            self.on_evict(blocks)

    def _token_ids_of(self, blocks: NDArray[np.intp]) -> I32:
        return self.token_ids[blocks].ravel()

    def zero(self, blocks: I32) -> None:
        """Have these blocks cleared before the next step runs (0 x NaN in a reused block poisons its next owner)."""
        self._pending_actions().zero.append(blocks.copy())

    def copy(self, source: int, target: int) -> None:
        """Have one block copied before the next step runs (copy-on-write)."""
        self._pending_actions().copy.append((source, target))

    def _pending_actions(self) -> BlockActions:
        if self._actions is None:
            self._actions = BlockActions([], [], [])
        return self._actions

    @property
    def has_actions(self) -> bool:
        """Whether a plan to come must have blocks cleared or copied."""
        return self._actions is not None

    @property
    def has_copies(self) -> bool:
        """Whether a plan to come must have blocks copied."""
        return self._actions is not None and bool(self._actions.copy or self._actions.copy_later)

    def take_actions(self) -> tuple[I32, I32, I32]:
        """What is to be zeroed, copied from and copied to before the next step; the plan that carries it is the only one."""
        actions = self._actions
        if actions is None:
            return NO_I32, NO_I32, NO_I32
        self._actions = BlockActions([], actions.copy_later, []) if actions.copy_later else None
        zero = np.concatenate(actions.zero) if actions.zero else NO_I32
        pairs = np.array(actions.copy, np.int32).reshape(-1, 2)
        return zero, pairs[:, 0].copy(), pairs[:, 1].copy()

    def write_token_ids(self, slots: NDArray[np.intp], positions: I32, tokens: I32) -> None:
        """One sampled token id per slot, at these positions."""
        # Places as in `write_runs`, in the integers that numpy indexes with.
        if slots is not self._token_slots:  # the same array as last time while no row joins or leaves
            self._token_slots, self._token_places = slots, slots * self._slot_index_size
        places = self._token_places + positions
        entries = places // self._index_size
        self._flat_ids[(self._flat_table[entries] - entries) * self._index_size + places] = tokens

    def write_runs(self, slots: I32, counts: I32, ends: I32, after: I32, tokens: I32) -> None:
        """Several sampled token ids per slot, one slot after the other in `tokens`: counts[i] of them, up to ends[i], which
        are the last ones of the after[i] that the slot has then."""
        # A place is a position in all tables, one behind the other: one number says slot and position of a token.
        if slots is not self._run_slots:  # the same array as last time while no row joins or leaves
            self._run_slots, self._run_places = slots, slots * self._slot_size
        if tokens.size > self._numbers.size:
            self._numbers = np.arange(2 * tokens.size, dtype=self._place)
        places = (self._run_places + (after - ends)).repeat(counts.astype(np.intp))
        places += self._numbers[: tokens.size]
        entries = places // self._size
        blocks = self._flat_table[entries.astype(np.intp)]
        self._flat_ids[((blocks - entries) * self._size + places).astype(np.intp)] = tokens

    def write_token_id(self, slot: int, position: int, token: int) -> None:
        """One token id of one slot."""
        block = self._table[slot, position // self.block_size]
        self.token_ids[block, position % self.block_size] = token

    def read_token_ids(self, slot: int, start: int, stop: int) -> I32:
        """The sampled token ids at positions start..stop-1 of a slot."""
        if start >= stop:
            return NO_I32
        size = self.block_size
        first = start // size
        blocks = self._table[slot, first : -(-stop // size)]
        return self.token_ids[blocks].ravel()[start - first * size : stop - first * size]

    def statistics(self) -> KVCacheStatistics:
        num_free = self.num_free
        pool = self.pool.statistics()
        return KVCacheStatistics(
            num_blocks=pool.num_blocks,
            num_free=num_free,
            block_size=self.block_size,
            usage=1 - num_free / pool.num_blocks,
            peak_used=pool.peak_used,
            num_cached=pool.num_kept,
            num_evicted=pool.num_evicted,
        )

    def check_integrity(self) -> None:
        """AssertionError when an invariant of the module docstring does not hold."""
        if self._emptied:
            self._release()
        self.pool.check_integrity()
        if self.index is not None:
            self.index.check_integrity()
        if self.window is not None:
            self.window.check_integrity(self.num_blocks)
        held = [self._table[slot, :count] for slot, count in enumerate(self.num_blocks.tolist()) if count]
        blocks = np.concatenate(held) if held else NO_I32
        for table in held:
            assert np.unique(table).size == table.size, "a slot holds a block twice"
        references = np.bincount(blocks, minlength=self.pool.num_blocks)
        if self._held is not None:
            assert (self._held >= 0).all(), "a block is let go of more often than it was held"
            references = references + self._held
        assert (references == self.pool._references).all(), "reference counts differ from the block tables"
        assert (self.capacity == self.num_blocks * self.block_size).all(), "capacity differs from the number of blocks"
        targets = [] if self._actions is None else [target for _, target in self._actions.copy_later]
        assert (references[targets] == 1).all(), "a block that is copied to must have one holder"


class CountedKVCacheManager(KVCacheManager):
    """Of a simulated scheduler: how many blocks each slot has, and not which ones. No block is shared, found again or read."""

    def __init__(
        self, num_blocks: int, block_size: int, num_slots: int, max_len: int, enable_prefix_caching: bool = False
    ) -> None:
        if enable_prefix_caching:
            raise ValueError(
                "blocks that are only counted cannot be found again: prefix caching needs a KVCacheManager"
            )
        super().__init__(num_blocks, block_size, num_slots, max_len)
        self.token_ids = np.zeros((0, block_size), np.int32)
        self._flat_ids = NO_I32

    @property
    def num_free(self) -> int:
        return self.pool.num_free

    def fill(self, demand: list[tuple[int, int]], shared: dict[int, I32] | None = None) -> I32:
        if shared:
            raise ValueError("blocks that are only counted cannot be shared: forks need a KVCacheManager")
        for slot, count in demand:
            self.pool.count(count)
            self.num_blocks[slot] = count
            self.capacity[slot] = count * self.block_size
        return NO_I32

    def num_exclusive(self, slot: int, besides: I32 = NO_I32) -> int:
        return self.num_blocks.item(slot)

    def extend(self, slots: I32) -> I32:
        self.pool.count(slots.size)
        index = slots.astype(np.intp)
        counts = self.num_blocks[index]
        counts += self._one
        self.num_blocks[index] = counts
        self.capacity[index] = counts * self._size
        return NO_I32

    def extend_over(self, slots: I32, spare: I32, steps: int) -> None:
        more = np.maximum((steps + self.block_size - 1 - spare) // self._size, 0)
        self.pool.count(int(np.add.reduce(more)))
        index = slots.astype(np.intp)
        counts = self.num_blocks[index]
        counts += more
        self.num_blocks[index] = counts
        self.capacity[index] = counts * self._size

    def empty(self, slot: int, *, zero: bool = False) -> None:
        self.pool.count(-self.num_blocks.item(slot))
        self.num_blocks[slot] = 0
        self.capacity[slot] = 0

    def write_token_ids(self, slots: NDArray[np.intp], positions: I32, tokens: I32) -> None: ...

    def write_runs(self, slots: I32, counts: I32, ends: I32, after: I32, tokens: I32) -> None: ...

    def write_token_id(self, slot: int, position: int, token: int) -> None: ...

    def read_token_ids(self, slot: int, start: int, stop: int) -> I32:
        return np.zeros(max(0, stop - start), np.int32)

    def check_integrity(self) -> None:
        assert (self.num_blocks >= 0).all(), "a slot has a negative number of blocks"
        assert int(self.num_blocks.sum()) + self.num_free == self.pool.num_blocks, "blocks are miscounted"
        assert (self.capacity == self.num_blocks * self.block_size).all(), "capacity differs from the number of blocks"
