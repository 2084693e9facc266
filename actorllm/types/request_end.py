"""`RequestEnd`: how a request ended, and what it took."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, fields
from typing import Any


@dataclass(frozen=True, slots=True)
class RequestEnd:
    """The typed form of one entry of `Outputs.ends`."""

    row: int
    reason: str
    stop_reason: int | str | None
    error: str | None
    queued: float
    scheduled: float | None
    first_token: float | None
    last_token: float | None
    num_preemptions: int
    num_cached_tokens: int
    num_wasted_tokens: int
    num_nonfinite: int = 0
    """Values of its states and logits that were NaN or infinite; it has failed if there were any."""
    num_recoveries: int = 0
    """How often the workers died with it in a step."""
    recovery_s: float = 0.0
    """What it waited for its next token after that, in all."""
    details: dict[str, Any] | None = None
    """Of an error that is more than its message: its "kind", and what goes with that."""
    num_draft_tokens: int = 0
    num_accepted_tokens: int = 0
    """Drafts that were checked, and those that were right (`speculative_config`)."""
    accepted_per_position: Sequence[int] = ()
    """The right ones by position behind the last token."""
    planning_s: float = 0.0
    forward_s: float = 0.0
    execution_s: float = 0.0
    """Of the steps that it was in: the scheduler's work, the worker's, and from a launch to its result
    (`scheduling.telemetry.step_seconds`)."""


TIMES = tuple(
    position
    for position, field in enumerate(fields(RequestEnd))
    if field.name in ("queued", "scheduled", "first_token", "last_token")
)
"""Where points in time stand, in monotonic seconds of the scheduler."""
