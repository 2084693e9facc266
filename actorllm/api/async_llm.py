"""`AsyncLLM`: the engine for async applications, and `AsyncLLMEngine`, its older name."""

from __future__ import annotations

import copy
import math
import os
import threading
import uuid
from collections.abc import AsyncIterator, Callable, Iterable, Mapping, Sequence
from concurrent.futures import Future
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any, Self, Unpack

from anyio import to_thread

from actorllm.actors.engine_thread import STOP_TIMEOUT_S, HostLoop
from actorllm.api.awaited_tokenizer import awaited
from actorllm.api.beam_search import BeamSearch, BeamSearchParams, end_ids, step_params
from actorllm.api.engine_args import EngineArgs, check_idle_arguments
from actorllm.api.worker_path import folder_to_reload, is_reload
from actorllm.client.collective_calls import Called, call_arguments, check_target, check_timeout_of_call
from actorllm.client.engine import Engine
from actorllm.client.pooling_stream import PoolingStream
from actorllm.client.scoring import TextScoring, tokenization_of
from actorllm.client.stream import RequestStream, TextStream
from actorllm.client.transports.jobs import RankJob
from actorllm.client.transports.table import transport_of
from actorllm.client.weight_updates import NewWeights
from actorllm.config import EngineConfig, ModelConfig
from actorllm.errors import EngineDeadError, EngineError, InvalidParameterError, RequestError
from actorllm.fleet import attached
from actorllm.fleet.fleet_engine import new_engine
from actorllm.intake.tokenization import Prompt, as_batch, checked_tokenization
from actorllm.scheduling.pause import PauseMode, check_pause_mode
from actorllm.supervision.health import EngineHealth
from actorllm.text.chat_template import ContentFormat, Conversation, Message
from actorllm.types.lora_request import LoRARequest
from actorllm.types.model_files import check_weights_exist
from actorllm.types.objective import SLO
from actorllm.types.options import EngineOptions, with_options
from actorllm.types.outputs import RequestOutput
from actorllm.types.params import PoolingParams, RequestOutputKind, SamplingParams, with_task
from actorllm.types.pooling_outputs import (
    ClassificationRequestOutput,
    EmbeddingRequestOutput,
    PoolingOutput,
    PoolingRequestOutput,
    ScoringRequestOutput,
)
from actorllm.types.quantization import GGUF
from actorllm.types.sleep import SleepLevel, SleepRequests, SleepTag
from actorllm.types.weight_version import RunningRequests


