"""The arguments of an engine, each with its type, its default and what it means: the one list of them.

`EngineOptions` types the keyword arguments of the front doors, so that editors complete them and type checkers check calls.
Its annotations are evaluated: what stands behind a type is the default (`DEFAULTS`). The texts below the fields are read from
the source when they are asked for (`meanings`): `help`, the command line and docs/compatibility.md show them. Their values
are checked in `actorllm.config`, and nothing here is imported for them.
"""

import os
from collections.abc import Mapping, Sequence
from functools import lru_cache
from typing import TYPE_CHECKING, Annotated, Any, Literal, TypeVar, get_args, get_origin

from actorllm.types.vllm_options import VLLM_ARGUMENTS, VLLMOptions

if TYPE_CHECKING:
    import inspect

Topology = Literal["process", "inline"]


class EngineOptions(VLLMOptions, total=False):
    """Keyword arguments of `AsyncLLM`, `LLM`, `LLMEngine` and `EngineArgs`. Those before `topology` are vLLM's names."""

    tokenizer: Annotated[str | os.PathLike[str] | None, None]
    """The folder of the tokenizer; None: the model's."""
    revision: Annotated[str | None, None]
    """Of a model of the Hugging Face Hub: the branch, the tag or the commit; None: its newest."""
    download_dir: Annotated[str | os.PathLike[str] | None, None]
    """Where a model of the Hub is looked for and kept; None: the folder of huggingface_hub."""
    hf_token: Annotated[str | bool | None, None]
    """With which a model of the Hub is fetched; True or None: the one of this user, if there is one; False: none."""
    skip_tokenizer_init: Annotated[bool, False]
    """Load no tokenizer: prompts are token ids, and outputs have no text."""
    dtype: Annotated[Any, "auto"]
    """'float32', 'bfloat16' or 'float16' ('half'), or torch's; 'auto': as the weights are stored; CUDA has no float32."""
    seed: Annotated[int | None, None]
    """Requests that bring no seed get one made of this and of their number; None: a random one."""
    max_model_len: Annotated[int | str | None, None]
    """Most tokens of a sequence, prompt and output together, also as '2k' or '2K'; None or -1: as many as the model has
    positions."""
    max_num_seqs: Annotated[int | None, None]
    """Most sequences that run at a time; None: 256, or max_num_batched_tokens where that is less."""
    max_num_batched_tokens: Annotated[int | None, None]
    """Most tokens of one step, of prompts and outputs together; None: 2,048, or max_num_seqs where that is more. Of an encoder
    at least max_model_len."""
    block_size: Annotated[int | None, None]
    """Tokens of one block of the KV cache; None: 32, or 64 on CUDA and with kv_cache_dtype='int8'."""
    kv_cache_dtype: Annotated[Literal["auto", "int8", "fp8", "fp8_e4m3"], "auto"]
    """'int8': round full blocks of the KV cache to 8 bits, on a CPU: more tokens in the same memory; 'fp8' or 'fp8_e4m3': all of it
    to floats of 8 bits, on CUDA; 'auto': as the model."""
    enable_prefix_caching: Annotated[bool | None, None]
    """Use the KV of earlier requests with the same beginning; None: yes."""
    kv_cache_memory_bytes: Annotated[int | None, None]
    """Bytes of the KV cache; None: what gpu_memory_utilization leaves."""
    num_gpu_blocks_override: Annotated[int | None, None]
    """Blocks of the KV cache, on every device and before both of the other arguments; None: as many as there is memory for."""
    gpu_memory_utilization: Annotated[float | None, None]
    """Share of the available memory, on a CPU of the machine's, for weights, activations and cache: more than 0, at most 1.
    None: a moderate share."""
    kv_offloading_size: Annotated[float | None, None]
    """GiB of host memory for KV blocks that leave the cache; the replicas of this machine share it. None: none."""
    kv_offloading_backend: Annotated[Literal["native"], "native"]
    """What keeps blocks in that memory: the engine itself."""
    kv_transfer_config: Annotated[Mapping[str, Any] | str | None, None]
    """vLLM's offloading connector, as another way to say kv_offloading_size; also as JSON."""
    swap_space: Annotated[float | None, None]
    """vLLM's older name for kv_offloading_size."""
    enforce_eager: Annotated[bool, False]
    """On CUDA: record no graphs. The CPU has none."""
    load_format: Annotated[Literal["auto", "safetensors", "dummy"], "auto"]
    """'dummy': random weights, made from seed."""
    quantization: Annotated[
        Literal[
            "int8",
            "int4",
            "int4-g64",
            "int4-g128",
            "compressed-tensors",
            "gptq",
            "awq",
            "fp8",
            "gguf",
            "torchao",
            "modelopt",
            "auto-round",
            "bitsandbytes",
            "modelopt_fp4",
            "gptq_marlin",
            "awq_marlin",
        ]
        | None,
        None,
    ]
    """'int8', 'int4': round the weights to so many bits; 'int4-g64', 'int4-g128': in larger groups; 'fp8': to floats, on CUDA; or,
    as 'compressed-tensors', 'gptq', 'awq', 'gguf', 'torchao', 'modelopt', ...: the files are quantized; None: as they say."""
    model_impl: Annotated[Literal["auto", "vllm", "transformers"], "auto"]
    """'vllm': the fused forwards; 'transformers': its modules over this cache; 'auto': the first that can."""
    runner: Annotated[Literal["auto", "generate", "pooling"], "auto"]
    """'generate': text; 'pooling': vectors of prompts; 'auto': as the model's folder says."""
    task: Annotated[str | None, None]
    """vLLM's older word for runner and convert: 'auto', 'generate', 'embed', 'score', 'classify' or 'reward'."""
    convert: Annotated[Literal["auto", "none", "embed"], "auto"]
    """'embed': pool a model that was made for text, as runner='pooling' does; 'none': never."""
    pooler_config: Annotated[Any, None]
    """How vectors are pooled: a PoolerConfig, a mapping of its fields, or that as JSON; None: as the model's folder says."""
    io_processor_plugin: Annotated[str | None, None]
    """A plug-in for vLLM that makes prompts of data and answers of vectors: its name (entry points 'vllm.io_processor_plugins'), or
    an IOProcessor of yours as 'module:Class'. None: what config.json names."""
    hf_overrides: Annotated[Mapping[str, Any] | str | None, None]
    """Fields that count in place of those of the model's config.json, such as rope_parameters; also as JSON."""
    max_logprobs: Annotated[int, 20]
    """Most log-probabilities per token that a request may ask for; -1: as many as there are."""
    logprobs_mode: Annotated[
        Literal["raw_logprobs", "raw_logits", "processed_logprobs", "processed_logits"], "raw_logprobs"
    ]
    """What log-probabilities are of: the logits as the model gave them, or 'processed': what tokens are drawn from, after biases,
    penalties, masks, temperature and filters; '..._logits': the logits themselves. Of prompts they are never processed."""
    enable_lora: Annotated[bool | None, None]
    """Take requests with a LoRA adapter (`LoRARequest`). None: no."""
    max_loras: Annotated[int, 1]
    """Most adapters that requests run with at a time; requests with others wait. Needs enable_lora."""
    max_lora_rank: Annotated[int, 16]
    """Highest rank of an adapter; every adapter in a step costs as much as one of this rank."""
    max_cpu_loras: Annotated[int | None, None]
    """Most adapters that a worker keeps in memory, so that their files are not read again; None: as many as max_loras."""
    enable_prompt_embeds: Annotated[bool, False]
    """Take prompts that are embeddings."""
    limit_mm_per_prompt: Annotated[Mapping[str, int] | str | None, None]
    """Most images or recordings of a prompt, as {'image': 4}: at most 64, and 8 if nothing is given; also as JSON."""
    mm_processor_kwargs: Annotated[Mapping[str, Any] | str | None, None]
    """Keyword arguments of the model's processor of images or audio; also as JSON."""
    allowed_local_media_path: Annotated[str, ""]
    """Prompts may name files below this folder, by file: addresses, links followed. "": none."""
    allowed_media_domains: Annotated[Sequence[str] | None, None]
    """Prompts may name http: and https: addresses of these hosts, outside of private networks. None: none."""
    logits_processors: Annotated[Sequence[str | type] | None, None]
    """Classes of yours that change logits before a token is chosen, or their paths 'module:Class'. Workers build them."""
    speculative_config: Annotated[Mapping[str, Any] | str | None, None]
    """Draft tokens and check several of them in a step: 'method' ('ngram', 'suffix', 'draft_model', 'eagle', 'eagle3', 'mtp',
    'module:Class'), 'num_speculative_tokens' and more of vLLM's options; also as JSON. Drafts change no token."""
    async_scheduling: Annotated[bool | None, None]
    """Plan a step while the one before it runs; None: yes."""
    scheduling_policy: Annotated[str, "fcfs"]
    """Which requests run next: a built-in policy, a registered one, or a class of yours as 'module:Class' (on the command
    line also of a module of this folder)."""
    scheduler_cls: Annotated[str | type | None, None]
    """vLLM's name for scheduling_policy, as a class or its path; vLLM's own schedulers stand for the default."""
    long_prefill_token_threshold: Annotated[int, 0]
    """Most tokens of one prompt per step; 0: as many as the step has room for."""
    max_num_partial_prefills: Annotated[int, 1]
    """Most prompts at a time that are too long for what is left of a step."""
    watermark: Annotated[float, 0.01]
    """Share of the KV blocks that admissions leave free for the growth of running requests: at least 0, less than 1."""
    enable_expert_parallel: Annotated[bool, False]
    """With several ranks, each holds some experts of a mixture as a whole, in the place of its part of each."""
    tensor_parallel_size: Annotated[int, 1]
    """Ranks that share a model; each is a process."""
    pipeline_parallel_size: Annotated[int, 1]
    """Stages of consecutive layers, each a process of tensor_parallel_size ranks, which compute several steps at a time."""
    trust_remote_code: Annotated[bool, False]
    """Accepted with a warning and never acted on: no code of a model is run."""
    generation_config: Annotated[str, "auto"]
    """Where default sampling parameters come from: 'auto', the model's folder; 'vllm', none; or another folder."""
    reasoning_parser: Annotated[str, ""]
    """How the model marks what it thinks: a name of vLLM's, or a class as 'module:Class'. Structured output begins behind the
    thought, and requests may bound it (thinking_token_budget). Empty: output is not looked through for thoughts."""
    reasoning_parser_plugin: Annotated[str | None, None]
    """A Python file with parsers of thoughts, one of which reasoning_parser names: written for vLLM, or for this package."""
    reasoning_config: Annotated[Mapping[str, Any] | None, None]
    """Marks of a thought in place of the parser's: 'reasoning_start_str', and 'reasoning_end_str', which is what a thought is
    ended with at its budget; without a parser both are needed."""
    structured_outputs_config: Annotated[Mapping[str, Any] | None, None]
    """Of all structured outputs: 'disable_any_whitespace', 'disable_additional_properties', 'enable_in_reasoning' (True or
    False each), 'reasoning_parser' and 'reasoning_parser_plugin'. 'backend' and 'disable_fallback' are taken, and there is one
    backend."""
    override_generation_config: Annotated[Mapping[str, Any] | None, None]
    """Default sampling parameters that count before those."""
    stream_interval: Annotated[int, 1]
    """New tokens per output; a request may ask for more."""
    otlp_traces_endpoint: Annotated[str | None, None]
    """Send an OpenTelemetry span of every request there, over HTTP (`actorllm[otel]`). None: those with trace_headers are spans of
    the application's tracer provider, if there is one."""
    disable_log_stats: Annotated[bool | None, True]
    """False: throughput and load go to the log every ten seconds, at level INFO, while there are requests."""
    profiler_config: Annotated[Mapping[str, Any] | None, None]
    """{'profiler': 'torch', 'torch_profiler_dir': FOLDER}: `start_profile` writes traces there; None: no profiles."""
    enable_sleep_mode: Annotated[bool, False]
    """Allow calls of `sleep`, which give back the memory of weights and KV cache."""
    worker_cls: Annotated[str | type, "auto"]
    """A subclass of yours of RankWorker (actorllm.model.rank_worker), or its path 'module:Class': what `collective_rpc` calls the
    methods of; 'auto': RankWorker itself."""
    worker_extension_cls: Annotated[str | type, ""]
    """A class of yours, or its path 'module:Class', whose methods are added to that class. Empty: none."""
    data_parallel_size: Annotated[int, 1]
    """Replicas of the model, behind one intake: at most 64. Those of one machine divide its cores, and memory that is a share."""
    data_parallel_backend: Annotated[Literal["mp", "ray"], "mp"]
    """'mp': replicas are here, and on nodes; 'ray': Ray places those that are not here."""
    distributed_executor_backend: Annotated[Literal["mp", "uni", "ray", "external_launcher"] | None, None]
    """'ray': Ray places the replicas, also a single one, each on as many machines as nnodes says. 'external_launcher': the ranks
    are programs that torchrun has started, and each makes the same calls of `LLM`. Else the ranks are here."""
    data_parallel_size_local: Annotated[int | None, None]
    """How many of them are on this machine, where there are nodes; None: none. Without nodes all are."""
    data_parallel_address: Annotated[str | None, None]
    """The address of this machine in vLLM, which other ones call. Here this machine calls the nodes, and does not use it."""
    nnodes: Annotated[int, 1]
    """Machines, with this one; it has to agree with nodes. More than 1: they share the ranks of a model, as in vLLM. With Ray: so
    many have the ranks of each replica; 1: as few as have room."""
    node_rank: Annotated[int, 0]
    """0: this is the first machine, which builds the engine; others run `actorllm node`."""
    topology: Annotated[Topology, "process"]
    """'process': scheduler and workers are processes; 'inline': all of it runs in the calling one, without recovery."""
    quantization_twin: Annotated[bool | None, None]
    """Keep weights of 4 bits in 8 bits as well for prompts; None: where that is faster and fits. False also keeps prompts in
    bfloat16. On CUDA, True rounds activations of prompts to 8 bits where weights have 8; None and False do not."""
    compute_scheme: Annotated[str | None, None]
    """What products are computed as, on a CPU: 'int8', 'int4', 'bfloat16', 'float32', or two such as 'int4+int8', of decode rows
    and of rows of prompts. None: what is fastest, measured at the first start. Fix it where two engines must have the same bits."""
    batch_invariant: Annotated[bool, False]
    """Let no bit of a stream depend on its batch, its chunks, drafts or steps in flight, on a CPU; refused where a machine cannot
    hold that. The environment variable VLLM_BATCH_INVARIANT sets it, too."""
    kv_disk_path: Annotated[str | os.PathLike[str] | None, None]
    """A folder of this user for KV blocks that left the cache; engines of one model share it, and find it after a restart."""
    kv_disk_size: Annotated[float | None, None]
    """GiB that the files there may take."""
    module: Annotated[Any, None]
    """A model of transformers that the application owns, in the place of `model`: its parameters are used where they are.
    Needs topology='inline'."""
    ready_replicas: Annotated[int, 1]
    """The engine is ready when so many of data_parallel_size are; the others start behind."""
    pipeline_layer_partition: Annotated[Sequence[int] | str | None, None]
    """Layers of each stage, such as [3, 5], or '3,5'. None: so that they take equally long, the head in the last one included."""
    max_replicas: Annotated[int | None, None]
    """Up to so many replicas, as the demand asks for; data_parallel_size is the number at the start. None: that number stays."""
    min_replicas: Annotated[int | None, None]
    """Never fewer than these; None: one. Needs max_replicas."""
    target_attainment: Annotated[float, 0.99]
    """Share of the requests whose objectives max_replicas is to let be kept, above 0 and below 1."""
    autoscaling: Annotated[Mapping[str, float] | None, None]
    """When the number changes: fields of `actorllm.scheduling.autoscaler.ScalingPolicy`, such as {'window_s': 120}."""
    roles: Annotated[str | None, None]
    """How many replicas compute prompts and how many decode, such as '1P2D': these are the replicas then. None: each does both."""
    router: Annotated[str, "seconds"]
    """Which replica a request goes to: 'seconds', 'round-robin', 'least-load', 'power-of-two', 'prefix-aware', or the path of a
    class, 'module:Class'."""
    nodes: Annotated[Sequence[str] | None, None]
    """Other machines that have replicas, as 'host:port' of the agents there (`actorllm node`). With data_parallel_size=1 each has
    one."""
    node_key_file: Annotated[str | os.PathLike[str] | None, None]
    """The file of the key that this machine and the nodes have in common, of mode 0600."""
    node_timeout_s: Annotated[float, 3.0]
    """Seconds after which a node from which nothing comes is lost; at least 1."""
    ray_address: Annotated[str | None, None]
    """Of the Ray cluster; None: the one that this process is in, or finds."""
    placement: Annotated[Literal["spread", "pack"], "spread"]
    """Whether Ray puts replicas on many nodes or on few."""
    placement_timeout_s: Annotated[float, 600.0]
    """Seconds that Ray may take to place them, while others use what they need."""
    resources_per_replica: Annotated[Mapping[str, float] | None, None]
    """What Ray is asked for each replica beside cores and GPUs, as {'name': amount}."""
    node_ca_file: Annotated[str | os.PathLike[str] | None, None]
    """A file of certificates by which those of the nodes are held: agents are called by TLS. None: without TLS."""
    name: Annotated[str | None, None]
    """Under which other programs of this user join the engine (`AsyncLLM.attach`); None: none can."""
    device: Annotated[str, "auto"]
    """'cuda', 'cpu', or the backend of an installed package; 'auto': cuda where there is one that can do what is asked for."""
    num_threads: Annotated[int | None, None]
    """Threads of the worker's matrix products; None: chosen from the cores of the machine."""
    cpu_share: Annotated[float | None, None]
    """Share of the machine's cores that num_threads is chosen from: more than 0, at most 1. None: all of them. Of several
    engines of one machine each gets its part by this; the part does not depend on the others."""
    step_timeout_s: Annotated[float | None, None]
    """Seconds after which a worker's step counts as stuck and the worker is killed; None: learnt, at least half a minute."""
    heartbeat_timeout_s: Annotated[float, 10.0]
    """Seconds after which a process that is stopped, or silent outside of a step, is killed; at least 1."""
    start_timeout_s: Annotated[float | None, 1800.0]
    """Seconds that the engine has to become ready; then its start fails and says where it stood. None: any time."""
    restart_timeout_s: Annotated[float | None, None]
    """Seconds that a process which was started again has to become ready; None: ten times the first start, at least 300."""
    intake_timeout_s: Annotated[float, 30.0]
    """Seconds that reading one prompt may take: its chat template and its tokenization. The request fails then."""
    max_prompt_characters: Annotated[int, 4 << 20]
    """Most characters of a prompt's text; more are refused before they are tokenized."""
    record: Annotated[str | os.PathLike[str] | None, None]
    """A file to which the scheduler's inputs are recorded, for exact replay."""
    on_failure: Annotated[Literal["restart", "raise"], "restart"]
    """When a process of the engine dies: 'restart' it and go on, or 'raise' EngineDeadError from every request."""
    standby_worker: Annotated[bool | None, None]
    """Keep a process parked that takes the place of a worker that dies; None: where memory is plentiful."""
    admission_policy: Annotated[str | None, None]
    """Which requests may start when: past-future, worst-case, credit, slos-serve, ttft-reject, or 'module:Class'. None: every
    request for which there is a slot and room."""
    max_waiting_requests: Annotated[int | None, None]
    """Most sequences that may wait for their first slot; more are refused with EngineOverloaded, by a server with
    429. None: any number. vLLM's max_num_queued_reqs counts the running ones, too."""
    max_waiting_tokens: Annotated[int | None, None]
    """Most tokens of prompts that may wait, in the same way; None: any number."""
    max_waiting_attached: Annotated[int | None, 4096]
    """As max_waiting_requests, for each attached program by itself."""
    step_model: Annotated[str | os.PathLike[str] | None, None]
    """What steps take, for policies that ask: a file of `actorllm calibrate`, or a preset; None: they learn it."""


