"""What an engine gives back while it sleeps, and what becomes of requests meanwhile."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Literal, TypeAlias

from actorllm.errors import InvalidParameterError, nearest_name, shown

SleepTag: TypeAlias = Literal["weights", "kv_cache"]
SLEEPING_PARTS: tuple[SleepTag, ...] = ("weights", "kv_cache")
"""The tags of `wake_up`."""

SleepLevel: TypeAlias = Literal[1, 2]
SLEEP_LEVELS: tuple[SleepLevel, ...] = (1, 2)
"""1: the pages that the system keeps of the weights' files stay, or a copy of a GPU's weights; 2: they are given up, too."""

SleepRequests: TypeAlias = Literal["wait", "refuse"]
SLEEP_REQUESTS: tuple[SleepRequests, ...] = ("wait", "refuse")
"""What becomes of requests that come while the engine sleeps."""


def check_sleep(level: object, requests: object) -> None:
    """Raises InvalidParameterError for arguments that `sleep` does not have."""
    if isinstance(level, bool) or level not in SLEEP_LEVELS:
        raise InvalidParameterError(
            f"level={shown(level)} must be 1 or 2; pause_generation() stops steps and keeps the memory"
        )
    if requests not in SLEEP_REQUESTS:
        raise InvalidParameterError(f"requests={shown(requests)} must be {' or '.join(map(repr, SLEEP_REQUESTS))}")


def checked_tags(tags: object) -> list[str]:
    """Which parts are to wake up; None: all. Raises InvalidParameterError."""
    if tags is None:
        return list(SLEEPING_PARTS)
    if isinstance(tags, str) or not isinstance(tags, Sequence) or not tags:
        raise InvalidParameterError(
            f"tags={shown(tags)} must be a list of {', '.join(map(repr, SLEEPING_PARTS))}, or None"
        )
    for tag in tags:
        if tag not in SLEEPING_PARTS:
            raise InvalidParameterError(
                f"tags: {shown(tag)} is not one of {', '.join(map(repr, SLEEPING_PARTS))}"
                f"{nearest_name(str(tag), SLEEPING_PARTS)}"
            )
    return [tag for tag in SLEEPING_PARTS if tag in tags]
