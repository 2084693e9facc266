"""`LaunchedEngine`: one rank of those that a launcher has started, as the engine behind `LLM`.

On rank 0 it is an engine like any with topology="inline", whose worker tells the others what to compute. On the other ranks nothing
is scheduled. A call there computes what rank 0 plans, until the same call has ended on rank 0, and returns what that has returned.
So every rank must make the same calls in the same order. What is asked of the engine itself (statistics, say) rank 0 answers.
"""

from __future__ import annotations

from collections.abc import Callable
from concurrent.futures import Future
from functools import partial, wraps
from typing import TYPE_CHECKING, Any, Concatenate, ParamSpec, TypeVar

from actorllm.client.collective_calls import Called, call_arguments
from actorllm.client.engine import Engine
from actorllm.client.launched.outcome import outcome_of, taken
from actorllm.config import EngineConfig
from actorllm.errors import EngineDeadError, EngineError
from actorllm.types.launch import LaunchedRank

if TYPE_CHECKING:
    from actorllm.model.launched.launched_runners import FollowingRunner

T = TypeVar("T")
P = ParamSpec("P")
D = TypeVar("D")

_OUTCOMES: list[bytes] = []
"""What the call that is ending has brought, on its way to the worker's thread; one at most."""


class LaunchedEngine(Engine):
    """See the module docstring."""

    def __init__(self, config: EngineConfig) -> None:
        self.rank = LaunchedRank.of_environment().rank
        self._follower: FollowingRunner | None = None
        self._is_in_call = False
        self._has_left = False
        super().__init__(config)

    def start(self) -> None:
        if not self.rank:
            super().start()
        elif self._follower is None:
            from actorllm.model.launched.launched_runners import FollowingRunner

            self._follower = FollowingRunner(self.config, self.rank)

    def run(self, call: Callable[[], T]) -> T:
        """A call that every rank makes. Returns, or raises, what it does on rank 0."""
        if self._is_in_call:
            return call()
        if self.rank:
            self.start()
            result: T = taken(self._follow())
            return result
        self._is_in_call = True
        try:
            body, value, error = outcome_of(call)
            # Behind the last step, on the thread that computes: all ranks enter everything in one order.
            target = "actorllm.client.launched.launched_engine:tell_end"
            _OUTCOMES[:] = [body]  # one that was left belongs to a call whose end could not be told
            super().call_workers(target, call_arguments((), None)).result()
        finally:
            self._is_in_call = False
        if error is not None:
            raise error
        return value  # type: ignore[no-any-return]

    def _follow(self) -> bytes:
        """What the call has brought on rank 0. A rank that leaves a call before it ends leaves for good: the others wait for it."""
        assert self._follower is not None
        if self._has_left:
            raise EngineDeadError(
                f"rank {self.rank} has left a call before it ended, and cannot go on; make the LLM again"
            )
        try:
            return self._follower.follow()
        except BaseException:
            self._has_left = True
            self._follower.close()
            raise

    def submit(self, *arguments: Any, **keywords: Any) -> Any:
        self._check_call("requests are submitted")
        return super().submit(*arguments, **keywords)

    def encode(self, *arguments: Any, **keywords: Any) -> Any:
        self._check_call("requests are submitted")
        return super().encode(*arguments, **keywords)

    def ask_scheduler(self, verb: str, **arguments: Any) -> Future[Any]:
        if self.rank:
            raise EngineError(f"rank {self.rank} computes what rank 0 plans; ask that one")
        return super().ask_scheduler(verb, **arguments)

    def set_policy(self, scheduling_policy: str | None, admission_policy: str | None) -> Future[None]:
        """Raises EngineError but on rank 0, which alone plans."""
        if self.rank:
            raise EngineError(f"rank {self.rank} computes what rank 0 plans; change the policy there")
        return super().set_policy(scheduling_policy, admission_policy)

    def call_workers(self, target: str, data: Any, **keywords: Any) -> Future[Called]:
        """Raises EngineError: only rank 0 would be called."""
        raise EngineError(
            f"{target!r}: functions are not called on ranks that a launcher has started; call it in each program"
        )

    def read_weights(self, *arguments: Any, **keywords: Any) -> Future[Any]:
        """Raises EngineError: only rank 0 would compute with them."""
        raise EngineError("weights are not updated on ranks that a launcher has started; make the LLM again")

    def _check_call(self, what: str) -> None:
        if not self._is_in_call:
            raise EngineError(
                f"under a launcher {what} by generate(), chat() and encode() alone, which every rank calls"
            )

    def shutdown(self, timeout: float = 5.0) -> None:
        if self._follower is not None:
            self._follower.close()
        super().shutdown(timeout)


def tell_end(worker: Any) -> None:
    """On the thread of rank 0's worker: the call has ended, with the outcome that was left for this."""
    from actorllm.model.launched.plan_channel import Told

    worker.model_runner.channel.tell(Told.END, _OUTCOMES.pop())


def on_all_ranks(method: Callable[Concatenate[D, P], T]) -> Callable[Concatenate[D, P], T]:
    """A method of `LLM` that every rank calls, where a launcher has started them."""

    @wraps(method)
    def calling(door: D, /, *args: P.args, **kwargs: P.kwargs) -> T:
        engine = door._engine  # type: ignore[attr-defined]
        if isinstance(engine, LaunchedEngine):
            return engine.run(partial(method, door, *args, **kwargs))
        return method(door, *args, **kwargs)

    return calling
