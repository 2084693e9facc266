"""Throughput and load of an engine as lines of the log: every ten seconds, or when they are asked for.

`StatisticsLog` turns two snapshots of the scheduler's statistics into a line. An idle engine is silent. With
`disable_log_stats=False`, `Engine` runs `report_periodically` on its own thread.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Awaitable, Callable, Mapping
from typing import Any

import anyio

from actorllm.errors import EngineError

logger = logging.getLogger(__name__)

INTERVAL_S = 10.0


class StatisticsLog:
    """What was reported last. Used on one thread at a time."""

    def __init__(self, now: float) -> None:
        """now: of a monotonic clock, in seconds."""
        self._since = now
        self._counted = (0, 0)
        self._was_idle = True

    def line(self, statistics: Mapping[str, Any], now: float) -> str:
        """Rates since the last line, and the load now. statistics: of the scheduler actor."""
        scheduler = statistics["scheduler"]
        counted = (scheduler["num_prefill_tokens"], scheduler["num_output_tokens"])
        before = self._counted if all(new >= old for new, old in zip(counted, self._counted, strict=True)) else (0, 0)
        seconds = max(now - self._since, 1e-9)
        prompts, outputs = ((new - old) / seconds for new, old in zip(counted, before, strict=True))
        self._since, self._counted = now, counted
        self._was_idle = not (prompts or outputs or scheduler["num_running"] or scheduler["num_waiting"])
        cache = scheduler["prefix_cache"]
        rate = cache["hits"] / cache["queries"] if cache and cache["queries"] else 0.0
        return (
            f"prompts: {prompts:.1f} tokens/s, outputs: {outputs:.1f} tokens/s, running: {scheduler['num_running']} requests, "
            f"waiting: {scheduler['num_waiting']} requests, KV cache: {scheduler['kv']['usage']:.1%} in use, prefix cache: "
            f"{rate:.1%} found"
        )

    def log(self, statistics: Mapping[str, Any]) -> None:
        """Write a line, whatever there is to tell."""
        logger.info(self.line(statistics, time.monotonic()))

    async def report_periodically(self, ask: Callable[[], Awaitable[Mapping[str, Any]]], interval_s: float) -> None:
        """Writes a line every so many seconds, and one more when the engine has become idle.

        ask: the scheduler, for its statistics. interval_s: in seconds.
        """
        while True:
            await anyio.sleep(interval_s)
            try:
                statistics = await ask()
            except EngineError:  # it recovers, or ends, and this task with it
                continue
            was_idle = self._was_idle
            line = self.line(statistics, time.monotonic())
            if not (was_idle and self._was_idle):
                logger.info(line)
