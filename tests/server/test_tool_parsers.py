"""Tool calls in text: every parser, whole and in pieces of every size, and what it does with what is none."""

from __future__ import annotations

import ast
import json
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from actorllm.errors import ConfigError
from actorllm.server.tool_parsers import (
    PARSERS,
    Arguments,
    HermesParser,
    LlamaJsonParser,
    MistralNamedParser,
    MistralParser,
    Piece,
    PythonicParser,
    Text,
    Tool,
    ToolCallStart,
    ToolParser,
    parser_named,
)
from actorllm.text.grammar import GrammarCompiler
from actorllm.text.tokenizer import Tokenizer

NAMES = ("weather", "other", "f", "g")
ARGUMENTS = '{"city": "Sankt \\"P\\u00f6lten\\" } ]", "days": [1, {"a": null}], "x": {}}'


def read(parser: type[ToolParser], text: str, size: int) -> tuple[str, list[tuple[str, str]]]:
    """The text and the calls of an answer that comes in parts of so many characters."""
    one = parser(NAMES)
    pieces: list[Piece] = []
    for at in range(0, len(text), size):
        pieces += one.push(text[at : at + size])
    pieces += one.finish()
    told = "".join(piece.text for piece in pieces if isinstance(piece, Text))
    calls: list[list[str]] = []
    for piece in pieces:
        match piece:
            case ToolCallStart(number, name):
                assert number == len(calls)
                calls.append([name, ""])
            case Arguments(number, part):
                assert number == len(calls) - 1, "arguments come behind their name"
                calls[number][1] += part
    assert one.num_calls == len(calls)
    return told, [(name, arguments) for name, arguments in calls]


