"""`PauseState`: what a paused scheduler still does. The modes are those of vLLM's `pause_generation`."""

from __future__ import annotations

import enum
from typing import Literal, get_args

from actorllm.errors import InvalidParameterError, nearest_name

PauseMode = Literal["abort", "wait", "keep"]
PAUSE_MODES: tuple[str, ...] = get_args(PauseMode)
"""abort: end everything. wait: let those that have started finish. keep: leave everything where it is."""


def check_pause_mode(mode: object) -> None:
    """InvalidParameterError: there is none of this name."""
    if mode not in PAUSE_MODES:
        raise InvalidParameterError(
            f"mode={mode!r} must be one of {', '.join(map(repr, PAUSE_MODES))}{nearest_name(str(mode), PAUSE_MODES)}"
        )


class PauseState(enum.Enum):
    RUNNING = "running"
    NOTHING_NEW = "nothing new"
    """Requests that have had a slot go on, also after a preemption; the others wait."""
    NOTHING = "nothing"
    """No step is planned. Those in flight are finished and their results applied."""
