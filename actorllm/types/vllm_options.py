"""Arguments of vLLM that have no counterpart here: the values that are taken, with or without a warning; others are refused.

A value that asks for what is done anyway is taken silently (`VLLM_ARGUMENTS`). A value that changes no token is taken with a
warning (`HARMLESS`). All of 0.32's, and some of older releases. A type is the values that are taken silently, the default
first; where Python has no literal for them, they stand behind the type. Those whose default is an object of vLLM's own are
accepted at None and {}. Standard library only.
"""

from collections.abc import Mapping
from typing import Annotated, Any, Literal, TypedDict, get_args, get_origin


class VLLMOptions(TypedDict, total=False):
    """See the module docstring."""

    tokenizer_mode: Literal["auto", "hf", "slow"]
    tokenizer_revision: Literal[None]
    served_model_name: Annotated[Any, None]
    config_format: Literal["auto", "hf"]
    cpu_offload_gb: Annotated[Any, 0]
    disable_log_requests: Literal[True, False]
    enable_log_requests: Annotated[Any, False]
    enable_chunked_prefill: Annotated[Any, None, True]
    max_long_partial_prefills: Annotated[Any, 1]
    disable_custom_all_reduce: Literal[False, True]
    compilation_config: Annotated[Any, None, {}, 0]
    disable_sliding_window: Annotated[Any, False]
    disable_cascade_attn: Literal[None, False, True]
    max_seq_len_to_capture: Annotated[Any, None, 8192]
    calculate_kv_scales: Literal[False, None]
    preemption_mode: Annotated[Any, None, "recompute"]
    use_v2_block_manager: Annotated[Any, True]
    worker_use_ray: Annotated[Any, False]
    additional_config: Annotated[Mapping[str, Any] | None, None, {}]
    attention_backend: Annotated[Any, None]
    hf_config_path: Literal[None]
    code_revision: Annotated[Any, None]
    rope_scaling: Annotated[Mapping[str, Any] | None, None, {}]
    rope_theta: Literal[None]
    override_attention_dtype: Literal[None]
    skip_mm_profiling: Literal[False, True]
    use_tqdm_on_load: Literal[True, False]
    pt_load_map_location: Annotated[Any, "cpu"]
    model_loader_extra_config: Annotated[Any, {}, None]
    ignore_patterns: Annotated[Any, None, "original/**/*", ["original/**/*"]]
    max_parallel_loading_workers: Annotated[Any, None]
    prefix_caching_hash_algo: Annotated[Any, "sha256"]
    kv_sharing_fast_prefill: Literal[False]
    mamba_cache_dtype: Literal["auto"]
    mamba_ssm_cache_dtype: Literal["auto"]
    mamba_block_size: Annotated[Any, None]
    disable_hybrid_kv_cache_manager: Literal[None, False, True]
    disable_chunked_mm_input: Annotated[Any, False]
    num_scheduler_steps: Annotated[Any, 1]
    scheduler_delay_factor: Annotated[Any, 0.0]
    num_lookahead_slots: Annotated[Any, 0]
    prefill_context_parallel_size: Literal[1]
    decode_context_parallel_size: Literal[1]
    data_parallel_rank: Literal[None, 0]
    data_parallel_start_rank: Literal[None]
    data_parallel_rpc_port: Literal[None]
    data_parallel_hybrid_lb: Literal[False]
    data_parallel_external_lb: Literal[False]
    enable_eplb: Literal[False]
    eplb_config: Annotated[Mapping[str, Any] | None, None, {}]
    enable_dbo: Literal[False]
    all2all_backend: Literal[None, "allgather_reducescatter"]
    ray_workers_use_nsight: Annotated[Any, False]
    cuda_graph_sizes: Annotated[Any, None, []]
    lora_dtype: Annotated[Any, "auto"]
    fully_sharded_loras: Annotated[Any, False]
    default_mm_loras: Literal[None]
    guided_decoding_backend: Annotated[Any, "auto", "guidance"]
    interleave_mm_strings: Annotated[Any, False]
    media_io_kwargs: Annotated[Any, {}, None]
    mm_processor_cache_gb: Annotated[Any, 4]
    mm_encoder_only: Literal[False]
    mm_encoder_tp_mode: Annotated[Any, "weights"]
    video_pruning_rate: Annotated[Any, None]
    collect_detailed_traces: Annotated[Any, None]
    show_hidden_metrics_for_version: Annotated[Any, None]
    kv_cache_metrics: Annotated[Any, False]
    kv_events_config: Literal[None]
    ec_transfer_config: Literal[None]
    aggregate_engine_logging: Annotated[Any, False]
    enable_fault_tolerance: Literal[False]
    max_num_queued_reqs: Literal[None]
    max_num_queued_tokens: Literal[None]
    enable_return_routed_experts: Literal[False]
    return_sampling_mask: Literal[False]
    model_weights: Literal[""]
    safetensors_load_strategy: Annotated[Any, None]
    safetensors_prefetch_num_threads: Annotated[Any, 8]
    safetensors_prefetch_block_size: Annotated[Any, 16777216]
    cudagraph_capture_sizes: Annotated[Any, None]
    max_cudagraph_capture_size: Annotated[Any, None]
    ir_op_priority: Annotated[Any, None, {}]
    master_addr: Annotated[Any, "127.0.0.1"]
    master_port: Annotated[Any, 29501]
    distributed_timeout_seconds: Annotated[Any, None]
    cpu_distributed_timeout_seconds: Annotated[Any, None]
    numa_bind: Annotated[Any, False]
    numa_bind_nodes: Annotated[Any, None]
    numa_bind_cpus: Annotated[Any, None]
    device_ids: Literal[None]
    dcp_comm_backend: Literal[None]
    dcp_q_replicate: Literal[None]
    dcp_kv_cache_interleave_size: Literal[1]
    cp_kv_cache_interleave_size: Literal[None]
    data_parallel_multi_port_external_lb: Literal[False]
    enable_hc_sp: Literal[False]
    enable_batch_sharded_sampling: Literal[None, False]
    enable_ep_weight_filter: Literal[False]
    moe_backend: Annotated[Any, "auto"]
    linear_backend: Annotated[Any, "auto"]
    sparse_indexer_topk_backend: Literal["auto"]
    enable_elastic_ep: Literal[False]
    elastic_ep_max_dp_size: Literal[None]
    ubatch_size: Literal[0]
    dbo_decode_token_threshold: Literal[32]
    dp_sync_interval: Literal[16]
    dbo_prefill_token_threshold: Literal[512]
    disable_nccl_for_dp_synchronization: Literal[None, True, False]
    expert_placement_strategy: Literal["linear"]
    prefix_cache_retention_interval: Literal[0, None]
    offload_backend: Annotated[Any, "auto"]
    cpu_offload_params: Annotated[Any, (), [], set()]
    offload_group_size: Annotated[Any, 0]
    offload_num_in_group: Annotated[Any, 1]
    offload_prefetch_step: Annotated[Any, 1]
    offload_params: Annotated[Any, (), [], set()]
    max_num_scheduled_tokens: Annotated[Any, None]
    long_prefill_token_threshold_adaptive: Annotated[Any, False]
    max_num_active_seqs: Literal[None]
    use_fp64_gumbel: Literal[False]
    enable_trace_replay: Literal[False]
    model_class_overrides: Annotated[Mapping[str, Any] | None, {}, None]
    quantization_config: Literal[None]
    allow_deprecated_quantization: Literal[False]
    enable_shm_tensor_arena: Literal[False]
    language_model_only: Annotated[Any, False]
    enable_mm_embeds: Literal[False]
    mm_processor_cache_type: Annotated[Any, "lru"]
    mm_hasher_algorithm: Annotated[Any, "blake3"]
    mm_shm_cache_max_object_size_mb: Annotated[Any, 128]
    mm_encoder_attn_backend: Annotated[Any, None]
    mm_encoder_attn_dtype: Literal[None]
    mm_encoder_fp8_scale_path: Literal[None]
    mm_encoder_fp8_scale_save_path: Literal[None]
    mm_encoder_fp8_scale_save_margin: Annotated[float, 1.5]
    renderer_num_workers: Annotated[Any, 1]
    video_pruning_method: Annotated[Any, "evs"]
    mm_tensor_ipc: Annotated[Any, "direct_rpc"]
    mm_processor_device: Annotated[Any, "auto"]
    mm_ipc_gpu_memory_gb: Annotated[Any, 0]
    mm_device_do_normalize: Literal[True, None]
    lora_target_modules: Literal[None]
    enable_tower_connector_lora: Literal[False]
    specialize_active_lora: Literal[False]
    enable_mixed_moe_lora_format: Literal[False]
    enable_moe_shared_loras: Literal[False]
    max_lora_cls_labels: Annotated[Any, None]
    scheduler_reserve_full_isl: Annotated[Any, True]
    prefill_schedule_interval: Annotated[Any, 1]
    aux_output_config: Annotated[Mapping[str, Any] | None, None, {}]
    spec_method: Literal[None]
    spec_model: Literal[None]
    spec_tokens: Literal[None]
    watermark_config: Literal[None]
    diffusion_config: Literal[None]
    per_request_spec_decode_metrics: Literal["none"]
    kv_cache_metrics_sample: Annotated[Any, 0.01]
    custom_histogram_buckets: Annotated[Any, None]
    cudagraph_metrics: Annotated[Any, False]
    enable_layerwise_nvtx_tracing: Annotated[Any, False]
    enable_mfu_metrics: Annotated[Any, False]
    enable_logging_iteration_details: Annotated[Any, False]
    jit_monitor_mode: Annotated[Any, "warn"]
    jit_monitor_verbose: Annotated[Any, False]
    enable_mm_processor_stats: Annotated[Any, False]
    attention_config: Annotated[Any, None, {}]
    engram_config: Literal[None]
    mamba_config: Annotated[Mapping[str, Any] | None, None, {}]
    kernel_config: Annotated[Any, None, {}]
    enable_flashinfer_autotune: Literal[None, True, False]
    logging_config: Annotated[Any, None]
    log_level: Annotated[Any, None]
    log_config_file: Annotated[Any, None]
    ec_manager_config: Annotated[Mapping[str, Any] | None, None, {}]
    sleep_mode_offload_cudagraph: Literal[False]
    sleep_preserve_parameter_names: Annotated[list[str] | None, [], None]
    enable_cumem_allocator: Literal[False]
    enable_nccl_comm_suspend: Literal[False]
    kv_cache_dtype_skip_layers: Annotated[list[str] | None, [], None]
    prefix_match_unit: Literal[None]
    mamba_cache_mode: Annotated[Any, "none"]
    enable_mamba_shared_prefix_checkpoint: Annotated[Any, False]
    replayssm_buffer_len: Literal[16]
    use_replayssm: Literal[False]
    mamba_backend: Annotated[Any, "triton", "TRITON"]
    mamba_ssu_algorithm: Annotated[Any, None]
    enable_mamba_cache_stochastic_rounding: Literal[False]
    mamba_cache_philox_rounds: Literal[0]
    swa_bounded_replay: Literal[True]
    optimization_level: Annotated[Any, 2]
    performance_mode: Annotated[Any, "balanced"]
    fault_tolerance_config: Annotated[Mapping[str, Any] | None, None, {}]
    tokens_only: Literal[False]
    shutdown_timeout: Literal[0]
    # What init_info holds says which backend it is.
    weight_transfer_config: Annotated[
        Mapping[str, Any] | None,
        *(
            None,
            {},
            {"backend": "shm"},
            {"backend": "nccl"},
            {"backend": "gloo"},
            {"backend": "ipc"},
            {"backend": "cuda_ipc"},
        ),
    ]
    fail_on_environ_validation: Literal[False]
    gdn_prefill_backend: Annotated[Any, None]
    kda_prefill_backend: Annotated[Any, None]
    kda_decode_backend: Annotated[Any, None]


