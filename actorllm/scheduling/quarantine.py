"""`Quarantine`: finds the request that the workers die of, without making the others pay for it.

Who was in a step in flight when the workers died, and has not had a token since, is a *suspect*. One death proves
nothing (somebody killed the process): everyone goes on together, and a token acquits. When the workers die of suspects
again, these are tried: only some of them may start, the others and everybody else wait, until each of them has had a
token, which acquits it, or the workers are dead once more, which makes them the last in the row. A request that was
tried alone and killed the workers `MAX_ALONE` times fails. So n suspects cost about log2(n) deaths, and everybody else a
few steps of waiting.

The more deaths in a row, the fewer are tried at a time: a step of innocents in between shows that the workers live, before
the engine has died too often in a row to be started again (`actors.restart`).

Pure. Asked by the Scheduler; of no cost while there is no suspect.
"""

from __future__ import annotations

from collections.abc import Iterable

from actorllm.scheduling.sequence import Sequence

MAX_ALONE = 2
"""Deaths of the workers while they ran one request alone, after which it fails."""


class Quarantine:
    """The suspects. Falsy while there are none."""

    def __init__(self) -> None:
        self._suspects: dict[Sequence, int] = {}
        """In the order in which they are tried, with how often the workers died of them alone."""
        self._trial: set[Sequence] | None = None
        """Those that may run; None: everybody."""
        self._num_in_a_row = 0

    def __len__(self) -> int:
        return len(self._suspects)

    @property
    def is_trying(self) -> bool:
        """Whether some may not start now."""
        return self._trial is not None

    def may_start(self, sequence: Sequence) -> bool:
        return self._trial is None or sequence in self._trial

    def died(self, in_flight: Iterable[Sequence]) -> list[Sequence]:
        """The workers died with steps of these in flight. Returns who is found guilty; they are no longer here."""
        present = dict.fromkeys(in_flight)
        if not present:
            return []
        self._num_in_a_row = self._num_in_a_row + 1 if self._suspects else 1
        again = [sequence for sequence in present if sequence in self._suspects]
        for sequence in present:
            self._suspects.setdefault(sequence, 0)
        guilty: list[Sequence] = []
        if len(present) == 1:
            (alone,) = present
            self._suspects[alone] += 1
            if self._suspects[alone] >= MAX_ALONE:
                del self._suspects[alone]
                guilty.append(alone)
        if self._trial is not None:
            for sequence in again:  # the last to be tried again
                if sequence in self._suspects:
                    self._suspects[sequence] = self._suspects.pop(sequence)
        elif again:  # they had no token since the last death, in contrast to whoever came meanwhile
            rest = {sequence: count for sequence, count in self._suspects.items() if sequence not in set(again)}
            self._suspects = {s: self._suspects[s] for s in again if s in self._suspects} | rest
        if again:
            self._next_trial()
        return guilty

    def acquit(self, sequences: Iterable[Sequence]) -> None:
        """These had a token, or are gone."""
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
        if not self._suspects:
            return
        size = max(1, len(self._suspects) >> max(1, self._num_in_a_row - 1))
        self._trial = set(list(self._suspects)[:size])
