"""The frontend actor: the journal of every request of this process, and the way of its outputs to the callers.

Runs on the engine thread. The journal has prompt, parameters, seed and everything emitted so far. With it a request
survives the scheduler: the journal is submitted to every scheduler that this actor is linked to. The first scheduler
and those after a death are treated alike. What was emitted travels as `output`. An output applies only if its index is
the next one. The next scheduler is also told what the last one knew beside requests: whether generation is paused, and
whether a timeline is kept.

Outputs reach the callers' event loops by one thread-safe wake-up per batch and loop.
"""

from __future__ import annotations

import logging
import math
from collections import deque
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, NamedTuple, Protocol

import anyio
import numpy as np

from actorllm.actors.actor import Actor
from actorllm.actors.engine_thread import HostLoop
from actorllm.actors.link import Link
from actorllm.clock import now
from actorllm.config import EngineConfig
from actorllm.errors import (
    ActorLLMError,
    EngineDeadError,
    EngineDrainingError,
    EngineError,
    EngineOverloaded,
    EngineShutdownError,
    InvalidParameterError,
    PeerLostError,
    PeerRestartedError,
    RequestFailedError,
    WouldBlock,
)
from actorllm.messages import (
    DRAINING,
    INVALID,
    NO_I32,
    OVERLOADED,
    Abort,
    Begun,
    KvOffer,
    Message,
    Outputs,
    PauseChanged,
    ProbeGroup,
    Submit,
    WeightsChanged,
    sequences_of,
)
from actorllm.messages.logprobs import LogprobSpan, spans_of
from actorllm.supervision.blame.scheduler_deaths import DeathRecord, note_death
from actorllm.supervision.blame.worker_deaths import MAX_ALONE
from actorllm.types.logprob import Logprob
from actorllm.types.request_end import RequestEnd
from actorllm.types.weight_version import WeightSource

logger = logging.getLogger(__name__)

RETRY_S = 0.01
"""How soon what the link had no room for is tried again."""


class Delta(NamedTuple):
    """What one batch of outputs brought for one request. One is made per token of a stream: a frozen dataclass takes thrice
    as long."""

    tokens: list[int]
    text: str
    end: RequestEnd | None
    emitted: float
    """When the scheduler sent it, in monotonic seconds."""
    vector: Any = None
    logprobs: list[dict[int, Logprob]] | None = None
    """One for each of the tokens, where they were asked for."""
    prompt_logprobs: list[dict[int, Logprob]] | None = None
    """Of every token of the prompt but the first, with the first delta that has them all."""
    first_emitted: float = 0.0
    """Of several that were joined: when the scheduler sent the first. 0.0: it is one."""

    @staticmethod
    def joined(deltas: list[Delta]) -> Delta:
        """One for all of them, which came one after the other for one sequence."""
        if len(deltas) == 1:
            return deltas[0]
        first, last = deltas[0], deltas[-1]
        logprobs = [entry for delta in deltas for entry in delta.logprobs or ()]
        of_prompt = [entry for delta in deltas for entry in delta.prompt_logprobs or ()]
        return Delta(
            [token for delta in deltas for token in delta.tokens],
            "".join([delta.text for delta in deltas]),
            last.end,
            last.emitted,
            last.vector,
            logprobs or None,
            of_prompt or None,
            first.first_emitted or first.emitted,
        )


_new_delta = tuple.__new__
"""With all eight values; `Delta(...)` takes thrice as long."""


class Consumer(Protocol):
    """The receiver of the outputs of one request. Called on the engine thread."""

    @property
    def host(self) -> HostLoop | None:
        """The loop to wake; None: no caller waits yet."""

    @property
    def is_aborted(self) -> bool:
        """Its caller wants no more of it."""

    @property
    def wakes_at_end(self) -> bool:
        """It can do nothing with less than everything."""

    def push(self, delta: Delta) -> None: ...

    def note_cached(self, num_tokens: int) -> None:
        """So much of the prompt was in the prefix cache; before the first push, and only if it is anything."""

    def note_version(self, num_tokens: int, version: str) -> None:
        """Its tokens behind the first so many are of this version of the weights. Told before any of them."""

    def fail(self, error: BaseException) -> None: ...

    def wake(self) -> None:
        """Called on the host's loop after one or more pushes."""


