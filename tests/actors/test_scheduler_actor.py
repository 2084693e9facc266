"""The scheduler actor alone: real text, a scripted model, links that record what is sent and can be full."""

from __future__ import annotations

import dataclasses
import logging
import math
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import Any

import anyio
import numpy as np
import pytest

from actorllm.actors.engine_thread import HostLoop
from actorllm.actors.frontend import Delta, FrontendActor
from actorllm.actors.self_check import check_policy
from actorllm.clock import now
from actorllm.config import EngineConfig
from actorllm.errors import EngineError, PeerLostError, PeerRestartedError, RequestFailedError
from actorllm.messages import (
    NO_I32,
    Abort,
    Ask,
    LateInputs,
    Outputs,
    Reply,
    StepFailed,
    StepPlan,
    StepResult,
    Submit,
    Unblock,
)
from actorllm.scheduling.admission_policy import AdmissionGate, AdmissionPolicy
from actorllm.scheduling.policy import Admit, KeyPolicy
from actorllm.scheduling.policy_fallback import PolicyWithFallback
from actorllm.scheduling.policy_monitor import LONGEST_TIMER_S
from actorllm.types.request_end import RequestEnd
from tests.actors.scheduler_bench import VOCAB, Bench, FakeLink, running, submit
from tests.scheduling.chained_tokens import reference_stream


@pytest.fixture
def anyio_backend() -> tuple[str, dict[str, Any]]:
    return "asyncio", {"use_uvloop": True}


def stream_of(rid: int = 1, count: int = 8) -> list[int]:
    return reference_stream([0, 500 + rid], rid, count, VOCAB)


def decoded(bench: Bench, tokens: list[int]) -> str:
    tokenizer = bench.actor._tokenizer
    assert tokenizer is not None
    return tokenizer.decode(tokens, skip_special_tokens=True)


async def test_tokens_and_text_reach_the_frontend() -> None:
    async with running() as bench:
        await bench.send(submit())
        await bench.work()
        assert bench.tokens() == stream_of()
        assert [o.index.tolist() for o in bench.outputs] == [[i] for i in range(8)]
        assert decoded(bench, [501, *stream_of()]).endswith(bench.text())
        assert bench.ends() == [[1, "length", None, None]]


async def test_an_unblocked_request_runs_and_a_hopeless_one_fails() -> None:
    async with running() as bench:
        await bench.send(submit(1, blocked_on="grammar"))
        await bench.send(submit(2, blocked_on="grammar"))
        assert bench.plans == []
        await bench.send(Unblock(rid=1))
        assert len(bench.plans) > 0
        await bench.send(Unblock(rid=2, error="no such grammar"))
        await bench.work()
        assert bench.tokens() == stream_of()
        assert [2, "error", None, "no such grammar"] in bench.ends()


class Patient(KeyPolicy):
    """Admits nobody for a moment, and asks to be woken."""

    since = 0.0

    def admit(self, sequence: Any, view: Any) -> Admit:
        return Admit.ADMIT if view.now >= sequence.queued + 0.05 else Admit.WAIT

    def wake_at(self, view: Any) -> float:
        return view.now + 0.05 if view.num_waiting else float("inf")


async def test_a_policy_is_woken_when_it_asked_to_be() -> None:
    async with running(scheduling_policy="tests.actors.test_scheduler_actor:Patient") as bench:
        await bench.send(submit())
        assert bench.plans == []
        with anyio.fail_after(30):
            while not bench.plans:
                await anyio.sleep(0.005)
        await bench.work()
        assert bench.tokens() == stream_of()


async def test_nothing_is_lost_while_a_frontend_is_full_and_its_new_requests_wait() -> None:
    async with running() as bench:
        await bench.send(submit(1))
        bench.frontend.is_full = True
        await bench.send(bench.model.run(bench.plans[0]), bench.ranks[0])
        await bench.send(submit(2))
        await bench.send(submit(3))
        await bench.send(Abort(rids=np.array([2], np.int32)))
        for done in range(1, 8):
            await bench.send(bench.model.run(bench.plans[done]), bench.ranks[0])
        assert bench.outputs == []
        assert len(bench.plans) == 8, "request 1 goes on, nothing else was begun"
        bench.frontend.is_full = False
        with anyio.fail_after(30):
            while len(bench.plans) == 8:
                await anyio.sleep(0.002)
        assert bench.tokens() == stream_of(1)
        await bench.work_from(8)
        assert bench.tokens() == stream_of(1) + stream_of(3)
        assert bench.ends() == [[1, "length", None, None], [2, "abort", None, None], [3, "length", None, None]]