_OURS = {name: hint for name, hint in EngineOptions.__annotations__.items() if name not in VLLM_ARGUMENTS}

TYPES: dict[str, Any] = {name: get_args(hint)[0] for name, hint in _OURS.items()}
"""The type of each argument."""

DEFAULTS: dict[str, Any] = {name: get_args(hint)[1] for name, hint in _OURS.items()}
"""The default of each argument. They are kept in the order in which they are documented."""


def meanings() -> dict[str, str]:
    """What each argument means, as one line; nothing where there is no source to read it from."""
    return texts_below_fields(EngineOptions)


def is_switch(name: str) -> bool:
    """Whether the argument is on or off on a command line: `--name` and `--no-name`."""
    return isinstance(DEFAULTS.get(name), bool) or any(isinstance(one, bool) for one in VLLM_ARGUMENTS.get(name, ()))


@lru_cache(maxsize=16)
def texts_below_fields(cls: type) -> dict[str, str]:
    """The texts below the fields of a class, each as one line; nothing where there is no source to read them from."""
    import ast
    import inspect

    try:
        (defined,) = ast.parse(inspect.getsource(cls)).body
    except (OSError, TypeError):
        return {}
    assert isinstance(defined, ast.ClassDef)
    found = {}
    for field, text in zip(defined.body, defined.body[1:], strict=False):
        if isinstance(field, ast.AnnAssign) and isinstance(field.target, ast.Name) and isinstance(text, ast.Expr):
            found[field.target.id] = " ".join(str(ast.literal_eval(text.value)).split())
    return found


