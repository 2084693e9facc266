"""Schedulers for tests, and an engine that is driven by hand."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
import pytest

from actorllm.kvcache.prefix_index import extra_key, hash_blocks
from actorllm.messages import LateInputs, StepPlan, StepResult, Submit, sequences_of
from actorllm.scheduling.loading import load_policy
from actorllm.scheduling.scheduler import Scheduler
from tests.scheduling.chained_tokens import BLOCK_SIZE, EOS, VOCAB, ScriptedWorker, reference_stream
from tests.scheduling.recurrent_worker import RecurrentWorker
from tests.scheduling.windowed_worker import WindowedWorker


def make_scheduler(**overrides: Any) -> Scheduler:
    arguments: dict[str, Any] = {
        "num_blocks": 40,
        "block_size": BLOCK_SIZE,
        "max_num_seqs": 4,
        "max_num_batched_tokens": 16,
        "max_model_len": 40,
        "vocab_size": VOCAB,
        "eos_token_ids": (EOS,),
        "primary_eos_token_id": EOS,
        "policy": load_policy("fcfs"),
        "depth": 2,
        "vector_size": 2,
    }
    return Scheduler(**(arguments | overrides))


def make_submit(rid: int, prompt: Sequence[int], block_size: int = BLOCK_SIZE, **overrides: Any) -> Submit:
    tokens = np.array(prompt, np.int32)
    key = extra_key(overrides.get("cache_salt"), overrides.get("adapter"))
    arguments: dict[str, Any] = {
        "rid": rid,
        "arrival": 0.0,
        "prompt": tokens,
        "max_tokens": 8,
        "seed": rid,
        "block_hashes": hash_blocks(tokens, block_size, key),
    }
    return Submit(**(arguments | overrides))


class Engine:
    """A scheduler and a scripted worker, driven by hand; collects what every request got."""

    def __init__(self, **overrides: Any) -> None:
        self._num_places = overrides.get("snapshots", 0)
        self.scheduler = make_scheduler(**overrides)
        self.worker = self.new_worker()
        self.results: list[StepResult] = []
        self.streams: dict[int, list[int]] = {}
        self.ends: dict[int, Any] = {}
        self.vectors: dict[int, list[float]] = {}
        self.plans: list[StepPlan] = []
        self.now = 0.0

    def new_worker(self) -> ScriptedWorker:
        kv = self.scheduler.kv
        if self._num_places:
            return RecurrentWorker(kv.block_size, kv.pool.num_blocks, num_places=self._num_places)
        if kv.window is None:
            return ScriptedWorker(kv.block_size, kv.pool.num_blocks)
        return WindowedWorker(
            kv.block_size,
            kv.pool.num_blocks,
            window=kv.window.window,
            num_window_blocks=kv.window.pool.num_blocks,
        )

    def submit(self, rid: int, prompt: Sequence[int], **overrides: Any) -> None:
        submit = make_submit(rid, prompt, self.scheduler.kv.block_size, **overrides)
        self.streams.setdefault(rid, submit.output.tolist())
        self._ended([end] if (end := self.scheduler.submit(0, submit, self.now)) else [])

    def submit_several(self, rid: int, n: int, prompt: Sequence[int], **overrides: Any) -> list[int]:
        """A request of n sequences, the first of them `rid`, with its seed; their rids."""
        rids = [rid + i for i in range(n)]
        submit = make_submit(
            rid, prompt, self.scheduler.kv.block_size, siblings=np.array(rids[1:], np.int32), **overrides
        )
        for sequence in sequences_of(submit):
            self.streams.setdefault(sequence.rid, [])
            self._ended([end] if (end := self.scheduler.submit(0, sequence, self.now)) else [])
        return rids

    def _ended(self, ends: Sequence[Any]) -> None:
        for end in ends:
            rid = end.sequence.key[1]
            assert rid not in self.ends, f"request {rid} ended twice"
            self.ends[rid] = end

    def launch(self) -> StepPlan | None:
        self.now += 0.01
        plan = self.scheduler.schedule(self.now)
        self._ended(self.scheduler.take_rejected())
        if plan is not None:
            self.plans.append(plan)
            late = LateInputs(step=plan.step) if plan.late_slots.size else None
            self.results.append(self.worker.run(plan, late))
        self.scheduler.check_integrity()
        return plan

    def complete(self) -> None:
        self.now += 0.01
        self.apply(self.scheduler.update(self.results.pop(0), self.now))

    def apply(self, events: Any) -> None:
        at = 0
        for i, sequence in enumerate(events.sequences):
            count = int(events.counts[i]) if events.counts.size else 1
            stream = self.streams[sequence.key[1]]
            assert int(events.index[i]) == len(stream), "an output skipped or repeated a token"
            stream += events.tokens[at : at + count].tolist()
            at += count
        assert at == events.tokens.size
        for sequence, vector in events.vectors:
            self.vectors[sequence.key[1]] = vector.tolist()
        self._ended(events.ends)
        self.scheduler.check_integrity()

    def abort(self, *rids: int) -> None:
        self._ended(self.scheduler.abort([(0, rid) for rid in rids], self.now))
        self.scheduler.check_integrity()

    def lose_workers(self) -> None:
        """They die with what they were doing, and others come."""
        self.now += 0.01
        self.results.clear()
        self._ended(self.scheduler.lose_workers("planted", self.now))
        self.worker = self.new_worker()
        self.scheduler.check_integrity()

    def run(self) -> None:
        """Until nothing is left to do."""
        max_steps = 1000 + 100 * len(self.streams)  # one after the other, in small chunks, and some of them again
        for _ in range(max_steps):
            while self.scheduler.may_plan and self.launch() is not None:
                pass
            if not self.results:
                return
            self.complete()
        raise AssertionError(f"not done after {max_steps} steps")


@pytest.fixture
def engine() -> Engine:
    return Engine()


@pytest.fixture
def build_engine() -> Callable[..., Engine]:
    return Engine


@pytest.fixture
def reference() -> Callable[..., list[int]]:
    return reference_stream
