"""`JoinedNode`: the stream of a program that has joined an engine to the agent of a replica on another machine, and its link.

The owner of the engine says where the replica is (`RemoteReplica.place`). The program calls the agent itself, so no token passes
through the owner. On the node a relay of its own stands for its frontend, beside the one of the owner.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import anyio
from anyio import to_thread

from actorllm import __version__
from actorllm.actors.actor import own_class
from actorllm.actors.link import LinkInfo
from actorllm.errors import ActorLLMError, CorruptLinkError, EngineDeadError, EngineStartError
from actorllm.fleet.nodes.hosts import CONNECT_TIMEOUT_S, connect_to, read_address, tls_of
from actorllm.fleet.nodes.node_stream import NodeStream
from actorllm.fleet.nodes.stream_link import StreamLink


class JoinedNode:
    """See the module docstring.

    Arguments:
        place: what the owner told of it.
        on_link: hears of each link that a scheduler there makes.
        on_lost: hears of a link that is lost, as a frame of the owner's tells it.
        on_leaving: hears that the node is told to end: what is there should move.
    """

    def __init__(
        self,
        place: Mapping[str, Any],
        on_link: Callable[[StreamLink], object],
        on_lost: Callable[[dict[str, Any]], object],
        on_leaving: Callable[[], object],
    ) -> None:
        self.error: ActorLLMError | None = None
        """Why it is over."""
        self._place = place
        self._on_link, self._on_lost, self._on_leaving = on_link, on_lost, on_leaving
        self._stream: NodeStream | None = None
        self._link: StreamLink | None = None
        self._changed = anyio.Event()

    async def join(self) -> None:
        """Returns when the first link is there. Raises AttachError, EngineError."""
        place = self._place
        address = read_address(place["address"])
        tls = await to_thread.run_sync(tls_of, place["ca_file"])
        sock = await connect_to(address, bytes.fromhex(place["key"]), tls, CONNECT_TIMEOUT_S)
        stream = self._stream = NodeStream(
            sock,
            on_message=self._take,
            on_control=self._on_control,
            on_batch=self._on_batch,
            on_end=lambda error: self._end(EngineDeadError(f"node {address} is lost: {error}")),
            timeout_s=place["timeout_s"],
        )
        stream.start()
        with anyio.move_on_after(CONNECT_TIMEOUT_S):
            await stream.synchronize()
            stream.control("join", version=__version__, tenant=place["tenant"])
            while self._link is None and self.error is None:
                await self._wait()
        if self.error is not None:
            raise self.error
        if self._link is None:
            raise EngineStartError(f"node {address} gives no link within {CONNECT_TIMEOUT_S:g} s")

    @property
    def link(self) -> StreamLink:
        """The last one, once it was joined."""
        assert self._link is not None
        return self._link

    @property
    def clock_offset_s(self) -> float:
        """What the clock there shows minus what this one shows."""
        return 0.0 if self._stream is None else self._stream.offset.seconds

    async def wait_ended(self) -> ActorLLMError:
        """Why it is over."""
        while self.error is None:
            await self._wait()
        return self.error

    async def _wait(self) -> None:
        await self._changed.wait()
        self._changed = anyio.Event()

    def close(self) -> None:
        """Idempotent."""
        if self._stream is not None:
            self._stream.close()
        if self.error is None:
            self._end(EngineDeadError("it was left"))

    def _end(self, error: ActorLLMError) -> None:
        if self.error is None:
            self.error = error
        self._changed.set()

    # What comes

    def _take(self, generation: int, kind: int, body: bytes, num_bytes: int) -> bool:
        link = self._link
        return True if link is None or link.generation != generation else link.take(kind, body, num_bytes)

    def _on_batch(self) -> None:
        if self._link is not None:
            self._link.end_batch()

    def _on_control(self, frame: dict[str, Any], arrays: list[Any]) -> None:
        try:
            match frame["op"]:
                case "link":
                    assert self._stream is not None
                    link = StreamLink(LinkInfo.from_json(frame["info"]), self._stream, is_translating=True)
                    self._link = link
                    self._on_link(link)
                    self._changed.set()
                case "lost":
                    self._on_lost(frame)
                case "leaving":
                    self._on_leaving()
                case "ended":
                    cls = own_class(str(frame["type_name"])) or EngineStartError
                    self._end(cls(f"node {self._place['address']}: {frame['message']}"))
                case op:
                    raise ValueError(f"{op!r} is unknown")
        except (KeyError, TypeError, ValueError) as error:
            raise CorruptLinkError(f"a control frame {frame.get('op')!r} without sense: {error!r}") from error
