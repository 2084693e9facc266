"""GGUF files as models: their weights, tokenizer and chat template; and files that are hostile or broken."""

from __future__ import annotations

import struct
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from gguf import GGMLQuantizationType, GGUFWriter
from gguf.quants import dequantize

from actorllm import LLM, SamplingParams
from actorllm.cli.commands import info
from actorllm.config import BUNDLED_MODELS
from actorllm.errors import ConfigError, CorruptModelError, ModelError, UnsupportedModelError
from actorllm.model.linear import LinearPart
from actorllm.model.linear.dense import Dense
from actorllm.model.linear.side_by_side import SideBySideLinear
from actorllm.model.quantization.gguf import PLAIN, SPLIT, GgufForm, GgufWeights
from actorllm.model.quantization.int4pack import Int4Linear
from actorllm.model.quantization.int8 import Int8
from actorllm.types.gguf_file import KINDS, MAX_ITEMS, GgufHeader, GgufTensor, read_header
from actorllm.types.gguf_model import LLAMA3, config_of
from tests.model.quantization.gguf_files import blocks, save_gguf
from tests.model.quantization.probing import error, logits


@pytest.fixture(autouse=True)
def own_cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    return


@pytest.mark.parametrize("kind", SPLIT)
def test_codes_scales_and_smallest_values_are_those_of_the_blocks(kind: str) -> None:
    weight = np.random.default_rng(0).standard_normal((6, 512)).astype(np.float32)
    made, _ = blocks(weight, kind)
    codes, scales, smallest = SPLIT[kind](made)
    assert codes.max() <= 15
    found = codes * scales.repeat(32, 1) + smallest.repeat(32, 1)
    np.testing.assert_allclose(found, dequantize(made, GGMLQuantizationType[kind]), rtol=1e-5, atol=1e-7)


@pytest.mark.parametrize(
    ("kind", "architecture"),
    [("Q4_K", "llama"), ("Q4_0", "qwen2"), ("Q4_1", "qwen3"), ("Q8_0", "llama"), ("BF16", "llama"), ("Q5_0", "qwen3")],
)
def test_a_file_computes_what_its_dequantized_weights_do(
    kind: str, architecture: str, tmp_path: Path, make_runner: Callable[..., Any]
) -> None:
    file, plain = save_gguf(tmp_path / "a", kind, architecture)
    expected = logits(make_runner(plain, dtype="float32"))
    runner = make_runner(file, dtype="float32", quantization_twin=False)
    assert runner.config.model.quantization == "gguf"
    layer = runner.decoder.layers[0]
    if kind.startswith("Q4"):
        assert isinstance(layer.output, Int4Linear)
        assert isinstance(layer.qkv, SideBySideLinear), "values have 6 bits"
    found = logits(runner)
    distance = error(found, expected)
    assert distance < 0.06
    # Queries in another order are far off: the measure sees it.
    layer.qkv = _shifted(layer.qkv)
    changed = logits(runner)
    assert error(changed, expected) > 2 * distance


OTHERS = [kind for kind, _, _ in KINDS.values() if kind not in (*SPLIT, *PLAIN)]


def test_all_other_types_are_the_numbers_that_the_package_makes_of_them(tmp_path: Path) -> None:
    """Among them what llama.cpp writes instead of Q4_K and Q6_K for rows that are no multiple of 256."""
    writer = GGUFWriter(tmp_path / "a.gguf", "llama")
    weight = np.random.default_rng(0).standard_normal((48, 512)).astype(np.float32)
    made = {kind: blocks(weight, kind) for kind in OTHERS}
    for i, (kind, (data, _)) in enumerate(made.items()):
        writer.add_tensor(f"blk.{i}.ffn_up.weight", data, raw_dtype=GGMLQuantizationType[kind])
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    weights = GgufWeights(tmp_path / "a.gguf", torch.float32)
    for i, (_, values) in enumerate(made.values()):
        name, exact = f"model.layers.{i}.mlp.up_proj", torch.from_numpy(values)
        assert torch.equal(weights.take(f"{name}.weight", 48, 512), exact)
        found = GgufForm().sharded(weights, LinearPart(name, 48, 512))
        assert isinstance(found, Int8 | Dense)
        dense = found.dense() if isinstance(found, Int8) else found.weight
        assert (dense - exact).norm() < 0.02 * exact.norm()
    assert {"Q5_0", "Q5_1", "Q8_0", "Q2_K", "Q3_K", "IQ4_NL", "IQ4_XS"} < set(OTHERS)


def _shifted(linear: Any) -> Callable[[torch.Tensor], torch.Tensor]:
    return lambda x: linear(x).roll(1, 1)


