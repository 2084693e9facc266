"""64 streams, a prompt of 100,000 tokens, a large grammar and a conversation at once: what is done beside an event loop.

As calls of an engine (`use`), or as requests of OpenAI's API from a process of its own:

    python bench/mixed.py PORT SEED

which prints a line when it is ready, waits for one, and ends with the last answer.
"""

from __future__ import annotations

import asyncio
import json
import sys
from typing import Any

STREAMS = 64
TOKENS = 100
PROMPT = "Once upon a time"
LONG = "once upon a time there was a girl " * 14_000
TEMPLATE = "{% for message in messages %}{{ message.content }} {% endfor %}"
MESSAGES = [{"role": "user", "content": "Tell me a story. " * 20}] * 20
TRUNCATED = {"truncate_prompt_tokens": 100}


def large_grammar(number: int) -> dict[str, str]:
    """A structural tag that is compiled for about a second; each number is another one."""
    tags = []
    for at in range(180):
        names = {f"a{number}_{at}_{i}": {"type": "string", "maxLength": 40 + at % 60} for i in range(10)}
        schema = {"type": "json_schema", "json_schema": {"type": "object", "properties": names}}
        tags.append({"begin": f"<f{at}>", "content": schema, "end": "</f>"})
    tag = {"type": "structural_tag", "format": {"type": "triggered_tags", "triggers": ["<f"], "tags": tags}}
    return {"structural_tag": json.dumps(tag)}


async def use(llm: Any, seed: int) -> None:
    """By an application within its own loop."""
    from actorllm import RequestOutputKind, SamplingParams

    async def all_of(stream: Any) -> None:
        async for _ in stream:
            pass

    delta, short = RequestOutputKind.DELTA, SamplingParams(max_tokens=4)
    many = [
        SamplingParams(max_tokens=TOKENS, ignore_eos=True, seed=seed * 1000 + number, output_kind=delta)
        for number in range(STREAMS)
    ]
    structured = SamplingParams(max_tokens=4, structured_outputs=large_grammar(seed))  # type: ignore[arg-type]
    await asyncio.gather(
        *(all_of(llm.generate(PROMPT, params)) for params in many),
        all_of(llm.generate(LONG, short, tokenization_kwargs=TRUNCATED)),
        all_of(llm.generate("One day", structured)),
        all_of(llm.chat(MESSAGES, short, chat_template=TEMPLATE, tokenization_kwargs=TRUNCATED)),
    )


def requests(seed: int) -> list[bytes]:
    """The same over HTTP."""
    short = {"model": "storyteller", "max_tokens": 4}
    story = {"model": "storyteller", "prompt": PROMPT, "max_tokens": TOKENS, "ignore_eos": True, "stream": True}
    completions, chat = "/v1/completions", "/v1/chat/completions"
    bodies: list[tuple[str, dict[str, Any]]] = [
        (completions, story | {"seed": seed * 1000 + number}) for number in range(STREAMS)
    ]
    bodies += [
        (completions, short | {"prompt": LONG} | TRUNCATED),
        (completions, short | {"prompt": "One day", "structured_outputs": large_grammar(seed)}),
        (chat, short | {"messages": MESSAGES, "chat_template": TEMPLATE} | TRUNCATED),
    ]
    return [_request(path, json.dumps(body).encode()) for path, body in bodies]


def _request(path: str, body: bytes) -> bytes:
    head = f"POST {path} HTTP/1.1\r\nhost: x\r\ncontent-type: application/json\r\nconnection: close\r\n"
    return f"{head}content-length: {len(body)}\r\n\r\n".encode() + body


async def send(port: int, seed: int) -> None:
    """All of them at once. Raises RuntimeError for an answer that is not OK."""

    async def one(data: bytes) -> None:
        reader, writer = await asyncio.open_connection("127.0.0.1", port)
        writer.write(data)
        answer = await reader.read()
        writer.close()
        if not answer.startswith(b"HTTP/1.1 200"):
            raise RuntimeError(answer[:500].decode(errors="replace"))

    ready = requests(seed)
    print("ready", flush=True)
    await asyncio.to_thread(sys.stdin.readline)
    await asyncio.gather(*map(one, ready))


if __name__ == "__main__":
    asyncio.run(send(int(sys.argv[1]), int(sys.argv[2])))
