"""`WeightSender`: a trainer that broadcasts its weights to the ranks of an engine, over a group of torch.distributed.

    sender = WeightSender("http://127.0.0.1:8000", world_size=3, master_port=29600)  # the trainer, and two ranks
    for step in range(steps):
        train(model)
        sender.update(model.state_dict(), version=f"step-{step}")

The engine is an `LLM` of this program, or a server with `--enable-dev-endpoints`. Where the engine's verbs are called elsewhere, a
sender has no engine: it meets the ranks while `init_weight_transfer_engine` runs, and sends while `update_weights` does.
Imports torch, and no engine.
"""

from __future__ import annotations

import http.client
import json
import urllib.error
import urllib.request
from collections.abc import Callable, Mapping
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import replace
from typing import Any, Protocol

import torch

from actorllm.errors import EngineError, InvalidParameterError, shown
from actorllm.model.updates.device_handles import handle_of
from actorllm.model.updates.tensor_files import TORCH_TYPES, Layout
from actorllm.model.updates.transfer_group import TRAINER, Buffers, TransferGroup, named_tensors, serve
from actorllm.types.weight_transport import (
    BUFFER_BYTES,
    GLOO,
    NCCL,
    TIMEOUT_S,
    GroupPlace,
    check_integer,
    checked_place,
)

MAX_BUFFER_BYTES = 1 << 40


class SteeredEngine(Protocol):
    """What an `LLM` has, and `HttpEngine`."""

    def init_weight_transfer_engine(self, request: Any) -> None: ...
    def start_weight_update(self) -> None: ...
    def update_weights(self, request: Any) -> None: ...
    def finish_weight_update(self, weight_version: str | None = None) -> None: ...


class WeightSender:
    """See the module docstring. Not thread-safe."""

    _is_closed = False

    def __init__(
        self,
        engine: SteeredEngine | str | None = None,
        *,
        world_size: int,
        master_address: str = "127.0.0.1",
        master_port: int = 0,
        backend: str = GLOO,
        packed: bool = True,
        packed_buffer_size_bytes: int = BUFFER_BYTES,
        timeout_s: float = TIMEOUT_S,
        on_listening: Callable[[int], object] = lambda port: None,
    ) -> None:
        """Returns when all ranks have come.

        Arguments:
            engine: an `LLM`, or the URL of a server; None: something else calls its verbs.
            world_size: this trainer and all ranks of the engine (`GET /get_world_size`).
            master_address: of this machine, as the ranks reach it; default this machine alone.
            master_port: where they meet; 0 (default): one that is free.
            backend: "gloo" (default), or "nccl" between GPUs.
            packed: broadcasts hold several tensors; default True.
            packed_buffer_size_bytes: at most in a broadcast, in bytes; default 64 MiB.
            timeout_s: how long a rank may be silent, in seconds; default 300.
            on_listening: gets the port, before anything is waited for.

        Raises:
            InvalidParameterError: an argument is not what it must be.
            EngineError: the ranks did not come, or the port is not free.
        """
        if backend not in (GLOO, NCCL):
            raise InvalidParameterError(f"backend={shown(backend)} must be 'gloo' or 'nccl'")
        place = checked_place(GroupPlace(backend, master_address, master_port, world_size, timeout_s), least_port=0)
        if not isinstance(packed, bool):
            raise InvalidParameterError(f"packed={shown(packed)} must be True or False")
        check_integer("packed_buffer_size_bytes", packed_buffer_size_bytes, 1, MAX_BUFFER_BYTES)
        self._engine: SteeredEngine | None = HttpEngine(engine) if isinstance(engine, str) else engine
        if engine is not None and not hasattr(self._engine, "init_weight_transfer_engine"):
            raise InvalidParameterError(f"engine={shown(engine)} must be an LLM, the URL of a server, or None")
        store = serve(place, Buffers(packed, packed_buffer_size_bytes))
        place = replace(place, master_port=store.port)
        on_listening(store.port)
        on_gpu = backend == NCCL and torch.cuda.is_available()
        device = torch.device("cuda", torch.cuda.current_device()) if on_gpu else torch.device("cpu")
        told = {
            "backend": backend,
            "master_address": master_address,
            "master_port": store.port,
            "rank_offset": 1,
            "world_size": world_size,
            "timeout_s": timeout_s,
        }
        if self._engine is None:
            self._group = TransferGroup(place, TRAINER, device, store)
            return
        with _Beside(self._engine.init_weight_transfer_engine, {"init_info": told}) as calling:
            self._group = TransferGroup(place, TRAINER, device, store, calling.has_failed)

    def update(self, tensors: Mapping[str, torch.Tensor], version: str | None = None) -> None:
        """Have the engine compute every later token with these tensors.

        Arguments:
            tensors: by their names in the checkpoint, such as `model.state_dict()`; the others stay.
            version: a name for the weights; None (default): the number of the update.

        Raises:
            InvalidParameterError: a tensor is not what it must be, there is no engine, or the sender is closed.
            EngineError: a rank has ended or is silent, and nothing was changed; or a server has refused something.
            CorruptModelError: a tensor is not as an `LLM` needs it, and nothing was changed.
        """
        if self._engine is None:
            raise InvalidParameterError(
                "engine=None: call its verbs, and send() meanwhile; or give WeightSender an engine"
            )
        self._check_open()
        named = named_tensors(tensors)
        self._group.check()  # else ranks that another trainer has met would wait for this one
        self._engine.start_weight_update()
        told = {"update_info": _described([layout for layout, _ in named])}
        with _Beside(self._engine.update_weights, told) as calling:
            self._group.send(named, calling.has_failed)
        self._engine.finish_weight_update(version)

    def send(self, tensors: Mapping[str, torch.Tensor]) -> None:
        """Broadcast tensors, which the ranks wait for. Raises InvalidParameterError; EngineError: a rank has ended or is silent."""
        self._check_open()
        self._group.send(named_tensors(tensors))

    def close(self) -> None:
        """Leave the group. Idempotent."""
        self._is_closed = True
        self._group.close()

    def _check_open(self) -> None:
        """Else the engine would begin an update, and say that its trainer has ended."""
        if self._is_closed:
            raise InvalidParameterError("this WeightSender is closed; make another one, which the ranks meet")


