"""`collective_rpc` and `apply_model`, as the front doors make them: functions by their paths, results by rank. A part of `Engine`.

Runs on the engine's thread, apart from the checks.
"""

from __future__ import annotations

import contextlib
import math
import secrets
from collections.abc import Mapping, Sequence
from concurrent.futures import Future
from typing import Any, NamedTuple, Protocol

import anyio

from actorllm.actors.call_values import encode_value
from actorllm.actors.memory_file import MemoryFile
from actorllm.actors.worker_calls import answers_of
from actorllm.errors import CollectiveCallError, InvalidParameterError, shown
from actorllm.types.import_path import MAX_PATH, is_import_path, path_of


class CalledEngine(Protocol):
    """What a call asks of its engine."""

    async def ask_all_schedulers(self, verb: str, **arguments: Any) -> Any: ...
    def starting(self) -> list[anyio.Event]: ...


class Called(NamedTuple):
    """What became of a call."""

    results: list[Any]
    """In the order of replicas and ranks."""
    weights: str | None
    """Where a worker has new weights that functions of the application gave to `load_weights`, as of `memory_file.told_of`;
    None: they gave none."""


def check_target(name: str, target: object, *, is_path: bool) -> str:
    """The method or the path that is to be called. Raises InvalidParameterError.

    Arguments:
        name: of the argument.
        is_path: a method will not do.
    """
    if isinstance(target, str):
        is_method = len(target) <= MAX_PATH and target.isidentifier() and not target.startswith("_")
        if is_import_path(target) or (not is_path and is_method):
            return target
        known = "'module:function'" if is_path else "the name of a method of the worker, or a path 'module:function'"
        raise InvalidParameterError(f"{name}={shown(target)} must be {known}")
    if not callable(target):
        raise InvalidParameterError(f"{name}={shown(target)} must be a path 'module:function'")
    path = path_of(target)
    if path is None:
        fix = "define it at the top of a module, and pass 'module:function'"
    else:
        fix = f"pass its path, {name}={path!r}"
    raise InvalidParameterError(f"{name}={shown(target)}: functions do not travel between processes; {fix}")


def check_timeout_of_call(timeout: object) -> float:
    """In seconds. Raises InvalidParameterError."""
    if timeout is None:
        return math.inf
    if isinstance(timeout, bool) or not isinstance(timeout, int | float) or not timeout > 0:
        raise InvalidParameterError(f"timeout={shown(timeout)} must be a positive number of seconds, or None")
    return float(timeout)


def call_arguments(args: object, kwargs: object) -> Any:
    """Both as bytes. Raises InvalidParameterError, naming what does not travel."""
    if isinstance(args, str) or not isinstance(args, Sequence):
        raise InvalidParameterError(f"args={shown(args)} must be a tuple or a list")
    if kwargs is not None and not isinstance(kwargs, Mapping):
        raise InvalidParameterError(f"kwargs={shown(kwargs)} must be a mapping")
    return encode_value({"args": list(args), "kwargs": dict(kwargs or {})}, "the arguments")


async def call_everywhere(engine: CalledEngine, target: str, data: Any, *, is_of_model: bool = False) -> Called:
    """What all ranks of all replicas return.

    Raises CollectiveCallError with what each of them raised; EngineError.
    """
    for has_started in engine.starting():  # a replica that starts is called, too
        await has_started.wait()
    arguments = {"identity": secrets.token_hex(16), "target": target, "is_of_model": is_of_model, "data": data}
    told = await engine.ask_all_schedulers("call_workers", timeout=math.inf, **arguments)
    return _results(target, told if isinstance(told, list) else [told])


async def result_within(calling: Future[Called], target: str, timeout: float) -> Called:
    """Of `call_everywhere`, on the loop that it runs on. A call that is waited for no longer goes on, and brings no weights.

    Raises as that does; TimeoutError after `timeout` seconds.
    """
    done = anyio.Event()
    calling.add_done_callback(lambda _: done.set())
    with anyio.move_on_after(timeout):
        try:
            await done.wait()
        except BaseException:  # the time is over, or the caller waits no more
            calling.add_done_callback(_forget)
            raise
        return calling.result()
    raise TimeoutError(
        f"{target!r} has not returned within {timeout:g} s; it goes on, and steps wait until it is through"
    )


def _forget(calling: Future[Called]) -> None:
    """Give back the memory of what a call has brought, if it has."""
    if not calling.cancelled() and calling.exception() is None:
        weights = calling.result().weights
        if weights is not None:
            _free(weights)


def _results(target: str, told: Sequence[Any]) -> Called:
    answers = [(replica, rank, a) for replica, one in enumerate(told) for rank, a in enumerate(answers_of(one))]
    results = [answer.get("value") for *_, answer in answers]
    failed = {i: answer for i, (*_, answer) in enumerate(answers) if "error" in answer}
    weights = next((answer["weights"] for *_, answer in answers if "weights" in answer), None)
    if not failed:
        return Called(results, weights)
    if weights is not None:
        _free(weights)
    where = [(f"replica {replica}, " if len(told) > 1 else "") + f"rank {rank}" for replica, rank, _ in answers]
    lines = "; ".join(f"{where[i]}: {answer['error']}" for i, answer in failed.items())
    error = CollectiveCallError(f"{target!r} failed on {len(failed)} of {len(answers)} ranks: {lines}")
    error.results, error.errors = results, {i: answer["error"] for i, answer in failed.items()}
    for i, answer in failed.items():
        error.add_note(f"On {where[i]}:\n{answer['traceback']}")
    raise error


def _free(weights: str) -> None:
    """Give back the memory of what a rank has brought, which is no version."""
    with contextlib.suppress(OSError):  # it is gone already
        MemoryFile.opened_as_told(weights).clear()
