"""KV tiers: what the arguments of an engine say of host memory and of a disk for KV blocks, vLLM's names among them."""

from __future__ import annotations

import math
import os
import warnings
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import orjson

from actorllm.errors import ConfigError

GIB = 1 << 30
CONNECTOR = "OffloadingConnector"
"""Of vLLM: the only one with a counterpart here."""
MAX_GIB = 1 << 20


@dataclass(frozen=True, slots=True)
class TierSizes:
    """Bytes of each tier; 0: there is none."""

    memory_bytes: int = 0
    disk_path: str | None = None
    disk_bytes: int = 0


def read_tiers(given: Mapping[str, Any], reason: str | None) -> TierSizes:
    """Of the arguments of an engine.

    Arguments:
        given: all of them.
        reason: why this engine can have no tiers; None: it can.

    Raises:
        ConfigError: a value is wrong, or tiers are asked for where there can be none; names the argument.
    """
    # Each value by itself, then those that belong together, then whether there can be tiers at all.
    _check_backend(given["kv_offloading_backend"])
    memory = _gib("kv_offloading_size", given["kv_offloading_size"])
    of_connector = _of_connector(given["kv_transfer_config"])
    swap = _gib("swap_space", given["swap_space"])
    disk = _gib("kv_disk_size", given["kv_disk_size"])
    path = given["kv_disk_path"]
    if (path is None) != (disk is None):
        there, lacking = ("kv_disk_size", "kv_disk_path") if path is None else ("kv_disk_path", "kv_disk_size")
        raise ConfigError(f"{there}={given[there]!r:.120} needs {lacking} as well: a folder, and its size in GiB")
    if path is not None and (not isinstance(path, str | os.PathLike) or not os.fspath(path)):
        raise ConfigError(f"kv_disk_path={path!r:.120} must be the path of a folder")
    if memory is not None and of_connector is not None and memory != of_connector:
        raise ConfigError("kv_offloading_size and kv_transfer_config give different sizes; leave one of them out")
    asked = [name for name in ("kv_offloading_size", "kv_disk_path", "kv_transfer_config") if given[name] is not None]
    if reason is not None and asked:
        raise ConfigError(f"{asked[0]}={given[asked[0]]!r:.120}: KV tiers are not supported {reason}; leave it out")
    if reason is not None and swap:
        warnings.warn(
            f"swap_space={given['swap_space']!r} is taken and has no effect: KV tiers are not supported {reason}",
            stacklevel=6,
        )
        swap = None
    sizes = [size for size in (memory, of_connector, swap) if size is not None]
    return TierSizes(
        sizes[0] if sizes else 0, None if path is None else os.path.abspath(os.path.expanduser(path)), disk or 0
    )


def tier_of(facts: Mapping[str, Mapping[str, Any]]) -> tuple[str, int] | None:
    """What the first worker has told of its blocks; None: nothing, as it takes the place of another one, or there are no tiers."""
    told = next((fact["tier"] for fact in facts.values() if fact.get("tier")), None)
    return None if told is None else (str(told[0]), int(told[1]))


def _gib(name: str, value: Any) -> int | None:
    if value is None:
        return None
    if isinstance(value, bool) or not isinstance(value, int | float) or not math.isfinite(value):
        raise ConfigError(f"{name}={value!r:.80} must be a number of GiB, or None")
    if not 0 <= value <= MAX_GIB:
        raise ConfigError(f"{name}={value!r} (GiB) must be from 0 to {MAX_GIB}")
    return int(value * GIB)


def _check_backend(backend: Any) -> None:
    if backend != "native":
        raise ConfigError(f"kv_offloading_backend={backend!r:.80} is not supported; leave it at 'native'")


def _of_connector(told: Any) -> int | None:
    """The bytes of host memory that vLLM's offloading connector is given."""
    if told is None:
        return None
    if isinstance(told, str | bytes):
        try:
            told = orjson.loads(told)
        except ValueError as error:
            raise ConfigError(f"kv_transfer_config={told!r:.120} is no JSON: {error}") from None
    if not isinstance(told, Mapping):
        raise ConfigError(f"kv_transfer_config={told!r:.120} must be a mapping, JSON, or None")
    connector = told.get("kv_connector")
    if connector != CONNECTOR:
        raise ConfigError(
            f"kv_transfer_config: kv_connector={connector!r:.80} is not supported; use {CONNECTOR!r}, or kv_offloading_size"
        )
    if told.get("kv_role", "kv_both") != "kv_both":
        raise ConfigError(f"kv_transfer_config: kv_role={told['kv_role']!r:.80} is not supported; use 'kv_both'")
    extra = told.get("kv_connector_extra_config") or {}
    unknown = [*(set(told) - _KNOWN), *(set(extra) - _KNOWN_EXTRA)] if isinstance(extra, Mapping) else ["extra config"]
    if unknown:
        raise ConfigError(f"kv_transfer_config: {unknown[0]!r:.80} is not supported; leave it out")
    if extra.get("spec_name", "CPUOffloadingSpec") != "CPUOffloadingSpec":
        raise ConfigError(
            f"kv_transfer_config: spec_name={extra['spec_name']!r:.80} is not supported; for a disk use kv_disk_path"
        )
    size = extra.get("cpu_bytes_to_use")
    if isinstance(size, bool) or not isinstance(size, int | float) or not 0 < size <= MAX_GIB * GIB:
        raise ConfigError(f"kv_transfer_config: cpu_bytes_to_use={size!r:.80} must be a positive number of bytes")
    return int(size)


_KNOWN = {"kv_connector", "kv_role", "kv_connector_extra_config", "engine_id", "kv_load_failure_policy"}
_KNOWN_EXTRA = {"cpu_bytes_to_use", "spec_name", "block_size", "eviction_policy", "store_threshold"}
"""The last three are taken and change nothing."""
