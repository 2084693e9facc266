"""`EmbeddedTarget`: replays against an engine in this process."""

from __future__ import annotations

import math
import os
from typing import TYPE_CHECKING

from actorllm.clock import from_epoch, to_epoch
from actorllm.errors import RequestFailedError
from actorllm.slo.live.replay import ReplayCall, ReplayRecord
from actorllm.slo.timeline import ABORTED
from actorllm.types.params import RequestOutputKind, SamplingParams
from actorllm.types.request_metrics import RequestMetrics

if TYPE_CHECKING:
    from actorllm.api.async_llm import AsyncLLM


class EmbeddedTarget:
    """Prompts are token ids, every request runs to its full length, and nothing is made text of."""

    backend = "actorllm"

    def __init__(self, llm: AsyncLLM) -> None:
        self._llm = llm
        self.model = llm.config.model.name
        self._name = f"replay-{os.urandom(4).hex()}"

    async def prepare(self) -> None:
        await self._llm.start()

    def row_of(self, request_id: str | None) -> int | None:
        """Of a request that was sent from here, by its name; None for others, and for warm-ups."""
        name, _, row = (request_id or "").rpartition("-")
        return int(row) if name == self._name else None

    @property
    def vocab_size(self) -> int:
        return self._llm.config.model.vocab_size

    @property
    def max_model_len(self) -> int:
        return self._llm.config.model.max_model_len

    async def send(self, call: ReplayCall, record: ReplayRecord) -> None:
        params = SamplingParams(
            max_tokens=call.max_tokens,
            ignore_eos=True,
            detokenize=False,
            seed=call.row & 0xFFFF,
            output_kind=RequestOutputKind.DELTA,
        )
        kind = call.kind
        stream = self._llm.generate(
            {"prompt_token_ids": call.prompt},
            params,
            f"{self._name}-{call.row}",
            priority=kind.priority,
            slo=kind.slo,
            is_latency_sensitive=kind.is_latency_sensitive,
            type_info=kind.label or None,
            tenant=call.tenant,
            deadline=None if kind.patience is None else call.due + kind.patience,
            arrival_time=to_epoch(call.due),
        )
        async with stream:
            try:
                async for output in stream:
                    token_ids = output.outputs[0].token_ids
                    record.got(len(token_ids), token_ids if call.is_continued else ())
                    if output.finished and output.metrics is not None:
                        _note(record, output.metrics)
                        if output.outputs[0].finish_reason == "abort":
                            record.outcome = ABORTED
            except RequestFailedError as error:
                if error.metrics is not None:
                    _note(record, error.metrics)
                raise


def _note(record: ReplayRecord, metrics: RequestMetrics) -> None:
    """What only the engine knows of it."""
    record.scheduled = from_epoch(metrics.scheduled_ts) if metrics.scheduled_ts else math.nan
    record.submitted = from_epoch(metrics.queued_ts) if metrics.queued_ts else math.nan
    record.reported = from_epoch(metrics.last_token_ts) if metrics.last_token_ts else math.nan
    record.num_preemptions = metrics.num_preemptions
    record.num_cached = metrics.num_cached_tokens or 0
    record.num_wasted = metrics.num_wasted_tokens
