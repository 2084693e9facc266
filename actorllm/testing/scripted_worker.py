"""The scripted worker: a worker actor on the engine's loop whose tokens come from a `Script`. Imports no torch.

A step takes as long as the slowest row in it, as with a model: rows of one batch get their tokens together.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np

from actorllm.actors.link import Link
from actorllm.actors.worker import WorkerActor
from actorllm.config import EngineConfig
from actorllm.errors import EngineError
from actorllm.messages import StepFailed, StepPlan, StepResult
from actorllm.testing.script import Part, Script
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


class BatchState:
    """The part of a ModelRunner that a worker needs when there is no model."""

    is_torn = launches_ahead = False
    weight_bytes = 0
    block_bytes = 0

    def __init__(self, script: Script, time: RealTime | VirtualTime) -> None:
        self._script, self._time = script, time
        self._rows: dict[int, ScriptedRow] = {}
        self._decode: list[int] = []

    def profile_num_blocks(self) -> int:
        return NUM_BLOCKS

    def allocate(self, num_blocks: int) -> None:
        self.forget_requests()

    def forget_requests(self) -> None:
        self._rows, self._decode = {}, []

    def check_itself(self) -> None:
        """There is nothing that could break."""

    def discard(self) -> None:
        """A step that failed has left nothing behind."""

    def close(self) -> None:
        """There is nothing to give back."""

    @staticmethod
    def is_memory_shortage(error: Exception) -> bool:
        return isinstance(error, MemoryError)

    def apply(self, plan: StepPlan) -> list[ScriptedRow]:
        """The rows that give a token in this step, in the order of the result. Raises LookupError as the script."""
        for slot in plan.freed.tolist():
            self._rows.pop(slot, None)
        at = 0
        for new in plan.new:
            num_known, num_outputs = int(new["num_tokens"]), int(new["num_outputs"])
            prompt = plan.new_tokens[at : at + num_known - num_outputs].tolist()
            at += num_known
            part = self._script.part(
                prompt, int(new["seed"]), int(new["sample_index"]), self._time.now(), num_outputs > 0
            )
            self._rows[int(new["slot"])] = ScriptedRow(num_known, int(new["num_computed"]), num_outputs, part)
        if plan.decode_slots is not None:
            self._decode = plan.decode_slots.tolist()
        slots = list(self._decode)
        for slot, count in zip(plan.prefill_slots.tolist(), plan.prefill_counts.tolist(), strict=True):
            row = self._rows[slot]
            row.num_computed += count
            if row.num_computed == row.num_known:
                slots.append(slot)
        slots += [int(new["slot"]) for new in plan.new if new["source"] >= 0]
        if plan.decode_slots is None:
            self._decode = slots  # a row that has begun decodes from the next step on
        return [self._rows[slot] for slot in slots]


class ScriptedWorkerActor(WorkerActor):
    """A worker of one life; the script and the time belong to the engine."""

    def __init__(self, name: str, rank: int, script: Script, time: RealTime | VirtualTime) -> None:
        super().__init__(name, rank)
        self._script, self._time = script, time

    def _load(self, config: EngineConfig) -> Any:
        return BatchState(self._script, self._time)

    async def _compute(self, link: Link, plan: StepPlan) -> None:
        started = self._time.now()
        try:
            rows = self.runner.apply(plan)  # type: ignore[attr-defined]
        except Exception as error:  # of a function of the application, which may raise anything
            self._script.lose_step()
            self.report(link, self.failure_of(link, plan, error))
            return
        if plan.late_slots.size:
            await self._late_inputs(link, plan.step)
        if at_fault := self._faults(rows):
            self._script.lose_step()
            for number in at_fault:
                self._script.end(rows[number].part)
            self.report(
                link, StepFailed(step=plan.step, error="the script fails here", rows=np.array(at_fault, np.int32))
            )
            return
        due = max((row.part.time + row.part.cost(row.next_index) for row in rows), default=started)
        await self._time.wait_until(due)
        tokens = [row.part.token(row.next_index) for row in rows]
        for row in rows:
            row.next_index += 1
            row.part.time, row.part.has_given = due, True
        self._num_steps += 1
        self.report(link, StepResult(step=plan.step, tokens=np.array(tokens, np.int32), started=started, ended=due))

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
