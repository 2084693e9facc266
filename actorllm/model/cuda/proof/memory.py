"""What self-checks have found, remembered by everything that the answer depends on: `remembered`, `remember`.

One JSON file in the user's cache folder: key -> {"date", "failed"}. A file that cannot be read or written costs a check and no
more. ACTORLLM_SELF_CHECK=again checks anew, whatever is remembered.
"""

from __future__ import annotations

import datetime
import hashlib
import json
import logging
import os
import tempfile
from functools import cache
from pathlib import Path
from typing import Any

import torch
import triton

import actorllm_kernels

logger = logging.getLogger(__name__)

MAX_ENTRIES = 64
"""The oldest go first."""
AGAIN = "ACTORLLM_SELF_CHECK"


def path() -> Path:
    """Of the file."""
    root = os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache"
    return Path(root) / "actorllm" / "self-check.json"


def key_of(device: str, *model: Any) -> str:
    """device: name and driver. model: whatever decides about what is launched."""
    parts = (device, torch.__version__, triton.__version__, source_hash(), *model)
    return hashlib.sha256(repr(parts).encode()).hexdigest()[:32]


@cache
def source_hash() -> str:
    """Of the kernels, their configurations, what launches them and what they are held against."""
    folder = Path(actorllm_kernels.__file__).parent
    here = Path(__file__).parent
    files = [
        *sorted(folder.glob("*.py")),
        folder / "configs.json",
        *sorted(here.parent.glob("*.py")),
        *sorted(here.glob("*.py")),
    ]
    digest = hashlib.sha256()
    for file in files:
        digest.update(file.name.encode() + file.read_bytes())
    return digest.hexdigest()


def remembered(key: str) -> dict[str, str] | None:
    """What had failed under this key; None: it is not known."""
    if os.environ.get(AGAIN) == "again":
        return None
    entry = _read().get(key)
    return None if entry is None else dict(entry["failed"])


def remember(key: str, failed: dict[str, str]) -> None:
    """Overwrites what was known of the key."""
    entries = _read()
    entries.pop(key, None)
    entries[key] = {"date": datetime.datetime.now(datetime.UTC).isoformat(timespec="seconds"), "failed": failed}
    kept = dict(list(entries.items())[-MAX_ENTRIES:])
    try:
        file = path()
        file.parent.mkdir(parents=True, exist_ok=True)
        with tempfile.NamedTemporaryFile("w", dir=file.parent, delete=False) as new:
            json.dump(kept, new, indent=1)
        os.replace(new.name, file)
    except OSError as error:
        logger.info("the result of the self-check cannot be kept: %s", error)


def entries() -> list[dict[str, Any]]:
    """All that is remembered, the oldest first."""
    return list(_read().values())


def _read() -> dict[str, Any]:
    try:
        entries = json.loads(path().read_text())
        return {key: entry for key, entry in entries.items() if isinstance(entry["failed"], dict)}
    except (OSError, ValueError, KeyError, TypeError, AttributeError):
        return {}