async def test_a_frontend_that_takes_nothing_stalls_nobody() -> None:
    async with running() as bench:
        stuck = FakeLink("attached1")
        bench.actor.on_link(stuck)  # type: ignore[arg-type]
        stuck.is_full = True
        await bench.send(submit(1, max_tokens=12), stuck)
        await bench.send(submit(1))
        await bench.work()
        assert bench.tokens() == stream_of()
        assert bench.actor.scheduler.sequence((1, 1)) is None, "it ran to its end"
        stuck.is_full = False
        with anyio.fail_after(30):
            while not stuck.sent:
                await anyio.sleep(0.002)
        assert [t for o in stuck.sent for t in o.tokens.tolist()] == stream_of(1, 12)


@pytest.mark.parametrize("verb", ["abort_all", "pause_generation"])
async def test_what_was_put_off_is_ended_as_well(verb: str) -> None:
    """It was submitted before, by a frontend that took no outputs then."""
    async with running() as bench:
        await bench.send(submit(1))
        bench.frontend.is_full = True
        await bench.work()
        await bench.send(submit(2, siblings=np.array([3], np.int32)))
        num_plans = len(bench.plans)
        answer = bench.actor.answer(verb, {"mode": "abort", "clear_cache": False})
        bench.frontend.is_full = False
        if verb == "pause_generation":
            assert await answer
            bench.actor.answer("resume_generation", {})
        with anyio.fail_after(30):
            while len(bench.ends()) < 3:
                await anyio.sleep(0.002)
        assert bench.ends() == [[1, "length", None, None], [2, "abort", None, None], [3, "abort", None, None]]
        await bench.settle()
        assert len(bench.plans) == num_plans


async def test_whoever_asks_workers_waits_as_long_as_their_step_takes() -> None:
    async with running() as bench:
        asked: list[tuple[str, float]] = []

        async def ask_all(link: Any, verb: str, timeout: float = 10.0, **arguments: Any) -> list[Any]:
            asked.append((verb, timeout))
            return [1]

        bench.actor.ask_all = ask_all  # type: ignore[method-assign]
        assert await bench.actor.answer("worker_statistics", {}) == [1]
        assert asked == [("statistics", math.inf)]


async def test_an_attached_frontend_that_only_submits_is_left_at_its_limit(monkeypatch: pytest.MonkeyPatch) -> None:
    """Who takes no outputs cannot be told that it is too much."""
    async with running(max_waiting_attached=5) as bench:
        dropped: list[str] = []

        def drop(link: Any, error: BaseException) -> None:
            dropped.append(str(error))
            bench.actor.on_peer_lost(link)

        monkeypatch.setattr(bench.actor, "drop_link", drop)
        stuck = FakeLink("attached1")
        bench.actor.on_link(stuck)  # type: ignore[arg-type]
        await bench.send(submit(1, max_tokens=50), stuck)
        await bench.send(submit(1))
        stuck.is_full = True
        for done in range(3):
            await bench.send(bench.model.run(bench.plans[done]), bench.ranks[0])
        for rid in range(2, 7):
            await bench.send(submit(rid), stuck)
            assert not dropped
        await bench.send(submit(7), stuck)
        assert dropped == ["attached1 takes no outputs and has submitted more than 5 requests meanwhile"]
        await bench.work_from(3)
        assert bench.tokens() == stream_of()
        assert bench.actor.scheduler.kv.statistics().num_free == 80


async def test_a_deadline_is_a_timer_of_the_loop() -> None:
    """Nothing arrives, and no step is planned: the end comes all the same, and the step in flight harms nobody."""
    async with running() as bench:
        await bench.send(submit(1, deadline=now() + 0.05))
        await bench.send(submit(2))
        with anyio.fail_after(30):
            while not bench.ends():
                await anyio.sleep(0.005)
        assert bench.ends() == [[1, "abort", "deadline", None]]
        assert bench.actor.next_deadline() is None
        await bench.work()
        assert bench.tokens() == stream_of(2)


async def test_a_full_frontend_that_dies_is_forgotten() -> None:
    async with running() as bench:
        stuck = FakeLink("attached1")
        bench.actor.on_link(stuck)  # type: ignore[arg-type]
        stuck.is_full = True
        await bench.send(submit(1), stuck)
        await bench.send(bench.model.run(bench.plans[0]), bench.ranks[0])
        assert bench.actor.next_deadline() is not None
        bench.actor.on_peer_lost(stuck)  # type: ignore[arg-type]
        await bench.settle()
        assert bench.actor.next_deadline() is None
        assert bench.actor.scheduler.kv.statistics().num_free == 80


async def test_late_inputs_wait_for_the_results_before_them() -> None:
    async with running() as bench:
        await bench.send(submit(needs_late_inputs=True))
        kinds = [(type(m).__name__, m.step) for m in bench.workers.sent]
        assert kinds == [("StepPlan", 1), ("LateInputs", 1), ("StepPlan", 2)], "step 2 depends on the token of step 1"
        await bench.send(bench.model.run(bench.plans[0], LateInputs(step=1)), bench.ranks[0])
        assert [m.step for m in bench.workers.sent if isinstance(m, LateInputs)] == [1, 2]


