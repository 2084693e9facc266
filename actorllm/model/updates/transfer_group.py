"""`TransferGroup`: a trainer and the ranks of engines in one process group of torch.distributed, over which it broadcasts tensors.

Rank 0 is the trainer. All ranks meet at a store that the trainer serves, where it says what it broadcasts in. Tensors travel as one
stream of bytes, in pieces of a buffer at most. A broadcast before them tells which tensors they are, so that ranks which were told
of others fail and take nothing. Waiting is bounded: a group in which a rank is silent for longer, or ends, is over.

The backend is "nccl" between GPUs, and "gloo" between memory of hosts. No GPU has run the former yet. Imports torch.
"""

from __future__ import annotations

import contextlib
import hashlib
import os
import secrets
import socket
import threading
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from datetime import timedelta
from typing import Any, TypeAlias

import numpy as np
import orjson
import torch
from numpy.typing import NDArray

from actorllm.clock import now
from actorllm.errors import EngineError, InvalidParameterError, shown
from actorllm.model.updates.connections import break_connections
from actorllm.model.updates.tensor_files import DTYPES, Layout, checked_name, checked_tensor
from actorllm.types.weight_transport import GroupPlace

TRAINER = 0
"""The rank that broadcasts."""
KEY = "actorllm/group"
"""Where the store has what the trainer says of the group."""
GONE = "actorllm/gone"
"""Where it has that a rank has left, and why, so that no other waits for it."""
LEFT, SILENT = "left", "silent"
DIGEST_BYTES = 32
SILENT_SHARE = 0.8
"""Of the time that a group may be silent: a rank that has waited for so long was one of those that nothing reached, though
another one gave up first, and closed its connections."""
MEETING_POLL_S, MAX_POLL_S = 0.002, 0.05
"""Between two looks which ranks have come: at first, and at last."""
ANSWER_S = 0.5
"""More than a group may be silent: waiting that has its own limit ends first."""
POLL_S = 0.001
"""Between two looks whether a GPU has what was sent."""
ASYNC_ERRORS = "TORCH_NCCL_ASYNC_ERROR_HANDLING"
"""Of torch: by default a group whose peer is lost ends the process."""

Named: TypeAlias = Sequence[tuple[Layout, torch.Tensor]]

_making = threading.Lock()
"""Held while ASYNC_ERRORS is changed."""


@dataclass(frozen=True, slots=True)
class Buffers:
    """How the trainer cuts the stream: what all ranks have to agree on."""

    is_packed: bool
    """Pieces begin and end anywhere, else with a tensor."""
    num_bytes: int
    """At most in a piece."""

    def pieces(self, layout: Sequence[Layout]) -> list[int]:
        """The bytes of each piece of the stream."""
        sizes = [one.num_bytes for one in layout]
        ranges = [sum(sizes)] if self.is_packed else sizes
        return [min(self.num_bytes, size - at) for size in ranges for at in range(0, size, self.num_bytes)]

    def digest(self, layout: Sequence[Layout]) -> bytes:
        """What tells these tensors, cut like this, from others."""
        told = [list(one) for one in layout], self.is_packed, self.num_bytes
        return hashlib.blake2b(orjson.dumps(told), digest_size=DIGEST_BYTES).digest()


