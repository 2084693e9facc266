"""Sweeps: the same whatever the number of processes, resumed after a kill, and one bad policy spoils only itself."""

from __future__ import annotations

import errno
import json
import os
import re
import subprocess
import sys
from collections import Counter
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from actorllm.errors import ConfigError
from actorllm.scheduling.admission_policy import ADMISSIONS, AdmissionGate, AdmissionPolicy, register_admission
from actorllm.scheduling.cost_model import preset
from actorllm.scheduling.policies.edf import Edf
from actorllm.scheduling.policy import POLICIES, Admit, KeyPolicy, View
from actorllm.scheduling.sequence import Sequence
from actorllm.scheduling.step_packing import KeyPlanner
from actorllm.slo.experiments import Ladder, Point, Scenario, Sweep, SweepResults, Variant, ratio_band, read_results
from actorllm.slo.experiments import point as point_module
from actorllm.slo.experiments.bands import wilson
from actorllm.slo.experiments.comparison import sustained
from actorllm.slo.experiments.record import record_of
from actorllm.slo.journal import Journal
from actorllm.slo.report.lead import lead
from actorllm.slo.simulator import EngineShape, simulate
from actorllm.slo.workload import assign_classes, make_workload, parse_mix, sample

SCENARIO = Scenario(workload="synthetic", num_requests=60)
FCFS, EDF = Variant.parse("fcfs@512"), Variant.parse("edf@512")


class Raises(KeyPolicy):
    """After a while."""

    def key(self, sequence: Sequence, view: View) -> tuple[float]:
        if sequence.arrival_index == 20:
            raise ZeroDivisionError("no such luck")
        return (sequence.arrival,)


class Patient(KeyPolicy):
    """Of this file."""

    def key(self, sequence: Sequence, view: View) -> tuple[float]:
        return (-sequence.arrival,)


@pytest.fixture(scope="module")
def results() -> SweepResults:
    return Sweep(SCENARIO, [FCFS, EDF], (0, 1)).run(
        rates=(2.0, 4.0), scales=(1.0, 0.5), scale_rates=(4.0,), targets=(0.9,), aggregates=("worst",), num_processes=0
    )


def test_processes_change_nothing(results: SweepResults) -> None:
    other = Sweep(SCENARIO, [FCFS, EDF], (0, 1)).run(
        rates=(2.0, 4.0), scales=(1.0, 0.5), scale_rates=(4.0,), targets=(0.9,), aggregates=("worst",), num_processes=2
    )
    assert json.dumps(results.records) == json.dumps(other.records)


def test_a_point_is_golden(results: SweepResults) -> None:
    """Of this seed, on every machine. Changes when the scheduler or the draws change, and should change then only."""
    summary = results.points("edf@512", 4.0)[0]["summary"]
    assert summary["completed"] == 60
    assert summary["total_output_tokens"] == 10607
    assert summary["mean_ttft_ms"] == pytest.approx(296.5412, rel=1e-5)
    assert summary["p99_tpot_ms"] == pytest.approx(37.2731, rel=1e-5)


def test_a_notebook_shows_a_line_of_results(results: SweepResults) -> None:
    told = repr(results)
    assert told.startswith(f"<SweepResults: {len(results.records)} points of ")
    assert results.describe() in told
    assert len(told) < 400, "and not all records"


def test_seeds_give_other_requests_and_rates_the_same_ones() -> None:
    def workload(rate: float, seed: int, variant: Variant = FCFS) -> Any:
        return Point(scenario=Scenario(num_requests=90), variant=variant, rate=rate, seed=seed).workload()

    one, faster, other, edf = workload(1.0, 0), workload(3.0, 0), workload(1.0, 1), workload(1.0, 0, EDF)
    assert one.num_prompt.tolist() == faster.num_prompt.tolist() == edf.num_prompt.tolist()
    assert one.class_ids.tolist() == faster.class_ids.tolist()
    assert one.arrival == pytest.approx(3 * faster.arrival)
    assert one.rate == pytest.approx(1.0)
    assert one.num_prompt.tolist() != other.num_prompt.tolist()
    assert one.arrival[:9].tolist() != other.arrival[:9].tolist()


