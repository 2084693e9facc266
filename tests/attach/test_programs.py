"""One real engine, several programs: the streams are the same ones, and the owner's death is heard."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import anyio
import pytest

from actorllm import LLM, AsyncLLM, EngineDeadError, SamplingParams
from actorllm.errors import EngineNotFoundError
from tests import programs

ROOT = Path(__file__).parents[2]
PROMPT = "Once upon a time"
PARAMS = SamplingParams(max_tokens=40, seed=3, stop=[" to the"])

OWNER = f"""
import json, sys
from actorllm import LLM, SamplingParams
llm = LLM("storyteller", name="library", dtype="float32", num_threads=1, seed=9)
params = SamplingParams(max_tokens=40, seed=3, stop=[" to the"])
output = llm.generate({PROMPT!r}, params, use_tqdm=False)[0].outputs[0]
print(json.dumps([output.text, output.token_ids, output.finish_reason]), flush=True)
sys.stdin.read()
llm.shutdown()
"""


class Owner:
    """Another program with an engine of the name "library"; what it streamed."""

    def __init__(self) -> None:
        self.process = programs.popen(
            [sys.executable, "-c", OWNER],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.DEVNULL,
            env=os.environ | {"PYTHONPATH": str(ROOT)},
        )
        assert self.process.stdout is not None
        self.text, self.token_ids, self.reason = json.loads(self.process.stdout.readline())

    def end(self) -> int:
        assert self.process.stdin is not None
        assert self.process.stdout is not None
        self.process.stdin.close()
        status = self.process.wait(30)
        self.process.stdout.close()
        return status


@pytest.fixture
def owner() -> Iterator[Owner]:
    owner = Owner()
    yield owner
    owner.process.kill()
    owner.end()


def test_the_streams_are_the_owners(owner: Owner) -> None:
    async def stream() -> None:
        async with AsyncLLM.attach("library") as llm:
            pieces = [piece async for piece in llm.stream(PROMPT, PARAMS)]
            assert len(pieces) > 5
            assert "".join(pieces) == owner.text
            assert (await llm.complete(PROMPT, PARAMS)).outputs[0].token_ids == owner.token_ids

    anyio.run(stream)
    anyio.run(stream, backend="trio")
    with LLM.attach("library") as llm:
        assert llm.config.seed == 9
        outputs = llm.generate([PROMPT] * 3, PARAMS, use_tqdm=False)
        assert [o.outputs[0].text for o in outputs] == [owner.text] * 3
        assert outputs[0].outputs[0].finish_reason == owner.reason
    assert owner.end() == 0


def test_the_owners_death_is_heard(owner: Owner) -> None:
    llm = AsyncLLM.attach("library")

    async def stream() -> None:
        with anyio.fail_after(20):
            async for _ in llm.generate(PROMPT, SamplingParams(max_tokens=None, ignore_eos=True, seed=1)):
                owner.process.send_signal(signal.SIGKILL)

    with pytest.raises(EngineDeadError, match=rf"owns engine 'library' \(pid {owner.process.pid}\) died"):
        anyio.run(stream)
    with pytest.raises(EngineDeadError, match="died"):
        llm.generate(PROMPT)
    llm.shutdown()
    owner.process.wait(30)
    with pytest.raises(EngineNotFoundError):
        AsyncLLM.attach("library")


def test_an_attached_engine_that_is_dropped_lets_go(owner: Owner) -> None:
    async def stream() -> str:
        return (await AsyncLLM.attach("library").complete(PROMPT, PARAMS)).outputs[0].text

    assert anyio.run(stream) == owner.text
    AsyncLLM.attach("library")
    with LLM.attach("library") as llm:
        links = llm.stats()["scheduler"]["links"]
        deadline = anyio.run(until_alone, llm)
        assert deadline, links


async def until_alone(llm: LLM) -> bool:
    """Whether the others have gone; asked for up to 10 s."""
    with anyio.move_on_after(10):
        while len(llm.stats()["scheduler"]["links"]) > 3:
            await anyio.sleep(0.01)
        return True
    return False
