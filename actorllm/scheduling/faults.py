"""`Faults`: what went wrong, whose fault it may be, and who may run because of that.

A failed step, and the death of the workers, say at best who was there. Each is answered by letting fewer run until it is
known: after failed steps smaller and smaller groups (`suspects`) or smaller steps if memory was short (`memory_backoff`);
after deaths the few who are tried (`quarantine`). Who has failed alone is set aside while there are others to try: a step of
theirs that goes through shows that it was him, and when nothing comes of anybody it was the workers (`failure_streak`). Owns
these four, the limits that hold meanwhile, and who waits for a token
since the workers died. The Scheduler voids the steps, computes everybody again and ends who is found guilty here.

Invariants: the suspects of failed steps are forgotten when the workers die; from there on the quarantine alone says who is
tried. `is_restricted` is true while there are suspects or smaller limits. What it, is_choosy and is_any say is summed up after
every change, so that asking costs nothing.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable
from dataclasses import replace
from typing import Any

import numpy as np
from numpy.typing import NDArray

from actorllm.messages import I32
from actorllm.scheduling.batch import Batch
from actorllm.scheduling.failure_streak import MAX_PROMPTS, FailureStreak
from actorllm.scheduling.ledger import StepRecord
from actorllm.scheduling.memory_backoff import SMALL_CHUNK, MemoryBackoff
from actorllm.scheduling.policy import Limits
from actorllm.scheduling.quarantine import MAX_ALONE, Quarantine
from actorllm.scheduling.sequence import Sequence, State
from actorllm.scheduling.suspects import MAX_FAILURES, Suspects

KILLED = f"the workers died {MAX_ALONE} times while they ran this request alone; the last time "
"""What a request is told that they die of."""


class Faults:
    """limits: those of the engine. has_other_workers: whether others can take the place of those that fail."""

    def __init__(self, limits: Limits, batch: Batch, has_other_workers: bool = False) -> None:
        self.limits = limits
        """Those that hold now."""
        self.is_restricted = False
        """After failed steps not everybody may run."""
        self.is_choosy = False
        """Some may not start now."""
        self.is_any = False
        """Something is left of what went wrong."""
        self.num_failed_steps = 0
        self.num_losses = 0
        self.num_recovered = 0
        self.recovery_s = 0.0
        self._batch = batch
        self._suspects = Suspects()
        self._memory = MemoryBackoff(limits.max_seqs, limits.max_tokens)
        self._quarantine = Quarantine()
        self._streak = FailureStreak()
        self._has_other_workers = has_other_workers
        self._set_aside: dict[Sequence, str] = {}
        """Those that failed alone, and with what, while others are to be tried."""
        self._first_failed: tuple[Sequence, ...] = ()
        """Who was in the first of the failed steps since one went through: workers may be broken since then."""
        self._interrupted: set[Sequence] = set()
        """Their workers died, and they have had no token since."""

    # Who may run ------------------------------------------------------------------------------------------------------

    @property
    def is_of_workers(self) -> bool:
        """Whether it is the workers that fail, and no request."""
        if not self._has_other_workers or not self._streak:
            return False
        # Where workers were lost before, it takes fresh ones to know more about who is tried: he may have broken these.
        is_undecided = bool(self._set_aside) and not self._suspects and bool(self._quarantine)
        return is_undecided or self._streak.num_prompts >= MAX_PROMPTS

    @property
    def is_holding_back(self) -> bool:
        """Whether some do not run who could if nobody else can."""
        return self.is_restricted or self._quarantine.is_resting

    @property
    def is_narrowing(self) -> bool:
        """Whether the last death of the workers told more about whom they die of."""
        return self._quarantine.is_narrowing

    @property
    def num_suspects(self) -> int:
        """Requests that the workers may have died of."""
        return len(self._quarantine)

    @property
    def num_retrying(self) -> int:
        """Requests of failed steps that are tried again in small groups."""
        return len(self._suspects)

    @property
    def num_memory_failures(self) -> int:
        return self._memory.num_failures

    def may_start(self, sequence: Sequence) -> bool:
        if self._quarantine.is_trying and not self._quarantine.may_start(sequence):
            return False
        if not self.is_restricted:
            return True
        if self._suspects and sequence not in self._suspects.on_trial:
            return False
        return self._num_running < self._memory.max_seqs

    def num_startable(self, waiting: Collection[Sequence]) -> int:
        """How many of those that wait may start as far as failed steps are concerned."""
        if self.is_restricted:
            if self._num_running >= self._memory.max_seqs:
                return 0
            if self._suspects:
                return sum(sequence in waiting for sequence in self._suspects.on_trial)
        return len(waiting)

    def slots_on_trial(self, slots: I32) -> I32 | None:
        """Those of the slots whose requests may be in a step; None: all of them."""
        if not self._suspects:
            return None
        on_trial = self._suspects.on_trial
        return np.array([slot for slot in slots.tolist() if self._batch.sequences[slot] in on_trial], np.int32)

    def held_back(self, running: Iterable[Sequence]) -> list[Sequence]:
        """Those that may not be in a step while others are under suspicion."""
        return [s for s in running if s not in self._suspects.on_trial] if self._suspects else []

    def end_rest(self) -> None:
        """Nobody but the suspects of the workers' death can run: they are tried again."""
        self._quarantine.end_rest()

    def forgive(self) -> None:
        """Nobody could run: failed steps keep nobody back any more."""
        self._suspects.clear()
        self._set_aside.clear()
        self._memory.lift()
        self._sum_up()

    @property
    def _num_running(self) -> int:
        return self.limits.max_seqs - self._batch.num_free_slots

    def _sum_up(self) -> None:
        """After a change of whatever kind."""
        self.is_restricted = bool(self._suspects) or self._memory.is_active
        self.is_choosy = self.is_restricted or self._quarantine.is_trying
        self.is_any = self.is_restricted or bool(self._interrupted) or bool(self._quarantine) or bool(self._streak)
        if self.limits.max_tokens != self._memory.max_tokens:
            self.limits = replace(self.limits, max_tokens=self._memory.max_tokens)

    # What happens -----------------------------------------------------------------------------------------------------

    def on_failed_step(
        self, failed: StepRecord, error: str, rows: I32, is_out_of_memory: bool
    ) -> list[tuple[Sequence, str]]:
        """A step failed; rows: those that are known to be at fault, if that is known. Returns who is to end, with which error."""
        self.num_failed_steps += 1
        named = failed.named
        present = dict.fromkeys(named)
        alive = [s for s in present if s.state is not State.FINISHED]
        known = {named[row] for row in rows.tolist() if 0 <= row < len(named)}
        at_fault = [(s, error) for s in alive if s in known]
        if not known:
            self._first_failed = self._first_failed or tuple(alive)
            for sequence in alive:
                sequence.num_failures += 1
            at_fault = [(s, error) for s in alive if s.num_failures > MAX_FAILURES]
            rest = [s for s in alive if s.num_failures <= MAX_FAILURES]
            can_shrink = len(rest) > 1 or (failed.num_tokens > SMALL_CHUNK and not any(s.is_whole for s in rest))
            if is_out_of_memory and rest and can_shrink:
                self._memory.shrink(len(alive), failed.num_tokens)
            elif rest and (culprit := self._suspects.accuse(rest, len(present) - len(rest))) is not None:
                at_fault += self._judge(culprit, error)
        self._sum_up()
        return at_fault

    def _judge(self, culprit: Sequence, error: str) -> list[tuple[Sequence, str]]:
        """A request failed alone. Nothing is decided while others can still show whether it was him."""
        self._streak.add([culprit])
        if not self._has_other_workers:
            return [(culprit, error)]
        self._set_aside[culprit] = error
        return [] if self._suspects or self.is_of_workers else self._convict()

    def _convict(self) -> list[tuple[Sequence, str]]:
        convicted, self._set_aside = [*self._set_aside.items()], {}
        return convicted

    def on_corrupted_step(self, sequences: Iterable[Sequence]) -> None:
        """Of a step came nothing but values that are not finite, and these have ended."""
        self._streak.add(sequences)
        self._sum_up()

    def on_loss(self) -> None:
        """The workers died: from here on the quarantine says who is tried, and nobody else."""
        self.num_losses += 1
        if not self.is_of_workers:
            self._first_failed = ()
        self._streak.clear()
        self._set_aside.clear()
        self._suspects.clear()
        self._sum_up()

    def whom_they_died_of(
        self, in_flight: Iterable[StepRecord], waiting: Collection[Sequence], now: float
    ) -> list[Sequence]:
        """With these steps in flight; waiting: those who may run now. Returns who is found guilty."""
        present = dict.fromkeys(sequence for record in in_flight for sequence in record.named)
        present |= dict.fromkeys(self._first_failed)  # of workers that were ended nothing is in flight any more
        self._first_failed = ()
        alive = [s for s in present if s.state is not State.FINISHED]
        for sequence in alive:
            sequence.num_recoveries += 1
            if sequence not in self._interrupted:
                self._interrupted.add(sequence)
                sequence.interrupted = now
        guilty = self._quarantine.died(alive, waiting, num_gone=len(present) - len(alive))
        self._sum_up()
        return guilty

    def on_good_step(self, sequences: NDArray[Any], now: float) -> list[tuple[Sequence, str]]:
        """A step went through, and these had a token. Returns who is to end, since the workers are good: with which error."""
        self._streak.clear()
        self._first_failed = ()
        if self._quarantine:
            self._quarantine.had_token(sequences)
        if self._interrupted:
            for sequence in self._interrupted.intersection(sequences):
                self._interrupted.discard(sequence)
                sequence.recovery_s += now - sequence.interrupted
                self.recovery_s += now - sequence.interrupted
                self.num_recovered += 1
        if self.is_restricted:
            for sequence in sequences:
                sequence.num_failures = 0
                self._suspects.acquit(sequence)
            if self._memory.is_active:
                self._memory.on_good_step()
        self._sum_up()
        if not self._set_aside:
            return []
        for sequence in sequences:
            self._set_aside.pop(sequence, None)
        return self._convict()

    def discard(self, sequence: Sequence) -> None:
        """It has ended."""
        self._set_aside.pop(sequence, None)
        self._interrupted.discard(sequence)
        if self._quarantine:
            self._quarantine.acquit([sequence])
        if self.is_restricted:
            self._suspects.acquit(sequence)
            if not self._suspects:
                self._set_aside.clear()  # nobody is left to show whether it was them: they are tried once more
        self._sum_up()

    def check_integrity(self) -> None:
        """AssertionError when what was summed up is not so."""
        said = self.is_restricted, self.is_choosy, self.is_any, self.limits
        self._sum_up()
        assert said == (self.is_restricted, self.is_choosy, self.is_any, self.limits), "a change was not noticed"
