"""Gates on compiled code: every shipped launch compiles for every part of the table, and is what the gates ask for.

And the fence lint: what is launched as a dependent waits before it touches anything that another kernel writes.
"""

from __future__ import annotations

import ast
import inspect
import os
import subprocess
import sys
from dataclasses import replace
from types import SimpleNamespace
from typing import Any

import pytest
import torch
import triton
import triton.language as tl
from triton.language.extra.cuda import gdc_wait

from actorllm_kernels import attn_decode, configs, gates
from actorllm_kernels.compiled import Compiled, Loop, facts
from actorllm_kernels.launches import names_for, record_one, recording
from actorllm_kernels.quantized_gemm import quantized_gemm
from actorllm_kernels.shipped import SHIPPED, _quantized
from actorllm_kernels.skinny_gemm import SplitScratch, columns_ahead, skinny_gemm
from tests.kernels.conftest import KERNEL_MODULES


@pytest.fixture(autouse=True)
def interpreter() -> None:
    """Not in this file: launches are recorded and compiled."""


@pytest.mark.timeout(400)
def test_every_shipped_launch_passes_the_gates() -> None:
    """Of the part of the table that the others refine; the other architectures come with the slow ones."""
    found, failed = gates.check_all(("sm_90",))
    assert failed == []
    assert set(found["sm_90"]) == set(SHIPPED)
    assert all(compiled.loops for name, compiled in found["sm_90"].items() if name.startswith(gates.LOADS_AHEAD))


@pytest.mark.slow(reason="compiles all launches for six architectures")
@pytest.mark.timeout(1800)
def test_every_shipped_launch_passes_the_gates_on_every_architecture() -> None:
    _, failed = gates.check_all(gates.ALL_TARGETS)
    assert failed == []


GOOD = Compiled(
    registers=100,
    spilled=0,
    shared=70_000,
    warps=4,
    programs=396,
    resident=3,
    loops=(Loop(2, 3, 0), Loop(2, 3, 0)),
    narrow_copies=0.01,
    before_wait=(),
    counts={"wgmma": 8, "tma": 0, "setmaxnreg": 0, "griddepcontrol": 2},
)


@pytest.mark.parametrize(("name", "change", "told"), [
    ("embed", {"spilled": 8}, "embed on sm_90 spills 8 bytes"),
    ("embed", {"registers": 256}, "takes 256 registers"),
    ("embed", {"shared": 240_000}, "takes 240000 bytes of shared memory, and there are 232448"),
    ("attn_decode", {"loops": ()}, "has no loop with products"),
    ("attn_prefill", {"loops": (Loop(2, 3, 0), Loop(1, 3, 0))}, "has 1 buffers for what its main loop loads"),
    ("skinny_gemm", {"loops": (Loop(2, 0, 0),)}, "waits for all its loads in its main loop"),
    ("lm_head_sample", {"loops": (Loop(2, 3, 1),)}, "has 1 loads in its main loop that it waits for at once"),
    ("attn_decode", {"narrow_copies": 0.5}, "copies 50% of its bytes in pieces of less than 16"),
    ("skinny_gemm", {"programs": 131}, "has 131 programs for 132 multiprocessors"),
    ("attn_prefill", {"counts": GOOD.counts | {"wgmma": 0}}, "does not use the matrix units for large tiles"),
    ("attn_prefill-tma", {}, "has no warps of its own for loading"),
    ("embed-pdl", {"counts": GOOD.counts | {"griddepcontrol": 0}}, "is no dependent launch"),
    ("embed-pdl", {"before_wait": ("LDG.E", "LDG.E")}, "touches memory before it waits: LDG.E"),
])  # fmt: skip
def test_every_gate_can_be_failed(name: str, change: dict[str, Any], told: str) -> None:
    assert gates.violations({"sm_90": {"attn_decode": GOOD, "skinny_gemm-pdl": GOOD, "attn_prefill": GOOD}}) == []
    (message,) = gates.violations({"sm_90": {name: replace(GOOD, **change)}})
    assert told in message


WORSE: list[tuple[str, str, dict[str, int], str]] = [
    ("attn_decode-256-32x8x128-pdl", "attn_decode", {"num_stages": 3}, "waits for all its loads in its main loop"),
    ("attn_prefill-32x8x128", "attn_prefill", {"num_stages": 2}, "loads in its main loop that it waits for at once"),
    ("attn_decode-256-32x8x128-pdl", "attn_decode", {"PER_SM": 4}, "wants 4 programs per multiprocessor, and 3 fit"),
    ("lm_head_sample-32-151936x1024-pdl", "lm_head_sample", {"num_warps": 8}, "wants 2 programs per multiprocessor, and 1 fit"),
]  # fmt: skip
"""Of launches and their kernels: what is another than shipped, and what a gate says of it."""


@pytest.mark.timeout(400)
def test_configurations_that_are_worse_are_found() -> None:
    program = f"""
from actorllm_kernels import configs, gates
for name, kernel, config in {[one[:3] for one in WORSE]}:
    with configs.trying(kernel, **config):
        print(gates.check([name], "sm_90")[1])
"""
    environment = {name: value for name, value in os.environ.items() if name != "TRITON_INTERPRET"}
    # In a process of its own: the interpreter of other tests leaves triton.language changed.
    run = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=True, env=environment)
    lines = run.stdout.splitlines()
    assert len(lines) == len(WORSE)
    for (*_, told), line in zip(WORSE, lines, strict=True):
        assert told in line


