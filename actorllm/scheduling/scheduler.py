"""`Scheduler`: decides what every step computes, and accounts for what it returned.

    submit / abort / unblock   requests come and go
    schedule(now) -> StepPlan  plan the next step; up to `depth` steps are in flight
    take_rejected()            requests that a policy turned away meanwhile
    update(result, now)        apply a result: new tokens, ends by length or stop token
    fail(failure, now)         a step raised: it and the later ones in flight are void
    finish(stops, now)         ends that the text layer found (stop strings), before the next schedule()
    reset_prefix_cache(now)    nothing that was computed until now is found by later requests
    change_weights(weights, running, now)  the next step is computed with others
    pause(mode, now), resume   requests are taken all the time, and none of them is started while paused
    lose_workers(error, now)   the workers died, others will come: every request goes on from its known tokens
    give_up_policy(reason, now)  it stalls, and is replaced
    change_policy(policy, admission, now)  others decide from the next step on
    expire(now)                requests whose deadline has passed end; the next one is due at `expires_at`

Pure: the same calls with the same arguments give the same plans (`telemetry.recording` shows it). Cost follows change: a steady
decode step touches numpy columns only. Python runs per request at arrival, admission, preemption and end.

Each part has its own state and invariants:

- `SubmitValidation` makes a sequence of a Submit; `RequestTable` has every request alive and changes its state.
- `Batch` and `KVCacheManager` are the slots, by column.
- `DecodeRows`, `PlanBuilder` and `Ledger` are the step being planned, its plan, and the steps in flight.
- `Results` applies what comes back; `Stopping` says which requests end with it.
- Aside stand `PrefixCache`, `Forks`, `MessageBudget` (log-probabilities, embeddings), `StepFailures` (failed steps, dead workers),
  `Expiry` and `Admission`.

Terms. A token is *known* when its id is here. A decode row runs one token ahead: the next step computes the token that
a step in flight samples, before its id is known. `num_computed` counts KV computed or in flight, `num_known` known ids.
Of several sequences of one prompt the first computes it; the others are *forks* that take it over (`forks`).
"""

from __future__ import annotations

import math
from collections.abc import Iterable
from dataclasses import replace

import numpy as np
from numpy.typing import NDArray

from actorllm.kvcache.manager import CountedKVCacheManager, KVCacheManager
from actorllm.kvcache.window_group import WindowGroup
from actorllm.messages import DEADLINE_PASSED, I32, NO_I32, OVERLOADED, StepFailed, StepPlan, StepResult, Submit
from actorllm.messages.embeds import chunk_of_items
from actorllm.scheduling.admission import Admission, Refusal
from actorllm.scheduling.batch import ONE, Batch, Rows
from actorllm.scheduling.decode_rows import DecodeRows
from actorllm.scheduling.draft_budget import DraftBudget
from actorllm.scheduling.events import NOTHING, End, Events
from actorllm.scheduling.expiry import Expiry
from actorllm.scheduling.forks import Forks
from actorllm.scheduling.lanes import RowLanes
from actorllm.scheduling.ledger import Ledger, StepRecord
from actorllm.scheduling.limits import Limits
from actorllm.scheduling.loading import BuildsPolicy, load_policies
from actorllm.scheduling.message_budget import MessageBudget
from actorllm.scheduling.pause import PAUSE_MODES, PauseState
from actorllm.scheduling.plan import NO_PLAN, NoPlanBuilder, PlanBuilder, with_states
from actorllm.scheduling.policy import PlanPolicy, StepDone
from actorllm.scheduling.policy_fallback import StalledPolicyError
from actorllm.scheduling.prefix_cache import PrefixCache
from actorllm.scheduling.request_table import RequestTable
from actorllm.scheduling.results import Results
from actorllm.scheduling.sequence import WAITING, Key, Sequence, State
from actorllm.scheduling.snapshots import Save, Snapshots
from actorllm.scheduling.stopping import Stopping
from actorllm.scheduling.telemetry.draft_counters import DraftCounters
from actorllm.scheduling.telemetry.statistics import SchedulerStatistics
from actorllm.scheduling.telemetry.step_seconds import StepSeconds
from actorllm.scheduling.tiers.leases import LeaseTable
from actorllm.scheduling.tiers.transfers import Directory, Transfers
from actorllm.scheduling.validation import SubmitValidation
from actorllm.supervision.blame.step_failures import KILLED, StepFailures
from actorllm.types.drafter import Ranges
from actorllm.types.kv_groups import SNAPSHOT_TOKENS, num_window_blocks
from actorllm.types.outputs import FinishReason
from actorllm.types.weight_version import RunningRequests

NOT_PAUSED, NOTHING_RUNS = PauseState.RUNNING, PauseState.NOTHING
"""Asked in every step. Python finds a member of an enum by a search for its name, at each use."""


