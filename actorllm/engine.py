"""`Engine`: what both front doors share. Intake of requests, the engine thread, start and shutdown.

A request goes from the caller's thread to the intake thread (starts the engine if need be, tokenizes, checks against the
model), from there to the frontend actor on the engine thread, and from there to the scheduler. So the caller's loop never
waits for a tokenizer, and a bad prompt fails its own request only.
"""

from __future__ import annotations

import _thread
import contextlib
import functools
import importlib.util
import itertools
import logging
import math
import os
import queue
import re
import sys
import tempfile
import threading
import time
import uuid
import weakref
from collections.abc import Callable, Iterable, Mapping, Sequence
from concurrent.futures import Future, InvalidStateError
from dataclasses import dataclass, field, replace
from hashlib import blake2b
from numbers import Integral
from pathlib import Path
from typing import Any, TypeAlias, cast

import anyio
import numpy as np
from numpy.typing import NDArray

from actorllm.actors.death import ActorDeath
from actorllm.actors.engine_thread import STOP_TIMEOUT_S, EngineThread, HostLoop, Service
from actorllm.actors.frontend import FrontendActor
from actorllm.actors.membership import Membership
from actorllm.actors.reception import Reception
from actorllm.actors.restart import RestartLimits
from actorllm.actors.stepper import Stepper
from actorllm.actors.supervisor import Supervisor
from actorllm.actors.topology import engine_topology
from actorllm.actors.vigil import CAUGHT
from actorllm.clock import from_epoch, now
from actorllm.config import EngineConfig
from actorllm.embeds import EMBEDDED, MAX_PROMPT_BYTES, encode_rows, read_rows, salt_of
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
    InvalidPromptError,
    nearest_name,
)
from actorllm.generation import sampling_params_of
from actorllm.health import EngineHealth
from actorllm.kvcache.prefix_index import extra_key, hash_blocks
from actorllm.messages import I32, NO_U8, U8, Submit, no_u8
from actorllm.pooling import Pooling
from actorllm.pooling_stream import PoolingStream, VectorStream
from actorllm.request import (
    PoolingParams,
    RequestOutputKind,
    SamplingParams,
    check_request_arguments,
    check_truncation,
    is_text,
)
from actorllm.rules import rules_of
from actorllm.scheduling.guard import FALLBACK
from actorllm.slo.objective import SLO
from actorllm.stream import Mailbox, RequestStream, Sibling
from actorllm.structured_outputs import StructuredOutputsParams
from actorllm.text.chat import ChatTemplate, Conversation
from actorllm.text.tokenizer import Side, Tokenizer, transformers_tokenizer

logger = logging.getLogger(__name__)

MAX_OBJECTIVES = 1000
"""So many different ones are remembered."""

Prompt: TypeAlias = str | Mapping[str, Any] | Iterable[int] | Conversation
"""Text, token ids, a mapping as in vLLM (PROMPT_KEYS), or a conversation for the model's chat template."""

PROMPT_KEYS = ("prompt_token_ids", "prompt")
"""Where a prompt mapping holds the prompt; of both, the ids count. Beside it there may be a 'cache_salt'."""

EMBEDS_KEYS = ("prompt_embeds", "prompt_is_token_ids")
"""Of a prompt that is given as embeddings, as a whole or in part; the second says where 'prompt_token_ids' count."""

VLLM_PROMPT_KEYS = (
    "multi_modal_data",
    "multi_modal_uuids",
    "mm_processor_kwargs",
    "encoder_prompt",
    "decoder_prompt",
)
"""What vLLM's prompts may hold beside that; accepted as None."""

JOURNAL_INTERVAL = 64
"""New tokens per row of a request that is told everything at its end: what the journal has is not computed again when the
scheduler dies."""

TOKENIZATION_KEYS = ("truncate_prompt_tokens", "add_special_tokens", "truncation_side")
"""What tokenization_kwargs may hold."""


@dataclass(frozen=True, slots=True, eq=False)
class TokenizedPrompt:
    """A prompt as the engine takes it."""

    ids: I32
    text: str | None
    cache_salt: str | None = None
    """Requests share cached blocks only with those of the same salt."""
    embeds: U8 = field(default_factory=no_u8)
    """The rows of the positions whose id is EMBEDDED."""
    shown_ids: list[int] | None = None
    """What outputs show of a prompt with embeddings: the ids beside them, or as many zeros."""

    def continued(self, token_ids: list[int]) -> Prompt:
        """The prompt of a request that goes on from this one."""
        if self.embeds.size:
            raise InvalidPromptError("beam search goes on from token ids; prompt_embeds have none")
        return {"prompt_token_ids": token_ids, "cache_salt": self.cache_salt}


@dataclass(frozen=True, slots=True)
class Asked:
    """What the engine is to do for one request, as far as its kind makes a difference."""

    num_sequences: int
    output_kind: RequestOutputKind
    tokenization: dict[str, Any]
    """The keyword arguments of `Engine.tokenize`."""
    new_stream: Callable[..., RequestStream]
    """Of the constructor's arguments that do not depend on the kind."""
    make_maker: Callable[..., Callable[[int], Submit]]
    """From the tokenized prompt and (number, arrival, carried) to what makes the message."""


class Hold:
    """What a front door and its open streams keep: the engine is shut down when the last of them lets go."""

    __slots__ = ("__weakref__",)


