"""Reasoning in what a model writes: a parser for each way in which models mark it.

A parser gets the text of one sequence as it comes, and gives out what is thought and what is said. However the text is cut, the
parts together are the same. What is held back is never more than the beginning of a marker. Whether an answer begins within a
thought is told by the end of its prompt, where chat templates put a marker. Pure; called by `server.message_parts`. Names are
vLLM's.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, ClassVar, NamedTuple, TypeAlias

from actorllm.errors import ConfigError, nearest_name
from actorllm.text.markers import overlap
from actorllm.types.named_class import named_class
from actorllm.types.plugin_file import parser_of_file

MAX_MARKER = 256
"""Characters of a marker."""
MAX_FORCED = 4096
"""Characters of what ends a thought at its budget."""


class Thought(NamedTuple):
    """Part of the reasoning."""

    text: str


class Said(NamedTuple):
    """Part of the answer."""

    text: str


Part: TypeAlias = Thought | Said


@dataclass(frozen=True, slots=True)
class Marks:
    """By what a thought is known in the tokens of an output."""

    start: str
    end: str
    forced: str
    """What is written where the budget of a thought is used up; it ends with `end`."""
    is_assumed: bool
    """An output begins within the thought, unless the prompt says that there is none."""


class ReasoningParser:
    """Of one sequence: `push` as text comes, then `finish`. A class of one's own has markers of its own, or these methods."""

    START: ClassVar[str] = "<think>"
    END: ClassVar[str] = "</think>"
    FORCED: ClassVar[str] = ""
    """Where the budget of a thought is used up, this is written; empty: END."""
    IS_ASSUMED: ClassVar[bool] = False
    """The output begins within the thought also without START, unless the prompt ends with END."""
    CALLS: ClassVar[str] = ""
    """The beginning of tool calls, which ends a thought, too; empty: nothing does but END."""

    _state = "start"

    def __init__(self, prompt: str) -> None:
        """prompt: the end of its text."""
        bare = prompt.rstrip()
        self._buffer = ""
        self._state = "start"
        if bare.endswith(self.END):
            self._state = "said"
        elif bare.endswith(self.START):
            self._state = "thought"

    @classmethod
    def for_folder(cls, folder: str | None) -> type[ReasoningParser]:
        """The same for the tokenizer in this folder, for a parser that asks it. Reads files."""
        return cls

    @classmethod
    def for_request(cls, body: Any) -> Callable[[str], ReasoningParser]:
        """What makes a parser of the end of a prompt. body: of the request."""
        return cls

    def see(self, token_ids: Sequence[int], is_whole: bool) -> None:
        """Called before a `push` with the ids of its text, for a parser that looks at them. is_whole: no other text comes."""

    @property
    def is_over(self) -> bool:
        """Whether no thought can come any more."""
        return self._state == "said"

    def is_all_thought(self, text: str) -> bool:
        """Whether this text, if it is next, is thought as a whole and changes nothing: False where that is not known."""
        if self._state != "thought" or self._buffer or type(self).push is not ReasoningParser.push:
            return False
        return not any(mark and mark[0] in text for mark in (self.END, self.CALLS))

    def push(self, text: str) -> list[Part]:
        if self._state == "said":
            return [Said(text)] if text else []
        self._buffer += text
        parts: list[Part] = []
        if self._state == "start":
            self._begin()
        if self._state == "thought":
            self._think(parts)
        if self._state == "said" and self._buffer:
            parts.append(Said(self._buffer))
            self._buffer = ""
        return parts

    def finish(self) -> list[Part]:
        held, self._buffer = self._buffer, ""
        if not held:
            return []
        return [
            Thought(held) if self._state == "thought" or (self._state == "start" and self.IS_ASSUMED) else Said(held)
        ]

    def _begin(self) -> None:
        bare = self._buffer.lstrip()
        if bare.startswith(self.START):
            self._buffer, self._state = bare[len(self.START) :], "thought"
        elif len(self._buffer) > MAX_MARKER or not self.START.startswith(bare):
            self._state = "thought" if self.IS_ASSUMED else "said"

    def _think(self, parts: list[Part]) -> None:
        ends = [place for mark in (self.END, self.CALLS) if mark and (place := self._buffer.find(mark)) >= 0]
        if not ends:
            held = max(overlap(self._buffer, mark) for mark in (self.END, self.CALLS))
            told, self._buffer = self._buffer[: len(self._buffer) - held], self._buffer[len(self._buffer) - held :]
        else:
            place = min(ends)
            told, self._buffer, self._state = self._buffer[:place], self._buffer[place:].removeprefix(self.END), "said"
        if told:
            parts.append(Thought(told))

    @classmethod
    def marks(cls) -> Marks | None:
        """By what a thought is known in tokens; None: that is not known, and `reasoning_config` may say it."""
        return Marks(cls.START, cls.END, cls.FORCED or cls.END, cls.IS_ASSUMED)


