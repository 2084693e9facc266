"""A worker's model: weights, KV cache and persistent batch, driven by step plans. What all backends do alike.

Life: `load` -> `profile_num_blocks` -> `allocate` -> `execute` and `sample`, again and again -> `close`. `execute` applies a
plan and runs the forward, `sample` chooses the tokens; between the two a worker may wait for `LateInputs`. `step` does both. A step
that raises counts for nothing. What it may have written into the cache is cleared, and the caller reports `StepFailed`.
Then the scheduler frees all slots and begins again. `check_itself` says whether the requests were at fault, by a step of the
runner's own.

A backend is a subclass (`model.backends` finds it by its name). It says which switches of a shape its fused forward knows, and
whether it runs modules of transformers. The rules that do not depend on where tensors are stand here. They say which rows sample,
which prompts are bad, what a result says, what the largest steps are, and what is forgotten.

Not thread-safe: one thread owns a runner and everything torch. Called by the worker actor.
"""

from __future__ import annotations

import os
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any, ClassVar, Generic, TypeAlias, TypeVar

import numpy as np
import torch
from numpy.typing import NDArray

from actorllm import clock
from actorllm.config import EngineConfig, read_model_folder
from actorllm.errors import EngineError, UnsupportedModelError
from actorllm.messages import I32, NO_I32, POOLING_CODES, Drafted, LateInputs, NewRow, StepPlan, StepResult, pack_rows
from actorllm.messages.logprobs import LogprobSpan, columns_of
from actorllm.model import memory
from actorllm.model.adapters.store import Adapters
from actorllm.model.families.decoder_config import DecoderConfig
from actorllm.model.inputs import PersistentBatch, StepInputs
from actorllm.model.parallel import Ranks
from actorllm.model.pooled_states import PooledStates
from actorllm.model.processors import Processors
from actorllm.model.registry import Plan, check_plan, model_plan
from actorllm.types.drafter import Costs, Speculation
from actorllm.types.logits_processors.travel import encode_errors
from actorllm.types.model_files import overridden
from actorllm.types.weight_version import WeightSource

DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16, "float16": torch.float16}

StagedWeights: TypeAlias = Any
"""What a backend makes of another version of the weights, until it is committed or dropped."""

How = TypeVar("How")
Handle = TypeVar("Handle")


@dataclass(slots=True)
class SamplingRows(Generic[How]):
    """The result rows of a step that sample, and how. Kept until the rows change."""

    version: int
    rows: NDArray[np.intp] | None
    """Which rows of the result; None: all, no row is pooled."""
    states: NDArray[np.intp] | None
    """Which hidden state of the result's rows each sample comes from; None: each from its own. Forks share one."""
    slots: I32  # [num_samples]
    has_rules: bool
    """Some row's logits are changed before it is sampled."""
    num_logprobs: list[tuple[int, int]]
    """(sample, how many of the most likely) for those that want log-probabilities."""
    logprob_ids: dict[int, NDArray[np.int64]]
    """By sample, for those that want them of these ids."""
    has_logprobs: bool
    """Some sample wants log-probabilities."""
    how: How
    """What the backend wants to know of them."""

    def row_of(self, sample: int) -> int:
        """Of the result."""
        return sample if self.rows is None else int(self.rows[sample])


@dataclass(slots=True)
class StepHandle(Generic[How]):
    """A step between its forward and its sampling."""

    step: int
    inputs: StepInputs
    sampling: SamplingRows[How]
    late_slots: I32
    started: float

    @property
    def pooled(self) -> NDArray[np.intp]:
        """The rows of the result that are vectors."""
        rows = self.sampling.rows
        return NO_ROWS if rows is None else np.setdiff1d(np.arange(len(self.inputs.result_slots)), rows)


NO_ROWS: NDArray[np.intp] = np.zeros(0, np.intp)


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


