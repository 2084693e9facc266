"""Chat messages to the text of a prompt, through the model's own Jinja template.

Owns what a conversation may look like (`Conversation`, checked when it is made) and the template of a model folder
(`ChatTemplate`). Rendering is that of transformers' `apply_chat_template`, reached below the tokenizer classes, so that
the process of the application loads no torch for it. Called where prompts are tokenized: by tokenizer workers, and in the intake
process (`actorllm.intake`). The text already holds its special tokens, so it is encoded without adding any.
"""

from __future__ import annotations

import copy
import os
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import lru_cache
from pathlib import Path
from typing import Any, Literal, TypeAlias, get_args

import orjson

from actorllm.errors import CorruptModelError, InvalidParameterError, InvalidPromptError, nearest_name, shown
from actorllm.text.tokenizer import SPECIAL_NAMES, Tokenizer
from actorllm.types.media_rules import Modality
from actorllm.types.model_files import read_object

Message: TypeAlias = Mapping[str, Any]
ContentFormat: TypeAlias = Literal["auto", "string", "openai"]

TEXT_PARTS = ("text", "input_text", "output_text")
"""The types of content parts that are text; each has it under the key 'text'."""

MEDIA_PARTS: dict[str, Modality] = {
    "image_url": "image",
    "input_image": "image",
    "image": "image",
    "image_pil": "image",
    "input_audio": "audio",
    "audio_url": "audio",
    "audio": "audio",
}
"""The types of content parts that are no text: OpenAI's, vLLM's and those of transformers."""

PLACED = "placed item"
"""The type of what stands in a conversation for an image or a recording that was taken out of it."""

ARGUMENTS_OF_CHAT = (
    "messages",
    "tools",
    "chat_template",
    "chat_template_content_format",
    "add_generation_prompt",
    "continue_final_message",
)
"""What a template gets by an argument of `chat` and not by chat_template_kwargs."""

REASONING = ("reasoning", "reasoning_content")
"""What a message calls its thought. Templates read one of the names, and get both, as in vLLM."""

NOT_OF_A_TEMPLATE = ("tokenize", "conversation", "conversations", "return_assistant_tokens_mask")


