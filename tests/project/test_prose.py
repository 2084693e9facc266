"""Documents and docstrings by the rules: short sentences, short pages, and no words for persons where things are meant.

The docstrings of modules are read like pages. All other docstrings, and comments, are looked through for words only.

A sentence ends with ".", "?" or "!". Not counted are code blocks, tables, headings, comments, and what `bench/docs.py` writes
between two comments. Inline code counts as one word, and so does a list of names in inline code.
"""

from __future__ import annotations

import ast
import io
import re
import tokenize
from pathlib import Path

ROOT = Path(__file__).parents[2]

GENERATED = r"<!-- ([\w ]+) -->.*?<!-- /\1 -->"
"""What `bench/docs.py` writes into a page."""

MAX_WORDS = 25
MAX_LINES = 250

PERSONS = re.compile(
    r"\b(who|whoever|whom|whomever|he|him|his|himself|she|her|(some|any|every|no)body('s)?|(some|any|every)one who)\b",
    re.IGNORECASE,
)
PERSONS_MEANT = re.compile(r"\b(person|people|users?|readers?|authors?|contributors?)\s+who\b")
FIGURATIVE = re.compile(
    r"\b(acquit\w*|guilty|guilt|innocent\w*|custody|verdicts?|condemn\w*|punish\w*|accus\w+|culprits?)\b", re.IGNORECASE
)

LONG_TABLES = {"docs/benchmarks.md", "docs/compatibility.md", "docs/internals/modules.md", "docs/reliability.md"}
"""Pages as long as their tables, whose lines are not counted."""

EXEMPT = {"CHANGELOG.md"}
"""Lists of names."""

PAGES = sorted(
    str(file.relative_to(ROOT))
    for file in (*ROOT.glob("*.md"), *(ROOT / "docs").rglob("*.md"))
    if str(file.relative_to(ROOT)) not in EXEMPT
)

MODULES = sorted(
    str(file.relative_to(ROOT)) for package in ("actorllm", "kernels") for file in (ROOT / package).rglob("*.py")
)


def sentences_of(text: str) -> list[str]:
    """The sentences of a page of Markdown, with one word for each piece of inline code and the text of each link."""
    text = re.sub(r"^```.*?^```", "\n", text, flags=re.MULTILINE | re.DOTALL)
    text = re.sub(r"^ *```.*?^ *```", "\n", text, flags=re.MULTILINE | re.DOTALL)
    text = re.sub(GENERATED, "\n", text, flags=re.DOTALL)
    text = re.sub(r"<!--.*?-->", "\n", text, flags=re.DOTALL)
    text = re.sub(r"^\d{4}-\d{2}-\d{2}, .*$", "\n", text, flags=re.MULTILINE)  # where and when a figure was measured
    text = re.sub(r"^(\||#|!\[).*$", "\n", text, flags=re.MULTILINE)
    text = re.sub(r"^ *([-*]|\d+\.) ", "\n\n", text, flags=re.MULTILINE)
    text = re.sub(r"(`+)[^`]+?\1", "Code", text)
    text = re.sub(r"\[([^\]]*)\]\([^)]*\)", r"\1", text)
    text = re.sub(r"\bCode(,? (and |or )?\bCode)+", "Code", text)
    text = text.replace("**", "").replace("e.g.", "for example").replace("i.e.", "that is")
    found = []
    for paragraph in re.split(r"\n\s*\n", text):
        found += re.split(r"(?<=[.?!])[)\"']*\s+", " ".join(paragraph.split()))
    return [sentence for sentence in found if re.search(r"\w", sentence)]


def num_words(sentence: str) -> int:
    return sum(re.search(r"\w", word) is not None for word in sentence.split())


def unfit_word(text: str) -> str | None:
    """The first word of a text that stands for persons where things are meant, or is figurative."""
    found = PERSONS.search(PERSONS_MEANT.sub("", text)) or FIGURATIVE.search(text)
    return None if found is None else found[0]


def offence(sentence: str) -> str | None:
    """What a sentence does that it should not."""
    if (words := num_words(sentence)) > MAX_WORDS:
        return f"{words} words"
    found = unfit_word(sentence)
    return None if found is None else repr(found)


def offences(page: str) -> list[str]:
    """Of a page, or of the docstring of a module, where an indented block is code."""
    text = (ROOT / page).read_text()
    if page.endswith(".py"):
        text = re.sub(r"^    .*$", "", ast.get_docstring(ast.parse(text)) or "", flags=re.MULTILINE)
    reasons = ((sentence, offence(sentence)) for sentence in sentences_of(text))
    return [f"{page}: {reason}: {sentence}" for sentence, reason in reasons if reason is not None]


def num_lines(page: str) -> int:
    """Without what is generated."""
    text = re.sub(GENERATED, "", (ROOT / page).read_text(), flags=re.DOTALL)
    return 0 if page in LONG_TABLES else len(text.splitlines())


def test_sentences_are_short_and_name_things_as_things() -> None:
    assert [offence for page in (*PAGES, *MODULES) for offence in offences(page)] == []


def remarks(source: str) -> list[tuple[int, str]]:
    """The docstrings and comments of a module, with the numbers of their lines; inline code left out."""
    found = [
        (node.lineno, node.value.value)
        for node in ast.walk(ast.parse(source))
        if isinstance(node, ast.Expr) and isinstance(node.value, ast.Constant) and isinstance(node.value.value, str)
    ]
    tokens = tokenize.generate_tokens(io.StringIO(source).readline)
    found += [(token.start[0], token.string) for token in tokens if token.type == tokenize.COMMENT]
    return [(number, re.sub(r"`[^`]+`", "Code", text)) for number, text in found]


