"""`RequestTable`: the table of all requests alive, their states, and every change of state.

Owns the states of `sequence.State`, and what goes with a change. Slot, blocks and the worker's row are given back
together. The policy hears of arrivals and ends. The parts that count requests are told (`expiry`, `admission`,
`stopping`, `message_budget`, `step_failures`). No other module changes the state of a request alive. Python runs here
per event of a request, never per step.

Invariants (`check_integrity`): a request alive is in exactly the collection of its state. RUNNING ones have a slot; the
others have neither slot nor blocks. `prefilling` are those that run and have known tokens left to compute. A preempted
request waits again only when no step in flight names it, and no load of its blocks is worth waiting for. Owned by
Scheduler, which is the `View` that policies get.
"""

from __future__ import annotations

from collections.abc import Iterable
from operator import add

from actorllm.kvcache.manager import KVCacheManager
from actorllm.kvcache.prefix_index import HASH_BYTES
from actorllm.scheduling.admission import Admission
from actorllm.scheduling.batch import Batch
from actorllm.scheduling.events import End
from actorllm.scheduling.expiry import Expiry
from actorllm.scheduling.followers import Followers
from actorllm.scheduling.ledger import Ledger, StepRecord
from actorllm.scheduling.message_budget import MessageBudget
from actorllm.scheduling.plan import PlanBuilder
from actorllm.scheduling.policy import PlanPolicy, View
from actorllm.scheduling.prefix_cache import PrefixCache
from actorllm.scheduling.sequence import FINISHED, RUNNING, Key, Sequence, State
from actorllm.scheduling.stopping import Stopping
from actorllm.scheduling.telemetry.draft_counters import DraftCounters
from actorllm.scheduling.telemetry.step_seconds import StepSeconds
from actorllm.scheduling.tiers.transfers import Transfers
from actorllm.supervision.blame.step_failures import StepFailures
from actorllm.types.outputs import FinishReason


