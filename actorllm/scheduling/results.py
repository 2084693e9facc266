"""`Results`: how a reported step changes its requests.

Owns how tokens get to where they belong. In the steady case they go to the column of known tokens and the paged ids at once.
They go row by row where rows left meanwhile, got several tokens or none, or have logits that are not finite. A result is first
checked against the record of its step. One that contradicts its plan (`ContradictionError`) changes nothing, because nothing of
it can be believed. Used by `Scheduler.update`.

A row that left its slot keeps its token if it was preempted, and loses it if it ended. A request whose logits or states are not
finite ends, and what it had published is forgotten. If another request in a later step in flight may have taken that over, the
later steps are computed again.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import replace
from typing import Any

import numpy as np
from numpy.typing import NDArray

from actorllm.kvcache.manager import KVCacheManager
from actorllm.messages import I32, INVALID, NO_I32, NO_U8, StepFailed, StepResult
from actorllm.messages.logit_rules import SamplingRules
from actorllm.messages.logprobs import LogprobSpan, spans_of
from actorllm.messages.schema import WORKER, check_of_fields, violation
from actorllm.scheduling.batch import ONE, Batch, Rows
from actorllm.scheduling.events import End, Events
from actorllm.scheduling.ledger import Ledger, StepRecord
from actorllm.scheduling.policy import View
from actorllm.scheduling.prefix_cache import PrefixCache
from actorllm.scheduling.request_table import RequestTable
from actorllm.scheduling.sequence import Sequence, State
from actorllm.scheduling.stopping import Stopping
from actorllm.scheduling.telemetry.draft_counters import DraftCounters
from actorllm.types.logits_processors.travel import decode_errors

NO_SPANS: list[LogprobSpan] = []
"""Of most results. Never changed."""


NO_RULES = SamplingRules()

NEAR = 128
"""Tokens before its limit from which on a row is looked at in each step: more than a row computes in all steps in flight."""

U32_DTYPE = np.dtype(np.uint32)
"""To look at token ids with: a negative one is a very large one."""

_is_right_if_plain = check_of_fields("StepResult", ("step", "tokens", "started", "ended"))
"""Whether a result that is plain is as the schema says: its other columns are the shared empty ones."""

_is_right_if_run = check_of_fields(
    "StepResult",
    ("step", "tokens", "counts", "num_drafted", "started", "ended"),
    unbounded=("counts", "num_drafted"),
)
"""As `_is_right_if_plain`, of a result that is a run (`StepResult.is_run`): its plan says more of counts than the schema."""


class ContradictionError(ValueError):
    """A result cannot be that of its plan: the worker that made it is broken. Nothing of it was used."""


class Results:
    """Applies them, in launch order. max_tokens_per_row: that a step may sample, drafts included."""

    def __init__(
        self,
        view: View,
        *,
        vocab_size: int,
        max_tokens_per_row: int,
        vector_size: int,
        batch: Batch,
        kv: KVCacheManager,
        ledger: Ledger,
        table: RequestTable,
        cache: PrefixCache,
        stopping: Stopping,
        drafts: DraftCounters,
        is_simulated: bool = False,
    ) -> None:
        """is_simulated: results are right. Without prefix caching nothing reads the ids of sampled tokens and their places."""
        self._is_simulated = is_simulated
        self.num_output_tokens = 0
        self.num_corrupted = 0
        """Requests that ended because their states or logits were not finite."""
        self.num_nonfinite = 0
        """Values of all of them together."""
        self._view = view
        self._vocab_size = vocab_size
        self._max_tokens_per_row = max_tokens_per_row
        self.drafts = drafts
        self._vector_size = vector_size
        self._batch = batch
        self._kv = kv
        self._ledger = ledger
        self._table = table
        self._cache = cache
        self._stopping = stopping
        self._far_rows: Rows | None = None
        self._far_until = 0
        """Of these rows none can be at its limit before so many tokens of output, however they are shared out."""
        self._ends_of_run: I32 | None = None
        """Of the result that was checked last (`_right_run`)."""

    def check(self, result: StepResult, record: StepRecord | None) -> list[LogprobSpan]:
        """The log-probabilities that a result has. Raises ContradictionError when it cannot be that of its plan.

        record: None if the step is not the oldest in flight; the result is held against the schema alone.
        """
        if self._is_simulated:
            return NO_SPANS
        if result.counts is not NO_I32 and record is not None:
            self._ends_of_run = self._right_run(result, record)
            if self._ends_of_run is not None:
                return NO_SPANS
        is_plain = result.is_plain and _is_right_if_plain(result)
        error = None if is_plain else violation(result, WORKER)
        if error is None and record is not None:
            error = self._plain_contradiction(result, record) if is_plain else self._contradiction(result, record)
        if error is not None:
            raise ContradictionError(f"step {result.step}: {error}")
        if is_plain or record is None or not result.logprob_spans.size:
            return NO_SPANS
        return self._logprob_spans(result, record)

    def apply(self, result: StepResult, record: StepRecord, spans: list[LogprobSpan]) -> Events:
        """Publish what the step computed, append what it sampled, and end the requests that end with it."""
        bad_prompts = () if result.nonfinite_prefills is NO_I32 else set(result.nonfinite_prefills.tolist())
        # What the step has computed is found from now on, before its requests may end and leave their slots.
        if record.prefills:
            self._cache.publish_prefills(record.prefills, bad_prompts)
        if record.saves and self._cache.snapshots is not None:
            self._cache.snapshots.reported(record.saves, {record.prefills[row][0] for row in bad_prompts})
        # Tokens go by column where every row is still there, else row by row.
        rows = record.rows
        is_whole = self._batch.has_all(rows)
        if result.num_drafted.size:
            here = rows.slots
            if not is_whole:
                here = np.where(self._batch.generation[rows.slots] == rows.generations, rows.slots, np.int32(-1))
            self.drafts.observe(result.num_drafted, result.counts, here)
        plain = not (result.nonfinite_rows.size or result.vector_rows.size or self._table.tokenless)
        if not plain or not is_whole:
            events = self._append_rows(record, result)
        elif not result.counts.size:
            only_counts = self._is_simulated and self._kv.index is None
            append = self._count_column if only_counts else self._append_column
            events = append(record, result.tokens)
        elif not self._stopping.is_watching and (ends := self._ends_in(result)) is not None:
            events = self._append_runs(record, result.tokens, result.counts, ends)
        else:
            events = self._append_rows(record, result)
        if bad_prompts:
            events = replace(events, ends=(*events.ends, *self._end_bad_prompts(record, sorted(bad_prompts))))
        if spans:
            events = replace(events, logprobs=self._logprobs(record, spans, events))
        return events

    @staticmethod
    def check_failure(failure: StepFailed, record: StepRecord | None) -> None:
        """Raises ContradictionError when a step cannot have failed in this way. record: None if it is not in flight."""
        error = violation(failure, WORKER)
        if error is None and record is not None:
            error = _wrong_rows(failure.rows, len(record.named))
        if error is not None:
            raise ContradictionError(f"step {failure.step}: {error}")

    def _plain_contradiction(self, result: StepResult, record: StepRecord) -> str | None:
        """As `_contradiction`, of a result that is plain (`StepResult.is_plain`)."""
        num_rows = record.rows.slots.size
        if result.tokens.size != num_rows:
            return f"{result.tokens.size} tokens for a plan of {num_rows}"
        if num_rows and _most(result.tokens.view(U32_DTYPE)) >= self._vocab_size:
            return self._wrong_token()
        # Rows that end a prompt may want a vector only of a model that makes some: others were refused at their arrival.
        return self._wrong_vectors(result, record) if self._vector_size and record.num_decode < num_rows else None

    def _ends_in(self, result: StepResult) -> I32 | None:
        """Where the tokens of each row end in a result that was checked; None: some row has none."""
        if self._ends_of_run is not None:
            return self._ends_of_run
        if np.minimum.reduce(result.counts) < 1:
            return None
        ends: I32 = result.counts.cumsum(dtype=np.int32)
        return ends

    def _right_run(self, result: StepResult, record: StepRecord) -> I32 | None:
        """Where the tokens of each row end in a run without a contradiction, in which every row has some, by few looks at its
        columns; None: the slower way says what is wrong, if anything is."""
        tokens, counts, drafted = result.tokens, result.counts, result.num_drafted
        if not (result.is_run and _is_right_if_run(result)):
            return None
        num_rows, num_decode = record.rows.slots.size, record.num_decode
        if not 0 < num_rows <= tokens.size or counts.size != num_rows or drafted.size != num_rows:
            return None
        if num_decode < num_rows and (self._vector_size or drafted[num_decode:].any()):
            return None
        # With these bounds no sum wraps: of each row there are 0 to max_drafts drafts, and 1 to 1 + max_drafts tokens.
        as_u32, behind = drafted.view(U32_DTYPE), counts - drafted
        if not (
            as_u32.item(as_u32.argmax()) <= record.max_drafts
            and counts.item(counts.argmin()) > 0
            and behind.item(behind.argmax()) <= 1
            and _most(tokens.view(U32_DTYPE)) < self._vocab_size
        ):
            return None
        ends: I32 = np.add.accumulate(counts, dtype=np.int32)  # in half the time of cumsum
        return ends if ends.item(-1) == tokens.size else None

    def _wrong_token(self) -> str:
        return f"a token id outside the vocabulary of {self._vocab_size}"

    def _contradiction(self, result: StepResult, record: StepRecord) -> str | None:
        """What of a result is not of its plan; each field for itself is as the schema says."""
        num_rows = len(record.rows)
        expected = num_rows
        if result.counts.size:
            if result.counts.size != num_rows:
                return f"counts of {result.counts.size} rows for a plan of {num_rows}"
            if int(result.counts.max()) > self._max_tokens_per_row:
                return f"{int(result.counts.max())} tokens of one row, of which a step has {self._max_tokens_per_row} at most"
            expected = int(result.counts.sum())
        if result.num_drafted.size and (error := self._wrong_drafts(result, record)) is not None:
            return error
        if result.tokens.size != expected:
            return f"{result.tokens.size} tokens for a plan of {expected}"
        for rows in (result.nonfinite_rows, result.vector_rows):
            if rows.size and (error := _wrong_rows(rows, num_rows)) is not None:
                return error
        tokens = result.tokens
        if result.nonfinite_rows.size and not result.counts.size:
            tokens = np.delete(tokens, result.nonfinite_rows)  # those are void
        if tokens.size and np.maximum.reduce(tokens.view(U32_DTYPE)) >= self._vocab_size:
            return self._wrong_token()
        if (
            result.nonfinite_prefills is not NO_I32
            or result.nonfinite_counts is not NO_I32
            or result.errors is not NO_U8
        ):  # what unpack makes of none
            error = self._wrong_nonfinite(result, record)
            if error is not None:
                return error
        if record.num_decode < num_rows or result.vector_rows.size or result.vectors.size:
            return self._wrong_vectors(result, record)
        return None

    @staticmethod
    def _wrong_drafts(result: StepResult, record: StepRecord) -> str | None:
        drafted, num_decode = result.num_drafted, record.num_decode
        if drafted.size != len(record.rows):
            return f"drafts of {drafted.size} rows for a plan of {len(record.rows)}"
        if drafted[num_decode:].any():
            return "drafts of rows that are no decode rows"
        if int(drafted.max()) > record.max_drafts:
            return f"{int(drafted.max())} drafts of one row in a plan of {record.max_drafts} at most"
        if result.counts.size and (result.counts > drafted + 1).any():
            row = int(np.argmax(result.counts > drafted + 1))
            return f"{result.counts[row]} tokens of row {row}, which had {drafted[row]} drafts"
        return None

    @staticmethod
    def _wrong_nonfinite(result: StepResult, record: StepRecord) -> str | None:
        bad = result.nonfinite_prefills
        if bad.size and int(bad.max()) >= len(record.prefills):
            return f"prefill rows {bad.tolist()} of a plan of {len(record.prefills)}"
        if result.nonfinite_counts.size not in (0, result.nonfinite_rows.size):
            return f"{result.nonfinite_counts.size} counts of {result.nonfinite_rows.size} rows"
        if result.errors.size:
            try:
                decode_errors(result.errors, result.nonfinite_rows.size)
            except (ValueError, RecursionError) as error:
                return str(error)
        return None

    def _wrong_vectors(self, result: StepResult, record: StepRecord) -> str | None:
        """Of rows that want a vector, each has one of the model's size, which is finite, and no token; unless nothing of
        the row is finite."""
        sequences, num_decode = record.rows.sequences, record.num_decode
        # A prompt that becomes a vector ends with it, and is no decode row.
        pooled = {row for row, s in enumerate(sequences[num_decode:], num_decode) if s.submit.pooling is not None}
        with_vector = result.vector_rows.tolist()
        if not pooled.issuperset(with_vector):
            return f"vectors of rows {with_vector}, some of which want tokens"
        if not with_vector and result.vectors.size:
            return f"{result.vectors.size} numbers for no vector"
        if not pooled:
            return None
        bad = set(result.nonfinite_rows.tolist())
        if missing := sorted(pooled.difference(with_vector, bad)):
            return f"no vectors of rows {missing}"
        counts = result.counts
        if with_tokens := [row for row in sorted(pooled - bad) if not counts.size or counts[row]]:
            return f"tokens of rows {with_tokens}, which want vectors"
        if not with_vector:
            return None
        sizes = self._vector_sizes([sequences[row] for row in with_vector])
        if result.vectors.size != sum(sizes):
            return f"{result.vectors.size} numbers for {len(sizes)} vectors of {sum(sizes)} numbers in all"
        vectors = zip(with_vector, _parts(result.vectors, sizes), strict=True)
        if wrong := [row for row, vector in vectors if row not in bad and not np.isfinite(vector).all()]:
            return f"NaN or infinity in the vectors of rows {wrong}"
        return None

    def _vector_sizes(self, sequences: Iterable[Sequence]) -> list[int]:
        """Numbers of what these give."""
        return [self._vector_size * (s.num_prompt if s.submit.pooling == "all" else 1) for s in sequences]

    def _logprob_spans(self, result: StepResult, record: StepRecord) -> list[LogprobSpan]:
        """The spans of the log-probabilities of a result. Raises ContradictionError when they are not of its plan."""
        try:
            spans = spans_of(result)
        except ValueError as wrong:
            raise ContradictionError(f"step {result.step}: {wrong}") from None
        for span in spans:
            if span.row >= (len(record.prefills) if span.is_prompt else len(record.rows)):
                raise ContradictionError(f"step {result.step}: logprobs of row {span.row}, which is not in the plan")
            rules = (record.prefills[span.row][0] if span.is_prompt else record.rows.sequences[span.row]).rules
            if rules is None or (rules.num_prompt_logprobs if span.is_prompt else rules.num_logprobs) < 0:
                raise ContradictionError(f"step {result.step}: logprobs of row {span.row}, which wants none")
        if int(result.logprob_ids.view(np.uint32).max()) >= self._vocab_size:
            raise ContradictionError(
                f"step {result.step}: logprobs of an id outside the vocabulary of {self._vocab_size}"
            )
        return spans

    @staticmethod
    def _logprobs(
        record: StepRecord, spans: list[LogprobSpan], events: Events
    ) -> tuple[tuple[Sequence, LogprobSpan], ...]:
        """Those of the tokens that count, and those of prompts that were not told yet (after a preemption some were)."""
        got = set(events.sequences)
        found: list[tuple[Sequence, LogprobSpan]] = []
        for span in spans:
            if not span.is_prompt:
                sequence: Sequence = record.rows.sequences[span.row]
                if sequence in got:
                    found.append((sequence, span))
                continue
            sequence = record.prefills[span.row][0]
            if sequence.state is State.FINISHED and sequence not in got:
                continue
            num_had = sequence.num_prompt_logprobs + 1 - span.position
            if 0 <= num_had < span.ranks.size:
                sequence.num_prompt_logprobs += span.ranks.size - num_had
                found.append((sequence, span.part(num_had)))
        return tuple(found)

    def _append_column(self, record: StepRecord, tokens: I32) -> Events:
        """The steady case: every row is still there and got one token."""
        batch, rows, sequences = self._batch, record.rows, record.rows.sequences
        known = batch.num_known[rows.index]
        self._kv.write_token_ids(rows.index, known, tokens)
        index = known - batch.num_prompt[rows.index]
        known += ONE
        batch.num_known[rows.index] = known
        self.num_output_tokens += tokens.size
        cached = self._first_tokens(record) if record.num_decode < tokens.size else []
        ends = [
            end
            for row in self._stopping.candidates(rows, tokens, known)
            if (end := self._stop(sequences.item(row), tokens.item(row), index.item(row) + 1)) is not None
        ]
        return Events(sequences, tokens, index, NO_I32, tuple(ends), cached=tuple(cached))

    def _count_column(self, record: StepRecord, tokens: I32) -> Events:
        """As `_append_column`, where only the numbers of tokens are known afterwards."""
        batch, rows, sequences = self._batch, record.rows, record.rows.sequences
        known = batch.num_known[rows.index] + ONE
        batch.num_known[rows.index] = known
        self.num_output_tokens += tokens.size
        cached = self._first_tokens(record) if record.num_decode < tokens.size else []
        ends: list[End] = []
        for row in self._stopping.candidates(rows, tokens, known):
            sequence: Sequence = sequences.item(row)
            end = self._stop(sequence, tokens.item(row), known.item(row) - sequence.num_prompt)
            if end is not None:
                ends.append(end)
        return Events(sequences, tokens, NO_I32, NO_I32, tuple(ends), cached=tuple(cached))

    def _first_tokens(self, record: StepRecord) -> list[Sequence]:
        """Prompts that ended with this step have their first token. Returns those that had found a part of them cached."""
        cached: list[Sequence] = []
        for sequence in record.rows.sequences[record.num_decode :].tolist():
            if sequence.first_token is None:
                sequence.first_token = self._view.now
                if sequence.num_cached_tokens:
                    cached.append(sequence)
        return cached

    def _append_runs(self, record: StepRecord, tokens: I32, counts: I32, token_ends: I32) -> Events:
        """As `_append_column`, where some rows got several tokens: drafts that were right, and the one behind them.

        token_ends: of each row, [num_rows].
        """
        batch, rows = self._batch, record.rows
        slots, limits = rows.index, rows.limits
        known = batch.num_known[slots]
        after = known + counts
        # The step was planned for one token; the others have their KV already, since they were computed as drafts.
        computed = batch.num_computed[slots] + counts
        batch.num_computed[slots] = computed - ONE
        # Of each row at least as many are computed as are known: without one at its end there, none is beyond its limit.
        has_end = False
        if rows is not self._far_rows or self.num_output_tokens >= self._far_until:
            is_at_end = computed >= limits
            has_end = bool(np.count_nonzero(is_at_end))
            if has_end:
                batch.stop_rows(slots[is_at_end & batch.is_decoding[slots]])
            left = limits - computed
            self._far_rows, self._far_until = rows, self.num_output_tokens + left.item(left.argmin()) - NEAR
        if has_end and np.count_nonzero(after > limits):
            # What lies behind the limit has no place in the column of known tokens, and is not part of the output.
            after = np.minimum(after, limits)
            within = after - known
            written = tokens[_heads(token_ends, counts, within)]
            self._kv.write_runs(rows.slots, within, within.cumsum(dtype=np.int32), after, written)
        else:
            self._kv.write_runs(rows.slots, counts, token_ends, after, tokens)
        batch.num_known[slots] = after
        index = known - batch.num_prompt[slots]
        cached = self._first_tokens(record) if record.num_decode < counts.size else []
        ends: list[End] = []
        kept = counts
        ended = -1
        for at in self._stopping.candidates_at(tokens, known + counts - limits if has_end else None, counts):
            row = int(np.searchsorted(token_ends, at, "right"))
            if row == ended:
                continue
            place = at - token_ends.item(row) + counts.item(row)
            end = self._stop(rows.sequences[row], tokens.item(at), index.item(row) + place + 1)
            if end is None:
                continue
            ended = row
            ends.append(end)
            # Tokens behind the one that ends the request are not part of its output.
            if place + 1 < counts[row]:
                kept = kept.copy() if kept is counts else kept
                kept[row] = place + 1
                room = limits.item(row) - known.item(row)
                self._count_wasted(rows.sequences[row], min(counts.item(row), room) - place - 1)
        if kept is not counts:
            tokens = tokens[_heads(token_ends, counts, kept)]
        self.num_output_tokens += tokens.size
        return Events(
            rows.sequences,
            tokens,
            index,
            NO_I32 if tokens.size == len(rows) else kept,
            tuple(ends),
            cached=tuple(cached),
        )

    def _append_rows(self, record: StepRecord, result: StepResult) -> Events:
        """The general case, row by row: rows that left, several tokens or none, vectors, logits that are not finite."""
        batch, rows = self._batch, record.rows
        counts = result.counts if result.counts.size else np.ones(len(rows), np.int32)
        first = np.cumsum(counts) - counts
        counted = result.nonfinite_counts.tolist() or [1] * result.nonfinite_rows.size
        bad = dict(zip(result.nonfinite_rows.tolist(), counted, strict=True))
        told: dict[int, str] = {}
        if result.errors.size:
            told = dict(zip(bad, decode_errors(result.errors, len(bad)), strict=True))
        with_vector = result.vector_rows.tolist()
        sizes = self._vector_sizes(rows.sequences[row] for row in with_vector)
        vectors = dict(zip(with_vector, _parts(result.vectors, sizes), strict=True))
        got: list[tuple[Sequence, I32, int]] = []
        ends: list[End] = []
        pooled: list[tuple[Sequence, NDArray[np.float32]]] = []
        cached: list[Sequence] = []
        is_tainted = False
        # A row is still here if its slot has not changed hands since the step was planned.
        for row, sequence in enumerate(rows.sequences):
            tokens = result.tokens[first[row] : first[row] + counts[row]]
            slot = int(rows.slots[row])
            is_here = int(batch.generation[slot]) == int(rows.generations[row])
            if row in bad:
                # Also of a request that has ended meanwhile: its blocks may have been found since.
                is_tainted |= self._cache.forget(sequence)
            if not is_here and sequence.state is not State.PREEMPTED:
                continue  # ended meanwhile; the token was counted as wasted then
            if row in bad:
                ends.append(self._end_corrupted(sequence, bad[row], told.get(row)))
                continue
            if row in vectors:
                if sequence.first_token is None:
                    sequence.first_token = self._view.now  # all that it gives
                pooled.append((sequence, vectors[row]))
                ends.append(self._table.end(sequence, "stop"))
                continue
            # A preempted row keeps its tokens: they are appended to the request and not to the slot.
            start = self._append(sequence, tokens, slot if is_here else -1)
            for position, token in enumerate(tokens.tolist()):
                if sequence.watch is not None:
                    sequence.watch.push(token)
                end = self._stop(sequence, token, start + position + 1)
                # Tokens behind the one that ends the request are not part of its output.
                if end is not None:
                    room = sequence.limit - sequence.num_prompt - start if is_here else tokens.size
                    self._count_wasted(sequence, min(tokens.size, room) - position - 1)
                    tokens = tokens[: position + 1]
                    ends.append(end)
                    break
            # The column path looks for first tokens only among rows that end a prompt: a row that got none then is
            # remembered.
            if sequence.first_token is None:
                if tokens.size:
                    sequence.first_token = self._view.now
                    if sequence.num_cached_tokens:
                        cached.append(sequence)
                    self._table.tokenless.discard(sequence)
                elif sequence.state is not State.FINISHED:
                    self._table.tokenless.add(sequence)
            self.num_output_tokens += tokens.size
            if tokens.size:
                got.append((sequence, tokens, start))
        # Another request may have taken over forgotten blocks in a step that is in flight already.
        if is_tainted:
            self._table.compute_again(self._ledger.void(record.step + 1))
        sequences = np.empty(len(got), object)
        sequences[:] = [s for s, _, _ in got]
        all_counts = np.array([t.size for _, t, _ in got], np.int32)
        return Events(
            sequences,
            np.concatenate([t for _, t, _ in got]) if got else NO_I32,
            np.array([i for _, _, i in got], np.int32),
            NO_I32 if (all_counts == 1).all() else all_counts,
            tuple(ends),
            tuple(pooled),
            cached=tuple(cached),
        )

    def _end_corrupted(self, sequence: Sequence, num_nonfinite: int, processor_error: str | None = None) -> End:
        """A request has no token to choose. num_nonfinite: values of its logits, 0 if its rules left nothing.

        processor_error: why a logits processor of the application has failed.
        """
        if processor_error:
            return self._table.end(sequence, "error", error=processor_error, zero=True)
        sequence.num_nonfinite += num_nonfinite
        self.num_nonfinite += num_nonfinite
        self.num_corrupted += num_nonfinite > 0
        error = None if num_nonfinite else _no_choice(sequence)
        if error is None:
            return self._table.end(sequence, "error", error="the model's logits are not finite", zero=True)
        return self._table.end(sequence, "error", error=error, zero=True)._replace(details={"kind": INVALID})

    def _end_bad_prompts(self, record: StepRecord, rows: list[int]) -> list[End]:
        """Prompts that the worker cleared since their states are not finite; those that were to sample have ended already.

        Also of those that left their slot meanwhile: what they had published before is cleared with the rest.
        """
        ends: list[End] = []
        is_tainted = False
        for row in rows:
            sequence, num_tokens = record.prefills[row]
            is_tainted |= self._cache.forget(sequence)
            if sequence.state is not State.FINISHED:
                ends.append(self._end_corrupted(sequence, num_tokens))
        if is_tainted:
            self._table.compute_again(self._ledger.void(record.step + 1))
        return ends

    def _append(self, sequence: Sequence, tokens: I32, slot: int) -> int:
        """Add tokens to a request in a slot, or (slot -1) to a preempted one. Returns the first one's output index."""
        if slot < 0:
            start = sequence.known.size - sequence.num_prompt
            sequence.known = np.concatenate((sequence.known, tokens))
            sequence.looked_up = -1
            return start
        batch = self._batch
        known = int(batch.num_known[slot])
        room = sequence.limit - known
        for position, token in enumerate(tokens[:room].tolist(), known):
            self._kv.write_token_id(slot, position, token)
        batch.num_known[slot] = known + min(tokens.size, room)
        # The step was planned for one token. More of them have their KV already (they were computed as drafts);
        # without any, the last known token has to be computed again.
        batch.num_computed[slot] += tokens.size - 1
        if batch.num_computed[slot] + 1 >= sequence.limit:
            batch.stop_decoding(slot)
        elif not batch.is_decoding[slot]:
            batch.start_decoding([slot])
        return known - sequence.num_prompt

    def _count_wasted(self, sequence: Sequence, number: int) -> None:
        """Tokens behind the end of a request, as far as there was a place for them."""
        sequence.num_wasted_tokens += number
        self._table.num_wasted += number

    def _stop(self, sequence: Sequence, token: int, num_outputs: int) -> End | None:
        """End a request if this token, its num_outputs-th, is one to end at."""
        end = self._stopping.end_of(sequence, token, num_outputs)
        return None if end is None else self._table.end(sequence, *end)