@dataclass(frozen=True, slots=True)
class Conversation:
    """A prompt that is made by rendering messages. The fields are vLLM's arguments of `LLM.chat`.

    messages: mappings with 'role' and mostly 'content', which is text or a list of parts of type 'text'. chat_template:
    a Jinja template, or the name of one of the model's; None: the model's own. chat_template_content_format: whether the
    template is given text ('string': parts are joined by newlines) or lists of parts ('openai'); 'auto' reads the
    template. add_generation_prompt: end with what opens the answer. continue_final_message: the answer goes on from the
    last message instead. tools: functions as JSON schema. chat_template_kwargs: further variables of the template.
    """

    messages: Sequence[Message]
    chat_template: str | None = None
    chat_template_content_format: ContentFormat = "auto"
    add_generation_prompt: bool = True
    continue_final_message: bool = False
    tools: Sequence[Mapping[str, Any]] | None = None
    chat_template_kwargs: Mapping[str, Any] = field(default_factory=dict)
    items: tuple[Any, ...] = ()
    """The images or recordings of its messages, in their order; in the messages there are placeholders."""
    modality: Modality | None = None
    """Of the items; None: there may be none."""

    @classmethod
    def of(
        cls, messages: Any, *, is_own: bool = False, modality: Modality | None = None, **options: Any
    ) -> Conversation:
        """A checked copy. Raises InvalidPromptError for the messages, InvalidParameterError for the options.

        is_own: no caller will change messages and tools, so that what is in them is not copied. modality: what
        the model takes beside text.
        """
        items: list[Any] = []
        if modality is not None:
            messages = _without_items(messages, modality, items)
        made = cls(
            _checked_messages(messages, is_own),
            items=tuple(items),
            modality=modality,
            **{k: v for k, v in options.items() if v is not None},
        )
        for name in ("add_generation_prompt", "continue_final_message"):
            if not isinstance(getattr(made, name), bool):
                raise InvalidParameterError(f"{name}={getattr(made, name)!r} must be True or False")
        # Options that contradict each other, and types: errors name the argument, since templates would fail far from
        # it.
        if made.add_generation_prompt and made.continue_final_message:
            raise InvalidParameterError(
                "continue_final_message=True goes on with the last message; set add_generation_prompt=False with it"
            )
        if made.chat_template_content_format not in get_args(ContentFormat):
            raise InvalidParameterError(
                f"chat_template_content_format={made.chat_template_content_format!r} must be one of "
                f"{', '.join(map(repr, get_args(ContentFormat)))}"
            )
        if made.chat_template is not None and not isinstance(made.chat_template, str):
            raise InvalidParameterError(f"chat_template={made.chat_template!r} must be a Jinja template as a string")
        if not isinstance(made.chat_template_kwargs, Mapping):
            raise InvalidParameterError(f"chat_template_kwargs={made.chat_template_kwargs!r} must be a mapping")
        # A variable of the caller's must not shadow one that rendering sets, nor an argument of the tokenizer.
        for name in made.chat_template_kwargs:
            if name in ARGUMENTS_OF_CHAT:
                raise InvalidParameterError(f"chat_template_kwargs: give {name!r} as an argument of chat()")
            if name in NOT_OF_A_TEMPLATE:
                raise InvalidParameterError(f"chat_template_kwargs: {name!r} is not a variable of a template")
        tools = made.tools
        if tools is not None and (
            isinstance(tools, str | Mapping)
            or not isinstance(tools, Sequence)
            or not all(isinstance(tool, Mapping) for tool in tools)
        ):
            raise InvalidParameterError("tools must be a list of mappings (functions as JSON schema)")
        # Copied, since the conversation is rendered later, on another thread.
        return replace(
            made,
            tools=None if tools is None else list(tools) if is_own else copy.deepcopy(list(tools)),
            chat_template_kwargs=dict(made.chat_template_kwargs),
        )

    @property
    def has_own_template(self) -> bool:
        """Whether it brings a template, and not the name of one of the model's at most."""
        return self.chat_template is not None and "{" in self.chat_template

    @property
    def num_characters(self) -> int:
        """Of the texts of its messages."""
        return sum(len(text) for message in self.messages for text in _text_parts(message))


def is_batch(messages: Any) -> bool:
    """Whether this is a list of conversations and not one conversation."""
    return (
        isinstance(messages, Sequence)
        and not isinstance(messages, str | bytes)
        and bool(messages)
        and all(isinstance(item, Sequence) and not isinstance(item, str | bytes) for item in messages)
    )


def load_template(given: object) -> str | None:
    """A chat template as `LLM(chat_template=...)` takes it: Jinja, or the path of a file of it.

    Raises InvalidParameterError for a path that cannot be read.
    """
    if given is None:
        return None
    if not isinstance(given, str | os.PathLike):
        raise InvalidParameterError(f"chat_template={given!r:.80} must be a Jinja template or the path of one")
    try:
        return Path(given).read_text()
    except (OSError, ValueError) as error:
        if isinstance(given, str) and any(mark in given for mark in "{}\n"):
            return given
        raise InvalidParameterError(
            f"chat_template={os.fspath(given)!r:.200} looks like the path of a file, and that cannot be read: {error}"
        ) from error


