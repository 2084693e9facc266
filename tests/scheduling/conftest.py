"""`ScriptedWorker`: a worker without a model, whose next token depends on every token and every KV block before it.

It applies plans to a plain-Python batch, independent of the engine's own, and keeps a KV cache in which every entry is the
hash of the whole prefix up to it. Sampling reads the chain of a row through its block table, so any mistake in block
tables, positions, order or ownership changes the stream or raises.
"""

from __future__ import annotations

import zlib
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import pytest

from actorllm.kvcache.prefix_index import extra_key, hash_blocks
from actorllm.messages import LateInputs, StepPlan, StepResult, Submit, pack, unpack
from actorllm.scheduling.policy import load_policy
from actorllm.scheduling.scheduler import Scheduler

VOCAB = 97
EOS = 5
BLOCK_SIZE = 4


def chain(previous: int, token: int) -> int:
    return zlib.crc32(f"{previous},{token}".encode())


def draw(prefix: int, seed: int, index: int, vocab: int = VOCAB) -> int:
    return zlib.crc32(f"{prefix},{seed},{index}".encode()) % vocab


def reference_stream(prompt: Sequence[int], seed: int, count: int, vocab: int = VOCAB) -> list[int]:
    """What a request's first `count` tokens must be, whatever happens around it."""
    prefix = 0
    for token in prompt:
        prefix = chain(prefix, token)
    out: list[int] = []
    for index in range(count):
        out.append(draw(prefix, seed, index, vocab))
        prefix = chain(prefix, out[-1])
    return out


@dataclass
class Row:
    tokens: list[int]
    num_outputs_at_start: int
    computed: int
    blocks: list[int]
    seed: int
    adapter_id: int
    is_pooling: bool
    num_known_at_start: int = 0


@dataclass
class ScriptedWorker:
    block_size: int
    num_blocks: int
    vocab: int = VOCAB
    rows: dict[int, Row] = field(default_factory=dict)
    kv: dict[tuple[int, int], int] = field(default_factory=dict)
    decode: list[int] = field(default_factory=list)
    zeroed: list[int] = field(default_factory=list)
    copied: list[tuple[int, int]] = field(default_factory=list)
    late_steps: list[tuple[int, list[int]]] = field(default_factory=list)
    tokens_per_row: Callable[[int, int], int] | None = None
    """(slot, token index) -> how many tokens the row returns."""

    def run(self, plan: StepPlan, late: LateInputs | None = None) -> StepResult:
        kind, scalars, arrays = pack(plan)  # what it sees has been through the wire format
        plan = unpack(kind, scalars, [a.copy() for a in arrays])
        self._apply(plan)
        tokens: list[int] = []
        counts: list[int] = []
        vectors: list[float] = []
        vector_rows: list[int] = []
        for slot in self.decode:
            row = self.rows[slot]
            assert row.computed == len(row.tokens) - 1, (
                f"decode row {slot} stands at {row.computed} of {len(row.tokens)}"
            )
            self._compute(row, 1)
            got = self._sample(slot, row)
            tokens += got
            counts.append(len(got))
        completed = []
        for slot, count in zip(plan.prefill_slots.tolist(), plan.prefill_counts.tolist(), strict=True):
            row = self.rows[slot]
            assert slot not in self.decode, f"slot {slot} decodes and prefills in one step"
            assert 0 < count <= len(row.tokens) - row.computed, f"slot {slot}: {count} tokens beyond the known ones"
            self._compute(row, count)
            if row.computed == len(row.tokens):
                if row.is_pooling:
                    vector_rows.append(len(counts))
                    vectors += [float(row.tokens[0]), float(len(row.tokens))]
                    counts.append(0)
                else:
                    got = self._sample(slot, row)
                    tokens += got
                    counts.append(len(got))
                    completed.append(slot)
        if plan.late_slots.size:
            assert late is not None, f"step {plan.step} was sampled without its late inputs"
            assert late.step == plan.step
            self.late_steps.append((plan.step, plan.late_slots.tolist()))
        plain = all(c == 1 for c in counts)
        return StepResult(
            step=plan.step,
            tokens=np.array(tokens, np.int32),
            counts=np.array([] if plain else counts, np.int32),
            vector_rows=np.array(vector_rows, np.int32),
            vectors=np.array(vectors, np.float32),
        )

    def _apply(self, plan: StepPlan) -> None:
        for slot in plan.freed.tolist():
            self.rows.pop(slot, None)
        at = stop = block_at = 0
        for i, new in enumerate(plan.new):
            slot = int(new["slot"])
            assert slot not in self.rows, f"slot {slot} is new and was not freed"
            n, b = int(new["num_tokens"]), int(plan.new_num_blocks[i])
            self.rows[slot] = Row(
                tokens=plan.new_tokens[at : at + n].tolist(),
                num_outputs_at_start=int(new["num_outputs"]),
                computed=int(new["num_computed"]),
                blocks=plan.new_blocks[block_at : block_at + b].tolist(),
                seed=int(new["seed"]),
                adapter_id=int(new["adapter_id"]),
                is_pooling=bool(new["is_pooling"]),
                num_known_at_start=n,
            )
            at += n
            block_at += b
            stop += int(new["num_stop_ids"])
        assert at == plan.new_tokens.size
        assert block_at == plan.new_blocks.size
        assert stop == plan.new_stop_ids.size
        for slot, block in zip(plan.extended_slots.tolist(), plan.extended_blocks.tolist(), strict=True):
            self.rows[slot].blocks.append(block)
        for block in plan.zero_blocks.tolist():
            self.zeroed.append(block)
            for offset in range(self.block_size):
                self.kv.pop((block, offset), None)
        self.copied += list(zip(plan.copy_sources.tolist(), plan.copy_targets.tolist(), strict=True))
        if plan.decode_slots is not None:
            self.decode = plan.decode_slots.tolist()
        assert set(self.decode) <= set(self.rows), "a decode row is not in the batch"
        for slot in plan.new["slot"].tolist():
            row, prefix = self.rows[slot], 0
            for position in range(row.computed):
                prefix = chain(prefix, row.tokens[position])
                assert self._entry(row, position) == prefix, f"slot {slot} was given the KV of other tokens"

    def _compute(self, row: Row, count: int) -> None:
        for _ in range(count):
            position = row.computed
            previous = self._entry(row, position - 1) if position else 0
            block, offset = divmod(position, self.block_size)
            assert block < len(row.blocks), f"position {position} has no block"
            holders = sum(row.blocks[block] in other.blocks for other in self.rows.values())
            assert holders == 1, "a block is written that another row holds, too"
            self.kv[row.blocks[block], offset] = chain(previous, row.tokens[position])
            row.computed += 1

    def _entry(self, row: Row, position: int) -> int:
        block, offset = divmod(position, self.block_size)
        return self.kv[row.blocks[block], offset]

    def _sample(self, slot: int, row: Row) -> list[int]:
        first = row.num_outputs_at_start + len(row.tokens) - row.num_known_at_start
        count = 1 if self.tokens_per_row is None else self.tokens_per_row(slot, first)
        if count == 0:
            row.computed -= 1
            return []
        got: list[int] = []
        for i in range(count):
            if i:
                self._compute(row, 1)
            got.append(draw(self._entry(row, row.computed - 1), row.seed, first + i, self.vocab))
            row.tokens.append(got[-1])
        return got


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
    }
    return Scheduler(**(arguments | overrides))


