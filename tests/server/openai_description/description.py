"""OpenAI's published description of its API, reduced to what the server answers, and a check against it."""

from __future__ import annotations

import copy
import json
from functools import cache
from pathlib import Path
from typing import Any

from jsonschema import Draft202012Validator

FILE = Path(__file__).parent / "reduced.json"

DIFFERING: dict[str, dict[str, Any]] = {
    "Error.code": {"type": "integer"},
    "CreateCompletionResponse.choices.finish_reason": {"type": ["string", "null"]},
    "CreateCompletionResponse.choices.logprobs": {"type": ["object", "null"]},
    "ModelResponseProperties.user": {"type": ["string", "null"]},
    "Response.usage": {"anyOf": [{"$ref": "#/$defs/ResponseUsage"}, {"type": "null"}]},
}
"""What the description says otherwise than OpenAI's own answers, or than vLLM's.

A status is a number in vLLM, whose clients compare it; the clients of OpenAI read it as the text that the description has
(`check_published`). The description leaves out null where OpenAI's own events have it: the
reason to finish and the usage before the end, the log-probability of a first token, a user that is not told.
"""


@cache
def _published() -> dict[str, Any]:
    tree: dict[str, Any] = json.loads(FILE.read_text())
    return tree


@cache
def _tree() -> dict[str, Any]:
    tree = copy.deepcopy(_published())
    for place, schema in DIFFERING.items():
        name, *path = place.split(".")
        found = tree["$defs"][name]
        for part in path[:-1]:
            found = _properties(found)[part]["items"]
        _properties(found)[path[-1]] = schema
    return tree


def _properties(schema: dict[str, Any]) -> dict[str, Any]:
    parts = [schema, *schema.get("allOf", ())]
    found: dict[str, Any] = next(part["properties"] for part in reversed(parts) if "properties" in part)
    return found


@cache
def _validator(name: str) -> Draft202012Validator:
    return Draft202012Validator({"$ref": f"#/$defs/{name}", "$defs": _tree()["$defs"]})


@cache
def _events() -> dict[str, str]:
    """Schemas of the events of a response by their types."""
    schemas = _tree()["$defs"]
    types = {name: one["properties"]["type"] for name, one in schemas.items() if name.endswith("Event")}
    return {kind["enum"][0]: name for name, kind in types.items()}


def check(name: str, answer: Any) -> None:
    """Raises AssertionError with the first places where an answer is not as the schema of this name says."""
    wrong = [f"{error.json_path}: {error.message:.200}" for error in _validator(name).iter_errors(answer)]
    assert not wrong, (name, wrong[:5])


def check_published(name: str, answer: Any) -> None:
    """As `check`, without what differs: for what a client of OpenAI makes of an answer."""
    Draft202012Validator({"$ref": f"#/$defs/{name}", "$defs": _published()["$defs"]}).validate(answer)


def check_event(event: dict[str, Any]) -> None:
    """As `check`, for an event of a response."""
    assert event["type"] in _events(), event["type"]
    check(_events()[event["type"]], event)
