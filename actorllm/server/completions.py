"""`POST /v1/completions`: prompts as text or token ids, one or several, and the shape of what goes back."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
import orjson

from actorllm.errors import InvalidParameterError, InvalidPromptError
from actorllm.intake.tokenization import Prompt, too_many_characters
from actorllm.server.copies import check_copies
from actorllm.server.envelope import ApiError, shown
from actorllm.server.logprob_format import LogprobsView, Position, of_prompt
from actorllm.server.protocol import CompletionRequest
from actorllm.server.sampling import Defaults, Extras, extras_of, sampling_params
from actorllm.server.shape import AnswerView, OpenAIShape, PromptState, Shape, versions_of
from actorllm.server.tools import warnings_of
from actorllm.types.outputs import CompletionOutput, RequestOutput
from actorllm.types.params import MAX_N, RequestOutputKind, SamplingParams

DEFAULT_MAX_TOKENS = 16


@dataclass(frozen=True, slots=True)
class Asked:
    """What the engine is asked for one HTTP request."""

    prompts: list[Prompt]
    params: SamplingParams
    extras: Extras
    shape: Shape
    is_streamed: bool


def ask(
    body: CompletionRequest,
    headers: Mapping[str, str],
    defaults: Defaults,
    model: str,
    decode: Callable[[list[int]], str],
) -> Asked:
    """Raises ApiError, InvalidParameterError and InvalidPromptError."""
    extras = extras_of(body, headers)
    is_streamed = bool(body.stream)
    check_stream(body)
    prompts = prompts_of(body.prompt, defaults.max_prompt_characters, body.truncate_prompt_tokens)
    decided: dict[str, Any] = {}
    number = body.logprobs
    if number is None and body.logprob_token_ids:
        raise ApiError(400, "logprob_token_ids needs logprobs, too", "logprob_token_ids")
    if number is not None:
        decided["logprobs"] = None if body.logprob_token_ids else number
        if body.echo and body.prompt_logprobs is None:
            decided["prompt_logprobs"] = number
    is_prompt_only = bool(body.echo) and body.max_tokens == 0
    if is_prompt_only:  # OpenAI's way to ask for the log-probabilities of a text
        decided |= {"max_tokens": 1, "min_tokens": 0}
    elif body.max_tokens is None:
        decided["max_tokens"] = defaults.sampling.get("max_tokens", DEFAULT_MAX_TOKENS)
    kind = RequestOutputKind.DELTA if is_streamed else RequestOutputKind.FINAL_ONLY
    params = sampling_params(body, defaults, kind, **decided)
    extras.warnings += warnings_of(params.structured_outputs)
    if len(prompts) * params.n > MAX_N:
        raise InvalidParameterError(
            f"prompt: {len(prompts)} prompts with n={params.n} are more than {MAX_N} sequences; send fewer at a time"
        )
    for field, is_asked in (("echo", body.echo), ("return_token_ids", body.return_token_ids)):
        if is_asked:
            check_copies(prompts, params.n, field, params.prompt_logprobs if field == "echo" else None)
    if params.prompt_logprobs is not None:
        check_copies(prompts, params.n, "prompt_logprobs", params.prompt_logprobs)
    if body.cache_salt is not None:
        prompts = [_salted(prompt, body.cache_salt) for prompt in prompts]
    logprobs = view_of_logprobs(number, body.logprob_token_ids, body.return_tokens_as_token_ids)
    view = AnswerView.of(body, model, logprobs)
    shape = CompletionShape(view, len(prompts), params.n, extras.slo, decode, body.request_id)
    shape.is_prompt_only = is_prompt_only
    shape.is_truncated = body.truncate_prompt_tokens is not None
    shape.shows_prompt_logprobs = body.prompt_logprobs is not None
    return Asked(prompts, params, extras, shape, is_streamed)


def view_of_logprobs(number: int | None, token_ids: list[int] | None, as_ids: bool | None) -> LogprobsView | None:
    return None if number is None else LogprobsView(-1 if token_ids else number, bool(as_ids))


def check_stream(body: Any) -> None:
    """What does not go together with a stream, or without one."""
    if body.stream_options is not None and not body.stream:
        raise ApiError(400, "stream_options needs stream=true", "stream_options")
    if body.stream and body.prompt_logprobs is not None:
        raise ApiError(400, "prompt_logprobs are not available in a stream; leave stream out", "prompt_logprobs")


def prompts_of(prompt: Any, max_characters: int, truncation: int | None) -> list[Prompt]:
    """A text, token ids (an array where they are many), or a list of either. Raises InvalidPromptError for what is none."""
    if isinstance(prompt, str):
        if not prompt:  # as in vLLM, whose engine takes it where the model begins texts with a token of its own
            raise InvalidPromptError("the prompt is empty")
        prompts: list[Prompt] = [prompt]
    elif isinstance(prompt, np.ndarray):
        prompts = [prompt]
    elif not isinstance(prompt, list) or not prompt:
        raise InvalidPromptError(f"prompt={shown(prompt)} must be text, token ids, or a list of either")
    elif isinstance(prompt[0], int):
        prompts = [prompt]
    else:
        prompts = list(prompt)
    for one in prompts:
        if not isinstance(one, str | list | np.ndarray):
            raise InvalidPromptError(f"prompt={shown(one)} must be text or token ids")
        if isinstance(one, str) and truncation is None:
            check_length(one, max_characters)
    return prompts


def check_length(text: str, max_characters: int) -> None:
    """The engine's own bound (`max_prompt_characters`), where the engine is not asked, or before work is done for others."""
    if len(text) > max_characters:
        raise InvalidPromptError(too_many_characters(len(text), max_characters))


