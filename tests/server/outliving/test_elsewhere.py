"""What one API process keeps is what all of them answer with."""

from __future__ import annotations

from collections.abc import AsyncIterator
from typing import Any

import httpx
import orjson
import pytest

from actorllm import AsyncLLM
from actorllm.server import create_app
from actorllm.server.outliving import elsewhere
from actorllm.server.outliving.elsewhere import answer_peer
from actorllm.server.responses.kept import KeptResponse, KeptResponses
from actorllm.server.state import Peers
from tests.server.conftest import client_of, is_idle, until

pytestmark = pytest.mark.anyio

LONG = {"input": "Once", "ignore_eos": True, "max_output_tokens": 900, "background": True}


class Other(Peers):
    """One other process, which may end. What goes there and comes back is JSON."""

    def __init__(self, responses: KeptResponses) -> None:
        self.responses: KeptResponses | None = responses

    async def kept(self, **arguments: Any) -> dict[str, Any] | None:
        if self.responses is None:
            return None
        told = await answer_peer(self.responses, **orjson.loads(orjson.dumps(arguments)))
        frame: dict[str, Any] | None = orjson.loads(orjson.dumps(told))
        return frame


@pytest.fixture
async def pair(llm: AsyncLLM) -> AsyncIterator[tuple[httpx.AsyncClient, httpx.AsyncClient, Other]]:
    """A process that keeps, another one, and what that sees of the first."""
    keeps, asks = create_app(llm), create_app(llm)
    other = Other(keeps.state.server.responses)
    for app, peers in ((keeps, Other(asks.state.server.responses)), (asks, other)):
        app.state.server.join(app.state.server.board, 0, peers)
    async with client_of(keeps) as first, client_of(asks) as second:
        yield first, second, other


async def test_responses_are_found_in_every_process(
    pair: tuple[httpx.AsyncClient, httpx.AsyncClient, Other], monkeypatch: pytest.MonkeyPatch, llm: AsyncLLM
) -> None:
    monkeypatch.setattr(elsewhere, "MAX_PIECE", 100)  # each text in several pieces
    first, second, _ = pair
    asked = {"input": "Once", "max_output_tokens": 8, "temperature": 0}
    tree = (await first.post("/v1/responses", json=asked)).json()
    path = f"/v1/responses/{tree['id']}"
    assert (await second.get(path)).json() == tree
    assert (await second.get(f"{path}/input_items")).json() == (await first.get(f"{path}/input_items")).json()
    more = {"input": "And then?", "previous_response_id": tree["id"], "max_output_tokens": 8, "temperature": 0}
    here, there = [(await one.post("/v1/responses", json=more)).json() for one in (first, second)]
    assert there["output"][0]["content"] == here["output"][0]["content"]
    assert there["usage"]["input_tokens"] == here["usage"]["input_tokens"] > tree["usage"]["input_tokens"]
    refused = await second.get(f"{path}?stream=true")
    assert (refused.status_code, refused.json()["error"]["param"]) == (400, "stream")
    assert (await second.post(f"{path}/cancel")).status_code == 400
    assert (await second.delete(path)).json()["deleted"]
    assert [(await one.get(path)).status_code for one in (first, second)] == [404, 404]
    unknown = await second.post("/v1/responses", json={"input": "a", "previous_response_id": tree["id"]})
    assert (unknown.status_code, unknown.json()["error"]["param"]) == (404, "previous_response_id")
    await until(lambda: is_idle(llm))


async def test_streams_are_read_on_in_every_process(
    pair: tuple[httpx.AsyncClient, httpx.AsyncClient, Other], monkeypatch: pytest.MonkeyPatch, llm: AsyncLLM
) -> None:
    monkeypatch.setattr(elsewhere, "MAX_PIECE", 300)
    first, second, other = pair
    short = {**LONG, "max_output_tokens": 40}
    name = (await first.post("/v1/responses", json=short)).json()["id"]
    there = (await second.get(f"/v1/responses/{name}?stream=true")).text
    assert there == (await first.get(f"/v1/responses/{name}?stream=true")).text
    assert "response.incomplete" in there
    behind = (await second.get(f"/v1/responses/{name}?stream=true&starting_after=5")).text
    assert there.endswith(behind)
    assert behind.startswith("id: 6\n")
    endless = (await first.post("/v1/responses", json=LONG)).json()["id"]
    early = await second.post("/v1/responses", json={"input": "a", "previous_response_id": endless})
    assert (early.status_code, "not ended" in early.text) == (400, True)
    assert (await second.post(f"/v1/responses/{endless}/cancel")).json()["status"] == "cancelled"
    dying = (await first.post("/v1/responses", json=LONG)).json()["id"]
    async with second.stream("GET", f"/v1/responses/{dying}?stream=true") as stream:
        assert stream.status_code == 200
    other.responses = None
    assert (await second.get(f"/v1/responses/{dying}?stream=true")).status_code == 404
    await first.delete(f"/v1/responses/{dying}")
    await until(lambda: is_idle(llm))


async def test_what_is_no_longer_kept_is_said() -> None:
    responses = KeptResponses()
    kept = KeptResponse("a", None, b"", is_background=True)
    responses.begin(kept)
    other = Other(responses)
    found = await elsewhere.KeptElsewhere.find(other, "a", is_read=True)
    assert found is not None
    kept.add(b"data: 1\n\n")
    kept.forget_events()
    with pytest.raises(elsewhere.ApiError, match="no longer kept; ask for"):
        await found.check_after(-1)
    # An event that is told in pieces is not given in part, since its rest may be gone with the next question.
    kept.add(b"data: 2\n\ndata: %b\n\n" % (b"3" * elsewhere.MAX_PIECE))
    assert await found.read_behind(0) == (b"id: 1\ndata: 2\n\n", 0, False)
    kept.forget_events()
    with pytest.raises(elsewhere.ApiError, match="no longer kept"):
        await found.read_behind(0)
    other.responses = None
    with pytest.raises(elsewhere.ApiError, match="its process has ended"):
        await found.read_behind(-1)
    assert await elsewhere.KeptElsewhere.find(other, "a") is None
