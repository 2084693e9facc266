"""`RequestStream`: one request as its caller sees it, from `async for` to the final output.

The engine thread pushes what is new; the consumer takes everything that has accumulated in one output. So a slow consumer
gets fewer and larger outputs instead of a growing queue, and what waits for it costs no more than its tokens. No cancel scope
is held across a yield. Leaving the loop, cancelling the task or dropping the last reference posts the abort, and the blocks
are free within one step.
"""

from __future__ import annotations

import contextlib
import copy
import functools
import weakref
from collections import deque
from collections.abc import Callable
from typing import TYPE_CHECKING, Any

from actorllm.actors.engine_thread import HostLoop, SeveralWaitersError, Waiter, stay_at_exit
from actorllm.actors.frontend import Delta
from actorllm.errors import RequestFailedError
from actorllm.messages import DEADLINE_PASSED
from actorllm.types.flat_logprobs import FlatLogprobs
from actorllm.types.lora_request import LoRARequest
from actorllm.types.outputs import CompletionOutput, RequestFacts, RequestOutput
from actorllm.types.params import RequestOutputKind
from actorllm.types.request_end import RequestEnd

if TYPE_CHECKING:
    from actorllm.intake.tokenization import EncoderInput

MAX_SEPARATE = 16
"""So many deltas per sequence wait as they came; more are joined."""
MAX_JOINED_TOKENS = 256
"""A delta of so many tokens is joined with no further one: the work per token stays the same however many wait."""

DEADLINE_GRACE_S = 0.5
"""How long after its deadline a stream waits for the engine to end it, before it ends by itself."""

_NOTHING: deque[tuple[int, Delta]] = deque()


