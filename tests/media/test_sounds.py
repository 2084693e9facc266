"""Recordings: as arrays, files and OpenAI's `input_audio`; what is wrong with one fails its own request."""

from __future__ import annotations

import base64
import io
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import httpx
import numpy as np
import pytest

from actorllm import LLM, AsyncLLM, SamplingParams
from actorllm.errors import InvalidPromptError
from actorllm.intake.media import audio
from actorllm.intake.media.addresses import Allowed
from actorllm.intake.media.audio import read_audio
from actorllm.server import create_app
from tests.media.small_models import RATE, save_qwen2_audio, sound

soundfile = pytest.importorskip("soundfile")
ARGUMENTS: dict[str, Any] = {"dtype": "float32", "num_threads": 1, "topology": "inline", "max_model_len": 256}
GREEDY = SamplingParams(temperature=0, max_tokens=8, ignore_eos=True)
TEXT = "user: Hear <|audio_bos|><|AUDIO|><|audio_eos|>!assistant: "


@pytest.fixture
def anyio_backend() -> str:
    return "asyncio"


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return save_qwen2_audio(tmp_path_factory.mktemp("audio"))


@pytest.fixture(scope="module")
def llm(folder: Path) -> Iterator[LLM]:
    with LLM(str(folder), num_gpu_blocks_override=100, **ARGUMENTS) as engine:
        yield engine


def file_of(samples: Any, kind: str = "WAV", rate: int = RATE, **options: Any) -> str:
    """In base64."""
    file = io.BytesIO()
    soundfile.write(file, samples, rate, format=kind, **options)
    return base64.b64encode(file.getvalue()).decode()


def tokens(llm: LLM, value: Any) -> list[int]:
    given = {"prompt": TEXT, "multi_modal_data": {"audio": value}}
    return list(llm.generate([given], GREEDY, use_tqdm=False)[0].outputs[0].token_ids)


def test_a_recording_is_one_in_every_form(llm: LLM) -> None:
    samples = sound(1)
    expected = tokens(llm, samples)
    exact = file_of(samples, subtype="FLOAT")
    assert tokens(llm, (samples, RATE)) == expected
    assert tokens(llm, [samples.astype(np.float64)]) == expected
    assert tokens(llm, {"data": exact, "format": "wav"}) == expected
    assert tokens(llm, f"data:audio/wav;base64,{exact}") == expected
    content = [
        {"type": "text", "text": "Hear "},
        {"type": "input_audio", "input_audio": {"data": exact, "format": "wav"}},
    ]
    messages = [{"role": "user", "content": [*content, {"type": "text", "text": "!"}]}]
    output = llm.chat(messages, GREEDY, use_tqdm=False)[0]
    assert list(output.outputs[0].token_ids) == tokens(llm, samples)


def test_other_rates_and_channels_become_those_of_the_model() -> None:
    time = np.arange(RATE) / RATE
    tone = np.sin(2 * np.pi * 440 * time).astype(np.float32)
    twice = np.sin(2 * np.pi * 440 * np.arange(2 * RATE) / (2 * RATE)).astype(np.float32)
    for kind in ("WAV", "FLAC", "OGG"):
        read = read_audio({"data": file_of(np.stack([twice, twice], 1), kind, 2 * RATE)}, RATE, 2, Allowed(), "audio 0")
        assert read.shape == tone.shape
        assert np.abs(read - tone)[500:-500].max() < 0.1


def header(seconds: int) -> str:
    """A file that says to be longer than it is."""
    content = bytearray(base64.b64decode(file_of(sound(1))))
    content[40:44] = (seconds * RATE * 2).to_bytes(4, "little")
    return base64.b64encode(bytes(content)).decode()


