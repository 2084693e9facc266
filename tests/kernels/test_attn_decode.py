from __future__ import annotations

import itertools
from typing import Any

import pytest
import torch

from actorllm_kernels import reference
from actorllm_kernels.attn_decode import attn_decode, takes_packed
from actorllm_kernels.plan_decode import plan_decode
from tests.effort import each_value
from tests.kernels.cases import run_decode as run
from tests.kernels.closeness import DTYPES

PAGE, TILE = 32, 16
EDGES = [0, 1, PAGE - 1, PAGE, PAGE + 1, TILE, 3 * TILE + 5, 4 * PAGE, 4]


@pytest.mark.parametrize("programs", [1, 7, 40])
def test_any_division_among_programs_gives_the_same(programs: int) -> None:
    run(EDGES, programs)


@pytest.mark.parametrize(
    ("group", "dtype"), [*((group, torch.float32) for group in (1, 5, 7, 8)), *((4, dtype) for dtype in DTYPES)]
)
def test_groups(group: int, dtype: torch.dtype) -> None:
    run([33, 70], 4, group=group, dtype=dtype)


@pytest.mark.parametrize("dim", [80, 96, 128, 256])
def test_head_sizes(dim: int) -> None:
    run([33, 70], 4, dim=dim, num_kv_heads=1)


@pytest.mark.parametrize(
    ("q_len", "window", "softcap", "has_sinks", "programs"),
    each_value(
        [
            (1, 0, 0.0, True),
            (1, 0, 5.0, False),
            (1, 20, 0.0, False),
            (1, 1, 0.0, True),
            (1, 64, 3.0, True),
            (2, 0, 0.0, False),
            (3, 0, 2.0, True),
            (4, 0, 0.0, True),
            (4, 17, 0.0, False),
            (4, 33, 5.0, True),
        ],
        [2, 7],
    ),
)
def test_variants(q_len: int, window: int, softcap: float, has_sinks: bool, programs: int) -> None:
    lens = [n for n in (0, 4, 17, 97) if n == 0 or n >= q_len]
    run(lens, programs, q_len=q_len, window=window, softcap=softcap, has_sinks=has_sinks, group=3)


@pytest.mark.parametrize("packed", ["", "rope"])
def test_the_first_keys_are_skipped(packed: str) -> None:
    """As of a head that drafts, which knows nothing of the first token; some programs see that one only."""
    for programs in (1, 7, 40):
        run([0, 2, TILE, TILE + 1, 97], programs, skipped=1, packed=packed)
    run([18, 40], 3, skipped=3, window=20, packed=packed)


@pytest.mark.parametrize(
    ("dtype", "q_len", "dim", "window", "has_sinks"),
    each_value(DTYPES, [(1, 64, 0, False), (1, 80, 20, True), (4, 128, 0, True)]),
)
def test_a_cache_of_floats_of_8_bits(dtype: torch.dtype, q_len: int, dim: int, window: int, has_sinks: bool) -> None:
    run([0, 17, 97], 7, dtype=dtype, q_len=q_len, dim=dim, window=window, has_sinks=has_sinks, is_float8=True)


@pytest.mark.parametrize("programs", [1, 7, 40])
def test_a_packed_row_is_normed_and_rotated_and_its_key_and_value_are_stored(programs: int) -> None:
    run(EDGES, programs, packed="norm")


@pytest.mark.parametrize(("dim", "group", "how"), [
    (64, 1, {"window": 20}),
    (80, 14, {"has_sinks": True}),
    (128, 5, {"softcap": 3.0, "dtype": torch.bfloat16}),
    (256, 2, {"dtype": torch.float16}),
    (64, 20, {"packed": "rope"}),
])  # fmt: skip
def test_packed_rows_of_every_shape(dim: int, group: int, how: dict[str, Any]) -> None:
    run([33, 0, 70], 4, num_kv_heads=2, **{"dim": dim, "group": group, "packed": "norm"} | how)


def test_packed_rows_are_taken_where_they_fit_into_registers() -> None:
    kept, small = torch.bfloat16, torch.uint8
    assert all(takes_packed(*one, kept) for one in ((128, 14), (256, 4), (64, 20)))
    assert not any(takes_packed(*one) for one in ((128, 16, kept), (128, 48, kept), (256, 24, kept), (128, 4, small)))
    q, pages, ids = torch.zeros(1, 18 * 128), torch.zeros(2, 1, 64, 128), torch.zeros(1, 1, dtype=torch.int32)
    out, rope = torch.zeros(1, 16, 128), (torch.zeros(9, 64),) * 2
    given = (q, pages, pages, ids[0], ids, ids[0], ids[0], ids[0], ids[0], out, out, out, 1.0)
    with pytest.raises(ValueError, match="groups of 16 heads of size 128, a cache of torch"):
        attn_decode(*given, rope=rope, programs=1, tile=64)


def test_large_scores_stay_finite() -> None:
    """A sequence in which some rows of a tile see nothing of a part must not turn into NaN."""
    run([65, 66, 67], 5, q_len=4, window=2, group=2)


@pytest.mark.parametrize(("num_programs", "num_kv_heads", "q_len", "window"), [
    *itertools.product([1, 5, 100], [1, 3], [1], [0, 10]), (5, 2, 4, 10),
])  # fmt: skip
def test_the_plan_is_that_of_the_reference(num_programs: int, num_kv_heads: int, q_len: int, window: int) -> None:
    seq_lens = [n for n in EDGES if n >= q_len or n == 0]
    ends, quota = torch.full((len(seq_lens) + 1,), -1, dtype=torch.int32), torch.zeros(1, dtype=torch.int32)
    plan_decode(
        torch.tensor(seq_lens, dtype=torch.int32),
        ends,
        quota,
        num_programs,
        num_kv_heads,
        q_len=q_len,
        window=window,
        tile=TILE,
    )
    expected = reference.plan_decode(seq_lens, num_programs, num_kv_heads, q_len, window, TILE, 2)
    assert (ends.tolist(), quota.item()) == expected


def test_a_block_must_be_whole_tiles() -> None:
    q, pages = torch.zeros(1, 2, 64), torch.zeros(2, 1, 40, 64)
    ids = torch.zeros(1, 1, dtype=torch.int32)
    with pytest.raises(ValueError, match="block_size=40 is no multiple of the tile of 64 keys"):
        attn_decode(q, pages, pages, ids[0], ids, ids[0], ids[0], ids[0], ids[0], q, q, q, 1.0, programs=1, tile=64)


@pytest.mark.parametrize(("num_tokens", "num_rows"), [(5, 1), (3, 2), (1, 2)])
def test_every_row_has_as_many_tokens(num_tokens: int, num_rows: int) -> None:
    q, pages, ids = (
        torch.zeros(num_tokens, 2, 64),
        torch.zeros(2, 1, 64, 64),
        torch.zeros(1, num_rows, dtype=torch.int32),
    )
    with pytest.raises(
        ValueError, match=f"{num_tokens} tokens of {num_rows} rows: every row must have the same number"
    ):
        attn_decode(q, pages, pages, ids[0], ids, ids[0], ids[0], ids[0], ids[0], q, q, q, 1.0, programs=1, tile=64)
