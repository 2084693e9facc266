"""`LLM`: the engine for scripts, one call for a list of prompts."""

from __future__ import annotations

import copy
import itertools
import os
import threading
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import fields
from pathlib import Path
from typing import Any, Protocol, Self, TypeVar, Unpack

from actorllm.actors.engine_thread import ThreadHost
from actorllm.api.beam_search import BeamSearch, BeamSearchOutput, BeamSearchParams, end_ids, step_params
from actorllm.api.blocking import BlockingDoor
from actorllm.api.engine_args import EngineArgs
from actorllm.api.llm_engine import LLMEngine
from actorllm.client.engine import Engine
from actorllm.client.launched.launched_engine import LaunchedEngine, on_all_ranks
from actorllm.client.plugin_data import data_of
from actorllm.client.pooling_stream import PoolingStream
from actorllm.client.scoring import TextScoring, tokenization_of
from actorllm.client.stream import RequestStream
from actorllm.clock import now
from actorllm.config import EngineConfig
from actorllm.errors import InvalidParameterError, InvalidPromptError
from actorllm.fleet import attached
from actorllm.fleet.fleet_engine import new_engine
from actorllm.intake.tokenization import Prompt, as_batch
from actorllm.text.chat_template import ContentFormat, Conversation, Message, is_batch, load_template
from actorllm.types.lora_request import LoRARequest
from actorllm.types.options import EngineOptions, with_options
from actorllm.types.outputs import RequestOutput
from actorllm.types.params import PoolingParams, RequestOutputKind, SamplingParams, _integer, check_timeout, with_task
from actorllm.types.pooling_outputs import (
    ClassificationRequestOutput,
    EmbeddingRequestOutput,
    PoolingOutput,
    PoolingRequestOutput,
    ScoringRequestOutput,
)

O = TypeVar("O")  # noqa: E741
T = TypeVar("T")
O_co = TypeVar("O_co", covariant=True)


class TakenAtEnd(Protocol[O_co]):
    """A stream of one output."""

    @property
    def has_ended(self) -> bool: ...

    def take(self) -> O_co | None: ...


