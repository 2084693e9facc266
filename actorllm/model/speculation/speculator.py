"""`Speculator`: the drafts of each step of a worker.

The runner tells it of plans and of sampled tokens, and asks it for drafts before each step. The runner samples as always at the
position of every draft and stops at the first difference. Drafts therefore change how many tokens a step yields, and no token.
"""

from __future__ import annotations

import logging

import numpy as np

from actorllm.errors import is_failure
from actorllm.messages import I32, StepPlan
from actorllm.model.inputs import Drafts
from actorllm.model.speculation.histories import Histories
from actorllm.types.drafter import Speculation
from actorllm.types.speculation import make_drafter

logger = logging.getLogger(__name__)


class Speculator:
    """One worker's drafter, and what it knows of every slot.

    Arguments:
        options: of the engine.
        vocab_size: of the model.

    Raises ConfigError for a drafter that cannot be built.
    """

    def __init__(self, options: Speculation, vocab_size: int) -> None:
        self._options = options
        self._vocab_size = vocab_size
        self._drafter = make_drafter(options, vocab_size)
        self.histories = Histories(options.num_speculative_tokens)
        self.num_failures = 0
        """Calls of the drafter that raised."""

    def apply(self, plan: StepPlan, known_tokens: dict[int, I32]) -> None:
        """Slots that were freed, and new ones. known_tokens: of new slots, prompt and output."""
        for slot in plan.freed.tolist():
            self.histories.remove(slot)
        if plan.new_rows.size:
            for slot in plan.new["slot"].tolist():
                self.histories.add(slot, known_tokens[slot])

    def clear(self) -> None:
        """No request is there any more."""
        self.histories.clear()

    def store(self, slots: I32, tokens: I32) -> None:
        """What was sampled for these slots, one token each."""
        self.histories.store(slots, tokens)

    def draft(self, slots: I32, room: I32, most: int) -> Drafts | None:
        """Drafts for some of these decode rows; None: for none of them.

        Arguments:
            slots: of the rows, [num_rows].
            room: how many drafts each row has room for, [num_rows]; 0 or less: none.
            most: how many any row may have.
        """
        counts = np.zeros(len(slots), np.int32)
        found: list[int] = []
        for row, (slot, space) in enumerate(zip(slots.tolist(), room.tolist(), strict=True)):
            history = self.histories.of(slot)
            if history is None or history.rest:
                continue
            wanted = min(most, space, history.length)
            if wanted <= 0:
                continue
            drafted = self._ask(history.tokens, wanted)
            counts[row] = len(drafted)
            found += drafted
        return Drafts(counts, np.array(found, np.int32)) if found else None

    def _ask(self, tokens: I32, wanted: int) -> list[int]:
        """Usable drafts: at most `wanted`, all within the vocabulary."""
        tokens = tokens.view()
        tokens.flags.writeable = False
        try:
            drafted = [int(token) for token, _ in zip(self._drafter.draft(tokens, wanted), range(wanted), strict=False)]
        except BaseException as error:  # of a drafter of the application: a guess that is not made costs nothing
            if not is_failure(error):
                raise
            self.num_failures += 1
            if self.num_failures == 1:
                logger.exception("the drafter failed; its rows are computed without drafts", exc_info=error)
            return []
        wrong = next((i for i, token in enumerate(drafted) if not 0 <= token < self._vocab_size), len(drafted))
        return drafted[:wrong]

    def observe(self, slots: I32, num_drafted: I32, num_accepted: I32) -> None:
        """What became of the drafts of a step, by row."""
        columns = zip(slots.tolist(), num_drafted.tolist(), num_accepted.tolist(), strict=True)
        for slot, drafted, accepted in columns:
            history = self.histories.of(slot)
            if drafted and history is not None:
                history.observe(drafted, accepted, self._options.num_speculative_tokens)