HERMES = '<tool_call>\n{"name": "weather", "arguments": ' + ARGUMENTS + "}\n</tool_call>"
LLAMA = '{"name": "weather", "parameters": ' + ARGUMENTS + "}"
WEATHER = ("weather", ARGUMENTS)
CASES: list[tuple[type[ToolParser], str, str, list[tuple[str, str]]]] = [
    (HermesParser, "Just text < and <tool", "Just text < and <tool", []),
    (HermesParser, "Let me see.\n" + HERMES, "Let me see.\n", [WEATHER]),
    (HermesParser, HERMES + "\n" + HERMES.replace("weather", "other"), "", [WEATHER, ("other", ARGUMENTS)]),
    (HermesParser, HERMES + " and so on", " and so on", [WEATHER]),
    (HermesParser, '<tool_call>{"arguments":{"a":1},"name":"f"}</tool_call>', "", [("f", '{"a":1}')]),
    (HermesParser, '<tool_call>{"name":"f"}</tool_call>', "", [("f", "{}")]),
    (HermesParser, '<tool_call>{"name":"f","arguments":}</tool_call>', "", [("f", "{}")]),
    (HermesParser, '<tool_call>{"name":"nobody","arguments":{},"name":"f"}</tool_call>', "", [("nobody", "{}")]),
    (HermesParser, '<tool_call>{"name": "f", "arguments": {"a": [1, ', "", [("f", '{"a": [1, ')]),
    (HermesParser, '<tool_call>{"name": "f", "arguments": {}} and on', " and on", [("f", "{}")]),
    (HermesParser, '<tool_call>{"name":"f","oops":1}</tool_call>', '<tool_call>{"name":"f","oops":1}</tool_call>', []),
    (HermesParser, "<tool_call>not JSON</tool_call>", "<tool_call>not JSON</tool_call>", []),
    (HermesParser, '<tool_call>{"answer": 3}</tool_call>', '<tool_call>{"answer": 3}</tool_call>', []),
    (HermesParser, '<tool_call>{"name": 3}</tool_call>', '<tool_call>{"name": 3}</tool_call>', []),
    (HermesParser, '<tool_call>{"na', '<tool_call>{"na', []),
    (LlamaJsonParser, LLAMA, "", [WEATHER]),
    (LlamaJsonParser, "<|python_tag|>" + LLAMA, "", [WEATHER]),
    (LlamaJsonParser, LLAMA + "; " + LLAMA, "", [WEATHER, WEATHER]),
    (LlamaJsonParser, '{"type": "function", "name": "f", "parameters": {}}', "", [("f", "{}")]),
    (LlamaJsonParser, '{"parameters": {"a": 1}, "name": "f"}', "", [("f", '{"a": 1}')]),
    (LlamaJsonParser, LLAMA[:-1] + ', "oops": {"name": 3}} so', " so", [WEATHER]),
    (LlamaJsonParser, '<|python_tag|>{"name": "nobody", "parameters": {}}', "", [("nobody", "{}")]),
    (LlamaJsonParser, ' {"city": "x"} is JSON', ' {"city": "x"} is JSON', []),
    (LlamaJsonParser, '<|python_tag|>{"city": "x"}', '<|python_tag|>{"city": "x"}', []),
    (LlamaJsonParser, "<|python_tag|><|python_tag|>", "<|python_tag|><|python_tag|>", []),
    (LlamaJsonParser, '{"name": "Bob", "age": 3}', '{"name": "Bob", "age": 3}', []),
    (LlamaJsonParser, '{"name": "Bob", "parameters": {}}', '{"name": "Bob", "parameters": {}}', []),
    (LlamaJsonParser, '{"parameters": {"a": 1}, "name": "Bob"}', '{"parameters": {"a": 1}, "name": "Bob"}', []),
    (LlamaJsonParser, '{"name": "weather", "age": 3}', '{"name": "weather", "age": 3}', []),
    (LlamaJsonParser, '{"name": "weather"}', '{"name": "weather"}', []),
    (LlamaJsonParser, '{"name": "f", "parameters": "none"}', '{"name": "f", "parameters": "none"}', []),
    (LlamaJsonParser, '{"name": "weather", "para', '{"name": "weather", "para', []),
    (LlamaJsonParser, LLAMA + '; {"name": "Bob", "age": 3}', '; {"name": "Bob", "age": 3}', [WEATHER]),
    (LlamaJsonParser, ' Text with { and "name"', ' Text with { and "name"', []),
    (LlamaJsonParser, "Text first <|python_tag|>" + LLAMA, "Text first ", [WEATHER]),
    (LlamaJsonParser, "<|pyth", "<|pyth", []),
    (MistralParser, '[TOOL_CALLS] [{"name": "weather", "arguments": ' + ARGUMENTS + "}]", "", [WEATHER]),
    (
        MistralParser,
        '[TOOL_CALLS][{"name": "f", "arguments": {}}, {"name": "g", "arguments": {"a": 1}}]',
        "",
        [("f", "{}"), ("g", '{"a": 1}')],
    ),
    (MistralParser, "Well. [TOOL_CALLS]weather[ARGS]" + ARGUMENTS, "Well. ", [WEATHER]),
    (MistralParser, '[TOOL_CALLS]f[ARGS]{"a": 1}[TOOL_CALLS]g{}', "", [("f", '{"a": 1}'), ("g", "{}")]),
    (MistralParser, "[TOOL_CALLS]f[CALL_ID]123456789[ARGS]{}", "", [("f", "{}")]),
    (MistralParser, "[TOOL_CALLS] [3]", "[TOOL_CALLS] [3]", []),
    (MistralParser, "[TOOL_CALLS][]", "[TOOL_CALLS][]", []),
    (MistralParser, '[TOOL_CALLS][{"name": "f", "arguments": {}}, {"a": 3}]', '{"a": 3}]', [("f", "{}")]),
    (MistralParser, '[TOOL_CALLS][{"name": "f", "arguments": {}}, {"na', '{"na', [("f", "{}")]),
    (
        PythonicParser,
        '[weather(city="x", days=[1, -2]), g()]',
        "",
        [("weather", '{"city": "x", "days": [1, -2]}'), ("g", "{}")],
    ),
    (PythonicParser, "[f(a={'b': (None, true)})]", "", [("f", '{"a": {"b": [null, true]}}')]),
    (PythonicParser, "[1] is a footnote", "[1] is a footnote", []),
    (PythonicParser, "[__import__('os').system('x')]", "[__import__('os').system('x')]", []),
    (PythonicParser, "[f(a=1)] and so on", " and so on", [("f", '{"a": 1}')]),
    (PythonicParser, "[f(a=']) (', b=\"'\")]", "", [("f", json.dumps({"a": "]) (", "b": "'"}))]),
    (PythonicParser, "[f(a='''it's''')]", "", [("f", json.dumps({"a": "it's"}))]),
    (PythonicParser, "[f(a=[1, 2", "[f(a=[1, 2", []),
    (PythonicParser, "[Point(x=1)]", "[Point(x=1)]", []),
    (PythonicParser, "[f(a=1), Point(x=1)]", "[f(a=1), Point(x=1)]", []),
    (PythonicParser, "[f] is a footnote", "[f] is a footnote", []),
    (PythonicParser, '["f", "g"]', '["f", "g"]', []),
    (PythonicParser, "[]", "[]", []),
    (PythonicParser, "Text", "Text", []),
    (PythonicParser, '[{"name": "Bob", "age": 3}]', '[{"name": "Bob", "age": 3}]', []),
    (PythonicParser, "[" + LLAMA + ', {"name": "Bob"}] so', '{"name": "Bob"}] so', [WEATHER]),
    (PythonicParser, "[" + LLAMA + ', {"na', '{"na', [WEATHER]),
    (PythonicParser, "[" + LLAMA + ", " + LLAMA + "]", "", [WEATHER, WEATHER]),
]


