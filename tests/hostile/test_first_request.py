"""The first chat, and the first grammar, find everything read, compiled and imported; and nobody can tell that it was tried.

Also beside a stream, which gets its tokens meanwhile, one in every step.
"""

from __future__ import annotations

import itertools
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import orjson

from tests.hostile.bystander import longest_pause

PROGRAM = """
import asyncio, contextlib, json, os, sys
from typing import Any

import httpcore, httpx
from actorllm import AsyncLLM
from actorllm.server import create_app, warm_up
from actorllm.text.grammar import GrammarCompiler

vocabularies = []
read = GrammarCompiler._read_vocabulary
GrammarCompiler._read_vocabulary = lambda compiler: vocabularies.append(compiler) or read(compiler)

MESSAGES = [{"role": "user", "content": "Once"}]
TOOL = {"type": "function", "function": {"name": "f", "parameters": {"type": "object"}}}
BODIES = [
    ("completions", {"prompt": "Once", "max_tokens": 2}),
    ("chat/completions", {"messages": MESSAGES, "max_tokens": 2}),
    ("chat/completions", {"messages": MESSAGES, "max_tokens": 2, "response_format": {"type": "json_object"}}),
    ("chat/completions", {"messages": MESSAGES, "max_tokens": 2, "tools": [TOOL], "tool_choice": "required"}),
]

async def main():
    told = {}
    llm = AsyncLLM("storyteller", topology="inline", num_threads=1, seed=1, record=sys.argv[1])
    app = create_app(llm)
    async with llm, httpx.AsyncClient(transport=httpx.ASGITransport(app), base_url="http://test", timeout=60) as client:
        assert (await client.get("/version")).status_code == 200  # what this client imports is not ours
        told["embedded"] = sorted({"llguidance", "jinja2", "transformers"} & set(sys.modules))
        async with beside(llm) as steady:
            before = [await llm.stats(), (await client.get("/metrics")).text]
            await warm_up(app)
            after = [await llm.stats(), (await client.get("/metrics")).text]
            told["figures"] = [figures(before), figures(after)]
            told["vocabularies"] = [len(vocabularies)]
            told["recorded"] = os.path.getsize(sys.argv[1])
            told["steady"] = [steady.num_tokens] if steady else []
            for path, body in BODIES:
                known = set(sys.modules)
                answer = await client.post(f"/v1/{path}", json=body)
                assert answer.status_code == 200, answer.text
                told.setdefault("modules", []).append(sorted(set(sys.modules) - known))
                told["vocabularies"].append(len(vocabularies))
                told["steady"] += [steady.num_tokens] if steady else []
        told["requests"] = (await llm.stats())["num_requests"] - (steady.num_rounds if steady else 0)
        told["compiled"] = (await llm.stats())["scheduler"]["grammars"]["num_compiled"]
    print(json.dumps(told))

def beside(llm):
    if sys.argv[2] == "alone":
        return contextlib.nullcontext()
    from tests.hostile.bystander import bystander
    return bystander(llm, max_tokens=40)

def figures(found):
    stats, text = found
    counted = [line for line in text.splitlines() if "link_fill" not in line and "loop_lag" not in line]
    parts = {name: stats["scheduler"][name] for name in ("scheduler", "requests", "steps", "grammars")}
    return [stats["num_requests"], parts, counted]

asyncio.run(main())
"""


def run(record: Path, how: str) -> dict[str, Any]:
    """What the program tells; also what is so of the first requests in either way."""
    environment = os.environ | {"PYTHONPATH": os.pathsep.join(sys.path)}
    command = [sys.executable, "-c", PROGRAM, str(record), how]
    made = subprocess.run(command, env=environment, capture_output=True, timeout=120)
    assert made.returncode == 0, made.stderr.decode()
    told: dict[str, Any] = orjson.loads(made.stdout)
    assert told["embedded"] == ["llguidance"], "an engine without a server reads only what would hold its loop later"
    assert told["vocabularies"] == [1] * 5
    assert told["modules"] == [[]] * 4
    assert (told["requests"], told["compiled"]) == (4, 2)
    assert b"WARNING" not in made.stderr
    return told


def test_the_first_request_is_as_quick_as_the_second(tmp_path: Path) -> None:
    told = run(tmp_path / "run", "alone")
    before, after = told["figures"]
    assert before == after
    assert before[0] == told["recorded"] == 0


def test_a_stream_goes_on_beside_the_first_request(tmp_path: Path) -> None:
    told = run(tmp_path / "run", "beside a stream")
    counts = told["steady"]
    assert all(after > before for before, after in itertools.pairwise(counts)), counts
    assert longest_pause(tmp_path / "run") == 1