@with_options
class AsyncLLM:
    """An engine to stream from with `async for`.

    The constructor checks the arguments and the model's configuration; processes are started by the first request, by
    `start`, or by `async with`. `shutdown` is synchronous; without it the engine stops when this object is dropped and no
    stream of it is open, at the latest at interpreter exit. Usable from several event loops (asyncio, uvloop, trio), one
    after the other or at once.

    model: a bundled model, a folder, or a Hugging Face id; None with `module`. Further arguments are named and
    defaulted as in vLLM where both have them; those of `types.vllm_options` are taken, too. Raises ConfigError,
    UnknownArgumentError or ModelError.
    """

    def __init__(self, model: str | os.PathLike[str] | None = None, **options: Unpack[EngineOptions]) -> None:
        self._adopt(new_engine(EngineConfig.from_arguments(model, **options)))

    def _adopt(self, engine: Engine) -> None:
        self._engine = engine
        self._hold = engine.new_hold()

    @classmethod
    def attach(cls, name: str) -> AsyncLLM:
        """Join the engine that another process of this user has given this name.

        It behaves as one of this process: requests, aborts, statistics. `shutdown`, or the end of this process, ends the
        requests of this process and leaves the engine running; the end of the engine ends the open streams with
        EngineDeadError (EngineShutdownError if it was orderly). Waits for one short answer of the engine; joins with the
        first request, with `start` or with `async with`.

        Arguments:
            name: what the engine was built with (`name=`).

        Raises:
            EngineNotFoundError: no such engine runs; lists those that do.
            AttachError: it has another version or user, or does not answer; or this process cannot make its router.
            EngineShutdownError, EngineDeadError: it has ended.
        """
        llm = cls.__new__(cls)
        llm._adopt(attached.attach(name))
        return llm

    @classmethod
    def from_engine_args(
        cls,
        engine_args: EngineArgs,
        start_engine_loop: bool | None = None,
        usage_context: object = None,
        stat_loggers: Sequence[Callable[..., Any]] | None = None,
    ) -> Self:
        """As in vLLM, but lazy as the constructor, unless start_engine_loop says otherwise.

        Arguments:
            engine_args: the arguments of the engine.
            start_engine_loop: True: begin to start at once, in the background. What goes wrong there is raised by the first
                request. None or False: the first request starts the engine.
            usage_context: not looked at; nothing is reported.
            stat_loggers: classes of the application that are told what the engine does, derived from
                `actorllm.types.stat_loggers.StatLoggerBase`; None: none.

        Raises:
            ConfigError, ModelError: as the constructor; ModelNotFoundError also where the folder has no weights.
        """
        return cls.from_vllm_config(engine_args.create_engine_config(), start_engine_loop, stat_loggers=stat_loggers)

    @classmethod
    def from_vllm_config(
        cls,
        vllm_config: EngineConfig,
        start_engine_loop: bool | None = None,
        usage_context: object = None,
        stat_loggers: Sequence[Callable[..., Any]] | None = None,
        enable_log_requests: bool = False,
        aggregate_engine_logging: bool = False,
        disable_log_stats: bool | None = None,
        client_addresses: None = None,
        client_count: int = 1,
        client_index: int = 0,
    ) -> Self:
        """From what `EngineArgs.create_engine_config` returned.

        Arguments:
            vllm_config: the checked configuration.
            start_engine_loop: True: begin to start at once, in the background, as `from_engine_args`.
            usage_context: not looked at; nothing is reported.
            stat_loggers: classes of the application that are told what the engine does, derived from
                `actorllm.types.stat_loggers.StatLoggerBase`; None: none.
            enable_log_requests, aggregate_engine_logging, client_addresses, client_count, client_index: accepted at their
                defaults, where they ask for nothing.
            disable_log_stats: in place of what the configuration says; None: as it says.

        Raises:
            InvalidParameterError: an argument asks for what there is not.
            ModelNotFoundError: the folder has no weights.
        """
        check_idle_arguments(
            enable_log_requests=enable_log_requests,
            aggregate_engine_logging=aggregate_engine_logging,
            client_addresses=client_addresses,
            client_count=client_count,
            client_index=client_index,
        )
        if disable_log_stats is not None and vllm_config.log_statistics == disable_log_stats:
            vllm_config = replace(vllm_config, log_statistics=not disable_log_stats)
        model = vllm_config.model
        if model.load_format != "dummy" and model.module is None and model.quantization != GGUF:
            check_weights_exist(Path(model.path))
        llm = cls.__new__(cls)
        llm._adopt(new_engine(vllm_config))
        llm._engine.record_for(stat_loggers)
        if start_engine_loop:
            llm._engine.start_in_background()
        return llm

    @property
    def config(self) -> EngineConfig:
        """The configuration; complete (number of KV blocks) once the engine has started."""
        return self._engine.config

    async def start(self) -> None:
        """Start the engine now instead of at the first request.

        Cancelled, it stops what it has begun, unless another task waits for it; the engine can be started again.

        Raises:
            EngineStartError, ModelError, ConfigError: what made the start fail.
            EngineDeadError, EngineShutdownError, ForkedProcessError: it can start no more.
        """
        started = self._engine.start_in_background()
        try:
            await HostLoop.current().result_of(started)
        except BaseException:
            if started.cancelled() or not started.done():
                await _in_thread(partial(self._engine.give_up_start, started))
            raise

    def generate(
        self,
        prompt: Prompt,
        sampling_params: SamplingParams | None = None,
        request_id: str | None = None,
        *,
        priority: int = 0,
        slo: SLO | float | None = None,
        is_latency_sensitive: bool = False,
        type_info: str | None = None,
        tenant: str | None = None,
        deadline: float | None = None,
        timeout: float | None = None,
        tokenization_kwargs: Mapping[str, Any] | None = None,
        data_parallel_rank: int | None = None,
        lora_request: LoRARequest | None = None,
        mm_processor_kwargs: Mapping[str, Any] | None = None,
        **vllm_arguments: Any,
    ) -> RequestStream:
        """Stream the outputs of a prompt.

        Arguments:
            prompt: text, token ids, or a mapping as in vLLM (TextPrompt, TokensPrompt, EmbedsPrompt).
            sampling_params: None: `get_default_sampling_params`. What each output repeats is `sampling_params.output_kind`.
            request_id: at most 1,024 characters, of no other open request; None: one is made.
            priority: lower is sooner, under policies that look at it; default 0.
            slo: what the request is promised, for policies and reports: an SLO, or seconds per output token; None: nothing.
            is_latency_sensitive: for policies: every pause of this request counts; default False.
            type_info: for policies and reports: the kind of the request; None: none.
            tenant: the name under which policies share the engine among tenants; None: no particular tenant.
            deadline: monotonic seconds; a request that has not ended by then is ended within a step, wherever it is. Its last
                output has what there is, with finish_reason "abort" and stop_reason "deadline". None: no deadline.
            timeout: the same in seconds from now; None: no deadline.
            tokenization_kwargs: truncate_prompt_tokens, truncation_side and add_special_tokens; None: none of them.
            data_parallel_rank: the replica that it is pinned to (docs/fleet.md); None: any.
            lora_request: the adapter that it is computed with; None: none. Needs enable_lora=True.
            mm_processor_kwargs: arguments of the model's processor, for images or recordings in the prompt; None: none.
            vllm_arguments: trace_headers, and further arguments of vLLM, accepted at their defaults.

        Raises:
            InvalidParameterError, UnknownParameterError, DuplicateRequestError: at once.
            EngineDeadError, EngineShutdownError, EngineDrainingError, ForkedProcessError: at once or by the stream.
            EngineOverloaded, InvalidPromptError, RequestFailedError: by the stream, the first of them perhaps at once.

        Example:
            params = SamplingParams(max_tokens=8, temperature=0.0)
            async for output in llm.generate("Once upon a time", params, timeout=30.0):
                print(output.outputs[0].text)
        """
        return self._engine.submit(
            prompt,
            sampling_params,
            request_id,
            priority=priority,
            slo=slo,
            is_latency_sensitive=is_latency_sensitive,
            type_info=type_info,
            tenant=tenant,
            deadline=deadline,
            timeout=timeout,
            tokenization_kwargs=tokenization_kwargs,
            data_parallel_rank=data_parallel_rank,
            lora_request=lora_request,
            mm_processor_kwargs=mm_processor_kwargs,
            **vllm_arguments,
        )

    def chat(
        self,
        messages: Sequence[Message],
        sampling_params: SamplingParams | None = None,
        request_id: str | None = None,
        *,
        chat_template: str | None = None,
        chat_template_content_format: ContentFormat = "auto",
        add_generation_prompt: bool = True,
        continue_final_message: bool = False,
        tools: Sequence[Mapping[str, Any]] | None = None,
        chat_template_kwargs: Mapping[str, Any] | None = None,
        **extras: Any,
    ) -> RequestStream:
        """Stream the answer to a conversation. The model's chat template makes the prompt of it, off this loop.

        Arguments:
            messages: mappings with "role" and "content", which is text or a list of parts of type "text".
            sampling_params, request_id: as in `generate`.
            chat_template: a Jinja template, or the name of one of the model's; None: the model's own.
            chat_template_content_format: "string" gives the template text, "openai" lists of parts; "auto" (default) reads it.
            add_generation_prompt: end the prompt with what opens an answer; default True.
            continue_final_message: the answer goes on from the last message instead; default False.
            tools: functions as JSON schema; None: none.
            chat_template_kwargs: further variables of the template; None: none.
            extras: as in `generate`.

        Raises:
            InvalidPromptError: the messages cannot be read; or by the stream, the template refuses them.
            InvalidParameterError: an argument about the template is wrong; everything else as in `generate`.

        Example:
            template = "{% for message in messages %}{{ message.content }} {% endfor %}"
            messages = [{"role": "user", "content": "Tell me a story."}]
            async for output in llm.chat(messages, SamplingParams(max_tokens=8), chat_template=template):
                print(output.outputs[0].text)
        """
        conversation = Conversation.of(
            messages,
            modality=self._engine.config.model.modality,
            chat_template=chat_template,
            chat_template_content_format=chat_template_content_format,
            add_generation_prompt=add_generation_prompt,
            continue_final_message=continue_final_message,
            tools=tools,
            chat_template_kwargs=chat_template_kwargs,
        )
        return self.generate(conversation, sampling_params, request_id, **extras)

    def get_default_sampling_params(self) -> SamplingParams:
        """What requests without sampling_params get: what the model's generation_config.json recommends.

        Raises:
            ConfigError: what it recommends cannot be.
        """
        return self._engine.default_sampling_params()

    async def add_request(
        self,
        request_id: str,
        prompt: Prompt,
        params: SamplingParams | PoolingParams,
        arrival_time: float | None = None,
        lora_request: LoRARequest | None = None,
        tokenization_kwargs: Mapping[str, Any] | None = None,
        trace_headers: Mapping[str, str] | None = None,
        priority: int = 0,
        data_parallel_rank: int | None = None,
        session_id: None = None,
        prompt_text: None = None,
        reasoning_ended: None = None,
        reasoning_parser_kwargs: None = None,
        kv_hints: None = None,
        **extras: Any,
    ) -> RequestStream | PoolingStream:
        """As `generate`, or with PoolingParams as `encode`, with the arguments of vLLM's in their order.

        Arguments:
            request_id: at most 1,024 characters, of no other open request.
            prompt, tokenization_kwargs, priority: as in `generate`.
            params: SamplingParams, or PoolingParams for a vector.
            arrival_time: epoch seconds; None: now.
            data_parallel_rank: the replica that it is pinned to; None: any.
            lora_request: as in `generate`.
            session_id, prompt_text, reasoning_ended, reasoning_parser_kwargs, kv_hints: accepted at None, where vLLM's argument
                asks for nothing.
            trace_headers: which trace the span of this request belongs to, such as {'traceparent': ...}.
            extras: as in `generate`.

        Raises:
            Everything that `generate` raises.
        """
        if isinstance(params, PoolingParams):
            idle = {"session_id": session_id, "prompt_text": prompt_text, "kv_hints": kv_hints}
            return self._engine.encode(
                prompt,
                params,
                request_id,
                arrival_time=arrival_time,
                priority=priority,
                tokenization_kwargs=tokenization_kwargs,
                vllm_arguments={
                    **idle,
                    "lora_request": lora_request,
                    "trace_headers": trace_headers,
                    "data_parallel_rank": data_parallel_rank,
                    "reasoning_ended": reasoning_ended,
                    "reasoning_parser_kwargs": reasoning_parser_kwargs,
                },
                **extras,
            )
        return self.generate(
            prompt,
            params,
            request_id,
            arrival_time=arrival_time,
            lora_request=lora_request,
            tokenization_kwargs=tokenization_kwargs,
            trace_headers=trace_headers,
            priority=priority,
            data_parallel_rank=data_parallel_rank,
            session_id=session_id,
            prompt_text=prompt_text,
            reasoning_ended=reasoning_ended,
            reasoning_parser_kwargs=reasoning_parser_kwargs,
            kv_hints=kv_hints,
            **extras,
        )

    def encode(
        self,
        prompt: Prompt,
        pooling_params: PoolingParams | None = None,
        request_id: str | None = None,
        lora_request: LoRARequest | None = None,
        trace_headers: Mapping[str, str] | None = None,
        priority: int = 0,
        tokenization_kwargs: Mapping[str, Any] | None = None,
        reasoning_ended: None = None,
        data_parallel_rank: int | None = None,
        **extras: Any,
    ) -> PoolingStream:
        """A vector of a prompt, as the one output of a stream. The engine must pool (runner="pooling").

        A request that has been aborted, or whose deadline has passed, has an output without a vector, with its `error`.

        Arguments:
            prompt, request_id, priority: as in `generate`.
            pooling_params: None: the engine's own way.
            lora_request: as in `generate`. reasoning_ended: accepted at None, where vLLM's argument asks for nothing.
            trace_headers: which trace the span of this request belongs to, such as {'traceparent': ...}.
            tokenization_kwargs: truncate_prompt_tokens, truncation_side and add_special_tokens; None: none of them.
            data_parallel_rank: the replica that it is pinned to (docs/fleet.md); None: any.
            extras: as in `generate`.

        Raises:
            Everything that `generate` raises; InvalidParameterError also where the engine generates text.

        Example:
            async for output in embedder.encode("Once upon a time"):
                print(output.outputs.array.shape)
        """
        if isinstance(prompt, Mapping) and "data" in prompt:
            raise InvalidParameterError("{'data': ...} is for a plug-in: await encode_data(data), or give a prompt")
        of_vllm = {
            "lora_request": lora_request,
            "trace_headers": trace_headers,
            "reasoning_ended": reasoning_ended,
            "data_parallel_rank": data_parallel_rank,
        }
        return self._engine.encode(
            prompt,
            pooling_params,
            request_id,
            priority=priority,
            tokenization_kwargs=tokenization_kwargs,
            vllm_arguments=of_vllm,
            **extras,
        )

    async def encode_data(
        self, data: Any, pooling_params: PoolingParams | None = None, request_id: str | None = None, **extras: Any
    ) -> PoolingRequestOutput[Any]:
        """What the plug-in of the engine (io_processor_plugin) makes of the vectors of the prompts that it makes of data.

        The plug-in's own code runs in another thread, for one request at a time.

        Arguments:
            data: whatever the plug-in understands.
            pooling_params: that the plug-in is given; None: it has its own.
            request_id: what the plug-in is told that this request is called; None: a random name.
            extras: as in `encode`, for each of its prompts.

        Raises:
            InvalidParameterError: the engine has no plug-in. What the plug-in raises. Everything that `encode` raises.
        """
        plugin, name = self._engine.needed_plugin, request_id or uuid.uuid4().hex
        prompts, params = await to_thread.run_sync(plugin.asked, data, pooling_params, name)
        outputs = await self._pool(prompts, params, extras)
        return await to_thread.run_sync(plugin.answered, outputs, name)

    async def embed(
        self, prompt: Prompt, pooling_params: PoolingParams | None = None, **extras: Any
    ) -> EmbeddingRequestOutput:
        """The vector of a prompt as a list of floats.

        Arguments:
            prompt, pooling_params, extras: as in `encode`.

        Raises:
            Everything that `encode` raises.

        Example:
            output = await embedder.embed("Once upon a time")
            print(len(output.outputs.embedding))
        """
        (output,) = await self._pool([prompt], [pooling_params], extras)
        return EmbeddingRequestOutput.from_base(output)

    async def classify(
        self, prompt: Prompt, pooling_params: PoolingParams | None = None, **extras: Any
    ) -> ClassificationRequestOutput:
        """The probabilities of a classifier's labels for a prompt, as a list of floats.

        Arguments:
            prompt, pooling_params, extras: as in `encode`.

        Raises:
            InvalidParameterError: the model has no head for prompts; everything else as in `encode`.
        """
        (output,) = await self._pool([prompt], [with_task(pooling_params, "classify")], extras)
        return ClassificationRequestOutput.from_base(output)

    async def score(
        self,
        data_1: Prompt | Sequence[Prompt],
        data_2: Prompt | Sequence[Prompt],
        pooling_params: PoolingParams | None = None,
        chat_template: str | None = None,
        **extras: Any,
    ) -> list[ScoringRequestOutput]:
        """How alike texts are: one text and all of data_2, or each of data_1 with its own. By what, as in `LLM`.

        Arguments:
            data_1: one prompt, or as many as data_2 has.
            data_2: one prompt, or several.
            pooling_params, extras: as in `encode`, for all of the texts.
            chat_template: as in `LLM.score`.

        Raises:
            InvalidParameterError: the numbers of texts do not fit; everything else as in `encode`.

        Example:
            (output,) = await embedder.score("A fox ran.", "A fox sat.")
            print(output.outputs.score)
        """
        first, second = as_batch(data_1), as_batch(data_2)
        scoring = TextScoring.of(self._engine.config.model.pooler, first, second, pooling_params, chat_template)
        extras["tokenization_kwargs"] = tokenization_of(chat_template, extras.get("tokenization_kwargs"))
        outputs = await self._pool(scoring.prompts, [scoring.params] * len(scoring.prompts), extras)
        return await to_thread.run_sync(lambda: scoring.outputs(outputs, self._engine.prompts.pad_token_id))

    async def _pool(
        self, prompts: Sequence[Prompt], pooling_params: Sequence[PoolingParams | None], extras: dict[str, Any]
    ) -> list[PoolingRequestOutput[PoolingOutput]]:
        streams: list[PoolingStream] = []
        try:
            for prompt, params in zip(prompts, pooling_params, strict=True):
                streams.append(self.encode(prompt, params, **extras))
            return [await anext(stream) for stream in streams]
        finally:
            for stream in streams:
                stream.abort()

    def stream(self, prompt: Prompt, sampling_params: SamplingParams | None = None, **extras: Any) -> TextStream:
        """Just the new text, piece by piece.

        Arguments:
            prompt, sampling_params, extras: as in `generate`.

        Raises:
            InvalidParameterError: n > 1; everything else as in `generate`.

        Example:
            async for piece in llm.stream("Once upon a time", SamplingParams(max_tokens=8)):
                print(piece, end="")
        """
        if isinstance(sampling_params, SamplingParams) and sampling_params.n != 1:
            raise InvalidParameterError(
                f"stream() gives the text of one sequence; use generate() for n={sampling_params.n}"
            )
        return TextStream(self.generate(prompt, self._with_kind(sampling_params, RequestOutputKind.DELTA), **extras))

    async def complete(
        self, prompt: Prompt, sampling_params: SamplingParams | None = None, **extras: Any
    ) -> RequestOutput:
        """Just the end: one output with everything.

        Arguments:
            prompt, sampling_params, extras: as in `generate`.

        Raises:
            Everything that `generate` raises; RequestError, where the request ended without an output.

        Example:
            output = await llm.complete("Once upon a time", SamplingParams(max_tokens=8))
            print(output.outputs[0].text, output.outputs[0].finish_reason)
        """
        params = self._with_kind(sampling_params, RequestOutputKind.FINAL_ONLY)
        final: RequestOutput | None = None
        async with self.generate(prompt, params, **extras) as outputs:
            async for output in outputs:
                final = output
        if final is None:
            raise RequestError("the request ended without an output")
        return final

    def _with_kind(self, params: SamplingParams | None, kind: RequestOutputKind) -> SamplingParams:
        params = self.get_default_sampling_params() if params is None else copy.copy(params)
        if isinstance(params, SamplingParams):  # what is none is refused when it is submitted
            params.output_kind = kind
        return params

    async def beam_search(
        self, prompt: Prompt, request_id: str | None = None, params: BeamSearchParams | None = None, **extras: Any
    ) -> AsyncIterator[RequestOutput]:
        """The `beam_width` most likely continuations, best first, as the completions of one output.

        It ends at the tokenizer's end-of-text only, as in vLLM. Leaving it ends its requests.

        Arguments:
            prompt: as in `generate`.
            request_id: of the output; None: one is made.
            params: BeamSearchParams.
            extras: as in `generate`, for the requests that it is made of.

        Raises:
            InvalidParameterError: params are none; everything else as in `generate`.

        Example:
            async for output in llm.beam_search("Once upon a time", params=BeamSearchParams(beam_width=2, max_tokens=4)):
                print([completion.text for completion in output.outputs])
        """
        if not isinstance(params, BeamSearchParams):
            raise InvalidParameterError(f"params must be BeamSearchParams, not {type(params).__name__}")
        one_token = self._with_kind(step_params(params), RequestOutputKind.FINAL_ONLY)
        engine, model = self._engine, self._engine.config.model
        how = checked_tokenization(extras.pop("tokenization_kwargs", None), one_token)
        reading = engine.tokenized(prompt, extras.get("lora_request"), **how)
        tokenized, tokenizer = await HostLoop.current().result_of(reading)
        search = BeamSearch(tokenized.ids.tolist(), params, end_ids(model, tokenizer), model.max_model_len)
        while not search.is_over:
            streams: list[RequestStream] = []
            try:
                for beam in search.beams:
                    streams.append(self.generate(tokenized.continued(beam.tokens), one_token, **extras))  # noqa: PERF401
                outputs = [await anext(stream) for stream in streams]
            finally:  # one has failed, or the caller has left: the others end, too
                for stream in streams:
                    await stream.aclose()
            await to_thread.run_sync(search.advance, outputs)
        decode = (lambda *_, **__: "") if tokenizer is None else tokenizer.decode
        yield await to_thread.run_sync(search.output, request_id or engine.new_request_id(), tokenized.text, decode)

    async def abort(self, request_id: str | Iterable[str], internal: bool = False) -> None:
        """End requests by id; each delivers a final output with finish_reason 'abort'. Unknown ids are ignored.

        Arguments:
            request_id: one id, or several.
            internal: whether the ids are the engine's own, in vLLM; a request has only one here.

        Raises:
            InvalidParameterError: an id is no string.
            EngineDeadError, EngineShutdownError, ForkedProcessError: the engine is gone.
        """
        self._engine.abort(request_id)

    async def stats(self) -> dict[str, Any]:
        """What every part of the engine counts: requests, steps, tokens, KV cache, links, workers.

        Starts nothing: of an engine that is yet to start, "scheduler" and "workers" are None. Workers answer between two
        steps, so this waits for the one in flight.

        Raises:
            EngineDeadError, EngineShutdownError, ForkedProcessError: the engine is gone.
            EngineError: no replica runs now, since the machines of all are away; the engine goes on.
        """
        host = HostLoop.current()
        if self._engine.is_new:
            return {**self._engine.statistics(), "scheduler": None, "workers": None}
        await self.start()
        scheduler = await host.result_of(self._engine.ask_scheduler("statistics"))
        workers = await host.result_of(self._engine.ask_scheduler("worker_statistics", timeout=math.inf))
        return {**self._engine.statistics(), "scheduler": scheduler, "workers": workers}

    async def reset_prefix_cache(self, reset_running_requests: bool = False, reset_connector: bool = False) -> bool:
        """Forget all cached KV, for instance because the weights have changed. Starts nothing. Returns whether it did.

        Arguments:
            reset_running_requests: compute the KV of running requests again, too; default False: they keep theirs, and leave none
                behind.
            reset_connector: True or False (default): what KV tiers have is forgotten in either case.

        Raises:
            InvalidParameterError: reset_connector is neither True nor False.
            EngineDeadError, EngineShutdownError: the engine is gone.
        """
        check_idle_arguments(reset_connector=reset_connector)
        if self._engine.is_new:
            return True
        await self.start()
        asked = self._engine.ask_scheduler("reset_prefix_cache", reset_running_requests=bool(reset_running_requests))
        return bool(await HostLoop.current().result_of(asked))

    async def reset_mm_cache(self) -> None:
        """Keep no images or recordings by their uuids (`multi_modal_uuids`): each has to be sent once more."""
        await to_thread.run_sync(self._engine.reset_mm_cache)

    async def reset_encoder_cache(self) -> None:
        """Keep no rows of images, recordings or texts that were encoded: each is encoded once more. Requests that run keep theirs.

        KV of them stays in the prefix cache; `reset_prefix_cache` forgets that.
        """
        await to_thread.run_sync(self._engine.reset_encoder_cache)

    async def set_policy(self, scheduling_policy: str | None = None, *, admission_policy: str | None = None) -> None:
        """Let another scheduling or admission policy decide from the next step on. Requests that run or wait go on, under it.

        All replicas change, and every scheduler that is started later begins with it. Recordings have the change, so that they
        replay byte for byte. What the policy before had learned is forgotten.

        Arguments:
            scheduling_policy: as the engine's argument: a name, or "module:Class"; None (default): it stays.
            admission_policy: likewise; "none": there is none any more; None (default): it stays.

        Raises:
            InvalidParameterError: neither is given, or there is no such policy, or it cannot be built; nothing has changed.
            EngineError: another change is under way, or the engine belongs to another process.
            EngineDeadError, EngineShutdownError: the engine is gone.

        Example:
            await llm.set_policy("edf")
        """
        await self.start()
        await HostLoop.current().result_of(self._engine.all_handed_over())
        await HostLoop.current().result_of(self._engine.set_policy(scheduling_policy, admission_policy))

    async def sleep(self, level: SleepLevel = 1, mode: PauseMode = "abort", *, requests: SleepRequests = "wait") -> int:
        """Give back the memory of the weights and of the KV cache, until `wake_up`. Returns how many bytes.

        The processes stay. Nothing that was cached is found again. All replicas sleep, or an error says which does not. The engine
        must be built with enable_sleep_mode=True.

        Arguments:
            level: 1 (default): what the system keeps in memory of the weights' files stays there; 2: it is given up, too. On a GPU,
                1 keeps a copy of the weights in the host's memory, and 2 none.
            mode: what becomes of the requests that there are, as in `pause_generation`; those that are kept are computed again.
            requests: what becomes of requests that come meanwhile: "wait" (default), or "refuse" them with EngineSleepingError.

        Raises:
            ConfigError: the engine was built without enable_sleep_mode.
            InvalidParameterError: an argument has no such value.
            UnsupportedModelError: level=2, and the weights of this model cannot be read again on its device; nothing sleeps.
            EngineError: a worker ended meanwhile, or generation was resumed; nothing sleeps.
            EngineDeadError, EngineShutdownError: the engine is gone.

        Example:
            freed = await llm.sleep()
            await llm.wake_up()
        """
        await self.start()
        await HostLoop.current().result_of(self._engine.all_handed_over())
        return await HostLoop.current().result_of(self._engine.sleep(level, mode, requests))

    async def wake_up(self, tags: Sequence[SleepTag] | None = None) -> None:
        """Take memory again after `sleep`; generation goes on when nothing sleeps any more. Nothing happens where nothing does.

        Arguments:
            tags: "weights" reads the weights of the newest version again; "kv_cache" lets the cache be used; None (default): both.

        Raises:
            InvalidParameterError: there is no such tag.
            CorruptModelError: the files of the weights have changed meanwhile.
            EngineError: a worker ended meanwhile, or the GPU has no memory for it; the engine goes on sleeping.
            EngineDeadError, EngineShutdownError: the engine is gone.
        """
        if not self._engine.is_new:
            await self.start()
            await HostLoop.current().result_of(self._engine.wake_up(tags))

    async def is_sleeping(self) -> bool:
        """Whether something of the engine sleeps. Starts nothing."""
        return self._engine.sleep_state.is_sleeping

    async def collective_rpc(
        self,
        method: str,
        timeout: float | None = None,
        args: Sequence[Any] = (),
        kwargs: Mapping[str, Any] | None = None,
    ) -> list[Any]:
        """Call a function on every rank of every replica, between two steps. Returns what each rank returned, in their order.

        Steps wait until all ranks are through. What a function changes of the weights is no version of them
        (`update_weights_from_tensors`).

        Arguments:
            method: the name of a method of the worker, such as one of `worker_extension_cls`; or the path of a function,
                'module:function', which gets the worker before its arguments. vLLM's `reload_weights` reads the folder of the model
                again, as `update_weights_from_disk`.
            timeout: seconds after which the call is waited for no longer; None (default): any time.
            args, kwargs: JSON values, bytes, tensors and numpy arrays of numbers, of at most 48 MiB; as much as a rank may return.

        Raises:
            InvalidParameterError: an argument is not what it must be; for a function, the message says its path.
            CollectiveCallError: the function raised on some rank; carries what each rank said.
            TimeoutError: the time is over; the function goes on.
            EngineError: a worker ended meanwhile.
            EngineDeadError, EngineShutdownError: the engine is gone.

        Example:
            workers = await llm.collective_rpc("builtins:repr")
        """
        if is_reload(method, self._engine.config):
            folder = folder_to_reload(method, args, kwargs, self._engine.config)
            if folder is not None:
                await self.update_weights_from_disk(folder)
            return [None] * (self._engine.config.world_size * self._engine.config.data_parallel_size)
        target = check_target("method", method, is_path=False)
        data, seconds = call_arguments(args, kwargs), check_timeout_of_call(timeout)
        await self.start()
        return await self._results(self._engine.call_workers(target, data, timeout=seconds))

    async def apply_model(self, func: str) -> list[Any]:
        """Call a function with the loaded model of every rank of every replica, between two steps, as `collective_rpc`.

        Arguments:
            func: the path of a function, 'module:function'.

        Raises:
            InvalidParameterError: it is no path; of a function, the message says the path.
            CollectiveCallError: the function raised on some rank; carries what each rank said.
            EngineError: a worker ended meanwhile.
            EngineDeadError, EngineShutdownError: the engine is gone.
        """
        target = check_target("func", func, is_path=True)
        await self.start()
        return await self._results(self._engine.call_workers(target, call_arguments((), None), is_of_model=True))

    async def _results(self, calling: Future[Called]) -> list[Any]:
        """Of a call. Weights that it has brought are a version from here on."""
        called = await HostLoop.current().result_of(calling)
        path, new_memory = called.weights, self._engine.weight_memory.new
        if path is not None:
            await self._update_weights(lambda: NewWeights.of_worker(path, new_memory), None, "recompute")
        return called.results

    async def add_lora(self, lora_request: LoRARequest) -> bool:
        """Have the workers read an adapter before a request comes with it.

        Arguments:
            lora_request: as in `generate`.

        Raises:
            InvalidParameterError: the engine takes no adapters, or not this one; or all that it keeps (max_cpu_loras) are pinned.
            EngineDeadError, EngineShutdownError: the engine is gone.
        """
        await self.start()
        adapter = await HostLoop.current().result_of(self._engine.read_adapter(lora_request))
        return bool(await HostLoop.current().result_of(self._engine.ask_for_adapter("add_adapter", adapter)))

    async def remove_lora(self, lora_id: int) -> bool:
        """Let the workers forget an adapter; requests that run with it go on. Returns whether they had kept it.

        Arguments:
            lora_id: the lora_int_id of a request of this program.

        Raises:
            InvalidParameterError: the engine takes no adapters.
            EngineDeadError, EngineShutdownError: the engine is gone.
        """
        adapter = self._engine.adapter_of_number(lora_id)
        if adapter is None:
            return False
        await self.start()
        self._engine.forget_adapter(lora_id)
        return bool(await HostLoop.current().result_of(self._engine.ask_for_adapter("remove_adapter", adapter)))

    async def list_loras(self) -> set[int]:
        """The adapters that the workers keep, by the lora_int_id of this program's requests.

        Raises:
            InvalidParameterError: the engine takes no adapters.
            EngineDeadError, EngineShutdownError: the engine is gone.
        """
        await self.start()
        digests = await HostLoop.current().result_of(self._engine.ask_scheduler("list_adapters"))
        return self._engine.numbers_of_adapters(digests)

    async def pin_lora(self, lora_id: int) -> bool:
        """Let the workers keep an adapter whatever comes, until it is removed or they end.

        Arguments:
            lora_id: the lora_int_id of a request of this program.

        Raises:
            InvalidParameterError: the engine takes no adapters, or knows none of this number; or all that it keeps are pinned.
            EngineDeadError, EngineShutdownError: the engine is gone.
        """
        adapter = self._engine.adapter_of_number(lora_id)
        if adapter is None:
            raise InvalidParameterError(f"lora_id={lora_id!r:.100} is no adapter of this program; add it with add_lora")
        await self.start()
        return bool(await HostLoop.current().result_of(self._engine.ask_for_adapter("pin_adapter", adapter)))

    async def pause_generation(self, *, mode: PauseMode = "abort", clear_cache: bool = True) -> None:
        """Start no request until `resume_generation`; returns when nothing is going on any more (to change weights).

        Requests are taken meanwhile, and wait.

        Arguments:
            mode: what becomes of the requests from before: "abort" (default) ends them, each with a final output; "wait" lets
                those that have started finish; "keep" leaves them where they are.
            clear_cache: all KV is forgotten, and what "keep" left is computed again from its tokens; default True.

        Raises:
            InvalidParameterError: there is no such mode.
            EngineDeadError, EngineShutdownError: the engine is gone.
        """
        check_pause_mode(mode)
        await self.start()
        await HostLoop.current().result_of(self._engine.all_handed_over())
        asked = self._engine.ask_scheduler("pause_generation", timeout=math.inf, mode=mode, clear_cache=clear_cache)
        await HostLoop.current().result_of(asked)

    async def resume_generation(self) -> None:
        """Go on after `pause_generation`; nothing happens where there was none.

        Raises:
            EngineDeadError, EngineShutdownError: the engine is gone.
        """
        if not self._engine.is_new:
            await self.start()
            await HostLoop.current().result_of(self._engine.ask_scheduler("resume_generation"))

    async def is_paused(self) -> bool:
        """Whether `pause_generation` holds. Starts nothing.

        Raises:
            EngineDeadError, EngineShutdownError: the engine is gone.
        """
        if self._engine.is_new:
            return False
        await self.start()
        return bool(await HostLoop.current().result_of(self._engine.ask_scheduler("is_paused")))

    async def update_weights_from_disk(
        self,
        folder: str | os.PathLike[str],
        *,
        version: str | None = None,
        running: RunningRequests = "recompute",
    ) -> str:
        """Compute every later token with the weights of a folder. Returns the name of the version.

        All ranks of all replicas read and check the folder first; if one cannot use it, nothing changes anywhere. Then each replica
        changes between two of its steps. A process that is started later begins with the new weights. No request finds KV of
        another version in the prefix cache. Until it is committed, a version takes the memory of the weights once more.

        Arguments:
            folder: of safetensors files of the same model; it must not change before the next update.
            version: a name for it, which outputs have (`CompletionOutput.weight_versions`); None (default): the number of the
                update.
            running: what becomes of requests that have started: "recompute" (default) computes their KV again with the new weights;
                "keep" goes on with the KV that they have; "abort" ends them, each with a final output.

        Raises:
            InvalidParameterError: there is no such folder, or an argument has no such value.
            CorruptModelError: a tensor is missing or not as the model needs it; nothing has changed.
            EngineError: another update is under way, or a worker has ended meanwhile; nothing has changed.
            EngineDeadError, EngineShutdownError: the engine is gone.
        """
        return await self._update_weights(lambda: NewWeights.of_folder(folder), version, running)

    async def update_weights_from_tensors(
        self,
        tensors: Mapping[str, Any],
        *,
        transport: str = "shm",
        version: str | None = None,
        running: RunningRequests = "recompute",
    ) -> str:
        """Compute every later token with these tensors; all else as `update_weights_from_disk`.

        Arguments:
            tensors: torch tensors by their names in the checkpoint, of any shape that they have there; they are copied. What is
                not given stays as it is. They must not change before the call returns.
            transport: how they get to the ranks: "shm" (default) through shared memory; "gloo", and "nccl" between GPUs, by a group
                of torch.distributed; "cuda_ipc" on a GPU that a rank is on, too (docs/weights.md).
            version: as in `update_weights_from_disk`.
            running: as in `update_weights_from_disk`.

        Raises:
            InvalidParameterError: an argument, or a tensor, is not what it must be.
            CorruptModelError: a tensor is not as the model needs it; nothing has changed.
            EngineError: another update is under way, or a worker has ended meanwhile; nothing has changed.
            EngineDeadError, EngineShutdownError: the engine is gone.
        """
        read = partial(transport_of("transport", transport).whole, tensors, self._engine.weight_memory)
        return await self._update_weights(read, version, running)

    async def _update_weights(
        self, read: Callable[[], NewWeights | RankJob], version: str | None, running: RunningRequests
    ) -> str:
        await self.start()
        new = await HostLoop.current().result_of(self._engine.read_weights(read, version, running))
        if isinstance(new, RankJob):
            new = await HostLoop.current().result_of(self._engine.bring_weights(new))
        return await HostLoop.current().result_of(self._engine.update_weights(new, version, running))

    @property
    def weight_version(self) -> str:
        """The name of the weights that new tokens are of; "0": those that the engine was built with."""
        return self._engine.weight_version

    async def init_weight_transfer_engine(self, request: Any) -> None:
        """Get ready for updates in parts. Ranks that meet a trainer have met it when this returns.

        Arguments:
            request: {"init_info": {}} for tensors and files; for a trainer that broadcasts {"init_info": {"backend": "gloo",
                "master_address": "10.0.0.1", "master_port": 29600, "world_size": 3}}, or "nccl" (docs/weights.md).

        Raises:
            InvalidParameterError: there is no such backend, or it does not take this.
            EngineError: the ranks and the trainer did not meet.
            EngineDeadError, EngineShutdownError: the engine is gone.
        """
        place = self._engine.weight_transfer.init(request)
        if place is not None:
            await self.start()
            await HostLoop.current().result_of(self._engine.join_trainer(place))

    async def shutdown_weight_transfer_engine(self) -> None:
        """Forget an update that was started and not finished, and leave the trainer that the ranks have met.

        Raises:
            EngineError: the ranks wait for that trainer; they do so no longer than its timeout.
        """
        await to_thread.run_sync(self._engine.weight_transfer.close)
        if self._engine.has_trainer:
            await HostLoop.current().result_of(self._engine.join_trainer(None))

    async def start_weight_update(self, is_checkpoint_format: bool = True) -> None:
        """Begin an update in parts; one that was not finished is forgotten.

        Arguments:
            is_checkpoint_format: True (default) alone: tensors have the names and shapes of the checkpoint. vLLM's trainers say so.

        Raises InvalidParameterError: another format.
        """
        await to_thread.run_sync(self._engine.weight_transfer.start, is_checkpoint_format)

    async def update_weights(self, request: Any) -> None:
        """Bring a part of the new weights, which is copied. Nothing changes before `finish_weight_update`.

        Arguments:
            request: {"update_info": {"tensors": {name: tensor}}}, or {"update_info": {"files": [path]}} of safetensors files; or
                what a trainer brings: {"update_info": {"names": [...], "dtype_names": [...], "shapes": [...]}}, and with
                "ipc_handles" what it shares on a GPU.

        Raises:
            InvalidParameterError: no update was started, or it was finished or started anew while the part was read; or the
                request or a tensor is not what it must be.
            EngineError: there is no memory for the part, or the trainer has ended or is silent; the parts before are kept.
            EngineDeadError, EngineShutdownError: the engine is gone.
        """
        part = self._engine.weight_transfer.part(request)
        try:
            await self.start()
            job = await HostLoop.current().result_of(self._engine.read_weights(part.bring, None, "recompute"))
            if job is not None:
                new = await HostLoop.current().result_of(self._engine.bring_weights(job))
                keep = partial(part.keep, new)
                await HostLoop.current().result_of(self._engine.read_weights(keep, None, "recompute"))
        except BaseException:
            part.is_given_up = True  # it may be read at this moment, and land over the one that is given again
            raise

    async def finish_weight_update(self, weight_version: str | None = None) -> None:
        """Compute every later token with all parts; requests that run are computed again (`update_weights_from_tensors`).

        Arguments:
            weight_version: a name for the version; None (default): the number of the update.

        Raises:
            InvalidParameterError: no update was started, no part has come, or there is no such name.
            CorruptModelError: a tensor is not as the model needs it; nothing has changed.
            EngineError: another update is under way, or a worker has ended meanwhile; nothing has changed.
            EngineDeadError, EngineShutdownError: the engine is gone.
        """
        await self._update_weights(self._engine.weight_transfer.finish, weight_version, "recompute")

    async def update_weight_version(self, new_version: str) -> None:
        """Call the weights that count otherwise, for tokens from now on.

        Arguments:
            new_version: the name.

        Raises:
            InvalidParameterError: there is no such name.
            EngineError: an update is under way.
            EngineDeadError, EngineShutdownError: the engine is gone.
        """
        await self.start()
        await HostLoop.current().result_of(self._engine.name_weights(new_version))

    async def get_weight_version(self) -> str:
        """As `weight_version`."""
        return self.weight_version

    def health(self) -> EngineHealth:
        """The state of the engine and of each of its actors, and what has failed. Waits for nothing, starts nothing."""
        return self._engine.health()

    async def scale(self, num_replicas: int) -> None:
        """Have so many replicas; starts the engine. Those that are too many are stopped, and their streams go on elsewhere.

        Arguments:
            num_replicas: 1 to 64. With data_parallel_size=1 the first replica starts anew, when the others have its streams.

        Raises:
            InvalidParameterError: no such number, or an engine with topology="inline".
            EngineError: the engine belongs to another process, or has one replica and another program has joined it.
            EngineDeadError: a new replica did not start; the others go on.
        """
        await self.start()
        await HostLoop.current().result_of(self._engine.scale(num_replicas))

    async def drain_replica(self, number: int, is_draining: bool = True) -> None:
        """Let a replica take no new requests, and move its streams to others. Requests that are pinned to it stay.

        Arguments:
            number: of the replica, as in `health().replicas`.
            is_draining: default True; False: it takes requests again.

        Raises:
            InvalidParameterError: there is no such replica, or no other one that takes requests.
        """
        await self.start()
        await HostLoop.current().result_of(self._engine.drain_replica(number, is_draining))

    async def start_profile(
        self,
        profile_prefix: str | None = None,
        *,
        delay_iterations: int | None = None,
        max_iterations: int | None = None,
    ) -> None:
        """As `LLM.start_profile`; starts the engine.

        Arguments:
            profile_prefix: what the names of the files begin with: up to 128 letters, digits, ".", "_" and "-"; None: the time.
            delay_iterations, max_iterations: accepted at None and 0, where they ask for nothing.

        Raises:
            ConfigError: the engine was built without profiler_config.
            InvalidParameterError: an argument is wrong.
            EngineError: a profile is under way, or the engine is gone.
        """
        await self.start()
        await HostLoop.current().result_of(self._engine.start_profile(profile_prefix, delay_iterations, max_iterations))

    async def stop_profile(self) -> None:
        """As `LLM.stop_profile`.

        Raises:
            EngineError: there is no profile, or the engine is gone.
        """
        await HostLoop.current().result_of(self._engine.stop_profile())

    # What programs for vLLM ask of an engine

    async def check_health(self) -> None:
        """Whether the engine can serve; one that is yet to start can.

        Raises:
            EngineDeadError, EngineShutdownError, ForkedProcessError: it cannot.
            EngineError: no prompt can be read.
        """
        self._engine.check_health()

    @property
    def is_running(self) -> bool:
        """It has started, and neither died nor was shut down."""
        return self._engine.is_running

    @property
    def is_stopped(self) -> bool:
        """It died, or was shut down."""
        return not self._engine.is_running and not self._engine.is_new

    @property
    def errored(self) -> bool:
        """A process of it died."""
        return self._engine.death is not None

    @property
    def dead_error(self) -> EngineError:
        """What every request raises, once `errored`."""
        return self._engine.death or EngineDeadError("the engine is not dead")

    @property
    def vllm_config(self) -> EngineConfig:
        """As `config`."""
        return self._engine.config

    @property
    def model_config(self) -> ModelConfig:
        """The model and what its config.json says about it."""
        return self._engine.config.model

    async def get_supported_tasks(self) -> tuple[str, ...]:
        """What a request may ask for, by vLLM's names: ("generate",), or tasks such as "embed" and "classify"."""
        return self._engine.config.model.supported_tasks

    async def get_vllm_config(self) -> EngineConfig:
        """As `config`."""
        return self._engine.config

    async def get_model_config(self) -> ModelConfig:
        """As `model_config`."""
        return self._engine.config.model

    def get_tokenizer(self) -> Any:
        """The tokenizer as transformers has it. The first call reads it from its files, which may take a second.

        It may be awaited, as in older releases of vLLM, and need not be.

        Raises:
            InvalidPromptError: the engine was built with skip_tokenizer_init.
        """
        return awaited(self._engine.prompts.transformers_tokenizer)

    @property
    def tokenizer(self) -> Any:
        """As `get_tokenizer`; None with skip_tokenizer_init."""
        return None if self._engine.config.model.tokenizer is None else self.get_tokenizer()

    async def is_tracing_enabled(self) -> bool:
        """False: spans are the server's business."""
        return False

    async def do_log_stats(self) -> None:
        """Write throughput since the last time, and the load now, to the log at level INFO. Nothing of an engine that is new.

        Raises:
            EngineDeadError, EngineShutdownError, ForkedProcessError: the engine is gone.
        """
        if not self._engine.is_new:
            host = HostLoop.current()
            await self.start()
            self._engine.log_statistics(await host.result_of(self._engine.ask_scheduler("statistics")))

    async def drain(self, timeout: float | None = None) -> bool:
        """Take no new request (EngineDrainingError) and wait until those there are have ended; there is no way back.

        `shutdown` comes next; cancelling the wait leaves the requests going on. The requests of attached programs are waited
        for, too; of an attached engine only those of this program.

        Arguments:
            timeout: seconds after which what is left is aborted, each with its final output; they count while the engine
                starts, too. None: no limit.

        Returns whether everything ended by itself.

        Raises:
            InvalidParameterError: the timeout is no number of seconds.
            EngineDeadError, EngineShutdownError: the engine is gone.
        """
        return await HostLoop.current().result_of(self._engine.drain(timeout))

    async def unload(self, timeout: float | None = None) -> None:
        """Stop everything and give its memory, processes and threads back; the next request or `start` starts the engine again.

        Seeds go on where they were, so the streams are those of an engine that was not unloaded. Counters begin anew, and
        a pause ends. A request that comes meanwhile waits for the next start. Returns when everything has stopped, also if
        the task is cancelled. Nothing happens to an engine that is yet to start.

        Arguments:
            timeout: seconds after which processes that do not stop by themselves are killed; None: 5.

        Raises:
            EngineError: a request is open, another task waits for the start, a program has joined the engine, or it is
                attached; nothing is changed then.
            EngineDeadError, EngineShutdownError, ForkedProcessError: the engine is gone.

        Example:
            await llm.unload()
            output = await llm.complete("Once upon a time", SamplingParams(max_tokens=8))
        """
        await _in_thread(partial(self._engine.unload, STOP_TIMEOUT_S if timeout is None else timeout))

    def shutdown(self, timeout: float | None = None) -> None:
        """Stop everything and wait for it; open streams end with EngineShutdownError. Idempotent, from any thread.

        Arguments:
            timeout: seconds after which processes that do not stop by themselves are killed; None: 5.
        """
        self._engine.shutdown(STOP_TIMEOUT_S if timeout is None else timeout)

    async def __aenter__(self) -> AsyncLLM:
        try:
            await self.start()
        except BaseException:  # cancelled on the way in: there will be no __aexit__
            await _in_thread(self.shutdown)
            raise
        return self

    async def __aexit__(self, *exception: object) -> None:
        await _in_thread(self.shutdown)


class AsyncLLMEngine(AsyncLLM):
    """`AsyncLLM` under its older name, with what was left of its background loop."""

    def start_background_loop(self) -> None:
        """Nothing: the engine starts with the first request, and its thread is its own."""

    def shutdown_background_loop(self) -> None:
        """As `shutdown`."""
        self.shutdown()


async def _in_thread(function: Callable[[], None]) -> None:
    """Run it in a thread that ends with it. anyio's threads end with the main task of a loop, which nest_asyncio hides."""
    from anyio import CancelScope, get_cancelled_exc_class

    done: Future[None] = Future()
    done.set_running_or_notify_cancel()  # a cancelled wait cannot cancel it: the thread goes on, and must find it open

    def run() -> None:
        try:
            function()
        except BaseException as error:  # the task that waits is told
            done.set_exception(error)
        else:
            done.set_result(None)

    threading.Thread(target=run, name="actorllm:waiting").start()
    cancelled: BaseException | None = None
    with CancelScope(shield=True):  # the processes must go even if the task that owned them was cancelled
        while True:
            try:
                await HostLoop.current().result_of(done)
                break
            except get_cancelled_exc_class() as error:  # by asyncio itself, which knows no shield
                cancelled = error
    if cancelled is not None:
        raise cancelled
