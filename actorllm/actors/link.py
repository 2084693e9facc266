"""What an actor holds of a peer: an ordered, bounded, lossless connection for the messages of `actorllm.messages`.

Two transports with one meaning. `RingLink` carries columns through shared memory between processes; `MemoryLink` hands
the objects themselves from one loop or thread to another. A link has a hub and one or more spokes. A pair has one spoke. A
broadcast (`Broadcast`) has a hub whose messages reach every spoke, and hears from each spoke apart.

Invariants:

- messages arrive in the order in which they were sent, each once; a full link refuses (`WouldBlock`), it never drops;
- a receiver runs on the loop that opened its end, at most once per wake-up of that loop for a whole batch;
- a link has one generation for its whole life. A restarted actor gets new links; nothing of an old link is reused;
- that the peer died is said by the supervisor (`Inbox.lose` of the runner), never guessed from a transport error.

The supervisor makes memory links itself; an actor makes ring links from descriptors that the supervisor sent. A link is used by
the one actor that it was made for, on its own loop only.
"""

from __future__ import annotations

import threading
from abc import ABC, abstractmethod
from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any, Never, Protocol

from numpy.typing import NDArray

from actorllm.actors.engine_thread import AsyncioLoop, current_loop
from actorllm.errors import CorruptLinkError, PeerLostError, PeerRestartedError, TransportError, WouldBlock
from actorllm.messages import Message, pack, unpack
from actorllm.ring.channel import Hub, LinkEnd, Spoke, open_hub, open_spoke

MAX_BATCH = 256
"""Messages handled per turn of the loop and link; the rest waits for the next turn, so that timers and peers get theirs."""

MEMORY_CAPACITY = 65_536
"""Messages that may wait in one direction of a memory link."""


class Inbox(Protocol):
    """Where a link delivers to: the runner of the actor. Nothing of it raises."""

    def deliver(self, link: Link, message: Message) -> None: ...

    def end_batch(self) -> None:
        """Everything that was there has been delivered."""

    def break_link(self, link: Link, error: BaseException) -> None:
        """The transport found something impossible; nothing further will be delivered."""


@dataclass(frozen=True, slots=True)
class LinkInfo:
    """One end of a link as its actor knows it. Travels as JSON, beside the descriptors of a ring."""

    name: str
    """Of the LinkSpec."""
    peer: str
    """The other actor; on the hub of a broadcast the name of the link, which stands for all spokes."""
    rank: int
    """Of the peer."""
    generation: int
    """1 for the first link of this name, one more with every new one."""
    index: int = 0
    """Which spoke: its own index on a spoke, that of the peer on a hub."""
    spokes: tuple[LinkInfo, ...] = ()
    """On the hub of a broadcast: every peer, in order of the index."""

    @classmethod
    def from_json(cls, tree: dict[str, Any]) -> LinkInfo:
        """From `dataclasses.asdict`, once through JSON."""
        return cls(**tree | {"spokes": tuple(cls.from_json(spoke) for spoke in tree["spokes"])})


@dataclass(frozen=True, slots=True)
class LinkStatistics:
    """A snapshot of one end."""

    peer: str
    generation: int
    num_sent: int
    num_received: int
    num_batches: int
    num_waiting: int
    """Sent, and not yet taken by the peer (for a ring: not yet in the ring)."""
    num_lost: int
    """Sent to an end that was closed already, or received after this end was closed."""
    fill: float
    """Share of the room for what is sent that is in use, 0 to 1."""
    fill_received: float
    """Share of the room for what is received that waits to be read; of a broadcast, that of the fullest spoke."""


