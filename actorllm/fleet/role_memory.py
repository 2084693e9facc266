"""`RoleMemory`: the memory by which replicas with roles copy KV of each other; `LeaseReturns`, and `router_of` an engine."""

from __future__ import annotations

import contextlib
from dataclasses import replace

from actorllm.actors.memory_file import MemoryFile
from actorllm.actors.tiers.lease_board import LeaseBoard, num_bytes
from actorllm.config import EngineConfig
from actorllm.messages import I64
from actorllm.scheduling.role_router import RoleRouter
from actorllm.scheduling.router import Router, make_router


class RoleMemory:
    """The caches of replicas that compute prompts, and the board of leases. The owner of the engine has it.

    So it outlives the workers, and what a dead one had can be read until the next one begins.
    """

    def __init__(self, config: EngineConfig) -> None:
        """config: with roles. Raises OSError."""
        self._board = MemoryFile("leases", num_bytes(config.max_blocks))
        self._pools = [
            MemoryFile("kv-cache") if role == "prefill" else None
            for role in config.roles
            for _ in range(config.world_size)
        ]

    def shared_by(self, config: EngineConfig) -> EngineConfig:
        """With where it is."""
        pools = tuple("" if pool is None else pool.path for pool in self._pools)
        return replace(config, cache=replace(config.cache, pools=pools, lease_path=self._board.path))

    def close(self) -> None:
        """No process can open it any more. Idempotent."""
        self._board.close()
        for pool in self._pools:
            if pool is not None:
                pool.close()


class LeaseReturns:
    """Ends leases of requests that no replica goes on with. A program that has joined has one of its own."""

    def __init__(self, config: EngineConfig) -> None:
        """config: with where the board is, where there are roles."""
        self._path, self._max_blocks = config.cache.lease_path, config.max_blocks
        self._board: LeaseBoard | None = None

    def __call__(self, lease: I64) -> None:
        """The lender may use the blocks again. lease: as in `KvOffer`."""
        if self._board is None and self._path is not None:
            with contextlib.suppress(OSError):  # the owner has ended, and so has the lease
                self._board = LeaseBoard(self._path, self._max_blocks)
        if self._board is not None:
            self._board.take(*lease.tolist()[:3])

    def close(self) -> None:
        """Idempotent."""
        self._board = self._path = None


def router_of(config: EngineConfig) -> Router:
    """By the engine's arguments `router` and `roles`."""
    router = make_router(config.router)
    return RoleRouter(router) if config.roles else router
