"""An event loop of the application gets the interpreter within a step; a caller that blocks pays nothing for that."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Iterator

import pytest
import torch
from transformers import LlamaConfig, LlamaForCausalLM

from actorllm import LLM, AsyncLLM, SamplingParams
from actorllm.actors import engine_thread, giving_way
from actorllm.actors.giving_way import INTERVAL_S, GivingWay

PARAMS = SamplingParams(max_tokens=4, ignore_eos=True)
CACHE = {"num_threads": 1, "kv_cache_memory_bytes": 16 << 20}


class Clock:
    """In place of `time` in the module."""

    def __init__(self) -> None:
        self.now = 100.0
        self.pauses: list[tuple[float, int]] = []

    def monotonic(self) -> float:
        self.now += INTERVAL_S / 4  # each look at the clock
        return self.now

    def sleep(self, seconds: float) -> None:
        self.pauses.append((seconds, threading.get_ident()))


@pytest.fixture
def clock(monkeypatch: pytest.MonkeyPatch) -> Iterator[Clock]:
    clock = Clock()
    monkeypatch.setattr(giving_way, "time", clock)
    # those of other tests that are not collected yet
    monkeypatch.setattr(engine_thread, "_hosts", type(engine_thread._hosts)())
    return clock


def test_there_is_a_pause_now_and_then(clock: Clock, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(giving_way, "serves_loops", lambda: True)
    way = GivingWay()
    for _ in range(50):
        way.between_layers()
    assert 5 < len(clock.pauses) < 25, "more often than at every layer it would cost, more seldom it would not help"


def test_a_loop_gets_its_turn_within_a_step(clock: Clock) -> None:
    async def main() -> int:
        async with AsyncLLM("storyteller", topology="inline", **CACHE) as llm:
            await llm.complete("Once", PARAMS)
        return threading.get_ident()

    own = asyncio.run(main())
    assert clock.pauses
    assert own not in {ident for _, ident in clock.pauses}


def test_so_it_does_with_a_model_of_transformers(clock: Clock) -> None:
    sizes = {"vocab_size": 64, "hidden_size": 32, "intermediate_size": 64, "num_hidden_layers": 2}
    torch.manual_seed(0)
    module = LlamaForCausalLM(LlamaConfig(**sizes, num_attention_heads=4, max_position_embeddings=128))

    async def main() -> None:
        async with AsyncLLM(module=module, topology="inline", **CACHE) as llm:
            await llm.complete([1, 2, 3], SamplingParams(max_tokens=8))

    asyncio.run(main())
    assert clock.pauses


def test_a_caller_that_blocks_has_no_pauses(clock: Clock) -> None:
    llm = LLM("storyteller", topology="inline", **CACHE)
    llm.generate("Once", PARAMS, use_tqdm=False)
    llm.shutdown()
    assert not clock.pauses


def test_the_first_grammar_reads_no_vocabulary(monkeypatch: pytest.MonkeyPatch) -> None:
    """Reading it holds the interpreter for a second, with a large one."""
    import llguidance

    when: list[str] = []
    at = "start"
    right = llguidance.LLTokenizer

    def read(*arguments: object, **more: object) -> object:
        when.append(at)
        return right(*arguments, **more)

    monkeypatch.setattr(llguidance, "LLTokenizer", read)

    async def main() -> None:
        nonlocal at
        async with AsyncLLM("storyteller", topology="inline", **CACHE) as llm:
            at = "request"
            params = SamplingParams(max_tokens=4, structured_outputs={"regex": "[a-z]+"})  # type: ignore[arg-type]
            assert await llm.complete("Once", params)

    asyncio.run(main())
    assert when == ["start"]
    at = "start"
    when.clear()
    monkeypatch.setattr(engine_thread, "_hosts", type(engine_thread._hosts)())  # that loop may not be collected yet
    llm = LLM("storyteller", topology="inline", **CACHE)
    llm.generate("Once", PARAMS, use_tqdm=False)
    llm.shutdown()
    assert not when, "without a loop, only a request with a grammar reads it"
