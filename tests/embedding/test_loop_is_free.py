"""Nothing that takes long is done on the application's loop: counted by the thread of each call, never by a clock."""

from __future__ import annotations

import asyncio
import builtins
import io
import os
import subprocess
import sys
import threading
from collections import defaultdict
from collections.abc import Callable
from typing import Any

import anyio
import httpx
import pytest

from actorllm import AsyncLLM, RequestOutputKind, SamplingParams
from actorllm.actors.engine_thread import AsyncioLoop
from actorllm.actors.frontend import _wake_all
from actorllm.client.stream import Mailbox
from actorllm.server.app import create_app
from actorllm.text.chat_template import ChatTemplate
from actorllm.text.detokenizer import Detokenizer
from actorllm.text.grammar import GrammarCompiler
from actorllm.text.tokenizer import Tokenizer
from tests.embedding.host_program import run_host
from tests.hostile.grammars import large_tag

pytestmark = [pytest.mark.anyio, pytest.mark.usefixtures("processes_are_execed")]

NUM_STREAMS = 64
TEMPLATE = "{% for message in messages %}{{ message.content }} {% endfor %}"
LONG = "once upon a time there was a girl " * 14_000
"""Some 100,000 tokens."""


@pytest.fixture
def anyio_backend() -> str:
    return "asyncio"


@pytest.fixture
def threads_of(monkeypatch: pytest.MonkeyPatch) -> dict[str, set[int]]:
    """On which threads each kind of long work was done."""
    found: dict[str, set[int]] = defaultdict(set)

    def watch(owner: Any, name: str, kind: str) -> None:
        right = getattr(owner, name)

        def watched(*arguments: Any, **more: Any) -> Any:
            found[kind].add(threading.get_ident())
            return right(*arguments, **more)

        monkeypatch.setattr(owner, name, watched)

    for cls, names in {
        Tokenizer: ("__init__", "encode", "encode_within", "decode"),
        ChatTemplate: ("__init__", "render"),
        Detokenizer: ("__init__",),
        GrammarCompiler: ("__init__", "compile", "masks"),
    }.items():
        for name in names:
            watch(cls, name, cls.__name__)
    watch(subprocess.Popen, "__init__", "processes")
    for module, name in ((builtins, "open"), (io, "open"), (os, "open")):
        watch(module, name, "files")
    return found


async def use(llm: AsyncLLM) -> None:
    """64 streams, and beside them a long prompt, a large grammar, and two conversations."""
    short = SamplingParams(max_tokens=4)
    truncated = {"tokenization_kwargs": {"truncate_prompt_tokens": 100}}
    messages = [{"role": "user", "content": "Tell me a story. " * 20}] * 20

    async def all_of(stream: Any) -> None:
        async for _ in stream:
            pass

    async with anyio.create_task_group() as tasks:
        for seed in range(NUM_STREAMS):
            params = SamplingParams(max_tokens=30, ignore_eos=True, seed=seed, output_kind=RequestOutputKind.DELTA)
            tasks.start_soon(all_of, llm.generate("Once upon a time", params))
        tasks.start_soon(all_of, llm.generate(LONG, short, **truncated))
        tasks.start_soon(all_of, llm.generate("One day", SamplingParams(max_tokens=4, structured_outputs=large_tag(1))))
        tasks.start_soon(all_of, llm.generate("One day", SamplingParams(max_tokens=9, stop=["."], logprobs=2)))
        for template in (TEMPLATE, TEMPLATE + " "):
            tasks.start_soon(all_of, llm.chat(messages, short, chat_template=template, **truncated))


@pytest.fixture(params=["process", "inline"])
def new_llm(request: pytest.FixtureRequest) -> AsyncLLM:
    """The constructor reads the model's config.json, and nothing is started yet."""
    return AsyncLLM("storyteller", topology=request.param, num_threads=1, max_num_seqs=NUM_STREAMS + 8)


async def test_no_long_work_is_done_on_the_loop(new_llm: AsyncLLM, threads_of: dict[str, set[int]]) -> None:
    async with new_llm as llm:
        await use(llm)
        await llm.stats()
        llm.health()
    loop = threading.get_ident()
    expected = {"Tokenizer", "files"} | (
        {"Detokenizer", "GrammarCompiler"} if llm.config.topology == "inline" else set()
    )
    assert expected <= set(threads_of), "what is not seen cannot be found on the loop"
    assert not {kind for kind, threads in threads_of.items() if loop in threads}


async def use_over_http(client: httpx.AsyncClient) -> None:
    """As `use`, with requests of OpenAI's API."""
    story = {"model": "storyteller", "prompt": "Once upon a time", "max_tokens": 20, "ignore_eos": True, "stream": True}
    short = {"model": "storyteller", "max_tokens": 4}
    messages = [{"role": "user", "content": "Tell me a story. " * 20}] * 20

    async def post(path: str, body: dict[str, Any]) -> None:
        answer = await client.post(path, json=body)
        assert answer.status_code == 200, answer.text

    async with anyio.create_task_group() as tasks:
        for seed in range(NUM_STREAMS):
            tasks.start_soon(post, "/v1/completions", story | {"seed": seed})
        tasks.start_soon(post, "/v1/completions", short | {"prompt": LONG, "truncate_prompt_tokens": 100})
        tasks.start_soon(post, "/v1/completions", short | {"prompt": "One day", "structured_outputs": large_tag(1)})
        chat = short | {"messages": messages, "chat_template": TEMPLATE, "truncate_prompt_tokens": 100}
        tasks.start_soon(post, "/v1/chat/completions", chat)


