"""`load_policy`: a policy object by its name, as the scheduler uses it; `load_policies`: with an admission policy before it."""

from __future__ import annotations

from typing import Protocol

from actorllm.errors import ConfigError
from actorllm.scheduling.admission_policy import AdmissionGate, load_admission
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


class BuildsPolicy(Protocol):
    """What makes the policies that a scheduler changes to."""

    def __call__(self, policy: str, admission: str | None, number: int) -> PlanPolicy:
        """By their names; number: of the change, from 1. Raises ConfigError naming what is wrong."""
        ...


def load_policies(policy: str, admission: str | None = None, number: int = 0) -> PlanPolicy:
    """A fresh scheduling policy, behind an admission policy if one is named. Raises ConfigError."""
    scheduling = load_policy(policy)
    return scheduling if admission is None else AdmissionGate(scheduling, load_admission(admission))
