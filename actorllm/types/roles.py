"""Roles: which replicas compute prompts and which ones decode, as the arguments of an engine say it, vLLM's names among them."""

from __future__ import annotations

import re
from collections.abc import Mapping
from importlib.util import find_spec
from typing import Any, Literal

import orjson

from actorllm.errors import ConfigError

Role = Literal["prefill", "decode"]
CONNECTOR, NIXL_CONNECTOR = "SharedMemoryConnector", "NixlConnector"
"""How `kv_transfer_config` names what roles do."""
MAPPED, NIXL = "mapped", "nixl"
"""How blocks come from another replica: out of memory that both have mapped, or by NIXL."""
CONNECTORS_ELSEWHERE = (
    "P2pNcclConnector",
    "MooncakeConnector",
    "LMCacheConnectorV1",
    "MultiConnector",
)
"""Of vLLM: they take KV from one engine to another."""
PATTERN = re.compile(r"(\d{1,3})P(\d{1,3})D", re.IGNORECASE)


def read_roles(roles: object) -> tuple[Role, ...]:
    """Of each replica, by number: those that compute prompts come first. roles: such as '1P2D'; None: there are none.

    Raises ConfigError.
    """
    if roles is None:
        return ()
    found = PATTERN.fullmatch(roles) if isinstance(roles, str) else None
    if found is None:
        raise ConfigError(
            f"roles={roles!r:.80} must say how many replicas compute prompts and how many decode, such as '1P2D'"
        )
    num_prefill, num_decode = int(found[1]), int(found[2])
    if not num_prefill or not num_decode:
        raise ConfigError(f"roles={roles!r} needs at least one replica of each kind, such as '1P1D'; or leave it out")
    numbers = range(num_prefill + num_decode)
    return tuple("prefill" if number < num_prefill else "decode" for number in numbers)


def with_roles(given: dict[str, Any], reason: str | None) -> tuple[dict[str, Any], tuple[Role, ...]]:
    """The arguments of an engine, with as many replicas as its roles say; and the role of each.

    reason: why KV of this engine cannot be moved; None: it can be. Raises ConfigError.
    """
    given = _with_connector(given)
    roles = read_roles(given["roles"])
    if not roles:
        return given, roles
    _check(given, len(roles), reason)
    return given | {"data_parallel_size": len(roles)}, roles


def _check(given: Mapping[str, Any], number: int, reason: str | None) -> None:
    """Raises ConfigError for what roles do not go together with.

    Arguments:
        given: the arguments of the engine.
        number: of the replicas.
        reason: why KV of this engine cannot be moved; None: it can be.
    """
    told = f"roles={given['roles']!r:.80}"
    if reason is not None:
        raise ConfigError(f"{told}: KV is not moved between replicas {reason}; leave roles out")
    if given["data_parallel_size"] not in (None, 1, number):
        raise ConfigError(
            f"{told} are {number} replicas, and data_parallel_size={given['data_parallel_size']!r:.80}; leave that out"
        )
    for name in ("max_replicas", "nodes", "data_parallel_size_local", "ray_address"):
        if given[name]:
            raise ConfigError(f"{told} is not supported with {name}={given[name]!r:.80} yet; leave one of them out")
    if given["topology"] == "inline":
        raise ConfigError(f"{told} needs processes, and topology='inline' computes in this one; use topology='process'")
    if "ray" in (given["data_parallel_backend"], given["distributed_executor_backend"]):
        raise ConfigError(f"{told} is for replicas of this machine yet, and Ray places them elsewhere; leave one out")


def _with_connector(given: dict[str, Any]) -> dict[str, Any]:
    """The arguments of an engine, with roles in the place of a `kv_transfer_config` that means them. Raises ConfigError.

    What `kv_transfer_config` says of tiers stays where it is (`types.kv_tiers`).
    """
    told = given["kv_transfer_config"]
    if isinstance(told, str | bytes):
        try:
            told = orjson.loads(told)
        except ValueError:
            return given  # which is refused where tiers are read
    connector = told.get("kv_connector") if isinstance(told, Mapping) else None
    if connector in CONNECTORS_ELSEWHERE:
        raise ConfigError(
            f"kv_transfer_config: kv_connector={connector!r} moves KV between engines, which is not supported; for replicas of one "
            f"engine on this machine give roles='1P1D'"
        )
    if connector not in (CONNECTOR, NIXL_CONNECTOR):
        return given
    if told.get("kv_role", "kv_both") != "kv_both":
        raise ConfigError(
            f"kv_transfer_config: kv_role={told['kv_role']!r:.80} is of one engine among several, and here one engine has "
            f"replicas of both kinds; use kv_role='kv_both' and roles='1P1D'"
        )
    extra = told.get("kv_connector_extra_config") or {}
    known = {"kv_connector", "kv_role", "kv_connector_extra_config", "engine_id", "kv_parallel_size", "kv_rank"}
    unknown = [*(set(told) - known), *(set(extra) - {"roles"})] if isinstance(extra, Mapping) else ["extra config"]
    if unknown:
        raise ConfigError(f"kv_transfer_config: {sorted(map(str, unknown))[0]!r:.80} is not supported; leave it out")
    roles = extra.get("roles", given["roles"])
    if roles is None or given["roles"] not in (None, roles):
        raise ConfigError(
            f"kv_transfer_config: {connector} is between the replicas of one engine here, and needs roles, such as "
            f"kv_connector_extra_config={{'roles': '1P1D'}}; they are {roles!r:.80} there, and roles={given['roles']!r:.80}"
        )
    if connector == NIXL_CONNECTOR and find_spec("nixl") is None:
        raise ConfigError(
            f"kv_transfer_config: kv_connector={connector!r} needs NIXL: pip install 'actorllm[nixl]', or use {CONNECTOR!r}"
        )
    transport = NIXL if connector == NIXL_CONNECTOR else MAPPED
    return given | {"roles": roles, "kv_transfer_config": None, "kv_transport": transport}
