"""Labels, vectors of tokens and scores of cross-encoders over HTTP, from small models with random weights."""

from __future__ import annotations

import base64
import tracemalloc
from collections.abc import Iterator
from typing import Any

import anyio
import numpy as np
import pytest
import torch
import transformers

from actorllm import AsyncLLM
from actorllm.server import create_app
from tests.model.hf.small_encoders import LABELS, save_encoder
from tests.server.conftest import client_of

RERANKER = {
    "architectures": ["Qwen3ForSequenceClassification"],
    "classifier_from_token": ["w1", "w2"],
    "is_original_qwen3_reranker": True,
}
TOLERANCE = 1e-5
TEXTS = ["w1 w2 w3", "w60", "w5 w4 w3 w2 w1 w0"]


def served(folder: Any, make: Any, **changes: Any) -> Iterator[tuple[AsyncLLM, Any, Any]]:
    model = save_encoder(folder, make, **changes)
    engine = AsyncLLM(folder, topology="inline", num_threads=1, dtype="float32")
    anyio.run(engine.start)
    yield engine, model, transformers.AutoTokenizer.from_pretrained(str(folder))
    engine.shutdown()


@pytest.fixture(scope="module")
def classifier(tmp_path_factory: pytest.TempPathFactory) -> Iterator[tuple[AsyncLLM, Any, Any]]:
    yield from served(tmp_path_factory.mktemp("c"), transformers.BertForSequenceClassification, **LABELS)


@pytest.fixture(scope="module")
def tagger(tmp_path_factory: pytest.TempPathFactory) -> Iterator[tuple[AsyncLLM, Any, Any]]:
    yield from served(tmp_path_factory.mktemp("t"), transformers.BertForTokenClassification, **LABELS)


@pytest.fixture(scope="module")
def cross(tmp_path_factory: pytest.TempPathFactory) -> Iterator[tuple[AsyncLLM, Any, Any]]:
    yield from served(tmp_path_factory.mktemp("x"), transformers.BertForSequenceClassification, num_labels=1)


@pytest.fixture(scope="module")
def joining(tmp_path_factory: pytest.TempPathFactory) -> Iterator[AsyncLLM]:
    """A reranker without a head for labels: two texts are one text for it."""
    folder = tmp_path_factory.mktemp("j")
    save_encoder(folder, transformers.Qwen3ForCausalLM, num_key_value_heads=2, head_dim=16)
    engine = AsyncLLM(folder, topology="inline", num_threads=1, dtype="float32", hf_overrides=RERANKER)
    anyio.run(engine.start)
    yield engine
    engine.shutdown()


def logits(model: Any, tokenizer: Any, *texts: str) -> torch.Tensor:
    with torch.no_grad():
        found: torch.Tensor = model(**tokenizer(*texts, return_tensors="pt")).logits[0]
    return found


async def answer(engine: AsyncLLM, path: str, status: int = 200, **body: Any) -> Any:
    async with client_of(create_app(engine, served_model_name="small")) as http:
        response = await http.post(path, json=body)
    assert response.status_code == status, response.text
    return response.json()


async def test_labels_of_texts(classifier: tuple[AsyncLLM, Any, Any]) -> None:
    llm, model, tokenizer = classifier
    tree = await answer(llm, "/classify", model="small", input=TEXTS)
    assert tree["object"] == "list"
    assert tree["model"] == "small"
    assert tree["id"].startswith("classify-")
    assert tree["usage"]["prompt_tokens"] == sum(len(tokenizer(text)["input_ids"]) for text in TEXTS)
    for i, (text, entry) in enumerate(zip(TEXTS, tree["data"], strict=True)):
        wanted = logits(model, tokenizer, text).softmax(0)
        assert np.abs(wanted.numpy() - entry["probs"]).max() < TOLERANCE
        assert (entry["index"], entry["num_classes"]) == (i, 3)
        assert entry["label"] == LABELS["id2label"][int(wanted.argmax())]
    raw = await answer(llm, "/classify", input=TEXTS[0], use_activation=False)
    assert np.abs(logits(model, tokenizer, TEXTS[0]).numpy() - raw["data"][0]["probs"]).max() < TOLERANCE
    output = await llm.classify(TEXTS[0])
    assert output.outputs.probs == pytest.approx(tree["data"][0]["probs"], abs=TOLERANCE)


async def test_vectors_of_tokens(tagger: tuple[AsyncLLM, Any, Any]) -> None:
    llm, model, tokenizer = tagger
    wanted = logits(model, tokenizer, TEXTS[0]).softmax(-1).numpy()
    for task in ("token_classify", None):
        tree = await answer(llm, "/pooling", input=TEXTS[0], task=task)
        (entry,) = tree["data"]
        assert entry["object"] == "pooling"
        assert np.abs(wanted - entry["data"]).max() < TOLERANCE
    coded = await answer(llm, "/pooling", input=TEXTS[0], encoding_format="base64")
    flat = np.frombuffer(base64.b64decode(coded["data"][0]["data"]), "<f4")
    assert np.abs(wanted.reshape(-1) - flat).max() < TOLERANCE
    error = await answer(llm, "/classify", 400, input=TEXTS[0])
    assert "task='classify' is not supported; this engine's task is 'token_classify'" in error["error"]["message"]


@pytest.mark.parametrize("path", ["/score", "/v1/score"])
async def test_scores_of_a_cross_encoder(cross: tuple[AsyncLLM, Any, Any], path: str) -> None:
    llm, model, tokenizer = cross
    tree = await answer(llm, path, queries=TEXTS[0], documents=TEXTS)
    wanted = [float(logits(model, tokenizer, TEXTS[0], text).sigmoid()[0]) for text in TEXTS]
    assert np.abs(np.subtract(wanted, [entry["score"] for entry in tree["data"]])).max() < TOLERANCE


