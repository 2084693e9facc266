"""Streams that outlive their readers: nothing is lost to a client that comes back, and nothing goes on for one that does not."""

from __future__ import annotations

import contextlib
import gc
from typing import Any

import anyio
import httpx
import orjson
import pytest
from fastapi import FastAPI

from actorllm import AsyncLLM
from actorllm.errors import ConfigError
from actorllm.server import create_app
from actorllm.server.answer import StreamedAnswer, WholeAnswer
from actorllm.server.outliving import record as record_module
from actorllm.server.outliving.reader import Reader
from actorllm.server.outliving.record import EventRecord
from actorllm.server.responses import kept as kept_module
from tests.server.conftest import client_of, is_idle, until

pytestmark = pytest.mark.anyio

CASES: dict[str, dict[str, Any]] = {
    "/v1/responses": {"input": "Once upon a time", "max_output_tokens": 60},
    "/v1/chat/completions": {"messages": [{"role": "user", "content": "A fox"}], "max_tokens": 60},
    "/v1/completions": {"prompt": "Once upon a time", "max_tokens": 60},
}
ALIKE = {"ignore_eos": True, "temperature": 0, "stream": True}


def numbered(text: str) -> list[tuple[int, str]]:
    """Events with the numbers that they have as SSE."""
    found = []
    for block in text.split("\n\n")[:-1]:
        number, _, rest = block.partition("\n")
        found.append((int(number.removeprefix("id: ")), rest))
    return found


def text_of(events: list[str]) -> str:
    told = []
    for event in events:
        data = event.rpartition("data: ")[2]
        tree = {} if data == "[DONE]" else orjson.loads(data)
        if tree.get("type") == "response.output_text.delta":
            told.append(tree["delta"])
        choices = tree.get("choices", ())
        told += [choice.get("text") or choice.get("delta", {}).get("content") or "" for choice in choices]
    return "".join(told)


async def read_some(app: FastAPI, path: str, body: dict[str, Any], num_events: int) -> tuple[str, dict[str, str]]:
    """What a client reads that leaves after so many events, and the headers."""
    chunks: list[bytes] = []
    headers: dict[str, str] = {}
    left = anyio.Event()
    requests = iter([{"type": "http.request", "body": orjson.dumps(body)}])

    async def receive() -> Any:
        if (request := next(requests, None)) is not None:
            return request
        await left.wait()
        return {"type": "http.disconnect"}

    async def send(message: Any) -> None:
        if message["type"] == "http.response.start":
            assert message["status"] == 200
            headers.update({name.decode(): value.decode() for name, value in message["headers"]})
            return
        chunks.append(message["body"])
        if b"".join(chunks).count(b"\n\n") >= num_events:
            left.set()
            await anyio.sleep_forever()

    scope = {"type": "http", "method": "POST", "path": path, "raw_path": path.encode(), "query_string": b""}
    await app({**scope, "headers": [], "http_version": "1.1", "scheme": "http"}, receive, send)
    return b"".join(chunks).decode(), headers


@pytest.mark.parametrize("path", CASES)
async def test_a_client_that_comes_back_reads_on(
    app: FastAPI, client: httpx.AsyncClient, llm: AsyncLLM, path: str
) -> None:
    body = {**CASES[path], **ALIKE}
    plain = (await client.post(path, json=body)).text
    text, headers = await read_some(app, path, {**body, "resume_for": 30}, 4)
    assert headers["x-actorllm-resume-for"] == "30"
    seen = numbered(text)
    name, last = headers["x-request-id"], seen[-1][0]
    assert last < 40
    where = f"{path}/{name}?stream=true"
    rest = numbered((await client.get(f"{where}&starting_after={last}")).text)
    again = numbered((await client.get(where, headers={"last-event-id": str(last)})).text)
    assert rest == again
    assert [number for number, _ in [*seen, *rest]] == list(range(len(seen) + len(rest)))
    told = [event for _, event in [*seen, *rest]]
    assert text_of(told) == text_of(plain.split("\n\n")[:-1]) != ""
    assert numbered((await client.get(where)).text) == [*seen, *rest]
    for query, param in (("stream=true&starting_after=x", "starting_after"), ("stream=true&starting_after=-9", None)):
        answer = await client.get(f"{path}/{name}?{query}")
        assert answer.status_code == (400 if param else 200)
        assert param is None or answer.json()["error"]["param"] == param
    await until(lambda: is_idle(llm))


