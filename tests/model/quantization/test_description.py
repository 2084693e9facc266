"""What `actorllm info` says of quantized weights."""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any

import pytest
import torch

from actorllm.cli.commands import info
from actorllm.config import EngineConfig
from actorllm.model.cpu.decoder import Decoder
from actorllm.model.cpu.runner import CpuRunner
from actorllm.model.families.decoder_config import DecoderConfig
from actorllm.model.quantization.description import described, listed
from actorllm.model.quantization.int8 import Int8
from actorllm.model.quantization.onednn import Int8Linear
from actorllm.types.quantization import read_checkpoint
from tests.model.drawn_files import LLAMA4, save_drawn
from tests.model.hf.decoders import RECURRENT, save


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
    config = EngineConfig.from_arguments("storyteller", quantization=method, num_threads=1)
    runner = CpuRunner(config, show_progress=False)
    runner.load()
    rows = described(runner.model_config, config.model)
    told = sum(float(size) for name in ("linear layers", "head") for size in re.findall(r"([\d.]+) MB", rows[name]))
    assert told == pytest.approx(runner.weight_bytes / 1e6, abs=0.11)


@pytest.mark.usefixtures("computed_as_asked")
def test_a_model_beside_a_tower_for_images(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """Its tensors have other names, and its head is of 8 bits as that of any model."""
    tree = LLAMA4 | {"text_config": LLAMA4["text_config"] | {"moe_layers": []}}
    save_drawn(tmp_path, tree)
    info(str(tmp_path), quantization="int4")
    rows = dict(re.split(r"\s{2,}", line.strip(), maxsplit=1) for line in capsys.readouterr().out.splitlines())
    assert rows["change of weights"].startswith("int4 by ")
    assert rows["linear layers"].startswith("int4 ")
    assert rows["head"].startswith("int8, ")
    config = EngineConfig.from_arguments(tmp_path, quantization="int4", num_threads=1, skip_tokenizer_init=True)
    runner = CpuRunner(config, show_progress=False)
    runner.load()
    assert isinstance(runner.decoder, Decoder)
    assert isinstance(runner.decoder.lm_head, Int8Linear)


def test_the_head_that_a_checkpoint_leaves_out_may_have_a_prefix() -> None:
    tree = {"quantization_config": {"quant_method": "gptq", "bits": 4, "group_size": 32}}
    checkpoint = read_checkpoint(tree)
    assert checkpoint is not None
    names = ("lm_head", "language_model.lm_head", "language_model.model.layers.0.self_attn.q_proj")
    assert [checkpoint.quantizes(name) for name in names] == [False, False, True]


@pytest.mark.usefixtures("computed_as_asked")
@pytest.mark.parametrize(
    "name", ["phi3", "mixtral", "gpt-oss", "deepseek-v2", "deepseek-v3", "llama4", *sorted(RECURRENT)]
)
def test_layers_are_those_that_a_worker_reads(name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    save(name, tmp_path)
    read: list[tuple[int, ...]] = []
    of = Int8.of

    def noting(cls: type[Int8], weight: torch.Tensor, bias: torch.Tensor | None = None) -> Int8:
        read.append(tuple(weight.shape))
        return of(weight, bias)

    monkeypatch.setattr(Int8, "of", classmethod(noting))
    config = EngineConfig.from_arguments(tmp_path, quantization="int8", num_threads=1, skip_tokenizer_init=True)
    runner = CpuRunner(config, show_progress=False)
    runner.load()
    plan = runner.model_config
    assert isinstance(plan, DecoderConfig)
    parts = [part for layer in range(plan.num_layers) for part in listed(plan, layer)]
    sizes = [(part.out_features, part.in_features) for part in parts]
    assert sorted(read) == sorted([*sizes, (plan.vocab_size, plan.hidden_size)])


@pytest.mark.usefixtures("computed_as_asked")
def test_bytes_of_latents_are_those_that_a_worker_reads(tmp_path: Path) -> None:
    """Of which some are numbers again."""
    tree = {
        "architectures": ["DeepseekV3ForCausalLM"],
        "vocab_size": 2000,
        "hidden_size": 512,
        "intermediate_size": 1024,
        "num_hidden_layers": 3,
        "first_k_dense_replace": 3,
        "num_attention_heads": 8,
        "q_lora_rank": 192,
        "kv_lora_rank": 256,
        "max_position_embeddings": 128,
    }
    (tmp_path / "config.json").write_text(json.dumps(tree))
    given: dict[str, Any] = {"load_format": "dummy", "num_threads": 1, "skip_tokenizer_init": True}
    config = EngineConfig.from_arguments(tmp_path, quantization="int8", **given)
    runner = CpuRunner(config, show_progress=False)
    runner.load()
    rows = described(runner.model_config, config.model)
    assert "float32, 6.3 MB" in rows["linear layers"]
    told = sum(float(size) for name in ("linear layers", "head") for size in re.findall(r"([\d.]+) MB", rows[name]))
    assert told == pytest.approx(runner.weight_bytes / 1e6, abs=0.16)


@pytest.mark.parametrize("name", ["deepseek-v2", "deepseek-v3", "falcon-h1", "mamba", "qwen3-next"])
def test_info_reads_the_first_layer_of_every_kind(
    name: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    save(name, tmp_path)
    info(str(tmp_path), quantization="int8")
    rows = dict(re.split(r"\s{2,}", line.strip(), maxsplit=1) for line in capsys.readouterr().out.splitlines())
    if name == "qwen3-next":
        assert "change of weights" not in rows, "a layer with experts is not read"
    else:
        assert rows["change of weights"].startswith("int8 by ")
    assert rows["linear layers"].startswith("int8, ")


def test_a_second_form_is_told_where_there_may_be_one(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    for name, has_one in (("llama", True), ("mixtral", False)):
        save(name, tmp_path / name)
        info(str(tmp_path / name), quantization="int4")
        told = capsys.readouterr().out
        assert "int4 g32, " in told
        assert ("for prompts" in told) == has_one
