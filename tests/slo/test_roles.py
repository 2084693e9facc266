"""Prefill apart from decode in virtual time: nothing is lost, it wins where long prompts interrupt, and loses where they do not."""

from __future__ import annotations

import math
from dataclasses import replace
from typing import Any

import numpy as np
import pytest

from actorllm import cli
from actorllm.errors import ConfigError
from actorllm.scheduling import cost_model
from actorllm.scheduling.role_router import LearntHandOff, RoleRouter
from actorllm.scheduling.router import LinearSteps, ReplicaView, RoundRobin, Routable
from actorllm.slo.failures import FailureRates
from actorllm.slo.roles import TransferShape, read_transfer
from actorllm.slo.simulator import EngineShape, SimulatedRun, simulate
from actorllm.slo.timeline import ABORTED, FINISHED
from actorllm.slo.workload import RequestClass, Workload, make_workload, poisson_arrivals

MODEL = cost_model.preset("a100-llama-3-8b")
SHAPE = EngineShape(num_blocks=20_000, max_num_seqs=256, max_model_len=16_384)
COPY = TransferShape(block_s=2e-5, latency_s=2e-3)


def workload(number: int, rate: float, share_long: float, output: int) -> Workload:
    """Long prompts among short ones."""
    rng = np.random.default_rng(1)
    is_long = rng.random(number) < share_long
    prompt = np.where(is_long, rng.integers(4000, 8000, number), rng.integers(20, 150, number)).astype(np.int32)
    lengths = prompt, rng.integers(output // 2, output, number).astype(np.int32)
    return make_workload(poisson_arrivals(number, rate, 1), lengths)


def run(made: Workload, roles: str | None = "1P2D", transfer: TransferShape = COPY, **more: Any) -> SimulatedRun:
    apart = {"num_replicas": 3} if roles is None else {"roles": roles, "transfer": transfer}
    return simulate(made, SHAPE, MODEL, router="seconds", seed=1, **apart, **more)


def pauses(found: SimulatedRun) -> float:
    """The 99th percentile of the times between two tokens of a request."""
    timeline = found.timeline
    return float(np.quantile(np.concatenate([np.diff(timeline.token_times(i)) for i in range(len(timeline))]), 0.99))


def seconds_per_token(found: SimulatedRun) -> float:
    """The 99th percentile of what requests wait for a token on average, after their first one."""
    timeline = found.timeline
    times = [timeline.token_times(row) for row in range(len(timeline))]
    return float(np.quantile([(one[-1] - one[0]) / max(1, one.size - 1) for one in times], 0.99))


@pytest.fixture(scope="module")
def long_prompts() -> Workload:
    return workload(160, 4.0, 0.3, 400)


@pytest.fixture(scope="module")
def apart(long_prompts: Workload) -> SimulatedRun:
    return run(long_prompts)


def test_nothing_is_lost(apart: SimulatedRun, long_prompts: Workload) -> None:
    timeline = apart.timeline
    assert (timeline.outcome == FINISHED).all()
    np.testing.assert_array_equal(timeline.num_output, long_prompts.num_output)
    for row in range(len(timeline)):
        times = timeline.token_times(row)
        assert times.size == long_prompts.num_output[row]
        assert (np.diff(times) > 0).all()
        assert timeline.arrival[row] <= timeline.scheduled[row] < times[0]
    prefill, *decode = [one.transfers for one in apart.statistics]
    assert prefill is not None
    assert 0 < apart.num_handed_off == prefill.num_handed_off
    assert sum(one.num_pulled_blocks for one in decode if one is not None) > 200 * 30
    assert set(timeline.replica.tolist()) == {1, 2}


def test_it_wins_where_long_prompts_interrupt_rows(apart: SimulatedRun, long_prompts: Workload) -> None:
    """The pauses of what decodes; the price is the wait of long prompts for the one replica that computes them."""
    mixed = run(long_prompts, None)
    assert pauses(apart) < 0.3 * pauses(mixed)
    assert np.quantile(apart.timeline.ttft, 0.99) > np.quantile(mixed.timeline.ttft, 0.99)


def test_it_loses_where_prompts_are_short() -> None:
    """A replica less decodes."""
    made = workload(200, 20.0, 0.0, 600)
    mixed, apart = run(made, None), run(made)
    assert seconds_per_token(apart) > 1.1 * seconds_per_token(mixed)
    assert apart.timeline.end.max() > mixed.timeline.end.max()


def test_copies_of_short_prompts_are_waited_for() -> None:
    """A small prompt is computed in the time of the steps that stand before its copy."""
    apart = run(workload(200, 20.0, 0.0, 600))
    told = [one.transfers for one in apart.statistics if one.transfers is not None]
    assert apart.num_handed_off > 150
    assert sum(one.num_given_up for one in told) < 0.05 * apart.num_handed_off


def test_a_copy_that_is_too_slow_is_not_made_for_long(apart: SimulatedRun, long_prompts: Workload) -> None:
    """What hand-offs take is learnt. Some have begun before the first tells it."""
    slow = run(long_prompts, transfer=TransferShape(block_s=0.05))
    assert slow.num_handed_off < 0.4 * apart.num_handed_off
    assert (slow.timeline.outcome == FINISHED).all()


def test_the_same_arguments_give_the_same_run(apart: SimulatedRun, long_prompts: Workload) -> None:
    again = run(long_prompts).timeline
    np.testing.assert_array_equal(again.end, apart.timeline.end)
    np.testing.assert_array_equal(again.first_token, apart.timeline.first_token)


def test_memory_is_free_at_the_end(apart: SimulatedRun) -> None:
    for one in apart.statistics:
        assert one.kv.num_free == one.kv.num_blocks or (one.transfers is not None and one.transfers.num_leases)
        assert one.num_running == one.num_waiting == one.num_blocked == 0


def test_clients_that_give_up_are_followed() -> None:
    found = run(replace(workload(80, 8.0, 0.5, 400), classes=(RequestClass("impatient", patience=1.0),)))
    assert set(found.timeline.outcome.tolist()) == {ABORTED}
    assert found.num_handed_off


def test_what_is_not_simulated_is_refused(long_prompts: Workload) -> None:
    for more in ({"failures": FailureRates(60, "workers", 1)}, {"max_concurrency": 3}, {"num_replicas": 2}):
        with pytest.raises(ConfigError, match="roles"):
            simulate(long_prompts, SHAPE, MODEL, roles="1P2D", **more)
    with pytest.raises(ConfigError, match="must be block_s"):
        read_transfer("fast")
    with pytest.raises(ConfigError, match=r"block_s=-1\.0 must be 0"):
        read_transfer("-1")


def view(number: int, role: Any, **more: Any) -> ReplicaView:
    steps = LinearSteps((0.01, 0.0001, 0.0002, 0.0))
    return ReplicaView(number, role=role, step_seconds=steps, block_size=16, **more)


def request(num_prompt: int) -> Routable:
    return Routable(num_prompt, bytes(32 * (num_prompt // 16)))


def test_a_prompt_is_handed_off_where_all_together_wait_for_less() -> None:
    router = RoleRouter(RoundRobin())
    idle, busy = view(1, "decode"), view(1, "decode", num_running=50, num_context=50_000)
    assert router.route(request(4000), [view(0, "prefill"), busy]) == 0
    assert router.route(request(10), [view(0, "prefill"), busy]) == 1, "no whole block"
    assert router.route(request(4000), [view(0, "prefill", num_waiting=30, num_waiting_tokens=10**6), idle]) == 1
    assert (
        router.route(request(4000), [view(0, "prefill"), view(1, "decode", find=lambda hashes: 249, num_running=50)])
        == 1
    )
    assert router.route(request(4000), [busy]) == 1
    assert router.route(request(4000), [view(0, "prefill")]) == 0
    for _ in range(3):
        router.hand_off.observe(250, 500.0)
    assert router.route(request(4000), [view(0, "prefill"), busy]) == 1, "hand-offs have taken minutes"


def test_what_hand_offs_take_is_a_line() -> None:
    learnt = LearntHandOff()
    assert learnt.seconds(100) == 0.0
    learnt.observe(10, 0.02)
    assert learnt.seconds(100) == pytest.approx(0.02)
    for number in (100, 50, 200):
        learnt.observe(number, 0.01 + 0.001 * number)
    assert learnt.seconds(150) == pytest.approx(0.16)
    assert not math.isnan(learnt.seconds(0))


def test_the_command_tells_what_was_handed_off(capsys: pytest.CaptureFixture[str]) -> None:
    given = [
        "simulate",
        "--num-requests",
        "40",
        "--rate",
        "4",
        "--policy",
        "fcfs@512",
        "--roles",
        "1P1D",
        "--kv-copy",
        "2e-5:1e-3",
    ]
    assert cli.main(given) == 0
    assert "requests were handed off" in capsys.readouterr().out
    assert cli.main([*given[:7], "--kv-copy", "1"]) == 2
    assert "--roles 1P1D, too" in capsys.readouterr().err