@pytest.mark.parametrize("path", CASES)
async def test_a_client_that_does_not_come_back_has_its_request_aborted(
    app: FastAPI, client: httpx.AsyncClient, llm: AsyncLLM, path: str
) -> None:
    limit = {name: 1500 for name in CASES[path] if "max" in name}
    _, headers = await read_some(app, path, {**CASES[path], **ALIKE, **limit, "resume_for": 0.05}, 4)
    await until(lambda: is_idle(llm))
    name = headers["x-request-id"]

    async def is_forgotten() -> bool:
        return (await client.get(f"{path}/{name}?stream=true")).status_code in (400, 404)

    await until(is_forgotten)
    # A response is stored all the same.
    found = await client.get(f"{path}/{name}")
    assert (found.status_code, found.json().get("status")) in ((200, "incomplete"), (400, None))


async def test_the_status_is_that_of_the_answer(client: httpx.AsyncClient) -> None:
    for path, body in CASES.items():
        field = "input" if path == "/v1/responses" else "prompt"
        wrong = {"messages": [{"role": "user", "content": "a " * 4000}]} if "messages" in body else {field: "a " * 4000}
        refused = await client.post(path, json={**body, **wrong, "stream": True, "resume_for": 5, "request_id": "r"})
        assert refused.status_code == 400
        assert "max_model_len" in refused.json()["error"]["message"]
        for value, more in ((-1, {}), (1e9, {}), (5, {"stream": False})):
            bad = await client.post(path, json={**body, "stream": True, "resume_for": value, **more})
            assert (bad.status_code, bad.json()["error"]["param"]) == (400, "resume_for")
    assert (await client.get("/v1/chat/completions/nothing?stream=true")).status_code == 404
    assert (await client.get("/v1/chat/completions/nothing")).json()["error"]["param"] == "stream"


async def test_a_stream_that_is_not_stored_is_only_read_on(client: httpx.AsyncClient) -> None:
    body = {**CASES["/v1/responses"], **ALIKE, "max_output_tokens": 4, "resume_for": 30, "store": False}
    answer = await client.post("/v1/responses", json=body)
    name = answer.headers["x-request-id"]
    assert (await client.get(f"/v1/responses/{name}?stream=true")).text == answer.text
    assert (await client.get(f"/v1/responses/{name}")).status_code == 404
    behind = await client.post("/v1/responses", json={"input": "a", "previous_response_id": name})
    assert (behind.status_code, behind.json()["error"]["param"]) == (404, "previous_response_id")


async def test_a_server_may_decide_it_for_all_streams(llm: AsyncLLM, monkeypatch: pytest.MonkeyPatch) -> None:
    app = create_app(llm, resume_streams_for=30)
    body = {**CASES["/v1/completions"], **ALIKE, "max_tokens": 4}
    async with client_of(app) as client:
        answer = await client.post("/v1/completions", json=body)
        name = answer.headers["x-request-id"]
        assert (await client.get(f"/v1/completions/{name}?stream=true")).text == answer.text
        assert numbered(answer.text)[-1][1] == "data: [DONE]"
        for field in ({"resume_for": 0}, {"stream": False}):
            plain = await client.post("/v1/completions", json={**body, **field})
            assert "x-actorllm-resume-for" not in plain.headers
        # Where there is no room, who asked is told, and the others are answered as without it.
        monkeypatch.setattr(kept_module, "MAX_RESUMABLE", 0)
        full = await client.post("/v1/completions", json={**body, "resume_for": 5})
        assert (full.status_code, full.json()["error"]["param"]) == (429, "resume_for")
        assert "x-actorllm-resume-for" not in (await client.post("/v1/completions", json=body)).headers
    for wrong in (-1, 601, True, "5"):
        with pytest.raises(ConfigError, match="resume_streams_for"):
            create_app(llm, resume_streams_for=wrong)
    await until(lambda: is_idle(llm))


