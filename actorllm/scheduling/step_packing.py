"""`KeyPlanner`: packs steps in the order of a `KeyPolicy`; `Room`: what is left of one step while it is packed.

Owns the waiting requests in their order. Called by the scheduler as its `PlanPolicy`. Pure.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from typing import Protocol

import numpy as np
from numpy.typing import NDArray

from actorllm.scheduling.limits import Limits
from actorllm.scheduling.policy import Admit, Decision, KeyPolicy, SortKey, StepDone, View
from actorllm.scheduling.sequence import Sequence, State
from actorllm.scheduling.waiting_order import NUM_STALE, WaitingLines

ADMIT = Admit.ADMIT
"""Asked of every admission. Python finds a member of an enum by a search for its name, at each use."""

ANNOUNCED_TO = "announced to"
"""In `Sequence.policy_state`: the mark of the planner whose policy has heard of the request, which may be one before this."""

MAX_PASSED = 16
"""How many long prompts that wait a step passes over to find a short one behind them."""


class Room:
    """What is left of one step while it is packed.

    A prompt that cannot be finished in this step is long. With passing packing it does not keep the short ones behind it
    waiting: up to half of the tokens that it finds go to those that can be finished, and it gets the other half and what they
    leave over. A step works on `Limits.max_partial_prefills` long prompts at most; the others wait their turn, in the order of
    arrival.

    With strict packing each prompt takes all tokens that it can use, and what it leaves over is for the next one in line
    (Sarathi-Serve, and vLLM by default). Behind the first one that does not fit nothing is served.
    """

    __slots__ = (
        "_chunk",
        "_is_strict",
        "_long",
        "_max_partial",
        "_num_partial",
        "_others",
        "_sizes",
        "admitted",
        "blocks",
        "limits",
        "paused",
        "slots",
        "tokens",
    )

    def __init__(self, tokens: int, chunk: int, limits: Limits, is_strict: bool = False) -> None:
        self.limits = limits
        self.tokens = tokens
        self.slots = 0
        self.blocks = 0
        self.admitted: list[Sequence] = []
        """Those of the waiting requests that get a slot in this step."""
        self.paused: frozenset[int] = frozenset()
        """Slots of decode rows that this step leaves out: they take no token of it, and have none to give."""
        self._chunk = chunk
        self._is_strict = is_strict
        self._num_partial = 0
        """Prompts that a step with strict packing works on without finishing them."""
        self._max_partial = limits.max_partial_prefills
        self._others = tokens
        """What those behind a long prompt may have; no limit before there is one."""
        self._sizes: dict[Sequence, int] = {}
        self._long: dict[Sequence, int] = {}

    @property
    def left(self) -> int:
        """Tokens for the next one in line."""
        return self.tokens if self.tokens < self._others else self._others

    @property
    def has_long(self) -> bool:
        return bool(self._long)

    def has(self, sequence: Sequence) -> bool:
        return sequence in self._sizes

    def tokens_of(self, running: Sequence, view: View) -> int:
        """How many tokens of this step a running request has as a decode row."""
        return int(view.batch.is_decoding[running.slot]) if running.slot not in self.paused else 0

    def take_from(self, victim: Sequence, sequence: Sequence, view: View) -> None:
        """A running request gives up its place in the step for another one."""
        given = self.tokens_of(victim, view)
        self.tokens += given
        self._others += given
        self.slots += 1
        self.blocks += view.kv.num_exclusive(victim.slot, sequence.hits)

    def keep(self, slots: int, blocks: int) -> None:
        """So much is for a request that comes before all that are still to be served, as far as there is as much."""
        if slots:
            self.slots = max(0, self.slots - slots)
            self.blocks = max(0, self.blocks - blocks)

    def fits(self, sequence: Sequence, remaining: int, num_more: int = 0) -> bool:
        """Whether `serve` would give a prompt tokens, if there were so many more of them."""
        left = self.left + num_more
        if left <= 0:
            return False
        if sequence.is_whole:
            return remaining <= left
        if self._is_strict:
            return remaining <= min(left, self._chunk) or self._num_partial < self._max_partial
        return not self._is_long(remaining, left) or len(self._long) < self._max_partial

    def _is_long(self, remaining: int, left: int) -> bool:
        wanted = min(remaining, self._chunk)
        return wanted > left or (wanted < remaining and 2 * wanted > left)

    def serve(self, sequence: Sequence, remaining: int) -> bool:
        """Whether a prompt gets tokens in this step. How many a long one gets is settled by `chunks`."""
        left = self.tokens if self.tokens < self._others else self._others
        if left <= 0:
            return False
        if self._is_strict:
            return self._serve_strictly(sequence, remaining, left)
        wanted = remaining
        if wanted > left or wanted > self._chunk:
            if sequence.is_whole:
                if wanted > left:
                    return False
            else:
                wanted = min(wanted, self._chunk)
                if self._is_long(remaining, left):
                    if len(self._long) >= self._max_partial:
                        return False
                    self._long[sequence] = wanted
                    self._sizes[sequence] = 0
                    self._others = left // 2
                    return True
        self._sizes[sequence] = wanted
        self.tokens -= wanted
        self._others -= wanted
        return True

    def _serve_strictly(self, sequence: Sequence, remaining: int, left: int) -> bool:
        wanted = remaining if sequence.is_whole else min(remaining, self._chunk, left)
        is_partial = wanted < remaining
        if wanted > left or (is_partial and self._num_partial >= self._max_partial):
            self._others = 0  # none behind it passes
            return False
        self._num_partial += is_partial
        self._sizes[sequence] = wanted
        self.tokens -= wanted
        self._others -= wanted
        return True

    def chunks(self) -> list[tuple[Sequence, int]]:
        """(request, tokens) in the order in which they were served."""
        num_left = len(self._long)
        for sequence, wanted in self._long.items():
            size = min(wanted, -(-self.tokens // num_left))
            num_left -= 1
            self._sizes[sequence] = size
            self.tokens -= size
        return list(self._sizes.items())


class Gatekeeper(Protocol):
    """What a KeyPlanner asks besides its policy, if there is one (`AdmissionGate`)."""

    def decode_mask(self, mask: NDArray[np.bool_] | None, view: View) -> NDArray[np.bool_] | None:
        """Which decode rows run, of those that the policy wants (None: all)."""
        ...

    def admit(self, sequence: Sequence, joining: list[Sequence], leaving: list[Sequence], view: View) -> Admit:
        """Whether the next one in line gets a slot, in a step in which others get one, or lose it."""
        ...


class KeyPlanner:
    """Packs steps in the order of a KeyPolicy: decode rows first, then prompts, started ones and admissions (`Room`).

    The waiting requests are in `WaitingLines`. While generation is paused, those that come up and must wait for its end are
    put aside, so that no step looks at them twice.
    """

    gatekeeper: Gatekeeper | None = None

    def __init__(self, policy: KeyPolicy) -> None:
        self.policy = policy
        self._order = WaitingLines(policy)
        self._mark = object()
        """By which it knows the requests that its policy has heard of."""
        self._aside: list[Sequence] = []
        self._num_ended = 0
        """Since those that wait no more were cleaned out."""
        self._can_displace = _overrides(policy, "preempt_for")
        self._decides_on_admission = _overrides(policy, "admit")
        self._hears_of_admissions = _overrides(policy, "on_admit")
        self._hears_of_ends = _overrides(policy, "on_end")
        self._hears_of_steps = _overrides(policy, "on_step")
        self._wakes = _overrides(policy, "wake_at")
        self.ignores_decode_steps = type(self).plan is KeyPlanner.plan and (
            not any(_overrides(policy, hook) for hook in ("decode_mask", "wake_at", "on_step"))
            if policy.ignores_decode_steps is None
            else policy.ignores_decode_steps
        )
        self._hopeless: Sequence | None = None
        """No running request would give way to this one; true until another is admitted."""

    def plan(self, view: View) -> Decision:
        policy = self.policy
        mask = policy.decode_mask(view)
        if self.gatekeeper is not None:
            mask = self.gatekeeper.decode_mask(mask, view)
        wake_at = policy.wake_at(view) if self._wakes else math.inf
        if not view.prefilling and not view.num_waiting and view.num_growing <= view.kv.num_free:
            return Decision(decode=mask, wake_at=wake_at)  # the caller's own: a planner built on this one may change it
        decision = Decision(decode=mask, wake_at=wake_at)
        num_growing, num_decode = self._make_room(decision, view)
        budget = policy.budget(view)
        limits = view.limits
        tokens = min(budget.tokens, limits.max_tokens) - num_decode
        room = Room(tokens, budget.prefill_chunk or tokens, limits, policy.strict)
        room.slots = view.batch.num_free_slots
        room.blocks = view.kv.num_free - num_growing
        if decision.decode is not None and self._can_displace:
            room.paused = frozenset(view.decode_slots[~decision.decode].tolist())
        self._fill(room, decision, view)
        return decision

    def _make_room(self, decision: Decision, view: View) -> tuple[int, int]:
        """Preempt until the decode rows find their blocks. Returns the blocks they need and how many rows there are."""
        wanted = view.decode_slots if decision.decode is None else view.decode_slots[decision.decode]
        growing = view.growing_slots
        if decision.decode is not None:
            growing = growing[np.isin(growing, wanted)]
        num_decode, num_growing = wanted.size, growing.size
        if num_growing <= view.kv.num_free:
            return num_growing, num_decode
        free = view.kv.num_free
        candidates = sorted(view.running(), key=lambda s: self.policy.victim_key(s, view))
        while num_growing > free and len(candidates) > 1:
            victim = candidates.pop()
            decision.preempt.append(victim)
            free += view.kv.num_exclusive(victim.slot)
            num_decode -= int((wanted == victim.slot).any())
            num_growing -= int((growing == victim.slot).any())
        return num_growing, num_decode

    def _fill(self, room: Room, decision: Decision, view: View) -> None:
        """Started prompts and waiting requests in the order of their keys; of equal keys, the started ones first."""
        # The common case, one long prompt beside decodes, needs no order.
        if len(view.prefilling) == 1 and not view.num_waiting:
            (sequence,) = view.prefilling
            if sequence not in decision.preempt:
                room.serve(sequence, view.remaining(sequence))
            decision.prefill = room.chunks()
            return
        # Few prompts are in progress at a time, so they are sorted each step; waiting ones are in a heap.
        started: list[tuple[SortKey, int, Sequence]] = []
        if view.prefilling:
            ready = [s for s in view.prefilling if s not in decision.preempt]
            started = [(self.policy.key(s, view), s.arrival_index, s) for s in ready]
            started.sort(key=lambda entry: entry[:2], reverse=True)
        # Requests that a pause kept back come into the order again once it has ended.
        if self._aside and not view.is_paused:
            aside, self._aside = self._aside, []
            for sequence in aside:
                if sequence.state is State.WAITING:
                    self._order.push(sequence, view)
        skipped: list[Sequence] = []
        num_passed = 0
        self._order.reopen()
        order = self._order.only or self._order
        is_open = view.num_waiting > 0  # else none may start, however many are in the heap
        # A merge of both orders: of equal keys the started prompt is served first.
        while True:
            head = order.head(view) if is_open else None
            if started and (head is None or started[-1][0] <= order.head_key):
                sequence = started.pop()[-1]
                if sequence not in decision.preempt:  # it may have given way meanwhile
                    room.serve(sequence, view.remaining(sequence))
                    room.keep(*view.fork_room(sequence))
                continue
            if head is None:
                break
            verdict = self._admit(head, room, decision, view)
            # WAIT stops the whole order, SKIP_LINE one tenant's line, SKIP this request alone. An admitted one leaves
            # the order.
            if verdict is ADMIT:
                order.pop(view)
                continue
            if verdict is Admit.WAIT:
                is_open = False
                continue
            if verdict is Admit.SKIP_LINE:
                if isinstance(order, WaitingLines):
                    order.close()
                else:
                    is_open = False
                continue
            order.pop(view)
            if view.is_paused and not head.has_started:
                self._aside.append(head)
                continue
            # The search beyond requests that do not fit is bounded: a step's cost must not grow with the queue.
            skipped.append(head)
            num_passed += room.has_long
            is_open = num_passed < MAX_PASSED
        for sequence in skipped:
            self._order.push(sequence, view)
        decision.prefill = room.chunks()

    def _admit(self, sequence: Sequence, room: Room, decision: Decision, view: View) -> Admit:
        """Whether a waiting request gets a slot, all blocks of its known tokens and a first chunk in this step."""
        if not view.may_start(sequence):
            return Admit.SKIP
        if decision.preempt and not any(self.policy.preempt_for(sequence, victim, view) for victim in decision.preempt):
            return Admit.WAIT  # to admit a request right after another of its rank had to go would only thrash
        # Cheap tests first: most steps of a full engine end here.
        is_full = room.slots <= 0 or room.left <= 0
        if is_full and not self._can_displace:
            return Admit.WAIT
        blocks = view.admission_blocks(sequence)
        # With no other request running, headroom would be kept for nothing.
        headroom = room.limits.headroom_blocks if room.slots < room.limits.max_seqs else 0
        victims: list[Sequence] = []
        if is_full or blocks + headroom > room.blocks:
            victims = self._who_gives_way(sequence, blocks, headroom, room, decision, view)
            if not victims:
                return Admit.WAIT
        # Policies are asked last, about requests that would fit; the admission policy also hears which ones would give
        # way.
        if self._decides_on_admission:
            verdict = self.policy.admit(sequence, view)
            if verdict is not ADMIT:
                return verdict
        if self.gatekeeper is not None:
            verdict = self.gatekeeper.admit(sequence, room.admitted, [*decision.preempt, *victims], view)
            if verdict is not ADMIT:
                self.policy.on_held_back(sequence, view)
                return verdict
        remaining = sequence.num_remaining  # of the look-up by which its blocks were counted
        # Only now is anything taken away: before this line the decision is unchanged.
        if victims and room.fits(sequence, remaining, sum(room.tokens_of(v, view) for v in victims)):
            for victim in victims:
                room.take_from(victim, sequence, view)
                decision.preempt.append(victim)
        if not room.serve(sequence, remaining):
            return Admit.SKIP if room.has_long and not sequence.is_whole else Admit.WAIT
        room.slots -= 1
        room.blocks -= blocks
        room.admitted.append(sequence)
        num_forks, fork_blocks = view.fork_room(sequence)
        if num_forks:
            room.keep(num_forks, fork_blocks)
        return ADMIT

    def _who_gives_way(
        self, sequence: Sequence, blocks: int, headroom: int, room: Room, decision: Decision, view: View
    ) -> list[Sequence]:
        """The running requests that make room for a waiting one, the highest victim key first; none if not enough."""
        if not self._can_displace or self._hopeless is sequence:
            return []
        less_urgent = self.policy.giving_way(sequence, view)
        # Nothing changes by time alone, so it is not asked again for this request until another one is admitted.
        if not less_urgent and self.policy.key_horizon(sequence, view) == math.inf:
            self._hopeless = sequence
        allowed = [s for s in less_urgent if s not in decision.preempt and not room.has(s)]
        allowed.sort(key=lambda s: self.policy.victim_key(s, view))
        victims: list[Sequence] = []
        tokens, slots, free = room.left, room.slots, room.blocks
        needed = view.remaining(sequence) if sequence.is_whole else 1
        # As few as needed, by what each would give back; shared blocks give nothing.
        while allowed and (tokens < needed or slots <= 0 or blocks + headroom > free):
            victim = allowed.pop()
            victims.append(victim)
            tokens += room.tokens_of(victim, view)
            slots += 1
            free += view.kv.num_exclusive(victim.slot, sequence.hits)
        return victims if tokens >= needed and slots > 0 and blocks <= free else []

    def victim(self, view: View) -> Sequence | None:
        return max(view.running(), key=lambda s: self.policy.victim_key(s, view), default=None)

    def on_arrival(self, sequence: Sequence, view: View) -> None:
        self._order.push(sequence, view)
        if sequence.num_preemptions and sequence.policy_state.get(ANNOUNCED_TO) is self._mark:
            self.policy.on_preempt(sequence, view)
        else:
            sequence.policy_state[ANNOUNCED_TO] = self._mark
            self.policy.on_arrival(sequence, view)

    def on_admit(self, sequence: Sequence, view: View) -> None:
        self._hopeless = None
        if self._hears_of_admissions:
            self.policy.on_admit(sequence, view)

    def on_refusal(self, sequence: Sequence, view: View) -> None:
        self._order.push(sequence, view)

    def ahead_of(self, sequence: Sequence, view: View) -> Iterator[Sequence]:
        for other in self._order.before((self.policy.key(sequence, view), sequence.arrival_index), view):
            if view.may_start(other):
                yield other

    def may_fork(self, sequence: Sequence, view: View) -> bool:
        return self.policy.admit(sequence, view) is Admit.ADMIT

    def on_fork(self, sequence: Sequence, view: View) -> None:
        """For the order it is as if it had arrived now."""
        self._hopeless = None
        sequence.policy_state[ANNOUNCED_TO] = self._mark
        self.policy.on_arrival(sequence, view)
        self.policy.on_admit(sequence, view)

    def on_end(self, sequence: Sequence, view: View) -> None:
        self._num_ended += 1
        if self._num_ended > NUM_STALE:
            self._clean(view)
        if self._hears_of_ends:
            self.policy.on_end(sequence, view)

    def _clean(self, view: View) -> None:
        """Many of those that ended may be in the order still."""
        if self._num_ended > NUM_STALE + (len(self._order) + len(self._aside)) // 2:
            self._num_ended = 0
            self._order.clean(view)
            self._aside = [sequence for sequence in self._aside if sequence.state is State.WAITING]

    def on_step(self, done: StepDone, view: View) -> None:
        if self._hears_of_steps:
            self.policy.on_step(done, view)


def _overrides(policy: KeyPolicy, hook: str) -> bool:
    """Whether a policy has a method of its own for this hook: the others need not be called."""
    method = getattr(policy, hook)
    return getattr(method, "__func__", method) is not getattr(KeyPolicy, hook)
