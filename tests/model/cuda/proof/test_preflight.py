"""What a machine lacks is said before anything is loaded, in one sentence each, with the way out."""

from __future__ import annotations

from pathlib import Path

import pytest

from actorllm.errors import ConfigError
from actorllm.model.cuda.proof import preflight


@pytest.fixture(autouse=True)
def good_machine(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    (tmp_path / "Python.h").touch()
    monkeypatch.delenv("CC", raising=False)
    monkeypatch.setattr(preflight.shutil, "which", lambda name: f"/usr/bin/{name}")
    monkeypatch.setattr(preflight, "python_header", lambda: tmp_path / "Python.h")
    monkeypatch.setattr(preflight, "driver_version", lambda: (12, 4))


def test_nothing_is_said_of_a_good_machine() -> None:
    assert preflight.check(8 << 30) == []
    assert preflight.captures_dependents((12, 3))


def test_no_compiler(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(preflight.shutil, "which", lambda _: None)
    with pytest.raises(
        ConfigError, match=r"device='cuda': Triton .* neither gcc nor clang is installed; install gcc, or set CC"
    ):
        preflight.check()
    monkeypatch.setenv("CC", "my-cc")
    with pytest.raises(ConfigError, match="CC=my-cc cannot be run"):
        preflight.check()


def test_no_headers(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setattr(preflight, "python_header", lambda: tmp_path / "missing" / "Python.h")
    with pytest.raises(ConfigError, match=r"Python\.h is missing; install python3-dev"):
        preflight.check()


def test_no_driver(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(preflight, "driver_version", lambda: None)
    with pytest.raises(
        ConfigError, match=r"no driver of NVIDIA is found \(libcuda.so.1\); install one, or use device='cpu'"
    ):
        preflight.check()
    assert not preflight.captures_dependents(None)


def test_an_old_driver_costs_speed_and_no_more(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(preflight, "driver_version", lambda: (12, 2))
    (warning,) = preflight.check()
    assert "supports CUDA 12.2, and graphs with dependent launches need 12.3" in warning.what
    assert not preflight.captures_dependents((12, 2))


def test_a_full_gpu() -> None:
    with pytest.raises(ConfigError, match="512 MiB of the GPU's memory are free, and an engine needs 1024"):
        preflight.check(512 << 20)


def test_all_that_is_wrong_is_said_at_once(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(preflight.shutil, "which", lambda _: None)
    monkeypatch.setattr(preflight, "driver_version", lambda: None)
    assert [finding.is_error for finding in preflight.preflight(0)] == [True] * 3
