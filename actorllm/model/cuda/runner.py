"""The worker's model on a GPU: steps are launched, and collected later.

    runner = CudaRunner(config); runner.load(); runner.allocate(runner.profile_num_blocks())
    handle = runner.execute(plan)           applies the plan, launches the forward and, unless `handle.waits_for` says that
                                            something is missing, the sampling; waits for nothing
    runner.choose(handle, late)             launches the sampling of a handle that waited
    handle.is_done, handle.waiter()         polled on the loop, or waited for in another thread
    result = runner.finish(handle)          the StepResult, once it is done; handles are finished in the order of their plans
    runner.close()                          gives the memory back

`execute` of the next plan may be called before `finish`. The next inputs are on the device (`state`), and the host's batch knows
how many tokens there are without knowing which. `sample(handle, late)` and `step(plan, late)` do all the rest and wait.

Decode steps are whole graphs (`graphs`). So is the forward of steps with prompts and few tokens (`mixed`). Larger ones are
launched kernel by kernel, because their kernels are large. All take the same builds of the kernels, as dependent launches where
the GPU has these, so that all are compiled before. A step that raises counts for nothing, as on the CPU. An error of the GPU
itself cannot be survived: `is_torn` says so.

How far the rows of a step with drafts (`drafts`) get is known when it is finished. No other is executed before:
`waits_for_results` says so.

With `device=HostDevice()` everything runs on CPU tensors (`ops` says how). Not thread-safe.
"""

from __future__ import annotations

import contextlib
import logging
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING, Any, ClassVar, cast

import numpy as np
import torch
from numpy.typing import NDArray

from actorllm import clock
from actorllm.config import EngineConfig
from actorllm.errors import ConfigError, EngineError, ModelError, UnsupportedModelError
from actorllm.messages import I32, NO_I32, U32, LateInputs, NewRow, StepPlan, StepResult, pack_rows
from actorllm.messages.logprobs import LogprobSpan, joined_runs
from actorllm.model.adapters.store import Adapters
from actorllm.model.cuda import experimental, head_drafter, ops, weight_copies
from actorllm.model.cuda.adapters import DeviceSlots
from actorllm.model.cuda.cache import DeviceCache
from actorllm.model.cuda.collectives import Collectives, own_device
from actorllm.model.cuda.decoder import (
    SWITCHES,
    DeviceDecoder,
    DeviceDecodeRows,
    DeviceModel,
    PagedAttention,
    PrefillRows,
    StepTokens,
)
from actorllm.model.cuda.device import Device, Download, HostDevice
from actorllm.model.cuda.draft_model import DeviceDraftModel, draft_engine
from actorllm.model.cuda.drafts import SampledRows, add_masks, edits_of, num_draft_slots, right_runs, sampled_rows
from actorllm.model.cuda.graphs import SIZES, DecodeGraphs, GraphPart
from actorllm.model.cuda.head import DeviceHead
from actorllm.model.cuda.head_drafter import DeviceHeadDrafter, consecutive
from actorllm.model.cuda.latent import check_latent
from actorllm.model.cuda.mixed import SIZES as MIXED_SIZES
from actorllm.model.cuda.mixed import MixedSteps, rows_of_tokens, supports
from actorllm.model.cuda.prompt_products import ONE_KIND, PromptProducts, StepRows
from actorllm.model.cuda.proof import memory, steps
from actorllm.model.cuda.proof.self_check import SelfCheck
from actorllm.model.cuda.quantized import ReadOnHost, device_form, open_on_device
from actorllm.model.cuda.rehearsal import MetaDevice, MetaWeights, compiling
from actorllm.model.cuda.sampling import (
    MAX_HEAD_ROWS,
    MAX_KERNEL_TOP,
    DeviceSampler,
    PendingSpans,
    Way,
    sorted_logprobs,
)
from actorllm.model.cuda.sleeping_weights import SleepingWeights
from actorllm.model.cuda.state import DeviceBatch, StateTable
from actorllm.model.cuda.virtual_memory import DriverError
from actorllm.model.families.decoder_config import DecoderConfig
from actorllm.model.heads import LayeredHead, LinearHead, read_linear
from actorllm.model.inputs import Drafts, StepInputs
from actorllm.model.linear import Form
from actorllm.model.logits import EditList, masks_behind
from actorllm.model.processors import processors_of
from actorllm.model.registry import Plan, check_same_model, check_shares
from actorllm.model.runner import ModelRunner, SamplingRows, StagedWeights, StepHandle, slices
from actorllm.model.shown_logits import ShownLogits, drawn_from
from actorllm.model.speculation.agreed import agreed_drafts
from actorllm.model.speculation.head_shape import HeadShape, read_head
from actorllm.model.speculation.speculator import Speculator
from actorllm.model.weights import Weights
from actorllm.types.drafter import Speculation
from actorllm.types.quantization import FP8, GGUF
from actorllm.types.speculation import DRAFT_MODEL, HEADS, NGRAM, SUFFIX, WITH_MODEL
from actorllm.types.weight_version import WeightSource
from actorllm_kernels.configs import architecture_of, target

if TYPE_CHECKING:
    from actorllm.model.hf.plan import TransformersPlan

logger = logging.getLogger(__name__)

PROMPT_LOGITS_BYTES = 256 << 20
"""Of the logits of prompts whose log-probabilities are wanted, at a time."""

DEFAULT_MEMORY_SHARE = 0.9
"""gpu_memory_utilization where it is not given, as in vLLM."""

GRAPH_BYTES = 256 << 20
"""Left free for what the driver keeps of recorded steps. An estimate, not a measurement."""

LOGITS_COPIES = 3
"""Of the logits of a step that a module has before they are done, in its type: a head, its bias, its cap."""

TRIAL_PROMPTS = (5, 3)
"""Tokens of the requests with which a recorded step is tried."""

TRIAL_TOLERANCE = 0.03
"""In standard deviations of a token's logits. A position or a token that stays the same costs more than 0.1."""

REHEARSED_BLOCKS = 16
"""Of a cache that has no memory; any number gives the same kernels."""

WARM_TOKENS = 256
"""Of the prompt that is tried before there are any."""

MEASURED_STEPS = 1024
"""How many steps `steady_step` has room for."""

_PART_OF = {Way.HEAD: GraphPart.HEAD, Way.LOGITS: GraphPart.LOGITS, Way.EDITED: GraphPart.FORWARD}
"""What a decode step launches before its tokens are chosen, or with that."""

NEVER_SORTED = 1 << 62
"""Decode rows stay in the order of the plan: the kernels balance lengths themselves."""


@dataclass(slots=True)
class CudaHandle(StepHandle[Way]):
    """A step that is under way."""

    rows: torch.Tensor  # int32: slots, or -1
    waits_for_tokens: bool
    """Its rules depend on what the step before samples: `choose` must come after the `finish` of that."""
    sampled: SampledRows | None = None
    """The rows of the sampler in a step with drafts; None: they are the samples."""
    late: LateInputs | None = None
    """The masks that it was sampled with."""
    size: int | None = None
    """Rows of a decode step with its padding; None: it has prompts."""
    download: Download | None = None
    """What the result is made of; None: not sampled yet."""
    owners: NDArray[np.int64] = field(default_factory=lambda: np.zeros(0, np.int64))
    """Of the sampled slots, when the step was launched."""
    prompt_owners: NDArray[np.int64] = field(default_factory=lambda: np.zeros(0, np.int64))
    outputs: list[torch.Tensor] = field(default_factory=list)
    """What is to be downloaded beside the tokens: first whether prompt tokens are finite, then vectors, then log-probabilities."""
    spans: list[PendingSpans] = field(default_factory=list)
    masks: dict[int, U32] = field(default_factory=dict)
    """Of rows of the sampler, what the application's processors leave of their logits."""
    choice_masks: dict[int, U32] = field(default_factory=dict)
    """Of rows of the sampler, what all masks together leave: these, those of rules, and those of grammars."""
    errors: dict[int, str] = field(default_factory=dict)
    """Of samples, why the application's processors failed."""

    @property
    def sampled_slots(self) -> I32:
        """By row of the sampler, whose token it chooses."""
        return self.sampling.slots if self.sampled is None else self.sampled.slots

    @property
    def waits_for(self) -> bool:
        """`choose` has not been called."""
        return self.download is None

    @property
    def is_done(self) -> bool:
        """Whether `finish` would not wait."""
        return self.download is not None and self.download.is_done

    def waiter(self) -> Callable[[], None]:
        """What returns once it is done, for another thread; it holds nothing of the step, which must have been chosen from."""
        assert self.download is not None
        return self.download.waiter()


