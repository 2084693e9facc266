"""Processes of engines and programs that are copied are what those are that were made by exec."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from actorllm import LLM
from actorllm.model.cpu.runner import CpuRunner
from tests import programs
from tests.forking import IS_ASKED_TO_EXEC, SYS_CLONE, outside_the_timeout
from tests.quick_starts import FOLDER

MAKES_COPIES = pytest.mark.skipif(
    SYS_CLONE is None or IS_ASKED_TO_EXEC,
    reason="no copies are made on this architecture, or as ACTORLLM_EXEC asks for",
)


@pytest.fixture(autouse=True, scope="module")
def sources_of_their_own() -> Iterator[None]:
    """What is copied here; whatever tests before have done to theirs."""
    before = dict(programs._sources)
    programs._sources.clear()
    with programs.copied_programs():
        yield
    programs._sources.update(before)


def status(pid: int) -> dict[str, str]:
    lines = Path(f"/proc/{pid}/status").read_text().splitlines()
    return {name: value.strip() for name, _, value in (line.partition(":") for line in lines)}


def program(pid: int) -> str:
    return Path(f"/proc/{pid}/cmdline").read_bytes().decode()


@MAKES_COPIES
def test_copies_are_children_of_the_owner_with_sessions_and_environments_of_their_own(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("ACTORLLM_TEST_WORD", "told")
    with LLM("storyteller", num_threads=1) as llm:
        pids = llm._engine.pids
        assert set(pids) == {"scheduler", "worker0"}
        for name, pid in pids.items():
            assert "forking.py" in program(pid)
            assert status(pid)["Name"] == f"actor:{name}"
            assert int(status(pid)["PPid"]) == os.getpid()
            assert os.getsid(pid) == pid
            assert Path(f"/proc/{pid}/cwd").resolve() == tmp_path
            assert Path(f"/proc/{pid}/fd/0").readlink() == Path(os.devnull)
            assert Path(f"/proc/{pid}/fd/1").readlink() == Path(f"/proc/{pid}/fd/2").readlink()


def test_exec_it_is_where_the_environment_is_another_one(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("OMP_NUM_THREADS", "3")
    with LLM("storyteller") as llm:
        programs = {name: program(pid) for name, pid in llm._engine.pids.items()}
    assert all("child.py" in text for text in programs.values())


TELLS = """
import json, os, signal, sys
told = {
    "arguments": sys.argv, "name": __name__, "file": globals().get("__file__"), "imported from": sys.path,
    "folder": os.getcwd(), "word": os.environ.get("WORD"), "kept": "ACTORLLM_TEST_WORD" in os.environ,
    "signals": [str(signal.getsignal(number)) for number in (signal.SIGINT, signal.SIGTERM, signal.SIGPIPE)],
    "input": sys.stdin.read(),
    "group": os.getpgid(0) == os.getpid(), "own class": __import__("__main__").__dict__ is globals(),
    "blocked": sorted(signal.pthread_sigmask(signal.SIG_BLOCK, [])), "descriptors": [os.fstat(fd).st_mode for fd in range(3)],
}
print(json.dumps(told))
"""


@MAKES_COPIES
@pytest.mark.parametrize("kind", ["text", "script"])
@pytest.mark.parametrize("is_leader", [False, True])
def test_a_copied_program_is_what_one_is_that_was_made_by_exec(tmp_path: Path, kind: str, is_leader: bool) -> None:
    script = tmp_path / "told.py"
    script.write_text(TELLS)
    command = [sys.executable, *(["-c", TELLS] if kind == "text" else [str(script)]), "--first", "second"]
    environment = os.environ | {"PYTHONPATH": str(tmp_path / "own"), "ACTORLLM_TEST_WORD": "told"}
    found = []
    for run in (programs.popen, subprocess.Popen):
        with run(
            command,
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
            cwd=tmp_path,
            env=environment,
            start_new_session=is_leader,
        ) as process:
            output, errors = process.communicate("what is read\n", timeout=50)
        assert errors == ""
        found.append((json.loads(output), errors, process.returncode, type(process).__name__))
    (copied, *how, kind_of), (execed, *expected, _) = found
    assert kind_of == "CopiedProgram"
    assert copied == execed
    assert how == expected == ["", 0]


ENDINGS = {
    "of itself": "import sys; print('said'); sys.exit(3)",
    "with an exception": "raise ValueError('of the program')",
    "by an interrupt": "raise KeyboardInterrupt",
    "by a signal": "import os, signal; os.kill(os.getpid(), signal.SIGTERM)",
    "after its handlers and threads": """
