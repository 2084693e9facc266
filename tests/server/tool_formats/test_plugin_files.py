"""Files with parsers that are written for vLLM run as they are: `--tool-parser-plugin` and `--reasoning-parser-plugin`."""

from __future__ import annotations

import json
import re
import shutil
import sys
from collections.abc import AsyncIterator, Iterator
from importlib import resources
from pathlib import Path
from typing import Any

import anyio
import httpx
import pytest

from actorllm import AsyncLLM
from actorllm.config import EngineConfig
from actorllm.errors import ConfigError
from actorllm.server import create_app
from actorllm.server.answer_options import AnswerOptions
from actorllm.server.sampling import Defaults
from actorllm.server.tool_parsers import parser_named
from actorllm.testing import ScriptedAsyncLLM
from actorllm.text.reasoning.parsers import Marks, marks_of, reasoning_named
from actorllm.types.plugin_file import parser_of_file
from tests.server.conftest import client_of, events_of

pytestmark = pytest.mark.anyio

STREAMING_TOOLS = """
import json, re
from collections.abc import Sequence

try:
    from vllm.entrypoints.openai.protocol import (ChatCompletionRequest, DeltaFunctionCall, DeltaMessage, DeltaToolCall,
                                                  ExtractedToolCallInformation, FunctionCall, ToolCall)
    from vllm.entrypoints.openai.tool_parsers.abstract_tool_parser import ToolParser, ToolParserManager
    from vllm.logger import init_logger
except ImportError as error:
    raise ImportError("vllm is missing") from error
import vllm.utils

logger = init_logger(__name__)
CALL = re.compile(r"<do>(\\w+)(.*?)</do>", re.DOTALL)


@ToolParserManager.register_module(["doer", "do-er"])
class Doer(ToolParser):
    def __init__(self, tokenizer):
        super().__init__(tokenizer)
        self.num_said = 0
        self.num_calls = 0
        assert "the" in self.vocab

    def adjust_request(self, request):
        request.skip_special_tokens = False
        return request

    def extract_tool_calls(self, model_output: str, request: ChatCompletionRequest):
        from vllm.entrypoints.chat_utils import make_tool_call_id

        found = CALL.findall(model_output)
        calls = [ToolCall(type="function", id=make_tool_call_id(), function=FunctionCall(name=n, arguments=a)) for n, a in found]
        assert request.tools[0].function.name == "look" and request.tools[0].function.parameters["type"] == "object"
        text = CALL.sub("", model_output).strip()
        return ExtractedToolCallInformation(tools_called=bool(calls), tool_calls=calls, content=text or None)

    def extract_tool_calls_streaming(self, previous_text, current_text, delta_text, previous_token_ids: Sequence[int],
                                     current_token_ids, delta_token_ids, request):
        assert current_text == previous_text + delta_text
        assert [*previous_token_ids, *delta_token_ids] == list(current_token_ids)
        calls = CALL.findall(current_text)
        text = CALL.sub("", current_text).partition("<")[0]
        said, self.num_said = text[self.num_said:], len(text)
        deltas = []
        for name, arguments in calls[self.num_calls:]:
            first = DeltaFunctionCall(name=name).model_dump(exclude_none=True)
            deltas.append(DeltaToolCall(index=self.num_calls, type="function", id=vllm.utils.random_uuid(), function=first))
            rest = DeltaFunctionCall(arguments=arguments)
            deltas.append(DeltaToolCall(index=self.num_calls, function=rest))
            self.num_calls += 1
        return DeltaMessage(content=said or None, tool_calls=deltas) if said or deltas else None
"""
WHOLE_TOOLS = '''
import json
from vllm.tool_parsers import ToolParser, ToolParserManager
from vllm.entrypoints.openai.engine.protocol import ExtractedToolCallInformation, FunctionCall, ToolCall


@ToolParserManager.register_module("hermes")
class Listed(ToolParser):
    """As models' authors ship them: no streams."""

    def __init__(self, tokenizer, tools=None):
        super().__init__(tokenizer, tools)

    def extract_tool_calls(self, model_output, request):
        text, mark, rest = model_output.partition("<TOOLCALL>")
        if not mark:
            return ExtractedToolCallInformation(tools_called=False, tool_calls=[], content=model_output)
        calls = [
            ToolCall(function=FunctionCall(name=call["name"], arguments=json.dumps(call["arguments"])))
            for call in json.loads(rest.partition("</TOOLCALL>")[0])
        ]
        return ExtractedToolCallInformation(tools_called=True, tool_calls=calls, content=text.strip() or None)

    def extract_tool_calls_streaming(self, *args, **kwargs):
        raise NotImplementedError("no streams")
'''
NEWER_THOUGHTS = """
from vllm.reasoning.abs_reasoning_parsers import ReasoningParserManager
from vllm.reasoning.deepseek_r1_reasoning_parser import DeepSeekR1ReasoningParser


@ReasoningParserManager.register_module("nano")
class Nano(DeepSeekR1ReasoningParser):
    def extract_reasoning(self, model_output, request):
        thought, said = super().extract_reasoning(model_output, request)
        if (request.chat_template_kwargs or {}).get("enable_thinking") is False and said is None:
            return None, thought
        return thought, said
"""
OLDER_THOUGHTS = """
from typing import Optional, Union
from vllm.entrypoints.openai.protocol import ChatCompletionRequest, DeltaMessage
from vllm.reasoning import ReasoningParser, ReasoningParserManager
from vllm.transformers_utils.tokenizer import AnyTokenizer


@ReasoningParserManager.register_module("muser")
class Muser(ReasoningParser):
    def __init__(self, tokenizer: AnyTokenizer):
        super().__init__(tokenizer)
        self.num_thought = self.num_said = 0

    def is_reasoning_end(self, input_ids: list[int]) -> bool:
        return "(done)" in self.model_tokenizer.decode(input_ids)

    def extract_content_ids(self, input_ids: list[int]) -> list[int]:
        return []

    def extract_reasoning_content(self, model_output: str, request: ChatCompletionRequest):
        thought, _, said = model_output.partition("(done)")
        return thought or None, said or None

    def extract_reasoning_content_streaming(self, previous_text, current_text, delta_text, previous_token_ids, current_token_ids,
                                            delta_token_ids) -> Union[DeltaMessage, None]:
        thought, end, said = current_text.partition("(done)")
        if not end:
            thought = thought.partition("(")[0]
        new = (thought[self.num_thought:], said[self.num_said:])
        self.num_thought, self.num_said = len(thought), len(said)
        return DeltaMessage(reasoning_content=new[0] or None, content=new[1] or None)
"""
ASKING_THOUGHTS = """
from vllm.reasoning import ReasoningParser, ReasoningParserManager


@ReasoningParserManager.register_module("asker")
class Asker(ReasoningParser):
    def is_reasoning_end(self, input_ids):
        return False

    def extract_content_ids(self, input_ids):
        return []

    def extract_reasoning(self, model_output, request):
        return request.messages[-1]["content"], model_output
"""
FILES = {
    "doer_plugin": STREAMING_TOOLS,
    "listed_plugin": WHOLE_TOOLS,
    "nano_plugin": NEWER_THOUGHTS,
    "muser_plugin": OLDER_THOUGHTS,
    "asker_plugin": ASKING_THOUGHTS,
}
TOOLS = [{"type": "function", "function": {"name": "look", "parameters": {"type": "object"}}}]


