"""`Engine`: what both front doors share. Intake of requests, the engine thread, start and shutdown.

A request goes from the caller's thread to a tokenizer worker (`actorllm.intake`). The worker starts the engine if need be,
tokenizes, and checks against the model. From there the request goes to the frontend actor on the engine thread, and then to the
scheduler. So the caller's loop never waits for a tokenizer, and a bad prompt fails its own request only.
"""

from __future__ import annotations

import _thread
import contextlib
import functools
import itertools
import logging
import math
import os
import re
import sys
import threading
import time
import uuid
import weakref
from collections.abc import Callable, Iterable, Mapping
from concurrent.futures import Future
from dataclasses import replace
from functools import partial
from typing import TYPE_CHECKING, Any, NoReturn, Protocol, TypeVar, cast

import anyio

from actorllm.actors.engine_thread import EngineThread, HostLoop, Service
from actorllm.actors.frontend import FrontendActor
from actorllm.actors.memory_file import MemoryFile
from actorllm.actors.search_path import note_folder
from actorllm.attach.server import AttachServer, Joinable
from actorllm.client import collective_calls
from actorllm.client.cache_memory import CacheMemory, worker_pids_of
from actorllm.client.collective_calls import Called
from actorllm.client.draining import Draining, EngineFrontend
from actorllm.client.engine_supervisor import make_supervisor
from actorllm.client.plugin_data import PluginData
from actorllm.client.policy_changes import PolicyChanges, check_policy_names
from actorllm.client.pooling_stream import PoolingStream, VectorStream
from actorllm.client.request_spans import NO_TRACE, RequestSpans, RequestTrace, checked_trace_headers
from actorllm.client.sleep import Sleep
from actorllm.client.stat_recorder import StatRecorder, check_factories
from actorllm.client.statistics_log import INTERVAL_S, StatisticsLog
from actorllm.client.stream import Mailbox, RequestStream, Sibling
from actorllm.client.submit import SubmitMaker
from actorllm.client.transports.jobs import RankJob
from actorllm.client.transports.rank_transfers import RankTransfers
from actorllm.client.weight_memory import WeightMemory
from actorllm.client.weight_transfer import WeightTransfer
from actorllm.client.weight_updates import NewWeights, WeightUpdates, check_update
from actorllm.clock import now
from actorllm.config import EngineConfig
from actorllm.errors import (
    ActorLLMError,
    ConfigError,
    DuplicateRequestError,
    EngineDrainingError,
    EngineError,
    EngineOverloaded,
    EngineShutdownError,
    ForkedProcessError,
    InvalidParameterError,
    shown,
)
from actorllm.intake.job import FunctionJob, Job, JobPlace, Reading
from actorllm.intake.job_queue import JobQueue
from actorllm.intake.media.media_reader import MediaReader
from actorllm.intake.request_job import RequestJob, RequestSpec
from actorllm.intake.sources import SourceReader
from actorllm.intake.tokenization import (
    Prompt,
    PromptReader,
    TokenizedPrompt,
    checked_tokenization,
    prompt_text,
    snapshot,
    with_processor_kwargs,
)
from actorllm.intake.tokenizer_pool import TokenizerPool
from actorllm.messages import Submit
from actorllm.model.memory import limit_bytes
from actorllm.scheduling.pause import check_pause_mode
from actorllm.supervision.death import ActorDeath
from actorllm.supervision.health import EngineHealth, ReplicaHealth
from actorllm.supervision.renewal import MeetingPlace
from actorllm.supervision.start_log import StartLog
from actorllm.supervision.supervisor import Supervisor
from actorllm.text.chat_template import Conversation
from actorllm.text.reasoning.thought import check_budget
from actorllm.text.tokenizer import Tokenizer
from actorllm.types.adapter_folder import Adapter, AdapterDigests
from actorllm.types.generation_config import sampling_params_of
from actorllm.types.kv_groups import snapshots_of, window_of
from actorllm.types.kv_tiers import tier_of
from actorllm.types.lora_request import LoRARequest
from actorllm.types.objective import SLO
from actorllm.types.params import (
    MAX_LABEL,
    PoolingParams,
    RequestOutputKind,
    SamplingParams,
    check_request_arguments,
    check_timeout,
    is_text,
)
from actorllm.types.quantization import scheme_of
from actorllm.types.sleep import SleepRequests, check_sleep, checked_tags
from actorllm.types.speculation import draft_costs_of
from actorllm.types.weight_version import RUNNING_REQUESTS, RunningRequests

if TYPE_CHECKING:
    from actorllm.attach.client import AttachClient
    from actorllm.client.stepper import Stepper

T = TypeVar("T")

logger = logging.getLogger(__name__)

CACHE_MEMORY = CacheMemory()
"""Of all engines of this process."""
os.register_at_fork(after_in_child=CACHE_MEMORY.renew_lock)


class EngineService(Protocol):
    """What an engine asks of what runs it: a supervisor, a membership, a stepper or a fleet."""

    @property
    def config(self) -> Any: ...
    @property
    def pids(self) -> dict[str, int]: ...
    def health(self) -> EngineHealth: ...
    def statistics(self) -> dict[str, Any]: ...


class Hold:
    """What a front door and its open streams keep: the engine is shut down when the last of them lets go."""

    __slots__ = ("__weakref__",)


