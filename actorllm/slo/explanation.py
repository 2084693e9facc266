"""`explain`: why a request took as long as it did, and missed what it was promised, in seconds for each cause.

The time to the first token and that of the tokens after it are each divided up without remainder:

    waiting     for the step under way, for a slot, for KV blocks, for prompts that were served first, or by the policy's will
    prompt      what its own prompt takes alone; cutting it into chunks; what else was in those steps; steps between them
    preemption  from losing its blocks to its next token
    decoding    what its tokens take alone; the decode rows and the prompts of its batch-mates; steps that left it out

What a step would have taken with less in it is not measured, so those parts need a step-time model. That is the one that the
simulation ran on, or one fitted to the engine's steps. They are scaled to what the steps took. Without a model, or with one
that predicts those steps badly, the parts are not told apart: their sum is one part. Pure.
"""

from __future__ import annotations

import math
from collections import Counter, defaultdict
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
from numpy.typing import NDArray

from actorllm.errors import ConfigError, nearest_name
from actorllm.scheduling.cost_model import StepModel
from actorllm.scheduling.sequence import Key
from actorllm.slo.journal import Journal, StepEntry, Wait
from actorllm.slo.metrics import overrun
from actorllm.slo.objectives import Promises
from actorllm.slo.step_fit import KINDS, RecordingFit
from actorllm.slo.timeline import FINISHED, OUTCOMES, UNFINISHED, RunTimeline
from actorllm.slo.workload import Workload
from actorllm.types.objective import SLO, RequestClass

CAUSES = {
    "step under way": "steps that were under way had to end first",
    "slots": "every slot was taken (max_num_seqs)",
    "blocks": "there were not enough free KV blocks for it",
    "prompts": "the prompts of others were served first",
    "policy": "the policy or the admission held it back although there was room",
    "own prompt": "its own prompt, computed alone and at once",
    "chunking": "its prompt was cut into chunks, each with a step's fixed cost",
    "mates while prefilling": "what else was in the steps of its prompt",
    "prompt steps": "the steps of its prompt; what else was in them is not told apart",
    "passed over": "between its chunks came steps without it",
    "delivery": "the first token had to reach the client",
    "preemption": "it was preempted and had to be computed again",
    "own tokens": "its own tokens, decoded alone",
    "decode mates": "the decode rows beside it",
    "prompts of mates": "prompts of others in the steps of its tokens",
    "token steps": "steps of its tokens; the decode rows beside it are not told apart",
    "token steps with prompts": "steps of its tokens that also had prompts of others; what these cost is not told apart",
    "left out": "steps that gave it no token",
}
"""In the order in which they are told."""

MIXED = ("prompt steps", "token steps", "token steps with prompts")
"""Parts that hold what the request itself needs as well as what others cost it."""

UNSEEN_BY_A_RECORDING = (
    "a recording is of the scheduler: the way to the client, and a client that reads late, are not in it. A live replay "
    "(`actorllm replay`) measures them"
)


SELECTORS = ("worst", "ttft", "tpot", "e2e")
"""The request that overran a promise by most, relative to it; and those with the longest of each."""

Seconds = defaultdict[str, float]
"""By cause."""


@dataclass(frozen=True, slots=True)
class TimePart:
    """Seconds of one phase that one cause took."""

    cause: str
    seconds: float

    @property
    def told(self) -> str:
        return CAUSES[self.cause]


@dataclass(frozen=True, slots=True)
class Miss:
    """One promise that was not kept."""

    promise: str
    limit: float
    took: float
    causes: tuple[TimePart, ...]
    """What could have been spared, the most first; without what the request itself needs."""

    @property
    def over(self) -> float:
        return self.took - self.limit


