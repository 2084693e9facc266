"""Embedding: a thread that reads prompts dies of a defect. Another one takes its place, and the engine's health says so."""

from __future__ import annotations

import threading

import httpx
import pytest

from actorllm import AsyncLLM, SamplingParams
from actorllm.errors import EngineError, RequestFailedError
from actorllm.intake.tokenizer_pool import TokenizerPool, TokenizerWorker
from actorllm.server.app import create_app
from tests.hostile.bystander import bystander


async def test_it_is_started_again_and_told(monkeypatch: pytest.MonkeyPatch) -> None:
    async with AsyncLLM("storyteller", topology="inline", num_threads=1) as llm, bystander(llm) as steady:
        do_next = TokenizerPool._do_next
        deaths = iter((True, True))

        def die(self: TokenizerPool, worker: TokenizerWorker) -> bool:
            goes_on = do_next(self, worker)
            if next(deaths, False):
                raise SystemExit("planted")
            return goes_on

        monkeypatch.setattr(TokenizerPool, "_do_next", die)
        for number in range(1, 3):
            assert await steady.tokens_until_first() < 100
            while llm.health().threads["intake"].num_restarts < number:
                await steady.wait(1)
        health = llm.health().threads["intake"]
        assert health.state == "running"
        assert "SystemExit: planted" in str(health.last_failure)
        assert (await llm.stats())["intake"]["num_restarts"] == 2
        await llm.check_health()


async def test_one_that_dies_with_a_request_fails_it(monkeypatch: pytest.MonkeyPatch) -> None:
    async with AsyncLLM("storyteller", topology="inline", num_threads=1) as llm, bystander(llm) as steady:
        dispatch = TokenizerPool._dispatch
        deaths = iter((True,))

        def die(self: TokenizerPool) -> None:
            jobs = [worker.job for worker in self._workers if worker.thread is threading.current_thread()]
            if any(job is not None and job.submitter == "victim" for job in jobs) and next(deaths, False):
                raise SystemExit("planted")
            dispatch(self)

        monkeypatch.setattr(TokenizerPool, "_dispatch", die)
        with pytest.raises(RequestFailedError, match="the thread that read this prompt died: SystemExit: planted"):
            await llm.complete("One day", tenant="victim")
        assert await steady.tokens_until_first() < 100


async def test_where_no_thread_can_be_started_the_health_says_so(monkeypatch: pytest.MonkeyPatch) -> None:
    llm = AsyncLLM("storyteller", topology="inline", num_threads=1)
    start = threading.Thread.start

    def refuse(self: threading.Thread) -> None:
        if "intake" in self.name:
            raise RuntimeError("can't start new thread")
        start(self)

    with monkeypatch.context() as planted:
        planted.setattr(threading.Thread, "start", refuse)
        with pytest.raises(EngineError, match="cannot read prompts: no thread can be started"):
            llm.generate("One day")
        assert llm.health().threads["intake"].state == "dead"
        with pytest.raises(EngineError, match="cannot read prompts"):
            await llm.check_health()
        async with httpx.AsyncClient(transport=httpx.ASGITransport(create_app(llm)), base_url="http://test") as client:
            assert (await client.get("/health")).status_code == 503
    async with llm:
        assert (await llm.complete("One day", SamplingParams(max_tokens=1))).finished
        await llm.check_health()
