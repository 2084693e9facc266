"""Who is told what of links, over children that only note it down."""

from __future__ import annotations

import errno
from dataclasses import dataclass, field
from typing import Any, cast

import pytest

from actorllm.actors.topology import ActorSpec, LinkSpec
from actorllm.errors import PeerRestartedError, SharedMemoryError
from actorllm.ring.channel import create_link
from actorllm.supervision import wiring
from actorllm.supervision.children import Child
from actorllm.supervision.wiring import Wiring


@dataclass
class Noting:
    """A child with which nothing happens."""

    spec: ActorSpec
    is_linkable: bool = True
    installed: list[int] = field(default_factory=list)
    lost: list[int] = field(default_factory=list)

    def install_ring(self, info: Any, end: Any) -> None:
        self.installed.append(end.generation)
        end.close()

    def lose(self, link: str, generation: int, error: Exception) -> None:
        self.lost.append(generation)


@pytest.fixture
def children() -> dict[str, Noting]:
    return {name: Noting(ActorSpec(name, "nowhere:Nobody", 0, "process")) for name in ("scheduler", "worker0")}


def test_all_links_of_an_actor_are_made_or_none(children: dict[str, Noting], monkeypatch: pytest.MonkeyPatch) -> None:
    """Who tries again finds everything as it was."""
    children["frontend"] = Noting(ActorSpec("frontend", "nowhere:Nobody", 0, "process"))
    links = [LinkSpec.pair("frontend", "scheduler"), LinkSpec.broadcast("steps", "scheduler", ["worker0"])]
    tree = Wiring(cast(dict[str, Child], children), links)
    is_full = True

    def create(*arguments: Any) -> Any:
        if is_full and made:
            raise SharedMemoryError(errno.ENOSPC, "full")
        made.append(create_link(*arguments))
        return made[-1]

    made: list[Any] = []
    monkeypatch.setattr(wiring, "create_link", create)
    with pytest.raises(SharedMemoryError, match="full"):
        tree.connect("scheduler")
    assert [child.installed for child in children.values()] == [[], [], []]
    assert tree.generations == {}
    tree.connect("scheduler", without=["worker0", "frontend"])
    assert tree.generations == {}
    is_full = False
    tree.connect("scheduler")
    assert [child.installed for child in children.values()] == [[1, 1], [1], [1]]
    assert tree.peers_of(["scheduler"]) == {"worker0", "frontend"}


def test_who_is_being_started_again_hears_nothing_of_links_that_it_never_had(children: dict[str, Noting]) -> None:
    """Its first frame must be the start: any other would end it, and count as a failed attempt."""
    wiring = Wiring(cast(dict[str, Child], children), [LinkSpec.broadcast("steps", "scheduler", ["worker0"])])
    wiring.connect("scheduler")
    assert children["worker0"].installed == [1]
    wiring.lose(["worker0"], PeerRestartedError("the worker died"))
    assert children["scheduler"].lost == [1]
    children["worker0"] = Noting(children["worker0"].spec, is_linkable=False)
    wiring.lose(["scheduler"], PeerRestartedError("the scheduler died meanwhile"))
    assert children["worker0"].lost == []
    children["scheduler"] = Noting(children["scheduler"].spec)
    wiring.connect("scheduler")
    assert children["scheduler"].installed == []
    children["worker0"].is_linkable = True
    wiring.connect("worker0")
    assert children["scheduler"].installed == children["worker0"].installed == [2]