import atexit, threading
go_on = threading.Event()
threading.Thread(target=lambda: (go_on.wait(), print("a thread"))).start()
atexit.register(print, "a handler")
go_on.set()
""",
    "at once": "import os, sys; sys.stdout.write('lost'); os._exit(4)",
}


@MAKES_COPIES
@pytest.mark.parametrize("how", ENDINGS)
def test_a_copied_program_ends_as_one_that_was_made_by_exec(how: str) -> None:
    command = [sys.executable, "-c", ENDINGS[how]]
    given = {"capture_output": True, "text": True, "timeout": 50, "check": False}
    copied, execed = programs.run(command, **given), subprocess.run(command, **given)  # type: ignore[call-overload]
    assert (copied.returncode, copied.stdout) == (execed.returncode, execed.stdout)
    assert copied.stderr.splitlines()[-1:] == execed.stderr.splitlines()[-1:]


OWNER = """
import json, sys
from actorllm import LLM
with LLM("storyteller", **json.loads(sys.argv[1])) as llm:
    llm.generate("Once", use_tqdm=False)
    print(*llm._engine.pids.values(), flush=True)
    input()
"""


@MAKES_COPIES
@pytest.mark.parametrize("arguments", ['{"num_threads": 1}', "{}"])
def test_a_copied_program_has_copies_for_its_engines(arguments: str) -> None:
    with programs.popen(
        [sys.executable, "-c", OWNER, arguments], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
    ) as owner:
        pids = [int(word) for word in owner.stdout.readline().split()]
        assert sorted(pids) == sorted(programs.children_of(owner.pid))
        assert all("forking.py" in program(pid) for pid in pids)
        assert [os.getsid(pid) for pid in pids] == pids
        owner.communicate("\n", timeout=50)
    assert owner.returncode == 0


@MAKES_COPIES
def test_exec_it_is_with_other_options_or_another_environment(monkeypatch: pytest.MonkeyPatch) -> None:
    for options, word in (["-W", "error"], "as before"), ([], "changed"):
        command = [sys.executable, *options, "-c", "import sys; print('torch' in sys.modules)"]
        done = programs.run(command, capture_output=True, text=True, env=os.environ | {"CUDA_VISIBLE_DEVICES": word})
        assert done.stdout == "False\n"


@MAKES_COPIES
def test_engines_of_one_shape_measure_their_steps_once(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    measured: list[int] = []
    largest_steps = CpuRunner._largest_steps

    def count(runner: Any) -> Any:
        measured.append(runner.config.scheduler.max_num_seqs)
        return largest_steps(runner)

    monkeypatch.setenv(FOLDER, str(tmp_path))
    monkeypatch.setattr(CpuRunner, "_largest_steps", count)
    sizes = []
    for max_num_seqs in (4, 4, 5):
        with LLM("storyteller", topology="inline", num_threads=1, max_num_seqs=max_num_seqs, seed=len(sizes)) as llm:
            sizes.append(llm.config.cache.num_blocks)
    assert measured == [4, 5]
    assert sizes[0] == sizes[1] != sizes[2]


def test_what_the_first_copy_waits_for_is_outside_the_timeout_of_its_test() -> None:
    left, every = signal.getitimer(signal.ITIMER_REAL)
    assert left > 0, "pytest-timeout times this test"
    with outside_the_timeout():
        within, _ = signal.getitimer(signal.ITIMER_REAL)
    behind, every_behind = signal.getitimer(signal.ITIMER_REAL)
    assert within > left
    assert 0 < behind <= left
    assert every_behind == every
