"""Plug-ins of vLLM that make prompts of data, and answers of vectors, run as they are (`io_processor_plugin`)."""

from __future__ import annotations

import json
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import anyio
import numpy as np
import pytest
import transformers

from actorllm import LLM, AsyncLLM, PoolingParams
from actorllm.errors import ConfigError, InvalidParameterError
from actorllm.server import create_app
from tests.model.hf.small_encoders import save_encoder
from tests.server.conftest import client_of

ENGINE: dict[str, Any] = {"topology": "inline", "num_threads": 1, "dtype": "float32"}
NEWER = {
    "__init__.py": """
def register():
    return "late_words.processing.LateWords"
""",
    "bodies.py": """
from typing import Literal
from pydantic import BaseModel
from vllm.entrypoints.pooling.base.protocol import CompletionRequestMixin
from vllm.entrypoints.serve.engine.protocol import UsageInfo

class Asked(CompletionRequestMixin):
    side: Literal["query", "document"]

class Answered(BaseModel):
    vectors: list[list[list[float]]]
    side: str
    usage: UsageInfo
""",
    "processing.py": """
from collections.abc import Sequence
from vllm.config import VllmConfig
from vllm.inputs import PromptType, TokensPrompt
from vllm.outputs import PoolingRequestOutput
from vllm.plugins.io_processors.interface import IOProcessor
from vllm.pooling_params import PoolingParams
from vllm.renderers import BaseRenderer
from vllm.utils.collection_utils import is_list_of
from .bodies import Answered, Asked, UsageInfo

class LateWords(IOProcessor[Asked, Answered]):
    def __init__(self, vllm_config: VllmConfig, renderer: BaseRenderer):
        super().__init__(vllm_config, renderer)
        self.renderer = renderer
        self.longest = vllm_config.model_config.max_model_len
        self.open: dict[str, Asked] = {}

    def parse_data(self, data: object) -> Asked:
        if isinstance(data, dict):
            return Asked(**data)
        raise TypeError("the data must be a dictionary")

    def pre_process(self, prompt: Asked, request_id: str | None = None, **kwargs) -> PromptType | Sequence[PromptType]:
        name = request_id or "offline"
        assert name not in self.open
        self.open[name] = prompt
        tokenizer = self.renderer.get_tokenizer()
        texts = prompt.input if is_list_of(prompt.input, str) else [prompt.input]
        mark = tokenizer.convert_tokens_to_ids("w7" if prompt.side == "query" else "w8")
        ids = [[mark, *tokenizer.encode(text, add_special_tokens=False)][: self.longest] for text in texts]
        return [TokensPrompt(prompt_token_ids=one) for one in ids]

    def merge_pooling_params(self, params: PoolingParams | None = None) -> PoolingParams:
        params = params or PoolingParams()
        params.task = "token_embed"
        params.skip_reading_prefix_cache = True
        return params

    def post_process(self, model_output: Sequence[PoolingRequestOutput], request_id: str | None = None, **kwargs) -> Answered:
        asked = self.open.pop(request_id or "offline")
        number = sum(len(output.prompt_token_ids) for output in model_output)
        usage = UsageInfo(prompt_tokens=number, total_tokens=number)
        return Answered(vectors=[output.outputs.data.tolist() for output in model_output], side=asked.side, usage=usage)
""",
}
OLDER = """
from vllm.config import VllmConfig
from vllm.entrypoints.openai.protocol import IOProcessorResponse
from vllm.plugins.io_processors.interface import IOProcessor
from vllm.pooling_params import PoolingParams

class Norms(IOProcessor):
    def __init__(self, vllm_config: VllmConfig):
        super().__init__(vllm_config)
        self.model = vllm_config.model_config.model

    def parse_request(self, request):
        data = request.data if hasattr(request, "data") else request.get("data", request)
        if data.get("fail"):
            kinds = {"value": ValueError, "own": RuntimeError, "key": KeyError, "later": NotImplementedError}
            raise kinds[data["fail"]]("so it was asked")
        return data["text"]

    def validate_or_generate_params(self, params=None):
        return params or PoolingParams()

    def pre_process(self, prompt, request_id=None, **kwargs):
        return [] if prompt == "nothing" else prompt

    async def pre_process_async(self, prompt, request_id=None, **kwargs):
        return self.pre_process(prompt, request_id)

    def post_process(self, model_output, request_id=None, **kwargs):
        return {"norm": float(model_output[0].outputs.data.norm()), "model": self.model}

    def output_to_response(self, plugin_output):
        return IOProcessorResponse(data=plugin_output)
"""


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("encoder")
    save_encoder(path, transformers.BertModel)
    return path


