"""The live page in a real browser. ACTORLLM_SCREENSHOT=FILE keeps what it looks like (docs/pictures/live.png)."""

from __future__ import annotations

import os
import threading
import time
from collections.abc import Iterator
from pathlib import Path

import httpx
import pytest

from tests.server.browser import PROGRAM, Browser
from tests.server.live_server import Server

pytestmark = [
    pytest.mark.slow(reason="starts a browser, which few machines have"),
    pytest.mark.timeout(180),
    pytest.mark.skipif(PROGRAM is None, reason="there is no Chromium: apt-get install chromium"),
]


@pytest.fixture(scope="module")
def server() -> Iterator[Server]:
    made = Server("--num-threads", "1", "--max-num-seqs", "12", "--max-num-batched-tokens", "256")
    yield made
    status, log = made.stop()
    assert status == 0, log


def keep_busy(server: Server, is_over: threading.Event, number: int) -> None:
    """Requests one after the other, as a client would send them."""
    with httpx.Client(base_url=server.url, timeout=60) as client:
        turn = 0
        while not is_over.is_set():
            turn += 1
            body = {
                "prompt": "Once upon a time there was a king who had three sons. " * (1 + (7 * number + turn) % 17),
                "max_tokens": 60 + (37 * number + 11 * turn) % 300,
                "ignore_eos": True,
                "slo": {"ttft": 1.0, "tpot": 0.02 if number % 3 else 0.2} if number % 4 else None,
                "is_latency_sensitive": number % 5 == 1,
            }
            assert client.post("/v1/completions", json=body).status_code == 200


def test_it_shows_what_the_engine_does_and_tries_a_prompt(server: Server) -> None:
    is_over = threading.Event()
    clients = [threading.Thread(target=keep_busy, args=(server, is_over, number)) for number in range(15)]
    wanted = os.environ.get("ACTORLLM_SCREENSHOT")
    try:
        with Browser() as browser:
            browser.open(server.url + "/")
            browser.becomes_true("document.getElementById('state').textContent === 'running'")
            assert browser.value("document.getElementById('none').hidden") is False
            for client in clients:
                client.start()
            browser.becomes_true("+document.getElementById('running').firstChild.textContent === 12")
            browser.becomes_true("document.querySelectorAll('#requests tr').length >= 12")
            browser.becomes_true("document.querySelector('#requests .tag.waiting') !== null")
            browser.becomes_true("parseFloat(document.getElementById('rate').textContent) > 0")
            browser.becomes_true("parseFloat(document.getElementById('step').textContent) > 0")
            browser.becomes_true("parseFloat(document.getElementById('slo').textContent) >= 0")
            browser.becomes_true("parseFloat(document.getElementById('kv').textContent) > 0")
            painted = "(() => {const c = document.getElementById('timeline'); return new Set(new Uint32Array("
            painted += "c.getContext('2d').getImageData(0, 0, c.width, c.height).data.buffer)).size})()"
            assert browser.value(painted) > 5
            browser.value("document.getElementById('objective').value = '500'")
            browser.value("document.getElementById('go').click()")
            browser.becomes_true("document.getElementById('figures').textContent.includes('objective')")
            if wanted:
                time.sleep(30)  # for the curves
                Path(wanted).write_bytes(browser.screenshot())
            text = browser.value("document.getElementById('answer').textContent")
            assert text.startswith("Once upon a time, in a forest,")
            assert len(text) > 100
            browser.value("document.getElementById('temperature').value = '-1'")
            browser.value("document.getElementById('form').noValidate = true")
            browser.value("document.getElementById('go').click()")
            browser.becomes_true("document.getElementById('figures').textContent.includes('temperature')")
            assert {httpx.URL(url).host for url in browser.urls} <= {"127.0.0.1", ""}  # nothing from elsewhere
            refused = [error for error in browser.errors if "400" not in error]
            assert not refused
        if wanted:
            with Browser(is_dark=True) as browser:
                browser.open(server.url + "/")
                browser.becomes_true("document.querySelectorAll('#requests tr').length >= 12")
                time.sleep(12)
                Path(wanted).with_suffix(".dark.png").write_bytes(browser.screenshot())
    finally:
        is_over.set()
        for client in clients:
            if client.ident is not None:
                client.join()


def test_markup_in_what_it_shows_stays_text() -> None:
    markup = "<img src=x onerror='window.hit = 1'>"
    server = Server("--num-threads", "1", "--served-model-name", markup)
    with Browser() as browser:
        browser.open(server.url + "/")
        browser.becomes_true("document.getElementById('what').textContent.startsWith('<img')")
        browser.value(f'document.getElementById("prompt").value = "{markup}"')
        browser.value("document.getElementById('tokens').value = '3'")
        browser.value("document.getElementById('go').click()")
        browser.becomes_true("document.getElementById('figures').textContent.includes('3 tokens')")
        assert browser.value("document.getElementById('answer').textContent").startswith(markup)
        assert browser.value("document.querySelectorAll('img').length") == 0
        assert browser.value("window.hit === undefined")
    status, log = server.stop()
    assert status == 0, log


def test_it_asks_for_the_key(server: Server) -> None:
    guarded = Server("--num-threads", "1", "--api-key", "secret")
    with Browser() as browser:
        browser.open(guarded.url + "/")
        browser.becomes_true("document.getElementById('ask').open")
        browser.value("document.getElementById('key').value = 'secret'")
        browser.value("document.querySelector('#ask button').click()")
        browser.becomes_true("document.getElementById('state').textContent === 'running'")
    status, log = guarded.stop()
    assert status == 0, log
