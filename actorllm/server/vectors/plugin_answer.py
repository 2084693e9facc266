"""`POST /pooling` with the data of a plug-in (`io_processor_plugin`), which makes prompts of them, and an answer of their vectors.

A plug-in's own code runs in another thread, for one request at a time; methods that it has as coroutines run on the loop. What
goes around them (status, disconnects, errors) is `answer`'s.
"""

from __future__ import annotations

from collections.abc import AsyncGenerator, Awaitable, Callable, Container, Mapping, Sequence
from typing import Any, TypeVar

from anyio import to_thread
from starlette.types import Send

from actorllm.client.plugin_data import PluginData
from actorllm.client.pooling_stream import PoolingStream
from actorllm.intake.tokenization import Prompt
from actorllm.server.answer import JSON, Answer
from actorllm.server.batch import collected
from actorllm.server.state import ServerState
from actorllm.server.vectors.bodies import PoolingRequest
from actorllm.server.vectors.plugin_asking import FIELD, check_body, check_prompts, telling, written
from actorllm.server.vectors.vector_shapes import checked_outputs
from actorllm.types.io_processor import IOProcessor
from actorllm.types.params import PoolingParams
from actorllm.types.pooling_outputs import PoolingOutput, PoolingRequestOutput

T = TypeVar("T")


async def plugin_asked(body: PoolingRequest, name: str, state: ServerState) -> tuple[list[Prompt], list[PoolingParams]]:
    """The prompts of the data, and how each becomes a vector. Raises ApiError and InvalidParameterError."""
    plugin = state.engine.needed_plugin
    check_body(body)
    if _has_own(plugin.processor, "pre_process_async"):
        async with state.plugin_turn:
            prompts, params = await _told(_asked_on_the_loop(plugin, body.data, name))
    else:
        prompts, params = await _told(
            to_thread.run_sync(plugin.asked, body.data, None, name, limiter=state.plugin_turn)
        )
    check_prompts(prompts, params, state.engine.config.model)
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
        checked_outputs(outputs)
        plugin = self._state.engine.needed_plugin
        if _has_own(plugin.processor, "post_process_async"):
            made = await _told(plugin.processor.post_process_async(_numbered(outputs), self._name))
            body = await _told(to_thread.run_sync(written, plugin, made, self._name))
        else:
            limiter = self._state.plugin_turn
            made = await _told(to_thread.run_sync(plugin.made, outputs, self._name, limiter=limiter))
            body = await _told(to_thread.run_sync(written, plugin, made, self._name))
        await self._start(send, 200, JSON, [(b"content-length", b"%d" % len(body))])
        await send({"type": "http.response.body", "body": body, "more_body": False})


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
    with telling():
        return await result


def _has_own(processor: IOProcessor[Any, Any], method: str) -> bool:
    own: Callable[..., Any] = getattr(type(processor), method)
    return own is not getattr(IOProcessor, method)
