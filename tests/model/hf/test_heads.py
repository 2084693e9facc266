"""Scores of classifiers, taggers and cross-encoders with random weights, against transformers' own."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import transformers

from actorllm import LLM, PoolingParams
from actorllm.errors import InvalidParameterError
from tests.model.hf.small_encoders import LABELS, SHAPE, save_words

TOLERANCE = 1e-5

RNG = np.random.default_rng(0)
PROMPTS = [RNG.integers(2, 97, size).tolist() for size in (3, 17, 8, 40)]


@contextlib.contextmanager
def served(tmp_path: Path, make: Any, changes: dict[str, Any], **options: Any) -> Iterator[tuple[LLM, Any]]:
    """An engine, and the model of transformers with the same random weights."""
    torch.manual_seed(0)
    model = make(make.config_class(**(SHAPE | changes))).eval()
    model.save_pretrained(tmp_path / "model")
    engine = LLM(
        tmp_path / "model", topology="inline", num_threads=1, dtype="float32", skip_tokenizer_init=True, **options
    )
    try:
        yield engine, model
    finally:
        engine.shutdown()


def scores_of(model: Any, ids: list[int], **more: Any) -> torch.Tensor:
    with torch.no_grad():
        scores: torch.Tensor = model(input_ids=torch.tensor([ids]), **more).logits[0]
    return scores


WINDOWED = {"num_hidden_layers": 4, "global_attn_every_n_layers": 2, "local_attention": 6, "initializer_range": 0.3}
DISTILLED = {"dim": 48, "n_layers": 2, "n_heads": 4, "hidden_dim": 64}


@pytest.mark.parametrize(
    ("make", "changes"),
    [
        (transformers.BertForSequenceClassification, {}),
        (transformers.RobertaForSequenceClassification, {}),
        (transformers.XLMRobertaForSequenceClassification, {}),
        (transformers.DistilBertForSequenceClassification, DISTILLED),
        (transformers.ElectraForSequenceClassification, {"embedding_size": 24}),
        (transformers.MPNetForSequenceClassification, {}),
        (transformers.ModernBertForSequenceClassification, WINDOWED),
        (transformers.ModernBertForSequenceClassification, WINDOWED | {"classifier_pooling": "mean"}),
    ],
    ids=lambda value: getattr(value, "__name__", ""),
)
def test_classifiers_of_transformers(make: Any, changes: dict[str, Any], tmp_path: Path) -> None:
    with served(tmp_path, make, changes | LABELS) as (llm, model):
        raw = PoolingParams(use_activation=False)
        for ids, output, scores in zip(
            PROMPTS,
            llm.classify(PROMPTS, use_tqdm=False),
            llm.classify(PROMPTS, pooling_params=raw, use_tqdm=False),
            strict=True,
        ):
            wanted = scores_of(model, ids)
            assert np.abs(scores.outputs.probs - wanted.numpy()).max() < TOLERANCE
            assert np.abs(output.outputs.probs - wanted.softmax(0).numpy()).max() < TOLERANCE
            assert output.outputs.num_classes == 3
        assert llm.config.model.pooler is not None
        assert llm.config.model.pooler.head is not None
        assert llm.config.model.pooler.head.labels == ("sad", "so so", "glad")
        assert type(llm.config).from_json(llm.config.to_json()) == llm.config
        for task in ("embed", "token_embed", "token_classify", "score"):
            with pytest.raises(InvalidParameterError, match="this engine's task is 'classify'"):
                llm.encode(PROMPTS[0], pooling_task=task)


@pytest.mark.parametrize(
    ("changes", "function"),
    [
        ({"problem_type": "regression"}, lambda scores: scores),
        ({"problem_type": "multi_label_classification"}, torch.sigmoid),
        ({"num_labels": 1}, torch.sigmoid),
        (
            {"num_labels": 1, "sentence_transformers": {"activation_fn": "torch.nn.modules.linear.Identity"}},
            lambda s: s,
        ),
    ],
)
def test_what_makes_probabilities_of_scores(changes: dict[str, Any], function: Any, tmp_path: Path) -> None:
    with served(tmp_path, transformers.BertForSequenceClassification, changes) as (llm, model):
        (output,) = llm.classify([PROMPTS[0]], use_tqdm=False)
        assert np.abs(output.outputs.probs - function(scores_of(model, PROMPTS[0])).numpy()).max() < TOLERANCE


@pytest.mark.parametrize(
    "make",
    [
        transformers.BertForTokenClassification,
        transformers.XLMRobertaForTokenClassification,
        transformers.ModernBertForTokenClassification,
    ],
)
def test_taggers_of_transformers(make: Any, tmp_path: Path) -> None:
    with served(tmp_path, make, LABELS) as (llm, model):
        for ids, output in zip(
            PROMPTS, llm.encode(PROMPTS, pooling_task="token_classify", use_tqdm=False), strict=True
        ):
            assert output.outputs.data.shape == (len(ids), 3)
            wanted = scores_of(model, ids).softmax(-1)
            assert (output.outputs.data - wanted).abs().max() < TOLERANCE
        with pytest.raises(InvalidParameterError, match="this engine's task is 'token_classify'"):
            llm.classify(PROMPTS)


@pytest.fixture(scope="module")
def words(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A tokenizer of BERT's kind with a vocabulary of 97 words."""
    folder = tmp_path_factory.mktemp("words")
    save_words(folder)
    return folder


