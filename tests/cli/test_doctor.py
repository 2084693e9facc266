"""`actorllm doctor`: one line per check, and an exit status that says whether something is broken."""

from __future__ import annotations

import shutil
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace

import pytest

from actorllm.cli import doctor
from actorllm.model.cuda import ops
from actorllm.model.cuda.proof import memory


@pytest.fixture(autouse=True)
def no_kernel_stays_replaced(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Iterator[None]:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    yield
    for operation in ops.OPERATIONS.values():
        operation.is_replaced = False


def test_a_machine_without_a_gpu(capsys: pytest.CaptureFixture[str]) -> None:
    assert doctor.check() == 0
    lines = capsys.readouterr().out.splitlines()
    assert [line.split("  ")[0] for line in lines if not line.startswith(" ")] == [
        "python", "processor", "shared memory", "memory", "gpu",
    ]  # fmt: skip
    assert "the engine runs on the CPU" in lines[-1]


def test_a_gpu_that_was_asked_for_and_is_not_there(capsys: pytest.CaptureFixture[str]) -> None:
    assert doctor.check(device="cuda") == 1
    assert "gpu                broken" in capsys.readouterr().out


def test_little_shared_memory(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    monkeypatch.setattr(shutil, "disk_usage", lambda _: SimpleNamespace(free=64 << 20))
    assert doctor.check(device="cpu") == 1
    assert "64 MiB in /dev/shm, and an engine wants 256; give the container more" in capsys.readouterr().out


@pytest.mark.parametrize(("flags", "state"), [({"avx512_bf16", "avx2"}, "ok"), ({"avx2"}, "slow"), (set(), "slow")])
def test_processors(monkeypatch: pytest.MonkeyPatch, flags: set[str], state: str) -> None:
    monkeypatch.setattr(doctor, "_processor_flags", lambda: flags)
    assert {check.name: check.state for check in doctor._host_checks()}["processor"] == state


def test_kernels_and_graphs() -> None:
    def runner(is_on: bool) -> SimpleNamespace:
        return SimpleNamespace(graphs=SimpleNamespace(is_on=is_on))

    assert [check.state for check in doctor.kernel_checks("m", lambda _: runner(True))] == ["ok", "ok"]
    ops.replace(["embed"])
    kernels, graphs = doctor.kernel_checks("m", lambda _: runner(False))
    assert (kernels.state, graphs.state) == ("slow", "slow")
    assert "torch computes in place of embed" in kernels.told


def test_what_is_remembered() -> None:
    assert doctor.remembered_checks() == {"kernels": "not checked yet; actorllm doctor does"}
    memory.remember(memory.key_of("a GPU"), {})
    assert "checked 1 times" in doctor.remembered_checks()["kernels"]
    assert doctor.remembered_checks()["kernels"].endswith("all right")
    memory.remember(memory.key_of("another"), {"embed": "y is off"})
    assert doctor.remembered_checks()["kernels"].endswith("embed y is off")