async def test_no_long_work_is_done_on_the_loop_of_the_server(
    new_llm: AsyncLLM, threads_of: dict[str, set[int]]
) -> None:
    """From the first line of the application to the end: nothing is left out."""
    app = create_app(new_llm, trust_request_chat_template=True)
    transport = httpx.ASGITransport(app)
    async with new_llm, httpx.AsyncClient(transport=transport, base_url="http://server", timeout=60) as client:
        await use_over_http(client)
    app.state.server.bodies.close()
    loop = threading.get_ident()
    seen = {"Tokenizer", "files", "processes"}
    assert seen <= set(threads_of), "what is not seen cannot be found on the loop"
    assert not {kind for kind, threads in threads_of.items() if loop in threads}


async def test_a_batch_of_outputs_is_one_call_on_the_loop_and_no_work(monkeypatch: pytest.MonkeyPatch) -> None:
    """However many streams have something new: within the call each of their tasks goes on, and takes its own part."""
    calls: list[int] = []
    wakes: list[int] = []
    pushes: set[int] = set()
    right_call, right_wake, right_push = AsyncioLoop.call_soon_threadsafe, Mailbox.wake, Mailbox.push
    async with AsyncLLM("storyteller", topology="inline", num_threads=1, max_num_seqs=NUM_STREAMS + 8) as llm:
        host = threading.get_ident()

        def call(self: AsyncioLoop, function: Callable[..., object], *arguments: Any) -> bool:
            if self.loop is here:
                calls.append(1)
            return right_call(self, function, *arguments)

        def wake(self: Mailbox) -> None:
            assert threading.get_ident() == host
            wakes.append(1)
            right_wake(self)

        def push(self: Mailbox, *arguments: Any) -> None:
            pushes.add(threading.get_ident())
            right_push(self, *arguments)

        here = asyncio.get_running_loop()
        streams = [
            llm.generate("Once upon a time", SamplingParams(max_tokens=60, ignore_eos=True, seed=seed))
            for seed in range(NUM_STREAMS)
        ]
        for stream in streams:
            await anext(stream)
        monkeypatch.setattr(AsyncioLoop, "call_soon_threadsafe", call)
        monkeypatch.setattr(Mailbox, "wake", wake)
        monkeypatch.setattr(Mailbox, "push", push)

        async def rest_of(stream: Any) -> None:
            async for _ in stream:
                pass

        async with anyio.create_task_group() as tasks:
            for stream in streams:
                tasks.start_soon(rest_of, stream)
        monkeypatch.undo()
    assert host not in pushes
    assert len(wakes) > 20 * len(calls), f"{len(calls)} calls for {len(wakes)} wakes"


def test_a_consumer_that_ends_the_program_costs_no_other_its_wake_up() -> None:
    """A task goes on within the call; SystemExit of its code passes through the callbacks of a loop."""
    woken: list[int] = []

    class Consumer:
        def __init__(self, number: int) -> None:
            self.number = number

        def wake(self) -> None:
            woken.append(self.number)
            if self.number % 2:
                raise SystemExit(self.number)

    with pytest.raises(SystemExit) as raised:
        _wake_all([Consumer(number) for number in range(5)])  # type: ignore[misc]
    assert woken == [0, 1, 2, 3, 4]
    assert raised.value.code in (1, 3)


IMPORTS = """
import asyncio, sys, threading
from actorllm import AsyncLLM, SamplingParams

found = []

class Recorder:
    def find_spec(self, name, path=None, target=None):
        if threading.get_ident() == loop:
            found.append(name)

llm = AsyncLLM("storyteller", topology={topology!r}, num_threads=1)  # reads the model's config.json

async def main():
    global loop
    loop = threading.get_ident()
    sys.meta_path.insert(0, Recorder())
    async with llm:
        stream = llm.generate("Once", SamplingParams(max_tokens=3, structured_outputs={{"regex": "[a-z]+"}}))
        async for output in stream:
            pass
        template = "{{% for message in messages %}}{{{{ message.content }}}}{{% endfor %}}"
        messages = [{{"role": "user", "content": "Hello"}}]
        async for output in llm.chat(messages, SamplingParams(max_tokens=3), chat_template=template):
            pass
        await llm.stats()
        await llm.drain(1)

asyncio.run(main())
print("imported", *sorted({{name.partition(".")[0] for name in found}}))
"""

LIGHT = {"actorllm", "anyio", "sniffio", "uvloop"}
"""Packages of which the loop may import a module when it is first used."""


@pytest.mark.parametrize("topology", ["process", "inline"])
def test_no_library_is_imported_on_the_loop(topology: str) -> None:
    line = run_host("-c", IMPORTS.format(topology=topology)).output.splitlines()[-1]
    word, *packages = line.split()
    assert word == "imported"
    assert set(packages) - set(sys.stdlib_module_names) <= LIGHT
