"""Step times from measured steps and from data sheets: errors that are told, and bad files that are named."""

from __future__ import annotations

import json
import math
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from actorllm import cli
from actorllm.errors import ConfigError
from actorllm.scheduling.cost_model import (
    PRESETS,
    SOURCES,
    LinearModel,
    Regime,
    from_json,
    load_model,
    predict,
    preset,
    to_json,
)
from actorllm.scheduling.step_tables import KindTable, TableModel
from actorllm.slo.data_sheets import GPUS, roofline_of
from actorllm.slo.profiles import MIN_ROWS, Profile, fit_profile, read_profile
from actorllm.slo.simulator import EngineShape, simulate
from actorllm.slo.workload import fixed_lengths, make_workload, poisson_arrivals


def truth(p: float, d: float, context: float) -> float:
    """Steps with prompts have another slope, and there are stairs: no sum of features says this."""
    if not p:
        return (0.010 + 3e-5 * d + 2e-7 * context) * (1.2 if d > 32 else 1.0)
    return (0.012 + 4e-5 * p + 2e-4 * d) * (1.3 if p > 128 else 1.0)


def profile() -> Profile:
    rows, seconds = [], []
    for d in (1, 2, 4, 8, 16, 24, 32, 40, 48, 56, 64, 80, 96, 128):
        for each in (256, 1024, 4096):
            rows.append((1.0, 0, d, d * each, 0, 0))
            seconds.append(truth(0, d, d * each))
    for p in range(24, 528, 24):
        for d in (0, 8, 32):
            rows.append((1.0, p, d, 1024 * d, 0, p * (p + 1) / 2))
            seconds.append(truth(p, d, 1024 * d))
    return Profile(np.array(rows, float), np.array(seconds), 0)


def test_a_table_for_each_kind_says_what_one_plane_cannot() -> None:
    steps = profile()
    found = fit_profile(steps)
    assert predict(found.model, steps.features) == pytest.approx(steps.seconds, rel=1e-6), (
        "the nodes are what was measured"
    )
    assert found.mape < 0.03, "of steps between the nodes"
    plane = np.linalg.lstsq(steps.features / steps.seconds[:, None], np.ones(len(steps)), rcond=None)[0]
    assert float(np.abs(steps.features @ plane / steps.seconds - 1).mean()) > 1.3 * found.mape
    assert {error.kind for error in found.errors} == {"decode", "prompt"}
    assert found.model.seconds(0, 1000, 1000 * 1024) > found.model.seconds(0, 128, 128 * 1024), (
        "beyond the edge the sum goes on"
    )


def test_a_table_is_interpolated_and_never_below_its_floor() -> None:
    table = KindTable((0.01, 0, 0, 0, 0, 0), (0.0, 3.0), (0.0, 15.0), ((1.0, 2.0), (3.0, 4.0)))
    model = TableModel(table, None, floor_s=0.001)
    assert model.seconds(0, 3, 0) == pytest.approx(0.03)
    assert model.seconds(0, 3, 45) == pytest.approx(0.04)
    assert model.seconds(0, 1, 0) == pytest.approx(0.02), "half way by logarithms"
    assert model.seconds(0, 3, 9) == pytest.approx(0.035)
    assert model.seconds(5, 3, 9) == model.seconds(0, 3, 9), "a kind that was not measured takes what the other says"
    assert TableModel(KindTable((0,) * 6), None, floor_s=0.001).seconds(0, 1, 1) == 0.001
    run = model.decode_run(3, 7, 5)
    assert run.tolist() == [model.seconds(0, 3, 7 + 3 * i) for i in range(5)]


@pytest.mark.parametrize(
    ("values", "told"),
    [
        ({"coefficients": (1.0,)}, "6 finite coefficients"),
        ({"sizes": (2.0, 1.0)}, "must be numbers that ascend"),
        ({"sizes": (1.0, 2.0)}, "2 sizes needs as many rows"),
        ({"factors": ((0.0,),)}, "factors of a step table must be positive"),
        ({"factors": ((math.nan,),)}, "factors of a step table must be positive"),
    ],
)
def test_a_table_that_cannot_be_is_refused(values: dict[str, Any], told: str) -> None:
    with pytest.raises(ConfigError, match=told):
        KindTable(**({"coefficients": (0.01, 0, 0, 0, 0, 0)} | values))
    with pytest.raises(ConfigError, match="at least one kind of step"):
        TableModel(None, None)


def test_a_table_goes_through_json_and_simulates_the_same() -> None:
    model = fit_profile(profile(), "mine").model
    again = from_json(to_json(model))
    assert again == model
    workload = make_workload(poisson_arrivals(40, 4.0, 1), fixed_lengths(40, 200, 40))
    shape = EngineShape(num_blocks=600, max_num_seqs=32, max_num_batched_tokens=256, max_model_len=2048)
    one, other = (simulate(workload, shape, model, skip=skip) for skip in (True, False))
    assert one.num_steps_skipped
    assert one.timeline.end.tolist() == other.timeline.end.tolist(), "runs of decode steps have the same last bit"
    broken = json.loads(to_json(model))
    broken["decode"]["factors"][0][0] = "much"
    with pytest.raises(ConfigError, match="step-time model: ValueError"):
        from_json(json.dumps(broken))


