"""What a form asks of a transcription: checked fields, and the prompt of a Whisper decoder.

A field has an effect, or is refused with its name. Called by `speech_routes`.
"""

from __future__ import annotations

import math
import re
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Literal, TypeAlias

from actorllm.errors import nearest_name
from actorllm.server.audio.form import FILE, UploadForm
from actorllm.server.audio.words import WITHOUT_SPACES, words_of
from actorllm.server.envelope import ApiError, shown
from actorllm.text.tokenizer import Tokenizer

Task: TypeAlias = Literal["transcribe", "translate"]

FORMATS = ("json", "text", "verbose_json", "srt", "vtt")
WITH_TIMES = ("verbose_json", "srt", "vtt")
GRAINS = ("segment", "word")

START, PREVIOUS, NO_TIMES, FIRST_TIME = "<|startoftranscript|>", "<|startofprev|>", "<|notimestamps|>", "<|0.00|>"

STAMP = re.compile(r"<\|\d+\.\d\d\|>")

NUMBERS = ("temperature", "top_p", "min_p", "repetition_penalty", "frequency_penalty", "presence_penalty")
COUNTS = ("top_k", "seed", "max_completion_tokens")
KNOWN = (
    *(FILE, "model", "language", "prompt", "response_format", "stream", "timestamp_granularities", *NUMBERS, *COUNTS),
    *("to_language", "chunking_strategy", "user", "stream_include_usage", "stream_continuous_usage_stats"),
)


@dataclass(frozen=True, slots=True)
class AskedSpeech:
    """Of one recording."""

    task: Task
    file: bytes
    model: str | None
    language: str | None
    """None: the model is asked for it."""
    prompt: str
    """What came before the recording, or how words are spelled."""
    format: str
    grains: tuple[str, ...]
    """What has times: "segment", "word"."""
    is_streamed: bool
    params: dict[str, Any]
    """Sampling parameters by their names."""

    @property
    def has_times(self) -> bool:
        """The text is wanted in segments, with times."""
        return self.format in WITH_TIMES


def read_asked(form: UploadForm, task: Task) -> AskedSpeech:
    """Raises ApiError for what is wrong, by the name of the field."""
    # Names first: what is not known is told before what is wrong with it.
    for name, values in form.fields.items():
        if name not in KNOWN:
            raise ApiError(400, f"{name[:80]} is not a field of this endpoint{nearest_name(name, KNOWN)}", name[:80])
        if len(values) > 1 and name != "timestamp_granularities":
            raise ApiError(400, f"{name} is there {len(values)} times; send it once", name)
    if not form.file:
        raise ApiError(400, "file: a recording is needed", FILE)
    one = {name: values[0] for name, values in form.fields.items() if values[0]}
    wanted = one.get("response_format", "json")
    if wanted not in FORMATS:
        raise ApiError(400, f"response_format={shown(wanted)} must be one of {', '.join(FORMATS)}", "response_format")
    grains = form.fields.get("timestamp_granularities", [])
    for grain in grains:
        if grain not in GRAINS:
            fix = f"must be one of {', '.join(GRAINS)}"
            raise ApiError(400, f"timestamp_granularities={shown(grain)} {fix}", "timestamp_granularities")
        if wanted != "verbose_json":
            raise ApiError(400, "timestamp_granularities need response_format=verbose_json", "timestamp_granularities")
    # What asks for what is done anyway.
    if one.get("chunking_strategy", "auto") != "auto":
        raise ApiError(400, "chunking_strategy must be 'auto'", "chunking_strategy")
    if one.get("to_language", "en") != "en":
        raise ApiError(
            400, f"to_language={shown(one['to_language'])} must be 'en': that is all such models write", "to_language"
        )
    is_streamed = _flag(one, "stream")
    if is_streamed and wanted not in ("json", "text"):
        raise ApiError(400, f"stream=true needs response_format=json or text, not {wanted}", "stream")
    numbers = {name: _number(one, name, float) for name in NUMBERS if name in one}
    counts = {name: _number(one, name, int) for name in COUNTS if name in one}
    if "max_completion_tokens" in counts:
        counts["max_tokens"] = counts.pop("max_completion_tokens")
    params = {"temperature": 0.0} | numbers | counts
    prompt, kinds = one.get("prompt", ""), tuple(grains) or ("segment",)
    return AskedSpeech(
        task, form.file, one.get("model"), one.get("language"), prompt, wanted, kinds, is_streamed, params
    )


