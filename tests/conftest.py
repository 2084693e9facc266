"""Fixtures of the whole suite: nothing may be left behind by a test."""

from __future__ import annotations

import atexit
import contextlib
import gc
import logging
import os
import shutil
import signal
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from hypothesis import HealthCheck, settings

from actorllm.config import EngineConfig
from actorllm.supervision import standby
from actorllm.testing.plugin import pytest_pycollect_makeitem
from tests.forking import IS_ASKED_TO_EXEC, forked_actors
from tests.programs import copied_programs, name_of
from tests.quick_starts import FOLDER, keep_measured_sizes

__all__ = ["pytest_pycollect_makeitem"]


gc.disable()  # until everything is collected: see `pytest_runtestloop`
os.environ.setdefault("HF_HUB_OFFLINE", "1")
os.environ.setdefault("TOKENIZERS_PARALLELISM", "false")
# Some containers forbid bytecode, and then each process of each engine compiles the package again: a third of its CPU time.
os.environ.pop("PYTHONDONTWRITEBYTECODE", None)
sys.dont_write_bytecode = False
# A shell starts its background jobs with Ctrl-C ignored, and what is ignored is inherited by every program that a test starts.
signal.signal(signal.SIGINT, signal.default_int_handler)
os.environ["CUDA_VISIBLE_DEVICES"] = ""  # device="auto" is the CPU here, whatever machine this is
# Names of engines are one user's: two runs of this suite must not meet each other, nor anybody's real engines.
os.environ["XDG_RUNTIME_DIR"] = tempfile.mkdtemp(prefix="actorllm-tests-")
atexit.register(shutil.rmtree, os.environ["XDG_RUNTIME_DIR"], ignore_errors=True)
# What the first replica on a machine has measured decides for all later ones: no run does so for another.
os.environ["XDG_CACHE_HOME"] = tempfile.mkdtemp(prefix="actorllm-cache-")
atexit.register(shutil.rmtree, os.environ["XDG_CACHE_HOME"], ignore_errors=True)
if not IS_ASKED_TO_EXEC:
    os.environ[FOLDER] = tempfile.mkdtemp(prefix="actorllm-sizes-")
    atexit.register(shutil.rmtree, os.environ[FOLDER], ignore_errors=True)
# How long an example takes says how busy the machine is, and nothing about the code.
settings.register_profile("any-machine", deadline=None, suppress_health_check=[HealthCheck.too_slow])
settings.load_profile("any-machine")


@pytest.hookimpl(tryfirst=True)
def pytest_runtest_setup() -> None:
    """Let the alarm of pytest-timeout ring again until the test ends: asyncio swallows what is raised in its callbacks."""
    left, _ = signal.getitimer(signal.ITIMER_REAL)
    if left:
        signal.setitimer(signal.ITIMER_REAL, left, ALARM_EVERY_S)


ALARM_EVERY_S = 2.0


@pytest.hookimpl(tryfirst=True)
def pytest_runtestloop() -> None:
    """What was imported and collected lives as long as this process: collections of garbage do not look at it again."""
    gc.enable()
    gc.collect()
    gc.freeze()


def _shared_memory_names() -> set[str]:
    """Segments that this process made and that have a name still (see ring.segment); other runs may be under way."""
    folder = Path("/dev/shm")
    mine = f"allm-{os.getpid():x}-"
    return {p.name for p in folder.iterdir() if p.name.startswith(mine)} if folder.is_dir() else set()


LAZY_PROCESSES = ("actor:intake", "actor:encoder")
"""Of an engine that many tests share: they may begin with any of them, and end with the engine."""


def _child_processes() -> set[int]:
    """Processes whose parent is this one."""
    found: set[int] = set()
    for task in os.listdir("/proc/self/task"):
        with contextlib.suppress(FileNotFoundError, ProcessLookupError):
            found.update(map(int, Path(f"/proc/self/task/{task}/children").read_text().split()))
    return found


def _new_children(before: set[int]) -> set[int]:
    """Those that were not there before, those that begin when needed left out."""
    return {pid for pid in _child_processes() - before if name_of(pid) not in LAZY_PROCESSES}


@pytest.fixture(autouse=True, scope="session")
def engines_start_quickly() -> Iterator[None]:
    with forked_actors(), copied_programs():
        keep_measured_sizes()
        yield


