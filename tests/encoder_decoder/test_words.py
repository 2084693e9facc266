"""Times of words: the text is cut as transformers cuts it, and a path through what heads look at is its path."""

from __future__ import annotations

import json
import threading
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import anyio
import numpy as np
import pytest
import torch
from anyio import to_thread

from actorllm.config import EngineConfig
from actorllm.errors import CorruptModelError, RequestFailedError
from actorllm.model.encoder_decoder.encoder_tower import EncoderTower
from actorllm.model.encoder_decoder.word_alignment import Aligner, alignment_heads, entered, median_filtered
from actorllm.server.audio.asked import SpeechTokens
from actorllm.server.audio.speech_answer import SpeechAnswer
from actorllm.server.audio.words import timed, words_of
from actorllm.text.tokenizer import Tokenizer
from tests.encoder_decoder.small_models import RATE, WINDOW_S, save_whisper, sound, write_json

TEXTS = [
    " Hello, world! (It's a test.)",
    'She said: "no", then "yes".',
    " one  two\n three-four",
    "déjà vu – ¿qué? [ok]",
    "日本語です。はい！",
    "",
]


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return save_whisper(tmp_path_factory.mktemp("whisper"))


@pytest.mark.parametrize("language", ["en", "ja"])
def test_words_are_those_of_transformers(folder: Path, language: str) -> None:
    """Each token is a byte, so that characters are of several."""
    from transformers.models.whisper.tokenization_whisper import _combine_tokens_into_words

    tokenizer = Tokenizer(folder)

    def decode(ids: list[int], **_: Any) -> str:
        return tokenizer.decode(ids)

    stock = SimpleNamespace(decode=decode, eos_token_id=tokenizer.eos_token_id, language=None)
    for text in TEXTS:
        ids = tokenizer.encode(text, False).tolist()
        words, tokens, _ = _combine_tokens_into_words(stock, ids, {"en": "english", "ja": "japanese"}[language])
        found = words_of(ids, tokenizer.decode, has_spaces=language == "en")
        assert found == [(word, len(own)) for word, own in zip(words, tokens, strict=True)]
        assert "".join(word for word, _ in found) == text


def test_no_token_is_lost_behind_what_is_no_character(folder: Path) -> None:
    """Where transformers finds no words any more."""
    tokenizer = Tokenizer(folder)
    ids = tokenizer.encode(" broken \ufffd char", False).tolist()
    words = words_of(ids, tokenizer.decode, has_spaces=True)
    assert words[0] == (" broken", 7)
    assert sum(count for _, count in words) == len(ids)
    assert words[-1][0].endswith("char")


def test_words_lie_within_their_window() -> None:
    words = timed([(" a", 2), (" ", 1), (" bc", 1)], [0.1, 0.2, 0.5, 0.6, 1.4], begin=10.0, most=1.25)
    assert [one.tree() for one in words] == [
        {"word": "a", "start": 10.1, "end": 10.5},
        {"word": "bc", "start": 10.6, "end": 11.25},
    ]


@pytest.mark.parametrize(("num_rows", "num_columns"), [(1, 1), (1, 9), (7, 1), (5, 40), (23, 6), (12, 12)])
def test_the_cheapest_path_is_that_of_transformers(num_rows: int, num_columns: int) -> None:
    from transformers.models.whisper.generation_whisper import _dynamic_time_warping

    rng = np.random.default_rng(num_rows)
    for cost in (rng.normal(size=(num_rows, num_columns)), rng.integers(0, 2, (num_rows, num_columns)) * 1.0):
        rows, columns = _dynamic_time_warping(cost)
        jumps = np.pad(np.diff(rows), (1, 0), constant_values=1).astype(bool)
        assert entered(cost).tolist() == columns[jumps].tolist()


@pytest.mark.parametrize("length", [1, 3, 4, 30])
def test_the_median_is_that_of_transformers(length: int) -> None:
    from transformers.models.whisper.generation_whisper import _median_filter

    x = torch.randn(2, 3, length)
    assert torch.equal(median_filtered(x, 7), _median_filter(x, 7))


