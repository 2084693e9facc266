"""The Makefile's targets for tests take further arguments for pytest."""

from __future__ import annotations

import json
import os
import re
import subprocess
import tomllib
from pathlib import Path

import pytest
from packaging.requirements import Requirement
from packaging.specifiers import SpecifierSet
from packaging.version import Version

ROOT = Path(__file__).parents[2]
OF_MAKE = ("ARGS", "MAKEFLAGS", "MFLAGS", "MAKEOVERRIDES", "MAKELEVEL")
"""What a `make` that runs this test would hand on to the one in the test."""


def commands(*arguments: str) -> list[str]:
    """What `make` would run, as if everything were installed."""
    done = ["--old-file", "venv/.installed", "--old-file", "venv/triton-3.6", "--old-file", "venv/.ray"]
    done += ["--old-file", "venv/.partners"]
    return subprocess.run(
        ["make", "--dry-run", "--no-print-directory", *done, "VENV=venv", *arguments],
        cwd=ROOT,
        env={name: value for name, value in os.environ.items() if name not in OF_MAKE},
        capture_output=True,
        text=True,
        timeout=30,
        check=True,
    ).stdout.splitlines()


@pytest.mark.parametrize(
    ("target", "command"),
    [
        ("test", 'venv/bin/python -m pytest -m "not slow"'),
        ("test-slow", "ACTORLLM_EXEC=1 venv/bin/python -m pytest -m slow"),
    ],
)
def test_arguments_reach_pytest(target: str, command: str) -> None:
    assert commands(target, "ARGS=-k word") == [f"{command} -k word"]


def test_without_arguments_everything_runs_in_two_processes() -> None:
    shared = "--numprocesses 2 --dist loadfile"
    assert [line.strip() for line in commands("test")] == [f'venv/bin/python -m pytest -m "not slow" {shared}']
    tests, *others = [line.strip() for line in commands("test-slow")]
    assert tests == "ACTORLLM_EXEC=1 venv/bin/python -m pytest -m slow"
    assert any("tests/clients/run.py --cases 10000" in line for line in others)
    assert any("actorllm_kernels.gates" in line for line in others)


def test_the_lowest_versions_are_within_the_ranges_of_the_package() -> None:
    """And torch's range has no upper end: installing keeps a torch that is there."""
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    ranges = {requirement.name: requirement for requirement in map(Requirement, project["dependencies"])}
    lowest = [line for line in (ROOT / "constraints-lowest.txt").read_text().splitlines() if not line.startswith("#")]
    assert len(lowest) > 5
    for pinned in map(Requirement, lowest):
        (version,) = [specifier.version for specifier in pinned.specifier]
        assert ranges[pinned.name].specifier.contains(version), pinned
    assert [specifier.operator for specifier in ranges["torch"].specifier] == [">="]


def test_the_page_names_every_extra_and_its_packages() -> None:
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    page = (ROOT / "docs" / "embedding.md").read_text()
    for extra, packages in project["optional-dependencies"].items():
        (row,) = [line for line in page.splitlines() if line.startswith(f"| `{extra}` |")]
        assert row.rsplit("|", 2)[1].strip() == ", ".join(Requirement(package).name for package in packages)


def test_the_page_names_the_versions_that_were_tried_and_none_of_them_failed() -> None:
    results = json.loads((ROOT / "tests" / "versions" / "results.json").read_text())["runs"]
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    ranges = {requirement.name: requirement.specifier for requirement in map(Requirement, project["dependencies"])}
    ranges["python"] = SpecifierSet(project["requires-python"])
    page = (ROOT / "docs" / "embedding.md").read_text().splitlines()
    assert len(results) >= 7
    for name, run in results.items():
        package, version = name.split()
        assert run["passed"] > 100, name
        assert (run["failed"], run["error"]) == (0, 0), name
        assert ranges[package].contains(version), name
        (row,) = [row for row in page if row.lower().startswith(f"| {package} ") and version in row.split("|")[1]]
        assert "refused |" not in row, row
        assert "not tried" not in row, row
    lowest = min(Version(name.split()[1]) for name in results if name.startswith("transformers"))
    pinned = (ROOT / "constraints-lowest.txt").read_text()
    assert f"\ntransformers=={lowest}\n" in pinned


def test_what_tries_more_at_length_does_so_among_the_slow_tests() -> None:
    """Files that call `examples` (tests/effort.py)."""
    lines = "\n".join(commands("test-slow")).replace("\\\n", " ").splitlines()
    (line,) = [line for line in lines if "THOROUGH=1" in line]
    named = [ROOT / word for word in line.split() if word.startswith("tests/")]
    files = [file for file in (ROOT / "tests").rglob("test_*.py") if re.search(r"\bexamples\(\d", file.read_text())]
    assert len(files) > 30
    assert [file.relative_to(ROOT) for file in files if not any(file.is_relative_to(path) for path in named)] == []
