"""The keys of a result of `vllm bench serve`."""

from __future__ import annotations

BENCH_KEYS = {
    "duration", "completed", "failed", "total_input_tokens", "total_output_tokens", "request_throughput",
    "request_goodput", "output_throughput", "total_token_throughput", "input_lens", "output_lens", "ttfts", "itls",
    "latencies", "start_times", "queue_times", "generated_texts", "errors", "max_output_tokens_per_s",
    "max_concurrent_requests", "rtfx", "date", "endpoint_type", "backend", "label", "model_id", "tokenizer_id",
    "num_prompts", "request_rate", "burstiness", "max_concurrency",
} | {
    f"{figure}_{metric}_ms"
    for figure in ("mean", "median", "std", "p50", "p90", "p95", "p99")
    for metric in ("ttft", "tpot", "itl", "e2el")
}  # fmt: skip

"""Of `vllm bench serve --save-result --save-detailed --percentile-metrics ttft,tpot,itl,e2el`."""