class Mailbox:
    """Where the engine puts what belongs to one request. It outlives the stream, which must be free to be dropped."""

    __slots__ = (
        "_max_deltas",
        "_num_sequences",
        "_other_starts",
        "deltas",
        "error",
        "has_end",
        "host",
        "is_aborted",
        "kv_transfer",
        "num_cached",
        "num_open",
        "on_news",
        "replica",
        "rids",
        "sent",
        "starts",
        "stream",
        "waiter",
        "wakes_at_end",
    )

    def __init__(self, host: HostLoop | None = None, wakes_at_end: bool = False, num_sequences: int = 1) -> None:
        self.host = host
        self.wakes_at_end = wakes_at_end
        """The consumer can do nothing with less than everything."""
        self.waiter: Waiter | None = None
        self.on_news: Callable[[], bool] | None = None
        """See `RequestStream.on_news`."""
        self.deltas: deque[tuple[int, Delta]] = deque()
        """What came, with the index of its sequence. The consumer takes from the left; the rest is the engine thread's."""
        self.stream: weakref.ref[RequestStream] | None = None
        self._num_sequences = num_sequences
        self._max_deltas = MAX_SEPARATE * num_sequences
        self.num_open = num_sequences
        """Sequences whose end has not come yet."""
        self.has_end = False
        """The last delta there will ever be has been pushed."""
        self.error: BaseException | None = None
        self.num_cached = 0
        """Prompt tokens that were found in the prefix cache; of several sequences, by the first."""
        self.rids: list[int] = []
        """One per sequence, known once the frontend has submitted the request."""
        self.sent: float | None = None
        """When the frontend submitted it, in monotonic seconds: what came before is the intake's time."""
        self.is_aborted = False
        self.starts: tuple[tuple[int, str], ...] = ()
        """The index of the first token of each version of the weights, of the first sequence. Replaced, never changed."""
        self._other_starts: dict[int, tuple[tuple[int, str], ...]] = {}
        """Of each further sequence."""
        self.replica: int | None = None
        """The replica that it is pinned to; None: any."""
        self.kv_transfer: dict[str, Any] | None = None
        """What a gateway is answered (`types.kv_transfer`), where it had a prompt computed."""

    # On the engine thread or a tokenizer worker

    def note_cached(self, num_tokens: int) -> None:
        self.num_cached = num_tokens

    def note_version(self, num_tokens: int, version: str, index: int = 0) -> None:
        if not num_tokens:
            starts = _from_the_start(version)
        else:
            starts = tuple(start for start in self.starts_of(index) if start[0] < num_tokens)
            if not starts or starts[-1][1] != version:
                starts += ((num_tokens, version),)
        if index:
            self._other_starts[index] = starts
        else:
            self.starts = starts

    def starts_of(self, index: int) -> tuple[tuple[int, str], ...]:
        return self._other_starts.get(index, ()) if index else self.starts

    def push(self, delta: Delta, index: int = 0) -> None:
        self.deltas.append((index, delta))
        if len(self.deltas) > self._max_deltas:
            self._join()
        if delta.end is not None:
            if not index:
                self.num_cached = delta.end.num_cached_tokens
            self.num_open -= 1
            if not self.num_open:
                self.has_end = True
                self._release()

    def fail(self, error: BaseException) -> None:
        self.error = error
        self._release()

    def end_unsent(self, now: float, stop_reason: str | None = None) -> None:
        """Abort a request that was never submitted: each sequence has its last output, with nothing in it."""
        end = RequestEnd(0, "abort", stop_reason, None, now, None, None, None, 0, 0, 0)
        for index in range(self._num_sequences):
            self.push(Delta([], "", end, now), index)

    def _join(self) -> None:
        """Make few of the deltas that are not taken. The consumer, which may come meanwhile, finds them in order or gone."""
        taken: list[tuple[int, Delta]] = []
        with contextlib.suppress(IndexError):
            while True:
                taken.append(self.deltas.pop())
        groups: list[tuple[int, list[Delta]]] = []
        open_groups: dict[int, tuple[list[Delta], int]] = {}
        for index, delta in reversed(taken):
            group, num_tokens = open_groups.get(index, (None, 0))
            if group is None or num_tokens + len(delta.tokens) > MAX_JOINED_TOKENS or delta.vector is not None:
                group, num_tokens = [], 0
                groups.append((index, group))
            group.append(delta)
            open_groups[index] = group, num_tokens + len(delta.tokens)
        self.deltas.extend([(index, Delta.joined(group)) for index, group in groups])
        self._max_deltas = max(MAX_SEPARATE * self._num_sequences, 2 * len(groups))

    def _release(self) -> None:
        """Nothing more comes: the stream may be read whenever, and the engine need not run for it."""
        stream = self.stream() if self.stream is not None else None
        if stream is not None:
            stream._hold = None

    # On the host's loop

    def wake(self) -> None:
        if self.on_news is not None:
            try:
                if self.on_news():
                    return
            except Exception as error:  # of one consumer: its stream ends with it, and others are woken behind it
                self.on_news = None
                self.fail(error)
        if self.waiter is not None and (not self.wakes_at_end or self.has_ended):
            self.waiter.resume()

    @property
    def has_ended(self) -> bool:
        """Whether nothing more will come."""
        return self.has_end or self.error is not None


class Sibling:
    """The consumer of one of several sequences of a request: it fills the mailbox that they share."""

    __slots__ = ("_index", "_mailbox", "_on_failure")

    def __init__(self, mailbox: Mailbox, index: int, on_failure: Callable[[Mailbox], None]) -> None:
        self._mailbox = mailbox
        self._index = index
        self._on_failure = on_failure

    @property
    def mailbox(self) -> Mailbox:
        return self._mailbox

    @property
    def host(self) -> HostLoop | None:
        return self._mailbox.host

    def note_cached(self, num_tokens: int) -> None:
        if not self._index:
            self._mailbox.num_cached = num_tokens

    def note_version(self, num_tokens: int, version: str) -> None:
        self._mailbox.note_version(num_tokens, version, self._index)

    @property
    def is_aborted(self) -> bool:
        return self._mailbox.is_aborted

    @property
    def wakes_at_end(self) -> bool:
        return self._mailbox.wakes_at_end

    def push(self, delta: Delta) -> None:
        self._mailbox.push(delta, self._index)

    def fail(self, error: BaseException) -> None:
        """The request fails as a whole: `on_failure` ends the other sequences."""
        self._mailbox.fail(error)
        self._on_failure(self._mailbox)

    def wake(self) -> None:
        self._mailbox.wake()


