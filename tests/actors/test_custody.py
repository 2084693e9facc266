"""Which request do schedulers die of? The search alone, over lives of a scheduler that is not there."""

from __future__ import annotations

import random

import numpy as np
import pytest

from actorllm.actors.custody import Record, Trial, note_death
from actorllm.messages import OnTrial, Submit

SLOTS = 8


class Lives:
    """Requests by rid, all of one frontend; some kill the scheduler when it takes them on, or when they are in a step."""

    def __init__(self, num_requests: int, killers: set[int], is_in_step: bool) -> None:
        self.records = {rid: Record() for rid in range(num_requests)}
        self.killers = killers
        self.is_in_step = is_in_step
        self.num_deaths = 0
        self.num_losses = 0
        self.failed: set[int] = set()

    def live(self) -> bool:
        """One life. False: nobody died, and every request has had its tokens."""
        trial, told = Trial(), None
        for rid, record in sorted(self.records.items(), key=lambda item: -item[1].num_deaths):
            submit = Submit(
                rid=rid,
                arrival=0.0,
                prompt=np.ones(1, np.int32),
                max_tokens=1,
                num_deaths=record.num_deaths,
                most_beside=record.most_beside,
            )
            if not trial.holds((0, rid), submit) and self._takes_on([rid], is_last=False):
                return self._die(told)
        if not trial:
            return self._die(told) if self._runs(list(self.records)) else False
        while trial:
            group = [rid for (_, rid), _ in trial.next_group()]
            told = OnTrial(rids=np.array(group, np.int32), num_tried=trial.num_tried, is_alone=len(group) == 1)
            group = group or [rid for (_, rid), _ in trial.take_all()]
            if self._takes_on(group, is_last=True) or self._runs(group):
                return self._die(told)
            trial.on_step((0, rid) for rid in group)
        return False

    def _takes_on(self, rids: list[int], is_last: bool) -> bool:
        return not self.is_in_step and bool(self.killers.intersection(rids))

    def _runs(self, rids: list[int]) -> bool:
        """In steps of so many as there are slots."""
        for first in range(0, len(rids), SLOTS):
            step = rids[first : first + SLOTS]
            for rid in step:
                if self.num_deaths:  # those of the first life are not resumed
                    self.records[rid].is_begun = True
            if self.is_in_step and self.killers.intersection(step):
                return True
            for rid in step:
                self.records[rid].clear()
            self.num_losses = 0
        return False

    def _die(self, told: OnTrial | None) -> bool:
        self.num_deaths += 1
        note_death(self.records, told, is_second=self.num_losses > 0)
        self.num_losses += 1
        for rid in [rid for rid, record in self.records.items() if record.is_guilty]:
            self.failed.add(rid)
            del self.records[rid]
        return True


@pytest.mark.parametrize("is_in_step", [True, False])
@pytest.mark.parametrize("num_requests", [1, 2, 3, 8, 50, 1000])
def test_one_is_found_wherever_it_is(num_requests: int, is_in_step: bool) -> None:
    for killer in sorted({0, num_requests // 3, num_requests // 2, num_requests - 1}):
        lives = Lives(num_requests, {killer}, is_in_step)
        while lives.live():
            assert lives.num_deaths < 40
        assert lives.failed == {killer}
        num_suspects = min(num_requests, SLOTS) if is_in_step else num_requests
        assert lives.num_deaths <= 5 + np.log2(num_suspects)


@pytest.mark.parametrize("is_in_step", [True, False])
def test_several_are_found_and_nobody_else(is_in_step: bool) -> None:
    chance = random.Random(1)
    for _ in range(30):
        killers = set(chance.sample(range(40), 3))
        lives = Lives(40, killers, is_in_step)
        while lives.live():
            assert lives.num_deaths < 60
        assert lives.failed == killers


def test_accidents_are_nobodys_fault() -> None:
    """However often the scheduler is killed, as long as everybody gets his tokens in between."""
    lives = Lives(20, set(), is_in_step=True)
    for _ in range(20):
        assert not lives.live()
        lives._die(None)
    assert not any(record.num_deaths for record in lives.records.values())


def test_who_waits_is_not_on_trial_for_those_who_run() -> None:
    records = {rid: Record() for rid in range(3)}
    records[1].is_begun = True
    note_death(records, None, is_second=False)
    assert [record.num_deaths for record in records.values()] == [0, 1, 0]
    note_death(records, None, is_second=False)
    assert [record.num_deaths for record in records.values()] == [0, 1, 0], (
        "nobody was in a step, and others had tokens"
    )
    note_death(records, None, is_second=True)
    assert [record.num_deaths for record in records.values()] == [1, 2, 1]
