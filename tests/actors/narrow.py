"""Actors in whose processes messages, and what may wait of them, are small: so a few KiB are what megabytes are elsewhere."""

from __future__ import annotations

from typing import Any

from actorllm.actors import detokenization, output_buffer
from actorllm.actors.scheduler import SchedulerActor
from actorllm.actors.worker import WorkerActor
from actorllm.ring import channel

RESULT_CAPACITY = 1 << 12
"""Bytes of the ring that carries results: one log-probability of every token of the vocabulary is 33 KB."""
OUTPUT_CAPACITY = 1 << 14
"""Of the rings that carry outputs."""
MAX_OUTBOX_BYTES = 1 << 15
MAX_MESSAGE_BYTES = 1 << 18
"""To a frontend; a token with all its log-probabilities and their texts is 70 KB."""
MAX_OUTPUT_BYTES = 1 << 16
MAX_HELD_LOGPROBS = 1 << 13


class NarrowSender(channel.Sender):
    limits: dict[str, int]

    def __init__(self, writer: Any, **given: Any) -> None:
        super().__init__(writer, **given | self.limits)


def lower(**limits: int) -> None:
    """What this process may send over the links that it opens from now on."""
    NarrowSender.limits = limits
    channel.Sender = NarrowSender  # type: ignore[misc]


class NarrowWorkerActor(WorkerActor):
    def __init__(self, *args: Any) -> None:
        lower(max_outbox_bytes=MAX_OUTBOX_BYTES)
        super().__init__(*args)


class NarrowSchedulerActor(SchedulerActor):
    def __init__(self, *args: Any) -> None:
        lower(max_message_bytes=MAX_MESSAGE_BYTES)
        detokenization.MAX_OUTPUT_BYTES = MAX_OUTPUT_BYTES
        output_buffer.MAX_HELD_LOGPROBS = MAX_HELD_LOGPROBS
        super().__init__(*args)


class StrictSchedulerActor(SchedulerActor):
    """Cannot send all the log-probabilities of any token."""

    def __init__(self, *args: Any) -> None:
        lower(max_message_bytes=1 << 15)
        super().__init__(*args)
