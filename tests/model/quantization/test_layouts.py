"""Checkpoints of GPTQ, AWQ, compressed-tensors and fp8: what the files say is what is computed."""

from __future__ import annotations

import json
import os
import re
import signal
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file

from actorllm import LLM, SamplingParams
from actorllm.cli.commands import info
from actorllm.config import EngineConfig
from actorllm.errors import ConfigError, CorruptModelError, UnsupportedModelError
from actorllm.model.cpu.layers import linear
from actorllm.model.linear import LinearPart
from actorllm.model.linear.dense import Dense
from actorllm.model.quantization.checkpoint import CheckpointForm
from actorllm.model.quantization.grouped import nearest
from actorllm.model.quantization.int4 import Int4
from actorllm.model.quantization.int8 import Int8
from actorllm.model.weights import CheckpointWeights
from actorllm.types.quantization import read_checkpoint, read_method
from tests.model.quantization.layouts import (
    AUTO_ROUND,
    AWQ,
    BITSANDBYTES,
    FP8,
    GPTQ,
    MODELOPT,
    WRITERS,
    compressed,
    compressed_float4,
    fp8,
    save_both,
    torchao_config,
)
from tests.model.quantization.probing import error, logits


def layer(name: str, folder: Path, outputs: int, inputs: int, *, group: int = 32, **part: Any) -> tuple[Any, Any]:
    """One layer as it is read, and its weight in plain numbers."""
    torch.manual_seed(1)
    scheme, writer = WRITERS[name]
    tree = json.loads(json.dumps(scheme))
    if "fp4" in name:
        group = 16 if "nvfp4" in name else 32
    if "quant_type" in tree:
        if "torchao-int4" in name:
            tree["quant_type"]["default"]["_data"]["granularity"]["_data"]["group_size"] = group
    elif "config_groups" in tree:
        tree["config_groups"]["group_0"]["weights"]["group_size"] = group
    else:
        tree["group_size"] = group
    tensors, weight = (
        writer(outputs, inputs) if "fp8" in name and "quant_type" not in tree else writer(outputs, inputs, group=group)
    )
    save_file({f"a.{key}": tensor for key, tensor in tensors.items()}, folder / "model.safetensors")
    found = read_checkpoint({"quantization_config": tree})
    assert found is not None
    with CheckpointWeights(folder, torch.bfloat16, False) as weights:
        read = CheckpointForm(found).sharded(weights, LinearPart("a", outputs, inputs, **part))
        weights.close(lambda _: False)
    return read, weight


def assert_near(found: Any, weight: torch.Tensor) -> None:
    """Scales and zeros are those of the files in bfloat16, so that a weight is near by some 8 bits of a group's range."""
    assert (found.dense() - weight).abs().max() < 0.006 * 8 * weight.abs().max() / 7
    x = torch.randn(3, weight.shape[1]).bfloat16()
    expected = x.float() @ weight.T
    assert (linear(found)(x).float() - expected).norm() < 0.006 * expected.norm()


@pytest.mark.parametrize("group", [32, 64, 128])
@pytest.mark.parametrize(
    "name", ["gptq", "gptq-v2", "gptq-desc_act", "awq", "packed", "packed-zeros", "packed-order", "torchao-int4"]
)
def test_four_bits_stay_four_bits(name: str, group: int, tmp_path: Path) -> None:
    found, weight = layer(name, tmp_path, 48, 256, group=group)
    assert isinstance(found, Int4)
    assert found.group == group
    assert (found.order is not None) == (name in ("gptq-desc_act", "packed-order"))
    assert_near(found, weight)
    scales = found.scales.float()
    assert torch.equal(scales, scales.half().bfloat16().float()), "no other rounding"


