"""Calls of an application's functions in the workers (`collective_rpc`): what a worker and the scheduler actor do for one.

The scheduler actor asks all ranks between two steps, with none in flight. What a function raises is the answer of its rank, and the
worker lives on. A call that is asked once more, by a scheduler that took another's place, is answered and not made again.
"""

from __future__ import annotations

import contextlib
import inspect
import math
import os
import traceback
from collections.abc import Callable, Sequence
from functools import partial
from typing import TYPE_CHECKING, Any, Protocol, TypeAlias

import numpy as np
from numpy.typing import NDArray

from actorllm.actors.call_values import decode_value, encode_value
from actorllm.actors.link import Link
from actorllm.actors.memory_file import MemoryFile, told_of
from actorllm.errors import EngineError, InvalidParameterError, PeerLostError, nearest_name
from actorllm.ring import codec
from actorllm.types.import_path import load_object

if TYPE_CHECKING:
    from actorllm.actors.step_gate import StepGate
    from actorllm.model.rank_worker import RankWorker
    from actorllm.model.updates.tensor_files import TensorFile

U8: TypeAlias = NDArray[np.uint8]

MAX_TRACEBACK = 20_000
"""Characters of what is told of where a function raised."""
LONGEST_CALL_S = 1e9
"""A function takes as long as it takes."""


class WorkerCalls:
    """Of one rank, whose functions get `worker`."""

    def __init__(self, worker: RankWorker) -> None:
        self._worker = worker
        self._last: tuple[str, U8] | None = None
        """The newest call, by its identity, and the answer."""
        self._file: TensorFile | None = None
        """What a call has brought last, for the engine, which may not have opened it yet."""

    def answer(self, identity: str, target: str, is_of_model: bool, data: U8) -> U8:
        """What a function returns, or what it raises. data: its arguments."""
        if self._last is None or self._last[0] != identity:
            self._last = None
            self._last = identity, self._outcome(target, is_of_model, data)
        return self._last[1]

    def _outcome(self, target: str, is_of_model: bool, data: U8) -> U8:
        try:
            arguments = decode_value(data)
            if is_of_model:
                value = load_object(target)(self._worker.get_model())
            else:
                value = self._function(target)(*arguments["args"], **arguments["kwargs"])
            if inspect.iscoroutine(value):
                value.close()
                raise TypeError(f"{target} is a coroutine function; workers call plain functions")
            return encode_value({"value": value, **self._weights()}, "the result")
        except Exception as error:  # of the application's function: the answer of this rank
            self._worker.take_weights()  # a call that fails brings nothing
            told = "".join(traceback.format_exception(error))[-MAX_TRACEBACK:]
            error.__traceback__ = None  # its frames may hold tensors of the model
            text = f"{type(error).__name__}: {error}"[:MAX_TRACEBACK].encode(errors="replace").decode()
            return encode_value({"error": text, "traceback": told.encode(errors="replace").decode()}, "the error")

    def _weights(self) -> dict[str, str]:
        """Where the engine finds what the call has brought; nothing: it has brought nothing, or another rank tells."""
        tensors = self._worker.take_weights()
        if not tensors or self._worker.rank or self._worker.replica:  # all ranks are given the same
            return {}
        from actorllm.model.updates.tensor_files import file_of_tensors

        self._forget_weights()
        self._file = file_of_tensors(tensors, partial(MemoryFile, "weights"))
        return {"weights": told_of(self._file.path)}

    def note_committed(self, overlays: Sequence[str]) -> None:
        """A version counts that lies over these files: what a call has brought is forgotten if it is one of them."""
        file = self._file
        if file is None:
            return
        for path in overlays:
            with contextlib.suppress(OSError):  # it is of an engine on another machine
                if os.path.samefile(path, file.path):
                    self._forget_weights()
                    return

    def _forget_weights(self) -> None:
        file, self._file = self._file, None
        if file is not None:
            file.close()

    def _function(self, target: str) -> Callable[..., Any]:
        """A method of the worker; or a function at a path, which gets the worker before its arguments."""
        if ":" in target:
            function = load_object(target)
            return lambda *args, **kwargs: function(self._worker, *args, **kwargs)
        method: Callable[..., Any] | None = getattr(self._worker, target, None)
        if method is None or not callable(method):
            known = [name for name in dir(self._worker) if not name.startswith("_")]
            raise InvalidParameterError(
                f"the worker has no method {target!r}, worker_extension_cls would add it, and a function is called by its path, "
                f"'module:function'{nearest_name(target, known)}"
            )
        return method


class CallingHost(Protocol):
    """What calls ask of the scheduler actor."""

    async def ask_all(self, link: Link, verb: str, timeout: float = ..., **arguments: Any) -> list[Any]: ...


async def call_all_ranks(host: CallingHost, link: Callable[[], Link], gate: StepGate, arguments: dict[str, Any]) -> U8:
    """The answers of all ranks, in their order, as one; workers that are being started again are waited for.

    link: to the workers of the time. Raises EngineError: one has ended during the call.
    """
    async with gate.closed_with_workers():
        try:
            answers = await host.ask_all(link(), "call_worker", math.inf, **arguments)
        except PeerLostError as lost:
            raise EngineError(f"a worker ended during the call: {lost}") from None
    return np.frombuffer(b"".join(codec.encode(None, answers)), np.uint8)


def answers_of(data: U8) -> list[Any]:
    """What `call_all_ranks` returned, by rank: {"value": ...}, or {"error": ..., "traceback": ...}.

    Beside a value may stand "weights": where new ones are that the call has brought, as of `memory_file.told_of`.
    """
    _, answers = codec.decode(data.tobytes())
    return [decode_value(answer) for answer in answers]