class TransferGroup:
    """See the module docstring. Used by one thread at a time."""

    def __init__(
        self,
        place: GroupPlace,
        rank: int,
        device: torch.device,
        store: Any = None,
        is_given_up: Callable[[], bool] = lambda: False,
    ) -> None:
        """Wait for all ranks. store: of `serve`; None: of the trainer that `place` names. is_given_up: asked while they come.

        Raises InvalidParameterError: the backend is not of this device; EngineError: the ranks did not meet.
        """
        if place.backend == "nccl" and device.type != "cuda":
            raise InvalidParameterError(
                "backend='nccl' is between GPUs, and this engine computes on a CPU; use backend='gloo' here and in the trainer"
            )
        self.place, self.rank = place, rank
        self._device = device if place.backend == "nccl" else torch.device("cpu")
        self._group: Any = None
        self._store: Any = None
        self._num_parts = 0
        """That were begun."""
        self._stream = torch.cuda.Stream(device) if self._device.type == "cuda" else None  # type: ignore[no-untyped-call]
        try:
            with self._answered():
                self._store = _reached(place) if store is None else store
                told = self._told()
                self._buffers = Buffers(told["packed"], told["buffer_bytes"])
                self._come("met")
                self._gather("met", range(place.world_size), is_given_up)
            self._group = _made(place, rank, self._store, told["identity"])
            self._broadcast(torch.zeros(1, dtype=torch.uint8, device=self._device))  # nccl connects with the first one
        except (RuntimeError, OSError) as error:
            self.close()
            raise EngineError(
                f"rank {rank} of the weight transfer did not meet the trainer at {place.address} and the others within "
                f"{place.timeout_s:g} s; world_size={place.world_size} must be the trainer and all ranks of its engines, and all "
                f"have to come ({_first_line(error)})"
            ) from error
        except BaseException:
            self.close()
            raise

    @property
    def is_open(self) -> bool:
        """Nothing has failed, and it was not closed."""
        return self._group is not None

    def close(self, why: str = LEFT) -> None:
        """Leave it: the others are told, by the store and by their connections. Idempotent. why: LEFT or SILENT."""
        group, store, self._group, self._store = self._group, self._store, None, None
        if store is not None:
            with contextlib.suppress(RuntimeError):  # the trainer has ended
                store.set(GONE, why)
        if group is not None and self._device.type == "cuda":
            with contextlib.suppress(RuntimeError):
                group.abort()

    def send(self, tensors: Named, is_given_up: Callable[[], bool] = lambda: False) -> None:
        """Broadcast tensors, as the trainer, once all ranks wait for them. is_given_up: asked until then.

        Raises EngineError: a rank has ended, or is silent; or what a tensor raises, or an interrupt. The group is over then.
        """
        try:
            self._send(tensors, is_given_up)
        except BaseException:  # the ranks are in the middle of a stream: what comes next is no other tensor
            self.close()
            raise

    def check(self) -> None:
        """Raises EngineError where nothing can be sent: it was closed, has failed, or a rank has left."""
        with self._exchanging("tensors"):
            if self._store.check([GONE]):
                raise RuntimeError("a rank has left")

    def _send(self, tensors: Named, is_given_up: Callable[[], bool]) -> None:
        layout = [one for one, _ in tensors]
        self._num_parts += 1
        with self._exchanging("tensors"), self._answered():
            self._gather(str(self._num_parts), range(self.place.world_size), is_given_up)
            self._come(str(self._num_parts))
        head = np.frombuffer(self._buffers.digest(layout), np.uint8).copy()
        self._exchange(torch.from_numpy(head).to(self._device), "tensors")
        lengths = self._buffers.pieces(layout)
        for piece in cut((flat_bytes(tensor).to(self._device) for _, tensor in tensors), lengths, self._device):
            self._exchange(piece, "tensors")
        for rank in range(self.place.world_size):
            self._store.delete_key(_key_of(str(self._num_parts - 1), rank))

    def receive(
        self,
        layout: Sequence[Layout],
        take: Callable[[NDArray[np.uint8]], None] | None,
        is_given_up: Callable[[], bool] = lambda: False,
    ) -> None:
        """Take what the trainer broadcasts.

        take: gets the stream in pieces, each of which is over with the call. is_given_up: asked until the trainer begins.

        Raises EngineError: it sends other tensors, is silent or has ended, or another rank has. The group is over then.
        """
        self._num_parts += 1
        with self._exchanging(f"tensor {layout[0].name!r}"), self._answered():
            self._come(str(self._num_parts))
            self._gather(str(self._num_parts), [TRAINER], is_given_up)
        head = torch.zeros(DIGEST_BYTES, dtype=torch.uint8, device=self._device)
        self._exchange(head, f"tensor {layout[0].name!r}")
        if bytes(head.cpu().numpy()) != self._buffers.digest(layout):
            self.close()
            raise EngineError(
                f"the trainer at {self.place.address} sends other tensors than update_info names, and nothing was changed; both "
                f"must have the same names, shapes and types in the same order"
            )
        lengths = self._buffers.pieces(layout)
        buffer = torch.empty(max(lengths, default=0), dtype=torch.uint8, device=self._device)
        ends = np.cumsum([one.num_bytes for one in layout])
        at = 0
        for length in lengths:
            piece = buffer[:length]
            self._exchange(piece, f"tensor {layout[int(np.searchsorted(ends, at, side='right'))].name!r}")
            if take is not None:
                with self._on_stream():
                    take(piece.cpu().numpy())
            at += length

    def _gather(self, what: str, ranks: Iterable[int], is_given_up: Callable[[], bool]) -> None:
        """Wait until these ranks have come to something. Raises RuntimeError: one has not."""
        began = now()
        missing = [_key_of(what, rank) for rank in ranks if rank != self.rank]
        while missing := [key for key in missing if not self._store.check([key])]:
            waited = now() - began
            reason = "it was given up" if is_given_up() else "a rank has left" if self._store.check([GONE]) else ""
            if reason or waited > self.place.timeout_s:
                told = ", ".join(key.rpartition("/")[2] for key in missing[:10])
                raise RuntimeError(f"{reason or 'the time is over'}, not there: rank {told}")
            time.sleep(min(MAX_POLL_S, MEETING_POLL_S + waited / 100))

    def _come(self, what: str) -> None:
        """Tell the others that this rank is there. Raises RuntimeError."""
        self._store.set(_key_of(what, self.rank), "here")

    def _told(self) -> dict[str, Any]:
        """What the trainer says of this group. Raises RuntimeError: no trainer does."""
        try:
            found = orjson.loads(self._store.get(KEY))
            told = {name: found[name] for name in ("identity", "backend", "world_size", "packed", "buffer_bytes")}
        except (ValueError, KeyError, TypeError) as error:
            raise RuntimeError("what is there is no trainer of this version") from error
        for name, own in (("backend", self.place.backend), ("world_size", self.place.world_size)):
            if told[name] != own:
                raise InvalidParameterError(
                    f"{name}={own!r} is not that of the trainer at {self.place.address}, {told[name]!r}; give both the same"
                )
        return told

    def _exchange(self, tensor: torch.Tensor, what: str) -> None:
        with self._exchanging(what):
            self._broadcast(tensor)

    @contextlib.contextmanager
    def _exchanging(self, what: str) -> Iterator[None]:
        """Closes the group, and raises EngineError, where torch says that something has failed. what: was to be exchanged."""
        began = now()
        try:
            if self._group is None:
                raise RuntimeError("the group is over")
            yield
        except RuntimeError as error:
            is_silent = now() - began >= SILENT_SHARE * self.place.timeout_s or self._was_silent()
            self.close(SILENT if is_silent else LEFT)
            raise EngineError(self._lost(what, is_silent, error)) from error

    def _was_silent(self) -> bool:
        """Another rank has left since nothing reached it."""
        try:
            with self._answered():
                return (
                    self._store is not None and self._store.check([GONE]) and self._store.get(GONE) == SILENT.encode()
                )
        except RuntimeError:  # the trainer has ended
            return False

    @contextlib.contextmanager
    def _answered(self) -> Iterator[None]:
        """Calls of the store wait for its answer as long as it takes. Here they raise RuntimeError where it is silent for too long:
        what listens there is no trainer, or its machine or program has stopped."""
        waited = self.place.timeout_s + ANSWER_S
        timer = threading.Timer(waited, break_connections, (self.place.master_address, self.place.master_port))
        timer.name, timer.daemon = "actorllm:answer", True
        timer.start()
        try:
            yield
        finally:
            timer.cancel()
            timer.join()

    def _lost(self, what: str, is_silent: bool, error: RuntimeError) -> str:
        if self.rank == TRAINER:
            silent = f"an engine was silent for {self.place.timeout_s:g} s"
            told = silent if is_silent else "a rank of an engine has ended, or gave up,"
            return f"{told} while {what} were to be sent to it; make another WeightSender ({_first_line(error)})"
        if is_silent:
            told = f"the trainer at {self.place.address} was silent for {self.place.timeout_s:g} s"
        else:
            told = f"the trainer at {self.place.address}, or another rank of its group, has ended"
        return (
            f"{told} while {what} was waited for, and nothing was changed; start the trainer's group again, and call "
            f"init_weight_transfer_engine ({_first_line(error)})"
        )

    def _broadcast(self, tensor: torch.Tensor) -> None:
        """Raises RuntimeError."""
        with self._on_stream():
            work = self._group.broadcast(tensor, TRAINER)
            try:
                if self._stream is None:
                    work.wait()  # as long as the group may be silent
                    return
                until = now() + self.place.timeout_s
                while not work.is_completed():
                    if now() > until:
                        self._group.abort()
                        raise RuntimeError("nothing came in time")
                    time.sleep(POLL_S)
                work.wait()
            finally:
                del work  # it has the connections, and an error keeps this frame: the others would wait for this rank

    @contextlib.contextmanager
    def _on_stream(self) -> Iterator[None]:
        """Beside the stream of the steps, and behind what this thread has launched: tensors that travel are made there."""
        if self._stream is None:
            yield
            return
        self._stream.wait_stream(torch.cuda.current_stream(self._device))
        with torch.cuda.device(self._device), torch.cuda.stream(self._stream):
            yield


