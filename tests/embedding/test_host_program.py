"""The harness of host programs sees what it looks for."""

from __future__ import annotations

import os

import pytest

from tests.embedding.host_program import assert_gone, run_host, running_host


def test_a_wrong_exit_code_and_a_traceback_are_seen() -> None:
    with pytest.raises(AssertionError, match="exit code 3"):
        run_host("-c", "raise SystemExit(3)")
    with pytest.raises(AssertionError, match="Traceback"):
        run_host("-c", "import sys; sys.stderr.write('Traceback of ours')")
    assert run_host("-c", "print('fine')").output == "fine\n"


def test_a_process_that_outlives_its_host_is_seen() -> None:
    with pytest.raises(AssertionError, match=str(os.getpid())):
        assert_gone([os.getpid()], within_s=0.1)


def test_a_line_is_waited_for() -> None:
    with running_host("-c", "print('pids 1 2', flush=True); input()", stdin="") as host:
        host.read_until("pids")
        assert host.engine_pids == [1, 2]
        with pytest.raises(AssertionError, match="EOFError"):
            host.read_until("more")
