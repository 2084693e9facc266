"""What plug-in parsers are given and give back: vLLM's messages, calls and requests, as far as parsers use them."""

from __future__ import annotations

import json
import logging
import random
import string
import uuid
from collections.abc import Mapping
from typing import Any, ClassVar

ALPHANUMERIC = string.ascii_letters + string.digits


class ModelFields:
    """Fields by name; those that were not given have the default of the class. vLLM's are pydantic models."""

    FIELDS: ClassVar[Mapping[str, Any]] = {}

    def __init__(self, **fields: Any) -> None:
        self.__pydantic_fields_set__ = set(fields)
        for name, default in self.FIELDS.items():
            setattr(self, name, default() if callable(default) else default)
        for name, value in fields.items():
            setattr(self, name, value)

    def model_dump(self, *, exclude_none: bool = False, exclude_unset: bool = False, **_: Any) -> dict[str, Any]:
        """As a mapping. exclude_none, exclude_unset: without what is None, or was not given."""
        told: dict[str, Any] = {}
        for name, value in vars(self).items():
            is_left_out = (exclude_none and value is None) or (
                exclude_unset and name not in self.__pydantic_fields_set__
            )
            if not name.startswith("__") and not is_left_out:
                told[name] = _dumped(value, exclude_none, exclude_unset)
        return told

    def model_dump_json(self, **options: Any) -> str:
        """As JSON. options: of `model_dump`."""
        return json.dumps(self.model_dump(**options), ensure_ascii=False)

    def __eq__(self, other: object) -> bool:
        return type(other) is type(self) and self.model_dump() == other.model_dump()

    __hash__ = None  # type: ignore[assignment]

    def __repr__(self) -> str:
        return f"{type(self).__name__}({', '.join(f'{k}={v!r}' for k, v in self.model_dump().items())})"


def _dumped(value: Any, exclude_none: bool, exclude_unset: bool) -> Any:
    if isinstance(value, ModelFields):
        return value.model_dump(exclude_none=exclude_none, exclude_unset=exclude_unset)
    if isinstance(value, list | tuple):
        return [_dumped(one, exclude_none, exclude_unset) for one in value]
    return value


def random_tool_call_id() -> str:
    """An id for a call."""
    return f"chatcmpl-tool-{uuid.uuid4().hex}"


def make_tool_call_id(id_type: str = "random", func_name: str | None = None, idx: int | None = None) -> str:
    """An id for a call. id_type: "kimi_k2" makes it of func_name and idx."""
    return f"functions.{func_name}:{idx}" if id_type == "kimi_k2" else random_tool_call_id()


class FunctionCall(ModelFields):
    """Of a whole call: name and arguments, these as JSON."""

    FIELDS: ClassVar[Mapping[str, Any]] = {"name": "", "arguments": ""}


class ToolCall(ModelFields):
    """A whole call."""

    FIELDS: ClassVar[Mapping[str, Any]] = {"id": random_tool_call_id, "type": "function", "function": None}


class MistralToolCall(ToolCall):
    """A whole call with an id that Mistral's templates take: nine letters and digits."""

    FIELDS: ClassVar[Mapping[str, Any]] = {**ToolCall.FIELDS, "id": lambda: "".join(random.choices(ALPHANUMERIC, k=9))}


class DeltaFunctionCall(ModelFields):
    """Of a call in a stream: the name, and more of the arguments."""

    FIELDS: ClassVar[Mapping[str, Any]] = {"name": None, "arguments": None}


class DeltaToolCall(ModelFields):
    """More of a call in a stream."""

    FIELDS: ClassVar[Mapping[str, Any]] = {"id": None, "type": None, "index": 0, "function": None}


class DeltaMessage(ModelFields):
    """More of a message in a stream. `reasoning_content` is the older name of `reasoning`."""

    FIELDS: ClassVar[Mapping[str, Any]] = {"role": None, "content": None, "reasoning": None, "tool_calls": list}

    def __init__(self, **fields: Any) -> None:
        older = fields.pop("reasoning_content", None)
        super().__init__(**fields)
        if self.reasoning is None and older is not None:
            self.reasoning = older

    @property
    def reasoning_content(self) -> str | None:
        """The thought."""
        return self.reasoning

    @reasoning_content.setter
    def reasoning_content(self, value: str | None) -> None:
        self.reasoning = value

    reasoning: str | None
    content: str | None


class ExtractedToolCallInformation(ModelFields):
    """What a parser finds in a whole text."""

    FIELDS: ClassVar[Mapping[str, Any]] = {"tools_called": False, "tool_calls": list, "content": None}


class FunctionDefinition(ModelFields):
    """A function that may be called."""

    FIELDS: ClassVar[Mapping[str, Any]] = {"name": "", "description": None, "parameters": None}


class ChatCompletionToolsParam(ModelFields):
    """A tool of a request."""

    FIELDS: ClassVar[Mapping[str, Any]] = {"type": "function", "function": None}

    def __init__(self, **fields: Any) -> None:
        super().__init__(**fields)
        if isinstance(self.function, Mapping):
            self.function = FunctionDefinition(**self.function)

    function: Any


class AskedFields(ModelFields):
    """The request that a parser is given: its fields by name, and its tools as objects."""

    FIELDS: ClassVar[Mapping[str, Any]] = {
        **dict.fromkeys(("model", "messages", "tools", "tool_choice", "chat_template_kwargs", "structured_outputs")),
        **dict.fromkeys(("response_format", "parallel_tool_calls", "include_reasoning", "logprobs", "max_tokens")),
        "skip_special_tokens": True,
        "stream": False,
        "request_id": "",
    }

    def __init__(self, **fields: Any) -> None:
        super().__init__(**fields)
        if self.tools is not None:
            self.tools = [ChatCompletionToolsParam(**one) if isinstance(one, Mapping) else one for one in self.tools]

    tools: list[Any] | None
    chat_template_kwargs: dict[str, Any] | None

    @classmethod
    def of(cls, body: Any) -> AskedFields:
        """Of the body of a request, which stays as it is."""
        return cls(**dict(body))


def init_logger(name: str) -> logging.Logger:
    """The logger of a module; what is meant to be said once, it says each time."""
    logger = logging.getLogger(name)
    for level in ("debug", "info", "warning"):
        if not hasattr(logger, f"{level}_once"):
            setattr(logger, f"{level}_once", getattr(logger, level))
    return logger
