"""`search_path`: where the processes of an engine look for modules: as their owner did when engines were built there.

The path of a program may have relative entries: '' in a notebook, with `python -c` and in a REPL. They stand for the working
folder of the process that looks. The program may change its own, and processes begin later as well: after a death, or once they
are needed.
"""

from __future__ import annotations

import os
import sys

ROOT = os.path.dirname(os.path.dirname(os.path.dirname(os.path.abspath(__file__))))
"""Of this package."""
MAX_FOLDERS = 8
"""The oldest go first."""

_folders: list[str] = []


def note_folder() -> None:
    """An engine is built here: what is relative is of this folder from now on, and of those before."""
    folder = _working_folder()
    if folder is not None:
        _folders[:] = [folder, *(known for known in _folders if known != folder)][:MAX_FOLDERS]


def search_path() -> list[str]:
    """sys.path for a process that may begin in another folder. Where no engine was built yet, of the working folder."""
    here = _working_folder()
    folders = list(_folders) or ([] if here is None else [here])
    entries = [entry for entry in sys.path if isinstance(entry, str)]  # Python leaves out others, such as a Path
    found: list[str] = []
    for entry in entries:
        found += [entry] if os.path.isabs(entry) else [os.path.normpath(os.path.join(one, entry)) for one in folders]
    # The program may have found this package by an entry that stands for another folder now.
    if not all(map(os.path.isabs, entries)):
        found.append(ROOT)
    return list(dict.fromkeys(found))


def _working_folder() -> str | None:
    """None: it was removed."""
    try:
        return os.getcwd()
    except OSError:
        return None
