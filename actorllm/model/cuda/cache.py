"""The paged KV cache on a device.

One pool: [num_layers, num_blocks, 2, num_kv_heads, block_size, head_dim]. What a block holds of a layer is one contiguous piece,
keys first. The keys of a block and a head are one tile of attention. Block ids are the scheduler's. With `kv_cache_dtype="fp8"`
the numbers are codes of float8_e4m3fn, of which 0 is 0.

Invariant: the pool is finite everywhere between steps. It starts as zeros, and each step clears what it has written for
tokens without finite states or logits, on the device (`ops.kv_clear`).
"""

from __future__ import annotations

import math

import numpy as np
import torch

from actorllm.messages import I32
from actorllm.model.cuda import ops
from actorllm.model.cuda.device import Device
from actorllm.model.cuda.virtual_memory import Region


class DeviceCache:
    """Keys and values of every layer, by block."""

    def __init__(
        self,
        device: Device,
        num_layers: int,
        num_kv_heads: int,
        head_dim: int,
        num_blocks: int,
        block_size: int,
        dtype: torch.dtype,
        num_parts: int = 2,
        *,
        sleeps: bool = False,
    ) -> None:
        """num_parts: 2: keys and values; 1: rows that are both (`AttentionShape.num_parts`). sleeps: `release` may be called."""
        self.device = device
        self.num_blocks = num_blocks
        self.block_size = block_size
        shape = (num_layers, num_blocks, num_parts, num_kv_heads, block_size, head_dim)
        self._region: Region | None = None
        """Where the memory of the pool may be given back."""
        if sleeps:
            num_bytes = math.prod(shape) * dtype.itemsize
            self._region = device.reserve(num_bytes)
            self._region.map()
            self.pool = device.bytes_of(self._region.addresses)[:num_bytes].view(dtype).view(shape).zero_()
        else:
            self.pool = torch.zeros(shape, dtype=dtype, device=device.torch_device)
        self.layers: list[tuple[torch.Tensor, torch.Tensor]] = [
            (layer[:, 0], layer[:, -1]) for layer in self.pool.unbind(0)
        ]
        """Keys and values of each layer, [num_blocks, num_kv_heads, block_size, head_dim]; of latents twice the same rows."""

    @property
    def is_asleep(self) -> bool:
        """Whether memory of the pool was given back."""
        return self._region is not None and not self._region.is_mapped

    def release(self) -> None:
        """Give the memory of the pool back, whose address stays; no step may be under way. Raises DriverError."""
        assert self._region is not None
        self._region.unmap()

    @torch.inference_mode()
    def restore(self) -> None:
        """Take memory again after `release`: all is zero. Raises DriverError: the cache goes on sleeping."""
        if self.is_asleep:
            assert self._region is not None
            self._region.map()
            self.pool.zero_()
            self.device.wait_for_all()

    def zero(self, block_ids: I32) -> None:
        if block_ids.size:
            self.pool.index_fill_(1, self.device.upload(block_ids.astype(np.int64)), 0)

    def copy(self, sources: I32, targets: I32) -> None:
        """All at once: a target that is also a source is read before it is written."""
        if np.isin(targets, sources).any():
            to, where = self.device.upload(np.stack((targets, sources)).astype(np.int64)).unbind(0)
            for layer in self.pool.unbind(0):
                layer.index_copy_(0, to, layer.index_select(0, where))
        elif targets.size:
            ops.kv_copy(self.pool, self.device.upload(np.stack((sources, targets), 1).astype(np.int32)))
