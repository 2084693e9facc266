"""`NodeAgent`: what runs on a machine that has replicas for engines elsewhere (`actorllm node`).

It listens on one address. A connection that has shown the key is a tenant, and asks for one replica. That has a supervisor of
its own here, with a scheduler and workers. A relay stands where the frontend would be. When the connection ends, for whatever
reason, so does the replica, and the agent goes on listening. A program that has joined the owner's engine may join the replica,
too, by what the owner was told of it. Its connection has a relay of its own.

Invariants: nothing of a connection is worked on before it has shown the key. Of those that have not, there are few, and each has
a few seconds. What a tenant sends fails that tenant only. After `run` no process is left.
"""

from __future__ import annotations

import contextlib
import logging
import os
import secrets
import socket
import ssl
import stat
from collections.abc import Callable, Collection
from dataclasses import asdict, replace
from functools import partial
from pathlib import Path
from typing import Any

import anyio
from anyio import to_thread
from anyio.abc import TaskGroup

from actorllm import __version__
from actorllm.actors.engine_thread import STOP_TIMEOUT_S, AsyncioLoop, current_loop
from actorllm.actors.load_board import LoadBoard
from actorllm.actors.memory_file import MemoryFile
from actorllm.actors.topology import ActorSpec, attached_frontend
from actorllm.client.cache_memory import worker_pids_of
from actorllm.client.engine import CACHE_MEMORY
from actorllm.client.engine_supervisor import make_supervisor
from actorllm.config import EngineConfig, read_model_folder
from actorllm.errors import (
    ActorLLMError,
    AttachError,
    ConfigError,
    CorruptLinkError,
    EngineDeadError,
    ModelNotFoundError,
    PeerLostError,
    TransportError,
)
from actorllm.fleet.nodes.fingerprint import facts_of_ranks, model_digest
from actorllm.fleet.nodes.frames import BULK
from actorllm.fleet.nodes.handshake import answer_caller
from actorllm.fleet.nodes.hosts import NodeAddress
from actorllm.fleet.nodes.load_mirror import PERIOD_S, LoadReader
from actorllm.fleet.nodes.node_stream import TIMEOUT_S, NodeStream
from actorllm.fleet.nodes.rank_child import ranks_elsewhere
from actorllm.fleet.nodes.rank_host import RankHost
from actorllm.fleet.nodes.relay import RelayChild
from actorllm.fleet.nodes.remote import LEAVE_TIMEOUT_S
from actorllm.supervision.death import ActorDeath
from actorllm.supervision.health import EngineHealth
from actorllm.supervision.renewal import MeetingPlace
from actorllm.supervision.start_log import StartLog
from actorllm.supervision.supervisor import Supervisor
from actorllm.types.kv_groups import snapshots_of, window_of
from actorllm.types.kv_tiers import tier_of
from actorllm.types.quantization import scheme_of
from actorllm.types.speculation import draft_costs_of

logger = logging.getLogger(__name__)

MAX_TENANTS = 256
"""Replicas at a time, and programs that have joined them."""
MAX_STRANGERS = 32
"""Connections that have not shown the key; of more, the oldest goes."""
ACCEPTS_PER_TURN = 16
"""Before the loop's other callbacks get their turn, and those that have to go have closed their sockets."""
ACCEPT_PAUSE_S = 1.0
BEATS_PER_CHECK = 2
"""Heartbeats of an owner whose replica has nothing to do, from one search for missed doorbells to the next. A timer would wake the
process besides."""
BEATS_PER_LOOK = 10
"""The same for its health and its load. Of a death, and of what comes, the owner is told at once."""


