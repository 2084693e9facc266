"""`StepFailures`: failed steps and dead workers, the requests that may be at fault, and which requests may run meanwhile.

A failed step, and the death of the workers, say at best which requests were there. Until the one at fault is known,
fewer requests run:

- after failed steps, smaller and smaller groups (`bisection`);
- after a memory shortage, smaller steps (`memory_backoff`);
- after deaths, the few requests that are tried (`worker_deaths`).

Owns these three, the limits that hold meanwhile, and the requests that wait for a token since the workers died. The
Scheduler voids the steps, computes their requests again, and ends the requests that are found at fault here.

Invariants: the suspects of failed steps are forgotten when the workers die; from then on `worker_deaths` alone says
which requests are tried. `is_restricted` is true while there are suspects or smaller limits. It, `is_choosy` and
`is_any` are summed up after every change, so that asking costs nothing.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable
from dataclasses import replace
from typing import Any

import numpy as np
from numpy.typing import NDArray

from actorllm.messages import I32
from actorllm.scheduling.batch import Batch
from actorllm.scheduling.ledger import StepRecord
from actorllm.scheduling.limits import Limits
from actorllm.scheduling.sequence import Sequence, State
from actorllm.supervision.blame.bisection import MAX_FAILURES, StepBisection
from actorllm.supervision.blame.memory_backoff import SMALL_CHUNK, MemoryBackoff
from actorllm.supervision.blame.worker_deaths import MAX_ALONE, WorkerBisection

KILLED = f"the workers died {MAX_ALONE} times while they ran this request alone; the last time "
"""What a request is told that they die of."""


class StepFailures:
    """limits: those of the engine."""

    def __init__(self, limits: Limits, batch: Batch) -> None:
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
        self._suspects = StepBisection()
        self._memory = MemoryBackoff(limits.max_seqs, limits.max_tokens)
        self._worker_bisection = WorkerBisection()
        self._interrupted: set[Sequence] = set()
        """Their workers died, and they have had no token since."""

    # Who may run ------------------------------------------------------------------------------------------------------

    @property
    def is_holding_back(self) -> bool:
        """Whether some do not run who could if nobody else can."""
        return self.is_restricted or self._worker_bisection.is_resting

    @property
    def is_narrowing(self) -> bool:
        """Whether the last death of the workers told more about whom they die of."""
        return self._worker_bisection.is_narrowing

    @property
    def num_suspects(self) -> int:
        """Requests that the workers may have died of."""
        return len(self._worker_bisection)

    @property
    def num_retrying(self) -> int:
        """Requests of failed steps that are tried again in small groups."""
        return len(self._suspects)

    @property
    def num_memory_failures(self) -> int:
        return self._memory.num_failures

    def may_start(self, sequence: Sequence) -> bool:
        if self._worker_bisection.is_trying and not self._worker_bisection.may_start(sequence):
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
        self._worker_bisection.end_rest()

    def forgive(self) -> None:
        """Nobody could run: failed steps keep nobody back any more."""
        self._suspects.clear()
        self._memory.lift()
        self._sum_up()

    @property
    def _num_running(self) -> int:
        return self.limits.max_seqs - self._batch.num_free_slots

    def _sum_up(self) -> None:
        """After a change of whatever kind."""
        self.is_restricted = bool(self._suspects) or self._memory.is_active
        self.is_choosy = self.is_restricted or self._worker_bisection.is_trying
        self.is_any = self.is_restricted or bool(self._interrupted) or bool(self._worker_bisection)
        if self.limits.max_tokens != self._memory.max_tokens:
            self.limits = replace(self.limits, max_tokens=self._memory.max_tokens)

    # What happens -----------------------------------------------------------------------------------------------------

    def on_failed_step(self, failed: StepRecord, rows: I32, is_out_of_memory: bool) -> list[Sequence]:
        """A step failed; rows: those that are known to be at fault, if that is known. Returns who is to end for it."""
        self.num_failed_steps += 1
        named = failed.named
        present = dict.fromkeys(named)
        alive = [s for s in present if s.state is not State.FINISHED]
        known = {named[row] for row in rows.tolist() if 0 <= row < len(named)}
        at_fault = [s for s in alive if s in known]
        if not known:
            for sequence in alive:
                sequence.num_failures += 1
            at_fault = [s for s in alive if s.num_failures > MAX_FAILURES]
            rest = [s for s in alive if s.num_failures <= MAX_FAILURES]
            can_shrink = len(rest) > 1 or (failed.num_tokens > SMALL_CHUNK and not any(s.is_whole for s in rest))
            if is_out_of_memory and rest and can_shrink:
                self._memory.shrink(len(alive), failed.num_tokens)
            elif rest and (culprit := self._suspects.accuse(rest, len(present) - len(rest))) is not None:
                at_fault.append(culprit)
        self._sum_up()
        return at_fault

    def on_loss(self) -> None:
        """The workers died: from here on the quarantine says who is tried, and nobody else."""
        self.num_losses += 1
        self._suspects.clear()
        self._sum_up()

    def whom_they_died_of(
        self, in_flight: Iterable[StepRecord], waiting: Collection[Sequence], now: float
    ) -> list[Sequence]:
        """With these steps in flight; waiting: those who may run now. Returns who is found guilty."""
        present = dict.fromkeys(sequence for record in in_flight for sequence in record.named)
        alive = [s for s in present if s.state is not State.FINISHED]
        for sequence in alive:
            sequence.num_recoveries += 1
            if sequence not in self._interrupted:
                self._interrupted.add(sequence)
                sequence.interrupted = now
        guilty = self._worker_bisection.died(alive, waiting, num_gone=len(present) - len(alive))
        self._sum_up()
        return guilty

    def on_good_step(self, sequences: NDArray[Any], now: float) -> None:
        """A step went through, and these had a token."""
        if self._worker_bisection:
            self._worker_bisection.had_token(sequences)
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

    def discard(self, sequence: Sequence) -> None:
        """It has ended."""
        self._interrupted.discard(sequence)
        if self._worker_bisection:
            self._worker_bisection.acquit([sequence])
        if self.is_restricted:
            self._suspects.acquit(sequence)
        self._sum_up()

    def check_integrity(self) -> None:
        """AssertionError when what was summed up is not so."""
        said = self.is_restricted, self.is_choosy, self.is_any, self.limits
        self._sum_up()
        assert said == (self.is_restricted, self.is_choosy, self.is_any, self.limits), "a change was not noticed"
