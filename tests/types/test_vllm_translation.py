"""vLLM's arguments and environment variables that say what other arguments say here."""

from __future__ import annotations

import logging
from typing import Any

import pytest

from actorllm import LLM, SamplingParams
from actorllm.config import EngineConfig
from actorllm.errors import ConfigError
from actorllm.scheduling.policy import KeyPolicy
from actorllm.types.structured_outputs import StructuredOutputsParams, with_engine_options
from actorllm.types.vllm_variables import GIB, IDLE, REFUSED, TAKEN, read_variables


def config(**options: Any) -> EngineConfig:
    return EngineConfig.from_arguments("storyteller", device="cpu", **options)


class Mine(KeyPolicy):
    """A policy that another program brings."""


@pytest.mark.parametrize(
    ("task", "pools"), [("auto", False), ("generate", False), ("embed", True), ("embedding", True), ("score", True)]
)
def test_a_task_says_what_the_engine_makes(task: str, pools: bool) -> None:
    assert (config(task=task).model.pooler is not None) is pools


@pytest.mark.parametrize(
    ("options", "told"),
    [
        ({"task": "draft"}, "task='draft' is not supported; use one of 'auto', 'generate'"),
        ({"task": "embed", "runner": "generate"}, "task='embed' says runner='pooling', and runner='generate' is given"),
        ({"scheduler_cls": 5}, "scheduler_cls=5 must be a class or its path"),
        ({"scheduler_cls": Mine, "scheduling_policy": "edf"}, "one argument here; leave scheduler_cls out"),
        ({"structured_outputs_config": 5}, "structured_outputs_config=5 must be a mapping"),
        ({"structured_outputs_config": {"backnd": "x"}}, "there is no 'backnd'; did you mean 'backend'"),
        ({"structured_outputs_config": {"backend": "mine"}}, "backend='mine' is none of auto, guidance"),
        (
            {"structured_outputs_config": {"disable_any_whitespace": 1}},
            "disable_any_whitespace=1 must be True or False",
        ),
        ({"structured_outputs_config": {"reasoning_parser_plugin": "x.py"}}, "x.py must be a Python file"),
        ({"structured_outputs_config": {"reasoning_parser": "qwen3"}, "reasoning_parser": "mistral"}, "given twice"),
        ({"num_gpu_blocks_override": 0}, "num_gpu_blocks_override=0 must be a positive integer"),
        (
            {"num_gpu_blocks_override": 2, "block_size": 16},
            "less than one sequence of max_model_len=1024; use 64 or more",
        ),
    ],
)
def test_what_cannot_be_meant_is_refused(options: dict[str, Any], told: str) -> None:
    with pytest.raises(ConfigError) as caught:
        config(**options)
    assert told in str(caught.value)


def test_a_scheduler_is_a_policy() -> None:
    path = f"{Mine.__module__}:Mine"
    assert config(scheduler_cls=Mine).scheduler.policy == path
    assert config(scheduler_cls=path.replace(":", ".")).scheduler.policy == path
    for own in ("vllm.v1.core.sched.scheduler.Scheduler", "vllm.v1.core.sched.async_scheduler.AsyncScheduler"):
        assert config(scheduler_cls=own).scheduler.policy == config().scheduler.policy


@pytest.mark.parametrize("name", ["hf", "fastsafetensors", "runai_streamer", "instanttensor"])
def test_another_way_to_read_the_same_files_is_taken(name: str) -> None:
    with pytest.warns(UserWarning, match=f"load_format='{name}' is taken"):
        assert config(load_format=name) == config()
    with pytest.raises(ConfigError, match="load_format='tensorizer'"):
        config(load_format="tensorizer")


def test_a_cache_in_the_type_of_the_model_is_that_of_the_model() -> None:
    assert config(kv_cache_dtype="bfloat16", dtype="bfloat16") == config(dtype="bfloat16")
    with pytest.raises(ConfigError, match="kv_cache_dtype='float16'"):
        config(kv_cache_dtype="float16", dtype="bfloat16")


def test_a_parser_of_thoughts_may_be_named_with_structured_outputs() -> None:
    assert (
        config(structured_outputs_config={"backend": "xgrammar", "reasoning_parser": "qwen3"}).model.reasoning_parser
        == "qwen3"
    )


