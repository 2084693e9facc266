"""`ActivePolicies`: which policies the scheduler actor decides by, what became of them, and how others take their place.

Policies change between two steps, with none in flight. A recording has each change, and from a policy of the user's own every
decision. So it replays byte for byte. The owner of the engine changes the configuration first: a scheduler that is started
meanwhile begins with the new policies.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Coroutine
from dataclasses import replace
from typing import Any, Protocol, cast

from actorllm.actors.scheduler_setup import build_policy, is_of_user
from actorllm.actors.step_gate import StepGate
from actorllm.clock import now
from actorllm.config import SchedulerConfig
from actorllm.scheduling.policy import PlanPolicy
from actorllm.scheduling.policy_fallback import FALLBACK
from actorllm.scheduling.scheduler import Scheduler
from actorllm.scheduling.telemetry.decisions import TellingPolicy
from actorllm.scheduling.telemetry.recording import Entry

logger = logging.getLogger(__name__)


class PolicyHost(Protocol):
    """What a change asks of the actor whose scheduler it is."""

    scheduler: Scheduler

    def take_inbox(self) -> None: ...
    def wake(self) -> None: ...


class ActivePolicies:
    """See the module docstring. tell: takes the decisions of a policy of the user's own for a recording; None: there is none."""

    def __init__(self, config: SchedulerConfig, tell: Callable[[Entry], None] | None) -> None:
        self.config = config
        """With the policies that decide now."""
        self.failure: str | None = None
        """Of the scheduling policy that decides now: what replaced it."""
        self.admission_failure: str | None = None
        self.has_told_stall = False
        """That it stalls and cannot be replaced."""
        self._tell = tell

    @property
    def name(self) -> str:
        """Of the scheduling policy."""
        return self.config.policy

    def first(self) -> PlanPolicy:
        """What the scheduler begins with. Raises ConfigError."""
        return self._build(self.config)

    def build(self, policy: str, admission: str | None, number: int) -> PlanPolicy:
        """As `loading.BuildsPolicy`."""
        return self._build(replace(self.config, policy=policy, admission=admission))

    def _build(self, config: SchedulerConfig) -> PlanPolicy:
        """The scheduling policy behind the admission policy; whatever they raise replaces them, and nothing else."""

        def log_admission(what: str, error: BaseException) -> None:
            self.admission_failure = f"{what} raised {type(error).__name__}: {error}"
            told = "admission policy %r failed in %s; all requests are admitted"
            logger.error(told, config.admission, what, exc_info=error)

        def log(what: str, error: BaseException) -> None:
            self.failure = f"{what} raised {type(error).__name__}: {error}"
            told = "scheduling policy %r failed in %s; %r takes its place"
            logger.error(told, config.policy, what, FALLBACK, exc_info=error)

        policy = build_policy(config, log, log_admission)
        if self._tell is not None and is_of_user(config):  # a reader of the recording may not have the policy
            return cast("PlanPolicy", TellingPolicy(policy, self._tell))
        return policy

    def answer(
        self, verb: str, host: PolicyHost, gate: StepGate, policy: str, admission: str | None
    ) -> Coroutine[Any, Any, bool] | bool:
        """check_policy: raises ConfigError if there are no such policies here. set_policy: see `change`."""
        if verb == "set_policy":
            return self.change(host, gate, policy, admission)
        build_policy(replace(self.config, policy=policy, admission=admission))
        return True

    async def change(self, host: PolicyHost, gate: StepGate, policy: str, admission: str | None) -> bool:
        """Let these decide from the next step on. Asked again, it does nothing. Raises ConfigError."""
        if (policy, admission) == (self.config.policy, self.config.admission):
            return True
        async with gate.closed():
            host.take_inbox()  # what was sent before is from before
            before = self.failure, self.admission_failure
            self.failure = self.admission_failure = None
            try:
                host.scheduler.change_policy(policy, admission, now())
            except BaseException:
                self.failure, self.admission_failure = before
                raise
            self.config = replace(self.config, policy=policy, admission=admission)
            self.has_told_stall = False
        logger.info("scheduling policy %r, admission policy %r decide from here on", policy, admission)
        return True

    def statistics(self, num_changes: int) -> dict[str, Any]:
        return {"scheduling": self.config.policy, "admission": self.config.admission, "num_changes": num_changes}
