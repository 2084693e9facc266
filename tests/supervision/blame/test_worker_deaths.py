"""Who is tried for the death of the workers, who is acquitted, and how many deaths it takes."""

from __future__ import annotations

from typing import Any

import pytest

from actorllm.supervision.blame.worker_deaths import WorkerBisection


class Court:
    """Requests that run as the quarantine allows, some of which kill the workers whenever they are in a step."""

    def __init__(self, num_requests: int, *guilty: int, probes_alone: bool = False) -> None:
        self.quarantine = WorkerBisection(probes_alone=probes_alone)
        self.alive: list[Any] = list(range(num_requests))
        self.guilty = set(guilty)
        self.failed: list[int] = []
        self.running: list[Any] = []
        self.num_deaths = 0
        self.most_in_a_row = 0
        self.num_standing_still = self.most_standing_still = 0
        self.alone_deaths = dict.fromkeys(guilty, 0)
        self.num_steps_waited = dict.fromkeys(self.alive, 0)

    def step(self) -> bool:
        """True: it went well. Everybody who may run is in it."""
        self.running += [r for r in self.alive if self.quarantine.may_start(r) and r not in self.running]
        running = self.running
        assert running, "somebody may run"
        for request in set(self.alive) - set(running):
            self.num_steps_waited[request] += 1
        if self.guilty & set(running):
            self.num_deaths += 1
            if len(running) == 1:
                self.alone_deaths[running[0]] += 1
            for found in self.quarantine.died(running, self.alive):
                self.failed.append(found)
                self.alive.remove(found)
            self.num_standing_still = 0 if self.quarantine.is_narrowing else self.num_standing_still + 1
            self.most_standing_still = max(self.most_standing_still, self.num_standing_still)
            self.running = []
            return False
        self.quarantine.had_token(running)
        if self.quarantine.isolated is not None:  # the others give their slots up
            self.running = [request for request in running if request == self.quarantine.isolated]
        self.num_standing_still = 0
        return True

    def run(self) -> None:
        in_a_row = 0
        for _ in range(200):
            if not self.alive or (not self.quarantine and not self.guilty & set(self.alive)):
                return
            in_a_row = 0 if self.step() else in_a_row + 1
            self.most_in_a_row = max(self.most_in_a_row, in_a_row)
        raise AssertionError("it does not come to an end")


