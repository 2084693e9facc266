"""What no GPU has run is off unless the environment asks for it by name."""

from __future__ import annotations

import logging
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from actorllm.errors import ConfigError
from actorllm.model.cuda.collectives import Collectives
from actorllm.model.cuda.device import HostDevice
from actorllm.model.cuda.runner import CudaRunner
from tests.model.cuda.conftest import config_of


def runner_of(folder: Path, **arguments: Any) -> CudaRunner:
    runner = CudaRunner(config_of(folder, block_size=64, **arguments), show_progress=False, device=HostDevice())
    runner.load()
    return runner


@pytest.mark.parametrize(("asked_for", "is_recorded"), [("", False), (" recorded-modules , recorded-ranks", True)])
def test_steps_of_modules_are_graphs_on_request_only(
    folder: Callable[..., Path],
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
    asked_for: str,
    is_recorded: bool,
) -> None:
    monkeypatch.setenv("ACTORLLM_EXPERIMENTAL", asked_for)
    runner = runner_of(folder(model_type="qwen3"), model_impl="transformers")
    with caplog.at_level(logging.INFO):
        runner.allocate(8)
    assert runner.wants_to_record == is_recorded
    assert ("ACTORLLM_EXPERIMENTAL=recorded-modules would record them" in caplog.text) != is_recorded


def test_ranks_do_not_vote_where_nothing_is_recorded(
    folder: Callable[..., Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    class TwoRanks(Collectives):
        """Of which none can be asked for anything."""

        def __init__(self) -> None:
            super().__init__()
            self.size = 2

        def all_agree(self, is_so: bool) -> bool:
            raise AssertionError("a vote")

    monkeypatch.delenv("ACTORLLM_EXPERIMENTAL", raising=False)
    runner = runner_of(folder())
    runner.collectives = TwoRanks()
    runner.allocate(8)
    assert not runner.graphs.is_on
    assert runner.graphs.next_wanted() is None


def test_a_name_that_is_none_is_refused(folder: Callable[..., Path], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("ACTORLLM_EXPERIMENTAL", "recorded-ranks,tma")
    with pytest.raises(ConfigError, match="ACTORLLM_EXPERIMENTAL: 'tma' is none of recorded-ranks, recorded-modules"):
        runner_of(folder())
