"""What `help` says of public classes: every parameter is named, errors are, and the examples run."""

from __future__ import annotations

import ast
import asyncio
import dataclasses
import inspect
import re
import textwrap
from collections.abc import Callable, Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from safetensors.torch import load_file

import actorllm
from actorllm import LLM, AsyncLLM, errors
from actorllm.client.engine import Engine

CLASSES = [one for one in (getattr(actorllm, name) for name in actorllm.__all__) if isinstance(one, type)]
STORYTELLER = Path(actorllm.__file__).parent / "bundled" / "storyteller"
PARAMETERS = [
    actorllm.SamplingParams,
    actorllm.PoolingParams,
    actorllm.PoolerConfig,
    actorllm.SLO,
    actorllm.StructuredOutputsParams,
    actorllm.RepetitionDetectionParams,
    actorllm.BeamSearchParams,
]


def public_functions(cls: type[Any]) -> Iterator[tuple[str, Callable[..., Any]]]:
    """Methods and getters of properties, its own and those of bases of ours."""
    seen: set[str] = set()
    for base in cls.__mro__:
        if not base.__module__.startswith("actorllm"):
            continue
        for name, found in vars(base).items():
            function = found.fget if isinstance(found, property) else getattr(found, "__func__", found)
            if not name.startswith("_") and inspect.isfunction(function) and name not in seen:
                seen.add(name)
                yield name, function


METHODS = {function.__qualname__: (cls, function) for cls in reversed(CLASSES) for _, function in public_functions(cls)}
"""Those of bases as well, which are not public themselves: `BlockingDoor.stats` is a method of `LLM`."""


def is_named(name: str, text: str) -> bool:
    return re.search(rf"(?<![\w.]){name}\b", text) is not None


def test_the_search_for_methods_finds_them() -> None:
    assert {"AsyncLLM.generate", "LLM.chat", "LLMEngine.step", "RequestStream.take", "SLO.is_met"} <= set(METHODS)
    assert {"BlockingDoor.stats", "BlockingDoor.sleep"} <= set(METHODS)
    assert len(METHODS) > 230


def test_every_public_method_says_what_its_parameters_are() -> None:
    told = {name: inspect.getdoc(function) or "" for name, (_, function) in METHODS.items()}
    assert [name for name, text in told.items() if not text] == [], "without a docstring"
    assert [
        f"{name} does not say what {parameter} is"
        for name, (_, function) in METHODS.items()
        for parameter in inspect.signature(function).parameters
        if parameter not in ("self", "cls") and not is_named(parameter, told[name])
    ] == []


@pytest.mark.parametrize("cls", PARAMETERS)
def test_classes_of_parameters_say_what_each_is(cls: type[Any]) -> None:
    told = inspect.getdoc(cls) or ""
    for field in dataclasses.fields(cls):
        if field.init:
            assert re.search(rf"^ +([\w, ]+, )?{field.name}(, [\w, ]+)?: ", told, re.MULTILINE), field.name


# Errors -------------------------------------------------------------------------------------------------------------


def called_by(function: Callable[..., Any], cls: type[Any] | None) -> Iterator[tuple[Any, type[Any] | None]]:
    """The functions of ours that a function calls by name, on itself, or on the engine of a front door."""
    for node in ast.walk(ast.parse(textwrap.dedent(inspect.getsource(function)))):
        if not isinstance(node, ast.Call):
            continue
        match node.func:
            case ast.Name(id=name):
                yield function.__globals__.get(name), None
            case ast.Attribute(value=ast.Name(id="self" | "cls"), attr=name):
                yield getattr(cls, name, None), cls
            case ast.Attribute(value=ast.Attribute(value=ast.Name(id="self"), attr="_engine"), attr=name):
                yield getattr(Engine, name, None), Engine


def raised_by(function: Callable[..., Any], cls: type[Any] | None, seen: set[Any] | None = None) -> set[str]:
    """Errors of ours that a function raises by name, itself or through what it calls."""
    seen = set() if seen is None else seen
    function = inspect.unwrap(function)
    if function in seen or not inspect.isroutine(function) or not function.__module__.startswith("actorllm"):
        return set()
    seen.add(function)
    source = textwrap.dedent(inspect.getsource(function))
    found = {
        node.exc.func.id
        for node in ast.walk(ast.parse(source))
        if isinstance(node, ast.Raise) and isinstance(node.exc, ast.Call) and isinstance(node.exc.func, ast.Name)
    }
    found = {name for name in found if hasattr(errors, name)}
    for called, owner in called_by(function, cls):
        called = getattr(called, "__func__", called)
        if inspect.isfunction(called):
            found |= raised_by(called, owner, seen)
    return found


