"""Attention over pages against dense attention in float64, whatever joins, leaves, grows and is split on the way."""

from __future__ import annotations

from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from actorllm.model.cpu import attention
from tests.effort import examples
from tests.model.cpu.pages import NUM_SLOTS, STEPS, Pages, Shape

SHAPES = st.builds(
    Shape,
    num_kv_heads=st.integers(1, 3),
    fold=st.integers(1, 3),
    head_dim=st.sampled_from([1, 3, 8, 16]),
    block_size=st.sampled_from([1, 2, 3, 4, 8, 16]),
    windows=st.lists(
        st.none() | st.integers(1, 20) | st.integers(1, 20).map(attention.Chunk), min_size=1, max_size=2, unique=True
    ).map(tuple),
    sort_gain=st.sampled_from([0, 10, 2048]),
    seed=st.integers(0, 99),
)


@pytest.mark.parametrize(("overhead", "most_indices"), [(attention.GROUP_OVERHEAD_ELEMENTS, 1 << 20), (50, 300)])
@settings(max_examples=examples(13, 40), deadline=None)
@given(shape=SHAPES, steps=STEPS)
def test_pages_hold_what_dense_attention_sees(
    overhead: int, most_indices: int, shape: Shape, steps: list[list[int]]
) -> None:
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(attention, "GROUP_OVERHEAD_ELEMENTS", overhead)
        patch.setattr(attention, "MAX_GROUP_INDICES", most_indices)
        patch.setattr(attention, "QUERY_TILE", 16)
        pages = Pages(shape)
        for wishes in steps:
            pages.step(wishes)


@pytest.mark.parametrize("num_rows", [8, 9])
@pytest.mark.parametrize("window", [None, 21, attention.Chunk(64)])
def test_a_steady_batch_keeps_its_indices(num_rows: int, window: int | None) -> None:
    """Padded or not: what a group reads is worked out again only where a block leaves the window or the rows grow wider."""
    pages = Pages(Shape(2, 2, 8, 16, (window,), 2048, seed=0))
    pages.step([17] * num_rows + [0] * (NUM_SLOTS - num_rows))
    made: list[Any] = []
    for _ in range(30):
        pages.step([50] * num_rows + [0] * (NUM_SLOTS - num_rows))
        context = pages.cache.decodes.get(window)
        if context is not None and (not made or made[-1] is not context):
            made.append(context)
    assert len(made) <= 4
