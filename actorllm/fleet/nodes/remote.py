"""`RemoteReplica`: what a fleet has in place of a supervisor for a replica on another machine.

Owns the stream to the agent there, and the frontend actor of the replica, which runs here. The agent has the supervisor. It
tells of links, of deaths, and of its end. When the stream breaks, whatever the reason, the replica is lost. Its requests go on
elsewhere, and the fleet makes it anew after a pause: it calls the agent again.

Invariants: an agent is never waited for without bound. What comes over the stream raises nothing into the loop.
"""

from __future__ import annotations

import contextlib
import logging
import math
import os
import socket
from collections.abc import Awaitable, Callable
from dataclasses import asdict, replace
from typing import Any, TypeVar

import anyio
from anyio import to_thread

from actorllm import __version__
from actorllm.actors.actor import own_class
from actorllm.actors.child import error_of_loss
from actorllm.actors.engine_thread import STOP_TIMEOUT_S, AsyncioLoop, current_loop
from actorllm.actors.frontend import FrontendActor
from actorllm.actors.link import LinkInfo
from actorllm.actors.load_board import LoadBoard
from actorllm.actors.topology import ActorSpec
from actorllm.config import EngineConfig
from actorllm.errors import (
    ActorLLMError,
    CorruptLinkError,
    EngineDeadError,
    EngineError,
    EngineShutdownError,
    EngineStartError,
    PeerRestartedError,
    TransportError,
)
from actorllm.fleet.nodes.fingerprint import model_digest
from actorllm.fleet.nodes.handshake import read_key
from actorllm.fleet.nodes.hosts import CONNECT_TIMEOUT_S, Located, connect_to, read_address, tls_of
from actorllm.fleet.nodes.load_mirror import apply_changes
from actorllm.fleet.nodes.node_stream import NodeStream
from actorllm.fleet.nodes.stream_link import StreamLink
from actorllm.supervision.children import OwnerChild
from actorllm.supervision.death import ActorDeath
from actorllm.supervision.health import ActorHealth, EngineHealth, EngineState

logger = logging.getLogger(__name__)

T = TypeVar("T")

LEAVE_TIMEOUT_S = 20.0
"""How long the requests of a node that is told to end may take to move, or to end. With the stop behind it that is less than the
30 s after which Kubernetes and clouds kill."""
LOOK_S = 0.05
"""Between two looks at what other programs have on a node that is told to end."""


