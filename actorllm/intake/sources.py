"""`SourceReader`: prompts of models with an encoder beside the decoder: what the encoder gets, and what the decoder begins with.

vLLM's mapping has both, as `{"encoder_prompt": ..., "decoder_prompt": ...}`. A prompt alone is the encoder's where that takes
text. With a recording beside it, it is the decoder's. The encoder (`media.media_encoder`) makes rows, which come before the
decoder's tokens. All runs on a tokenizer worker. Called by `intake.tokenization`.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from hashlib import sha256
from typing import TYPE_CHECKING, Any

import numpy as np
from numpy.typing import NDArray

from actorllm.errors import InvalidPromptError, nearest_name, shown
from actorllm.intake.media.addresses import Allowed
from actorllm.intake.media.audio import read_audio
from actorllm.intake.media.media_encoder import MediaEncoder, MediaTensors, Waiting
from actorllm.intake.media.processor import load_feature_extractor
from actorllm.messages import I32, U8
from actorllm.messages.embeds import EMBEDDED, MAX_PROMPT_BYTES
from actorllm.types.encoder_decoder import EncoderDecoder

if TYPE_CHECKING:
    from actorllm.config import EngineConfig

ENCODER_KEY, DECODER_KEY, MEDIA_KEY = "encoder_prompt", "decoder_prompt", "multi_modal_data"
KEYS = (ENCODER_KEY, DECODER_KEY, "prompt", "prompt_token_ids", MEDIA_KEY, "cache_salt")
"""Of a prompt's mapping."""

ToIds = Callable[[Any, bool], I32]
"""Checked token ids of a text, with or without the tokenizer's special tokens, or of ids."""


@dataclass(frozen=True, slots=True, eq=False)
class GivenSource:
    """A prompt, taken apart."""

    source: Any
    """Of the encoder: a text, ids, or a mapping with a recording."""
    target: Any
    """Of the decoder: a text or ids; None: what such a model begins with."""
    salt: Any

    @classmethod
    def of(cls, prompt: Any, rules: EncoderDecoder) -> GivenSource:
        """Raises InvalidPromptError, which names what is there and what is wanted."""
        if not isinstance(prompt, Mapping):
            return cls(prompt, None, None)
        for key, value in prompt.items():
            if key not in KEYS and value is not None:
                raise InvalidPromptError(
                    f"prompts of this model have no {key!r:.80}{nearest_name(str(key), KEYS)}; give {ENCODER_KEY!r} and "
                    f"{DECODER_KEY!r}"
                )
        salt = prompt.get("cache_salt")
        inner = {key: prompt[key] for key in ("prompt", "prompt_token_ids", MEDIA_KEY) if prompt.get(key) is not None}
        if prompt.get(ENCODER_KEY) is not None:
            if inner:
                raise InvalidPromptError(
                    f"{next(iter(inner))!r} is in {ENCODER_KEY!r} or in {DECODER_KEY!r}, not beside them"
                )
            return cls(prompt[ENCODER_KEY], prompt.get(DECODER_KEY), salt)
        if prompt.get(DECODER_KEY) is not None:
            raise InvalidPromptError(f"a prompt with {DECODER_KEY!r} needs {ENCODER_KEY!r}, too")
        if rules.kind == "audio":  # the recording is the encoder's, the text the decoder's
            target = {key: value for key, value in inner.items() if key != MEDIA_KEY}
            return cls({MEDIA_KEY: inner.get(MEDIA_KEY)}, target or None, salt)
        return cls(inner, None, salt)


@dataclass(frozen=True, slots=True, eq=False)
class ReadSource:
    """A prompt as the engine takes it."""

    ids: I32
    """EMBEDDED where a row of the encoder is, then those of the decoder."""
    rows: U8
    """Of the encoder, in the bytes of the model's dtype."""
    digest: str
    """Of what the encoder got."""
    num_rows: int
    source_text: str | None
    source_ids: list[int] | None
    """None: it is a recording."""
    target_text: str | None