class HttpEngine:
    """The verbs of an engine, by the endpoints of its server."""

    def __init__(self, url: str, api_key: str | None = None, timeout_s: float = 2 * TIMEOUT_S) -> None:
        """
        Arguments:
            url: of the server.
            api_key: that it asks for; None (default): for none.
            timeout_s: how long an answer may take, in seconds; default 600.

        Raises:
            InvalidParameterError: the URL is none of a server.
        """
        if not url.startswith(("http://", "https://")):
            raise InvalidParameterError(
                f"engine={shown(url)} must be the URL of a server, such as 'http://127.0.0.1:8000'"
            )
        self._url, self._timeout_s = url.rstrip("/"), timeout_s
        self._headers = {"content-type": "application/json"}
        if api_key is not None:
            self._headers["authorization"] = f"Bearer {api_key}"

    def init_weight_transfer_engine(self, request: Any) -> None:
        self._post("init_weight_transfer_engine", request)

    def start_weight_update(self) -> None:
        self._post("start_weight_update", {})

    def update_weights(self, request: Any) -> None:
        self._post("update_weights", request)

    def finish_weight_update(self, weight_version: str | None = None) -> None:
        self._post("finish_weight_update", {} if weight_version is None else {"weight_version": weight_version})

    def _post(self, path: str, body: Any) -> None:
        request = urllib.request.Request(f"{self._url}/{path}", json.dumps(body).encode(), self._headers)
        try:
            with urllib.request.urlopen(request, timeout=self._timeout_s) as answer:
                answer.read()
        except urllib.error.HTTPError as error:
            raise EngineError(f"{path}: {error.code} {error.read()[:2000].decode(errors='replace')}") from None
        except (OSError, http.client.HTTPException) as error:
            raise EngineError(f"{path}: {self._url} cannot be reached: {error}") from error


def update_info_of(tensors: Mapping[str, torch.Tensor]) -> dict[str, list[Any]]:
    """What `update_weights` of the engine is told while `WeightSender.send` sends these. Raises InvalidParameterError."""
    return _described([layout for layout, _ in named_tensors(tensors)])


def handles_of(tensors: Mapping[str, torch.Tensor]) -> dict[str, list[Any]]:
    """The update_info of tensors on a GPU, which the ranks of that GPU open ("cuda_ipc").

    Its values are JSON. The tensors must live, and not change, until `update_weights` returns. Each call is for one update.

    Raises InvalidParameterError: a tensor is not on a GPU.
    """
    named = named_tensors(tensors)
    told = _described([layout for layout, _ in named])
    return {**told, "ipc_handles": [handle_of(layout.name, tensor) for layout, tensor in named]}


class _Beside:
    """A call of the engine, on a thread, while this one sends. What the engine says is wrong comes first."""

    def __init__(self, call: Callable[[Any], None], request: Any) -> None:
        self._threads = ThreadPoolExecutor(1, "actorllm:trainer")
        self._calling: Future[None] = self._threads.submit(call, request)

    def has_failed(self) -> bool:
        return self._calling.done() and self._calling.exception() is not None

    def __enter__(self) -> _Beside:
        return self

    def __exit__(self, kind: object, error: BaseException | None, _: object) -> None:
        self._threads.shutdown(wait=False)
        if error is None or isinstance(error, EngineError):
            self._calling.result()


def _described(layouts: list[Layout]) -> dict[str, list[Any]]:
    return {
        "names": [one.name for one in layouts],
        "dtype_names": [str(TORCH_TYPES[one.dtype]).removeprefix("torch.") for one in layouts],
        "shapes": [list(one.shape) for one in layouts],
    }
