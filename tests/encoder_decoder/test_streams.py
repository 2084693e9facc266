"""Models with an encoder and a decoder: logits of transformers, and equal streams in every batch, after preemptions and deaths."""

from __future__ import annotations

import asyncio
import os
import signal
from pathlib import Path
from typing import Any

import pytest
import torch

from actorllm import LLM, AsyncLLM, SamplingParams
from actorllm.config import EngineConfig
from actorllm.errors import UnsupportedModelError
from actorllm.model.cpu.attention import KVCache
from actorllm.model.cpu.runner import CpuRunner
from actorllm.model.quantization import int8
from actorllm.model.quantization.onednn import is_exact
from actorllm.types.encoder_decoder import ARCHITECTURES
from tests.api.deaths_and_forks import check_forks, tokens_over_deaths
from tests.encoder_decoder.small_models import SAVE, START, VOCABULARY, ids, logits, stock, write_json
from tests.model.architectures import table

BLOCK, NUM_TOKENS, MARGIN = 4, 24, 1e-4
OPTIONS: dict[str, Any] = {
    "dtype": "float32", "num_threads": 1, "block_size": BLOCK, "skip_tokenizer_init": True, "max_logprobs": -1,
}  # fmt: skip
INLINE = OPTIONS | {"topology": "inline"}
SIZES = ((40, 0), (3, 1), (17, 6), (1, 0), (32, 3), (40, 5))
"""Of what the encoder gets, and of what the decoder begins with."""


def prompts(start: list[int]) -> list[dict[str, Any]]:
    made = [
        {"encoder_prompt": ids(seed, source), "decoder_prompt": start + ids(100 + seed, target)}
        for seed, (source, target) in enumerate(SIZES)
    ]
    made[5]["encoder_prompt"] = made[0]["encoder_prompt"]
    return made


PARAMS = [
    SamplingParams(temperature=0.9 * (i % 2), seed=i, max_tokens=NUM_TOKENS, ignore_eos=True) for i in range(len(SIZES))
]


class Model:
    def __init__(self, folder: Path, start: list[int]) -> None:
        self.folder, self.prompts, self.stock = folder, prompts(start), stock(folder)
        self.expected, _ = self.run(max_num_seqs=1, enable_prefix_caching=False, async_scheduling=False)

    def run(self, **arguments: Any) -> tuple[list[list[int]], dict[str, Any]]:
        with LLM(str(self.folder), **INLINE | arguments) as llm:
            outputs = llm.generate(self.prompts, PARAMS, use_tqdm=False)
            statistics = llm.stats()["scheduler"]["scheduler"]
        return [list(output.outputs[0].token_ids) for output in outputs], statistics