@pytest.mark.parametrize("path", ["/rerank", "/v1/rerank", "/v2/rerank"])
async def test_documents_by_a_cross_encoder(cross: tuple[AsyncLLM, Any, Any], path: str) -> None:
    llm, model, tokenizer = cross
    tree = await answer(llm, path, query=TEXTS[0], documents=TEXTS, top_n=2)
    wanted = [float(logits(model, tokenizer, TEXTS[0], text).sigmoid()[0]) for text in TEXTS]
    best = sorted(range(3), key=lambda i: -wanted[i])[:2]
    assert [result["index"] for result in tree["results"]] == best
    assert [result["document"]["text"] for result in tree["results"]] == [TEXTS[i] for i in best]
    for result in tree["results"]:
        assert result["relevance_score"] == pytest.approx(wanted[result["index"]], abs=TOLERANCE)


async def test_a_template_of_the_server_makes_one_prompt_of_two_texts(cross: tuple[AsyncLLM, Any, Any]) -> None:
    llm, model, tokenizer = cross
    template = "{% for m in messages %}{{ 'w5 ' if m.role == 'query' else ' w6 ' }}{{ m.content }}{% endfor %}"
    async with client_of(create_app(llm, chat_template=template)) as http:
        tree = (await http.post("/rerank", json={"query": TEXTS[0], "documents": TEXTS[1:2]})).json()
    wanted = float(logits(model, tokenizer, f"w5 {TEXTS[0]} w6 {TEXTS[1]}").sigmoid()[0])
    assert tree["results"][0]["relevance_score"] == pytest.approx(wanted, abs=TOLERANCE)


async def test_what_does_not_fit_the_model_is_a_400(classifier: tuple[AsyncLLM, Any, Any]) -> None:
    llm, _, _ = classifier
    for path, body, told in (
        ("/score", {"text_1": "w1", "text_2": "w2"}, "a model with one label; this one has 3: use classify"),
        ("/v1/embeddings", {"input": "w1"}, "task='embed' is not supported; this engine's task is 'classify'"),
        ("/pooling", {"input": "w1", "task": "plugin"}, "task='plugin' is not supported"),
        ("/pooling", {"input": "w1", "encoding_format": "hex"}, "encoding_format='hex' must be"),
        ("/pooling", {"input": "w1", "dimensions": 2}, "gives scores, which cannot be shortened"),
    ):
        error = await answer(llm, path, 400, **body)
        assert told in error["error"]["message"]


async def test_a_query_that_would_be_read_too_often_is_refused(cross: tuple[AsyncLLM, Any, Any]) -> None:
    """Each pair is tokenized whole, also where nearly all of it is cut off then: 300 kB would take minutes."""
    llm, _, _ = cross
    long, many = "w1 " * 100_000, {"truncate_prompt_tokens": 20, "model": "small"}
    for path, body, field in (
        ("/rerank", {"query": long, "documents": TEXTS * 5}, "query"),
        ("/score", {"text_1": long, "text_2": TEXTS * 5}, "text_1"),
    ):
        tree = await answer(llm, path, 400, **body, **many)
        assert tree["error"]["param"] == field
        assert (
            "300000 characters would be read with each of 15 texts, and the limit is 4194304"
            in tree["error"]["message"]
        )
    short = await answer(llm, "/rerank", query=TEXTS[0], documents=TEXTS * 5, **many)
    assert len(short["results"]) == 15
    pairs = await answer(llm, "/score", text_1=[long] * 3, text_2=TEXTS, **many)  # each is read once
    assert len(pairs["data"]) == 3


async def test_a_query_that_would_be_copied_too_often_is_refused_before_the_first_copy(joining: AsyncLLM) -> None:
    fields = {"truncate_prompt_tokens": 20, "model": "small"}
    long, many = "w1 " * 333_333, ["w2"] * 100
    await answer(joining, "/rerank", query="w1", documents=["w2", "w3"], **fields)
    for path, body in (
        ("/rerank", {"query": long, "documents": many}),
        ("/score", {"text_1": long, "text_2": many}),
    ):
        tracemalloc.start()
        tree = await answer(joining, path, 400, **body, **fields)
        _, peak = tracemalloc.get_traced_memory()
        tracemalloc.stop()
        assert "999999 characters would be read with each of 100 texts" in tree["error"]["message"]
        assert peak < 30e6  # all copies together have 100e6 bytes


async def test_vectors_of_tokens_have_a_limit_in_one_answer(
    tagger: tuple[AsyncLLM, Any, Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    """A body of 8 MB would have an answer of 10 GB."""
    llm, _, _ = tagger
    ids = [7] * 62
    monkeypatch.setattr("actorllm.server.copies.MAX_NUMBERS", 4 * 62 * 3)
    assert len((await answer(llm, "/pooling", input=[ids] * 4))["data"]) == 4
    tree = await answer(llm, "/pooling", 400, input=[ids] * 5)
    assert "of 5 texts may have 930 numbers, and the limit is 744 together; send fewer" in tree["error"]["message"]
    assert tree["error"]["param"] == "input"
    assert len((await answer(llm, "/pooling", input=["w1 " * 900] * 2, truncate_prompt_tokens=9))["data"]) == 2
    monkeypatch.setattr("actorllm.server.copies.MAX_NUMBERS", 1)
    assert len((await answer(llm, "/pooling", input=ids))["data"][0]["data"]) == 62  # the model bounds one text
