"""Attention over latents on a device: the cache holds one row of a token for all heads (DeepSeek-V2, arXiv:2405.04434).

A row is the token's latent, normed, with its rotated part behind it. Queries are absorbed: the product that makes keys of latents
is made on them. What is attended to is a sum of latents, of which another product makes the values. So decode rows and prompts read
the same rows by the same arithmetic. Nothing is made of the context, whatever its length, and both may be recorded.

A layer launches the norm and the product of queries, where they are made of a vector. The rotations and the write to the cache
(`ops.latent_rope_kv`) follow, the product for keys, attention, and the product for values. Called by `decoder`.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import NamedTuple

import torch

from actorllm.config import EngineConfig
from actorllm.errors import UnsupportedModelError
from actorllm.model.cuda import ops
from actorllm.model.cuda.linear import DeviceLinear
from actorllm.model.cuda.quantized import Workspaces, codes_of, in_order
from actorllm.model.families.decoder_config import LatentShape
from actorllm.model.families.tensors import LatentTensors
from actorllm.model.linear import LinearWeight
from actorllm.model.linear.dense import Dense
from actorllm.types.quantization import FP8
from actorllm_kernels import reference
from actorllm_kernels.attn_decode import Division
from actorllm_kernels.latent_decode import MAX_RANK, MAX_ROTARY, heads_together
from actorllm_kernels.latent_prefill import heads_of_prompts
from actorllm_kernels.skinny_gemm import SplitScratch


def check_latent(shape: LatentShape, config: EngineConfig) -> None:
    """Raises UnsupportedModelError for what latents are not made for here."""
    if shape.rank > MAX_RANK or shape.rotary_dim > MAX_ROTARY:
        raise UnsupportedModelError(
            f"latents of {shape.rank} numbers with {shape.rotary_dim} that are rotated are not supported on CUDA: the kernels "
            f"take up to {MAX_RANK} and {MAX_ROTARY}; use device='cpu'"
        )
    told = {"kv_cache_dtype='fp8'": config.cache.dtype == FP8, "enable_lora=True": config.lora is not None}
    for name, is_wanted in told.items():
        if is_wanted:
            raise UnsupportedModelError(
                f"{name} is not supported on CUDA with the latent attention of {config.model.architecture} yet; leave it out"
            )


class Geometry(NamedTuple):
    """How query heads of a step are put together, and their work divided; fields of `PagedAttention`."""

    group: int
    num_groups: int
    division: Division
    tokens_per_tile: int


def geometry(num_heads: int, device: torch.device) -> Geometry:
    """Of heads that read the same rows."""
    heads = heads_together(num_heads, device)
    return Geometry(heads.group, heads.num_groups, heads.division, heads_of_prompts(num_heads, device)[1])


class LatentActivations:
    """What flows through attention over latents beside `Activations`, for so many tokens."""

    def __init__(
        self, num_tokens: int, shape: LatentShape, num_heads: int, dtype: torch.dtype, device: torch.device
    ) -> None:
        def empty(*shape: int) -> torch.Tensor:
            return torch.empty(num_tokens, *shape, dtype=dtype, device=device)

        has_vector = shape.query_rank is not None
        self.vector = empty(shape.query_rank) if shape.query_rank is not None else None
        """What queries are made of, normed; None: the first product of a layer makes them."""
        self.queries = empty(num_heads * (shape.plain_dim + shape.rotary_dim)) if has_vector else None
        self.mixed = empty(num_heads, shape.rank)
        """What is attended to."""

    def first(self, num_tokens: int) -> LatentActivations:
        """The same for fewer tokens, in the same memory."""
        part = object.__new__(LatentActivations)
        for name in ("vector", "queries", "mixed"):
            whole = getattr(self, name)
            setattr(part, name, None if whole is None else whole[:num_tokens])
        return part


class DeviceLatent:
    """Of one layer, from behind its first product to what its last one reads."""

    def __init__(
        self,
        shape: LatentShape,
        num_heads: int,
        tensors: LatentTensors,
        product: Callable[[LinearWeight], DeviceLinear],
        workspaces: Workspaces,
    ) -> None:
        """num_heads: of this rank, whose tensors these are."""
        self._shape, self._num_heads = shape, num_heads
        self.query_norm = None if tensors.query_norm is None else tensors.query_norm.float()
        self.query_up = None if tensors.query_up is None else product(tensors.query_up)
        self.norm = tensors.norm.float()
        up = _numbers(tensors.up, workspaces).view(num_heads, shape.plain_dim + shape.value_dim, shape.rank)
        self._up = up
        self.keys = up[:, : shape.plain_dim]  # [num_heads, plain_dim, rank]
        self.values = up[:, shape.plain_dim :].transpose(1, 2)  # [num_heads, rank, value_dim]

    @property
    def num_bytes(self) -> int:
        """Of the weights that a token reads, `query_up` apart."""
        return self._up.numel() * self._up.element_size()

    def __call__(
        self,
        made: torch.Tensor,
        room: LatentActivations,
        wide: torch.Tensor,
        out: torch.Tensor,
        positions: torch.Tensor,
        kv_slots: torch.Tensor,
        latents: torch.Tensor,
        rope: tuple[torch.Tensor, torch.Tensor],
        attend: Callable[[torch.Tensor, torch.Tensor, torch.Tensor], None],
        *,
        scratch: SplitScratch,
        pdl: bool,
    ) -> None:
        """Attend, and write the tokens to the cache.

        Arguments:
            made: [num_tokens, ...] of the first product.
            room, wide: memory; wide: [num_tokens, num_heads, rank + rotary_dim], for the absorbed queries.
            out: [num_tokens, num_heads, value_dim], for the values.
            positions, kv_slots: of the tokens.
            latents: of the cache of this layer, [num_blocks, block_size, rank + rotary_dim].
            rope: cosines and sines, [max_positions, rotary_dim / 2].
            attend: with absorbed queries, latents, and where sums of them go (`PagedAttention.attend_latents`).
        """
        shape, count = self._shape, len(made)
        rank, width = shape.rank, shape.width
        queries = made[:, :-width] if self.query_up is None else self._queries(made, room, scratch, pdl=pdl)
        queries = queries.view(count, self._num_heads, -1)
        ops.latent_rope_kv(
            queries,
            made[:, -width:],
            positions,
            kv_slots,
            *rope,
            self.norm,
            wide[..., rank:],
            latents,
            shape.eps,
            pdl=pdl,
        )
        by_head = queries[..., : shape.plain_dim].transpose(0, 1)
        ops.products_of_heads(by_head, self.keys, wide[..., :rank].transpose(0, 1))
        attend(wide, latents, room.mixed)
        ops.products_of_heads(room.mixed.transpose(0, 1), self.values, out.transpose(0, 1))

    def _queries(
        self, made: torch.Tensor, room: LatentActivations, scratch: SplitScratch, *, pdl: bool
    ) -> torch.Tensor:
        """Made of a vector, which the first product has made. [num_tokens, num_heads * (plain_dim + rotary_dim)]."""
        assert self.query_up is not None
        assert self.query_norm is not None
        assert room.vector is not None
        assert room.queries is not None
        vector = made[:, : self.query_up.in_features]
        ops.rmsnorm(vector, self.query_norm, self._shape.eps, room.vector, pdl=pdl)
        if self.query_up.fuses(len(made), False):
            self.query_up.launch(room.vector, room.queries, scratch=scratch, pdl=pdl)
        else:
            self.query_up(room.vector, room.queries)
        return room.queries


def _numbers(weight: LinearWeight, workspaces: Workspaces) -> torch.Tensor:
    """A weight of any form in the type of the model, [out_features, in_features]."""
    weight = in_order(weight, workspaces.dtype)
    if isinstance(weight, Dense):
        return weight.weight.to(workspaces.device)
    codes, scales = codes_of(weight)
    return reference.dequantized(codes, scales, weight.in_features).to(workspaces.device, workspaces.dtype).contiguous()
