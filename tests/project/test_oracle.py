"""The oracle of the equality tests tells choices that rounding may decide from those that it may not."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch

from actorllm import SamplingParams
from actorllm.model.sampler import Sampler, SamplingColumns
from tests.oracle import MARGIN, hangs_on_a_border, oracle

PROBABILITIES = [0.5, 0.3, 0.1, 0.1]
NUM_ROWS = 400
NEAR = MARGIN / 10


@pytest.mark.parametrize(
    ("at_border", "aside"),
    [
        ({"top_p": 0.8 - NEAR}, {"top_p": 0.7}),
        ({"top_p": 0.8 + NEAR}, {"top_p": 0.85}),
        ({"min_p": 0.6 * (1 - NEAR)}, {"min_p": 0.5}),
        ({"min_p": 0.6 * (1 + NEAR)}, {"min_p": 0.7}),
        ({"top_k": 3}, {"top_k": 2}),  # two ids are as likely: rounding may leave out either of them
        ({"top_k": 2, "top_p": 0.625 + NEAR}, {"top_k": 2}),
    ],
)
def test_rows_that_hang_on_the_border_of_a_filter(at_border: dict[str, Any], aside: dict[str, Any]) -> None:
    for temperature in (1.0, 0.5):
        logits = (temperature * torch.tensor(PROBABILITIES).log()).repeat(NUM_ROWS, 1)

        def found(temperature: float = temperature, logits: torch.Tensor = logits, **given: Any) -> float:
            filters = {"top_p": 1.0, "min_p": 0.0, "top_k": 0} | given
            columns = SamplingColumns(
                temperature=np.full(NUM_ROWS, temperature, np.float32),
                top_k=np.full(NUM_ROWS, filters["top_k"], np.int32),
                top_p=np.full(NUM_ROWS, filters["top_p"], np.float32),
                min_p=np.full(NUM_ROWS, filters["min_p"], np.float32),
                seeds=np.arange(NUM_ROWS, dtype=np.uint64),
                sample_index=np.zeros(NUM_ROWS, np.int32),
                token_index=np.zeros(NUM_ROWS, np.int32),
            )
            rows = np.arange(NUM_ROWS)
            return float(hangs_on_a_border(logits, columns, rows, Sampler(4).sample(logits, columns)).mean())

        assert 0.05 < found(**at_border) < 0.5  # not every draw falls on who is at the border
        assert found(**aside) == 0
        assert found() == 0


def test_what_was_asked_before_is_remembered_and_nothing_else_is_taken_for_it() -> None:
    prompt, stream = [443, 1135], [259, 433, 415, 339] * 4

    def choices(prompt: list[int] = prompt, stream: list[int] = stream, index: int = 0, **given: Any) -> list[int]:
        params = SamplingParams(**({"seed": 1, "max_tokens": 16} | given))
        chosen: list[int] = oracle(prompt, params, stream, index)[0].tolist()
        return chosen

    expected = choices()
    assert choices(list(prompt), list(stream)) == expected
    others = [{"seed": 2}, {"index": 1}, {"temperature": 0.5}, {"prompt": [443]}, {"stream": stream[::-1]}]
    assert all(choices(**other) != expected for other in others)