async def test_a_failure_of_any_rank_fails_the_step() -> None:
    async with running(world_size=2) as bench:
        await bench.send(submit())
        step = bench.plans[0].step
        await bench.send(StepResult(step=step, tokens=np.array([7], np.int32)), bench.ranks[0])
        assert bench.outputs == [], "one rank has not answered"
        await bench.send(StepFailed(step=step, error="rank 1 is ill"), bench.ranks[1])
        assert bench.ends() == [[1, "error", None, "rank 1 is ill"]]


@pytest.mark.parametrize("liar", [0, 1])
@pytest.mark.parametrize(
    ("said", "told"),
    [
        (StepResult(step=1, started="x"), "step 1: StepResult.started='x'"),  # type: ignore[arg-type]
        (StepResult(step=1, tokens=None), "step 1: StepResult.tokens=None"),  # type: ignore[arg-type]
        (StepFailed(step=1, error=1), "step 1: StepFailed.error=1"),  # type: ignore[arg-type]
        (StepFailed(step=1, error="planted", rows=np.array([99], np.int32)), "step 1: row [99] of a plan of 2"),
        (StepResult(step="x"), "it answered step 'x' when step 1 was to be answered"),  # type: ignore[arg-type]
    ],
    ids=lambda value: value if isinstance(value, str) else "",
)
async def test_the_rank_that_contradicts_its_plan_is_named(said: Any, told: str, liar: int) -> None:
    async with running(world_size=2) as bench:
        await bench.send(submit())
        await bench.send(StepResult(step=1, tokens=np.array([7], np.int32)), bench.ranks[1 - liar])
        await bench.send(said, bench.ranks[liar])
        assert bench.defects == [(liar, f"contradicting its plans: {told}")]
        await bench.send(StepResult(step=2), bench.ranks[liar])
        assert len(bench.defects) == 1, "nothing more of it is listened to"
        assert bench.outputs == []


@pytest.mark.parametrize(
    ("message", "told"),
    [
        (Submit(rid=1, arrival=0.0, prompt=np.array([1], np.int32), max_tokens=1), "a Submit, which is not for"),
        (StepPlan(step=1), "a StepPlan, which is not for"),
        (Reply(id=[1]), "Reply.id=[1]"),  # type: ignore[arg-type]
        (Ask(id=1, verb=None), "Ask.verb=None"),  # type: ignore[arg-type]
    ],
    ids=lambda value: value if isinstance(value, str) else "",
)
async def test_a_worker_says_nothing_but_what_is_a_workers_to_say(message: Any, told: str) -> None:
    async with running() as bench:
        assert not bench.actor.admits(bench.ranks[0], message)  # type: ignore[arg-type]
        assert not bench.actor.admits(bench.ranks[0], message), "and is not reported twice"  # type: ignore[arg-type]
        ((rank, what),) = bench.defects
        assert rank == 0
        assert what.startswith(f"contradicting its plans: it sent {told}")


async def test_what_a_worker_may_say_is_admitted() -> None:
    async with running() as bench:
        for message in (Reply(id=1 << 32, value={"a": 1}), Ask(id=1, verb="ping"), StepResult(step=1)):
            assert bench.actor.admits(bench.ranks[0], message)  # type: ignore[arg-type]
        assert bench.defects == []


async def test_a_lost_frontend_takes_its_requests_with_it_and_its_number_is_not_reused() -> None:
    async with running() as bench:
        second, third = FakeLink("frontend2"), FakeLink("frontend3")
        bench.actor.on_link(second)  # type: ignore[arg-type]
        await bench.send(submit(1, max_tokens=500), second)
        await bench.send(submit(1))
        bench.actor._inbox.append((0, submit(9)))  # has arrived, is not taken yet
        bench.actor.on_peer_lost(bench.frontend)  # type: ignore[arg-type]
        bench.actor.on_link(third)  # type: ignore[arg-type]
        await bench.settle()
        await bench.send(submit(1, seed=3), third)
        alive = [key for key in ((0, 1), (0, 9), (1, 1), (2, 1)) if bench.actor.scheduler.sequence(key) is not None]
        assert alive == [(1, 1), (2, 1)]


async def test_the_configuration_reaches_the_scheduler() -> None:
    async with running(long_prefill_token_threshold=7, async_scheduling=False) as bench:
        assert bench.actor.scheduler.limits.prefill_chunk == 7
        assert bench.actor.scheduler.ledger.depth == 1
    config = dataclasses.replace(
        bench.config, scheduler=dataclasses.replace(bench.config.scheduler, num_lookahead_tokens=3)
    )
    built, without = bench.actor._build(config), bench.actor._build(bench.config)
    assert built.kv.max_blocks_per_slot == without.kv.max_blocks_per_slot + 1, (
        "no room for more than one token of a step"
    )