@dataclass(frozen=True, slots=True)
class Explanation:
    """What `explain` returns; `str()` of it is for people."""

    number: int
    """Of the request in its run, from 0."""
    kind: str
    num_prompt: int
    num_output: int
    outcome: str
    slo: SLO | None
    waiting_and_prompt: tuple[TimePart, ...]
    """Of the time to the first token."""
    decoding: tuple[TimePart, ...]
    """Of the time from the first token to the last."""
    misses: tuple[Miss, ...]
    steps: tuple[tuple[float, str], ...]
    """(seconds after its arrival, what happened), in order."""
    notes: tuple[str, ...] = ()
    """How far the amounts can be believed, and what is not in them."""

    @property
    def ttft(self) -> float:
        return sum(part.seconds for part in self.waiting_and_prompt)

    def __str__(self) -> str:
        lines = [
            f"request {self.number} ({self.kind}): {self.num_prompt} prompt tokens, {self.num_output} output tokens, "
            f"{self.outcome}"
        ]
        if self.slo is None:
            lines.append("  promised nothing")
        for miss in self.misses:
            lines.append(
                f"  MISSED {miss.promise}: {_s(miss.took)} instead of {_s(miss.limit)}, {_s(miss.over)} too long"
            )
            for part in miss.causes[:3]:
                is_cause = part.cause not in MIXED and part.seconds >= miss.over
                enough = "; without it the promise had been kept" if is_cause else ""
                lines.append(f"    {_s(part.seconds):>9}  {part.told}{enough}")
        if self.slo is not None and not self.misses:
            lines.append(
                "  kept all that it was promised" if self.outcome == "finished" else "  did not run to its end"
            )
        for title, parts in (("to the first token", self.waiting_and_prompt), ("after it", self.decoding)):
            if parts:
                lines.append(f"  {title}: {_s(sum(part.seconds for part in parts))}")
                lines += [f"    {_s(part.seconds):>9}  {part.cause}: {part.told}" for part in parts]
        lines.append("  step by step")
        lines += [f"    {f'+{at:.3f} s':>11}  {what}" for at, what in self.steps]
        lines += [f"  note: {note}" for note in self.notes]
        return "\n".join(lines)


def _s(seconds: float) -> str:
    return f"{seconds * 1e3:.1f} ms" if abs(seconds) < 1 else f"{seconds:.2f} s"


def explain(
    row: int,
    timeline: RunTimeline,
    classes: Sequence[RequestClass],
    class_ids: NDArray[np.integer[Any]],
    journal: Journal,
    model: StepModel | RecordingFit | None,
    *,
    keys: Sequence[Key] | None = None,
    promises: Promises | None = None,
    notes: Sequence[str] = (),
) -> Explanation:
    """Of one request of a run; the journal must have watched it. keys: of every row there; None: (0, row), of a simulation.

    model: step times, or those that were fitted to a recording, which are used for the kinds of steps that they predict well;
    None: nothing is known of them. promises: those of the workload's own. notes: more to be told of the amounts.
    """
    if not 0 <= row < len(timeline):
        raise ConfigError(f"there is no request {row}: the run has {len(timeline)}, from 0 on")
    key = (0, row) if keys is None else keys[row]
    if key not in journal.watched:
        raise ConfigError(f"the journal has not watched request {row}: run it again with Journal(frozenset({{{key}}}))")
    kind = classes[int(class_ids[row])]
    if promises is not None:
        kind = replace(kind, slo=promises.slo(row))
    rows = None if keys is None else {key: number for number, key in enumerate(keys)}
    found = _Explainer(row, key, rows, timeline, kind, journal, model).explain()
    return replace(found, notes=(*found.notes, *notes))


