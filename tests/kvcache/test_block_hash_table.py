"""The table of block hashes that routers look prompts up in, against a set."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from actorllm.kvcache.block_hash_table import BlockHashTable, num_words
from actorllm.kvcache.prefix_index import HASH_BYTES


def new_table(num_buckets: int, num_blocks: int) -> tuple[BlockHashTable, memoryview]:
    """As its scheduler and as a router see it."""
    words = memoryview(bytearray(8 * num_words(num_buckets))).cast("Q")
    table = BlockHashTable(words)
    table.begin(num_blocks)
    return table, words


def hashes(seed: int, count: int) -> bytes:
    return np.random.default_rng(seed).bytes(HASH_BYTES * count)


@given(
    st.lists(st.tuples(st.sampled_from(["add", "remove", "clear"]), st.integers(0, 5), st.integers(0, 40)), max_size=12)
)
def test_a_router_finds_as_much_of_a_prompt_as_there_is(events: list[tuple[str, int, int]]) -> None:
    table, words = new_table(512, 240)
    router = BlockHashTable(words)
    lengths = dict.fromkeys(range(6), 0)
    for what, prompt, count in events:
        whole, before = hashes(prompt, 40), lengths[prompt]
        if what == "add":
            table.add(whole[: HASH_BYTES * count])
            lengths[prompt] = max(before, count)
        elif what == "remove" and count < before:
            table.remove(whole[HASH_BYTES * count : HASH_BYTES * before])
            lengths[prompt] = count
        elif what == "clear":
            table.clear()
            lengths = dict.fromkeys(range(6), 0)
    for prompt, length in lengths.items():
        assert router.find(hashes(prompt, 40)) == length
        assert router.find(hashes(prompt, 40)[: HASH_BYTES * 7]) == min(7, length)


def test_before_and_after_a_cache_nothing_is_found() -> None:
    table, words = new_table(64, 64)
    table.add(hashes(1, 8))
    router = BlockHashTable(words)
    assert router.find(hashes(1, 8)) == 8
    router.end()
    assert router.find(hashes(1, 8)) == 0
    table.add(hashes(2, 8))  # its scheduler does not know yet
    assert router.find(hashes(2, 8)) == 0
    table.begin(64)
    assert router.find(hashes(1, 8)) == 0
    assert router.find(b"") == 0


def test_a_full_table_forgets_and_stays_within_its_bounds() -> None:
    """More blocks than it has room for: it finds less than there is, and never more."""
    table, words = new_table(16, 1000)
    assert words[0] == 16
    for prompt in range(50):
        table.add(hashes(prompt, 20))
    assert 0 < sum(BlockHashTable(words).find(hashes(prompt, 20)) > 0 for prompt in range(50)) < 50


@pytest.mark.parametrize("size", [1, 3, 2**40, 2**64 - 1])
def test_what_another_program_writes_there_breaks_neither_side(size: int) -> None:
    table, words = new_table(16, 16)
    words[0] = size
    table.add(hashes(1, 30))
    table.remove(hashes(1, 30))
    assert BlockHashTable(words).find(hashes(1, 30)) <= 30
