"""`StepBisection`: the bisection that finds the request that makes steps fail.

A step that fails says only which requests were in it. These are tried again in halves: while there are suspects, a step
holds only the group `on_trial`. A request that gets a token is cleared. A group whose step fails is halved again. A
request whose step fails while it is alone in it is at fault. One poison request among n costs about 2 log2(n) steps.
The others lose only time, and new requests wait until the search is over.

Invariants: a request is in one group at most, and no group is empty. Every failure ends a request, halves a group, or
follows the end of a request that was in the step. Owned by the scheduler.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping

from actorllm.scheduling.sequence import Sequence

MAX_FAILURES = 40
"""Steps in a row, without a token between them, that may fail with a request among others. More than halving ever takes,
even if steps get smaller for want of memory: whatever a policy does, a request that never works ends at last."""

NOBODY: Mapping[Sequence, None] = {}


class StepBisection:
    """Groups of requests that were in steps that failed; the last group is tried first."""

    def __init__(self) -> None:
        self._groups: list[dict[Sequence, None]] = []

    def __bool__(self) -> bool:
        return bool(self._groups)

    def __len__(self) -> int:
        return sum(len(group) for group in self._groups)

    @property
    def on_trial(self) -> Mapping[Sequence, None]:
        """Those who may be in steps now, if anybody is under suspicion."""
        return self._groups[-1] if self._groups else NOBODY

    def accuse(self, named: Iterable[Sequence], num_gone: int = 0) -> Sequence | None:
        """A step with these requests failed. Returns the one at fault, or None: they are to be tried again.

        num_gone: others that were in the step and have ended meanwhile. It may have been them.
        """
        accused = list(dict.fromkeys(named))
        for sequence in accused:
            self.acquit(sequence)
        if len(accused) == 1 and not num_gone:
            return accused[0]
        middle = (len(accused) + 1) // 2
        for half in (accused[middle:], accused[:middle]):
            if half:
                self._groups.append(dict.fromkeys(half))
        return None

    def acquit(self, sequence: Sequence) -> None:
        """It got a token, or ended: it is under suspicion no more."""
        for group in self._groups:
            if sequence in group:
                del group[sequence]
                if not group:
                    self._groups.remove(group)
                return

    def clear(self) -> None:
        """Nobody is under suspicion."""
        self._groups.clear()
