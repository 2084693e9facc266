"""Recordings as callers give them: arrays, files in base64 and addresses, as float32 in one channel at the model's rate.

Bytes, seconds, rates and channels are bounded before anything is decoded. Runs on a tokenizer worker.
"""

from __future__ import annotations

import io
from collections.abc import Mapping
from typing import Any

import numpy as np
from numpy.typing import NDArray

from actorllm.errors import InvalidPromptError
from actorllm.intake.media.addresses import Allowed, content_of, decoded

RATES = range(1_000, 192_001)
"""Samples of a second."""
MAX_CHANNELS = 8
MAX_SAMPLES = 100_000_000
"""Of a recording: half an hour at 48 kHz."""
PIECE = 1 << 16
"""Samples of each channel that are decoded at a time: a small file may have hours of silence, in many channels."""
FORMATS = ("WAV", "FLAC", "OGG", "MP3")
READ = {*FORMATS, "WAVEX"}
"""As soundfile calls them. A WAV file whose header names its channels is WAVEX: recordings of 24 bits and of several channels."""


def read_audio(value: Any, rate: int, max_seconds: float, allowed: Allowed, place: str) -> NDArray[np.float32]:
    """A recording, [num_samples]. Raises InvalidPromptError, which names the place.

    Arguments:
        value: an array [num_samples] of floats at the model's rate, that with its own rate as (array, rate), OpenAI's
            {"data": base64, "format": ...}, the bytes of a file, or an address.
        rate: of the model, in samples of a second.
        max_seconds: the longest that is taken.
        allowed: addresses that are read.
        place: of the recording in the prompt, for errors.
    """
    if isinstance(value, Mapping):
        if not isinstance(value.get("data"), str):
            raise InvalidPromptError(f"{place}: its 'data' must be the file in base64")
        samples, given = _opened(decoded(value["data"], place), max_seconds, place)
    elif isinstance(value, bytes):
        samples, given = _opened(value, max_seconds, place)
    elif isinstance(value, str):
        samples, given = _opened(content_of(value, allowed, place), max_seconds, place)
    else:
        array, given = value if isinstance(value, tuple) and len(value) == 2 else (value, rate)
        samples, given = _checked(array, given, place)
    _check_rate(given, place)
    if samples.size > MAX_SAMPLES:
        raise InvalidPromptError(f"{place}: it has more than {MAX_SAMPLES} samples; send it at a lower rate, or cut it")
    if not 0 < samples.size <= max_seconds * given:
        raise InvalidPromptError(
            f"{place}: it has {samples.size / given:.1f} s, and more than 0 and at most {max_seconds:g} s are taken; cut it"
        )
    if not np.isfinite(samples).all():
        raise InvalidPromptError(f"{place}: its samples must be finite")
    if given != rate:
        samples = _resampled(samples, given, rate, place)
        if not samples.size:
            raise InvalidPromptError(f"{place}: it is shorter than one sample of the {rate} in a second that are taken")
    return np.ascontiguousarray(samples, np.float32)


def _checked(array: Any, rate: Any, place: str) -> tuple[NDArray[np.float32], int]:
    if not isinstance(array, np.ndarray) or array.dtype.kind != "f" or array.ndim != 1:
        shape = f"{array.dtype} {array.shape}" if isinstance(array, np.ndarray) else type(array).__name__
        raise InvalidPromptError(
            f"{place}: {shape} is no recording; give floats [num_samples], alone or with their rate"
        )
    if isinstance(rate, bool) or not isinstance(rate, int | float | np.integer | np.floating) or rate % 1:
        raise InvalidPromptError(f"{place}: the rate {rate!r:.40} must be an integer, in samples of a second")
    return array.astype(np.float32), int(rate)


def _opened(content: bytes, max_seconds: float, place: str) -> tuple[NDArray[np.float32], int]:
    try:
        import soundfile  # type: ignore[import-untyped, import-not-found, unused-ignore]
    except (ImportError, OSError) as error:
        raise InvalidPromptError(f"{place}: audio files need soundfile; pip install 'actorllm[media]'") from error
    try:
        with soundfile.SoundFile(io.BytesIO(content)) as file:
            rate, channels = int(file.samplerate), int(file.channels)
            if file.format not in READ or channels > MAX_CHANNELS:
                raise ValueError(f"{file.format} in {channels} channels")
            _check_rate(rate, place)
            # What the header says of the length may be wrong: so much is read and no more.
            left, pieces = min(int(max_seconds * rate), MAX_SAMPLES) + 1, [np.zeros(0, np.float32)]
            while left > 0 and len(piece := file.read(min(left, PIECE), dtype="float32", always_2d=True)):
                pieces.append(piece.mean(1, dtype=np.float32))
                left -= len(piece)
    except InvalidPromptError:
        raise
    except Exception as error:  # whatever the decoder of a format raises for what a client has sent
        raise InvalidPromptError(
            f"{place}: {len(content)} bytes are no audio in one of the formats {', '.join(FORMATS)} with at most {MAX_CHANNELS} "
            f"channels ({error!s:.100})"
        ) from error
    return np.concatenate(pieces), rate


def _check_rate(rate: int, place: str) -> None:
    if rate not in RATES:
        raise InvalidPromptError(f"{place}: a rate of {rate} must be {RATES[0]} to {RATES[-1]} samples a second")


def _resampled(samples: NDArray[np.float32], given: int, rate: int, place: str) -> NDArray[np.float32]:
    try:
        import soxr  # type: ignore[import-untyped, import-not-found, unused-ignore]
    except ImportError as error:
        raise InvalidPromptError(
            f"{place}: it has {given} samples a second and the model takes {rate}; that needs soxr: pip install 'actorllm[media]'"
        ) from error
    made: NDArray[np.float32] = soxr.resample(samples, given, rate)
    return made
