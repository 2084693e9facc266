"""Recurrent layers: streams are those of transformers in every batch, chunk and depth, after preemptions, forks and deaths.

A state belongs to a slot. So slots that are given to other requests, in the middle of what they compute, are tried as well.
"""

from __future__ import annotations

import asyncio
from pathlib import Path
from typing import Any

import pytest

from actorllm import LLM, AsyncLLM, LoRARequest, SamplingParams
from actorllm.errors import ConfigError, UnsupportedModelError
from actorllm.model.cpu.recurrent.states import StateRows
from tests.api.deaths_and_forks import check_forks, tokens_over_deaths
from tests.api.greedy_choices import check_choices, streams_alone
from tests.api.prompted import DRAFTS
from tests.model.adapters.lora_folders import adaptable, merged, write_adapter
from tests.model.hf.decoders import prompt, save

OPTIONS: dict[str, Any] = {
    "dtype": "float32", "num_threads": 1, "max_model_len": 192, "block_size": 8, "skip_tokenizer_init": True,
}  # fmt: skip
INLINE = OPTIONS | {"topology": "inline"}
NUM_TOKENS = 24
PROMPTS: list[Any] = [{"prompt_token_ids": prompt(seed, length)} for seed, length in enumerate((40, 3, 150, 1, 64, 40))]
PROMPTS[5]["prompt_token_ids"][:32] = PROMPTS[0]["prompt_token_ids"][:32]
PARAMS = [
    SamplingParams(temperature=0.9 * (i % 2), seed=i, max_tokens=NUM_TOKENS, ignore_eos=True)
    for i in range(len(PROMPTS))
]

SLOW = pytest.mark.slow(reason="a dozen engines for each; `test_hybrids` is quick")
HYBRIDS = ["granite-hybrid", "falcon-h1", "qwen3-next", "mamba", "recurrent-gemma", "lfm2", "jamba", "nemotron-h"]
FAMILIES = ["mamba2", *(pytest.param(name, marks=SLOW) for name in HYBRIDS)]


@pytest.fixture(scope="module", params=FAMILIES)
def model(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Any]:
    folder = tmp_path_factory.mktemp(request.param)
    return folder, save(request.param, folder, max_position_embeddings=256)


@pytest.fixture(scope="module")
def folder(model: tuple[Path, Any]) -> Path:
    return model[0]


def run(folder: Path, prompts: list[Any] = PROMPTS, **arguments: Any) -> tuple[list[list[int]], dict[str, Any]]:
    with LLM(str(folder), **INLINE | arguments) as llm:
        outputs = llm.generate(prompts, PARAMS[: len(prompts)], use_tqdm=False)
        statistics = llm.stats()["scheduler"]["scheduler"]
    return [list(output.outputs[0].token_ids) for output in outputs], statistics


@pytest.fixture(scope="module")
def expected(model: tuple[Path, Any]) -> list[list[int]]:
    folder, module = model
    return streams_alone(folder, module, PROMPTS, PARAMS, INLINE, is_fresh=True)


@pytest.mark.parametrize(
    "arguments",
    [
        {"async_scheduling": False, "max_num_batched_tokens": 12},
        {"max_num_batched_tokens": 37, "max_num_seqs": 3},
        {"max_num_batched_tokens": 256},
    ],
    ids=["chunks", "slots change hands", "depth 2"],
)
def test_streams_do_not_depend_on_the_batch(folder: Path, expected: list[list[int]], arguments: dict[str, Any]) -> None:
    assert run(folder, **{"max_num_seqs": 8} | arguments)[0] == expected


def test_preempted_requests_have_the_same_streams(folder: Path, expected: list[list[int]]) -> None:
    streams, counts = run(folder, num_gpu_blocks_override=30, max_num_seqs=4, max_num_batched_tokens=64)
    assert streams == expected
    assert counts["num_preemptions"] > 0


