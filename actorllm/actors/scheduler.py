"""The scheduler actor: the loop of the engine, around a pure Scheduler.

`on_message` queues everything that arrives, and `run` works it off. `run` is the one place where steps are planned,
results applied, text made and outputs sent. Text is made after the next step was launched and before the one after it
is planned. A stop string therefore ends its request with at most one token computed in vain.

The actor outlives its workers: what they had reported counts, and the next ones compute everything else again. Each
frontend keeps what it takes to submit its requests again. The actor therefore keeps nothing for its own death.
"""

from __future__ import annotations

import logging
import math
from collections import deque
from collections.abc import Awaitable, Callable
from dataclasses import asdict, replace
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeAlias

import anyio

from actorllm.actors.active_policies import ActivePolicies
from actorllm.actors.actor import Actor
from actorllm.actors.adapters import AdapterLoading
from actorllm.actors.constraints import Constraints, with_ends
from actorllm.actors.detokenization import Outgoing, Renderer
from actorllm.actors.engine_thread import serves_loops
from actorllm.actors.link import Link
from actorllm.actors.load_board import LoadPublisher
from actorllm.actors.loop_parts import DeadlineExpiry, Grammars, LoopPart, PoisonIsolation, hooks
from actorllm.actors.outlet import ForFrontend, Outlet
from actorllm.actors.pausing import Pausing
from actorllm.actors.record_file import RecordFile
from actorllm.actors.scheduler_setup import scheduler_arguments
from actorllm.actors.self_check import check_policy
from actorllm.actors.sleeping import Sleeping
from actorllm.actors.step_gate import StepGate
from actorllm.actors.tiers.hand_offs import HandOffs
from actorllm.actors.tiers.lease_board import LeaseBoard
from actorllm.actors.tiers.tier_files import TierDirectory, open_tiers
from actorllm.actors.tiers.tier_transfers import TierTransfers
from actorllm.actors.timeline import Timeline
from actorllm.actors.topology import ATTACHED
from actorllm.actors.weight_commits import WeightCommits
from actorllm.actors.worker_calls import call_all_ranks
from actorllm.clock import now
from actorllm.config import EngineConfig
from actorllm.errors import CorruptLinkError, PeerLostError, PeerRestartedError, TransportError
from actorllm.messages import (
    DRAINING,
    NO_I32,
    Abort,
    Drafted,
    Message,
    StepFailed,
    StepPlan,
    StepResult,
    Submit,
    Unblock,
    sequences_of,
)
from actorllm.messages.schema import WORKER, shown, violation
from actorllm.messages.untrusted import check_foreign
from actorllm.scheduling.events import NOTHING, End, Events
from actorllm.scheduling.pause import PauseState
from actorllm.scheduling.policy_monitor import SHORTEST_TIMER_S, PolicyMonitor, WakeTimer
from actorllm.scheduling.results import ContradictionError
from actorllm.scheduling.scheduler import Scheduler
from actorllm.scheduling.sequence import Key, Sequence
from actorllm.scheduling.telemetry.recording import Entry, RecordedScheduler
from actorllm.scheduling.telemetry.request_counters import RequestCounters
from actorllm.scheduling.telemetry.request_log import RequestLog
from actorllm.scheduling.telemetry.snapshot import glance
from actorllm.scheduling.telemetry.step_history import StepHistory
from actorllm.scheduling.tiers.transfers import NoTiers
from actorllm.supervision.blame.scheduler_probes import SchedulerProbes, end_of_unknown
from actorllm.text.grammar import GrammarCompiler
from actorllm.text.tokenizer import Tokenizer
from actorllm.types.weight_version import WeightSource

if TYPE_CHECKING:
    from actorllm.actors.step_model_error import StepModelMonitor

logger = logging.getLogger(__name__)

RETRY_S = 0.005
"""How soon a send to a frontend whose link was full is tried again; in vain, it takes twice as long the next time."""
MAX_RETRY_S = 0.1
SUSPECTS_EXPECTED_S = 10.0
"""How long after the death of another replica any frontend may bring requests that are suspected of it."""

WORKERS = "workers"
"""The name of the link to them."""

MAX_LIVE_STEPS = 500
"""So many are told at a time to a page that looks."""


Report: TypeAlias = tuple[Link, StepResult | StepFailed]
"""What became of a step, and the link that says so."""


