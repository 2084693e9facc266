"""Launches that stand for those of the worker, by name, as calls on meta tensors (see `gates`).

Every entry of the table of configurations is in at least one of them. So are all ways to launch a kernel: with and without
each fused part, as a dependent or not, by blocks of rows. Shapes are those of the five models of bench/gpu.py, and of the head
sizes and group sizes that other models have. A slow test compiles all launches of the five models.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

import torch

from actorllm_kernels.attn_decode import attn_decode, division
from actorllm_kernels.attn_prefill import attn_prefill
from actorllm_kernels.choose_experts import choose_experts
from actorllm_kernels.edit_logits import Edits, Penalties, edit_logits
from actorllm_kernels.embed import embed
from actorllm_kernels.group_pairs import group_pairs
from actorllm_kernels.grouped_gemm import grouped_gemm
from actorllm_kernels.kv_clear import kv_clear
from actorllm_kernels.kv_copy import launch_kv_copy
from actorllm_kernels.latent_decode import heads_together, latent_decode
from actorllm_kernels.latent_prefill import latent_prefill
from actorllm_kernels.latent_rope_kv import latent_rope_kv
from actorllm_kernels.lm_head_sample import lm_head_sample
from actorllm_kernels.lora_expand import lora_expand
from actorllm_kernels.lora_shrink import lora_shrink
from actorllm_kernels.plan_decode import plan_decode
from actorllm_kernels.qknorm_rope_kv import qknorm_rope_kv
from actorllm_kernels.quantize_rows import quantize_rows, scale_sums
from actorllm_kernels.quantized_gemm import dequantize, quantized_gemm
from actorllm_kernels.rmsnorm import rmsnorm
from actorllm_kernels.router_scores import router_scores
from actorllm_kernels.sample_pick import Offers, SamplingState, sample_pick
from actorllm_kernels.sample_topk_topp import FilterScratch, FilterState, collect, cut, draw_tiles, tile_maxima, weigh
from actorllm_kernels.silu_mul import activation_mul
from actorllm_kernels.skinny_gemm import SplitScratch, skinny_gemm
from actorllm_kernels.step_prep import step_prep
from actorllm_kernels.sum_experts import sum_experts
from actorllm_kernels.top_logprobs import launch_ranks, launch_top_logprobs

PAGE = 64
"""Tokens per block of the cache."""
I32, I64, F32, BF16 = torch.int32, torch.int64, torch.float32, torch.bfloat16
CODES = torch.uint8
"""Of a cache in floats of 8 bits."""

SHIPPED: dict[str, Callable[[], None]] = {}


def _meta(*shape: int, dtype: torch.dtype = BF16) -> torch.Tensor:
    return torch.empty(shape, dtype=dtype, device="meta")


def _rmsnorm(size: int, has_residual: bool, pdl: bool) -> None:
    x, residual = _meta(32, size), _meta(32, size) if has_residual else None
    rmsnorm(x, _meta(size, dtype=F32), 1e-6, x, residual, pdl=pdl)


for size in (1024, 1536, 2048, 4096):
    SHIPPED[f"rmsnorm-{size}-residual-pdl"] = partial(_rmsnorm, size, True, True)
SHIPPED["rmsnorm-4096-residual"] = partial(_rmsnorm, 4096, True, False)
SHIPPED["rmsnorm-4096"] = partial(_rmsnorm, 4096, False, False)
SHIPPED["rmsnorm-4096-pdl"] = partial(_rmsnorm, 4096, False, True)
SHIPPED["rmsnorm-1536-columns-pdl"] = lambda: rmsnorm(
    _meta(32, 2112)[:, :1536], _meta(1536, dtype=F32), 1e-6, _meta(32, 1536), pdl=True
)


def _qknorm_rope_kv(
    num_tokens: int, num_heads: int, num_kv_heads: int, dim: int, has_norm: bool, kind: torch.dtype = BF16
) -> None:
    cache = _meta(100, 2, num_kv_heads, PAGE, dim, dtype=kind)
    qknorm_rope_kv(
        _meta(num_tokens, (num_heads + 2 * num_kv_heads) * dim),
        _meta(num_tokens, dtype=I32),
        _meta(num_tokens, dtype=I64),
        _meta(1000, dim // 2, dtype=F32),
        _meta(1000, dim // 2, dtype=F32),
        _meta(num_tokens, num_heads, dim),
        cache[:, 0],
        cache[:, 1],
        (_meta(dim), _meta(dim)) if has_norm else None,
        pdl=num_tokens <= 32,
    )


SHIPPED["qknorm_rope_kv-32-16x8x128-norm"] = partial(_qknorm_rope_kv, 32, 16, 8, 128, True)  # Qwen3-0.6B
SHIPPED["qknorm_rope_kv-33-16x8x128-norm"] = partial(_qknorm_rope_kv, 33, 16, 8, 128, True)
SHIPPED["qknorm_rope_kv-32-32x8x64"] = partial(_qknorm_rope_kv, 32, 32, 8, 64, False)  # Llama-3.2-1B
SHIPPED["qknorm_rope_kv-33-32x8x80"] = partial(_qknorm_rope_kv, 33, 32, 8, 80, False)
SHIPPED["qknorm_rope_kv-32-12x2x128"] = partial(_qknorm_rope_kv, 32, 12, 2, 128, False)  # Qwen2.5-1.5B
SHIPPED["qknorm_rope_kv-32-16x8x128-norm-float8"] = partial(_qknorm_rope_kv, 32, 16, 8, 128, True, CODES)
SHIPPED["qknorm_rope_kv-33-32x8x64-float8"] = partial(_qknorm_rope_kv, 33, 32, 8, 64, False, CODES)
SHIPPED["activation_mul-3072-silu"] = lambda: activation_mul(_meta(33, 6144), _meta(33, 3072))
SHIPPED["activation_mul-14336-silu-pdl"] = lambda: activation_mul(_meta(64, 28672), _meta(64, 14336), pdl=True)
SHIPPED["activation_mul-3072-gelu_tanh"] = lambda: activation_mul(_meta(33, 6144), _meta(33, 3072), "gelu_tanh")
SHIPPED["embed-1024-pdl"] = lambda: embed(_meta(32, dtype=I32), _meta(151936, 1024), _meta(32, 1024), pdl=True)


def _kv_clear(pdl: bool) -> None:
    kv_clear(_meta(28, 100, 2, 8, PAGE, 128), _meta(32, dtype=I64), _meta(32, dtype=I32), pdl=pdl)


SHIPPED["kv_clear-pdl"] = partial(_kv_clear, True)
SHIPPED["kv_clear"] = partial(_kv_clear, False)
SHIPPED["kv_copy"] = lambda: launch_kv_copy(_meta(28, 100, 2, 8, PAGE, 128), _meta(3, 2, dtype=I32))


def _step_prep() -> None:
    columns = [_meta(32, dtype=kind) for kind in (I32, I32, I64, I32)]
    table = _meta(600, 640, dtype=I32)
    step_prep(_meta(32, dtype=I32), _meta(600, dtype=I32), _meta(600, dtype=I32), table, PAGE, *columns, pdl=True)


SHIPPED["step_prep-pdl"] = _step_prep


def _attn_decode(
    num_rows: int,
    num_heads: int,
    num_kv_heads: int,
    dim: int,
    q_len: int = 1,
    window: int = 0,
    softcap: float = 0.0,
    has_sinks: bool = False,
    kind: torch.dtype = BF16,
    packed: str = "",
    skipped: int = 0,
) -> None:
    """packed: "norm" or "rope", for rows of queries, key and value that are yet to be normed or rotated; "": queries."""
    out, cache = _meta(num_rows * q_len, num_heads, dim), _meta(100, 2, num_kv_heads, PAGE, dim, dtype=kind)
    q = _meta(num_rows, (num_heads + 2 * num_kv_heads) * dim) if packed else out
    norms = (_meta(dim), _meta(dim)) if packed == "norm" else None
    partials = _meta(2000, q_len * num_heads // num_kv_heads, dim, dtype=F32)
    rows, ends, quota = _meta(num_rows, dtype=I32), _meta(num_rows + 1, dtype=I32), _meta(1, dtype=I32)
    programs, tile = division(q.device, dim, q_len * num_heads // num_kv_heads)
    sinks = _meta(num_heads) if has_sinks else None
    attn_decode(
        q,
        cache[:, 0],
        cache[:, 1],
        rows,
        _meta(600, 640, dtype=I32),
        rows,
        ends,
        quota,
        _meta(num_rows * num_kv_heads, dtype=I32),
        out,
        partials,
        partials[..., 0],
        0.1,
        window=window,
        skipped=skipped,
        softcap=softcap,
        sinks=sinks,
        rope=(_meta(1000, dim // 2, dtype=F32),) * 2 if packed else None,
        norms=norms,
        programs=programs,
        tile=tile,
        pdl=True,
    )


def _plan_decode(num_rows: int, window: int) -> None:
    lengths, ends, quota = _meta(num_rows, dtype=I32), _meta(num_rows + 1, dtype=I32), _meta(1, dtype=I32)
    plan_decode(lengths, ends, quota, 660, 8, tile=64, window=window, pdl=True)


SHIPPED["plan_decode-512-pdl"] = partial(_plan_decode, 512, 0)
SHIPPED["plan_decode-512-window-pdl"] = partial(_plan_decode, 512, 4096)
for shape in ((16, 8, 128), (32, 8, 128), (32, 8, 64), (12, 2, 128), (32, 8, 80), (32, 8, 96), (8, 4, 256), (6, 2, 32)):
    SHIPPED[f"attn_decode-256-{'x'.join(map(str, shape))}-pdl"] = partial(_attn_decode, 256, *shape)
for shape in ((20, 1, 32), (40, 2, 64), (48, 1, 128), (24, 1, 256)):  # more than 16 query heads per key-value head
    SHIPPED[f"attn_decode-256-{'x'.join(map(str, shape))}-pdl"] = partial(_attn_decode, 256, *shape)
SHIPPED["attn_decode-512-32x8x128-pdl"] = partial(_attn_decode, 512, 32, 8, 128)
for shape in ((16, 8, 128), (32, 8, 64), (8, 4, 256)):
    name = f"attn_decode-256-{'x'.join(map(str, shape))}-float8-pdl"
    SHIPPED[name] = partial(_attn_decode, 256, *shape, kind=CODES)
SHIPPED["attn_decode-32-32x8x128-q4-pdl"] = partial(_attn_decode, 32, 32, 8, 128, 4)
SHIPPED["attn_decode-32-28x4x128-q4-pdl"] = partial(_attn_decode, 32, 28, 4, 128, 4)
SHIPPED["attn_decode-256-32x8x128-window-pdl"] = partial(_attn_decode, 256, 32, 8, 128, 1, 4096)
SHIPPED["attn_decode-256-8x4x256-window-softcap-pdl"] = partial(_attn_decode, 256, 8, 4, 256, 1, 4096, 50.0)
SHIPPED["attn_decode-256-64x8x64-window-sinks-pdl"] = partial(_attn_decode, 256, 64, 8, 64, 1, 128, 0.0, True)
for shape, packed in (
    ((16, 8, 128), "norm"),
    ((32, 8, 128), "rope"),
    ((32, 8, 64), "rope"),
    ((12, 2, 128), "rope"),
    ((32, 8, 80), "norm"),
    ((8, 4, 256), "norm"),
    ((6, 2, 32), "rope"),
    ((40, 2, 64), "rope"),
):
    name = f"attn_decode-256-{'x'.join(map(str, shape))}-{packed}-pdl"
    SHIPPED[name] = partial(_attn_decode, 256, *shape, packed=packed)
SHIPPED["attn_decode-256-64x8x64-window-sinks-rope-pdl"] = partial(
    _attn_decode, 256, 64, 8, 64, 1, 128, 0.0, True, packed="rope"
)
for packed in ("", "rope"):  # of a head that drafts
    name = f"attn_decode-256-32x8x128-skipped{packed and '-'}{packed}-pdl"
    SHIPPED[name] = partial(_attn_decode, 256, 32, 8, 128, packed=packed, skipped=1)


def _attn_prefill(
    num_heads: int,
    num_kv_heads: int,
    dim: int,
    window: int = 0,
    softcap: float = 0.0,
    has_sinks: bool = False,
    by_tma: bool = False,
    kind: torch.dtype = BF16,
    skipped: int = 0,
) -> None:
    out, rows = _meta(1024, num_heads, dim), _meta(3, dtype=I32)
    cache = _meta(100, 2, num_kv_heads, PAGE, dim, dtype=kind)
    q = out.view(num_kv_heads, 1024, -1, dim) if by_tma else out
    table, tiles, sinks = _meta(600, 640, dtype=I32), _meta(32, 2, dtype=I32), _meta(num_heads) if has_sinks else None
    attn_prefill(
        q,
        cache[:, 0],
        cache[:, 1],
        rows,
        table,
        rows,
        rows,
        tiles,
        out,
        0.1,
        window=window,
        skipped=skipped,
        softcap=softcap,
        sinks=sinks,
    )


for shape in ((32, 8, 128), (32, 8, 64), (12, 2, 128), (32, 8, 96), (8, 4, 256), (6, 2, 32)):
    SHIPPED[f"attn_prefill-{'x'.join(map(str, shape))}"] = partial(_attn_prefill, *shape)
for shape in ((32, 8, 128), (32, 8, 64), (8, 4, 256)):
    SHIPPED[f"attn_prefill-{'x'.join(map(str, shape))}-float8"] = partial(_attn_prefill, *shape, kind=CODES)
SHIPPED["attn_prefill-32x8x128-window"] = partial(_attn_prefill, 32, 8, 128, 4096)
SHIPPED["attn_prefill-32x8x128-skipped"] = partial(_attn_prefill, 32, 8, 128, skipped=1)
SHIPPED["attn_prefill-8x4x256-window-softcap"] = partial(_attn_prefill, 8, 4, 256, 4096, 50.0)
SHIPPED["attn_prefill-64x8x64-window-sinks"] = partial(_attn_prefill, 64, 8, 64, 128, 0.0, True)


DEEPSEEK_LITE, DEEPSEEK = (16, 128, 128, 512, 64), (128, 128, 128, 512, 64)
"""Heads, what is not rotated of a query, a value, a latent, and what is rotated: DeepSeek-V2-Lite, and V2, V3, R1."""


def _latent_rope_kv(num_tokens: int, num_heads: int, plain: int, _value: int, rank: int, rotary: int) -> None:
    made = _meta(num_tokens, num_heads * (plain + rotary) + rank + rotary)
    latent_rope_kv(
        made[:, : -rank - rotary].view(num_tokens, num_heads, -1),
        made[:, -rank - rotary :],
        _meta(num_tokens, dtype=I32),
        _meta(num_tokens, dtype=I64),
        _meta(1000, rotary // 2, dtype=F32),
        _meta(1000, rotary // 2, dtype=F32),
        _meta(rank, dtype=F32),
        _meta(num_tokens, num_heads, rank + rotary)[..., rank:],
        _meta(100, PAGE, rank + rotary),
        pdl=True,
    )


def _latent_decode(
    num_rows: int, num_heads: int, _plain: int, _value: int, rank: int, rotary: int, skipped: int = 0
) -> None:
    q, rows, device = _meta(num_rows, num_heads, rank + rotary), _meta(num_rows, dtype=I32), torch.device("meta")
    heads = heads_together(num_heads, device)
    partials = _meta(2000, heads.group, rank, dtype=F32)
    latent_decode(
        q,
        _meta(100, PAGE, rank + rotary),
        rows,
        _meta(600, 640, dtype=I32),
        rows,
        _meta(num_rows + 1, dtype=I32),
        _meta(1, dtype=I32),
        _meta(num_rows * heads.num_groups, dtype=I32),
        _meta(num_rows, num_heads, rank),
        partials,
        partials[..., 0],
        0.1,
        skipped=skipped,
        programs=heads.division.programs,
        tile=heads.division.tile,
        pdl=True,
    )


def _latent_prefill(num_heads: int, _plain: int, _value: int, rank: int, rotary: int, skipped: int = 0) -> None:
    rows = _meta(3, dtype=I32)
    latent_prefill(
        _meta(1024, num_heads, rank + rotary),
        _meta(100, PAGE, rank + rotary),
        rows,
        _meta(600, 640, dtype=I32),
        rows,
        rows,
        _meta(32, 2, dtype=I32),
        _meta(1024, num_heads, rank),
        0.1,
        skipped=skipped,
    )


for of_heads in (DEEPSEEK_LITE, DEEPSEEK):
    words = "x".join(map(str, of_heads))
    SHIPPED[f"latent_rope_kv-32-{words}-pdl"] = partial(_latent_rope_kv, 32, *of_heads)
    SHIPPED[f"latent_decode-256-{words}-pdl"] = partial(_latent_decode, 256, *of_heads)
    SHIPPED[f"latent_prefill-{words}"] = partial(_latent_prefill, *of_heads)
SHIPPED[f"latent_decode-256-{words}-skipped-pdl"] = partial(_latent_decode, 256, *DEEPSEEK, skipped=1)
SHIPPED[f"latent_prefill-{words}-skipped"] = partial(_latent_prefill, *DEEPSEEK, skipped=1)


def _skinny_gemm(num_rows: int, num_outputs: int, num_inputs: int, what: str) -> None:
    x, y = _meta(num_rows, num_inputs), _meta(num_rows, num_outputs)
    skinny_gemm(
        x,
        _meta(2 * num_outputs if "gated" in what else num_outputs, num_inputs),
        y,
        norm=_meta(num_inputs, dtype=F32) if "norm" in what else None,
        bias=_meta(num_outputs) if "bias" in what else None,
        residual=y if "residual" in what else None,
        activation="silu" if "gated" in what else "",
        scratch=SplitScratch.empty(x.device),
        pdl=True,
    )


for rows, outputs, inputs, what in (
    (16, 1024, 2048, "residual"),  # Qwen3-0.6B
    (16, 1024, 3072, "residual"),
    (8, 1024, 3072, "residual"),
    (16, 1536, 8960, "residual"),  # Qwen2.5-1.5B
    (16, 1280, 2048, "norm-bias"),
    (16, 1536, 1024, "norm-gated"),
):
    SHIPPED[f"skinny_gemm-{rows}-{outputs}x{inputs}-{what}-pdl"] = partial(_skinny_gemm, rows, outputs, inputs, what)
for outputs, inputs, what in (
    (4096, 1024, "norm"),  # Qwen3-0.6B
    (1024, 3072, "residual"),
    (3072, 1024, "norm-gated"),
    (2048, 1536, "norm-bias"),  # Qwen2.5-1.5B
    (1536, 8960, "residual"),
    (8192, 2048, "norm-gated"),  # Llama-3.2-1B
    (6144, 4096, "norm"),  # Llama-3.1-8B, and nearly Qwen3-8B
    (4096, 4096, "residual"),
    (14336, 4096, "norm-gated"),
    (4096, 14336, "residual"),
    (8192, 28672, "bias-residual"),  # wide, as in larger models
    (28672, 8192, "norm-gated"),
):
    SHIPPED[f"gemv-{outputs}x{inputs}-{what}-pdl"] = partial(_skinny_gemm, 1, outputs, inputs, what)


def _quantized(kind: str, num_outputs: int, num_inputs: int) -> tuple[torch.Tensor, torch.Tensor]:
    """Codes and scales. kind: "int8", "fp8", or "int4g" and the size of the groups."""
    if kind.startswith("int4"):
        blocks, groups = -(-num_inputs // 128), 128 // int(kind.removeprefix("int4g"))
        return _meta(num_outputs, blocks * 64, dtype=torch.uint8), _meta(blocks, num_outputs, 2 * groups)
    codes = _meta(num_outputs, num_inputs, dtype=torch.int8 if kind == "int8" else torch.float8_e4m3fn)
    return codes, _meta(num_outputs, dtype=F32)


def _quantized_gemm(kind: str, num_rows: int, num_outputs: int, num_inputs: int, what: str) -> None:
    x = _meta(num_rows, num_inputs)
    y = _meta(num_rows, num_outputs, dtype=F32 if what == "head" else torch.bfloat16)
    quantized_gemm(
        x,
        *_quantized(kind, 2 * num_outputs if "gated" in what else num_outputs, num_inputs),
        y,
        norm=_meta(num_inputs, dtype=F32) if "norm" in what else None,
        bias=_meta(num_outputs) if "bias" in what else None,
        residual=y if "residual" in what else None,
        activation="silu" if "gated" in what else "",
        scratch=SplitScratch.empty(x.device),
        pdl=True,
    )


for kind, rows, outputs, inputs, what in (
    *((kind, 16, 4096, 1024, "norm") for kind in ("int8", "fp8", "int4g32", "int4g64", "int4g128")),  # Qwen3-0.6B
    *((kind, 16, 1024, 3072, "residual") for kind in ("int8", "int4g32")),
    *((kind, 16, 3072, 1024, "norm-gated") for kind in ("fp8", "int4g32")),
    *((kind, 32, 14336, 4096, "norm-gated") for kind in ("int8", "int4g128")),  # Llama-3.1-8B
    *((kind, 16, 1536, 1024, "norm-gated") for kind in ("int8", "int4g32")),  # narrow
    ("int4g128", 16, 8192, 8192, "bias-residual"),  # wide, as in larger models
    ("int8", 32, 128256, 4096, "head"),
):
    SHIPPED[f"quantized_gemm-{rows}-{outputs}x{inputs}-{kind}-{what}-pdl"] = partial(
        _quantized_gemm, kind, rows, outputs, inputs, what
    )


def _dequantize(kind: str, num_outputs: int, num_inputs: int) -> None:
    dequantize(*_quantized(kind, num_outputs, num_inputs), _meta(num_outputs // 2, num_inputs), 0)


for kind in ("fp8", "int4g32"):
    SHIPPED[f"dequantize-6144x4096-{kind}"] = partial(_dequantize, kind, 6144, 4096)


def _quantize_rows(size: int, kind: torch.dtype, pdl: bool) -> None:
    quantize_rows(_meta(64, size), _meta(64, size, dtype=kind), _meta(64, 1, dtype=F32), pdl=pdl)


def _scale_sums(num_outputs: int, has_bias: bool, pdl: bool) -> None:
    sums, factors, scales = (_meta(64, num_outputs, dtype=I32), _meta(64, 1, dtype=F32), _meta(num_outputs, dtype=F32))
    scale_sums(sums, factors, scales, _meta(64, num_outputs), _meta(num_outputs) if has_bias else None, pdl=pdl)


SHIPPED["quantize_rows-4096-fp8"] = partial(_quantize_rows, 4096, torch.uint8, False)
SHIPPED["quantize_rows-14336-int8-pdl"] = partial(_quantize_rows, 14336, torch.int8, True)
SHIPPED["scale_sums-6144"] = partial(_scale_sums, 6144, False, False)
SHIPPED["scale_sums-4096-bias-pdl"] = partial(_scale_sums, 4096, True, True)


def _lora(what: str, num_tokens: int, in_features: int, outputs: tuple[int, ...], rank: int, pdl: bool) -> None:
    rows, hidden, num_targets = _meta(num_tokens, dtype=I32), _meta(1 << 24, dtype=F32), len(outputs)
    if what == "shrink":
        lora_shrink(
            _meta(num_tokens, in_features), _meta(8, num_targets * rank, in_features), rows, rows, hidden, pdl=pdl
        )
    else:
        up, starts = _meta(8, sum(outputs), rank), _meta(num_targets + 1, dtype=I32)
        y = _meta(num_tokens, sum(outputs))
        lora_expand(hidden, up, starts, rows, rows, y, in_features, max(outputs), pdl=pdl)


for what in ("shrink", "expand"):
    for tokens, inputs, of_targets, rank, pdl in (
        (16, 4096, (4096, 1024, 1024), 16, True),  # Llama-3.1-8B
        (32, 14336, (4096,), 64, True),
        (2048, 4096, (14336, 14336), 16, False),
        (2048, 576, (576, 192, 192), 256, False),
    ):
        name = f"lora_{what}-{tokens}-{'x'.join(map(str, of_targets))}x{inputs}-r{rank}{'-pdl' if pdl else ''}"
        SHIPPED[name] = partial(_lora, what, tokens, inputs, of_targets, rank, pdl)


def _grouped_gemm(
    kind: str, num_tokens: int, num_experts: int, num_active: int, size: int, inner: int, is_down: bool, what: str
) -> None:
    num_pairs = num_tokens * num_active
    outputs, inputs = (size, inner) if is_down else (inner, size)
    rows = outputs if is_down else 2 * outputs
    has_bias, activation = "bias" in what, "" if is_down else "swiglu" if "swiglu" in what else "silu"
    weight, scales = _meta(num_experts, rows, inputs), None
    if kind != "bf16":
        codes, of_one = _quantized(kind, rows, inputs)
        weight = _meta(num_experts, *codes.shape, dtype=codes.dtype)
        scales = _meta(num_experts, *of_one.shape, dtype=of_one.dtype)
    grouped_gemm(
        _meta(num_pairs if is_down else num_tokens, inputs),
        weight,
        scales,
        _meta(num_experts, rows) if has_bias else None,
        _meta(num_pairs, dtype=I32),
        _meta(num_experts + 1, dtype=I32),
        _meta(num_pairs, outputs),
        num_tokens,
        activation=activation,
        swiglu=(1.702, 7.0) if activation == "swiglu" else None,
        pdl=True,
    )


QWEN3_MOE, MIXTRAL, GPT_OSS = (128, 8, 2048, 768), (8, 2, 4096, 14336), (32, 4, 2880, 2880)
"""Experts, those that a token takes, hidden size, and intermediate size: Qwen3-30B-A3B, Mixtral-8x7B, gpt-oss-20b."""
for kind, tokens, model, is_down, what in (
    ("bf16", 1, QWEN3_MOE, False, ""),
    ("bf16", 1, QWEN3_MOE, True, ""),
    ("bf16", 1, MIXTRAL, False, ""),
    ("bf16", 1, GPT_OSS, False, "-bias-swiglu"),
    ("bf16", 1, GPT_OSS, True, "-bias"),
    ("bf16", 1024, QWEN3_MOE, False, ""),
    ("bf16", 1024, GPT_OSS, True, "-bias"),
    *((kind, tokens, QWEN3_MOE, False, "") for kind in ("int8", "fp8", "int4g32") for tokens in (1, 1024)),
):
    name = f"grouped_gemm-{tokens}-{'x'.join(map(str, model))}-{kind}-{'down' if is_down else 'up'}{what}-pdl"
    SHIPPED[name] = partial(_grouped_gemm, kind, tokens, *model, is_down, what)


def _experts(
    what: str, num_tokens: int, num_experts: int, num_active: int, size: int, _inner: int, num_groups: int = 0
) -> None:
    """num_groups: of experts that sigmoids score, beside an MLP of all tokens; 0: none of these."""
    shape = num_tokens, num_active
    numbers, weights = _meta(*shape, dtype=I32), _meta(*shape, dtype=F32)
    scores = _meta(num_tokens, num_experts, dtype=F32)
    if what == "router_scores":
        weight, bias = _meta(num_experts, size, dtype=F32), _meta(num_experts, dtype=F32)
        router_scores(_meta(num_tokens, size), weight, bias, scores, pdl=True)
    elif what == "choose_experts":
        more: dict[str, Any] = {}
        if num_groups:
            correction = _meta(num_experts, dtype=F32)
            more = {
                "correction": correction,
                "num_groups": num_groups,
                "num_active_groups": num_groups // 2,
                "scale": 2.5,
            }
        choose_experts(scores, _meta(num_tokens, dtype=I64), numbers, weights, True, pdl=True, **more)
    elif what == "group_pairs":
        group_pairs(numbers, _meta(numbers.numel(), dtype=I32), _meta(num_experts + 1, dtype=I32), 0, pdl=True)
    else:
        y = _meta(num_tokens, size)
        beside = y if num_groups else None
        sum_experts(_meta(numbers.numel(), size), numbers, weights, y, 0, num_experts, beside, pdl=True)


for what in ("router_scores", "choose_experts", "group_pairs", "sum_experts"):
    for model in (QWEN3_MOE, GPT_OSS):
        SHIPPED[f"{what}-64-{'x'.join(map(str, model))}-pdl"] = partial(_experts, what, 64, *model)
for what in ("choose_experts", "sum_experts"):
    SHIPPED[f"{what}-64-256x8x7168x2048x8-pdl"] = partial(_experts, what, 64, 256, 8, 7168, 2048, 8)  # DeepSeek-V3


def _state() -> SamplingState:
    return SamplingState(*(_meta(600, dtype=kind) for kind in (F32, I64, I32, I32, I32)))


def _lm_head_sample(num_rows: int, vocab_size: int, size: int) -> None:
    offers = Offers.empty(num_rows, vocab_size, torch.device("meta"))
    x, rows = _meta(num_rows, size), _meta(num_rows, dtype=I32)
    lm_head_sample(x, _meta(vocab_size, size), rows, _state(), offers, norm=_meta(size, dtype=F32), pdl=True)


def _sample_pick(num_rows: int, vocab_size: int, pdl: bool) -> None:
    offers = Offers.empty(num_rows, vocab_size, torch.device("meta"))
    rows = _meta(num_rows, dtype=I32)
    sample_pick(offers, rows, _state(), rows, rows, pdl=pdl)


for rows in (16, 32):
    SHIPPED[f"lm_head_sample-{rows}-151936x1024-pdl"] = partial(_lm_head_sample, rows, 151936, 1024)
SHIPPED["lm_head_sample-16-128256x4096-pdl"] = partial(_lm_head_sample, 16, 128256, 4096)
SHIPPED["sample_pick-151936-pdl"] = partial(_sample_pick, 32, 151936, True)
SHIPPED["sample_pick-128256"] = partial(_sample_pick, 32, 128256, False)


CUTOFF = {"weigh": weigh, "collect": collect, "cutoff": cut}


def _sample_topk_topp(vocab_size: int, what: str) -> None:
    meta, logits, rows = torch.device("meta"), _meta(32, vocab_size, dtype=F32), _meta(32, dtype=I32)
    offers, scratch = Offers.empty(32, vocab_size, meta), FilterScratch.empty(32, vocab_size, meta)
    if what == "maxima":
        tile_maxima(logits, scratch, _meta(8, vocab_size // 32, dtype=I32), rows)
    elif what == "mass":
        tile_maxima(logits, scratch, has_mass=True)
    elif what in CUTOFF:
        filters = FilterState(_meta(600, dtype=I32), *(_meta(600, dtype=F32),) * 2)
        CUTOFF[what](logits, rows, _state(), filters, scratch)
    else:
        draw_tiles(logits, rows, _state(), scratch, offers)


for what in ("maxima", "mass", *CUTOFF, "draw"):
    SHIPPED[f"sample_topk_topp-151936-{what}"] = partial(_sample_topk_topp, 151936, what)


def _logits(vocab_size: int, what: str) -> None:
    logits, rows = _meta(32, vocab_size, dtype=F32), _meta(32, dtype=I32)
    scratch = FilterScratch.empty(32, vocab_size, torch.device("meta"))
    floats = _meta(32, dtype=F32)
    if what == "edits":
        edit_logits(logits, Edits(rows, rows, floats, rows), Penalties(floats, floats, floats))
    elif what == "top":
        launch_top_logprobs(logits, rows, scratch, _meta(32, 21, dtype=I32), _meta(32, 21, dtype=F32))
    else:
        launch_ranks(logits, rows, scratch, rows)


SHIPPED["edit_logits-151936"] = partial(_logits, 151936, "edits")
SHIPPED["top_logprobs-151936-20"] = partial(_logits, 151936, "top")
SHIPPED["top_logprobs-151936-ranks"] = partial(_logits, 151936, "ranks")
SHIPPED["sample_topk_topp-128256-cutoff"] = partial(_sample_topk_topp, 128256, "cutoff")
for shape in ((32, 8, 128), (32, 8, 64)):
    SHIPPED[f"attn_prefill-{'x'.join(map(str, shape))}-tma"] = partial(_attn_prefill, *shape, by_tma=True)
