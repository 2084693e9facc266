"""The rules of the house that a program can check: who imports whom, what is public, what is light."""

from __future__ import annotations

import ast
import functools
import importlib
import io
import re
import subprocess
import sys
import tokenize
from collections import Counter
from collections.abc import Iterator
from pathlib import Path

import pytest

import actorllm

ROOT = Path(__file__).parents[2]
PACKAGE = ROOT / "actorllm"
KERNELS = ROOT / "kernels" / "actorllm_kernels"

PURE = {"anyio", "asyncio", "torch", "time", "logging", "socket", "threading", "random", "uvloop", "trio", "llguidance"}


def modules_of(folder: Path) -> list[Path]:
    return sorted(folder.rglob("*.py"))


@functools.cache
def imports_of(file: Path) -> tuple[str, ...]:
    """Every imported module, also within functions; of `from a import b` both `a` and `a.b`."""
    found: list[str] = []
    for node in ast.walk(ast.parse(file.read_text())):
        if isinstance(node, ast.Import):
            found += (alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            assert node.level == 0, f"{file}: relative import"
            assert node.module is not None
            found.append(node.module)
            found += (f"{node.module}.{alias.name}" for alias in node.names)
    return tuple(found)


def is_within(module: str, packages: set[str]) -> bool:
    return any(module == package or module.startswith(package + ".") for package in packages)


def offenders(files: list[Path], forbidden: set[str]) -> list[str]:
    return [
        f"{file.relative_to(ROOT)} imports {module}"
        for file in files
        for module in imports_of(file)
        if is_within(module, forbidden)
    ]


def ours(*names: str) -> set[str]:
    return {f"actorllm.{name}" for name in names}


FRONT_DOORS = ours("api", "client", "cli")


@pytest.mark.parametrize("folder", ["scheduling", "kvcache", "slo"])
def test_the_core_is_pure(folder: str) -> None:
    """All of `slo` but `slo.live`, which measures engines that run."""
    forbidden = PURE | FRONT_DOORS | ours("actors", "ring", "model", "text", "clock", "server")
    files = [file for file in modules_of(PACKAGE / folder) if PACKAGE / "slo" / "live" not in file.parents]
    assert offenders(files, forbidden) == []


@functools.cache
def import_graph() -> dict[str, set[str]]:
    """Which module of ours imports which, within functions and for type checkers, too; the package itself left out."""
    modules = {
        ".".join(file.relative_to(ROOT).with_suffix("").parts).removesuffix(".__init__"): file
        for file in modules_of(PACKAGE)
    }
    graph: dict[str, set[str]] = {}
    for name, file in modules.items():
        graph[name] = set()
        for node in ast.walk(ast.parse(file.read_text())):
            if isinstance(node, ast.Import):
                graph[name] |= {alias.name for alias in node.names} & modules.keys()
            elif isinstance(node, ast.ImportFrom) and node.module is not None:
                for alias in node.names:
                    found = f"{node.module}.{alias.name}"
                    graph[name].add(found if found in modules else node.module)
        graph[name] &= modules.keys() - {name, "actorllm"}
    del graph["actorllm"]
    return graph


def circles(graph: dict[str, set[str]]) -> set[str]:
    """Whoever is left when those that import nothing, or that nothing imports, are taken away again and again."""
    left = {name: set(imported) for name, imported in graph.items()}
    while True:
        imported = set().union(*left.values())
        gone = {name for name in left if not left[name] or name not in imported}
        if not gone:
            return set(left)
        left = {name: found - gone for name, found in left.items() if name not in gone}


LAYERS = (
    *("errors", "clock", "bundled", "types", "messages", "ring", "kvcache", "text", "scheduling", "blame", "config"),
    *(
        "model",
        "actors",
        "supervision",
        "attach",
        "intake",
        "client",
        "fleet",
        "api",
        "slo",
        "server",
        "cli",
        "testing",
        "compat",
    ),
)
"""Lower ones first: a module imports from its own layer and those before."""

BACK_UP = {
    "actorllm.errors -> actorllm.types.request_end",  # for type checkers: what an error carries
    "actorllm.errors -> actorllm.types.request_metrics",
    "actorllm.intake.request_job -> actorllm.client.stream",
    "actorllm.scheduling.request_table -> actorllm.supervision.blame.step_failures",
    "actorllm.scheduling.scheduler -> actorllm.supervision.blame.step_failures",
}


def layer_of(module: str) -> int:
    parts = module.replace("actorllm.__main__", "actorllm.cli").split(".")
    return LAYERS.index("blame" if parts[1:3] == ["supervision", "blame"] else parts[1])


def test_few_imports_go_back_up() -> None:
    back_up = {
        f"{module} -> {imported}"
        for module, found in import_graph().items()
        for imported in found
        if layer_of(imported) > layer_of(module) and not module.startswith("actorllm.bundled.storyteller")
    }
    assert back_up == BACK_UP


def test_no_circle_of_imports() -> None:
    assert circles({"a": {"b"}, "b": {"c"}, "c": {"b"}, "d": set()}) == {"b", "c"}
    assert circles(import_graph()) == set()


@pytest.mark.parametrize("leaf", ["slo", "server"])
def test_nothing_but_the_command_line_imports_a_leaf(leaf: str) -> None:
    others = [file for file in modules_of(PACKAGE) if not {"cli", leaf} & set(file.relative_to(PACKAGE).parts[:1])]
    assert offenders(others, ours(leaf)) == []


def test_the_root_has_few_entries() -> None:
    entries = [entry for entry in PACKAGE.iterdir() if entry.name != "__pycache__"]
    modules = {entry.name for entry in entries if entry.suffix == ".py"}
    assert modules == {"__init__.py", "__main__.py", "clock.py", "config.py", "errors.py"}
    assert len(entries) <= 26


def test_the_cache_knows_nothing_of_the_scheduler() -> None:
    assert offenders(modules_of(PACKAGE / "kvcache"), ours("scheduling")) == []


def test_rings_know_nothing_of_language_models() -> None:
    for file in modules_of(PACKAGE / "ring"):
        of_ours = {module for module in imports_of(file) if is_within(module, {"actorllm"})} - {"actorllm"}
        assert all(is_within(module, ours("ring", "errors")) for module in of_ours), (file, of_ours)
    assert offenders(modules_of(PACKAGE / "ring"), {"torch", "transformers", "tokenizers"}) == []


@pytest.mark.parametrize("folder", ["model", "text"])
def test_the_arithmetic_knows_nothing_of_actors(folder: str) -> None:
    forbidden = FRONT_DOORS | ours("actors", "ring") | {"anyio", "asyncio"}
    assert offenders(modules_of(PACKAGE / folder), forbidden) == []


def test_actors_know_nothing_of_the_front_doors() -> None:
    assert offenders(modules_of(PACKAGE / "actors"), FRONT_DOORS) == []


def test_messages_come_first() -> None:
    allowed = ours("messages", "errors", "ring.codec")
    of_ours = {m for m in imports_of(PACKAGE / "messages" / "__init__.py") if is_within(m, {"actorllm"})} - {
        "actorllm",
        "actorllm.ring",
    }
    assert all(is_within(module, allowed) for module in of_ours), of_ours


def test_only_who_owns_a_loop_knows_its_library() -> None:
    names = ("ring/doorbell.py", "actors/engine_thread.py", "actors/loop_bell.py", "testing/virtual_loop.py")
    owners = {PACKAGE / name for name in names}
    files = [file for file in modules_of(PACKAGE) if file not in owners]
    assert offenders(files, {"asyncio", "uvloop", "trio"}) == []


def test_nothing_travels_as_a_pickle_and_nothing_imports_the_source_root() -> None:
    files = [f for folder in (PACKAGE, KERNELS, ROOT / "examples") for f in modules_of(folder)]
    files = [file for file in files if PACKAGE / "bundled" / "storyteller" not in file.parents]
    assert offenders(files, {"pickle", "cloudpickle", "dill", "marshal", "multiprocessing", "zmq", "kernels"}) == []


def test_kernels_stand_alone() -> None:
    assert offenders(modules_of(KERNELS), {"actorllm"}) == []


def test_the_kernels_root_shadows_no_other_package() -> None:
    assert not (ROOT / "kernels" / "__init__.py").exists()
    assert (KERNELS / "__init__.py").is_file()


@pytest.mark.parametrize("folder", ["tests", "bench", "examples"])
def test_no_package_but_the_package(folder: str) -> None:
    assert list((ROOT / folder).rglob("__init__.py")) == []


def test_helpers_of_tests_stand_in_modules_of_their_own() -> None:
    """A test file is imported by pytest alone: what two of them need is in a helper or in a conftest.py."""
    imported = {
        f"{file.relative_to(ROOT)} imports {module}"
        for file in modules_of(ROOT / "tests")
        for module in imports_of(file)
        if module.startswith("tests.") and any(part.startswith("test_") for part in module.split("."))
    }
    assert imported == set()


def test_the_root_of_the_tests_has_helpers_alone() -> None:
    """Every test stands in the folder that a reader of the package looks for."""
    here = {file.name for file in (ROOT / "tests").glob("*.py")}
    helpers = {"conftest", "effort", "forking", "oracle", "programs", "quick_starts", "random_schemas", "stories"}
    assert here == {f"{name}.py" for name in helpers}


# What is public -------------------------------------------------------------------------------------------------------


def test_the_public_names_are_these() -> None:
    assert set(actorllm.__all__) == {
        "LLM",
        "SLO",
        "ActorLLMError",
        "AsyncEngineArgs",
        "AsyncLLM",
        "AsyncLLMEngine",
        "BeamSearchOutput",
        "BeamSearchParams",
        "BeamSearchSequence",
        "ClassificationOutput",
        "ClassificationRequestOutput",
        "CompletionOutput",
        "EmbedsPrompt",
        "EngineArgs",
        "EngineConfig",
        "EngineDeadError",
        "EngineOverloaded",
        "FlatLogprobs",
        "FlexibleArgumentParser",
        "LLMEngine",
        "LoRARequest",
        "Logprob",
        "PoolingParams",
        "EmbeddingOutput",
        "EmbeddingRequestOutput",
        "PoolerConfig",
        "PoolingOutput",
        "PoolingRequestOutput",
        "PoolingStream",
        "ScoringOutput",
        "ScoringRequestOutput",
        "PromptType",
        "RepetitionDetectionParams",
        "RequestMetrics",
        "RequestOutput",
        "RequestOutputKind",
        "RequestStream",
        "SamplingParams",
        "StructuredOutputsParams",
        "TextPrompt",
        "TokensPrompt",
    }
    for name in set(actorllm.__all__) - {"PromptType"}:  # a union of others
        found = getattr(actorllm, name)
        assert found.__name__ == name
        assert found.__doc__, name
    assert set(dir(actorllm)) >= set(actorllm.__all__)
    with pytest.raises(AttributeError, match="no attribute 'AsyncLlm'"):
        _ = actorllm.AsyncLlm


def test_every_error_is_in_the_picture() -> None:
    errors = importlib.import_module("actorllm.errors")
    assert errors.__doc__ is not None
    for name, value in vars(errors).items():
        if isinstance(value, type) and issubclass(value, Exception):
            assert issubclass(value, actorllm.ActorLLMError)
            assert name in errors.__doc__


def test_type_checkers_see_the_package() -> None:
    assert (PACKAGE / "py.typed").is_file()


def loaded_by(statement: str) -> set[str]:
    program = f"{statement}\nimport sys\nprint(*sys.modules)"
    result = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=True, cwd=ROOT)
    return {name.partition(".")[0] for name in result.stdout.split()}


