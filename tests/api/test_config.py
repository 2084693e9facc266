"""`EngineConfig`: the arguments of the front doors, and the folder of a model."""

from __future__ import annotations

import math
import shutil
from dataclasses import FrozenInstanceError, replace
from pathlib import Path
from typing import Any

import orjson
import pytest
from hypothesis import given
from hypothesis import strategies as st

from actorllm import AsyncLLM, EngineArgs
from actorllm.config import (
    ARGUMENTS,
    BUNDLED_MODELS,
    CacheConfig,
    EngineConfig,
    ModelConfig,
    SchedulerConfig,
)
from actorllm.errors import (
    ConfigError,
    CorruptModelError,
    ModelNotFoundError,
    UnknownArgumentError,
    UnsupportedModelError,
)
from actorllm.types.vllm_options import HARMLESS, VLLM_ARGUMENTS

STORYTELLER = BUNDLED_MODELS["storyteller"]


def config_of(**arguments: Any) -> EngineConfig:
    return EngineConfig.from_arguments("storyteller", **arguments)


def test_the_defaults() -> None:
    config = config_of()
    assert config.model.path == str(STORYTELLER)
    assert config.model.tokenizer == str(STORYTELLER)
    assert config.model.architecture == "LlamaForCausalLM"
    assert (config.model.dtype, config.model.max_model_len, config.model.vocab_size) == ("bfloat16", 1024, 4096)
    assert config.model.eos_token_ids == (0,)
    assert (config.cache.block_size, config.cache.num_blocks) == (32, None)
    assert (config.scheduler.max_num_seqs, config.scheduler.depth, config.scheduler.policy) == (256, 2, "fcfs")
    assert (config.topology, config.world_size) == ("process", 1)
    assert config == config_of(**ARGUMENTS), "every default may be written out"


def test_it_is_frozen_and_resolving_makes_a_new_one() -> None:
    config = config_of()
    resolved = config.resolved(100)
    assert resolved.cache.num_blocks == 100
    assert config.cache.num_blocks is None
    with pytest.raises(FrozenInstanceError):
        config.topology = "inline"  # type: ignore[misc]


def test_too_little_memory_for_one_sequence_says_what_would_fit() -> None:
    with pytest.raises(ConfigError, match=r"holds 320 tokens .* max_model_len=1024; .* set max_model_len=320 or less"):
        config_of().resolved(10)
    assert config_of(max_model_len=320).resolved(10).cache.num_blocks == 10
    with pytest.raises(
        ConfigError, match=r"holds 0 tokens .* give more memory \(kv_cache_memory_bytes, gpu_memory_util"
    ):
        config_of().resolved(0)


text = st.text(max_size=8)
number = st.integers(1, 2**31)


@given(
    st.builds(
        EngineConfig,
        model=st.builds(
            ModelConfig,
            name=text,
            path=text,
            tokenizer=st.none() | text,
            architecture=text,
            dtype=st.sampled_from(["float32", "bfloat16"]),
            max_model_len=number,
            vocab_size=number,
            eos_token_ids=st.lists(number, max_size=3).map(tuple),
            load_format=st.sampled_from(["auto", "safetensors", "dummy"]),
            seed=st.integers(-(2**63), 2**63 - 1),
        ),
        cache=st.builds(
            CacheConfig,
            block_size=number,
            num_blocks=st.none() | number,
            kv_cache_memory_bytes=st.none() | st.integers(1, 2**50),
            memory_utilization=st.none() | st.floats(0.01, 1),
            enable_prefix_caching=st.booleans(),
        ),
        scheduler=st.builds(
            SchedulerConfig,
            max_num_seqs=number,
            max_num_batched_tokens=number,
            depth=st.sampled_from([1, 2]),
            policy=text,
            long_prefill_token_threshold=number,
            max_num_partial_prefills=number,
            watermark=st.floats(0, 0.5),
            num_lookahead_tokens=number,
        ),
        topology=st.sampled_from(["process", "inline"]),
        world_size=number,
        device=st.just("cpu"),
        num_threads=st.none() | number,
        name=st.none() | text,
        record=st.none() | text,
        seed=st.none() | st.integers(-(2**63), 2**63 - 1),
    )
)
def test_it_travels_as_json(config: EngineConfig) -> None:
    assert EngineConfig.from_json(config.to_json()) == config


