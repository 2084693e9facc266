"""Every launch that the worker makes, by name, as calls on meta tensors (see `resources`).

The shapes are those of the five models of bench/gpu.py, and of the head sizes and group sizes that other models have. A
launch that is not here is not shipped: the resource table, and the compilation at start-up, know it from this list.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial

import torch

from actorllm_kernels.embed import embed
from actorllm_kernels.kv_copy import launch_kv_copy
from actorllm_kernels.qknorm_rope_kv import qknorm_rope_kv
from actorllm_kernels.rmsnorm import rmsnorm
from actorllm_kernels.silu_mul import activation_mul
from actorllm_kernels.step_prep import step_prep

PAGE = 64
"""Tokens per block of the cache."""
I32, I64, F32 = torch.int32, torch.int64, torch.float32

SHIPPED: dict[str, Callable[[], None]] = {}


def _meta(*shape: int, dtype: torch.dtype = torch.bfloat16) -> torch.Tensor:
    return torch.empty(shape, dtype=dtype, device="meta")


def _rmsnorm(size: int, has_residual: bool, pdl: bool) -> None:
    x, residual = _meta(32, size), _meta(32, size) if has_residual else None
    rmsnorm(x, _meta(size), 1e-6, x, residual, pdl=pdl)


for size in (1024, 1536, 2048, 4096):
    SHIPPED[f"rmsnorm-{size}-residual-pdl"] = partial(_rmsnorm, size, True, True)
SHIPPED["rmsnorm-4096-residual"] = partial(_rmsnorm, 4096, True, False)
SHIPPED["rmsnorm-4096-pdl"] = partial(_rmsnorm, 4096, False, True)


def _qknorm_rope_kv(num_tokens: int, num_heads: int, num_kv_heads: int, dim: int, has_norm: bool) -> None:
    cache = _meta(100, 2, num_kv_heads, PAGE, dim)
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
SHIPPED["activation_mul-3072-silu"] = lambda: activation_mul(_meta(33, 6144), _meta(33, 3072))
SHIPPED["activation_mul-14336-silu-pdl"] = lambda: activation_mul(_meta(64, 28672), _meta(64, 14336), pdl=True)
SHIPPED["activation_mul-3072-gelu_tanh"] = lambda: activation_mul(_meta(33, 6144), _meta(33, 3072), "gelu_tanh")
SHIPPED["embed-1024-pdl"] = lambda: embed(_meta(32, dtype=I32), _meta(151936, 1024), _meta(32, 1024), pdl=True)
SHIPPED["kv_copy"] = lambda: launch_kv_copy(_meta(28, 100, 2, 8, PAGE, 128), _meta(3, 2, dtype=I32))


def _step_prep() -> None:
    columns = [_meta(32, dtype=kind) for kind in (I32, I32, I64, I32)]
    table = _meta(600, 640, dtype=I32)
    step_prep(_meta(32, dtype=I32), _meta(600, dtype=I32), _meta(600, dtype=I32), table, PAGE, *columns, pdl=True)


SHIPPED["step_prep-pdl"] = _step_prep
