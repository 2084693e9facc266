"""The causal convolution of recurrent layers: over the last few tokens, channel by channel.

Computed in float32. What is kept of a sequence is its last inputs, as they were made, so that nothing is rounded twice.
"""

from __future__ import annotations

import torch


class CausalConvolution:
    """With silu behind it."""

    def __init__(self, kernel: torch.Tensor, bias: torch.Tensor | None) -> None:
        """kernel: float32 [size, num_channels], the newest token last. bias: [num_channels]."""
        self.kernel, self.bias, self.size = kernel, bias, len(kernel)

    def decode(self, x: torch.Tensor, before: torch.Tensor) -> torch.Tensor:
        """One token of each sequence.

        Arguments:
            x: [num_rows, num_channels].
            before: the inputs before it, [num_rows, size - 1, num_channels]; those before the next token afterwards.

        Returns float32 [num_rows, num_channels].
        """
        seen = torch.cat((before, x.unsqueeze(1)), 1)
        before.copy_(seen[:, 1:])
        made = torch.einsum("rkc,kc->rc", seen.float(), self.kernel)
        return torch.nn.functional.silu(made if self.bias is None else made.add_(self.bias))

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
        made = made if self.bias is None else made.add_(self.bias)
        return torch.nn.functional.silu(made), seen[count:]
