"""The journals of a fleet as a state machine: whatever dies, drains or comes back, each request is in one place, once."""

from __future__ import annotations

import inspect
import logging
import random
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
from actorllm.client.stream import Mailbox
from actorllm.clock import now
from actorllm.errors import EngineDeadError, EngineShutdownError, PeerRestartedError
from actorllm.fleet import dispatcher
from actorllm.fleet.dispatcher import Dispatcher
from actorllm.fleet.replica import ReplicaFrontend
from actorllm.messages import Outputs, Submit
from actorllm.scheduling.router import RoundRobin
from tests.actors.scheduler_bench import FakeLink
from tests.effort import examples
from tests.fleet.fake_replica import END, FakeReplica, FakeSupervisor

NUM_REPLICAS = 3


@pytest.fixture(autouse=True)
def quiet(monkeypatch: pytest.MonkeyPatch) -> None:
    """Thousands of moves are not told one by one."""
    monkeypatch.setattr(logging.getLogger("actorllm"), "disabled", True)
    for module in (dispatcher, frontend):
        monkeypatch.setattr(module.logger, "disabled", True)


@dataclass
class Asked:
    """A request of the model."""

    mailbox: Mailbox
    rid: int
    num_tokens: int = 0
    has_ended: bool = False


class FleetOfJournals(RuleBasedStateMachine):
    dispatcher_class = Dispatcher

    @initialize()
    def build(self) -> None:
        self.replicas: dict[int, Any] = {}
        self.dispatcher = self.dispatcher_class(self.replicas, RoundRobin())
        self.asked: list[Asked] = []
        for number in range(NUM_REPLICAS):
            self.replicas[number] = FakeReplica(number, self.new_frontend(number))
            self.replicas[number].connect()

    def new_frontend(self, number: int) -> ReplicaFrontend:
        def lose(entries: Any, error: BaseException) -> None:
            self.replicas[number].is_lost = True
            self.replicas[number].frontend = self.new_frontend(number)
            self.dispatcher.move_lost(self.replicas[number], entries, now(), error)

        return ReplicaFrontend(self.dispatcher.next_rid, lose)

    @property
    def open(self) -> list[Asked]:
        return [one for one in self.asked if not one.has_ended and one.mailbox.error is None]

    def owner_of(self, one: Asked) -> Any:
        return next((r for r in self.replicas.values() if r.frontend.has(one.rid)), None)

    # What callers do

    @rule(pin=st.none() | st.integers(0, NUM_REPLICAS - 1))
    def submit(self, pin: int | None) -> None:
        mailbox = Mailbox()
        mailbox.replica = pin
        rids: list[int] = []

        def make(rid: int) -> Submit:
            return Submit(rid=rid, arrival=0.0, prompt=np.array([1, 2, 3], np.int32), max_tokens=99)

        self.dispatcher.submit(make, mailbox, rids.append)
        if rids:
            assert rids[0] not in {one.rid for one in self.open}
            self.asked.append(Asked(mailbox, rids[0]))
        else:
            assert mailbox.error is not None, "it is told why"
            assert pin is None
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

    def ends_come(self, replica: Any, one: Asked) -> None:
        """Of each time that the request was here and was ended: it was moved, and has come back, or it was aborted."""
        for _ in range(replica.num_ends_due(one.rid)):
            replica.told[one.rid] += 1
            self.say(replica, one, [], one.num_tokens, [END])

    @precondition(lambda self: self.open)
    @rule(which=st.integers(0, 99), count=st.integers(1, 3), is_end=st.booleans())
    def tokens_come(self, which: int, count: int, is_end: bool) -> None:
        one = self.open[which % len(self.open)]
        replica = self.owner_of(one)
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
        replica = self.replicas[number]
        entry = replica.frontend.journal().get(one.rid)
        if replica.link is None or (entry is not None and replica.num_ends_due(one.rid) <= entry.is_aborted):
            return
        self.say(replica, one, [777], one.num_tokens, [])  # if it has come back since, these are of before

    # What happens to replicas

    @rule(number=st.integers(0, NUM_REPLICAS - 1), moves=st.booleans())
    def scheduler_dies(self, number: int, moves: bool) -> None:
        replica = self.replicas[number]
        if replica.link is None or replica.is_lost:
            return
        replica.link.is_open, replica.link.lost = False, PeerRestartedError("killed")
        replica.supervisor.state = "recovering"
        link, replica.link = replica.link, None
        replica.frontend.on_peer_lost(link)
        if moves and self.dispatcher.can_move(replica):
            self.dispatcher.move(replica, lost_at=now())

    @rule(number=st.integers(0, NUM_REPLICAS - 1))
    def worker_dies(self, number: int) -> None:
        replica = self.replicas[number]
        if replica.link is not None and not replica.is_lost and self.dispatcher.can_move(replica):
            self.dispatcher.move(replica, lost_at=now())

    @rule(number=st.integers(0, NUM_REPLICAS - 1))
    def comes_back(self, number: int) -> None:
        replica = self.replicas[number]
        if replica.is_lost:
            replica.num_links = 0
            replica.is_lost = False
        if replica.link is None:
            replica.supervisor.state = "running"
            replica.connect()

    @rule(number=st.integers(0, NUM_REPLICAS - 1))
    def is_given_up(self, number: int) -> None:
        replica = self.replicas[number]
        if not replica.is_lost:
            replica.link = None
            replica.frontend.fail_all(EngineDeadError("it died too often"))

    @rule(number=st.integers(0, NUM_REPLICAS - 1))
    def drains(self, number: int) -> None:
        replica = self.replicas[number]
        if not replica.is_lost and self.dispatcher.can_move(replica):
            replica.is_draining = True
            self.dispatcher.move(replica, lost_at=None)

    @rule(number=st.integers(0, NUM_REPLICAS - 1))
    def drains_no_more(self, number: int) -> None:
        self.replicas[number].is_draining = False

    # What holds

    @invariant()
    def each_request_is_in_one_place(self) -> None:
        for one in self.open:
            places = [r.number for r in self.replicas.values() if r.frontend.has(one.rid)]
            assert len(places) == 1, (one.rid, places)
            if one.mailbox.replica is not None:
                assert places == [one.mailbox.replica]
        num_known = sum(r.frontend.num_open for r in self.replicas.values())
        assert num_known == len(self.open)

    @invariant()
    def schedulers_work_on_their_journals(self) -> None:
        for replica in self.replicas.values():
            if replica.link is None or replica.is_lost:
                continue
            wanted = {rid for rid, entry in replica.frontend.journal().items() if not entry.is_aborted}
            open_rids = {one.rid for one in self.open}
            assert {rid for rid in replica.known() if rid in open_rids} == wanted
            for rid, submit in replica.known().items():
                if rid in wanted:
                    assert submit.output.size <= len(replica.frontend.journal()[rid].emitted)

    @invariant()
    def every_token_comes_once(self) -> None:
        for one in self.asked:
            tokens = [token for _, delta in one.mailbox.deltas for token in delta.tokens]
            assert tokens == list(range(one.num_tokens))

    @invariant()
    def trials_do_not_spread(self) -> None:
        """A request that may be to blame is nowhere else: the one that died, and the one that tries it."""
        for replica in self.replicas.values():
            for entry in replica.frontend.journal().values():
                assert entry.record.num_deaths == 0 or pinned(entry) or replica.frontend.has_suspects

    @invariant()
    def only_without_a_replica_requests_fail(self) -> None:
        for one in self.asked:
            if one.mailbox.error is not None:
                assert isinstance(one.mailbox.error, EngineDeadError) or "died" in str(one.mailbox.error)


