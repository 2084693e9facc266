"""`RankHost`: a worker of a replica whose scheduler is on another machine, in the agent of this one. See `rank_child`.

The worker is a process as everywhere. In the place of the scheduler a relay holds the other end of its ring. When the connection
ends, the process is killed: the others cannot go on without it, and it cannot without them. One that is stuck is killed as well.
Its supervisor sees no heartbeat of it, so a watchdog looks here.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import anyio

from actorllm.actors.child import error_of_loss
from actorllm.actors.engine_thread import current_loop
from actorllm.actors.link import LinkInfo
from actorllm.actors.topology import engine_topology
from actorllm.config import EngineConfig
from actorllm.errors import EngineDeadError
from actorllm.fleet.nodes.node_stream import NodeStream
from actorllm.fleet.nodes.relay import Relay
from actorllm.ring.channel import DEFAULT_CAPACITY, RESULT_CAPACITY, create_link
from actorllm.supervision.children import ProcessChild
from actorllm.supervision.death import ActorDeath
from actorllm.supervision.watchdog import Watchdog

RECHECK_PERIOD_S = 1.0
MAX_ASKED = 8
"""Phases of its start that an owner may ask for before they are there: there are two."""


class WatchedProcess(ProcessChild):
    """A worker that is looked at for as long as it lives: whether its scheduler waits for it is known elsewhere."""

    @property
    def has_work(self) -> bool:
        return self.is_alive


class RankHost:
    """See the module docstring.

    Arguments:
        rank: of the worker.
        config: of the replica, as it is for this machine.
        stream: of its owner, which this does not close.
        as_here: makes a later configuration one for this machine.
    """

    def __init__(
        self, rank: int, config: EngineConfig, stream: NodeStream, as_here: Callable[[EngineConfig], EngineConfig]
    ) -> None:
        self._config = config
        self._stream = stream
        self._as_here = as_here
        self._child = WatchedProcess(engine_topology(config).actor(f"worker{rank}"), self._on_end, current_loop())
        self._child.on_broken = lambda link, generation, error: stream.control(
            "broken", link=link, generation=generation, error=error
        )
        self._child.on_progress = lambda: stream.control("progress")
        self._child.on_defect = lambda peer, link, generation, what: stream.control(
            "defect", peer=peer, link=link, generation=generation, what=what
        )
        watched = {self._child.spec.name: self._child}
        self._watchdog = Watchdog(watched, config.heartbeat_timeout_s, config.step_timeout_s)
        self._relay: Relay | None = None
        self._asked: list[dict[str, Any]] = []
        self._changed = anyio.Event()
        self._is_over = False
        self._scope = anyio.CancelScope()
        self._death: ActorDeath | None = None

    async def live(self) -> None:
        """Until it ends, or is told to. Raises what its start raised, and EngineDeadError when it died."""
        child = self._child
        async with anyio.create_task_group() as tasks:
            try:
                with self._scope:
                    await child.spawn(tasks, self._config)
                    tasks.start_soon(self._watchdog.run)
                    facts = await child.start(self._config)
                    self._stream.control("started", facts=facts, pid=child.pid)
                    while not self._is_over:
                        await self._do_asked()
                        with anyio.move_on_after(RECHECK_PERIOD_S):
                            await self._changed.wait()
                        self._changed = anyio.Event()
                        if self._relay is not None:
                            self._relay.recheck()
            finally:
                with anyio.CancelScope(shield=True):
                    self._drop_relay()
                    child.kill()
                    if child.pid is not None:
                        await child.gone.wait()
                    child.close()
                tasks.cancel_scope.cancel()
        if self._death is not None:
            raise EngineDeadError(str(self._death))

    async def _do_asked(self) -> None:
        while self._asked and not self._is_over:
            frame = self._asked.pop(0)
            if frame["op"] == "configure":
                self._config = self._as_here(EngineConfig.from_json(frame["config"]))
                await self._child.configure(self._config)
                self._stream.control("configured")
            else:
                await self._child.run()
                self._stream.control("ready")

    def obey(self, frame: dict[str, Any]) -> None:
        """What the owner says. Raises KeyError, TypeError or ValueError: it makes no sense."""
        match frame["op"]:
            case "configure" | "run" if len(self._asked) < MAX_ASKED:
                self._asked.append(frame)
                self._changed.set()
            case "link":
                self._link(LinkInfo.from_json(frame["info"]))
            case "lost":
                if self._relay is not None and self._relay.generation == frame["generation"]:
                    self._drop_relay()
                self._child.lose(frame["link"], frame["generation"], error_of_loss(frame))
            case op:
                raise ValueError(f"{op!r} is not expected of a rank")

    def _link(self, info: LinkInfo) -> None:
        self._drop_relay()
        ends = create_link(DEFAULT_CAPACITY, RESULT_CAPACITY, 1, info.generation)
        broken = info.name, info.generation
        try:
            relay = Relay(
                info.generation, self._stream, ends.hub, lambda error: self._child.on_broken(*broken, str(error))
            )
        except BaseException:
            ends.spokes[0].close()
            raise
        self._relay = relay
        self._child.install_ring(info, ends.spokes[0])
        relay.start()

    def _drop_relay(self) -> None:
        relay, self._relay = self._relay, None
        if relay is not None:
            relay.close()

    def take(self, generation: int, kind: int, body: bytes, num_bytes: int) -> bool:
        """As `node_stream.OnMessage`."""
        return True if self._relay is None else self._relay.take(generation, kind, body, num_bytes)

    def on_room(self) -> None:
        """The stream takes messages again."""
        if self._relay is not None:
            self._relay.on_room()

    def stop(self) -> None:
        """The owner has told, or is gone."""
        self._is_over = True
        self._changed.set()
        self._scope.cancel()

    def _on_end(self, child: Any, death: ActorDeath) -> None:
        if not self._is_over:
            self._death = death
            self.stop()
