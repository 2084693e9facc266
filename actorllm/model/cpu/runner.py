"""The worker's model on the CPU: a step is done when it is sampled."""

from __future__ import annotations

import functools
import gc
import logging
import mmap
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeVar, cast

import numpy as np
import torch
from numpy.typing import NDArray

from actorllm import clock
from actorllm.config import EngineConfig, ModelConfig
from actorllm.errors import EngineError, UnsupportedModelError
from actorllm.messages import I32, NO_I32, POOLING_CODES, LateInputs, NewRow, StepPlan, StepResult, pack_rows
from actorllm.messages.logprobs import LogprobSpan, joined_runs
from actorllm.model import logprobs, memory, threads
from actorllm.model.adapters.slots import AdapterSlots
from actorllm.model.adapters.store import Adapters
from actorllm.model.cpu import invariance
from actorllm.model.cpu.attention import KVCache, PagedCache, shared_pages, zero_pages
from actorllm.model.cpu.decoder import SWITCHES, Decoder
from actorllm.model.cpu.draft_heads import drafting_model
from actorllm.model.cpu.draft_passes import DraftingModel
from actorllm.model.cpu.grouped_cache import GroupedKVCache
from actorllm.model.cpu.int8_cache import Int8KVCache, block_bytes
from actorllm.model.cpu.latent import LatentCache, check_latent, working_bytes
from actorllm.model.cpu.layers import ACTIVATIONS, linear, paired, widens
from actorllm.model.cpu.model import AbsentModel
from actorllm.model.cpu.rates import measured_rates, sizes_of
from actorllm.model.cpu.recurrent.cache import RecurrentCache
from actorllm.model.cpu.recurrent.refusals import check_recurrent, check_states, most_snapshots, num_snapshots_within
from actorllm.model.cpu.recurrent.states import SlotStates
from actorllm.model.cpu.scheme import Scheme, choose, products
from actorllm.model.cpu.thread_count import exchange_own_threads, restore_own_threads, set_own_num_threads
from actorllm.model.families.decoder_config import DecoderConfig, LatentShape
from actorllm.model.families.recurrent_shapes import state_bytes
from actorllm.model.heads import read_linear
from actorllm.model.inputs import Drafts, PersistentBatch, StepInputs
from actorllm.model.linear import Linear, LinearWeight
from actorllm.model.linear.by_kind import RowKinds
from actorllm.model.linear.dense import Dense
from actorllm.model.logits import apply_masks, masks_behind, only_choices
from actorllm.model.parallel import Ranks
from actorllm.model.pipeline.stage import Stage
from actorllm.model.pooled_states import PooledStates
from actorllm.model.processors import processors_of
from actorllm.model.quantization import form_of, open_weights, rounding_of
from actorllm.model.quantization.int4 import Int4Weights
from actorllm.model.registry import Plan, check_same_model, check_shares
from actorllm.model.runner import ModelRunner, SamplingRows, StagedWeights, StepHandle, slices
from actorllm.model.sampler import Sampler, SamplingColumns
from actorllm.model.shown_logits import ShownLogits, drawn_from
from actorllm.model.speculation import costs
from actorllm.model.speculation.agreed import agreed_drafts, firsts
from actorllm.model.speculation.speculator import BatchDrafter, NoDrafts, Speculator
from actorllm.model.team import Team
from actorllm.model.weights import Weights
from actorllm.types.drafter import Costs, Speculation
from actorllm.types.quantization import GGUF, INT8, is_twin
from actorllm.types.speculation import MAX_DRAFTS, WITH_MODEL
from actorllm.types.weight_version import WeightSource

if TYPE_CHECKING:
    from actorllm.model.cpu.model import CausalLM
    from actorllm.model.encoder_decoder.cross_plan import EncoderDecoderPlan
    from actorllm.model.hf.encoder import EncoderPlan
    from actorllm.model.hf.plan import TransformersPlan
    from actorllm.model.hf.transformers_backend import TransformersDecoder

MAX_LOGITS_BYTES = 64 << 20
"""float32 logits that exist at a time; more rows than that are sampled in chunks."""

PROMPT_LOGITS_BYTES = 32 << 20
"""Of the logits of prompts whose log-probabilities are wanted: their positions are worked off in slices."""

ENTRY_BYTES = 16
"""Of one id with its log-probability, while they are made."""

NUM_CHECK_ROWS, CHECK_PROMPT = 4, 2
"""Of the step of the runner's own: so many rows of so many tokens, from all over the vocabulary."""

logger = logging.getLogger(__name__)

T = TypeVar("T")


def with_own_threads(method: Callable[..., T]) -> Callable[..., T]:
    """Compute with the runner's number of threads, and leave torch's as it was: the process may be an application's."""

    @functools.wraps(method)
    def computing(runner: CpuRunner, *arguments: Any) -> T:
        before = exchange_own_threads(runner.num_threads)
        try:
            return method(runner, *arguments)
        finally:
            runner.num_threads = torch.get_num_threads()
            restore_own_threads(before)

    return computing


Chunks = list[tuple[int, int, SamplingColumns]]
"""[start, end) of the samples and how they are drawn, so that the logits of a chunk fit in MAX_LOGITS_BYTES."""


@dataclass(slots=True)
class CpuStep(StepHandle[Chunks]):
    """A step between its forward and its sampling."""

    hidden: torch.Tensor  # [num_states, hidden_size] final hidden states of the result rows, which forks share
    logits: torch.Tensor | None
    """float32 [num_samples, vocab_size]; None: made chunk by chunk while sampling."""
    prompt_logprobs: list[LogprobSpan]
    bad_prompts: I32
    """Prefill rows of the plan whose states are not finite."""
    draft_logits: torch.Tensor | None = None
    """float32 [num_drafts, vocab_size], at the positions of the drafts; None: there are none."""
    seen: torch.Tensor | None = None
    """What the drafting model is to have of the decode rows (`DraftingModel.follow`); None: nothing."""