class RequestTable:
    """The requests alive."""

    def __init__(
        self,
        view: View,
        policy: PlanPolicy,
        *,
        batch: Batch,
        kv: KVCacheManager,
        ledger: Ledger,
        builder: PlanBuilder,
        cache: PrefixCache,
        faults: StepFailures,
        stopping: Stopping,
        payload: MessageBudget,
        expiry: Expiry,
        admission: Admission,
        drafts: DraftCounters,
        seconds: StepSeconds,
    ) -> None:
        self.alive: dict[Key, Sequence] = {}
        self.waiting: set[Sequence] = set()
        self.resuming: set[Sequence] = set()
        """Those of the waiting that had started before: they were preempted, or handed over."""
        self.blocked: set[Sequence] = set()
        self.followers = Followers()
        self.prefilling: dict[Sequence, None] = {}
        """In order of admission."""
        self.preempted: list[Sequence] = []
        self.displaced: set[Sequence] = set()
        """Those that lost their slot since the step that is being planned was decided on."""
        self.tokenless: set[Sequence] = set()
        """Those whose first token should have come, and did not yet."""
        self.num_preemptions = 0
        self.num_wasted = 0
        """Tokens that were sampled for requests that had ended by then."""
        self.transfers: Transfers | None = None
        """Through which preempted requests may get their blocks back."""
        self._view = view
        self.policy = policy
        self._batch = batch
        self._kv = kv
        self._ledger = ledger
        self._builder = builder
        self._cache = cache
        self._step_failures = faults
        self._stopping = stopping
        self._message_budget = payload
        self._expiry = expiry
        self._admission = admission
        self._drafts = drafts
        self._seconds = seconds

    # Into a slot ------------------------------------------------------------------------------------------------------

    def enter(self, sequence: Sequence) -> None:
        """A request comes alive; where it goes first is the caller's to say (`block`, `wait`, `follow`)."""
        self._cache.hash_known(sequence)
        self.alive[sequence.key] = sequence
        self._admission.enter(sequence)
        sequence.counted_by = [
            part for part in (self._expiry, self._stopping, self._message_budget) if part.add(sequence)
        ]

    def block(self, sequence: Sequence) -> None:
        """What a request needs is not there."""
        sequence.state = State.BLOCKED
        self.blocked.add(sequence)

    def wait(self, sequence: Sequence) -> None:
        """From now on a request waits for a slot."""
        sequence.state = State.WAITING
        self.waiting.add(sequence)
        if sequence.submit.has_started:
            self.resuming.add(sequence)  # it had started under another scheduler
        self.policy.on_arrival(sequence, self._view)

    def follow(self, sequence: Sequence, leader: Sequence) -> None:
        """A request waits for another one to compute the prompt they share."""
        sequence.state = State.FOLLOWING
        self.followers.add(sequence, leader)

    def start(self, sequence: Sequence) -> None:
        """A waiting request gets a slot. Its blocks follow: all that start in one step are filled together."""
        self.waiting.discard(sequence)
        if self.resuming:
            self.resuming.discard(sequence)
        sequence.state = RUNNING
        self._cache.take_over(sequence)
        if sequence.scheduled is None:
            self._admission.leave(sequence)
            sequence.scheduled = self._view.now
            sequence.num_cached_tokens = sequence.num_done
        self._batch.occupy(sequence)
        self._seconds.enter(sequence)
        self.prefilling[sequence] = None
        if sequence.rules is not None:
            self._message_budget.enter_slot(sequence.rules)

    def start_fork(self, fork: Sequence, leader: Sequence) -> None:
        """It gets a slot. Its prompt is computed when that of its leader is, and published when that is reported."""
        fork.state = State.RUNNING
        if fork.scheduled is None:
            self._admission.leave(fork)
        fork.scheduled = self._view.now
        fork.num_cached_tokens = leader.num_cached_tokens
        fork.can_publish &= leader.can_publish  # not if a reset came meanwhile
        slot = self._batch.occupy(fork)
        self._seconds.enter(fork)
        self._batch.num_computed[slot] = fork.num_prompt
        if fork.rules is not None:
            self._message_budget.enter_slot(fork.rules)

    # And out of it ----------------------------------------------------------------------------------------------------

    def preempt(self, sequence: Sequence) -> None:
        """Take slot and blocks; the request is computed again from its known tokens, and the token in flight is kept."""
        self.num_preemptions += 1
        sequence.num_preemptions += 1
        self._cache.publish_known(sequence)
        sequence.last_step = self._ledger.last_step_naming(sequence)
        if self.transfers is not None:
            self.transfers.preempted(self._kv.tables[0, sequence.slot, : len(sequence.hashes) // HASH_BYTES].copy())
        self._leave_slot(sequence)
        sequence.state = State.PREEMPTED
        self.displaced.add(sequence)
        self.preempted.append(sequence)
        self.readmit()

    def preempt_all(self) -> None:
        """All that run are computed again."""
        for sequence in self.running():
            self.preempt(sequence)

    def readmit(self) -> None:
        """Preempted requests wait again once no step in flight names them."""
        if self.preempted:
            done = self._ledger.last_done
            ready = [s for s in self.preempted if s.last_step <= done]
            if self.transfers is not None:
                ready = [s for s in ready if not self.transfers.holds(s)]
            if ready:
                self.preempted = [s for s in self.preempted if s not in ready]
                for sequence in ready:
                    self.resuming.add(sequence)
                    self.wait(sequence)

    def compute_again(self, voided: Iterable[StepRecord]) -> None:
        """These steps do not count, and may not even have been begun: each request goes on from its known tokens.

        Slots that they were to free are freed once more, since a new request may get one. Blocks that they were to clear
        are cleared once more: nothing valid has been written there since. Copies were for the sake of requests that are
        computed again from their tokens.
        """
        for record in voided:
            for slot in record.freed.tolist():
                self._builder.free(slot)
            if record.zeroed.size:
                self._kv.zero(record.zeroed)
            if self._cache.snapshots is not None:
                self._cache.snapshots.voided(record.saves)
        self.restart()

    def restart(self) -> None:
        """All that run go on from their known tokens, on workers of whose batch nothing is known."""
        self.preempt_all()
        self._builder.forget_worker()
        self.readmit()

    def end(
        self,
        sequence: Sequence,
        reason: FinishReason,
        stop_reason: int | str | None = None,
        *,
        error: str | None = None,
        zero: bool = False,
    ) -> End:
        """End a request, wherever it is. zero: what its blocks hold is not finite and must be cleared."""
        slot = sequence.slot
        if slot >= 0:
            in_flight = 0
            if sequence not in self.prefilling:
                in_flight = self._batch.num_computed.item(slot) + 1 - self._batch.num_known.item(slot)
            if in_flight and sequence.submit.pooling is None:  # these tokens will have been computed in vain
                sequence.num_wasted_tokens += in_flight
                self.num_wasted += in_flight
            if sequence.can_publish:
                if reason == "error":
                    self._cache.settle(sequence)
                else:
                    self._cache.publish_rest(sequence)
            self._leave_slot(sequence, zero=zero, is_in_flight=in_flight != 0)
        else:
            self._leave_line(sequence)
        if self.tokenless:
            self.tokenless.discard(sequence)
        if self._step_failures.is_recovering:
            self._step_failures.discard(sequence)
        sequence.state = FINISHED
        sequence.finish_reason = reason
        sequence.last_token = self._view.now if sequence.first_token is not None else None
        del self.alive[sequence.key]
        if sequence.scheduled is None:
            self._admission.leave(sequence)
        for part in sequence.counted_by:
            part.discard(sequence)
        self.policy.on_end(sequence, self._view)
        if self.followers.leaders:
            for follower in self.followers.take(sequence):
                self.wait(follower)
        return End(sequence, reason, stop_reason, error)

    def _leave_line(self, sequence: Sequence) -> None:
        """A request without a slot is ending."""
        if sequence.state is State.PREEMPTED:
            wasted = sum(any(s is sequence for s in record.rows.sequences) for record in self._ledger)
            sequence.num_wasted_tokens += wasted
            self.num_wasted += wasted
            self.preempted.remove(sequence)
        self.waiting.discard(sequence)
        self.resuming.discard(sequence)
        self.blocked.discard(sequence)
        self.followers.discard(sequence)

    def _leave_slot(self, sequence: Sequence, *, zero: bool = False, is_in_flight: bool = True) -> None:
        """is_in_flight: a step in flight may sample for it."""
        slot = sequence.slot
        if self.prefilling:
            self.prefilling.pop(sequence, None)
        if sequence.rules is not None:
            self._message_budget.leave_slot(sequence.rules)
        self._seconds.leave(sequence)
        if self._cache.snapshots is not None:
            self._cache.snapshots.leave(sequence)
        self._kv.empty(slot, zero=zero)
        self._batch.vacate(slot, is_in_flight=is_in_flight)
        self._builder.free(slot)
        if self._drafts.is_used:
            drafted, accepted = self._drafts.take(slot)
            sequence.num_draft_tokens += drafted
            sequence.num_accepted_tokens += sum(accepted)
            before = sequence.accepted_per_position or (0,) * len(accepted)
            sequence.accepted_per_position = tuple(map(add, before, accepted))

    # Looking ----------------------------------------------------------------------------------------------------------

    def running(self) -> list[Sequence]:
        return [s for s in self._batch.sequences.tolist() if s is not None]

    def blocked_on(self) -> dict[str, int]:
        """How many are blocked, by what they wait for."""
        counts: dict[str, int] = {}
        for sequence in self.blocked:
            reason = sequence.submit.blocked_on or "KV from a tier"
            counts[reason] = counts.get(reason, 0) + 1
        return counts

    def check_integrity(self) -> None:
        """AssertionError when an invariant of the module docstring does not hold."""
        self.followers.check_integrity()
        for sequence in self.alive.values():
            is_running = sequence.state is State.RUNNING
            assert (sequence.slot >= 0) == is_running, f"{sequence.key} is {sequence.state} in slot {sequence.slot}"
            assert (sequence in self.waiting) == (sequence.state is State.WAITING), f"{sequence.key} waits or not"
            assert (sequence in self.blocked) == (sequence.state is State.BLOCKED), f"{sequence.key} is blocked or not"
            is_following = sequence in self.followers.leaders
            assert is_following == (sequence.state is State.FOLLOWING), f"{sequence.key} follows or not"
            was_started = sequence.num_preemptions > 0 or sequence.submit.has_started
            is_resuming = sequence.state is State.WAITING and was_started
            assert (sequence in self.resuming) == is_resuming, f"{sequence.key} comes back or not"
            assert (sequence in self.preempted) == (sequence.state is State.PREEMPTED), f"{sequence.key} preempted"
        for slot, sequence in enumerate(self._batch.sequences):
            if sequence is None:
                assert self._kv.num_blocks[slot] == 0, f"free slot {slot} holds blocks"
            else:
                assert self.alive.get(sequence.key) is sequence, f"slot {slot} holds a request that ended"
        alive = self.alive.values()
        with_deadline = sum(s.submit.deadline is not None for s in alive)
        assert self._expiry.num_alive == with_deadline, "count of deadlines"
        self._admission.check_integrity([s for s in alive if s.scheduled is None])
        self._stopping.check_integrity(alive)
        self._message_budget.check_integrity(alive)
