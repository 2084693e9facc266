"""vLLM's interface of loggers that an application brings (`stat_loggers=`): what they are derived from, and what they are told.

The fields are vLLM's. Those that count what this engine does not have stay at what they are without it.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from dataclasses import dataclass, field
from typing import Any


@dataclass(slots=True)
class PrefixCacheStats:
    """Of the prefix cache, since the last time: tokens of prompts that were looked up, and found."""

    reset: bool = False
    requests: int = 0
    queries: int = 0
    hits: int = 0
    preempted_requests: int = 0
    preempted_queries: int = 0
    preempted_hits: int = 0


@dataclass(slots=True)
class SchedulerStats:
    """What the scheduler has. It is asked once a second, so these numbers may be as old as that.

    num_running_reqs, num_waiting_reqs: requests in the batch, and before it. kv_cache_usage: share of the blocks in use, 0 to 1.
    prefix_cache_stats: the first time that these numbers are told, else zeros.
    """

    num_running_reqs: int = 0
    num_waiting_reqs: int = 0
    num_skipped_waiting_reqs: int = 0
    step_counter: int = 0
    current_wave: int = 0
    kv_cache_usage: float = 0.0
    prefix_cache_stats: PrefixCacheStats = field(default_factory=PrefixCacheStats)
    connector_prefix_cache_stats: None = None
    spec_decoding_stats: None = None
    kv_connector_stats: None = None
    waiting_lora_adapters: dict[str, int] = field(default_factory=dict)
    running_lora_adapters: dict[str, int] = field(default_factory=dict)


@dataclass(slots=True)
class FinishedRequestStats:
    """One sequence that has ended; times in seconds.

    finish_reason: as in `CompletionOutput`. queued_time: from the scheduler's taking it to its first step. prefill_time: from
    there to its first token. decode_time: from that to the last one. inference_time: both.
    """

    finish_reason: str
    e2e_latency: float = 0.0
    num_prompt_tokens: int = 0
    num_generation_tokens: int = 0
    max_tokens_param: int | None = None
    queued_time: float = 0.0
    prefill_time: float = 0.0
    inference_time: float = 0.0
    decode_time: float = 0.0
    mean_time_per_output_token: float = 0.0
    is_corrupted: bool = False
    num_cached_tokens: int = 0


@dataclass(slots=True)
class IterationStats:
    """What one message of the scheduler brought, mostly that of one step; times in seconds, lists with an entry per sequence.

    iteration_timestamp: in epoch seconds. num_prompt_tokens: of the sequences that have their first token now.
    inter_token_latencies_iter: from their last tokens to those that came now. num_preempted_reqs: preemptions of the sequences that
    have ended now.
    """

    iteration_timestamp: float = 0.0
    num_generation_tokens: int = 0
    num_prompt_tokens: int = 0
    num_preempted_reqs: int = 0
    finished_requests: list[FinishedRequestStats] = field(default_factory=list)
    max_num_generation_tokens_iter: list[int] = field(default_factory=list)
    n_params_iter: list[int] = field(default_factory=list)
    time_to_first_tokens_iter: list[float] = field(default_factory=list)
    inter_token_latencies_iter: list[float] = field(default_factory=list)
    num_corrupted_reqs: int = 0


class StatLoggerBase(ABC):
    """What a logger of an application is derived from. Its methods are called on the engine's thread, and have to be quick."""

    @abstractmethod
    def __init__(self, vllm_config: Any, engine_index: int = 0) -> None:
        """vllm_config: the `EngineConfig`, complete. engine_index: 0."""

    @abstractmethod
    def record(
        self,
        scheduler_stats: SchedulerStats | None,
        iteration_stats: IterationStats | None,
        mm_cache_stats: None = None,
        engine_idx: int = 0,
    ) -> None:
        """Called with every message of the scheduler, and when its numbers have changed (iteration_stats is None then).

        Arguments:
            scheduler_stats: the newest numbers of the scheduler.
            iteration_stats: what came now.
            mm_cache_stats: None.
            engine_idx: of the replica; 0 where there is one.
        """

    @abstractmethod
    def log_engine_initialized(self) -> None:
        """The engine has started."""

    def log(self) -> None:  # noqa: B027 - not every logger writes
        """Called by `do_log_stats`."""

    def record_sleep_state(self, is_awake: int = 0, level: int = 0) -> None:  # noqa: B027 - as in vLLM
        """Never called: `is_sleeping` of the engine says it.

        Arguments:
            is_awake, level: as in vLLM.
        """


class AggregateStatLoggerBase(StatLoggerBase):
    """One for all engines of a program: its constructor is given a list of the numbers of its replicas."""

    @abstractmethod
    def __init__(self, vllm_config: Any, engine_indexes: list[int]) -> None:
        """vllm_config: the `EngineConfig`, complete. engine_indexes: of the replicas; [0] where there is one."""
