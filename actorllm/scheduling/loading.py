"""`load_policy`: a policy object by its name, as the scheduler uses it."""

from __future__ import annotations

from actorllm.errors import ConfigError
from actorllm.scheduling.policy import REGISTRY, KeyPolicy, PlanPolicy
from actorllm.scheduling.step_packing import KeyPlanner
from actorllm.scheduling.step_time import Predicts


def load_policy(name: str, step_time: Predicts | None = None) -> PlanPolicy:
    """A fresh policy object by name or as 'module:Class'. Raises ConfigError naming what is wrong.

    step_time: what steps take, for policies whose constructor has an argument of this name; the others do without.
    """
    policy = REGISTRY.build(name, step_time=step_time)
    if isinstance(policy, KeyPolicy):
        return KeyPlanner(policy)
    if not callable(getattr(policy, "plan", None)):
        raise ConfigError(f"scheduling policy {name!r} is neither a KeyPolicy nor a PlanPolicy")
    plan_policy: PlanPolicy = policy
    return plan_policy
