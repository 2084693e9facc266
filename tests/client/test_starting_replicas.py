"""A replica that is starting when something changes is told of it once it has started, however soon that is."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import anyio
import pytest

from actorllm.client.policy_changes import PolicyChanges
from actorllm.client.sleep import Sleep
from actorllm.client.weight_updates import WeightUpdates
from actorllm.config import EngineConfig
from actorllm.types.weight_version import FIRST_WEIGHTS

pytestmark = pytest.mark.anyio


class StartingFleet:
    """Replica 1 runs. Replica 2 has begun with the configuration of before, and runs as soon as the first is asked."""

    def __init__(self) -> None:
        self.config = EngineConfig.from_arguments("storyteller")
        self.told: dict[int, list[str]] = {1: [], 2: []}
        self.has_started = anyio.Event()

    def change_config(self, change: Callable[[EngineConfig], EngineConfig]) -> None:
        self.config = change(self.config)

    def starting(self) -> list[anyio.Event]:
        return [] if self.has_started.is_set() else [self.has_started]

    async def ask_all_schedulers(self, verb: str, **_: Any) -> int:
        for number in (1, 2) if self.has_started.is_set() else (1,):
            self.told[number].append(verb)
        self.has_started.set()
        return 0


async def test_of_policies() -> None:
    fleet = StartingFleet()
    await PolicyChanges(fleet)._set("edf", None)
    assert "set_policy" in fleet.told[2]


async def test_of_weights() -> None:
    fleet = StartingFleet()
    await WeightUpdates(fleet)._commit(FIRST_WEIGHTS, "keep")
    assert "commit_weights" in fleet.told[2]


async def test_of_sleep() -> None:
    fleet = StartingFleet()
    await Sleep(fleet).fall_asleep(1, "abort", "wait")
    assert "sleep" in fleet.told[2]