@with_options
class LLM(BlockingDoor):
    """A synchronous engine: starts in the constructor, works from any thread, also inside a running event loop. Stops with
    `shutdown`, when it is dropped, or at interpreter exit.

    model: a bundled model, a folder, or a Hugging Face id; None with `module`. chat_template: what `chat` uses instead
    of the model's own: a Jinja template, or the file of one. Further arguments are named and defaulted as in vLLM where both have
    them; those of `types.vllm_options` are taken, too. Raises ConfigError, UnknownArgumentError, ModelError, or what made the start
    fail. Requests have the ids "0", "1" and so on.
    """

    _chat_template: str | None = None

    def __init__(
        self,
        model: str | os.PathLike[str] | None = None,
        *,
        chat_template: Path | str | None = None,
        **options: Unpack[EngineOptions],
    ) -> None:
        self._chat_template = load_template(chat_template)
        config = EngineConfig.from_arguments(model, **options)
        self._adopt(LaunchedEngine(config) if config.is_launched else new_engine(config))

    def _adopt(self, engine: Engine) -> None:
        self._engine = engine
        self._request_numbers = itertools.count()
        self._hold = engine.new_hold()
        self._enqueued: list[RequestStream] = []
        self._enqueued_lock = threading.Lock()
        self._stepped: LLMEngine | None = None
        engine.start()

    @classmethod
    def attach(cls, name: str) -> LLM:
        """Join the engine that another process of this user has given this name; see `AsyncLLM.attach`.

        Arguments:
            name: what the engine was built with (`name=`).

        Raises:
            EngineNotFoundError, AttachError, EngineShutdownError, EngineDeadError: as in `AsyncLLM.attach`.
        """
        llm = cls.__new__(cls)
        llm._adopt(attached.attach(name))
        return llm

    @classmethod
    def from_engine_args(cls, engine_args: EngineArgs) -> Self:
        """The same from one object.

        Arguments:
            engine_args: the arguments of the engine.

        Raises:
            ConfigError, ModelError, EngineStartError: as the constructor.
        """
        arguments = {f.name: getattr(engine_args, f.name) for f in fields(engine_args)}  # type: ignore[arg-type]
        return cls(**arguments)

    @property
    def config(self) -> EngineConfig:
        """The configuration; complete (number of KV blocks) once the engine has started."""
        return self._engine.config

    @property
    def supported_tasks(self) -> tuple[str, ...]:
        """What a request may ask for, by vLLM's names: ("generate",), or tasks such as "embed" and "classify"."""
        return self._engine.config.model.supported_tasks

    @property
    def llm_engine(self) -> LLMEngine:
        """The same engine, to be stepped by hand: its requests and those of `generate` do not see each other."""
        if self._stepped is None:
            self._stepped = LLMEngine._over(self._engine, self._hold)
        return self._stepped

    def get_world_size(self, include_dp: bool = True) -> int:
        """How many ranks compute a step. include_dp changes nothing: there are no data-parallel ranks."""
        return self._engine.config.world_size

    def generate(
        self,
        prompts: Prompt | Sequence[Prompt] | None = None,
        sampling_params: SamplingParams | Sequence[SamplingParams] | None = None,
        *,
        prompt_token_ids: Sequence[int] | Sequence[Sequence[int]] | None = None,
        use_tqdm: bool | Callable[..., Any] = True,
        lora_request: LoRARequest | Sequence[LoRARequest | None] | None = None,
        priority: int | Sequence[int] | None = None,
        tokenization_kwargs: Mapping[str, Any] | None = None,
        timeout: float | None = None,
        **vllm_arguments: Any,
    ) -> list[RequestOutput]:
        """Complete every prompt; the outputs come in the order of the prompts.

        Arguments:
            prompts: one prompt (text, token ids, or a mapping as in vLLM), or a list of them.
            sampling_params: one for all, or one per prompt; None: `get_default_sampling_params`.
            prompt_token_ids: token ids in the place of `prompts`, as in older releases of vLLM; None: `prompts` are given.
            use_tqdm: whether to show a progress bar, or what makes one; default True.
            priority: lower is sooner, under policies that look at it: one for all, or one per prompt; None: 0.
            tokenization_kwargs: truncate_prompt_tokens, truncation_side and add_special_tokens, for all prompts; None: none.
            timeout: seconds for the whole call; what has not ended by then comes as it is, with finish_reason "abort" and
                stop_reason "deadline". None: no limit.
            lora_request: the adapter of all prompts, or one (or None) per prompt; None: none. Needs enable_lora=True.
            vllm_arguments: trace_headers; mm_processor_kwargs as in `chat`; and further arguments of vLLM at their defaults.

        Raises:
            RequestError: of the first prompt that failed (InvalidPromptError, RequestFailedError, EngineOverloaded ...), or of a
                parameter that is wrong (InvalidParameterError), after the others of this call were aborted.
            EngineError: the engine is gone (EngineDeadError, EngineShutdownError) or draining.

        Example:
            outputs = llm.generate(["Once upon a time", "The fox"], SamplingParams(max_tokens=8), use_tqdm=False)
            print([output.outputs[0].text for output in outputs])
        """
        extras = {
            "tokenization_kwargs": tokenization_kwargs,
            "deadline": _deadline(timeout),
            "lora_request": lora_request,
            **vllm_arguments,
        }
        if prompts is not None and prompt_token_ids is not None:
            raise InvalidPromptError("generate() takes prompts, or prompt_token_ids in their place: both are given")
        batch = as_batch(prompts if prompt_token_ids is None else prompt_token_ids)  # type: ignore[arg-type]
        return self._complete(batch, sampling_params, use_tqdm, priority, extras)

    def chat(
        self,
        messages: Sequence[Message] | Sequence[Sequence[Message]],
        sampling_params: SamplingParams | Sequence[SamplingParams] | None = None,
        use_tqdm: bool | Callable[..., Any] = True,
        lora_request: LoRARequest | Sequence[LoRARequest | None] | None = None,
        priority: int | Sequence[int] | None = None,
        chat_template: str | None = None,
        chat_template_content_format: ContentFormat = "auto",
        add_generation_prompt: bool = True,
        continue_final_message: bool = False,
        tools: Sequence[Mapping[str, Any]] | None = None,
        chat_template_kwargs: Mapping[str, Any] | None = None,
        tokenization_kwargs: Mapping[str, Any] | None = None,
        mm_processor_kwargs: Mapping[str, Any] | None = None,
        timeout: float | None = None,
    ) -> list[RequestOutput]:
        """Answer a conversation, or each of a list of them.

        Arguments:
            messages: a list of mappings with "role" and "content", or a list of such lists.
            sampling_params: one for all, or one per prompt; None: `get_default_sampling_params`.
            use_tqdm: whether to show a progress bar, or what makes one; default True.
            lora_request: the adapter of all prompts, or one (or None) per prompt; None: none. Needs enable_lora=True.
            mm_processor_kwargs: arguments of the model's processor, for the images or recordings of all prompts; None: none.
            priority: lower is sooner, under policies that look at it: one for all, or one per prompt; None: 0.
            chat_template: a Jinja template, or the name of one of the model's; None: that of the constructor, else the model's own.
            chat_template_content_format: "string" gives the template text, "openai" lists of parts; "auto" (default) reads it.
            add_generation_prompt: end the prompt with what opens an answer; default True.
            continue_final_message: the answer goes on from the last message instead; default False.
            tools: functions as JSON schema; None: none.
            chat_template_kwargs: further variables of the template; None: none.
            tokenization_kwargs: as in `generate`.
            timeout: seconds for the whole call; what has not ended by then comes as it is, with finish_reason "abort" and
                stop_reason "deadline". None: no limit.

        Raises:
            RequestError: of the first prompt that failed (InvalidPromptError, RequestFailedError, EngineOverloaded ...), or of a
                parameter that is wrong (InvalidParameterError), after the others of this call were aborted.
            EngineError: the engine is gone (EngineDeadError, EngineShutdownError) or draining.

        Example:
            template = "{% for message in messages %}{{ message.content }} {% endfor %}"
            messages = [{"role": "user", "content": "Tell me a story."}]
            (output,) = llm.chat(messages, SamplingParams(max_tokens=8), use_tqdm=False, chat_template=template)
            print(output.outputs[0].text)
        """
        extras = {
            "tokenization_kwargs": tokenization_kwargs,
            "deadline": _deadline(timeout),
            "lora_request": lora_request,
            "mm_processor_kwargs": mm_processor_kwargs,
        }
        batch = _conversations(
            messages,
            modality=self._engine.config.model.modality,
            chat_template=self._chat_template if chat_template is None else chat_template,
            chat_template_content_format=chat_template_content_format,
            add_generation_prompt=add_generation_prompt,
            continue_final_message=continue_final_message,
            tools=tools,
            chat_template_kwargs=chat_template_kwargs,
        )
        return self._complete(batch, sampling_params, use_tqdm, priority, extras)

    @on_all_ranks
    def encode(
        self,
        prompts: Prompt | Sequence[Prompt],
        pooling_params: PoolingParams | Sequence[PoolingParams] | None = None,
        *,
        use_tqdm: bool | Callable[..., Any] = True,
        lora_request: LoRARequest | Sequence[LoRARequest | None] | None = None,
        pooling_task: str | None = None,
        tokenization_kwargs: Mapping[str, Any] | None = None,
        priority: Sequence[int] | None = None,
        timeout: float | None = None,
    ) -> list[PoolingRequestOutput[PoolingOutput]]:
        """A vector of every prompt, as a tensor, in the order of the prompts. The engine must pool (runner="pooling").

        Arguments:
            prompts: one prompt (text, token ids, or a mapping as in vLLM), or a list of them; with io_processor_plugin also
                {'data': ...}, or a list of these. Such data have one output, whose `outputs` are what the plug-in has made.
            pooling_params: one for all, or one per prompt; None: the engine's own way.
            use_tqdm: whether to show a progress bar, or what makes one; default True.
            lora_request: the adapter of all prompts, or one (or None) per prompt; None: none. Needs enable_lora=True.
            pooling_task: "embed" or "token_embed"; of models with a head "classify", "score" or "token_classify"; None: what
                pooling_params say, or the first of these that the model has. Token tasks give a tensor [num_tokens, size].
            tokenization_kwargs: truncate_prompt_tokens, truncation_side and add_special_tokens, for all prompts; None: none.
            priority: one number per prompt; None: 0.
            timeout: seconds for the whole call; a prompt that has no vector by then has an `error`. None: no limit.

        Raises:
            RequestError: of the first prompt that failed (InvalidPromptError, RequestFailedError, EngineOverloaded ...), or of a
                parameter that is wrong (InvalidParameterError), after the others of this call were aborted.
            EngineError: the engine is gone (EngineDeadError, EngineShutdownError) or draining.

        Example:
            (output,) = embedder.encode("Once upon a time", use_tqdm=False)
            print(output.outputs.data.shape)
        """
        data = data_of(prompts, pooling_task)
        if data is not None:
            return self._encode_data(
                data,
                pooling_params,
                _adapter_per_prompt(lora_request, len(data)),
                priority,
                use_tqdm=use_tqdm,
                tokenization_kwargs=tokenization_kwargs,
                timeout=timeout,
            )
        batch = as_batch(prompts)
        params = _params_per_prompt(pooling_params, len(batch))
        if pooling_task is not None:
            params = [with_task(one, pooling_task) for one in params]
        extras: dict[str, Any] = {
            "tokenization_kwargs": tokenization_kwargs,
            "deadline": _deadline(timeout),
        }
        adapters = _adapter_per_prompt(lora_request, len(batch))
        _check_priority(priority, len(batch))
        host = ThreadHost()
        streams: list[PoolingStream] = []
        try:
            for i, (prompt, one) in enumerate(zip(batch, params, strict=True)):
                arguments = {"lora_request": adapters[i]}
                urgency = priority[i] if priority else 0
                stream = self._engine.encode(
                    prompt, one, host=host, priority=urgency, vllm_arguments=arguments, **extras
                )
                streams.append(stream)
            return self._collect(host, streams, use_tqdm)
        finally:
            for stream in streams:
                stream.abort()
            host.close()

    def _encode_data(
        self,
        data: Sequence[Any],
        params: PoolingParams | Sequence[PoolingParams] | None,
        adapters: Sequence[LoRARequest | None],
        priority: Sequence[int] | None,
        **arguments: Any,
    ) -> list[PoolingRequestOutput[Any]]:
        """`encode`, of data that the plug-in of the engine understands. arguments: of `encode`, the same for all."""
        plugin = self._engine.needed_plugin
        given = _params_per_prompt(params, len(data))
        _check_priority(priority, len(data))
        asked = [plugin.asked(one, own) for one, own in zip(data, given, strict=True)]
        sizes = [len(prompts) for prompts, _ in asked]
        outputs = self.encode(
            [prompt for prompts, _ in asked for prompt in prompts],
            [one for _, each in asked for one in each],
            lora_request=_repeated(adapters, sizes),
            priority=None if priority is None else _repeated(priority, sizes),
            **arguments,
        )
        taken = iter(outputs)
        return [plugin.answered([next(taken) for _ in range(size)]) for size in sizes]

    def embed(
        self,
        prompts: Prompt | Sequence[Prompt],
        *,
        use_tqdm: bool | Callable[..., Any] = True,
        pooling_params: PoolingParams | Sequence[PoolingParams] | None = None,
        lora_request: LoRARequest | Sequence[LoRARequest | None] | None = None,
        tokenization_kwargs: Mapping[str, Any] | None = None,
        priority: Sequence[int] | None = None,
        timeout: float | None = None,
    ) -> list[EmbeddingRequestOutput]:
        """A vector of every prompt, as a list of floats.

        Arguments:
            prompts, use_tqdm, pooling_params, lora_request, tokenization_kwargs, priority, timeout: as in `encode`.

        Raises:
            Everything that `encode` raises.

        Example:
            (output,) = embedder.embed("Once upon a time", use_tqdm=False)
            print(output.outputs.embedding[:3])
        """
        outputs = self.encode(
            prompts,
            pooling_params,
            use_tqdm=use_tqdm,
            pooling_task="embed",
            lora_request=lora_request,
            tokenization_kwargs=tokenization_kwargs,
            priority=priority,
            timeout=timeout,
        )
        return [EmbeddingRequestOutput.from_base(output) for output in outputs]

    def classify(
        self,
        prompts: Prompt | Sequence[Prompt],
        *,
        use_tqdm: bool | Callable[..., Any] = True,
        pooling_params: PoolingParams | Sequence[PoolingParams] | None = None,
        lora_request: LoRARequest | Sequence[LoRARequest | None] | None = None,
        tokenization_kwargs: Mapping[str, Any] | None = None,
        priority: Sequence[int] | None = None,
        timeout: float | None = None,
    ) -> list[ClassificationRequestOutput]:
        """The probabilities of a classifier's labels for every prompt, as a list of floats.

        Arguments:
            prompts, use_tqdm, pooling_params, lora_request, tokenization_kwargs, priority, timeout: as in `encode`.

        Raises:
            InvalidParameterError: the model has no head for prompts; everything else as in `encode`.
        """
        outputs = self.encode(
            prompts,
            pooling_params,
            use_tqdm=use_tqdm,
            lora_request=lora_request,
            pooling_task="classify",
            tokenization_kwargs=tokenization_kwargs,
            priority=priority,
            timeout=timeout,
        )
        return [ClassificationRequestOutput.from_base(output) for output in outputs]

    def reward(
        self,
        prompts: Prompt | Sequence[Prompt],
        /,
        *,
        use_tqdm: bool | Callable[..., Any] = True,
        pooling_params: PoolingParams | Sequence[PoolingParams] | None = None,
        lora_request: LoRARequest | Sequence[LoRARequest | None] | None = None,
        tokenization_kwargs: Mapping[str, Any] | None = None,
    ) -> list[PoolingRequestOutput[PoolingOutput]]:
        """The scores of every token of every prompt, as a tensor [num_tokens, num_labels], of a model with such a head.

        Arguments:
            prompts, use_tqdm, pooling_params, lora_request, tokenization_kwargs: as in `encode`.

        Raises:
            InvalidParameterError: the model has no head for tokens; everything else as in `encode`.
        """
        return self.encode(
            prompts,
            pooling_params,
            use_tqdm=use_tqdm,
            lora_request=lora_request,
            pooling_task="token_classify",
            tokenization_kwargs=tokenization_kwargs,
        )

    def score(
        self,
        data_1: Prompt | Sequence[Prompt],
        data_2: Prompt | Sequence[Prompt],
        /,
        *,
        use_tqdm: bool | Callable[..., Any] = True,
        pooling_params: PoolingParams | None = None,
        lora_request: LoRARequest | None = None,
        tokenization_kwargs: Mapping[str, Any] | None = None,
        chat_template: str | None = None,
    ) -> list[ScoringRequestOutput]:
        """How alike texts are: one text and all of data_2, or each of data_1 with its own.

        By the cosine of their vectors; with task="token_embed" by late interaction (MaxSim); by the label of a cross-encoder.

        Arguments:
            data_1: one prompt, or as many as data_2 has.
            data_2: one prompt, or several.
            use_tqdm, pooling_params, lora_request, tokenization_kwargs: as in `encode`, for all of the texts.
            chat_template: a Jinja template that makes one prompt of messages with the roles "query" and "document", for a
                cross-encoder; None: its own way.

        Raises:
            InvalidParameterError: the numbers of texts do not fit; everything else as in `encode`.

        Example:
            outputs = embedder.score("A fox ran.", ["A fox sat.", "It rained."], use_tqdm=False)
            print([output.outputs.score for output in outputs])
        """
        first, second = as_batch(data_1), as_batch(data_2)
        scoring = TextScoring.of(self._engine.config.model.pooler, first, second, pooling_params, chat_template)
        outputs = self.encode(
            scoring.prompts,
            scoring.params,
            use_tqdm=use_tqdm,
            lora_request=lora_request,
            tokenization_kwargs=tokenization_of(chat_template, tokenization_kwargs),
        )
        return scoring.outputs(outputs, self._engine.prompts.pad_token_id)

    def get_default_sampling_params(self) -> SamplingParams:
        """What requests without sampling_params get: what the model's generation_config.json recommends.

        Raises:
            ConfigError: what it recommends cannot be.
        """
        return self._engine.default_sampling_params()

    @on_all_ranks
    def _complete(
        self,
        batch: list[Prompt],
        sampling_params: SamplingParams | Sequence[SamplingParams] | None,
        use_tqdm: bool | Callable[..., Any],
        priority: int | Sequence[int] | None,
        extras: Mapping[str, Any],
    ) -> list[RequestOutput]:
        host = ThreadHost()
        streams: list[RequestStream] = []
        try:
            for stream in self._submit(host, batch, sampling_params, priority, extras):
                streams.append(stream)  # noqa: PERF402 - those before one that is refused are to be aborted
            return self._collect(host, streams, use_tqdm)
        finally:
            for stream in streams:
                stream.abort()
            host.close()

    def enqueue(
        self,
        prompts: Prompt | Sequence[Prompt],
        sampling_params: SamplingParams | Sequence[SamplingParams] | None = None,
        lora_request: LoRARequest | Sequence[LoRARequest | None] | None = None,
        priority: int | Sequence[int] | None = None,
        use_tqdm: bool | Callable[..., Any] = True,
        tokenization_kwargs: Mapping[str, Any] | None = None,
        mm_processor_kwargs: Mapping[str, Any] | None = None,
        **vllm_arguments: Any,
    ) -> list[str]:
        """As `generate`, without waiting: returns the ids of the requests, whose outputs `wait_for_completion` returns.

        Arguments:
            prompts, sampling_params, priority, tokenization_kwargs, vllm_arguments: as in `generate`.
            lora_request: the adapter of all prompts, or one (or None) per prompt; None: none. Needs enable_lora=True.
            mm_processor_kwargs: arguments of the model's processor, for the images or recordings of all prompts; None: none.
            use_tqdm: changes nothing.

        Raises:
            Everything that `generate` raises at once; nothing of this call is enqueued then.

        Example:
            ids = llm.enqueue(["Once upon a time", "The fox"], SamplingParams(max_tokens=4))
            outputs = llm.wait_for_completion(use_tqdm=False)
            print(ids, [output.outputs[0].text for output in outputs])
        """
        extras = {
            "lora_request": lora_request,
            "tokenization_kwargs": tokenization_kwargs,
            "mm_processor_kwargs": mm_processor_kwargs,
        }
        return self._enqueue(as_batch(prompts), sampling_params, priority, vllm_arguments | extras)

    def enqueue_chat(
        self,
        messages: Sequence[Message] | Sequence[Sequence[Message]],
        sampling_params: SamplingParams | Sequence[SamplingParams] | None = None,
        use_tqdm: bool | Callable[..., Any] = True,
        lora_request: LoRARequest | Sequence[LoRARequest | None] | None = None,
        priority: int | Sequence[int] | None = None,
        chat_template: str | None = None,
        chat_template_content_format: ContentFormat = "auto",
        add_generation_prompt: bool = True,
        continue_final_message: bool = False,
        tools: Sequence[Mapping[str, Any]] | None = None,
        chat_template_kwargs: Mapping[str, Any] | None = None,
        tokenization_kwargs: Mapping[str, Any] | None = None,
        mm_processor_kwargs: Mapping[str, Any] | None = None,
    ) -> list[str]:
        """As `chat`, without waiting: see `enqueue`.

        Arguments:
            messages, sampling_params, lora_request, priority, chat_template, chat_template_content_format,
                add_generation_prompt, continue_final_message, tools, chat_template_kwargs, tokenization_kwargs,
                mm_processor_kwargs: as in `chat`.
            use_tqdm: changes nothing.

        Raises:
            Everything that `chat` raises at once; nothing of this call is enqueued then.
        """
        batch = _conversations(
            messages,
            modality=self._engine.config.model.modality,
            chat_template=self._chat_template if chat_template is None else chat_template,
            chat_template_content_format=chat_template_content_format,
            add_generation_prompt=add_generation_prompt,
            continue_final_message=continue_final_message,
            tools=tools,
            chat_template_kwargs=chat_template_kwargs,
        )
        extras = {
            "tokenization_kwargs": tokenization_kwargs,
            "lora_request": lora_request,
            "mm_processor_kwargs": mm_processor_kwargs,
        }
        return self._enqueue(batch, sampling_params, priority, extras)

    def _enqueue(
        self,
        batch: list[Prompt],
        sampling_params: SamplingParams | Sequence[SamplingParams] | None,
        priority: int | Sequence[int] | None,
        extras: Mapping[str, Any],
    ) -> list[str]:
        streams: list[RequestStream] = []
        try:
            for stream in self._submit(None, batch, sampling_params, priority, extras):
                streams.append(stream)  # noqa: PERF402
        except BaseException:
            for stream in streams:
                stream.abort()
            raise
        with self._enqueued_lock:
            self._enqueued += streams
        return [stream.request_id for stream in streams]

    def wait_for_completion(
        self, output_type: type[RequestOutput] | None = None, *, use_tqdm: bool | Callable[..., Any] = True
    ) -> list[RequestOutput]:
        """The outputs of everything enqueued, in that order. Nothing is enqueued afterwards.

        Several threads may wait at once: each gets what was enqueued before its call and no other has taken.

        Arguments:
            output_type: changes nothing.
            use_tqdm: whether to show a progress bar, or what makes one; default True.

        Raises:
            Everything that `generate` raises.
        """
        with self._enqueued_lock:
            streams, self._enqueued = self._enqueued, []
        if not streams:
            return []
        host = ThreadHost()
        try:
            for stream in streams:
                stream.mailbox.host = host  # what came before this is found at the first look
            return self._collect(host, streams, use_tqdm)
        finally:
            for stream in streams:
                stream.abort()
            host.close()

    def _submit(
        self,
        host: ThreadHost | None,
        batch: list[Prompt],
        sampling_params: SamplingParams | Sequence[SamplingParams] | None,
        priority: int | Sequence[int] | None,
        extras: Mapping[str, Any],
    ) -> Iterator[RequestStream]:
        """Submit one prompt after the other. host: the thread that waits for them; None: there is none yet."""
        self._engine.check_generates(sampling_params)
        if sampling_params is None:
            sampling_params = self.get_default_sampling_params()
        params = _per_prompt(sampling_params, len(batch))
        priorities = _per_prompt_priority(priority, len(batch))
        extras = dict(extras)
        adapters = _adapter_per_prompt(extras.pop("lora_request", None), len(batch))
        for prompt, one, urgency, adapter in zip(batch, params, priorities, adapters, strict=True):
            yield self._engine.submit(
                prompt, one, self._new_request_id(), host=host, priority=urgency, lora_request=adapter, **extras
            )

    def _new_request_id(self) -> str:
        """The next number, as in vLLM; not one that a request of `llm_engine` has, whose ids the caller chooses."""
        return next(i for i in map(str, self._request_numbers) if not self._engine.is_open(i))

    def beam_search(
        self,
        prompts: Prompt | Sequence[Prompt],
        params: BeamSearchParams,
        lora_request: LoRARequest | None = None,
        use_tqdm: bool | Callable[..., Any] = False,
        concurrency_limit: int | None = None,
    ) -> list[BeamSearchOutput]:
        """The `beam_width` most likely continuations of every prompt, best first; tokens and text hold the prompt too.

        Arguments:
            prompts: one prompt (text, token ids, or a mapping as in vLLM), or a list of them.
            params: BeamSearchParams.
            lora_request: the adapter of all prompts; None: none. Needs enable_lora=True.
            use_tqdm: whether to show a progress bar, or what makes one; default False.
            concurrency_limit: how many prompts are searched from at once; None: all.

        Raises:
            InvalidParameterError: params are none; everything else as in `generate`.

        Example:
            (output,) = llm.beam_search("Once upon a time", BeamSearchParams(beam_width=2, max_tokens=4))
            print([sequence.text for sequence in output.sequences])
        """
        if not isinstance(params, BeamSearchParams):
            raise InvalidParameterError(f"params must be BeamSearchParams, not {type(params).__name__}")
        one_token = step_params(params)
        model = self.config.model
        reading = [self._engine.tokenized(prompt, lora_request) for prompt in as_batch(prompts)]
        read = [future.result() for future in reading]
        tokenized = [prompt for prompt, _ in read]
        searches = [
            BeamSearch(prompt.ids.tolist(), params, end_ids(model, tokenizer), model.max_model_len)
            for prompt, tokenizer in read
        ]
        limit = len(searches) if concurrency_limit is None else _integer("concurrency_limit", concurrency_limit, low=1)
        progress = _progress(len(searches), use_tqdm)
        # Each round is one batch: one token for every beam of every search that is not over.
        for first in range(0, len(searches), max(1, limit)):
            some = searches[first : first + limit]
            while under_way := [search for search in some if not search.is_over]:
                beams = [
                    prompt.continued(beam.tokens)
                    for prompt, search in zip(tokenized[first : first + limit], some, strict=True)
                    if search in under_way
                    for beam in search.beams
                ]
                outputs = iter(self.generate(beams, one_token, use_tqdm=False, lora_request=lora_request))
                for search in under_way:
                    search.advance([next(outputs) for _ in search.beams])
            progress.update(len(some))
        progress.close()
        found = [search.best() for search in searches]
        for (_, tokenizer), sequences in zip(read, found, strict=True):
            if tokenizer is None:
                continue
            for sequence in sequences:
                sequence.text = tokenizer.decode(sequence.tokens, skip_special_tokens=params.skip_special_tokens)
        return [BeamSearchOutput(sequences) for sequences in found]

    def _collect(self, host: ThreadHost, streams: Sequence[TakenAtEnd[O]], use_tqdm: Any) -> list[O]:
        outputs: list[O | None] = [None] * len(streams)
        open_streams = dict(enumerate(streams))
        progress = _progress(len(streams), use_tqdm)
        try:
            while open_streams:
                ended = [i for i, stream in open_streams.items() if stream.has_ended]
                for i in ended:
                    outputs[i] = open_streams.pop(i).take()
                    progress.update(1)
                if not ended:
                    host.run_pending(None)
        finally:
            progress.close()
        return [output for output in outputs if output is not None]

    def shutdown(self, timeout: float = 5.0) -> None:
        """Stop everything and wait for it. Idempotent.

        Arguments:
            timeout: seconds after which processes that do not stop by themselves are killed; default 5.
        """
        self._engine.shutdown(timeout)


