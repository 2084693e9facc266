"""A recording in windows that the encoder takes at once, cut where it is quiet."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

SEARCHED_S = 1.0
"""The last part of a window, in which the quietest place is looked for."""
QUIET_S = 0.1
"""So much of the recording is compared at a time."""
MAX_WINDOWS = 60


@dataclass(frozen=True, slots=True, eq=False)
class Window:
    """A part of a recording."""

    samples: NDArray[np.float32]
    start_s: float
    seconds: float


def windows_of(samples: NDArray[np.float32], rate: int, seconds: float) -> list[Window]:
    """All parts of a recording, in order; none is empty.

    Arguments:
        samples: [num_samples].
        rate: samples of a second.
        seconds: the longest that a window may be.
    """
    most, searched, quiet = int(seconds * rate), int(min(SEARCHED_S, seconds / 4) * rate), max(1, int(QUIET_S * rate))
    found, start = [], 0
    while start < samples.size:
        end = samples.size
        if end - start > most:
            end = start + most
            pieces = samples[end - searched : end]
            pieces = pieces[: pieces.size // quiet * quiet].reshape(-1, quiet)
            loudness: Any = np.square(pieces).mean(1)
            if loudness.size:
                end = end - searched + int(loudness.argmin()) * quiet + quiet // 2
        found.append(Window(samples[start:end], start / rate, (end - start) / rate))
        start = end
    return found
