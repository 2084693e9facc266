"""docs/compatibility.md says of every name what the code says: nothing is missing, nothing is promised that is not there.

Whoever adds a parameter, an argument or a method moves its row, or adds one; the failure names it.
"""

from __future__ import annotations

import dataclasses
import enum
import inspect
import json
import re
from pathlib import Path
from typing import Any

import pytest

import actorllm
from actorllm import AsyncLLM, AsyncLLMEngine, EngineArgs, LLMEngine, SamplingParams
from actorllm.config import ARGUMENTS
from actorllm.server.field_table import BODIES
from actorllm.types.params import (
    REQUEST_ARGUMENTS,
    VLLM_PARAMETERS,
    VLLM_POOLING_PARAMETERS,
    VLLM_POSITIONS,
    VLLM_REQUEST_ARGUMENTS,
)
from actorllm.types.vllm_options import HARMLESS, VLLM_ARGUMENTS

PAGE = Path(__file__).parents[2] / "docs" / "compatibility.md"
VLLM = json.loads(Path(__file__).with_name("vllm_names.json").read_text())
"""Of a release of vLLM; made by vllm_names.py."""
VLLM_NAMES: dict[str, list[str]] = VLLM["names"]
"""Its public names, by the tables of the page."""
STATUSES = {"same", "differs", "not there", "ours"}


def read_page() -> dict[str, dict[str, tuple[str, str]]]:
    """Section -> name -> (status, note)."""
    sections: dict[str, dict[str, tuple[str, str]]] = {}
    for line in PAGE.read_text().splitlines():
        if line.startswith("## "):
            rows = sections[line[3:]] = {}
        elif match := re.fullmatch(r"\| `((?:[A-Z]+ )?[\w/{}.]+)` \| ([a-z ]+) \| ?(.*?) ?\|", line):
            name, status, note = match.groups()
            assert name not in rows, f"{name} is twice in one table"
            rows[name] = (status, note)
        else:
            assert not line.startswith("| `"), f"a row that cannot be read: {line}"
    return sections


SECTIONS = read_page()


def names(section: str, *, are_there: bool) -> set[str]:
    return {name for name, (status, _) in SECTIONS[section].items() if (status != "not there") == are_there}


def public_names(cls: type[Any]) -> set[str]:
    """Fields, methods and properties that users touch."""
    found = {name for name, _ in inspect.getmembers(cls) if not name.startswith("_")}
    named = dataclasses.fields(cls) if dataclasses.is_dataclass(cls) else ()
    return found | {f.name for f in named if not f.name.startswith("_")}


def accepted_at(values: tuple[Any, ...]) -> str:
    return "accepted at " + " or ".join(f"`{value!r}`" for value in values)


def test_every_row_has_a_status_and_every_difference_a_reason() -> None:
    assert len(SECTIONS) >= 14
    for section, rows in SECTIONS.items():
        assert rows, section
        for name, (status, note) in rows.items():
            assert status in STATUSES, (section, name)
            assert status != "differs" or note, f"{section}: {name} differs, and nobody says how"


CLASSES = [
    "SamplingParams",
    "PoolingParams",
    "PoolingRequestOutput",
    "BeamSearchParams",
    "BeamSearchSequence",
    "BeamSearchOutput",
    "RepetitionDetectionParams",
    "StructuredOutputsParams",
    "RequestOutput",
    "CompletionOutput",
    "Logprob",
    "RequestMetrics",
    "LLM",
    "LLMEngine",
    "AsyncLLM",
]


@pytest.mark.parametrize("name", CLASSES)
def test_a_class_has_what_its_table_says(name: str) -> None:
    there = public_names(getattr(actorllm, name))
    assert there == names(name, are_there=True)
    assert not there & names(name, are_there=False)


def test_flat_logprobs_have_what_their_table_says_beside_what_every_list_has() -> None:
    own = {name for name in vars(actorllm.FlatLogprobs) if not name.startswith("_")}
    fields = {f.name for f in dataclasses.fields(actorllm.FlatLogprobs)}
    assert own | fields == names("FlatLogprobs", are_there=True)


@pytest.mark.parametrize("section", VLLM_NAMES)
def test_every_public_name_of_vllm_has_a_row(section: str) -> None:
    rows = SECTIONS[section] | (SECTIONS["EngineArgs methods"] if section == "EngineArgs" else {})
    assert set(VLLM_NAMES[section]) <= set(rows)
    assert not {name for name in VLLM_NAMES[section] if rows[name][0] == "ours"}
    for name, (status, note) in rows.items():
        if status != "ours" and name not in VLLM_NAMES[section] and not note.startswith("accepted at"):
            assert "of older releases" in note, f"{section}: {name} is nothing of this vLLM's"


