"""The table behind docs/models.md has what the tests of each kind of model try, and nothing else."""

from __future__ import annotations

import re
from pathlib import Path

import transformers

from actorllm.model.registry import FAMILIES
from actorllm.types.media_rules import ARCHITECTURES
from tests.model.architectures import architecture_of, table
from tests.model.hf import decoders

FIX = "add it to tests/model/architectures.json, and run bench/docs.py"


def test_fused_architectures_are_those_of_the_registry() -> None:
    assert [row["architecture"] for row in table("fused")] == list(FAMILIES), FIX


def test_those_through_transformers_are_compared_with_transformers() -> None:
    tried = {architecture_of(family) for family, _ in decoders.MODELS.values()}
    assert tried - set(FAMILIES) == set(table("transformers")), FIX


def test_models_that_take_images_or_audio_are_those_of_the_rules() -> None:
    assert set(ARCHITECTURES) == set(table("media")), FIX


def test_refused_architectures_are_named_as_in_a_config() -> None:
    for row in table("refused"):
        if hasattr(transformers, f"{row['config']}Config"):
            assert architecture_of(row["config"]) == row["architecture"]


def test_the_readme_names_the_fused_families_by_device() -> None:
    """All that a GPU runs as well; of the others those that keep keys and values only, beside a link to those with states."""
    readme = (Path(__file__).parents[2] / "README.md").read_text()
    (row,) = (line for line in readme.splitlines() if line.startswith("| Models |"))
    everywhere, told, here = row.partition("[others]")[0].partition("; on the CPU alone ")
    assert told

    def named(text: str) -> set[str]:
        return {
            re.sub(r"\W", "", word.partition("(")[0]).removeprefix("Modelsfused").lower() for word in text.split(",")
        }

    def names_of(cuda: str) -> set[str]:
        rows = (row for row in table("fused") if row["cuda"] == cuda and "states" not in row["cache"])
        return {re.sub(r"(For\w+)|_", "", row["architecture"]).lower() for row in rows}

    assert named(everywhere) == names_of("fused")
    assert names_of("refused") <= named(here)
