"""The journals of a fleet as a state machine: whatever dies, drains or comes back, each request is in one place, once."""

from __future__ import annotations

import dataclasses
import inspect
import logging
import math
import random
import re
from collections.abc import Sequence
from dataclasses import dataclass
from types import SimpleNamespace
from typing import Any

import anyio
import numpy as np
import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule

from actorllm.actors import frontend
from actorllm.actors.frontend import FrontendActor
from actorllm.client.stream import Mailbox, Sibling
from actorllm.clock import now
from actorllm.errors import EngineDeadError, EngineError, EngineShutdownError, PeerRestartedError, ReplicaLostError
from actorllm.fleet import dispatcher
from actorllm.fleet.dispatcher import Dispatcher
from actorllm.fleet.replica import ReplicaFrontend
from actorllm.fleet.views import pin_of
from actorllm.messages import Outputs, Submit
from actorllm.messages.schema import SCHEMA
from actorllm.scheduling.router import ReplicaView, RoundRobin, Routable
from actorllm.types.objective import SLO
from tests.actors.scheduler_bench import FakeLink
from tests.effort import examples
from tests.fleet.fake_replica import END, LEARNT, FakeReplica, FakeSupervisor, new_fleet

NUM_REPLICAS = 3


@pytest.fixture(autouse=True)
def quiet(monkeypatch: pytest.MonkeyPatch) -> None:
    """Thousands of moves are not told one by one."""
    monkeypatch.setattr(logging.getLogger("actorllm"), "disabled", True)
    for module in (dispatcher, frontend):
        monkeypatch.setattr(module.logger, "disabled", True)


@dataclass
class Asked:
    """A sequence of a request of the model."""

    mailbox: Mailbox
    rid: int
    index: int = 0
    num_tokens: int = 0
    has_ended: bool = False


