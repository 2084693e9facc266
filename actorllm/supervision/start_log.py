"""`StartLog`: lines of the log about the start of an engine: what is loaded, that it still is, and what memory it has taken.

In the owner's process, through `logging` alone. Costs nothing if no logger takes such lines.
"""

from __future__ import annotations

import contextlib
import logging
import threading
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any

from actorllm.clock import now
from actorllm.config import EngineConfig

logger = logging.getLogger(__name__)

PERIOD_S = 30.0
"""Between two lines about a start that goes on."""

Resolve = Callable[[EngineConfig, dict[str, dict[str, Any]]], EngineConfig]


class StartLog:
    """Of one engine. `resolve` passes through what the workers say of themselves, `around` is around the start."""

    def __init__(self, resolve: Resolve) -> None:
        self._resolve = resolve
        self._sizes = ""

    def resolve(self, config: EngineConfig, facts: dict[str, dict[str, Any]]) -> EngineConfig:
        resolved = self._resolve(config, facts)
        self._sizes = _sizes(resolved, facts)
        return resolved

    @contextlib.contextmanager
    def around(self, config: EngineConfig) -> Iterator[None]:
        """config: as it is before the start."""
        if not logger.isEnabledFor(logging.INFO):
            yield
            return
        name, began = config.model.name, now()
        logger.info("loading %s", _described(config))
        is_over = threading.Event()

        def remind() -> None:
            while not is_over.wait(PERIOD_S):
                logger.info("still loading %s after %.0f s", name, now() - began)

        reminder = threading.Thread(target=remind, name="actorllm:start", daemon=True)
        has_reminder = False
        with contextlib.suppress(RuntimeError):  # no thread can be started now
            reminder.start()
            has_reminder = True
        try:
            yield
        finally:
            is_over.set()
            if has_reminder:
                reminder.join()
        logger.info("loaded %s in %.1f s: %s", name, now() - began, self._sizes)


def _described(config: EngineConfig) -> str:
    model = config.model
    size = 0
    if model.load_format != "dummy" and model.module is None:
        with contextlib.suppress(OSError):  # the worker says what is wrong with the folder
            size = sum(file.stat().st_size for file in Path(model.path).glob("*.safetensors"))
    weights = f", {_bytes(size)} of weights" if size else ""
    ranks = f" over {config.world_size} ranks" if config.world_size > 1 else ""
    source = model.path if model.module is None else "the application's module"
    return f"{model.name} ({model.architecture}, {model.dtype}{weights}) from {source}, for {config.device}{ranks}"


def _sizes(config: EngineConfig, facts: Mapping[str, Mapping[str, Any]]) -> str:
    cache, told = config.cache, []
    if weights := sum(fact.get("weight_bytes", 0) for fact in facts.values()):
        told.append(f"{_bytes(weights)} of weights in every step")
    if cache.num_blocks is not None and (block := sum(fact.get("block_bytes", 0) for fact in facts.values())):
        num_tokens = cache.num_blocks * cache.block_size
        told.append(f"KV cache of {_bytes(cache.num_blocks * block)} for {num_tokens:,} tokens")
    told.append(f"context of {config.model.max_model_len:,} tokens")
    told.append(f"up to {config.scheduler.max_num_seqs} sequences at a time")
    return ", ".join(told)


def _bytes(number: float) -> str:
    return f"{number / 2**30:.2f} GiB" if number >= 2**30 else f"{number / 2**20:.1f} MiB"
