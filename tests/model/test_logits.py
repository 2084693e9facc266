"""What rules do to logits: against a plain statement of each, and against the processors of transformers."""

from __future__ import annotations

import tracemalloc
from typing import Any

import numpy as np
import pytest
import torch
from transformers import (
    MinNewTokensLengthLogitsProcessor,
    NoBadWordsLogitsProcessor,
    RepetitionPenaltyLogitsProcessor,
    SequenceBiasLogitsProcessor,
)

from actorllm.messages import LateInputs
from actorllm.messages.logit_rules import SamplingRules
from actorllm.model.logits import LARGEST, LogitRules, apply_masks, masks_behind, only_choices

VOCAB = 61
NONE = np.zeros(0, np.int32)


def int32(values: Any) -> Any:
    return np.array(values, np.int32)


def logits_of(num_rows: int, seed: int = 0, vocab: int = VOCAB) -> Any:
    return np.random.default_rng(seed).normal(0, 3, (num_rows, vocab)).astype(np.float32)


def expected_of(
    row: Any, rules: SamplingRules, held: list[int], min_tokens: int, prompt: list[int], output: list[int]
) -> Any:
    """One row, one parameter after the other, as vLLM's documentation states them."""
    row = row.copy()
    if rules.allowed_ids:
        row[[i for i in range(len(row)) if i not in rules.allowed_ids]] = -np.inf
    for word in rules.bad_words:
        before = list(word[:-1])
        if output[len(output) - len(before) :] == before and len(output) >= len(before):
            row[word[-1]] = -np.inf
    if len(output) < min_tokens:
        row[held] = -np.inf
    for token, bias in zip(rules.bias_ids, rules.biases, strict=True):
        row[token] += np.float32(bias)
    for token in set(prompt + output):
        factor = np.float32(rules.repetition_penalty)
        row[token] = row[token] / factor if row[token] > 0 else row[token] * factor
    for token in set(output):
        row[token] -= np.float32(rules.frequency_penalty) * np.float32(output.count(token))
        row[token] -= np.float32(rules.presence_penalty)
    return row


def random_rules(rng: Any) -> SamplingRules:
    """Any subset of the parameters."""

    def some(share: float = 0.5) -> bool:
        return bool(rng.random() < share)

    words = [tuple(rng.integers(0, 4, rng.integers(1, 4)).tolist()) for _ in range(rng.integers(1, 8))]
    bias_ids = tuple(rng.permutation(VOCAB)[: rng.integers(1, 9)].tolist())
    return SamplingRules(
        presence_penalty=float(np.float32(rng.uniform(-2, 2))) if some() else 0.0,
        frequency_penalty=float(np.float32(rng.uniform(-2, 2))) if some() else 0.0,
        repetition_penalty=float(np.float32(rng.uniform(0.5, 2))) if some() else 1.0,
        **({"bias_ids": bias_ids, "biases": tuple(rng.normal(0, 3, len(bias_ids)).tolist())} if some() else {}),
        allowed_ids=tuple(rng.permutation(VOCAB)[: rng.integers(9, VOCAB)].tolist()) if some(0.4) else (),
        bad_words=tuple(words) if some() else (),
    )


@pytest.mark.parametrize("seed", range(20))
def test_any_mixture_in_any_order_of_slots(seed: int) -> None:
    """Slots come and go, rows come in any order and in parts, and every row is as if it were alone."""
    rng = np.random.default_rng(seed)
    batch = LogitRules(VOCAB)
    state: dict[int, Any] = {}
    for step in range(30):
        for slot in [s for s in state if rng.random() < 0.15]:
            del state[slot]
            batch.remove(int32([slot]))
        for slot in range(12):
            if slot in state or rng.random() < 0.6:
                continue
            rules, held = random_rules(rng), sorted(set(rng.integers(0, VOCAB, 3).tolist()))
            prompt, output = rng.integers(0, 8, 6).tolist(), rng.integers(0, 4, rng.integers(0, 5)).tolist()
            min_tokens = int(rng.integers(0, 12))
            state[slot] = (rules, held, min_tokens, prompt, output)
            batch.add(slot, rules, int32(prompt), int32(output))
            if min_tokens > len(output):
                batch.hold_back(slot, np.array(held), min_tokens)
        slots = rng.permutation(sorted(state))[: rng.integers(1, 12)].astype(np.int32)
        if not slots.size:
            continue
        logits = logits_of(len(slots), 1000 * seed + step)
        raw = logits.copy()
        half = len(slots) // 2
        for part in (slice(0, half), slice(half, None)):
            if slots[part].size and batch.concerns(slots[part]):
                num_outputs = int32([len(state[s][4]) for s in slots[part].tolist()])
                assert not batch.apply(logits[part], slots[part], num_outputs).size
        for row, slot in enumerate(slots.tolist()):
            np.testing.assert_allclose(logits[row], expected_of(raw[row], *state[slot]), rtol=1e-6, atol=1e-6)
        tokens = rng.integers(0, 4, len(slots)).astype(np.int32)
        if batch.has_memory:
            batch.store(slots, tokens)
        for slot, token in zip(slots.tolist(), tokens.tolist(), strict=True):
            state[slot][4].append(token)
        batch.check_integrity(set(state))


