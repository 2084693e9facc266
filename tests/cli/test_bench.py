"""`actorllm bench`: the keys of vllm bench, and figures that fit together."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from actorllm import cli

QUICK = ("--topology", "inline", "--num-threads", "1", "--max-model-len", "128")


def bench(folder: Path, *arguments: str) -> dict[str, Any]:
    file = folder / "results.json"
    assert cli.main(["bench", *arguments, *QUICK, "--output-json", str(file)]) == 0
    results: dict[str, Any] = json.loads(file.read_text())
    return results


def test_throughput(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    sizes = ("--num-prompts", "5", "--input-len", "7", "--output-len", "3")
    results = bench(tmp_path, "throughput", *sizes, "--disable-detokenize")
    keys = "model_id elapsed_time num_requests total_num_tokens requests_per_second tokens_per_second"
    assert list(results) == keys.split()
    assert results["model_id"] == "storyteller"
    assert results["num_requests"] == 5
    assert results["total_num_tokens"] == 5 * (7 + 3)
    assert results["requests_per_second"] == pytest.approx(5 / results["elapsed_time"])
    assert results["tokens_per_second"] == pytest.approx(50 / results["elapsed_time"])
    out = capsys.readouterr().out
    assert "Throughput: " in out
    assert "Total num output tokens:  15" in out
    options = ("--n", "2", "--seed", "3", "--enable-prefix-caching", "--max-num-seqs", "4")
    assert bench(tmp_path, "throughput", *sizes, *options)["total_num_tokens"] == 5 * (7 + 2 * 3)


@pytest.mark.parametrize("more", [(), ("--n", "2"), ("--n", "2", "--use-beam-search")], ids=str)
def test_latency(tmp_path: Path, more: tuple[str, ...]) -> None:
    sizes = (
        "--batch-size",
        "2",
        "--input-len",
        "4",
        "--output-len",
        "3",
        "--num-iters",
        "4",
        "--num-iters-warmup",
        "1",
    )
    results = bench(tmp_path, "latency", *sizes, *more)
    assert list(results) == ["model_id", "avg_latency", "latencies", "percentiles"]
    assert len(results["latencies"]) == 4
    assert results["avg_latency"] == pytest.approx(sum(results["latencies"]) / 4)
    assert list(results["percentiles"]) == ["10", "25", "50", "75", "90", "99"]
    assert min(results["latencies"]) <= results["percentiles"]["50"] <= max(results["latencies"])


def test_startup(tmp_path: Path) -> None:
    iterations = ("--num-iters-cold", "1", "--num-iters-warmup", "0", "--num-iters-warm", "1")
    results = bench(tmp_path, "startup", *iterations)
    assert set(results) == {
        f"{left}{phase}_{what}{right}"
        for phase in ("cold", "warm")
        for what in ("startup", "compilation")
        for left, right in (("avg_", "_time"), ("", "_times"), ("", "_percentiles"))
    }
    assert results["cold_startup_times"][0] > 0
    assert results["avg_warm_startup_time"] == results["warm_startup_times"][0] > 0


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (["throughput", "--input-len", "1000", "--output-len", "100"], "1100 together, and max_model_len is 1024"),
        (["latency", "--num-iters", "0"], "num_iters=0"),
        (["latency", "--n", "0"], "n=0"),
        (["throughput", "--output-json", "/nowhere/x.json"], "/nowhere/x.json"),
        (["startup", "--model", "nowhere"], "no model 'nowhere'"),
    ],
)
def test_bad_options(arguments: list[str], words: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert cli.main(["bench", *arguments]) == 2
    assert words in capsys.readouterr().err