class Link(ABC):
    """One end of a connection."""

    def __init__(self, info: LinkInfo) -> None:
        self.info = info
        self.name = info.name
        self.peer = info.peer
        self.rank = info.rank
        self.generation = info.generation
        self.is_open = True
        self.lost: BaseException | None = None
        """Why the peer is gone, once it is: what `Actor.on_peer_lost` finds."""
        self.group: Broadcast | None = None
        """The broadcast that this link is one spoke of, at the hub; None for every other link."""
        self._num_sent = 0
        self._num_received = 0
        self._num_batches = 0
        self._num_lost = 0

    @property
    def spokes(self) -> Sequence[Link]:
        """The peers one by one: the link itself, unless it is a broadcast."""
        return (self,)

    @abstractmethod
    def open(self, inbox: Inbox) -> None:
        """Begin to deliver, on the running loop. What was sent before is delivered first."""

    @abstractmethod
    def send_nowait(self, message: Message) -> None:
        """Send. Raises WouldBlock when the link is full (nothing was sent), PeerLostError when it is closed."""

    async def wait_flushed(self) -> None:  # noqa: B027 - in memory that is always so
        """Return when everything sent is where the peer finds it even if this end is closed."""

    @abstractmethod
    def recheck(self) -> bool:
        """Deliver what a lost wake-up left lying; True if there was anything. There should not be."""

    @abstractmethod
    def finish(self) -> None:
        """Deliver at once whatever the peer had sent; it is valid whether the peer lives or not."""

    @abstractmethod
    def close(self) -> None:
        """Release everything. The peer notices nothing: its supervisor tells it. Idempotent."""

    @abstractmethod
    def statistics(self) -> LinkStatistics:
        """A snapshot."""

    def _snapshot(self, num_waiting: int, fill: float, fill_received: float) -> LinkStatistics:
        return LinkStatistics(
            peer=self.peer,
            generation=self.generation,
            num_sent=self._num_sent,
            num_received=self._num_received,
            num_batches=self._num_batches,
            num_waiting=num_waiting,
            num_lost=self._num_lost,
            fill=fill,
            fill_received=fill_received,
        )

    def _refuse_closed(self) -> Never:
        kind = PeerRestartedError if isinstance(self.lost, PeerRestartedError) else PeerLostError
        raise kind(f"{self.peer} is gone: {self.lost or 'the link was closed'}") from self.lost

    def __repr__(self) -> str:
        state = "open" if self.is_open else "closed"
        return f"<{type(self).__name__} to {self.peer} generation {self.generation} {state}>"


class Broadcast(Link):
    """The hub's end of a link with several spokes: what is sent reaches each, what is received names its spoke.

    `Actor.on_link` and `on_peer_lost` get the broadcast (one spoke lost means that the group is); `on_message` gets the
    `HubSpoke` that the message came from.
    """

    def __init__(self, info: LinkInfo) -> None:
        super().__init__(info)
        self._spokes = tuple(HubSpoke(spoke, self) for spoke in info.spokes)

    @property
    def spokes(self) -> Sequence[Link]:
        """In order of their index."""
        return self._spokes


class HubSpoke(Link):
    """One peer of a broadcast, at the hub: the source of what it sends. Everything else is done with the group."""

    def __init__(self, info: LinkInfo, group: Broadcast) -> None:
        super().__init__(info)
        self.group = group

    def send_nowait(self, message: Message) -> None:
        raise TypeError(f"a broadcast reaches every spoke: send on {self.name!r}, not on its spoke {self.peer!r}")

    def open(self, inbox: Inbox) -> None:
        raise TypeError(f"{self.peer!r} is opened with {self.name!r}")

    def recheck(self) -> bool:
        return False

    def finish(self) -> None:
        raise TypeError(f"{self.peer!r} ends with {self.name!r}")

    def close(self) -> None:
        self.is_open = False

    def statistics(self) -> LinkStatistics:
        raise TypeError(f"{self.peer!r} is counted with {self.name!r}")


# In memory ------------------------------------------------------------------------------------------------------------


def connect_in_memory(infos: Sequence[LinkInfo], capacity: int = MEMORY_CAPACITY) -> list[Link]:
    """The ends of a new link within one process, in the order of `infos`: the hub, then every spoke."""
    hub, *spokes = infos
    far_ends = [MemoryLink(info, capacity) for info in spokes]
    first: Link
    if hub.spokes:
        first = MemoryBroadcast(hub, capacity)
        near_ends = first.lines
    else:
        first = MemoryLink(hub, capacity)
        near_ends = [first]
    for near, far in zip(near_ends, far_ends, strict=True):
        near.other, far.other = far, near
    return [first, *far_ends]


