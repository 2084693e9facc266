"""`SpeechAnswer`: the text of a recording, window by window, as one answer or as a stream of events.

Windows are asked for a few at a time, so that the rows of a long recording take little memory. A stream
has OpenAI's events and vLLM's fields in one.
"""

from __future__ import annotations

import itertools
from collections.abc import AsyncIterator, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

import orjson
from anyio import to_thread
from starlette.types import Send

from actorllm.client.stream import RequestStream
from actorllm.server.answer import JSON, Answer
from actorllm.server.audio.asked import KNOWN, STAMP, AskedSpeech, SpeechTokens
from actorllm.server.audio.form import FILE
from actorllm.server.audio.formats import TimedText, segments_of, srt, usage, verbose, vtt
from actorllm.server.audio.windows import Window
from actorllm.server.audio.words import TimedWord, timed
from actorllm.server.state import ServerState
from actorllm.types.outputs import CompletionOutput
from actorllm.types.params import RequestOutputKind, SamplingParams

AHEAD = 4
"""Windows of a recording that the engine has at a time."""

PLAIN, EVENTS = b"text/plain; charset=utf-8", b"text/event-stream; charset=utf-8"


@dataclass(frozen=True, slots=True, eq=False)
class Speech:
    """A recording that was read, and what is asked of it."""

    asked: AskedSpeech
    tokens: SpeechTokens
    windows: list[Window]
    rate: int
    language: str | None
    max_target: int
    suppressed: tuple[int, ...]
    """Ids that the model's author never wants."""
    row_s: float
    """Of a row of the encoder."""

    @property
    def seconds(self) -> float:
        return sum(window.seconds for window in self.windows)