def test_paths_may_be_path_objects(tmp_path: Path) -> None:
    config = EngineConfig.from_arguments(STORYTELLER, tokenizer=STORYTELLER, record=tmp_path / "record")
    assert config.model == replace(config_of().model, name=str(STORYTELLER))
    assert EngineConfig.from_json(config.to_json()) == config


# Arguments ------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("name", "value", "words"),
    [
        ("dtype", "float8", ["dtype='float8'", "bfloat16"]),
        ("dtype", None, ["dtype=None"]),
        ("seed", "1", ["seed='1'", "integer"]),
        ("seed", True, ["seed=True"]),
        ("seed", 2**64, ["seed=", "64-bit"]),
        ("max_model_len", 0, ["max_model_len=0", "positive"]),
        ("max_model_len", 2048, ["max_model_len=2048", "1024 or less"]),
        ("max_model_len", "long", ["max_model_len='long'"]),
        ("max_num_seqs", -1, ["max_num_seqs=-1"]),
        ("max_num_seqs", True, ["max_num_seqs=True"]),
        ("max_num_batched_tokens", 1.5, ["max_num_batched_tokens=1.5"]),
        ("block_size", 0, ["block_size=0"]),
        ("enable_prefix_caching", "no", ["enable_prefix_caching='no'", "True or False"]),
        ("kv_cache_memory_bytes", -5, ["kv_cache_memory_bytes=-5"]),
        ("kv_cache_memory_bytes", 2**60, ["kv_cache_memory_bytes=1152921504606846976", "machine's memory"]),
        ("kv_cache_memory_bytes", "4GiB", ["kv_cache_memory_bytes='4GiB'"]),
        ("gpu_memory_utilization", 1.2, ["gpu_memory_utilization=1.2", "at most 1"]),
        ("gpu_memory_utilization", math.nan, ["gpu_memory_utilization=nan"]),
        ("enforce_eager", 3, ["enforce_eager=3"]),
        ("load_format", "gguf", ["load_format='gguf'", "'safetensors'"]),
        ("async_scheduling", "yes", ["async_scheduling='yes'"]),
        ("scheduling_policy", 5, ["scheduling_policy=5", "string"]),
        ("long_prefill_token_threshold", -1, ["long_prefill_token_threshold=-1"]),
        ("tensor_parallel_size", 3, ["tensor_parallel_size=3", "possible are 1, 2"]),
        ("max_num_partial_prefills", 0, ["max_num_partial_prefills=0", "positive"]),
        ("watermark", 1, ["watermark=1 ", "less than 1"]),
        ("trust_remote_code", "yes", ["trust_remote_code='yes'"]),
        ("skip_tokenizer_init", "yes", ["skip_tokenizer_init='yes'"]),
        ("tokenizer", 5, ["tokenizer=5", "path"]),
        ("topology", "ray", ["topology='ray'", "'inline'"]),
        ("name", 5, ["name=5", "string"]),
        ("device", "cuda", ["device='cuda'", "cpu"]),
        ("num_threads", 0, ["num_threads=0"]),
        ("record", 5, ["record=5"]),
        ("step_timeout_s", 0, ["step_timeout_s=0", "at least 0.05"]),
        ("step_timeout_s", "1", ["step_timeout_s='1'"]),
        ("heartbeat_timeout_s", 0.5, ["heartbeat_timeout_s=0.5", "at least 1"]),
        ("heartbeat_timeout_s", None, ["heartbeat_timeout_s=None"]),
        ("start_timeout_s", 0.5, ["start_timeout_s=0.5", "at least 1"]),
        ("restart_timeout_s", 0.5, ["restart_timeout_s=0.5", "at least 1"]),
        ("heartbeat_timeout_s", float("nan"), ["heartbeat_timeout_s=nan"]),
        ("intake_timeout_s", 0.01, ["intake_timeout_s=0.01", "at least 0.1"]),
        ("max_prompt_characters", 0, ["max_prompt_characters=0", "positive"]),
        ("max_prompt_characters", None, ["max_prompt_characters=None", "positive"]),
    ],
)
def test_a_bad_argument_is_named_with_the_fix(name: str, value: Any, words: list[str]) -> None:
    with pytest.raises(ConfigError) as caught:
        AsyncLLM("storyteller", **{name: value})
    for word in words:
        assert word in str(caught.value)
    assert isinstance(caught.value, ValueError)


