"""Endpoints that stop, empty and change the engine: sleep, pause, calls of the workers, updates of the weights.

They are there only where `--enable-dev-endpoints` or $VLLM_SERVER_DEV_MODE says so. Their clients call code of the server's
machine, and may stop the engine for all others. API keys count for them as for every endpoint. Several API processes do not have
them, because the process that owns an engine alone can let it sleep.
"""

from __future__ import annotations

import os
import platform
from collections.abc import Container
from importlib import metadata
from typing import Any

import orjson
from fastapi import APIRouter, Request, Response

from actorllm import __version__
from actorllm.errors import (
    ActorLLMError,
    CollectiveCallError,
    ConfigError,
    CorruptModelError,
    InvalidParameterError,
    shown,
)
from actorllm.server.envelope import ApiError, error_of
from actorllm.server.operations import JSONResponse, read_body, state_of, takes
from actorllm.server.protocol import Body
from actorllm.types.vllm_variables import is_on

VARIABLE = "VLLM_SERVER_DEV_MODE"
SECRET = ("VLLM_API_KEY",)
"""Variables of vLLM that `/server_info` does not show."""

router = APIRouter()


def check_processes(number: int, is_asked: bool) -> None:
    """Raises ConfigError where these endpoints would be those of several API processes."""
    if number > 1 and (is_asked or is_on(VARIABLE)):
        raise ConfigError(
            f"--api-processes {number}: the endpoints of --enable-dev-endpoints and ${VARIABLE} need one process, which owns the "
            f"engine; leave them out, or use one process"
        )


def has_body(request: Request) -> bool:
    """Of those endpoints that need none."""
    return request.headers.get("content-length", "0") != "0" or "transfer-encoding" in request.headers


def error_of_update(error: ActorLLMError, fields: Container[str] = (), prompt: str | None = None) -> ApiError:
    """As `error_of`. Weights that the model cannot use are a mistake of the client: a server that failed would be asked again."""
    if isinstance(error, CorruptModelError):
        return ApiError(400, str(error))
    return error_of(error, fields, prompt)


class CollectiveRpcRequest(Body):
    """`POST /collective_rpc`."""

    method: str
    args: list[Any] | None = None
    kwargs: dict[str, Any] | None = None
    timeout: float | None = None


class FolderUpdateRequest(Body):
    """`POST /update_weights_from_disk`."""

    folder: str
    version: str | None = None
    running: str | None = None
    """'recompute', 'keep' or 'abort'."""


class PolicyRequest(Body):
    """`POST /set_policy`."""

    scheduling_policy: str | None = None
    admission_policy: str | None = None
    """'none': there is none any more."""


class VersionRequest(Body):
    """`POST /update_weight_version`."""

    new_version: str


class TransferInitRequest(Body):
    """`POST /init_weight_transfer_engine`."""

    init_info: dict[str, Any] | None = None


class TransferStartRequest(Body):
    """`POST /start_weight_update`."""

    is_checkpoint_format: bool = True
    """True alone: tensors have the names and shapes of the checkpoint."""


class TransferPartRequest(Body):
    """`POST /update_weights`."""

    update_info: dict[str, Any]
    """{"files": [...]}: paths of safetensors files on the machine of the server."""


class TransferEndRequest(Body):
    """`POST /finish_weight_update`."""

    weight_version: str | None = None


@router.post("/sleep")
async def sleep(request: Request) -> Response:
    """Give memory back. Query: level=1 or 2, mode=abort, wait or keep; requests=wait or refuse."""
    asked = request.query_params
    level = asked.get("level", "1")
    if level not in ("1", "2"):
        raise InvalidParameterError(f"level={shown(level)} must be 1 or 2")
    mode: Any = asked.get("mode", "abort")
    requests: Any = asked.get("requests", "wait")
    freed = await state_of(request).llm.sleep(1 if level == "1" else 2, mode, requests=requests)
    return JSONResponse({"freed_bytes": freed})