class FleetOfJournals(RuleBasedStateMachine):
    dispatcher_class = Dispatcher
    frontend_class = ReplicaFrontend

    @initialize(is_paced=st.booleans(), waits=st.booleans())
    def build(self, is_paced: bool, waits: bool) -> None:
        """is_paced: promises leave no room, so that what moves is sent one by one. waits: without a replica, requests wait."""
        self.waits = waits
        self.replicas: dict[int, Any] = {}
        self.dispatcher = self.dispatcher_class(self.replicas, RoundRobin())
        if is_paced:
            self.dispatcher._room_at = lambda target: 0.0  # type: ignore[method-assign]
        self.asked: list[Asked] = []
        self.tried: dict[int, int] = {}
        """Requests that may be what a replica died of, and where they are; without those that are pinned."""
        self.gone: set[int] = set()
        """Replicas that were lost or stopped since that was looked at."""
        for number in range(NUM_REPLICAS):
            self.add(number)

    def add(self, number: int) -> None:
        limits = {"max_num_batched_tokens": 2048}
        self.replicas[number] = FakeReplica(number, self.new_frontend(number), limits=limits, steps=LEARNT)
        self.replicas[number].connect()

    def new_frontend(self, number: int) -> ReplicaFrontend:
        def lose(entries: Any, error: BaseException) -> None:
            """As `Fleet._on_lost`."""
            replica = self.replicas[number]
            replica.is_lost = True
            replica.frontend = self.new_frontend(number)
            if all(one.is_lost for one in self.replicas.values()):
                self.dispatcher.waits = self.waits
            known = [*entries]
            trying = self.trying(replica)
            trial = self.dispatcher.choose_trial(replica)
            assert trial in trying or not trying, "the trial that goes on is that of all replicas"
            self.dispatcher.move_lost(replica, entries, now(), error)
            assert not self.dispatcher.waits or all(self.owner_of(rid) is replica for rid in known)
            assert {self.owner_of(rid).number for rid in entries if self.owner_of(rid) is not None} <= {trial, number}
            self.gone.add(number)

        return self.frontend_class(self.dispatcher.next_rid, lose)

    @property
    def open(self) -> list[Asked]:
        return [one for one in self.asked if not one.has_ended and one.mailbox.error is None]

    def owner_of(self, rid: int) -> Any:
        return next((r for r in self.replicas.values() if r.frontend.has(rid)), None)

    def trying(self, source: Any) -> list[int]:
        """The other replicas that try what may go anywhere, and take requests."""
        others = [r for r in self.replicas.values() if r is not source and r.takes_requests]
        return [r.number for r in others if suspects_of(r)]

    # What callers do

    @rule(pin=st.none() | st.integers(0, NUM_REPLICAS - 1), n=st.sampled_from([1, 1, 2]))
    def submit(self, pin: int | None, n: int) -> None:
        mailbox = Mailbox(num_sequences=n)
        mailbox.replica = pin
        rids: list[int] = []

        def make(rid: int) -> Submit:
            return Submit(rid=rid, arrival=0.0, prompt=np.array([1, 2, 3], np.int32), max_tokens=99)

        if n == 1:
            self.dispatcher.submit(make, mailbox, rids.append)
        else:
            siblings = [Sibling(mailbox, index, lambda mailbox: None) for index in range(n)]
            self.dispatcher.submit_several(make, siblings, rids.append)
        if rids:
            assert len(rids) == n
            assert not {*rids} & {one.rid for one in self.open}
            self.asked += [Asked(mailbox, rid, index) for index, rid in enumerate(rids)]
        elif pin is not None:
            assert pin not in self.replicas
            assert isinstance(mailbox.error, ReplicaLostError)
        else:
            assert mailbox.error is not None, "it is told why"
            assert not self.dispatcher.waits
            assert not any(r.takes_requests for r in self.replicas.values())

    @precondition(lambda self: self.open)
    @rule(which=st.integers(0, 99))
    def abort(self, which: int) -> None:
        one = self.open[which % len(self.open)]
        self.dispatcher.abort(one.rid)

    # What schedulers do

    def say(self, replica: Any, one: Asked, tokens: list[int], index: int, ends: list[Any]) -> None:
        outputs = Outputs(
            rids=np.array([one.rid], np.int32),
            index=np.array([index], np.int32),
            tokens=np.array(tokens, np.int32),
            counts=np.array([len(tokens)], np.int32),
            ends=ends,
            emitted=now(),
        )
        replica.frontend.on_message(replica.link, outputs)
        replica.frontend.on_batch()

    def ends_come(self, replica: Any, one: Asked) -> None:
        """Of each time that the request was here and was ended: it was moved, and has come back, or it was aborted."""
        for _ in range(replica.num_ends_due(one.rid)):
            replica.told[one.rid] += 1
            self.say(replica, one, [], one.num_tokens, [END])

    @precondition(lambda self: self.open)
    @rule(which=st.integers(0, 99), count=st.integers(1, 3), is_end=st.booleans())
    def tokens_come(self, which: int, count: int, is_end: bool) -> None:
        one = self.open[which % len(self.open)]
        replica = self.owner_of(one.rid)
        if replica is None or replica.link is None:
            return
        self.ends_come(replica, one)
        if not replica.frontend.has(one.rid):
            one.has_ended = True
            return
        submit = replica.known().get(one.rid)
        if submit is None:  # its scheduler has yet to hear of it
            return
        # A scheduler computes from what it was given: from there on all comes again.
        first = submit.output.size
        tokens = list(range(first, one.num_tokens + count))
        self.say(replica, one, tokens[: one.num_tokens - first], first, [])
        self.say(replica, one, tokens[one.num_tokens - first :], one.num_tokens, [END] if is_end else [])
        one.num_tokens += count
        one.has_ended = is_end

    @precondition(lambda self: self.asked)
    @rule(which=st.integers(0, 99), number=st.integers(0, NUM_REPLICAS - 1))
    def late_tokens_come(self, which: int, number: int) -> None:
        """Of a scheduler that had the request before."""
        one = self.asked[which % len(self.asked)]
        replica = self.replicas.get(number)
        if replica is None:
            return
        entry = replica.frontend.journal().get(one.rid)
        if replica.link is None or (entry is not None and replica.num_ends_due(one.rid) <= entry.is_aborted):
            return
        num_late = replica.frontend._num_late
        self.say(replica, one, [777], one.num_tokens, [])  # if it has come back since, these are of before
        assert replica.frontend._num_late == num_late + 1

    # What happens to replicas

    def fall(self, replica: Any, group: str, is_slow: bool) -> None:
        """As `Fleet._tell_fall`. is_slow: computing elsewhere is sooner than the restart."""
        trying, was_tried = self.trying(replica), bool(suspects_of(replica))
        before = {one.rid: self.owner_of(one.rid).number for one in self.open}
        can_move = self.dispatcher.can_move(replica)
        trial = self.dispatcher.trial_after_fall(replica, 1e9 if is_slow else 0.0)
        self.dispatcher.move_to_trial(replica, group, now())
        moved = {rid for rid, number in before.items() if self.owner_of(rid).number != number}
        assert {self.owner_of(rid).number for rid in moved} <= {trial}, "all suspects go to one replica"
        if trying and not was_tried:
            assert trial in trying, "the trial that goes on is that of all replicas"
        if is_slow and can_move and not was_tried and trial != replica.number:
            left = [e for e in replica.frontend.journal().values() if not pinned(e)]
            assert not left
        for rid in (*moved, *replica.frontend.journal()):
            assert self.owner_of(rid).frontend.journal()[rid].record.num_deaths, "what was there is suspected"

    @rule(number=st.integers(0, NUM_REPLICAS - 1), is_slow=st.booleans())
    def scheduler_dies(self, number: int, is_slow: bool) -> None:
        replica = self.replicas.get(number)
        if replica is None or replica.link is None or replica.is_lost:
            return
        replica.link.is_open, replica.link.lost = False, PeerRestartedError("killed")
        replica.supervisor.state = "recovering"
        link, replica.link = replica.link, None
        replica.frontend.on_peer_lost(link)
        self.fall(replica, "scheduler", is_slow)

    @rule(number=st.integers(0, NUM_REPLICAS - 1), is_slow=st.booleans())
    def worker_dies(self, number: int, is_slow: bool) -> None:
        replica = self.replicas.get(number)
        if replica is not None and replica.link is not None and not replica.is_lost:
            self.fall(replica, "worker0", is_slow)

    @rule(number=st.integers(0, NUM_REPLICAS - 1))
    def comes_back(self, number: int) -> None:
        """From a death or from its loss, or it is new."""
        if number not in self.replicas:
            self.add(number)
            return
        replica = self.replicas[number]
        if replica.is_lost:
            replica.num_links = 0
            replica.is_lost = False
        if replica.link is None:
            replica.supervisor.state = "running"
            replica.connect()
            self.no_more_waits(replica)

    def no_more_waits(self, replica: Any) -> None:
        """As `Fleet` when it runs."""
        self.gone |= {one.number for one in self.replicas.values() if one.is_lost}
        if replica.link is not None:
            self.dispatcher.end_wait(replica)

    @rule(number=st.integers(0, NUM_REPLICAS - 1))
    def is_given_up(self, number: int) -> None:
        replica = self.replicas.get(number)
        if replica is not None and not replica.is_lost:
            replica.link = None
            replica.frontend.fail_all(EngineDeadError("it died too often"))

    @rule(number=st.integers(0, NUM_REPLICAS - 1))
    def is_removed(self, number: int) -> None:
        """As `Fleet._remove`: its scheduler may live, and what is pinned to it fails."""
        replica = self.replicas.get(number)
        if replica is None or len(self.replicas) == 1:
            return
        replica.is_removed = True
        if self.dispatcher.can_move(replica):
            self.dispatcher.move(replica, lost_at=None)
        self.dispatcher.move_rest(replica)
        assert not replica.frontend.num_open
        del self.replicas[number]
        self.gone.add(number)

    @rule(number=st.integers(0, NUM_REPLICAS - 1))
    def drains(self, number: int) -> None:
        replica = self.replicas.get(number)
        if replica is not None and not replica.is_lost and self.dispatcher.can_move(replica):
            replica.is_draining = True
            self.dispatcher.move(replica, lost_at=None)

    @rule(number=st.integers(0, NUM_REPLICAS - 1))
    def drains_no_more(self, number: int) -> None:
        if number in self.replicas:
            self.replicas[number].is_draining = False
            self.no_more_waits(self.replicas[number])

    @rule()
    def the_trial_is_over(self) -> None:
        """As far as time tells."""
        self.dispatcher._trial_until = -math.inf

    # What holds

    @invariant()
    def each_request_is_in_one_place(self) -> None:
        homes: dict[int, set[int]] = {}
        for one in self.open:
            places = [r.number for r in self.replicas.values() if r.frontend.has(one.rid)]
            assert len(places) == 1, (one.rid, places)
            if one.mailbox.replica is not None:
                assert places == [one.mailbox.replica]
            homes.setdefault(id(one.mailbox), set()).update(places)
        assert all(len(places) == 1 for places in homes.values()), "the sequences of a request are together"
        num_known = sum(r.frontend.num_open for r in self.replicas.values())
        assert num_known == len(self.open)

    @invariant()
    def schedulers_work_on_their_journals(self) -> None:
        for replica in self.replicas.values():
            if replica.link is None or replica.is_lost:
                continue
            journal, held = replica.frontend.journal(), replica.frontend._held.keys()
            wanted = {rid for rid, entry in journal.items() if not entry.is_aborted} - held
            open_rids = {one.rid for one in self.open}
            assert {rid for rid in replica.known() if rid in open_rids} == wanted
            for rid, submit in replica.known().items():
                if rid in wanted:
                    assert submit.output.size <= len(journal[rid].emitted)
            sent = replica.frontend._sent.items()
            under_way = [
                rid for rid, (num, _) in sent if rid in journal.keys() - held and len(journal[rid].emitted) == num
            ]
            ends_due = [one.rid for one in self.asked if replica.num_ends_due(one.rid)]
            assert held <= journal.keys()
            assert not held or under_way or ends_due, "what moves is not starved"

    @invariant()
    def every_token_comes_once(self) -> None:
        for one in self.asked:
            deltas = [delta for index, delta in one.mailbox.deltas if index == one.index]
            assert [token for delta in deltas for token in delta.tokens] == list(range(one.num_tokens))

    @invariant()
    def suspects_stay_where_they_are_tried(self) -> None:
        """As long as that replica is not lost: else a poison request would kill one after the other."""
        tried = {rid: r.number for r in self.replicas.values() for rid in suspects_of(r)}
        for rid, number in tried.items():
            before = self.tried.get(rid, number)
            assert number == before or before in self.gone
        self.tried = tried
        self.gone.clear()

    @invariant()
    def only_without_a_replica_requests_fail(self) -> None:
        for one in self.asked:
            if isinstance(one.mailbox.error, ReplicaLostError):
                assert one.mailbox.replica is not None
            elif one.mailbox.error is not None:
                assert isinstance(one.mailbox.error, EngineDeadError) or "died" in str(one.mailbox.error)

    @invariant()
    def what_waits_goes_on_where_a_replica_runs(self) -> None:
        if any(replica.takes_requests and replica.link is not None for replica in self.replicas.values()):
            left = [entry for r in self.replicas.values() if r.is_lost for entry in r.frontend.journal().values()]
            assert all(map(pinned, left))


