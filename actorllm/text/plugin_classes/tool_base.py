"""vLLM's base class of parsers of tool calls, and the functions that such parsers use."""

from __future__ import annotations

import importlib
import json
from collections.abc import Sequence
from functools import cached_property
from typing import Any

from actorllm.errors import ConfigError


class PluginToolParser:
    """What vLLM calls `ToolParser`. A subclass has `extract_tool_calls` and `extract_tool_calls_streaming`."""

    def __init__(self, tokenizer: Any, tools: Any = None) -> None:
        """tokenizer: the model's, as transformers has it. tools: of the request."""
        self.model_tokenizer = tokenizer
        self.tools = tools
        self.prev_tool_call_arr: list[dict[str, Any]] = []
        self.current_tool_id = -1
        self.current_tool_name_sent = False
        self.streamed_args_for_tool: list[str] = []

    @cached_property
    def vocab(self) -> dict[str, int]:
        """Ids by token."""
        found: dict[str, int] = self.model_tokenizer.get_vocab()
        return found

    def adjust_request(self, request: Any) -> Any:
        """The request; demanded calls have a grammar of ours."""
        return request

    def extract_tool_calls(self, model_output: str, request: Any) -> Any:
        """The calls in a whole text."""
        raise NotImplementedError(f"{type(self).__name__}.extract_tool_calls")

    def extract_tool_calls_streaming(
        self,
        previous_text: str,
        current_text: str,
        delta_text: str,
        previous_token_ids: Sequence[int],
        current_token_ids: Sequence[int],
        delta_token_ids: Sequence[int],
        request: Any,
    ) -> Any:
        """What is new."""
        raise NotImplementedError(f"{type(self).__name__}.extract_tool_calls_streaming")


def find_common_prefix(s1: str, s2: str) -> str:
    """What both texts begin with."""
    number = next((i for i, (a, b) in enumerate(zip(s1, s2, strict=False)) if a != b), min(len(s1), len(s2)))
    return s1[:number]


def find_common_suffix(s1: str, s2: str) -> str:
    """What both texts end with, up to the first letter or digit from the end."""
    number = 0
    for a, b in zip(reversed(s1), reversed(s2), strict=False):
        if a != b or a.isalnum():
            break
        number += 1
    return s1[len(s1) - number :]


def extract_intermediate_diff(curr: str, old: str) -> str:
    """What the newer text has between what it begins and what it ends with as the older one does."""
    suffix = find_common_suffix(curr, old)
    kept = old[: len(old) - len(suffix)]
    prefix = find_common_prefix(curr, kept)
    return curr[len(prefix) : len(curr) - len(suffix)]


def find_all_indices(string: str, substring: str) -> list[int]:
    """Where the second text begins in the first one."""
    places: list[int] = []
    while (place := string.find(substring, places[-1] + 1 if places else 0)) >= 0:
        places.append(place)
    return places


def is_complete_json(input_str: str) -> bool:
    """Whether the text is JSON."""
    try:
        json.loads(input_str)
    except json.JSONDecodeError:
        return False
    return True


def consume_space(i: int, s: str) -> int:
    """The next place from `i` on without white space."""
    while i < len(s) and s[i].isspace():
        i += 1
    return i


def partial_json_loads(input_str: str, flags: Any) -> tuple[Any, int]:
    """The value of JSON that is not complete, and how many characters it has. flags: of the package partial-json-parser.

    Raises ConfigError where that package is missing.
    """
    try:
        partial_json_parser = importlib.import_module("partial_json_parser")
    except ModuleNotFoundError as error:
        raise ConfigError("this plug-in reads partial JSON: pip install partial-json-parser") from error
    try:
        return partial_json_parser.loads(input_str, flags), len(input_str)
    except json.JSONDecodeError as error:
        if "Extra data" not in error.msg:
            raise
        return json.JSONDecoder().raw_decode(input_str)
