"""`PrefixCache`: what requests find of each other's KV, and when what they compute may be found.

The scheduler's side of prefix caching: which blocks of a request are hashed, looked up, published and forgotten, and when.
Which hash is which block, the tree of them and their eviction are `kvcache.prefix_index`.

A block is published when the step that computed it is reported. Blocks of a prompt are published chunk by chunk, those of output
when the request ends or is preempted. Three things are never published: a step that failed, tokens without known ids, and a
request whose logits are not finite. What such a request had published before is forgotten. A request that took it over
meanwhile, in a step that is in flight, is computed again.

Invariants: the first `Sequence.num_published` blocks of a request are in the index or were found there. `can_publish` is false
from a reset until the request is looked up again. What a look-up found (`hits`, `num_remaining`, `num_needed_blocks`) is of the
version of the index in `looked_up`. Used by Scheduler; without an index only the sizes are left of it.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable

import numpy as np

from actorllm.kvcache.manager import KVCacheManager
from actorllm.kvcache.prefix_index import HASH_BYTES, continue_hashes, extra_key, first_digest
from actorllm.messages import I32, NO_I32
from actorllm.scheduling.batch import Batch
from actorllm.scheduling.ledger import Ledger
from actorllm.scheduling.sequence import Sequence
from actorllm.scheduling.snapshots import Snapshots
from actorllm.scheduling.telemetry.statistics import PrefixCacheStatistics


class PrefixCache:
    """See the module docstring."""

    def __init__(
        self,
        kv: KVCacheManager,
        batch: Batch,
        ledger: Ledger,
        spare: int,
        weights: str = "",
        *,
        keeps_output_apart: bool = False,
        cache_key: str = "",
        snapshots: Snapshots | None = None,
    ) -> None:
        """What is found of each other's KV.

        Arguments:
            spare: tokens that a row needs room for beyond the one that a step samples.
            weights: the identity of those that the workers compute with.
            keeps_output_apart: blocks that hold output are never found: a prompt of the same tokens has other bits.
            cache_key: how blocks are stored (`CacheConfig.hash_key`).
            snapshots: of the states of recurrent layers; None: the model has none.
        """
        self.snapshots = snapshots
        self._cache_key = cache_key
        self._weights = weights
        self._keeps_output_apart = keeps_output_apart
        self._kv = kv
        self._batch = batch
        self._ledger = ledger
        self._spare = spare
        self._fresh: dict[bytes, Sequence] = {}
        """By their first hash, requests that run and what they published: the index has it once a look-up wants it."""
        self.on_forget: Callable[[bytes], None] | None = None
        """Hears which hashes are not what they should be."""
        self._looked_up = [0, 0, 0]  # requests, queries, hits
        self._looked_up_again = [0, 0, 0]

    # Finding ----------------------------------------------------------------------------------------------------------

    def hash_known(self, sequence: Sequence) -> None:
        """Hashes of all its full blocks of known tokens, as far as it came with the first of them."""
        submit, size = sequence.submit, self._kv.block_size
        if self._kv.index is None or (not submit.block_hashes.size and submit.prompt.size >= size):
            return
        sequence.can_publish = True
        is_current = submit.weights == self._weights  # else its frontend did not know of the weights of now
        hashes = sequence.hashes or (submit.block_hashes.tobytes() if is_current else b"")
        done = len(hashes) // HASH_BYTES * size
        num_hashed = submit.prompt.size if self._keeps_output_apart else sequence.known.size
        if num_hashed - done >= size:
            key = extra_key(submit.cache_salt, submit.adapter, self._weights, self._cache_key)
            digest = hashes[-HASH_BYTES:] or first_digest(key)
            hashes += continue_hashes(digest, sequence.known[done:num_hashed], size)
        sequence.hashes, sequence.first_hash = hashes, hashes[:HASH_BYTES]

    def look_up(self, sequence: Sequence) -> None:
        """Find what is cached of a waiting request, and what its admission takes; again only when that may have changed.

        At least one token is left to compute: its logits are needed.
        """
        index = self._kv.index
        version = 0 if index is None else index.version
        if self._kv.window is not None:
            version += self._kv.window.num_lost
        if self.snapshots is not None:
            version += self.snapshots.version
        if sequence.looked_up == version:
            return
        sequence.looked_up = version
        sequence.num_remaining = num_known = sequence.known.size
        limit = sequence.limit
        most_tokens = (num_known + 1 if num_known < limit else limit) + self._spare
        sequence.num_needed_blocks = -(-most_tokens // self._kv.block_size)
        if index is None or not sequence.hashes or not sequence.may_read_cache:
            return
        first = sequence.first_hash
        if first in self._fresh:
            self._settle(first)
        if not index.begins(first):
            sequence.hits = NO_I32
            return
        most = min(len(sequence.hashes) // HASH_BYTES, (num_known - 1) // self._kv.block_size)
        hits = index.find(sequence.hashes, most)
        if self._kv.window is not None:
            hits = self._kv.window.usable(hits)
        if self.snapshots is not None:
            hits = self.snapshots.usable(sequence.hashes, hits)
        sequence.hits = hits
        if hits.size:
            sequence.num_remaining -= hits.size * self._kv.block_size

    def admission_blocks(self, sequence: Sequence) -> int:
        """How many free blocks a waiting request takes: without those of its hits that others hold."""
        self.look_up(sequence)
        if sequence.hits.size:
            return sequence.num_needed_blocks - self.num_held(sequence)
        return sequence.num_needed_blocks

    def num_held(self, sequence: Sequence) -> int:
        """How many of the blocks that a waiting request would take over are held by others."""
        _ = self._kv.num_free  # slots that were emptied give their blocks back first
        return self._kv.pool.num_referenced(sequence.hits)

    def take_over(self, sequence: Sequence) -> None:
        """A request starts, with what it found."""
        sequence.num_published = sequence.hits.size
        sequence.num_done = sequence.num_published * self._kv.block_size
        if self.snapshots is not None and self._kv.index is not None:
            most = min(len(sequence.hashes) // HASH_BYTES, (sequence.known.size - 1) // self._kv.block_size)
            self.snapshots.begin(sequence, self._kv.index.find(sequence.hashes, most).size)
        if sequence.can_publish and sequence.may_read_cache:
            counts = self._looked_up_again if sequence.num_preemptions else self._looked_up
            counts[0] += 1
            counts[1] += sequence.known.size
            counts[2] += sequence.num_done

    # Publishing -------------------------------------------------------------------------------------------------------

    def publish_prefills(self, prefills: Iterable[tuple[Sequence, int]], besides: Collection[int]) -> None:
        """A step is reported that computed these chunks; besides: not those at these positions."""
        size = self._kv.block_size
        for row, (sequence, num_tokens) in enumerate(prefills):
            if not sequence.can_publish or sequence.slot < 0 or row in besides:
                continue
            num_done = sequence.num_done = sequence.num_done + num_tokens
            num_blocks = min(num_done // size, len(sequence.hashes) // HASH_BYTES)
            if num_blocks > sequence.num_published:
                self._publish(sequence, num_blocks)

    def _publish(self, sequence: Sequence, num_blocks: int) -> None:
        """Have the first blocks of a request in a slot found from now on, more of them than were already.

        Most prompts begin like no other. Those are put into the index when a look-up wants them, or else together with
        their output when they end.
        """
        before, sequence.num_published = sequence.num_published, num_blocks
        index, first = self._kv.index, sequence.first_hash
        if index is None:
            return
        owner = self._fresh.get(first)
        if owner is sequence or (owner is None and index.is_new(first)):
            self._fresh[first] = sequence
            if index.observer is not None:
                index.observer.add(sequence.hashes[HASH_BYTES * before : HASH_BYTES * num_blocks])
            index.version += 1
            return
        self._settle(first)
        sequence.run = self._kv.publish(sequence.slot, sequence.hashes, num_blocks)

    def _settle(self, first: bytes) -> None:
        """Put into the index what begins with the block of this hash."""
        owner = self._fresh.pop(first, None)
        if owner is not None:
            owner.run = self._kv.publish(owner.slot, owner.hashes, owner.num_published)

    def publish_loaded(self, hashes: bytes, blocks: I32) -> None:
        """These held blocks, the first of some sequence, were filled with what has these hashes."""
        self._settle(hashes[:HASH_BYTES])
        if self._kv.index is not None:
            self._kv.index.publish(hashes, blocks)

    def publish_rest(self, sequence: Sequence) -> None:
        """A request ends: what it computed since its admission can be found from now on."""
        num_blocks = self._num_findable(sequence)
        num_published = sequence.num_published
        needs_hashes = self.snapshots is not None and self.snapshots.has_own(sequence)
        if num_blocks <= num_published or self._batch.is_simulated.item(sequence.slot):
            self.settle(sequence)
        elif num_published and len(sequence.hashes) == num_published * HASH_BYTES and not needs_hashes:
            known = sequence.known[num_published * self._kv.block_size :].copy()
            first = sequence.first_hash
            is_fresh = self._fresh.get(first) is sequence
            if is_fresh:
                del self._fresh[first]
            self._kv.publish_output(sequence.slot, sequence.hashes, num_blocks, known, sequence.run, is_fresh)
        else:
            sequence.known = self.known_tokens(sequence)
            self.hash_known(sequence)
            self._settle(sequence.first_hash)
            self._kv.publish(sequence.slot, sequence.hashes, num_blocks)
        if self.snapshots is not None:
            self.snapshots.publish_own(sequence)

    def settle(self, sequence: Sequence) -> None:
        """A request is about to leave its slot with nothing more to publish."""
        if self._fresh.get(sequence.first_hash) is sequence:
            self._settle(sequence.first_hash)

    def publish_known(self, sequence: Sequence) -> None:
        """A request leaves its slot and comes back: it will look for what it has computed, by all its known tokens."""
        self.settle(sequence)
        num_blocks = self._num_findable(sequence)
        sequence.known = self.known_tokens(sequence)
        sequence.hits, sequence.looked_up = NO_I32, -1
        if self._batch.is_simulated[sequence.slot]:
            sequence.can_publish = False
            return
        is_valid = sequence.can_publish
        self.hash_known(sequence)  # from here on it may publish again, if a reset had forbidden it
        if is_valid and num_blocks > sequence.num_published:
            self._settle(sequence.first_hash)
            self._kv.publish(sequence.slot, sequence.hashes, num_blocks)
        if is_valid and self.snapshots is not None:
            self.snapshots.publish_own(sequence)

    def _num_findable(self, sequence: Sequence) -> int:
        """How many blocks of a request in a slot may be found, now that it leaves it."""
        num_tokens = sequence.num_done  # have KV that a step has reported as computed
        if num_tokens >= sequence.known.size:
            num_tokens = self._batch.num_known.item(sequence.slot) - 1  # the last one is computed by the step in flight
        if self._keeps_output_apart:
            num_tokens = min(num_tokens, sequence.submit.prompt.size)
        return num_tokens // self._kv.block_size

    def known_tokens(self, sequence: Sequence) -> I32:
        """All known ids of a request: those it was admitted with, and those sampled since."""
        if sequence.slot < 0:
            return sequence.known
        num_known = int(self._batch.num_known[sequence.slot])
        if num_known == sequence.known.size:
            return sequence.known
        sampled = self._kv.read_token_ids(sequence.slot, sequence.known.size, num_known)
        return np.concatenate((sequence.known, sampled))

    # Forgetting -------------------------------------------------------------------------------------------------------

    def forget(self, sequence: Sequence) -> bool:
        """The KV of a request is not what it should be: no look-up finds it any more.

        Returns whether a step in flight may have taken it over after the worker had cleared it.
        """
        index = self._kv.index
        if index is None or not sequence.hashes:
            return False
        self._settle(sequence.first_hash)
        index.forget(sequence.hashes)
        if self.snapshots is not None:
            self.snapshots.forget(sequence.first_hash)
        if self.on_forget is not None:
            self.on_forget(sequence.hashes)
        if sequence.slot >= 0:
            index.drop(self._kv.tables[0, sequence.slot, : self._kv.num_blocks[sequence.slot]])
        first = sequence.first_hash
        return any(
            other is not sequence and other.num_done and other.hashes.startswith(first)
            for record in self._ledger
            for other, _ in record.prefills
        )

    def reset(self, running: Iterable[Sequence]) -> None:
        """Forget everything. Those that run keep their blocks, and leave nothing behind."""
        if self._kv.index is None:
            return
        _ = self._kv.num_free  # slots that were emptied give their blocks back first
        self._kv.index.reset()
        self._fresh.clear()
        if self.snapshots is not None:
            self.snapshots.reset()
        for sequence in running:
            sequence.can_publish = False

    def change_weights(self, weights: str, alive: Collection[Sequence]) -> None:
        """From now on the workers compute with others: what was found before is found by no request any more, and is forgotten.

        Requests that run keep their blocks and leave nothing behind, as after a reset: what they hold is of both. Those that
        wait are hashed and looked up anew. weights: the identity of the new ones.
        """
        self._weights = weights
        if self._kv.index is None:
            return
        # Else blocks that no request can find would be kept, and memory that was never used be taken before them.
        self.reset(sequence for sequence in alive if sequence.slot >= 0)
        for sequence in alive:
            sequence.hashes = sequence.first_hash = b""
            if sequence.slot < 0:
                sequence.hits, sequence.looked_up = NO_I32, -1
                self.hash_known(sequence)

    def statistics(self) -> PrefixCacheStatistics | None:
        """None: there is no prefix cache."""
        if self._kv.index is None:
            return None
        requests, queries, hits = self._looked_up
        again_requests, again_queries, again_hits = self._looked_up_again
        return PrefixCacheStatistics(
            requests=requests,
            queries=queries,
            hits=hits,
            preempted_requests=again_requests,
            preempted_queries=again_queries,
            preempted_hits=again_hits,
            num_resets=self._kv.index.statistics().num_resets,
            num_snapshots=0 if self.snapshots is None else self.snapshots.num_published,
            num_evicted_snapshots=0 if self.snapshots is None else self.snapshots.num_evicted,
        )

    def check_integrity(self) -> None:
        """AssertionError when what waits to be put into the index is not as it should be, or states of prefixes are not."""
        if self.snapshots is not None:
            self.snapshots.check_integrity(save for record in self._ledger for save in record.saves)
        for first, sequence in self._fresh.items():
            assert sequence.slot >= 0, f"{sequence.key} has left, and its blocks are not in the index"
            assert sequence.can_publish, f"{sequence.key} publishes what it must not"
            assert sequence.hashes.startswith(first), f"{sequence.key} is found under the hash of another"
            assert 0 < sequence.num_published <= len(sequence.hashes) // HASH_BYTES, f"{sequence.key} lacks hashes"
            assert self._kv.index is not None
            assert not self._kv.index.begins(first), f"{sequence.key} is in the index, and waits to be"
