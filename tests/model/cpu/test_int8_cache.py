"""A KV cache of 8 bits against dense attention over what it rounds, its error, its size, and what it leaves behind."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from actorllm.model.cpu import int8_cache
from actorllm.model.cpu.attention import Chunk
from actorllm.model.cpu.int8_cache import Int8KVCache
from actorllm.model.inputs import PersistentBatch
from tests.effort import examples
from tests.model.cpu.pages import MAX_LENGTH, NUM_SLOTS, STEPS, Pages, Row, Shape
from tests.model.driver import Driver, int32
from tests.model.quantization.probing import TEXT, error

SHAPES = st.builds(
    Shape,
    num_kv_heads=st.integers(1, 2),
    fold=st.integers(1, 2),
    head_dim=st.sampled_from([4, 16]),
    block_size=st.sampled_from([4, 5, 16]),
    windows=st.sampled_from([(None,), (None, 7), (20,), (Chunk(13),)]),
    sort_gain=st.sampled_from([0, 2048]),
    seed=st.integers(0, 99),
)


def rounded(rows: torch.Tensor) -> torch.Tensor:
    """Each row of numbers as the nearest of 256, from its least to its largest."""
    low, high = rows.amin(-1, keepdim=True), rows.amax(-1, keepdim=True)
    step = (high - low) / 255
    return torch.where(step > 0, torch.round((rows - low) / step.clamp(min=1e-30)) * step + low, rows)


class RoundedPages(Pages):
    """As `Pages`, with a cache of 8 bits."""

    def __init__(self, shape: Shape, tails: int = 1) -> None:
        self.shape = shape
        self.max_blocks = -(-MAX_LENGTH // shape.block_size)
        num_blocks = 6 * self.max_blocks
        sizes = len(shape.windows), shape.num_kv_heads, shape.head_dim, num_blocks, shape.block_size
        self.cache = Int8KVCache(*sizes, torch.float32, num_slots=NUM_SLOTS, tails_per_slot=tails)  # type: ignore[assignment]
        self.batch = PersistentBatch(
            vocab_size=2,
            block_size=shape.block_size,
            num_blocks=num_blocks,
            max_blocks=self.max_blocks,
            sort_gain=shape.sort_gain,
            padding_block=self.cache.padding_block,
        )
        self.random = torch.Generator().manual_seed(shape.seed)
        self.cache.tails.copy_(torch.randn(self.cache.tails.shape, generator=self.random) * 50)  # type: ignore[attr-defined]
        self.free = torch.randperm(num_blocks, generator=self.random).tolist()
        self.rows: dict[int, Row] = {}
        self.sent: list[int] = []
        self.num_steps = 0
        self.num_compared = self.num_far = 0

    def step(self, wishes: list[int]) -> None:
        plan = self._plan(wishes)
        self.batch.apply(plan)
        inputs = self.batch.inputs(plan)
        if not len(inputs.token_ids):
            return
        batches = self.cache.attention(inputs, self.shape.fold, self.shape.windows)
        tokens = [(int(t), self.rows[s]) for s, t in zip(self.sent, inputs.result_tokens, strict=False)]
        for slot, start, count in zip(inputs.prefill_slots, inputs.prefill_starts, inputs.prefill_counts, strict=True):
            tokens += [(start + i, self.rows[slot]) for i in range(count)]
        heads = self.shape.num_kv_heads
        for layer, window in enumerate(self.shape.windows):
            shape = len(inputs.token_ids), heads * (self.shape.fold + 2), self.shape.head_dim
            fused = torch.randn(shape, generator=self.random)
            query, key_value = fused[:, : -2 * heads], fused[:, -2 * heads :]
            positions = []
            for token, row in tokens:
                positions.append(len(row.history[layer]))
                row.history[layer].append(key_value[token])
            out = batches[window].attend(layer, query, key_value)
            assert torch.isfinite(out).all()
            for (token, row), position in zip(tokens, positions, strict=True):
                self._compare(out[token], query[token], row.history[layer][: position + 1], window)
        self.batch.advance(inputs)
        self.batch.store(inputs.result_slots, np.zeros(len(inputs.result_slots), np.int32))

    def _compare(self, out: torch.Tensor, query: torch.Tensor, history: list[torch.Tensor], window: int | None) -> None:
        """With its own block as it is, and those before it rounded: keys by channel, values by token."""
        heads, size = self.shape.num_kv_heads, self.shape.block_size
        own = (len(history) - 1) // size * size
        seen = torch.stack(history)  # [length, 2 * num_kv_heads, head_dim]
        if own:
            keys = seen[:own, :heads].view(-1, size, heads, self.shape.head_dim).transpose(1, 3)
            seen[:own, :heads] = rounded(keys).transpose(1, 3).reshape(own, heads, -1)
            seen[:own, heads:] = rounded(seen[:own, heads:])
        expected = self._dense(query, list(seen), window)
        difference = float((out.double() - expected).abs().max())
        assert difference < 0.1, "a code more or less than a neighbouring one"
        self.num_compared += 1
        self.num_far += difference > 1e-4  # a number between two codes may go to either


@settings(max_examples=examples(8, 25), deadline=None)
@given(shape=SHAPES, tails=st.integers(1, 2), steps=STEPS)
def test_blocks_before_the_own_one_are_rounded(shape: Shape, tails: int, steps: list[list[int]]) -> None:
    pages = RoundedPages(shape, tails)
    for wishes in steps:
        pages.step(wishes)
    assert pages.num_far <= 0.02 * pages.num_compared + 1


def logits_of(make_driver: Callable[..., Driver], num_prompt: int, **arguments: Any) -> torch.Tensor:
    """Of all positions of TEXT, of which all but the first are computed as decode rows."""
    driver = make_driver("storyteller", skip_tokenizer_init=False, dtype="float32", **arguments)
    from transformers import AutoTokenizer

    runner = driver.runner
    ids = AutoTokenizer.from_pretrained(runner.config.model.path)(TEXT).input_ids
    driver.add(0, ids, num_outputs=len(ids) - num_prompt)
    plan = driver.plan({0: len(ids)}, [])
    runner.batch.apply(plan)
    with torch.inference_mode():
        hidden = runner.decoder.forward(runner.batch.inputs(plan), runner.cache)
        return runner.decoder.logits(runner.decoder.select(hidden, np.arange(len(ids))))


MAX_ERROR = 0.002


@pytest.mark.parametrize("num_prompt", [1, 60], ids=["output", "prompt"])
def test_logits_change_little(
    num_prompt: int, make_driver: Callable[..., Driver], monkeypatch: pytest.MonkeyPatch
) -> None:
    expected = logits_of(make_driver, num_prompt, block_size=16)
    arguments: dict[str, Any] = {"kv_cache_dtype": "int8", "block_size": 16}
    assert 0.0001 < error(logits_of(make_driver, num_prompt, **arguments), expected) <= MAX_ERROR
    pack = int8_cache._pack

    def coarse(rows: torch.Tensor) -> torch.Tensor:
        """With 4 bits for a number."""
        low, high = rows.amin(-1, keepdim=True), rows.amax(-1, keepdim=True)
        step = (high - low).clamp(min=1e-9) / 15
        return pack(torch.round((rows - low) / step) * step + low)

    monkeypatch.setattr(int8_cache, "_pack", coarse)
    assert error(logits_of(make_driver, num_prompt, **arguments), expected) > 2 * MAX_ERROR, "the measure sees 4 bits"


def test_more_tokens_fit(make_driver: Callable[..., Driver]) -> None:
    given = {"kv_cache_memory_bytes": 64 << 20, "max_num_seqs": 8, "dtype": "bfloat16", "block_size": 32}
    plain, small = (
        make_driver("storyteller", kv_cache_dtype=kind, **given).runner.profile_num_blocks()
        for kind in ("auto", "int8")
    )
    assert small >= 1.6 * plain, "with what the last block of each of 8 sequences takes besides"


def test_little_memory_has_blocks_for_fewer_sequences_than_may_run(make_driver: Callable[..., Driver]) -> None:
    given = {"kv_cache_dtype": "int8", "kv_cache_memory_bytes": 4 << 20, "max_num_seqs": 256, "dtype": "bfloat16"}
    runner = make_driver("storyteller", block_size=64, **given).runner
    found = runner.profile_num_blocks()
    assert 0 < found < 256
    each = runner.block_bytes + runner.fixed_cache_bytes // 256
    assert found * each <= 4 << 20 < (found + 1) * each


def test_what_is_mapped_is_what_is_counted(make_driver: Callable[..., Driver]) -> None:
    runner = make_driver("storyteller", kv_cache_dtype="int8", dtype="bfloat16", max_num_seqs=100).runner
    cache = runner.cache
    assert runner.block_bytes == cache.keys[:, 0].nbytes + cache.values[:, 0].nbytes
    assert runner.fixed_cache_bytes == cache.tails[:, : 100 * cache.tails_per_slot].nbytes


def test_rows_that_are_not_finite_leave_nothing_behind(make_driver: Callable[..., Driver], tiny_llama: Path) -> None:
    driver = make_driver(tiny_llama, load_format="dummy", block_size=16, max_model_len=64, kv_cache_dtype="int8")
    prompt = [int(x) for x in np.random.default_rng(3).integers(0, 96, 40)]
    driver.add(1, prompt)
    driver.step({1: 40}, decode=[])
    driver.step(decode=[1])
    expected = list(driver.requests[1].tokens)
    driver.remove(1)
    embedding = driver.runner.decoder.embedding
    with torch.inference_mode():
        kept = embedding[96].clone()
        embedding[96] = float("nan")
    driver.add(0, [*prompt[:20], 96, *prompt[:10]])
    driver.step({0: 25}, decode=[])  # its first block is there, the second one has the bad token
    assert driver.step({0: 6}).nonfinite_rows.size
    with torch.inference_mode():
        embedding[96] = kept
    blocks = driver.requests[0].blocks
    driver.remove(0)
    driver.add(0, prompt)
    driver.step({0: 33}, zero_blocks=int32(blocks))
    driver.step({0: 7})
    driver.step(decode=[0])
    assert driver.requests[0].tokens == expected
    assert torch.isfinite(driver.runner.cache.tails).all()


def test_a_fork_goes_on_in_a_tail_of_its_own(make_driver: Callable[..., Driver], tiny_llama: Path) -> None:
    def run(fork: bool) -> list[list[int]]:
        driver = make_driver(tiny_llama, load_format="dummy", block_size=16, max_model_len=64, kv_cache_dtype="int8")
        prompt = list(range(5, 26))
        params = [{"temperature": 1.0, "seed": 3, "sample_index": i} for i in range(2)]
        driver.add(0, prompt, **params[0])
        if fork:
            copy = driver.fork(1, 0, **params[1])
            assert copy is not None
            driver.step({0: 21}, decode=[])
            driver.step(decode=[0, 1], copy_sources=int32([copy[0]]), copy_targets=int32([copy[1]]))
        else:
            driver.add(1, prompt, **params[1])
            driver.step({0: 21, 1: 21}, decode=[])
            driver.step(decode=[0, 1])
        for _ in range(20):
            driver.step()
        return [driver.requests[slot].tokens for slot in (0, 1)]

    forked = run(True)
    assert forked == run(False)
    assert forked[0] != forked[1]
