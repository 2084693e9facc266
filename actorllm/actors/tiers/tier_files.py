"""`open_tiers`: the files of an engine's KV tiers, memory before the disk; and `TierDirectory`: what the files have.

Of several ranks each has files of its own, with its part of every block. A block is there if all of them have their part.
"""

from __future__ import annotations

import contextlib
import fcntl
import hashlib
import logging
import os
import secrets
import stat
import time
from collections.abc import Sequence
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from actorllm.actors.tiers.slot_file import KEY_BYTES, SlotFile, num_slots_of
from actorllm.config import CacheConfig
from actorllm.errors import ConfigError

logger = logging.getLogger(__name__)

PREFIX, SUFFIX = "actorllm-kv-", ".slots"
MAKING_S = 3600.0
"""No process takes longer to make a file."""


def open_tiers(cache: CacheConfig, rank: int = 0, num_ranks: int = 1) -> list[SlotFile]:
    """In the order in which they are looked into.

    Arguments:
        cache: with what the first worker has told of its blocks.
        rank: whose files these are, of so many: each has its part of the blocks, and of the room.
        num_ranks: that share the layers.

    Raises:
        ConfigError: a file cannot be made, or is too small for a single set of slots; names the argument.
    """
    files: list[SlotFile] = []
    fingerprint, part = bytes.fromhex(cache.tier_fingerprint), ""
    if num_ranks > 1:
        part = f"-rank{rank}of{num_ranks}"
        fingerprint = hashlib.sha256(fingerprint + part.encode()).digest()
    try:
        if cache.offloading_paths:
            num_bytes = cache.offloading_bytes // num_ranks
            files.append(_open("kv_offloading_size", cache.offloading_paths[rank], fingerprint, cache, num_bytes))
        if cache.disk_path is not None:
            # A file for each size: engines that share the folder and differ in it would take each other's away.
            num_bytes = cache.disk_bytes // num_ranks
            size = num_slots_of(cache.tier_slot_bytes, num_bytes)
            folder = _folder(cache.disk_path)
            own = os.path.join(folder, f"{PREFIX}{cache.tier_fingerprint[:24]}{part}-{size}{SUFFIX}")
            files.append(_open("kv_disk_size", own, fingerprint, cache, num_bytes))
            if not rank:
                siblings = [own.replace(part, f"-rank{other}of{num_ranks}") for other in range(1, num_ranks)]
                _make_room(own, siblings, cache.disk_bytes)
    except BaseException:
        for file in files:
            file.close()
        raise
    return files


def _open(argument: str, path: str, fingerprint: bytes, cache: CacheConfig, num_bytes: int) -> SlotFile:
    try:
        file = SlotFile(path, fingerprint, cache.tier_slot_bytes, num_bytes)
    except ValueError as error:
        raise ConfigError(f"{argument}={num_bytes / 2**30:.6f} (GiB) is too small: {error}") from None
    except OSError as error:
        raise ConfigError(
            f"{argument}={num_bytes / 2**30:g} (GiB): a tier of KV blocks cannot be opened: {error}"
        ) from None
    return file


def _folder(path: str) -> str:
    """The folder, made if need be. KV tells of prompts: it belongs to this user alone."""
    try:
        os.makedirs(path, mode=0o700, exist_ok=True)
        found = os.stat(path)
    except OSError as error:
        raise ConfigError(f"kv_disk_path={path!r} cannot be used: {error}") from None
    if not stat.S_ISDIR(found.st_mode):
        raise ConfigError(f"kv_disk_path={path!r} is no folder; name one")
    if found.st_uid != os.geteuid() or found.st_mode & (stat.S_IWGRP | stat.S_IWOTH):
        raise ConfigError(
            f"kv_disk_path={path!r} may be written to by other users; name a folder of your own (chmod go-w)"
        )
    return path


