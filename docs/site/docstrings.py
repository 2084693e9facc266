"""Docstrings of the package, which are plain text with `code` in backticks, as reStructuredText."""

from __future__ import annotations

import re
from collections.abc import Iterable

CODE = re.compile(r"(`+)(.+?)\1", re.DOTALL)
SPECIAL = re.compile(r"([\\*|_`])")
ITEM = re.compile(r"([-*]|\d+\.) ")


def as_restructured_text(lines: Iterable[str]) -> list[str]:
    """The lines of a docstring, its indentation removed already: paragraphs, lists, and indented blocks as they are."""
    found: list[str] = []
    for paragraph in "\n".join(lines).expandtabs().split("\n\n"):
        body = paragraph.strip("\n")
        if not body.strip():
            continue
        if all(line.startswith(" ") for line in body.split("\n")):
            found += ["::", "", *(f"    {line}" for line in body.split("\n")), ""]
        elif (
            len(rows := body.split("\n")) > 1 and all(row.startswith(" ") for row in rows[1:]) and not ITEM.match(body)
        ):
            found += [prose(rows[0]), "", "::", "", *(f"    {row}" for row in rows[1:]), ""]
        elif ITEM.match(body):
            found += [*prose(body).split("\n"), ""]
        else:
            found += [*(line.lstrip() for line in prose(body).split("\n")), ""]
    return found


def prose(text: str) -> str:
    """Code between backticks as literals, and everything else without markup."""
    pieces: list[str] = []
    at = 0
    for match in CODE.finditer(text):
        pieces += [SPECIAL.sub(r"\\\1", text[at : match.start()]), literal(match[2])]
        at = match.end()
    return "".join([*pieces, SPECIAL.sub(r"\\\1", text[at:])])


def literal(code: str) -> str:
    """A null space on both sides lets a letter follow."""
    code = " ".join(code.split())
    return f"\\ ``{code}``\\ " if code else ""
