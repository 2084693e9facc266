"""vLLM's two loggers of statistics, for `stat_loggers=`: lines of the log, and metrics of `prometheus_client`.

An engine without them has `disable_log_stats=False`, `get_metrics` and the server's /metrics. Programs that have their own server
give these, and show the registry of `prometheus_client` themselves.
"""

from __future__ import annotations

import logging
from collections.abc import Sequence
from typing import Any

from actorllm.clock import now
from actorllm.errors import ConfigError
from actorllm.types.stat_loggers import AggregateStatLoggerBase, IterationStats, SchedulerStats, StatLoggerBase

logger = logging.getLogger(__name__)

SECONDS = (
    *(0.001, 0.005, 0.01, 0.02, 0.04, 0.06, 0.08, 0.1, 0.25, 0.5, 0.75, 1.0, 2.5, 5.0, 7.5, 10.0, 20.0, 40.0, 80.0),
    *(160.0, 640.0, 2560.0),
)
TOKENS = (1, 2, 5, 10, 20, 50, 100, 200, 500, 1000, 2000, 5000, 10000, 20000, 50000, 100000)
"""Upper ends of the classes of histograms."""


class LoggingStatLogger(StatLoggerBase):
    """A line with rates and the load whenever `do_log_stats` is called, unless there is nothing to tell."""

    def __init__(self, vllm_config: Any, engine_index: int = 0) -> None:
        """
        Arguments:
            vllm_config: the `EngineConfig`.
            engine_index: the number of the replica.
        """
        self.engine_index = engine_index
        self.last_scheduler_stats = SchedulerStats()
        self._reset(now())
        self._was_idle = True

    def _reset(self, at: float) -> None:
        self.last_log_time = at
        self.num_prompt_tokens = self.num_generation_tokens = 0

    def record(
        self,
        scheduler_stats: SchedulerStats | None,
        iteration_stats: IterationStats | None,
        mm_cache_stats: None = None,
        engine_idx: int = 0,
    ) -> None:
        """As of `StatLoggerBase`."""
        if iteration_stats is not None:
            self.num_prompt_tokens += iteration_stats.num_prompt_tokens
            self.num_generation_tokens += iteration_stats.num_generation_tokens
        if scheduler_stats is not None:
            self.last_scheduler_stats = scheduler_stats

    def log_engine_initialized(self) -> None:
        """A line."""
        logger.info("Engine %03d: it has started", self.engine_index)

    def log(self) -> None:
        """The line."""
        at = now()
        seconds = max(at - self.last_log_time, 1e-9)
        prompts, outputs = self.num_prompt_tokens / seconds, self.num_generation_tokens / seconds
        self._reset(at)
        found = self.last_scheduler_stats
        is_idle = not (prompts or outputs or found.num_running_reqs or found.num_waiting_reqs)
        if not (is_idle and self._was_idle):
            logger.info(
                "Engine %03d: Avg prompt throughput: %.1f tokens/s, Avg generation throughput: %.1f tokens/s, "
                "Running: %d reqs, Waiting: %d reqs, GPU KV cache usage: %.1f%%",
                *(self.engine_index, prompts, outputs, found.num_running_reqs, found.num_waiting_reqs),
                100 * found.kv_cache_usage,
            )
        self._was_idle = is_idle


