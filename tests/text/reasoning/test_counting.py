"""Tokens of a thought: those between the marks, however they are cut."""

from __future__ import annotations

import pytest

from actorllm.text.reasoning.counting import ThoughtCount
from actorllm.text.reasoning.parsers import reasoning_named

MORE = [*["x" * 99] * 300, "<|start|>", "assistant", "<|channel|>", "final", "<|message|>", "Yes", "<|return|>"]
"""Behind a thought in harmony's format: text between two messages, and the answer."""


@pytest.mark.parametrize(
    ("name", "prompt", "tokens", "expected"),
    [
        ("qwen3", "", ["<think>", "Hm", ",", " well", "</think>", "Yes"], 3),
        ("qwen3", "", ["<th", "ink", ">", "think", " <", "b", "</", "thi", "nk>", "think"], 3),
        ("qwen3", "<think>\n", ["Hm", "m", "</think>", "<think>", "Hm"], 2),
        ("qwen3", "<think></think>", ["<think>", "Hm", "</think>"], 0),
        ("qwen3", "", ["Yes", "<think>", "Hm", "</think>"], 0),
        ("qwen3", "", ["<think>", "</think>", "Yes"], 0),
        ("qwen3", "", ["<think>", "Hm", "</thi"], 2),
        ("qwen3", "", ["<think>", *["Hm", "", "m"] * 100, "</thi", "nk>", "Yes"], 200),
        ("deepseek_r1", "", ["<", "b", ">", "</think>", "Yes"], 3),
        ("deepseek_r1", "", ["Hm", " then</think>Yes", "No"], 2),
        (
            "openai_gptoss",
            "<|start|>assistant",
            [
                "<|channel|>",
                "analysis",
                "<|message|>",
                "Hm",
                "m",
                "<|end|>",
                *MORE,
            ],
            2,
        ),
    ],
)
def test_tokens_between_the_marks(name: str, prompt: str, tokens: list[str], expected: int) -> None:
    for portion in (1, 2, len(tokens)):
        count = ThoughtCount(reasoning_named(name)(prompt), lambda ids: "".join(tokens[i] for i in ids))
        for at in range(0, len(tokens), portion):
            count.push(range(at, min(at + portion, len(tokens))))
        count.finish()
        assert count.num == expected
