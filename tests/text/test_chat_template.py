"""Conversations to prompts: what transformers' own apply_chat_template gives, and what is refused."""

from __future__ import annotations

import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import orjson
import pytest

from actorllm.config import BUNDLED_MODELS
from actorllm.errors import CorruptModelError, InvalidParameterError, InvalidPromptError
from actorllm.text.chat_template import ChatTemplate, Conversation, is_batch
from actorllm.text.tokenizer import Tokenizer

STORYTELLER = BUNDLED_MODELS["storyteller"]

CHATML = """{{- bos_token }}
{%- if tools %}{{ '<|im_start|>tools\n' }}{% for tool in tools %}{{ tool | tojson }}{% endfor %}{{ '<|im_end|>\n' }}{% endif %}
{%- for message in messages %}
{{- '<|im_start|>' + message.role + '\n' }}
{%- if message.role == 'assistant' %}{% generation %}{{ message.content }}{{ '<|im_end|>\n' }}{% endgeneration %}
{%- else %}{{ message['content'] | trim }}{{ '<|im_end|>\n' }}{% endif %}
{%- for call in message.tool_calls or [] %}{{ call.function.name }}({{ call.function.arguments.city }}){% endfor %}
{%- endfor %}
{%- if add_generation_prompt %}{{ '<|im_start|>assistant\n' }}{% if enable_thinking %}{{ '<think>' }}{% endif %}{% endif %}"""

PARTS = """{% for message in messages %}[{{ message.role }}]{% set content = message['content'] %}
{%- for part in content %}({{ part['type'] }}:{{ part['text'] }}){% endfor %}{% endfor %}"""

TALK = [
    {"role": "system", "content": "  You tell stories. "},
    {"role": "user", "content": "A fox?\nYes."},
    {"role": "assistant", "content": "There was"},
]

MakeFolder = Callable[..., Path]


@pytest.fixture
def make_folder(tmp_path: Path) -> MakeFolder:
    """The storyteller's tokenizer with another template; None: without any."""

    def make(template: Any, **files: str) -> Path:
        shutil.copy(STORYTELLER / "tokenizer.json", tmp_path)
        config = orjson.loads((STORYTELLER / "tokenizer_config.json").read_bytes())
        del config["chat_template"]
        if template is not None:
            config["chat_template"] = template
        (tmp_path / "tokenizer_config.json").write_bytes(orjson.dumps(config))
        for name, text in files.items():
            file = tmp_path / name.replace("__", "/").replace("_jinja", ".jinja")
            file.parent.mkdir(exist_ok=True)
            file.write_text(text)
        return tmp_path

    return make


def render(folder: Path, messages: Any = TALK, **options: Any) -> str:
    return ChatTemplate(Tokenizer(folder)).render(Conversation.of(messages, **options))


@pytest.mark.parametrize(
    ("messages", "options"),
    [
        (TALK, {}),
        (TALK[:2], {}),
        (TALK, {"add_generation_prompt": False}),
        (TALK, {"add_generation_prompt": False, "continue_final_message": True}),
        (TALK[:2], {"chat_template_kwargs": {"enable_thinking": True, "bos_token": "<s>"}}),
        (TALK[:2], {"tools": [{"type": "function", "function": {"name": "weather", "parameters": {}}}]}),
    ],
    ids=repr,
)
@pytest.mark.parametrize("template", ["own", CHATML], ids=["own", "chatml"])
def test_as_transformers_renders_it(
    make_folder: MakeFolder, template: str, messages: list[Any], options: dict[str, Any]
) -> None:
    from transformers import AutoTokenizer

    folder = STORYTELLER if template == "own" else make_folder(template)
    theirs = AutoTokenizer.from_pretrained(folder)
    arguments = {"add_generation_prompt": True} | {k: v for k, v in options.items() if k != "chat_template_kwargs"}
    arguments |= options.get("chat_template_kwargs", {})
    text = render(folder, messages, **options)
    assert text == theirs.apply_chat_template(messages, tokenize=False, **arguments)
    ids = theirs.apply_chat_template(messages, tokenize=True, return_dict=False, **arguments)
    assert Tokenizer(folder).encode(text, add_special_tokens=False).tolist() == ids


def test_content_parts_of_text_are_joined(make_folder: MakeFolder) -> None:
    parts = [{"type": "text", "text": "A fox?"}, {"type": "input_text", "text": "Yes."}]
    folder = make_folder(CHATML)
    assert render(folder, [{"role": "user", "content": parts}]) == render(folder, TALK[1:2])
    assert render(folder, [{"role": "user", "content": ["A fox?", "Yes."]}]) == render(folder, TALK[1:2])


