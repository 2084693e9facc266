"""From data of a plug-in (`io_processor_plugin`) to prompts, and from their vectors to the answer that the plug-in makes.

What the endpoint and `actorllm run-batch` share. All of it calls the plug-in on the caller's thread, or not at all.
"""

from __future__ import annotations

import logging
import uuid
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any

from pydantic import BaseModel

from actorllm.client.plugin_data import TASK, PluginData
from actorllm.config import ModelConfig
from actorllm.errors import ActorLLMError
from actorllm.intake.tokenization import PROMPT_KEYS, Prompt
from actorllm.server.copies import check_vectors
from actorllm.server.envelope import ApiError
from actorllm.server.vectors.asking import PooledAsked, pooled_extras, salted
from actorllm.server.vectors.bodies import PoolingRequest
from actorllm.server.vectors.plugin_bodies import PluginResponse
from actorllm.server.vectors.vector_shapes import checked_outputs
from actorllm.types.params import MAX_N, PoolingParams
from actorllm.types.pooling_outputs import PoolingOutput, PoolingRequestOutput

FIELD = "data"
NOT_BESIDE = ("input", "messages", "dimensions", "use_activation", "normalize", "pooling_type", "encoding_format")
"""Fields of prompts. A plug-in makes the prompts, and says how they become vectors."""

logger = logging.getLogger(__name__)


class PluginShape:
    """The answer to one request, as the plug-in makes it."""

    def __init__(self, body: PoolingRequest, plugin: PluginData) -> None:
        self.id = name_of(body)
        self._plugin = plugin

    def body_of(self, outputs: Sequence[PoolingRequestOutput[PoolingOutput]]) -> bytes:
        """outputs: of each prompt, in their order. Raises ApiError."""
        outputs = checked_outputs(outputs)
        with telling():
            return written(self._plugin, self._plugin.made(outputs, self.id), self.id)


def name_of(body: PoolingRequest) -> str:
    """What the request is called, by the client and by the plug-in."""
    return f"pool-{body.request_id or uuid.uuid4().hex}"


def ask_data(
    body: PoolingRequest, headers: Mapping[str, str], needed_plugin: Callable[[], PluginData], model: ModelConfig
) -> PooledAsked:
    """needed_plugin: raises InvalidParameterError where the engine has none. Raises ApiError and InvalidParameterError."""
    check_body(body)
    extras, plugin = pooled_extras(body, headers), needed_plugin()
    shape = PluginShape(body, plugin)
    with telling():
        prompts, params = plugin.asked(body.data, None, shape.id)
    check_prompts(prompts, params, model)
    if body.cache_salt is not None:
        prompts = [salted(prompt, body.cache_salt) for prompt in prompts]
    return PooledAsked(prompts, params, extras, shape)


def check_body(body: PoolingRequest) -> None:
    """Raises ApiError."""
    for field in NOT_BESIDE:
        if getattr(body, field) is not None:
            raise ApiError(400, f"{field} beside data: the plug-in makes the prompts of data; leave it out", field)
    if body.task not in (None, TASK):
        raise ApiError(400, f"task={body.task!r:.80} beside data must be {TASK!r}; or leave it out", "task")


def check_prompts(prompts: Sequence[Prompt], params: Sequence[PoolingParams], model: ModelConfig) -> None:
    """What the plug-in made, before it takes room. Raises ApiError and InvalidParameterError."""
    if len(prompts) > MAX_N:
        raise ApiError(400, f"data: the plug-in made {len(prompts)} prompts of them, and the limit is {MAX_N}", FIELD)
    assert model.pooler is not None
    sizes = [model.pooler.resolved(one.checked_copy(), model.name) for one in params]
    of_tokens = [(prompt, how.size) for prompt, how in zip(prompts, sizes, strict=True) if how.is_of_tokens]
    if of_tokens:
        contents = [_content(prompt) for prompt, _ in of_tokens]
        with telling():  # of what is no prompt
            check_vectors(contents, max(size for _, size in of_tokens), model.max_model_len, FIELD)


def _content(prompt: Prompt) -> Any:
    """The text or the token ids of a prompt, which may be a mapping."""
    if not isinstance(prompt, Mapping):
        return prompt
    return next((prompt[key] for key in PROMPT_KEYS if prompt.get(key) is not None), "")


def written(plugin: PluginData, made: Any, name: str) -> bytes:
    """As vLLM has it: around what the plug-in made, unless the plug-in makes all of the answer (before vLLM 0.19)."""
    older = getattr(plugin.processor, "output_to_response", None)
    if older is None:
        answer: Any = PluginResponse(request_id=name, data=made)
    else:
        if getattr(made, "request_id", "") is None:
            made.request_id = name
        answer = older(made)
    if not isinstance(answer, BaseModel):
        raise TypeError(f"output_to_response must return an IOProcessorResponse, not {type(answer).__name__}")
    return answer.model_dump_json().encode()


@contextmanager
def telling() -> Iterator[None]:
    """Around a plug-in's code. Raises ApiError: 400 and 501 for what it says of the data, 500 for what is its own mistake."""
    try:
        yield
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