def test_importing_the_package_is_light() -> None:
    assert loaded_by("import actorllm") & {"torch", "transformers", "numpy", "anyio", "tokenizers", "triton"} == set()
    owner = "from actorllm import LLM, AsyncLLM, SamplingParams; AsyncLLM('storyteller').shutdown()"
    assert loaded_by(owner) & {"torch", "transformers", "triton", "huggingface_hub"} == set()
    assert loaded_by("import actorllm.actors.scheduler") & {"torch", "transformers", "triton"} == set()
    assert loaded_by("import actorllm.slo.simulator") & {"torch", "transformers", "triton", "anyio"} == set()


# What is readable -----------------------------------------------------------------------------------------------------


def test_every_module_says_what_it_owns() -> None:
    for folder in (PACKAGE, KERNELS):
        for file in modules_of(folder):
            assert ast.get_docstring(ast.parse(file.read_text())), f"{file.relative_to(ROOT)} has no docstring"


def layout() -> str:
    return (ROOT / "docs" / "architecture.md").read_text().split("\n## Layout\n")[1].split("\n## ")[0]


def test_the_layout_has_every_folder_in_the_order_of_imports() -> None:
    """The modules within them stand on docs/internals/modules.md, which `bench/docs.py --check` compares with the docstrings."""
    rows = [line.split("`")[1] for line in layout().split("| beside it")[0].splitlines() if line.startswith("| `")]
    folders = {folder.parent.name for folder in PACKAGE.glob("*/__init__.py")}
    assert rows == [f"{name}/" for name in LAYERS if name in folders]
    assert len(rows) == len(folders)
    modules = {file.name for file in PACKAGE.glob("*.py") if not file.name.startswith("__")}
    assert modules <= set(re.findall(r"`(\w+\.py)`", layout()))


