"""`/v1/responses` beyond one answer: calls of functions, responses that are kept, and those that are written in the background."""

from __future__ import annotations

import json
from typing import Any

import anyio
import httpx
import orjson
import pytest
from fastapi import FastAPI

from actorllm import AsyncLLM
from actorllm.clock import now
from actorllm.server import create_app
from actorllm.server.envelope import ApiError
from actorllm.server.responses import kept as kept_module
from actorllm.server.responses import request as request_module
from actorllm.server.responses.kept import KeptResponse, KeptResponses
from tests.server.conftest import client_of, is_idle, until
from tests.server.openai_description.description import check, check_event

pytestmark = pytest.mark.anyio

INPUT = "Once upon a time"
TOOL = {
    "type": "function",
    "name": "weather",
    "description": "The weather at a place.",
    "parameters": {"type": "object", "properties": {"at": {"enum": ["home", "sea"]}}, "required": ["at"]},
}
LONG = {"input": INPUT, "ignore_eos": True, "max_output_tokens": 900}


async def respond(client: httpx.AsyncClient, **fields: Any) -> dict[str, Any]:
    response = await client.post("/v1/responses", json={"input": INPUT, "max_output_tokens": 8, "seed": 1, **fields})
    assert response.status_code == 200, response.text
    tree: dict[str, Any] = response.json()
    check("Response", tree)
    return tree


def events_of(text: str, ids: bool = False) -> list[dict[str, Any]]:
    """ids: each event has its number as SSE has it."""
    events = []
    for block in text.split("\n\n")[:-1]:
        lines = dict(line.split(": ", 1) for line in block.split("\n"))
        event = orjson.loads(lines["data"])
        assert lines["event"] == event["type"]
        assert lines.get("id") == (str(event["sequence_number"]) if ids else None)
        check_event(event)
        events.append(event)
    return events


async def ended(client: httpx.AsyncClient, name: str) -> dict[str, Any]:
    found: dict[str, Any] = {}

    async def is_over() -> bool:
        found.update((await client.get(f"/v1/responses/{name}")).json())
        return found["status"] not in ("queued", "in_progress")

    await until(is_over)
    check("Response", found)
    return found


@pytest.mark.parametrize("choice", ["required", {"type": "function", "name": "weather"}], ids=["required", "named"])
async def test_a_call_is_an_item_whole_and_streamed(client: httpx.AsyncClient, choice: Any) -> None:
    asked: dict[str, Any] = {"tools": [TOOL], "tool_choice": choice, "parallel_tool_calls": False}
    asked |= {"max_output_tokens": 200, "input": INPUT, "seed": 1}
    whole = await respond(client, **asked)
    (call,) = whole["output"]
    assert (call["type"], call["name"], call["status"]) == ("function_call", "weather", "completed")
    assert json.loads(call["arguments"])["at"] in ("home", "sea")
    assert whole["tools"] == [{**TOOL, "strict": None}]
    events = events_of((await client.post("/v1/responses", json={**asked, "stream": True})).text)
    assert [event["sequence_number"] for event in events] == list(range(len(events)))
    deltas = [event["delta"] for event in events if event["type"] == "response.function_call_arguments.delta"]
    assert len(deltas) > 1
    assert "".join(deltas) == events[-1]["response"]["output"][0]["arguments"] == call["arguments"]
    kinds = [event["type"].removeprefix("response.") for event in events]
    assert kinds[:3] == ["created", "in_progress", "output_item.added"]
    assert kinds[-3:] == ["function_call_arguments.done", "output_item.done", "completed"]
    # The result goes back, by items and by what is kept.
    result = {"type": "function_call_output", "call_id": call["call_id"], "output": "rain"}
    history = [{"role": "user", "content": INPUT}, {"type": "reasoning", "id": "rs_1", "summary": []}, call, result]
    by_items = await respond(client, input=history, temperature=0)
    by_id = await respond(client, input=[result], previous_response_id=whole["id"], temperature=0)
    assert by_id["output"][0]["content"] == by_items["output"][0]["content"]
    assert by_id["usage"]["input_tokens"] == by_items["usage"]["input_tokens"]
    assert by_id["previous_response_id"] == whole["id"]