class CpuRunner(ModelRunner[CpuStep, Chunks]):
    """See the module docstring."""

    name = "cpu"
    switches = SWITCHES
    runs_modules = True
    _owned = ("decoder", "cache", "batch", "adapters", "_slots", "_draft_model", "_speculator")

    def __init__(
        self, config: EngineConfig, rank: int = 0, *, show_progress: bool | None = None, plan: Plan | None = None
    ) -> None:
        super().__init__(config, rank, show_progress=show_progress, plan=plan)
        self._whole_plan = self.model_config
        if self._latent is not None:
            check_latent(config)
        if self.is_recurrent:
            check_recurrent(config)
        self.stage = Stage(config, rank)
        if isinstance(self.model_config, DecoderConfig):
            self.model_config = self.stage.part.shape_of(self.model_config)
        self._is_encoder = config.model.pooler is not None and config.model.pooler.is_encoder
        self.decoder: CausalLM
        self._head: Callable[[torch.Tensor], torch.Tensor] | None = None
        """From pooled states, float32 [num_vectors, hidden_size], to scores, float32 [num_vectors, num_labels]."""
        self.cache: PagedCache
        self._new_pages: Callable[[int], mmap.mmap] = zero_pages
        """Where the memory of the cache is from."""
        self._team: Team
        self.num_threads = threads.num_threads(self.config)
        """What torch computes with. A step sets it, from the size of its products."""
        self._available_at_first = memory.available_bytes()
        self._sampler = Sampler(self.model_config.vocab_size)
        self._shown = ShownLogits.of(config.model.logprobs_mode)
        self._slots: AdapterSlots | None = None
        """Of `adapters`."""
        self._speculator: Speculator | None = None
        self._draft_model: DraftingModel | None = None
        self._num_snapshots = config.cache.snapshots or 0
        if config.speculation is not None:
            drafter: BatchDrafter | None = NoDrafts()
            if not rank:  # the others are told
                self._draft_model = drafting_model(config, self.model_config, self.dtype)
                drafter = self._draft_model
            self._speculator = Speculator(config.speculation, self.model_config.vocab_size, drafter)
        self._is_half_done = False
        self._decode_version = -1
        """Of the last step."""
        self._no_hidden = torch.empty(0, self.model_config.hidden_size, dtype=self.dtype)

    # Before the first step --------------------------------------------------------------------------------------------

    @with_own_threads
    @torch.inference_mode()
    def load(self) -> None:
        self.ranks = Ranks.connect(self.config, self.rank)
        self.decoder = self._load()
        self._load_drafting_model()
        if self.stage.is_last:
            self.processors = processors_of(self.config, self.dtype, torch.device("cpu"))
        self._team = self._measured_team(threads.num_threads(self.config))
        if self.config.batch_invariant:
            self._check_invariance()

    def _load_drafting_model(self) -> None:
        """On the first rank. The others wait: their next collective would give up before a large one is read."""
        try:
            if self._draft_model is not None:
                assert isinstance(self.decoder, Decoder)
                self._draft_model.load(self.decoder, self._show_progress)
        finally:  # with an error, the others end as they always do
            if self.config.speculation is not None and self.config.speculation.method in WITH_MODEL:
                self.ranks.go_on()

    def _check_invariance(self) -> None:
        """Raises UnsupportedModelError where a row depends on more than its request."""
        plan = self.model_config
        if not isinstance(plan, DecoderConfig) or plan.experts is not None or self.config.model.media is not None:
            what = "with experts" if isinstance(plan, DecoderConfig) else "that run through transformers"
            what = what if self.config.model.media is None else "that take images or audio"
            raise UnsupportedModelError(
                f"batch_invariant=True is not supported for models {what} yet ({self.config.model.architecture}); leave it out"
            )
        kept = self._speculator, self._draft_model, self.processors, self._team
        self._speculator = self._draft_model = self.processors = None

        def use(num_threads: int) -> None:
            self._team = Team((num_threads,))

        try:
            invariance.check(self, kept[3].sizes, use, ACTIVATIONS[plan.activation])
        finally:
            self._speculator, self._draft_model, self.processors, self._team = kept
        del self.cache, self.batch

    def _measured_team(self, num_threads: int) -> Team:
        """num_threads: at most."""
        sizes = sizes_of(num_threads)
        if len(sizes) == 1:
            return Team(sizes)
        plan, form = self.model_config, rounding_of(self._computed(self.config.model))
        num_products = 4 * plan.num_layers + 1
        # What a form stores for a number: only the order of magnitude matters, steps are measured themselves.
        per_number = self.dtype.itemsize if form is Dense else 0.5 if isinstance(form, Int4Weights) else 1.0
        num_numbers = int(self.decoder.num_bytes / num_products / per_number)
        rates = measured_rates(sizes, num_numbers, plan.hidden_size, num_products, self.dtype, linear, form)
        return Team(tuple(rates.one_row), rates)

    @with_own_threads
    @torch.inference_mode()
    def limit_threads(self, num_threads: int) -> None:
        # A larger team was not measured, nor shown to have the same bits.
        if num_threads > self._team.most and not self.config.batch_invariant:
            self._team = self._measured_team(num_threads)
        self._team.limit(num_threads)

    def _load(self) -> CausalLM:
        """The model, or this rank's part of it, with its weights, read or drawn. Raises ModelError."""
        plan, model = self.model_config, self.config.model
        model.weights.check_unchanged()
        check_shares(plan, model, self.ranks.size, len(self.config.stages) or 1)
        if widens(self.dtype) and not self.rank:
            better = " (dtype='bfloat16' takes less, and is faster)" if self.dtype == torch.float16 else ""
            logger.warning(
                "dtype=%r: this processor has no fast products of that type; they are computed in float32, and "
                "the weights take twice their memory%s",
                model.dtype,
                "" if widens(torch.bfloat16) else better,
            )
        if self.config.lora is not None:
            of = torch.float32 if widens(self.dtype) else self.dtype
            self._slots = AdapterSlots(self.config.lora.max_loras, self.config.lora.max_lora_rank, of)
            self.adapters = Adapters(self.config.lora, self._slots)
        found = choose(self.config, plan, self.dtype, self.ranks)
        self.scheme = None if found is None else str(found)
        if isinstance(plan, DecoderConfig):
            with open_weights(model, self.dtype, self._show_progress) as weights:
                decoder, self._head = self._read_decoder(plan, weights, self._slots)
                return decoder
        loaded, self._head = self._read_modules(model, self._slots)
        return loaded

    def _read_modules(
        self, model: ModelConfig, slots: AdapterSlots | None = None
    ) -> tuple[CausalLM, Callable[[torch.Tensor], torch.Tensor] | None]:
        """A model of transformers, with its head for what is pooled. slots: as of `transformers_backend.load`."""
        plan, model = self.model_config, self._computed(model)
        if model.encoder_decoder is not None:
            from actorllm.model.encoder_decoder import cross_loading

            return cross_loading.load(cast("EncoderDecoderPlan", plan), model, self.dtype, self._show_progress), None
        if self._is_encoder:
            from actorllm.model.hf import encoder

            loaded = encoder.load(cast("EncoderPlan", plan), model, self.dtype, self._show_progress)
            return loaded, loaded.head
        from actorllm.model.hf import transformers_backend

        modules = cast("TransformersPlan", plan)
        if self._has_int8_cache and modules.scores_positions:
            raise UnsupportedModelError(
                f"kv_cache_dtype='int8' is not supported with the scores of positions (ALiBi) of {modules.architecture} yet; "
                f"leave it out"
            )
        given = (modules, model, self.dtype, self._show_progress, slots)
        return transformers_backend.load(*given), None

    def _read_decoder(
        self, plan: DecoderConfig, weights: Weights, slots: AdapterSlots | None
    ) -> tuple[Decoder, Callable[[torch.Tensor], torch.Tensor] | None]:
        """With the head for what is pooled, if the model has one."""
        model, head = self.config.model, None
        if model.pooler is not None and model.pooler.head is not None and self.stage.is_last:
            head = read_linear(model.pooler.head, plan, model, weights)
        has_fixed_bits = self.config.batch_invariant or self._has_int8_cache  # else codes of a cache would differ, too
        make: Callable[[LinearWeight], Linear] = paired if has_fixed_bits else linear
        kinds: RowKinds | None = None
        if self.scheme is not None:
            scheme = Scheme.parse(self.scheme)
            kinds = RowKinds() if scheme.is_twin else None
            make = products(scheme, self.dtype, kinds, make)
        form = form_of(self._computed(model))
        decoder = Decoder(plan, weights, model.max_model_len, self.ranks, form, slots, make, kinds, self.stage)
        return decoder, head

    def _computed(self, model: ModelConfig) -> ModelConfig:
        """The same without quantization, where that is faster here."""
        is_left_out = self.scheme is not None and Scheme.parse(self.scheme).leaves_out(model)
        return replace(model, quantization=None) if is_left_out else model

    @torch.inference_mode()
    def stage_weights(self, source: WeightSource) -> StagedWeights:
        """A second decoder, made as the first one was: fused, sharded and quantized alike. Its adapters are added later."""
        plan = self.model_config
        if not isinstance(plan, DecoderConfig):
            return self._stage_modules(source)
        if self.config.model.quantization == GGUF and not source.is_first:
            raise UnsupportedModelError(
                f"the weights of {self.config.model.name}, a GGUF file, cannot be updated; those of safetensors files can"
            )
        model = replace(self.config.model, weights=source)
        source.check_unchanged()
        check_same_model(model, self._whole_plan, type(self))
        with open_weights(model, self.dtype, False) as weights:
            decoder, head = self._read_decoder(plan, weights, None)
        drafts = None if self._draft_model is None else self._draft_model.stage(decoder, source)
        source.check_unchanged()  # else it was written while it was read
        return decoder, head, drafts

    def _stage_modules(self, source: WeightSource) -> StagedWeights:
        """As `stage_weights`, of a model that runs through transformers."""
        model = self.config.model
        has_encoder = self._is_encoder or model.media is not None or model.encoder_decoder is not None
        if not source.is_first and has_encoder:
            return super().stage_weights(source)
        model = replace(model, weights=source)
        source.check_unchanged()
        check_same_model(model, self.model_config, type(self))
        staged = self._read_modules(model)
        source.check_unchanged()
        return *staged, None

    def commit_weights(self, staged: StagedWeights) -> None:
        decoder, head, drafts = staged
        if isinstance(decoder, Decoder) and isinstance(self.decoder, Decoder):
            decoder.take_adapters(self.decoder)
            if self._draft_model is not None:
                self._draft_model.take_target(decoder, drafts)
        elif self._slots is not None:
            cast("TransformersDecoder", decoder).adapt(self._slots)
        self.decoder, self._head = decoder, head

    def release_weights(self, source: WeightSource, *, keeps_pages: bool) -> None:
        """They are read again from where they are. A draft model keeps its own."""
        self._head = None
        if isinstance(self.decoder, Decoder):
            self.decoder.drop_weights()
        else:
            self.decoder = AbsentModel(self.decoder.num_kv_heads)
            if self._slots is not None:
                self._slots.drop_bases()
        if self._draft_model is not None:
            self._draft_model.drop_target()
        gc.collect()  # modules refer to each other
        memory.trim()
        if not keeps_pages and self.config.model.load_format != "dummy":
            folder = Path(source.folder or self.config.model.path)
            memory.drop_pages(folder.glob("*.safetensors"))

    def block_views(self, block: int) -> list[memoryview]:
        return self.cache.block_views(block)

    def block_regions(self) -> list[NDArray[np.uint8]]:
        return self.cache.block_regions()

    def share_cache(self, path: str) -> None:
        self._new_pages = shared_pages(path)

    def release_cache(self) -> None:
        self.cache.release()
        if self._draft_model is not None:
            self._draft_model.release()

    @property
    def model(self) -> Any:
        """For functions of the application: the module of transformers, or the decoder where the forward is fused."""
        model: Any = getattr(self.decoder, "model", self.decoder)
        if self.load_weights is not None and self.config.model.module is None:  # else it is the application's own
            model.load_weights = self.load_weights  # each update makes another decoder
        return model

    @property
    def num_kv_heads(self) -> int:
        return self.decoder.num_kv_heads

    @property
    def weight_bytes(self) -> int:
        return self.decoder.num_bytes

    def statistics(self) -> dict[str, Any]:
        return {"threads": self._team.statistics(), "scheme": self.scheme}

    @property
    def block_bytes(self) -> int:
        of_drafts = 0 if self._draft_model is None else self._draft_model.block_bytes
        if self._latent is not None:
            size = self.config.cache.block_size * self._latent.width * self.dtype.itemsize
            return self.model_config.num_layers * size + of_drafts
        if not self._has_int8_cache:
            return self._bytes_of_layers(windowed=False) + of_drafts
        c, size = self.model_config, self.config.cache.block_size
        return c.num_layers * block_bytes(self.num_kv_heads, c.head_dim, size) + of_drafts

    @property
    def cache_window(self) -> int | None:
        """Where layers have a window, and blocks are as `KVCache` has them."""
        plan, config = self.model_config, self.config
        if not isinstance(plan, DecoderConfig) or plan.latent is not None or self.is_recurrent:
            return None
        is_plain = not (
            config.stages
            or config.is_launched
            or config.speculation is not None
            or config.keeps_output_apart
            or is_twin(self.scheme)  # as was measured: the configuration does not say it yet
            or self._has_int8_cache
            or config.cache.has_transfers
        )
        window = max((window for window in plan.windows if window is not None), default=config.model.max_model_len)
        is_small = window < config.model.max_model_len
        return window if is_plain and is_small and config.model.pooler is None else None

    def _bytes_of_layers(self, *, windowed: bool) -> int:
        """Memory of one block in the layers of one KV group; all are of the first one where there is no other."""
        every = super().block_bytes
        if self.cache_window is None:
            return 0 if windowed else every
        assert isinstance(self.model_config, DecoderConfig)
        windows = self.model_config.windows
        count = sum((window is not None) == windowed for window in windows)
        return every // len(windows) * count

    @property
    def _latent(self) -> LatentShape | None:
        """What is cached of each token, where that is not its keys and values."""
        return self.model_config.latent if isinstance(self.model_config, DecoderConfig) else None

    @property
    def is_recurrent(self) -> bool:
        """Whether some layers keep a state of each sequence (`recurrent`)."""
        return isinstance(self.model_config, DecoderConfig) and self.model_config.recurrent is not None

    @property
    def num_snapshots(self) -> int | None:
        return self._num_snapshots if self.is_recurrent else None

    @property
    def _state_bytes(self) -> int:
        """Of the states of one sequence."""
        plan = self.model_config
        assert isinstance(plan, DecoderConfig)
        assert plan.recurrent is not None
        return state_bytes(plan.recurrent, len(plan.recurrent_layers), self.dtype.itemsize)

    @property
    def _has_int8_cache(self) -> bool:
        return self.config.cache.dtype == INT8

    @property
    def _tails_per_slot(self) -> int:
        return 1 if self._speculator is None else 2

    @property
    def fixed_cache_bytes(self) -> int:
        """Of the second KV group, of states, or of the tails of a cache of 8 bits: pages are mapped when a slot is first used."""
        if self.is_recurrent:
            return self._state_bytes * (self.config.scheduler.max_num_seqs + self._num_snapshots)
        if self.cache_window is not None:
            return self._most_window_blocks * self._bytes_of_layers(windowed=True)
        if not self._has_int8_cache:
            return 0
        return super().block_bytes * self._tails_per_slot * self.config.scheduler.max_num_seqs

    def cache_bytes_of(self, num_blocks: int) -> int:
        if self.is_recurrent:
            return super().cache_bytes_of(num_blocks) + self.fixed_cache_bytes
        window = self.cache_window
        if window is None:
            return super().cache_bytes_of(num_blocks)
        partners = self.config.window_blocks(window, num_blocks) * self._bytes_of_layers(windowed=True)
        return num_blocks * self.block_bytes + partners

    @property
    def _most_window_blocks(self) -> int:
        assert self.cache_window is not None
        return self.config.window_blocks(self.cache_window, 1 << 40)

    def _blocks_within(self, num_bytes: int) -> int:
        if self.is_recurrent:
            check_states(self.config, num_bytes, self._state_bytes)
            self._num_snapshots = num_snapshots_within(
                self.config,
                num_bytes,
                self._state_bytes,
                least_bytes=self._most_blocks_of_one * self.block_bytes,
            )
            if not self.block_bytes:  # no layer attends: blocks are counted, and hold nothing
                return self.config.scheduler.max_num_seqs * self._most_blocks_of_one
            return (num_bytes - self.fixed_cache_bytes) // self.block_bytes
        if self.cache_window is not None:  # each block has a partner, up to as many as the second group has at most
            both = self.block_bytes + self._bytes_of_layers(windowed=True)
            if num_bytes < self._most_window_blocks * both:
                return num_bytes // both
            if (
                not self.block_bytes
            ):  # every layer has a window: blocks of the first group are counted, and hold nothing
                return self.config.scheduler.max_num_seqs * self._most_blocks_of_one
            return (num_bytes - self.fixed_cache_bytes) // self.block_bytes
        if not self._has_int8_cache:
            return super()._blocks_within(num_bytes)
        # Each sequence that runs has its tails, and a block at least.
        most = self.config.scheduler.max_num_seqs
        per_sequence = self.fixed_cache_bytes // most + self.block_bytes
        if num_bytes < most * per_sequence:
            return num_bytes // per_sequence
        return (num_bytes - self.fixed_cache_bytes) // self.block_bytes

    @with_own_threads
    def profile_num_blocks(self) -> int:
        if self.is_recurrent and self.config.cache.num_blocks_override is not None:
            self._num_snapshots = most_snapshots(self.config)
        if self._is_encoder:  # its blocks are counted, and hold nothing
            return self.config.scheduler.max_num_seqs * -(
                -self.config.model.max_model_len // self.config.cache.block_size
            )
        with self.stage.alone():
            return super().profile_num_blocks()

    def _check_room(self, num_bytes: int, wish: str) -> None:
        available = memory.available_bytes()
        if num_bytes > available:  # said before the kernel acts: these are then the last words
            logger.warning(
                "%s is more than the %d bytes of memory that are available; the process will be "
                "killed when the cache is filled",
                wish,
                available,
            )

    def _cache_bytes(self) -> int:
        """What the largest step leaves of the configured share of the available memory.

        Without a share: what max_num_seqs sequences of max_model_len need, within 40 % of the available memory.
        """
        config, limits = self.config, self.config.scheduler
        share, working = config.cache.memory_utilization, self._profile_working_bytes()
        part = config.cache.machine_share / config.ranks_per_machine
        if share is not None:
            used = self._available_at_first - memory.available_bytes()
            return int(self._available_at_first * part * share) - max(0, used) - working
        budget = int(memory.available_bytes() * part * memory.DEFAULT_CACHE_SHARE) - working
        wanted = limits.max_num_seqs * self._most_blocks_of_one * self.block_bytes
        if self.is_recurrent:
            wanted += most_snapshots(config) * self._state_bytes
        return min(wanted + self.fixed_cache_bytes, budget)

    @property
    def _most_blocks_of_one(self) -> int:
        """Of one sequence."""
        length = self.config.model.max_model_len + self.config.scheduler.num_spare_tokens
        return -(-length // self.config.cache.block_size)

    @torch.inference_mode()
    def allocate(self, num_blocks: int) -> None:
        """Pages are mapped when they are first written."""
        c, size = self.model_config, self.config.cache.block_size
        shape = (1, 1, 1) if self._is_encoder else (self._num_cached, self.decoder.num_kv_heads, c.head_dim)
        keeps_output_apart = self.config.batch_invariant or is_twin(self.scheme)
        if self._latent is not None:
            self.cache = LatentCache(
                c.num_layers,
                self._latent,
                num_blocks,
                size,
                self.dtype,
                keeps_output_apart=keeps_output_apart,
                pages=self._new_pages,
            )
        elif self._has_int8_cache:
            self.cache = Int8KVCache(
                *shape,
                num_blocks,
                size,
                self.dtype,
                num_slots=max(self.config.scheduler.max_num_seqs, costs.SIZES[-1], NUM_CHECK_ROWS),
                tails_per_slot=self._tails_per_slot,
                pages=self._new_pages,
            )
        else:
            kv = self._new_kv(shape, num_blocks, keeps_output_apart) if shape[0] else None
            if kv is None or self.is_recurrent:
                self.cache = RecurrentCache(kv, self._new_states(), num_blocks, size)
            else:
                self.cache = kv
        self.batch = self._empty_batch()
        self._rows = None
        self._pooled.clear()
        if self._speculator is not None:
            self._speculator.clear()
        if self._draft_model is not None:
            self._draft_model.allocate(num_blocks)
        self._is_half_done = False

    def _new_kv(self, shape: tuple[int, int, int], num_blocks: int, keeps_output_apart: bool) -> KVCache:
        size, has_fixed_tiles = self.config.cache.block_size, self.config.batch_invariant
        return KVCache(
            *shape,
            num_blocks,
            size,
            self.dtype,
            keeps_output_apart=keeps_output_apart,
            has_fixed_tiles=has_fixed_tiles,
            pages=self._new_pages,
        )

    def _new_states(self) -> SlotStates:
        plan = self.model_config
        assert isinstance(plan, DecoderConfig)
        assert plan.recurrent is not None
        num_slots = max(self.config.scheduler.max_num_seqs, NUM_CHECK_ROWS)
        return SlotStates(len(plan.recurrent_layers), plan.recurrent.states, num_slots, self.dtype, self._num_snapshots)

    @torch.inference_mode()
    def allocate_groups(self, num_blocks: int, num_window_blocks: int) -> None:
        self.allocate(num_blocks)
        c = self.model_config
        assert isinstance(c, DecoderConfig)
        self.cache = GroupedKVCache(
            c.windows,
            self.decoder.num_kv_heads,
            c.head_dim,
            num_blocks,
            num_window_blocks,
            self.config.cache.block_size,
            self.dtype,
        )

    def _empty_batch(self) -> PersistentBatch:
        arguments = self._batch_arguments(self.cache.num_blocks)
        return PersistentBatch(**arguments, padding_block=self.cache.padding_block)

    def _clear_unfinished(self) -> None:
        """Blocks with values that are not finite were zeroed by the step that made them, unless that was left half done."""
        self.stage.drain()
        if self._is_half_done:
            every_slot = np.arange(self.config.scheduler.max_num_seqs, dtype=np.int32)
            self._zero(np.arange(self.cache.num_blocks, dtype=np.int32), every_slot)
        if self._speculator is not None:
            self._speculator.clear()
        self.is_torn = self._is_half_done = False

    def _profile_working_bytes(self) -> int:
        """Peak memory of the largest prefill and of a decode step, beside weights and cache."""
        num_blocks, plans = self._largest_steps()
        self.allocate(num_blocks)
        seqs = self.config.scheduler.max_num_seqs
        before = memory.resident_bytes()
        memory.reset_peak()
        for plan in plans:
            self.step(plan)
        peak = max(0, memory.peak_bytes() - before)
        samples = seqs * (1 + self.config.scheduler.num_lookahead_tokens)
        logits = min(samples * self.model_config.vocab_size * 4, MAX_LOGITS_BYTES)
        c = self.model_config
        context = self.config.model.max_model_len * 2 * self.num_kv_heads * c.head_dim * self.dtype.itemsize
        if self._latent is not None:
            context = working_bytes(self._latent, self.num_kv_heads, self.config.model.max_model_len)
        if self._has_int8_cache:  # read as float32, and in the type of the model
            context *= 4 + self.dtype.itemsize
        del self.cache
        if self._draft_model is not None:
            del self._draft_model.cache
        adapters = 0 if self.adapters is None else self.adapters.num_bytes
        of_drafts = 0 if self._draft_model is None else self._draft_model.fixed_bytes
        return peak + 3 * logits + context + adapters + of_drafts

    @with_own_threads
    @torch.inference_mode()
    def measured_costs(self) -> dict[str, Costs]:
        """By steps of its own, as `check_itself`: rows of their own stand for drafts, which cost the same products."""
        size = self.config.cache.block_size
        most = min(costs.SIZES[-1], self.config.scheduler.max_num_batched_tokens // CHECK_PROMPT)
        slots = np.arange(most, dtype=np.int32)
        # Every step is one token more of the first row. Short sequences have no room for more rounds than are always made.
        of_round, room = len(costs.SIZES), self.config.model.max_model_len - CHECK_PROMPT - 1
        most_rounds = max(costs.ROUNDS, min(costs.MOST_ROUNDS, room // of_round - 1))
        per_row = -(-(CHECK_PROMPT + 1 + of_round * (1 + most_rounds)) // size)
        kept, self.processors = (self._speculator, self._draft_model, self.processors), None
        draft_model = self._draft_model
        self._speculator = self._draft_model = None
        try:
            self.allocate(most * per_row)
            if draft_model is not None:
                draft_model.allocate(most * per_row)
            self.step(self._small_prompts(slots, per_row, temperature=1.0))

            def step(rows: int) -> None:
                self.step(StepPlan(step=1, decode_slots=slots[: min(rows, most)]))

            def draft(rows: int) -> None:
                assert draft_model is not None
                draft_model.try_pass(self.batch, slots[: min(rows, most)])

            computes = (step,) if draft_model is None else (step, draft)
            steps, *drafts = costs.measured(*computes, most_rounds=most_rounds)
        finally:
            self._speculator, self._draft_model, self.processors = kept
            del self.cache, self.batch
        return {"step_costs": steps, "draft_costs": drafts[0] if drafts else ()}

    def take_costs(self, speculation: Speculation) -> None:
        if self._speculator is not None:
            self._speculator.take_costs(speculation)

    # Steps ------------------------------------------------------------------------------------------------------------

    def _zero(self, block_ids: I32, slots: I32 | None = None) -> None:
        self.cache.zero(block_ids, slots)
        if self._draft_model is not None:
            self._draft_model.zero(block_ids)

    def _pair(self, pairs: I32, step: int) -> None:
        if not isinstance(self.cache, GroupedKVCache):
            super()._pair(pairs, step)
        else:
            self.cache.pair(pairs)

    def _restore(self, states: list[list[int]]) -> None:
        assert isinstance(self.cache, RecurrentCache)
        self.cache.restore(states)

    def _copy(self, sources: I32, targets: I32) -> None:
        self.cache.copy(sources, targets)
        if self._draft_model is not None:
            self._draft_model.copy(sources, targets)

    @with_own_threads
    def check_itself(self) -> None:
        """A prefill and a decode step, in a batch and a cache of their own."""
        kept = self.cache, self.batch, self._rows, self._written, self._is_half_done, self._pooled, self.processors
        self._pooled, self.processors = PooledStates(), None
        drafting = self._speculator, self._draft_model
        self._speculator = self._draft_model = None
        try:
            with self.stage.alone():
                for result in map(self.step, self._check_plans()):
                    if result.came_to_nothing:
                        raise EngineError("the model's logits are not finite, whatever the tokens")
        finally:
            self.cache, self.batch, self._rows, self._written, self._is_half_done, self._pooled, self.processors = kept
            self._speculator, self._draft_model = drafting

    def _check_plans(self) -> Iterator[StepPlan]:
        """The two steps, for the batch and the cache that are made here. Models that make vectors have only the first."""
        is_pooling = self.config.model.pooler is not None
        size = self.config.cache.block_size
        per_row = -(-(CHECK_PROMPT + 1) // size)
        self.allocate(NUM_CHECK_ROWS * per_row)
        slots = np.arange(NUM_CHECK_ROWS, dtype=np.int32)
        yield self._small_prompts(slots, per_row, pooling=POOLING_CODES["last"] if is_pooling else 0)
        if not is_pooling:
            yield StepPlan(step=1, decode_slots=slots)

    def _small_prompts(self, slots: I32, per_row: int, pooling: int = 0, temperature: float | None = None) -> StepPlan:
        """Prompts from all over the vocabulary, whose rows have so many blocks each. temperature: None: of every other row."""
        num_rows = len(slots)
        num_tokens = num_rows * CHECK_PROMPT
        return StepPlan(
            step=0,
            new_rows=pack_rows(
                NewRow(
                    slot, CHECK_PROMPT, temperature=slot % 2 if temperature is None else temperature, pooling=pooling
                )
                for slot in slots.tolist()
            ),
            new_tokens=(np.arange(num_tokens) * (self.model_config.vocab_size - 1) // num_tokens).astype(np.int32),
            new_num_blocks=np.full(num_rows, per_row, np.int32),
            new_blocks=np.arange(num_rows * per_row, dtype=np.int32),
            prefill_slots=slots,
            prefill_counts=np.full(num_rows, CHECK_PROMPT, np.int32),
        )

    @with_own_threads
    @torch.inference_mode()
    def execute(self, plan: StepPlan) -> CpuStep:
        started = clock.now()
        self._is_half_done = True
        # Whatever it raises: no other rank may, and they wait for this one then.
        self.is_torn = self.config.world_size > 1
        if plan.lane.size:
            # Slots may have changed hands since; their new rows are given a token behind this one before they decode.
            for slots, tokens in self.stage.take(plan.lane.item(1)):
                self.batch.columns.last_token[slots] = tokens
        self._apply(plan)
        drafts = None if self._speculator is None else self._drafts(plan, self._speculator)
        inputs = self.batch.inputs(plan, drafts)
        inputs.between_layers = self.between_layers
        sampling = self._sampling_rows(inputs)
        self._written = inputs.kv_slots
        hidden, logits, draft_logits, seen = self._no_hidden, None, None, None
        bad_prompts = NO_I32
        prompt_logprobs: list[LogprobSpan] = []
        if len(inputs.token_ids):
            goes_on = inputs.decode_version == self._decode_version and not plan.new_rows.size
            self._decode_version = inputs.decode_version
            size = self._team.begin(len(inputs.token_ids), len(inputs.result_slots), goes_on=goes_on)
            set_own_num_threads(size)
            states = self.decoder.forward(inputs, self.cache)
            started = max(started, self.stage.received_at)
            if not self.stage.is_last:
                return self._pass_on(plan, inputs, sampling, states, started)
            if drafts is not None and not self._has_finite_drafts(states, inputs):
                drafts, inputs = None, self.batch.inputs(plan)
                inputs.between_layers = self.between_layers
                sampling = self._sampling_rows(inputs)
                states = self.decoder.forward(inputs, self.cache)
            if inputs.prefill_slots:
                bad_prompts = self._clear_bad_prompts(states, inputs)
                pooling = self.batch.columns.pooling[inputs.prefill_slots]
                if pooling.any():
                    self._pooled.observe(inputs, pooling, lambda where: self.decoder.select(states, where))
            if len(inputs.result_slots):
                hidden = self.decoder.select(states, inputs.result_tokens)
            if drafts is not None:
                logits, draft_logits = self._logits_with_drafts(states, hidden, inputs, sampling)
            elif len(sampling.how) == 1:
                logits = self._logits(hidden, sampling, 0, len(sampling.slots))
            if self.batch.prompt_logprobs:
                prompt_logprobs = self._prompt_logprobs(inputs, states)
            if self._draft_model is not None:
                seen = self._draft_model.follow(inputs, states)
        if inputs.saves:
            assert isinstance(self.cache, RecurrentCache)
            self.cache.keep_decoded(inputs)
        if inputs.forks:
            self.cache.fork(inputs.forks)
        self.batch.advance(inputs)
        return CpuStep(
            plan.step,
            inputs,
            sampling,
            plan.late_slots,
            started,
            hidden,
            logits,
            prompt_logprobs,
            bad_prompts,
            draft_logits,
            seen,
        )

    def _pass_on(
        self, plan: StepPlan, inputs: StepInputs, sampling: SamplingRows[Chunks], states: torch.Tensor, started: float
    ) -> CpuStep:
        """The end of a step on a stage that is not the last one. What is not finite is cleared here, as by the last stage there:
        when that tells of it, its blocks may be another request's."""
        self.stage.send(plan.step, states)
        if not torch.isfinite(states.sum(dtype=torch.float32)):
            if self.stage.is_alone:
                raise EngineError("the model's states are not finite, whatever the tokens")
            if inputs.prefill_slots:
                self._clear_bad_prompts(states, inputs)
            rows = torch.from_numpy(inputs.result_tokens[: len(inputs.decode_slots)])
            is_bad = ~torch.isfinite(states.index_select(0, rows).sum(1, dtype=torch.float32)).numpy()
            self._zero(self.batch.exclusive_blocks(inputs.decode_slots[is_bad]))
        if inputs.forks:
            self.cache.fork(inputs.forks)
        self.batch.advance(inputs)
        return CpuStep(plan.step, inputs, sampling, plan.late_slots, started, self._no_hidden, None, [], NO_I32)

    def _drafts(self, plan: StepPlan, speculator: Speculator) -> Drafts | None:
        """What is guessed of the decode rows of this step."""
        speculator.apply(plan, self.batch.known_tokens)
        if self._draft_model is not None:
            self._draft_model.apply(plan, self.batch)
            self._draft_model.catch_up(self.batch, speculator.histories)
        slots = self.batch.decode_slots
        if not plan.max_drafts:
            return None
        # The logits of all positions are there at a time.
        most_rows = MAX_LOGITS_BYTES // (4 * self.model_config.vocab_size)
        num_rows = len(slots) + len(plan.prefill_slots) + len(plan.new)
        most = min(plan.max_drafts, most_rows // num_rows - 1)
        drafts: Drafts | None = None
        if not self.ranks.rank:
            room = self.batch.draft_room(self.config.model.max_model_len)
            drafts = speculator.of_plan(plan, self.batch, room, most, self.tell_drafts)
        return drafts if self.ranks.size == 1 else agreed_drafts(self.ranks, drafts, len(slots), most)

    def _has_finite_drafts(self, states: torch.Tensor, inputs: StepInputs) -> bool:
        """Whether the drafts have finite states. If not, what they have stored is cleared: it is in the way of the rows.

        A row multiplies what stands behind it in its blocks by 0, and its own token may well be finite.
        """
        assert inputs.draft_tokens is not None
        where = inputs.draft_tokens
        if torch.isfinite(states[torch.from_numpy(where)].sum(1, dtype=torch.float32)).all():
            return True
        self.cache.clear(inputs, where)
        return False

    def _logits_with_drafts(
        self, states: torch.Tensor, hidden: torch.Tensor, inputs: StepInputs, sampling: SamplingRows[Chunks]
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Those of the samples and those at the drafts, by one product where each sample has a state of its own."""
        assert inputs.draft_tokens is not None
        num_samples = len(sampling.slots)
        drafted = self.decoder.select(states, inputs.draft_tokens)
        if sampling.states is not None:
            return self._logits(hidden, sampling, 0, num_samples), self.decoder.logits(drafted)
        logits = self.decoder.logits(torch.cat((hidden, drafted)))
        return logits[:num_samples], logits[num_samples:]

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
                tokens = np.concatenate([p.tokens for p in slice_])
                whole = logprobs.gather(logits, tokens, num_top, as_logits=self._shown.as_logits)
                at = 0
                for part in slice_:
                    spans.append(whole.part(at, at + len(part.where)).of_row(part.row, part.first))
                    at += len(part.where)
        return spans

    @with_own_threads
    @torch.inference_mode()
    def sample(self, handle: CpuStep, late: LateInputs | None = None) -> StepResult:
        sampling = handle.sampling
        num_samples = len(sampling.slots)
        tokens = np.zeros(num_samples, np.int32)
        if not self.stage.is_last:  # the last one does; this one only counts them
            self._team.end()
            self.is_torn = self._is_half_done = False
            self.batch.store(sampling.slots, tokens)
            self.stage.expect(handle.step, sampling.slots)
            return StepResult(step=handle.step, started=handle.started, ended=clock.now())
        is_void = np.zeros(num_samples, np.bool_)
        counts = np.zeros(num_samples, np.int32)  # of values that are not finite
        errors: dict[int, str] = {}
        spans = handle.prompt_logprobs
        first_masks = None if late is None else masks_behind(late, 0, self.model_config.vocab_size)
        for start, end, columns in sampling.how:
            logits = handle.logits if handle.logits is not None else self._logits(handle.hidden, sampling, start, end)
            if self.ranks.rank:
                continue  # the first rank samples
            slots = sampling.slots[start:end]
            raw = logits
            if (
                sampling.has_logprobs
                and not self._shown.is_processed
                and (sampling.has_rules or handle.late_slots.size)
            ):
                raw = logits.clone()
            is_void[start:end], bad, failed = self._prepare(logits, slots, first_masks, has_rules=sampling.has_rules)
            for row, count in bad.items():
                counts[start + row] = count
            if failed:
                errors |= {start + row: text for row, text in failed.items()}
            columns.token_index[:] = self.batch.columns.num_outputs[slots]
            tokens[start:end] = self._choose(logits, columns, slots, first_masks)
            if sampling.has_logprobs:
                if self._shown.is_processed:
                    raw = self._drawn_from(logits, columns, tokens[start:end])
                spans = spans + self._logprobs(raw, sampling, start, tokens[start:end])
        self._team.end()
        if self.ranks.size > 1 and num_samples:
            # One more than the values that are not finite, so that every rank knows them.
            tokens, told = self.ranks.agree(np.stack((tokens, is_void + counts)))
            is_void, counts = told > 0, told - 1
        self.is_torn = self._is_half_done = False
        if is_void.any():
            tokens[is_void] = 0
            # Here and not when the scheduler hears of it: by then a request that was preempted or aborted meanwhile has
            # lost its blocks, and the next owner would find them as they are.
            void = sampling.slots[is_void]
            # The last block of a prompt is not copied yet, and a fork may need it whose own choice was valid.
            needed = [source for slot, source in handle.inputs.forks if slot not in void]
            void = void[~np.isin(void, needed)] if needed else void
            self.cache.zero(self.batch.exclusive_blocks(void), void)
        self._store(sampling.slots, tokens)
        if not self.stage.is_alone:
            self.stage.tell(handle.step, tokens)
        vectors = None if sampling.rows is None else self._vectors(handle)
        runs = NO_I32
        if handle.draft_logits is not None:
            if not self.ranks.rank:
                tokens, runs, spans = self._check_drafts(handle, handle.draft_logits, tokens, is_void, spans, late)
            if self.ranks.size > 1:
                tokens, runs = self._agreed_runs(handle, tokens, runs)
        if self._draft_model is not None and handle.seen is not None:
            self._draft_model.keep(self.batch, handle.inputs, handle.seen, runs)
        if self._speculator is not None and late is not None and late.counts.size:
            self._speculator.force(late, sampling.slots, tokens, runs)
        return self._result(handle, tokens, is_void, counts, handle.bad_prompts, spans, vectors, errors, runs)

    def _choose(self, logits: torch.Tensor, columns: SamplingColumns, slots: I32, masks: LateInputs | None) -> I32:
        """One token of each row. Where grammars leave each row a single token, nothing is sampled."""
        if masks is not None and masks.slots.size:
            forced = only_choices(slots, masks)
            if forced is not None:
                return forced
        return self._sampler.sample(logits, columns)

    def _store(self, slots: I32, tokens: I32) -> None:
        """One token was sampled for each of these slots."""
        self.batch.store(slots, tokens)
        if self.processors is not None:
            self.processors.store(slots, tokens)
        if self._speculator is not None:
            self._speculator.store(slots, tokens)

    def _check_drafts(
        self,
        handle: CpuStep,
        logits: torch.Tensor,
        tokens: I32,
        is_void: NDArray[np.bool_],
        spans: list[LogprobSpan],
        late: LateInputs | None,
    ) -> tuple[I32, I32, list[LogprobSpan]]:
        """Sample at the positions of drafts, as always, as long as each draft is what was sampled before it.

        logits: at the drafts. tokens, is_void, spans: of the step's own samples, which are stored already. late: the masks.
        Returns the tokens of all rows, how many each row has (none: one each), and the log-probabilities of all.

        Position by position: penalties, bad words, min_tokens and the application's processors see each token in its turn.
        """
        drafts = handle.inputs.drafts
        assert drafts is not None
        assert self._speculator is not None
        slots = self.batch.decode_slots
        firsts = np.cumsum(drafts.counts) - drafts.counts
        runs = np.ones(len(tokens), np.int32)
        by_row = [[token] for token in tokens.tolist()]
        rows = np.flatnonzero((drafts.counts > 0) & ~is_void[: len(slots)])
        newest = tokens[rows]
        checked = drafts.counts
        if late is not None and late.slots.size:  # a row with masks goes as far as these
            masked = dict(zip(late.slots.tolist(), late.counts.tolist() or [1] * late.slots.size, strict=True))
            most = [masked.get(slot, MAX_DRAFTS + 1) - 1 for slot in slots.tolist()]
            checked = np.minimum(checked, np.array(most, np.int32))
        position = 0  # of the next draft
        while True:
            has_next = checked[rows] > position
            rows, newest = rows[has_next], newest[has_next]
            rows = rows[newest == drafts.tokens[firsts[rows] + position]]
            if not rows.size:
                break
            here = logits.index_select(0, torch.from_numpy(firsts[rows] + position))
            raw = here.clone() if handle.sampling.has_logprobs and not self._shown.is_processed else here
            has_rules = handle.sampling.has_rules
            masks = None if late is None else masks_behind(late, position + 1, self.model_config.vocab_size)
            void, _, _ = self._prepare(here, slots[rows], masks, has_rules=has_rules)
            if void.any():  # such a row stops before: its next step finds the same, and reports it
                kept = np.flatnonzero(~void)
                rows, where = rows[kept], torch.from_numpy(kept)
                here, raw = here.index_select(0, where), raw.index_select(0, where)
                if not rows.size:
                    break
            ((_, _, columns),) = self._how(slots[rows], has_rules=has_rules, has_logprobs=False)
            newest = self._choose(here, columns, slots[rows], masks)
            if handle.sampling.has_logprobs:
                if self._shown.is_processed:
                    raw = self._drawn_from(here, columns, newest)
                spans = spans + self._run_logprobs(raw, slots[rows], rows, newest)
            self.batch.accept(slots[rows])
            self._store(slots[rows], newest)
            runs[rows] += 1
            for row, token in zip(rows.tolist(), newest.tolist(), strict=True):
                by_row[row].append(token)
            position += 1
        self._speculator.observe(slots, drafts.counts, runs[: len(slots)] - 1)
        if position == 0:
            return tokens, NO_I32, spans
        return np.array([token for row in by_row for token in row], np.int32), runs, joined_runs(spans)

    def _agreed_runs(self, handle: CpuStep, tokens: I32, runs: I32) -> tuple[I32, I32]:
        """What the first rank has found of the drafts, on every rank: the others take the tokens that they have not stored yet."""
        drafts = handle.inputs.drafts
        assert drafts is not None
        slots = self.batch.decode_slots
        told = np.zeros((len(handle.sampling.slots), 2 + int(drafts.counts.max())), np.int32)  # how many, and which
        if not self.ranks.rank:
            told[:, 0] = runs if runs.size else 1
            told[:, 1:][firsts(told[:, 0], told.shape[1] - 1)] = tokens
        told = self.ranks.agree(told)
        counts = told[:, 0].copy()
        if self.ranks.rank:
            for position in range(1, int(counts.max())):
                rows = np.flatnonzero(counts[: len(slots)] > position)
                self.batch.accept(slots[rows])
                self._store(slots[rows], told[rows, 1 + position])
        return told[:, 1:][firsts(counts, told.shape[1] - 1)], counts if (counts > 1).any() else NO_I32

    def _run_logprobs(self, raw: torch.Tensor, slots: I32, rows: NDArray[np.intp], tokens: I32) -> list[LogprobSpan]:
        """Those of one position of several rows, of which some want them."""
        rules, as_logits = self.batch.rules, self._shown.as_logits
        spans: list[LogprobSpan] = []
        for i, (slot, row) in enumerate(zip(slots.tolist(), rows.tolist(), strict=True)):
            of, token = raw[i : i + 1], tokens[i : i + 1]
            if slot in rules.logprob_ids:
                ids = rules.logprob_ids[slot]
                spans.append(logprobs.gather_ids(of, int(token[0]), ids, row, as_logits=as_logits))
            elif slot in rules.num_logprobs:
                spans.append(logprobs.gather(of, token, rules.num_logprobs[slot], row, as_logits=as_logits))
        return spans

    @staticmethod
    def _drawn_from(logits: torch.Tensor, columns: SamplingColumns, tokens: I32) -> torch.Tensor:
        """What these tokens were drawn from, where log-probabilities are told of that. logits: as `_prepare` left them."""
        chosen = torch.from_numpy(tokens.astype(np.int64))
        return drawn_from(logits, chosen, columns.temperature, columns.top_k, columns.top_p, columns.min_p)

    def _vectors(self, handle: CpuStep) -> NDArray[np.float32]:
        """Of the rows that are pooled, made of their final states."""
        pooled, columns = handle.pooled, self.batch.columns
        slots = handle.inputs.result_slots[pooled]
        last = handle.hidden.index_select(0, torch.from_numpy(pooled)).float()  # [num_pooled, hidden_size]
        states = self._pooled.take(slots, columns.pooling[slots], columns.num_known[slots], last)
        vectors: NDArray[np.float32] = (states if self._head is None else self._head(states)).numpy()
        return vectors

    def _logprobs(
        self, raw: torch.Tensor, sampling: SamplingRows[Chunks], start: int, tokens: I32
    ) -> list[LogprobSpan]:
        """Of the samples from `start` on that want them; raw: their untouched logits, or what they were drawn from."""
        spans: list[LogprobSpan] = []
        as_logits = self._shown.as_logits
        here = [(i - start, num_top) for i, num_top in sampling.num_logprobs if start <= i < start + len(tokens)]
        for i, ids in sampling.logprob_ids.items():
            if start <= i < start + len(tokens):
                at = i - start
                row = sampling.row_of(i)
                spans.append(logprobs.gather_ids(raw[at : at + 1], int(tokens[at]), ids, row, as_logits=as_logits))
        for num_top in sorted({num_top for _, num_top in here}):
            samples = np.array([i for i, n in here if n == num_top], np.intp)
            logits = raw if len(samples) == len(raw) else raw.index_select(0, torch.from_numpy(samples))
            span = logprobs.gather(logits, tokens[samples], num_top, as_logits=as_logits)
            spans += [
                span.part(i, i + 1).of_row(sampling.row_of(sample + start), 0) for i, sample in enumerate(samples)
            ]
        return spans

    def _clear_bad_prompts(self, states: torch.Tensor, inputs: StepInputs) -> I32:
        """Look for prompts without finite states, and clear what they have written. Returns which prefill rows they are.

        Now, because a prompt that goes on in another step may be aborted or preempted before its logits are looked at.
        """
        first = inputs.num_decodes
        is_finite = np.isfinite(states[first:].sum(1, dtype=torch.float32).numpy())
        if is_finite.all():
            self.batch.bad_slots.update(slot for slot, source in inputs.forks if source in self.batch.bad_slots)
            return NO_I32
        rows = self._bad_prompts(inputs, is_finite)
        slots = [inputs.prefill_slots[row] for row in rows]
        slots += [slot for slot, source in inputs.forks if source in slots or source in self.batch.bad_slots]
        self.batch.bad_slots.update(slots)
        cleared = np.array(slots, np.int32)
        self._zero(self.batch.exclusive_blocks(cleared), cleared)
        return rows

    def _logits(self, hidden: torch.Tensor, sampling: SamplingRows[Chunks], start: int, end: int) -> torch.Tensor:
        """float32 [end - start, vocab_size] of the samples [start, end)."""
        if sampling.states is not None:
            states, row_of = np.unique(sampling.states[start:end], return_inverse=True)
            logits = self.decoder.logits(hidden.index_select(0, torch.from_numpy(states)))
            return logits.index_select(0, torch.from_numpy(row_of))
        return self.decoder.logits(hidden if end - start == len(hidden) else hidden[start:end])

    def _prepare(
        self, logits: torch.Tensor, slots: I32, late: LateInputs | None, *, has_rules: bool
    ) -> tuple[NDArray[np.bool_], dict[int, int], dict[int, str]]:
        """Change the logits in place as the rows' parameters say.

        Returns which rows have no valid choice at all, how many values of some of these are not finite, and of others why
        the application's processors failed.
        """
        counts: dict[int, int] = {}
        failed: dict[int, str] = {}
        # A NaN or an infinity anywhere makes the sum of its row one, too.
        is_void: NDArray[np.bool_] = ~np.isfinite(logits.sum(1).numpy())  # torch's is four calls
        if is_void.any():
            for row in np.flatnonzero(is_void).tolist():
                counts[row] = int(np.count_nonzero(~torch.isfinite(logits[row]).numpy()))
        if self.batch.bad_slots:
            is_void |= np.isin(slots, list(self.batch.bad_slots))
            for row in np.flatnonzero(is_void).tolist():
                counts[row] = max(counts.get(row, 0), 1)  # it has had states that were not
        if has_rules and self.processors is not None:
            logits[torch.from_numpy(is_void)] = 0.0
            failed = self.processors.apply(logits, slots, self.batch.columns.temperature[slots])
            failed = {row: text for row, text in failed.items() if not is_void[row]}
            is_void[list(failed)] = True
        masked: NDArray[np.intp] | None = None
        if late is not None and late.slots.size:
            masked, empty = apply_masks(logits.numpy(), slots, late.slots, late.allowed)
            is_void[empty] = True
        if has_rules:
            is_void[self.batch.rules.apply(logits.numpy(), slots, self.batch.columns.num_outputs[slots])] = True
            if masked is not None:  # together they may leave nothing
                is_void[masked] |= logits.numpy()[masked].max(axis=1, initial=-np.inf) == -np.inf
            if self.processors is not None:
                is_void |= logits.numpy().max(axis=1, initial=-np.inf) == -np.inf
        if is_void.any():
            logits[torch.from_numpy(is_void)] = 0.0
        return is_void, counts, failed

    def _how(self, slots: I32, *, has_rules: bool, has_logprobs: bool) -> Chunks:
        columns = self.batch.columns
        most = max(1, MAX_LOGITS_BYTES // (4 * self.model_config.vocab_size))
        chunks = []
        for start in range(0, len(slots), most):
            part = slots[start : start + most]
            how = SamplingColumns.of_slots(columns, part)
            chunks.append((start, start + len(part), how))
        return chunks
