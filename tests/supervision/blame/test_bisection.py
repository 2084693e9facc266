"""The bisection alone: any poison requests among any others are found, and mistakes in it would be noticed."""

from __future__ import annotations

import random
from collections.abc import Collection, Iterable
from typing import Any

import pytest
from hypothesis import HealthCheck, Phase, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, precondition, rule, run_state_machine_as_test

from actorllm.supervision.blame import worker_deaths
from actorllm.supervision.blame.bisection import FIRST_GROUP, Bisection, grown
from actorllm.supervision.blame.worker_deaths import WorkerBisection

Kind = type[Bisection[Any]]


class Steps:
    """A unit is a step: it ends with its result. The search begins with the first failure, as in `StepFailures`."""

    outlives_units = False
    num_accidents = 0
    """Failures that no request is to blame for, and that may not make one fail."""
    num_more = 1
    """Failures of each poison request at most, besides log2(n): the one that it is blamed for."""

    def __init__(self, kind: Kind) -> None:
        self.search = kind(max_alone=1)

    @property
    def is_searching(self) -> bool:
        return bool(self.search)

    def may_run(self, request: int) -> bool:
        return not self.search or request in self.search.group

    def fail(self, present: Collection[int], waiting: Collection[int], num_gone: int) -> list[int]:
        if not present:
            return []
        self.search.add(present)
        blamed = self.search.fail(present, len(present) == 1 and not num_gone)
        self.search.begin()
        return blamed

    def succeed(self, requests: Iterable[int]) -> None:
        self.search.clear(requests)

    def end(self, requests: Iterable[int]) -> None:
        self.search.clear(requests)


class Lives:
    """A unit is a life of the workers: requests that are cleared run on, beside the next group."""

    outlives_units = True
    num_accidents = 1
    num_more = 5  # the first one, one more alone, and some beside requests that were cleared

    def __init__(self, kind: Kind) -> None:
        self.search: Any = WorkerBisection()
        self.search._bisection = kind(worker_deaths.MAX_ALONE)

    @property
    def is_searching(self) -> bool:
        return bool(self.search)

    def may_run(self, request: int) -> bool:
        return bool(self.search.may_start(request))

    def fail(self, present: Collection[int], waiting: Collection[int], num_gone: int) -> list[int]:
        return list(self.search.died(present, waiting, num_gone))

    def succeed(self, requests: Iterable[int]) -> None:
        self.search.had_token(requests)

    def end(self, requests: Iterable[int]) -> None:
        self.search.clear(requests)


class Trials(Lives):
    """As Lives, of one of several replicas: the first requests are suspects of another one, and come in small groups."""

    num_accidents = 0

    def __init__(self, kind: Kind) -> None:
        self.search = WorkerBisection(probes_alone=True)
        self.search._bisection = kind(worker_deaths.MAX_ALONE, first_group=FIRST_GROUP)
        self.suspects: dict[int, None] = {}
        """Of another replica; those that the scheduler has not taken on yet, and its probe group."""
        self.next_size = FIRST_GROUP
        self.group: dict[int, None] = {}

    @property
    def is_searching(self) -> bool:
        return bool(self.search) or bool(self.suspects)

    def suspect(self, requests: Iterable[int]) -> None:
        self.suspects = dict.fromkeys(requests)
        self._next_group()

    def _next_group(self) -> None:
        """Beside those of the last one that have waited for a slot."""
        left = [request for request in self.suspects if request not in self.group]
        if not self.search and left:
            self.group |= dict.fromkeys(left[: self.next_size])
            self.next_size = grown(self.next_size)

    def may_run(self, request: int) -> bool:
        return (request not in self.suspects or request in self.group) and super().may_run(request)

    def fail(self, present: Collection[int], waiting: Collection[int], num_gone: int) -> list[int]:
        probed = [request for request in present if request in self.group]
        # Suspects whose group has not come are held by the scheduler, and do not wait for the workers.
        taken_on = [request for request in waiting if request not in self.suspects or request in self.group]
        blamed = list(self.search.died(present, taken_on, num_gone, probed))
        self.next_size = FIRST_GROUP
        self._forget(blamed)
        if not self.group:
            self._next_group()
        return blamed

    def set_aside(self, running: Iterable[int]) -> list[int]:
        isolated = self.search.isolated
        return [] if isolated is None else [request for request in running if request != isolated]

    def succeed(self, requests: Iterable[int]) -> None:
        super().succeed(requests)
        self._forget(requests)
        self._next_group()

    def end(self, requests: Iterable[int]) -> None:
        super().end(requests)
        self._forget(requests)
        if not self.group:
            self._next_group()

    def _forget(self, requests: Iterable[int]) -> None:
        for request in requests:
            self.suspects.pop(request, None)
            self.group.pop(request, None)