def test_the_search_for_errors_finds_them() -> None:
    assert "DuplicateRequestError" in raised_by(AsyncLLM.generate, AsyncLLM)
    assert "InvalidParameterError" in raised_by(LLM.start_profile, LLM)
    assert raised_by(AsyncLLM.is_tracing_enabled, AsyncLLM) == set()


def test_methods_that_raise_say_what() -> None:
    assert [
        f"{name} raises {', '.join(sorted(raised))}"
        for name, (cls, function) in METHODS.items()
        if (raised := raised_by(function, cls)) and not re.search(r"\bRaises\b", inspect.getdoc(function) or "")
    ] == []


def test_errors_that_docstrings_name_exist() -> None:
    for name, (_, function) in METHODS.items():
        for error in re.findall(r"\b[A-Z]\w+Error\b", inspect.getdoc(function) or ""):
            assert hasattr(errors, error) or error in ("TypeError", "ValueError", "TimeoutError"), f"{name}: {error}"


# Examples -----------------------------------------------------------------------------------------------------------


def examples() -> dict[str, str]:
    """The block below "Example:" of every public docstring."""
    texts = {cls.__name__: inspect.cleandoc(cls.__doc__ or "") for cls in CLASSES}
    texts |= {name: inspect.getdoc(function) or "" for name, (_, function) in METHODS.items()}
    found = {}
    for name, text in texts.items():
        _, marker, block = text.partition("\nExample:\n")
        if marker:
            lines = []
            for line in block.split("\n"):
                if line and not line.startswith("    "):
                    break
                lines.append(line)
            found[name] = textwrap.dedent("\n".join(lines)).strip()
    return found


EXAMPLES = examples()


def of_the_same_engine(llm: LLM) -> AsyncLLM:
    made = AsyncLLM.__new__(AsyncLLM)
    made._engine, made._hold = llm._engine, llm._hold
    return made


@pytest.fixture(scope="module")
def doors() -> Iterator[dict[str, LLM]]:
    small: Any = {"topology": "inline", "dtype": "float32", "num_threads": 1, "max_num_seqs": 8}
    with (
        LLM("storyteller", enable_sleep_mode=True, **small) as llm,
        LLM("storyteller", runner="pooling", **small) as embedder,
    ):
        yield {"llm": llm, "embedder": embedder}


@pytest.fixture
def trained(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Any:
    """What examples call `policy`: a model of the application's own, with a checkpoint of it below this folder."""
    monkeypatch.chdir(tmp_path)
    (tmp_path / "checkpoints").mkdir()
    (tmp_path / "checkpoints" / "step-40").symlink_to(STORYTELLER)
    return SimpleNamespace(state_dict=lambda: load_file(STORYTELLER / "model.safetensors"))


@pytest.mark.parametrize("name", EXAMPLES)
def test_an_example_runs(name: str, doors: dict[str, LLM], trained: Any, capsys: pytest.CaptureFixture[str]) -> None:
    if "structured_outputs" in EXAMPLES[name]:
        pytest.importorskip("llguidance")
    names: dict[str, Any] = {one: getattr(actorllm, one) for one in actorllm.__all__} | {"policy": trained}
    is_async = "async " in EXAMPLES[name] or "await " in EXAMPLES[name]
    if is_async:
        names |= {door: of_the_same_engine(llm) for door, llm in doors.items()}
        program = "async def example():\n" + textwrap.indent(EXAMPLES[name], "    ")
        exec(compile(program, name, "exec"), names)
        asyncio.run(names["example"]())
    else:
        names |= {**doors, "engine": doors["llm"].llm_engine}
        exec(compile(EXAMPLES[name], name, "exec"), names)
    assert ("print(" in EXAMPLES[name]) == bool(capsys.readouterr().out.strip())
    for door in doors.values():  # after `unload`: what it opens anew is no leak of the next example
        door._engine.start()


def test_the_main_methods_have_examples() -> None:
    main = {
        "AsyncLLM": ("generate", "chat", "stream", "complete", "encode", "embed", "score", "beam_search"),
        "LLM": ("generate", "chat", "encode", "embed", "score", "enqueue", "beam_search"),
        "LLMEngine": ("add_request", "abort_request", "step"),
        "EngineArgs": ("create_engine_config", "add_cli_args"),
    }
    assert {f"{cls}.{method}" for cls, methods in main.items() for method in methods} <= set(EXAMPLES)
