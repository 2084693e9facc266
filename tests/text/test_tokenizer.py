"""Tokenizer: equal to transformers, and clear about what is wrong with a folder."""

from __future__ import annotations

import shutil
import subprocess
import sys
import threading
import time
from pathlib import Path

import numpy as np
import orjson
import pytest

from actorllm.config import BUNDLED_MODELS
from actorllm.errors import CorruptModelError, InvalidPromptError, ModelError, ModelNotFoundError
from actorllm.text.tokenizer import Tokenizer

STORYTELLER = BUNDLED_MODELS["storyteller"]

TEXTS = [
    "",
    " ",
    "Once upon a time, in a forest,",
    "  two  spaces\n\nand lines\t",
    "Ünïcödé 日本語 🦊👩‍👩‍👧 ﬁ \u200b \ufffd",
    "a<|endoftext|>b <|endoftext|><|endoftext|>",
    "numbers 1234567890 and 'll 've $%^&*()",
    "The fox ran. " * 800,
]


@pytest.mark.parametrize("text", TEXTS, ids=range(len(TEXTS)))
def test_equal_to_transformers(storyteller: Tokenizer, text: str) -> None:
    from transformers import AutoTokenizer

    theirs = AutoTokenizer.from_pretrained(str(STORYTELLER))
    ids = storyteller.encode(text)
    assert ids.dtype == np.int32
    assert ids.tolist() == theirs.encode(text)
    for skip in (False, True):
        assert storyteller.decode(ids, skip) == theirs.decode(ids.tolist(), skip_special_tokens=skip)
    assert storyteller.vocab_size == len(theirs)
    assert storyteller.special_ids == set(theirs.all_special_ids)
    assert storyteller.bos_token_id == theirs.bos_token_id
    assert storyteller.eos_token_id == theirs.eos_token_id
    assert storyteller.pad_token_id == theirs.pad_token_id
    assert storyteller.unk_token_id is theirs.unk_token_id is None


def test_decodes_arrays_and_lists(storyteller: Tokenizer) -> None:
    ids = storyteller.encode("a little fox")
    assert storyteller.decode(ids[1:]) == storyteller.decode(ids.tolist()[1:]) == "a little fox"
    assert storyteller.decode([5000, 10**9]) == ""


def test_does_not_import_transformers_or_torch() -> None:
    code = (
        "import sys; from actorllm.text.request_text import RequestText; from actorllm.text.tokenizer import Tokenizer;"
        f"assert Tokenizer({str(STORYTELLER)!r}).encode('fox').size;"
        "loaded = {'torch', 'transformers'} & set(sys.modules); assert not loaded, loaded"
    )
    subprocess.run([sys.executable, "-c", code], check=True, cwd=Path(__file__).parents[2], timeout=50)


def test_other_threads_run_while_a_long_text_is_encoded(storyteller: Tokenizer) -> None:
    """Or a long prompt would stop the event loop of the process that tokenizes it."""
    text = "The quick brown fox. " * 40_000
    done = threading.Event()

    def encode() -> None:
        storyteller.encode(text)
        done.set()

    begin = time.perf_counter()
    thread = threading.Thread(target=encode)
    thread.start()
    steps = 0
    while not done.is_set():
        steps += 1
        done.wait(0.001)
    thread.join()
    assert time.perf_counter() - begin > 0.02, "too fast to tell"
    assert steps > 5


def test_what_is_no_text_is_refused(storyteller: Tokenizer) -> None:
    with pytest.raises(InvalidPromptError, match="valid Unicode"):
        storyteller.encode("a\ud800b")
    with pytest.raises(InvalidPromptError, match="valid Unicode"):
        storyteller.encode("a\ud800b" * 4096)
    with pytest.raises(InvalidPromptError, match="not bytes"):
        storyteller.encode(b"abc")  # type: ignore[arg-type]


# Folders --------------------------------------------------------------------------------------------------------------


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    for name in ("tokenizer.json", "tokenizer_config.json"):
        shutil.copy(STORYTELLER / name, tmp_path / name)
    return tmp_path


def edited(file: Path, **changes: object) -> None:
    file.write_bytes(orjson.dumps(orjson.loads(file.read_bytes()) | changes))


def test_no_folder_and_no_tokenizer(tmp_path: Path) -> None:
    with pytest.raises(ModelNotFoundError, match="does not exist"):
        Tokenizer(tmp_path / "missing")
    with pytest.raises(ModelNotFoundError, match="holds no tokenizer"):
        Tokenizer(tmp_path)