@router.post("/wake_up")
async def wake_up(request: Request) -> Response:
    """Take memory again. Query: tags=weights, tags=kv_cache; without them both."""
    tags: Any = request.query_params.getlist("tags") or None
    llm = state_of(request).llm
    await llm.wake_up(tags)
    return JSONResponse({"is_sleeping": await llm.is_sleeping()})


@router.get("/is_sleeping")
async def is_sleeping(request: Request) -> Response:
    return JSONResponse({"is_sleeping": await state_of(request).llm.is_sleeping()})


@router.post("/pause")
async def pause(request: Request) -> Response:
    """Stop generation. Query: mode=abort, wait or keep; clear_cache=true or false."""
    mode: Any = request.query_params.get("mode", "abort")
    clears = request.query_params.get("clear_cache", "true").lower() in ("true", "1")
    await state_of(request).llm.pause_generation(mode=mode, clear_cache=clears)
    return JSONResponse({"status": "paused"})


@router.post("/resume")
async def resume(request: Request) -> Response:
    await state_of(request).llm.resume_generation()
    return JSONResponse({"status": "resumed"})


@router.get("/is_paused")
async def is_paused(request: Request) -> Response:
    return JSONResponse({"is_paused": await state_of(request).llm.is_paused()})


@router.post("/set_policy", openapi_extra=takes(PolicyRequest))
async def set_policy(request: Request) -> Response:
    """Let another scheduling or admission policy decide from the next step on."""
    body = await read_body(request, PolicyRequest)
    state = state_of(request)
    try:
        await state.llm.set_policy(body.scheduling_policy, admission_policy=body.admission_policy)
    except ActorLLMError as error:
        raise error_of(error, PolicyRequest.model_fields, "scheduling_policy") from error
    scheduler = state.engine.config.scheduler
    return JSONResponse({"scheduling_policy": scheduler.policy, "admission_policy": scheduler.admission})


@router.post("/collective_rpc", openapi_extra=takes(CollectiveRpcRequest))
async def collective_rpc(request: Request) -> Response:
    """Call a function on every rank; its results must be JSON."""
    body = await read_body(request, CollectiveRpcRequest)
    try:
        results = await state_of(request).llm.collective_rpc(body.method, body.timeout, body.args or [], body.kwargs)
    except CollectiveCallError as error:
        raise ApiError(500, str(error), "method") from error
    except ActorLLMError as error:
        raise error_of(error, CollectiveRpcRequest.model_fields, "method") from error
    except TimeoutError as error:
        raise ApiError(504, str(error), "timeout") from error
    try:
        return JSONResponse({"results": results})
    except TypeError as error:  # of orjson
        raise ApiError(400, f"the function returned what JSON has no form for: {error}", "method") from error


@router.post("/update_weights_from_disk", openapi_extra=takes(FolderUpdateRequest))
async def update_weights_from_disk(request: Request) -> Response:
    """Compute with the weights of a folder on the machine of the server."""
    body = await read_body(request, FolderUpdateRequest)
    running: Any = body.running or "recompute"
    try:
        version = await state_of(request).llm.update_weights_from_disk(
            body.folder, version=body.version, running=running
        )
    except ActorLLMError as error:
        raise error_of_update(error, FolderUpdateRequest.model_fields, "folder") from error
    return JSONResponse({"weight_version": version})


@router.post("/init_weight_transfer_engine", openapi_extra=takes(TransferInitRequest))
async def init_weight_transfer_engine(request: Request) -> Response:
    """Get ready for an update in parts."""
    body = await read_body(request, TransferInitRequest)
    try:
        await state_of(request).llm.init_weight_transfer_engine({"init_info": body.init_info or {}})
    except ActorLLMError as error:
        raise error_of(error, TransferInitRequest.model_fields, "init_info") from error
    return JSONResponse({"status": "initialized"})


