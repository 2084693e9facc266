"""`messages` in place of `input`: vectors and labels of a conversation, through the model's chat template."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import anyio
import numpy as np
import pytest
import transformers

from actorllm import AsyncLLM
from actorllm.server import create_app
from tests.model.hf.small_encoders import LABELS, save_encoder
from tests.server.conftest import client_of

MESSAGES = [{"role": "user", "content": "Tell of a fox."}, {"role": "assistant", "content": "There was a"}]
WORDS = [{"role": "user", "content": "w1 w2"}, {"role": "assistant", "content": [{"type": "text", "text": "w3"}]}]
TEMPLATE = "{% for m in messages %}{{ m['content'] }} {% endfor %}{{ more }}"


@pytest.fixture(scope="module")
def embedder() -> Iterator[AsyncLLM]:
    with_vectors = AsyncLLM("storyteller", runner="pooling", topology="inline", num_threads=1, dtype="float32")
    anyio.run(with_vectors.start)
    yield with_vectors
    with_vectors.shutdown()


@pytest.fixture(scope="module")
def classifier(tmp_path_factory: pytest.TempPathFactory) -> Iterator[AsyncLLM]:
    folder = tmp_path_factory.mktemp("c")
    save_encoder(folder, transformers.BertForSequenceClassification, **LABELS)
    engine = AsyncLLM(folder, topology="inline", num_threads=1, dtype="float32")
    anyio.run(engine.start)
    yield engine
    engine.shutdown()


async def answer(engine: AsyncLLM, path: str, body: dict[str, Any], status: int = 200, **options: Any) -> Any:
    async with client_of(create_app(engine, **options)) as http:
        response = await http.post(path, json=body)
    assert response.status_code == status, response.text
    return response.json()


@pytest.mark.parametrize("path", ["/v1/embeddings", "/pooling"])
async def test_a_conversation_is_pooled_as_its_template_writes_it(embedder: AsyncLLM, path: str) -> None:
    async def vector(**body: Any) -> Any:
        tree = await answer(embedder, path, body)
        (entry,) = tree["data"]
        return np.array(entry["embedding" if path == "/v1/embeddings" else "data"]), tree["usage"]["prompt_tokens"]

    def ids(**how: Any) -> list[int]:
        found: list[int] = embedder.get_tokenizer().apply_chat_template(
            MESSAGES, tokenize=True, return_dict=False, **how
        )
        return found

    for how in ({}, {"add_generation_prompt": True}, {"continue_final_message": True}):
        found, num_tokens = await vector(messages=MESSAGES, cache_salt="salt", **how)
        wanted, _ = await vector(input=ids(**how))
        assert np.abs(found - wanted).max() < 1e-5
        assert num_tokens == len(ids(**how))
    assert len({len(ids(**how)) for how in ({}, {"add_generation_prompt": True}, {"continue_final_message": True})}) > 1
    _, num_tokens = await vector(messages=MESSAGES, truncate_prompt_tokens=4)
    assert num_tokens == 4


async def test_labels_of_a_conversation_through_a_template_of_the_server_or_of_the_request(
    classifier: AsyncLLM,
) -> None:
    body = {"messages": WORDS, "add_special_tokens": True, "chat_template_kwargs": {"more": "w4"}}
    wanted = (await answer(classifier, "/classify", {"input": "w1 w2 w3 w4"}))["data"]
    assert (await answer(classifier, "/classify", body, chat_template=TEMPLATE))["data"] == wanted
    own = {**body, "chat_template": TEMPLATE}
    assert (await answer(classifier, "/classify", own, trust_request_chat_template=True))["data"] == wanted
    refused = await answer(classifier, "/classify", own, 400)
    assert "--trust-request-chat-template" in refused["error"]["message"]
    assert refused["error"]["param"] == "chat_template"


@pytest.mark.parametrize(
    ("path", "body", "param", "told"),
    [
        ("/v1/embeddings", {}, "input", "a conversation goes into messages"),
        ("/v1/embeddings", {"input": "w1", "messages": WORDS}, "messages", "leave one out"),
        ("/pooling", {"messages": WORDS}, "messages", "has no chat template"),
        ("/pooling", {"messages": []}, "messages", "no messages"),
        ("/classify", {"messages": [{"content": "w1"}]}, "messages", "needs a 'role'"),
        ("/classify", {"messages": [WORDS[0]] * 5000}, "messages", "5000 items, and the limit is 4096"),
        ("/classify", {"input": "w1", "add_generation_prompt": True}, "add_generation_prompt", "needs messages"),
        ("/classify", {"input": "w1", "chat_template_kwargs": {"a": 1}}, "chat_template_kwargs", "needs messages"),
        (
            "/score",
            {"text_1": "w1", "text_2": "w2", "chat_template_kwargs": {"a": 1}},
            "chat_template_kwargs",
            "for a conversation",
        ),
    ],
)
async def test_what_is_wrong_is_named(
    classifier: AsyncLLM, path: str, body: dict[str, Any], param: str, told: str
) -> None:
    error = (await answer(classifier, path, body, 400))["error"]
    assert told in error["message"]
    assert error["param"] == param