async def test_a_reader_that_keeps_up_misses_nothing(
    client: httpx.AsyncClient, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The events at the end of a response come at once, and each has all of its text."""
    monkeypatch.setattr(kept_module, "MAX_RESUMABLE_BYTES", 6000)
    body = {**CASES["/v1/responses"], **ALIKE, "max_output_tokens": 400, "resume_for": 30}
    seen = numbered((await client.post("/v1/responses", json=body)).text)
    assert [number for number, _ in seen] == list(range(len(seen)))
    last = [event for _, event in seen[-4:]]
    assert sum(map(len, last)) > 6000
    assert last[-1].startswith("event: response.incomplete")


async def test_a_stream_that_did_not_ask_is_never_refused(llm: AsyncLLM, monkeypatch: pytest.MonkeyPatch) -> None:
    """Whatever its name, and however many come at once."""
    monkeypatch.setattr(kept_module, "MAX_RESUMABLE", 2)
    app = create_app(llm, resume_streams_for=30)
    found: list[httpx.Response] = []
    async with client_of(app) as client:

        async def ask(path: str, named: dict[str, str]) -> None:
            body = {**CASES[path], **ALIKE, "store": False}
            if path != "/v1/responses":
                del body["store"]
            found.append(await client.post(path, json=body, headers=named))

        async with anyio.create_task_group() as group:
            for path in CASES:
                for _ in range(3):
                    group.start_soon(ask, path, {})
        assert [one.status_code for one in found] == [200] * 9
        assert sum("x-actorllm-resume-for" in one.headers for one in found) == 2
        found.clear()
        for path in CASES:
            for _ in range(2):
                await ask(path, {"x-request-id": "mine"})
        assert [one.status_code for one in found] == [200] * 6
        assert ["x-actorllm-resume-for" in one.headers for one in found] == [True, False] * 3
        # What is not stored is not kept beside the streams either.
        assert all(kept.outlives for kept in app.state.server.responses._ended.values())
    await until(lambda: is_idle(llm))


async def test_what_is_kept_holds_nothing_of_the_engine(client: httpx.AsyncClient, llm: AsyncLLM) -> None:
    """Prompts and outputs are not among the bytes that are counted."""
    for path in CASES:
        answer = await client.post(path, json={**CASES[path], **ALIKE, "resume_for": 30})
        assert answer.status_code == 200
    background = {"input": "Once", "max_output_tokens": 4, "background": True}
    name = (await client.post("/v1/responses", json=background)).json()["id"]

    async def has_ended() -> bool:
        return (await client.get(f"/v1/responses/{name}")).json()["status"] != "queued"

    await until(has_ended)
    await until(lambda: is_idle(llm))
    gc.collect()
    assert not [one for one in gc.get_objects() if type(one) in (StreamedAnswer, WholeAnswer)]


async def test_a_reader_that_is_behind_what_is_kept_is_told() -> None:
    record = EventRecord(100)
    for number in range(20):
        record.add(b"data: %d\n\n" % number)
    assert record.after(18) == (b"id: 19\ndata: 19\n\n", 19)
    with pytest.raises(record_module.ApiError, match=r"events up to \d+ are no longer kept"):
        record.after(0)
    record.add(b"".join(b"data: %d\n\n" % number for number in range(20, 40)))
    assert record.after(19)[0].count(b"id: ") == 20, "what came last is whole"
    record.add(b"data: 40\n\n")
    with pytest.raises(record_module.ApiError):
        record.after(19)
    with record.being_read():
        with anyio.move_on_after(0.01) as waited:
            await record.wait_unread(0.0)
        assert waited.cancelled_caught
    await record.wait_unread(0.0)


class Behind:
    """Of a reader that was too slow."""

    def __init__(self, name: str) -> None:
        self.id = name

    def being_read(self) -> contextlib.AbstractContextManager[None]:
        return contextlib.nullcontext()

    async def read_behind(self, number: int) -> tuple[bytes, int, bool]:
        raise record_module.ApiError(400, f"events up to {number + 9} are no longer kept", "starting_after")


@pytest.mark.parametrize("name", ["chatcmpl-a", "cmpl-a", "resp_a"])
async def test_a_slow_reader_hears_the_end_in_the_form_of_its_api(app: FastAPI, name: str) -> None:
    sent: list[Any] = []

    async def send(message: Any) -> None:
        sent.append(message)

    async def receive() -> Any:
        await anyio.sleep_forever()

    await Reader(Behind(name), 3, {})({"type": "http", "app": app}, receive, send)
    assert not sent[-1]["more_body"]
    told, *others = sent[-1]["body"].decode().split("\n\n")
    if name == "resp_a":
        assert told.startswith("event: error\ndata: ")
        tree = orjson.loads(told.partition("data: ")[2])
        assert (tree["type"], tree["sequence_number"], others) == ("error", 4, [""])
    else:
        assert orjson.loads(told.removeprefix("data: "))["error"]["message"] == "events up to 12 are no longer kept"
        assert others == ["data: [DONE]", ""]