def test_the_endpoints_of_vllm_and_the_fields_of_their_bodies_have_rows() -> None:
    """A field that would change the answer is not one of those that are only noted as unknown."""
    rows = SECTIONS["Endpoints"]
    assert {re.sub(r"{[^}]*}", "{id}", name) for name in VLLM["endpoints"]} <= set(rows)
    assert rows["POST /v1/chat/completions"][0] == "same"
    assert rows["POST /v1/audio/transcriptions"][0] == "same"
    assert set(VLLM["bodies"]) == set(BODIES)
    for path, body in BODIES.items():
        found = SECTIONS[f"Fields of {path}"]
        assert set(found) == {*VLLM["bodies"][path], *body.model_fields}
        unknown = [name for name, (status, note) in found.items() if note.startswith("not known here")]
        assert unknown == [], path
        refused = [
            name for name, (status, note) in found.items() if status == "ours" and note.startswith("accepted at")
        ]
        assert refused == [], path
    assert SECTIONS["Fields of /v1/responses"]["max_tokens"] == ("not there", "called `max_output_tokens` in this API")


METHODS = [(section, method) for section, found in VLLM["signatures"].items() for method in found]


def test_methods_take_the_arguments_of_vllm_in_its_order() -> None:
    for section, method in METHODS:
        if SECTIONS[section][method][0] == "not there":
            continue
        taker = getattr(getattr(actorllm, section), method)
        if not callable(taker):
            continue  # a property
        kinds = {name: p.kind for name, p in inspect.signature(taker).parameters.items() if name not in ("self", "cls")}
        ours = [name for name, kind in kinds.items() if kind is inspect.Parameter.POSITIONAL_OR_KEYWORD]
        theirs = VLLM["signatures"][section][method]
        assert ours[: len(theirs["positional"])] == theirs["positional"], f"{section}.{method}"
        for name in theirs["named"]:
            is_extra = inspect.Parameter.VAR_KEYWORD in kinds.values() and name in REQUEST_ARGUMENTS
            assert name in kinds or is_extra, f"{section}.{method}: {name}"


def test_arguments_without_a_name_are_those_of_vllm() -> None:
    """Up to the first that is inside its engine."""
    theirs = VLLM["fields"]["SamplingParams"]
    assert list(VLLM_POSITIONS) == theirs[: theirs.index("output_text_buffer_length")]


def test_the_older_name_of_the_engine() -> None:
    assert public_names(AsyncLLMEngine) - public_names(AsyncLLM) == names("AsyncLLMEngine", are_there=True)


def refused(table: dict[str, tuple[Any, ...]], *but: str) -> dict[str, str]:
    return {name: accepted_at(values) for name, values in table.items() if name not in but}


def notes(section: str, prefix: str = "accepted at") -> dict[str, str]:
    return {
        name: note
        for name, (status, note) in SECTIONS[section].items()
        if status == "not there" and note.startswith(prefix)
    }


def test_parameters_that_are_accepted_at_values() -> None:
    assert notes("SamplingParams") == refused(VLLM_PARAMETERS)
    known = {*SamplingParams.__dataclass_fields__, *VLLM_PARAMETERS}
    assert notes("PoolingParams") == refused(VLLM_POOLING_PARAMETERS)
    others = names("SamplingParams", are_there=False) - known
    for name in others:
        with pytest.raises(actorllm.ActorLLMError, match="has no parameter"):
            SamplingParams(**{name: None})


def test_arguments_of_the_engine() -> None:
    assert names("EngineArgs", are_there=True) == {"model", *ARGUMENTS, *HARMLESS}
    assert notes("EngineArgs") == refused(VLLM_ARGUMENTS, *ARGUMENTS, *HARMLESS)
    assert names("EngineArgs", are_there=False) == set(VLLM_ARGUMENTS) - {*ARGUMENTS, *HARMLESS}
    for name, reason in HARMLESS.items():
        status, note = SECTIONS["EngineArgs"][name]
        assert (status, note.removesuffix("; of older releases")) == ("differs", f"taken with a warning: {reason}"), (
            name
        )
    methods = public_names(EngineArgs) - {f.name for f in dataclasses.fields(EngineArgs)}  # type: ignore[arg-type]
    assert methods == names("EngineArgs methods", are_there=True)


