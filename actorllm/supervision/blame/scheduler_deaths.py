"""The search for the request that schedulers die of: what a frontend notes, and how a scheduler tries suspects.

A scheduler that dies takes along what it knew. Therefore every request of a journal has a `DeathRecord`, which travels with
it when it is submitted again. The sequences of one request share it: they are suspected, tried and failed together.

*Suspicion* (`note_death`). One death proves nothing. From the second life on, a scheduler says which of the requests
that it was given again are in a step (`Begun`). When it dies, those among them that had no token from it are suspects.
If there are none, and there was no token since the death before, all that it had taken on are suspects. Otherwise
suspects are the requests that have waited without a token through `MAX_UNHEARD` deaths. A token ends suspicion.

*Trial* (`Trial`). A scheduler that is given suspects holds back everything but one group of them, which it names first
(`OnTrial`). The group is smaller the more schedulers were lost in a row. It is at most half as large as the group with
which the last one died. A request is cleared by a token, and for now by waiting through a step. It goes on, and the
next group begins beside it. When the scheduler dies once more, only requests on trial or in a step get this death on
their record. A request fails after `MAX_ALONE` deaths with nothing else in hand. One poison request among n takes about
log2(n) deaths; the others wait for a few steps. From the second death on, a scheduler holds back everything until all
journals are there (`Trial.begin`). Otherwise no request would be tried alone.

*The end.* Deaths in a row without a token end the engine (`supervision.restart`), unless each narrows the search
(`Trial.is_narrower`). A search is narrower with one request alone, or with a group that is smaller than any in which
its members were tried before. Any number of poison requests is therefore found, and a search that does not advance
ends. A scheduler that dies of everything must not blame requests. It shows before a trial that it can schedule a
request of its own (`self_check`). After `LOSSES_BEFORE_OTHERS` deaths in a row, in every second life the requests run
first that are not suspected, if there are any. Their callers do not wait for the end of a long search.

Plain state, without a clock. The frontend actor uses `DeathRecord`, the scheduler actor `Trial`. Costs nothing while nothing
dies.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field
from typing import TypeAlias

from actorllm.messages import OnTrial, Submit
from actorllm.scheduling.sequence import Key
from actorllm.supervision.blame.worker_deaths import MAX_ALONE

MAX_UNHEARD = 3
"""Deaths of schedulers that had taken on a request and gave it no token, after which it is a suspect although it was in no
step: a policy may die of who waits. It is tried before the others, and then it does not wait."""

LOSSES_BEFORE_OTHERS = 8
"""Deaths of schedulers in a row, without a token, from which on the requests that are not suspected run first in every second
life."""


@dataclass(slots=True, eq=False)
class DeathRecord:
    """What speaks against one request, all its sequences together."""

    num_deaths: int = 0
    """Since its last token: of schedulers that may have died of it."""
    most_beside: int = 0
    """How many requests were on trial, it included, when the last of them died; 0: it was not tried."""
    num_alone: int = 0
    """Of these deaths: those with nothing else in hand."""
    num_unheard: int = 0
    """Since its last token: deaths of schedulers that had taken it on."""
    is_begun: bool = False
    """The scheduler has it in a step, and it had no token since."""

    def clear(self) -> None:
        """It had a token."""
        self.num_deaths = self.most_beside = self.num_alone = self.num_unheard = 0
        self.is_begun = False

    @property
    def is_guilty(self) -> bool:
        return self.num_alone >= MAX_ALONE


def note_death(records: Mapping[int, DeathRecord], trial: OnTrial | None, is_second: bool) -> None:
    """The scheduler died: put it on the record of the requests (by rid) that it may have died of.

    trial: what it had said last of whom it tries, None: it had taken on everything. is_second: nobody has had a token since
    the death before.
    """
    is_trial = trial is not None and trial.num_tried > 0
    tried = set(trial.rids.tolist()) if trial is not None and is_trial else records.keys()
    present = dict.fromkeys(record for rid, record in records.items() if rid in tried)
    for record in present:
        record.num_unheard += 1
    accused = [record for record in dict.fromkeys(records.values()) if record.is_begun]
    if not accused:
        accused = [record for record in present if is_trial or is_second or record.num_unheard >= MAX_UNHEARD]
    for record in accused:
        record.num_deaths += 1
        if trial is not None and is_trial and record in present:
            record.num_alone += trial.is_alone
    if trial is not None and is_trial:
        for record in present:  # whoever is accused: no group of these may be tried again as large as it was
            record.most_beside = trial.num_tried
    for record in records.values():
        record.is_begun = False


Family: TypeAlias = tuple[int, int]
"""A request with all its sequences: the key of the first one, which may have ended."""


def family_of(key: Key, submit: Submit) -> Family:
    return key if submit.fork_of is None else (key[0], submit.fork_of)


@dataclass(slots=True)
class HeldRequest:
    """A request that is held back: its sequences, and what their frontend has on record."""

    sequences: list[tuple[Key, Submit]] = field(default_factory=list)

    @property
    def num_deaths(self) -> int:
        return max(submit.num_deaths for _, submit in self.sequences)

    @property
    def has_started(self) -> bool:
        """It has had a token of some scheduler, or a slot."""
        return any(submit.has_started for _, submit in self.sequences)

    @property
    def order(self) -> tuple[int, bool]:
        """In which suspects are tried: who was tried in vain before comes last, and whom schedulers have lived with, first."""
        return self.num_deaths, not self.has_started

    @property
    def most_beside(self) -> int:
        return max(submit.most_beside for _, submit in self.sequences)


class Trial:
    """What a scheduler holds back while it tries suspects, or waits to know them. Falsy while there is no reason to.

    on_release: hears of every request that is held no more.
    """

    def __init__(self, on_release: Callable[[Key, Submit], object] | None = None) -> None:
        self._on_release = on_release
        self.is_on = False
        self._held: dict[Key, Submit] = {}
        self._untried: set[Key] = set()
        """On trial, and neither acquitted nor known to have ended."""
        self._has_stepped = False
        self._losses: dict[int, int] = {}
        """What each frontend knows of schedulers lost in a row."""
        self._has_token = False
        self.num_tried = 0
        self.is_narrower = False
        """Those on trial are suspects, and fewer than whenever one of them was tried before."""

    def __bool__(self) -> bool:
        return self.is_on

    def __len__(self) -> int:
        return len(self._held)

    def __contains__(self, key: Key) -> bool:
        return key in self._held

    @property
    def has_held(self) -> bool:
        return bool(self._held)

    @property
    def has_suspects(self) -> bool:
        return any(submit.num_deaths for submit in self._held.values())

    @property
    def has_started(self) -> bool:
        """Whether somebody is held that had started under another scheduler."""
        return any(submit.has_started for submit in self._held.values())

    @property
    def untried(self) -> Iterable[Key]:
        return self._untried

    @property
    def has_stepped(self) -> bool:
        """A step has been reported since the last group was taken on."""
        return self._has_stepped

    @property
    def num_losses(self) -> int:
        """Schedulers in a row that died before anybody had a token, as far as those know whose requests are held."""
        return 0 if self._has_token else min(self._losses.values(), default=0)

    def begin(self) -> None:
        """Hold back everything from now on."""
        self.is_on = True

    def hold(self, key: Key, submit: Submit) -> None:
        self._held[key] = submit
        if submit.num_losses:
            self._losses[key[0]] = submit.num_losses

    def take(self, keys: Iterable[Key]) -> list[tuple[Key, Submit]]:
        """Those of these requests that are held, which they are no more."""
        taken = [(key, self._held.pop(key)) for key in keys if key in self._held]
        if self._on_release is not None:
            for key, submit in taken:
                self._on_release(key, submit)
        return taken

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
        self._losses.pop(frontend, None)

    def on_step(self, with_tokens: Iterable[Key]) -> None:
        """A step is reported, and these had tokens."""
        self._has_stepped = True
        acquitted = set(with_tokens)
        self._untried -= acquitted
        self._has_token |= bool(acquitted)

    def on_delay(self) -> None:
        """Somebody on trial cannot be in a step yet: none of those so far counts."""
        self._has_stepped = False

    def next_group(self, is_pausing: bool = False) -> list[tuple[Key, Submit]]:
        """Whom to try now. Nobody: there is no suspect left, and the trial is over.

        is_pausing: only those may run who had started; if it is nobody, the trial is not over as long as it is true.
        """
        if not self.has_suspects:
            self.is_on = self._has_token = False
            self._untried.clear()
            self._losses.clear()
            self.num_tried = 0
            return []
        group = self._choose(is_pausing)
        if not group:
            return []
        keys = [key for held in group for key, _ in held.sequences]
        self._untried = set(keys)
        self._has_stepped = False
        self.num_tried = len(group)
        before = [held.most_beside for held in group]
        self.is_narrower = group[0].num_deaths > 0 and not any(0 < most <= len(group) for most in before)
        return self.take(keys)

    def _choose(self, is_pausing: bool) -> list[HeldRequest]:
        families: dict[Family, HeldRequest] = {}
        for key, submit in self._held.items():
            if submit.has_started or not is_pausing:
                families.setdefault(family_of(key, submit), HeldRequest()).sequences.append((key, submit))
        suspects = sorted((held for held in families.values() if held.num_deaths), key=lambda held: held.order)
        others = [held for held in families.values() if not held.num_deaths]
        others_first = self.num_losses >= LOSSES_BEFORE_OTHERS and self.num_losses % 2 == 0
        if others and (others_first or not suspects):
            return others
        most = max(1, len(suspects) >> max(1, self.num_losses))
        group: list[HeldRequest] = []
        for held in suspects:
            if held.most_beside:
                most = min(most, max(1, held.most_beside // 2))
            if len(group) >= most or held.has_started is not suspects[0].has_started:
                break
            group.append(held)
        return group