@pytest.mark.parametrize("content", [b"", b"{", b"{}", b"null", b"\xff\xfe", b'{"model": {"type": "none"}}'])
def test_a_corrupt_tokenizer_names_the_file(folder: Path, content: bytes) -> None:
    (folder / "tokenizer.json").write_bytes(content)
    with pytest.raises(CorruptModelError, match=r"tokenizer\.json"):
        Tokenizer(folder)


@pytest.mark.parametrize("content", [b"{", b"[]", b'{"eos_token": 7}', b'{"added_tokens_decoder": {"x": {}}}'])
def test_a_corrupt_configuration_names_the_file(folder: Path, content: bytes) -> None:
    (folder / "tokenizer_config.json").write_bytes(content)
    with pytest.raises(CorruptModelError, match=r"tokenizer_config\.json"):
        Tokenizer(folder)


def test_without_a_configuration(folder: Path, storyteller: Tokenizer) -> None:
    (folder / "tokenizer_config.json").unlink()
    bare = Tokenizer(folder)
    assert bare.config == {}
    assert bare.eos_token_id is None
    assert bare.encode("a fox").tolist() == storyteller.encode("a fox").tolist()


def test_truncation_and_padding_of_the_file_do_not_apply(folder: Path, storyteller: Tokenizer) -> None:
    padding = {"strategy": {"Fixed": 64}, "direction": "Right", "pad_to_multiple_of": None}
    edited(
        folder / "tokenizer.json",
        truncation={"direction": "Right", "max_length": 3, "strategy": "LongestFirst", "stride": 0},
        padding={**padding, "pad_id": 0, "pad_type_id": 0, "pad_token": "<|endoftext|>"},
    )
    text = "Once upon a time there was a fox"
    assert Tokenizer(folder).encode(text).tolist() == storyteller.encode(text).tolist()


def test_tokens_that_only_the_configuration_knows(folder: Path) -> None:
    from transformers import AutoTokenizer

    edited(
        folder / "tokenizer_config.json",
        eos_token={"__type": "AddedToken", "content": "<|end|>", "lstrip": False, "normalized": False},
        additional_special_tokens=["<|tool|>"],
    )
    ours, theirs = Tokenizer(folder), AutoTokenizer.from_pretrained(str(folder))
    text = "a<|end|>b<|tool|>"
    assert ours.encode(text).tolist() == theirs.encode(text)
    assert ours.eos_token_id == theirs.eos_token_id == 4096
    assert ours.special_ids == {0, 4096, 4097}
    assert ours.decode(ours.encode(text), skip_special_tokens=True) == "ab"


def test_a_special_tokens_map_names_them_too(folder: Path) -> None:
    edited(folder / "tokenizer_config.json", eos_token=None)
    (folder / "special_tokens_map.json").write_bytes(orjson.dumps({"eos_token": {"content": "<|endoftext|>"}}))
    assert Tokenizer(folder).eos_token_id == 0


def test_without_tokenizer_json_transformers_converts(folder: Path, storyteller: Tokenizer) -> None:
    model = orjson.loads((folder / "tokenizer.json").read_bytes())["model"]
    (folder / "tokenizer.json").unlink()
    (folder / "vocab.json").write_bytes(orjson.dumps(model["vocab"]))
    merges = [m if isinstance(m, str) else " ".join(m) for m in model["merges"]]
    (folder / "merges.txt").write_text("#version: 0.2\n" + "\n".join(merges) + "\n")
    edited(folder / "tokenizer_config.json", tokenizer_class="GPT2Tokenizer", backend=None)
    (folder / "config.json").write_bytes(orjson.dumps({"model_type": "gpt2"}))
    converted = Tokenizer(folder)
    text = "Once upon a time, a 🦊"
    assert converted.encode(text).tolist() == [i for i in storyteller.encode(text).tolist() if i]
    assert converted.eos_token_id == 0
    (folder / "vocab.json").write_bytes(b"[]")
    with pytest.raises(CorruptModelError, match="cannot read the tokenizer"):
        Tokenizer(folder)


def test_a_tokenizer_in_python_says_what_to_do_instead(tmp_path: Path) -> None:
    """As models of Marian have it, whether the library that it is written with is installed or not."""
    (tmp_path / "vocab.json").write_text('{"<unk>": 0, "</s>": 1, "<pad>": 2}')
    (tmp_path / "tokenizer_config.json").write_text('{"tokenizer_class": "MarianTokenizer"}')
    (tmp_path / "config.json").write_text('{"model_type": "marian"}')
    for name in ("source.spm", "target.spm"):
        (tmp_path / name).write_bytes(b"")
    with pytest.raises(ModelError, match=r"save it as tokenizer\.json, or use skip_tokenizer_init=True"):
        Tokenizer(tmp_path)