class Engine:
    """One engine, owned by the process that builds it. All methods may be called from any thread.

    Its threads keep it alive, so it does not end by being dropped; whoever should end it that way keeps a `new_hold`.

    is_synchronous: whoever submits tokenizes and checks, there is no intake thread; and with topology="inline" the
    engine computes in the calls of its `stepper`, on no thread of its own.
    """

    def __init__(self, config: EngineConfig, *, is_synchronous: bool = False) -> None:
        self.config = config
        self._pid = os.getpid()
        self._is_synchronous = is_synchronous
        self.stepper: Stepper | None = None
        self._supervisor: Supervisor | Membership | Stepper
        self._thread: EngineThread | Stepper
        self._make()
        self._death: EngineError | None = None
        self._is_shut_down = False
        self._is_start_asked = False
        self._is_draining = False
        self._hold: weakref.ref[Hold] | None = None
        self._lock = threading.Lock()
        self._giving_up = threading.Lock()
        """Held while a start is taken back; before the next one, and before the end, that must be through."""
        self._wanting: set[object] = set()
        """Who waits for the start."""
        self._has_started = False
        self._streams: weakref.WeakValueDictionary[str, RequestStream] = weakref.WeakValueDictionary()
        self._num_requests = 0
        self._objectives: set[SLO] = set()  # that were looked at
        self._num_on_the_way = 0
        self._id_prefix = uuid.uuid4().hex[:8]
        self._request_numbers = itertools.count(1)
        self._intake: queue.SimpleQueue[Callable[[], None] | None] = queue.SimpleQueue()
        self._intake_thread: threading.Thread | None = None
        self._tokenizer: Tokenizer | None = None
        self._chat_template: ChatTemplate | None = None

    # What it is made of; an AttachedEngine is made of something else

    def _make(self) -> None:
        """Everything that lives but once, from the start to the end."""
        self._frontend = self._new_frontend()
        if self._is_synchronous and self.config.topology == "inline":
            self.stepper = Stepper(self.config, self._frontend, _resolve, self._on_death)
            self._supervisor = self._thread = self.stepper
        else:
            self._supervisor = self._new_supervisor()
            self._thread = EngineThread(self._new_service())

    def _new_frontend(self) -> FrontendActor:
        return FrontendActor()

    def _new_supervisor(self) -> Supervisor | Membership:
        self.config = _renew(self.config)
        return Supervisor(
            engine_topology(self.config),
            self.config,
            resolve=_resolve,
            on_death=self._on_death,
            actors={"frontend": self._frontend},
            restarts=RestartLimits() if self.config.on_failure == "restart" else None,
            renew=_renew,
            amend=_without_endless_policies,
            standby="workers" if self.config.standby_worker else None,
            heartbeat_timeout_s=self.config.heartbeat_timeout_s,
            step_timeout_s=self.config.step_timeout_s,
            restart_timeout_s=self.config.restart_timeout_s,
        )

    def _new_service(self) -> Service:
        """The supervisor, behind a door for others if the engine has a name. Attaching needs Linux, as rings do."""
        assert isinstance(self._supervisor, Supervisor)
        if self.config.name is None or sys.platform != "linux":
            return self._supervisor
        return Reception(self.config.name, self._supervisor, self._frontend)

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
        thread.start()
        with self._lock:
            if thread is self._thread and not self._has_started:
                self.config = cast(EngineConfig, supervisor.config)
                self._has_started = True

    def start_in_background(self) -> Future[None]:
        """As `start`, on the intake thread. Who does not wait for it any more says so with `give_up_start`."""
        future: Future[None] = Future()

        def start() -> None:
            if not future.set_running_or_notify_cancel():
                return  # who asked has gone
            try:
                self._start()
            except BaseException as error:
                future.set_exception(error)
            else:
                future.set_result(None)
            finally:
                with self._lock:
                    self._wanting.discard(future)

        with self._lock:
            self._wanting.add(future)
        self._enqueue(start)
        return future

    def give_up_start(self, future: Future[None]) -> None:
        """Who had asked for this start has gone. If nobody else wants it, what was begun is stopped, and can begin anew.

        Waits until it is stopped.
        """
        with self._giving_up:
            with self._lock:
                self._wanting.discard(future)
                if self._wanting or self._has_started or self._is_shut_down or self._death is not None:
                    return
                thread, supervisor = self._thread, self._supervisor
                if not self._remake():
                    return
            thread.stop()
            if isinstance(supervisor, Supervisor):
                _end_rendezvous(cast(EngineConfig, supervisor.config))

    def _remake(self) -> bool:
        """Whether everything that lives but once was made again."""
        self._is_start_asked = False
        self._make()
        return True

    def shutdown(self, timeout: float = 5.0) -> None:
        """End every request with EngineShutdownError and stop all processes; returns when they are gone. Idempotent."""
        if os.getpid() != self._pid:
            return
        with self._lock:  # with `_enqueue`: no job comes behind the sentinel
            self._is_shut_down = True
            intake, self._intake_thread = self._intake_thread, None
            if intake is not None:
                self._intake.put(None)
        with self._giving_up:
            thread, supervisor = self._thread, self._supervisor
        thread.stop(timeout)
        if isinstance(supervisor, Supervisor):
            _end_rendezvous(cast(EngineConfig, supervisor.config))
        if intake is not None and intake is not threading.current_thread():
            intake.join(timeout)
            if intake.is_alive():
                self._end_jobs()
        error = self._death or EngineShutdownError("the engine was shut down")
        with self._lock:
            streams = list(self._streams.values())
        for stream in streams:
            if not stream.has_ended:
                self._fail(stream._mailbox, error)

    def drain(self, timeout: float | None = None) -> Future[bool]:
        """Take no new request, let those finish that there are, and abort what is left after `timeout` seconds.

        Resolved when all have ended: True if none had to be aborted. `shutdown` is the caller's. What has not reached the
        frontend by then, because the engine still starts, ends here. A scheduler that does not say that it has aborted the
        others keeps nobody for more than STOP_TIMEOUT_S; if it comes back, or another one does, they end then. Cancelling
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
        """As `drain`, for a caller that waits; who is interrupted leaves the requests going on."""
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

    async def _drain_on_loop(self, until: float) -> bool:
        """As `drain`, once every request has reached the frontend."""
        try:
            with anyio.move_on_after(until - now()):
                await self._wait_until_idle()
                return await self._frontend.wait_until_idle()
            with anyio.move_on_after(STOP_TIMEOUT_S) as in_time:
                self._frontend.abort_all()  # in the journal: a scheduler that takes the place of this one hears it as well
                with contextlib.suppress(TimeoutError):
                    await self._abort_all()
                await self._frontend.wait_until_idle()
        except EngineError as error:
            logger.warning("the engine ended before its requests did: %s", error)
            return False
        if in_time.cancelled_caught:
            logger.warning("the scheduler did not end what is left within %g s", STOP_TIMEOUT_S)
        return False

    async def _wait_until_idle(self) -> None:
        """Those of attached frontends have ended as well, which may submit no more."""
        await self._frontend.ask_scheduler("drain", timeout=math.inf)

    async def _abort_all(self) -> None:
        await self._frontend.ask_scheduler("abort_all")

    def _end_jobs(self) -> None:
        """The intake thread is busy with one job: those behind it run here, and all they find is the shutdown."""
        jobs = []
        with contextlib.suppress(queue.Empty):
            while True:
                jobs.append(self._intake.get_nowait())
        self._intake.put(None)
        for job in jobs:
            if job is not None:
                job()

    def new_hold(self) -> Hold:
        """What a front door keeps; also every stream from now on, until it has ended."""
        hold = Hold()
        self._hold = weakref.ref(hold)
        weakref.finalize(hold, _drop, self).atexit = False  # there the engine thread stops by itself
        return hold

    @property
    def is_new(self) -> bool:
        """Nobody has asked it to start yet, nor to end."""
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
        return health

    def check_health(self) -> None:
        """Raise what a request would: EngineDeadError, EngineShutdownError or ForkedProcessError."""
        self._check()

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
            raise type(self._death)(str(self._death))
        if self._is_shut_down:
            raise EngineShutdownError("the engine was shut down; build a new one")

    def _on_death(self, death: ActorDeath) -> None:
        self._death = death.to_error()
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

        arrival_time: in epoch seconds; None: now. vllm_arguments: VLLM_REQUEST_ARGUMENTS at their defaults.
        """
        self._check()
        check_request_arguments(vllm_arguments)
        self.check_generates(params)
        if params is None:
            params = self.default_sampling_params()
        elif isinstance(params, SamplingParams):
            params = params.checked_copy()  # the caller may change his while the intake thread works
        else:
            raise InvalidParameterError(f"sampling_params must be a SamplingParams, not {type(params).__name__}")
        if params.detokenize and self.config.model.tokenizer is None and params.stop:
            raise InvalidParameterError("stop strings need a tokenizer, and skip_tokenizer_init=True left it out")
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

        maker = functools.partial(self._submit_maker, params=sampling)
        return self._accept(
            prompt,
            Asked(params.n, params.output_kind, _checked_tokenization(tokenization_kwargs, params), new_stream, maker),
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
        )

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
        check_request_arguments(dict(vllm_arguments or {}))
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
        skips_cache = pooling.needs_all_states or bool(params.skip_reading_prefix_cache)
        maker = functools.partial(self._pooling_maker, pooling=pooling, skips_cache=skips_cache)
        kind, tokenization = RequestOutputKind.FINAL_ONLY, _checked_tokenization(tokenization_kwargs, params)
        asked = Asked(1, kind, tokenization, VectorStream, maker)
        return PoolingStream(cast(VectorStream, self._accept(prompt, asked, request_id, **extras)), pooling)

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
        asked: Asked,
        request_id: str | None,
        *,
        host: HostLoop | None = None,
        priority: int = 0,
        slo: SLO | float | None = None,
        is_latency_sensitive: bool = False,
        type_info: str | None = None,
        tenant: str | None = None,
        deadline: float | None = None,
        timeout: float | None = None,
        arrival_time: float | None = None,
    ) -> RequestStream:
        """What requests of both kinds share, from here on to the intake thread."""
        prompt = _snapshot(prompt)
        if isinstance(priority, bool) or not isinstance(priority, int) or not -(2**63) <= priority < 2**63:
            raise InvalidParameterError(f"priority={priority!r} must be a 64-bit integer; lower is sooner")
        _check_seconds("deadline", deadline, "monotonic")
        if timeout is not None:
            deadline = min(now() + check_timeout(timeout), math.inf if deadline is None else deadline)
        _check_seconds("arrival_time", arrival_time, "epoch")
        for name, label in (("type_info", type_info), ("tenant", tenant)):
            if label is not None and not is_text(label):
                raise InvalidParameterError(f"{name}={label!r} must be a string of valid Unicode, or None")
        objective = SLO.from_value(slo)
        if objective is not None and objective not in self._objectives:
            self._note_objective(objective)
        carried = {
            "priority": priority,
            "slo": None if objective is None else list(_slo_fields(objective)),
            "is_latency_sensitive": bool(is_latency_sensitive),
            "type_info": type_info,
            "tenant": tenant,
            "deadline": deadline,
        }
        arrival = now() if arrival_time is None else from_epoch(arrival_time)
        mailbox = Mailbox(host, asked.output_kind is RequestOutputKind.FINAL_ONLY, asked.num_sequences)
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
                raise InvalidParameterError(f"request_id={request_id!r} must be a string")
            if self.is_open(request_id):
                raise DuplicateRequestError(f"request {request_id!r} is still running; choose another request_id")
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
                deadline=deadline,
            )
            self._streams[request_id] = stream
            self._num_on_the_way += asked.num_sequences
            self._wanting.add(mailbox)
        stream_ref = weakref.ref(stream)

        def take_in() -> None:
            try:
                self._take_in(prompt, asked, number, arrival, carried, mailbox, stream_ref)
            finally:
                self._arrived(mailbox, asked.num_sequences)

        try:
            self._enqueue(take_in)
        except BaseException:
            self._arrived(mailbox, asked.num_sequences)
            raise
        return stream

    def _arrived(self, mailbox: Mailbox, num_sequences: int) -> None:
        """A request is on its way no more."""
        with self._lock:
            if mailbox in self._wanting:
                self._wanting.discard(mailbox)
                self._num_on_the_way -= num_sequences

    def _note_objective(self, objective: SLO) -> None:
        """Warn of one that no engine can keep, once."""
        if len(self._objectives) >= MAX_OBJECTIVES:
            self._objectives.clear()
        self._objectives.add(objective)
        if (reason := objective.contradiction()) is not None:
            logger.warning("%s can never be kept: %s", objective, reason)

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
            raise InvalidParameterError(f"request_id={ids!r} must be a string, or several")
        ids = list(ids)
        for request_id in ids:
            if not isinstance(request_id, str):
                raise InvalidParameterError(f"request_id={request_id!r} must be a string")
        for request_id in ids:
            stream = self._streams.get(request_id)
            if stream is not None:
                stream.abort()

    def _abort_mailbox(self, mailbox: Mailbox) -> None:
        """Also from `__del__`: only posts, and finds nothing wrong with an engine that is gone."""
        if os.getpid() != self._pid or not mailbox.rids:
            return  # not submitted yet: the intake sees is_aborted
        try:
            self._thread.post(self._abort_on_loop, mailbox)
        except ActorLLMError:
            logger.debug("an abort came after the end of the engine")

    def _enqueue(self, job: Callable[[], None]) -> None:
        with self._lock:
            if self._is_shut_down:
                raise EngineShutdownError("the engine was shut down; build a new one")
            self._is_start_asked = True
            if not self._is_synchronous:
                self._start_intake()
                self._intake.put(job)
                return
        job()

    def _start_intake(self) -> None:
        if self._intake_thread is None:
            self._intake_thread = threading.Thread(target=self._run_intake, name="actorllm:intake", daemon=True)
            self._intake_thread.start()

    def _run_intake(self) -> None:
        while (job := self._intake.get()) is not None:
            try:
                job()
            except Exception:
                logger.exception("a job of the intake failed")  # the jobs behind it must not wait for ever
            del job  # else the last request would be kept alive while the thread waits

    def _take_in(
        self,
        prompt: Prompt,
        asked: Asked,
        number: int,
        arrival: float,
        carried: dict[str, Any],
        mailbox: Mailbox,
        stream_ref: weakref.ref[RequestStream],
    ) -> None:
        """On the intake thread: start, tokenize, check, hand over."""
        try:
            self._start()
        except Exception as error:
            self._fail(mailbox, error)
            return
        try:
            tokenized = self.tokenize(prompt, **asked.tokenization)
            make_submit = asked.make_maker(tokenized, number=number, arrival=arrival, carried=carried)
            stream = stream_ref()
            if stream is not None:
                stream.prompt = tokenized.text
                shown = tokenized.shown_ids
                stream.prompt_token_ids = tokenized.ids.tolist() if shown is None else shown
            del stream
            if mailbox.is_aborted and stream_ref() is None:
                return
            with self._lock:
                if mailbox in self._wanting:  # else it was ended meanwhile (`drain`)
                    self._thread.post(self._submit_on_loop, make_submit, mailbox, asked.num_sequences)
        except Exception as error:
            self._fail(mailbox, error if isinstance(error, ActorLLMError) else InvalidPromptError(str(error)))

    def _submit_on_loop(self, make_submit: Callable[[int], Submit], mailbox: Mailbox, num_sequences: int) -> None:
        """All sequences of a request or none: nothing comes between them."""
        rids: list[int] = []
        if num_sequences == 1:
            self._frontend.submit(make_submit, mailbox, rids.append)
        else:
            siblings = [Sibling(mailbox, index, self._abort_on_loop) for index in range(num_sequences)]
            self._frontend.submit_several(make_submit, siblings, rids.append)
        mailbox.rids = rids
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

    # Prompts

    @property
    def tokenizer(self) -> Tokenizer:
        """Loaded when first needed. Raises ModelError, or InvalidPromptError when the engine was built without one."""
        if self._tokenizer is None:
            if self.config.model.tokenizer is None:
                raise InvalidPromptError("the engine was built with skip_tokenizer_init=True; give token ids")
            self._tokenizer = Tokenizer(self.config.model.tokenizer)
        return self._tokenizer

    @property
    def pad_token_id(self) -> int | None:
        """The tokenizer's, if there is one."""
        return None if self.config.model.tokenizer is None else self.tokenizer.pad_token_id

    @functools.cached_property
    def transformers_tokenizer(self) -> Any:
        """The same as transformers has it, for programs that do more with one. Raises as `tokenizer`."""
        return transformers_tokenizer(self.tokenizer.path)

    def tokenize(
        self,
        prompt: Prompt,
        *,
        truncate_prompt_tokens: int | None = None,
        add_special_tokens: bool | None = None,
        truncation_side: Side | None = None,
    ) -> TokenizedPrompt:
        """The token ids of a prompt, checked against the model. Raises InvalidPromptError.

        truncate_prompt_tokens: keep so many; -1: what the model's length has room for. truncation_side: which end of the
        prompt is left out; None: the beginning ("left"), or in an engine that pools what the tokenizer says. Of a text, the
        special tokens around it stay then. add_special_tokens: None: those of the model, except around a conversation, whose
        template writes them itself.
        """
        num_kept = self._kept_tokens(truncate_prompt_tokens)
        salt: str | None = None
        pooler = self.config.model.pooler
        text = prompt_text(prompt)
        embeds: NDArray[np.float32] | None = None
        shown: list[int] | None = None
        if isinstance(prompt, Mapping):
            salt = prompt.get("cache_salt")
            if prompt.get("prompt_embeds") is not None:
                embeds, ids, shown = self._embedded(prompt)
            else:
                prompt = _unwrap(prompt)
        if isinstance(prompt, Conversation):
            prompt = text = self.chat_template.render(prompt)
            add_special_tokens = bool(add_special_tokens)
        if embeds is not None:
            pass
        elif isinstance(prompt, str):
            if pooler is None:
                cut = num_kept if truncation_side is None else None
                ids = self.tokenizer.encode(prompt, add_special_tokens is not False, cut)
            elif not prompt:
                raise InvalidPromptError("the prompt is empty")
            else:
                ids = self.tokenizer.encode_within(
                    prompt.lower() if pooler.lowercases else prompt,
                    add_special_tokens is not False,
                    num_kept,
                    truncation_side,
                )
        else:
            ids = _checked_ids(prompt, self.config.model.vocab_size)
        if not ids.size:
            raise InvalidPromptError("the prompt is empty")
        if num_kept is not None and ids.size > num_kept:
            keeps_first = truncation_side == "right" if pooler is None else self._truncates_end(truncation_side)
            kept = slice(num_kept) if keeps_first else slice(ids.size - num_kept, None)
            ids = ids[kept]
            if embeds is not None and shown is not None:
                embeds, shown = embeds[kept], shown[kept]
        limit = self.config.model.max_model_len
        most = limit - (pooler is None)  # a token is to come
        if ids.size > most:
            instead = "" if pooler is None else ", or set truncate_prompt_tokens (-1: to what there is room for)"
            raise InvalidPromptError(
                f"the prompt has {ids.size} tokens and max_model_len is {limit}: shorten it to {most} or fewer{instead}"
            )
        if embeds is None:
            return TokenizedPrompt(ids, text, salt)
        rows = encode_rows(embeds[ids == EMBEDDED], self.config.model.dtype)
        if rows.size > MAX_PROMPT_BYTES:
            most = MAX_PROMPT_BYTES // self.config.model.embedding_bytes
            raise InvalidPromptError(
                f"prompt_embeds of {rows.size} bytes are more than a request may carry ({MAX_PROMPT_BYTES}): shorten "
                f"them to {most} tokens or fewer"
            )
        return TokenizedPrompt(ids, text, salt_of(rows, salt), rows, shown)

    def _kept_tokens(self, truncate_prompt_tokens: int | None) -> int | None:
        """How many tokens of a prompt are left at most; None: all of them."""
        if truncate_prompt_tokens is None:
            return None
        limit = self.config.model.max_model_len
        if truncate_prompt_tokens > limit:
            raise InvalidParameterError(
                f"truncate_prompt_tokens={truncate_prompt_tokens} is more than max_model_len={limit}; use -1 to keep "
                f"what there is room for"
            )
        if truncate_prompt_tokens > 0:
            return truncate_prompt_tokens
        return limit - (self.config.model.pooler is None)

    def _truncates_end(self, side: Side | None) -> bool:
        """Of a prompt to be pooled."""
        if side is None and self.config.model.tokenizer is not None:
            side = self.tokenizer.truncation_side
        return side != "left"

    def _embedded(self, prompt: Mapping[str, Any]) -> tuple[NDArray[np.float32], I32, list[int]]:
        """Of a prompt with embeddings: the rows, the ids (EMBEDDED where the row counts), and the ids to be shown."""
        model = self.config.model
        if model.embedding_size is None:
            raise InvalidPromptError("prompt_embeds need an engine that is built with enable_prompt_embeds=True")
        _check_prompt_keys(prompt)
        rows = read_rows(prompt["prompt_embeds"], model.embedding_size)
        ids, is_id = prompt.get("prompt_token_ids"), prompt.get("prompt_is_token_ids")
        if (ids is None) != (is_id is None):
            there, missing = ("prompt_token_ids", "prompt_is_token_ids")[:: 1 if is_id is None else -1]
            raise InvalidPromptError(f"prompt_embeds with {there} need {missing}, too: it says where the ids count")
        if ids is None or is_id is None:
            return rows, np.full(len(rows), EMBEDDED, np.int32), [0] * len(rows)
        shown = ids.tolist() if isinstance(ids, np.ndarray) else list(ids)
        mask = np.array(list(is_id))
        if len(shown) != len(rows) or mask.shape != (len(rows),) or mask.dtype != np.bool_:
            raise InvalidPromptError(
                f"prompt_embeds of {len(rows)} tokens need as many prompt_token_ids and prompt_is_token_ids (booleans), "
                f"not {len(shown)} and {mask.size}"
            )
        mixed = np.full(len(rows), EMBEDDED, np.int32)
        mixed[mask] = _checked_ids(
            [i for i, counts in zip(shown, mask.tolist(), strict=True) if counts], model.vocab_size
        )
        return rows, mixed, shown

    @property
    def chat_template(self) -> ChatTemplate:
        """Read when first needed; raises as `tokenizer` does, and CorruptModelError."""
        if self._chat_template is None:
            self._chat_template = ChatTemplate(self.tokenizer)
        return self._chat_template

    def default_sampling_params(self) -> SamplingParams:
        """What the model's author recommends (generation_config.json), on top of the defaults of SamplingParams."""
        return sampling_params_of(self.config.model.sampling_defaults)

    def _submit_maker(
        self, prompt: TokenizedPrompt, params: SamplingParams, number: int, arrival: float, carried: dict[str, Any]
    ) -> Callable[[int], Submit]:
        model, ids = self.config.model, prompt.ids
        room = model.max_model_len - ids.size
        max_tokens = room if params.max_tokens is None else min(params.max_tokens, room)
        if params.max_tokens is None and params.min_tokens > room:
            raise InvalidParameterError(
                f"min_tokens={params.min_tokens} is more than the {room} tokens that max_model_len={model.max_model_len} "
                f"leaves room for behind this prompt"
            )
        stop_ids = cast("list[int]", params.stop_token_ids)
        if stop_ids and max(stop_ids) >= model.vocab_size:
            raise InvalidParameterError(
                f"stop_token_ids: {max(stop_ids)} is outside the vocabulary of {model.vocab_size} tokens"
            )
        if prompt.embeds.size and params.prompt_logprobs is not None:
            raise InvalidParameterError(
                f"prompt_logprobs={params.prompt_logprobs}: there are none where the prompt has embeddings and no token ids"
            )
        rules = rules_of(params, model.vocab_size, model.max_logprobs, lambda: self.tokenizer)
        structured = cast("StructuredOutputsParams | None", params.structured_outputs)
        seed = params.seed if params.seed is not None else self._new_seed(number)
        # Of tokens that are found in the cache there are no logits, whatever the request says of reading it.
        skips_cache = params.prompt_logprobs is not None or bool(params.skip_reading_prefix_cache)
        hashes = NO_U8
        if self.config.cache.enable_prefix_caching:
            hashes = hash_blocks(ids, self.config.cache.block_size, extra_key(prompt.cache_salt))
        interval = max(params.stream_interval or 1, self.config.stream_interval)
        is_final_only = params.output_kind is RequestOutputKind.FINAL_ONLY

        def make_submit(rid: int) -> Submit:
            return Submit(
                rid=rid,
                arrival=arrival,
                prompt=ids,
                prompt_embeds=prompt.embeds,
                max_tokens=max_tokens,
                min_tokens=min(params.min_tokens, max_tokens),
                temperature=params.temperature,
                top_k=params.top_k if 0 < params.top_k < model.vocab_size else 0,
                top_p=params.top_p,
                min_p=params.min_p,
                seed=seed,
                ignore_eos=params.ignore_eos,
                stop_token_ids=stop_ids,
                stop=cast("list[str]", params.stop),
                include_stop=params.include_stop_str_in_output,
                detokenize=params.detokenize and model.tokenizer is not None,
                skip_special_tokens=params.skip_special_tokens,
                spaces_between_special_tokens=params.spaces_between_special_tokens,
                stream_interval=JOURNAL_INTERVAL if is_final_only else interval,
                rules=None if rules is None else rules.to_fields(),
                grammar=None if structured is None else structured.to_fields(),
                block_hashes=hashes,
                cache_salt=prompt.cache_salt,
                skip_reading_prefix_cache=skips_cache,
                **carried,
            )

        return make_submit

    def _pooling_maker(
        self,
        prompt: TokenizedPrompt,
        pooling: Pooling,
        skips_cache: bool,
        number: int,
        arrival: float,
        carried: dict[str, Any],
    ) -> Callable[[int], Submit]:
        hashes, pooler = NO_U8, self.config.model.pooler
        assert pooler is not None
        if self.config.cache.enable_prefix_caching:
            hashes = hash_blocks(prompt.ids, self.config.cache.block_size, extra_key(prompt.cache_salt))

        def make_submit(rid: int) -> Submit:
            return Submit(
                rid=rid,
                arrival=arrival,
                prompt=prompt.ids,
                prompt_embeds=prompt.embeds,
                max_tokens=1,
                pooling=pooling.kind,
                is_chunkable=not pooler.is_encoder,
                detokenize=False,
                block_hashes=hashes,
                cache_salt=prompt.cache_salt,
                skip_reading_prefix_cache=skips_cache,
                **carried,
            )

        return make_submit

    def _new_seed(self, number: int) -> int:
        """Of a request that brings none: drawn, or the engine's own seed and the number of the request make it."""
        if self.config.seed is None:
            return int.from_bytes(os.urandom(8), "little")
        return int.from_bytes(blake2b(b"%d:%d" % (self.config.seed, number), digest_size=8).digest(), "little")

    # Controls

    def ask_scheduler(self, verb: str, **arguments: Any) -> Future[Any]:
        """Ask the scheduler actor something (see SchedulerActor.VERBS). Raises when the engine does not run."""
        self._check()
        return self._thread.call(self._frontend.ask_scheduler, verb, **arguments)

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

    def statistics(self) -> dict[str, Any]:
        """What this side knows without asking anybody."""
        return {
            "num_requests": self._num_requests,
            "frontend": self._frontend.statistics() if self.is_running and self._thread.is_alive else {},
            "supervisor": self._supervisor.statistics(),
        }


