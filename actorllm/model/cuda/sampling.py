"""Choosing the next tokens on the device, as docs/sampling.md defines it.

Three ways, by what the rows of a step want (`Way`). HEAD: temperature alone; the product with the LM head leaves no
logits behind. LOGITS: logits are written, filtered by the columns of the state table and drawn from. It serves more rows than
HEAD takes, filters, and log-probabilities. EDITED: logits are also changed in between, by rules and
bit masks which the host uploads; when it can, the forward has been launched already. The first two are part of the
step's graph.

Sampling advances the state table: the chosen token is the input of the slot's next step. Owned by the runner.
"""

from __future__ import annotations

from dataclasses import dataclass
from enum import Enum

import numpy as np
import torch
from numpy.typing import NDArray

from actorllm.messages import I32, U32
from actorllm.messages.logprobs import LogprobSpan
from actorllm.model.cuda import ops
from actorllm.model.cuda.collectives import Collectives
from actorllm.model.cuda.device import ALIGNMENT, Device
from actorllm.model.cuda.state import StateTable
from actorllm.model.logits import EditList
from actorllm_kernels.edit_logits import Edits, Penalties
from actorllm_kernels.sample_pick import Offers
from actorllm_kernels.sample_topk_topp import FilterScratch

MAX_HEAD_ROWS = 64
"""Rows that the product with the LM head can sample itself."""

MAX_EDITS = 4096
"""Entries that the recorded step has room for; a step with more is launched kernel by kernel."""

MAX_KERNEL_TOP = 32
"""Most likely ids that the kernel looks for; more are sorted."""


class Way(Enum):
    """How the tokens of a step are chosen; see the module."""

    HEAD = "head"
    LOGITS = "logits"
    EDITED = "edited"


@dataclass(frozen=True, slots=True)
class LMHead:
    """The last norm and the head, where they are what `lm_head_sample` computes."""

    weight: torch.Tensor  # [vocab_size, hidden_size]
    norm: torch.Tensor
    eps: float


@dataclass(slots=True)
class RowEdits:
    """What is done to the logits of a step, on the device."""

    edits: Edits
    penalties: Penalties
    masks: torch.Tensor | None  # int32 [num_masks, num_words]
    mask_rows: torch.Tensor | None  # int32 [num_rows]


