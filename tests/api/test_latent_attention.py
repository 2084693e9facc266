"""DeepSeek: streams are those of transformers in every batch, chunk and depth, after preemptions, hits, forks and deaths."""

from __future__ import annotations

import asyncio
from pathlib import Path
from typing import Any

import pytest

from actorllm import LLM, AsyncLLM, SamplingParams
from tests.api.deaths_and_forks import check_forks, tokens_over_deaths
from tests.api.greedy_choices import streams_alone
from tests.api.prompted import DRAFTS
from tests.model.hf.decoders import prompt, save

OPTIONS: dict[str, Any] = {
    "dtype": "float32", "num_threads": 1, "max_model_len": 96, "block_size": 8, "skip_tokenizer_init": True,
}  # fmt: skip
INLINE = OPTIONS | {"topology": "inline"}
NUM_TOKENS = 24
PROMPTS: list[Any] = [{"prompt_token_ids": prompt(seed, length)} for seed, length in enumerate((40, 3, 17, 1, 32, 40))]
PROMPTS[5]["prompt_token_ids"][:32] = PROMPTS[0]["prompt_token_ids"][:32]
PARAMS = [
    SamplingParams(temperature=0.9 * (i % 2), seed=i, max_tokens=NUM_TOKENS, ignore_eos=True)
    for i in range(len(PROMPTS))
]


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("deepseek")


@pytest.fixture(scope="module")
def model(folder: Path) -> Any:
    return save("deepseek-v3", folder)


def run(folder: Path, prompts: list[Any] = PROMPTS, **arguments: Any) -> tuple[list[list[int]], dict[str, Any]]:
    with LLM(str(folder), **INLINE | arguments) as llm:
        outputs = llm.generate(prompts, PARAMS[: len(prompts)], use_tqdm=False)
        statistics = llm.stats()["scheduler"]["scheduler"]
    return [list(output.outputs[0].token_ids) for output in outputs], statistics


@pytest.fixture(scope="module")
def expected(folder: Path, model: Any) -> list[list[int]]:
    return streams_alone(folder, model, PROMPTS, PARAMS, INLINE)


@pytest.mark.parametrize(
    "arguments",
    [
        {"async_scheduling": False, "max_num_batched_tokens": 12},
        {"max_num_batched_tokens": 37},
        {"speculative_config": DRAFTS},
    ],
    ids=["chunks", "depth 2", "drafts"],
)
def test_streams_do_not_depend_on_the_batch(folder: Path, expected: list[list[int]], arguments: dict[str, Any]) -> None:
    assert run(folder, max_num_seqs=8, **arguments)[0] == expected


def test_preempted_requests_have_the_same_streams(folder: Path, expected: list[list[int]]) -> None:
    streams, counts = run(folder, num_gpu_blocks_override=18, max_num_seqs=4, max_num_batched_tokens=64)
    assert streams == expected
    assert counts["num_preemptions"] > 0


def test_cached_requests_have_the_same_streams(folder: Path, expected: list[list[int]]) -> None:
    with LLM(str(folder), **INLINE) as llm:
        for _ in range(2):
            outputs = llm.generate(PROMPTS, PARAMS, use_tqdm=False)
            assert [list(output.outputs[0].token_ids) for output in outputs] == expected
        assert llm.stats()["scheduler"]["scheduler"]["prefix_cache"]["hits"] > 0


def test_forks_have_the_streams_of_requests_of_their_own(folder: Path, model: Any) -> None:
    check_forks(str(folder), PROMPTS[0], INLINE)


def test_streams_survive_the_death_of_worker_and_scheduler(folder: Path, expected: list[list[int]]) -> None:
    async def survived() -> list[int]:
        async with AsyncLLM(str(folder), **OPTIONS) as engine:
            return await tokens_over_deaths(engine, PROMPTS[0], PARAMS[0])

    assert asyncio.run(survived()) == expected[0]


def test_sleep_and_updates(folder: Path, expected: list[list[int]]) -> None:
    with LLM(str(folder), **INLINE, enable_sleep_mode=True) as llm:
        llm.sleep(level=1)
        llm.wake_up()
        outputs = llm.generate(PROMPTS, PARAMS, use_tqdm=False)
    assert [list(output.outputs[0].token_ids) for output in outputs] == expected


@pytest.mark.parametrize(
    "arguments",
    [{"tensor_parallel_size": 2}, {"tensor_parallel_size": 2, "enable_expert_parallel": True}, {"pipeline_parallel_size": 2}],
    ids=["ranks", "whole experts", "stages"],
)  # fmt: skip
@pytest.mark.slow(reason="ranks as processes")
def test_ranks_share_heads_and_each_has_the_latents(
    folder: Path, expected: list[list[int]], arguments: dict[str, Any]
) -> None:
    assert run(folder, topology="process", **arguments)[0] == expected
