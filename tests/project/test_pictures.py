"""Pictures of the documents: where they are, how large, and how the timeline is drawn."""

from __future__ import annotations

import importlib.util
import re
from pathlib import Path
from types import ModuleType
from typing import Any
from xml.etree import ElementTree

ROOT = Path(__file__).parents[2]
FOLDER = ROOT / "docs" / "pictures"
PAGES = [*ROOT.glob("*.md"), *(ROOT / "docs").rglob("*.md")]
SVG = "{http://www.w3.org/2000/svg}"
MAX_BYTES = 100_000


def shown() -> dict[Path, str]:
    """Every picture that a page shows, and what stands for it where it cannot be seen."""
    found = {}
    for page in PAGES:
        for alternative, target in re.findall(r"!\[([^\]]*)\]\((?!https?:)([^)\s]+)\)", page.read_text()):
            found[(page.parent / target).resolve()] = alternative
    return found


def test_every_picture_exists_and_is_small_and_is_told_in_words() -> None:
    for file, alternative in shown().items():
        assert file.is_file(), file
        assert 0 < file.stat().st_size < MAX_BYTES, file
        assert len(alternative.split()) >= 5, file


def test_every_picture_is_shown() -> None:
    files = set(FOLDER.iterdir())
    assert {file.name for file in files} >= {"live.png", "timeline.svg"}
    assert files == {file for file in shown() if file.is_relative_to(FOLDER)}


def test_the_readme_shows_both_and_is_short() -> None:
    text = (ROOT / "README.md").read_text()
    assert "](docs/pictures/live.png)" in text
    assert "](docs/pictures/timeline.svg)" in text
    assert len(text.splitlines()) <= 120


def load_pictures() -> ModuleType:
    spec = importlib.util.spec_from_file_location("pictures", ROOT / "docs" / "site" / "pictures.py")
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def run_of(step_us: int) -> list[dict[str, Any]]:
    """Twenty steps of six rows, of which the tenth has a chunk."""
    events: list[dict[str, Any]] = [{"ph": "M", "pid": 1, "name": "process_name", "args": {"name": "scheduler"}}]
    for step in range(20):
        at = step * step_us
        plan = {"step": step, "decode_rows": 6, "tokens": 40 if step == 10 else 6}
        events.append({"ph": "X", "pid": 1, "name": f"plan {step}", "ts": at - 100, "dur": 50, "args": plan})
        events.append({"ph": "X", "pid": 2, "name": f"step {step}", "ts": at, "dur": step_us, "args": {"step": step}})
    return events


def test_the_quietest_run_is_drawn_around_its_chunk() -> None:
    pictures = load_pictures()
    tree = ElementTree.fromstring(pictures.drawn([run_of(9000), run_of(2000), run_of(5000)]))
    boxes = {title.text: box for box in tree.iter(f"{SVG}rect") for title in box.iter(f"{SVG}title")}
    steps = {name: box.get("fill") for name, box in boxes.items() if str(name).startswith("step ")}
    assert list(steps) == [f"step {number}: 2.00 ms" for number in range(7, 18)]
    assert [name for name, colour in steps.items() if colour == pictures.PREFILL] == ["step 10: 2.00 ms"]
    widths = {float(boxes[name].get("width", "0")) for name in steps}
    assert max(widths) - min(widths) < 0.2
    assert 11 * max(widths) + pictures.LEFT < pictures.WIDTH


def test_the_committed_timeline_is_such_a_picture() -> None:
    titles = [title.text or "" for title in ElementTree.parse(FOLDER / "timeline.svg").iter(f"{SVG}title")]
    kinds = {title.split()[0] for title in titles}
    assert kinds == {"plan", "update", "detokenize", "send", "step"}
    assert sum(title.startswith("step ") for title in titles) == 11
