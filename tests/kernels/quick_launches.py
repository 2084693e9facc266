"""Launches in Triton's interpreter that do not look through the whole language again.

The interpreter replaces the builtins of `triton.language` for each launch, and again for each call of a function by a kernel.
Each time it asks all attributes whether they are builtins. For small tensors that takes longer than what the kernel computes.
Here the builtins are looked up once, and a launch replaces them in both modules that functions of a kernel may import.
"""

from __future__ import annotations

import functools
import inspect
from typing import Any

import pytest
import triton.language as tl
from triton.runtime import interpreter

OWNERS = (tl, tl.core, tl.tensor, tl.math, tl.core.tensor_descriptor_base)
"""Of the builtins that a kernel calls."""


@functools.cache
def builtins_of(owner: Any) -> tuple[tuple[str, Any], ...]:
    """Of a module or a class, by name."""
    return tuple((name, member) for name, member in inspect.getmembers(owner) if tl.core.is_builtin(member))


def patched_language(_: Any) -> interpreter._LangPatchScope:
    """In place of `_patch_lang`, which has the kernel as its argument: the caller restores what was there."""
    scope = interpreter._LangPatchScope()
    for owner in OWNERS:
        for name, member in builtins_of(owner):
            interpreter._patch_attr(owner, name, member, interpreter.interpreter_builder, scope)
    interpreter._patch_lang_tensor(tl.tensor, scope)
    for module in (tl, tl.core):
        interpreter._patch_lang_core(module, scope)
    return scope


def call(function: interpreter.InterpretedFunction[Any], *arguments: Any, **more: Any) -> Any:
    """A function that a kernel calls: its launch has replaced the builtins."""
    try:
        return function.rewrite()(*arguments, **more)
    except Exception as error:
        raise interpreter.InterpreterError(repr(error)) from error


def make_launches_quick(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(interpreter, "_patch_lang", patched_language)
    monkeypatch.setattr(interpreter.InterpretedFunction, "__call__", call)
