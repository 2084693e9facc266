"""`Journal`: what a scheduler decided, step by step, and when each request came, started, was preempted and ended.

    journal = Journal()
    run = simulate(workload, shape, model, make_scheduler=journal.scheduler_maker(shape))
    run_of_recording(list(read_recording("run.bin")), arguments, policy)     # of a live engine, from its recording

The same numbers come of a simulated and of a live run, because it is the scheduler that is listened to. Decode steps that a
simulation makes many at a time are one entry. Timelines, traces and `explain` are made of this. Pure.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable
from collections.abc import Sequence as Sequence_
from dataclasses import dataclass, field, replace
from typing import Any, Literal, NamedTuple

import numpy as np
from numpy.typing import NDArray

from actorllm.errors import ConfigError
from actorllm.messages import F64, I32, I64, StepFailed, StepPlan, StepResult, Submit
from actorllm.scheduling.batch import Rows
from actorllm.scheduling.cost_model import MeasuredSteps, StepModel
from actorllm.scheduling.events import End, Events
from actorllm.scheduling.loading import BuildsPolicy, load_policies
from actorllm.scheduling.policy import Decision, PlanPolicy, View
from actorllm.scheduling.results import ContradictionError
from actorllm.scheduling.scheduler import Scheduler
from actorllm.scheduling.sequence import Key, Sequence, State
from actorllm.scheduling.step_time import features_of
from actorllm.scheduling.telemetry.recording import Entry, replay
from actorllm.slo.simulator import EngineShape
from actorllm.slo.step_fit import RecordingFit, fit_recording
from actorllm.slo.timeline import ABORTED, FAILED, FINISHED, UNFINISHED, RunTimeline, timeline_of_streams
from actorllm.slo.workload import Workload, classes_of
from actorllm.types.objective import SLO

EventKind = Literal["arrive", "start", "preempt", "end"]
Hold = Literal["slots", "blocks", "prompts", "policy"]
"""What a waiting request waits for in a step: a slot; blocks; those whose prompts the step has; or what only the policy knows."""


@dataclass(frozen=True, slots=True)
class Event:
    """Of one request."""

    at: float
    kind: EventKind
    key: Key
    why: str = ""
    """Of a preemption: `blocks` (the KV of running requests needed room), or `displaced` (for one that waits). Of a start:
    `fork`, or `relegated` (given up by its policy: it goes behind all that can be in time)."""
    by: tuple[Key, ...] = ()
    """Of a displacement: the requests that started instead."""
    is_sensitive: bool = False


@dataclass(slots=True, eq=False)
class StepEntry:
    """One planned step, or a run of `count` decode steps that followed it without anything else."""

    step: int
    planned: float
    count: int
    num_decode: int
    num_decode_sensitive: int
    num_prompt: int
    """Prompt tokens in the step."""
    num_prompt_sensitive: int
    features: tuple[int, int, int, int, int]
    """p, d, decode_context, prefill_context, prefill_pairs (`cost_model`), of the first step of a run."""
    prefills: tuple[tuple[Key, int], ...]
    rows: Rows
    """The requests that got a token."""
    num_waiting: int
    num_running: int
    kv_usage: float
    replica: int = 0
    is_skipped: bool = False


@dataclass(frozen=True, slots=True)
class Wait:
    """A step that was planned without a request that waited."""

    at: float
    step: int
    hold: Hold
    num_prompt: int
    """Prompt tokens of others in this step."""
    free_blocks: int
    needed_blocks: int
    prefills: tuple[Key, ...]


@dataclass(frozen=True, slots=True, eq=False)
class StepTable:
    """The steps of one replica, one row each, in order. Times in seconds."""

    step: I64
    start: F64
    end: F64
    num_decode: I64
    num_decode_sensitive: I64
    num_prompt: I64
    num_prompt_sensitive: I64
    decode_context: F64
    prefill_context: F64
    prefill_pairs: F64
    num_waiting: I64
    """When the step was planned, without those that it started."""
    num_running: I64
    kv_usage: F64
    """Share of the KV blocks that is taken."""
    entry: I64
    """Position in `Journal.steps`."""

    def __len__(self) -> int:
        return self.step.size

    def between(self, begin: float, end: float) -> NDArray[np.intp]:
        """Rows of the steps that ran in this time, in part at least."""
        return np.arange(np.searchsorted(self.end, begin, "right"), np.searchsorted(self.start, end, "left"))


@dataclass(slots=True, eq=False)
class Journal:
    """See the module docstring. watched: requests of which is also kept what they waited for in every step."""

    watched: frozenset[Key] = frozenset()
    steps: list[StepEntry] = field(default_factory=list)
    """In the order in which they were planned, replica by replica."""
    events: list[Event] = field(default_factory=list)
    waits: dict[Key, list[Wait]] = field(default_factory=dict)
    ends: dict[tuple[int, int], tuple[float, float]] = field(default_factory=dict)
    """Start and end of (replica, step), as the workers tell them."""

    def scheduler_maker(self, shape: EngineShape) -> Callable[[int, PlanPolicy], Scheduler]:
        """For `simulate(make_scheduler=...)`; shape as it is given there, with what a workload without prefixes leaves of it."""

        def make(replica: int, policy: PlanPolicy) -> Scheduler:
            return WatchedScheduler(journal=self, replica=replica, policy=policy, **shape.scheduler_arguments())

        return make

    def table(self, timeline: RunTimeline, replica: int = 0) -> StepTable:
        """The steps of a replica that came to an end, by its own clock; timeline: of the same run."""
        number = np.array([i for i, e in enumerate(self.steps) if e.replica == replica], np.int64)
        entries = [self.steps[i] for i in number.tolist()]
        count = np.array([e.count for e in entries], np.int64)
        within = np.arange(int(count.sum())) - np.repeat(np.cumsum(count) - count, count)

        def column(values: Iterable[Any], kind: Any = np.int64) -> Any:
            return np.repeat(np.fromiter(values, kind, len(entries)), count)

        step = column(e.step for e in entries) + within
        planned = column((e.planned for e in entries), np.float64)
        known = [self.ends.get((replica, s), (math.nan, math.nan)) for s in step.tolist()]
        start, end = np.array(known, np.float64).reshape(-1, 2).T
        if any(e.is_skipped for e in entries):  # of a simulation, which does not tell when these ended
            ends = timeline.step_ends[replica] - timeline.deliver_s  # on the clock of the steps, as all the others
            end = np.where(step <= ends.size, ends[np.minimum(step, ends.size) - 1], math.nan)
        before = np.concatenate(([-math.inf], end[:-1]))
        start = np.where(np.isfinite(start), start, np.fmax(np.where(within > 0, -math.inf, planned), before))
        done = np.isfinite(end)
        decode = column(e.num_decode for e in entries)
        columns: tuple[Any, ...] = (
            step,
            np.minimum(start, end),
            end,
            decode,
            column(e.num_decode_sensitive for e in entries),
            column(e.num_prompt for e in entries),
            column(e.num_prompt_sensitive for e in entries),
            column((e.features[2] for e in entries), np.float64) + within * decode,
            column((e.features[3] for e in entries), np.float64),
            column((e.features[4] for e in entries), np.float64),
            column(e.num_waiting for e in entries),
            column(e.num_running for e in entries),
            column((e.kv_usage for e in entries), np.float64),
            np.repeat(number, count),
        )
        return StepTable(*(values[done] for values in columns))

    def moved(self, seconds: float) -> Journal:
        """The same with all times so much later: on the clock of another timeline of the same run."""
        return Journal(
            self.watched,
            [replace(step, planned=step.planned + seconds) for step in self.steps],
            [replace(event, at=event.at + seconds) for event in self.events],
            {key: [replace(wait, at=wait.at + seconds) for wait in waits] for key, waits in self.waits.items()},
            {step: (start + seconds, end + seconds) for step, (start, end) in self.ends.items()},
        )

    def of_request(self, key: Key) -> list[Event]:
        return [event for event in self.events if event.key == key]


class WatchedScheduler(Scheduler):
    """A scheduler that writes a journal."""

    def __init__(
        self,
        *,
        journal: Journal,
        policy: PlanPolicy,
        replica: int = 0,
        build_policy: BuildsPolicy = load_policies,
        **arguments: Any,
    ) -> None:
        def build(policy: str, admission: str | None, number: int) -> PlanPolicy:
            return _Watch(build_policy(policy, admission, number), journal)

        super().__init__(policy=_Watch(policy, journal), build_policy=build, **arguments)
        self._journal = journal
        self._replica_number = replica
        self._sensitive_of: tuple[Rows, int] | None = None
        self._num_sensitive = 0

    def submit(self, frontend: int, submit: Submit, now: float) -> End | None:
        key = (frontend, submit.rid)
        self._journal.events.append(Event(submit.arrival, "arrive", key, is_sensitive=submit.is_latency_sensitive))
        end = super().submit(frontend, submit, now)
        if end is not None:
            self._journal.events.append(Event(now, "end", key, end.reason))
        return end

    def schedule(self, now: float) -> StepPlan | None:
        plan = super().schedule(now)
        if plan is not None:
            self._note_step(now)
        return plan

    def _note_step(self, now: float) -> None:
        record, journal = self.ledger.newest, self._journal
        sensitive = 0
        prefills = []
        for sequence, size in record.prefills:
            prefills.append((sequence.key, size))
            sensitive += size if sequence.submit.is_latency_sensitive else 0
        features = features_of(record, self)
        kv = self.kv
        entry = StepEntry(
            step=record.step,
            planned=now,
            count=1,
            num_decode=record.num_decode,
            num_decode_sensitive=self._count_sensitive(record.rows, record.num_decode),
            num_prompt=features[0],
            num_prompt_sensitive=min(sensitive, features[0]),
            features=features,
            prefills=tuple(prefills),
            rows=record.rows,
            num_waiting=self.num_waiting,
            num_running=self.limits.max_seqs - self.batch.num_free_slots,
            kv_usage=1 - kv.num_free / kv.pool.num_blocks,
            replica=self._replica_number,
        )
        journal.steps.append(entry)
        for key in journal.watched:
            waiting = self.sequence(key)
            if waiting is not None and waiting.state in (State.WAITING, State.PREEMPTED):
                journal.waits.setdefault(key, []).append(self._note_wait(now, entry, waiting))

    def _count_sensitive(self, rows: Rows, num_decode: int) -> int:
        """How many of the decode rows are latency sensitive."""
        if self._sensitive_of is None or self._sensitive_of[0] is not rows or self._sensitive_of[1] != num_decode:
            self._sensitive_of = rows, num_decode  # the same object as long as none joins or leaves
            self._num_sensitive = sum(s.submit.is_latency_sensitive for s in rows.sequences[:num_decode].tolist())
        return self._num_sensitive

    def _note_wait(self, now: float, entry: StepEntry, sequence: Sequence) -> Wait:
        free, limits = self.kv.num_free, self.limits
        needed = sequence.num_needed_blocks or self.kv.blocks_for(sequence.known.size + 1)
        headroom = limits.headroom_blocks if entry.num_running else 0
        others = tuple(key for key, _ in entry.prefills if key != sequence.key)
        hold: Hold
        if not self.batch.num_free_slots:
            hold = "slots"
        elif needed + headroom > free:
            hold = "blocks"
        elif others:
            hold = "prompts"
        else:
            hold = "policy"
        return Wait(now, entry.step, hold, entry.num_prompt, free, needed, others)

    def advance(self, steps: int, now: float, token_ids: I32 | None = None) -> int:
        rows = self.batch.rows()
        first = self.ledger.next_step
        context = int(self.batch.num_computed[rows.index].sum()) if len(rows) else 0
        before, began = self.kv.num_free, self.now
        done = super().advance(steps, now, token_ids)
        if done:
            # Steps in flight are moved behind the ones that are skipped, so these come right after what has been done.
            num_blocks = self.kv.pool.num_blocks
            self._journal.steps.append(
                StepEntry(
                    step=first,
                    planned=began,
                    count=done,
                    num_decode=len(rows),
                    num_decode_sensitive=self._count_sensitive(rows, len(rows)),
                    num_prompt=0,
                    num_prompt_sensitive=0,
                    features=(0, len(rows), context + len(rows), 0, 0),
                    prefills=(),
                    rows=rows,
                    num_waiting=0,
                    num_running=len(rows),
                    kv_usage=1 - (before + self.kv.num_free) / 2 / num_blocks,
                    replica=self._replica_number,
                    is_skipped=True,
                )
            )
        return done

    def update(self, result: StepResult, now: float) -> Events:
        self._journal.ends[self._replica_number, result.step] = (result.started, result.ended)
        return super().update(result, now)

    def fail(self, failure: StepFailed, now: float) -> Events:
        journal = self._journal
        while (
            journal.steps
            and journal.steps[-1].replica == self._replica_number
            and journal.steps[-1].step >= failure.step
        ):
            journal.steps.pop()
        return super().fail(failure, now)


class _Watch:
    """A PlanPolicy that does what another one does, and writes down what becomes of requests."""

    def __init__(self, policy: PlanPolicy, journal: Journal) -> None:
        self._policy = policy
        self._journal = journal
        if hasattr(policy, "may_fork"):  # one that does not know forks has none
            self.may_fork, self.ahead_of, self.on_fork = policy.may_fork, policy.ahead_of, self._on_fork

    def __getattr__(self, name: str) -> Any:
        return getattr(self._policy, name)

    def plan(self, view: View) -> Decision:
        decision = self._policy.plan(view)
        if decision.preempt:
            starting = tuple(s.key for s, _ in decision.prefill if s.slot < 0)
            for sequence in decision.preempt:
                why = "displaced" if starting else "blocks"
                self._journal.events.append(Event(view.now, "preempt", sequence.key, why, starting))
        return decision

    def victim(self, view: View) -> Sequence | None:
        found = self._policy.victim(view)
        if found is not None:
            self._journal.events.append(Event(view.now, "preempt", found.key, "blocks"))
        return found

    def on_arrival(self, sequence: Sequence, view: View) -> None:
        self._policy.on_arrival(sequence, view)

    def on_admit(self, sequence: Sequence, view: View) -> None:
        self._policy.on_admit(sequence, view)
        why = "relegated" if sequence.policy_state.get("relegated") else ""
        self._journal.events.append(Event(view.now, "start", sequence.key, why))

    def _on_fork(self, sequence: Sequence, view: View) -> None:
        self._journal.events.append(Event(view.now, "start", sequence.key, "fork"))
        self._policy.on_fork(sequence, view)

    def on_refusal(self, sequence: Sequence, view: View) -> None:
        self._policy.on_refusal(sequence, view)

    def on_end(self, sequence: Sequence, view: View) -> None:
        self._journal.events.append(Event(view.now, "end", sequence.key))
        self._policy.on_end(sequence, view)

    def on_step(self, done: Any, view: View) -> None:
        self._policy.on_step(done, view)


class PolicyChange(NamedTuple):
    """Other policies decided from then on."""

    at: float
    """Seconds after the first request arrived."""
    policy: str
    admission: str | None

    @property
    def name(self) -> str:
        """As NAME or NAME+ADMISSION."""
        return self.policy if self.admission is None else f"{self.policy}+{self.admission}"


@dataclass(frozen=True, slots=True, eq=False)
class RecordedRun:
    """A live engine's recording, gone through again."""

    workload: Workload
    timeline: RunTimeline
    """Times are those of the recording's clock."""
    journal: Journal
    keys: tuple[Key, ...]
    """Of every row."""
    names: tuple[str | None, ...]
    """What its caller called the request of every row."""
    row: int
    """The watched request; -1: none."""
    step_fit: RecordingFit | None
    """A step-time model of its own steps, with its error; None: there were too few."""
    deviation: str | None = None
    """Where what is planned again is known not to be what was planned then; what follows is not what happened."""
    changes: tuple[PolicyChange, ...] = ()
    """By `set_policy`, in order."""

    @property
    def model(self) -> StepModel | None:
        """Fitted to its steps; None: there were too few."""
        return None if self.step_fit is None else self.step_fit.model