@pytest.mark.parametrize(("parser", "text", "told", "calls"), CASES, ids=[case[1][:40] for case in CASES])
def test_calls_are_found_whatever_the_pieces_are(
    parser: type[ToolParser], text: str, told: str, calls: list[tuple[str, str]]
) -> None:
    for size in (len(text), 1, 2, 3, 7):
        got, found = read(parser, text, size)
        assert found == calls
        assert got.strip() == told.strip()
        if not calls:
            assert got == told


FRAGMENTS = [
    *("<tool_call>", "</tool_call>", "[TOOL_CALLS]", "[ARGS]", "<|python_tag|>"),
    *("{", "}", "[", "]", "(", ")", ", ", ": ", "; ", " ", "\n", "word", "'", '"', "\\", "f", "g", "a=1", "f(a=1)"),
    *('"name"', '"f"', '"Bob"', '"arguments"', '"parameters"', '{"name": "Bob", "age": 3}'),
    *('{"name": "f", "arguments": {"a": 1}}', '{"name": "f", "parameters": {}}'),
]


@given(
    st.sampled_from(sorted({*PARSERS.values()}, key=lambda parser: parser.__name__)),
    st.lists(st.sampled_from(FRAGMENTS), max_size=9).map("".join),
    st.integers(1, 9),
)
@settings(deadline=None)
def test_a_stream_tells_what_the_whole_answer_tells(parser: type[ToolParser], text: str, size: int) -> None:
    told, calls = read(parser, text, len(text) or 1)
    got, found = read(parser, text, size)
    assert (got.strip(), found) == (told.strip(), calls)
    if not calls:
        assert told == text


@pytest.mark.parametrize(
    ("parser", "text"),
    [
        (LlamaJsonParser, '{"name": "Bob"'),
        (LlamaJsonParser, '{"city"'),
        (PythonicParser, '["one"'),
        (PythonicParser, "[Point("),
        (PythonicParser, '[{"name": "Bob"'),
    ],
)
def test_an_answer_is_held_back_no_longer_than_it_may_be_a_call(parser: type[ToolParser], text: str) -> None:
    one = parser(NAMES)
    assert "".join(piece.text for char in text for piece in one.push(char) if isinstance(piece, Text)) == text