def test_public_names_of_columns_are_known(tmp_path: Path) -> None:
    file = tmp_path / "step.csv"
    rows = [f"full,{d},{d},{k},0,{1e6 * truth(0, d, d * k)}" for d in (1, 2, 4, 8, 16, 32) for k in (1024, 8192)]
    rows += [f"none,{p},0,1024,{p},{1e6 * truth(p, 0, 0)}" for p in range(10, 130, 5)]
    file.write_text("branch,num_tokens,n_decode,kv_decode,prefill_chunk,step_us\n" + "\n".join([*rows, "x,0,0,0,0,5"]))
    steps = read_profile(file)
    assert len(steps) == len(rows)
    assert steps.num_skipped == 1
    assert steps.features[1].tolist() == [1.0, 0.0, 1.0, 8192.0, 0.0, 0.0]
    assert steps.features[-1].tolist() == [1.0, 125.0, 0.0, 0.0, 0.0, 125 * 126 / 2]
    assert steps.seconds[0] == pytest.approx(truth(0, 1, 1024))
    assert fit_profile(steps).mape < 0.02


@pytest.mark.parametrize(
    ("text", "told"),
    [
        ("", "has no rows below its header"),
        ("n_decode,step_us\n1,2", "no column for prompt tokens: one of p, prefill_chunk"),
        ("p,d,when\n1,2,3", "no column for the duration of a step"),
        ("p,d,seconds\n1,much,3", "line 2: d='much' is no number"),
        ("p,d,seconds\n1,-1,3", "line 2: d='-1' must be 0 or more"),
        ("p,d,seconds\n1,2", "line 2: seconds=None is no number"),
        ("p,d,seconds\n0,0,3", "no row has tokens and a duration above 0"),
    ],
)
def test_a_profile_that_cannot_be_read_is_named(tmp_path: Path, text: str, told: str) -> None:
    file = tmp_path / "bad.csv"
    file.write_text(text)
    with pytest.raises(ConfigError, match=rf"bad\.csv.*{told}"):
        read_profile(file)


def test_few_steps_are_no_profile() -> None:
    steps = profile()
    few = Profile(steps.features[: MIN_ROWS - 1], steps.seconds[: MIN_ROWS - 1], 0)
    with pytest.raises(ConfigError, match=f"at least {MIN_ROWS} steps of one kind; it has {MIN_ROWS - 1}"):
        fit_profile(few)