def test_seeds_have_parts_of_a_trace_that_are_apart() -> None:
    trace = sample().num_prompt.tolist()
    parts = []
    for seed in range(3):
        point = Point(scenario=Scenario(num_requests=60), variant=FCFS, rate=1.0, seed=seed)
        assert point.window is not None
        first, size = point.window
        assert size == len(trace)
        assert point.workload().num_prompt.tolist() == trace[first : first + 60]
        parts.append(set(range(first, first + 60)))
    assert len(set.union(*parts)) == 180
    further = Point(scenario=Scenario(num_requests=60), variant=FCFS, rate=1.0, seed=3).workload()
    assert len(further) == 60, "there is no fourth part: it overlaps the others"


@pytest.mark.parametrize(("begins", "distinct"), [((0, 200), 400), ((0, 100), 300), ((0, 0), 200)])
def test_requests_that_two_seeds_have_count_once(begins: tuple[int, int], distinct: int) -> None:
    records = hand_made("fcfs@512", {1.0: (10, 10)})
    for record in records:
        record["window"] = (begins[record["seed"]], 400)
    scenario = Scenario(workload="synthetic", num_requests=200)
    results = SweepResults(scenario, (FCFS,), (0, 1), tuple(records))
    assert results.band("fcfs@512", 1.0, "deadline").low == pytest.approx(wilson(1.0, distinct)[0])
    told = results.warnings()
    assert len(told) == (distinct < 400)
    assert all(f"400 requests together, {distinct} of them different" in text for text in told)


def test_a_scaled_objective_is_what_the_policy_sees(results: SweepResults) -> None:
    assert results.scales("edf@512", 4.0) == [0.5, 1.0]
    strict, plain = (results.band("edf@512", 4.0, "deadline", "overall", scale).value for scale in (0.5, 1.0))
    assert strict < plain
    point = Point(scenario=SCENARIO, variant=EDF, rate=4.0, scale=0.5)
    assert [kind.slo.tpot for kind in point.workload().classes if kind.slo is not None] == [0.025, None]


def test_a_search_brackets_its_target(results: SweepResults) -> None:
    found = results.max_rate("fcfs@512", 0.9, "deadline", "worst")
    assert found is not None
    assert found.is_bounded
    assert found.low <= found.rate <= found.high
    around = sorted(results.rates("fcfs@512"), key=lambda rate: abs(rate - found.rate))[:2]
    assert max(around) / min(around) <= 1.031
    attained = [results.band("fcfs@512", rate, "deadline", "worst").value for rate in sorted(around)]
    assert attained[0] >= 0.9 > attained[1]
    ratio = ratio_band(results, "edf@512", "fcfs@512", 0.9, "deadline")
    assert ratio is not None
    assert ratio.low <= ratio.value <= ratio.high


def hand_made(label: str, good_of: dict[float, tuple[int, int]]) -> list[dict[str, Any]]:
    """Two seeds of 20 blocks of 10 requests; good_of: for each rate how many of a block are good, by seed."""
    return [
        {
            "variant": {"label": label},
            "rate": rate,
            "scale": 1.0,
            "seed": seed,
            "blocks": {"n": [[10]] * 20, "tpot": [[num]] * 20, "deadline": [[num]] * 20},
            "stationarity": {"verdict": "stationary", "message": ""},
            "warnings": [],
        }
        for rate, both in good_of.items()
        for seed, num in enumerate(both)
    ]