def test_a_long_list_of_calls_is_parsed_once(monkeypatch: pytest.MonkeyPatch) -> None:
    """Its lists end with a bracket, too."""
    parse, parsed = ast.parse, []
    monkeypatch.setattr(ast, "parse", lambda text, **options: parsed.append(text) or parse(text, **options))
    text = "[" + ", ".join(["f(a=[1])"] * 100) + "]"
    assert read(PythonicParser, text, 3) == ("", [("f", '{"a": [1]}')] * 100)
    assert parsed == [text]


def test_arguments_come_as_they_are_written() -> None:
    parser = HermesParser(NAMES)
    text = HERMES[: HERMES.index("days")]
    pieces = [piece for char in text for piece in parser.push(char)]
    assert pieces[0] == ToolCallStart(0, "weather")
    assert len(pieces) > 10, "nothing of them is held back"
    assert (
        "".join(piece.text for piece in pieces[1:] if isinstance(piece, Arguments))
        == ARGUMENTS[: ARGUMENTS.index("days")]
    )


SCHEMA = {"type": "object", "properties": {"a": {"type": "integer"}}, "required": ["a"], "additionalProperties": False}


@pytest.mark.parametrize(
    "parser", [*dict.fromkeys([*PARSERS.values(), MistralNamedParser])], ids=lambda parser: parser.__name__
)
@pytest.mark.parametrize("is_single", [True, False])
def test_what_is_demanded_can_be_read(storyteller: Tokenizer, parser: type[ToolParser], is_single: bool) -> None:
    """What the grammar of a demand lets through, the parser of the same model finds."""
    tag = parser.tag([Tool("f", SCHEMA), Tool('"odd"', {"type": "object"})], is_single=is_single)
    compiler = GrammarCompiler(storyteller, 4096, [0])
    grammar = {"kind": "structural_tag", "text": json.dumps({"format": tag})}
    call: Any = {
        HermesParser: '<tool_call>\n{"name": "f", "arguments": {"a": 1}}\n</tool_call>',
        LlamaJsonParser: '{"name": "f", "parameters": {"a": 1}}',
        PythonicParser: '[{"name": "f", "parameters": {"a": 1}}]',
        MistralParser: '[TOOL_CALLS] [{"name": "f", "arguments": {"a": 1}}]',
        MistralNamedParser: '[TOOL_CALLS]f[ARGS]{"a": 1}',
    }[parser]
    matcher = compiler.compile(grammar)
    matcher.push(storyteller.encode(call, add_special_tokens=False).tolist())
    _, is_last = compiler.masks([matcher])
    is_list = parser in (PythonicParser, MistralParser)
    assert (matcher.is_over or is_last[0]) == (is_single or is_list)
    assert read(parser, call, 5) == ("", [("f", '{"a": 1}')])


@pytest.fixture(scope="module")
def storyteller() -> Tokenizer:
    from actorllm.config import BUNDLED_MODELS

    return Tokenizer(BUNDLED_MODELS["storyteller"])


def test_the_parser_is_that_of_the_template() -> None:
    assert parser_named(None, []) is HermesParser
    assert parser_named(None, ["... <tool_call> ..."]) is HermesParser
    assert parser_named(None, ["[AVAILABLE_TOOLS] [TOOL_CALLS]"]) is MistralParser
    assert parser_named(None, ["[TOOL_CALLS]name[ARGS]"]) is MistralNamedParser
    assert parser_named(None, ["<|python_tag|>"]) is LlamaJsonParser
    assert parser_named("pythonic", ["<tool_call>"]) is PythonicParser
    with pytest.raises(ConfigError, match="tool_call_parser='hermess' is not known; did you mean 'hermes'"):
        parser_named("hermess", [])
