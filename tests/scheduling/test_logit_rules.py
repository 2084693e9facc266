"""What the scheduler makes of requests with rules: who gets which log-probabilities, however often it has to compute."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import numpy as np
import pytest

from actorllm.messages import StepFailed
from actorllm.messages.logit_rules import SamplingRules, decode_rules
from actorllm.messages.logprobs import columns_of, spans_of
from actorllm.scheduling import message_budget
from actorllm.scheduling.results import ContradictionError
from tests.scheduling.chained_tokens import reference_stream
from tests.scheduling.conftest import Engine
from tests.scheduling.reporting import Reporting, span

PROMPT = list(range(1, 31))


RULES = SamplingRules(num_logprobs=1, num_prompt_logprobs=2).to_fields()
EXPECTED_PROMPT = [-float(i) for i in range(1, 30)]


@pytest.mark.parametrize("depth", [1, 2])
@pytest.mark.parametrize("chunk", [3, 16])
@pytest.mark.parametrize("num_blocks", [12, 40])
def test_each_position_once_whatever_happens(depth: int, chunk: int, num_blocks: int) -> None:
    """Three requests fight over few blocks: prompts are computed again, and reported once."""
    reporting = Reporting(depth=depth, num_blocks=num_blocks, prefill_chunk=chunk)
    engine = reporting.engine
    engine.submit(1, PROMPT[:5], rules=RULES, max_tokens=24, ignore_eos=True)
    engine.submit(2, PROMPT[:5], max_tokens=24, ignore_eos=True)
    engine.submit(3, PROMPT, rules=RULES, ignore_eos=True)
    engine.run()
    assert (engine.scheduler.statistics().num_preemptions > 0) == (num_blocks == 12)
    assert reporting.prompts == {1: EXPECTED_PROMPT[:4], 3: EXPECTED_PROMPT}
    assert reporting.sampled == {1: [-float(5 + i) for i in range(24)], 3: [-float(30 + i) for i in range(8)]}


def test_a_failed_step_gives_its_part_again() -> None:
    reporting = Reporting(prefill_chunk=6)
    engine = reporting.engine
    engine.submit(9, [1], max_tokens=30, ignore_eos=True)
    engine.submit(1, PROMPT, rules=RULES, ignore_eos=True)
    engine.launch()
    engine.launch()
    engine.complete()
    step = engine.results[0].step
    engine.results.clear()
    failure = StepFailed(step=step, error="planted", rows=np.zeros(1, np.int32))
    engine.apply(engine.scheduler.fail(failure, engine.now))
    engine.run()
    assert reporting.prompts == {1: EXPECTED_PROMPT}
    assert engine.streams[1] == reference_stream(PROMPT, 1, 8)


def test_large_parts_of_a_prompt_come_in_small_chunks(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(message_budget, "MAX_CHUNK_LOGPROBS", 12)
    reporting = Reporting()
    engine = reporting.engine
    engine.submit(1, PROMPT, rules=RULES, ignore_eos=True)
    engine.submit(2, PROMPT[:12], rules=RULES, ignore_eos=True, is_chunkable=False, max_tokens=2)
    engine.submit(3, PROMPT[:12], ignore_eos=True)
    engine.run()
    assert reporting.prompts[1] == EXPECTED_PROMPT
    assert reporting.largest >= 12
    chunks = [int(n) for plan in engine.plans for n in plan.prefill_counts]
    assert chunks.count(4) >= 7
    assert engine.scheduler.statistics().num_refused_decisions == 0


def test_prompts_share_what_a_step_may_tell_of_them(monkeypatch: pytest.MonkeyPatch) -> None:
    """Three values a token: the sixth token is the last that a step begins."""
    monkeypatch.setattr(message_budget, "MAX_PROMPT_LOGPROBS", 16)
    reporting = Reporting()
    engine = reporting.engine
    for rid in (1, 2, 3):
        engine.submit(rid, PROMPT, rules=RULES, ignore_eos=True)
    engine.submit(4, PROMPT, ignore_eos=True)
    engine.run()
    assert reporting.prompts == dict.fromkeys((1, 2, 3), EXPECTED_PROMPT)
    assert 15 <= reporting.most <= 18
    assert all(engine.streams[rid] == reference_stream(PROMPT, rid, 8) for rid in (1, 2, 3, 4))


def test_too_many_log_probabilities_wait_for_one_another(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(message_budget, "MAX_ROW_LOGPROBS", 50)
    engine = Engine()
    rules = SamplingRules(num_logprobs=40).to_fields()
    for rid in (1, 2):
        engine.submit(rid, PROMPT[:5], rules=rules, ignore_eos=True)
    engine.submit(3, PROMPT[:5], ignore_eos=True)
    most = 0
    for _ in range(60):
        engine.launch()
        most = max(most, sum(s.rules is not None for s in engine.scheduler.running()))
        if engine.results:
            engine.complete()
    assert most == 1
    assert {rid: len(stream) for rid, stream in engine.streams.items()} == {1: 8, 2: 8, 3: 8}


@pytest.mark.parametrize("n", [1, 3])
def test_a_plan_carries_only_so_much_of_new_rows(monkeypatch: pytest.MonkeyPatch, n: int) -> None:
    """Tokens and rules count; who alone is too much is let in alone, and siblings that find no room wait for the next plan."""
    monkeypatch.setattr(message_budget, "MAX_NEW_BYTES", 4 * 40)
    engine = Engine(max_num_seqs=12, num_blocks=80, max_num_batched_tokens=64)
    lists: dict[str, Any] = {
        "bias_ids": (1, 2),
        "biases": (0.0, 0.0),
        "allowed_ids": (*range(21),),
        "bad_words": ((3, 4),),
    }
    rules = SamplingRules(**lists).to_fields()
    long = list(range(39))
    for first, prompt, given in ((10, long, None), (20, long[:5], rules), (30, [7], None), (40, long[:9], None)):
        if n > 1:
            engine.submit_several(first, n, prompt, max_tokens=1, rules=given)
        else:
            engine.submit(first, prompt, max_tokens=1, rules=given)
    engine.run()
    for plan in engine.plans:
        size = 4 * plan.new_tokens.size
        size += sum(rules.num_bytes for _, _, rules in decode_rules(plan.new_rules, plan.new_rule_numbers))
        assert size <= 4 * 40 or len(plan.new) == 1
    assert max(len(plan.new) for plan in engine.plans) > 1
    assert len(engine.ends) == 4 * n
    assert all(end.error is None for end in engine.ends.values())


@pytest.mark.parametrize(("column", "value"), [("logprob_spans", -1), ("logprob_spans", 1), ("logprob_ids", 97)])
def test_log_probabilities_that_contradict_the_plan(engine: Engine, column: str, value: int) -> None:
    engine.submit(1, PROMPT[:5], rules=RULES)
    engine.launch()
    result = replace(engine.results[0], **columns_of([span(0, 0, 1, 2)]))
    array = getattr(result, column).copy()
    array[0] = value
    with pytest.raises(ContradictionError, match="logprob"):
        engine.scheduler.update(replace(result, **{column: array}), engine.now)


@pytest.mark.parametrize("position", [0, 1])
@pytest.mark.parametrize("rules", [None, SamplingRules(repetition=(2, 1, 3)).to_fields()])
def test_log_probabilities_of_who_wants_none_contradict_the_plan(
    engine: Engine, position: int, rules: dict[str, Any] | None
) -> None:
    engine.submit(1, PROMPT[:5], rules=rules)
    engine.launch()
    result = replace(engine.results[0], **columns_of([span(0, position, 1, 2)]))
    with pytest.raises(ContradictionError, match="logprobs of row 0, which wants none"):
        engine.scheduler.update(result, engine.now)


def test_rows_without_rules_carry_none(engine: Engine) -> None:
    engine.submit(1, PROMPT[:5])
    engine.submit(2, PROMPT[:5], rules=SamplingRules(repetition=(2, 1, 3)).to_fields())
    plan = engine.launch()
    assert plan is not None
    assert not plan.new_rules.size
    assert not spans_of(engine.results[0])