class Draining:
    """One call of `Engine.drain`: behind the requests of before, but not for longer than its time.

    It begins on the loop when the intake thread gets to it. If that is too late, because the engine still starts, its timer
    ends what is on the way.
    """

    def __init__(self, engine: Engine, until: float, answer: Future[bool]) -> None:
        self._engine = engine
        self._until = until
        self._answer = answer
        self._lock = threading.Lock()
        self._has_begun = False
        self._num_ended = 0
        self._timer: threading.Timer | None = None
        if until < math.inf:
            self._timer = threading.Timer(max(0.0, until - now()), self._on_time)
            self._timer.daemon = True

    def begin(self) -> None:
        self._answer.add_done_callback(self._on_answered)
        if self._timer is not None:
            self._timer.start()
        self._enqueue()

    def _enqueue(self) -> None:
        try:
            self._engine._enqueue(self._on_turn)
        except EngineShutdownError:
            self._resolve(False)

    def _on_turn(self) -> None:
        """On the intake thread: every request of before has been handed to the loop, or has ended."""
        if self._engine._num_on_the_way:  # let in a moment before, by another thread that is about to enqueue it
            self._enqueue()
        else:
            self._drain()

    def _on_time(self) -> None:
        """On the timer's thread."""
        self._num_ended = self._engine._end_on_the_way()
        if self._engine._has_started:
            self._drain()
        else:  # nothing has reached the frontend
            self._resolve(not self._num_ended)

    def _drain(self) -> None:
        with self._lock:
            has_begun, self._has_begun = self._has_begun, True
        if has_begun or self._answer.done():
            return
        try:
            on_loop = self._engine._thread.call(self._engine._drain_on_loop, self._until)
        except EngineError as error:  # it did not start, or has ended
            logger.debug("nothing to drain: %s", error)
            self._resolve(False)
            return
        on_loop.add_done_callback(self._on_drained)
        self._answer.add_done_callback(lambda answer: on_loop.cancel() if answer.cancelled() else None)

    def _on_drained(self, on_loop: Future[bool]) -> None:
        if on_loop.cancelled():
            return
        error = on_loop.exception()
        if error is None or isinstance(error, EngineError):  # the end of the engine overtook it
            self._resolve(error is None and on_loop.result() and not self._num_ended)
        else:
            with contextlib.suppress(InvalidStateError):
                self._answer.set_exception(error)

    def _resolve(self, is_drained: bool) -> None:
        with contextlib.suppress(InvalidStateError):  # who asked has gone
            self._answer.set_result(is_drained)

    def _on_answered(self, _: Future[bool]) -> None:
        if self._timer is not None:
            self._timer.cancel()


