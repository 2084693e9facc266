"""Decoders that classify, with random weights, against transformers: heads of their own, and rerankers without one."""

from __future__ import annotations

import contextlib
import json
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import transformers
from safetensors.torch import save_file

from actorllm import LLM, PoolingParams
from actorllm.config import EngineConfig, read_model_folder
from actorllm.errors import CorruptModelError, InvalidParameterError
from actorllm.model.families.decoder_config import TensorNames
from actorllm.model.heads import read_linear
from actorllm.model.registry import decoder_config
from actorllm.model.weights import CheckpointWeights
from actorllm.types.pooling_head import Head
from tests.model.hf.small_encoders import LABELS, SHAPE, save_encoder

TOLERANCE = 1e-5
DECODER = {"num_key_value_heads": 2, "head_dim": 16, "max_position_embeddings": 128, "initializer_range": 0.2}
PROMPTS = [np.random.default_rng(0).integers(5, 97, size).tolist() for size in (3, 17, 40)]


@contextlib.contextmanager
def served(folder: Path, make: Any, options: dict[str, Any], **changes: Any) -> Iterator[tuple[LLM, Any]]:
    model = save_encoder(folder, make, **(SHAPE | DECODER | changes))
    arguments = {"topology": "inline", "num_threads": 1, "dtype": "float32", "max_num_batched_tokens": 48}
    engine = LLM(folder, **(arguments | {"max_num_seqs": 8} | options))
    try:
        yield engine, model
    finally:
        engine.shutdown()


def scores_of(model: Any, ids: list[int]) -> torch.Tensor:
    with torch.no_grad():
        scores: torch.Tensor = model(input_ids=torch.tensor([ids])).logits[0]
    return scores


@pytest.mark.parametrize(
    "make", [transformers.LlamaForSequenceClassification, transformers.Qwen3ForSequenceClassification]
)
def test_decoders_classify_prompts_and_tokens(make: Any, tmp_path: Path) -> None:
    with served(tmp_path, make, {}, **LABELS) as (llm, model):
        for _ in range(2):  # the second time from the prefix cache
            outputs = llm.classify(PROMPTS, use_tqdm=False)
            for ids, output in zip(PROMPTS, outputs, strict=True):
                assert np.abs(scores_of(model, ids).softmax(0).numpy() - output.outputs.probs).max() < TOLERANCE
        assert outputs[2].num_cached_tokens > 0
        for ids, output in zip(PROMPTS, llm.reward(PROMPTS, use_tqdm=False), strict=True):
            wanted = [scores_of(model, ids[: i + 1]).softmax(0).tolist() for i in range(len(ids))]
            assert np.abs(output.outputs.array - wanted).max() < TOLERANCE


def test_a_decoder_tags_tokens(tmp_path: Path) -> None:
    with served(tmp_path, transformers.LlamaForTokenClassification, {}, **LABELS) as (llm, model):
        torch.nn.init.normal_(model.score.bias)
        raw = PoolingParams(use_activation=False)
        (output,) = llm.encode(PROMPTS[1], raw, use_tqdm=False)
        with torch.no_grad():
            wanted = scores_of(model, PROMPTS[1]) - model.score.bias  # it was saved with zeros
        assert (output.outputs.data - wanted).abs().max() < TOLERANCE


