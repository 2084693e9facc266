"""The compile gate: every shipped launch compiles for both architectures and takes what the checked-in table says.

And the fence lint: what is launched as a dependent waits before it touches anything that another kernel writes.
"""

from __future__ import annotations

import ast
import inspect
import json
from types import SimpleNamespace
from typing import Any

import pytest
import torch
import triton

from actorllm_kernels import attn_decode, configs, resources
from actorllm_kernels.shipped import SHIPPED
from tests.kernels.conftest import KERNEL_MODULES


@pytest.fixture(autouse=True)
def interpreter() -> None:
    """Not in this file: launches are recorded and compiled."""


@pytest.mark.timeout(400)
def test_every_shipped_launch_takes_what_the_table_says() -> None:
    path = resources.table_path()
    if not path.exists():
        pytest.skip(f"no resource table for Triton {triton.__version__}: python -m actorllm_kernels.resources --write")
    expected, found = json.loads(path.read_text()), resources.measure_all()
    assert not resources.violations(found)
    different = [
        f"{name} on {architecture}: {found[architecture].get(name)}, the table says {used}"
        for architecture, launches in expected.items()
        for name, used in launches.items()
        if found[architecture].get(name) != used
    ]
    assert not different, "\n".join(different)
    assert {a: set(launches) for a, launches in found.items()} == {a: set(launches) for a, launches in expected.items()}


@pytest.mark.parametrize(("major", "architecture"), [(8, "sm_80"), (9, "sm_90"), (10, "sm_90"), (12, "sm_80")])
def test_every_gpu_has_the_shared_memory_that_its_configurations_take(
    major: int, architecture: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda _: (major, 0))
    assert configs.architecture_of(torch.device("cuda", 40 + major)) == architecture
    least = {8: 99, 9: 227, 10: 227, 12: 99}[major] * 1024
    for path in resources.FOLDER.glob("*.json"):
        for name, used in json.loads(path.read_text())[architecture].items():
            assert used["shared"] <= least, f"{path.name}: {name}"


def test_programs_are_as_many_as_the_gpu_has_room_for(monkeypatch: pytest.MonkeyPatch) -> None:
    """An H100 with a PCIe plug has 114 multiprocessors, an H20 has 78."""
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda _: (9, 0))
    monkeypatch.setattr(torch.cuda, "get_device_properties", lambda _: SimpleNamespace(multi_processor_count=78))
    per_sm = configs.lookup("attn_decode", "d128", torch.device("meta"))["PER_SM"]
    assert attn_decode.division(torch.device("cuda", 60), 128).programs == 78 * per_sm
    assert attn_decode.division(torch.device("meta"), 128).programs == 132 * per_sm


def test_every_configuration_is_compiled(monkeypatch: pytest.MonkeyPatch) -> None:
    """An entry of the table that no launch of the gate has is one that a model meets first."""
    met: set[tuple[str, str, str]] = set()
    lookup = configs._lookup

    def noted(kernel: str, shape_class: str, architecture: str) -> configs.Config:
        met.add((kernel, *configs.entry_of(kernel, shape_class, architecture)))
        return lookup(kernel, shape_class, architecture)

    monkeypatch.setattr(configs, "_lookup", noted)
    for architecture in resources.ARCHITECTURES:
        for name in resources.names_for(architecture):
            resources.record_one(SHIPPED[name], architecture)
    assert met == {
        (kernel, architecture, shape_class)
        for kernel, by_architecture in configs.table().items()
        for architecture, by_class in by_architecture.items()
        for shape_class in by_class
    }


def _jitted() -> list[Any]:
    """Function definitions with the decorator triton.jit, of all kernels."""
    trees = (ast.parse(inspect.getsource(module)) for module in KERNEL_MODULES)
    functions = [node for tree in trees for node in tree.body if isinstance(node, ast.FunctionDef)]
    return [node for node in functions if any("triton.jit" in ast.unparse(d) for d in node.decorator_list)]


DEPENDENTS = [node for node in _jitted() if any(argument.arg == "PDL" for argument in node.args.args)]
CONSTANTS = ("weight", "bias", "cos", "sin")
"""Parameters whose memory no kernel writes begin with one of these; they may be read before the wait."""


def unfenced(node: ast.FunctionDef) -> list[str]:
    """What a kernel does before it waits, and must not: statements that touch memory other than constant weights."""
    early: list[str] = []
    for statement in node.body:
        text = ast.unparse(statement)
        if isinstance(statement, ast.If) and ast.unparse(statement.test) == "PDL" and "gdc_wait()" in text:
            return early
        if isinstance(statement, ast.Return):
            break
        for call in (n for n in ast.walk(statement) if isinstance(n, ast.Call)):
            name = ast.unparse(call.func)
            if name.startswith("tl.atomic") or name == "tl.store":
                early.append(text)
            names = {n.id for n in ast.walk(call) if isinstance(n, ast.Name) and n.id.endswith("_ptr")}
            if any(not pointer.startswith(CONSTANTS) for pointer in names) or (name == "tl.load" and not names):
                early.append(text)
        if any(isinstance(n, ast.Return) for n in ast.walk(statement)):
            early.append(text)
    return [*early, "it never waits"]


def test_there_are_dependents() -> None:
    assert DEPENDENTS


@pytest.mark.parametrize("node", DEPENDENTS, ids=lambda node: node.name)
def test_a_dependent_waits_before_it_touches_memory(node: ast.FunctionDef) -> None:
    assert unfenced(node) == []


@pytest.mark.parametrize(
    "body",
    [
        "tl.load(x_ptr)\n    if PDL:\n        gdc_wait()",
        "tl.store(weight_ptr, 1)\n    if PDL:\n        gdc_wait()",
        "if tl.program_id(0) == 0:\n        if PDL:\n            gdc_wait()",
        "if tl.program_id(0) == 0:\n        return\n    if PDL:\n        gdc_wait()",
        "tl.load(weight_ptr)",
        "x = x_ptr + 1\n    tl.load(x)\n    if PDL:\n        gdc_wait()",
    ],
)
def test_the_lint_finds_what_is_not_fenced(body: str) -> None:
    (node,) = ast.parse(f"def kernel(x_ptr, weight_ptr, PDL):\n    {body}\n").body
    assert isinstance(node, ast.FunctionDef)
    assert unfenced(node)


@pytest.mark.parametrize("architecture", resources.ARCHITECTURES)
def test_all_programs_of_decode_attention_are_resident_at_once(architecture: str) -> None:
    """Otherwise those of a second wave would begin when the first have ended, and the even division was for nothing."""
    shared_per_sm = {"sm_90": 228 * 1024, "sm_80": 164 * 1024}[architecture]
    path = resources.table_path()
    if not path.exists():
        pytest.skip(f"no resource table for Triton {triton.__version__}")
    table = json.loads(path.read_text())[architecture]
    for name, case in ((n, c) for n, c in SHIPPED.items() if n.startswith("attn_decode")):
        constants = resources.record_one(case, architecture).constants
        used = table[name]
        allocated = -(-used["registers"] // 8) * 8 * 32 * used["warps"]
        fitting = min(65536 // allocated, shared_per_sm // (used["shared"] + 1024))
        with configs.target(architecture):
            shape_class = attn_decode.shape_class(constants["DIM"], constants["Q_LEN"] * constants["GROUP"])
            config = configs.lookup("attn_decode", shape_class, torch.device("meta"))
        assert config["PER_SM"] <= fitting, name
