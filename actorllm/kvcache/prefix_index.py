"""`PrefixIndex`: finds the blocks whose KV a prompt can take over; and the block hashes by which it finds them.

A block's hash covers its token ids, the hash of the block before it, and an extra key (cache salt, adapter, image). The key
keeps apart what has the same ids and must not share KV. The frontend computes the hashes of the prompt, which travel in
`Submit`; those of output are computed here.

The index is a tree of runs. A `BlockRun` is a stretch of consecutive blocks that one request published at once, and a child
goes on where its parent ends. Work is per run and not per block, whatever the length of a prompt. A hash covers everything
before it, so a bisection finds the block up to which two runs agree.

Output that a finished request leaves behind is a *tail* without hashes. They are computed from the paged token ids when a
prompt gets that far for the first time, which most never do. The first request that leaves a run with a tail puts it into
the run itself, as blocks behind those with hashes. The tails of others hang at it as runs of their own.

Invariants (`check_integrity`): the children of a run have distinct first hashes and are found under them. The blocks of
every run that can be found are kept in the pool under the run's number. A request that holds a block of a run holds those
before it too, so that a run loses its blocks from the end. A run that was cut off (evicted, forgotten) may leave children that
no look-up finds any more. Their blocks stay kept until they are evicted in turn.
Called by `KVCacheManager` only.
"""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Protocol, TypeAlias

import numpy as np
from numpy.typing import NDArray

from actorllm.kvcache.block_pool import BlockPool
from actorllm.messages import I32, NO_I32, NO_U8, U8

HASH_BYTES = 32

Blocks: TypeAlias = NDArray[np.intp]
"""Numbers of blocks as numpy indexes with: it makes these from any other integers, at each use."""

MAX_TAILS = 32
"""Most tails of one run that a single look-up computes the hashes of, the latest first: it bounds what a look-up takes."""


def extra_key(cache_salt: str | None = None, adapter: str | None = None, weights: str = "", cache: str = "") -> bytes:
    """What must be equal for two requests to share KV, beside the tokens.

    adapter: the digest of its content. weights: the identity of the version that computes it (`WeightSource.identity`).
    cache: how it is stored, where that is not the type of the model (`CacheConfig.hash_key`).
    """
    of_weights = b"weights\0" + weights.encode() + b"\0" if weights else b""
    if cache:
        of_weights = b"cache\0" + cache.encode() + b"\0" + of_weights
    if cache_salt is None and adapter is None:
        return of_weights
    salt = b"" if cache_salt is None else b"salt\0" + cache_salt.encode()
    return of_weights + (adapter or "0").encode() + b"\0" + salt


def first_digest(key: bytes) -> bytes:
    """What the hash of the first block continues."""
    return hashlib.sha256(b"actorllm-block-1\0" + key).digest()


NO_KEYS: Mapping[int, bytes] = {}


def hash_blocks(token_ids: I32, block_size: int, key: bytes = b"", keys: Mapping[int, bytes] = NO_KEYS) -> U8:
    """The hashes of the full blocks of a prompt: HASH_BYTES for each, concatenated. keys: as of `continue_hashes`."""
    if token_ids.size < block_size:
        return NO_U8
    return np.frombuffer(continue_hashes(first_digest(key), token_ids, block_size, keys), np.uint8)


def continue_hashes(digest: bytes, token_ids: I32, block_size: int, keys: Mapping[int, bytes] = NO_KEYS) -> bytes:
    """The hashes of the full blocks of these tokens, which follow the block that `digest` is the hash of.

    keys: by the number of a block, what its hash covers beside the ids (images).
    """
    count = token_ids.size // block_size
    data = np.ascontiguousarray(token_ids[: count * block_size], "<i4").tobytes()
    step = 4 * block_size
    digests = []
    for number, start in enumerate(range(0, len(data), step)):
        digest = hashlib.sha256(digest + data[start : start + step] + keys.get(number, b"")).digest()
        digests.append(digest)
    return b"".join(digests)


_NO_CHILDREN: dict[bytes, BlockRun] = {}
_NO_TAILS: list[BlockRun] = []
"""Of most runs, which never get any. Never changed."""
NO_BLOCKS: Blocks = np.zeros(0, np.intp)