async def test_a_conversation_goes_on_behind_a_call_that_was_cut_off(client: httpx.AsyncClient) -> None:
    cut = await respond(client, tools=[TOOL], tool_choice="required", max_output_tokens=28)
    (call,) = cut["output"]
    assert (cut["status"], call["type"], call["status"]) == ("incomplete", "function_call", "incomplete")
    more = [{"role": "user", "content": "And then?"}]
    by_id = await respond(client, input=more, previous_response_id=cut["id"], temperature=0)
    by_hand = await respond(client, input=[{"role": "user", "content": INPUT}, *more], temperature=0)
    assert by_id["output"][0]["content"] == by_hand["output"][0]["content"]


async def test_text_beside_tools_is_a_message(client: httpx.AsyncClient) -> None:
    plain = await respond(client, max_output_tokens=30)
    free = await respond(client, max_output_tokens=30, tools=[TOOL], chat_template_kwargs={"tools_are": "not shown"})
    (message,) = free["output"]
    assert message["type"] == "message"
    assert message["content"][0]["text"]
    unused = await respond(client, max_output_tokens=30, tools=[TOOL], tool_choice="none")
    assert unused["output"][0]["content"] == plain["output"][0]["content"]


async def test_a_conversation_goes_on_from_what_is_kept(client: httpx.AsyncClient) -> None:
    first = await respond(client, instructions="Tell of a fox.", temperature=0)
    assert (await client.get(f"/v1/responses/{first['id']}")).json() == first
    text = first["output"][0]["content"][0]["text"]
    more = {"role": "user", "content": "And then?"}
    by_id = await respond(client, input=[more], previous_response_id=first["id"], temperature=0)
    history = [{"role": "user", "content": INPUT}, {"role": "assistant", "content": text}, more]
    by_hand = await respond(client, input=history, temperature=0, store=False)
    assert by_id["output"][0]["content"] == by_hand["output"][0]["content"]
    assert by_id["usage"]["input_tokens"] == by_hand["usage"]["input_tokens"]  # instructions are not carried over
    assert (by_id["store"], by_hand["store"]) == (True, False)
    assert (await client.get(f"/v1/responses/{by_hand['id']}")).status_code == 404
    assert (await client.delete(f"/v1/responses/{first['id']}")).json()["deleted"] is True
    for unknown in (first["id"], by_hand["id"]):
        refused = await client.post("/v1/responses", json={"input": "a", "previous_response_id": unknown})
        assert (refused.status_code, refused.json()["error"]["param"]) == (404, "previous_response_id")


async def test_the_items_of_an_input_are_listed(client: httpx.AsyncClient) -> None:
    call = {"type": "function_call", "call_id": "c1", "name": "weather", "arguments": "{}"}
    given = [
        {"role": "user", "content": "One"},
        {"role": "assistant", "content": "Two"},
        call,
        {"type": "function_call_output", "call_id": "c1", "output": "Three"},
    ]
    name = (await respond(client, input=given))["id"]
    path = f"/v1/responses/{name}/input_items"
    tree = (await client.get(path, params={"order": "asc"})).json()
    kinds = [item["type"] for item in tree["data"]]
    assert kinds == ["message", "message", "function_call", "function_call_output"]
    assert tree["data"][0]["content"] == [{"type": "input_text", "text": "One"}]
    assert tree["data"][1]["content"][0]["type"] == "output_text"
    assert tree["data"][2].items() >= call.items()
    assert (tree["object"], tree["has_more"]) == ("list", False)
    ids = [item["id"] for item in tree["data"]]
    assert len(set(ids)) == 4
    page = (await client.get(path, params={"limit": 2, "after": ids[3]})).json()
    assert [item["id"] for item in page["data"]] == [page["first_id"], page["last_id"]] == [ids[2], ids[1]]
    assert page["has_more"]
    for wrong in ({"limit": "0"}, {"limit": "x"}, {"order": "up"}, {"after": "nothing"}):
        answer = await client.get(path, params=wrong)
        assert answer.status_code == 400
        assert answer.json()["error"]["param"] == next(iter(wrong))
    assert (await client.get("/v1/responses/nothing/input_items")).status_code == 404
    behind = await respond(client, previous_response_id=name)
    (item,) = (await client.get(f"/v1/responses/{behind['id']}/input_items")).json()["data"]
    assert item["content"][0]["text"] == INPUT


