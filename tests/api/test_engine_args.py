"""`EngineArgs`: the arguments of an engine as an object and as a command line."""

from __future__ import annotations

import argparse
import dataclasses
from pathlib import Path
from typing import Any

import anyio
import pytest

from actorllm import (
    LLM,
    AsyncEngineArgs,
    AsyncLLM,
    EngineArgs,
    EngineConfig,
    FlexibleArgumentParser,
    SamplingParams,
)
from actorllm.config import ARGUMENTS, BUNDLED_MODELS
from actorllm.errors import ConfigError, ModelNotFoundError, UnknownArgumentError
from actorllm.types.vllm_options import VLLM_ARGUMENTS


def parse(*options: str) -> EngineArgs:
    parser = argparse.ArgumentParser()
    parser.add_argument("--port", type=int, default=8000)
    return AsyncEngineArgs.from_cli_args(EngineArgs.add_cli_args(parser).parse_args(options))


def test_its_fields_are_the_arguments_with_their_defaults() -> None:
    args = EngineArgs("storyteller")
    assert {f.name for f in dataclasses.fields(args)} == {"model", *ARGUMENTS, *VLLM_ARGUMENTS}  # type: ignore[arg-type]
    assert {name: getattr(args, name) for name in ARGUMENTS} == ARGUMENTS
    assert args == EngineArgs(model="storyteller")
    assert args != EngineArgs(seed=3)
    assert "seed=3" in repr(EngineArgs(seed=3))
    assert "hf_secret" not in repr(EngineArgs(hf_token="hf_secret"))


def test_it_makes_the_configuration_of_the_front_doors() -> None:
    args = AsyncEngineArgs("storyteller", max_model_len=256, dtype="float32", seed=7)
    assert isinstance(args, EngineArgs)
    expected = EngineConfig.from_arguments("storyteller", max_model_len=256, dtype="float32", seed=7)
    assert args.create_engine_config() == expected
    as_keywords = dataclasses.asdict(args)  # type: ignore[call-overload]
    assert EngineConfig.from_arguments(**as_keywords) == expected


def test_defaults_are_not_shared() -> None:
    first, second = EngineArgs(), EngineArgs()
    first.model_loader_extra_config["x"] = 1
    assert second.model_loader_extra_config == {}


@pytest.mark.parametrize(
    ("arguments", "error", "words"),
    [
        ({"max_model_length": 5}, UnknownArgumentError, ["'max_model_length'", "did you mean 'max_model_len'"]),
        ({"max_num_seqs": 0}, ConfigError, ["max_num_seqs=0", "positive"]),
        ({"prefill_context_parallel_size": 2}, ConfigError, ["prefill_context_parallel_size=2", "leave it at 1"]),
        ({"quantization": "aqlm"}, ConfigError, ["quantization='aqlm'", "leave it at None"]),
        ({"model": "/nowhere"}, ModelNotFoundError, ["/nowhere"]),
    ],
)
def test_what_cannot_be_is_named(arguments: dict[str, Any], error: type[Exception], words: list[str]) -> None:
    with pytest.raises(error) as caught:
        EngineArgs(**arguments).create_engine_config()
    for word in words:
        assert word in str(caught.value)


def test_a_command_line() -> None:
    args = parse(
        *("--model", "storyteller", "--max-model-len", "128", "--max_num_seqs", "8", "--gpu-memory-utilization", "0.5"),
        *("--no-enable-prefix-caching", "--enforce-eager", "--dtype", "float32", "--name", "7", "--seed", "3"),
        *("--hf-overrides", "{}", "--enable-chunked-prefill", "--port", "1"),
    )
    assert isinstance(args, AsyncEngineArgs)
    assert (args.max_model_len, args.max_num_seqs, args.gpu_memory_utilization) == (128, 8, 0.5)
    assert (args.enable_prefix_caching, args.enforce_eager, args.dtype, args.name) == (False, True, "float32", "7")
    assert (args.seed, args.hf_overrides, args.enable_chunked_prefill) == (3, {}, True)
    assert args.create_engine_config().model.max_model_len == 128
    assert parse() == AsyncEngineArgs()
    with pytest.raises(SystemExit):
        parse("--max-num-seqs", "many")


def test_a_command_line_with_underscores_or_dashes() -> None:
    parser = EngineArgs.add_cli_args(FlexibleArgumentParser())
    parser.add_argument("--num-prompts", type=int)
    parser.add_argument("--out_file")
    found = parser.parse_args(["--num_prompts=3", "--out_file", "a_b", "--max_model_len", "64", "--max-num-seqs", "2"])
    assert (found.num_prompts, found.out_file, found.max_model_len, found.max_num_seqs) == (3, "a_b", 64, 2)