class Completion:
    """One sequence of a request as its stream has taken it so far."""

    __slots__ = (
        "_cumulative_logprob",
        "_logprobs",
        "_new",
        "_new_list",
        "_new_logprobs",
        "_text",
        "_token_ids",
        "end",
        "index",
        "is_delta",
        "num_tokens",
    )

    def __init__(self, index: int, kind: RequestOutputKind, has_logprobs: bool = False, is_flat: bool = False) -> None:
        self.index = index
        self.end: RequestEnd | None = None
        self.num_tokens = 0
        self.is_delta = kind is RequestOutputKind.DELTA
        self._text = ""
        self._token_ids: list[int] = []
        self._new: list[Delta] = []
        self._new_list: type[Any] = FlatLogprobs if is_flat else list
        self._logprobs: Any = self._new_list()
        self._new_logprobs: Any = self._new_list() if has_logprobs else None
        self._cumulative_logprob = 0.0

    def add(self, delta: Delta) -> None:
        self._new.append(delta)
        self.num_tokens += len(delta.tokens)
        if self._new_logprobs is not None and delta.logprobs is not None:
            self._new_logprobs += delta.logprobs
            # the chosen token comes first
            self._cumulative_logprob += sum(next(iter(entries.values())).logprob for entries in delta.logprobs)
        if delta.end is not None:
            self.end = delta.end

    def repeated(self, text: str, token_ids: list[int]) -> tuple[str, list[int]]:
        """What outputs that repeat everything have once these have come, whose tokens are counted already."""
        self._token_ids += token_ids
        self._text += text
        return self._text, self._token_ids.copy()

    def output(self, starts: tuple[tuple[int, str], ...] = ()) -> CompletionOutput:
        """What was added since the last output, or everything, as the kind of the request says.

        starts: the index of the first token of each version of the weights.
        """
        new, self._new = self._new, []
        if len(new) == 1:
            text, token_ids = new[0].text, new[0].tokens  # no other keeps this list
        else:
            text = "".join([delta.text for delta in new])
            token_ids = [token for delta in new for token in delta.tokens]
        if not self.is_delta:
            text, token_ids = self.repeated(text, token_ids)
        output = CompletionOutput._of_stream(self.index, text, token_ids, starts, self.num_tokens)
        if self._new_logprobs is not None:
            output.logprobs, self._new_logprobs = self._new_logprobs, self._new_list()
            if not self.is_delta:
                self._logprobs += output.logprobs
                output.logprobs = self._logprobs[:]
            output.cumulative_logprob = self._cumulative_logprob
        if self.end is not None:
            output.finish_reason = self.end.reason  # type: ignore[assignment]
            output.stop_reason = self.end.stop_reason
        return output


