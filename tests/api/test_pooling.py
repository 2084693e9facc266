"""Vectors of prompts from decoders: against transformers, whatever the chunks, the cache, the topology, and who dies meanwhile."""

from __future__ import annotations

import copy
import json
import os
import shutil
import signal
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import anyio
import numpy as np
import pytest
import torch
import transformers
from safetensors.torch import load_file, save_file

from actorllm import (
    LLM,
    SLO,
    AsyncLLM,
    EmbeddingRequestOutput,
    EngineArgs,
    LLMEngine,
    PoolerConfig,
    PoolingParams,
    PoolingRequestOutput,
    SamplingParams,
)
from actorllm.client import scoring
from actorllm.config import BUNDLED_MODELS, EngineConfig
from actorllm.errors import ConfigError, InvalidParameterError, InvalidPromptError, UnsupportedModelError
from actorllm.intake import tokenization
from actorllm.types.pooling_outputs import PoolingOutput, cosine

STORYTELLER = BUNDLED_MODELS["storyteller"]
ENGINE: dict[str, Any] = {"runner": "pooling", "dtype": "float32", "num_threads": 1, "max_num_seqs": 16}
TOLERANCE = 1e-5
PROMPTS = [
    "Once upon a time",
    "A fox ran into the forest and " * 12,
    "Hello",
    "There was a king who had three daughters. " * 5,
]


@pytest.fixture
def anyio_backend() -> str:
    return "asyncio"


@pytest.fixture(scope="module")
def llm() -> Iterator[LLM]:
    engine = LLM("storyteller", topology="inline", max_num_batched_tokens=48, **ENGINE)  # prompts come in chunks
    yield engine
    engine.shutdown()


@pytest.fixture(scope="module")
def stock() -> Any:
    return transformers.AutoModel.from_pretrained(str(STORYTELLER), dtype=torch.float32).eval()


@torch.no_grad()
def expected(stock: Any, ids: list[int], pooling: str = "LAST") -> np.ndarray:
    states = stock(torch.tensor([ids])).last_hidden_state[0]
    vector: np.ndarray = {"LAST": states[-1], "MEAN": states.mean(0), "CLS": states[0]}[pooling].numpy()
    return vector


def scaled(vector: np.ndarray) -> np.ndarray:
    return vector / np.linalg.norm(vector)


@pytest.mark.parametrize("pooling", ["LAST", "MEAN", "CLS"])
def test_vectors_are_those_of_transformers_in_chunks_and_with_the_prefix_cache(
    llm: LLM, stock: Any, pooling: str
) -> None:
    for _ in range(2):
        outputs = llm.embed(PROMPTS, pooling_params=PoolingParams(pooling_type=pooling), use_tqdm=False)
        for output in outputs:
            wanted = scaled(expected(stock, output.prompt_token_ids, pooling))
            assert np.abs(wanted - output.outputs.embedding).max() < TOLERANCE
    # of what is found in the cache there are no states
    assert [output.num_cached_tokens > 0 for output in outputs] == [pooling == "LAST" and i in (1, 3) for i in range(4)]


def test_a_vector_is_scaled_unless_it_is_not_wanted(llm: LLM, stock: Any) -> None:
    for params in (PoolingParams(use_activation=False), PoolingParams(normalize=False)):
        (output,) = llm.encode("Once upon a time", params, use_tqdm=False)
        assert isinstance(output, PoolingRequestOutput)
        assert isinstance(output.outputs, PoolingOutput)
        assert isinstance(output.outputs.data, torch.Tensor)
        wanted = expected(stock, output.prompt_token_ids)
        assert np.linalg.norm(wanted) > 2
        assert np.abs(wanted - output.outputs.array).max() < TOLERANCE * np.linalg.norm(wanted)
    (output,) = llm.encode("Once upon a time", use_tqdm=False)
    assert abs(float(output.outputs.data.norm()) - 1) < 1e-6


def test_outputs_have_the_fields_of_vllm(llm: LLM) -> None:
    assert llm.supported_tasks == llm.llm_engine.get_supported_tasks() == ("embed", "token_embed")
    (output,) = llm.embed([{"prompt_token_ids": [1, 2, 3]}], use_tqdm=False)
    assert isinstance(output, EmbeddingRequestOutput)
    assert output.prompt_token_ids == [1, 2, 3]
    assert output.outputs.hidden_size == len(output.outputs.embedding) == 256
    assert (output.finished, output.error) == (True, None)
    assert repr(output.outputs) == "EmbeddingOutput(hidden_size=256)"
    (a, b), metrics = llm.encode([[1, 2], [1, 2]], pooling_task="embed", use_tqdm=False), output.metrics
    assert a.outputs == b.outputs
    assert metrics is not None
    assert metrics.time_to_first_token is not None
    assert metrics.first_token_ts == metrics.last_token_ts > metrics.arrival_time
    assert metrics.num_generation_tokens == 0


