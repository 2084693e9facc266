"""What the columns of public profiles are called, and in what unit they are: the one place to add a name.

A profile of steps is a CSV file with a row for each measured step. LLMServingSim's `step.csv` has prefill_chunk, n_decode,
kv_decode and step_us (github.com/casys-kaist/LLMServingSim, profiler/perf). Our own names are those of `cost_model.FEATURES`,
with seconds.

A profile of kernels has a row for each kernel and size, in one file or in several of a folder. LLMServingSim has dense.csv,
per_sequence.csv and attention.csv, before them layers.csv. Vidur has mlp.csv and attention.csv with a column for each kernel
(github.com/microsoft/vidur, data/profiling/compute).

A profile by shape has the sizes of products and the heads of attention in the place of names, for any model. AIConfigurator has
such tables as .parquet files (github.com/ai-dynamo/aiconfigurator; in the wheel aiconfigurator-core, systems/data).
"""

from __future__ import annotations

import re

PROMPT_TOKENS = ("p", "prefill_chunk", "num_prefill_tokens", "prefill_tokens", "num_prompt_tokens")
DECODE_ROWS = ("d", "n_decode", "num_decode_tokens", "decode_tokens", "num_decode_seqs")
DECODE_CONTEXT = ("decode_context", "decode_kv_tokens")
"""Tokens that all rows together attend to."""
ROW_CONTEXT = ("kv_decode", "decode_kv_len", "avg_context_len")
"""The same of each row."""
PREFILL_CONTEXT = ("prefill_context", "kv_prefill", "prefill_kv_tokens")
"""Tokens that were computed before the chunks of the step."""
PREFILL_PAIRS = ("prefill_pairs",)
DURATION = {
    "seconds": 1.0,
    "step_s": 1.0,
    "latency_s": 1.0,
    "step_ms": 1e-3,
    "latency_ms": 1e-3,
    "time_ms": 1e-3,
    "step_us": 1e-6,
    "latency_us": 1e-6,
    "latency(ns)": 1e-9,
    "latency_ns": 1e-9,
}
"""Seconds of one unit."""

# Kernels -----------------------------------------------------------------------------------------------------------------

KERNEL = ("layer", "layer_name", "kernel", "op_name")
"""Has the name of a kernel."""
KERNEL_TOKENS = ("tokens", "num_tokens", "input")
"""Tokens of a step that the kernel is computed for."""
KERNEL_ROWS = ("sequences", "num_sequences", "num_seqs")
"""Rows of a step that get logits."""
KERNEL_DURATION = DURATION | {"time_us": 1e-6, "duration_us": 1e-6, "duration_ms": 1e-3}
SHARDS = ("tp_size", "num_tensor_parallel_workers")
"""GPUs that share the kernel."""
WIDE = re.compile(r"time_stats\.(?P<kernel>\w+)\.median")
"""Vidur has a column of this name for each kernel, in milliseconds."""
WIDE_UNIT = 1e-3
ATTENTION_CHUNK = ("prefill_chunk", "prefill_chunk_size")
ATTENTION_BEFORE = ("kv_prefill", "kv_cache_size", "kv_cache")
ATTENTION_ROWS = ("n_decode", "batch_size")
ATTENTION_CONTEXT = ("kv_decode", "kv_cache_size", "kv_cache")
PREFILL_KERNELS, DECODE_KERNELS = ("attn_prefill",), ("attn_decode",)
ATTENTION_KERNELS = ("attn", "attention")
"""Of a chunk of so many tokens, after so many in the cache."""
LOGITS = ("lm_head", "sampler")
"""Once in a step, for the rows that get logits."""
ONCE = ("embedding", "emb", "final_layernorm", "final_norm")
"""Once in a step, for all tokens. All others are in every layer."""
TIMES_IN_A_LAYER = {"layernorm": 2, "all_reduce": 2}
"""An all-reduce follows attention, and another what comes after it."""

# Kernels by shape --------------------------------------------------------------------------------------------------------

SHAPE_TABLES = {
    "products": "gemm_perf",
    "prompt": "context_attention_perf",
    "decode": "generation_attention_perf",
    "experts": "moe_perf",
    "reduce": "custom_allreduce_perf",
}
"""Stems of the files of AIConfigurator: a folder for each GPU, in it one for each kind of kernel, engine and version."""
SHAPE_UNIT = 1e-3
"""Their column latency is in milliseconds."""
EXPERT_LOADS = ("power_law_1.01", "balanced")
"""How unevenly tokens chose experts in a measurement; the first that a profile has."""
IN_GRAPHS = ("vLLM_custom_graph", "TRTLLM")
"""All-reduces within CUDA graphs, as decode steps run them; the first that a profile has, else whatever it has."""
NODES: tuple[int, ...] = (
    *(1, 2, 4, 8, 16, 24, 32, 48, 64, 80, 96, 128, 160, 192, 256, 320, 384, 512, 640, 768),
    *(1024, 1536, 2048, 3072, 4096, 6144, 8192),
)
"""Tokens of a step at which products are read; a profile has more."""
MAX_ROWS = 512
"""Rows that get logits, up to which they are read."""
