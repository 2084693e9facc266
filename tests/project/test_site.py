"""The documentation as a site: docstrings as the reference shows them, links, and the whole."""

from __future__ import annotations

import importlib.util
import json
import re
import subprocess
import sys
from html.parser import HTMLParser
from pathlib import Path
from types import ModuleType

import pytest

import actorllm

ROOT = Path(__file__).parents[2]
SITE = ROOT / "docs" / "site"


def load(name: str) -> ModuleType:
    spec = importlib.util.spec_from_file_location(name, SITE / f"{name}.py")
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


@pytest.mark.parametrize(
    ("plain", "expected"),
    [
        (["Ends it."], ["Ends it.", ""]),
        (["One `x = 1`s and `**kw`"], ["One \\ ``x = 1``\\ s and \\ ``**kw``\\ ", ""]),
        (["*args, a_ and |b|"], ["\\*args, a\\_ and \\|b\\|", ""]),
        (["See:", "", "    a  b", "      c"], ["See:", "", "::", "", "        a  b", "          c", ""]),
        (["- one", "- two_"], ["- one", "- two\\_", ""]),
    ],
)
def test_docstrings_become_restructured_text(plain: list[str], expected: list[str]) -> None:
    assert load("docstrings").as_restructured_text(plain) == expected


class Page(HTMLParser):
    """Where a page leads to, and the anchors it has."""

    def __init__(self, file: Path) -> None:
        super().__init__()
        self.links: set[str] = set()
        self.anchors: set[str] = set()
        self.feed(file.read_text())

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        attributes = dict(attrs)
        if attributes.get("id"):
            self.anchors.add(str(attributes["id"]))
        goal = attributes.get("href" if tag in ("a", "link") else "src")
        if goal and not re.match(r"\w+:", goal):
            self.links.add(goal.partition("?")[0])


@pytest.mark.slow(reason="its packages are installed by `make docs` alone, and nothing else needs them")
@pytest.mark.timeout(600)
def test_the_site_has_every_page_and_every_public_name(tmp_path: Path) -> None:
    """Sphinx takes its own warnings for errors, so a reference that leads nowhere fails here."""
    target = tmp_path / "site"
    installed = ["--old-file", f"{sys.prefix}/.installed"]
    command = ["make", "--no-print-directory", *installed, "docs", f"VENV={sys.prefix}", f"SITE={target}"]
    result = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=500, check=False)
    assert result.returncode == 0, result.stdout + result.stderr

    folder = ROOT / "docs"
    pages = {file.relative_to(folder).as_posix() for file in folder.rglob("*.md")}
    pages |= {"index.md", "api.md", "contributing.md", "changelog.md"}
    listed = re.findall(r"^- \[.+\]\((.+)\)$", (target / "llms.txt").read_text(), re.MULTILINE)
    assert sorted(listed) == sorted(pages)
    start = Page(target / "index.html")
    for page in pages:
        assert (target / page).read_text().lstrip().startswith("# "), page
        for picture in re.findall(r"!\[[^\]]*\]\(([^)]+)\)", (target / page).read_text()):
            assert ((target / page).parent / picture).is_file(), f"{page} shows {picture}"
        html = page.removesuffix(".md") + ".html"
        assert (target / html).is_file()
        assert page == "index.md" or html in start.links, f"{page} is in no list of contents"

    assert {f"actorllm.{name}" for name in actorllm.__all__} <= Page(target / "api.html").anchors
    assert "actorllm.AsyncLLM.generate" in Page(target / "api.html").anchors
    index = (target / "searchindex.js").read_text().removeprefix("Search.setIndex(").removesuffix(")")
    assert {page.removesuffix(".md") for page in pages} <= set(json.loads(index)["docnames"])

    opened = {file: Page(file) for file in target.rglob("*.html")}
    for file, page in opened.items():
        for link in page.links:
            path, _, anchor = link.partition("#")
            goal = (file.parent / path).resolve() if path else file
            assert goal.exists(), f"{file.name} leads to {link}"
            assert not anchor or goal not in opened or anchor in opened[goal].anchors, f"{file.name} leads to {link}"
