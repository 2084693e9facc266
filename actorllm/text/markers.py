"""`overlap`: how much of a text that comes piece by piece may be the beginning of a marker. Pure; called by parsers."""

from __future__ import annotations


def overlap(text: str, marker: str) -> int:
    """How many characters at the end of a text may be the beginning of a marker."""
    for size in range(min(len(text), len(marker) - 1), 0, -1):
        if marker.startswith(text[-size:]):
            return size
    return 0
