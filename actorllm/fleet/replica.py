"""`Replica`: one scheduler with its workers, and the frontend and the supervisor that belong to it. A part of `Fleet`.

Also the configuration that each replica has of the engine's (`replica_config`): its share of the cores and of the memory, its
GPUs and its recording.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Set
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any, Literal, Protocol, cast

import anyio

from actorllm.actors.frontend import RETRY_S, FrontendActor, JournalEntry, OutputObserver
from actorllm.actors.link import Link
from actorllm.actors.load_board import LoadBoard
from actorllm.client.cache_memory import worker_pids_of
from actorllm.client.engine import CACHE_MEMORY
from actorllm.client.engine_supervisor import make_supervisor
from actorllm.clock import now
from actorllm.config import RAY, EngineConfig
from actorllm.errors import EngineShutdownError
from actorllm.fleet.nodes.fingerprint import facts_of_ranks
from actorllm.fleet.nodes.hosts import Located, place_of
from actorllm.fleet.nodes.rank_child import ranks_elsewhere
from actorllm.fleet.nodes.remote import RemoteReplica
from actorllm.fleet.pacing import size, urgency
from actorllm.messages import KvOffer
from actorllm.scheduling.router import LearntSteps
from actorllm.supervision.death import ActorDeath
from actorllm.supervision.health import EngineHealth, ReplicaHealth
from actorllm.supervision.renewal import MeetingPlace
from actorllm.supervision.start_log import StartLog
from actorllm.supervision.supervisor import Supervisor
from actorllm.types.kv_groups import snapshots_of, window_of
from actorllm.types.kv_tiers import tier_of
from actorllm.types.quantization import scheme_of
from actorllm.types.speculation import draft_costs_of

ReplicaState = Literal["new", "starting", "running", "draining", "recovering", "lost", "stopped"]

UNSEEN_S = 0.1
"""How long a stream that moved is taken to be computed again, if its tokens come together later."""
AWAY_TIMEOUT_S = 60.0
"""How long requests wait for a replica while the machines of all are away, as the ranks of one do."""


def replica_config(config: EngineConfig, number: int, num_replicas: int, board_path: str) -> EngineConfig:
    """What the number-th of so many replicas is built with. board_path: of the board on which it tells of its load.

    Threads, and of the memory what was asked for as a share, are divided. What was asked for in bytes, in blocks or in threads
    is each replica's own, as in vLLM.
    """
    cache = config.cache
    places = [place_of(n, config.data_parallel_size_local, config.nodes) for n in range(max(num_replicas, number + 1))]
    node = places[number]
    is_of_ray = node == RAY  # which shares out the cores and GPUs of its nodes
    is_single = is_of_ray and config.num_threads is None and config.device == "cpu"  # as one core was asked for
    num_beside = 1 if is_of_ray else places.count(node)
    if cache.memory_utilization is not None and config.device == "cpu":
        cache = replace(cache, memory_utilization=cache.memory_utilization / num_beside)
    record = config.record
    if record is not None:
        path = Path(record)
        record = str(path.with_name(f"{path.stem}-{number}{path.suffix}"))
    return replace(
        config,
        cache=cache,
        cpu_share=cores_of(config, num_beside),
        num_threads=1 if is_single else config.num_threads,
        record=record,
        replica=number,
        load_board=board_path,
        first_device=0 if is_of_ray else config.first_device + places[:number].count(node) * config.world_size,
        node=node,
        log_statistics=False,
    )


def cores_of(config: EngineConfig, num_replicas: int) -> float:
    """The share of the cores that each of so many replicas has."""
    return (1.0 if config.cpu_share is None else config.cpu_share) / num_replicas


class ReplicaFrontend(FrontendActor):
    """The frontend of one replica: numbers of requests are the fleet's, and a lost replica's journal is moved, not failed."""

    PROBES_ALONE = True

    def __init__(
        self,
        next_rid: Callable[[], int],
        on_lost: Callable[[dict[int, JournalEntry], BaseException], None],
        on_outputs: Callable[[], None] = lambda: None,
        on_offer: Callable[[KvOffer], None] = lambda offer: None,
        pause_mode_of: Callable[[str | None], str | None] = lambda known: known,
    ) -> None:
        """on_lost: takes the journal. on_outputs: hears of each batch of them. on_offer: of prompts that another replica may go on
        with. pause_mode_of: the pause that a life begins with, of the one that is known."""
        super().__init__()
        self._next_rid = next_rid
        self._on_lost = on_lost
        self._on_outputs = on_outputs
        self._on_offer = on_offer
        self._pause_mode_of = pause_mode_of
        self._held: dict[int, None] = {}
        """Of the journal, what has moved here and was not sent yet, in its order."""
        self._sent: dict[int, tuple[int, float]] = {}
        """What was sent of it and has had no token since: how many it had, and when it was sent."""
        self._room: Callable[[], float] = lambda: math.inf
        self._held_until = math.inf
        """When suspects among what is held are sent whatever room there is, in monotonic seconds."""
        self._looked_at = -math.inf
        """When the room was looked at last, in monotonic seconds."""
        self.lives_on = False
        """Its replica is made anew when this life ends: what is here ends with a stop only if the replica does."""
        self._handed_off: dict[int, tuple[float, int, Callable[[float], None]]] = {}
        """What another replica has computed the prompt of and nothing has come of since: when it came, and with how many tokens."""

    def next_rid(self) -> int:
        return self._next_rid()

    async def on_stop(self) -> None:
        if (
            not self.lives_on
        ):  # else of a start that failed, or of a replica that was lost: its owner says what comes of it
            await super().on_stop()

    def on_link(self, link: Link) -> None:
        if (
            self._lost is None
        ):  # the first of this life: since the one before, any program may have paused or resumed the others
            self.assume_paused(self._pause_mode_of(self._pause_mode))
        super().on_link(link)

    def on_offer(self, offer: KvOffer) -> None:
        self._on_offer(offer)

    def on_batch(self) -> None:
        super().on_batch()
        if self._held or self._sent:
            self._send_held()
        if self._handed_off:
            self._note_first()
        self._on_outputs()

    def adopt_handed_off(self, entries: Mapping[int, JournalEntry], on_first: Callable[[float], None]) -> None:
        """As `adopt` of requests whose prompt another replica has computed. on_first: hears after how many seconds one goes on."""
        self.adopt(entries, None)
        at = now()
        self._handed_off |= {rid: (at, len(entry.emitted), on_first) for rid, entry in entries.items()}

    def _note_first(self) -> None:
        for rid, (began, num_emitted, on_first) in list(self._handed_off.items()):
            entry = self._journal.get(rid)
            if entry is None or len(entry.emitted) > num_emitted:
                del self._handed_off[rid]
                if entry is not None and not entry.num_recoveries:
                    on_first(now() - began)

    # What moves here bit by bit

    def adopt_paced(
        self,
        entries: Mapping[int, JournalEntry],
        room: Callable[[], float],
        lost_at: float | None = None,
        until: float = math.inf,
    ) -> None:
        """As `adopt`. They are sent as far as there is room (`pacing`), the tightest first, also of what is held already.

        room: tokens that may be computed at a time. One request is always under way. until: when suspects among them are sent
        whatever room there is, in monotonic seconds.
        """
        self._room = room
        self._held_until = min(until, self._held_until) if self._held else until
        self._take_in(entries, lost_at)
        if self._scheduler is not None:  # else the next one is sent the whole journal
            held = {rid: self._journal[rid] for rid in (*self._held, *entries) if rid in self._journal}
            self._held = dict.fromkeys(sorted(held, key=lambda rid: urgency(held[rid])))
            self._looked_at = -math.inf
            self._send_held()
            if self._held and self.is_running:
                self.wake()

    async def run(self) -> None:
        """As of one alone. What is held is looked at now and then, since nothing need come that would bring the next turn."""
        while self.is_running:
            is_waiting = (self._held or self._unsent) and self._scheduler is not None
            await self.wait(now() + RETRY_S if is_waiting else None)
            self._flush()
            if self._held:
                self._send_held()

    @property
    def arriving(self) -> Set[int]:
        """Those of the journal that moved here and are not computed yet."""
        return self._held.keys() | self._sent.keys()

    @property
    def held(self) -> list[JournalEntry]:
        """Those of them that its scheduler does not know of yet."""
        return [self._journal[rid] for rid in self._held if rid in self._journal]

    def _send_held(self, is_all: bool = False) -> None:
        if self._scheduler is None:  # the next one is sent the whole journal
            return
        journal = self._journal
        waiting = {rid: sent for rid, sent in self._sent.items() if rid in journal and self._is_under_way(rid, *sent)}
        is_as_before = 0 < len(waiting) == len(self._sent)
        self._sent = waiting
        at = now()
        if not self._held or (is_as_before and not is_all and at - self._looked_at < RETRY_S):
            return  # looking at every journal entry for each batch of outputs would delay them all
        self._looked_at = at
        under_way = sum(size(journal[rid]) for rid in waiting)
        most = math.inf if is_all or not under_way else self._room()
        is_full = False
        for rid in list(self._held):
            entry = journal.get(rid)
            if entry is not None:
                has_to_go = self._has_to_go(entry, at)
                is_full = is_full or (not has_to_go and under_way > 0 and under_way + size(entry) > most)
                if is_full and not has_to_go:
                    continue
                if not under_way:
                    most = math.inf if is_all else self._room()
                under_way += size(entry)
                waiting[rid] = len(entry.emitted), at
                for message in self._as_sent(entry):
                    self._post(message)
            del self._held[rid]

    def _has_to_go(self, entry: JournalEntry, at: float) -> bool:
        """Whether it is sent whatever room there is: its scheduler is to end it at once, or has to hear of a suspect by now."""
        deadline = entry.submit.deadline
        is_over = entry.is_aborted or (deadline is not None and deadline <= at)
        return is_over or (at >= self._held_until and entry.record.num_deaths > 0)

    def _is_under_way(self, rid: int, num_tokens: int, sent_at: float) -> bool:
        """Whether what was sent of what moved here is yet to be computed, as far as is seen."""
        entry = self._journal[rid]
        is_unseen = (
            entry.submit.stream_interval != 1 and entry.submit.pooling is None
        )  # its next token comes with others
        return len(entry.emitted) == num_tokens and not (is_unseen and now() - sent_at > UNSEEN_S)

    def abort(self, rid: int) -> None:
        if rid in self._held:  # its scheduler has to know of it, to end it
            del self._held[rid]
            for message in self._as_sent(self._journal[rid]):
                self._post(message)
        super().abort(rid)

    def _is_sent(self, rid: int) -> bool:
        return rid not in self._held

    def surrender(self, is_moved: Callable[[JournalEntry], bool] = lambda entry: True) -> dict[int, JournalEntry]:
        taken = super().surrender(is_moved)
        for rid in taken:  # one that comes back is sent again
            self._held.pop(rid, None)
            self._sent.pop(rid, None)
        return taken

    def _adopt(self, link: Link) -> None:
        self._held.clear()  # the whole journal is sent
        super()._adopt(link)

    async def ask_scheduler(self, verb: str, **arguments: Any) -> Any:
        if self._held and verb in ("drain", "abort_all", "pause_generation", "sleep"):  # which are meant for these, too
            self._send_held(is_all=True)
        return await super().ask_scheduler(verb, **arguments)

    def fail_all(self, error: BaseException) -> None:
        """This replica is gone for good: what it had goes on elsewhere, if there is an elsewhere."""
        if self._error is None and not isinstance(error, EngineShutdownError):
            entries = self.surrender()
            super().fail_all(error)
            self._on_lost(entries, error)
        else:
            super().fail_all(error)

    def end_all(self, error: BaseException) -> None:
        """The engine is gone: every request ends with this error."""
        super().fail_all(error)

    def fail(self, entries: Mapping[int, JournalEntry], error: BaseException) -> None:
        """Requests that were surrendered, and that nothing can go on with."""
        for entry in entries.values():
            entry.consumer.fail(error)
        self._wake([entry.consumer for entry in entries.values()])

    def has(self, rid: int) -> bool:
        """Whether this request is in the journal."""
        return rid in self._journal

    @property
    def has_suspects(self) -> bool:
        """It has requests that schedulers may have died of, or its scheduler looks for some."""
        if self._probe is not None and self._probe.size:
            return True
        return any(entry.record.num_deaths for entry in self._journal.values())

    def journal(self) -> Mapping[int, JournalEntry]:
        """Every request that has not ended, by number."""
        return self._journal


class RoutedReplica(Protocol):
    """What a dispatcher sees of a replica: of this process's own, or of an engine that it has joined."""

    number: int
    frontend: ReplicaFrontend
    limits: dict[str, Any]
    is_draining: bool
    is_leaving: bool
    is_removed: bool
    is_lost: bool

    @property
    def find(self) -> Callable[[bytes], int] | None:
        """How many blocks of a prompt its prefix cache has, by their hashes; None: not known."""

    @property
    def clock_offset_s(self) -> float:
        """What the clock of its machine shows minus what this one shows."""

    @property
    def takes_requests(self) -> bool: ...
    @property
    def state(self) -> ReplicaState: ...
    def load(self) -> tuple[int, LearntSteps] | None: ...


