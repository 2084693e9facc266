"""Options of `vllm serve`: what becomes of each is what the table says, and a file gives them as the command line does."""

from __future__ import annotations

import inspect
import sys
from pathlib import Path
from typing import Any

import pytest

from actorllm import AsyncLLM
from actorllm.cli import main, serve
from actorllm.errors import ConfigError
from actorllm.server import launcher
from actorllm.types.config_file import with_config
from actorllm.types.options import DEFAULTS
from actorllm.types.serve_options import SERVE_OPTIONS, VLLMServeOptions
from actorllm.types.vllm_options import VLLM_ARGUMENTS
from tests.model.adapters.lora_folders import write_adapter


def names_of_serve() -> set[str]:
    names = set(inspect.signature(serve.serve).parameters)
    return names | {"uds", "api_server_count", *serve.ServedEngineOptions.__dataclass_fields__}


def test_the_table_names_every_option_once() -> None:
    theirs = set(VLLMServeOptions.__dataclass_fields__)
    taken = {name for name, option in SERVE_OPTIONS.items() if option.treatment == "taken"}
    assert taken <= names_of_serve()
    assert not theirs & names_of_serve()
    assert theirs <= set(SERVE_OPTIONS)
    assert set(SERVE_OPTIONS) <= theirs | names_of_serve()
    assert all(option.note for option in SERVE_OPTIONS.values() if option.treatment in ("warned", "refused"))


def other(value: Any) -> Any:
    return not value if isinstance(value, bool) else "x" if value is None or isinstance(value, str) else value + 1


@pytest.mark.parametrize("name", VLLMServeOptions.__dataclass_fields__)
def test_an_option_of_vllm_is_treated_as_the_table_says(name: str) -> None:
    assert VLLMServeOptions().warnings() == []
    made = VLLMServeOptions(**{name: other(VLLMServeOptions.__dataclass_fields__[name].default)})
    treatment, note = SERVE_OPTIONS[name]
    if treatment == "refused":
        with pytest.raises(ConfigError, match=f"--{name.replace('_', '-')}.* is not supported: {note}"):
            made.warnings()
    else:
        assert len(made.warnings()) == (treatment == "warned")


class Started(Exception):
    pass


@pytest.fixture
def run(monkeypatch: pytest.MonkeyPatch) -> Any:
    """Runs the command until the server would start; returns its engine and its application."""
    found: list[Any] = []

    async def start(app: Any, listener: Any) -> None:
        found.append((app.state.server.llm, app))
        raise Started

    monkeypatch.setattr(launcher, "serve", start)
    monkeypatch.setattr(sys, "path", list(sys.path))

    def call(*options: str) -> tuple[AsyncLLM, Any]:
        with pytest.raises(Started):
            main(["serve", *options])
        made: tuple[AsyncLLM, Any] = found.pop()
        return made

    return call


def test_every_argument_of_the_engine_is_an_option() -> None:
    others = set(serve.OtherEngineOptions.__dataclass_fields__)
    assert not others & (names_of_serve() | set(VLLMServeOptions.__dataclass_fields__))
    assert {*DEFAULTS, *VLLM_ARGUMENTS} <= others | names_of_serve() | set(VLLMServeOptions.__dataclass_fields__) | {
        "module"
    }


def test_options_that_only_the_engine_of_vllm_has(run: Any, tmp_path: Path) -> None:
    text = "--revision main --tokenizer-mode auto --config-format hf --task generate --attention-backend FLASH_ATTN"
    given = [*text.split(), "--no-enable-dbo", "--download-dir", str(tmp_path), "--compilation-config", '{"level": 3}']
    with pytest.warns(UserWarning, match="is taken and has no effect") as caught:
        llm, _ = run("storyteller", "--port", "0", *given, "--block-size", "32", "--max-waiting-attached", "7")
    assert {str(one.message).partition("=")[0] for one in caught} == {"attention_backend", "compilation_config"}
    assert (llm.config.cache.block_size, llm.config.scheduler.max_waiting_attached) == (32, 7)


def test_options_as_people_write_them_for_vllm(run: Any, tmp_path: Path) -> None:
    """Short, and field by field; a file gives way to both."""
    file = tmp_path / "options.yaml"
    file.write_text("data_parallel_size: 3\nmax_num_seqs: 4\n")
    words = "-dp 2 -O3 --compilation-config.level=3 --speculative-config.method ngram -sc.num_speculative_tokens 3"
    with pytest.warns(UserWarning, match="is taken and has no effect"):
        llm, _ = run("storyteller", "--port", "0", "--config", str(file), *words.split())
    assert (llm.config.data_parallel_size, llm.config.scheduler.max_num_seqs) == (2, 4)
    assert llm.config.speculation is not None
    assert llm.config.speculation.num_speculative_tokens == 3


@pytest.mark.parametrize(
    ("option", "told"),
    [
        (("--tokenizer-mode", "mistral"), "tokenizer_mode='mistral'"),
        (("--prefill-context-parallel-size", "2"), "prefill_context_parallel_size=2"),
        (("--hf-overrides.vocab_size",), "'--hf-overrides.vocab_size' needs a value: write"),
        (("--hf-overrides.vocab_size", "--enforce-eager"), "'--hf-overrides.vocab_size' needs a value: write"),
        (("--hf-overrides.a=5", "--hf-overrides.a+=6"), "'--hf-overrides.a+' adds to a list, and 5 was given before"),
        (("--cpu-offload-gb", "many"), "--cpu-offload-gb: invalid int value: 'many'"),
    ],
)
def test_what_would_change_tokens_is_refused_by_name(option: tuple[str, str], told: str, capsys: Any) -> None:
    assert main(["serve", "storyteller", "--port", "0", *option]) != 0
    assert told in capsys.readouterr().err