def test_its_tokenizer_and_its_chat_template_come_with_it(tmp_path: Path) -> None:
    from transformers import AutoTokenizer

    file, _ = save_gguf(tmp_path / "a")
    text = "Once upon a time, there was a cat."
    expected = AutoTokenizer.from_pretrained(BUNDLED_MODELS["storyteller"])(text).input_ids
    with LLM(file, topology="inline", max_num_seqs=2) as llm:
        params = SamplingParams(temperature=0.0, max_tokens=8, ignore_eos=True)
        output = llm.generate(text, params, use_tqdm=False)[0]
        assert output.prompt_token_ids is not None
        assert list(output.prompt_token_ids) == list(expected)
        again = llm.generate([text, "The"], params, use_tqdm=False)
        assert again[0].outputs[0].token_ids == output.outputs[0].token_ids
        chat = llm.chat([{"role": "user", "content": "Hello"}], params, use_tqdm=False)[0]
        assert llm.get_tokenizer().decode(chat.prompt_token_ids).strip() == "user: Hello"
    made = list((tmp_path / "cache" / "actorllm" / "gguf").iterdir())
    assert len(made) == 1, "no folder is left half-made"


def test_info_says_what_it_becomes(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    file, _ = save_gguf(tmp_path / "a")
    info(str(file))
    rows = dict(line.strip().split("  ", 1) for line in capsys.readouterr().out.splitlines())
    assert rows["weights"].strip() == f"{file.stat().st_size / 1e6:.1f} MB"
    assert "int4 g32, " in rows["linear layers"]
    assert "int8, " in rows["linear layers"]


def header(num_tensors: int = 0, num_fields: int = 0, body: bytes = b"", version: int = 3) -> bytes:
    return b"GGUF" + struct.pack("<IQQ", version, num_tensors, num_fields) + body


def text(value: str) -> bytes:
    return struct.pack("<Q", len(value)) + value.encode()


HUGE = 1 << 60
TENSOR = text("a") + struct.pack("<IQIQ", 1, 32, 0, 0)


@pytest.mark.parametrize(
    ("data", "told"),
    [
        (b"", "ends within its magic number"),
        (b"PK\x03\x04" + bytes(64), "is no GGUF file"),
        (header(num_tensors=HUGE), f"its number of tensors is {HUGE}"),
        (header(num_fields=HUGE), f"its number of fields is {HUGE}"),
        (header(num_fields=1, body=struct.pack("<Q", HUGE)), f"the length of the name of field 0 is {HUGE}"),
        (header(num_fields=1, body=text("a") + struct.pack("<I", 99)), "field 'a' is of type 99"),
        (header(num_fields=1, body=text("a") + struct.pack("<IQ", 8, HUGE)), "the length of field 'a' is"),
        (header(num_fields=1, body=text("a") + struct.pack("<IIQ", 9, 0, HUGE)), f"the length of field 'a' is {HUGE}"),
        (
            header(num_fields=1, body=text("a") + struct.pack("<IIQ", 9, 8, MAX_ITEMS) + bytes(80)),
            "the length of field 'a'",
        ),
        (header(num_fields=1, body=text("a") + struct.pack("<IIQIQ", 9, 9, 1, 9, 1)), "field 'a'"),
        (header(num_fields=2, body=(text("a") + struct.pack("<II", 4, 1)) * 2), "field 'a' is there twice"),
        (header(num_fields=3, body=text("a") + struct.pack("<II", 4, 1)), "ends within"),
        (header(1, 0, text("a") + struct.pack("<I", 9)), "tensor 'a' has 9 dimensions"),
        (header(1, 0, text("a") + struct.pack("<IQIQ", 1, HUGE, 0, 0)), r"tensor 'a' has shape"),
        (header(1, 0, text("a") + struct.pack("<IQIQ", 1, 33, 2, 0)), "rows of Q4_0 are in blocks of 32"),
        (header(1, 0, TENSOR), "tensor 'a' ends .* bytes behind the file"),
        (header(1, 0, text("a") + struct.pack("<IQIQ", 1, 32, 0, HUGE)), "tensor 'a' ends"),
        (header(2, 0, TENSOR * 2 + bytes(256)), "tensor 'a' is there twice"),
    ],
)
def test_a_corrupt_file_is_refused_at_once(data: bytes, told: str, tmp_path: Path) -> None:
    file = tmp_path / "model.gguf"
    file.write_bytes(data)
    with pytest.raises(CorruptModelError, match=told):
        LLM(file)


@pytest.mark.parametrize(
    ("data", "told"),
    [
        (header(version=1), "GGUF version 1 is not supported"),
        (header(1, 0, text("a") + struct.pack("<IQIQ", 1, 256, 15, 0)), "tensor 'a' is of type Q8_K"),
        (header(1, 0, text("a") + struct.pack("<IQIQ", 1, 256, 77, 0)), "tensor 'a' is of type number 77"),
        (
            header(0, 1, text("general.architecture") + struct.pack("<I", 8) + text("mamba")),
            "general.architecture is 'mamba', which is not supported; llama, qwen2, qwen3 are",
        ),
        (header(), "general.architecture is None"),
    ],
)
def test_what_is_not_read_is_refused_by_name(data: bytes, told: str, tmp_path: Path) -> None:
    file = tmp_path / "model.gguf"
    file.write_bytes(data)
    with pytest.raises(UnsupportedModelError, match=told):
        LLM(file)


def test_every_cut_of_a_file_is_refused(tmp_path: Path) -> None:
    file, _ = save_gguf(tmp_path / "a")
    data, cut = file.read_bytes(), tmp_path / "cut.gguf"
    for length in (*range(0, 2000, 37), 20_000, len(data) // 2, len(data) - 1):
        cut.write_bytes(data[:length])
        with pytest.raises(ModelError):
            read_header(cut)
    cut.write_bytes(data)
    assert len(read_header(cut).tensors) == 3 + 2 * 9


FIELDS: dict[str, Any] = {
    "general.architecture": "llama",
    "llama.block_count": 1,
    "llama.embedding_length": 64,
    "llama.feed_forward_length": 64,
    "llama.attention.head_count": 2,
    "llama.context_length": 8192,
}
EMBEDDING = {"token_embd.weight": GgufTensor((10, 64), 0, 0, 2560)}


@pytest.mark.parametrize(
    ("field", "value", "told"),
    [
        ("llama.block_count", -1, "llama.block_count is -1"),
        ("llama.embedding_length", "x", "llama.embedding_length is 'x'"),
        ("llama.attention.head_count_kv", [1, 2], "head_count_kv"),
        ("llama.rope.freq_base", float("nan"), "rope.freq_base"),
        ("llama.rope.scaling.type", "yarn", "rope.scaling.type is 'yarn'"),
        ("llama.expert_count", 8, "llama.expert_count is 8"),
        ("llama.rope.dimension_count", 16, "llama.rope.dimension_count is 16; 32 is read"),
        ("llama.attention.value_length", 16, "llama.attention.value_length is 16"),
        ("llama.attention.causal", False, "llama.attention.causal is False"),
        ("llama.attention.scale", 0.5, "llama.attention.scale is 0.5"),
        ("split.count", 3, "split.count is 3: .*llama-gguf-split --merge"),
    ],
)
def test_fields_that_describe_no_model_are_refused_by_name(field: str, value: Any, told: str) -> None:
    assert config_of(GgufHeader(FIELDS, EMBEDDING), Path("a"))["hidden_size"] == 64
    with pytest.raises(ModelError, match=told):
        config_of(GgufHeader(FIELDS | {field: value}, EMBEDDING), Path("a"))


def test_frequencies_of_llama_3_are_found_again_and_others_refused(tmp_path: Path) -> None:
    from actorllm.model.rope import inverse_frequencies

    rope = {"rope_type": "llama3", "rope_theta": 500_000.0, "factor": 8.0, **LLAMA3}
    plain = inverse_frequencies(32, {"rope_theta": 500_000.0}, 8192)
    factors = plain / inverse_frequencies(32, rope, 8192)
    file = tmp_path / "a"
    fields = FIELDS | {"llama.rope.freq_base": 500_000.0}
    tensors = EMBEDDING | {"rope_freqs.weight": GgufTensor((16,), 0, 0, 64)}
    file.write_bytes(factors.numpy().tobytes())
    found = config_of(GgufHeader(fields, tensors), file)
    assert found["rope_scaling"] == {"rope_type": "llama3", "factor": 8.0, **LLAMA3}
    file.write_bytes((factors + torch.arange(16) / 10).numpy().tobytes())
    with pytest.raises(UnsupportedModelError, match=r"'rope_freqs.weight' has other factors"):
        config_of(GgufHeader(fields, tensors), file)


def test_without_the_package_the_extra_is_named(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    import sys

    file, _ = save_gguf(tmp_path / "a")
    monkeypatch.setitem(sys.modules, "gguf", None)
    with pytest.raises(UnsupportedModelError, match=r"pip install 'actorllm\[quant\]'"):
        LLM(file)


def test_a_method_that_is_not_that_of_the_file_is_refused(tmp_path: Path) -> None:
    file, _ = save_gguf(tmp_path / "a")
    with pytest.raises(ConfigError, match="quantized already"):
        LLM(file, quantization="int8")