def make_submit(rid: int, prompt: Sequence[int], **overrides: Any) -> Submit:
    tokens = np.array(prompt, np.int32)
    key = extra_key(overrides.get("cache_salt"), overrides.get("adapter_id", 0))
    arguments: dict[str, Any] = {
        "rid": rid,
        "arrival": 0.0,
        "prompt": tokens,
        "max_tokens": 8,
        "seed": rid,
        "block_hashes": hash_blocks(tokens, BLOCK_SIZE, key),
    }
    return Submit(**(arguments | overrides))


class Engine:
    """A scheduler and a scripted worker, driven by hand; collects what every request got."""

    def __init__(self, **overrides: Any) -> None:
        self.scheduler = make_scheduler(**overrides)
        self.worker = ScriptedWorker(self.scheduler.kv.block_size, self.scheduler.kv.pool.num_blocks)
        self.results: list[StepResult] = []
        self.streams: dict[int, list[int]] = {}
        self.ends: dict[int, Any] = {}
        self.vectors: dict[int, list[float]] = {}
        self.plans: list[StepPlan] = []
        self.now = 0.0

    def submit(self, rid: int, prompt: Sequence[int], **overrides: Any) -> None:
        submit = make_submit(rid, prompt, **overrides)
        self.streams.setdefault(rid, submit.output.tolist())
        self._ended([end] if (end := self.scheduler.submit(0, submit, self.now)) else [])

    def _ended(self, ends: Sequence[Any]) -> None:
        for end in ends:
            rid = end.sequence.key[1]
            assert rid not in self.ends, f"request {rid} ended twice"
            self.ends[rid] = end

    def launch(self) -> StepPlan | None:
        self.now += 0.01
        plan = self.scheduler.schedule(self.now)
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

    def run(self, max_steps: int = 1000) -> None:
        """Until nothing is left to do."""
        for _ in range(max_steps):
            while self.scheduler.has_room and self.launch() is not None:
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
