"""How many examples a property test draws: few for every change, many where `THOROUGH` is set, as `make test-slow` does."""

from __future__ import annotations

import os


def examples(quick: int, thorough: int) -> int:
    return thorough if os.environ.get("THOROUGH") else quick
