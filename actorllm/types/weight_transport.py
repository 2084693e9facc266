"""How new weights travel to the ranks: names of transports, and where a trainer is met. Free of torch.

What each does is in `actorllm.client.transports`.
"""

from __future__ import annotations

from dataclasses import dataclass

SHM, CUDA_IPC, NCCL, GLOO = "shm", "cuda_ipc", "nccl", "gloo"
ALIASES = {"ipc": CUDA_IPC}
"""vLLM's names for them."""

BUFFER_BYTES = 64 << 20
"""At most in one broadcast, if nothing else is given."""
TIMEOUT_S = 300.0
"""How long a trainer may be silent, if nothing else is given."""


@dataclass(frozen=True, slots=True)
class GroupPlace:
    """A group of a trainer and the ranks of engines, and where they meet."""

    backend: str
    """Of torch.distributed: "gloo" or "nccl"."""
    master_address: str
    """Of the trainer."""
    master_port: int
    world_size: int
    """The trainer, and all ranks of all its engines."""
    timeout_s: float = TIMEOUT_S
    """How long one of them may be silent."""

    @property
    def address(self) -> str:
        return f"{self.master_address}:{self.master_port}"
