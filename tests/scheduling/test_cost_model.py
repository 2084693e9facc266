"""The step-time model: presets, JSON, and fitting it to steps whose truth is known."""

from __future__ import annotations

import math

import numpy as np
import pytest

from actorllm.errors import ConfigError
from actorllm.scheduling.cost_model import (
    Fit,
    LinearModel,
    MeasuredSteps,
    Regime,
    fit,
    from_json,
    load_model,
    nonnegative_least_squares,
    preset,
    to_json,
)
from actorllm.slo.parity import parity_text
from actorllm.slo.unattainable import unattainable
from actorllm.slo.workload import assign_classes, fixed_lengths, make_workload
from actorllm.types.objective import SLO, RequestClass


def test_the_published_coefficients_are_what_was_published() -> None:
    model = preset("a100-llama-3-8b")
    n, p, d, ctx_d, ctx_p = 300, 240, 60, 60_000, 512
    small = 0.014936 + 5.882e-5 * n + 2.248e-5 * p + 3.635e-5 * d + 1.111e-7 * ctx_d + 7.555e-7 * ctx_p
    assert model.seconds(p, d, ctx_d, ctx_p) == pytest.approx(small, rel=1e-3)
    n, p = 1060, 1000
    large = 0.005004 + 2.719e-5 * n + 6.863e-5 * p - 4.144e-5 * d + 1.663e-7 * ctx_d + 2.727e-6 * ctx_p
    assert model.seconds(p, d, ctx_d, ctx_p) == pytest.approx(large, rel=1e-3)


def test_the_roofline_reads_the_weights_and_the_context() -> None:
    model = preset("h200-llama-3-8b-roofline")
    empty = model.seconds(0, 1, 1)
    assert empty == pytest.approx(5e-4 + 15e9 / 3.84e12, rel=1e-3), "a small step waits for the weights"
    assert model.seconds(0, 64, 64 * 4000) - model.seconds(0, 64, 64) == pytest.approx(64 * 3999 * 131072 / 3.84e12)
    assert model.seconds(8192, 0, 0, 0, 8192 * 4096) > 8192 * 15e9 / 593.4e12, "a large one for the arithmetic"


@pytest.mark.parametrize("name", ["a100-llama-3-8b", "h200-llama-3-8b-roofline"])
def test_a_run_of_steps_is_its_steps_and_json_gives_the_model_again(name: str) -> None:
    model = preset(name)
    for d in (1, 64, 600):
        context = 900 * d
        single = [model.seconds(0, d, context + d * step) for step in range(20)]
        assert model.decode_run(d, context, 20).tolist() == single, "to the bit"
    assert from_json(to_json(model)) == model


@pytest.mark.parametrize(
    ("text", "problem"),
    [
        ("{", "must be JSON"),
        ("[]", "kind is one of 'linear', 'roofline', 'table'"),
        ('{"kind": "linear", "regime": []}', "'regime' is not known; did you mean 'regimes'"),
        ('{"kind": "linear", "regimes": []}', "at least one regime"),
        ('{"kind": "linear", "regimes": [{"max_tokens": null, "coefficients": [1]}]}', "6 finite coefficients"),
        ('{"kind": "roofline", "name": "x"}', "missing 6 required"),
    ],
)
def test_a_file_that_is_no_model_says_why(text: str, problem: str) -> None:
    with pytest.raises(ConfigError, match=problem):
        from_json(text)


def test_an_unknown_preset_names_the_nearest() -> None:
    with pytest.raises(ConfigError, match="did you mean 'a100-llama-3-8b'"):
        load_model("a100-llama3-8b")


TRUTH = LinearModel(
    (
        Regime(256, (4e-3, 2e-5, 3e-5, 1e-7, 4e-7, 0.0)),
        Regime(math.inf, (1e-3, 5e-5, 2e-5, 1e-7, 4e-7, 2e-9)),
    )
)


def make_log(num: int, noise: float, seed: int = 0) -> MeasuredSteps:
    rng = np.random.default_rng(seed)
    p = np.where(rng.random(num) < 0.4, rng.integers(1, 1024, num), 0).astype(float)
    d = rng.integers(1, 128, num).astype(float)
    before = np.where(p > 0, rng.integers(0, 2000, num), 0).astype(float)
    context, pairs = d * rng.uniform(100, 2000, num), p * (before + p / 2)
    rows = np.stack((p, d, context, before, pairs), axis=1).tolist()
    taken = np.array([TRUTH.seconds(*row) for row in rows]) * np.exp(noise * rng.standard_normal(num))
    started = np.cumsum(taken + 2e-4) - taken
    launched = np.concatenate(([started[0] - 1e-3], started[:-1] + 1e-5))
    launched[::7] = started[::7] - 1e-3
    launched[7::7] = np.maximum(launched[7::7], (started + taken)[6:-1:7][: launched[7::7].size] + 1e-9)
    return MeasuredSteps(p, d, context, before, pairs, launched, started, started + taken)