class AttachedEngine(Engine):
    """An engine that another process owns and gave a name, joined by this process. `shutdown` leaves it running.

    The constructor waits for one short answer of the engine; it is joined by `start`, as any engine is started. Raises
    EngineNotFoundError, AttachError, EngineShutdownError or EngineDeadError.
    """

    def __init__(self, name: str) -> None:
        self._membership = Membership(name)
        self._membership.on_loss = self._on_loss
        super().__init__(self._membership.config)

    def _new_frontend(self) -> FrontendActor:
        return self._membership.frontend

    def _new_supervisor(self) -> Membership:
        return self._membership

    def _new_service(self) -> Service:
        return self._membership

    def _on_loss(self, error: EngineError) -> None:
        self._death = error

    def _remake(self) -> bool:
        """There is nothing of ours to be stopped: who joined goes on joining."""
        return False

    async def _wait_until_idle(self) -> None:
        """The requests of others are none of our business."""

    async def _abort_all(self) -> None:
        self._frontend.abort_all()

    def shutdown(self, timeout: float = 5.0) -> None:
        """End the requests of this process with EngineShutdownError and leave the engine. Idempotent."""
        super().shutdown(timeout)
        if os.getpid() == self._pid and not self._thread.is_alive:
            self._membership.close()


def _drop(engine: Engine) -> None:
    """The last who held the engine let go, on any thread, perhaps in the middle of a collection: no lock, no waiting."""
    if os.getpid() != engine._pid or engine._is_shut_down:
        return
    with contextlib.suppress(RuntimeError):  # the interpreter ends, and the engine with it
        _thread.start_new_thread(_shut_down_in_thread, (engine,))


