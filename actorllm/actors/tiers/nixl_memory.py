"""`NixlMemory`: as `PeerMemory`, by reads of NIXL (https://github.com/ai-dynamo/nixl), whose wheel works on a CPU.

A lender has its cache in memory of its own, which it registers with an agent of NIXL. A file without a name, which is the mapped
memory otherwise, has its *card*: how another agent reaches it, and where the cache begins. A reader loads the card of the
lender when it is a new one. Blocks are read by one transfer of all layers. Leases are as ever: a read counts only if the lease is
there after it as well.

A read that has begun is waited for, whatever its request does: until it ends, it may write to the blocks that it fills. NIXL ends
the reads of a lender that has died with an error.
"""

from __future__ import annotations

import contextlib
import os
import secrets
import struct
import time
import zlib
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
import orjson
from numpy.typing import NDArray

from actorllm.actors.tiers.lease_board import LeaseBoard, Lent
from actorllm.actors.tiers.peer_memory import NUM_SPECIAL_BLOCKS, PeerMemory, Regions
from actorllm.errors import EngineError

CARD = struct.Struct("<QI")
"""How long a card is, and its checksum; the card follows."""
POLL_S = 1e-4
"""Between two looks whether a read has ended."""


class NixlMemory(PeerMemory):
    """See the module docstring."""

    def __init__(self, paths: Sequence[str], board: LeaseBoard, regions_of_own: Callable[[], Regions]) -> None:
        """paths: of the cards of each replica, by number; empty: that one lends nothing. Raises EngineError without NIXL."""
        super().__init__(paths, board, regions_of_own)
        self._agent = _new_agent()
        self._registered: Any = None
        self._loaded: dict[int, tuple[bytes, str, list[int]]] = {}
        """By replica, the last card, the name of the agent, and where the regions of its cache begin."""

    def publish(self, path: str) -> None:
        """Let others read the cache, which has its memory from here on. path: of the own card; empty: register it alone."""
        regions = self._own()
        places = [(_address_of(one), one.nbytes, 0, "") for one in regions]
        self._registered = self._agent.register_memory(places, "DRAM")
        if path:
            told = {"starts": [place[0] for place in places], "agent": self._agent.get_agent_metadata().hex()}
            _write_card(path, orjson.dumps(told))

    def _fill(self, lent: Lent, targets: NDArray[np.int32], sources: NDArray[np.int32]) -> None:
        regions = self._own()
        mine = [_pieces(_address_of(one), one.shape, targets) for one in regions]
        name, starts = self._lender(lent.replica)
        theirs = [
            _pieces(start, (one.shape[0], lent.cache_blocks + NUM_SPECIAL_BLOCKS, one.shape[2]), sources)
            for start, one in zip(starts, regions, strict=True)
        ]
        try:
            state = self._read(name, np.concatenate(mine), np.concatenate(theirs))
        except Exception as error:  # NIXL has kinds of its own, which a package without NIXL cannot name
            self._forget(lent.replica)
            raise OSError(f"NIXL could not read from replica {lent.replica}: {error}") from error
        if state != "DONE":
            self._forget(lent.replica)
            raise OSError(f"NIXL could not read from replica {lent.replica}: {state}")

    def _read(self, name: str, mine: NDArray[np.uint64], theirs: NDArray[np.uint64]) -> str:
        """How it ended."""
        agent = self._agent
        places = [agent.get_xfer_descs(one, "DRAM") for one in (mine, theirs)]
        handle = agent.initialize_xfer("READ", *places, name)
        try:
            state: str = agent.transfer(handle)
            while state == "PROC":
                time.sleep(POLL_S)
                state = agent.check_xfer_state(handle)
            return state
        finally:
            agent.release_xfer_handle(handle)

    def _lender(self, replica: int) -> tuple[str, list[int]]:
        """The agent of a replica, and where its cache begins. Raises OSError, ValueError: it has no card now."""
        card = _read_card(self._paths[replica] if replica < len(self._paths) else "")
        known = self._loaded.get(replica)
        if known is not None and known[0] != card:
            self._forget(replica)
            known = None
        if known is None:
            told = orjson.loads(card)
            try:
                name = self._agent.add_remote_agent(bytes.fromhex(told["agent"]))
            except Exception as error:  # of a kind of NIXL's own
                raise OSError(f"NIXL does not reach replica {replica}: {error}") from error
            known = card, name.decode() if isinstance(name, bytes) else name, told["starts"]
            self._loaded[replica] = known
        return known[1], known[2]

    def _forget(self, replica: int) -> None:
        """The agent of this replica, which NIXL forgets by itself when its process has ended."""
        known = self._loaded.pop(replica, None)
        if known is not None:
            with contextlib.suppress(Exception):  # of a kind of NIXL's own: it is forgotten already
                self._agent.remove_remote_agent(known[1])


def _new_agent() -> Any:
    try:
        from nixl._api import nixl_agent, nixl_agent_config
    except ImportError as error:
        raise EngineError(f"NIXL cannot be imported ({error}); pip install 'actorllm[nixl]'") from error
    return nixl_agent(f"actorllm-{secrets.token_hex(8)}", nixl_agent_config(backends=["UCX"]))


def _address_of(region: NDArray[np.uint8]) -> int:
    return int(region.ctypes.data)


def _pieces(start: int, shape: tuple[int, ...], blocks: NDArray[np.int32]) -> NDArray[np.uint64]:
    """Address, length and device of these blocks in all layers of a region [num_layers, num_blocks, bytes]."""
    layers, number, size = shape
    offsets = (np.arange(layers, dtype=np.uint64)[:, None] * number + blocks.astype(np.uint64)).reshape(-1) * size
    found = np.zeros((offsets.size, 3), np.uint64)
    found[:, 0], found[:, 1] = start + offsets, size
    return found


def _write_card(path: str, card: bytes) -> None:
    fd = os.open(path, os.O_RDWR | os.O_CLOEXEC)
    try:
        os.ftruncate(fd, 0)
        os.pwrite(fd, CARD.pack(len(card), zlib.crc32(card)) + card, 0)
    finally:
        os.close(fd)


def _read_card(path: str) -> bytes:
    """Raises OSError, ValueError: there is none, or it is being written."""
    fd = os.open(path, os.O_RDONLY | os.O_CLOEXEC)
    try:
        size = os.fstat(fd).st_size
        data = os.pread(fd, size, 0)
    finally:
        os.close(fd)
    if len(data) < CARD.size:
        raise ValueError("the lender has no card yet")
    length, checksum = CARD.unpack_from(data)
    card = data[CARD.size : CARD.size + length]
    if len(card) != length or zlib.crc32(card) != checksum:
        raise ValueError("the card of the lender is being written")
    return card