@router.post("/start_weight_update", openapi_extra=takes(TransferStartRequest))
async def start_weight_update(request: Request) -> Response:
    """Begin an update in parts; one that was not finished is forgotten. A body is not needed."""
    body = await read_body(request, TransferStartRequest) if has_body(request) else TransferStartRequest()
    try:
        await state_of(request).llm.start_weight_update(body.is_checkpoint_format)
    except ActorLLMError as error:
        raise error_of(error, TransferStartRequest.model_fields) from error
    return JSONResponse({"status": "started"})


@router.post("/update_weights", openapi_extra=takes(TransferPartRequest))
async def update_weights(request: Request) -> Response:
    """Bring a part of the new weights: files on the machine of the server, which are copied."""
    body = await read_body(request, TransferPartRequest)
    try:
        await state_of(request).llm.update_weights({"update_info": body.update_info})
    except ActorLLMError as error:
        raise error_of_update(error, TransferPartRequest.model_fields, "update_info") from error
    return JSONResponse({"status": "updated"})


@router.post("/finish_weight_update", openapi_extra=takes(TransferEndRequest))
async def finish_weight_update(request: Request) -> Response:
    """Compute with all parts from the next step on. A body is not needed."""
    body = await read_body(request, TransferEndRequest) if has_body(request) else TransferEndRequest()
    llm = state_of(request).llm
    try:
        await llm.finish_weight_update(body.weight_version)
    except ActorLLMError as error:
        raise error_of_update(error, TransferEndRequest.model_fields, "weight_version") from error
    return JSONResponse({"weight_version": llm.weight_version})


@router.post("/shutdown_weight_transfer_engine")
async def shutdown_weight_transfer_engine(request: Request) -> Response:
    """Forget an update that was not finished."""
    await state_of(request).llm.shutdown_weight_transfer_engine()
    return JSONResponse({"status": "shut down"})


@router.post("/update_weight_version", openapi_extra=takes(VersionRequest))
async def update_weight_version(request: Request) -> Response:
    """Call the weights otherwise."""
    body = await read_body(request, VersionRequest)
    try:
        await state_of(request).llm.update_weight_version(body.new_version)
    except ActorLLMError as error:
        raise error_of(error, VersionRequest.model_fields, "new_version") from error
    return JSONResponse({"weight_version": body.new_version})


@router.get("/weight_info")
@router.get("/get_weight_version")
async def get_weight_version(request: Request) -> Response:
    return JSONResponse({"weight_version": state_of(request).llm.weight_version})


@router.get("/server_info")
async def server_info(request: Request) -> Response:
    """How the engine is configured. Query: config_format=text, as one line, or json, as an object."""
    form = request.query_params.get("config_format", "text")
    if form not in ("text", "json"):
        raise InvalidParameterError(f"config_format={shown(form)} must be 'text' or 'json'")
    config = state_of(request).engine.config
    told = (
        repr(config)
        if form == "text"
        else orjson.loads(orjson.dumps(config, default=str, option=orjson.OPT_NON_STR_KEYS))
    )
    variables = {name: value for name, value in os.environ.items() if name.startswith("VLLM_") and name not in SECRET}
    versions = {name: metadata.version(name) for name in ("torch", "transformers")}
    system = {"python": platform.python_version(), "platform": platform.platform(), "actorllm": __version__, **versions}
    return JSONResponse({"vllm_config": told, "vllm_env": variables, "system_env": system})


@router.get("/get_world_size")
async def get_world_size(request: Request) -> Response:
    """How many ranks there are. Query: include_dp=false, those of one replica."""
    include = request.query_params.get("include_dp", "true").lower()
    if include not in ("true", "false"):
        raise InvalidParameterError(f"include_dp={shown(include)} must be true or false")
    config = state_of(request).engine.config
    return JSONResponse({"world_size": config.world_size * (config.data_parallel_size if include == "true" else 1)})
