"""`EngineOptions`: one list of the engine's arguments, which signatures, help, the command line and the checks are made of."""

from __future__ import annotations

import argparse
import dataclasses
import inspect
import subprocess
import sys
import types
import typing
from pathlib import Path
from typing import Any

import pytest

from actorllm import LLM, AsyncEngineArgs, AsyncLLM, AsyncLLMEngine, EngineArgs, LLMEngine, cli
from actorllm.cli.options import EngineFlags as CommandOptions
from actorllm.cli.serve import ServedEngineOptions
from actorllm.config import ARGUMENTS, EngineConfig
from actorllm.scheduling.admission_policy import ADMISSIONS
from actorllm.scheduling.router import ROUTERS
from actorllm.types.device import OWN_RULES
from actorllm.types.options import DEFAULTS, TYPES, EngineOptions, meanings, type_text
from actorllm.types.speculation import DRAFTERS, MTP, WITH_FOLDER
from actorllm.types.vllm_options import HARMLESS, VLLM_ARGUMENTS, VLLMOptions

ROOT = Path(__file__).parents[2]

TAKERS = [AsyncLLM, AsyncLLMEngine, LLM, LLMEngine, EngineArgs, AsyncEngineArgs]


def fits(value: Any, hint: Any) -> bool:
    """Whether a value is of a type as type checkers read it, down to the first level."""
    origin, parts = typing.get_origin(hint), typing.get_args(hint)
    if hint is Any:
        return True
    if origin is typing.Literal:
        return value in parts
    if origin in (typing.Union, types.UnionType):
        return any(fits(value, part) for part in parts)
    kind = origin or hint
    if kind in (type(None), None):
        return value is None
    return isinstance(value, kind) and not (isinstance(value, bool) and kind is int)


def test_every_argument_has_a_type_a_default_and_a_meaning() -> None:
    assert list(TYPES) == list(DEFAULTS) == list(ARGUMENTS)
    assert DEFAULTS == ARGUMENTS
    assert EngineOptions.__optional_keys__ == {*TYPES, *VLLM_ARGUMENTS}
    for name, hint in TYPES.items():
        assert fits(DEFAULTS[name], hint) or any(fits(DEFAULTS[name], one) for one in typing.get_args(hint)), name
        told = meanings()[name]
        assert 20 < len(told) < 250, name
        assert told.endswith("."), name
        if name.endswith("_s"):
            assert told.startswith("Seconds"), name
    assert set(meanings()) == set(TYPES)


@pytest.mark.parametrize(
    ("name", "choices"),
    [
        ("router", list(ROUTERS)),
        ("admission_policy", list(ADMISSIONS.names)),
        ("speculative_config", [*DRAFTERS, *WITH_FOLDER, MTP]),
    ],
)
def test_a_text_names_every_choice(name: str, choices: list[str]) -> None:
    """Of arguments whose type is any text: others have the choices in their types."""
    assert len(choices) > 3
    assert [choice for choice in choices if choice not in meanings()[name]] == []


@pytest.mark.parametrize(
    ("name", "capability"), [("enable_lora", "adapts"), ("speculative_config", "drafts"), ("runner", "makes_vectors")]
)
def test_a_text_names_a_device_where_others_cannot(name: str, capability: str) -> None:
    able = [device.upper() for device, rules in OWN_RULES.items() if getattr(rules, capability)]
    told = [
        device.upper() for device in OWN_RULES if f"on {device}".upper() in meanings()[name].upper().replace("THE ", "")
    ]
    assert told == (able if len(able) < len(OWN_RULES) else [])


def test_none_of_them_is_one_that_vllm_has_and_we_refuse() -> None:
    assert not set(TYPES) & set(VLLM_ARGUMENTS)


def test_type_checkers_take_the_values_of_vllm_that_are_accepted() -> None:
    """And no others, where a type can say that."""
    hints = typing.get_type_hints(VLLMOptions)
    for name, accepted in VLLM_ARGUMENTS.items():
        hint = hints[name]
        for value in accepted:
            assert fits(value, hint), f"{name}={value!r} is no {hint}"
        if name in HARMLESS:
            assert fits("any value", hint), name
            continue
        assert typing.get_origin(hint) is typing.Literal or not fits("made up", hint) or "str" in str(hint), name
    assert not fits("fp8_e5m2", TYPES["kv_cache_dtype"])
    assert not any(fits("aqlm", one) for one in typing.get_args(TYPES["quantization"]))
    assert any(fits("int8", one) for one in typing.get_args(TYPES["quantization"]))


