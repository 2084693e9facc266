"""`/v1/audio/transcriptions` and `/v1/audio/translations`: every format, long recordings, streams, and what is refused."""

from __future__ import annotations

import io
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import httpx
import numpy as np
import orjson
import pytest

from actorllm import AsyncLLM, SamplingParams
from actorllm.server import create_app
from actorllm.server.audio.asked import SpeechTokens
from actorllm.server.audio.formats import segments_of, srt, vtt
from actorllm.server.audio.windows import Window, windows_of
from actorllm.text.tokenizer import Tokenizer
from tests.encoder_decoder.small_models import RATE, WINDOW_S, save_whisper, sound

soundfile = pytest.importorskip("soundfile")
ARGUMENTS: dict[str, Any] = {"dtype": "float32", "num_threads": 1, "topology": "inline", "block_size": 16}
URL = "/v1/audio/transcriptions"
pytestmark = pytest.mark.leaks_by_module


@pytest.fixture(scope="module")
def anyio_backend() -> str:
    return "asyncio"


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return save_whisper(tmp_path_factory.mktemp("whisper"))


@pytest.fixture(scope="module")
async def engine(folder: Path) -> AsyncIterator[AsyncLLM]:
    llm = AsyncLLM(str(folder), **ARGUMENTS)
    yield llm
    llm.shutdown()


@pytest.fixture(scope="module")
async def client(engine: AsyncLLM) -> AsyncIterator[httpx.AsyncClient]:
    transport = httpx.ASGITransport(create_app(engine, served_model_name="whisper"))
    async with httpx.AsyncClient(transport=transport, base_url="http://test", timeout=60) as made:
        yield made


def wav(samples: Any, rate: int = RATE) -> bytes:
    file = io.BytesIO()
    soundfile.write(file, samples, rate, format="WAV", subtype="FLOAT")
    return file.getvalue()


async def post(client: httpx.AsyncClient, samples: Any, url: str = URL, **fields: Any) -> httpx.Response:
    content = samples if isinstance(samples, bytes) else wav(samples)
    return await client.post(url, files={"file": ("a.wav", content)}, data={"max_completion_tokens": 12} | fields)


async def expected(engine: AsyncLLM, samples: Any, target: str) -> list[int]:
    given = {"prompt": target, "multi_modal_data": {"audio": samples}}
    last: Any = None
    async for output in engine.generate(given, SamplingParams(temperature=0, max_tokens=12)):
        last = output
    return list(last.outputs[0].token_ids)


@pytest.mark.anyio
async def test_the_text_is_that_of_the_model(client: httpx.AsyncClient, engine: AsyncLLM) -> None:
    samples = sound(1)
    tokens = SpeechTokens(engine._engine.prompts.tokenizer)
    for url, task in ((URL, "transcribe"), ("/v1/audio/translations", "translate")):
        ids = await expected(engine, samples, f"<|startoftranscript|><|de|><|{task}|><|notimestamps|>")
        answer = await post(client, samples, url, language="de", model="whisper")
        assert answer.status_code == 200, answer.text
        assert answer.json() == {"text": tokens.text_of(ids), "usage": {"type": "duration", "seconds": 1}}
        plain = await post(client, samples, url, language="de", response_format="text")
        assert plain.text == tokens.text_of(ids) + "\n"
        assert plain.headers["content-type"].startswith("text/plain")


@pytest.mark.anyio
async def test_clients_are_told_how_many_tokens_the_decoder_takes(client: httpx.AsyncClient) -> None:
    (card,) = (await client.get("/v1/models")).json()["data"]
    assert card["max_model_len"] == 64, "max_target_positions, without the rows of the encoder"
    assert (await client.post("/tokenize", json={"prompt": "a"})).json()["max_model_len"] == 64


@pytest.mark.anyio
async def test_the_language_is_heard_where_none_is_given(client: httpx.AsyncClient, engine: AsyncLLM) -> None:
    answer = (await post(client, sound(1), response_format="verbose_json")).json()
    assert answer["language"] in ("en", "de")
    told = await post(client, sound(1), language=answer["language"], response_format="verbose_json")
    assert told.json() == answer


