"""`GET /metrics`: the engine's `stats()` in Prometheus' text format, or in OpenMetrics. Pure; keeps nothing itself.

Names are vLLM's core names behind the prefix `actorllm:`. Those that mean the same in vLLM stand there a second time, behind
vLLM's prefix and with its labels. vLLM's dashboards, routers and autoscalers read these. Whatever the scheduler counts is counted
there, over all programs that use the engine, so any of them gives the whole picture. A scheduler that was started again counts
from zero, as Prometheus expects of one that was restarted.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from actorllm.client.metric_families import (
    PREFIX,
    VLLM_PREFIX,
    Family,
    buckets_of,
    families_of,
    labels_of,
    number_text,
    vllm_families,
)
from actorllm.server.board import LAG_BOUNDS

CONTENT_TYPE = "text/plain; version=0.0.4; charset=utf-8"
OPEN_METRICS = "application/openmetrics-text"
OPEN_METRICS_TYPE = f"{OPEN_METRICS}; version=1.0.0; charset=utf-8"


def render(
    stats: Mapping[str, Any],
    model: str,
    max_model_len: int,
    lag: Mapping[str, Any],
    *,
    is_open: bool = False,
    has_vllm_names: bool = True,
) -> bytes:
    """stats: of `AsyncLLM.stats`; of an engine that has not started yet there is little to tell. lag: of `Board.lag`.

    is_open: in OpenMetrics. has_vllm_names: what vLLM counts as well stands there under its name, too.
    """
    told = "How late the loops of the API processes came to what was due."
    lags = list(buckets_of(LAG_BOUNDS, lag))
    families = [*families_of(stats, max_model_len), Family("histogram", "api_loop_lag_seconds", told, lags)]
    lines: list[str] = []
    for family in families:
        _write(lines, PREFIX, model, family, is_open)
    for family in vllm_families(stats, max_model_len) if has_vllm_names else ():
        _write(lines, VLLM_PREFIX, model, family, is_open)
    return "\n".join([*lines, "# EOF\n" if is_open else ""]).encode()


def _write(lines: list[str], prefix: str, model: str, family: Family, is_open: bool) -> None:
    kind, name, told, samples = family
    suffix = "_total" if kind == "counter" else ""
    named = f"{prefix}{name}" if is_open else f"{prefix}{name}{suffix}"
    lines += (f"# HELP {named} {told}", f"# TYPE {named} {kind}")
    for part, more, value in samples:
        shown = _shown(labels_of(model, more))
        lines.append(f"{prefix}{name}{suffix}{part}{{{shown}}} {number_text(value)}")


def _shown(labels: Mapping[str, str]) -> str:
    return ",".join([f'{label}="{_escaped(text)}"' for label, text in labels.items()])


def _escaped(text: str) -> str:
    return text.replace("\\", r"\\").replace('"', r"\"").replace("\n", r"\n")