async def test_a_stop_string_in_the_last_allowed_token_decides() -> None:
    async with running() as bench:
        tokens = stream_of(1, 8)
        tail = decoded(bench, tokens[-1:])
        assert tail
        assert tail not in decoded(bench, tokens[:-1])
        await bench.send(submit(stop=[tail]))
        await bench.work()
        assert bench.ends() == [[1, "stop", tail, None]]
        assert tail not in bench.text()


async def test_text_held_back_for_a_stop_string_comes_with_the_end() -> None:
    async with running() as bench:
        tokens = stream_of(1, 8)
        whole = decoded(bench, tokens)
        await bench.send(submit(stop=[decoded(bench, tokens[-1:]) + "never comes"]))
        await bench.work()
        assert bench.ends()[0][1] == "length"
        assert bench.text().endswith(whole[-3:])


async def test_stop_strings_wait_for_min_tokens() -> None:
    async with running() as bench:
        stop = decoded(bench, stream_of(1, 8)[1:2])
        await bench.send(submit(stop=[stop], min_tokens=4))
        await bench.work()
        assert len(bench.tokens()) >= 4


async def test_text_that_cannot_be_made_fails_its_request_only(monkeypatch: pytest.MonkeyPatch) -> None:
    async with running() as bench:
        await bench.send(submit(1))
        await bench.send(submit(2))

        class Broken:
            def push(self, ids: Any) -> Any:
                raise ValueError("no text today")

            finish = push

        bench.actor.scheduler.sequence((0, 1)).attachment = Broken()  # type: ignore[union-attr]
        await bench.work()
        assert [end for end in bench.ends() if end[0] == 1] == [
            [1, "error", None, "its text cannot be made: ValueError: no text today"]
        ]
        assert [t for o in bench.outputs for r, t in zip(o.rids, o.tokens, strict=False) if r == 2][-1] == stream_of(2)[
            -1
        ]


async def test_an_aborted_request_gets_an_end() -> None:
    async with running() as bench:
        await bench.send(submit(max_tokens=500))
        await bench.send(Abort(rids=np.array([1, 77], np.int32)))
        assert bench.ends() == [[1, "abort", None, None]]


# The frontend's side --------------------------------------------------------------------------------------------------


class Consumer:
    host = None
    wakes_at_end = False

    def __init__(self) -> None:
        self.deltas: list[Delta] = []
        self.error: BaseException | None = None

    def push(self, delta: Delta) -> None:
        self.deltas.append(delta)

    def fail(self, error: BaseException) -> None:
        self.error = error

    def note_version(self, num_tokens: int, version: str) -> None: ...

    def wake(self) -> None: ...


def outputs(index: int, token: int, end: str | None = None) -> Outputs:
    one = np.array([1], np.int32)
    ends = [[0, end, None, None, 0.0, 0.0, 0.0, 0.0, 0, 0, 0]] if end else []
    return Outputs(rids=one, index=np.array([index], np.int32), tokens=np.array([token], np.int32), ends=ends)


def make_frontend() -> tuple[FrontendActor, Consumer, FakeLink]:
    frontend, consumer, link = FrontendActor(), Consumer(), FakeLink("scheduler")
    frontend.on_link(link)  # type: ignore[arg-type]
    frontend.submit(lambda rid: submit(rid), consumer, lambda rid: None)
    return frontend, consumer, link


def test_an_output_applies_only_if_it_is_the_next_one() -> None:
    frontend, consumer, link = make_frontend()
    for index, token in ((0, 10), (0, 10), (1, 11), (0, 10)):
        frontend.on_message(link, outputs(index, token))  # type: ignore[arg-type]
    assert [d.tokens for d in consumer.deltas if d.tokens] == [[10], [11]]
    assert frontend._num_repeated == 2
    frontend.on_message(link, outputs(1, 11, end="length"))  # type: ignore[arg-type]
    assert consumer.deltas[-1].end is not None, "the end of a repeated output counts"
    assert consumer.deltas[-1].tokens == []


def test_missing_tokens_fail_their_request_only() -> None:
    frontend, consumer, link = make_frontend()
    frontend.on_message(link, outputs(1, 11))  # type: ignore[arg-type]
    assert isinstance(consumer.error, RequestFailedError)
    assert "output 1 came when 0 was due" in str(consumer.error)
    assert any(isinstance(m, Abort) for m in link.sent)
    frontend.on_message(link, outputs(2, 12))  # type: ignore[arg-type]


async def test_what_found_no_room_is_sent_although_nothing_is_heard() -> None:
    """A request may be as large as the outbox of the link, and those before it may have nothing to say for long."""
    frontend, consumer, link = make_frontend()
    link.sent.clear()
    link.is_full = True
    frontend._wakeup = HostLoop.current().waiter()
    frontend.is_running = True
    async with anyio.create_task_group() as group:
        group.start_soon(frontend.run)
        frontend.submit(lambda rid: submit(rid), consumer, lambda rid: None)
        frontend.abort(2)
        await anyio.wait_all_tasks_blocked()
        link.is_full = False
        while len(link.sent) < 2:
            await anyio.lowlevel.checkpoint()
        frontend.is_running = False
        frontend.wake()
    assert [type(message) for message in link.sent] == [Submit, Abort]


