"""`kv_cache_dtype="int8"`: streams are the same in every batch, chunk and depth, after preemptions, hits, forks and deaths."""

from __future__ import annotations

import asyncio
from pathlib import Path
from typing import Any

import pytest

from actorllm import LLM, AsyncLLM, SamplingParams
from actorllm.config import EngineConfig
from actorllm.errors import ConfigError
from actorllm.kvcache.prefix_index import extra_key
from tests.api.deaths_and_forks import tokens_over_deaths
from tests.api.prompted import DRAFTS, OTHERS, PARAMS, PROMPT, Stream, streams
from tests.model.hf.decoders import save
from tests.model.ranks import model_folder
from tests.model.ranks import streams as of_ranks

OPTIONS: dict[str, Any] = {
    "dtype": "bfloat16", "kv_cache_dtype": "int8", "num_threads": 1, "max_model_len": 192, "block_size": 16,
}  # fmt: skip
INLINE = OPTIONS | {"topology": "inline"}


@pytest.fixture(scope="module")
def expected() -> Stream:
    """The stream of a request that is computed alone and in one piece."""
    with LLM("storyteller", **INLINE) as llm:
        return streams(llm, [PROMPT])[0]


def test_it_is_another_arithmetic_than_that_of_the_model(expected: Stream) -> None:
    with LLM("storyteller", **INLINE | {"kv_cache_dtype": "auto"}) as llm:
        plain = streams(llm, [PROMPT])[0]
    assert plain != expected
    assert abs(plain[0][1] - expected[0][1]) < 0.1


@pytest.mark.parametrize(
    "arguments",
    [
        {"async_scheduling": False, "max_num_batched_tokens": 24},
        {"max_num_batched_tokens": 37, "num_threads": 2},
        {"speculative_config": DRAFTS},
    ],
    ids=["chunks", "threads", "drafts"],
)
def test_streams_do_not_depend_on_the_batch(arguments: dict[str, Any], expected: Stream) -> None:
    with LLM("storyteller", max_num_seqs=8, enable_prefix_caching=False, **INLINE | arguments) as llm:
        for batch in ([PROMPT], [*OTHERS[:3], PROMPT, *OTHERS[3:]]):
            assert streams(llm, batch)[batch.index(PROMPT)] == expected


def test_preempted_and_cached_requests_have_the_same_streams(expected: Stream) -> None:
    arguments = INLINE | {"max_model_len": 128}
    with LLM("storyteller", num_gpu_blocks_override=9, max_num_seqs=4, **arguments) as llm:
        batch = [PROMPT, *OTHERS[1:4]]
        assert streams(llm, batch)[0] == expected
        assert streams(llm, batch[::-1])[-1] == expected, "with what the first round left behind"
        counts = llm.stats()["scheduler"]["scheduler"]
        assert counts["num_preemptions"] > 0
        assert counts["prefix_cache"]["hits"] > 0


def test_forks_have_the_streams_of_requests_of_their_own() -> None:
    params = SamplingParams(temperature=0.9, n=3, seed=5, max_tokens=30, ignore_eos=True)

    def run(**arguments: Any) -> list[list[int]]:
        with LLM("storyteller", **INLINE | arguments) as llm:
            (output,) = llm.generate([PROMPT], params, use_tqdm=False)
            return [list(one.token_ids) for one in output.outputs]

    together = run(max_num_seqs=4)
    assert together == run(max_num_seqs=1, enable_prefix_caching=False)
    assert len({tuple(stream) for stream in together}) == 3
    stages = run(max_num_seqs=4, topology="process", pipeline_parallel_size=2)
    assert together == stages, "each stage shares the tails of its layers"


def test_streams_survive_the_death_of_a_worker(expected: Stream) -> None:
    async def run() -> list[int]:
        async with AsyncLLM("storyteller", **OPTIONS) as engine:
            return await tokens_over_deaths(engine, PROMPT, PARAMS)

    assert asyncio.run(run()) == [token for token, _ in expected]


def test_models_of_transformers_have_it_too(tmp_path: Path) -> None:
    save("opt", tmp_path)
    prompts: list[Any] = [{"prompt_token_ids": [5 + i, 17, 33, *range(2, 30 + i)]} for i in range(4)]
    params = SamplingParams(temperature=0.0, max_tokens=16, ignore_eos=True)

    def run(**arguments: Any) -> list[list[int]]:
        given = INLINE | {"max_model_len": 64, "skip_tokenizer_init": True} | arguments
        with LLM(str(tmp_path), **given) as llm:
            return [list(o.outputs[0].token_ids) for o in llm.generate(prompts, params, use_tqdm=False)]

    together = run(max_num_seqs=4)
    assert together == run(max_num_seqs=1, max_num_batched_tokens=20)


@pytest.mark.slow(reason="ranks as processes")
def test_each_rank_rounds_the_heads_that_it_has(tmp_path: Path) -> None:
    folder = model_folder(tmp_path)
    one, two = (of_ranks(folder, tensor_parallel_size=size, kv_cache_dtype="int8", block_size=16) for size in (1, 2))
    assert one == two, "float32 differs by rounding only, and a code of a head does not depend on other heads"


@pytest.mark.parametrize(
    ("arguments", "told"),
    [
        (
            {"kv_cache_dtype": "fp8"},
            "kv_cache_dtype='fp8' is not supported with device='cpu' yet; use kv_cache_dtype='int8'",
        ),
        ({"kv_cache_dtype": "fp8_e5m2"}, "kv_cache_dtype='fp8_e5m2' must be one of 'auto', 'int8', 'fp8', 'fp8_e4m3'"),
        ({"runner": "pooling", "convert": "embed"}, "kv_cache_dtype='int8': a model that makes vectors"),
    ],
)
def test_what_it_is_not_made_for_is_refused(arguments: dict[str, Any], told: str) -> None:
    with pytest.raises(ConfigError, match=told):
        LLM("storyteller", **INLINE | arguments)


def test_a_gpu_is_refused_by_name(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("actorllm.types.device.why_not_cuda", lambda: None)
    told = "kv_cache_dtype='int8' is not supported with device='cuda' yet; use kv_cache_dtype='fp8'"
    with pytest.raises(ConfigError, match=told):
        EngineConfig.from_arguments("storyteller", kv_cache_dtype="int8", device="cuda")


def test_blocks_of_another_type_have_other_hashes() -> None:
    plain, small = (
        EngineConfig.from_arguments("storyteller", kv_cache_dtype=kind).cache.hash_key for kind in ("auto", "int8")
    )
    assert extra_key(cache=plain) == extra_key()
    assert extra_key(cache=small) != extra_key()