def test_docstrings_and_comments_name_things_as_things() -> None:
    found = [
        (module, number, unfit_word(text))
        for module in MODULES
        for number, text in remarks((ROOT / module).read_text())
    ]
    assert [f"{module}:{number}: {word!r}" for module, number, word in found if word is not None] == []


SOURCE = '''"""Says who."""
text = "nobody's"  # of everybody
limit = 1
"""Of `who`, and of people who read."""
def who(): ...  # noqa
'''


def test_docstrings_and_comments_are_looked_through_and_nothing_else_is() -> None:
    assert [(number, unfit_word(text)) for number, text in remarks(SOURCE)] == [
        (1, "who"),
        (4, None),
        (2, "everybody"),
        (5, None),
    ]


def test_pages_are_short() -> None:
    assert {page: lines for page in PAGES if (lines := num_lines(page)) > MAX_LINES} == {}


PAGE = """# A heading that nobody counts

The worker runs `a`, `b` and `c`. It ends. See [the whole long page](page.md)!

| who | is not counted |

- a list of its own
- whoever fails

```python
somebody = "not counted"
```

<!-- figures -->
He is generated.
<!-- /figures -->

2030-01-02, Abacus, 3 cores. nobody's load.

1. `one` e.g. two. A version 1.5 is a number.
"""


def test_the_splitter_sees_sentences_and_nothing_else() -> None:
    assert sentences_of(PAGE) == [
        "The worker runs Code.",
        "It ends.",
        "See the whole long page!",
        "a list of its own",
        "whoever fails",
        "Code for example two.",
        "A version 1.5 is a number.",
    ]


def test_the_rules_find_what_they_are_for() -> None:
    assert offence("word " * MAX_WORDS) is None
    assert offence("word " * (MAX_WORDS + 1)) == "26 words"
    assert offence("A request whose worker died runs again") is None
    assert offence("for a person who reads") is None
    assert offence("Who died is started again") == "'Who'"
    assert offence("a token acquits it") == "'acquits'"


def test_the_glossary_is_short() -> None:
    rows = re.findall(
        r"^\| (?!term |---)([^|]+) \| ([^|]+) \| `", (ROOT / "docs" / "glossary.md").read_text(), flags=re.MULTILINE
    )
    assert 20 <= len(rows) <= 40
    assert [term for term, meaning in rows if len(sentences_of(meaning)) > 2] == []
    assert sorted(rows, key=lambda row: row[0].lower()) == rows


def test_links_between_pages_lead_somewhere() -> None:
    missing = []
    for file in (*ROOT.glob("*.md"), *(ROOT / "docs").rglob("*.md")):
        text = re.sub(r"^```.*?^```", "", file.read_text(), flags=re.MULTILINE | re.DOTALL)
        for target, anchor in re.findall(r"\]\((?!https?:)([^)#\s]*)(?:#([^)\s]+))?\)", text):
            page = (file.parent / target).resolve() if target else file
            if not page.exists():
                missing.append(f"{file.relative_to(ROOT)}: {target}")
            elif anchor and anchor not in anchors_of(page.read_text()):
                missing.append(f"{file.relative_to(ROOT)}: {target}#{anchor}")
    assert missing == []


def anchors_of(text: str) -> set[str]:
    """Of the headings of a page, as GitHub makes them."""
    headings = re.findall(r"^#+ (.+)$", text, flags=re.MULTILINE)
    return {re.sub(r"[^\w\- ]", "", heading.lower()).replace(" ", "-") for heading in headings}


IN_DEPTH = [page for page in PAGES if re.search("README|AGENTS|internals|architecture|glossary", page)]
MADE_UP = {"ShortestFirst"}
"""Of examples."""


def test_names_that_a_page_uses_exist() -> None:
    """Words in inline code stand in the sources, or are those of a file or folder."""
    files = [
        file
        for pattern in ("actorllm", "kernels", "tests", "bench", "examples")
        for file in (ROOT / pattern).rglob("*.*")
    ]
    sources = [
        file.read_text() for file in files if file.suffix in (".py", ".html", ".json") and "results" not in file.parts
    ]
    sources += [(ROOT / name).read_text() for name in ("Makefile", "pyproject.toml")]
    known = MADE_UP | {word for text in (*sources, *map(str, files)) for word in re.findall(r"\w+", text)}
    known |= {part for page in PAGES for part in re.findall(r"\w+", page)}
    unknown = []
    for page in IN_DEPTH:
        text = re.sub(r"^```.*?^```", "", (ROOT / page).read_text(), flags=re.MULTILINE | re.DOTALL)
        words = {word for code in re.findall(r"`([^`]+)`", text) for word in re.findall(r"[A-Za-z_]\w{3,}", code)}
        unknown += [f"{page}: {word}" for word in sorted(words - known)]
    assert unknown == []


NAMED_MODULE = re.compile(r"`(?:actorllm/)?([a-z_]+(?:/[a-z_]+)*\.py)`")


MODULES_PAGE = "docs/internals/modules.md"
"""Generated from the modules themselves."""


def test_modules_that_a_page_names_exist() -> None:
    """A path begins in the package, or at the root of the repository."""
    pages = [page for page in PAGES if re.search("internals|architecture|glossary", page) and page != MODULES_PAGE]
    named = {page: NAMED_MODULE.findall((ROOT / page).read_text()) for page in pages}
    assert [page for page in pages if not named[page]] == []
    assert [
        f"{page}: {name}"
        for page in pages
        for name in named[page]
        if not (ROOT / "actorllm" / name).exists() and not (ROOT / name).exists()
    ] == []