def run_of_recording(
    entries: Sequence_[Entry],
    scheduler_arguments: dict[str, Any],
    policy: Callable[[], PlanPolicy],
    choose: int | Callable[[RunTimeline, Workload, Sequence_[str | None]], int] | None = None,
) -> RecordedRun:
    """Make the calls of a recording again on a fresh scheduler of the same configuration, and write down what it decides.

    scheduler_arguments: as the engine's scheduler had them (`record_file.recorded_arguments`); policy: builds what decides
    (`record_file.recorded_policy`). choose: the row of a request to be watched, or what finds it once the run is known
    (`explanation.chosen_request`); None: none is. Classes are made of type_info and objective.
    """
    submits = [((int(c.partition(" ")[2]), m.rid), m) for c, _, m in entries if c.startswith("submit ")]
    submits = list(dict(reversed(submits)).items())[::-1]  # each once, as it came first
    if not submits:
        raise ConfigError("the recording has no requests")
    keys = [key for key, _ in submits]
    names = [m.name for _, m in submits]
    if isinstance(choose, int) and not 0 <= choose < len(keys):
        raise ConfigError(f"there is no request {choose}: the recording has {len(keys)}, from 0 on")
    row = choose if isinstance(choose, int) else -1
    watched = frozenset((keys[row],)) if row >= 0 else frozenset()
    journal, timeline, deviation = _go_through(entries, scheduler_arguments, policy(), watched, keys)
    workload = _workload_of(timeline, [m for _, m in submits])
    if choose is not None and not isinstance(choose, int):
        row = choose(timeline, workload, names)
        journal, timeline, deviation = _go_through(
            entries, scheduler_arguments, policy(), frozenset((keys[row],)), keys
        )
    began = float(timeline.arrival.min())
    changes = tuple(PolicyChange(now - began, *named) for call, now, named in entries if call == "change_policy")
    return RecordedRun(
        workload, timeline, journal, tuple(keys), tuple(names), row, _fitted(journal, timeline), deviation, changes
    )