class SpeechAnswer(Answer):
    """Of one recording."""

    def __init__(
        self,
        state: ServerState,
        name: str,
        model: str,
        speech: Speech,
        arguments: Mapping[str, Any],
        headers: Mapping[str, str],
    ) -> None:
        """model: as the client calls it. arguments: of `AsyncLLM.generate` for each window."""
        self._open: list[RequestStream] = []
        super().__init__(state, name, self._open, KNOWN, FILE, headers)
        self._speech, self._model, self._arguments = speech, model, arguments

    async def _respond(self, send: Send) -> None:
        speech = self._speech
        language = speech.language
        if language is None and speech.tokens.languages:
            language = await self._heard_language()
        prompt = speech.tokens.prompt(speech.asked, language, speech.max_target)
        if speech.asked.is_streamed:
            await self._stream(prompt, send)
        else:
            content_type, body = await self._whole(prompt, language)
            await self._start(send, 200, content_type, [(b"content-length", b"%d" % len(body))])
            await send({"type": "http.response.body", "body": body, "more_body": False})

    # What the engine is asked

    def _asked(self, window: Window, prompt: list[int], params: SamplingParams) -> RequestStream:
        given = {
            "encoder_prompt": {"multi_modal_data": {"audio": (window.samples, self._speech.rate)}},
            "decoder_prompt": {"prompt_token_ids": prompt},
        }
        stream = self._state.llm.generate(given, params, **self._arguments)
        self._open.append(stream)
        return stream

    async def _heard_language(self) -> str:
        """What the model says of the first window."""
        ids = self._speech.tokens.languages
        params = SamplingParams(
            temperature=0,
            max_tokens=1,
            allowed_token_ids=sorted(ids.values()),
            output_kind=RequestOutputKind.FINAL_ONLY,
        )
        heard = [-1]
        async for output in self._asked(self._speech.windows[0], self._speech.tokens.language_prompt(), params):
            heard = list(output.outputs[0].token_ids)
        return next(code for code, id in ids.items() if id == heard[0])

    def _outputs(self, prompt: list[int], kind: RequestOutputKind) -> Iterator[tuple[Window, RequestStream]]:
        """The stream of each window, in order, with some others begun."""
        asked, suppressed = self._speech.asked, self._speech.suppressed
        params = SamplingParams(
            **asked.params,
            output_kind=kind,
            logprobs=0 if asked.format == "verbose_json" else None,
            logit_bias=dict.fromkeys(suppressed, -100.0) or None,
        )
        self.params = params
        begun: list[tuple[Window, RequestStream]] = []
        rest = iter(self._speech.windows)
        while True:
            begun += [
                (window, self._asked(window, prompt, params)) for window in itertools.islice(rest, AHEAD - len(begun))
            ]
            if not begun:
                return
            yield begun.pop(0)
            self._open[:] = [stream for _, stream in begun]

    async def _ended(self, prompt: list[int]) -> AsyncIterator[tuple[Window, CompletionOutput]]:
        """The output of each window."""
        for window, stream in self._outputs(prompt, RequestOutputKind.FINAL_ONLY):
            async for output in stream:
                self._last_outputs.append(output)
                yield window, output.outputs[0]

    # What the client gets

    async def _whole(self, prompt: list[int], language: str | None) -> tuple[bytes, bytes]:
        speech, asked = self._speech, self._speech.asked
        texts: list[str] = []
        segments: list[TimedText] = []
        words: list[TimedWord] = []
        async for window, one in self._ended(prompt):
            ids = list(one.token_ids)
            if asked.has_times:
                segments += segments_of(ids, _logprobs(one), window, speech.tokens)
                if "word" in asked.grains:
                    words += await self._words(ids, window, language)
            else:
                texts.append(speech.tokens.text_of(ids))
        if asked.format == "srt":
            return PLAIN, srt(segments).encode()
        if asked.format == "vtt":
            return PLAIN, vtt(segments).encode()
        if asked.format == "verbose_json":
            return JSON, orjson.dumps(verbose(asked, language, speech.seconds, segments, words))
        text = "".join(texts)
        if asked.format == "text":
            return PLAIN, f"{text}\n".encode()
        return JSON, orjson.dumps({"text": text, "usage": usage(speech.seconds)})

    async def _words(self, ids: list[int], window: Window, language: str | None) -> list[TimedWord]:
        """Of the output for one window."""
        speech, sources = self._speech, self._state.engine.prompts.sources
        assert sources is not None
        text = speech.tokens.text_ids(ids)
        words = speech.tokens.words_of(text, speech.asked.task, language)
        if not words:
            return []
        whole, before = speech.tokens.alignment_ids(speech.asked, language, text, speech.max_target)
        # What is behind the last token of the beginning writes the first one of the text.
        first, num_rows = before - 1, max(1, int(window.seconds / speech.row_s))
        find = partial(sources.word_starts, window.samples, whole, first, first + len(text) + 1, num_rows)
        # A client that leaves is waited for: a thread that is abandoned would go on, and count no more for the limiter.
        starts = await to_thread.run_sync(find, limiter=self._state.aligning_turn)
        return timed(words, (starts * speech.row_s).tolist(), window.start_s, window.seconds)

    async def _stream(self, prompt: list[int], send: Send) -> None:
        texts: list[str] = []
        for _, stream in self._outputs(prompt, RequestOutputKind.DELTA):
            async for output in stream:
                text = STAMP.sub("", output.outputs[0].text)
                if not self._has_started:
                    await self._start(send, 200, EVENTS, [(b"cache-control", b"no-cache")])
                if text:
                    texts.append(text)
                    event = self._event("transcript.text.delta", text, None) | {"delta": text}
                    await send({"type": "http.response.body", "body": _written(event), "more_body": True})
                if output.finished:
                    self._last_outputs.append(output)
        last = self._event("transcript.text.done", "", "stop")
        last |= {"text": "".join(texts), "usage": usage(self._speech.seconds)}
        await send({"type": "http.response.body", "body": _written(last) + b"data: [DONE]\n\n", "more_body": False})

    def _event(self, kind: str, text: str, reason: str | None) -> dict[str, Any]:
        return {
            "type": kind,
            "id": self._name,
            "object": "transcription.chunk",
            "created": self._state.created,
            "model": self._model,
            "choices": [{"index": 0, "delta": {"content": text}, "finish_reason": reason}],
        }

    def _last_event(self, body: bytes) -> bytes:
        return b"data: " + body + b"\n\ndata: [DONE]\n\n"


def _written(event: dict[str, Any]) -> bytes:
    return b"data: " + orjson.dumps(event) + b"\n\n"


def _logprobs(one: CompletionOutput) -> Sequence[float] | None:
    if one.logprobs is None:
        return None
    rows: Any = one.logprobs
    return [row[id].logprob for row, id in zip(rows, one.token_ids, strict=True)]
