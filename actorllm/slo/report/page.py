"""Putting a page together: sections of blocks of HTML, in the template that ships with the package."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from functools import lru_cache
from html import escape
from pathlib import Path

from jinja2 import Environment, Template
from markupsafe import Markup


@dataclass(slots=True)
class Section:
    title: str
    blocks: list[Markup] = field(default_factory=list)

    def add(self, html: str) -> None:
        """Of this package, or escaped."""
        self.blocks.append(Markup(html))

    def paragraph(self, text: str, kind: str = "") -> None:
        self.add(f'<p class="{kind}">{escape(text)}</p>' if kind else f"<p>{escape(text)}</p>")

    def figure(self, chart: str, caption: str = "", about: str = "") -> None:
        self.add(figure(chart, caption, about))


def figure(chart: str, caption: str = "", about: str = "") -> str:
    told = f"<figcaption><b>{escape(caption)}</b> {escape(about)}</figcaption>" if caption or about else ""
    return f"<figure>{told}{chart}</figure>"


def grid(figures: Sequence[str], kind: str = "pair") -> str:
    return f'<div class="{kind}">{"".join(figures)}</div>'


def table(head: Sequence[str], rows: Sequence[Sequence[str]]) -> str:
    """Cells are HTML."""
    top = "".join(f"<th>{escape(name)}</th>" for name in head)
    body = "".join(f"<tr>{''.join(f'<td>{cell}</td>' for cell in row)}</tr>" for row in rows)
    return f'<div class="wide"><table><thead><tr>{top}</tr></thead><tbody>{body}</tbody></table></div>'


@lru_cache(maxsize=1)
def _template() -> Template:
    environment = Environment(autoescape=True, trim_blocks=True, lstrip_blocks=True)
    return environment.from_string(Path(__file__).with_name("page.html").read_text(encoding="utf-8"))


def page(title: str, subtitle: str, lead: Sequence[str], sections: Sequence[Section]) -> str:
    return _template().render(title=title, subtitle=subtitle, lead=lead, sections=sections)