class ChatTemplate:
    """The chat templates of a tokenizer's folder: often one, sometimes several with names, sometimes none."""

    def __init__(self, tokenizer: Tokenizer) -> None:
        self._tokenizer = tokenizer
        self._templates = _read_templates(tokenizer.path, tokenizer.config)

    def render(self, conversation: Conversation) -> str:
        """The text of the prompt. Raises InvalidPromptError when there is no template, or when it refuses the messages."""
        from jinja2 import TemplateError, TemplateSyntaxError
        from transformers.utils.chat_template_utils import render_jinja_template

        template = self._choose(conversation)
        try:
            uses = _read_template(template)
        except TemplateSyntaxError as error:
            raise InvalidPromptError(f"the chat template is not valid Jinja (line {error.lineno}): {error}") from error
        as_parts = conversation.chat_template_content_format == "openai" or (
            conversation.chat_template_content_format == "auto" and uses.content_parts
        )
        messages = [_for_template(message, as_parts) for message in conversation.messages]
        variables = self._special_tokens(uses.variables) | dict(conversation.chat_template_kwargs)
        try:
            rendered: Any = render_jinja_template(
                conversations=[messages],
                tools=None if conversation.tools is None else [dict(tool) for tool in conversation.tools],
                chat_template=template,
                add_generation_prompt=conversation.add_generation_prompt,
                continue_final_message=conversation.continue_final_message,
                **variables,
            )
        except (TemplateError, TypeError, ValueError, KeyError, AttributeError, IndexError, ArithmeticError) as error:
            raise InvalidPromptError(
                f"the chat template cannot render these messages: {str(error) or type(error).__name__}"
            ) from error
        texts, _ = rendered
        return str(texts[0])

    def _choose(self, conversation: Conversation) -> str:
        given = conversation.chat_template
        if given is not None:
            return self._templates.get(given, given)
        if conversation.tools is not None and "tool_use" in self._templates:
            return self._templates["tool_use"]
        if "default" in self._templates:
            return self._templates["default"]
        if self._templates:
            raise InvalidPromptError(
                f"the model has several chat templates and none is the default; choose one with chat_template=: "
                f"{', '.join(map(repr, sorted(self._templates)))}"
            )
        raise InvalidPromptError(
            f"the model in {str(self._tokenizer.path)!r} has no chat template; give one with chat_template="
        )

    def _special_tokens(self, wanted: frozenset[str]) -> dict[str, str]:
        """The special tokens by name, as a template sees them."""
        named = {
            name: _content(value)
            for name, value in self._tokenizer.names.items()
            if name.endswith("_token") and isinstance(value, str | Mapping)
        }
        unknown = [name for name in SPECIAL_NAMES if name in wanted and name not in self._tokenizer.names]
        if unknown:  # only the tokenizer's class in transformers knows whether there is one
            named = _special_tokens_of_class(self._tokenizer.path) | named
        return named


@dataclass(frozen=True, slots=True)
class TemplateUses:
    """What a template reads."""

    variables: frozenset[str]
    content_parts: bool
    """It iterates over the content of a message, so it wants a list of parts."""


@lru_cache(maxsize=16)
def _read_template(template: str) -> TemplateUses:
    from jinja2 import meta, nodes
    from jinja2.ext import Extension, loopcontrols
    from jinja2.sandbox import ImmutableSandboxedEnvironment

    class Generation(Extension):
        """{% generation %} ... {% endgeneration %}, with which templates mark what the assistant said."""

        tags = {"generation"}  # noqa: RUF012 - as the base class has it

        def parse(self, parser: Any) -> Any:
            next(parser.stream)
            return parser.parse_statements(("name:endgeneration",), drop_needle=True)

    tree = ImmutableSandboxedEnvironment(extensions=[Generation, loopcontrols]).parse(template)

    def has_content(node: Any, names: set[str]) -> bool:
        """Whether an expression is the content of something, also filtered, sliced, or by a name it was given."""
        match node:
            case nodes.Getattr(attr="content") | nodes.Getitem(arg=nodes.Const(value="content")):
                return True
            case nodes.Getitem(arg=nodes.Slice()) | nodes.Filter():
                return has_content(node.node, names)
            case nodes.Name():
                return node.name in names
        return False

    names: set[str] = set()
    for assign in tree.find_all(nodes.Assign):
        if isinstance(assign.target, nodes.Name) and has_content(assign.node, names):
            names.add(assign.target.name)
    for macro in tree.find_all(nodes.Macro):
        names.update(argument.name for argument in macro.args if argument.name == "content")
    content_parts = any(has_content(loop.iter, names) for loop in tree.find_all(nodes.For))
    return TemplateUses(frozenset(meta.find_undeclared_variables(tree)), content_parts)


