"""The kernels of attention over latents in the interpreter, each against its plain statement."""

from __future__ import annotations

import pytest
import torch

from actorllm_kernels import configs, reference
from actorllm_kernels.attn_decode import attn_decode
from actorllm_kernels.latent_decode import heads_together, latent_decode
from actorllm_kernels.latent_prefill import heads_of_prompts, latent_prefill
from actorllm_kernels.latent_rope_kv import latent_rope_kv
from actorllm_kernels.plan_decode import plan_decode
from tests.effort import each_value
from tests.kernels.cases import run_latent_decode, run_latent_prefill
from tests.kernels.closeness import DTYPES, assert_close
from tests.kernels.paged import Paged

EDGES = [0, 1, 31, 32, 33, 16, 53, 128, 4]


@pytest.mark.parametrize("programs", [1, 7, 40])
def test_any_division_among_programs_gives_the_same(programs: int) -> None:
    run_latent_decode(EDGES, programs)


@pytest.mark.parametrize(("dtype", "num_heads", "group"), each_value(DTYPES, [(16, 16), (5, 5), (6, 3), (3, 1)]))
def test_heads_share_a_row_of_the_cache(num_heads: int, group: int, dtype: torch.dtype) -> None:
    run_latent_decode([33, 70], 4, num_heads=num_heads, group=group, dtype=dtype)


@pytest.mark.parametrize(("rank", "rotary"), [(12, 8), (64, 16), (512, 64)])
def test_sizes_of_a_row(rank: int, rotary: int) -> None:
    run_latent_decode([33, 70], 3, rank=rank, rotary=rotary)
    run_latent_prefill([(9, 40), (3, 3)], rank=rank, rotary=rotary)


@pytest.mark.parametrize(("dtype", "num_heads", "block_m"), each_value(DTYPES, [(4, 32), (5, 16)]))
def test_chunks_of_prompts(num_heads: int, block_m: int, dtype: torch.dtype) -> None:
    """Behind a history and without one, shorter than a program's tokens, over borders of tiles and of blocks."""
    run_latent_prefill([(1, 1), (1, 65), (12, 33), (20, 20)], num_heads=num_heads, block_m=block_m, dtype=dtype)


def test_the_first_rows_are_skipped() -> None:
    for programs in (1, 7):
        run_latent_decode([0, 2, 16, 17, 97], programs, skipped=1)
    run_latent_prefill([(4, 5), (32, 33), (16, 48), (40, 41), (1, 2)], skipped=1)


def test_heads_that_do_not_fit_into_one_program() -> None:
    run_latent_prefill([(2, 2), (3, 40)], num_heads=32, block_m=16)


def test_it_is_attention_of_one_key_head_whose_values_are_parts_of_its_keys() -> None:
    """What the kernel for keys and values computes."""
    rank, rotary, lengths, programs = 48, 16, [40, 3, 97], 5
    cache = Paged.make(lengths, 1, rank + rotary, 32, torch.float32)
    q = torch.randn(3, 4, rank + rotary)
    ends, quota = torch.zeros(4, dtype=torch.int32), torch.zeros(1, dtype=torch.int32)
    plan_decode(cache.seq_lens, ends, quota, programs, 1, tile=16)
    of_cache = cache.rows, cache.table, cache.seq_lens, ends, quota, torch.zeros(3, dtype=torch.int32)

    def parts(size: int) -> tuple[torch.Tensor, torch.Tensor]:
        return torch.zeros(2 * programs, 4, size), torch.zeros(2 * programs, 4)

    both, ours = torch.zeros_like(q), torch.zeros(3, 4, rank)
    attn_decode(q, cache.keys, cache.keys, *of_cache, both, *parts(rank + rotary), 0.1, programs=programs, tile=16)
    latent_decode(q, cache.keys[:, 0], *of_cache, ours, *parts(rank), 0.1, programs=programs, tile=16)
    assert_close(ours, both[..., :rank])


@pytest.mark.parametrize(("dtype", "num_heads"), each_value(DTYPES, [3, 20]))
def test_queries_are_turned_and_tokens_written(num_heads: int, dtype: torch.dtype) -> None:
    plain, rank, rotary, page, num_tokens = 24, 48, 16, 8, 5
    made = torch.randn(num_tokens, num_heads * (plain + rotary) + rank + rotary).to(dtype)
    queries, tokens = made[:, : -rank - rotary].view(num_tokens, num_heads, -1), made[:, -rank - rotary :]
    angles = torch.outer(torch.arange(40.0), torch.rand(rotary // 2))
    norm = torch.randn(rank)
    positions, slots = torch.tensor([7, 0, 39, 3, 5]), torch.tensor([3 * page + 7, page, -1, 0, 2])
    wide = torch.full((num_tokens, num_heads, rank + rotary), 9.0, dtype=dtype)
    pool = torch.full((6, 2, page, rank + rotary), 9.0, dtype=dtype)
    latent_rope_kv(
        queries, tokens, positions.int(), slots, angles.cos(), angles.sin(), norm, wide[..., rank:], pool[:, 0], 1e-5
    )
    cos, sin = angles.cos().double(), angles.sin().double()
    assert_close(wide[..., rank:], reference.rotated_pairs(queries[..., plain:].double(), positions, cos, sin))
    assert (wide[..., :rank] == 9).all()
    expected = torch.full((6, page, rank + rotary), 9.0, dtype=torch.float64)
    rows = reference.latent_tokens(tokens.double(), positions, cos, sin, norm.double(), 1e-5)
    reference.write_pages(expected.unsqueeze(1), slots, rows.unsqueeze(1))
    assert_close(pool[:, 0], expected)
    assert (pool[:, 1] == 9).all(), "nothing of another layer is written"


@pytest.mark.parametrize("architecture", configs.PARTS)
@pytest.mark.parametrize("num_heads", [16, 20, 64, 128])
def test_every_head_is_in_a_group(num_heads: int, architecture: str) -> None:
    with configs.target(architecture):
        heads, (group, tokens) = (
            heads_together(num_heads, torch.device("meta")),
            heads_of_prompts(num_heads, torch.device("meta")),
        )
    assert heads.group * heads.num_groups == num_heads
    assert num_heads % group == 0
    assert tokens >= 1


def test_what_cannot_be_is_refused() -> None:
    q, pages, out = torch.zeros(1, 2, 64), torch.zeros(2, 40, 64), torch.zeros(1, 2, 48)
    ids = torch.zeros(1, 1, dtype=torch.int32)
    more = ids[0], ids, ids[0]
    with pytest.raises(ValueError, match="block_size=40 is no multiple of the tile of 64 rows"):
        latent_decode(q, pages, *more, ids[0], ids[0], ids[0], out, out, out, 1.0, programs=1, tile=64)
    with pytest.raises(ValueError, match="block_size=40 is no multiple of the tile of 16 rows"):
        latent_prefill(q, pages, *more, ids[0], ids, out, 1.0, tile=16)
    wide, pages = torch.zeros(1, 2, 600), torch.zeros(2, 64, 600)
    with pytest.raises(ValueError, match=r"rows of 520 \+ 80 numbers are too wide: 512 \+ 64 is the most"):
        latent_prefill(wide, pages, *more, ids[0], ids, wide[..., :520], 1.0, tile=16)
