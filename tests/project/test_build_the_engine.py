"""The ten steps of docs/build_the_engine.md: each runs by itself and shows what the page says of it."""

from __future__ import annotations

import ast
import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
STEPS = sorted((ROOT / "examples" / "build").glob("step*.py"))
PAGE = (ROOT / "docs" / "build_the_engine.md").read_text()

SHOWN = {
    1: r"a ###\.+\n(?s:.*)14 steps; batches that wait for their longest request: 18\n",
    2: r"(?s:.*)the same tokens as without blocks: True\n13 blocks at most; .*: 24\n",
    3: r"longest gap .* 102\.2 ms with whole prompts, 10\.0 ms .*\nthe same tokens: True\n",
    4: r"40 steps .*, 32 with [1-9]\d* preemptions\nthe same tokens: True; all blocks are free again: True\n",
    5: r"tokens computed: 384 .*, 144 with it\nthe same tokens: True\n",
    6: r"(?s:.*)33 steps; the same tokens as from actorllm\.LLM: True\n",
    7: r"arrived: .*\nfox left after 8 tokens:.*\nthe same tokens: True\nall blocks are free again: True\n",
    8: r"First.*: 1 of 8 short .*\nEarliest.*: 8 of 8 short and 8 of 8 long .*\nthe same tokens: True\n",
    9: r"the worker died in step 12; 1\d tokens .*\n1 death; the same tokens .*: True\n",
    10: r"a step .* ms\n1 death; the same tokens .*: True\n",
}
"""What each program prints."""


def number_of(step: Path) -> int:
    return int(step.name[4:6])


@pytest.mark.parametrize("step", STEPS, ids=lambda step: step.stem)
def test_a_step_shows_what_it_is_for(step: Path) -> None:
    result = subprocess.run(
        [sys.executable, "-W", "error", str(step)],
        capture_output=True,
        text=True,
        timeout=50,
        check=False,
        env=os.environ | {"PYTHONPATH": str(ROOT)},
    )
    assert (result.returncode, result.stderr) == (0, "")
    assert re.fullmatch(SHOWN[number_of(step)], result.stdout), result.stdout


def test_there_are_ten_and_the_first_scheduler_is_short() -> None:
    assert list(map(number_of, STEPS)) == list(range(1, 11)) == list(SHOWN)
    first = next(
        node
        for node in ast.parse(STEPS[0].read_text()).body
        if isinstance(node, ast.ClassDef) and node.name == "Scheduler"
    )
    assert first.end_lineno is not None
    assert first.end_lineno - first.lineno < 60


def test_the_page_has_every_step_with_its_part_of_the_engine() -> None:
    sections = re.split(r"^## ", PAGE, flags=re.MULTILINE)[1:]
    assert len(sections) == 10
    for number, (step, section) in enumerate(zip(STEPS, sections, strict=True), 1):
        assert section.startswith(f"{number}. ")
        assert f"<!-- excerpt of examples/build/{step.name} -->" in section
        named = re.findall(r"`([a-z_]+/[\w/]*(?:\.py)?)`", section.partition("In the engine:")[2])
        assert named, "no part of the engine is named"
        assert [name for name in named if not (ROOT / "actorllm" / name).exists()] == []


def test_the_table_says_what_the_programs_print() -> None:
    rows = dict(re.findall(r"^\| (\d+) \| [^|]+ \| ([^|]+) \|$", PAGE, flags=re.MULTILINE))
    for step, numbers in {1: (14, 18), 2: (13, 24), 3: (10, 102), 4: (32, 40), 5: (144, 384), 8: (8, 8, 1)}.items():
        assert tuple(map(int, re.findall(r"\d+", rows[str(step)].replace("ms", "")))) == numbers
