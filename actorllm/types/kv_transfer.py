"""`kv_transfer_params`: what a gateway says of the KV of a request, as vLLM's connectors have it, and what it is answered.

A gateway sends a prompt twice: with `do_remote_decode` to have it computed, and with what that was answered to have it decoded.
"""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

from actorllm.errors import InvalidParameterError, shown

NAME = "kv_transfer_params"
LEASE = re.compile(r"actorllm/(\d{1,4})/(\d{1,6})/([0-9a-f]{1,16})")


class KvTransfer(NamedTuple):
    """What a request asks for."""

    hands_off: bool = False
    """Its prompt alone is computed, and its KV is lent."""
    lease: tuple[int, ...] = ()
    """What it may copy, as `Submit.kv_lease`; none: nothing."""


def read_transfer(extra_args: Mapping[str, Any] | None, max_tokens: int | None, has_roles: bool) -> KvTransfer:
    """Of the extra_args of a request.

    Arguments:
        extra_args: of its sampling parameters.
        max_tokens: likewise.
        has_roles: whether replicas of this engine lend each other KV.

    Raises:
        InvalidParameterError: names what cannot be.
    """
    given = None if extra_args is None else extra_args.get(NAME)
    if given is None:
        return KvTransfer()
    if not isinstance(given, Mapping):
        raise InvalidParameterError(f"{NAME}={shown(given)} must be a mapping, or None")
    for flag in ("do_remote_decode", "do_remote_prefill"):
        if not isinstance(given.get(flag), bool | None):
            raise InvalidParameterError(f"{NAME}: {flag}={shown(given[flag])} must be true or false")
    if given.get("do_remote_decode"):
        if not has_roles:
            raise InvalidParameterError(
                f"{NAME}: do_remote_decode needs an engine whose replicas have roles, such as roles='1P1D'"
            )
        if max_tokens != 1:
            raise InvalidParameterError(
                f"{NAME}: do_remote_decode is of a prompt alone; give max_tokens=1 instead of {max_tokens!r}"
            )
        return KvTransfer(hands_off=True)
    return KvTransfer(lease=_lease_of(given)) if given.get("do_remote_prefill") and has_roles else KvTransfer()


def _lease_of(given: Mapping[str, Any]) -> tuple[int, ...]:
    """None of another engine: the prompt is computed then."""
    engine, blocks = given.get("remote_engine_id"), given.get("remote_block_ids")
    if not isinstance(engine, str | None):
        raise InvalidParameterError(f"{NAME}: remote_engine_id={shown(engine)} must be a string")
    if not isinstance(blocks, list | tuple | None):
        raise InvalidParameterError(f"{NAME}: remote_block_ids={shown(blocks)} must be a list")
    found = LEASE.fullmatch(engine or "")
    if found is None or not blocks:
        return ()
    number = int(found[3], 16)
    return (int(found[1]), int(found[2]), number, len(blocks)) if number < 1 << 63 else ()


def answer_of(lease: Sequence[int], blocks: Sequence[int], num_ranks: int = 1) -> dict[str, Any]:
    """What a gateway sends on with the prompt, to have it decoded. The number of a lease is text: JSON readers may round it."""
    replica, slot, number = lease[:3]
    return {
        "do_remote_prefill": True,
        "do_remote_decode": False,
        "remote_engine_id": f"actorllm/{replica}/{slot}/{number:x}",
        "remote_block_ids": list(blocks),
        "remote_host": "localhost",
        "remote_port": 0,
        "tp_size": num_ranks,
    }
