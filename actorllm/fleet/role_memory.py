"""`RoleMemory`: the memory by which replicas with roles copy KV of each other; and `router_of`: the router of an engine."""

from __future__ import annotations

from dataclasses import replace

from actorllm.actors.memory_file import MemoryFile
from actorllm.actors.tiers.lease_board import num_bytes
from actorllm.config import EngineConfig
from actorllm.scheduling.role_router import RoleRouter
from actorllm.scheduling.router import Router, make_router


class RoleMemory:
    """The caches of replicas that compute prompts, and the board of leases. The owner of the engine has it.

    So it outlives the workers, and what a dead one had can be read until the next one begins.
    """

    def __init__(self, config: EngineConfig) -> None:
        """config: with roles. Raises OSError."""
        self._board = MemoryFile("leases", num_bytes(config.max_blocks))
        self._pools = [MemoryFile("kv-cache") if role == "prefill" else None for role in config.roles]

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


def router_of(config: EngineConfig) -> Router:
    """By the engine's arguments `router` and `roles`."""
    router = make_router(config.router)
    return RoleRouter(router) if config.roles else router
