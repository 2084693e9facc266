"""Embeddings that plans bring to the worker, by themselves and among ordinary rows."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from actorllm.messages.embeds import EMBEDDED, encode_rows
from tests.model.driver import Driver

PROMPT = [5, 17, 33, 2, 90, 41, 8, 8, 60, 11]


@pytest.fixture
def driver(tiny_llama: Path, make_driver: Callable[..., Driver]) -> Driver:
    return make_driver(tiny_llama, load_format="dummy", max_num_seqs=8, enable_prompt_embeds=True)


def row_bytes(driver: Driver, tokens: list[int]) -> Any:
    rows: torch.Tensor = driver.runner.decoder.embedding[tokens]  # type: ignore[attr-defined]
    return encode_rows(rows.float().numpy(), "float32")


def test_rows_stand_where_ids_are_missing(driver: Driver) -> None:
    driver.add(0, PROMPT)
    driver.add(1, PROMPT[:4])
    driver.step({0: 10, 1: 4}, decode=[])
    assert driver.logits is not None
    expected = driver.logits[0].clone()
    driver.add(2, PROMPT[::-1])
    driver.add(3, [t if i in (1, 5) else EMBEDDED for i, t in enumerate(PROMPT)])
    driver.step({2: 10, 3: 4}, decode=[0, 1], embeds=row_bytes(driver, [5, 33, 2]))
    driver.step({3: 6}, decode=[0, 1, 2], embeds=row_bytes(driver, [90, 8, 8, 60, 11]))
    assert torch.allclose(driver.logits[3], expected, atol=1e-5)


def test_rows_without_finite_numbers_harm_no_one(driver: Driver) -> None:
    driver.add(0, PROMPT)
    driver.add(1, [EMBEDDED] * 10)
    rows = np.frombuffer(row_bytes(driver, PROMPT), np.float32).copy()
    rows[70] = np.nan
    driver.step({0: 10, 1: 6}, decode=[], embeds=rows.view(np.uint8)[: 6 * 48 * 4])
    result = driver.step({1: 4}, decode=[0], embeds=rows.view(np.uint8)[6 * 48 * 4 :])
    assert result.nonfinite_rows.tolist() == [1]
    assert torch.isfinite(driver.runner.cache.pool).all()
    driver.remove(1)
    driver.add(1, PROMPT)
    assert driver.step({1: 10}, decode=[0]).nonfinite_rows.size == 0


def test_rows_that_do_not_fit_are_an_error(driver: Driver) -> None:
    driver.add(0, [EMBEDDED] * 3)
    with pytest.raises(ValueError, match="192 bytes of embeddings are not 192 for each of 3"):
        driver.step({0: 3}, decode=[], embeds=row_bytes(driver, [1]))


def test_bfloat16_rounds_to_the_nearest_even() -> None:
    generator = torch.Generator().manual_seed(0)
    numbers = torch.randn(64, 48, generator=generator) * torch.logspace(-40, 38, 48)
    numbers[0, :4] = torch.tensor([1.00390625, 1.01171875, -0.0, 3.3e38])  # two ties, a signed zero, nearly too large
    theirs = numbers.to(torch.bfloat16).view(torch.uint8).numpy().reshape(-1)
    assert np.array_equal(encode_rows(numbers.numpy(), "bfloat16"), theirs)
