"""`RankTransfers`: has all ranks of all replicas bring new weights, and take part in the group of a trainer. A part of `Engine`.

Runs on the engine's thread. One at a time: broadcasts of a group have an order.
"""

from __future__ import annotations

import logging
import math
import secrets
import threading
from collections.abc import Callable, Mapping, Sequence
from typing import Any, Protocol

from actorllm.actors.call_values import encode_value
from actorllm.client.transports.jobs import RankJob
from actorllm.client.weight_updates import NewWeights
from actorllm.errors import ActorLLMError, EngineError, InvalidParameterError, shown

logger = logging.getLogger(__name__)


class TransferredEngine(Protocol):
    """What transfers ask of their engine."""

    async def ask_all_schedulers(self, verb: str, **arguments: Any) -> Any: ...


class RankTransfers:
    """See the module docstring."""

    def __init__(self, engine: TransferredEngine) -> None:
        self._engine = engine
        self._is_busy = False
        self.is_joined = False
        """The ranks are in the group of a trainer, as far as is known here."""

    async def join(self, place: Mapping[str, Any]) -> None:
        """Let the ranks meet a trainer. Raises InvalidParameterError; EngineError: they did not."""
        numbers = await self._numbers()
        first, world_size = place["rank_offset"], place["world_size"]
        if first + len(numbers) > world_size:
            raise InvalidParameterError(
                f"init_info: world_size={world_size} is too small for rank_offset={first} and the {len(numbers)} ranks of this "
                f"engine; give {first + len(numbers)} or more"
            )
        self.is_joined = True
        await self._alone("join", {**place, "numbers": numbers})

    async def leave(self) -> None:
        """The opposite. Does nothing where they have met none."""
        if self.is_joined:
            await self._alone("leave", {})
            self.is_joined = False

    async def bring(self, job: RankJob) -> NewWeights:
        """What the ranks have filled, taken over. Raises what one of them raised; then nothing is kept."""
        try:
            told: dict[str, Any] = {"path": job.file.path}
            if job.offer is not None:
                numbers = await self._numbers()
                told |= {**job.offer.open(len(numbers)), "numbers": numbers}
                with _Sending(job.offer.send):
                    answers = await self._alone(job.what, told)
            else:
                if job.by_device is not None:
                    told |= _opener(await self._alone("device", {}), job.by_device)
                elif not all(answer["is_joined"] for answer in await self._alone("number", {})):
                    raise EngineError(
                        "a rank is not in the group of a trainer: none was met, the group has failed, or the rank was started "
                        "since; start the trainer's group again, and call init_weight_transfer_engine"
                    )
                answers = await self._alone(job.what, told)
            if not any(answer.get("has_written") for answer in answers):
                raise EngineError(
                    "the rank that keeps new weights is not there, and nothing was changed; bring them again"
                )
        except BaseException:
            job.close()
            raise
        return NewWeights(tensor_files=[job.file])

    async def _numbers(self) -> list[int]:
        """By which the ranks know themselves, those of all replicas."""
        return sorted(answer["number"] for answer in await self._alone("number", {}))

    async def _alone(self, what: str, values: Mapping[str, Any]) -> list[dict[str, Any]]:
        if self._is_busy:
            raise EngineError("weights are brought at this moment; wait for that, or for the timeout of its trainer")
        self._is_busy = True
        try:
            arguments = {
                "identity": secrets.token_hex(16),
                "what": what,
                "data": encode_value(dict(values), "the transfer"),
            }
            answers: list[dict[str, Any]] = await self._engine.ask_all_schedulers(
                "transfer_weights", timeout=math.inf, **arguments
            )
            return answers
        finally:
            self._is_busy = False


class _Sending:
    """This program is the trainer, on a thread that ends when the ranks have everything, or when one of them fails."""

    def __init__(self, send: Callable[[Callable[[], bool]], None]) -> None:
        self._is_over = threading.Event()
        self._thread = threading.Thread(target=self._run, args=(send,), name="actorllm:send", daemon=True)

    def __enter__(self) -> None:
        self._thread.start()

    def __exit__(self, *_: object) -> None:
        self._is_over.set()

    def _run(self, send: Callable[[Callable[[], bool]], None]) -> None:
        try:
            send(self._is_over.is_set)
        except ActorLLMError as error:  # the ranks fail, too, and the caller is told by them
            logger.debug("sending weights to the ranks: %s", error)


def _opener(answers: list[dict[str, Any]], by_device: Sequence[Mapping[str, Any]]) -> dict[str, Any]:
    """Which rank opens the tensors, and by which handles: the first one on whose GPU all of them are."""
    for answer in answers:
        if all(answer["device"] in handles for handles in by_device):
            return {"number": answer["number"], "handles": [handles[answer["device"]] for handles in by_device]}
    there = ", ".join(sorted({answer["device"] for answer in answers}))
    raise InvalidParameterError(
        f"ipc_handles are of {shown(sorted(by_device[0]))}, and the ranks are on {there}; share tensors on one of those GPUs, or "
        f"use transport='shm'"
    )
