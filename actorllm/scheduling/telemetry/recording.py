"""Recording what goes into a scheduler, and replaying it.

A Scheduler is a function of its calls. `RecordedScheduler` hands every call to a sink before it makes it. `replay` makes the
same calls on a fresh scheduler and yields the plans, which are the same byte for byte. So a live run can be looked at again,
step by step, and the simulator can be compared with it.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from contextlib import suppress
from typing import Any, TypeAlias

from actorllm.messages import StepFailed, StepPlan, StepResult, Submit
from actorllm.scheduling.events import End, Events
from actorllm.scheduling.results import ContradictionError
from actorllm.scheduling.scheduler import Scheduler
from actorllm.scheduling.sequence import Key, Sequence
from actorllm.types.outputs import FinishReason
from actorllm.types.weight_version import RunningRequests

Entry: TypeAlias = tuple[str, float, Any]
"""(call, now, argument): the argument is a message or a list of plain values."""


class RecordedScheduler(Scheduler):
    """A scheduler that reports its inputs."""

    def __init__(self, *, sink: Callable[[Entry], None], **arguments: Any) -> None:
        super().__init__(**arguments)
        self._sink = sink

    def submit(self, frontend: int, submit: Submit, now: float) -> End | None:
        self._sink((f"submit {frontend}", now, submit))
        return super().submit(frontend, submit, now)

    def abort(self, keys: Iterable[Key], now: float) -> list[End]:
        keys = list(keys)
        self._sink(("abort", now, [list(key) for key in keys]))
        return super().abort(keys, now)

    def limit_frontend(self, frontend: int, max_waiting_requests: int) -> None:
        self._sink(("limit_frontend", 0.0, [frontend, max_waiting_requests]))
        super().limit_frontend(frontend, max_waiting_requests)

    def expire(self, now: float) -> list[End]:
        self._sink(("expire", now, None))
        return super().expire(now)

    def unblock(self, key: Key, error: str | None, now: float, adapter_slot: int = 0) -> End | None:
        self._sink(("unblock", now, [list(key), error, *([adapter_slot] if adapter_slot else [])]))
        return super().unblock(key, error, now, adapter_slot)

    def schedule(self, now: float) -> StepPlan | None:
        self._sink(("schedule", now, None))
        return super().schedule(now)

    def update(self, result: StepResult, now: float) -> Events:
        self._sink(("update", now, result))
        return super().update(result, now)

    def fail(self, failure: StepFailed, now: float) -> Events:
        self._sink(("fail", now, failure))
        return super().fail(failure, now)

    def reset_prefix_cache(
        self, now: float, reset_running_requests: bool = False, *, keeps_tiers: bool = False
    ) -> None:
        self._sink(("reset_prefix_cache", now, reset_running_requests))
        super().reset_prefix_cache(now, reset_running_requests, keeps_tiers=keeps_tiers)

    def change_weights(self, weights: str, running: RunningRequests, now: float) -> list[End]:
        self._sink(("change_weights", now, [weights, running]))
        return super().change_weights(weights, running, now)

    def pause(self, mode: str, now: float) -> list[End]:
        self._sink(("pause", now, mode))
        return super().pause(mode, now)

    def resume(self, now: float) -> None:
        self._sink(("resume", now, None))
        super().resume(now)

    def lose_workers(self, error: str, now: float) -> list[End]:
        self._sink(("lose_workers", now, error))
        return super().lose_workers(error, now)

    def give_up_policy(self, reason: str, now: float) -> bool:
        is_replaced = super().give_up_policy(reason, now)
        if is_replaced:  # else nothing has changed, and it may be asked for in every turn
            self._sink(("give_up", now, reason))
        return is_replaced

    def change_policy(self, policy: str, admission: str | None, now: float) -> None:
        super().change_policy(policy, admission, now)  # one that cannot be built changes nothing
        self._sink(("change_policy", now, [policy, admission]))

    def finish(self, stops: Iterable[tuple[Sequence, FinishReason, int | str | None]], now: float) -> list[End]:
        stops = list(stops)
        if stops:
            self._sink(("finish", now, [[list(s.key), reason, stop] for s, reason, stop in stops]))
        return super().finish(stops, now)


def replay(entries: Iterable[Entry], scheduler: Scheduler) -> Iterator[StepPlan]:
    """Make the recorded calls on a fresh scheduler of the same configuration; yields its plans in order."""
    for call, now, argument in entries:
        verb, _, frontend = call.partition(" ")
        # Calls of the scheduler by name, with the arguments as they were written.
        match verb:
            case "submit":
                scheduler.submit(int(frontend), argument, now)
            case "abort":
                scheduler.abort([(f, rid) for f, rid in argument], now)
            case "limit_frontend":
                scheduler.limit_frontend(*argument)
            case "expire":
                scheduler.expire(now)
            case "unblock":
                scheduler.unblock((argument[0][0], argument[0][1]), argument[1], now, *argument[2:])
            case "schedule":
                plan = scheduler.schedule(now)
                scheduler.take_rejected()
                if plan is not None:
                    yield plan
            case "update":
                with suppress(ContradictionError):  # what became of it then is in the recording
                    scheduler.update(argument, now)
            case "fail":
                with suppress(ContradictionError):
                    scheduler.fail(argument, now)
            case "reset_prefix_cache":
                scheduler.reset_prefix_cache(now, argument)
            case "change_weights":
                scheduler.change_weights(argument[0], argument[1], now)
            case "pause":
                scheduler.pause(argument, now)
            case "resume":
                scheduler.resume(now)
            case "lose_workers":
                scheduler.lose_workers(argument, now)
            case "give_up":
                scheduler.give_up_policy(argument, now)
            case "change_policy":
                scheduler.change_policy(argument[0], argument[1], now)
            case "decide":
                pass  # what came of it: `decisions.ToldPolicy`
            case "finish":
                stops = [(scheduler.sequence((f, rid)), reason, stop) for (f, rid), reason, stop in argument]
                scheduler.finish([(s, reason, stop) for s, reason, stop in stops if s is not None], now)
            case _:
                raise ValueError(f"a recording has no call {call!r}")