def applied(rules: SamplingRules, prompt: list[int], output: list[int], **held: Any) -> tuple[Any, Any]:
    """One row before and after."""
    batch = LogitRules(VOCAB)
    batch.add(3, rules, int32(prompt), int32(output))
    if held:
        batch.hold_back(3, np.array(held["ids"]), held["until"])
    logits = logits_of(1)
    raw = torch.from_numpy(logits.copy())
    batch.apply(logits, int32([3]), int32([len(output)]))
    return raw, logits[0]


PROMPT, OUTPUT = [5, 9, 9, 12], [7, 9, 7, 30]


@pytest.mark.parametrize("penalty", [0.6, 1.0001, 1.3, 5.0])
def test_repetition_penalty_is_that_of_transformers(penalty: float) -> None:
    raw, found = applied(SamplingRules(repetition_penalty=penalty), PROMPT, OUTPUT)
    expected = RepetitionPenaltyLogitsProcessor(penalty)(torch.tensor([PROMPT + OUTPUT]), raw)[0]
    np.testing.assert_allclose(found, expected.numpy(), rtol=1e-6)


def test_bad_words_are_those_of_transformers() -> None:
    words = [(3,), (30, 4), (7, 30, 5), (9, 7, 30, 6), (30, 30, 8), (12, 7, 9, 7, 30, 10)]
    raw, found = applied(SamplingRules(bad_words=tuple(words)), PROMPT, OUTPUT)
    processor = NoBadWordsLogitsProcessor([list(word) for word in words], eos_token_id=60)
    np.testing.assert_array_equal(found, processor(torch.tensor([OUTPUT]), raw)[0].numpy())
    assert np.flatnonzero(np.isinf(found)).tolist() == [3, 4, 5, 6], "the prompt does not begin a bad word"


@pytest.mark.parametrize("until", [3, 4, 5, 100])
def test_min_tokens_is_that_of_transformers(until: int) -> None:
    raw, found = applied(SamplingRules(), PROMPT, OUTPUT, ids=[2, 8, 2], until=until)
    processor = MinNewTokensLengthLogitsProcessor(len(PROMPT), until, [2, 8])
    np.testing.assert_array_equal(found, processor(torch.tensor([PROMPT + OUTPUT]), raw)[0].numpy())


def test_biases_are_those_of_transformers() -> None:
    bias = {4: 2.5, 60: -100.0, 0: 0.125}
    raw, found = applied(SamplingRules(bias_ids=tuple(bias), biases=tuple(bias.values())), PROMPT, OUTPUT)
    processor = SequenceBiasLogitsProcessor({(token,): value for token, value in bias.items()})
    np.testing.assert_allclose(found, processor(torch.tensor([PROMPT + OUTPUT]), raw)[0].numpy(), rtol=1e-6)


@pytest.mark.parametrize("size", [1, 5, 40, VOCAB])
def test_allowed_ids(size: int) -> None:
    allowed = tuple(range(VOCAB - size, VOCAB))
    raw, found = applied(SamplingRules(allowed_ids=allowed), PROMPT, OUTPUT)
    assert np.isneginf(found[: VOCAB - size]).all()
    np.testing.assert_array_equal(found[VOCAB - size :], raw[0, VOCAB - size :].numpy())


def test_a_bias_does_not_bring_back_what_was_taken_out() -> None:
    rules = SamplingRules(allowed_ids=(1, 2), bad_words=((2,),), bias_ids=(2, 3), biases=(100.0, 100.0))
    _, found = applied(rules, PROMPT, OUTPUT)
    assert np.flatnonzero(np.isfinite(found)).tolist() == [1]


