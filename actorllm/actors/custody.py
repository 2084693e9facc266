"""Which request do schedulers die of? What a frontend notes of each request, and how a scheduler tries suspects.

A scheduler that dies takes along what it knew, so frontends remember: every entry of a journal has a `Record`, which travels
with the request when it is submitted again. One death proves nothing. From the second life on, a scheduler says which of
the requests that it was given again are in a step (`Begun`); when it dies, those among them that had no token from it are
suspects, and if there are none, and nobody has had a token since the death before, everything that it was given is.

A scheduler that is given suspects holds back everything (`Trial`) but a group of them, which it names first (`OnTrial`): half
as many as were tried together when the last scheduler died. A token acquits, and so does it for now to have waited through
a step. When it dies once more, only those that were on trial have it on their record. What two schedulers died of with
nothing beside it, fails. So one among n costs about log2(n) deaths, and everybody else a few steps of waiting.

Plain state, without a clock. `Record` is used by the frontend actor, `Trial` by the scheduler actor; of no cost while
nothing dies.
"""

from __future__ import annotations

import math
from collections.abc import Iterable
from dataclasses import dataclass

from actorllm.messages import OnTrial, Submit
from actorllm.scheduling.sequence import Key

MAX_ALONE = 2
"""Deaths of a scheduler with nothing but one request in hand, after which that fails."""


@dataclass(slots=True)
class Record:
    """What speaks against one request."""

    num_deaths: int = 0
    """Since its last token: of schedulers that may have died of it."""
    most_beside: int = 0
    num_alone: int = 0
    is_begun: bool = False
    """The scheduler has it in a step, and it had no token since."""

    def clear(self) -> None:
        """It had a token."""
        self.num_deaths = self.most_beside = self.num_alone = 0
        self.is_begun = False

    @property
    def is_guilty(self) -> bool:
        return self.num_alone >= MAX_ALONE


def note_death(records: dict[int, Record], trial: OnTrial | None, is_second: bool) -> None:
    """The scheduler died: put it on the record of the requests (by rid) that it may have died of.

    trial: what it had said last of whom it tries, None: it had taken on everything. is_second: nobody has had a token since
    the death before.
    """
    tried = None if trial is None or not trial.num_tried else set(trial.rids.tolist())
    suspects = [record for rid, record in records.items() if tried is None or rid in tried]
    begun = [record for record in suspects if record.is_begun]
    accused = begun or (suspects if is_second or tried is not None else [])
    for record in accused:
        record.num_deaths += 1
        if trial is not None and trial.num_tried:
            record.most_beside = trial.num_tried
            record.num_alone += trial.is_alone
    for record in records.values():
        record.is_begun = False


class Trial:
    """What a scheduler holds back while it tries suspects. Falsy while there are none."""

    def __init__(self) -> None:
        self._is_on = False
        self._held: dict[Key, Submit] = {}
        self._untried: set[Key] = set()
        """On trial, and neither acquitted nor known to have ended."""
        self._has_stepped = False
        self.num_tried = 0

    def __bool__(self) -> bool:
        return self._is_on

    def __len__(self) -> int:
        return len(self._held)

    @property
    def has_held(self) -> bool:
        return bool(self._held)

    @property
    def untried(self) -> Iterable[Key]:
        return self._untried

    @property
    def has_stepped(self) -> bool:
        """A step has been reported since the last group was taken on."""
        return self._has_stepped

    def holds(self, key: Key, submit: Submit) -> bool:
        """Whether a request has to wait; the first suspect begins the trial."""
        if not self._is_on:
            if not submit.num_deaths:
                return False
            self._is_on = True
        self._held.setdefault(key, submit)
        return True

    def take(self, keys: Iterable[Key]) -> list[tuple[Key, Submit]]:
        """Those of these requests that are held, which they are no more."""
        return [(key, self._held.pop(key)) for key in keys if key in self._held]

    @property
    def expires_at(self) -> float:
        """When the deadline of one that is held passes; infinity: none has any."""
        return min((d for s in self._held.values() if (d := s.deadline) is not None), default=math.inf)

    def take_due(self, now: float) -> list[tuple[Key, Submit]]:
        """Those that are held although their deadline has passed; they are held no more."""
        return self.take([key for key, s in self._held.items() if s.deadline is not None and s.deadline <= now])

    def take_all(self) -> list[tuple[Key, Submit]]:
        """Everything that is held, in the order of its arrival; the trial goes on."""
        return self.take(list(self._held))

    def drop_frontend(self, frontend: int) -> None:
        self.take([key for key in self._held if key[0] == frontend])

    def on_step(self, with_tokens: Iterable[Key]) -> None:
        """A step is reported, and these had tokens."""
        self._has_stepped = True
        self._untried.difference_update(with_tokens)

    def next_group(self) -> list[tuple[Key, Submit]]:
        """Whom to try now. Nobody: there is no suspect left, and the trial is over."""
        suspects = [(key, submit) for key, submit in self._held.items() if submit.num_deaths]
        if not suspects:
            self._is_on = False
            self._untried.clear()
            self.num_tried = 0
            return []
        suspects.sort(key=lambda one: one[1].num_deaths)  # who was tried in vain before comes last
        group: list[Key] = []
        most = len(suspects)
        for key, submit in suspects:
            most = min(most, max(1, (submit.most_beside or len(suspects)) // 2))
            if len(group) >= most:
                break
            group.append(key)
        self._untried = set(group)
        self._has_stepped = False
        self.num_tried = len(group)
        return self.take(group)
