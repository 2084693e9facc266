"""Pool and index together, held against a model that knows every block's contents and when it was freed."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
from hypothesis import HealthCheck, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, rule, run_state_machine_as_test

from actorllm.kvcache.block_hash_table import BlockHashTable, num_words
from actorllm.kvcache.block_pool import BlockPool
from actorllm.kvcache.manager import KVCacheManager
from actorllm.kvcache.prefix_index import HASH_BYTES, MAX_TAILS, BlockRun, PrefixIndex, extra_key, hash_blocks
from tests.effort import examples

SIZE = 2


def hashes_of(tokens: list[int], key: bytes = b"") -> bytes:
    return hash_blocks(np.array(tokens, np.int32), SIZE, key).tobytes()


class Sequences:
    """Requests without a scheduler: takes slots, finds, publishes, and writes token ids as one would."""

    def __init__(self, num_blocks: int = 12, num_slots: int = 6) -> None:
        self.kv = KVCacheManager(num_blocks, SIZE, num_slots, num_blocks * SIZE, enable_prefix_caching=True)
        assert self.kv.index is not None
        self.index = self.kv.index
        self.table = BlockHashTable(memoryview(bytearray(8 * num_words(64))).cast("Q"))
        self.table.begin(64)
        self.index.observer = self.table
        self.slots = list(range(num_slots))[::-1]
        self.tokens: dict[int, list[int]] = {}
        self.num_prompt: dict[int, int] = {}
        self.runs: dict[int, BlockRun | None] = {}

    def start(self, tokens: list[int], num_prompt: int | None = None, key: bytes = b"") -> tuple[int, int] | None:
        """A request with so many prompt tokens, the others sampled since. (slot, blocks found); None: it does not fit."""
        hashes = hashes_of(tokens[:num_prompt], key)
        found = self.index.find(hashes, len(hashes) // HASH_BYTES)
        count = len(tokens) // SIZE
        if count - self.kv.pool.num_referenced(found) > self.kv.num_free:
            return None
        slot = self.slots.pop()
        self.kv.share(found)
        self.kv.fill([(slot, count)], {slot: found})
        self.tokens[slot], self.num_prompt[slot] = tokens, len(tokens) if num_prompt is None else num_prompt
        for i in range(self.num_prompt[slot], count * SIZE):
            self.kv.token_ids[self.kv.tables[0, slot, i // SIZE], i % SIZE] = tokens[i]
        self.runs[slot] = self.kv.publish(slot, hashes, len(hashes) // HASH_BYTES)
        return slot, int(found.size)

    def end(self, slot: int) -> None:
        tokens, num_prompt = self.tokens.pop(slot), self.num_prompt.pop(slot)
        hashes = hashes_of(tokens[:num_prompt])
        if hashes and len(tokens) // SIZE > len(hashes) // HASH_BYTES:
            known = np.array(tokens[len(hashes) // HASH_BYTES * SIZE : num_prompt], np.int32)
            self.kv.publish_output(slot, hashes, len(tokens) // SIZE, known, self.runs[slot])
        self.kv.empty(slot)
        self.slots.append(slot)

    def run(self, tokens: list[int], num_prompt: int | None = None) -> int:
        """Start and end; how many blocks were found."""
        started = self.start(tokens, num_prompt)
        assert started is not None
        self.end(started[0])
        return started[1]

    def num_found(self, tokens: list[int]) -> int:
        hashes = hashes_of(tokens)
        found = int(self.index.find(hashes, len(hashes) // HASH_BYTES).size)
        assert self.table.find(hashes) == found, "routers see what the scheduler finds"
        return found

    def check_table(self) -> None:
        """It has the hashes of all that can be found, and no other."""
        reachable, runs = set(), [self.index._root]
        while runs:
            run = runs.pop()
            size = HASH_BYTES * (run.stop - run.start)
            reachable |= {run.hashes[at : at + 8] for at in range(0, size, HASH_BYTES)}
            runs += run.children.values()
        words = self.table._entries.tolist()
        assert {word.to_bytes(8, "little") for word in words if word} == reachable
        assert len(words) - words.count(0) == len(reachable)


@pytest.fixture
def sequences() -> Sequences:
    return Sequences()


def test_what_was_published_is_found_up_to_where_it_differs(sequences: Sequences) -> None:
    assert sequences.run([1, 2, 3, 4, 5, 6]) == 0
    assert sequences.run([1, 2, 3, 4, 5, 6]) == 3
    assert sequences.run([1, 2, 3, 4, 9, 9]) == 2, "a part of a run"
    assert sequences.run([1, 2, 3, 4, 9, 9, 7, 7]) == 3, "a child of the first part of a split run"
    assert sequences.run([1, 2, 3, 4, 5, 6, 7, 7]) == 3, "and of the second"
    assert sequences.run([3, 4, 5, 6]) == 0, "blocks are found from the start only"
    sequences.kv.check_integrity()


def test_other_salts_and_adapters_find_nothing(sequences: Sequences) -> None:
    sequences.run([1, 2, 3, 4])
    one = "1" * 64  # the digest of an adapter
    for key in (extra_key("a"), extra_key("b"), extra_key(None, one), extra_key("a", one)):
        started = sequences.start([1, 2, 3, 4], key=key)
        assert started is not None
        assert started[1] == 0
    keys = [
        extra_key("1"),
        extra_key(None, one),
        extra_key(None, "2" * 64),
        extra_key("a"),
        extra_key("a", one),
        extra_key(),
    ]
    assert len(set(keys)) == len(keys)


def test_the_least_recently_used_goes_first_and_of_one_request_its_tail() -> None:
    sequences = Sequences(num_blocks=6)
    for first in (1, 2, 3):
        sequences.run([first, 0, first, 1])
    assert sequences.run([1, 0, 1, 1]) == 2, "used again, so it is the youngest now"
    sequences.run([9, 0])
    assert [sequences.num_found([first, 0, first, 1]) for first in (1, 2, 3)] == [2, 1, 2]
    sequences.run([9, 1])
    assert [sequences.num_found([first, 0, first, 1]) for first in (1, 2, 3)] == [2, 0, 2]
    sequences.run([9, 2, 9, 3, 9, 4])
    assert [sequences.num_found([first, 0, first, 1]) for first in (1, 2, 3)] == [1, 0, 0]
    assert sequences.kv.statistics().num_evicted == 5


def test_blocks_without_contents_are_used_first_the_warm_ones_before_the_cold() -> None:
    pool = BlockPool(8)
    kept, warm = pool.allocate(2), pool.allocate(2)
    pool.keep(kept, 1)
    pool.release(kept)
    pool.release(warm)
    assert pool.allocate(6).tolist() == [*warm.tolist(), 4, 5, 6, 7], "never used ones come after, kept ones not yet"
    assert pool.statistics().num_kept == pool.num_free == 2
    assert pool.allocate(2).tolist() == [1, 0]


def test_references_hold_shared_blocks_and_a_reset_takes_none_away(sequences: Sequences) -> None:
    first, second = sequences.start([1, 2, 3, 4]), sequences.start([1, 2, 3, 4])
    assert first is not None
    assert second is not None
    assert second[1] == 2
    assert sequences.kv.num_free == 10
    assert sequences.kv.num_exclusive(first[0]) == 0
    sequences.end(first[0])
    assert sequences.kv.num_free == 10
    sequences.index.reset()
    assert sequences.num_found([1, 2, 3, 4]) == 0
    sequences.kv.check_integrity()
    sequences.end(second[0])
    assert sequences.kv.num_free == 12
    sequences.kv.check_integrity()


def test_cached_blocks_do_not_count_twice_when_room_is_short() -> None:
    sequences = Sequences(num_blocks=4)
    sequences.run([1, 2, 3, 4])
    held = sequences.start([7, 7])
    assert held is not None
    assert sequences.start([1, 2, 3, 4, 5, 6, 7, 8]) is None, "two of the three free blocks are those it finds"
    assert sequences.start([1, 2, 3, 4, 5, 6]) is not None
    sequences.kv.check_integrity()


def test_blocks_that_were_held_go_out_of_order_and_the_rest_is_found() -> None:
    """A transfer held one in the middle, and those before it were used since: so it is evicted after the one before it."""
    made = Sequences(num_blocks=12)
    prompt = [1, 1, 2, 2, 3, 3, 4, 4]
    slot, _ = made.start(prompt) or (0, 0)
    first, second, third, last = made.kv.tables[0, slot, :4].tolist()
    made.end(slot)
    made.kv.hold(np.array([third]))
    made.kv.let_go(np.array([third]))
    slot, found = made.start([1, 1]) or (0, 0)
    assert found == 1
    made.end(slot)
    assert made.kv.pool.next_evictions(3).tolist() == [last, second, third]
    made.kv.reserve(made.kv.pool.num_unkept)
    for evicted, left in ((last, [first, second, third]), (second, [first]), (third, [first])):
        assert made.kv.reserve(1).tolist() == [evicted]
        assert made.index.find(hashes_of(prompt), 4).tolist() == left
        made.index.check_integrity()
        made.kv.pool.check_integrity()


def test_blocks_of_the_middle_that_go_together_take_the_end_with_them() -> None:
    """As many blocks as lie behind the last of these, but not those."""
    made = Sequences(num_blocks=12)
    prompt = [1, 1, 2, 2, 3, 3, 4, 4]
    slot, _ = made.start(prompt) or (0, 0)
    first, second, third, last = made.kv.tables[0, slot, :4].tolist()
    made.end(slot)
    for block in (third, first, last):
        made.kv.hold(np.array([block]))
        made.kv.let_go(np.array([block]))
    made.kv.reserve(made.kv.pool.num_unkept)
    assert made.kv.reserve(2).tolist() == [second, third]
    assert made.index.find(hashes_of(prompt), 4).tolist() == [first]
    made.index.check_integrity()
    made.kv.pool.check_integrity()


def test_output_is_found_although_nobody_hashed_it_before(sequences: Sequences) -> None:
    sequences.run([1, 2, 3, 40, 50, 60, 70], num_prompt=3)
    sequences.run([1, 2, 3, 40, 51, 61, 71], num_prompt=3)
    assert sequences.num_found([1, 2, 3, 40, 50, 60]) == 3
    assert sequences.num_found([1, 2, 3, 40, 51, 61]) == 3, "both went on behind the same prompt, and share a block"
    assert sequences.num_found([1, 2, 3, 41]) == 1
    sequences.kv.check_integrity()


def test_the_latest_of_many_outputs_of_one_prompt_are_found(sequences: Sequences) -> None:
    sequences = Sequences(num_blocks=4 * MAX_TAILS)
    for i in range(2 * MAX_TAILS):
        sequences.run([1, 2, i, i], num_prompt=2)
    last = 2 * MAX_TAILS - 1
    assert sequences.num_found([1, 2, last, last]) == 2
    assert sequences.num_found([1, 2, 0, 0]) == 2, "the others with the next look-up"
    sequences.kv.check_integrity()


def test_output_that_is_evicted_takes_nothing_else_along() -> None:
    sequences = Sequences(num_blocks=7)
    sequences.run([1, 2, 50, 60, 51, 61], num_prompt=2)
    held = sequences.start([1, 2, 3, 4])
    assert held is not None
    assert held[1] == 1
    sequences.run([1, 2, 70, 80], num_prompt=2)
    sequences.kv.check_integrity()
    sequences.run([9, 1, 9, 2, 9, 3, 9, 4, 9, 5])
    assert sequences.kv.statistics().num_evicted > 0
    assert sequences.num_found([1, 2, 3, 4]) == 2, "what is still held"
    assert sequences.num_found([1, 2, 50, 60]) == sequences.num_found([1, 2, 70, 80]) == 1
    sequences.kv.check_integrity()
    sequences.end(held[0])
    sequences.run([1, 2, 90, 91, 92, 93], num_prompt=2)
    assert sequences.num_found([1, 2, 90, 91, 92, 93]) == 3, "the prompt can be gone on with again"
    sequences.kv.check_integrity()


def test_what_is_forgotten_takes_everything_behind_it_along(sequences: Sequences) -> None:
    sequences.run([1, 2, 3, 4, 5, 6])
    held = sequences.start([1, 2, 3, 4, 9, 9])
    assert held is not None
    sequences.run([8, 8])
    sequences.index.forget(hashes_of([1, 2, 3, 4, 5, 6]))
    assert sequences.num_found([1, 2, 3, 4, 9, 9]) == 0
    assert sequences.num_found([8, 8]) == 1
    sequences.kv.check_integrity()
    sequences.kv.publish(held[0], hashes_of([1, 2, 3, 4, 9, 9]), 3)
    assert sequences.num_found([1, 2, 3, 4, 9, 9]) == 3, "blocks that are still held can be published once more"
    sequences.end(held[0])
    sequences.kv.check_integrity()


class CacheMachine(RuleBasedStateMachine):
    """Few different tokens and few blocks: many prefixes in common, many evictions."""

    @initialize(num_blocks=st.integers(4, 16))
    def begin(self, num_blocks: int) -> None:
        self.sequences = Sequences(num_blocks)
        self.contents: dict[int, tuple[int, ...]] = {}

    def _write(self, slot: int, tokens: list[int], num_found: int) -> None:
        table = self.sequences.kv.tables[0, slot]
        for i in range(len(tokens) // SIZE):
            block, prefix = int(table[i]), tuple(tokens[: (i + 1) * SIZE])
            if i < num_found:
                assert self.contents.get(block) == prefix, "a block was found that holds something else"
            self.contents[block] = prefix

    @rule(tokens=st.lists(st.integers(0, 1), min_size=1, max_size=12), num_output=st.integers(0, 6))
    def start(self, tokens: list[int], num_output: int) -> None:
        num_prompt = max(1, len(tokens) - num_output)
        if self.sequences.slots and (started := self.sequences.start(tokens, num_prompt)) is not None:
            self._write(started[0], tokens, started[1])

    @rule(which=st.integers(0, 5))
    def end(self, which: int) -> None:
        running = list(self.sequences.tokens)
        if which < len(running):
            self.sequences.end(running[which])

    @rule(tokens=st.lists(st.integers(0, 1), min_size=2, max_size=6))
    def forget(self, tokens: list[int]) -> None:
        self.sequences.index.forget(hashes_of(tokens))
        assert self.sequences.num_found(tokens) == 0

    @rule()
    def publish_again(self) -> None:
        for slot, tokens in self.sequences.tokens.items():
            hashes = hashes_of(tokens[: self.sequences.num_prompt[slot]])
            self.sequences.kv.publish(slot, hashes, len(hashes) // HASH_BYTES)
            assert self.sequences.num_found(tokens[: self.sequences.num_prompt[slot]]) == len(hashes) // HASH_BYTES

    @rule()
    def reset(self) -> None:
        self.sequences.index.reset()

    @invariant()
    def integrity(self) -> None:
        if hasattr(self, "sequences"):
            self.sequences.kv.check_integrity()
            self.sequences.check_table()

    def teardown(self) -> None:
        if hasattr(self, "sequences"):
            for slot in list(self.sequences.tokens):
                self.sequences.end(slot)
            assert self.sequences.kv.num_free == self.sequences.kv.pool.num_blocks
            self.sequences.kv.check_integrity()


CacheMachine.TestCase.settings = settings(
    max_examples=examples(40, 120), stateful_step_count=30, deadline=None, suppress_health_check=[HealthCheck.too_slow]
)
TestCache = CacheMachine.TestCase


def _forget_to_tell(right: Any, index: PrefixIndex, blocks: Any, labels: Any) -> None:
    right(index, blocks[:-1], labels[:-1])


def _keep_shared_in_line(right: Any, pool: BlockPool, blocks: Any) -> None:
    taken, num_dead = pool._taken_after.copy(), pool._num_dead
    right(pool, blocks)
    pool._taken_after[:], pool._num_dead = taken, num_dead


def _swap_token_ids(right: Any, kv: KVCacheManager, blocks: Any) -> Any:
    return right(kv, blocks)[::-1].copy()


def _split_late(right: Any, index: PrefixIndex, run: Any, at: int) -> None:
    right(index, run, min(at + 1, run.stop - 1))


def _tell_of_the_run_alone(right: Any, index: PrefixIndex, run: Any, left: int) -> None:
    children, run.children = run.children, {}
    right(index, run, left)
    run.children = children


@pytest.mark.parametrize(
    ("owner", "name", "wrong"),
    [
        (PrefixIndex, "on_evict", _forget_to_tell),
        (BlockPool, "share", _keep_shared_in_line),
        (KVCacheManager, "_token_ids_of", _swap_token_ids),
        (PrefixIndex, "_split", _split_late),
        (PrefixIndex, "_tell_removed", _tell_of_the_run_alone),
    ],
)
def test_the_machine_finds_planted_mistakes(
    monkeypatch: pytest.MonkeyPatch, owner: type, name: str, wrong: Callable[..., Any]
) -> None:
    right = getattr(owner, name)
    monkeypatch.setattr(owner, name, lambda *a: wrong(right, *a))
    quick = settings(
        max_examples=300,
        deadline=None,
        derandomize=True,
        database=None,
        report_multiple_bugs=False,
        phases=[p for p in settings().phases if p.name in ("explicit", "generate")],
        suppress_health_check=list(HealthCheck),
    )
    with pytest.raises((AssertionError, ValueError, IndexError, KeyError, ExceptionGroup)):
        run_state_machine_as_test(CacheMachine, settings=quick)


@pytest.mark.parametrize("how", ["drop", "publish again"])
def test_what_nobody_finds_any_more_is_not_remembered_when_its_blocks_get_another_use(how: str) -> None:
    """What lies behind a run that was forgotten is kept for as long as its blocks are."""
    sequences = Sequences()
    tokens = [1, 2, 3, 4, 5, 6, 7, 8, 9]
    assert sequences.start(tokens[:4]) == (0, 0)
    started = sequences.start(tokens, 6)
    assert started == (1, 2)
    index = sequences.index
    blocks = sequences.kv.tables[0, 1, :4].copy()
    index.forget(hashes_of(tokens[:2]))
    assert index.statistics().num_runs == 1
    if how == "drop":
        index.drop(blocks)
    else:
        sequences.kv.publish(1, hashes_of(tokens[:6]), 2)
        sequences.end(1)
    index.check_integrity()
    sequences.kv.check_integrity()
    assert index.find(hashes_of(tokens), 4).size == (0 if how == "drop" else 2)
