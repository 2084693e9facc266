"""`LLMEngine`: requests in, outputs out, one `step` at a time, for programs that own their loop.

With topology="inline" a step is computed by the call, on the caller's thread. With topology="process" the engine's own
processes compute, and `step` waits for what they bring next. Not for several threads at once.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import replace
from typing import Any, Self, Unpack

from actorllm.actors.engine_thread import ThreadHost, Waiter
from actorllm.api.blocking import BlockingDoor
from actorllm.api.engine_args import EngineArgs
from actorllm.api.worker_path import model_executor
from actorllm.client.engine import Engine, Hold
from actorllm.client.pooling_stream import PoolingStream
from actorllm.client.stream import RequestStream
from actorllm.config import CacheConfig, EngineConfig, LoRAConfig, ModelConfig, ParallelConfig, SchedulerConfig
from actorllm.errors import EngineError, InvalidParameterError, RequestError
from actorllm.fleet.fleet_engine import new_engine
from actorllm.intake.tokenization import Prompt
from actorllm.types.lora_request import LoRARequest
from actorllm.types.options import EngineOptions, with_options
from actorllm.types.outputs import CompletionOutput, RequestOutput
from actorllm.types.params import PoolingParams, SamplingParams
from actorllm.types.pooling_outputs import PoolingOutput, PoolingRequestOutput


@with_options
class LLMEngine(BlockingDoor):
    """An engine to step through by hand. Starts in the constructor; stops with `shutdown`, at the end of `with`, or when it
    is dropped.

    model: a bundled model, a folder, or a Hugging Face id; None with `module`. Further arguments are named and
    defaulted as in vLLM where both have them; those of `types.vllm_options` are taken, too. Raises ConfigError,
    UnknownArgumentError or ModelError.
    """

    def __init__(self, model: str | os.PathLike[str] | None = None, **options: Unpack[EngineOptions]) -> None:
        self._open(EngineConfig.from_arguments(model, **options))

    def _open(self, config: EngineConfig, stat_loggers: Sequence[Callable[..., Any]] | None = None) -> None:
        engine = new_engine(config, is_synchronous=True)
        engine.record_for(stat_loggers)
        self._adopt(engine, engine.new_hold())
        engine.start()

    @classmethod
    def _over(cls, engine: Engine, hold: Hold) -> Self:
        """Steps through an engine that another front door has started, and that lives as long as this `hold` of it."""
        self = cls.__new__(cls)
        self._adopt(engine, hold)
        return self

    def _adopt(self, engine: Engine, hold: Hold) -> None:
        self._engine = engine
        self._hold = hold
        self._host = ThreadHost()
        self._streams: dict[str, RequestStream | PoolingStream] = {}
        self._ready: dict[str, None] = {}
        self._death: EngineError | None = None
        """What the next step raises, after outputs that came before it."""

    @classmethod
    def from_engine_args(
        cls,
        engine_args: EngineArgs,
        usage_context: object = None,
        stat_loggers: Sequence[Callable[..., Any]] | None = None,
        enable_multiprocessing: bool = False,
    ) -> Self:
        """As in vLLM. `topology` says where the engine runs.

        Arguments:
            engine_args: the arguments of the engine.
            usage_context: not looked at; nothing is reported.
            stat_loggers: classes of the application that are told what the engine does, derived from
                `actorllm.types.stat_loggers.StatLoggerBase`; None: none.
            enable_multiprocessing: not looked at.

        Raises:
            ConfigError, ModelError, EngineStartError: as the constructor.
        """
        return cls.from_vllm_config(engine_args.create_engine_config(), stat_loggers=stat_loggers)

    @classmethod
    def from_vllm_config(
        cls,
        vllm_config: EngineConfig,
        usage_context: object = None,
        stat_loggers: Sequence[Callable[..., Any]] | None = None,
        disable_log_stats: bool | None = None,
    ) -> Self:
        """From what `EngineArgs.create_engine_config` returned.

        Arguments:
            vllm_config: the checked configuration.
            usage_context: not looked at; nothing is reported.
            stat_loggers: classes of the application that are told what the engine does, derived from
                `actorllm.types.stat_loggers.StatLoggerBase`; None: none.
            disable_log_stats: in place of what the configuration says; None: as it says.

        Raises:
            EngineStartError, ModelError: what made the start fail.
        """
        if disable_log_stats is not None and vllm_config.log_statistics == disable_log_stats:
            vllm_config = replace(vllm_config, log_statistics=not disable_log_stats)
        engine = cls.__new__(cls)
        engine._open(vllm_config, stat_loggers)
        return engine

    @property
    def vllm_config(self) -> EngineConfig:
        """The configuration, complete with the number of KV blocks."""
        return self._engine.config

    # By older names, and by those that programs end an engine by

    @property
    def cache_config(self) -> CacheConfig:
        """As `vllm_config.cache_config`; of older releases of vLLM."""
        return self.vllm_config.cache_config

    @property
    def scheduler_config(self) -> SchedulerConfig:
        """As `vllm_config.scheduler_config`; of older releases of vLLM."""
        return self.vllm_config.scheduler_config

    @property
    def parallel_config(self) -> ParallelConfig:
        """As `vllm_config.parallel_config`; of older releases of vLLM."""
        return self.vllm_config.parallel_config

    @property
    def lora_config(self) -> LoRAConfig | None:
        """As `vllm_config.lora_config`; of older releases of vLLM."""
        return self.vllm_config.lora_config

    @property
    def engine_core(self) -> EngineCore:
        """What programs of vLLM call to end an engine: `engine_core.shutdown()`."""
        return EngineCore(self)

    # Requests

    def add_request(
        self,
        request_id: str,
        prompt: Prompt,
        params: SamplingParams | PoolingParams,
        arrival_time: float | None = None,
        lora_request: LoRARequest | None = None,
        tokenization_kwargs: Mapping[str, Any] | None = None,
        trace_headers: Mapping[str, str] | None = None,
        priority: int = 0,
        session_id: None = None,
        prompt_text: None = None,
        kv_hints: None = None,
        **extras: Any,
    ) -> str:
        """Take a request; its outputs come out of `step`. Returns its id.

        Arguments:
            request_id: at most 1,024 characters, of no other open request.
            prompt: text, token ids, or a mapping as in vLLM (TextPrompt, TokensPrompt, EmbedsPrompt).
            params: SamplingParams, or PoolingParams for a vector.
            arrival_time: epoch seconds; None: now.
            tokenization_kwargs: truncate_prompt_tokens, truncation_side and add_special_tokens; None: none of them.
            priority: lower is sooner, under policies that look at it; default 0.
            lora_request: the adapter that it is computed with; None: none. Needs enable_lora=True.
            session_id, prompt_text, kv_hints: accepted at None, where they ask for nothing.
            trace_headers: which trace the span of this request belongs to, such as {'traceparent': ...}.
            extras: as in `AsyncLLM.generate`.

        Raises:
            InvalidParameterError, InvalidPromptError, DuplicateRequestError, EngineOverloaded: nothing else is affected.
            EngineDeadError, EngineShutdownError, EngineDrainingError: the engine takes no request.

        Example:
            engine.add_request("first", "Once upon a time", SamplingParams(max_tokens=4))
            while engine.has_unfinished_requests():
                for output in engine.step():
                    print(output.request_id, output.outputs[0].text)
        """
        if not isinstance(request_id, str):
            raise InvalidParameterError(f"request_id={request_id!r} must be a string")
        idle: dict[str, Any] = {
            "lora_request": lora_request,
            "trace_headers": trace_headers,
            "session_id": session_id,
            "prompt_text": prompt_text,
            "kv_hints": kv_hints,
        }
        carried: dict[str, Any] = {
            "host": self._host,
            "priority": priority,
            "arrival_time": arrival_time,
            "tokenization_kwargs": tokenization_kwargs,
            **extras,
        }
        stream: RequestStream | PoolingStream
        if isinstance(params, PoolingParams):
            stream = self._engine.encode(prompt, params, request_id, vllm_arguments=idle, **carried)
        else:
            stream = self._engine.submit(prompt, params, request_id, **idle, **carried)
        mailbox = stream.mailbox
        if mailbox.error is not None:
            stream.take()  # raises it
        mailbox.waiter = Note(request_id, self._ready)
        self._streams[request_id] = stream
        return request_id

    def abort_request(self, request_ids: str | Iterable[str], internal: bool = False) -> None:
        """Forget requests: no output of them comes any more. Unknown ids have ended already.

        Arguments:
            request_ids: one id, or several.
            internal: whether the ids are the engine's own, in vLLM; a request has only one here.

        Example:
            engine.add_request("unwanted", "Once upon a time", SamplingParams(max_tokens=100))
            engine.abort_request("unwanted")
            assert not engine.has_unfinished_requests()
        """
        for one in [request_ids] if isinstance(request_ids, str) else list(request_ids):
            stream = self._streams.pop(one, None)
            self._ready.pop(one, None)
            if stream is not None:
                stream.abort()
        if self._engine.stepper is not None:
            self._engine.stepper.run_pending()

    def has_unfinished_requests(self) -> bool:
        """Whether a request has outputs to come."""
        return bool(self._streams)

    def get_num_unfinished_requests(self) -> int:
        """Their sequences: a request with n of them counts n times, as in vLLM."""
        return sum(stream.num_open for stream in self._streams.values())

    def step(self) -> list[RequestOutput | PoolingRequestOutput[PoolingOutput]]:
        """What is new, one output per request that has something new; nothing if there is no unfinished request.

        A request that the engine could not finish comes as finished, with finish_reason "error" and the message as
        stop_reason.

        Raises:
            EngineDeadError, EngineShutdownError: the engine is gone, and every request with it.

        Example:
            engine.add_request("story", "Once upon a time", SamplingParams(max_tokens=4))
            outputs = []
            while engine.has_unfinished_requests():
                outputs += engine.step()
            print(outputs[-1].outputs[0].text)
        """
        stepper = self._engine.stepper
        if stepper is not None:
            if self._streams:
                stepper.step()
                if stepper.is_alive:  # else the streams tell how it ended
                    self._engine.note_step()
            self._host.run_pending()
            return self._take()
        outputs: list[RequestOutput | PoolingRequestOutput[PoolingOutput]] = []
        while self._streams and not outputs:
            self._host.run_until(lambda: bool(self._ready) or self._death is not None)
            outputs = self._take()
        return outputs

    def _take(self) -> list[RequestOutput | PoolingRequestOutput[PoolingOutput]]:
        ready = list(self._ready)
        self._ready.clear()
        outputs: list[RequestOutput | PoolingRequestOutput[PoolingOutput]] = []
        for request_id in ready:
            stream = self._streams.get(request_id)
            if stream is None:
                continue
            output: RequestOutput | PoolingRequestOutput[PoolingOutput] | None
            try:
                output = stream.take()
            except RequestError as error:
                output = _failed(stream, error)
            except EngineError as error:
                self._death = error  # of all of them; those that have outputs left give these first
                continue
            if output is None:
                continue  # it was in an earlier output
            if output.finished:
                del self._streams[request_id]
            elif stream.has_ended:
                self._ready[request_id] = None  # its error, or its end, came behind these: nothing more wakes it
            outputs.append(output)
        if self._death is not None and not outputs:
            self._streams.clear()
            death, self._death = self._death, None
            raise death
        return outputs

    # The rest of vLLM's

    @property
    def model_executor(self) -> Any:
        """The path to `load_weights`, by which trainers bring new weights (`api.worker_path`)."""
        return model_executor(self.update_weights_from_tensors)

    def get_supported_tasks(self) -> tuple[str, ...]:
        """What a request may ask for, by vLLM's names: ("generate",), or tasks such as "embed" and "classify"."""
        return self.model_config.supported_tasks

    def get_model_config(self) -> ModelConfig:
        """As `model_config`."""
        return self.model_config

    @property
    def tokenizer(self) -> Any:
        """As `get_tokenizer`; None with skip_tokenizer_init."""
        return None if self._engine.config.model.tokenizer is None else self.get_tokenizer()

    def do_log_stats(self) -> None:
        """Write throughput since the last time, and the load now, to the log at level INFO. Nothing of an engine that is new.

        Raises:
            EngineDeadError, EngineShutdownError, ForkedProcessError: the engine is gone.
        """
        if not self._engine.is_new:
            self._engine.log_statistics(self._engine.ask_scheduler("statistics").result())

    def shutdown(self, timeout: float = 5.0) -> None:
        """Stop everything and wait for it. Idempotent.

        Arguments:
            timeout: seconds after which processes that do not stop by themselves are killed; default 5.
        """
        self._engine.shutdown(timeout)
        self._streams.clear()
        self._ready.clear()
        self._host.close()


