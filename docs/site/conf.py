"""Sphinx's configuration. `build.py` beside it lays out the sources and starts Sphinx."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import TYPE_CHECKING

sys.path.insert(0, str(Path(__file__).parent))

from docstrings import as_restructured_text

import actorllm

if TYPE_CHECKING:
    from sphinx.application import Sphinx

project = "actorllm"
version = release = actorllm.__version__
extensions = ["myst_parser", "sphinx.ext.autodoc"]
html_theme = "furo"
html_title = f"actorllm {release}"
html_copy_source = False  # the pages' own text lies beside them, as .md
html_show_sphinx = False
myst_heading_anchors = 4
autodoc_member_order = "bysource"
autodoc_typehints = "signature"
autodoc_preserve_defaults = True
python_use_unqualified_type_names = True


def setup(app: Sphinx) -> None:
    app.connect("autodoc-process-docstring", translate)


def translate(app: Sphinx, what: str, name: str, value: object, options: object, lines: list[str]) -> None:
    lines[:] = as_restructured_text(lines)
