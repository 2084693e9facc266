"""`Speculator`: the drafts of each step of a worker.

The runner tells it of plans and of sampled tokens, and asks it for drafts before each step. The runner samples as always at the
position of every draft and stops at the first difference. Drafts therefore change how many tokens a step yields, and no token.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterable
from typing import Protocol

import numpy as np
from numpy.typing import NDArray

from actorllm.errors import is_failure
from actorllm.messages import I32, SALT_ROW, Drafted, LateInputs, StepPlan
from actorllm.model.inputs import Drafts, PersistentBatch
from actorllm.model.speculation.arctic import ArcticDrafter, find_cache
from actorllm.model.speculation.finished import FinishedOutputs
from actorllm.model.speculation.histories import Histories
from actorllm.model.speculation.suffix import SuffixDrafter
from actorllm.types.drafter import Speculation
from actorllm.types.speculation import SUFFIX, PayingDrafts, make_drafter

logger = logging.getLogger(__name__)


class BatchDrafter(Protocol):
    """What drafts for all rows of a step at once, from the batch itself (`model.cpu.draft_model`)."""

    def draft(self, batch: PersistentBatch, histories: Histories, slots: I32, wanted: I32) -> list[list[int]]:
        """The drafts of each of these decode rows, at most `wanted` of each."""

    def observe(self, slots: I32, num_drafted: I32, num_accepted: I32) -> None:
        """What became of the drafts of a step, by row."""


class NoDrafts:
    """Of a rank that is told its drafts by the first one."""

    def draft(self, batch: PersistentBatch, histories: Histories, slots: I32, wanted: I32) -> list[list[int]]:
        return [[] for _ in slots]

    def observe(self, slots: I32, num_drafted: I32, num_accepted: I32) -> None:
        return


class Speculator:
    """One worker's drafter, and what it knows of every slot.

    Arguments:
        options: of the engine.
        vocab_size: of the model.
        drafter: of whole batches; None: the one that the options name, which is asked row by row.

    Raises ConfigError for a drafter that cannot be built.
    """

    def __init__(self, options: Speculation, vocab_size: int, drafter: BatchDrafter | None = None) -> None:
        self._options = options
        self._vocab_size = vocab_size
        if drafter is None and options.method == SUFFIX and (make_cache := find_cache()) is not None:
            drafter = ArcticDrafter(options, vocab_size, make_cache)
        self._batch_drafter = drafter
        self._drafter = make_drafter(options, vocab_size) if drafter is None else None
        self.histories = Histories(options.num_speculative_tokens)
        self._paying: PayingDrafts | None = None
        self.take_costs(options)
        has_own_trees = options.method == SUFFIX and drafter is None
        max_requests = options.suffix_decoding_max_cached_requests if has_own_trees else 0
        self._finished = FinishedOutputs(max_requests) if max_requests else None
        self._forced: dict[int, list[int]] = {}
        """By slot, what its grammar leaves it no choice about."""
        self._by_grammar: set[int] = set()
        """Slots whose drafts of this step are those."""
        self.num_failures = 0
        """Calls of the drafter that raised."""

    def take_costs(self, options: Speculation) -> None:
        """What steps take is known, or not (`step_costs` is empty). options: with it."""
        self._paying = PayingDrafts(options) if options.step_costs else None

    def apply(self, plan: StepPlan, known_tokens: dict[int, I32]) -> None:
        """Slots that were freed, and new ones. known_tokens: of new slots, prompt and output."""
        for slot in plan.freed.tolist():
            history = self.histories.remove(slot)
            self._forced.pop(slot, None)
            if self._finished is not None and history is not None and history.num_outputs:
                self._finished.add(history.salt, history.output)
        if plan.new_rows.size:
            salts = dict(plan.new_salts.view(SALT_ROW).tolist()) if plan.new_salts.size else {}
            for slot, num_outputs in plan.new[["slot", "num_outputs"]].tolist():
                self.histories.add(slot, known_tokens[slot], num_outputs, salts.get(slot, b""))

    def clear(self) -> None:
        """No request is there any more."""
        self.histories.clear()
        self._forced.clear()

    def force(self, late: LateInputs, slots: I32, tokens: I32, runs: I32) -> None:
        """Keep what grammars force, of rows that have got as far as their last mask.

        slots, tokens, runs: of the rows of the result, all their tokens, and how many each has; no runs: one each.
        """
        ends = np.cumsum(runs if runs.size else np.ones(len(slots), np.int32)).tolist()
        of = {slot: (end, end - start) for slot, start, end in zip(slots.tolist(), [0, *ends], ends, strict=False)}
        at = 0
        for slot, count, size in zip(
            late.slots.tolist(), late.counts.tolist(), late.forced_counts.tolist(), strict=True
        ):
            forced = late.forced[at : at + size].tolist()
            at += size
            end, run = of.get(slot, (0, 0))
            self._forced.pop(slot, None)
            if run == count and size > 1 and int(tokens[end - 1]) == forced[0]:
                self._forced[slot] = forced[1:]

    def forget_forced(self, slots: Iterable[int]) -> None:
        """What grammars forced on these slots was of requests that are gone."""
        for slot in slots:
            self._forced.pop(slot, None)

    def store(self, slots: I32, tokens: I32) -> None:
        """What was sampled for these slots, one token each."""
        self.histories.store(slots, tokens)

    def of_plan(
        self,
        plan: StepPlan,
        batch: PersistentBatch,
        room: I32,
        most: int,
        tell: Callable[[Drafted], None] | None,
    ) -> Drafts | None:
        """The drafts of a step whose plan the batch has applied; None: it has none.

        Arguments:
            room: how many drafts each row has room for, [num_rows]; changed here.
            most: how many any row may have.
            tell: hears what late rows try; None: they try nothing, as their masks are made for one token.
        """
        slots = batch.decode_slots
        if plan.late_slots.size and tell is None:
            room[np.isin(slots, plan.late_slots)] = 0
        drafts = self.draft(batch, room, most)
        if plan.late_slots.size and tell is not None:
            tell(_of_late_rows(slots, drafts, plan))
        return drafts

    def may_draft(self, slots: I32) -> bool:
        """Whether any of these rows might draft once each of them has one token more."""
        found = (self.histories.of(slot) for slot in slots.tolist())
        return any(history is not None and history.rest <= 1 for history in found)

    def draft(self, batch: PersistentBatch, room: I32, most: int) -> Drafts | None:
        """Drafts for some of the decode rows of the batch; None: for none of them.

        Arguments:
            room: how many drafts each row has room for, [num_rows]; 0 or less: none.
            most: how many any row may have.
        """
        slots = batch.decode_slots
        wanted = np.zeros(len(slots), np.int32)
        by_row: dict[int, list[int]] = {}
        self._by_grammar.clear()
        for row, (slot, space) in enumerate(zip(slots.tolist(), room.tolist(), strict=True)):
            if (forced := self._forced.pop(slot, None)) and min(most, space) > 0:
                by_row[row] = forced[: min(most, space)]
                self._by_grammar.add(slot)
                continue
            history = self.histories.of(slot)
            if history is not None and (self._paying is not None or not history.rest):
                wanted[row] = max(0, min(most, space, history.length))
        if self._paying is not None:
            self._keep_what_pays(self._paying, slots, wanted)
        rows = np.flatnonzero(wanted)
        by_row |= zip(rows.tolist(), self._guess(batch, slots, rows, wanted), strict=True)
        counts = np.zeros(len(slots), np.int32)
        counts[list(by_row)] = [len(drafted) for drafted in by_row.values()]
        tokens = [token for row in sorted(by_row) for token in by_row[row]]
        return Drafts(counts, np.array(tokens, np.int32)) if tokens else None

    def _keep_what_pays(self, paying: PayingDrafts, slots: I32, wanted: I32) -> None:
        """Lower the number of drafts to what pays, and to one or none for rows whose drafts are mostly wrong.

        Such rows try one now and then: with a draft model all of them in one step, as a pass costs about the same for all.

        Arguments:
            slots: of the rows, [num_rows].
            wanted: how many drafts each row might have, [num_rows]; changed here.
        """
        able = {int(row): self.histories.existing(int(slots[row])) for row in np.flatnonzero(wanted)}
        for row, history in able.items():
            wanted[row] = min(wanted[row], paying.number(history.acceptance, len(slots)))
            history.is_trial = False
        paid = [row for row in able if wanted[row]]
        acceptances = [able[row].acceptance for row in paid]
        if paid and not paying.is_worth(len(slots), wanted[paid].tolist(), acceptances):
            wanted[:] = 0
        others = [row for row in able if not wanted[row]]
        due = [row for row in others if not able[row].rest]
        for row in others if due and paying.has_passes else due:
            wanted[row], able[row].is_trial = 1, True
            able[row].rest = able[row].pause  # also where nothing is guessed; `observe` sets it anew

    def _guess(self, batch: PersistentBatch, slots: I32, rows: NDArray[np.intp], wanted: I32) -> list[list[int]]:
        """The drafter's, of these rows."""
        if not rows.size:
            return []
        if self._batch_drafter is not None:
            return self._batch_drafter.draft(batch, self.histories, slots[rows], wanted[rows])
        columns = zip(slots[rows].tolist(), wanted[rows].tolist(), strict=True)
        return [self._ask(slot, number) for slot, number in columns]

    def _ask(self, slot: int, wanted: int) -> list[int]:
        """Usable drafts: at most `wanted`, all within the vocabulary."""
        history = self.histories.of(slot)
        assert history is not None
        assert self._drafter is not None
        tokens = history.tokens.view()
        tokens.flags.writeable = False
        try:
            if self._finished is not None and isinstance(self._drafter, SuffixDrafter):
                guessed = self._drafter.draft(tokens, wanted, self._finished.of(history.salt))
            else:
                guessed = self._drafter.draft(tokens, wanted)
            drafted = [int(token) for token, _ in zip(guessed, range(wanted), strict=False)]
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
        if self._batch_drafter is not None:
            self._batch_drafter.observe(slots, num_drafted, num_accepted)
        columns = zip(slots.tolist(), num_drafted.tolist(), num_accepted.tolist(), strict=True)
        for slot, drafted, accepted in columns:
            history = self.histories.of(slot)
            if drafted and history is not None and slot not in self._by_grammar:
                most, goes_by_costs = self._options.num_speculative_tokens, self._paying is not None
                history.observe(drafted, accepted, most, goes_by_costs=goes_by_costs)


def _of_late_rows(slots: I32, drafts: Drafts | None, plan: StepPlan) -> Drafted:
    """What the late rows of a plan try. slots: of the decode rows."""
    if drafts is None:
        return Drafted(step=plan.step)
    is_late = np.isin(slots, plan.late_slots) & (drafts.counts > 0)
    tokens = drafts.tokens[np.repeat(is_late, drafts.counts)]
    return Drafted(step=plan.step, slots=slots[is_late], counts=drafts.counts[is_late], tokens=tokens)
