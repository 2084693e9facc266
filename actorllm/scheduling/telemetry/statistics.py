"""`SchedulerStatistics`: what `Scheduler.statistics` tells. The counters are kept by those whose events they count."""

from __future__ import annotations

from dataclasses import dataclass

from actorllm.kvcache.manager import KVCacheStatistics


@dataclass(frozen=True, slots=True)
class PrefixCacheStatistics:
    """Counted at admission, in tokens; a request that is admitted again after a preemption counts apart, as in vLLM.

    Forks are not counted: a prompt that a sibling has just computed is not looked up.
    """

    requests: int
    queries: int
    """Known tokens of requests that were looked up."""
    hits: int
    """Those of them that were found."""
    preempted_requests: int
    preempted_queries: int
    preempted_hits: int
    num_resets: int
    num_snapshots: int = 0
    """States of recurrent layers that are found behind prefixes now; 0 of a model without such layers."""
    num_evicted_snapshots: int = 0
    """Those that gave their places to others, since the start."""


@dataclass(frozen=True, slots=True)
class LaneStatistics:
    """Of the lanes that decode rows are shared out among (`scheduling.lanes`)."""

    num_rows: list[int]
    """By lane."""
    num_moves: int
    """Rows that changed lanes since the start."""


@dataclass(frozen=True, slots=True)
class SpeculationStatistics:
    """Drafts since the start, under vLLM's names."""

    num_drafts: int
    """Times that a row of a step had any."""
    num_draft_tokens: int
    num_accepted_tokens: int
    """Those that were what was sampled."""
    num_accepted_tokens_per_pos: tuple[int, ...]
    """By position: of the first draft of a row, of its second, and so on."""


@dataclass(frozen=True, slots=True)
class TransferCostStatistics:
    load_s_per_block: float | None
    load_overhead_s: float | None
    """Of a load of any size: until the worker hears of it, and until its answer is heard."""
    compute_s_per_token: float | None


@dataclass(frozen=True, slots=True)
class TransferStatistics:
    """Counters since the start, and what is there now."""

    num_waiting: int
    """Requests that wait for a load."""
    num_loads: int
    num_loaded_blocks: int
    num_short_loads: int
    """Loads that found less than the directory had promised."""
    load_s: float
    """Time that reading took."""
    num_given_up: int
    """Requests that had waited long enough, and computed."""
    num_stores: int
    num_stored_blocks: int
    store_s: float
    num_handed_off: int
    """Prompts whose blocks were leased to another replica."""
    num_leases: int
    num_expired_leases: int
    """Leases that no reader has said it needs no more."""
    num_pulls: int
    num_pulled_blocks: int
    """That were copied from another replica."""
    num_lost_leases: int
    """Leases that were over before all was copied."""
    pull_s: float
    """Time that copying took."""
    costs: TransferCostStatistics


@dataclass(frozen=True, slots=True)
class SchedulerStatistics:
    """Counters since the start, and what is there now."""

    num_running: int
    num_waiting: int
    num_blocked: int
    num_in_flight: int
    num_steps: int
    num_output_tokens: int
    num_prefill_tokens: int
    num_forks: int
    """Requests that took a sibling's prompt over instead of computing it."""
    num_preemptions: int
    num_wasted_tokens: int
    """Sampled for a request that had ended or lost its slot for good by then."""
    num_dropped_results: int
    """Results of steps that were not the next one due."""
    num_failed_steps: int
    num_worker_losses: int
    num_recovered: int
    """Times that a request had its next token after the workers that computed it had died."""
    recovery_s: float
    """What they waited for it, added up."""
    num_suspects: int
    """Requests that the workers may have died of."""
    num_retrying: int
    """Requests of failed steps that are tried again in small groups, to find the one at fault."""
    num_memory_failures: int
    """Failed steps that had run out of memory; smaller ones took their place."""
    num_corrupted_requests: int
    """That ended because the model's states or logits were not finite."""
    num_nonfinite: int
    """Values that were not finite, of all of them together."""
    num_refused_decisions: int
    """Parts of a policy's decisions that did not fit and were left out."""
    num_waiting_tokens: int
    """Of the prompts of requests that have not started."""
    num_overloaded: int
    """Sequences that were refused because too much was waiting."""
    num_rejected: int
    """That waited, and that a policy turned away."""
    blocked_on: dict[str, int]
    pause_state: str
    kv: KVCacheStatistics
    prefix_cache: PrefixCacheStatistics | None
    """None: there is none."""
    speculation: SpeculationStatistics | None = None
    """None: nothing is drafted."""
    lanes: LaneStatistics | None = None
    """None: there is one."""
    transfers: TransferStatistics | None = None
    """Between memory and the tiers; None: there are no tiers."""