def _workload_of(timeline: RunTimeline, submits: list[Submit]) -> Workload:
    classes, class_ids, own_promises = classes_of(
        [(m.type_info or "requests", SLO.from_fields(m.slo), m.is_latency_sensitive, m.priority, None) for m in submits]
    )
    tenants = sorted({m.tenant or "" for m in submits})
    return Workload(
        arrival=np.maximum.accumulate(timeline.arrival - timeline.arrival.min()),
        num_prompt=timeline.num_prompt,
        num_output=np.maximum(timeline.num_output, 1),
        class_ids=class_ids,
        classes=classes,
        tenant_ids=np.array([tenants.index(m.tenant or "") for m in submits], np.int32) if any(tenants) else None,
        tenants=tuple(tenants) if any(tenants) else (),
        own_promises=own_promises,
        name="recording",
    )


def _go_through(
    entries: Iterable[Entry], arguments: dict[str, Any], policy: PlanPolicy, watched: frozenset[Key], keys: list[Key]
) -> tuple[Journal, RunTimeline, str | None]:
    journal = Journal(watched)
    scheduler = _Listening(journal=journal, policy=policy, **arguments)
    for _ in replay(entries, scheduler):
        pass
    num = len(keys)
    row = {key: number for number, key in enumerate(keys)}
    columns: dict[str, Any] = {name: np.full(num, math.nan) for name in ("scheduled", "end")}
    outcome = np.full(num, UNFINISHED, np.int8)
    preemptions = np.zeros(num, np.int32)
    for event in journal.events:
        at = row.get(event.key)
        if at is None:
            continue
        if event.kind == "start" and math.isnan(columns["scheduled"][at]):
            columns["scheduled"][at] = event.at
        elif event.kind == "preempt":
            preemptions[at] += 1
        elif event.kind == "end":
            columns["end"][at] = event.at
            why = event.why or scheduler.reasons.get(event.key, "")
            outcome[at] = FAILED if why == "error" else ABORTED if why == "abort" else FINISHED
    streams = [np.array(scheduler.times.get(key, ())) for key in keys]
    timeline = timeline_of_streams(
        np.array([scheduler.submitted[key].arrival for key in keys]),
        np.array([scheduler.submitted[key].prompt.size for key in keys], np.int32),
        streams,
        outcome=outcome,
        num_preemptions=preemptions,
        **columns,
    )
    return journal, timeline, scheduler.deviation


