"""`StepFailures`: failed steps and dead workers, the requests that may be at fault, and which requests may run meanwhile.

A failed step, and the death of the workers, say at best which requests were there. Until the one at fault is known,
fewer requests run:

- after failed steps, the probe groups of a `bisection`. A probe is a step, so a retry costs one step. A failed step is
  no accident: the search begins at once, and a request that fails alone is at fault.
- after a memory shortage, smaller steps (`memory_backoff`);
- after deaths, the few requests that are probed (`worker_deaths`).

Owns these three, the limits that hold meanwhile, and the requests that wait for a token since the workers died. The
Scheduler voids the steps, computes their requests again, and ends the requests that are found at fault here.

Invariants: the suspects of failed steps are forgotten when the workers die; from then on `worker_deaths` alone says
which requests are probed. The three flags are set after every change, so that the scheduler asks at no cost.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable
from dataclasses import replace
from typing import Any

import numpy as np
from numpy.typing import NDArray

from actorllm.messages import I32
from actorllm.scheduling.batch import Batch
from actorllm.scheduling.ledger import Ledger, StepRecord
from actorllm.scheduling.limits import Limits
from actorllm.scheduling.sequence import RequestKey, Sequence, State
from actorllm.supervision.blame.bisection import Bisection
from actorllm.supervision.blame.memory_backoff import SMALL_CHUNK, MemoryBackoff
from actorllm.supervision.blame.worker_deaths import MAX_ALONE, WorkerBisection

MAX_FAILURES = 40
"""Steps in a row, without a token between them, that may fail with a request among others. More than halving ever takes,
even if steps get smaller for want of memory: whatever a policy does, a request that never works ends at last."""

KILLED = f"the workers died {MAX_ALONE} times while they ran this request alone; the last time "
"""How the error begins of a request that the workers die of."""


class StepFailures:
    """limits: those of the engine. ledger: the steps in flight. probes_alone: as of WorkerBisection."""

    def __init__(self, limits: Limits, batch: Batch, ledger: Ledger, *, probes_alone: bool = False) -> None:
        self.limits = limits
        """Those that hold now."""
        self.is_restricting_steps = False
        """After failed steps: a step holds one probe group, or is smaller than the engine's limits."""
        self.is_restricting_starts = False
        """Some waiting requests may not start: `may_start` says which."""
        self.is_recovering = False
        """A failure is not settled: `on_good_step` and `discard` must be called."""
        self.num_failed_steps = 0
        self.num_losses = 0
        self.num_recovered = 0
        self.recovery_s = 0.0
        self._batch = batch
        self._ledger = ledger
        self._step_bisection: Bisection[Sequence] = Bisection(max_alone=1)
        self._memory = MemoryBackoff(limits.max_seqs, limits.max_tokens)
        self._worker_bisection = WorkerBisection(probes_alone=probes_alone)
        self._interrupted: set[Sequence] = set()
        """Their workers died, and they have had no token since."""

    # What may run -----------------------------------------------------------------------------------------------------

    @property
    def is_holding_back(self) -> bool:
        """Whether requests wait that could run if no other request can."""
        return self.is_restricting_steps or self._worker_bisection.is_resting

    @property
    def is_narrowing(self) -> bool:
        """Whether the last death of the workers narrowed the search."""
        return self._worker_bisection.is_narrowing

    @property
    def is_probing_workers(self) -> bool:
        """Whether some requests wait while others are probed, of which the workers may have died."""
        return self._worker_bisection.is_probing

    @property
    def num_suspects(self) -> int:
        """Requests that the workers may have died of."""
        return len(self._worker_bisection)

    @property
    def num_retrying(self) -> int:
        """Requests of failed steps that are tried again in small groups."""
        return len(self._step_bisection)

    @property
    def num_memory_failures(self) -> int:
        return self._memory.num_failures

    def may_start(self, sequence: Sequence) -> bool:
        if self._worker_bisection.is_probing and not self._worker_bisection.may_start(sequence.request):
            return False
        if self._worker_bisection.isolated is not None and self._is_beside_others(sequence.request):
            return False
        if not self.is_restricting_steps:
            return True
        if self._step_bisection and sequence not in self._step_bisection.group:
            return False
        return self._num_running < self._memory.max_seqs

    def _is_beside_others(self, request: RequestKey) -> bool:
        """Whether a step in flight has another request: the workers could die of that one."""
        return any(other.request != request for record in self._ledger for other in record.named)

    def set_aside(self, running: Iterable[Sequence]) -> list[Sequence]:
        """Those that have to give their slots up, since one request is probed with nothing else in a step."""
        isolated = self._worker_bisection.isolated
        return [] if isolated is None else [sequence for sequence in running if sequence.request != isolated]

    def num_startable(self, waiting: Collection[Sequence]) -> int:
        """How many of those that wait may start as far as failed steps are concerned."""
        if self.is_restricting_steps:
            if self._num_running >= self._memory.max_seqs:
                return 0
            if self._step_bisection:
                return sum(sequence in waiting for sequence in self._step_bisection.group)
        return len(waiting)

    def probed_slots(self, slots: I32) -> I32 | None:
        """Those of the slots whose requests may be in a step; None: all of them."""
        if not self._step_bisection:
            return None
        group = self._step_bisection.group
        return np.array([slot for slot in slots.tolist() if self._batch.sequences[slot] in group], np.int32)

    def held_back(self, running: Iterable[Sequence]) -> list[Sequence]:
        """Those that may not be in a step while a group is probed."""
        return [s for s in running if s not in self._step_bisection.group] if self._step_bisection else []

    def end_rest(self) -> None:
        """Only the suspects of the workers' death can run: they are probed again."""
        self._worker_bisection.end_rest()

    def lift_restrictions(self) -> None:
        """No request could run: failed steps hold none back any more."""
        self._step_bisection.clear_all()
        self._memory.lift()
        self._set_flags()

    @property
    def _num_running(self) -> int:
        return self.limits.max_seqs - self._batch.num_free_slots

    def _set_flags(self) -> None:
        """After a change of whatever kind."""
        self.is_restricting_steps = bool(self._step_bisection) or self._memory.is_active
        self.is_restricting_starts = self.is_restricting_steps or self._worker_bisection.is_probing
        self.is_recovering = self.is_restricting_steps or bool(self._interrupted) or bool(self._worker_bisection)
        if self.limits.max_tokens != self._memory.max_tokens:
            self.limits = replace(self.limits, max_tokens=self._memory.max_tokens)

    # What happens -----------------------------------------------------------------------------------------------------

    def on_failed_step(self, failed: StepRecord, rows: I32, is_out_of_memory: bool) -> list[Sequence]:
        """A step failed; rows: those that are known to be at fault, if that is known. Returns the requests to end."""
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
            elif rest:
                is_alone = len(present) == 1  # one that has ended meanwhile may have been at fault
                self._step_bisection.add(rest)
                at_fault += self._step_bisection.fail(rest, is_alone)
                self._step_bisection.begin()
        self._set_flags()
        return at_fault

    def on_lost_workers(self) -> None:
        """The workers died: from here on their bisection alone says which requests are probed."""
        self.num_losses += 1
        self._step_bisection.clear_all()
        self._set_flags()

    def blamed_for_death(
        self, in_flight: Iterable[StepRecord], waiting: Collection[Sequence], now: float
    ) -> list[RequestKey]:
        """The workers died with these steps in flight, and no request runs any more. Returns those to end, with all sequences.

        waiting: those that may run now.
        """
        present = dict.fromkeys(sequence for record in in_flight for sequence in record.named)
        alive = [s for s in present if s.state is not State.FINISHED]
        for sequence in alive:
            sequence.num_recoveries += 1
            if sequence not in self._interrupted:
                self._interrupted.add(sequence)
                sequence.interrupted = now
        requests = dict.fromkeys(s.request for s in alive)
        probed = dict.fromkeys(s.request for s in alive if s.submit.num_deaths and not s.has_token_since_submitted)
        counted = {s.request for s in alive if s.request in probed and s.submit.probe_size == 1}
        num_gone = len({s.request for s in present} - requests.keys())
        waiting_requests = (s.request for s in waiting)
        blamed = self._worker_bisection.died(requests, waiting_requests, num_gone, [*probed], counted)
        self._set_flags()
        return blamed

    def on_good_step(self, sequences: NDArray[Any], now: float) -> None:
        """A step went through, and these had a token."""
        if self._worker_bisection:
            unproven = {s.request for s in self._interrupted.difference(sequences)}  # a sibling may be what kills
            self._worker_bisection.had_token({s.request for s in sequences} - unproven)
        if self._interrupted:
            for sequence in self._interrupted.intersection(sequences):
                self._interrupted.discard(sequence)
                sequence.recovery_s += now - sequence.interrupted
                self.recovery_s += now - sequence.interrupted
                self.num_recovered += 1
        if self.is_restricting_steps:
            for sequence in sequences:
                sequence.num_failures = 0
            self._step_bisection.clear(sequences)
            if self._memory.is_active:
                self._memory.on_good_step()
        self._set_flags()

    def discard(self, sequence: Sequence) -> None:
        """It has ended."""
        self._interrupted.discard(sequence)
        if self._worker_bisection:
            self._worker_bisection.clear([sequence.request])
        if self.is_restricting_steps:
            self._step_bisection.clear([sequence])
        self._set_flags()

    def check_integrity(self) -> None:
        """AssertionError when what was summed up is not so."""
        before = self._flags
        self._set_flags()
        assert before == self._flags, "a change was not noticed"

    @property
    def _flags(self) -> tuple[object, ...]:
        return self.is_restricting_steps, self.is_restricting_starts, self.is_recovering, self.limits