@pytest.mark.parametrize("taker", TAKERS)
def test_editors_and_help_see_them(taker: type[Any]) -> None:
    """A static checker reads `Unpack[EngineOptions]`; programs that look see every argument by itself."""
    hints = typing.get_type_hints(taker.__init__)
    assert hints["options"] == typing.Unpack[EngineOptions]
    listed = inspect.signature(taker).parameters
    assert next(iter(listed)) == "model"
    assert {name: listed[name].default for name in TYPES} == DEFAULTS
    assert all(listed[name].kind is inspect.Parameter.KEYWORD_ONLY for name in TYPES)
    assert set(listed) - set(TYPES) <= {"model", "chat_template"}


@pytest.mark.parametrize("taker", [AsyncLLM, LLM, LLMEngine, EngineArgs])
def test_help_shows_the_table(taker: type[Any]) -> None:
    told = inspect.getdoc(taker)
    assert told is not None
    for name in TYPES:
        assert f"    {name}: {type_text(name)} = {DEFAULTS[name]!r}\n        {meanings()[name]}" in told
    assert "int | None = None" in told


def test_a_subclass_with_a_constructor_of_its_own_has_its_own_signature() -> None:
    class Small(LLM):
        def __init__(self, size: int) -> None: ...

    assert list(inspect.signature(Small).parameters) == ["size"]
    assert Small.__doc__ is None


@pytest.mark.parametrize("options", [CommandOptions, ServedEngineOptions])
def test_options_of_the_command_line_have_their_types(options: type[Any]) -> None:
    """Mappings (as JSON) and paths are text there; None stands for the default."""
    hints = typing.get_type_hints(options)
    for field in dataclasses.fields(options):
        if field.name not in TYPES:
            continue
        kinds = [kind for kind in typing.get_args(hints[field.name]) or (hints[field.name],) if kind is not type(None)]
        sample: Any = {bool: True, int: 1, float: 0.5, str: "x", list[str]: ["x"]}[kinds[0]]
        hint = TYPES[field.name]
        is_choice = kinds[0] is str and "'" in type_text(field.name)
        is_json = kinds[0] is str and "Mapping" in type_text(field.name)
        assert is_choice or is_json or fits(sample, hint) or any(fits(sample, one) for one in typing.get_args(hint)), (
            field.name
        )


@pytest.mark.parametrize("command", ["serve", "generate"])
def test_help_of_the_command_line_says_what_they_mean(
    command: str, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("COLUMNS", "200")
    assert cli.main([command, "--help"]) == 0
    shown = " ".join(capsys.readouterr().out.replace("│", " ").split())
    options = ServedEngineOptions if command == "serve" else CommandOptions
    names = {field.name for field in dataclasses.fields(options)} & set(TYPES)
    assert len(names) > 25
    for name in names:
        first = meanings()[name].split()[:3]
        assert " ".join(first).strip("'`.,:;") in shown, name
    assert "a request may ask for; -1: as many as there are. Default: 20." in shown


def test_texts_are_read_when_help_is_asked_for_and_not_before() -> None:
    program = (
        "import actorllm.cli.serve, actorllm.api.llm\n"
        "from actorllm.types.options import texts_below_fields\n"
        "print(texts_below_fields.cache_info().misses)"
    )
    result = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=True, cwd=ROOT)
    assert result.stdout.strip() == "0"


def test_help_of_engine_args_says_what_they_mean() -> None:
    shown = " ".join(EngineArgs.add_cli_args(argparse.ArgumentParser()).format_help().split())
    for name in TYPES:
        assert " ".join(meanings()[name].split()[:3]) in shown, name


def test_what_is_given_reaches_the_configuration() -> None:
    options: EngineOptions = {"max_num_seqs": 3, "dtype": "float32"}
    assert EngineConfig.from_arguments("storyteller", **options).scheduler.max_num_seqs == 3
