"""The end of a step: the LM head with the draw in it, against cuBLAS and argmax; filters and logprobs on logits."""

from __future__ import annotations

import itertools
from collections.abc import Callable
from functools import partial
from typing import Any

import torch
import torch.nn.functional as F

from actorllm_kernels.lm_head_sample import lm_head_sample
from actorllm_kernels.rmsnorm import rmsnorm
from actorllm_kernels.sample_pick import Offers, sample_pick
from actorllm_kernels.sample_topk_topp import FilterScratch, FilterState, sample_topk_topp, tile_maxima
from actorllm_kernels.top_logprobs import top_logprobs

from .clock import Bench, Call
from .inputs import I32, bf16, state_table
from .models import Shape
from .search import Case, choose, measure, result


def run(bench: Bench, shapes: list[Shape], bandwidth: float) -> dict[str, Any]:
    heads, filters = [], []
    for shape in shapes:
        weight, norm = bf16(shape.vocab, shape.hidden, device=bench.device), bf16(shape.hidden, device=bench.device)
        num_bytes = 2 * weight.numel()
        for rows in bench.pick((1, 16, 32, 64), (2,)):
            x, slots = bf16(rows, shape.hidden, device=bench.device), torch.arange(rows, dtype=I32, device=bench.device)
            state, offers = state_table(rows, bench.device), Offers.empty(rows, shape.vocab, bench.device)
            tokens, is_finite = (torch.zeros(rows, dtype=I32, device=bench.device) for _ in range(2))
            normed = torch.empty_like(x)

            def ours(
                x=x,
                slots=slots,
                state=state,
                offers=offers,
                tokens=tokens,
                is_finite=is_finite,
                weight=weight,
                norm=norm,
            ) -> None:  # type: ignore[no-untyped-def]
                lm_head_sample(x, weight, slots, state, offers, norm=norm, pdl=bench.pdl)
                sample_pick(offers, slots, state, tokens, is_finite, pdl=bench.pdl)

            def theirs(x=x, normed=normed, weight=weight, norm=norm) -> None:  # type: ignore[no-untyped-def]
                rmsnorm(x, norm, 1e-6, normed)
                F.linear(normed, weight).argmax(1)

            mine, cublas = bench.seconds(ours), bench.seconds(theirs)
            heads.append(
                {
                    "model": shape.name,
                    "rows": rows,
                    "head and draw, us": mine * 1e6,
                    "cuBLAS and argmax, us": cublas * 1e6,
                    "ratio": mine / cublas,
                    "share of bandwidth": num_bytes / mine / bandwidth,
                }
            )
        del weight
        bench.empty_cache()
    for vocab in bench.pick((128256, 151936), (600,)):
        for rows in bench.pick((1, 32, 128, 256), (2,)):
            times = {name: bench.seconds(call) * 1e6 for name, call in sampler_calls(bench, rows, vocab).items()}
            filters.append({"vocabulary": vocab, "rows": rows, **{f"{name}, us": us for name, us in times.items()}})
            bench.empty_cache()
    return {"head": heads, "filters": filters}


def search(bench: Bench, shapes: list[Shape]) -> dict[str, Any]:
    """Blocks, warps and stages of the LM head with the draw."""
    cases = [
        Case(f"{shape.name}, {rows} rows", "few" if rows <= 16 else "many", partial(head_calls, bench, shape, rows))
        for shape in shapes
        for rows in bench.pick((1, 16, 32, 64), (2,))
    ]
    candidates = [
        dict(zip(("BLOCK_K", "num_warps", "num_stages"), one, strict=True))
        for one in bench.pick(itertools.product((32, 64, 128), (4, 8), (2, 3, 4)), [(32, 8, 2)])
    ]
    rows = measure(bench, "lm_head_sample", cases, candidates)
    return result("lm_head_sample", rows, choose(rows, ("BLOCK_K", "num_warps", "num_stages")))


def head_calls(bench: Bench, shape: Shape, rows: int) -> list[Call]:
    """The head alone, without `sample_pick`. The weights of every model are more than the second-level cache holds."""
    x, slots = bf16(rows, shape.hidden, device=bench.device), torch.arange(rows, dtype=I32, device=bench.device)
    weight, norm = bf16(shape.vocab, shape.hidden, device=bench.device), bf16(shape.hidden, device=bench.device)
    state, offers = state_table(rows, bench.device), Offers.empty(rows, shape.vocab, bench.device)
    return [partial(lm_head_sample, x, weight, slots, state, offers, norm=norm, pdl=bench.pdl)]


def sampler_calls(bench: Bench, rows: int, vocab: int) -> dict[str, Callable[[], None]]:
    device = bench.device
    logits, slots = torch.randn(rows, vocab, device=device), torch.arange(rows, dtype=I32, device=device)
    state, offers, scratch = (
        state_table(rows, device),
        Offers.empty(rows, vocab, device),
        FilterScratch.empty(rows, vocab, device),
    )
    tokens, is_finite, ranks = (torch.zeros(rows, dtype=I32, device=device) for _ in range(3))
    num_top = bench.pick(20, 3)
    ids, logprobs = (
        torch.zeros(rows, num_top + 1, dtype=I32, device=device),
        torch.zeros(rows, num_top + 1, device=device),
    )
    kept = FilterState(
        *(
            torch.full((rows,), value, device=device, dtype=kind)
            for value, kind in ((50, I32), (0.9, torch.float32), (0.05, torch.float32))
        )
    )

    def filtered() -> None:
        sample_topk_topp(logits, slots, state, kept, scratch, offers)
        sample_pick(offers, slots, state, tokens, is_finite)

    def reported() -> None:
        tile_maxima(logits, scratch, has_mass=True)
        top_logprobs(logits, tokens, scratch, ids, logprobs, ranks)

    def sorted_() -> None:
        torch.sort(logits, descending=True)

    return {"top-k, top-p, min-p": filtered, f"{num_top} logprobs": reported, "torch.sort alone": sorted_}
