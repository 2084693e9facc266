"""`AdmissionGate`: an admission policy before any scheduling policy, and the interface of admission policies.

A scheduling policy says which request is next. An `AdmissionPolicy` says whether it may start yet, and which requests are
rejected. The two are chosen independently, since the `AdmissionGate` is a `PlanPolicy` itself. While a `KeyPlanner` packs, the
gate is asked about each request, so that a place that one does not get is free for another. From the decisions of other
policies the gate removes requests afterwards.

No request is displaced for room that an admission policy only keeps free: an urgent request waits for it, too.

A request is never rejected after it had a slot, or after a scheduler that died had taken it. `admission.Admission` owns how
much may wait at all. The first exception of an admission policy ends its rule and nothing more: from then on all requests are
admitted, and `failure` says why.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import TYPE_CHECKING, Any

import numpy as np
from numpy.typing import NDArray

from actorllm.errors import ConfigError
from actorllm.scheduling.policy import Admit, Decision, PlanPolicy, StepDone, View
from actorllm.scheduling.registry import Registry
from actorllm.scheduling.sequence import Sequence, State
from actorllm.scheduling.step_packing import KeyPlanner

if TYPE_CHECKING:
    from actorllm.scheduling.step_time import Predicts


class AdmissionPolicy:
    """Whether the next one may start. The base class admits all. As a policy, it reads no clock but `view.now`."""

    name = "open"
    ignores_decode_steps: bool | None = None
    """Steps in which none waits or prefills need not be told of, and all rows decode in them (`PlanPolicy`). None: unless the
    class has a `decode_mask` of its own."""

    def admit(self, sequence: Sequence, joining: list[Sequence], leaving: list[Sequence], view: View) -> Admit:
        """Whether a waiting request gets a slot; it may be asked again, and in the end not get one for other reasons.

        joining: others that get a slot in the same step; leaving: running ones that lose theirs in it.
        """
        return Admit.ADMIT

    def decode_mask(self, view: View) -> NDArray[np.bool_] | None:
        """Which of `view.decode_slots` run in this step; None: all that the scheduling policy wants."""
        return None

    def reject(self, view: View) -> Iterable[tuple[Sequence, str]]:
        """Requests that wait in vain, with the reason that their callers get. Asked for each step while any waits."""
        return ()

    def on_arrival(self, sequence: Sequence, view: View) -> None:
        """The request waits (first arrival, unblocked, or back after a preemption)."""

    def on_admit(self, sequence: Sequence, view: View) -> None:
        """The request got a slot; also one that shares another's prompt and has never waited."""

    def on_end(self, sequence: Sequence, view: View) -> None:
        """The request ended. The columns of its last slot are still what it left."""

    def on_step(self, done: StepDone, view: View) -> None: ...


ADMISSIONS = Registry(
    "admission policy",
    {
        "credit": "actorllm.scheduling.admissions.credit:Credit",
        "past-future": "actorllm.scheduling.admissions.past_future:PastFuture",
        "slos-serve": "actorllm.scheduling.admissions.slos_serve:SlosServe",
        "ttft-reject": "actorllm.scheduling.admissions.ttft_reject:TtftReject",
        "worst-case": "actorllm.scheduling.admissions.worst_case:WorstCase",
    },
)


def register_admission(name: str, admission: str | type[Any]) -> None:
    """Give an admission policy a name, as `register_policy` does for scheduling policies."""
    ADMISSIONS.register(name, admission)


def load_admission(name: str, step_time: Predicts | None = None) -> AdmissionPolicy:
    """A fresh one by name or as 'module:Class'. Raises ConfigError naming what is wrong. step_time: as in `load_policy`."""
    admission = ADMISSIONS.build(name, step_time=step_time)
    if not isinstance(admission, AdmissionPolicy):
        raise ConfigError(f"admission policy {name!r} is no AdmissionPolicy (actorllm.scheduling.admission_policy)")
    return admission


