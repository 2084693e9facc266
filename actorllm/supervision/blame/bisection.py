"""`Bisection`: the search for the request that makes a step, a worker or a scheduler fail.

A failure says only which requests were there. These are the *suspects*. They are tried again in *probe groups*. A group
holds half of the suspects, or fewer after several failures in a row. One rule clears a suspect, and one blames it:

- A suspect is cleared when it gets a token, or ends.
- When a group fails, its members may join groups of half its size from then on. They come last, so that the others are
  cleared first.
- A request is blamed after `max_alone` failures with nothing else in hand.

Each failure of a group halves the size for its members. So one poison request among n takes about log2(n) failures, and
every other request is cleared. A search may go on as long as each failure `narrows` it.

*Counted groups* (`first_group`). Among several replicas a failure is dear and a probe is cheap. The failure of a group counts as a
failure alone of each member there. Such a member is *counted*. It is probed next, with nothing else in hand. With `max_alone` 2,
a group with k poison requests fails once, and each of the k fails once more. Since 1 + k <= 2k, n poison requests cost at most
2n failures, of whatever size groups are. Members that are no poison cost none, but each of them takes a probe alone. So the
first group is small. Each group that is cleared makes an accident more likely, and the next one is twice as large (`grown`).

Three places use it. They say what fails, what a retry costs, and when a search begins:

| module | a probe is | is_alone means | max_alone |
| --- | --- | --- | --- |
| `step_failures` | a step of the group | one row in the step | 1 |
| `worker_deaths` | a life of the workers | one request in the steps in flight | 2 |
| `scheduler_deaths` | a life of the scheduler | one request, and nothing else taken on | 2 |

A dead scheduler remembers nothing. There, a `Suspicion` travels with each request and is put into the next search.
Plain state, without a clock.
"""

from __future__ import annotations

from collections.abc import Collection, Hashable, Iterable, Mapping
from dataclasses import dataclass
from itertools import islice
from typing import Generic, TypeVar

S = TypeVar("S", bound=Hashable)

FIRST_GROUP = 4
"""Members of the first probe group among several replicas. If it fails, so many are probed alone."""
MAX_GROUP = 32
"""Members of a later one at most: when it fails, everything else on that replica waits until each was probed alone."""


def grown(size: int) -> int:
    """How many suspects come after a group of this size was cleared. From 4 on, 256 suspects take 11 probes."""
    return min(2 * size, MAX_GROUP)


@dataclass(slots=True, eq=False)
class Suspicion:
    """What the failures say about one suspect."""

    probe_size: int = 0
    """Members of the last probe group that failed with it, itself included; 0: no group of it has failed."""
    num_alone: int = 0
    """Failures with nothing else in hand."""

    def fail(self, size: int, is_alone: bool) -> None:
        """A probe group of this size failed with it."""
        self.probe_size = size
        self.num_alone += is_alone


class Bisection(Generic[S]):
    """The suspects of one search, in the order in which they are probed. Falsy while there are none."""

    def __init__(
        self, max_alone: int, suspects: Mapping[S, Suspicion] | None = None, *, first_group: int | None = None
    ) -> None:
        """first_group: members of the first group, if groups are counted, see the module docstring; None: they are halved."""
        self._max_alone = max_alone
        self._first_group = self._next_size = first_group
        self._suspects: dict[S, Suspicion] = dict(suspects or {})
        self.is_probing = False
        """The search has begun: of the suspects only those in `group` may run."""
        self.group: dict[S, None] = {}
        """The members of the probe group that are not cleared yet."""
        self.num_halvings = 1
        """A new group holds the suspects halved so many times, and at least one."""

    def __len__(self) -> int:
        return len(self._suspects)

    def __contains__(self, request: S) -> bool:
        return request in self._suspects

    def add(self, requests: Iterable[S], first: Iterable[S] = ()) -> None:
        """Suspect these too, after those that are suspects already. first: those of all that are probed first."""
        known = self._suspects
        self._suspects = {one: known.get(one) or Suspicion() for one in dict.fromkeys([*first, *known, *requests])}

    def begin(self) -> None:
        """Probe the first group. Also chooses the group again."""
        self.group = self._next_group()
        self.is_probing = bool(self.group)

    @property
    def counted(self) -> S | None:
        """The suspect that is probed next with nothing else in hand, since its group has failed; None: there is none.

        Always None without `first_group`.
        """
        if self._first_group is None:
            return None
        return next((one for one, suspicion in self._suspects.items() if suspicion.num_alone), None)

    def fail(self, members: Collection[S], is_alone: bool) -> list[S]:
        """A unit with these suspects failed. Returns the one that is to blame, if it is known; it is no suspect then.

        is_alone: the failure counts for each of them.
        """
        self._next_size = self._first_group
        blamed = []
        for member in members:
            suspicion = self._suspects.pop(member)
            suspicion.fail(len(members), is_alone)
            if suspicion.num_alone >= self._max_alone:
                blamed.append(member)
            else:
                self._suspects[member] = suspicion
        if self.is_probing:
            self.begin()
        return blamed

    def count(self, requests: Iterable[S]) -> None:
        """For each of these a failure of another unit counts as a failure alone."""
        for request in requests:
            self._suspects[request].num_alone += 1

    def clear(self, requests: Iterable[S]) -> None:
        """These had a token, or have ended. The next group begins when no member of the last one is left."""
        was_alone = self.counted is not None
        for request in requests:
            self._suspects.pop(request, None)
            self.group.pop(request, None)
        if self.is_probing and not self.group:
            if self._next_size is not None and not was_alone:
                self._next_size = grown(self._next_size)
            self.begin()

    def clear_all(self) -> None:
        """The search is over."""
        self._suspects.clear()
        self.begin()

    def narrows(self, members: Collection[S]) -> bool:
        """Whether a failure of these tells more: no group as small as this has failed with any of them."""
        return all(not 0 < self._suspects[member].probe_size <= len(members) for member in members)

    def _next_group(self) -> dict[S, None]:
        """As many of the first suspects as each of them may join."""
        if self._next_size is not None:
            counted = self.counted
            return dict.fromkeys(islice(self._suspects, self._next_size) if counted is None else [counted])
        size = max(1, len(self._suspects) >> self.num_halvings)
        group: dict[S, None] = {}
        for suspect, suspicion in self._suspects.items():
            size = min(size, max(1, suspicion.probe_size // 2) if suspicion.probe_size else size)
            if len(group) >= size:
                break
            group[suspect] = None
        return group
