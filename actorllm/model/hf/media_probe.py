"""The check of a model that takes more than text: rows of an item, in chunks and through our cache, as transformers has them.

The rows are random: what makes them is not checked here. Between two texts they run through our decoder, in chunks as the
scheduler makes them. The stock model gets them at once, and makes positions and masks itself. The states must be
the same. Called by `transformers_backend.load`.
"""

from __future__ import annotations

from typing import Any

import numpy as np
import torch

from actorllm.errors import UnsupportedModelError
from actorllm.messages.embeds import EMBEDDED, WHOLE, grid_id
from actorllm.model.grid_positions import grid_positions
from actorllm.model.hf.probe import (
    NUM_BLOCKS,
    ROUNDING,
    TOLERANCES,
    Probed,
    Tokens,
    noise_limit,
    relative_error,
    step_inputs,
)
from actorllm.types.media_rules import MediaRules

BEFORE, ROWS, COLUMNS, BEHIND = 5, 2, 3, 6
"""Tokens of text, the grid of the item, and tokens of text again."""


def row_id(media: MediaRules, columns: int = 1) -> int:
    """The id of the rows of an item of this model. columns: of its grid, where it stands in one."""
    return {"plain": EMBEDDED, "grid": grid_id(columns), "whole": WHOLE}[media.rows]


@torch.inference_mode()
def probe_media(decoder: Probed, media: MediaRules) -> None:
    """Raises UnsupportedModelError if the states behind the rows of an item are others than those of transformers."""
    architecture = decoder.config.architecture
    count = ROWS * COLUMNS
    rng = np.random.default_rng(0)
    ids = rng.integers(0, min(decoder.config.vocab_size, media.token_id or 2), BEFORE + count + BEHIND)
    ids[BEFORE : BEFORE + count] = row_id(media, COLUMNS)
    embedded = decoder.embed(torch.from_numpy(np.where(ids < 0, 0, ids))[None])
    width = embedded.shape[2]
    random = torch.Generator().manual_seed(0)
    rows = torch.randn(count, width * media.num_vectors, generator=random)
    rows[:, :width] *= embedded.float().std()
    embedded[0, BEFORE : BEFORE + count] = rows[:, :width].to(embedded.dtype)
    body = decoder.config.body

    def stock_states(model: Any) -> torch.Tensor:
        later = [rows[:, start : start + width] for start in range(width, rows.shape[1], width)]
        return _stock_states(model, body, media, ids, embedded, later).float()

    try:
        with decoder.stock() as model:
            if media.num_vectors > 1:  # what is added to states counts as much as they do
                rows[:, width:] *= _size_of_states(model, body, embedded)
            rows = rows.to(embedded.dtype)
            expected = stock_states(model)
        states = _in_chunks(decoder, media, ids, rows)
    except Exception as error:  # of modules of another library
        raise UnsupportedModelError(
            f"architecture {architecture!r} is not supported: rows of its {media.modality} cannot be run over the paged cache: "
            f"{type(error).__name__}: {error}"
        ) from error
    limit = TOLERANCES[decoder.dtype]
    distance = relative_error(states.float(), expected)
    if distance > limit and decoder.dtype in ROUNDING:
        limit = max(limit, noise_limit(decoder, stock_states))
    if not distance <= limit:
        raise UnsupportedModelError(
            f"architecture {architecture!r} is not supported: behind rows of its {media.modality} the states differ from "
            f"transformers' own by {distance:.2g} standard deviations"
        )


def _size_of_states(model: Any, body: str, embedded: torch.Tensor) -> torch.Tensor:
    """The standard deviation of the states behind the first layer."""
    found: list[torch.Tensor] = []

    def note(_: Any, __: Any, output: Any) -> None:
        found.append((output[0] if isinstance(output, tuple) else output).float().std())

    decoder = model.get_submodule(body)
    hook = decoder.layers[0].register_forward_hook(note)
    try:
        decoder(inputs_embeds=embedded, use_cache=False)
    finally:
        hook.remove()
    return found[0]


def _stock_states(
    model: Any, body: str, media: MediaRules, ids: Tokens, embedded: torch.Tensor, later: list[torch.Tensor]
) -> torch.Tensor:
    """[num_tokens, hidden_size] of the model with its own attention."""
    is_row = torch.from_numpy(ids < 0)[None]
    if media.rows == "whole":
        states: torch.Tensor = model.model(
            inputs_embeds=embedded, token_type_ids=is_row.long(), use_cache=False
        ).last_hidden_state
        return states[0]
    given: dict[str, Any] = {}
    if media.rows == "grid":
        merge = model.config.vision_config.spatial_merge_size
        named = torch.from_numpy(np.where(ids < 0, media.token_id, ids))[None]
        grid = torch.tensor([[1, ROWS * merge, COLUMNS * merge]])
        given["position_ids"], _ = model.model.get_rope_index(
            named, mm_token_type_ids=is_row.int(), image_grid_thw=grid
        )
    if later:
        given |= {"visual_pos_masks": is_row, "deepstack_visual_embeds": later}
    states = model.get_submodule(body)(inputs_embeds=embedded, use_cache=False, **given).last_hidden_state
    return states[0]


def _in_chunks(decoder: Probed, media: MediaRules, ids: Tokens, rows: torch.Tensor) -> torch.Tensor:
    """The same by our decoder, with an end of a chunk within the item where that may be, and one token at the end."""
    middle = BEFORE + ROWS * COLUMNS if media.rows == "whole" else BEFORE + COLUMNS + 1
    cache, table = decoder.new_cache(NUM_BLOCKS), np.array([5, 0, 3, 6, 1], np.int32)
    row_bytes = rows.contiguous().view(torch.uint8).numpy()
    positions = grid_positions(ids.astype(np.int32))[0]
    states = []
    for first, last in ((0, middle), (middle, ids.size - 1), (ids.size - 1, ids.size)):
        chunk = ids[first:last]
        inputs = step_inputs(decoder, None, [(np.where(chunk < 0, 0, chunk), first, table)])
        if (chunk < 0).any():
            inputs.embedded = np.flatnonzero(chunk < 0)
            inputs.embeds = row_bytes[inputs.embedded + first - BEFORE].reshape(-1)
            inputs.whole = chunk == WHOLE if media.rows == "whole" else None
        inputs.grid_positions = positions[:, first:last] if media.rows == "grid" else None
        states.append(decoder.forward(inputs, cache))
    return torch.cat(states)