class RequestStream:
    """Asynchronous iterator over the `RequestOutput`s of one request.

    May be created outside of a loop; it belongs to the loop that first waits for it. `await stream.aclose()` or
    `async with` end it early. Iterating raises what the request failed of: InvalidPromptError, EngineOverloaded,
    RequestFailedError, EngineDeadError or EngineShutdownError.

    Example:
        async with llm.generate("Once upon a time", SamplingParams(max_tokens=100)) as stream:
            async for output in stream:
                if len(output.outputs[0].token_ids) > 4:
                    break  # the request ends with the block
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
        num_sequences: int = 1,
        *,
        has_logprobs: bool = False,
        has_prompt_logprobs: bool = False,
        is_flat: bool = False,
        deadline: float | None = None,
    ) -> None:
        """is_flat: log-probabilities come as FlatLogprobs."""
        self._facts = RequestFacts(request_id, prompt, arrival)
        self.encoder_input: EncoderInput | None = None
        self._kind = output_kind
        self._mailbox = mailbox
        self._on_abort = on_abort
        self._prompt_logprobs: Any = None
        if has_prompt_logprobs:
            self._prompt_logprobs = FlatLogprobs() if is_flat else []
            self._prompt_logprobs.append(None)
        self._completions = [Completion(index, output_kind, has_logprobs, is_flat) for index in range(num_sequences)]
        self._first = self._completions[0]
        self._num_open = num_sequences
        has_any_logprobs = has_logprobs or has_prompt_logprobs
        self._is_plain = num_sequences == 1 and not has_any_logprobs and output_kind is not RequestOutputKind.FINAL_ONLY
        self._ahead: tuple[int, Delta] | None = None
        """What was taken from the mailbox and is no part of an output yet: the end of a sequence."""
        self._last_emitted: float | None = None
        self._is_over = False
        self._ends_at = None if deadline is None else deadline + DEADLINE_GRACE_S
        self._is_late = False
        """The engine has not ended it in time: it still starts, or does not answer."""
        self._hold = hold
        """Keeps the engine running, until there is nothing more to come."""
        mailbox.stream = weakref.ref(self)

    @property
    def request_id(self) -> str:
        """As given, or made."""
        return self._facts.request_id

    @property
    def prompt(self) -> str | None:
        """The text of the prompt; None: it was given otherwise, or is not rendered yet."""
        return self._facts.prompt

    @prompt.setter
    def prompt(self, text: str | None) -> None:
        self._facts.prompt = text

    @property
    def prompt_token_ids(self) -> list[int]:
        """Empty until the prompt has been read."""
        return self._facts.prompt_token_ids

    @prompt_token_ids.setter
    def prompt_token_ids(self, ids: list[int]) -> None:
        self._facts.prompt_token_ids = ids

    @property
    def lora_request(self) -> LoRARequest | None:
        """The adapter that it is computed with; None: none."""
        return self._facts.lora_request

    @lora_request.setter
    def lora_request(self, lora_request: LoRARequest | None) -> None:
        self._facts.lora_request = lora_request

    @property
    def mailbox(self) -> Mailbox:
        """For callers that take its outputs otherwise than by waiting for them."""
        return self._mailbox

    @property
    def has_ended(self) -> bool:
        """Whether its last output, or its error, is there to be taken or was taken."""
        return self._is_over or self._mailbox.has_ended

    @property
    def num_open(self) -> int:
        """Sequences whose last output has not been taken."""
        return self._num_open

    def __aiter__(self) -> RequestStream:
        return self

    async def __anext__(self) -> RequestOutput:
        mailbox = self._mailbox
        try:
            while True:
                # Most often the task is back before anything else has come, and finds one delta when it wakes.
                if mailbox.deltas or self._ahead or mailbox.error is not None:
                    output = self.take()
                    if output is not None:
                        return output
                if self._is_over:
                    raise StopAsyncIteration
                if self._is_late:
                    return self._expire()
                if mailbox.waiter is None:
                    self._meet_host()
                else:
                    self._is_late = not await mailbox.waiter.wait(self._ends_at)
        except SeveralWaitersError:
            raise  # of another task, and no reason to end the request
        except BaseException:
            self.abort()  # nothing, unless the task was cancelled as it waited
            raise

    async def wait(self) -> None:
        """Until there may be something to `take`; not at all where there is. Cancelled, it aborts the request."""
        mailbox = self._mailbox
        if mailbox.has_end or mailbox.error is not None or self._ahead:
            return
        if mailbox.deltas and self._kind is not RequestOutputKind.FINAL_ONLY:
            return
        if mailbox.waiter is None:
            self._meet_host()
            return
        try:
            self._is_late = not await mailbox.waiter.wait(self._ends_at)
        except SeveralWaitersError:
            raise  # of another task, which ends no request
        except BaseException:
            self.abort()
            raise

    def _meet_host(self) -> None:
        """From now on what comes wakes the caller's loop. It has to look once more: something may have come before."""
        mailbox, host = self._mailbox, HostLoop.current()
        mailbox.waiter = host.waiter()
        mailbox.host = host  # after the waiter: a thread that finds the host may wake

    def on_news(self, take: Callable[[], bool] | None) -> None:
        """Call this on the loop of the consumer whenever something has come; None: no longer.

        take: returns True if it has taken what came, and False if the task that waits for the stream is to wake. What it
        raises is raised by the next `take` of the stream. It must not wait.
        """
        self._mailbox.on_news = take

    def take_deltas(self) -> list[tuple[int, Delta]] | None:
        """As `take` with RequestOutputKind.DELTA, for callers that make something else of it than an output.

        Returns (index of the sequence, what is new of it), none of which is the end of a sequence. None: an end comes next, or
        an error, and `take` has it.
        """
        found: list[tuple[int, Delta]] = []
        mailbox = self._mailbox
        has_failed = mailbox.error is not None or self._is_late  # asked before: what came before it is there
        pending = mailbox.deltas
        while pending and not self._ahead:
            try:
                entry = pending.popleft()
            except IndexError:
                break  # the engine thread is joining them, and wakes us when it is done
            index, delta = entry
            if delta.end is not None:
                self._ahead = entry
                break
            self._completions[index].num_tokens += len(delta.tokens)
            if self._facts.first_token is None and delta.tokens:
                self._facts.first_token = delta.first_emitted or delta.emitted
            self._last_emitted = delta.emitted
            found.append(entry)
        return None if not found and (has_failed or self._ahead or self._is_over) else found

    def take(self) -> RequestOutput | None:
        """Everything new as one output; None when there is nothing (yet, or any more).

        Raises:
            RequestError, EngineError: what the request failed of, once everything before it was taken.
        """
        if self._is_over:
            return None
        mailbox = self._mailbox
        pending, error = mailbox.deltas, mailbox.error
        if not self._is_plain or len(pending) != 1 or self._ahead:
            return self._take_all(pending, error)
        # One delta in the middle of a request: nearly all outputs are such. They are made here, in one go.
        try:
            entry = pending.popleft()
        except IndexError:  # the engine thread is joining it with others, and wakes us when it is done
            return self._take_all(pending, error)
        delta = entry[1]
        if delta.end is not None:
            self._ahead = entry
            return self._take_all(pending, error)
        text, token_ids, emitted, facts = delta.text, delta.tokens, delta.emitted, self._facts
        if facts.first_token is None and token_ids:
            facts.first_token = delta.first_emitted or emitted
        last = self._last_emitted
        if last is None or emitted > last:
            last = self._last_emitted = emitted
        completion = self._first
        completion.num_tokens += len(token_ids)
        if not completion.is_delta:
            text, token_ids = completion.repeated(text, token_ids)
        output = RequestOutput._of_delta(
            facts, text, token_ids, mailbox.num_cached, last, completion.num_tokens, mailbox.starts
        )
        if self.encoder_input is not None:
            self._add_encoder_input(output, self.encoder_input)
        return output

    def _take_all(self, pending: deque[tuple[int, Delta]], error: BaseException | None) -> RequestOutput | None:
        """As `take`, whatever has come. error: of the mailbox, as it was before."""
        if self._kind is RequestOutputKind.FINAL_ONLY and not self._mailbox.has_end:
            pending = _NOTHING  # half an output is none
        if not pending and not self._ahead:
            if error is not None:
                self._end_here()
                raise self._own(error) from error.__cause__
            return None
        changed = self._add_pending(pending)
        return self._output(changed) if changed else None

    @staticmethod
    def _add_encoder_input(output: RequestOutput, given: EncoderInput) -> None:
        output.encoder_prompt, output.encoder_prompt_token_ids = given.text, given.token_ids
        output.num_cached_tokens = max(0, output.num_cached_tokens - given.num_rows)  # of the decoder's prompt

    def _own(self, error: BaseException) -> BaseException:
        """One error may end many streams: each raises a copy, which gets a traceback of its own.

        No frame that raises it may name it. The two would keep each other alive, and with them the caller's variables.
        """
        stay_at_exit()
        own = copy.copy(error)
        if isinstance(own, RequestFailedError) and own.end is not None:
            self._completions[0].end = own.end
            own.metrics = self._facts.metrics_at_end(self._ends, self._last_emitted, self._num_tokens)
        return own

    def _add_pending(self, pending: deque[tuple[int, Delta]]) -> dict[int, Completion]:
        """Add what has come to its sequences; returns those."""
        changed: dict[int, Completion] = {}
        while pending or self._ahead is not None:
            try:
                index, delta = self._ahead or pending.popleft()
            except IndexError:
                break  # the engine thread is joining them, and wakes us when it is done
            self._ahead = None
            completion = changed[index] = self._completions[index]
            completion.add(delta)
            if self._prompt_logprobs is not None and delta.prompt_logprobs is not None and index == 0:
                # not in place: outputs that were taken hold what there was
                self._prompt_logprobs = self._prompt_logprobs[:]
                self._prompt_logprobs.extend(delta.prompt_logprobs)
            if self._facts.first_token is None and delta.tokens:
                self._facts.first_token = delta.first_emitted or delta.emitted
            if self._last_emitted is None or delta.emitted > self._last_emitted:
                self._last_emitted = delta.emitted
            if delta.end is not None:
                self._num_open -= 1
        return changed

    def _expire(self) -> RequestOutput:
        """Its last output, with what has come, where the engine does not say that its deadline has passed."""
        self.abort()
        changed = self._add_pending(self._mailbox.deltas)
        for completion in self._completions:
            if completion.end is None:
                times = (self._facts.arrival, None, self._facts.first_token, self._last_emitted)
                completion.end = RequestEnd(0, "abort", DEADLINE_PASSED, None, *times, 0, 0, 0)
                changed[completion.index] = completion
        self._num_open = 0
        return self._output(changed)

    def _output(self, changed: dict[int, Completion]) -> RequestOutput:
        is_finished = not self._num_open
        prompt_logprobs = self._prompt_logprobs
        if self._kind is RequestOutputKind.DELTA and prompt_logprobs is not None:
            self._prompt_logprobs = type(prompt_logprobs)()  # flat ones stay flat
        if is_finished:
            self._end_here()
        mailbox = self._mailbox
        indexes = sorted(changed) if len(changed) > 1 else changed
        outputs = [changed[index].output(mailbox.starts_of(index)) for index in indexes]
        ends = self._ends if is_finished else ()
        output = RequestOutput._of_stream(
            self._facts, outputs, mailbox.num_cached, self._last_emitted, self._num_tokens, ends
        )
        if prompt_logprobs is not None:
            output.prompt_logprobs = prompt_logprobs
        if self.encoder_input is not None:
            self._add_encoder_input(output, self.encoder_input)
        if is_finished:
            output.finished = True
            output.kv_transfer_params = mailbox.kv_transfer
        return output

    @property
    def _num_tokens(self) -> int:
        if len(self._completions) == 1:
            return self._completions[0].num_tokens
        return sum([completion.num_tokens for completion in self._completions])

    @property
    def _ends(self) -> list[RequestEnd]:
        """Of its sequences, as far as they have ended."""
        return [completion.end for completion in self._completions if completion.end is not None]

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


@functools.lru_cache(maxsize=8)
def _from_the_start(version: str) -> tuple[tuple[int, str], ...]:
    """One object for all requests that begin with it: what streams share is in the processor's caches when a token comes."""
    return ((0, version),)