def test_options_of_a_file_and_numbers(run: Any, tmp_path: Path) -> None:
    file = tmp_path / "options.yaml"
    file.write_text(
        "model: storyteller\nmax_model_len: 0.1k\nmax-num-batched-tokens: 1K\nport: 70000\n"
        "served-model-name: [one, two]\nenable_prefix_caching: false\nuvicorn-log-level: warning\n"
        'override_generation_config: {"temperature": 0.25}\n'
    )
    llm, app = run("--config", str(file), "--port", "0", "--max-num-seqs", "3")
    config = llm.config
    assert (config.model.max_model_len, config.scheduler.max_num_batched_tokens) == (100, 1024)
    assert app.state.server.model_names == ("one", "two")
    assert app.state.server.defaults.sampling["temperature"] == 0.25


def test_the_command_line_counts_before_the_file(tmp_path: Path) -> None:
    file = tmp_path / "options.yaml"
    file.write_text("model: a\nuds: /x\nenable_prefix_caching: true\nseed: 3\n")
    given = ["serve", "b", f"--config={file}", "--unix-socket", "/y", "--no-enable-prefix-caching"]
    assert with_config(given) == ["serve", "b", "--seed=3", "--unix-socket", "/y", "--no-enable-prefix-caching"]
    assert with_config(["info", "--config", "x"]) == ["info", "--config", "x"]


@pytest.mark.parametrize(
    ("text", "told"),
    [
        ("- a", "must be a mapping"),
        ("a: [", "cannot be read"),
        ("config: b", "names another file"),
        ("max-model-len: 8\nmax_model_len: 9", "one option as 'max-model-len' and as 'max_model_len': keep one"),
        ("enable_prefix_caching: true\nno-enable-prefix-caching: true", "keep one of them"),
        ("a: &x {b: 1}\nc: {d: *x}", "has an alias, *x: write its value out"),
        ("a: &x {b: *x}", "has an alias"),
        ("port: 2024-13-45", "month must be in"),
        ("port: " + "1" * 5000, "4300 digits"),
        ("hf_overrides: {2024-01-01: 1}", "--hf-overrides has a name that is no text"),
        ("port=3: 1", "is no option's name"),
        (None, "there is no such file"),
        ("[" * 100_000, "cannot be read"),
    ],
)
def test_a_file_that_is_wrong(text: str | None, told: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    file = tmp_path / "options.yaml"
    if text is not None:
        file.write_text(text)
    assert main(["serve", "--config", str(file)]) == 2
    assert told in capsys.readouterr().err


TOOLS = """
from actorllm.server.tool_parsers import HermesParser
class Mine(HermesParser):
    pass
"""
THOUGHTS = """
from actorllm.text.reasoning.parsers import ReasoningParser
class Own(ReasoningParser):
    START, END = "<a>", "</a>"
"""


def test_parsers_of_plug_in_files(run: Any, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    tools, thoughts = tmp_path / "tools_plugin_of_a_test.py", tmp_path / "thoughts_plugin_of_a_test.py"
    tools.write_text(TOOLS)
    thoughts.write_text(THOUGHTS)
    files = ("--tool-parser-plugin", str(tools), "--reasoning-parser-plugin", str(thoughts))
    _, app = run("--port", "0", *files, "--tool-call-parser", "Mine", "--reasoning-parser", "Own")
    state = app.state.server
    state.read_templates()
    assert state.defaults.tool_parser.__name__ == "Mine"
    assert state.defaults.reasoning.START == "<a>"
    _, app = run("--port", "0", *files, "--tool-call-parser", "hermes")
    app.state.server.read_templates()
    assert app.state.server.defaults.tool_parser.__name__ == "HermesParser"
    for wrong, told in (
        ("nowhere.py", "must be a Python file"),
        (str(tmp_path / "json.py"), "another module is called"),
    ):
        (tmp_path / "json.py").touch()
        assert main(["serve", "--tool-parser-plugin", wrong, "--tool-call-parser", "Mine"]) == 2
        assert told in capsys.readouterr().err


def test_adapters_are_named_on_the_command_line(run: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("a", "b"):
        write_adapter(tmp_path / name, {"model.layers.0.self_attn.o_proj": (256, 256)})
    as_json = f'{{"name": "b", "path": "{tmp_path / "b"}", "base_model_name": "tale"}}'
    adapts = ("--enable-lora", "--max-loras", "2", "--lora-modules", f"a={tmp_path / 'a'}", as_json)
    llm, app = run(*adapts)
    assert llm.config.lora.max_loras == 2
    adapters = app.state.server.models.adapters
    assert [(one.lora_name, one.base_model_name) for one in adapters.values()] == [("a", None), ("b", "tale")]
    monkeypatch.setenv("VLLM_ALLOW_RUNTIME_LORA_UPDATING", "1")
    run(*adapts)
    with pytest.raises(ConfigError, match=r"--api-processes 2: .*unset VLLM_ALLOW_RUNTIME_LORA_UPDATING"):
        serve.serve("storyteller", api_processes=2)