def _shut_down_in_thread(engine: Engine) -> None:
    with contextlib.suppress(RuntimeError):
        threading.Thread(target=engine.shutdown, name="actorllm:dropped", daemon=True).start()


def _renew(config: EngineConfig) -> EngineConfig:
    """Before workers are started: several meet at a place where nobody was before."""
    if config.world_size == 1:
        return config
    _end_rendezvous(config)
    return replace(config, rendezvous=f"{tempfile.gettempdir()}/actorllm-{os.getpid()}-{uuid.uuid4().hex}")


def _without_endless_policies(config: EngineConfig, death: ActorDeath) -> EngineConfig:
    """The next scheduler has no policy of the user's own in which this one was caught: it would be caught there, too."""
    if death.actor != "scheduler" or CAUGHT not in (death.reason or ""):
        return config
    words = "\n".join(death.last_words)

    def is_in(path: str | None) -> bool:
        if path is None or ":" not in path:
            return False
        try:
            module = importlib.util.find_spec(path.partition(":")[0])
        except (ImportError, ValueError):
            return False
        return module is not None and module.origin is not None and f'File "{module.origin}"' in words

    scheduler = config.scheduler
    if is_in(scheduler.policy):
        logger.error(
            "scheduling policy %r did not return; the next scheduler goes on with %r", scheduler.policy, FALLBACK
        )
        scheduler = replace(scheduler, policy=FALLBACK)
    if is_in(scheduler.admission):
        logger.error("admission policy %r did not return; the next scheduler goes on without", scheduler.admission)
        scheduler = replace(scheduler, admission=None)
    return replace(config, scheduler=scheduler)