def limits_of(config: EngineConfig, number: int) -> dict[str, Any]:
    """What routers are told of the configuration of the number-th replica, by the names of `ReplicaView`."""
    return {
        "role": config.roles[number] if number < len(config.roles) else None,
        "block_size": config.cache.block_size,
        "max_num_batched_tokens": config.scheduler.max_num_batched_tokens,
        "max_num_seqs": config.scheduler.max_num_seqs,
    }


class ReplicaEvents:
    """What is waited for of a replica; to be made on the loop."""

    def __init__(self) -> None:
        self.is_settled = anyio.Event()
        """It has been ready, or has failed to start."""
        self.ends_pause = anyio.Event()
        """It is to end its pause between two lives, for there is no other life, or for its machine is needed now."""
        self.has_ended = anyio.Event()


class Replica:
    """See the module docstring. Everything is called on the engine's loop.

    on_lost: its journal, and why, when it is gone for good. on_fall: the name of a group of its processes that died and is
    started again. on_outputs: of its frontend. on_leaving: its node is told to end. on_facts: what its workers say of themselves;
    what it raises ends the start. on_offer: its number, and a prompt that another replica may go on with. pause_mode_of: the pause
    that a life begins with, of its number and of the one that is known.
    """

    def __init__(
        self,
        number: int,
        config: EngineConfig,
        next_rid: Callable[[], int],
        on_lost: Callable[[Replica, dict[int, JournalEntry], BaseException], None],
        on_fall: Callable[[Replica, str], None],
        board: LoadBoard,
        on_outputs: Callable[[], None],
        on_leaving: Callable[[Replica], None] = lambda replica: None,
        on_facts: Callable[[Replica, Mapping[str, Any]], None] = lambda replica, facts: None,
        locate: Callable[[int], Located] | None = None,
        on_offer: Callable[[int, KvOffer], None] = lambda number, offer: None,
        pause_mode_of: Callable[[int, str | None], str | None] = lambda number, known: known,
    ) -> None:
        self.number = number
        self._on_leaving, self._on_facts, self._locate = on_leaving, on_facts, locate
        self._given = config
        self._next_rid = next_rid
        self._on_lost = on_lost
        self._on_outputs = on_outputs
        self._on_fall = on_fall
        self._on_offer = partial(on_offer, number)
        self._pause_mode_of = partial(pause_mode_of, number)
        self._board = board
        self._meeting_place = MeetingPlace()
        self.limits = limits_of(config, number)
        self.find: Callable[[bytes], int] | None = board.hashes(number).find
        self.is_draining = False
        """It takes no new requests."""
        self.is_leaving = False
        """Nor while its node ends."""
        self.is_removed = False
        """It is stopped, and not started again."""
        self.is_lost = False
        """Its supervisor has given it up; it may be made anew."""
        self.has_run = False
        """It has been ready in this life."""
        self.num_lives = 0
        self.events: ReplicaEvents | None = None
        """Made on the loop, when its first life begins."""
        self.last_failure: str | None = None
        self.frontend = self._new_frontend()
        """Of its next life as soon as it is lost: what is pinned to it waits there."""
        self.supervisor: Supervisor | RemoteReplica
        self.renew()

    def _new_frontend(self) -> ReplicaFrontend:
        made = ReplicaFrontend(self._next_rid, self._lose, self._on_outputs, self._on_offer, self._pause_mode_of)
        made.lives_on = True
        return made

    def _lose(self, entries: dict[int, JournalEntry], error: BaseException) -> None:
        pause_mode, observer = self.frontend.pause_mode, self.frontend.observer
        self.frontend = self._new_frontend()
        self.frontend.observer = observer
        if pause_mode is not None:
            self.frontend.assume_paused(pause_mode)
        self._on_lost(self, entries, error)

    def observe(self, observer: OutputObserver) -> None:
        """Let its outputs be looked at, in all its lives."""
        self.frontend.observer = observer

    def renew(self) -> None:
        """A new supervisor, which has not started, for its next life."""
        self.num_lives += 1
        self.is_leaving = self.has_run = False
        if self._given.node is not None:
            self.supervisor = RemoteReplica(
                self._given,
                self.frontend,
                on_fall=lambda group: self._on_fall(self, group),
                on_leaving=self._leave,
                on_facts=lambda facts: self._on_facts(self, facts),
                board=self._board,
                locate=self._locate and partial(self._locate, self.number),
            )
            return
        log = StartLog(self._resolve)
        config = self._meeting_place.renewed(self._given)
        self.supervisor = make_supervisor(
            config,
            self.frontend,
            self._meeting_place,
            log,
            on_death=self._note_death,
            on_fall=lambda group: self._on_fall(self, group),
            elsewhere=ranks_elsewhere(config),
        )

    def _leave(self) -> None:
        self.is_leaving = True
        self._on_leaving(self)

    @property
    def is_remote(self) -> bool:
        """It is on another machine."""
        return self._given.node is not None

    @property
    def clock_offset_s(self) -> float:
        return self.supervisor.clock_offset_s if isinstance(self.supervisor, RemoteReplica) else 0.0

    @property
    def is_away(self) -> bool:
        """Its machine fell silent or was told to end, and may come back."""
        return isinstance(self.supervisor, RemoteReplica) and self.supervisor.is_away

    @property
    def config(self) -> EngineConfig:
        """Of its next life."""
        return self._given

    def change_config(self, change: Callable[[EngineConfig], EngineConfig]) -> None:
        """As `Supervisor.change_config`, and for its next lives."""
        self._given = change(self._given)
        self.supervisor.change_config(change)

    def load(self) -> tuple[int, LearntSteps] | None:
        """As `LoadBoard.read`."""
        return self._board.read(self.number)

    def request_stop(self, timeout: float) -> None:
        """Stop its processes, and begin no other life."""
        self.frontend.lives_on = False
        self.supervisor.request_stop(timeout)
        if self.events is not None:
            self.events.ends_pause.set()

    @property
    def num_blocks(self) -> int:
        """Of its KV cache, once it is ready."""
        return int(cast(EngineConfig, self.supervisor.config).cache.num_blocks or 0)

    def expected_restart_s(self, start_s: float) -> float:
        """How long its next restart may take: as the longest so far, or as its start. start_s: of that, in seconds."""
        return float(self.supervisor.statistics()["max_recovery_s"]) or start_s

    def _resolve(self, config: EngineConfig, facts: dict[str, dict[str, Any]]) -> EngineConfig:
        self._on_facts(self, facts_of_ranks(facts))
        num_blocks = CACHE_MEMORY.fit(self, config, facts, worker_pids_of(self.supervisor))
        return config.resolved(
            num_blocks,
            *draft_costs_of(facts),
            scheme=scheme_of(facts),
            window=window_of(facts),
            snapshots=snapshots_of(facts),
            tier=tier_of(facts),
        )

    def _note_death(self, death: ActorDeath) -> None:
        """Its supervisor gives up; the frontend hears of it by its link."""
        self.last_failure = str(death)
        self.frontend.fail_all(self.supervisor.failure or death.to_error())

    def release(self) -> None:
        """Nothing of it runs any more."""
        self._board.clear(self.number)
        CACHE_MEMORY.release(self)
        self._meeting_place.close()

    @property
    def takes_requests(self) -> bool:
        """Whether a request may be sent here now; one that recovers takes them, too."""
        return not (
            self.is_draining or self.is_leaving or self.is_removed or self.is_lost
        ) and self.supervisor.state in (
            "running",
            "recovering",
        )

    @property
    def state(self) -> ReplicaState:
        if self.is_lost:
            return "lost"
        state = self.supervisor.state
        if state == "dead":
            return "lost"
        if (self.is_draining or self.is_leaving) and state in ("running", "recovering"):
            return "draining"
        return state

    def health(self) -> ReplicaHealth:
        """From any thread."""
        health: EngineHealth = self.supervisor.health()
        return ReplicaHealth(
            number=self.number,
            state=self.state,
            pids=self.supervisor.pids,
            num_requests=self.frontend.num_open,
            num_lives=self.num_lives,
            actors=health.actors,
            num_recoveries=health.num_recoveries,
            recovery_s=health.recovery_s,
            last_failure=self.last_failure or health.last_failure,
        )