@pytest.fixture(scope="module", autouse=True)
def installed(tmp_path_factory: pytest.TempPathFactory) -> Iterator[None]:
    """As pip leaves a package behind."""
    site = tmp_path_factory.mktemp("site")
    for name, text in NEWER.items():
        (site / "late_words").mkdir(exist_ok=True)
        (site / "late_words" / name).write_text(text)
    (site / "norms_plugin.py").write_text(OLDER)
    facts = site / "late_words-0.1.dist-info"
    facts.mkdir()
    (facts / "METADATA").write_text("Metadata-Version: 2.1\nName: late_words\nVersion: 0.1\n")
    (facts / "entry_points.txt").write_text(
        "[vllm.io_processor_plugins]\nlate_words = late_words:register\nbroken = late_words:missing\n"
    )
    sys.path.insert(0, str(site))
    yield
    sys.path.remove(str(site))
    for name in [name for name in sys.modules if name.partition(".")[0] in ("late_words", "norms_plugin")]:
        del sys.modules[name]


@pytest.fixture(scope="module")
def llm(folder: Path) -> Iterator[LLM]:
    with LLM(folder, io_processor_plugin="late_words", **ENGINE) as engine:
        yield engine


def test_data_become_prompts_and_one_answer_each(llm: LLM) -> None:
    (plain,) = llm.encode([[7, 20, 21]], pooling_task="token_embed", use_tqdm=False)
    tokenizer = llm.get_tokenizer()
    text = tokenizer.decode([20, 21])
    assert tokenizer.encode(text, add_special_tokens=False) == [20, 21]
    data = [{"data": {"input": [text, text], "side": "query"}}, {"data": {"input": text, "side": "document"}}]
    del data[1]["data"]["side"]
    with pytest.raises(ValueError, match="side"):
        llm.encode(data, pooling_task="plugin", use_tqdm=False)
    llm._engine.needed_plugin.processor.open.clear()  # type: ignore[attr-defined]  # the plug-in keeps what was not answered
    (query,) = llm.encode({"data": {"input": [text, text], "side": "query"}}, use_tqdm=False)
    assert query.outputs.side == "query"
    assert query.finished
    assert query.prompt_token_ids == []
    mark = tokenizer.convert_tokens_to_ids("w7")
    (wanted,) = llm.encode([[mark, 20, 21]], pooling_task="token_embed", use_tqdm=False)
    for vectors in query.outputs.vectors:
        np.testing.assert_allclose(vectors, wanted.outputs.array, atol=1e-6)
    assert query.outputs.usage.prompt_tokens == 6
    assert plain.outputs.data.shape == (3, wanted.outputs.array.shape[1])


def test_a_list_of_data_has_an_output_of_each(folder: Path) -> None:
    with LLM(folder, io_processor_plugin="norms_plugin:Norms", **ENGINE) as engine:
        outputs = engine.encode(
            [{"data": {"text": "w1"}}, {"data": {"text": "w2 w3"}}],
            [PoolingParams(use_activation=True), PoolingParams(use_activation=False)],
            pooling_task="plugin",
            use_tqdm=False,
        )
        first, second = (output.outputs["norm"] for output in outputs)
        assert first == pytest.approx(1, abs=1e-5)
        assert abs(second - 1) > 1e-3
        assert outputs[0].outputs["model"] == str(folder)
        with pytest.raises(ValueError, match="made no prompt"):
            engine.encode({"data": {"text": "nothing"}}, use_tqdm=False)
        with pytest.raises(InvalidParameterError, match="is for data of a plug-in"):
            engine.encode("w1", pooling_task="plugin", use_tqdm=False)
        (late,) = engine.encode({"data": {"text": "w1"}}, use_tqdm=False, timeout=1e-9)
        assert late.error is not None
        assert late.outputs is None


def test_a_server_answers_as_the_plug_in_does(folder: Path) -> None:
    async def ask() -> None:
        engine = AsyncLLM(folder, io_processor_plugin="late_words", **ENGINE)
        async with engine, client_of(create_app(engine)) as client:
            body = {"data": {"input": "w1 w2", "side": "query"}, "task": "plugin", "request_id": "mine"}
            answers = [await client.post("/pooling", json=body) for _ in range(2)]
            for answer in answers:
                assert answer.status_code == 200
                assert answer.json()["request_id"] == "pool-mine"
                assert set(answer.json()) == {"request_id", "created_at", "data"}
                assert answer.json()["data"]["usage"]["prompt_tokens"] == 3 == len(answer.json()["data"]["vectors"][0])
            many = {"data": {"input": [f"w{i}" for i in range(20)], "side": "document"}}
            answers = []
            async with anyio.create_task_group() as group:
                for _ in range(4):
                    group.start_soon(lambda: _append(answers, client.post("/pooling", json=many)))
            assert [len(answer.json()["data"]["vectors"]) for answer in answers] == [20] * 4
            plain = await client.post("/pooling", json={"input": "w1 w2"})
            assert plain.status_code == 200
            assert plain.json()["data"][0]["object"] == "pooling"
            for wrong, told in (
                ({"data": {"input": "w1", "side": "both"}}, "side"),
                ({"data": "w1"}, "must be a dictionary"),
                ({"data": {}, "input": "w1"}, "input beside data"),
                ({"data": {}, "task": "embed"}, "task='embed' beside data"),
            ):
                answer = await client.post("/pooling", json=wrong)
                assert answer.status_code == 400
                assert told in answer.json()["error"]["message"]

    anyio.run(ask)


