"""Sequences in a paged cache, for the tests of attention."""

from __future__ import annotations

from dataclasses import dataclass

import torch

from actorllm_kernels import reference


@dataclass(frozen=True, slots=True)
class Paged:
    """Random keys and values of some sequences; what no sequence holds is finite, and large enough to be noticed."""

    keys: torch.Tensor
    values: torch.Tensor
    table: torch.Tensor
    """int32 [num_slots, max_blocks]"""
    rows: torch.Tensor
    """int32: the slot of every sequence"""
    seq_lens: torch.Tensor

    @classmethod
    def make(
        cls, seq_lens: list[int], num_kv_heads: int, dim: int, page: int, dtype: torch.dtype, is_float8: bool = False
    ) -> Paged:
        """is_float8: keys and values are codes of float8_e4m3fn."""
        counts = [-(-n // page) for n in seq_lens]
        pool = torch.full((sum(counts) + 2, 2, num_kv_heads, page, dim), 50.0).to(dtype)
        blocks = torch.randperm(sum(counts) + 2).tolist()
        rows = torch.randperm(len(seq_lens) + 3)[: len(seq_lens)].int()
        table = torch.full((len(seq_lens) + 3, max(1, *counts)), blocks[0], dtype=torch.int32)
        for row, n, count in zip(rows.tolist(), seq_lens, counts, strict=True):
            for j in range(count):
                block = blocks.pop()
                table[row, j] = block
                pool[block, :, :, : n - j * page] = torch.randn(2, num_kv_heads, min(page, n - j * page), dim).to(dtype)
        if is_float8:
            pool = reference.float8_codes(pool)
        return cls(pool[:, 0], pool[:, 1], table, rows, torch.tensor(seq_lens, dtype=torch.int32))

    def sequence(self, i: int) -> tuple[torch.Tensor, torch.Tensor]:
        """Keys and values of one sequence in float64."""
        blocks, n = self.table[int(self.rows[i])].tolist(), int(self.seq_lens[i])
        keys, values = (reference.gather_pages(pages, blocks, n) for pages in (self.keys, self.values))
        if keys.dtype == torch.uint8:
            keys, values = reference.float8_numbers(keys), reference.float8_numbers(values)
        return keys.double(), values.double()
