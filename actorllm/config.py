"""What an engine is configured with: frozen, checked at construction, sent as JSON to the children.

`EngineConfig.from_arguments` takes the keyword arguments of the front doors (named and defaulted as in vLLM), finds the
model's folder and reads its config.json. What only a running worker can know (how many KV blocks fit) is added by
`resolved`, which returns a new object. Nothing here imports torch or transformers.
"""

from __future__ import annotations

import logging
import os
import re
import warnings
from collections.abc import Mapping
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from typing import Any, Literal, Unpack

import orjson

from actorllm.bundled import shapes
from actorllm.errors import (
    ConfigError,
    CorruptModelError,
    ModelNotFoundError,
    UnknownArgumentError,
    UnsupportedModelError,
    nearest_name,
    shown,
)
from actorllm.scheduling.admission_policy import ADMISSIONS
from actorllm.scheduling.autoscaler import ScalingPolicy
from actorllm.scheduling.policy import policy_path
from actorllm.scheduling.router import DEFAULT_ROUTER, MAX_REPLICAS, make_router
from actorllm.text.reasoning.parsers import Marks, marks_of, reasoning_of_file
from actorllm.types.device import BackendRules, Dtype, choose, dtype_name, num_visible_gpus, rules_of
from actorllm.types.draft_folder import check_same_tokenizer
from actorllm.types.draft_head import head_tree
from actorllm.types.drafter import Costs, Speculation
from actorllm.types.encoder_decoder import ARCHITECTURES as ENCODER_DECODERS
from actorllm.types.encoder_decoder import EncoderDecoder
from actorllm.types.generation_config import read_generation_config, sampling_defaults
from actorllm.types.gguf_model import gguf_folder
from actorllm.types.import_path import is_import_path, path_of, with_colon
from actorllm.types.kv_groups import num_window_blocks
from actorllm.types.kv_tiers import read_tiers
from actorllm.types.launch import check_launch, has_ray, is_placed_by_ray
from actorllm.types.lent_module import LentModule
from actorllm.types.logits_processors.paths import paths_of as logits_processor_paths
from actorllm.types.media_rules import MediaRules, Modality
from actorllm.types.model_files import MAX_HEADS, check_sizes, overridden, read_model_config, read_overrides
from actorllm.types.options import DEFAULTS, EngineOptions, Topology
from actorllm.types.params import is_text
from actorllm.types.pipeline_stages import read_stages
from actorllm.types.pooling_head import MAX_VECTOR_BYTES
from actorllm.types.pooling_params import Pooler, max_positions, read_pooler
from actorllm.types.quantization import FP8, INT8, is_twin, not_quantized, read_method, schemes_of
from actorllm.types.roles import MAPPED, Role, with_roles
from actorllm.types.speculation import HEADS, NGRAM, SUFFIX, WITH_MODEL, read_speculation, with_costs
from actorllm.types.vllm_config_names import EngineNames, ModelNames, ParallelNames, SchedulerNames
from actorllm.types.vllm_options import HARMLESS, VLLM_ARGUMENTS
from actorllm.types.vllm_translation import translate
from actorllm.types.vllm_variables import read_variables
from actorllm.types.weight_version import FIRST_WEIGHTS, WeightSource

logger = logging.getLogger(__name__)

BUNDLED_MODELS = {
    "storyteller": Path(__file__).parent / "bundled" / "storyteller",
    "storyteller-draft": Path(__file__).parent / "bundled" / "storyteller" / "draft",
}

HEARTBEAT_TIMEOUT_S: float = DEFAULTS["heartbeat_timeout_s"]
MIN_HEARTBEAT_TIMEOUT_S = 1.0
"""Loops beat every quarter of a second when they are idle."""
NODE_TIMEOUT_S: float = DEFAULTS["node_timeout_s"]
RAY = "ray"
"""In the place of an address: Ray says where."""
MIN_NODE_TIMEOUT_S = 1.0
"""Nodes send a heartbeat every half second."""
INTAKE_TIMEOUT_S: float = DEFAULTS["intake_timeout_s"]
MIN_INTAKE_TIMEOUT_S = 0.1
START_TIMEOUT_S: float = DEFAULTS["start_timeout_s"]
MAX_PROMPT_CHARACTERS: int = DEFAULTS["max_prompt_characters"]
LOGPROBS_MODES = ("raw_logprobs", "raw_logits", "processed_logprobs", "processed_logits")
DEFAULT_NUM_SEQS, DEFAULT_BATCHED_TOKENS = 256, 2048
"""Of a step, where nothing else is given."""
MAX_LORAS = 1024
MAX_LORA_RANK = 1024
"""Bounds of what the slots for adapters take."""
MAX_SECONDS = 1e9
"""What infinity becomes, which JSON does not know."""


@dataclass(frozen=True, slots=True)
class ModelConfig(ModelNames):
    """The model and what its config.json says about it."""

    name: str
    """What the user wrote."""
    path: str
    """The folder that holds config.json and the weights."""
    tokenizer: str | None
    """The folder of the tokenizer; None: token ids only (skip_tokenizer_init)."""
    architecture: str
    dtype: Dtype
    max_model_len: int
    vocab_size: int
    eos_token_ids: tuple[int, ...]
    load_format: Literal["auto", "safetensors", "dummy"]
    seed: int
    """Of dummy weights."""
    sampling_defaults: dict[str, Any] = field(default_factory=dict, hash=False)
    """Sampling parameters of requests that bring none (actorllm.types.generation_config)."""
    impl: Literal["auto", "vllm", "transformers"] = "auto"
    """auto: a fused forward where there is one, else transformers over our cache; vllm: only fused ones."""
    max_logprobs: int = 20
    """Most log-probabilities per token that a request may ask for; -1: as many as there are."""
    logprobs_mode: str = "raw_logprobs"
    """What log-probabilities are of (`model.shown_logits`)."""
    max_prompt_characters: int = MAX_PROMPT_CHARACTERS
    """Most characters that the text of a prompt may have, before anything reads it."""
    prompt_embedding_size: int | None = None
    """How many numbers an embedding has that is part of a prompt; None: prompts have none (enable_prompt_embeds)."""
    takes_prompt_embeds: bool = False
    """Whether callers may give embeddings (enable_prompt_embeds); those of images enter in the same way."""
    media: MediaRules | None = None
    """Which images or audio prompts may have; None: prompts are text."""
    encoder_decoder: EncoderDecoder | None = None
    """What the encoder beside the decoder takes; None: the model has none."""
    pooler: Pooler | None = None
    """How prompts become vectors (runner="pooling"); None: the engine generates text."""
    io_processor_plugin: str | None = None
    """What makes prompts of the data of a request, and its answer of their vectors (`client.plugin_data`)."""
    overrides: dict[str, Any] = field(default_factory=dict, hash=False)
    """What counts in place of the same fields of config.json (hf_overrides)."""
    reasoning_parser: str | None = None
    """How the model marks what it thinks (text.reasoning.parsers); None: no text is looked through for it."""
    marks: Marks | None = None
    """By what thoughts are known; None: by nothing."""
    logits_processors: tuple[str, ...] = ()
    """Where a worker finds those of the application (actorllm.types.logits_processors.paths)."""
    structured_outputs: dict[str, bool] = field(default_factory=dict, hash=False)
    """Options that hold for every structured output, those that are on (structured_outputs_config)."""
    quantization: str | None = None
    """How the weights of the linear layers are quantized (`actorllm.types.quantization`); None: not at all."""
    quantization_twin: bool | None = None
    """Whether rows of prompts may have weights of their own; None: where that is faster and there is memory for it."""
    scheme: str | None = None
    """What products are computed as, of decode rows and of prompts (`model.cpu.scheme`); None: that was not measured yet."""
    weights: WeightSource = FIRST_WEIGHTS
    """Which version of the weights counts, and where it is read (`update_weights_from_disk`)."""
    module: LentModule | None = field(default=None, compare=False, repr=False)
    """Whose parameters are used, in place of those of `path`; only within this process (topology="inline")."""

    @property
    def supported_tasks(self) -> tuple[str, ...]:
        """What a request may ask for, by vLLM's names: "generate", or the tasks of a model whose prompts become vectors."""
        return ("generate",) if self.pooler is None else self.pooler.tasks

    # By vLLM's names, for plug-ins

    @property
    def pooler_config(self) -> Pooler | None:
        """As `pooler`."""
        return self.pooler

    @property
    def matryoshka_dimensions(self) -> list[int] | None:
        """The lengths that the vectors may be cut to; None: the model does not list them."""
        return list(self.pooler.matryoshka) if self.pooler is not None and self.pooler.matryoshka else None

    @property
    def is_matryoshka(self) -> bool:
        """The vectors may be cut."""
        return self.pooler is not None and self.pooler.matryoshka is not None

    @property
    def embedding_size(self) -> int:
        """How many numbers a vector of the engine has; where it generates text, a state of the model."""
        return self.get_hidden_size() if self.pooler is None else self.pooler.dimensions or self.pooler.embedding_size

    @property
    def modality(self) -> Modality | None:
        """What prompts may hold beside text."""
        return None if self.media is None else self.media.modality

    @property
    def told_model_len(self) -> int:
        """What clients are told of max_model_len. Beside an encoder that is the decoder's, as in vLLM: they ask for its tokens."""
        return self.max_model_len if self.encoder_decoder is None else self.encoder_decoder.max_target

    @property
    def embedding_bytes(self) -> int:
        """Of one embedding of a prompt; 0: prompts have none."""
        num_vectors = 1 if self.media is None else self.media.num_vectors
        return (self.prompt_embedding_size or 0) * num_vectors * (4 if self.dtype == "float32" else 2)


INT8_BLOCK_SIZE = 64
"""Of a KV cache of 8 bits, where none is given."""


