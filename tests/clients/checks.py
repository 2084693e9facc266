"""What the scripts of the clients share: a list of checks, and a line of JSON about each. Standard library only.

A check that says `NotYet` needs something that the server does not offer; that is told, and is no failure.
"""

from __future__ import annotations

import inspect
import json
import sys
import time
import traceback
import urllib.request
from collections.abc import Callable
from importlib.metadata import version
from typing import Any

URL = sys.argv[1] if len(sys.argv) > 1 else ""
MODEL = "storyteller"
TEXT = "Once upon a time"
MESSAGES = [{"role": "user", "content": TEXT}]
_checks: list[Callable[[], Any]] = []


class NotYet(Exception):
    """The server does not offer this."""


def check(function: Callable[[], Any]) -> Callable[[], Any]:
    _checks.append(function)
    return function


def has_path(path: str) -> bool:
    with urllib.request.urlopen(f"{URL}/openapi.json") as response:
        return path in json.load(response)["paths"]


def needs_path(path: str) -> None:
    if not has_path(path):
        raise NotYet(path)


def needs_tools() -> None:
    body = {"messages": MESSAGES, "max_tokens": 1, "tool_choice": "required", "tools": [WEATHER]}
    request = urllib.request.Request(f"{URL}/v1/chat/completions", json.dumps(body).encode())
    try:
        urllib.request.urlopen(request).close()
    except urllib.error.HTTPError as error:
        raise NotYet("tools") from error


WEATHER = {
    "type": "function",
    "function": {
        "name": "weather",
        "description": "The weather of a city",
        "parameters": {
            "type": "object",
            "properties": {"city": {"type": "string", "enum": ["Berlin", "Paris"]}, "days": {"enum": [1, 2, 3]}},
            "required": ["city", "days"],
            "additionalProperties": False,
        },
    },
}


def run(*packages: str) -> None:
    told: dict[str, Any] = {"versions": {package: version(package) for package in packages}, "checks": []}
    for function in _checks:
        began = time.monotonic()
        outcome: dict[str, Any] = {"check": function.__name__, "outcome": "ok"}
        try:
            result = function()
            if inspect.iscoroutine(result):
                import asyncio

                asyncio.run(result)
        except NotYet as missing:
            outcome |= {"outcome": "not yet", "why": str(missing)}
        except BaseException:
            outcome |= {"outcome": "failed", "why": traceback.format_exc()[-1500:]}
        outcome["seconds"] = round(time.monotonic() - began, 2)
        told["checks"].append(outcome)
    print(json.dumps(told))
