"""n > 1: several sequences of one request, as its caller sees them."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import anyio
import pytest

from actorllm import LLM, AsyncLLM, RequestOutput, RequestOutputKind, SamplingParams
from actorllm.errors import InvalidParameterError, InvalidPromptError, RequestFailedError
from tests.api.becoming_idle import becomes_idle

PROMPT = "Once upon a time"


@pytest.fixture
def anyio_backend() -> str:
    return "asyncio"


@pytest.fixture(scope="module")
def llm() -> Iterator[AsyncLLM]:
    engine = AsyncLLM("storyteller", dtype="float32", topology="inline", num_threads=1, max_num_seqs=8)
    anyio.run(engine.start)
    yield engine
    engine.shutdown()


def several(n: int = 3, **arguments: Any) -> SamplingParams:
    return SamplingParams(**({"n": n, "max_tokens": 8, "ignore_eos": True, "seed": 1} | arguments))


def endless(**arguments: Any) -> SamplingParams:
    return several(max_tokens=None, **arguments)


async def outputs_of(llm: AsyncLLM, params: SamplingParams) -> list[RequestOutput]:
    return [output async for output in llm.generate(PROMPT, params)]


async def test_one_output_at_the_end_with_all_sequences_in_order(llm: AsyncLLM) -> None:
    (output,) = await outputs_of(llm, several(4, output_kind=RequestOutputKind.FINAL_ONLY))
    assert output.finished
    assert [completion.index for completion in output.outputs] == [0, 1, 2, 3]
    assert [len(completion.token_ids) for completion in output.outputs] == [8] * 4
    assert len({completion.text for completion in output.outputs}) == 4, "each draws for itself"
    assert {completion.finish_reason for completion in output.outputs} == {"length"}


async def test_the_first_sequence_is_the_one_without_siblings(llm: AsyncLLM) -> None:
    """Noise is keyed by seed and sample index: more siblings change nothing about those that are there."""
    texts = [[c.text for c in (await llm.complete(PROMPT, several(n))).outputs] for n in (1, 2, 5)]
    assert texts[0] == texts[2][:1]
    assert texts[1] == texts[2][:2]
    again = await llm.complete(PROMPT, several(5))
    assert [completion.text for completion in again.outputs] == texts[2]


async def test_the_output_kinds_tell_the_same_story(llm: AsyncLLM) -> None:
    final = (await llm.complete(PROMPT, several())).outputs
    texts, token_ids, ends = [""] * 3, [[], [], []], [0] * 3
    for output in await outputs_of(llm, several(output_kind=RequestOutputKind.DELTA)):
        assert [c.index for c in output.outputs] == sorted({c.index for c in output.outputs})
        for completion in output.outputs:
            assert not ends[completion.index], "a sequence that has ended comes no more"
            texts[completion.index] += completion.text
            token_ids[completion.index] += completion.token_ids
            ends[completion.index] += completion.finished()
        assert output.finished == all(ends)
    assert texts == [completion.text for completion in final]
    assert token_ids == [completion.token_ids for completion in final]
    last = {}
    *running, end = await outputs_of(llm, several(output_kind=RequestOutputKind.CUMULATIVE))
    assert end.finished
    assert not any(output.finished for output in running)
    for output in [*running, end]:
        for completion in output.outputs:
            assert completion.text.startswith(last.get(completion.index, ""))
            last[completion.index] = completion.text
    assert [last[index] for index in range(3)] == texts


async def test_deltas_of_a_request_can_be_added_up(llm: AsyncLLM) -> None:
    whole, *rest = await outputs_of(llm, several(output_kind=RequestOutputKind.DELTA))
    for output in rest:
        whole.add(output, aggregate=True)
    final = await llm.complete(PROMPT, several())
    assert sorted(whole.outputs, key=lambda completion: completion.index) == final.outputs
    assert whole.finished


async def test_sequences_end_when_they_end(llm: AsyncLLM) -> None:
    """Some find a stop string early, others run to the limit."""
    params = several(6, max_tokens=40, stop=["."], output_kind=RequestOutputKind.FINAL_ONLY)
    (output,) = await outputs_of(llm, params)
    assert len({len(completion.token_ids) for completion in output.outputs}) > 1
    for completion in output.outputs:
        assert completion.stop_reason == ("." if completion.finish_reason == "stop" else None)
        assert "." not in completion.text


async def test_more_sequences_than_places(llm: AsyncLLM) -> None:
    output = await llm.complete(PROMPT, several(20, max_tokens=3))
    assert [len(completion.token_ids) for completion in output.outputs] == [3] * 20
    await becomes_idle(llm)


async def test_abort_ends_all_of_them(llm: AsyncLLM) -> None:
    for kind in RequestOutputKind:
        stream = llm.generate(PROMPT, endless(output_kind=kind), request_id="x")
        if kind is not RequestOutputKind.FINAL_ONLY:
            await stream.__anext__()
        await llm.abort("x")
        reasons = {}
        async for output in stream:
            reasons |= {c.index: c.finish_reason for c in output.outputs if c.finished()}
        assert output.finished
        assert reasons == dict.fromkeys(range(3), "abort")
        await becomes_idle(llm)


async def test_leaving_ends_all_of_them(llm: AsyncLLM) -> None:
    async for _ in llm.generate(PROMPT, endless()):
        break
    await becomes_idle(llm)


async def test_the_failure_of_one_is_that_of_the_request(llm: AsyncLLM) -> None:
    """And ends the others: nobody would take what they still make."""
    stream = llm.generate(PROMPT, endless())
    await stream.__anext__()
    frontend = llm._engine._frontend

    def lose_tokens() -> None:
        rid = stream._mailbox.rids[1]
        entry = frontend._journal[rid]
        frontend._fail_gap(rid, entry, len(entry.emitted) + 7)
        frontend._wake([entry.consumer])

    llm._engine._thread.post(lose_tokens)
    with pytest.raises(RequestFailedError, match="tokens are missing"):
        async for _ in stream:
            pass
    await becomes_idle(llm)


async def test_a_bad_prompt_fails_the_request_once(llm: AsyncLLM) -> None:
    with pytest.raises(InvalidPromptError, match="empty"):
        await llm.complete([], several())
    with pytest.raises(InvalidParameterError, match=r"one sequence; use generate\(\) for n=3"):
        llm.stream(PROMPT, several())
    await becomes_idle(llm)


@pytest.mark.parametrize("n", [1, 3])
async def test_a_request_that_cannot_be_made_fails_and_nobody_waits(
    llm: AsyncLLM, monkeypatch: pytest.MonkeyPatch, n: int
) -> None:
    def cannot(**_: Any) -> None:
        raise ValueError("too odd")

    with monkeypatch.context() as patch, anyio.fail_after(20):
        patch.setattr("actorllm.client.submit.Submit", cannot)
        with pytest.raises(RequestFailedError, match="cannot be made: ValueError"):
            await llm.complete(PROMPT, several(n))
    assert len((await llm.complete(PROMPT, several(n))).outputs) == n
    await becomes_idle(llm)


@pytest.mark.parametrize("n", [1, 3])
async def test_the_watch_is_told_of_work(llm: AsyncLLM, monkeypatch: pytest.MonkeyPatch, n: int) -> None:
    """Else it would sleep while the first request of an idle engine hangs."""
    await becomes_idle(llm)
    told: list[bool] = []
    monkeypatch.setattr(llm._engine._frontend, "on_work", lambda: told.append(True))
    await llm.complete(PROMPT, several(n))
    assert told == [True]


async def test_metrics_span_all_sequences(llm: AsyncLLM) -> None:
    output = await llm.complete(PROMPT, several(3))
    metrics = output.metrics
    assert metrics is not None
    assert metrics.num_generation_tokens == 24
    assert metrics.finished_time is not None
    assert metrics.arrival_time <= metrics.queued_ts <= metrics.scheduled_ts <= metrics.first_token_ts
    assert metrics.first_token_ts <= metrics.last_token_ts <= metrics.finished_time


def test_llm_gives_all_sequences_of_every_prompt() -> None:
    with LLM("storyteller", dtype="float32", topology="inline", num_threads=1) as llm:
        outputs = llm.generate([PROMPT, "There was"], several(2, best_of=2), use_tqdm=False)
    assert [[completion.index for completion in output.outputs] for output in outputs] == [[0, 1]] * 2