def _end_rendezvous(config: EngineConfig) -> None:
    """The file is there still if the ranks never met."""
    if config.rendezvous is not None:
        Path(config.rendezvous).unlink(missing_ok=True)


def _resolve(config: EngineConfig, facts: dict[str, dict[str, Any]]) -> EngineConfig:
    """The KV cache has as many blocks as the rank with the least room can hold."""
    return config.resolved(min(fact["num_blocks"] for fact in facts.values() if "num_blocks" in fact))


def _check_seconds(name: str, value: object, base: str) -> None:
    if value is not None and (
        isinstance(value, bool) or not isinstance(value, int | float) or not math.isfinite(value)
    ):
        raise InvalidParameterError(f"{name}={value!r} must be a time in {base} seconds, or None")


def check_timeout(timeout: object, *, can_be_zero: bool = False) -> float:
    """Seconds that something may take. InvalidParameterError unless it is a number above 0."""
    is_number = isinstance(timeout, int | float) and not isinstance(timeout, bool) and 0 <= timeout < math.inf
    if not is_number or not (timeout or can_be_zero):
        least = "of at least" if can_be_zero else "above"
        raise InvalidParameterError(f"timeout={timeout!r} must be a number of seconds {least} 0, or None")
    return cast(float, timeout)


def _slo_fields(slo: SLO) -> tuple[float | None, ...]:
    return slo.ttft, slo.tpot, slo.e2e, slo.ttft_per_prompt_token


