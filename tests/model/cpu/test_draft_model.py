"""A draft model changes no token; it draws with the noise of its target, under the same block tables (float32)."""

from __future__ import annotations

import json
import logging
import shutil
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file

from actorllm import LLM, SamplingParams
from actorllm.config import BUNDLED_MODELS, EngineConfig
from actorllm.errors import ConfigError, ModelError, UnsupportedModelError
from actorllm.model.cpu import draft_model
from actorllm.model.cpu.draft_model import DraftModel
from actorllm.model.sampler import Sampler

ARGUMENTS: dict[str, Any] = {
    "dtype": "float32",
    "topology": "inline",
    "max_model_len": 320,
    "max_num_seqs": 8,
    "num_threads": 1,
}
PROMPTS = ["Once upon a time there was a king", "The fox and the hen and the dog", "A poor woodcutter lived"]
TARGET = BUNDLED_MODELS["storyteller"]


def drafts(model: Any = "storyteller", most: int = 3, rows: int = 100, **more: Any) -> dict[str, Any]:
    return {
        "method": "draft_model",
        "model": str(model),
        "num_speculative_tokens": most,
        "num_speculative_tokens_per_batch_size": [[1, rows, most]],
        **more,
    }


def ask(llm: LLM, prompts: Any = PROMPTS, **params: Any) -> list[Any]:
    chosen = {"temperature": 0.9, "max_tokens": 24, "ignore_eos": True, "seed": 3} | params
    return llm.generate(prompts, SamplingParams(**chosen), use_tqdm=False)


def ids(outputs: list[Any]) -> list[list[int]]:
    return [list(completion.token_ids) for output in outputs for completion in output.outputs]


def counted(llm: LLM) -> tuple[int, int]:
    """Drafts, and right ones."""
    found = llm.stats()["scheduler"]["scheduler"]["speculation"]
    return found["num_draft_tokens"], found["num_accepted_tokens"]


def change_of(llm: LLM, call: Callable[[], Any]) -> tuple[Any, int, int]:
    """What it returns, and how many drafts and right ones it had."""
    before = counted(llm)
    result = call()
    after = counted(llm)
    return result, after[0] - before[0], after[1] - before[1]


def changed_copy(folder: Path, change: Callable[[str, torch.Tensor], torch.Tensor]) -> Path:
    folder.mkdir()
    for name in ("config.json", "tokenizer.json"):
        shutil.copy(TARGET / name, folder)
    weights = {
        name: change(name, tensor).contiguous() for name, tensor in load_file(TARGET / "model.safetensors").items()
    }
    save_file(weights, folder / "model.safetensors", {"format": "pt"})
    return folder


