"""Prompts with embeddings in the scheduler: every chunk of every plan brings its rows, and no plan too many of them."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import numpy as np
import pytest

from actorllm.messages import StepFailed, StepPlan, StepResult
from actorllm.messages.embeds import EMBEDDED, LOWEST_ID
from actorllm.messages.logit_rules import SamplingRules
from actorllm.scheduling import message_budget
from tests.scheduling.chained_tokens import reference_stream
from tests.scheduling.conftest import Engine, make_scheduler, make_submit

ROW = 4
"""Bytes of an embedding: its number, which says whose it is and where it belongs."""


def rows_of(rid: int, prompt: list[int]) -> np.ndarray[Any, np.dtype[np.uint8]]:
    positions = [i for i, token in enumerate(prompt) if token == EMBEDDED]
    return np.array([1000 * rid + i for i in positions], "<i4").view(np.uint8)


class Checking:
    """An engine whose worker holds the rows of every plan against the tokens they stand for. The seed names a request."""

    def __init__(self, **overrides: Any) -> None:
        self.engine = Engine(embedding_bytes=ROW, **overrides)
        self.most = 0
        run = self.engine.worker.run
        self.engine.worker.run = lambda plan, late=None: self.check(plan, run(plan, late))  # type: ignore[method-assign]

    def check(self, plan: StepPlan, result: StepResult) -> StepResult:
        expected: list[int] = []
        for slot, count in zip(plan.prefill_slots.tolist(), plan.prefill_counts.tolist(), strict=True):
            row = self.engine.worker.rows[slot]
            last = row.computed
            expected += [1000 * row.seed + i for i in range(last - count, last) if row.tokens[i] == EMBEDDED]
        assert plan.embeds.view("<i4").tolist() == expected
        self.most = max(self.most, len(expected))
        return result

    def submit(self, rid: int, prompt: list[int], **overrides: Any) -> None:
        self.engine.submit(rid, prompt, prompt_embeds=rows_of(rid, prompt), **overrides)


PROMPTS = {
    1: [EMBEDDED] * 22,
    2: [3, 4, EMBEDDED, EMBEDDED, 7, EMBEDDED, 9, 10, 11, EMBEDDED, 13],
    3: [EMBEDDED],
    4: [8] * 19,
}


@pytest.mark.parametrize("depth", [1, 2])
@pytest.mark.parametrize("num_blocks", [40, 14])
def test_rows_come_with_their_chunks(depth: int, num_blocks: int) -> None:
    """Also after preemptions and a step that failed, when prompts are computed again."""
    checking = Checking(depth=depth, num_blocks=num_blocks, max_num_batched_tokens=9)
    engine = checking.engine
    for rid, prompt in PROMPTS.items():
        checking.submit(
            rid, prompt, max_tokens=16, ignore_eos=True, cache_salt=str(rid), block_hashes=np.zeros(0, np.uint8)
        )
    for _ in range(3):
        engine.launch()
        engine.complete()
    engine.launch()
    lost = engine.plans[-1].step
    engine.results.clear()
    engine.apply(engine.scheduler.fail(StepFailed(step=lost, error="torn"), engine.now))
    engine.ends.clear()
    survivors = [rid for rid in PROMPTS if engine.scheduler.sequence((0, rid)) is not None]
    for rid in PROMPTS:
        if rid not in survivors:
            del engine.streams[rid]
            checking.submit(rid, PROMPTS[rid], max_tokens=16, ignore_eos=True, block_hashes=np.zeros(0, np.uint8))
    engine.run()
    for rid, prompt in PROMPTS.items():
        assert engine.streams[rid] == reference_stream(prompt, rid, 16)
    assert (engine.scheduler.statistics().num_preemptions > 0) or num_blocks == 40
    assert engine.scheduler._message_budget.num_embedded == 0


def test_a_plan_carries_only_so_many(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(message_budget, "MAX_STEP_BYTES", 5 * ROW)
    checking = Checking(max_num_batched_tokens=16)
    for rid, prompt in PROMPTS.items():
        checking.submit(rid, prompt, ignore_eos=True, block_hashes=np.zeros(0, np.uint8))
    checking.engine.run()
    assert 1 <= checking.most <= 5
    for rid, prompt in PROMPTS.items():
        assert checking.engine.streams[rid] == reference_stream(prompt, rid, 8)


BAD: list[tuple[dict[str, Any], str]] = [
    ({"prompt_embeds": np.zeros(7, np.uint8)}, "7 bytes of prompt_embeds are not 4 for each of 2 positions"),
    ({"prompt": np.array([LOWEST_ID - 1, 5, EMBEDDED], np.int32)}, "outside the vocabulary"),
    ({"output": np.array([EMBEDDED], np.int32)}, "a token id of its output is negative"),
    ({"rules": SamplingRules(num_prompt_logprobs=1).to_fields()}, "no prompt_logprobs"),
]


@pytest.mark.parametrize(("wrong", "message"), BAD, ids=[message for _, message in BAD])
def test_what_no_frontend_would_send_fails_alone(wrong: dict[str, Any], message: str) -> None:
    """A frontend in somebody else's program may: see messages.untrusted."""
    prompt = [EMBEDDED, 5, EMBEDDED]
    good = make_submit(1, prompt, prompt_embeds=rows_of(1, prompt))
    taking = make_scheduler(embedding_bytes=ROW)
    end = taking.submit(0, replace(good, **wrong), 0.0)
    assert end is not None
    assert end.error is not None
    assert message in end.error
    assert taking.submit(0, good, 0.0) is None
    taking.check_integrity()
    end = make_scheduler().submit(0, good, 0.0)
    assert end is not None
    assert "without enable_prompt_embeds" in str(end.error)
    without = taking.submit(0, make_submit(2, prompt), 0.0)
    assert without is not None
    assert "outside the vocabulary" in str(without.error)


@pytest.mark.parametrize("num_forks", [0, 1])
def test_a_prompt_is_shared_only_with_the_same_rows(num_forks: int) -> None:
    """Its ids say nothing: all of them are EMBEDDED."""
    engine = Engine(embedding_bytes=ROW)
    prompt = PROMPTS[1]
    arguments: dict[str, Any] = {"ignore_eos": True, "block_hashes": np.zeros(0, np.uint8)}
    engine.submit(1, prompt, prompt_embeds=rows_of(1, prompt), **arguments)
    engine.submit(2, prompt, prompt_embeds=rows_of(1 if num_forks else 2, prompt), fork_of=1, **arguments)
    engine.run()
    statistics = engine.scheduler.statistics()
    assert statistics.num_forks == num_forks
    assert statistics.num_prefill_tokens == 22 * (2 - num_forks)
    assert sum(plan.embeds.size for plan in engine.plans) == statistics.num_prefill_tokens * ROW
    assert [engine.streams[rid] for rid in (1, 2)] == [reference_stream(prompt, rid, 8) for rid in (1, 2)]