def test_a_fit_finds_both_regimes_and_says_how_well_it_predicts() -> None:
    found = fit(make_log(3000, 0.03))
    assert found.mape < 0.035, "the noise alone is 2.4 %"
    assert abs(found.bias) < 0.01
    assert len(found.model.regimes) == 2
    assert found.model.regimes[0].max_tokens == pytest.approx(256, rel=0.5)
    assert found.model.gap_s == pytest.approx(2e-4, rel=0.01)
    assert found.measured.size == found.predicted.size == 600
    assert found.warnings == ()
    residuals = found.model.residuals
    assert list(residuals) == sorted(residuals)
    assert residuals[len(residuals) // 2] == pytest.approx(1.0, abs=0.02)
    assert from_json(to_json(found.model)) == found.model


def log_by_kind(num: int, rows: int, seed: int = 1) -> MeasuredSteps:
    """Steps of up to so many decode rows; those with prompts take 6 ms more and their rows cost less, as with other kernels."""
    rng = np.random.default_rng(seed)
    p = np.where(np.arange(num) % 3 == 0, rng.integers(1, 400, num), 0).astype(float)
    d = rng.integers(1, rows + 1, num).astype(float)
    nothing = np.zeros(num)
    taken = np.where(p > 0, 8e-3 + 3e-5 * p + 1e-5 * d, 2e-3 + 1e-4 * d) * np.exp(0.02 * rng.standard_normal(num))
    ended = np.cumsum(taken)
    return MeasuredSteps(p, d, 100 * d, nothing, p * p / 2, ended - taken, ended - taken, ended)


def test_steps_without_prompts_have_coefficients_of_their_own_where_one_sum_is_wrong() -> None:
    found = fit(log_by_kind(2000, 60))
    model = found.model
    assert model.decode_regimes
    off = np.abs(found.predicted / found.measured - 1)
    has_prompt = found.features[:, 1] > 0
    assert off[has_prompt].mean() < 0.02, "the noise alone is 1.6 %"
    assert off[~has_prompt].mean() < 0.02
    assert from_json(to_json(model)) == model
    single = [model.seconds(0, 8, 900 + 8 * step) for step in range(20)]
    assert model.decode_run(8, 900, 20).tolist() == single, "to the bit"
    assert model.seconds(0, 8, 800) == pytest.approx(2.8e-3, rel=0.02)
    assert model.seconds(200, 8, 800, 0, 20_000) == pytest.approx(14.1e-3, rel=0.02)
    assert not fit(log_by_kind(2000, 2)).model.decode_regimes, "what a row costs is not known of two numbers of rows"


def test_a_fit_does_not_follow_outliers() -> None:
    log = make_log(2000, 0.01)
    log.ended[::50] += 0.5  # a host that was busy with something else
    found = fit(log)
    typical = np.median(np.abs(found.predicted / found.measured - 1))
    assert typical < 0.02
    # but what is drawn takes as long in sum as what was measured did
    residuals = np.array(found.model.residuals)
    drawn = np.interp(np.linspace(0, 1, 100_001), np.linspace(0, 1, residuals.size), residuals).mean()
    held = np.arange(2000) % 5 == 4
    took = (log.ended - log.started)[~held]
    rows = log.features()[~held, 1:].tolist()
    assert drawn == pytest.approx(took.sum() / sum(found.model.seconds(*row) for row in rows), rel=1e-3)


def test_too_few_steps_are_an_error_that_says_how_many_are_needed() -> None:
    with pytest.raises(ConfigError, match="at least 100 steps and got 99"):
        fit(make_log(99, 0.01))
    log = make_log(150, 0.01)
    log.ended[:60] = log.started[:60]
    with pytest.raises(ConfigError, match=r"got 90 \(60 without a duration left out\)"):
        fit(log)


def test_what_was_not_seen_is_told() -> None:
    log = make_log(200, 0.01)
    log.p[:] = 0.0
    log.d[:] = 4.0
    assert [warning.split(":")[0] for warning in fit(log).warnings] == [
        "no step had prompt tokens",
        "decode rows came in fewer than 3 different numbers",
    ]


def test_a_step_log_needs_all_its_columns() -> None:
    with pytest.raises(ConfigError, match="no 'prefill_context'"):
        MeasuredSteps.of([{"p": 1, "d": 1, "decode_context": 1}])


def test_least_squares_without_negative_coefficients() -> None:
    rng = np.random.default_rng(0)
    a = rng.random((60, 5))
    truth = np.array([0.0, 2.0, 0.0, 1e-6, 3.0])
    assert nonnegative_least_squares(a, a @ truth) == pytest.approx(truth, abs=1e-8)
    b = a @ np.array([1.0, -2.0, 0.5, -0.1, 3.0])
    x = nonnegative_least_squares(a, b)
    gradient = a.T @ (b - a @ x)
    assert (x >= 0).all()
    assert (gradient[x == 0] <= 1e-8).all(), "no coefficient at zero would help if it were larger"
    assert np.abs(gradient[x > 0]).max() < 1e-8


def test_objectives_beyond_the_machine_are_told_with_the_reason() -> None:
    workload = make_workload(np.arange(4.0), fixed_lengths(4, 8000, 10))
    workload.num_prompt[0] = 100
    kind = RequestClass("ls", SLO(ttft=0.5, tpot=0.01, e2e=100.0))
    ttft, tpot = unattainable(assign_classes(workload, [(kind, 1)]), preset("a100-llama-3-8b"))
    assert ttft.startswith(
        "class 'ls': ttft cannot be met by 3 of 4 requests with a100-llama-3-8b: the prompt alone takes"
    )
    assert tpot.startswith("class 'ls': tpot cannot be met by 4 of 4 requests")


@pytest.mark.parametrize("num", [1, 2, 47, 73, 219])
def test_a_plot_of_equal_steps_has_one_cell(num: int) -> None:
    """Of numbers whose logarithms are not the same to the last bit everywhere."""
    steps = np.full(num, 0.01)
    found = Fit(
        LinearModel((Regime(math.inf, (0.01, 0.0, 0.0, 0.0, 0.0, 0.0)),), "x"),
        0.0,
        0.0,
        steps,
        steps,
        np.zeros((num, 6)),
        num,
        (),
    )
    assert parity_text(found).count("█") == 1