@pytest.fixture(scope="module")
def cross(words: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[tuple[LLM, Any, Any]]:
    """A cross-encoder that tells the types of tokens apart, the same of transformers, and its tokenizer."""
    torch.manual_seed(0)
    changes = {"num_labels": 1, "max_position_embeddings": 64}
    model = transformers.BertForSequenceClassification(transformers.BertConfig(**(SHAPE | changes))).eval()
    folder = tmp_path_factory.mktemp("cross")
    model.save_pretrained(folder)
    tokenizer = transformers.AutoTokenizer.from_pretrained(str(words))
    tokenizer.save_pretrained(str(folder))
    engine = LLM(folder, topology="inline", num_threads=1, dtype="float32")
    yield engine, model, tokenizer
    engine.shutdown()


QUERY, DOCUMENTS = "w1 w2 w3", ["w4", "w3 w2 w1 w50 w60", "w7 w8 " * 10]


def cross_scores(model: Any, tokenizer: Any, first: str, second: list[str], **how: Any) -> np.ndarray:
    """One pair after the other, with transformers' own types of tokens."""
    scores = []
    for text in second:
        given = tokenizer(first, text, return_tensors="pt", **how)
        assert given["token_type_ids"].sum() > 0
        with torch.no_grad():
            scores.append(float(model(**given).logits[0, 0].sigmoid()))
    return np.array(scores)


def test_a_cross_encoder_scores_pairs_with_types_of_tokens(cross: tuple[LLM, Any, Any]) -> None:
    llm, model, tokenizer = cross
    outputs = llm.score(QUERY, DOCUMENTS, use_tqdm=False)
    wanted = cross_scores(model, tokenizer, QUERY, DOCUMENTS)
    assert np.abs(wanted - [output.outputs.score for output in outputs]).max() < TOLERANCE
    assert [output.prompt_token_ids for output in outputs] == [tokenizer(QUERY, d)["input_ids"] for d in DOCUMENTS]
    (raw,) = llm.score(QUERY, DOCUMENTS[0], pooling_params=PoolingParams(use_activation=False), use_tqdm=False)
    assert 1 / (1 + np.exp(-raw.outputs.score)) == pytest.approx(wanted[0], abs=TOLERANCE)
    untyped = [scores_of(model, output.prompt_token_ids).sigmoid().item() for output in outputs]
    assert np.abs(wanted - untyped).max() > 1e-3, "the types make a difference"


@pytest.mark.parametrize("most", [9, 12, 20])
def test_a_long_pair_is_shortened_as_transformers_does(cross: tuple[LLM, Any, Any], most: int) -> None:
    llm, model, tokenizer = cross
    kwargs = {"truncate_prompt_tokens": most}
    for first, second in ((QUERY, DOCUMENTS[2]), (DOCUMENTS[2], QUERY), (DOCUMENTS[2], DOCUMENTS[2])):
        (output,) = llm.score(first, second, tokenization_kwargs=kwargs, use_tqdm=False)
        assert output.prompt_token_ids == tokenizer(first, second, truncation=True, max_length=most)["input_ids"]
        wanted = cross_scores(model, tokenizer, first, [second], truncation=True, max_length=most)
        assert output.outputs.score == pytest.approx(wanted[0], abs=TOLERANCE)


def test_what_a_cross_encoder_does_not_compare(cross: tuple[LLM, Any, Any]) -> None:
    llm, _, _ = cross
    with pytest.raises(InvalidParameterError, match="compares texts; other kinds of prompts"):
        llm.score([[5, 6]], "w1", use_tqdm=False)
    with pytest.raises(InvalidParameterError, match="2 texts cannot be compared with 3"):
        llm.score([QUERY] * 2, DOCUMENTS, use_tqdm=False)