def _make_room(own: str, siblings: Sequence[str], num_bytes: int) -> None:
    """Files of other models and of other arithmetic go, the oldest first, until all that is there fits; not those in use.

    siblings: of the other ranks, which may not have opened them yet.
    """
    for path in Path(own).parent.glob(f"{PREFIX}*{SUFFIX}.*"):  # of a process that was killed while it made a file
        with contextlib.suppress(OSError):
            if path.stat().st_mtime < time.time() - MAKING_S:
                os.unlink(path)
    others: list[tuple[float, int, Path]] = []
    for path in Path(own).parent.glob(f"{PREFIX}*{SUFFIX}"):
        with contextlib.suppress(OSError):
            found = path.stat()
            if str(path) not in (own, *siblings):
                others.append((found.st_mtime, 512 * found.st_blocks, path))
    total = sum(size for _, size, _ in others)
    for _, size, path in sorted(others):
        if total + (1 + len(siblings)) * os.stat(own).st_size <= num_bytes:
            return
        with contextlib.suppress(OSError):
            fd = os.open(f"{path}", os.O_RDWR | os.O_CLOEXEC | os.O_NOFOLLOW)
            try:
                fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
                os.unlink(path)
                total -= size
                logger.info("%s is removed: it was of another model, or of other arithmetic", path)
            finally:
                os.close(fd)


def keys_of(hashes: bytes) -> NDArray[np.uint64]:
    """As `SlotFile` takes them, [n, 4]."""
    return np.frombuffer(hashes, np.uint64).reshape(-1, KEY_BYTES // 8)


class TierDirectory:
    """What the files have, by block hashes (`scheduling.tiers.transfers.Directory`)."""

    def __init__(self, files: Sequence[Sequence[SlotFile]], mask_path: str | None = None) -> None:
        """files: of each rank. mask_path: of memory that outlives this scheduler: the next one forgets the same. None: it knows of
        no reset."""
        self._of_ranks = files
        self._files = [file for own in files for file in own]
        self._mask: NDArray[np.uint64] | None = None
        """What makes other keys of the hashes, once everything was to be forgotten. So nothing of before is found here, and nothing
        of afterwards by a later engine, which may have other weights."""
        self._mask_fd = -1
        if mask_path is not None:
            self._mask_fd = os.open(mask_path, os.O_RDWR | os.O_CLOEXEC)
            mask = os.pread(self._mask_fd, KEY_BYTES, 0)
            if mask:
                self._mask = np.frombuffer(mask, np.uint64)

    def keys(self, hashes: bytes) -> NDArray[np.uint64]:
        """The keys of these hashes."""
        keys = keys_of(hashes)
        return keys if self._mask is None else keys ^ self._mask

    def count(self, hashes: bytes) -> int:
        if not hashes or not self._has(hashes[:KEY_BYTES])[0]:  # most prompts begin like none before
            return 0
        found = self._has(hashes)
        return int(found.size if found.all() else found.argmin())

    def _has(self, hashes: bytes) -> NDArray[np.bool_]:
        keys = self.keys(hashes)
        found: NDArray[np.bool_] = np.ones(len(keys), np.bool_)
        for files in self._of_ranks:
            has_part: NDArray[np.bool_] = np.zeros(len(keys), np.bool_)
            for file in files:
                has_part |= file.contains(keys)
            found &= has_part
        return found

    def missing(self, hashes: bytes) -> list[bool]:
        keys = self.keys(hashes)
        lacks: NDArray[np.bool_] = np.zeros(len(keys), np.bool_)
        for file in self._files:
            lacks |= ~file.contains(keys)
        return list(lacks.tolist())

    def remove(self, hashes: bytes) -> None:
        self.remove_keys(self.keys(hashes))

    def remove_keys(self, keys: NDArray[np.uint64]) -> None:
        """As `remove`, of what may have been stored before the last `forget_all`."""
        for file in self._files:
            file.remove(keys)

    def forget_all(self) -> None:
        mask = secrets.token_bytes(KEY_BYTES)
        if self._mask_fd >= 0:
            os.pwrite(self._mask_fd, mask, 0)
        self._mask = np.frombuffer(mask, np.uint64)

    def close(self) -> None:
        if self._mask_fd >= 0:
            os.close(self._mask_fd)
            self._mask_fd = -1
        for file in self._files:
            file.close()
