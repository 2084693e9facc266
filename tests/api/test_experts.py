"""Mixtures of experts: streams are those of transformers in every batch, chunk and depth, after preemptions, hits and deaths."""

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

Model = tuple[Path, Any]


@pytest.fixture(scope="module", params=["qwen3-moe", "olmoe", "mixtral", "gpt-oss"])
def model(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Model:
    folder = tmp_path_factory.mktemp(request.param)
    count = "num_local_experts" if request.param in ("mixtral", "gpt-oss") else "num_experts"
    return folder, save(request.param, folder, num_experts_per_tok=3, **{count: 8})


def run(folder: Path, rounds: int = 1, **arguments: Any) -> tuple[list[list[int]], dict[str, Any]]:
    with LLM(str(folder), **INLINE | arguments) as llm:
        for _ in range(rounds):
            outputs = llm.generate(PROMPTS, PARAMS, use_tqdm=False)
        statistics = llm.stats()["scheduler"]["scheduler"]
    return [list(output.outputs[0].token_ids) for output in outputs], statistics


@pytest.fixture(scope="module")
def expected(model: Model) -> list[list[int]]:
    folder, module = model
    return streams_alone(folder, module, PROMPTS, PARAMS, INLINE)


@pytest.mark.parametrize(
    "arguments",
    [
        {"async_scheduling": False, "max_num_batched_tokens": 12},
        {"max_num_batched_tokens": 37},
        {"speculative_config": DRAFTS},
        {"model_impl": "transformers"},
    ],
    ids=["chunks", "depth 2", "drafts", "through transformers"],
)
def test_streams_do_not_depend_on_the_batch(model: Model, expected: list[list[int]], arguments: dict[str, Any]) -> None:
    assert run(model[0], max_num_seqs=8, **arguments)[0] == expected


def test_preempted_requests_have_the_same_streams(model: Model, expected: list[list[int]]) -> None:
    streams, counts = run(model[0], num_gpu_blocks_override=18, max_num_seqs=4, max_num_batched_tokens=64)
    assert streams == expected
    assert counts["num_preemptions"] > 0


def test_cached_requests_have_the_same_streams(model: Model, expected: list[list[int]]) -> None:
    streams, counts = run(model[0], rounds=2)
    assert streams == expected
    assert counts["prefix_cache"]["hits"] > 0


def test_forks_have_the_streams_of_requests_of_their_own(model: Model) -> None:
    check_forks(str(model[0]), PROMPTS[0], INLINE)


def test_streams_survive_the_death_of_worker_and_scheduler(model: Model, expected: list[list[int]]) -> None:
    async def survived() -> list[int]:
        async with AsyncLLM(str(model[0]), **OPTIONS) as engine:
            return await tokens_over_deaths(engine, PROMPTS[0], PARAMS[0])

    assert asyncio.run(survived()) == expected[0]