class Engine:
    """One engine, owned by the process that builds it. All methods may be called from any thread.

    Its threads keep it alive, so it does not end by being dropped; a caller that wants that keeps a `new_hold`.

    is_synchronous: the submitting thread tokenizes and checks, there is no pool of threads for it; and with topology="inline" the
    engine computes in the calls of its `stepper`, on no thread of its own.
    """

    def __init__(self, config: EngineConfig, *, is_synchronous: bool = False) -> None:
        self._tier_memory: list[MemoryFile] = []
        """For KV blocks that left the caches of the replicas here, for each rank; and what schedulers know of resets of tiers."""
        if config.cache.offloading_bytes and not config.cache.offloading_paths:
            _check_room_of_tier(config.cache.offloading_bytes)
            self._tier_memory += [MemoryFile("kv-blocks") for _ in range(config.world_size)]
            paths = tuple(memory.path for memory in self._tier_memory)
            config = replace(config, cache=replace(config.cache, offloading_paths=paths))
        if config.cache.has_tiers and config.cache.tier_mask_path is None:
            mask = MemoryFile("kv-mask")
            self._tier_memory.append(mask)
            config = replace(config, cache=replace(config.cache, tier_mask_path=mask.path))
        self.config = self._given = config
        note_folder()
        self._pid = os.getpid()
        self._is_synchronous = is_synchronous
        self.prompts = PromptReader(config.model)
        self.plugin_data = PluginData.of(config, self.prompts)
        """The plug-in that makes prompts of data (io_processor_plugin)."""
        self.stepper: Stepper | None = None
        self._frontend: EngineFrontend
        self._supervisor: EngineService
        self._thread: EngineThread | Stepper
        self._last_rid = 0
        self._attach_server: AttachServer | None = None
        self._make()
        self._death: EngineError | None = None
        self._is_shut_down = False
        self._is_start_asked = False
        self._is_draining = False
        self._hold: weakref.ref[Hold] | None = None
        self._lock = threading.Lock()
        self._giving_up = threading.Lock()
        """Held while a start is taken back, and by `unload`; before the next start, and before the end, that must be through."""
        self._wanting: set[object] = set()
        """The callers that wait for the start."""
        self._has_started = False
        self.statistics_log = StatisticsLog(time.monotonic())
        self.stat_recorder: StatRecorder | None = None
        """What tells the loggers of the application, if it has brought any."""
        self._streams: weakref.WeakValueDictionary[str, RequestStream] = weakref.WeakValueDictionary()
        self._num_requests = 0
        self._num_on_the_way = 0
        self._id_prefix = uuid.uuid4().hex[:8]
        self._request_numbers = itertools.count(1)
        self._tokenizer_pool = self._new_tokenizer_pool()
        self.prompts.media = self._new_media()
        self.prompts.sources = self._new_sources()
        self._submits = SubmitMaker(self.config, self.prompts, lambda: self._frontend.weights.identity)
        self._weight_updates = WeightUpdates(self)
        self.weight_transfer = WeightTransfer(self.weight_memory)
        self._rank_transfers = RankTransfers(self)
        self.watchers: dict[str, Callable[[], Any]] = {}
        """What else tells of it in `statistics`, by key: of programs around the engine (`slo.live.shadow`)."""
        self.sleep_state = Sleep(self)
        self._policy_changes = PolicyChanges(self)
        self._spans = RequestSpans(config.otlp_traces_endpoint, config.model.name)

    def __reduce__(self) -> NoReturn:
        """Raises TypeError: what pickles or copies deeply a front door that it found among other things is told why it cannot."""
        raise TypeError(
            "an engine belongs to the process that built it, and cannot be pickled or copied; build one in the other process, or "
            "build this one with name= and join it there: LLM.attach(name), AsyncLLM.attach(name)"
        )

    # What it is made of; an AttachedEngine is made of something else

    def _make(self) -> None:
        """Everything that lives but once, from the start to the end or to `unload`."""
        self._frontend = frontend = self._new_frontend()
        self._meeting_place = MeetingPlace()
        if self._is_synchronous and self.config.topology == "inline":
            from actorllm.client.stepper import Stepper  # with scheduler and worker, which otherwise others import

            log = StartLog(self._resolve)
            self.stepper = Stepper(self.config, frontend, log.resolve, self._on_death, log.around)
            self._supervisor = self._thread = self.stepper
        else:
            self._supervisor = self._new_supervisor()
            self._thread = self._new_thread()

    def _new_tokenizer_pool(self) -> TokenizerPool | None:
        if self._is_synchronous:
            return None
        max_characters = self.config.model.max_prompt_characters
        return TokenizerPool(lambda: not self._has_started, self.config.intake_timeout_s, max_characters)

    def _new_media(self) -> MediaReader | None:
        """What reads prompts with images; None: they are not taken."""
        rules = self.config.model.media
        return None if rules is None else MediaReader(self.config, rules)

    def _new_sources(self) -> SourceReader | None:
        """What reads prompts for an encoder beside the decoder; None: the model has none."""
        rules = self.config.model.encoder_decoder
        return None if rules is None else SourceReader(self.config, rules)

    def _new_frontend(self) -> FrontendActor:
        return FrontendActor(last_rid=self._last_rid)

    def _new_supervisor(self) -> Supervisor | AttachClient:
        self.config = self._meeting_place.renewed(self.config)
        log = StartLog(self._resolve)
        return make_supervisor(
            self.config, cast(FrontendActor, self._frontend), self._meeting_place, log, self._on_death
        )

    def _new_thread(self) -> EngineThread:
        return EngineThread(self._new_service())

    def _new_service(self) -> Service:
        """The supervisor, behind a door for others if the engine has a name. Attaching needs Linux, as rings do."""
        assert isinstance(self._supervisor, Supervisor)
        supervisor = self._supervisor
        service = self._alone(supervisor)
        if self.config.name is None or sys.platform != "linux":
            return service
        frontend = cast(FrontendActor, self._frontend)
        self._attach_server = AttachServer(self.config.name, service, frontend, lambda: {0: supervisor})
        return self._attach_server

    def _alone(self, supervisor: Supervisor) -> Joinable:
        """The service of the only replica."""
        return supervisor

    def _resolve(self, config: EngineConfig, facts: dict[str, dict[str, Any]]) -> EngineConfig:
        """The KV cache has as many blocks as the rank with the least room can hold, beside other engines of the process."""
        num_blocks = CACHE_MEMORY.fit(self, config, facts, worker_pids_of(self._supervisor))
        return config.resolved(
            num_blocks,
            *draft_costs_of(facts),
            scheme=scheme_of(facts),
            window=window_of(facts),
            snapshots=snapshots_of(facts),
            tier=tier_of(facts),
        )

    # Life

    def start(self) -> None:
        """Start the engine unless it runs; returns when it is ready. Raises what made the start fail."""
        wanting = object()
        with self._lock:
            self._wanting.add(wanting)
        try:
            self._start()
        finally:
            with self._lock:
                self._wanting.discard(wanting)

    def _start(self) -> None:
        self._check()
        with self._giving_up:
            thread, supervisor = self._thread, self._supervisor
            self._is_start_asked = True
        try:
            thread.start()
        except BaseException:
            CACHE_MEMORY.release(self)
            raise
        begins: StatRecorder | None = None
        with self._lock:
            if thread is self._thread and not self._has_started:
                self.config = cast(EngineConfig, supervisor.config)
                self._has_started = True
                if self.config.log_statistics and self.stepper is None:
                    ask = partial(self.ask_all_schedulers, "statistics")
                    self._thread.call(self.statistics_log.report_periodically, ask, INTERVAL_S)
                begins = self.stat_recorder
        if begins is not None:
            self._begin_recording(begins)

    def record_for(self, stat_loggers: object) -> None:
        """Tell these loggers what the engine does; before it starts. Raises ConfigError."""
        factories = check_factories(stat_loggers)
        if factories:
            self.stat_recorder = StatRecorder(factories)

    def _begin_recording(self, recorder: StatRecorder) -> None:
        recorder.begin(self.config, self.replica_numbers)
        self._observe(recorder)
        if self.stepper is None:
            self._thread.call(recorder.follow, partial(self.ask_all_schedulers, "statistics"))

    def _observe(self, recorder: StatRecorder) -> None:
        cast(FrontendActor, self._frontend).observer = recorder.of(0)

    def note_step(self) -> None:
        """A step was made on the caller's stack: no task asks the scheduler then."""
        if self.stat_recorder is not None:
            self.stat_recorder.note_schedulers(self.ask_scheduler("statistics").result())

    def log_statistics(self, statistics: dict[str, Any]) -> None:
        """A line of the log, and what the loggers of the application write. statistics: of the scheduler actor."""
        self.statistics_log.log(statistics)
        if self.stat_recorder is not None:
            self.stat_recorder.log()

    def start_in_background(self) -> Future[None]:
        """As `start`, on a tokenizer worker. A caller that does not wait for it any more says so with `give_up_start`."""
        call = FunctionJob(self._start, lambda: self._give_up_wanting(call.future))
        with self._lock:
            self._wanting.add(call.future)
        self._enqueue(call, JobQueue.put_control)
        return call.future

    def _give_up_wanting(self, future: Future[None]) -> None:
        with self._lock:
            self._wanting.discard(future)

    def token_ids_of(
        self, prompt: str | Conversation, add_special_tokens: bool, lora_request: LoRARequest | None = None
    ) -> Future[list[int]]:
        """The token ids of a text, or of a conversation, however many. Read on a tokenizer worker; the engine need not run.

        lora_request: an adapter, which may bring a tokenizer. Raises EngineShutdownError; the future raises what is wrong
        with the prompt.
        """

        def read(worker: JobPlace | None) -> list[int]:
            return self._submits.prompts_of(lora_request).ids_of(prompt, add_special_tokens, worker)

        reading = Reading(read, is_heavy=lora_request is not None or self.prompts.is_large(prompt))
        self._enqueue(reading)
        return reading.future

    def tokenizer_of(self, lora_request: LoRARequest | None) -> Future[Tokenizer]:
        """The tokenizer of the model, or that of an adapter which brings one. Read on a tokenizer worker.

        Raises EngineShutdownError; the future raises what is wrong with its files.
        """
        reading = Reading(
            lambda worker: self._submits.prompts_of(lora_request).tokenizer, is_heavy=lora_request is not None
        )
        self._enqueue(reading)
        return reading.future

    def tokenized(
        self, prompt: Prompt, lora_request: object = None, **how: Any
    ) -> Future[tuple[TokenizedPrompt, Tokenizer | None]]:
        """A prompt as a request for it would have it, and the tokenizer of its texts, if there is one. The engine need not run.

        lora_request: an adapter, which may bring a tokenizer. how: of `PromptReader.tokenize`. Raises EngineShutdownError and
        InvalidParameterError; the future raises what is wrong with the prompt. Read on a tokenizer worker.
        """
        adapter = self._submits.checked_adapter(lora_request)
        prompt = snapshot(prompt)

        def read(worker: JobPlace | None) -> tuple[TokenizedPrompt, Tokenizer | None]:
            reader = self._submits.prompts_of(adapter)
            tokenizer = None if self.config.model.tokenizer is None else reader.tokenizer
            return reader.tokenize(prompt, workplace=worker, **how), tokenizer

        reading = Reading(read, is_heavy=adapter is not None or self.prompts.is_large(prompt))
        self._enqueue(reading)
        return reading.future

    def all_handed_over(self) -> Future[None]:
        """Resolved when every request of before has reached the frontend, or has ended."""
        call = FunctionJob(lambda: None)
        self._enqueue(call, JobQueue.put_barrier)
        return call.future

    def give_up_start(self, future: Future[None]) -> None:
        """The caller that asked for this start has gone. If no other wants it, what was begun is stopped, and can begin anew.

        Waits until it is stopped.
        """
        with self._giving_up:
            with self._lock:
                self._wanting.discard(future)
                if self._wanting or self._has_started or self._is_shut_down or self._death is not None:
                    return
                thread, meeting_place = self._thread, self._meeting_place
                if not self._remake():
                    return
            thread.stop()
            meeting_place.close()
            CACHE_MEMORY.release(self)

    def _remake(self) -> bool:
        """Whether everything that lives but once was made again."""
        self._is_start_asked = False
        self._make()
        return True

    def unload(self, timeout: float = 5.0) -> None:
        """Stop everything as `shutdown` does, and be as an engine that is yet to start; returns when that is done.

        timeout: as in `shutdown`. Raises EngineError where a request is open, the engine starts or a program has joined it.
        """
        with self._giving_up:
            with self._lock:
                self._check()
                if self.is_new:
                    return
                self._check_idle()
                pool, self._tokenizer_pool = self._tokenizer_pool, self._new_tokenizer_pool()
                self._has_started = self._is_start_asked = False
            # A request that comes from here on is read by the new pool, whose first job waits for the lock to start the engine.
            try:
                if pool is not None:
                    pool.close()
                self._thread.stop(timeout)
                self._meeting_place.close()
                CACHE_MEMORY.release(self)
                for job in [] if pool is None else pool.join(timeout):
                    job.end(EngineError("the engine was unloaded while this prompt was read"))
                self.prompts.forget()
                self._submits.forget()
            finally:
                for memory in self._tier_memory:
                    memory.clear()
                self.config, self._last_rid = self._given, self._frontend.last_rid
                self.sleep_state.forget()
                self.weight_memory.clear()
                self._make()

    def _check_idle(self) -> None:
        """EngineError unless nothing is going on that an end of the processes would break. A request that was left is nothing."""
        if num_open := sum(not stream.has_ended for stream in self._streams.values()):
            raise EngineError(
                f"{num_open} requests are open; let them end, or abort them, before the engine is unloaded"
            )
        if not all(isinstance(one, Mailbox) and one.is_aborted for one in self._wanting):
            raise EngineError("the engine is starting; unload it when it runs")
        if self._attach_server is not None and (num_attached := self._attach_server.num_attached):
            raise EngineError(
                f"{num_attached} programs have joined engine {self.config.name!r}; unload it when they have left"
            )

    def shutdown(self, timeout: float = 5.0) -> None:
        """End every request with EngineShutdownError and stop all processes; returns when they are gone. Idempotent."""
        if os.getpid() != self._pid:
            return
        with self._lock:
            self._is_shut_down = True
        if self._tokenizer_pool is not None:
            self._tokenizer_pool.close()
        self.prompts.close()
        with self._giving_up:
            thread, meeting_place = self._thread, self._meeting_place
        thread.stop(timeout)
        meeting_place.close()
        self._weight_updates.close()
        self.weight_transfer.close()
        for memory in self._tier_memory:
            memory.close()
        CACHE_MEMORY.release(self)
        error = self._death or EngineShutdownError("the engine was shut down")
        if self._tokenizer_pool is not None:
            for job in self._tokenizer_pool.join(timeout):
                job.end(error)
        with self._lock:
            streams = list(self._streams.values())
        for stream in streams:
            if not stream.has_ended:
                self._fail(stream._mailbox, error)
        self._spans.close()

    def drain(self, timeout: float | None = None) -> Future[bool]:
        """Take no new request, let those finish that there are, and abort what is left after `timeout` seconds.

        Resolved when all have ended: True if none had to be aborted. `shutdown` is the caller's. What has not reached the
        frontend by then, because the engine still starts, ends here. A scheduler that does not say that it has aborted the
        others delays the result by no more than STOP_TIMEOUT_S; if it comes back, or another one does, they end then. Cancelling
        the future leaves the requests going on.
        """
        self._check()
        until = math.inf if timeout is None else now() + check_timeout(timeout, can_be_zero=True)
        future: Future[bool] = Future()
        with self._lock:
            self._is_draining = True
            is_idle = self.is_new or not (self._has_started or self._num_on_the_way)
        if is_idle:
            future.set_result(True)
        elif self.stepper is not None:
            future.set_result(self.stepper.drain(until))
        else:
            Draining(self, until, future).begin()
        return future

    def wait_drained(self, timeout: float | None = None) -> bool:
        """As `drain`, for a caller that waits; an interruption leaves the requests going on."""
        future = self.drain(timeout)
        try:
            return future.result()
        except BaseException:
            future.cancel()
            raise

    def _end_on_the_way(self) -> int:
        """Abort every request that the frontend does not know yet, each with its last output. Returns how many."""
        with self._lock:
            given_up = [mailbox for mailbox in self._wanting if isinstance(mailbox, Mailbox)]
            self._wanting.difference_update(given_up)
            self._num_on_the_way = 0
        for mailbox in given_up:
            mailbox.end_unsent(now())
            self._wake(mailbox)
        return len(given_up)

    async def _wait_until_idle(self) -> None:
        """Those of attached frontends have ended as well, which may submit no more."""
        await self._frontend.ask_scheduler("drain", timeout=math.inf)

    async def _abort_all(self) -> None:
        await self._frontend.ask_scheduler("abort_all")

    def new_hold(self) -> Hold:
        """What a front door keeps; also every stream from now on, until it has ended."""
        hold = Hold()
        self._hold = weakref.ref(hold)
        weakref.finalize(hold, _drop, self).atexit = False  # there the engine thread stops by itself
        return hold

    @property
    def is_new(self) -> bool:
        """It was not asked to start yet, nor to end."""
        return not self._is_start_asked and not self._is_shut_down and os.getpid() == self._pid

    @property
    def is_running(self) -> bool:
        return self._thread.is_alive and self._death is None and not self._is_shut_down

    @property
    def death(self) -> EngineError | None:
        """Why it is dead, once a process of it died."""
        return self._death

    def health(self) -> EngineHealth:
        """The state of every actor."""
        health = self._supervisor.health()
        if self._is_shut_down and health.state not in ("dead", "stopped"):
            health = replace(health, state="stopped")
        if not health.replicas:
            health = replace(health, replicas=[ReplicaHealth.of(health, self.pids, self._frontend.num_open)])
        return (
            health
            if self._tokenizer_pool is None
            else replace(health, threads={"intake": self._tokenizer_pool.health()})
        )

    def check_health(self) -> None:
        """Raise what a request would: EngineDeadError, EngineShutdownError, ForkedProcessError, or EngineError where no
        prompt can be read."""
        self._check()
        if self._tokenizer_pool is not None and self._tokenizer_pool.failure is not None:
            raise EngineError(self._tokenizer_pool.failure)

    @property
    def pids(self) -> dict[str, int]:
        """The processes of the engine, by actor."""
        return self._supervisor.pids

    def _check(self) -> None:
        if os.getpid() != self._pid:
            raise ForkedProcessError(
                f"this engine belongs to process {self._pid}; build one in this process ({os.getpid()}) instead"
            )
        if self._death is not None:
            error = type(self._death)(
                str(self._death)
            )  # not the one itself, which would collect the tracebacks of all callers
            for note in getattr(self._death, "__notes__", ()):
                error.add_note(note)
            raise error
        if self._is_shut_down:
            raise EngineShutdownError("the engine was shut down; build a new one")

    def _on_death(self, death: ActorDeath) -> None:
        failure = self._supervisor.failure if isinstance(self._supervisor, Supervisor) else None
        self._death = failure or death.to_error()
        CACHE_MEMORY.release(self)
        self._frontend.fail_all(self._death)

    # Requests

    def submit(
        self,
        prompt: Prompt,
        params: SamplingParams | None,
        request_id: str | None = None,
        *,
        host: HostLoop | None = None,
        priority: int = 0,
        slo: SLO | float | None = None,
        is_latency_sensitive: bool = False,
        type_info: str | None = None,
        tenant: str | None = None,
        deadline: float | None = None,
        timeout: float | None = None,
        tokenization_kwargs: Mapping[str, Any] | None = None,
        arrival_time: float | None = None,
        **vllm_arguments: Any,
    ) -> RequestStream:
        """Take a request. Raises what can be told at once; everything else comes out of the stream.

        arrival_time: in epoch seconds; None: now. vllm_arguments: lora_request, trace_headers, mm_processor_kwargs, and
        VLLM_REQUEST_ARGUMENTS at their defaults.
        """
        self._check()
        self.sleep_state.check_request()
        replica = self._pinned_replica(vllm_arguments)
        lora_request = self._submits.checked_adapter(vllm_arguments.pop("lora_request", None))
        trace_headers = checked_trace_headers(vllm_arguments.pop("trace_headers", None))
        processor_kwargs = vllm_arguments.pop("mm_processor_kwargs", None)
        prompt = with_processor_kwargs(prompt, processor_kwargs, self.config.model)
        check_request_arguments(vllm_arguments)
        self.check_generates(params)
        if params is None:
            params = self.default_sampling_params()
        elif isinstance(params, SamplingParams):
            params = params.checked_copy()  # the caller may change its own while a tokenizer worker reads
        else:
            raise InvalidParameterError(f"sampling_params must be a SamplingParams, not {type(params).__name__}")
        if params.detokenize and self.config.model.tokenizer is None and params.stop:
            raise InvalidParameterError("stop strings need a tokenizer, and skip_tokenizer_init=True left it out")
        if params.thinking_token_budget is not None:
            check_budget(self.config.model.marks, self.config.model.tokenizer)
        if params.structured_outputs is not None and self.config.model.tokenizer is None:
            raise InvalidParameterError("structured_outputs need a tokenizer, and skip_tokenizer_init=True left it out")
        sampling = params

        def new_stream(*arguments: Any, **more: Any) -> RequestStream:
            return RequestStream(
                *arguments,
                has_logprobs=sampling.num_logprobs is not None,
                has_prompt_logprobs=sampling.prompt_logprobs is not None,
                is_flat=sampling.flat_logprobs,
                **more,
            )

        maker = functools.partial(self._submits.generating, params=sampling, lora_request=lora_request)
        stream = self._accept(
            prompt,
            RequestSpec(
                params.n,
                params.output_kind,
                checked_tokenization(tokenization_kwargs, params),
                new_stream,
                maker,
                functools.partial(self._submits.prompts_of, lora_request),
                self._submits.is_unread(lora_request),
            ),
            request_id,
            host=host,
            priority=priority,
            slo=slo,
            is_latency_sensitive=is_latency_sensitive,
            type_info=type_info,
            tenant=tenant,
            deadline=deadline,
            timeout=timeout,
            arrival_time=arrival_time,
            replica=replica,
            trace=RequestTrace(trace_headers, params),
        )
        stream.lora_request = lora_request
        return stream

    def encode(
        self,
        prompt: Prompt,
        params: PoolingParams | None = None,
        request_id: str | None = None,
        *,
        tokenization_kwargs: Mapping[str, Any] | None = None,
        vllm_arguments: Mapping[str, Any] | None = None,
        **extras: Any,
    ) -> PoolingStream:
        """Take a request for a vector. extras, and what is raised: as in `submit`."""
        self._check()
        of_vllm = dict(vllm_arguments or {})
        replica = self._pinned_replica(of_vllm)
        lora_request = self._submits.checked_adapter(of_vllm.pop("lora_request", None))
        trace_headers = checked_trace_headers(of_vllm.pop("trace_headers", None))
        processor_kwargs = of_vllm.pop("mm_processor_kwargs", None)
        prompt = with_processor_kwargs(prompt, processor_kwargs, self.config.model)
        check_request_arguments(of_vllm)
        pooler, model = self.config.model.pooler, self.config.model
        if pooler is None:
            raise InvalidParameterError(
                "this engine generates text and makes no vectors; build one with runner='pooling' for that"
            )
        if params is None:
            params = PoolingParams()
        elif not isinstance(params, PoolingParams):
            raise InvalidParameterError(f"pooling_params must be PoolingParams, not {type(params).__name__}")
        params = params.checked_copy()
        pooling = pooler.resolved(params, model.name)
        pooler.check_room(pooling, self.config.scheduler.max_num_batched_tokens)
        skips_cache = pooling.needs_all_states or bool(params.skip_reading_prefix_cache)
        maker = functools.partial(
            self._submits.pooling, pooling=pooling, skips_cache=skips_cache, lora_request=lora_request
        )
        kind, tokenization = RequestOutputKind.FINAL_ONLY, checked_tokenization(tokenization_kwargs, params)
        prompts = functools.partial(self._submits.prompts_of, lora_request)
        asked = RequestSpec(1, kind, tokenization, VectorStream, maker, prompts, self._submits.is_unread(lora_request))
        trace = RequestTrace(trace_headers, params)
        stream = self._accept(prompt, asked, request_id, replica=replica, trace=trace, **extras)
        return PoolingStream(cast(VectorStream, stream), pooling)

    @property
    def needed_plugin(self) -> PluginData:
        """The plug-in that data are for. Raises InvalidParameterError: there is none."""
        if self.plugin_data is None:
            raise InvalidParameterError(
                "data are for a plug-in, and this engine has none; build it with io_processor_plugin, or give a prompt"
            )
        return self.plugin_data

    def _pinned_replica(self, vllm_arguments: dict[str, Any]) -> int | None:
        """What vLLM calls data_parallel_rank, taken out. Raises InvalidParameterError: there is no such replica."""
        number = vllm_arguments.pop("data_parallel_rank", None)
        known = self.replica_numbers
        if number is not None and (isinstance(number, bool) or not isinstance(number, int) or number not in known):
            there = ", ".join(map(str, known))
            raise InvalidParameterError(
                f"data_parallel_rank={shown(number)} is no replica of this engine; leave it at None, or use one of {there}"
            )
        return None if number is None else int(number)

    @property
    def replica_numbers(self) -> list[int]:
        """Of the replicas, which a request may be pinned to."""
        return [0]

    def scale(self, num_replicas: int) -> Future[None]:
        """Have so many replicas; resolved when they run. The future raises InvalidParameterError."""
        self._check()
        raise InvalidParameterError(
            f"num_replicas={shown(num_replicas)}: replicas are processes, and topology='inline' computes in this one; use "
            f"topology='process'"
        )

    def drain_replica(self, number: int, is_draining: bool = True) -> Future[None]:
        """Let a replica take no new requests, and move its streams. The future raises InvalidParameterError."""
        self._check()
        raise InvalidParameterError(
            f"replica {shown(number)} is the whole engine, which drain() drains; scale it up before"
        )

    def default_sampling_params(self) -> SamplingParams:
        """What the model's author recommends (generation_config.json), on top of the defaults of SamplingParams."""
        return sampling_params_of(self.config.model.sampling_defaults)

    def check_generates(self, params: object) -> None:
        """Raises InvalidParameterError where that is asked of an engine which it is not made for, or with such parameters."""
        if self.config.model.pooler is not None:
            raise InvalidParameterError(
                "this engine makes vectors (runner='pooling') and does not generate; use embed() or /v1/embeddings, or build "
                "one with runner='generate'"
            )
        if isinstance(params, PoolingParams):
            raise InvalidParameterError(
                "PoolingParams: this engine generates text and makes no vectors; use SamplingParams, or build one with "
                "runner='pooling'"
            )

    def _accept(
        self,
        prompt: Prompt,
        asked: RequestSpec,
        request_id: str | None,
        *,
        host: HostLoop | None = None,
        replica: int | None = None,
        trace: RequestTrace = NO_TRACE,
        **extras: Any,
    ) -> RequestStream:
        """What requests of both kinds share, from here on to the intake. extras: as in `SubmitMaker.carried`."""
        prompt = snapshot(prompt)
        arrival, carried = self._submits.carried(**extras)
        how = (host, asked.output_kind is RequestOutputKind.FINAL_ONLY, asked.num_sequences)
        mailbox = self._spans.mailbox(trace, arrival, *how)
        mailbox.replica = replica
        with self._lock:
            if self._is_draining:
                raise EngineDrainingError(
                    "the engine is draining: it finishes what it has and takes no new requests; send this one elsewhere"
                )
            self._check_room(asked.num_sequences)
            self._num_requests += 1
            number = self._num_requests
            if request_id is None:
                request_id = self.new_request_id()
            elif not isinstance(request_id, str):
                raise InvalidParameterError(f"request_id={shown(request_id)} must be a string")
            elif not is_text(request_id) or len(request_id) > MAX_LABEL:
                raise InvalidParameterError(
                    f"request_id={shown(request_id)} must be valid Unicode with at most {MAX_LABEL} characters"
                )
            if self.is_open(request_id):
                raise DuplicateRequestError(f"request {shown(request_id)} is still running; choose another request_id")
            if self.config.record is not None:
                carried["name"] = request_id
            text = prompt_text(prompt)
            hold = None if self._hold is None else self._hold()
            stream = asked.new_stream(
                request_id,
                text,
                asked.output_kind,
                arrival,
                mailbox,
                self._abort_mailbox,
                hold,
                asked.num_sequences,
                deadline=carried["deadline"],
            )
            self._streams[request_id] = stream
            self._num_on_the_way += asked.num_sequences
            self._wanting.add(mailbox)
        job = RequestJob(self, prompt, asked, number, arrival, carried, stream)
        try:
            self._enqueue(job)
        except BaseException:
            self._settle(mailbox, asked.num_sequences)
            raise
        return stream

    def _settle(self, mailbox: Mailbox, num_sequences: int, make_submit: Callable[[int], Submit] | None = None) -> bool:
        """A request is on its way no more: it goes to the frontend, or ends here. False: it has done so already."""
        with self._lock:
            if mailbox not in self._wanting:
                return False
            if make_submit is not None:
                self._thread.post(self._submit_on_loop, make_submit, mailbox, num_sequences)
            self._wanting.discard(mailbox)
            self._num_on_the_way -= num_sequences
            return True

    def _check_room(self, num_sequences: int) -> None:
        """Of what has not reached the scheduler yet, no more is kept than it would take."""
        limits = self.config.scheduler
        if limits.max_waiting_requests is None:
            return
        room, num_waiting = limits.max_waiting_requests + limits.max_num_seqs, self._num_on_the_way
        if num_sequences > room:
            raise InvalidParameterError(
                f"n={num_sequences} sequences are more than this engine ever takes at once: max_num_seqs="
                f"{limits.max_num_seqs} that run and max_waiting_requests={limits.max_waiting_requests} that wait; "
                f"ask for fewer, or build it with more"
            )
        if num_waiting + num_sequences > room:
            raise EngineOverloaded(
                f"the engine is overloaded: {num_waiting} requests of at most {room} are on their way to the scheduler; "
                f"try again later, or elsewhere",
                num_waiting_requests=num_waiting,
                max_waiting_requests=limits.max_waiting_requests,
                max_waiting_tokens=limits.max_waiting_tokens,
            )

    def new_request_id(self) -> str:
        """One that no request has unless a caller chose the same."""
        return f"{self._id_prefix}-{next(self._request_numbers)}"

    def is_open(self, request_id: str) -> bool:
        """Whether a request that has not ended has this id."""
        known = self._streams.get(request_id)
        return known is not None and not known.has_ended

    def abort(self, request_ids: str | Iterable[str]) -> None:
        """End requests; each delivers a final output with finish_reason 'abort'. Unknown ids have ended already."""
        self._check()
        ids = [request_ids] if isinstance(request_ids, str) else request_ids
        if isinstance(ids, bytes) or not isinstance(ids, Iterable):
            raise InvalidParameterError(f"request_id={shown(ids)} must be a string, or several")
        ids = list(ids)
        for request_id in ids:
            if not isinstance(request_id, str):
                raise InvalidParameterError(f"request_id={shown(request_id)} must be a string")
        for request_id in ids:
            stream = self._streams.get(request_id)
            if stream is not None:
                stream.abort()

    def _abort_mailbox(self, mailbox: Mailbox) -> None:
        """Also from `__del__`: only posts, and finds nothing wrong with an engine that is gone."""
        if os.getpid() != self._pid or not mailbox.rids:
            if self._tokenizer_pool is not None and os.getpid() == self._pid:
                self._tokenizer_pool.look()  # not submitted yet
            return
        try:
            self._thread.post(self._abort_on_loop, mailbox)
        except ActorLLMError:
            logger.debug("an abort came after the end of the engine")

    def _enqueue(self, job: Job, put: Callable[[JobQueue, Job], None] = JobQueue.put) -> None:
        with self._lock:
            is_taken = not self._is_shut_down
            self._is_start_asked |= is_taken
        if is_taken and self._tokenizer_pool is not None:
            is_taken = self._tokenizer_pool.submit(job, put)
        elif is_taken:
            job.run(None)
        if not is_taken:
            raise EngineShutdownError("the engine was shut down; build a new one")

    def _submit_on_loop(self, make_submit: Callable[[int], Submit], mailbox: Mailbox, num_sequences: int) -> None:
        """All sequences of a request or none: nothing comes between them."""
        rids: list[int] = []
        if num_sequences == 1:
            self._frontend.submit(make_submit, mailbox, rids.append)
        else:
            siblings = [Sibling(mailbox, index, self._abort_on_loop) for index in range(num_sequences)]
            self._frontend.submit_several(make_submit, siblings, rids.append)
        mailbox.rids = rids
        mailbox.sent = now()
        if mailbox.is_aborted or mailbox.error is not None:
            self._abort_on_loop(mailbox)

    def _abort_on_loop(self, mailbox: Mailbox) -> None:
        for rid in mailbox.rids:
            self._frontend.abort(rid)

    def _fail(self, mailbox: Mailbox, error: BaseException) -> None:
        if not mailbox.has_ended:
            mailbox.fail(error)
            self._wake(mailbox)

    @staticmethod
    def _wake(mailbox: Mailbox) -> None:
        if mailbox.host is not None:
            mailbox.host.call_soon_threadsafe(mailbox.wake)

    # Controls

    def ask_scheduler(self, verb: str, **arguments: Any) -> Future[Any]:
        """Ask the scheduler actor something (see SchedulerActor.VERBS). Raises when the engine does not run."""
        self._check()
        return self._thread.call(self._frontend.ask_scheduler, verb, **arguments)

    def look(self, after: Mapping[int, int], at_most: int) -> Future[Any]:
        """What it does now, with the steps after those that are known, by replica; at_most: requests of a kind."""
        return self.ask_scheduler("live", after=after.get(0, 0), at_most=at_most)

    # Weights

    @property
    def weight_memory(self) -> WeightMemory:
        """What new weights are copied to."""
        return self._weight_updates.memory

    def read_weights(self, read: Callable[[], T], version: object, running: object) -> Future[T]:
        """What a caller has brought, looked at on a tokenizer worker. Raises InvalidParameterError, at once or in the future."""
        self._check()
        check_update(version, running)
        if self.config.model.module is not None:
            raise InvalidParameterError(
                "the weights of module= are the application's own, and this engine computes with them; change them in place"
            )
        reading = Reading(lambda worker: read(), is_heavy=True)
        self._enqueue(reading)
        return reading.future

    def update_weights(self, new: NewWeights, version: str | None, running: RunningRequests) -> Future[str]:
        """Let all replicas compute with them; see `WeightUpdates.update`. A caller that waits no more ends no update."""
        self._check()
        return self._uncancelled(self._weight_updates.update, new, version, running)

    def join_trainer(self, place: Mapping[str, Any] | None) -> Future[None]:
        """Let the ranks meet a trainer, and leave the one of before; None: only that. A caller that waits no more ends nothing.

        Raises, in the future: InvalidParameterError; EngineError: they did not meet.
        """
        self._check()
        if place is not None and self.config.is_launched:
            raise InvalidParameterError(
                "init_info: ranks that a launcher has started meet no trainer; bring the tensors with transport='shm'"
            )
        transfers = self._rank_transfers
        return self._uncancelled(transfers.leave) if place is None else self._uncancelled(transfers.join, place)

    @property
    def has_trainer(self) -> bool:
        """The ranks were told to meet one, and not to leave it."""
        return self._rank_transfers.is_joined

    def bring_weights(self, job: RankJob) -> Future[NewWeights]:
        """Let the ranks fill the memory of new weights; see `RankTransfers.bring`. Raises InvalidParameterError."""
        self._check()
        if self.config.is_launched and job.what == "fetch":
            job.close()
            raise InvalidParameterError("an engine that a launcher has started takes tensors with transport='shm' only")
        return self._uncancelled(self._rank_transfers.bring, job)

    def _uncancelled(self, function: Callable[..., Any], *arguments: Any) -> Future[Any]:
        outcome: Future[Any] = Future()
        outcome.set_running_or_notify_cancel()  # from here on it cannot be cancelled
        self._thread.call(function, *arguments).add_done_callback(partial(_pass_on, outcome))
        return outcome

    def name_weights(self, version: str) -> Future[str]:
        """Call the version that counts otherwise from now on. Raises InvalidParameterError."""
        self._check()
        check_update(version, RUNNING_REQUESTS[0])
        return self._uncancelled(self._weight_updates.name, version)

    def sleep(self, level: object, mode: object, requests: object) -> Future[int]:
        """Let all replicas give back memory; see `Sleep`. A caller that waits no more does not end it.

        Raises ConfigError or InvalidParameterError.
        """
        self._check()
        if not self.config.enable_sleep_mode:
            raise ConfigError("sleep() needs an engine that is built with enable_sleep_mode=True")
        check_sleep(level, requests)
        check_pause_mode(mode)
        return self._uncancelled(self._fall_asleep, level, mode, requests)

    async def _fall_asleep(self, level: int, mode: str, requests: SleepRequests) -> int:
        freed = await self._weight_updates.give_back()
        return freed + await self.sleep_state.fall_asleep(level, mode, requests)

    def wake_up(self, tags: object) -> Future[None]:
        """The opposite. Raises InvalidParameterError."""
        self._check()
        return self._uncancelled(self.sleep_state.wake_up, checked_tags(tags))

    def set_policy(self, scheduling_policy: str | None, admission_policy: str | None) -> Future[None]:
        """Let other policies decide on all replicas; see `PolicyChanges`. Raises InvalidParameterError."""
        self._check()
        check_policy_names(scheduling_policy, admission_policy)
        return self._thread.call(self._policy_changes.change, scheduling_policy, admission_policy)

    def call_workers(
        self, target: str, data: Any, *, is_of_model: bool = False, timeout: float = math.inf
    ) -> Future[Called]:
        """Call a function on all ranks of all replicas; see `collective_calls.call_everywhere`."""
        self._check()
        call = partial(collective_calls.call_everywhere, is_of_model=is_of_model)
        calling = self._thread.call(call, self, target, data)
        if self.stepper is not None:  # it was made on the caller's stack, where nothing ends it
            return calling
        return self._thread.call(collective_calls.result_within, calling, target, timeout)

    @property
    def weight_version(self) -> str:
        """The name of the version that new tokens are of, as far as this program knows."""
        return self._frontend.weights.version

    def change_config(self, change: Callable[[EngineConfig], EngineConfig]) -> None:
        """Of the engine, and of every process that is started from now on. On the engine's thread."""
        if self.stepper is not None:
            self.stepper.change_config(change)
        else:
            assert isinstance(self._supervisor, Supervisor)
            self._supervisor.change_config(change)
        self.config, self._given = change(self.config), change(self._given)

    async def ask_all_schedulers(self, verb: str, **arguments: Any) -> Any:
        """As `ask_scheduler`, on the engine's thread."""
        return await self._frontend.ask_scheduler(verb, **arguments)

    def starting(self) -> list[anyio.Event]:
        """Set when a replica that starts now has: it may have begun before a change, and is asked by nothing until then."""
        return []

    def note_new_weights(self) -> None:
        """Every worker has the weights of another version, also where the ones before slept. On the engine's thread."""
        self.sleep_state.note_new_weights()

    # Adapters: each of these answers in its future, and raises InvalidParameterError where the engine takes none.

    def read_adapter(self, lora_request: LoRARequest) -> Future[Adapter]:
        """The content of a folder, read on a tokenizer worker; the number of the request stands for it from now on.

        Its tokenizer is read as well, if it brings one, so that no request waits for that.
        """
        self._check()
        checked = self._submits.checked_adapter(lora_request)
        if checked is None:
            raise InvalidParameterError("lora_request=None must be a LoRARequest")

        def read(worker: JobPlace | None) -> Adapter:
            adapter = self._submits.adapter_of(checked)
            assert adapter is not None
            self._submits.prompts_of(checked)
            return adapter

        reading = Reading(read, is_heavy=True)
        self._enqueue(reading)
        return reading.future

    def ask_for_adapter(self, verb: str, adapter: Adapter) -> Future[Any]:
        """verb: add_adapter, pin_adapter or remove_adapter. Answered when every worker has done it."""
        return self.ask_scheduler(verb, timeout=math.inf, digest=adapter.digest, path=adapter.path)

    def adapter_of_number(self, lora_id: int) -> Adapter | None:
        """What this program called so last; None: nothing that is remembered."""
        return self._adapter_digests().of_number(lora_id)

    def forget_adapter(self, lora_id: int) -> None:
        """The number stands for nothing from now on."""
        self._adapter_digests().forget_number(lora_id)

    def numbers_of_adapters(self, digests: Iterable[str]) -> set[int]:
        """By which this program knows these."""
        return self._adapter_digests().numbers_of(digests)

    def _adapter_digests(self) -> AdapterDigests:
        digests = self._submits.digests
        if digests is None:
            raise InvalidParameterError("this engine takes no adapters; build it with enable_lora=True")
        return digests

    def start_profile(
        self,
        profile_prefix: str | None = None,
        delay_iterations: int | None = None,
        max_iterations: int | None = None,
    ) -> Future[Any]:
        """Trace every torch operation of the workers, until `stop_profile`. The answer, or its error, is in the future.

        profile_prefix: what the names of the files begin with. The other two of vLLM's arguments are accepted where they
        ask for nothing. Raises ConfigError or InvalidParameterError.
        """
        if self.config.profile_folder is None:
            raise ConfigError(
                "a profile needs an engine that is built with "
                "profiler_config={'profiler': 'torch', 'torch_profiler_dir': FOLDER}"
            )
        if profile_prefix is not None and not (
            isinstance(profile_prefix, str) and re.fullmatch(r"[A-Za-z0-9][A-Za-z0-9._-]{0,127}", profile_prefix)
        ):
            raise InvalidParameterError(
                f"profile_prefix={profile_prefix!r:.200} must be up to 128 letters, digits, '.', '_' and '-', the first of "
                f"them a letter or a digit"
            )
        for name, value in (("delay_iterations", delay_iterations), ("max_iterations", max_iterations)):
            if value not in (None, 0):
                raise InvalidParameterError(f"{name}={value!r} is not supported yet; leave it at None or 0")
        prefix = f"{profile_prefix or time.time_ns() // 1_000_000}_"
        return self.ask_scheduler("start_profile", timeout=math.inf, prefix=prefix)

    def stop_profile(self) -> Future[Any]:
        """Write one trace per rank into the folder of profiler_config; the paths are in the future. Raises ConfigError."""
        folder = self.config.profile_folder
        if folder is None:
            raise ConfigError("no profile is under way: the engine was built without profiler_config")
        return self.ask_scheduler("stop_profile", timeout=math.inf, folder=folder)

    def reset_mm_cache(self) -> None:
        """Keep no images or recordings by their uuids. May wait for a prompt with items that is read."""
        if self.prompts.media is not None:
            self.prompts.media.forget_items()

    def reset_encoder_cache(self) -> None:
        """Keep no rows of what was encoded; requests that run have theirs."""
        reader = self.prompts.media or self.prompts.sources
        if reader is not None:
            reader.encoder.forget()

    def statistics(self) -> dict[str, Any]:
        """What this side knows without asking another process."""
        reader = self.prompts.media or self.prompts.sources
        return {
            "num_requests": self._num_requests,
            "encoder": {} if reader is None else reader.encoder.statistics(),
            "intake": {} if self._tokenizer_pool is None else self._tokenizer_pool.statistics(),
            "frontend": self._frontend.statistics() if self.is_running and self._thread.is_alive else {},
            "supervisor": self._supervisor.statistics(),
            **{name: tell() for name, tell in self.watchers.items()},
        }