class _Explainer:
    def __init__(
        self,
        row: int,
        key: Key,
        rows: dict[Key, int] | None,
        timeline: RunTimeline,
        kind: RequestClass,
        journal: Journal,
        model: StepModel | RecordingFit | None,
    ) -> None:
        self.rows = rows
        self.row, self.key, self.timeline, self.kind, self.journal = row, key, timeline, kind, journal
        self.fit = model if isinstance(model, RecordingFit) else None
        given = model.model if isinstance(model, RecordingFit) else model
        self.prompt_model: StepModel | None = given if self.fit is None or self.fit.is_sure_of("prompt") else None
        self.decode_model: StepModel | None = given if self.fit is None or self.fit.is_sure_of("decode") else None
        self.has_model = given is not None
        self.replica = max(0, int(timeline.replica[row]))
        self.table = journal.table(timeline, self.replica)
        self.arrival = float(timeline.arrival[row])
        self.num_prompt, self.num_output = int(timeline.num_prompt[row]), int(timeline.num_output[row])
        self.way_back = timeline.deliver_s
        """From the end of a step to the client. All times here are of the clock of the steps, but for those that `seen_` has."""
        self.seen_first, self.seen_last = float(timeline.first_token[row]), float(timeline.last_token[row])
        self.first, self.last = self.seen_first - self.way_back, self.seen_last - self.way_back
        self.events = [event for event in journal.of_request(key) if event.kind != "arrive"]
        self.told: list[tuple[float, str]] = []

    def explain(self) -> Explanation:
        self._tell(self.arrival, f"arrives with {self.num_prompt} prompt tokens")
        before = self._before_first()
        after = self._after_first() if self.num_output > 1 else ()
        outcome = OUTCOMES[int(self.timeline.outcome[self.row])]
        end = float(self.timeline.end[self.row])
        if math.isfinite(end):
            self._tell(end, f"ends: {outcome} with {self.num_output} tokens")
        return Explanation(
            self.row,
            self.kind.name,
            self.num_prompt,
            self.num_output,
            outcome,
            self.kind.slo,
            before,
            after,
            self._misses(before, after),
            tuple(sorted(((at - self.arrival, what) for at, what in self.told), key=lambda one: one[0])),
            self._notes({part.cause for part in (*before, *after)}),
        )

    def _notes(self, causes: set[str]) -> tuple[str, ...]:
        found = [] if self.fit is None else self.fit.told()
        if not self.has_model:
            found.append(
                "there are too few steps to fit step times to: what a step would have taken alone is not known"
            )
        elif causes.intersection(MIXED):
            kinds = [told for kind, told in KINDS.items() if self.fit is not None and not self.fit.is_sure_of(kind)]
            found.append(f"the error of {' and '.join(kinds)} is too large to divide them up by causes")
        return tuple(found)

    def _number(self, key: Key) -> int:
        """Of any request in the run: its row."""
        return key[1] if self.rows is None else self.rows[key]

    def _tell(self, at: float, what: str) -> None:
        self.told.append((at, what))

    # To the first token

    def _before_first(self) -> tuple[TimePart, ...]:
        """Everything from its arrival to its first token, or to its end without one."""
        until = self.first if math.isfinite(self.first) else self._cut_off()
        starts = [event.at for event in self.events if event.kind == "start"]
        started = starts[0] if starts else until
        found: Seconds = defaultdict(float)
        waits = [wait for wait in self.journal.waits.get(self.key, []) if wait.at < started]
        stop = min(started, until) if starts else min(self._last_step_end(), until)
        self._divide_waiting(found, waits, self.arrival, stop)
        if not starts:
            self._tell_never_started(found, until)
            return _parts(found)
        self._tell(started, f"gets a slot after {_s(started - self.arrival)}")
        lost = self._preempted_between(started, until)
        found["preemption"] += sum(end - begin for begin, end in lost)
        self._divide_prompt(found, started, until, lost)
        if math.isfinite(self.first):
            found["delivery"] += self.way_back
            self._tell(self.seen_first, "first token")
        return _parts(found)

    def _cut_off(self) -> float:
        end = float(self.timeline.end[self.row])
        return (
            end - self.way_back
            if math.isfinite(end)
            else max(self._last_step_end(), float(self.timeline.arrival.max()))
        )

    def _last_step_end(self) -> float:
        return float(self.table.end.max(initial=self.arrival))

    def _tell_never_started(self, found: Seconds, until: float) -> None:
        """With nothing planned any more, it is not the others that it waits for."""
        idle_from = min(self._last_step_end(), until)
        if until > idle_from:
            found["policy"] += until - idle_from
            self._tell(idle_from, f"waits {_s(until - idle_from)} without any step: {CAUSES['policy']}")
        is_left = int(self.timeline.outcome[self.row]) == UNFINISHED
        still = " and is still waiting when the run ends" if is_left else ""
        why = f"; nothing is planned for it: {CAUSES['policy']}" if is_left and until <= self.arrival else ""
        self._tell(until, f"has waited all the time, {_s(until - self.arrival)},{still or ' and never started'}{why}")

    def _divide_waiting(self, found: Seconds, waits: list[Wait], begin: float, until: float) -> None:
        """Each step that is planned without it holds it until the next one is planned."""
        first = waits[0].at if waits else until
        found["step under way"] += max(0.0, min(first, until) - begin)
        if first > begin:
            running = self.table.between(begin, begin)
            beside = f" ({self.table.num_decode[running[0]]} decode rows)" if running.size else ""
            self._tell(begin, f"waits {_s(min(first, until) - begin)} for the step under way{beside}")
        at = 0
        while at < len(waits):
            stop = at
            while stop < len(waits) and waits[stop].hold == waits[at].hold:
                stop += 1
            run = waits[at:stop]
            end = waits[stop].at if stop < len(waits) else until
            seconds = max(0.0, end - run[0].at)
            found[run[0].hold] += seconds
            self._tell(
                run[0].at, f"waits {_s(seconds)} over {len(run)} steps: {CAUSES[run[0].hold]}{self._detail(run)}"
            )
            at = stop

    def _detail(self, run: list[Wait]) -> str:
        one = run[0]
        match one.hold:
            case "blocks":
                return f" ({one.free_blocks} free, {one.needed_blocks} needed)"
            case "prompts":
                others = Counter(key for wait in run for key in wait.prefills)
                later = sum(self._number(key) > self.row for key in others)
                after = f", {later} of which came after it" if later else ""
                return f" ({sum(wait.num_prompt for wait in run)} tokens of {len(others)} others{after})"
            case "slots":
                return ""
            case _:
                return f" ({one.free_blocks} blocks free)"

    def _preempted_between(self, begin: float, until: float) -> list[tuple[float, float]]:
        """From each loss of its blocks to when it starts again."""
        found = []
        for number, event in enumerate(self.events):
            if event.kind != "preempt" or not begin <= event.at < until:
                continue
            again = next((e.at for e in self.events[number + 1 :] if e.kind == "start"), until)
            found.append((event.at, min(again, until)))
            whom = f" for {', '.join(f'request {self._number(key)}' for key in event.by[:3])}" if event.by else ""
            why = "those who run needed its KV blocks" if event.why == "blocks" else f"displaced{whom}"
            self._tell(event.at, f"is preempted ({why}) and waits {_s(min(again, until) - event.at)}")
        return found

    def _divide_prompt(self, found: Seconds, started: float, until: float, lost: list[tuple[float, float]]) -> None:
        """The time with a slot until the first token: its chunks, and whatever else there was."""
        spent = until - started - sum(end - begin for begin, end in lost)
        chunks: list[tuple[StepEntry, int, int]] = []
        for step in self.table.between(started, until).tolist():
            entry = self.journal.steps[int(self.table.entry[step])]
            size = sum(n for key, n in entry.prefills if key == self.key)
            if size and float(self.table.end[step]) <= until + 1e-9:
                chunks.append((entry, size, step))
        tokens = [size for _, size, _ in chunks]
        total = sum(tokens)
        model = self.prompt_model
        alone = model.seconds(total, 0, 0, 0, total * (total + 1) / 2) if total and model is not None else 0.0
        in_chunks, had, in_steps = 0.0, 0, 0.0
        for number, (entry, size, step) in enumerate(chunks):
            if model is not None:
                in_chunks += model.seconds(size, 0, 0, had, size * had + size * (size + 1) / 2)
            had += size
            others = entry.num_prompt - size
            beside = [f"{entry.num_decode} decode rows"] if entry.num_decode else []
            beside += [f"{others} prompt tokens of others"] if others > 0 else []
            took = float(self.table.end[step] - self.table.start[step])
            in_steps += took
            if number < 6 or number == len(chunks) - 1:
                self._tell(
                    float(self.table.start[step]),
                    f"chunk {number + 1} of {len(chunks)}: {size} tokens in a step of {_s(took)}"
                    f"{', beside ' + ' and '.join(beside) if beside else ''}",
                )
        if chunks:  # the step before the first one was still running when that was planned
            ahead = min(spent, max(0.0, float(self.table.start[chunks[0][2]]) - started))
            found["step under way"] += ahead
            spent -= ahead
        in_steps = min(in_steps, spent)
        found["passed over"] += spent - in_steps
        if model is None:
            found["prompt steps"] += in_steps
            return
        alone = min(alone, in_steps)
        in_chunks = min(max(in_chunks, alone), in_steps)
        found["own prompt"] += alone
        found["chunking"] += in_chunks - alone
        found["mates while prefilling"] += in_steps - in_chunks

    # After it

    def _after_first(self) -> tuple[TimePart, ...]:
        """From its first token to its last: every step in between, by what was in it."""
        found: Seconds = defaultdict(float)
        lost = self._preempted_between(self.first, self.last)
        times = self.timeline.token_times(self.row) - self.way_back
        table = self.table
        rows = table.between(self.first, self.last + 1e-9)
        rows = rows[(table.end[rows] > self.first + 1e-9) & (table.end[rows] <= self.last + 1e-9)]
        next_one = np.minimum(np.searchsorted(times, table.end[rows] - 1e-9), times.size - 1)
        got = times[next_one] <= table.end[rows] + 1e-9
        context = self.num_prompt
        begin = self.first
        worst: list[tuple[float, int]] = []
        for step, has_token in zip(rows.tolist(), got.tolist(), strict=True):
            end = float(table.end[step])
            took = end - begin  # with the gap before it
            begin = end
            context += has_token
            if any(a < end <= b or (a >= end - took and a < end) for a, b in lost):
                found["preemption"] += took
                continue
            if not has_token:
                mine = sum(n for key, n in self.journal.steps[int(table.entry[step])].prefills if key == self.key)
                found["preemption" if mine else "left out"] += took
                continue
            worst.append((took, step))
            has_prompts = bool(table.num_prompt[step])
            if self.decode_model is None or (has_prompts and self.prompt_model is None):
                found["token steps with prompts" if has_prompts else "token steps"] += took
                continue
            alone, decodes, full = self._predicted(self.decode_model, step, context)
            scale = took / full if full > 0 else 0.0
            found["own tokens"] += alone * scale
            found["decode mates"] += (decodes - alone) * scale
            found["prompts of mates"] += (full - decodes) * scale
        for took, step in sorted(worst, reverse=True)[:3]:
            if took > 1.5 * float(np.median([t for t, _ in worst])):
                num = int(table.num_prompt[step])
                why = f"{num} prompt tokens of others" if num else f"{int(table.num_decode[step])} decode rows"
                self._tell(float(table.end[step]), f"a token after {_s(took)}: the step had {why}")
        return _parts(found)

    def _predicted(self, model: StepModel, step: int, context: int) -> tuple[float, float, float]:
        """Seconds of a step with this request alone, with all its decode rows, and as it was."""
        t = self.table
        d, p = float(t.num_decode[step]), float(t.num_prompt[step])
        ctx, pctx, pairs = float(t.decode_context[step]), float(t.prefill_context[step]), float(t.prefill_pairs[step])
        alone = model.seconds(0, 1, context)
        decodes = max(alone, model.seconds(0, d, ctx))
        return alone, decodes, max(decodes, model.seconds(p, d, ctx, pctx, pairs))

    # What was promised

    def _misses(self, before: tuple[TimePart, ...], after: tuple[TimePart, ...]) -> tuple[Miss, ...]:
        slo, found = self.kind.slo, []
        if slo is None:
            return ()
        spared_before = _spared(before)
        has_first = math.isfinite(self.first)
        ttft = (self.seen_first if has_first else self._cut_off()) - self.arrival
        limit = slo.ttft_limit(self.num_prompt)
        if ttft > limit:
            found.append(Miss("ttft", limit, ttft, spared_before))
        if slo.tpot is not None and self.num_output > 1:
            gaps = self.num_output - 1
            mean = (self.last - self.first) / gaps
            per_token = tuple(TimePart(part.cause, part.seconds / gaps) for part in _spared(after))
            if mean > slo.tpot:
                found.append(Miss("tpot (mean gap)", slo.tpot, mean, per_token))
            due = slo.token_deadline(gaps, self.arrival, self.num_prompt, self.seen_first)
            if self.seen_last > due:
                took = self.seen_last - self.arrival
                found.append(Miss("deadline of the last token", due - self.arrival, took, _spared((*before, *after))))
        if slo.e2e is not None:
            is_finished = int(self.timeline.outcome[self.row]) == FINISHED
            took = (self.seen_last if is_finished else self._cut_off()) - self.arrival
            if took > slo.e2e:
                found.append(Miss("e2e", slo.e2e, took, _spared((*before, *after))))
        return tuple(found)