class NodeAgent:
    """See the module docstring.

    Arguments:
        key: which callers have to know (`handshake.read_key`).
        tls: a context of a server, if callers come by TLS.
        timeout_s: how long a caller may be silent.
        is_owned: the agent ends when its last tenant has left, as one does that was started for them.
        memory_share: of the memory of this machine, where there are other agents as well.
    """

    def __init__(
        self,
        key: bytes,
        *,
        tls: ssl.SSLContext | None = None,
        timeout_s: float = TIMEOUT_S,
        is_owned: bool = False,
        memory_share: float = 1.0,
    ) -> None:
        self.key = key
        self.memory_share = memory_share
        self.tls = tls
        self.timeout_s = timeout_s
        self._is_owned = is_owned
        self._strangers: dict[socket.socket, anyio.CancelScope] = {}
        self.tenants: set[Tenant] = set()
        self._tasks: TaskGroup
        self._loop: AsyncioLoop
        self._listener: socket.socket
        self._over: anyio.Event | None = None
        self._is_leaving = False
        self._has_left: anyio.Event | None = None

    async def run(self, address: NodeAddress, on_listening: Callable[[NodeAddress], object] = bool) -> None:
        """Listen until `request_stop` or `leave`. on_listening: hears the address. Raises ConfigError: it cannot be listened on."""
        self._loop = current_loop()
        self._over = anyio.Event()
        self._listener = _listening(address)
        try:
            bound = self._listener.getsockname()
            async with anyio.create_task_group() as self._tasks:
                self._loop.watch(self._listener.fileno(), self._on_visit)
                on_listening(address if not address.port else NodeAddress(address.host, bound[1]))
                await self._over.wait()
                self._loop.unwatch(self._listener.fileno())
                for scope in list(self._strangers.values()):
                    scope.cancel()
                for tenant in list(self.tenants):
                    tenant.request_stop(STOP_TIMEOUT_S)
        finally:
            self._listener.close()
            if not address.port:
                with contextlib.suppress(FileNotFoundError):
                    os.unlink(address.host)

    def request_stop(self) -> None:
        """End at once; owners see it and move their requests."""
        if self._over is not None:
            self._over.set()

    def leave(self) -> None:
        """End when the owners have moved their requests, soon after LEAVE_TIMEOUT_S at the latest. A second call does not wait."""
        if self._is_leaving or not self.tenants:
            self.request_stop()
            return
        self._is_leaving = True
        for tenant in self.tenants:
            tenant.stream.control("leaving")
        self._tasks.start_soon(self._leave)

    async def _leave(self) -> None:
        with anyio.move_on_after(LEAVE_TIMEOUT_S + 2.0):
            while self.tenants:
                self._has_left = anyio.Event()
                await self._has_left.wait()
        self.request_stop()

    # Visits

    def _on_visit(self) -> None:
        for _ in range(ACCEPTS_PER_TURN):
            try:
                sock, where = self._listener.accept()
            except BlockingIOError:
                return
            except OSError as error:  # no descriptor is left
                logger.error("no connection is accepted for %g s: %s", ACCEPT_PAUSE_S, error)
                self._loop.unwatch(self._listener.fileno())
                self._loop.call_later(ACCEPT_PAUSE_S, self._reopen)
                return
            if len(self._strangers) >= MAX_STRANGERS:
                self._strangers.pop(next(iter(self._strangers))).cancel()
            scope = self._strangers[sock] = anyio.CancelScope()
            self._tasks.start_soon(self._greet, sock, scope, f"the caller at {where!r}")

    def _reopen(self) -> None:
        if self._over is not None and not self._over.is_set():
            self._loop.watch(self._listener.fileno(), self._on_visit)

    async def _greet(self, sock: socket.socket, scope: anyio.CancelScope, peer: str) -> None:
        secured: socket.socket | None = None
        try:
            with scope:
                secured = await answer_caller(sock, self.key, peer, self.tls)
        except AttachError as error:
            logger.warning("refused: %s", error)
        finally:
            self._strangers.pop(sock, None)
            if secured is None:
                sock.close()
        if secured is None:
            return
        is_over = self._is_leaving or self._over is None or self._over.is_set()
        if len(self.tenants) >= MAX_TENANTS or is_over:
            logger.warning("refused: %s: there are %d connections, or the node ends", peer, len(self.tenants))
            secured.close()
            return
        try:
            tenant = Tenant(secured, peer, self.timeout_s, self.tenants, self.key, self.memory_share)
        except OSError as error:  # the connection is gone already
            logger.warning("refused: %s: %s", peer, error)
            secured.close()
            return
        self.tenants.add(tenant)
        logger.info("%s has come", peer)
        try:
            await tenant.live()
        except Exception:  # of this tenant: the others go on
            logger.exception("what %s asked for ended with a defect", peer)
        finally:
            self.tenants.discard(tenant)
            if self._has_left is not None:
                self._has_left.set()
            logger.info("%s has gone", peer)
            if self._is_owned and not self.tenants:
                self.request_stop()


