"""The runner's contract with the scheduler: plans in, results out, on a tiny model with dummy weights."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from actorllm.config import ConfigError, EngineConfig
from actorllm.messages import LateInputs, StepPlan
from actorllm.model import memory
from actorllm.model.cpu import attention, runner
from actorllm.model.cpu.attention import KVCache
from actorllm.model.cpu.runner import CpuRunner
from actorllm.model.inputs import StepInputs
from tests.model.driver import Driver, int32

PROMPT = [5, 17, 33, 2, 90, 41, 8, 8, 60, 11]


@pytest.fixture
def driver(tiny_llama: Path, make_driver: Callable[..., Driver]) -> Driver:
    return make_driver(tiny_llama, load_format="dummy", max_num_seqs=8, max_num_batched_tokens=64)


def greedy(driver: Driver, slot: int, prompt: list[int], count: int) -> list[int]:
    """The greedy continuation, alone in the batch."""
    driver.add(slot, prompt)
    driver.step({slot: len(prompt)}, decode=[])
    for _ in range(count - 1):
        driver.step(decode=[slot])
    tokens = driver.requests[slot].tokens[len(prompt) :]
    driver.remove(slot)
    return tokens


def test_decoding_needs_no_tokens_in_the_plan(driver: Driver) -> None:
    """Steady plans are empty; what they sample is what a fresh prefill of the same tokens would."""
    tokens = greedy(driver, 0, PROMPT, 9)
    driver.add(1, PROMPT + tokens[:5], num_outputs=5)
    driver.step({1: len(PROMPT) + 5}, decode=[])
    assert driver.requests[1].tokens[-1] == tokens[5]
    assert len(set(tokens)) > 2


def test_another_scheduler_finds_nothing_of_the_one_before(driver: Driver) -> None:
    """Its first row set has the number and the length that the last one had, and other blocks."""
    expected = greedy(driver, 0, PROMPT, 9)
    driver.runner.forget_requests()
    old = Driver(driver.runner, seed=1)
    old.add(0, PROMPT[::-1])
    old.step({0: len(PROMPT)}, decode=[])
    old.step(decode=[0])
    driver.runner.forget_requests()
    new = Driver(driver.runner, seed=2)
    new.add(0, [*PROMPT, expected[0]], num_outputs=1)
    new.step({0: len(PROMPT) + 1}, decode=[])
    new.step(decode=[0])
    assert new.requests[0].tokens[-2:] == expected[1:3]


def test_a_plan_without_rows_answers_with_nothing(driver: Driver) -> None:
    result = driver.step()
    assert result.step == 1
    assert result.tokens.size == 0
    assert result.ended >= result.started > 0


def test_an_unfinished_prefill_is_no_row(driver: Driver) -> None:
    driver.add(0, PROMPT)
    assert driver.step({0: 4}).tokens.size == 0
    assert driver.step({0: 6}).tokens.dtype == np.int32


def test_prefix_hits_read_the_blocks_of_others(driver: Driver) -> None:
    """A second request names the first one's full blocks and computes only the rest."""
    driver.add(0, PROMPT)
    driver.step({0: 10})
    first = driver.logits.clone() if driver.logits is not None else None
    shared = driver.requests[0].blocks[:2]
    driver.add(3, PROMPT, num_computed=8)
    columns = driver.pending["new"][-1]
    columns[3][:2] = shared
    driver.requests[3].blocks[:2] = shared
    driver.step({3: 2}, decode=[])
    assert torch.allclose(driver.logits, first, atol=1e-5)


def test_blocks_are_copied_and_zeroed(driver: Driver) -> None:
    cache = driver.runner.cache
    driver.add(0, PROMPT)
    driver.step({0: 10})
    source = driver.requests[0].blocks
    target = [driver.free.pop() for _ in source]
    before = cache.pool[:, source].clone()
    assert before.abs().amax() > 0
    driver.step(copy_sources=int32(source), copy_targets=int32(target), zero_blocks=int32([driver.free[0]]))
    assert torch.equal(cache.pool[:, target], before)
    driver.step(zero_blocks=int32(target[:1]))
    assert cache.pool[:, target[0]].abs().amax() == 0
    assert torch.equal(cache.pool[:, target[1:]], before[:, 1:])
    # exchanging two blocks reads both before it writes
    driver.step(copy_sources=int32(source[:2]), copy_targets=int32(source[1::-1]))
    assert torch.equal(cache.pool[:, source[:2]], before[:, [1, 0]])


