"""The programs of `vllm_programs/shared` print here what they print with vLLM (vllm_program_runs.json), with only the package of
their import lines changed. Where they print something else, it is listed here with the reason."""

from __future__ import annotations

import asyncio
import json
from pathlib import Path
from typing import Any

import pytest

from tests.api.vllm_program_runs import SHARED, Engines, names_of, printed

pytestmark = pytest.mark.timeout(300)
"""The first of these tests waits for all programs."""

TREE: dict[str, Any] = json.loads(Path(__file__).with_name("vllm_program_runs.json").read_text())
PROGRAMS = {program.stem: program for program in sorted(SHARED.glob("*.py"))}
INLINE = {"topology": "inline", "num_threads": 1, "max_num_seqs": 8}

OURS: dict[str, tuple[str, str]] = {
    "best_plan": (
        "4 The king of the Green 8 -7.0 length\n4 The dog and the dog, and 7 -7.8 length\n",
        "every sequence says why it ended; in vLLM those do that end with an end of text",
    ),
    "flat_logprobs": (
        "True 3 6 0\n{809: (1, ' while'), 2596: (2, ' tailor')}\n{2225: (1, ' ago'), 612: (2, ' after')}\n"
        "{443: (1, ' there'), 12: (2, ',')}\n",
        "the columns have each token of a position once; vLLM has one that was chosen and is likely twice",
    ),
    "grammar": (
        "dog and cat [3138, 71, 270, 276, 279, 0]\n",
        "text that the grammar alone decides gets the tokens of the tokenizer; vLLM takes the likeliest pieces of it",
    ),
    "json_answers": (
        "['is_happy', 'name'] bool True\n" * 2,
        "white space between two tokens of JSON is bounded; with vLLM this model writes lines until its tokens are used up",
    ),
}
"""What a program prints here, where that differs, and why."""


async def run_all() -> dict[str, str | Exception]:
    engines = Engines(INLINE)
    found: dict[str, str | Exception] = {}
    for name, program in PROGRAMS.items():
        try:
            found[name] = await printed(names_of(program, "actorllm.compat", engines), "storyteller")
        except Exception as error:  # the test of this program raises it
            found[name] = error
    engines.end()
    return found


@pytest.fixture(scope="module")
def printed_here() -> dict[str, str | Exception]:
    """All programs have run, in one loop and with one engine of each kind."""
    return asyncio.run(run_all())


@pytest.mark.parametrize("name", sorted(PROGRAMS))
def test_a_program_prints_what_it_prints_with_vllm(printed_here: dict[str, str | Exception], name: str) -> None:
    found, expected = printed_here[name], TREE["printed"][name]
    if isinstance(found, Exception):
        raise found
    if name in OURS:
        assert found != expected, f"{name} prints what it prints with vLLM, and is listed as different"
        expected, _ = OURS[name]
    assert found == expected


def test_the_kept_answers_are_those_of_the_programs() -> None:
    """The file was made anew when a program was added."""
    assert sorted(TREE["printed"]) == sorted(PROGRAMS)