def _parts(found: Seconds) -> tuple[TimePart, ...]:
    return tuple(TimePart(cause, found[cause]) for cause in CAUSES if found[cause] > 1e-9)


def _spared(parts: tuple[TimePart, ...]) -> tuple[TimePart, ...]:
    """What is not the request's own need, the most first."""
    found: Seconds = defaultdict(float)
    for part in parts:
        if not part.cause.startswith("own "):
            found[part.cause] += part.seconds
    return tuple(sorted(_parts(found), key=lambda part: -part.seconds))


def worst_request(timeline: RunTimeline, workload: Workload) -> int:
    """The one that overran its promises by most (`metrics.overrun`); the slowest one if none promises anything."""
    if not len(timeline):
        raise ConfigError("the run has no requests")
    worst = overrun(timeline, workload.promises)
    return int(np.nanargmax(worst if worst.any() else np.nan_to_num(timeline.e2e)))


def chosen_request(
    selector: int | str, timeline: RunTimeline, workload: Workload, names: Sequence[str | None] = ()
) -> int:
    """A row by its number, by one of SELECTORS (-1: worst), or by its name. names: what callers called each row.

    Raises ConfigError naming what there is.
    """
    text = str(selector)
    if text in ("-1", "worst"):
        return worst_request(timeline, workload)
    if not text.isdecimal():
        if text in names:
            return names.index(text)
        if text in SELECTORS:
            took = {"ttft": timeline.ttft, "tpot": timeline.tpot, "e2e": timeline.e2e}[text]
            if not np.isfinite(took).any():
                raise ConfigError(f"no request has a {text}: none had a token")
            return int(np.nanargmax(took))
        there = [name for name in names if name is not None]
        raise ConfigError(
            f"there is no request {text!r}{nearest_name(text, (*SELECTORS, *there))}; give its number from 0 to "
            f"{len(timeline) - 1}, or {', '.join(SELECTORS)}"
        )
    if int(text) >= len(timeline):
        raise ConfigError(f"there is no request {text}: the run has {len(timeline)}, from 0 on")
    return int(text)


__all__ = ("CAUSES", "SELECTORS", "Explanation", "Miss", "TimePart", "chosen_request", "explain", "worst_request")
