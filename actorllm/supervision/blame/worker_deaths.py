"""`WorkerBisection`: the search for the request that the workers die of.

A *suspect* was in a step in flight when the workers died, and has had no token since. One death proves nothing, since
the process may have been killed from outside. All requests go on together, and a token clears a suspect. If the workers
die again before that, suspects are tried: only some of them may start, and all other requests wait. The trial ends when
each of them has had a token, or has ended. If the workers die first, the tried suspects become the last in line. A
cleared request goes on until the next death. A request that ran alone and lost the workers `MAX_ALONE` times fails. A
request that ended while it was in flight beside another counts as present. One poison request among n suspects takes
about log2(n) deaths; the others wait for a few steps.

Too many deaths in a row end the engine (`supervision.restart`), unless each narrows the search (`is_narrowing`). A
death does when fewer suspects were tried together than ever before, or one ran alone. With n suspects there are log2(n)
+ MAX_ALONE such deaths of each. Any number of poison requests is therefore found, and a search that does not advance
ends.

The more deaths there were in a row, the fewer suspects are tried at a time. From the third on, the trial rests after
every death until a request beside the suspects has had a token. It rests only if one may run. If the workers die
meanwhile, the requests that ran are suspects as well, and the trial goes on.

Pure. Asked by the Scheduler; costs nothing while there is no suspect.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass

from actorllm.scheduling.sequence import Sequence

MAX_IN_A_ROW = 3
"""Deaths in a row after which those run first who are not suspected, if there are any."""

MAX_ALONE = 2
"""Deaths of the workers while they ran one request alone, after which it fails."""


@dataclass(slots=True)
class Suspicion:
    """What is known of a suspect."""

    num_alone: int = 0
    """Deaths while it ran all alone."""
    most_beside: int | None = None
    """With how many it may be tried, itself included: half as many as the last time. None: it was not tried yet."""


class WorkerBisection:
    """The suspects. Falsy while there are none."""

    def __init__(self) -> None:
        self._suspects: dict[Sequence, Suspicion] = {}
        """In the order in which they are tried."""
        self._trial: set[Sequence] | None = None
        """Those that may run; None: everybody."""
        self._num_in_a_row = 0
        self._is_resting = False
        self.is_narrowing = False
        """Whether the last death made the search narrower. With n suspects that is so for some n log2(n) deaths at most."""

    def __len__(self) -> int:
        return len(self._suspects)

    @property
    def is_trying(self) -> bool:
        """Whether some may not start now."""
        return self._trial is not None

    @property
    def is_resting(self) -> bool:
        """Whether the suspects wait for somebody else to have a token."""
        return self._is_resting

    def end_rest(self) -> None:
        """Nobody else can run: the trial goes on."""
        self._is_resting = False

    def may_start(self, sequence: Sequence) -> bool:
        if self._is_resting:
            return sequence not in self._suspects
        return self._trial is None or sequence in self._trial

    def died(
        self, in_flight: Iterable[Sequence], waiting: Iterable[Sequence] = (), num_gone: int = 0
    ) -> list[Sequence]:
        """The workers died with steps of these in flight. Returns who is found guilty; they are no longer here.

        waiting: those who may run now, suspects or not. num_gone: others that were in those steps and have ended
        meanwhile. The workers may have died of them, so nobody was alone.
        """
        present = dict.fromkeys(in_flight)
        self.is_narrowing = False
        if not present:
            return []
        self._num_in_a_row = self._num_in_a_row + 1 if self._suspects else 1
        again = [sequence for sequence in present if sequence in self._suspects]
        begins = self._trial is None and (bool(again) or self._num_in_a_row > 1)
        (alone, *others) = present
        is_alone = not others and not num_gone
        if self._trial is None or not again:  # not again: they died without those that are tried
            self._suspect(present, first=again)
        else:  # those that were acquitted run beside the tried ones, and stay acquitted
            self.is_narrowing = is_alone
            for sequence in again:
                suspicion = self._suspects.pop(sequence)
                self.is_narrowing |= suspicion.most_beside is None or suspicion.most_beside > max(1, len(again) // 2)
                suspicion.most_beside = max(1, len(again) // 2)
                self._suspects[sequence] = suspicion  # the last to be tried again
        self.is_narrowing |= begins
        guilty: list[Sequence] = []
        if is_alone and alone in self._suspects:
            self._suspects[alone].num_alone += 1
            if self._suspects[alone].num_alone >= MAX_ALONE:
                del self._suspects[alone]
                guilty.append(alone)
        if begins or again:
            self._next_trial()
        self._is_resting = False
        if self._trial is not None and again and self._num_in_a_row >= MAX_IN_A_ROW:
            self._is_resting = any(s not in self._suspects and s not in guilty for s in waiting)
        return guilty

    def _suspect(self, present: Iterable[Sequence], first: list[Sequence]) -> None:
        """All of these; first: those that had no token since the last death, in contrast to whoever came meanwhile."""
        known = self._suspects
        order = dict.fromkeys([*first, *known, *present])
        self._suspects = {sequence: known.get(sequence) or Suspicion() for sequence in order}

    def acquit(self, sequences: Iterable[Sequence]) -> None:
        """These had a token, or are gone."""
        self._is_resting = False
        for sequence in sequences:
            self._suspects.pop(sequence, None)
            if self._trial is not None:
                self._trial.discard(sequence)
        if self._trial is not None and not self._trial:
            self._next_trial()

    def had_token(self, sequences: Iterable[Sequence]) -> None:
        """The workers live: these had a token."""
        self._num_in_a_row = 0
        self.acquit(sequences)

    def _next_trial(self) -> None:
        self._trial = None
        self._is_resting = False
        if not self._suspects:
            return
        most = max(1, len(self._suspects) >> max(1, self._num_in_a_row - 1))
        self._trial = set()
        for sequence, suspicion in self._suspects.items():
            most = min(most, suspicion.most_beside or most)
            if len(self._trial) >= most:
                break
            self._trial.add(sequence)
