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
from actorllm.messages import LateInputs, StepPlan, StepResult, Submit, pack, sequences_of, unpack
from actorllm.messages.schema import SCHEDULER, violation
from actorllm.scheduling.loading import load_policy
from actorllm.scheduling.scheduler import Scheduler

VOCAB = 97
EOS = 5
BLOCK_SIZE = 4
SIBLING = 1_000
"""How far apart the seeds of two sample indices are for `reference_stream`."""


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


@dataclass(eq=False)
class Row:
    tokens: list[int]
    num_outputs_at_start: int
    computed: int
    blocks: list[int]
    seed: int
    adapter_id: int
    pooling: bool
    sample_index: int = 0
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
    shared: list[tuple[int, int, int]] = field(default_factory=list)
    """(step, slot, slot of the row it samples from) of every fork."""
    late_steps: list[tuple[int, list[int]]] = field(default_factory=list)
    tokens_per_row: Callable[[int, int], int] | None = None
    """(slot, token index) -> how many tokens the row returns."""

    def run(self, plan: StepPlan, late: LateInputs | None = None) -> StepResult:
        assert violation(plan, SCHEDULER) is None
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
        forks = [(int(new["slot"]), int(new["source"])) for new in plan.new if new["source"] >= 0]
        self.shared += [(plan.step, slot, source) for slot, source in forks]
        for slot, count in zip(plan.prefill_slots.tolist(), plan.prefill_counts.tolist(), strict=True):
            row = self.rows[slot]
            assert slot not in self.decode, f"slot {slot} decodes and prefills in one step"
            assert 0 < count <= len(row.tokens) - row.computed, f"slot {slot}: {count} tokens beyond the known ones"
            self._compute(row, count, [self.rows[fork] for fork, source in forks if source == slot])
            if row.computed == len(row.tokens):
                if row.pooling:
                    vector_rows.append(len(counts))
                    vectors += [float(row.tokens[0]), float(len(row.tokens))]
                    counts.append(0)
                else:
                    got = self._sample(slot, row)
                    tokens += got
                    counts.append(len(got))
                    completed.append(slot)
        for slot, source in forks:
            row, other = self.rows[slot], self.rows[source]
            num_prompt = len(row.tokens)
            assert source in completed, f"slot {source} samples nothing to share"
            assert row.computed == 0, f"fork {slot} is in another step"
            assert row.tokens == other.tokens[:num_prompt], f"slot {slot} is a fork of another prompt"
            num_full = num_prompt // self.block_size
            assert row.blocks[:num_full] == other.blocks[:num_full], f"fork {slot} does not share its full blocks"
            assert not set(row.blocks[num_full:]) & set(other.blocks), f"fork {slot} shares blocks it will write to"
            row.computed = num_prompt
            got = self._sample(slot, row, self._entry(other, num_prompt - 1))
            tokens += got
            counts.append(len(got))
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
                pooling=bool(new["pooling"]),
                sample_index=int(new["sample_index"]),
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
        copies = list(zip(plan.copy_sources.tolist(), plan.copy_targets.tolist(), strict=True))
        contents = [[self.kv.get((source, offset)) for offset in range(self.block_size)] for source, _ in copies]
        for (_, target), content in zip(copies, contents, strict=True):
            for offset, entry in enumerate(content):
                self.kv.pop((target, offset), None)
                if entry is not None:
                    self.kv[target, offset] = entry
        self.copied += copies
        for block in plan.zero_blocks.tolist():
            self.zeroed.append(block)
            for offset in range(self.block_size):
                self.kv.pop((block, offset), None)
        if plan.decode_slots is not None:
            self.decode = plan.decode_slots.tolist()
        assert set(self.decode) <= set(self.rows), "a decode row is not in the batch"
        for slot in plan.new["slot"].tolist():
            row, prefix = self.rows[slot], 0
            for position in range(row.computed):
                prefix = chain(prefix, row.tokens[position])
                assert self._entry(row, position) == prefix, f"slot {slot} was given the KV of other tokens"

    def _compute(self, row: Row, count: int, forks: Sequence[Row] = ()) -> None:
        """forks: rows of this step that will have what is computed here."""
        for _ in range(count):
            position = row.computed
            previous = self._entry(row, position - 1) if position else 0
            block, offset = divmod(position, self.block_size)
            assert block < len(row.blocks), f"position {position} has no block"
            holders = sum(row.blocks[block] in other.blocks for other in self.rows.values() if other not in forks)
            entry = chain(previous, row.tokens[position])
            is_again = self.kv.get((row.blocks[block], offset)) == entry
            assert holders == 1 or is_again, "a block is written that another row holds, too"
            self.kv[row.blocks[block], offset] = entry
            row.computed += 1

    def _entry(self, row: Row, position: int) -> int:
        block, offset = divmod(position, self.block_size)
        return self.kv[row.blocks[block], offset]

    def _sample(self, slot: int, row: Row, shared: int | None = None) -> list[int]:
        """shared: the prefix that a fork samples after, which is not among its own blocks yet."""
        first = row.num_outputs_at_start + len(row.tokens) - row.num_known_at_start
        count = 1 if self.tokens_per_row is None else self.tokens_per_row(slot, first)
        if count == 0:
            row.computed -= 1
            return []
        got: list[int] = []
        for i in range(count if shared is None else 1):
            if i:
                self._compute(row, 1)
            prefix = self._entry(row, row.computed - 1) if shared is None else shared
            got.append(draw(prefix, row.seed + SIBLING * row.sample_index, first + i, self.vocab))
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

    def submit_several(self, rid: int, n: int, prompt: Sequence[int], **overrides: Any) -> list[int]:
        """A request of n sequences, the first of them `rid`, with its seed; their rids."""
        rids = [rid + i for i in range(n)]
        submit = make_submit(rid, prompt, siblings=np.array(rids[1:], np.int32), **overrides)
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
        self.worker = ScriptedWorker(self.scheduler.kv.block_size, self.scheduler.kv.pool.num_blocks)
        self.scheduler.check_integrity()

    def run(self) -> None:
        """Until nothing is left to do."""
        max_steps = 1000 + 100 * len(self.streams)  # one after the other, in small chunks, and some of them again
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
