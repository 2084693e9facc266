"""`Relay`: between the ring of a scheduler and a stream to another machine. Bodies are copied, and never decoded.

In the tree of a node's supervisor it stands in the place of the frontend (`RelayChild`), which is elsewhere. Of a link that is made
anew the other machine is told, as of one that is lost, in the order of the messages. What is of a link before is dropped.

Each side holds up the other. From a ring nothing is taken while the stream is full. What the ring has no room for stays in the
window of the stream.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable
from dataclasses import asdict
from typing import Any

from anyio.abc import TaskGroup

from actorllm.actors.engine_thread import AsyncioLoop, current_loop
from actorllm.actors.link import LinkInfo
from actorllm.actors.topology import ActorSpec
from actorllm.errors import ActorLLMError, CorruptLinkError, PeerLostError, TransportError, WouldBlock
from actorllm.fleet.nodes.frames import BULK, CHUNK_BYTES, ORDERED
from actorllm.fleet.nodes.node_stream import NodeStream
from actorllm.messages import KIND_OF, Reply
from actorllm.ring.channel import Hub, LinkEnd, Spoke, open_hub, open_spoke
from actorllm.supervision.children import Child
from actorllm.supervision.death import ActorDeath

REPLY = KIND_OF[Reply]
RETRY_S = 0.005
"""How soon what a full ring has refused is tried again."""


class Relay:
    """One end of a ring with one peer, and one generation of the link.

    on_error: hears of a ring that is corrupt.
    """

    def __init__(
        self, generation: int, stream: NodeStream, end: LinkEnd, on_error: Callable[[TransportError], None]
    ) -> None:
        self.generation = generation
        self._stream = stream
        self._on_error = on_error
        self._loop: AsyncioLoop = current_loop()
        self._to_stream: deque[tuple[int, bytes | memoryview]] = deque()  # the stream was full
        self._to_ring: deque[tuple[int, bytes, int]] = deque()  # the ring was full; bounded by the window
        self._is_retrying = False
        self._is_closing = False
        self.is_open = True
        self._ring: Spoke | Hub
        if end.index is None:  # of a rank, whose only spoke is here
            self._ring = open_hub(
                end, on_body=self._on_body, on_batch=stream.flush, on_error=lambda _, error: self._fail(error)
            )
        else:
            self._ring = open_spoke(end, on_body=self._on_body, on_batch=stream.flush, on_error=self._fail)
        self._receiver = self._ring.receivers[0]

    def start(self) -> None:
        self._ring.start()

    # From the ring

    def _on_body(self, kind: int, body: bytes | memoryview) -> None:
        if self._to_stream or not self._send(kind, body):
            self._to_stream.append((kind, body))
            if not self._is_closing:
                self._receiver.pause()

    def _send(self, kind: int, body: bytes | memoryview) -> bool:
        if not self._stream.is_open:
            return True
        lane = BULK if kind == REPLY and len(body) > CHUNK_BYTES else ORDERED
        return self._stream.send(kind, [body], self.generation, lane)

    def on_room(self) -> None:
        """The stream takes messages again."""
        while self._to_stream:
            kind, body = self._to_stream[0]
            if not self._send(kind, body):
                break
            self._to_stream.popleft()
        self._stream.flush()
        if not self._to_stream and self.is_open:
            self._receiver.resume()

    # From the stream

    def take(self, generation: int, kind: int, body: bytes, num_bytes: int) -> bool:
        """As `node_stream.OnMessage`."""
        if generation != self.generation or not self.is_open:
            return True  # of a link that is no more: the other end submits everything again
        if not self._to_ring and self._write(kind, body):
            return True
        self._to_ring.append((kind, body, num_bytes))
        self._retry_later()
        return False

    def _write(self, kind: int, body: bytes) -> bool:
        try:
            self._ring.sender.send_body_nowait(kind, body)
        except WouldBlock:
            return False
        except CorruptLinkError as error:
            self._fail(error)
        except (PeerLostError, ValueError):
            return True
        return True

    def _retry_later(self) -> None:
        if not self._is_retrying:
            self._is_retrying = True
            self._loop.call_later(RETRY_S, self._retry)

    def _retry(self) -> None:
        self._is_retrying = False
        while self._to_ring and self.is_open:
            kind, body, num_bytes = self._to_ring[0]
            if not self._write(kind, body):
                self._retry_later()
                return
            self._to_ring.popleft()
            self._stream.release(num_bytes)

    def recheck(self) -> None:
        """Make up for a missed doorbell."""
        if self.is_open:
            self._ring.recheck()

    # The end

    def _fail(self, error: TransportError) -> None:
        if self.is_open:
            self._on_error(error)

    def close(self) -> None:
        """What the scheduler had committed goes out first, up to what a full stream refuses. Idempotent."""
        if not self.is_open:
            return
        self._is_closing = True
        self._ring.drain_nowait()
        self.on_room()
        self.is_open = False
        self._ring.close()
        for _, _, num_bytes in self._to_ring:
            self._stream.release(num_bytes)
        self._to_ring.clear()
        self._to_stream.clear()  # lost with the link; what came behind the first of it would leave a gap


class RelayChild(Child):
    """The frontend of a replica, as the supervisor of its node sees it: elsewhere, behind a stream."""

    def __init__(self, spec: ActorSpec, on_end: Callable[[Any, ActorDeath], None], stream: NodeStream) -> None:
        super().__init__(spec, on_end)
        self.relay: Relay | None = None
        self._stream = stream

    @property
    def has_work(self) -> bool:
        """Always: whether the other machine waits is not known here."""
        return True

    async def spawn(self, tasks: TaskGroup, config: Any) -> None:
        self.phase = "starting"

    async def start(self, config: Any) -> dict[str, Any]:
        return {}

    async def configure(self, config: Any) -> None:
        self.phase = "configured"

    async def run(self) -> None:
        self.phase = "running"

    def install_ring(self, info: LinkInfo, end: LinkEnd) -> None:
        if self.relay is not None:
            self.relay.close()
        broken = info.name, info.generation
        self.relay = Relay(info.generation, self._stream, end, lambda error: self.on_broken(*broken, str(error)))
        self._stream.control("link", info=asdict(info))
        self.relay.start()

    def lose(self, link: str, generation: int, error: ActorLLMError) -> None:
        relay = self.relay
        if relay is not None and relay.generation == generation:
            relay.close()
            self.relay = None
        self._stream.control("lost", link=link, generation=generation, type_name=type(error).__name__, error=str(error))

    def take(self, generation: int, kind: int, body: bytes, num_bytes: int) -> bool:
        """As `node_stream.OnMessage`: for the ring, if there is one."""
        return True if self.relay is None else self.relay.take(generation, kind, body, num_bytes)

    def on_room(self) -> None:
        """The stream takes messages again."""
        if self.relay is not None:
            self.relay.on_room()

    def recheck(self) -> None:
        """As of the relay, now and then."""
        if self.relay is not None:
            self.relay.recheck()

    def request_stop(self) -> None:
        self.close()
        self.gone.set()

    def kill(self) -> None:
        self.gone.set()

    def close(self) -> None:
        relay, self.relay = self.relay, None
        if relay is not None:
            relay.close()
        self.gone.set()
