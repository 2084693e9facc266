"""Grammars that are legal and take long."""

from __future__ import annotations

import json
from typing import Any


def large_tag(number: int, num_tags: int = 180) -> dict[str, Any]:
    """A structural tag of some 110 KB that is compiled in a second; each number is another one."""
    tags = [
        {
            "begin": f"<f{at}>",
            "content": {
                "type": "json_schema",
                "json_schema": {
                    "type": "object",
                    "properties": {
                        f"a{number}_{at}_{i}": {"type": "string", "maxLength": 40 + at % 60} for i in range(10)
                    },
                },
            },
            "end": "</f>",
        }
        for at in range(num_tags)
    ]
    format = {"type": "triggered_tags", "triggers": ["<f"], "tags": tags}
    return {"structural_tag": json.dumps({"type": "structural_tag", "format": format})}


def slow_schema(num_properties: int = 4000) -> dict[str, Any]:
    """An open object: llguidance takes the square of the number of its properties."""
    return {"json": {"type": "object", "properties": {f"prop{at}": {"type": "string"} for at in range(num_properties)}}}
