"""Models with a KV group of their own for layers with a window: streams are those of transformers and of one group."""

from __future__ import annotations

import asyncio
from pathlib import Path
from typing import Any

import pytest

from actorllm import LLM, AsyncLLM, SamplingParams
from actorllm.actors.record_file import fresh_scheduler, read_recording, recorded_configuration
from actorllm.config import EngineConfig
from actorllm.messages import pack
from actorllm.model.cpu.grouped_cache import GroupedKVCache
from actorllm.model.cpu.runner import CpuRunner
from actorllm.model.families.decoder_config import DecoderConfig
from actorllm.scheduling.telemetry.recording import replay
from actorllm.slo.simulator import EngineShape
from tests.api.deaths_and_forks import check_forks, tokens_over_deaths
from tests.api.greedy_choices import streams_alone
from tests.api.prompted import DRAFTS
from tests.model.architectures import table
from tests.model.hf.decoders import prompt, save

WINDOW, NUM_TOKENS = 10, 30
OPTIONS: dict[str, Any] = {
    "dtype": "float32", "num_threads": 1, "max_model_len": 128, "block_size": 4, "skip_tokenizer_init": True,
}  # fmt: skip
INLINE = OPTIONS | {"topology": "inline"}
PROMPTS: list[Any] = [{"prompt_token_ids": prompt(s, n)} for s, n in enumerate((60, 3, 17, 1, 80, 60, 60))]
PROMPTS[5]["prompt_token_ids"][:48] = PROMPTS[0]["prompt_token_ids"][:48]
PROMPTS[6] = PROMPTS[0]
PARAMS = [
    SamplingParams(temperature=0.9 * (i % 2), seed=i, max_tokens=NUM_TOKENS, ignore_eos=True)
    for i in range(len(PROMPTS))
]


SLOW = pytest.mark.slow(reason="a dozen engines; `test_chunks` is quick")


@pytest.fixture(scope="module", params=["gemma3", "gpt-oss", "mistral", pytest.param("llama4", marks=SLOW)])
def model(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Any]:
    folder = tmp_path_factory.mktemp(request.param)
    more: dict[str, Any] = {"sliding_window": WINDOW}
    if request.param == "gpt-oss":
        more["rope_parameters"] = {"rope_type": "default", "rope_theta": 1e4}
    if request.param == "llama4":
        more = {"attention_chunk_size": WINDOW}
    return folder, save(request.param, folder, max_position_embeddings=256, **more)


def run(folder: Path, rounds: int = 1, **arguments: Any) -> tuple[list[list[int]], dict[str, Any]]:
    with LLM(str(folder), **INLINE | arguments) as llm:
        for _ in range(rounds):
            outputs = llm.generate(PROMPTS, PARAMS, use_tqdm=False)
        has_one = {"speculative_config", "kv_offloading_size"} & set(arguments)
        assert llm.config.cache.window == (None if has_one else WINDOW)
        statistics = llm.stats()["scheduler"]["scheduler"]
    return [list(output.outputs[0].token_ids) for output in outputs], statistics


def test_the_table_of_architectures_says_so() -> None:
    told = [row["architecture"] for row in table("fused") if row["cache"].endswith("given up")]
    llama4 = ["Llama4ForCausalLM", "Llama4ForConditionalGeneration"]
    assert told == ["MistralForCausalLM", "Gemma3ForCausalLM", "GptOssForCausalLM", *llama4]


@pytest.fixture(scope="module")
def expected(model: tuple[Path, Any]) -> list[list[int]]:
    folder, module = model
    return streams_alone(folder, module, PROMPTS, PARAMS, INLINE)


@pytest.mark.parametrize(
    "arguments",
    [
        {"max_num_seqs": 8, "max_num_batched_tokens": 12},
        {"max_num_seqs": 8, "async_scheduling": False},
        {"max_num_seqs": 2, "max_num_batched_tokens": 33},
        {"max_num_seqs": 4, "speculative_config": DRAFTS, "block_size": 8},
        {"max_num_seqs": 4, "kv_offloading_size": 0.01},
    ],
    ids=["chunks", "depth 1", "two at a time", "drafts, in one group", "a tier, in one group"],
)
def test_streams_do_not_depend_on_the_batch(
    model: tuple[Path, Any], expected: list[list[int]], arguments: dict[str, Any]
) -> None:
    assert run(model[0], **arguments)[0] == expected


def test_preempted_and_cached_requests_have_the_same_streams(
    model: tuple[Path, Any], expected: list[list[int]]
) -> None:
    given = {"num_gpu_blocks_override": 45, "max_num_seqs": 4, "max_num_batched_tokens": 20}
    streams, counts = run(model[0], rounds=2, **given)
    assert streams == expected
    assert counts["num_preemptions"] > 0
    assert counts["prefix_cache"]["hits"] > 0