class LetsThemRunOn(Trials):
    """What was cleared runs beside a request that is to be alone."""

    def set_aside(self, running: Iterable[int]) -> list[int]:
        return []


class Requests(RuleBasedStateMachine):
    """Requests that arrive, run in units, and end. A unit with a poison request fails."""

    def __init__(self, unit: type[Steps | Lives], kind: Kind) -> None:
        super().__init__()
        self.unit = unit(kind)
        self.num_suspected_poison = 0
        self.num_requests = self.num_poison = self.num_failures = self.num_ended = 0
        self.num_accidents = self.unit.num_accidents
        self.alive: dict[int, None] = {}
        self.running: dict[int, None] = {}
        self.poison: set[int] = set()
        """Those that are alive."""

    @initialize(number=st.integers(1, 40), poison=st.sets(st.integers(0, 39), max_size=5))
    def begin(self, number: int, poison: set[int]) -> None:
        for index in range(number):
            self.arrive(index in poison)
        if isinstance(self.unit, Trials):
            self.unit.suspect(self.alive)
            self.num_suspected_poison = self.num_poison

    @rule(is_poison=st.booleans())
    def arrive(self, is_poison: bool) -> None:
        self.alive[self.num_requests] = None
        if is_poison:
            self.poison.add(self.num_requests)
            self.num_poison += 1
        self.num_requests += 1

    @precondition(lambda self: self.alive)
    @rule(choice=st.integers(0, 99))
    def abort(self, choice: int) -> None:
        self._end([list(self.alive)[choice % len(self.alive)]])

    @rule(seed=st.integers(0, 999), is_full=st.booleans(), num_gone=st.sampled_from([0, 0, 1, 2]))
    def run_unit(self, seed: int, is_full: bool, num_gone: int) -> None:
        """One unit, of all requests that may start or of some. Some of its requests end before its result is there."""
        startable = [request for request in self.alive if self.unit.may_run(request)]
        if not self.unit.outlives_units:
            self.running.clear()
        if not startable and not self.running:
            assert not self.alive, "no request may run"
            return
        chance = random.Random(seed)
        if startable:
            number = len(startable) if is_full else chance.randint(1, len(startable))
            self.running |= dict.fromkeys(chance.sample(startable, number))
        fails = bool(self.poison.intersection(self.running))
        likely = sorted(chance.sample([*self.running], len(self.running)), key=lambda one: one not in self.poison)
        gone = likely[:num_gone]  # the poison requests first: a failure says nothing of the others then
        self._end(gone)
        if fails:
            self._fail(len(gone))
        else:
            self.unit.succeed([*self.running])
            if isinstance(self.unit, Trials):
                for request in self.unit.set_aside([*self.running]):
                    del self.running[request]

    @precondition(lambda self: self.num_accidents and self.running)
    @rule()
    def have_an_accident(self) -> None:
        self.num_accidents -= 1
        self._fail(0)

    def _fail(self, num_gone: int) -> None:
        self.num_failures += 1
        blamed = self.unit.fail([*self.running], [*self.alive], num_gone)
        assert self.poison.issuperset(blamed), "a request is blamed that is no poison"
        self.running.clear()
        for request in blamed:
            del self.alive[request]
            self.poison.remove(request)

    def _end(self, requests: Collection[int]) -> None:
        self.unit.end(requests)
        for request in requests:
            self.num_ended += 1
            del self.alive[request]
            self.running.pop(request, None)
            self.poison.discard(request)

    @property
    def most(self) -> int:
        """Failures that there may be."""
        if isinstance(self.unit, Trials):  # of what comes later, the first failure makes suspects
            return 2 * self.num_suspected_poison + 3 * (self.num_poison - self.num_suspected_poison) + self.num_ended
        per_request = max(1, self.num_requests).bit_length() - 1 + self.unit.num_more
        return self.num_poison * per_request + self.num_ended + self.unit.num_accidents - self.num_accidents

    def teardown(self) -> None:
        for _ in range(20 + 10 * self.num_requests):
            if not self.poison and not self.unit.is_searching:
                break
            self.run_unit(0, is_full=True, num_gone=0)
            assert self.num_failures <= self.most, "too many failures"
        else:
            raise AssertionError("the search does not end")
        assert all(self.unit.may_run(request) for request in self.alive), "every other request is cleared"


