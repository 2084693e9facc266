"""Every code block of the documents is run, or held against what it names.

| block | check |
| --- | --- |
| `python` | run, in the order of the page, with the names of the blocks before it |
| `sh`, `bash`, `console` | each command: options of `actorllm`, scripts, targets of make, bodies that curl sends |
| `toml`, `js` | read by the parser of the language |
| none | commands are checked as above; all else is a figure, a formula or output |

A comment of the page right before a block says what it needs, or why it is no program:

    <!-- setup
    names that the page explains in its text
    -->
    <!-- server: --options -->                `actorllm serve storyteller` runs meanwhile, for the blocks from here on
    <!-- file: my_module.py -->               the block is this file of the current folder, and is imported
    <!-- excerpt of examples/build/x.py -->   its lines stand in the file
    <!-- outline of actorllm/x.py -->         its names stand in the file

and one right behind it, `<!-- afterwards`, what is run then. `storyteller` is an engine that all pages share.
"""

from __future__ import annotations

import ast
import asyncio
import gc
import inspect
import json
import re
import shlex
import shutil
import subprocess
import sys
import tomllib
from collections.abc import Iterator
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import anyio
import httpx
import pytest
import yaml  # type: ignore[import-untyped]
from cyclopts.exceptions import CycloptsError

from actorllm import AsyncLLM
from actorllm.cli.commands import app
from actorllm.scheduling.admission_policy import ADMISSIONS
from actorllm.scheduling.policy import REGISTRY
from tests.server.live_server import Server

ROOT = Path(__file__).parents[2]
PAGES = sorted(
    str(file.relative_to(ROOT))
    for file in (*ROOT.glob("*.md"), *(ROOT / "docs").rglob("*.md"), ROOT / "kernels" / "README.md")
)
PROGRAMS = {"README.md": "test_the_programs_of_the_readme_run"}
"""Pages whose blocks are programs by themselves, and the test that runs them as such."""
SHELLS = ("sh", "bash", "console")
COMMANDS = re.compile(r"(actorllm|python|make|curl|pip|docker) |\.venv/bin/")
PORT_8000 = "http://127.0.0.1:8000"


@dataclass(frozen=True)
class Block:
    page: str
    line: int
    language: str
    code: str
    before: dict[str, str]
    """What comments say right before it: setup, server, file, excerpt, outline."""
    after: str

    def __str__(self) -> str:
        return f"{self.page}:{self.line}"


COMMENT = r"<!-- (?:(?:setup|afterwards)\n(?s:.*?)\n|(?:server|file|excerpt|outline)\b.*?)-->\n"
BLOCK = re.compile(
    rf"(?P<before>(?:^{COMMENT})*)^(?P<indent> *)```(?P<language>\w*)\n(?P<code>(?s:.*?))^ *```\n"
    rf"(?P<after>(?:\n?<!-- afterwards\n(?s:.*?)\n-->\n)?)",
    re.MULTILINE,
)


def blocks_of(page: str, text: str) -> list[Block]:
    found = []
    for match in BLOCK.finditer(text):
        before = {}
        for comment in re.findall(COMMENT, match["before"]):
            name, _, rest = re.fullmatch(r"<!-- (\w+):?(\s)((?s:.*))-->\n", comment).groups()  # type: ignore[union-attr]
            before[name] = rest.strip().removeprefix("of ").strip()
        after = re.sub(r"\n?<!-- afterwards\n|-->\n", "", match["after"])
        code = inspect.cleandoc("\n" + match["code"]) + "\n" if match["indent"] else match["code"]
        line = text.count("\n", 0, match.start("code"))
        found.append(Block(page, line, match["language"], code, before, after))
    return found


BLOCKS = {page: blocks_of(page, (ROOT / page).read_text()) for page in PAGES}
ALL = [block for blocks in BLOCKS.values() for block in blocks]


# Python ---------------------------------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def storyteller() -> Iterator[AsyncLLM]:
    engine = AsyncLLM("storyteller", dtype="float32", topology="inline", num_threads=1, max_num_seqs=8, seed=1)
    anyio.run(engine.start)
    yield engine
    engine.shutdown()


