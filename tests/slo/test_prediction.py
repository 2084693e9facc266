"""Runs that were measured elsewhere: read, simulated in their place, and judged figure by figure."""

from __future__ import annotations

import json
import math
import re
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest

from actorllm import cli
from actorllm.errors import ConfigError
from actorllm.scheduling.cost_model import LinearModel, Regime, load_model, preset, to_json
from actorllm.scheduling.policy import Admit, KeyPolicy, View
from actorllm.scheduling.sequence import Sequence
from actorllm.slo.calibration import fit_to_run, guess
from actorllm.slo.measured_runs import read_run
from actorllm.slo.prediction import predict_run
from actorllm.slo.report import bench_json
from actorllm.slo.simulator import EngineShape, SimulatedRun, simulate
from actorllm.slo.workload import gamma_arrivals, lognormal_lengths, make_workload

TRUTH = LinearModel((Regime(math.inf, (0.02, 1e-4, 2e-4, 0, 0, 0)),), "truth")
SHAPE = EngineShape(num_blocks=600, max_num_seqs=32, max_num_batched_tokens=512, max_model_len=2048)
ENGINE = ["--num-blocks", "600", "--max-num-seqs", "32", "--max-num-batched-tokens", "512", "--max-model-len", "2048"]


@pytest.fixture(scope="module")
def run() -> SimulatedRun:
    lengths = lognormal_lengths(120, (200, 900), (40, 150), longest=900)
    return simulate(make_workload(gamma_arrivals(120, 4.0, 1.0), lengths), SHAPE, TRUTH)


@pytest.fixture
def of_vllm(run: SimulatedRun, tmp_path: Path) -> Path:
    file = tmp_path / "run.json"
    file.write_text(json.dumps(bench_json(run.timeline, run.workload, run.evaluate(with_gaps=True).summary, model="m")))
    return file


@pytest.fixture
def of_requests(run: SimulatedRun, tmp_path: Path) -> Path:
    file, timeline = tmp_path / "requests.jsonl", run.timeline
    rows = [
        {
            "request_id": f"bench-{i}", "input_toks": int(timeline.num_prompt[i]), "output_toks": int(timeline.num_output[i]),
            "queued_ts": 500 + float(timeline.arrival[i]), "first_token_ts": 500 + float(timeline.first_token[i]),
            "last_token_ts": 500 + float(timeline.last_token[i]),
        }
        for i in range(len(timeline))
    ]  # fmt: skip
    rows.append(rows[0] | {"output_toks": 0})
    file.write_text("\n".join(map(json.dumps, rows)))
    return file


@pytest.mark.parametrize("kind", ["of_vllm", "of_requests"])
def test_a_run_is_read_as_it_was(kind: str, run: SimulatedRun, request: pytest.FixtureRequest) -> None:
    found = read_run(request.getfixturevalue(kind))
    assert found.workload.num_prompt.tolist() == run.workload.num_prompt.tolist()
    assert found.workload.num_output.tolist() == run.workload.num_output.tolist()
    assert found.workload.arrival == pytest.approx(run.workload.arrival - run.workload.arrival[0], abs=1e-6)
    for name in ("ttft", "tpot", "e2e"):
        assert getattr(found.timeline, name) == pytest.approx(getattr(run.timeline, name), abs=1e-6)
    assert found.num_skipped == (kind == "of_requests")


def test_the_true_model_predicts_and_a_wrong_one_does_not(of_requests: Path) -> None:
    measured = read_run(of_requests)
    found = predict_run(measured, SHAPE, TRUTH)
    assert found.is_met
    assert max(abs(figure.error) for figure in found.figures) < 0.01
    assert {figure.name: figure.verdict for figure in found.figures}["p99 ttft"] == "met"
    slow = replace(TRUTH, regimes=(Regime(math.inf, (0.024, 1e-4, 2e-4, 0, 0, 0)),))
    assert not predict_run(measured, SHAPE, slow).is_met
    assert not predict_run(measured, replace(SHAPE, num_blocks=130), TRUTH).is_met, (
        "capacity must be that of the engine"
    )


class Some(KeyPolicy):
    """The others never start."""

    def admit(self, sequence: Sequence, view: View) -> Admit:
        return Admit.ADMIT if sequence.arrival_index < 110 else Admit.WAIT


