"""What is wrong fails alone, at once, and says what to do: a stream that runs beside it goes on to its end."""

from __future__ import annotations

import dataclasses
import errno
import math
import os
import shutil
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import anyio
import numpy as np
import orjson
import pytest

from actorllm import LLM, SLO, AsyncLLM, RequestOutput, SamplingParams
from actorllm.config import BUNDLED_MODELS
from actorllm.errors import (
    ActorLLMError,
    ConfigError,
    CorruptModelError,
    DuplicateRequestError,
    EngineStartError,
    InvalidParameterError,
    InvalidPromptError,
    ModelNotFoundError,
    RequestFailedError,
    SharedMemoryError,
    UnsupportedModelError,
)
from actorllm.ring import segment
from actorllm.types import params as request_params

STORYTELLER = BUNDLED_MODELS["storyteller"]
PROMPT = "Once upon a time"


@pytest.fixture
def anyio_backend() -> str:
    return "asyncio"


@pytest.fixture(scope="module")
def llm() -> Iterator[AsyncLLM]:
    engine = AsyncLLM("storyteller", num_threads=1, dtype="float32")
    anyio.run(engine.start)
    yield engine
    engine.shutdown()


@pytest.fixture
async def beside(llm: AsyncLLM) -> Any:
    """A request that runs while the test does its harm, and must end as if nothing had been."""
    params = SamplingParams(max_tokens=20, ignore_eos=True, seed=1)
    stream = llm.generate(PROMPT, params, request_id="beside")
    outputs: list[RequestOutput] = [await stream.__anext__()]
    yield
    outputs += [output async for output in stream]
    assert outputs[-1].outputs[0].finish_reason == "length"
    assert len(outputs[-1].outputs[0].token_ids) == 20


def short(**arguments: Any) -> SamplingParams:
    return SamplingParams(**({"max_tokens": 3, "ignore_eos": True} | arguments))


# Prompts --------------------------------------------------------------------------------------------------------------


@pytest.mark.usefixtures("beside")
@pytest.mark.parametrize(
    ("prompt", "words"),
    [
        ([], ["empty"]),
        ({"prompt_token_ids": []}, ["empty"]),
        (np.zeros(0, np.int64), ["empty"]),
        ([1] * 1024, ["1024 tokens", "max_model_len is 1024", "maximum context length: shorten it to 1023 or fewer"]),
        ("once " * 3000, ["tokens", "max_model_len is 1024", "shorten it", "maximum context length"]),
        ([1, 4096], ["token id 4096", "vocabulary of 4096"]),
        ([1, -1], ["token id -1", "vocabulary"]),
        ([2**40], ["token id 1099511627776"]),
        ([2**70], [f"token id {2**70} is outside the vocabulary"]),
        ([1, 2**63, -1], [f"token id {2**63} is outside the vocabulary"]),
        ([1.0, 2.0], ["flat list of integers", "item 0 is 1.0 (float)"]),
        ([1, [2]], ["flat list of integers", "item 1 is [2] (list)"]),
        ([math.nan], ["flat list of integers"]),
        ([True, False], ["flat list of integers", "bool"]),
        ([True, 1], ["flat list of integers", "bool"]),
        ([1, np.True_], ["flat list of integers", "bool"]),
        (np.array([True, False]), ["flat list of integers", "bool"]),
        (["1", "2"], ["flat list of integers"]),
        ([None], ["flat list of integers"]),
        ([[1, 2], [3, 4]], ["flat list of integers", "item 0 is [1, 2] (list)"]),
        ([[1], [2, 3]], ["flat list of integers"]),
        (b"bytes", ["text or token ids", "bytes"]),
        (7, ["text or token ids", "int"]),
        (None, ["text or token ids", "NoneType"]),
        ({}, ["'prompt' or 'prompt_token_ids'"]),
        ({"text": PROMPT}, ["'text'", "'prompt'"]),
        ({"prompt_tokens_ids": [1]}, ["did you mean 'prompt_token_ids'"]),
        ({"prompt": PROMPT, "multi_modal_data": {"image": 1}}, ["'multi_modal_data'", "not supported"]),
        ({"prompt_embeds": np.zeros((3, 256))}, ["prompt_embeds", "enable_prompt_embeds=True"]),
        ({"prompt": PROMPT, "cache_salt": ""}, ["cache_salt=''", "at least one character"]),
        ({"prompt": PROMPT, "cache_salt": 7}, ["cache_salt=7", "string"]),
        ({"prompt": PROMPT, "cache_salt": "a" * 1025}, ["cache_salt='aaa", "at most 1024"]),
        ({"prompt": PROMPT, "cache_sal": "a"}, ["did you mean 'cache_salt'"]),
        ({"prompt": {"prompt": PROMPT}}, ["flat list of integers"]),
        ("\ud800", ["not valid Unicode"]),
    ],
    ids=lambda value: repr(value)[:30],
)
async def test_prompts(llm: AsyncLLM, prompt: Any, words: list[str]) -> None:
    with pytest.raises(InvalidPromptError) as caught:
        await llm.complete(prompt, short())
    for word in words:
        assert word in str(caught.value)
    for word in ("inhomogeneous", "C long", "object in"):  # numpy's words
        assert word not in str(caught.value)
    assert isinstance(caught.value, ValueError)


