"""`ClientDelays`: the ways between client and scheduler in virtual time, as distributions.

A request is with the scheduler after its text was tokenized. Its tokens are with the client some time after their step. Both
are drawn from quantiles that were measured, or made up. Requests keep their order, and so do the tokens of a stream: what is late
holds up what comes behind it. Without `ClientDelays` both ways take the constants of the step model. Pure.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from actorllm.errors import ConfigError, shown
from actorllm.messages import F64


@dataclass(frozen=True, slots=True)
class ClientDelays:
    """Seconds. Raises ConfigError for quantiles that are none."""

    submit: tuple[float, ...] = (0.0,)
    """From the client to the tokenizer, at evenly spaced quantiles from 0 to 1."""
    tokenize_per_token: float = 0.0
    """And for each token of the prompt; a tokenizer reads one prompt at a time."""
    deliver: tuple[float, ...] = (0.0,)
    """From the end of a step to its clients: quantiles, one draw a step."""

    def __post_init__(self) -> None:
        for name in ("submit", "deliver"):
            values = getattr(self, name)
            is_good = isinstance(values, tuple) and values and all(math.isfinite(v) and v >= 0 for v in values)
            if not is_good or list(values) != sorted(values):
                raise ConfigError(f"delays: {name}={shown(values)} must be quantiles: seconds that do not fall")
        if not math.isfinite(self.tokenize_per_token) or self.tokenize_per_token < 0:
            raise ConfigError(f"delays: tokenize_per_token={shown(self.tokenize_per_token)} must be 0 or more seconds")

    @classmethod
    def of_samples(
        cls, submit: Sequence[float], deliver: Sequence[float], tokenize_per_token: float = 0.0, num: int = 41
    ) -> ClientDelays:
        """From measured seconds."""
        grid = np.linspace(0, 1, num)
        both = [tuple(np.quantile(np.asarray(values, float), grid).tolist()) for values in (submit, deliver)]
        return cls(both[0], tokenize_per_token, both[1])

    def delivered(self, ends: F64, rng: np.random.Generator) -> F64:
        """When what the steps of a replica gave is with the clients."""
        found: F64 = np.maximum.accumulate(ends + _drawn(self.deliver, ends.size, rng))
        return found


def check_deliver(delays: ClientDelays | None) -> None:
    """Raises ConfigError for ways back that clients which wait for answers cannot have: a token's draw would come too late."""
    if delays is not None and len(set(delays.deliver)) > 1:
        raise ConfigError("delays: with clients that wait for answers deliver must be one number of seconds")


def _drawn(quantiles: tuple[float, ...], num: int, rng: np.random.Generator) -> F64:
    found: F64 = np.interp(rng.random(num) * (len(quantiles) - 1), np.arange(len(quantiles)), quantiles)
    return found


class SubmitLine:
    """The way of requests to the scheduler, one after the other, in the order in which they are sent."""

    def __init__(self, delays: ClientDelays, rng: np.random.Generator) -> None:
        self._quantiles = np.array(delays.submit)
        self._grid = np.arange(len(delays.submit))
        self._per_token = delays.tokenize_per_token
        self._rng = rng
        self._free_at = -math.inf

    def there(self, sent: float, num_prompt: int) -> float:
        """When a request is with the scheduler."""
        came = sent + float(np.interp(self._rng.random() * self._grid[-1], self._grid, self._quantiles))
        self._free_at = max(came, self._free_at) + self._per_token * num_prompt
        return self._free_at
