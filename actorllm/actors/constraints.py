"""`Constraints`: the requests whose output must match a grammar, and what the worker is told of it.

A request with a grammar is blocked until its matcher is made, on a thread beside the loop (`CompileJob.run`, run by a
`FairExecutor`). From there on the plans flag its rows, and the worker computes their step and waits for its late inputs before
it samples. Late inputs are due when the results of all earlier steps are applied, since the matchers have seen their tokens
then (`advance`). The masks are filled while the step's forward runs (`late_inputs`).

A worker that may check drafts says which ones when its forward begins (`Drafted`), and the late inputs wait for that, too. A copy
of the matcher walks over the drafts, and each gets a mask of its own. The late inputs also have the tokens about which the
grammar leaves no choice from there on. The worker takes them as the drafts of its next step.

Where a grammar ends, its mask allows nothing but the ends of text. One of them is sampled like any token, and ends the request.
With `ignore_eos` it does not, and what follows is free. Where the request's own rules forbid every end of text, or the model has
none, the request ends without one.

Invariants: the matcher of a sequence (`Sequence.grammar`) has seen exactly the tokens that count as its output. A step has a
mask for every constrained row that can still get a token from it, also for one that was preempted meanwhile. Requests without a
grammar cost nothing here. Owned by SchedulerActor; everything but `CompileJob.run` and `CompileJob.is_wanted` on its loop.
"""

from __future__ import annotations

import json
import logging
import math
from collections import deque
from collections.abc import Callable, Iterable
from dataclasses import asdict, dataclass, field, replace
from typing import Any

import numpy as np
from numpy.typing import NDArray

from actorllm.actors.executor import FairExecutor, JobDropped
from actorllm.clock import now
from actorllm.messages import I32, INVALID, OVERLOADED, U32, Drafted, LateInputs, StepPlan, Submit
from actorllm.scheduling.events import End, Events
from actorllm.scheduling.ledger import StepRecord
from actorllm.scheduling.scheduler import Scheduler
from actorllm.scheduling.sequence import Key, Sequence, State
from actorllm.text.grammar import (
    CompileDropped,
    GrammarCompiler,
    GrammarError,
    Matcher,
    NotInGrammarError,
    followed,
    walked,
)
from actorllm.text.reasoning.thought import matcher_of

logger = logging.getLogger(__name__)

BLOCKED_ON = "grammar"
COMPILE_TIMEOUT_S = 10.0
"""What takes longer to compile is refused."""
MAX_DRAFT_MASK_BYTES = 4 << 20
"""Of the masks behind drafts in one message; rows beyond them have no drafts checked."""
LONGEST_WAIT_S = 1.0
"""At a time, where the caller waits for its matchers."""

Made = list[tuple[Sequence, Matcher | GrammarError]]


@dataclass(slots=True, eq=False)
class Unsent:
    """A step whose late inputs are due."""

    step: int
    slots: I32
    sequences: NDArray[Any]
    """Those that had these slots when it was planned."""
    max_drafts: int
    drafts: dict[int, list[int]] | None = None
    """What the worker tries, by slot; None: it has not told."""


@dataclass(slots=True, eq=False)
class CompileJob:
    """The matchers of the sequences that ask for one grammar."""

    compiler: GrammarCompiler | None
    key: str
    sequences: list[Sequence] = field(default_factory=list)
    """Grows while the job waits or runs."""

    @property
    def owner(self) -> int:
        """The frontend."""
        return self.sequences[0].key[0]

    @property
    def tenant(self) -> str | None:
        return self.sequences[0].submit.tenant

    @property
    def size(self) -> int:
        return len(str((self.sequences[0].submit.grammar or {}).get("text", "")))

    @property
    def is_wanted(self) -> bool:
        return any(sequence.state is State.BLOCKED for sequence in self.sequences)

    @property
    def is_timed(self) -> bool:
        return self.compiler is None or self.compiler.is_ready

    def run(self) -> Made:
        """On any thread. One answer for each of the sequences that were there when it began."""
        sequences = list(self.sequences)
        grammar = sequences[0].submit.grammar
        assert grammar is not None
        made: Made = []
        for sequence in sequences:
            try:
                if self.compiler is None:
                    raise GrammarError(
                        "the engine was built with skip_tokenizer_init=True, and a grammar needs a tokenizer"
                    )
                matcher = matcher_of(self.compiler, grammar, sequence.submit.prompt, lambda: self.is_wanted)
                made.append((sequence, followed(matcher, sequence.submit.output)))
            except GrammarError as error:
                made.append((sequence, error))
        return made