@pytest.fixture(scope="module", params=["bart", "t5"])
def model(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Model:
    return Model(SAVE[request.param](tmp_path_factory.mktemp(request.param)), [2] if request.param == "bart" else [0])


@pytest.mark.parametrize("name", SAVE)
def test_every_logit_is_that_of_transformers(name: str, tmp_path: Path) -> None:
    """Rows that join one by one, in chunks that end among rows of the encoder, and as decode rows."""
    folder = SAVE[name](tmp_path)
    params = SamplingParams(temperature=0.8, seed=1, max_tokens=12, ignore_eos=True, logprobs=-1)
    given = [{"encoder_prompt": ids(1, 21), "decoder_prompt": ids(5, 4)}, {"prompt_token_ids": ids(2, 7)}]
    with LLM(str(folder), max_num_batched_tokens=6, max_num_seqs=4, **INLINE) as llm:
        outputs = llm.generate(given, params, use_tqdm=False)
    judge = stock(folder)
    for output in outputs:
        completion = output.outputs[0]
        assert output.encoder_prompt_token_ids is not None
        known = output.prompt_token_ids + list(completion.token_ids)
        wanted = logits(judge, output.encoder_prompt_token_ids, known)[
            len(output.prompt_token_ids) - 1 : -1
        ].log_softmax(1)
        assert completion.logprobs is not None
        found = torch.tensor([[row[token].logprob for token in range(VOCABULARY)] for row in completion.logprobs])
        assert (found - wanted).abs().max() < 1e-3
        assert len(set(completion.token_ids)) > 4


@pytest.mark.parametrize(("name", "head_dim"), [("bart", 12), ("t5", 20)])
def test_a_position_has_a_key_and_a_value_of_each_head_and_layer(name: str, head_dim: int, tmp_path: Path) -> None:
    """A row of the encoder takes what a token of the decoder does: nothing is kept twice."""
    runner = CpuRunner(EngineConfig.from_arguments(SAVE[name](tmp_path), **INLINE), show_progress=False)
    runner.load()
    assert runner.block_bytes == 2 * 3 * 4 * head_dim * BLOCK * 4
    runner.allocate(10)
    assert isinstance(runner.cache, KVCache)
    assert runner.cache.pool[:, 0].numel() * 4 == runner.block_bytes


def test_single_bad_words_are_never_written(tmp_path: Path) -> None:
    """As by `generate` of transformers: models of Marian would write padding."""
    folder = SAVE["marian"](tmp_path)
    source, target = ids(1, 21), [START]
    params = SamplingParams(temperature=0, max_tokens=16, ignore_eos=True)

    def stream() -> list[int]:
        with LLM(str(folder), **INLINE) as llm:
            given = {"encoder_prompt": source, "decoder_prompt": target}
            return list(llm.generate([given], params, use_tqdm=False)[0].outputs[0].token_ids)

    never = sorted(set(stream()[::2]))
    write_json(folder, "generation_config.json", {"bad_words_ids": [[7, 8], *([token] for token in never)]})
    found = stream()
    assert not set(found) & set(never)
    made = logits(stock(folder), source, target + found)[len(target) - 1 : -1]
    made[:, never] = -torch.inf
    chosen = made.gather(1, torch.tensor([found]).T)[:, 0]
    assert (chosen > made.amax(1) - MARGIN).all()


def test_every_architecture_that_is_served_is_tried() -> None:
    assert {row["architecture"] for row in table("encoder-decoder")} == set(ARCHITECTURES)


def test_greedy_streams_are_transformers_choices(model: Model) -> None:
    for one, stream in zip(model.prompts[::2], model.expected[::2], strict=True):
        target = one["decoder_prompt"]
        made = logits(model.stock, one["encoder_prompt"], target + stream)[len(target) - 1 : -1]
        chosen = made.gather(1, torch.tensor([stream]).T)[:, 0]
        assert (chosen > made.amax(1) - MARGIN).all()


@pytest.mark.parametrize(
    "arguments",
    [{"async_scheduling": False, "max_num_batched_tokens": 9}, {"max_num_batched_tokens": 37}, {"block_size": 16}],
    ids=["chunks", "depth 2", "rows and tokens in one block"],
)
def test_streams_do_not_depend_on_the_batch(model: Model, arguments: dict[str, Any]) -> None:
    assert model.run(max_num_seqs=8, **arguments)[0] == model.expected


def test_preempted_requests_have_the_same_streams(model: Model) -> None:
    streams, counts = model.run(num_gpu_blocks_override=34, max_num_seqs=4, max_num_batched_tokens=64)
    assert streams == model.expected
    assert counts["num_preemptions"] > 0


def test_cached_requests_have_the_same_streams(model: Model) -> None:
    """Rows of the encoder are found with the tokens behind them; those of another input never are."""
    with LLM(str(model.folder), **INLINE) as llm:
        for _ in range(2):
            outputs = llm.generate(model.prompts, PARAMS, use_tqdm=False)
            assert [list(output.outputs[0].token_ids) for output in outputs] == model.expected
        assert llm.stats()["scheduler"]["scheduler"]["prefix_cache"]["hits"] > 0
        target = model.prompts[0]["decoder_prompt"] + ids(7, 20)
        one, other = ids(50, 40), ids(51, 40)
        params = SamplingParams(temperature=0, max_tokens=8, ignore_eos=True)
        asked = [{"encoder_prompt": source, "decoder_prompt": target} for source in (one, other, one)]
        found = [llm.generate([prompt], params, use_tqdm=False)[0] for prompt in asked]
        assert found[0].num_cached_tokens == found[1].num_cached_tokens == 0
        assert found[2].num_cached_tokens > 0
        assert found[2].outputs[0].token_ids == found[0].outputs[0].token_ids
        assert llm.stats()["encoder"]["num_encoded"] == 7


def test_forks_have_the_streams_of_requests_of_their_own(model: Model) -> None:
    check_forks(str(model.folder), model.prompts[2], INLINE)


@pytest.mark.slow(reason="loads transformers in five processes")
@pytest.mark.timeout(300)
def test_streams_survive_the_death_of_worker_scheduler_and_encoder(model: Model) -> None:
    async def survived() -> list[list[int]]:
        async with AsyncLLM(str(model.folder), **OPTIONS) as engine:
            tokens = await tokens_over_deaths(engine, model.prompts[0], PARAMS[0])
            os.kill(engine._engine.statistics()["encoder"]["process_pid"], signal.SIGKILL)
            last: Any = None
            async for output in engine.generate(model.prompts[1], PARAMS[1]):
                last = output
            assert engine._engine.statistics()["encoder"]["num_restarts"] == 1
            return [tokens, list(last.outputs[0].token_ids)]

    assert asyncio.run(survived()) == model.expected[:2]


def test_sleep_gives_back_weights_and_cache(model: Model) -> None:
    with LLM(str(model.folder), **INLINE, enable_sleep_mode=True) as llm:
        llm.sleep(level=1)
        llm.wake_up()
        outputs = llm.generate(model.prompts, PARAMS, use_tqdm=False)
    assert [list(output.outputs[0].token_ids) for output in outputs] == model.expected


@pytest.mark.parametrize(("method", "most"), [("int8", 0.3), ("int4", 0.5)])
def test_rounded_weights(model: Model, method: str, most: float) -> None:
    """Logits are near to those of transformers, and streams depend on nothing else in the batch."""
    if not is_exact():
        pytest.skip("sums of 8 bits are not exact here: no VNNI")
    rounding = {"quantization": method, "compute_scheme": method}
    params = SamplingParams(temperature=0, max_tokens=8, ignore_eos=True, logprobs=-1)
    with LLM(str(model.folder), **INLINE, **rounding) as llm:
        (output,) = llm.generate(model.prompts[:1], params, use_tqdm=False)
    target = model.prompts[0]["decoder_prompt"] + list(output.outputs[0].token_ids)
    wanted = logits(model.stock, model.prompts[0]["encoder_prompt"], target)[-9:-1].log_softmax(1)
    assert output.outputs[0].logprobs is not None
    rows = [[row[token].logprob for token in range(VOCABULARY)] for row in output.outputs[0].logprobs]
    distance = float((torch.tensor(rows) - wanted).square().mean().sqrt() / wanted.std())
    assert 1e-4 < distance < most
    alone, _ = model.run(max_num_seqs=1, enable_prefix_caching=False, async_scheduling=False, **rounding)
    assert alone != model.expected
    together, counts = model.run(max_num_seqs=4, num_gpu_blocks_override=34, max_num_batched_tokens=64, **rounding)
    assert together == alone
    assert counts["num_preemptions"] > 0


def test_rounding_that_breaks_a_model_is_refused(model: Model, monkeypatch: pytest.MonkeyPatch) -> None:
    if not is_exact():
        pytest.skip("sums of 8 bits are not exact here: no VNNI")
    monkeypatch.setattr(int8.Int8, "LARGEST", 3)
    config = EngineConfig.from_arguments(model.folder, **INLINE, quantization="int8", compute_scheme="int8")
    with pytest.raises(UnsupportedModelError, match=r"quantization='int8': the logits of architecture '(Bart|T5)For"):
        CpuRunner(config, show_progress=False).load()


@pytest.mark.parametrize("dtype", ["bfloat16", "float16"])
def test_narrow_types_and_random_weights_run(model: Model, dtype: str) -> None:
    for load_format in ("auto", "dummy"):
        with LLM(str(model.folder), **INLINE | {"dtype": dtype, "load_format": load_format}) as llm:
            outputs = llm.generate(model.prompts[:2], PARAMS[:2], use_tqdm=False)
        assert [len(output.outputs[0].token_ids) for output in outputs] == [NUM_TOKENS] * 2
