"""What a model or an installation does not have is left out of the warm-up, without an error and without a word."""

from __future__ import annotations

import gc
import logging
import os
import signal
import sys
import threading
from typing import Any

import anyio
import pytest

from actorllm import AsyncLLM
from actorllm.server import create_app, launcher, warm_up, warmup
from actorllm.server.listener import Listener
from actorllm.text import chat_template as chat
from tests.server.conftest import client_of


@pytest.mark.parametrize(
    "arguments",
    [{"skip_tokenizer_init": True}, {"runner": "pooling"}, {}],
    ids=["no tokenizer", "pooling", "no chat template, no llguidance"],
)
async def test_what_is_not_there_is_left_out(
    arguments: dict[str, Any], monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(chat, "_read_templates", lambda path, config: {})
    monkeypatch.setitem(sys.modules, "llguidance", None)
    caplog.set_level(logging.INFO, "actorllm")
    llm = AsyncLLM("storyteller", topology="inline", num_threads=1, **arguments)
    app = create_app(llm)
    async with llm, client_of(app) as client:
        caplog.clear()
        await warm_up(app)
        assert not caplog.records
        if not arguments:
            body: dict[str, Any] = {"prompt": "Once", "max_tokens": 1}
            assert (await client.post("/v1/completions", json=body)).status_code == 200
            refused = await client.post("/v1/completions", json={**body, "structured_outputs": {"regex": "a"}})
            assert (refused.status_code, "actorllm[structured]" in refused.text) == (400, True)


async def test_it_starts_the_engine_and_raises_what_a_start_raises() -> None:
    llm = AsyncLLM("storyteller", topology="inline", num_threads=1)
    llm.shutdown()
    with pytest.raises(Exception, match="shut down"):
        await warm_up(create_app(llm))


async def test_a_server_does_not_look_through_what_its_start_made(monkeypatch: pytest.MonkeyPatch) -> None:
    """A collection of all of it would hold the loop for half a second."""
    counts = []

    class Server(launcher.Server):
        def __init__(self, *_: object) -> None: ...

        async def serve(self, sockets: object = None) -> None:
            counts.append(gc.get_freeze_count())

    monkeypatch.setattr(launcher, "Server", Server)
    monkeypatch.setattr(launcher, "config_of", lambda listener, app: None)
    llm = AsyncLLM("storyteller", topology="inline", num_threads=1)
    await launcher.serve(create_app(llm), Listener(port=0))
    assert [count > 10_000 for count in counts] == [True]
    assert gc.get_freeze_count() == 0


async def test_a_template_that_does_not_end_keeps_no_server_from_starting(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """The start goes on after the limit that a request has, and says why the first chats will fail."""
    ended = threading.Event()
    monkeypatch.setattr(warmup, "_read", lambda state: ended.wait(60))
    caplog.set_level(logging.WARNING, "actorllm")
    app = create_app(AsyncLLM("storyteller", topology="inline", num_threads=1, intake_timeout_s=0.2))
    try:
        await warm_up(app)
        assert "intake_timeout_s=0.2" in caplog.text
    finally:
        ended.set()
        app.state.server.llm.shutdown()


async def test_signals_are_received_before_the_engine_starts(monkeypatch: pytest.MonkeyPatch) -> None:
    """One that comes at once would end the process otherwise, and leave its unix socket and the engine's processes."""
    missed: list[int] = []
    before = signal.signal(signal.SIGTERM, lambda number, _: missed.append(number))

    async def start(app: object) -> None:
        os.kill(os.getpid(), signal.SIGTERM)
        await anyio.sleep_forever()

    monkeypatch.setattr(launcher, "warm_up", start)
    app = create_app(AsyncLLM("storyteller", topology="inline", num_threads=1))
    try:
        with anyio.fail_after(60):
            await launcher.serve(app, Listener(port=0, log_level="critical"))
    finally:
        signal.signal(signal.SIGTERM, before)
    assert not missed
