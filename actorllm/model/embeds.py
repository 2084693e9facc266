"""Rows of embeddings that a prompt brought, in the place of those that the model would look up. Called by the decoders.

A row may be longer than an embedding: what follows in it is added to the states of later layers (`later_rows`).
"""

from __future__ import annotations

import torch

from actorllm.model.inputs import StepInputs


def place_rows(embedded: torch.Tensor, inputs: StepInputs) -> None:
    """Write what the step's inputs bring into `embedded`, [num_tokens, width], whatever was looked up there."""
    if inputs.embedded is not None:
        rows = torch.from_numpy(inputs.embeds.copy()).view(embedded.dtype).view(len(inputs.embedded), -1)
        embedded[torch.from_numpy(inputs.embedded)] = rows[:, : embedded.shape[1]]


def later_rows(inputs: StepInputs, width: int, dtype: torch.dtype) -> list[torch.Tensor]:
    """What the rows bring for the states behind the first layers, [num_rows, width] each; mostly nothing."""
    assert inputs.embedded is not None
    rows = torch.from_numpy(inputs.embeds.copy()).view(dtype).view(len(inputs.embedded), -1)
    return [rows[:, start : start + width] for start in range(width, rows.shape[1], width)]