def _conversations(messages: Sequence[Message] | Sequence[Sequence[Message]], **template: Any) -> list[Prompt]:
    """One conversation, or each of a list of them, as prompts."""
    return [Conversation.of(one, **template) for one in (messages if is_batch(messages) else [messages])]


def _deadline(timeout: float | None) -> float | None:
    """In monotonic seconds, of everything that one call submits."""
    return None if timeout is None else now() + check_timeout(timeout)


def _check_priority(priority: Sequence[int] | None, count: int) -> None:
    if priority is not None and not isinstance(priority, Sequence):
        raise InvalidParameterError(f"priority={priority!r} must be a list with one number per prompt")
    if priority is not None and len(priority) != count:
        raise InvalidParameterError(f"{len(priority)} priorities for {count} prompts")


def _params_per_prompt(
    params: PoolingParams | Sequence[PoolingParams] | None, count: int
) -> Sequence[PoolingParams | None]:
    if params is None or isinstance(params, PoolingParams):
        return [params] * count
    if not isinstance(params, Sequence):
        raise InvalidParameterError(f"pooling_params must be PoolingParams, not {type(params).__name__}")
    if len(params) != count:
        raise InvalidParameterError(f"{len(params)} pooling_params for {count} prompts; give one, or one per prompt")
    return params


