"""What a policy decided, in a recording: `TellingPolicy` writes it down, `ToldPolicy` decides the same without the policy.

A recording has the inputs of a scheduler, and its decisions follow from them as long as the policy is at hand. One of the
user's own may not be: another folder, another machine, edited since. So a recording of such an engine also has every answer
that its policy gave (calls that begin with "decide"). It can be replayed anywhere, exactly as it was. Requests are named by
their keys. Built in policies are part of the package and need none of it.
"""

from __future__ import annotations

import math
from collections import deque
from collections.abc import Callable, Iterable
from typing import Any

import numpy as np

from actorllm.scheduling.policy import Decision, PlanPolicy, StepDone, View
from actorllm.scheduling.sequence import Key, Sequence
from actorllm.scheduling.telemetry.recording import Entry

DECIDE = "decide"
"""How the calls of decisions begin; what was asked follows."""

MOST = 1 << 31
"""Tokens of a chunk, and seconds in the past, beyond which it makes no difference how many."""


def _key(sequence: Sequence) -> list[int]:
    return list(sequence.key)


class TellingPolicy:
    """A PlanPolicy that does what another one does, and hands its answers to a sink."""

    def __init__(self, policy: PlanPolicy, sink: Callable[[Entry], None]) -> None:
        self._policy = policy
        self._sink = sink
        self._has_forks = hasattr(policy, "may_fork")
        if self._has_forks:
            self.may_fork, self.ahead_of = self._may_fork, self._ahead_of

    def __getattr__(self, name: str) -> Any:
        return getattr(self._policy, name)

    def plan(self, view: View) -> Decision:
        decision = self._policy.plan(view)
        decode = decision.decode
        if decode is not None and (decode.shape != view.decode_slots.shape or decode.dtype != np.bool_):
            decode = None  # the scheduler does not look at it either
        told = [
            [_key(s) for s in decision.preempt],
            None if decode is None else np.flatnonzero(decode).tolist(),
            [[*_key(s), max(-1, min(int(size), MOST))] for s, size in decision.prefill],
            None if decision.wake_at == math.inf else max(float(decision.wake_at), -float(MOST)),
            [[*_key(s), reason.encode(errors="replace").decode()] for s, reason in decision.reject],
            self._has_forks,
        ]
        self._sink((f"{DECIDE} plan", view.now, told))
        return decision

    def victim(self, view: View) -> Sequence | None:
        found = self._policy.victim(view)
        self._sink((f"{DECIDE} victim", view.now, None if found is None else _key(found)))
        return found

    def _may_fork(self, sequence: Sequence, view: View) -> bool:
        may = self._policy.may_fork(sequence, view)
        self._sink((f"{DECIDE} may_fork", view.now, bool(may)))
        return may

    def _ahead_of(self, sequence: Sequence, view: View) -> list[Sequence]:
        others = list(self._policy.ahead_of(sequence, view))
        self._sink((f"{DECIDE} ahead_of", view.now, [_key(other) for other in others]))
        return others


class ToldPolicy:
    """A PlanPolicy that gives the answers of a recording, one after the other; nothing is planned after the last one."""

    def __init__(self, entries: Iterable[Entry]) -> None:
        self._answers: dict[str, deque[Any]] = {name: deque() for name in ("plan", "victim", "may_fork", "ahead_of")}
        for call, _, answer in entries:
            verb, _, asked = call.partition(" ")
            if verb == DECIDE:
                self._answers[asked].append(answer)
        if self._answers["plan"] and self._answers["plan"][0][-1]:
            self.may_fork, self.on_fork, self.ahead_of = self._may_fork, self._on_fork, self._ahead_of

    def plan(self, view: View) -> Decision:
        if not self._answers["plan"]:  # it raised then, or was killed while it decided
            return Decision(decode=np.zeros(view.decode_slots.shape, np.bool_))
        preempt, decode, prefill, wake_at, reject, _ = self._answers["plan"].popleft()
        return Decision(
            preempt=[s for key in preempt if (s := _find(key, view))],
            decode=None if decode is None else _mask(view.decode_slots.size, decode),
            prefill=[(s, size) for *key, size in prefill if (s := _find(key, view))],
            wake_at=math.inf if wake_at is None else wake_at,
            reject=[(s, reason) for *key, reason in reject if (s := _find(key, view))],
        )

    def victim(self, view: View) -> Sequence | None:
        key = self._answers["victim"].popleft() if self._answers["victim"] else None
        return None if key is None else _find(key, view)

    def _may_fork(self, sequence: Sequence, view: View) -> bool:
        return bool(self._answers["may_fork"]) and bool(self._answers["may_fork"].popleft())

    def _ahead_of(self, sequence: Sequence, view: View) -> list[Sequence]:
        keys = self._answers["ahead_of"].popleft() if self._answers["ahead_of"] else []
        return [s for key in keys if (s := _find(key, view))]

    def _on_fork(self, sequence: Sequence, view: View) -> None: ...

    def on_arrival(self, sequence: Sequence, view: View) -> None: ...

    def on_admit(self, sequence: Sequence, view: View) -> None: ...

    def on_refusal(self, sequence: Sequence, view: View) -> None: ...

    def on_end(self, sequence: Sequence, view: View) -> None: ...

    def on_step(self, done: StepDone, view: View) -> None: ...


def _find(key: Iterable[int], view: View) -> Sequence | None:
    frontend, rid = key
    found: Key = (frontend, rid)
    return view.sequence(found)  # type: ignore[attr-defined,no-any-return]


def _mask(num: int, rows: list[int]) -> np.ndarray[Any, np.dtype[np.bool_]]:
    mask = np.zeros(num, np.bool_)
    mask[rows] = True
    return mask
