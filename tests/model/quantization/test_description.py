"""What `actorllm info` says of quantized weights."""

from __future__ import annotations

import re

import pytest

from actorllm.cli.commands import info


def test_info_says_what_each_part_becomes(capsys: pytest.CaptureFixture[str]) -> None:
    info("storyteller")
    assert "linear layers" not in capsys.readouterr().out
    info("storyteller", quantization="int8")
    rows = dict(line.strip().split("  ", 1) for line in capsys.readouterr().out.splitlines())
    assert rows["linear layers"].strip().startswith("int8, ")
    assert rows["head"].strip().startswith("int8, ")
    assert rows["embedding"].strip() == f"{rows['dtype'].strip()}, {rows['embedding'].split()[1]} MB"


@pytest.mark.parametrize(("method", "least", "most"), [("int8", 0.5, 2.0), ("int4", 5.0, 12.0)])
def test_info_says_how_far_the_weights_are_from_the_original(
    method: str, least: float, most: float, capsys: pytest.CaptureFixture[str]
) -> None:
    info("storyteller", quantization=method)
    found = re.search(rf"change of weights  {method} by ([\d.]+) % \(root mean square", capsys.readouterr().out)
    assert found is not None
    assert least < float(found[1]) < most


@pytest.mark.usefixtures("computed_as_asked")
@pytest.mark.parametrize("method", ["int8", "int4", "int4-g128"])
def test_the_bytes_are_those_that_a_worker_reads(method: str) -> None:
    from actorllm.config import EngineConfig
    from actorllm.model.cpu.runner import CpuRunner
    from actorllm.model.quantization.description import described

    config = EngineConfig.from_arguments("storyteller", quantization=method, num_threads=1)
    runner = CpuRunner(config, show_progress=False)
    runner.load()
    rows = described(runner.model_config, config.model)
    told = sum(float(size) for name in ("linear layers", "head") for size in re.findall(r"([\d.]+) MB", rows[name]))
    assert told == pytest.approx(runner.weight_bytes / 1e6, abs=0.11)
