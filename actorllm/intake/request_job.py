"""`RequestJob`: the prompt of one request is read and checked, and the request handed to the frontend. A part of `Engine`."""

from __future__ import annotations

import weakref
from collections.abc import Callable
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Protocol

from actorllm.client.stream import Mailbox, RequestStream
from actorllm.clock import now
from actorllm.errors import ActorLLMError, InvalidPromptError, without_frames
from actorllm.intake.job import Job, JobPlace
from actorllm.messages import DEADLINE_PASSED, Submit
from actorllm.types.params import RequestOutputKind

if TYPE_CHECKING:
    from actorllm.intake.tokenization import Prompt, PromptReader
    from actorllm.intake.tokenizer_pool import TokenizerPool


@dataclass(frozen=True, slots=True)
class RequestSpec:
    """What the engine is to do for one request, as far as its kind makes a difference."""

    num_sequences: int
    output_kind: RequestOutputKind
    tokenization: dict[str, Any]
    """The keyword arguments of `PromptReader.tokenize`."""
    new_stream: Callable[..., RequestStream]
    """Of the constructor's arguments that do not depend on the kind."""
    make_maker: Callable[..., Callable[[int], Submit]]
    """From the tokenized prompt and (number, arrival, carried) to what makes the message."""
    prompts: Callable[[], PromptReader]
    """What reads the prompt; may take long."""
    is_heavy: bool = False
    """What it needs beside its prompt may take long to read."""


class RequestEngine(Protocol):
    """What the job of a request asks of its engine, an `Engine`."""

    prompts: PromptReader
    _tokenizer_pool: TokenizerPool | None

    def _start(self) -> None: ...
    def _settle(
        self, mailbox: Mailbox, num_sequences: int, make_submit: Callable[[int], Submit] | None = None
    ) -> bool: ...
    def _wake(self, mailbox: Mailbox) -> None: ...
    def _fail(self, mailbox: Mailbox, error: BaseException) -> None: ...


class RequestJob(Job):
    """Of one request, from the call that submitted it until the frontend has it. Does not keep its stream."""

    def __init__(
        self,
        engine: RequestEngine,
        prompt: Prompt,
        asked: RequestSpec,
        number: int,
        arrival: float,
        carried: dict[str, Any],
        stream: RequestStream,
    ) -> None:
        self._engine = engine
        self._prompt = prompt
        self._asked = asked
        self._number = number
        self._arrival = arrival
        self._carried = carried
        self._submitted = now()
        self._mailbox: Mailbox = stream.mailbox
        self._stream = weakref.ref(stream)
        self.submitter = carried["tenant"]
        self.is_heavy = asked.is_heavy or engine.prompts.is_large(prompt)

    def is_gone(self, now: float) -> bool:
        deadline = self._carried["deadline"]
        return self._mailbox.is_aborted or (deadline is not None and deadline <= now)

    def run(self, worker: JobPlace | None) -> None:
        has_started = False
        try:
            self._engine._start()
            has_started = True
            if worker is not None:
                if self.is_gone(now()):
                    self.end(None)
                    return
                worker.begin()
            self._read(worker)
        except BaseException as error:  # a panic of a library in Rust is no Exception
            self.end(without_frames(_told(error) if has_started else error))
            if worker is None and isinstance(error, KeyboardInterrupt | SystemExit):
                raise  # on the caller's thread

    def _read(self, worker: JobPlace | None) -> None:
        """Tokenize, check, hand over."""
        began = now()
        asked, engine = self._asked, self._engine
        tokenized = asked.prompts().tokenize(self._prompt, workplace=worker, **asked.tokenization)
        make_submit = asked.make_maker(tokenized, number=self._number, arrival=self._arrival, carried=self._carried)
        stream = self._stream()
        if stream is not None:
            stream.prompt = tokenized.text
            shown = tokenized.shown_ids
            stream.prompt_token_ids = tokenized.ids.tolist() if shown is None else shown
            stream.encoder_input = tokenized.encoder_input
        del stream
        if self._mailbox.is_aborted:  # while it was read
            self.end(None)
            return
        if engine._settle(self._mailbox, asked.num_sequences, make_submit) and engine._tokenizer_pool is not None:
            engine._tokenizer_pool.note_read(began - self._submitted, now() - began)

    def end(self, error: BaseException | None) -> None:
        if not self._engine._settle(self._mailbox, self._asked.num_sequences):
            return
        if error is None:
            is_late = not self._mailbox.is_aborted
            self._mailbox.end_unsent(now(), DEADLINE_PASSED if is_late else None)
            self._engine._wake(self._mailbox)
            if self._engine._tokenizer_pool is not None:
                self._engine._tokenizer_pool.note_dropped()
        else:
            self._engine._fail(self._mailbox, error)


def _told(error: BaseException) -> BaseException:
    """What the request is told: nothing of the inside of the engine."""
    if isinstance(error, ActorLLMError):
        return error
    told = InvalidPromptError(f"this prompt cannot be read ({type(error).__name__}: {error!s:.200})")
    told.__cause__ = error
    return told
