"""Tensor parallelism: the ranks that compute one model together, and what they exchange.

Every rank holds its share of the heads, of the MLP and of the vocabulary (Shoeybi et al., Megatron-LM, arXiv:1909.08053).
Products whose output is shared out need no exchange; those whose input is are followed by a sum over all ranks. Every
rank gets every plan and enters the same collectives in the same order. Rank 0 alone sees whole logits and samples, and
tells the others what. A rank that leaves a step between two collectives (`ModelRunner.is_torn`) cannot go on, because
the others wait for it.

Owned by the runner. With one rank nothing here does anything, and torch.distributed is not even imported.
"""

from __future__ import annotations

import os
from datetime import timedelta
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray

from actorllm.config import EngineConfig, parallel_sizes
from actorllm.model.interfaces import host_and_port, interface_to

CONNECT_TIMEOUT_S = 120.0
"""How long the ranks wait for each other at the start, and a collective for its last rank while all are alive."""


LAUNCH_TIMEOUT_S = 1800.0
"""The same of ranks that a launcher has started: between two calls the programs may do other things."""

LONGEST_LOAD_S = 1800.0
"""How long the other ranks wait for what the first one alone reads."""


class Ranks:
    """This rank and the others. Without arguments: one rank that is alone."""

    def __init__(
        self, rank: int = 0, size: int = 1, *, has_whole_experts: bool = False, group: Any = None, first: int = 0
    ) -> None:
        """has_whole_experts: of experts each rank holds some as a whole, in the place of its part of each. group: of
        torch.distributed; None: all ranks of the engine. first: the number of rank 0 among these."""
        self.rank = rank
        self.size = size
        self.has_whole_experts = has_whole_experts
        self.group, self._first = group, first
        self._is_connected = False
        self._own_group: Any = None
        """Which of the groups of this process is left at the end; None: all of them."""
        self._told: Any = None
        """What `go_on` sends, alive until it has arrived."""

    @classmethod
    def connect(cls, config: EngineConfig, rank: int, backend: str = "gloo") -> Ranks:
        """Wait for all ranks of the engine. They meet at the file `config.rendezvous`. backend: of torch.distributed.

        Of a pipeline: those of this rank's stage (`model.pipeline`).
        """
        if config.world_size == 1:
            return cls()
        import torch.distributed as dist

        if config.is_launched:
            return cls._of_launcher(config, rank, backend)
        assert config.rendezvous is not None
        timeout = timedelta(seconds=CONNECT_TIMEOUT_S)
        store: Any
        if config.rank_nodes:
            host, port = host_and_port(config.rendezvous)
            name = interface_to(host)
            if name is not None:
                os.environ.setdefault("GLOO_SOCKET_IFNAME", name)
            store = dist.TCPStore(host, port, config.world_size, is_master=rank == 0, timeout=timeout)  # type: ignore[attr-defined]
        else:
            os.environ.setdefault("GLOO_SOCKET_IFNAME", "lo")  # all ranks of an engine are on one machine
            store = dist.FileStore(config.rendezvous, config.world_size)  # type: ignore[attr-defined]
        dist.init_process_group(backend, store=store, rank=rank, world_size=config.world_size, timeout=timeout)
        size, group = config.tensor_size, None
        if config.stages and size > 1:  # every rank makes all groups, in the same order
            made = [dist.new_group(list(range(s * size, (s + 1) * size))) for s in range(len(config.stages))]
            group = made[rank // size]
        first = rank // size * size
        ranks = cls(rank - first, size, has_whole_experts=config.enable_expert_parallel, group=group, first=first)
        ranks._is_connected = True
        return ranks

    @classmethod
    def _of_launcher(cls, config: EngineConfig, rank: int, backend: str) -> Ranks:
        """They meet where the environment says, or have met already: then these have a group of their own."""
        import torch.distributed as dist

        timeout = timedelta(seconds=LAUNCH_TIMEOUT_S)
        has_met, group = dist.is_initialized(), None
        if has_met:
            group = dist.new_group(backend=backend, timeout=timeout)
        else:
            if os.environ.get("LOCAL_WORLD_SIZE") == str(config.world_size):  # all on this machine
                os.environ.setdefault("GLOO_SOCKET_IFNAME", "lo")
            dist.init_process_group(backend, rank=rank, world_size=config.world_size, timeout=timeout)
        ranks = cls(rank, config.world_size, has_whole_experts=config.enable_expert_parallel, group=group)
        ranks._is_connected, ranks._own_group = True, group
        return ranks

    def close(self) -> None:
        """Leave the group; the others notice when they next need this rank."""
        if self._is_connected:
            import torch.distributed as dist

            self._is_connected = False
            self._told = None
            own, self._own_group, self.group = self._own_group, None, None
            dist.destroy_process_group(own)

    def go_on(self) -> None:
        """Of rank 0: what it alone reads has been read. The others wait for that, longer than for a collective."""
        if self.size == 1:
            return
        import torch.distributed as dist

        told = torch.zeros(1, dtype=torch.int32)
        if self.rank:
            work: Any = dist.irecv(told, self._first, group=self.group)
            work.wait(timedelta(seconds=LONGEST_LOAD_S))
        else:
            others = range(self._first + 1, self._first + self.size)
            self._told = told, [dist.isend(told, other, group=self.group) for other in others]

    def part(self, total: int) -> slice:
        """This rank's share of `total` things, as even as it gets."""
        return slice(self.rank * total // self.size, (self.rank + 1) * total // self.size)

    def sum_(self, x: torch.Tensor) -> torch.Tensor:
        """The sum over all ranks, in place."""
        if self.size > 1:
            import torch.distributed as dist

            dist.all_reduce(x, group=self.group)
        return x

    def gather_columns(self, x: torch.Tensor, total: int) -> torch.Tensor:
        """On rank 0 the columns of all ranks side by side, [num_rows, total]; elsewhere none. x: [num_rows, part(total)]."""
        if self.size == 1:
            return x
        import torch.distributed as dist

        # gloo gathers equal sizes only
        width = -(-total // self.size)
        padded = torch.nn.functional.pad(x, (0, width - x.shape[1])) if x.shape[1] < width else x.contiguous()
        if self.rank:
            dist.gather(padded, dst=self._first, group=self.group)
            return x[:, :0]
        parts = [torch.empty_like(padded) for _ in range(self.size)]
        dist.gather(padded, parts, dst=self._first, group=self.group)
        widths = [
            share.stop - share.start for share in (Ranks(rank, self.size).part(total) for rank in range(self.size))
        ]
        return torch.cat([part[:, :w] for part, w in zip(parts, widths, strict=True)], 1)

    def agree(self, numbers: NDArray[np.int32]) -> NDArray[np.int32]:
        """What rank 0 has, of the same shape everywhere."""
        if self.size == 1:
            return numbers
        import torch.distributed as dist

        told = torch.from_numpy(numbers)
        dist.broadcast(told, self._first, group=self.group)
        shared: NDArray[np.int32] = told.numpy()
        return shared


class HeadShare:
    """Which query and key heads a rank computes.

    With fewer key heads than ranks, several ranks hold the same key head and share out its query heads. That heads can
    be shared out evenly has been checked with the configuration (`config.parallel_sizes`).
    """

    def __init__(self, heads: int, kv_heads: int, head_dim: int, ranks: Ranks) -> None:
        """heads, kv_heads: of the whole model."""
        size = ranks.size
        assert size in parallel_sizes(heads, kv_heads)
        self.heads = ranks.part(heads)
        if kv_heads >= size:
            self.kv_heads = ranks.part(kv_heads)
        else:
            only = ranks.rank * kv_heads // size
            self.kv_heads = slice(only, only + 1)
        self.num_heads: int = self.heads.stop - self.heads.start
        self.num_kv_heads: int = self.kv_heads.stop - self.kv_heads.start
        self.head_dim = head_dim

    def rows(self, heads: slice) -> slice:
        """The rows of a projection that belong to these heads."""
        return slice(heads.start * self.head_dim, heads.stop * self.head_dim)
