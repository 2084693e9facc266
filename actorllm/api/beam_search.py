"""Beam search: the most likely continuations of a prompt, found a token at a time by requests for one token each.

`BeamSearch` is the search over one prompt, without I/O: it says which sequences want their next token, and takes the likely
ones with their log-probabilities. The front doors ask the engine in between (`step_params`). Scores, ties and ends are vLLM's. A
score is the log-probability divided by length (prompt included, a final end-of-text not) to the power of length_penalty. Every
beam has 2 * beam_width candidates. Sequences that end leave the beam and compete at the end. What ends them is the
tokenizer's own end-of-text (`end_ids`), and no other that the model's generation_config may name.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

from actorllm.errors import InvalidParameterError, RequestFailedError
from actorllm.types.logprob import Logprob
from actorllm.types.lora_request import LoRARequest
from actorllm.types.outputs import CompletionOutput, RequestOutput
from actorllm.types.params import (
    MAX_TEMPERATURE,
    SamplingParams,
    _integer,
    _number,
    _refuse_unless_idle,
    names_unknown_parameters,
)

if TYPE_CHECKING:
    from actorllm.config import ModelConfig
    from actorllm.text.tokenizer import Tokenizer

IDLE_PARAMETERS: dict[str, tuple[Any, ...]] = {"structured_outputs": (None,), "watermarking": (None, False)}
"""Fields of vLLM's that are accepted at these values, where they ask for nothing."""


@names_unknown_parameters({})
@dataclass(slots=True)
class BeamSearchParams:
    """How to search for the most likely continuations. The order of the arguments is vLLM's.

    Arguments:
        beam_width: sequences kept at every step and returned.
        max_tokens: of the longest continuation.
        ignore_eos: end-of-text is a token like any other; default False.
        temperature: changes nothing: nothing is drawn.
        length_penalty: above 1 favours long sequences, below 1 short ones; default 1.
        include_stop_str_in_output: an end-of-text token stays in the output of `AsyncLLM.beam_search`; default False.
        structured_outputs, watermarking: accepted where they ask for nothing.
        skip_special_tokens: special tokens have no text; default True.

    Raises:
        InvalidParameterError: one of them cannot be; UnknownParameterError: names the nearest one.
    """

    beam_width: int
    max_tokens: int
    ignore_eos: bool = False
    temperature: float = 0.0
    length_penalty: float = 1.0
    include_stop_str_in_output: bool = False
    structured_outputs: None = None
    skip_special_tokens: bool = True
    watermarking: bool | None = None

    def __post_init__(self) -> None:
        self.beam_width = _integer("beam_width", self.beam_width, low=1)
        self.max_tokens = _integer("max_tokens", self.max_tokens, low=1)
        self.temperature = _number("temperature", self.temperature, low=0.0, high=MAX_TEMPERATURE)
        self.length_penalty = _number("length_penalty", self.length_penalty)
        for name in IDLE_PARAMETERS:
            _refuse_unless_idle(name, getattr(self, name), IDLE_PARAMETERS)
        for name in ("ignore_eos", "include_stop_str_in_output", "skip_special_tokens"):
            if not isinstance(getattr(self, name), bool):
                raise InvalidParameterError(f"{name}={getattr(self, name)!r} must be True or False")


@dataclass(slots=True)
class BeamSearchSequence:
    """One sequence: its tokens, the prompt's first."""

    tokens: list[int]
    logprobs: list[dict[int, Logprob]] = field(default_factory=list)
    """The candidates among which each new token was chosen."""
    lora_request: LoRARequest | None = None
    cum_logprob: float = 0.0
    """The sum over the new tokens."""
    text: str | None = None
    finish_reason: str | None = None
    stop_reason: int | str | None = None


@dataclass(slots=True)
class BeamSearchOutput:
    """The best sequences of one prompt, best first."""

    sequences: list[BeamSearchSequence]


def step_params(params: BeamSearchParams) -> SamplingParams:
    """Of the request for the next token of one beam."""
    arguments: dict[str, Any] = {"logprobs": 2 * params.beam_width, "ignore_eos": True, "detokenize": False}
    return SamplingParams(max_tokens=1, temperature=0.0, **arguments)


