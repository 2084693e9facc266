"""Loading: whole and sharded checkpoints, and everything that can be wrong with a model's folder."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file

from actorllm.config import EngineConfig
from actorllm.errors import CorruptModelError, ModelNotFoundError, UnsupportedModelError
from actorllm.model.cpu.decoder import Decoder
from actorllm.model.cpu.runner import CpuRunner
from actorllm.model.registry import FAMILIES, decoder_config
from actorllm.model.weights import CheckpointWeights, DummyWeights, Stored, is_finite
from tests.model.driver import TINY_LLAMA


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """A tiny Llama with weights in one file."""
    (tmp_path / "config.json").write_text(json.dumps(TINY_LLAMA))
    recorder = Recorder()
    Decoder(decoder_config("LlamaForCausalLM", TINY_LLAMA), recorder, 128)
    save_file(recorder.tensors, tmp_path / "model.safetensors")
    return tmp_path


class Recorder(DummyWeights):
    """Dummy weights that keep what they gave, as a checkpoint would."""

    def __init__(self) -> None:
        super().__init__(7, torch.float32)
        self.tensors: dict[str, torch.Tensor] = {}

    def take(self, name: str, *shape: int, **part: slice) -> torch.Tensor:
        self.tensors[name] = super().take(name, *shape, **part)
        return self.tensors[name].clone()


def load(folder: Path, **arguments: Any) -> CpuRunner:
    config = EngineConfig.from_arguments(folder, skip_tokenizer_init=True, num_threads=1, **arguments)
    runner = CpuRunner(config, show_progress=False)
    runner.load()
    return runner


def change(folder: Path, edit: Callable[[dict[str, torch.Tensor]], object]) -> None:
    tensors = load_file(folder / "model.safetensors")
    edit(tensors)
    save_file(tensors, folder / "model.safetensors")


def same(a: CpuRunner, b: CpuRunner) -> bool:
    x = torch.randn(3, 48, generator=torch.Generator().manual_seed(0))
    with torch.inference_mode():
        pairs = [
            (getattr(one, name)(x), getattr(two, name)(x))
            for one, two in zip(a.decoder.layers, b.decoder.layers, strict=True)
            for name in ("qkv", "gate_up", "mlp_norm")
        ]
        pairs.append((a.decoder.lm_head(x), b.decoder.lm_head(x)))
    return all(torch.equal(one, two) for one, two in pairs)


def test_sharded_weights_are_the_same_model(folder: Path, tmp_path: Path) -> None:
    whole = load(folder)
    tensors = load_file(folder / "model.safetensors")
    names = sorted(tensors)
    parts = {"a.safetensors": names[::2], "b.safetensors": names[1::2]}
    for file, members in parts.items():
        save_file({name: tensors[name] for name in members}, folder / file)
    index = {"weight_map": {name: file for file, members in parts.items() for name in members}}
    (folder / "model.safetensors.index.json").write_text(json.dumps(index))
    (folder / "model.safetensors").unlink()
    assert same(whole, load(folder))
    (folder / "b.safetensors").unlink()
    with pytest.raises(CorruptModelError, match=r"b\.safetensors"):
        load(folder)
    (folder / "model.safetensors.index.json").write_text('{"weight_map": {"x": "../a.safetensors"}}')
    with pytest.raises(CorruptModelError, match="not a file of this folder"):
        load(folder)
    (folder / "model.safetensors.index.json").write_text("{}")
    with pytest.raises(CorruptModelError, match=r"index\.json"):
        load(folder)


def test_a_missing_tensor_is_named(folder: Path) -> None:
    change(folder, lambda t: t.pop("model.layers.1.mlp.up_proj.weight"))
    with pytest.raises(CorruptModelError, match=r"model\.layers\.1\.mlp\.up_proj\.weight"):
        load(folder)


def test_an_unexpected_tensor_is_named(folder: Path) -> None:
    change(folder, lambda t: t.update({"model.layers.1.self_attn.q_proj.bias": torch.zeros(64)}))
    with pytest.raises(CorruptModelError, match=r"model\.layers\.1\.self_attn\.q_proj\.bias"):
        load(folder)


def test_tensors_that_the_config_determines_may_be_there(folder: Path) -> None:
    change(folder, lambda t: t.update({"model.layers.0.self_attn.rotary_emb.inv_freq": torch.zeros(8)}))
    load(folder)
    (folder / "config.json").write_text(json.dumps(TINY_LLAMA | {"tie_word_embeddings": True}))
    load(folder)  # lm_head.weight is there and not needed


@pytest.mark.parametrize("wrong", [torch.zeros(48, 79), torch.zeros(80, 48), torch.zeros(48, 80, dtype=torch.int32)])
def test_a_wrong_shape_or_type_is_named(folder: Path, wrong: torch.Tensor) -> None:
    change(folder, lambda t: t.update({"model.layers.0.mlp.down_proj.weight": wrong}))
    with pytest.raises(CorruptModelError, match=r"model\.layers\.0\.mlp\.down_proj\.weight"):
        load(folder)


@pytest.mark.parametrize("length", [0, 5, 300, -4])
def test_a_truncated_file_is_named(folder: Path, length: int) -> None:
    path = folder / "model.safetensors"
    path.write_bytes(path.read_bytes()[:length])
    with pytest.raises(CorruptModelError, match=r"model\.safetensors"):
        load(folder)


def test_a_folder_without_weights(folder: Path) -> None:
    (folder / "model.safetensors").unlink()
    with pytest.raises(ModelNotFoundError, match=r"model\.safetensors"):
        load(folder)
    load(folder, load_format="dummy")


def test_weights_are_converted_when_they_are_read(folder: Path) -> None:
    weights = CheckpointWeights(folder, torch.bfloat16, show_progress=False)
    with weights:
        tensor = weights.take("model.norm.weight", 48)
    assert tensor.dtype == torch.bfloat16
    assert load(folder, dtype="bfloat16").decoder.embedding.dtype == torch.bfloat16


def test_dummy_weights_follow_their_seed(folder: Path) -> None:
    one, two = load(folder, load_format="dummy", seed=3), load(folder, load_format="dummy", seed=3)
    other = load(folder, load_format="dummy", seed=4)
    assert same(one, two)
    assert not same(one, other)


def test_the_progress_bar_goes_to_standard_error(
    folder: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("actorllm.model.weights.PROGRESS_DELAY_S", 0.0)
    config = EngineConfig.from_arguments(folder, skip_tokenizer_init=True)
    CpuRunner(config, show_progress=True).load()
    captured = capsys.readouterr()
    assert "weights" in captured.err
    assert captured.out == ""
    CpuRunner(config).load()  # standard error is no terminal here
    assert capsys.readouterr().err == ""


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"architectures": ["GPT2LMHeadModel"]}, "GPT2LMHeadModel.*no model_type"),
        ({"hidden_act": "gelu"}, "gelu"),
        ({"rope_scaling": {"rope_type": "yarn", "factor": 2.0}}, "yarn"),
        ({"rope_parameters": {"rope_type": "default", "partial_rotary_factor": 0.5}}, "partial_rotary_factor"),
        ({"rope_parameters": {"full_attention": {"rope_theta": 1.0}}}, "differ between layers"),
        ({"quantization_config": {"quant_method": "aqlm"}}, "aqlm"),
        ({"head_dim": 15}, "odd"),
        ({"architectures": ["MistralForCausalLM"], "layer_types": ["full_attention"] * 2}, "alternating"),
        ({"architectures": ["Qwen2ForCausalLM"], "layer_types": ["linear_attention"] * 2}, "linear_attention"),
    ],
)
def test_what_is_not_supported_is_said(folder: Path, change: dict[str, Any], message: str) -> None:
    (folder / "config.json").write_text(json.dumps(TINY_LLAMA | change))
    with pytest.raises(UnsupportedModelError, match=message):
        load(folder, load_format="dummy")


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"num_key_value_heads": 3}, "num_key_value_heads"),
        ({"hidden_size": "48"}, "hidden_size"),
        ({"num_hidden_layers": 0}, "num_hidden_layers"),
        ({"num_hidden_layers": 10**9}, "num_hidden_layers is 1000000000, a number from 1 to 4096 is needed"),
        (
            {"architectures": ["DeepseekV3ForCausalLM"], "num_nextn_predict_layers": 10**9},
            "num_nextn_predict_layers is 1000000000, a number of layers up to 64 is needed",
        ),
        ({"hidden_size": 50, "head_dim": None}, "hidden_size=50"),
        ({"architectures": ["Qwen3ForCausalLM"], "layer_types": ["full_attention"]}, "layer_types"),
        ({"architectures": ["Qwen3NextForCausalLM"], "layer_types": 7}, "layer_types is 7, a list of names is needed"),
        ({"rope_parameters": 7}, "rope_parameters is 7, an object is needed"),
        ({"rms_norm_eps": None}, "rms_norm_eps is None, a number of at least 0 is needed"),
        ({"rms_norm_eps": -1}, "rms_norm_eps is -1, a number of at least 0 is needed"),
        ({"num_attention_heads": 10**9}, "num_attention_heads is 1000000000, a number from 1 to 65536 is needed"),
        ({"num_key_value_heads": -1}, "num_key_value_heads is -1, a number from 1 to 65536 is needed"),
        (
            {"max_position_embeddings": 10**9},
            "max_position_embeddings is 1000000000, a number from 1 to 16777216 is needed",
        ),
        ({"head_dim": 10**9}, "head_dim is 1000000000, a number from 1 to 8192 is needed"),
        ({"vocab_size": 10**9}, "vocab_size is 1000000000, a number from 1 to 16777216 is needed"),
        ({"intermediate_size": 10**9}, "intermediate_size is 1000000000, a number from 1 to 4194304 is needed"),
        (
            {"architectures": ["MambaForCausalLM"], "state_size": 10**9},
            "state_size is 1000000000, a number from 1 to 8192 is",
        ),
        (
            {"architectures": ["RecurrentGemmaForCausalLM"], "block_types": 7},
            "block_types is 7, a list of names is needed",
        ),
        (
            {"architectures": ["RecurrentGemmaForCausalLM"], "lru_width": 50},
            "50 channels of recurrent layers are no multiple of 4",
        ),
        ({"architectures": ["Mamba2ForCausalLM"], "expand": {}}, "expand is {}, a number is needed"),
        (
            {"architectures": ["FalconH1ForCausalLM"], "mamba_n_heads": 8, "key_multiplier": "x"},
            "key_multiplier is 'x', a number is needed",
        ),
        (
            {"architectures": ["GraniteMoeHybridForCausalLM"], "mamba_n_heads": 16, "logits_scaling": 0},
            "logits_scaling is 0, and logits are divided by it",
        ),
    ],
)
def test_a_contradictory_config_is_said(folder: Path, change: dict[str, Any], message: str) -> None:
    (folder / "config.json").write_text(json.dumps(TINY_LLAMA | change))
    with pytest.raises(CorruptModelError, match=message):
        load(folder, load_format="dummy")


def test_every_family_has_dummy_weights(folder: Path) -> None:
    for architecture in FAMILIES:
        experts = {"num_experts_per_tok": 2, "moe_intermediate_size": 32, "num_local_experts": 4, "num_experts": 4}
        heads = 2 * TINY_LLAMA["hidden_size"] // TINY_LLAMA["head_dim"] if "head_dim" in TINY_LLAMA else 4
        experts |= {
            "num_heads": heads,
            "mamba_n_heads": heads,
            "n_groups": 1,
            "full_attn_idxs": [0],
            "layers_block_type": ["mamba", "attention"] * (TINY_LLAMA["num_hidden_layers"] // 2),
        }  # of recurrent layers
        (folder / "config.json").write_text(json.dumps(TINY_LLAMA | {"architectures": [architecture]} | experts))
        load(folder, load_format="dummy")


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32, torch.float64, torch.float8_e5m2])
def test_a_number_that_is_none_is_found_wherever_it_is(dtype: torch.dtype) -> None:
    assert is_finite(torch.zeros(0, 3, dtype=dtype))
    assert is_finite(torch.full((70,), torch.finfo(dtype).max, dtype=torch.float64).to(dtype)), "their sum would not be"
    for size in (1, 3, 1000):
        for number in (float("nan"), float("inf"), -float("inf")):
            for at in (0, size // 2, size - 1):
                tensor = torch.linspace(-1, 1, size)
                assert is_finite(tensor.to(dtype))
                tensor[at] = number
                assert not is_finite(tensor.to(dtype)), (size, number, at)


def test_what_is_kept_of_an_update_is_no_view_of_its_file(tmp_path: Path) -> None:
    """Such a view would keep all of the file: its memory could not be written to again."""
    tensors = {"a": torch.randn(4, 3), "b": torch.randn(3), "c": torch.randn(4, 3)}
    file = tmp_path / "update.safetensors"
    save_file(tensors, file)
    names = {"overlays": [str(file)], "is_complete": True, "is_update": True}
    with CheckpointWeights(tmp_path, torch.float32, False, **names) as weights:  # type: ignore[arg-type]
        assert weights.stored("a") == Stored((4, 3), "F32")
        kept = {
            "a": weights.own(weights.take("a", 4, 3)),
            "b": weights.take("b", 3),
            "c": weights.take("c", 4, 3, dtype=torch.float32),
        }
        parts = [
            weights.take("a", 4, 3, rows=slice(1, 3)).clone(),
            weights.take("a", 4, 3, columns=slice(1, 3)),
            weights.take("b", 3, rows=slice(2, 3)),
        ]
    assert str(file) not in Path("/proc/self/maps").read_text()
    assert all(torch.equal(kept[name], tensor) for name, tensor in tensors.items())
    for part, wanted in zip(parts, (tensors["a"][1:3], tensors["a"][:, 1:3], tensors["b"][2:]), strict=True):
        assert torch.equal(part, wanted)
        assert part.is_contiguous()
