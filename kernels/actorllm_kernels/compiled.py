"""What the compiler has made of a launch, read from its output: resources, loops, widths, and what comes before the wait.

Used by `gates`. Needs no GPU: the assembler and the disassembler come with Triton.
"""

from __future__ import annotations

import re
import subprocess
import tempfile
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import triton

from actorllm_kernels.configs import REGISTERS_PER_SM, RESERVED_SHARED, SHARED_PER_SM, table_of

MAX_THREADS_PER_SM = {80: 2048, 86: 1536, 89: 1536, 90: 2048, 100: 2048, 120: 1536}
MAX_PROGRAMS_PER_SM = {80: 32, 86: 16, 89: 24, 90: 32, 100: 32, 120: 24}

PRODUCT = re.compile(r"\b(tt\.dot|ttng\.warp_group_dot|ttng\.tc_gen5_mma)\b")
BUFFER = re.compile(r"(%\w+) = ttg\.local_alloc : \(\) -> !ttg\.memdesc<(\d+)x(?![^,]*i64)[^,]*,.*mutable")
"""Of what is loaded: numbers of 64 bits are barriers."""
WAIT = re.compile(r"async_wait .*\{num = (\d+)")
LOAD = re.compile(r"\btt\.load\b")
COPY = re.compile(
    r"async_copy_global_to_local .*?(?:contiguity = (\d+) : i32.*)?: tensor<([0-9x]+)x!tt\.ptr<[a-z]+(\d+)>"
)
MEMORY = re.compile(r"^(?:@!?U?P\w+ )?((?:LD|ST|ATOM|RED|UBLKCP|UTMA)\w*(?:\.\w+)*)")


@dataclass(frozen=True, slots=True)
class Loop:
    """A loop that computes products, in which no other loop does."""

    num_buffers: int
    """The least that one of its operands has in shared memory; 0: none is loaded there ahead."""
    num_pending: int
    """The most groups of copies that may be under way when it goes on."""
    num_loads: int
    """Loads that it waits for where they stand."""


@dataclass(frozen=True, slots=True)
class Compiled:
    """Facts about one launch on one architecture."""

    registers: int
    """Per thread."""
    spilled: int
    """Bytes per thread that went to memory for want of registers, written and read."""
    shared: int
    """Bytes per program."""
    warps: int
    programs: int
    """Of the launch."""
    resident: int
    """Programs that one multiprocessor has room for."""
    loops: tuple[Loop, ...]
    narrow_copies: float
    """Of the bytes that are copied ahead, the share in pieces of less than 16 bytes."""
    before_wait: tuple[str, ...]
    """Instructions that touch memory before the kernel in front has ended, prefetches left out."""
    counts: dict[str, int]
    """How often instructions occur that a kernel is meant to be made of."""


def facts(compiled: Any, grid: tuple[int, ...]) -> Compiled:
    """Of what `Launch.compile` returned. grid: of the launch, in programs."""
    ptx, ttgir = compiled.asm["ptx"], compiled.asm["ttgir"]
    architecture = int(compiled.metadata.target.arch)
    registers, spilled = _assembled(ptx, architecture)
    shared, warps = compiled.metadata.shared, compiled.metadata.num_warps
    copies = [_copied(*found) for found in COPY.findall(ttgir)]
    programs = 1
    for size in grid:
        programs *= size
    return Compiled(
        registers,
        spilled,
        shared,
        warps,
        programs,
        _resident(architecture, registers, shared, warps),
        tuple(_loops(ttgir)),
        sum(size for size, width in copies if width < 16) / max(1, sum(size for size, _ in copies)),
        tuple(_before_wait(compiled.asm["cubin"])) if "griddepcontrol.wait" in ptx else (),
        {
            "wgmma": ptx.count("wgmma.mma_async"),
            "tma": ptx.count("cp.async.bulk.tensor"),
            "setmaxnreg": ptx.count("setmaxnreg"),
            "griddepcontrol": ptx.count("griddepcontrol"),
        },
    )


def _copied(contiguity: str, shape: str, bits: str) -> tuple[int, int]:
    """(bytes of the copied tile, bytes of a piece)."""
    element = int(bits) // 8
    size = element
    for extent in shape.split("x"):
        size *= int(extent)
    return size, int(contiguity or 1) * element


def _tool(name: str) -> str:
    return str(Path(triton.__file__).parent / "backends" / "nvidia" / "bin" / name)


def _assembled(ptx: str, architecture: int) -> tuple[int, int]:
    """Registers per thread, and bytes spilled."""
    from triton.backends.nvidia.compiler import get_ptxas

    match = re.search(r"^\.target\s+(\S+)", ptx, re.M)
    assert match is not None
    with tempfile.TemporaryDirectory() as folder:
        source = Path(folder, "k.ptx")
        source.write_text(ptx)
        command = [get_ptxas(architecture).path, "-v", f"-arch={match[1].rstrip(',')}", str(source)]
        done = subprocess.run([*command, "-o", f"{folder}/k.o"], text=True, capture_output=True, check=True)
    used = re.search(r"Used (\d+) registers", done.stderr)
    spilled = re.search(r"(\d+) bytes spill stores, (\d+) bytes spill loads", done.stderr)
    assert used is not None
    assert spilled is not None
    return int(used[1]), int(spilled[1]) + int(spilled[2])


def _resident(architecture: int, registers: int, shared: int, warps: int) -> int:
    allocated = -(-registers // 8) * 8 * 32 * warps
    return min(
        REGISTERS_PER_SM // allocated,
        SHARED_PER_SM[table_of(f"sm_{architecture}")] // (shared + RESERVED_SHARED),
        MAX_THREADS_PER_SM[architecture] // (32 * warps),
        MAX_PROGRAMS_PER_SM[architecture],
    )


def _loops(ttgir: str) -> list[Loop]:
    """The innermost loops with products. MLIR closes a loop at the indentation at which it began."""
    lines = ttgir.splitlines()
    buffers = {name: int(count) for name, count in BUFFER.findall(ttgir)}
    found: list[Loop] = []
    for at, line in enumerate(lines):
        if "scf.for" not in line:
            continue
        indentation = line[: len(line) - len(line.lstrip())]
        end = next(i for i in range(at + 1, len(lines)) if lines[i].startswith(indentation + "}"))
        body = lines[at + 1 : end]
        if any("scf.for" in one and any(PRODUCT.search(inner) for inner in body[i:]) for i, one in enumerate(body)):
            continue
        if not any(PRODUCT.search(one) for one in body):
            continue
        text = "\n".join(body)
        used = [count for name, count in buffers.items() if re.search(re.escape(name) + r"\b", text)]
        waits = [int(num) for num in WAIT.findall(text)]
        found.append(Loop(min(used, default=0), max(waits, default=0), len(LOAD.findall(text))))
    return found


def _before_wait(cubin: bytes) -> list[str]:
    """By the machine code: the compilers may move what the source has in another order."""
    with tempfile.NamedTemporaryFile(suffix=".cubin") as file:
        file.write(cubin)
        file.flush()
        done = subprocess.run([_tool("nvdisasm"), "-c", file.name], text=True, capture_output=True, check=True)
    early: list[str] = []
    for instruction in re.findall(r"/\*[0-9a-f]{4,5}\*/\s+(.*?)\s*;", done.stdout):
        if "ACQBULK" in instruction:
            return early
        if (match := MEMORY.match(instruction)) and not match[1].startswith(
            ("LDC", "LDL", "STL", "LDS", "STS", "ATOMS")
        ):
            early.append(match[1])
    return [*early, "it never waits"]
