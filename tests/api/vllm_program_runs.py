"""Writes vllm_program_runs.json: what the programs of `vllm_programs/shared` print with vLLM.

    VLLM_TARGET_DEVICE=cpu .../vllm/bin/python tests/api/vllm_program_runs.py actorllm/bundled/storyteller

Run with the interpreter of that vLLM; the file that it makes is all that tests need. All programs run in one process, and those
that ask for the same engine get the same one: to start an engine takes longer than a program. With names of programs behind the
folder these run, and what the file says of the others stays. VLLM_ENABLE_V1_MULTIPROCESSING=0 is set: programs that bring classes
are no modules that another process could import.
"""

from __future__ import annotations

import asyncio
import contextlib
import inspect
import io
import json
import os
import re
import sys
import types
from collections.abc import Callable
from pathlib import Path
from typing import Any

SHARED = Path(__file__).parent / "vllm_programs" / "shared"
IMPORT = re.compile(r"^from vllm((?:\.\w+)*) import ", re.MULTILINE)


class Engines:
    """Stands for the classes of engines in a program's names: makes each engine once, and ends them all together."""

    def __init__(self, changes: dict[str, Any]) -> None:
        """changes: further arguments of every engine."""
        self._changes = changes
        self._made: dict[str, Any] = {}
        self._ends: list[Callable[[], Any]] = []

    def of(self, kind: Any) -> Any:
        """What a program gets in place of the class LLM."""

        def make(**arguments: Any) -> Any:
            return self._get(kind, arguments, lambda: kind(**arguments | self._changes))

        return make

    def from_arguments(self, kind: Any) -> Any:
        """What a program gets in place of LLMEngine or AsyncLLM."""
        engines = self

        class Maker:
            @staticmethod
            def from_engine_args(engine_args: Any, **more: Any) -> Any:
                for name, value in engines._changes.items():
                    setattr(engine_args, name, value)
                arguments = vars(engine_args) | more
                return engines._get(kind, arguments, lambda: kind.from_engine_args(engine_args, **more))

        return Maker

    def _get(self, kind: Any, arguments: dict[str, Any], make: Callable[[], Any]) -> Any:
        key = f"{kind.__name__} {sorted(arguments.items())}"
        if key not in self._made:
            self._made[key] = made = make()
            self._ends.append(end_of(made))
            if kind.__name__ == "AsyncLLM":
                made.shutdown = lambda: None  # the next program uses it, too
        return self._made[key]

    def end(self) -> None:
        for end in self._ends:
            end()


def end_of(engine: Any) -> Callable[[], Any]:
    """How an engine is ended: vLLM's LLM ends with the object, ours has a method."""
    for name in ("shutdown", "close"):
        if hasattr(engine, name):
            return getattr(engine, name)
    return lambda: None


def names_of(program: Path, package: str, engines: Engines) -> dict[str, Any]:
    """The program's names after its imports; the import lines name `package` in place of vllm."""
    text, count = IMPORT.subn(rf"from {package}\1 import ", program.read_text())
    if not count:
        raise ValueError(f"{program.name} imports nothing of vllm")
    module = types.ModuleType(f"vllm_program_{program.stem}")
    sys.modules[module.__name__] = module  # where an engine finds the classes of the program
    names = vars(module)
    exec(compile(text, program, "exec"), names)
    for name in ("LLM", "LLMEngine", "AsyncLLM"):
        if name in names:
            names[name] = (engines.of if name == "LLM" else engines.from_arguments)(names[name])
    return names


async def printed(names: dict[str, Any], model: str) -> str:
    """What a program prints."""
    out = io.StringIO()
    with contextlib.redirect_stdout(out):
        try:
            done = names["main"](model)
            if inspect.isawaitable(done):
                await done
        finally:
            del sys.modules[names["__name__"]]
    return out.getvalue()


async def run_all(model: str, names: list[str]) -> dict[str, str]:
    """names: of the programs; none: all."""
    engines = Engines({"enforce_eager": True, "max_num_seqs": 8})
    found: dict[str, str] = {}
    for program in sorted(SHARED.glob("*.py")):
        if names and program.stem not in names:
            continue
        try:
            found[program.stem] = await printed(names_of(program, "vllm", engines), model)
        except Exception as error:
            found[program.stem] = f"{type(error).__name__}: {error}"
        print(program.stem, repr(found[program.stem]), file=sys.stderr, flush=True)
    return found


def main(folder: str, *names: str) -> None:
    os.environ |= {"VLLM_CPU_KVCACHE_SPACE": "1", "VLLM_LOGGING_LEVEL": "ERROR", "VLLM_ENABLE_V1_MULTIPROCESSING": "0"}
    import vllm

    out = Path(os.environ.get("ANSWERS", Path(__file__).with_suffix(".json")))
    known = json.loads(out.read_text())["printed"] if names else {}
    printed_there = known | asyncio.run(run_all(folder, list(names)))
    tree = {"version": vllm.__version__, "printed": dict(sorted(printed_there.items()))}
    out.write_text(json.dumps(tree, indent=1, ensure_ascii=False) + "\n")


if __name__ == "__main__":
    main(*sys.argv[1:])
