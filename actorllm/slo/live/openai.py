"""`OpenAITarget`: replays against a server with the OpenAI API: `POST /v1/completions`, streamed.

Prompts are token ids, and `ignore_eos` asks for the full length; servers that know neither refuse. What a request is promised
travels as the headers x-slo-ttft-ms and x-slo-tpot-ms, as routers that look at objectives read it. Tokens are counted by the
usage that the server tells with every piece (`continuous_usage_stats`), or once at the end. A piece without it is one token.
Needs the extra `laboratory`.
"""

from __future__ import annotations

from typing import Any

import anyio
import orjson

from actorllm.errors import ConfigError, RequestFailedError
from actorllm.slo.live.replay import ReplayCall, ReplayRecord
from actorllm.types.objective import RequestClass

try:
    import httpx2
except ModuleNotFoundError as error:
    needs = "a replay against a server needs httpx2: pip install 'actorllm[laboratory]'"
    raise ModuleNotFoundError(needs, name=error.name) from error

VOCAB_SIZE = 4000
"""Ids below this are in every usual vocabulary."""

CONNECT_TIMEOUT_S = 10.0


def slo_headers(kind: RequestClass, num_prompt: int) -> dict[str, str]:
    """The objective of a request in whole and broken milliseconds; nothing is said of what is not promised."""
    if kind.slo is None:
        return {}
    limits = {"x-slo-ttft-ms": kind.slo.ttft_limit(num_prompt), "x-slo-tpot-ms": kind.slo.tpot}
    return {name: f"{value * 1e3:g}" for name, value in limits.items() if value is not None and value != float("inf")}


class OpenAITarget:
    """url: of the server, with or without /v1. model: None: the first one that it lists.

    An async context manager: its connections are closed at the end.
    """

    backend = "openai"

    def __init__(
        self, url: str, model: str | None = None, *, api_key: str | None = None, vocab_size: int = VOCAB_SIZE
    ) -> None:
        self.model = model or ""
        self.vocab_size = vocab_size
        self._url = url.rstrip("/").removesuffix("/v1")
        self.max_model_len: int | None = None
        limits = httpx2.Limits(max_connections=None, max_keepalive_connections=None)
        timeout = httpx2.Timeout(None, connect=CONNECT_TIMEOUT_S)
        headers = {} if api_key is None else {"Authorization": f"Bearer {api_key}"}
        try:
            self._client = httpx2.AsyncClient(base_url=self._url, limits=limits, timeout=timeout, headers=headers)
        except (httpx2.InvalidURL, ValueError) as error:
            raise ConfigError(f"url={url!r} is none: {error}") from error

    async def __aenter__(self) -> OpenAITarget:
        return self

    async def __aexit__(self, *exception: object) -> None:
        await self._client.aclose()

    async def prepare(self) -> None:
        """Ask for the model. Raises ConfigError when there is no such server or model."""
        try:
            response = await self._client.get("/v1/models")
            response.raise_for_status()
            models = {entry["id"]: entry for entry in response.json()["data"]}
        except (httpx2.HTTPError, httpx2.InvalidURL, ValueError, KeyError, TypeError) as error:
            raise ConfigError(
                f"{self._url}/v1/models does not answer as it should: {type(error).__name__}: {error}"
            ) from error
        if not models or (self.model and self.model not in models):
            raise ConfigError(f"{self._url} has no model {self.model!r}; it has {', '.join(models) or 'none'}")
        self.model = self.model or next(iter(models))
        self.max_model_len = models[self.model].get("max_model_len")

    async def send(self, call: ReplayCall, record: ReplayRecord) -> None:
        body: dict[str, Any] = {
            "model": self.model,
            "prompt": call.prompt,
            "max_tokens": call.max_tokens,
            "ignore_eos": True,
            "stream": True,
            "stream_options": {"include_usage": True, "continuous_usage_stats": True},
        }
        if call.is_continued:
            body["return_token_ids"] = True  # a server that does not know it tells none
        if call.kind.priority:
            body["priority"] = call.kind.priority
        headers = {"Content-Type": "application/json", **slo_headers(call.kind, len(call.prompt))}
        content = orjson.dumps(body)
        async with self._client.stream("POST", "/v1/completions", content=content, headers=headers) as response:
            if response.status_code != 200:
                told = (await response.aread())[:500].decode(errors="replace").strip()
                raise RequestFailedError(f"the server answers {response.status_code}: {told}")
            await self._take(response, record)

    @staticmethod
    async def _take(response: httpx2.Response, record: ReplayRecord) -> None:
        """Server-sent events up to [DONE]."""
        total: int | None = None
        is_done = False
        problem: str | None = None
        with anyio.CancelScope() as scope:
            async for line in response.aiter_lines():  # leaving it half-way would leave its generators to the collector
                if not line.startswith("data:") or is_done or problem is not None:
                    continue
                data = line[5:].strip()
                if data == "[DONE]":
                    is_done = True
                    continue
                try:
                    event = orjson.loads(data)
                    problem = f"the server says: {str(event['error'])[:500]}" if "error" in event else None
                    told = (event.get("usage") or {}).get("completion_tokens")
                    if event.get("choices"):
                        choice = event["choices"][0]
                        num_tokens = told - len(record.times) if told is not None else int(bool(choice.get("text")))
                        record.got(num_tokens, choice.get("token_ids") or ())
                    elif told is not None:
                        total = told
                except (orjson.JSONDecodeError, AttributeError, TypeError, KeyError, IndexError) as error:
                    problem = f"the server sent {data[:200]!r}: {type(error).__name__}: {error}"
                if problem is not None:
                    scope.cancel()
        if problem is None and not is_done:
            problem = f"the server ended the answer after {len(record.times)} tokens, without [DONE]"
        if problem is not None:
            raise RequestFailedError(problem)
        if total is not None and total > len(record.times) and record.times:
            # It sent several tokens in a piece and did not say so: they are counted with the last one.
            record.times += [record.times[-1]] * (total - len(record.times))