@pytest.mark.parametrize(
    "name",
    [
        "gptq",
        "awq",
        "packed-zeros",
        "gptq-8",
        "packed-8",
        "fp8-channel",
        "fp8-block",
        "nvfp4",
        "modelopt-nvfp4",
        "torchao-int8",
        "torchao-int4",
        "bnb-nf4",
        "bnb-int8",
    ],
)
def test_parts_of_ranks_respect_groups(name: str, tmp_path: Path) -> None:
    """A part that ends within a group of 128 has smaller groups of the same scales; one that ends within 32 has 8 bits."""
    for part in ({"rows": slice(16, 48)}, {"columns": slice(64, 192)}, {"columns": slice(0, 72)}):
        found, weight = layer(name, tmp_path, 48, 256, group=128, **part)
        wanted = weight[part.get("rows", slice(None)), part.get("columns", slice(None))]
        is_four = name in ("gptq", "awq", "packed-zeros", "torchao-int4") and wanted.shape[1] % 32 == 0
        assert isinstance(found, Int4) == is_four
        if is_four:
            assert_near(found, wanted)
        else:
            dense = found.codes * found.scales[:, None] if isinstance(found, Int8) else found.weight.float()
            assert (dense - wanted).norm() < 0.02 * wanted.norm()


@pytest.mark.parametrize(
    "name",
    [
        *("gptq-8", "packed-8", "fp8", "fp8-channel", "fp8-block", "nvfp4", "mxfp4", "torchao-fp8"),
        *("modelopt-nvfp4", "modelopt-fp8", "bnb-nf4", "bnb-nf4-plain"),
    ],
)
def test_others_are_rounded_to_8_bits(name: str, tmp_path: Path) -> None:
    found, weight = layer(name, tmp_path, 144, 256)
    assert isinstance(found, Int8)
    assert (found.codes * found.scales[:, None] - weight).norm() < 0.02 * weight.norm()


BLOCKS_OF_4 = compressed(type="float", num_bits=8, strategy="block", block_structure=[4, 4]) | {
    "format": "float-quantized"
}


@pytest.mark.parametrize("tree", [FP8 | {"weight_block_size": [4, 4]}, BLOCKS_OF_4])
@pytest.mark.parametrize("keeps_floats", [False, True])
def test_as_many_blocks_as_outputs_are_blocks(keeps_floats: bool, tree: dict[str, Any], tmp_path: Path) -> None:
    torch.manual_seed(1)
    tensors, weight = fp8(16, 16, kind="block", block=4)
    save_file({f"a.{key}": tensor for key, tensor in tensors.items()}, tmp_path / "model.safetensors")
    scheme = read_checkpoint({"quantization_config": tree})
    assert scheme is not None
    with CheckpointWeights(tmp_path, torch.float32, False) as weights:
        found: Any = CheckpointForm(scheme, keeps_floats=keeps_floats).sharded(weights, LinearPart("a", 16, 16))
    dense = found.codes * found.scales[:, None] if isinstance(found, Int8) else found.weight
    assert (dense - weight).norm() < 0.02 * weight.norm()


@pytest.mark.parametrize("name", ["torchao-int8", "bnb-int8"])
def test_codes_of_8_bits_stay_what_they_are(name: str, tmp_path: Path) -> None:
    found, weight = layer(name, tmp_path, 48, 256)
    assert isinstance(found, Int8)
    assert torch.equal(found.codes.float() * found.scales[:, None], weight)


def test_what_rounding_would_change_too_much_stays_as_it_is() -> None:
    weight = torch.randn(16, 64)
    assert isinstance(nearest(weight, None, torch.bfloat16), Int8)
    weight[:, 0] *= 200
    kept = nearest(weight, None, torch.bfloat16)
    assert isinstance(kept, Dense)
    assert torch.equal(kept.weight, weight.bfloat16())


@pytest.mark.parametrize("name", WRITERS)
def test_a_model_computes_what_its_dequantized_weights_do(
    name: str, tmp_path: Path, make_runner: Callable[..., Any]
) -> None:
    quantized, plain = save_both(name, tmp_path)
    expected = logits(make_runner(plain, dtype="float32"))
    runner = make_runner(quantized, dtype="float32", quantization_twin=False)
    assert runner.config.model.quantization == WRITERS[name][0]["quant_method"]
    found = logits(runner)
    limit = 0.08 if "8" in name or "fp4" in name or "nf4" in name else 0.03  # activations of 8 bits
    assert error(found, expected) < limit
    # Another layer in its place is far off: the measure sees it.
    tensors = load_file(quantized / "model.safetensors")
    layers = [f"model.layers.{i}.mlp.down_proj." for i in (0, 1)]
    for key in [key.removeprefix(layers[0]) for key in tensors if key.startswith(layers[0])]:
        tensors[layers[0] + key], tensors[layers[1] + key] = tensors[layers[1] + key], tensors[layers[0] + key]
    save_file({key: tensor.contiguous().clone() for key, tensor in tensors.items()}, quantized / "model.safetensors")
    swapped = logits(make_runner(quantized, dtype="float32", quantization_twin=False))
    assert error(swapped, expected) > 0.2