async def test_a_response_in_the_background_is_the_same(client: httpx.AsyncClient) -> None:
    asked: dict[str, Any] = {"max_output_tokens": 24, "temperature": 0}
    front = await respond(client, **asked)
    begun = await respond(client, **asked, background=True)
    assert (begun["status"], begun["background"], begun["output"]) == ("queued", True, [])
    back = await ended(client, begun["id"])
    assert back["id"] == begun["id"]
    assert (back["status"], back["usage"]) == (front["status"], back["usage"])
    assert back["output"][0]["content"] == front["output"][0]["content"]
    events = events_of((await client.get(f"/v1/responses/{begun['id']}?stream=true")).text, ids=True)
    assert events[-1]["response"] == back
    failed = await respond(client, input="a " * 3000, background=True)
    tree = await ended(client, failed["id"])
    assert (tree["status"], tree["error"]["code"]) == ("failed", "invalid_prompt")
    assert "max_model_len" in tree["error"]["message"]


async def test_a_stream_outlives_its_reader(app: FastAPI, client: httpx.AsyncClient, llm: AsyncLLM) -> None:
    asked = {"input": INPUT, "max_output_tokens": 60, "ignore_eos": True, "temperature": 0}
    front = await respond(client, **asked)
    seen = await read_some(app, {**asked, "background": True, "stream": True}, 5)
    events = events_of(seen, ids=True)
    name = events[0]["response"]["id"]
    last = events[-1]["sequence_number"]
    assert last < 40
    rest = events_of((await client.get(f"/v1/responses/{name}?stream=true&starting_after={last}")).text, ids=True)
    assert [event["sequence_number"] for event in [*events, *rest]] == list(range(len(events) + len(rest)))
    assert rest[-1]["response"]["output"][0]["content"] == front["output"][0]["content"]
    deltas = [event["delta"] for event in [*events, *rest] if event["type"] == "response.output_text.delta"]
    assert "".join(deltas) == front["output"][0]["content"][0]["text"]
    headers = {"last-event-id": str(last)}
    again = events_of((await client.get(f"/v1/responses/{name}?stream=true", headers=headers)).text, ids=True)
    assert again == rest
    wrong = await client.get(f"/v1/responses/{name}?stream=true&starting_after=x")
    assert (wrong.status_code, wrong.json()["error"]["param"]) == (400, "starting_after")
    not_in_the_background = await client.get(f"/v1/responses/{front['id']}?stream=true")
    assert (not_in_the_background.status_code, not_in_the_background.json()["error"]["param"]) == (400, "stream")
    await until(lambda: is_idle(llm))


def test_on_trio_too(llm: AsyncLLM) -> None:
    async def main() -> None:
        async with client_of(create_app(llm)) as client:
            begun = await respond(client, background=True)
            assert (await ended(client, begun["id"]))["usage"]["output_tokens"] == 8
            endless = (await client.post("/v1/responses", json={**LONG, "background": True})).json()["id"]
            assert (await client.post(f"/v1/responses/{endless}/cancel")).json()["status"] == "cancelled"

    anyio.run(main, backend="trio")


async def read_some(app: FastAPI, body: dict[str, Any], num_messages: int) -> str:
    """What a client reads that leaves after so many messages."""
    chunks: list[bytes] = []
    left = anyio.Event()
    has_sent = False

    async def receive() -> Any:
        nonlocal has_sent
        if not has_sent:
            has_sent = True
            return {"type": "http.request", "body": orjson.dumps(body)}
        await left.wait()
        return {"type": "http.disconnect"}

    async def send(message: Any) -> None:
        if message["type"] == "http.response.body":
            chunks.append(message["body"])
            if len(chunks) == num_messages:
                left.set()
                await anyio.sleep_forever()

    path = "/v1/responses"
    scope = {"type": "http", "method": "POST", "path": path, "raw_path": path.encode(), "query_string": b""}
    await app({**scope, "headers": [], "http_version": "1.1", "scheme": "http"}, receive, send)
    return b"".join(chunks).decode()