def _parts(vectors: NDArray[np.float32], sizes: list[int]) -> Iterator[NDArray[np.float32]]:
    """Vectors of these sizes, one after the other."""
    start = 0
    for size in sizes:
        yield vectors[start : start + size]
        start += size


def _heads(ends: I32, counts: I32, kept: I32) -> NDArray[np.bool_]:
    """Of counts[i] tokens each, up to ends[i]: which are among the first kept[i] of theirs."""
    place = np.arange(ends.item(-1), dtype=np.int32)
    return place < (ends - counts + kept).repeat(counts)


def _most(numbers: NDArray[Any]) -> int:
    """The largest of some numbers. Of few, its place is found in a third of the time that a reduction takes."""
    most: int = numbers.item(numbers.argmax())
    return most


def _wrong_rows(rows: I32, num_rows: int) -> str | None:
    """Of rows that are named at most once each."""
    if rows.size and int(rows.max()) >= num_rows:
        return f"row {rows.tolist()} of a plan of {num_rows}"
    if rows.size > 1 and np.unique(rows).size != rows.size:
        return f"row {rows.tolist()}, not each of them once"
    return None


def _no_choice(sequence: Sequence) -> str | None:
    """Which of a request's parameters leave it no token to choose; None: it has none that could."""
    rules, submit = sequence.rules or NO_RULES, sequence.submit
    asked = {
        str((submit.grammar or {}).get("source", "structured_outputs")): submit.grammar is not None,
        "allowed_token_ids": bool(rules.allowed_ids),
        "bad_words": bool(rules.bad_words),
        "min_tokens": submit.min_tokens > 0,
    }
    names = [name for name, is_asked in asked.items() if is_asked]
    if not names:
        return None
    *others, last = names
    told = f"{', '.join(others)} and {last} together leave" if others else f"{last} leaves"
    return f"{told} no token to choose"
