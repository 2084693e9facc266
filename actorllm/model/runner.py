"""A worker's model: weights, KV cache and persistent batch, driven by step plans.

Life: `load` -> `profile_num_blocks` -> `allocate` -> `execute` and `sample`, again and again -> `close`. `execute` applies a
plan and runs the forward, `sample` chooses the tokens; between the two a worker may wait for `LateInputs`. `step` does both. A step
that raises counts for nothing: what it may have written into the cache is cleared, and the caller reports `StepFailed`,
whereupon the scheduler frees all slots and begins again. Whether it was the requests' fault, `check_itself` says: a step of
the runner's own, in a batch and a cache that nobody else has.

Not thread-safe: one thread owns a runner and everything torch. Called by the worker actor.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
from numpy.typing import NDArray

from actorllm import clock
from actorllm.config import EngineConfig, read_model_folder
from actorllm.errors import EngineError
from actorllm.logprobs import LogprobSpan, columns_of
from actorllm.messages import I32, NO_I32, POOLING_CODES, LateInputs, NewRow, StepPlan, StepResult, pack_rows
from actorllm.model import logprobs, memory, threads
from actorllm.model.attention import KVCache
from actorllm.model.inputs import PersistentBatch, StepInputs
from actorllm.model.logits import apply_masks
from actorllm.model.parallel import Ranks
from actorllm.model.pooled_states import PooledStates
from actorllm.model.registry import CausalLM, load_model, model_plan
from actorllm.model.sampler import Sampler, SamplingColumns
from actorllm.model.threads import Team

if TYPE_CHECKING:
    from actorllm.model.decoder import DecoderConfig
    from actorllm.model.encoder import EncoderPlan
    from actorllm.model.transformers_backend import TransformersPlan

MAX_LOGITS_BYTES = 64 << 20
"""float32 logits that exist at a time; more rows than that are sampled in chunks."""

PROMPT_LOGITS_BYTES = 32 << 20
"""Of the logits of prompts whose log-probabilities are wanted: their positions are worked off in slices."""

ENTRY_BYTES = 16
"""Of one id with its log-probability, while they are made."""

DEFAULT_MEMORY_SHARE = 0.4
"""Of the available memory, for the KV cache, when neither its size nor a share is configured."""

DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16}

NUM_CHECK_ROWS, CHECK_PROMPT = 4, 2
"""Of the step of the runner's own: so many rows of so many tokens, from all over the vocabulary."""

logger = logging.getLogger(__name__)


@dataclass(slots=True)
class SamplingRows:
    """The result rows of a step that sample, and how. Kept until the rows change."""

    version: int
    rows: NDArray[np.intp] | None
    """Which rows of the result; None: all, no row is pooled."""
    states: NDArray[np.intp] | None
    """Which hidden state each sample comes from; None: the rows of the result have one each."""
    slots: I32  # [num_samples]
    chunks: list[tuple[int, int, SamplingColumns]]
    """[start, end) of the samples, so that the logits of a chunk fit in MAX_LOGITS_BYTES."""
    has_rules: bool
    """Some row's logits are changed before it is sampled."""
    num_logprobs: list[tuple[int, int]]
    """(sample, how many of the most likely) for those that want log-probabilities."""
    logprob_ids: dict[int, NDArray[np.int64]]
    """By sample, for those that want them of these ids."""


@dataclass(slots=True)
class StepHandle:
    """A step between its forward and its sampling."""

    step: int
    inputs: StepInputs
    sampling: SamplingRows
    hidden: torch.Tensor  # [num_states, hidden_size] final hidden states of the result rows, which forks share
    logits: torch.Tensor | None
    """float32 [num_samples, vocab_size]; None: made chunk by chunk while sampling."""
    late_slots: I32
    started: float
    prompt_logprobs: list[LogprobSpan]
    bad_prompts: I32
    """Prefill rows of the plan whose states are not finite."""


