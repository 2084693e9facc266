"""Rows of embeddings that a prompt brought, in the place of those that the model would look up. Called by the decoders."""

from __future__ import annotations

import torch

from actorllm.model.inputs import StepInputs


def place_rows(embedded: torch.Tensor, inputs: StepInputs) -> None:
    """Write what the step's inputs bring into `embedded`, [num_tokens, width], whatever was looked up there."""
    if inputs.embedded is not None:
        rows = torch.from_numpy(inputs.embeds.copy()).view(embedded.dtype).view(-1, embedded.shape[1])
        embedded[torch.from_numpy(inputs.embedded)] = rows