def pinned(entry: Any) -> bool:
    return pin_of(entry.consumer) is not None


def suspects_of(replica: Any) -> list[int]:
    """What is tried there and may go anywhere."""
    journal = replica.frontend.journal()
    return [rid for rid, entry in journal.items() if entry.record.num_deaths and not pinned(entry)]


TestFleetOfJournals = pytest.mark.filterwarnings("error")(FleetOfJournals.TestCase)
FleetOfJournals.TestCase.settings = settings(max_examples=examples(25, 600), stateful_step_count=30, deadline=None)


class AdoptsTwice(Dispatcher):
    def _rehome(self, source: Any, entries: Any, lost_at: Any, is_trial: bool) -> None:
        super()._rehome(source, entries, lost_at, is_trial)
        source.frontend.adopt(entries, None)


class ForgetsPins(Dispatcher):
    def move_lost(self, source: Any, entries: Any, lost_at: Any, error: BaseException, **more: Any) -> None:
        if self._candidates(source):
            self._rehome(source, entries, lost_at, is_trial=True)
        else:
            source.frontend.fail(entries, error)


class LeavesTheOldOneRunning(Dispatcher):
    def move(self, source: Any, lost_at: float | None) -> int:
        link, source.frontend._scheduler = source.frontend._scheduler, None
        try:
            return super().move(source, lost_at)
        finally:
            source.frontend._scheduler = link