class PrometheusStatLogger(AggregateStatLoggerBase):
    """Metrics by vLLM's names in the registry of `prometheus_client`, which has to be installed.

    They have the labels model_name and engine. The metrics of one that was made before are replaced.
    """

    _registered: tuple[Any, ...] = ()
    """In the registry of the process."""

    def __init__(self, vllm_config: Any, engine_indexes: list[int] | None = None) -> None:
        """
        Arguments:
            vllm_config: the `EngineConfig`.
            engine_indexes: the numbers of the replicas.

        Raises:
            ConfigError: `prometheus_client` is not installed.
        """
        try:
            import prometheus_client as client
        except ModuleNotFoundError as error:
            raise ConfigError("PrometheusStatLogger needs prometheus-client: pip install prometheus-client") from error
        self.engine_indexes = engine_indexes or [0]
        self._model = vllm_config.model.name
        cls = PrometheusStatLogger
        for known in cls._registered:
            client.REGISTRY.unregister(known)
        cls._registered = ()
        labels = ("model_name", "engine")

        def counter(name: str, told: str, more: Sequence[str] = ()) -> Any:
            return client.Counter(f"vllm:{name}", told, (*labels, *more))

        def gauge(name: str, told: str) -> Any:
            return client.Gauge(f"vllm:{name}", told, labels)

        def histogram(name: str, told: str, ends: Sequence[float]) -> Any:
            return client.Histogram(f"vllm:{name}", told, labels, buckets=ends)

        self._running = gauge("num_requests_running", "Requests in the batch.")
        self._waiting = gauge("num_requests_waiting", "Requests that wait for it.")
        self._usage = gauge("kv_cache_usage_perc", "Share of the blocks of the KV cache in use, 0 to 1.")
        self._queries = counter("prefix_cache_queries", "Tokens of prompts that were looked up.")
        self._hits = counter("prefix_cache_hits", "Of these, what the cache had.")
        self._preemptions = counter("num_preemptions", "Preemptions of requests that have ended.")
        self._prompt = counter("prompt_tokens", "Tokens of prompts.")
        self._generated = counter("generation_tokens", "Tokens that were generated.")
        self._success = counter("request_success", "Requests that have ended, by the reason.", ["finished_reason"])
        self._ttft = histogram("time_to_first_token_seconds", "From the arrival.", SECONDS)
        self._tpot = histogram("inter_token_latency_seconds", "Between tokens of a request.", SECONDS)
        self._of_ends = {
            field: histogram(name, told, ends)
            for field, name, told, ends in (
                ("e2e_latency", "e2e_request_latency_seconds", "From the arrival to the end.", SECONDS),
                ("queued_time", "request_queue_time_seconds", "Before the first step.", SECONDS),
                ("prefill_time", "request_prefill_time_seconds", "To the first token.", SECONDS),
                ("decode_time", "request_decode_time_seconds", "From the first token to the last.", SECONDS),
                ("inference_time", "request_inference_time_seconds", "Both.", SECONDS),
                ("num_prompt_tokens", "request_prompt_tokens", "Of a prompt.", TOKENS),
                ("num_generation_tokens", "request_generation_tokens", "Of an output.", TOKENS),
            )
        }
        cls._registered = (
            *(self._running, self._waiting, self._usage, self._queries, self._hits, self._preemptions, self._prompt),
            *(self._generated, self._success, self._ttft, self._tpot, *self._of_ends.values()),
        )

    def record(
        self,
        scheduler_stats: SchedulerStats | None,
        iteration_stats: IterationStats | None,
        mm_cache_stats: None = None,
        engine_idx: int = 0,
    ) -> None:
        """As of `StatLoggerBase`."""
        labels = (self._model, str(engine_idx))
        if scheduler_stats is not None:
            self._running.labels(*labels).set(scheduler_stats.num_running_reqs)
            self._waiting.labels(*labels).set(scheduler_stats.num_waiting_reqs)
            self._usage.labels(*labels).set(scheduler_stats.kv_cache_usage)
            self._queries.labels(*labels).inc(scheduler_stats.prefix_cache_stats.queries)
            self._hits.labels(*labels).inc(scheduler_stats.prefix_cache_stats.hits)
        if iteration_stats is None:
            return
        self._preemptions.labels(*labels).inc(iteration_stats.num_preempted_reqs)
        self._prompt.labels(*labels).inc(iteration_stats.num_prompt_tokens)
        self._generated.labels(*labels).inc(iteration_stats.num_generation_tokens)
        for seconds in iteration_stats.time_to_first_tokens_iter:
            self._ttft.labels(*labels).observe(seconds)
        for seconds in iteration_stats.inter_token_latencies_iter:
            self._tpot.labels(*labels).observe(seconds)
        for end in iteration_stats.finished_requests:
            self._success.labels(*labels, end.finish_reason).inc()
            for field, metric in self._of_ends.items():
                metric.labels(*labels).observe(getattr(end, field))

    def log_engine_initialized(self) -> None:
        """The metrics of each engine are there, at 0."""
        for number in self.engine_indexes:
            for metric in (self._running, self._waiting, self._usage, self._prompt, self._generated, self._ttft):
                metric.labels(self._model, str(number))