class ModelRunner(ABC, Generic[Handle, How]):
    """One rank's model."""

    name: ClassVar[str]
    """What the argument `device` calls it."""
    switches: ClassVar[frozenset[str]]
    """What the fused forward knows beyond the plain decoder (`families.decoder_config.DecoderConfig.switches`)."""
    runs_modules: ClassVar[bool] = False
    """Models without a fused forward run here through transformers."""
    launches_ahead = False
    """Steps are done when they are sampled; else they are launched, and finished later (`actors.pipeline`)."""
    profiled: tuple[torch.profiler.ProfilerActivity, ...] = (torch.profiler.ProfilerActivity.CPU,)
    """What a profile shows."""
    _owned: ClassVar[tuple[str, ...]] = ("batch",)
    """Attributes that `close` lets go of."""

    batch: PersistentBatch
    between_layers: Callable[[], object] = bool
    """Called between two layers of a step, where the backend computes on the thread that calls it."""
    tell_drafts: Callable[[Drafted], None] | None = None
    """Hears what late rows try before their forward runs, once for each plan with late rows and drafts; None: they try nothing."""
    scheme: str | None = None
    """What its products are computed as, where that was measured (`ModelConfig.scheme`)."""
    adapters: Adapters | None = None
    """Of requests; made with the weights. None: there are none."""
    load_weights: Callable[[Iterable[tuple[str, torch.Tensor]]], set[str]] | None = None
    """What functions of the application find at the model; None: no worker of theirs was made (`rank_worker`)."""

    def __init__(
        self, config: EngineConfig, rank: int = 0, *, show_progress: bool | None = None, plan: Plan | None = None
    ) -> None:
        """show_progress: of loading; None: where standard error is a terminal. plan: of the model, where it is known.

        Raises UnsupportedModelError, naming what it is, for a model that this backend cannot run.
        """
        self.config = config
        self.rank = rank
        self.dtype = DTYPES[config.model.dtype]
        self._show_progress = show_progress
        if plan is None:
            module = config.model.module
            hf = module.tree if module is not None else read_model_folder(config.model.path)[1]
            hf = overridden(hf, config.model.overrides)
            plan = model_plan(config.model, hf, type(self))
        else:
            check_plan(plan, config.model.architecture, type(self))
        self.model_config: Plan = plan
        self.ranks = Ranks()
        self.is_torn = False
        """An exception has left a step that the other ranks are still in: this rank cannot go on."""
        self._rows: SamplingRows[How] | None = None
        self._written: NDArray[Any] = NO_I32
        """Where in the cache the last step wrote, until it is known to have worked."""
        self._profile: torch.profiler.profile | None = None
        self._pooled = PooledStates()
        self.processors: Processors | None = None
        """Of the application; made with the weights."""

    def close(self) -> None:
        """Let go of weights, cache and requests, even if this object is still held, and leave the other ranks. Idempotent.

        Nothing else may be called afterwards.
        """
        for name in self._owned:
            vars(self).pop(name, None)
        self._rows = None
        self._pooled.clear()
        self.ranks.close()
        self.ranks = Ranks()

    # Before the first step --------------------------------------------------------------------------------------------

    @abstractmethod
    def load(self) -> None:
        """Read the weights, or draw them. Raises ModelError."""

    def stage_weights(self, source: WeightSource) -> StagedWeights:
        """Read and check another version of the weights; nothing changes. Called on a thread beside the steps.

        Raises CorruptModelError, naming the tensor; UnsupportedModelError: this model's weights cannot change.
        """
        raise self._without_updates()

    def commit_weights(self, staged: StagedWeights) -> None:
        """Compute every later step with what `stage_weights` returned; no step may be under way."""
        raise self._without_updates()

    def stage_waking(self, source: WeightSource) -> StagedWeights:
        """What `commit_weights` takes to have the weights of a version again that was given back. As `stage_weights`."""
        return self.stage_weights(source)

    def release_weights(self, source: WeightSource, *, keeps_pages: bool) -> None:
        """Give back the memory of the weights, until `commit_weights` of what was staged; no step may be under way.

        source: of the weights. keeps_pages: what the system has in memory of their files stays there; on a device, a copy of them
        is kept on the host.
        """
        raise self._without_updates()

    def block_views(self, block: int) -> list[memoryview]:
        """The memory of a block of the KV cache in pieces, `block_bytes` in all, for what is beside the steps: KV tiers."""
        raise UnsupportedModelError(f"KV tiers are not supported on device={self.name!r} yet; use device='cpu'")

    def block_regions(self) -> list[NDArray[np.uint8]]:
        """The memory of all blocks of the KV cache, as [num_layers, blocks, bytes of a block in a layer] each."""
        raise UnsupportedModelError(f"roles are not supported on device={self.name!r} yet; use device='cpu'")

    def share_cache(self, path: str) -> None:
        """Before `allocate`: let the KV cache be in this file, which other processes map as well."""
        raise UnsupportedModelError(f"roles are not supported on device={self.name!r} yet; use device='cpu'")

    def release_cache(self) -> None:
        """Give back the memory of the KV cache, until `restore_cache`; no step may be under way."""
        raise self._without_updates()

    def restore_cache(self) -> None:
        """Have an empty KV cache again. Nothing to do where its memory comes back as it is used."""

    def resident_bytes(self) -> int:
        """The memory that can be given back and that this rank holds: of its process, or of its device."""
        return memory.resident_bytes()

    def _without_updates(self) -> UnsupportedModelError:
        return UnsupportedModelError(
            f"the weights of {self.config.model.architecture} on device={self.name!r} cannot be updated; those of "
            f"models that generate text with a decoder alone on the CPU can (device='cpu')"
        )

    def statistics(self) -> dict[str, Any]:
        """What `stats()` tells of this worker's computing, as JSON values."""
        return {}

    @property
    @abstractmethod
    def num_kv_heads(self) -> int:
        """Of this rank."""

    @property
    def weight_bytes(self) -> int:
        """Of what one decode step reads, for the log of the start; 0 where the backend does not count them."""
        return 0

    @property
    def block_bytes(self) -> int:
        """Memory of one KV block over all layers."""
        c, size = self.model_config, self.config.cache.block_size
        return self._num_cached * 2 * self.num_kv_heads * c.head_dim * size * self.dtype.itemsize

    @property
    def _num_cached(self) -> int:
        """Layers that have keys and values in the cache."""
        plan = self.model_config
        return len(plan.attention_layers) if isinstance(plan, DecoderConfig) else plan.num_layers

    def cache_bytes_of(self, num_blocks: int) -> int:
        """Memory of so many KV blocks, and of what else is made for them."""
        return num_blocks * self.block_bytes

    @property
    def fixed_cache_bytes(self) -> int:
        """Memory of the KV cache that does not depend on the number of its blocks, at most."""
        return 0

    def profile_num_blocks(self) -> int:
        """How many KV blocks this rank has memory for. A number or a size that is given is taken at its word."""
        cache = self.config.cache
        if cache.num_blocks_override is not None:
            wanted = cache.num_blocks_override * self.block_bytes + self.fixed_cache_bytes
            self._check_room(wanted, f"num_gpu_blocks_override={cache.num_blocks_override} ({wanted} bytes)")
            return cache.num_blocks_override
        num_bytes = cache.kv_cache_memory_bytes
        if num_bytes is None:
            num_bytes = self._cache_bytes()
        else:
            self._check_room(num_bytes, f"kv_cache_memory_bytes={num_bytes}")
        return max(0, self._blocks_within(num_bytes))

    def _blocks_within(self, num_bytes: int) -> int:
        """How many blocks a cache of this size has."""
        return num_bytes // self.block_bytes

    @abstractmethod
    def _check_room(self, num_bytes: int, wish: str) -> None:
        """A cache of this size is wanted. wish: by which argument, for a message."""

    @abstractmethod
    def _cache_bytes(self) -> int:
        """How much memory the cache may have."""

    def measured_costs(self) -> dict[str, Costs]:
        """What steps of so many tokens take (step_costs), and passes of a draft model (draft_costs); before `allocate`.

        Empty: this backend measures nothing.
        """
        return {}

    def take_costs(self, speculation: Speculation) -> None:
        """How many drafts a row has goes by what was measured. speculation: with it."""
        return

    @abstractmethod
    def allocate(self, num_blocks: int) -> None:
        """Make the KV cache and the empty batch."""

    @property
    def cache_window(self) -> int | None:
        """How many tokens a token sees in the layers that get a KV group of their own; None: all are one group."""
        return None

    @property
    def num_snapshots(self) -> int | None:
        """How many states of prefixes recurrent layers keep, once memory is shared out; None: no layer is recurrent."""
        return None

    def allocate_groups(self, num_blocks: int, num_window_blocks: int) -> None:
        """As `allocate`, with a second group of blocks for the layers that have a window.

        Called only of a backend with a `cache_window`. Raises UnsupportedModelError.
        """
        raise UnsupportedModelError(f"a second KV group is not supported on device={self.name!r} yet; use device='cpu'")

    @abstractmethod
    def _empty_batch(self) -> PersistentBatch:
        """Of no requests."""

    def _batch_arguments(self, num_blocks: int) -> dict[str, Any]:
        config, size = self.config, self.config.cache.block_size
        length = config.model.max_model_len + config.scheduler.num_spare_tokens
        return {
            "vocab_size": self.model_config.vocab_size,
            "block_size": size,
            "num_blocks": num_blocks,
            "max_blocks": -(-length // size),
            "embedding_bytes": config.model.embedding_bytes,
            "has_sources": config.model.encoder_decoder is not None,
            "max_adapters": 0 if config.lora is None else config.lora.max_loras,
            "num_snapshots": self.num_snapshots,
        }

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

    @torch.inference_mode()
    def forget_requests(self) -> None:
        """Keep the weights and the memory; nothing that was computed is looked at again. Nothing may be under way."""
        old = self.batch
        self._clear_unfinished()
        self.batch = self._empty_batch()
        # What is kept of a row set (in the sampler, in the attention) is told by these numbers: none may come again.
        self.batch.rows_version = old.rows_version + 1
        self.batch.decode_version = old.decode_version + 1
        self._rows = None
        self._pooled.clear()
        if self.processors is not None:
            self.processors.clear()

    @abstractmethod
    def _clear_unfinished(self) -> None:
        """Let nothing stay of a step that was left half done."""

    # Steps ------------------------------------------------------------------------------------------------------------

    def start_profile(self) -> None:
        """Trace every torch operation from now on. Raises EngineError when one is under way."""
        if self._profile is not None:
            raise EngineError("a profile is under way already; stop it first")
        self._profile = torch.profiler.profile(activities=list(self.profiled))
        self._profile.start()

    def limit_threads(self, num_threads: int) -> None:
        """Compute with at most so many threads from the next step on. Nothing to do where a device computes."""

    def stop_profile(self, folder: str, prefix: str = "") -> str:
        """Write the trace, in the Chrome format, into a folder; returns its path. Raises EngineError."""
        profile, self._profile = self._profile, None
        if profile is None:
            raise EngineError("no profile is under way; start one first")
        profile.stop()
        file = Path(folder) / f"{prefix}rank{self.rank}.json"
        try:
            file.parent.mkdir(parents=True, exist_ok=True)
            profile.export_chrome_trace(str(file))
            with file.open("rb") as written:
                written.seek(-min(16, file.stat().st_size), os.SEEK_END)
                is_whole = written.read().rstrip().endswith(b"}")  # torch does not tell that it found no room
        except (OSError, RuntimeError) as error:
            raise EngineError(f"the profile cannot be written to {str(file)!r}: {error}") from error
        if not is_whole:
            raise EngineError(f"the profile cannot be written to {str(file)!r}: it was cut short")
        return str(file)

    @staticmethod
    def is_memory_shortage(error: Exception) -> bool:
        """Whether a step has failed for want of memory, so that a smaller one may go through."""
        return memory.is_shortage(error)

    def step(self, plan: StepPlan, late: LateInputs | None = None) -> StepResult:
        """Both halves of a step."""
        return self.sample(self.execute(plan), late)

    def waits_for_results(self, plan: StepPlan) -> bool:
        """Whether this plan may be executed only when every step before it is finished, of a backend that launches ahead."""
        return False

    @abstractmethod
    def execute(self, plan: StepPlan) -> Handle:
        """Apply the plan and run the forward; the rows have advanced when this returns. Raises on failure."""

    @abstractmethod
    def sample(self, handle: Handle, late: LateInputs | None = None) -> StepResult:
        """Choose the tokens of an executed step and remember them as their slots' last tokens.

        The result says when the step began and when it ended.
        """

    @abstractmethod
    def check_itself(self) -> None:
        """Compute the simplest step that there is, with nothing of any request in it, and leave everything as it was.

        To be called between two steps, by every rank after the same one. Raises whatever a step raises, and EngineError
        when no row has finite logits.
        """

    @torch.inference_mode()
    def discard(self) -> None:
        """The last step raised: clear the blocks that it was to write. It was not checked whether that was finite."""
        written = self._written[self._written >= 0]
        if written.size:
            self._zero(np.unique(written // self.config.cache.block_size).astype(np.int32))
        self._written = NO_I32

    @abstractmethod
    def _zero(self, block_ids: I32) -> None:
        """Clear these blocks of the cache."""

    def _pair(self, pairs: I32, step: int) -> None:
        """Blocks of the second KV group belong to these of the first one (`StepPlan.partners`)."""
        raise ValueError(
            f"step {step}: the cache has one group, and {pairs.size // 2} blocks of a second one are named"
        )

    def _restore(self, states: list[list[int]]) -> None:
        """Slots begin with what was kept in places (`StepPlan.restored_states`). states: a slot and a place, each."""
        raise ValueError(f"{len(states)} states are to be restored, and a runner on {self.name!r} keeps none")

    @abstractmethod
    def _copy(self, sources: I32, targets: I32) -> None:
        """Copy blocks of the cache, all at once."""

    def _apply(self, plan: StepPlan) -> None:
        """Carry out what a plan says about requests and blocks."""
        self._written = NO_I32
        self.batch.apply(plan)
        if self.processors is not None and (plan.freed.size or plan.new_processed.size):
            self.processors.apply_plan(plan, self.batch.known_tokens)
        if plan.freed.size:
            self._pooled.drop(plan.freed)
        if plan.copy_sources.size:  # first: a block may be zeroed because its owner failed, and its fork did not
            self._copy(plan.copy_sources, plan.copy_targets)
        if plan.partners.size:  # what is copied may belong to another block from now on
            self._pair(plan.partners, plan.step)
        if plan.restored_states.size or (self.batch.num_snapshots is not None and plan.new_rows.size):
            self._restore(self.batch.restored(plan))
        if plan.zero_blocks.size:
            self._zero(plan.zero_blocks)

    def _sampling_rows(self, inputs: StepInputs) -> SamplingRows[How]:
        """Made anew only when the rows or their parameters have changed."""
        if self._rows is not None and self._rows.version == inputs.rows_version:
            return self._rows
        columns, slots, rules = self.batch.columns, inputs.result_slots, self.batch.rules
        rows: NDArray[np.intp] | None = None
        states: NDArray[np.intp] | None = None
        # A fork has no state of its own yet: it samples from that of its leader, in the same step.
        if inputs.forks:
            states = np.arange(len(slots))
            sources = [np.flatnonzero(slots == source)[0] for _, source in inputs.forks]
            states[-len(sources) :] = sources
        # Rows that pool give a vector and no token.
        if columns.pooling[slots].any():
            rows = np.flatnonzero(columns.pooling[slots] == 0)
            slots = slots[rows]
            states = rows if states is None else states[rows]
        wanted: list[tuple[int, int]] = []
        of_ids: dict[int, NDArray[np.int64]] = {}
        if rules.num_logprobs:
            for i, slot in enumerate(slots.tolist()):
                if slot in rules.logprob_ids:
                    of_ids[i] = rules.logprob_ids[slot]
                elif slot in rules.num_logprobs:
                    wanted.append((i, rules.num_logprobs[slot]))
        has_rules = rules.concerns(slots) or (self.processors is not None and self.processors.concerns(slots))
        has_logprobs = bool(wanted or of_ids)
        how = self._how(slots, has_rules=has_rules, has_logprobs=has_logprobs)
        self._rows = SamplingRows(
            inputs.rows_version, rows, states, slots, has_rules, wanted, of_ids, has_logprobs, how
        )
        return self._rows

    @abstractmethod
    def _how(self, slots: I32, *, has_rules: bool, has_logprobs: bool) -> How:
        """How these slots are sampled."""

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

    @staticmethod
    def _bad_prompts(inputs: StepInputs, is_finite: NDArray[Any]) -> I32:
        """Which prefill rows have states that are not finite. is_finite: by token of the prompts."""
        bad = np.flatnonzero(is_finite == 0) + inputs.num_decodes
        rows = [
            row
            for row, (start, count) in enumerate(zip(inputs.prefill_starts, inputs.prefill_counts, strict=True))
            if ((bad >= start) & (bad < start + count)).any()
        ]
        return np.array(rows, np.int32) if rows else NO_I32

    def _result(
        self,
        handle: StepHandle[How],
        tokens: I32,
        is_void: NDArray[np.bool_],
        num_bad: NDArray[Any],
        bad_prompts: I32,
        spans: list[LogprobSpan],
        vectors: NDArray[np.float32] | None,
        errors: dict[int, str] | None = None,
        counts_of_rows: I32 = NO_I32,
    ) -> StepResult:
        """What a step says. is_void, num_bad: of each sample, whether it counts for nothing, and how many of its values were
        not finite. vectors: of the rows of `handle.pooled`. errors: of samples that count for nothing, why the application's
        processors failed. counts_of_rows: how many tokens each row has, where drafts were right; empty: one each."""
        rows = handle.sampling.rows
        more = columns_of(spans) if spans else {}
        void = np.flatnonzero(is_void)
        counts = num_bad[void]
        if rows is not None:
            assert vectors is not None
            pooled = handle.pooled
            per_row = np.zeros(len(handle.inputs.result_slots), np.int32)
            per_row[rows] = 1
            columns, slots = self.batch.columns, handle.inputs.result_slots[pooled]
            is_whole = columns.pooling[slots] == POOLING_CODES["all"]
            sizes = np.where(is_whole, columns.num_known[slots], 1)  # vectors of each row
            is_bad = np.add.reduceat(~np.isfinite(vectors).all(1), np.cumsum(sizes) - sizes) > 0
            is_bad |= np.isin(slots, list(self.batch.bad_slots))
            void = np.concatenate((rows[void], pooled[is_bad]))
            order = np.argsort(void)
            void, counts = void[order], np.concatenate((counts, np.ones(is_bad.sum(), np.int32)))[order]
            vector_rows, values = pooled.astype(np.int32), vectors.reshape(-1).copy()
            more |= {"counts": per_row, "vector_rows": vector_rows, "vectors": values}
        drafts = handle.inputs.drafts
        if drafts is not None:
            num_drafted = np.zeros(len(handle.inputs.result_slots), np.int32)
            num_drafted[: len(drafts.counts)] = drafts.counts
            more |= {"counts": counts_of_rows, "num_drafted": num_drafted}
        if errors:
            by_row = {handle.sampling.row_of(sample): text for sample, text in errors.items()}
            more["errors"] = encode_errors([by_row.get(row, "") for row in void.tolist()])
        return StepResult(
            step=handle.step,
            tokens=tokens,
            nonfinite_rows=void.astype(np.int32) if void.size else NO_I32,
            nonfinite_counts=counts.astype(np.int32) if void.size else NO_I32,
            nonfinite_prefills=bad_prompts,
            **more,
            started=handle.started,
            ended=clock.now(),
        )
