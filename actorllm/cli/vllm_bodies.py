"""`Tree`: an answer of the server as vLLM's classes have it, by attributes and by keys; and the bodies that programs hand in."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, TypeAlias

import orjson

from actorllm.text.plugin_classes.deltas import AskedFields

try:
    from actorllm.server import protocol
except ModuleNotFoundError:  # without the packages for serving there are plug-in parsers all the same
    ChatCompletionRequest: TypeAlias = AskedFields
else:
    from pydantic import model_validator

    class _AlsoAsked(type(protocol.Body)):  # type: ignore[misc]
        """What plug-in parsers are given counts as a request of a chat, too."""

        def __instancecheck__(cls, instance: object) -> bool:
            return isinstance(instance, AskedFields) or super().__instancecheck__(instance)

    class ChatCompletionRequest(protocol.ChatCompletionRequest, metaclass=_AlsoAsked):  # type: ignore[no-redef]
        """The body of a chat: of an endpoint of FastAPI, for `OpenAIServingChat`, and in the tests of a parser."""

        @model_validator(mode="after")
        def _with_tools_as_objects(self) -> Any:
            if self.tools is not None:
                self.tools = [as_tree(one) for one in self.tools]
            return self


class Tree(dict[str, Any]):
    """A mapping whose items are attributes, too."""

    def __getattr__(self, name: str) -> Any:
        try:
            return self[name]
        except KeyError:
            raise AttributeError(f"{type(self).__name__} has no {name!r}") from None

    def model_dump(self, *, exclude_none: bool = False, **_: Any) -> dict[str, Any]:
        """As plain mappings and lists.

        Arguments:
            exclude_none: without items that are None.

        Further arguments of pydantic have no effect.
        """
        return _plain(self, exclude_none)  # type: ignore[no-any-return]

    def model_dump_json(self, *, exclude_none: bool = False, **_: Any) -> str:
        """As JSON.

        Arguments:
            exclude_none: without items that are None.

        Further arguments of pydantic have no effect.
        """
        return orjson.dumps(self.model_dump(exclude_none=exclude_none)).decode()

    @classmethod
    def __get_pydantic_core_schema__(cls, *_: Any) -> Any:
        """So that FastAPI takes it as the type of an answer."""
        from pydantic_core import core_schema

        return core_schema.no_info_after_validator_function(cls, core_schema.dict_schema())


class ChatCompletionResponse(Tree):
    """What `OpenAIServingChat` answers."""


class CompletionResponse(Tree):
    """What `OpenAIServingCompletion` answers."""


class EmbeddingResponse(Tree):
    """What `OpenAIServingEmbedding` answers."""


class ErrorResponse(Tree):
    """An error. Older programs read its fields from it, newer ones from `error`."""

    @property
    def code(self) -> Any:
        """The status."""
        return self._field("code")

    @property
    def message(self) -> Any:
        """The text."""
        return self._field("message")

    @property
    def type(self) -> Any:
        """Of which kind it is."""
        return self._field("type")

    @property
    def param(self) -> Any:
        """The field of the body that it is about."""
        return self._field("param")

    def _field(self, name: str) -> Any:
        return self.get("error", self).get(name)


def as_tree(value: Any) -> Any:
    """Mappings within a value as trees.

    Arguments:
        value: as `orjson.loads` returns it.
    """
    if isinstance(value, Mapping):
        return Tree({name: as_tree(one) for name, one in value.items()})
    return [as_tree(one) for one in value] if isinstance(value, list) else value


def _plain(value: Any, exclude_none: bool) -> Any:
    if isinstance(value, Mapping):
        kept = {name: one for name, one in value.items() if not (exclude_none and one is None)}
        return {name: _plain(one, exclude_none) for name, one in kept.items()}
    return [_plain(one, exclude_none) for one in value] if isinstance(value, list) else value


def body_of(request: Any) -> bytes:
    """What a program hands in as the JSON of a body: only what was given, so that the server decides the rest.

    Arguments:
        request: a body of pydantic or of a plug-in, or a mapping.
    """
    if isinstance(request, Mapping):
        given = dict(request)
    else:
        names = getattr(request, "model_fields_set", None) or request.__pydantic_fields_set__
        given = {name: getattr(request, name) for name in names}
    return orjson.dumps(given, default=_given, option=orjson.OPT_SERIALIZE_NUMPY)


def _given(value: Any) -> Any:
    return value.model_dump(exclude_unset=True)