class AdmissionGate:
    """A PlanPolicy. on_failure(what, error) is told when the admission policy raised; None: what it raises goes through."""

    def __init__(
        self,
        policy: PlanPolicy,
        admission: AdmissionPolicy,
        on_failure: Callable[[str, BaseException], object] | None = None,
    ) -> None:
        self.policy = policy
        self.admission = admission
        self.failure: str | None = None
        self._on_failure = on_failure
        self._rejected: set[Sequence] = set()
        """In the decision that is made now."""
        self._has_held_back = False
        """A request, in the last decision."""
        self._asks_while_packing = isinstance(policy, KeyPlanner) and type(policy).plan is KeyPlanner.plan
        if isinstance(policy, KeyPlanner):
            policy.gatekeeper = self
        if hasattr(policy, "may_fork"):  # one that does not know forks has none
            self.may_fork, self.on_fork, self.ahead_of = self._may_fork, self._on_fork, policy.ahead_of

    @property
    def ignores_decode_steps(self) -> bool:
        ignores = self.admission.ignores_decode_steps
        if ignores is None:
            ignores = type(self.admission).decode_mask is AdmissionPolicy.decode_mask
        return ignores and getattr(self.policy, "ignores_decode_steps", False)

    # What a KeyPlanner asks

    def decode_mask(self, mask: NDArray[np.bool_] | None, view: View) -> NDArray[np.bool_] | None:
        mine = self._ask("decode_mask", _check_mask, view, view)
        if mine is None:
            return mask
        both: NDArray[np.bool_] = mine if mask is None else mine & mask
        return both if both.any() else mask  # a step without rows might never be followed by another

    def admit(self, sequence: Sequence, joining: list[Sequence], leaving: list[Sequence], view: View) -> Admit:
        if sequence in self._rejected:
            return Admit.SKIP
        verdict: Admit = self._ask("admit", _check_verdict, view, sequence, joining, leaving, view)
        if verdict is not Admit.ADMIT:
            self._has_held_back = True
        return verdict

    # What the scheduler asks

    def plan(self, view: View) -> Decision:
        self._has_held_back = False
        if self._rejected:
            self._rejected = set()
        reasons: list[tuple[Sequence, str]] = []
        if view.num_waiting:
            name = self.admission.name
            rejected = self._ask("reject", _check_rejected, view, view)
            reasons = [(s, f"turned away by the admission policy {name!r}: {why}") for s, why in rejected]
            self._rejected = {s for s, _ in reasons if not s.is_taken}  # the others are kept, and may start
        decision = self.policy.plan(view)
        if not self._asks_while_packing:
            self._thin_out(decision, view)
        if reasons:
            decision.reject = [*decision.reject, *reasons]
        return decision

    def _thin_out(self, decision: Decision, view: View) -> None:
        """The same questions, of a decision that was made without them."""
        if not isinstance(self.policy, KeyPlanner):
            decision.decode = self.decode_mask(decision.decode, view)
        kept: list[tuple[Sequence, int]] = []
        joining: list[Sequence] = []
        is_open = True
        for sequence, size in decision.prefill:
            if sequence.state is State.WAITING:
                verdict = self.admit(sequence, joining, decision.preempt, view) if is_open else Admit.WAIT
                if verdict is not Admit.ADMIT:
                    is_open &= verdict in (Admit.SKIP, Admit.SKIP_LINE)
                    self.policy.on_refusal(sequence, view)
                    continue
                joining.append(sequence)
            kept.append((sequence, size))
        decision.prefill = kept

    def victim(self, view: View) -> Sequence | None:
        return self.policy.victim(view)

    def _may_fork(self, sequence: Sequence, view: View) -> bool:
        return self.policy.may_fork(sequence, view) and self.admit(sequence, [], [], view) is Admit.ADMIT

    def _on_fork(self, sequence: Sequence, view: View) -> None:
        self._ask("on_admit", None, view, sequence, view)
        self.policy.on_fork(sequence, view)

    def on_arrival(self, sequence: Sequence, view: View) -> None:
        self._ask("on_arrival", None, view, sequence, view)
        self.policy.on_arrival(sequence, view)

    def on_admit(self, sequence: Sequence, view: View) -> None:
        self._ask("on_admit", None, view, sequence, view)
        self.policy.on_admit(sequence, view)

    def on_refusal(self, sequence: Sequence, view: View) -> None:
        self.policy.on_refusal(sequence, view)

    def on_end(self, sequence: Sequence, view: View) -> None:
        self._ask("on_end", None, view, sequence, view)
        self.policy.on_end(sequence, view)

    def on_step(self, done: StepDone, view: View) -> None:
        self._ask("on_step", None, view, done, view)
        self.policy.on_step(done, view)

    def _ask(self, what: str, check: Callable[[Any, View], Any] | None, view: View, *arguments: Any) -> Any:
        try:
            answer = getattr(self.admission, what)(*arguments)
            return answer if check is None else check(answer, view)
        except Exception as error:  # of an admission policy of the user's own: anything
            if not self._open(what, error):
                raise
        return getattr(self.admission, what)(*arguments)

    def give_up(self, error: Exception, view: View) -> bool:
        """Requests are kept waiting for nothing. If this gate keeps them, all are admitted from now on. Returns whether it does."""
        return self._has_held_back and self._open("admit", error)

    def _open(self, what: str, error: BaseException) -> bool:
        if self._on_failure is None or self.failure is not None:
            return False
        self.failure = f"{what} raised {type(error).__name__}: {error}"
        self.admission = AdmissionPolicy()
        self._on_failure(what, error)
        return True


def _check_mask(mask: Any, view: View) -> NDArray[np.bool_] | None:
    if mask is None or (
        isinstance(mask, np.ndarray) and (mask.shape, mask.dtype) == (view.decode_slots.shape, np.bool_)
    ):
        return mask
    raise TypeError(f"{mask!r:.80} is no mask of {view.decode_slots.size} rows")


def _check_verdict(verdict: Any, view: View) -> Admit:
    if isinstance(verdict, Admit):
        return verdict
    raise TypeError(f"{verdict!r:.80} is no Admit")


def _check_rejected(rejected: Any, view: View) -> list[tuple[Sequence, str]]:
    pairs = list(rejected)
    for pair in pairs:
        sequence, reason = pair
        if not isinstance(sequence, Sequence) or not isinstance(reason, str):
            raise TypeError(f"{pair!r:.80} is no request with a reason")
    return pairs
