"""How a kernel is launched: like `kernel[grid](*arguments, **constants)`, with what Triton finds out each time kept.

Triton binds the arguments, makes a text of what they are specialized for, and looks the build up by it, before it launches. Here
a build is found by what specialization can depend on: constants, types, multiples of 16, and integers that are 1 or wide. It is
kept as a `Pack`: the driver's handle, the launcher, and the constants in their places. The first launch of each kind goes
through Triton, which compiles where it must.

Everything goes through Triton where something else than a launch on a GPU is meant: in the interpreter, and while launches are
recorded or rehearsed. So does everything while one of Triton's hooks listens. Called by the launchers.
"""

from __future__ import annotations

from typing import Any, NamedTuple, TypeAlias

import torch
from triton import knobs
from triton.runtime import driver
from triton.runtime.jit import JITFunction

Argument: TypeAlias = torch.Tensor | int | float
Key: TypeAlias = tuple[Any, ...]


class Pack(NamedTuple):
    """A build, with all that its launches have in common."""

    build: Any
    """As long as it is held, the driver keeps its function loaded, whatever Triton forgets."""
    run: Any
    function: int
    """The driver's handle."""
    metadata: Any
    constants: tuple[Any, ...]
    """In the order of the kernel's parameters."""


_packs: dict[Key, Pack] = {}
_run = JITFunction.run
"""As it is where launches are launches: `launches.recording` and the rehearsal put another in its place."""


def launch(kernel: Any, grid: tuple[int, ...], arguments: tuple[Argument, ...], **constants: Any) -> None:
    """Launch it.

    arguments: of the kernel's parameters that are no constants, which come first; the first is a tensor. constants: all others,
    and the options of the compiler.
    """
    first = arguments[0]
    assert isinstance(first, torch.Tensor)
    device = first.get_device()
    if device < 0 or JITFunction.run is not _run or kernel.pre_run_hooks or _is_watched():
        kernel[grid](*arguments, **constants)
        return
    values: list[Any] = []
    kinds: list[Any] = [id(kernel), device, *constants.items()]
    for value in arguments:
        if isinstance(value, torch.Tensor):
            address = value.data_ptr()
            values.append(address)
            kinds.append(value.dtype if address % 16 == 0 else (value.dtype,))
        else:
            values.append(value)
            kinds.append(float if isinstance(value, float) else _kind(value))
    key = tuple(kinds)
    pack = _packs.get(key)
    if pack is None:
        build = kernel[grid](*arguments, **constants)
        build = build.result() if hasattr(build, "result") else build  # it may come from another thread
        if build is not None:  # there is none of the interpreter
            kept = tuple(constants[name] for name in kernel.arg_names[len(arguments) :])
            _packs[key] = Pack(build, build.run, build.function, build.packed_metadata, kept)
        return
    x, y, z = (*grid, 1, 1)[:3]
    stream = driver.active.get_current_stream(device)
    pack.run(x, y, z, stream, pack.function, pack.metadata, None, None, None, *values, *pack.constants)


def _kind(value: Any) -> Any:
    """What an integer may be specialized for."""
    return 1 if value == 1 else (value % 16 == 0, -(2**31) <= value < 2**31, value < 2**63)


def _is_watched() -> bool:
    """Whether a profiler wants to hear of every launch."""
    hooks = (knobs.runtime.launch_enter_hook, knobs.runtime.launch_exit_hook)
    return any(hook is not None and getattr(hook, "calls", True) for hook in hooks)
