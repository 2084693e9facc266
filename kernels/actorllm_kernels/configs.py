"""How each kernel is launched: block sizes, warps and stages, from a table that is checked in.

Owns `configs.json`: kernel -> part ("sm_90", or "*" for all) -> shape class (or "*") -> keyword arguments of the launch. A
part serves the GPUs that `architecture_for` says. What it lacks is looked up in the part that it refines (REFINES), then in "*".
Names in capitals are the kernel's compile-time constants, the others (num_warps, num_stages) options of the compiler.
Nothing is tuned at run time: the same shapes always run the same code, and a step never waits for a search.
Called by the launchers.
"""

from __future__ import annotations

import json
from collections.abc import Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from functools import cache
from importlib.resources import files
from typing import TypeAlias

import torch

Config: TypeAlias = dict[str, int]
Table: TypeAlias = dict[str, dict[str, dict[str, Config]]]
Overrides: TypeAlias = dict[str, Config]

PARTS = ("sm_90", "sm_86", "sm_80")
"""Of the table: by how much shared memory there is and whether launches can be dependent."""
REFINES = {"sm_86": "sm_80"}

MAX_SHARED = {"sm_90": 227 * 1024, "sm_86": 99 * 1024, "sm_80": 163 * 1024}
"""Bytes of shared memory that one program may have: of all GPUs that a part serves, those that have least."""
SHARED_PER_SM = {"sm_90": 228 * 1024, "sm_86": 100 * 1024, "sm_80": 164 * 1024}
"""Bytes that the programs on one multiprocessor have together."""
RESERVED_SHARED = 1024
"""Of them the system takes so much for each program."""
REGISTERS_PER_SM = 65536

_architecture: ContextVar[str] = ContextVar("architecture", default="sm_90")
_tried: ContextVar[Overrides | None] = ContextVar("tried", default=None)


@cache
def table() -> Table:
    """The whole table; do not change it."""
    loaded: Table = json.loads(files(__package__).joinpath("configs.json").read_text())
    return loaded


@contextmanager
def target(architecture: str) -> Iterator[None]:
    """Launches on tensors that are not on a GPU are configured as for this part of the table."""
    token = _architecture.set(architecture)
    try:
        yield
    finally:
        _architecture.reset(token)


@contextmanager
def trying(kernel: str, **config: int) -> Iterator[None]:
    """Launches of this kernel have these arguments instead of the table's: how bench/gpu.py looks for better entries."""
    token = _tried.set({**(_tried.get() or {}), kernel: config})
    try:
        yield
    finally:
        _tried.reset(token)


def architecture_for(capability: tuple[int, int]) -> str:
    """The part of the table for GPUs of this compute capability.

    "sm_86" keeps to the 99 KiB of shared memory that 8.6, 8.9 and 12.x have. Only "sm_90" launches dependents.
    """
    if 9 <= capability[0] <= 11:
        return "sm_90"
    return "sm_80" if capability == (8, 0) else "sm_86"


def table_of(architecture: str) -> str:
    """The part of the table for an architecture of the compiler, such as "sm_89"."""
    major, minor = divmod(int(architecture.removeprefix("sm_")), 10)
    return architecture_for((major, minor))


@cache
def _capability(device: torch.device) -> str:
    return architecture_for(torch.cuda.get_device_capability(device))


@cache
def _num_multiprocessors(device: torch.device) -> int:
    return int(torch.cuda.get_device_properties(device).multi_processor_count)


def num_multiprocessors(device: torch.device) -> int:
    """Of this GPU; where there is none, of one that the part of the table is known by (H100 and H200, A6000, A100)."""
    if device.type == "cuda":
        return _num_multiprocessors(device)
    return {"sm_90": 132, "sm_86": 84, "sm_80": 108}[_architecture.get()]


def architecture_of(device: torch.device) -> str:
    """The part of the table for this device: one of PARTS."""
    return _capability(device) if device.type == "cuda" else _architecture.get()


def lookup(kernel: str, shape_class: str, device: torch.device) -> Config:
    """The most special entry of the table. Raises KeyError with what was looked for."""
    found = _lookup(kernel, shape_class, architecture_of(device))
    tried = _tried.get()
    return {**found, **tried[kernel]} if tried and kernel in tried else found


def dependent(is_dependent: bool, device: torch.device) -> Config:
    """Arguments of a launch that may begin before the kernel in front of it has ended, where the GPU can do that.

    The kernel waits (`gdc_wait`) before it touches anything that another kernel writes.
    """
    pdl = is_dependent and architecture_of(device) == "sm_90"
    return {"PDL": pdl, "launch_pdl": pdl}


@cache
def _lookup(kernel: str, shape_class: str, architecture: str) -> Config:
    of, name = entry_of(kernel, shape_class, architecture)
    return {"enable_fp_fusion": True, **table()[kernel][of][name]}


def entry_of(kernel: str, shape_class: str, architecture: str) -> tuple[str, str]:
    """Which entry that is: its architecture and its shape class, or "*" for them. Raises KeyError."""
    parts = (architecture, REFINES.get(architecture, "*"), "*")
    for of in parts:
        for name in (shape_class, "*"):
            if name in table()[kernel].get(of, {}):
                return of, name
    raise KeyError(f"no configuration of {kernel} for {architecture}, shape class {shape_class!r}")