@dataclass(slots=True, eq=False)
class JournalEntry:
    """One request that has not ended."""

    submit: Submit
    consumer: Consumer
    emitted: list[int] = field(default_factory=list)
    first_token: float | None = None
    """When the first token that came was sent."""
    last_token: float | None = None
    """When the last one was, if an observer notes that."""
    is_aborted: bool = False
    had_slot: bool = False
    """A scheduler said so, when it was paused."""
    prompt_logprobs: list[dict[int, Logprob]] | None = None
    """Those that have come and were not handed out; they are, with the first token or the end."""
    num_prompt_logprobs: int = 0
    """How many have come."""
    num_cached: int | None = None
    """Prompt tokens that the replica found in its cache which computed the prompt, and handed it off; None: it was not."""
    num_recoveries: int = 0
    """How often its scheduler died."""
    num_moves: int = 0
    """How often another scheduler was given it while its own one lived."""
    recovery_s: float = 0.0
    """What it waited for its next output after a death, in all."""
    lost_at: float = 0.0
    """When the scheduler died that it is waiting to hear from again; 0.0: it waits for none."""
    record: DeathRecord = field(default_factory=DeathRecord)
    """Which deaths of schedulers it may be to blame for; the sequences of one request share one."""


class OutputObserver(Protocol):
    """Looks at each message of outputs before it counts."""

    def see(
        self, outputs: Outputs, ends: Mapping[int, RequestEnd] | None, journal: Mapping[int, JournalEntry]
    ) -> None: ...


class _UnsentAsk:
    """The place of a question among what waits to be sent."""

    def __init__(self) -> None:
        self.has_come = anyio.Event()