def test_what_may_be_none_in_vllm_may_be_none_here() -> None:
    """Harnesses hand on every argument that they have, None where the user has said nothing."""
    assert "max_num_seqs" in VLLM["optional"]
    given = dict.fromkeys(set(VLLM["optional"]) - {"runner", "convert"})
    EngineArgs("storyteller", **given).create_engine_config()


def test_arguments_of_the_constructor_of_llm() -> None:
    assert set(VLLM["constructor"]) <= {"model", "chat_template", *ARGUMENTS, *VLLM_ARGUMENTS}
    assert "chat_template" in inspect.signature(actorllm.LLM).parameters


def test_arguments_of_a_request() -> None:
    taken = set(REQUEST_ARGUMENTS) - set(VLLM_REQUEST_ARGUMENTS) - {"request_id"}
    assert names("Request arguments", are_there=True) == taken
    assert notes("Request arguments") == refused(VLLM_REQUEST_ARGUMENTS)
    takers = (AsyncLLM.generate, LLMEngine.add_request)
    carried = {name for taker in takers for name in inspect.signature(taker).parameters}
    assert names("Request arguments", are_there=True) <= carried


def test_prompts() -> None:
    for name in names("Prompts", are_there=True):
        assert name in actorllm.__all__
    for name in names("Prompts", are_there=False):
        assert name not in actorllm.__all__


def test_what_the_package_itself_exports() -> None:
    rows = SECTIONS["The package"]
    assert set(rows) == set(VLLM["exported"])
    for name in rows:
        assert (rows[name][0] != "not there") == hasattr(actorllm, name), name


def test_every_public_name_of_vllm_is_exported() -> None:
    listed = re.search(r"from actorllm import ([^`]*)`", PAGE.read_text())
    assert listed is not None
    assert {name.strip() for name in listed[1].split(",")} <= set(actorllm.__all__)


def as_json(value: Any) -> Any:
    return str(value) if isinstance(value, enum.Enum) else value


DEFAULTS: dict[str, dict[str, Any]] = VLLM["defaults"]["fields"]


@pytest.mark.parametrize("section", DEFAULTS)
def test_fields_said_to_be_the_same_have_the_default_of_vllm(section: str) -> None:
    """Where it can be read in vLLM's source; an empty list and None are both nothing."""
    cls = getattr(actorllm, section)
    ours = {f.name: f.default for f in dataclasses.fields(cls)}
    if section == "EngineArgs":
        ours = ARGUMENTS
    told = [name for name, (status, _) in SECTIONS[section].items() if status == "same" and name in DEFAULTS[section]]
    assert len(told) >= 2
    assert {name: as_json(ours[name]) for name in told} == {name: DEFAULTS[section][name] for name in told}


def test_what_is_not_there_is_accepted_at_the_default_of_vllm() -> None:
    for section, accepted in (("SamplingParams", VLLM_PARAMETERS), ("EngineArgs", VLLM_ARGUMENTS)):
        for name, values in accepted.items():
            if name in DEFAULTS[section]:
                assert DEFAULTS[section][name] in values, f"{section}: {name}={DEFAULTS[section][name]!r} is vLLM's"


def test_methods_said_to_be_the_same_have_the_defaults_of_vllm() -> None:
    for section, method in METHODS:
        taker = getattr(getattr(actorllm, section), method, None)
        if SECTIONS[section][method][0] != "same" or not callable(taker):
            continue
        ours = {name: p.default for name, p in inspect.signature(taker).parameters.items()}
        theirs = {name: value for name, value in VLLM["defaults"]["methods"][section][method].items() if name in ours}
        told = {name: value for name, value in theirs.items() if not isinstance(value, str) or "." not in value}
        assert {name: as_json(ours[name]) for name in told} == told, f"{section}.{method}"


def test_defaults_said_to_be_the_same_are_written_out() -> None:
    """Where a default is vLLM's, it is vLLM's: those that programs rely on, spelled out once more."""
    defaults = {
        "temperature": 1.0,
        "top_p": 1.0,
        "top_k": 0,
        "min_p": 0.0,
        "max_tokens": 16,
        "min_tokens": 0,
        "n": 1,
        "ignore_eos": False,
        "detokenize": True,
        "skip_special_tokens": True,
        "include_stop_str_in_output": False,
    }
    params = SamplingParams()
    assert {name: getattr(params, name) for name in defaults} == defaults
    args = EngineArgs()
    assert (args.load_format, args.scheduling_policy, args.dtype) == ("auto", "fcfs", "auto")