def test_rows_with_nothing_left_are_named() -> None:
    batch = LogitRules(VOCAB)
    batch.add(0, SamplingRules(allowed_ids=(1, 2), bad_words=((2,), (7, 1))), NONE, int32([7]))
    batch.add(1, SamplingRules(allowed_ids=(1, 2), bad_words=((2,), (8, 1))), NONE, int32([7]))
    batch.hold_back(2, np.arange(VOCAB), 5)
    batch.hold_back(3, np.arange(VOCAB - 1), 5)
    batch.add(4, SamplingRules(allowed_ids=tuple(range(VOCAB - 1)), presence_penalty=1), NONE, NONE)
    logits = logits_of(6)
    exhausted = batch.apply(logits, int32([5, 4, 3, 2, 1, 0]), int32([1, 1, 1, 1, 1, 1]))
    assert exhausted.tolist() == [3, 5]


def test_extreme_values_make_no_infinity() -> None:
    rules = SamplingRules(repetition_penalty=1e-38, bias_ids=(3, 4), biases=(3e38, -3e38))
    _, found = applied(rules, PROMPT, OUTPUT)
    assert found.max() <= LARGEST
    assert not np.isnan(found).any()


def test_memory_goes_with_what_was_seen() -> None:
    """256 slots of a large vocabulary: a table of counts would take 150 MB."""
    vocab = 151_936
    rules = SamplingRules(presence_penalty=1, repetition_penalty=1.1)
    tracemalloc.start()
    batch = LogitRules(vocab)
    for slot in range(256):
        batch.add(slot, rules, np.arange(200, dtype=np.int32), np.arange(50, dtype=np.int32))
    for step in range(20):
        batch.store(np.arange(256, dtype=np.int32), np.full(256, 1000 + step, np.int32))
    used, _ = tracemalloc.get_traced_memory()
    tracemalloc.stop()
    assert used < 4 << 20
    assert batch._seen.size == 256 * 220


def test_masks_take_out_what_they_do_not_allow_and_touch_no_other_row() -> None:
    rng = np.random.default_rng(1)
    for vocab_size in (70, 64, 1):
        logits = rng.normal(size=(4, vocab_size)).astype(np.float32)
        slots = np.array([9, 2, 5, 7], np.int32)
        before = logits.copy()
        masked_slots = np.array([5, 3, 9, 7], np.int32)  # slot 3 is in no row
        allowed = rng.integers(0, 2**32, (4, -(-vocab_size // 32)), np.uint32)
        allowed[3] = 0
        bits = np.unpackbits(allowed.view(np.uint8), axis=1, bitorder="little")[:, :vocab_size].astype(bool)
        rows, empty = apply_masks(logits, slots, masked_slots, allowed.reshape(-1))
        assert sorted(rows.tolist()) == [0, 2, 3]
        assert 3 in empty
        assert (logits[1] == before[1]).all()
        for row, mask in ((2, 0), (0, 2), (3, 3)):
            assert (np.where(bits[mask], before[row], -np.inf) == logits[row]).all()
        whole = before.copy()
        apply_masks(whole, slots, slots, np.tile(allowed[0], 4))
        assert (np.where(bits[0], before, -np.inf) == whole).all()


def masks_of(*allowed: set[int]) -> Any:
    bits = np.zeros((len(allowed), 64), np.uint8)
    for row, ids in enumerate(allowed):
        bits[row, list(ids)] = 1
    return np.packbits(bits, axis=1, bitorder="little").view(np.uint32).reshape(-1)


def test_masks_by_the_number_of_drafts_before_them() -> None:
    masks = masks_of({1}, {2, 3}, {33}, {60}, {40})
    late = LateInputs(step=1, slots=int32([4, 2, 9]), allowed=masks, counts=int32([2, 1, 2]))
    found = [masks_behind(late, number, VOCAB) for number in range(3)]
    assert [one.slots.tolist() for one in found] == [[4, 2, 9], [4, 9], []]
    assert found[0].allowed.tolist() == masks_of({1}, {33}, {60}).tolist()
    assert found[1].allowed.tolist() == masks_of({2, 3}, {40}).tolist()
    plain = LateInputs(step=1, slots=int32([4]), allowed=masks_of({1}))
    assert masks_behind(plain, 0, VOCAB) is plain
    assert not masks_behind(plain, 1, VOCAB).slots.size


def test_a_choice_of_one_is_known_without_logits() -> None:
    late = LateInputs(step=1, slots=int32([4, 2]), allowed=masks_of({31}, {32}))
    found = only_choices(int32([2, 4]), late)
    assert found is not None
    assert found.tolist() == [32, 31]
    assert only_choices(int32([2, 4, 5]), late) is None, "slot 5 is free"
    assert only_choices(int32([7, 8]), late) is None
    for masks in (masks_of({31}, {32, 33}), masks_of({31}, {1, 40}), masks_of({31}, set())):
        assert only_choices(int32([2, 4]), LateInputs(step=1, slots=int32([4, 2]), allowed=masks)) is None