@pytest.mark.anyio
async def test_a_prompt_comes_before_the_recording(client: httpx.AsyncClient, engine: AsyncLLM) -> None:
    given = await post(client, sound(1), language="en", prompt="Names: Ada")
    ids = await expected(
        engine, sound(1), "<|startofprev|> Names: Ada<|startoftranscript|><|en|><|transcribe|><|notimestamps|>"
    )
    assert given.json()["text"] == SpeechTokens(engine._engine.prompts.tokenizer).text_of(ids)


@pytest.mark.anyio
async def test_a_long_recording_is_read_in_windows(client: httpx.AsyncClient) -> None:
    samples = np.concatenate([sound(seed, 1.5) for seed in range(4)])
    whole = (await post(client, samples, language="en")).json()
    parts = [
        (await post(client, window.samples, language="en")).json()["text"]
        for window in windows_of(samples, RATE, WINDOW_S)
    ]
    assert len(parts) >= 3
    assert whole == {"text": "".join(parts), "usage": {"type": "duration", "seconds": 6}}
    tree = (await post(client, samples, language="en", response_format="verbose_json")).json()
    assert tree["duration"] == pytest.approx(6)
    times = [time for segment in tree["segments"] for time in (segment["start"], segment["end"])]
    assert times == sorted(times)
    assert tree["text"] == "".join(segment["text"] for segment in tree["segments"])
    assert all(segment["avg_logprob"] <= 0 for segment in tree["segments"])
    for kind, mark in (("srt", "1\n00:00:"), ("vtt", "WEBVTT\n\n00:00:")):
        assert (await post(client, samples, language="en", response_format=kind)).text.startswith(mark)


@pytest.mark.anyio
async def test_a_stream_has_the_same_text(client: httpx.AsyncClient) -> None:
    samples = np.concatenate([sound(1, 1.5), sound(2, 1.5)])
    whole = (await post(client, samples, language="en")).json()["text"]
    answer = await post(client, samples, language="en", stream="true")
    assert answer.headers["content-type"].startswith("text/event-stream")
    *events, end = [line[6:] for line in answer.text.splitlines() if line]
    assert end == "[DONE]"
    trees = [orjson.loads(event) for event in events]
    assert "".join(tree["delta"] for tree in trees[:-1]) == trees[-1]["text"] == whole
    assert "".join(tree["choices"][0]["delta"]["content"] for tree in trees) == whole
    assert (trees[-1]["type"], trees[-1]["choices"][0]["finish_reason"]) == ("transcript.text.done", "stop")
    assert {tree["model"] for tree in trees} == {"whisper"}


def letters(text: str) -> str:
    """Without spaces, and what is no character."""
    return "".join(text.replace("\ufffd", "").split())


@pytest.mark.anyio
async def test_words_have_times(client: httpx.AsyncClient) -> None:
    """Of each window for itself; the times of `Aligner` are compared in `test_words`."""
    samples = np.concatenate([sound(seed, 1.5) for seed in range(3)])
    asked: dict[str, Any] = {"language": "en", "response_format": "verbose_json"}
    plain = (await post(client, samples, **asked)).json()
    assert "words" not in plain
    tree = (await post(client, samples, **asked, **{"timestamp_granularities[]": "word"})).json()
    both = (await post(client, samples, **asked, **{"timestamp_granularities[]": ["word", "segment"]})).json()
    assert "segments" not in tree
    assert [one["text"] for one in both["segments"]] == [one["text"] for one in plain["segments"]]
    assert both["words"] == tree["words"]
    assert tree["text"] == plain["text"]
    assert letters("".join(word["word"] for word in tree["words"])) == letters(plain["text"])
    times = [time for word in tree["words"] for time in (word["start"], word["end"])]
    assert times == sorted(times)
    assert 0 <= times[0] < times[-1] <= tree["duration"]
    assert {"word", "start", "end"} == set(tree["words"][0])
    german = await post(
        client, sound(1), language="de", response_format="verbose_json", **{"timestamp_granularities[]": "word"}
    )
    assert german.json()["words"]


BAD: list[tuple[dict[str, Any], str]] = [
    ({"model": "another"}, "another"),
    ({"language": "xx"}, "language='xx' is not one of this model: de, en"),
    ({"response_format": "xml"}, "must be one of json, text"),
    ({"temperature": "warm"}, "temperature='warm' must be a number"),
    ({"temperature": "-1"}, "temperature"),
    ({"stream": "true", "response_format": "srt"}, "stream=true needs"),
    ({"timestamp_granularities[]": "sentence"}, "must be one of segment, word"),
    ({"timestamp_granularities[]": "word"}, "need response_format=verbose_json"),
    ({"languages": "en"}, "did you mean 'language'"),
    ({"to_language": "de"}, "must be 'en'"),
]


