"""Observation that fails: a full disk under record=, a folder that vanishes. It stops itself, and the service goes on."""

from __future__ import annotations

import logging
import os
import resource
import shutil
import signal
import stat
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import anyio
import pytest

from actorllm import AsyncLLM, LLMEngine, SamplingParams
from actorllm.actors.record_file import fresh_scheduler, read_recording
from actorllm.errors import ConfigError, EngineError
from actorllm.scheduling.telemetry.recording import replay
from tests.hostile.bystander import bystander

FULL_BYTES = 20_000


@pytest.fixture
def full_disk() -> Iterator[None]:
    """No file of this process, or of one that it starts, grows beyond FULL_BYTES."""
    was = resource.getrlimit(resource.RLIMIT_FSIZE)
    before = signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
    resource.setrlimit(resource.RLIMIT_FSIZE, (FULL_BYTES, was[1]))
    yield
    resource.setrlimit(resource.RLIMIT_FSIZE, was)
    signal.signal(signal.SIGXFSZ, before)


async def recording_of(llm: AsyncLLM) -> dict[str, Any]:
    told: dict[str, Any] = (await llm.stats())["scheduler"]["recording"]
    return told


@pytest.mark.usefixtures("full_disk")
async def test_a_recording_that_finds_no_room_stops_alone(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    file = tmp_path / "run"
    caplog.set_level(logging.ERROR)
    async with (
        AsyncLLM("storyteller", topology="inline", num_threads=1, record=file) as llm,
        bystander(llm, max_tokens=100) as steady,
    ):
        while (await recording_of(llm))["stopped"] is None:
            await steady.wait(50)
        assert "File too large" in (await recording_of(llm))["stopped"]
        await steady.wait(100)
    assert sum("recording" in record.getMessage() for record in caplog.records) == 1
    assert os.listdir(tmp_path) == ["run"]
    assert file.stat().st_size <= FULL_BYTES
    assert sum(1 for _ in replay(read_recording(file), fresh_scheduler(file))) > 9, "it can be read up to there"


async def test_no_scheduler_dies_of_it(tmp_path: Path) -> None:
    """With processes: the scheduler lives on, as does one that is started again where nothing can be written any more."""
    folder = tmp_path / "gone"
    folder.mkdir()
    async with AsyncLLM("storyteller", num_threads=1, dtype="float32", record=folder / "run") as llm:
        await llm.start()
        scheduler = llm._engine.pids["scheduler"]
        resource.prlimit(scheduler, resource.RLIMIT_FSIZE, (2000, 2000))
        async with bystander(llm, max_tokens=100) as steady:
            while (await recording_of(llm))["stopped"] is None:
                await steady.wait(20)
            assert llm._engine.pids["scheduler"] == scheduler
            shutil.rmtree(folder)
            os.kill(scheduler, signal.SIGKILL)
            await steady.wait(120)
            told = await recording_of(llm)
        assert told["path"].endswith("run.2")
        assert "No such file" in told["stopped"]
        assert (await llm.stats())["supervisor"]["num_recoveries"] == 1


@pytest.mark.parametrize("kind", ["link", "hard link", "pipe", "device", "folder"])
async def test_what_is_no_file_of_ones_own_is_refused(tmp_path: Path, kind: str) -> None:
    """And what is behind it stays what it is."""
    victim, path = tmp_path / "victim", tmp_path / "run"
    victim.write_text("precious")
    match kind:
        case "link":
            path.symlink_to(victim)
        case "hard link":
            path.hardlink_to(victim)
        case "pipe":
            os.mkfifo(path)
        case "device":
            path = Path("/dev/full")
        case "folder":
            path.mkdir()
    for start in (start_async, start_stepped):
        with pytest.raises(ConfigError, match=r"record='.*' (is a link|is no regular file|cannot be written)"):
            await start(path)
    assert victim.read_text() == "precious"


async def start_async(path: Path) -> None:
    async with AsyncLLM("storyteller", num_threads=1, record=path) as llm:
        await llm.start()


async def start_stepped(path: Path) -> None:
    LLMEngine("storyteller", topology="inline", num_threads=1, record=path)


async def test_a_recording_is_for_its_owner_alone(tmp_path: Path) -> None:
    for name in ("new", "old"):
        file = tmp_path / name
        if name == "old":
            file.touch(mode=0o644)
        async with AsyncLLM("storyteller", topology="inline", num_threads=1, record=file) as llm:
            await llm.complete("x", SamplingParams(max_tokens=1))
        assert stat.S_IMODE(file.stat().st_mode) == 0o600
        assert file.stat().st_size > 0


async def test_the_file_of_another_user_is_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    file = tmp_path / "run"
    file.write_text("precious")
    monkeypatch.setattr(os, "geteuid", lambda: file.stat().st_uid + 1)
    with pytest.raises(ConfigError, match="belongs to another user"):
        await start_stepped(file)
    assert file.read_text() == "precious"


async def test_a_profile_whose_folder_vanishes_is_an_error_of_who_asked(tmp_path: Path) -> None:
    folder = tmp_path / "traces"
    profiler = {"profiler": "torch", "torch_profiler_dir": str(folder)}
    async with (
        AsyncLLM("storyteller", topology="inline", num_threads=1, profiler_config=profiler) as llm,
        bystander(llm, max_tokens=60) as steady,
    ):
        await llm.start_profile()
        await steady.wait(5)
        folder.write_text("now it is a file")
        with pytest.raises(EngineError, match="the profile cannot be written"):
            await llm.stop_profile()
        await steady.wait(60)
        folder.unlink()
        await llm.start_profile()
        await llm.stop_profile()
        assert len(list(folder.iterdir())) == 1


async def test_a_timeline_that_nobody_takes_is_bounded(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("actorllm.actors.timeline.MAX_EVENTS", 50)
    async with (
        AsyncLLM("storyteller", topology="inline", num_threads=1) as llm,
        bystander(llm, max_tokens=40) as steady,
    ):
        await anyio.to_thread.run_sync(llm._engine.ask_scheduler("start_timeline").result)
        await steady.wait(60)
        told = (await llm.stats())["scheduler"]["timeline"]
        assert told["num_events"] == 50
        assert told["num_dropped"] > 50