def test_the_loop_of_the_engine_is_under_forty_lines() -> None:
    tree = ast.parse((PACKAGE / "actors" / "scheduler.py").read_text())
    (actor,) = (node for node in tree.body if isinstance(node, ast.ClassDef) and node.name == "SchedulerActor")
    loop = [node for node in actor.body if getattr(node, "name", None) in ("run", "turn")]
    lines = [node.end_lineno - node.lineno + 1 for node in loop if node.end_lineno is not None]
    assert len(lines) == 2
    assert sum(lines) < 40, "README.md says so"


def test_a_class_name_means_one_thing() -> None:
    names = Counter(
        node.name
        for file in (*modules_of(PACKAGE), *modules_of(KERNELS))
        for node in ast.parse(file.read_text()).body
        if isinstance(node, ast.ClassDef)
    )
    assert [name for name, number in names.items() if number > 1] == []


def test_no_file_name_stands_three_times() -> None:
    """But those of the runners: the abstract one, and one for each backend."""
    names = Counter(file.name for file in modules_of(PACKAGE) if not file.name.startswith("__"))
    assert [name for name, number in names.items() if number > 2] == ["runner.py"]


def test_examples_are_short() -> None:
    examples = modules_of(ROOT / "examples")
    assert examples
    for file in examples:
        limit = 140 if file.parent.name == "build" else 70  # the engine in ten steps
        assert len(file.read_text().splitlines()) < limit, file.name
        assert ast.get_docstring(ast.parse(file.read_text())), file.name


