"""Prompts that are given as embeddings, on their way from the front door to the worker.

Where a prompt has an embedding its token id is below zero, everywhere from `Submit` to the worker's batch. Which one it is says
how the row takes part (EMBEDDED, WHOLE, `grid_id`). The rows of those positions travel beside the ids, in their order, as the
bytes of the model's dtype. `Submit` carries all of them, and each `StepPlan` those of its chunks, so that a plan stays small.
The scheduler keeps them until the request ends, because it may have to be computed again. Nothing here is torch: the caller's
own torch is asked for the values of a tensor.

Called by the engine's intake, the scheduler and the worker's batch.
"""

from __future__ import annotations

import hashlib
from typing import Any

import numpy as np
from numpy.typing import NDArray

from actorllm.errors import InvalidPromptError
from actorllm.messages import I32, U8, Submit
from actorllm.types.device import Dtype

EMBEDDED = -1
"""The token id of a position that has an embedding, and that is like any other."""

WHOLE = -2
"""Of a row that attends to all rows beside it with this id, those behind it too: no chunk ends between them."""

GRID = -3
"""Ids below this are of rows that stand in a grid, for models whose positions have three axes."""

MAX_COLUMNS = 1 << 15
"""Of a grid."""

LOWEST_ID = GRID - MAX_COLUMNS

MAX_PROMPT_BYTES = 60 << 20
"""Of the embeddings of one prompt: they are part of one message."""

MAX_STEP_BYTES = 6 << 20
"""Of the embeddings in one plan: two plans may be on their way, and the outbox of their link holds 16 MiB."""


def read_rows(value: Any, width: int) -> NDArray[np.float32]:
    """`prompt_embeds` as float32 [num_tokens, width]. Raises InvalidPromptError for anything else, and for NaN.

    value: a torch tensor or a numpy array of floats, of that shape or with a batch dimension of 1 before it.
    """
    shape = f"a floating-point tensor of shape (num_tokens, {width})"
    if hasattr(value, "detach") and hasattr(value, "is_floating_point"):
        if not value.is_floating_point():
            raise InvalidPromptError(f"prompt_embeds must be {shape}, not one of {value.dtype}")
        try:
            array = value.detach().cpu().float().numpy()
        except (RuntimeError, NotImplementedError, TypeError) as error:  # of a sparse layout, or without data ("meta")
            told = f"not one with layout {value.layout} on device {str(value.device)!r}; give a dense one with values"
            raise InvalidPromptError(f"prompt_embeds must be {shape}, {told}") from error
    elif isinstance(value, np.ndarray):
        array = value
    else:
        raise InvalidPromptError(f"prompt_embeds must be {shape}, not {type(value).__name__}")
    if array.dtype.kind != "f":
        raise InvalidPromptError(f"prompt_embeds must be {shape}, not one of {value.dtype}")
    if array.ndim == 3 and len(array) == 1:
        array = array.squeeze(0)
    if array.ndim != 2 or array.shape[-1] != width:
        raise InvalidPromptError(f"prompt_embeds must be {shape}, not of shape {tuple(value.shape)}")
    with np.errstate(over="ignore"):
        rows: NDArray[np.float32] = np.ascontiguousarray(array, np.float32)
    is_finite = np.isfinite(rows).all(1)
    if not is_finite.all():
        raise InvalidPromptError(f"prompt_embeds: the row of token {int(is_finite.argmin())} holds NaN or infinity")
    return rows