def _listening(address: NodeAddress) -> socket.socket:
    try:
        if address.host.startswith("/"):
            sock = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
            try:
                _remove_stale(address.host)
                sock.bind(address.host)
                os.chmod(address.host, 0o600)
                sock.listen(MAX_STRANGERS)
            except BaseException:
                sock.close()
                raise
        else:
            family = socket.AF_INET6 if ":" in address.host else socket.AF_INET
            sock = socket.create_server((address.host, max(address.port, 0)), family=family, backlog=MAX_STRANGERS)
    except OSError as error:
        raise ConfigError(f"listen={str(address)!r} cannot be listened on: {error.strerror or error}") from error
    sock.setblocking(False)
    return sock


def _remove_stale(path: str) -> None:
    """Remove the socket of an agent that was killed, on which nothing listens. Another file, and a living agent's, are left."""
    with contextlib.suppress(FileNotFoundError):
        if not stat.S_ISSOCK(os.stat(path).st_mode):
            return
        with socket.socket(socket.AF_UNIX, socket.SOCK_STREAM) as caller:
            caller.setblocking(False)
            try:
                caller.connect(path)
            except ConnectionRefusedError:
                os.unlink(path)
            except OSError:  # it listens, and has no room for one more
                return


class Tenant:
    """One connection, and the replica that it asked for or has joined.

    tenants: all that there are. key: of this agent, and of those that have ranks of the replica beside it. memory_share: as of the
    agent.
    """

    def __init__(
        self,
        sock: socket.socket,
        peer: str,
        timeout_s: float,
        tenants: Collection[Tenant] = (),
        key: bytes | None = None,
        memory_share: float = 1.0,
    ) -> None:
        self.peer = peer
        self._key = key
        self._memory_share = memory_share
        self.token = secrets.token_hex(16)
        """By which others join its replica."""
        self._tenants = tenants
        self._guests: set[Tenant] = set()
        """Those that have joined it."""
        self._num_guests = 0
        self.stream = NodeStream(
            sock,
            on_message=self._take,
            on_control=self._on_control,
            on_room=self._on_room,
            on_beat=self._on_beat,
            on_end=lambda error: self.request_stop(STOP_TIMEOUT_S),
            timeout_s=timeout_s,
        )
        self._tasks: TaskGroup
        self._wanted: dict[str, Any] | None = None
        """The replica that was asked for, or the one to join."""
        self._has_come: anyio.Event | None = None
        self._was_asked: anyio.Event | None = None
        """Of what tells of a replica that has nothing to do."""
        self._is_asked = False
        self._num_beats = 0
        self._supervisor: Supervisor | None = None
        self._relay: RelayChild | None = None
        self._rank: RankHost | None = None
        self._facts: dict[str, Any] = {}
        self._meeting_place = MeetingPlace()
        self._is_stop_requested = False
        self._stop_timeout_s = STOP_TIMEOUT_S
        self._reader: LoadReader | None = None
        self._place: EngineConfig | None = None
        self._changed: EngineConfig | None = None
        """What the owner's configuration became while the replica was prepared."""
        self._preparing = anyio.CancelScope()

    async def live(self) -> None:
        """Until the connection or the replica ends."""
        self._has_come = anyio.Event()
        self.stream.start()
        try:
            while self._wanted is None and not self._is_stop_requested:
                await self._has_come.wait()
            if self._wanted is not None:
                kind = "tenant" if "tenant" in self._wanted else "rank" if "rank" in self._wanted else "replica"
                live = {"tenant": self._join, "rank": self._have_rank, "replica": self._have_replica}[kind]
                await live(self._wanted)
        finally:
            with anyio.CancelScope(shield=True), anyio.move_on_after(1.0), contextlib.suppress(TransportError):
                await self.stream.wait_flushed()
            self.stream.close()

    async def _join(self, wanted: dict[str, Any]) -> None:
        """Until the connection or the replica ends."""
        host = next((one for one in self._tenants if one.token == wanted["tenant"]), None)
        error: ActorLLMError = EngineDeadError("the replica was stopped")
        if wanted["version"] != __version__:
            error = _other_version(wanted["version"])
        elif host is not None and host._supervisor is not None:
            try:
                await self._stay_with(host, host._supervisor)
            except (ActorLLMError, OSError) as refusal:  # it is stopping, or has no memory for one more ring
                error = EngineDeadError(f"it cannot be joined: {refusal}")
        self.stream.control("ended", type_name=type(error).__name__, message=str(error))

    async def _stay_with(self, host: Tenant, supervisor: Supervisor) -> None:
        host._num_guests += 1
        spec, link = attached_frontend(host._num_guests)
        relay = self._relay = RelayChild(spec, lambda *_: None, self.stream)
        relay.phase = "running"
        supervisor.admit(relay, link)
        host._guests.add(self)
        try:
            await relay.gone.wait()
        finally:
            host._guests.discard(self)
            supervisor.dismiss(spec.name, PeerLostError(f"{self.peer}, which had joined, is gone"))
            relay.close()

    async def _have_rank(self, wanted: dict[str, Any]) -> None:
        """Until the connection or the worker ends."""
        error: Exception = EngineDeadError("the rank was stopped")
        try:
            config: EngineConfig | None = None
            with self._preparing:
                config = await self._checked(wanted, "")
            if config is not None and not self._is_stop_requested:
                self._rank = RankHost(wanted["rank"], config, self.stream, partial(_rank_here, config))
                await self._rank.live()
        except Exception as raised:  # of this rank: its owner is told, and the agent goes on
            error = raised
            if not self._is_stop_requested:
                logger.error("the rank of %s: %s", self.peer, error)
        self.stream.control("ended", type_name=type(error).__name__, message=str(error))

    async def _have_replica(self, wanted: dict[str, Any]) -> None:
        error: Exception | None = None
        board_file: MemoryFile | None = None
        try:
            board_file = MemoryFile("loads", LoadBoard.NUM_BYTES)
            config: EngineConfig | None = None
            with self._preparing:
                config = await self._checked(wanted, board_file.path)
            if config is not None and not self._is_stop_requested:
                await self._run(config, LoadBoard(board_file.path))
            if self._supervisor is not None:
                error = self._supervisor.failure
        except Exception as raised:  # of this replica: its owner is told, and the agent goes on
            error = raised
        finally:
            if board_file is not None:
                board_file.close()
            CACHE_MEMORY.release(self)
            self._meeting_place.close()
        if error is not None and not self._is_stop_requested:
            logger.error("the replica of %s: %s", self.peer, error)
        told = error or EngineDeadError("the replica was stopped")
        self.stream.control("ended", type_name=type(told).__name__, message=str(told))

    async def _checked(self, wanted: dict[str, Any], board: str) -> EngineConfig:
        """The configuration as it is for this machine. Raises AttachError, ModelError."""
        if wanted["version"] != __version__:
            raise _other_version(wanted["version"])
        config = EngineConfig.from_json(wanted["config"])
        config = replace(config, cache=replace(config.cache, machine_share=self._memory_share))
        # A model may be downloaded meanwhile: a stop does not wait for it.
        self._place = await to_thread.run_sync(localized, config, board, abandon_on_cancel=True)
        if wanted["digest"] is not None:
            found = await to_thread.run_sync(model_digest, self._place.model.path, abandon_on_cancel=True)
            if found != wanted["digest"]:
                raise ConfigError(
                    f"the files of model {config.model.name!r} in {self._place.model.path!r} differ from those of the engine; "
                    f"copy the folder, or name the same revision"
                )
        return self._place

    async def _run(self, config: EngineConfig, board: LoadBoard) -> None:
        log = StartLog(self._resolve)
        if self._changed is not None:  # meanwhile
            config = self._as_here(self._changed, config)

        def make_relay(spec: ActorSpec, on_end: Callable[[Any, ActorDeath], None]) -> RelayChild:
            self._relay = RelayChild(spec, on_end, self.stream)
            return self._relay

        config = self._meeting_place.renewed(config)
        supervisor = self._supervisor = make_supervisor(
            config,
            make_relay,
            self._meeting_place,
            log,
            on_death=lambda death: None,  # what its run ends with is told
            on_fall=self._on_fall,
            elsewhere=ranks_elsewhere(config, self._key),
        )
        self._reader = LoadReader(board, config.replica)
        async with anyio.create_task_group() as tasks:

            def on_ready() -> None:
                told = supervisor.config.to_json().decode()
                self.stream.control("ready", config=told, facts=self._facts, tenant=self.token)
                tasks.start_soon(self._tell, supervisor, board, config.replica)

            failure: Exception | None = None
            try:
                await supervisor.run(on_ready)
            except Exception as error:  # raised outside of the group, which would wrap it
                failure = error
            tasks.cancel_scope.cancel()
        if failure is not None:
            raise failure

    def _resolve(self, config: EngineConfig, facts: dict[str, dict[str, Any]]) -> EngineConfig:
        assert self._supervisor is not None
        self._facts = facts_of_ranks(facts)
        num_blocks = CACHE_MEMORY.fit(self, config, facts, worker_pids_of(self._supervisor))
        return config.resolved(
            num_blocks,
            *draft_costs_of(facts),
            scheme=scheme_of(facts),
            window=window_of(facts),
            snapshots=snapshots_of(facts),
            tier=tier_of(facts),
        )

    # What the owner says

    def _take(self, generation: int, kind: int, body: bytes, num_bytes: int) -> bool:
        self._is_asked = True
        if self._was_asked is not None:
            self._was_asked.set()
        end = self._rank or self._relay
        return True if end is None else end.take(generation, kind, body, num_bytes)

    def _on_room(self) -> None:
        end = self._rank or self._relay
        if end is not None:
            end.on_room()

    def _on_beat(self) -> None:
        self._num_beats += 1
        if self._num_beats % BEATS_PER_CHECK == 0:
            self._recheck()
        if self._was_asked is not None and self._num_beats % BEATS_PER_LOOK == 0:
            self._was_asked.set()

    def _on_control(self, frame: dict[str, Any], arrays: list[Any]) -> None:
        try:
            match frame["op"]:
                case "start" if self._wanted is None:
                    self._wanted = {name: frame[name] for name in ("version", "config", "digest")}
                    self._wake()
                case "rank" if self._wanted is None:
                    self._wanted = {name: frame[name] for name in ("version", "config", "digest")}
                    self._wanted["rank"] = int(frame["rank"])
                    self._wake()
                case "join" if self._wanted is None:
                    self._wanted = {name: str(frame[name]) for name in ("version", "tenant")}
                    self._wake()
                case "stop":
                    self.request_stop(min(float(frame["timeout"]), 60.0))
                case "config":
                    changed = EngineConfig.from_json(frame["config"])
                    self._changed = None if self._wanted is None else changed  # what comes before "start" is in that
                    if self._supervisor is not None:
                        self._supervisor.change_config(lambda now: self._as_here(changed, now))
                case "resting" if self._relay is not None:
                    self._relay.rest()
                case _ if self._rank is not None:
                    self._rank.obey(frame)
                case op:
                    raise ValueError(f"{op!r} is not expected now")
        except (KeyError, TypeError, ValueError, ActorLLMError) as error:
            raise CorruptLinkError(f"a control frame {frame.get('op')!r} without sense: {error!r}") from error

    def _as_here(self, changed: EngineConfig, now: EngineConfig) -> EngineConfig:
        """A changed configuration with the paths of this machine."""
        model = replace(changed.model, path=now.model.path, tokenizer=now.model.tokenizer)
        return replace(
            changed,
            model=model,
            cache=now.cache,
            name=now.name,
            rendezvous=now.rendezvous,
            load_board=now.load_board,
            speculation=now.speculation,
        )

    def request_stop(self, timeout: float) -> None:
        """End the replica, and the connection with it."""
        self._is_stop_requested = True
        self._stop_timeout_s = timeout
        self._preparing.cancel()
        if self._supervisor is not None:
            self._supervisor.request_stop(timeout)
        elif self._rank is not None:
            self._rank.stop()
        elif self._relay is not None:  # it has joined
            self._relay.gone.set()
        self._wake()

    def _wake(self) -> None:
        if self._has_come is not None:
            self._has_come.set()

    # What the owner is told

    def _on_fall(self, group: str) -> None:
        self.stream.control("fell", group=group)
        if self._was_asked is not None:
            self._was_asked.set()
        if group == "scheduler" and self._reader is not None:
            self._reader.forget()

    async def _tell(self, supervisor: Supervisor, board: LoadBoard, row: int) -> None:
        """Its health and its load, as they change: a few times a second while it works, else once in one."""
        told: EngineHealth | None = None
        table = board.hashes(row)
        while True:
            self._recheck()
            is_changing = False
            if not self.stream.is_full:
                health = supervisor.health()
                if health != told:
                    told = health
                    self._tell_health(health, supervisor)
                is_changing = self._tell_load(table.num_words_used) or health.state == "recovering"
            if is_changing:
                await anyio.sleep(PERIOD_S)
                continue
            self._is_asked = False
            self._was_asked = anyio.Event()
            await self._was_asked.wait()
            if self._is_asked:
                await anyio.sleep(PERIOD_S)  # what came is computed first

    def _recheck(self) -> None:
        """Make up for missed doorbells."""
        for one in (self, *self._guests):
            if one._relay is not None:
                one._relay.recheck()

    def _tell_health(self, health: EngineHealth, supervisor: Supervisor) -> None:
        fields = asdict(health)
        told = {name: fields[name] for name in ("state", "num_recoveries", "recovery_s", "last_failure", "actors")}
        self.stream.control("health", max_recovery_s=supervisor.statistics()["max_recovery_s"], **told)

    def _tell_load(self, num_words: int) -> bool:
        """Whether there was news of it."""
        assert self._reader is not None
        changes = self._reader.changes(num_words)
        if changes is None:
            return False
        is_anew, pages, arrays = changes
        self.stream.control("load", arrays, lane=BULK, is_anew=is_anew, pages=pages)
        return True


