"""The search for the request that schedulers die of: what a frontend notes, and which suspects a scheduler probes.

The search is a `Bisection`, whose unit is a life of the scheduler. A retry costs a restart, and all journals are submitted
again. A scheduler that dies takes along what it knew. Therefore every request of a journal has a `DeathRecord`, which
travels with it when it is submitted again. The sequences of one request share it: they are suspected, probed and failed
together.

*Suspects* (`note_death`). One death proves nothing. From the second life on, a scheduler says which of the requests
that it was given again are in a step (`Begun`). When it dies, those among them that had no token from it are suspects.
If there are none, and there was no token since the death before, all that it had taken on are suspects. Otherwise
suspects are the requests that have waited without a token through `MAX_WAITED_DEATHS` deaths. A token of each of its sequences
clears a suspect.

*Probes* (`SchedulerBisection`). A scheduler that is given suspects holds back everything but one probe group, which it
names first (`ProbeGroup`). A token clears a member. A member that waits through a step counts as cleared for now. It
goes on, and the next group begins beside it. When the scheduler dies once more, only requests of the group or in a step
get this death on their record. A request fails after `MAX_ALONE` deaths for which it was the whole group, if it had one
of them with nothing else in hand. From the second death on, a scheduler holds back everything until all journals are there
(`begin`). Otherwise no request would be probed alone.

*Several replicas* (`probes_alone`). Groups are counted there (`bisection`): the death of a group counts for each member that was in
a step, also beside requests that were cleared. Then each of these is probed before anything else is taken on, and alone: one that
is cleared is held back again (`SchedulerProbes`). A member that waits through a step belongs to the next groups as well, until it
has had a token. When the search is over, frontends are told which members still wait. So a group with k poison requests costs
1 + k deaths, and each poison request at most `MAX_ALONE`.

*The end.* Deaths in a row without a token end the engine (`supervision.restart`), unless each narrows the search
(`is_narrowing`). Any number of poison requests is therefore found, and a search that does not advance ends. A scheduler
that dies of everything must not blame requests. It shows before the first probe that it can schedule a request of its
own (`self_check`). After `LOSSES_BEFORE_OTHERS` deaths in a row, in every second life the requests run first that are
not suspected, if there are any. Their callers do not wait for the end of a long search.

Plain state, without a clock. The frontend actor uses `DeathRecord`, the scheduler actor `SchedulerBisection`. Costs nothing
while nothing dies.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Container, Iterable, Mapping
from dataclasses import dataclass, field

from actorllm.messages import ProbeGroup, Submit
from actorllm.scheduling.sequence import Key, RequestKey, request_of
from actorllm.supervision.blame.bisection import FIRST_GROUP, Bisection, Suspicion, grown
from actorllm.supervision.blame.worker_deaths import MAX_ALONE

MAX_WAITED_DEATHS = 3
"""Deaths of schedulers that had taken on a request and gave it no token, after which it is a suspect although it was in no
step: a policy may die of a waiting request. It is probed before the others, and then it does not wait."""

LOSSES_BEFORE_OTHERS = 8
"""Deaths of schedulers in a row, without a token, from which on the requests that are not suspected run first in every second
life."""


@dataclass(slots=True, eq=False)
class DeathRecord(Suspicion):
    """What speaks against one request, all its sequences together. `probe_size` counts requests, those of other frontends
    included."""

    num_deaths: int = 0
    """Since its last token: of schedulers that may have died of it."""
    num_waited_deaths: int = 0
    """Since its last token: deaths of schedulers that had taken it on."""
    rids: tuple[int, ...] = ()
    """Its sequences, if there are several."""
    begun: set[int] = field(default_factory=set)
    """Those of its sequences that the scheduler has in a step, and that had no token since."""
    proven: set[int] = field(default_factory=set)
    """Those of several sequences that have had a token since the last death."""
    was_alone: bool = False
    """A scheduler died with nothing else in hand; `num_alone` counts deaths beside requests that were cleared, too."""

    def prove(self, rid: int, alive: Container[int]) -> None:
        """One of its sequences had a token. A token of each shows that no scheduler dies of the request.

        alive: the sequences that have not ended, of all requests.
        """
        self.begun.discard(rid)
        if self.rids:
            self.proven.add(rid)
            if any(other in alive and other not in self.proven for other in self.rids):
                return
        self.num_deaths = self.probe_size = self.num_alone = self.num_waited_deaths = 0
        self.was_alone = False

    def suspect(self) -> None:
        """A process of another replica, or a worker, may have died of it."""
        self.num_deaths = max(self.num_deaths, 1)

    @property
    def is_blamed(self) -> bool:
        return self.was_alone and self.num_alone >= MAX_ALONE


def note_death(
    records: Mapping[int, DeathRecord], probe: ProbeGroup | None, is_second: bool, probes_alone: bool = False
) -> None:
    """The scheduler died: put it on the record of the requests (by rid) that it may have died of.

    probe: the last group that it named, None: it had taken on everything. is_second: no request has had a token since the
    death before. probes_alone: the scheduler was one of several, and deaths of groups are counted.
    """
    named = dict.fromkeys(records[rid] for rid in ([] if probe is None else probe.rids.tolist()) if rid in records)
    if probe is not None and not probe.size:  # the search is over; those that it named had not been in a step by then
        probe = None
    present = dict.fromkeys(records.values()) if probe is None else named
    for record in present:
        record.num_waited_deaths += 1
    # One that is told of at its end only may have begun, been cleared and been held back again.
    in_hand = present if probe is not None and probe.is_alone else dict.fromkeys(records.values())
    suspects = [record for record in in_hand if record.begun]
    if not suspects:
        is_all = probe is not None or is_second
        suspects = [record for record in present if is_all or record.num_waited_deaths >= MAX_WAITED_DEATHS]
        suspects = suspects or [record for record in named if record.num_deaths]
    were_suspects = {record for record in suspects if record.num_deaths}
    for record in suspects:
        record.num_deaths += 1
    is_single = probe is not None and probe.size == 1
    # A suspect that was named and had to wait for a slot may begin while another search names others.
    begun_again = [record for record in suspects if record in were_suspects and record.begun] if probes_alone else []
    for record in dict.fromkeys([*named, *begun_again]):
        is_suspect, is_named = record in suspects, record in named
        if probes_alone and is_suspect and ((is_single and is_named) or record in were_suspects):
            record.fail(1, is_alone=True)
        elif (
            probe is not None and not probes_alone
        ):  # those that are no suspects, too: no group of these may be as large again
            record.fail(probe.size, is_single and is_suspect)
        record.was_alone |= probe is not None and probe.is_alone and is_suspect and is_named
    for record in records.values():
        record.begun.clear()
        record.proven.clear()


@dataclass(slots=True, eq=False)
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
        """In which suspects are probed: first those with fewer deaths, then those that schedulers have lived with."""
        return self.num_deaths, not self.has_started

    @property
    def suspicion(self) -> Suspicion:
        return Suspicion(probe_size=max(submit.probe_size for _, submit in self.sequences))

    @property
    def is_counted(self) -> bool:
        """A suspect for which a death counts: no group of it with another request is to be probed."""
        return self.num_deaths > 0 and self.suspicion.probe_size == 1


class SchedulerBisection:
    """What a scheduler holds back while it probes suspects, or waits to know them. Falsy while there is no reason to.

    on_release: called with every request that is held no more. probes_alone: this scheduler is one of several (see above).
    """

    def __init__(
        self, on_release: Callable[[Key, Submit], object] | None = None, *, probes_alone: bool = False
    ) -> None:
        self._on_release = on_release
        self._probes_alone = probes_alone
        self.is_on = False
        self._held: dict[Key, Submit] = {}
        self._pending: dict[Key, RequestKey] = {}
        """In the probe group, and neither cleared nor known to have ended: the sequences, and their requests."""
        self._next_size = FIRST_GROUP
        """Of groups that are counted."""
        self._has_stepped = False
        self._losses: dict[int, int] = {}
        """What each frontend knows of schedulers lost in a row."""
        self._has_token = False
        self.group_size = 0
        """Requests of the probe group."""
        self.is_isolated = False
        """Its only member is to be alone, and is held back again before the next one is taken on."""
        self.is_narrowing = False
        """The members of the group are suspects, and fewer than whenever one of them was probed before."""

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
        """Whether a request is held that had started under another scheduler."""
        return any(submit.has_started for submit in self._held.values())

    @property
    def pending(self) -> Iterable[Key]:
        return self._pending

    @property
    def has_stepped(self) -> bool:
        """A step has been reported since the last group was taken on."""
        return self._has_stepped

    @property
    def num_losses(self) -> int:
        """Schedulers in a row that died before any token, as far as the frontends know whose requests are held."""
        return 0 if self._has_token else min(self._losses.values(), default=0)

    def begin(self) -> None:
        """Hold back everything from now on."""
        self.is_on = True

    def hold(self, key: Key, submit: Submit) -> None:
        self._held[key] = submit  # also one that was taken before, and comes back
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
        """Everything that is held, in the order of its arrival; the search goes on."""
        return self.take(list(self._held))

    def drop_frontend(self, frontend: int) -> None:
        self.take([key for key in self._held if key[0] == frontend])
        self._losses.pop(frontend, None)

    def on_step(self, with_tokens: Iterable[Key], *, is_older: bool = False) -> None:
        """A step is reported, and these had tokens. is_older: it was planned before the group was taken on."""
        self._has_stepped |= not is_older
        cleared = set(with_tokens)
        for key in cleared:
            self._pending.pop(key, None)
        self._has_token |= bool(cleared)

    def shrink_groups(self) -> None:
        """What was probed may have been to blame after all: the next groups are small again."""
        self._next_size = FIRST_GROUP

    def on_delay(self) -> None:
        """A member of the group cannot be in a step yet: the steps so far do not count."""
        self._has_stepped = False

    def next_group(self, is_pausing: bool = False) -> list[tuple[Key, Submit]]:
        """The requests to probe now. None: there is no suspect left, and the search is over.

        is_pausing: only requests that had started may run; if there are none, the search is not over as long as it is true.
        """
        if not self.has_suspects:
            self.is_on = self._has_token = False
            if not self._probes_alone:
                self._pending.clear()
            self._losses.clear()
            self.group_size = 0
            self.is_isolated = False
            return []
        group = self._choose(is_pausing)
        if not group:
            return []
        members = {key: request_of(key, submit) for held in group for key, submit in held.sequences}
        if not self._probes_alone:
            self._pending.clear()
        self._pending |= members
        self._has_stepped = False
        self.group_size = len(set(self._pending.values()))
        self.is_isolated = self._probes_alone and group[0].is_counted
        if group[0].num_deaths and not self.is_isolated:
            self._next_size = grown(self._next_size)
        return self.take(members)

    def isolates_next(self, *, is_pausing: bool = False) -> bool:
        """Whether the next group is a request that is to be alone. is_pausing: as of `next_group`."""
        return self._probes_alone and any(
            submit.num_deaths and submit.probe_size == 1 and (submit.has_started or not is_pausing)
            for submit in self._held.values()
        )

    def _choose(self, is_pausing: bool) -> list[HeldRequest]:
        requests: dict[RequestKey, HeldRequest] = {}
        for key, submit in self._held.items():
            if submit.has_started or not is_pausing:
                requests.setdefault(request_of(key, submit), HeldRequest()).sequences.append((key, submit))
        suspects = sorted((held for held in requests.values() if held.num_deaths), key=lambda held: held.order)
        others = [held for held in requests.values() if not held.num_deaths]
        # Those that are not suspected go first for once, if the search is long, but for a suspect that one more death decides.
        counted = next((held for held in suspects if held.is_counted), None) if self._probes_alone else None
        others_first = self.num_losses >= LOSSES_BEFORE_OTHERS and self.num_losses % 2 == 0
        self.is_narrowing = False
        if others and counted is None and (others_first or not suspects):
            return others
        search = Bisection(MAX_ALONE, {held: held.suspicion for held in suspects})
        if self._probes_alone:
            group = suspects[: self._next_size] if counted is None else [counted]
            self.is_narrowing = search.narrows(group)
            return group
        search.num_halvings = max(1, self.num_losses)
        search.begin()
        group = [held for held in search.group if held.has_started is suspects[0].has_started]
        self.is_narrowing = search.narrows(group)
        return group
