"""`WorkerBisection`: the search for the request that the workers die of.

A *suspect* was in a step in flight when the workers died, and has had no token since: a request, with all its sequences. The
search is a `Bisection`, whose unit is a life of the workers. A retry costs a restart, and every other request waits for it. Five
rules follow:

- One death proves nothing, since the process may have been killed from outside. All requests go on together. The search
  begins when the workers die again before every suspect is cleared.
- A cleared request goes on beside the probe group until the next death.
- A request that ended while it was in flight beside another counts as present: the other one was not alone.
- A request may be a suspect of another replica or of a scheduler that died, which this scheduler probes
  (`scheduler_deaths`). The search begins with the first death then. If it was probed by itself, this death counts as one
  of its two, and it is probed again at once.
- From the third death in a row on, the search rests after every death until a request beside the suspects has had a
  token. It rests only if one may run. If the workers die meanwhile, the requests that ran are suspects as well.

*Several replicas* (`probes_alone`). Only poison requests may cost deaths, each of them `MAX_ALONE`, and everything else steps. So
the search begins with the first death, and groups are counted (`bisection`). The death of a group counts for each member in
flight, although requests that were cleared run beside it. Then each is probed with nothing else in a step (`isolated`), before
anything else starts or a rest begins. Requests that are cleared there give their slots up until the search is over. A scheduler
may have died of the group of such a request before. That death counts as well, so one death of the workers decides.

What that costs: a request that is no poison was in such a group, and the workers are killed from outside within its own step.
Then it fails, as after two accidents in a row.

Too many deaths in a row end the engine (`supervision.restart`), unless each narrows the search (`is_narrowing`). Any
number of poison requests is therefore found, and a search that does not advance ends.

Pure. Asked by the Scheduler; costs nothing while there is no suspect.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable

from actorllm.scheduling.sequence import RequestKey
from actorllm.supervision.blame.bisection import FIRST_GROUP, Bisection

MAX_IN_A_ROW = 3
"""Deaths in a row after which those requests run first that are not suspected, if there are any."""

MAX_ALONE = 2
"""Deaths of a process for which one request was probed, after which the request fails: one may be an accident."""


class WorkerBisection:
    """The suspects. Falsy while there are none. probes_alone: see the module docstring."""

    def __init__(self, *, probes_alone: bool = False) -> None:
        self._bisection: Bisection[RequestKey] = Bisection(MAX_ALONE, first_group=FIRST_GROUP if probes_alone else None)
        self._probes_alone = probes_alone
        self._num_in_a_row = 0
        self.is_resting = False
        """The suspects wait until another request has a token."""
        self.is_narrowing = False
        """The last death made the search narrower. With n suspects that is so for some n log2(n) deaths at most."""

    def __len__(self) -> int:
        return len(self._bisection)

    @property
    def is_probing(self) -> bool:
        """Whether some requests may not start now."""
        return self._bisection.is_probing

    @property
    def isolated(self) -> RequestKey | None:
        """The request that is probed with nothing else in a step; None: none is."""
        return self._bisection.counted if self.is_probing else None

    def end_rest(self) -> None:
        """No other request can run: the search goes on."""
        self.is_resting = False

    def may_start(self, request: RequestKey) -> bool:
        if self.is_resting:
            return request not in self._bisection
        return not self.is_probing or request in self._bisection.group

    def died(
        self,
        in_flight: Iterable[RequestKey],
        waiting: Iterable[RequestKey] = (),
        num_gone: int = 0,
        probed: Collection[RequestKey] = (),
        counted: Collection[RequestKey] = (),
    ) -> list[RequestKey]:
        """The workers died with steps of these in flight. Returns the one to blame, if it is known; it is no longer here.

        waiting: those that may run now, suspects or not. num_gone: others that were in those steps and have ended
        meanwhile. The workers may have died of them, so no request was alone. probed: those in flight that are probed because
        another process died of one of them. counted: those of them for which a death of a scheduler counts already.
        """
        search = self._bisection
        present = [*dict.fromkeys(in_flight)]
        self.is_narrowing = False
        if not present:
            return []
        self.is_resting = False
        self._num_in_a_row = self._num_in_a_row + 1 if search else 1
        search.num_halvings = max(1, self._num_in_a_row - 1)
        again = [request for request in present if request in search]
        begins = not search.is_probing and (self._probes_alone or bool(again) or self._num_in_a_row > 1)
        is_alone = len(present) == 1 and not num_gone
        probed_first = [request for request in probed if request not in search]
        if probed_first:  # also while others are searched for: of these another process has died
            self.is_narrowing = begins = True
            search.add(present)
            if is_alone and self._probes_alone:
                search.count(counted)
            blamed = search.fail(probed_first, len(probed_first) == 1 or self._probes_alone)
            left = [request for request in probed_first if request not in blamed]
            search.add((), first=left)  # while nothing runs that was cleared
        elif search.is_probing and again:  # those that were cleared run beside the group, and stay cleared
            is_counted = self._probes_alone and search.counted is None
            self.is_narrowing = is_alone or search.narrows(again)
            blamed = search.fail(again, is_alone or is_counted)
            if is_alone and not blamed and again == [*probed]:  # one death more decides, and costs no other
                search.add((), first=again)
                search.begin()
        else:  # no group, or the workers died without it: in contrast to new requests, `again` had no token twice
            self.is_narrowing = begins
            search.add(present, first=again)
            blamed = search.fail(present, is_alone) if is_alone else []
        if begins:
            search.begin()
        is_undecided = search.counted is not None  # one death more tells
        if search.is_probing and again and self._num_in_a_row >= MAX_IN_A_ROW and not is_undecided:
            self.is_resting = any(request not in search and request not in blamed for request in waiting)
        return blamed

    def clear(self, requests: Iterable[RequestKey]) -> None:
        """These had a token, or are gone."""
        self.is_resting = False
        self._bisection.clear(requests)

    def had_token(self, requests: Iterable[RequestKey]) -> None:
        """The workers live: these had a token."""
        self._num_in_a_row = 0
        self._bisection.num_halvings = 1
        self.clear(requests)