@pytest.fixture(autouse=True, scope="session")
def nothing_is_parked_by_itself() -> Iterator[None]:
    """An engine that many tests share would park a process in the middle of one; tests of that say when."""
    before, standby.PARK_AFTER_S = standby.PARK_AFTER_S, 1e6
    yield
    standby.PARK_AFTER_S = before


@pytest.fixture(autouse=True, scope="module")
def logging_as_before() -> Iterator[None]:
    """A server that runs in this process sets the loggers up as `actorllm serve` does, and then pytest does not see them."""
    logger = logging.getLogger("actorllm")
    before = logger.level, logger.propagate, logger.disabled, [*logger.handlers]
    yield
    logger.level, logger.propagate, logger.disabled, logger.handlers = before


@pytest.fixture(autouse=True, scope="module")
def few_threads() -> None:
    """Inline engines that say nothing of threads compute on one: two would wait for each other on a busy machine."""
    if (torch := sys.modules.get("torch")) is not None:
        torch.set_num_threads(1)


@pytest.fixture(scope="module")
def computed_as_asked() -> Iterator[None]:
    """Engines with quantization="int8" or "int4" compute with it, whatever is fastest at the moment.

    Each engine measures for itself. Two engines of one test may find differently, beside other processes or where both are equal.
    """
    from actorllm.model.quantization.onednn import is_exact

    from_arguments = EngineConfig.from_arguments

    def pinned(*arguments: Any, **options: Any) -> EngineConfig:
        config = from_arguments(*arguments, **options)
        model = config.model
        if model.quantization not in ("int8", "int4") or model.quantization_twin or not is_exact():
            return config
        return replace(config, model=replace(model, scheme=model.quantization))

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(EngineConfig, "from_arguments", pinned)
        yield


@pytest.fixture(autouse=True, scope="module")
def no_intake_process_leaks() -> Iterator[None]:
    """None outlives the engines of its module."""
    yield
    names = set(map(name_of, _child_processes()))
    assert not names.intersection(LAZY_PROCESSES), "left a process of the intake or an encoder"


@pytest.fixture(scope="module", autouse=True)
def nothing_is_left(request: pytest.FixtureRequest) -> Iterator[None]:
    """As `nothing_leaks`, of a module whose tests kill and restart processes of one engine (`leaks_by_module`)."""
    children = _child_processes()
    yield
    if request.node.get_closest_marker("leaks_by_module"):
        _wait_until(lambda: not _new_children(children))
        assert not _new_children(children), "left a child process"
        assert not {name for name in _shared_memory_names() if "actorllm" in name}, "left in /dev/shm"


@pytest.fixture(autouse=True)
def nothing_leaks(request: pytest.FixtureRequest) -> Iterator[None]:
    """No shared memory, child process or file descriptor of ours outlives the test that made it."""
    if request.node.get_closest_marker("leaks_by_module"):
        yield
        return
    names, children, fds = _shared_memory_names(), _child_processes(), set(os.listdir("/proc/self/fd"))
    yield
    assert _shared_memory_names() <= names, "left in /dev/shm"
    _wait_until(
        lambda: not _new_children(children)
    )  # a test that saw one end as a zombie may be faster than what reaps it
    assert not _new_children(children), "left a child process"
    # A collection that another thread is in makes another one return at once, so it is asked for again.
    _wait_until(lambda: len(os.listdir("/proc/self/fd")) <= len(fds) + 4 or (gc.collect(), False)[1])
    if len(after := _descriptors()) > len(fds) + 4:
        left = [f"{number}: {target}" for number, target in after.items() if number not in fds]
        raise AssertionError(f"left file descriptors open: {', '.join(left)}")


def _wait_until(condition: Callable[[], bool], timeout_s: float = 20.0) -> None:
    """Returns in any case."""
    until = time.monotonic() + timeout_s
    while not condition() and time.monotonic() < until:
        time.sleep(0.01)


def _descriptors() -> dict[str, str]:
    """The open descriptors of this process, and what they are."""
    found = {}
    for number in os.listdir("/proc/self/fd"):
        with contextlib.suppress(FileNotFoundError):  # the listing's own
            found[number] = os.readlink(f"/proc/self/fd/{number}")
    return found
