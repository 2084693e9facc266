"""Thoughts in text: whole and in pieces, after prompts that begin one, deny one or say nothing."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from actorllm.errors import ConfigError
from actorllm.text.reasoning.parsers import REASONING, Marks, ReasoningParser, Said, Thought, marks_of, reasoning_named
from tests.effort import examples


def read(name: str, prompt: str, text: str, sizes: list[int]) -> tuple[str, str]:
    """What is thought and what is said of an answer that comes in parts of these sizes in turn."""
    parser = reasoning_named(name)(prompt)
    parts = []
    at = number = 0
    while at < len(text):
        size = sizes[number % len(sizes)]
        parts += parser.push(text[at : at + size])
        at, number = at + size, number + 1
    parts += parser.finish()
    kinds = [isinstance(part, Thought) for part in parts]
    if name != "openai_gptoss":
        assert kinds == sorted(kinds, reverse=True), "a thought comes first"
    return tuple("".join(part.text for part in parts if isinstance(part, kind)) for kind in (Thought, Said))  # type: ignore[return-value]


OPEN, NONE = "<|assistant|>\n<think>\n", "<|assistant|>\n<think>\n\n</think>\n\n"
CASES = [
    ("deepseek_r1", "", "<think>\nHm.\n</think>\n\nYes.", "\nHm.\n", "\n\nYes."),
    ("deepseek_r1", "", "Hm.</think>Yes.</think>", "Hm.", "Yes.</think>"),
    ("deepseek_r1", OPEN, "Hm. a < b </thi", "Hm. a < b </thi", ""),
    ("deepseek_r1", NONE, "Yes.", "", "Yes."),
    ("deepseek_r1", "", "<thi", "<thi", ""),
    ("qwen3", "", "<think>Hm.</think>Yes.", "Hm.", "Yes."),
    ("qwen3", "", "\n\n<think>Hm.</think>Yes.", "Hm.", "Yes."),
    ("qwen3", OPEN, "Hm.</think>Yes.", "Hm.", "Yes."),
    ("qwen3", NONE, "Yes <think>.</think>", "", "Yes <think>.</think>"),
    ("qwen3", "</think> before", "Yes.", "", "Yes."),
    ("qwen3", "", "<thi", "", "<thi"),
    ("qwen3", "", "", "", ""),
    ("kimi_k2", "", "Hm.<|tool_calls_section_begin|>x", "Hm.", "<|tool_calls_section_begin|>x"),
    ("seed_oss", "", "<seed:think>Hm.</seed:think>Yes.", "Hm.", "Yes."),
    ("mistral", "", "[THINK]Hm.[/THINK]Yes.", "Hm.", "Yes."),
    ("granite", "", "Here is my thought process: Hm. Here is my response: Yes.", " Hm. ", " Yes."),
    (
        "openai_gptoss",
        "<|start|>assistant",
        "<|channel|>analysis<|message|>Hm.<|end|><|start|>assistant<|channel|>final<|message|>Yes.<|return|>",
        "Hm.",
        "Yes.",
    ),
    ("openai_gptoss", "", "Yes.", "", "Yes."),
    ("openai_gptoss", "", "<|channel|>final<|message|>Yes.<|en", "", "Yes."),
]


@pytest.mark.parametrize(("name", "prompt", "text", "thought", "said"), CASES)
def test_what_is_thought_and_what_is_said(name: str, prompt: str, text: str, thought: str, said: str) -> None:
    for size in (len(text) or 1, 1, 2, 5):
        assert read(name, prompt, text, [size]) == (thought, said)


KEPT = json.loads((Path(__file__).parents[2] / "server" / "tool_formats" / "vllm_calls.json").read_text())["thoughts"]


@pytest.mark.parametrize("case", KEPT, ids=[f"{case['parser']} {case['text'][:20]!a}" for case in KEPT])
def test_thoughts_are_those_that_vllm_finds(case: dict[str, str | None]) -> None:
    """Its answers are kept (tests/server/tool_formats/vllm_calls.py). Space around texts is left aside."""
    thought, said = read(str(case["parser"]), "", str(case["text"]), [2])
    assert thought.strip() == (case["reasoning"] or "").strip()
    assert said.strip() == (case["content"] or "").strip()


PARTS = (
    "<think>",
    "</think>",
    "[THINK]",
    "<seed:think>",
    "</seed:think>",
    "<|tool_calls_section_begin|>",
    "Hm",
    "\n",
    " ",
    "<",
)
HARMONY = (
    "<|channel|>",
    "<|message|>",
    "<|start|>",
    "<|end|>",
    "<|call|>",
    "<|return|>",
    "final",
    "analysis",
    " to=f",
    "assistant",
)


@given(
    st.sampled_from(sorted(REASONING)),
    st.sampled_from(["", OPEN, NONE]),
    st.lists(st.sampled_from(PARTS) | st.sampled_from(HARMONY), max_size=12).map("".join),
    st.lists(st.integers(1, 9), min_size=1),
)
@settings(deadline=None, max_examples=examples(67, 200))
def test_a_stream_tells_what_the_whole_answer_tells(name: str, prompt: str, text: str, sizes: list[int]) -> None:
    whole = read(name, prompt, text, [len(text) or 1])
    assert read(name, prompt, text, sizes) == whole
    assert sum(map(len, whole)) <= len(text) + 40


class Muser(ReasoningParser):
    """Of a model that muses."""

    START, END = "(musing)", "(done)"


def test_a_parser_of_ones_own() -> None:
    name = f"{__name__}:Muser"
    assert read(name, "", "(musing)Hm(done)Yes", [3]) == ("Hm", "Yes")
    assert marks_of(name, None) == Marks("(musing)", "(done)", "(done)", False)
    for wrong, match in (
        ("no_such_module:Parser", "cannot be loaded: ModuleNotFoundError"),
        (f"{__name__}:Said", "must be a subclass of ReasoningParser"),
        ("deepseek_r2", "did you mean 'deepseek_r1'"),
    ):
        with pytest.raises(ConfigError, match=match):
            reasoning_named(wrong)


def test_marks_may_be_given() -> None:
    assert marks_of(None, None) is None
    assert marks_of(None, {}) is None
    assert marks_of(None, {"reasoning_start_str": "<a>", "reasoning_end_str": "</a>"}) == Marks(
        "<a>", "</a>", "</a>", False
    )
    assert marks_of(None, {"reasoning_parser": "qwen3"}) == Marks("<think>", "</think>", "</think>", False)
    told = marks_of("deepseek_r1", {"reasoning_end_str": "I have to answer now.</think>"})
    assert told == Marks("<think>", "</think>", "I have to answer now.</think>", True)
    for wrong, match in (
        ({"reasoning_start_str": "<a>"}, "needs reasoning_start_str and reasoning_end_str"),
        ({"reasoning_end": "</a>"}, "did you mean 'reasoning_end_str'"),
        ({"reasoning_end_str": 3}, "must be a text"),
        ("qwen3", "must be a mapping"),
    ):
        with pytest.raises(ConfigError, match=match):
            marks_of(None, wrong)
