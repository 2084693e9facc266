"""Inputs of kernels: sequences in a paged cache, state tables. Random, in bfloat16, on the device of the run."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch

from actorllm_kernels.sample_pick import SamplingState

I32 = torch.int32


@dataclass(frozen=True)
class Paged:
    """Some sequences in a cache [num_blocks, num_kv_heads, page, head_dim]; blocks in random order."""

    keys: torch.Tensor
    values: torch.Tensor
    table: torch.Tensor
    """int32 [num_sequences, max_blocks]"""
    rows: torch.Tensor
    """int32 [num_sequences]"""
    seq_lens: torch.Tensor
    """int32 [num_sequences]"""

    @classmethod
    def make(
        cls,
        seq_lens: Sequence[int],
        num_kv_heads: int,
        head_dim: int,
        page: int,
        device: torch.device,
        first_block: int = 0,
    ) -> Paged:
        """first_block: of those that are used."""
        counts = [-(-n // page) for n in seq_lens]
        total = sum(counts) + 1
        shape = (first_block + total, 2, num_kv_heads, page, head_dim)
        pool = torch.empty(shape, dtype=torch.bfloat16, device=device)
        pool[first_block:].normal_()
        blocks = (torch.randperm(total)[: sum(counts)] + first_block).to(I32).split(counts)
        table = torch.zeros(len(seq_lens), max(1, *counts), dtype=I32)
        for row, own in enumerate(blocks):
            table[row, : len(own)] = own
        rows = torch.arange(len(seq_lens), dtype=I32)
        lens = torch.tensor(seq_lens, dtype=I32)
        return cls(pool[:, 0], pool[:, 1], table.to(device), rows.to(device), lens.to(device))

    @property
    def num_bytes(self) -> int:
        """Of the keys and values of the sequences."""
        return int(self.seq_lens.sum()) * 2 * self.keys.shape[1] * self.keys.shape[3] * 2

    def sharpen(self, window: int = 0) -> Paged:
        """Let the keys at the edges of every sequence, of its pages and of the window weigh more than all others.

        Among thousands of alike keys one that is left out, or seen too early, would not be noticed.
        """
        page = self.keys.shape[2]
        for i, n in enumerate(self.seq_lens.tolist()):
            edges = {0, page - 1, page, n // 2, n - 4, n - 3, n - 2, n - 1, n - window - 1, n - window}
            for place in edges & set(range(n)):
                self.keys[int(self.table[i, place // page]), :, place % page] *= 4
        return self

    def sequence(self, i: int) -> tuple[torch.Tensor, torch.Tensor]:
        """Keys and values [num_tokens, num_kv_heads, head_dim] of one sequence, on the CPU."""
        blocks, n = self.table[i].long(), int(self.seq_lens[i])
        return tuple(pages[blocks].transpose(1, 2).flatten(0, 1)[:n].cpu() for pages in (self.keys, self.values))


def state_table(num_slots: int, device: torch.device, num_greedy: int = 0) -> SamplingState:
    """Temperatures from 0.3 to 1.5, the first num_greedy of 0; random seeds and token indices."""
    temperature = 0.3 + 1.2 * torch.rand(num_slots)
    temperature[:num_greedy] = 0
    columns = (
        temperature,
        torch.randint(-(2**63), 2**63 - 1, (num_slots,)),
        torch.randint(0, 3, (num_slots,), dtype=I32),
        torch.randint(0, 1000, (num_slots,), dtype=I32),
        torch.zeros(num_slots, dtype=I32),
    )
    return SamplingState(*(column.to(device) for column in columns))


def bf16(*shape: int, device: torch.device, scale: float = 1.0) -> torch.Tensor:
    return torch.empty(shape, dtype=torch.bfloat16, device=device).normal_(0, scale)