class LosesTheOutput(Dispatcher):
    def _rehome(self, source: Any, entries: Any, lost_at: Any, is_trial: bool) -> None:
        for entry in entries.values():
            entry.emitted.clear()
        super()._rehome(source, entries, lost_at, is_trial)


class TriesWhereTheFewestAre(Dispatcher):
    def _trial_of(self, source: Any) -> Any:
        return min(self._candidates(source), key=lambda replica: replica.frontend.num_open, default=None)

    def _trying(self, source: Any) -> Any:
        return None

    def _named_trial(self, source: Any) -> Any:
        return None


class MovesSuspects(Dispatcher):
    def move(self, source: Any, lost_at: float | None) -> int:
        if lost_at is not None:
            return super().move(source, lost_at)
        entries = source.frontend.surrender(lambda entry: pin_of(entry.consumer) != source.number)
        self._rehome(source, entries, lost_at, is_trial=False)
        return len(entries)


class LeavesWhatWaits(Dispatcher):
    def end_wait(self, back: Any) -> None:
        self.waits = False


class PartsSequences(Dispatcher):
    def _rehome(self, source: Any, entries: Any, lost_at: Any, is_trial: bool) -> None:
        for rid, entry in entries.items():
            super()._rehome(source, {rid: entry}, lost_at, is_trial)


class HoldsForEver(ReplicaFrontend):
    def on_batch(self) -> None:
        FrontendActor.on_batch(self)


class SendsTwice(ReplicaFrontend):
    def surrender(self, is_moved: Any = lambda entry: True) -> Any:
        held = dict(self._held)
        taken = super().surrender(is_moved)
        self._held = held
        return taken


def walk(
    num_walks: int,
    dispatcher_class: type[Dispatcher] = Dispatcher,
    frontend_class: type[ReplicaFrontend] = ReplicaFrontend,
) -> None:
    """Events at random, the same in every run, and what holds after each of them."""
    draws = random.Random(7)
    often = ("submit", "tokens_come", "drains", "drains_no_more", "comes_back")
    seldom = (
        "abort",
        "late_tokens_come",
        "scheduler_dies",
        "worker_dies",
        "is_given_up",
        "is_removed",
        "the_trial_is_over",
    )
    names = (*often, *often, *often, *seldom)
    values: dict[str, Any] = {
        "pin": lambda: draws.choice([None, None, *range(NUM_REPLICAS)]),
        "which": lambda: draws.randrange(100),
        "count": lambda: draws.randint(1, 3),
        "is_end": lambda: draws.random() < 0.2,
        "n": lambda: draws.choice([1, 1, 2]),
        "is_slow": lambda: draws.random() < 0.8,
        "number": lambda: draws.randrange(NUM_REPLICAS),
    }
    for _ in range(num_walks):
        machine = FleetOfJournals()
        machine.dispatcher_class, machine.frontend_class = dispatcher_class, frontend_class
        machine.build(draws.random() < 0.5, draws.random() < 0.5)
        for _ in range(40):
            name = draws.choice(names) if machine.open else "submit"
            method = getattr(machine, name)
            method(**{one: values[one]() for one in inspect.signature(method).parameters})
            machine.each_request_is_in_one_place()
            machine.schedulers_work_on_their_journals()
            machine.every_token_comes_once()
            machine.suspects_stay_where_they_are_tried()
            machine.only_without_a_replica_requests_fail()
            machine.what_waits_goes_on_where_a_replica_runs()


def test_walks_find_nothing() -> None:
    walk(60)