class DeviceSampler:
    """The memory of sampling, for up to so many rows, and its launches."""

    def __init__(
        self, vocab_size: int, num_rows: int, state: StateTable, device: Device, collectives: Collectives | None = None
    ) -> None:
        """collectives: of ranks that have no logits but the first one, which tells the others what it has sampled."""
        self.vocab_size = vocab_size
        self._state, self._device = state, device
        self._collectives = collectives if collectives is not None else Collectives()
        on = device.torch_device
        width = -(-num_rows // ALIGNMENT) * ALIGNMENT
        self.results = torch.zeros(3, width, dtype=torch.int32, device=on)
        """The tokens, whether logits are finite, and the bits of `sums`: one copy takes all to the host (`unpack`)."""
        self.tokens, self.is_finite = self.results[0, :num_rows], self.results[1, :num_rows]
        self.sums = self.results[2, :num_rows].view(torch.float32)
        """Of each row's logits before they were changed, where they are: finite or not."""
        self.logits = torch.zeros(num_rows, vocab_size, device=on)
        self._offers = Offers.empty(width, vocab_size, on)
        self._scratch = FilterScratch.empty(width, vocab_size, on)
        self.num_words = -(-vocab_size // 32)
        integers = torch.full((3, MAX_EDITS), -1, dtype=torch.int32, device=on)
        self._integers, self._biases = integers, torch.zeros(MAX_EDITS, device=on)
        self._penalties = torch.zeros(3, width, device=on)
        self._masks = torch.zeros(num_rows, self.num_words, dtype=torch.int32, device=on)
        self._mask_rows = torch.full((num_rows,), -1, dtype=torch.int32, device=on)

    @staticmethod
    def unpack(
        results: NDArray[np.int32], count: int
    ) -> tuple[NDArray[np.int32], NDArray[np.int32], NDArray[np.float32]]:
        """Tokens, is_finite and sums of the first rows, from what became of `results` on the host."""
        tokens, is_finite, sums = results[:, :count].copy()  # the memory of a download goes back
        return tokens, is_finite, sums.view(np.float32)

    # Launches: these may be recorded ----------------------------------------------------------------------------------

    def from_hidden(self, hidden: torch.Tensor, head: LMHead, rows: torch.Tensor, *, pdl: bool = False) -> None:
        """HEAD. hidden: [num_rows, hidden_size] before the last norm; rows: slots, or -1."""
        offers = self._offers_of(len(rows))
        ops.lm_head_sample(
            hidden, head.weight, rows, self._state.sampling, offers, norm=head.norm, eps=head.eps, pdl=pdl
        )
        self._pick(offers, rows, pdl=pdl)

    def from_logits(self, rows: torch.Tensor) -> None:
        """LOGITS: of the first rows of `logits`."""
        self._draw(rows, None, None)

    def from_edited(self, rows: torch.Tensor, edits: RowEdits) -> None:
        """EDITED: the same, once they are changed."""
        logits = self.logits[: len(rows)]
        if not self._collectives.rank:
            ops.row_sums(logits, self.sums[: len(rows)])
            ops.edit_logits(logits, edits.edits, edits.penalties)
        self._draw(rows, edits.masks, edits.mask_rows)

    def recorded_edits(self, num_rows: int) -> RowEdits:
        """The place of the edits that a recorded step applies (`place`)."""
        row, id, count = self._integers.unbind(0)
        presence, frequency, repetition = self._penalties[:, :num_rows].unbind(0)
        return RowEdits(
            Edits(row, id, self._biases, count),
            Penalties(presence, frequency, repetition),
            self._masks[:num_rows],
            self._mask_rows[:num_rows],
        )

    def _draw(self, rows: torch.Tensor, masks: torch.Tensor | None, mask_rows: torch.Tensor | None) -> None:
        count = len(rows)
        if not self._collectives.rank:
            logits, scratch, offers = self.logits[:count], self._scratch.first(count), self._offers_of(count)
            ops.tile_maxima(logits, scratch, masks, mask_rows)
            ops.find_cutoffs(logits, rows, self._state.sampling, self._state.filters, scratch)
            ops.draw_tiles(logits, rows, self._state.sampling, scratch, offers)
            self._pick(offers, rows)
        self._collectives.tell(self.results, rows, self._state.last_token)

    def _pick(self, offers: Offers, rows: torch.Tensor, *, pdl: bool = False) -> None:
        count = len(rows)
        ops.sample_pick(offers, rows, self._state.sampling, self.tokens[:count], self.is_finite[:count], pdl=pdl)

    def _offers_of(self, count: int) -> Offers:
        o = self._offers
        return Offers(o.highest[:count], o.weight[:count], o.id[:count])

    # Edits ------------------------------------------------------------------------------------------------------------

    def upload(self, edits: EditList, masks: dict[int, U32]) -> RowEdits:
        """Edits of any number, in memory of their own."""
        num_rows = edits.penalties.shape[1]
        columns = edits if edits.row.size else _NOTHING
        row, id, count = self._device.upload_parts(columns.row, columns.id, columns.count)
        bias, presence, frequency, repetition = self._device.upload_parts(columns.bias, *edits.penalties)
        words = mask_rows = None
        if masks:
            words, mask_rows = self._upload_masks(masks, num_rows)
        return RowEdits(Edits(row, id, bias, count), Penalties(presence, frequency, repetition), words, mask_rows)

    def place(self, edits: EditList, masks: dict[int, U32]) -> bool:
        """Put them where a recorded step looks for them. False: there are more than it has room for."""
        size, num_rows = edits.row.size, edits.penalties.shape[1]
        if size > MAX_EDITS:
            return False
        self._integers[0, size:].fill_(-1)
        if size:
            self._integers[:, :size].copy_(self._device.upload(np.stack((edits.row, edits.id, edits.count))))
            self._biases[:size].copy_(self._device.upload(edits.bias))
            self._penalties[:, :num_rows].copy_(self._device.upload(edits.penalties))
        self._mask_rows.fill_(-1)
        if masks:
            words, mask_rows = self._upload_masks(masks, num_rows)
            self._masks[: len(words)].copy_(words)
            self._mask_rows[:num_rows].copy_(mask_rows)
        return True

    def _upload_masks(self, masks: dict[int, U32], num_rows: int) -> tuple[torch.Tensor, torch.Tensor]:
        mask_rows = np.full(num_rows, -1, np.int32)
        mask_rows[list(masks)] = np.arange(len(masks))
        words = np.stack([mask[: self.num_words] for mask in masks.values()]).view(np.int32)
        return self._device.upload(words), self._device.upload(mask_rows)

    # Log-probabilities ------------------------------------------------------------------------------------------------

    def top_logprobs(
        self, logits: torch.Tensor, tokens: torch.Tensor, num_top: int
    ) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        """Of the chosen tokens and the most likely ones. logits: float32 [num_rows, vocab_size], unchanged.

        Returns ids int32 and log-probabilities float32 [num_rows, 1 + num_top], ranks int32 [num_rows].
        """
        on, num_rows = logits.device, len(logits)
        if num_top > MAX_KERNEL_TOP:
            return sorted_logprobs(logits, tokens, num_top)
        width = 1 << max(0, num_top - 1).bit_length() if num_top else 0  # of each width, the kernel is compiled once
        width = min(width, self.vocab_size)
        ids = torch.empty(num_rows, 1 + width, dtype=torch.int32, device=on)
        values = torch.empty(num_rows, 1 + width, device=on)
        ranks = torch.empty(num_rows, dtype=torch.int32, device=on)
        scratch = FilterScratch.empty(-(-num_rows // ALIGNMENT) * ALIGNMENT, self.vocab_size, on)
        ops.tile_maxima(logits, scratch, has_mass=True)
        ops.top_logprobs(logits, tokens, scratch, ids, values, ranks)
        return ids[:, : 1 + num_top].contiguous(), values[:, : 1 + num_top].contiguous(), ranks

    def logprobs_of(
        self, logits: torch.Tensor, token: torch.Tensor, ids: torch.Tensor, *, as_logits: bool = False
    ) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        """The same for one row of logits [1, vocab_size] and given ids int64, in their order. token: int32 [1]."""
        wanted = torch.cat((token.long(), ids)).unsqueeze(0)
        values = (logits if as_logits else torch.log_softmax(logits, 1)).gather(1, wanted)
        ranks = (logits >= logits.gather(1, wanted[:, :1])).sum(1, dtype=torch.int32)
        return wanted.int(), values, ranks


def sorted_logprobs(
    logits: torch.Tensor, tokens: torch.Tensor, num_top: int, *, as_logits: bool = False
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """As `DeviceSampler.top_logprobs`, in plain torch. as_logits: the values are the logits themselves."""
    order = torch.sort(logits, dim=1, descending=True, stable=True).indices[:, :num_top]
    ids = torch.cat((tokens.long().unsqueeze(1), order), 1)
    values = (logits if as_logits else torch.log_softmax(logits, 1)).gather(1, ids)
    ranks = (logits >= logits.gather(1, ids[:, :1])).sum(1, dtype=torch.int32)
    return ids.int(), values, ranks


@dataclass(slots=True)
class PendingSpans:
    """Log-probabilities on their way to the host: three tensors of a download."""

    at: int
    """Where in the download."""
    rows: list[tuple[int, int, int, int]]
    """(row of the span, its position, first of its rows in the tensors, how many)."""
    ahead: list[int] | None = None
    """Of each, how many drafts come before it; None: none."""

    def spans(
        self, arrays: list[np.ndarray[tuple[int, ...], np.dtype[np.float32 | np.int32]]], runs: I32
    ) -> list[LogprobSpan]:
        """runs: how many tokens each row has; none: one each."""
        ids, values, ranks = arrays[self.at : self.at + 3]
        kept = self.rows
        if self.ahead is not None:
            is_right = [
                ahead < (runs[row] if runs.size else 1) for (row, *_), ahead in zip(kept, self.ahead, strict=True)
            ]
            kept = [entry for entry, is_kept in zip(kept, is_right, strict=True) if is_kept]
        return [
            LogprobSpan(row, position, ids[a : a + n], values[a : a + n], ranks[a : a + n])  # type: ignore[arg-type]
            for row, position, a, n in kept
        ]


_NO_ROW: I32 = np.full(1, -1, np.int32)
_NOTHING = EditList(_NO_ROW, _NO_ROW, np.zeros(1, np.float32), _NO_ROW, np.zeros((3, 0), np.float32))
"""One entry that does nothing: a launch needs one."""