@lru_cache(maxsize=4)
def _special_tokens_of_class(path: Path) -> dict[str, str]:
    from transformers import AutoTokenizer

    try:
        made = AutoTokenizer.from_pretrained(str(path), local_files_only=True, trust_remote_code=False)
    except Exception as error:  # whatever a third party's parsers of a dozen formats raise
        raise CorruptModelError(f"transformers cannot read the tokenizer in {str(path)!r}: {error}") from error
    return {name: token for name, token in made.special_tokens_map.items() if isinstance(token, str)}


def _read_templates(path: Path, config: Mapping[str, Any]) -> dict[str, str]:
    """Templates by name, where transformers looks for them: if there are files, they alone count."""
    found: dict[str, str] = {}
    files: dict[str, str] = {}
    stored = config.get("chat_template")
    if isinstance(stored, str):
        found["default"] = stored
    elif isinstance(stored, list):
        for item in stored:
            if not isinstance(item, dict) or not all(isinstance(item.get(key), str) for key in ("name", "template")):
                raise CorruptModelError(f"{path}/tokenizer_config.json: chat_template holds {item!r:.80}")
            found[item["name"]] = item["template"]
    elif stored is not None:
        raise CorruptModelError(f"{path}/tokenizer_config.json: chat_template is {type(stored).__name__}")
    legacy = path / "chat_template.json"
    try:
        if not found and legacy.is_file():
            found["default"] = str(orjson.loads(legacy.read_bytes())["chat_template"])
        if (path / "chat_template.jinja").is_file():
            files["default"] = (path / "chat_template.jinja").read_text()
        for file in sorted((path / "additional_chat_templates").glob("*.jinja")):
            files[file.stem] = file.read_text()
    except (OSError, ValueError, KeyError, TypeError) as error:
        raise CorruptModelError(f"a chat template in {str(path)!r} cannot be read: {error}") from error
    return files or found


def chat_templates(folder: str | os.PathLike[str]) -> list[str]:
    """The texts of a model's chat templates; none where they cannot be read, which the renderer of one is told."""
    try:
        config = read_object(Path(folder) / "tokenizer_config.json", is_optional=True)
        return list(_read_templates(Path(folder), config).values())
    except CorruptModelError:
        return []


def _content(token: Any) -> str:
    return str(token["content"] if isinstance(token, Mapping) else token)


def _checked_messages(messages: Any, is_own: bool) -> list[dict[str, Any]]:
    if isinstance(messages, str | bytes | Mapping) or not isinstance(messages, Sequence):
        raise InvalidPromptError(
            f"messages must be a list of mappings with 'role' and 'content', not {type(messages).__name__}"
        )
    if not messages:
        raise InvalidPromptError("the conversation has no messages")
    checked = []
    for message in messages:
        if not isinstance(message, Mapping):
            raise InvalidPromptError(f"a message must be a mapping with 'role' and 'content', not {shown(message)}")
        if not isinstance(message.get("role"), str):
            near = nearest_name(str(next(iter(message), "")), ("role",))
            raise InvalidPromptError(f"a message needs a 'role'; this one has {shown(list(message))}{near}")
        list(_text_parts(message))
        checked.append(dict(message) if is_own else copy.deepcopy(dict(message)))
    return checked


def _without_items(messages: Any, modality: Modality, items: list[Any]) -> Any:
    """The messages with placeholders for what is no text, which is added to `items`. What is no list of messages stays."""
    if isinstance(messages, str | bytes | Mapping) or not isinstance(messages, Sequence):
        return messages
    return [_one_without_items(message, modality, items) for message in messages]


def _one_without_items(message: Any, modality: Modality, items: list[Any]) -> Any:
    content = message.get("content") if isinstance(message, Mapping) else None
    parts = [content] if isinstance(content, Mapping) else content
    if not isinstance(parts, list | tuple):
        return message
    return {**message, "content": [_placed(part, modality, items) for part in parts]}


