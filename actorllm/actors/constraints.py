"""`Constraints`: the requests whose output must match a grammar, and what the worker is told of it.

A request with a grammar is blocked until its matcher is made, on a thread beside the loop (`take_jobs`, `Job.run`). From there
on the plans flag its rows, and the worker computes their step and waits for its late inputs before it samples. They are due
when the results of all earlier steps are applied: the matchers have seen their tokens then (`advance`), and the masks are
filled while the step's forward runs (`late_inputs`).

Invariants: the matcher of a sequence (`Sequence.grammar`) has seen exactly the tokens that count as its output; a step has a mask
for every constrained row that can still get a token from it, also for one that was preempted meanwhile. Requests without a
grammar cost nothing here. Owned by SchedulerActor; everything but `Job.run` on its loop.
"""

from __future__ import annotations

import json
import logging
from collections import deque
from collections.abc import Iterable
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
from numpy.typing import NDArray

from actorllm.clock import now
from actorllm.messages import I32, INVALID, LateInputs, StepPlan, Submit
from actorllm.scheduling.events import End, Events
from actorllm.scheduling.ledger import StepRecord
from actorllm.scheduling.scheduler import Scheduler
from actorllm.scheduling.sequence import Key, Sequence, State
from actorllm.text.grammar import GrammarCompiler, GrammarError, Matcher, followed

logger = logging.getLogger(__name__)

BLOCKED_ON = "grammar"


@dataclass(slots=True)
class Job:
    """The matchers of the sequences that ask for one grammar."""

    compiler: GrammarCompiler | None
    sequences: list[Sequence]

    def run(self) -> list[Matcher | GrammarError]:
        """On any thread. One answer per sequence."""
        grammar = self.sequences[0].submit.grammar
        assert grammar is not None
        made: list[Matcher | GrammarError] = []
        for sequence in self.sequences:
            try:
                if self.compiler is None:
                    raise GrammarError(
                        "the engine was built with skip_tokenizer_init=True, and a grammar needs a tokenizer"
                    )
                made.append(followed(self.compiler.compile(grammar), sequence.submit.output))
            except GrammarError as error:
                made.append(error)
        return made