def test_a_copied_block_is_seen_by_a_running_row(driver: Driver) -> None:
    """Copy-on-write under a decode row: nothing of a block may be kept from the step before."""
    driver.add(0, PROMPT)
    driver.step({0: 10}, decode=[])
    driver.step(decode=[0])
    old = driver.requests[0].blocks[0]
    driver.step(zero_blocks=int32([old]))
    zeroed = driver.logits.clone()
    pool = driver.runner.cache.pool
    assert pool[:, old].abs().amax() == 0
    tokens = driver.requests[0].tokens
    driver.requests[0].num_computed -= 1
    driver.runner.batch.columns.num_computed[0] -= 1
    driver.runner.batch.columns.last_token[0] = tokens[-2]
    driver.runner.batch.columns.num_known[0] -= 1
    driver.step()
    assert torch.allclose(driver.logits, zeroed, atol=1e-5)


def test_rows_with_nonfinite_logits_are_reported_and_harm_no_one(driver: Driver) -> None:
    driver.add(0, PROMPT)
    driver.add(1, PROMPT[::-1])
    driver.add(2, PROMPT[:3])
    driver.step({0: 10, 1: 10, 2: 3}, decode=[])
    driver.step(decode=[0, 1, 2])
    expected = driver.requests[0].tokens + driver.requests[2].tokens
    cache = driver.runner.cache
    for value in (float("nan"), float("inf")):
        with torch.inference_mode():
            cache.pool[:, driver.requests[1].blocks[0]] = value
        result = driver.step()
        assert result.nonfinite_rows.tolist() == [1]
        assert result.tokens[1] == 0
        assert torch.isfinite(cache.pool).all(), "cleared at once: its owner may have lost the blocks already"
    blocks = driver.requests[1].blocks
    driver.remove(1)
    driver.step(decode=[0, 2], zero_blocks=int32(blocks))
    assert torch.isfinite(cache.pool).all()
    assert driver.requests[0].tokens[:12] + driver.requests[2].tokens[:5] == expected
    driver.add(1, PROMPT[::-1])
    assert driver.step({1: 10}).nonfinite_rows.size == 0


@pytest.mark.parametrize("pooling", [0, 1])
def test_a_prompt_without_finite_states_leaves_nothing_behind(driver: Driver, pooling: int) -> None:
    """Also when nobody ever sees its logits, since it is aborted between two chunks."""
    with torch.inference_mode():
        driver.runner.decoder.embedding[96] = float("nan")
    pool = driver.runner.cache.pool
    driver.add(0, PROMPT)
    driver.add(1, [*PROMPT[:5], 96, *PROMPT[5:]], pooling=pooling)
    driver.step({0: 10, 1: 7}, decode=[])
    assert torch.isfinite(pool).all()
    driver.remove(1)
    driver.add(1, [*PROMPT[:5], 96, *PROMPT[5:]], pooling=pooling)
    driver.step({1: 7}, decode=[0])
    result = driver.step({1: 4}, decode=[0])
    assert result.nonfinite_rows.tolist() == [1], "although its last chunk alone is finite"
    assert torch.isfinite(pool).all()
    driver.remove(1)
    driver.add(1, PROMPT)
    assert driver.step({1: 10}).nonfinite_rows.size == 0


@pytest.mark.parametrize("length", [10, 8, 3])
def test_forks_sample_from_the_logits_of_one_row(driver: Driver, length: int) -> None:
    """One forward over the prompt; then every fork goes on in blocks of its own, as if it had computed the prompt itself."""
    sampled = {"temperature": 1.0, "seed": 3}
    alone = []
    for index in range(3):
        driver.add(0, PROMPT[:length], sample_index=index, **sampled)
        driver.step({0: length}, decode=[])
        for _ in range(6):
            driver.step(decode=[0])
        alone.append(driver.requests[0].tokens)
        driver.remove(0)
    assert len(set(map(tuple, alone))) == 3
    driver.add(3, PROMPT[:4])
    driver.step({3: 4}, decode=[])
    driver.add(0, PROMPT[:length], **sampled)
    driver.step({0: length - 2}, decode=[3])
    copies = [driver.fork(slot, 0, sample_index=slot, **sampled) for slot in (1, 2)]
    seen = []
    logits_of = driver.runner.decoder.logits
    driver.runner.decoder.logits = lambda hidden: seen.append(len(hidden)) or logits_of(hidden)
    result = driver.step({0: 2}, decode=[3])
    assert seen == [2], "of the decode row, and of the prompt"
    assert result.tokens.size == 4
    assert torch.equal(driver.logits[2], driver.logits[1])
    assert torch.equal(driver.logits[3], driver.logits[1])
    pairs = [copy for copy in copies if copy is not None]
    driver.step(
        decode=[3, 0, 1, 2], copy_sources=int32([a for a, _ in pairs]), copy_targets=int32([b for _, b in pairs])
    )
    for _ in range(5):
        driver.step()
    assert [driver.requests[slot].tokens for slot in range(3)] == alone