def test_streams_are_equal_in_every_batch_and_with_a_prefix_hit(tmp_path: Path) -> None:
    folder, _ = save_both("gptq-desc_act", tmp_path)
    prompts = [[5 + i, 17, 33, 2] * (2 + i) for i in range(5)]
    params = [SamplingParams(temperature=0.9 * (i % 2), seed=i, max_tokens=16, ignore_eos=True) for i in range(5)]
    found = []
    for max_num_seqs in (1, 5):
        with LLM(
            str(folder), dtype="bfloat16", topology="inline", skip_tokenizer_init=True, max_num_seqs=max_num_seqs
        ) as llm:
            for _ in range(2):  # the second time with the prefixes in the cache
                outputs = llm.generate([{"prompt_token_ids": y} for y in prompts], params, use_tqdm=False)
                found.append([list(output.outputs[0].token_ids) for output in outputs])
    assert found[1:] == found[:1] * 3


@pytest.mark.slow(reason="starts a worker again; test_quantized_models does so with rounded weights")
@pytest.mark.parametrize(
    ("name", "impl"), [("awq", "auto"), ("torchao-int8", "auto"), ("gptq-desc_act", "transformers")]
)
def test_streams_are_those_of_the_worker_before(name: str, impl: str, tmp_path: Path) -> None:
    folder, _ = save_both(name, tmp_path)
    prompts = [{"prompt_token_ids": [5 + i, 17, 33, 2] * (2 + i)} for i in range(5)]
    params = [SamplingParams(temperature=0.9 * (i % 2), seed=i, max_tokens=16, ignore_eos=True) for i in range(5)]
    with LLM(str(folder), model_impl=impl, dtype="bfloat16", skip_tokenizer_init=True, num_threads=1) as llm:
        found = []
        for _ in range(2):
            outputs = llm.generate(prompts, params, use_tqdm=False)
            found.append([list(output.outputs[0].token_ids) for output in outputs])
            if len(found) == 1:
                os.kill(llm._engine.pids["worker0"], signal.SIGKILL)
    assert found[1] == found[0]


def broken(name: str, folder: Path, change: Callable[[dict[str, torch.Tensor]], Any]) -> Path:
    quantized, _ = save_both(name, folder)
    tensors = load_file(quantized / "model.safetensors")
    change(tensors)
    save_file(tensors, quantized / "model.safetensors")
    return quantized


K = "model.layers.0.self_attn.k_proj"
STATE = "weight.quant_state.bitsandbytes__nf4"


