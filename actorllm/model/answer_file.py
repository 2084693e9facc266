"""`AnswerFile`: answers that cost something, remembered for every process of this user: one JSON file in the user's cache folder.

Answers are by keys, which say all that they depend on. A file that cannot be read has none, and is written anew. It changes
at once, so reading needs no lock. Adding takes one, so that no answer of another process is lost.
"""

from __future__ import annotations

import contextlib
import fcntl
import json
import os
import tempfile
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

MAX_ENTRIES = 64
"""The oldest go first."""

WAIT_S = 30.0
"""For a process that makes an answer while it has the lock, which takes a tenth of a second."""


class AnswerFile:
    """name: of the file. is_answer: of a value under a key; what is none is left out, as if it were not there."""

    def __init__(self, name: str, is_answer: Callable[[Any], bool]) -> None:
        self._name = name
        self._is_answer = is_answer

    def path(self) -> Path:
        """Raises OSError if there is no home folder."""
        try:
            root = os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache"
        except RuntimeError as error:
            raise OSError(f"there is no cache folder: {error}; set XDG_CACHE_HOME") from None
        return Path(root) / "actorllm" / self._name

    def read(self) -> dict[str, Any]:
        """All answers, the oldest first."""
        try:
            known = json.loads(self.path().read_text())
            return {key: answer for key, answer in known.items() if self._is_answer(answer)}
        except (OSError, ValueError, AttributeError):  # not there yet, not to be read, or not ours
            return {}

    def add(self, key: str, answer: Any) -> None:
        """As the newest one, in place of what was known of the key. Raises OSError."""
        with self._locked() as file:
            known = self.read()
            known.pop(key, None)
            _write(file, known | {key: answer})

    def add_once(self, key: str, make: Callable[[], Any]) -> Any:
        """The answer under this key; that of `make` if there is none. Others that ask meanwhile wait for it. Raises OSError."""
        with self._locked() as file:
            known = self.read()
            if key not in known:
                known[key] = make()
                _write(file, known)
            return known[key]

    @contextlib.contextmanager
    def _locked(self) -> Iterator[Path]:
        """The file, which others cannot add to. Raises TimeoutError if another process has it for WAIT_S, and OSError."""
        file = self.path()
        file.parent.mkdir(parents=True, exist_ok=True)
        lock_file = file.with_suffix(".lock")
        with lock_file.open("a") as lock:
            until = time.monotonic() + WAIT_S
            while True:
                try:
                    fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
                except BlockingIOError:
                    if time.monotonic() > until:
                        raise TimeoutError(f"{lock_file} is held by another process") from None
                    time.sleep(0.01)
                else:
                    break
            yield file


def _write(file: Path, known: dict[str, Any]) -> None:
    with tempfile.NamedTemporaryFile("w", dir=file.parent, delete=False) as new:
        try:
            json.dump(dict(list(known.items())[-MAX_ENTRIES:]), new, indent=1)
            new.close()
            os.replace(new.name, file)
        except BaseException:  # a full disk, or Ctrl-C: the file stays what it was
            os.unlink(new.name)
            raise