def test_bands_are_open_where_no_rate_was_simulated() -> None:
    """A quarter of the draws have the bad seed of `shaky` twice, which fails at the lowest rate."""
    records = hand_made("steady", {1.0: (10, 10), 2.0: (10, 10), 4.0: (0, 0)})
    records += hand_made("shaky", {1.0: (10, 8), 2.0: (5, 5)})
    records += hand_made("easy", {1.0: (10, 10), 2.0: (10, 10)})
    variants = tuple(Variant.parse("fcfs@512", label) for label in ("steady", "shaky", "easy"))
    results = SweepResults(SCENARIO, variants, (0, 1), tuple(records))
    found = {label: results.max_rate(label, 0.9, "deadline") for label in results.labels()}
    ends = {label: one.band.ends() for label, one in found.items() if one is not None}
    assert ends == {"steady": ("2.20", "2.20"), "shaky": ("< 1.00", "1.20"), "easy": ("2.00", "> 2.00")}
    above, below, neither = (
        ratio_band(results, one, other, 0.9, "deadline")
        for one, other in (("steady", "shaky"), ("shaky", "steady"), ("shaky", "easy"))
    )
    assert above is not None
    assert below is not None
    assert neither is not None
    assert above.ends() == ("1.83", "> 2.20")
    assert below.ends() == ("< 0.45", "0.55")
    assert neither.ends() == ("< 0.50", "0.60")


def test_a_policy_with_fewer_seeds_is_not_compared() -> None:
    """It kept everything of the easy seed. Who has both is not judged by other requests than it."""
    records = hand_made("both", {1.0: (10, 10), 2.0: (10, 2)})
    records += [one for one in hand_made("easy", {1.0: (10, 0), 2.0: (10, 0), 4.0: (10, 0)}) if one["seed"] == 0]
    results = SweepResults.of_records(SCENARIO, [one | {"variant": named(one)} for one in records], {}, (0.9,))
    assert results.rates("both") == [1.0, 2.0]
    assert results.rates("easy") == []
    (told,) = results.incomplete()
    assert told == "'easy' has no rate with more than 1 of the 2 seeds of others and is not compared"
    assert "easy" not in " ".join(lead(results, 1.0, "both"))
    torn = [one for one in records if one["variant"]["label"] == "both" or one["rate"] < 4]
    torn += [one | {"seed": 1} for one in records if one["variant"]["label"] == "easy" and one["rate"] == 4]
    (told,) = SweepResults.of_records(SCENARIO, [one | {"variant": named(one)} for one in torn], {}).incomplete()
    assert " more than 1 of the 2 seeds " in told, "it has both, and at no rate both"
    scaled = SweepResults.of_records(
        SCENARIO, [r | {"scale": s, "variant": named(r)} for r in records for s in (1.0, 2.0)], {}
    )
    assert scaled.scales("both", 2.0) == [1.0, 2.0]
    assert scaled.scales("easy", 2.0) == []
    only = [one for one in records if one["seed"] == 0]
    early = SweepResults.of_records(SCENARIO, [one | {"variant": named(one)} for one in only], {}, (0.9,))
    assert early.rates("easy") == [1.0, 2.0, 4.0], "a sweep that is under way is shown as far as it is"
    assert early.incomplete() == []


def named(record: dict[str, Any]) -> dict[str, Any]:
    """The variant of a record as a results file has it."""
    return Variant.parse("fcfs@512", record["variant"]["label"]).to_dict()


@pytest.mark.parametrize("start", [4.0, 1.6])
def test_a_search_goes_on_until_it_has_seen_where_its_band_ends(start: float) -> None:
    """Seeds with capacities of 2 and 6: 90 % of both at 1.68, of the one alone at 1.52, of the other at 4.56."""

    def rates(num_widenings: int) -> list[float]:
        sweep = Sweep(SCENARIO, [FCFS], (0, 1))
        batches = sweep._searches(FCFS, Ladder(start), [(0.9, "deadline", "worst")], num_widenings)
        asked = []
        records: list[dict[str, Any]] | None = None
        while True:
            try:
                points = next(batches) if records is None else batches.send(records)
            except StopIteration:
                return asked
            asked.append(points[0].rate)
            good = [round(1000 / (1 + (p.rate / (2.0, 6.0)[p.seed]) ** 8)) for p in points]
            records = [{"blocks": {"n": [[1000]] * 20, "deadline": [[num]] * 20}} for num in good]

    assert max(rates(0)) < 4.56
    assert min(rates(9)) < 1.52
    assert max(rates(9)) > 4.56
    assert len(rates(9)) < len(rates(0)) + 10, "it does not go on for ever"