@dataclass(frozen=True, slots=True)
class PromptPart:
    """Consecutive tokens of a prompt whose log-probabilities are wanted."""

    row: int
    """Among the prefill rows of the step."""
    first: int
    """Position of the first of them in the prompt."""
    where: NDArray[np.int64]
    """Which token of the step has the logits of each."""
    tokens: I32

    def part(self, start: int, stop: int) -> PromptPart:
        """Those from the start-th on."""
        return PromptPart(self.row, self.first + start, self.where[start:stop], self.tokens[start:stop])


def slices(parts: list[PromptPart], size: int) -> Iterator[list[PromptPart]]:
    """The same parts, cut so that each list has `size` tokens, and the last one what is left."""
    full: list[PromptPart] = []
    room = size
    for part in parts:
        at, end = 0, len(part.where)
        while at < end:
            full.append(part.part(at, at + room))
            at += len(full[-1].where)
            room -= len(full[-1].where)
            if not room:
                yield full
                full, room = [], size
    if full:
        yield full


class ModelRunner:
    """One rank's model."""

    launches_ahead = False
    """Steps are done when they are sampled; else they are launched, and finished later (`actors.pipeline`)."""
    profiled: tuple[torch.profiler.ProfilerActivity, ...] = (torch.profiler.ProfilerActivity.CPU,)
    """What a profile shows."""

    def __init__(
        self, config: EngineConfig, rank: int = 0, *, show_progress: bool | None = None, plan: Any = None
    ) -> None:
        """show_progress: of loading; None: where standard error is a terminal. plan: of the model, where it is known."""
        self.config = config
        self.rank = rank
        self.dtype = DTYPES[config.model.dtype]
        self._show_progress = show_progress
        if plan is None:
            _, hf = read_model_folder(config.model.path)
            plan = model_plan(config.model, hf)
        self.model_config: DecoderConfig | TransformersPlan | EncoderPlan = plan
        self._is_encoder = config.model.pooler is not None and config.model.pooler.is_encoder
        self.decoder: CausalLM
        self.cache: KVCache
        self.batch: PersistentBatch
        self.ranks = Ranks()
        self.is_torn = False
        """An exception has left a step that the other ranks are still in: this rank cannot go on."""
        self._team: Team
        self._available_at_first = memory.available_bytes()
        self._sampler = Sampler(self.model_config.vocab_size)
        self._rows: SamplingRows | None = None
        self._written: NDArray[Any] = NO_I32
        """Where in the cache the last step wrote, until it is known to have worked."""
        self._profile: torch.profiler.profile | None = None
        self._pooled = PooledStates()
        self._no_hidden = torch.empty(0, self.model_config.hidden_size, dtype=self.dtype)

    def close(self) -> None:
        """Let go of weights, cache and requests, whoever still holds this object, and leave the other ranks. Idempotent.

        Nothing else may be called afterwards.
        """
        for name in ("decoder", "cache", "batch"):
            vars(self).pop(name, None)
        self._rows = None
        self._pooled.clear()
        self.ranks.close()
        self.ranks = Ranks()

    # Before the first step --------------------------------------------------------------------------------------------

    @torch.inference_mode()
    def load(self) -> None:
        """Read the weights, or draw them. Raises ModelError."""
        torch.set_num_threads(threads.num_threads(self.config))
        self.ranks = Ranks.connect(self.config, self.rank)
        self.decoder = load_model(self.model_config, self.config.model, self.dtype, self._show_progress, self.ranks)
        num_products = 4 * self.model_config.num_layers + 1
        num_weights = self.decoder.num_bytes / self.dtype.itemsize
        self._team = Team(
            threads.num_threads(self.config),
            self.decoder.num_bytes / num_products,
            2 * num_weights / num_products,
            num_products,
        )

    @property
    def block_bytes(self) -> int:
        """Memory of one KV block over all layers."""
        c, num_kv_heads = self.model_config, self.decoder.num_kv_heads
        return c.num_layers * 2 * num_kv_heads * c.head_dim * self.config.cache.block_size * self.dtype.itemsize

    def profile_num_blocks(self) -> int:
        """How many KV blocks this rank has memory for.

        An explicit kv_cache_memory_bytes is taken at its word. Else the largest step is run once to see what it needs
        beside the cache, and the cache gets the rest of the configured share of the available memory, or by default
        what max_num_seqs sequences of max_model_len need, within 40 % of the available memory.
        """
        cache, limits = self.config.cache, self.config.scheduler
        if self._is_encoder:  # its blocks are counted, and hold nothing
            return limits.max_num_seqs * -(-self.config.model.max_model_len // cache.block_size)
        if cache.kv_cache_memory_bytes is not None:
            available = memory.available_bytes()
            if cache.kv_cache_memory_bytes > available:  # said before the kernel acts: these are then the last words
                logger.warning(
                    "kv_cache_memory_bytes=%d is more than the %d bytes of memory that are available; the process will be "
                    "killed when the cache is filled",
                    cache.kv_cache_memory_bytes,
                    available,
                )
            return cache.kv_cache_memory_bytes // self.block_bytes
        working = self._profile_working_bytes()
        if cache.memory_utilization is not None:
            used = self._available_at_first - memory.available_bytes()
            budget = int(self._available_at_first * cache.memory_utilization / self.ranks.size) - max(0, used) - working
            return max(0, budget // self.block_bytes)
        blocks_per_seq = -(-(self.config.model.max_model_len + limits.num_lookahead_tokens) // cache.block_size)
        wanted = limits.max_num_seqs * blocks_per_seq
        budget = int(memory.available_bytes() * DEFAULT_MEMORY_SHARE / self.ranks.size) - working
        return max(0, min(wanted, budget // self.block_bytes))

    @torch.inference_mode()
    def allocate(self, num_blocks: int) -> None:
        """Make the KV cache and the empty batch. Pages are mapped when they are first written."""
        c, size = self.model_config, self.config.cache.block_size
        shape = (1, 1, 1) if self._is_encoder else (c.num_layers, self.decoder.num_kv_heads, c.head_dim)
        self.cache = KVCache(*shape, num_blocks, size, self.dtype)
        self.batch = self._empty_batch()
        self._rows = None
        self._pooled.clear()
        self._is_half_done = False

    def _empty_batch(self) -> PersistentBatch:
        config, cache = self.config, self.cache
        length = config.model.max_model_len + config.scheduler.num_lookahead_tokens
        return PersistentBatch(
            vocab_size=self.model_config.vocab_size,
            block_size=cache.block_size,
            num_blocks=cache.num_blocks,
            max_blocks=-(-length // cache.block_size),
            padding_block=cache.padding_block,
            embedding_bytes=config.model.embedding_bytes,
        )

    @torch.inference_mode()
    def forget_requests(self) -> None:
        """Keep the weights and the memory; nothing that was computed is looked at again.

        Blocks with values that are not finite were zeroed by the step that made them, unless that was left half done.
        """
        old = self.batch
        if self._is_half_done:
            self.cache.zero(np.arange(old.num_blocks, dtype=np.int32))
        self.is_torn = self._is_half_done = False
        self.batch = self._empty_batch()
        # What is kept of a row set (in the sampler, in the attention) is told by these numbers: none may come again.
        self.batch.rows_version = old.rows_version + 1
        self.batch.decode_version = old.decode_version + 1
        self._rows = None
        self._pooled.clear()

    def _largest_steps(self) -> tuple[int, list[StepPlan]]:
        """A step that prefills as much as a step may, the decode step behind it if there is one, and how many blocks they need."""
        config, size = self.config, self.config.cache.block_size
        tokens, seqs = config.scheduler.max_num_batched_tokens, config.scheduler.max_num_seqs
        longest = max(1, config.model.max_model_len - (config.model.pooler is None))  # one token is left to be decoded
        counts = np.minimum(longest, np.arange(tokens, 0, -longest, dtype=np.int32))[:seqs]
        per_seq = -(-(counts + (config.model.pooler is None)) // size)
        slots = np.arange(len(counts), dtype=np.int32)
        pooling = 0 if config.model.pooler is None else POOLING_CODES["mean"]  # which takes the most room
        prefill = StepPlan(
            step=0,
            new_rows=pack_rows(NewRow(slot, count, pooling=pooling) for slot, count in enumerate(counts.tolist())),
            new_tokens=np.zeros(int(counts.sum()), np.int32),
            new_num_blocks=per_seq,
            new_blocks=np.arange(per_seq.sum(), dtype=np.int32),
            prefill_slots=slots,
            prefill_counts=counts,
        )
        plans = [prefill]
        if config.model.pooler is None:
            plans.append(StepPlan(step=1, decode_slots=slots))
        return int(per_seq.sum()), plans

    def _profile_working_bytes(self) -> int:
        """Peak memory of the largest prefill and of a decode step, beside weights and cache."""
        num_blocks, plans = self._largest_steps()
        self.allocate(num_blocks)
        size, seqs = self.config.cache.block_size, self.config.scheduler.max_num_seqs
        before = memory.resident_bytes()
        memory.reset_peak()
        for plan in plans:
            self.step(plan)
        peak = max(0, memory.peak_bytes() - before)
        logits = min(seqs * self.model_config.vocab_size * 4, MAX_LOGITS_BYTES)
        context = self.config.model.max_model_len * self.block_bytes // (size * self.model_config.num_layers)
        del self.cache
        return peak + 3 * logits + context

    # Steps ------------------------------------------------------------------------------------------------------------

    def start_profile(self) -> None:
        """Trace every torch operation from now on. Raises EngineError when one is under way."""
        if self._profile is not None:
            raise EngineError("a profile is under way already; stop it first")
        self._profile = torch.profiler.profile(activities=list(self.profiled))
        self._profile.start()

    def stop_profile(self, folder: str, prefix: str = "") -> str:
        """Write the trace, in the Chrome format, into a folder; returns its path. Raises EngineError, OSError."""
        profile, self._profile = self._profile, None
        if profile is None:
            raise EngineError("no profile is under way; start one first")
        profile.stop()
        path = Path(folder)
        path.mkdir(parents=True, exist_ok=True)
        file = path / f"{prefix}rank{self.rank}.json"
        profile.export_chrome_trace(str(file))
        return str(file)

    @staticmethod
    def is_memory_shortage(error: Exception) -> bool:
        """Whether a step has failed for want of memory, so that a smaller one may go through."""
        return memory.is_shortage(error)

    def step(self, plan: StepPlan, late: LateInputs | None = None) -> StepResult:
        """Both halves of a step."""
        return self.sample(self.execute(plan), late)

    def check_itself(self) -> None:
        """Compute the simplest requests that there are: a prefill and a decode step, with nothing of anybody's in them.

        To be called between two steps, by every rank after the same one. Raises whatever a step raises, and EngineError
        when no row has finite logits. The requests, their KV and what a step that raised has left are as they were before.
        """
        kept = self.cache, self.batch, self._rows, self._written, self._is_half_done, self._pooled
        self._pooled = PooledStates()
        try:
            for result in map(self.step, self._check_plans()):
                if result.came_to_nothing:
                    raise EngineError("the model's logits are not finite, whatever the tokens")
        finally:
            self.cache, self.batch, self._rows, self._written, self._is_half_done, self._pooled = kept

    def _check_plans(self) -> Iterator[StepPlan]:
        """The two steps, for the batch and the cache that are made here. Models that make vectors have only the first."""
        is_pooling = self.config.model.pooler is not None
        size = self.config.cache.block_size
        per_row = -(-(CHECK_PROMPT + 1) // size)
        self.allocate(NUM_CHECK_ROWS * per_row)
        slots = np.arange(NUM_CHECK_ROWS, dtype=np.int32)
        num_tokens = NUM_CHECK_ROWS * CHECK_PROMPT
        yield StepPlan(
            step=0,
            new_rows=pack_rows(
                NewRow(slot, CHECK_PROMPT, temperature=slot % 2, pooling=POOLING_CODES["last"] if is_pooling else 0)
                for slot in slots.tolist()
            ),
            new_tokens=(np.arange(num_tokens) * (self.model_config.vocab_size - 1) // num_tokens).astype(np.int32),
            new_num_blocks=np.full(NUM_CHECK_ROWS, per_row, np.int32),
            new_blocks=np.arange(NUM_CHECK_ROWS * per_row, dtype=np.int32),
            prefill_slots=slots,
            prefill_counts=np.full(NUM_CHECK_ROWS, CHECK_PROMPT, np.int32),
        )
        if not is_pooling:
            yield StepPlan(step=1, decode_slots=slots)

    @torch.inference_mode()
    def execute(self, plan: StepPlan) -> StepHandle:
        """Apply the plan and run the forward; the rows have advanced when this returns. Raises on failure."""
        started = clock.now()
        self._is_half_done = True
        self.is_torn = self.ranks.size > 1  # whatever it raises: no other rank may, and they wait for this one then
        self._written = NO_I32
        self.batch.apply(plan)
        if plan.freed.size:
            self._pooled.drop(plan.freed)
        if plan.copy_sources.size:  # first: a block may be zeroed because its owner failed, and its fork did not
            self.cache.copy(plan.copy_sources, plan.copy_targets)
        if plan.zero_blocks.size:
            self.cache.zero(plan.zero_blocks)
        inputs = self.batch.inputs(plan)
        sampling = self._sampling_rows(inputs)
        self._written = inputs.kv_slots
        hidden, logits = self._no_hidden, None
        bad_prompts = NO_I32
        prompt_logprobs: list[LogprobSpan] = []
        if len(inputs.token_ids):
            size = self._team.size(len(inputs.token_ids), len(inputs.result_slots))
            torch.set_num_threads(size)
            wall, cpu = time.perf_counter(), time.thread_time()
            states = self.decoder.forward(inputs, self.cache)
            if inputs.prefill_slots:
                bad_prompts = self._clear_bad_prompts(states, inputs)
                pooling = self.batch.columns.pooling[inputs.prefill_slots]
                if pooling.any():
                    self._pooled.observe(inputs, pooling, lambda where: self.decoder.select(states, where))
            if len(inputs.result_slots):
                hidden = self.decoder.select(states, inputs.result_tokens)
            if len(sampling.chunks) == 1:
                logits = self._logits(hidden, sampling, 0, len(sampling.slots))
            self._team.observe(size, time.perf_counter() - wall, time.thread_time() - cpu)
            if self.batch.prompt_logprobs:
                prompt_logprobs = self._prompt_logprobs(inputs, states)
        self.batch.advance(inputs)
        return StepHandle(
            plan.step, inputs, sampling, hidden, logits, plan.late_slots, started, prompt_logprobs, bad_prompts
        )

    def _prompt_parts(self, inputs: StepInputs) -> dict[int, list[PromptPart]]:
        """Of this step's chunks, what wants log-probabilities, by how many of the most likely tokens."""
        parts: dict[int, list[PromptPart]] = {}
        for row, slot in enumerate(inputs.prefill_slots):
            wanted = self.batch.prompt_logprobs.get(slot)
            if wanted is None:
                continue
            computed = inputs.prefill_first[row]
            first, last = wanted.of_chunk(computed, inputs.prefill_counts[row])
            if first < last:
                # a token's logits are those of the position before it
                where = np.arange(first, last) + (inputs.prefill_starts[row] - computed - 1)
                tokens = self.batch.known_tokens[slot][first:last]
                parts.setdefault(wanted.num_top, []).append(PromptPart(row, first, where, tokens))
            wanted.first = max(first, last)
            if wanted.first >= wanted.num_prompt:
                del self.batch.prompt_logprobs[slot]
        return parts

    def _prompt_logprobs(self, inputs: StepInputs, states: torch.Tensor) -> list[LogprobSpan]:
        """Those of this step's chunks of the prompts that want them. states: hidden states of all tokens."""
        spans: list[LogprobSpan] = []
        for num_top, of_prompts in self._prompt_parts(inputs).items():
            row_bytes = self.dtype.itemsize * self.model_config.vocab_size + ENTRY_BYTES * (1 + num_top)
            most = max(1, PROMPT_LOGITS_BYTES // row_bytes)
            for slice_ in slices(of_prompts, most):  # of several prompts at once: larger products are faster
                logits = self.decoder.narrow_logits(
                    self.decoder.select(states, np.concatenate([p.where for p in slice_]))
                )
                if self.ranks.rank:
                    continue  # the others have no logits
                whole = logprobs.gather(logits, np.concatenate([p.tokens for p in slice_]), num_top)
                at = 0
                for part in slice_:
                    spans.append(whole.part(at, at + len(part.where)).of_row(part.row, part.first))
                    at += len(part.where)
        return spans

    @torch.inference_mode()
    def discard(self) -> None:
        """The last step raised: clear the blocks that it was to write. Nobody looked whether that was finite."""
        if self._written.size:
            self.cache.zero(np.unique(self._written // self.config.cache.block_size).astype(np.int32))
            self._written = NO_I32

    @torch.inference_mode()
    def sample(self, handle: StepHandle, late: LateInputs | None = None) -> StepResult:
        """Choose the tokens of an executed step and remember them as their slots' last tokens."""
        sampling = handle.sampling
        num_samples = len(sampling.slots)
        tokens = np.zeros(num_samples, np.int32)
        is_void = np.zeros(num_samples, np.bool_)
        counts: dict[int, int] = {}
        spans = handle.prompt_logprobs
        for start, end, columns in sampling.chunks:
            logits = handle.logits if handle.logits is not None else self._logits(handle.hidden, sampling, start, end)
            if self.ranks.rank:
                continue  # the first rank samples
            slots = sampling.slots[start:end]
            raw = logits
            has_logprobs = sampling.num_logprobs or sampling.logprob_ids
            if has_logprobs and (sampling.has_rules or handle.late_slots.size):
                raw = logits.clone()
            is_void[start:end], bad = self._prepare(logits, slots, late, has_rules=sampling.has_rules)
            if bad:
                counts |= {start + row: count for row, count in bad.items()}
            columns.token_index[:] = self.batch.columns.num_outputs[slots]
            tokens[start:end] = self._sampler.sample(logits, columns)
            if has_logprobs:
                spans = spans + self._logprobs(raw, sampling, start, tokens[start:end])
        if self.ranks.size > 1 and num_samples:
            told = is_void.astype(
                np.int32
            )  # one more than the values that are not finite, so that every rank knows them
            for row, count in counts.items():
                told[row] += count
            tokens, told = self.ranks.agree(np.stack((tokens, told)))
            is_void = told.astype(np.bool_)
            counts = {row: int(told[row]) - 1 for row in np.flatnonzero(told > 1).tolist()}
        self.is_torn = self._is_half_done = False
        if is_void.any():
            tokens[is_void] = 0
            # Here and not when the scheduler hears of it: by then a request that was preempted or aborted meanwhile has
            # lost its blocks, and the next owner would find them as they are.
            void = sampling.slots[is_void]
            # The last block of a prompt is not copied yet, and a fork may need it whose own choice was valid.
            needed = [source for slot, source in handle.inputs.forks if slot not in void]
            self.cache.zero(self.batch.exclusive_blocks(void[~np.isin(void, needed)] if needed else void))
        self.batch.store(sampling.slots, tokens)
        if sampling.rows is None:
            void = np.flatnonzero(is_void).astype(np.int32) if is_void.any() else NO_I32
            return StepResult(
                step=handle.step,
                tokens=tokens,
                nonfinite_rows=void,
                nonfinite_counts=_counts_of(void, counts),
                nonfinite_prefills=handle.bad_prompts,
                **columns_of(spans),
                started=handle.started,
                ended=clock.now(),
            )
        return self._result_with_vectors(handle, tokens, is_void, counts, spans)

    @staticmethod
    def _logprobs(raw: torch.Tensor, sampling: SamplingRows, start: int, tokens: I32) -> list[LogprobSpan]:
        """Of the samples from `start` on that want them, whose untouched logits are `raw`."""
        spans: list[LogprobSpan] = []
        here = [(i - start, num_top) for i, num_top in sampling.num_logprobs if start <= i < start + len(tokens)]
        for i, ids in sampling.logprob_ids.items():
            if start <= i < start + len(tokens):
                at = i - start
                row = i if sampling.rows is None else int(sampling.rows[i])
                spans.append(logprobs.gather_ids(raw[at : at + 1], int(tokens[at]), ids, row))
        for num_top in sorted({num_top for _, num_top in here}):
            samples = np.array([i for i, n in here if n == num_top], np.intp)
            logits = raw if len(samples) == len(raw) else raw.index_select(0, torch.from_numpy(samples))
            span = logprobs.gather(logits, tokens[samples], num_top)
            rows = samples + start if sampling.rows is None else sampling.rows[samples + start]
            spans += [
                LogprobSpan(row, 0, span.ids[i : i + 1], span.values[i : i + 1], span.ranks[i : i + 1])
                for i, row in enumerate(rows.tolist())
            ]
        return spans

    def _clear_bad_prompts(self, states: torch.Tensor, inputs: StepInputs) -> I32:
        """Look for prompts without finite states, and clear what they have written. Returns which prefill rows they are.

        Now, because a prompt that goes on in another step may be aborted or preempted before anyone sees its logits.
        """
        first = inputs.num_decodes
        is_finite = torch.isfinite(states[first:].sum(1, dtype=torch.float32)).numpy()
        if is_finite.all():
            self.batch.bad_slots.update(slot for slot, source in inputs.forks if source in self.batch.bad_slots)
            return NO_I32
        bad = np.flatnonzero(~is_finite) + first
        rows = [
            row
            for row, (start, count) in enumerate(zip(inputs.prefill_starts, inputs.prefill_counts, strict=True))
            if ((bad >= start) & (bad < start + count)).any()
        ]
        slots = [inputs.prefill_slots[row] for row in rows]
        slots += [slot for slot, source in inputs.forks if source in slots or source in self.batch.bad_slots]
        self.batch.bad_slots.update(slots)
        self.cache.zero(self.batch.exclusive_blocks(np.array(slots, np.int32)))
        return np.array(rows, np.int32)

    def _logits(self, hidden: torch.Tensor, sampling: SamplingRows, start: int, end: int) -> torch.Tensor:
        """float32 [end - start, vocab_size] of the samples [start, end)."""
        if sampling.states is not None:
            states, row_of = np.unique(sampling.states[start:end], return_inverse=True)
            logits = self.decoder.logits(hidden.index_select(0, torch.from_numpy(states)))
            return logits.index_select(0, torch.from_numpy(row_of))
        if sampling.rows is not None:
            return self.decoder.logits(hidden.index_select(0, torch.from_numpy(sampling.rows[start:end])))
        return self.decoder.logits(hidden if end - start == len(hidden) else hidden[start:end])

    def _prepare(
        self, logits: torch.Tensor, slots: I32, late: LateInputs | None, *, has_rules: bool
    ) -> tuple[NDArray[np.bool_], dict[int, int]]:
        """Change the logits in place as the rows' parameters say.

        Returns which rows have no valid choice at all, and how many values of some of these are not finite.
        """
        counts: dict[int, int] = {}
        # A NaN or an infinity anywhere makes the sum of its row one, too.
        is_void: NDArray[np.bool_] = ~torch.isfinite(logits.sum(1)).numpy()
        if is_void.any():
            for row in np.flatnonzero(is_void).tolist():
                counts[row] = int(np.count_nonzero(~torch.isfinite(logits[row]).numpy()))
        if self.batch.bad_slots:
            is_void |= np.isin(slots, list(self.batch.bad_slots))
            for row in np.flatnonzero(is_void).tolist():
                counts[row] = max(counts.get(row, 0), 1)  # it has had states that were not
        masked: NDArray[np.intp] | None = None
        if late is not None and late.slots.size:
            masked, empty = apply_masks(logits.numpy(), slots, late.slots, late.allowed)
            is_void[empty] = True
        if has_rules:
            is_void[self.batch.rules.apply(logits.numpy(), slots, self.batch.columns.num_outputs[slots])] = True
            if masked is not None:  # together they may leave nothing
                is_void[masked] |= logits.numpy()[masked].max(axis=1, initial=-np.inf) == -np.inf
        if is_void.any():
            logits[torch.from_numpy(is_void)] = 0.0
        return is_void, counts

    def _result_with_vectors(
        self,
        handle: StepHandle,
        tokens: I32,
        is_void: NDArray[np.bool_],
        nonfinite: dict[int, int],
        spans: list[LogprobSpan],
    ) -> StepResult:
        """The result of a step in which some rows are pooled: no token, and a vector made of their final states."""
        rows = handle.sampling.rows
        assert rows is not None
        counts = np.zeros(len(handle.inputs.result_slots), np.int32)
        counts[rows] = 1
        pooled = np.flatnonzero(counts == 0)
        slots, columns = handle.inputs.result_slots[pooled], self.batch.columns
        last = handle.hidden.index_select(0, torch.from_numpy(pooled)).float()  # [num_pooled, hidden_size]
        vectors = self._pooled.take(slots, columns.pooling[slots], columns.num_known[slots], last).numpy()
        is_bad = ~np.isfinite(vectors).all(1) | np.isin(slots, list(self.batch.bad_slots))
        void = np.sort(np.concatenate((rows[is_void], pooled[is_bad])))
        num_bad = {int(rows[sample]): count for sample, count in nonfinite.items()}
        num_bad |= dict.fromkeys(pooled[is_bad].tolist(), 1)
        return StepResult(
            step=handle.step,
            tokens=tokens,
            counts=counts,
            vector_rows=pooled.astype(np.int32),
            vectors=vectors.reshape(-1),
            nonfinite_rows=void.astype(np.int32),
            nonfinite_counts=_counts_of(void.astype(np.int32), num_bad),
            nonfinite_prefills=handle.bad_prompts,
            **columns_of(spans),
            started=handle.started,
            ended=clock.now(),
        )

    def _sampling_rows(self, inputs: StepInputs) -> SamplingRows:
        """Made anew only when the rows or their parameters have changed."""
        if self._rows is not None and self._rows.version == inputs.rows_version:
            return self._rows
        columns, slots = self.batch.columns, inputs.result_slots
        rows = states = None
        if inputs.forks:
            states = np.arange(len(slots))
            sources = [np.flatnonzero(slots == source)[0] for _, source in inputs.forks]
            states[-len(sources) :] = sources
        if columns.pooling[slots].any():
            rows = np.flatnonzero(columns.pooling[slots] == 0)
            slots = slots[rows]
            states = None if states is None else states[rows]
        most = max(1, MAX_LOGITS_BYTES // (4 * self.model_config.vocab_size))
        chunks = []
        for start in range(0, len(slots), most):
            part = slots[start : start + most]
            how = SamplingColumns(
                temperature=columns.temperature[part],
                top_k=columns.top_k[part],
                top_p=columns.top_p[part],
                min_p=columns.min_p[part],
                seeds=columns.seeds[part],
                sample_index=columns.sample_index[part],
                token_index=columns.num_outputs[part],
            )
            chunks.append((start, start + len(part), how))
        rules = self.batch.rules
        wanted: list[tuple[int, int]] = []
        of_ids: dict[int, NDArray[np.int64]] = {}
        if rules.num_logprobs:
            for i, slot in enumerate(slots.tolist()):
                if slot in rules.logprob_ids:
                    of_ids[i] = rules.logprob_ids[slot]
                elif slot in rules.num_logprobs:
                    wanted.append((i, rules.num_logprobs[slot]))
        self._rows = SamplingRows(
            inputs.rows_version, rows, states, slots, chunks, rules.concerns(slots), wanted, of_ids
        )
        return self._rows


def _counts_of(rows: I32, counts: dict[int, int]) -> I32:
    """How many values of each of these rows are not finite."""
    return np.array([counts.get(row, 0) for row in rows.tolist()], np.int32) if rows.size else NO_I32