@pytest.mark.parametrize("num_requests", [2, 3, 8, 32, 256])
def test_one_guilty_is_found_wherever_it_is(num_requests: int) -> None:
    for guilty in {0, 1, num_requests // 2, num_requests - 1}:
        court = Court(num_requests, guilty)
        court.run()
        assert court.failed == [guilty]
        assert court.alone_deaths == {guilty: 2}, "twice alone before it fails"
        assert court.num_deaths <= 2 + 2 * num_requests.bit_length()
        assert court.most_in_a_row < 5, "the engine would end"
        assert not court.quarantine


def test_a_suspect_of_another_replica_costs_two_deaths() -> None:
    """The first beside requests that were cleared, the second alone."""
    court = Court(8, 5)
    court.quarantine.died(court.alive, court.alive, probed=[5])
    court.run()
    assert court.failed == [5]
    assert court.num_deaths == 1, "beside the first one"


@pytest.mark.parametrize(
    ("guilty", "num_groups"),
    [((0,), 1), ((7,), 1), ((3, 4), 2), ((0, 5, 15), 3), ((8, 9, 10, 11), 1), (tuple(range(16)), 4)],
    ids=str,
)
def test_among_several_replicas_only_guilty_ones_cost_deaths(guilty: tuple[int, ...], num_groups: int) -> None:
    """One each, one for each group that has some, and the one with which the search begins."""
    court = Court(16, *guilty, probes_alone=True)
    court.run()
    assert sorted(court.failed) == sorted(guilty)
    assert court.num_deaths == 1 + num_groups + len(guilty)
    assert court.num_deaths <= 1 + 2 * len(guilty)
    assert court.most_standing_still == 0


def test_among_several_replicas_groups_that_are_cleared_get_larger() -> None:
    court = Court(64, probes_alone=True)
    court.quarantine.died(court.alive, court.alive)
    sizes = []
    while court.quarantine:
        suspects = [r for r in court.alive if court.quarantine.may_start(r) and r not in court.running]
        sizes.append(len(suspects))
        court.step()
    assert sizes == [4, 8, 16, 32, 4]


def test_after_a_death_groups_are_small_again() -> None:
    court = Court(64, 20, probes_alone=True)
    court.quarantine.died(court.alive, court.alive)
    for _ in range(3):
        court.step()
    assert court.quarantine.isolated is not None
    while court.quarantine.isolated is not None:
        court.step()
    assert court.failed == [20]
    assert len([r for r in court.alive if court.quarantine.may_start(r) and r in court.quarantine._bisection]) == 4


def test_a_death_of_a_scheduler_counts_and_one_of_the_workers_decides() -> None:
    """Of a request that runs alone. Beside another one it does not."""
    quarantine: Any = WorkerBisection(probes_alone=True)
    assert quarantine.died("a", probed="a", counted="a") == ["a"]
    assert not quarantine
    assert quarantine.died("ab", probed="ab", counted="ab") == []
    assert quarantine.died("a", num_gone=1, probed="a", counted="a") == []


def test_among_several_replicas_two_accidents_blame_nobody_that_lives() -> None:
    quarantine: Any = WorkerBisection(probes_alone=True)
    quarantine.died("abcdef")
    quarantine.had_token("abcd")  # which run beside the next group from here on
    assert quarantine.may_start("e")
    assert quarantine.died("abcdef", "abcdef") == []
    for one in "ef":
        assert quarantine.isolated == one
        assert [other for other in "abcdef" if quarantine.may_start(other)] == [one], "one death more decides"
        quarantine.had_token([one])
    assert quarantine.isolated is None
    assert not quarantine


def test_among_several_replicas_a_death_beside_others_does_not_decide() -> None:
    """Not even the second one: what was in a step in flight and has ended may have been the cause."""
    quarantine: Any = WorkerBisection(probes_alone=True)
    quarantine.died("ab")
    quarantine.died("ab", "ab")
    assert quarantine.died("a", "ab", num_gone=1) == []
    assert quarantine.isolated in ("a", "b"), "each is probed once more"
    assert quarantine.died([quarantine.isolated], "ab") != []


def test_a_probed_request_that_lives_is_acquitted() -> None:
    court = Court(8, 2)
    court.quarantine.died(court.alive, court.alive, probed=[5])
    court.run()
    assert court.failed == [2]


def test_several_guilty_among_many() -> None:
    for guilty in ((3, 40), (0, 1), (5, 60, 61), tuple(range(8)), (63, 62, 7, 31, 32)):
        court = Court(64, *guilty)
        court.run()
        assert sorted(court.failed) == sorted(guilty)
        assert set(court.alone_deaths.values()) == {2}
        assert court.most_in_a_row < 5


@pytest.mark.parametrize("num_guilty", [1, 5, 8, 12, 64])
def test_any_number_is_found_where_there_is_nobody_else(num_guilty: int) -> None:
    """All but the first death make the search narrower: that is what the engine goes on for."""
    court = Court(num_guilty, *range(num_guilty))
    court.run()
    assert sorted(court.failed) == list(range(num_guilty))
    assert set(court.alone_deaths.values()) == {2}
    assert court.num_deaths <= 2 + 2 * num_guilty + num_guilty.bit_length()
    assert court.most_standing_still == 1


def test_those_that_keep_coming_do_not_stop_the_search() -> None:
    """After every death one more that kills: it is tried before the suspects are, and every other death is one of them."""
    court = Court(4, *range(4))
    for number in range(4, 40):
        court.step()
        court.alive.append(number)
        court.guilty.add(number)
        court.alone_deaths[number] = 0
        court.num_steps_waited[number] = 0
    court.run()
    assert sorted(court.failed) == list(range(40))
    assert court.most_standing_still <= 2


def test_who_runs_beside_others_again_and_again_is_no_progress() -> None:
    quarantine: Any = WorkerBisection()
    quarantine.died(["a", "b"])
    quarantine.died(["a", "b"])
    assert quarantine.died(["a", "x"]) == []
    assert quarantine.is_narrowing, "it was tried with one other, and now without a suspect"
    quarantine.clear(["b"])
    for _ in range(3):
        assert quarantine.died(["a", "x"]) == []
        assert not quarantine.is_narrowing
    assert quarantine.died(["a"], num_gone=1) == []
    assert not quarantine.is_narrowing, "it may have been the one that is gone"
    assert quarantine.died(["a"]) == []
    assert quarantine.is_narrowing
    assert quarantine.died(["a"]) == ["a"]


def test_the_only_request_fails_after_two_deaths() -> None:
    court = Court(1, 0)
    court.run()
    assert (court.failed, court.num_deaths) == ([0], 2)


def test_one_death_makes_nobody_wait() -> None:
    quarantine = WorkerBisection()
    assert quarantine.died(["a", "b"]) == []  # type: ignore[list-item]
    assert not quarantine.is_probing
    assert quarantine
    quarantine.had_token(["a", "b"])  # type: ignore[list-item]
    assert not quarantine


def test_accidents_with_tokens_in_between_accuse_nobody() -> None:
    quarantine = WorkerBisection()
    for _ in range(20):
        assert quarantine.died(["a"]) == []  # type: ignore[list-item]
        assert not quarantine.is_probing
        quarantine.had_token(["a"])  # type: ignore[list-item]


def test_who_had_a_token_meanwhile_is_not_tried() -> None:
    quarantine: Any = WorkerBisection()
    quarantine.died(["a", "b", "c"])
    quarantine.had_token(["a"])
    assert quarantine.died(["b", "c", "d", "a"]) == []
    assert quarantine.may_start("b")  # again without a token: the first to be tried
    assert quarantine.may_start("c")
    assert not quarantine.may_start("a")
    quarantine.had_token(["b", "c"])
    assert quarantine.may_start("d")


def test_one_that_ends_in_the_group_makes_room_for_the_next() -> None:
    quarantine: Any = WorkerBisection()
    quarantine.died(["a", "b"])
    quarantine.died(["a", "b"])
    assert quarantine.may_start("a")
    assert not quarantine.may_start("b")
    quarantine.clear(["a"])
    assert quarantine.may_start("b")
    quarantine.clear(["b"])
    assert quarantine.may_start("x")
    assert not quarantine


def test_a_search_that_gets_narrower_says_so() -> None:
    quarantine: Any = WorkerBisection()
    quarantine.died(["a", "b", "c", "d"])
    assert not quarantine.is_narrowing, "one death proves nothing"
    for tried in (["a", "b", "c", "d"], ["a", "b"], ["c"], ["d"]):
        quarantine.died(tried)
        assert quarantine.is_narrowing
    quarantine.died([])
    assert not quarantine.is_narrowing, "nobody was running"


def test_a_search_begins_also_when_others_ran_the_second_time() -> None:
    quarantine: Any = WorkerBisection()
    quarantine.died(["a", "b"])
    assert not quarantine.is_probing
    quarantine.died(["c", "d"])
    assert quarantine.is_probing
    assert quarantine.is_narrowing


def test_a_death_alone_counts_whoever_it_was() -> None:
    quarantine: Any = WorkerBisection()
    quarantine.died(["a", "b"], "abx")
    quarantine.died(["a", "b"], "abx")
    quarantine.died(["a"], "abx")
    assert quarantine.may_start("x"), "the trial rests"
    assert not quarantine.may_start("b")
    assert quarantine.died(["x"], "abx") == []
    assert quarantine.may_start("b"), "there is nobody else"
    quarantine.had_token(["b"])
    assert quarantine.may_start("a")
    assert quarantine.died(["a"], "ax") == ["a"]
    assert quarantine.died(["x"], "x") == ["x"]


def test_a_death_without_a_step_in_flight_is_nobodys_fault() -> None:
    quarantine = WorkerBisection()
    assert quarantine.died([]) == []
    assert not quarantine
