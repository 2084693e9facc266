"""The stages of a pipeline read the tensors of their own layers, and refuse none of the others."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file

from actorllm.config import EngineConfig
from actorllm.errors import CorruptModelError
from actorllm.model.cpu.decoder import Decoder
from actorllm.model.families.decoder_config import DecoderConfig
from actorllm.model.pipeline.stage import Stage
from actorllm.model.weights import CheckpointWeights
from tests.model.drawn_files import LLAMA, LLAMA4, save_drawn


def read_by_stages(folder: Path, plan: DecoderConfig) -> None:
    config = EngineConfig.from_arguments(folder, pipeline_parallel_size=2, num_threads=1, skip_tokenizer_init=True)
    num_layers = 0
    for rank in range(2):
        stage = Stage(config, rank)
        with CheckpointWeights(folder, torch.float32, False) as weights:
            decoder = Decoder(stage.part.shape_of(plan), weights, 64, stage=stage)
        num_layers += len(decoder.layers)
        assert (decoder.lm_head is not None) == (plan.has_head and stage.is_last)
    assert num_layers == plan.num_layers


def test_tensors_have_the_names_of_the_family(tmp_path: Path) -> None:
    plan = save_drawn(tmp_path, LLAMA4, **{"vision_model.patch_embedding.weight": torch.zeros(2)})
    read_by_stages(tmp_path, plan)
    for name in ("language_model.model.rotation.weight", "language_model.model.layers.1.more.weight"):
        save_drawn(tmp_path, LLAMA4, **{name: torch.zeros(2)})
        with pytest.raises(CorruptModelError, match=f"has a tensor '{name}' that this architecture does not know"):
            read_by_stages(tmp_path, plan)


def test_tensors_of_a_file_without_a_head_have_no_prefix(tmp_path: Path) -> None:
    plan = save_drawn(tmp_path, LLAMA)
    file = tmp_path / "model.safetensors"
    tensors = load_file(file)
    del tensors["lm_head.weight"]
    save_file({name.removeprefix("model."): tensor for name, tensor in tensors.items()}, file, {"format": "pt"})
    read_by_stages(tmp_path, replace(plan, has_head=False))