@pytest.mark.parametrize("last", [3, 8])
def test_a_prompt_without_finite_states_fails_whoever_shares_it(driver: Driver, last: int) -> None:
    """Also when only its first chunk is to blame, which the shared row no longer shows."""
    with torch.inference_mode():
        driver.runner.decoder.embedding[96] = float("nan")
    driver.add(0, [*PROMPT[:5], 96, *PROMPT[5:]])
    driver.add(3, PROMPT[:7])
    driver.step({0: 11 - last}, decode=[])
    driver.fork(1, 0)
    result = driver.step({0: last, 3: 7}, decode=[])
    assert result.nonfinite_rows.tolist() == [0, 2]
    assert torch.isfinite(driver.runner.cache.pool).all()


def test_what_a_fork_needs_is_not_cleared_with_its_source(driver: Driver) -> None:
    """The source has nothing left to choose; its prompt is in order."""
    driver.add(0, PROMPT)
    driver.step({0: 4}, decode=[])
    source, target = driver.fork(1, 0)
    everything = LateInputs(step=2, slots=int32([0]), allowed=np.zeros(4, np.uint32))
    result = driver.step({0: 6}, decode=[], late=lambda _: everything, late_slots=int32([0]))
    assert result.nonfinite_rows.tolist() == [0]
    driver.remove(0)
    driver.step(decode=[1], copy_sources=int32([source]), copy_targets=int32([target]), zero_blocks=int32([source]))
    driver.step()
    assert driver.requests[1].tokens[10:] == greedy(driver, 2, PROMPT, 3)


@pytest.mark.parametrize(("tokens", "count"), [(PROMPT[1:], 10), (PROMPT, 9)])
def test_a_fork_of_another_prompt_is_refused(driver: Driver, tokens: list[int], count: int) -> None:
    driver.add(0, PROMPT)
    driver.add(1, tokens, source=0)
    with pytest.raises(ValueError, match="slot 1 cannot be a fork of slot 0"):
        driver.step({0: count}, decode=[])


def test_pooled_rows_return_vectors_and_no_token(driver: Driver) -> None:
    driver.add(0, PROMPT)
    driver.add(1, PROMPT[:4], pooling=1)
    driver.add(2, PROMPT[:6])
    result = driver.step({0: 10, 1: 4, 2: 6})
    assert result.counts.tolist() == [1, 0, 1]
    assert result.tokens.size == 2
    assert result.vector_rows.tolist() == [1]
    assert result.vectors.shape == (48,)
    assert result.vectors.dtype == np.float32
    decoder = driver.runner.decoder
    driver.remove(0, 1, 2)
    driver.add(4, PROMPT[:4])
    driver.step({4: 4}, decode=[])
    assert driver.logits is not None
    with torch.inference_mode():
        logits = decoder.logits(torch.from_numpy(result.vectors.copy())[None])
    assert torch.allclose(logits, driver.logits, atol=1e-5)


def test_a_step_of_pooled_rows_only(driver: Driver) -> None:
    driver.add(1, PROMPT[:4], pooling=1)
    result = driver.step({1: 4})
    assert result.counts.tolist() == [0]
    assert result.tokens.size == 0
    assert result.vectors.size == 48