def as_batch(prompts: Prompt | Sequence[Prompt]) -> list[Prompt]:
    """A list of token ids is one prompt, a list of anything else is many."""
    if isinstance(prompts, str | Mapping | Conversation):
        return [prompts]
    if isinstance(prompts, bytes) or not isinstance(prompts, Iterable):
        raise InvalidPromptError(f"prompts must be text, token ids or a list of prompts, not {type(prompts).__name__}")
    items: list[Any] = list(prompts)
    return [items] if items and all(isinstance(item, Integral) for item in items) else items


def prompt_text(prompt: Prompt) -> str | None:
    """What a prompt says in text, if it does."""
    if isinstance(prompt, Mapping):
        text = prompt.get("prompt")
        return text if isinstance(text, str) else None
    return prompt if isinstance(prompt, str) else None


def _checked_tokenization(given: Mapping[str, Any] | None, params: SamplingParams | PoolingParams) -> dict[str, Any]:
    """The keyword arguments of `Engine.tokenize`: tokenization_kwargs go before the parameter."""
    checked = {} if params.truncate_prompt_tokens is None else {"truncate_prompt_tokens": params.truncate_prompt_tokens}
    for name, value in (given or {}).items():
        if name not in TOKENIZATION_KEYS:
            raise InvalidParameterError(
                f"tokenization_kwargs: {name!r} is not one of {', '.join(map(repr, TOKENIZATION_KEYS))}"
                f"{nearest_name(str(name), TOKENIZATION_KEYS)}"
            )
        if name == "truncate_prompt_tokens" and value is not None:
            checked[name] = check_truncation(value)
        elif name == "truncation_side":
            if value not in (None, "left", "right"):
                raise InvalidParameterError(
                    f"tokenization_kwargs: truncation_side={value!r:.80} must be 'left' or 'right'"
                )
            checked[name] = value
        elif isinstance(value, bool):
            checked[name] = value
        elif value is not None:
            raise InvalidParameterError(f"tokenization_kwargs: {name}={value!r} must be True or False")
    return checked