def _placed(part: Any, modality: Modality, items: list[Any]) -> Any:
    kind = part.get("type") if isinstance(part, Mapping) else None
    if kind == PLACED:
        raise InvalidPromptError(f"content parts of type {shown(kind)} are not supported")
    if kind is None or kind in TEXT_PARTS:
        return part
    if MEDIA_PARTS.get(str(kind)) != modality:
        frames = "; send frames of a video as images" if "video" in str(kind) and modality == "image" else ""
        raise InvalidPromptError(
            f"content parts of type {shown(kind)} are not supported: this engine takes text and {modality}{frames}"
        )
    names = (str(kind), *(name for name, of in MEDIA_PARTS.items() if of == modality), "url")
    found = next((part[name] for name in names if part.get(name) is not None), None)
    if isinstance(found, Mapping) and found.get("url") is not None:
        found = found["url"]
    if found is None:
        raise InvalidPromptError(
            f"a content part of type {shown(kind)} needs its {modality}; this one has {shown(list(part))}"
        )
    items.append(found)
    return {"type": PLACED, "modality": modality}


def _text_parts(message: Message) -> Iterator[str]:
    """The texts of a message's content. Raises InvalidPromptError for what is no text."""
    content = message.get("content")
    if content is None:
        return
    parts = [content] if isinstance(content, str | Mapping) else content
    if isinstance(parts, bytes) or not isinstance(parts, Sequence):
        raise InvalidPromptError(f"the content of a message must be text or a list of parts, not {shown(content)}")
    for part in parts:
        if isinstance(part, str):
            yield part
            continue
        kind = part.get("type") if isinstance(part, Mapping) else type(part).__name__
        if kind == PLACED and len(part) == 2:
            continue
        if kind not in TEXT_PARTS:
            raise InvalidPromptError(
                f"content parts of type {shown(kind)} are not supported: this engine takes text only"
            )
        if not isinstance(part.get("text"), str):
            raise InvalidPromptError(f"a content part of type {shown(kind)} needs its text under 'text': {shown(part)}")
        yield part["text"]


def _for_template(message: Message, as_parts: bool) -> dict[str, Any]:
    content: Any = list(_parts(message))
    if not as_parts:
        if any(part["type"] != "text" for part in content):
            raise InvalidPromptError(
                "the chat template takes text only; give one with chat_template= that places images or audio"
            )
        content = "\n".join(part["text"] for part in content)
    made = {**message, "content": content}
    if message["role"] == "assistant" and isinstance(message.get("tool_calls"), Sequence):
        made["tool_calls"] = [_parsed_call(call) for call in message["tool_calls"]]
    if any(message.get(name) is not None for name in REASONING):
        made |= dict.fromkeys(REASONING, next(message[name] for name in REASONING if message.get(name) is not None))
    return {key: value for key, value in made.items() if value is not None}


def _parts(message: Message) -> Iterator[dict[str, str]]:
    """The content of a message as templates get it in parts."""
    content = message.get("content")
    for part in content if isinstance(content, list | tuple) else [content]:
        if isinstance(part, Mapping) and part.get("type") == PLACED:
            yield {"type": part["modality"]}
        else:
            yield from ({"type": "text", "text": text} for text in _text_parts({"content": part}))


def _parsed_call(call: Any) -> Any:
    """Templates want the arguments of a tool call as an object; the OpenAI format has them as JSON text."""
    function = call.get("function") if isinstance(call, Mapping) else None
    if not isinstance(function, Mapping) or not isinstance(function.get("arguments"), str):
        return call
    try:
        arguments = orjson.loads(function["arguments"] or "{}")
    except orjson.JSONDecodeError as error:
        raise InvalidPromptError(f"the arguments of a tool call are not JSON: {function['arguments']!r:.80}") from error
    return {**call, "function": {**function, "arguments": arguments}}