@pytest.mark.parametrize(("interval", "expected"), [(0, [8]), (1, [1] * 8), (3, [1, 3, 3, 1]), (99, [1, 7])])
async def test_output_that_is_not_due_crosses_no_link(interval: int, expected: list[int]) -> None:
    async with running() as bench:
        await bench.send(submit(stream_interval=interval))
        await bench.work()
        assert [len(o.tokens) for o in bench.outputs] == expected
        starts = [sum(expected[:i]) for i in range(len(expected))]
        assert [o.index.tolist() for o in bench.outputs] == [[start] for start in starts]
        assert bench.tokens() == stream_of()
        assert decoded(bench, [501, *stream_of()]).endswith(bench.text())
        assert bench.ends() == [[1, "length", None, None]]
        assert not bench.actor._renderer.output_buffer.held


async def test_a_stop_string_is_found_in_text_that_is_held_back() -> None:
    async with running() as bench:
        await bench.send(submit(2))
        await bench.work()
        text = bench.text()
    async with running() as bench:
        await bench.send(submit(2, stream_interval=0, stop=[text[6:9]]))
        await bench.work()
        assert bench.text() == text[:6]
        assert bench.ends() == [[2, "stop", text[6:9], None]]
        assert len(bench.outputs) == 1
        assert len(bench.tokens()) < 8


async def test_a_request_that_goes_on_has_had_its_first_output() -> None:
    async with running() as bench:
        before = np.array(stream_of()[:3], np.int32)
        await bench.send(submit(output=before, stream_interval=4))
        await bench.work()
        assert [o.index.tolist() for o in bench.outputs] == [[3], [7]]
        assert [len(o.tokens) for o in bench.outputs] == [4, 1]


async def test_deadlines_pass_for_those_who_wait_for_a_search_as_well() -> None:
    """A suspect is tried, and its step is long; whoever is held meanwhile has a deadline all the same."""
    async with running() as bench:
        bench.frontend = FakeLink("frontend")
        bench.frontend.generation = 2  # a scheduler died: everybody submits again
        bench.actor.on_link(bench.frontend)  # type: ignore[arg-type]
        await bench.send(submit(rid=1, num_deaths=1, is_resumed=True))
        await bench.send(submit(rid=2, is_resumed=True, deadline=now() + 0.05))
        await bench.send(Abort(rids=NO_I32))  # that was all
        assert bench.actor._probes.has_held
        ended: list[list[Any]] = []
        with anyio.fail_after(10):
            while not ended:
                await anyio.sleep(0.01)
                ended = [end for m in bench.frontend.sent if isinstance(m, Outputs) for end in m.ends]
        assert ended[0][1:3] == ["abort", "deadline"]
        assert not bench.actor._probes.has_held


def resubmitted(rid: int, num_emitted: int = 0, **columns: Any) -> Submit:
    return submit(
        rid, output=np.array(stream_of(rid)[:num_emitted], np.int32), is_resumed=True, num_losses=1, **columns
    )


@asynccontextmanager
async def after_a_death(**arguments: Any) -> AsyncIterator[Bench]:
    """As `running`, and the frontend is about to submit everything again."""
    async with running(**arguments) as bench:
        bench.frontend = FakeLink("frontend")
        bench.frontend.generation = 2
        bench.actor.on_link(bench.frontend)  # type: ignore[arg-type]
        yield bench


def told(link: FakeLink) -> list[Outputs]:
    return [message for message in link.sent if isinstance(message, Outputs)]


async def test_a_pause_waits_for_those_who_had_started_wherever_they_are() -> None:
    """Not yet submitted again, held back while others are tried, or tried: the others stay where they are."""
    async with after_a_death() as bench:
        answers: list[bool] = []

        async def pause() -> None:
            answers.append(await bench.actor.answer("pause_generation", {"mode": "wait", "clear_cache": False}))

        async with anyio.create_task_group() as tasks:
            tasks.start_soon(pause)
            await bench.settle()
            assert not answers, "there may be somebody who had started"
            await bench.send(resubmitted(1, 2, num_deaths=1, detokenize=False))
            await bench.send(resubmitted(2, 3, detokenize=False))
            await bench.send(resubmitted(3, num_deaths=1, detokenize=False))
            await bench.send(submit(4, detokenize=False))
            await bench.send(Abort(rids=NO_I32))
            assert not answers
            await bench.work()
        assert answers == [True]
        ends = {int(o.rids[end[0]]) for o in told(bench.frontend) for end in o.ends}
        assert ends == {1, 2}
        assert len(bench.actor._probes) == 2
        assert bench.actor.next_deadline() is None, "nothing is done meanwhile"
        num_plans = len(bench.plans)
        bench.actor.answer("resume_generation", {})
        await bench.settle()
        await bench.work_from(num_plans)
        streams: dict[int, list[int]] = {}
        for outputs in told(bench.frontend):
            for rid, token in zip(outputs.rids.tolist(), outputs.tokens.tolist(), strict=True):
                streams.setdefault(rid, []).append(token)
        assert streams == {1: stream_of(1)[2:], 2: stream_of(2)[3:], 3: stream_of(3), 4: stream_of(4)}
        assert not bench.actor._probes