@pytest.fixture(scope="module", autouse=True)
def folder(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Path]:
    """Of plug-in files, beside a model whose vocabulary has the marks of a thought."""
    made = tmp_path_factory.mktemp("plugins")
    for name, source in FILES.items():
        (made / f"{name}.py").write_text(source)
    model = made / "model"
    model.mkdir()
    shipped = Path(str(resources.files("actorllm"))) / "bundled" / "storyteller"
    for name in ("config.json", "generation_config.json", "tokenizer.json", "tokenizer_config.json"):
        shutil.copy(shipped / name, model)
    tree = json.loads((model / "tokenizer.json").read_text())
    for id, mark in ((4096, "<think>"), (4097, "</think>")):
        tree["added_tokens"].append({**tree["added_tokens"][0], "id": id, "content": mark, "special": False})
    (model / "tokenizer.json").write_text(json.dumps(tree))
    config = json.loads((model / "config.json").read_text())
    (model / "config.json").write_text(json.dumps({**config, "vocab_size": 4160}))
    path = list(sys.path)
    yield made
    sys.path[:] = path
    for name in FILES:
        sys.modules.pop(name, None)


def named(folder: Path, file: str, name: str) -> str:
    found = parser_of_file("--plugin", str(folder / f"{file}.py"), name, {"hermes"})
    assert found is not None
    return found


def scripted(folder: Path, **options: Any) -> AsyncLLM:
    """Answers with the last line of its prompt."""
    return ScriptedAsyncLLM(
        lambda prompt: prompt.strip().rpartition("\n")[2], model=str(folder / "model"), max_model_len=512, **options
    )


