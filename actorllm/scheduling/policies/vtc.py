"""Virtual token counter (Sheng et al., "Fairness in Serving Large Language Models", OSDI 2024): fair to tenants.

Every tenant has a counter of the service it got: `per_prompt` for a prompt token when it is admitted, `per_output` for each
output token. A prompt that several sequences share counts once. The tenant that got least is served next. A tenant that comes
back after a pause starts at the least counter of the active ones. Where none is active, it starts at the counter of the last that
was. So no tenant saves up service. Requests without a tenant share one. `weights`: a tenant of weight 2 may have twice as much.

Clients write the names of tenants, so no step costs by the number of them, and idle tenants are forgotten:

    A counter that is at most the least of those active says nothing: with it or without it, its tenant starts at that
    least, which never falls. Such tenants are forgotten without a difference.
    The counter of an idle tenant may also be above, and forgetting it is a credit of the difference. `max_idle` of them are
    kept, the highest counters. So the credit is the smallest that there is, it is less than what the tenant has had, and it
    is no more than what any new name gets anyway. A tenant that has had much is not washed out by many that had little.

Fair means fair to names: a client that invents tenants has the share of each. Where that matters, the program that
authenticates clients has to write the tenant.
"""

from __future__ import annotations

import heapq
from collections.abc import Hashable
from typing import ClassVar

import numpy as np
from numpy.typing import NDArray

from actorllm.scheduling.policy import KeyPolicy, SortKey, StepDone, View
from actorllm.scheduling.sequence import Sequence


class Vtc(KeyPolicy):
    """Counters are columns, by the number of a tenant that is known. A forgotten tenant's number is given to another one."""

    name = "vtc"
    keys_grow = True  # while a tenant is active, its counter only grows
    per_prompt = 1.0
    per_output = 2.0
    max_idle = 4096
    """So many idle tenants are kept, and half as many after some were forgotten."""
    weights: ClassVar[dict[str | None, float]] = {}

    def __init__(self) -> None:
        self._numbers: dict[str | None, int] = {}
        self._tenants: list[str | None] = []  # by number
        self._free: list[int] = []  # numbers that no tenant has
        self._served: NDArray[np.float64] = np.zeros(8)
        self._alive: NDArray[np.int64] = np.zeros(8, np.int64)
        self._per_token: NDArray[np.float64] = np.zeros(8)
        self._num_active = 0
        self._active: list[tuple[float, int]] = []
        """Heap of (counter, number): of each active tenant one entry, which is not above its counter; of idle ones some."""
        self._is_listed: NDArray[np.bool_] = np.zeros(8, np.bool_)  # in there
        self._least = 0.0
        """Of the counters of those active, when it was asked for last."""
        self._tenant_of: NDArray[np.intp] = np.zeros(0, np.intp)  # by slot
        self._last = 0  # the tenant that was active last

    @property
    def num_tenants(self) -> int:
        """Those that are known."""
        return len(self._numbers)

    def group(self, sequence: Sequence, view: View) -> tuple[Hashable, SortKey]:
        return sequence.tenant, ()

    def key(self, sequence: Sequence, view: View) -> SortKey:
        number = self._numbers.get(sequence.tenant)  # a new one is asked for its key before it has arrived
        return (self._least if number is None else float(self._served[number]),)

    def victim_key(self, sequence: Sequence, view: View) -> SortKey:
        return (sequence.arrival_index,)

    def on_arrival(self, sequence: Sequence, view: View) -> None:
        number = self._number(sequence.tenant)
        if not self._alive[number]:
            self._served[number] = max(self._served[number], self._least_of_active())
            self._num_active += 1
            if not self._is_listed[number]:
                self._is_listed[number] = True
                heapq.heappush(self._active, (float(self._served[number]), number))
        self._alive[number] += 1
        sequence.policy_state["vtc"] = True

    def on_admit(self, sequence: Sequence, view: View) -> None:
        if not self._tenant_of.size:
            self._tenant_of = np.zeros(view.limits.max_seqs, np.intp)
        tenant = sequence.tenant
        number = self._tenant_of[sequence.slot] = self._number(tenant)
        # Computing again is no service to the tenant, and a fork takes over what its sibling has computed.
        if not sequence.num_preemptions and sequence.num_remaining:
            self._served[number] += self.per_prompt * sequence.num_prompt / self.weights.get(tenant, 1.0)

    def on_step(self, done: StepDone, view: View) -> None:
        tenants = self._tenant_of[done.slots]
        per_token = self._per_token[tenants]
        np.add.at(self._served, tenants, per_token * done.counts if done.counts.size else per_token)

    def on_end(self, sequence: Sequence, view: View) -> None:
        if "vtc" in sequence.policy_state:  # else it was blocked to its end
            number = self._last = self._number(sequence.tenant)
            self._alive[number] -= 1
            self._num_active -= not self._alive[number]
            if len(self._numbers) - self._num_active > self.max_idle + self._tenant_of.size:
                self._forget()

    def _number(self, tenant: str | None) -> int:
        number = self._numbers.get(tenant)
        if number is not None:
            return number
        if self._free:
            number = self._free.pop()
            self._tenants[number] = tenant
        else:
            number = len(self._tenants)
            self._tenants.append(tenant)
            if number == self._served.size:
                self._served, self._per_token = (
                    np.concatenate((column, np.zeros(number))) for column in (self._served, self._per_token)
                )
                self._alive = np.concatenate((self._alive, np.zeros(number, np.int64)))
                self._is_listed = np.concatenate((self._is_listed, np.zeros(number, np.bool_)))
        self._numbers[tenant] = number
        self._per_token[number] = self.per_output / self.weights.get(tenant, 1.0)
        return number

    def _least_of_active(self) -> float:
        if not self._num_active:
            self._least = max(self._least, float(self._served[self._last]))
            return self._least
        heap = self._active
        while True:  # counters only grow, so an entry that is up to date is the least
            counter, number = heap[0]
            present = float(self._served[number])
            if not self._alive[number]:
                heapq.heappop(heap)
                self._is_listed[number] = False
            elif counter < present:
                heapq.heapreplace(heap, (present, number))
            else:
                self._least = counter
                return counter

    def _forget(self) -> None:
        """All idle tenants whose counters say nothing; if too many are left, those that are least above.

        A tenant with a token in flight stays: the token will be counted.
        """
        is_idle = self._alive[: len(self._tenants)] == 0
        is_idle[self._tenant_of] = False
        is_idle[self._last] = False
        is_idle[self._free] = False
        idle = np.flatnonzero(is_idle)
        idle = idle[np.argsort(self._served[idle], kind="stable")]
        num_silent = int(np.searchsorted(self._served[idle], self._least_of_active(), side="right"))
        forgotten = idle[: max(num_silent, idle.size - self.max_idle // 2)]
        for number in forgotten.tolist():
            del self._numbers[self._tenants[number]]
            self._tenants[number] = None
        self._free += forgotten.tolist()
        self._served[forgotten] = 0.0
        self._is_listed[:] = self._alive > 0
        self._active = [entry for entry in self._active if self._is_listed[entry[1]]]
        heapq.heapify(self._active)
