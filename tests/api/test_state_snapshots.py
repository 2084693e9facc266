"""Prefix hits of models with recurrent layers: streams are those without hits, whatever happens in between."""

from __future__ import annotations

import asyncio
from pathlib import Path
from typing import Any

import pytest

from actorllm import LLM, AsyncLLM, SamplingParams
from actorllm.actors.record_file import fresh_scheduler, read_recording
from actorllm.messages import pack
from actorllm.scheduling.telemetry.recording import replay
from actorllm.slo.simulator import EngineShape
from tests.api.deaths_and_forks import FORKS, tokens_over_deaths
from tests.model.hf.decoders import RECURRENT, prompt, save

OPTIONS: dict[str, Any] = {
    "dtype": "float32", "num_threads": 1, "max_model_len": 256, "block_size": 8, "skip_tokenizer_init": True,
    "max_num_seqs": 4,
}  # fmt: skip
INLINE = OPTIONS | {"topology": "inline"}
SYSTEM = prompt(1, 80)
NUM_TOKENS = 24


def params(seed: int, **more: Any) -> SamplingParams:
    arguments = {"temperature": 0.9 * (seed % 2), "seed": seed, "max_tokens": NUM_TOKENS, "ignore_eos": True}
    return SamplingParams(**arguments | more)


def ask(llm: LLM, tokens: list[int], seed: int, **more: Any) -> tuple[list[int], int]:
    """The stream, and how many tokens of the prompt were found."""
    (output,) = llm.generate([{"prompt_token_ids": tokens}], params(seed, **more), use_tqdm=False)
    assert output.num_cached_tokens is not None
    return list(output.outputs[0].token_ids), output.num_cached_tokens


def conversation(llm: LLM) -> tuple[list[list[int]], list[int]]:
    """Three prompts that share a beginning, one of them again, and three turns. Streams, and what each prompt had found."""
    streams, found = [], []
    prompts = [SYSTEM + prompt(seed, 20) for seed in (2, 3, 4)]
    history = prompts[2]
    for seed, tokens in enumerate([*prompts, prompts[0]]):
        stream, cached = ask(llm, tokens, seed)
        streams.append(stream)
        found.append(cached)
    history = prompts[2] + streams[2]
    for seed in range(3):
        history = history + prompt(10 + seed, 5)
        stream, cached = ask(llm, history, seed, max_tokens=30)
        streams.append(stream)
        found.append(cached)
        history = history + stream
    return streams, found


SLOW = pytest.mark.slow(reason="a dozen engines for each; `test_hybrids` is quick")
HYBRIDS = ["granite-hybrid", "falcon-h1", "qwen3-next"]
OTHERS = sorted(RECURRENT - {"mamba2"})