def end_ids(model: ModelConfig, tokenizer: Tokenizer | None) -> Collection[int]:
    """The tokens that end a sequence: the tokenizer's end-of-text; without a tokenizer, those of the model."""
    if tokenizer is None:
        return model.eos_token_ids
    return () if tokenizer.eos_token_id is None else (tokenizer.eos_token_id,)


class BeamSearch:
    """The search from one prompt (token ids, at least one). While not `is_over`: ask, then `advance`."""

    def __init__(
        self, prompt: Sequence[int], params: BeamSearchParams, end_ids: Collection[int], max_model_len: int
    ) -> None:
        self.prompt = list(prompt)
        self.beams = [BeamSearchSequence(self.prompt.copy())]
        """What wants its next token, best first."""
        self.ended: list[BeamSearchSequence] = []
        self._params = params
        self._eos = frozenset(() if params.ignore_eos else end_ids)
        self._num_left = min(params.max_tokens, max_model_len - len(self.prompt))

    @property
    def is_over(self) -> bool:
        return not self._num_left or not self.beams

    def advance(self, outputs: Sequence[RequestOutput]) -> None:
        """The answers for `beams`, in their order: outputs of one token with its log probabilities."""
        candidates: list[BeamSearchSequence] = []
        for beam, output in zip(self.beams, outputs, strict=True):
            likely, entries = self._likely(output)
            for token, logprob in likely:
                logprobs = [*beam.logprobs, entries]
                new = BeamSearchSequence([*beam.tokens, token], logprobs, cum_logprob=beam.cum_logprob + logprob)
                if token in self._eos:
                    new.finish_reason, new.stop_reason = "stop", token
                    self.ended.append(new)
                else:
                    candidates.append(new)
        self._num_left -= 1
        self.beams = self._best_of(candidates)

    def best(self) -> list[BeamSearchSequence]:
        """The result so far: at most beam_width sequences, best first."""
        best = self._best_of([*self.ended, *self.beams])
        for sequence in best:
            sequence.finish_reason = sequence.finish_reason or "length"
        return best

    def score(self, sequence: BeamSearchSequence) -> float:
        """What sequences are compared by."""
        length = len(sequence.tokens) - (sequence.tokens[-1] in self._eos)
        return sequence.cum_logprob / float(length**self._params.length_penalty)

    def output(self, request_id: str, prompt: str | None, decode: Callable[..., str]) -> RequestOutput:
        """The result as a request's: a completion for every sequence, without the prompt. decode: as the tokenizer's."""
        completions = []
        for index, sequence in enumerate(self.best()):
            tokens = sequence.tokens[len(self.prompt) :]
            without_end = tokens[:-1] if sequence.finish_reason == "stop" else tokens
            completions.append(
                CompletionOutput(
                    index,
                    decode(without_end, skip_special_tokens=self._params.skip_special_tokens),
                    tokens if self._params.include_stop_str_in_output else without_end,
                    cumulative_logprob=sequence.cum_logprob,
                    logprobs=sequence.logprobs,
                    finish_reason=sequence.finish_reason,  # type: ignore[arg-type]
                    stop_reason=sequence.stop_reason,
                )
            )
        return RequestOutput(request_id, prompt, self.prompt, outputs=completions, finished=True)

    def _best_of(self, sequences: list[BeamSearchSequence]) -> list[BeamSearchSequence]:
        return sorted(sequences, key=self.score, reverse=True)[: self._params.beam_width]

    def _likely(self, output: RequestOutput) -> tuple[list[tuple[int, float]], dict[int, Logprob]]:
        """Tokens and log probabilities, the likeliest first, and all of them: beside the top ones there may be another."""
        logprobs = output.outputs[0].logprobs
        if not logprobs:
            reason = output.outputs[0].finish_reason
            raise RequestFailedError(
                f"a request of the beam search ended with {reason!r} and without log probabilities"
            )
        ranked = sorted(logprobs[0].items(), key=lambda item: -item[1].logprob)
        return [(token, entry.logprob) for token, entry in ranked[: 2 * self._params.beam_width]], logprobs[0]