def message_of(events: list[dict[str, Any]]) -> dict[str, Any]:
    """What the deltas of a stream make together."""
    told: dict[str, Any] = {"reasoning": "", "content": "", "calls": {}}
    for event in events:
        for choice in event["choices"]:
            delta = choice["delta"]
            told["reasoning"] += delta.get("reasoning") or ""
            told["content"] += delta.get("content") or ""
            for call in delta.get("tool_calls") or ():
                name, arguments = told["calls"].get(call["index"], ("", ""))
                function = call["function"]
                told["calls"][call["index"]] = (
                    name + (function.get("name") or ""),
                    arguments + (function.get("arguments") or ""),
                )
            told["finish_reason"] = choice["finish_reason"]
    return told


async def whole_and_streamed(client: httpx.AsyncClient, text: str, **fields: Any) -> tuple[dict[str, Any], Any]:
    body = {"messages": [{"role": "user", "content": text}], "max_tokens": 200, **fields}
    whole = (await client.post("/v1/chat/completions", json=body)).json()["choices"][0]
    streamed = message_of(events_of(await client.post("/v1/chat/completions", json={**body, "stream": True})))
    message = whole["message"]
    told = {
        "reasoning": message.get("reasoning") or "",
        "content": message["content"] or "",
        "calls": {
            i: (call["function"]["name"], call["function"]["arguments"])
            for i, call in enumerate(message.get("tool_calls") or ())
        },
        "finish_reason": whole["finish_reason"],
    }
    return told, streamed


@pytest.fixture(scope="module")
def plain(folder: Path) -> Iterator[AsyncLLM]:
    engine = scripted(folder)
    anyio.run(engine.start)
    yield engine
    engine.shutdown()


@pytest.fixture
async def client(plain: AsyncLLM, folder: Path, request: pytest.FixtureRequest) -> AsyncIterator[httpx.AsyncClient]:
    file, name = request.param
    async with client_of(create_app(plain, tool_call_parser=named(folder, file, name))) as made:
        yield made


@pytest.mark.parametrize("client", [("doer_plugin", "do-er"), ("doer_plugin", "Doer")], indirect=True)
async def test_calls_in_answers_and_streams(client: httpx.AsyncClient) -> None:
    text = 'I look. <do>look{"at": "fox"}</do><do>look{"at": "den"}</do>'
    whole, streamed = await whole_and_streamed(client, text, tools=TOOLS)
    calls = {0: ("look", '{"at": "fox"}'), 1: ("look", '{"at": "den"}')}
    assert whole == {"reasoning": "", "content": "I look.", "calls": calls, "finish_reason": "tool_calls"}
    assert streamed == {**whole, "content": "I look. "}
    whole, streamed = await whole_and_streamed(client, "No call.", tools=TOOLS)
    assert whole == streamed == {"reasoning": "", "content": "No call.", "calls": {}, "finish_reason": "stop"}


@pytest.mark.parametrize("client", [("listed_plugin", "hermes")], indirect=True)
async def test_a_class_without_streams_tells_its_calls_at_the_end(client: httpx.AsyncClient) -> None:
    text = 'So. <TOOLCALL>[{"name": "look", "arguments": {"at": "fox"}}]</TOOLCALL>'
    whole, streamed = await whole_and_streamed(client, text, tools=TOOLS)
    assert whole["calls"] == {0: ("look", '{"at": "fox"}')}
    assert whole == streamed
    whole, streamed = await whole_and_streamed(client, "No call.", tools=TOOLS)
    assert whole == streamed == {"reasoning": "", "content": "No call.", "calls": {}, "finish_reason": "stop"}


@pytest.mark.parametrize("client", [("listed_plugin", "hermes")], indirect=True)
async def test_one_that_fails_fails_its_own_request(client: httpx.AsyncClient) -> None:
    body = {"messages": [{"role": "user", "content": "<TOOLCALL>[}"}], "max_tokens": 50, "tools": TOOLS}
    answer = await client.post("/v1/chat/completions", json=body)
    assert answer.status_code == 500
    events = (await client.post("/v1/chat/completions", json={**body, "stream": True})).text
    assert '"error"' in events
    whole, _ = await whole_and_streamed(client, "No call.", tools=TOOLS)
    assert whole["content"] == "No call."


@pytest.mark.parametrize("client", [("doer_plugin", "doer")], indirect=True)
async def test_demanded_calls_are_read_as_the_grammar_writes_them(client: httpx.AsyncClient) -> None:
    text = '[{"name": "look", "parameters": {"at": "fox"}}]'
    whole, streamed = await whole_and_streamed(client, text, tools=TOOLS, tool_choice="required")
    assert whole["calls"] == {0: ("look", '{"at": "fox"}')}
    assert whole == streamed