async def test_one_that_is_cancelled_has_what_there_is(client: httpx.AsyncClient, llm: AsyncLLM) -> None:
    begun = (await client.post("/v1/responses", json={**LONG, "background": True})).json()
    cancelled = (await client.post(f"/v1/responses/{begun['id']}/cancel")).json()
    assert cancelled["status"] == "cancelled"
    assert (cancelled["usage"] or {"output_tokens": 0})["output_tokens"] < 900
    assert cancelled == (await client.get(f"/v1/responses/{begun['id']}")).json()
    assert (await client.post(f"/v1/responses/{begun['id']}/cancel")).json() == cancelled
    forgotten = (await client.post("/v1/responses", json={**LONG, "background": True})).json()["id"]
    assert (await client.delete(f"/v1/responses/{forgotten}")).status_code == 200
    assert (await client.get(f"/v1/responses/{forgotten}")).status_code == 404
    await until(lambda: is_idle(llm))
    assert (await client.get(f"/v1/responses/{forgotten}")).status_code == 404
    front = await respond(client)
    assert (await client.post(f"/v1/responses/{front['id']}/cancel")).status_code == 400


async def test_so_many_are_written_in_the_background(llm: AsyncLLM, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(kept_module, "MAX_BACKGROUND", 1)
    async with client_of(create_app(llm)) as client:
        first = (await client.post("/v1/responses", json={**LONG, "background": True})).json()["id"]
        refused = await client.post("/v1/responses", json={**LONG, "background": True})
        assert (refused.status_code, refused.json()["error"]["param"]) == (429, "background")
        too_early = await client.post("/v1/responses", json={"input": "a", "previous_response_id": first})
        assert (too_early.status_code, "not ended" in too_early.text) == (400, True)
        await client.post(f"/v1/responses/{first}/cancel")
        second = await client.post("/v1/responses", json={**LONG, "background": True})
        await client.post(f"/v1/responses/{second.json()['id']}/cancel")
    await until(lambda: is_idle(llm))


async def test_a_long_conversation_is_not_kept(client: httpx.AsyncClient, monkeypatch: pytest.MonkeyPatch) -> None:
    for place in (kept_module, request_module):
        monkeypatch.setattr(place, "MAX_CONVERSATION_BYTES", 300)
    first = await respond(client)
    second = await respond(client, previous_response_id=first["id"])
    long = await respond(client, input="a " * 160)
    longer = await respond(client, input="A fox. " * 30, previous_response_id=second["id"])
    for tree in (long, longer):
        assert (await client.get(f"/v1/responses/{tree['id']}")).json() == tree
        refused = await client.post("/v1/responses", json={"input": "a", "previous_response_id": tree["id"]})
        assert (refused.status_code, refused.json()["error"]["param"]) == (400, "previous_response_id")
        assert "too long to be kept" in refused.json()["error"]["message"]


def one(name: str, size: int = 0, is_background: bool = False) -> KeptResponse:
    return KeptResponse(name, [], b"x" * size, is_background)


def test_the_oldest_make_room(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(kept_module, "MAX_BYTES", 1000)
    monkeypatch.setattr(kept_module, "MAX_KEPT", 3)
    responses = KeptResponses()
    for number in range(5):
        responses.add(one(str(number)))
    assert [name for name in "01234" if _is_there(responses, name)] == ["2", "3", "4"]
    responses.add(one("large", 900))
    responses.add(one("next", 200))
    assert [name for name in ("4", "large", "next") if _is_there(responses, name)] == ["next"]
    responses.add(one("too large", 2000))
    assert not _is_there(responses, "too large")
    assert responses._num_bytes == 0
    responses.add(one("again", 300))
    responses.add(one("again", 400))
    assert responses._num_bytes == 402


def _is_there(responses: KeptResponses, name: str) -> bool:
    try:
        return responses.find(name).id == name
    except ApiError:
        return False


async def test_events_are_bounded_and_go_after_a_while(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(kept_module, "MAX_EVENT_BYTES", 100)
    responses, kept = KeptResponses(), one("a", is_background=True)
    responses.begin(kept)
    for number in range(10):
        kept.add(b"data: %d\n\n" % number)
    assert kept.after(8) == (b"id: 9\ndata: 9\n\n", 9)
    assert kept.after(9) == (b"", 9)
    with pytest.raises(ApiError, match=r"events up to \d are no longer kept"):
        kept.after(0)
    responses.add(kept)
    assert responses.find("a").after(8)[0]
    assert responses._num_bytes == kept.num_bytes > 2
    monkeypatch.setattr(kept_module, "now", lambda: now() + kept_module.EVENTS_KEPT_S)
    with pytest.raises(ApiError, match="no longer kept"):
        responses.find("a").after(8)
    assert responses._num_bytes == kept.num_bytes == 2
