"""The causal convolution of recurrent layers: over the last few tokens, channel by channel.

Computed in float32. What is kept of a sequence is its last inputs, as they were made, so that nothing is rounded twice.
"""

from __future__ import annotations

import torch

from actorllm.model.cpu.recurrent.states import StateRows


class CausalConvolution:
    """See the module docstring."""

    def __init__(self, kernel: torch.Tensor, bias: torch.Tensor | None, *, has_silu: bool = True) -> None:
        """kernel: float32 [size, num_channels], the newest token last. bias: [num_channels]. has_silu: behind it."""
        self.kernel, self.bias, self.size, self._has_silu = kernel, bias, len(kernel), has_silu

    def step(self, x: torch.Tensor, kept: torch.Tensor, rows: StateRows) -> torch.Tensor:
        """All tokens of a step.

        Arguments:
            x: [num_tokens, num_channels].
            kept: the last inputs of each slot, [num_slots, size - 1, num_channels].

        Returns float32 [num_tokens, num_channels]; rows of padding are zeros.
        """
        out = torch.zeros(x.shape)
        if rows.num_decodes:
            own, where = slice(0, rows.num_decodes), rows.decodes
            before = kept[where]
            out[own] = self.decode(x[own], before)
            if isinstance(where, torch.Tensor):  # rows were gathered, and are put back
                kept.index_copy_(0, where, before)
        for piece in rows.pieces:
            tokens = slice(piece.start, piece.start + piece.size)
            out[tokens], after = self.prompt(x[tokens], None if piece.position == 0 else kept[piece.slot])
            piece.store(kept, after)
        return out

    def decode(self, x: torch.Tensor, before: torch.Tensor) -> torch.Tensor:
        """One token of each sequence.

        Arguments:
            x: [num_rows, num_channels].
            before: the inputs before it, [num_rows, size - 1, num_channels]; those before the next token afterwards.

        Returns float32 [num_rows, num_channels].
        """
        seen = torch.cat((before, x.unsqueeze(1)), 1)
        before.copy_(seen[:, 1:])
        exact = seen.float()
        made = exact[:, 0] * self.kernel[0]  # in the order of `prompt`, so that both add up alike
        for i in range(1, self.size):
            made.addcmul_(exact[:, i], self.kernel[i])
        return self._ended(made)

    def prompt(self, x: torch.Tensor, before: torch.Tensor | None) -> tuple[torch.Tensor, torch.Tensor]:
        """Consecutive tokens of one sequence.

        Arguments:
            x: [num_tokens, num_channels].
            before: the inputs before them, [size - 1, num_channels]; None: the sequence begins.

        Returns float32 [num_tokens, num_channels], and the inputs before the next token.
        """
        count = len(x)
        seen = torch.cat((x.new_zeros(self.size - 1, x.shape[1]) if before is None else before, x))
        exact = seen.float()
        made = exact[:count] * self.kernel[0]
        for i in range(1, self.size):
            made.addcmul_(exact[i : i + count], self.kernel[i])
        return self._ended(made), seen[count:]

    def _ended(self, made: torch.Tensor) -> torch.Tensor:
        made = made if self.bias is None else made.add_(self.bias)
        return torch.nn.functional.silu(made, inplace=True) if self._has_silu else made
