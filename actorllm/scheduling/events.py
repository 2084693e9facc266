"""`Events` and `End`: what a call of the scheduler changed; the scheduler actor tells the requests of it."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from actorllm.messages import I32, NO_I32, no_i32
from actorllm.messages.logprobs import LogprobSpan
from actorllm.scheduling.sequence import Sequence
from actorllm.types.outputs import FinishReason


class End(NamedTuple):
    """A request ended."""

    sequence: Sequence
    reason: FinishReason
    stop_reason: int | str | None = None
    error: str | None = None
    details: dict[str, Any] | None = None
    """As in `RequestEnd`."""


@dataclass(slots=True, eq=False)
class Events:
    """What a result changed, one row per request that got something.

    Never changed. A frozen class would take longer to make, in every step.

    sequences[i] got tokens (its share of `tokens`: one, or counts[i]), the first of them with output index index[i].
    ends are in no particular order and may name requests without a row. vectors belong to vector_rows. logprobs: of those
    that asked, of their tokens here or of parts of their prompts.
    """

    sequences: NDArray[Any]
    tokens: I32
    index: I32
    counts: I32 = field(default_factory=no_i32)
    ends: tuple[End, ...] = ()
    vectors: tuple[tuple[Sequence, NDArray[np.float32]], ...] = ()
    logprobs: tuple[tuple[Sequence, LogprobSpan], ...] = ()
    cached: tuple[Sequence, ...] = ()
    """Those whose first token is here and part of whose prompt was found in the prefix cache."""


NOTHING = Events(np.empty(0, object), NO_I32, NO_I32)