class Qwen3Reasoning(ReasoningParser):
    """Qwen 3, GLM 4.5, DeepSeek V3.1: <think> and </think>, and none where the prompt or the model has none."""


class DeepSeekR1Reasoning(ReasoningParser):
    """DeepSeek R1 and models that always think: <think> may be missing."""

    IS_ASSUMED = True


class KimiK2Reasoning(DeepSeekR1Reasoning):
    """Kimi K2 Thinking: calls may begin within a thought."""

    CALLS = "<|tool_calls_section_begin|>"


class SeedOSSReasoning(DeepSeekR1Reasoning):
    """Seed OSS: markers of its own."""

    START = "<seed:think>"
    END = "</seed:think>"


class MistralReasoning(ReasoningParser):
    """Magistral: [THINK] and [/THINK]."""

    START = "[THINK]"
    END = "[/THINK]"


class GraniteReasoning(ReasoningParser):
    """Granite 3: sentences for markers."""

    START = "Here is my thought process:"
    END = "Here is my response:"


CONFIG_FIELDS = ("reasoning_parser", "reasoning_start_str", "reasoning_end_str")
"""Of `reasoning_config`, as in vLLM."""


def marks_of(name: str | None, config: Any) -> Marks | None:
    """Of the parser of this name, and what `reasoning_config` has in their place. Raises ConfigError."""
    if config is not None and not isinstance(config, Mapping):
        raise ConfigError(
            f"reasoning_config={config!r:.120} must be a mapping with reasoning_start_str and reasoning_end_str"
        )
    # An empty text stands for none, as in vLLM.
    given = {key: value for key, value in (config or {}).items() if value}
    for key, value in given.items():
        if key not in CONFIG_FIELDS:
            raise ConfigError(f"reasoning_config: {key!r:.80} is not known{nearest_name(str(key), CONFIG_FIELDS)}")
        if not isinstance(value, str) or not value.strip() or len(value) > MAX_FORCED:
            raise ConfigError(
                f"reasoning_config: {key}={value!r:.120} must be a text of at most {MAX_FORCED} characters"
            )
    name = name or given.get("reasoning_parser")
    start, forced = given.get("reasoning_start_str"), given.get("reasoning_end_str")
    # What ends a thought at its budget may be longer than its mark: a sentence before it. The mark alone still ends one.
    marks = None if name is None else reasoning_named(name).marks()
    if marks is not None:
        forced = forced or marks.forced
        end = marks.end if marks.end in forced else forced
        return Marks(start or marks.start, end, forced, marks.is_assumed)
    if name is not None and start is None and forced is None:
        return None
    if not given:
        return None
    if start is None or forced is None:
        raise ConfigError("reasoning_config needs reasoning_start_str and reasoning_end_str, or a reasoning_parser")
    return Marks(start, forced, forced, False)


_HERE = "actorllm.text.reasoning"
_PARSERS = f"{_HERE}.parsers"

REASONING = {
    "deepseek_r1": f"{_PARSERS}:DeepSeekR1Reasoning",
    "deepseek_v3": f"{_PARSERS}:Qwen3Reasoning",
    "glm45": f"{_PARSERS}:Qwen3Reasoning",
    "granite": f"{_PARSERS}:GraniteReasoning",
    "kimi_k2": f"{_PARSERS}:KimiK2Reasoning",
    "minimax_m2": f"{_PARSERS}:DeepSeekR1Reasoning",
    "mistral": f"{_PARSERS}:MistralReasoning",
    "olmo3": f"{_PARSERS}:DeepSeekR1Reasoning",
    "openai_gptoss": f"{_HERE}.harmony:HarmonyReasoning",
    "qwen3": f"{_PARSERS}:Qwen3Reasoning",
    "seed_oss": f"{_PARSERS}:SeedOSSReasoning",
    "step3": f"{_PARSERS}:DeepSeekR1Reasoning",
}
"""'module:Class' by name."""


def reasoning_named(name: str) -> type[ReasoningParser]:
    """The parser of this name, or a class as 'module:Class', which may have vLLM's interface. Raises ConfigError."""
    return named_class(
        "reasoning_parser", name, ReasoningParser, REASONING, adapter=f"{_HERE}.plugin_reasoning:adapted"
    )


def reasoning_of_file(name: str, path: str | None) -> str:
    """The name by which a parser is found: of a plug-in file 'module:Class', else as it is. Raises ConfigError."""
    if not path:
        return name
    return parser_of_file("reasoning_parser_plugin", path, name or None, REASONING) or name
