"""The scripted worker: a worker actor on the engine's loop whose tokens come from a `Script`. Imports no torch.

A step takes as long as the slowest row in it, as with a model: rows of one batch get their tokens together.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import anyio
import numpy as np

from actorllm.actors.link import Link
from actorllm.actors.worker import WorkerActor
from actorllm.config import EngineConfig
from actorllm.errors import EngineError
from actorllm.messages import StepFailed, StepPlan, StepResult
from actorllm.messages.logit_rules import SamplingRules
from actorllm.messages.logprobs import LogprobSpan, columns_of
from actorllm.testing.script import Part, Script
from actorllm.testing.scripted_logprobs import rules_by_slot, span_of
from actorllm.testing.virtual_time import RealTime, VirtualTime

NUM_BLOCKS = 4096


class ScriptedEngineDeath(EngineError):
    """The script ends the engine here."""


@dataclass(slots=True, eq=False)
class ScriptedRow:
    """A slot of the batch."""

    num_known: int
    num_computed: int
    next_index: int
    part: Part
    prompt: list[int]
    num_told: int
    """Up to this position the log-probabilities of its prompt were told."""
    rules: SamplingRules | None

    @property
    def due(self) -> float:
        """When its next token is."""
        return self.part.time + self.part.cost(self.next_index)

    def prompt_span(self, row: int, num_computed: int) -> LogprobSpan | None:
        """What is asked of the prompt's tokens that follow those computed, the last of them included."""
        if self.rules is None or self.rules.num_prompt_logprobs < 0:
            return None
        first, self.num_told = self.num_told, max(self.num_told, min(len(self.prompt), num_computed + 1))
        tokens = self.prompt[first : self.num_told]
        if not tokens:
            return None
        return span_of(row, tokens, [0.0] * len(tokens), self.rules.num_prompt_logprobs, position=first)

    def span(self, row: int) -> LogprobSpan | None:
        """What is asked of the next token."""
        if self.rules is None or self.rules.num_logprobs < 0:
            return None
        token, value = self.part.token(self.next_index), self.part.logprob(self.next_index)
        return span_of(row, [token], [value], self.rules.num_logprobs, self.rules.logprob_ids)


class BatchState:
    """The part of a ModelRunner that a worker needs when there is no model."""

    is_torn = launches_ahead = False
    weight_bytes = 0
    block_bytes = 0
    cache_window: int | None = None
    num_snapshots: int | None = None
    scheme = None

    def __init__(self, script: Script, time: RealTime | VirtualTime) -> None:
        self._script, self._time = script, time
        self._rows: dict[int, ScriptedRow] = {}
        self._decode: list[int] = []

    def profile_num_blocks(self) -> int:
        return NUM_BLOCKS

    def allocate(self, num_blocks: int) -> None:
        self.forget_requests()

    def forget_requests(self) -> None:
        for row in self._rows.values():
            self._script.release(row.part)
        self._rows, self._decode = {}, []

    def check_itself(self) -> None:
        """There is nothing that could break."""

    def discard(self) -> None:
        """A step that failed has left nothing behind."""

    def close(self) -> None:
        """There is nothing to give back."""

    @staticmethod
    def statistics() -> dict[str, Any]:
        """Nothing is computed."""
        return {}

    @staticmethod
    def is_memory_shortage(error: Exception) -> bool:
        return isinstance(error, MemoryError)

    def apply(self, plan: StepPlan) -> tuple[list[ScriptedRow], list[LogprobSpan]]:
        """The rows that give a token in this step, in the order of the result, and what is told of prompts.

        Raises LookupError as the script.
        """
        for slot in plan.freed.tolist():
            if (row := self._rows.pop(slot, None)) is not None:
                self._script.release(row.part)
        self._add_new(plan)
        if plan.decode_slots is not None:
            self._decode = plan.decode_slots.tolist()
        slots = list(self._decode)
        spans: list[LogprobSpan | None] = []
        for number, (slot, count) in enumerate(
            zip(plan.prefill_slots.tolist(), plan.prefill_counts.tolist(), strict=True)
        ):
            row = self._rows[slot]
            row.num_computed += count
            spans.append(row.prompt_span(number, row.num_computed))
            if row.num_computed == row.num_known:
                slots.append(slot)
        slots += [int(new["slot"]) for new in plan.new if new["source"] >= 0]
        if plan.decode_slots is None:
            self._decode = slots  # a row that has begun decodes from the next step on
        return [self._rows[slot] for slot in slots], [span for span in spans if span is not None]

    def _add_new(self, plan: StepPlan) -> None:
        rules = rules_by_slot(plan)
        at = 0
        for new in plan.new:
            slot, num_known, num_outputs = int(new["slot"]), int(new["num_tokens"]), int(new["num_outputs"])
            prompt = plan.new_tokens[at : at + num_known - num_outputs].tolist()
            at += num_known
            part = self._script.part(prompt, int(new["seed"]), int(new["sample_index"]), self._time.now(), num_outputs)
            first, asked = rules.get(slot, (0, None))
            self._rows[slot] = ScriptedRow(
                num_known, int(new["num_computed"]), num_outputs, part, prompt, max(first, 1), asked
            )


