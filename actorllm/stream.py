"""`RequestStream`: one request as its caller sees it, from `async for` to the final output.

The engine thread pushes what is new; the consumer takes everything that has accumulated in one output, so a slow consumer
gets fewer and larger outputs instead of a growing queue. No cancel scope is held across a yield: leaving the loop,
cancelling the task or dropping the last reference posts the abort, and the blocks are free within one step.
"""

from __future__ import annotations

import copy
from collections import deque
from collections.abc import Callable

from actorllm.actors.engine_thread import HostLoop, Waiter
from actorllm.actors.frontend import Delta
from actorllm.clock import to_epoch
from actorllm.messages import RequestEnd
from actorllm.request import CompletionOutput, FinishReason, Logprob, RequestMetrics, RequestOutput, RequestOutputKind

_NOTHING: deque[Delta] = deque()


class Mailbox:
    """Where the engine puts what belongs to one request. It outlives the stream, which must be free to be dropped."""

    __slots__ = ("deltas", "error", "has_end", "host", "is_aborted", "rid", "waiter", "wakes_at_end")

    def __init__(self, host: HostLoop | None = None, wakes_at_end: bool = False) -> None:
        self.host = host
        self.wakes_at_end = wakes_at_end
        """The consumer can do nothing with less than everything."""
        self.waiter: Waiter | None = None
        self.deltas: deque[Delta] = deque()
        self.has_end = False
        """The last delta there will ever be has been pushed."""
        self.error: BaseException | None = None
        self.rid: int | None = None
        """Known once the frontend has submitted the request."""
        self.is_aborted = False

    # On the engine thread or the intake thread

    def push(self, delta: Delta) -> None:
        self.deltas.append(delta)
        if delta.end is not None:
            self.has_end = True

    def fail(self, error: BaseException) -> None:
        self.error = error

    # On the host's loop

    def wake(self) -> None:
        if self.waiter is not None and (self.has_ended or not self.wakes_at_end):
            self.waiter.set()

    @property
    def has_ended(self) -> bool:
        """Whether nothing more will come."""
        return self.has_end or self.error is not None


