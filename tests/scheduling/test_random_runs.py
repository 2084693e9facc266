"""Seeded random runs with everything at once: masks, skipped and delayed admissions, odd victims, results of 0 to 2 tokens,
pooled, late and whole requests, failures, aborts, tiny caches. Whatever happens, each stream is a prefix of its reference."""

from __future__ import annotations

import random
from typing import Any

import numpy as np
import pytest

from actorllm.kvcache.window_group import WindowGroup
from actorllm.messages import StepFailed
from actorllm.scheduling.policy import Admit, Budget, KeyPolicy
from actorllm.scheduling.step_packing import KeyPlanner
from tests.effort import examples
from tests.scheduling.chained_tokens import EOS, SIBLING, reference_stream
from tests.scheduling.conftest import Engine


class Capricious(KeyPolicy):
    """Decides by dice."""

    def __init__(self, dice: random.Random) -> None:
        self.dice = dice
        self.strict = dice.random() < 0.3

    def decode_mask(self, view: Any) -> Any:
        if self.dice.random() < 0.5:
            return None
        return np.array([self.dice.random() < 0.7 for _ in range(view.decode_slots.size)], bool)

    def admit(self, sequence: Any, view: Any) -> Admit:
        return self.dice.choice([Admit.ADMIT, Admit.ADMIT, Admit.ADMIT, Admit.SKIP, Admit.WAIT])

    def budget(self, view: Any) -> Budget:
        return Budget(view.limits.max_tokens, self.dice.choice([None, 1, 3, 16]))

    def victim_key(self, sequence: Any, view: Any) -> tuple[float]:
        return (self.dice.random(),)


def run(seed: int, window: int | None = None) -> None:
    dice = random.Random(seed)
    lookahead, max_num_seqs = dice.choice([0, 0, 1]), dice.randint(1, 5)
    engine = Engine(
        depth=dice.choice([1, 2]),
        num_blocks=dice.choice([11, 12, 16, 40]),
        max_num_seqs=max_num_seqs,
        max_num_batched_tokens=dice.randint(5, 24),
        num_lookahead_tokens=lookahead,
        window=window,
        policy=KeyPlanner(Capricious(dice) if dice.random() < 0.7 else KeyPolicy()),
    )
    if lookahead or dice.random() < 0.4:
        engine.worker.tokens_per_row = lambda slot, index: dice.choice([0, 1, 1, 1 + lookahead])
    requests: dict[int, tuple[list[int], dict[str, Any]]] = {}
    groups: dict[int, int] = {}  # how many sequences, by the rid of the first
    for _ in range(dice.randint(1, 11)):
        rid = len(requests) + 1
        prompt = [dice.randrange(97) for _ in range(dice.randint(1, 30))]
        if requests and dice.random() < 0.5:  # the same beginning as another one's
            other = dice.choice(list(requests.values()))[0]
            prompt[: dice.randint(1, 30)] = other[: dice.randint(1, 30)]
            prompt = prompt[:30]
        extras: dict[str, Any] = {"max_tokens": dice.randint(1, 24), "ignore_eos": dice.random() < 0.5}
        extras["pooling"] = "last" if dice.random() < 0.15 else None
        extras["needs_late_inputs"] = dice.random() < 0.3
        extras["is_chunkable"] = dice.random() < 0.8
        extras["skip_reading_prefix_cache"] = dice.random() < 0.1
        groups[rid] = 1 if extras["pooling"] else dice.choice([1, 1, 1, 2, 4])
        for i in range(groups[rid]):
            requests[rid + i] = prompt, extras | {"seed": rid + SIBLING * i}
    waiting = list(groups)
    for _ in range(4000):
        event = dice.random()
        if waiting and event < 0.3:
            rid = waiting.pop(0)
            engine.submit_several(rid, groups[rid], requests[rid][0], **requests[rid][1])
        elif event > 0.98 and engine.streams:
            engine.abort(dice.choice(list(engine.streams)))
        elif event > 0.97 and engine.results:
            failure = StepFailed(step=engine.results[0].step, error="planted", rows=np.zeros(1, np.int32))
            engine.results.clear()
            engine.apply(engine.scheduler.fail(failure, engine.now))
        plan = engine.launch() if engine.scheduler.may_plan else None
        if engine.results and (plan is None or dice.random() < 0.5):
            engine.complete()
        if not waiting and len(engine.ends) == len(requests):
            break
    assert len(engine.ends) == len(requests), "somebody starves"
    while engine.results:
        engine.complete()
    for rid, (prompt, extras) in requests.items():
        end, stream = engine.ends[rid], engine.streams[rid]
        if extras["pooling"]:
            assert end.reason != "stop" or rid in engine.vectors
            continue
        expected = reference_stream(prompt, extras["seed"], min(extras["max_tokens"], 40 - len(prompt)))
        if not extras["ignore_eos"] and EOS in expected:
            expected = expected[: expected.index(EOS) + 1]
        assert stream == (expected if end.reason in ("stop", "length") else expected[: len(stream)])
        if stream:
            assert end.sequence.first_token is not None
    statistics = engine.scheduler.statistics()
    assert statistics.kv.num_free == statistics.kv.num_blocks


@pytest.mark.parametrize("block", range(8))
def test_random_runs(block: int) -> None:
    for seed in range(50 * block, 50 * block + examples(8, 50)):
        run(seed)


@pytest.mark.parametrize("window", [1, 4, 7, 39])
def test_random_runs_with_a_group_of_layers_with_a_window(window: int) -> None:
    """Each token finds in the second group what the window sees, in whatever step and after whatever became of the others."""
    for seed in range(50 * window, 50 * window + examples(8, 50)):
        run(seed, window)


def one_block_too_few(group: WindowGroup, token: int) -> int:
    return max(0, token - group.window + 1 + group.block_size) // group.block_size


def whatever_is_left(group: WindowGroup, found: Any) -> Any:
    return found


@pytest.mark.parametrize(("name", "wrong"), [("first_seen", one_block_too_few), ("usable", whatever_is_left)])
def test_control_blocks_that_are_still_seen(name: str, wrong: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(WindowGroup, name, wrong)

    def many() -> None:
        for seed in range(200):
            run(seed, 7)

    with pytest.raises((AssertionError, KeyError, ValueError)):
        many()
