"""What a request says of output in a form: tools and how they are to be called, `response_format`, `structured_outputs`.

Owns the checks of these fields, and what the engine is asked for them. That is nothing where the model may answer as it likes
and only its text is looked through for calls; else it is a grammar. Called by `sampling` and `chat`.
"""

from __future__ import annotations

import contextlib
import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from actorllm.errors import InvalidParameterError
from actorllm.server.envelope import ApiError, shown
from actorllm.server.tool_parsers import Tool, ToolParser
from actorllm.text.json_schema import MAX_TOLD, held
from actorllm.text.structural_tag import schemas_of
from actorllm.types.structured_outputs import StructuredOutputsParams, structured_outputs_of

CHOICES = ("none", "auto", "required")
FORMATS = ("text", "json_object", "json_schema", "structural_tag")
MAX_LOOKED_THROUGH = 32 << 10
"""Characters of a schema that is looked through for what is to be warned of."""
MAX_WARNED = 200
"""Characters of one warning; all of them go into one header."""
OPTIONS_OF_JSON = ("disable_any_whitespace", "disable_additional_properties", "whitespace_pattern")


@dataclass(frozen=True, slots=True)
class ToolUse:
    """How a request may call its tools. Of a request that may not, there is none."""

    parser: type[ToolParser]
    names: Mapping[str, Mapping[str, Any]]
    """Of the functions that may be called, with the schemas of their arguments."""
    is_named: bool
    """One function is demanded by name."""
    is_parallel: bool
    """There may be several calls in one answer."""
    ignores_strict: bool
    """A tool is strict, and the model is free to write what it likes: nothing tells a call from text in advance."""
    structured: StructuredOutputsParams | None
    """The grammar that demands what is demanded; None: the model writes what it likes."""
    request: Any = None
    """The body, for a parser that asks it."""

    def warnings(self, shows_tools: bool) -> list[str]:
        """What is to be said of it. shows_tools: the chat template does."""
        warnings = []
        if not shows_tools:
            warnings.append("tools: the chat template of this model does not show them to it")
        if self.ignores_strict:
            warnings.append("tools: strict has no effect with 'auto', since calls of this model have no marker")
        return warnings

    def new_parser(self) -> ToolParser:
        """For one sequence."""
        return self.parser.for_request(self.names, self.request)


def response_format_of(body: Any) -> StructuredOutputsParams | None:
    """The grammar that a request asks for beside its tools. Raises ApiError and InvalidParameterError."""
    given = body.structured_outputs
    asked = _of_format(body.response_format)
    if asked is None:
        return structured_outputs_of(given)
    if given is not None:
        raise ApiError(400, "response_format beside structured_outputs: give one of them", "response_format")
    return asked


def _of_format(format: Any) -> StructuredOutputsParams | None:
    if format is None:
        return None
    kind = format.get("type")
    if kind not in FORMATS:
        raise ApiError(
            400, f"response_format: type={shown(kind)} must be one of {', '.join(FORMATS)}", "response_format"
        )
    if kind == "text":
        return None
    if kind == "json_object":
        return _params("response_format", json_object=True)
    if kind == "structural_tag":
        return _params("response_format", structural_tag=_written(format, "response_format"))
    holder = format.get("json_schema")
    schema = holder.get("schema") if isinstance(holder, Mapping) else None
    if not isinstance(schema, Mapping):
        raise ApiError(400, "response_format: json_schema must be an object with a schema", "response_format")
    asked = _params("response_format", json=_written(schema, "response_format"))
    return asked.as_hint() if holder.get("strict") is False else asked


def warnings_of(structured: Any) -> list[str]:
    """What is to be said of a schema that its grammar does not hold as a whole. Other failures are the scheduler's to tell."""
    if structured is None:
        return []
    fields = structured.to_fields()
    text = fields["text"]
    is_hint = fields.get("strict") is False
    if fields["kind"] not in ("json", "structural_tag") or not (is_hint or "uniqueItems" in text):
        return []
    if len(text) > MAX_LOOKED_THROUGH:
        return []  # it takes the server's loop too long; the engine's log has it
    tree = json.loads(text)
    dropped: list[str] = []
    with contextlib.suppress(ValueError, ArithmeticError):
        for schema in [tree] if fields["kind"] == "json" else schemas_of(tree):
            dropped += held(schema, is_hint=is_hint)
    return [_told(f"{fields['source']}: {name} is not held by the grammar") for name in dropped[:MAX_TOLD]]


def _told(text: str) -> str:
    """As it may be in a header: a schema's names are its author's."""
    return "".join(one if one.isascii() and one.isprintable() else "?" for one in text[:MAX_WARNED])