def _flag(one: dict[str, str], name: str) -> bool:
    given = one.get(name, "false").lower()
    if given not in ("true", "false", "1", "0"):
        raise ApiError(400, f"{name}={shown(given)} must be true or false", name)
    return given in ("true", "1")


def _number(one: dict[str, str], name: str, kind: type[float] | type[int]) -> float | int:
    try:
        number = kind(one[name])
    except ValueError as error:
        raise ApiError(400, f"{name}={shown(one[name])} must be a number", name) from error
    if not math.isfinite(number) or abs(number) >= 2**63:
        raise ApiError(400, f"{name}={shown(one[name])} must be finite", name)
    return number


class SpeechTokens:
    """The special tokens of a Whisper tokenizer."""

    def __init__(self, tokenizer: Tokenizer) -> None:
        self._tokenizer = tokenizer
        id_of = {text: id for id, text in tokenizer.added_tokens.items()}
        self._id_of = id_of
        self.stamps = {id: float(text[2:-2]) for text, id in id_of.items() if STAMP.fullmatch(text)}
        """Seconds by the id of a time stamp."""
        self.languages = {
            text[2:-2]: id
            for text, id in id_of.items()
            if text.startswith("<|") and text.endswith("|>") and text[2:-2].isalpha() and 2 <= len(text) - 4 <= 3
        }
        """Ids by the code of the language; none: the model knows one."""

    def language_prompt(self) -> list[int]:
        """Behind which the model names the language of a recording."""
        return [self._needed(START)]

    def checked_language(self, language: str | None) -> str | None:
        """Raises ApiError for one that the model does not know."""
        if language is None or not self.languages or language.lower() in self.languages:
            return None if language is None else language.lower()
        raise ApiError(
            400, f"language={shown(language)} is not one of this model: {', '.join(sorted(self.languages))}", "language"
        )

    def prompt(self, asked: AskedSpeech, language: str | None, most: int) -> list[int]:
        """Token ids of the decoder. Raises ApiError where the model cannot do what is asked.

        Arguments:
            asked: by the client.
            language: of the recording.
            most: tokens of the decoder, its output included; half of them are left for that.
        """
        ids: list[int] = []
        if asked.prompt:
            before = self._tokenizer.encode(" " + asked.prompt.strip(), False).tolist()
            ids = [
                self._needed(PREVIOUS),
                *[id for id in before if id not in self._tokenizer.special_ids][-(most // 2 - 8) :],
            ]
        ids.append(self._needed(START))
        if self.languages:
            ids += [self.languages[language or "en"], self._needed(f"<|{asked.task}|>")]
        elif asked.task == "translate":
            raise ApiError(400, "this model transcribes one language and translates none; use /v1/audio/transcriptions")
        ids.append(self._needed(FIRST_TIME if asked.has_times else NO_TIMES))
        return ids

    def alignment_ids(
        self, asked: AskedSpeech, language: str | None, text: Sequence[int], most: int
    ) -> tuple[list[int], int]:
        """The ids behind which a text is written without time stamps, with the text and its end; and how many come before it.

        most: tokens of the decoder.
        """
        ids = [self._needed(START)]
        if self.languages:
            ids += [self.languages[language or "en"], self._needed(f"<|{asked.task}|>")]
        ids.append(self._needed(NO_TIMES))
        end = self._tokenizer.eos_token_id
        whole = [*ids, *text, *([] if end is None else [end])]
        return whole[:most], len(ids)

    def _needed(self, text: str) -> int:
        if text not in self._id_of:
            raise ApiError(400, f"the tokenizer of this model has no {text}, which this needs")
        return self._id_of[text]

    def text_of(self, ids: Sequence[int]) -> str:
        """Without special tokens and time stamps."""
        return self._tokenizer.decode(self.text_ids(ids))

    def text_ids(self, ids: Sequence[int]) -> list[int]:
        """Without special tokens and time stamps."""
        special = self._tokenizer.special_ids
        return [id for id in ids if id not in special and id not in self.stamps]

    def words_of(self, ids: Sequence[int], task: Task, language: str | None) -> list[tuple[str, int]]:
        """The words of a text, and how many of its tokens each has.

        Arguments:
            ids: as of `text_ids`.
            task: a translation is English.
            language: of the recording.
        """
        return words_of(ids, self._tokenizer.decode, has_spaces=task == "translate" or language not in WITHOUT_SPACES)
