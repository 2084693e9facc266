"""States of recurrent layers that are kept in places: every bit is that of the slot, and nothing else of the step changes."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

from actorllm.config import EngineConfig
from actorllm.errors import ConfigError
from actorllm.messages import StepPlan
from actorllm.model.cpu.recurrent.cache import RecurrentCache
from actorllm.model.cpu.runner import CpuRunner
from tests.model.driver import Driver, int32
from tests.model.hf.decoders import RECURRENT, prompt, save

FAMILIES = sorted(RECURRENT)
TOKENS = prompt(3, 150)
OPTIONS: dict[str, Any] = {
    "dtype": "float32", "num_threads": 1, "max_model_len": 192, "block_size": 8, "skip_tokenizer_init": True,
    "max_num_seqs": 4, "max_num_batched_tokens": 256,
}  # fmt: skip


def runner_of(folder: Path, num_snapshots: int | None = 3, **arguments: Any) -> CpuRunner:
    config = EngineConfig.from_arguments(folder, **OPTIONS | arguments)
    config = replace(config, cache=replace(config.cache, snapshots=num_snapshots))
    runner = CpuRunner(config, show_progress=False)
    runner.load()
    return runner


@pytest.fixture(scope="module")
def mamba2(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("mamba2")
    save("mamba2", folder, max_position_embeddings=256)
    return folder


def driver_of(folder: Path) -> Driver:
    runner = runner_of(folder)
    runner.allocate(90)
    return Driver(runner, num_blocks=90)


def states_of(driver: Driver, slot: int) -> list[torch.Tensor]:
    cache = driver.runner.cache
    assert isinstance(cache, RecurrentCache)
    return [rows[slot].clone() for layer in cache.states.layers for rows in layer.values()]


def place(number: int) -> int:
    """The row that a place is in, behind those of the slots."""
    return 4 + number


def equal(one: list[torch.Tensor], other: list[torch.Tensor]) -> bool:
    return all(map(torch.equal, one, other))


@pytest.mark.parametrize("name", FAMILIES)
def test_a_request_goes_on_as_if_it_had_computed_its_prefix(name: str, tmp_path: Path) -> None:
    save(name, tmp_path, max_position_embeddings=256)
    driver = driver_of(tmp_path)
    driver.add(0, TOKENS)
    driver.step({0: 130}, [], saved_states=int32([0, 64, 1, 0, 128, 2]))
    driver.step({0: 20}, [])
    # The same, in chunks that end there: nothing that a step computes depends on what it keeps.
    driver.add(1, TOKENS)
    driver.step({1: 64}, [])
    assert equal(states_of(driver, 1), states_of(driver, place(1)))
    driver.step({1: 64}, [])
    assert equal(states_of(driver, 1), states_of(driver, place(2)))
    driver.step({1: 22}, [])
    logits, states = driver.logits, states_of(driver, 1)
    assert logits is not None
    # A request that begins alike takes over blocks and states.
    driver.add(2, TOKENS, num_computed=128)
    driver.requests[2].blocks[:16] = driver.requests[0].blocks[:16]
    driver.step({2: 22}, [], restored_states=int32([2, 2]))
    assert driver.logits is not None
    assert torch.equal(driver.logits, logits)
    assert equal(states_of(driver, 2), states)


def test_the_state_of_a_decoded_token_is_kept(mamba2: Path) -> None:
    driver = driver_of(mamba2)
    driver.add(0, TOKENS[:63])
    driver.add(1, TOKENS[:40])
    driver.step({0: 63, 1: 40}, [])
    driver.step({}, [1, 0], saved_states=int32([0, 64, 0]))
    assert equal(states_of(driver, 0), states_of(driver, place(0)))
    driver.step({}, [0])
    assert not equal(states_of(driver, 0), states_of(driver, place(0)))


def test_a_place_is_read_before_the_step_writes_to_it(mamba2: Path) -> None:
    driver = driver_of(mamba2)
    driver.add(0, TOKENS)
    driver.step({0: 150}, [], saved_states=int32([0, 64, 0]))
    kept = states_of(driver, place(0))
    driver.add(1, TOKENS, num_computed=64)
    driver.add(2, TOKENS[::-1])
    driver.step({2: 64, 1: 1}, [], restored_states=int32([1, 0]), saved_states=int32([2, 64, 0]))
    driver.add(3, TOKENS)
    driver.step({3: 64}, [])
    assert equal(kept, states_of(driver, 3))
    driver.remove(2)
    driver.add(2, TOKENS[::-1])
    driver.step({2: 64, 3: 1}, [])  # with the products of the step above
    assert equal(states_of(driver, 1), states_of(driver, 3))


@pytest.mark.parametrize(
    ("columns", "message"),
    [
        ({"saved_states": [0, 64, 3]}, "there are 3 places for states, not place 3"),
        ({"saved_states": [0, 64]}, "2 numbers are no states"),
        ({"saved_states": [0, 151, 0]}, "slot 0 does not compute 151 tokens"),
        ({"saved_states": [0, 0, 0]}, "slot 0 does not compute 0 tokens"),
        ({"saved_states": [7, 64, 0]}, "slot 7 does not compute 64 tokens"),
        ({"restored_states": [0, 1]}, "states are named otherwise"),
    ],
)
def test_a_plan_that_cannot_be(mamba2: Path, columns: dict[str, list[int]], message: str) -> None:
    driver = driver_of(mamba2)
    driver.add(0, TOKENS)
    plan = driver.plan({0: 150}, [], **{name: int32(numbers) for name, numbers in columns.items()})
    with pytest.raises(ValueError, match=message):
        driver.runner.execute(plan)


def test_a_slot_that_begins_with_computed_tokens_needs_their_state(mamba2: Path) -> None:
    driver = driver_of(mamba2)
    driver.add(0, TOKENS, num_computed=64)
    with pytest.raises(ValueError, match=r"slots \[0\] begin with computed tokens, and states are named otherwise"):
        driver.step({0: 86}, [])


def test_a_model_without_recurrent_layers_keeps_none(tmp_path: Path) -> None:
    save("llama", tmp_path, max_position_embeddings=256)
    driver = driver_of(tmp_path)
    for column in ({"saved_states": int32([0, 1, 0])}, {"restored_states": int32([0, 0])}):
        with pytest.raises(ValueError, match="are no states of recurrent layers in this worker"):
            driver.runner.execute(StepPlan(step=1, **column))


def test_places_are_counted_as_memory(tmp_path: Path) -> None:
    """As many as sequences run, and within a quarter of what those and the longest sequence leave."""
    save("granite-hybrid", tmp_path, max_position_embeddings=256)
    runner = runner_of(tmp_path, None)
    row = runner._state_bytes
    least = runner._most_blocks_of_one * runner.block_bytes
    for num_bytes, num_places in (
        (least + 100 * row, 4),
        (least + 4 * row + 9 * row, 2),
        (least + 5 * row, 0),
        (5 * row, 0),
    ):
        num_blocks = runner._blocks_within(num_bytes)
        assert runner.num_snapshots == num_places
        assert num_blocks == (num_bytes - (4 + num_places) * row) // runner.block_bytes
        assert runner.cache_bytes_of(num_blocks) <= num_bytes
        if num_bytes > least + 4 * row:
            assert num_blocks >= runner._most_blocks_of_one, "without snapshots the longest sequence would fit"
    with pytest.raises(ConfigError, match="max_num_seqs=4: the states of so many sequences take"):
        runner._blocks_within(3 * row)
    without = runner_of(tmp_path, None, enable_prefix_caching=False)
    without._blocks_within(least + 100 * row)
    assert without.num_snapshots == 0