class ScriptedWorkerActor(WorkerActor):
    """A worker of one life; the script and the time belong to the engine."""

    def __init__(self, name: str, rank: int, script: Script, time: RealTime | VirtualTime) -> None:
        super().__init__(name, rank)
        self._script, self._time = script, time

    def _load(self, config: EngineConfig) -> Any:
        self._script.lose_step()  # of the worker whose place it takes
        return BatchState(self._script, self._time)

    async def _compute(self, link: Link, plan: StepPlan) -> None:
        started = self._time.now()
        try:
            rows, spans = self.runner.apply(plan)  # type: ignore[attr-defined]
        except Exception as error:  # of a function of the application, which may raise anything
            self._script.lose_step()
            self.report(link, self.failure_of(link, plan, error))
            return
        if plan.late_slots.size:
            await self._late_inputs(link, plan.step)
        if at_fault := self._faults(rows):
            self._script.lose_step()
            for number in at_fault:
                self._script.fail(rows[number].part)
            self.report(
                link, StepFailed(step=plan.step, error="the script fails here", rows=np.array(at_fault, np.int32))
            )
            return
        due = await self._wait_for(rows, started)
        tokens = [row.part.token(row.next_index) for row in rows]
        spans += [span for number, row in enumerate(rows) if (span := row.span(number)) is not None]
        for row in rows:
            row.next_index += 1
            row.part.time, row.part.num_given = due, row.next_index
        self._num_steps += 1
        self.report(
            link,
            StepResult(
                step=plan.step,
                tokens=np.array(tokens, np.int32),
                started=started,
                ended=due,
                **columns_of(spans),
            ),
        )

    async def _wait_for(self, rows: list[ScriptedRow], started: float) -> float:
        """Wait as long as the slowest row takes; when that is left meanwhile, the slowest of the others. Returns until when."""
        while True:
            self._script.news = anyio.Event()
            due = max([started, *(row.due for row in rows if not row.part.is_left)])
            if due <= self._time.now():
                return due
            await self._time.wait_until(due, self._script.news, self._script)

    def _faults(self, rows: list[ScriptedRow]) -> list[int]:
        """The rows that fail now. Raises EngineError where the worker or the engine dies."""
        failed = []
        for number, row in enumerate(rows):
            answer, index = row.part.answer, row.next_index
            if answer.engine_dies_after == index:
                raise ScriptedEngineDeath("the script ends the engine here")
            if answer.worker_dies_after == index and not row.part.has_killed:
                row.part.has_killed = True
                self._script.lose_step()
                raise EngineError("the script ends the worker here")
            if answer.fails_after == index:
                failed.append(number)
        return failed
