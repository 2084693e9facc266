"""Virtual token counter (Sheng et al., "Fairness in Serving Large Language Models", OSDI 2024): fair to tenants.

Every tenant has a counter of the service it got: `per_prompt` for a prompt token when it is admitted, `per_output` for each
output token. Who got least is served next. A tenant that comes back after a pause starts at the least counter of those who
are active, or where nobody is at that of who was so last: nobody saves up. Requests without a tenant share one. `weights`: a
tenant of weight 2 may have twice as much.
"""

from __future__ import annotations

from typing import ClassVar

import numpy as np
from numpy.typing import NDArray

from actorllm.scheduling.policy import KeyPolicy, SortKey, StepDone, View
from actorllm.scheduling.sequence import Sequence


class Vtc(KeyPolicy):
    """Counters move with every step, so the order of the waiting is made anew every `refresh_s`."""

    name = "vtc"
    per_prompt = 1.0
    per_output = 2.0
    refresh_s = 0.05
    weights: ClassVar[dict[str | None, float]] = {}

    def __init__(self) -> None:
        self._numbers: dict[str | None, int] = {}
        self._served: NDArray[np.float64] = np.zeros(8)  # by number of the tenant
        self._alive: NDArray[np.int64] = np.zeros(8, np.int64)
        self._tenant_of: NDArray[np.intp] = np.zeros(0, np.intp)  # by slot
        self._last = 0  # who was active last

    def _number(self, sequence: Sequence) -> int:
        number = self._numbers.setdefault(sequence.submit.tenant, len(self._numbers))
        if number == self._served.size:
            self._served = np.concatenate((self._served, np.zeros(number)))
            self._alive = np.concatenate((self._alive, np.zeros(number, np.int64)))
        return number

    def key(self, sequence: Sequence, view: View) -> SortKey:
        return (float(self._served[self._number(sequence)]),)

    def key_horizon(self, sequence: Sequence, view: View) -> float:
        return view.now + self.refresh_s

    def victim_key(self, sequence: Sequence, view: View) -> SortKey:
        return (sequence.arrival_index,)

    def on_arrival(self, sequence: Sequence, view: View) -> None:
        number = self._number(sequence)
        if not self._alive[number]:
            active = self._served[self._alive > 0]
            least = active.min() if active.size else self._served[self._last]
            self._served[number] = max(self._served[number], least)
        self._alive[number] += 1
        sequence.policy_state["vtc"] = True

    def on_admit(self, sequence: Sequence, view: View) -> None:
        if not self._tenant_of.size:
            self._tenant_of = np.zeros(view.limits.max_seqs, np.intp)
        number = self._tenant_of[sequence.slot] = self._number(sequence)
        if not sequence.num_preemptions:  # what is computed again is nobody's wish
            self._served[number] += (
                self.per_prompt * sequence.num_prompt / self.weights.get(sequence.submit.tenant, 1.0)
            )

    def on_step(self, done: StepDone, view: View) -> None:
        counts = np.bincount(self._tenant_of[done.slots], minlength=self._served.size)
        for tenant, number in self._numbers.items():
            self._served[number] += self.per_output * counts[number] / self.weights.get(tenant, 1.0)

    def on_end(self, sequence: Sequence, view: View) -> None:
        if "vtc" in sequence.policy_state:  # else it was blocked to its end
            self._last = self._number(sequence)
            self._alive[self._last] -= 1
