"""Experts on the CPU: a row's result alone and among others, what is read of them, and their quantized forms."""

from __future__ import annotations

import json
import runpy
import shutil
from pathlib import Path
from typing import Any

import pytest
import torch

from actorllm.config import BUNDLED_MODELS
from actorllm.errors import CorruptModelError, UnsupportedModelError
from actorllm.model.cpu.decoder import Decoder
from actorllm.model.cpu.experts import Experts
from actorllm.model.quantization.int4pack import Int4Linear
from actorllm.model.quantization.onednn import Int8Linear
from actorllm.model.registry import decoder_config
from tests.model.families.loaded import cpu_driver
from tests.model.hf.decoders import prompt, reference, save
from tests.model.hf.releases import INSTALLED, LOWEST_RELEASE
from tests.model.mxfp4_folders import save_mxfp4

pytestmark = pytest.mark.usefixtures("computed_as_asked")

NUM_EXPERTS = "num_local_experts" if INSTALLED >= (5, 0) else "num_experts"
"""As the installed transformers writes it."""
SHAPE: dict[str, Any] = {
    "head_dim": 32,
    "hidden_size": 64,
    "num_experts": 8,
    "num_experts_per_tok": 3,
    "norm_topk_prob": True,
    "max_position_embeddings": 256,
}


def experts_of(folder: Path, **arguments: Any) -> Experts:
    decoder = cpu_driver(folder, **arguments).runner.decoder
    assert isinstance(decoder, Decoder)
    found = decoder.layers[0].experts
    assert found is not None
    return found


@torch.inference_mode()
@pytest.mark.parametrize(
    ("dtype", "quantization"), [("float32", None), ("bfloat16", None), ("float32", "int8"), ("bfloat16", "int8")]
)
def test_a_row_is_the_same_alone_and_among_others(dtype: str, quantization: str | None, tmp_path: Path) -> None:
    save("qwen3-moe", tmp_path, **SHAPE)
    experts = experts_of(tmp_path, dtype=dtype, quantization=quantization)
    x = torch.randn(150, 64, generator=torch.Generator().manual_seed(3)).to(getattr(torch, dtype))
    together = experts(x)
    assert len({tuple(row) for row in experts.choose(x)[0].sort(1)[0].tolist()}) > 20, "rows choose differently"
    parts = torch.cat([experts(part) for part in x.split(7)])
    alone = torch.cat([experts(row) for row in x[:20].split(1)])
    if dtype == "bfloat16" or quantization:
        assert torch.equal(together, parts)
        assert torch.equal(together[:20], alone)
    torch.testing.assert_close(parts, together, rtol=1e-6, atol=1e-5)
    torch.testing.assert_close(alone, together[:20], rtol=1e-6, atol=1e-5)


@torch.inference_mode()
def test_the_router_decides_in_float32(tmp_path: Path) -> None:
    """Two scores that bfloat16 does not tell apart."""
    save("qwen3-moe", tmp_path, torch.bfloat16, **SHAPE)
    experts = experts_of(tmp_path, dtype="bfloat16")
    x = torch.randn(64, 64, generator=torch.Generator().manual_seed(5)).bfloat16()
    numbers, weights = experts.choose(x)
    assert weights.dtype == torch.float32
    exact = x.double() @ experts.router
    assert torch.equal(numbers, exact.topk(3)[1])
    torch.testing.assert_close(weights.sum(1), torch.ones(64))


@torch.inference_mode()
def test_only_experts_that_rows_have_chosen_are_read(tmp_path: Path) -> None:
    save("qwen3-moe", tmp_path, **SHAPE)
    experts = experts_of(tmp_path)
    x = torch.randn(2, 64, generator=torch.Generator().manual_seed(3))
    chosen = set(experts.choose(x)[0].flatten().tolist())
    assert 3 <= len(chosen) <= 6
    expected = experts(x)
    assert experts.num_bytes == 8 * 64 * 8 + 4 * 3 * 3 * 64 * 32

    def never(_: torch.Tensor) -> torch.Tensor:
        raise AssertionError("no row has chosen this expert")

    experts.experts = [
        expert if number in chosen else (never, never)  # type: ignore[misc]
        for number, expert in enumerate(experts.experts)
    ]
    assert torch.equal(experts(x), expected)