@pytest.mark.parametrize("heads", [None, [[2, 1], [0, 3], [2, 2]]], ids=["later half", "named"])
def test_tokens_begin_where_heads_look(folder: Path, tmp_path: Path, heads: Any) -> None:
    """Against weights of the module of transformers, and its functions for the path."""
    import transformers as t
    from transformers.models.whisper.generation_whisper import _dynamic_time_warping, _median_filter

    for file in folder.iterdir():
        (tmp_path / file.name).write_bytes(file.read_bytes())
    tree = json.loads((folder / "generation_config.json").read_text())
    if heads is not None:
        write_json(tmp_path, "generation_config.json", tree | {"alignment_heads": heads})
    config = EngineConfig.from_arguments(str(tmp_path), dtype="float32")
    tower = EncoderTower(config.model)
    made = t.WhisperFeatureExtractor.from_pretrained(tmp_path)(sound(1, 1.3), sampling_rate=RATE, return_tensors="np")
    features = np.ascontiguousarray(made["input_features"], np.float32)
    beginning, text = 4, 9
    ids = np.random.default_rng(3).integers(0, 250, (1, beginning + text + 1))
    first, stop, num_rows = beginning - 1, beginning + text, int(1.3 / WINDOW_S * 100)
    span = np.array((first, stop, num_rows), np.int64)
    plain = tower.encode({"input_features": features})
    packed = tower.encode({"input_features": features, "decoder_input_ids": ids, "span": span})
    assert tower.encode({"input_features": features}).tolist() == plain.tolist(), "its rows are the same afterwards"
    auto: Any = t.WhisperForConditionalGeneration
    model = auto.from_pretrained(tmp_path, dtype=torch.float32, attn_implementation="eager").eval()
    with torch.no_grad():
        seen = model(
            torch.from_numpy(features), decoder_input_ids=torch.from_numpy(ids), output_attentions=True
        ).cross_attentions
    picked = heads or [[layer, head] for layer in (1, 2) for head in range(4)]
    weights = torch.stack([seen[layer][0, head] for layer, head in sorted(map(tuple, picked), key=lambda one: one[0])])
    weights = weights[..., :num_rows]
    weights = weights / weights.sum(-1, keepdim=True)
    weights = (weights - weights.mean(-2, keepdim=True)) / weights.std(-2, keepdim=True, unbiased=False)
    matrix = _median_filter(weights, 7).mean(0)[first:stop]
    rows, columns = _dynamic_time_warping(-matrix.double().numpy())
    jumps = np.pad(np.diff(rows), (1, 0), constant_values=1).astype(bool)
    starts = np.frombuffer(packed, np.int64)
    assert starts.tolist() == columns[jumps].tolist()
    assert starts.size == text + 1
    assert len(set(starts.tolist())) > 1


@pytest.mark.parametrize("given", [[[3, 0]], [[0, 4]], [[0]], "all", [], [[True, 0]]])
def test_heads_that_there_are_not_are_refused(given: Any) -> None:
    with pytest.raises(CorruptModelError, match="alignment_heads"):
        alignment_heads({"alignment_heads": given}, num_layers=3, num_heads=4)


@pytest.fixture
def aligner(monkeypatch: pytest.MonkeyPatch) -> Callable[[torch.Tensor], Aligner]:
    """Whose heads have these weights."""

    def make(weights: torch.Tensor) -> Aligner:
        made = Aligner.__new__(Aligner)
        made._width = 1
        monkeypatch.setattr(Aligner, "_weights", lambda self, features, ids: weights)
        return made

    return make


def test_a_token_that_looks_at_silence_leaves_the_times_of_the_others(aligner: Callable[..., Aligner]) -> None:
    """As in float16, where the weights of the recording become 0."""
    weights = (torch.eye(6) * 0.8 + 0.1).repeat(6, 1, 1)
    nothing: Any = torch.empty(0)
    assert aligner(weights).starts(nothing, nothing, 0, 6, 6).tolist() == [0, 1, 2, 3, 4, 5]
    weights[1, 2] = 0
    assert aligner(weights).starts(nothing, nothing, 0, 6, 6).tolist() == [0, 1, 2, 3, 4, 5]


def test_weights_that_are_no_numbers_are_told(aligner: Callable[..., Aligner]) -> None:
    weights = torch.ones(2, 6, 6)
    weights[0, 0, 0] = torch.nan
    nothing: Any = torch.empty(0)
    with pytest.raises(RequestFailedError, match=r"holds NaN or infinity .* dtype='float32'"):
        aligner(weights).starts(nothing, nothing, 0, 6, 6)


def test_a_translation_is_cut_as_english(folder: Path) -> None:
    """Whatever the language of the recording is."""
    tokenizer = Tokenizer(folder)
    ids = tokenizer.encode(" a whole day", False).tolist()
    tokens = SpeechTokens(tokenizer)
    assert [word for word, _ in tokens.words_of(ids, "translate", "ja")] == [" a", " whole", " day"]
    assert len(tokens.words_of(ids, "transcribe", "ja")) > 3


def test_an_alignment_counts_until_it_ends_also_when_its_client_has_left() -> None:
    """Else clients that come and go have any number of threads."""
    has_begun, may_end, turn = threading.Event(), threading.Event(), anyio.CapacityLimiter(1)

    def word_starts(*arguments: Any) -> Any:
        has_begun.set()
        assert may_end.wait(30)
        return np.zeros(2)

    tokens = SimpleNamespace(
        text_ids=lambda ids: ids, words_of=lambda *_: [("a", 1)], alignment_ids=lambda *_: ([0, 1, 2], 1)
    )
    prompts = SimpleNamespace(sources=SimpleNamespace(word_starts=word_starts))
    answer: Any = SpeechAnswer.__new__(SpeechAnswer)
    answer._state = SimpleNamespace(aligning_turn=turn, engine=SimpleNamespace(prompts=prompts))
    answer._speech = SimpleNamespace(tokens=tokens, asked=SimpleNamespace(task="transcribe"), row_s=0.02, max_target=64)
    window = SimpleNamespace(samples=np.zeros(1), seconds=1.0, start_s=0.0)

    async def leave() -> None:
        async with anyio.create_task_group() as tasks:
            tasks.start_soon(answer._words, [1], window, "en")
            await to_thread.run_sync(has_begun.wait, 30)
            tasks.cancel_scope.cancel()
            with anyio.CancelScope(shield=True):
                await anyio.wait_all_tasks_blocked()
                num_counted = turn.borrowed_tokens
                may_end.set()
        assert num_counted == 1
        assert turn.borrowed_tokens == 0

    anyio.run(leave)
