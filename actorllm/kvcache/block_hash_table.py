"""`BlockHashTable`: which block hashes the prefix cache of a replica has, in memory that routers read.

The scheduler of the replica writes it whenever blocks become findable, or are no more. Routers of any process look prompts up in
it, without asking the scheduler. A hash stands for all blocks before its own. So where a hash is found, they are found as well,
and a bisection tells how much of a prompt is cached.

The words are buckets of WAYS entries. An entry is the first 8 bytes of a hash, and stands in the bucket that they name. There are
at least as many buckets as the cache has blocks, up to the room that there is. In a bucket that is full a new entry takes the
place of another one, which is so seldom that the table counts as exact. An entry is written as one word, so a reader needs no
lock. What a reader takes from it is a hint: a wrong one costs time, and no token.
"""

from __future__ import annotations

from actorllm.kvcache.prefix_index import HASH_BYTES

WAYS = 4
"""Entries of a bucket."""
HEADER = 8
"""Words before the buckets; the first is how many buckets there are, 0: nothing is known."""
WORDS_OF_HASH = HASH_BYTES // 8


def num_words(most_buckets: int) -> int:
    """Of a table that has at most so many buckets, a power of two."""
    return HEADER + WAYS * most_buckets


class BlockHashTable:
    """See the module docstring. words: of format "Q"; HEADER, and the buckets behind it."""

    def __init__(self, words: memoryview) -> None:
        self._header = words[:HEADER]
        self._entries = words[HEADER:]
        self._num_buckets = 0  # of the writer, which believes nothing that it reads

    # Written by the scheduler of the replica

    def begin(self, num_blocks: int) -> None:
        """Nothing is cached yet, by a cache of so many blocks."""
        num_buckets = 1 << max(0, num_blocks - 1).bit_length()
        while WAYS * num_buckets > len(self._entries):
            num_buckets //= 2
        self._header[0] = 0
        self._num_buckets = num_buckets
        self._entries[: WAYS * num_buckets] = memoryview(bytes(8 * WAYS * num_buckets)).cast("Q")
        self._header[0] = num_buckets

    def end(self) -> None:
        """The cache is gone, and perhaps its scheduler. Called by any process."""
        self._header[0] = 0

    def clear(self) -> None:
        """Nothing is cached any more."""
        self.begin(self._num_buckets)

    def add(self, hashes: bytes) -> None:
        """These can be found from now on; those that could be before stay."""
        entries, mask = self._entries, WAYS * (self._num_buckets - 1)
        for key in _keys(hashes):
            at = key & mask
            bucket = entries[at : at + WAYS].tolist()
            if key not in bucket:
                entries[at + (bucket.index(0) if 0 in bucket else (key >> 32) % WAYS)] = key

    def remove(self, hashes: bytes) -> None:
        """These can be found no more. The entries of a bucket stand side by side, so that a look-up may end at an empty one."""
        entries, mask = self._entries, WAYS * (self._num_buckets - 1)
        for key in _keys(hashes):
            at = key & mask
            bucket = entries[at : at + WAYS].tolist()
            if key in bucket:
                last = WAYS - 1 - bucket.count(0)
                entries[at + bucket.index(key)] = bucket[last]
                entries[at + last] = 0

    # Read by routers

    @property
    def num_words_used(self) -> int:
        """Of a table that another process writes: the header, and the buckets that there are."""
        num_buckets = self._header[0]
        return HEADER + min(WAYS * num_buckets, len(self._entries))

    def find(self, hashes: bytes) -> int:
        """How many blocks from the start of a prompt are cached, by its hashes: HASH_BYTES for each block."""
        entries = self._entries
        mask = WAYS * (self._header[0] - 1)
        if mask < 0 or not hashes or mask + WAYS > len(entries):
            return 0
        keys = memoryview(hashes).cast("Q")
        low, high = 0, len(hashes) // HASH_BYTES  # the blocks before low are there, the one at high is not
        middle = 0  # most prompts begin like nothing here
        while low < high:
            key = keys[WORDS_OF_HASH * middle]
            at = key & mask
            first = entries[at]
            if first == key or (first and key in entries[at + 1 : at + WAYS].tolist()):
                low = middle + 1
            elif middle:
                high = middle
            else:
                return 0
            middle = (low + high) // 2
        return low


def _keys(hashes: bytes) -> list[int]:
    """The first 8 bytes of each."""
    return memoryview(hashes).cast("Q")[::WORDS_OF_HASH].tolist()