class BlockRun:
    """Consecutive blocks in the index: those at positions start..stop-1 of every sequence that begins this way."""

    __slots__ = ("blocks", "children", "hashes", "key", "known", "number", "parent", "start", "stop", "tails")

    def __init__(self, number: int, parent: BlockRun | None, start: int, blocks: Blocks, hashes: bytes) -> None:
        self.number = number
        self.parent = parent
        self.start = start
        self.stop = start + blocks.size
        self.blocks = blocks
        """Those from start to stop, and behind them the tail that is part of the run."""
        self.hashes = hashes
        """Of its blocks, and perhaps of some that were evicted from its end. Empty in a tail."""
        self.key = hashes[:HASH_BYTES]
        self.children = _NO_CHILDREN
        self.tails = _NO_TAILS
        self.known: I32 = NO_I32
        """Of a tail, its own or itself: the first token ids of its first block, those that are not among the paged ones."""

    @property
    def has_tail(self) -> bool:
        """Whether a tail is part of the run."""
        return self.blocks.size > self.stop - self.start

    @property
    def last_hash(self) -> bytes:
        count = self.stop - self.start
        return self.hashes[HASH_BYTES * (count - 1) : HASH_BYTES * count]


@dataclass(frozen=True, slots=True)
class PrefixIndexStatistics:
    num_runs: int
    num_resets: int


class HashObserver(Protocol):
    """Hears which hashes can be found. Output that no prompt was looked for in has none yet."""

    def add(self, hashes: bytes) -> None: ...
    def remove(self, hashes: bytes) -> None: ...
    def clear(self) -> None: ...


