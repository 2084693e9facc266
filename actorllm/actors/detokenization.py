"""`Renderer`: what the scheduler decided about tokens, as rows of text for frontends.

Owns the text of every request that wants some (`Sequence.attachment`), and what is held back of those that want fewer outputs
than tokens (`output_buffer`). Pure but for the clock, and called on the scheduler actor's loop only. A request whose text cannot be
made ends with the error; every other one goes on.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterable
from typing import Any, TypeAlias

import numpy as np

from actorllm.actors.output_buffer import OutputBuffer
from actorllm.clock import now
from actorllm.errors import is_failure
from actorllm.messages import NO_F32, NO_I32, Outputs, Submit
from actorllm.messages.embeds import ids_before_text
from actorllm.messages.logprobs import LogprobSpan, columns_of
from actorllm.scheduling.events import End, Events
from actorllm.scheduling.sequence import Key, Sequence
from actorllm.scheduling.telemetry.request_counters import RequestCounters
from actorllm.text.request_text import RequestText
from actorllm.text.token_text import LogprobText, TokenText
from actorllm.text.tokenizer import Tokenizer
from actorllm.types.outputs import FinishReason

logger = logging.getLogger(__name__)

MAX_OUTPUT_BYTES = 4 << 20
"""From about here on the rows of a turn go on in another message. One row is never more than a few MiB (`output_buffer`)."""
ENTRY_BYTES = 20
"""Of a log-probability, about: an id, a value, the text of its token and where that ends."""
TOKEN_BYTES = 8
"""Of a token and its text, about."""

Finish: TypeAlias = Callable[[Iterable[tuple[Sequence, FinishReason, int | str | None]], float], list[End]]
"""`Scheduler.finish`."""


class OutputRows:
    """The rows of one `Outputs` message while it is put together."""

    __slots__ = (
        "cached",
        "counts",
        "ends",
        "index",
        "is_full",
        "logprob_texts",
        "num_bytes",
        "rids",
        "spans",
        "text",
        "text_ends",
        "text_length",
        "tokens",
        "vector_rows",
        "vectors",
    )

    def __init__(self) -> None:
        self.num_bytes = 0
        """Of what makes a row large: log-probabilities, vectors, many tokens at once."""
        self.is_full = False
        self.rids: list[int] = []
        self.index: list[int] = []
        self.tokens: list[int] = []
        self.counts: list[int] = []
        self.text: list[str] = []
        self.text_ends: list[int] = []
        self.text_length = 0
        self.ends: list[list[Any]] = []
        self.vector_rows: list[int] = []
        self.vectors: list[Any] = []
        self.spans: list[LogprobSpan] = []
        self.logprob_texts: list[str] = []
        self.cached: list[int] = []

    def add(self, rid: int, index: int, tokens: list[int], text: str) -> None:
        self.rids.append(rid)
        self.index.append(index)
        self.tokens += tokens
        self.counts.append(len(tokens))
        self.text.append(text)
        self.text_length += len(text)
        self.text_ends.append(self.text_length)
        if len(tokens) > 1:
            self._weigh(TOKEN_BYTES * len(tokens))

    def _weigh(self, num_bytes: int) -> None:
        self.num_bytes += num_bytes
        self.is_full = self.num_bytes >= MAX_OUTPUT_BYTES

    def add_logprobs(self, spans: Iterable[tuple[LogprobSpan, list[str] | None]]) -> None:
        """Of the last row added, with the texts of their entries where they are made."""
        for span, texts in spans:
            self.spans.append(span.of_row(len(self.rids) - 1))
            self.logprob_texts += texts if texts is not None else [""] * span.ids.size
            self._weigh(ENTRY_BYTES * span.ids.size)

    def add_vector(self, vector: Any) -> None:
        """Of the last row added."""
        self.vector_rows.append(len(self.rids) - 1)
        self.vectors.append(vector)
        self._weigh(vector.nbytes)

    def end(self, end: End) -> None:
        """The request of the last row added has ended (fields as in RequestEnd)."""
        sequence = end.sequence
        queued, scheduled, first_token = sequence.queued, sequence.scheduled, sequence.first_token
        if first_token is not None:  # which may be of a scheduler before this one
            queued, scheduled = min(queued, first_token), None if scheduled is None else min(scheduled, first_token)
        self.ends.append(
            [
                len(self.rids) - 1,
                end.reason,
                end.stop_reason,
                end.error,
                queued,
                scheduled,
                first_token,
                sequence.last_token,
                sequence.num_preemptions,
                sequence.num_cached_tokens,
                sequence.num_wasted_tokens,
                sequence.num_nonfinite,
                sequence.num_recoveries,
                sequence.recovery_s,
                end.details,
                sequence.num_draft_tokens,
                sequence.num_accepted_tokens,
                sequence.accepted_per_position,
                *sequence.seconds,
            ]
        )

    def _logprob_columns(self) -> dict[str, Any]:
        columns = columns_of(self.spans)
        text = "".join(self.logprob_texts)
        if text:
            ends = np.cumsum([len(piece) for piece in self.logprob_texts], dtype=np.int32)
            columns |= {"logprob_text": text, "logprob_text_ends": ends}
        return columns

    def message(self, emitted: float) -> Outputs:
        is_plain = self.counts.count(1) == len(self.counts)
        return Outputs(
            rids=np.array(self.rids, np.int32),
            index=np.array(self.index, np.int32),
            tokens=np.array(self.tokens, np.int32),
            counts=NO_I32 if is_plain else np.array(self.counts, np.int32),
            text="".join(self.text),
            text_ends=np.array(self.text_ends, np.int32) if self.text_length else NO_I32,
            ends=self.ends,
            vector_rows=np.array(self.vector_rows, np.int32) if self.vectors else NO_I32,
            vectors=np.concatenate(self.vectors) if self.vectors else NO_F32,
            vector_ends=np.cumsum([v.size for v in self.vectors], dtype=np.int32) if self.vectors else NO_I32,
            **(self._logprob_columns() if self.spans else {}),
            cached=np.array(self.cached, np.int32) if self.cached else NO_I32,
            emitted=emitted,
        )


class Outgoing:
    """The messages of one turn of the loop, in the order in which they are to be sent: (frontend, rows)."""

    __slots__ = ("all", "last")

    def __init__(self) -> None:
        self.all: list[tuple[int, OutputRows]] = []
        self.last: dict[int, OutputRows] = {}
        """By frontend: where its next row goes, unless that is full."""

    def rows_for(self, frontend: int) -> OutputRows:
        """Where the next row of a frontend goes."""
        rows = self.last.get(frontend)
        if rows is None or rows.is_full:
            rows = self.last[frontend] = OutputRows()
            self.all.append((frontend, rows))
        return rows

    def first_of(self, frontend: int) -> OutputRows | None:
        """What the frontend gets first; None: nothing."""
        return next((rows for number, rows in self.all if number == frontend), None)


class Renderer:
    """See the module docstring."""

    def __init__(self, tokenizer: Tokenizer | None, tally: RequestCounters, finish: Finish) -> None:
        """tokenizer: None where no text is made. tally: counts every end that is rendered."""
        self._tokenizer = tokenizer
        self._token_text: TokenText | None = None
        self._counters = tally
        self._finish = finish
        self.output_buffer = OutputBuffer()

    # Requests

    def add(self, key: Key, message: Submit, sequence: Sequence | None) -> list[End]:
        """A request that the scheduler has taken on, as its message says it. Returns its end if it can have no text."""
        if message.stream_interval != 1 and message.pooling is None:
            is_first = message.is_resumed or not message.output.size  # it is to be known that this one goes on
            self.output_buffer.add(key, message.stream_interval, is_first=is_first)
        if sequence is not None and message.detokenize and self._tokenizer is not None:
            try:
                sequence.attachment = text = self._new_text(message, self._tokenizer)
                if sequence.rules is not None and sequence.rules.has_logprobs:
                    if self._token_text is None:
                        self._token_text = TokenText(self._tokenizer)
                    text.logprobs = LogprobText(self._token_text, message.output)
            except BaseException as error:  # of a tokenizer, also a panic in Rust: it fails its own request
                if not is_failure(error):
                    raise
                return self._fail(sequence, error)
        return []

    @staticmethod
    def _new_text(message: Submit, tokenizer: Tokenizer) -> RequestText:
        return RequestText(
            tokenizer,
            ids_before_text(message.prompt) if message.prompt_embeds.size else message.prompt,
            message.output,
            stop=message.stop,
            include_stop=message.include_stop,
            skip_special_tokens=message.skip_special_tokens,
            spaces_between_special_tokens=message.spaces_between_special_tokens,
            min_tokens=message.min_tokens,
        )

    def _fail(self, sequence: Sequence, error: BaseException) -> list[End]:
        """A request whose text cannot be made ends with the error; every other one goes on."""
        logger.error("the text of request %s cannot be made", sequence.key, exc_info=error)
        sequence.attachment = None
        ends = self._finish([(sequence, "error", None)], now())
        return [End(sequence, "error", error=f"its text cannot be made: {type(error).__name__}: {error}") for _ in ends]

    # Steps

    def render(self, events: Events) -> tuple[Outgoing, float]:
        """New tokens as text; ends what hit a stop string. Returns what is to be sent, and when it began."""
        began = now()
        outgoing = Outgoing()
        last = outgoing.last
        ends = {end.sequence: end for end in events.ends} if events.ends else {}
        spans = _spans_by_sequence(events) if events.logprobs else {}
        tokens = events.tokens.tolist()
        counts = events.counts.tolist() if events.counts.size else None
        output_buffer = self.output_buffer if self.output_buffer.held else None
        at = 0
        # Every row with new tokens: its text, its stop string if there is one, and then its place in a message.
        for row, (sequence, index) in enumerate(zip(events.sequences, events.index.tolist(), strict=True)):
            count = counts[row] if counts is not None else 1
            new = tokens[at : at + count]
            at += count
            piece = ""
            stop = None
            logprobs: list[tuple[LogprobSpan, list[str] | None]] = []
            end = ends.pop(sequence, None) if ends else None
            if sequence.attachment is not None:
                # The token that ends a request is part of its output, and of its text only on demand.
                has_end_token = end is not None and end.reason == "stop" and not sequence.submit.include_stop
                if has_end_token and sequence.grammar is not None:
                    has_end_token = not sequence.grammar.is_complete
                try:
                    piece, stop, used = sequence.attachment.push(new[:-1] if has_end_token else new)
                    if stop is not None:
                        new = new[:used]
                    elif end is not None:
                        piece += sequence.attachment.finish()
                    if spans:
                        logprobs = _with_texts(sequence, spans.pop(sequence, ()), len(new))
                except BaseException as error:  # of a tokenizer, also a panic in Rust: it fails its own request
                    if not is_failure(error):
                        raise
                    failed = self._fail(sequence, error)
                    end = failed[0] if failed else end
            elif spans:
                logprobs = _with_texts(sequence, spans.pop(sequence, ()), len(new))
            # Tokens behind the stop string were cut off above. The scheduler has not ended such a request yet.
            if stop is not None:
                if end is None:
                    (end,) = self._finish([(sequence, "stop", stop)], began)
                else:  # the same token also reached a limit: the text decides
                    end = End(sequence, "stop", stop)
            frontend, rid = sequence.key
            # A request with stream_interval is held back until enough tokens are there, or its end.
            if output_buffer is not None:
                due = output_buffer.due(sequence.key, (index, new, piece, logprobs), end is not None)
                if due is None:
                    continue
                index, new, piece, logprobs = due
            # One message per frontend, and another one when it is full.
            rows = last.get(frontend)
            if rows is None or rows.is_full:
                rows = outgoing.rows_for(frontend)
            rows.add(rid, index, new, piece)
            if logprobs:
                rows.add_logprobs(logprobs)
            if end is not None:
                rows.end(end)
                self._counters.add(end, index + len(new))
        for sequence in events.cached:
            frontend, rid = sequence.key
            first = outgoing.first_of(frontend)  # it is to be known before the token, which may be in any of them
            if first is not None:  # else nothing is due of it yet, and the end says it
                first.cached += (rid, sequence.num_cached_tokens)
        # Left over are spans, vectors and ends of requests without a new token in this step.
        if spans:
            self._add_prompt_logprobs(outgoing, spans, ends)
        if events.vectors:
            self._add_vectors(outgoing, events, ends)
        if ends:
            self._add_ends(outgoing, ends)
        return outgoing, began

    def _add_prompt_logprobs(
        self,
        outgoing: Outgoing,
        spans: dict[Sequence, list[LogprobSpan]],
        ends: dict[Sequence, End],
    ) -> None:
        """Of requests whose prompts go on. Adds to ends whose texts cannot be made."""
        for sequence, of_prompt in spans.items():
            try:
                logprobs = _with_texts(sequence, of_prompt, 0)
            except BaseException as error:  # of a tokenizer, also a panic in Rust: it fails its own request
                if not is_failure(error):
                    raise
                ends |= {failed_end.sequence: failed_end for failed_end in self._fail(sequence, error)}
                continue
            frontend, rid = sequence.key
            rows = outgoing.rows_for(frontend)
            rows.add(rid, -1, [], "")
            rows.add_logprobs(logprobs)

    def _add_vectors(self, outgoing: Outgoing, events: Events, ends: dict[Sequence, End]) -> None:
        """Takes from `ends` the requests that got their vector."""
        for sequence, vector in events.vectors:
            frontend, rid = sequence.key
            rows = outgoing.rows_for(frontend)
            rows.add(rid, 0, [], "")
            rows.add_vector(vector)
            end = ends.pop(sequence)
            rows.end(end)
            self._counters.add(end, 0)

    def _add_ends(self, outgoing: Outgoing, ends: dict[Sequence, End]) -> None:
        """Without new tokens: aborts, errors."""
        for sequence, end in ends.items():
            frontend, rid = sequence.key
            rows = outgoing.rows_for(frontend)
            last = self.output_buffer.due(sequence.key, (-1, [], self._rest_of(sequence), []), is_end=True)
            index, new, piece, logprobs = last or (-1, [], "", [])
            rows.add(rid, index, new, piece)
            rows.add_logprobs(logprobs)
            rows.end(end)
            self._counters.add(end, index + len(new))

    @staticmethod
    def _rest_of(sequence: Sequence) -> str:
        """The text held back of a request that ends without a further token."""
        try:
            return sequence.attachment.finish() if sequence.attachment is not None else ""
        except BaseException as error:  # of a tokenizer, also a panic in Rust: the request ends in any case
            if not is_failure(error):
                raise
            logger.exception("the last text of request %s cannot be made", sequence.key)
            return ""


def _spans_by_sequence(events: Events) -> dict[Sequence, list[LogprobSpan]]:
    spans: dict[Sequence, list[LogprobSpan]] = {}
    for sequence, span in events.logprobs:
        spans.setdefault(sequence, []).append(span)
    return spans


def _with_texts(
    sequence: Sequence, spans: Iterable[LogprobSpan], num_tokens: int
) -> list[tuple[LogprobSpan, list[str] | None]]:
    """The spans of a row that gives out num_tokens tokens, with the texts of their entries if text is made for it."""
    text = None if sequence.attachment is None else sequence.attachment.logprobs
    found: list[tuple[LogprobSpan, list[str] | None]] = []
    for span in spans:
        if not span.is_prompt and span.ranks.size > num_tokens:
            if not num_tokens:
                continue
            span = span.part(0, num_tokens)
        found.append((span, None if text is None else text.texts(span)))
    return found