def type_text(name: str) -> str:
    """The type of an argument as a person writes it."""
    return _text_of(TYPES[name])


def _text_of(hint: Any) -> str:
    if hint is None or hint is type(None):
        return "None"
    if get_origin(hint) is Literal:
        return " | ".join(map(repr, get_args(hint)))
    if get_origin(hint) in (None, Mapping):
        return "Mapping" if get_origin(hint) is Mapping else getattr(hint, "__name__", str(hint))
    if get_origin(hint) is os.PathLike:
        return "PathLike"
    return " | ".join(map(_text_of, get_args(hint)))


def table() -> str:
    """Every argument with type, default and meaning, as a docstring has them."""
    told = meanings()
    lines = [f"    {name}: {type_text(name)} = {DEFAULTS[name]!r}\n        {told.get(name, '')}" for name in TYPES]
    return "\n".join(line.rstrip() for line in lines)


T = TypeVar("T", bound=type)


def with_options(cls: T) -> T:
    """A class whose constructor takes EngineOptions: `help` and `inspect.signature` list them, once they are asked."""
    cls.__doc__ = _Documentation(cls.__doc__ or "")  # type: ignore[assignment]
    cls.__signature__ = _Listed(_constructor_of(cls))  # type: ignore[attr-defined]
    return cls