@pytest.mark.parametrize(
    ("name", "nearest"),
    [("max_model_length", "max_model_len"), ("block_sise", "block_size"), ("quantisation", "quantization")],
)
def test_an_unknown_argument_brings_the_nearest(name: str, nearest: str) -> None:
    with pytest.raises(UnknownArgumentError, match=f"{name!r}; did you mean {nearest!r}") as caught:
        AsyncLLM("storyteller", **{name: 1})
    assert isinstance(caught.value, TypeError)


@pytest.mark.parametrize("name", VLLM_ARGUMENTS)
def test_arguments_of_vllm_are_accepted_silently_at_what_is_done_anyway(name: str) -> None:
    for value in VLLM_ARGUMENTS[name]:
        assert config_of(**{name: value}) == config_of()


@pytest.mark.parametrize("name", HARMLESS)
def test_arguments_of_vllm_that_change_no_token_are_taken_with_a_warning(name: str) -> None:
    with pytest.warns(UserWarning, match="has no effect") as caught:
        assert config_of(**{name: "something else"}) == config_of()
    (warning,) = caught
    assert f"{name}='something else' is taken and has no effect: {HARMLESS[name]}" in str(warning.message)
    assert warning.filename == __file__


@pytest.mark.parametrize("name", [name for name in VLLM_ARGUMENTS if name not in HARMLESS])
def test_arguments_of_vllm_that_would_change_tokens_are_refused(name: str) -> None:
    with pytest.raises(ConfigError, match=f"{name}='something else' is not supported; leave it at"):
        config_of(**{name: "something else"})


@pytest.mark.parametrize(
    ("text", "length"), [("1k", 1000), ("1K", 1024), ("0.5k", 500), ("512", 512), (-1, 1024), (None, 1024)]
)
def test_a_length_as_people_write_it(text: Any, length: int) -> None:
    assert config_of(max_model_len=text).model.max_model_len == length


@pytest.mark.parametrize("text", ["2x", "k", "", "0.0001k", "-1", "1e3", "0k"])
def test_a_text_that_is_no_length(text: str) -> None:
    with pytest.raises(ConfigError, match="must be a positive integer"):
        config_of(max_model_len=text)


@pytest.mark.parametrize(
    ("name", "value", "told"),
    [
        ("max_num_seqs", 2**31, "max_num_seqs=2147483648 must be at most 2147483647"),
        ("max_num_batched_tokens", 10**30, "max_num_batched_tokens=10{30} must be at most 2147483647"),
        ("num_threads", 2**63, "num_threads=9223372036854775808 must be at most 9223372036854775807"),
        ("scheduling_policy", "\ud800", r"scheduling_policy='\\ud800' must be a string"),
    ],
)
def test_what_no_process_of_the_engine_could_be_told(name: str, value: Any, told: str) -> None:
    with pytest.raises(ConfigError, match=told):
        config_of(**{name: value})


def test_yarn_makes_more_positions() -> None:
    rope = {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 1024}
    assert config_of(hf_overrides={"rope_parameters": rope}).model.max_model_len == 4096
    assert config_of(hf_overrides={"rope_scaling": rope}).model.max_model_len == 4096
    with pytest.raises(ConfigError, match="4096 or less"):
        config_of(hf_overrides={"rope_scaling": rope}, max_model_len=5000)
    with pytest.raises(ConfigError, match=r"use hf_overrides=\{'rope_scaling': ...\}"):  # of older releases
        config_of(rope_scaling=rope)


