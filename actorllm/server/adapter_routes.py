"""`/v1/load_lora_adapter` and `/v1/unload_lora_adapter`: names of adapters that come and go while the server runs.

As in vLLM, they are there only where $VLLM_ALLOW_RUNTIME_LORA_UPDATING says so, because their clients have folders read on the
server's machine. Several API processes do not have them: each knows names of its own. One adapter is loaded at a time.
"""

from __future__ import annotations

import os

from anyio import to_thread
from fastapi import APIRouter, Request, Response

from actorllm.errors import ActorLLMError, ConfigError
from actorllm.server.envelope import ApiError, error_of
from actorllm.server.operations import read_body, state_of, takes
from actorllm.server.protocol import Body
from actorllm.types.vllm_variables import is_on

VARIABLE = "VLLM_ALLOW_RUNTIME_LORA_UPDATING"

router = APIRouter()


def check_processes(number: int) -> None:
    """Raises ConfigError where these endpoints would be those of several API processes."""
    if number > 1 and is_on(VARIABLE):
        told = f"each API process would know other adapters than the rest; unset {VARIABLE}, or use one process"
        raise ConfigError(f"--api-processes {number}: {told}")


class LoadAdapterRequest(Body):
    """`POST /v1/load_lora_adapter`."""

    lora_name: str | None = None
    lora_path: str | None = None
    load_inplace: bool | None = None
    """Another adapter may take the place of one of this name; requests that run go on with the one that they began with."""


class UnloadAdapterRequest(Body):
    """`POST /v1/unload_lora_adapter`."""

    lora_name: str | None = None
    lora_int_id: int | None = None
    """As in vLLM it decides nothing: the name does."""


@router.post("/v1/load_lora_adapter", openapi_extra=takes(LoadAdapterRequest))
async def load_adapter(request: Request) -> Response:
    """Let requests name an adapter, once the workers have read it."""
    state = state_of(request)
    body = await read_body(request, LoadAdapterRequest)
    if not body.lora_name or not body.lora_path:
        missing = "lora_path" if body.lora_name else "lora_name"
        raise ApiError(400, "Both 'lora_name' and 'lora_path' must be provided.", missing)
    models, replaces = state.models, bool(body.load_inplace)
    async with state.loading_adapter:
        try:
            adapter = models.new_adapter(lora_name=body.lora_name, lora_path=body.lora_path)
            models.check_addition(adapter, replaces=replaces)
            if not await to_thread.run_sync(os.path.isdir, adapter.lora_path):
                told = (
                    f"No adapter found for {adapter.lora_path!r:.300}: it must be a folder on the machine of the server"
                )
                raise ApiError(404, told, "lora_path")
            await state.llm.add_lora(adapter)
        except ActorLLMError as error:
            raise error_of(error, LoadAdapterRequest.model_fields, "lora_path") from error
        models.add(adapter, replaces=replaces)
    return _told(f"Success: LoRA adapter '{adapter.lora_name}' added successfully.")


@router.post("/v1/unload_lora_adapter", openapi_extra=takes(UnloadAdapterRequest))
async def unload_adapter(request: Request) -> Response:
    """Forget the name of an adapter, and let the workers forget its tensors; requests that run with it go on."""
    state = state_of(request)
    body = await read_body(request, UnloadAdapterRequest)
    if not body.lora_name:
        raise ApiError(400, "'lora_name' needs to be provided to unload a LoRA adapter.", "lora_name")
    async with state.loading_adapter:
        adapter = state.models.adapters.pop(body.lora_name, None)
        if adapter is None:
            raise ApiError(404, f"The lora adapter {body.lora_name!r:.120} cannot be found.", "lora_name")
        try:
            await state.llm.remove_lora(adapter.lora_int_id)
        except ActorLLMError as error:
            raise error_of(error, UnloadAdapterRequest.model_fields, "lora_name") from error
    return _told(f"Success: LoRA adapter '{adapter.lora_name}' removed successfully.")


def _told(text: str) -> Response:
    return Response(text, media_type="text/plain")
