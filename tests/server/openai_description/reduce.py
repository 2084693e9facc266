"""Reduce OpenAI's OpenAPI description to what the server answers: `python reduce.py FULL.json > reduced.json`.

FULL.json is the description of github.com/openai/openai-openapi at f85dbe2 (2026-08-21, version 2.3.0) as JSON. Its licence (MIT)
is beside this file. Schemas are kept as they are, except for:

- texts, examples, defaults and formats, which say nothing of a value's shape;
- `nullable`, which becomes a type of JSON Schema;
- unions of items and tools, of which the kinds stay that a server without OpenAI's own tools can have.
"""

from __future__ import annotations

import json
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

REVISION = "openai/openai-openapi at f85dbe2 (2026-08-21, version 2.3.0), MIT"
ROOTS = (
    *("CreateChatCompletionResponse", "CreateChatCompletionStreamResponse", "CreateCompletionResponse"),
    *("CreateEmbeddingResponse", "ListModelsResponse", "Model", "ErrorResponse"),
    *("Response", "ResponseItemList", "ResponseCreatedEvent", "ResponseQueuedEvent", "ResponseInProgressEvent"),
    *("ResponseCompletedEvent", "ResponseIncompleteEvent", "ResponseFailedEvent", "ResponseErrorEvent"),
    *("ResponseOutputItemAddedEvent", "ResponseOutputItemDoneEvent"),
    *("ResponseContentPartAddedEvent", "ResponseContentPartDoneEvent"),
    *("ResponseTextDeltaEvent", "ResponseTextDoneEvent"),
    *("ResponseFunctionCallArgumentsDeltaEvent", "ResponseFunctionCallArgumentsDoneEvent"),
    *("ResponseReasoningTextDeltaEvent", "ResponseReasoningTextDoneEvent"),
)
KEPT = {
    "OutputItem": ("OutputMessage", "FunctionToolCall", "ReasoningItem"),
    "ItemResource": (
        "InputMessageResource",
        "OutputMessage",
        "FunctionToolCallResource",
        "FunctionToolCallOutputResource",
        "ReasoningItem",
    ),
    "InputItem": ("EasyInputMessage", "Item"),
    "Item": ("InputMessage", "OutputMessage", "FunctionToolCall", "FunctionCallOutputItemParam", "ReasoningItem"),
    "Tool": ("FunctionTool",),
    "ToolChoiceParam": ("ToolChoiceOptions", "ToolChoiceFunction"),
}
"""Of these unions."""
DROPPED = ("description", "title", "default", "deprecated", "example", "examples", "format", "discriminator")


def reduced(tree: dict[str, Any]) -> dict[str, Any]:
    """tree: the whole description. Returns schemas by their names."""
    schemas = tree["components"]["schemas"]
    found: dict[str, Any] = {}
    waiting = list(ROOTS)
    while waiting:
        name = waiting.pop()
        if name not in found:
            found[name] = _kept(name, _plain(schemas[name]))
            waiting += _names(found[name])
    return dict(sorted(found.items()))


def _kept(name: str, schema: Any) -> Any:
    for union in ("anyOf", "oneOf"):
        if name in KEPT and union in schema:
            schema[union] = [one for one in schema[union] if next(_names(one), None) in KEPT[name]]
    return schema


def _plain(schema: Any) -> Any:
    if isinstance(schema, list):
        return [_plain(one) for one in schema]
    if not isinstance(schema, dict):
        return schema
    plain = {
        key: {name: _plain(one) for name, one in value.items()} if key == "properties" else _plain(value)
        for key, value in schema.items()
        if key not in DROPPED and not key.startswith("x-") and key != "nullable"
    }
    if "$ref" in plain:
        plain["$ref"] = f"#/$defs/{plain['$ref'].rpartition('/')[2]}"
    return {"anyOf": [plain, {"type": "null"}]} if schema.get("nullable") else plain


def _names(schema: Any) -> Iterator[str]:
    """Of the schemas that one refers to."""
    if isinstance(schema, list):
        for one in schema:
            yield from _names(one)
    elif isinstance(schema, dict):
        for key, value in schema.items():
            if key == "$ref":
                yield value.rpartition("/")[2]
            else:
                yield from _names(value)


def main() -> None:
    schemas = reduced(json.loads(Path(sys.argv[1]).read_text()))
    lines = [f"{json.dumps(name)}: {json.dumps(schema)}" for name, schema in schemas.items()]
    print(f'{{"source": {json.dumps(REVISION)},', '"$defs": {', ",\n".join(lines), "}}", sep="\n")


if __name__ == "__main__":
    main()