async def test_who_is_held_back_counts_as_waiting() -> None:
    """Four slots, and two may wait: six are let in, also while nobody of them may start. Who was let in stays so."""
    async with after_a_death(max_waiting_requests=2) as bench:
        await bench.send(resubmitted(1, 2, num_deaths=1, detokenize=False))
        for rid in range(2, 7):
            await bench.send(submit(rid, detokenize=False))
        assert not told(bench.frontend)
        await bench.send(submit(7, detokenize=False))
        await bench.send(submit(8, siblings=np.array([9, 10], np.int32), detokenize=False))
        refused = [end for outputs in told(bench.frontend) for end in outputs.ends]
        assert [(RequestEnd(*end).details or {})["kind"] for end in refused] == ["overloaded"] * 4, (
            "all sequences or none"
        )
        assert refused[0][3].startswith("the engine is overloaded: 6 requests of at most 2 wait already")
        await bench.send(Abort(rids=np.array([6], np.int32)))
        await bench.send(submit(11, detokenize=False))
        assert len(bench.actor._probes) == 6
        bench.actor.scheduler.check_integrity()
        await bench.send(Abort(rids=NO_I32))
        await bench.work()
        reasons = {int(o.rids[end[0]]): end[1] for o in told(bench.frontend) for end in o.ends}
        assert reasons == dict.fromkeys((1, 2, 3, 4, 5, 11), "length") | dict.fromkeys((7, 8, 9, 10), "error") | {
            6: "abort"
        }
        bench.actor.scheduler.check_integrity()


async def test_what_is_held_back_of_a_frontend_that_is_gone_does_not_wait_any_more() -> None:
    async with after_a_death(max_waiting_requests=2) as bench:
        guest = FakeLink("attached1")
        guest.generation = 2
        bench.actor.on_link(guest)  # type: ignore[arg-type]
        await bench.send(resubmitted(1, num_deaths=1), guest)
        await bench.send(submit(2), guest)
        assert bench.actor.scheduler.statistics().num_waiting_tokens == 4
        guest.lost = PeerLostError("it left")  # type: ignore[attr-defined]
        bench.actor.on_peer_lost(guest)  # type: ignore[arg-type]
        assert bench.actor.scheduler.statistics().num_waiting_tokens == 0
        bench.actor.scheduler.check_integrity()


async def test_what_is_held_back_goes_with_its_frontend() -> None:
    async with running() as bench:
        await bench.send(submit(stream_interval=0))
        await bench.send(bench.model.run(bench.plans[0], None), bench.ranks[0])
        assert bench.actor._renderer.output_buffer.held
        bench.actor.on_peer_lost(bench.frontend)  # type: ignore[arg-type]
        assert not bench.actor._renderer.output_buffer.held


async def test_a_request_that_cannot_be_made_ends_with_the_error() -> None:
    """On the engine's loop nobody would hear of the exception."""
    frontend = FrontendActor()
    for error, expected in ((KeyError("seed"), RequestFailedError), (RequestFailedError("no"), RequestFailedError)):
        consumer = Consumer()

        def raise_it(rid: int, error: Exception = error) -> Submit:
            raise error

        frontend.submit(raise_it, consumer, lambda rid: None)
        assert isinstance(consumer.error, expected)
        assert str(error) in str(consumer.error)
    assert frontend._journal == {}