@pytest.mark.parametrize(
    ("words", "name", "value"),
    [
        (["-tp", "2"], "tensor_parallel_size", 2),
        (["-pp=2"], "pipeline_parallel_size", 2),
        (["-dp", "3"], "data_parallel_size", 3),
        (["-q", "awq"], "quantization", "awq"),
        (["-ep"], "enable_expert_parallel", True),
        (["-O3"], "optimization_level", 3),
        (["-O", "1"], "optimization_level", 1),
        (["-O=0"], "optimization_level", 0),
        (["-cc", '{"level": 3}'], "compilation_config", {"level": 3}),
        (
            ["-cc.level", "3", "--compilation-config.cudagraph_mode=FULL"],
            "compilation_config",
            {"level": 3, "cudagraph_mode": "FULL"},
        ),
        (["--hf_overrides.rope_parameters.factor", "2.5"], "hf_overrides", {"rope_parameters": {"factor": 2.5}}),
        (["--profiler-config.a+", "x,y", "--profiler-config.a+=z"], "profiler_config", {"a": ["x", "y", "z"]}),
        (["--speculative-config.method", "ngram"], "speculative_config", {"method": "ngram"}),
        (["--max-num-batched-tokens", "8K"], "max_num_batched_tokens", 8192),
        (["--enable-lora", "--max-loras", "2"], "enable_lora", True),
        (["--no-enable-lora"], "enable_lora", False),
    ],
)
def test_a_command_line_as_people_write_it_for_vllm(words: list[str], name: str, value: Any) -> None:
    parser = EngineArgs.add_cli_args(FlexibleArgumentParser())
    assert getattr(EngineArgs.from_cli_args(parser.parse_args(words)), name) == value


def test_any_parser_of_argparse_has_the_short_options_of_several_letters() -> None:
    args = parse("-tp", "2", "-dp=3", "-cc", '{"level": 1}', "--port", "1")
    assert (args.tensor_parallel_size, args.data_parallel_size, args.compilation_config) == (2, 3, {"level": 1})


def test_short_options_of_a_program_are_its_own() -> None:
    parser = EngineArgs.add_cli_args(FlexibleArgumentParser())
    parser.add_argument("-n", "--num-prompts", type=int)
    found = parser.parse_args(["-n", "4", "-tp", "2"])
    assert (found.num_prompts, found.nnodes, found.tensor_parallel_size) == (4, 1, 2)
    with pytest.raises(SystemExit):
        parser.parse_args(["--num.prompts", "4"])


def test_a_file_of_options_is_read_and_the_command_line_counts_first(tmp_path: Path) -> None:
    file = tmp_path / "options.yaml"
    file.write_text(
        "model: storyteller\nmax_model_len: 2k\nmax-num-seqs: 3\nenable-prefix-caching: false\nhf_overrides: {a: [1]}\n"
        "logits_processors: ['m:A', 'm:B']\nprompts: [one, two]\nloud: false\nseed: null\ntag: [x, y]\n"
    )
    parser = EngineArgs.add_cli_args(FlexibleArgumentParser())
    parser.add_argument("--prompts", nargs="+")
    parser.add_argument("--loud", action="store_true")
    parser.add_argument("--tag", action="append")
    found = parser.parse_args(["--config", str(file), "--max_num_seqs", "5"])
    assert (found.prompts, found.loud, found.tag) == (["one", "two"], False, ["x", "y"])
    args = EngineArgs.from_cli_args(found)
    assert (args.model, args.max_model_len, args.max_num_seqs) == ("storyteller", "2k", 5)
    assert (args.enable_prefix_caching, args.hf_overrides) == (False, {"a": [1]})
    assert args.logits_processors == ["m:A", "m:B"]
    with pytest.raises(ConfigError, match="there is no such file"):
        parser.parse_args(["--config", str(tmp_path / "none.yaml")])
    file.write_text("no-such-option: 1")
    with pytest.raises(SystemExit):
        parser.parse_args([f"--config={file}"])
    own = FlexibleArgumentParser()
    own.add_argument("--config")
    assert own.parse_args(["--config", "mine"]).config == "mine"


def test_options_of_a_program_come_before_those_of_the_engine() -> None:
    parser = FlexibleArgumentParser()
    parser.add_argument("--log-level", default="debug")
    parser.add_argument("--seed", type=int, default=3)
    found = EngineArgs.add_cli_args(parser).parse_args(["--log_level", "info", "--max-num-seqs", "2"])
    assert (found.log_level, found.seed) == ("info", 3)
    args = EngineArgs.from_cli_args(found)
    assert (args.seed, args.max_num_seqs) == (3, 2)


def test_llm_takes_it() -> None:
    with LLM.from_engine_args(EngineArgs("storyteller", topology="inline", num_threads=1, max_num_seqs=3)) as llm:
        assert llm.config.scheduler.max_num_seqs == 3


def test_a_folder_without_weights_is_refused_at_once(tmp_path: Path) -> None:
    (tmp_path / "config.json").write_bytes((BUNDLED_MODELS["storyteller"] / "config.json").read_bytes())
    with pytest.raises(ModelNotFoundError, match=r"has neither model\.safetensors nor"):
        AsyncLLM.from_engine_args(AsyncEngineArgs(str(tmp_path)))
    AsyncLLM.from_engine_args(AsyncEngineArgs(str(tmp_path), load_format="dummy")).shutdown()


async def test_an_engine_starts_in_the_background_where_it_is_told_to() -> None:
    arguments = AsyncEngineArgs("storyteller", topology="inline", num_threads=1, max_num_seqs=3)
    lazy = AsyncLLM.from_engine_args(arguments)
    started = AsyncLLM.from_engine_args(arguments, start_engine_loop=True)
    with anyio.fail_after(60):
        while not started.is_running:
            await anyio.sleep(0.01)
    assert not lazy.is_running
    output = await started.complete("Once", SamplingParams(max_tokens=3))
    assert len(output.outputs[0].token_ids) == 3
    for llm in (lazy, started):
        llm.shutdown()