def test_a_template_that_reads_parts_is_given_parts(make_folder: MakeFolder) -> None:
    folder = make_folder(PARTS)
    messages = [{"role": "user", "content": [{"type": "text", "text": "a"}, {"type": "text", "text": "b"}]}]
    assert render(folder, messages) == "[user](text:a)(text:b)"
    assert render(folder, [{"role": "user", "content": "a"}]) == "[user](text:a)"
    as_text = render(folder, [{"role": "user", "content": "a"}], chat_template_content_format="string")
    assert as_text == "[user](:)", "a string has no parts"
    joined = render(make_folder(CHATML), messages, chat_template_content_format="openai")
    assert "[{'type': 'text', 'text': 'a'}" in joined


@pytest.mark.parametrize(
    ("template", "wants_parts"),
    [
        ("{% for m in messages %}{% for c in m.content %}{{ c.text }}{% endfor %}{% endfor %}", True),
        ("{% for m in messages %}{% for c in m['content'][1:] | list %}{{ c.text }}{% endfor %}{% endfor %}", True),
        ("{% for m in messages %}{% for t in m.tools %}{{ t }}{% endfor %}{{ m.content }}{% endfor %}", False),
        ("{{ messages[0].content }}", False),
        ("{% macro say(content) %}{% for c in content %}{{ c.text }}{% endfor %}{% endmacro %}{{ say(1) }}", True),
    ],
)
def test_what_a_template_wants_is_read_from_it(make_folder: MakeFolder, template: str, wants_parts: bool) -> None:
    from actorllm.text.chat_template import _read_template

    assert _read_template(template).content_parts == wants_parts


@pytest.mark.parametrize("name", ["reasoning", "reasoning_content"])
def test_a_template_gets_the_thought_of_a_message_by_both_names(make_folder: MakeFolder, name: str) -> None:
    template = "{% for m in messages %}{{ m.reasoning }}|{{ m.reasoning_content }}|{{ m.content }};{% endfor %}"
    messages = [{"role": "user", "content": "a"}, {"role": "assistant", "content": "b", name: "Hm."}]
    assert render(make_folder(template), messages) == "||a;Hm.|Hm.|b;"


def test_tool_calls(make_folder: MakeFolder) -> None:
    call = {"id": "1", "type": "function", "function": {"name": "weather", "arguments": '{"city": "Rome"}'}}
    messages = [*TALK[:2], {"role": "assistant", "content": None, "tool_calls": [call]}]
    assert "weather(Rome)" in render(make_folder(CHATML), messages)
    call["function"]["arguments"] = "{"  # type: ignore[index]
    with pytest.raises(InvalidPromptError, match="arguments of a tool call are not JSON"):
        render(make_folder(CHATML), messages)


def test_where_templates_are_found(make_folder: MakeFolder) -> None:
    assert render(make_folder("config")) == "config"
    assert render(make_folder(None), chat_template="given {{ messages | length }}") == "given 3"
    several = [{"name": "default", "template": "plain"}, {"name": "tool_use", "template": "tools"}]
    folder = make_folder(several)
    assert render(folder) == "plain"
    assert render(folder, tools=[{"type": "function"}]) == "tools"
    assert render(folder, chat_template="tool_use") == "tools"
    with pytest.raises(InvalidPromptError, match=r"several chat templates.*'a', 'b'"):
        render(make_folder([{"name": "a", "template": "1"}, {"name": "b", "template": "2"}]))
    assert render(make_folder("config", chat_template_jinja="file")) == "file"
    folder = make_folder("config", chat_template_jinja="file", additional_chat_templates__rag_jinja="documents")
    assert render(folder, chat_template="rag") == "documents"
    with pytest.raises(CorruptModelError, match="chat_template"):
        render(make_folder([{"name": "a"}], chat_template_jinja=""))


def test_a_folder_with_the_template_in_json_only(make_folder: MakeFolder) -> None:
    folder = make_folder(None)
    (folder / "chat_template.json").write_bytes(orjson.dumps({"chat_template": "from json"}))
    assert render(folder) == "from json"


def test_special_tokens_that_only_the_tokenizers_class_knows(make_folder: MakeFolder) -> None:
    folder = make_folder("[{{ unk_token }}|{{ bos_token }}]")
    assert render(folder) == "[|<|endoftext|>]"


