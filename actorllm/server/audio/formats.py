"""Transcriptions as clients want them: segments by their time stamps, subtitles, and OpenAI's JSON.

A segment is the text between two time stamps of the model. Text without a stamp behind it ends where its window does.
"""

from __future__ import annotations

import zlib
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from actorllm.server.audio.asked import AskedSpeech, SpeechTokens
from actorllm.server.audio.windows import Window
from actorllm.server.audio.words import TimedWord


@dataclass(frozen=True, slots=True)
class TimedText:
    """A part of the text with its times, in seconds from the beginning of the recording."""

    start: float
    end: float
    text: str
    token_ids: list[int]
    avg_logprob: float | None

    def tree(self, number: int, temperature: float) -> dict[str, Any]:
        """As OpenAI has it."""
        raw = self.text.encode()
        return {
            "id": number,
            "seek": int(self.start * 100),
            "start": round(self.start, 2),
            "end": round(self.end, 2),
            "text": self.text,
            "tokens": self.token_ids,
            "temperature": temperature,
            "avg_logprob": self.avg_logprob,
            "compression_ratio": len(raw) / len(zlib.compress(raw)) if raw else 0.0,
            "no_speech_prob": None,
        }


def segments_of(
    ids: Sequence[int], logprobs: Sequence[float] | None, window: Window, tokens: SpeechTokens
) -> list[TimedText]:
    """Of the output for one window, which begins at its first time stamp. Times stay within the window and never go back."""
    found: list[TimedText] = []
    part: list[int] = []
    weights: list[float] = []
    start = 0.0

    def close(end: float) -> None:
        text = tokens.text_of(part)
        if text:
            mean = sum(weights) / len(weights) if weights else None
            found.append(TimedText(window.start_s + start, window.start_s + end, text, list(part), mean))

    for place, id in enumerate(ids):
        if (stamp := tokens.stamps.get(id)) is not None:
            time = min(max(stamp, start), window.seconds)
            close(time)
            start, part, weights = time, [], []
            continue
        part.append(id)
        if logprobs is not None:
            weights.append(logprobs[place])
    close(window.seconds)
    return found


def srt(segments: Sequence[TimedText]) -> str:
    """SubRip."""
    return "".join(
        f"{number}\n{_clock(one.start, ',')} --> {_clock(one.end, ',')}\n{_line(one.text)}\n\n"
        for number, one in enumerate(segments, 1)
    )


def vtt(segments: Sequence[TimedText]) -> str:
    """WebVTT."""
    body = "".join(f"{_clock(one.start, '.')} --> {_clock(one.end, '.')}\n{_line(one.text)}\n\n" for one in segments)
    return f"WEBVTT\n\n{body}"


def _line(text: str) -> str:
    """No empty line, which would end it, and no arrow, which would begin another one."""
    return " ".join(text.split()).replace("-->", "->")


def _clock(seconds: float, point: str) -> str:
    whole = round(seconds * 1000)
    return f"{whole // 3_600_000:02}:{whole // 60_000 % 60:02}:{whole // 1000 % 60:02}{point}{whole % 1000:03}"


def verbose(
    asked: AskedSpeech,
    language: str | None,
    seconds: float,
    segments: Sequence[TimedText],
    words: Sequence[TimedWord],
) -> dict[str, Any]:
    """OpenAI's `verbose_json`, with what the client asks times of."""
    temperature = float(asked.params["temperature"])
    parts: dict[str, Any] = {}
    if "segment" in asked.grains:
        parts["segments"] = [one.tree(number, temperature) for number, one in enumerate(segments)]
    if "word" in asked.grains:
        parts["words"] = [one.tree() for one in words]
    return {
        "task": asked.task,
        "language": language,
        "duration": seconds,
        "text": "".join(one.text for one in segments),
        **parts,
        "usage": usage(seconds),
    }


def usage(seconds: float) -> dict[str, Any]:
    """What a recording counts, in whole seconds."""
    return {"type": "duration", "seconds": int(-(-seconds // 1))}
