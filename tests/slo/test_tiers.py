"""KV tiers in virtual time: the scheduler's own decisions, and what moving blocks takes."""

from __future__ import annotations

from dataclasses import replace
from functools import cache
from typing import Any

import numpy as np
import pytest

from actorllm import cli
from actorllm.errors import ConfigError
from actorllm.kvcache.prefix_index import HASH_BYTES
from actorllm.scheduling.cost_model import preset
from actorllm.slo.experiments.point import Scenario
from actorllm.slo.failures import FailureEvent
from actorllm.slo.sessions import SessionShape, conversations
from actorllm.slo.simulator import EngineShape, SimulatedRun, simulate
from actorllm.slo.tiers import SimulatedTiers, TierShape, read_tiers
from actorllm.slo.timeline import FINISHED
from actorllm.slo.workload import Workload

MODEL = preset("a100-llama-3-8b")
SHAPE = EngineShape(num_blocks=400, block_size=16, max_num_seqs=16, max_num_batched_tokens=512, max_model_len=4096)
FAST = TierShape(100_000, 2e-5, 2e-5, 1e-4)


def sessions(num: int = 80) -> Workload:
    """Contexts come back after the memory has been needed by others."""
    return conversations(num, 1.0, shape=SessionShape(), seed=3).fitting(4096)


def simulated(tiers: tuple[TierShape, ...], workload: Workload, **more: Any) -> SimulatedRun:
    return simulate(workload, replace(SHAPE, tiers=tiers), MODEL, seed=1, **more)


@cache
def run(tiers: tuple[TierShape, ...]) -> SimulatedRun:
    return simulated(tiers, sessions())


def moved(told: SimulatedRun) -> Any:
    found = told.statistics[0].transfers
    assert found is not None
    return found


def test_contexts_that_memory_has_lost_come_from_a_tier() -> None:
    without, told = run(()), run((FAST,))
    assert without.statistics[0].transfers is None
    assert moved(told).num_loaded_blocks > 100
    assert moved(told).num_stored_blocks > 100
    assert moved(told).num_waiting == 0
    assert (told.timeline.outcome == FINISHED).all()
    assert told.timeline.num_cached.sum() > 1.2 * without.timeline.num_cached.sum()
    assert np.nanmean(told.timeline.ttft) < np.nanmean(without.timeline.ttft)
    again = simulated((FAST,), sessions())
    assert again.timeline.end.tolist() == told.timeline.end.tolist(), "the same arguments give the same run"


def test_the_scheduler_learns_what_a_tier_takes() -> None:
    costs = moved(run((replace(FAST, latency_s=0.0),))).costs
    assert costs.load_s_per_block == pytest.approx(FAST.load_s)
    assert costs.compute_s_per_token > 0


def test_a_tier_that_is_slower_than_computing_is_left_alone() -> None:
    slow = TierShape(100_000, 0.1, 1e-5)
    without, told = run(()), run((slow,))
    assert moved(told).num_loads < 0.1 * moved(run((FAST,))).num_loads
    assert np.nanmean(told.timeline.ttft) < 1.1 * np.nanmean(without.timeline.ttft)


def test_a_small_tier_forgets_what_was_used_longest_ago() -> None:
    small = moved(run((replace(FAST, num_blocks=60),)))
    assert 0 < small.num_loaded_blocks < moved(run((FAST,))).num_loaded_blocks
    tiers = SimulatedTiers((TierShape(2, 1.0, 2.0), TierShape(9, 10.0, 3.0, 100.0)))
    hashes = b"".join(bytes([n]) * HASH_BYTES for n in range(4))
    assert tiers.missing(hashes) == [True] * 4
    tiers.store(hashes)
    assert tiers.count(hashes) == 4
    assert tiers.missing(hashes) == [True, True, False, False], "the first tier has room for two"
    assert tiers.load(hashes) == (4, 2 * 10.0 + 100.0 + 2 * 1.0)
    assert tiers.store_s(4) == 12.0
    tiers.remove(hashes[HASH_BYTES : 2 * HASH_BYTES])
    assert tiers.count(hashes) == 1
    tiers.forget_all()
    assert tiers.load(hashes) == (0, 0.0)


@pytest.mark.parametrize("kind", ["workers", "scheduler"])
def test_tiers_outlive_workers_and_schedulers(kind: str) -> None:
    made = sessions()
    at = float(made.arrival.max()) / 2
    told = simulated((FAST,), made, failures=[FailureEvent(at, kind, 0, 5.0)])
    assert (told.timeline.outcome == FINISHED).all()
    assert moved(told).num_loaded_blocks > 0


def test_each_replica_has_tiers_of_its_own() -> None:
    told = simulated((FAST,), sessions(), num_replicas=2, router="seconds")
    assert (told.timeline.outcome == FINISHED).all()
    assert all(one.transfers is not None and one.transfers.num_stored_blocks > 0 for one in told.statistics)


@pytest.mark.parametrize(
    ("text", "told"),
    [
        ("many", "kv_tiers='many' must be blocks:load_s:store_s"),
        ("1:2", "must be blocks"),
        ("0:1:1", "num_blocks=0 must be 1 block or more"),
        ("5:-1:1", "load_s=-1.0 must be 0 seconds or more"),
        ("5:1:inf", "store_s=inf must be 0"),
    ],
)
def test_tiers_that_cannot_be_are_named(text: str, told: str) -> None:
    with pytest.raises(ConfigError, match=told):
        read_tiers([text])


def test_the_command_tells_what_was_moved(capsys: pytest.CaptureFixture[str]) -> None:
    given = ["simulate", "--workload", "sessions", "--num-requests", "80", "--rate", "1", "--policy", "fcfs@512"]
    given += [
        "--num-blocks",
        "256",
        "--max-model-len",
        "4096",
        "--enable-prefix-caching",
        "--kv-tiers",
        "100000:2e-5:2e-5",
    ]
    assert cli.main(given) == 0
    assert "KV tiers:" in capsys.readouterr().out
    given.remove("--enable-prefix-caching")
    assert cli.main(given) == 2
    assert "keep what a prefix cache finds" in capsys.readouterr().err


def test_a_scenario_with_tiers_goes_through_its_record() -> None:
    scenario = Scenario(workload="sessions", shape=replace(SHAPE, tiers=(FAST, TierShape(5, 0.1, 0.2, 0.3))))
    assert Scenario.from_dict(scenario.to_dict()) == scenario