def test_a_hit_needs_only_the_tail_of_the_window(model: tuple[Path, Any], expected: list[list[int]]) -> None:
    """All but the last blocks of the window have been given up, and others were written there since."""
    with LLM(str(model[0]), **INLINE, max_num_seqs=1, max_num_batched_tokens=16) as llm:
        config = llm.config
        assert config.num_window_blocks * config.cache.block_size < 60
        first = llm.generate([PROMPTS[0]], PARAMS[0], use_tqdm=False)[0]
        longer = {"prompt_token_ids": PROMPTS[0]["prompt_token_ids"] + list(first.outputs[0].token_ids)}
        again = llm.generate([longer], PARAMS[0], use_tqdm=False)[0]
        hits = llm.stats()["scheduler"]["scheduler"]["prefix_cache"]["hits"]
    assert hits == (60 + NUM_TOKENS - 1) // 4 * 4
    with LLM(str(model[0]), **INLINE, enable_prefix_caching=False) as llm:
        assert llm.generate([longer], PARAMS[0], use_tqdm=False)[0].outputs[0].token_ids == again.outputs[0].token_ids


def test_chunks(tmp_path: Path) -> None:
    """Attention in chunks: alone, or beside others in pieces, with preemptions and prefix hits."""
    save("llama4", tmp_path, max_position_embeddings=256, attention_chunk_size=WINDOW)
    alone, _ = run(tmp_path, max_num_seqs=1, enable_prefix_caching=False, async_scheduling=False)
    given = {"num_gpu_blocks_override": 45, "max_num_seqs": 4, "max_num_batched_tokens": 20}
    together, counts = run(tmp_path, rounds=2, **given)
    assert together == alone
    assert counts["num_preemptions"] > 0
    assert counts["prefix_cache"]["hits"] > 0


def test_forks_have_the_streams_of_requests_of_their_own(model: tuple[Path, Any]) -> None:
    check_forks(str(model[0]), {"prompt_token_ids": prompt(9, 43)}, INLINE)


def test_a_recording_replays(model: tuple[Path, Any], expected: list[list[int]], tmp_path: Path) -> None:
    file = tmp_path / "record"
    assert run(model[0], max_num_seqs=3, max_num_batched_tokens=20, record=str(file))[0] == expected
    shape = EngineShape.of(recorded_configuration(file).resolved(500, window=WINDOW))
    assert shape.scheduler_arguments()["window"] == WINDOW, "a simulation has the group, too"
    plans, again = ([pack(plan) for plan in replay(read_recording(file), fresh_scheduler(file))] for _ in range(2))
    assert repr(plans) == repr(again)
    assert any(plan.partners.size for plan in replay(read_recording(file), fresh_scheduler(file)))


def test_streams_survive_deaths(model: tuple[Path, Any], expected: list[list[int]]) -> None:
    async def survived() -> list[int]:
        async with AsyncLLM(str(model[0]), **OPTIONS) as engine:
            return await tokens_over_deaths(engine, PROMPTS[0], PARAMS[0])

    assert asyncio.run(survived()) == expected[0]


def test_the_second_group_takes_what_windows_need(model: tuple[Path, Any]) -> None:
    config = EngineConfig.from_arguments(model[0], **INLINE, max_num_seqs=2, max_num_batched_tokens=16)
    runner = CpuRunner(config, show_progress=False)
    runner.load()
    assert runner.cache_window == WINDOW
    assert isinstance(runner.model_config, DecoderConfig)
    one_layer = 2 * runner.num_kv_heads * runner.model_config.head_dim * 4 * 4
    num_whole = runner.model_config.windows.count(None)
    num_windowed = 2 - num_whole
    assert runner.block_bytes == num_whole * one_layer
    most = config.window_blocks(WINDOW, 10_000)
    assert most * 4 < 2 * (WINDOW + 16) + 16 + 16
    assert runner.fixed_cache_bytes == most * num_windowed * one_layer
    for num_blocks in (most // 2, 500):
        num_bytes = (num_blocks * num_whole + min(num_blocks, most) * num_windowed) * one_layer
        assert runner.cache_bytes_of(num_blocks) == num_bytes
        if num_whole or num_blocks < most:
            assert runner._blocks_within(num_bytes) == num_blocks
        else:
            assert runner._blocks_within(num_bytes) == 2 * 128 // 4, "of two sequences: they take no memory"
        runner.allocate_groups(num_blocks, min(num_blocks, most))
        cache = runner.cache
        assert isinstance(cache, GroupedKVCache)
        pools = [group.pool for group in (cache.whole, cache.windowed) if group is not None]
        assert sum(pool[:, :-2].numel() for pool in pools) * 4 == num_bytes


@pytest.mark.parametrize("name", ["tensor_parallel_size", "data_parallel_size"])
@pytest.mark.slow(reason="ranks, and replicas, as processes")
def test_ranks_and_replicas_have_both_groups(model: tuple[Path, Any], expected: list[list[int]], name: str) -> None:
    with LLM(str(model[0]), **OPTIONS, topology="process", max_num_seqs=4, **{name: 2}) as llm:
        outputs = llm.generate(PROMPTS, PARAMS, use_tqdm=False)
    assert [list(output.outputs[0].token_ids) for output in outputs] == expected
