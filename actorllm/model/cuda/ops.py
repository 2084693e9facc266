"""What a step launches, each into tensors that its caller provides: the kernels of `actorllm_kernels`, and products by torch.

On CPU tensors the kernels run in Triton's interpreter where TRITON_INTERPRET=1, and else `host_ops` stands in for them. On a GPU
it stands in for those that were found not to do what they should (`replace`).

No operation here allocates, reads a value on the host or returns one. So a list of them with their arguments is a step. On a
GPU it is captured as a graph; elsewhere `record` collects it, without running it, as a capture would. Everything that may be
inside a graph goes through here, but for what modules of transformers do.
"""

from __future__ import annotations

import functools
import os
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from dataclasses import dataclass
from typing import Any, ParamSpec

import torch

from actorllm.model.cuda import host_ops
from actorllm_kernels import attn_decode as _attn_decode
from actorllm_kernels import attn_prefill as _attn_prefill
from actorllm_kernels import choose_experts as _choose_experts
from actorllm_kernels import edit_logits as _edit_logits
from actorllm_kernels import embed as _embed
from actorllm_kernels import group_pairs as _group_pairs
from actorllm_kernels import grouped_gemm as _grouped_gemm
from actorllm_kernels import kv_clear as _kv_clear
from actorllm_kernels import kv_copy as _kv_copy
from actorllm_kernels import latent_decode as _latent_decode
from actorllm_kernels import latent_prefill as _latent_prefill
from actorllm_kernels import latent_rope_kv as _latent_rope_kv
from actorllm_kernels import lm_head_sample as _lm_head_sample
from actorllm_kernels import lora_expand as _lora_expand
from actorllm_kernels import lora_shrink as _lora_shrink
from actorllm_kernels import plan_decode as _plan_decode
from actorllm_kernels import qknorm_rope_kv as _qknorm_rope_kv
from actorllm_kernels import quantize_rows as _quantize_rows
from actorllm_kernels import quantized_gemm as _quantized_gemm
from actorllm_kernels import reference
from actorllm_kernels import rmsnorm as _rmsnorm
from actorllm_kernels import router_scores as _router_scores
from actorllm_kernels import sample_pick as _sample_pick
from actorllm_kernels import sample_topk_topp as _sample_topk_topp
from actorllm_kernels import silu_mul as _silu_mul
from actorllm_kernels import skinny_gemm as _skinny_gemm
from actorllm_kernels import step_prep as _step_prep
from actorllm_kernels import sum_experts as _sum_experts
from actorllm_kernels import top_logprobs as _top_logprobs

P = ParamSpec("P")

_launches: ContextVar[list[Callable[[], None]] | None] = ContextVar("launches", default=None)


@contextmanager
def record() -> Iterator[list[Callable[[], None]]]:
    """Launches are appended to the list, with their arguments, instead of being run."""
    launches: list[Callable[[], None]] = []
    token = _launches.set(launches)
    try:
        yield launches
    finally:
        _launches.reset(token)


def launchable(function: Callable[P, None]) -> Callable[P, None]:
    """The function itself, or a note of the call where launches are recorded."""

    @functools.wraps(function)
    def launch(*args: P.args, **kwargs: P.kwargs) -> None:
        launches = _launches.get()
        if launches is None:
            function(*args, **kwargs)
        else:
            launches.append(functools.partial(function, *args, **kwargs))

    return launch


Checker = Callable[[str, "Operation", tuple[Any, ...], dict[str, Any]], None]
"""Called instead of an operation, with its name and arguments."""

_checker: ContextVar[Checker | None] = ContextVar("checker", default=None)


@dataclass(slots=True)
class Operation:
    """A kernel, and what computes the same by torch."""

    launcher: Callable[..., None]
    on_host: Callable[..., None]
    is_replaced: bool = False
    """In this process the kernel is not used: it does not do what it should (`proof`)."""


OPERATIONS: dict[str, Operation] = {}


@contextmanager
def checking(checker: Checker) -> Iterator[None]:
    """Kernels are run by the checker."""
    token = _checker.set(checker)
    try:
        yield
    finally:
        _checker.reset(token)


def replace(names: Iterable[str]) -> None:
    """From now on these operations are computed by torch. They read values, so no step that has one can be a graph."""
    for name in names:
        OPERATIONS[name].is_replaced = True


def replaced() -> list[str]:
    """The operations that are computed by torch instead of by their kernel."""
    return [name for name, operation in OPERATIONS.items() if operation.is_replaced]


