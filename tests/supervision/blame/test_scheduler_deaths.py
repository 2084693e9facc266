"""Which request do schedulers die of? The search alone, and real actors of several programs over many lives of a scheduler."""

from __future__ import annotations

import itertools
import random
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
from hypothesis import HealthCheck, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, precondition, rule, run_state_machine_as_test

from actorllm.actors import constraints, detokenization, frontend, scheduler
from actorllm.errors import RequestFailedError
from actorllm.messages import ProbeGroup, Submit
from actorllm.supervision.blame import scheduler_deaths, scheduler_probes
from actorllm.supervision.blame.scheduler_deaths import DeathRecord, SchedulerBisection, note_death
from actorllm.supervision.blame.scheduler_probes import SchedulerProbes
from actorllm.supervision.blame.worker_deaths import WorkerBisection
from tests.actors import deadly_policies
from tests.actors.deadly_policies import COMES, HAS_A_TOKEN, MOMENTS, SIBLING, STARTS, WAITS
from tests.actors.scripted_worker import DEADLY as KILLS_WORKERS
from tests.effort import examples
from tests.supervision.blame.lives import Caller, Killed, Lives

SLOTS = 8
GOOD = 6
"""A token that nobody dies of."""


class Search:
    """Requests by rid, all of one frontend; some kill the scheduler when it takes them on, or when they are in a step."""

    def __init__(self, num_requests: int, killers: set[int], is_in_step: bool, probes_alone: bool = False) -> None:
        self.probes_alone = probes_alone
        self.records = {rid: DeathRecord() for rid in range(num_requests)}
        self.killers = killers
        self.is_in_step = is_in_step
        self.num_deaths = 0
        self.num_losses = 0
        self.failed: set[int] = set()

    def live(self) -> bool:
        """One life. False: nobody died, and every request has had its tokens."""
        search, told = SchedulerBisection(probes_alone=self.probes_alone), None
        in_hand = 0
        for rid, record in sorted(self.records.items(), key=lambda item: -item[1].num_deaths):
            submit = Submit(
                rid=rid,
                arrival=0.0,
                prompt=np.ones(1, np.int32),
                max_tokens=1,
                num_deaths=record.num_deaths,
                probe_size=record.probe_size,
                num_losses=self.num_losses,
            )
            if record.num_deaths:
                search.begin()
            if search:
                search.hold((0, rid), submit)
            elif self._takes_on([rid], is_last=False):
                return self._die(told)
        if not search:
            return self._die(told) if self._runs(list(self.records)) else False
        isolated: list[tuple[Any, Submit]] = []
        while search:
            if search.isolates_next():  # what was cleared is held back again
                for key, submit in isolated:
                    search.hold(key, replace(submit, num_deaths=0, probe_size=0))
                in_hand -= len(isolated)
            taken = search.next_group()
            isolated = taken if search.is_isolated else []
            group = [rid for (_, rid), _ in taken]
            is_alone = len(group) == 1 and not (in_hand and self.probes_alone)
            told = ProbeGroup(rids=np.array(group, np.int32), size=search.group_size, is_alone=is_alone)
            group = group or [rid for (_, rid), _ in search.take_all()]
            in_hand += len(group)
            if self._takes_on(group, is_last=True) or self._runs(group):
                return self._die(told)
            search.on_step((0, rid) for rid in group)
        return False

    def _takes_on(self, rids: list[int], is_last: bool) -> bool:
        return not self.is_in_step and bool(self.killers.intersection(rids))

    def _runs(self, rids: list[int]) -> bool:
        """In steps of so many as there are slots."""
        for first in range(0, len(rids), SLOTS):
            step = rids[first : first + SLOTS]
            for rid in step:
                if self.num_deaths:  # those of the first life are not resumed
                    self.records[rid].begun.add(rid)
            if self.is_in_step and self.killers.intersection(step):
                return True
            for rid in step:
                self.records[rid].prove(rid, self.records)
            self.num_losses = 0
        return False

    def _die(self, told: ProbeGroup | None) -> bool:
        self.num_deaths += 1
        note_death(self.records, told, is_second=self.num_losses > 0, probes_alone=self.probes_alone)
        self.num_losses += 1
        for rid in [rid for rid, record in self.records.items() if record.is_blamed]:
            self.failed.add(rid)
            del self.records[rid]
        return True


