"""Gates on compiled code: what every shipped launch must be, on every architecture, whatever the version of Triton.

    python -m actorllm_kernels.gates [--target sm_90 ...] [--only WORD] [--show]

Compiles the launches of `shipped.py` and prints a line for each gate that does not hold. Exit code 0: all hold. --only: of
launches whose name contains this word. --show: also the facts about every launch.

Called by tests/kernels/test_gates.py and by hand. Needs no GPU; must not run where TRITON_INTERPRET is set.
"""

from __future__ import annotations

import argparse
import json
import os
import re
import subprocess
import sys
from dataclasses import asdict
from typing import Any

import torch

from actorllm_kernels import attn_decode, latent_decode
from actorllm_kernels.compiled import Compiled, Loop, facts
from actorllm_kernels.configs import MAX_SHARED, num_multiprocessors, table_of, target
from actorllm_kernels.launches import Launch, names_for, record_one
from actorllm_kernels.skinny_gemm import NARROW

TARGETS = ("sm_90", "sm_86", "sm_80")
"""One for each part of the table of configurations."""
ALL_TARGETS = ("sm_80", "sm_86", "sm_89", "sm_90", "sm_100", "sm_120")

MAX_REGISTERS = 255
MAX_NARROW = 0.1
MAX_NARROW_OF_4_BITS = 0.2
"""The scales of a tile are too few for 16 bytes a thread, and its codes are few as well."""
MAX_NARROW_OF_CODES = 0.81
"""Tiles of 64 outputs, which wide products have, copy codes in pieces of 8. They took 57 us on an H200, and tiles of 32 with pieces
of 16 took 89 us."""
MAX_NARROW_OF_FLOAT8 = 0.51
"""Values of a cache of floats of 8 bits are copied in pieces of 8: of as many numbers as in the type that they become."""
LOADS_AHEAD = (
    "attn_decode",
    "attn_prefill",
    "latent_decode",
    "latent_prefill",
    "skinny_gemm",
    "quantized_gemm",
    "grouped_gemm",
    "lora_shrink",
    "lm_head_sample",
)
"""Kernels whose loops are nothing if their loads are not under way before they are needed."""
READS_WEIGHTS = ("gemv", "skinny_gemm", "quantized_gemm", "grouped_gemm", "lm_head_sample")
"""Kernels that take as long as it takes to read a weight: all multiprocessors must ask for it."""
READS_EARLY = ("gemv",)
"""Kernels that may read a weight before they wait (`early_reads`); no kernel of a step writes one."""
WARPGROUP = ("attn_prefill", "latent_prefill")

Found = dict[str, dict[str, Compiled]]
"""architecture -> launch -> facts."""


def violations(found: Found) -> list[str]:
    """What does not hold, in words."""
    return [
        f"{name} on {architecture} {what}"
        for architecture, launches in found.items()
        for name, compiled in launches.items()
        for what in _violations(name, compiled, architecture)
    ]


def _violations(name: str, compiled: Compiled, architecture: str) -> list[str]:
    messages: list[str] = []
    part = table_of(architecture)
    if compiled.spilled:
        messages.append(f"spills {compiled.spilled} bytes")
    if compiled.registers > MAX_REGISTERS:
        messages.append(f"takes {compiled.registers} registers")
    if compiled.shared > MAX_SHARED[part]:
        messages.append(f"takes {compiled.shared} bytes of shared memory, and there are {MAX_SHARED[part]}")
    if name.startswith(LOADS_AHEAD) and "-tma" not in name:
        messages += _loop_violations(compiled, _max_narrow(name))
    if name.startswith(READS_WEIGHTS):
        with target(part):
            wanted = num_multiprocessors(torch.device("meta"))
        if compiled.programs < wanted:
            messages.append(f"has {compiled.programs} programs for {wanted} multiprocessors")
    if architecture == "sm_90" and name.startswith(WARPGROUP) and not compiled.counts["wgmma"]:
        messages.append("does not use the matrix units for large tiles")
    if "-tma" in name and not (compiled.counts["tma"] and compiled.counts["setmaxnreg"]):
        messages.append("has no warps of its own for loading")
    if part == "sm_90" and "-pdl" in name:
        if compiled.counts["griddepcontrol"] != 2:
            messages.append("is no dependent launch")
        if compiled.before_wait and not name.startswith(READS_EARLY):
            messages.append(f"touches memory before it waits: {', '.join(sorted(set(compiled.before_wait)))}")
    return messages


def _max_narrow(name: str) -> float:
    """Which share of the bytes of a launch may be copied in pieces of less than 16."""
    outputs = re.search(r"-(\d+)x", name)
    if name.startswith("quantized_gemm") and outputs is not None and int(outputs[1]) >= NARROW:
        return MAX_NARROW_OF_CODES
    return MAX_NARROW_OF_4_BITS if "-int4" in name else MAX_NARROW_OF_FLOAT8 if "-float8" in name else MAX_NARROW


def _loop_violations(compiled: Compiled, max_narrow: float) -> list[str]:
    messages: list[str] = []
    if not compiled.loops:
        messages.append("has no loop with products")
    for loop in compiled.loops:
        if loop.num_buffers < 2:
            messages.append(f"has {loop.num_buffers} buffers for what its main loop loads")
        if not loop.num_pending:
            messages.append("waits for all its loads in its main loop")
        if loop.num_loads:
            messages.append(f"has {loop.num_loads} loads in its main loop that it waits for at once")
    if compiled.narrow_copies > max_narrow:
        messages.append(f"copies {compiled.narrow_copies:.0%} of its bytes in pieces of less than 16")
    return messages


