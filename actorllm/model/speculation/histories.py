"""`Histories`: the newest tokens of every slot of a worker, and how far drafts of each have been right.

Invariants: a slot has a history from the plan that lists it as new until the plan that frees it. A history has the tokens that
the worker knows, in their order, without those that have fallen out of the window. Nothing of it is needed for a token: after a
crash or a preemption it begins anew from the known tokens. Owned by `Speculator`. Pure.
"""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

from actorllm.messages import I32
from actorllm.types.drafter import HISTORY_TOKENS
from actorllm.types.speculation import LIKELY_ACCEPTANCE

ROOM_AT_FIRST = 256
LONGEST_REST = 64
"""Tokens for which a row drafts nothing after many steps whose drafts were all wrong."""
RATE = 1 / 8
"""Of what is known of a row's drafts, the share that the newest one makes up."""
TRIAL_RATE = 1 / 4
"""The same of a right one that was only tried: text that begins to repeat itself is soon seen."""


class History:
    """Of one slot. tokens: its known ones."""

    __slots__ = (
        "_size",
        "_tokens",
        "acceptance",
        "is_trial",
        "length",
        "num_misses",
        "num_outputs",
        "pause",
        "rest",
        "salt",
    )

    def __init__(self, tokens: I32, most: int, num_outputs: int = 0, salt: bytes = b"") -> None:
        """most: drafts of a step. num_outputs: how many of the tokens are output. salt: of what it may be guessed from."""
        self.num_outputs = num_outputs
        self.salt = salt
        kept = tokens[-HISTORY_TOKENS:]
        self._tokens: NDArray[np.int32] = np.empty(min(2 * HISTORY_TOKENS, kept.size + ROOM_AT_FIRST), np.int32)
        self._tokens[: kept.size] = kept
        self._size = kept.size
        self.length = most
        """How many drafts are worth a try now."""
        self.num_misses = 0
        """Steps in a row whose drafts were all wrong."""
        self.rest = 0
        """Tokens to come without drafts."""
        self.acceptance = LIKELY_ACCEPTANCE
        """How often a draft has been right where those before it were, the newest ones above all."""
        self.is_trial = False
        """The draft of this step does not pay by what is known. It shows whether that is so still."""
        self.pause = 1
        """Tokens between two trials."""

    @property
    def tokens(self) -> I32:
        """The newest tokens, as a view that is valid until the next `push`."""
        return self._tokens[max(0, self._size - HISTORY_TOKENS) : self._size]

    @property
    def output(self) -> I32:
        """The newest tokens of the output, as `tokens`."""
        tokens = self.tokens
        return tokens[max(0, tokens.size - self.num_outputs) :]

    def push(self, token: int) -> None:
        self.num_outputs += 1
        if self._size == self._tokens.size:
            kept = self.tokens
            room = min(2 * HISTORY_TOKENS, 2 * kept.size + ROOM_AT_FIRST)
            grown = np.empty(room, np.int32)
            grown[: kept.size] = kept
            self._tokens, self._size = grown, kept.size
        self._tokens[self._size] = token
        self._size += 1
        if self.rest:
            self.rest -= 1

    def observe(self, num_drafted: int, num_accepted: int, most: int, *, goes_by_costs: bool = False) -> None:
        """A step checked drafts. Right ones make the next run longer, wrong ones make it shorter and then rarer.

        A function of the row's own tokens and drafts, so that what else is in the batch has no part in it.

        Arguments:
            num_drafted, num_accepted: of this row.
            most: drafts of a step.
            goes_by_costs: what drafts cost is known, so that a row drafts as long as that pays (`PayingDrafts`).
        """
        is_wrong = num_accepted < num_drafted
        rate = TRIAL_RATE if self.is_trial else RATE
        self.acceptance = 1 - (1 - self.acceptance) * (1 - rate) ** num_accepted
        self.acceptance *= (1 - RATE) ** is_wrong
        if num_accepted == num_drafted:
            self.length = min(most, 2 * max(self.length, num_drafted))
        else:
            self.length = max(1, min(self.length, num_accepted + 1))
        if goes_by_costs:
            if self.is_trial:
                self.is_trial = False
                self.pause = min(LONGEST_REST, 2 * self.pause) if is_wrong else max(1, self.pause // 4)
                self.rest = self.pause
            return
        if num_accepted:
            self.num_misses = 0
            return
        self.num_misses += 1
        self.rest = min(LONGEST_REST, 1 << min(self.num_misses, 6))


class Histories:
    """See the module docstring."""

    def __init__(self, most: int) -> None:
        self._most = most
        self._of: dict[int, History] = {}

    def __len__(self) -> int:
        return len(self._of)

    def add(self, slot: int, tokens: I32, num_outputs: int = 0, salt: bytes = b"") -> None:
        self._of[slot] = History(tokens, self._most, num_outputs, salt)

    def remove(self, slot: int) -> History | None:
        return self._of.pop(slot, None)

    def clear(self) -> None:
        self._of.clear()

    def of(self, slot: int) -> History | None:
        return self._of.get(slot)

    def existing(self, slot: int) -> History:
        """Of a slot that is known to have one."""
        return self._of[slot]

    def store(self, slots: I32, tokens: I32) -> None:
        """What was sampled for these slots."""
        for slot, token in zip(slots.tolist(), tokens.tolist(), strict=True):
            history = self._of.get(slot)
            if history is not None:
                history.push(token)
