"""What the scheduler of a configuration is built with: its arguments, and its policies."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, cast

from actorllm.config import EngineConfig, SchedulerConfig
from actorllm.scheduling.admission_policy import ADMISSIONS, AdmissionGate, load_admission
from actorllm.scheduling.cost_model import from_json
from actorllm.scheduling.loading import load_policy
from actorllm.scheduling.policy import POLICIES, PlanPolicy
from actorllm.scheduling.policy_fallback import FALLBACK, PolicyWithFallback
from actorllm.scheduling.step_time import CorrectedStepTime


def scheduler_arguments(config: EngineConfig, eos_token_ids: tuple[int, ...], primary: int | None) -> dict[str, Any]:
    """Of the Scheduler of this configuration, whose KV blocks are known; but for its policy.

    primary: the id that ends a text by the tokenizer.
    """
    assert config.cache.num_blocks is not None
    return {
        "num_blocks": config.cache.num_blocks,
        "block_size": config.cache.block_size,
        "max_num_seqs": config.scheduler.max_num_seqs,
        "max_num_batched_tokens": config.scheduler.max_num_batched_tokens,
        "max_model_len": config.model.max_model_len,
        "vocab_size": config.model.vocab_size,
        "eos_token_ids": eos_token_ids,
        "primary_eos_token_id": primary,
        "depth": config.scheduler.depth,
        "num_lookahead_tokens": config.scheduler.num_lookahead_tokens,
        "draft_ranges": () if config.speculation is None else config.speculation.num_speculative_tokens_per_batch_size,
        "enable_prefix_caching": config.cache.enable_prefix_caching,
        "max_num_partial_prefills": config.scheduler.max_num_partial_prefills,
        "watermark": config.scheduler.watermark,
        "embedding_bytes": config.model.embedding_bytes,
        "max_waiting_requests": config.scheduler.max_waiting_requests,
        "max_waiting_tokens": config.scheduler.max_waiting_tokens,
        "prefill_chunk": config.scheduler.long_prefill_token_threshold or None,
        "pools_only": config.model.pooler is not None,
        "vector_size": 0 if config.model.pooler is None else config.model.pooler.vector_size,
        "weights": config.model.weights.identity,
        "tells_salts": config.speculation is not None and config.speculation.drafts_from_others,
        **({"keeps_output_apart": True} if config.keeps_output_apart else {}),
        **({"num_lanes": config.num_lanes} if config.stages else {}),
        **({"probes_alone": True} if config.is_fleet else {}),
        **({"window": config.cache.window} if config.cache.window is not None else {}),
        **({"snapshots": config.cache.snapshots} if config.cache.snapshots else {}),
        **_source_limits(config),
        **({"cache_key": config.cache.hash_key} if config.cache.hash_key else {}),
    }


def _source_limits(config: EngineConfig) -> dict[str, int]:
    rules = config.model.encoder_decoder
    return {} if rules is None else {"max_source": rules.max_source, "max_target": rules.max_target}


def build_policy(
    config: SchedulerConfig,
    on_failure: Callable[[str, BaseException], object] | None = None,
    on_admission_failure: Callable[[str, BaseException], object] | None = None,
) -> PlanPolicy:
    """The policies of a live engine: they correct the step-time model that they are given, and what they raise replaces them.

    on_failure and on_admission_failure are told what raised what.
    """
    model = None if config.step_model is None else from_json(config.step_model)

    def step_time() -> CorrectedStepTime | None:
        return None if model is None else CorrectedStepTime(model, model.name)  # each learns for itself

    admission = None if config.admission is None else load_admission(config.admission, step_time())

    def tell_admission(what: str, error: BaseException) -> None:
        if on_admission_failure is not None:
            on_admission_failure(what, error)

    def gated(policy: PlanPolicy) -> PlanPolicy:
        return policy if admission is None else cast("PlanPolicy", AdmissionGate(policy, admission, tell_admission))

    policy = gated(load_policy(config.policy, step_time()))
    if config.policy in POLICIES:
        return policy
    # a PlanPolicy, with the methods about forks only if that has them
    return cast("PlanPolicy", PolicyWithFallback(policy, on_failure, lambda: gated(load_policy(FALLBACK))))


def is_of_user(config: SchedulerConfig) -> bool:
    """Whether a policy is not of this package: its decisions are recorded, because it may not be there to make them again."""
    return config.policy not in POLICIES or (config.admission is not None and config.admission not in ADMISSIONS.names)