MISTAKEN = (AdoptsTwice, ForgetsPins, LeavesTheOldOneRunning, LosesTheOutput)
MISTAKEN += (TriesWhereTheFewestAre, MovesSuspects, LeavesWhatWaits, PartsSequences)


@pytest.mark.parametrize("mistaken", MISTAKEN)
def test_planted_mistakes_are_found(mistaken: type[Dispatcher]) -> None:
    with pytest.raises((AssertionError, IndexError, KeyError)):
        walk(60, mistaken)


@pytest.mark.parametrize("mistaken", [HoldsForEver, SendsTwice])
def test_planted_mistakes_in_what_moves_bit_by_bit_are_found(mistaken: type[ReplicaFrontend]) -> None:
    with pytest.raises((AssertionError, IndexError, KeyError)):
        walk(60, frontend_class=mistaken)


def test_surrendered_siblings_that_were_not_sent_stay_together() -> None:
    """What had not been sent when some sequences of a request moved: the others are sent by themselves."""
    frontend = FrontendActor()
    mailboxes = [Mailbox() for _ in range(3)]
    rids: list[int] = []

    def make(rid: int) -> Submit:
        return Submit(rid=rid, arrival=0.0, prompt=np.array([1], np.int32), max_tokens=9)

    frontend.submit_several(make, mailboxes, rids.append)
    taken = frontend.surrender(lambda entry: entry.submit.rid != rids[1])
    assert list(taken) == [rids[0], rids[2]]
    link = FakeLink("scheduler")
    frontend.on_link(link)  # type: ignore[arg-type]
    assert [message.rid for message in link.sent] == [rids[1]]


def ask(fleet: Dispatcher, home: int, num_prompt: int = 3) -> int:
    """Of a request that begins on this replica and may move."""
    mailbox, rids = Mailbox(), list[int]()
    mailbox.replica = home
    prompt = np.zeros(num_prompt, np.int32)
    fleet.submit(lambda rid: Submit(rid=rid, arrival=0.0, prompt=prompt, max_tokens=9), mailbox, rids.append)
    mailbox.replica = None
    return rids[0]


@pytest.mark.parametrize(
    ("num_there", "restart_s", "moves"), [(0, 0.001, False), (0, 0.002, True), (1000, 0.05, False), (1000, 0.2, True)]
)
def test_streams_of_a_process_that_died_move_if_that_is_sooner_than_its_restart(
    num_there: int, restart_s: float, moves: bool
) -> None:
    """Three tokens take 1.3 ms elsewhere; behind a thousand that wait there they take 0.1 s."""
    fleet, (first, second) = new_fleet(2)
    rid = ask(fleet, 0)
    if num_there:
        ask(fleet, 1, num_there)
    assert fleet.trial_after_fall(first, restart_s) == moves  # type: ignore[arg-type]
    fleet.move_to_trial(first, "scheduler", now())  # type: ignore[arg-type]
    assert (second if moves else first).frontend.journal()[rid].record.num_deaths == 1, (
        "it is suspected in either place"
    )


def test_a_trial_goes_on_as_long_as_its_replica_takes_to_recover(monkeypatch: pytest.MonkeyPatch) -> None:
    """What another replica dies of meanwhile is tried there, too, though there is one without any suspect."""
    monkeypatch.setattr(dispatcher, "TRIAL_S", 0.0)
    fleet, (first, trial, third) = new_fleet(3)
    tried, later = ask(fleet, 0), ask(fleet, 2)
    third.is_draining = True  # so that the first suspects go to the second one
    fleet.trial_after_fall(first, 60.0)  # type: ignore[arg-type]
    fleet.move_to_trial(first, "worker0", now())  # type: ignore[arg-type]
    assert trial.frontend.has(tried)
    third.is_draining = False
    assert trial.link is not None
    trial.link.is_open, trial.link.lost = False, PeerRestartedError("killed")  # type: ignore[attr-defined]
    trial.frontend.on_peer_lost(trial.link)  # type: ignore[arg-type]
    trial.link = None
    monkeypatch.setattr(dispatcher, "TRIAL_S", 10.0)
    assert fleet.trial_after_fall(third, 60.0) == trial.number  # type: ignore[arg-type]
    fleet.move_to_trial(third, "worker0", now())  # type: ignore[arg-type]
    assert trial.frontend.has(later)
    assert fleet.choose_trial(third) == trial.number  # type: ignore[arg-type]


def test_a_pinned_suspect_does_not_end_the_trial_of_the_others() -> None:
    """It is tried on its replica. What a third one dies of goes where the trial of all is."""
    fleet, (first, trial, third) = new_fleet(3)
    ask(fleet, 0)
    pinned_rid = ask(fleet, 0)
    first.frontend.journal()[pinned_rid].consumer.replica = 0  # type: ignore[attr-defined]
    third.is_draining = True
    for _ in range(2):  # the second death is that of the pinned one
        fleet.trial_after_fall(first, 60.0)  # type: ignore[arg-type]
        fleet.move_to_trial(first, "worker0", now())  # type: ignore[arg-type]
        assert list(first.frontend.journal()) == [pinned_rid], "what came since goes to the trial, too"
        ask(fleet, 0)
    third.is_draining = False
    assert first.frontend.has_suspects
    assert trial.frontend.has_suspects
    ask(fleet, 2)
    assert fleet.trial_after_fall(third, 60.0) == trial.number  # type: ignore[arg-type]


