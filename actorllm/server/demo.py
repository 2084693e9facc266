"""`POST /generate`: the plain endpoint of vLLM's demo server. A prompt and sampling parameters in, texts with prompt out.

A stream has a line of JSON per output, each with all of the text so far.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
import orjson

from actorllm.errors import InvalidPromptError
from actorllm.server.completions import check_length
from actorllm.server.copies import check_copies
from actorllm.server.protocol import Body
from actorllm.server.sampling import Defaults, Extras, contradictions_of, objective_of
from actorllm.server.shape import Shape
from actorllm.types.outputs import RequestOutput
from actorllm.types.params import RequestOutputKind, SamplingParams

MAX_TOKENS = 1 << 14
"""Each event of a stream has all of the text so far; a request counts as no longer than this."""


class GenerateRequest(Body):
    """Everything beside these fields is a sampling parameter, by its name in `SamplingParams`."""

    TOKEN_FIELDS = ("allowed_token_ids",)

    prompt: str
    stream: bool | None = None
    slo: Any = None
    is_latency_sensitive: bool | None = None
    type_info: str | None = None
    tenant: str | None = None
    priority: int | None = None


def ask(body: GenerateRequest, headers: Mapping[str, str], defaults: Defaults) -> tuple[SamplingParams, Extras]:
    """Raises InvalidParameterError and InvalidPromptError."""
    given = {
        name: value.tolist() if isinstance(value, np.ndarray) else value
        for name, value in (body.model_extra or {}).items()
    }
    if not body.prompt:
        raise InvalidPromptError("the prompt is empty")
    check_length(body.prompt, defaults.max_prompt_characters)
    given["output_kind"] = RequestOutputKind.CUMULATIVE if body.stream else RequestOutputKind.FINAL_ONLY
    further = {name: getattr(body, name) for name in ("is_latency_sensitive", "type_info", "tenant", "priority")}
    slo = objective_of(body.slo, headers)
    arguments = {name: value for name, value in further.items() if value is not None}
    extras = Extras({**arguments, "slo": slo}, slo, [] if slo is None else contradictions_of(slo))
    params = SamplingParams(**given)
    texts: list[Any] = [body.prompt]
    if body.stream:
        texts.append(range(min(params.max_tokens or MAX_TOKENS, MAX_TOKENS)))
    check_copies(texts, params.n, "n")
    return params, extras


class DemoShape(Shape):
    CONTENT_TYPE = b"application/x-ndjson"

    def __init__(self, name: str, prompt: str, n: int) -> None:
        self.id = name
        self._prompt = prompt
        self._texts = [""] * n

    def whole(self, outputs: Sequence[RequestOutput]) -> bytes:
        return self._line(outputs[0])

    def events(self, number: int, output: RequestOutput) -> bytes:
        return self._line(output) + b"\n"

    def close(self) -> bytes:
        return b""

    def failure(self, body: bytes) -> bytes:
        return body + b"\n"

    def _line(self, output: RequestOutput) -> bytes:
        for one in output.outputs:
            self._texts[one.index] = one.text
        return orjson.dumps({"text": [self._prompt + text for text in self._texts]})