def _salted(prompt: Prompt, salt: str) -> Prompt:
    return {"prompt" if isinstance(prompt, str) else "prompt_token_ids": prompt, "cache_salt": salt}


class CompletionShape(OpenAIShape):
    WHOLE = CHUNK = "text_completion"
    PREFIX = "cmpl"
    PLAIN = (b',"text":', b',"logprobs":null,"finish_reason":null,"stop_reason":null,"token_ids":null}')

    is_truncated = False
    """The model may have seen less than the prompt that was sent; what it has seen is echoed."""

    is_prompt_only = False
    """Only the prompt is shown, and the token that had to be generated is nowhere to be seen."""
    shows_prompt_logprobs = False

    def __init__(self, *args: Any) -> None:
        super().__init__(*args)
        self._offsets = [0] * len(self._num_tokens)

    def whole(self, outputs: Sequence[RequestOutput]) -> bytes:
        return super().whole([self._shown(output) for output in outputs])

    def events(self, number: int, output: RequestOutput) -> bytes:
        return super().events(number, self._shown(output))

    def _shown(self, output: RequestOutput) -> RequestOutput:
        if not self.is_prompt_only:
            return output
        outputs = [
            replace(
                one,
                text="",
                token_ids=[],
                logprobs=None,
                finish_reason="length" if one.finish_reason == "stop" else one.finish_reason,
                stop_reason=None,
            )
            for one in output.outputs
        ]
        return replace(output, outputs=outputs)

    def _echoed(self, output: RequestOutput) -> str:
        if output.prompt is None or self.is_truncated:
            return self._decode(output.prompt_token_ids)
        return output.prompt

    def _whole_choice(self, index: int, output: RequestOutput, one: CompletionOutput) -> dict[str, Any]:
        prompt = self._echoed(output) if self.view.echo else ""
        choice: dict[str, Any] = {"index": index, "text": prompt + one.text, "logprobs": None}
        if self.view.logprobs is not None:
            positions, offset = self._positions(one), 0
            if self.view.echo:
                assert output.prompt_logprobs is not None
                echoed: list[Position] = list(zip(output.prompt_token_ids, output.prompt_logprobs, strict=True))
                offset = self.view.logprobs.offset_of_prompt(prompt, echoed, self._decode)
                positions = [*echoed, *positions]
            choice["logprobs"] = self.view.logprobs.of_text(positions, self._decode, offset)
        choice |= {"finish_reason": one.finish_reason, "stop_reason": one.stop_reason}
        has_ids = self.view.has_token_ids
        choice["token_ids"] = one.token_ids if has_ids else None
        choice["prompt_logprobs"] = of_prompt(output) if self.shows_prompt_logprobs else None
        choice["prompt_token_ids"] = output.prompt_token_ids if has_ids else None
        if has_ids:
            choice["weight_versions"] = versions_of(one)
        return choice

    def _opening(self, index: int, state: PromptState, output: RequestOutput) -> list[bytes]:
        if not self.view.echo:
            return []
        text = self._echoed(output)
        logprobs = None
        if self.view.logprobs is not None:
            if state.echoed is None:
                positions: list[Position] = list(zip(state.ids, state.logprobs or (), strict=True))
                offset = self.view.logprobs.offset_of_prompt(text, positions, self._decode)
                columns = self.view.logprobs.of_text(positions, self._decode, offset)
                state.echoed = orjson.Fragment(orjson.dumps(columns)), len(text)
            logprobs, self._offsets[index] = state.echoed
        choice: dict[str, Any] = {"index": index, "text": text, "logprobs": logprobs, "finish_reason": None}
        if self.view.has_token_ids:
            choice["prompt_token_ids"] = state.ids
        return [self._event(choice, state, 0)]

    def _choice(self, index: int, one: CompletionOutput) -> dict[str, Any]:
        choice: dict[str, Any] = {
            "index": index,
            "text": one.text,
            "logprobs": None,
            "finish_reason": one.finish_reason,
            "stop_reason": one.stop_reason,
        }
        if self.view.logprobs is not None:
            positions = self._positions(one)
            choice["logprobs"] = self.view.logprobs.of_text(positions, self._decode, self._offsets[index])
            self._offsets[index] += self.view.logprobs.width(positions, self._decode)
        choice["token_ids"] = one.token_ids if self.view.has_token_ids else None
        if self.view.has_token_ids and one.finish_reason is not None:
            choice["weight_versions"] = versions_of(one)
        return choice