class RequestStream:
    """Asynchronous iterator over the `RequestOutput`s of one request.

    May be created outside of a loop; it belongs to the loop that first waits for it. `await stream.aclose()` or
    `async with` end it early.
    """

    def __init__(
        self,
        request_id: str,
        prompt: str | None,
        output_kind: RequestOutputKind,
        arrival: float,
        mailbox: Mailbox,
        on_abort: Callable[[Mailbox], None],
        hold: object = None,
        *,
        has_logprobs: bool = False,
        has_prompt_logprobs: bool = False,
    ) -> None:
        self.request_id = request_id
        self.prompt = prompt
        self.prompt_token_ids: list[int] = []
        self._kind = output_kind
        self._arrival = arrival
        self._mailbox = mailbox
        self._on_abort = on_abort
        self._text = ""
        self._token_ids: list[int] = []
        self._logprobs: list[dict[int, Logprob]] | None = [] if has_logprobs else None
        self._cumulative_logprob: float | None = 0.0 if has_logprobs else None
        self._prompt_logprobs: list[dict[int, Logprob] | None] | None = [None] if has_prompt_logprobs else None
        self._first_emitted: float | None = None
        self._last_emitted: float | None = None
        self._end: RequestEnd | None = None
        self._is_over = False
        self._hold = hold
        """Keeps the engine running, until this stream is over."""

    @property
    def has_ended(self) -> bool:
        """Whether its last output, or its error, is there to be taken or was taken."""
        return self._is_over or self._mailbox.has_ended

    def __aiter__(self) -> RequestStream:
        return self

    async def __anext__(self) -> RequestOutput:
        while True:
            output = self.take()
            if output is not None:
                return output
            if self._is_over:
                raise StopAsyncIteration
            mailbox = self._mailbox
            if mailbox.waiter is None:
                host = HostLoop.current()
                mailbox.waiter = host.waiter()
                mailbox.host = host  # after the waiter: who finds the host may wake
                continue
            try:
                await mailbox.waiter.wait()
            except BaseException:
                self.abort()
                raise

    def take(self) -> RequestOutput | None:
        """Everything new as one output; None when there is nothing (yet, or any more). Raises the request's error."""
        if self._is_over:
            return None
        pending, error = self._mailbox.deltas, self._mailbox.error
        if self._kind is RequestOutputKind.FINAL_ONLY and not self._mailbox.has_end:
            pending = _NOTHING  # half an output is none
        if not pending:
            if error is not None:
                self._end_here()
                raise copy.copy(error) from error.__cause__  # one error may end many streams: each has its traceback
            return None
        new_tokens: list[int] = []
        new_logprobs: list[dict[int, Logprob]] | None = None if self._logprobs is None else []
        pieces: list[str] = []
        while pending:
            delta = pending.popleft()
            new_tokens += delta.tokens
            pieces.append(delta.text)
            if new_logprobs is not None and delta.logprobs is not None:
                new_logprobs += delta.logprobs
            if self._prompt_logprobs is not None and delta.prompt_logprobs is not None:
                self._prompt_logprobs += delta.prompt_logprobs
            if self._first_emitted is None and delta.tokens:
                self._first_emitted = delta.emitted
            self._last_emitted = delta.emitted
            if delta.end is not None:
                self._end = delta.end
        text = "".join(pieces)
        if new_logprobs:
            assert self._cumulative_logprob is not None
            self._cumulative_logprob += sum(next(iter(entries.values())).logprob for entries in new_logprobs)
        prompt_logprobs = self._prompt_logprobs
        if self._kind is RequestOutputKind.DELTA:
            self._prompt_logprobs = None if prompt_logprobs is None else []
        else:
            if self._logprobs is not None and new_logprobs is not None:
                self._logprobs += new_logprobs
                new_logprobs = self._logprobs.copy()
            self._token_ids += new_tokens
            self._text += text
            new_tokens, text = self._token_ids.copy(), self._text
        end = self._end
        stop_reason = end.stop_reason if end is not None else None
        reason: FinishReason | None = None
        if end is not None:
            self._end_here()
            reason = end.reason  # type: ignore[assignment]
        return RequestOutput(
            request_id=self.request_id,
            prompt=self.prompt,
            prompt_token_ids=self.prompt_token_ids,
            outputs=[
                CompletionOutput(0, text, new_tokens, reason, stop_reason, self._cumulative_logprob, new_logprobs)
            ],
            finished=end is not None,
            metrics=self._metrics(end),
            num_cached_tokens=end.num_cached_tokens if end is not None else 0,
            prompt_logprobs=prompt_logprobs,
        )

    def _metrics(self, end: RequestEnd | None) -> RequestMetrics:
        if end is None:
            first = None if self._first_emitted is None else to_epoch(self._first_emitted)
            last = None if self._last_emitted is None else to_epoch(self._last_emitted)
            return RequestMetrics(to_epoch(self._arrival), first_token_time=first, last_token_time=last)
        return RequestMetrics(
            arrival_time=to_epoch(self._arrival),
            queued_time=to_epoch(end.queued),
            first_scheduled_time=_epoch(end.scheduled),
            first_token_time=_epoch(end.first_token),
            last_token_time=_epoch(end.last_token),
            finished_time=_epoch(self._last_emitted),
            num_preemptions=end.num_preemptions,
            num_cached_tokens=end.num_cached_tokens,
            num_wasted_tokens=end.num_wasted_tokens,
        )

    def abort(self) -> None:
        """End the request where it is. Idempotent, from any thread; what was produced until then can still be taken."""
        if not self._mailbox.is_aborted and not self.has_ended:
            self._mailbox.is_aborted = True
            self._on_abort(self._mailbox)

    async def aclose(self) -> None:
        """End the request; nothing more comes out of this stream."""
        self.abort()
        self._end_here()

    def _end_here(self) -> None:
        self._is_over = True
        self._hold = None

    async def __aenter__(self) -> RequestStream:
        return self

    async def __aexit__(self, *exception: object) -> None:
        await self.aclose()

    def __del__(self) -> None:
        # Runs wherever the last reference goes, perhaps in the middle of anything: `abort` only posts.
        if hasattr(self, "_is_over"):
            self.abort()


class TextStream:
    """Asynchronous iterator over the new text of one request; as RequestStream in everything else."""

    def __init__(self, outputs: RequestStream) -> None:
        self._outputs = outputs

    @property
    def request_id(self) -> str:
        return self._outputs.request_id

    def __aiter__(self) -> TextStream:
        return self

    async def __anext__(self) -> str:
        while True:
            output = await self._outputs.__anext__()
            if output.outputs[0].text:
                return output.outputs[0].text

    async def aclose(self) -> None:
        """End the request; nothing more comes out of this stream."""
        await self._outputs.aclose()

    async def __aenter__(self) -> TextStream:
        return self

    async def __aexit__(self, *exception: object) -> None:
        await self.aclose()


def _epoch(monotonic_s: float | None) -> float | None:
    return None if monotonic_s is None else to_epoch(monotonic_s)
