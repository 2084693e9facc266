"""The building blocks of the fused forwards, each in the form that was fastest on CPU (bench/model.py measures them).

All of them work on a flat list of tokens, [num_tokens, ...], in the type of the model, and run under inference mode.
Called by `decoder`.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import cache, partial
from typing import Any

import torch

from actorllm.errors import UnsupportedModelError
from actorllm.model.linear import Linear, LinearWeight
from actorllm.model.linear.dense import Dense
from actorllm.model.linear.side_by_side import SideBySide, SideBySideLinear
from actorllm.model.quantization.int4 import Int4
from actorllm.model.quantization.int4pack import Int4Linear
from actorllm.model.quantization.int8 import Int8
from actorllm.model.quantization.onednn import Int8Linear

_linear = torch.ops.mkldnn._linear_pointwise.default
_pack = torch.ops.mkldnn._reorder_linear_weight


class PackedLinear(Linear):
    """A dense weight, packed once into oneDNN's own layout.

    Against `F.linear` this is 2 to 3 times faster for a few rows and at least as fast for many, in bfloat16 and in
    float32. The packed copy is the only one that is kept.
    """

    __slots__ = ("bias", "packed")

    def __init__(self, weight: torch.Tensor, bias: torch.Tensor | None = None) -> None:
        super().__init__(weight.shape[0], weight.shape[1], weight.numel() * weight.element_size())
        self.packed: torch.Tensor = _pack(weight.contiguous(), 1)  # opaque; [out_features, in_features]
        self.bias = bias  # [out_features]

    def __call__(self, x: torch.Tensor) -> torch.Tensor:
        out: torch.Tensor = _linear(x, self.packed, self.bias, "none", _NO_SCALARS, "")
        return out  # [num_tokens, out_features]


_NO_SCALARS: list[Any] = []


class WidenedLinear(PackedLinear):
    """A weight in float16 or bfloat16, whose products are computed in float32 and rounded.

    Where oneDNN has none of that type, or slower ones. The copy that is kept is float32, so it takes twice the memory.
    """

    __slots__ = ()

    def __init__(self, weight: torch.Tensor, bias: torch.Tensor | None = None) -> None:
        super().__init__(weight.float(), None if bias is None else bias.float())

    def __call__(self, x: torch.Tensor) -> torch.Tensor:
        # As in the class above: calling it would cost each product one call more.
        out: torch.Tensor = _linear(x.float(), self.packed, self.bias, "none", _NO_SCALARS, "")
        return out.to(x.dtype)


class PairedLinear(Linear):
    """Another one, which never sees a single row: products of one row add up in another order than those of several."""

    __slots__ = ("_linear",)

    def __init__(self, linear: Linear) -> None:
        super().__init__(linear.out_features, linear.in_features, linear.num_bytes)
        self._linear = linear

    def __call__(self, x: torch.Tensor) -> torch.Tensor:
        return self._linear(x.expand(2, -1))[:1] if x.shape[0] == 1 else self._linear(x)


def paired(weight: LinearWeight) -> Linear:
    """As `linear`, so that the bits of a row do not depend on the number of rows (`invariance`)."""
    if isinstance(weight, SideBySide):
        return SideBySideLinear([paired(part) for part in weight.parts])
    made = linear(weight)
    # Products of 8 bits add integers, which is exact; those of 4 bits add in one order.
    if isinstance(weight, Dense) and not _adds_alike(weight.out_features, weight.in_features, weight.weight.dtype):
        return PairedLinear(made)
    return made


@cache
def _adds_alike(num_outputs: int, num_inputs: int, dtype: torch.dtype) -> bool:
    """Whether a product of this shape adds up one row as it does two: of sums of 0, only the rounding is left."""
    generator = torch.Generator().manual_seed(0)
    half, num_outputs = num_inputs // 2, min(num_outputs, MOST_TRIED_OUTPUTS)
    weight = torch.randn(num_outputs, half, generator=generator)
    order = torch.randperm(half, generator=generator)
    rows = torch.randn(NUM_TRIED_ROWS, half, generator=generator)
    missing = torch.zeros(num_outputs, num_inputs - 2 * half)
    product = linear(Dense(torch.cat((weight, -weight[:, order], missing), 1).to(dtype)))
    rows = torch.cat((rows, rows[:, order], missing[:1].expand(NUM_TRIED_ROWS, -1)), 1).to(dtype)
    return all(torch.equal(product(rows[i : i + 1]), product(rows[i : i + 2])[:1]) for i in range(NUM_TRIED_ROWS - 1))


def widens(dtype: torch.dtype) -> bool:
    """Whether products of weights of this type are computed in float32 (`WidenedLinear`)."""
    if dtype == torch.bfloat16:
        return not torch.ops.mkldnn._is_mkldnn_bf16_supported()
    return dtype == torch.float16 and not torch.ops.mkldnn._is_mkldnn_fp16_supported()


def linear(weight: LinearWeight) -> Linear:
    """What computes with this weight here."""
    if isinstance(weight, Int8):
        return Int8Linear(weight)
    if isinstance(weight, Int4):
        return Int4Linear(weight)
    if isinstance(weight, SideBySide):
        return SideBySideLinear([linear(part) for part in weight.parts])
    if not isinstance(weight, Dense):
        raise UnsupportedModelError(f"weights of the form {type(weight).__name__} are not supported on the CPU")
    form = WidenedLinear if widens(weight.weight.dtype) else PackedLinear
    return form(weight.weight, weight.bias)


class RMSNorm:
    """x / sqrt(mean(x²) + eps) * weight, in float32 inside (Zhang and Sennrich, arXiv:1910.07467).

    `F.rms_norm` is a chain of a dozen small operations on CPU. `native_layer_norm` is one, and equal to it on [x, -x]:
    the mean of that row is 0 and its variance the mean square of x.
    """

    __slots__ = ("eps", "shape", "size", "weight")

    def __init__(self, weight: torch.Tensor, eps: float) -> None:
        self.size = weight.shape[0]
        self.shape = (2 * self.size,)
        self.weight = torch.cat((weight, weight))
        self.eps = eps

    def __call__(self, x: torch.Tensor) -> torch.Tensor:
        both = torch.cat((x, -x), 1)  # [num_tokens, 2 * hidden_size]
        return torch.native_layer_norm(both, self.shape, self.weight, None, self.eps)[0][:, : self.size]


def relu2(x: torch.Tensor) -> torch.Tensor:
    """The square of what is positive (arXiv:2109.08668)."""
    return torch.relu(x).square_()


NUM_TRIED_ROWS, MOST_TRIED_OUTPUTS = 17, 8192

ACTIVATIONS: dict[str, Callable[[torch.Tensor], torch.Tensor]] = {
    "silu": torch.nn.functional.silu,
    "gelu_tanh": partial(torch.nn.functional.gelu, approximate="tanh"),
    "relu2": relu2,
}


class RotaryEmbedding:
    """The rotation of every position, as complex numbers (Su et al., arXiv:2104.09864).

    Pairs are kept adjacent ("interleaved"), so that a rotation is one complex product. Checkpoints of the Hugging Face
    kind hold the pairs half a head apart: `interleave` reorders the rows of their projections once, at loading. Scores
    are sums over the dimensions of a head, so that the order changes nothing.
    """

    def __init__(self, angles: torch.Tensor, length: float = 1.0) -> None:
        """angles: [max_positions, head_dim / 2]. length: of a rotation."""
        cos, sin = angles.cos(), angles.sin()
        self.table = torch.complex(cos, sin) if length == 1 else torch.complex(cos * length, sin * length)

    def rotations(self, positions: torch.Tensor) -> torch.Tensor:
        """For int64 [num_tokens]: complex64 [num_tokens, 1, head_dim / 2], to be multiplied into every head."""
        return self.table.index_select(0, positions).unsqueeze(1)


def interleave(rows: torch.Tensor, head_dim: int, rotary_dim: int | None = None) -> torch.Tensor:
    """Rows (or elements) of a projection reordered from half-apart to adjacent pairs, in every head.

    rotary_dim: the first dimensions of a head, which are rotated; None: all are.
    """
    if rotary_dim not in (None, head_dim):
        by_head = rows.view(-1, head_dim, *rows.shape[1:])
        turned = interleave(by_head[:, :rotary_dim].reshape(-1, *rows.shape[1:]), rotary_dim)
        return torch.cat((turned.view(-1, rotary_dim, *rows.shape[1:]), by_head[:, rotary_dim:]), 1).view(rows.shape)
    heads = rows.view(-1, 2, head_dim // 2, *rows.shape[1:])  # [num_heads, half, pair, ...]
    return heads.transpose(1, 2).reshape(rows.shape)
