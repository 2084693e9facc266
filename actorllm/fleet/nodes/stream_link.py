"""`StreamLink`: a link (`actors.link`) over a stream between machines. Points in time are translated at this end."""

from __future__ import annotations

from collections import deque

from actorllm.actors.link import Inbox, Link, LinkInfo, LinkStatistics
from actorllm.errors import CorruptLinkError, TransportError, WouldBlock
from actorllm.fleet.nodes.frames import BULK, CHUNK_BYTES, ORDERED
from actorllm.fleet.nodes.node_stream import WINDOW_BYTES, NodeStream
from actorllm.messages import Message, Reply, pack, unpack
from actorllm.messages.times import translate, translated
from actorllm.ring.channel import DEFAULT_MAX_OUTBOX_BYTES
from actorllm.ring.codec import decode, encode


class StreamLink(Link):
    """One end. Replies that are longer than a chunk may be overtaken by later messages; everything else keeps its order.

    Arguments:
        info: as of every link; its generation tells its frames from those of the links before it.
        stream: owned and closed by its maker.
        is_translating: whether this end translates times. One of the two does.
    """

    def __init__(self, info: LinkInfo, stream: NodeStream, *, is_translating: bool) -> None:
        super().__init__(info)
        self._stream = stream
        self._is_translating = is_translating
        self._inbox: Inbox | None = None
        self._early: deque[tuple[int, bytes, int]] = deque()  # before `open`, bounded by the window
        self._early_bytes = 0
        self._num_in_batch = 0

    def open(self, inbox: Inbox) -> None:
        self._inbox = inbox
        early, self._early = self._early, deque()
        for kind, body, num_bytes in early:
            self._deliver(kind, body)
            self._stream.release(num_bytes)
        self._early_bytes = 0
        self.end_batch()
        if self._stream.error is not None:
            inbox.break_link(self, self._stream.error)

    @property
    def num_sent(self) -> int:
        """Messages, so far."""
        return self._num_sent

    def send_nowait(self, message: Message) -> None:
        if not self.is_open:
            self._refuse_closed()
        if self._is_translating:
            message = translated(message, self._stream.offset.seconds)
        kind, scalars, arrays = pack(message)
        buffers = encode(scalars, arrays)
        is_long = isinstance(message, Reply) and sum(map(len, buffers)) > CHUNK_BYTES
        if not self._stream.is_open:
            self._num_sent += 1
            self._num_lost += 1  # as in a ring whose reader is gone: the owner of the stream says so in its own time
            return
        if not self._stream.send(kind, buffers, self.generation, BULK if is_long else ORDERED):
            raise WouldBlock(f"{self._stream.outbox_bytes} bytes wait to be sent to {self.peer}")
        self._num_sent += 1
        self._stream.flush()

    async def wait_flushed(self) -> None:
        await self._stream.wait_flushed()

    def take(self, kind: int, body: bytes, num_bytes: int) -> bool:
        """A message has come (`node_stream.OnMessage`)."""
        if not self.is_open:
            self._num_lost += 1
            return True
        if self._inbox is None:
            self._early.append((kind, body, num_bytes))
            self._early_bytes += num_bytes
            return False
        self._deliver(kind, body)
        return True

    def end_batch(self) -> None:
        """Everything that has come is delivered."""
        if self._num_in_batch and self._inbox is not None:
            self._num_in_batch = 0
            self._num_batches += 1
            self._inbox.end_batch()

    def _deliver(self, kind: int, body: bytes) -> None:
        if not self.is_open:
            self._num_lost += 1
            return
        try:
            message = unpack(kind, *decode(body))
            if self._is_translating:
                translate(message, -self._stream.offset.seconds)
        except (ValueError, TypeError, IndexError, CorruptLinkError) as error:
            self._stream.fail(CorruptLinkError(f"a frame of {self.peer} is no message: {error}"))
            return
        self._num_received += 1
        self._num_in_batch += 1
        assert self._inbox is not None
        self._inbox.deliver(self, message)

    def break_link(self, error: TransportError) -> None:
        """The stream is over."""
        if self._inbox is not None and self.is_open:
            self._inbox.break_link(self, error)

    def recheck(self) -> bool:
        return False

    def finish(self) -> None:
        self._stream.read_now()

    def close(self) -> None:
        self.is_open = False
        for _, _, num_bytes in self._early:
            self._stream.release(num_bytes)
        self._num_lost += len(self._early)
        self._early.clear()

    def statistics(self) -> LinkStatistics:
        waiting = self._stream.outbox_bytes
        return self._snapshot(
            int(waiting > 0), min(1.0, waiting / DEFAULT_MAX_OUTBOX_BYTES), self._early_bytes / WINDOW_BYTES
        )
