"""What self-checks have found, remembered by everything that the answer depends on: `remembered`, `remember`.

One JSON file in the user's cache folder: key -> {"date", "failed"}. A file that cannot be read or written costs a check and no
more. ACTORLLM_SELF_CHECK=again checks anew, whatever is remembered.
"""

from __future__ import annotations

import datetime
import hashlib
import logging
import os
from functools import cache
from pathlib import Path
from typing import Any

import torch
import triton

import actorllm_kernels
from actorllm.model.answer_file import AnswerFile

logger = logging.getLogger(__name__)

AGAIN = "ACTORLLM_SELF_CHECK"

ANSWERS = AnswerFile("self-check.json", lambda entry: isinstance(entry, dict) and isinstance(entry.get("failed"), dict))
path = ANSWERS.path


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
    entry = ANSWERS.read().get(key)
    return None if entry is None else dict(entry["failed"])


def remember(key: str, failed: dict[str, str]) -> None:
    """Overwrites what was known of the key."""
    entry = {"date": datetime.datetime.now(datetime.UTC).isoformat(timespec="seconds"), "failed": failed}
    try:
        ANSWERS.add(key, entry)
    except OSError as error:
        logger.info("the result of the self-check cannot be kept: %s", error)


def entries() -> list[dict[str, Any]]:
    """All that is remembered, the oldest first."""
    return list(ANSWERS.read().values())
