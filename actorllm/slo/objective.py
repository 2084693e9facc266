"""What a request is promised. The scheduler carries it; policies act on it."""

from __future__ import annotations

import math
from dataclasses import dataclass

from actorllm.errors import InvalidParameterError


@dataclass(frozen=True, slots=True)
class SLO:
    """A latency objective, in seconds. None means: no promise.

    ttft: from arrival to the first token. tpot: per output token after the first. e2e: from arrival to the end.
    ttft_per_prompt_token is added to `ttft` once for every prompt token: no fixed limit can be met at 8k tokens.
    """

    ttft: float | None = None
    tpot: float | None = None
    e2e: float | None = None
    ttft_per_prompt_token: float = 0.0

    def __post_init__(self) -> None:
        for name in ("ttft", "tpot", "e2e"):
            value = getattr(self, name)
            if value is not None and not (isinstance(value, int | float) and math.isfinite(value) and value > 0):
                raise InvalidParameterError(f"SLO {name}={value!r} must be a positive number of seconds, or None")
        if not self.ttft_per_prompt_token >= 0:
            raise InvalidParameterError(f"SLO ttft_per_prompt_token={self.ttft_per_prompt_token!r} must be >= 0")

    @classmethod
    def from_value(cls, value: SLO | float | None) -> SLO | None:
        """A bare number means a per-token objective in seconds."""
        if value is None or isinstance(value, SLO):
            return value
        if isinstance(value, bool) or not isinstance(value, int | float):
            raise InvalidParameterError(f"slo={value!r} must be an SLO or a number of seconds per token")
        return cls(tpot=float(value))