def test_scores_are_cosines(llm: LLM) -> None:
    texts = ["a fox", "a king", "a fox"]
    vectors = [output.outputs.embedding for output in llm.embed(texts, use_tqdm=False)]
    one_to_all = llm.score("a fox", texts, use_tqdm=False)
    wanted = [float(np.dot(vectors[0], vector)) for vector in vectors]
    assert [output.outputs.score for output in one_to_all] == pytest.approx(wanted, abs=1e-6)
    each = llm.score(texts, texts[::-1], use_tqdm=False, pooling_params=PoolingParams(use_activation=False))
    assert [output.outputs.score for output in each] == pytest.approx([1, 1, 1], abs=1e-6)
    assert cosine(np.zeros(3, np.float32), np.ones(3, np.float32)) == 0
    for first, second in ((["a", "b"], ["c"]), ([], ["a"]), ("a", [])):
        with pytest.raises(InvalidParameterError, match="compare"):
            llm.score(first, second, use_tqdm=False)


def test_what_cannot_be_is_told_by_name(llm: LLM) -> None:
    room = llm.config.model.max_model_len
    assert len(llm.embed([[1] * room], use_tqdm=False)[0].prompt_token_ids) == room, "there is no token to come"
    with pytest.raises(InvalidPromptError, match=rf"max_model_len is {room}.* {room} or fewer.*truncate_prompt_tokens"):
        llm.embed([[1] * (room + 1)], use_tqdm=False)
    with pytest.raises(InvalidPromptError, match="empty"):
        llm.embed("", use_tqdm=False)
    with pytest.raises(InvalidParameterError, match="does not generate"):
        llm.generate("a fox")
    with pytest.raises(InvalidParameterError, match="pooling_params must be PoolingParams, not SamplingParams"):
        llm.embed("a fox", pooling_params=SamplingParams())  # type: ignore[arg-type]
    with pytest.raises(InvalidParameterError, match="dimensions=8: model 'storyteller' does not support Matryoshka"):
        llm.embed("a fox", pooling_params=PoolingParams(dimensions=8))
    with pytest.raises(
        InvalidParameterError, match="task='classify' is not supported; this engine's tasks are 'embed' and"
    ):
        llm.encode("a fox", pooling_task="classify")
    with pytest.raises(InvalidParameterError, match="2 pooling_params for 1 prompts"):
        llm.embed("a fox", pooling_params=[PoolingParams()] * 2)
    with pytest.raises(
        InvalidParameterError, match="chat_template: only a cross-encoder reads two texts as one prompt"
    ):
        llm.score("a", "b", chat_template="{{ messages }}")
    for wrong, told in (
        ({"pooling_type": "MAX"}, "pooling_type='MAX' is not supported; use 'LAST', 'MEAN', 'CLS'"),
        ({"dimensions": 0}, "dimensions=0 must be >= 1"),
        ({"use_activation": 1}, "use_activation=1 must be True, False or None"),
        ({"use_activation": True, "normalize": False}, "contradict"),
        ({"task": "classifi"}, "task='classifi' is not supported; use 'embed', 'classify', .*did you mean 'classify'"),
        ({"normalise": True}, "no parameter 'normalise'.*normalize"),
        ({"step_tag_id": -3}, "step_tag_id=-3 must be >= 0"),
        ({"returned_token_ids": [True]}, "returned_token_ids=True must be an integer"),
        ({"returned_token_ids": 3}, "returned_token_ids=3 must be a list of at most 1024 integers"),
    ):
        with pytest.raises((ValueError, TypeError), match=told):
            PoolingParams(**wrong)


