"""The products of adapters beside those of their base, in every mix of rows: as written out, and each row for itself."""

from __future__ import annotations

import threading
from concurrent.futures import ThreadPoolExecutor
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch

from actorllm.model.adapters import AdaptedLayer
from actorllm.model.adapters.reading import LowRank
from actorllm.model.adapters.slots import (
    MAX_JOINED_RANKS,
    MAX_SUMMED_ROWS,
    AdapterSlots,
    JoinedAdapted,
    SummedAdapted,
)
from actorllm.model.cpu.layers import linear
from actorllm.model.linear.dense import Dense

IN, RANK = 24, 4
WIDE_RANK = MAX_JOINED_RANKS // 4 + 1
"""Of four slots, too many to be multiplied with side by side."""
SIZES = (48, 16, 16)


@pytest.fixture(params=[SummedAdapted, JoinedAdapted])
def made(request: pytest.FixtureRequest) -> tuple[AdapterSlots, Any, dict[int, list[LowRank | None]]]:
    """Slots of three adapters, of which the second lacks the first target, and the third has all of a lower rank."""
    torch.manual_seed(0)
    slots = AdapterSlots(4, RANK if request.param is JoinedAdapted else WIDE_RANK, torch.float32)
    starts = np.cumsum((0, *SIZES)).tolist()
    targets = [
        AdaptedLayer(f"layer.{i}", size, IN, torch.arange(size), slice(None), slice(start, start + size))
        for i, (size, start) in enumerate(zip(SIZES, starts, strict=False))
    ]
    adapted = slots.adapt(linear(Dense(torch.randn(sum(SIZES), IN))), targets)
    assert isinstance(adapted, request.param)
    pairs: dict[int, list[LowRank | None]] = {}
    for slot, rank in ((1, RANK), (2, RANK), (4, 2)):
        pairs[slot] = [(torch.randn(rank, IN), torch.randn(rank, size)) for size in SIZES]
        if slot == 2:
            pairs[slot][0] = None
        slots.put(slot, {f"layer.{i}": pair for i, pair in enumerate(pairs[slot]) if pair is not None})
    return slots, adapted, pairs


def step(decodes: list[int], stretches: list[tuple[int, int]], num_padded: int = 0) -> Any:
    """decodes: the slot of each decode row; stretches: (tokens, slot); num_padded: decode rows that are nothing's."""
    counts = [count for count, _ in stretches]
    ids = [*decodes, *[0] * num_padded, *(slot for count, slot in stretches for _ in range(count))]
    num_decodes = len(decodes) + num_padded
    starts = [num_decodes + sum(counts[:i]) for i in range(len(counts))]
    adapter_ids = np.array(ids, np.int32) if any(ids) else None
    return SimpleNamespace(
        adapter_ids=adapter_ids, num_decodes=num_decodes, prefill_starts=starts, prefill_counts=counts, ids=ids
    )


@pytest.mark.parametrize(
    ("decodes", "stretches", "num_padded"),
    [
        ([1], [], 0),
        ([1, 4, 2, 1], [], 0),
        ([0, 1, 0, 4, 2], [], 3),
        ([2] * (MAX_SUMMED_ROWS + 1), [], 0),
        ([1] * (MAX_SUMMED_ROWS + 1), [(5, 1), (3, 0)], 0),
        ([1, 0], [(7, 4), (2, 4), (5, 0), (3, 1)], 2),
        ([0, 0], [(7, 2)], 0),
        ([0, 0], [(3, 0)], 0),
    ],
)
def test_every_mix_of_rows_is_as_written_out(
    made: Any, decodes: list[int], stretches: list[tuple[int, int]], num_padded: int
) -> None:
    slots, adapted, pairs = made
    inputs = step(decodes, stretches, num_padded)
    x = torch.randn(len(inputs.ids), IN)
    with torch.inference_mode():
        slots.begin(inputs)
        got = adapted(x)
        wanted = adapted.base(x)
    for i, slot in enumerate(inputs.ids):
        parts = [torch.zeros(size) for size in SIZES]
        for j, pair in enumerate(pairs.get(slot, [])):
            if pair is not None:
                parts[j] = x[i] @ pair[0].T @ pair[1]
        torch.testing.assert_close(got[i], wanted[i] + torch.cat(parts), msg=f"row {i} of slot {slot}")


def test_the_adapters_of_others_change_no_bit_of_a_row(made: Any) -> None:
    slots, adapted, _ = made
    added, base = [], torch.zeros(sum(SIZES), IN)
    adapted.base = linear(Dense(base))
    x = torch.randn(6, IN)
    for ids in ([1, 2, 4, 0, 1, 2], [1, 0, 0, 0, 0, 0], [1, 1, 1, 1, 1, 1], [1, 4, 4, 2, 0, 1]):
        with torch.inference_mode():
            slots.begin(step(ids, []))
            added.append(adapted(x)[0])
    assert all(torch.equal(one, added[0]) for one in added)
    assert added[0].any()


def test_a_slot_that_is_filled_beside_a_step_changes_no_bit_of_it(made: Any) -> None:
    """Again and again, with huge values, by another thread."""
    slots, adapted, _ = made
    assert slots.fills_beside_steps
    sizes = [(torch.full((2, IN), 1e30), torch.full((2, size), 1e30)) for size in SIZES]
    is_over = threading.Event()

    def fill() -> int:
        count = 0
        while not is_over.is_set():
            slots.put(3, {f"layer.{i}": pair for i, pair in enumerate(sizes) if (i + count) % 2})
            count += 1
        return count

    x = torch.randn(9, IN)
    inputs = step([1, 0, 4], [(3, 2), (3, 0)])
    with torch.inference_mode():
        slots.begin(inputs)
        expected = adapted(x)
        with ThreadPoolExecutor(1) as pool:
            filling = pool.submit(fill)
            try:
                assert all(torch.equal(adapted(x), expected) for _ in range(300))
            finally:
                is_over.set()
            assert filling.result() > 0


def test_steps_with_the_same_rows_find_them_as_they_were(made: Any) -> None:
    slots, _, _ = made

    def rows_of(*args: Any) -> Any:
        slots.begin(step(*args))
        return slots.tokens if slots.is_joined else slots.rows

    first = rows_of([1, 2], [])
    assert rows_of([1, 2], []) is first
    if not slots.is_joined:
        assert rows_of([1, 2], [(4, 1)]) is first
    assert rows_of([2, 1], []) is not first
    assert rows_of([0, 0], []) is None


def test_an_adapter_with_huge_values_reaches_no_other_row() -> None:
    """What it makes of the row of another one is not finite, and is set to 0."""
    slots = AdapterSlots(2, 4, torch.float32)
    layer = AdaptedLayer("layer", 8, IN, torch.arange(8), slice(None), slice(0, 8))
    adapted = slots.adapt(linear(Dense(torch.zeros(8, IN))), [layer])
    for slot, size in ((1, 1.0), (2, 3e38)):
        slots.put(slot, {"layer": (torch.full((4, IN), size), torch.ones(4, 8))})
    with torch.inference_mode():
        slots.begin(step([1, 2, 0], []))
        found = adapted(torch.ones(3, IN))
    assert found[:, 0].tolist() == [4.0 * IN, float("inf"), 0.0]