@pytest.mark.parametrize("is_in_step", [True, False])
@pytest.mark.parametrize("num_requests", [1, 2, 3, 8, 50, 1000])
def test_one_is_found_wherever_it_is(num_requests: int, is_in_step: bool) -> None:
    for killer in sorted({0, num_requests // 3, num_requests // 2, num_requests - 1}):
        search = Search(num_requests, {killer}, is_in_step)
        while search.live():
            assert search.num_deaths < 40
        assert search.failed == {killer}
        num_suspects = min(num_requests, SLOTS) if is_in_step else num_requests
        assert search.num_deaths <= 5 + np.log2(num_suspects)


@pytest.mark.parametrize("is_in_step", [True, False])
def test_several_are_found_and_nobody_else(is_in_step: bool) -> None:
    chance = random.Random(1)
    for _ in range(30):
        killers = set(chance.sample(range(40), 3))
        search = Search(40, killers, is_in_step)
        while search.live():
            assert search.num_deaths < 60
        assert search.failed == killers


@pytest.mark.parametrize("is_in_step", [True, False])
@pytest.mark.parametrize(
    ("killers", "num_groups"),
    [({0}, 1), ({39}, 1), ({3, 17, 20}, 2), ({4, 7}, 1), (set(range(10, 18)), 3), (set(range(40)), 10)],
    ids=str,
)
def test_suspects_of_another_replica_cost_a_death_each_and_one_for_each_group(
    killers: set[int], num_groups: int, is_in_step: bool
) -> None:
    """Groups have four members first, and twice as many after each that is cleared."""
    search = Search(40, killers, is_in_step, probes_alone=True)
    for record in search.records.values():
        record.suspect()
    while search.live():
        assert search.num_deaths <= 2 * len(killers)
    assert search.failed == killers
    assert search.num_deaths == len(killers) + num_groups


def test_a_request_that_was_never_alone_is_not_blamed() -> None:
    """It may have been another one, which was cleared and ran beside it."""
    records = {1: DeathRecord(), 2: DeathRecord()}
    records[1].suspect()
    for _ in range(5):
        note_death(records, ProbeGroup(rids=np.array([1], np.int32), size=1, is_alone=False), is_second=True)
        assert not records[1].is_blamed
    note_death(records, ProbeGroup(rids=np.array([1], np.int32), size=1, is_alone=True), is_second=True)
    assert records[1].is_blamed


def test_accidents_are_nobodys_fault() -> None:
    """However often the scheduler is killed, as long as everybody gets his tokens in between."""
    search = Search(20, set(), is_in_step=True)
    for _ in range(20):
        assert not search.live()
        search._die(None)
    assert not any(record.num_deaths for record in search.records.values())


def test_who_waits_is_no_suspect_for_those_who_run() -> None:
    records = {rid: DeathRecord() for rid in range(3)}
    records[1].begun.add(1)
    note_death(records, None, is_second=False)
    assert [record.num_deaths for record in records.values()] == [0, 1, 0]
    note_death(records, None, is_second=False)
    assert [record.num_deaths for record in records.values()] == [0, 1, 0], (
        "nobody was in a step, and others had tokens"
    )
    note_death(records, None, is_second=True)
    assert [record.num_deaths for record in records.values()] == [1, 2, 1]


# Whole programs ---------------------------------------------------------------------------------------------------------


@pytest.fixture
def make_lives(monkeypatch: pytest.MonkeyPatch) -> Callable[..., Lives]:
    def die() -> None:
        raise Killed

    def make(*arguments: Any, **more: Any) -> Lives:
        lives = Lives(*arguments, **more)
        for module in (constraints, frontend, detokenization, scheduler, scheduler_probes):
            monkeypatch.setattr(module, "now", lives.clock)
        return lives

    monkeypatch.setattr(deadly_policies, "die", die)
    return make


def prompt_of(lives: Lives, token: int = GOOD) -> list[int]:
    return [5, token, 100 + len(lives.callers)]


def check_ends(lives: Lives) -> None:
    """Everything has ended as it should, and nothing is left of it."""
    assert not lives.is_dead
    for caller in lives.callers:
        caller.check()
        assert caller.is_over
        deadly = set(caller.prompt).intersection((*MOMENTS, KILLS_WORKERS))
        assert deadly or caller.error is None, caller.error
        if deadly and deadly != {WAITS} and caller.reason != "abort":
            assert isinstance(caller.error, RequestFailedError)
    scheduler = lives.scheduler
    assert scheduler.scheduler.is_idle
    assert not scheduler._probes.has_held
    assert not scheduler._probes.not_begun
    assert scheduler.scheduler._admission.num_held == 0
    assert not any(frontend._journal for frontend in lives.frontends if frontend is not None)


@pytest.mark.parametrize("moment", [COMES, STARTS, HAS_A_TOKEN])
@pytest.mark.parametrize("n", [1, 8])
def test_one_of_an_attached_program_is_found_beside_a_busy_owner(
    make_lives: Callable[..., Lives], moment: int, n: int
) -> None:
    """The owner's requests have tokens in every life; its sequences are one request."""
    lives = make_lives(2)
    for _ in range(6):
        lives.submit(0, prompt_of(lives), 100)
    for _ in range(5):
        lives.turn()
    lives.submit(1, prompt_of(lives, moment), 8, n)
    lives.rest()
    check_ends(lives)
    assert lives.num_deaths <= 6


@pytest.mark.parametrize("max_num_batched_tokens", [4, 16, 2048])
@pytest.mark.parametrize("n", [2, 3])
def test_a_sequence_that_kills_is_not_cleared_by_its_siblings(
    make_lives: Callable[..., Lives], n: int, max_num_batched_tokens: int
) -> None:
    """They have tokens in every life in which they are computed in steps before it: each life would be followed by another."""
    lives = make_lives(max_num_batched_tokens=max_num_batched_tokens)
    lives.submit(0, prompt_of(lives), 300)
    lives.submit(0, prompt_of(lives, SIBLING), 200, n)
    lives.rest()
    first, *_ = callers = lives.callers
    assert first.reason == "length"
    for caller in callers:
        caller.check()
    assert all(isinstance(caller.error, RequestFailedError) for caller in callers[1:])
    assert lives.num_deaths <= 6


@pytest.mark.parametrize("moment", [COMES, STARTS, HAS_A_TOKEN])
@pytest.mark.parametrize("num_deadly", [1, 2, 3, 5, 8, 12])
def test_as_many_as_this_are_found_without_a_token_of_anybody(
    make_lives: Callable[..., Lives], moment: int, num_deadly: int
) -> None:
    lives = make_lives()
    for _ in range(num_deadly):
        lives.submit(0, prompt_of(lives, moment))
    lives.rest()
    check_ends(lives)
    assert lives.num_deaths <= 2 + 2 * num_deadly + np.log2(num_deadly)


@pytest.mark.parametrize("moment", [COMES, STARTS, HAS_A_TOKEN])
def test_any_number_is_found_as_long_as_somebody_has_tokens(make_lives: Callable[..., Lives], moment: int) -> None:
    """Before it is too many deaths in a row, those go on that are not suspected."""
    lives = make_lives(2)
    lives.submit(0, prompt_of(lives), 200)
    for _ in range(5):
        lives.turn()
    for _ in range(12):
        lives.submit(1, prompt_of(lives, moment))
    lives.rest()
    check_ends(lives)
    assert lives.num_deaths <= 12 * 4


def test_a_scheduler_that_dies_of_everything_is_not_the_fault_of_requests(make_lives: Callable[..., Lives]) -> None:
    lives = make_lives(policy="Always")
    for _ in range(16):
        lives.submit(0, prompt_of(lives))
    lives.rest()
    assert lives.is_dead
    assert lives.num_deaths == 5
    assert not any(caller.is_over for caller in lives.callers), "they end with the engine, and none is accused"


def test_who_kills_while_it_waits_is_let_in_first(make_lives: Callable[..., Lives]) -> None:
    """Nobody dies of it then. Who is killed while nothing else is there, although that is of several sequences, fails."""
    lives = make_lives(2)
    for _ in range(8):
        lives.submit(0, prompt_of(lives), 300)
    lives.submit(0, prompt_of(lives, WAITS))
    lives.rest()
    check_ends(lives)
    assert lives.callers[-1].error is None
    assert lives.num_deaths <= 6
    num_before = lives.num_deaths
    lives.submit(1, prompt_of(lives, WAITS), 8, n=8)  # of which four start
    lives.submit(0, prompt_of(lives), 30)
    lives.rest()
    check_ends(lives)
    assert all(isinstance(caller.error, RequestFailedError) for caller in lives.callers[-9:-1])
    assert lives.num_deaths - num_before <= 5


def test_a_program_that_is_late_does_not_hold_up_the_others_for_long(make_lives: Callable[..., Lives]) -> None:
    lives = make_lives(2)
    (mine,), (other,) = (lives.submit(number, prompt_of(lives), 100) for number in (0, 1))
    for _ in range(2):
        lives.turn()
        lives.turn()
        lives.late_next = {1}
        lives.die()
    num_tokens = len(mine.tokens)
    for _ in range(3):
        lives.turn()
    assert len(mine.tokens) == num_tokens, "there may be suspects among what is not here yet"
    lives.now += 0.3
    for _ in range(3):
        lives.turn()
    assert len(mine.tokens) > num_tokens
    assert lives.late
    lives.catch_up()
    lives.rest()
    check_ends(lives)
    assert other.reason == "length"


def num_together(lives: Lives, suspects: list[Caller]) -> int:
    """Run to the end; how many of the suspects began in one step, at most."""
    rids = {caller.rid for caller in suspects}
    most = 0
    while not all(caller.is_over for caller in lives.callers):
        lives.turn()
        steps = lives.scheduler.scheduler.ledger.in_flight
        most = max(most, sum(one.key[1] in rids for step in steps for one, _ in step.prefills))
    return most


def test_of_several_groups_no_two_are_in_flight_together(make_lives: Callable[..., Lives]) -> None:
    """Though steps that were planned before a group was taken on end while it waits for the next plan."""
    lives = make_lives(is_replica=True, max_num_seqs=16)
    lives.submit(0, prompt_of(lives), 100)
    for _ in range(5):
        lives.turn()
    for _ in range(2):
        lives.scheduler.turn()  # as many steps are planned as may be in flight
    assert not lives.scheduler.scheduler.may_plan
    suspects = lives.adopt(0, [([5, GOOD, 200 + number], 8, 1) for number in range(8)])
    assert num_together(lives, suspects) == 4
    check_ends(lives)
    assert lives.num_deaths == 0


@pytest.mark.parametrize("stream_interval", [1, 3, 0])
@pytest.mark.parametrize("place", range(4))
def test_of_a_group_that_fails_each_is_probed_alone_in_one_life(
    make_lives: Callable[..., Lives], place: int, stream_interval: int
) -> None:
    """Those that are cleared wait, and go on behind what their callers have. So the second death decides."""
    lives = make_lives(is_replica=True, max_num_seqs=16)
    lives.stream_interval = stream_interval
    tokens = [STARTS if number == place else GOOD for number in range(4)]
    callers = lives.adopt(0, [([5, token, 200 + number], 20, 1) for number, token in enumerate(tokens)])
    lives.rest()
    check_ends(lives)
    assert lives.num_deaths == 2
    assert [isinstance(caller.error, RequestFailedError) for caller in callers] == [token == STARTS for token in tokens]


@pytest.mark.parametrize(("num_suspects", "num_steps"), [(4, 1), (16, 5), (32, 7), (60, 9)])
def test_suspects_that_kill_nothing_go_on_after_few_steps(
    make_lives: Callable[..., Lives], num_suspects: int, num_steps: int
) -> None:
    """Each group takes one, and between two groups one goes by that was planned already."""
    lives = make_lives(is_replica=True, max_num_seqs=64)
    lives.submit(0, prompt_of(lives), 100)
    for _ in range(5):
        lives.turn()
    first = lives.scheduler.scheduler.ledger.next_step
    callers = lives.adopt(0, [([5, GOOD, 200 + number], 40, 1) for number in range(num_suspects)])
    while not all(caller.tokens for caller in callers):
        lives.turn()
    assert lives.scheduler.scheduler.ledger.last_done - first + 1 <= num_steps
    lives.rest()
    check_ends(lives)


@pytest.mark.parametrize(
    "order", sorted(set(itertools.permutations([GOOD, GOOD, HAS_A_TOKEN, KILLS_WORKERS]))), ids=str
)
def test_one_that_kills_schedulers_and_one_that_kills_workers_cost_two_deaths_each_in_one_group(
    make_lives: Callable[..., Lives], order: tuple[int, ...]
) -> None:
    """The workers die of the group. What the scheduler has learnt of that ends with it, if the other one is alone first."""
    lives = make_lives(is_replica=True, max_num_seqs=16)
    callers = lives.adopt(0, [([5, token, 200 + number], 20, 1) for number, token in enumerate(order)])
    lives.rest()
    check_ends(lives)
    assert lives.num_deaths <= 4
    assert [isinstance(caller.error, RequestFailedError) for caller in callers] == [token != GOOD for token in order]


def with_one_free_slot(make_lives: Callable[..., Lives]) -> Lives:
    """A replica of four slots, three of which requests have for long."""
    lives = make_lives(is_replica=True, max_num_seqs=4)
    for _ in range(3):
        lives.submit(0, prompt_of(lives), 100)
    for _ in range(3):
        lives.turn()
    return lives


@pytest.mark.parametrize("place", [0, 3, 7])
@pytest.mark.parametrize("moment", [STARTS, HAS_A_TOKEN, KILLS_WORKERS])
def test_one_that_waits_for_a_slot_while_others_are_probed_costs_two_deaths(
    make_lives: Callable[..., Lives], moment: int, place: int
) -> None:
    """Beside later groups, and when the search is over."""
    lives = with_one_free_slot(make_lives)
    tokens = [moment if number == place else GOOD for number in range(8)]
    lives.adopt(0, [([5, token, 200 + number], 12, 1) for number, token in enumerate(tokens)])
    lives.rest()
    check_ends(lives)
    assert lives.num_deaths == 2


@pytest.mark.parametrize("num_turns", [2, 6, 12])
@pytest.mark.parametrize("moment", [STARTS, HAS_A_TOKEN])
def test_one_that_waits_for_a_slot_while_other_suspects_come_costs_two_deaths(
    make_lives: Callable[..., Lives], moment: int, num_turns: int
) -> None:
    """The search for which it was named is over, and that for the others names them alone."""
    lives = with_one_free_slot(make_lives)
    lives.adopt(0, [([5, moment if number == 3 else GOOD, 200 + number], 12, 1) for number in range(4)])
    for _ in range(num_turns):
        lives.turn()
    lives.adopt(0, [([5, GOOD, 300], 12, 1)])
    lives.rest()
    check_ends(lives)
    assert lives.num_deaths == 2


@pytest.mark.parametrize("is_replica", [True, False])
def test_a_scheduler_that_is_killed_before_there_are_workers_blames_no_request(
    make_lives: Callable[..., Lives], is_replica: bool
) -> None:
    """However often: a request is taken on when it can be computed, and not seconds before."""
    lives = make_lives(is_replica=is_replica, max_num_seqs=16)
    callers = lives.adopt(0, [([5, GOOD, 200], 8, 1)])
    for _ in range(4):
        lives.scheduler.has_workers = False
        for _ in range(3):
            lives.turn()
        lives.die()
    lives.rest()
    check_ends(lives)
    assert callers[0].reason == "length"


class Programs(RuleBasedStateMachine):
    """Several programs, some of whose requests are deadly. The owner has one that is not, most of the time."""

    def __init__(self, make: Callable[..., Lives]) -> None:
        super().__init__()
        self.make = make
        self.num_deadly = self.num_accidents = 0
        self.gone: list[Caller] = []

    @initialize(num_frontends=st.integers(1, 3), is_busy=st.booleans())
    def begin(self, num_frontends: int, is_busy: bool) -> None:
        self.lives = self.make(num_frontends)
        self.is_busy = is_busy
        if is_busy:
            self.lives.submit(0, prompt_of(self.lives), 150)
            for _ in range(4):
                self.lives.turn()

    def _number(self, choice: int) -> int:
        alive = [number for number, frontend in enumerate(self.lives.frontends) if frontend is not None]
        return alive[choice % len(alive)]

    @rule(choice=st.integers(0, 9), max_tokens=st.integers(1, 40), n=st.sampled_from([1, 1, 2, 5]))
    def submit(self, choice: int, max_tokens: int, n: int) -> None:
        self.lives.submit(self._number(choice), prompt_of(self.lives), max_tokens, n)

    @precondition(lambda self: self.num_deadly < 8)
    @rule(choice=st.integers(0, 9), moment=st.sampled_from(MOMENTS), n=st.sampled_from([1, 1, 3]))
    def submit_deadly(self, choice: int, moment: int, n: int) -> None:
        self.num_deadly += n  # each of its sequences kills by itself, and is found by itself
        self.lives.submit(self._number(choice), prompt_of(self.lives, moment), 8, n)

    @rule(count=st.integers(1, 8))
    def turns(self, count: int) -> None:
        for _ in range(count):
            self.lives.turn()

    @rule(choice=st.integers(0, 99))
    def abort(self, choice: int) -> None:
        frontend = self.lives.frontends[self._number(choice)]
        assert frontend is not None
        rids = list(frontend._journal)
        if rids and not (self.is_busy and frontend is self.lives.frontends[0]):
            frontend.abort(rids[choice % len(rids)])

    @precondition(lambda self: self.num_accidents == 0)
    @rule()
    def accident(self) -> None:
        self.num_accidents += 1
        self.lives.die()

    @rule(choice=st.integers(0, 9))
    def be_late(self, choice: int) -> None:
        self.lives.late_next = {self._number(choice)}

    @rule()
    def catch_up(self) -> None:
        self.lives.catch_up()

    @rule(seconds=st.sampled_from([0.1, 0.3, 1.0]))
    def pass_time(self, seconds: float) -> None:
        self.lives.now += seconds

    @precondition(lambda self: len(self.lives.frontends) < 5)
    @rule()
    def join(self) -> None:
        self.lives.join()

    @rule(choice=st.integers(0, 9))
    def leave(self, choice: int) -> None:
        number = self._number(choice)
        if number:
            frontend = self.lives.frontends[number]
            assert frontend is not None
            mine = [entry.consumer for entry in frontend._journal.values()]
            self.lives.leave(number)
            self.lives.callers = [caller for caller in self.lives.callers if caller not in mine]

    def teardown(self) -> None:
        if not hasattr(self, "lives"):
            return
        self.lives.rest()
        check_ends(self.lives)
        num_requests = len(self.lives.callers) + 1
        most = 4 + self.num_accidents + self.num_deadly * (5 + np.log2(num_requests))
        assert self.lives.num_deaths <= (most if self.num_deadly else 1)


class Trial(RuleBasedStateMachine):
    """A replica that takes what others may have died of, besides requests of its own. Nothing kills it but requests.

    It may have fewer slots than there are suspects, so that some wait while others are probed.
    """

    def __init__(self, make: Callable[..., Lives]) -> None:
        super().__init__()
        self.make = make
        self.num_deadly = self.num_new = 0

    @initialize(num_frontends=st.integers(1, 2), num_own=st.integers(0, 3), num_slots=st.sampled_from([3, 5, 64]))
    def begin(self, num_frontends: int, num_own: int, num_slots: int) -> None:
        self.lives = self.make(num_frontends, is_replica=True, max_num_seqs=num_slots)
        for _ in range(num_own):
            self.lives.submit(0, prompt_of(self.lives), 100)
        for _ in range(3):
            self.lives.turn()

    @precondition(lambda self: self.num_deadly < 8)
    @rule(
        choice=st.integers(0, 9),
        kinds=st.lists(
            st.tuples(st.sampled_from([GOOD, STARTS, COMES, HAS_A_TOKEN, KILLS_WORKERS]), st.sampled_from([1, 1, 2])),
            min_size=2,
            max_size=20,
        ),
    )
    def adopt(self, choice: int, kinds: list[tuple[int, int]]) -> None:
        number = choice % len(self.lives.frontends)
        prompts = [[5, token, 100 + len(self.lives.callers) + at] for at, (token, _) in enumerate(kinds)]
        self.num_deadly += sum(token != GOOD for token, _ in kinds)
        self.lives.adopt(number, [(prompt, 8, n) for prompt, (_, n) in zip(prompts, kinds, strict=False)])

    @precondition(lambda self: self.num_new < 10)
    @rule(choice=st.integers(0, 9), max_tokens=st.integers(1, 40))
    def submit(self, choice: int, max_tokens: int) -> None:
        self.num_new += 1
        self.lives.submit(choice % len(self.lives.frontends), prompt_of(self.lives), max_tokens)

    @rule(count=st.integers(1, 8))
    def turns(self, count: int) -> None:
        for _ in range(count):
            self.lives.turn()

    @rule(choice=st.integers(0, 9), which=st.integers(0, 99))
    def abort(self, choice: int, which: int) -> None:
        frontend = self.lives.frontends[choice % len(self.lives.frontends)]
        assert frontend is not None
        if rids := list(frontend._journal):
            frontend.abort(rids[which % len(rids)])

    def teardown(self) -> None:
        if hasattr(self, "lives"):
            self.lives.rest()
            check_ends(self.lives)
            assert self.lives.num_deaths <= 2 * self.num_deadly, "two deaths for each that is deadly"


@pytest.mark.timeout(300)
def test_a_replica_of_trials_dies_twice_for_each_deadly_request_at_most(make_lives: Callable[..., Lives]) -> None:
    run_state_machine_as_test(
        lambda: Trial(make_lives),
        settings=settings(
            max_examples=examples(10, 400),
            stateful_step_count=8,
            deadline=None,
            suppress_health_check=[HealthCheck.function_scoped_fixture, HealthCheck.too_slow],
        ),
    )


def walk(make: Callable[..., Lives], num_walks: int) -> None:
    """Trials whose rules are drawn here: a planted mistake is found much sooner than by a search for the smallest example."""
    for seed in range(num_walks):
        chance = random.Random(seed)
        trial = Trial(make)
        Trial.begin(trial, 1 + seed % 2, chance.randrange(3), chance.choice([3, 64]))
        for _ in range(2):
            kinds = [(chance.choice([*[GOOD] * 6, STARTS, HAS_A_TOKEN, KILLS_WORKERS]), 1) for _ in range(8)]
            Trial.adopt(trial, chance.randrange(9), kinds)
            Trial.turns(trial, chance.randrange(9))
        trial.teardown()


def corners(make: Callable[..., Lives], _: int) -> None:
    """Groups of one poison request among eight, and of two that kill different processes."""
    for tokens in ([*[GOOD] * 7, STARTS, *[GOOD] * 4], [HAS_A_TOKEN, KILLS_WORKERS, GOOD, GOOD]):
        lives = make(is_replica=True, max_num_seqs=16)
        lives.adopt(0, [([5, token, 200 + number], 8, 1) for number, token in enumerate(tokens)])
        lives.rest()
        check_ends(lives)
        assert lives.num_deaths <= 2 * sum(token != GOOD for token in tokens)


def keep_running(probes: Any) -> bool:
    """Those that were cleared run on beside the next one."""
    return True


def hold_back_too_much(probes: Any) -> bool:
    """A token is lost: what is held back goes on behind more than was sent."""
    for key, message in probes._isolated:
        sequence = probes._scheduler.sequence(key)
        if sequence is not None:
            output = np.append(probes._scheduler.output_of(sequence), np.int32(GOOD))
            probes._scheduler.abort([key], 0.0)
            probes._scheduler.hold(key[0], message)
            probes.hold(key, scheduler_probes._cleared(message, output, None))
    probes._isolated = []
    return True


def count_only_small_groups(records: Any, probe: Any, is_second: bool, probes_alone: bool = False) -> None:
    note_death(records, probe, is_second, probes_alone and probe is not None and probe.size <= 4)


def count_only_single(records: Any, probe: Any, is_second: bool, probes_alone: bool = False) -> None:
    note_death(records, probe, is_second, probes_alone=False)


_tell = SchedulerProbes._tell


def forget_those_that_wait(probes: Any, keys: Any) -> None:
    """Only new members are named, and not those that have been taken on before."""
    _tell(probes, [key for key in keys if probes._scheduler.sequence(key) is None])


_died = WorkerBisection.died


def forget_deaths_of_schedulers(
    search: Any, in_flight: Any, waiting: Any = (), num_gone: int = 0, probed: Any = (), counted: Any = ()
) -> Any:
    return _died(search, in_flight, waiting, num_gone, probed)


def count_everything(records: Any, probe: Any, is_second: bool, probes_alone: bool = False) -> None:
    """Also what ran beside the group."""
    note_death(records, probe, is_second, probes_alone)
    for record in records.values():
        record.fail(1, True)
        record.was_alone = record.was_alone or record.num_deaths > 0


@pytest.mark.parametrize(
    ("check", "place", "mistake"),
    [
        (walk, (SchedulerProbes, "_is_alone_again"), keep_running),
        (walk, (SchedulerProbes, "_is_alone_again"), hold_back_too_much),
        (walk, (frontend, "note_death"), count_only_single),
        (corners, (frontend, "note_death"), count_only_small_groups),
        (walk, (SchedulerProbes, "_tell"), forget_those_that_wait),
        (corners, (WorkerBisection, "died"), forget_deaths_of_schedulers),
        (walk, (frontend, "note_death"), count_everything),
        (walk, (scheduler_deaths.HeldRequest, "is_counted"), False),
    ],
    ids=[
        "runs on",
        "loses a token",
        "counts single ones",
        "counts groups of four",
        "forgets who waits",
        "forgets deaths of schedulers",
        "counts everything",
        "groups again",
    ],
)
def test_a_mistake_in_a_trial_is_noticed(
    make_lives: Callable[..., Lives], monkeypatch: pytest.MonkeyPatch, check: Any, place: tuple[Any, str], mistake: Any
) -> None:
    monkeypatch.setattr(*place, mistake)
    with pytest.raises(AssertionError):
        check(make_lives, 30)


def test_walks_find_nothing(make_lives: Callable[..., Lives]) -> None:
    walk(make_lives, 5)
    corners(make_lives, 1)


@pytest.mark.timeout(300)
def test_whatever_programs_do_only_the_deadly_fail(make_lives: Callable[..., Lives]) -> None:
    run_state_machine_as_test(
        lambda: Programs(make_lives),
        settings=settings(
            max_examples=examples(5, 200),
            stateful_step_count=25,
            deadline=None,
            suppress_health_check=[HealthCheck.function_scoped_fixture, HealthCheck.too_slow],
        ),
    )