def test_which_scores_of_tokens_a_reward_model_gives() -> None:
    def pooler(architecture: str, **given: Any) -> Any:
        overrides = {"architectures": [architecture]}
        config = EngineConfig.from_arguments(STORYTELLER, hf_overrides=overrides, pooler_config=given, **ENGINE)
        return EngineConfig.from_json(config.to_json()).model.pooler

    process, plain = "Qwen2ForProcessRewardModel", "Qwen2ForRewardModel"
    assert (pooler(process).step_tag_id, pooler(process).use_activation) == (151651, True)
    assert pooler(process, tok_pooling_type="ALL").step_tag_id is None
    assert pooler(process, step_tag_id=7, returned_token_ids=[1]).returned_ids == (1,)
    assert (pooler(plain).step_tag_id, pooler(plain).use_activation) == (None, False)
    assert pooler(plain, use_activation=True).use_activation
    for wrong, told in (
        ({"tok_pooling_type": "SOME"}, "tok_pooling_type='SOME' is not supported; use 'ALL' or 'STEP'"),
        ({"tok_pooling_type": "ALL", "step_tag_id": 3}, "contradict each other"),
        ({"step_tag_id": True}, "step_tag_id=True must be the id of a token"),
        ({"returned_token_ids": [2]}, "2 is none of the 2 numbers of a vector"),
    ):
        with pytest.raises(ConfigError, match=told):
            pooler(process, **wrong)
    found = pooler(process)
    with pytest.raises(InvalidParameterError, match="returned_token_ids: 9 is none of the 2 numbers"):
        found.resolved(PoolingParams(returned_token_ids=[9]), "m")
    with pytest.raises(InvalidParameterError, match="step_tag_id=3 is for vectors of tokens; this task is 'embed'"):
        EngineConfig.from_arguments(STORYTELLER, **ENGINE).model.pooler.resolved(PoolingParams(step_tag_id=3), "m")


def test_prompts_are_truncated_where_that_is_asked_for(llm: LLM) -> None:
    ids = list(range(10, 40))
    for kwargs, kept in (
        ({"truncate_prompt_tokens": 5}, ids[:5]),
        ({"truncate_prompt_tokens": 5, "truncation_side": "left"}, ids[-5:]),
        ({"truncate_prompt_tokens": -1}, ids),
    ):
        (output,) = llm.embed([ids], tokenization_kwargs=kwargs, use_tqdm=False)
        assert output.prompt_token_ids == kept
    room = llm.config.model.max_model_len
    (output,) = llm.embed(["word " * 5000], tokenization_kwargs={"truncate_prompt_tokens": -1}, use_tqdm=False)
    assert len(output.prompt_token_ids) == room
    whole = llm.embed(["word " * 20], use_tqdm=False)[0].prompt_token_ids
    (output,) = llm.embed(["word " * 20], pooling_params=PoolingParams(truncate_prompt_tokens=4), use_tqdm=False)
    assert output.prompt_token_ids == whole[:4]
    with pytest.raises(InvalidParameterError, match="truncation_side='middle'"):
        llm.embed("a", tokenization_kwargs={"truncation_side": "middle"})


def test_an_engine_that_generates_makes_no_vectors() -> None:
    engine = LLM("storyteller", topology="inline", num_threads=1)
    try:
        with pytest.raises(InvalidParameterError, match="runner='pooling'"):
            engine.embed("a fox")
        with pytest.raises(InvalidParameterError, match=r"PoolingParams: .* use SamplingParams"):
            engine.generate("a fox", PoolingParams())  # type: ignore[arg-type]
    finally:
        engine.shutdown()


def test_stepping_through_vectors(stock: Any) -> None:
    engine = LLMEngine("storyteller", topology="inline", **ENGINE)
    try:
        engine.add_request("a", [1, 2, 3], PoolingParams())
        engine.add_request("b", [4, 5], PoolingParams(pooling_type="mean"))
        outputs: dict[str, Any] = {}
        while engine.has_unfinished_requests():
            outputs |= {output.request_id: output for output in engine.step()}
        assert np.abs(scaled(expected(stock, [1, 2, 3])) - outputs["a"].outputs.array).max() < TOLERANCE
        assert np.abs(scaled(expected(stock, [4, 5], "MEAN")) - outputs["b"].outputs.array).max() < TOLERANCE
    finally:
        engine.shutdown()