class _Listening(WatchedScheduler):
    """Also keeps when tokens came: at the end of their step, which the recording has."""

    def __init__(self, **arguments: Any) -> None:
        super().__init__(**arguments)
        self.times: dict[Key, list[float]] = {}
        self.submitted: dict[Key, Submit] = {}
        self.reasons: dict[Key, str] = {}
        self.deviation: str | None = None

    def submit(self, frontend: int, submit: Submit, now: float) -> End | None:
        self.submitted.setdefault((frontend, submit.rid), submit)
        return super().submit(frontend, submit, now)

    def abort(self, keys: Iterable[Key], now: float) -> list[End]:
        return self._keep(super().abort(keys, now))

    def expire(self, now: float) -> list[End]:
        return self._keep(super().expire(now))

    def finish(self, stops: Iterable[Any], now: float) -> list[End]:
        return self._keep(super().finish(stops, now))

    def fail(self, failure: StepFailed, now: float) -> Events:
        events = super().fail(failure, now)
        self._keep(events.ends)
        return events

    def _keep(self, ends: Iterable[End]) -> list[End]:
        found = list(ends)
        self.reasons.update((end.sequence.key, end.reason) for end in found)
        return found

    def _compare(self, result: StepResult) -> None:
        """A result that does not fit the plan is of another plan. One of a step that failed meanwhile is none of either."""
        oldest = next(iter(self.ledger), None)
        if result.step >= self.ledger.next_step:
            self.deviation = f"step {result.step} was computed, and is not planned now"
        elif oldest is not None and oldest.step == result.step:
            try:
                self._results.check(result, oldest)
            except ContradictionError as error:
                self.deviation = f"step {result.step} was another one: {str(error).partition(': ')[2]}"

    def update(self, result: StepResult, now: float) -> Events:
        if self.deviation is None:
            self._compare(result)
        events = super().update(result, now)
        self._keep(events.ends)
        for number, sequence in enumerate(events.sequences.tolist()):
            count = int(events.counts[number]) if events.counts.size else 1
            self.times.setdefault(sequence.key, []).extend([result.ended] * count)
        return events


def _fitted(journal: Journal, timeline: RunTimeline) -> RecordingFit | None:
    table = journal.table(timeline)
    nothing = np.zeros(len(table))
    log = MeasuredSteps(
        table.num_prompt.astype(np.float64),
        table.num_decode.astype(np.float64),
        table.decode_context,
        table.prefill_context,
        table.prefill_pairs,
        nothing,
        table.start,
        table.end,
    )
    return fit_recording(log)
