"""`PolicyChanges`: other policies for a running engine, on all its replicas. A part of `Engine`.

First every scheduler builds them, and one that cannot is the end of it: nothing has changed. Then the configuration has them,
for every scheduler that is started from here on. At last every scheduler changes between two steps. Runs on the engine's thread.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import replace
from typing import Any, Protocol

import anyio

from actorllm.config import EngineConfig
from actorllm.errors import ConfigError, EngineError, InvalidParameterError, shown
from actorllm.scheduling.admission_policy import ADMISSIONS
from actorllm.scheduling.policy import policy_path
from actorllm.types.params import is_text

NO_ADMISSION = "none"
"""What a caller says for no admission policy; None leaves the one that there is."""

MAX_NAME = 500
"""Characters of a policy's name."""


class ChangedEngine(Protocol):
    """What a change asks of its engine."""

    @property
    def config(self) -> EngineConfig: ...
    def change_config(self, change: Callable[[EngineConfig], EngineConfig]) -> None: ...
    async def ask_all_schedulers(self, verb: str, **arguments: Any) -> Any: ...
    def starting(self) -> list[anyio.Event]: ...


def check_policy_names(scheduling_policy: object, admission_policy: object) -> None:
    """Raises InvalidParameterError for what is no name."""
    given = {"scheduling_policy": scheduling_policy, "admission_policy": admission_policy}
    for name, value in given.items():
        if value is not None and (not isinstance(value, str) or not is_text(value) or not 0 < len(value) <= MAX_NAME):
            raise InvalidParameterError(
                f"{name}={shown(value)} must be a name or 'module:Class' of at most {MAX_NAME} characters, or None"
            )
    if scheduling_policy is None and admission_policy is None:
        raise InvalidParameterError("set_policy() needs scheduling_policy, admission_policy, or both")


class PolicyChanges:
    """See the module docstring."""

    def __init__(self, engine: ChangedEngine) -> None:
        self._engine = engine
        self._is_under_way = False

    async def change(self, scheduling_policy: str | None, admission_policy: str | None) -> None:
        """Raises InvalidParameterError if there are no such policies, EngineError while another change is under way."""
        if self._is_under_way:
            raise EngineError("a change of the policy is under way; wait for it before the next one")
        self._is_under_way = True
        try:
            await self._change(scheduling_policy, admission_policy)
        finally:
            self._is_under_way = False

    async def _change(self, scheduling_policy: str | None, admission_policy: str | None) -> None:
        engine, present = self._engine, self._engine.config.scheduler
        policy = present.policy if scheduling_policy is None else policy_path(scheduling_policy)
        admission = present.admission if admission_policy is None else ADMISSIONS.path(admission_policy)
        if admission_policy == NO_ADMISSION:
            admission = None
        try:
            await engine.ask_all_schedulers("check_policy", timeout=math.inf, policy=policy, admission=admission)
        except ConfigError as error:
            raise InvalidParameterError(str(error)) from None

        try:
            await self._set(policy, admission)
        except ConfigError as error:
            # One that could be built at the first time and not at the second. Schedulers that have it go back, too: one that
            # is started again could not begin with it.
            await self._set(present.policy, present.admission)
            raise InvalidParameterError(f"{error}; the policies are those of before") from None

    async def _set(self, policy: str, admission: str | None) -> None:
        engine = self._engine

        def changed(config: EngineConfig) -> EngineConfig:
            return replace(config, scheduler=replace(config.scheduler, policy=policy, admission=admission))

        engine.change_config(changed)
        starting = engine.starting()
        await engine.ask_all_schedulers("set_policy", timeout=math.inf, policy=policy, admission=admission)
        while starting:  # it may have begun with the policy before, and was not asked
            for has_started in starting:
                await has_started.wait()
            starting = engine.starting()
            await engine.ask_all_schedulers("set_policy", timeout=math.inf, policy=policy, admission=admission)