@pytest.mark.parametrize(
    ("name", "change", "told"),
    [
        ("gptq", lambda y: y.pop(f"{K}.scales"), f"no tensor '{K}.scales'"),
        ("awq", lambda y: y.pop(f"{K}.qzeros"), f"no tensor '{K}.qzeros'"),
        ("packed", lambda y: y.pop(f"{K}.weight_scale"), f"no tensor '{K}.weight_scale'"),
        ("fp8", lambda y: y.pop(f"{K}.weight_scale"), f"no tensor '{K}.weight_scale'"),
        ("gptq", lambda y: y[f"{K}.g_idx"].fill_(9), f"tensor '{K}.g_idx' has groups from 9 to 9, and there are 4"),
        ("gptq", lambda y: y[f"{K}.g_idx"].fill_(-1), "groups from -1 to -1"),
        ("gptq", lambda y: y[f"{K}.scales"].fill_(torch.nan), f"'{K}.scales' has scales that are not finite"),
        ("gptq", lambda y: y.update({f"{K}.scales": torch.ones(2, 64)}), rf"'{K}.scales' has shape \(2, 64\)"),
        ("packed", lambda y: y[f"{K}.weight_shape"].fill_(7), f"'{K}.weight_shape' says"),
        ("fp8", lambda y: y.update({f"{K}.weight": torch.ones(64, 128)}), f"'{K}.weight' is F32, F8_E4M3 is needed"),
        ("fp8", lambda y: y.update({f"{K}.weight_scale": torch.ones(3)}), f"'{K}.weight_scale' has shape"),
        ("nvfp4", lambda y: y.pop(f"{K}.weight_global_scale"), f"no tensor '{K}.weight_global_scale'"),
        (
            "nvfp4",
            lambda y: y[f"{K}.weight_global_scale"].fill_(0),
            f"'{K}.weight_global_scale' is 0.0, which is no scale",
        ),
        (
            "nvfp4",
            lambda y: y.update({f"{K}.weight_scale": torch.ones(64, 4)}),
            rf"'{K}.weight_scale' has shape \(64, 4\)",
        ),
        ("modelopt-nvfp4", lambda y: y.pop(f"{K}.weight_scale_2"), f"no tensor '{K}.weight_scale_2'"),
        (
            "modelopt-nvfp4",
            lambda y: y.update({f"{K}.weight_scale_2": torch.ones(2)}),
            rf"'{K}.weight_scale_2' is of shape \(2,\), which is no scale",
        ),
        ("modelopt-nvfp4", lambda y: y[f"{K}.weight_scale_2"].fill_(torch.nan), f"'{K}.weight_scale_2' is nan"),
        ("mxfp4", lambda y: y[f"{K}.weight_scale"].fill_(255), f"'{K}.weight_scale' has scales that are not finite"),
        ("mxfp4", lambda y: y.pop(f"{K}.weight_scale"), f"no tensor '{K}.weight_scale'"),
        ("awq", lambda y: y.update({f"{K}.qweight": torch.ones(128, 8)}), "torch.int32 is needed"),
        ("torchao-int8", lambda y: y.pop(f"{K}._weight_scale"), f"no tensor '{K}._weight_scale'"),
        (
            "torchao-int4",
            lambda y: y.update({f"{K}._weight_scale": torch.ones(64, 5)}),
            rf"'{K}._weight_scale' has shape \(64, 5\)",
        ),
        (
            "torchao-int4",
            lambda y: y.update({f"{K}._weight_zero_point": torch.ones(64, 2, dtype=torch.int8)}),
            rf"'{K}._weight_zero_point' has shape \(64, 2\)",
        ),
        (
            "torchao-int4",
            lambda y: y.update({f"{K}._weight_zero_point": torch.full((64, 4), torch.nan)}),
            f"'{K}._weight_zero_point' has zero points that are not finite",
        ),
        ("fp8", lambda y: y.update({f"{K}.weight_scale": torch.ones(2, 32)}), r"has shape \(2, 32\)"),
        ("bnb-nf4", lambda y: y.pop(f"{K}.weight.absmax"), f"no tensor '{K}.weight.absmax'"),
        (
            "bnb-nf4",
            lambda y: y[f"{K}.weight.nested_absmax"].fill_(torch.inf),
            f"'{K}.weight.absmax' has scales that are not",
        ),
        ("bnb-nf4", lambda y: y[f"{K}.{STATE}"].fill_(7), f"'{K}.{STATE}' is .*JSON with shape"),
        ("bnb-int8", lambda y: y[f"{K}.weight_format"].fill_(1), f"'{K}.weight_format' is not 0"),
    ],
)
def test_corrupt_files_are_refused_by_the_name_of_the_tensor(
    name: str, change: Callable[[Any], Any], told: str, tmp_path: Path, make_runner: Callable[..., Any]
) -> None:
    with pytest.raises(CorruptModelError, match=told):
        make_runner(broken(name, tmp_path, change))