def test_control_a_state_that_is_not_reset_is_seen(
    folder: Path, expected: list[list[int]], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Planted: a sequence begins with what the slot had, as one that goes on does."""

    def going_on(rows: StateRows, *arguments: Any) -> None:
        begin(rows, *arguments)
        rows.pieces = [piece._replace(position=piece.position or 64 * len(rows.pieces)) for piece in rows.pieces]

    begin = StateRows.__init__
    monkeypatch.setattr(StateRows, "__init__", going_on)
    streams, _ = run(folder, max_num_seqs=1, async_scheduling=False)
    assert streams[0] == expected[0], "a slot that was never used begins with zeros"
    assert streams[3] != expected[3], "one token, in the slot of a long request"


def test_a_slot_whose_request_was_aborted_is_as_new(folder: Path, expected: list[list[int]]) -> None:
    async def aborted() -> list[int]:
        async with AsyncLLM(str(folder), **INLINE, max_num_seqs=1) as engine:
            async for output in engine.generate(PROMPTS[2], PARAMS[2]):
                if len(output.outputs[0].token_ids) >= 5:
                    break
            tokens: list[int] = []
            async for output in engine.generate(PROMPTS[0], PARAMS[0]):
                tokens = list(output.outputs[0].token_ids)
            return tokens

    assert asyncio.run(aborted()) == expected[0]


def test_forks_have_the_streams_of_requests_of_their_own(folder: Path) -> None:
    check_forks(str(folder), PROMPTS[0], INLINE)


def test_streams_survive_the_death_of_worker_and_scheduler(folder: Path, expected: list[list[int]]) -> None:
    async def survived() -> list[int]:
        async with AsyncLLM(str(folder), **OPTIONS, max_num_seqs=4) as engine:
            return await tokens_over_deaths(engine, PROMPTS[0], PARAMS[0])

    assert asyncio.run(survived()) == expected[0]


def test_sleep_and_updates(folder: Path, expected: list[list[int]]) -> None:
    with LLM(str(folder), **INLINE, max_num_seqs=4, enable_sleep_mode=True) as llm:
        llm.sleep(level=1)
        llm.wake_up()
        outputs = llm.generate(PROMPTS, PARAMS, use_tqdm=False)
    assert [list(output.outputs[0].token_ids) for output in outputs] == expected


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"speculative_config": DRAFTS}, "speculative_config .* recurrent layers .* leave it out"),
        ({"batch_invariant": True}, "batch_invariant=True .* leave it out"),
        ({"kv_cache_dtype": "int8"}, "kv_cache_dtype='int8' .* leave it out"),
        ({"tensor_parallel_size": 2, "topology": "process"}, "tensor_parallel_size=2 .* set it to 1"),
        ({"kv_offloading_size": 0.01}, "a KV tier .kv_offloading_size. .* leave it out"),
    ],
    ids=lambda value: next(iter(value)) if isinstance(value, dict) else "",
)  # fmt: skip
def test_what_is_not_combined_is_refused_by_name(folder: Path, arguments: dict[str, Any], message: str) -> None:
    with pytest.raises((UnsupportedModelError, ConfigError), match=message):
        LLM(str(folder), **INLINE | {"max_num_seqs": 4} | arguments)


@pytest.mark.parametrize("name", ["falcon-h1", "lfm2"])
def test_adapters(name: str, tmp_path: Path) -> None:
    """Streams of merged weights, in chunks and slots that change hands, over preemptions, and with hits of their own."""
    model = save(name, tmp_path / "base", max_position_embeddings=256)
    other = merged(model, write_adapter(tmp_path / "lora", adaptable(model), seed=1, size=1.0))
    lora = LoRARequest("lora", 1, str(tmp_path / "lora"))
    few: dict[str, Any] = {"max_num_seqs": 4, "max_num_batched_tokens": 37, "num_gpu_blocks_override": 30}
    params = SamplingParams(temperature=0, max_tokens=NUM_TOKENS, ignore_eos=True)
    with LLM(str(tmp_path / "base"), **INLINE | few, enable_lora=True, max_lora_rank=8) as llm:
        for adapter, module in ((None, model), (lora, other)):
            for num_cached in (0, 128):
                (output,) = llm.generate(PROMPTS[2:3], params, use_tqdm=False, lora_request=adapter)
                check_choices(module, PROMPTS[2:3], [list(output.outputs[0].token_ids)])
                assert output.num_cached_tokens == num_cached
        both = llm.generate(PROMPTS * 2, params, use_tqdm=False, lora_request=[None, lora] * len(PROMPTS))
        streams = [list(output.outputs[0].token_ids) for output in both]
        check_choices(model, [*PROMPTS, *PROMPTS][::2], streams[::2])
        check_choices(other, [*PROMPTS, *PROMPTS][1::2], streams[1::2])
        assert llm.stats()["scheduler"]["scheduler"]["num_preemptions"] > 0


@pytest.mark.parametrize("name", HYBRIDS)
def test_hybrids(name: str, tmp_path: Path) -> None:
    """Alone and in one piece, or in chunks beside others, with preemptions, in slots that change hands."""
    save(name, tmp_path, max_position_embeddings=256)
    alone, _ = run(tmp_path, max_num_seqs=1, async_scheduling=False)
    together, counts = run(tmp_path, max_num_seqs=4, max_num_batched_tokens=37, num_gpu_blocks_override=30)
    assert together == alone
    assert counts["num_preemptions"] > 0


def test_states_that_do_not_fit_are_refused_with_the_number_that_does(folder: Path) -> None:
    with pytest.raises(ConfigError, match=r"max_num_seqs=512: .* bytes of 100,000; set max_num_seqs=\d+ or less"):
        LLM(str(folder), **INLINE, max_num_seqs=512, kv_cache_memory_bytes=100_000)
