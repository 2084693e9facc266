"""Products that are computed in one way for decode rows, and in another for rows of prompts.

Which way a token takes depends on what it is, and on nothing else in the step. So a stream does not depend on its batch. Output
that is computed once more, as part of a prefill row after a preemption or a move, is computed as decode rows are.
"""

from __future__ import annotations

import torch

from actorllm.model.inputs import StepInputs
from actorllm.model.linear import Linear


class RowKinds:
    """Which tokens of the step are of prompts. One for all layers of a model."""

    def __init__(self) -> None:
        self.split = 0
        """Tokens before this one are decode rows, and the others are of prompts; where `prompts` is None."""
        self.prompts: torch.Tensor | None = None
        """int64: the tokens of prompts, where some prefill row has output."""
        self.decodes: torch.Tensor | None = None
        """int64: all other tokens; None with `prompts`."""

    def begin(self, inputs: StepInputs) -> None:
        """A step begins."""
        self.split, self.prompts, self.decodes = inputs.num_decodes, None, None
        columns = zip(
            inputs.prefill_starts, inputs.prefill_counts, inputs.prefill_first, inputs.num_prompts, strict=True
        )
        spans = [(start + max(0, num_prompt - first), start + count) for start, count, first, num_prompt in columns]
        spans = [(start, end) for start, end in spans if start < end]
        if spans:
            is_prompt = torch.ones(len(inputs.token_ids), dtype=torch.bool)
            is_prompt[: inputs.num_decodes] = False
            for start, end in spans:
                is_prompt[start:end] = False
            self.prompts = is_prompt.nonzero().view(-1)
            self.decodes = (~is_prompt).nonzero().view(-1)


class ByKindLinear(Linear):
    """Two forms of one weight."""

    __slots__ = ("_kinds", "decode", "prompt")

    def __init__(self, decode: Linear, prompt: Linear, kinds: RowKinds) -> None:
        super().__init__(decode.out_features, decode.in_features, decode.num_bytes)
        self.decode, self.prompt, self._kinds = decode, prompt, kinds

    def __call__(self, x: torch.Tensor) -> torch.Tensor:
        kinds, num_rows = self._kinds, x.shape[0]
        if kinds.prompts is not None and kinds.decodes is not None:
            made = self.decode(x.index_select(0, kinds.decodes))
            whole = made.new_empty(num_rows, self.out_features)
            whole.index_copy_(0, kinds.decodes, made)
            if len(kinds.prompts):
                whole.index_copy_(0, kinds.prompts, self.prompt(x.index_select(0, kinds.prompts)))
            return whole
        split = kinds.split
        if split == num_rows:
            return self.decode(x)
        if not split:
            return self.prompt(x)
        return torch.cat((self.decode(x[:split]), self.prompt(x[split:])))