class Constraints:
    """See the module docstring."""

    def __init__(self, compiler: GrammarCompiler | None, scheduler: Scheduler) -> None:
        """compiler: None where there is no tokenizer, and so no grammar."""
        self._compiler = compiler
        self._scheduler = scheduler
        self._new: dict[str, Job] = {}
        self._unsent: deque[tuple[int, I32, NDArray[Any]]] = deque()
        """Steps whose late inputs are due: number, slots, and the sequences that had these when it was planned."""
        self._awaited: deque[int] = deque()
        """Steps with constrained rows whose results are not there."""
        self.num_failed = 0

    @staticmethod
    def blocked(submit: Submit) -> Submit:
        """The request as the scheduler takes it."""
        return replace(submit, blocked_on=BLOCKED_ON, needs_late_inputs=True)

    # Matchers

    def add(self, sequence: Sequence) -> None:
        """A blocked request wants its matcher."""
        key = json.dumps(sequence.submit.grammar, sort_keys=True)
        job = self._new.get(key)
        if job is None:
            self._new[key] = Job(self._compiler, [sequence])
        else:
            job.sequences.append(sequence)

    @property
    def has_jobs(self) -> bool:
        return bool(self._new)

    def take_jobs(self) -> list[Job]:
        """What there is to run. The sequences of one request are in one job, so that they go on together."""
        jobs = list(self._new.values())
        self._new = {}
        return jobs

    def unblock(self, job: Job, made: list[Matcher | GrammarError]) -> list[End]:
        """They are made: the requests go on, or fail with the reason."""
        ends: list[End] = []
        for sequence, matcher in zip(job.sequences, made, strict=True):
            if sequence.state is not State.BLOCKED:
                continue  # it has ended meanwhile
            if isinstance(matcher, GrammarError):
                error = self.failure(sequence, matcher)
                end = self._scheduler.unblock(sequence.key, error, now())
                ends += [end._replace(details={"kind": INVALID})] if end is not None else []
            elif matcher.is_over:  # what it had before the last crash was all
                ends += self._scheduler.finish([(sequence, "stop", None)], now())
            else:
                sequence.grammar = matcher
                self._scheduler.unblock(sequence.key, None, now())
        return ends

    def is_making_matcher(self, key: Key) -> bool:
        """Whether a request waits for its matcher: nobody else can unblock it."""
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
        self._unsent.append((plan.step, plan.late_slots, rows.sequences[np.isin(rows.slots, plan.late_slots)]))
        self._awaited.append(plan.step)

    def is_due(self, last_done: int) -> bool:
        """Whether the late inputs of the next such step can be made: all before it are done."""
        return bool(self._unsent) and self._unsent[0][0] <= last_done + 1

    def late_inputs(self) -> tuple[LateInputs, list[Sequence], list[tuple[Sequence, str]]]:
        """Those of the next step; the requests that nothing but their end can follow in, whose rows count for nothing; and those
        whose masks cannot be made, with the reasons."""
        step, slots, sequences = self._unsent.popleft()
        here = [
            (row, sequence)
            for row, sequence in enumerate(sequences.tolist())
            if sequence.grammar is not None and sequence.state is not State.FINISHED
        ]
        if not here or self._compiler is None:
            return LateInputs(step=step), [], []
        allowed, is_last = self._compiler.masks([(s.grammar, s.submit.ignore_eos) for _, s in here])
        over: list[Sequence] = []
        failed: list[tuple[Sequence, str]] = []
        has_any: list[bool] = (np.bitwise_or.reduce(allowed, axis=1) != 0).tolist()
        for row, (_, sequence) in enumerate(here):
            if is_last[row] and has_any[row]:
                sequence.grammar.end()
                over.append(sequence)
            elif not has_any[row]:
                reason = self._compiler.failure_of(sequence.grammar) or "it leaves no token of the vocabulary"
                failed.append((sequence, f"the grammar cannot go on here: {reason}"))
        return LateInputs(step=step, slots=slots[[row for row, _ in here]], allowed=allowed.reshape(-1)), over, failed

    def has_waited_for(self, step: int) -> bool:
        """Whether the result of this step may have tokens of constrained rows."""
        found = False
        while self._awaited and self._awaited[0] <= step:
            found |= self._awaited.popleft() == step
        return found

    def forget_steps(self) -> None:
        """The workers are gone, and the steps in flight with them."""
        self._unsent.clear()
        self._awaited.clear()

    def advance(self, events: Events, at: float) -> Events:
        """Let the matchers see what was sampled. Who is at the end of its grammar ends with the token that brought it there."""
        over, failed = self._push(events)
        if not over and not failed:
            return events
        ends = self.end(over, failed, at)
        ended = {end.sequence for end in ends}
        ends += [End(sequence, "stop") for sequence in over if sequence not in ended]  # the same token was its last one
        return with_ends(events, ends)

    def _push(self, events: Events) -> tuple[list[Sequence], list[tuple[Sequence, str]]]:
        """Returns who is at the end of its grammar, and who failed, with the reason."""
        over: list[Sequence] = []
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
            except GrammarError as error:
                failed.append((sequence, f"what was sampled is not in the grammar: {error}"))
                continue
            if matcher.is_over:
                over.append(sequence)
        return over, failed

    def end(self, over: list[Sequence], failed: list[tuple[Sequence, str]], at: float) -> list[End]:
        """End those who are at the end of their grammars, and those whose grammars failed, with the reasons."""
        ends: list[End] = []
        for sequence, reason in failed:
            logger.error("the grammar of request %s: %s", sequence.key, reason)
            found = self._scheduler.finish([(sequence, "error", None)], at)
            ends += [end._replace(error=f"{source_of(sequence)}: {reason}") for end in found]
        ends += self._scheduler.finish([(sequence, "stop", None) for sequence in over], at)
        return ends

    def statistics(self) -> dict[str, int]:
        return {
            "num_compiled": 0 if self._compiler is None else self._compiler.num_compiled,
            "num_failed": self.num_failed,
        }


def source_of(sequence: Sequence) -> str:
    """What a request calls its grammar."""
    return str((sequence.submit.grammar or {}).get("source", "structured_outputs"))


def with_ends(events: Events, ends: Iterable[End]) -> Events:
    """Also these ends; of a request that ended by its length with the same token, the grammar decides."""
    new = {end.sequence: end for end in ends}
    return replace(events, ends=(*(end for end in events.ends if end.sequence not in new), *new.values()))
