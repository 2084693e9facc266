"""Hostile words, frames, bodies and messages: a link is dropped with an error, and nothing worse ever happens."""

from __future__ import annotations

import logging

import pytest

from actorllm.messages import Submit
from tests.messages import hostile_frontend
from tests.ring import hostile
from tests.ring.hostile import Report


def table(report: Report) -> str:
    lines = [f"{target:32} {report.trials[target]:8} {report.refused[target]:8}" for target in sorted(report.trials)]
    return "\n".join([f"{'target':32} {'trials':>8} {'refused':>8}", *lines, f"{'all':32} {report.trials.total():8}"])


def test_rings_and_bodies() -> None:
    report = hostile.run(12_000, seed=1)
    for name in (*hostile.STATIC, *hostile.OF_WRITER, *hostile.OF_READER):
        assert report.trials[f"word {name}"] > 20, name
    for name in hostile.FRAME_FIELDS:
        assert report.trials[f"frame {name}"] > 100, name


def test_messages_of_an_attached_frontend(caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.CRITICAL)
    report = hostile_frontend.run(5_000, seed=1)
    assert 0.2 < report.refused.total() / report.trials.total() < 0.95, "or one half of it is not tried"


@pytest.mark.parametrize(
    "submit", hostile.GOOD_SUBMITS, ids=["plain", "siblings", "grammar", "pooled", "embeds", "adapter"]
)
def test_what_is_changed_is_good(submit: Submit, caplog: pytest.LogCaptureFixture) -> None:
    """Or every change to it would be refused for something else."""
    caplog.set_level(logging.CRITICAL)
    engine = hostile_frontend.Engine()
    engine.deliver(engine.visitor, submit)
    for _ in range(30):
        engine.turn()
    ends = [end for outputs in engine.visitor.sent for end in outputs.ends]
    assert len(ends) == 1 + submit.siblings.size
    if submit.grammar is not None:  # the scripted worker does not look at the mask
        assert all("what was sampled is not in the grammar" in end[3] for end in ends)
    elif submit.adapter is not None:
        assert [end[3] for end in ends] == ["the engine takes no adapters; build it with enable_lora=True"]
    elif submit.pooling is not None:  # nothing else is wrong with it; the engine generates text
        assert [end[3] for end in ends] == ["this engine generates text and makes no vectors"]
    else:
        assert {end[1] for end in ends} == {"length"}


@pytest.mark.slow(reason="a million trials; the quick test has some thousand")
@pytest.mark.timeout(1800)
def test_a_million(caplog: pytest.LogCaptureFixture, capsys: pytest.CaptureFixture[str]) -> None:
    """bench/fuzz_rings.py prints the same for any number."""
    caplog.set_level(logging.CRITICAL)
    report = hostile.run(900_000, seed=2)
    report += hostile_frontend.run(100_000, seed=2)
    with capsys.disabled():
        print(f"\n{table(report)}")
    assert report.trials.total() >= 999_000
