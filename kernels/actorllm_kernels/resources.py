"""Compiles the shipped launches for a GPU that is not there, and reads what they take of it.

Owns the resource table `resources/triton-X.Y.json`. For every shipped launch and architecture it has registers, spilled bytes
and shared memory. It also has how often the instructions occur that the kernel is meant to be made of. A launch is recorded by
calling the launcher itself, on meta tensors. So what is compiled here is what runs there, with the same specializations.

    python -m actorllm_kernels.resources            compare with the table
    python -m actorllm_kernels.resources --write    write the table of this version of Triton

Called by tests/kernels/test_resources.py and by hand. Needs no GPU; must not run where TRITON_INTERPRET is set.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import os
import re
import subprocess
import sys
import tempfile
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
import triton
from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource
from triton.runtime.jit import JITFunction

from actorllm_kernels.configs import target

ARCHITECTURES = ("sm_90", "sm_80")
MAX_SHARED = {"sm_90": 227 * 1024, "sm_80": 99 * 1024}
"""Bytes of shared memory that one program may have: of all GPUs that are configured as this one, those that have least."""
MAX_REGISTERS = 255

PIPELINED = ("attn_decode", "attn_prefill", "skinny_gemm", "lm_head")
"""Kernels whose loops are nothing if their loads are not in flight before they are needed."""
WARPGROUP = ("attn_prefill",)

FOLDER = Path(__file__).parent / "resources"

Resources = dict[str, int]


@dataclass(frozen=True, slots=True)
class Launch:
    """One call of a jitted function, with what its specialization depends on."""

    kernel: Any
    signature: dict[str, str]
    constants: dict[str, Any]
    divisible: tuple[str, ...]
    """Arguments known to be multiples of 16."""
    options: dict[str, int | bool]
    grid: tuple[int, ...]

    def compile(self, architecture: str) -> Any:
        """For a compute capability such as "sm_90"."""
        names = self.kernel.arg_names
        attributes = {(names.index(name),): [["tt.divisibility", 16]] for name in self.divisible}
        source = ASTSource(fn=self.kernel, signature=self.signature, constexprs=self.constants, attrs=attributes)
        capability = int(architecture.removeprefix("sm_"))
        return triton.compile(source, target=GPUTarget("cuda", capability, 32), options=dict(self.options))


_POINTERS = {
    torch.bfloat16: "*bf16",
    torch.float16: "*fp16",
    torch.float32: "*fp32",
    torch.int32: "*i32",
    torch.int64: "*i64",
    torch.uint8: "*u8",
    torch.bool: "*i1",
}


@contextlib.contextmanager
def recording() -> Iterator[list[Launch]]:
    """Launches are appended to the list instead of being run."""
    launches: list[Launch] = []
    run = JITFunction.run

    def record(self: Any, *args: Any, grid: Any, warmup: bool, **kwargs: Any) -> None:
        names = self.arg_names
        values = dict(zip(names, args, strict=False)) | {k: v for k, v in kwargs.items() if k in names}
        signature: dict[str, str] = {}
        constants: dict[str, Any] = {}
        divisible = []
        for parameter in self.params:
            name, value = parameter.name, values[parameter.name]
            is_specialized = type(value) is int and not parameter.do_not_specialize
            if parameter.is_constexpr or value is None or (is_specialized and value == 1):
                signature[name], constants[name] = "constexpr", value
                continue
            if isinstance(value, torch.Tensor):
                signature[name] = _POINTERS[value.dtype]
                divisible.append(name)
            elif isinstance(value, float):
                signature[name] = "fp32"
            else:
                signature[name] = "i32" if -(2**31) <= value < 2**31 else "i64"
                if is_specialized and value % 16 == 0:
                    divisible.append(name)
        options = {k: v for k, v in kwargs.items() if k not in names and (v or k != "launch_pdl")}
        launches.append(Launch(self, signature, constants, tuple(divisible), options, tuple(grid)))

    JITFunction.run = record
    try:
        yield launches
    finally:
        JITFunction.run = run


def resources(compiled: Any) -> Resources:
    """What the program takes, and counts of the instructions that matter."""
    from triton.backends.nvidia.compiler import get_ptxas

    ptx = compiled.asm["ptx"]
    with tempfile.TemporaryDirectory() as folder:
        source = Path(folder, "k.ptx")
        source.write_text(ptx)
        match = re.search(r"^\.target\s+(\S+)", ptx, re.M)
        assert match is not None
        command = [get_ptxas(compiled.metadata.target.arch).path, "-v", f"-arch={match[1].rstrip(',')}"]
        done = subprocess.run(
            [*command, str(source), "-o", f"{folder}/k.o"], text=True, capture_output=True, check=True
        )
    used = re.search(r"Used (\d+) registers", done.stderr)
    spilled = re.search(r"(\d+) bytes spill stores, (\d+) bytes spill loads", done.stderr)
    assert used is not None
    assert spilled is not None
    found = {
        "registers": int(used[1]),
        "spilled": int(spilled[1]) + int(spilled[2]),
        "shared": compiled.metadata.shared,
        "warps": compiled.metadata.num_warps,
        "wgmma": ptx.count("wgmma.mma_async"),
        "mma": len(re.findall(r"\bmma\.sync", ptx)),
        "cp_async": ptx.count("cp.async.c"),
        "tma": ptx.count("cp.async.bulk.tensor"),
        "setmaxnreg": ptx.count("setmaxnreg"),
        "griddepcontrol": ptx.count("griddepcontrol"),
        "prefetch": ptx.count("prefetch.global"),
    }
    return {name: count for name, count in found.items() if count or name in ("registers", "spilled", "shared")}


def measure(names: list[str], architecture: str) -> dict[str, Resources]:
    """Compiles these shipped launches."""
    from actorllm_kernels.shipped import SHIPPED

    there = [name for name in names if name in names_for(architecture)]
    return {name: resources(record_one(SHIPPED[name], architecture).compile(architecture)) for name in there}


def names_for(architecture: str) -> list[str]:
    """The shipped launches that there are for it: sm_80 has no unit for descriptors."""
    from actorllm_kernels.shipped import SHIPPED

    return [name for name in SHIPPED if "-tma" not in name or architecture == "sm_90"]


def record_one(case: Callable[[], None], architecture: str) -> Launch:
    with target(architecture), recording() as launches:
        case()
    (launch,) = launches
    return launch


def measure_all(num_processes: int = 2) -> dict[str, dict[str, Resources]]:
    """architecture -> launch -> resources; compiles in so many processes at once."""
    environment = {name: value for name, value in os.environ.items() if name != "TRITON_INTERPRET"}
    command = [sys.executable, "-m", "actorllm_kernels.resources", "--part"]
    processes = [
        subprocess.Popen([*command, f"{i}/{num_processes}"], stdout=subprocess.PIPE, text=True, env=environment)
        for i in range(num_processes)
    ]
    found: dict[str, dict[str, Resources]] = {architecture: {} for architecture in ARCHITECTURES}
    outputs = [process.communicate()[0] for process in processes]
    for process, output in zip(processes, outputs, strict=True):
        if process.returncode:
            raise RuntimeError(f"the compiling process ended with {process.returncode}; its output: {output}")
        for architecture, launches in json.loads(output).items():
            found[architecture].update(launches)
    return {architecture: dict(sorted(launches.items())) for architecture, launches in found.items()}


def table_path() -> Path:
    """The table of the Triton that is installed."""
    return FOLDER / f"triton-{'.'.join(triton.__version__.split('.')[:2])}.json"


def violations(found: dict[str, dict[str, Resources]]) -> list[str]:
    """What no launch may do, in words."""
    messages = []
    for architecture, launches in found.items():
        for name, used in launches.items():
            where = f"{name} on {architecture}"
            if used["spilled"]:
                messages.append(f"{where} spills {used['spilled']} bytes")
            if used["registers"] > MAX_REGISTERS:
                messages.append(f"{where} takes {used['registers']} registers")
            if used["shared"] > MAX_SHARED[architecture]:
                messages.append(f"{where} takes {used['shared']} bytes of shared memory")
            if name.startswith(PIPELINED) and "-tma" not in name and not used.get("cp_async"):
                messages.append(f"{where} does not load ahead")
            if architecture == "sm_90" and name.startswith(WARPGROUP) and not used.get("wgmma"):
                messages.append(f"{where} does not use the matrix units for large tiles")
            if "-tma" in name and not (used.get("tma") and used.get("setmaxnreg")):
                messages.append(f"{where} has no warps of its own for loading")
            if architecture == "sm_90" and "-pdl" in name and used.get("griddepcontrol") != 2:
                messages.append(f"{where} is no dependent launch")
    return messages


def render(found: dict[str, dict[str, Resources]]) -> str:
    """As JSON with one launch per line."""
    parts = []
    for architecture, launches in found.items():
        lines = ",\n".join(f"    {json.dumps(name)}: {json.dumps(used)}" for name, used in launches.items())
        parts.append(f"  {json.dumps(architecture)}: {{\n{lines}\n  }}")
    return "{\n" + ",\n".join(parts) + "\n}\n"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--write", action="store_true", help="write the table of this version of Triton")
    parser.add_argument("--part", help="compile the i-th of n parts and print it: i/n")
    parser.add_argument("--only", help="compile only launches whose name contains this, and print them")
    arguments = parser.parse_args()
    from actorllm_kernels.shipped import SHIPPED

    names = list(SHIPPED)
    if arguments.part or arguments.only:
        if arguments.part:
            index, count = map(int, arguments.part.split("/"))
            names = names[index::count]
        else:
            names = [name for name in names if arguments.only in name]
        sys.stdout.write(render({a: measure(names, a) for a in ARCHITECTURES}))
        return
    found = measure_all()
    text = render(found)
    if arguments.write:
        FOLDER.mkdir(exist_ok=True)
        table_path().write_text(text)
    if messages := violations(found):
        raise SystemExit("\n".join(messages))
    if table_path().read_text() != text:
        raise SystemExit(f"{table_path()} says something else; --write, and look at the difference")


if __name__ == "__main__":
    main()