BRANCHES = (ast.If, ast.IfExp, ast.For, ast.While, ast.ExceptHandler, ast.comprehension, ast.match_case)


def own_nodes(function: ast.AST) -> Iterator[ast.AST]:
    """The nodes of a function without those of functions and classes within it."""
    for node in ast.iter_child_nodes(function):
        if not isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef | ast.ClassDef):
            yield node
            yield from own_nodes(node)


def num_branches(function: ast.AST) -> int:
    """Places where it goes one way or another; of `and` and `or` each operand but the first is one."""
    nodes = list(own_nodes(function))
    operands = sum(len(node.values) - 1 for node in nodes if isinstance(node, ast.BoolOp))
    filters = sum(len(node.ifs) for node in nodes if isinstance(node, ast.comprehension))
    return operands + filters + sum(isinstance(node, BRANCHES) for node in nodes)


def unexplained(source: str) -> list[str]:
    """Functions with more than 15 branches and no comment, or with more than 25 and one for 15 lines at most."""
    tokens = tokenize.generate_tokens(io.StringIO(source).readline)
    comments = {token.start[0] for token in tokens if token.type == tokenize.COMMENT}
    found = []
    for function in ast.walk(ast.parse(source)):
        if not isinstance(function, ast.FunctionDef | ast.AsyncFunctionDef):
            continue
        body = range(function.body[0].lineno, (function.end_lineno or 0) + 1)
        branches, explained = num_branches(function), len(comments.intersection(body))
        if branches > 15 and explained < (len(body) / 15 if branches > 25 else 1):
            found.append(f"{function.name}: {branches} branches, {len(body)} lines, {explained} lines of comments")
    return found


def test_functions_with_many_branches_are_explained() -> None:
    files = [file for file in modules_of(PACKAGE) if file.name != "train.py"]
    found = [f"{file.relative_to(ROOT)}: {one}" for file in files for one in unexplained(file.read_text())]
    assert found == []


def test_branches_and_comments_are_counted() -> None:
    many = "def f(a):\n" + "    if a and f:\n        a = [b for b in a if b]\n" * 4
    assert num_branches(ast.parse(many).body[0]) == 16
    assert unexplained(many) == ["f: 16 branches, 8 lines, 0 lines of comments"]
    assert unexplained(many + "    # why\n    return\n") == []
    assert unexplained(many.replace("a = ", "def g():\n            a = ")) == []
    assert unexplained(many + "    # why\n" + "    if a and f: pass\n" * 11) != []


# What is caught -------------------------------------------------------------------------------------------------------


def broad_handlers(source: str) -> Iterator[tuple[int, str]]:
    """Handlers of any exception that do not raise it again: (number of the line, that line and the next one)."""
    lines = source.split("\n")
    for node in ast.walk(ast.parse(source)):
        if not isinstance(node, ast.ExceptHandler) or isinstance(node.body[-1], ast.Raise):
            continue
        caught = node.type.elts if isinstance(node.type, ast.Tuple) else [node.type]
        if any(one is None or getattr(one, "id", "") in ("Exception", "BaseException") for one in caught):
            yield node.lineno, "\n".join(lines[node.lineno - 1 : node.lineno + 1])


def test_whatever_catches_all_says_why() -> None:
    """An exception that ends nothing and is told to nobody hides a defect; so each such handler has its reason beside it."""
    files = [file for file in modules_of(PACKAGE) if file.name != "train.py"]
    silent = [
        f"{file.relative_to(ROOT)}:{number}"
        for file in files
        for number, text in broad_handlers(file.read_text())
        if " # " not in text
    ]
    assert silent == []


def test_the_search_for_handlers_sees_them() -> None:
    parts = (
        "except Exception:\n    g()\n",
        "except:\n    g()\n",
        "except BaseException:\n    raise\n",
        "except OSError:\n    g()\n",
    )
    source = "".join(f"try:\n    f()\n{part}" for part in parts)
    assert [number for number, _ in broad_handlers(source)] == [3, 7]
