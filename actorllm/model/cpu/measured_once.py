"""`measured_once`: what the first process on a machine measured, for every process that must come to the same answer.

The replicas of an engine must compute alike, or a stream that moves would change. They start side by side. Each would measure what
is fastest, with noise. So the first one writes its answer into a file of the user's cache folder (`path`), and the others read it.
The key says everything that the answer depends on. Remove the file to measure anew.
"""

from __future__ import annotations

import contextlib
import fcntl
import json
import logging
import os
import tempfile
import time
from collections.abc import Callable, Iterator
from pathlib import Path

MAX_ENTRIES = 64
"""The oldest go first."""

WAIT_S = 30.0
"""For a process that measures, which takes a tenth of a second."""

logger = logging.getLogger(__name__)


def path() -> Path:
    """Of the file."""
    root = os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache"
    return Path(root) / "actorllm" / "measured.json"


def measured_once(key: str, measure: Callable[[], str]) -> str | None:
    """What the first process has found under this key.

    measure: called where none has. Returns None if the processes of this machine cannot tell each other: the log says why.
    """
    try:
        file = path()
    except RuntimeError as error:  # there is no home folder
        logger.warning("nothing is measured for replicas, which could differ: %s; set XDG_CACHE_HOME", error)
        return None
    try:
        file.parent.mkdir(parents=True, exist_ok=True)
        with _locked(file.with_suffix(".lock")):
            known = _read(file)
            if key not in known:
                known[key] = measure()
                _write(file, dict(list(known.items())[-MAX_ENTRIES:]))
            return known[key]
    except OSError as error:
        found = _read(file).get(key)
        if found is None:
            logger.warning("nothing is measured for replicas, which could differ: %s", error)
        return found


@contextlib.contextmanager
def _locked(file: Path) -> Iterator[None]:
    """Raises TimeoutError if another process holds it for WAIT_S, and OSError."""
    with file.open("a") as lock:
        until = time.monotonic() + WAIT_S
        while True:
            try:
                fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
            except BlockingIOError:
                if time.monotonic() > until:
                    raise TimeoutError(f"{file} is held by another process") from None
                time.sleep(0.01)
            else:
                break
        yield


def _read(file: Path) -> dict[str, str]:
    try:
        known = json.loads(file.read_text())
        return {key: found for key, found in known.items() if isinstance(found, str)}
    except (OSError, ValueError, AttributeError):  # not there yet, not to be read, or not ours
        return {}


def _write(file: Path, known: dict[str, str]) -> None:
    with tempfile.NamedTemporaryFile("w", dir=file.parent, delete=False) as new:
        json.dump(known, new, indent=1)
    os.replace(new.name, file)
