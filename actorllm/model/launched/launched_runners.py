"""`LeadingRunner` and `FollowingRunner`: the ranks of a launcher, as the worker of rank 0 and as the loop of the others.

Rank 0 has the only scheduler. Its worker's runner tells each plan to the others before it computes the step, and the late inputs of
a step before it samples. All compute their part, and every rank's batch stays the same, as with ranks that the engine starts itself
(`model.parallel`). A rank that fails within a step ends the program: the launcher ends the others.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from actorllm.config import EngineConfig
from actorllm.messages import Drafted, LateInputs, StepPlan, StepResult
from actorllm.model import backends
from actorllm.model.launched.plan_channel import PlanChannel, Told, bytes_of, message_of
from actorllm.model.runner import ModelRunner


class LeadingRunner:
    """Stands for a runner that has been loaded, on rank 0; whatever does not concern the other ranks is that runner's."""

    def __init__(self, runner: ModelRunner[Any, Any]) -> None:
        self._runner = runner
        self.channel = PlanChannel(runner.ranks.group, is_alone=runner.config.world_size == 1)

    def __getattr__(self, name: str) -> Any:
        return getattr(self._runner, name)

    @property
    def tell_drafts(self) -> Callable[[Drafted], None] | None:
        return self._runner.tell_drafts

    @tell_drafts.setter
    def tell_drafts(self, tell: Callable[[Drafted], None] | None) -> None:
        self._runner.tell_drafts = tell

    def profile_num_blocks(self) -> int:
        """What the rank with the least room can hold."""
        return self.channel.least(self._runner.profile_num_blocks())

    def allocate(self, num_blocks: int) -> None:
        self.channel.tell(Told.ALLOCATE, num_blocks.to_bytes(8, "little"))
        self._runner.allocate(num_blocks)

    def execute(self, plan: StepPlan) -> Any:
        self.channel.tell(Told.PLAN, bytes_of(plan))
        return self._runner.execute(plan)

    def sample(self, handle: Any, late: LateInputs | None = None) -> StepResult:
        if late is not None:
            self.channel.tell(Told.LATE_INPUTS, bytes_of(late))
        return self._runner.sample(handle, late)

    def choose(self, handle: Any, late: LateInputs | None = None) -> None:
        """As `sample`, of a backend that launches steps ahead."""
        if late is not None:
            self.channel.tell(Told.LATE_INPUTS, bytes_of(late))
        self._runner.choose(handle, late)  # type: ignore[attr-defined]


class FollowingRunner:
    """Any other rank."""

    def __init__(self, config: EngineConfig, rank: int) -> None:
        """Returns when rank 0 has started. Raises ModelError, or what made the start fail."""
        self._runner = backends.load(config.device)(config, rank)
        self._runner.load()
        self._channel = PlanChannel(self._runner.ranks.group)
        self._channel.least(self._runner.profile_num_blocks())
        self._handle: Any = None
        """A step that waits for its late inputs."""
        kind, body = self._channel.hear()
        assert kind is Told.ALLOCATE
        self._runner.allocate(int.from_bytes(body, "little"))

    def follow(self) -> bytes:
        """Compute what rank 0 plans, until its call has ended. Returns what that has brought."""
        while True:
            kind, body = self._channel.hear()
            match kind:
                case Told.PLAN:
                    plan = message_of(body)
                    self._handle = self._runner.execute(plan)
                    if not plan.late_slots.size:
                        self._sample(None)
                case Told.LATE_INPUTS:
                    self._sample(message_of(body))
                case _:
                    return body

    def _sample(self, late: LateInputs | None) -> None:
        handle, self._handle = self._handle, None
        if self._runner.sample(handle, late).came_to_nothing:
            self._runner.check_itself()  # as the worker of rank 0 does after the same step

    def close(self) -> None:
        """Leave the other ranks. Idempotent."""
        self._runner.close()
