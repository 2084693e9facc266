"""Why requests are late, on runs whose causes are known because they were made: steps of a second each, or nearly."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

import numpy as np
import pytest

from actorllm.errors import ConfigError
from actorllm.messages import Submit
from actorllm.scheduling.cost_model import LinearModel, Regime, preset
from actorllm.scheduling.loading import load_policy
from actorllm.scheduling.policy import Admit, KeyPolicy, PlanPolicy, View
from actorllm.scheduling.sequence import Sequence
from actorllm.scheduling.step_packing import KeyPlanner
from actorllm.scheduling.telemetry.recording import Entry, RecordedScheduler
from actorllm.slo.explanation import Explanation, chosen_request, explain, worst_request
from actorllm.slo.journal import Journal, run_of_recording
from actorllm.slo.simulator import EngineShape, SimulatedRun, simulate
from actorllm.slo.step_fit import RecordingFit
from actorllm.slo.workload import Workload, assign_classes, make_workload, synthetic
from actorllm.types.objective import SLO, RequestClass

SHAPE = EngineShape(
    num_blocks=128, max_num_seqs=8, max_num_batched_tokens=256, max_model_len=2048, depth=1, enable_prefix_caching=False
)
SECOND = LinearModel((Regime(math.inf, (1.0, 0.0, 0.0, 0.0, 0.0, 0.0)),), "constant")
BY_ROW = LinearModel((Regime(math.inf, (1.0, 0.01, 0.125, 0.0, 0.0, 0.0)),), "by row")
PROMISE = RequestClass("ls", SLO(ttft=1.5, tpot=1.2), True)


def requests(*rows: tuple[float, int, int]) -> Workload:
    """(arrival, prompt, output) of each."""
    arrival, prompt, output = (np.array(column) for column in zip(*rows, strict=True))
    workload = make_workload(arrival.astype(float), (prompt.astype(np.int32), output.astype(np.int32)))
    return assign_classes(workload, [(PROMISE, 1)])


def explained(
    row: int,
    workload: Workload,
    shape: EngineShape = SHAPE,
    model: Any = SECOND,
    policy: str | Callable[[], PlanPolicy] = "fcfs",
    **arguments: Any,
) -> tuple[Explanation, dict[str, float]]:
    journal = Journal(frozenset({(0, row)}))
    run = simulate(workload, shape, model, policy=policy, make_scheduler=journal.scheduler_maker(shape), **arguments)
    assert_unchanged(run, simulate(workload, shape, model, policy=policy, **arguments))
    found = explain(row, run.timeline, workload.classes, workload.class_ids, journal, model)
    timeline = run.timeline
    if math.isfinite(timeline.first_token[row]):
        assert found.ttft == pytest.approx(timeline.ttft[row]), "nothing is left over"
        after = timeline.last_token[row] - timeline.first_token[row]
        assert sum(part.seconds for part in found.decoding) == pytest.approx(after)
    return found, {part.cause: round(part.seconds, 6) for part in (*found.waiting_and_prompt, *found.decoding)}


def assert_unchanged(run: SimulatedRun, plain: SimulatedRun) -> None:
    """Being looked at changes nothing."""
    np.testing.assert_array_equal(run.timeline.end, plain.timeline.end)
    assert run.num_steps_skipped == plain.num_steps_skipped


def test_a_request_alone_has_nobody_to_blame() -> None:
    found, causes = explained(0, requests((2.0, 100, 4)))
    assert causes == {"own prompt": 1.0, "own tokens": 3.0}
    assert found.misses == ()
    assert "kept all that it was promised" in str(found)


@pytest.mark.parametrize("policy", ["fcfs", "vtc"])
def test_the_way_to_the_client_is_a_cause_of_its_own(policy: str) -> None:
    """Under vtc every step is planned; under fcfs most decode steps are not, and the journal knows them from the timeline."""
    model = replace(SECOND, deliver_s=0.25)
    workload = requests((2.0, 100, 60))
    found, causes = explained(0, workload, model=model, policy=policy)
    assert causes == {"own prompt": 1.0, "delivery": 0.25, "own tokens": 59.0}
    assert found.ttft == 1.25
    journal = Journal()
    run = simulate(workload, SHAPE, model, policy=policy, make_scheduler=journal.scheduler_maker(SHAPE))
    assert (run.num_steps_skipped > 0) == (policy == "fcfs")
    steps = journal.table(run.timeline)
    assert (steps.end - steps.start).tolist() == pytest.approx([1.0] * 60)
    assert steps.end[-1] == pytest.approx(run.timeline.last_token[0] - 0.25)


def test_waiting_for_a_step_and_for_the_prompts_of_others() -> None:
    """Steps from 0: one prompt fills each."""
    found, causes = explained(2, requests((0.0, 256, 1), (0.25, 256, 1), (0.5, 256, 1)))
    assert causes == {"step under way": 0.5, "prompts": 1.0, "own prompt": 1.0}
    (miss,) = found.misses
    assert (miss.promise, miss.limit, miss.took) == ("ttft", 1.5, 2.5)
    assert miss.causes[0].cause == "prompts"
    text = str(found)
    assert "MISSED ttft: 2.50 s instead of 1.50 s, 1.00 s too long" in text
    assert "the prompts of others were served first; without it the promise had been kept" in text
    assert "256 tokens of 1 others" in text


def test_who_was_overtaken_is_told() -> None:
    text = str(explained(1, requests((0.0, 256, 1), (0.1, 600, 1), (0.2, 256, 1), (0.3, 256, 1)), policy="srpf")[0])
    assert "(512 tokens of 2 others, 2 of which came after it)" in text


def test_waiting_for_a_slot() -> None:
    _, causes = explained(1, requests((0.0, 10, 5), (0.5, 10, 1)), replace(SHAPE, max_num_seqs=1))
    assert causes == {"step under way": 0.5, "slots": 4.0, "own prompt": 1.0}


def test_waiting_for_blocks() -> None:
    found, causes = explained(1, requests((0.0, 1200, 3), (0.5, 1000, 1)))
    assert causes["blocks"] >= 5.0
    assert found.misses[0].causes[0].cause == "blocks"
    assert "needed)" in str(found)


def test_a_long_prompt_in_chunks() -> None:
    found, causes = explained(0, requests((0.0, 600, 2)))
    assert causes == {"own prompt": 1.0, "chunking": 2.0, "own tokens": 1.0}
    assert found.misses[0].causes[0].cause == "chunking"
    assert [what for _, what in found.steps if what.startswith("chunk ")][2].startswith("chunk 3 of 3: 88 tokens")


def test_batch_mates_of_a_prompt_and_of_tokens() -> None:
    """A step takes 1 s, 0.125 s for each decode row and 0.01 s for each prompt token."""
    workload = requests((0.0, 10, 40), (0.0, 10, 40), (10.0, 20, 5), (14.0, 100, 1))
    found, causes = explained(2, workload, model=BY_ROW)
    assert causes["own prompt"] == pytest.approx(1.2)
    assert causes["mates while prefilling"] == pytest.approx(0.25), "two decode rows"
    assert causes["own tokens"] == pytest.approx(4 * 1.125)
    assert causes["decode mates"] == pytest.approx(4 * 0.25)
    assert causes["prompts of mates"] == pytest.approx(1.0), "the prompt of the last one"
    assert "100 prompt tokens of others" in str(found)
    assert [miss.promise for miss in found.misses] == ["ttft", "tpot (mean gap)", "deadline of the last token"]


def test_a_preemption_for_want_of_blocks() -> None:
    found, causes = explained(1, requests((0.0, 1000, 100), (0.0, 1000, 100)))
    assert causes["preemption"] > 20
    assert "is preempted (those who run needed its KV blocks)" in str(found)
    assert found.misses[-1].causes[0].cause in ("preemption", "mates while prefilling", "prompts")


def test_a_preemption_for_somebody_urgent() -> None:
    urgent = RequestClass("urgent", SLO(ttft=9.0), priority=-1)
    workload = replace(
        requests((0.0, 10, 20), (2.5, 10, 3)), classes=(PROMISE, urgent), class_ids=np.array([0, 1], np.int16)
    )
    found, causes = explained(0, workload, replace(SHAPE, max_num_seqs=1), policy="priority")
    assert causes["preemption"] >= 3.0
    assert "is preempted (displaced for request 1)" in str(found)


class Reluctant(KeyPolicy):
    """Nobody starts before 5."""

    def admit(self, sequence: Sequence, view: View) -> Admit:
        return Admit.ADMIT if view.now >= 5 or sequence.arrival_index == 0 else Admit.WAIT

    def wake_at(self, view: View) -> float:
        return 5.0 if view.now < 5 else math.inf


def test_a_policy_that_holds_back() -> None:
    _, causes = explained(1, requests((0.0, 10, 9), (0.5, 10, 1)), policy=lambda: KeyPlanner(Reluctant()))
    assert causes == {"step under way": 0.5, "policy": 4.0, "own prompt": 1.0}


class Never(KeyPolicy):
    """Only the first one starts."""

    def admit(self, sequence: Sequence, view: View) -> Admit:
        return Admit.ADMIT if sequence.arrival_index == 0 else Admit.WAIT


def test_a_policy_that_stalls() -> None:
    workload = requests((0.0, 10, 3), (0.5, 10, 1), (9.0, 10, 1), (10.0, 10, 1))
    found, causes = explained(1, workload, policy=lambda: KeyPlanner(Never()))
    assert causes == {"step under way": 0.5, "policy": 9.0}
    assert found.misses[0].causes[0].cause == "policy"
    assert "has waited all the time, 9.50 s, and is still waiting when the run ends" in str(found)
    found, causes = explained(2, workload, policy=lambda: KeyPlanner(Never()))
    assert causes == {"policy": 1.0}
    assert "waits 1.00 s without any step: the policy or the admission held it back" in str(found)
    text = str(explained(3, workload, policy=lambda: KeyPlanner(Never()))[0])
    assert (
        "still waiting when the run ends; nothing is planned for it: the policy or the admission held it back" in text
    )


class Skips(KeyPolicy):
    """Every other step is without the first decode row, while there are several."""

    def __init__(self) -> None:
        self.turn = 0

    def decode_mask(self, view: View) -> Any:
        self.turn += 1
        mask = np.ones(view.decode_slots.size, np.bool_)
        mask[:1] = self.turn % 2 == 0 or mask.size < 2
        return mask


def test_steps_that_leave_a_request_out() -> None:
    _, causes = explained(0, requests((0.0, 10, 5), (0.0, 10, 30)), policy=lambda: KeyPlanner(Skips()))
    assert causes["left out"] >= 3.0
    assert causes["own tokens"] == pytest.approx(4.0)


def test_decode_steps_made_at_once_are_told_apart_all_the_same() -> None:
    workload = assign_classes(synthetic(60, 3.0, seed=3), [(PROMISE, 1)])
    shape = EngineShape(num_blocks=4000, max_num_batched_tokens=512, enable_prefix_caching=False)
    model = preset("a100-llama-3-8b")
    for row in (5, 30, 59):
        _, fast = explained(row, workload, shape, model, policy="edf")
        _, slow = explained(row, workload, shape, model, policy="edf", skip=False)
        assert fast == pytest.approx(slow, abs=1e-5)


def test_requests_are_chosen_by_number_by_what_was_worst_and_by_name() -> None:
    workload = requests((0.0, 10, 9), (0.0, 256, 1), (0.0, 600, 1))
    run = simulate(workload, SHAPE, SECOND)
    chosen = partial(chosen_request, timeline=run.timeline, workload=workload, names=[None, "chat-7", None])
    assert [chosen(selector) for selector in (1, "2", -1, "worst", "ttft", "tpot", "e2e", "chat-7")] == [
        1, 2, 2, 2, 2, 0, int(np.argmax(run.timeline.e2e)), 1,
    ]  # fmt: skip
    with pytest.raises(
        ConfigError, match=r"there is no request 'chat-8'; did you mean 'chat-7'.*from 0 to 2, or worst,"
    ):
        chosen("chat-8")
    with pytest.raises(ConfigError, match="there is no request 3: the run has 3, from 0 on"):
        chosen("3")


def test_who_was_never_served_is_the_worst() -> None:
    workload = requests((0.0, 10, 50), (0.5, 10, 1))
    found, causes = explained(1, workload, replace(SHAPE, max_num_seqs=1), until=30.0)
    run = simulate(workload, replace(SHAPE, max_num_seqs=1), SECOND, until=30.0)
    assert worst_request(run.timeline, workload) == 1
    assert found.misses[0].promise == "ttft"
    assert causes["slots"] == 28.0


def test_the_worst_request_and_one_that_is_not_there() -> None:
    workload = requests((0.0, 10, 2), (0.0, 256, 1), (0.0, 600, 1))
    run = simulate(workload, SHAPE, SECOND)
    assert worst_request(run.timeline, workload) == 2
    with pytest.raises(ConfigError, match="there is no request 3: the run has 3"):
        explain(3, run.timeline, workload.classes, workload.class_ids, Journal(), SECOND)
    with pytest.raises(ConfigError, match="has not watched request 1"):
        explain(1, run.timeline, workload.classes, workload.class_ids, Journal(), SECOND)


# A live engine's recording: what a RecordedScheduler wrote down ----------------------------------------------------------


def record(
    workload: Workload, shape: EngineShape, model: Any, policy: str = "fcfs"
) -> tuple[list[Entry], SimulatedRun]:
    entries: list[Entry] = []

    def make(replica: int, policy: PlanPolicy) -> RecordedScheduler:
        return RecordedScheduler(sink=entries.append, policy=policy, **shape.scheduler_arguments())

    return entries, simulate(workload, shape, model, policy=policy, skip=False, make_scheduler=make)


def test_a_recording_is_explained_like_the_run_itself() -> None:
    workload = requests((1.0, 256, 1), (1.25, 256, 1), (1.5, 256, 3))
    entries, run = record(workload, SHAPE, SECOND)
    found = run_of_recording(entries, SHAPE.scheduler_arguments(), lambda: load_policy("fcfs"), 2)
    assert found.timeline.first_token.tolist() == run.timeline.first_token.tolist()
    assert found.timeline.last_token.tolist() == run.timeline.last_token.tolist()
    assert found.timeline.outcome.tolist() == run.timeline.outcome.tolist()
    assert found.workload.classes == (RequestClass("ls", PROMISE.slo, True),)
    told = explain(
        found.row, found.timeline, found.workload.classes, found.workload.class_ids, found.journal, SECOND,
        keys=found.keys,
    )  # fmt: skip
    causes = {part.cause: round(part.seconds, 6) for part in (*told.waiting_and_prompt, *told.decoding)}
    assert causes == {"step under way": 0.5, "prompts": 1.0, "own prompt": 1.0, "own tokens": 2.0}
    with pytest.raises(ConfigError, match="there is no request 3: the recording has 3"):
        run_of_recording(entries, SHAPE.scheduler_arguments(), lambda: load_policy("fcfs"), 3)


def test_a_recording_of_another_engine_is_told_apart() -> None:
    entries, _ = record(requests((1.0, 256, 1), (1.25, 256, 1), (1.5, 256, 3)), SHAPE, SECOND)
    same = run_of_recording(entries, SHAPE.scheduler_arguments(), lambda: load_policy("fcfs"), 2)
    assert same.deviation is None
    other = replace(SHAPE, max_num_batched_tokens=100)
    found = run_of_recording(entries, other.scheduler_arguments(), lambda: load_policy("fcfs"), 2)
    assert found.deviation is not None
    assert found.deviation.startswith("step 1 was another one: ")


def test_requests_of_a_recording_have_their_numbers_in_it() -> None:
    """Not those that a frontend gave them."""
    entries, _ = record(requests((0.0, 256, 3), (0.1, 10, 1), (0.2, 600, 1), (0.3, 256, 1)), SHAPE, SECOND, "srpf")
    renamed: list[Entry] = [
        (c.replace("submit 0", "submit 7"), at, replace(m, rid=m.rid + 40) if isinstance(m, Submit) else m)
        for c, at, m in entries
    ]
    found = run_of_recording(renamed, SHAPE.scheduler_arguments(), lambda: load_policy("srpf"), 2)
    told = explain(
        2, found.timeline, found.workload.classes, found.workload.class_ids, found.journal, SECOND, keys=found.keys
    )
    assert told.number == 2
    assert "of 2 others, 1 of which came after it)" in str(told)


def test_a_recording_long_enough_brings_its_own_step_times() -> None:
    shape = EngineShape(num_blocks=4000, max_num_batched_tokens=512, enable_prefix_caching=False)
    model = preset("a100-llama-3-8b")
    entries, run = record(synthetic(30, 3.0, seed=3), shape, model)
    found = run_of_recording(
        entries, shape.scheduler_arguments(), lambda: load_policy("fcfs"), partial(chosen_request, "ttft")
    )
    assert found.row == int(np.argmax(run.timeline.ttft))
    assert found.model is not None
    assert found.model.seconds(0, 8, 8000) == pytest.approx(model.seconds(0, 8, 8000), rel=0.05)


@dataclass
class Warming:
    """Step times of which the first, of whatever is in it, is a second longer."""

    model: LinearModel
    num_asked: int = 0

    def __getattr__(self, name: str) -> Any:
        return getattr(self.model, name)

    def seconds(self, *features: float) -> float:
        self.num_asked += 1
        return self.model.seconds(*features) + (self.num_asked == 1)


def test_a_cold_first_step_is_not_blamed_on_prompts() -> None:
    """Three prompts of 200 tokens share a step of 0.71 s; each of them alone takes 0.21 s of it."""
    rows = [(0.0, 20, 150), (4.0, 200, 2), (4.0, 200, 2), (4.0, 200, 2), (6.0, 100, 1), (7.0, 240, 1)]
    shape = replace(SHAPE, max_num_batched_tokens=700)
    model = LinearModel((Regime(math.inf, (0.01, 0.001, 0.001, 0.0, 0.0, 0.0)),), "a millisecond a token")
    entries, _ = record(requests(*rows[:1], *((at + 1.0, p, n) for at, p, n in rows[1:])), shape, Warming(model))
    found = run_of_recording(entries, shape.scheduler_arguments(), lambda: load_policy("fcfs"), 2)
    assert found.step_fit is not None
    told = explain(
        2, found.timeline, found.workload.classes, found.workload.class_ids, found.journal, found.step_fit,
        keys=found.keys,
    )  # fmt: skip
    causes = {part.cause: part.seconds for part in told.waiting_and_prompt}
    assert causes["own prompt"] == pytest.approx(0.21, abs=0.03)
    assert causes["mates while prefilling"] == pytest.approx(0.4, abs=0.05)
    assert "step times are fitted to this recording, without the 2 first of their kind; mean error" in str(told)


def test_without_step_times_only_what_was_measured_is_told() -> None:
    """Four prompts come while a request decodes: how much of those steps its own tokens needed is not known."""
    entries, run = record(requests((0.0, 20, 12), *((3.0, 256, 1),) * 4), SHAPE, BY_ROW)
    found = run_of_recording(entries, SHAPE.scheduler_arguments(), lambda: load_policy("fcfs"), 0)
    assert found.step_fit is None, "so few steps have no model"
    told = explain(
        0, found.timeline, found.workload.classes, found.workload.class_ids, found.journal, None, keys=found.keys
    )
    causes = {part.cause: part.seconds for part in told.decoding}
    assert set(causes) == {"token steps", "token steps with prompts"}
    assert sum(causes.values()) == pytest.approx(run.timeline.last_token[0] - run.timeline.first_token[0])
    assert causes["token steps with prompts"] > causes["token steps"] / 2
    assert {part.cause for part in told.waiting_and_prompt} == {"prompt steps"}
    assert "the promise had been kept" not in str(told), "part of these steps is what the request itself needs"
    assert "too few steps to fit step times to: what a step would have taken alone is not known" in str(told)


def test_steps_that_the_model_misses_are_not_divided_up() -> None:
    entries, _ = record(requests((0.0, 20, 12), *((3.0, 256, 1),) * 4), SHAPE, BY_ROW)
    found = run_of_recording(entries, SHAPE.scheduler_arguments(), lambda: load_policy("fcfs"), 0)
    unsure = RecordingFit(BY_ROW, {"decode": 0.02, "prompt": 0.8}, {"decode": 200, "prompt": 4}, 2, ())
    told = explain(
        0, found.timeline, found.workload.classes, found.workload.class_ids, found.journal, unsure, keys=found.keys
    )
    assert {part.cause for part in told.decoding} == {"own tokens", "token steps with prompts"}
    assert "the error of steps with prompts is too large to divide them up by causes" in str(told)
    assert "mean error 2% of 200 decode steps and 80% of 4 steps with prompts" in str(told)


def test_a_request_that_gave_up_is_told_so() -> None:
    entries, _ = record(requests((0.0, 256, 9)), SHAPE, SECOND)
    first = next(m for c, _, m in entries if c.startswith("submit"))
    assert isinstance(first, Submit)
    entries = [entry for entry in entries if entry[1] < 3.0] + [("abort", 3.0, [[0, 0]])]
    found = run_of_recording(entries, SHAPE.scheduler_arguments(), lambda: load_policy("fcfs"), 0)
    told = explain(
        0, found.timeline, found.workload.classes, found.workload.class_ids, found.journal, SECOND, keys=found.keys
    )
    assert told.outcome == "aborted"
