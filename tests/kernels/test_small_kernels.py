"""Kernels with little in them: activation, embedding, inputs of a step, copies of blocks."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from actorllm_kernels import reference
from actorllm_kernels.embed import embed
from actorllm_kernels.kv_clear import kv_clear
from actorllm_kernels.kv_copy import kv_copy
from actorllm_kernels.silu_mul import ACTIVATIONS, activation_mul
from actorllm_kernels.step_prep import step_prep
from tests.effort import each_value
from tests.kernels.closeness import DTYPES, assert_close


@pytest.mark.parametrize(("dtype", "activation"), each_value(DTYPES, ACTIVATIONS))
def test_gated_activation(activation: str, dtype: torch.dtype) -> None:
    x = 3 * torch.randn(3, 2 * 1100).to(dtype)
    y = torch.empty(3, 1100, dtype=dtype)
    activation_mul(x, y, activation)
    assert_close(y, reference.activation_mul(x.double(), activation))


def test_an_unknown_activation_is_refused() -> None:
    with pytest.raises(ValueError, match="'relu' is none of silu, gelu, gelu_tanh"):
        activation_mul(torch.zeros(1, 2), torch.zeros(1, 1), "relu")


@pytest.mark.parametrize("id_type", [torch.int32, torch.int64])
@pytest.mark.parametrize("dtype", DTYPES)
def test_embedding(dtype: torch.dtype, id_type: torch.dtype) -> None:
    weight, ids = torch.randn(11, 80).to(dtype), torch.tensor([10, 0, -1, 11, 3], dtype=id_type)
    y = torch.empty(5, 80, dtype=dtype)
    embed(ids, weight, y, 2.0)
    assert_close(y, reference.embed(ids.long(), weight.double(), 2.0))


def test_inputs_of_a_step() -> None:
    page, num_slots = 4, 150
    rng = np.random.default_rng(0)
    last_token = torch.from_numpy(rng.integers(0, 1000, num_slots).astype(np.int32))
    num_computed = torch.from_numpy(rng.integers(0, 5 * page, num_slots).astype(np.int32))
    table = torch.from_numpy(rng.permutation(num_slots * 5).astype(np.int32).reshape(num_slots, 5))
    rows = torch.from_numpy(rng.permutation(num_slots).astype(np.int32)[:140])
    rows[[3, 139]] = -1
    lists = last_token.tolist(), num_computed.tolist(), table.tolist()
    expected = [reference.step_prep(slot, *lists, page) for slot in rows.tolist()]
    ids, positions, seq_lens = (torch.full((140,), -7, dtype=torch.int32) for _ in range(3))
    kv_slots = torch.full((140,), -7, dtype=torch.int64)
    step_prep(rows, last_token, num_computed, table, page, ids, positions, kv_slots, seq_lens)
    columns = zip(ids.tolist(), positions.tolist(), kv_slots.tolist(), seq_lens.tolist(), strict=True)
    assert [reference.StepRow(*row) for row in columns] == expected
    assert num_computed.tolist() == lists[1]


def test_copies_of_blocks() -> None:
    pool = torch.randn(3, 9, 2, 50, 60)
    expected = reference.copy_pages(pool, [1, 8, 1], [0, 2, 7])
    kv_copy(pool, np.array([1, 8, 1], np.int32), np.array([0, 2, 7], np.int32))
    assert torch.equal(pool, expected)
    kv_copy(pool, np.zeros(0, np.int32), np.zeros(0, np.int32))
    assert torch.equal(pool, expected)


@pytest.mark.parametrize(("sources", "targets"), [([1, 2], [2, 3]), ([1, 2], [3, 3]), ([1], [2, 3])])
def test_copies_that_depend_on_their_order_are_refused(sources: list[int], targets: list[int]) -> None:
    with pytest.raises(ValueError, match=r"targets|cannot be copied"):
        kv_copy(torch.zeros(1, 4, 1), np.array(sources, np.int32), np.array(targets, np.int32))


@pytest.mark.parametrize("dtype", DTYPES)
def test_what_is_not_finite_is_cleared(dtype: torch.dtype) -> None:
    pool = torch.randn(2, 4, 2, 3, 8, 200).to(dtype)
    pool[:, 2, :, :, 3] = float("nan")
    slots, is_finite = [19, 5, -1, 31], [False, True, False, False]
    expected = reference.clear_pages(pool, slots, is_finite)
    kv_clear(pool, torch.tensor(slots), torch.tensor(is_finite).int())
    assert torch.equal(pool, expected)
