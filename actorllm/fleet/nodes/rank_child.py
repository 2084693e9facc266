"""`RankChild`: a worker on another machine, as the supervisor of its replica sees it. The replica's scheduler is here.

A model may be too large for one machine. Then some of its ranks are on others (`EngineConfig.rank_nodes`), each a process of an
agent there (`rank_host`). The replica may itself be one of an agent, which then calls the others. Plans and results go over one
stream per rank, copied by a relay at each end. What ranks exchange among each other goes by torch.distributed, and they meet at a
TCP store of rank 0.

The end of the stream, for whatever reason, is the death of the worker: the ranks are started again together.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Mapping
from dataclasses import asdict
from functools import partial
from typing import Any

import anyio
from anyio import to_thread
from anyio.abc import TaskGroup

from actorllm import __version__
from actorllm.actors.actor import Failure
from actorllm.actors.engine_thread import AsyncioLoop, current_loop
from actorllm.actors.link import LinkInfo
from actorllm.actors.topology import ActorSpec
from actorllm.clock import now
from actorllm.config import EngineConfig
from actorllm.errors import ActorLLMError, AttachError, CorruptLinkError, EngineStartError, TransportError
from actorllm.fleet.nodes.fingerprint import model_digest
from actorllm.fleet.nodes.handshake import read_key
from actorllm.fleet.nodes.hosts import CONNECT_TIMEOUT_S, connect_to, node_of_rank, read_address, tls_of
from actorllm.fleet.nodes.node_stream import NodeStream
from actorllm.fleet.nodes.relay import Relay
from actorllm.messages import KIND_OF, StepResult, pack, unpack
from actorllm.messages.times import translate
from actorllm.ring.channel import LinkEnd
from actorllm.ring.codec import decode, encode
from actorllm.supervision.children import Child
from actorllm.supervision.death import ActorDeath
from actorllm.supervision.supervisor import ChildMaker

logger = logging.getLogger(__name__)

RESULT = KIND_OF[StepResult]
RECHECK_PERIOD_S = 1.0
AWAY_TIMEOUT_S, CALL_AGAIN_S = 60.0, 0.5
"""How long a node on which a rank has run may be away, and how often it is called meanwhile."""


def ranks_elsewhere(config: EngineConfig, key: bytes | None = None) -> dict[str, ChildMaker]:
    """What makes the workers of a replica that are on other machines, by name. key: of these; None: `config` names its file."""
    places = {rank: node_of_rank(rank, config.world_size, config.rank_nodes) for rank in range(config.num_workers)}
    reached: dict[str, str] = {}
    return {
        f"worker{rank}": partial(RankChild, node, key, reached) for rank, node in places.items() if node is not None
    }


class RankRelay(Relay):
    """Between the scheduler's ring and the stream of a rank. Points in time of results are moved to the clock of this machine."""

    def take(self, generation: int, kind: int, body: bytes, num_bytes: int) -> bool:
        if kind == RESULT and generation == self.generation:
            try:
                message = unpack(kind, *decode(body))
                translate(message, -self._stream.offset.seconds)
                kind, scalars, arrays = pack(message)
                body = b"".join(encode(scalars, arrays))
            except (ValueError, TypeError, IndexError, CorruptLinkError) as error:
                self._stream.fail(CorruptLinkError(f"a frame of a rank is no result: {error}"))
                return True
        return super().take(generation, kind, body, num_bytes)


