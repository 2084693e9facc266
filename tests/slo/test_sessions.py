"""Requests that wait for others: turns of sessions, branches of agents, and a bound on the requests under way."""

from __future__ import annotations

import math
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest

from actorllm.errors import ConfigError, InvalidParameterError
from actorllm.scheduling.cost_model import LinearModel, Regime
from actorllm.slo.closed_loop import ClosedLoop
from actorllm.slo.sessions import AGENTS, SessionShape, agents, conversations
from actorllm.slo.simulator import EngineShape, SimulatedRun, simulate
from actorllm.slo.timeline import FINISHED
from actorllm.slo.traces import load_trace, write_trace
from actorllm.slo.turns import Turns
from actorllm.slo.workload import Workload, fixed_lengths, make_workload, share_prefixes
from actorllm.types.objective import RequestClass

BLOCK = 16
SHAPE = EngineShape(num_blocks=4000, max_num_seqs=16, max_num_batched_tokens=512, max_model_len=4096)
STEP_S = 0.01
MODEL = LinearModel((Regime(math.inf, (STEP_S, 0.0, 0.0, 0.0, 0.0, 0.0)),), "constant")


def chain(num: int, think_s: float = 0.5, num_prompt: int = 100, num_output: int = 20, new: int = 30) -> Workload:
    """One session of so many turns."""
    prompts = num_prompt + np.arange(num) * (num_output + new)
    turns = Turns.of([[row - 1] if row else [] for row in range(num)], [think_s] * num)
    made = make_workload(np.zeros(num), (prompts.astype(np.int32), np.full(num, num_output, np.int32)))
    return replace(made, turns=turns).arriving(np.zeros(num))


def ends_of(run: SimulatedRun) -> list[float]:
    return run.timeline.last_token.tolist()


def test_a_turn_is_sent_when_the_one_before_it_has_ended_and_its_reader_has_thought() -> None:
    run = simulate(chain(4, think_s=0.7), SHAPE, MODEL)
    arrival = run.workload.arrival
    assert (run.timeline.outcome == FINISHED).all()
    assert arrival[1:].tolist() == pytest.approx([end + 0.7 for end in ends_of(run)[:-1]])


@pytest.mark.parametrize("num_replicas", [1, 3])
def test_steps_made_many_at_a_time_change_nothing(num_replicas: int) -> None:
    workload = conversations(60, 3.0, seed=3, shape=SessionShape(think_s=(0.4, 4.0), longest=3000))
    for shape in (SHAPE, replace(SHAPE, enable_prefix_caching=False)):
        one, other = (
            simulate(workload, shape, MODEL, num_replicas=num_replicas, router="least-load", skip=skip)
            for skip in (True, False)
        )
        assert one.workload.arrival.tolist() == other.workload.arrival.tolist()
        assert one.timeline.last_token.tolist() == other.timeline.last_token.tolist()
        assert one.timeline.num_cached.tolist() == other.timeline.num_cached.tolist()
    assert one.num_steps_skipped > 0