def _kernel(launcher: Callable[P, None], on_host: Callable[..., None]) -> Callable[P, None]:
    """A kernel, or what stands in for it."""
    name = on_host.__name__
    operation = OPERATIONS[name] = Operation(launcher, on_host)

    @functools.wraps(launcher)
    def run(*args: P.args, **kwargs: P.kwargs) -> None:
        tensor = next(arg for arg in args if isinstance(arg, torch.Tensor))
        if operation.is_replaced and tensor.is_meta:
            return  # a rehearsal: torch computes it, so there is nothing to compile
        if operation.is_replaced or (tensor.device.type == "cpu" and os.environ.get("TRITON_INTERPRET") != "1"):
            operation.on_host(*args, **kwargs)
        elif (checker := _checker.get()) is not None:
            checker(name, operation, args, kwargs)
        else:
            operation.launcher(*args, **kwargs)

    return launchable(run)


attn_decode = _kernel(_attn_decode.attn_decode, host_ops.attn_decode)
attn_prefill = _kernel(_attn_prefill.attn_prefill, host_ops.attn_prefill)
activation_mul = _kernel(_silu_mul.activation_mul, host_ops.activation_mul)
choose_experts = _kernel(_choose_experts.choose_experts, host_ops.choose_experts)
dequantize = _kernel(_quantized_gemm.dequantize, host_ops.dequantize)
draw_tiles = _kernel(_sample_topk_topp.draw_tiles, host_ops.draw_tiles)
edit_logits = _kernel(_edit_logits.edit_logits, host_ops.edit_logits)
embed = _kernel(_embed.embed, host_ops.embed)
find_cutoffs = _kernel(_sample_topk_topp.find_cutoffs, host_ops.find_cutoffs)
group_pairs = _kernel(_group_pairs.group_pairs, host_ops.group_pairs)
grouped_gemm = _kernel(_grouped_gemm.grouped_gemm, host_ops.grouped_gemm)
kv_clear = _kernel(_kv_clear.kv_clear, host_ops.kv_clear)
kv_copy = _kernel(_kv_copy.launch_kv_copy, host_ops.kv_copy)
latent_decode = _kernel(_latent_decode.latent_decode, host_ops.latent_decode)
latent_prefill = _kernel(_latent_prefill.latent_prefill, host_ops.latent_prefill)
latent_rope_kv = _kernel(_latent_rope_kv.latent_rope_kv, host_ops.latent_rope_kv)
lm_head_sample = _kernel(_lm_head_sample.lm_head_sample, host_ops.lm_head_sample)
lora_expand = _kernel(_lora_expand.lora_expand, host_ops.lora_expand)
lora_shrink = _kernel(_lora_shrink.lora_shrink, host_ops.lora_shrink)
plan_decode = _kernel(_plan_decode.plan_decode, host_ops.plan_decode)
qknorm_rope_kv = _kernel(_qknorm_rope_kv.qknorm_rope_kv, host_ops.qknorm_rope_kv)
quantize_rows = _kernel(_quantize_rows.quantize_rows, host_ops.quantize_rows)
quantized_gemm = _kernel(_quantized_gemm.quantized_gemm, host_ops.quantized_gemm)
rmsnorm = _kernel(_rmsnorm.rmsnorm, host_ops.rmsnorm)
router_scores = _kernel(_router_scores.router_scores, host_ops.router_scores)
sample_pick = _kernel(_sample_pick.sample_pick, host_ops.sample_pick)
scale_sums = _kernel(_quantize_rows.scale_sums, host_ops.scale_sums)
skinny_gemm = _kernel(_skinny_gemm.skinny_gemm, host_ops.skinny_gemm)
step_prep = _kernel(_step_prep.step_prep, host_ops.step_prep)
sum_experts = _kernel(_sum_experts.sum_experts, host_ops.sum_experts)
tile_maxima = _kernel(_sample_topk_topp.tile_maxima, host_ops.tile_maxima)
top_logprobs = _kernel(_top_logprobs.top_logprobs, host_ops.top_logprobs)


@launchable
def linear(x: torch.Tensor, weight: torch.Tensor, y: torch.Tensor, bias: torch.Tensor | None = None) -> None:
    """y = x @ weight.T + bias. weight: [out_features, in_features]."""
    if bias is None:
        torch.mm(x, weight.t(), out=y)
    else:
        torch.addmm(bias, x, weight.t(), out=y)


