"""`RequestMetrics`: when what happened to a request."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class RequestMetrics:
    """When what happened to a request: vLLM's `RequestStateStats`, and its older `RequestMetrics` as properties.

    Times are epoch seconds, all from one monotonic base, so that differences are exact; a `_ts` is 0.0, and a `_time`
    None, for what has not happened (yet). While a request runs only arrival, first and last token are known. With n > 1
    the times span all sequences and the counts add them up, but for num_cached_tokens, which is that of the first one.
    num_wasted_tokens counts tokens computed in vain: sampled after the sequence had ended. num_recoveries counts the deaths
    of processes that worked on it, and recovery_time the seconds it waited for its next tokens after them; then queued and
    scheduled, and the counts, are those since the last death of the scheduler.
    """

    arrival_time: float
    queued_ts: float = 0.0
    scheduled_ts: float = 0.0
    first_token_ts: float = 0.0
    last_token_ts: float = 0.0
    finished_time: float | None = None
    num_generation_tokens: int = 0
    num_preemptions: int = 0
    num_cached_tokens: int = 0
    num_wasted_tokens: int = 0
    num_recoveries: int = 0
    recovery_time: float = 0.0
    is_corrupted: bool = False
    """Its logits were not finite. Such a request fails; these are the metrics of its `RequestFailedError`."""
    num_nonfinite: int = 0
    """Values of its states and logits that were NaN or infinite."""
    num_draft_tokens: int = 0
    """Drafts that were checked (`speculative_config`), since the last death of the scheduler."""
    num_accepted_tokens: int = 0
    """Those of them that were right."""
    num_accepted_tokens_per_pos: tuple[int, ...] = ()
    """The same for each position behind the last token; empty: without `speculative_config`, before its end, or it had no slot."""
    scheduler_time: float | None = None
    """Seconds that the scheduler planned and worked off the steps that it was in; None before its end."""
    model_forward_time: float | None = None
    """Seconds of the worker in these steps, sampling included. A step serves many requests, and counts for each of them."""
    model_execute_time: float | None = None
    """Seconds from the launches of these steps to their results, the way to the worker and back included."""

    @property
    def first_token_latency(self) -> float:
        """Seconds from arrival to the first token, queueing included; 0.0 before it."""
        return self.first_token_ts - self.arrival_time if self.first_token_ts else 0.0

    @property
    def time_to_first_token(self) -> float | None:
        """As first_token_latency; None before the first token."""
        return self.first_token_latency if self.first_token_ts else None

    @property
    def queued_time(self) -> float | None:
        """When the scheduler heard of it."""
        return self.queued_ts or None

    @property
    def first_scheduled_time(self) -> float | None:
        """When a step first took it in; None before."""
        return self.scheduled_ts or None

    @property
    def first_token_time(self) -> float | None:
        """When its first token came; None before."""
        return self.first_token_ts or None

    @property
    def last_token_time(self) -> float | None:
        """When its last token came; None before there is one."""
        return self.last_token_ts or None

    @property
    def intake_time(self) -> float | None:
        """Seconds from arrival until the scheduler had it: the start of the engine, the chat template, the tokenizer."""
        return self.queued_ts - self.arrival_time if self.queued_ts else None

    @property
    def queue_time(self) -> float | None:
        """Seconds from there to the step that first took it in."""
        return self.scheduled_ts - self.queued_ts if self.scheduled_ts and self.queued_ts else None

    @property
    def time_in_queue(self) -> float | None:
        """Seconds from arrival to the step that first took it in: intake_time and queue_time, as in vLLM's older releases."""
        return self.scheduled_ts - self.arrival_time if self.scheduled_ts else None

    @property
    def is_watermarked(self) -> bool:
        """False: there are no watermarks."""
        return False

    @property
    def is_watermark_skipped(self) -> bool:
        """False, as is_watermarked."""
        return False
