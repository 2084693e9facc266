"""Log-probabilities that a scripted worker reports, and what must arrive of them."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import numpy as np

from actorllm.messages import StepPlan, StepResult
from actorllm.messages.logit_rules import decode_rules
from actorllm.messages.logprobs import LogprobSpan, columns_of
from tests.scheduling.conftest import Engine


class Reporting:
    """An engine whose worker also reports log-probabilities: the value of a token is minus its position."""

    def __init__(self, **overrides: Any) -> None:
        self.engine = Engine(**overrides)
        self.wanted: dict[int, list[int]] = {}  # by slot: top, prompt top, first, number of prompt tokens
        self.sampled: dict[int, list[float]] = {}
        self.prompts: dict[int, list[float]] = {}
        self.largest = self.most = 0  # log-probabilities of a prompt, and of all prompts, in one step
        update = self.engine.scheduler.update
        self.engine.scheduler.update = lambda result, now: self.note(update(result, now))  # type: ignore[method-assign]
        self.watch_worker()

    def watch_worker(self) -> None:
        """The engine's worker, which is a new one."""
        self.wanted.clear()
        run = self.engine.worker.run
        self.engine.worker.run = lambda plan, late=None: self.report(plan, run(plan, late))  # type: ignore[method-assign]

    def report(self, plan: StepPlan, result: StepResult) -> StepResult:
        for slot in plan.freed.tolist():
            self.wanted.pop(slot, None)
        num_prompt = {int(new["slot"]): int(new["num_tokens"] - new["num_outputs"]) for new in plan.new}
        for slot, first, rules in decode_rules(plan.new_rules, plan.new_rule_numbers):
            self.wanted[slot] = [rules.num_logprobs, rules.num_prompt_logprobs, first, num_prompt[slot]]
        spans = []
        rows = self.engine.worker.rows
        for row, (slot, count) in enumerate(
            zip(plan.prefill_slots.tolist(), plan.prefill_counts.tolist(), strict=True)
        ):
            wanted = self.wanted.get(slot)
            if wanted is not None and wanted[1] >= 0:
                first = max(wanted[2], rows[slot].computed - count + 1)
                last = min(rows[slot].computed + 1, wanted[3])
                if first < last:
                    spans.append(span(row, first, last - first, wanted[1] + 1))
                    self.largest = max(self.largest, spans[-1].ids.size)
        self.most = max(self.most, sum(found.ids.size for found in spans))
        sampling = [*self.engine.worker.decode]
        sampling += [s for s in plan.prefill_slots.tolist() if rows[s].computed == len(rows[s].tokens) - 1]
        for row, slot in enumerate(sampling):
            wanted = self.wanted.get(slot)
            if wanted is not None and wanted[0] >= 0:
                found = span(row, 0, 1, wanted[0] + 1)
                found.values[:] = -len(rows[slot].tokens) + 1
                spans.append(found)
        return replace(result, **columns_of(spans))

    def note(self, events: Any) -> Any:
        for sequence, found in events.logprobs:
            target = self.prompts if found.is_prompt else self.sampled
            values = target.setdefault(sequence.key[1], [])
            assert not found.is_prompt or found.position == len(values) + 1, "a gap, or a repetition"
            values += found.values[:, 0].tolist()
        return events


def span(row: int, position: int, count: int, size: int) -> LogprobSpan:
    values = np.repeat(-np.arange(position, position + count, dtype=np.float32)[:, None], size, axis=1)
    return LogprobSpan(row, position, np.zeros((count, size), np.int32), values, np.ones(count, np.int32))