class RankChild(Child):
    """See the module docstring.

    Arguments:
        node: where the agent listens.
        key: which it knows; None: it is in the file that the configuration names.
        reached: nodes on which ranks of the replica have run, and how they computed. One of them that is away is waited for, as it
            starts again. It has to compute as it did: the tokens that were sent are of that.
    """

    is_process = True

    def __init__(
        self,
        node: str,
        key: bytes | None,
        reached: dict[str, str],
        spec: ActorSpec,
        on_end: Callable[[Any, ActorDeath], None],
    ) -> None:
        super().__init__(spec, on_end)
        self.pid: int | None = None
        """On its machine."""
        self.failure: Failure | None = None
        """What it reported before it ended."""
        self._node, self._key, self._reached = node, key, reached
        self._arithmetic = ""
        self._stream: NodeStream | None = None
        self._relay: Relay | None = None
        self._reports: dict[str, dict[str, Any]] = {}
        self._reported = anyio.Event()
        self._loop: AsyncioLoop

    # Its life

    async def spawn(self, tasks: TaskGroup, config: EngineConfig) -> None:
        self._loop = current_loop()
        try:
            key = self._key
            if key is None:
                key = await to_thread.run_sync(read_key, config.node_key_file or "")
            tls = await to_thread.run_sync(tls_of, config.node_ca_file)
            address, until = read_address(self._node), now() + AWAY_TIMEOUT_S
            while True:
                try:
                    sock = await connect_to(address, key, tls, CONNECT_TIMEOUT_S)
                    break
                except AttachError:
                    if self._node not in self._reached or now() > until:
                        raise
                await anyio.sleep(CALL_AGAIN_S)
        except BaseException:
            self.gone.set()
            raise
        self._stream = NodeStream(
            sock,
            on_message=self._take,
            on_control=self._on_control,
            on_room=self._on_room,
            on_end=self._on_stream_end,
            timeout_s=config.node_timeout_s,
        )
        self._stream.start()
        self.phase = "spawned"
        self._loop.call_later(RECHECK_PERIOD_S, self._recheck)

    async def start(self, config: EngineConfig) -> dict[str, Any]:
        self.phase = "starting"
        assert self._stream is not None
        with anyio.move_on_after(CONNECT_TIMEOUT_S) as waiting:
            await self._stream.synchronize()
        if waiting.cancelled_caught:
            raise EngineStartError(f"node {self._node} does not answer heartbeats within {CONNECT_TIMEOUT_S:g} s")
        digest = None
        if config.model.load_format != "dummy":
            digest = await to_thread.run_sync(model_digest, config.model.path, abandon_on_cancel=True)
        told = config.to_json().decode()
        self._stream.control("rank", version=__version__, config=told, digest=digest, rank=self.spec.rank)
        report = await self._report("started")
        self.phase, self.pid = "started", int(report["pid"])
        facts = dict(report["facts"])
        self._arithmetic = str(facts.get("arithmetic", ""))
        known = self._reached.get(self._node, self._arithmetic)
        if known != self._arithmetic:
            raise EngineStartError(
                f"node {self._node} computes with {self._arithmetic}, and did with {known} before: streams that go on there would "
                f"change; start its agent on a machine of the same kind, or build the engine again"
            )
        return facts

    async def configure(self, config: EngineConfig) -> None:
        self.phase = "configuring"
        assert self._stream is not None
        self._stream.control("configure", config=config.to_json().decode())
        await self._report("configured")
        self.phase = "configured"

    async def run(self) -> None:
        assert self._stream is not None
        self._stream.control("run")
        await self._report("ready")
        self._reached[self._node] = self._arithmetic
        self.phase = "running"

    async def _report(self, op: str) -> dict[str, Any]:
        while op not in self._reports:
            if self.failure is not None:
                raise self.failure.to_start_error(self.spec.name)
            await self._reported.wait()
        return self._reports[op]

    def request_stop(self) -> None:
        if self._stream is not None and self._stream.is_open:
            self._stream.control("stop", timeout=0.0)
        else:
            self.gone.set()

    def kill(self) -> None:
        """The agent sees the end, and kills the process."""
        if self._stream is not None:
            self._stream.cut()

    def end_defective(self, what: str) -> None:
        self._end(Failure("EngineError", f"it was found {what}", ""))

    def close(self) -> None:
        if self._relay is not None:
            self._relay.close()
            self._relay = None
        if self._stream is not None:
            self._stream.close()
        self.gone.set()

    # Links

    def install_ring(self, info: LinkInfo, end: LinkEnd) -> None:
        assert self._stream is not None
        if self._relay is not None:
            self._relay.close()
        broken = info.name, info.generation
        self._relay = RankRelay(info.generation, self._stream, end, lambda error: self.on_broken(*broken, str(error)))
        self._stream.control("link", info=asdict(info))
        self._relay.start()

    def lose(self, link: str, generation: int, error: ActorLLMError) -> None:
        relay = self._relay
        if relay is not None and relay.generation == generation:
            relay.close()
            self._relay = None
        if self._stream is not None:
            why = type(error).__name__, str(error)
            self._stream.control("lost", link=link, generation=generation, type_name=why[0], error=why[1])

    def _take(self, generation: int, kind: int, body: bytes, num_bytes: int) -> bool:
        return True if self._relay is None else self._relay.take(generation, kind, body, num_bytes)

    def _on_room(self) -> None:
        if self._relay is not None:
            self._relay.on_room()

    def _recheck(self) -> None:
        """Make up for a missed doorbell, now and then."""
        if not self.gone.is_set():
            if self._relay is not None:
                self._relay.recheck()
            self._loop.call_later(RECHECK_PERIOD_S, self._recheck)

    # What the agent says

    def _on_control(self, frame: dict[str, Any], arrays: list[Any]) -> None:
        try:
            self._hear(frame)
        except (KeyError, TypeError, ValueError) as error:
            raise CorruptLinkError(f"a control frame {frame.get('op')!r} without sense: {error!r}") from error

    def _hear(self, frame: Mapping[str, Any]) -> None:
        match frame["op"]:
            case "started" | "configured" | "ready" as op:
                self._reports[op] = dict(frame)
                self._wake()
            case "broken":
                self.on_broken(frame["link"], frame["generation"], frame["error"])
            case "progress":
                self.on_progress()
            case "defect":
                self.on_defect(frame["peer"], frame["link"], frame["generation"], frame["what"])
            case "leaving":
                logger.warning("node %s is told to end; %s ends with it", self._node, self.spec.name)
            case "ended":
                message = f"node {self._node}: {frame['message']}"
                self._end(Failure(str(frame["type_name"]), message, str(frame.get("traceback", ""))))
            case op:
                raise ValueError(f"{op!r} is unknown")

    def _on_stream_end(self, error: TransportError) -> None:
        self._end(Failure("EngineDeadError", f"node {self._node} is lost: {error}", ""))

    def _end(self, failure: Failure) -> None:
        if self.failure is not None:
            return
        self.failure = failure
        self.phase = "dead"
        self.close()
        self._wake()
        self._on_end(self, ActorDeath(self.spec.name, failure=failure))

    def _wake(self) -> None:
        reported, self._reported = self._reported, anyio.Event()
        reported.set()

    def statistics(self) -> dict[str, Any]:
        return super().statistics() | {"node": self._node}