class FrontendActor(Actor):
    """Submits, aborts, and hands out outputs."""

    PROBES_ALONE = False
    """Whether a death of a scheduler counts for each request of a group that was probed (`note_death`)."""

    def __init__(self, name: str = "frontend", rank: int = 0, last_rid: int = 0) -> None:
        """last_rid: of the frontend whose place it takes, so that what is late for that one meets no request of this one."""
        super().__init__(name, rank)
        self._journal: dict[int, JournalEntry] = {}
        self._scheduler: Link | None = None
        self._lost: BaseException | None = None
        self._error: BaseException | None = None
        self.last_rid = last_rid
        self.observer: OutputObserver | None = None
        self._num_finished = self._num_finished_tokens = 0
        self._num_repeated = 0
        self._num_asking = 0
        self._unsent: deque[Submit | Abort | _UnsentAsk] = deque()
        self._linked: anyio.Event | None = None  # while one waits for it
        self._idle: anyio.Event | None = None
        self._lost_at = 0.0
        self._interrupted: set[int] = set()  # their scheduler died, and nothing of them has come since
        self._pause_mode: str | None = None
        self._has_timeline = False
        self._probe: ProbeGroup | None = None  # the last group that the scheduler named
        self._num_losses = 0  # schedulers in a row, without a token of any request
        self.num_recoveries = 0
        self._num_resubmitted = 0
        self._num_adopted = 0
        self._num_late = 0
        self._leaving: dict[int, int] = {}
        """Of requests that were surrendered while this scheduler had them: how many of their ends it has yet to tell."""
        self.max_recovery_s = 0.0
        self.weights = WeightSource()
        """The version that the scheduler's workers compute with, as far as this actor was told."""

    @property
    def num_open(self) -> int:
        """Sequences that have not ended."""
        return len(self._journal)

    @property
    def finished(self) -> tuple[int, int]:
        """Sequences that have ended, and their tokens."""
        return self._num_finished, self._num_finished_tokens

    @property
    def is_linked(self) -> bool:
        """There is a scheduler."""
        return self._scheduler is not None

    @property
    def has_link(self) -> bool:
        """There is a scheduler, or one that is still being told what the last one knew."""
        return self._scheduler is not None or bool(self.links)

    @property
    def pause_mode(self) -> str | None:
        """Of the pause that goes on; None: there is none."""
        return self._pause_mode

    @property
    def is_paused(self) -> bool:
        """Generation is, or will be when what was asked for arrives."""
        return self._pause_mode is not None

    # What the engine's callers post to this loop

    def next_rid(self) -> int:
        """Unique while this frontend lives; a 32-bit integer on the wire."""
        while True:
            self.last_rid = self.last_rid % (2**31 - 1) + 1
            if self.last_rid not in self._journal:
                return self.last_rid

    def submit(self, make_submit: Callable[[int], Submit], consumer: Consumer, on_rid: Callable[[int], None]) -> None:
        """Journal a request and send it. Its outputs and its end, whatever it is, go to the consumer."""
        rid = self.next_rid()
        submit = self._made(lambda: make_submit(rid), [consumer])
        if submit is None:
            return
        self._journal[rid] = JournalEntry(submit, consumer, submit.output.tolist())
        consumer.note_version(0, self.weights.version)
        on_rid(rid)
        self._post(submit)

    def submit_several(
        self, make_submit: Callable[[int], Submit], consumers: Sequence[Consumer], on_rid: Callable[[int], None]
    ) -> None:
        """Journal several sequences of one request, with a consumer each, and send them as one message.

        So the scheduler knows of all of them when it computes their prompt.
        """
        rids = [self.next_rid() for _ in consumers]
        submit = self._made(lambda: replace(make_submit(rids[0]), siblings=np.array(rids[1:], np.int32)), consumers)
        if submit is None:
            return
        record = DeathRecord(rids=tuple(rids))  # one for all of them
        for sequence, consumer in zip(sequences_of(submit), consumers, strict=True):
            self._journal[sequence.rid] = JournalEntry(sequence, consumer, record=record)
            consumer.note_version(0, self.weights.version)
            on_rid(sequence.rid)
        self._post(submit)

    def _made(self, make: Callable[[], Submit], consumers: Sequence[Consumer]) -> Submit | None:
        """The message of a request that is about to be journaled; None: it cannot be, and its consumers are told why."""
        if self._error is not None:
            error: BaseException = self._error
        else:
            try:
                submit = make()
            except Exception as caught:  # of one request: its callers are told, and the actor goes on
                logger.exception("a request cannot be made")
                known = isinstance(caught, ActorLLMError)
                error = caught if known else RequestFailedError(f"the request cannot be made: {caught!r}")
            else:
                if not self._journal:
                    self.on_work()
                return submit
        for consumer in consumers:
            consumer.fail(error)
        self._wake(list(consumers))
        return None

    def abort(self, rid: int) -> None:
        """End a request; the consumer still gets its final output, with finish_reason 'abort'."""
        entry = self._journal.get(rid)
        if entry is not None and not entry.is_aborted:
            entry.is_aborted = True
            self._post(Abort(rids=np.array([rid], np.int32)))

    def abort_all(self) -> None:
        """End every request of this process."""
        for rid in list(self._journal):
            self.abort(rid)

    def _fail(self, rid: int, error: BaseException) -> None:
        entry = self._journal.pop(rid, None)
        if entry is not None:
            entry.consumer.fail(error)
            self._wake([entry.consumer])
            self._tell_if_idle()

    def fail_all(self, error: BaseException) -> None:
        """The engine is gone: every request that has not ended, and every later one, ends with this error."""
        if self._error is None:
            self._error = error
        self._tell_linked()
        self._forget_unsent()
        self._interrupted.clear()
        entries, self._journal = list(self._journal.values()), {}
        for entry in entries:
            entry.consumer.fail(error)
        self._wake([entry.consumer for entry in entries])
        self._tell_if_idle()

    async def wait_until_idle(self) -> bool:
        """Wait until every request has ended. False: they ended because the engine did."""
        while self._journal:
            if self._idle is None:
                self._idle = anyio.Event()
            await self._idle.wait()
        return self._error is None

    def _tell_if_idle(self) -> None:
        if self._idle is not None and not self._journal:
            self._idle.set()
            self._idle = None

    def _post(self, message: Submit | Abort) -> None:
        """Send in order; what does not fit is sent when the scheduler has answered."""
        self._unsent.append(message)
        self._flush()
        if self._unsent and self._scheduler is not None:
            self.wake()

    def _flush(self) -> None:
        while self._unsent and self._scheduler is not None and self._scheduler.is_open:
            message = self._unsent[0]
            if isinstance(message, _UnsentAsk):
                self._unsent.popleft()
                message.has_come.set()
                continue
            try:
                self._scheduler.send_nowait(message)
            except WouldBlock:
                return
            except (TypeError, ValueError) as error:  # it cannot be encoded: that must not stop what comes after it
                logger.exception("a message cannot be sent")
                if isinstance(message, Submit):
                    for rid in (message.rid, *message.siblings.tolist()):
                        self._fail(rid, RequestFailedError(f"the request cannot be sent: {error}"))
            self._unsent.popleft()

    def _forget_unsent(self) -> None:
        """There is no scheduler to send it to. A caller with a question looks for another one."""
        for message in self._unsent:
            if isinstance(message, _UnsentAsk):
                message.has_come.set()
        self._unsent.clear()

    # Life

    @property
    def has_work(self) -> bool:
        return bool(self._journal) or self._num_asking > 0

    async def run(self) -> None:
        """Everything is done where it arrives, but for what the link had no room for: a scheduler need not have anything
        to say that would bring the next turn."""
        while self.is_running:
            await self.wait(now() + RETRY_S if self._unsent and self._scheduler is not None else None)
            self._flush()

    def on_configure(self, config: EngineConfig) -> None:
        self.weights = config.model.weights

    def on_link(self, link: Link) -> None:
        if self._lost_at and (self._pause_mode is not None or self._has_timeline):
            self.start_soon(self._restore, link, str(self._lost))
        else:
            self._adopt(link)

    async def _restore(self, link: Link, lost: str) -> None:
        """Before a new scheduler gets a request it is told what the last one knew."""
        try:
            if self._has_timeline:
                await self.ask(link, "start_timeline", math.inf, lost=lost, lost_for_s=now() - self._lost_at)
            if self._pause_mode is not None:
                # What "abort" had to end has ended; a caller that was about to pause asks again (`ask_scheduler`).
                mode = "wait" if self._pause_mode == "wait" else "keep"
                await self.ask(link, "pause_generation", math.inf, mode=mode, clear_cache=False, is_restored=True)
        except PeerLostError:
            return  # it died as well, and the next one will be told
        if link.is_open:
            self._adopt(link)

    def _adopt(self, link: Link) -> None:
        """The journal is the work of this scheduler."""
        self._scheduler = link
        self._leaving.clear()
        self._forget_unsent()
        for entry in sorted(self._journal.values(), key=lambda entry: -entry.record.num_deaths):  # suspects first
            self._unsent += self._as_sent(entry)
        if link.generation > 1:
            self._unsent.append(Abort(rids=NO_I32))  # that was all
        if self._interrupted:
            self._num_resubmitted += len(self._journal)
            logger.info("linked to %s again; %d requests go on", link.peer, len(self._journal))
        self._flush()
        if self._unsent:
            self.wake()
        self._tell_linked()

    def _as_sent(self, entry: JournalEntry) -> list[Submit | Abort]:
        """What tells a scheduler of a request, which may have had tokens of another one."""
        submit = entry.submit
        if entry.num_recoveries or entry.num_moves:
            submit = replace(
                submit,
                output=np.array(entry.emitted, np.int32),
                is_resumed=True,
                had_slot=entry.had_slot,
                first_token=entry.first_token,
                num_deaths=entry.record.num_deaths,
                probe_size=entry.record.probe_size,
                num_losses=self._num_losses,
            )
        return [submit, Abort(rids=np.array([submit.rid], np.int32))] if entry.is_aborted else [submit]

    # Moves between schedulers

    def surrender(self, is_moved: Callable[[JournalEntry], bool] = lambda entry: True) -> dict[int, JournalEntry]:
        """Give up requests, for another frontend to `adopt`; a scheduler that lives is told to end them.

        is_moved: which of them. Returns them by number. What comes of them here from now on is dropped.
        """
        taken = {rid: entry for rid, entry in self._journal.items() if is_moved(entry)}
        if not taken:
            return taken
        self._journal = {rid: entry for rid, entry in self._journal.items() if rid not in taken}
        self._interrupted -= taken.keys()
        sent = {rid for rid in taken if self._is_sent(rid)}
        unsent, self._unsent = self._unsent, deque()
        for message in unsent:
            if not isinstance(message, Submit) or (message.rid not in taken and not taken.keys() & {*message.siblings}):
                self._unsent.append(message)
            else:  # of its siblings some may stay
                sequences = sequences_of(message)
                self._unsent.extend(one for one in sequences if one.rid not in taken)
                sent.difference_update(one.rid for one in sequences)
        if self._scheduler is not None and self._scheduler.is_open:
            for rid in sent:
                self._leaving[rid] = self._leaving.get(rid, 0) + 1
            self._post(Abort(rids=np.array(list(taken), np.int32)))
        self._tell_if_idle()
        return taken

    def _is_sent(self, rid: int) -> bool:
        """Whether a request of the journal is among what was posted for the scheduler."""
        return True

    def adopt(self, entries: Mapping[int, JournalEntry], lost_at: float | None) -> None:
        """Go on with requests that another frontend surrendered, by the numbers that they have.

        lost_at: when their scheduler died, in monotonic seconds; None: it lives, and they were moved.
        """
        self._take_in(entries, lost_at)
        if self._scheduler is not None:
            for entry in entries.values():
                self._unsent += self._as_sent(entry)
        self._flush()
        if self._unsent and self._scheduler is not None:
            self.wake()

    def _take_in(self, entries: Mapping[int, JournalEntry], lost_at: float | None) -> None:
        """Into the journal."""
        if entries and not self._journal:
            self.on_work()
        for rid, entry in entries.items():
            if lost_at is None:
                entry.num_moves += 1
            elif not entry.lost_at:
                entry.num_recoveries += 1
                entry.lost_at = lost_at
            if entry.lost_at:
                self._interrupted.add(rid)
            self._journal[rid] = entry
            entry.consumer.note_version(len(entry.emitted), self.weights.version)
        self._num_adopted += len(entries)

    def assume_paused(self, mode: str | None) -> None:
        """Before there is a scheduler: it is told of this pause before it gets a request. None: there is none."""
        self._pause_mode = mode
        if mode is not None:
            self._lost_at = self._lost_at or now()

    def _tell_linked(self) -> None:
        if self._linked is not None:
            self._linked.set()
            self._linked = None

    def on_peer_lost(self, link: Link) -> None:
        if self._scheduler is link:
            self._scheduler = None
        lost = self._lost = link.lost
        if isinstance(lost, PeerRestartedError):
            self._lost_at = now()
            self.num_recoveries += 1
            self._forget_unsent()  # the journal has it all
            for rid, entry in self._journal.items():
                if rid not in self._interrupted:
                    entry.num_recoveries += 1
                    entry.lost_at = self._lost_at
                    self._interrupted.add(rid)
            self._note_death(lost)
            return
        self.fail_all(
            lost if isinstance(lost, EngineError) else EngineDeadError(f"the link to {link.peer} is lost: {lost}")
        )

    def _note_death(self, lost: BaseException) -> None:
        """Put the death on the record of the requests that it may be due to. The request that is to blame fails."""
        records = {rid: entry.record for rid, entry in self._journal.items() if self._is_sent(rid)}
        note_death(records, self._probe, is_second=self._num_losses > 0, probes_alone=self.PROBES_ALONE)
        self._probe = None
        self._num_losses += 1
        reason = f"the scheduler died {MAX_ALONE} times while it had this request alone; the last time {lost}"
        for rid in [rid for rid, record in records.items() if record.is_blamed]:
            logger.error("request %d fails: %s", rid, reason)
            self._fail(rid, RequestFailedError(reason))

    async def on_stop(self) -> None:
        self.fail_all(EngineShutdownError("the engine was shut down"))

    def on_failure(self, error: BaseException) -> None:
        self.fail_all(EngineDeadError(f"the frontend failed: {type(error).__name__}: {error}"))

    def on_message(self, link: Link, message: Message) -> None:
        match message:
            case Outputs():
                self._apply(message)
            case PauseChanged():
                self._pause_mode = message.mode
                for rid in message.started.tolist():
                    if rid in self._journal:
                        self._journal[rid].had_slot = True
            case WeightsChanged():
                self._note_weights(message)
            case ProbeGroup():
                self._probe = message
            case KvOffer():
                self.on_offer(message)
            case Begun():
                for rid in message.rids.tolist():
                    if rid in self._journal:
                        self._journal[rid].record.begun.add(rid)
            case _:
                super().on_message(link, message)

    def on_offer(self, offer: KvOffer) -> None:
        """Another replica may go on with a request; of one alone there is no other."""

    def _note_weights(self, message: WeightsChanged) -> None:
        """The scheduler had not heard of requests that are not listed: of those, what comes from now on is of this version."""
        self.weights = WeightSource(message.version, message.identity)
        known = dict(zip(message.rids.tolist(), message.num_tokens.tolist(), strict=True))
        for rid, entry in self._journal.items():
            entry.consumer.note_version(known.get(rid, len(entry.emitted)), message.version)

    def on_batch(self) -> None:
        if self._unsent:
            self._flush()
        if self._idle is not None:
            self._tell_if_idle()

    # Outputs

    def _apply(self, outputs: Outputs) -> None:
        """Hand every row to its request's consumer, then wake every loop once."""
        rids, index, tokens = outputs.rids.tolist(), outputs.index.tolist(), outputs.tokens.tolist()
        counts = outputs.counts.tolist() if outputs.counts.size else None
        text, text_ends = outputs.text, outputs.text_ends.tolist()
        ends = {end[0]: self._end_of(rids[end[0]], RequestEnd(*end)) for end in outputs.ends} if outputs.ends else None
        late = self._take_late(rids, ends) if self._leaving else None
        vectors = self._vectors(outputs) if outputs.vector_rows.size else {}
        logprobs = self._logprobs_by_row(outputs) if outputs.logprob_spans.size else None
        if self._interrupted:
            self._recover(rids if not late else [rid for row, rid in enumerate(rids) if row not in late])
        if self.observer is not None:
            self.observer.see(outputs, ends, self._journal)
        if self._num_losses and (tokens or vectors):
            self._num_losses = 0
        # A request that has tokens already was told by an earlier scheduler.
        if outputs.cached.size:
            for rid, num_tokens in outputs.cached.reshape(-1, 2).tolist():
                entry = self._journal.get(rid)
                if entry is not None and not entry.emitted and entry.num_cached is None:
                    entry.consumer.note_cached(num_tokens)
        # Rows share one column of tokens and one text: each takes what is next of both.
        at = text_at = 0
        piece = ""
        woken: list[Consumer] = []
        journal, emitted_at = self._journal, outputs.emitted
        for row, rid in enumerate(rids):
            count = counts[row] if counts is not None else 1
            new = tokens[at : at + count]
            at += count
            if text_ends:
                piece = text[text_at : text_ends[row]]
                text_at = text_ends[row]
            entry = journal.get(rid)
            if entry is None or (
                late and row in late
            ):  # it was aborted with its caller gone, or another scheduler has it
                self._num_late += 1
                continue
            consumer, emitted = entry.consumer, entry.emitted
            if new:
                # The journal says which token is the next one. A gap means that tokens were lost for good. Tokens from
                # before it come again after a restart of the scheduler, and the consumer must not see them twice.
                due = len(emitted)
                if index[row] == due:
                    emitted += new
                    if entry.first_token is None:
                        entry.first_token = emitted_at
                    # A new token shows that the request does not kill schedulers: deaths before it do not count.
                    if entry.num_recoveries or entry.record.num_deaths:
                        entry.record.prove(rid, journal)
                elif index[row] > due:
                    self._fail_gap(rid, entry, index[row])
                    woken.append(consumer)
                    continue
                else:
                    self._num_repeated += 1  # had before; but its end, if it brings one, counts
                    new, piece = [], ""
            # Also of a repeated row: what it brings of the prompt is kept, what it brings of tokens is not.
            of_tokens: list[dict[int, Logprob]] | None = None
            if logprobs is not None and row in logprobs:
                of_tokens = self._take_logprobs(entry, logprobs[row])
                if not new:
                    of_tokens = None
            end = None
            if ends is not None and row in ends:
                # From here on the request is not submitted again, whatever dies.
                end = ends[row]
                del journal[rid]
                self._num_finished += 1
                self._num_finished_tokens += len(emitted)
                if entry.num_recoveries:
                    end = _with_recoveries(end, entry)
                if end.error is not None:
                    consumer.fail(_error_of(end))
                    woken.append(consumer)
                    continue
            # Prompt log-probabilities may come in rows without a token; they wait for the first delta.
            if new or piece or end is not None:
                of_prompt = None
                if entry.prompt_logprobs is not None:
                    of_prompt, entry.prompt_logprobs = entry.prompt_logprobs, None
                vector = vectors.get(row) if vectors else None
                consumer.push(_new_delta(Delta, (new, piece, end, emitted_at, vector, of_tokens, of_prompt, 0.0)))
                if end is not None or not consumer.wakes_at_end:
                    woken.append(consumer)
        self._wake(woken)

    def _take_late(self, rids: list[int], ends: dict[int, RequestEnd] | None) -> set[int]:
        """Rows of requests that were surrendered, up to their ends: some may have come back since, and go on by themselves."""
        late: set[int] = set()
        for row, rid in enumerate(rids):
            due = self._leaving.get(rid)
            if due is None:
                continue
            late.add(row)
            if ends and ends.pop(row, None) is not None:
                if due > 1:
                    self._leaving[rid] = due - 1
                else:
                    del self._leaving[rid]
        return late

    def _end_of(self, rid: int, end: RequestEnd) -> RequestEnd:
        """What a replica copied of another one was not in a cache before the request came."""
        entry = self._journal.get(rid)
        if entry is None or entry.num_cached is None:
            return end
        return replace(end, num_cached_tokens=entry.num_cached)

    def _recover(self, rids: list[int]) -> None:
        """Of these something has come, for the first time since their scheduler died."""
        self._interrupted.intersection_update(self._journal)
        for rid in self._interrupted.intersection(rids):
            self._interrupted.discard(rid)
            entry = self._journal[rid]
            waited = now() - entry.lost_at
            entry.lost_at = 0.0
            entry.recovery_s += waited
            self.max_recovery_s = max(self.max_recovery_s, waited)

    def _logprobs_by_row(self, outputs: Outputs) -> dict[int, list[tuple[LogprobSpan, list[dict[int, Logprob]]]]]:
        """The spans of every row that has some, and what users get of them."""
        text, ends = outputs.logprob_text, outputs.logprob_text_ends.tolist()
        texts = [text[start:end] for start, end in zip([0, *ends], ends, strict=False)]
        by_row: dict[int, list[tuple[LogprobSpan, list[dict[int, Logprob]]]]] = {}
        at = 0
        for span in spans_of(outputs):
            entry = self._journal.get(int(outputs.rids[span.row]))
            if entry is not None:
                own = texts[at : at + span.ids.size] if entry.submit.detokenize else None
                by_row.setdefault(span.row, []).append((span, span.entries(own or None)))
            at += span.ids.size
        return by_row

    @staticmethod
    def _take_logprobs(
        entry: JournalEntry, found: list[tuple[LogprobSpan, list[dict[int, Logprob]]]]
    ) -> list[dict[int, Logprob]] | None:
        """Keep what belongs to the prompt, unless it was there before; returns what belongs to the row's tokens."""
        of_tokens: list[dict[int, Logprob]] | None = None
        for span, entries in found:
            if not span.is_prompt:
                of_tokens = entries if of_tokens is None else of_tokens + entries
                continue
            num_had = entry.num_prompt_logprobs + 1 - span.position
            if 0 <= num_had < len(entries):
                if entry.prompt_logprobs is None:
                    entry.prompt_logprobs = []
                entry.prompt_logprobs += entries[num_had:]
                entry.num_prompt_logprobs += len(entries) - num_had
        return of_tokens

    def _fail_gap(self, rid: int, entry: JournalEntry, index: int) -> None:
        """Tokens of a request are missing: it ends here, and the scheduler is told."""
        due = len(entry.emitted)
        logger.error("request %d: output %d came when %d was due", rid, index, due)
        entry.consumer.fail(RequestFailedError(f"output {index} came when {due} was due; tokens are missing"))
        self.abort(rid)
        del self._journal[rid]

    @staticmethod
    def _vectors(outputs: Outputs) -> dict[int, Any]:
        of_rows = np.split(outputs.vectors, outputs.vector_ends[:-1])
        return {  # none keeps the others alive
            row: vector.copy() for row, vector in zip(outputs.vector_rows.tolist(), of_rows, strict=True)
        }

    def _wake(self, consumers: list[Consumer]) -> None:
        by_host: dict[HostLoop, list[Consumer]] = {}
        unheard: list[Consumer] = []
        last: HostLoop | None = None
        waiting = unheard
        for consumer in consumers:
            host = consumer.host
            if host is not last:  # most often all are of one loop
                last, waiting = host, unheard if host is None else by_host.setdefault(host, [])
            waiting.append(consumer)
        for host, waiting in by_host.items():
            if not host.call_soon_threadsafe(_wake_all, waiting):
                self._drop_consumers(host)

    def _drop_consumers(self, host: HostLoop) -> None:
        """The loop is closed: these outputs will never be taken."""
        left = {rid: entry for rid, entry in self._journal.items() if entry.consumer.host is host}
        num_open = sum(not entry.consumer.is_aborted for entry in left.values())
        if num_open:
            logger.warning("an event loop was closed while %d streams were open; they are aborted", num_open)
        for rid in left:
            self._post(Abort(rids=np.array([rid], np.int32)))
            del self._journal[rid]

    # Controls

    async def ask_scheduler(self, verb: str, **arguments: Any) -> Any:
        """Its answer. While the scheduler is started again this waits, and asks the next one.

        It hears the question after everything that was submitted before. Raises what it raised, TimeoutError (counted from
        when it was asked), or why the engine has ended.
        """
        match verb:
            case "pause_generation":
                self._pause_mode = arguments["mode"]
            case "resume_generation":
                self._pause_mode = None
            case "start_timeline" | "take_timeline":
                self._has_timeline = verb == "start_timeline"
        self._num_asking += 1
        self.on_work()  # an answer that is waited for is watched over like a token that is waited for
        try:
            while True:
                link = await self._wait_for_turn()
                try:
                    return await self.ask(link, verb, **arguments)
                except PeerRestartedError as lost:
                    if verb == "check_policy":  # it loads code of the user, which may end one scheduler after the other
                        raise EngineError(
                            "the scheduler ended while it looked up policies, and none has changed; if their module ends the "
                            "process, mend it, else call set_policy() again"
                        ) from lost
                    continue
                except WouldBlock:
                    await anyio.sleep(RETRY_S)
                except PeerLostError as lost:
                    raise (self._error or EngineDeadError(str(lost))) from lost
        finally:
            self._num_asking -= 1

    async def _wait_for_turn(self) -> Link:
        """Wait for a scheduler, and until it has been sent what waits already."""
        while True:
            link = await self._wait_linked()
            if not self._unsent:
                return link
            turn = _UnsentAsk()
            self._unsent.append(turn)
            await turn.has_come.wait()
            if link is self._scheduler and link.is_open:
                return link

    async def _wait_linked(self) -> Link:
        while self._scheduler is None or not self._scheduler.is_open:
            if self._error is not None:
                raise self._error
            if not self.is_running and self._lost is None and not self.has_link:
                raise EngineShutdownError("the engine is not running")
            if self._linked is None:
                self._linked = anyio.Event()
            await self._linked.wait()
        if self._error is not None:
            raise self._error
        return self._scheduler

    def statistics(self) -> dict[str, Any]:
        return super().statistics() | {
            "num_requests": len(self._journal),
            "num_finished": self._num_finished,
            "num_repeated_outputs": self._num_repeated,
            "num_recoveries": self.num_recoveries,
            "num_resubmitted": self._num_resubmitted,
            "num_adopted": self._num_adopted,
            "num_late_outputs": self._num_late,
            "max_recovery_s": self.max_recovery_s,
        }


def _with_recoveries(end: RequestEnd, entry: JournalEntry) -> RequestEnd:
    """The end as the last scheduler tells it, and what it cannot know: that there were others before."""
    return replace(
        end,
        num_recoveries=end.num_recoveries + entry.num_recoveries,
        recovery_s=end.recovery_s + entry.recovery_s,
    )


def _error_of(end: RequestEnd) -> ActorLLMError:
    """What the caller of a request that failed gets."""
    message, details = str(end.error), dict(end.details or ())
    kind = details.pop("kind", None)
    if kind == OVERLOADED:
        return EngineOverloaded(message, **details)
    if kind == DRAINING:
        return EngineDrainingError(message)
    if kind == INVALID:
        return InvalidParameterError(message)
    failure = RequestFailedError(message)
    failure.end = end
    return failure


def _wake_all(consumers: list[Consumer]) -> None:
    """On their loop. What one of them runs may end the loop by SystemExit, which is not to cost the others their wake-up."""
    waiting = iter(consumers)
    try:
        for consumer in waiting:
            consumer.wake()
    except BaseException:
        _wake_all(list(waiting))
        raise