class Wrong:
    """A router of an application."""

    def __init__(self, answer: Any) -> None:
        self.answer = answer

    def route(self, request: Routable, views: Sequence[ReplicaView]) -> int:
        if isinstance(self.answer, Exception):
            raise self.answer
        if isinstance(self.answer, str) and self.answer == "empty":
            views.clear()  # type: ignore[attr-defined]
        return self.answer  # type: ignore[no-any-return]


@pytest.mark.parametrize(
    ("answer", "reason"),
    [
        (ValueError("it has a mistake"), "it has a mistake"),
        (77, r"route\(\) returned 77; return the number of a replica in views: 0, 1, 2"),
        (None, "returned None"),
        ("0", "returned '0'"),
        (0.0, "returned 0.0"),
        (np.array([0, 2]), r"returned array\(\[0, 2\]\)"),
        ("empty", "no attribute 'clear'"),
    ],
    ids=str,
)
def test_where_a_router_fails_the_request_goes_where_the_fewest_are(
    answer: object, reason: str, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """The log says why: a router that is never followed would not be noticed."""
    monkeypatch.setattr(dispatcher.logger, "disabled", False)
    fleet, replicas = new_fleet(3, Wrong(answer))
    ask(fleet, 0)
    ask(fleet, 2)
    mailbox = Mailbox()
    prompt = np.zeros(3, np.int32)
    fleet.submit(lambda rid: Submit(rid=rid, arrival=0.0, prompt=prompt, max_tokens=9), mailbox, lambda rid: None)
    assert mailbox.error is None
    assert [replica.frontend.num_open for replica in replicas] == [1, 1, 1]
    assert re.search(reason, caplog.text)


def test_a_router_may_name_a_replica_by_an_integer_of_numpy() -> None:
    fleet, replicas = new_fleet(3, Wrong(np.argmax([0, 0, 1])))
    for _ in range(2):
        fleet.submit(
            lambda rid: Submit(rid=rid, arrival=0.0, prompt=np.zeros(3, np.int32), max_tokens=9),
            Mailbox(),
            lambda rid: None,
        )
    assert [replica.frontend.num_open for replica in replicas] == [0, 0, 2]


SET_BY_A_MOVE = {"output", "is_resumed", "had_slot", "first_token", "num_deaths", "probe_size", "num_losses"}
KEPT_EMPTY = {"rid", "siblings", "hands_off", "kv_lease"}
"""What is no parameter of the request."""
VALUES: dict[str, Any] = {
    "i4": np.array([5, 6], np.int32),
    "u1": np.arange(64, dtype=np.uint8),
    "int": 7,
    "float": 0.25,
    "str": "word",
    "strs": ["word"],
    "ints": [7],
    "map": {"name": 7},
    "floats": SLO(ttft=5.0, tpot=0.5).to_fields(),
}


@pytest.mark.parametrize("has_died", [False, True])
def test_what_moves_is_sent_as_it_was(has_died: bool) -> None:
    """Every parameter, its clocks and its place in the output; sampling, grammars and penalties go on from there."""
    known = {one.name: one for one in dataclasses.fields(Submit)}
    told = {
        name: field.kind for name, field in SCHEMA["Submit"].fields.items() if name not in SET_BY_A_MOVE | KEPT_EMPTY
    }
    values = {name: not known[name].default if kind == "bool" else VALUES[kind] for name, kind in told.items()}
    values |= {"arrival": now(), "deadline": now() + 60.0}
    fleet, (first, second) = new_fleet(2)
    fleet.submit(lambda rid: Submit(rid=rid, **values), Mailbox(), lambda rid: None)
    (submit,) = first.known().values()
    one, tokens = np.array([submit.rid], np.int32), np.array([8, 9], np.int32)
    message = Outputs(rids=one, index=one * 0, tokens=tokens, counts=one * 0 + 2, emitted=3.5)
    first.frontend.on_message(first.link, message)  # type: ignore[arg-type]
    fleet.move(first, now() if has_died else None)  # type: ignore[arg-type]
    assert not first.known()
    (moved,) = second.known().values()
    assert (moved.output.tolist(), moved.is_resumed, moved.first_token) == ([8, 9], True, 3.5)
    assert moved.num_deaths == has_died
    for name in known.keys() - SET_BY_A_MOVE:
        np.testing.assert_equal(getattr(moved, name), getattr(submit, name), name)
        if name in values:
            np.testing.assert_equal(getattr(moved, name), values[name], name)


@pytest.mark.parametrize("pin", [None, 0])
def test_requests_that_fail_with_their_replica_are_no_load_for_other_programs(pin: int | None) -> None:
    """An owner waits for them before it lets a node go."""
    told: dict[int, int] = {}
    board = SimpleNamespace(
        has_others=True, write_journal=lambda program, replica, load: told.update({replica: load.num_waiting})
    )
    replicas: dict[int, Any] = {}
    dispatcher = Dispatcher(replicas, RoundRobin())
    dispatcher.share(board, 1)  # type: ignore[arg-type]
    lost: list[tuple[Any, BaseException]] = []
    replicas[0] = FakeReplica(
        0, ReplicaFrontend(dispatcher.next_rid, lambda entries, error: lost.append((entries, error)))
    )
    replicas[0].connect()
    mailbox = Mailbox()
    mailbox.replica = pin
    dispatcher.submit(
        lambda rid: Submit(rid=rid, arrival=0.0, prompt=np.array([1], np.int32), max_tokens=9),
        mailbox,
        lambda rid: None,
    )
    assert told == {0: 1}
    dispatcher.move_rest(replicas[0])
    assert mailbox.error is not None
    assert told == {0: 0}


def replicas_that_answer(*numbers: int) -> dict[int, Any]:
    """Their schedulers answer with the number of the replica."""
    replicas: dict[int, Any] = {}

    def answer_of(number: int) -> Any:
        async def ask_scheduler(verb: str, **arguments: Any) -> list[int]:
            replicas[number].asked.append(verb)
            return [number]

        return ask_scheduler

    for number in numbers:
        frontend = ReplicaFrontend(lambda: 1, lambda entries, error: None)
        frontend.ask_scheduler = answer_of(number)  # type: ignore[method-assign]
        replicas[number] = FakeReplica(number, frontend)
        replicas[number].asked = []
    return replicas


@pytest.mark.anyio
@pytest.mark.parametrize("when", ["before", "meanwhile"])
async def test_a_replica_that_is_stopped_is_left_out_of_an_answer(when: str) -> None:
    replicas = replicas_that_answer(0, 1)
    stopped = replicas[1]
    stopped.is_removed = when == "before"

    async def ask_scheduler(verb: str, **arguments: Any) -> Any:
        stopped.is_removed = True
        raise EngineShutdownError("the engine was shut down")

    stopped.frontend.ask_scheduler = ask_scheduler
    assert await Dispatcher(replicas, RoundRobin()).ask_scheduler("list_adapters") == [0]


@pytest.mark.anyio
async def test_a_replica_that_starts_and_has_its_link_is_paused_with_the_others() -> None:
    replicas = replicas_that_answer(0, 1, 2, 3)
    for number in (1, 2):
        replicas[number].supervisor.state = "starting"
    for number in (1, 3):
        replicas[number].connect()
    replicas[3].is_lost = True  # its link is dead, and that is yet to be told
    fleet = Dispatcher(replicas, RoundRobin())
    await fleet.ask_scheduler("pause_generation", mode="keep")
    assert [replica.asked for replica in replicas.values()] == [["pause_generation"], ["pause_generation"], [], []]
    assert [replica.frontend.pause_mode for replica in replicas.values()] == ["keep"] * 4


@pytest.mark.anyio
async def test_while_no_replica_runs_a_question_fails_and_changes_nothing() -> None:
    """The engine goes on, so it was not shut down. A pause that fails is none."""
    replicas = replicas_that_answer(0, 1)
    replicas[0].is_lost = True
    replicas[1].supervisor.state = "starting"
    fleet = Dispatcher(replicas, RoundRobin())
    for verb in ("statistics", "pause_generation", "sleep"):
        with pytest.raises(EngineError, match="no replica of the engine runs now") as raised:
            await fleet.ask_scheduler(verb, mode="keep")
        assert not isinstance(raised.value, EngineShutdownError)
    assert not fleet.is_paused
    fleet.fail_all(EngineDeadError("it is gone"))
    with pytest.raises(EngineDeadError, match="it is gone"):
        await fleet.ask_scheduler("statistics")


@pytest.mark.anyio
async def test_a_pause_that_a_new_scheduler_is_told_of_just_now_is_resumed_behind_that() -> None:
    told, asked, link = anyio.Event(), [], FakeLink("scheduler")
    frontend = ReplicaFrontend(lambda: 1, lambda entries, error: None)

    async def ask(link: Any, verb: str, *_: Any, **arguments: Any) -> bool:
        asked.append(verb)
        if verb == "pause_generation":
            await told.wait()
        return True

    replica = FakeReplica(0, frontend, supervisor=FakeSupervisor("starting"))
    frontend.ask = ask  # type: ignore[method-assign, assignment]
    frontend.assume_paused("keep")
    async with anyio.create_task_group() as tasks:
        frontend.start_soon = tasks.start_soon  # type: ignore[method-assign, assignment]
        frontend.links = {"scheduler": link}  # type: ignore[dict-item]
        frontend.on_link(link)  # type: ignore[arg-type]
        await anyio.wait_all_tasks_blocked()
        tasks.start_soon(Dispatcher({0: replica}, RoundRobin()).ask_scheduler, "resume_generation")
        await anyio.wait_all_tasks_blocked()
        told.set()
    assert asked == ["pause_generation", "resume_generation"]
    assert not frontend.is_paused


@pytest.mark.anyio
@pytest.mark.parametrize("left", [[], ["kv_cache"]], ids=["all", "part"])
async def test_a_fleet_that_wakes_up_leaves_no_replica_paused(left: list[str]) -> None:
    """One that is lost, and one that starts and was paused with the others."""
    replicas = replicas_that_answer(0, 1, 2)

    async def wake_up(verb: str, **arguments: Any) -> list[str]:
        return left

    replicas[0].frontend.ask_scheduler = wake_up
    replicas[1].is_lost = True
    replicas[2].supervisor.state = "starting"
    replicas[2].connect()
    for number in (1, 2):
        replicas[number].frontend.assume_paused("keep")
    await Dispatcher(replicas, RoundRobin()).ask_scheduler("wake_up", tags=["weights"])
    assert replicas[1].frontend.is_paused is bool(left)
    assert replicas[2].asked == ([] if left else ["resume_generation"])


def test_a_request_that_comes_back_ignores_the_end_of_its_first_stay() -> None:
    """Of a program that follows some drains at once, none of the schedulers has answered yet."""
    replicas: dict[int, Any] = {}
    fleet = Dispatcher(replicas, RoundRobin())
    for number in range(2):
        replicas[number] = FakeReplica(number, ReplicaFrontend(fleet.next_rid, lambda entries, error: None))
        replicas[number].connect()
    mailbox = Mailbox()

    def make(rid: int) -> Submit:
        return Submit(rid=rid, arrival=0.0, prompt=np.zeros(1, np.int32), max_tokens=9)

    def say(tokens: list[int], index: int, ends: list[Any]) -> None:
        columns = {"rids": [1], "index": [index], "tokens": tokens, "counts": [len(tokens)]}
        arrays = {name: np.array(column, np.int32) for name, column in columns.items()}
        first.frontend.on_message(first.link, Outputs(**arrays, ends=ends, emitted=now()))

    first, second = replicas.values()
    first.frontend.submit(make, mailbox, lambda rid: None)
    for source, target in ((first, second), (second, first)):
        source.is_draining, target.is_draining = True, False
        fleet.move(source, lost_at=None)
    assert first.known().keys() == {1}
    say([5, 6], 0, [])
    say([7], 2, [])
    say([], 3, [END])
    assert not mailbox.deltas
    assert first.frontend._num_late == 3, "and what it has sent too late is counted"
    say([8], 0, [END])
    assert [delta.tokens for _, delta in mailbox.deltas] == [[8]]
    assert first.frontend.num_open == 0


def test_a_node_that_is_told_to_end_takes_requests_while_there_is_no_other_replica() -> None:
    """It computes them for as long as it may, and then they wait for its next life."""
    fleet, (leaving, other) = new_fleet(2)
    leaving.is_leaving = True

    def submitted() -> list[int]:
        rids: list[int] = []
        submit = Submit(rid=0, arrival=0.0, prompt=np.array([1], np.int32), max_tokens=9)
        fleet.submit(lambda rid: dataclasses.replace(submit, rid=rid), Mailbox(), rids.append)
        return rids

    assert [rid in other.known() for _ in range(3) for rid in submitted()] == [True] * 3
    other.is_removed = True
    assert [rid in leaving.known() for rid in submitted()] == [True]
    leaving.is_lost = True
    assert submitted() == [], "nothing says that it comes back"


def test_what_waits_in_vain_fails_wherever_it_waits() -> None:
    fleet, replicas = new_fleet(2)
    mailboxes = [Mailbox() for _ in replicas]
    submit = Submit(rid=0, arrival=0.0, prompt=np.array([1], np.int32), max_tokens=9)
    for replica, mailbox in zip(replicas, mailboxes, strict=True):
        replica.frontend.submit(lambda rid: dataclasses.replace(submit, rid=rid), mailbox, lambda rid: None)
    fleet.waits = True
    for replica in replicas:
        replica.is_lost = True
        entries = replica.frontend.surrender()
        replica.frontend = ReplicaFrontend(fleet.next_rid, lambda entries, error: None)
        fleet.move_lost(replica, entries, now(), EngineDeadError("it is away"))
    assert [mailbox.error for mailbox in mailboxes] == [None, None]
    fleet.give_up_wait(EngineDeadError("none came back"))
    assert [str(mailbox.error) for mailbox in mailboxes] == ["none came back"] * 2
    assert fleet.num_open == 0


def test_what_came_while_all_were_away_is_suspected_of_nothing() -> None:
    fleet, (away, back) = new_fleet(2)
    submit = Submit(rid=0, arrival=0.0, prompt=np.array([1], np.int32), max_tokens=9)
    rids: list[int] = []

    def come(frontend: ReplicaFrontend) -> None:
        frontend.submit(lambda rid: dataclasses.replace(submit, rid=rid), Mailbox(), rids.append)

    come(away.frontend)
    back.is_lost = away.is_lost = fleet.waits = True
    entries = away.frontend.surrender()
    for replica in (away, back):
        replica.frontend = ReplicaFrontend(fleet.next_rid, lambda entries, error: None)
    fleet.move_lost(away, entries, now(), EngineDeadError("it is away"))
    come(away.frontend)
    back.is_lost = False
    back.connect()
    fleet.end_wait(back)
    known = back.known()
    assert [known[rid].num_deaths for rid in rids] == [1, 0]