@pytest.mark.parametrize(("architecture", "size"), [("Qwen2ForRewardModel", 1), ("Qwen2ForProcessRewardModel", 2)])
def test_reward_models_whose_head_has_a_layer(architecture: str, size: int, tmp_path: Path) -> None:
    """They are saved with code of their own, so their head is made here by torch's modules."""
    model = save_encoder(tmp_path, transformers.Qwen2Model, **(SHAPE | DECODER))
    score = torch.nn.Sequential(torch.nn.Linear(48, 48), torch.nn.ReLU(), torch.nn.Linear(48, size))
    tensors = {f"model.{name}": tensor for name, tensor in model.state_dict().items()}
    tensors |= {f"score.{name}": tensor for name, tensor in score.state_dict().items()}
    save_file({name: tensor.contiguous() for name, tensor in tensors.items()}, tmp_path / "model.safetensors")
    options: dict[str, Any] = {"topology": "inline", "num_threads": 1, "dtype": "float32", "max_num_seqs": 8}
    overrides = {"architectures": [architecture]}
    with LLM(tmp_path, hf_overrides=overrides, pooler_config={"tok_pooling_type": "ALL"}, **options) as llm:
        for ids, raw, output in zip(
            PROMPTS,
            llm.encode(PROMPTS, PoolingParams(use_activation=False), use_tqdm=False),
            llm.reward(PROMPTS, use_tqdm=False),
            strict=True,
        ):
            with torch.no_grad():
                wanted = score(model(input_ids=torch.tensor([ids])).last_hidden_state[0])
            assert raw.outputs.data.shape == (len(ids), size)
            assert (raw.outputs.data - wanted).abs().max() < TOLERANCE
            expected = wanted if size == 1 else wanted.softmax(-1)  # a reward is no probability
            assert (output.outputs.data - expected).abs().max() < TOLERANCE
            tag = ids[len(ids) // 2]
            of_steps = PoolingParams(step_tag_id=tag, returned_token_ids=[size - 1])
            (steps,) = llm.encode([ids], of_steps, use_tqdm=False)
            own = wanted[torch.tensor(ids) == tag][:, size - 1 :]
            assert steps.outputs.data.shape == own.shape
            assert (steps.outputs.data - (own if size == 1 else own.sigmoid())).abs().max() < TOLERANCE
    del tensors["score.0.bias"]
    save_file(tensors, tmp_path / "model.safetensors")
    with pytest.raises(CorruptModelError, match=r"score\.0\.bias"):
        LLM(tmp_path, hf_overrides=overrides, **options)


RERANKER = {
    "architectures": ["Qwen3ForSequenceClassification"],
    "classifier_from_token": ["w1", "w2"],
    "is_original_qwen3_reranker": True,
}


@pytest.mark.parametrize("is_tied", [False, True])
def test_a_reranker_without_a_head_for_labels(is_tied: bool, tmp_path: Path) -> None:
    """As Qwen3-Reranker is served: how much the model prefers the second token as the next one."""
    options = {"hf_overrides": RERANKER}
    with served(tmp_path, transformers.Qwen3ForCausalLM, options, tie_word_embeddings=is_tied) as (llm, model):
        documents = [" w7 w8 w9", " w10"]
        outputs = llm.score("w3 w4", documents, use_tqdm=False)
        tokenizer = transformers.AutoTokenizer.from_pretrained(str(tmp_path))
        for text, output in zip(documents, outputs, strict=True):
            assert output.prompt_token_ids == tokenizer("w3 w4" + text)["input_ids"]
            logits = scores_of(model, output.prompt_token_ids)[-1]
            no, yes = (logits[tokenizer.convert_tokens_to_ids(token)] for token in ("w1", "w2"))
            assert output.outputs.score == pytest.approx(float(torch.stack((no, yes)).softmax(0)[1]), abs=TOLERANCE)
        template = "{% for m in messages %}{{ 'w5 ' if m.role == 'query' else ' w6 ' }}{{ m.content }}{% endfor %}"
        for chat_template, ids in (
            (template, "w5 w3 w4 w6 w10"),
            ("w1 {{ messages[1].content }}{% if add_generation_prompt %}w2{% endif %}", "w1 w10"),
        ):
            (output,) = llm.score("w3 w4", "w10", use_tqdm=False, chat_template=chat_template)
            assert output.prompt_token_ids == tokenizer(ids)["input_ids"]
        with pytest.raises(InvalidParameterError, match="task='embed' is not supported"):
            llm.embed("w3 w4", use_tqdm=False)  # its score is no vector


def test_tokens_that_the_vocabulary_does_not_have(tmp_path: Path) -> None:
    save_encoder(tmp_path, transformers.Qwen3ForCausalLM, **(SHAPE | DECODER))
    with pytest.raises(CorruptModelError, match="has no token 'yes'"):
        LLM(tmp_path, topology="inline", hf_overrides=RERANKER | {"classifier_from_token": ["w1", "yes"]})
    with pytest.raises(CorruptModelError, match="needs two tokens"):
        LLM(tmp_path, topology="inline", hf_overrides=RERANKER | {"classifier_from_token": ["w1"]})


def test_vectors_of_tokens_and_late_interaction(tmp_path: Path) -> None:
    with served(tmp_path, transformers.LlamaModel, {}) as (llm, model):
        with torch.no_grad():
            wanted = [
                torch.nn.functional.normalize(model(torch.tensor([ids])).last_hidden_state[0], dim=-1)
                for ids in PROMPTS
            ]
        params = PoolingParams(task="token_embed")
        for _ in range(2):  # what is found in the prefix cache has no states
            outputs = llm.encode(PROMPTS, pooling_task="token_embed", use_tqdm=False)
            for output, vectors in zip(outputs, wanted, strict=True):
                assert output.outputs.data.shape == vectors.shape
                assert (output.outputs.data - vectors).abs().max() < TOLERANCE
        scores = llm.score([PROMPTS[0]], PROMPTS[1:], pooling_params=params, use_tqdm=False)
        for output, vectors in zip(scores, wanted[1:], strict=True):
            best = (wanted[0] @ vectors.T).max(-1).values.sum()
            assert output.outputs.score == pytest.approx(float(best), abs=1e-4)
        assert all(np.isfinite(output.outputs.embedding).all() for output in llm.embed(PROMPTS, use_tqdm=False))


def test_vectors_of_tokens_that_one_step_cannot_return(tmp_path: Path) -> None:
    options = {"max_num_batched_tokens": 100_000}
    with (
        served(tmp_path, transformers.LlamaModel, options) as (llm, _),
        pytest.raises(InvalidParameterError, match="build the engine with max_num_batched_tokens=87381 or less"),
    ):
        llm.encode(PROMPTS, pooling_task="token_embed")


@pytest.mark.parametrize("is_tied", [False, True])
def test_rows_of_the_head_for_text_have_the_names_of_the_family(is_tied: bool, tmp_path: Path) -> None:
    """As beside a tower for images."""
    model = EngineConfig.from_arguments("storyteller").model
    _, hf = read_model_folder(model.path)
    names = TensorNames(model="language_model.model", head="language_model.lm_head")
    plan = replace(decoder_config(model.architecture, hf), names=names, ties_embeddings=is_tied)
    name = "language_model.model.embed_tokens" if is_tied else "language_model.lm_head"
    tensor = torch.randn(plan.vocab_size, plan.hidden_size)
    save_file({f"{name}.weight": tensor}, tmp_path / "model.safetensors")
    assert model.tokenizer is not None
    first, second = list(json.loads((Path(model.path) / "tokenizer.json").read_text())["model"]["vocab"].items())[9:11]
    head = Head(("score",), tokens=(first[0], second[0]), is_two_way=True)
    with CheckpointWeights(tmp_path, torch.float32, False) as weights:
        scores = read_linear(head, plan, model, weights)
    states = torch.randn(3, plan.hidden_size)
    torch.testing.assert_close(scores(states)[:, 0], states @ (tensor[second[1]] - tensor[first[1]]))