class RemoteReplica:
    """See the module docstring. To a fleet it is as a supervisor (`supervision.supervisor`).

    Arguments:
        config: of the replica, as for a supervisor; its `node` says where it is.
        frontend: which runs here.
        on_fall: as of the supervisor.
        on_leaving: hears that the node is told to end: what is there should move.
        on_facts: hears what the workers said of themselves; what it raises ends the start.
        board: where routers look, and its row for this replica is `config.replica`.
        locate: finds or starts the agent, on a thread beside the loop; None: `config.node` is its address.
    """

    def __init__(
        self,
        config: EngineConfig,
        frontend: FrontendActor,
        *,
        on_fall: Callable[[str], None],
        on_leaving: Callable[[], None],
        on_facts: Callable[[dict[str, Any]], None],
        board: LoadBoard,
        locate: Callable[[], Located] | None = None,
    ) -> None:
        self.config = config
        self.failure: EngineDeadError | None = None
        self._locate = locate or self._given_place
        self._where = f"node {config.node}"
        self._frontend = frontend
        self._on_fall, self._on_leaving, self._on_facts = on_fall, on_leaving, on_facts
        self._board = board
        self._located: Located | None = None
        self._stream: NodeStream | None = None
        self._link: StreamLink | None = None
        self._child: OwnerChild | None = None
        self._phase = "new"
        self._ready: dict[str, Any] | None = None
        self._end: ActorLLMError | None = None
        self._has_ended = False
        self._is_leaving = False
        self._told: dict[str, Any] = {}
        self._rested_after: tuple[int, int] | None = None
        """The link and how many messages it had sent when the node was last told that nothing is waited for."""
        self._changed: anyio.Event | None = None
        self._loop: AsyncioLoop | None = None
        self._is_stop_requested = False
        self._stop_timeout_s = STOP_TIMEOUT_S
        self._until_stop: anyio.CancelScope | None = None
        """Around what a stop does not wait for."""

    # Life

    async def run(self, on_ready: Callable[[], object]) -> None:
        """As `Supervisor.run`. Raises AttachError, or what the start on the node raised."""
        if self._is_stop_requested:
            raise EngineShutdownError("the engine was shut down before it was started")
        self._changed = anyio.Event()
        self._loop = current_loop()
        self._phase = "starting"
        failure: Exception | None = None
        async with anyio.create_task_group() as tasks:
            try:
                await self._start(tasks)
                self._phase = "running"
                on_ready()
                await self._until(lambda: self._is_leaving)
                if self._is_leaving and self._end is None:
                    await self._leave()
            except Exception as error:  # raised outside of the group, which would wrap it
                failure = error
            finally:
                with anyio.CancelScope(shield=True):
                    await self._stop()
                tasks.cancel_scope.cancel()
        if failure is not None:
            raise failure

    async def _unless_stopped(self, function: Callable[..., Awaitable[T]], *args: Any) -> T:
        """What it returns. Raises EngineShutdownError: a stop came first, and it was cancelled."""
        if not self._is_stop_requested:
            with anyio.CancelScope() as self._until_stop:
                return await function(*args)
        raise EngineShutdownError("the engine was shut down while it started")

    async def _call(self) -> tuple[socket.socket, Located, str | None]:
        """A connection to the agent, wherever that is; and the digest of the model here."""
        located = await to_thread.run_sync(self._locate, abandon_on_cancel=True)
        self._where = f"node {located.address}"
        digest = None
        if self.config.model.load_format != "dummy":
            digest = await to_thread.run_sync(model_digest, self.config.model.path, abandon_on_cancel=True)
        sock = await connect_to(located.address, located.key, tls_of(self.config.node_ca_file), CONNECT_TIMEOUT_S)
        return sock, located, digest

    async def _start(self, tasks: Any) -> None:
        sock, located, digest = await self._unless_stopped(self._call)
        self.config = replace(self.config, rank_nodes=located.rank_nodes)
        child = self._child = OwnerChild(
            ActorSpec("frontend", "", placement="owner"), self._on_child_end, self._frontend
        )
        try:
            await child.spawn(tasks, self.config)
        except BaseException:
            sock.close()
            raise
        stream = self._stream = NodeStream(
            sock,
            on_message=self._take,
            on_control=self._on_control,
            on_batch=self._on_batch,
            on_beat=self._on_beat,
            on_end=self._on_stream_end,
            timeout_s=self.config.node_timeout_s,
        )
        stream.start()
        self._located = located
        if located.watch is not None:
            located.watch(self._on_sign)
        with anyio.move_on_after(CONNECT_TIMEOUT_S) as waiting:
            await self._unless_stopped(stream.synchronize)
        if waiting.cancelled_caught:
            raise EngineStartError(f"{self._where} does not answer heartbeats within {CONNECT_TIMEOUT_S:g} s")
        config = self.config.to_json().decode()
        stream.control("start", version=__version__, config=config, digest=digest)
        with anyio.move_on_after(self.config.start_timeout_s or math.inf):
            await self._until(lambda: self._ready is not None)
        if self._end is not None:
            raise self._end
        if self._is_stop_requested:
            raise EngineShutdownError("the engine was shut down while it started")
        if self._ready is None:
            raise EngineStartError(
                f"{self._where} was not ready within {self.config.start_timeout_s:g} s; start_timeout_s says how long a "
                f"start may take"
            )
        self._on_facts(self._ready["facts"])
        found = EngineConfig.from_json(self._ready["config"])
        model = replace(self.config.model, scheme=found.model.scheme)
        self.config = replace(self.config, model=model, cache=found.cache, speculation=found.speculation)
        await child.start(self.config)
        await child.configure(self.config)
        if self._link is not None:
            child.install(self._link)
        await child.run()
        if self._end is not None:  # meanwhile: its error says more than that it has ended
            raise self._end
        logger.info("replica %d runs on %s", self.config.replica, self._where)

    def _given_place(self) -> Located:
        return Located(read_address(self.config.node), read_key(self.config.node_key_file or ""))

    def _on_sign(self, what: str) -> None:
        """From any thread: the agent is dead, whatever its connection says."""
        loop = self._loop
        if loop is not None:
            loop.call_soon_threadsafe(self._lose, EngineDeadError(f"{self._where} is lost: {what}"))

    async def _until(self, is_true: Callable[[], bool]) -> None:
        """Wait until it is so, or the node is gone, or it is to be left."""
        while not (is_true() or self._end is not None or self._is_stop_requested):
            assert self._changed is not None
            await self._changed.wait()
            self._changed = anyio.Event()

    def _wake(self) -> None:
        if self._changed is not None:
            self._changed.set()

    async def _leave(self) -> None:
        """The node is told to end: what is here moves, or ends."""
        logger.warning("%s is told to end; replica %d moves its requests", self._where, self.config.replica)
        self._on_leaving()
        with contextlib.suppress(EngineShutdownError), anyio.move_on_after(LEAVE_TIMEOUT_S):
            await self._unless_stopped(self._wait_until_idle)
        if self._is_stop_requested:
            return
        self._lose(EngineDeadError(f"{self._where} was told to end"))

    async def _wait_until_idle(self) -> None:
        """Of all programs. What those have that joined is on the board; they are told by the node, and move it themselves."""
        await self._frontend.wait_until_idle()
        while self._board.has_others and self._end is None:
            load = self._board.journals_of_others(0)[self.config.replica]
            if not load.num_waiting + load.num_running:
                return
            await anyio.sleep(LOOK_S)

    async def _stop(self) -> None:
        stream = self._stream
        self._phase = "stopping"
        if stream is not None and stream.is_open:
            stream.control("stop", timeout=self._stop_timeout_s)
            with anyio.move_on_after(self._stop_timeout_s):
                while stream.is_open and not self._has_ended:
                    assert self._changed is not None
                    await self._changed.wait()
                    self._changed = anyio.Event()
            stream.close()
        if self._child is not None:
            self._child.request_stop()
            with anyio.move_on_after(self._stop_timeout_s):
                await self._child.gone.wait()
        self._phase = "stopped"

    def request_stop(self, timeout: float = STOP_TIMEOUT_S) -> None:
        self._stop_timeout_s = timeout
        self._is_stop_requested = True
        if self._until_stop is not None:
            self._until_stop.cancel()
        self._wake()

    def kill(self) -> None:
        """The agent there sees the end, and ends the replica."""
        if self._stream is not None:
            self._stream.cut()

    def change_config(self, change: Callable[[Any], Any]) -> None:
        """As of the supervisor."""
        self.config = change(self.config)
        if self._stream is not None:
            self._stream.control("config", config=self.config.to_json().decode())

    # What comes

    def _take(self, generation: int, kind: int, body: bytes, num_bytes: int) -> bool:
        link = self._link
        return True if link is None or link.generation != generation else link.take(kind, body, num_bytes)

    def _on_batch(self) -> None:
        if self._link is not None:
            self._link.end_batch()

    def _on_beat(self) -> None:
        """Once nothing is waited for, the node is told. It looks after its processes while something may be."""
        link, stream = self._link, self._stream
        if link is None or stream is None or self._frontend.has_work:
            return
        sent = link.generation, link.num_sent
        if sent != self._rested_after:
            self._rested_after = sent
            stream.control("resting")

    def _on_control(self, frame: dict[str, Any], arrays: list[Any]) -> None:
        try:
            self._obey(frame, arrays)
        except (KeyError, TypeError, ValueError) as error:
            raise CorruptLinkError(f"a control frame {frame.get('op')!r} without sense: {error!r}") from error

    def _obey(self, frame: dict[str, Any], arrays: list[Any]) -> None:
        match frame["op"]:
            case "link":
                assert self._stream is not None
                if self._link is not None and not (self._child is not None and self._child.is_linkable):
                    self._link.close()  # it was never opened; what it kept is given back to the window
                self._link = StreamLink(LinkInfo.from_json(frame["info"]), self._stream, is_translating=True)
                if self._child is not None and self._child.is_linkable:
                    self._child.install(self._link)
            case "lost":
                self._note_lost(frame)
            case "ready":
                self._ready = frame
            case "fell":
                self._on_fall(str(frame["group"]))
            case "health":
                self._told = frame
            case "load":
                apply_changes(self._board, self.config.replica, frame["is_anew"], frame["pages"], arrays)
            case "leaving":
                self._is_leaving = True
            case "ended":
                self._has_ended = True
                cls = own_class(str(frame["type_name"])) or EngineStartError
                self._lose(cls(f"{self._where}: {frame['message']}"))
            case op:
                raise ValueError(f"{op!r} is unknown")
        self._wake()

    def _note_lost(self, frame: dict[str, Any]) -> None:
        loss = error_of_loss(frame)
        if self._child is None:
            return
        if isinstance(loss, PeerRestartedError):
            self._child.lose(frame["link"], frame["generation"], loss)
        else:
            self._lose(EngineDeadError(f"{self._where}: {loss}"))

    def _on_stream_end(self, error: TransportError) -> None:
        self._lose(EngineDeadError(f"{self._where} is lost: {error}"))

    def _on_child_end(self, child: Any, death: ActorDeath) -> None:
        self._lose(death.to_error())

    def _lose(self, error: ActorLLMError) -> None:
        """It is gone; what its frontend had goes on elsewhere."""
        self._wake()
        if self._end is not None:
            return
        self._end = error
        if self._phase == "running":
            known = error if isinstance(error, EngineError) else EngineDeadError(str(error))
            self.failure = known if isinstance(known, EngineDeadError) else EngineDeadError(str(known))
            if self._child is not None:
                for link in list(self._frontend.links.values()):
                    self._child.lose(link.name, link.generation, self.failure)
            self._frontend.fail_all(self.failure)
        if self._stream is not None and not self._has_ended:
            self._stream.close()

    # What is known of it

    @property
    def clock_offset_s(self) -> float:
        """What the clock there shows minus what this one shows."""
        return 0.0 if self._stream is None else self._stream.offset.seconds

    @property
    def is_away(self) -> bool:
        """It was lost, and its node has not said that it gave the replica up: what ran there may be called again."""
        return self._end is not None and not self._has_ended

    @property
    def place(self) -> dict[str, Any] | None:
        """What a program of the same user needs to call the agent itself (`joined_node`), while the replica runs and stays."""
        if (
            self._phase != "running"
            or self._is_leaving
            or self._end is not None
            or self._located is None
            or self._ready is None
        ):
            return None
        ca_file = self.config.node_ca_file
        return {
            "address": str(self._located.address),
            "key": self._located.key.hex(),
            "ca_file": ca_file and os.path.abspath(ca_file),
            "tenant": self._ready["tenant"],
            "timeout_s": self.config.node_timeout_s,
        }

    @property
    def pids(self) -> dict[str, int]:
        """None: those of another machine mean nothing here."""
        return {}

    @property
    def state(self) -> EngineState:
        """From any thread."""
        if self.failure is not None:
            return "dead"
        match self._phase:
            case "new" | "starting" as early:
                return early
            case "running":
                return "recovering" if self._told.get("state") == "recovering" else "running"
        return "stopped"

    def health(self) -> EngineHealth:
        """From any thread; its actors as the node told last."""
        actors = {name: ActorHealth(**actor) for name, actor in self._told.get("actors", {}).items()}
        return EngineHealth(
            self.state,
            actors,
            int(self._told.get("num_recoveries", 0)),
            float(self._told.get("recovery_s", 0.0)),
            self._told.get("last_failure") or (None if self._end is None else str(self._end)),
        )

    def statistics(self) -> dict[str, Any]:
        """As of the supervisor, and of the stream. From any thread."""
        told = self._told
        stream = self._stream
        return {
            "phase": self._phase,
            "actors": {},
            "generations": {},
            "num_restarts": {},
            "num_parked": 0,
            "parked_memory_bytes": 0,
            "num_recoveries": int(told.get("num_recoveries", 0)),
            "recovery_s": float(told.get("recovery_s", 0.0)),
            "max_recovery_s": float(told.get("max_recovery_s", 0.0)),
            "node": self._where.removeprefix("node "),
            "stream": None if stream is None else asdict(stream.statistics()),
        }
