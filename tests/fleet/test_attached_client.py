"""What a program that has joined does with what the owner tells of its replicas, without the owner."""

from __future__ import annotations

import dataclasses
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
from actorllm.errors import AttachError, EngineDeadError
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


def test_a_program_that_cannot_make_the_router_of_the_owner_does_not_join(monkeypatch: pytest.MonkeyPatch) -> None:
    """The connection is closed at once, so that the owner does not take this for a program that is about to join."""
    control, other = socket.socketpair()
    config = EngineConfig.from_arguments("storyteller", data_parallel_size=2)
    met = Met("tale", control, dataclasses.replace(config, router="no_such:Router"), 0, 0)
    monkeypatch.setattr(attached, "meet", lambda name: met)
    with pytest.raises(
        AttachError, match=r"engine 'tale' cannot be joined.*No module named 'no_such'; put the module of"
    ):
        attached.attach("tale")
    assert other.recv(1) == b""
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


@pytest.mark.parametrize(("before", "now"), [("keep", None), (None, "wait")])
async def test_a_replica_begins_its_next_life_as_the_others_are(before: str | None, now: str | None) -> None:
    """While it was lost the owner, or another program, has resumed or paused them."""
    async with joined() as client:
        lost, other = client.replicas.values()
        lost.frontend.assume_paused(before)
        client._lose(lost, EngineDeadError("its scheduler died"))
        other.frontend.assume_paused(now)
        asked: list[tuple[str, str]] = []

        async def ask(link: Any, verb: str, *_: Any, mode: str, **arguments: Any) -> None:
            asked.append((verb, mode))

        lost.frontend.ask = ask  # type: ignore[method-assign, assignment]
        lost.frontend.start_soon = client._tasks.start_soon  # type: ignore[method-assign, assignment]
        lost.frontend.on_link(FakeLink("scheduler"))  # type: ignore[arg-type]
        await anyio.wait_all_tasks_blocked()
        assert asked == ([] if now is None else [("pause_generation", now)])
        assert lost.frontend.is_linked
        assert lost.frontend.pause_mode == now


async def test_the_owner_is_asked_for_a_link_until_there_is_one(monkeypatch: pytest.MonkeyPatch) -> None:
    """It may have no memory for one now. Each time it is asked later."""
    monkeypatch.setattr(attached, "LOSS_GRACE_S", 0.0)
    monkeypatch.setattr(attached, "FIRST_PAUSE_S", 0.001)
    async with joined() as client:
        sent: list[dict[str, Any]] = []
        client._send = lambda op, **fields: sent.append({"op": op, **fields})  # type: ignore[method-assign]
        await client._do({**LOST, "error": "it sent nonsense"}, ())
        await until(lambda: len(sent) >= 3)
        num_sent = len(sent)
        assert sent == [{"op": "relink", "replica": 0, "link": LOST["link"]}] * num_sent
        assert client.replicas[0].pause_s == pytest.approx(0.001 * 2**num_sent)
        client.replicas[0].is_lost = False
        await anyio.sleep(0.02)
        assert len(sent) == num_sent