@dataclass(frozen=True, slots=True)
class CacheConfig:
    """The paged KV cache."""

    block_size: int
    """Tokens per block."""
    num_blocks: int | None
    """None until a worker has measured what fits (`EngineConfig.resolved`)."""
    kv_cache_memory_bytes: int | None
    """Given explicitly: no profiling run."""
    memory_utilization: float | None
    """Share of the available memory for weights, activations and cache; None: a moderate default."""
    enable_prefix_caching: bool
    machine_share: float = 1.0
    """How much of the memory of this machine is this program's to take a share of: others know nothing of it."""
    num_blocks_override: int | None = None
    """Given explicitly, before both; None: as many as fit."""
    dtype: str = "auto"
    """'int8': full blocks are rounded to 8 bits; 'fp8': all to floats of 8 bits; 'auto': all are in the type of the model."""
    window: int | None = None
    """Tokens that a token sees in the layers of a second KV group (`kvcache.window_group`); None: there is one group."""
    snapshots: int | None = None
    """States of prefixes that recurrent layers keep; 0: none, so that no prefix is found; None: no layer is recurrent."""
    offloading_bytes: int = 0
    """Of host memory, for blocks that left the cache."""
    offloading_paths: tuple[str, ...] = ()
    """Of that memory, which the owner of the engine has, by rank; empty: there is none."""
    disk_path: str | None = None
    """The folder for such blocks; None: there is none."""
    disk_bytes: int = 0
    """That the files there may take."""
    tier_fingerprint: str = ""
    """What the bits of blocks depend on besides their hashes, as hexadecimal digits; once a worker has told."""
    tier_slot_bytes: int = 0
    """Of a block in these tiers; in the same way."""
    tier_mask_path: str | None = None
    """Of memory of the owner of the engine, by which a new scheduler knows of resets (`actors.tiers.TierDirectory`)."""

    pools: tuple[str, ...] = ()
    """Memory of the owner of the engine that the caches of the replicas are in, by number: others copy blocks from there. Empty:
    of a replica that lends nothing; no entry: there are no roles."""
    lease_path: str | None = None
    """Of the memory that says which blocks are lent (`actors.tiers.lease_board`)."""
    transport: str = MAPPED
    """How blocks come from another replica: `types.roles.MAPPED`, or by NIXL. Then `pools` have what it is reached by."""

    @property
    def has_transfers(self) -> bool:
        """Blocks come from elsewhere, or go there."""
        return self.has_tiers or bool(self.pools)

    @property
    def has_tiers(self) -> bool:
        """Blocks that leave the cache may be kept elsewhere."""
        return bool(self.offloading_paths) or self.disk_path is not None

    @property
    def cache_dtype(self) -> str:
        """As `dtype`; vLLM's name."""
        return self.dtype

    @property
    def hash_key(self) -> str:
        """What the hashes of blocks cover besides the request: their type where it is not the model's."""
        return "" if self.dtype == "auto" else self.dtype

    @property
    def num_gpu_blocks(self) -> int | None:
        """As `num_blocks`; vLLM's name, on every device."""
        return self.num_blocks

    @property
    def gpu_memory_utilization(self) -> float | None:
        """As `memory_utilization`; vLLM's name, on every device."""
        return self.memory_utilization


@dataclass(frozen=True, slots=True)
class SchedulerConfig(SchedulerNames):
    """Limits of a step, and the policies that decide its contents."""

    max_num_seqs: int
    max_num_batched_tokens: int
    depth: Literal[1, 2]
    """Steps in flight: 2 plans step N+1 while step N runs."""
    policy: str
    admission: str | None = None
    """Which requests may start when, besides (`scheduling.admission_policy`); None: all that find a slot and blocks."""
    long_prefill_token_threshold: int = 0
    """At most this many tokens of one prompt per step; 0: as many as the step has room for."""
    max_num_partial_prefills: int = 1
    """At most this many prompts at a time that are too long for what is left of a step."""
    watermark: float = 0.01
    """Share of the KV blocks that admissions leave free for the growth of running requests."""
    max_waiting_requests: int | None = None
    """Sequences that may wait for their first slot, beyond those for which there is one; None: any number."""
    max_waiting_tokens: int | None = None
    """Of the prompts that may wait; None: any number."""
    max_waiting_attached: int | None = 4096
    """As max_waiting_requests, for each attached frontend by itself."""
    num_lookahead_tokens: int = 0
    """Extra KV room per decode row, for results of more than one token."""
    step_model: str | None = None
    """What steps take, for policies that ask (`scheduling.cost_model.to_json`); None: they learn it while they run."""

    @property
    def num_spare_tokens(self) -> int:
        """How far behind its last known token a row may write: the lookahead of every step in flight."""
        return self.num_lookahead_tokens * self.depth


@dataclass(frozen=True, slots=True)
class LoRAConfig:
    """How many adapters there are room for, and of what rank."""

    max_loras: int
    """That requests run with at a time."""
    max_lora_rank: int
    max_cpu_loras: int
    """That a worker keeps in memory."""


@dataclass(frozen=True, slots=True)
class ParallelConfig(ParallelNames):
    """The ranks of the model, by vLLM's names."""

    tensor_parallel_size: int
    pipeline_parallel_size: int = 1
    data_parallel_size: int = 1

    @property
    def world_size(self) -> int:
        """The number of ranks."""
        return self.tensor_parallel_size * self.pipeline_parallel_size