@pytest.mark.parametrize(
    ("tree", "told"),
    [
        (GPTQ | {"bits": 3}, "quantization_config.bits is 3, 4 or 8 is read"),
        (GPTQ | {"bits": True}, "quantization_config.bits is True"),
        (GPTQ | {"desc_act": "yes"}, "quantization_config.desc_act is 'yes'"),
        (GPTQ | {"dynamic": {"a.*": {"bits": 8}}}, r"quantization_config.dynamic\['a\.\*'\]\.bits is 8, 4 is read"),
        (GPTQ | {"format": "marlin"}, "quantization_config.format is 'marlin'"),
        (GPTQ | {"is_marlin_format": True}, "quantization_config.is_marlin_format is True"),
        (GPTQ | {"checkpoint_format": "marlin"}, "quantization_config.checkpoint_format is 'marlin'"),
        (AWQ | {"version": "gemv"}, "quantization_config.version is 'gemv', 'gemm' is read"),
        (AWQ | {"bits": 8}, "quantization_config.bits is 8"),
        (AWQ | {"version": None, "format": "gemv_fast"}, "quantization_config.format is 'gemv_fast', 'gemm' is read"),
        (AUTO_ROUND | {"packing_format": "auto_round:fp8"}, "quantization_config.packing_format is 'auto_round:fp8'"),
        (AUTO_ROUND | {"data_type": "mx_fp"}, "quantization_config.data_type is 'mx_fp'"),
        (AUTO_ROUND | {"extra_config": {"a": {"bits": 8}}}, r"extra_config\['a'\]\.bits is 8, 4 is read"),
        (AUTO_ROUND | {"extra_config": {"lm_head": {"bits": 4}}}, r"extra_config\['lm_head'\]\.bits is 4, 16 is read"),
        (BITSANDBYTES | {"load_in_4bit": False}, "quantization_config.load_in_4bit is None, True is read"),
        (
            BITSANDBYTES | {"bnb_4bit_quant_storage": "bfloat16"},
            "quantization_config.bnb_4bit_quant_storage is 'bfloat16'",
        ),
        ({"bits": 4, "group_size": 64}, "quantized weights of MLX are not supported"),
        (FP8 | {"weight_block_size": 128}, "quantization_config.weight_block_size is 128"),
        (FP8 | {"fmt": "e5m2"}, "quantization_config.fmt is 'e5m2'"),
        (compressed(num_bits=2), "weights.num_bits is 2, 4 or 8 is read"),
        (compressed(strategy="token"), "weights.strategy is 'token'"),
        (compressed() | {"transform_config": {"config_groups": {"R4": {}}}}, "quantization_config.transform_config is"),
        (compressed_float4("nvfp4", group_size=32), "weights.group_size is 32, 16 is read"),
        (compressed_float4("mxfp4", strategy="channel"), "weights.strategy is 'channel', 'group' is read"),
        (
            compressed() | {"config_groups": {"a": compressed()["config_groups"]["group_0"], "b": {}}},
            "quantization_config.config_groups has 2 schemes; one is read",
        ),
        (torchao_config("Int4WeightOnlyConfig"), "quantization_config.quant_type is 'Int4WeightOnlyConfig'"),
        (
            {"quant_method": "torchao", "quant_type": "int4_weight_only"},
            "quantization_config.quant_type is 'int4_weight",
        ),
        (
            torchao_config("Int8WeightOnlyConfig") | {"include_input_output_embeddings": True},
            "quantization_config.include_input_output_embeddings is True",
        ),
        ({"quant_method": "modelopt"}, r"quantized weights \(modelopt\) are not supported: .*quant_algo is None"),
        (MODELOPT | {"quant_algo": "MIXED_PRECISION"}, "quantization_config.quant_algo is 'MIXED_PRECISION'"),
        (MODELOPT | {"group_size": 32}, "quantization_config.group_size is 32, 16 is read"),
        ({"quant_method": "hqq"}, r"quantized weights \(hqq\) are not supported"),
        ({"quant_method": "mxfp4"}, r"quantized weights \(mxfp4\) are not supported"),
        ({"quant_method": ["gptq"]}, "quantized weights"),
    ],
)
def test_schemes_that_are_not_read_are_refused_by_field_and_value(tree: dict[str, Any], told: str) -> None:
    with pytest.raises(UnsupportedModelError, match=told):
        read_checkpoint({"quantization_config": tree})