def check(unit: type[Steps | Lives], kind: Kind, max_examples: int, phases: Iterable[Phase] = tuple(Phase)) -> None:
    run_state_machine_as_test(
        lambda: Requests(unit, kind),
        settings=settings(
            max_examples=max_examples,
            stateful_step_count=30,
            deadline=None,
            derandomize=len(tuple(phases)) == 1,
            database=None,
            report_multiple_bugs=False,
            phases=phases,
            suppress_health_check=[HealthCheck.too_slow],
        ),
    )


@pytest.mark.parametrize("unit", [Steps, Lives, Trials])
def test_exactly_the_poison_requests_are_found(unit: type[Steps | Lives]) -> None:
    check(unit, Bisection, 150)


class ClearsTheFailedHalf(Bisection[int]):
    def fail(self, members: Collection[int], is_alone: bool) -> list[int]:
        was_probing = self.is_probing
        blamed = super().fail(members, is_alone)
        if was_probing:
            self.clear(members)
        return blamed


class NeverTriesTheLastOneAgain(Bisection[int]):
    """The last suspect must be the one, it thinks; but the poison request may have ended."""

    def fail(self, members: Collection[int], is_alone: bool) -> list[int]:
        return super().fail(members, is_alone or len(self) == 1)


class IgnoresWhatRunsBeside(Bisection[int]):
    def fail(self, members: Collection[int], is_alone: bool) -> list[int]:
        return super().fail(members, len(members) == 1)


class BlamesAtTheFirstDeath(Bisection[int]):
    def __init__(self, max_alone: int, *, first_group: int | None = None) -> None:
        super().__init__(1, first_group=first_group)


class CountsSingleFailures(Bisection[int]):
    def fail(self, members: Collection[int], is_alone: bool) -> list[int]:
        return super().fail(members, is_alone and len(members) == 1)


class CountsSmallGroups(Bisection[int]):
    def fail(self, members: Collection[int], is_alone: bool) -> list[int]:
        return super().fail(members, is_alone and len(members) <= FIRST_GROUP)


class ProbesOthersFirst(Bisection[int]):
    """Before those whose group has failed."""

    def _next_group(self) -> dict[int, None]:
        fresh = [one for one, suspicion in self._suspects.items() if not suspicion.num_alone]
        return dict.fromkeys(fresh[:4]) or super()._next_group()


class NeverMakesGroupsSmaller(Bisection[int]):
    def _next_group(self) -> dict[int, None]:
        return dict.fromkeys(self._suspects)


class TakesOneAtATime(Bisection[int]):
    """It ends, but after as many failures as there are requests."""

    def _next_group(self) -> dict[int, None]:
        return dict.fromkeys([*self._suspects][: max(1, len(self) - 1)])


class NeverMovesOn(Bisection[int]):
    def clear(self, requests: Iterable[int]) -> None:
        for request in requests:
            self._suspects.pop(request, None)
            self.group.pop(request, None)


MISTAKES = {
    Steps: (
        ClearsTheFailedHalf,
        NeverTriesTheLastOneAgain,
        IgnoresWhatRunsBeside,
        NeverMakesGroupsSmaller,
        TakesOneAtATime,
        NeverMovesOn,
    ),
    Lives: (ClearsTheFailedHalf, BlamesAtTheFirstDeath, NeverMakesGroupsSmaller, NeverMovesOn),
    Trials: (
        ClearsTheFailedHalf,
        BlamesAtTheFirstDeath,
        CountsSingleFailures,
        CountsSmallGroups,
        NeverMakesGroupsSmaller,
        ProbesOthersFirst,
        NeverMovesOn,
    ),
    LetsThemRunOn: (Bisection,),
}


@pytest.mark.parametrize(
    ("unit", "kind"), [(unit, kind) for unit, kinds in MISTAKES.items() for kind in kinds], ids=lambda of: of.__name__
)
def test_a_mistake_is_noticed(unit: type[Steps | Lives], kind: Kind) -> None:
    with pytest.raises(AssertionError):
        check(unit, kind, 1000, (Phase.generate,))