class PrefixIndex:
    """The tree of runs over one pool.

    read_token_ids(blocks): the paged token ids of these blocks, [num_blocks * block_size].
    """

    def __init__(self, pool: BlockPool, block_size: int, read_token_ids: Callable[[Blocks], I32]) -> None:
        self.version = 0
        """Changes whenever what is found may have changed."""
        self.observer: HashObserver | None = None
        self._pool = pool
        self._block_size = block_size
        self._read_token_ids = read_token_ids
        self._runs: dict[int, BlockRun] = {}
        self._last_number = 0
        self._num_resets = 0
        self._has_orphans = False
        """Whether runs are left that no look-up finds; a request may still hold their blocks and publish them once more."""
        self._root = BlockRun(0, None, 0, NO_BLOCKS, b"")

    def find(self, hashes: bytes, count: int) -> I32:
        """The longest run of blocks from the start whose hashes are these, `count` at most."""
        if hashes[:HASH_BYTES] not in self._root.children:
            return NO_I32
        found: list[Blocks] = []
        run, at = self._root, 0
        while at < count:
            child = self._child(run, hashes, at)
            if child is None:
                break
            run = child
            size = _num_equal(run, hashes, at, count)
            found.append(run.blocks[:size])
            at += size
            if at < run.stop:
                break
        if not found:
            return NO_I32
        return (np.concatenate(found) if len(found) > 1 else found[0]).astype(np.int32)

    def publish(self, hashes: bytes, blocks: I32) -> BlockRun:
        """From now on these referenced blocks, those at the start of a sequence, are found by their hashes.

        Blocks that are found already stay: of two that hold the same, the first is in the index. Returns the last run.
        """
        run, at = self._root, 0
        if hashes[:HASH_BYTES] in run.children:
            run, at = self._walk(hashes, blocks.size)
        if at < blocks.size:
            if at < run.stop:
                self._split(run, at)
            added = blocks[at:].astype(np.intp)
            if self._has_orphans:
                self._take_from_orphans(added)
            run = self._add(run, at, added, hashes[HASH_BYTES * at : HASH_BYTES * blocks.size])
        return run

    def begins(self, first: bytes) -> bool:
        """Whether anything here begins with the block of this hash."""
        return first in self._root.children

    def is_new(self, first: bytes) -> bool:
        """Whether nothing does, nor is left of what did."""
        return first not in self._root.children and not self._has_orphans

    def publish_whole(self, hashes: bytes, blocks: I32, known: I32) -> None:
        """`publish` and `publish_tail` in one, of a sequence that nothing here begins like."""
        added = blocks.astype(np.intp)
        if self._has_orphans:
            self._take_from_orphans(added)
        run = self._add(self._root, 0, added, hashes)
        run.stop = len(hashes) // HASH_BYTES
        run.known = known

    def publish_tail(self, hashes: bytes, blocks: I32, known: I32, run: BlockRun | None = None) -> None:
        """The referenced blocks at the start of one sequence: as many as there are hashes, and those that follow them.

        The tokens of the latter are `known`, and then the paged ones. Where the former are not in the index any more, they
        are not put in either. run: what `publish` returned for these hashes, if that was called.
        """
        start = len(hashes) // HASH_BYTES
        if not start:
            return
        if run is None or self._has_orphans or run.stop != start or self._runs.get(run.number) is not run:
            run, at = self._walk(hashes, start)
            if at < start:
                return
            if start < run.stop:
                self._split(run, start)
        added = blocks.astype(np.intp)
        if self._has_orphans:
            self._take_from_orphans(added[start:])
        if run.blocks.item(-1) == added.item(start - 1):  # no tail yet; a holder of its last block holds all of it
            self._pool.keep(added[start:], run.number)
            run.blocks = added[run.start :] if run.start else added
            run.known = known
        else:
            tail = self._new_run(run, start, added[start:], b"")
            tail.known = known
            if run.tails is _NO_TAILS:
                run.tails = []
            run.tails.append(tail)
        self.version += 1

    def hashes_of(self, blocks: I32) -> list[bytes]:
        """The hash by which each of these blocks is found; empty: by none."""
        labels = self._pool.labels(blocks).tolist()
        hashes: dict[int, bytes] = {}
        for label in set(labels) - {0}:
            run = self._runs.get(label)
            if run is not None and self._can_be_found(run):
                for at, block in enumerate(run.blocks[: run.stop - run.start].tolist()):
                    hashes[block] = run.hashes[HASH_BYTES * at : HASH_BYTES * (at + 1)]
        return [hashes.get(block, b"") for block in blocks.tolist()]

    def _can_be_found(self, run: BlockRun) -> bool:
        """Whether a look-up gets to a run: it is no tail, and nothing before it was forgotten or evicted."""
        while (parent := run.parent) is not None:
            if not run.key or parent.children.get(run.key) is not run:
                return False
            run = parent
        return run is self._root

    def forget(self, hashes: bytes) -> None:
        """Nothing that begins like this is found any more."""
        at = 0
        run = self._root
        count = len(hashes) // HASH_BYTES
        while at < count:
            child = run.children.get(hashes[HASH_BYTES * at : HASH_BYTES * (at + 1)])
            if child is None:
                break
            run = child
            at += _num_equal(run, hashes, at, count)
            self._pool.discard(run.blocks)
            del self._runs[run.number]
            for tail in run.tails:
                self._pool.discard(tail.blocks)
                self._runs.pop(tail.number, None)
            if at < run.stop:
                break
        if at:
            first = self._root.children.pop(hashes[:HASH_BYTES], None)
            if first is not None and self.observer is not None:
                self._tell_removed(first, 0)
            self._has_orphans = True
            self.version += 1

    def drop(self, blocks: I32) -> None:
        """These blocks hold nothing of worth. `forget` was called for what they began with: only orphans have them still."""
        for number in set(self._pool.labels(blocks).tolist()) - {0}:
            orphan = self._runs.pop(number, None)
            if orphan is not None:
                self._pool.discard(orphan.blocks[self._pool.labels(orphan.blocks) == number])
        self._pool.discard(blocks)

    def reset(self) -> None:
        """Nothing is found any more."""
        self._root = BlockRun(0, None, 0, NO_BLOCKS, b"")
        self._runs.clear()
        self._pool.discard_all()
        self._has_orphans = False
        if self.observer is not None:
            self.observer.clear()
        self._num_resets += 1
        self.version += 1

    def on_evict(self, blocks: Blocks, labels: I32) -> None:
        """The pool hands these blocks out again: every run loses them and what lies behind them."""
        self.version += 1
        lasts = (labels[1:] != labels[:-1]).nonzero()[0].tolist()  # where the blocks of a run end
        lasts.append(labels.size - 1)
        first, runs = 0, self._runs
        for last in lasts:
            run = runs.get(labels.item(last))
            if run is not None:
                evicted = blocks[first : last + 1]
                left = run.blocks.size - evicted.size
                if left < 0 or np.count_nonzero(run.blocks[left:][::-1] != evicted):  # not its end, latest first
                    lost = np.isin(run.blocks, evicted).nonzero()[0]
                    # None: they lay behind blocks that it lost before.
                    left = int(lost[0]) if lost.size else run.blocks.size
                if left == 0 and not run.children and not run.tails:
                    self._remove(run)
                elif left < run.blocks.size:
                    self._cut(run, left)
            first = last + 1

    def _take_from_orphans(self, blocks: Blocks) -> None:
        """The publisher of these blocks has held them since a run of theirs was left: that is none any more."""
        for number in set(self._pool.labels(blocks).tolist()):
            self._runs.pop(number, None)

    def _child(self, run: BlockRun, hashes: bytes, at: int) -> BlockRun | None:
        if run.tails or run.has_tail:
            self._hash_tails(run)
        return run.children.get(hashes[HASH_BYTES * at : HASH_BYTES * (at + 1)])

    def _walk(self, hashes: bytes, count: int) -> tuple[BlockRun, int]:
        """The last run that agrees with these hashes, and up to which block."""
        run, at = self._root, 0
        while at < count:
            child = self._child(run, hashes, at)
            if child is None:
                break
            run = child
            at += _num_equal(run, hashes, at, count)
            if at < run.stop:
                break
        return run, at

    def _new_run(self, parent: BlockRun, start: int, blocks: Blocks, hashes: bytes) -> BlockRun:
        self._last_number = self._last_number % (2**31 - 1) + 1
        run = BlockRun(self._last_number, parent, start, blocks, hashes)
        self._runs[run.number] = run
        self._pool.keep(blocks, run.number)
        return run

    def _add(self, parent: BlockRun, start: int, blocks: Blocks, hashes: bytes) -> BlockRun:
        run = self._new_run(parent, start, blocks, hashes)
        if parent.children is _NO_CHILDREN:
            parent.children = {}
        parent.children[run.key] = run
        if self.observer is not None:
            self.observer.add(hashes)
        self.version += 1
        return run

    def _split(self, run: BlockRun, at: int) -> None:
        """Two runs of one: the first keeps its number and ends before block `at`."""
        size = at - run.start
        lower = self._new_run(run, at, run.blocks[size:], run.hashes[HASH_BYTES * size :])
        lower.stop, lower.known = run.stop, run.known
        lower.children, lower.tails = run.children, run.tails
        for child in (*lower.children.values(), *lower.tails):
            child.parent = lower
        run.blocks, run.hashes, run.stop = run.blocks[:size], run.hashes[: HASH_BYTES * size], at
        run.children, run.tails, run.known = {lower.key: lower}, _NO_TAILS, NO_I32

    def _cut(self, run: BlockRun, left: int) -> None:
        """A run loses its blocks from the one at `left` on, and with them everything that goes on behind."""
        if run.start + left < run.stop:
            if self.observer is not None:
                self._tell_removed(run, left)
            if run.children or run.tails:
                run.children, run.tails = _NO_CHILDREN, _NO_TAILS
                self._has_orphans = True
            run.stop = run.start + left
        if left:
            run.blocks = run.blocks[:left]
            return
        self._remove(run)

    def _remove(self, run: BlockRun) -> None:
        """A run that nothing is left of, or goes on behind, is found no more."""
        del self._runs[run.number]
        if self.observer is not None:
            self._tell_removed(run, 0)
        run.stop = run.start
        parent, key = run.parent, run.key
        if parent is None:
            return
        if key:
            if parent.children.get(key) is run:
                del parent.children[key]
        elif run in parent.tails:
            parent.tails.remove(run)

    def _tell_removed(self, run: BlockRun, left: int) -> None:
        """The observer hears that a run is not found any more from its block `left` on, nor what goes on behind.

        What goes on behind has no hashes from here on: when its blocks are evicted in turn, others may be found by these.
        """
        assert self.observer is not None
        self.observer.remove(run.hashes[HASH_BYTES * left : HASH_BYTES * (run.stop - run.start)])
        run.hashes = run.hashes[: HASH_BYTES * left]
        behind = list(run.children.values())
        while behind:
            one = behind.pop()
            self.observer.remove(one.hashes[: HASH_BYTES * (one.stop - one.start)])
            one.hashes = b""
            behind += one.children.values()

    def _hash_tails(self, run: BlockRun) -> None:
        """Make ordinary children of the latest tails."""
        for _ in range(min(len(run.tails), MAX_TAILS)):
            tail = run.tails.pop()
            del self._runs[tail.number]
            self._hash_tail(run, tail.blocks, tail.known)
        if run.has_tail and not run.tails:
            size = run.stop - run.start
            blocks, run.blocks = run.blocks[size:], run.blocks[:size]
            self._hash_tail(run, blocks, run.known)

    def _hash_tail(self, run: BlockRun, blocks: Blocks, known: I32) -> None:
        """Make the blocks of a tail that is none any more an ordinary child."""
        tokens = self._read_token_ids(blocks)
        tokens[: known.size] = known[: tokens.size]
        self._continue(run, continue_hashes(run.last_hash, tokens, self._block_size), blocks)

    def _continue(self, run: BlockRun, hashes: bytes, blocks: Blocks) -> None:
        """Put blocks behind a run; those that are found there already are given up."""
        at, count = 0, blocks.size
        while at < count:
            child = run.children.get(hashes[HASH_BYTES * at : HASH_BYTES * (at + 1)])
            if child is None:
                break
            size = _num_equal(child, hashes[HASH_BYTES * at :], child.start, child.start + count - at)
            run = child
            at += size
            if run.start + size < run.stop:
                break
        self._pool.discard(blocks[:at])
        if at < count:
            start = run.start + size if at else run.stop
            if start < run.stop:
                self._split(run, start)
            self._add(run, start, blocks[at:], hashes[HASH_BYTES * at :])

    def statistics(self) -> PrefixIndexStatistics:
        return PrefixIndexStatistics(num_runs=len(self._runs), num_resets=self._num_resets)

    def check_integrity(self) -> None:
        """AssertionError when an invariant of the module docstring does not hold."""
        stack = [self._root]
        seen: set[int] = set()
        while stack:
            run = stack.pop()
            for key, child in run.children.items():
                assert child.key == key, "a run is found under another hash"
                assert len(child.hashes) >= HASH_BYTES * (child.stop - child.start), "a run lacks hashes"
            assert not any(tail.has_tail or tail.hashes for tail in run.tails), "a tail has hashes or a tail"
            assert not run.tails or run is not self._root, "a tail without a run before it"
            for child in (*run.children.values(), *run.tails):
                assert child.parent is run, "a run does not know its parent"
                assert child.start == run.stop, "a run does not begin where its parent ends"
                assert 0 < child.stop - child.start <= child.blocks.size, "a run has another length than it says"
                assert self._runs.get(child.number) is child, "a run is not under its number"
                assert (self._pool.labels(child.blocks) == child.number).all(), "blocks of a run are not kept for it"
                assert not seen & set(child.blocks.tolist()), "a block is found in two places"
                seen |= set(child.blocks.tolist())
                stack.append(child)
        labels = self._pool.labels(np.arange(self._pool.num_blocks, dtype=np.int32))
        assert set(self._runs) <= set(labels.tolist()), "a run without blocks is kept"


def _num_equal(run: BlockRun, hashes: bytes, at: int, count: int) -> int:
    """How many blocks of a run have these hashes, given that the first has: the run begins at block `at` of `count`."""
    first = HASH_BYTES * at
    size = min(run.stop - run.start, count - at)
    end = HASH_BYTES * (size - 1)
    if hashes[first + end : first + end + HASH_BYTES] == run.hashes[end : end + HASH_BYTES]:
        return size
    low, high = 1, size - 1  # the block before low is equal, the one at high is not
    while low < high:
        middle = (low + high) // 2
        end = HASH_BYTES * middle
        if hashes[first + end : first + end + HASH_BYTES] == run.hashes[end : end + HASH_BYTES]:
            low = middle + 1
        else:
            high = middle
    return low