def execute(code: str, name: str, names: dict[str, Any]) -> None:
    """`await` may stand outside of functions, as in a notebook."""
    made = eval(compile(code, name, "exec", ast.PyCF_ALLOW_TOP_LEVEL_AWAIT), names)
    if inspect.iscoroutine(made):
        asyncio.run(made)


def runs(block: Block) -> bool:
    return block.language == "python" and not {"excerpt", "outline"} & set(block.before)


@pytest.mark.timeout(120)
@pytest.mark.parametrize(
    "page", [page for page, blocks in BLOCKS.items() if page not in PROGRAMS and any(map(runs, blocks))]
)
def test_the_python_of_a_page_runs(
    page: str, storyteller: AsyncLLM, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.syspath_prepend(tmp_path)
    names: dict[str, Any] = {"storyteller": storyteller, "__name__": page}
    address = PORT_8000
    with ExitStack() as stack:
        for names_of in (
            REGISTRY.names,
            ADMISSIONS.names,
        ):  # policies that a block registers are known to no other test
            stack.callback(names_of.update, dict(names_of))
            stack.callback(names_of.clear)
        stack.callback(gc.collect)  # of engines that no block starts
        stack.callback(names.clear)  # functions refer to them: an engine would live until the next collection
        for block in BLOCKS[page]:
            if "server" in block.before:
                server = Server("--num-threads", "1", *shlex.split(block.before["server"]))
                stack.callback(server.stop)
                address = server.url
            for command in commands_of(block):
                if "server" in block.before and command[0] == "curl":
                    url, body = curl(command)
                    answer = httpx.post(url.replace(PORT_8000, address), content=body, timeout=30)
                    assert answer.status_code == 200, answer.text
            if not runs(block):
                continue
            execute(block.before.get("setup", "").replace(PORT_8000, address), f"{block}, setup", names)
            if "file" in block.before:
                (tmp_path / block.before["file"]).write_text(block.code)
                stack.callback(sys.modules.pop, Path(block.before["file"]).stem, None)
            execute(block.code.replace(PORT_8000, address), str(block), names)
            execute(block.after, f"{block}, afterwards", names)


def test_programs_have_a_test_of_their_own() -> None:
    sources = [file.read_text() for file in (ROOT / "tests").rglob("test_*.py") if file != Path(__file__)]
    for test in PROGRAMS.values():
        assert sum(f"def {test}(" in source for source in sources) == 1


@pytest.mark.parametrize("block", [block for block in ALL if "excerpt" in block.before], ids=str)
def test_an_excerpt_stands_in_its_file(block: Block) -> None:
    lines = [line.strip() for line in block.code.splitlines()]
    source = [line.strip() for line in (ROOT / block.before["excerpt"]).read_text().splitlines()]
    assert any(source[i : i + len(lines)] == lines for i in range(len(source)))


@pytest.mark.parametrize("block", [block for block in ALL if "outline" in block.before], ids=str)
def test_the_names_of_an_outline_stand_in_its_file(block: Block) -> None:
    source = set(re.findall(r"\w+", (ROOT / block.before["outline"]).read_text()))
    nodes = list(ast.walk(ast.parse(block.code)))
    names = {node.attr for node in nodes if isinstance(node, ast.Attribute)}
    names |= {node.id for node in nodes if isinstance(node, ast.Name)}
    assert names
    assert names - source == set()


# Commands and other languages -----------------------------------------------------------------------------------------


def is_shell(block: Block) -> bool:
    if block.language:
        return block.language in SHELLS
    return all(COMMANDS.match(line) for line in block.code.splitlines() if line.strip())


def commands_of(block: Block) -> list[list[str]]:
    """As words. Continued lines are one command, a comment is none; so are bodies over several lines."""
    if not is_shell(block):
        return []
    text = re.sub(r"^\$ ", "", block.code, flags=re.MULTILINE)
    commands, pending = [], ""
    for line in text.splitlines():
        pending += line + "\n"
        try:
            words = shlex.split(pending.replace("\\\n", " "), comments=True)
        except ValueError:  # an open quote
            continue
        if line.endswith("\\"):
            continue
        commands += [words] if words else []
        pending = ""
    assert not pending, f"{block}: an open quote or a continued last line"
    return commands


def curl(command: list[str]) -> tuple[str, str]:
    url = next(word for word in command if word.startswith("http"))
    return url, command[command.index("-d") + 1]


def check_command(command: list[str]) -> None:
    """Raises if it names what is not there."""
    program, *arguments = command
    program = program.removeprefix(".venv/bin/")
    if program == "actorllm":
        app.parse_args(arguments, exit_on_error=False, print_error=False)
    elif program == "python":
        if arguments[0] == "-m":
            assert arguments[1] == "pytest"
            paths = [word.partition("::")[0] for word in arguments[2:] if word.startswith("tests/")]
            assert all((ROOT / path).exists() for path in paths)
            return
        script = ROOT / arguments[0]
        sources = script.read_text() + "".join(file.read_text() for file in script.parent.glob("*.py"))
        missing = [word for word in arguments[1:] if word.startswith("--") and f'"{word}"' not in sources]
        assert not missing, f"{arguments[0]} knows no {missing}"
    elif program == "make":
        targets = re.findall(r"^([\w-]+):", (ROOT / "Makefile").read_text(), flags=re.MULTILINE)
        wanted = [word for word in arguments if "=" not in word]
        assert set(wanted) <= set(targets), wanted
    elif program == "curl":
        assert isinstance(json.loads(curl(command)[1]), dict)
    else:
        assert shutil.which(program) or program == "pip", program


COMMAND_LINES = [(block, command) for block in ALL for command in commands_of(block)]


@pytest.mark.parametrize(
    ("block", "command"), COMMAND_LINES, ids=[f"{block} {' '.join(words[:3])}" for block, words in COMMAND_LINES]
)
def test_a_command_names_what_there_is(block: Block, command: list[str]) -> None:
    check_command(command)


def test_a_block_in_another_language_can_be_read() -> None:
    for block in ALL:
        if block.language == "toml":
            tomllib.loads(block.code)
        elif block.language == "yaml":
            assert isinstance(yaml.safe_load(block.code), dict)
        elif block.language == "js" and (node := shutil.which("node")):
            command = [node, "--check", "--input-type=module", "-"]
            result = subprocess.run(command, input=block.code, capture_output=True, text=True, timeout=30, check=False)
            assert result.returncode == 0, result.stderr


# The checks themselves ------------------------------------------------------------------------------------------------


def test_every_block_is_of_a_kind_that_is_checked() -> None:
    fences = {page: len(re.findall(r"^ *```", (ROOT / page).read_text(), flags=re.MULTILINE)) for page in PAGES}
    assert {page: 2 * len(blocks) for page, blocks in BLOCKS.items()} == fences
    assert {block.language for block in ALL} <= {"python", "toml", "yaml", "js", "", *SHELLS}
    looks_like_code = re.compile(r"^(import|from) \w+|^\w+ = |^(async )?(def|class) ", re.MULTILINE)
    assert [str(b) for b in ALL if not b.language and not is_shell(b) and looks_like_code.search(b.code)] == [
        str(b) for b in BLOCKS["docs/sampling.md"]
    ], "a block of code without its language"
    assert sum(map(runs, ALL)) >= 14
    assert len(COMMAND_LINES) > 30


WRONG = """
<!-- setup
x = 1
-->
<!-- file: one.py -->
```python
y = x
```

<!-- afterwards
assert y == 1
-->

```sh
$ actorllm serve --no-such-option   # a comment
python bench/ring.py --no-such-option
make nothing
curl http://127.0.0.1:8000/v1 -d '{"a":
  [}'
```
"""


def test_wrong_blocks_are_found() -> None:
    first, second = blocks_of("page", WRONG)
    assert (first.before, first.after, first.line) == ({"setup": "x = 1", "file": "one.py"}, "assert y == 1\n", 6)
    commands = commands_of(second)
    assert [words[0] for words in commands] == ["actorllm", "python", "make", "curl"]
    for command in commands:
        with pytest.raises((CycloptsError, AssertionError, ValueError)):
            check_command(command)
