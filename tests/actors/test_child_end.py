"""How a spawned process ends: no finalization of the interpreter, but what `atexit` holds, and everything that was printed."""

from __future__ import annotations

import subprocess
import sys

import pytest

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