@pytest.mark.usefixtures("beside")
async def test_a_prompt_that_fails_while_it_is_read(llm: AsyncLLM) -> None:
    def ids() -> Iterator[int]:
        yield 1
        raise RuntimeError("the disk is gone")

    with pytest.raises(InvalidPromptError, match="the disk is gone"):
        await llm.complete(ids(), short())


# Parameters -----------------------------------------------------------------------------------------------------------


@pytest.mark.usefixtures("beside")
@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        ({"sampling_params": {"max_tokens": 3}}, ["SamplingParams", "dict"]),
        ({"sampling_params": short(stop_token_ids=[5, 4096])}, ["stop_token_ids: 4096", "vocabulary of 4096"]),
        ({"sampling_params": short(stop_token_ids=[2**80])}, ["stop_token_ids", "vocabulary"]),
        ({"request_id": 5}, ["request_id=5", "string"]),
        ({"priority": "high"}, ["priority='high'", "integer"]),
        ({"priority": True}, ["priority=True"]),
        ({"priority": 2**63}, ["priority=", "64-bit"]),
        ({"slo": -1}, ["tpot=-1", "positive"]),
        ({"slo": "fast"}, ["slo='fast'"]),
        ({"slo": math.nan}, ["nan", "positive"]),
        ({"tenant": 5}, ["tenant=5", "string"]),
        ({"tenant": "\ud800"}, ["tenant", "Unicode"]),
        ({"type_info": b"chat"}, ["type_info=b'chat'", "string"]),
        ({"deadline": "soon"}, ["deadline='soon'", "monotonic"]),
        ({"deadline": math.inf}, ["deadline=inf"]),
    ],
    ids=lambda value: repr(value)[:40],
)
async def test_arguments_of_generate(llm: AsyncLLM, arguments: dict[str, Any], words: list[str]) -> None:
    with pytest.raises(InvalidParameterError) as caught:
        _ = [output async for output in llm.generate(PROMPT, **({"sampling_params": short()} | arguments))]
    for word in words:
        assert word in str(caught.value)


@pytest.mark.usefixtures("beside")
@pytest.mark.parametrize(
    ("request_id", "shown"),
    [(5, "5"), (None, "None"), (b"beside", "b'beside'"), (["beside", 7], "7"), ([None], "None")],
)
async def test_ids_to_abort(llm: AsyncLLM, request_id: Any, shown: str) -> None:
    with pytest.raises(InvalidParameterError, match=f"request_id={shown} must be a string"):
        await llm.abort(request_id)


async def test_the_extras_are_carried(llm: AsyncLLM) -> None:
    extras: dict[str, Any] = {"priority": -(2**63), "tenant": "é", "type_info": "chat", "deadline": 1e9}
    for slo in (None, 0.05, SLO(ttft=1, e2e=10)):
        output = await llm.complete(PROMPT, short(), slo=slo, is_latency_sensitive=True, **extras)
        assert output.finished


@pytest.mark.usefixtures("beside")
async def test_parameters_that_were_spoilt_later(llm: AsyncLLM) -> None:
    params = short()
    params.temperature = -1
    for call in (llm.generate, llm.stream):
        with pytest.raises(InvalidParameterError, match=r"temperature=-1 must be >= 0"):
            call(PROMPT, params)
    params = short()
    params.stop = "there"
    output = await llm.complete(PROMPT, params)
    assert "there" not in output.outputs[0].text


@pytest.mark.usefixtures("beside")
async def test_a_request_id_that_runs_already(llm: AsyncLLM) -> None:
    for call in (llm.generate, llm.stream):
        with pytest.raises(DuplicateRequestError, match="'beside' is still running; choose another request_id"):
            call(PROMPT, request_id="beside")
    assert issubclass(DuplicateRequestError, ValueError)