class EngineCore:
    """What of vLLM's engine core there is: its end."""

    def __init__(self, engine: LLMEngine) -> None:
        self._engine = engine

    def shutdown(self, timeout: float | None = None) -> None:
        """Stop the engine, as `LLMEngine.shutdown`.

        Arguments:
            timeout: seconds after which processes that do not stop by themselves are killed; None: 5.
        """
        self._engine.shutdown(5.0 if timeout is None else timeout)


class Note(Waiter):
    """Notes that a request has something to take."""

    __slots__ = ("_ready", "_request_id")

    def __init__(self, request_id: str, ready: dict[str, None]) -> None:
        self._request_id = request_id
        self._ready = ready

    def set(self) -> None:
        self._ready[self._request_id] = None

    async def wait(self, until: float | None = None) -> bool:
        raise RuntimeError("the stream of an LLMEngine is taken by step(), not awaited")


def _failed(
    stream: RequestStream | PoolingStream, error: RequestError
) -> RequestOutput | PoolingRequestOutput[PoolingOutput]:
    if isinstance(stream, PoolingStream):
        return stream.failed(error)
    completion = CompletionOutput(0, "", [], finish_reason="error", stop_reason=str(error))
    return RequestOutput(stream.request_id, stream.prompt, stream.prompt_token_ids, outputs=[completion], finished=True)
