"""Families with a fused forward: logits against transformers, on the CPU and on the emulated device, and what is refused."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers
from safetensors.torch import load_file, save_file

from actorllm.errors import CorruptModelError, UnsupportedModelError
from actorllm.model.cpu.decoder import Decoder
from actorllm.model.cpu.runner import CpuRunner
from actorllm.model.cuda.decoder import DeviceDecoder
from actorllm.model.cuda.device import HostDevice
from actorllm.model.cuda.runner import CudaRunner
from actorllm.model.cuda.transformers_model import DeviceTransformers
from actorllm.model.families.decoder_config import DecoderConfig, TensorNames, qwen_window
from actorllm.model.families.recurrent_shapes import convolution_state
from actorllm.model.hf.transformers_backend import TransformersDecoder
from actorllm.model.registry import FAMILIES, decoder_config, model_plan, way_of
from tests.model.architectures import table
from tests.model.cuda.conftest import config_of
from tests.model.families.loaded import chunks_and_decode_steps, cpu_driver, device_driver
from tests.model.hf.decoders import (
    ALTERNATING,
    MODELS,
    SHAPE,
    TOLERANCE,
    difference,
    prompt,
    reference,
    save,
)
from tests.model.hf.releases import INSTALLED, LOWEST_RELEASE, needs_modules

LONGER_THAN_THE_PROMPT = 200
HEADS_OF_32 = {"hidden_size": 128}
"""The kernels of the device take none of 12 dimensions."""

LATENT = {"hidden_size": 128, "qk_nope_head_dim": 24, "qk_rope_head_dim": 8, "v_head_dim": 32}

VARIANTS: dict[str, tuple[str, dict[str, Any]]] = {
    "llama": ("llama", {**HEADS_OF_32, "attention_bias": True, "mlp_bias": True}),
    "mistral": ("mistral", HEADS_OF_32),
    "qwen2": ("qwen2", HEADS_OF_32),
    "mimo": ("qwen2", {**HEADS_OF_32, "use_sliding_window": False, "architecture": "MiMoForCausalLM"}),
    "qwen3": ("qwen3", {"head_dim": 32}),
    "phi3": ("phi3", HEADS_OF_32),
    "phi3, tied, long window": (
        "phi3",
        {**HEADS_OF_32, "tie_word_embeddings": True, "sliding_window": LONGER_THAN_THE_PROMPT},
    ),
    "olmo2": ("olmo2", HEADS_OF_32),
    "olmo2, tied, biases": ("olmo2", {**HEADS_OF_32, "tie_word_embeddings": True, "attention_bias": True}),
    "gemma3": ("gemma3", {"head_dim": 32}),
    "mixtral": ("mixtral", {**HEADS_OF_32, "sliding_window": None}),
    "mixtral, long window": ("mixtral", {**HEADS_OF_32, "sliding_window": LONGER_THAN_THE_PROMPT}),
    "qwen3-moe": ("qwen3-moe", {"head_dim": 32, "norm_topk_prob": True}),
    "qwen3-moe, one layer of two": ("qwen3-moe", {"head_dim": 32, "decoder_sparse_step": 2}),
    "olmoe": ("olmoe", HEADS_OF_32),
    "gpt-oss": ("gpt-oss", {"head_dim": 32, "sliding_window": 24}),
    "gpt-oss, yarn": (
        "gpt-oss",
        {
            "head_dim": 32,
            "rope_parameters": {
                "rope_type": "yarn",
                "rope_theta": 10_000.0,
                "factor": 8.0,
                "truncate": False,
                "original_max_position_embeddings": 32,
            },
        },
    ),
    "deepseek-v2": ("deepseek-v2", LATENT),
    "deepseek-v2, groups, yarn": (
        "deepseek-v2",
        {
            **LATENT,
            "q_lora_rank": None,
            "topk_method": "group_limited_greedy",
            "n_routed_experts": 6,
            "n_group": 3,
            "topk_group": 2,
            "routed_scaling_factor": 1.7,
            "rope_parameters": {
                "rope_type": "yarn",
                "rope_theta": 10_000.0,
                "factor": 8.0,
                "mscale": 0.7,
                "mscale_all_dim": 1.1,
                "original_max_position_embeddings": 32,
            },
        },
    ),
    "deepseek-v3": ("deepseek-v3", LATENT),
    "deepseek-v3, groups, pairs apart": (
        "deepseek-v3",
        {
            **LATENT,
            "rope_interleave": False,
            "n_routed_experts": 6,
            "n_group": 3,
            "topk_group": 2,
            "n_shared_experts": 2,
            "norm_topk_prob": False,
        },
    ),
    "deepseek-v3, without experts": ("deepseek-v3", {**LATENT, "first_k_dense_replace": 2, "q_lora_rank": None}),
    "glm4-moe-lite": ("glm4-moe-lite", {**LATENT, "n_shared_experts": 2}),
    "glm4-moe-lite, two layers without experts": (
        "glm4-moe-lite",
        {**LATENT, "num_hidden_layers": 3, "mlp_layer_types": ["dense", "dense", "sparse"], "q_lora_rank": None},
    ),
    "mamba2": ("mamba2", {"time_step_limit": (0.0, 0.8), "use_bias": True}),
    "mamba2, tied": ("mamba2", {"tie_word_embeddings": True, "use_conv_bias": False, "n_groups": 1}),
    "granite-hybrid": ("granite-hybrid", {"attention_bias": True, "mamba_n_groups": 2}),
    "granite-hybrid, without experts, rotated": (
        "granite-hybrid",
        {"num_local_experts": 0, "position_embedding_type": "rope", "tie_word_embeddings": True},
    ),
    "falcon-h1": ("falcon-h1", HEADS_OF_32),
    "falcon-h1, normed": ("falcon-h1", {"mamba_rms_norm": True, "mamba_norm_before_gate": False}),
    "falcon-h1, normed before the gate": ("falcon-h1", {"mamba_rms_norm": True, "tie_word_embeddings": True}),
    "qwen3-next": ("qwen3-next", {"head_dim": 32}),
    "qwen3-next, one layer with experts": (
        "qwen3-next",
        {"mlp_only_layers": [0], "rope_parameters": {"rope_theta": 1e4, "partial_rotary_factor": 0.5}},
    ),
    "mamba": ("mamba", {"tie_word_embeddings": False}),
    "mamba, biases": ("mamba", {"use_bias": True, "use_conv_bias": False, "time_step_rank": "auto"}),
    "falcon-mamba": ("falcon-mamba", {}),
    "recurrent-gemma": ("recurrent-gemma", {}),
    "recurrent-gemma, one key head": (
        "recurrent-gemma",
        {
            "num_key_value_heads": 1,
            "attention_bias": True,
            "attention_window_size": LONGER_THAN_THE_PROMPT,
            "conv1d_width": 3,
        },
    ),
    "lfm2": ("lfm2", {}),
    "jamba": ("jamba", {}),
    "jamba, without experts": (
        "jamba",
        {"num_experts": 1, "mamba_conv_bias": False, "mamba_proj_bias": True, "mamba_dt_rank": "auto"},
    ),
    "nemotron-h": ("nemotron-h", {}),
    "nemotron-h, latents, groups, biases": (
        "nemotron-h",
        {"moe_latent_size": 20, "n_routed_experts": 6, "n_group": 3, "topk_group": 2, "use_bias": True},
    ),
    "nemotron-h, without experts": (
        "nemotron-h",
        {
            "layers_block_type": ["mlp", "linear_attention", "linear_attention", "mlp", "full_attention"],
            "mlp_bias": True,
            "tie_word_embeddings": True,  # which transformers does not do
        },
    ),
    "llama4": ("llama4", {"head_dim": 32}),
    "llama4, biases, one expert": (
        "llama4",
        {
            "attention_bias": True,
            "num_experts_per_tok": 1,
            "interleave_moe_layer_step": 1,
            "attn_temperature_tuning": False,
            "use_qk_norm": False,
            "rope_parameters": {
                "rope_type": "llama3",
                "rope_theta": 10_000.0,
                "factor": 8.0,
                "low_freq_factor": 1.0,
                "high_freq_factor": 4.0,
                "original_max_position_embeddings": 64,
            },
        },
    ),
    "llama4, without chunks": (
        "llama4",
        {
            "attention_chunk_size": None,
            "no_rope_layers": [1, 1],
            "architecture": "Llama4ForConditionalGeneration",
        },
    ),
    "lfm2-moe": ("lfm2-moe", {}),
    "qwen3.5": ("qwen3.5", {"head_dim": 32}),
    "qwen3.5, tied": ("qwen3.5", {"tie_word_embeddings": True, "architecture": "Qwen3_5ForConditionalGeneration"}),
    "qwen3.5-moe": ("qwen3.5-moe", {"head_dim": 32}),
    "qwen3.5-moe, tied": (
        "qwen3.5-moe",
        {"tie_word_embeddings": True, "architecture": "Qwen3_5MoeForConditionalGeneration"},
    ),
    "lfm2, biases": ("lfm2", {"conv_bias": True, "block_auto_adjust_ff_dim": False, "tie_word_embeddings": False}),
    "gemma3, own head, long window": (
        "gemma3",
        {"head_dim": 32, "tie_word_embeddings": False, "sliding_window": LONGER_THAN_THE_PROMPT},
    ),
}


@pytest.fixture(params=VARIANTS)
def model(request: pytest.FixtureRequest, tmp_path: Path) -> Any:
    """A random model of transformers, saved to the folder."""
    name, differences = VARIANTS[request.param]
    if request.param == "deepseek-v2, groups, yarn":
        from transformers.models.deepseek_v2 import modeling_deepseek_v2

        if not hasattr(modeling_deepseek_v2, "yarn_apply_mscale"):
            pytest.skip(
                "this transformers does not scale attention by mscale in DeepSeek V2, as its authors' code does"
            )
    if request.param == "llama4, without chunks":
        kinds = transformers.Llama4TextConfig(attention_chunk_size=None, num_hidden_layers=1, no_rope_layers=[1])
        if kinds.layer_types != ["full_attention"]:
            pytest.skip("this transformers calls attention of Llama 4 chunked without a size, and fails to compute it")
    return save(name, tmp_path, max_position_embeddings=256, **differences)


def test_logits_on_the_cpu_are_those_of_transformers(model: Any, tmp_path: Path) -> None:
    driver = cpu_driver(tmp_path)
    assert isinstance(driver.runner.decoder, Decoder)
    chunks_and_decode_steps(driver, model)


@pytest.mark.skipif(
    INSTALLED < LOWEST_RELEASE, reason="Qwen3.5 came to transformers later, and this compares with its module"
)
@pytest.mark.parametrize("name", ["Qwen3_5", "Qwen3_5Moe", "Llama4"])
def test_the_text_of_a_model_with_a_tower_for_images(name: str, tmp_path: Path) -> None:
    family = {"Qwen3_5": "qwen3.5", "Qwen3_5Moe": "qwen3.5-moe", "Llama4": "llama4"}[name]
    text = SHAPE | MODELS[family][1] | {"max_position_embeddings": 256}
    vision = {"hidden_size": 16, "intermediate_size": 16}
    if name == "Llama4":
        vision |= {"num_hidden_layers": 1, "num_attention_heads": 2, "image_size": 28, "vision_output_dim": 16}
        vision |= {"projector_input_dim": 16, "projector_output_dim": 16}
    else:
        vision |= {"depth": 1, "num_heads": 2, "out_hidden_size": text["hidden_size"]}
    config = getattr(transformers, f"{name}Config")(text_config=text, vision_config=vision)
    torch.manual_seed(1)
    kind = getattr(transformers, f"{name}ForConditionalGeneration")
    model = kind._from_config(config, attn_implementation="eager").eval()
    with torch.no_grad():
        for parameter in model.parameters():
            if parameter.ndim > 1:
                parameter.normal_(0.0, 1.5 / parameter.shape[-1] ** 0.5)
    model.save_pretrained(tmp_path)
    driver = cpu_driver(tmp_path)
    assert driver.runner.config.model.architecture == f"{name}ForConditionalGeneration"
    assert isinstance(driver.runner.decoder, Decoder)
    # The module of Llama 4 fails without images.
    chunks_and_decode_steps(driver, model.language_model if name == "Llama4" else model)


def test_experts_are_read_from_one_tensor_as_from_many(tmp_path: Path) -> None:
    """Released files of Qwen3.5 have those of all experts in one; transformers writes either."""
    model = save("qwen3.5-moe", tmp_path, max_position_embeddings=256, num_hidden_layers=2)
    file = tmp_path / "model.safetensors"
    tensors = load_file(file)
    for base in sorted({name.partition(".experts.")[0] + ".experts." for name in tensors if ".experts." in name}):
        if f"{base}gate_up_proj" in tensors:
            gates_and_ups, downs = (tensors.pop(f"{base}{name}").unbind(0) for name in ("gate_up_proj", "down_proj"))
            for number, (both, down) in enumerate(zip(gates_and_ups, downs, strict=True)):
                gate, up = both.chunk(2)
                parts = {"gate_proj": gate, "up_proj": up, "down_proj": down}
                tensors |= {f"{base}{number}.{name}.weight": one.contiguous() for name, one in parts.items()}
        else:
            parts = [
                torch.stack([tensors.pop(f"{base}{number}.{name}.weight") for number in range(4)])
                for name in ("gate_proj", "up_proj", "down_proj")
            ]
            tensors |= {f"{base}gate_up_proj": torch.cat(parts[:2], 1), f"{base}down_proj": parts[2]}
    save_file(tensors, file, {"format": "pt"})
    chunks_and_decode_steps(cpu_driver(tmp_path), model)


def test_step_sizes_of_nemotron_h_have_the_limits_of_its_config(tmp_path: Path) -> None:
    """By either name. `time_step_min` is none of them, whatever the module of transformers makes of it in prompts."""
    save("nemotron-h", tmp_path, max_position_embeddings=256)
    file = tmp_path / "config.json"
    config = json.loads(file.read_text())

    def logits(**changes: Any) -> torch.Tensor:
        file.write_text(json.dumps(config | changes))
        driver = cpu_driver(tmp_path)
        driver.add(0, prompt(1, 40))
        driver.step({0: 40}, decode=[])
        return driver.logits[0]

    plain, limited = logits(), logits(time_step_limit=[0.0, 0.01])
    assert torch.equal(logits(time_step_min=0.5), plain)
    assert torch.equal(logits(time_step_limit=[0.0, float("inf")]), plain)  # written as Infinity, which is not JSON
    assert not torch.allclose(limited, plain, atol=1e-2)
    del config["time_step_limit"]
    assert torch.equal(logits(mamba_dt_limit=[0.0, 0.01]), limited)


def test_logits_on_the_device_are_those_of_transformers(model: Any, tmp_path: Path) -> None:
    plan = decoder_config(model.config.architectures[0], json.loads((tmp_path / "config.json").read_text()))
    if plan.recurrent is not None or model.config.architectures[0].startswith("Llama4"):
        with pytest.raises(
            UnsupportedModelError, match=r"needs .*(recurrent|adjacent_pairs).* not through transformers either"
        ):
            device_driver(tmp_path)
        return
    driver = device_driver(tmp_path)
    assert isinstance(driver.runner.model, DeviceDecoder)
    chunks_and_decode_steps(driver, model)


def test_products_and_norms_of_many_rows_give_the_same(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """As of many rows, where each is a launch of its own."""
    monkeypatch.setattr("actorllm.model.cuda.linear.is_skinny", lambda *_: False)
    for name in ("olmo2", "gemma3"):
        folder = tmp_path / name
        variant, differences = VARIANTS[name]
        model = save(variant, folder, max_position_embeddings=256, **differences)
        chunks_and_decode_steps(device_driver(folder), model)


@needs_modules
@pytest.mark.parametrize("name", ["gemma3", "olmo2", "phi3"])
def test_bfloat16_stays_near_float32(name: str, tmp_path: Path) -> None:
    """Norms of 1 + weight and scaled embeddings included, of which either would be rounded away in bfloat16."""
    variant, differences = VARIANTS[name]
    model = save(variant, tmp_path, max_position_embeddings=256, **differences)
    expected = reference(model, prompt(1, 40))[-1]
    distances = []
    for driver in (
        cpu_driver(tmp_path, dtype="bfloat16"),
        cpu_driver(tmp_path, dtype="bfloat16", model_impl="transformers"),
    ):
        driver.add(0, prompt(1, 40))
        driver.step({0: 40}, decode=[])
        distances.append(float((driver.logits[0] - expected).square().mean().sqrt()))
    assert distances[0] < 1.5 * distances[1] + 0.02


@pytest.mark.parametrize(
    ("name", "differences"),
    [("qwen3-next", {"mlp_only_layers": [0, 1]}), ("mamba", {}), ("recurrent-gemma", {"num_hidden_layers": 3})],
    ids=["qwen3-next", "mamba", "recurrent-gemma"],
)
def test_bfloat16_of_recurrent_layers_is_as_near_to_float32_as_that_of_transformers(
    name: str, differences: dict[str, Any], tmp_path: Path
) -> None:
    """Without experts: which of them a token takes is a matter of rounding, in either."""
    half = save(name, tmp_path, torch.bfloat16, max_position_embeddings=256, **differences)
    exact = save(name, tmp_path / "exact", torch.bfloat16, max_position_embeddings=256, **differences).float()
    driver = cpu_driver(tmp_path, dtype="bfloat16")
    ours, theirs = [], []
    for slot in range(4):
        tokens = prompt(slot, 40)
        driver.add(slot, tokens)
        driver.step({slot: 40}, decode=[])
        expected = reference(exact, tokens)[-1]
        ours.append(float((driver.logits[0] - expected).square().mean().sqrt()))
        theirs.append(float((reference(half, tokens)[-1] - expected).square().mean().sqrt()))
    assert sum(ours) < 1.2 * sum(theirs) + 0.02


SEEN: dict[str, dict[str, Any]] = {
    "attention_scale": {"attention_scale": None},
    "embedding_scale": {"embedding_scale": 1.0},
    "window_rope": {"window_rope": None},
    "windows": {"windows": (6, 6)},
    "activation": {"activation": "silu"},
    "norm_offset": {"names": TensorNames(mlp_norm="pre_feedforward_layernorm")},
    "norms": {
        "names": TensorNames(
            mlp_norm="post_attention_layernorm", output_norm="pre_feedforward_layernorm", norm_offset=1.0
        )
    },
}


@pytest.mark.parametrize("kind", [CpuRunner, CudaRunner])
@pytest.mark.parametrize("switch", SEEN)
def test_control_a_dropped_switch_is_seen(switch: str, kind: type[Any], tmp_path: Path) -> None:
    variant, differences = VARIANTS["gemma3"]
    model = save(variant, tmp_path, max_position_embeddings=256, **differences)
    make = cpu_driver if kind is CpuRunner else device_driver
    plan = replace(make(tmp_path).runner.model_config, **SEEN[switch])
    driver = make(tmp_path, plan=plan)
    driver.add(0, prompt(1, 40))
    if kind is CudaRunner:
        driver.runner.model.head = None
    driver.step({0: 40}, decode=[])
    driver.logits = driver.logits if kind is CpuRunner else driver.runner.sampler.logits[:1]
    assert difference(driver, model) > 20 * TOLERANCE


# Switches -------------------------------------------------------------------------------------------------------------


class Narrow(CudaRunner):
    """A backend that was written before OLMo 2 was."""

    name = "narrow"
    switches = CudaRunner.switches - {"norms_inputs", "norms_outputs", "qk_norm='all_heads'"}


class Alone(Narrow):
    """One that runs no modules of transformers either."""

    name = "alone"
    runs_modules = False


NEEDS = "'Olmo2ForCausalLM' needs norms_inputs, norms_outputs, qk_norm='all_heads', which the fused forward of device="


def olmo2(folder: Path) -> Any:
    variant, differences = VARIANTS["olmo2"]
    return save(variant, folder, max_position_embeddings=256, **differences)


@needs_modules
def test_what_a_backend_does_not_know_runs_through_transformers(tmp_path: Path) -> None:
    """A healthy checkpoint with a switch that the forward does not know was once called corrupt."""
    model = olmo2(tmp_path)
    driver = device_driver(tmp_path, Narrow)
    assert isinstance(driver.runner.model, DeviceTransformers)
    driver.add(0, prompt(1, 30))
    driver.step({0: 30}, decode=[])
    assert driver.requests[0].tokens[-1] == int(reference(model, prompt(1, 30))[-1].argmax())
    config, hf = driver.runner.config, json.loads((tmp_path / "config.json").read_text())
    assert f"{NEEDS}'narrow'" in way_of(driver.runner.model_config, config.model, hf, Narrow)


def test_what_a_backend_does_not_know_is_refused_by_name(tmp_path: Path) -> None:
    olmo2(tmp_path)
    with pytest.raises(UnsupportedModelError, match=f"{NEEDS}'narrow' does not know; leave model_impl at 'auto'"):
        device_driver(tmp_path, Narrow, model_impl="vllm")
    expected = f"{NEEDS}'alone' .* and not through transformers either: .* device='alone' does not; use device='cpu'"
    with pytest.raises(UnsupportedModelError, match=expected):
        device_driver(tmp_path, Alone)


def test_no_backend_runs_the_shape_of_another_one(tmp_path: Path) -> None:
    """With random weights, which have every name, a plan with unknown switches once ran as another model."""
    olmo2(tmp_path)
    config = config_of(tmp_path, block_size=64, load_format="dummy")
    plan = CpuRunner(config, show_progress=False).model_config
    assert isinstance(plan, DecoderConfig)
    with pytest.raises(UnsupportedModelError, match=f"{NEEDS}'narrow'"):
        Narrow(config, show_progress=False, device=HostDevice(), plan=plan)


def test_a_switch_is_whatever_is_not_as_in_the_plain_decoder() -> None:
    plain = decoder_config("LlamaForCausalLM", LLAMA)
    assert plain.switches == set()
    assert replace(plain, has_head=False).switches == set()
    assert replace(plain, embedding_scale=2.0, has_mlp_bias=True).switches == {"embedding_scale", "has_mlp_bias"}
    assert replace(plain, windows=(None, 5)).switches == {"windows"}
    assert replace(plain, qk_norm="head", activation="gelu_tanh").switches == {
        "qk_norm='head'",
        "activation='gelu_tanh'",
    }


LLAMA: dict[str, Any] = {
    "vocab_size": 97,
    "hidden_size": 48,
    "intermediate_size": 64,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
}


def test_every_family_is_compared_with_transformers(tmp_path: Path) -> None:
    compared = set()
    for number, (name, differences) in enumerate(VARIANTS.values()):
        save(name, tmp_path / str(number), max_position_embeddings=256, **differences)
        compared |= set(json.loads((tmp_path / str(number) / "config.json").read_text())["architectures"])
    assert compared == set(FAMILIES), "add the family to VARIANTS"


def test_every_family_runs_fused_on_both_backends(tmp_path: Path) -> None:
    for architecture in FAMILIES:
        experts = {"num_experts_per_tok": 2, "moe_intermediate_size": 32, "num_local_experts": 4, "num_experts": 4}
        experts |= {"num_heads": 3, "n_groups": 1, "mamba_n_heads": 3}  # of state-space layers
        shape = LLAMA | {"architectures": [architecture], "head_dim": 32, "num_key_value_heads": 2} | experts
        if architecture in ("GraniteMoeHybridForCausalLM", "Qwen3NextForCausalLM") or "Qwen3_5" in architecture:
            shape["layer_types"] = ["linear_attention", "full_attention"]
        if architecture.startswith("Lfm2"):
            shape["layer_types"] = ["conv", "full_attention"]
        if architecture == "RecurrentGemmaForCausalLM":
            shape["block_types"] = ["recurrent", "attention"]
        if architecture == "NemotronHForCausalLM":
            shape["hybrid_override_pattern"] = "M-*E"
        shape |= {"attn_layer_period": 2, "attn_layer_offset": 1}
        (tmp_path / "config.json").write_text(json.dumps(shape))
        config, hf = config_of(tmp_path, max_model_len=64).model, json.loads((tmp_path / "config.json").read_text())
        plan = model_plan(config, hf, CpuRunner)
        assert isinstance(plan, DecoderConfig)
        (row,) = (row for row in table("fused") if row["architecture"] == architecture)
        # There are no kernels of these yet.
        is_fused = plan.recurrent is None and not plan.has_adjacent_pairs
        assert (plan.switches <= CudaRunner.switches) == is_fused
        if is_fused:
            assert isinstance(model_plan(config, hf, CudaRunner), DecoderConfig)
        assert row["cuda"] == ("fused" if is_fused else "refused")
        held = {"keys and values": bool(plan.attention_layers), "latents": plan.latent is not None}
        held["states"] = plan.recurrent is not None
        if held["latents"]:
            held["keys and values"] = False
        assert row["cache"].partition(",")[0] == " and ".join(name for name, is_there in held.items() if is_there)


# What config.json may say ---------------------------------------------------------------------------------------------


def test_gemma3_of_older_files_is_the_same(tmp_path: Path) -> None:
    save("gemma3", tmp_path, num_hidden_layers=4, layer_types=None, sliding_window_pattern=2)
    new = json.loads((tmp_path / "config.json").read_text())
    old = {
        key: value for key, value in new.items() if key not in ("rope_parameters", "layer_types", "hidden_activation")
    }
    old |= {"rope_theta": 1e6, "rope_local_base_freq": 1e4, "rope_scaling": None, "sliding_window_pattern": 2}
    configs = [decoder_config("Gemma3ForCausalLM", hf) for hf in (new, old)]
    for config in configs:
        assert config.windows == (6, None, 6, None)
        assert config.window_rope is not None
        assert (config.rope["rope_theta"], config.window_rope["rope_theta"]) == (1e6, 1e4)
    assert replace(configs[0], rope={}, window_rope={}) == replace(configs[1], rope={}, window_rope={})
    scaled = decoder_config("Gemma3ForCausalLM", old | {"rope_scaling": {"rope_type": "linear", "factor": 8.0}})
    assert scaled.rope["factor"] == 8.0
    assert scaled.window_rope == {"rope_theta": 1e4}


LONGROPE = {
    "rope_type": "longrope",
    "rope_theta": 10000.0,
    "short_factor": [1.0] * 6,
    "long_factor": [4.0] * 6,
    "original_max_position_embeddings": 64,
}


@needs_modules
@pytest.mark.parametrize(
    ("name", "differences"),
    [
        ("gemma3", {"final_logit_softcapping": 8.0}),
        ("phi3", {"rope_parameters": {"rope_type": "default", "rope_theta": 1e4, "partial_rotary_factor": 0.5}}),
        ("phi3", {"rope_parameters": LONGROPE}),
    ],
    ids=["soft cap", "partial rotation", "longrope"],
)
def test_what_a_family_lacks_goes_through_transformers(name: str, differences: dict[str, Any], tmp_path: Path) -> None:
    model = save(name, tmp_path, **differences)
    driver = cpu_driver(tmp_path)
    assert isinstance(driver.runner.decoder, TransformersDecoder)
    driver.add(0, prompt(1, 30))
    driver.step({0: 30}, decode=[])
    assert difference(driver, model) < TOLERANCE
    with pytest.raises(UnsupportedModelError, match=r"softcapping|partial_rotary_factor|longrope"):
        cpu_driver(tmp_path, model_impl="vllm")


def test_layer_types_that_contradict_the_number_of_layers() -> None:
    with pytest.raises(CorruptModelError, match="layer_types has 3 entries for 2 layers"):
        decoder_config("Gemma3ForCausalLM", LLAMA | {"layer_types": [*ALTERNATING["layer_types"], "full_attention"]})


def test_a_convolution_that_sees_one_token_is_refused() -> None:
    with pytest.raises(CorruptModelError, match="have a kernel of 1; 2 or more are needed"):
        convolution_state(1, 64)
    assert convolution_state(3, 64).shape == (2, 64)


def test_a_checkpoint_with_a_tensor_too_few_is_corrupt(tmp_path: Path) -> None:
    """Also where the tensor is a part of one that is fused."""
    save("phi3", tmp_path)
    tensors = load_file(tmp_path / "model.safetensors")
    name = "model.layers.1.self_attn.qkv_proj.weight"
    tensors[name] = tensors[name][:-1].clone()
    save_file(tensors, tmp_path / "model.safetensors")
    with pytest.raises(CorruptModelError, match=name):
        cpu_driver(tmp_path)


def test_a_window_of_null_is_none_and_no_window_has_the_default() -> None:
    assert qwen_window({"use_sliding_window": True, "sliding_window": None}) is None
    assert qwen_window({"use_sliding_window": True}) == 4096
    assert qwen_window({"sliding_window": 64}) is None