def test_a_bound_on_the_requests_under_way_sustains_no_rate_that_it_holds_back() -> None:
    """One at a time is served in time whatever the rate: what is not sent is late nowhere but in the backlog."""
    scenario = Scenario(workload="synthetic", num_requests=120, max_concurrency=1, mix="x:1:ttft=2,tpot=1")
    found = Sweep(scenario, [FCFS], (0,)).run(rates=(0.05, 20.0), num_processes=0)
    assert found.attained("fcfs@512", "deadline", "worst").tolist() == [1.0, 1.0]
    assert [found.verdict("fcfs@512", rate)[0] for rate in (0.05, 20.0)] == ["stationary", "growing"]
    one = sustained(found, "fcfs@512", 0.9, "deadline")
    assert one is not None
    assert (one.least, one.grows_from) == (0.05, 20.0)
    # Nor are these good requests per second: so many were never sent in a second.
    summary = found.points("fcfs@512", 20.0)[0]["summary"]
    sent = summary["actorllm_goodput_window_deadline"]
    assert sent < 1
    assert found.goodput("fcfs@512", 20.0, "deadline").value == pytest.approx(sent, rel=0.1)
    assert found.goodput("fcfs@512", 0.05, "deadline").value == pytest.approx(0.05, rel=0.01)


def test_the_table_by_lengths_and_the_blocks_count_every_request_once(results: SweepResults) -> None:
    for record in results.records:
        for key in ("n", "tpot", "deadline"):
            assert sum(map(sum, record["lengths"][key])) == sum(map(sum, record["blocks"][key]))
        assert sum(map(sum, record["blocks"]["n"])) == 60
        overall = record["summary"]["actorllm_overall"]["attainment"]["tpot"]
        assert sum(map(sum, record["blocks"]["tpot"])) == pytest.approx(60 * overall)


class OneByOne(AdmissionPolicy):
    """Nobody beside anybody."""

    def admit(self, sequence: Sequence, joining: list[Sequence], leaving: list[Sequence], view: View) -> Admit:
        return Admit.WAIT if joining or view.running() else Admit.ADMIT


