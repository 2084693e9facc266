"""Long prompts and short ones: none starves, and room is left for those who run."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest

from actorllm.scheduling.policy import KeyPolicy
from actorllm.scheduling.step_packing import KeyPlanner


def chunks(plan: Any) -> dict[int, int]:
    return dict(zip(plan.prefill_slots.tolist(), plan.prefill_counts.tolist(), strict=True))


def test_short_prompts_do_not_wait_for_a_long_one(build_engine: Callable[..., Any]) -> None:
    engine = build_engine(max_num_batched_tokens=12, max_num_seqs=8, max_model_len=200, num_blocks=200)
    engine.submit(1, range(90), max_tokens=1)
    for rid in (2, 3, 4):
        engine.submit(rid, [rid, rid, rid], max_tokens=1)
    assert chunks(engine.launch()) == {0: 6, 1: 3, 2: 3}, "half of the step for those who can be finished"
    assert chunks(engine.launch()) == {0: 9, 3: 3}, "what they leave over is the long one's"
    engine.run()
    assert list(engine.ends) == [2, 3, 4, 1]


class StrictFcfs(KeyPolicy):
    strict = True


def test_with_strict_packing_none_passes(build_engine: Callable[..., Any]) -> None:
    """As in Sarathi-Serve: what a prompt leaves over of its last step is for the next one in line."""
    limits = {"max_num_batched_tokens": 12, "max_num_seqs": 8, "max_model_len": 200, "num_blocks": 200}
    engine = build_engine(**limits, depth=3, policy=KeyPlanner(StrictFcfs()))
    engine.submit(1, range(28), max_tokens=1)
    for rid, size in ((2, 3), (3, 30), (4, 2)):
        engine.submit(rid, range(rid, rid + size), max_tokens=1)
    found = [chunks(engine.launch()) for _ in range(3)]
    assert found == [{0: 12}, {0: 12}, {0: 4, 1: 3, 2: 5}]
    engine.run()
    assert list(engine.ends) == [1, 2, 3, 4]


def test_with_strict_packing_none_passes_a_prompt_that_is_not_served(build_engine: Callable[..., Any]) -> None:
    """Only one prompt at a time may be unfinished, and a step gives a prompt 5 tokens at most."""
    arguments = {"max_num_batched_tokens": 16, "prefill_chunk": 5, "max_num_seqs": 4}
    for policy, first in ((StrictFcfs(), {0: 5}), (KeyPolicy(), {0: 5, 1: 5, 2: 2})):
        engine = build_engine(**arguments, policy=KeyPlanner(policy))
        for rid, size in ((1, 20), (2, 20), (3, 2)):
            engine.submit(rid, range(rid, rid + size), max_tokens=1)
        assert chunks(engine.launch()) == first
        engine.run()
        assert sorted(engine.ends) == [1, 2, 3]


def test_alone_a_long_prompt_gets_everything(build_engine: Callable[..., Any]) -> None:
    engine = build_engine(max_num_batched_tokens=12)
    engine.submit(1, range(30), max_tokens=1)
    assert [chunks(engine.launch()), chunks(engine.launch())] == [{0: 12}, {0: 12}]
    engine.run()


def test_long_prompts_go_one_after_the_other_and_the_queue_keeps_its_order(build_engine: Callable[..., Any]) -> None:
    engine = build_engine(max_num_batched_tokens=12, max_model_len=60, num_blocks=60)
    for rid in (1, 2):
        engine.submit(rid, range(rid, rid + 40), max_tokens=1)
    engine.submit(3, [3, 3], max_tokens=1)
    first = engine.launch()
    assert chunks(first) == {0: 10, 1: 2}, "the second long prompt is passed over"
    engine.run()
    assert list(engine.ends) == [3, 1, 2]
    sizes = [sum(chunks(plan).values()) for plan in engine.plans]
    assert sizes[:-1] == [12] * (len(sizes) - 1), "no step is left half empty while somebody waits"


def test_several_long_prompts_at_a_time_share_the_step(build_engine: Callable[..., Any]) -> None:
    engine = build_engine(
        max_num_batched_tokens=12, max_model_len=60, num_blocks=60, max_num_partial_prefills=2, max_num_seqs=4
    )
    for rid in (1, 2, 3):
        engine.submit(rid, range(rid, rid + 40), max_tokens=1)
    assert chunks(engine.launch()) == {0: 6, 1: 6}
    engine.run()
    assert list(engine.ends) == [1, 2, 3]


def test_the_threshold_caps_every_prompt(build_engine: Callable[..., Any]) -> None:
    engine = build_engine(max_num_batched_tokens=16, prefill_chunk=5)
    for rid in (1, 2, 3):
        engine.submit(rid, range(rid, rid + 20), max_tokens=1)
    plan = chunks(engine.launch())
    assert plan[0] == 5, "also where it is alone in line"
    assert max(plan.values()) <= 5
    assert sum(plan.values()) >= 15
    engine.run()


@pytest.mark.parametrize("watermark", [0.0, 0.25])
def test_an_admission_leaves_headroom_while_others_run(build_engine: Callable[..., Any], watermark: float) -> None:
    engine = build_engine(num_blocks=12, watermark=watermark, max_num_batched_tokens=48)
    for rid in (1, 2, 3):
        engine.submit(rid, range(rid, rid + 15), max_tokens=6, ignore_eos=True)
    engine.launch()
    assert engine.scheduler.statistics().num_running == (3 if watermark == 0 else 2)
    engine.run()
    assert (engine.scheduler.statistics().num_preemptions > 0) == (watermark == 0)
    engine.submit(4, range(39), max_tokens=1)
    engine.launch()
    assert engine.scheduler.statistics().num_running == 1, "who runs alone needs to leave nothing"
    engine.run()