class MemoryLink(Link):
    """Objects handed over by reference, between two loops or within one.

    SYNC POINT inbox: the sender appends and then reads `_is_scheduled`; the receiver clears `_is_scheduled` and then
    takes. Whichever comes second sees the other's write, so a message is either in the batch or schedules the next.
    """

    def __init__(self, info: LinkInfo, capacity: int, source: Link | None = None) -> None:
        """source: what `Inbox.deliver` hears as the origin of messages; the link itself, outside of a broadcast."""
        super().__init__(info)
        self.other: MemoryLink
        self._capacity = capacity
        self._source = source or self
        self._messages: deque[Message] = deque()
        self._is_scheduled = False
        self._inbox: Inbox | None = None
        self._loop: AsyncioLoop | None = None
        self._thread = 0

    def open(self, inbox: Inbox) -> None:
        self._inbox = inbox
        self._thread = threading.get_ident()
        self._loop = current_loop()
        self._is_scheduled = True
        self._loop.call_soon(self._drain)

    def send_nowait(self, message: Message) -> None:
        if not self.is_open:
            self._refuse_closed()
        self.refuse_if_full()
        self.hand_over(message)

    def refuse_if_full(self) -> None:
        num_waiting = len(self.other._messages)
        if num_waiting >= self._capacity:
            raise WouldBlock(f"{num_waiting} messages wait for {self.peer}")

    def hand_over(self, message: Message) -> None:
        other = self.other
        self._num_sent += 1
        if not other.is_open:
            self._num_lost += 1  # as in a ring whose reader is gone: the supervisor says so in its own time
            return
        other._messages.append(message)
        if not other._is_scheduled:
            other._schedule()

    def _schedule(self) -> None:
        """From the sender's thread, or from `_drain`."""
        self._is_scheduled = True
        loop = self._loop
        if loop is None:
            return  # not opened yet; `open` drains
        if threading.get_ident() == self._thread:
            loop.call_soon(self._drain)
        else:
            loop.call_soon_threadsafe(self._drain)  # a closed loop: its actor is gone, which the supervisor reports

    def _drain(self) -> None:
        self._is_scheduled = False
        self._take(MAX_BATCH)
        if self._messages and not self._is_scheduled:
            self._schedule()

    def _take(self, limit: int) -> int:
        inbox, messages, source = self._inbox, self._messages, self._source
        if inbox is None:
            return 0
        num_taken = 0
        while messages and num_taken < limit and self.is_open:
            inbox.deliver(source, messages.popleft())
            num_taken += 1
        if num_taken:
            self._num_received += num_taken
            self._num_batches += 1
            inbox.end_batch()
        return num_taken

    def recheck(self) -> bool:
        return not self._is_scheduled and self._take(MAX_BATCH) > 0

    def finish(self) -> None:
        self._take(len(self._messages))

    def close(self) -> None:
        self.is_open = False
        self._num_lost += len(self._messages)
        self._messages.clear()

    def statistics(self) -> LinkStatistics:
        num_waiting = len(self.other._messages)
        return self._snapshot(num_waiting, num_waiting / self._capacity, len(self._messages) / self._capacity)