def residency(name: str, launch: Launch, compiled: Compiled, architecture: str) -> list[str]:
    """Whether as many programs fit on a multiprocessor as must be there at once.

    Programs of decode attention share the work evenly: a second wave would begin when the first has ended. A program of the LM head
    draws with nothing under way: another one must read meanwhile.
    """
    constants, meta = launch.constants, torch.device("meta")
    with target(table_of(architecture)):
        if name.startswith("lm_head_sample"):
            wanted = 2
        elif name.startswith("attn_decode"):
            wanted = attn_decode.per_sm(meta, constants["DIM"], constants["Q_LEN"] * constants["GROUP"])
        elif name.startswith("latent_decode"):
            wanted = latent_decode.per_sm(constants["NUM_GROUPS"] * constants["GROUP"], meta)
        else:
            return []
    if wanted <= compiled.resident:
        return []
    return [f"{name} on {architecture} wants {wanted} programs per multiprocessor, and {compiled.resident} fit"]


def early_reads(name: str, launch: Launch, compiled: Compiled, architecture: str) -> list[str]:
    """Whether only the first piece of the weight is read before the wait: compilers may move what must come behind."""
    if not name.startswith(READS_EARLY) or table_of(architecture) != "sm_90":
        return []
    constants = launch.constants
    rows = constants["BLOCK_N"] * (2 if constants["ACTIVATION"] else 1)
    pieces = rows * constants["BLOCK_K"] // (8 * 32 * int(launch.options["num_warps"]))
    wanted = pieces if constants["IS_EARLY"] else 0
    reads = [one for one in compiled.before_wait if one.startswith("LDG")]
    if len(reads) == len(compiled.before_wait) == wanted:
        return []
    return [f"{name} on {architecture} reads {wanted} pieces before it waits, and is {', '.join(compiled.before_wait)}"]


def check(names: list[str], architecture: str) -> tuple[dict[str, Compiled], list[str]]:
    """Compile these shipped launches: (facts, what does not hold)."""
    from actorllm_kernels.shipped import SHIPPED

    found: dict[str, Compiled] = {}
    messages: list[str] = []
    there = set(names_for(architecture))
    for name in names:
        if name not in there:
            continue
        launch = record_one(SHIPPED[name], architecture)
        found[name] = facts(launch.compile(architecture), launch.grid)
        messages += [
            *residency(name, launch, found[name], architecture),
            *early_reads(name, launch, found[name], architecture),
        ]
    return found, [*messages, *violations({architecture: found})]


def check_all(
    architectures: tuple[str, ...] = TARGETS, word: str = "", num_processes: int = 2
) -> tuple[Found, list[str]]:
    """The same for all shipped launches whose name contains the word, in so many processes at once."""
    environment = {name: value for name, value in os.environ.items() if name != "TRITON_INTERPRET"}
    command = [sys.executable, "-m", "actorllm_kernels.gates", "--only", word, "--target", *architectures, "--part"]
    processes = [
        subprocess.Popen([*command, f"{i}/{num_processes}"], stdout=subprocess.PIPE, text=True, env=environment)
        for i in range(num_processes)
    ]
    outputs = [process.communicate()[0] for process in processes]
    found: Found = {architecture: {} for architecture in architectures}
    messages: list[str] = []
    for process, output in zip(processes, outputs, strict=True):
        if process.returncode:
            raise RuntimeError(f"the compiling process ended with {process.returncode}; its output: {output}")
        part = json.loads(output)
        messages += part["messages"]
        for architecture, launches in part["found"].items():
            found[architecture].update({name: _read(compiled) for name, compiled in launches.items()})
    return {architecture: dict(sorted(launches.items())) for architecture, launches in found.items()}, sorted(messages)


def _read(compiled: dict[str, Any]) -> Compiled:
    loops = tuple(Loop(**loop) for loop in compiled.pop("loops"))
    return Compiled(loops=loops, before_wait=tuple(compiled.pop("before_wait")), **compiled)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--target", nargs="+", default=TARGETS, metavar="sm_90", help="architectures, or: all")
    parser.add_argument("--only", default="", metavar="WORD", help="only launches whose name contains this")
    parser.add_argument("--show", action="store_true", help="print the facts about every launch")
    parser.add_argument("--part", help="compile the i-th of n parts and print the facts as JSON: i/n")
    arguments = parser.parse_args()
    architectures = ALL_TARGETS if list(arguments.target) == ["all"] else tuple(arguments.target)
    if unknown := set(architectures) - set(ALL_TARGETS):
        parser.error(f"--target {sorted(unknown)[0]}: it is none of {', '.join(ALL_TARGETS)}, all")
    if arguments.part:
        from actorllm_kernels.shipped import SHIPPED

        index, count = map(int, arguments.part.split("/"))
        names = [name for name in SHIPPED if arguments.only in name][index::count]
        parts = {architecture: check(names, architecture) for architecture in architectures}
        found = {
            architecture: {name: asdict(one) for name, one in of.items()} for architecture, (of, _) in parts.items()
        }
        messages = [message for _, of in parts.values() for message in of]
        sys.stdout.write(json.dumps({"found": found, "messages": messages}))
        return
    all_found, failed = check_all(architectures, arguments.only)
    lines = [
        f"{architecture} {name} {json.dumps(asdict(compiled))}"
        for architecture, launches in all_found.items()
        for name, compiled in launches.items()
        if arguments.show
    ]
    sys.stdout.write("\n".join([*lines, *(failed or [f"all gates hold on {', '.join(architectures)}"]), ""]))
    raise SystemExit(bool(failed))


if __name__ == "__main__":
    main()
