"""What a worker that launches ahead does next, by a runner whose steps end when they are told to."""

from __future__ import annotations

import weakref
from types import SimpleNamespace
from typing import Any

import pytest

from actorllm.actors import pipeline
from actorllm.actors.heartbeat import Heartbeat
from actorllm.actors.pipeline import IDLE_S, Pipeline
from actorllm.actors.worker import WorkerActor
from actorllm.errors import EngineError
from actorllm.messages import LateInputs, StepFailed, StepPlan, StepResult
from tests.actors.launching_runner import Runner
from tests.model.driver import int32


class FakeLink:
    def __init__(self) -> None:
        self.is_open = True
        self.sent: list[Any] = []

    def send_nowait(self, message: Any) -> None:
        self.sent.append(message)

    def finish(self) -> None:
        """Nothing has arrived unnoticed."""


@pytest.fixture
def at_work(monkeypatch: pytest.MonkeyPatch) -> SimpleNamespace:
    worker = WorkerActor()
    runner: Any = Runner()
    worker.runner = runner
    worker._pipeline = Pipeline(worker)
    at_work = SimpleNamespace(worker=worker, runner=runner, link=FakeLink(), pipeline=worker._pipeline, time=100.0)
    monkeypatch.setattr(pipeline, "now", lambda: at_work.time)
    return at_work


def turn(at_work: SimpleNamespace) -> list[Any]:
    """Everything that can be done now; what was asked of the runner for it."""
    at_work.runner.asked.clear()
    while at_work.pipeline.turn():
        pass
    return list(at_work.runner.asked)


def give(at_work: SimpleNamespace, *plans: StepPlan, link: Any = None) -> None:
    for plan in plans:
        at_work.worker.on_message(link or at_work.link, plan)


def end(at_work: SimpleNamespace, step: int) -> None:
    at_work.runner.handles[step].is_done = True


def test_two_steps_are_under_way_and_reported_in_order(at_work: SimpleNamespace) -> None:
    give(at_work, StepPlan(step=1), StepPlan(step=2), StepPlan(step=3))
    assert turn(at_work) == [("execute", 1), ("execute", 2)]
    end(at_work, 2)
    assert turn(at_work) == []
    end(at_work, 1)
    assert turn(at_work) == [("finish", 1), ("finish", 2), ("execute", 3)]
    assert [message.step for message in at_work.link.sent] == [1, 2]
    assert at_work.link.sent[1].started >= at_work.link.sent[0].ended  # one after the other, as the device had them


def test_sampling_that_waits_for_late_inputs_keeps_later_plans_back(at_work: SimpleNamespace) -> None:
    give(at_work, StepPlan(step=1), StepPlan(step=2, late_slots=int32([0])))
    assert turn(at_work) == [("execute", 1), ("execute", 2)]
    end(at_work, 1)
    give(at_work, StepPlan(step=3))
    assert turn(at_work) == [("finish", 1)]
    at_work.worker.on_message(at_work.link, LateInputs(step=2))
    assert turn(at_work) == [("choose", 2, True), ("execute", 3)]


def test_sampling_that_needs_the_tokens_before_waits_for_that_step_only(at_work: SimpleNamespace) -> None:
    give(at_work, StepPlan(step=1), StepPlan(step=2, zero_blocks=int32([0])))
    assert turn(at_work) == [("execute", 1), ("execute", 2)]
    end(at_work, 1)
    assert turn(at_work) == [("finish", 1), ("choose", 2, False)]
    end(at_work, 2)
    give(at_work, StepPlan(step=3, zero_blocks=int32([0])))
    assert turn(at_work) == [("finish", 2), ("execute", 3), ("choose", 3, False)]


def test_a_plan_that_depends_on_all_results_is_launched_when_they_are_there(at_work: SimpleNamespace) -> None:
    give(at_work, StepPlan(step=1), StepPlan(step=2), StepPlan(step=3, max_drafts=3))
    assert turn(at_work) == [("execute", 1), ("execute", 2)]
    end(at_work, 1)
    assert turn(at_work) == [("finish", 1)]
    end(at_work, 2)
    assert turn(at_work) == [("finish", 2), ("execute", 3)]


def test_a_failure_is_reported_behind_the_step_in_front(at_work: SimpleNamespace) -> None:
    give(at_work, StepPlan(step=1), StepPlan(step=2, freed=int32([0])))
    assert turn(at_work) == [("execute", 1), ("execute", 2), "discard", "check"]
    assert at_work.link.sent == []
    end(at_work, 1)
    assert turn(at_work) == [("finish", 1)]
    assert [type(message) for message in at_work.link.sent] == [StepResult, StepFailed]


def test_a_worker_that_is_to_blame_itself_ends(at_work: SimpleNamespace) -> None:
    at_work.runner.is_able = False
    give(at_work, StepPlan(step=1, freed=int32([0])))
    with pytest.raises(EngineError, match="no step works any more"):
        turn(at_work)


def test_an_error_of_the_device_ends_the_worker(at_work: SimpleNamespace) -> None:
    at_work.runner.is_torn = True
    give(at_work, StepPlan(step=1, freed=int32([0])))
    with pytest.raises(RuntimeError, match="no"):
        turn(at_work)


