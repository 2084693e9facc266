"""The table of transports, and which of them a caller means. Raises InvalidParameterError for what is none."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from actorllm.client.transports.broadcasts import Broadcasts
from actorllm.client.transports.jobs import Transport
from actorllm.client.transports.shared_devices import SharedDevices
from actorllm.client.transports.shared_memory import SharedCopies
from actorllm.errors import InvalidParameterError, nearest_name, shown
from actorllm.types.weight_transport import ALIASES, CUDA_IPC, GLOO, NCCL, SHM

TRANSPORTS: dict[str, Transport] = {
    SHM: SharedCopies(),
    CUDA_IPC: SharedDevices(),
    NCCL: Broadcasts(NCCL),
    GLOO: Broadcasts(GLOO),
}


def transport_of(argument: str, name: object) -> Transport:
    """By its name. argument: how the caller calls it."""
    known = ALIASES.get(str(name), str(name))
    if not isinstance(name, str) or known not in TRANSPORTS:
        raise InvalidParameterError(
            f"{argument}={shown(name)} must be one of {', '.join(map(repr, TRANSPORTS))}{nearest_name(str(name), TRANSPORTS)}"
        )
    return TRANSPORTS[known]


def transport_of_init(info: Mapping[str, Any]) -> Transport:
    """Of an init_info, which names it, or has the fields of vLLM's."""
    if "backend" in info:
        return transport_of("init_info: backend", info["backend"])
    if {"master_address", "nccl_unique_id_b64"} & info.keys():
        return TRANSPORTS[NCCL]
    return TRANSPORTS[CUDA_IPC if info.keys() == {"packed"} else SHM]


def transport_of_part(info: Mapping[str, Any]) -> Transport:
    """Of an update_info."""
    if {"ipc_handles", "ipc_handles_pickled"} & info.keys():
        return TRANSPORTS[CUDA_IPC]
    return TRANSPORTS[NCCL if "names" in info else SHM]
