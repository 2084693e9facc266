"""What processes of the GPU benchmark do in tests: a module of its own, because they import it."""

from __future__ import annotations

import time
from pathlib import Path
from typing import Any


def one(name: str) -> tuple[dict[str, Any], bool]:
    """As a case that its process may not survive."""
    if name == "dies":
        raise SystemExit(3)
    if name == "hangs":
        time.sleep(100)
    return {"found": name}, name != "lost"


def share(first: int, count: int, folder: str) -> None:
    """As a part of some work."""
    Path(folder, f"{first} of {count}").touch()
    if first == 1:
        raise SystemExit("what it raises is met again")