def test_requests_of_a_scheduler_that_is_gone_are_forgotten_once_nothing_of_them_runs(at_work: SimpleNamespace) -> None:
    give(at_work, StepPlan(step=1), StepPlan(step=2))
    turn(at_work)
    at_work.link.is_open = False
    new = FakeLink()
    give(at_work, StepPlan(step=3))
    give(at_work, StepPlan(step=1), link=new)
    end(at_work, 1)
    assert turn(at_work) == [("finish", 1)]
    end(at_work, 2)
    assert turn(at_work) == [("finish", 2), "forget", ("execute", 1)]
    assert at_work.link.sent == []


def test_a_step_whose_late_inputs_will_never_come_is_dropped(at_work: SimpleNamespace) -> None:
    give(at_work, StepPlan(step=1, late_slots=int32([0])), StepPlan(step=2))
    turn(at_work)
    at_work.link.is_open = False
    new = FakeLink()
    give(at_work, StepPlan(step=1), link=new)
    assert turn(at_work) == ["forget", ("execute", 1)]
    assert at_work.worker._num_orphaned == 2


def test_of_several_ranks_each_computes_all_that_a_scheduler_has_sent(at_work: SimpleNamespace) -> None:
    """When it notices that this one is gone, another rank may be in a later step; late inputs have reached both or neither."""
    at_work.worker.is_alone = False
    give(at_work, StepPlan(step=1, late_slots=int32([0])), StepPlan(step=2), StepPlan(step=3, late_slots=int32([0])))
    give(at_work, StepPlan(step=4))
    turn(at_work)
    at_work.link.is_open = False
    at_work.worker.late_inputs[at_work.link, 1] = LateInputs(step=1)
    assert turn(at_work) == [("choose", 1, True), ("execute", 2)]
    end(at_work, 1)
    assert turn(at_work) == [("finish", 1), ("execute", 3)]
    end(at_work, 2)
    new = FakeLink()
    give(at_work, StepPlan(step=1), link=new)
    assert turn(at_work) == [("finish", 2), "forget", ("execute", 1)]
    assert at_work.link.sent == []


def test_only_the_first_rank_says_what_was_sampled(at_work: SimpleNamespace) -> None:
    at_work.worker.rank = 1
    give(at_work, StepPlan(step=1))
    turn(at_work)
    end(at_work, 1)
    turn(at_work)
    (result,) = at_work.link.sent
    assert (result.step, result.tokens.size) == (1, 0)


def test_steps_are_recorded_before_the_first_one_is_asked_for(at_work: SimpleNamespace) -> None:
    at_work.runner.wants_to_record = True
    assert turn(at_work) == ["record"]
    assert at_work.pipeline.wakes_at is None


def test_nothing_is_recorded_between_the_steps_of_a_request(at_work: SimpleNamespace) -> None:
    """Whose next plan comes when this result is known, and must not wait."""
    at_work.runner.wants_to_record = True
    give(at_work, StepPlan(step=1))
    assert turn(at_work) == [("execute", 1)]
    assert at_work.pipeline.wakes_at is None
    at_work.time += 1.0
    end(at_work, 1)
    assert turn(at_work) == [("finish", 1)]
    assert at_work.pipeline.wakes_at == at_work.time + IDLE_S
    give(at_work, StepPlan(step=2))
    assert turn(at_work) == [("execute", 2)]
    end(at_work, 2)
    assert turn(at_work) == [("finish", 2)]
    at_work.time = at_work.pipeline.wakes_at
    assert turn(at_work) == ["record"]


async def test_a_worker_that_nobody_wakes_records_when_it_is_idle(
    at_work: SimpleNamespace, monkeypatch: pytest.MonkeyPatch
) -> None:
    worker, waited = at_work.worker, []

    async def wait(until: float | None = None) -> bool:
        waited.append(until)
        if until is None:
            worker.is_running = False
        else:
            at_work.time = until
        return False

    monkeypatch.setattr(worker, "wait", wait)
    monkeypatch.setattr(worker, "wake", lambda: None)
    give(at_work, StepPlan(step=1))
    turn(at_work)
    end(at_work, 1)
    turn(at_work)
    at_work.runner.wants_to_record = worker.is_running = True
    at_work.runner.asked.clear()
    await at_work.pipeline.run()
    assert waited == [100.0 + IDLE_S, None]
    assert at_work.runner.asked == ["record"]


@pytest.mark.parametrize("is_torn", [False, True])
def test_a_step_that_fails_for_nobody_ends_no_worker_that_can_go_on(at_work: SimpleNamespace, is_torn: bool) -> None:
    at_work.runner.wants_to_record, at_work.runner.can_record, at_work.runner.is_torn = True, False, is_torn
    if is_torn:
        with pytest.raises(RuntimeError, match="no"):
            turn(at_work)
    else:
        assert turn(at_work) == ["record"]


def test_who_waits_for_a_step_does_not_hold_it(at_work: SimpleNamespace) -> None:
    """The thread may still be about to wait when the loop has found the step done and reported it."""
    give(at_work, StepPlan(step=1))
    turn(at_work)
    waits = at_work.pipeline._awaited.get_nowait()
    handle = weakref.ref(at_work.runner.handles[1])
    end(at_work, 1)
    turn(at_work)
    at_work.runner.handles.clear()
    assert waits is not None
    assert handle() is None


def test_the_step_under_way_is_watched_again_after_a_control(at_work: SimpleNamespace) -> None:
    at_work.worker.heartbeat = Heartbeat.of_thread()
    give(at_work, StepPlan(step=3))
    turn(at_work)
    at_work.worker.answer("start_profile", {})
    assert at_work.worker.heartbeat.read().step == 3
    end(at_work, 3)
    turn(at_work)
    assert at_work.worker.heartbeat.read().step == 0
