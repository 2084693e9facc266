"""Step times from kernels that were measured by shape: a config.json chooses its own, and what is not there is named."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from actorllm import cli
from actorllm.errors import ConfigError
from actorllm.scheduling.cost_model import load_model
from actorllm.slo.data_sheets import GPUS, MEMORY
from actorllm.slo.kernel_profiles import fit_kernels
from actorllm.slo.kernel_shapes import SMALL_S, is_shape_profile, read_shapes
from actorllm.slo.profile_columns import NODES

CONFIG: dict[str, Any] = {
    "hidden_size": 1024,
    "num_hidden_layers": 3,
    "num_attention_heads": 8,
    "num_key_value_heads": 2,
    "head_dim": 128,
    "intermediate_size": 3000,
    "vocab_size": 32_000,
}
SIZES = (256, 1024, 2048, 8192)
TOKENS = (1, 16, 256, 1024)


def product(tokens: int, outputs: int, inputs: int) -> float:
    """Milliseconds; without a constant, so that what lies between is exact."""
    return 1e-9 * outputs * inputs * (1 + 0.01 * tokens)


def decode(rows: int, context: int) -> float:
    return 0.002 + 1e-6 * rows * context


def prompt(chunk: int) -> float:
    return 0.003 + 1e-7 * chunk * (chunk + 1) / 2


def experts(tokens: int) -> float:
    return 0.05 + 0.001 * tokens


def reduced(size: int) -> float:
    return 0.004 + 1e-7 * size


def table(folder: Path, kind: str, stem: str, version: str, rows: list[dict[str, Any]]) -> Path:
    file = folder / kind / "vllm" / version / f"{stem}.csv"
    file.parent.mkdir(parents=True, exist_ok=True)
    lines = [",".join(rows[0]), *(",".join(map(str, row.values())) for row in rows)]
    file.write_text("\n".join(lines))
    return file


def write(folder: Path, scale: float = 1.0, version: str = "0.24.0") -> Path:
    """A profile with the folders and columns of AIConfigurator. scale: of the products."""
    products = [
        {"gemm_dtype": kind, "m": m, "n": n, "k": k, "latency": scale * faster * product(m, n, k)}
        for kind, faster in (("bfloat16", 1.0), ("fp8", 0.5))
        for m in (*TOKENS, 4353)
        for n in SIZES
        for k in SIZES
    ]
    table(folder, "gemm", "gemm_perf", version, products)
    heads = [(8, 2), (4, 1)]
    both = [
        {"num_heads": h, "num_key_value_heads": kv, "head_dim": 128, "attn_dtype": "bfloat16", "window_size": window}
        for h, kv in heads
        for window in (0, 128)
    ]
    rows = [
        each
        | {"batch_size": n, "isl": 1, "step": k - 1, "latency": decode(n, k) * (1 if not each["window_size"] else 9)}
        for each in both
        for n in (1, 64)
        for k in (16, 4096)
    ]
    table(folder, "attention", "generation_attention_perf", version, rows)
    rows = [
        each | {"batch_size": n, "isl": c, "step": 0, "latency": n * prompt(c) * (1 if not each["window_size"] else 9)}
        for each in both
        for n in (1, 4)
        for c in (16, 256, 1024)
    ]
    table(folder, "attention", "context_attention_perf", version, rows)
    rows = [
        {"num_gpus": 2, "allreduce_dtype": "bfloat16", "kernel_source": kind, "message_size": size, "latency": took}
        for size in (1024, 1024 * 1024)
        for kind, took in (("vLLM_custom_graph", reduced(size)), ("vLLM_custom_eager", 1.0))
    ]
    table(folder, "comm", "custom_allreduce_perf", version, rows)
    rows = [
        {
            "moe_dtype": "bfloat16",
            "num_tokens": m,
            "hidden_size": 1024,
            "inter_size": 512,
            "topk": 2,
            "num_experts": 8,
            "moe_tp_size": 1,
            "moe_ep_size": 1,
            "distribution": load,
            "latency": experts(m) * (1 if load == "power_law_1.01" else 0.1),
        }
        for m in TOKENS
        for load in ("balanced", "power_law_1.01")
    ]
    table(folder, "moe", "moe_perf", version, rows)
    return folder


def milliseconds(folder: Path, config: dict[str, Any], *step: float, **options: Any) -> float:
    read = read_shapes(folder, config, **options)
    return 1e3 * fit_kernels(read.profile, read.layers).model.seconds(*step)


def layer(tokens: int, tp: int = 1) -> float:
    heads = product(tokens, 1536 // tp, 1024) + product(tokens, 1024, 1024 // tp)
    return heads + product(tokens, 6000 // tp, 1024) + product(tokens, 1024, 3000 // tp)


def test_a_config_chooses_its_products_between_those_that_were_measured(tmp_path: Path) -> None:
    folder = write(tmp_path)
    assert is_shape_profile(folder)
    assert not is_shape_profile(tmp_path / "attention")
    took = 3 * (layer(16) + decode(16, 512)) + product(16, 32_000, 1024)
    assert milliseconds(folder, CONFIG, 0, 16, 16 * 512) == pytest.approx(took, rel=1e-6), (
        "32,000 outputs go on from 8,192"
    )
    pairs = 256 * 257 / 2
    took = 3 * (layer(256) + prompt(256)) + product(1, 32_000, 1024)
    assert milliseconds(folder, CONFIG, 256, 0, 0, 0, pairs) == pytest.approx(took, rel=1e-6)
    read = read_shapes(folder, CONFIG)
    assert [size for size in read.profile.tokens["o_proj"] if size not in NODES] == []
    assert {file.name for file in read.files} == {
        *("gemm_perf.csv", "context_attention_perf.csv", "generation_attention_perf.csv")
    }


def test_a_product_that_took_longer_than_one_of_more_tokens_is_noise(tmp_path: Path) -> None:
    folder = write(tmp_path)
    file = next(folder.rglob("gemm_perf.csv"))
    lines = file.read_text().splitlines()
    slow = [",".join([*line.split(",")[:4], "9"]) if line.startswith("bfloat16,1,") else line for line in lines]
    assert slow != lines
    file.write_text("\n".join(slow))
    told = read_shapes(folder, CONFIG).profile.tokens["o_proj"]
    rest = [product(size, 1024, 1024) for size in TOKENS[1:]]
    assert told[1] == told[16] == told[1024] == [pytest.approx(1e-3 * (9 + sum(rest)) / 4)], "all share their mean"


def test_gpus_share_a_layer_and_tell_each_other(tmp_path: Path) -> None:
    folder = write(tmp_path)
    took = 3 * (layer(16, 2) + decode(16, 512) + 2 * reduced(16 * 1024)) + product(16, 16_000, 1024)
    assert milliseconds(folder, CONFIG, 0, 16, 16 * 512, tp=2) == pytest.approx(took, rel=1e-6)
    took = 3 * (0.5 * layer(16) + decode(16, 512)) + product(16, 32_000, 1024)
    assert milliseconds(folder, CONFIG, 0, 16, 16 * 512, dtype="fp8") == pytest.approx(took, rel=1e-6)


def test_experts_come_unevenly_and_kernels_between_products_from_a_data_sheet(tmp_path: Path) -> None:
    folder = write(tmp_path)
    config = CONFIG | {"num_experts": 8, "num_experts_per_tok": 2, "moe_intermediate_size": 512}
    heads = product(16, 1536, 1024) + product(16, 1024, 1024)
    took = 3 * (heads + product(16, 256, 1024) + experts(16) + decode(16, 512)) + product(16, 32_000, 1024)
    assert milliseconds(folder, config, 0, 16, 16 * 512) == pytest.approx(took, rel=1e-6), (
        "a router of 8 outputs takes what the smallest product does"
    )
    moved = 2 * (4 * 1024 + 4 * 1024 + 2 * 10 * 128 + 2 * 4 * 128 + 3 * 3000)
    added = 3e3 * (5 * SMALL_S + 16 * moved / (MEMORY * GPUS["H100"].bytes_per_s))
    bare = milliseconds(folder, CONFIG, 0, 16, 16 * 512)
    assert milliseconds(folder, CONFIG, 0, 16, 16 * 512, gpu="h100") == pytest.approx(bare + added, rel=1e-6)


def test_the_newest_version_is_read_and_parquet_says_what_csv_says(tmp_path: Path) -> None:
    csv = pytest.importorskip("pyarrow.csv")
    folder = write(tmp_path / "gpu")
    bare = milliseconds(folder, CONFIG, 0, 16, 16 * 512)
    write(folder, scale=3.0, version="0.9.0")
    assert milliseconds(folder, CONFIG, 0, 16, 16 * 512) == bare, "0.24 is newer than 0.9"
    parquet = pytest.importorskip("pyarrow.parquet")
    for file in folder.rglob("*.csv"):
        parquet.write_table(csv.read_csv(file), file.with_suffix(".parquet"))
        file.unlink()
    assert milliseconds(folder, CONFIG, 0, 16, 16 * 512) == bare


@pytest.mark.parametrize(
    ("change", "options", "told"),
    [
        ({"kv_lora_rank": 64}, {}, "kv_lora_rank=64: such layers are not read"),
        ({"layer_types": ["full_attention", "sliding_attention"]}, {}, "layer_types has 'sliding_attention'"),
        ({"hidden_size": None}, {}, "hidden_size=None must be a positive number"),
        ({"head_dim": 96}, {}, "has no attention of num_heads=8, num_key_value_heads=2, head_dim=96"),
        ({"num_experts": 4, "num_experts_per_tok": 2}, {}, "has no experts of dtype='bfloat16', hidden_size=1024"),
        ({}, {"tp": 3}, "tp=3 must be 1 or more and divide the 8 attention heads"),
        ({}, {"engine": "sglang"}, "has no gemm_perf.parquet or .csv of 'sglang'"),
        ({}, {"dtype": "int3"}, "has no products of dtype='int3'"),
        ({}, {"gpu": "H1000"}, "no data sheet of gpu='H1000'"),
    ],
)
def test_what_a_profile_cannot_say_is_named(
    tmp_path: Path, change: dict[str, Any], options: dict[str, Any], told: str
) -> None:
    folder = write(tmp_path)
    with pytest.raises(ConfigError, match=told):
        read_shapes(folder, CONFIG | change, **options)


def test_a_table_that_cannot_be_read_is_named(tmp_path: Path) -> None:
    folder = write(tmp_path)
    file = next(folder.rglob("gemm_perf.csv"))
    file.write_text("m,n,k,latency\n1,256,256,1")
    with pytest.raises(ConfigError, match=r"gemm_perf\.csv.*has no column 'gemm_dtype'"):
        read_shapes(folder, CONFIG)
    file.write_text("n,k,latency,gemm_dtype\n256,256,1,bfloat16")
    with pytest.raises(ConfigError, match="a table without the column 'm'"):
        read_shapes(folder, CONFIG)
    file.write_text("m,n,k,latency,gemm_dtype\n1,256,256,,bfloat16")
    with pytest.raises(ConfigError, match="a cell that is no number"):
        read_shapes(folder, CONFIG)
    parquet = file.with_suffix(".parquet")
    parquet.write_bytes(b"no parquet")
    file.unlink()
    with pytest.raises(ConfigError, match=r"gemm_perf\.parquet.*cannot be read"):
        read_shapes(folder, CONFIG)


def test_the_command_writes_a_model_and_says_what_it_read(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    folder, config, output = write(tmp_path / "gpu"), tmp_path / "config.json", tmp_path / "model.json"
    config.write_text(json.dumps(CONFIG))
    assert cli.main(["calibrate", "--profile", str(folder)]) == 2
    assert "name a model's --model-config" in capsys.readouterr().err
    given = ["calibrate", "--profile", str(folder), "--model-config", str(config), "--output", str(output)]
    assert cli.main([*given, "--layers", "3"]) == 2
    assert "model-config says how many layers" in capsys.readouterr().err
    assert cli.main(given) == 0
    out = capsys.readouterr().out
    assert "gemm/vllm/0.24.0/gemm_perf.csv" in out
    assert "cost nothing without --gpu" in out
    assert load_model(str(output)).seconds(0, 16, 16 * 512) * 1e3 == pytest.approx(
        milliseconds(folder, CONFIG, 0, 16, 16 * 512)
    )
    steps = tmp_path / "steps.csv"
    steps.write_text("p,d,seconds\n0,1,1")
    assert cli.main(["calibrate", "--profile", str(steps), "--gpu", "H100"]) == 2
    assert "has no kernels by shape: leave out gpu" in capsys.readouterr().err