@triton.jit
def hasty_kernel(x_ptr, y_ptr, IS_HASTY: tl.constexpr):
    if IS_HASTY:
        x = tl.load(x_ptr)
    gdc_wait()
    if not IS_HASTY:
        x = tl.load(x_ptr)
    tl.store(y_ptr, x)


@pytest.mark.parametrize(("is_hasty", "early"), [(True, ("LDG.E",)), (False, ())])
def test_a_memory_access_before_the_wait_is_seen_in_the_machine_code(is_hasty: bool, early: tuple[str, ...]) -> None:
    with recording() as launches:
        hasty_kernel[(1,)](
            torch.empty(1, device="meta"), torch.empty(1, device="meta"), is_hasty, enable_fp_fusion=True
        )
    assert facts(launches[0].compile("sm_90"), launches[0].grid).before_wait == early


def test_a_product_is_split_as_often_as_the_gpu_has_programs_for() -> None:
    """Four tiles for 132 multiprocessors, and a K of three steps."""
    x, weight, y = (
        torch.empty(2, 384, device="meta"),
        torch.empty(64, 384, device="meta"),
        torch.empty(2, 64, device="meta"),
    )
    for scratch, grid in ((None, (4, 1)), (SplitScratch.empty(x.device), (4, 3))):
        with recording() as launches:
            skinny_gemm(x, weight, y, scratch=scratch)
        assert launches[0].grid == grid


@pytest.mark.parametrize("activation", ["", "silu"])
@pytest.mark.parametrize("num_outputs", [1024, 1536, 3072, 4864, 8192])
@pytest.mark.parametrize("kind", ["int8", "int4g128"])
def test_what_a_split_product_leaves_fits_into_the_scratch(kind: str, num_outputs: int, activation: str) -> None:
    """It is one for all products of a model, whatever their weights are."""
    meta, num_inputs = torch.device("meta"), 2048
    scratch = SplitScratch.empty(meta)
    x, y = (torch.empty(32, n, dtype=torch.bfloat16, device=meta) for n in (num_inputs, num_outputs))
    weight = _quantized(kind, num_outputs * (2 if activation else 1), num_inputs)
    with recording() as launches:
        quantized_gemm(x, *weight, y, activation=activation, scratch=scratch)
        skinny_gemm(x, torch.empty(2 * num_outputs, num_inputs, device=meta), y, activation=activation, scratch=scratch)
    for launch in launches:
        tiles, split = launch.grid
        c = launch.constants
        part = (2 if activation else 1) * c["BLOCK_N"] * c["BLOCK_M"] + c["BLOCK_M"]
        if split > 1:
            assert tiles * split * part <= scratch.partials.numel()
            assert tiles <= scratch.counters.numel()


@pytest.mark.parametrize(("outputs", "inputs", "block", "is_early"), [
    (1024, 3072, 4, True), (4096, 14336, 4, True), (14336, 4096, 2, False), (151936, 1024, 4, False),
])  # fmt: skip
def test_one_row_reads_early_where_all_programs_are_there_at_once(
    outputs: int, inputs: int, block: int, is_early: bool
) -> None:
    x, weight, y = (torch.empty(*shape, device="meta") for shape in ((1, inputs), (outputs, inputs), (1, outputs)))
    with recording() as launches:
        skinny_gemm(x, weight, y)
    assert launches[0].grid == (outputs // block,)
    assert launches[0].constants["IS_EARLY"] == is_early


def test_reads_that_the_compiler_has_moved_before_the_wait_are_found() -> None:
    """x is read behind the wait; one read more than the weight's pieces is one of x."""
    name = "gemv-1024x3072-residual-pdl"
    launch = record_one(SHIPPED[name], "sm_90")
    for early, is_right in ((4 * ("LDG.E.128",), True), (5 * ("LDG.E.128",), False), (("LDG", "STG") * 2, False)):
        found = gates.early_reads(name, launch, replace(GOOD, before_wait=early), "sm_90")
        assert (found == []) == is_right


@pytest.mark.parametrize(("programs", "rows"), [(64, 16), (448, 64), (594, 256), (100_000, 16)])
def test_no_more_is_asked_for_ahead_than_the_cache_holds(programs: int, rows: int) -> None:
    columns = columns_ahead(programs, rows, torch.device("meta"))
    assert columns % 64 == 0
    assert min(programs, 3 * 132) * rows * columns * 2 <= 16 << 20


@pytest.mark.parametrize(
    ("capability", "part", "most_kib"),
    [
        ((8, 0), "sm_80", 163),
        ((8, 6), "sm_86", 99),
        ((8, 9), "sm_86", 99),
        ((9, 0), "sm_90", 227),
        ((10, 0), "sm_90", 227),
        ((12, 0), "sm_86", 99),
    ],
)
def test_every_gpu_is_configured_for_the_shared_memory_that_it_has(
    capability: tuple[int, int], part: str, most_kib: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda _: capability)
    index = 40 + 10 * capability[0] + capability[1]
    assert configs.architecture_of(torch.device("cuda", index)) == part
    assert configs.table_of(f"sm_{capability[0]}{capability[1]}") == part
    assert configs.MAX_SHARED[part] == most_kib * 1024


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
    for architecture in gates.TARGETS:
        for name in names_for(architecture):
            record_one(SHIPPED[name], architecture)
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
