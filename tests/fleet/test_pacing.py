"""What moves is sent on in the order of its objectives, as fast as the promises of others allow."""

from __future__ import annotations

import itertools
import math
from dataclasses import replace
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from actorllm.actors.frontend import RETRY_S, FrontendActor, JournalEntry
from actorllm.actors.scheduler import SUSPECTS_EXPECTED_S
from actorllm.client.stream import Mailbox, Sibling
from actorllm.clock import now
from actorllm.errors import PeerRestartedError
from actorllm.fleet import dispatcher as module
from actorllm.fleet import replica as replica_module
from actorllm.fleet.dispatcher import SUSPECTS_PACED_S, Dispatcher
from actorllm.fleet.pacing import due, room, urgency
from actorllm.fleet.replica import UNSEEN_S
from actorllm.messages import Abort, Outputs, Submit
from actorllm.scheduling.router import VIEW_AGE_S, LearntSteps, ReplicaView, make_router
from actorllm.types.objective import SLO
from tests.fleet.fake_replica import END, STEPS, FakeReplica, new_fleet


def ask(dispatcher: Dispatcher, replica: int, num_prompt: int = 100, **more: Any) -> int:
    mailbox, rids = Mailbox(), list[int]()
    mailbox.replica = replica

    def make(rid: int) -> Submit:
        prompt = np.zeros(num_prompt, np.int32)
        slo = more.pop("slo", None)
        fields = None if slo is None else slo.to_fields()
        return Submit(rid=rid, arrival=now(), prompt=prompt, max_tokens=99, slo=fields, **more)

    dispatcher.submit(make, mailbox, rids.append)
    mailbox.replica = None  # from here on it may move
    return rids[0]


def ask_several(dispatcher: Dispatcher, replica: int, n: int) -> list[int]:
    mailbox, rids = Mailbox(), list[int]()
    mailbox.replica = replica

    def make(rid: int) -> Submit:
        return Submit(rid=rid, arrival=now(), prompt=np.zeros(100, np.int32), max_tokens=99)

    dispatcher.submit_several(make, [Sibling(mailbox, index, lambda mailbox: None) for index in range(n)], rids.append)
    mailbox.replica = None
    return rids


def say(replica: FakeReplica, rid: int, index: int, ends: list[Any] | None = None) -> None:
    one = np.array([rid], np.int32)
    message = Outputs(rids=one, index=one * 0 + index, tokens=one * 0, ends=ends or [], emitted=now())
    replica.frontend.on_message(replica.link, message)  # type: ignore[arg-type]
    replica.frontend.on_batch()


def sent(replica: FakeReplica) -> list[int]:
    assert replica.link is not None
    return [message.rid for message in replica.link.sent if isinstance(message, Submit)]


def survivor(dispatcher: Dispatcher, replicas: list[FakeReplica], tpot: float | None) -> int:
    """A stream of replica 1, which has had its first token."""
    rid = ask(dispatcher, 1, slo=None if tpot is None else SLO(tpot=tpot))
    say(replicas[1], rid, 0)
    return rid


def test_without_promises_everything_moves_at_once() -> None:
    dispatcher, replicas = new_fleet()
    survivor(dispatcher, replicas, None)
    moving = [ask(dispatcher, 0) for _ in range(5)]
    assert dispatcher.move(replicas[0], None) == 5  # type: ignore[arg-type]
    assert sent(replicas[1])[1:] == moving


