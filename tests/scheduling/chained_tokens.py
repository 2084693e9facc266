"""`ScriptedWorker`: a worker without a model, whose next token depends on every token and every KV block before it.

It applies plans to a plain-Python batch, independent of the engine's own, and keeps a KV cache in which every entry is the
hash of the whole prefix up to it. Sampling reads the chain of a row through its block table, so any mistake in block
tables, positions, order or ownership changes the stream or raises.
"""

from __future__ import annotations

import zlib
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

import numpy as np

from actorllm.messages import LateInputs, StepPlan, StepResult, pack, unpack
from actorllm.messages.schema import SCHEDULER, violation

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
    vector_size: int = 2
    rows: dict[int, Row] = field(default_factory=dict)
    kv: dict[tuple[int, int], int] = field(default_factory=dict)
    decode: list[int] = field(default_factory=list)
    decode_of_lane: dict[int, list[int]] = field(default_factory=dict)
    zeroed: list[int] = field(default_factory=list)
    copied: list[tuple[int, int]] = field(default_factory=list)
    shared: list[tuple[int, int, int]] = field(default_factory=list)
    """(step, slot, slot of the row it samples from) of every fork."""
    late_steps: list[tuple[int, list[int]]] = field(default_factory=list)
    tokens_per_row: Callable[[int, int], int] | None = None
    """(slot, token index) -> how many tokens the row returns."""
    drafts_per_row: Callable[[int, int], tuple[int, int]] | None = None
    """(slot, token index) -> how many drafts a decode row has, and how many of them are right; as far as the plan allows."""

    def run(self, plan: StepPlan, late: LateInputs | None = None) -> StepResult:
        assert violation(plan, SCHEDULER) is None
        kind, scalars, arrays = pack(plan)  # what it sees has been through the wire format
        plan = unpack(kind, scalars, [a.copy() for a in arrays])
        self._apply(plan)
        tokens: list[int] = []
        counts: list[int] = []
        vectors: list[float] = []
        vector_rows: list[int] = []
        drafted: list[int] = []
        for slot in self.decode:
            row = self.rows[slot]
            assert row.computed == len(row.tokens) - 1, (
                f"decode row {slot} stands at {row.computed} of {len(row.tokens)}"
            )
            self._compute(row, 1)
            num_drafts, num_right = self._drafts(slot, row, plan.max_drafts)
            drafted.append(num_drafts)
            got = self._sample(slot, row, num_right=num_right) if num_right else self._sample(slot, row)
            for position in range(row.computed, row.computed + num_drafts - num_right):
                self._spoil(row, position)
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
                    vectors += [float(row.tokens[0]), float(len(row.tokens)), *[0.0] * (self.vector_size - 2)]
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
            num_drafted=np.array(drafted + [0] * (len(counts) - len(drafted)) if any(drafted) else [], np.int32),
        )

    def _drafts(self, slot: int, row: Row, most: int) -> tuple[int, int]:
        if self.drafts_per_row is None or not most:
            return 0, 0
        first = row.num_outputs_at_start + len(row.tokens) - row.num_known_at_start
        num_drafts, num_right = self.drafts_per_row(slot, first)
        return min(num_drafts, most), min(num_drafts, num_right, most)

    def _spoil(self, row: Row, position: int) -> None:
        """A draft was wrong: what it left behind is the KV of no token."""
        block, offset = divmod(position, self.block_size)
        assert block < len(row.blocks), f"a draft at position {position} has no block"
        assert sum(row.blocks[block] in other.blocks for other in self.rows.values()) == 1, "of a block of another row"
        self.kv[row.blocks[block], offset] = -1

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
        lane = int(plan.lane[0]) if plan.lane.size else 0
        if plan.decode_slots is not None:
            self.decode_of_lane[lane] = plan.decode_slots.tolist()
        self.decode = self.decode_of_lane.get(lane, [])
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

    def _sample(self, slot: int, row: Row, shared: int | None = None, num_right: int = 0) -> list[int]:
        """shared: the prefix that a fork samples after, which is not among its own blocks yet."""
        first = row.num_outputs_at_start + len(row.tokens) - row.num_known_at_start
        count = 1 if self.tokens_per_row is None else self.tokens_per_row(slot, first)
        count += num_right
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
