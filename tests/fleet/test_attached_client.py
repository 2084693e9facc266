"""What a program that has joined does with what the owner tells of its replicas, without the owner."""

from __future__ import annotations

import socket
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import Any

import anyio
import numpy as np
import pytest

from actorllm import EngineConfig
from actorllm.attach.client import Met
from actorllm.client.stream import Mailbox
from actorllm.fleet import attached
from actorllm.fleet.attached import AttachedReplica, FleetAttachClient
from actorllm.messages import Submit
from tests.actors.scheduler_bench import FakeLink
from tests.fleet.streams import until

pytestmark = pytest.mark.anyio


@asynccontextmanager
async def joined(num_replicas: int = 2) -> AsyncIterator[FleetAttachClient]:
    """Each replica has a link that records."""
    control, other = socket.socketpair()
    config = EngineConfig.from_arguments("storyteller", data_parallel_size=num_replicas)
    client = FleetAttachClient(Met("tale", control, config, 0, 0))
    for number in range(num_replicas):
        replica = client.replicas[number] = AttachedReplica(number, client)
        replica.frontend.on_link(FakeLink("scheduler"))  # type: ignore[arg-type]
        replica.is_lost = False
    async with anyio.create_task_group() as client._tasks:
        yield client
        client._tasks.cancel_scope.cancel()
    client.close()
    other.close()


def submit_to(replica: Any) -> Mailbox:
    mailbox = Mailbox()

    def make(rid: int) -> Submit:
        return Submit(rid=rid, arrival=0.0, prompt=np.zeros(1, np.int32), max_tokens=9)

    replica.frontend.submit(make, mailbox, lambda rid: None)
    return mailbox


LOST = {"op": "lost", "replica": 0, "link": "scheduler-frontend", "generation": 1, "type_name": "EngineDeadError"}


async def test_streams_of_a_link_that_its_scheduler_has_dropped_go_on_elsewhere(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """The owner tells no more of it, since the replica lives."""
    monkeypatch.setattr(attached, "LOSS_GRACE_S", 0.0)
    async with joined() as client:
        mailbox = submit_to(client.replicas[0])
        await client._do({**LOST, "error": "it sent nonsense"}, ())
        await until(lambda: client.replicas[1].frontend.num_open == 1)
        assert mailbox.error is None
        assert client.replicas[0].state == "lost"
        assert client.replicas[0].frontend.num_open == 0


async def test_streams_of_a_link_that_comes_again_wait_for_it(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(attached, "LOSS_GRACE_S", 0.0)
    async with joined() as client:
        submit_to(client.replicas[0])
        await client._do({**LOST, "error": "it sent nonsense"}, ())
        client.replicas[0].is_lost = False
        await anyio.wait_all_tasks_blocked()
        assert client.replicas[0].frontend.num_open == 1
