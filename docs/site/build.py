"""The documentation as a site: python docs/site/build.py [FOLDER], by default build/site; `make docs` installs what it takes.

The pages are those of docs/ and the text files of the repository, and a reference of `actorllm.__all__` from the docstrings.
Every page also lies beside its html as Markdown, and llms.txt lists them. A warning of Sphinx is an error.
"""

from __future__ import annotations

import re
import shutil
import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path
from types import ModuleType

from sphinx.cmd.build import main as sphinx

import actorllm
import actorllm.testing
from actorllm.api.blocking import BlockingDoor

HERE = Path(__file__).resolve().parent
DOCS, ROOT = HERE.parent, HERE.parents[1]
FROM_ROOT = {"README.md": "index.md", "CONTRIBUTING.md": "contributing.md", "CHANGELOG.md": "changelog.md"}
"""Pages that are no files of docs/, and what they are called on the site."""
LINK = re.compile(r"\[([^\]\n]*)\]\(([^)\s]+)\)")

CONTENTS = """

```{{toctree}}
:caption: {caption}
:hidden:
:maxdepth: 1
:glob:

{pages}
```
"""
PARTS = {
    "Use": ["compatibility", "serving", "lifecycle", "sampling", "logits_processors", "gpu", "api"],
    "Latency laboratory": ["slo", "slo_reference", "slo_advanced", "slo_presets"],
    "Inside": ["build_the_engine", "architecture", "internals/*", "glossary*"],
    "Results": ["benchmarks", "reliability"],
    "Project": ["contributing", "changelog", "*"],
}
"""A page that no other part names is one of the project's."""


def main(target: Path) -> int:
    with tempfile.TemporaryDirectory(prefix="actorllm-docs-") as folder:
        source = Path(folder) / "source"
        lay_out(source)
        shutil.rmtree(target, ignore_errors=True)
        quiet = ["--quiet", "--fail-on-warning", "--keep-going", "--fresh-env", "--doctree-dir", f"{folder}/doctrees"]
        status = sphinx([*quiet, "--conf-dir", str(HERE), str(source), str(target)])
        if status:
            return status
        add_texts(source, target)
    print(f"{target}/index.html")
    return 0


def lay_out(source: Path) -> None:
    """All pages with links that hold in the new place."""
    shutil.copytree(DOCS, source, ignore=shutil.ignore_patterns("site", "__pycache__"))
    for page in source.rglob("*.md"):
        page.write_text(with_links(page.read_text(), DOCS / page.relative_to(source)))
    for name, called in FROM_ROOT.items():
        if (ROOT / name).is_file():
            (source / called).write_text(with_links((ROOT / name).read_text(), ROOT / name))
    (source / "api.md").write_text(reference())
    pages = {page.relative_to(source).with_suffix("").as_posix() for page in source.rglob("*.md")} - {"index"}
    with (source / "index.md").open("a") as index:
        for caption, patterns in contents(pages).items():
            index.write(CONTENTS.format(caption=caption, pages="\n".join(patterns)))


def contents(pages: set[str]) -> dict[str, list[str]]:
    """The pages of every part, each in the first that names it."""
    left = set(pages)
    found: dict[str, list[str]] = {}
    for caption, patterns in PARTS.items():
        found[caption] = []
        for pattern in patterns:
            matching = sorted(page for page in left if Path(page).match(pattern))
            found[caption] += matching
            left -= set(matching)
    return {caption: mine for caption, mine in found.items() if mine}


def with_links(text: str, file: Path) -> str:
    """Links to a page go to that page of the site; what is linked to and is none becomes its path in the repository."""

    def replace(match: re.Match[str]) -> str:
        label, goal = match.groups()
        path, hash_, anchor = goal.partition("#")
        if not path or "://" in goal:
            return match[0]
        linked = (file.parent / path).resolve()
        if linked.is_relative_to(DOCS) and HERE not in linked.parents:
            place = linked.relative_to(DOCS)
        else:
            name = linked.relative_to(ROOT).as_posix()
            if name not in FROM_ROOT:
                return f"{label} (`{name}`)"
            place = Path(FROM_ROOT[name])
        depth = len(file.relative_to(DOCS).parts) - 1 if file.is_relative_to(DOCS) else 0
        return f"[{label}]({'../' * depth}{place.as_posix()}{hash_}{anchor})"

    return LINK.sub(replace, text)


def reference() -> str:
    """A page with every public name, classes with their members."""
    parts = [
        "# API reference",
        "Everything that `from actorllm import ...` offers.",
        *described(actorllm, level=2),
        "## Testing applications",
        "Everything that `from actorllm.testing import ...` offers.",
        *described(actorllm.testing, level=3),
    ]
    return "\n\n".join(parts) + "\n"


def described(package: ModuleType, level: int) -> Iterator[str]:
    """The public names of a package, each below a heading of this level."""
    where = package.__name__
    yield f"```{{currentmodule}} {where}\n```"
    for name in sorted(package.__all__):
        value = getattr(package, name)
        is_class = isinstance(value, type)
        directive = "autoclass" if is_class else "autodata"
        options = ":members:\n:show-inheritance:\n" if is_class else ""
        if is_class and BlockingDoor in value.__bases__:  # which is no public name
            options = ":members:\n:inherited-members:\n"
        yield f"{'#' * level} {name}\n\n```{{eval-rst}}\n.. {directive}:: {where}.{name}\n{indented(options)}```"


def indented(options: str) -> str:
    return "".join(f"   {line}\n" for line in options.splitlines())


def add_texts(source: Path, target: Path) -> None:
    """The text of each page beside its html, and llms.txt: the pages with what their first line is."""
    lines = ["# actorllm", "", "> An LLM inference engine to embed in async Python applications.", "", "## Pages", ""]
    for page in sorted(source.rglob("*.md"), key=lambda page: (page.name != "index.md", page.as_posix())):
        name = page.relative_to(source)
        text = page.read_text()
        if name.as_posix() == "api.md":
            text = "# API reference\n\n" + "".join(f"- `{one}`: {summary(one)}\n" for one in sorted(actorllm.__all__))
        elif name.as_posix() == "index.md":
            text = text.split("\n\n```{toctree}")[0].rstrip() + "\n"
        (target / name).write_text(text)
        title = next(line.removeprefix("# ") for line in text.splitlines() if line.startswith("# "))
        lines.append(f"- [{title}]({name.as_posix()})")
    shutil.copytree(DOCS / "pictures", target / "pictures")  # which the texts show
    (target / "llms.txt").write_text("\n".join(lines) + "\n")


def summary(name: str) -> str:
    """The first paragraph of what is said of a public name."""
    value = getattr(actorllm, name)
    documentation = value.__doc__ if isinstance(value, type) else None
    return " ".join((documentation or "").strip().split("\n\n")[0].split()) or "see the page"


if __name__ == "__main__":
    sys.exit(main(Path(sys.argv[1] if len(sys.argv) > 1 else ROOT / "build" / "site").resolve()))