def test_an_admission_policy_is_part_of_a_variant(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(ADMISSIONS, "names", dict(ADMISSIONS.names))
    register_admission("one-by-one", OneByOne)
    alone = Variant.parse("edf@512+one-by-one")
    results = Sweep(SCENARIO, [EDF, alone], (0,)).run(rates=(2.0,), num_processes=1)
    slow, fast = (results.points(label, 2.0)[0]["summary"]["mean_ttft_ms"] for label in (alone.label, EDF.label))
    assert slow > 3 * fast
    with pytest.raises(ConfigError, match="'worstcase'; did you mean 'worst-case'"):
        Variant.parse("edf+worstcase")


# The results file --------------------------------------------------------------------------------------------------------


SCRIPT = """
import sys, os, signal
from actorllm.slo.experiments import Scenario, Sweep, Variant
def stop(num_done, num_known, point):
    print(num_done, num_known, flush=True)
    if num_done == int(sys.argv[2]):
        os.kill(os.getpid(), signal.SIGKILL)
Sweep(Scenario(workload="synthetic", num_requests=60), [Variant.parse("fcfs@512"), Variant.parse("edf@512")], (0, 1)).run(
    rates=(2.0, 4.0), store=sys.argv[1], num_processes=int(sys.argv[3]), on_progress=stop)
"""


def sweep_in_a_process(path: Path, kill_after: int, num_processes: int) -> list[str]:
    arguments = [sys.executable, "-c", SCRIPT, str(path), str(kill_after), str(num_processes)]
    environment = os.environ | {"PYTHONPATH": os.pathsep.join(sys.path)}
    done = subprocess.run(arguments, capture_output=True, text=True, env=environment, check=False)
    assert done.returncode == (-9 if kill_after else 0), done.stderr
    return done.stdout.split("\n")[:-1]


def test_a_sweep_goes_on_after_a_kill(tmp_path: Path) -> None:
    path = tmp_path / "results.jsonl"
    assert sweep_in_a_process(path, 3, 0)[-1] == "3 8"
    whole = path.read_bytes()
    assert whole.count(b"\n") == 4, "the scenario and three points"
    path.write_bytes(whole[:-200])  # and the last write was cut short
    assert sweep_in_a_process(path, 0, 0)[-1] == "6 6"
    sweep = Sweep(SCENARIO, [FCFS, EDF], (0, 1))
    sweep.run(rates=(2.0, 4.0), store=path, num_processes=0, on_progress=lambda *_: pytest.fail("simulated again"))
    scenario, records, stamp, _ = read_results(path)
    assert scenario == SCENARIO
    assert stamp["versions"]["numpy"]
    fresh = sweep.run(rates=(2.0, 4.0), num_processes=0)
    found = SweepResults.of_records(scenario, records, stamp)
    assert json.dumps(found.records, sort_keys=True) == json.dumps(fresh.records[::1], sort_keys=True)


@pytest.mark.parametrize("length", [1, 40, -1])
def test_a_first_line_that_was_cut_short_is_written_again(tmp_path: Path, length: int) -> None:
    path, whole = tmp_path / "results.jsonl", tmp_path / "whole.jsonl"
    sweep = Sweep(Scenario(workload="synthetic", num_requests=30), [FCFS], (0,))
    sweep.run(rates=(2.0,), store=whole, num_processes=0)
    path.write_bytes(whole.read_bytes().split(b"\n")[0][: length if length > 0 else None])
    (note,) = sweep.run(rates=(2.0,), store=path, num_processes=0).notes
    assert "1 broken lines were dropped" in note
    assert [set(json.loads(line)) >= {"scenario"} for line in path.read_bytes().splitlines()] == [True, True]
    assert len(read_results(path)[1]) == 1


def test_a_disk_that_is_full_is_told(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def write(fd: int, data: bytes) -> int:
        raise OSError(errno.ENOSPC, "No space left on device")

    monkeypatch.setattr("actorllm.slo.experiments.store.os.write", write)
    with pytest.raises(ConfigError, match="cannot be written: No space left on device; the sweep can be resumed"):
        Sweep(SCENARIO, [FCFS], (0,)).run(rates=(2.0,), store=tmp_path / "results.jsonl", num_processes=0)


def test_another_configuration_in_the_same_file_is_told_and_not_mixed(tmp_path: Path) -> None:
    path = tmp_path / "results.jsonl"
    small = Scenario(workload="synthetic", num_requests=30)
    assert Sweep(small, [FCFS], (0,)).run(rates=(2.0,), store=path, num_processes=0).notes == ()
    other = Scenario(workload="synthetic", num_requests=31)
    found = Sweep(other, [FCFS], (0,)).run(rates=(2.0,), store=path, num_processes=0)
    assert len(found.records) == 1
    (note,) = found.notes
    assert f"1 points of other configurations than this one ({other.digest})" in note
    assert read_results(path)[0] == other
    assert read_results(path, small.digest[:8])[0] == small
    (tmp_path / "empty.jsonl").touch()
    with pytest.raises(ConfigError, match="holds no results: a sweep that writes there has not begun"):
        read_results(tmp_path / "empty.jsonl")
    with pytest.raises(ConfigError, match="has no scenario 'zz'; there is"):
        read_results(path, "zz")


def test_points_of_other_code_are_told(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = tmp_path / "results.jsonl"
    sweep = Sweep(Scenario(workload="synthetic", num_requests=30), [FCFS], (0,))
    sweep.run(rates=(2.0,), store=path, num_processes=0)
    monkeypatch.setattr("actorllm.slo.experiments.store.code_digest", lambda: "another")
    (note,) = sweep.run(rates=(2.0,), store=path, num_processes=0).notes
    assert "1 points were made by other code than this (another)" in note


@pytest.mark.parametrize(
    "content",
    [
        "dear diary\n",
        "no end of line",
        '{"completed": 60, "ttfts": [0.1]}',
        '{"scenario":"rain"}',
        '{"key": "mine", "scenario": "rain"}\n{"key"',
        '{"values": 1, "scenario": "x"}\n',
        "[" * 100_000 + "\n",
        "9" * 5000 + "\n",
        "\n\n",
    ],
)
def test_a_file_of_something_else_is_left_alone(content: str, tmp_path: Path) -> None:
    path = tmp_path / "notes.txt"
    path.write_text(content)
    with pytest.raises(ConfigError, match="holds no results of a sweep"):
        Sweep(SCENARIO, [FCFS]).run(rates=(2.0,), store=path, num_processes=0)
    with pytest.raises(ConfigError, match="holds no results of a sweep"):
        read_results(path)
    assert path.read_text() == content


def test_a_results_file_that_cannot_be_read(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="there is no results file"):
        read_results(tmp_path / "nothing.jsonl")
    with pytest.raises(ConfigError, match="cannot be read: Is a directory"):
        read_results(tmp_path)


def test_reading_results_leaves_the_line_that_is_being_written(tmp_path: Path) -> None:
    path = tmp_path / "results.jsonl"
    sweep = Sweep(Scenario(workload="synthetic", num_requests=30), [FCFS], (0,))
    sweep.run(rates=(2.0, 3.0), store=path, num_processes=0)
    cut = path.read_bytes()[:-200]
    path.write_bytes(cut)
    assert len(read_results(path)[1]) == 1
    assert path.read_bytes() == cut
    (note,) = sweep.run(rates=(2.0, 3.0), store=path, num_processes=0).notes
    assert "1 broken lines were dropped" in note
    assert len(read_results(path)[1]) == 2
    assert path.read_bytes().count(b"\n") == 3


def test_a_label_is_only_a_name(tmp_path: Path) -> None:
    path = tmp_path / "results.jsonl"
    small = Scenario(workload="synthetic", num_requests=30)
    Sweep(small, [FCFS], (0,)).run(rates=(2.0,), store=path, num_processes=0)
    named = Sweep(small, [Variant.parse("fcfs@512", "baseline")], (0,))
    found = named.run(rates=(2.0,), store=path, num_processes=0, on_progress=lambda *_: pytest.fail("simulated again"))
    assert found.band("baseline", 2.0, "tpot").value > 0


def test_a_policy_that_was_edited_is_not_mixed_with_what_it_was(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = tmp_path / "results.jsonl"
    sweep = Sweep(Scenario(workload="synthetic", num_requests=30), [FCFS, Variant(policy=f"{__name__}:Patient")], (0,))
    sweep.run(rates=(2.0, 3.0), store=path, num_processes=0)
    monkeypatch.setattr("actorllm.slo.experiments.point._own_source", lambda path: f"another {path}")
    sweep.run(rates=(3.0, 4.0), store=path, num_processes=0)
    scenario, records, stamp, _ = read_results(path)
    assert len(records) == 8
    found = SweepResults.of_records(scenario, records, stamp)
    for label in found.labels():
        assert found.rates(label) == [3.0, 4.0]
        assert [len(found.points(label, rate)) for rate in (3.0, 4.0)] == [1, 1]
    assert [note.partition(" as it was")[0] for note in found.notes] == [
        f"2 points of {label!r}" for label in found.labels()
    ]


# What is wrong -----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("num_processes", [0, 1])
def test_a_policy_that_raises_ends_its_own_points_only(num_processes: int) -> None:
    bad = Variant(policy=f"{__name__}:Raises", label="bad")
    found = Sweep(SCENARIO, [bad, FCFS], (0, 1)).run(
        rates=(2.0,), targets=(0.5,), aggregates=("worst",), readings=("tpot",), num_processes=num_processes
    )
    assert found.labels() == ["bad", "fcfs@512"]
    assert found.rates("bad") == []
    assert found.max_rate("bad", 0.5, "tpot") is None
    assert found.max_rate("fcfs@512", 0.5, "tpot") is not None
    (failure,) = found.failures
    assert "bad at 2 requests/s" in str(failure)
    assert "no such luck" in str(failure)


def test_a_variant_builds_its_policy_behind_its_admission() -> None:
    assert isinstance(Variant.parse("edf+credit").build_gated(None), AdmissionGate)
    assert isinstance(Variant.parse("edf").build_gated(None), KeyPlanner)


def test_knobs_are_those_of_the_policy() -> None:
    variant = Variant.parse("qoserve,anchor=first,alpha=0.0005,relegates=off,step_time=model@2048")
    assert variant.knobs == (("anchor", "first"), ("alpha", 0.0005), ("relegates", False), ("step_time", "model"))
    assert variant.text == "qoserve,anchor=first,alpha=0.0005,relegates=False,step_time=model@2048"
    assert variant.tokens == 2048
    built: Any = variant.build_policy(None)
    assert (built.policy.anchor, built.policy.alpha, built.policy.relegates) == ("first", 0.0005, False)
    assert Variant.from_dict(json.loads(json.dumps(variant.to_dict()))) == variant


@pytest.mark.parametrize("policy", POLICIES)
def test_every_policy_can_pack_strictly(policy: str) -> None:
    """A short prompt that comes a millisecond after a long one has its first token after it, or passes it."""
    workload = make_workload(np.array([0.0, 0.001]), (np.array([4096, 100], np.int32), np.array([4, 4], np.int32)))
    workload = assign_classes(workload, parse_mix("ls:1:ttft=9,tpot=9"))
    shape = EngineShape(num_blocks=4000, max_num_batched_tokens=512, max_model_len=8192, enable_prefix_caching=False)
    first = {}
    for strict in ("on", "off"):
        variant = Variant.parse(f"{policy},strict={strict}")
        assert Variant.from_dict(json.loads(json.dumps(variant.to_dict()))) == variant
        run = simulate(workload, shape, preset("a100-llama-3-8b"), policy=lambda v=variant: v.build_policy(None))
        first[strict] = run.timeline.first_token.tolist()
    if policy in ("fcfs", "vtc", "priority"):
        assert first["on"][1] > first["on"][0], "strictly in the order of arrival"
        assert first["off"][1] < first["off"][0], "the short prompt passes the long one"
        assert first["on"][0] <= first["off"][0], "the long one loses nothing to the short one"


@pytest.mark.parametrize("policy", POLICIES)
def test_with_strict_packing_no_prompt_passes_one_that_is_cut(policy: str) -> None:
    """In the order of any policy: behind a prompt that a step does not finish, it serves none."""
    sizes = np.where(np.arange(24) % 3 == 0, 3000, 100).astype(np.int32)
    workload = make_workload(np.arange(24) * 0.001, (sizes, np.full(24, 4, np.int32)))
    workload = assign_classes(workload, parse_mix("ls:1:ttft=9,tpot=9"))
    shape = EngineShape(num_blocks=8000, max_num_batched_tokens=512, max_model_len=8192, enable_prefix_caching=False)
    num_passing = {}
    for strict in ("on", "off"):
        journal = Journal()
        variant = Variant.parse(f"{policy},strict={strict}")
        simulate(
            workload,
            shape,
            preset("a100-llama-3-8b"),
            policy=lambda v=variant: v.build_policy(None),
            make_scheduler=journal.scheduler_maker(shape),
        )
        done: Counter[int] = Counter()
        num_passing[strict] = 0
        for entry in journal.steps:
            is_cut = False
            for (_, row), size in entry.prefills:
                num_passing[strict] += is_cut
                done[row] += size
                is_cut |= done[row] < sizes[row]
        assert [done[row] for row in range(24)] == sizes.tolist()
    assert num_passing["on"] == 0
    if policy in ("fcfs", "sarathi"):
        assert num_passing["off"] > 0, "else the test would tell nothing"


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("fcsf", "no scheduling policy 'fcsf'.*fcfs"),
        ("edf@many", "'many' is no number of tokens"),
        ("qoserve,alhpa=1", "no knob 'alhpa'.*alpha"),
        ("qoserve,alpha=x", "alpha='x' must be a number"),
        ("qoserve,relegates=maybe", "must be on or off"),
        ("qoserve,alpha", "must be knob=value"),
        ("qoserve,step_time=7", "must be model"),
        ("edf@0", "0 tokens per step"),
    ],
)
def test_a_variant_that_cannot_be_is_told_at_once(text: str, message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        Variant.parse(text)


@pytest.mark.parametrize(
    ("values", "message"),
    [
        ({"workload": "nowhere.csv"}, "none of sample, synthetic, sessions, agents, and not the path"),
        ({"arrivals": "gama"}, "arrivals='gama'.*gamma"),
        ({"arrivals": "gamma"}, "needs its coefficient"),
        ({"num_requests": 0}, "num_requests=0"),
        ({"trace_format": "mooncak"}, "format 'mooncak'.*mooncake"),
        ({"router": "rond-robin"}, "router='rond-robin'.*round-robin"),
        ({"model": "a100"}, "no step-time preset 'a100'"),
    ],
)
def test_a_scenario_that_cannot_be_is_told_at_once(values: dict[str, Any], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        Sweep(Scenario(**values), [Variant.parse("fcfs")])


def test_a_class_of_the_program_itself_is_for_this_process_only(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sys.modules["__main__"], "Mine", Edf, raising=False)
    sweep = Sweep(SCENARIO, [Variant(policy="__main__:Mine")], (0,))
    with pytest.raises(ConfigError, match="put it into a module of its own, or use num_processes=0"):
        sweep.run(rates=(2.0,), num_processes=1)
    assert len(sweep.run(rates=(2.0,), num_processes=0).records) == 1


def test_two_variants_of_one_name_are_refused() -> None:
    with pytest.raises(ConfigError, match="two policies of the sweep are called 'fcfs@512'"):
        Sweep(SCENARIO, [FCFS, FCFS])
    with pytest.raises(ConfigError, match="'fcfs@512' and 'again' of the sweep are the same policy"):
        Sweep(SCENARIO, [FCFS, EDF, Variant.parse("fcfs@512", "again")])


def test_a_record_is_of_its_point_alone() -> None:
    point = Point(scenario=SCENARIO, variant=FCFS, rate=2.0)
    assert json.dumps(record_of(point, point.run())) == json.dumps(record_of(point, point.run()))
    assert Point.from_dict(json.loads(json.dumps(point.to_dict()))) == point


def test_the_code_of_a_point_is_all_that_its_figures_depend_on() -> None:
    """Modules of `slo/` that a point, its run and its record import, but for those that a point cannot ask for."""
    slo = Path(point_module.__file__).parents[1]
    unused = {"delays", "failures", "journal", "policy_cost", "rescheduling", "roles", "scaling", "experiments/point"}
    imported = {
        name.replace(".", "/")
        for file in ("simulator", "unattainable", "experiments/point", "experiments/record", "experiments/stationarity")
        for name in re.findall(r"^from actorllm\.slo\.([\w.]+) import", (slo / f"{file}.py").read_text(), re.MULTILINE)
    }
    assert imported - unused <= {*point_module.MODULES}
    assert all((slo / f"{name}.py").exists() for name in point_module.MODULES)