@launchable
def wide_linear(x: torch.Tensor, weight: torch.Tensor, y: torch.Tensor) -> None:
    """The same with y in float32, as it was summed, also where x is narrower."""
    if x.dtype == torch.float32:
        torch.mm(x, weight.t(), out=y)
    elif x.is_cuda:
        torch.mm(x, weight.t(), out_dtype=torch.float32, out=y)
    else:
        y.copy_(torch.mm(x.float(), weight.t().float()))


@launchable
def float8_product(
    codes: torch.Tensor,
    factors: torch.Tensor,
    weight: torch.Tensor,
    scales: torch.Tensor,
    y: torch.Tensor,
    bias: torch.Tensor | None = None,
) -> None:
    """y = (codes * factors) @ (weight * scales).T + bias, in one product of floats of 8 bits.

    Arguments:
        codes: uint8 [num_rows, in_features], the bits of float8_e4m3fn.
        factors: float32 [num_rows, 1].
        weight: float8_e4m3fn [out_features, in_features].
        scales: float32 [1, out_features].
        y: [num_rows, out_features], contiguous; bfloat16 on a GPU.
        bias: [out_features].
    """
    numbers = codes.view(torch.float8_e4m3fn)
    if y.is_cuda:
        torch._scaled_mm(  # sums of float32: those of fewer bits are faster, and off by more than the type of y
            numbers,
            weight.t(),
            scale_a=factors,
            scale_b=scales,
            bias=bias,
            out_dtype=y.dtype,
            use_fast_accum=False,
            out=y,
        )
    else:
        y.copy_(reference.scaled_sums(numbers.float() @ weight.float().t(), factors, scales, bias))


@launchable
def integer_product(codes: torch.Tensor, weight: torch.Tensor, sums: torch.Tensor) -> None:
    """sums = codes @ weight.T, int32. codes: int8 [num_rows, in_features], 17 rows at least; weight: int8."""
    torch._int_mm(codes, weight.t(), out=sums)


@launchable
def products_of_heads(x: torch.Tensor, weights: torch.Tensor, y: torch.Tensor) -> None:
    """y = x @ weights, head by head.

    Arguments:
        x: [num_heads, num_tokens, in_features].
        weights: [num_heads, in_features, out_features].
        y: [num_heads, num_tokens, out_features].
    """
    torch.bmm(x, weights, out=y)


@launchable
def add(x: torch.Tensor, y: torch.Tensor) -> None:
    """x += y."""
    x.add_(y)


@launchable
def copy(source: torch.Tensor, to: torch.Tensor) -> None:
    """to = source, of the same shape; converts the type."""
    to.copy_(source)


@launchable
def row_sums(x: torch.Tensor, sums: torch.Tensor) -> None:
    """x: [num_rows, size] float32; sums: [num_rows]."""
    torch.sum(x, 1, out=sums)


@launchable
def finite_rows(x: torch.Tensor, is_finite: torch.Tensor) -> None:
    """x: [num_rows, size]; is_finite: int32 [num_rows], 1 where all numbers of a row are."""
    is_finite.copy_(torch.isfinite(x.sum(1, dtype=torch.float32)))


@launchable
def take_rows(kept: torch.Tensor, rows: torch.Tensor, places: torch.Tensor, taken: torch.Tensor) -> None:
    """taken: of each row what is kept for its slot.

    Arguments:
        kept: [1 + num_slots, size], whose first row is for rows of no slot.
        rows: int32 [num_rows], slots or -1.
        places: int64 [num_rows], written: where each is kept.
        taken: [num_rows, size], written.
    """
    torch.add(rows, 1, out=places)
    torch.index_select(kept, 0, places, out=taken)


@launchable
def keep_rows(x: torch.Tensor, places: torch.Tensor, kept: torch.Tensor) -> None:
    """kept[places] = x."""
    kept.index_copy_(0, places, x)


@launchable
def blank_first(x: torch.Tensor, positions: torch.Tensor, last: int, is_first: torch.Tensor) -> None:
    """x = 0 where the position is at most `last`. is_first: bool [num_rows], written."""
    torch.le(positions, last, out=is_first)
    x.masked_fill_(is_first.unsqueeze(1), 0)


@launchable
def spread(narrow: torch.Tensor, ids: torch.Tensor, rest: float, wide: torch.Tensor) -> None:
    """wide[:, ids] = narrow, and `rest` elsewhere."""
    wide.fill_(rest)
    wide.index_copy_(1, ids, narrow)