@pytest.fixture(scope="module", params=["mamba2", *(pytest.param(name, marks=SLOW) for name in OTHERS)])
def folder(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Path:
    made = tmp_path_factory.mktemp(request.param)
    save(request.param, made, max_position_embeddings=256)
    return made


@pytest.fixture(scope="module")
def expected(folder: Path) -> list[list[int]]:
    with LLM(str(folder), **INLINE, enable_prefix_caching=False) as llm:
        streams, found = conversation(llm)
    assert found == [0] * 7
    return streams


@pytest.mark.parametrize("arguments", [{}, {"max_num_batched_tokens": 37}], ids=["whole", "chunks"])
def test_streams_are_those_without_hits(folder: Path, expected: list[list[int]], arguments: dict[str, Any]) -> None:
    with LLM(str(folder), **INLINE | arguments) as llm:
        streams, found = conversation(llm)
        counts = llm.stats()["scheduler"]["scheduler"]["prefix_cache"]
    assert streams == expected
    assert found == [0, 64, 64, 64, 64, 128, 192]
    assert counts["hits"] == sum(found)
    assert counts["num_snapshots"] > 0


def test_preemptions_evictions_and_aborts_change_no_stream(folder: Path, expected: list[list[int]]) -> None:
    """Blocks are few, so that requests give theirs back, and what they had computed may be evicted."""
    prompts = [SYSTEM + prompt(seed, 20) for seed in (2, 3, 4)] * 2
    arguments = {"num_gpu_blocks_override": 34, "max_num_batched_tokens": 64}
    with LLM(str(folder), **INLINE | arguments) as llm:
        asked = [{"prompt_token_ids": tokens} for tokens in prompts]
        many = [params(seed % 3) for seed in range(6)]
        for _ in range(2):
            outputs = llm.generate(asked, many, use_tqdm=False)
            assert [list(one.outputs[0].token_ids) for one in outputs] == expected[:3] * 2
        counts = llm.stats()["scheduler"]["scheduler"]
    assert counts["num_preemptions"] > 0
    assert counts["prefix_cache"]["hits"] > 0
    assert counts["prefix_cache"]["preempted_hits"] > 0


def test_forks_of_a_prompt_that_was_found(folder: Path) -> None:
    def forked(**arguments: Any) -> list[list[int]]:
        with LLM(str(folder), **INLINE | arguments) as llm:
            ask(llm, SYSTEM, 1)
            (output,) = llm.generate([{"prompt_token_ids": [*SYSTEM, 5]}], FORKS, use_tqdm=False)
            assert (output.num_cached_tokens or 0) == (0 if arguments else 64)
            return [list(one.token_ids) for one in output.outputs]

    assert forked() == forked(enable_prefix_caching=False)


def test_an_aborted_request_leaves_what_it_had_computed(folder: Path, expected: list[list[int]]) -> None:
    tokens = {"prompt_token_ids": SYSTEM + prompt(3, 20)}

    async def aborted() -> tuple[list[int], int | None]:
        async with AsyncLLM(str(folder), **INLINE) as engine:
            async for output in engine.generate(tokens, params(1)):
                if len(output.outputs[0].token_ids) >= 5:
                    break
            async for output in engine.generate(tokens, params(1)):
                last = output
            return list(last.outputs[0].token_ids), last.num_cached_tokens

    assert asyncio.run(aborted()) == (expected[1], 64)


def test_streams_survive_the_death_of_worker_and_scheduler(folder: Path, expected: list[list[int]]) -> None:
    """Both have found a snapshot before, and neither does when it goes on."""
    tokens = {"prompt_token_ids": SYSTEM + prompt(3, 20)}

    async def survived() -> tuple[list[int], list[int], int | None]:
        async with AsyncLLM(str(folder), **OPTIONS) as engine:
            async for output in engine.generate(tokens, params(1)):
                first = list(output.outputs[0].token_ids)
            second = await tokens_over_deaths(engine, tokens, params(1))
            async for output in engine.generate(tokens, params(1)):
                last = output
            assert list(last.outputs[0].token_ids) == first
            return first, second, last.num_cached_tokens

    assert asyncio.run(survived()) == (expected[1], expected[1], 64)


def test_a_recording_replays(folder: Path, expected: list[list[int]], tmp_path: Path) -> None:
    file = tmp_path / "record"
    with LLM(str(folder), **INLINE, record=str(file)) as llm:
        assert conversation(llm)[0] == expected
        shape = EngineShape.of(llm.config)
    assert shape.scheduler_arguments()["snapshots"] == 4, "a simulation has as many"
    plans, again = ([pack(plan) for plan in replay(read_recording(file), fresh_scheduler(file))] for _ in range(2))
    assert repr(plans) == repr(again)
    told = list(replay(read_recording(file), fresh_scheduler(file)))
    assert any(plan.saved_states.size for plan in told)
    assert any(plan.restored_states.size for plan in told)


@pytest.mark.parametrize("name", HYBRIDS)
def test_hybrids(name: str, tmp_path: Path) -> None:
    save(name, tmp_path, max_position_embeddings=256)
    with LLM(str(tmp_path), **INLINE, enable_prefix_caching=False) as llm:
        assert llm.config.cache.snapshots == 0
        streams, _ = conversation(llm)
    with LLM(str(tmp_path), **INLINE, max_num_batched_tokens=37) as llm:
        assert llm.config.cache.snapshots == 4
        assert conversation(llm) == (streams, [0, 64, 64, 64, 64, 128, 192])
