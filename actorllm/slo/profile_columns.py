"""What the columns of public profiles of steps are called, and in what unit they are: the one place to add a name.

A profile is a CSV file with a row for each measured step. LLMServingSim's `step.csv` has prefill_chunk, n_decode, kv_decode and
step_us (github.com/casys-kaist/LLMServingSim, profiler/perf). Our own names are those of `cost_model.FEATURES`, with seconds.
"""

from __future__ import annotations

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