BAD: list[tuple[Callable[[], Any], str]] = [
    (lambda: 7, "int is no recording"),
    (lambda: np.zeros((2, 9), np.float32), "float32 (2, 9) is no recording"),
    (lambda: np.zeros(9, np.int16), "int16 (9,) is no recording"),
    (lambda: (sound(1), 0.5), "the rate 0.5"),
    (lambda: (sound(1), float("nan")), "the rate nan"),
    (lambda: (sound(1), float("inf")), "the rate inf"),
    (lambda: (sound(1), 500_000), "a rate of 500000"),
    (lambda: np.zeros(0, np.float32), "more than 0"),
    (lambda: sound(1, 2.5), "2.5 s"),
    (lambda: np.full(99, np.nan, np.float32), "finite"),
    (lambda: {"data": file_of(sound(1, 3.0))}, "at most 2 s"),
    (lambda: {"data": 7}, "in base64"),
    (lambda: {"data": "????"}, "not base64"),
    (lambda: {"data": base64.b64encode(b"RIFF no audio").decode()}, "are no audio"),
    (lambda: {"data": file_of(np.zeros((99, 9), np.float32))}, "are no audio"),
    (lambda: "https://a.example/x.wav", "allowed_media_domains"),
]


@pytest.mark.parametrize(("make", "told"), BAD, ids=[told for _, told in BAD])
def test_a_bad_recording_fails_its_own_request(llm: LLM, make: Callable[[], Any], told: str) -> None:
    with pytest.raises(InvalidPromptError, match=r"^audio 0: ") as caught:
        tokens(llm, make())
    assert told in str(caught.value)


def test_what_a_small_file_becomes_is_bounded_while_it_is_decoded(monkeypatch: pytest.MonkeyPatch) -> None:
    """Silence in many channels at a high rate has few bytes. A rate that is not taken is told before anything is decoded."""
    read: list[Any] = []
    decode = soundfile.SoundFile.read

    def noted(file: Any, *how: Any, **more: Any) -> Any:
        read.append(decode(file, *how, **more))
        return read[-1]

    monkeypatch.setattr(soundfile.SoundFile, "read", noted)
    silent = file_of(np.zeros((10 * 96_000, 8), np.float32), "FLAC", 96_000)
    assert len(silent) < 100_000
    made = read_audio({"data": silent}, 96_000, 20.0, Allowed(), "audio 0")
    assert made.shape == (960_000,)
    assert max(piece.nbytes for piece in read) < 4 << 20
    read.clear()
    fast = file_of(sound(1), rate=250_000)
    with pytest.raises(InvalidPromptError, match="audio 0: a rate of 250000 must be"):
        read_audio({"data": fast}, RATE, 2.0, Allowed(), "audio 0")
    assert not read
    monkeypatch.setattr(audio, "MAX_SAMPLES", 1000)
    with pytest.raises(InvalidPromptError, match="more than 1000 samples; send it at a lower rate"):
        read_audio({"data": file_of(sound(1))}, RATE, 2.0, Allowed(), "audio 0")
    assert sum(map(len, read)) == 1001


def test_a_header_that_promises_much_costs_nothing(llm: LLM) -> None:
    assert len(tokens(llm, {"data": header(100_000)})) == 8


@pytest.mark.anyio
async def test_the_server_takes_recordings(llm: LLM, folder: Path) -> None:
    engine = AsyncLLM(str(folder), num_gpu_blocks_override=100, **ARGUMENTS)
    try:
        transport = httpx.ASGITransport(create_app(engine))
        async with httpx.AsyncClient(transport=transport, base_url="http://test", timeout=60) as client:
            for data, status in (("????", 400), (file_of(sound(2), subtype="FLOAT"), 200)):
                part = {"type": "input_audio", "input_audio": {"data": data, "format": "wav"}}
                content = [{"type": "text", "text": "Hear "}, part, {"type": "text", "text": "!"}]
                body = {"messages": [{"role": "user", "content": content}], "max_tokens": 8, "temperature": 0}
                answer = await client.post("/v1/chat/completions", json=body | {"ignore_eos": True})
                assert answer.status_code == status, answer.text
        given = {"prompt": TEXT, "multi_modal_data": {"audio": sound(2)}}
        expected = llm.generate([given], GREEDY, use_tqdm=False)[0].outputs[0].text
        assert answer.json()["choices"][0]["message"]["content"] == expected
    finally:
        engine.shutdown()