def encode_rows(rows: NDArray[np.float32], dtype: Dtype) -> U8:
    """The bytes of finite rows in the model's dtype, rounded to nearest even. Raises InvalidPromptError for overflow."""
    if dtype == "float32":
        return np.ascontiguousarray(rows, "<f4").reshape(-1).view(np.uint8)
    if dtype == "float16":
        with np.errstate(over="ignore"):
            narrow = np.ascontiguousarray(rows, "<f2")
        if not np.isfinite(narrow).all():
            raise InvalidPromptError("prompt_embeds hold a number that is too large for float16")
        return narrow.reshape(-1).view(np.uint8)
    bits = np.ascontiguousarray(rows).view(np.uint32)
    halves = ((bits + np.uint32(0x7FFF) + (bits >> 16 & 1)) >> 16).astype("<u2")
    if (halves & 0x7FFF == 0x7F80).any():
        raise InvalidPromptError("prompt_embeds hold a number that is too large for bfloat16")
    return halves.reshape(-1).view(np.uint8)


def grid_id(columns: int) -> int:
    """The id of the rows of an item with so many columns, in reading order."""
    return GRID - columns


def longest_whole(prompt: I32) -> int:
    """The most positions that one chunk has to hold."""
    is_whole = np.concatenate(((False,), prompt == WHOLE, (False,)))
    borders = np.flatnonzero(is_whole[1:] != is_whole[:-1])
    return int((borders[1::2] - borders[::2]).max(initial=0))


def chunk_of_items(prompt: I32, first: int, size: int, most: int) -> int:
    """The size of a chunk that cuts no run of WHOLE: shorter than wanted, or where it would be empty longer.

    Arguments:
        first: where the chunk begins.
        size: what is wanted.
        most: what there is room for. Without room for the run the chunk is empty.
    """
    end = first + size
    if size <= 0 or end >= prompt.size or prompt[end] != WHOLE or prompt[end - 1] != WHOLE:
        return size
    before = np.flatnonzero(prompt[first:end] != WHOLE)
    if before.size:
        return int(before[-1]) + 1
    behind = np.flatnonzero(prompt[end:] != WHOLE)
    longer = size + (int(behind[0]) if behind.size else prompt.size - end)
    return longer if longer <= most else 0


def salt_of(embeds: U8, cache_salt: str | None) -> str | None:
    """What block hashes have to cover beside the ids: the salt, and the embeddings that the ids do not tell apart.

    All of a prompt's embeddings count for each of its blocks: those of two prompts are shared where their ids begin alike
    and their embeddings are the same from the first to the last.
    """
    if not embeds.size:
        return cache_salt
    return f"{cache_salt or ''}\0{hashlib.sha256(embeds.data).hexdigest()}"


def wrong_rows(submit: Submit, row_bytes: int) -> str | None:
    """What is wrong with a request that has embeddings. row_bytes: of one position; 0: the engine takes none."""
    if not row_bytes:
        return "it has prompt_embeds, and the engine was built without enable_prompt_embeds"
    count = int(np.count_nonzero(submit.prompt < 0))
    if submit.prompt_embeds.size != count * row_bytes:
        return f"{submit.prompt_embeds.size} bytes of prompt_embeds are not {row_bytes} for each of {count} positions"
    if not submit.is_chunkable and submit.prompt_embeds.size > MAX_STEP_BYTES:
        return f"the prompt must not be chunked, and a step carries {MAX_STEP_BYTES} bytes of prompt_embeds"
    if (longest := longest_whole(submit.prompt)) * row_bytes > MAX_STEP_BYTES:
        return f"{longest} rows must not be cut, and a step carries {MAX_STEP_BYTES} bytes of prompt_embeds"
    if submit.output.size and int(submit.output.min()) < 0:
        return "a token id of its output is negative"
    return None


def rows_between(submit: Submit, first: int, last: int, row_bytes: int) -> U8:
    """The rows of those of the request's tokens [first, last) that have an embedding."""
    start = int(np.count_nonzero(submit.prompt[:first] < 0))
    end = start + int(np.count_nonzero(submit.prompt[first:last] < 0))
    return submit.prompt_embeds[start * row_bytes : end * row_bytes]


def ids_before_text(prompt: I32) -> I32:
    """The ids that the text of the output follows: those behind the last embedding."""
    embedded = np.flatnonzero(prompt < 0)
    return prompt[embedded[-1] + 1 :] if embedded.size else prompt