class MemoryBroadcast(Broadcast):
    """The hub of several memory links."""

    def __init__(self, info: LinkInfo, capacity: int) -> None:
        super().__init__(info)
        self.lines = [MemoryLink(spoke.info, capacity, source=spoke) for spoke in self._spokes]

    def open(self, inbox: Inbox) -> None:
        for line in self.lines:
            line.open(inbox)

    def send_nowait(self, message: Message) -> None:
        if not self.is_open:
            self._refuse_closed()
        for line in self.lines:  # all or none
            line.refuse_if_full()
        for line in self.lines:
            line.hand_over(message)
        self._num_sent += 1

    def recheck(self) -> bool:
        return sum(line.recheck() for line in self.lines) > 0  # each of them, so no any()

    def finish(self) -> None:
        for line in self.lines:
            line.finish()

    def close(self) -> None:
        for link in (self, *self._spokes):
            link.is_open = False
        for line in self.lines:
            line.close()

    def statistics(self) -> LinkStatistics:
        lines = [line.statistics() for line in self.lines]
        self._num_received = sum(line.num_received for line in lines)
        self._num_batches = sum(line.num_batches for line in lines)
        self._num_lost = sum(line.num_lost for line in lines)
        waiting, fill, fill_received = zip(*[(x.num_waiting, x.fill, x.fill_received) for x in lines], strict=True)
        return self._snapshot(max(waiting), max(fill), max(fill_received))


# Over rings -----------------------------------------------------------------------------------------------------------


def open_ring(info: LinkInfo, end: LinkEnd) -> Link:
    """The end of a link whose descriptors came from `ring.channel.create_link`; takes them over, also when it raises."""
    return RingBroadcast(info, end) if info.spokes else RingLink(info, end)


class _RingEnd(Link):
    """What is common to all ends over rings: a channel, and messages packed and unpacked."""

    def __init__(self, info: LinkInfo, end: LinkEnd) -> None:
        super().__init__(info)
        self._inbox: Inbox
        self._channel: Hub | Spoke
        if end.index is None:
            self._channel = open_hub(end, on_frame=self._on_frame, on_error=self._on_error, on_batch=self._on_batch)
        else:
            self._channel = open_spoke(
                end,
                on_frame=partial(self._on_frame, end.index),
                on_error=partial(self._on_error, end.index),
                on_batch=self._on_batch,
            )

    def open(self, inbox: Inbox) -> None:
        self._inbox = inbox
        self._channel.start()

    def send_nowait(self, message: Message) -> None:
        if not self.is_open:
            self._refuse_closed()
        self._channel.sender.send_nowait(*pack(message))
        self._num_sent += 1

    async def wait_flushed(self) -> None:
        await self._channel.sender.wait_flushed()

    def recheck(self) -> bool:
        return self._channel.recheck()

    def finish(self) -> None:
        self._channel.drain_nowait()

    def close(self) -> None:
        if self.is_open:
            self._num_lost += self._channel.sender.statistics().outbox_frames
            self._channel.close()
        for link in (self, *self.spokes):
            link.is_open = False

    def statistics(self) -> LinkStatistics:
        sender = self._channel.sender.statistics()
        received = [receiver.statistics().ring for receiver in self._channel.receivers]
        return self._snapshot(
            sender.outbox_frames,
            sender.ring.bytes_used / sender.ring.capacity,
            max([ring.bytes_waiting / ring.capacity for ring in received], default=0.0),
        )

    def _source(self, index: int) -> Link:
        return self

    def _on_frame(self, index: int, kind: int, scalars: Any, arrays: list[NDArray[Any]]) -> None:
        try:
            message = unpack(kind, scalars, arrays)
        except ValueError as error:
            receivers = self._channel.receivers
            receiver = receivers[index] if self.info.spokes else receivers[0]
            receiver.fail(CorruptLinkError(f"a frame of {self._source(index).peer} is no message: {error}"))
            return
        self._num_received += 1
        self._inbox.deliver(self._source(index), message)

    def _on_batch(self) -> None:
        self._num_batches += 1
        self._inbox.end_batch()

    def _on_error(self, index: int | None, error: TransportError) -> None:
        self._inbox.break_link(self, error)


class RingLink(_RingEnd):
    """An end of a pair, or a spoke's end of a broadcast."""


class RingBroadcast(_RingEnd, Broadcast):
    """The hub of one ring that every spoke reads, and of one ring from each spoke."""

    def _source(self, index: int) -> Link:
        return self._spokes[index]