class SourceReader:
    """Reads prompts for one engine whose model has an encoder."""

    def __init__(self, config: EngineConfig, rules: EncoderDecoder) -> None:
        self._model, self._rules = config.model, rules
        self._allowed = Allowed(rules.local_path, rules.domains)
        self._lock = threading.Lock()
        self._extractor: Any = None
        self.encoder = MediaEncoder(config)

    def read(self, given: GivenSource, to_ids: ToIds, adds_special: bool, workplace: Waiting | None) -> ReadSource:
        """Raises InvalidPromptError.

        Arguments:
            given: the prompt.
            to_ids: makes token ids.
            adds_special: put the tokenizer's special tokens around the encoder's text.
            workplace: where it is waited for the encoder; None: on this thread.
        """
        rules = self._rules
        target = None if given.target is None else _unwrapped(given.target, DECODER_KEY)
        ids = self._target_ids(target, to_ids)
        if len(ids) >= rules.max_target:  # a token is to come
            raise InvalidPromptError(
                f"{DECODER_KEY} has {len(ids)} tokens, and the decoder takes {rules.max_target} with its output: shorten it to "
                f"{rules.max_target - 1} or fewer"
            )
        source, source_ids = None, None
        if rules.kind == "audio":
            tensors = self._features(given.source)
        else:
            source = _unwrapped(given.source, ENCODER_KEY)
            source_ids = to_ids(source, adds_special)
            if not 0 < source_ids.size <= rules.max_source:
                raise InvalidPromptError(
                    f"{ENCODER_KEY} has {source_ids.size} tokens, and the encoder takes 1 to {rules.max_source}; shorten it to "
                    f"that"
                )
            tensors = _tensors({"input_ids": source_ids.astype(np.int64)[None]})
        rows = self.encoder.encode(tensors, workplace)
        num_rows = rows.size // self._model.embedding_bytes
        if rows.size > MAX_PROMPT_BYTES or not 0 < num_rows <= rules.max_source:
            raise InvalidPromptError(
                f"the encoder makes {num_rows} rows of {rows.size} bytes; {rules.max_source} rows and {MAX_PROMPT_BYTES} bytes are "
                f"the most that a request may carry; shorten {ENCODER_KEY}"
            )
        return ReadSource(
            ids=np.concatenate((np.full(num_rows, EMBEDDED, np.int32), ids)),
            rows=rows,
            digest=tensors.digest,
            num_rows=num_rows,
            source_text=source if isinstance(source, str) else None,
            source_ids=None if source_ids is None else source_ids.tolist(),
            target_text=target if isinstance(target, str) else None,
        )

    def _target_ids(self, target: Any, to_ids: ToIds) -> I32:
        """What the decoder begins with: what every prompt of such a model does, where it does not say so itself."""
        start = np.array(self._rules.start_ids, np.int32)
        ids = start[:0] if target is None else to_ids(target, False)
        if not start.size and not ids.size:
            raise InvalidPromptError(
                f"the model names no decoder_start_token_id: give {DECODER_KEY!r}, with the language that is wanted"
            )
        is_begun = (
            ids.size and (ids[0] == start[0] if self._rules.kind == "text" else start[0] in ids) if start.size else True
        )
        if not is_begun:
            ids = np.concatenate((start, ids))
        return ids

    def _features(self, source: Any) -> MediaTensors:
        """What the model's feature extractor makes of a recording."""
        if isinstance(source, Mapping) and source.get("prompt"):
            raise InvalidPromptError(f"{ENCODER_KEY} of this model is a recording; its text belongs to {DECODER_KEY!r}")
        for key, value in source.items() if isinstance(source, Mapping) else ():
            if key not in KEYS[2:5] and value is not None:
                raise InvalidPromptError(
                    f"{ENCODER_KEY} of this model has {MEDIA_KEY!r}, not {key!r:.80}; leave it out"
                )
        data = source.get(MEDIA_KEY) if isinstance(source, Mapping) else None
        recording = data.get("audio") if isinstance(data, Mapping) else None
        if isinstance(recording, list) and len(recording) == 1:
            recording = recording[0]
        if recording is None or isinstance(recording, list) or (isinstance(data, Mapping) and len(data) > 1):
            raise InvalidPromptError(
                f"a prompt of this model has one recording, as {{'prompt': '...', {MEDIA_KEY!r}: {{'audio': ...}}}}"
            )
        extractor = self.extractor
        rate = int(extractor.sampling_rate)
        samples = read_audio(recording, rate, float(extractor.chunk_length), self._allowed, "audio")
        with self._lock:  # it is not made for several threads
            made = extractor(samples, sampling_rate=rate, return_tensors="np")
        return _tensors({"input_features": np.ascontiguousarray(made["input_features"], np.float32)})

    def word_starts(
        self, samples: NDArray[np.float32], ids: Sequence[int], first: int, stop: int, num_rows: int
    ) -> NDArray[np.int64]:
        """Where in a recording the tokens of its text begin, in rows of the encoder. Waits for the encoder on this thread.

        Arguments:
            samples: of the recording, at the rate of the model.
            ids: of the decoder: what it begins with, the text, its end.
            first, stop, num_rows: as of `word_alignment.Aligner.starts`.

        Returns int64 [stop - first]: the last one is where the text ends. Raises what makes a request fail.
        """
        features = self._features({MEDIA_KEY: {"audio": samples}}).arrays
        span = np.array((first, stop, num_rows), np.int64)
        asked = features | {"decoder_input_ids": np.array([ids], np.int64), "span": span}
        return np.frombuffer(self.encoder.encode(_tensors(asked), None), np.int64)

    @property
    def extractor(self) -> Any:
        """Of the model's folder, loaded when first needed. Raises CorruptModelError."""
        with self._lock:
            if self._extractor is None:
                self._extractor = load_feature_extractor(self._model.path)
            return self._extractor

    def forget(self) -> None:
        """Give back the encoder and what prepares its input; they are loaded again when needed."""
        with self._lock:
            self._extractor = None
        self.encoder.close()
        self.encoder = self.encoder.renewed()

    def close(self) -> None:
        """End the encoder. What waits for it fails."""
        self.encoder.close()


def _unwrapped(part: Any, name: str) -> Any:
    """A text or ids of one part of the prompt. Raises InvalidPromptError."""
    if not isinstance(part, Mapping):
        if isinstance(part, bytes) or not isinstance(part, Iterable):
            raise InvalidPromptError(f"{name}={shown(part)} must be text or token ids")
        return part
    known = ("prompt", "prompt_token_ids")
    for key, value in part.items():
        if key not in known and value is not None:
            raise InvalidPromptError(f"{name} has {' or '.join(map(repr, known))}, not {key!r:.80}")
    found = next((part[key] for key in reversed(known) if part.get(key) is not None), None)
    if found is None:
        raise InvalidPromptError(f"{name} needs 'prompt' or 'prompt_token_ids'; it has {list(part)}")
    return found


def _tensors(arrays: dict[str, Any]) -> MediaTensors:
    made = sha256()
    for name, array in sorted(arrays.items()):
        made.update(f"{name} {array.dtype.str} {array.shape}\0".encode())
        made.update(array.data)
    return MediaTensors(made.hexdigest(), arrays)