async def _append(answers: list[Any], asked: Any) -> None:
    answers.append(await asked)


def test_what_an_older_plug_in_raises_fails_its_own_request(folder: Path) -> None:
    async def ask() -> None:
        engine = AsyncLLM(folder, io_processor_plugin="norms_plugin:Norms", **ENGINE)
        async with engine, client_of(create_app(engine)) as client:
            good = await client.post("/pooling", json={"data": {"text": "w1"}})
            assert good.status_code == 200
            assert good.json()["data"] == {"norm": pytest.approx(1, abs=1e-5), "model": str(folder)}
            told = await client.post("/pooling", json={"data": {"text": "w1", "fail": "value"}})
            assert told.status_code == 400
            assert told.json()["error"]["message"] == "data: so it was asked"
            own = await client.post("/pooling", json={"data": {"text": "w1", "fail": "own"}})
            assert own.status_code == 500
            assert "RuntimeError" in own.json()["error"]["message"]
            assert "asked" not in own.json()["error"]["message"]
            key = await client.post("/pooling", json={"data": {"text": "w1", "fail": "key"}})
            assert (key.status_code, "the plug-in failed: KeyError" in key.text) == (500, True)
            later = await client.post("/pooling", json={"data": {"text": "w1", "fail": "later"}})
            assert (later.status_code, later.json()["error"]["type"]) == (501, "NotImplementedError")
            assert (await client.post("/pooling", json={"data": {"text": "w1"}})).status_code == 200

    anyio.run(ask)


def test_an_async_program_has_its_data_answered(folder: Path) -> None:
    async def ask() -> None:
        async with AsyncLLM(folder, io_processor_plugin="norms_plugin:Norms", **ENGINE) as engine:
            output = await engine.encode_data({"text": "w1"}, request_id="mine")
            assert output.outputs == {"norm": pytest.approx(1, abs=1e-5), "model": str(folder)}
            assert (output.request_id, output.finished) == ("mine", True)
            with pytest.raises(KeyError, match="so it was asked"):
                await engine.encode_data({"text": "w1", "fail": "key"})
            late = await engine.encode_data({"text": "w1"}, timeout=1e-9)
            assert late.error is not None
            with pytest.raises(InvalidParameterError, match="encode_data"):
                engine.encode({"data": {"text": "w1"}})  # type: ignore[typeddict-item]
        with pytest.raises(InvalidParameterError, match="build it with io_processor_plugin"):
            await AsyncLLM(folder, **ENGINE).encode_data({})

    anyio.run(ask)


def test_data_without_a_plug_in_are_refused(folder: Path) -> None:
    async def ask() -> None:
        engine = AsyncLLM(folder, **ENGINE)
        async with engine, client_of(create_app(engine)) as client:
            answer = await client.post("/pooling", json={"data": {"text": "w1"}})
            assert answer.status_code == 400
            assert "io_processor_plugin" in answer.json()["error"]["message"]

    anyio.run(ask)
    with (
        LLM(folder, **ENGINE) as engine,
        pytest.raises(InvalidParameterError, match="build it with io_processor_plugin"),
    ):
        engine.encode({"data": {"text": "w1"}}, use_tqdm=False)


@pytest.mark.parametrize(
    ("name", "told"),
    [
        ("late_word", "is not known; did you mean 'late_words'"),
        ("broken", "AttributeError"),
        ("late_words.processing:Missing", "cannot be loaded"),
        ("json:JSONDecoder", "must be a subclass of IOProcessor"),
        ("", "must be the name of a plug-in"),
    ],
)
def test_a_plug_in_that_cannot_be_had_fails_the_constructor(folder: Path, name: str, told: str) -> None:
    with pytest.raises(ConfigError, match=told):
        LLM(folder, io_processor_plugin=name, **ENGINE)


def test_the_model_may_name_its_plug_in(folder: Path, tmp_path: Path) -> None:
    for file in folder.iterdir():
        (tmp_path / file.name).write_bytes(file.read_bytes())
    tree = json.loads((tmp_path / "config.json").read_text())
    (tmp_path / "config.json").write_text(json.dumps({**tree, "io_processor_plugin": "late_words"}))
    engine = AsyncLLM(tmp_path, **ENGINE)
    assert type(engine._engine.needed_plugin.processor).__name__ == "LateWords"
    with pytest.raises(ConfigError, match="runner='pooling'"):
        AsyncLLM("storyteller", io_processor_plugin="late_words")