def test_without_a_template(make_folder: MakeFolder) -> None:
    with pytest.raises(InvalidPromptError, match="no chat template; give one with chat_template="):
        render(make_folder(None))


@pytest.mark.parametrize(
    ("template", "words"),
    [
        ("{% for %}", "not valid Jinja"),
        ("{{ raise_exception('roles must alternate') }}", "cannot render.*roles must alternate"),
        ("{{ messages[9].content.text }}", "cannot render"),
        ("{{ 1 // 0 }}", "cannot render"),
        ("{{ messages + 1 }}", "cannot render"),
        ("{{ ''.__class__.__mro__ }}", "cannot render"),
    ],
)
def test_a_template_that_fails(make_folder: MakeFolder, template: str, words: str) -> None:
    with pytest.raises(InvalidPromptError, match=words):
        render(make_folder(template))


@pytest.mark.parametrize(
    ("messages", "words"),
    [
        ("Hello", ["list of mappings", "str"]),
        ({"role": "user"}, ["list of mappings", "dict"]),
        ([], ["no messages"]),
        (["Hello"], ["'Hello'", "mapping"]),
        ([{"content": "a"}], ["needs a 'role'"]),
        ([{"rol": "user", "content": "a"}], ["did you mean 'role'"]),
        ([{"role": "user", "content": 7}], ["content", "7"]),
        ([{"role": "user", "content": [{"type": "image_url", "image_url": {}}]}], ["'image_url'", "text only"]),
        ([{"role": "user", "content": [{"type": "input_audio"}]}], ["'input_audio'"]),
        ([{"role": "user", "content": [{"text": "a"}]}], ["type None"]),
        ([{"role": "user", "content": [{"type": "text"}]}], ["under 'text'"]),
        ([{"role": "user", "content": [5]}], ["type 'int'"]),
    ],
    ids=repr,
)
def test_bad_messages(messages: Any, words: list[str]) -> None:
    with pytest.raises(InvalidPromptError) as caught:
        Conversation.of(messages)
    for word in words:
        assert word in str(caught.value)


@pytest.mark.parametrize(
    ("options", "words"),
    [
        ({"add_generation_prompt": 1}, "add_generation_prompt=1"),
        ({"continue_final_message": True}, "add_generation_prompt=False"),
        ({"chat_template_content_format": "xml"}, "'auto', 'string', 'openai'"),
        ({"chat_template": 5}, "chat_template=5"),
        ({"chat_template_kwargs": []}, "mapping"),
        ({"chat_template_kwargs": {"tools": []}}, "give 'tools' as an argument"),
        ({"chat_template_kwargs": {"tokenize": True}}, "'tokenize' is not a variable"),
        ({"tools": {"name": "x"}}, "tools must be a list"),
        ({"tools": ["x"]}, "tools must be a list"),
    ],
    ids=repr,
)
def test_bad_options(options: dict[str, Any], words: str) -> None:
    with pytest.raises(InvalidParameterError, match=words):
        Conversation.of(TALK, **options)


def test_what_the_caller_changes_later_is_not_seen() -> None:
    messages: list[dict[str, Any]] = [{"role": "user", "content": [{"type": "text", "text": "a"}]}]
    tools: list[dict[str, Any]] = [{"function": {"name": "f"}}]
    conversation = Conversation.of(messages, tools=tools)
    messages[0]["content"][0]["text"] = "b"
    messages.append({})
    tools[0]["function"]["name"] = "g"
    assert conversation.tools == [{"function": {"name": "f"}}]
    assert conversation.messages == [{"role": "user", "content": [{"type": "text", "text": "a"}]}]


def test_what_nobody_will_change_is_not_copied() -> None:
    """A copy of what a client may send takes seconds."""
    messages: list[dict[str, Any]] = [{"role": "user", "content": [{"type": "text", "text": "a"}]}]
    tools: list[dict[str, Any]] = [{"function": {"name": "f"}}]
    conversation = Conversation.of(messages, tools=tools, is_own=True)
    assert conversation.messages == messages
    assert conversation.messages[0]["content"] is messages[0]["content"]
    assert conversation.tools is not None
    assert conversation.tools[0] is tools[0]
    with pytest.raises(InvalidPromptError, match="role"):
        Conversation.of([{}], is_own=True)


def test_one_conversation_or_several() -> None:
    assert not is_batch(TALK)
    assert is_batch([TALK, TALK])
    assert is_batch((tuple(TALK),))
    for neither in ([], "ab", ["ab"], [TALK, "ab"], 7):
        assert not is_batch(neither)