def serve(place: GroupPlace, buffers: Buffers) -> Any:
    """The store of a group, which has to live as long as it. port 0 of `place`: any that is free. Raises EngineError."""
    import torch.distributed as dist

    try:
        store: Any = dist.TCPStore(  # type: ignore[attr-defined]
            place.master_address,
            place.master_port,
            is_master=True,
            timeout=timedelta(seconds=place.timeout_s),
            wait_for_workers=False,
        )
    except (RuntimeError, OSError) as error:
        raise EngineError(f"the trainer cannot listen at {place.address} ({_first_line(error)})") from error
    told = {
        "identity": secrets.token_hex(8),
        "backend": place.backend,
        "world_size": place.world_size,
        "packed": buffers.is_packed,
        "buffer_bytes": buffers.num_bytes,
    }
    store.set(KEY, orjson.dumps(told).decode())
    return store


def named_tensors(tensors: Any) -> list[tuple[Layout, torch.Tensor]]:
    """Pairs of a name and a tensor, looked at. Raises InvalidParameterError, naming the tensor."""
    try:
        pairs = [(name, value) for name, value in (tensors.items() if hasattr(tensors, "items") else tensors)]
    except (TypeError, ValueError):
        raise InvalidParameterError(
            f"tensors={shown(tensors)} must be a mapping from names to tensors, such as model.state_dict()"
        ) from None
    found: dict[str, tuple[Layout, torch.Tensor]] = {}
    for name, value in pairs:
        tensor = checked_tensor(name, value)
        if tensor.is_meta:
            raise InvalidParameterError(
                f"tensor {str(name)!r:.200} is on 'meta' and has no data; give the tensor itself"
            )
        found[checked_name(name)] = Layout(str(name), DTYPES[tensor.dtype], tuple(tensor.shape)), tensor
    if not found:
        raise InvalidParameterError("tensors is empty; give at least one tensor by its name in the checkpoint")
    return list(found.values())


