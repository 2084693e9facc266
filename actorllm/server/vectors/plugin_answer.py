"""`POST /pooling` with the data of a plug-in (`io_processor_plugin`), which makes prompts of them, and an answer of their vectors.

A plug-in's own code runs in another thread, for one request at a time; methods that it has as coroutines run on the loop. What
goes around them (status, disconnects, errors) is `answer`'s.
"""

from __future__ import annotations

import logging
import uuid
from collections.abc import AsyncGenerator, Awaitable, Callable, Container, Mapping, Sequence
from typing import Any, TypeVar

from anyio import to_thread
from pydantic import BaseModel
from starlette.types import Send

from actorllm.client.plugin_data import TASK, PluginData
from actorllm.client.pooling_stream import PoolingStream
from actorllm.errors import ActorLLMError
from actorllm.intake.tokenization import Prompt
from actorllm.server.answer import JSON, Answer
from actorllm.server.batch import collected
from actorllm.server.copies import check_vectors
from actorllm.server.envelope import ApiError
from actorllm.server.state import ServerState
from actorllm.server.vectors.bodies import PoolingRequest
from actorllm.server.vectors.plugin_bodies import PluginResponse
from actorllm.types.io_processor import IOProcessor
from actorllm.types.params import MAX_N, PoolingParams
from actorllm.types.pooling_outputs import PoolingOutput, PoolingRequestOutput

FIELD = "data"
NOT_BESIDE = ("input", "messages", "dimensions", "use_activation", "normalize", "pooling_type", "encoding_format")
"""Fields of prompts. A plug-in makes the prompts, and says how they become vectors."""

T = TypeVar("T")
logger = logging.getLogger(__name__)


def name_of(body: PoolingRequest) -> str:
    """What the request is called, by the client and by the plug-in."""
    return f"pool-{body.request_id or uuid.uuid4().hex}"


async def plugin_asked(body: PoolingRequest, name: str, state: ServerState) -> tuple[list[Prompt], list[PoolingParams]]:
    """The prompts of the data, and how each becomes a vector. Raises ApiError and InvalidParameterError."""
    plugin = state.engine.needed_plugin
    for field in NOT_BESIDE:
        if getattr(body, field) is not None:
            raise ApiError(400, f"{field} beside data: the plug-in makes the prompts of data; leave it out", field)
    if body.task not in (None, TASK):
        raise ApiError(400, f"task={body.task!r:.80} beside data must be {TASK!r}; or leave it out", "task")
    if _has_own(plugin.processor, "pre_process_async"):
        async with state.plugin_turn:
            prompts, params = await _told(_asked_on_the_loop(plugin, body.data, name))
    else:
        prompts, params = await _told(
            to_thread.run_sync(plugin.asked, body.data, None, name, limiter=state.plugin_turn)
        )
    if len(prompts) > MAX_N:
        raise ApiError(400, f"data: the plug-in made {len(prompts)} prompts of them, and the limit is {MAX_N}", FIELD)
    model = state.engine.config.model
    assert model.pooler is not None
    sizes = [model.pooler.resolved(one.checked_copy(), model.name) for one in params]
    of_tokens = [(prompt, how.size) for prompt, how in zip(prompts, sizes, strict=True) if how.is_of_tokens]
    if of_tokens:
        ids = [prompt["prompt_token_ids"] if isinstance(prompt, dict) else prompt for prompt, _ in of_tokens]
        check_vectors(ids, max(size for _, size in of_tokens), model.max_model_len, FIELD)
    return prompts, params


class PluginAnswer(Answer):
    """Everything at once, as the plug-in makes it."""

    def __init__(
        self,
        state: ServerState,
        name: str,
        streams: Sequence[PoolingStream],
        fields: Container[str],
        headers: Mapping[str, str],
    ) -> None:
        super().__init__(state, name, [stream.request_stream for stream in streams], fields, FIELD, headers)
        self._pooled_streams = streams

    async def _respond(self, send: Send) -> None:
        outputs = await collected(anext(stream) for stream in self._pooled_streams)
        self._last_outputs = [s.last_output for s in self._pooled_streams if s.last_output is not None]
        for output in outputs:
            if output.error is not None:
                raise ApiError(503, output.error.message)
        plugin = self._state.engine.needed_plugin
        if _has_own(plugin.processor, "post_process_async"):
            made = await _told(plugin.processor.post_process_async(_numbered(outputs), self._name))
            body = await _told(to_thread.run_sync(self._written, made))
        else:
            limiter = self._state.plugin_turn
            made = await _told(to_thread.run_sync(plugin.made, outputs, self._name, limiter=limiter))
            body = await _told(to_thread.run_sync(self._written, made))
        await self._start(send, 200, JSON, [(b"content-length", b"%d" % len(body))])
        await send({"type": "http.response.body", "body": body, "more_body": False})

    def _written(self, made: Any) -> bytes:
        """As vLLM has it: around what the plug-in made, unless the plug-in makes all of the answer (before vLLM 0.19)."""
        older = getattr(self._state.engine.needed_plugin.processor, "output_to_response", None)
        if older is None:
            answer: Any = PluginResponse(request_id=self._name, data=made)
        else:
            if getattr(made, "request_id", "") is None:
                made.request_id = self._name
            answer = older(made)
        if not isinstance(answer, BaseModel):
            raise TypeError(f"output_to_response must return an IOProcessorResponse, not {type(answer).__name__}")
        return answer.model_dump_json().encode()


async def _asked_on_the_loop(plugin: PluginData, data: object, name: str) -> tuple[list[Prompt], list[PoolingParams]]:
    raw = await plugin.processor.pre_process_async(plugin.processor.parse_data(data), name)
    prompts = plugin.prompts_of(raw)
    return prompts, plugin.params_for(prompts, None)


async def _numbered(
    outputs: Sequence[PoolingRequestOutput[PoolingOutput]],
) -> AsyncGenerator[tuple[int, PoolingRequestOutput[PoolingOutput]]]:
    for item in enumerate(outputs):
        yield item


async def _told(result: Awaitable[T]) -> T:
    """What a plug-in's code gives. Raises ApiError: 400 and 501 for what it says of the data, 500 for what is its own mistake."""
    try:
        return await result
    except (ActorLLMError, ApiError):
        raise
    except (ValueError, TypeError, OverflowError) as error:
        raise ApiError(400, f"data: {error}"[:2000], FIELD) from error
    except NotImplementedError as error:  # what the base class raises where a plug-in leaves a method out
        raise ApiError(501, f"data: {error}"[:2000], FIELD) from error
    except Exception as error:  # of the plug-in, about one request
        logger.exception("the plug-in of the engine failed for one request")
        raise ApiError(
            500, f"the plug-in failed: {type(error).__name__}; the log of the server has the reason"
        ) from error


def _has_own(processor: IOProcessor[Any, Any], method: str) -> bool:
    own: Callable[..., Any] = getattr(type(processor), method)
    return own is not getattr(IOProcessor, method)
