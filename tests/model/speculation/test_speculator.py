"""What a worker drafts: from each row's own tokens, within its room, and less where drafts are wrong."""

from __future__ import annotations

from collections.abc import Sequence
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

from actorllm.messages import NewRow, StepPlan, pack_rows
from actorllm.model.speculation.histories import LONGEST_REST, History
from actorllm.model.speculation.speculator import Speculator
from actorllm.types.drafter import HISTORY_TOKENS, Drafter, Speculation


class Broken(Drafter):
    def draft(self, tokens: Any, most: int) -> Sequence[int]:
        raise RuntimeError("planted")


class Leaving(Drafter):
    def draft(self, tokens: Any, most: int) -> Sequence[int]:
        raise SystemExit(3)


class Careless(Drafter):
    """Drafts more than is wanted, and ids that are none."""

    def draft(self, tokens: Any, most: int) -> Sequence[int]:
        assert not tokens.flags.writeable
        return [int(tokens[-1]), 3, 99, 4] if tokens[0] else range(50)


def speculator(method: str = "ngram", most: int = 4) -> Speculator:
    made = Speculator(Speculation(method, most, 1, 3), vocab_size=97)
    prompts = {0: int32(1, 2, 3, 1, 2), 2: int32(0, 5, 6, 7)}
    new = pack_rows(NewRow(slot, len(tokens)) for slot, tokens in prompts.items())
    made.apply(StepPlan(step=1, new_rows=new), prompts)
    return made


def int32(*values: int) -> Any:
    return np.array(values, np.int32)


def drafted(made: Speculator, most: int = 4, room: Any = None) -> list[list[int]]:
    batch: Any = SimpleNamespace(decode_slots=int32(2, 0))
    found = made.draft(batch, int32(9, 9) if room is None else room, most)
    if found is None:
        return [[], []]
    ends = np.cumsum(found.counts)
    return [found.tokens[end - count : end].tolist() for end, count in zip(ends, found.counts, strict=True)]


def test_each_row_drafts_from_its_own_tokens() -> None:
    made = speculator()
    assert drafted(made) == [[], [3, 1, 2, 3]]
    made.store(int32(2, 0), int32(5, 9))
    assert drafted(made) == [[6, 7, 5, 6], []]


def test_drafts_stay_within_the_room_of_a_row_and_of_the_step() -> None:
    made = speculator()
    assert drafted(made, most=2) == [[], [3, 1]]
    assert drafted(made, room=int32(9, 1)) == [[], [3]]
    assert drafted(made, room=int32(9, -3)) == [[], []]
    assert drafted(made, most=0) == [[], []]


def test_a_freed_slot_is_forgotten() -> None:
    made = speculator()
    made.apply(StepPlan(step=2, freed=int32(0, 1)), {})
    assert drafted(made) == [[], []]
    assert len(made.histories) == 1
    made.clear()
    assert len(made.histories) == 0


@pytest.mark.parametrize("name", ["Broken", "Leaving"])
def test_a_drafter_that_raises_costs_its_drafts_only(name: str, caplog: pytest.LogCaptureFixture) -> None:
    made = speculator(f"tests.model.speculation.test_speculator:{name}")
    assert drafted(made) == drafted(made) == [[], []]
    assert made.num_failures == 4
    assert len([record for record in caplog.records if "the drafter failed" in record.message]) == 1


def test_what_cannot_be_used_is_left_out() -> None:
    made = speculator("tests.model.speculation.test_speculator:Careless")
    assert drafted(made) == [[0, 1, 2, 3], [2, 3]]


def test_wrong_drafts_get_rare_and_right_ones_bring_them_back() -> None:
    history = History(int32(1), most=8)
    history.observe(8, 0, 8)
    assert (history.length, history.rest) == (1, 2)
    for _ in range(20):
        history.observe(1, 0, 8)
    assert history.rest == LONGEST_REST
    for _ in range(LONGEST_REST):
        history.push(1)
    assert history.rest == 0
    lengths = []
    for _ in range(4):
        history.observe(history.length, history.length, 8)
        lengths.append(history.length)
    assert lengths == [2, 4, 8, 8]
    history.observe(8, 3, 8)
    assert history.length == 4


def test_a_history_keeps_the_newest_tokens() -> None:
    history = History(np.arange(10, dtype=np.int32), most=4)
    for token in range(10, 3 * HISTORY_TOKENS):
        history.push(token)
    assert history.tokens.tolist() == list(range(2 * HISTORY_TOKENS, 3 * HISTORY_TOKENS))
    assert History(np.arange(9000, dtype=np.int32), most=4).tokens.tolist() == list(range(9000 - HISTORY_TOKENS, 9000))