@pytest.mark.usefixtures("beside")
async def test_parameters_that_leave_no_token(llm: AsyncLLM, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(
        request_params, "MAX_STOP_TOKEN_IDS", 4096
    )  # this vocabulary is small enough to be ruled out as a whole
    with pytest.raises(InvalidParameterError, match="min_tokens leaves no token to choose"):
        await llm.complete(PROMPT, short(stop_token_ids=list(range(4096)), min_tokens=2))


@pytest.mark.usefixtures("beside")
@pytest.mark.parametrize("n", [1, 3])
async def test_a_request_that_cannot_be_sent(llm: AsyncLLM, monkeypatch: pytest.MonkeyPatch, n: int) -> None:
    """Should a check be missing: the request fails, and those behind it are sent all the same."""
    make_maker = llm._engine._submits.generating

    def spoilt(*arguments: Any, **more: Any) -> Callable[[int], Any]:
        make = make_maker(*arguments, **more)
        return lambda rid: dataclasses.replace(make(rid), tenant="\ud800")

    monkeypatch.setattr(llm._engine._submits, "generating", spoilt)
    num_open = len(llm._engine._frontend._journal)
    with pytest.raises(RequestFailedError, match="cannot be sent"):
        await llm.complete(PROMPT, short(n=n))
    monkeypatch.undo()
    assert (await llm.complete(PROMPT, short())).finished
    assert len(llm._engine._frontend._journal) <= num_open, "no sequence of it is left in the journal"


# Models and memory ----------------------------------------------------------------------------------------------------


def model_folder(tmp_path: Path, **changes: Any) -> Path:
    for file in STORYTELLER.iterdir():
        if file.suffix == ".json":
            shutil.copy(file, tmp_path)
    (tmp_path / "model.safetensors").symlink_to(STORYTELLER / "model.safetensors")
    tree = orjson.loads((tmp_path / "config.json").read_bytes()) | changes
    (tmp_path / "config.json").write_bytes(orjson.dumps(tree))
    return tmp_path


def write(name: str, content: bytes | None) -> Callable[[Path], None]:
    def change(folder: Path) -> None:
        (folder / name).unlink()
        if content is not None:
            (folder / name).write_bytes(content)

    return change


WEIGHTS = (STORYTELLER / "model.safetensors").read_bytes()


def without_a_tensor() -> bytes:
    """The weights with one tensor under another name of the same length."""
    name = b'"model.layers.2.mlp.up_proj.weight"'
    assert name in WEIGHTS
    return WEIGHTS.replace(name, name.replace(b"up_proj", b"up_xxxx"))


BAD_FOLDERS: dict[str, tuple[Callable[[Path], None], type[ActorLLMError], list[str]]] = {
    "truncated": (write("model.safetensors", WEIGHTS[:-100]), CorruptModelError, ["model.safetensors cannot be read"]),
    "garbage": (write("model.safetensors", b"\xff" * 64), CorruptModelError, ["model.safetensors cannot be read"]),
    "empty": (write("model.safetensors", b""), CorruptModelError, ["model.safetensors cannot be read"]),
    "no weights": (write("model.safetensors", None), ModelNotFoundError, ["model.safetensors", "load_format='dummy'"]),
    "a tensor missing": (
        write("model.safetensors", without_a_tensor()),
        CorruptModelError,
        ["no tensor 'model.layers.2.mlp.up_proj.weight'"],
    ),
    "tokenizer corrupt": (write("tokenizer.json", b"{"), CorruptModelError, ["tokenizer.json cannot be read"]),
    "no tokenizer": (write("tokenizer.json", None), ModelNotFoundError, ["no tokenizer", "skip_tokenizer_init=True"]),
}
BAD_CONFIGS: list[tuple[dict[str, Any], type[ActorLLMError], list[str]]] = [
    ({"architectures": ["RwkvForCausalLM"]}, UnsupportedModelError, ["'RwkvForCausalLM'", "LlamaForCausalLM"]),
    ({"quantization_config": {"quant_method": "aqlm"}}, UnsupportedModelError, ["quantized", "aqlm"]),
    ({"rope_parameters": {"rope_type": "spiral"}}, CorruptModelError, ["LlamaForCausalLM cannot be built", "'spiral'"]),
    ({"hidden_size": 512}, CorruptModelError, ["shape (4096, 256)", "(4096, 512)"]),
    ({"num_hidden_layers": 5}, CorruptModelError, ["model.layers.4"]),
    ({"hidden_size": "wide"}, CorruptModelError, ["hidden_size", "'wide'"]),
]


def start_fails(folder: str | Path, **arguments: Any) -> ActorLLMError:
    engine = LLM.__new__(LLM)
    with pytest.raises(ActorLLMError) as caught:
        engine.__init__(folder, **({"topology": "inline", "num_threads": 1} | arguments))  # type: ignore[misc]
    engine._engine.shutdown()
    return caught.value


@pytest.mark.parametrize("name", BAD_FOLDERS)
def test_a_broken_model_folder(tmp_path: Path, name: str) -> None:
    change, expected, words = BAD_FOLDERS[name]
    folder = model_folder(tmp_path)
    change(folder)
    error = start_fails(folder)
    assert type(error) is expected
    for word in words:
        assert word in str(error)


@pytest.mark.parametrize(("changes", "expected", "words"), BAD_CONFIGS, ids=str)
def test_a_model_that_cannot_be_served(
    tmp_path: Path, changes: dict[str, Any], expected: type[ActorLLMError], words: list[str]
) -> None:
    error = start_fails(model_folder(tmp_path, **changes))
    assert type(error) is expected
    for word in words:
        assert word in str(error)


async def test_the_error_of_a_child_process_reaches_every_caller(tmp_path: Path) -> None:
    """Across processes too it is the same exception with the same words; the child's traceback is a note on it."""
    folder = model_folder(tmp_path)
    BAD_FOLDERS["a tensor missing"][0](folder)
    llm = AsyncLLM(folder)
    waiting = llm.generate(PROMPT)
    for call in (lambda: waiting.__anext__(), llm.start, lambda: llm.complete(PROMPT), llm.stats):
        with pytest.raises(CorruptModelError, match=r"no tensor 'model\.layers\.2\.mlp\.up_proj\.weight'"):
            await call()
    llm.shutdown()


@pytest.mark.parametrize(("size", "hint"), [(150_000, "set max_model_len=64 or less"), (1, "holds 0 tokens")])
def test_too_little_memory_for_one_sequence(size: int, hint: str) -> None:
    error = start_fails("storyteller", kv_cache_memory_bytes=size)
    assert type(error) is ConfigError
    assert hint in str(error)
    assert "kv_cache_memory_bytes" in str(error)


def test_the_hint_about_max_model_len_is_right() -> None:
    arguments: dict[str, Any] = {"kv_cache_memory_bytes": 150_000, "max_model_len": 64}
    with LLM("storyteller", topology="inline", num_threads=1, **arguments) as llm:
        (output,) = llm.generate(
            [1] * 40, SamplingParams(max_tokens=None, ignore_eos=True, min_tokens=1), use_tqdm=False
        )
        assert len(output.outputs[0].token_ids) == 24
        with pytest.raises(InvalidPromptError, match="max_model_len is 64"):
            llm.generate([1] * 64, use_tqdm=False)


@pytest.mark.parametrize("policy", ["fcsf", "nowhere:Policy", "json:JSONDecoder"])
@pytest.mark.parametrize("argument", ["scheduling_policy", "admission_policy"])
def test_an_unknown_scheduling_or_admission_policy(argument: str, policy: str) -> None:
    error = start_fails("storyteller", **{argument: policy})
    assert isinstance(error, ConfigError | EngineStartError)
    assert policy in str(error)


async def test_a_full_shared_memory(monkeypatch: pytest.MonkeyPatch) -> None:
    code = errno.ENOSPC

    def refuse(fd: int, offset: int, length: int) -> None:
        raise OSError(code, os.strerror(code))

    monkeypatch.setattr(segment.os, "posix_fallocate", refuse)
    llm = AsyncLLM("storyteller", num_threads=1)
    with pytest.raises(SharedMemoryError, match=rf"{os.strerror(code)}.* are free in /dev/shm.*--shm-size") as caught:
        await llm.complete(PROMPT)
    assert caught.value.errno == code
    assert llm._engine.pids == {}
    llm.shutdown()


async def test_shared_memory_that_cannot_be_written(monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(*arguments: Any, **more: Any) -> None:
        raise PermissionError(errno.EACCES, "Permission denied")

    monkeypatch.setattr(segment.posix_ipc, "SharedMemory", refuse)
    llm = AsyncLLM("storyteller", num_threads=1)
    with pytest.raises(SharedMemoryError, match="/dev/shm must be a writable tmpfs"):
        await llm.start()
    llm.shutdown()