@pytest.mark.parametrize(
    ("tree", "field"),
    [
        (GPTQ | {"group_size": 0}, "group_size"),
        (GPTQ | {"group_size": "32"}, "group_size"),
        (compressed(group_size=None), "weights.group_size"),
        (FP8 | {"weight_block_size": [0, 128]}, "weight_block_size"),
        (AWQ | {"modules_to_not_convert": "all"}, "modules_to_not_convert"),
        (GPTQ | {"dynamic": ["-:a"]}, "dynamic"),
        (GPTQ | {"dynamic": {"-:(": {}}}, "dynamic"),
        (GPTQ | {"dynamic": {"-:(?i)a": {}}}, "dynamic"),
        (AUTO_ROUND | {"extra_config": [1]}, "extra_config"),
    ],
)
def test_what_is_no_scheme_is_refused_by_its_field(tree: dict[str, Any], field: str) -> None:
    with pytest.raises(CorruptModelError, match=field):
        read_checkpoint({"quantization_config": tree})


@pytest.mark.parametrize(
    ("left_out", "name", "is_quantized"),
    [
        ("lm_head", "lm_head", False),
        ("lm_head", "model.lm_head", True),
        ("model.layers.1.self_attn*", "model.layers.1.self_attn.q_proj", False),
        ("model.layers.1.self_attn*", "model.layers.11.self_attn.q_proj", True),
        ("model.layers.*.mlp.gate", "model.layers.3.mlp.gate", False),
        ("model.layers.*.mlp.gate", "model.layers.3.mlp.gate_proj", True),
        ("model.layers.0", "model.layers.0.mlp.up_proj", False),
        ("model.layers.0", "model.layers.01.mlp.up_proj", True),
    ],
)
@pytest.mark.parametrize("field", ["ignore", "exclude_modules"])
def test_modelopt_leaves_out_modules_by_patterns(left_out: str, name: str, is_quantized: bool, field: str) -> None:
    tree = {key: value for key, value in MODELOPT.items() if key != "ignore"} | {field: [left_out]}
    scheme = read_checkpoint({"quantization_config": tree})
    assert scheme is not None
    assert scheme.quantizes(name) is is_quantized


def test_modelopt_may_say_it_beside_config_json_and_store_scales_of_a_cache(
    tmp_path: Path, make_runner: Callable[..., Any]
) -> None:
    quantized, plain = save_both("modelopt-nvfp4", tmp_path)
    tree = json.loads((quantized / "config.json").read_text())
    said = {
        key: value for key, value in tree.pop("quantization_config").items() if key not in ("quant_method", "ignore")
    }
    said |= {"exclude_modules": ["lm_head"], "kv_cache_quant_algo": "FP8"}
    (quantized / "config.json").write_text(json.dumps(tree))
    beside = {"producer": {"name": "modelopt", "version": "0.33.0"}, "quantization": said}
    (quantized / "hf_quant_config.json").write_text(json.dumps(beside))
    tensors = load_file(quantized / "model.safetensors")
    tensors |= {
        f"model.layers.{i}.self_attn.{kind}_proj.{kind}_scale": torch.tensor(0.5) for i in (0, 1) for kind in "kv"
    }
    save_file(tensors, quantized / "model.safetensors")
    runner = make_runner(quantized, dtype="float32")
    assert runner.config.model.quantization == "modelopt"
    assert error(logits(runner), logits(make_runner(plain, dtype="float32"))) < 0.08


def test_modelopt_may_say_something_of_the_cache_alone(tmp_path: Path, make_runner: Callable[..., Any]) -> None:
    _, plain = save_both("modelopt-nvfp4", tmp_path)
    (plain / "hf_quant_config.json").write_text('{"quantization": {"quant_algo": null, "kv_cache_quant_algo": "FP8"}}')
    assert make_runner(plain, dtype="float32").config.model.quantization is None


LAYER_0, LAYER_1 = "model.layers.0.", "model.layers.1."


@pytest.mark.parametrize(
    ("tree", "method"),
    [(AUTO_ROUND | {"quant_method": "intel/auto-round"}, "auto-round"), (FP8 | {"quant_method": "fbgemm_fp8"}, "fp8")],
)
def test_methods_have_other_names(tree: dict[str, Any], method: str) -> None:
    scheme = read_checkpoint({"quantization_config": tree})
    assert scheme is not None
    assert read_method(None, {"quantization_config": tree}, has_module=False) == scheme.method == method
    assert read_method("gptq_marlin", {"quantization_config": GPTQ}, has_module=False) == "gptq"
    with pytest.raises(ConfigError, match=r"quantization='awq': config\.json says 'gptq'"):
        read_method("awq_marlin", {"quantization_config": GPTQ}, has_module=False)