class Constraints:
    """See the module docstring."""

    def __init__(self, compiler: GrammarCompiler | None, scheduler: Scheduler) -> None:
        """compiler: None where there is no tokenizer, and so no grammar."""
        self._compiler = compiler
        self._scheduler = scheduler
        self._new: list[CompileJob] = []
        self._queue: FairExecutor[CompileJob] | None = None
        self._jobs: dict[tuple[int, str], CompileJob] = {}
        """Those that are not done, by frontend and grammar: requests for the same grammar wait for the same job."""
        self.unsent: deque[Unsent] = deque()
        """Steps whose late inputs are due."""
        self.awaited: deque[int] = deque()
        """Steps with constrained rows whose results are not there."""
        self.num_failed = 0

    @staticmethod
    def blocked(submit: Submit) -> Submit:
        """The request as the scheduler takes it."""
        return replace(submit, blocked_on=BLOCKED_ON, needs_late_inputs=True)

    # Matchers

    def warm_up(self) -> None:
        """On any thread. Where there can be no grammars, a request for one is told why."""
        if self._compiler is None:
            return
        try:
            self._compiler.warm_up()
        except BaseException as error:  # the first request with a grammar is told of it
            logger.debug("no grammar is compiled before the first request: %s", error)

    def add(self, sequence: Sequence) -> None:
        """A blocked request wants its matcher."""
        key = json.dumps(sequence.submit.grammar, sort_keys=True)
        job = self._jobs.get((sequence.key[0], key))
        if job is None:
            job = self._jobs[sequence.key[0], key] = CompileJob(self._compiler, key)
            self._new.append(job)
        job.sequences.append(sequence)

    @property
    def is_making(self) -> bool:
        """Whether matchers are to be made, or being made."""
        return bool(self._jobs)

    @property
    def expires_at(self) -> float:
        """When `make` has to be called even if nothing else happens."""
        return math.inf if not self._jobs or self._queue is None else self._queue.expires_at

    def make(self, wake: Callable[[], object] | None) -> list[End]:
        """Have matchers made, and let the requests go on whose matchers are there.

        wake: makes the loop call this again, from any thread; None: there is no loop, and the caller waits.
        """
        if self._queue is None:
            compiler = self._compiler
            self._queue = FairExecutor("grammars", wake or bool, timeout_s=COMPILE_TIMEOUT_S)
            if compiler is not None:
                self._queue.has_room = compiler.has_room
        queue = self._queue
        ends: list[End] = []
        while True:
            ends += self._take_outcomes(queue)
            new, self._new = self._new, []
            for job in new:
                if not queue.put(job):
                    del self._jobs[job.owner, job.key]
                    ends += self._refuse(job, queue)
            if wake is not None or not queue.is_busy:
                return ends
            queue.wait(max(0.0, min(queue.expires_at - now(), LONGEST_WAIT_S)))

    def _take_outcomes(self, queue: FairExecutor[CompileJob]) -> list[End]:
        ends: list[End] = []
        for job, outcome in queue.take_outcomes():
            del self._jobs[job.owner, job.key]
            ends += self._settle(job, outcome, queue.timeout_s)
        return ends

    def _settle(self, job: CompileJob, outcome: Any, timeout_s: float) -> list[End]:
        """The outcome of a job: its requests go on, or fail with the reason."""
        made: Made
        match outcome:
            case list():
                made = outcome
            case JobDropped() | CompileDropped():
                made = []
            case TimeoutError():
                slow = GrammarError(f"it takes longer than {timeout_s:g} s to compile; make it smaller or simpler")
                made = [(sequence, slow) for sequence in job.sequences]
            case _:
                logger.error("compiling a grammar failed", exc_info=outcome)
                told = f"it cannot be compiled: {type(outcome).__name__}: {outcome!s:.200}"
                made = [(sequence, GrammarError(told)) for sequence in job.sequences]
        ends = [end for sequence, matcher in made for end in self._go_on(sequence, matcher)]
        answered = {sequence for sequence, _ in made}
        for sequence in job.sequences:
            if sequence not in answered and sequence.state is State.BLOCKED:  # it came while the job ran
                self.add(sequence)
        return ends

    def _go_on(self, sequence: Sequence, matcher: Matcher | GrammarError) -> list[End]:
        """A request has its matcher, or fails with the reason."""
        if sequence.state is not State.BLOCKED:
            return []  # it has ended meanwhile
        if isinstance(matcher, GrammarError):
            error = self.failure(sequence, matcher)
            end = self._scheduler.unblock(sequence.key, error, now())
            return [end._replace(details={"kind": INVALID})] if end is not None else []
        if (
            matcher.is_over and matcher.ends_request and not sequence.submit.ignore_eos
        ):  # what it had before the last crash was all
            return self._scheduler.finish([(sequence, "stop", None)], now())
        sequence.grammar = matcher
        self._scheduler.unblock(sequence.key, None, now(), sequence.adapter_slot)
        return []

    def _refuse(self, job: CompileJob, queue: FairExecutor[CompileJob]) -> list[End]:
        """Too many grammars wait already."""
        num_waiting = queue.statistics().num_waiting
        error = f"the engine is overloaded: {num_waiting} grammars wait to be compiled; try again later, or elsewhere"
        details = {"kind": OVERLOADED, "num_waiting_requests": num_waiting, "max_waiting_requests": queue.max_jobs}
        ends = [self._scheduler.unblock(sequence.key, error, now()) for sequence in job.sequences]
        return [end._replace(details=details) for end in ends if end is not None]

    def close(self) -> None:
        """No matcher is made any more."""
        if self._queue is not None:
            self._queue.close()

    def is_making_matcher(self, key: Key) -> bool:
        """Whether a request waits for its matcher: nothing else can unblock it."""
        sequence = self._scheduler.sequence(key)
        return sequence is not None and sequence.submit.grammar is not None and sequence.grammar is None

    def failure(self, sequence: Sequence, error: GrammarError) -> str:
        """What the caller of a request is told whose grammar cannot be used."""
        self.num_failed += 1
        return f"{source_of(sequence)}: {error}"

    # Steps

    def launched(self, plan: StepPlan, record: StepRecord) -> None:
        """A step with flagged rows."""
        rows = record.rows
        sequences = rows.sequences[np.isin(rows.slots, plan.late_slots)]
        self.unsent.append(Unsent(plan.step, plan.late_slots, sequences, plan.max_drafts))
        self.awaited.append(plan.step)

    def is_due(self, last_done: int) -> bool:
        """Whether the late inputs of the next such step can be made: all before it are done."""
        if not self.unsent or self.unsent[0].step > last_done + 1:
            return False
        first = self.unsent[0]  # a step that has failed may never tell its drafts
        return not first.max_drafts or first.drafts is not None or first.step <= last_done

    def tell_drafts(self, drafted: Drafted) -> str | None:
        """What a step tries. Returns why that cannot be; None: it can. Steps that nothing waits for are passed over."""
        step = next((step for step in self.unsent if step.step == drafted.step), None)
        if step is None:
            return None
        slots, counts, tokens = drafted.slots, drafted.counts, drafted.tokens
        if step.drafts is not None:
            return "drafts twice"
        if counts.size != slots.size or not np.isin(slots, step.slots).all() or np.unique(slots).size != slots.size:
            return f"drafts of slots {slots.tolist()} in a plan with grammars at {step.slots.tolist()}"
        if int(counts.sum()) != tokens.size or counts.max(initial=0) > step.max_drafts:
            return f"{tokens.size} drafts, counted {counts.tolist()}, in a plan of {step.max_drafts} at most"
        if self._compiler is not None and tokens.max(initial=0) >= self._compiler.vocab_size:
            return f"a draft outside the vocabulary of {self._compiler.vocab_size}"
        ends = np.cumsum(counts).tolist()
        step.drafts = {
            slot: tokens[end - count : end].tolist()
            for slot, count, end in zip(slots.tolist(), counts.tolist(), ends, strict=True)
        }
        return None

    def late_inputs(self) -> tuple[LateInputs, list[Sequence], list[tuple[Sequence, str]]]:
        """Those of the next step; the requests that end without an end of text, whose rows count for nothing; and those
        whose masks cannot be made, with the reasons."""
        unsent = self.unsent.popleft()
        step, slots = unsent.step, unsent.slots
        here = [
            (row, sequence)
            for row, sequence in enumerate(unsent.sequences.tolist())
            if sequence.grammar is not None and not sequence.grammar.is_over and sequence.state is not State.FINISHED
        ]
        if not here or self._compiler is None:
            return LateInputs(step=step), [], []
        allowed, is_last = self._compiler.masks([s.grammar for _, s in here])
        over: list[Sequence] = []
        failed: list[tuple[Sequence, str]] = []
        has_any = has_bits(allowed)
        for row, (_, sequence) in enumerate(here):
            matcher = sequence.grammar
            # The grammar is complete here: only an end of text may follow. Without one that may be sampled the request
            # ends now.
            if is_last[row]:
                if not has_any[row] or not _may_end_text(sequence, matcher, self._compiler.eos_ids):
                    matcher.end()
                    over.append(sequence)
            elif not has_any[row]:
                reason = self._compiler.failure_of(matcher) or "it leaves no token of the vocabulary"
                failed.append((sequence, f"the grammar cannot go on here: {reason}"))
        listed = slots[[row for row, _ in here]]
        if not unsent.max_drafts:
            return LateInputs(step=step, slots=listed, allowed=allowed.reshape(-1)), over, failed
        matchers = [sequence.grammar for _, sequence in here]
        drafts = [(unsent.drafts or {}).get(slot, []) for slot in listed.tolist()]
        return self._with_drafts(step, listed, matchers, drafts, allowed, unsent.max_drafts), over, failed

    def _with_drafts(
        self,
        step: int,
        slots: I32,
        matchers: list[Matcher],
        drafts: list[list[int]],
        allowed: U32,
        max_drafts: int,
    ) -> LateInputs:
        """Late inputs with a mask behind each draft, too, as far as there can be one.

        drafts: of each slot. allowed: the first mask of each. A grammar that ends behind a draft, or cannot go on there, has
        no mask for it: that is found again when the draft is known.
        """
        assert self._compiler is not None
        room = MAX_DRAFT_MASK_BYTES // allowed[:1].nbytes
        behind: list[list[Matcher]] = []
        for matcher, tokens in zip(matchers, drafts, strict=True):
            is_slow = matcher.slow_s > 0 or matcher.is_over
            found = [] if is_slow else walked(matcher, tokens[:room])
            room -= len(found)
            behind.append(found)
        masks, is_last = self._compiler.masks([copy for found in behind for copy in found])
        is_useful = [any_ and not last for any_, last in zip(has_bits(masks), is_last, strict=True)]
        parts: list[U32] = []
        counts: list[int] = []
        forced: list[list[int]] = []
        at = 0
        for row, (matcher, found) in enumerate(zip(matchers, behind, strict=True)):
            matcher.slow_s += sum(copy.slow_s for copy in found)
            kept = next((i for i in range(len(found)) if not is_useful[at + i]), len(found))
            parts += [allowed[row : row + 1], masks[at : at + kept]]
            counts.append(1 + kept)
            forced.append([] if matcher.slow_s else [matcher, *found][kept].forced(1 + max_drafts))
            at += len(found)
        return LateInputs(
            step=step,
            slots=slots,
            allowed=np.concatenate(parts).reshape(-1),
            counts=np.array(counts, np.int32),
            forced=np.array([token for tokens in forced for token in tokens], np.int32),
            forced_counts=np.array([len(tokens) for tokens in forced], np.int32),
        )

    def has_waited_for(self, step: int) -> bool:
        """Whether the result of this step may have tokens of constrained rows."""
        found = False
        while self.awaited and self.awaited[0] <= step:
            found |= self.awaited.popleft() == step
        return found

    def forget_steps(self) -> None:
        """The workers are gone, and the steps in flight with them."""
        self.unsent.clear()
        self.awaited.clear()

    def advance(self, events: Events, at: float) -> Events:
        """Let the matchers see what was sampled."""
        failed = self._push(events)
        return with_ends(events, self.end([], failed, at)) if failed else events

    def _push(self, events: Events) -> list[tuple[Sequence, str]]:
        """Returns the sequences that failed, with the reason."""
        failed: list[tuple[Sequence, str]] = []
        tokens = events.tokens.tolist()
        counts = events.counts.tolist() if events.counts.size else [1] * len(tokens)
        stopped = {end.sequence for end in events.ends if end.reason != "length"} if events.ends else ()
        at = 0
        for sequence, count in zip(events.sequences.tolist(), counts, strict=True):
            new = tokens[at : at + count]
            at += count
            matcher = sequence.grammar
            if matcher is None or sequence in stopped:
                continue
            try:
                matcher.push(new)
            except NotInGrammarError as error:
                failed.append((sequence, f"what was sampled is not in the grammar: {error}"))
            except GrammarError as error:
                failed.append((sequence, f"the grammar cannot go on here: {error}"))
        return failed

    def end(self, over: list[Sequence], failed: list[tuple[Sequence, str]], at: float) -> list[End]:
        """End the sequences that are at the end of their grammars, and those whose grammars failed, with the reasons."""
        ends: list[End] = []
        for sequence, reason in failed:
            logger.error("the grammar of request %s: %s", sequence.key, reason)
            self.num_failed += 1
            assert self._compiler is not None
            self._compiler.forget(sequence.grammar)
            # Before its first token it is the request that asks for what cannot be held; later it is the engine that fails.
            details = {"kind": INVALID} if sequence.grammar.num_tokens == 0 else None
            found = self._scheduler.finish([(sequence, "error", None)], at)
            ends += [end._replace(error=f"{source_of(sequence)}: {reason}", details=details) for end in found]
        ends += self._scheduler.finish([(sequence, "stop", None) for sequence in over], at)
        return ends

    def statistics(self) -> dict[str, int]:
        counts = {} if self._compiler is None else self._compiler.statistics()
        queue = asdict(
            FairExecutor[CompileJob]("grammars", bool).statistics() if self._queue is None else self._queue.statistics()
        )
        return {"num_compiled": 0, **counts, "num_failed": self.num_failed, **queue}


def has_bits(masks: U32) -> list[bool]:
    """Which masks allow anything."""
    found: list[bool] = (np.bitwise_or.reduce(masks, axis=1) != 0).tolist()
    return found


def _may_end_text(sequence: Sequence, matcher: Matcher, eos_ids: Iterable[int]) -> bool:
    """Whether the request's other rules leave an end of text to be sampled next."""
    submit = sequence.submit
    if matcher.num_tokens < submit.min_tokens:
        return False
    allowed = (submit.rules or {}).get("allowed_ids")
    return not allowed or not set(eos_ids).isdisjoint(allowed)


def source_of(sequence: Sequence) -> str:
    """What a request calls its grammar."""
    return str((sequence.submit.grammar or {}).get("source", "structured_outputs"))


def with_ends(events: Events, ends: Iterable[End]) -> Events:
    """Also these ends; of a request that ended by its length with the same token, the grammar decides."""
    new = {end.sequence: end for end in ends}
    return replace(events, ends=(*(end for end in events.ends if end.sequence not in new), *new.values()))
