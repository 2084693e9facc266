"""Programs that tests run: Python with arguments, as a copy of a process that has loaded what these programs import.

What is copied, and what is not, says `tests/forking.py`. A program whose start is the subject of a test is made by exec:
`subprocess` has the same functions. So is one with options of the interpreter that no source has, and one in another environment.
"""

from __future__ import annotations

import contextlib
import os
import subprocess
import sys
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from tests.forking import IS_ASKED_TO_EXEC, NAME, OF_A_PROGRAM, SYS_CLONE, Preloaded

LIBRARY = (
    "actorllm.actors.worker",
    "actorllm.model.cpu.runner",
    "actorllm.actors.scheduler",
    "actorllm.client.engine_supervisor",
    "actorllm.api.async_llm",
    "actorllm.api.llm",
    "tests.actors.scripted_topology",
    "tests.actors.scripted_worker",
)
IMPORTED = {
    (): (*LIBRARY, "actorllm.cli.commands", "actorllm.server.app", "actorllm.server.launcher"),
    ("-X", "dev", "-W", "ignore::DeprecationWarning"): LIBRARY,
}
"""By the options of the interpreter."""

_sources: dict[tuple[str, ...], Preloaded] = {}


@contextlib.contextmanager
def copied_programs() -> Iterator[None]:
    """Within it, programs are copies."""
    from actorllm.config import EngineConfig
    from actorllm.model.threads import worker_environment

    if SYS_CLONE is None or IS_ASKED_TO_EXEC or "PYTHONPATH" in os.environ:
        yield
        return
    more = {
        "OPENBLAS_NUM_THREADS": "1",
        **worker_environment(EngineConfig.from_arguments("storyteller", num_threads=1)),
    }
    for options, modules in IMPORTED.items():
        _sources[options] = Preloaded(modules, os.environ, more=more, options=options, free=OF_A_PROGRAM)
    try:
        yield
    finally:
        for source in _sources.values():
            source.close()
        _sources.clear()


class CopiedProgram(subprocess.Popen[Any]):
    """As `subprocess.Popen`, of a copy."""

    def __init__(self, source: Preloaded, arguments: list[str], **options: Any) -> None:
        self._source = source
        super().__init__(arguments, **options)

    def _execute_child(
        self,
        args: list[str],
        executable: Any,
        preexec_fn: Any,
        close_fds: bool,
        pass_fds: Any,
        cwd: str | os.PathLike[str] | None,
        env: Mapping[str, str] | None,
        startupinfo: Any,
        creationflags: Any,
        shell: Any,
        p2cread: int,
        p2cwrite: int,
        c2pread: int,
        c2pwrite: int,
        errread: int,
        errwrite: int,
        restore_signals: bool,
        gid: Any,
        gids: Any,
        uid: Any,
        umask: int,
        start_new_session: bool,
        *others: Any,
    ) -> None:
        standard = [own if fd == -1 else fd for own, fd in enumerate((p2cread, c2pwrite, errwrite))]
        folder = os.path.abspath(cwd or os.getcwd())
        self.pid = self._source.begin(
            args, standard, folder, os.environ if env is None else env, is_leader=start_new_session
        )
        self._child_created = True
        self._close_pipe_fds(p2cread, p2cwrite, c2pread, c2pwrite, errread, errwrite)  # type: ignore[attr-defined]


def popen(command: Sequence[str | bytes | os.PathLike[str]], **options: Any) -> subprocess.Popen[Any]:
    """`subprocess.Popen`, for a command that begins with `sys.executable`."""
    python, *words = map(os.fsdecode, command)
    assert python == sys.executable
    for of_python, source in _sources.items():
        arguments = words[len(of_python) :]
        if tuple(words[: len(of_python)]) == of_python and is_of_ours(arguments):
            if options.get("pass_fds") or not source.fits(options.get("env") or os.environ):
                break
            return CopiedProgram(source, arguments, **options)
    return subprocess.Popen(command, **options)


def is_of_ours(arguments: list[str]) -> bool:
    """Whether they are source text, a script, or a module of actorllm or of its tests."""
    match arguments:
        case ["-c", *_]:
            return True
        case ["-m", name, *_]:
            return name.partition(".")[0] in ("actorllm", "tests")
        case [script, *_]:
            return not script.startswith("-")
    return False


def run(
    command: Sequence[str | bytes | os.PathLike[str]],
    *,
    capture_output: bool = False,
    timeout: float | None = None,
    check: bool = False,
    **options: Any,
) -> subprocess.CompletedProcess[Any]:
    """`subprocess.run`, for a command that begins with `sys.executable`."""
    if capture_output:
        options |= {"stdout": subprocess.PIPE, "stderr": subprocess.PIPE}
    with popen(command, **options) as process:
        try:
            output, errors = process.communicate(timeout=timeout)
        except BaseException:
            process.kill()
            raise
    done = subprocess.CompletedProcess(process.args, process.returncode, output, errors)
    if check:
        done.check_returncode()
    return done


def children_of(pid: int) -> list[int]:
    """The processes that a program has made, but for the one beside a copy that makes more copies."""
    found: list[int] = []
    for task in Path(f"/proc/{pid}/task").iterdir():
        with contextlib.suppress(FileNotFoundError, ProcessLookupError):  # the thread has ended
            found += [int(child) for child in (task / "children").read_text().split()]
    return [child for child in found if name_of(child) != NAME]


def name_of(pid: int) -> str | None:
    """What ps shows of it. None: it is gone."""
    try:
        return Path(f"/proc/{pid}/comm").read_text().strip()
    except (FileNotFoundError, ProcessLookupError):
        return None