def tool_use_of(body: Any, parser: type[ToolParser]) -> ToolUse | None:
    """None: the request has no tools, or must not call them. Raises ApiError."""
    choice = body.tool_choice
    # Which tools there are, and whether a call is possible at all.
    if body.tools is None:
        if choice not in (None, "none", "auto"):
            raise ApiError(400, f"tool_choice={shown(choice)} needs tools", "tool_choice")
        return None
    if not body.tools:
        raise ApiError(400, "tools is empty: leave it out, or give at least one", "tools")
    tools = [_tool(one) for one in body.tools]
    if choice == "none":
        return None
    name = None if choice is None or isinstance(choice, str) else _chosen(choice, tools)
    if name is None and choice not in (None, *CHOICES):
        raise ApiError(
            400, f"tool_choice={shown(choice)} must be one of {', '.join(CHOICES)}, or a function", "tool_choice"
        )
    # A demanded call leaves no room for another form of answer.
    is_demanded = name is not None or choice == "required"
    is_parallel = body.parallel_tool_calls is not False and name is None
    format = response_format_of(body)
    field = "structured_outputs" if body.structured_outputs is not None else "response_format"
    if is_demanded and format is not None:
        raise ApiError(400, f"tool_choice={shown(choice)} demands a call, and {field} another form of answer", field)
    # What the answer may be, as a structural tag: a call, a call or the JSON that is asked for, or free text in which a
    # marker begins a call. Without any of these no grammar is needed.
    called = tools if name is None else [tool for tool in tools if tool.name == name]
    calls = parser.tag(called, is_single=not is_parallel)
    is_strict = any(_is_strict(one) for one in body.tools)
    tag: dict[str, Any] | None = None
    if is_demanded:
        tag = calls
    elif format is not None:
        if format.json is None and format.json_object is None:
            raise ApiError(400, f"{field} beside tools must be a JSON schema, or json_object", field)
        for option in OPTIONS_OF_JSON:
            if getattr(format, option):
                raise ApiError(
                    400,
                    f"structured_outputs: {option} is not supported beside tools; leave it out",
                    "structured_outputs",
                )
        # json_object is the schema that admits every object.
        schema = format.json or {"type": "object"}
        if isinstance(schema, str):
            schema = json.loads(schema)
        tag = {"type": "or", "elements": [calls, parser.answer_tag({"type": "json_schema", "json_schema": schema})]}
    # Strict tools with a free choice: the grammar begins at the marker. Calls without a marker cannot be told from text
    # before they have ended, so strict has no effect there, and a warning says so.
    elif is_strict and _is_marked(calls, parser.MARKER):
        tag = {"type": "triggered_tags", "triggers": [parser.MARKER], "tags": calls["tags"]}
        tag["stop_after_first"] = not is_parallel
    structured = None
    if tag is not None:
        text = _written({"type": "structural_tag", "format": tag}, "tools")
        structured = _params("tools", structural_tag=text)
        # Clients say so of every tool, and expect arguments by the schema all the same: only what no grammar holds is free.
        if any(tool["function"].get("strict") is False for tool in body.tools):
            structured = structured.as_hint()
        if parser.READS_THOUGHTS:
            structured.from_start()
        parser = parser.DEMANDED or parser
    names = {tool.name: tool.parameters for tool in called}
    return ToolUse(parser, names, name is not None, is_parallel, is_strict and tag is None, structured, body)


def _tool(given: Any) -> Tool:
    function = (
        given.get("function") if isinstance(given, Mapping) and given.get("type", "function") == "function" else None
    )
    if not isinstance(function, Mapping):
        raise ApiError(400, f"tools: {shown(given)} must be an object with type 'function' and a function", "tools")
    name, parameters = function.get("name"), function.get("parameters")
    if not isinstance(name, str) or not name.isprintable() or not name.strip():
        raise ApiError(400, f"tools: name={shown(name)} must be the name of a function", "tools")
    if parameters is not None and not isinstance(parameters, Mapping):
        raise ApiError(400, f"tools: the parameters of {shown(name)} must be a JSON schema", "tools")
    return Tool(name, parameters or {"type": "object"})


def _is_marked(calls: Mapping[str, Any], marker: str) -> bool:
    """Whether a call is told from text by what it begins with: then the text before it can be free."""
    return bool(marker) and all(tag["begin"].startswith(marker) for tag in calls.get("tags", ({"begin": ""},)))


def _is_strict(given: Mapping[str, Any]) -> bool:
    return given["function"].get("strict") is True


def _chosen(choice: Any, tools: Sequence[Tool]) -> str:
    function = choice.get("function")
    name = function.get("name") if isinstance(function, Mapping) else None
    if choice.get("type") != "function" or not isinstance(name, str):
        raise ApiError(
            400,
            f"tool_choice={shown(choice)} must be "
            '{"type": "function", "function": {"name": ...}}, or one of ' + ", ".join(CHOICES),
            "tool_choice",
        )
    if all(tool.name != name for tool in tools):
        known = ", ".join(shown(tool.name) for tool in tools[:MAX_TOLD])
        raise ApiError(400, f"tool_choice: there is no tool {shown(name)}; there are {known:.400}", "tool_choice")
    return name


def _params(field: str, **given: Any) -> StructuredOutputsParams:
    """What a field asks for, called by its name in errors."""
    try:
        return StructuredOutputsParams(**given).named(field)
    except InvalidParameterError as error:
        raise ApiError(400, str(error).replace("structured_outputs", field, 1), field) from error


def _written(tree: Any, field: str) -> str:
    try:
        return json.dumps(tree, ensure_ascii=False)
    except (RecursionError, ValueError, TypeError) as error:
        raise ApiError(400, f"{field} cannot be used as JSON: {error}", field) from error