def test_stop_ids_are_held_back_until_min_tokens(driver: Driver) -> None:
    free = greedy(driver, 0, PROMPT, 4)
    driver.add(1, PROMPT, min_tokens=3, stop_ids=[free[0], 3])
    driver.step({1: 10}, decode=[])
    for _ in range(4):
        driver.step(decode=[1])
    output = driver.requests[1].tokens[10:]
    assert not {free[0], 3} & set(output[:3])
    assert not driver.runner.batch.rules._taken_out.size, "nothing is held back any more"
    driver.remove(1)
    # a request that is taken up again after its second token
    driver.add(2, PROMPT + output[:2], num_outputs=2, min_tokens=3, stop_ids=[output[2]])
    driver.step({2: 12}, decode=[])
    assert driver.requests[2].tokens[-1] != output[2]
    driver.remove(2)
    driver.add(2, PROMPT + output[:3], num_outputs=3, min_tokens=3, stop_ids=[output[3]])
    driver.step({2: 13}, decode=[])
    assert driver.requests[2].tokens[-1] == output[3]


def test_late_inputs_limit_what_is_sampled(driver: Driver) -> None:
    driver.add(0, PROMPT)
    driver.add(1, PROMPT[::-1])
    driver.step({0: 10, 1: 10}, decode=[])
    allowed = {4, 33, 64, 96}

    def only(step: int) -> LateInputs:
        words = np.zeros(4, np.uint32)
        for token in allowed:
            words[token // 32] |= np.uint32(1 << token % 32)
        return LateInputs(step=step, slots=int32([1]), allowed=words)

    seen = set()
    for _ in range(5):
        result = driver.step(decode=[0, 1], late=only, late_slots=int32([0, 1]))
        assert result.tokens[1] in allowed
        seen.add(int(result.tokens[0]))
        assert result.nonfinite_rows.size == 0
    assert seen - allowed
    nothing = driver.step(late=lambda step: LateInputs(step=step, slots=int32([0]), allowed=np.zeros(4, np.uint32)))
    assert nothing.nonfinite_rows.tolist() == [0], "a row that may sample nothing has no valid token"


def test_sampled_rows_follow_seed_and_token_index(driver: Driver) -> None:
    """The same stream alone, and taken up again in another slot of a fuller batch."""
    driver.add(0, PROMPT, temperature=1.0, seed=99)
    driver.step({0: 10}, decode=[])
    for _ in range(8):
        driver.step(decode=[0])
    stream = driver.requests[0].tokens[10:]
    driver.remove(0)
    driver.add(5, PROMPT[:5], temperature=1.0, seed=1)
    driver.add(6, PROMPT + stream[:4], num_outputs=4, temperature=1.0, seed=99)
    driver.step({5: 5, 6: 14}, decode=[])
    for _ in range(4):
        driver.step(decode=[5, 6])
    assert driver.requests[6].tokens[10:] == stream
    assert len(set(stream)) > 4


def test_logits_are_made_in_chunks(driver: Driver, monkeypatch: pytest.MonkeyPatch) -> None:
    for slot in range(7):
        driver.add(slot, PROMPT[slot:] + PROMPT[:slot], temperature=1.0, seed=slot, pooling=int(slot == 3))
    whole = driver.step(dict.fromkeys(range(7), 10)).tokens
    driver.remove(*range(7))
    monkeypatch.setattr(runner, "MAX_LOGITS_BYTES", 97 * 4 * 2)
    for slot in range(7):
        driver.add(slot, PROMPT[slot:] + PROMPT[:slot], temperature=1.0, seed=slot, pooling=int(slot == 3))
    handle = driver.runner.execute(driver.plan(dict.fromkeys(range(7), 10), []))
    assert handle.logits is None
    assert [chunk[:2] for chunk in handle.sampling.how] == [(0, 2), (2, 4), (4, 6)]
    assert driver.runner.sample(handle).tokens.tolist() == whole.tolist()


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
@pytest.mark.parametrize("most_indices", [attention.MAX_GROUP_INDICES, 500])
def test_rows_of_very_different_length_and_their_groups(
    tiny_llama: Path,
    make_driver: Callable[..., Driver],
    monkeypatch: pytest.MonkeyPatch,
    dtype: str,
    most_indices: int,
) -> None:
    """Rows that are sorted and split in every way give what each gives alone."""
    driver = make_driver(tiny_llama, load_format="dummy", dtype=dtype)
    alone = make_driver(tiny_llama, load_format="dummy", dtype=dtype)
    lengths = {0: 9, 1: 70, 2: 3, 3: 33, 4: 1}
    random = np.random.default_rng(0)
    prompts = {slot: random.integers(0, 97, length).tolist() for slot, length in lengths.items()}
    expected = {}
    for slot, prompt in prompts.items():
        alone.add(slot, prompt)
        alone.step({slot: len(prompt)}, decode=[])
        rows = []
        for token in range(8):
            alone.runner.batch.columns.last_token[slot] = alone.requests[slot].tokens[-1] = token
            alone.step(decode=[slot])
            assert alone.logits is not None
            rows.append(alone.logits[0])
        expected[slot] = torch.stack(rows)
        alone.remove(slot)
    monkeypatch.setattr(attention, "GROUP_OVERHEAD_ELEMENTS", 300)
    monkeypatch.setattr(attention, "MAX_GROUP_INDICES", most_indices)
    driver.runner.batch.sort_gain = 5
    for slot, prompt in prompts.items():
        driver.add(slot, prompt)
        driver.step({slot: len(prompt)}, decode=[])
    order = [2, 0, 1, 4, 3]
    worst = 0.0
    for token in range(8):
        for slot in order:
            driver.runner.batch.columns.last_token[slot] = driver.requests[slot].tokens[-1] = token
        driver.step(decode=order)
        (context,) = driver.runner.cache.decodes.values()
        assert len(context.groups) > 2
        assert driver.logits is not None
        for row, slot in enumerate(order):
            worst = max(worst, float((driver.logits[row] - expected[slot][token]).abs().max()))
    assert worst < (1e-4 if dtype == "float32" else 0.5)


def test_a_failed_step_leaves_a_runner_that_works(driver: Driver, monkeypatch: pytest.MonkeyPatch) -> None:
    expected = greedy(driver, 0, PROMPT, 6)
    driver.add(0, PROMPT)
    driver.step({0: 10}, decode=[])
    driver.step(decode=[0])
    with monkeypatch.context() as patch:
        patch.setattr(driver.runner.decoder, "lm_head", None)
        with pytest.raises(AssertionError):
            driver.runner.execute(StepPlan(step=77))
    driver.runner.batch.check_integrity()
    with pytest.raises(ValueError, match="not in use"):
        driver.runner.execute(StepPlan(step=78, decode_slots=int32([7])))
    driver.remove(0)
    assert greedy(driver, 0, PROMPT, 6) == expected


def profile(folder: Path | str, **arguments: Any) -> tuple[int, CpuRunner]:
    config = EngineConfig.from_arguments(folder, skip_tokenizer_init=True, num_threads=1, **arguments)
    one = CpuRunner(config, show_progress=False)
    one.load()
    return one.profile_num_blocks(), one


def test_explicit_memory_is_taken_at_its_word(tiny_llama: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def never(self: CpuRunner) -> int:
        raise AssertionError("profiled")

    monkeypatch.setattr(CpuRunner, "_profile_working_bytes", never)
    blocks, one = profile(tiny_llama, load_format="dummy", kv_cache_memory_bytes=1_000_000)
    assert one.block_bytes == 2 * 2 * 2 * 16 * 32 * 4
    assert blocks == 1_000_000 // one.block_bytes
    with pytest.raises(ConfigError, match="max_model_len"):
        one.config.resolved(1)


def test_explicit_memory_that_is_not_there_is_warned_of(
    tiny_llama: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """What a process writes last is quoted when it is killed."""
    monkeypatch.setattr("actorllm.model.memory.available_bytes", lambda: 1 << 20)
    profile(tiny_llama, load_format="dummy", kv_cache_memory_bytes=1_000_000)
    assert not caplog.messages
    profile(tiny_llama, load_format="dummy", kv_cache_memory_bytes=2_000_000)
    assert "kv_cache_memory_bytes=2000000 is more than the 1048576 bytes of memory" in caplog.text


def test_the_default_cache_holds_every_sequence(tiny_llama: Path) -> None:
    blocks, one = profile(tiny_llama, load_format="dummy", max_num_seqs=6, max_num_batched_tokens=50)
    assert blocks == 6 * 4
    one.allocate(blocks)
    assert not one.batch.columns.is_live.any()


def test_little_memory_makes_a_small_cache(tiny_llama: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(memory, "available_bytes", lambda: 400 << 20)
    monkeypatch.setattr(CpuRunner, "_profile_working_bytes", lambda self: 100 << 20)
    blocks, one = profile(tiny_llama, load_format="dummy", max_num_seqs=4096, max_num_batched_tokens=4096)
    assert blocks == int((400 << 20) * 0.4 - (100 << 20)) // one.block_bytes
    blocks, _ = profile(tiny_llama, load_format="dummy", gpu_memory_utilization=0.5)
    assert blocks == (100 << 20) // one.block_bytes
    blocks, _ = profile(tiny_llama, load_format="dummy", gpu_memory_utilization=0.1)
    assert blocks == 0


def test_ranks_share_the_memory_of_their_own_machine(tiny_llama: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Of two ranks on one machine each has a half; on a machine of its own it has all, or as much as its agent has."""
    monkeypatch.setattr(memory, "available_bytes", lambda: 400 << 20)
    monkeypatch.setattr(CpuRunner, "_profile_working_bytes", lambda self: 0)
    _, one = profile(tiny_llama, load_format="dummy", max_num_seqs=4096, max_num_batched_tokens=4096)
    shares = []
    for places, share in (((), 1.0), (("a:1",), 1.0), (("a:1",), 0.25)):
        cache = replace(one.config.cache, machine_share=share)
        one.config = replace(one.config, world_size=2, rank_nodes=places, cache=cache)
        shares.append(one._cache_bytes())
    assert shares == pytest.approx([(80 << 20), (160 << 20), (40 << 20)], abs=1)


def test_the_bundled_model_runs() -> None:
    blocks, one = profile("storyteller", max_num_seqs=2, max_num_batched_tokens=64)
    assert blocks == 2 * 32
    one.allocate(blocks)
    driver = Driver(one, num_blocks=blocks)
    output = greedy(driver, 0, [1, 200, 300, 400], 20)
    assert len(output) == 20


def test_the_cache_takes_memory_only_where_it_is_written() -> None:
    before = memory.resident_bytes()
    cache = attention.KVCache(4, 4, 64, 60_000, 16, torch.bfloat16)
    assert cache.pool.numel() * 2 > 1 << 30
    assert memory.resident_bytes() - before < 64 << 20
    assert cache.pool[3, 59_999, 7].abs().amax() == 0
    cache.zero(int32([5, 59_999]))
    del cache


class Fragile:
    """A model that breaks down in the middle of a step, after some layers have written NaN."""

    def __init__(self, error: Exception) -> None:
        self.error = error

    def __call__(self, inputs: StepInputs, cache: KVCache) -> torch.Tensor:
        cache.pool[0, np.unique(inputs.kv_slots // cache.block_size)] = torch.nan
        raise self.error


@pytest.mark.parametrize("where", ["forward", "logits"])
def test_what_a_broken_step_has_written_is_cleared(driver: Driver, monkeypatch: pytest.MonkeyPatch, where: str) -> None:
    """Nobody has looked at it, and 0 x NaN in a reused block would be the next owner's."""
    expected = greedy(driver, 0, PROMPT, 6)
    one = driver.runner
    driver.add(0, PROMPT)
    driver.add(1, PROMPT[::-1])
    driver.step({0: 10, 1: 4}, decode=[])
    fragile = Fragile(RuntimeError("broken"))
    with monkeypatch.context() as patch:
        if where == "forward":
            patch.setattr(one.decoder, "forward", fragile)
        else:
            right = one.decoder.forward

            def forward(inputs: StepInputs, cache: KVCache) -> torch.Tensor:
                states = right(inputs, cache)
                patch.setattr(one, "_logits", lambda *args: fragile(inputs, cache))
                return states

            patch.setattr(one.decoder, "forward", forward)
        with pytest.raises(RuntimeError, match="broken"):
            one.step(driver.plan({1: 6}, [0]))
        assert not torch.isfinite(one.cache.pool).all(), "or the test shows nothing"
        one.discard()
    assert torch.isfinite(one.cache.pool).all()
    driver.remove(0, 1)
    assert greedy(driver, 0, PROMPT, 6) == expected


def test_the_bad_rows_and_chunks_of_a_step_are_told_apart(driver: Driver) -> None:
    with torch.inference_mode():
        driver.runner.decoder.embedding[96] = float("nan")
    driver.add(0, PROMPT)
    driver.add(1, [*PROMPT[:5], 96, *PROMPT[5:]])
    result = driver.step({0: 4, 1: 7}, decode=[])
    assert result.nonfinite_prefills.tolist() == [1]
    assert result.nonfinite_rows.size == 0
    result = driver.step({0: 6, 1: 4}, decode=[])
    assert result.nonfinite_rows.tolist() == [1]
    assert result.nonfinite_counts.tolist() == [1], "its logits are finite, its states were not"
    driver.remove(1)
    driver.add(1, [1, 96])
    result = driver.step({1: 2}, decode=[0])
    assert (result.nonfinite_rows.tolist(), result.nonfinite_counts.tolist()) == ([1], [97])


@pytest.mark.parametrize(
    ("error", "is_shortage"),
    [
        (MemoryError(), True),
        (torch.OutOfMemoryError("CUDA out of memory"), True),
        (RuntimeError("[enforce fail] DefaultCPUAllocator: not enough memory: you tried to allocate 64 bytes"), True),
        (RuntimeError("could not create a primitive"), False),
        (ValueError("out of memory"), False),
    ],
)
def test_a_want_of_memory_is_recognised(error: Exception, is_shortage: bool) -> None:
    assert CpuRunner.is_memory_shortage(error) == is_shortage


def test_torch_says_it_in_these_words() -> None:
    with pytest.raises(RuntimeError) as raised:
        torch.empty(1 << 60, dtype=torch.uint8)
    assert CpuRunner.is_memory_shortage(raised.value)


# Whether it can do anything at all ------------------------------------------------------------------------------------


def test_a_check_of_its_own_disturbs_nobody(driver: Driver) -> None:
    """Between any two steps, while a prompt is half computed, and of a step that is half done."""
    expected = [greedy(driver, 0, PROMPT, 9), greedy(driver, 0, PROMPT[::-1], 9)]
    one = driver.runner
    driver.add(0, PROMPT)
    driver.add(1, PROMPT[::-1])
    driver.step({0: 10, 1: 4}, decode=[])
    one.check_itself()
    driver.step({1: 6}, decode=[0])
    for _ in range(7):
        before = one.cache.pool.clone()
        one.check_itself()
        assert torch.equal(one.cache.pool, before)
        driver.step(decode=[0, 1])
    one.batch.check_integrity()
    assert driver.requests[0].tokens[len(PROMPT) :] == expected[0]
    assert driver.requests[1].tokens[len(PROMPT) :] == expected[1][:8]
    with pytest.raises(ValueError, match="not in use"):
        one.execute(StepPlan(step=78, decode_slots=int32([7])))
    with torch.inference_mode():
        one.cache.pool[:, 3] = torch.nan
    one.check_itself()
    one.forget_requests()
    assert torch.isfinite(one.cache.pool).all(), "the step was left half done, and is so still"


@pytest.mark.parametrize("model", ["storyteller", "tiny"])
@pytest.mark.parametrize("defect", ["forward", "weights", "sampler"])
def test_it_finds_what_makes_every_step_fail(
    make_runner: Callable[..., CpuRunner], tiny_llama: Path, model: str, defect: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    one = make_runner(tiny_llama, load_format="dummy") if model == "tiny" else make_runner("storyteller")
    one.check_itself()
    kept = one.cache, one.batch
    fragile = Fragile(RuntimeError("broken"))
    match defect:
        case "forward":
            monkeypatch.setattr(one.decoder, "forward", fragile)
        case "weights":
            right = one.decoder.forward
            monkeypatch.setattr(one.decoder, "forward", lambda inputs, cache: right(inputs, cache) * torch.nan)
        case "sampler":
            monkeypatch.setattr(one._sampler, "sample", lambda *args: fragile(None, one.cache))  # type: ignore[arg-type]
    with pytest.raises(Exception, match="not finite" if defect == "weights" else "broken|no attribute"):
        one.check_itself()
    assert (one.cache, one.batch) == kept


def test_a_request_that_is_not_finite_is_no_defect(driver: Driver) -> None:
    with torch.inference_mode():
        driver.runner.decoder.embedding[[60, 0]] = float("nan")  # also of a token that the check uses
    driver.add(0, [1, 60])
    result = driver.step({0: 2}, decode=[])
    assert result.came_to_nothing
    driver.runner.check_itself()
    driver.add(1, [1, 2])
    assert not driver.step({1: 2}, decode=[0]).came_to_nothing, "others have tokens"