class CudaRunner(ModelRunner[CudaHandle, Way]):
    """See the module docstring."""

    name = "cuda"
    switches = SWITCHES
    runs_modules = True
    batch: DeviceBatch
    launches_ahead = True
    profiled = (torch.profiler.ProfilerActivity.CPU, torch.profiler.ProfilerActivity.CUDA)
    _owned: ClassVar[tuple[str, ...]] = (
        "model",
        "graphs",
        "mixed",
        "sampler",
        "state",
        "_pool",
        "_attention",
        "_decode_rows",
        "_label_head",
        "batch",
        "adapters",
        "_slots",
        "_prompts",
        "_sleeping",
    )  # graphs lead back to here

    def __init__(
        self,
        config: EngineConfig,
        rank: int = 0,
        *,
        show_progress: bool | None = None,
        device: Device | None = None,
        plan: Plan | None = None,
    ) -> None:
        """device: None for the GPU of this rank. Raises ConfigError when there is none that can be used."""
        self.device = device if device is not None else own_device(config, rank)
        super().__init__(config, rank, show_progress=show_progress, plan=plan)
        self._experiments = experimental.enabled()
        self._shown = ShownLogits.of(config.model.logprobs_mode)
        self.collectives = Collectives()
        self._slots: DeviceSlots | None = None
        """Of `adapters`."""
        self._prompts: PromptProducts | None = None
        """None: rows of prompts have the same products as decode rows."""
        self._sleeping: SleepingWeights | None = None
        """Of the model; None: its memory is never given back."""
        self.model: DeviceModel
        self.state: StateTable
        self.sampler: DeviceSampler
        self.graphs: DecodeGraphs
        self.mixed: MixedSteps | None = None
        self._pool: DeviceCache
        self._attention: PagedAttention
        self._decode_rows: DeviceDecodeRows
        self._rows_of_size: dict[int, DeviceDecodeRows] = {}
        self._loaded_rows: tuple[int, int] | None = None
        """What is in the decode rows: version, and size."""
        self._label_head: LinearHead | LayeredHead | None = None
        """From pooled states to scores, on the device."""
        self._speculator: Speculator | None = None
        self._draft_runner: CudaRunner | None = None
        """Of the model that drafts."""
        self._draft_model: DeviceDraftModel | None = None
        self._heads: DeviceHeadDrafter | None = None
        """The same, where it reads states of this model."""
        self._states: torch.Tensor | None = None
        """Of the step that was launched last, where they are not in the memory of decode steps."""
        self._newest: CudaHandle | None = None
        """The step that was executed last, until it is finished: then there is none under way."""

    def close(self) -> None:
        """As on the CPU: at once, without the garbage collector, so that the next engine finds the memory of the GPU free."""
        with self.device.active():
            self._rows_of_size.clear()
            self._loaded_rows = self._label_head = self._speculator = self._draft_model = self._newest = None
            self._heads = self._states = None
            drafting, self._draft_runner = self._draft_runner, None
            if drafting is not None:
                drafting.close()
            super().close()
            self.device.release()

    # Before the first step --------------------------------------------------------------------------------------------

    @torch.inference_mode()
    def load(self) -> None:
        """Read the weights, or draw them, straight to the device, while the kernels are compiled. Raises ModelError."""
        check_shares(self.model_config, self.config.model, self.config.world_size)
        self.collectives = Collectives.connect(self.config, self.rank, self.device)
        self.ranks = self.collectives.ranks
        is_compiled = self.device.torch_device.type == "cuda"
        with self.device.active(), compiling(self._rehearse) if is_compiled else contextlib.nullcontext():
            self.model = self._load()
            self.processors = processors_of(self.config, self.dtype, self.device.torch_device)
        if self._prompts is not None:
            with self.device.active():
                self.scheme = self._prompts.choose(
                    self.config.model, self.dtype, self.device, self.collectives.all_agree
                )
        if self._sleeps:
            self._make_sleeping()
        if self.device.proves_itself:
            self._check_kernels()
        if self.config.speculation is not None:
            self._load_drafter(self.config.speculation)

    @property
    def _sleeps(self) -> bool:
        """Whether memory may be given back while addresses stay."""
        return self.config.enable_sleep_mode and self.device.keeps_addresses

    def _make_sleeping(self) -> None:
        with self.device.active():
            try:
                self._sleeping = SleepingWeights(self.device, self.model)
            except DriverError as error:
                raise ConfigError(
                    f"enable_sleep_mode=True: {error}; leave it out, or free memory of the GPU"
                ) from error

    def _load_drafter(self, speculation: Speculation) -> None:
        """Make what drafts. Raises ModelError, ConfigError."""
        if speculation.method in WITH_MODEL and not isinstance(self.model_config, DecoderConfig):
            raise UnsupportedModelError(
                f"speculative_config (method={speculation.method!r}) is not supported for {self.config.model.architecture} yet, "
                f"which runs through transformers; use {NGRAM!r} or {SUFFIX!r}"
            )
        if speculation.method in HEADS:
            self._load_head()
        elif speculation.method == DRAFT_MODEL:
            config, shape = draft_engine(self.config)
            self._draft_runner = CudaRunner(
                config, self.rank, show_progress=self._show_progress, device=self.device, plan=shape
            )
            try:
                self._draft_runner.load()
            except ModelError as error:
                raise type(error)(f"speculative_config: the draft model: {error}") from error
            is_greedy = speculation.draft_sample_method == "greedy"
            self._draft_model = DeviceDraftModel(self._draft_runner, is_greedy=is_greedy)
        self._speculator = Speculator(speculation, self.model_config.vocab_size, self._draft_model)

    def _load_head(self) -> None:
        """Make the head that drafts. Raises ModelError."""
        speculation, target = self.config.speculation, self.model
        assert speculation is not None
        assert isinstance(self.model_config, DecoderConfig)
        assert isinstance(target, DeviceDecoder)

        def without_weights(device: Device) -> DeviceModel:
            return self._twin(device)._without_weights()

        shape = read_head(self.config, self.model_config)
        target.taps = shape.taps
        runner = HeadRunner(
            self.config, shape, target, without_weights, show_progress=self._show_progress, device=self.device
        )
        self._draft_runner = runner
        try:
            runner.load()
        except ModelError as error:
            raise type(error)(f"speculative_config: the head that drafts: {error}") from error
        ranges = speculation.num_speculative_tokens_per_batch_size
        most_rows = max((last for _, last, drafts in ranges if drafts), default=0)
        is_greedy = speculation.draft_sample_method == "greedy"
        self._draft_model = self._heads = DeviceHeadDrafter(runner, is_greedy=is_greedy, most_rows=most_rows)

    def _load(self) -> DeviceModel:
        model, plan = self.config.model, self.model_config
        if isinstance(plan, DecoderConfig):
            if plan.latent is not None:
                check_latent(plan.latent, self.config)
            form = device_form(model)
            with open_on_device(model, form, self.dtype, self._show_progress, self.device.torch_device) as weights:
                if model.pooler is not None and model.pooler.head is not None:
                    self._label_head = read_linear(model.pooler.head, plan, model, weights)
                return self._decoder(plan, weights, form)
        if self.config.lora is not None:
            raise UnsupportedModelError(
                f"enable_lora=True: on CUDA, {model.architecture} runs through transformers, where there are no adapters yet; use "
                f"device='cpu', or leave it out"
            )
        if self._cache_dtype != self.dtype:
            raise UnsupportedModelError(
                f"kv_cache_dtype={self.config.cache.dtype!r} is not supported on CUDA for models that run through transformers; "
                f"leave it out, or use device='cpu' with kv_cache_dtype='int8'"
            )
        from actorllm.model.cuda import transformers_model  # imports transformers

        modules = cast("TransformersPlan", plan)
        self._prompts = self._new_prompts()
        return transformers_model.load(modules, model, self.dtype, self._show_progress, self.device, self._prompts)

    @property
    def _cache_dtype(self) -> torch.dtype:
        """Of the numbers of the cache; uint8: codes of floats of 8 bits."""
        return torch.uint8 if self.config.cache.dtype == FP8 else self.dtype

    @property
    def block_bytes(self) -> int:
        shape = self.model.shape
        per_token = self.model_config.num_layers * shape.num_parts * shape.num_kv_heads * shape.head_dim
        of_drafts = 0 if self._draft_runner is None else self._draft_runner.block_bytes
        return self.config.cache.block_size * per_token * self._cache_dtype.itemsize + of_drafts

    def _decoder(self, plan: DecoderConfig, weights: Weights, form: Form) -> DeviceDecoder:
        """With room for adapters, if requests may have them."""
        lora = self.config.lora
        if lora is not None:
            self._slots = DeviceSlots(lora.max_loras, lora.max_lora_rank, self.dtype, self.device)
            self.adapters = Adapters(lora, self._slots)
        length = self.config.model.max_model_len
        self._prompts = self._new_prompts()
        return DeviceDecoder(plan, weights, length, self.device, self.collectives, form, self._slots, self._prompts)

    def _new_prompts(self) -> PromptProducts | None:
        """Where rows of prompts may have products of their own."""
        model = self.config.model
        self.scheme = model.scheme
        # One kind is what another start has found.
        return PromptProducts() if model.quantization_twin and model.scheme != ONE_KIND else None

    @torch.inference_mode()
    def stage_weights(self, source: WeightSource) -> StagedWeights:
        """A decoder like this one in the memory of the host: that of the device has no room for a second one.

        Layers of "mtp" and models that draft keep their weights.
        """
        config, plan = self.config, self._updated_plan()
        model = replace(config.model, weights=source)
        source.check_unchanged()
        check_same_model(model, plan, type(self))
        form, host = device_form(model), HostDevice()
        with open_on_device(model, form, self.dtype, False, host.torch_device) as weights:
            decoder = DeviceDecoder(plan, weights, model.max_model_len, host, self.collectives, form)
        source.check_unchanged()  # else it was written while it was read
        for _ in weight_copies.pairs(self.model, decoder):  # which raises where they are not alike
            pass
        return decoder

    def _updated_plan(self) -> DecoderConfig:
        """Of a model whose weights can be read again. Raises UnsupportedModelError."""
        config, plan = self.config, self.model_config
        reasons = {
            "enable_lora=True": config.lora is not None,
            "quantization_twin=True": self._prompts is not None,
            "a model that makes vectors": config.model.pooler is not None,
            "a GGUF file": config.model.quantization == GGUF,
        }
        told = [reason for reason, is_given in reasons.items() if is_given]
        if told or not isinstance(plan, DecoderConfig):
            raise UnsupportedModelError(
                f"weights cannot be updated on CUDA with {told[0] if told else 'a model that runs through transformers'} yet; "
                f"build a new engine, or use device='cpu'"
            )
        return plan

    def stage_waking(self, source: WeightSource) -> StagedWeights:
        """Nothing where a copy of them is on the host."""
        if self._sleeping is None or self._sleeping.lacks_weights:
            return self.stage_weights(source)
        return None

    @torch.inference_mode()
    def commit_weights(self, staged: StagedWeights) -> None:
        self._wake_weights()
        if staged is None:
            return  # they were on the host
        done: set[int] = set()  # a head may be the embedding
        with self.device.active():
            for held, new in weight_copies.pairs(self.model, staged):
                if held.data_ptr() not in done:
                    held.copy_(new)
                    done.add(held.data_ptr())
            self.device.wait_for_all()
        if self._sleeping is not None:
            self._sleeping.lacks_weights = False

    def _check_kernels(self) -> None:
        """Hold every kernel against torch, and part with those that are wrong; what was found is remembered."""
        model = self.config.model
        # config.json may leave open which forms there are
        forms, cache = self.model.forms, (self.config.cache.block_size, str(self._cache_dtype), model.max_model_len)
        has_drafts = self._num_draft_slots > 0  # other builds of attention
        plan = repr(self.model_config), str(self.dtype), forms, self._decodes, self.config.scheduler, cache, has_drafts
        key = memory.key_of(self.device.description, self.device.uses_pdl, *plan, self.collectives.size)
        failed = memory.remembered(key)
        if failed is None:
            began = clock.now()
            check = SelfCheck()
            if self._slots is not None:
                self._slots.put(1, self._slots.made_up())
            with ops.checking(check), self.collectives.alone():
                self._allocate(steps.NUM_BLOCKS)
                steps.make_steps(self)
            if self._slots is not None:
                self._slots.put(1, {})
            del self._pool
            failed = check.failed
            logger.info("%d kernels were checked against torch in %.1f s", check.num_checked, clock.now() - began)
            memory.remember(key, failed)
        ops.replace(failed)
        for name, what in failed.items():
            told = "the kernel %s is wrong on %s (%s): torch computes in its place, and steps are slow"
            logger.error(told, name, self.device.description, what)

    @property
    def pool(self) -> torch.Tensor:
        """Of the cache: [num_layers, num_blocks, 2, num_kv_heads, block_size, head_dim]; of latents, 1 in the place of 2."""
        return self._pool.pool

    def launch_decode(self, part: GraphPart | None, size: int, slots: I32) -> None:
        """A part of a decode step of this size for the rows in these slots; None: the part that a plain step has."""
        self._load_rows(slots, -1, size)
        self._launch_part(self._way_part(size) if part is None else part, size)

    def _without_weights(self) -> DeviceModel:
        plan = self.model_config
        if isinstance(plan, DecoderConfig):
            return self._decoder(plan, MetaWeights(self.dtype), device_form(self.config.model))
        from actorllm.model.cuda import transformers_model

        modules = cast("TransformersPlan", plan)
        self._prompts = self._new_prompts()
        return transformers_model.without_weights(modules, self.config.model, self.dtype, self.device, self._prompts)

    def _rehearse(self) -> None:
        if isinstance(device_form(self.config.model), ReadOnHost):
            logger.info(
                "the kernels are compiled when they are first launched: the files say which forms the layers have"
            )
            return
        try:
            self.rehearse()
        except Exception:  # of modules of another library
            if isinstance(self.model_config, DecoderConfig):
                raise
            # A module of transformers wants values.
            logger.info("some kernels are compiled when they are first launched", exc_info=True)

    def _twin(self, device: Device) -> CudaRunner:
        """A runner of the same model on another device."""
        return CudaRunner(self.config, self.rank, device=device, plan=self.model_config)

    @torch.inference_mode()
    def rehearse(self) -> None:
        """Make the launches of every kind of step, on tensors without memory."""
        device = MetaDevice(uses_pdl=self.device.uses_pdl)
        with target(architecture_of(self.device.torch_device)):
            twin = self._twin(device)
            twin.collectives = self.collectives.silent()
            twin.model = twin._without_weights()
            twin._allocate(REHEARSED_BLOCKS)
            for part, size in twin._decode_parts():
                twin._launch_part(part, size)
            for key in twin._mixed_parts:
                twin._launch_part(*key)
            twin.warm_prefill()

    @torch.inference_mode()
    def warm_prefill(self) -> None:
        """Launch the kernels of steps with prompts, for few and for many tokens, and for each number of decode rows beside them.

        Nothing is written. Attention of decode rows beside prompts is a build of its own: there it stores no keys by itself.
        """
        most = min(self.config.scheduler.max_num_batched_tokens, self.config.model.max_model_len)
        for count in dict.fromkeys(min(most, count) for count in (*self.model.kinds_of_forward(), WARM_TOKENS)):
            with self.collectives.alone():  # which kinds there are may differ between ranks
                for is_adapted in self._kinds:
                    states = self._states_of_none(count, is_adapted)
                if self._has_two_kinds:  # output that is computed once more
                    self._states_of_none(count, kinds=StepRows(count))
                if not self._decodes:
                    self.model.select(states, self.device.upload(np.zeros(1, np.int64)))
        for size in self.graphs.kinds if self._decodes else ():
            with self.collectives.alone():
                self._states_of_none(1, num_rows=size)

    def _states_of_none(
        self, count: int, is_adapted: bool = False, num_rows: int = 0, kinds: StepRows | None = None
    ) -> torch.Tensor:
        """Of a prompt of so many tokens, of which nothing is written, behind so many decode rows of no slot.

        is_adapted: launch what adapters take. kinds: which tokens are of prompts; None: all of the prompt.
        """
        counts = np.array([count], np.int32)
        zeros = np.zeros(num_rows + count, np.int64)
        ids, positions, nowhere = self.device.upload_parts(zeros, zeros, zeros - 1)
        rows: DeviceDecodeRows | None = None
        if num_rows:
            self._load_rows(NO_I32, -1, num_rows)
            rows = self._rows_for(num_rows)
            self._prepare_rows(rows)
        chunks = self._attention.chunks(np.zeros(1, np.int32), counts, counts)
        token_rows = self.device.upload(zeros.astype(np.int32)) if is_adapted else None
        if kinds is None and self._has_two_kinds:
            kinds = StepRows(num_rows)
        tokens = StepTokens(ids, positions, nowhere, rows, chunks, token_rows=token_rows, kinds=kinds)
        states = self.model.forward(tokens, self._pool, self.state, pdl=self.device.uses_pdl)
        ops.kv_clear(self._pool.pool, nowhere, torch.isfinite(states.sum(1, dtype=torch.float32)).int())
        return states

    @property
    def num_kv_heads(self) -> int:
        return self.model.shape.num_kv_heads

    @property
    def weight_bytes(self) -> int:
        return self.model.num_bytes

    def _check_room(self, num_bytes: int, wish: str) -> None:
        total, foreign, held = self.device.total_bytes(), self.device.foreign_bytes(), self.device.held_bytes()
        if num_bytes > (free := total - foreign - held):
            raise ConfigError(
                f"{wish} is more than the {free} bytes that are free: of the GPU's {total}, other "
                f"processes and the driver hold {foreign} and the weights {held}"
            )

    def _cache_bytes(self) -> int:
        """What the largest prefill and decode steps, the weights and other programs leave of gpu_memory_utilization."""
        cache = self.config.cache
        num_blocks, plans = self._largest_steps()
        with self.device.active():
            for runner in (self, self._draft_runner):
                if runner is not None:
                    runner._allocate(num_blocks)
            self.device.reset_peak()
            before = self.device.held_bytes()
            for plan in plans:
                self.step(plan)
            peak = self.device.peak_bytes()
            held = peak - num_blocks * self.block_bytes
            share = cache.memory_utilization if cache.memory_utilization is not None else DEFAULT_MEMORY_SHARE
            room = int(self.device.total_bytes() * share) - self.device.foreign_bytes() - held
            del self._pool
            if self._draft_runner is not None:
                del self._draft_runner._pool
        if self.model.needs_trial:
            # A module makes logits of its own type first, and its graphs have memory of their own.
            rows, tokens = self._max_rows, self.config.scheduler.max_num_batched_tokens
            logits = LOGITS_COPIES * rows * self.model_config.vocab_size * self.dtype.itemsize
            of_step = max(0, peak - before) * min(rows, SIZES[-1]) // tokens
            room -= 2 * logits + of_step if self._records else logits
        if self._records:
            room -= GRAPH_BYTES * (len(self._kinds) + (self._draft_runner is not None))
        return room - self._logprobs_bytes

    @property
    def _logprobs_bytes(self) -> int:
        """What a step with log-probabilities takes beside the logits of all others: copies of rows that want them."""
        most, row = self.config.model.max_logprobs, 4 * self.model_config.vocab_size
        if most == 0 or not self._decodes:
            return 0
        # Above what the kernel looks for: sorted logits with their ids in 64 bits, and the log-probabilities of all.
        # Of other modes than the default all rows, with what is left of them by filters.
        num_more = 8 if self._shown.is_processed else 0 if 0 < most <= MAX_KERNEL_TOP and self._shown.is_plain else 4
        prompts = min(PROMPT_LOGITS_BYTES, self.config.scheduler.max_num_batched_tokens * row)
        num_parts = 2 if self.collectives.size > 1 else 0  # this rank's logits and those of all
        return max((2 + num_more) * self._max_rows * row, (1 + num_more + num_parts) * prompts)

    def allocate(self, num_blocks: int) -> None:
        """Make the KV cache, the state table and the memory of decode steps; record the smallest and the largest of these."""
        if self._draft_runner is not None:
            self._draft_runner.allocate(num_blocks)
        self._allocate(num_blocks)
        if missing := self._missing_experiments:
            told = "decode steps are launched kernel by kernel; %s=%s would record them, which no GPU has shown to work"
            logger.info(told, experimental.VARIABLE, ",".join(missing))
        if self.graphs.is_on and (self.model.needs_trial or self.device.proves_itself):
            self._try_recording()
        smallest, *others = self.graphs.sizes
        for size in (smallest, *reversed(others)) if self._decodes else ():
            for is_adapted in self._kinds:
                self.graphs.want(self._way_part(size).of_step(is_adapted), size)
        for key in self._mixed_parts:
            self.graphs.want(*key)
        if self.collectives.size > 1:  # the same at all ranks, whatever their loops find time for later
            while self.record_next():
                pass
        if self.device.torch_device.type == "cuda":
            self.warm_up()

    @torch.inference_mode()
    def warm_up(self) -> None:
        """Record the smallest and the largest step, and launch the rest once, for rows of no slot.

        So no request waits for a compiler. The other sizes are recorded when there is time.
        """
        for _ in range(2 * len(self._kinds)):
            self.record_next()
        with self.device.active():
            for part, size in self._decode_parts():
                if (part, size) not in self.graphs:
                    self._load_rows(NO_I32, -1, size)
                    self._launch_part(part, size)
            for key in self._mixed_parts:
                if key not in self.graphs:
                    self._launch_part(*key)
            self.warm_prefill()
            ops.kv_copy(self._pool.pool, self.device.upload(np.zeros((1, 2), np.int32)))  # zeros to where zeros are

    @torch.inference_mode()
    def _allocate(self, num_blocks: int) -> None:
        config, c, shape, on = self.config, self.model_config, self.model.shape, self.device.torch_device
        size, length = config.cache.block_size, config.model.max_model_len + config.scheduler.num_spare_tokens
        for name in ("graphs", "sampler", "state"):  # those of the profile go before there are others
            vars(self).pop(name, None)
        self.mixed = None  # it has the cache of the profile
        self._rows_of_size.clear()
        with self.device.active():
            self._pool = DeviceCache(
                self.device,
                c.num_layers,
                shape.num_kv_heads,
                shape.head_dim,
                num_blocks,
                size,
                self._cache_dtype,
                shape.num_parts,
                sleeps=self._sleeps,
            )
            self.state = StateTable(
                self.device, config.scheduler.max_num_seqs, -(-length // size), self._num_draft_slots
            )
            self.sampler = DeviceSampler(c.vocab_size, self._max_rows, self.state, self.device, self.collectives)
            self._attention = PagedAttention(shape, self.device, has_drafts=self._num_draft_slots > 0)
            self._decode_rows = DeviceDecodeRows(self._max_rows, shape, on)
            # Of a recorded step, any token may be of a prompt.
            can_mix = self._records and supports(self.model) and not self._has_two_kinds
            most = min(config.scheduler.max_num_batched_tokens, MIXED_SIZES[-1]) if can_mix else 0
            self.model.allocate(max(self._max_rows, most), self._attention)
            if can_mix:
                self.mixed = MixedSteps(
                    cast("DeviceDecoder", self.model),
                    self._decode_rows,
                    self._attention,
                    self._pool,
                    self.state,
                    self.device,
                    config.scheduler.max_num_batched_tokens,
                )
        is_on = self._records and self.collectives.all_agree(not ops.replaced())
        self.graphs = DecodeGraphs(
            self.device, self._launch_part, self._max_rows, is_on=is_on, all_agree=self.collectives.all_agree
        )
        self.batch = self._empty_batch()
        self._loaded_rows = self._rows = self._newest = None
        self._pooled.clear()
        if self._speculator is not None:
            self._speculator.clear()

    @property
    def _has_two_kinds(self) -> bool:
        """Whether rows of prompts have products of their own."""
        return self._prompts is not None and self._prompts.is_used

    @property
    def _decodes(self) -> bool:
        """Whether there are decode steps: an engine that pools prompts has none."""
        return self.config.model.pooler is None

    def _decode_parts(self) -> list[tuple[GraphPart, int]]:
        """Of decode steps, so many that each kernel is among their launches."""
        if not self._decodes:
            return []
        smallest = self.graphs.sizes[0]
        parts = [(self._way_part(size), size) for size in self.graphs.kinds]
        parts += [(GraphPart.LOGITS, smallest), (GraphPart.FORWARD, smallest)]
        return [(part.of_step(kind), size) for kind in self._kinds for part, size in parts] + [
            (GraphPart.CHOICE, smallest)
        ]

    @property
    def _kinds(self) -> tuple[bool, ...]:
        """Of steps, whether some row has an adapter: each kind has graphs of its own."""
        return (False,) if self._slots is None else (False, True)

    @property
    def _mixed_parts(self) -> list[tuple[GraphPart, int]]:
        """Of steps with prompts that may be graphs: their tokens."""
        sizes = self.mixed.sizes if self.mixed is not None and self.graphs.is_on else ()
        return [(GraphPart.MIXED.of_step(kind), size) for kind in self._kinds for size in sizes]

    @property
    def _num_draft_slots(self) -> int:
        """Rows of the state table for drafts, behind those of requests."""
        return num_draft_slots(self.config.speculation, self.config.scheduler.max_num_seqs)

    @property
    def _max_rows(self) -> int:
        """Of a decode step: requests and drafts."""
        return self.config.scheduler.max_num_seqs + self._num_draft_slots

    def _empty_batch(self) -> DeviceBatch:
        return DeviceBatch(**self._batch_arguments(self._pool.num_blocks), sort_gain=NEVER_SORTED)

    def _clear_unfinished(self) -> None:
        self.discard()
        self._loaded_rows = None
        if self._speculator is not None:
            self._speculator.clear()
        if self._draft_runner is not None:
            self._draft_runner.forget_requests()

    def discard(self) -> None:
        super().discard()
        self._newest = None
        if self._draft_runner is not None:
            self._draft_runner.discard()

    def _zero(self, block_ids: I32) -> None:
        with self._on_device():
            self._pool.zero(block_ids)

    def _copy(self, sources: I32, targets: I32) -> None:
        self._pool.copy(sources, targets)

    @torch.inference_mode()
    def check_itself(self) -> None:
        """A decode step with a row of no slot, or a prompt where prompts are pooled: neither changes anything for any request.

        Of several ranks each looks at what it has itself: they need not come here between the same two launches.
        """
        with self._on_device(), self.collectives.alone():
            if self._decodes:
                self._load_rows(NO_I32, -1, 1)
                rows, found = self._rows_for(1), self.sampler.logits[:1]
                self._prepare_rows(rows)
                self.model.logits(self.model.decode(rows, self._pool, self.state, pdl=self.device.uses_pdl), found)
            else:
                found = self._states_of_none(1)
            is_finite = self.device.download([torch.isfinite(found).all()]).wait()[0]
        if not is_finite:
            what = "logits" if self._decodes else "states"
            raise EngineError(f"the model's {what} are not finite, whatever the tokens")

    def statistics(self) -> dict[str, Any]:
        """Counters of the decode steps' parts, and of kernels that torch has taken the place of."""
        counters = self.graphs.statistics() | {"num_replaced_kernels": len(ops.replaced())}
        return counters if self.scheme is None else counters | {"scheme": self.scheme}

    # Sleep ------------------------------------------------------------------------------------------------------------

    @property
    def _runners(self) -> list[CudaRunner]:
        """This one, and that of what drafts."""
        return [self] if self._draft_runner is None else [self, self._draft_runner]

    @property
    def _is_asleep(self) -> bool:
        """Whether some memory is missing that steps need."""
        return self._sleeping is not None and (self._sleeping.is_asleep or self._pool.is_asleep)

    def release_weights(self, source: WeightSource, *, keeps_pages: bool) -> None:
        """A copy is kept on the host, or they are read again. What drafts or was drawn on the device is copied in any case."""
        if self._sleeping is None:
            raise self._without_updates()
        dropped: list[torch.Tensor] = []
        if not keeps_pages:
            try:
                self._updated_plan()
            except UnsupportedModelError as error:
                raise UnsupportedModelError(f"sleep(level=2) drops the weights: {error}; or use level=1") from error
            if self.config.model.load_format != "dummy" or not source.is_first:
                dropped = [held for held, _ in weight_copies.pairs(self.model, self.model)]
        with self.device.active():
            for runner in self._runners:
                assert runner._sleeping is not None
                runner._sleeping.fall_asleep(dropped if runner is self else ())
            self.device.trim()

    def _wake_weights(self) -> None:
        with self.device.active():
            for runner in self._runners:
                if runner._sleeping is not None:
                    runner._sleeping.wake_up()

    def release_cache(self) -> None:
        if self._sleeping is None:
            raise self._without_updates()
        with self.device.active():
            for runner in self._runners:
                runner._pool.release()
            self.device.trim()

    def restore_cache(self) -> None:
        with self.device.active():
            for runner in self._runners:
                runner._pool.restore()

    def resident_bytes(self) -> int:
        """Memory of the device."""
        return self.device.resident_bytes()

    # Graphs -----------------------------------------------------------------------------------------------------------

    @property
    def _records(self) -> bool:
        """Whether decode steps are to be graphs. Those that no GPU has shown to work are only on request."""
        return self._decodes and not self.config.enforce_eager and not self._missing_experiments

    @property
    def _missing_experiments(self) -> list[str]:
        """Those that a graph of this model would be, and that are not asked for."""
        needed = {
            experimental.RECORDED_RANKS: self.collectives.size > 1,
            experimental.RECORDED_MODULES: self.model.needs_trial,
        }
        return [name for name, is_so in needed.items() if is_so and name not in self._experiments]

    @property
    def wants_to_record(self) -> bool:
        """Whether `record_next` has something to do, and may be called when this rank has time."""
        wants = self._draft_runner is not None and self._draft_runner.wants_to_record
        wants = wants or (self.collectives.size == 1 and self.graphs.next_wanted() is not None)
        return wants and not self._is_asleep  # last, as it looks at all memory and this is asked between steps

    @torch.inference_mode()
    def _try_recording(self) -> None:
        """Hold a recorded step against the same one launched, and record none if they differ or if it cannot be recorded.

        The requests are made up. What a module does beside launches either breaks the capture (it reads a value, it uploads
        one), or is the same in every replay (it has kept something in Python): then it is wrong in the second step.
        """
        reason = ""
        num_rows = min(len(TRIAL_PROMPTS), self._max_rows, self._pool.num_blocks)
        try:
            error = self._recording_error(num_rows)
            if not error <= TRIAL_TOLERANCE:
                reason = f"replayed, its logits differ by {error:.2g} standard deviations"
        except Exception as failure:  # of a step: the caller blames it on requests, or on this worker
            if self.is_torn:
                raise
            reason = f"{type(failure).__name__}: {failure}"
        with self._on_device():
            self._pool.zero(np.arange(num_rows, dtype=np.int32))
            self.state.restore(torch.zeros_like(self.state.snapshot()))
        self.forget_requests()
        if reason:
            architecture = self.config.model.architecture
            logger.warning("decode steps of %s are launched kernel by kernel, not as graphs: %s", architecture, reason)
            self.graphs = DecodeGraphs(self.device, self._launch_part, self._max_rows, is_on=False)

    def _recording_error(self, num_rows: int) -> float:
        """How far the logits of two steps are from those of their replay, and launched again: in standard deviations."""
        slots, counts = np.arange(num_rows, dtype=np.int32), np.array(TRIAL_PROMPTS[:num_rows], np.int32)
        tokens = np.random.default_rng(0).integers(0, self.model_config.vocab_size, counts.sum() + 2 * num_rows)
        prompts, fed = tokens[: counts.sum()].astype(np.int32), tokens[counts.sum() :].reshape(2, -1).astype(np.int32)
        self.step(
            StepPlan(
                step=0,
                new_rows=pack_rows(NewRow(slot, count) for slot, count in enumerate(counts.tolist())),
                new_tokens=prompts,
                new_num_blocks=np.ones(num_rows, np.int32),
                new_blocks=slots,
                prefill_slots=slots,
                prefill_counts=counts,
            )
        )
        size = self.graphs.size_for(num_rows)
        with self._on_device():
            self._load_rows(slots, -1, size)
            state, blocks = self.state.snapshot(), self._pool.pool[:, :num_rows].clone()

            def logits_of(part: GraphPart, launch: Callable[[GraphPart, int], None]) -> torch.Tensor:
                self.state.restore(state)
                self._pool.pool[:, :num_rows].copy_(blocks)
                found = []
                for ids in fed:
                    self.state.last_token[:num_rows].copy_(self.device.upload(ids))
                    launch(part, size)
                    found.append(self.sampler.logits[:num_rows].clone())
                return torch.cat(found)

            errors = []
            for part in (GraphPart.FORWARD.of_step(kind) for kind in self._kinds):
                expected = logits_of(part, self._launch_part)
                self.graphs.record((part, size))
                if (part, size) not in self.graphs:
                    raise EngineError("it cannot be captured")
                found = torch.stack(
                    (logits_of(part, self.graphs.run), logits_of(part, self._launch_part))
                )  # and what it left is harmless
                errors.append(((found - expected).square().mean(2).sqrt() / expected.std(1)).max())
            sizes = [size for _, size in self._mixed_parts if size >= len(prompts)]
            if sizes:
                errors += [self._mixed_error(kind, min(sizes), len(prompts)) for kind in self._kinds]
            return float(self.device.download([torch.stack(errors)]).wait()[0].max())

    def _mixed_error(self, is_adapted: bool, size: int, num_tokens: int) -> torch.Tensor:
        """The same of the hidden states of the step with prompts that was made last, which is a graph of this size."""
        assert self.mixed is not None
        part, states = GraphPart.MIXED.of_step(is_adapted), self.mixed.step(size).states[:num_tokens]
        self._launch_part(part, size)  # it writes the keys that are there
        expected = states.clone()
        self.graphs.record((part, size))
        if (part, size) not in self.graphs:
            raise EngineError("a step with prompts cannot be captured")
        states.zero_()
        self.graphs.run(part, size)
        return ((states - expected).square().mean(1).sqrt() / expected.std(1)).max()

    @torch.inference_mode()
    def record_next(self) -> bool:
        """Record one of the steps that are wanted as graphs. False: there is none. For when there is nothing else to do."""
        key = self.graphs.next_wanted()
        if key is None:
            if self._draft_runner is None:
                return False
            with self._on_device():  # what tears this runner's device as well
                return self._draft_runner.record_next()
        with self._on_device():
            if key[0].plain is GraphPart.MIXED:
                assert self.mixed is not None
                self.mixed.clear(key[1])
            else:
                self._load_rows(NO_I32, -1, key[1])  # rows of no slot: nothing happens to any request
            self.graphs.record(key)
        return True

    def _way_part(self, num_rows: int) -> GraphPart:
        return GraphPart.HEAD if num_rows <= MAX_HEAD_ROWS and self.model.head is not None else GraphPart.LOGITS

    def _rows_for(self, size: int) -> DeviceDecodeRows:
        rows = self._rows_of_size.get(size)
        if rows is None:
            rows = self._rows_of_size[size] = self._decode_rows.first(size)
        return rows

    def _load_rows(self, slots: I32, version: int, size: int) -> None:
        """Put the slots of a decode step in place, unless they are there already. version -1: they are not to be kept."""
        if version >= 0 and self._loaded_rows == (version, size):
            return
        padded = np.full(size, -1, np.int32)
        padded[: len(slots)] = slots
        self._decode_rows.rows[:size].copy_(self.device.upload(padded))
        self._loaded_rows = (version, size) if version >= 0 else None

    def _launch_part(self, part: GraphPart, size: int) -> None:
        """All launches of a part, for the rows that are in place. This is what a graph holds."""
        is_adapted, part = part.is_adapted, part.plain
        if part is GraphPart.MIXED:
            assert self.mixed is not None
            self.mixed.launch(size, is_adapted=is_adapted, pdl=self.device.uses_pdl)
            return
        rows, pdl = self._rows_for(size), self.device.uses_pdl
        if part is not GraphPart.CHOICE:
            self._prepare_rows(rows)
            hidden = self.model.decode(rows, self._pool, self.state, is_adapted=is_adapted, pdl=pdl)
            if part is GraphPart.HEAD:
                assert self.model.head is not None
                self.sampler.from_hidden(hidden, self.model.head, rows.rows, pdl=pdl)
            else:
                self.model.logits(hidden, self.sampler.logits[:size])
                if part is GraphPart.FORWARD:
                    return
                self.sampler.from_logits(rows.rows)
        else:
            self.sampler.from_edited(rows.rows, self.sampler.recorded_edits(size))
        ops.kv_clear(self._pool.pool, rows.kv_slots, self.sampler.is_finite[:size], pdl=pdl and part is GraphPart.HEAD)

    def _prepare_rows(self, rows: DeviceDecodeRows) -> None:
        state, pdl = self.state, self.device.uses_pdl
        ops.step_prep(
            rows.rows,
            state.last_token,
            state.num_computed,
            state.block_table,
            self._pool.block_size,
            rows.ids,
            rows.positions,
            rows.kv_slots,
            rows.seq_lens,
            pdl=pdl,
        )
        self._attention.plan(rows, pdl=pdl)

    @torch.inference_mode()
    def steady_step(self, num_rows: int, context: int, *, is_recorded: bool = True) -> Callable[[], None]:
        """The launches of a decode step of so many slots with so many tokens each, sampled at a temperature of 0.7.

        For measurements, on a runner without requests: every call is one step more. Raises ValueError when the cache is too
        small, RuntimeError when the step cannot be recorded.
        """
        size, state, config = self.graphs.size_for(num_rows), self.state, self.config
        per_row = min(-(-(context + MEASURED_STEPS) // config.cache.block_size), state.block_table.shape[1])
        if num_rows * per_row > self._pool.num_blocks:
            raise ValueError(
                f"{num_rows} x {context} tokens need {num_rows * per_row} of {self._pool.num_blocks} blocks"
            )
        part = self._way_part(size)
        with self.device.active():
            blocks = torch.arange(num_rows * per_row, dtype=torch.int32, device=self.device.torch_device)
            state.block_table[:num_rows, :per_row] = blocks.view(num_rows, per_row)
            state.num_computed[:num_rows] = context
            state.sampling.temperature[:num_rows] = 0.7
            state.filters.top_p[:num_rows] = 1.0  # a table that nothing was put into has 0: every row would be filtered
            self._load_rows(np.arange(num_rows, dtype=np.int32), -1, size)
            if is_recorded and not self.graphs.is_on:
                raise RuntimeError(
                    f"a step of {size} rows is not recorded here: a kernel is replaced, or graphs are off"
                )
            if is_recorded and (part, size) not in self.graphs:
                self.graphs.record((part, size))
                if (part, size) not in self.graphs:
                    raise RuntimeError(f"a step of {size} rows cannot be recorded; the log says why")
        if is_recorded:
            return lambda: self.graphs.run(part, size)
        return lambda: self._launch_part(part, size)

    # Steps ------------------------------------------------------------------------------------------------------------

    @contextlib.contextmanager
    def _on_device(self) -> Iterator[None]:
        """What an error of the GPU itself has ended cannot go on: every later call would meet it again."""
        with self.device.active():
            try:
                yield
            except Exception as error:
                is_lost = isinstance(error, torch.AcceleratorError) or (
                    isinstance(error, RuntimeError) and self.device.is_lost  # what Triton raises is no more than that
                )
                self.is_torn |= is_lost or self.collectives.size > 1  # the others wait where this one will not come
                raise

    @torch.inference_mode()
    def execute(self, plan: StepPlan) -> CudaHandle:
        """The sampling is launched, too, unless it waits."""
        started = clock.now()
        with self._on_device():
            self.apply(plan)
            drafts = None if self._speculator is None else self._guess(plan, self._speculator)
            inputs = self.batch.inputs(plan, drafts)
            sampling = self._sampling_rows(inputs)
            sampled = None if drafts is None else self._with_drafts(inputs, sampling, drafts)
            if plan.late_slots.size and sampling.how is not Way.EDITED:
                sampling = replace(sampling, how=Way.EDITED)
            elif sampled is not None and sampled.num_rows > MAX_HEAD_ROWS and sampling.how is Way.HEAD:
                sampling = replace(sampling, how=Way.LOGITS)
            self._written = inputs.kv_slots
            handle = CudaHandle(
                plan.step,
                inputs,
                sampling,
                plan.late_slots,
                started,
                self._decode_rows.rows,
                waits_for_tokens=sampling.has_rules and (self.processors is not None or self.batch.rules.has_memory),
                sampled=sampled,
            )
            if inputs.prefill_slots:
                self._launch_prefill(handle)
            elif inputs.num_decodes:
                self._launch_decode(handle)
            if self._heads is not None and len(inputs.token_ids):
                self._heads.follow(inputs, self._seen(inputs))
            self.batch.advance(inputs)
            if not (handle.late_slots.size or handle.waits_for_tokens):
                self._choose(handle, None)
        self._newest = handle
        return handle

    @torch.inference_mode()
    def apply(self, plan: StepPlan) -> None:
        """Carry out what a plan says about requests and blocks, here and on the device; `execute` does."""
        with self._on_device():
            self._apply(plan)
            self._update_state(plan)

    def waits_for_results(self, plan: StepPlan) -> bool:
        if self._newest is None or self._speculator is None:
            return False
        if self._newest.sampled is not None:
            return True
        if not plan.max_drafts:
            return False
        slots = self.batch.decode_slots if plan.decode_slots is None else plan.decode_slots
        return plan.late_slots.size > 0 or self._speculator.may_draft(slots)

    def _guess(self, plan: StepPlan, speculator: Speculator) -> Drafts | None:
        """What is guessed of the decode rows of this step."""
        assert self._newest is None or self._newest.sampled is None, "the step before is not finished"
        speculator.apply(plan, self.batch.known_tokens)
        if self._draft_model is not None:
            self._draft_model.apply(plan)
            unknown = NO_I32 if self._newest is None else self._newest.sampling.slots
            self._draft_model.catch_up(self.batch, speculator.histories, unknown)
        slots = self.batch.decode_slots
        if not plan.max_drafts or not slots.size:
            return None
        most = min(plan.max_drafts, self._num_draft_slots // len(slots))
        drafts: Drafts | None = None
        if not self.collectives.rank:
            room = self.batch.draft_room(self.config.model.max_model_len)
            if self.processors is not None:  # what they remember cannot be tried
                room[[self.processors.concerns(slots[row : row + 1]) for row in range(len(slots))]] = 0
            # Tokens that are not known yet are those behind which drafts would stand.
            known = most if self._newest is None else 0
            drafts = speculator.of_plan(plan, self.batch, room, known, self.tell_drafts)
        # Another rank need not have finished the step before: it knows how many tokens there are, and the first one which.
        return drafts if self.collectives.size == 1 else agreed_drafts(self.ranks, drafts, len(slots), most)

    def _with_drafts(self, inputs: StepInputs, sampling: SamplingRows[Way], drafts: Drafts) -> SampledRows:
        """Give each draft of a step a row of the state table."""
        first = self.config.scheduler.max_num_seqs
        rows = sampled_rows(inputs, sampling.slots, sampling.states, first)
        at = rows.drafts
        self.state.add_drafts(self.batch, rows.slots[at], rows.table_rows[at], drafts.tokens, rows.ahead[at])
        return rows

    @torch.inference_mode()
    def choose(self, handle: CudaHandle, late: LateInputs | None = None) -> None:
        """Launch the sampling of a step that waited for its late inputs, or for the tokens of the step before."""
        with self._on_device():
            self._choose(handle, late)

    @torch.inference_mode()
    def sample(self, handle: CudaHandle, late: LateInputs | None = None) -> StepResult:
        """The result of an executed step, waiting for it. Earlier ones must be finished."""
        if handle.waits_for:
            self.choose(handle, late)
        return self.finish(handle)

    def _update_state(self, plan: StepPlan) -> None:
        """Carry the plan's differences over to the table on the device. The batch has applied them."""
        batch = self.batch
        if plan.new_rows.size:
            self.state.add(batch, plan.new["slot"].astype(np.int32))
        if plan.extended_slots.size:
            slots, counts = np.unique(plan.extended_slots, return_counts=True)
            ends = batch.num_slot_blocks[0, slots]
            slots = np.repeat(slots, counts)  # the last entries of their tables
            offsets = np.arange(len(slots)) - np.repeat(np.cumsum(counts) - counts, counts)
            places = (np.repeat(ends - counts, counts) + offsets).astype(np.int32)
            self.state.extend(slots, places, batch.block_tables[0, slots, places])
        if plan.prefill_slots.size:
            slots = plan.prefill_slots
            self.state.compute(slots, batch.columns.num_computed[slots] + plan.prefill_counts)
            if plan.new_rows.size and (forks := plan.new["slot"][plan.new["source"] >= 0]).size:
                self.state.compute(forks.astype(np.int32), batch.columns.num_known[forks])

    def _launch_decode(self, handle: CudaHandle) -> None:
        inputs, sampling = handle.inputs, handle.sampling
        size = handle.size = self.graphs.size_for(inputs.num_decodes)
        self._states = None
        self._load_rows(inputs.token_slots, inputs.decode_version, size)
        handle.rows = self._decode_rows.rows[:size]
        part = _PART_OF[sampling.how]
        self.graphs.run(part.of_step(inputs.adapter_ids is not None), size)

    def _launch_prefill(self, handle: CudaHandle) -> None:
        """Of a step with prompts: everything up to the logits, or to the hidden states where no logits are needed."""
        inputs, sampling, model, pdl = handle.inputs, handle.sampling, self.model, self.device.uses_pdl
        states, is_finite = self._forward(inputs)
        handle.outputs.append(is_finite)
        handle.prompt_owners = self.batch.owners[inputs.prefill_slots]
        columns = self.batch.columns
        pooling = columns.pooling[inputs.prefill_slots]
        if pooling.any():
            self._pooled.observe(inputs, pooling, lambda where: model.select(states, self.device.upload(where)))
        pooled = handle.pooled
        if pooled.size:
            slots, where = inputs.result_slots[pooled], self.device.upload(inputs.result_tokens[pooled])
            last = model.select(states, where).float()
            vectors = self._pooled.take(slots, columns.pooling[slots], columns.num_known[slots], last)
            handle.outputs.append(vectors if self._label_head is None else self._label_head(vectors))
        if self.batch.prompt_logprobs:
            self._prompt_spans(handle, states)
        if not sampling.slots.size:
            return
        chosen = inputs.result_tokens if sampling.states is None else inputs.result_tokens[sampling.states]
        table_rows = sampling.slots
        if handle.sampled is not None:
            chosen, table_rows = handle.sampled.tokens, handle.sampled.table_rows
        where = self.device.upload(chosen)
        handle.rows = self.device.upload(table_rows)
        if sampling.how is Way.HEAD:
            assert model.head is not None
            self.sampler.from_hidden(states.index_select(0, where), model.head, handle.rows, pdl=pdl)
        else:
            model.logits_of_final(model.select(states, where), self.sampler.logits[: len(table_rows)])
            if sampling.how is Way.LOGITS:
                self.sampler.from_logits(handle.rows)

    def _seen(self, inputs: StepInputs) -> torch.Tensor:
        """What a head reads of the step that was launched last."""
        assert self._heads is not None
        assert isinstance(self.model, DeviceDecoder)
        count = len(inputs.token_ids)
        if self._states is not None:
            return self._heads.states_of(self._states, self.model.tapped_forward)
        tapped = self.model.tapped(count)
        return self._heads.states_of(self.model.states(count), tapped)

    def _forward(self, inputs: StepInputs) -> tuple[torch.Tensor, torch.Tensor]:
        """Hidden states of a step with prompts, and whether those of the prompts' tokens are finite: int32."""
        size = self.mixed.size_for(inputs) if self.mixed is not None and self.graphs.is_on else None
        self._states = None
        if size is not None:
            assert self.mixed is not None
            step = self.mixed.load(size, inputs)
            self.graphs.run(GraphPart.MIXED.of_step(inputs.adapter_ids is not None), size)
            # A copy: the step may wait for its sampling while the next one runs.
            return step.states, step.is_finite[inputs.num_decodes : len(inputs.token_ids)].clone()
        tokens = self._tokens(inputs)
        states = self.model.forward(tokens, self._pool, self.state, pdl=self.device.uses_pdl)
        self._states = None if self._heads is None else states
        is_finite = torch.isfinite(states.sum(1, dtype=torch.float32)).int()
        ops.kv_clear(self._pool.pool, tokens.kv_slots, is_finite)
        return states, is_finite[inputs.num_decodes :]

    def _tokens(self, inputs: StepInputs) -> StepTokens:
        """The tokens of a step with prompts, on the device; those of its decode rows come from the state table."""
        count = inputs.num_decodes
        kv_slots, ids, positions = self.device.upload_parts(inputs.kv_slots, inputs.token_ids, inputs.positions)
        rows: DeviceDecodeRows | None = None
        if count:
            self._load_rows(inputs.token_slots, inputs.decode_version, count)
            rows = self._decode_rows.first(count)
            self._prepare_rows(rows)
            for ours, theirs in ((ids, rows.ids), (positions, rows.positions), (kv_slots, rows.kv_slots)):
                ours[:count].copy_(theirs)
        embedded = None
        if inputs.embedded is not None:
            vectors = self.device.upload(inputs.embeds).view(self.dtype).view(len(inputs.embedded), -1)
            embedded = (self.device.upload(inputs.embedded), vectors)
        token_rows = None if inputs.adapter_ids is None else self.device.upload(rows_of_tokens(inputs))
        kinds = None if self._prompts is None else self._prompts.rows_of(inputs, self.device)
        return StepTokens(ids, positions, kv_slots, rows, self._chunks(inputs), embedded, token_rows, kinds)

    def _chunks(self, inputs: StepInputs) -> PrefillRows:
        counts = np.array(inputs.prefill_counts, np.int32)
        lengths = np.array(inputs.prefill_first, np.int32) + counts
        return self._attention.chunks(np.array(inputs.prefill_slots, np.int32), counts, lengths)

    # Sampling ---------------------------------------------------------------------------------------------------------

    def _choose(self, handle: CudaHandle, late: LateInputs | None) -> None:
        """Whatever of the sampling has not been launched, and the way of the results to the host."""
        sampling, sampler = handle.sampling, self.sampler
        count = len(handle.sampled_slots)
        outputs: list[torch.Tensor] = []
        handle.late = late
        if count:
            logits = sampler.logits[:count]
            if sampling.how is Way.EDITED:
                if sampling.has_logprobs and not self._shown.is_processed:
                    logits = logits.clone()  # as the model gave them
                if sampling.has_rules and self.processors is not None and not self.collectives.rank:
                    self._process(handle)
                self._choose_edited(handle, late)
            if sampling.has_logprobs and not self.collectives.rank:  # the others have no logits
                self._spans(handle, logits)
            outputs = [sampler.results]
            handle.owners = self.batch.owners[sampling.slots]
            self.batch.expect(sampling.slots)
        handle.download = self.device.download([*outputs, *handle.outputs])
        handle.outputs = []

    def _process(self, handle: CudaHandle) -> None:
        """Let the application's processors change the logits. What they take out becomes a mask, as what grammars take out.

        So the sum of a row still tells whether the model's logits are finite.
        """
        assert self.processors is not None
        slots = handle.sampling.slots
        rows = np.arange(len(slots)) if handle.sampled is None else handle.sampled.firsts
        of_samples = self.device.upload(rows)
        logits = self.sampler.logits.index_select(0, of_samples)
        is_bad = ~torch.isfinite(logits.sum(1))
        changed = logits.masked_fill(is_bad.unsqueeze(1), 0.0)
        failed = self.processors.apply(changed, slots, self.batch.columns.temperature[slots])
        is_out = torch.isneginf(changed)
        changed.masked_fill_(is_out, 0.0)
        self.sampler.logits.index_copy_(0, of_samples, torch.where(is_bad.unsqueeze(1), logits, changed))
        bits = np.zeros((len(slots), self.sampler.num_words * 32), np.bool_)
        bits[:, : logits.shape[1]] = ~is_out.cpu().numpy()
        words = np.packbits(bits, axis=1, bitorder="little").view(np.uint32)
        for sample in np.flatnonzero(~bits[:, : logits.shape[1]].all(1)).tolist():
            handle.masks[int(rows[sample])] = words[sample]
        bad = set(np.flatnonzero(is_bad.cpu().numpy()).tolist())
        handle.errors = {row: text for row, text in failed.items() if row not in bad}

    def _choose_edited(self, handle: CudaHandle, late: LateInputs | None) -> None:
        slots, sampler, drafts = handle.sampled_slots, self.sampler, handle.inputs.drafts
        if handle.sampled is None:
            edits, masks = self._edits(slots, late)
        else:
            assert drafts is not None
            num_outputs = self.batch.columns.num_outputs
            edits, masks = edits_of(self.batch.rules, handle.sampled, drafts, num_outputs, late)
        for row, mask in handle.masks.items():
            masks[row] = masks[row] & mask if row in masks else mask
        handle.choice_masks = masks
        if handle.size is not None and sampler.place(edits, masks):
            self.graphs.run(GraphPart.CHOICE, handle.size)
            return
        rows = handle.rows[: len(slots)]
        sampler.from_edited(rows, sampler.upload(edits, masks))
        if handle.size is not None:
            ops.kv_clear(self._pool.pool, self._rows_for(len(slots)).kv_slots, sampler.is_finite[: len(slots)])

    def _edits(self, slots: I32, late: LateInputs | None) -> tuple[EditList, dict[int, U32]]:
        """What is done to the logits of one row of each slot, and by row the masks."""
        rules = self.batch.rules
        edits, masks = rules.edits(slots, self.batch.columns.num_outputs[slots]), rules.masks(slots)
        if late is not None:
            add_masks(masks, np.arange(len(slots)), slots, masks_behind(late, 0, self.model_config.vocab_size))
        return edits, masks

    def _spans(self, handle: CudaHandle, logits: torch.Tensor) -> None:
        """The log-probabilities of the tokens that are being sampled. logits: of all rows of the sampler, unchanged."""
        sampling, sampler, as_logits = handle.sampling, self.sampler, self._shown.as_logits
        if self._shown.is_processed:
            logits = self._drawn_from(handle, logits)
        of_ids, num_logprobs, sampled = sampling.logprob_ids, sampling.num_logprobs, handle.sampled
        if sampled is not None:  # of each sample that wants some, those at its drafts, too
            rows = [np.flatnonzero(sampled.results == sample) for sample in range(len(sampling.slots))]
            of_ids = {int(row): ids for sample, ids in of_ids.items() for row in rows[sample]}
            num_logprobs = [(int(row), number) for sample, number in num_logprobs for row in rows[sample]]

        def add(found: tuple[torch.Tensor, torch.Tensor, torch.Tensor], of: list[int]) -> None:
            """of: the rows of the sampler."""
            results = map(sampling.row_of, of if sampled is None else sampled.results[of].tolist())
            ahead = None if sampled is None else sampled.ahead[of].tolist()
            self._add_spans(handle, found, [(row, 0, i, 1) for i, row in enumerate(results)], ahead)

        for row, ids in of_ids.items():
            part = slice(row, row + 1)
            wanted = self.device.upload(ids)
            found = sampler.logprobs_of(logits[part], sampler.tokens[part], wanted, as_logits=as_logits)
            add(found, [row])
        for num_top in sorted({num_top for _, num_top in num_logprobs}):
            samples = np.array([i for i, n in num_logprobs if n == num_top], np.int64)
            at = self.device.upload(samples)
            tokens = sampler.tokens.index_select(0, at)
            found = self._top_logprobs(logits.index_select(0, at), tokens, num_top, is_drawn=True)
            add(found, samples.tolist())

    def _drawn_from(self, handle: CudaHandle, logits: torch.Tensor) -> torch.Tensor:
        """What the tokens of a step were drawn from; logits: as edits left them. Masks are put in here."""
        columns, slots = self.batch.columns, handle.sampled_slots
        if handle.choice_masks:
            logits = logits.clone()
            for row, words in handle.choice_masks.items():
                bits = np.unpackbits(words.view(np.uint8), bitorder="little")[: logits.shape[1]]
                logits[row].masked_fill_(self.device.upload(bits.astype(np.int32)) == 0, -torch.inf)
        tokens = self.sampler.tokens[: len(slots)].long()
        parameters = (columns.temperature[slots], columns.top_k[slots], columns.top_p[slots], columns.min_p[slots])
        return drawn_from(logits, tokens, *parameters)

    def _top_logprobs(
        self, logits: torch.Tensor, tokens: torch.Tensor, num_top: int, *, is_drawn: bool
    ) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        """As the sampler's, in the mode of the engine. is_drawn: the logits may be what tokens were drawn from."""
        if self._shown.as_logits or (
            self._shown.is_processed and is_drawn
        ):  # may be -inf, which the kernel does not expect
            return sorted_logprobs(logits, tokens, num_top, as_logits=self._shown.as_logits)
        return self.sampler.top_logprobs(logits, tokens, num_top)

    def _prompt_spans(self, handle: CudaHandle, states: torch.Tensor) -> None:
        """Those of this step's chunks of prompts."""
        vocab_size = self.model_config.vocab_size
        most = max(1, PROMPT_LOGITS_BYTES // (4 * vocab_size))
        for num_top, of_prompts in self._prompt_parts(handle.inputs).items():
            for slice_ in slices(of_prompts, most):
                where = self.device.upload(np.concatenate([part.where for part in slice_]))
                logits = torch.empty(len(where), vocab_size, device=self.device.torch_device)
                self.model.logits_of_final(self.model.select(states, where), logits)
                if self.collectives.rank:
                    continue  # the first rank has them
                tokens = self.device.upload(np.concatenate([part.tokens for part in slice_]).astype(np.int32))
                ends = np.cumsum([len(part.where) for part in slice_]).tolist()
                rows = [
                    (part.row, part.first, end - len(part.where), len(part.where))
                    for part, end in zip(slice_, ends, strict=True)
                ]
                self._add_spans(handle, self._top_logprobs(logits, tokens, num_top, is_drawn=False), rows)

    @staticmethod
    def _add_spans(
        handle: CudaHandle,
        found: tuple[torch.Tensor, torch.Tensor, torch.Tensor],
        rows: list[tuple[int, int, int, int]],
        ahead: list[int] | None = None,
    ) -> None:
        handle.spans.append(PendingSpans(len(handle.outputs), rows, ahead))
        handle.outputs += found

    def finish(self, handle: CudaHandle) -> StepResult:
        """The result of a step, waiting for it if need be. Steps are finished in the order in which they were executed."""
        assert handle.download is not None, "the step waits for `choose`"
        with self._on_device():
            arrays = handle.download.wait()
        if self._newest is handle:
            self._newest = None
        sampling, slots = handle.sampling, handle.sampled_slots
        tokens: I32 = NO_I32.copy()
        is_finite, sums = np.ones(0, np.int32), np.zeros(0, np.float32)
        if slots.size:
            tokens, is_finite, sums = self.sampler.unpack(arrays[0], len(slots))
            arrays = arrays[1:]
        bad_prompts = self._marked_prompts(handle, arrays[0]) if handle.inputs.prefill_slots else NO_I32
        again: dict[int, list[LogprobSpan]] = {}
        if handle.sampled is not None:
            again = self._repeat_bad_rows(handle, handle.sampled, tokens, is_finite, sums)
        is_void = is_finite == 0
        counts = np.ones(len(slots), np.int32)  # how many values are not finite: as far as is known, one
        if sampling.how is Way.EDITED:
            is_bad = ~np.isfinite(sums)
            counts[~is_bad] = 0  # else nothing was left to choose
            is_void |= is_bad
        if self.batch.bad_slots:
            is_bad = np.isin(slots, list(self.batch.bad_slots))
            counts[is_bad] = 1  # it has had states that were not
            is_void |= is_bad
        if handle.errors:
            failed = np.array(list(handle.errors))
            failed = failed if handle.sampled is None else handle.sampled.firsts[failed]
            counts[failed], is_void[failed] = 0, True
        runs = NO_I32
        if handle.sampled is not None:
            tokens, runs = self._right_drafts(handle, handle.sampled, tokens, is_void)
            firsts = handle.sampled.firsts
            is_void, counts = is_void[firsts], counts[firsts]
        else:
            self._learn(slots, handle.owners, tokens)
            tokens[is_void] = 0
        late = handle.late
        if self._speculator is not None and late is not None and late.counts.size:
            self._speculator.force(late, sampling.slots, tokens, runs)
            gone = sampling.slots[self.batch.owners[sampling.slots] != handle.owners]
            self._speculator.forget_forced(
                gone.tolist()
            )  # a step that was launched ahead has given the slot to another request
        spans = [span for pending in handle.spans for span in pending.spans(arrays, runs)]
        if again:
            spans = [span for span in spans if span.is_prompt or span.row not in again]
            spans += [span for of_row in again.values() for span in of_row]
        vectors = None if sampling.rows is None else arrays[1]
        spans = joined_runs(spans) if runs.size else spans
        return self._result(handle, tokens, is_void, counts, bad_prompts, spans, vectors, handle.errors, runs)

    def _learn(self, slots: I32, owners: NDArray[np.int64], tokens: I32) -> None:
        """Which tokens were sampled for these slots, one each. owners: as of `DeviceBatch.learn`."""
        self.batch.learn(slots, owners, tokens)
        if (self.processors is None and self._speculator is None) or not slots.size:
            return
        mine = self.batch.owners[slots] == owners
        if self.processors is not None:
            self.processors.store(slots[mine], tokens[mine])
        if self._speculator is not None:
            self._speculator.store(slots[mine], tokens[mine])

    def _right_drafts(
        self,
        handle: CudaHandle,
        rows: SampledRows,
        tokens: I32,
        is_void: NDArray[np.bool_],
    ) -> tuple[I32, I32]:
        """Take over what a step with drafts has sampled, as far as the drafts were right. Nothing was executed since.

        tokens, is_void: of all rows of the sampler. Returns the tokens of the samples, and how many each has (none: one each).
        """
        drafts, slots = handle.inputs.drafts, handle.sampling.slots
        assert drafts is not None
        assert self._speculator is not None
        runs = right_runs(rows, drafts, tokens, is_void, handle.late)
        if self.collectives.size > 1:
            runs = self.ranks.agree(runs)  # the first one has the masks
        tokens[is_void] = 0
        table = np.zeros((len(slots), int(runs.max())), np.int32)
        table[:, 0] = tokens[rows.firsts]
        self._learn(slots, handle.owners, table[:, 0])
        starts = np.cumsum(drafts.counts) - drafts.counts
        for position in range(1, table.shape[1]):
            longer = np.flatnonzero(runs > position)
            table[longer, position] = tokens[rows.drafts[starts[longer] + position - 1]]
            self.batch.accept(slots[longer])
            self.batch.expect(slots[longer])
            self._learn(slots[longer], handle.owners[longer], table[longer, position])
        self._speculator.observe(handle.inputs.decode_slots, drafts.counts, runs[: len(drafts.counts)] - 1)
        moved = np.flatnonzero(runs > 1)
        if not moved.size:
            return table[:, 0], NO_I32
        with self._on_device():
            self.state.settle(self.batch, slots[moved], table[moved, runs[moved] - 1])
        return table[np.arange(table.shape[1]) < runs[:, None]], runs

    @torch.inference_mode()
    def _repeat_bad_rows(
        self,
        handle: CudaHandle,
        rows: SampledRows,
        tokens: I32,
        is_finite: NDArray[np.int32],
        sums: NDArray[np.float32],
    ) -> dict[int, list[LogprobSpan]]:
        """Compute rows again without their drafts, where nothing finite came of them: the drafts may be the reason.

        A row multiplies what stands behind it in its blocks by 0, and a draft without finite states has stored its own there.

        tokens, is_finite, sums: of all rows of the sampler; changed for these rows. Returns their log-probabilities, by row.
        """
        inputs, sampling, columns = handle.inputs, handle.sampling, self.batch.columns
        drafts, speculator = inputs.drafts, self._speculator
        assert drafts is not None
        assert speculator is not None
        firsts = rows.firsts[: len(drafts.counts)]
        is_bad = is_finite[firsts] == 0
        if sampling.how is Way.EDITED:
            is_bad |= ~np.isfinite(sums[firsts])
        bad = np.flatnonzero(is_bad & (drafts.counts > 0))
        if not bad.size:
            return {}
        slots, place = sampling.slots[bad], {row: i for i, row in enumerate(bad.tolist())}
        part = replace(
            sampling,
            rows=bad,
            states=None,
            slots=slots,
            has_rules=False,  # edits are made in any case
            num_logprobs=[(place[i], number) for i, number in sampling.num_logprobs if i in place],
            logprob_ids={place[i]: ids for i, ids in sampling.logprob_ids.items() if i in place},
            how=Way.EDITED,
        )
        size = self.graphs.size_for(len(bad))
        table_rows = self._decode_rows.rows[:size]
        again = CudaHandle(handle.step, inputs, part, handle.late_slots, handle.started, table_rows, False, size=size)
        columns.num_computed[slots] -= 1
        columns.num_outputs[slots] -= 1
        found = (speculator.histories.of(slot) for slot in slots.tolist())
        newest = np.array([history.tokens[-1] for history in found if history is not None], np.int32)
        with self._on_device():
            self.state.settle(self.batch, slots, newest)
            stored = inputs.kv_slots[rows.tokens[np.isin(rows.slots, slots)]]
            ops.kv_clear(
                self._pool.pool, self.device.upload(stored), self.device.upload(np.zeros(len(stored), np.int32))
            )
            self._load_rows(slots, -1, size)
            self.graphs.run(GraphPart.FORWARD.of_step(inputs.adapter_ids is not None), size)
            if self._heads is not None:
                assert isinstance(self.model, DeviceDecoder)
                seen = self._heads.states_of(self.model.states(len(bad)), self.model.tapped(len(bad)))
                self._heads.again(slots, columns.num_computed[slots].astype(np.int64), seen)
            columns.num_computed[slots] += 1
            self._choose(again, handle.late)
            assert again.download is not None
            arrays = again.download.wait()
        for of_all, of_bad in zip((tokens, is_finite, sums), self.sampler.unpack(arrays[0], len(bad)), strict=True):
            of_all[firsts[bad]] = of_bad
        is_finite[rows.drafts[np.repeat(is_bad, drafts.counts)]] = 0
        spans = [span for pending in again.spans for span in pending.spans(arrays[1:], NO_I32)]
        return {row: [span for span in spans if span.row == row] for row in bad.tolist()}

    def _marked_prompts(self, handle: CudaHandle, is_finite: NDArray[np.int32]) -> I32:
        """Which prefill rows of the step have states that are not finite. From now on what they sample is void."""
        inputs = handle.inputs
        rows = self._bad_prompts(inputs, is_finite)
        sources = {source for _, source in inputs.forks}
        self.batch.mark_bad(np.array(inputs.prefill_slots, np.int32)[rows], handle.prompt_owners[rows])
        if sources & self.batch.bad_slots:
            forks = np.array([slot for slot, source in inputs.forks if source in self.batch.bad_slots], np.int32)
            mine = np.isin(handle.sampling.slots, forks)
            self.batch.mark_bad(handle.sampling.slots[mine], handle.owners[mine])
        return rows

    def _how(self, slots: I32, *, has_rules: bool, has_logprobs: bool) -> Way:
        columns = self.batch.columns
        if has_rules:
            return Way.EDITED
        is_filtered = (columns.top_k[slots] > 0) | (columns.top_p[slots] < 1) | (columns.min_p[slots] > 0)
        needs_logits = (
            len(slots) > MAX_HEAD_ROWS
            or self.model.head is None
            or has_logprobs
            or bool((is_filtered & (columns.temperature[slots] > 0)).any())
        )
        return Way.LOGITS if needs_logits else Way.HEAD


class HeadRunner(CudaRunner):
    """The runner of a head that drafts (`head_drafter`): its cache, its state table and its graphs are as those of a model.

    Arguments:
        config: of the engine.
        shape: of the head.
        target: the model that it drafts for.
        target_without_weights: makes the same on the meta device (`rehearse`).
    """

    _owned = (*CudaRunner._owned, "states", "block_states", "_target", "_target_without_weights")
    states: torch.Tensor
    block_states: torch.Tensor

    def __init__(
        self,
        config: EngineConfig,
        shape: HeadShape,
        target: DeviceDecoder,
        target_without_weights: Callable[[Device], DeviceModel],
        *,
        show_progress: bool | None = None,
        device: Device,
    ) -> None:
        assert config.speculation is not None
        self.head_shape = shape
        self._target, self._target_without_weights = target, target_without_weights
        self._whole_config = config
        self.room = head_drafter.WAITING_TOKENS + 1 + config.speculation.num_speculative_tokens
        model = replace(shape.model, logits_processors=())
        super().__init__(
            replace(config, model=model, speculation=None, lora=None),
            show_progress=show_progress,
            device=device,
            plan=replace(shape.layers, vocab_size=target.vocab_size),
        )

    @property
    def drafting_head(self) -> DeviceHead:
        assert isinstance(self.model, DeviceHead)
        return self.model

    def _load(self) -> DeviceModel:
        model, form = self.config.model, device_form(self.config.model)
        with open_on_device(model, form, self.dtype, self._show_progress, self.device.torch_device) as weights:
            return DeviceHead(self.head_shape, weights, self._target, model.max_model_len, self.device, form)

    def _twin(self, device: Device) -> CudaRunner:
        target = self._target_without_weights(device)
        assert isinstance(target, DeviceDecoder)
        return HeadRunner(self._whole_config, self.head_shape, target, self._target_without_weights, device=device)

    def _without_weights(self) -> DeviceModel:
        form, length = device_form(self.config.model), self.config.model.max_model_len
        return DeviceHead(self.head_shape, MetaWeights(self.dtype), self._target, length, self.device, form)

    @property
    def block_bytes(self) -> int:
        return super().block_bytes + self.head_shape.state_size * self.dtype.itemsize

    @torch.inference_mode()
    def _allocate(self, num_blocks: int) -> None:
        for name in ("states", "block_states"):  # those of the profile go before there are others
            vars(self).pop(name, None)
        scheduler, size, on = self.config.scheduler, self.head_shape.state_size, self.device.torch_device
        num_slots = scheduler.max_num_seqs
        with self.device.active():
            self.drafting_head.make_room(num_slots, scheduler.max_num_batched_tokens + num_slots * self.room)
            self.states = torch.zeros(num_slots * self.room, size, dtype=self.dtype, device=on)
            self.block_states = torch.zeros(num_blocks, size, dtype=self.dtype, device=on)
        super()._allocate(num_blocks)

    def _zero(self, block_ids: I32) -> None:
        super()._zero(block_ids)
        if block_ids.size:
            with self._on_device():
                self.block_states.index_fill_(0, self.device.upload(block_ids.astype(np.int64)), 0)

    def _copy(self, sources: I32, targets: I32) -> None:
        super()._copy(sources, targets)
        if targets.size:
            to, where = self.device.upload(np.stack((targets, sources)).astype(np.int64)).unbind(0)
            self.block_states.index_copy_(0, to, self.block_states.index_select(0, where))

    def _forward(self, inputs: StepInputs) -> tuple[torch.Tensor, torch.Tensor]:
        """What the next pass is given of each row comes from its last token."""
        states, is_finite = super()._forward(inputs)
        where, slots = self.device.upload_parts(
            inputs.result_tokens.astype(np.int64), inputs.result_slots.astype(np.int64) + 1
        )
        self.drafting_head.keep(states, where, slots)
        return states, is_finite

    @torch.inference_mode()
    def warm_prefill(self) -> None:
        """With what makes of states of the target what a pass is given."""
        super().warm_prefill()
        states = torch.zeros(1, self.head_shape.state_size, dtype=self.dtype, device=self.device.torch_device)
        self.drafting_head.combined(states)

    @torch.inference_mode()
    def follow(self, slots: I32, firsts: I32, counts: I32, ids: NDArray[np.int64], before: torch.Tensor) -> None:
        size = self.batch.block_size
        rows = np.repeat(slots, counts)
        positions = consecutive(firsts, counts)
        kv_slots = self.batch.block_tables[0][rows, positions // size].astype(np.int64) * size + positions % size
        chunks = self._attention.chunks(slots, counts, firsts + counts)
        uploaded = self.device.upload_parts(ids, positions, kv_slots)
        ops.copy(self.drafting_head.combined(before), self.drafting_head.fed[: len(ids)])
        tokens = StepTokens(uploaded[0], uploaded[1], uploaded[2], None, chunks)
        states = self.model.forward(tokens, self._pool, self.state, pdl=self.device.uses_pdl)
        ops.kv_clear(self._pool.pool, uploaded[2], torch.isfinite(states.sum(1, dtype=torch.float32)).int())

    @torch.inference_mode()
    def forget(self, slots: I32, firsts: I32, counts: I32) -> None:
        size = self.batch.block_size
        rows, positions = np.repeat(slots, counts), consecutive(firsts, counts)
        kv_slots = self.batch.block_tables[0][rows, positions // size].astype(np.int64) * size + positions % size
        ops.kv_clear(
            self._pool.pool, self.device.upload(kv_slots), self.device.upload(np.zeros(len(kv_slots), np.int32))
        )