@pytest.mark.parametrize(
    ("tree", "left_out", "quantized"),
    [
        (
            GPTQ | {"dynamic": {r"-:.*mlp\.gate$": {}, "-:model.layers.1.self": {}}},
            [f"{LAYER_0}mlp.gate", f"{LAYER_1}self_attn.q_proj", "lm_head"],
            [f"{LAYER_0}mlp.gate_proj", f"{LAYER_0}self_attn.q_proj"],
        ),
        (
            GPTQ | {"dynamic": {"+:.*down|a": {"bits": 4}, "-:.*layers.1|b": {}, "lm_head": {}}},
            [f"{LAYER_1}mlp.up_proj", "b", "lm_head"],
            [f"{LAYER_1}mlp.down_proj", f"{LAYER_0}mlp.up_proj", "a"],
        ),
        (
            AUTO_ROUND
            | {"extra_config": {f"{LAYER_0}mlp.up_proj": {"bits": 16}, ".*down": {"bits": 16}, "c": {"bits": 4}}},
            ["lm_head", "visual.blocks.0.attn.qkv", f"{LAYER_0}mlp.up_proj", f"{LAYER_1}mlp.down_proj"],
            [f"{LAYER_1}mlp.up_proj"],
        ),
    ],
)
def test_rules_leave_layers_out(tree: dict[str, Any], left_out: list[str], quantized: list[str]) -> None:
    scheme = read_checkpoint({"quantization_config": tree})
    assert scheme is not None
    assert not [name for name in left_out if scheme.quantizes(name)]
    assert all(map(scheme.quantizes, quantized))


def said_in_compression_config(folder: Path, tree: dict[str, Any], said: dict[str, Any]) -> None:
    tree["compression_config"] = said


def said_in_quantize_config(folder: Path, tree: dict[str, Any], said: dict[str, Any]) -> None:
    (folder / "quantize_config.json").write_text(json.dumps(said))


def said_in_quant_config(folder: Path, tree: dict[str, Any], said: dict[str, Any]) -> None:
    own = {"zero_point": True, "q_group_size": said["group_size"], "w_bit": said["bits"], "version": "GEMM"}
    (folder / "quant_config.json").write_text(json.dumps(own))


@pytest.mark.parametrize(
    ("name", "say"),
    [("packed", said_in_compression_config), ("gptq", said_in_quantize_config), ("awq", said_in_quant_config)],
)
def test_older_writers_say_it_elsewhere(
    name: str, say: Callable[..., None], tmp_path: Path, make_runner: Callable[..., Any]
) -> None:
    quantized, plain = save_both(name, tmp_path)
    tree = json.loads((quantized / "config.json").read_text())
    said = tree.pop("quantization_config")
    method = said.pop("quant_method")
    say(quantized, tree, said)
    (quantized / "config.json").write_text(json.dumps(tree | {"quantization_config": {}}))
    runner = make_runner(quantized, dtype="float32", quantization_twin=False)
    assert runner.config.model.quantization == method
    assert error(logits(runner), logits(make_runner(plain, dtype="float32"))) < 0.03


def test_codes_of_mlx_are_refused_by_name(tmp_path: Path, make_runner: Callable[..., Any]) -> None:
    _, plain = save_both("gptq", tmp_path)
    tree = json.loads((plain / "config.json").read_text())
    (plain / "config.json").write_text(json.dumps(tree | {"quantization": {"group_size": 64, "bits": 4}}))
    with pytest.raises(UnsupportedModelError, match="quantized weights of MLX are not supported"):
        make_runner(plain)