def test_a_model_of_the_hub_is_fetched_as_it_is_asked_for(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    import huggingface_hub

    asked: dict[str, Any] = {}

    def fetch(name: str, **how: Any) -> str:
        asked.update(how, name=name)
        return str(STORYTELLER)

    monkeypatch.setattr(huggingface_hub, "snapshot_download", fetch)
    config = EngineConfig.from_arguments("some/model", revision="v2", download_dir=tmp_path, hf_token="a secret")
    how = {"name": "some/model", "revision": "v2", "cache_dir": tmp_path, "token": "a secret"}
    assert {name: asked[name] for name in how} == how
    assert config.model.path == str(STORYTELLER)
    assert b"a secret" not in config.to_json()


@pytest.mark.parametrize(("name", "value"), [("revision", 3), ("download_dir", 3), ("hf_token", 3)])
def test_what_a_model_is_fetched_with_is_checked(name: str, value: Any) -> None:
    with pytest.raises(ConfigError, match=name):
        config_of(**{name: value})


def test_trust_remote_code_warns() -> None:
    with pytest.warns(UserWarning, match="no code of a model is run"):
        config_of(trust_remote_code=True)


# Models ---------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("model", ["nowhere", "/nowhere/at/all", "./nowhere", "storytelle", "nobody/nothing-at-all"])
def test_an_unknown_model(model: str, monkeypatch: pytest.MonkeyPatch) -> None:
    import huggingface_hub.constants

    monkeypatch.setattr(huggingface_hub.constants, "HF_HUB_OFFLINE", True)
    with pytest.raises(ModelNotFoundError) as caught:
        AsyncLLM(model)
    assert model.removeprefix("./") in str(caught.value)
    assert "storyteller" in str(caught.value)
    assert isinstance(caught.value, FileNotFoundError)


@pytest.mark.parametrize("model", ["", None, 5, b"storyteller", ["storyteller"]])
def test_what_is_no_name_of_a_model(model: Any) -> None:
    with pytest.raises(ConfigError, match="must be the name or the folder"):
        AsyncLLM(model)


def test_a_folder_without_a_model(tmp_path: Path) -> None:
    with pytest.raises(ModelNotFoundError, match=r"has no config\.json"):
        AsyncLLM(tmp_path)


def folder_with(tmp_path: Path, **changes: Any) -> Path:
    tree = orjson.loads((STORYTELLER / "config.json").read_bytes()) | changes
    (tmp_path / "config.json").write_bytes(orjson.dumps({k: v for k, v in tree.items() if v is not None}))
    return tmp_path


@pytest.mark.parametrize("content", [b"", b"{", b"\xff\xfe", b"[1]", b"null"])
def test_an_unreadable_config(tmp_path: Path, content: bytes) -> None:
    (tmp_path / "config.json").write_bytes(content)
    with pytest.raises(CorruptModelError, match=r"config\.json"):
        AsyncLLM(tmp_path)


@pytest.mark.parametrize(
    ("key", "value"),
    [
        ("vocab_size", None),
        ("vocab_size", 0),
        ("vocab_size", "4096"),
        ("max_position_embeddings", -5),
        ("max_position_embeddings", "long"),
        ("max_position_embeddings", True),
        ("text_config", [1]),
        ("text_config", "llama"),
    ],
)
def test_a_config_that_makes_no_sense(tmp_path: Path, key: str, value: Any) -> None:
    with pytest.raises(CorruptModelError, match=key):
        AsyncLLM(folder_with(tmp_path, **{key: value}))


def test_a_model_that_does_not_say_how_long_it_gets(tmp_path: Path) -> None:
    folder = folder_with(tmp_path, max_position_embeddings=None)
    with pytest.raises(ConfigError, match="set max_model_len"):
        AsyncLLM(folder)
    assert AsyncLLM(folder, max_model_len=77).config.model.max_model_len == 77


@pytest.mark.parametrize("architectures", [None, [], "LlamaForCausalLM", [5]])
def test_a_model_without_an_architecture(tmp_path: Path, architectures: Any) -> None:
    with pytest.raises(UnsupportedModelError, match="names no architecture"):
        AsyncLLM(folder_with(tmp_path, architectures=architectures))


def test_ends_of_text_in_config_json_count_only_where_there_is_no_generation_config(tmp_path: Path) -> None:
    folder = folder_with(tmp_path, eos_token_id=[7, 3])
    assert AsyncLLM(folder).config.model.eos_token_ids == (3, 7)
    (folder / "generation_config.json").write_bytes(orjson.dumps({"eos_token_id": [9, 3]}))
    assert AsyncLLM(folder).config.model.eos_token_ids == (3, 9)
    (folder / "generation_config.json").write_bytes(orjson.dumps({"temperature": 0.5}))
    assert AsyncLLM(folder).config.model.eos_token_ids == ()
    (folder / "generation_config.json").write_bytes(b"{")
    with pytest.raises(CorruptModelError, match="generation_config"):
        AsyncLLM(folder)


def test_a_folder_elsewhere_is_as_good_as_the_bundled_one(tmp_path: Path) -> None:
    shutil.copy(STORYTELLER / "config.json", tmp_path)
    config = EngineConfig.from_arguments(tmp_path, skip_tokenizer_init=True)
    assert config.model.path == str(tmp_path)
    assert config.model.tokenizer is None
    assert EngineConfig.from_arguments(tmp_path, tokenizer="elsewhere").model.tokenizer == "elsewhere"


def test_infinity_is_a_time_that_travels() -> None:
    config = EngineConfig.from_arguments(STORYTELLER, step_timeout_s=float("inf"), heartbeat_timeout_s=float("inf"))
    again = EngineConfig.from_json(config.to_json())
    assert again.step_timeout_s == again.heartbeat_timeout_s == 1e9


@pytest.mark.parametrize(
    ("given", "rows", "tokens"),
    [
        ({}, 256, 2048),
        ({"max_num_seqs": None, "max_num_batched_tokens": None}, 256, 2048),
        ({"max_num_seqs": 4000}, 4000, 4000),
        ({"max_num_batched_tokens": 64}, 64, 64),
        ({"max_num_batched_tokens": 512, "max_num_seqs": 300}, 300, 512),
    ],
)
def test_what_is_not_given_of_a_step_gives_way_to_what_is(given: dict[str, Any], rows: int, tokens: int) -> None:
    scheduler = config_of(**given).scheduler
    assert (scheduler.max_num_seqs, scheduler.max_num_batched_tokens) == (rows, tokens)


def test_a_step_has_room_for_every_row_that_is_asked_for() -> None:
    with pytest.raises(ConfigError, match="max_num_batched_tokens=64 is less than max_num_seqs=128"):
        config_of(max_num_seqs=128, max_num_batched_tokens=64)


def test_the_model_is_described_by_the_names_of_vllm() -> None:
    """What harnesses and trainers read of `llm.llm_engine.model_config` and its neighbours."""
    config = config_of(max_num_seqs=8)
    model, parallel = config.model_config, config.parallel_config
    assert (model.max_seq_len_to_capture, model.runner_type, model.get_head_size()) == (1024, "generate", 64)
    assert model.get_num_layers(parallel) == model.hf_config.num_hidden_layers
    assert model.get_num_kv_heads(parallel) == model.hf_text_config.num_key_value_heads
    assert model.get_num_attention_heads(parallel) * model.get_head_size() == model.get_hidden_size()
    assert (model.is_encoder_decoder, model.is_multimodal_model, model.skip_tokenizer_init) == (False, False, False)
    assert model.get_diff_sampling_param() == model.sampling_defaults
    assert model.try_get_generation_config()["eos_token_id"] is not None
    assert (model.logprobs_mode, model.get_sliding_window(), model.using_transformers_backend()) == (
        "raw_logprobs",
        None,
        False,
    )
    assert (config.device_config.device_type, config.load_config.load_format) == ("cpu", "auto")
    assert (config.speculative_config, config.kv_transfer_config) == (None, None)
    assert (config.scheduler_config.async_scheduling, config.scheduler_config.enable_chunked_prefill) == (True, True)
    assert (parallel.rank, parallel.distributed_executor_backend) == (0, "mp")
    assert EngineArgs("storyteller", max_model_len=64).create_model_config().max_model_len == 64


def test_the_parts_have_the_names_of_vllm() -> None:
    config = config_of(max_num_seqs=7, tensor_parallel_size=2, hf_overrides={"rope_theta": 5e5}).resolved(1000)
    assert config.model_config is config.model
    assert config.scheduler_config.max_num_seqs == 7
    assert config.cache_config.num_gpu_blocks == 1000
    assert config.cache_config.gpu_memory_utilization is None
    parallel = config.parallel_config
    assert (parallel.tensor_parallel_size, parallel.world_size, parallel.data_parallel_size) == (2, 2, 1)
    assert config.model_config.get_vocab_size() == config.model.vocab_size == 4096
    assert config.model_config.embedding_size == config.model_config.get_hidden_size() == 256
    assert config.model_config.hf_config.model_type == "llama"
    assert "500000" in str(config.model_config.hf_config.to_dict()), "overrides count"
