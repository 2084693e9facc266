"""The engine works in IPython and in notebooks of Jupyter, where the loop is that of the shell or of the kernel."""

from __future__ import annotations

import json
import re
from dataclasses import dataclass
from typing import Any

import pytest

from tests.embedding.host_program import PRINT_PIDS, ROOT, run_host

FIRST_CELL = (
    PRINT_PIDS
    + """
import asyncio, signal, threading
import actorllm.client.engine_supervisor
from tests.actors.scripted_topology import with_workers
actorllm.client.engine_supervisor.engine_topology = with_workers("SlowWorkerActor")
from actorllm import LLM, AsyncLLM, RequestOutputKind, SamplingParams
params = SamplingParams(max_tokens=20, ignore_eos=True, seed=5, output_kind=RequestOutputKind.DELTA)
endless = SamplingParams(max_tokens=1400, ignore_eos=True)
async def count(stream):
    return sum([len(output.outputs[0].token_ids) async for output in stream])
"""
)
"""No engine of these shells imports torch."""

CELLS = {
    "start": "llm = AsyncLLM('storyteller', topology=TOPOLOGY, num_threads=1)\nawait llm.start()\nprint_pids(llm)",
    "async for": """
async for output in llm.generate("Once", params):
    print("+" * len(output.outputs[0].token_ids), end="")
""",
    "begin": """
stream = llm.generate("Once", params)
num_first = len((await anext(stream)).outputs[0].token_ids)
task = asyncio.ensure_future(count(llm.generate("There", params)))
""",
    "go on": "print(num_first + await count(stream), await task)",
    "interrupt": """
async for output in llm.generate("Once", endless):
    signal.raise_signal(signal.SIGINT)
""",
    "after the interrupt": """
while (await llm.stats())["frontend"]["num_requests"]:
    await asyncio.sleep(0.01)
print("aborted", (await llm.stats())["scheduler"]["requests"]["finished"]["abort"])
print(await count(llm.generate("Once", params)))
llm.shutdown()
""",
    "blocking": """
blocking = LLM("storyteller", topology=TOPOLOGY, num_threads=1)
print_pids(blocking)
print("tokens", *[len(output.outputs[0].token_ids) for output in blocking.generate(["Once", "There"], params)])
""",
    "interrupt of a blocking call": """
threading.Timer(0.1, signal.pthread_kill, (threading.get_ident(), signal.SIGINT)).start()
while True:
    blocking.generate(["Once"] * 20, endless, use_tqdm=False)
""",
    "after the interrupt of a blocking call": """
print(len(blocking.generate(["Once"], params, use_tqdm=False)[0].outputs[0].token_ids))
blocking.shutdown()
""",
}
"""Cells that are run one after the other, by their names. TOPOLOGY is that of their engines."""

EXAMPLE = ROOT / "examples" / "notebook.ipynb"
EXAMPLE_CELLS = [
    "".join(cell["source"]) for cell in json.loads(EXAMPLE.read_text())["cells"] if cell["cell_type"] == "code"
]

FORGOTTEN = """
llm = AsyncLLM("storyteller", num_threads=1)
left = llm.generate("Once", endless)
await anext(left)
print_pids(llm)
"""
"""The last cell: the shell ends with an open stream."""

IPYTHON = """
import contextlib, io, json, sys
from IPython.core.interactiveshell import InteractiveShell
shell, found = InteractiveShell.instance(), []
for source in json.loads(sys.argv[1]):
    with contextlib.redirect_stdout(io.StringIO()) as out, contextlib.redirect_stderr(io.StringIO()) as errors:
        result = shell.run_cell(source, store_history=True)
    error = result.error_before_exec or result.error_in_exec
    found.append([out.getvalue(), errors.getvalue(), type(error).__name__ if error else None])
    print(out.getvalue())
print("found", json.dumps(found))
"""

JUPYTER = """
import json, sys
import nbformat
from nbclient import NotebookClient
notebook = nbformat.v4.new_notebook(cells=[nbformat.v4.new_code_cell(source) for source in json.loads(sys.argv[1])])
NotebookClient(notebook, timeout=50, kernel_name="python3", allow_errors=True).execute()
found = []
for cell in notebook.cells:
    texts = {name: "".join(o.text for o in cell.outputs if o.get("name") == name) for name in ("stdout", "stderr")}
    errors = [output.ename for output in cell.outputs if output.output_type == "error"]
    found.append([*texts.values(), *(errors or [None])])
    print(texts["stdout"])
print("found", json.dumps(found))
"""