def _accepted(hint: Any) -> tuple[Any, ...]:
    values = get_args(hint)
    return values if get_origin(hint) is Literal else values[1:]


VLLM_ARGUMENTS = {name: _accepted(hint) for name, hint in VLLMOptions.__annotations__.items()}
"""The values at which each is accepted, the default first."""


_HARMLESS: dict[str, tuple[str, ...]] = {
    "the kernels are those of the backend": (
        "compilation_config",
        "attention_backend",
        "attention_config",
        "max_seq_len_to_capture",
        "cuda_graph_sizes",
        "cudagraph_capture_sizes",
        "max_cudagraph_capture_size",
        "optimization_level",
        "performance_mode",
        "kernel_config",
        "ir_op_priority",
        "linear_backend",
        "moe_backend",
        "mamba_backend",
        "mamba_ssu_algorithm",
        "gdn_prefill_backend",
        "kda_prefill_backend",
        "kda_decode_backend",
    ),
    "prompts are computed in chunks whenever a step is full": ("enable_chunked_prefill",),
    "states are kept where prompts end and where they part": (
        "mamba_block_size",
        "mamba_cache_mode",
        "enable_mamba_shared_prefix_checkpoint",
    ),
    "the window counts, and the length of sequences does not change": ("disable_sliding_window",),
    "one backend compiles every grammar": ("guided_decoding_backend",),
    "messages and metrics are those of this engine": (
        "enable_log_requests",
        "aggregate_engine_logging",
        "logging_config",
        "log_level",
        "log_config_file",
        "collect_detailed_traces",
        "show_hidden_metrics_for_version",
        "kv_cache_metrics",
        "kv_cache_metrics_sample",
        "cudagraph_metrics",
        "custom_histogram_buckets",
        "enable_layerwise_nvtx_tracing",
        "ray_workers_use_nsight",
        "enable_mfu_metrics",
        "enable_logging_iteration_details",
        "enable_mm_processor_stats",
        "jit_monitor_mode",
        "jit_monitor_verbose",
    ),
    "the engine has no name of its own in answers; `serve` has an option of this name": ("served_model_name",),
    "no code of a model is run": ("code_revision",),
    "weights are mapped from their files": (
        "pt_load_map_location",
        "model_loader_extra_config",
        "ignore_patterns",
        "max_parallel_loading_workers",
        "safetensors_load_strategy",
        "safetensors_prefetch_num_threads",
        "safetensors_prefetch_block_size",
    ),
    "the weights stay on the device": (
        "cpu_offload_gb",
        "cpu_offload_params",
        "offload_backend",
        "offload_group_size",
        "offload_num_in_group",
        "offload_prefetch_step",
        "offload_params",
    ),
    "a request that is displaced is computed again": ("preemption_mode",),
    "the engine plans its steps in its own way": (
        "num_scheduler_steps",
        "scheduler_delay_factor",
        "num_lookahead_slots",
        "use_v2_block_manager",
        "max_long_partial_prefills",
        "max_num_scheduled_tokens",
        "long_prefill_token_threshold_adaptive",
        "scheduler_reserve_full_isl",
        "prefill_schedule_interval",
        "prefix_caching_hash_algo",
        "renderer_num_workers",
    ),
    "distributed_executor_backend='ray' lets Ray place the ranks": ("worker_use_ray",),
    "the engine starts its ranks and joins them itself": (
        "master_addr",
        "master_port",
        "distributed_timeout_seconds",
        "cpu_distributed_timeout_seconds",
        "numa_bind",
        "numa_bind_nodes",
        "numa_bind_cpus",
    ),
    "the type of adapters follows from the model's, and each rank has its part of them": (
        "lora_dtype",
        "fully_sharded_loras",
        "max_lora_cls_labels",
    ),
    "how images and audio are read is fixed, and caches of them have a fixed size": (
        "media_io_kwargs",
        "interleave_mm_strings",
        "mm_processor_cache_gb",
        "mm_processor_cache_type",
        "mm_hasher_algorithm",
        "mm_shm_cache_max_object_size_mb",
        "mm_encoder_tp_mode",
        "mm_encoder_attn_backend",
        "mm_tensor_ipc",
        "mm_processor_device",
        "mm_ipc_gpu_memory_gb",
        "video_pruning_rate",
        "video_pruning_method",
        "language_model_only",
        "disable_chunked_mm_input",
    ),
}

HARMLESS = {name: reason for reason, names in _HARMLESS.items() for name in names}
"""Arguments that change no token whatever their value is, and what is done instead: other values than those of VLLM_ARGUMENTS
are taken with a warning."""