def test_the_options_of_the_engine_hold_for_each_structured_output() -> None:
    asked = StructuredOutputsParams(json={"type": "object"})
    made = with_engine_options(asked, {"disable_any_whitespace": True, "enable_in_reasoning": True})
    assert made.to_fields() == asked.to_fields() | {"disable_any_whitespace": True, "is_whole": True}
    assert "is_whole" not in asked.to_fields()
    spaced = StructuredOutputsParams(json={"type": "object"}, whitespace_pattern=" ?")
    assert with_engine_options(spaced, {"disable_any_whitespace": True}).to_fields() == spaced.to_fields()


def test_structured_outputs_without_whitespace_and_a_cache_of_so_many_blocks() -> None:
    params = SamplingParams(
        temperature=1.0,
        seed=4,
        max_tokens=40,
        structured_outputs={"json": {"type": "array", "items": {"type": "boolean"}, "minItems": 3}},
    )
    options: dict[str, Any] = {"topology": "inline", "num_threads": 1, "max_model_len": 128, "block_size": 16}
    with LLM(
        "storyteller", num_gpu_blocks_override=11, structured_outputs_config={"disable_any_whitespace": True}, **options
    ) as llm:
        (output,) = llm.generate("Once", params, use_tqdm=False)
        assert llm.llm_engine.vllm_config.cache_config.num_gpu_blocks == 11
    text = output.outputs[0].text
    assert text.startswith("[")
    assert not any(character.isspace() for character in text)


def test_a_cache_of_so_many_blocks_comes_before_a_size_in_bytes() -> None:
    options: dict[str, Any] = {"topology": "inline", "num_threads": 1, "max_model_len": 128, "block_size": 16}
    with LLM("storyteller", num_gpu_blocks_override=9, kv_cache_memory_bytes=1 << 28, **options) as llm:
        assert llm.llm_engine.vllm_config.cache_config.num_gpu_blocks == 9


# Environment variables ------------------------------------------------------------------------------------------------


def given(**options: Any) -> dict[str, Any]:
    names = ("kv_cache_memory_bytes", "gpu_memory_utilization", "num_gpu_blocks_override", "profiler_config")
    return dict.fromkeys(names) | {"device": "cpu"} | options


def test_a_variable_is_in_one_table() -> None:
    assert len({*TAKEN, *REFUSED, *IDLE}) == len(TAKEN) + len(REFUSED) + len(IDLE)


@pytest.mark.parametrize("name", REFUSED)
def test_what_would_change_tokens_is_refused_by_name(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(name, "2")
    with pytest.raises(ConfigError, match=f"{name}='2', and .*; unset it"):
        config()
    monkeypatch.setenv(name, "0")
    config()


def test_sizes_and_folders_are_taken_where_no_argument_says_them() -> None:
    environment = {"VLLM_CPU_KVCACHE_SPACE": "0.5", "VLLM_TORCH_PROFILER_DIR": "/traces"}
    found = given()
    read_variables(found, environment)
    profiles = {"profiler": "torch", "torch_profiler_dir": "/traces"}
    assert found == given(kv_cache_memory_bytes=GIB // 2, profiler_config=profiles)
    for option in (
        {"kv_cache_memory_bytes": 5},
        {"gpu_memory_utilization": 0.5},
        {"num_gpu_blocks_override": 7},
        {"device": "cuda"},
    ):
        found = given(**option, profiler_config={})
        read_variables(found, environment)
        assert found == given(**option, profiler_config={})


@pytest.mark.parametrize("space", ["much", "-1", "nan", "1e30"])
def test_a_size_that_is_none_is_refused(space: str) -> None:
    with pytest.raises(ConfigError, match=r"VLLM_CPU_KVCACHE_SPACE=.* must be a number of GiB"):
        read_variables(given(), {"VLLM_CPU_KVCACHE_SPACE": space})


def test_what_has_no_effect_is_said_once(caplog: pytest.LogCaptureFixture) -> None:
    environment = {"VLLM_USE_RAY_SPMD_WORKER": "1", "VLLM_NOT_KNOWN": "1", "HOME": "/"}
    with caplog.at_level(logging.INFO, logger="actorllm"):
        read_variables(given(), environment)
        read_variables(given(), environment)
    assert caplog.messages == ["VLLM_USE_RAY_SPMD_WORKER has no effect here: the engine's processes are its own"]
