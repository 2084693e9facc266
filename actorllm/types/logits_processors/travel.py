"""The parameters of a request on their way to the logits processors of a worker: JSON of what is not at its default.

`Submit.processor_params` carries that of one request, `StepPlan.new_processed` that of all new rows. Parameters that are
applied elsewhere, and may be large, do not travel (NOT_CARRIED).
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Iterator
from dataclasses import fields
from typing import TypeAlias

import numpy as np
from numpy.typing import NDArray

from actorllm.types.params import SamplingParams

U8: TypeAlias = NDArray[np.uint8]

NOT_CARRIED = frozenset(
    {"structured_outputs", "allowed_token_ids", "bad_words", "logit_bias", "repetition_detection", "output_kind"}
)

_PLAIN = SamplingParams()


def encode_params(params: SamplingParams) -> U8:
    """What is not at its default. params: checked."""
    names = [f.name for f in fields(SamplingParams) if f.name not in NOT_CARRIED]
    values = {name: value for name in names if (value := getattr(params, name)) != getattr(_PLAIN, name)}
    return np.frombuffer(json.dumps(values, separators=(",", ":")).encode(), np.uint8)


def decode_params(data: U8) -> SamplingParams:
    """The parameters again. Raises ValueError or TypeError for what `encode_params` does not make."""
    values = json.loads(data.tobytes())
    if not isinstance(values, dict) or not values.keys().isdisjoint(NOT_CARRIED):
        raise ValueError(f"{data.tobytes()!r:.80} are no parameters of a request")
    return SamplingParams(**values)


def encode_rows(rows: Iterable[tuple[int, U8]]) -> U8:
    """(slot, parameters) of new rows."""
    return np.frombuffer(
        b"[" + b",".join([b"[%d,%s]" % (slot, data.tobytes()) for slot, data in rows]) + b"]", np.uint8
    )


def decode_rows(data: U8) -> Iterator[tuple[int, SamplingParams]]:
    """Slots and parameters again."""
    for slot, values in json.loads(data.tobytes()):
        yield slot, SamplingParams(**values)


def encode_errors(errors: list[str]) -> U8:
    """Of the void rows of a result, in their order; an empty text: no logits processor has failed."""
    return np.frombuffer(json.dumps(errors).encode(), np.uint8)


def decode_errors(data: U8, count: int) -> list[str]:
    """So many texts again. Raises ValueError for anything else."""
    errors = json.loads(data.tobytes())
    if not isinstance(errors, list) or len(errors) != count or not all(isinstance(text, str) for text in errors):
        raise ValueError(f"errors of {count} rows: {data.size} bytes of something else")
    return errors
