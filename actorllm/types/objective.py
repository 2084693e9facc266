"""What a request is promised, and whether it was kept. The scheduler carries it; policies and reports act on it.

TPOT has two readings, and which one counts turns the ranking of policies round, so both are computed everywhere:

    tpot       for readers who mind every pause: (last token - first token) / (tokens - 1) <= tpot, as in `vllm bench serve`
    deadline   for a steady reader: token i is due at arrival + ttft + i * tpot, so what came early may be late later
               (QoServe, ASPLOS 2026; the fluidity index of Etalon judges every token by it, goodput the first and last)

Without a promised TTFT the deadlines of the second reading are counted from the first token.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Literal, get_args

from actorllm.errors import InvalidParameterError, nearest_name, shown

Reading = Literal["tpot", "deadline"]
READINGS: tuple[Reading, ...] = get_args(Reading)


@dataclass(frozen=True, slots=True)
class SLO:
    """A latency objective, in seconds. None (default) means: no promise.

    Arguments:
        ttft: from arrival to the first token.
        tpot: per output token after the first.
        e2e: from arrival to the end.
        ttft_per_prompt_token: added to `ttft` once for every prompt token: no fixed limit can be met at 8k tokens. Default 0.

    Raises:
        InvalidParameterError: one of them is no time.

    Example:
        slo = SLO(ttft=0.5, tpot=0.05)
        assert slo.ttft_limit(num_prompt=100) == 0.5
    """

    ttft: float | None = None
    tpot: float | None = None
    e2e: float | None = None
    ttft_per_prompt_token: float = 0.0

    def __post_init__(self) -> None:
        for name in ("ttft", "tpot", "e2e"):
            value = getattr(self, name)
            if value is not None and not (_is_number(value) and value > 0):
                raise InvalidParameterError(f"SLO {name}={shown(value)} must be a positive number of seconds, or None")
        if not (_is_number(self.ttft_per_prompt_token) and self.ttft_per_prompt_token >= 0):
            raise InvalidParameterError(
                f"SLO ttft_per_prompt_token={shown(self.ttft_per_prompt_token)} must be a number of seconds, 0 or more"
            )

    @classmethod
    def from_value(cls, value: SLO | float | None) -> SLO | None:
        """A bare number means a per-token objective in seconds.

        Arguments:
            value: an SLO, seconds per output token, or None.

        Raises:
            InvalidParameterError: it is none of these, or the number is not positive.

        Example:
            assert SLO.from_value(0.05) == SLO(tpot=0.05)
        """
        if value is None or isinstance(value, SLO):
            return value
        if isinstance(value, bool) or not isinstance(value, int | float):
            raise InvalidParameterError(f"slo={shown(value)} must be an SLO or a number of seconds per token")
        return cls(tpot=value)

    @classmethod
    def from_mapping(cls, given: Mapping[str, object]) -> SLO:
        """As it stands in a trace or a configuration file.

        Arguments:
            given: fields by name.

        Raises:
            InvalidParameterError: a key is unknown (the nearest one is named), or a value is no time.
        """
        for name in given:
            if name not in cls.__slots__:
                raise InvalidParameterError(
                    f"SLO {name}={shown(given[name])} is not known{nearest_name(name, cls.__slots__)}"
                )
        return cls(**given)  # type: ignore[arg-type]  # __post_init__ checks the values

    @classmethod
    def from_fields(cls, fields: Sequence[float | None] | None) -> SLO | None:
        """What a request carries on its way to the scheduler.

        Arguments:
            fields: as `to_fields` makes them; None: no objective.

        Raises:
            InvalidParameterError: a value is no time.
        """
        if fields is None:
            return None
        ttft, tpot, e2e, per_prompt_token = fields
        return cls(ttft, tpot, e2e, per_prompt_token or 0.0)

    def to_fields(self) -> list[float | None]:
        """As it travels: ttft, tpot, e2e and ttft_per_prompt_token."""
        return [self.ttft, self.tpot, self.e2e, self.ttft_per_prompt_token]

    def scaled(self, factor: float) -> SLO:
        """All of it so many times as loose (for curves of attainment over the strictness of the objective).

        Arguments:
            factor: above 1 is looser.

        Raises:
            InvalidParameterError: what comes out is no time.
        """

        def scale(value: float | None) -> float | None:
            return None if value is None else value * factor

        return SLO(scale(self.ttft), scale(self.tpot), scale(self.e2e), self.ttft_per_prompt_token * factor)

    def ttft_limit(self, num_prompt: int) -> float:
        """Seconds from arrival to the first token; infinity without a promise.

        Arguments:
            num_prompt: tokens of the prompt.
        """
        return math.inf if self.ttft is None else self.ttft + self.ttft_per_prompt_token * num_prompt

    def token_deadline(self, index: int, arrival: float, num_prompt: int, first_token: float | None = None) -> float:
        """When an output token is due in the deadline reading; infinity when nothing says so.

        Arguments:
            index: of the token, from 0.
            arrival: when the request came; this and what is returned are seconds of one clock.
            num_prompt: tokens of the prompt.
            first_token: when that came, if it did; it counts where no TTFT is promised.
        """
        start = arrival + self.ttft_limit(num_prompt)
        if start == math.inf and first_token is not None:
            start = first_token
        if index and self.tpot is None:
            return math.inf
        return start + index * (self.tpot or 0.0)

    def is_met(
        self,
        *,
        arrival: float,
        first_token: float,
        last_token: float,
        num_prompt: int,
        num_output: int,
        reading: Reading = "tpot",
    ) -> bool:
        """Whether a request that ran to its end kept all of it.

        Arguments:
            arrival, first_token, last_token: when these came, in seconds of one clock.
            num_prompt, num_output: tokens.
            reading: of the promise per token: "tpot" (default) or "deadline".

        Example:
            slo = SLO(ttft=1.0, tpot=0.1)
            assert slo.is_met(arrival=0.0, first_token=0.9, last_token=1.8, num_prompt=5, num_output=10)
        """
        if first_token - arrival > self.ttft_limit(num_prompt):
            return False
        if self.e2e is not None and last_token - arrival > self.e2e:
            return False
        if self.tpot is None or num_output <= 1:
            return True
        if reading == "tpot":
            return (last_token - first_token) / (num_output - 1) <= self.tpot
        return last_token <= self.token_deadline(num_output - 1, arrival, num_prompt, first_token)

    def contradiction(self) -> str | None:
        """Why no request could ever keep it, whatever the engine; None if one could."""
        if self.e2e is not None and self.ttft is not None and self.e2e < self.ttft:
            return f"e2e={self.e2e} ends before ttft={self.ttft} does; the ttft can be left out"
        if self.ttft is None and self.ttft_per_prompt_token:
            return f"ttft_per_prompt_token={self.ttft_per_prompt_token} has no effect without ttft"
        return None


@dataclass(frozen=True, slots=True)
class RequestClass:
    """What the requests of one kind have in common: their label, their promise, and how they are treated."""

    name: str
    """What it is called in tables; no two classes of a workload are called alike."""
    slo: SLO | None = None
    """What each of its requests is promised, unless the workload has promises of its own for them."""
    is_latency_sensitive: bool = False
    priority: int = 0
    """Lower is sooner."""
    patience: float | None = None
    """Seconds after which the client gives up and aborts; None: never."""
    type_info: str | None = None
    """What its requests carry; None: the name. Classes that differ in something else may share it."""

    @property
    def label(self) -> str:
        """The `type_info` of its requests."""
        return self.name if self.type_info is None else self.type_info

    def __post_init__(self) -> None:
        if self.patience is not None and not (_is_number(self.patience) and self.patience > 0):
            raise InvalidParameterError(
                f"class {self.name!r}: patience={self.patience!r} must be a positive number of seconds, or None"
            )


def _is_number(value: object) -> bool:
    if not isinstance(value, int | float) or isinstance(value, bool):
        return False
    try:
        return math.isfinite(value)
    except OverflowError:  # an integer larger than any float
        return False
