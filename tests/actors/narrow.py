"""Actors in whose processes messages, and what may wait of them, are small: so a few KiB are what megabytes are elsewhere."""

from __future__ import annotations

from typing import Any

from actorllm.actors.worker import WorkerActor
from actorllm.ring import channel

RESULT_CAPACITY = 1 << 12
"""Bytes of the ring that carries results: one log-probability of every token of the vocabulary is 33 KB."""
MAX_OUTBOX_BYTES = 1 << 15


def lower(**limits: int) -> None:
    """For the links that this process opens from now on."""
    for opener in (channel.open_hub, channel.open_spoke):
        assert opener.__kwdefaults__ is not None
        assert limits.keys() <= opener.__kwdefaults__.keys()
        opener.__kwdefaults__.update(limits)


class NarrowWorkerActor(WorkerActor):
    def __init__(self, *args: Any) -> None:
        lower(max_outbox_bytes=MAX_OUTBOX_BYTES)
        super().__init__(*args)