@pytest.fixture(scope="module")
def similar(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A draft model that is right now and then: the storyteller with some noise."""
    generator = torch.Generator().manual_seed(1)

    def noisy(name: str, tensor: torch.Tensor) -> torch.Tensor:
        noise = torch.randn(tensor.shape, generator=generator) * tensor.float().std() * 0.3
        return tensor if name.endswith("norm.weight") else tensor + noise.to(tensor.dtype)

    return changed_copy(tmp_path_factory.mktemp("models") / "similar", noisy)


@pytest.fixture(scope="module")
def plain() -> Iterator[LLM]:
    with LLM("storyteller", **ARGUMENTS) as llm:
        yield llm


@pytest.fixture(scope="module")
def twin() -> Iterator[LLM]:
    """The storyteller drafts for itself: every draft is right, if it has the same noise and the right keys and values."""
    with LLM("storyteller", speculative_config=drafts(), **ARGUMENTS) as llm:
        yield llm


@pytest.fixture(scope="module")
def other(similar: Path) -> Iterator[LLM]:
    with LLM("storyteller", speculative_config=drafts(similar), **ARGUMENTS) as llm:
        yield llm


KINDS: list[dict[str, Any]] = [
    {},
    {"temperature": 0.0},
    {"temperature": 1.3, "top_k": 40, "top_p": 0.9},
    {"logit_bias": {17: 4.0}, "allowed_token_ids": list(range(10, 400))},
    {"n": 3},
    {"min_tokens": 20, "ignore_eos": False, "temperature": 1.0},
]


@pytest.mark.parametrize("params", KINDS, ids=lambda params: next(iter(params), "temperature 0.9"))
def test_a_model_that_drafts_for_itself_is_always_right(plain: LLM, twin: LLM, params: dict[str, Any]) -> None:
    found, num_drafts, num_right = change_of(twin, lambda: ids(ask(twin, **params)))
    assert found == ids(ask(plain, **params))
    assert num_drafts > 40
    assert num_right >= num_drafts - 3, "all but those behind the end"


@pytest.mark.parametrize(
    "params", [*KINDS, {"repetition_penalty": 1.2, "presence_penalty": 0.3}, {"logprobs": 2}], ids=str
)
def test_a_model_that_is_sometimes_wrong_changes_no_token(plain: LLM, other: LLM, params: dict[str, Any]) -> None:
    found, num_drafts, num_right = change_of(other, lambda: ids(ask(other, **params)))
    assert found == ids(ask(plain, **params))
    assert 0 < num_right < num_drafts


def test_a_prefix_that_is_cached_is_cached_for_the_draft_model(plain: LLM, twin: LLM) -> None:
    prompt = PROMPTS[0] + " and a queen, and they had three sons." * 8
    ask(twin, [prompt], max_tokens=2)
    found, num_drafts, num_right = change_of(twin, lambda: ask(twin, [prompt]))
    assert found[0].num_cached_tokens >= 64
    assert ids(found) == ids(ask(plain, [prompt]))
    assert num_right >= num_drafts - 1 > 10


def test_a_row_that_has_drafted_nothing_for_long_catches_up(plain: LLM, monkeypatch: pytest.MonkeyPatch) -> None:
    """Two rows draft nothing here. When one ends, the other has more tokens behind it than one step brings forward."""
    monkeypatch.setattr(draft_model, "CATCH_UP_TOKENS", 20)
    params = [SamplingParams(temperature=0.9, seed=1, max_tokens=number, ignore_eos=True) for number in (50, 30)]
    with LLM("storyteller", speculative_config=drafts(rows=1), **ARGUMENTS) as llm:
        outputs = llm.generate(PROMPTS[:2], params, use_tqdm=False)
        num_drafts, num_right = counted(llm)
    assert ids(outputs) == ids(plain.generate(PROMPTS[:2], params, use_tqdm=False))
    assert num_right >= num_drafts - 2 > 3


def test_preempted_requests_keep_their_tokens(plain: LLM, similar: Path) -> None:
    arguments: dict[str, Any] = ARGUMENTS | {"max_model_len": 80, "num_gpu_blocks_override": 12}
    with LLM("storyteller", speculative_config=drafts(similar), **arguments) as llm:
        found = ids(ask(llm, PROMPTS * 2, max_tokens=60))
        statistics = llm.stats()["scheduler"]["scheduler"]
    assert statistics["num_preemptions"] > 0
    assert statistics["speculation"]["num_accepted_tokens"] > 0
    assert found == ids(ask(plain, PROMPTS * 2, max_tokens=60))


def test_drafts_that_are_drawn_with_other_noise_are_mostly_wrong(twin: LLM, monkeypatch: pytest.MonkeyPatch) -> None:
    """A counter that is off by one in the draft model costs drafts, and no token."""
    expected = ids(ask(twin, temperature=1.0))
    draft, sample, inside = DraftModel.draft, Sampler.sample, []

    def drafting(self: Any, *arguments: Any) -> Any:
        inside.append(True)
        try:
            return draft(self, *arguments)
        finally:
            inside.clear()

    def shifted(self: Any, logits: Any, columns: Any) -> Any:
        columns.token_index[:] += bool(inside)
        return sample(self, logits, columns)

    monkeypatch.setattr(DraftModel, "draft", drafting)
    monkeypatch.setattr(Sampler, "sample", shifted)
    found, num_drafts, num_right = change_of(twin, lambda: ids(ask(twin, temperature=1.0)))
    assert found == expected
    assert num_right < 0.5 * num_drafts


def test_greedy_drafts_are_right_less_often(plain: LLM, twin: LLM) -> None:
    with LLM("storyteller", speculative_config=drafts(draft_sample_method="greedy"), **ARGUMENTS) as llm:
        assert ids(ask(llm)) == ids(ask(plain))
        num_drafts, num_right = counted(llm)
    assert 0 < num_right < 0.8 * num_drafts


def test_a_draft_model_without_finite_states_costs_its_drafts(
    plain: LLM, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    broken = changed_copy(tmp_path / "broken", lambda _, tensor: torch.full_like(tensor, torch.nan))
    with (
        caplog.at_level(logging.WARNING, "actorllm"),
        LLM("storyteller", speculative_config=drafts(broken), **ARGUMENTS) as llm,
    ):
        assert ids(ask(llm)) == ids(ask(plain))
        assert counted(llm) == (0, 0)
    assert sum("the draft model's states are not finite" in record.message for record in caplog.records) == 1


def test_the_cache_of_the_draft_model_counts(similar: Path) -> None:
    arguments: dict[str, Any] = ARGUMENTS | {"kv_cache_memory_bytes": 8 << 20}
    blocks = []
    for config in (None, drafts(similar)):
        with LLM("storyteller", speculative_config=config, **arguments) as llm:
            blocks.append(llm.llm_engine.vllm_config.cache_config.num_gpu_blocks)
    assert blocks[1] == blocks[0] // 2


# What is refused ------------------------------------------------------------------------------------------------------


def test_other_vocabularies_are_refused_by_name(tmp_path: Path) -> None:
    tree = json.loads((TARGET / "config.json").read_text())
    folder = tmp_path / "draft"
    folder.mkdir()
    (folder / "config.json").write_text(json.dumps(tree | {"vocab_size": 5000}))
    with pytest.raises(ConfigError, match=r"has vocab_size=5000, and the target .* has 4096; use a draft model with"):
        EngineConfig.from_arguments("storyteller", speculative_config=drafts(folder))
    (folder / "config.json").write_text(json.dumps(tree))
    tokenizer = json.loads((TARGET / "tokenizer.json").read_text())
    vocabulary = tokenizer["model"]["vocab"]
    first, second = list(vocabulary)[100:102]
    vocabulary[first], vocabulary[second] = vocabulary[second], vocabulary[first]
    (folder / "tokenizer.json").write_text(json.dumps(tokenizer))
    with pytest.raises(ConfigError, match=r"the tokenizer of model=.* has other tokens than that of"):
        EngineConfig.from_arguments("storyteller", speculative_config=drafts(folder))


def test_models_that_cannot_draft_are_refused_by_name(tmp_path: Path) -> None:
    tree = json.loads((TARGET / "config.json").read_text())
    for folder, change in (("other", {"architectures": ["GPTNeoXForCausalLM"]}), ("nameless", {"architectures": 7})):
        (tmp_path / folder).mkdir()
        (tmp_path / folder / "config.json").write_text(json.dumps(tree | change))
        with pytest.raises(
            UnsupportedModelError, match=f"speculative_config: model='.*{folder}'.* has no fused forward"
        ):
            LLM("storyteller", speculative_config=drafts(tmp_path / folder), **ARGUMENTS)
    jamba = {"architectures": ["JambaForCausalLM"], "attn_layer_period": 2, "attn_layer_offset": 1, "num_experts": 1}
    (tmp_path / "other" / "config.json").write_text(json.dumps(tree | jamba))
    with pytest.raises(UnsupportedModelError, match=r"needs .*recurrent.*, which draft models must do without"):
        LLM("storyteller", speculative_config=drafts(tmp_path / "other"), **ARGUMENTS)
    (tmp_path / "other" / "config.json").write_text(json.dumps(tree))
    with pytest.raises(ModelError, match=r"speculative_config: the draft model: .* has neither model.safetensors nor"):
        LLM("storyteller", speculative_config=drafts(tmp_path / "other"), **ARGUMENTS)
    with pytest.raises(ModelError, match="there is no model 'storytellers'"):
        EngineConfig.from_arguments("storyteller", speculative_config=drafts("storytellers"))
