"""How new weights travel to the ranks: names of transports, and where a trainer is met. Free of torch.

What each does is in `actorllm.client.transports`.
"""

from __future__ import annotations

from dataclasses import dataclass, replace

from actorllm.errors import InvalidParameterError, shown
from actorllm.types.params import is_text

SHM, CUDA_IPC, NCCL, GLOO = "shm", "cuda_ipc", "nccl", "gloo"
ALIASES = {"ipc": CUDA_IPC}
"""vLLM's names for them."""

BUFFER_BYTES = 64 << 20
"""At most in one broadcast, if nothing else is given."""
TIMEOUT_S = 300.0
"""How long a trainer may be silent, if nothing else is given."""

MAX_ADDRESS = 255
MAX_PORT = 65_535
MAX_WORLD = 100_000
MAX_TIMEOUT_S = 86_400.0


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


def checked_place(place: GroupPlace, where: str = "", least_port: int = 1) -> GroupPlace:
    """Itself, with a timeout in seconds that is a float. Raises InvalidParameterError, naming what is wrong.

    Arguments:
        where: begins the message.
        least_port: 0: any port that is free will do.
    """
    address, timeout = place.master_address, place.timeout_s
    if not is_text(address) or not 0 < len(address) <= MAX_ADDRESS or "\0" in address:
        raise InvalidParameterError(f"{where}master_address={shown(address)} must be the address of the trainer")
    if isinstance(timeout, bool) or not isinstance(timeout, int | float) or not 0 < timeout <= MAX_TIMEOUT_S:
        raise InvalidParameterError(
            f"{where}timeout_s={shown(timeout)} must be a positive number of seconds, of {MAX_TIMEOUT_S:g} at most"
        )
    check_integer(f"{where}master_port", place.master_port, least_port, MAX_PORT)
    check_integer(f"{where}world_size", place.world_size, 2, MAX_WORLD)
    return replace(place, timeout_s=float(timeout))


def check_integer(name: str, found: object, least: int, most: int) -> None:
    """Raises InvalidParameterError."""
    if type(found) is not int or not least <= found <= most:
        raise InvalidParameterError(f"{name}={shown(found)} must be an integer from {least} to {most}")
