"""The live page in a real browser. ACTORLLM_SCREENSHOT=FILE keeps what it looks like (docs/pictures/live.png)."""

from __future__ import annotations

import json
import os
import re
import shlex
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


def click(browser: Browser, name: str) -> None:
    browser.value(f"document.getElementById('{name}').click()")


def put(browser: Browser, name: str, value: str) -> None:
    """As a hand would."""
    field = f"document.getElementById('{name}')"
    browser.value(f"{field}.value = {json.dumps(value)}; {field}.dispatchEvent(new Event('input', {{bubbles: true}}))")


NOW_IDLE = "document.getElementById('go').textContent === 'Send'"
NUM_MESSAGES = "document.querySelectorAll('#answer .message').length"


def test_a_conversation(server: Server) -> None:
    """System prompt, regeneration, both ways of asking, a stop, and the same request for other programs."""
    with Browser() as browser:
        browser.open(server.url + "/")
        for name, value in (("tokens", "12"), ("seed", "1"), ("system", "Be a 'king'."), ("top-p", "0.9")):
            put(browser, name, value)
        put(browser, "prompt", "It's a dog")
        browser.value("document.getElementById('code').open = true")
        browser.becomes_true("document.getElementById('python').textContent.includes('openai')")
        click(browser, "go")
        browser.becomes_true(f"{NUM_MESSAGES} === 2 && {NOW_IDLE}")
        answer = browser.value("document.querySelector('#answer .assistant').textContent")
        click(browser, "again")
        browser.becomes_true(f"{NUM_MESSAGES} === 2 && {NOW_IDLE}")
        assert browser.value("document.querySelector('#answer .assistant').textContent") == answer  # by its seed
        put(browser, "prompt", "And a cat")
        click(browser, "go")
        browser.becomes_true(f"{NUM_MESSAGES} === 4 && {NOW_IDLE}")
        click(browser, "clear")
        assert browser.value(NUM_MESSAGES) == 0
        # What it shows for a terminal and a program does what the page did.
        put(browser, "prompt", "It's a dog")
        curl = browser.value("document.getElementById('curl').textContent")
        words = shlex.split(curl)
        sent = json.loads(words[words.index("-d") + 1])
        assert [one["role"] for one in sent["messages"]] == ["system", "user"]
        assert httpx.post(words[1], json=sent).json()["choices"][0]["message"]["content"] == answer
        program = browser.value("document.getElementById('python').textContent")
        compile(program, "page", "exec")
        assert "system" in program
        # A stop ends the request in the engine.
        put(browser, "tokens", "100000")
        put(browser, "way", "text")
        click(browser, "go")
        browser.becomes_true("+document.getElementById('running').textContent > 0")
        click(browser, "go")
        browser.becomes_true(f"{NOW_IDLE} && document.getElementById('figures').textContent.includes('stopped')")
        browser.becomes_true("document.getElementById('ttft').textContent !== '–'")
        browser.becomes_true("document.getElementById('tpot').textContent !== '–'")
        assert not [error for error in browser.errors if "ERR_ABORTED" not in error]  # of what was stopped


def test_a_request_is_aborted_by_the_name_that_the_client_knows(server: Server) -> None:
    body = {"prompt": "Once", "max_tokens": 1500, "ignore_eos": True, "request_id": "tale", "min_tokens": 1500}
    answers: list[httpx.Response] = []
    client = threading.Thread(
        target=lambda: answers.append(httpx.post(server.url + "/v1/completions", json=body, timeout=100))
    )
    with Browser() as browser:
        browser.open(server.url + "/")
        client.start()
        browser.becomes_true("document.querySelector('#requests .name')?.textContent === 'cmpl-tale'")
        button = "[...document.querySelectorAll('#requests button')].find(one => one.dataset.name === 'cmpl-tale')"
        assert browser.value(f"{button}.getAttribute('aria-label')") == "abort the request cmpl-tale"
        browser.value(f"{button}?.click()")
        client.join()
    assert answers[0].json()["choices"][0]["finish_reason"] == "abort"


@pytest.mark.parametrize("width", [1280, 390, 320])
@pytest.mark.parametrize("is_dark", [False, True])
def test_nothing_is_wider_than_the_window(server: Server, width: int, is_dark: bool) -> None:
    is_over = threading.Event()
    clients = [threading.Thread(target=keep_busy, args=(server, is_over, number)) for number in range(3)]
    try:
        for client in clients:
            client.start()
        with Browser(width, 800, is_dark) as browser:
            browser.open(server.url + "/")
            put(browser, "prompt", "word" * 300)
            browser.value("document.getElementById('code').open = true")
            browser.becomes_true("document.querySelectorAll('#requests tr').length >= 3")
            browser.becomes_true("document.getElementById('curl').textContent !== ''")
            assert browser.value("document.documentElement.scrollWidth") <= width
            wide = (
                "[...document.querySelectorAll('body *')].filter(one => !one.closest('.scroll') && !one.closest('pre')"
            )
            wide += " && one.getBoundingClientRect().right > innerWidth + 1).map(one => one.outerHTML.slice(0, 90))"
            assert browser.value(wide) == []
            over = "[...document.querySelectorAll('.card')].filter(one => one.getBoundingClientRect().right >"
            over += " one.parentNode.getBoundingClientRect().right + 1).length"
            assert browser.value(over) == 0
            ground = browser.value("getComputedStyle(document.body).backgroundColor")
            assert (sum(map(int, re.findall(r"\d+", ground)[:3])) < 200) is is_dark
            # Names for keyboard and screen reader: as the accessibility tree has them.
            nodes = browser.call("Accessibility.getFullAXTree")["nodes"]
            roles = {"button", "textbox", "combobox", "spinbutton", "link", "img", "log", "searchbox"}
            nameless = [
                node
                for node in nodes
                if node.get("role", {}).get("value") in roles
                and not node.get("ignored")
                and not node.get("name", {}).get("value")
            ]
            assert not nameless
            wanted = os.environ.get("ACTORLLM_SCREENSHOT")
            if wanted:
                Path(wanted).with_suffix(f".{width}{'.dark' * is_dark}.png").write_bytes(browser.screenshot())
            assert not browser.errors
    finally:
        is_over.set()
        for client in clients:
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