class SchedulerActor(Actor):
    """Owns the Scheduler, the text of every request, and the links to frontends and workers."""

    VERBS = (
        *Actor.VERBS,
        "reset_prefix_cache",
        "pause_generation",
        "resume_generation",
        "is_paused",
        "drain",
        "abort_all",
        "start_timeline",
        "take_timeline",
        "worker_statistics",
        "start_profile",
        "stop_profile",
        "live",
        "warm_up_grammars",
        "add_adapter",
        "remove_adapter",
        "pin_adapter",
        "list_adapters",
        "expect_suspects",
        "limit_threads",
        *("stage_weights", "discard_weights", "commit_weights", "transfer_weights"),
        "call_workers",
        *("sleep", "wake_up"),
        *("check_policy", "set_policy", "request_log"),
    )

    WARMS_UP = True
    """Whether grammars are got ready at the start where the first one would hold an event loop of the application."""

    def __init__(self, name: str = "scheduler", rank: int = 0) -> None:
        super().__init__(name, rank)
        self._inbox: deque[tuple[int, Submit | Abort | Unblock]] = deque()
        self._results: deque[Report] = deque()
        self._acknowledged: dict[int, dict[int, Report]] = {}
        self._outlets: dict[int, Outlet] = {}
        self._frontend_of: dict[Link, int] = {}
        self._foreign: set[Link] = set()
        self._vocab_size = 0
        self._drafter: str | None = None
        self._num_frontends = 0
        self._workers: Link
        self.has_workers = False
        self._is_unproven = True
        """No request has had a token since the last death that this actor knows of; its own included."""
        self._num_workers = 1
        self._reporting_rank = 0
        self._constraints: Constraints
        self._is_configured = False
        self._due: list[int] = []
        """The step that each rank has to answer next."""
        self._full: dict[int, Outlet] = {}
        self._counters = RequestCounters()
        self._step_log = StepHistory()
        self._retry_s = RETRY_S
        self._probes: SchedulerProbes[Outlet]
        self._pausing: Pausing
        self._timeline: Timeline | None = None
        self._policies: ActivePolicies
        self._watch = PolicyMonitor()
        self._timer = WakeTimer()
        self._wake_at = math.inf
        """When the policy is to be asked again even if nothing happens."""
        self._step_watch: StepModelMonitor | None = None
        self._load: LoadPublisher | None = None
        self._directory: TierDirectory | None = None
        """What the KV tiers have."""
        self._leases: LeaseBoard | None = None
        """Where replicas see what they may copy of each other; None: there are no roles."""
        self._tokenizer: Tokenizer | None = None
        self._renderer: Renderer
        self._record_path: Path
        self._record: RecordFile | None = None

    # Life

    async def on_start(self, config: EngineConfig) -> dict[str, Any]:
        if config.model.tokenizer is not None:
            self._tokenizer = Tokenizer(config.model.tokenizer)
        return {}

    def on_configure(self, config: EngineConfig) -> Awaitable[None] | None:
        self._num_workers, self._reporting_rank = config.num_workers, config.reporting_rank
        self._max_waiting_attached = config.scheduler.max_waiting_attached
        self._vocab_size = config.model.vocab_size
        self.scheduler = self._build(config)
        if self._load is not None:
            self._load.show_cache(self.scheduler.kv)
        compiler = None
        if self._tokenizer is not None:
            compiler = GrammarCompiler(self._tokenizer, self._vocab_size, self._eos_token_ids(config))
        self._constraints = Constraints(compiler, self.scheduler)
        self._is_configured = True
        self._adapters = AdapterLoading(self, config.lora, self._go_on)
        self._gate = StepGate(self)
        self._weights = WeightCommits(self, self._gate, self._outlets, config.model.weights)

        def check() -> None:
            check_policy(replace(config, scheduler=self._policies.config))

        self._probes = SchedulerProbes(
            self.scheduler,
            self._outlets,
            self.send_to,
            self.report_progress,
            check,
            lambda key: self._renderer.output_buffer.drop(key),
            probes_alone=config.is_fleet,
        )
        self._pausing = Pausing(self, self._probes, self._outlets, self._full)
        self._sleeping = Sleeping(self, self._gate, self._pausing)
        parts: tuple[LoopPart, ...] = (
            PoisonIsolation(self, self._probes),
            DeadlineExpiry(self, self._probes),
            self._adapters,
            Grammars(self, self._constraints),
            self._pausing,
            self._gate,
        )
        if self.scheduler.transfers is not None:
            parts += (TierTransfers(self, self._gate, self._directory, lambda: self._workers),)
        if self._leases is not None:
            parts += (HandOffs(self, self._leases, self._outlets, lambda: self._workers),)
        self._before_plan = hooks(parts, "before_plan")
        self._after_plan = hooks(parts, "after_plan")
        self._before_send = hooks(parts, "before_send")
        self._after_result = hooks(parts, "after_result")
        self._deadlines: tuple[Callable[[], float], ...] = hooks(parts, "next_deadline")
        self._renderer = Renderer(self._tokenizer, self._counters, self.scheduler.finish)
        # llguidance reads a vocabulary without giving the interpreter back: a second for 150,000 tokens. In a process that has
        # an event loop of the application, that belongs to the start, and not between the tokens of other requests.
        if self.WARMS_UP and config.topology == "inline" and config.model.pooler is None and serves_loops():
            return self._warm_up_grammars()
        return None

    def _build(self, config: EngineConfig) -> Scheduler:
        eos_token_ids = self._eos_token_ids(config)
        primary = None if self._tokenizer is None else self._tokenizer.eos_token_id
        self._drafter = None if config.speculation is None else config.speculation.method
        arguments = scheduler_arguments(config, eos_token_ids, primary)
        if config.scheduler.step_model is not None:
            from actorllm.actors.step_model_error import StepModelMonitor

            self._step_watch = StepModelMonitor(config.scheduler.step_model)
        self._policies = ActivePolicies(config.scheduler, None if config.record is None else self._write_entry)
        arguments |= {"policy": self._policies.first(), "build_policy": self._policies.build}
        if config.cache.has_tiers:
            num_ranks = config.num_workers
            files = [open_tiers(config.cache, rank, num_ranks) for rank in range(num_ranks)]
            self._directory = TierDirectory(files, config.cache.tier_mask_path)
            arguments["tiers"] = self._directory
        if config.cache.pools:
            arguments |= self._make_lender(config)
        if config.load_board is not None:
            self._load = LoadPublisher(config.load_board, config.replica)
        if config.record is None:
            return Scheduler(**arguments)
        self._record_path = Path(config.record)
        self._record = RecordFile(config, eos_token_ids, primary)
        return RecordedScheduler(sink=self._write_entry, **arguments)

    def _make_lender(self, config: EngineConfig) -> dict[str, Any]:
        """Other replicas may copy KV of this one if it computes prompts; and it may copy theirs."""
        cache = config.cache
        assert cache.lease_path is not None
        assert cache.num_blocks is not None
        self._leases = LeaseBoard(cache.lease_path, config.max_blocks)
        is_lender = bool(cache.pools[config.replica * config.num_workers])
        lends = self._leases.lender(config.replica, cache.num_blocks) if is_lender else None
        return {"tiers": self._directory or NoTiers(), "lends": lends}

    def _ends_stall(self) -> bool:
        """Nothing was planned. If that is a stall, the policy at fault is replaced; whether planning is worth another try."""
        reason = self._watch.stall(self.scheduler)
        if reason is None:
            return False
        if self.scheduler.give_up_policy(reason, now()):
            return True
        if not self._policies.has_told_stall:
            self._policies.has_told_stall = True
            logger.error("scheduling policy %r stalls: %s", self._policies.name, reason)
        return False

    def _set_timer(self) -> None:
        """For a policy that planned nothing, and asks to be asked again."""
        if self.scheduler.wake_at == math.inf:
            return
        self._wake_at = self._timer.next(self.scheduler)
        if complaint := self._timer.complaint(self.scheduler):
            logger.warning("scheduling policy %r: %s", self._policies.name, complaint)

    def _eos_token_ids(self, config: EngineConfig) -> tuple[int, ...]:
        """What ends a text: the ids of the model's files, and the tokenizer's own."""
        ids = set(config.model.eos_token_ids)
        own = self._tokenizer.eos_token_id if self._tokenizer is not None else None
        if own is not None and own < config.model.vocab_size:
            ids.add(own)
        return tuple(sorted(ids))

    def _write_entry(self, entry: Entry) -> None:
        assert self._record is not None
        if not self._record.is_open:
            life = self.links["frontend"].generation if "frontend" in self.links else 1
            self._record.open_life(self._record_path, life)
        self._record.write(entry)

    async def on_stop(self) -> None:
        self._close_constraints()
        self._close_record()
        self._close_tiers()

    def on_failure(self, error: BaseException) -> None:
        self._close_constraints()
        self._close_tiers()
        self._close_record()  # a recording is wanted most when something went wrong

    def _close_constraints(self) -> None:
        if self._is_configured:
            self._constraints.close()

    def _close_tiers(self) -> None:
        if self._directory is not None:
            self._directory.close()

    def _close_record(self) -> None:
        if self._record is not None:
            self._record.close()

    def on_link(self, link: Link) -> None:
        if link.name == WORKERS:
            self._workers = link
            self._due = [self.scheduler.ledger.next_step] * self._num_workers
            if self._timeline is not None:
                self._timeline.mark("workers linked", now(), generation=link.generation)
            agreed = partial(self._adapters.on_workers, link, self._begin_with_workers)
            self._weights.on_workers(link, partial(self._sleeping.on_workers, link, agreed))
        else:
            number = self._num_frontends  # never used again: keys of requests are made of it
            self._num_frontends += 1
            self._outlets[number] = Outlet(number, link)
            self._frontend_of[link] = number
            self._pausing.on_frontend(self._outlets[number])
            self._weights.on_frontend(self._outlets[number])
            self._probes.on_frontend(number, link.generation)
            if link.peer.startswith(ATTACHED):
                self._foreign.add(link)
                if self._max_waiting_attached is not None:
                    self.scheduler.limit_frontend(number, self._max_waiting_attached)

    def _begin_with_workers(self) -> None:
        """They can compute what requests there are."""
        self.has_workers = True
        self.wake()

    def on_peer_lost(self, link: Link) -> None:
        if link.name == WORKERS:
            self._lose_workers(link)
            return
        number = self._frontend_of.pop(link, None)
        if number is not None:
            self._foreign.discard(link)
            del self._outlets[number]
            self._full.pop(number, None)
            self._probes.drop_frontend(number)
            self._inbox = deque(entry for entry in self._inbox if entry[0] != number)
            self.scheduler.abort_frontend(number, now())
            self._renderer.output_buffer.drop_frontend(number)
            self.wake()

    def _lose_workers(self, link: Link) -> None:
        """What they had reported counts. All else goes on from its known tokens, with the next ones."""
        self.has_workers = False
        while self._results:
            self._take_result()
        self._is_unproven = True
        self._acknowledged.clear()
        self._constraints.forget_steps()
        self._adapters.lose_workers()
        if self._step_watch is not None:
            self._step_watch.clear()
        if self._load is not None:
            self._load.clear()
        logger.info("the workers are lost (%s); %d steps in flight", link.lost, self.scheduler.num_in_flight)
        if self._timeline is not None:
            self._timeline.mark("workers lost", now(), reason=str(link.lost))
        self.send_ends(self.scheduler.lose_workers(str(link.lost), now()))
        if self.scheduler.is_narrowing:
            self.report_progress()
        self.wake()

    def _part_with_workers(self, link: Link, contradiction: str) -> None:
        """What one of them says cannot be: nothing more of them is believed, and others take their place."""
        logger.error("%s contradicts its plans: %s", link.peer, contradiction, extra={"event": "contradiction"})
        self.has_workers = False
        self._results.clear()
        self.report_defect(link, f"contradicting its plans: {contradiction}")

    def on_link_error(self, link: Link, error: BaseException) -> None:
        """An attached frontend that writes nonsense harms only itself; a worker is replaced for it."""
        if link.name == WORKERS:
            self._part_with_workers(link.spokes[0], str(error))  # the ranks are replaced together
            return
        if not link.peer.startswith(ATTACHED):
            raise error
        logger.error("%s is dropped: %s", link.peer, error)

    def admits(self, link: Link, message: Message) -> bool:
        if self._foreign and link in self._foreign:
            try:
                check_foreign(message, self._vocab_size)
            except ValueError as error:
                self.drop_link(link, CorruptLinkError(f"{link.peer} sent {error}"))
                return False
        elif link.name == WORKERS and not isinstance(message, StepResult | StepFailed):  # see _acknowledge
            wrong = violation(message, WORKER)
            if wrong is not None and self.has_workers:
                self._part_with_workers(link, f"it sent {wrong}")
            return wrong is None
        return True

    def on_message(self, link: Link, message: Message) -> None:
        match message:
            case StepResult() | StepFailed():
                self._acknowledge(link, message)
            case Submit() | Abort() | Unblock():
                self._inbox.append((self._frontend_of[link], message))
            case Drafted():
                self._take_drafts(link, message)
            case _:
                super().on_message(link, message)

    def _take_drafts(self, link: Link, message: Drafted) -> None:
        """A step with grammars has begun, and waits for its masks: they are sent before the loop turns again."""
        if not self.has_workers:
            return
        if wrong := self._constraints.tell_drafts(message):
            self._part_with_workers(link, f"step {message.step}: {wrong}")
            return
        self.send_ends(self._send_late_inputs())

    def _acknowledge(self, link: Link, message: StepResult | StepFailed) -> None:
        """A step is done when every rank said so: with the failure of any, else with the tokens of the one that reports.

        Every rank answers every plan once, in their order.
        """
        if not self.has_workers:
            return  # they are not believed any more
        rank = link.rank
        due = self._due[rank]
        if type(message.step) is not int or message.step != due or due >= self.scheduler.ledger.next_step:
            is_launched = due < self.scheduler.ledger.next_step
            wanted = f"step {due} was to be answered" if is_launched else "no step was to be answered"
            self._part_with_workers(link, f"it answered step {shown(message.step)} when {wanted}")
            return
        self._due[rank] = due + 1
        if self._num_workers == 1:  # the scheduler checks what it is given
            self._results.append((link, message))
            return
        wrong = violation(message, WORKER)
        if wrong is not None:
            self._part_with_workers(link, f"step {due}: {wrong}")
            return
        by_rank = self._acknowledged.setdefault(due, {})
        by_rank[rank] = link, message
        if len(by_rank) == self._num_workers:
            del self._acknowledged[due]
            failures = [report for report in by_rank.values() if isinstance(report[1], StepFailed)]
            self._results.append(failures[0] if failures else by_rank[self._reporting_rank])

    # The loop of the engine

    async def run(self) -> None:
        while self.is_running:
            if not self.turn():
                await self.wait(self.next_deadline())
                if self._full:
                    self._flush()

    def turn(self) -> bool:
        """One turn of the loop: plan what there is room for, work off one result. False: there is no result yet."""
        if self._inbox:
            self.take_inbox()
        if self._results and not self.scheduler.ledger.has_room:  # no step can be planned before it
            self._take_result()
            return True
        for hook in self._before_plan:
            hook()
        self._plan_steps()
        for hook in self._after_plan:
            hook()
        if not self._results:
            return False
        self._take_result()
        return True

    def _plan_steps(self) -> None:
        """Up to `depth` steps are in flight."""
        scheduler = self.scheduler
        self._wake_at = math.inf  # with no room for a step there will be a result
        while scheduler.may_plan and self.has_workers and not self._gate.num_holders:
            began = now()
            plan = scheduler.schedule(began)
            scheduler.seconds.planning += now() - began
            if scheduler.rejected:
                self.send_ends(scheduler.take_rejected())
            if plan is not None:
                self._launch(plan)
            elif scheduler.num_in_flight or not self._ends_stall():
                self._set_timer()
                break

    def _take_result(self) -> None:
        """Apply the oldest result and send what it brought."""
        events = self._apply(*self._results.popleft())
        if self._constraints.unsent and (ends := self._send_late_inputs()):
            events = with_ends(events, ends)
        for hook in self._before_send:
            hook(events)
        # While the next step runs; a request at a stop string ends before it is planned.
        self._send(*self._renderer.render(events))
        for hook in self._after_result:
            hook(events)
        if self._is_unproven and (events.tokens.size or events.vectors):
            self._is_unproven = False
            self.report_progress()

    def next_deadline(self) -> float | None:
        """When the loop must turn even if nothing arrives: for a policy, a deadline, or what could not be sent."""
        wake_at = self._wake_at
        for deadline in self._deadlines:
            wake_at = min(wake_at, deadline())
        if self._full:
            return max(min(wake_at, now() + self._retry_s), now() + SHORTEST_TIMER_S)
        return max(wake_at, now() + SHORTEST_TIMER_S) if wake_at < math.inf else None

    def take_inbox(self) -> None:
        """Submits, aborts and unblocks, in the order of their arrival."""
        ends: list[End] = []
        while self._inbox:
            frontend, message = self._inbox.popleft()
            if self._full and frontend in self._full and self._full[frontend].defers(message):
                self._check_deferred(self._full[frontend])
                continue
            match message:
                case Submit():
                    for sequence in sequences_of(message):
                        ends += self._submit(frontend, sequence)
                case Abort() if not message.rids.size:
                    self._probes.resubmitting.discard(frontend)
                case Abort():
                    keys = [(frontend, rid) for rid in message.rids.tolist()]
                    ends += self.scheduler.abort(keys, now())
                    if self._probes.is_on:
                        ends += self._probes.abort(keys)
                case Unblock() if self._constraints.is_making_matcher((frontend, message.rid)):
                    pass  # this actor alone can make the matcher
                case Unblock() if self._adapters.is_loading((frontend, message.rid)):
                    pass  # and have the adapter loaded
                case Unblock():
                    end = self.scheduler.unblock((frontend, message.rid), message.error, now())
                    ends += [end] if end is not None else []
        if ends:
            self.send_ends(ends)

    def send_ends(self, ends: list[End]) -> None:
        """Of requests that end without a step."""
        if ends:
            if self._probes.not_begun:
                self._probes.not_begun.difference_update(end.sequence.key for end in ends)
            self._send(*self._renderer.render(Events(NOTHING.sequences, NO_I32, NO_I32, ends=tuple(ends))))

    def _check_deferred(self, outlet: Outlet) -> None:
        """A frontend that reads nothing cannot be told either that it is too much: an attached one is dropped at its limit."""
        limit = self._max_waiting_attached
        if limit is not None and outlet.link in self._foreign and len(outlet.deferred) > limit:
            error = f"{outlet.link.peer} takes no outputs and has submitted more than {limit} requests meanwhile"
            self.drop_link(outlet.link, PeerLostError(error))

    def _submit(self, frontend: int, message: Submit) -> list[End]:
        key: Key = (frontend, message.rid)
        is_known = message.is_resumed or message.output.size  # to the scheduler before
        if self._pausing.is_draining and not is_known and self._outlets[frontend].link in self._foreign:
            return [_refusal_to_drain(key, message)]
        if message.num_deaths:
            is_own = self._outlets[frontend].link not in self._foreign
            message = self._probes.with_trusted_deaths(frontend, message, is_own)
        if self._probes.is_on and self.scheduler.sequence(key) is None:  # else it is said again
            return self._probes.hold_back(key, message)
        return self.take_on(key, message)

    def take_on(self, key: Key, message: Submit, is_let_in: bool = False) -> list[End]:
        """Give a request to the scheduler. is_let_in: it has been counted as waiting, and there is room for it."""
        is_new = self.scheduler.sequence(key) is None
        self._watch.see(message.slo)
        if message.grammar is not None:
            message = self._constraints.blocked(message)
        if message.adapter is not None:
            message = self._adapters.blocked(message)
        if starvation := self._watch.starvation(self.scheduler, now()):
            logger.warning("scheduling policy %r: %s", self._policies.name, starvation)
        end = self.scheduler.submit(key[0], replace(message, is_resumed=True) if is_let_in else message, now())
        if end is not None:
            return [end]
        sequence = self.scheduler.sequence(key)
        if message.is_resumed:
            self._probes.not_begun.add(key)
        if is_new and message.adapter is not None and sequence is not None:
            self._adapters.add(sequence)
        elif is_new and message.grammar is not None and sequence is not None:
            self._constraints.add(sequence)
        return self._renderer.add(key, message, sequence) if is_new else []

    def _go_on(self, sequence: Sequence) -> None:
        """A request has its adapter. Its grammar is compiled behind that, if it has one."""
        if sequence.submit.grammar is not None:
            self._constraints.add(sequence)
        else:
            self.scheduler.unblock(sequence.key, None, now(), sequence.adapter_slot)

    def _launch(self, plan: StepPlan) -> None:
        if self._probes.not_begun:
            self._probes.tell_begun(self.scheduler.ledger.newest)
        self._workers.send_nowait(plan)
        self._step_log.launched(self.scheduler.ledger.newest)
        if self._step_watch is not None:
            self._step_watch.launched(self.scheduler.ledger.newest, self.scheduler)
        if self._load is not None:
            self._load.launched(self.scheduler.ledger.newest, self.scheduler)
        if plan.late_slots.size:
            self._constraints.launched(plan, self.scheduler.ledger.newest)
            self.send_ends(self._send_late_inputs())
        if self._timeline is not None:
            record = max(self.scheduler.ledger, key=lambda r: r.step)
            self._timeline.launched(plan.step, record.launched, now(), record.num_decode, record.num_tokens)

    def _send_late_inputs(self) -> list[End]:
        """A step's late inputs are due when the results of all steps before it are known. Returns the ends that they bring."""
        ends: list[End] = []
        constraints = self._constraints
        while constraints.is_due(self.scheduler.ledger.last_done) and self.has_workers:
            message, over, failed = constraints.late_inputs()
            self._workers.send_nowait(message)
            ends += constraints.end(over, failed, now())
        return ends

    def _apply(self, link: Link, result: StepResult | StepFailed) -> Events:
        """link: that of the worker which says so. If that cannot be, nothing of it is used."""
        began = now()
        try:
            if isinstance(result, StepFailed):
                events = self.scheduler.fail(result, began)
            else:
                events = self.scheduler.update(result, began)
        except ContradictionError as contradiction:
            self._part_with_workers(link, str(contradiction))
            return NOTHING
        self.scheduler.seconds.planning += now() - began
        if self._step_watch is not None:
            self._step_watch.done(result)
        if self._load is not None:
            self._load.done(result, self.scheduler)
        if isinstance(result, StepFailed):
            return events
        if self._watch.unjudged:
            for told in self._watch.measure(result):
                logger.warning("%s", told)
        self._step_log.done(result.step, result.started, result.ended, began)
        if self._constraints.awaited and self._constraints.has_waited_for(result.step):
            events = self._constraints.advance(events, began)
        if self._timeline is not None:
            self._timeline.updated(result, began, now())
        return events

    async def _warm_up_grammars(self) -> None:
        """What the first request with a grammar would wait for."""
        is_done = anyio.Event()
        self.work_aside(self._constraints.warm_up, lambda _: is_done.set())
        if not is_done.is_set():  # a stepped engine has done it by now, and cannot wait
            await is_done.wait()

    # Outputs

    def _send(self, outgoing: Outgoing, began: float) -> None:
        rendered = now()
        for frontend, rows in outgoing.all:
            outlet = self._outlets.get(frontend)
            if outlet is not None:
                self.send_to(outlet, rows.message(rendered))
        if self._full:
            self._flush()
        if self._timeline is not None and (outgoing.all or self._renderer.output_buffer.held):
            self._timeline.rendered(began, rendered, now(), sum(len(rows.rids) for _, rows in outgoing.all))

    def send_to(self, outlet: Outlet, outputs: ForFrontend) -> None:
        try:
            if not outlet.send(outputs) and outlet.number not in self._full:
                logger.warning("%s does not take its outputs; they are held", outlet.link.peer)
                self._full[outlet.number] = outlet
        except TransportError as error:
            self.drop_link(outlet.link, error)
        if outlet.failed:
            self._end_failed(outlet)

    def _end_failed(self, outlet: Outlet) -> None:
        """Requests whose output could not be sent. Their frontend has been told."""
        keys = [(outlet.number, rid) for rid in outlet.take_failed()]
        self._probes.not_begun.difference_update(keys)
        ends = tuple(end._replace(reason="error") for end in self.scheduler.abort(keys, now()))
        self._renderer.render(Events(NOTHING.sequences, NO_I32, NO_I32, ends=ends))  # which forgets them

    def _flush(self) -> None:
        """Try again the outlets whose link was full. A frontend that has taken everything may submit again."""
        has_moved = False
        for outlet in list(self._full.values()):
            held = len(outlet.unsent)
            try:
                is_done = outlet.flush()
            except TransportError as error:
                self.drop_link(outlet.link, error)
                continue
            has_moved |= len(outlet.unsent) < held
            if outlet.failed:
                self._end_failed(outlet)
            if is_done:
                del self._full[outlet.number]
                self._inbox.extendleft((outlet.number, message) for message in reversed(outlet.take_deferred()))
                self.wake()
        self._retry_s = RETRY_S if has_moved else min(2 * self._retry_s, MAX_RETRY_S)

    # Controls

    def answer(self, verb: str, arguments: dict[str, Any]) -> Any:
        # One case for each of VERBS. What takes longer than a turn is a coroutine, and is answered when it is through.
        match verb:
            case "reset_prefix_cache":
                self.scheduler.reset_prefix_cache(now(), bool(arguments.get("reset_running_requests")))
                self.wake()
                return True
            case "pause_generation":
                if not arguments.get("is_restored"):
                    return self._pausing.pause(arguments["mode"], bool(arguments["clear_cache"]))
                self._pausing.restore(arguments["mode"])
                return True  # the frontend that tells of it has yet to submit what a pause might wait for
            case "resume_generation":
                self._sleeping.check_awake()
                self._pausing.resume()
                return True
            case "is_paused":
                return self.scheduler.pause_state is not PauseState.RUNNING
            case "drain":
                return self._pausing.drain()
            case "abort_all":
                self.take_inbox()
                self.send_ends([*self.scheduler.abort_all(now()), *self.abort_held()])
                self.wake()
                return True
            case "start_timeline":
                self._timeline = Timeline()
                if arguments.get("lost"):
                    at = now()  # the frontend may have another clock, so it tells how long ago that was
                    self._timeline.mark("scheduler lost", at - arguments["lost_for_s"], reason=arguments["lost"])
                    self._timeline.mark("scheduler linked", at)
                return True
            case "take_timeline":
                events = self._timeline.events() if self._timeline is not None else []
                self._timeline = None
                return events
            case "request_log":  # of the owner alone: it tells of the requests of all programs
                return self._take_request_log(bool(arguments["is_on"]))
            case "live":
                return self._live(arguments["after"], arguments["at_most"])
            case "expect_suspects":
                self._probes.expected_until = now() + SUSPECTS_EXPECTED_S
                return True
            case "warm_up_grammars":
                return self._warm_up_grammars()
            case "add_adapter" | "remove_adapter" | "pin_adapter":
                return self._adapters.answer(verb, arguments["digest"], arguments["path"])
            case "list_adapters":
                return self._adapters.digests()
            case "stage_weights":
                return self._weights.stage(WeightSource.from_tree(arguments["source"]))
            case "discard_weights":
                return self._weights.discard()
            case "commit_weights":
                return self._weights.commit(WeightSource.from_tree(arguments["source"]), arguments["running"])
            case "transfer_weights":
                return self._weights.transfer(**arguments)
            case "sleep":
                return self._sleeping.sleep(arguments["level"], arguments["mode"])
            case "wake_up":
                return self._sleeping.wake_up(arguments["tags"])
            case "check_policy" | "set_policy":
                return self._policies.answer(verb, self, self._gate, **arguments)
            case "call_workers":
                return call_all_ranks(self, lambda: self._workers, self._gate, arguments)
            case "worker_statistics":
                return self._ask_workers("statistics", timeout=math.inf)  # as long as a step is
            case "limit_threads" | "start_profile" | "stop_profile":
                return self._ask_workers(verb, timeout=math.inf, **arguments)  # a long trace is long in writing
        return super().answer(verb, arguments)

    def abort_held(self) -> list[End]:
        """End what was submitted and is not the scheduler's yet: held back during a search, or put off while outputs wait."""
        ends = self._probes.abort_all()
        for number, outlet in self._full.items():
            for message in outlet.take_deferred():
                if isinstance(message, Submit):
                    ends += [end_of_unknown((number, one.rid), one, "abort") for one in sequences_of(message)]
        return ends

    def note_new_weights(self) -> None:
        """An update was committed."""
        self._sleeping.note_new_weights()

    async def _ask_workers(self, verb: str, **arguments: Any) -> list[Any]:
        """The answers of all ranks; none while they are started again."""
        if not self.has_workers:
            return []
        try:
            return await self.ask_all(self._workers, verb, **arguments)
        except PeerRestartedError:
            return []

    def statistics(self) -> dict[str, Any]:
        scheduler = asdict(self.scheduler.statistics())
        if scheduler["speculation"] is not None:
            scheduler["speculation"]["drafter"] = self._drafter
        return super().statistics() | {
            "scheduler": scheduler,
            "policy": self._policies.statistics(self.scheduler.num_policy_changes),
            "policy_failure": self._policies.failure,
            "num_held_requests": len(self._probes),
            "admission_failure": self._policies.admission_failure,
            "num_starving": self._watch.num_starving,
            "num_wakes_in_vain": self._timer.num_in_vain,
            "step_model": None if self._step_watch is None else self._step_watch.statistics(),
            "num_held_outputs": sum(len(outlet.unsent) for outlet in self._full.values()),
            "requests": self._counters.statistics(),
            "grammars": self._constraints.statistics(),
            "adapters": self._adapters.statistics(),
            "weights": self._weights.statistics(),
            "sleep": self._sleeping.statistics(),
            "steps": self._step_log.statistics(),
            "recording": None if self._record is None else self._record.statistics(),
            "timeline": None if self._timeline is None else self._timeline.statistics(),
        }

    def _take_request_log(self, is_on: bool) -> dict[str, Any]:
        """The requests that ended since a reader asked last, and the policies. is_on: keep those that end from here on."""
        log = self._counters.log
        if log is None:
            log = RequestLog(now)
        self._counters.log = log if is_on else None
        policies = self._policies.statistics(self.scheduler.num_policy_changes)
        return {**log.take(self.scheduler.alive()), "policy": policies, "now": now()}

    def _live(self, after: int, at_most: int) -> dict[str, Any]:
        """What the live page shows now. after: the last step that it knows of."""
        counts = asdict(self.scheduler.statistics())
        shown = (
            *("num_running", "num_waiting", "num_steps", "num_output_tokens", "num_prefill_tokens"),
            *("num_wasted_tokens", "num_preemptions", "num_recovered"),
        )
        at = now()
        return {
            "now": at,
            "counts": {name: counts[name] for name in shown},
            "speculation": counts["speculation"],
            "kv_usage": counts["kv"]["usage"],
            "requests": glance(self.scheduler, at, at_most),
            "steps": self._step_log.newest(after, MAX_LIVE_STEPS),
            "slo": self._counters.promises(),
        }


def _refusal_to_drain(key: Key, message: Submit) -> End:
    error = "the engine's owner is about to stop it: it finishes what it has and takes no new requests"
    return end_of_unknown(key, message, "error", error, {"kind": DRAINING})