@pytest.mark.timeout(150)
async def test_killed_processes_take_no_vector_along(stock: Any) -> None:
    llm = AsyncLLM("storyteller", max_num_batched_tokens=64, enable_prefix_caching=False, name="vectors", **ENGINE)
    async with llm:
        prompts = [list(range(i, i + 40 + 10 * (i % 7))) for i in range(60)]
        params = [PoolingParams(pooling_type=("LAST", "MEAN")[i % 2]) for i in range(60)]
        got: dict[int, EmbeddingRequestOutput] = {}

        async def one(number: int) -> None:
            got[number] = await llm.embed(prompts[number], params[number], slo=SLO(ttft=0.001))
            if len(got) in (10, 20):
                os.kill(llm._engine.pids["worker0" if len(got) == 10 else "scheduler"], signal.SIGKILL)

        with anyio.fail_after(120):
            async with anyio.create_task_group() as tasks:
                for number in range(60):
                    tasks.start_soon(one, number)
        for number, output in got.items():
            wanted = scaled(expected(stock, prompts[number], str(params[number].pooling_type)))
            assert np.abs(wanted - output.outputs.embedding).max() < TOLERANCE
        assert max(output.metrics.num_recoveries for output in got.values() if output.metrics) > 0
        guest = AsyncLLM.attach("vectors")
        joined = await guest.embed(prompts[0], params[0])
        assert np.abs(np.subtract(joined.outputs.embedding, got[0].outputs.embedding)).max() < TOLERANCE
        guest.shutdown()
        stats = (await llm.stats())["scheduler"]
        assert stats["scheduler"]["kv"]["num_free"] == stats["scheduler"]["kv"]["num_blocks"]
        assert stats["requests"]["slo_promised"] > 0
        assert stats["requests"]["histograms"]["time_to_first_token_seconds"]["sum"] > 0


async def test_a_request_that_is_aborted_or_late_has_an_output_without_a_vector() -> None:
    llm = AsyncLLM("storyteller", topology="inline", **ENGINE)
    async with llm:
        await llm.pause_generation(mode="keep")
        stream = llm.encode("a fox", request_id="fox", priority=3)
        late = llm.encode("a fox", timeout=0.01)
        async with llm.encode("a fox"):
            pass  # left: nothing comes
        output = await anext(late)
        assert (output.error.code, output.outputs.array.size) == ("deadline", 0)
        await llm.abort("fox")
        outputs = [output async for output in stream]
        assert [output.error.code for output in outputs if output.error is not None] == ["abort"]
        assert EmbeddingRequestOutput.from_base(outputs[0]).outputs.embedding == []
        await llm.resume_generation()
        (added,) = [output async for output in await llm.add_request("added", "a fox", PoolingParams())]
        assert isinstance(added, PoolingRequestOutput)
        assert added.request_id == "added"
        assert [round(s.outputs.score, 5) for s in await llm.score("a fox", ["a fox"])] == [1]
        assert (await llm.stats())["frontend"]["num_requests"] == 0


async def test_texts_are_compared_on_no_loop(monkeypatch: pytest.MonkeyPatch) -> None:
    """Nor is the tokenizer read there, which nothing needs before where prompts are token ids."""
    threads: dict[str, set[threading.Thread]] = {"cosine": set(), "Tokenizer": set()}

    def record(owner: Any, name: str) -> None:
        right = getattr(owner, name)

        def recorded(*arguments: Any) -> Any:
            threads[name].add(threading.current_thread())
            return right(*arguments)

        monkeypatch.setattr(owner, name, recorded)

    record(scoring, "cosine")
    record(tokenization, "Tokenizer")
    async with AsyncLLM("storyteller", topology="inline", **ENGINE) as llm:
        assert len(await llm.score([1, 2], [[3, 4], [5, 6]])) == 2
    assert all(threads.values())
    assert not any(threading.current_thread() in found for found in threads.values())


async def test_priorities_order_vectors_too() -> None:
    llm = AsyncLLM("storyteller", topology="inline", scheduling_policy="priority", **(ENGINE | {"max_num_seqs": 1}))
    async with llm:
        await llm.pause_generation(mode="keep")
        streams = [llm.encode("a fox", request_id=str(i), priority=priority) for i, priority in enumerate((2, 0, 1))]
        while (await llm.stats())["scheduler"]["scheduler"]["num_waiting"] < len(streams):
            await anyio.sleep(0.001)
        await llm.resume_generation()
        outputs = [await anext(stream) for stream in streams]
    ended = sorted(outputs, key=lambda output: output.metrics.first_token_ts)  # type: ignore[union-attr]
    assert [output.request_id for output in ended] == ["1", "2", "0"]


async def test_whoever_is_displaced_half_way_begins_again(stock: Any) -> None:
    few = ENGINE | {"max_num_seqs": 1, "max_num_batched_tokens": 16}
    llm = AsyncLLM("storyteller", topology="inline", scheduling_policy="priority", **few)
    async with llm:
        ids = list(range(10, 900))
        long = llm.encode(ids, PoolingParams(pooling_type="MEAN"), priority=1)
        with anyio.fail_after(30):
            while not (await llm.stats())["scheduler"]["scheduler"]["num_prefill_tokens"]:
                pass  # asking waits
        await llm.embed([1, 2, 3])
        output = await anext(long)
    assert output.metrics is not None
    assert output.metrics.num_preemptions == 1
    assert np.abs(scaled(expected(stock, ids, "MEAN")) - output.outputs.array).max() < TOLERANCE


