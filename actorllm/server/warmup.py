"""`warm_up`: what a first request needs is read, compiled and imported before there is one.

A chat is rendered and tokenized as the endpoint would do it, and the scheduler reads the vocabulary for grammars. Nothing of it
is a request: no figure, seed, cache or recording knows of it. What a model (a chat template, a tokenizer) or an installation
(llguidance) does not have is left out without a word. A request that needs it is told. Called by the
launchers before the server listens, and by an application that mounts ours, if it likes to.
"""

from __future__ import annotations

import contextlib
import logging
import math
from typing import Any

import anyio
from anyio import to_thread
from fastapi import FastAPI

from actorllm.actors.engine_thread import HostLoop
from actorllm.errors import ActorLLMError, EngineError
from actorllm.server import chat
from actorllm.server.protocol import ChatCompletionRequest
from actorllm.server.state import ServerState

logger = logging.getLogger(__name__)

TOOL: dict[str, Any] = {"type": "function", "function": {"name": "f", "parameters": {"type": "object"}}}
MESSAGES: list[dict[str, Any]] = [{"role": "user", "content": "Hello"}]


async def warm_up(app: FastAPI) -> None:
    """Start the engine of an application of `create_app`, and make its first request as quick as the next ones.

    Raises what keeps the engine from starting, and ConfigError for an adapter that does not fit the model. What takes longer
    than `intake_timeout_s` is left to the requests, which that limit ends as well.
    """
    state: ServerState = app.state.server
    await state.llm.start()
    await state.load_adapters()
    model = state.engine.config.model
    if model.tokenizer is None:
        return
    timeout_s = state.engine.config.intake_timeout_s
    with anyio.move_on_after(timeout_s) as scope:
        await to_thread.run_sync(_read, state, abandon_on_cancel=True)
    if scope.cancelled_caught:
        logger.warning(
            "the chat template or the tokenizer took longer than intake_timeout_s=%g to read a greeting: requests for "
            "chats will fail",
            timeout_s,
        )
    if model.pooler is None:
        asked = state.engine.ask_scheduler("warm_up_grammars", timeout=math.inf)
        try:
            await HostLoop.current().result_of(asked)
        except EngineError as error:  # what has befallen the engine is told to requests
            logger.debug("no grammar is compiled before the first request: %s", error)


def _read(state: ServerState) -> None:
    """Read the tokenizer; render a chat, with a tool too. A template may refuse either."""
    state.read_templates()
    prompts, name = state.engine.prompts, state.model_names[0]
    with contextlib.suppress(ActorLLMError):
        state.decode(prompts.tokenize("Hello").ids.tolist())
    if state.engine.config.model.pooler is not None:
        return
    for further in ({}, {"tools": [TOOL]}):
        with contextlib.suppress(ActorLLMError):
            body = ChatCompletionRequest.model_validate({"messages": MESSAGES, **further})
            (prompt,) = chat.ask(body, {}, state.defaults, name, state.decode).prompts
            prompts.tokenize(prompt)