def test_requests_that_the_simulation_loses_are_told_and_the_prediction_does_not_hold(
    of_requests: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """The figures of the others are right."""
    found = predict_run(read_run(of_requests), SHAPE, TRUTH, policy=f"{__name__}:Some")
    assert {figure.verdict for figure in found.figures} == {"met", "not judged"}
    assert (found.num_judged, found.num_unfinished, found.is_met) == (110, 10, False)
    model = tmp_path / "model.json"
    model.write_text(to_json(TRUTH))
    policy = ("--policy", f"{__name__}:Some")
    assert cli.main(["predict", str(of_requests), "--model", str(model), *ENGINE, *policy]) == 1
    assert "10 requests did not finish in the simulation, and are in no figure" in capsys.readouterr().out


def test_a_run_of_single_tokens_has_no_gaps_to_judge(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """As runs that measure prompts have it; of a mixed one the gaps are those of requests that have some, as in vLLM."""
    lengths = np.full(40, 200, np.int32), np.ones(40, np.int32)
    single = simulate(make_workload(gamma_arrivals(40, 4.0, 1.0), lengths), SHAPE, TRUTH)
    file = tmp_path / "single.json"
    file.write_text(json.dumps(bench_json(single.timeline, single.workload, single.evaluate(with_gaps=True).summary)))
    found = predict_run(read_run(file), SHAPE, TRUTH)
    assert {one.name: one.verdict for one in found.figures if one.name.endswith("tpot")} == {"mean tpot": "not tested"}
    assert found.is_met
    model = tmp_path / "model.json"
    model.write_text(to_json(TRUTH))
    assert cli.main(["predict", str(file), "--model", str(model), *ENGINE]) == 0
    assert "nan" not in capsys.readouterr().out
    assert set(fit_to_run(single.workload, single.timeline, SHAPE, TRUTH, np.arange(40) < 20, max_runs=4).seen) == {
        "ttft",
        "e2e",
    }
    mixed = simulate(
        make_workload(gamma_arrivals(40, 4.0, 1.0), (lengths[0], np.arange(40, dtype=np.int32) % 2 + 1)), SHAPE, TRUTH
    )
    summary = mixed.evaluate(with_gaps=True).summary
    file.write_text(json.dumps(bench_json(mixed.timeline, mixed.workload, summary)))
    tpot = predict_run(read_run(file), SHAPE, TRUTH).figures[2]
    assert (tpot.name, 1e3 * tpot.measured) == ("mean tpot", pytest.approx(summary["mean_tpot_ms"]))


def test_the_first_requests_may_choose_the_coefficients(of_requests: Path) -> None:
    start = replace(TRUTH, regimes=(Regime(math.inf, (0.012, 2e-4, 1e-4, 0, 0, 0)),))
    measured = read_run(of_requests)
    found = predict_run(measured, SHAPE, start, fit_share=0.5, max_runs=25)
    assert (found.num_fitted, found.num_judged) == (60, 60)
    assert {figure.verdict for figure in found.figures if figure.name.startswith("p99")} == {"not judged"}, "too few"
    before = predict_run(measured, SHAPE, start)
    assert abs(found.figures[2].error) < 0.5 * abs(before.figures[2].error)
    with pytest.raises(ConfigError, match="only linear step times are fitted"):
        predict_run(measured, SHAPE, preset("h200-llama-3-8b-roofline"), fit_share=0.5)
    with pytest.raises(ConfigError, match="fit_share=1 must be 0 or more and below 1"):
        predict_run(measured, SHAPE, start, fit_share=1)


@pytest.mark.parametrize(
    ("text", "told"),
    [
        ("{", "cannot be read"),
        ("{}", "has no 'start_times'; it must be the JSON of `vllm bench serve --save-result --save-detailed`"),
        ('{"a": 1}\n{"a": 2}\n', "has no 'queued_ts'"),
        (
            '{"start_times": [0], "input_lens": [1], "output_lens": [0], "ttfts": [1], "itls": [[]]}',
            "no request with tokens",
        ),
        ('{"start_times": 5, "input_lens": [1], "output_lens": [2], "ttfts": [1], "itls": 7}', "cannot be read"),
    ],
)
def test_a_run_that_cannot_be_read_is_named(tmp_path: Path, text: str, told: str) -> None:
    file = tmp_path / "bad.json"
    file.write_text(text)
    with pytest.raises(ConfigError, match=r"bad\.json") as raised:
        read_run(file)
    assert told in str(raised.value)


def test_the_command_has_a_verdict(of_requests: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    model, fitted = tmp_path / "model.json", tmp_path / "fitted.json"
    model.write_text(to_json(TRUTH))
    assert cli.main(["predict", str(of_requests), "--model", str(model), *ENGINE, "--output", str(fitted)]) == 0
    out = capsys.readouterr().out
    assert "120 requests judged, 1 left out; truth, nothing fitted" in out
    assert out.endswith("the prediction holds\n")
    assert load_model(str(fitted)) == TRUTH
    assert cli.main(["predict", str(of_requests), "--model", "h200-llama-3-8b-roofline", *ENGINE]) == 1
    assert "the prediction does not hold" in capsys.readouterr().out
    assert cli.main(["predict", str(of_requests), "--model", str(model), "--num-blocks", "60"]) == 2
    assert "60 blocks of 16 hold less than max_model_len=32768" in capsys.readouterr().err
    small = ("--num-blocks", "600", "--max-model-len", "700")
    for command in (["predict", str(of_requests), "--model", str(model)], ["calibrate", "--run", str(of_requests)]):
        assert cli.main([*command, *small]) == 2
        assert "max_model_len=700 is less than " in capsys.readouterr().err
    assert np.isfinite(read_run(of_requests).timeline.e2e).all()


def guidellm_rows(is_new: bool) -> list[dict[str, object]]:
    """Four requests that succeeded, as its report has them; of the last one no token's time is known."""
    rows: list[dict[str, object]] = []
    for number in range(4):
        start = 1000.0 + number
        first = None if number == 3 else start + 0.5
        last = None if number == 3 else start + 0.5 + 0.1 * (number + 1)
        if is_new:
            timings = {"request_start": start, "first_token_iteration": first, "last_token_iteration": last}
            times: dict[str, object] = {"info": {"timings": timings}}
        else:
            times = {"start_time": start, "first_token_time": first, "last_token_time": last}
        rows.append({**times, "prompt_tokens": 10 + number, "output_tokens": 2 + number})
    return rows[::-1]  # in the order in which they ended


@pytest.mark.parametrize("is_new", [True, False])
def test_a_report_of_guidellm_is_read(is_new: bool, tmp_path: Path) -> None:
    one = {"requests": {"successful": guidellm_rows(is_new), "errored": [{}], "incomplete": []}}
    file = tmp_path / "report.json"
    file.write_text(json.dumps({"benchmarks": [one], "metadata": {}}))
    run = read_run(file)
    assert run.num_skipped == 1
    np.testing.assert_allclose(run.timeline.arrival, [0, 1, 2])
    np.testing.assert_allclose(run.timeline.ttft, 0.5)
    np.testing.assert_allclose(run.timeline.tpot, [0.1, 0.1, 0.1])
    assert run.workload.num_prompt.tolist() == [10, 11, 12]
    assert run.workload.num_output.tolist() == [2, 3, 4]
    file.write_text(json.dumps({"benchmarks": [{"requests": {"successful": []}}, one]}))
    assert len(read_run(f"{file}#1").timeline) == 3
    for path, said in ((str(file), "has 2 benchmarks; name one, such as"), (f"{file}#2", "has no benchmark 2")):
        with pytest.raises(ConfigError, match=said):
            read_run(path)
    with pytest.raises(ConfigError, match="no request with tokens and times"):
        read_run(f"{file}#0")


def test_step_times_are_fitted_to_a_run(
    of_requests: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """Nothing is known but when requests came and went, and the limits of the engine."""
    monkeypatch.setattr("actorllm.slo.calibration.MAX_RUNS", 24)
    model = tmp_path / "fitted.json"
    assert cli.main(["calibrate", "--run", str(of_requests), *ENGINE, "--output", str(model), "--name", "mine"]) == 0
    out = capsys.readouterr().out
    assert "120, of them 24 held out, 1 left out" in out
    assert re.search(r"ttft +[+-]\d+\.\d% +[+-]\d+\.\d%", out)
    found = load_model(str(model))
    assert found.name == "mine"
    measured = read_run(of_requests)
    before = predict_run(measured, SHAPE, guess(measured.workload, measured.timeline))
    after = predict_run(measured, SHAPE, found)
    off = [sum(abs(figure.error) for figure in one.figures) for one in (before, after)]
    assert off[1] < 0.5 * off[0]
    assert off[1] < 0.6, "six figures, each within a tenth"


@pytest.mark.parametrize(
    ("options", "told"),
    [
        (["--run", "run.jsonl"], "say how many KV blocks its engine had, with --num-blocks"),
        (["--run", "run.jsonl", "--num-blocks", "9"], "9 blocks of 16 hold less than max_model_len=32768"),
        (["--run", "run.jsonl", "--num-blocks", "9000", "--dtype", "float32"], "another engine: dtype cannot be given"),
        (
            ["--run", "run.jsonl", "--num-blocks", "9000", "--max-model-len", "auto"],
            "'auto' must be a number of tokens",
        ),
        (["--run", "run.jsonl", "--num-blocks", "9000"], "'run.jsonl' cannot be read"),
        (["--run", "run.jsonl", "--recording", "run.bin"], "leave out recording, profile and plot"),
        (["--num-blocks", "9000"], "num-blocks=9000 is of the engine of a run: give --run, too"),
    ],
)
def test_a_run_that_cannot_be_fitted_to_is_named(
    options: list[str],
    told: str,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    monkeypatch.chdir(tmp_path)
    assert cli.main(["calibrate", *options]) == 2
    assert told in capsys.readouterr().err
