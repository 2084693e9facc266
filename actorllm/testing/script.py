"""`ScriptedAnswer` and `Script`: what a scripted worker gives for each prompt.

The script belongs to the engine and outlives its workers: it knows which answer each request has, and which faults have happened.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import TypeAlias

import anyio

from actorllm.errors import ConfigError
from actorllm.text.tokenizer import Tokenizer


@dataclass(frozen=True, slots=True)
class ScriptedAnswer:
    """What one request gets.

    Arguments:
        text: the text, or the token ids; the end-of-sequence token follows it. `max_tokens` of the request cuts it.
        first_token_s: seconds of the step that gives the first token; default 0.
        token_s: seconds of the step of each later token; default 0.
        fails_after: after so many tokens the request ends with RequestFailedError; None: it does not.
        worker_dies_after: after so many tokens the worker dies once; it is replaced, and the stream goes on. None: it does not.
        engine_dies_after: after so many tokens the engine dies: every open stream ends with EngineDeadError. None: it does not.
        logprobs: the log-probabilities of its tokens, in their order; those that are missing are 0.

    Raises:
        ConfigError: a negative or infinite number, or a log-probability above 0.
    """

    text: str | Sequence[int]
    first_token_s: float = 0.0
    token_s: float = 0.0
    fails_after: int | None = None
    worker_dies_after: int | None = None
    engine_dies_after: int | None = None
    logprobs: Sequence[float] = ()

    def __post_init__(self) -> None:
        for name in ("first_token_s", "token_s", "fails_after", "worker_dies_after", "engine_dies_after"):
            value = getattr(self, name)
            if value is not None and not (isinstance(value, int | float) and 0 <= value < math.inf):
                raise ConfigError(f"{name}={value!r} must be a finite number of at least 0")
        for value in self.logprobs:
            if not (isinstance(value, int | float) and -math.inf < value <= 0):
                raise ConfigError(f"logprobs holds {value!r}, which must be a finite number of at most 0")


Given: TypeAlias = ScriptedAnswer | str
Answers: TypeAlias = Mapping[str, Given] | Sequence[Given] | Callable[[str], Given]
"""By the text of the prompt; or in the order in which prompts reach the worker; or a function of the prompt."""


PartKey: TypeAlias = tuple[tuple[int, ...], int, int]
"""The prompt of a request, its seed and its number among the samples."""


@dataclass(slots=True, eq=False)
class Part:
    """One request in the script."""

    answer: ScriptedAnswer
    token_ids: list[int]
    key: PartKey
    time: float
    """Of its latest token, in seconds of the engine's clock; at first of its arrival at a worker."""
    has_killed: bool = False
    num_given: int = 0
    is_held: bool = True
    """A slot of the worker has the request."""
    is_left: bool = False
    """The request has ended, and its slot does not know it yet."""
    resumes: bool = False
    """A step was lost: the request may begin anew, and is the same."""

    def is_of(self, num_outputs: int) -> bool:
        """Whether a request that has so many tokens may be this one. It has no slot."""
        return not self.is_held and (num_outputs > 0 or self.resumes or not self.num_given)

    def cost(self, index: int) -> float:
        """Seconds of the step that gives this token."""
        return self.answer.token_s if index else self.answer.first_token_s

    def token(self, index: int) -> int:
        return self.token_ids[min(index, len(self.token_ids) - 1)]

    def logprob(self, index: int) -> float:
        return self.answer.logprobs[index] if index < len(self.answer.logprobs) else 0.0


class Script:
    """answers: as `Answers`. eos: the id that ends an answer."""

    def __init__(self, answers: Answers, tokenizer: Tokenizer, eos: int) -> None:
        if isinstance(answers, str) or not (callable(answers) or isinstance(answers, Mapping | Sequence)):
            raise ConfigError(f"answers={answers!r:.80} must be a mapping, a list or a function of the prompt")
        self._answers = answers
        self._in_order: Iterator[Given] | None = iter(answers) if isinstance(answers, Sequence) else None
        self._tokenizer = tokenizer
        self._eos = eos
        self.news = anyio.Event()
        """A request of the step that waits has ended; the worker makes a new one for each wait."""
        self._parts: dict[PartKey, list[Part]] = {}
        """Of the requests that a worker has had, and that have not ended."""
        self._failed: Counter[PartKey] = Counter()
        """Requests that have failed here, and of which the scheduler has not told yet."""

    def part(self, prompt_ids: Sequence[int], seed: int, sample_index: int, time: float, num_outputs: int) -> Part:
        """Of a request that enters a slot, the same after every fault. Each request like it has a part of its own.

        num_outputs: the tokens that it has. Raises LookupError where the script has no answer.
        """
        key = tuple(prompt_ids), seed, sample_index
        known = [part for part in self._parts.get(key, ()) if part.is_of(num_outputs)]
        if known:
            part = min(known, key=lambda part: abs(part.num_given - num_outputs))
            part.resumes, part.is_held = False, True
            return part
        given = self._answer(self._tokenizer.decode(prompt_ids, skip_special_tokens=True))
        answer = ScriptedAnswer(given) if isinstance(given, str) else given
        text = answer.text
        ids = self._tokenizer.encode(text, False).tolist() if isinstance(text, str) else list(text)
        part = Part(answer, [*ids, self._eos], key, time)
        self._parts.setdefault(key, []).append(part)
        return part

    def end(self, part: Part) -> None:
        """Its request will not come again."""
        self._keep(part.key, [other for other in self._parts.get(part.key, ()) if other is not part])

    def fail(self, part: Part) -> None:
        """Its request fails; that it has ended will be told as well, and is not of another request like it.

        Counted once: the step behind the one that failed is planned already, and fails with the same request.
        """
        if not part.is_left:
            self._failed[part.key] += 1
            part.is_left = True
        self.end(part)

    def leave(self, prompt_ids: Sequence[int], seed: int, sample_index: int) -> None:
        """A request like this has ended: no step waits for it any more."""
        key = tuple(prompt_ids), seed, sample_index
        if self._failed[key]:
            self._failed -= Counter({key: 1})
            return
        parts = [part for part in self._parts.get(key, ()) if not part.is_left]
        if parts:
            part = max(parts, key=lambda part: part.is_held)
            part.is_left = True
            self.news.set()
            if not part.is_held:
                self.end(part)

    def release(self, part: Part) -> None:
        """Its slot is free."""
        part.is_held = False
        if part.is_left:
            self.end(part)

    def lose_step(self) -> None:
        """What the latest steps have given may be asked for again, and no slot has a request any more."""
        for key, parts in list(self._parts.items()):
            self._keep(key, [part for part in parts if not part.is_left])
            for part in parts:
                part.resumes, part.is_held = True, False

    def _keep(self, key: PartKey, parts: list[Part]) -> None:
        """What is left of the requests with this key."""
        if parts:
            self._parts[key] = parts
        else:
            self._parts.pop(key, None)

    def _answer(self, prompt: str) -> Given:
        if self._in_order is not None:
            given = next(self._in_order, None)
            if given is None:
                raise LookupError(f"the script has no more answers; the prompt {prompt!r:.200} has none")
            return given
        if isinstance(self._answers, Mapping):
            if prompt not in self._answers:
                raise LookupError(f"the script has no answer for the prompt {prompt!r:.200}")
            return self._answers[prompt]
        assert callable(self._answers)
        return self._answers(prompt)
