"""What is forgotten stays forgotten: for the next scheduler, and for what is being stored at that moment."""

from __future__ import annotations

import errno
import os
from collections.abc import Callable, Coroutine
from dataclasses import replace
from pathlib import Path
from typing import Any, cast

import numpy as np
import pytest
from anyio import run

from actorllm.actors.memory_file import MemoryFile
from actorllm.actors.tiers.fingerprint import WHOLE_BYTES, fingerprint_of
from actorllm.actors.tiers.slot_file import SlotFile
from actorllm.actors.tiers.tier_files import TierDirectory, keys_of, open_tiers
from actorllm.actors.tiers.tier_transfers import TierTransfers
from actorllm.config import EngineConfig
from actorllm.errors import EngineError, PeerLostError
from actorllm.scheduling.tiers.transfers import BlockStore
from tests.actors.tiers.slots import block, key, make


def test_the_next_scheduler_knows_of_a_reset(tmp_path: Path) -> None:
    memory = MemoryFile("test-mask")
    file = make(tmp_path / "slots")
    file.write(key(1), block(1))
    first = TierDirectory([[file]], memory.path)
    assert first.count(key(1).tobytes()) == 1
    first.forget_all()
    assert first.count(key(1).tobytes()) == 0
    file.write(first.keys(key(2).tobytes())[0], block(2))
    second = TierDirectory([[file]], memory.path)
    assert second.count(key(1).tobytes()) == 0, "it was stored before the reset"
    assert second.count(key(2).tobytes()) == 1, "it was stored after the reset"
    second.close()
    first.close()
    memory.close()


@pytest.mark.parametrize("error", [None, PeerLostError("it is gone"), EngineError("it ends")])
def test_what_was_being_stored_at_a_reset_leaves_the_file(tmp_path: Path, error: Exception | None) -> None:
    file = make(tmp_path / "slots")
    directory = TierDirectory([[file]])
    job = BlockStore(key(1).tobytes(), np.array([3], np.int32))

    class Host:
        """Of a worker that ends its store after the reset."""

        scheduler: Any
        has_workers = True

        def wake(self) -> None: ...

        def start_soon(self, function: Callable[..., Coroutine[Any, Any, None]], *args: Any) -> None:
            run(function, *args)

        async def ask_all(self, link: Any, verb: str, timeout: float = 0.0, **arguments: Any) -> list[Any]:
            job.is_void = True
            directory.forget_all()
            (stored,) = keys_of(arguments["data"].tobytes())
            assert file.write(stored, block(1))
            if error is not None:
                raise error
            return [(1, 0.1)]

    class Moves:
        """As `Transfers` with one store to do."""

        is_moving = False

        def __init__(self) -> None:
            self.jobs = [job]

        def next(self, now: float, is_idle: bool) -> list[BlockStore]:
            jobs, self.jobs = self.jobs, []
            return jobs

        def stored(self, store: BlockStore, num_stored: int, seconds: float) -> None:
            directory.remove(store.hashes)

    class Scheduler:
        is_idle = True
        transfers = Moves()

    class Gate:
        num_holders = 0

    host = Host()
    host.scheduler = Scheduler()
    TierTransfers(host, cast(Any, Gate()), directory, lambda: cast(Any, None)).before_plan()
    assert not file.num_used, "a later engine would find it"
    directory.close()


def test_files_that_differ_anywhere_have_another_fingerprint(tmp_path: Path) -> None:
    config = EngineConfig.from_arguments("storyteller")
    folder = tmp_path / "model"
    folder.mkdir()
    config = replace(config, model=replace(config.model, path=str(folder)))
    small = bytearray(100_000)
    (folder / "small").write_bytes(small)
    with (folder / "large").open("wb") as large:
        large.truncate(WHOLE_BYTES + 1)
    before = fingerprint_of(config, "")
    assert fingerprint_of(config, "") == before
    small[50_000] = 1
    (folder / "small").write_bytes(small)
    after = fingerprint_of(config, "")
    assert after != before
    with (folder / "large").open("r+b") as large:
        large.seek(500_000)
        large.write(b"\1")
    assert fingerprint_of(config, "") != after


def open_one(folder: Path, num_bytes: int) -> SlotFile:
    cache = replace(
        EngineConfig.from_arguments("storyteller").cache,
        disk_path=str(folder), disk_bytes=num_bytes, tier_fingerprint="ab" * 32, tier_slot_bytes=1000,
    )  # fmt: skip
    (file,) = open_tiers(cache)
    return file


def test_what_a_killed_process_was_making_goes(tmp_path: Path) -> None:
    old, new = tmp_path / "actorllm-kv-cd-8.slots.17-ab", tmp_path / "actorllm-kv-cd-8.slots.18-ab"
    for path in (old, new):
        path.touch()
    os.utime(old, (0, 0))
    open_one(tmp_path, 50_000).close()
    assert not old.exists()
    assert new.exists(), "its process may live"


def test_engines_that_give_a_folder_other_sizes_keep_their_files(tmp_path: Path) -> None:
    first = open_one(tmp_path, 50_000)
    first.write(key(1), block(1))
    second = open_one(tmp_path, 90_000)
    again = open_one(tmp_path, 50_000)
    assert again.contains(key(1)[None]).all(), "its file was in use"
    for file in (first, second, again):
        file.close()


def test_a_file_system_without_locks_keeps_nothing(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    file = make(tmp_path / "slots")

    def refuse(kind: int, number: int) -> None:
        raise OSError(errno.ENOLCK, "no locks available")

    monkeypatch.setattr(file, "_lock", refuse)
    assert not file.write(key(1), block(1))
    assert not file.num_used
    file.close()
