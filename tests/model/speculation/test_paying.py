"""Drafts go by what they cost and by how often they are right: never much slower than without, and faster where that can be."""

from __future__ import annotations

from dataclasses import replace
from types import SimpleNamespace
from typing import Any, cast

import numpy as np
import pytest

from actorllm.messages import I32
from actorllm.model.inputs import PersistentBatch
from actorllm.model.speculation.histories import LONGEST_REST, Histories, History
from actorllm.model.speculation.speculator import Speculator
from actorllm.types.drafter import Costs
from actorllm.types.speculation import PayingDrafts, read_speculation, seconds_of, with_costs

MOST = 7
SIZES = (1, 2, 4, 8, 16, 32, 64)
WAITS: Costs = tuple((size, 1e-3 * max(1.0, size / 16)) for size in SIZES)
"""Steps that wait for the weights: up to 16 tokens cost what one does."""
GROWS: Costs = tuple((size, 1e-3 * size**0.3) for size in SIZES)
PASSES: Costs = tuple((size, 0.2e-3) for size in SIZES)
"""Of a draft model."""


class Guesser:
    """As many drafts as are wanted."""

    def draft(self, batch: PersistentBatch, histories: Histories, slots: I32, wanted: I32) -> list[list[int]]:
        return [[0] * int(number) for number in wanted]

    def observe(self, slots: I32, num_drafted: I32, num_accepted: I32) -> None:
        return


class Searcher(Guesser):
    """Finds nothing for the first row, as a search for n-grams often does."""

    def draft(self, batch: PersistentBatch, histories: Histories, slots: I32, wanted: I32) -> list[list[int]]:
        found = super().draft(batch, histories, slots, wanted)
        return [[] if slot == 0 else drafted for slot, drafted in zip(slots.tolist(), found, strict=True)]


def gain(acceptances: list[float], steps: Costs, passes: Costs, *, tokens: int = 256, seed: int = 0) -> float:
    """Tokens a second in times of those without drafts. acceptances: how often a draft of each row is right."""
    given = replace(_given(), goes_by_costs=True)
    options = with_costs(given, steps, passes)
    speculator = Speculator(options, 10, Guesser())
    rows, random, spent, made = len(acceptances), np.random.default_rng(seed), 0.0, 0
    slots = np.arange(rows, dtype=np.int32)
    for slot in range(rows):
        speculator.histories.add(slot, np.zeros(1, np.int32))
    batch = cast("PersistentBatch", SimpleNamespace(decode_slots=slots))
    most = next((n for first, last, n in options.num_speculative_tokens_per_batch_size if first <= rows <= last), 0)
    while made < tokens * rows:
        drafts = speculator.draft(batch, np.full(rows, MOST, np.int32), most) if most else None
        counts = np.zeros(rows, np.int32) if drafts is None else drafts.counts
        drafting = int(np.count_nonzero(counts))
        spent += seconds_of(steps, rows + int(counts.sum()))
        spent += int(counts.max()) * seconds_of(passes, drafting) if drafting else 0.0
        right = [int(np.argmin([*(random.random(n) < a), False])) for n, a in zip(counts, acceptances, strict=True)]
        for slot, number in enumerate(right):
            speculator.store(np.full(number + 1, slot, np.int32), np.zeros(number + 1, np.int32))
        speculator.observe(slots, counts, np.array(right, np.int32))
        made += rows + sum(right)
    return made / rows * seconds_of(steps, rows) / spent


def _given() -> Any:
    return read_speculation({"method": "ngram", "num_speculative_tokens": MOST})


@pytest.mark.parametrize("rows", [1, 4])
@pytest.mark.parametrize(("steps", "passes"), [(WAITS, ()), (GROWS, ()), (WAITS, PASSES)])
def test_drafts_cost_next_to_nothing_however_often_they_are_right(rows: int, steps: Costs, passes: Costs) -> None:
    for acceptance in (0.0, 0.1, 0.2, 0.3, 0.4, 0.5, 0.6, 0.8):
        gains = [gain([acceptance] * rows, steps, passes, seed=seed) for seed in range(4)]
        assert np.mean(gains) >= 0.965, f"{acceptance} of the drafts are right"


@pytest.mark.parametrize("rows", [1, 4])
def test_a_wrong_draft_now_and_then_does_not_end_those_that_pay(rows: int) -> None:
    for steps, passes, least in ((WAITS, (), 1.7), (GROWS, (), 1.35), (WAITS, PASSES, 1.3)):
        assert np.mean([gain([0.7] * rows, steps, passes, seed=seed) for seed in range(4)]) > least


def test_a_row_whose_drafts_are_right_does_not_make_the_others_pay_for_its_passes() -> None:
    assert gain([0.95, 0.0, 0.0, 0.0], WAITS, PASSES) >= 0.965


def test_a_row_for_which_nothing_is_found_does_not_keep_the_others_from_their_rest() -> None:
    options = with_costs(replace(_given(), goes_by_costs=True), WAITS, ())
    speculator = Speculator(options, 10, Searcher())
    slots = np.arange(4, dtype=np.int32)
    for slot in range(4):
        speculator.histories.add(slot, np.zeros(1, np.int32))
        speculator.histories.existing(slot).acceptance = 0.0
    batch = cast("PersistentBatch", SimpleNamespace(decode_slots=slots))
    num_drafts = 0
    for _ in range(20 * LONGEST_REST):
        drafts = speculator.draft(batch, np.full(4, MOST, np.int32), 3)
        counts = np.zeros(4, np.int32) if drafts is None else drafts.counts
        num_drafts += int(counts.sum())
        speculator.store(slots, np.zeros(4, np.int32))
        speculator.observe(slots, counts, np.zeros(4, np.int32))
    assert num_drafts <= 3 * (20 + 8), "each of the other rows tries once in its longest rest, and more often at first"


def test_text_that_begins_to_repeat_itself_is_drafted_again() -> None:
    paying = PayingDrafts(with_costs(replace(_given(), goes_by_costs=True), WAITS, PASSES))
    history = History(np.zeros(1, np.int32), MOST)
    tries = 0
    while history.pause < LONGEST_REST or paying.number(history.acceptance, 1):
        history.is_trial = not paying.number(history.acceptance, 1)
        history.observe(1, 0, MOST, goes_by_costs=True)
        tries += 1
        assert tries < 40
    passed = 0
    while not paying.number(history.acceptance, 1):
        passed += history.rest
        history.is_trial = True
        history.observe(1, 1, MOST, goes_by_costs=True)
    assert passed <= 2 * LONGEST_REST, "tokens until drafts are no trials any more"
