"""Asking for the weight of the product that comes next, by a kernel that leaves most of the GPU idle.

Products of more than a few rows are cuBLAS's, which asks for nothing before it begins. A norm or an activation of so few rows keeps
some multiprocessors busy, for as long as a launch takes. So it is launched with programs that have no row. They ask for the
next weight, in the second-level cache, before they wait for the kernel in front: it is constant. Called by the launchers.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl

from actorllm_kernels.configs import Config, num_multiprocessors

MAX_BYTES = 16 << 20
"""That are asked for: the second-level cache has 40 MiB or more where launches can be dependent."""
MAX_ROWS = 64
"""With more, the product takes longer to compute than to read."""
LINE = 128
"""Bytes that one request brings."""


@triton.jit
def prefetch_line(at):
    """at: pointers; each line is brought to the second-level cache, and nothing waits for it."""
    tl.inline_asm_elementwise(
        "prefetch.global.L2 [$1];\nmov.b32 $0, 0;", "=r,l", [at], dtype=tl.int32, is_pure=False, pack=1
    )


@triton.jit
def ask_ahead(weight_ahead_ptr, program, num_programs, num_lines):
    """This program's share of the first lines of a 16-bit weight. program: below 0 for those that have a row."""
    lane = tl.arange(0, 128)
    first = tl.where(program < 0, num_lines, program * 128)
    for start in range(first, num_lines, num_programs * 128):
        line = tl.minimum(start + lane, num_lines - 1)
        prefetch_line(weight_ahead_ptr + line.to(tl.int64) * 64)


def lines_ahead(ahead: torch.Tensor | None, num_rows: int, launch: Config) -> int:
    """How many lines of this weight a launch of so many rows is to ask for. launch: its arguments; takes PREFETCH out of them."""
    if (
        not launch.pop("PREFETCH", 1)
        or ahead is None
        or not launch["PDL"]
        or num_rows > MAX_ROWS
        or ahead.element_size() != 2
    ):
        return 0
    return min(ahead.numel() * 2, MAX_BYTES) // LINE


def more_programs(num_rows: int, num_columns: int, device: torch.device) -> int:
    """By how many rows a grid [num_rows, num_columns] grows, so that every multiprocessor has a program."""
    return max(1, -(-num_multiprocessors(device) // num_columns) - num_rows)