async def test_a_drain_after_a_death_waits_for_those_who_have_to_submit_again() -> None:
    """What attached programs had belongs to what there is, and what they want now is new."""
    frontend, _, first = make_frontend()
    frontend.on_message(first, outputs(0, stream_of()[0]))  # type: ignore[arg-type]
    first.lost = PeerRestartedError("killed")  # type: ignore[attr-defined]
    frontend.on_peer_lost(first)  # type: ignore[arg-type]
    second = FakeLink("scheduler")
    second.generation = 2
    async with running() as bench:
        guest, idle_guest, late_guest, gone = (FakeLink(f"attached{number}") for number in range(1, 5))
        guest.generation = idle_guest.generation = gone.generation = 2
        for link in (guest, idle_guest, late_guest, gone):
            bench.actor.on_link(link)  # type: ignore[arg-type]
        answers: list[bool] = []

        async def drain() -> None:
            answers.append(await bench.actor.answer("drain", {}))

        async with anyio.create_task_group() as tasks:
            tasks.start_soon(drain)
            await bench.settle()
            assert answers == []
            gone.lost = PeerLostError("it left")  # type: ignore[attr-defined]
            bench.actor.on_peer_lost(gone)  # type: ignore[arg-type]
            await bench.send(Abort(rids=NO_I32), idle_guest)
            assert answers == []
            frontend.on_link(second)  # type: ignore[arg-type]
            for message in second.sent:
                await bench.send(message, guest)
            await bench.send(submit(9), guest)
            assert answers == []
            await bench.work()
        assert answers == [True]
        told = [message for message in guest.sent if isinstance(message, Outputs)]
        assert [end[1:4] for end in told[0].ends] == [["error", None, told[0].ends[0][3]]]
        assert RequestEnd(*told[0].ends[0]).details == {"kind": "draining"}
        assert [t for o in told for t in o.tokens.tolist()] == stream_of()[1:]


async def test_every_frontend_knows_the_last_pause_of_all() -> None:
    """Whoever paused, and whoever resumed: no scheduler is paused because of what one of them remembers."""
    async with running() as bench:
        other = FakeLink("attached1")
        bench.actor.on_link(other)  # type: ignore[arg-type]
        await bench.actor.answer("pause_generation", {"mode": "keep", "clear_cache": False})
        late = FakeLink("attached2")
        bench.actor.on_link(late)  # type: ignore[arg-type]
        assert bench.actor.answer("resume_generation", {})
        for link in (bench.frontend, other, late):
            assert [message.mode for message in link.sent] == ["keep", None]
        assert bench.actor.answer("pause_generation", {"mode": "keep", "clear_cache": False, "is_restored": True})
        assert not bench.actor.answer("is_paused", {}), "it has been resumed since"
        frontend, _, first = make_frontend()
        for message in other.sent:
            frontend.on_message(first, message)  # type: ignore[arg-type]
        first.lost = PeerRestartedError("killed")  # type: ignore[attr-defined]
        frontend.on_peer_lost(first)  # type: ignore[arg-type]
        frontend.on_message(first, other.sent[0])  # type: ignore[arg-type]
        assert frontend._pause_mode == "keep"
    async with running() as bench:  # the next one
        arguments = {"mode": "keep", "clear_cache": False, "is_restored": True}
        assert bench.actor.answer("pause_generation", arguments), "at once: whoever tells it has yet to submit again"
        assert bench.actor.answer("is_paused", {})


async def test_what_is_known_of_a_failed_request_comes_with_its_error() -> None:
    async with running() as bench:
        await bench.send(submit(1))
        plan = bench.plans[0]
        bad = StepResult(
            step=plan.step,
            tokens=np.zeros(1, np.int32),
            nonfinite_rows=np.zeros(1, np.int32),
            nonfinite_counts=np.array([7], np.int32),
        )
        await bench.send(bad, bench.ranks[0])
        (outputs,) = bench.outputs
        frontend, consumer = FrontendActor(), Consumer()
        frontend.submit(submit, consumer, lambda rid: None)
        frontend.on_message(bench.frontend, outputs)  # type: ignore[arg-type]
        assert isinstance(consumer.error, RequestFailedError)
        assert consumer.error.end is not None
        assert consumer.error.end.num_nonfinite == 7


class Broken(KeyPolicy):
    """Refuses to work when somebody is admitted, in the middle of a step."""

    def on_admit(self, sequence: Any, view: Any) -> None:
        raise RuntimeError("no such tenant")


async def test_a_policy_that_raises_is_replaced_and_named(caplog: pytest.LogCaptureFixture) -> None:
    async with running(scheduling_policy="tests.actors.test_scheduler_actor:Broken") as bench:
        await bench.send(submit())
        await bench.work()
        assert bench.tokens() == stream_of()
        policy = bench.actor.scheduler.policy
        assert isinstance(policy, PolicyWithFallback)
        assert policy.failure == "on_admit raised RuntimeError: no such tenant"
    assert "test_scheduler_actor:Broken' failed in on_admit; 'fcfs' takes its place" in caplog.text


class Sulking(KeyPolicy):
    """Lets nobody in, ever, and asks for nothing."""

    def admit(self, sequence: Any, view: Any) -> Admit:
        return Admit.WAIT


class Shut(AdmissionPolicy):
    name = "shut"

    def admit(self, *arguments: Any) -> Admit:
        return Admit.WAIT