@pytest.mark.anyio
@pytest.mark.parametrize(("fields", "told"), BAD, ids=[told for _, told in BAD])
async def test_a_wrong_field_is_named(client: httpx.AsyncClient, fields: dict[str, Any], told: str) -> None:
    answer = await post(client, sound(1), **fields)
    assert answer.status_code in (400, 404), answer.text
    assert told in answer.json()["error"]["message"]


@pytest.mark.anyio
async def test_what_is_no_recording_is_refused(client: httpx.AsyncClient) -> None:
    noise = await post(client, b"RIFF no audio")
    assert noise.status_code == 400
    assert "are no audio" in noise.json()["error"]["message"]
    assert noise.json()["error"]["param"] == "file"
    too_long = await post(client, wav(np.zeros(121 * 1000, np.float32), 1000))
    assert too_long.status_code == 400
    assert "at most 120 s" in too_long.json()["error"]["message"]
    too_short = await post(client, wav(sound(1)[:1], 48_000))
    assert too_short.status_code == 400
    assert "shorter than one sample" in too_short.json()["error"]["message"]
    assert (await post(client, b"x" * (9 << 20))).status_code == 413
    for content, kind in (
        (b"{}", "application/json"),
        (b"--x\r\n", "multipart/form-data; boundary=x"),
        (b"", "text/plain"),
    ):
        answer = await client.post(URL, content=content, headers={"content-type": kind})
        assert answer.status_code == 400, answer.text
    assert (await client.post(URL, files={"other": b"x"}, data={"model": "whisper"})).status_code == 400


@pytest.mark.anyio
async def test_a_file_may_name_its_channels(client: httpx.AsyncClient) -> None:
    """The header of such a WAV file is the extensible one, which recorders write for 24 bits."""
    answers = []
    for kind in ("WAV", "WAVEX"):
        file = io.BytesIO()
        soundfile.write(file, sound(1), RATE, format=kind, subtype="PCM_24")
        answers.append((await post(client, file.getvalue(), language="en")).json())
    assert "text" in answers[0]
    assert answers[1] == answers[0]


@pytest.mark.anyio
async def test_another_model_says_so() -> None:
    llm = AsyncLLM("storyteller", topology="inline", num_threads=1, max_model_len=128)
    try:
        transport = httpx.ASGITransport(create_app(llm))
        async with httpx.AsyncClient(transport=transport, base_url="http://test", timeout=60) as client:
            answer = await post(client, sound(1))
            assert answer.status_code == 404
            assert "Whisper" in answer.json()["error"]["message"]
    finally:
        llm.shutdown()


def test_windows_are_cut_where_it_is_quiet() -> None:
    samples = np.ones(5 * RATE, np.float32)
    quiet = int(1.7 * RATE)
    samples[quiet - 1600 : quiet + 1600] = 0
    windows = windows_of(samples, RATE, 2.0)
    assert np.array_equal(np.concatenate([window.samples for window in windows]), samples)
    assert abs(windows[0].seconds - 1.7) < 0.1
    assert all(0 < window.seconds <= 2 for window in windows)
    assert [window.start_s for window in windows[1:]] == pytest.approx(np.cumsum([w.seconds for w in windows])[:-1])


def test_segments_have_the_times_of_their_stamps(folder: Path) -> None:
    tokenizer = Tokenizer(folder)
    tokens = SpeechTokens(tokenizer)
    ids = tokenizer.encode("<|0.00|> Hello<|0.40|><|0.60|> you<|1.20|><|0.80|> more<|endoftext|>", False).tolist()
    window = Window(np.zeros(RATE, np.float32), 10.0, 1.5)
    found = segments_of(ids, None, window, tokens)
    assert [(round(s.start, 2), round(s.end, 2), s.text) for s in found] == [
        (10.0, 10.4, " Hello"),
        (10.6, 11.2, " you"),
        (11.2, 11.5, " more"),
    ]
    assert srt(found).startswith("1\n00:00:10,000 --> 00:00:10,400\nHello\n\n2\n00:00:10,600 --> ")
    assert vtt(found).startswith("WEBVTT\n\n00:00:10.000 --> 00:00:10.400\nHello\n\n")