class Scheduler:
    """See the module docstring. Also the `View` that policies get."""

    def __init__(
        self,
        *,
        num_blocks: int,
        block_size: int,
        max_num_seqs: int,
        max_num_batched_tokens: int,
        max_model_len: int,
        vocab_size: int,
        eos_token_ids: Iterable[int],
        primary_eos_token_id: int | None = None,
        policy: PlanPolicy,
        depth: int = 2,
        num_lookahead_tokens: int = 0,
        draft_ranges: Ranges = (),
        prefill_chunk: int | None = None,
        enable_prefix_caching: bool = True,
        max_num_partial_prefills: int = 1,
        watermark: float = 0.0,
        embedding_bytes: int = 0,
        max_source: int = 0,
        max_target: int = 0,
        max_waiting_requests: int | None = None,
        max_waiting_tokens: int | None = None,
        pools_only: bool = False,
        vector_size: int = 0,
        weights: str = "",
        tells_salts: bool = False,
        keeps_output_apart: bool = False,
        probes_alone: bool = False,
        cache_key: str = "",
        window: int | None = None,
        snapshots: int = 0,
        snapshot_tokens: int = SNAPSHOT_TOKENS,
        is_simulated: bool = False,
        num_lanes: int = 1,
        build_policy: BuildsPolicy = load_policies,
        tiers: Directory | None = None,
        lends: LeaseTable | None = None,
    ) -> None:
        """eos_token_ids: what ends a text; all but the primary one, the tokenizer's own, are told as the stop_reason.
        num_lookahead_tokens: that a row may get in a step beyond one. draft_ranges: how many of them a plan asks for.
        embedding_bytes: of each position of a prompt that is given as an embedding; 0: none is. max_source, max_target: most
        rows of an encoder that come first in a prompt, and tokens behind them; 0: the model has none. pools_only: no request
        samples. vector_size: numbers of the vectors that prompts become; 0: none does. weights: the identity of those that
        the workers compute with (`WeightSource.identity`). tells_salts: as in `PlanBuilder`. keeps_output_apart: blocks with
        output are found by no prompt, because their KV has other bits. probes_alone: as of `worker_deaths`. cache_key: as of
        `PrefixCache`. window: tokens that a token sees in the layers of a second KV group; None: there is one group.
        snapshots: places that the workers have for states of recurrent layers behind prefixes; 0: no layer is recurrent.
        snapshot_tokens: such states are behind multiples of so many tokens.
        is_simulated: plans are read by nothing and not made, and results are right. Without prefix caching, ids of sampled tokens
        and numbers of blocks are not made either; not with forks then. num_lanes: among which decode rows are shared out
        (`lanes`); with several, depth counts nothing, and one step of each is in flight. build_policy: makes what
        `change_policy` names.
        tiers: what there is of KV elsewhere (`tiers.transfers`); None: nothing, also no lease of another replica. lends: where
        other replicas see what they may copy of this one; None: nothing."""
        depth = depth if num_lanes == 1 else num_lanes
        # Room kept per row, beyond the token that a step samples: for what every step in flight may return beyond one.
        spare = num_lookahead_tokens * depth
        if num_blocks * block_size < max_model_len + spare:
            raise ValueError(
                f"{num_blocks} blocks of {block_size} hold less than max_model_len={max_model_len}+{spare}"
            )
        if not 0 <= num_lookahead_tokens * depth < block_size:
            raise ValueError(
                f"num_lookahead_tokens={num_lookahead_tokens} x depth={depth} must be less than block_size={block_size}"
            )
        self.now = 0.0
        limits = Limits(
            max_num_batched_tokens,
            max_num_seqs,
            max_model_len,
            prefill_chunk,
            max_num_partial_prefills,
            int(watermark * num_blocks),
        )
        eos_ids = frozenset(eos_token_ids)
        self.pause_state = PauseState.RUNNING
        self.wake_at = math.inf
        self._policy = policy
        self._build_policy = build_policy
        self.num_policy_changes = 0
        self.batch = batch = Batch(max_num_seqs)
        only_counts = is_simulated and window is None and not enable_prefix_caching
        cache = CountedKVCacheManager if only_counts else KVCacheManager
        self.kv = kv = cache(num_blocks, block_size, max_num_seqs, max_model_len + spare, enable_prefix_caching)
        if window is not None:
            num_window = num_window_blocks(
                num_blocks,
                window=window,
                block_size=block_size,
                max_num_seqs=max_num_seqs,
                max_num_batched_tokens=max_num_batched_tokens,
                spare=spare,
            )
            kv.add_window(window, num_window)
        self.ledger = Ledger(depth)
        self._ahead = 1 + spare  # tokens behind the computed ones that a row has room for
        self._lanes = None if num_lanes == 1 else RowLanes(num_lanes, batch, self.ledger)
        self._decode = DecodeRows(batch, kv, spare, self._lanes)
        self._drafts = DraftBudget(draft_ranges, num_lookahead_tokens)
        self._builder = NoPlanBuilder() if is_simulated else PlanBuilder(eos_ids, tells_salts)
        self._snapshots: Snapshots | None = None
        if snapshots and enable_prefix_caching:
            self._snapshots = Snapshots(
                snapshots, block_size, batch, tokens=snapshot_tokens, has_drafts=self._drafts.is_used
            )
        self._cache = PrefixCache(
            kv,
            batch,
            self.ledger,
            spare,
            weights,
            keeps_output_apart=keeps_output_apart,
            cache_key=cache_key,
            snapshots=self._snapshots,
        )
        self.admission_blocks = self._cache.admission_blocks
        self._step_failures = StepFailures(limits, batch, self.ledger, probes_alone=probes_alone)
        self._stopping = Stopping(eos_ids, vocab_size)
        self._message_budget = MessageBudget(embedding_bytes)
        self._expiry = Expiry()
        draft_counters = DraftCounters(num_lookahead_tokens, max_num_seqs)
        self._admission = Admission(max_waiting_requests, max_waiting_tokens)
        self._intake = SubmitValidation(
            limits,
            block_size=block_size,
            vocab_size=vocab_size,
            eos_ids=eos_ids,
            silent_ids=frozenset() if primary_eos_token_id is None else frozenset((primary_eos_token_id,)),
            embedding_bytes=embedding_bytes,
            max_source=max_source,
            max_target=max_target,
            pools_only=pools_only,
            vector_size=vector_size,
        )
        self.seconds = StepSeconds(self.ledger)
        self._table = RequestTable(
            self,
            policy,
            batch=batch,
            kv=kv,
            ledger=self.ledger,
            builder=self._builder,
            cache=self._cache,
            faults=self._step_failures,
            stopping=self._stopping,
            payload=self._message_budget,
            expiry=self._expiry,
            admission=self._admission,
            drafts=draft_counters,
            seconds=self.seconds,
        )
        self.prefilling = self._table.prefilling
        self._forks = Forks(self, self._table, self._builder, self._message_budget, spare)
        self._results = Results(
            self,
            vocab_size=vocab_size,
            max_tokens_per_row=1 + num_lookahead_tokens,
            vector_size=vector_size,
            batch=batch,
            kv=kv,
            ledger=self.ledger,
            table=self._table,
            cache=self._cache,
            stopping=self._stopping,
            drafts=draft_counters,
            is_simulated=is_simulated,
        )
        is_plain = window is None and num_lanes == 1 and tiers is None and not self._drafts.is_used and not snapshots
        self._plans_decode_alone = is_simulated and is_plain
        """Whether `_plan_decode` may plan a step."""
        self.transfers: Transfers | None = None
        """What moves between memory and the tiers; None: there are none."""
        if tiers is not None:
            self.transfers = self._table.transfers = Transfers(
                tiers, kv, self._cache, batch, self.ledger, self._end_loading, self._num_wanted_blocks, lends=lends
            )
        self._num_steps = 0
        self._num_prefill_tokens = 0
        self._num_dropped = 0
        self._num_refused = 0
        self.rejected: list[End] = []
        """Requests that ended while steps were planned. `take_rejected` empties it."""
        self._num_rejected = 0

    # Requests come and go ---------------------------------------------------------------------------------------------

    def submit(self, frontend: int, submit: Submit, now: float) -> End | None:
        """Take a request; an End says why it is not taken. A request that is alive already is left alone."""
        self.now = now
        key = (frontend, submit.rid)
        if key in self._table.alive:
            return None
        sequence = self._intake.take(frontend, submit, now)
        refused = self._refusal(sequence, now)
        if refused is not None:
            sequence.state = State.FINISHED
            return refused
        self._table.enter(sequence)
        if self.transfers is not None and submit.hands_off and submit.fork_of is None:
            self.transfers.lend(sequence)
        if self.transfers is not None and submit.kv_lease.size:
            self.transfers.keep_lease(sequence)
        if submit.blocked_on is not None:
            self._table.block(sequence)
        else:
            self._load_or_wait(sequence)
        return None

    def _load_or_wait(self, sequence: Sequence) -> None:
        """A request has all that it needs, but perhaps its KV is in a tier, or in the memory of another replica."""
        if self.transfers is not None and sequence.submit.kv_lease.size:
            self.transfers.borrow(sequence)
        if self.transfers is not None and self.transfers.holds(sequence):
            self._table.block(sequence)
        elif sequence.submit.fork_of is None:
            self._table.wait(sequence)
        else:
            self._forks.wait_or_follow(sequence)

    def _num_wanted_blocks(self) -> int:
        """So many free ones let any request start that waits for a slot, and let every row grow."""
        num_running = self.batch.num_slots - self.batch.num_free_slots
        room = max(num_running, self.limits.headroom_blocks) if num_running else 0
        return room + max((one.num_needed_blocks for one in self._table.waiting), default=0)

    def _end_loading(self, sequence: Sequence) -> None:
        """A request waits for no load any more."""
        if sequence.state is State.BLOCKED:
            self._table.blocked.discard(sequence)
            self._forks.wait_or_follow(sequence)
        else:
            self._table.readmit()

    def _refusal(self, sequence: Sequence, now: float) -> End | None:
        submit = sequence.submit
        if error := self._intake.refusal(sequence):
            return End(sequence, "error", error=error)
        if submit.deadline is not None and submit.deadline <= now:
            return End(sequence, "abort", DEADLINE_PASSED)
        if refusal := self._admission.refusal(sequence.key[0], submit, self.batch.num_free_slots):
            return End(sequence, "error", error=refusal.message, details=refusal.details)
        if submit.rules is not None and (error := self._intake.take_rules(sequence, submit.rules)):
            return End(sequence, "error", error=error)
        return None

    def abort(self, keys: Iterable[Key], now: float) -> list[End]:
        """End these requests where they are; unknown ones have ended already. Blocks are free at once."""
        self.now = now
        ends = []
        for key in keys:
            sequence = self._table.alive.get(key)
            if sequence is not None:
                ends.append(self._table.end(sequence, "abort"))
        return ends

    def abort_all(self, now: float) -> list[End]:
        """End every request."""
        return self.abort(list(self._table.alive), now)

    def abort_frontend(self, frontend: int, now: float) -> list[End]:
        """A frontend is gone: so are its requests."""
        ends = self.abort([key for key in self._table.alive if key[0] == frontend], now)
        self._admission.forget_frontend(frontend)
        return ends

    def hold(self, frontend: int, submit: Submit) -> Refusal | None:
        """Count a request as waiting that the caller keeps back for now; or why that is too many. Until `release`."""
        refusal = self._admission.refusal(frontend, submit, self.batch.num_free_slots)
        if refusal is None:
            self._admission.hold(frontend, submit)
        return refusal

    def release(self, frontend: int, submit: Submit) -> None:
        """It is kept back no more: it is submitted next, as one that was let in (`is_resumed`), or has ended."""
        self._admission.hold(frontend, submit, -1)

    def limit_frontend(self, frontend: int, max_waiting_requests: int) -> None:
        """Of this frontend's requests no more than so many may wait, whatever the others do."""
        self._admission.limit_frontend(frontend, max_waiting_requests)

    @property
    def expires_at(self) -> float:
        """When `expire` is due, in monotonic seconds; infinity: no request has a deadline."""
        return self._expiry.next_at

    def expire(self, now: float) -> list[End]:
        """End the requests whose deadline has passed, wherever they are. Blocks are free at once."""
        self.now = now
        return [self._table.end(sequence, "abort", DEADLINE_PASSED) for sequence in self._expiry.take_due(now)]

    def unblock(self, key: Key, error: str | None, now: float, adapter_slot: int = 0) -> End | None:
        """What a blocked request waited for is there, or (error) will never be.

        adapter_slot: where the workers hold its adapter; 0: it has none.
        """
        self.now = now
        sequence = self._table.alive.get(key)
        if sequence is None or sequence.state is not State.BLOCKED:
            return None
        if error is not None:
            return self._table.end(sequence, "error", error=error)
        if self.transfers is not None and sequence in self.transfers.waiting:
            return None  # it is for a load that it waits
        sequence.adapter_slot = adapter_slot
        self._table.blocked.discard(sequence)
        self._load_or_wait(sequence)
        return None

    def pause(self, mode: str, now: float) -> list[End]:
        """Start no request from now on (`PAUSE_MODES` says what becomes of the others). Returns those that end here."""
        if mode not in PAUSE_MODES:
            raise ValueError(f"pause mode {mode!r} must be one of {', '.join(map(repr, PAUSE_MODES))}")
        self.now = now
        self.pause_state = PauseState.NOTHING_NEW if mode == "wait" else PauseState.NOTHING
        self.wake_at = math.inf
        return self.abort_all(now) if mode == "abort" else []

    def resume(self, now: float) -> None:
        self.now = now
        self.pause_state = PauseState.RUNNING

    def give_up_policy(self, reason: str, now: float) -> bool:
        """The policy stalls: replace it, if it is one that can be replaced (`policy_fallback`). Whether it was."""
        self.now = now
        give_up = getattr(self._policy, "give_up", None)
        return give_up is not None and bool(give_up(StalledPolicyError(reason), self))

    def change_policy(self, policy: str, admission: str | None, now: float) -> None:
        """Let fresh policies decide from the next step on, by their names; no step may be in flight.

        They hear of every request as if it had come now: those that run are admitted at once, the others wait. Raises
        ConfigError if there are no such policies; nothing has changed then.
        """
        if len(self.ledger):
            raise ValueError(f"the policy cannot change while {len(self.ledger)} steps are in flight")
        fresh = self._build_policy(policy, admission, self.num_policy_changes + 1)
        self.now = now
        self.num_policy_changes += 1
        self.wake_at = math.inf
        self._policy = self._table.policy = fresh
        alive = list(self._table.alive.values())
        for sequence in alive:
            sequence.policy_state.clear()
        has_forks = hasattr(fresh, "may_fork")
        for sequence in alive:
            if sequence.state is State.RUNNING and has_forks:
                fresh.on_fork(sequence, self)
            elif sequence.state is State.RUNNING:
                fresh.on_arrival(sequence, self)
                fresh.on_admit(sequence, self)
        for sequence in self.waiting():
            fresh.on_arrival(sequence, self)

    def reset_prefix_cache(
        self, now: float, reset_running_requests: bool = False, *, keeps_tiers: bool = False
    ) -> None:
        """Forget everything that is cached. Running requests keep their blocks, and leave nothing behind.

        reset_running_requests: they are preempted as well, and computed again from their first token. keeps_tiers: only what is
        in memory is forgotten.
        """
        self.now = now
        self._cache.reset(self.running())
        if self.transfers is not None and keeps_tiers:
            self.transfers.reset()
        elif self.transfers is not None:
            self.transfers.forget_all()
        if reset_running_requests:
            self._table.preempt_all()

    def change_weights(self, weights: str, running: RunningRequests, now: float) -> list[End]:
        """The next step is computed with other weights; no step may be in flight. Returns the requests that end here.

        weights: their identity. running: what becomes of requests that have started (`RUNNING_REQUESTS`).
        """
        if len(self.ledger):
            raise ValueError(f"weights cannot change while {len(self.ledger)} steps are in flight")
        self.now = now
        ends = self.abort(self.started, now) if running == "abort" else []
        if running == "recompute":
            self._table.preempt_all()
        self._cache.change_weights(weights, self._table.alive.values())
        if self.transfers is not None:
            self.transfers.reset()
        return ends

    def num_outputs(self) -> list[tuple[Key, int]]:
        """Of every request, how many tokens it has put out."""
        known = self.batch.num_known
        return [
            (s.key, (int(known[s.slot]) if s.slot >= 0 else s.known.size) - s.num_prompt)
            for s in self._table.alive.values()
        ]

    def output_of(self, sequence: Sequence) -> I32:
        """The tokens that a request has put out."""
        return self._cache.known_tokens(sequence)[sequence.num_prompt :]

    @property
    def is_idle(self) -> bool:
        """There is no request."""
        return not self._table.alive

    @property
    def started(self) -> list[Key]:
        """The requests that have had a slot, here or under another scheduler."""
        return [sequence.key for sequence in self._table.alive.values() if sequence.has_started]

    @property
    def is_drained(self) -> bool:
        """Paused, and nothing is going on any more."""
        if self.pause_state is PauseState.RUNNING or len(self.ledger):
            return False
        is_idle = (
            self.batch.num_free_slots == self.limits.max_seqs
            and not self._table.preempted
            and not self._table.resuming
            and not any(sequence.submit.has_started for sequence in self._table.blocked)
        )
        return is_idle or self.pause_state is PauseState.NOTHING

    @property
    def is_paused(self) -> bool:
        return self.pause_state is not NOT_PAUSED

    def may_start(self, sequence: Sequence) -> bool:
        if self._step_failures.is_restricting_starts and not self._step_failures.may_start(sequence):
            return False
        return self.pause_state is NOT_PAUSED or sequence in self._table.resuming

    # Planning ---------------------------------------------------------------------------------------------------------

    @property
    def may_plan(self) -> bool:
        """Whether a step may be planned now. Whether there is one to plan, only `schedule` tells."""
        return self.ledger.has_room and bool(self._table.alive) and self.pause_state is not NOTHING_RUNS

    def schedule(self, now: float) -> StepPlan | None:
        """Plan and record the next step; None when there is nothing to compute."""
        if not self.ledger.has_room or self.pause_state is NOTHING_RUNS:
            return None
        self.now = now
        plan = self._plan_decode() if self._plans_decode_alone else None
        if plan is None:
            plan = self._plan_step() if self._lanes is None else self._plan_lane()
        if plan is None and self._step_failures.is_holding_back and not len(self.ledger):
            plan = self._plan_unhindered()
        return plan

    def _plan_unhindered(self) -> StepPlan | None:
        """No request that may run can. After failed steps, requests outside the probe group give their room back. After
        deaths of the workers, suspects do not wait for others that may not start (`pause`)."""
        self._step_failures.end_rest()
        if not self._step_failures.is_restricting_steps:
            return self._plan_lane()
        held_back = self._step_failures.held_back(self.running())
        for sequence in held_back:
            self._table.preempt(sequence)
        plan = self._plan_lane() if held_back else None
        if plan is None and self.wake_at == math.inf:
            self._step_failures.lift_restrictions()
            plan = self._plan_lane()
        return plan

    def _plan_lane(self) -> StepPlan | None:
        """Of the first lane that has something to compute."""
        if self._lanes is None:
            return self._plan_step()
        wake_at = math.inf
        for _ in self._lanes.candidates():
            plan = self._plan_step()
            if plan is not None:
                return plan
            wake_at = min(wake_at, self.wake_at)
        self.wake_at = wake_at
        return None

    def _plan_step(self) -> StepPlan | None:
        batch, decode, window = self.batch, self._decode, self.kv.window
        if window is not None:
            window.begin()
        decode.find()
        # The policy decides; from here on its decision is checked and carried out.
        decision = self._policy.plan(self)
        self.wake_at = decision.wake_at
        if decision.reject:
            self._reject(decision.reject)
        self._table.displaced.clear()
        for victim in decision.preempt:
            if victim.state is State.RUNNING:
                self._table.preempt(victim)
        # Decode rows: all by default, fewer if the policy or a search for a poison request says so.
        rows = decode.rows
        wanted = None if decision.decode is None else self._wanted_slots(decision.decode)
        if self._step_failures.is_restricting_steps:
            probed = self._step_failures.probed_slots(decode.rows.slots if wanted is None else wanted)
            wanted = wanted if probed is None else probed
        if decision.preempt or wanted is not None:
            rows = decode.choose(wanted)
        # Every row that crosses into a new block needs one now; the policy names what gives way.
        while decode.growing.size > self.kv.num_free:
            self._table.preempt(self._victim_of_need())
            rows = decode.choose(wanted)
        extended = (decode.growing, self.kv.extend(decode.growing)) if decode.growing.size else (NO_I32, NO_I32)
        if window is not None:
            for slot in extended[0].tolist():
                token = batch.num_computed.item(slot)
                window.cover(slot, token, token + 1, self.kv.num_blocks.item(slot))
        computed = (decode.computed if rows is decode.rows else batch.num_computed[rows.index]) + ONE
        batch.num_computed[rows.index] = computed
        num_decode = num_tokens = rows.slots.size
        prefill: list[tuple[Sequence, int]] = []
        sampling = rows
        forks: Iterable[Sequence] = ()
        # Prompts, and forks of those that end in this step: these rows sample for the first time.
        if decision.prefill:
            prefill, completed = self._prefill(decision.prefill, num_tokens)
            num_prefill_tokens = sum([n for _, n in prefill])
            num_tokens += num_prefill_tokens
            if window is not None:
                self._cover_chunks(window, prefill)
            self._num_prefill_tokens += num_prefill_tokens
            if completed:
                if self._table.followers.leaders:
                    forks = self._forks.fork(completed)
                    completed += [fork.slot for fork in forks]
                batch.start_decoding(completed)
                if self._lanes is not None:
                    self._lanes.join(completed)
                if rows is decode.rows and self._lanes is None:
                    sampling = batch.rows()
                else:
                    sampling = batch.select(np.concatenate((rows.index, np.array(completed, np.intp))))
                computed = batch.num_computed[sampling.index]
        batch.stop_rows(sampling.index[computed >= sampling.limits - ONE])  # their last token is in flight now
        self._admission.num_left = self._admission.num_requests - self._admission.num_held - len(self._table.blocked)
        # Nothing to compute. What the builder has collected goes with the next plan.
        if not num_tokens:
            return None
        late = sampling.slots[batch.is_late[sampling.index]] if batch.num_late else NO_I32
        # The plan is the difference to the last one; the ledger keeps what `update` will need.
        step = self.ledger.next_step
        actions = self.kv.take_actions()
        max_drafts = 0
        if self._drafts.is_used:
            max_drafts = self._drafts.most(num_decode, self._step_failures.limits.max_tokens - num_tokens)
        lane, header = (0, NO_I32) if self._lanes is None else (self._lanes.current, self._lanes.header())
        plan = self._builder.build(step, rows, extended, actions, prefill, late, max_drafts, header)
        if prefill and self._message_budget.num_embedded:
            plan = replace(plan, embeds=self._message_budget.embeds_of(prefill, batch))
        if window is not None and (pairs := window.take_pairs()).size:
            plan = replace(plan, partners=pairs)
        saves: tuple[Save, ...] = ()
        if self._snapshots is not None:
            saves = self._snapshots.plan(prefill, rows)
            plan = with_states(plan, saves, self._snapshots.take_restored())
        if forks:
            prefill = prefill + [(fork, fork.num_prompt) for fork in forks]
        sampling.hold()
        self.ledger.launch(
            StepRecord(
                step,
                sampling,
                num_decode,
                tuple(prefill),
                num_tokens,
                self.now,
                actions[0],
                plan.freed,
                max_drafts,
                lane,
                saves,
            )
        )
        if self._lanes is not None:
            self._lanes.launched(self.ledger.newest)
        self._num_steps += 1
        return plan

    def _cover_chunks(self, window: WindowGroup, prefill: list[tuple[Sequence, int]]) -> None:
        """These chunks are planned, and counted as computed: let their tokens have blocks in the group of layers with a window."""
        for sequence, size in prefill:
            slot = sequence.slot
            end = self.batch.num_computed.item(slot)
            is_last = end >= sequence.known.size
            window.cover(slot, end - size, end, self.kv.num_blocks.item(slot) if is_last else self.kv.blocks_for(end))

    def _reject(self, rejected: list[tuple[Sequence, str]]) -> None:
        """End requests that a policy turns away; one that has been taken is not refused any more."""
        for sequence, reason in rejected:
            if sequence.state is not State.WAITING or sequence.is_taken:
                self._num_refused += 1
                continue
            details = {"kind": OVERLOADED, "num_waiting_requests": self._admission.num_requests}
            self._num_rejected += 1
            self.rejected.append(self._table.end(sequence, "error", error=reason)._replace(details=details))

    def take_rejected(self) -> list[End]:
        """Requests that ended while steps were planned, since the last call; to be asked for after `schedule`."""
        rejected, self.rejected = self.rejected, []
        return rejected

    def _wanted_slots(self, mask: NDArray[np.bool_]) -> I32 | None:
        """The decode slots that a policy's mask selects; None: all."""
        if mask.shape != (len(self._decode.rows),) or mask.dtype != np.bool_:
            self._num_refused += 1
            return None
        return self._decode.rows.slots[mask]

    def _victim_of_need(self) -> Sequence:
        """The request that must give blocks back although the decision did not say so; the latest arrival by default."""
        victim = self._policy.victim(self)
        if victim is None or victim.state is not State.RUNNING:
            self._num_refused += 1
            victim = max(self.running(), key=lambda s: s.arrival_index)
        return victim

    def _prefill(
        self, chunks: list[tuple[Sequence, int]], num_tokens: int
    ) -> tuple[list[tuple[Sequence, int]], list[int]]:
        """Admit and advance prompts as decided, as far as it fits. Returns the chunks and the slots that now sample."""
        batch = self.batch
        accepted: list[tuple[Sequence, int]] = []
        completed: list[int] = []
        started: list[tuple[Sequence, int]] = []  # with how many blocks each needs
        shared: dict[int, I32] = {}
        free_blocks = self.kv.num_free
        embeds_room = self._message_budget.embeds_room()
        self._message_budget.begin_plan()
        num_free_slots = batch.num_free_slots
        num_prompt_logprobs = 0
        max_tokens = self.limits.max_tokens
        has_embedded = self._message_budget.num_embedded > 0
        displaced = self._table.displaced
        seen: set[Sequence] = set()
        # Only in a pause, or while suspects of a failure run alone, may a waiting request be one that must not start.
        must_ask = self.pause_state is not NOT_PAUSED or self._step_failures.is_restricting_starts
        # A policy may be wrong: what does not fit is left out and counted, and the policy hears of it if the request
        # waits.
        for sequence, size in chunks:
            if sequence in seen:
                self._num_refused += 1
                continue
            seen.add(sequence)
            is_waiting = sequence.state is WAITING
            if is_waiting and sequence in displaced:  # it lost its slot after the decision was made
                continue
            if is_waiting and must_ask and not self.may_start(sequence):
                self._num_refused += 1
                self._policy.on_refusal(sequence, self)
                continue
            if is_waiting:
                self._cache.look_up(sequence)
                remaining = sequence.num_remaining
            else:
                remaining = self.remaining(sequence) if sequence in self.prefilling else 0
            # Three bounds on the chunk besides what is left of the prompt: log-probabilities, embeddings, tokens.
            told = None  # the rules by which this chunk tells log-probabilities
            if sequence.rules is not None and sequence.wants_prompt_logprobs and not sequence.is_whole:
                told = sequence.rules
                size = self._message_budget.chunk(told, size, num_prompt_logprobs)
            has_embeds = has_embedded and sequence.submit.prompt_embeds.size
            if has_embeds:
                size = min(size, embeds_room)
            wanted, size = size, min(size, remaining, max_tokens - num_tokens)
            if has_embeds:
                submit, most = sequence.submit, min(embeds_room, max_tokens - num_tokens)
                size = chunk_of_items(submit.prompt, sequence.known.size - remaining, size, most)
            if size < wanted:
                self._num_refused += 1
            # No room, or a prompt that must go through in one step and does not fit.
            if size <= 0 or (size < remaining and sequence.is_whole):
                if is_waiting:  # with a slot and no token it would run without being in any plan
                    self._num_refused += size == wanted
                    self._policy.on_refusal(sequence, self)
                continue
            if is_waiting:
                num_blocks = sequence.num_needed_blocks
                # Blocks of cached hits that other requests hold are shared and cost nothing. Blocks are only counted
                # here; all that start get theirs in one call below.
                taken = num_blocks - self._cache.num_held(sequence) if sequence.hits.size else num_blocks
                fits = num_free_slots and taken <= free_blocks
                if not fits or not self._message_budget.take(sequence):
                    self._num_refused += 1
                    self._policy.on_refusal(sequence, self)
                    continue
                free_blocks -= taken
                num_free_slots -= 1
                self._table.start(sequence)
                started.append((sequence, num_blocks))
                if sequence.hits.size:
                    self.kv.share(sequence.hits)
                    shared[sequence.slot] = sequence.hits
                    if self.kv.window is not None:
                        self.kv.window.take_over(sequence.slot, sequence.hits)
                    if self.transfers is not None:
                        self.transfers.reused(sequence.hits)
            # Accepted: counted as computed from now on, since results apply in launch order.
            accepted.append((sequence, size))
            num_tokens += size
            if has_embeds:
                embeds_room -= size
            if told is not None:
                num_prompt_logprobs += size * (told.num_prompt_logprobs + 1)
            slot = sequence.slot
            batch.num_computed[slot] = batch.num_computed.item(slot) + size
            if size == remaining:
                completed.append(slot)
                del self.prefilling[sequence]
        if started:
            self._builder.add(started, self.kv.fill([(s.slot, num_blocks) for s, num_blocks in started], shared))
            for sequence, _ in started:
                self._policy.on_admit(sequence, self)
        return accepted, completed

    # Results ----------------------------------------------------------------------------------------------------------

    def update(self, result: StepResult, now: float) -> Events:
        """Apply the result of the oldest step in flight. Any other is dropped and counted.

        Raises ContradictionError for one that contradicts its plan (wrong number of rows, ids outside the vocabulary): the
        step is still in flight then, and the caller has to part with the workers (`lose_workers`).
        """
        self.now = now
        if self.transfers is not None:
            self.transfers.answered(result.step)
        record = self.ledger.oldest(result.step)
        spans = self._results.check(result, record)
        if record is None:
            self._num_dropped += 1
            return NOTHING
        self.ledger.complete(record)
        self.seconds.done(record, result.ended - result.started, now)
        if self.transfers is not None:
            self.transfers.observe_step(record, result.ended - result.started)
        if self._lanes is not None:
            self._lanes.observe(record, result.ended - result.started)
        events = self._results.apply(result, record, spans)
        if self._step_failures.is_recovering:
            self._step_failures.on_good_step(events.sequences, now)
        self._table.readmit()
        self._policy.on_step(
            StepDone(
                result.step,
                record.rows.slots,
                record.num_tokens - record.num_decode,
                record.launched,
                result.started,
                result.ended,
                result.num_drafted,
                result.counts,
            ),
            self,
        )
        if self._step_failures.is_recovering:  # behind the policy, of which a process may die as well
            for sequence in self._step_failures.set_aside(self.running()):
                self._table.preempt(sequence)
            self._table.readmit()
        return events

    def finish(self, stops: Iterable[tuple[Sequence, FinishReason, int | str | None]], now: float) -> list[End]:
        """End requests at what the text layer found. Those that ended meanwhile are left alone."""
        self.now = now
        return [
            self._table.end(sequence, reason, stop_reason)
            for sequence, reason, stop_reason in stops
            if sequence.state is not State.FINISHED
        ]

    def fail(self, failure: StepFailed, now: float) -> Events:
        """A step raised. It and the later steps in flight are void, since they ran on what it should have computed.

        The rows at fault end with its error, the others are computed again. If the rows at fault are not known, all requests
        of the step are tried again in smaller steps (`Bisection`; `MemoryBackoff` if there was not enough memory). A request
        that fails alone ends.

        Raises ContradictionError for a failure of rows that the step does not have, as `update`.
        """
        self.now = now
        if self.transfers is not None:
            self.transfers.answered(failure.step)
        self._results.check_failure(failure, self.ledger.find(failure.step))
        voided = self.ledger.void(failure.step)
        if not voided:
            self._num_dropped += 1
            return NOTHING
        return self._void(voided, failure.error, failure.rows, failure.is_out_of_memory)

    def _void(self, voided: list[StepRecord], error: str, rows: I32, is_out_of_memory: bool = False) -> Events:
        if self.transfers is not None:
            self.transfers.void(voided[-1].step)
        at_fault = self._step_failures.on_failed_step(voided[0], rows, is_out_of_memory)
        ends = [self._table.end(sequence, "error", error=error) for sequence in at_fault]
        self._table.compute_again(voided)
        return Events(NOTHING.sequences, NO_I32, NO_I32, ends=tuple(ends))

    def lose_workers(self, error: str, now: float) -> list[End]:
        """The workers died, and with them the KV; others will come, of which nothing is known.

        Steps in flight are void, and every request goes on from its known tokens. Ends those that the workers have died
        of (`worker_deaths`).
        """
        self.now = now
        self.wake_at = math.inf
        in_flight = [*self.ledger]
        if in_flight:
            self.ledger.void(in_flight[0].step)
        if self._snapshots is not None:
            self._snapshots.voided(save for record in in_flight for save in record.saves)
        self._step_failures.on_lost_workers()
        if self.transfers is not None:
            self.transfers.lose_workers()
        self._table.restart()
        self._cache.reset(())
        if self.transfers is not None:
            self.transfers.end_loss()
        waiting = self._table.waiting if self.pause_state is PauseState.RUNNING else self._table.resuming
        blamed = self._step_failures.blamed_for_death(in_flight, waiting, now)
        ended = [one for one in self._table.alive.values() if one.request in blamed] if blamed else []
        return [self._table.end(sequence, "error", error=KILLED + error) for sequence in ended]

    @property
    def is_narrowing(self) -> bool:
        """Whether the last death of the workers narrowed the search for the request that they die of."""
        return self._step_failures.is_narrowing

    @property
    def is_probing_workers(self) -> bool:
        """Whether some requests wait while others are probed, of which the workers may have died."""
        return self._step_failures.is_probing_workers

    # Simulation -------------------------------------------------------------------------------------------------------

    def _plan_decode(self) -> StepPlan | None:
        """As `_plan_step`, of a simulated step of decode rows alone, of which no policy need be asked. None: it is another one."""
        table, decode = self._table, self._decode
        if (
            self.prefilling
            or table.waiting
            or table.preempted
            or self._step_failures.is_recovering
            or self.kv.has_actions
        ):
            return None
        if not getattr(self._policy, "ignores_decode_steps", False):
            return None
        decode.find()
        rows, growing = decode.rows, decode.growing
        num_rows = rows.slots.size
        if not num_rows or growing.size > self.kv.num_free:
            return None
        self.wake_at = math.inf
        table.displaced.clear()
        if growing.size:
            self.kv.extend(growing)
        computed = decode.computed + ONE
        self.batch.num_computed[rows.index] = computed
        self.batch.stop_rows(rows.index[computed >= rows.limits - ONE])
        self._admission.num_left = self._admission.num_requests - self._admission.num_held - len(table.blocked)
        rows.hold()
        self.ledger.launch(StepRecord(self.ledger.next_step, rows, num_rows, (), num_rows, self.now))
        self._num_steps += 1
        return NO_PLAN

    def steady_rows(self) -> Rows | None:
        """The decode rows, if the next steps are of them alone, and no part nor the policy need hear of such steps; else None."""
        table = self._table
        if self.prefilling or table.waiting or table.preempted or table.tokenless or not self.may_plan:
            return None
        if self.kv.window is not None or self._snapshots is not None or self._lanes is not None:
            return None
        if self.kv.has_copies or self._step_failures.is_recovering:
            return None
        rows = self.batch.rows()
        if not rows.slots.size or not getattr(self._policy, "ignores_decode_steps", False):
            return None
        for record in self.ledger.in_flight:
            if record.prefills or record.rows is not rows:
                return None
        return rows

    def blocks_of_steps(self, steps: int) -> list[int]:
        """How many blocks the first 0, 1 ... of so many steady steps (`advance`) take together: [1 + steps]."""
        kv, index = self.kv, self.batch.rows().index
        spare = np.maximum(kv.capacity[index] - self.batch.num_computed[index] - self._ahead, 0)
        when = spare[:, None] + kv.block_size * np.arange(steps // kv.block_size + 1)
        counts = np.bincount(when[when < steps], minlength=steps)
        return [0, *counts.cumsum().tolist()]

    def advance(self, steps: int, now: float, token_ids: I32 | None = None) -> int:
        """Run up to `steps` steady decode steps in one call, as schedule() and update() one after the other would.

        Only while nothing happens: none waiting or prefilling, none at its end, enough blocks, room for a step, every
        step in flight of the same rows, and a policy that need not be asked (`ignores_decode_steps`). As many steps are in
        flight afterwards as before, the last ones. Returns how many were run; 0 when the next one is not steady.

        token_ids: of every row, the id that it samples in all of these steps. None: there are none, and later requests do not
        find the output.
        """
        self.now = now
        rows = self.steady_rows()
        if rows is None:
            return 0
        batch, kv = self.batch, self.kv
        slots, index = rows.slots, rows.index
        computed = batch.num_computed[index]
        steps = min(steps, int(np.minimum.reduce(rows.limits - computed)) - 2)
        # A row with room for `spare` more steps gets a block in step number `spare`, and every block_size steps after.
        spare = np.maximum(kv.capacity[index] - computed - self._ahead, 0)
        if slots.size * (steps // kv.block_size + 1) > kv.num_free:  # an upper bound of what all rows can need
            while steps > 0 and int(-(-np.maximum(steps - spare, 0) // kv.block_size).sum()) > kv.num_free:
                steps -= 1
        if steps <= 0:
            return 0
        kv.extend_over(slots, spare, steps)
        batch.num_computed[index] = computed + steps
        if token_ids is None:
            if kv.index is not None:
                batch.is_simulated[index] = True
        else:
            positions: I32 = batch.num_known[index].repeat(steps)
            positions += np.tile(np.arange(steps, dtype=np.int32), index.size)
            kv.write_token_ids(index.repeat(steps), positions, token_ids.repeat(steps))
        batch.num_known[index] += steps
        self._num_steps += steps
        self._results.num_output_tokens += steps * slots.size
        self.ledger.skip(steps)
        return steps

    # What policies and people may look at -----------------------------------------------------------------------------

    @property
    def policy(self) -> PlanPolicy:
        """The one that decides. Requests are announced to it from the first one on."""
        return self._policy

    @property
    def limits(self) -> Limits:
        return self._step_failures.limits

    @property
    def decode_slots(self) -> I32:
        return self._decode.rows.slots

    @property
    def num_growing(self) -> int:
        return self._decode.growing.size

    @property
    def growing_slots(self) -> I32:
        return self._decode.growing

    @property
    def num_waiting(self) -> int:
        waiting = self._table.waiting if self.pause_state is NOT_PAUSED else self._table.resuming
        if self._step_failures.is_restricting_steps:
            return self._step_failures.num_startable(waiting)
        return len(waiting)

    @property
    def num_in_flight(self) -> int:
        return len(self.ledger)

    def fork_room(self, sequence: Sequence) -> tuple[int, int]:
        return self._forks.room_of(sequence) if self._table.followers.leaders else (0, 0)

    def remaining(self, sequence: Sequence) -> int:
        if sequence.slot < 0:
            self._cache.look_up(sequence)
            return sequence.num_remaining
        return self.batch.num_known.item(sequence.slot) - self.batch.num_computed.item(sequence.slot)

    def running(self) -> list[Sequence]:
        return self._table.running()

    def waiting(self) -> list[Sequence]:
        return sorted(self._table.waiting, key=lambda sequence: sequence.arrival_index)

    def alive(self) -> Iterable[Sequence]:
        """Every request that has not ended."""
        return self._table.alive.values()

    def sequence(self, key: Key) -> Sequence | None:
        return self._table.alive.get(key)

    def statistics(self) -> SchedulerStatistics:
        return SchedulerStatistics(
            num_running=self.limits.max_seqs - self.batch.num_free_slots,
            num_waiting=len(self._table.waiting) + len(self._table.preempted) + len(self._table.followers.leaders),
            num_blocked=len(self._table.blocked),
            num_in_flight=len(self.ledger),
            num_steps=self._num_steps,
            num_output_tokens=self._results.num_output_tokens,
            num_prefill_tokens=self._num_prefill_tokens,
            num_forks=self._forks.num_forks,
            num_preemptions=self._table.num_preemptions,
            num_wasted_tokens=self._table.num_wasted,
            num_dropped_results=self._num_dropped,
            num_failed_steps=self._step_failures.num_failed_steps,
            num_worker_losses=self._step_failures.num_losses,
            num_recovered=self._step_failures.num_recovered,
            recovery_s=self._step_failures.recovery_s,
            num_suspects=self._step_failures.num_suspects,
            num_retrying=self._step_failures.num_retrying,
            num_memory_failures=self._step_failures.num_memory_failures,
            num_corrupted_requests=self._results.num_corrupted,
            num_nonfinite=self._results.num_nonfinite,
            num_refused_decisions=self._num_refused,
            num_waiting_tokens=self._admission.num_tokens,
            num_overloaded=self._admission.num_refused,
            num_rejected=self._num_rejected,
            blocked_on=self._table.blocked_on(),
            pause_state=self.pause_state.value,
            kv=self.kv.statistics(),
            prefix_cache=self._cache.statistics(),
            speculation=self._results.drafts.statistics() if self._drafts.is_used else None,
            lanes=None if self._lanes is None else self._lanes.statistics(),
            transfers=None if self.transfers is None else self.transfers.statistics(),
        )

    def check_integrity(self) -> None:
        """AssertionError when the parts contradict each other."""
        self.batch.check_integrity()
        self.kv.check_integrity()
        self._table.check_integrity()
        self._cache.check_integrity()
        self._step_failures.check_integrity()
        if self._lanes is not None:
            self._lanes.check_integrity()
        if self.transfers is not None:
            self.transfers.check_integrity()
        batch = self.batch
        for slot, sequence in enumerate(batch.sequences):
            if sequence is None:
                continue
            known, computed = int(batch.num_known[slot]), int(batch.num_computed[slot])
            in_flight = sum(
                int(((r.rows.slots == slot) & (r.rows.generations == batch.generation[slot])).sum())
                for r in self.ledger
            )
            if sequence in self.prefilling:
                assert computed < known, f"slot {slot} prefills and has nothing left"
                assert in_flight == 0, f"slot {slot} prefills and samples"
            else:
                assert computed + 1 == known + in_flight, (
                    f"slot {slot}: {computed} computed, {known}+{in_flight} tokens"
                )
            assert computed <= self.kv.capacity[slot], f"slot {slot} computes beyond its blocks"
            assert known <= self.kv.capacity[slot], f"slot {slot} knows more tokens than its blocks hold"
            is_pooled = sequence.submit.pooling is not None  # its prompt may be as long as the model allows
            assert known < sequence.limit or in_flight == 0 or is_pooled, f"slot {slot} is beyond its limit"