def test_layers_of_floats_are_no_layers_of_bitsandbytes(
    tmp_path: Path, make_runner: Callable[..., Any], capsys: pytest.CaptureFixture[str]
) -> None:
    """Writers leave some out, and list them by parts of their names."""
    quantized, plain = save_both("bnb-nf4", tmp_path)
    tensors = load_file(quantized / "model.safetensors")
    kept = {name: tensor for name, tensor in tensors.items() if not name.startswith(LAYER_1)}
    kept |= {
        name: tensor for name, tensor in load_file(plain / "model.safetensors").items() if name.startswith(LAYER_1)
    }
    save_file(kept, quantized / "model.safetensors")
    expected = logits(make_runner(plain, dtype="float32"))
    for impl in ("auto", "transformers"):
        assert error(logits(make_runner(quantized, dtype="float32", model_impl=impl)), expected) < 0.08
    info(str(quantized))
    assert re.search(r"linear layers +int8, 0\.1 MB, float16, 0\.2 MB", capsys.readouterr().out)


def test_zero_points_of_awq_count_where_they_are(tmp_path: Path) -> None:
    """Also where `zero_point` says that there are none."""
    torch.manual_seed(1)
    tensors, weight = WRITERS["awq"][1](48, 256)
    save_file({f"a.{key}": tensor for key, tensor in tensors.items()}, tmp_path / "model.safetensors")
    scheme = read_checkpoint({"quantization_config": AWQ | {"zero_point": False}})
    assert scheme is not None
    with CheckpointWeights(tmp_path, torch.bfloat16, False) as weights:
        assert_near(CheckpointForm(scheme).sharded(weights, LinearPart("a", 48, 256)), weight)
        weights.close(lambda _: False)


def test_scales_of_activations_and_of_a_cache_are_left_out(tmp_path: Path, make_runner: Callable[..., Any]) -> None:
    quantized, plain = save_both("fp8", tmp_path)
    tensors = load_file(quantized / "model.safetensors")
    of_layer, of_cache = ("input_scale", "activation_scale", "output_scale"), ("k_scale", "v_scale", "kv_scale")
    names = [f"{K}.{name}" for name in of_layer] + [f"{LAYER_0}self_attn.{name}" for name in of_cache]
    save_file(tensors | {name: torch.tensor(2.0) for name in names}, quantized / "model.safetensors")
    found = logits(make_runner(quantized, dtype="float32"))
    assert error(found, logits(make_runner(plain, dtype="float32"))) < 0.08


def test_a_scheme_of_the_cache_is_left_out() -> None:
    """Others round the KV cache by it; here it stays what `kv_cache_dtype` says."""
    cache = {"num_bits": 8, "type": "float", "strategy": "tensor", "symmetric": True, "dynamic": False}
    assert read_checkpoint({"quantization_config": compressed() | {"kv_cache_scheme": cache}}) == read_checkpoint(
        {"quantization_config": compressed()}
    )


def test_a_group_that_does_not_divide_the_inputs_is_refused_by_the_layer(
    tmp_path: Path, make_runner: Callable[..., Any]
) -> None:
    folder, _ = save_both("gptq", tmp_path)
    tree = json.loads((folder / "config.json").read_text())
    tree["quantization_config"]["group_size"] = 96
    (folder / "config.json").write_text(json.dumps(tree))
    with pytest.raises(CorruptModelError, match=r"_proj' has 128 inputs, .* in groups of 96"):
        make_runner(folder)


def test_a_method_that_is_not_that_of_the_files_is_refused(tmp_path: Path) -> None:
    folder, _ = save_both("gptq", tmp_path)
    assert (
        EngineConfig.from_arguments(folder, quantization="gptq", skip_tokenizer_init=True).model.quantization == "gptq"
    )
    with pytest.raises(ConfigError, match=r"quantization='awq': config\.json says 'gptq'"):
        EngineConfig.from_arguments(folder, quantization="awq", skip_tokenizer_init=True)


def test_info_says_what_the_layers_become(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    for name, told, changed in (
        ("awq", "int4 g32, ", r"int4: codes and numbers of the files"),
        ("fp8", "int8, ", r"int8 by [\d.]+ %"),
        ("nvfp4", "int8, ", r"int8 by [\d.]+ %"),
    ):
        folder, _ = save_both(name, tmp_path / name)
        info(str(folder))
        rows = dict(line.strip().split("  ", 1) for line in capsys.readouterr().out.splitlines())
        assert rows["linear layers"].strip().startswith(told)
        assert re.match(changed, rows["change of weights"].strip())
        assert rows["head"].strip().startswith("float16, ")