def _rank_here(known: EngineConfig, changed: EngineConfig) -> EngineConfig:
    """The configuration of a rank with the paths of this machine."""
    model = replace(changed.model, path=known.model.path, tokenizer=known.model.tokenizer)
    return replace(changed, model=model, name=None, load_board=None, speculation=known.speculation)


def _other_version(version: str) -> AttachError:
    return AttachError(f"it runs actorllm {__version__} and the engine {version}; use the same version on all nodes")


def localized(config: EngineConfig, board: str) -> EngineConfig:
    """The configuration of a replica as it is for this machine: folders that are here. Raises ModelError."""
    given = config.model
    try:
        if Path(given.path, "config.json").is_file():
            path = Path(given.path)
        else:
            path, _ = read_model_folder(given.name, given.load_format)
    except ActorLLMError as error:
        raise ModelNotFoundError(f"{given.name!r} is not here ({given.path!r} is not, either): {error}") from error
    tokenizer = given.tokenizer
    if tokenizer == given.path:
        tokenizer = str(path)
    elif tokenizer is not None and not Path(tokenizer).exists() and "/" in tokenizer[:1]:
        raise ModelNotFoundError(f"the tokenizer {tokenizer!r} is not here")
    speculation = config.speculation
    if speculation is not None and speculation.model is not None and not Path(speculation.model).is_dir():
        raise ModelNotFoundError(f"the draft model {speculation.model!r} is not here")
    model = replace(given, path=str(path), tokenizer=tokenizer)
    cache = replace(config.cache, offloading_paths=(), tier_mask_path=None)  # the memory of another machine
    meeting_place = config.rendezvous if config.rank_nodes else None  # a file is of its machine
    return replace(config, model=model, cache=cache, load_board=board, rendezvous=meeting_place, name=None)