def test_the_command_tells_the_error_and_writes_the_model(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    steps, file, model = profile(), tmp_path / "steps.csv", tmp_path / "model.json"
    names = "p,d,decode_context,prefill_context,prefill_pairs,seconds"
    rows = np.column_stack((steps.features[:, 1:], steps.seconds)).tolist()
    lines = [",".join(map(repr, row)) for row in rows]
    file.write_text("\n".join([names, *lines]))
    assert cli.main(["calibrate", "--profile", str(file), "--output", str(model)]) == 0
    out = capsys.readouterr().out
    assert "by cross-validation" in out
    assert "decode, 40 to 64 rows" in out
    assert load_model(str(model)) == fit_profile(read_profile(file), "steps").model
    assert cli.main(["calibrate", "--profile", str(file), "--plot", str(tmp_path / "x.svg")]) == 2
    assert "leave out recording, plot" in capsys.readouterr().err


# Models of the user's own, and presets -----------------------------------------------------------------------------------


def mine() -> LinearModel:
    return LinearModel((Regime(math.inf, (0.02, 1e-4, 1e-4, 0, 0, 0)),), "mine")


class Nothing:
    name = "nothing"


def test_a_model_is_also_a_class_of_ones_own(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("tests.slo.test_profiles.Own", lambda: mine(), raising=False)
    assert load_model("tests.slo.test_profiles:Own") == mine()
    with pytest.raises(ConfigError, match="has no 'seconds'; it needs name, seconds"):
        load_model("tests.slo.test_profiles:Nothing")
    with pytest.raises(ConfigError, match="step-time model 'nowhere:Model' cannot be loaded"):
        load_model("nowhere:Model")


def test_six_gpus_have_four_models_each() -> None:
    models: dict[str, set[str]] = {}
    for name in PRESETS:
        gpu, _, model = name.partition("-")
        shared, _, rest = model.partition("-")
        models.setdefault(gpu, set()).add(rest if shared.startswith("tp") else model)
    assert sum(len(those) >= 4 for those in models.values()) >= 6


def test_every_preset_says_where_it_is_from() -> None:
    assert SOURCES.keys() == PRESETS.keys()
    page = (Path(__file__).parents[2] / "docs" / "slo_presets.md").read_text()
    for name, (address, error) in SOURCES.items():
        assert f"| `{name}` | {address} | {error} |" in page
    for name in PRESETS:
        model = preset(name)
        assert model.name == name
        assert from_json(to_json(model)) == model
        assert 0 < model.seconds(0, 1, 1024) < model.seconds(0, 64, 64 * 1024) < 1


# Data sheets --------------------------------------------------------------------------------------------------------------

LLAMA = {
    "hidden_size": 4096, "num_hidden_layers": 32, "num_attention_heads": 32, "num_key_value_heads": 8,
    "intermediate_size": 14336, "vocab_size": 128256,
}  # fmt: skip


def test_the_roofline_of_a_known_model_is_that_of_the_preset() -> None:
    found = roofline_of("H200", LLAMA)
    known = preset("h200-llama-3-8b-roofline")
    for d, context in ((1, 1024), (64, 64 * 1024)):
        assert found.seconds(0, d, context) == pytest.approx(known.seconds(0, d, context), rel=0.03)
    assert found.seconds(2048, 0, 0, 0, 2048**2 / 2) == pytest.approx(
        known.seconds(2048, 0, 0, 0, 2048**2 / 2), rel=0.03
    )


def test_more_gpus_share_a_step_and_pay_for_it() -> None:
    one, two = (roofline_of("H100", LLAMA, tp=tp) for tp in (1, 2))
    small, large = (0, 1, 1024), (0, 256, 256 * 2048)
    assert one.seconds(*large) / 2 < two.seconds(*large) < 0.7 * one.seconds(*large)
    assert two.seconds(*small) > 0.55 * one.seconds(*small), "all-reduces cost a small step most"
    assert two.reduce_s_per_token > 0 == one.reduce_s_per_token


def test_experts_cost_what_is_read_and_compute_what_is_chosen() -> None:
    experts = LLAMA | {"num_local_experts": 8, "num_experts_per_tok": 2}
    dense, sparse = roofline_of("A100", LLAMA), roofline_of("A100", experts)
    assert sparse.weight_bytes == pytest.approx(dense.weight_bytes * 6.3, rel=0.1)
    assert 1.5 < sparse.flops_per_token / dense.flops_per_token < 2
    assert roofline_of("A100", LLAMA, weight_bits=8).weight_bytes == dense.weight_bytes / 2


def test_latents_are_cached_once_for_all_heads() -> None:
    """DeepSeek-V2-Lite: 15.7e9 weights, of which a token uses 2.4e9, and 576 numbers of a token in each of 27 layers."""
    found = roofline_of("A100", DEEPSEEK)
    assert found.kv_bytes_per_token == 27 * 576 * 2
    assert found.weight_bytes / 2 == pytest.approx(15.7e9, rel=0.1)
    assert found.flops_per_token / 2 == pytest.approx(2.4e9, rel=0.05)
    assert roofline_of("A100", DEEPSEEK, tp=2).kv_bytes_per_token == 2 * found.kv_bytes_per_token, "each GPU has all"


DEEPSEEK = {
    "hidden_size": 2048, "num_hidden_layers": 27, "num_attention_heads": 16, "num_key_value_heads": 16, "kv_lora_rank": 512,
    "q_lora_rank": None, "qk_nope_head_dim": 128, "qk_rope_head_dim": 64, "v_head_dim": 128, "n_routed_experts": 64,
    "n_shared_experts": 2,
    "num_experts_per_tok": 6, "moe_intermediate_size": 1408, "intermediate_size": 10944, "vocab_size": 102400,
}  # fmt: skip


@pytest.mark.parametrize(
    ("gpu", "change", "tp", "told"),
    [
        ("H20", {}, 1, "no data sheet of gpu='H20'; did you mean"),
        ("A100", {"hidden_size": None}, 1, "hidden_size=None must be a positive number"),
        ("A100", {}, 3, "tp=3 must be 1 or more and divide the 32"),
        ("A100", {"num_experts": 4}, 1, "num_experts_per_tok=None"),
    ],
)
def test_what_a_data_sheet_cannot_tell_is_named(gpu: str, change: dict[str, Any], tp: int, told: str) -> None:
    with pytest.raises(ConfigError, match=told):
        roofline_of(gpu, LLAMA | change, tp=tp)


def test_the_command_takes_a_folder_or_a_file(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (tmp_path / "config.json").write_text(json.dumps({"text_config": LLAMA}))
    output = tmp_path / "model.json"
    for model in (tmp_path, tmp_path / "config.json"):
        assert cli.main(["roofline", "--gpu", "h200", "--model", str(model), "--tp", "2", "--output", str(output)]) == 0
    assert load_model(str(output)) == roofline_of("h200", LLAMA, tp=2)
    assert "of weights are read in a step" in capsys.readouterr().out
    assert cli.main(["roofline", "--gpu", "h200", "--model", str(tmp_path / "none")]) == 2
    assert "must be a config.json, or a folder with one" in capsys.readouterr().err
    assert set(GPUS) >= {"A10G", "A100", "L40S", "H100", "H200", "B200"}