def flat_bytes(tensor: torch.Tensor) -> torch.Tensor:
    """The bytes of a tensor, uint8 [num_bytes], where it is."""
    return tensor.detach().resolve_neg().contiguous().reshape(-1).view(torch.uint8)


def cut(parts: Iterator[torch.Tensor], lengths: Sequence[int], device: torch.device) -> Iterator[torch.Tensor]:
    """The bytes of all parts, one behind the other, in pieces of these lengths. A piece is over with the next one."""
    part = torch.empty(0, dtype=torch.uint8, device=device)
    at = 0
    for length in lengths:
        while at == len(part):  # also over parts without a byte
            part, at = next(parts), 0
        if at + length <= len(part):
            yield part[at : at + length]
            at += length
            continue
        piece = torch.empty(length, dtype=torch.uint8, device=device)
        done = 0
        while done < length:
            if at == len(part):
                part, at = next(parts), 0
            size = min(length - done, len(part) - at)
            piece[done : done + size] = part[at : at + size]
            done, at = done + size, at + size
        yield piece


def _key_of(what: str, rank: int) -> str:
    """Where the store has that a rank has come to something."""
    return f"{KEY}/{what}/{rank}"


def _reached(place: GroupPlace) -> Any:
    import torch.distributed as dist

    timeout = timedelta(seconds=place.timeout_s)
    kind: Any = dist.TCPStore  # type: ignore[attr-defined]
    return kind(place.master_address, place.master_port, is_master=False, timeout=timeout, wait_for_workers=False)


def _made(place: GroupPlace, rank: int, store: Any, identity: str) -> Any:
    """The process group, apart from the default one of this process. Raises RuntimeError."""
    import torch.distributed as dist

    prefixed = dist.PrefixStore(identity, store)  # type: ignore[attr-defined]
    timeout = timedelta(seconds=place.timeout_s)
    if place.backend == "gloo":
        kind: Any = dist.ProcessGroupGloo
        options = kind._Options()
        options._devices = [kind.create_device(hostname=_own_address(place))]
        options._timeout = timeout
        options._threads = 1
        return kind(prefixed, rank, place.world_size, options)
    kind = dist.ProcessGroupNCCL
    options = kind.Options()
    options._timeout = timedelta(days=1)  # `_broadcast` gives up; what torch does then ends the process
    with _making:
        before = os.environ.get(ASYNC_ERRORS)
        os.environ[ASYNC_ERRORS] = "0"
        try:
            return kind(prefixed, rank, place.world_size, options)
        finally:
            del os.environ[ASYNC_ERRORS]
            if before is not None:
                os.environ[ASYNC_ERRORS] = before


def _own_address(place: GroupPlace) -> str:
    """Under which the other ranks reach this process: that of the interface towards the trainer. Raises OSError."""
    family, kind, _, _, address = socket.getaddrinfo(
        place.master_address, place.master_port or 9, type=socket.SOCK_DGRAM
    )[0]
    with socket.socket(family, kind) as probe:
        probe.connect(address)  # nothing is sent
        return str(probe.getsockname()[0])


def _first_line(error: BaseException) -> str:
    lines = str(error).splitlines()
    return f"{type(error).__name__}: {lines[0] if lines else ''}"[:200]