@pytest.mark.parametrize("name", ["mixtral", "qwen3-moe", "olmoe", "gpt-oss"])
@pytest.mark.parametrize(("method", "kind"), [("int8", Int8Linear), ("int4", Int4Linear)])
def test_rounded_experts_stay_near_those_of_floats(method: str, kind: type, name: str, tmp_path: Path) -> None:
    model = save(name, tmp_path, hidden_size=128, max_position_embeddings=256)
    driver = cpu_driver(tmp_path, quantization=method)
    assert all(isinstance(one, kind) for pair in driver.runner.decoder.layers[0].experts.experts for one in pair)
    found = []
    for slot in range(5):  # rounding chooses other experts for some
        driver.add(slot, prompt(slot, 40))
        driver.step({slot: 40}, decode=[])
        assert driver.logits is not None
        both = torch.stack((driver.logits[0], reference(model, prompt(slot, 40))[-1]))
        found.append(float(torch.corrcoef(both)[0, 1]))
    assert sorted(found)[2] > (0.9 if method == "int8" else 0.75)


@pytest.mark.parametrize(
    ("architecture", "change", "error", "told"),
    [
        ("Qwen3MoeForCausalLM", {"num_experts_per_tok": 9}, CorruptModelError, "num_experts_per_tok=9 is more than"),
        ("Qwen3MoeForCausalLM", {NUM_EXPERTS: 0}, CorruptModelError, f"{NUM_EXPERTS} is 0"),
        ("Qwen3MoeForCausalLM", {"mlp_only_layers": 3}, CorruptModelError, "mlp_only_layers is 3"),
        ("Qwen3MoeForCausalLM", {"moe_intermediate_size": None}, CorruptModelError, "moe_intermediate_size is None"),
        ("OlmoeForCausalLM", {"clip_qkv": 8.0}, UnsupportedModelError, "clip_qkv=8.0 is not supported"),
    ],
)
def test_a_config_that_cannot_be_is_refused(
    architecture: str, change: dict[str, Any], error: type[Exception], told: str, tmp_path: Path
) -> None:
    save("qwen3-moe", tmp_path, **SHAPE)
    hf = json.loads((tmp_path / "config.json").read_text())
    with pytest.raises(error, match=told):
        decoder_config(architecture, hf | change)


def test_a_checkpoint_without_an_expert_is_told_by_its_name(tmp_path: Path) -> None:
    save("qwen3-moe", tmp_path, **SHAPE)
    config = tmp_path / "config.json"
    config.write_text(json.dumps(json.loads(config.read_text()) | {NUM_EXPERTS: 9}))
    with pytest.raises(CorruptModelError, match=r"mlp\.gate\.weight"):
        cpu_driver(tmp_path, model_impl="vllm")


@torch.inference_mode()
@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_mxfp4_is_read_exactly(dtype: str, tmp_path: Path) -> None:
    """The values are those that transformers reads of the same blocks and scales."""
    folders = save_mxfp4(tmp_path)
    logits = []
    for folder in folders:
        driver = cpu_driver(folder, dtype=dtype)
        driver.add(0, prompt(1, 40))
        driver.step({0: 40}, decode=[])
        assert driver.logits is not None
        logits.append(driver.logits.clone())
    assert torch.equal(*logits)
    assert float(logits[0].std()) > 0.1
    if INSTALLED >= LOWEST_RELEASE:
        with pytest.raises(UnsupportedModelError, match="mxfp4"):
            cpu_driver(folders[0], model_impl="transformers")


def test_the_example_runs_rounded_experts(tmp_path: Path) -> None:
    storyteller = BUNDLED_MODELS["storyteller"]
    vocab_size = json.loads((storyteller / "config.json").read_text())["vocab_size"]
    save("olmoe", tmp_path, vocab_size=vocab_size)
    for name in ("tokenizer.json", "tokenizer_config.json"):
        shutil.copy(storyteller / name, tmp_path / name)
    main = runpy.run_path(str(Path(__file__).parents[3] / "examples" / "experts.py"))["main"]
    options: dict[str, Any] = {"topology": "inline", "num_threads": 1, "dtype": "float32"}
    tokens, per_second = main(str(tmp_path), "int8", **options)
    assert len(tokens) == 64
    assert per_second > 0