def test_a_turn_finds_prompt_and_output_of_the_one_before_it() -> None:
    run = simulate(chain(5), SHAPE, MODEL)
    before = (
        run.timeline.num_prompt[:-1] + run.timeline.num_output[:-1] - 1
    )  # the KV of the last token was not computed
    assert run.timeline.num_cached.tolist() == [0, *(before // BLOCK * BLOCK).tolist()]
    none = simulate(chain(5), replace(SHAPE, enable_prefix_caching=False), MODEL)
    assert none.timeline.num_cached.sum() == 0


def test_sessions_find_nothing_of_each_other() -> None:
    """Prompts are told apart although all their ids are zeros; a shared system prompt is found."""
    one = chain(3)
    two = one.repeated(6)
    run = simulate(two, SHAPE, MODEL)
    assert run.timeline.num_cached[run.workload.turns.begins].tolist() == [0, 0]  # type: ignore[union-attr]
    shared = share_prefixes(two, num_groups=1, num_tokens=64, block_tokens=16)
    found = simulate(shared, SHAPE, MODEL)
    assert sorted(found.timeline.num_cached[found.workload.turns.begins].tolist()) == [0, 64]  # type: ignore[union-attr]


def test_a_turn_after_a_branch_waits_for_all_of_it() -> None:
    turns = Turns.of([[], [0], [0], [1, 2]], [0.0, 0.1, 0.4, 0.2])
    workload = replace(make_workload(np.zeros(4), fixed_lengths(4, 400, 10)), turns=turns).arriving(np.zeros(4))
    run = simulate(workload, SHAPE, MODEL)
    ends = ends_of(run)
    assert run.workload.arrival.tolist() == pytest.approx([0.0, ends[0] + 0.1, ends[0] + 0.4, max(ends[1:3]) + 0.2])


def test_a_session_ends_with_a_request_that_does_not_finish() -> None:
    workload = replace(chain(4), classes=(RequestClass("impatient", patience=0.05),))
    run = simulate(workload, SHAPE, MODEL)
    assert len(run.timeline) == len(run.workload) == 1
    assert any("3 requests were never sent" in warning for warning in run.warnings)


def test_so_many_are_under_way() -> None:
    workload = make_workload(np.zeros(12), fixed_lengths(12, 32, 10))
    run = simulate(workload, SHAPE, MODEL, max_concurrency=3)
    arrival, last = run.workload.arrival, run.timeline.last_token
    for at in arrival.tolist():
        assert ((arrival <= at) & (last > at)).sum() <= 3
    assert arrival.tolist() != workload.arrival.tolist()
    assert (run.timeline.outcome == FINISHED).all()
    assert run.due is not None
    assert run.due.tolist() == workload.arrival.tolist(), "all wanted to be sent at once"
    assert simulate(workload, SHAPE, MODEL).due is None
    wide = simulate(workload, SHAPE, MODEL, max_concurrency=12)
    assert wide.timeline.last_token.tolist() == simulate(workload, SHAPE, MODEL).timeline.last_token.tolist()


@pytest.mark.parametrize("value", [0, -1, 2.5, True])
def test_a_bound_that_is_none_is_refused(value: object) -> None:
    with pytest.raises(ConfigError, match=f"max_concurrency={value}"):
        ClosedLoop(chain(2), value)  # type: ignore[arg-type]


def test_what_a_router_is_shown_is_not_of_later() -> None:
    """No replica is ahead of a request that is sent because another one has ended."""
    workload = conversations(80, 20.0, seed=5, shape=SessionShape(think_s=(0.05, 0.3), longest=2000))
    seen: list[float] = []

    class Watching:
        def route(self, request: object, views: list) -> int:  # type: ignore[type-arg]
            seen.append(max(view.seen for view in views))
            return len(seen) % 2

    run = simulate(workload, SHAPE, MODEL, num_replicas=2, router=Watching(), view_interval_s=0.0)  # type: ignore[arg-type]
    assert seen == run.workload.arrival.tolist()
    assert (np.diff(run.workload.arrival) >= 0).all()


def test_another_rate_moves_the_beginnings_and_not_the_thinking() -> None:
    workload = conversations(500, 2.0, seed=1)
    fast = workload.at_rate(8.0)
    assert fast.rate == pytest.approx(8.0)
    assert sorted(fast.num_prompt.tolist()) == sorted(workload.num_prompt.tolist())
    turns = fast.turns
    assert turns is not None
    assert turns.nominal(fast.arrival).tolist() == pytest.approx(fast.arrival.tolist())
    assert sorted(turns.think_s.tolist()) == sorted(workload.turns.think_s.tolist())  # type: ignore[union-attr]


@pytest.mark.parametrize("make", [conversations, agents])
def test_prompts_grow_by_what_was_said(make: object) -> None:
    workload = make(300, 1.0, seed=2)  # type: ignore[operator]
    turns = workload.turns
    assert 0.01 < turns.begins.mean() < 0.6
    for row in np.flatnonzero(~turns.begins).tolist():
        said = sum(int(workload.num_output[parent]) for parent in turns.parents_of(row))
        assert workload.num_prompt[row] > int(workload.num_prompt[turns.parents_of(row)[0]]) + said
    assert (workload.num_prompt + workload.num_output <= AGENTS.longest).all()
    assert make is conversations or max(np.diff(turns.starts)) == AGENTS.width


def test_a_part_of_a_workload_begins_sessions_where_their_beginning_is_left_out() -> None:
    part = chain(6).select(np.arange(2, 6))
    assert part.turns is not None
    assert part.turns.begins.tolist() == [True, False, False, False]
    assert [part.turns.parents_of(row) for row in range(4)] == [[], [0], [1], [2]]


def test_a_turn_that_waits_for_a_later_one_is_refused() -> None:
    made = make_workload(np.zeros(2), fixed_lengths(2, 10, 5))
    with pytest.raises(InvalidParameterError, match="request 0 waits for itself or for a later request"):
        replace(made, turns=Turns.of([[1], []], [0.0, 0.0]))
    with pytest.raises(InvalidParameterError, match="think times"):
        replace(made, turns=Turns.of([[], [0]], [0.0, -1.0]))


def test_a_trace_of_sessions_is_written_and_read(tmp_path: Path) -> None:
    workload = conversations(120, 2.0, seed=4)
    path = tmp_path / "sessions.jsonl"
    write_trace(workload, path)
    read = load_trace(path).workload
    assert read.num_prompt.tolist() == workload.num_prompt.tolist()
    assert read.turns is not None
    assert workload.turns is not None
    assert read.turns.parents.tolist() == workload.turns.parents.tolist()
    assert read.turns.think_s[~read.turns.begins] == pytest.approx(
        workload.turns.think_s[~workload.turns.begins], abs=1e-3
    )
    with pytest.raises(InvalidParameterError, match="branch"):
        write_trace(agents(200, 2.0), path)


def test_a_row_of_a_session_that_cannot_be_used_is_told(tmp_path: Path) -> None:
    path = tmp_path / "bad.jsonl"
    path.write_text(
        '{"timestamp": 0, "input_length": 10, "output_length": 5, "session_id": "a"}\n'
        '{"timestamp": 9, "input_length": 10, "output_length": 5, "session_id": "a"}\n'
        '{"delay": -5, "input_length": 10, "output_length": 5, "session_id": "a"}\n'
        '{"delay": 500, "input_length": 10, "output_length": 5, "session_id": "a", "hash_ids": [1]}\n'
        '{"delay": 500, "input_length": 10, "output_length": 5, "session_id": 7}\n'
        '{"delay": 500, "input_length": 10, "output_length": 5, "session_id": "a"}\n'
    )
    trace = load_trace(path, "mooncake")
    assert trace.workload.num_prompt.tolist() == [10, 25]
    assert trace.workload.arrival.tolist() == [0.0, 0.5]
    told = dict(trace.report.problems)
    assert sorted(told) == [2, 3, 4, 5]
    assert "'delay' is missing" in told[2]
    assert "delay=-5" in told[3]
    assert "hash_ids of a later turn" in told[4]
    assert "session_id=7" in told[5]
