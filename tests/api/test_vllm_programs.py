"""Programs written for vLLM's documented API run with only their imports changed."""

from __future__ import annotations

import os
import re
import sys
from pathlib import Path

import pytest

from actorllm.config import BUNDLED_MODELS
from tests import programs

PROGRAMS = Path(__file__).parent / "vllm_programs"
EXPECTED = {
    "quickstart": ["Prompt:    'Once upon a time'", "Prompt:    'The sun was'"],
    "offline_inference": ["length"],
    "engine": ["finished 0 1", "finished 1 1", "finished 2 2"],
    "async_control": ["one: abort", "four: length", "paused: True abort", "resumed: False"],
    "prompt_embeds": ["same text: 2"],
    "async_streaming": ["finished stream-example-1", "finished stream-example-3"],
    "beam_search": ["-"],
    "structured_outputs": ["choice True", "regex True", "json ['brand', 'car_type']", "grammar SELECT"],
    "older_async": ["finished 0 True", "finished 1 True", "finished 2 True"],
}


@pytest.mark.parametrize("name", sorted(path.stem for path in PROGRAMS.glob("*.py")))
def test_only_the_import_is_changed(tmp_path: Path, name: str) -> None:
    program = (PROGRAMS / f"{name}.py").read_text()
    changed, count = re.subn(r"^from vllm(\.\w+)* import ", r"from actorllm import ", program, flags=re.MULTILINE)
    assert count
    assert "vllm" not in re.sub("actorllm", "", changed)
    script = tmp_path / f"{name}.py"
    script.write_text(changed)
    # transformers reads it, too
    model = str(BUNDLED_MODELS["storyteller"]) if name == "prompt_embeds" else "storyteller"
    arguments = ["--model", model] if name == "engine" else [model]
    environment = os.environ | {"PYTHONPATH": str(PROGRAMS.parent.parent)}
    done = programs.run(
        [sys.executable, script, *arguments], capture_output=True, text=True, timeout=120, env=environment
    )
    assert done.returncode == 0, done.stderr
    for words in EXPECTED[name]:
        assert words in done.stdout