@dataclass(frozen=True, slots=True)
class EngineConfig(EngineNames):
    """Everything an engine is built from."""

    model: ModelConfig
    cache: CacheConfig
    scheduler: SchedulerConfig
    topology: Topology
    world_size: int
    """Ranks of all stages. Rank r of stage s is number s * tensor_size + r."""
    device: str
    num_threads: int | None
    """Threads of the worker's matrix products; None: chosen from the cores of the machine."""
    name: str | None
    record: str | None = None
    """A file to which the scheduler's inputs are recorded, for exact replay. One that is started again takes another: what
    the first one wrote stays, and beside "file" there is "file.2" (its second life), and so on."""
    rendezvous: str | None = None
    """Where the ranks of this start of the engine meet: the path of an empty file. None: there is one rank."""
    seed: int | None = None
    """Requests that bring no seed get one made of this and of their number; None: a random one."""
    stream_interval: int = 1
    """New tokens per output; a request may ask for more."""
    profile_folder: str | None = None
    """Where the workers write their traces (`start_profile`); None: profiling is off."""
    on_failure: Literal["restart", "raise"] = "restart"
    """When a process of the engine dies: start it again and go on, or end every request with EngineDeadError. Without
    effect where there is none (topology="inline")."""
    standby_worker: bool | None = None
    """Keep a process parked, with torch imported and no model: it takes the place of a worker that dies. None: one, where there
    is one worker and memory is plentiful, when the engine has run for a while. True: one for every worker, at once."""
    start_timeout_s: float | None = START_TIMEOUT_S
    """A start that is not through by then fails with EngineStartError. None: it may take any time."""
    step_timeout_s: float | None = None
    """A worker whose step takes longer is stuck and is killed; inline, the engine ends. None: learnt, at least half a minute
    (`supervision.hang_detector`)."""
    heartbeat_timeout_s: float = HEARTBEAT_TIMEOUT_S
    """So is a process that is stopped, or whose loop does not turn outside of a step, for so long."""
    restart_timeout_s: float | None = None
    """So is one that was started again and is not ready by then. None: ten times the first start, at least 5 minutes."""
    intake_timeout_s: float = INTAKE_TIMEOUT_S
    """How long reading one prompt (its chat template, its tokenization) may take; the request fails then (`intake`)."""
    enforce_eager: bool = False
    """On CUDA: launch every kernel of a decode step by itself, and record no graphs. The CPU has none."""
    enable_expert_parallel: bool = False
    """Of experts each rank holds some as a whole, in the place of its part of each."""
    cpu_share: float | None = None
    """Share of the machine's cores that the threads are chosen from; None: all of them."""
    log_statistics: bool = False
    """Throughput and load go to the log from time to time."""
    otlp_traces_endpoint: str | None = None
    """Where spans of requests are sent."""
    data_parallel_size: int = 1
    """Replicas at the start, each a scheduler with `world_size` workers (`actorllm.fleet`)."""
    ready_replicas: int = 1
    """The engine is ready when so many replicas are."""
    max_replicas: int = 0
    """The number of replicas follows the demand, up to this one (`fleet.scaling`); 0: it does not."""
    min_replicas: int = 0
    target_attainment: float = 0.99
    autoscaling: dict[str, float] = field(default_factory=dict, hash=False)
    """What replaces fields of `scheduling.autoscaler.ScalingPolicy`."""
    router: str = DEFAULT_ROUTER
    """Which replica a request goes to (`fleet.router`)."""
    stages: tuple[int, ...] = ()
    """How many layers each stage of the pipeline has; none: there is one stage."""
    is_launched: bool = False
    """The ranks were started by a launcher: this process is one of them, and rank 0 schedules."""
    replica: int = 0
    """The number of this replica."""
    roles: tuple[Role, ...] = ()
    """What each replica is for (`types.roles`); none: all are for everything."""
    nodes: tuple[str, ...] = ()
    """The agents of other machines, as "host:port" (`actorllm.fleet.nodes`)."""
    rank_nodes: tuple[str, ...] = ()
    """The agents that have ranks of every replica here: all machines have equally many, and this one the first ones."""
    num_machines: int | None = None
    """On how many machines Ray places the ranks of each replica; None: on as few as have room for them."""
    data_parallel_size_local: int = 0
    """How many replicas are on this machine, where there are nodes: the first ones."""
    node: str | None = None
    """Of a replica: the node that it is on; None: this machine."""
    node_key_file: str | None = None
    """What agents and their callers have in common."""
    node_timeout_s: float = NODE_TIMEOUT_S
    """A node from which nothing comes for so long is lost."""
    ray_address: str | None = None
    """The cluster that places the replicas which are not here (`fleet.nodes.ray_cluster`); None: the one that is found."""
    placement: Literal["spread", "pack"] = "spread"
    placement_timeout_s: float = 600.0
    resources_per_replica: dict[str, float] = field(default_factory=dict, hash=False)
    """What Ray is asked for beside cores and GPUs."""
    node_ca_file: str | None = None
    """By which the certificates of nodes are held; None: no TLS."""
    load_board: str | None = None
    """Where its scheduler tells routers of its load (`actors.load_board`); None: nowhere."""
    first_device: int = 0
    """The GPU of rank 0, of those that this process sees."""
    lora: LoRAConfig | None = None
    """Room for adapters (enable_lora); None: requests have none."""
    speculation: Speculation | None = None
    """How tokens are drafted; None: not at all."""
    enable_sleep_mode: bool = False
    """Weights and KV cache may be given back (`sleep`)."""
    worker_cls: str | None = None
    """The path of the class whose methods `collective_rpc` calls; None: RankWorker itself."""
    worker_extension_cls: str | None = None
    """The path of a class whose methods are added to that class; None: there is none."""
    batch_invariant: bool = False
    """No bit of a stream depends on anything but its request."""

    @property
    def max_blocks(self) -> int:
        """Of a sequence."""
        return -(-self.model.max_model_len // self.cache.block_size)

    @property
    def num_workers(self) -> int:
        """Ranks that are actors of this engine."""
        return 1 if self.is_launched else self.world_size

    @property
    def ranks_per_machine(self) -> int:
        """Of a replica; all machines have equally many."""
        return self.world_size // (1 + len(self.rank_nodes))

    @property
    def is_fleet(self) -> bool:
        """There are or may be several replicas, or some on other machines."""
        return self.data_parallel_size > 1 or bool(self.nodes or self.rank_nodes or self.max_replicas)

    @property
    def tensor_size(self) -> int:
        """Ranks that share the layers of a stage."""
        return self.world_size // max(1, len(self.stages))

    @property
    def reporting_rank(self) -> int:
        """The one whose results count: the first of the last stage."""
        return self.world_size - self.tensor_size  # 0, where there is one stage

    @property
    def num_lanes(self) -> int:
        """Among which decode rows are shared out (`scheduling.lanes`): one for each stage."""
        return max(1, len(self.stages))

    @property
    def keeps_output_apart(self) -> bool:
        """Whether KV of output has other bits than that of a prompt of the same tokens, so that none may stand for the other."""
        return self.batch_invariant or is_twin(self.model.scheme) or self.cache.dtype == INT8

    @property
    def lora_config(self) -> LoRAConfig | None:
        """As `lora`; vLLM's name."""
        return self.lora

    @property
    def model_config(self) -> ModelConfig:
        """As `model`; vLLM's name."""
        return self.model

    @property
    def cache_config(self) -> CacheConfig:
        """As `cache`; vLLM's name."""
        return self.cache

    @property
    def scheduler_config(self) -> SchedulerConfig:
        """As `scheduler`; vLLM's name."""
        return self.scheduler

    @property
    def parallel_config(self) -> ParallelConfig:
        """How many ranks there are."""
        return ParallelConfig(self.tensor_size, max(1, len(self.stages)), self.data_parallel_size)

    def resolved(
        self,
        num_blocks: int,
        step_costs: Costs = (),
        draft_costs: Costs = (),
        *,
        scheme: str | None = None,
        window: int | None = None,
        snapshots: int | None = None,
        tier: tuple[str, int] | None = None,
    ) -> EngineConfig:
        """The same engine with the number of KV blocks that every rank can hold, and as many drafts as pay.

        Arguments:
            num_blocks: of `cache.block_size` tokens each.
            step_costs, draft_costs: what a worker has measured (`types.speculation.with_costs`).
            scheme: what it has found to be fastest (`ModelConfig.scheme`); None: what is known already.
            window: of the layers that have a KV group of their own (`CacheConfig.window`); None: what is known already.
            snapshots: `CacheConfig.snapshots`; None: in the same way.
            tier: its `CacheConfig.tier_fingerprint` and `tier_slot_bytes`; None: in the same way.

        Raises:
            ConfigError: not even one sequence of max_model_len would fit.
        """
        capacity = num_blocks * self.cache.block_size
        spare = self.scheduler.num_spare_tokens
        if capacity < self.model.max_model_len + spare:
            most = capacity - spare
            drafts = f" and {spare} drafts" if spare else ""
            raise ConfigError(
                f"the KV cache holds {capacity} tokens ({num_blocks} blocks of {self.cache.block_size}), less than one "
                f"sequence of max_model_len={self.model.max_model_len}{drafts}; give more memory (kv_cache_memory_bytes, "
                f"gpu_memory_utilization)" + (f" or set max_model_len={most} or less" if most > 0 else "")
            )
        speculation = self.speculation
        if speculation is not None:
            speculation = with_costs(speculation, step_costs, draft_costs)
        model = replace(self.model, scheme=scheme or self.model.scheme)
        cache = replace(self.cache, num_blocks=num_blocks, window=window or self.cache.window)
        if snapshots is not None:
            has_prefixes = cache.enable_prefix_caching and snapshots > 0
            cache = replace(cache, snapshots=snapshots, enable_prefix_caching=has_prefixes)
        if tier is not None:
            cache = replace(cache, tier_fingerprint=tier[0], tier_slot_bytes=tier[1])
        return replace(self, model=model, cache=cache, speculation=speculation)

    @property
    def num_window_blocks(self) -> int:
        """Blocks of the second KV group, which there is (`CacheConfig.window`)."""
        assert self.cache.num_blocks is not None
        assert self.cache.window is not None
        return self.window_blocks(self.cache.window, self.cache.num_blocks)

    def window_blocks(self, window: int, num_blocks: int) -> int:
        """Blocks of a second KV group beside those of the first one.

        Arguments:
            window: tokens that a token sees in the layers of the second group.
            num_blocks: of the first group.
        """
        return num_window_blocks(
            num_blocks,
            window=window,
            block_size=self.cache.block_size,
            max_num_seqs=self.scheduler.max_num_seqs,
            max_num_batched_tokens=self.scheduler.max_num_batched_tokens,
            spare=self.scheduler.num_spare_tokens,
        )

    def to_json(self) -> bytes:
        """As the processes of the engine get it, and records; without the module of the application, which stays where it is."""
        return orjson.dumps(asdict(replace(self, model=replace(self.model, module=None))))

    @classmethod
    def from_json(cls, data: bytes | str) -> EngineConfig:
        """What `to_json` made.

        Arguments:
            data: JSON, as bytes or text.
        """
        tree = orjson.loads(data)
        model = tree.pop("model")
        if "embedding_size" in model:  # of older recordings
            model["prompt_embedding_size"] = model.pop("embedding_size")
        for name in ("eos_token_ids", "logits_processors"):
            model[name] = tuple(model[name])
        tree["nodes"] = tuple(tree.get("nodes", ()))
        tree["rank_nodes"] = tuple(tree.get("rank_nodes", ()))
        model["media"] = MediaRules.from_tree(model.get("media"))
        model["encoder_decoder"] = EncoderDecoder.from_tree(model.get("encoder_decoder"))
        model["pooler"] = Pooler.from_tree(model["pooler"])
        model["weights"] = WeightSource.from_tree(model.get("weights"))
        if tree.get("lora") is not None:
            tree["lora"] = LoRAConfig(**tree["lora"])
        model["marks"] = Marks(**marks) if (marks := model.get("marks")) is not None else None
        tree["stages"] = tuple(tree.get("stages", ()))
        tree["roles"] = tuple(tree.get("roles", ()))
        cache = tree.pop("cache")
        return cls(
            model=ModelConfig(**model),
            cache=CacheConfig(**(cache | {name: tuple(cache.get(name, ())) for name in ("pools", "offloading_paths")})),
            scheduler=SchedulerConfig(**tree.pop("scheduler")),
            speculation=Speculation.from_tree(tree.pop("speculation", None)),
            **tree,
        )

    @classmethod
    def from_arguments(
        cls, model: str | os.PathLike[str] | None = None, **options: Unpack[EngineOptions]
    ) -> EngineConfig:
        """From the keyword arguments of `AsyncLLM` and `LLM`.

        Arguments:
            model: a bundled model, a folder, a GGUF file, or a Hugging Face id; None with `module`.
            options: as in `actorllm.types.options.EngineOptions`.

        Raises:
            ConfigError: names the argument, its value and the fix; UnknownArgumentError: names the nearest argument.
            ModelError: the model cannot be served.

        Example:
            config = EngineConfig.from_arguments("storyteller", max_model_len=128)
            assert config.model.max_model_len == 128
        """
        given = _checked_arguments({**options})
        load_format = _choice("load_format", given["load_format"], ("auto", "safetensors", "dummy"))
        # What depends on something else comes first and in order: folder, pooler, lengths, device, limits of a step.
        module = _lent_module(model, given)
        name, path, hf = _named_folder(model, load_format, module, given)
        overrides = read_overrides(given["hf_overrides"])
        hf = overridden(hf, overrides)
        text = hf.get("text_config") or hf
        if not isinstance(text, dict):
            raise CorruptModelError(f"{path}/config.json: text_config is {text!r}, an object is needed")
        check_sizes(text)
        _choose_runner(_architecture(path, hf), given)
        pooler = read_pooler(path, hf | text, **{name: given[name] for name in ("runner", "convert", "pooler_config")})
        generation = _generation(path, given["generation_config"], module)
        encoder_decoder = _encoder_decoder(path, hf, generation, given, pooler, module)
        max_model_len = _most_positions(path, given, text, pooler, encoder_decoder)
        given["quantization"] = read_method(given["quantization"], hf, module is not None)
        device = _device(given, pooler)
        rules = rules_of(device)
        dtype = _dtype(given["dtype"], hf, rules)
        if given["block_size"] is None:  # each row of a block of 8 bits has a scale besides: wider ones have fewer
            given["block_size"] = max(rules.block_size, INT8_BLOCK_SIZE * (given["kv_cache_dtype"] == INT8))
        block_size = _positive("block_size", given["block_size"])
        max_num_seqs, max_num_batched_tokens = _limits(given, max_model_len if pooler and pooler.is_encoder else 0)
        if pooler is not None:
            _check_pooling(pooler, given, max_model_len, max_num_seqs, max_num_batched_tokens)
        media = _media(_architecture(path, hf), hf, given, pooler, module, device)
        has_embeds = given["enable_prompt_embeds"] or media is not None or encoder_decoder is not None
        speculation = _with_draft_folder(_speculation(given, pooler, block_size), path, text, load_format)
        lookahead = 0 if speculation is None else speculation.num_speculative_tokens
        stages = read_stages(given, text, device, module is not None)
        # Roles say how many replicas there are; `kv_transfer_config` may mean them or a tier.
        without_transfers = _without_tiers(given, device, pooler, module, speculation, stages)
        given, roles = with_roles(given, without_transfers)
        tiers = read_tiers(given, without_transfers)
        # All else is independent, and each value is checked where it is read.
        return cls(
            model=ModelConfig(
                name=name,
                path=str(path),
                tokenizer=_tokenizer(given, path),
                architecture=_architecture(path, hf),
                dtype=dtype,
                max_model_len=max_model_len,
                vocab_size=_config_int(path, text, "vocab_size"),
                eos_token_ids=_eos_token_ids(text, generation),
                load_format=load_format,
                seed=given["seed"] or 0,
                sampling_defaults=sampling_defaults(
                    generation or {}, given["generation_config"], given["override_generation_config"]
                ),
                impl=_choice("model_impl", given["model_impl"], ("auto", "vllm", "transformers")),
                max_logprobs=_max_logprobs(given["max_logprobs"]),
                logprobs_mode=_choice("logprobs_mode", given["logprobs_mode"], LOGPROBS_MODES),
                max_prompt_characters=_positive("max_prompt_characters", given["max_prompt_characters"]),
                prompt_embedding_size=_embedding_size(path, text) if has_embeds else None,
                takes_prompt_embeds=given["enable_prompt_embeds"],
                media=media,
                encoder_decoder=encoder_decoder,
                pooler=pooler,
                io_processor_plugin=_io_processor(given["io_processor_plugin"], hf, pooler),
                overrides=overrides,
                reasoning_parser=given["reasoning_parser"] or None,
                marks=marks_of(given["reasoning_parser"] or None, given["reasoning_config"]),
                logits_processors=_logits_processors(given["logits_processors"], pooler),
                structured_outputs=given["structured_outputs_config"],
                quantization=_quantization(given, pooler, hf, device),
                quantization_twin=_quantization_twin(given, device),
                scheme=_compute_scheme(given, dtype, pooler),
                module=module,
            ),
            # The KV cache: how many blocks there are is known once a worker has measured it.
            cache=CacheConfig(
                block_size=block_size,
                num_blocks=None,
                kv_cache_memory_bytes=_kv_cache_memory(given["kv_cache_memory_bytes"], rules),
                memory_utilization=_fraction("gpu_memory_utilization", given["gpu_memory_utilization"]),
                enable_prefix_caching=given["enable_prefix_caching"] is not False  # None, too, as in vLLM
                and (pooler is None or not pooler.is_encoder),
                num_blocks_override=_num_blocks(
                    given["num_gpu_blocks_override"], block_size, max_model_len + lookahead * _depth(given)
                ),
                dtype=_kv_cache_dtype(given, pooler, media, device),
                offloading_bytes=tiers.memory_bytes,
                disk_path=tiers.disk_path if tiers.disk_bytes else None,
                disk_bytes=tiers.disk_bytes,
                transport=given.get("kv_transport", MAPPED),
            ),
            # What a step may hold, and the policies that fill it.
            scheduler=SchedulerConfig(
                max_num_seqs=max_num_seqs,
                max_num_batched_tokens=max_num_batched_tokens,
                depth=_depth(given),
                policy=policy_path(given["scheduling_policy"]),
                admission=None if given["admission_policy"] is None else ADMISSIONS.path(given["admission_policy"]),
                long_prefill_token_threshold=_not_negative(
                    "long_prefill_token_threshold", given["long_prefill_token_threshold"]
                ),
                max_num_partial_prefills=_positive("max_num_partial_prefills", given["max_num_partial_prefills"]),
                watermark=_watermark(given["watermark"]),
                max_waiting_requests=_optional_count("max_waiting_requests", given["max_waiting_requests"]),
                max_waiting_tokens=_optional_count("max_waiting_tokens", given["max_waiting_tokens"]),
                max_waiting_attached=_optional_count("max_waiting_attached", given["max_waiting_attached"]),
                step_model=_step_model(given["step_model"]),
                num_lookahead_tokens=lookahead,
            ),
            speculation=speculation,
            # Processes, ranks and devices.
            topology=_choice("topology", given["topology"], ("process", "inline")),
            world_size=_world_size(given["tensor_parallel_size"], text) * max(1, len(stages)),
            stages=stages,
            is_launched=given["is_launched"],
            device=device,
            num_threads=_optional_positive("num_threads", given["num_threads"]),
            name=given["name"],
            record=None if given["record"] is None else os.path.abspath(given["record"]),
            seed=given["seed"],
            stream_interval=_stream_interval(given["stream_interval"]),
            profile_folder=_profile_folder(given["profiler_config"]),
            # What is done about failures, and after how long.
            standby_worker=given["standby_worker"],
            on_failure=_choice("on_failure", given["on_failure"], ("restart", "raise")),
            step_timeout_s=None if given["step_timeout_s"] is None else _seconds("step_timeout_s", given, 0.05),
            heartbeat_timeout_s=_seconds("heartbeat_timeout_s", given, MIN_HEARTBEAT_TIMEOUT_S),
            start_timeout_s=None if given["start_timeout_s"] is None else _seconds("start_timeout_s", given, 1.0),
            restart_timeout_s=None if given["restart_timeout_s"] is None else _seconds("restart_timeout_s", given, 1.0),
            intake_timeout_s=_seconds("intake_timeout_s", given, MIN_INTAKE_TIMEOUT_S),
            # Features that are off unless they are asked for.
            enforce_eager=given["enforce_eager"],
            enable_expert_parallel=given["enable_expert_parallel"],
            cpu_share=_fraction("cpu_share", given["cpu_share"]),
            log_statistics=given["disable_log_stats"] is False,
            otlp_traces_endpoint=_address("otlp_traces_endpoint", given["otlp_traces_endpoint"]),
            lora=_lora(given, pooler, module),
            enable_sleep_mode=_sleep_mode(given["enable_sleep_mode"], module),
            worker_cls=_class_path("worker_cls", given["worker_cls"], "auto"),
            worker_extension_cls=_class_path("worker_extension_cls", given["worker_extension_cls"], ""),
            batch_invariant=_batch_invariant(given, pooler, module, device),
            roles=roles,
            **_fleet(given, device),
        )


def _limits(given: dict[str, Any], longest_prompt: int) -> tuple[int, int]:
    """The most sequences and tokens of a step. longest_prompt: that goes through in one step; 0: prompts go through in parts.

    What is not given gives way to what is. Raises ConfigError where both are given and do not go together: the scheduler relies on
    every decode row having room.
    """
    rows, tokens = (
        _optional_positive(name, given[name], MOST_IN_STEP) for name in ("max_num_seqs", "max_num_batched_tokens")
    )
    if tokens is None:
        tokens = max(DEFAULT_BATCHED_TOKENS, rows or 0, longest_prompt)
    if rows is None:
        rows = min(DEFAULT_NUM_SEQS, tokens)
    if tokens < rows:
        raise ConfigError(
            f"max_num_batched_tokens={tokens} is less than max_num_seqs={rows}: a step "
            f"could not hold one token of every running sequence; raise the one or lower the other"
        )
    return rows, tokens


def _media(
    architecture: str,
    hf: dict[str, Any],
    given: dict[str, Any],
    pooler: Pooler | None,
    module: LentModule | None,
    device: str,
) -> MediaRules | None:
    """Which images prompts may have. Raises ConfigError for what they do not go together with."""
    rules = MediaRules.read(architecture, hf, given)
    if rules is None or pooler is not None or module is not None:
        return None
    if device != "cpu":
        raise ConfigError(
            f"device={device!r}: {architecture} takes {rules.modality}, which is tested with device='cpu'; use that"
        )
    if given["enable_prompt_embeds"] and rules.num_vectors > 1:
        raise ConfigError(
            f"enable_prompt_embeds=True: the rows of {architecture} hold more than an embedding; leave it out"
        )
    for name in ("enable_lora", "speculative_config"):
        if given[name]:
            raise ConfigError(
                f"{name}={given[name]!r:.80} is not supported for models that take {rules.modality}; leave it out"
            )
    return rules


def _choose_runner(architecture: str, given: dict[str, Any]) -> None:
    """Some models with an encoder and a decoder are named like encoders."""
    if given["runner"] == "auto" and architecture in ENCODER_DECODERS:
        given["runner"] = "generate"


def _most_positions(
    path: Path,
    given: dict[str, Any],
    text: dict[str, Any],
    pooler: Pooler | None,
    encoder_decoder: EncoderDecoder | None,
) -> int:
    """Of a request, rows of an encoder included."""
    if encoder_decoder is not None:
        return encoder_decoder.max_model_len
    return _max_model_len(path, given["max_model_len"], text, None if pooler is None else pooler.max_length)


def _encoder_decoder(
    path: Path,
    hf: dict[str, Any],
    generation: dict[str, Any] | None,
    given: dict[str, Any],
    pooler: Pooler | None,
    module: LentModule | None,
) -> EncoderDecoder | None:
    """What the encoder of such a model takes. Raises ConfigError for what it does not go together with."""
    architecture = _architecture(path, hf)
    if pooler is not None and architecture in ENCODER_DECODERS:
        raise ConfigError(
            f"runner='pooling' is not supported for {architecture}, a model with an encoder and a decoder; leave it out"
        )
    if pooler is not None or module is not None:
        return None
    asked = given | {"max_model_len": human_number(given["max_model_len"])}
    found = EncoderDecoder.read(architecture, hf, generation, asked)
    if found is not None:  # "auto" may have found a GPU
        given["device"] = "cpu"
    return found


def _lora(given: dict[str, Any], pooler: Pooler | None, module: LentModule | None) -> LoRAConfig | None:
    """Raises ConfigError for what adapters do not go together with."""
    max_loras, max_rank = _positive("max_loras", given["max_loras"]), _positive("max_lora_rank", given["max_lora_rank"])
    max_cached = _optional_positive("max_cpu_loras", given["max_cpu_loras"])
    for name, value, most in (("max_loras", max_loras, MAX_LORAS), ("max_lora_rank", max_rank, MAX_LORA_RANK)):
        if value > most:
            raise ConfigError(f"{name}={value} must be at most {most}")
    if max_cached is not None and max_cached < max_loras:
        raise ConfigError(f"max_cpu_loras={max_cached} is less than max_loras={max_loras}; use {max_loras} or more")
    if not given["enable_lora"]:
        return None
    if module is not None:
        raise ConfigError("enable_lora=True: a module of the application is not adapted; leave it out")
    if pooler is not None and pooler.is_encoder:
        raise ConfigError("enable_lora=True: encoders are not adapted yet; leave it out")
    return LoRAConfig(max_loras, max_rank, max_cached or max_loras)


def _batch_invariant(given: dict[str, Any], pooler: Pooler | None, module: LentModule | None, device: str) -> bool:
    """Raises ConfigError for what it does not hold with; what depends on the machine is found out while loading."""
    if not given["batch_invariant"]:
        return False
    told = "batch_invariant=True (or VLLM_BATCH_INVARIANT of the environment)"
    if device != "cpu":
        raise ConfigError(f"{told} is not supported with device={device!r} yet; use device='cpu', or leave it out")
    if pooler is not None:
        raise ConfigError(f"{told} is about streams of text, and this model makes vectors; leave it out")
    if module is not None or given["model_impl"] == "transformers":
        raise ConfigError(f"{told} does not hold for modules of transformers; leave it out")
    for name, unused in (
        ("enable_lora", (None, False)),
        ("tensor_parallel_size", (1,)),
        ("quantization_twin", (None, False)),
    ):
        if given[name] not in unused:
            raise ConfigError(f"{told} is not supported with {name}={given[name]!r} yet; leave one of them out")
    if is_twin(given["compute_scheme"]):
        raise ConfigError(
            f"{told} needs one scheme for all rows, and compute_scheme={given['compute_scheme']!r} has two"
        )
    return True


def _quantization_twin(given: dict[str, Any], device: str) -> bool | None:
    """Raises ConfigError where a second form of the weights is asked for, and no worker makes one."""
    if given["quantization_twin"]:
        # On one machine the first of the replicas finds out for all of them.
        is_elsewhere = device != "cpu" or given["nodes"] or _is_of_ray(given)
        alone: dict[str, Any] = {"data_parallel_size": 1, "max_replicas": None} if is_elsewhere else {}
        if device == "cpu" and given["tensor_parallel_size"] not in (None, 1):  # on CUDA, ranks agree wherever they are
            alone |= {"nnodes": 1, "is_launched": False}
        for name, value in alone.items():
            if given[name] not in (None, value):
                raise ConfigError(
                    f"quantization_twin=True is not supported with {name}={given[name]!r} yet: each worker measures for itself "
                    f"which form is faster, and two may differ; leave it out"
                )
    twin: bool | None = given["quantization_twin"]
    return twin


def _compute_scheme(given: dict[str, Any], dtype: str, pooler: Pooler | None) -> str | None:
    """Raises ConfigError for what the model's products cannot be computed as."""
    scheme: str | None = given["compute_scheme"]
    if scheme is None:
        return None
    told = f"compute_scheme={scheme!r}"
    known = schemes_of(given["quantization"], dtype)
    if scheme not in known:
        these = f"one of {', '.join(map(repr, known))}" if known else "no choice"
        raise ConfigError(
            f"{told} is not known for quantization={given['quantization']!r} and dtype={dtype!r}: there is {these}; "
            f"use that, or leave it out"
        )
    if given["quantization_twin"] is not None:
        raise ConfigError(
            f"{told} says already what quantization_twin={given['quantization_twin']!r} says; leave one of them out"
        )
    if is_twin(scheme):
        if pooler is not None:
            raise ConfigError(
                f"{told} has a scheme for decode rows, and this model makes vectors of prompts; use one scheme"
            )
        if (stages := given["pipeline_parallel_size"]) not in (None, 1):
            raise ConfigError(
                f"{told} is not supported with pipeline_parallel_size={stages!r} yet; use one scheme for all rows"
            )
    return scheme


def _kv_cache_dtype(given: dict[str, Any], pooler: Pooler | None, media: MediaRules | None, device: str) -> str:
    """Raises ConfigError for what a cache of 8 bits is not made for."""
    dtype: str = _choice("kv_cache_dtype", given["kv_cache_dtype"], ("auto", INT8, FP8, "fp8_e4m3"))
    dtype = FP8 if dtype == "fp8_e4m3" else dtype
    if dtype != "auto":
        told, other = f"kv_cache_dtype={given['kv_cache_dtype']!r}", {INT8: "cpu", FP8: "cuda"}[dtype]
        if device != other:
            fix = (
                f"kv_cache_dtype={INT8 if device == 'cpu' else FP8!r}" if device in ("cpu", "cuda") else "device='cpu'"
            )
            raise ConfigError(f"{told} is not supported with device={device!r} yet; use {fix}, or leave it out")
        if pooler is not None:
            raise ConfigError(f"{told}: a model that makes vectors of prompts reads no KV cache twice; leave it out")
        if media is not None:
            raise ConfigError(f"{told} is not supported for models that take images or audio yet; leave it out")
    return dtype


def _without_tiers(
    given: dict[str, Any],
    device: str,
    pooler: Pooler | None,
    module: LentModule | None,
    speculation: Speculation | None,
    stages: tuple[int, ...],
) -> str | None:
    """Why there can be no KV tiers; None: there can be."""
    if device != "cpu":
        return f"with device={device!r} yet"
    if given["enable_prefix_caching"] is False:
        return "with enable_prefix_caching=False: what is in them could not be found"
    if pooler is not None:
        return "by models that make vectors"
    if module is not None:
        return "with module=: nothing tells its weights from others"
    if stages:
        return "with several stages yet: their parts of a block differ in size"
    if given["is_launched"]:
        return "with ranks that another program has launched"
    if given["tensor_parallel_size"] > 1 and given["nnodes"] != 1:
        return "with ranks on several machines: each has its part of a block"
    if speculation is not None and speculation.model is not None:
        return "with a draft model yet: its KV would be missing"
    if given["record"] is not None:
        return "with record=: a replay has no memory or disk to read from"
    return None


def _depth(given: dict[str, Any]) -> Literal[1, 2]:
    """Steps in flight."""
    return 2 if given["async_scheduling"] in (None, True) else 1


def _speculation(given: dict[str, Any], pooler: Pooler | None, block_size: int) -> Speculation | None:
    """How tokens are drafted. What that cannot be combined with is refused by name."""
    speculation = read_speculation(given["speculative_config"])
    if speculation is None:
        return None
    told = f"speculative_config (method={speculation.method!r:.80})"
    if pooler is not None:
        raise ConfigError(f"{told}: a model that makes vectors samples no tokens; leave speculative_config out")
    if given["model_impl"] == "transformers" and speculation.method in WITH_MODEL:
        raise ConfigError(
            f"{told} is not supported for modules of transformers yet; use {NGRAM!r} or {SUFFIX!r}, or leave model_impl at 'auto'"
        )
    spare = speculation.num_speculative_tokens * _depth(given)
    if spare >= block_size:
        most = (block_size - 1) // _depth(given)
        fix = f"use {most} or fewer, or larger blocks" if most else "use larger blocks"
        raise ConfigError(
            f"{told}: num_speculative_tokens={speculation.num_speculative_tokens} for each of {_depth(given)} steps in flight must "
            f"be less than block_size={block_size}; {fix}"
        )
    return speculation


def _with_draft_folder(
    speculation: Speculation | None, target: Path, target_tree: dict[str, Any], load_format: str
) -> Speculation | None:
    """The same with the folder of the draft model in place of its name. Raises ModelError, ConfigError."""
    if speculation is None or speculation.model is None:
        return speculation
    folder, tree = read_model_folder(speculation.model, load_format)
    tree = head_tree(tree) if speculation.method in HEADS else tree
    text = tree.get("text_config")
    check_same_tokenizer(target, target_tree, folder, text if isinstance(text, dict) else tree)
    return replace(speculation, model=str(folder))


def _fleet(given: dict[str, Any], device: str) -> dict[str, Any]:
    """How many replicas there are. What a fleet cannot be combined with is refused by name. device: the backend's name."""
    size = _positive("data_parallel_size", given["data_parallel_size"])
    scaling = _scaling(given, size)
    size = max(size, scaling.get("min_replicas", 1))
    nodes = _nodes(given, device)
    local = given["data_parallel_size_local"]
    if nodes["nodes"]:
        num_local = 0 if local is None else _not_negative("data_parallel_size_local", local)
        if size == 1 and given["max_replicas"] is None:  # the default: one replica for each node
            size = num_local + len(nodes["nodes"])
        if num_local > size:
            raise ConfigError(f"data_parallel_size_local={num_local} is more than data_parallel_size={size}")
        nodes["data_parallel_size_local"] = num_local
    elif local not in (None, size):
        raise ConfigError(
            f"data_parallel_size_local={local!r} of data_parallel_size={size} replicas are here, and no nodes are given for the "
            f'others; give nodes=["host:port", ...] of machines that run `actorllm node`'
        )
    ready = _positive("ready_replicas", given["ready_replicas"])
    if size > MAX_REPLICAS:
        raise ConfigError(
            f"data_parallel_size={size} is more than the {MAX_REPLICAS} replicas that one engine may have"
        )
    if ready > size:
        raise ConfigError(f"ready_replicas={ready} is more than data_parallel_size={size}; lower it")
    make_router(given["router"])
    if (size > 1 or scaling) and given["topology"] == "inline":
        asked = f"max_replicas={scaling['max_replicas']}" if scaling else f"data_parallel_size={size}"
        raise ConfigError(
            f"{asked} needs processes, and topology='inline' computes in this one; use topology='process'"
        )
    return {"data_parallel_size": size, "ready_replicas": ready, "router": given["router"], **scaling, **nodes}


def _scaling(given: dict[str, Any], size: int) -> dict[str, Any]:
    """How the number of replicas follows the demand; empty: it does not."""
    most, least, policy = given["max_replicas"], given["min_replicas"], given["autoscaling"]
    if most is None:
        if least is not None or policy is not None:
            raise ConfigError("min_replicas and autoscaling need max_replicas, up to which replicas are started")
        return {}
    most, least = _positive("max_replicas", most), 1 if least is None else _positive("min_replicas", least)
    if not least <= most <= MAX_REPLICAS:
        raise ConfigError(
            f"max_replicas={most} must be from min_replicas={least} to {MAX_REPLICAS}, which one engine may have"
        )
    if size > most or 1 < size < least:
        raise ConfigError(f"data_parallel_size={size} must be from min_replicas={least} to max_replicas={most}")
    target = given["target_attainment"]
    if isinstance(target, bool) or not isinstance(target, int | float) or not 0 < target < 1:
        raise ConfigError(f"target_attainment={shown(target)} must be a share of requests, above 0 and below 1")
    if isinstance(policy, str):  # of a command line
        try:
            policy = orjson.loads(policy)
        except orjson.JSONDecodeError as error:
            raise ConfigError(f"autoscaling={policy!r:.80} is no JSON: {error}") from error
    if policy is not None and not isinstance(policy, Mapping):
        raise ConfigError(f'autoscaling={shown(policy)} must be a mapping, such as {{"window_s": 120}}')
    policy = dict(policy or {})
    ScalingPolicy.of(policy)
    return {"max_replicas": most, "min_replicas": least, "target_attainment": float(target), "autoscaling": policy}


def _is_of_ray(given: dict[str, Any], device: str | None = None) -> bool:
    """Whether Ray places the replicas: it was asked for, or there are ranks and this process is in a group of Ray's, as in vLLM.

    device: where it is "cuda", Ray also has ranks for which this machine has too few GPUs, if it is installed.
    """
    if "ray" in (given["data_parallel_backend"], given["distributed_executor_backend"]):
        return True
    ranks = given["tensor_parallel_size"] * given["pipeline_parallel_size"]
    if ranks == 1 or given["distributed_executor_backend"] is not None or given["nodes"]:
        return False
    if is_placed_by_ray():
        return True
    return device == "cuda" and given["topology"] != "inline" and 0 < num_visible_gpus() < ranks and has_ray()


def _nodes(given: dict[str, Any], device: str) -> dict[str, Any]:
    """The agents of other machines, and how they are called. vLLM's arguments of other machines are held against them."""
    nodes, key_file = given["nodes"] or (), given["node_key_file"]
    if isinstance(nodes, str) or not all(isinstance(node, str) for node in nodes):
        raise ConfigError(f'nodes={nodes!r} must be a list of addresses, such as ["10.0.0.2:7040"]')
    if len(set(nodes)) != len(nodes):
        raise ConfigError(
            f"nodes={list(nodes)!r} names a node twice; data_parallel_size says how many replicas there are"
        )
    # What nodes need, and what they do not go together with.
    is_of_ray = _is_of_ray(given, device)
    if is_of_ray and nodes:
        raise ConfigError("nodes and Ray both say where replicas are; give one of them")
    if is_of_ray:
        nodes, key_file = (RAY,), "ray"
    if nodes and key_file is None:
        raise ConfigError(
            "nodes need node_key_file, a file of mode 0600 that the agents have, too: (umask 077; openssl rand -hex 32 > FILE)"
        )
    if nodes and given["topology"] == "inline":
        raise ConfigError("nodes have processes, and topology='inline' computes in this one; use topology='process'")
    # In vLLM every machine runs the same command; here only the first one builds an engine.
    if given["node_rank"] != 0:
        raise ConfigError(
            f"node_rank={given['node_rank']!r}: only the first machine builds an engine; run `actorllm node --listen HOST:PORT "
            f"--key-file FILE` on the others, and name them in its nodes"
        )
    if not is_of_ray and given["nnodes"] not in (1, 1 + len(nodes)):
        raise ConfigError(
            f"nnodes={given['nnodes']!r} with {len(nodes)} nodes beside this machine; name each of the others in nodes, as "
            f'"host:port"'
        )
    ranks = given["tensor_parallel_size"] * given["pipeline_parallel_size"]
    rank_nodes, num_machines = (), None
    if nodes and given["nnodes"] > 1 and ranks > 1:  # as in vLLM: the ranks of one replica
        _check_rank_nodes(given | {"device": device}, ranks, is_of_ray)
        if is_of_ray:
            num_machines = given["nnodes"]
        else:  # those of the replica here
            rank_nodes, nodes = tuple(nodes), ()
    return {
        "nodes": tuple(nodes),
        "rank_nodes": rank_nodes,
        "num_machines": num_machines,
        "ray_address": given["ray_address"],
        "placement": _choice("placement", given["placement"], ("spread", "pack")),
        "placement_timeout_s": _seconds("placement_timeout_s", given, 1.0),
        "resources_per_replica": dict(given["resources_per_replica"] or {}),
        "node_key_file": None if key_file is None or is_of_ray else os.path.abspath(os.path.expanduser(key_file)),
        "node_timeout_s": _seconds("node_timeout_s", given, MIN_NODE_TIMEOUT_S),
        "node_ca_file": None if given["node_ca_file"] is None else os.fspath(given["node_ca_file"]),
    }


def _check_rank_nodes(given: Mapping[str, Any], ranks: int, is_of_ray: bool) -> None:
    """Raises ConfigError for ranks that cannot be on so many machines, and for what they are not combined with."""
    told = f"nnodes={given['nnodes']}"
    if ranks % given["nnodes"]:
        raise ConfigError(f"{told}: {ranks} ranks cannot be shared out evenly; use as many for each machine")
    single = {"data_parallel_size": 1, "max_replicas": None}  # of machines that are given; Ray has places for more
    for name, value in {**({} if is_of_ray else single), "device": "cpu"}.items():
        if given[name] != value:
            raise ConfigError(
                f"{told} has the ranks of one replica on several machines, and is not supported with {name}={given[name]!r:.80} "
                f"yet; leave one of them out"
            )


ARGUMENTS: dict[str, Any] = DEFAULTS
"""What the front doors understand, with the defaults (`actorllm.types.options`). Those before `topology` are vLLM's names."""

NEAREST_OF_OURS = {
    "max_num_queued_reqs": "max_waiting_requests",
    "max_num_queued_tokens": "max_waiting_tokens",
    "rope_scaling": "hf_overrides={'rope_scaling': ...}",
    "rope_theta": "hf_overrides={'rope_theta': ...}",
}
"""What to use where vLLM's argument means something else than ours, or is one of older releases."""


def _check_names(arguments: dict[str, Any]) -> None:
    """Raises for what is no argument, and for vLLM's that would change tokens; warns of those that have no effect."""
    for name, value in arguments.items():
        if name in ARGUMENTS:
            continue
        # Names are ours, vLLM's without effect here, or unknown. Of the second kind, what would change tokens is refused.
        if name not in VLLM_ARGUMENTS:
            known = [*ARGUMENTS, *VLLM_ARGUMENTS, "model"]
            raise UnknownArgumentError(f"there is no engine argument {name!r}{nearest_name(name, known)}")
        if value in VLLM_ARGUMENTS[name]:
            continue
        if name in HARMLESS:
            if value is None:  # of a program that hands on what its user has not said
                continue
            warnings.warn(f"{name}={value!r} is taken and has no effect: {HARMLESS[name]}", stacklevel=5)
        else:
            accepted = " or ".join(repr(v) for v in VLLM_ARGUMENTS[name])
            instead = f", and use {NEAREST_OF_OURS[name]}" if name in NEAREST_OF_OURS else ""
            raise ConfigError(f"{name}={value!r} is not supported; leave it at {accepted}{instead}")


def _checked_arguments(arguments: dict[str, Any]) -> dict[str, Any]:
    _check_names(arguments)
    given = ARGUMENTS | {k: v for k, v in arguments.items() if k in ARGUMENTS}
    read_variables(given)
    translate(given)
    given["reasoning_parser"] = reasoning_of_file(given["reasoning_parser"], given["reasoning_parser_plugin"])
    # Types that are checked nowhere else; numbers are checked where the parts of the configuration are made.
    # Ranks are processes, so that there is one where all of the engine runs in the calling process.
    size = _positive("tensor_parallel_size", given["tensor_parallel_size"])
    given["is_launched"] = check_launch(given)
    if size > 1 and given["topology"] == "inline" and not given["is_launched"]:
        raise ConfigError(
            f"tensor_parallel_size={given['tensor_parallel_size']} needs a process per rank; use topology='process'"
        )
    if given["async_scheduling"] not in (None, True, False):
        raise ConfigError(f"async_scheduling={given['async_scheduling']!r} must be True, False or None")
    for name in (
        *("skip_tokenizer_init", "enforce_eager", "trust_remote_code", "enable_expert_parallel"),
        *("enable_prefix_caching", "enable_prompt_embeds", "standby_worker", "disable_log_stats"),
        *("enable_lora", "enable_sleep_mode", "batch_invariant", "quantization_twin"),
    ):
        if not isinstance(given[name], bool) and (given[name] is not None or ARGUMENTS[name] is not None):
            raise ConfigError(f"{name}={given[name]!r} must be True or False")
    # None is allowed where None is the default.
    for name in ("name", "scheduling_policy", "admission_policy", "router", "compute_scheme"):
        if not is_text(given[name]) and (given[name] is not None or ARGUMENTS[name] is not None):
            raise ConfigError(f"{name}={shown(given[name])} must be a string")
    if given["name"] is not None:
        check_engine_name(given["name"])
    # What huggingface_hub gets; the token is in no message.
    if given["revision"] is not None and not isinstance(given["revision"], str):
        raise ConfigError(f"revision={given['revision']!r} must be the name of a branch or tag, or a commit")
    if not isinstance(given["hf_token"], str | bool | None):
        raise ConfigError("hf_token must be a token, True (the one of this user), False or None")
    for name in ("tokenizer", "record", "step_model", "download_dir"):
        if given[name] is not None and not isinstance(given[name], str | os.PathLike):
            raise ConfigError(f"{name}={given[name]!r} must be a path")
    seed = given["seed"]
    if seed is not None and (isinstance(seed, bool) or not isinstance(seed, int) or not -(2**63) <= seed < 2**63):
        raise ConfigError(f"seed={seed!r} must be a 64-bit integer")
    if given["trust_remote_code"]:
        warnings.warn("trust_remote_code is accepted and never acted on: no code of a model is run", stacklevel=4)
    return given


def check_engine_name(name: Any) -> None:
    """ConfigError unless it can be the name of an engine, under which other processes find it."""
    if not isinstance(name, str) or not re.fullmatch(r"[A-Za-z0-9][A-Za-z0-9._-]{0,63}", name):
        raise ConfigError(
            f"name={name!r} cannot name an engine; use up to 64 letters, digits, '.', '_' and '-', the first of them a "
            f"letter or a digit"
        )


NOWHERE = Path(os.devnull)
"""The folder of a module of the application: there are no files."""


def _lent_module(model: str | os.PathLike[str] | None, given: dict[str, Any]) -> LentModule | None:
    """The application's module, if it lends one. It leaves nothing for some arguments to decide, which are set here."""
    if given["module"] is None:
        return None
    if model is not None:
        raise ConfigError(
            f"model={os.fspath(model)!r} and module={type(given['module']).__name__}: give one of them; tokenizer= names the "
            f"folder of a tokenizer"
        )
    module = LentModule(given["module"])
    module.check_arguments(given)
    given |= {"runner": "generate", "device": "cpu", "dtype": module.dtype, "model_impl": "transformers"}
    return module


def _named_folder(
    model: str | os.PathLike[str] | None, load_format: str, module: LentModule | None, given: dict[str, Any]
) -> tuple[str, Path, dict[str, Any]]:
    """What the model is called, its folder, and its config.json."""
    if module is not None:
        return module.architecture, NOWHERE, module.tree
    download = {name: given[name] for name in ("revision", "download_dir", "hf_token")}
    path, hf = read_model_folder(model, load_format, **download)
    return os.fspath(model or ""), path, hf


def _generation(path: Path, source: Any, module: LentModule | None) -> dict[str, Any] | None:
    """generation_config.json, or what the module has in its place."""
    found = read_generation_config(path, source)
    return module.generation_tree if found is None and module is not None else found


def _tokenizer(given: dict[str, Any], path: Path) -> str | None:
    """Its folder; None: there is none, or none is wanted."""
    if given["skip_tokenizer_init"]:
        return None
    if given["tokenizer"] is not None:
        named = os.path.abspath(os.path.expanduser(given["tokenizer"]))  # the program may change its working folder
        return named if os.path.exists(named) else str(given["tokenizer"])
    return None if path == NOWHERE or path.parent == shapes.FOLDER else str(path)


def read_model_folder(
    model: str | os.PathLike[str] | None,
    load_format: str = "auto",
    *,
    revision: str | None = None,
    download_dir: str | os.PathLike[str] | None = None,
    hf_token: str | bool | None = None,
) -> tuple[Path, dict[str, Any]]:
    """The folder of a model and its config.json: a bundled name, a path, or a Hugging Face id in the local cache.

    load_format "dummy" needs no weights, so that a model of `actorllm.bundled.shapes` needs no download either.
    """
    name = os.fspath(model) if isinstance(model, str | os.PathLike) else None
    if not isinstance(name, str) or not name:
        raise ConfigError(f"model={model!r} must be the name or the folder of a model")
    path = BUNDLED_MODELS.get(name)
    if path is None and load_format == "dummy" and not Path(name).expanduser().is_dir():
        path = shapes.shape_folder(name)
    if path is None:
        path = _local_folder(name, revision=revision, cache_dir=download_dir, token=hf_token)
    config = path / "config.json"
    if not config.is_file():
        raise ModelNotFoundError(
            f"model folder {str(path)!r} has no config.json; give the folder of a Hugging Face model"
        )
    return path, read_model_config(path)


def _local_folder(name: str, **how: Any) -> Path:
    """how: of huggingface_hub.snapshot_download."""
    path = Path(name).expanduser()
    if path.is_dir():
        return path.resolve()
    if path.suffix == ".gguf" and path.is_file():
        return gguf_folder(path)
    if name.count("/") == 1 and not name.startswith((".", "/", "~")):
        from huggingface_hub import snapshot_download
        from huggingface_hub.errors import HfHubHTTPError, HFValidationError, LocalEntryNotFoundError

        try:
            patterns = ["*.json", "*.safetensors", "*.txt", "*.model", "*.jinja"]
            return Path(snapshot_download(name, allow_patterns=patterns, **how))
        except (LocalEntryNotFoundError, HFValidationError, HfHubHTTPError, OSError) as error:
            raise ModelNotFoundError(
                f"model {name!r} is neither a folder, nor in the local Hugging Face cache, nor can it be downloaded "
                f"({type(error).__name__}); bundled models: {', '.join(BUNDLED_MODELS)}"
            ) from error
    raise ModelNotFoundError(
        f"there is no model {name!r}: not a folder, not a bundled model ({', '.join(BUNDLED_MODELS)})"
        f"{nearest_name(name, BUNDLED_MODELS)}"
    )


def _architecture(path: Path, hf: dict[str, Any]) -> str:
    names = hf.get("architectures")
    if not isinstance(names, list) or not names or not isinstance(names[0], str):
        raise UnsupportedModelError(f"{path}/config.json names no architecture (`architectures` is {names!r})")
    return names[0]


def _config_int(path: Path, hf: dict[str, Any], key: str) -> int:
    value = hf.get(key)
    if isinstance(value, bool) or not isinstance(value, int) or value <= 0:
        raise CorruptModelError(f"{path}/config.json: {key} is {value!r}, a positive integer is needed")
    return value


def _embedding_size(path: Path, hf: dict[str, Any]) -> int:
    """Of the model's input embeddings, which OPT projects; the worker holds it against the loaded model."""
    for key in ("word_embed_proj_dim", "hidden_size", "n_embd", "d_model"):
        if hf.get(key) is not None:
            return _config_int(path, hf, key)
    raise ConfigError("enable_prompt_embeds=True: the model's config.json does not say its hidden_size")


def _eos_token_ids(hf: dict[str, Any], generation: dict[str, Any] | None) -> tuple[int, ...]:
    """What generation_config.json calls end of text; config.json counts only where there is no such file, as in vLLM."""
    value = (hf if generation is None else generation).get("eos_token_id")
    values = value if isinstance(value, list) else [value]
    return tuple(sorted({v for v in values if isinstance(v, int) and not isinstance(v, bool) and v >= 0}))


def parallel_sizes(num_heads: int, num_kv_heads: int) -> list[int]:
    """Among how many ranks the heads can be shared out evenly; with more ranks than key heads, some hold the same one."""
    return [n for n in range(1, num_heads + 1) if not num_heads % n and (not num_kv_heads % n or not n % num_kv_heads)]


def _world_size(size: int, hf: dict[str, Any]) -> int:
    heads, kv_heads = hf.get("num_attention_heads"), hf.get("num_key_value_heads") or hf.get("num_attention_heads")
    for name, number in (("num_attention_heads", heads), ("num_key_value_heads", kv_heads)):
        if isinstance(number, int) and not 1 <= number <= MAX_HEADS:
            raise CorruptModelError(f"config.json: {name} is {number!r:.40}, a number from 1 to {MAX_HEADS} is needed")
    if isinstance(heads, int) and isinstance(kv_heads, int) and size not in (sizes := parallel_sizes(heads, kv_heads)):
        raise ConfigError(
            f"tensor_parallel_size={size}: {heads} attention heads over {kv_heads} key heads cannot be shared out "
            f"evenly; possible are {', '.join(map(str, sizes))}"
        )
    return size


def _num_blocks(given: Any, block_size: int, max_model_len: int) -> int | None:
    number = _optional_positive("num_gpu_blocks_override", given)
    if number is not None and number * block_size < max_model_len:
        raise ConfigError(
            f"num_gpu_blocks_override={number}: so many blocks of {block_size} tokens hold less than one sequence of "
            f"max_model_len={max_model_len}; use {-(-max_model_len // block_size)} or more, or lower max_model_len"
        )
    return number


def _logits_processors(given: Any, pooler: Pooler | None) -> tuple[str, ...]:
    paths = logits_processor_paths(given)
    if paths and pooler is not None:
        raise ConfigError("logits_processors: a model that makes vectors has no logits; leave them out")
    return paths


def _io_processor(given: Any, hf: Mapping[str, Any], pooler: Pooler | None) -> str | None:
    """The model's own plug-in is not asked for where it generates text."""
    if given is not None and (not isinstance(given, str) or not given):
        raise ConfigError(f"io_processor_plugin={given!r:.120} must be the name of a plug-in, or None")
    if pooler is None:
        if given is not None:
            raise ConfigError(f"io_processor_plugin={given!r:.120} needs runner='pooling'; this engine generates text")
        return None
    own = hf.get("io_processor_plugin")
    if given is None and own is not None and not isinstance(own, str):
        raise CorruptModelError(f"config.json: io_processor_plugin is {own!r:.80}, the name of a plug-in is needed")
    return given if given is not None else own


def _check_pooling(
    pooler: Pooler, given: dict[str, Any], max_model_len: int, max_num_seqs: int, max_num_batched_tokens: int
) -> None:
    """What does not go together with pooling. Raises ConfigError."""
    if pooler.is_encoder:
        if given["enable_prefix_caching"]:
            raise ConfigError(
                "enable_prefix_caching=True: in an encoder every token sees all others, so that nothing of a prompt can be "
                "used for another; leave it out"
            )
        if given["enable_prompt_embeds"]:
            raise ConfigError("enable_prompt_embeds=True is not supported for encoders; leave it out")
        if max_num_batched_tokens < max_model_len:
            raise ConfigError(
                f"max_num_batched_tokens={max_num_batched_tokens} is less than max_model_len={max_model_len}: a prompt goes "
                f"through an encoder in one step; raise the one or lower the other"
            )
    most = MAX_VECTOR_BYTES // (4 * pooler.vector_size)
    if max_num_seqs > most:
        raise ConfigError(
            f"max_num_seqs={max_num_seqs} vectors of {pooler.vector_size} numbers are more than one step may return; use "
            f"max_num_seqs={most} or fewer"
        )


def _sleep_mode(given: Any, module: LentModule | None) -> bool:
    """Raises ConfigError where memory cannot be given back."""
    if given and module is not None:
        raise ConfigError("enable_sleep_mode=True: the parameters of module= are the application's own; leave it out")
    return bool(given)


def _class_path(name: str, given: Any, nothing: str) -> str | None:
    """A class of the application as a path by which a worker finds it; None: none is asked for."""
    if given in (nothing, None):
        return None
    path = path_of(given) if isinstance(given, type) else with_colon(given) if isinstance(given, str) else None
    if path is None or not is_import_path(path):
        raise ConfigError(f"{name}={given!r:.200} must be a class at the top of a module, or its path 'module:Class'")
    return path


def _stream_interval(given: Any) -> int:
    interval = _positive("stream_interval", given)
    if interval >= 2**31:
        raise ConfigError(f"stream_interval={interval} must be less than {2**31}")
    return interval


POSITIONS = ("max_position_embeddings", "n_positions", "max_seq_len", "seq_length")
"""What config.json may call the positions of a model; the first counts."""


def _max_model_len(path: Path, given: Any, hf: dict[str, Any], advised: int | None = None) -> int:
    """advised: by the model's author, where nothing is given."""
    keys = [key for key in POSITIONS if hf.get(key) is not None]
    derived = max_positions(hf, _config_int(path, hf, keys[0])) if keys else None
    if derived is not None:
        derived = max(derived, _stretched(hf, derived))
    if given == -1 and not isinstance(given, bool):
        given = None
    if given is None and advised is not None:
        return advised if derived is None else min(advised, derived)
    if given is None:
        if derived is None:
            raise ConfigError("the model's config.json does not say how long it may get; set max_model_len")
        return derived
    length = _positive("max_model_len", human_number(given))
    if derived is not None and length > derived:
        raise ConfigError(f"max_model_len={length} is more than the model's {derived} positions; use {derived} or less")
    return length


def _stretched(hf: dict[str, Any], positions: int) -> int:
    """How many positions YaRN makes of those that the model was trained for; 0: the model does not use it."""
    rope = hf.get("rope_parameters") or hf.get("rope_scaling")
    if not isinstance(rope, dict) or rope.get("rope_type", rope.get("type")) != "yarn":
        return 0
    factor, trained = rope.get("factor"), rope.get("original_max_position_embeddings") or positions
    if not isinstance(factor, int | float) or not isinstance(trained, int) or trained > positions:
        return 0  # a model that says it is shorter than what it was trained for is cut short on purpose
    return int(factor * trained)


def _quantization(given: dict[str, Any], pooler: Pooler | None, hf: dict[str, Any], device: str) -> str | None:
    if given["quantization"] is not None and pooler is not None and pooler.is_encoder:
        raise ConfigError(
            f"quantization={given['quantization']!r}: encoders are not computed with quantized weights; leave it at None"
        )
    method: str | None = given["quantization"]
    if method == FP8 and device == "cpu" and hf.get("quantization_config") is None:
        raise not_quantized(method)
    return method


def _device(given: dict[str, Any], pooler: Pooler | None) -> str:
    """With "auto", what CUDA cannot do goes to the CPU. Raises ConfigError where a backend was asked for by its name."""
    is_elsewhere = not given["data_parallel_size_local"] and (
        _is_of_ray(given) or (bool(given["nodes"]) and given["nnodes"] == 1)
    )
    device = choose(given["device"], is_elsewhere=is_elsewhere)
    reason = None if device == "cpu" else rules_of(device).why_not(given, pools=pooler is not None)
    if reason is None and pooler is not None and pooler.is_encoder and not rules_of(device).encodes:
        reason = f"the model is an encoder, for which device={device!r} has no forward yet; use a decoder"
    if reason is None:
        return device
    if given["device"] == device:
        raise ConfigError(f"{reason}, or device='cpu'")
    logger.warning("the model runs on the CPU although there is a GPU: %s", reason)
    return "cpu"


TOO_LARGE_FOR_FLOAT16 = ("gemma2", "gemma3", "gemma3_text", "glm4", "plamo2")
"""Values of model_type whose hidden states pass 65,504 in published checkpoints; vLLM refuses the same."""


def _dtype(given: Any, hf: dict[str, Any], rules: BackendRules) -> Dtype:
    name, family = dtype_name(given), hf.get("model_type")
    if name == "auto":
        stored = dtype_name(hf.get("dtype") or hf.get("torch_dtype") or "float32")
        is_taken = stored == "float32" or (stored in rules.dtypes and family not in TOO_LARGE_FOR_FLOAT16)
        name = stored if is_taken else "bfloat16"
        return next((dtype for dtype in rules.dtypes if dtype == name), rules.dtypes[0])
    if name == "float16" and family in TOO_LARGE_FOR_FLOAT16:
        raise ConfigError(
            f"dtype={given!r}: the states of a {family!r} model are larger than float16 can hold; use 'bfloat16' or 'float32'"
        )
    for dtype in rules.dtypes:
        if dtype == name:
            return dtype
    raise ConfigError(f"dtype={given!r} is not supported; use 'auto', 'float32', 'bfloat16' or 'float16'")


MOST_IN_STEP = 2**31 - 1
"""Rows and tokens: workers count them in int32."""


def _positive(name: str, value: Any, most: int = 2**63 - 1) -> int:
    """most: what the processes of the engine can be told, unless less can be done."""
    if isinstance(value, bool) or not isinstance(value, int) or value <= 0:
        raise ConfigError(f"{name}={shown(value)} must be a positive integer")
    if value > most:
        raise ConfigError(f"{name}={shown(value)} must be at most {most}")
    return value


HUMAN_UNITS = {"k": 10**3, "m": 10**6, "g": 10**9, "K": 1 << 10, "M": 1 << 20, "G": 1 << 30}


def human_number(value: Any) -> Any:
    """A number as people write it on vLLM's command line: "2k" is 2,000, "2K" is 2,048; all else as it is."""
    match = re.fullmatch(r"(\d{1,12}(?:\.\d{1,12})?)([kmgKMG]?)", value) if isinstance(value, str) else None
    if match is None:
        return value
    number = float(match[1]) * HUMAN_UNITS.get(match[2], 1)
    return int(number) if number.is_integer() else value


def _not_negative(name: str, value: Any) -> int:
    if isinstance(value, bool) or not isinstance(value, int) or value < 0:
        raise ConfigError(f"{name}={value!r} must be an integer of at least 0")
    return value


def _seconds(name: str, given: dict[str, Any], least: float) -> float:
    value = given[name]
    if isinstance(value, bool) or not isinstance(value, int | float) or not least <= value:
        raise ConfigError(f"{name}={value!r} must be a number of seconds, at least {least:g}; a very large one: never")
    return min(float(value), MAX_SECONDS)


def _optional_count(name: str, value: Any) -> int | None:
    if value is not None and (isinstance(value, bool) or not isinstance(value, int) or value < 0):
        raise ConfigError(f"{name}={value!r} must be an integer of at least 0, or None for no limit")
    return value


def _max_logprobs(value: Any) -> int:
    if isinstance(value, bool) or not isinstance(value, int) or value < -1:
        raise ConfigError(f"max_logprobs={value!r} must be an integer of at least 0, or -1 for no limit")
    return value


def _optional_positive(name: str, value: Any, most: int = 2**63 - 1) -> int | None:
    return None if value is None else _positive(name, value, most)


def _kv_cache_memory(value: Any, rules: BackendRules) -> int | None:
    size = _optional_positive("kv_cache_memory_bytes", value)
    if rules.has_own_memory:
        return size  # the worker knows it
    memory = os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")
    if size is not None and size > memory:
        raise ConfigError(f"kv_cache_memory_bytes={size} is more than the machine's memory of {memory} bytes")
    return size


def _address(name: str, given: Any) -> str | None:
    if given is not None and not (isinstance(given, str) and given.startswith(("http://", "https://"))):
        raise ConfigError(f"{name}={given!r:.120} must be an address that begins with http:// or https://")
    return None if given is None else str(given)


def _profile_folder(given: Any) -> str | None:
    """Of vLLM's profiler_config: {"profiler": "torch", "torch_profiler_dir": folder}."""
    if given is None:
        return None
    if not isinstance(given, dict):
        raise ConfigError(f"profiler_config={given!r} must be a mapping, or None")
    for key, value in given.items():
        if key not in ("profiler", "torch_profiler_dir"):
            known = ("profiler", "torch_profiler_dir")
            raise ConfigError(f"profiler_config: {key!r} is not supported{nearest_name(str(key), known)}")
        if key == "profiler" and value not in (None, "torch"):
            raise ConfigError(
                f"profiler_config: profiler={value!r} is not supported; use 'torch', or None for no profiles"
            )
    if given.get("profiler") is None:
        return None
    folder = given.get("torch_profiler_dir")
    if not isinstance(folder, str | os.PathLike) or not os.fspath(folder):
        raise ConfigError(f"profiler_config: torch_profiler_dir={folder!r} must be the folder for the traces")
    return str(Path(folder).expanduser().absolute())


def _fraction(name: str, value: Any) -> float | None:
    if value is None:
        return None
    if isinstance(value, bool) or not isinstance(value, int | float) or not 0 < value <= 1:
        raise ConfigError(f"{name}={value!r} must be more than 0 and at most 1")
    return float(value)


def _step_model(value: Any) -> str | None:
    """The model as JSON: the scheduler's process need not find the file."""
    if value is None:
        return None
    from actorllm.scheduling.cost_model import load_model, to_json

    try:
        return to_json(load_model(os.fspath(value)))
    except (ConfigError, OSError, UnicodeDecodeError) as error:
        raise ConfigError(f"step_model={os.fspath(value)!r}: {error}") from error


def _watermark(value: Any) -> float:
    if isinstance(value, bool) or not isinstance(value, int | float) or not 0 <= value < 1:
        raise ConfigError(f"watermark={value!r} must be at least 0 and less than 1")
    return float(value)


def _choice(name: str, value: Any, choices: tuple[str, ...]) -> Any:
    if value not in choices:
        raise ConfigError(f"{name}={value!r} must be one of {', '.join(map(repr, choices))}")
    return value