SHELLS = {"IPython": IPYTHON, "Jupyter": JUPYTER}
"""The program that runs the cells."""

TOPOLOGIES = ("process", "inline")


@dataclass(frozen=True)
class Ran:
    """What a cell has written, and the type of the exception that ended it."""

    output: str
    errors: str
    raised: str | None


Cells = dict[tuple[str, str], Ran]
"""By topology and name."""


@pytest.fixture(scope="module", params=SHELLS)
def cells(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Cells:
    """Every cell, in one start of a shell. The engine that the last cell leaves open ends with it."""
    folders = ("IPYTHONDIR", "JUPYTER_CONFIG_DIR", "JUPYTER_DATA_DIR", "JUPYTER_RUNTIME_DIR")
    environment = {name: str(tmp_path_factory.mktemp(name.lower())) for name in folders}
    keys = [(topology, name) for topology in TOPOLOGIES for name in CELLS]
    sources = [f"TOPOLOGY = {topology!r}\n{CELLS[name]}" for topology, name in keys]
    keys += [("example", str(number)) for number in range(len(EXAMPLE_CELLS))]
    arguments = SHELLS[request.param], json.dumps([FIRST_CELL, *sources, *EXAMPLE_CELLS, FORGOTTEN])
    host = run_host("-c", *arguments, environment=environment, timeout_s=55)
    found: list[Any] = json.loads(host.output.splitlines()[-1].removeprefix("found "))
    first, *others, forgotten = [Ran(*one) for one in found]
    assert not first.raised, first
    assert not forgotten.raised, forgotten
    assert len(host.engine_pids) == 6, "of two engines and of the forgotten one; each of these processes has ended"
    return dict(zip(keys, others, strict=True))


each = pytest.mark.parametrize("topology", TOPOLOGIES)


@each
def test_cells_stream(cells: Cells, topology: str) -> None:
    ran = cells[topology, "async for"]
    assert (ran.output, ran.errors) == ("+" * 20, "")


@each
def test_streams_go_on_in_a_later_cell(cells: Cells, topology: str) -> None:
    assert cells[topology, "begin"] == Ran("", "", None)
    assert cells[topology, "go on"] == Ran("20 20\n", "", None)


@each
def test_an_interrupted_cell_leaves_its_request(cells: Cells, topology: str) -> None:
    assert cells[topology, "interrupt"].raised in ("KeyboardInterrupt", "CancelledError")
    assert cells[topology, "after the interrupt"] == Ran("aborted 1\n20\n", "", None)


@each
def test_a_blocking_call_may_be_interrupted(cells: Cells, topology: str) -> None:
    ran = cells[topology, "blocking"]
    assert ran.output.splitlines()[-1] == "tokens 20 20"
    assert re.fullmatch(r"(\s*Processed prompts: [^\r\n]*)+\s*", ran.errors), "a bar, and no warning"
    assert cells[topology, "interrupt of a blocking call"].raised == "KeyboardInterrupt"
    assert cells[topology, "after the interrupt of a blocking call"] == Ran("20\n", "", None)


def test_the_notebook_of_the_examples(cells: Cells) -> None:
    start, stream, several, end = [cells["example", str(number)] for number in range(len(EXAMPLE_CELLS))]
    assert start == end == Ran("", "", None)
    assert (stream.errors, stream.raised) == (several.errors, several.raised) == ("", None)
    assert stream.output
    assert [line.partition(" | ")[0] for line in several.output.splitlines() if " | " in line] == [
        "There was a king",
        "One day a fox",
        "In the forest",
    ]
    assert len(EXAMPLE.read_text().splitlines()) < 80


EMBEDDED = """
def host():
    llm = AsyncLLM("storyteller", num_threads=1)
    import IPython
    IPython.embed(using="asyncio", colors="NoColor")
    print_pids(llm)
    llm.shutdown()
host()
"""

TYPED = """print("tokens", await count(llm.generate("Once", params)))
print("tokens", await count(llm.generate("Once", params)))
exit
"""


def test_a_shell_embedded_in_a_program_awaits(tmp_path: Any) -> None:
    """As for debugging: the function that opened the shell has the engine, and has it afterwards."""
    host = run_host("-c", FIRST_CELL + EMBEDDED, stdin=TYPED, environment={"IPYTHONDIR": str(tmp_path)})
    assert re.findall(r"tokens (\d+)", host.output) == ["20", "20"]
    assert host.errors == ""