@pytest.mark.parametrize(
    ("file", "name", "text", "fields", "expected"),
    [
        ("nano_plugin", "nano", "Hm, well.</think>Yes.", {}, ("Hm, well.", "Yes.")),
        ("nano_plugin", "nano", "<think>Hm, well.</think>Yes.", {}, ("Hm, well.", "Yes.")),
        ("muser_plugin", "muser", "Hm, well.(done)Yes.", {}, ("Hm, well.", "Yes.")),
        ("muser_plugin", "Muser", "Hm, well.", {}, ("Hm, well.", "")),
    ],
)
async def test_thoughts(
    folder: Path, file: str, name: str, text: str, fields: dict[str, Any], expected: tuple[str, str]
) -> None:
    engine = scripted(folder, reasoning_parser=name, reasoning_parser_plugin=str(folder / f"{file}.py"))
    try:
        async with client_of(create_app(engine)) as client:
            whole, streamed = await whole_and_streamed(client, text, **fields)
            assert whole == streamed
            assert (whole["reasoning"], whole["content"]) == expected
            body = {"input": text, "max_output_tokens": 100}
            answer = (await client.post("/v1/responses", json=body)).json()
            assert [item["type"] for item in answer["output"]] == ["reasoning", "message"][: 1 + bool(expected[1])]
            assert answer["usage"]["output_tokens_details"]["reasoning_tokens"] > 0
    finally:
        engine.shutdown()


async def test_each_of_several_conversations_is_read_with_its_own_messages(folder: Path) -> None:
    engine = scripted(folder, reasoning_parser="asker", reasoning_parser_plugin=str(folder / "asker_plugin.py"))
    try:
        async with client_of(create_app(engine)) as client:
            asked = ["What of the fox?", "What of the king?", "What then?"]
            body = {"messages": [[{"role": "user", "content": text}] for text in asked], "max_tokens": 50}
            answer = await client.post("/v1/chat/completions/batch", json=body)
            assert [choice["message"]["reasoning"] for choice in answer.json()["choices"]] == asked
    finally:
        engine.shutdown()


async def test_a_thought_and_calls_of_two_plug_ins(folder: Path) -> None:
    engine = scripted(folder, reasoning_parser="nano", reasoning_parser_plugin=str(folder / "nano_plugin.py"))
    try:
        async with client_of(create_app(engine, tool_call_parser=named(folder, "doer_plugin", "doer"))) as client:
            text = 'Hm.</think>So.<do>look{"at": "fox"}</do>'
            whole, streamed = await whole_and_streamed(client, text, tools=TOOLS)
            assert whole == streamed
            assert (whole["reasoning"], whole["content"]) == ("Hm.", "So.")
            assert whole["calls"] == {0: ("look", '{"at": "fox"}')}
            off = {"chat_template_kwargs": {"enable_thinking": False}}
            whole, _ = await whole_and_streamed(client, "Just so.", **off)
            assert (whole["reasoning"], whole["content"]) == ("", "Just so.")
    finally:
        engine.shutdown()


def test_marks_of_a_plug_in(folder: Path) -> None:
    sys.path.append(str(folder))
    assert marks_of("nano_plugin:nano", None) == Marks("<think>", "</think>", "</think>", False)
    assert marks_of("muser_plugin:muser", None) is None
    given = {"reasoning_start_str": "(musing)", "reasoning_end_str": "(done)"}
    assert marks_of("muser_plugin:muser", given) == Marks("(musing)", "(done)", "(done)", False)


def test_vllm_means_our_names_in_the_file_and_nowhere_else(folder: Path) -> None:
    sys.path.append(str(folder))
    parser_named("doer_plugin:Doer", [])
    assert "vllm" not in sys.modules
    assert vars(sys.modules["doer_plugin"])["vllm"].__name__ == "actorllm.compat"


def test_what_a_model_lacks_is_said_before_it_is_served(folder: Path) -> None:
    sys.path.append(str(folder))
    config = EngineConfig.from_arguments("storyteller", reasoning_parser="nano_plugin:nano")
    defaults = Defaults.of(config.model, AnswerOptions.of())
    with pytest.raises(
        ConfigError, match=r"reasoning_parser: Nano cannot be used with this model: RuntimeError: '<think>'"
    ):
        defaults.with_templates(config.model.tokenizer, None)
    with pytest.raises(ConfigError, match="must be a Python file"):
        EngineConfig.from_arguments("storyteller", reasoning_parser="x", reasoning_parser_plugin="nowhere.py")
    (folder / "broken_plugin.py").write_text("from vllm.nowhere import Parser\n")
    told = "compat has no counterpart of vllm.nowhere; it is written for vLLM: derive the class from ReasoningParser"
    with pytest.raises(ConfigError, match=re.escape(told)):
        reasoning_named("broken_plugin:Mine")