@pytest.mark.slow(reason="the model has rows of 4,096 numbers, and a thousand of them are computed")
def test_vectors_that_are_larger_than_a_ring(tmp_path: Path) -> None:
    """A thousand vectors of 4,096 numbers in one step: 16 MiB, twice."""
    changes = {
        "hidden_size": 4096,
        "num_hidden_layers": 1,
        "num_attention_heads": 8,
        "num_key_value_heads": 1,
        "head_dim": 16,
    }
    folder = folder_like(tmp_path, vocab_size=97, intermediate_size=64, **changes)
    arguments: dict[str, Any] = {"max_num_seqs": 1000, "max_num_batched_tokens": 2000, "load_format": "dummy"}
    engine = LLM(folder, skip_tokenizer_init=True, **(ENGINE | arguments))
    try:
        outputs = engine.embed([[i % 97, i // 97] for i in range(2000)], use_tqdm=False)
        (alone,) = engine.embed([[3, 1]], use_tqdm=False)
        assert np.abs(np.subtract(outputs[100].outputs.embedding, alone.outputs.embedding)).max() < TOLERANCE
        assert len({tuple(output.outputs.embedding[:4]) for output in outputs}) == 2000
    finally:
        engine.shutdown()


# What the model's folder says


def folder_like(tmp_path: Path, **changes: Any) -> Path:
    folder = tmp_path / "model"
    shutil.copytree(STORYTELLER, folder, ignore=shutil.ignore_patterns("*.py", "*.md", "generation_config.json"))
    tree = json.loads((folder / "config.json").read_text()) | changes
    (folder / "config.json").write_text(json.dumps(tree))
    return folder


def add_sentence_files(folder: Path, *kinds: str, **pooling: Any) -> None:
    modules = [
        {"idx": i, "path": f"{i}_{kind}", "type": f"sentence_transformers.models.{kind}"}
        for i, kind in enumerate(kinds)
    ]
    (folder / "modules.json").write_text(json.dumps(modules))
    for module in modules:
        (folder / str(module["path"])).mkdir(exist_ok=True)
        (folder / str(module["path"]) / "config.json").write_text(json.dumps(pooling))


def pooler_of(model: Any, **arguments: Any) -> Any:
    return EngineConfig.from_arguments(model, **arguments).model.pooler


def test_the_way_of_pooling_is_that_of_the_folder(tmp_path: Path) -> None:
    folder = folder_like(tmp_path)
    assert pooler_of(folder) is None
    for architecture, pools in (("GPT2LMHeadModel", False), ("QWenChatModel", False), ("Qwen3Model", True)):
        shutil.rmtree(folder)
        assert (pooler_of(folder_like(tmp_path, architectures=[architecture])) is not None) == pools, architecture
    shutil.rmtree(folder)
    folder = folder_like(tmp_path)
    assert (pooler_of(folder, runner="pooling").pooling_type, pooler_of(folder, convert="embed").use_activation) == (
        "LAST",
        True,
    )
    add_sentence_files(folder, "Transformer", "Pooling", pooling_mode_mean_tokens=True, pooling_mode_cls_token=False)
    assert (pooler_of(folder).pooling_type, pooler_of(folder).use_activation) == ("MEAN", False)
    add_sentence_files(folder, "Transformer", "Pooling", "Normalize", pooling_mode="lasttoken")
    assert (pooler_of(folder).pooling_type, pooler_of(folder).use_activation) == ("LAST", True)
    config = PoolerConfig(pooling_type="CLS", use_activation=False)
    assert (
        pooler_of(folder, pooler_config=config).pooling_type,
        pooler_of(folder, pooler_config=config).use_activation,
    ) == ("CLS", False)
    assert pooler_of(folder, pooler_config='{"seq_pooling_type": "mean"}').pooling_type == "MEAN"
    assert pooler_of(folder, runner="generate") is None
    add_sentence_files(folder, "Transformer", "Pooling", pooling_mode_max_tokens=True)
    with pytest.raises(UnsupportedModelError, match=r"pools by 'max_tokens'.*pooler_config"):
        pooler_of(folder)
    add_sentence_files(folder, "Transformer", "Pooling", pooling_mode_mean_tokens=True, pooling_mode_cls_token=True)
    with pytest.raises(UnsupportedModelError, match="joins"):
        pooler_of(folder)
    add_sentence_files(folder, "Transformer", "Pooling", "Dense", pooling_mode_mean_tokens=True)
    with pytest.raises(UnsupportedModelError, match="module of type 'Dense'"):
        pooler_of(folder)
    assert pooler_of(folder, runner="generate") is None
    (folder / "sentence_bert_config.json").write_text('{"max_seq_length": 77, "do_lower_case": true}')
    add_sentence_files(folder, "Transformer", "Pooling", pooling_mode_mean_tokens=True)
    assert EngineConfig.from_arguments(folder).model.max_model_len == 77
    assert EngineConfig.from_arguments(folder, max_model_len=100).model.max_model_len == 100
    assert pooler_of(folder).lowercases


def test_arguments_that_do_not_go_together(tmp_path: Path) -> None:
    for arguments, told in (
        ({"runner": "poolin"}, "runner='poolin'.*'pooling'"),
        ({"convert": "classify"}, "convert='classify' is not supported"),
        ({"convert": "embed", "runner": "generate"}, "convert='embed' needs runner='pooling'"),
        ({"pooler_config": {}}, "pooler_config={} needs runner='pooling'"),
        ({"runner": "pooling", "convert": "none"}, "convert='none'"),
        ({"runner": "pooling", "pooler_config": {"pooling": "MEAN"}}, "pooler_config: .*'pooling'"),
        ({"runner": "pooling", "pooler_config": {"pooling_type": "ALL"}}, "pooling_type='ALL'"),
        ({"runner": "pooling", "pooler_config": "MEAN"}, "not valid JSON"),
        ({"runner": "pooling", "pooler_config": {"dimensions": 64}}, "pooler_config: dimensions=64"),
        ({"runner": "pooling", "pooler_config": {"task": "classify"}}, "task='classify'"),
        ({"runner": "pooling", "pooler_config": {"normalize": 3}}, "normalize=3"),
        ({"runner": "pooling", "max_num_seqs": 20_000, "max_num_batched_tokens": 20_000}, "use max_num_seqs=16384"),
        ({"hf_overrides": ["hidden_size"]}, "hf_overrides=.* must be a mapping"),
        ({"hf_overrides": "{"}, "hf_overrides='{' is not valid JSON"),
        ({"hf_overrides": {"hidden_size": object()}}, "hf_overrides=.* must hold what JSON knows"),
    ):
        with pytest.raises(ConfigError, match=told):
            EngineConfig.from_arguments("storyteller", **arguments)
    with pytest.raises(UnsupportedModelError, match="of the heads that classify"):
        pooler_of(folder_like(tmp_path, architectures=["LlamaForRewardModel"]), runner="pooling")
    config = EngineArgs("storyteller", runner="pooling", pooler_config={"pooling_type": "MEAN"}).create_engine_config()
    assert EngineConfig.from_json(config.to_json()) == config


def test_a_model_without_a_head_and_shorter_vectors(tmp_path: Path, stock: Any) -> None:
    """As Qwen3's embedding models are saved: tensors without the prefix of a body."""
    architecture = json.loads((STORYTELLER / "config.json").read_text())["architectures"][0]
    folder = folder_like(
        tmp_path, architectures=[architecture.replace("ForCausalLM", "Model")], matryoshka_dimensions=[32, 64]
    )
    tensors = load_file(folder / "model.safetensors")
    bare = {name.removeprefix("model."): tensor for name, tensor in tensors.items() if name != "lm_head.weight"}
    save_file(bare, folder / "model.safetensors", metadata={"format": "pt"})
    engine = LLM(
        folder, topology="inline", pooler_config={"dimensions": 64}, **(copy.copy(ENGINE) | {"runner": "auto"})
    )
    try:
        wanted = expected(stock, [5, 6, 7])
        outputs = engine.embed(
            [[5, 6, 7]] * 2, pooling_params=[PoolingParams(), PoolingParams(dimensions=32)], use_tqdm=False
        )
        for output, size in zip(outputs, (64, 32), strict=True):
            assert np.abs(scaled(wanted[:size]) - output.outputs.embedding).max() < TOLERANCE
        with pytest.raises(InvalidParameterError, match="was trained for 32, 64"):
            engine.embed([[5]], pooling_params=PoolingParams(dimensions=48))
    finally:
        engine.shutdown()