def _constructor_of(cls: type) -> Any:
    return next(vars(base)["__init__"] for base in cls.__mro__ if "__init__" in vars(base))


class _Documentation:
    """A docstring that is completed when it is read."""

    def __init__(self, text: str) -> None:
        self._text = text

    def __get__(self, instance: object, owner: type) -> str:
        import inspect

        return f"{inspect.cleandoc(self._text)}\n\nKeyword arguments (`actorllm.types.options.EngineOptions`):\n\n{table()}\n"


class _Listed:
    """The signature of a constructor with the options in the place of `**options`, made when it is read."""

    def __init__(self, constructor: Any) -> None:
        self._constructor = constructor

    def __get__(self, instance: object, owner: type) -> "inspect.Signature":
        import inspect

        if _constructor_of(owner) is not self._constructor:
            raise AttributeError("__signature__")  # of a subclass with a constructor of its own
        found = inspect.signature(self._constructor)
        named = [p for p in list(found.parameters.values())[1:] if p.kind is not inspect.Parameter.VAR_KEYWORD]
        options = [
            inspect.Parameter(name, inspect.Parameter.KEYWORD_ONLY, default=DEFAULTS[name], annotation=hint)
            for name, hint in TYPES.items()
        ]
        return inspect.Signature([*named, *options])