def pinned(entry: Any) -> bool:
    return entry.consumer.replica is not None


TestFleetOfJournals = pytest.mark.filterwarnings("error")(FleetOfJournals.TestCase)
FleetOfJournals.TestCase.settings = settings(max_examples=examples(25, 600), stateful_step_count=30, deadline=None)


class AdoptsTwice(Dispatcher):
    def _rehome(self, source: Any, entries: Any, lost_at: Any, is_trial: bool) -> None:
        super()._rehome(source, entries, lost_at, is_trial)
        source.frontend.adopt(entries, None)


class ForgetsPins(Dispatcher):
    def move_lost(self, source: Any, entries: Any, lost_at: Any, error: BaseException) -> None:
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


def walk(dispatcher_class: type[Dispatcher], num_walks: int) -> None:
    """Events at random, the same in every run, and what holds after each of them."""
    draws = random.Random(7)
    names = ("submit", "tokens_come", "tokens_come", "late_tokens_come", "scheduler_dies", "worker_dies", "comes_back")
    names += ("is_given_up", "drains", "drains_no_more")
    values: dict[str, Any] = {
        "pin": lambda: draws.choice([None, None, *range(NUM_REPLICAS)]),
        "which": lambda: draws.randrange(100),
        "count": lambda: draws.randint(1, 3),
        "is_end": lambda: draws.random() < 0.2,
        "moves": lambda: draws.random() < 0.8,
        "number": lambda: draws.randrange(NUM_REPLICAS),
    }
    for _ in range(num_walks):
        machine = FleetOfJournals()
        machine.dispatcher_class = dispatcher_class
        machine.build()
        for _ in range(40):
            name = draws.choice(names) if machine.open else "submit"
            method = getattr(machine, name)
            method(**{one: values[one]() for one in inspect.signature(method).parameters})
            machine.each_request_is_in_one_place()
            machine.schedulers_work_on_their_journals()
            machine.every_token_comes_once()
            machine.trials_do_not_spread()
            machine.only_without_a_replica_requests_fail()


def test_walks_find_nothing() -> None:
    walk(Dispatcher, 60)


@pytest.mark.parametrize("mistaken", [AdoptsTwice, ForgetsPins, LeavesTheOldOneRunning, LosesTheOutput])
def test_planted_mistakes_are_found(mistaken: type[Dispatcher]) -> None:
    with pytest.raises((AssertionError, IndexError, KeyError)):
        walk(mistaken, 60)


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