def _check_room_of_tier(num_bytes: int) -> None:
    """Pages of a tier are taken as blocks come: one that is larger than the memory would end a worker hours after the start."""
    limit = limit_bytes()
    if num_bytes > limit:
        raise ConfigError(
            f"kv_offloading_size={num_bytes / 2**30:g} (GiB) is more than the {limit / 2**30:.1f} GiB that this machine has; "
            f"give less"
        )


def _pass_on(outcome: Future[Any], done: Future[Any]) -> None:
    """Resolve a future as another one was."""
    if done.cancelled():
        outcome.set_exception(EngineShutdownError("the engine was shut down"))
    elif (error := done.exception()) is not None:
        outcome.set_exception(error)
    else:
        outcome.set_result(done.result())


def _drop(engine: Engine) -> None:
    """The last holder of the engine let go, on any thread, perhaps in the middle of a collection: no lock, no waiting."""
    if os.getpid() != engine._pid or engine._is_shut_down:
        return
    with contextlib.suppress(RuntimeError):  # the interpreter ends, and the engine with it
        _thread.start_new_thread(_shut_down_in_thread, (engine,))


def _shut_down_in_thread(engine: Engine) -> None:
    with contextlib.suppress(RuntimeError):
        threading.Thread(target=engine.shutdown, name="actorllm:dropped", daemon=True).start()