def _snapshot(prompt: Prompt) -> Prompt:
    """What the caller changes after the call is none of this request's business."""
    if isinstance(prompt, Mapping):
        return {k: _copied(v) for k, v in prompt.items()}
    return prompt.copy() if isinstance(prompt, list | np.ndarray) else prompt


def _copied(value: Any) -> Any:
    if isinstance(value, list | np.ndarray):
        return value.copy()
    return value.detach().clone() if hasattr(value, "detach") else value  # a tensor


def _check_prompt_keys(prompt: Mapping[str, Any]) -> None:
    for key, value in prompt.items():
        if key in VLLM_PROMPT_KEYS and value is not None:
            raise InvalidPromptError(f"prompts with {key!r} are not supported; give text or token ids")
        if key not in (*PROMPT_KEYS, *EMBEDS_KEYS) and key != "cache_salt" and value is not None:
            raise InvalidPromptError(
                f"a prompt mapping has {' and '.join(map(repr, PROMPT_KEYS))}, not {key!r}"
                f"{nearest_name(str(key), (*PROMPT_KEYS, *EMBEDS_KEYS, 'cache_salt'))}"
            )
    salt = prompt.get("cache_salt")
    if salt is not None and (not is_text(salt) or not salt):
        raise InvalidPromptError(f"cache_salt={salt!r:.80} must be a string with at least one character")


def _unwrap(prompt: Mapping[str, Any]) -> Prompt:
    _check_prompt_keys(prompt)
    if prompt.get("prompt_is_token_ids") is not None:
        raise InvalidPromptError("prompt_is_token_ids belong to a prompt with prompt_embeds, which is missing")
    for key in PROMPT_KEYS:
        if prompt.get(key) is not None:
            inner: Prompt = prompt[key]
            return inner
    raise InvalidPromptError(f"a prompt mapping needs 'prompt' or 'prompt_token_ids'; it has {list(prompt)}")


_BOOLEANS = frozenset((bool, np.bool_))
"""Among integers numpy takes them for integers."""


def _checked_ids(prompt: object, vocab_size: int) -> I32:
    if isinstance(prompt, bytes) or not isinstance(prompt, Iterable):
        raise InvalidPromptError(f"a prompt must be text or token ids, not {type(prompt).__name__}")
    try:
        items = prompt if isinstance(prompt, np.ndarray) else list(prompt)
        if isinstance(items, list) and not _BOOLEANS.isdisjoint(map(type, items)):
            raise InvalidPromptError("token ids must be a flat list of integers, and a bool is among them")
        ids = np.array(items)
    except ValueError as error:
        raise InvalidPromptError(f"token ids must be a flat list of integers: {error}") from error
    if ids.size and (ids.ndim != 1 or ids.dtype.kind not in "iu"):
        raise InvalidPromptError(f"token ids must be a flat list of integers, not {ids.dtype} in {ids.ndim} dimensions")
    if ids.size and (int(ids.min()) < 0 or int(ids.max()) >= vocab_size):
        bad = ids[(ids < 0) | (ids >= vocab_size)][0]
        raise InvalidPromptError(f"token id {int(bad)} is outside the vocabulary of {vocab_size} tokens")
    checked: I32 = ids.astype(np.int32)
    return checked