def _repeated(values: Sequence[T], times: Sequence[int]) -> list[T]:
    return [value for value, number in zip(values, times, strict=True) for _ in range(number)]


def _per_prompt(params: SamplingParams | Sequence[SamplingParams], count: int) -> list[SamplingParams]:
    if isinstance(params, SamplingParams):
        each = [params] * count
    elif isinstance(params, Mapping):  # else each of its names would be taken for the parameters of a prompt
        raise InvalidParameterError("sampling_params must be SamplingParams, not a mapping: SamplingParams(**mapping)")
    else:
        each = list(params)
        if len(each) != count:
            raise InvalidParameterError(f"{len(each)} sampling_params for {count} prompts; give one, or one per prompt")
    final = []
    for one in each:
        if not isinstance(one, SamplingParams):
            raise InvalidParameterError(f"sampling_params must be SamplingParams, not {type(one).__name__}")
        one = copy.copy(one)  # submitting checks it again
        one.output_kind = RequestOutputKind.FINAL_ONLY
        final.append(one)
    return final


def _adapter_per_prompt(lora_request: Any, count: int) -> list[Any]:
    """One for all, or one per prompt; submitting looks at each."""
    if not isinstance(lora_request, list | tuple):
        return [lora_request] * count
    if len(lora_request) != count:
        raise InvalidParameterError(
            f"{len(lora_request)} lora_requests for {count} prompts; give None, or one per prompt"
        )
    return list(lora_request)


def _per_prompt_priority(priority: int | Sequence[int] | None, count: int) -> list[int]:
    """One number for all, or one per prompt; submitting looks at each."""
    if not isinstance(priority, Sequence):
        return [0 if priority is None else priority] * count
    if isinstance(priority, str) or len(priority) != count:
        raise InvalidParameterError(f"{len(priority)} priorities for {count} prompts; give one, or one per prompt")
    return list(priority)


def _progress(total: int, use_tqdm: bool | Callable[..., Any]) -> Any:
    from actorllm.types.progress_bar import ProgressBar

    make = use_tqdm if callable(use_tqdm) else ProgressBar
    return make(total=total, desc="Processed prompts", disable=not use_tqdm, dynamic_ncols=True)
