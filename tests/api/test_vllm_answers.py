"""What vLLM answered (vllm_answers.json, made by vllm_answers.py) is what we answer: tokens, texts, log-probabilities, ends, and
what is refused. Where docs/compatibility.md says "differs", it is listed here."""

from __future__ import annotations

import json
import math
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

import actorllm
from actorllm import LLM, ActorLLMError
from tests.api import vllm_answers

TREE = json.loads(Path(__file__).with_name("vllm_answers.json").read_text())
CASES: dict[str, list[dict[str, Any]]] = TREE["cases"]
CLOSE = 2e-3
"""Log-probabilities of two float32 engines, one of them rounded."""

IDS: list[int] = TREE["answers"]["requests"][0][0]["prompt_token_ids"]

OURS: list[tuple[str, dict[str, Any], str]] = [
    ("parameters", {"temperature": True}, "a number, not a truth value"),
    ("parameters", {"logprobs": False}, "an integer, not a truth value"),
    ("parameters", {"seed": -5}, "seeds are read back modulo 2**64"),
    ("parameters", {"stop": ["a", "a"]}, "read back without what is there twice"),
    ("requests", {"bad_words": ["w" * 2000]}, "longer than a word may be"),
    (
        "prompts",
        {"prompt": (IDS * 100)[:300], "tokenization_kwargs": {"truncate_prompt_tokens": -1}},
        "-1 leaves room for a token; vLLM keeps max_model_len of them, and refuses them then",
    ),
    ("prompts", {"prompt": ""}, "shown as the text that it is, and not as None"),
    ("prompts", {"prompt": {"prompt": "Once upon a time", "cache_salt": ""}}, "a salt has at least one character"),
]
"""Cases with another answer, and why."""


def differs(kind: str, case: dict[str, Any]) -> bool:
    return any((kind, json.dumps(case)) == (known, json.dumps(ours)) for known, ours, _ in OURS)


@pytest.fixture(scope="module")
def answers() -> Iterator[dict[str, list[Any]]]:
    """Ours to every case."""
    with LLM(
        "storyteller", dtype="float32", max_model_len=256, max_num_seqs=8, num_threads=1, topology="inline"
    ) as llm:
        yield vllm_answers.answers(actorllm, llm, CASES)


def contradictions(theirs: Any, ours: Any, where: str = "") -> list[str]:
    """Where two answers are not the same."""
    match theirs, ours:
        case {"raises": _}, {"raises": kind}:
            # The classes are others; here all are ValueError, too, which those of older vLLM were.
            return [] if kind == "ValueError" else [f"{where} raises {kind}: {ours}"]
        case dict(), dict() if theirs.keys() == ours.keys():
            return [line for key in theirs for line in contradictions(theirs[key], ours[key], f"{where}.{key}")]
        case list(), list() if len(theirs) == len(ours):
            pairs = enumerate(zip(theirs, ours, strict=True))
            return [line for i, (one, other) in pairs for line in contradictions(one, other, f"{where}[{i}]")]
        case float() | int(), float() if math.isclose(theirs, ours, abs_tol=CLOSE):
            return []
    return [] if type(theirs) is type(ours) and theirs == ours else [f"{where}: {theirs!r:.200} is here {ours!r:.200}"]


@pytest.mark.parametrize("kind", CASES)
def test_answers_are_those_of_vllm(answers: dict[str, list[Any]], kind: str) -> None:
    found: list[str] = []
    for case, theirs, ours in zip(CASES[kind], TREE["answers"][kind], answers[kind], strict=True):
        wrong = contradictions(theirs, ours)
        if differs(kind, case):
            assert wrong, f"{case} has the answer of vLLM, and is listed as different"
        else:
            found += [f"{json.dumps(case):.200} {line}" for line in wrong]
    assert not found, "\n".join(found)


def test_the_cases_are_those_of_the_script() -> None:
    """The file was made anew when the script was changed."""
    assert CASES["parameters"] == json.loads(json.dumps(vllm_answers.PARAMETERS))
    assert (CASES["chats"], CASES["beams"]) == (vllm_answers.CHATS, vllm_answers.BEAMS)
    assert CASES["prompts"] == vllm_answers.prompts(IDS)


def test_every_refusal_names_what_is_wrong(answers: dict[str, list[Any]]) -> None:
    refusals = [one for kind in answers for one in answers[kind] if isinstance(one, dict) and "raises" in one]
    assert refusals
    assert all(one["says"] for one in refusals)
    with pytest.raises(ActorLLMError, match="best_of=2 must equal n=1"):
        vllm_answers.made(actorllm, {"best_of": 2})
