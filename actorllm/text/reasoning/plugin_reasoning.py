"""Parsers of thoughts with vLLM's interface, as parsers of ours: `adapted` makes a subclass of `ReasoningParser` of one.

A whole answer goes through `extract_reasoning`, a stream through `extract_reasoning_streaming`; where a class has no streams, the
text is held back until its end. `SeenText` has the ids beside a text. Loaded by name, where a parser is one
(`parsers.reasoning_named`).
"""

from __future__ import annotations

import functools
import inspect
from collections.abc import Callable, Sequence
from typing import Any, ClassVar

from actorllm.errors import ConfigError
from actorllm.text.plugin_classes.deltas import AskedFields
from actorllm.text.plugin_classes.seen_text import SeenText
from actorllm.text.reasoning.parsers import Marks, Part, ReasoningParser, Said, Thought
from actorllm.text.tokenizer import transformers_tokenizer

WHOLE = ("extract_reasoning", "extract_reasoning_content")
STREAMED = ("extract_reasoning_streaming", "extract_reasoning_content_streaming")
"""Today's names, and those of older releases."""


def adapted(plugin: type) -> type[ReasoningParser] | None:
    """A parser of ours that asks this class; None: it has another interface."""
    if not any(hasattr(plugin, name) for name in WHOLE):
        return None
    return type(plugin.__name__, (PluginReasoning,), {"PLUGIN": plugin, "__doc__": plugin.__doc__})


@functools.lru_cache(maxsize=4)
def _tokenizer_in(folder: str) -> Any:
    return transformers_tokenizer(folder)


def usable_tokenizer(option: str, plugin: type, folder: str | None) -> Any:
    """The tokenizer of a folder as plug-ins want it. Raises ConfigError if this class cannot work with it."""
    if folder is None:
        raise ConfigError(f"{option}: {plugin.__name__} needs the model's tokenizer; leave skip_tokenizer_init out")
    tokenizer = _tokenizer_in(folder)
    try:
        made(plugin, tokenizer)
    except Exception as error:  # whatever the class raises is its author's
        told = f"{type(error).__name__}: {error}"
        raise ConfigError(f"{option}: {plugin.__name__} cannot be used with this model: {told}") from error
    return tokenizer


def made(plugin: type, tokenizer: Any, **optional: Any) -> Any:
    """An object of a plug-in's class. optional: arguments of newer releases, for a class that takes them."""
    takes = inspect.signature(plugin).parameters.values()
    takes_any = any(one.kind is inspect.Parameter.VAR_KEYWORD for one in takes)
    names = {one.name for one in takes}
    return plugin(tokenizer, **{name: value for name, value in optional.items() if takes_any or name in names})


def newest(plugin: Any, names: Sequence[str]) -> Callable[..., Any] | None:
    """The method of either name that the most derived class has."""
    for cls in type(plugin).__mro__:
        for name in names:
            if name in vars(cls):
                method: Callable[..., Any] = getattr(plugin, name)
                return method
    return None


class PluginReasoning(ReasoningParser):
    """Of one sequence."""

    PLUGIN: ClassVar[type]
    TOKENIZER: ClassVar[Any] = None

    def __init__(self, prompt: str, asked: AskedFields | None = None) -> None:
        """asked: the request."""
        self._asked = AskedFields() if asked is None else asked
        kwargs = self._asked.chat_template_kwargs
        self._plugin = made(self.PLUGIN, self.TOKENIZER, chat_template_kwargs=kwargs or {})
        self._streamed = newest(self._plugin, STREAMED)
        self._seen = SeenText(self.TOKENIZER, is_held=self._streamed is None)
        self._is_over = self._ends_thought(prompt)

    @classmethod
    def for_folder(cls, folder: str | None) -> type[ReasoningParser]:
        tokenizer = usable_tokenizer("reasoning_parser", cls.PLUGIN, folder)
        return type(cls.__name__, (cls,), {"TOKENIZER": tokenizer, "__doc__": cls.__doc__})

    @classmethod
    def for_request(cls, body: Any) -> Callable[[str], ReasoningParser]:
        return functools.partial(cls, asked=AskedFields.of(body))

    @classmethod
    def marks(cls) -> Marks | None:
        start, end = (_constant(cls.PLUGIN, name) for name in ("start_token", "end_token"))
        return Marks(start, end, end, False) if start and end else None

    def _ends_thought(self, prompt: str) -> bool:
        """Whether the prompt itself ends with that of a thought, as templates write it for an answer without one."""
        ids: list[int] = self.TOKENIZER.encode(prompt.rstrip(), add_special_tokens=False)
        ends = self._plugin.is_reasoning_end
        try:
            # A mark that stands elsewhere is a client's text.
            return bool(ids) and bool(ends(ids)) and not ends(ids[:-1])
        except NotImplementedError:
            return False

    @property
    def is_over(self) -> bool:
        return self._is_over

    def see(self, token_ids: Sequence[int], is_whole: bool) -> None:
        self._seen.see(token_ids, is_whole)

    def push(self, text: str) -> list[Part]:
        if not text:
            return []
        if self._is_over:
            return [Said(text)]
        delta = self._seen.streamed(text, self._streamed or _unstreamed)
        if delta is None:
            return []
        thought = getattr(delta, "reasoning", None) or getattr(delta, "reasoning_content", None)
        return _parts(thought, delta.content)

    def finish(self) -> list[Part]:
        if not self._seen.is_held or not self._seen.text:
            return []
        whole = newest(self._plugin, WHOLE)
        assert whole is not None
        return _parts(*whole(self._seen.text, self._asked))


def _unstreamed(*_: Any) -> None:
    """Of a class without a method for streams, whose text is held."""


def _parts(thought: str | None, said: str | None) -> list[Part]:
    parts: list[Part] = [Thought(thought)] if thought else []
    return [*parts, Said(said)] if said else parts


def _constant(cls: type, name: str) -> str:
    """The text that a class has by this name, also as a property."""
    found = inspect.getattr_static(cls, name, "")
    if isinstance(found, property) and found.fget is not None:
        try:
            found = found.fget(None)
        except Exception:  # it asks the object, so it is no constant
            return ""
    return found if isinstance(found, str) else ""
