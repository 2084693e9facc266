"""How many threads, and what their runtime is told. Nothing here needs torch."""

from __future__ import annotations

import platform
import subprocess
import sys
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from actorllm.config import EngineConfig
from actorllm.errors import ConfigError
from actorllm.model import threads
from actorllm.model.threads import worker_environment


def test_the_environment_follows_the_configuration(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("OMP_NUM_THREADS", "OMP_WAIT_POLICY", "GOMP_SPINCOUNT", "GLIBC_TUNABLES"):
        monkeypatch.delenv(name, raising=False)
    environment = worker_environment(EngineConfig.from_arguments("storyteller", num_threads=3))
    assert environment["OMP_NUM_THREADS"] == "3"
    assert 0 < int(environment["GOMP_SPINCOUNT"]) < 100_000, "a team that spins forever starves everyone else"
    monkeypatch.setenv("OMP_NUM_THREADS", "7")
    monkeypatch.setenv("GLIBC_TUNABLES", "glibc.malloc.check=3")
    kept = worker_environment(EngineConfig.from_arguments("storyteller"))
    assert not {"OMP_NUM_THREADS", "GLIBC_TUNABLES"} & set(kept), "what the user has set is left alone"


@pytest.mark.skipif(platform.libc_ver()[0] != "glibc", reason="the allocator of another C library")
def test_the_allocator_knows_its_settings() -> None:
    """A misspelled tunable is ignored in silence; the loader lists those it has taken."""
    loader = next(Path("/").glob("lib*/ld-linux*.so.*"), None)
    if loader is None:
        pytest.skip("no dynamic loader at its usual place")
    wanted = worker_environment(EngineConfig.from_arguments("storyteller"))["GLIBC_TUNABLES"]
    listed = subprocess.run(
        [loader, "--list-tunables"], env={"GLIBC_TUNABLES": wanted}, check=False, capture_output=True, text=True
    )
    if listed.returncode:
        pytest.skip("a loader that cannot list its tunables")
    values = {line.split(":")[0]: int(line.split()[1], 0) for line in listed.stdout.splitlines() if "malloc" in line}
    for name, _, value in (setting.partition("=") for setting in wanted.split(":")):
        assert values[name] == int(value)


def test_every_core_is_used_unless_told_otherwise(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(threads, "num_cores", lambda: 12)
    assert threads.num_threads(EngineConfig.from_arguments("storyteller")) == 12
    assert threads.num_threads(EngineConfig.from_arguments("storyteller", num_threads=1)) == 1


@pytest.mark.parametrize(("cores", "share", "ranks", "expected"), [
    (12, 1 / 3, 1, 4), (12, 1.0, 1, 12), (12, 0.5, 2, 3), (2, 0.25, 1, 1), (100, 0.29, 1, 29), (10, 1 / 3, 1, 3),
])  # fmt: skip
def test_a_share_of_the_cores_is_given_to_the_threads(
    monkeypatch: pytest.MonkeyPatch, cores: int, share: float, ranks: int, expected: int
) -> None:
    monkeypatch.setattr(threads, "num_cores", lambda: cores)
    config = replace(EngineConfig.from_arguments("storyteller", cpu_share=share), world_size=ranks)
    assert threads.num_threads(config) == expected
    assert threads.num_threads(replace(config, num_threads=7)) == 7, "num_threads counts before it"


@pytest.mark.parametrize("share", [0, -0.5, 1.5, float("nan"), True, "half"])
def test_a_share_that_is_none_is_refused(share: Any) -> None:
    with pytest.raises(ConfigError, match=r"cpu_share=.* must be more than 0 and at most 1"):
        EngineConfig.from_arguments("storyteller", cpu_share=share)


def test_torch_is_not_loaded() -> None:
    code = "import sys, actorllm.model.threads; sys.exit('torch' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code], check=False).returncode == 0