@pytest.mark.parametrize("is_slow", [False, True])
def test_what_moves_counts_for_its_output_and_for_its_sequences(is_slow: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    """All of it is computed again, so the long one has a replica for itself. is_slow: views are old before all is routed."""
    if is_slow:
        clock = itertools.count(now(), 2 * VIEW_AGE_S)
        monkeypatch.setattr(module, "now", lambda: next(clock))
    dispatcher, replicas = new_fleet(3, make_router("seconds"))
    long, *short = [ask(dispatcher, 0) for _ in range(3)]
    for index in range(400):
        say(replicas[0], long, index)
    assert dispatcher.move(replicas[0], None) == 3  # type: ignore[arg-type]
    assert [sent(replica) for replica in replicas[1:]] == [[long], short]
    dispatcher, replicas = new_fleet(3, make_router("seconds"))
    siblings = ask_several(dispatcher, 0, 3)
    alone = [ask(dispatcher, 0) for _ in range(2)]
    dispatcher.move(replicas[0], None)  # type: ignore[arg-type]
    assert [sent(replica) for replica in replicas[1:]] == [siblings, alone]


@pytest.mark.parametrize("has_died", [False, True])
def test_the_tightest_comes_first_and_steps_stay_within_the_promise(has_died: bool) -> None:
    """At 26 ms a step has room for 250 tokens: two at a time, and the next when one of them has had a token, or its end."""
    dispatcher, replicas = new_fleet()
    survivor(dispatcher, replicas, 0.026)
    loose = [ask(dispatcher, 0) for _ in range(2)]
    tight = ask(dispatcher, 0, slo=SLO(ttft=0.5))
    urgent = ask(dispatcher, 0, deadline=now() + 0.2)
    order = [urgent, tight, *loose]
    dispatcher.move(replicas[0], now() if has_died else None)  # type: ignore[arg-type]
    assert sent(replicas[1])[1:] == order[:2]
    assert dispatcher.num_open == 5
    say(replicas[1], urgent, 0)
    assert sent(replicas[1])[1:] == order[:3]
    say(replicas[1], tight, 0, [END])
    assert sent(replicas[1])[1:] == order


def test_one_is_always_under_way_and_each_can_be_ended() -> None:
    """However tight a promise is, what moves is not starved; an abort reaches one that was not sent yet."""
    dispatcher, replicas = new_fleet()
    survivor(dispatcher, replicas, 0.0001)
    moving = [ask(dispatcher, 0) for _ in range(4)]
    dispatcher.move(replicas[0], None)  # type: ignore[arg-type]
    assert sent(replicas[1])[1:] == moving[:1]
    dispatcher.abort(moving[2])
    assert sent(replicas[1])[1:] == [moving[0], moving[2]]
    assert [m.rids.tolist() for m in replicas[1].link.sent if isinstance(m, Abort)] == [[moving[2]]]  # type: ignore[union-attr]
    say(replicas[1], moving[2], 0, [END])
    say(replicas[1], moving[0], 0)
    assert sent(replicas[1])[-1] == moving[1]
    replicas[1].connect()
    assert set(sent(replicas[1])) == {1, moving[0], moving[1], moving[3]}, "a new scheduler gets the journal"
    say(replicas[1], moving[1], 0)
    assert len(sent(replicas[1])) == 4


def test_one_whose_tokens_come_at_its_end_does_not_hold_the_others_up(monkeypatch: pytest.MonkeyPatch) -> None:
    """Whether it has been computed again is not seen."""
    dispatcher, replicas = new_fleet()
    survivor(dispatcher, replicas, 0.0001)
    moving = [ask(dispatcher, 0, stream_interval=0), ask(dispatcher, 0), ask(dispatcher, 0)]
    dispatcher.move(replicas[0], None)  # type: ignore[arg-type]
    replicas[1].frontend.on_batch()
    assert sent(replicas[1])[1:] == moving[:1]
    for late in (2, 4):
        monkeypatch.setattr(replica_module, "now", lambda late=late: now() + late * UNSEEN_S)
        replicas[1].frontend.on_batch()
        assert sent(replicas[1])[1:] == moving[:2], "and the next one is seen"


def test_what_a_scheduler_was_not_sent_yet_is_no_suspect_of_its_death() -> None:
    dispatcher, replicas = new_fleet()
    survivor(dispatcher, replicas, 0.0001)
    for _ in range(3):
        ask(dispatcher, 0)
    dispatcher.move(replicas[0], None)  # type: ignore[arg-type]
    target, link = replicas[1].frontend, replicas[1].link
    assert link is not None
    target.on_batch()
    held = {rid for rid, entry in target.journal().items() if entry in target.held}
    assert len(held) == 2
    link.is_open, link.lost = False, PeerRestartedError("killed")  # type: ignore[attr-defined]
    target.on_peer_lost(link)  # type: ignore[arg-type]
    assert {rid for rid, entry in target.journal().items() if not entry.record.num_waited_deaths} == held


def test_a_program_that_has_joined_sends_suspects_while_schedulers_believe_it(monkeypatch: pytest.MonkeyPatch) -> None:
    """What it brings later counts as a request that no replica has died of."""
    assert SUSPECTS_PACED_S < SUSPECTS_EXPECTED_S
    dispatcher, replicas = new_fleet(3)
    survivor(dispatcher, replicas, 0.0001)
    moving = [ask(dispatcher, 0) for _ in range(3)]
    of_drain = [ask(dispatcher, 2) for _ in range(2)]
    dispatcher.share(SimpleNamespace(has_others=False), 1)  # type: ignore[arg-type]
    replicas[0].is_draining = replicas[2].is_draining = True
    dispatcher.move(replicas[0], now())  # type: ignore[arg-type]
    dispatcher.move(replicas[2], None)  # type: ignore[arg-type]
    assert sent(replicas[1])[1:] == moving[:1]
    monkeypatch.setattr(replica_module, "now", lambda: now() + SUSPECTS_PACED_S)
    replicas[1].frontend.on_batch()
    assert sent(replicas[1])[1:] == moving, (
        "what another replica was drained of neither delays them nor comes with them"
    )
    for rid in moving:
        say(replicas[1], rid, 0)
    assert sent(replicas[1])[1:] == [*moving, of_drain[0]]


def test_the_tightest_of_several_moves_comes_first() -> None:
    dispatcher, replicas = new_fleet(3)
    survivor(dispatcher, replicas, 0.0001)
    loose = [ask(dispatcher, 0) for _ in range(3)]
    tight = ask(dispatcher, 2, slo=SLO(ttft=0.5))
    replicas[0].is_draining = replicas[2].is_draining = True
    dispatcher.move(replicas[0], None)  # type: ignore[arg-type]
    dispatcher.move(replicas[2], None)  # type: ignore[arg-type]
    for rid in (loose[0], tight, loose[1]):
        assert sent(replicas[1])[-1] == rid
        say(replicas[1], rid, 0)
    assert sent(replicas[1])[1:] == [loose[0], tight, *loose[1:]]


def test_what_is_to_end_at_once_does_not_wait_for_room(monkeypatch: pytest.MonkeyPatch) -> None:
    """It was aborted before it moved, or its deadline has passed."""
    dispatcher, replicas = new_fleet()
    survivor(dispatcher, replicas, 0.0001)
    first, second, aborted = [ask(dispatcher, 0, slo=SLO(ttft=0.1 * n)) for n in range(1, 4)]
    dispatcher.abort(aborted)
    dispatcher.move(replicas[0], None)  # type: ignore[arg-type]
    assert sent(replicas[1])[1:] == [first, aborted]
    assert set(replicas[1].known()) == {1, first}
    held = replicas[1].frontend.journal()[second]
    held.submit = replace(held.submit, deadline=now())
    monkeypatch.setattr(replica_module, "now", lambda: now() + RETRY_S)
    replicas[1].frontend.on_batch()
    assert sent(replicas[1])[1:] == [first, aborted, second]


def test_an_abort_of_what_was_aborted_and_is_held_reaches_its_scheduler() -> None:
    dispatcher, replicas = new_fleet()
    survivor(dispatcher, replicas, 0.0001)
    first, held = [ask(dispatcher, 0) for _ in range(2)]
    dispatcher.move(replicas[0], None)  # type: ignore[arg-type]
    replicas[1].frontend.journal()[held].is_aborted = True
    dispatcher.abort(held)
    assert sent(replicas[1])[1:] == [first, held]
    assert held not in replicas[1].known()


def test_what_is_held_takes_no_room() -> None:
    """Of the context that has yet to come no step is longer: two at a time are within the promise, however many wait."""
    dispatcher, replicas = new_fleet()
    for replica in replicas:
        replica.steps = LearntSteps((0.001, 0.0001, 0.0001, 0.000002), (1000.0, 10.0, 10.0, 10.0))
    survivor(dispatcher, replicas, 0.026)
    moving = [ask(dispatcher, 0) for _ in range(60)]
    for rid in moving:
        say(replicas[0], rid, 0)
    dispatcher.move(replicas[0], None)  # type: ignore[arg-type]
    assert sent(replicas[1])[1:] == moving[:2]


def test_the_room_is_not_looked_at_for_each_token_of_others(monkeypatch: pytest.MonkeyPatch) -> None:
    dispatcher, replicas = new_fleet()
    alive = survivor(dispatcher, replicas, 0.0001)
    moving = [ask(dispatcher, 0) for _ in range(3)]
    looks: list[float] = []
    monkeypatch.setattr(dispatcher, "_room_at", lambda target: looks.append(at) or 0.0)
    at = now()
    monkeypatch.setattr(replica_module, "now", lambda: at)
    dispatcher.move(replicas[0], None)  # type: ignore[arg-type]
    num_looks = len(looks)
    for index in range(1, 20):
        say(replicas[1], alive, index)
    assert len(looks) == num_looks
    at += 1.01 * RETRY_S  # not less, however large the clock is
    say(replicas[1], alive, 20)
    assert len(looks) == num_looks + 1
    say(replicas[1], moving[0], 0)
    assert sent(replicas[1])[1:] == moving[:2], "but when one is through"


def test_one_that_comes_back_before_anything_of_it_is_sent_again() -> None:
    """Else it would wait for itself."""
    dispatcher, replicas = new_fleet()
    survivor(dispatcher, replicas, 0.0001)
    moving = ask(dispatcher, 0)
    dispatcher.move(replicas[0], None)  # type: ignore[arg-type]
    frontend = replicas[1].frontend
    taken = frontend.surrender(lambda entry: entry.submit.rid == moving)
    frontend.adopt_paced(taken, lambda: 0.0)
    assert sent(replicas[1])[1:] == [moving, moving]


@pytest.mark.anyio
async def test_a_sleep_is_meant_for_what_is_held_as_well(monkeypatch: pytest.MonkeyPatch) -> None:
    async def ask_scheduler(self: FrontendActor, verb: str, **arguments: Any) -> int:
        return 0

    monkeypatch.setattr(FrontendActor, "ask_scheduler", ask_scheduler)
    dispatcher, replicas = new_fleet()
    survivor(dispatcher, replicas, 0.0001)
    moving = [ask(dispatcher, 0) for _ in range(3)]
    dispatcher.move(replicas[0], None)  # type: ignore[arg-type]
    await replicas[1].frontend.ask_scheduler("sleep", level=1, mode="abort")
    assert sent(replicas[1])[1:] == moving


def test_what_was_not_sent_can_move_on() -> None:
    dispatcher, replicas = new_fleet()
    survivor(dispatcher, replicas, 0.0001)
    moving = [ask(dispatcher, 0) for _ in range(3)]
    dispatcher.move(replicas[0], None)  # type: ignore[arg-type]
    before = len(sent(replicas[0]))
    dispatcher.move(replicas[1], None)  # type: ignore[arg-type]
    for rid in moving:
        say(replicas[0], rid, 0, [END])  # of the first stay, which was aborted
    assert set(sent(replicas[0])[before:]) >= set(moving[1:2])
    for _ in range(4):
        for rid in sent(replicas[0])[before:]:
            entry = replicas[0].frontend.journal().get(rid)
            if entry is not None:
                say(replicas[0], rid, len(entry.emitted))
    assert sorted(sent(replicas[0])[before:]) == sorted({1, *moving})
    assert not replicas[0].frontend.arriving


def entry(slo: SLO | None, arrival: float, num_tokens: int = 0) -> JournalEntry:
    fields = None if slo is None else slo.to_fields()
    made = JournalEntry(
        Submit(rid=1, arrival=arrival, prompt=np.zeros(10, np.int32), max_tokens=9, slo=fields), Mailbox()
    )
    if num_tokens:
        made.emitted, made.first_token = [0] * num_tokens, arrival + 1.0
    return made


def test_what_is_due_is_told_by_the_clock_of_the_objective() -> None:
    assert due(entry(None, 5.0)) == math.inf
    assert due(entry(SLO(ttft=2.0), 5.0)) == 7.0
    assert due(entry(SLO(ttft=2.0, ttft_per_prompt_token=0.1), 5.0)) == 8.0
    assert due(entry(SLO(tpot=0.5), 5.0, num_tokens=4)) == 8.0
    assert due(entry(SLO(tpot=0.5, e2e=2.5), 5.0, num_tokens=4)) == 7.5
    assert urgency(entry(None, 1.0)) < urgency(entry(None, 2.0))


@given(
    tpots=st.lists(st.floats(0.002, 0.5), max_size=4),
    ttfts=st.lists(st.floats(0.01, 2.0), max_size=3),
    num_waiting=st.integers(0, 4000),
    rows=st.integers(0, 100),
)
def test_the_room_is_the_largest_that_keeps_the_promises(
    tpots: list[float], ttfts: list[float], num_waiting: int, rows: int
) -> None:
    view = ReplicaView(0, rows, num_waiting_tokens=num_waiting, step_seconds=STEPS)
    survivors = [entry(SLO(tpot=tpot), 0.0, 3) for tpot in tpots] + [entry(SLO(ttft=ttft), 100.0) for ttft in ttfts]
    found = room(view, survivors, at=100.0)
    if not survivors:
        assert found == math.inf
        return
    waits = [0.0] if not num_waiting else [math.ceil(num_waiting / (2048 - rows)) * 0.001 + num_waiting * 0.0001]
    limit = min([*tpots, *(ttft - waits[0] for ttft in ttfts)])
    if found < math.inf:
        assert found == 0 or STEPS(found, rows, 0) <= limit + 1e-9
        assert STEPS(found + 1, rows, 0) > limit - 1e-9
    else:
        assert STEPS(2048, rows, 0) <= limit + 1e-9


def test_a_promise_of_the_whole_request_is_kept_as_well() -> None:
    """Nine tokens have 1 ms each; of the 50 ms that are left until then, a step has the rest."""
    view = ReplicaView(0, step_seconds=STEPS)
    assert room(view, [entry(SLO(e2e=1.0), 99.05)], at=100.0) == pytest.approx(400, abs=1)
    assert room(view, [entry(SLO(e2e=1.0), 99.05, 4)], at=100.0) == pytest.approx(440, abs=1)
    assert room(view, [entry(SLO(e2e=1.0), 99.0095)], at=100.0) == 0, "there is time for its own steps only"
    assert room(view, [entry(SLO(e2e=1.0), 99.005)], at=100.0) == math.inf, "it may be broken in any case"


@pytest.mark.parametrize("slo", [SLO(ttft=1.0), SLO(e2e=1.0)])
def test_a_promise_that_is_broken_holds_nothing_up(slo: SLO) -> None:
    view = ReplicaView(0, step_seconds=STEPS)
    assert room(view, [entry(slo, 98.0)], at=100.0) == math.inf
    kept = [entry(SLO(tpot=0.011), 98.0, 3)]
    assert room(view, [entry(slo, 98.0), *kept], at=100.0) == room(view, kept, at=100.0)


def test_nothing_is_held_where_step_times_are_not_known() -> None:
    assert room(ReplicaView(0), [entry(SLO(tpot=0.001), 0.0, 2)], 0.0) == math.inf
    with pytest.raises(AssertionError):
        assert room(ReplicaView(0, step_seconds=STEPS), [entry(SLO(tpot=0.001), 0.0, 2)], 0.0) == math.inf