@pytest.mark.parametrize("argument", ["scheduling_policy", "admission_policy"])
async def test_one_that_stalls_is_replaced_and_named(argument: str, caplog: pytest.LogCaptureFixture) -> None:
    name = f"tests.actors.test_scheduler_actor:{'Sulking' if argument == 'scheduling_policy' else 'Shut'}"
    async with running(**{argument: name}) as bench:
        await bench.send(submit())
        await bench.work()
        assert bench.tokens() == stream_of()
        policy: Any = bench.actor.scheduler.policy
        assert isinstance(policy, PolicyWithFallback if argument == "scheduling_policy" else AdmissionGate)
        failure = str(policy.failure)
        assert "StalledPolicyError: it plans nothing for 1 requests that could run" in failure
    kind = argument.replace("_", " ")
    assert f"{kind} {name!r} failed" in caplog.text


async def test_a_built_in_policy_that_stalls_is_told_of_once(
    caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("actorllm.scheduling.policies.fcfs.Fcfs.admit", Sulking.admit)
    async with running() as bench:
        for rid in (1, 2, 3):
            await bench.send(submit(rid))
        assert bench.plans == []
    assert caplog.text.count("scheduling policy 'fcfs' stalls: it plans nothing for") == 1


class Restless(KeyPolicy):
    """Wants to be woken, always in the past, and lets nobody in until it was asked often enough."""

    num_asked = 0

    def admit(self, sequence: Any, view: Any) -> Admit:
        self.num_asked += 1
        return Admit.ADMIT if self.num_asked > 12 else Admit.WAIT

    def wake_at(self, view: Any) -> float:
        return float(view.now) - 1.0


async def test_one_that_asks_for_times_that_have_passed_holds_no_core_and_is_told_of(
    caplog: pytest.LogCaptureFixture,
) -> None:
    name = "tests.actors.test_scheduler_actor:Restless"
    async with running(scheduling_policy=name) as bench:
        await bench.send(submit())
        while not bench.plans:
            deadline = bench.actor.next_deadline()
            assert deadline is not None
            assert deadline - now() <= LONGEST_TIMER_S
            await anyio.sleep(max(0.0, deadline - now()))
            await bench.settle()
        await bench.work()
        assert bench.tokens() == stream_of()
    assert caplog.text.count(f"scheduling policy {name!r}: it asks to be woken 1 s ago, 10 times in a row") == 1


class LastComeFirst(KeyPolicy):
    def key(self, sequence: Any, view: Any) -> Any:
        return (-sequence.arrival_index,)


async def test_who_starves_is_told_of_with_the_name_of_the_policy(
    caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("actorllm.scheduling.policy_monitor.STARVED_S", 0.0)
    monkeypatch.setattr("actorllm.scheduling.policy_monitor.LOOK_S", 0.0)
    name = "tests.actors.test_scheduler_actor:LastComeFirst"
    async with running(scheduling_policy=name) as bench:
        for rid in range(1, 10):  # four of them run
            await bench.send(submit(rid))
        await bench.send(bench.model.run(bench.plans[0]), bench.ranks[0])
        done = 1
        while done < len(bench.plans) and "starve" not in caplog.text:
            await bench.send(bench.model.run(bench.plans[done]), bench.ranks[0])
            await bench.send(submit(20 + done))
            done += 1
        assert f"scheduling policy {name!r}: " in caplog.text
        assert bench.actor._watch.num_starving > 0
        await bench.work_from(done)


async def test_an_objective_beyond_any_step_is_told_of(
    caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("actorllm.scheduling.policy_monitor.NUM_STEPS", 5)
    async with running() as bench:
        await bench.send(submit(slo=[None, 0.001, None, 0.0]))
        for done in range(8):
            result = dataclasses.replace(bench.model.run(bench.plans[done]), started=1.0, ended=1.004)
            await bench.send(result, bench.ranks[0])
    (told,) = [record.message for record in caplog.records if "cannot be met" in record.message]
    assert told == "SLO tpot=0.001 s cannot be met: the fastest of the last 5 steps took 0.004 s"


@pytest.mark.parametrize("runner", ["generate", "pooling"])
def test_a_scheduler_can_schedule_a_request_of_its_own(runner: str, caplog: pytest.LogCaptureFixture) -> None:
    config = EngineConfig.from_arguments("storyteller", runner=runner).resolved(80)
    with caplog.at_level(logging.ERROR, "actorllm"):
        check_policy(config)
    assert caplog.records == []


async def test_generation_is_not_resumed_while_the_workers_fall_asleep() -> None:
    async with running() as bench:
        have_answered = anyio.Event()

        async def ask(*_: Any) -> list[int]:
            await have_answered.wait()
            return [0]

        bench.actor._runner.ask = ask  # type: ignore[method-assign]

        async def fall_asleep() -> None:
            await bench.actor.answer("sleep", {"level": 1, "mode": "keep"})

        async with anyio.create_task_group() as tasks:
            tasks.start_soon(fall_asleep)
            await bench.settle()
            with pytest.raises(EngineError, match="the engine sleeps"):
                bench.actor.answer("resume_generation", {})
            have_answered.set()
        await bench.send(submit())
        assert bench.plans == []
