"""What a worker keeps of prompts that are pooled over all of their tokens."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest

from tests.model.driver import Driver

PROMPT = [5, 17, 3, 44, 60, 2, 9, 71, 33]
LAST, MEAN, CLS = 1, 2, 3


@pytest.fixture
def driver(make_driver: Callable[..., Driver], tiny_llama: Path) -> Driver:
    return make_driver(tiny_llama, load_format="dummy", runner="pooling")


def vector_of(driver: Driver, slot: int, pooling: int, *chunks: int, tokens: list[int] = PROMPT) -> np.ndarray:
    driver.add(slot, tokens, pooling=pooling)
    for chunk in chunks:
        result = driver.step({slot: chunk}, [])
    driver.remove(slot)
    vectors: np.ndarray = result.vectors
    return vectors


@pytest.mark.parametrize("pooling", [LAST, MEAN, CLS])
def test_chunks_make_no_difference(driver: Driver, pooling: int) -> None:
    whole = vector_of(driver, 0, pooling, 9)
    assert np.abs(vector_of(driver, 1, pooling, 2, 4, 3) - whole).max() < 1e-5
    assert np.abs(vector_of(driver, 1, pooling, *[1] * 9) - whole).max() < 1e-5
    assert len(driver.runner._pooled) == 0


def test_the_mean_is_that_of_the_last_states_of_every_beginning(driver: Driver) -> None:
    lasts = [vector_of(driver, 0, LAST, n, tokens=PROMPT[:n]) for n in range(1, 10)]
    assert np.abs(vector_of(driver, 0, MEAN, 9) - np.mean(lasts, 0)).max() < 1e-5
    assert np.abs(vector_of(driver, 0, CLS, 4, 5) - lasts[0]).max() < 1e-5
    assert np.abs(lasts[0] - lasts[-1]).max() > 0.1


def test_prompts_of_all_kinds_share_a_step(driver: Driver) -> None:
    alone = {kind: vector_of(driver, 0, kind, 9) for kind in (LAST, MEAN, CLS)}
    for slot, kind in ((2, CLS), (0, MEAN), (1, LAST), (3, MEAN)):
        driver.add(slot, PROMPT, pooling=kind)
    driver.step({3: 4}, [])
    result = driver.step({2: 9, 3: 5, 0: 9, 1: 9}, [])
    assert result.vector_rows.tolist() == [0, 1, 2, 3]
    assert result.tokens.size == 0
    vectors = result.vectors.reshape(4, -1)
    for row, kind in enumerate((CLS, MEAN, MEAN, LAST)):
        assert np.abs(vectors[row] - alone[kind]).max() < 1e-5


def test_a_slot_that_is_freed_half_way_leaves_nothing_to_the_next(driver: Driver) -> None:
    driver.add(0, PROMPT[::-1], pooling=MEAN)
    driver.step({0: 5}, [])
    assert len(driver.runner._pooled) == 1
    driver.remove(0)
    whole = vector_of(driver, 0, MEAN, 4, 5)
    assert np.abs(whole - vector_of(driver, 1, MEAN, 9)).max() < 1e-5
    driver.add(0, PROMPT, pooling=MEAN)
    driver.step({0: 5}, [])
    driver.runner.forget_requests()
    assert len(driver.runner._pooled) == 0


def test_the_beginning_of_a_mean_must_have_been_here(driver: Driver) -> None:
    driver.add(0, PROMPT, pooling=MEAN)
    driver.step({0: 4}, [])
    driver.runner._pooled.clear()
    with pytest.raises(ValueError, match="its first ones are not known"):
        driver.step({0: 5}, [])
