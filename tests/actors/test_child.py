"""The main program of a spawned process: what it imports first, and how it ends."""

from __future__ import annotations

import gc
import os
import subprocess
import sys
from pathlib import Path

import pytest

from actorllm.actors.child import load_modules
from actorllm.supervision.children import ENVIRONMENT

PROGRAM = """
import atexit, sys
from actorllm.actors.child import end

class Held:
    def __del__(self):
        print("finalized")

sys.held = Held()  # only the finalization of the interpreter would drop it
atexit.register(lambda: print("registered"))
print("printed")
print("warned", file=sys.stderr)
end(is_failed={is_failed})
"""


@pytest.mark.parametrize(
    ("is_failed", "printed"), [(False, "printed\nregistered\n"), (True, "printed\n")], ids=["stopped", "failed"]
)
def test_a_process_ends_after_its_exit_functions_and_before_the_finalization(is_failed: bool, printed: str) -> None:
    done = subprocess.run(
        [sys.executable, "-c", PROGRAM.format(is_failed=is_failed)],
        capture_output=True,
        text=True,
        timeout=60,
        check=False,
    )
    assert (done.returncode, done.stdout, done.stderr) == (int(is_failed), printed, "warned\n")


def test_a_process_ends_while_its_streams_are_closed() -> None:
    program = "import sys; from actorllm.actors.child import end; sys.stdout.close(); sys.stderr = None; end(False)"
    assert subprocess.run([sys.executable, "-c", program], timeout=60, check=False).returncode == 0


def test_the_garbage_collector_rests_while_modules_are_loaded(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "looks_at_gc.py").write_text("import gc\nwas_enabled = gc.isenabled()\n")
    (tmp_path / "raises_at_once.py").write_text("raise RuntimeError('no')\n")
    monkeypatch.syspath_prepend(tmp_path)
    load_modules(["looks_at_gc"])
    assert sys.modules["looks_at_gc"].was_enabled is False
    assert gc.isenabled()
    with pytest.raises(RuntimeError, match="no"):
        load_modules(["raises_at_once"])
    assert gc.isenabled()


def test_processes_of_an_engine_have_no_threads_of_numpy() -> None:
    program = "import os, numpy; print(len(os.listdir('/proc/self/task')))"
    environment = {**os.environ, **ENVIRONMENT}
    done = subprocess.run([sys.executable, "-c", program], env=environment, capture_output=True, text=True, check=True)
    assert done.stdout == "1\n"
