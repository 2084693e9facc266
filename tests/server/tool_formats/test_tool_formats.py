"""Formats of tool calls: what models write, whole and in pieces, what is none, and how much of it is held back."""

from __future__ import annotations

import json
import re
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from actorllm.config import BUNDLED_MODELS
from actorllm.errors import ConfigError
from actorllm.server.tool_formats import FORMATS
from actorllm.server.tool_formats.tagged import kinds_of, value_of
from actorllm.server.tool_parsers import (
    MAX_HELD,
    PARSERS,
    Arguments,
    HermesParser,
    Piece,
    PythonicParser,
    Text,
    Tool,
    ToolCallStart,
    ToolParser,
    parser_named,
)
from actorllm.text.grammar import GrammarCompiler
from actorllm.text.reasoning.parsers import Thought
from actorllm.text.tokenizer import Tokenizer
from tests.effort import examples
from tests.server.tool_formats.vllm_calls import TOOLS as VLLM_TOOLS

SCHEMA: dict[str, Any] = {
    "type": "object",
    "properties": {
        "city": {"type": "string"},
        "days": {"type": "integer"},
        "tags": {"type": "array"},
        "note": {"anyOf": [{"type": "string"}, {"type": "null"}]},
    },
}
TOOLS = {"weather": SCHEMA, "g": {"type": "object"}}

Read = tuple[str, str, list[tuple[str, str, str | None]]]


def read(parser: type[ToolParser], text: str, sizes: list[int], tools: Mapping[str, Any] = TOOLS) -> Read:
    """The thought, the text and the calls of an answer that comes in parts of these sizes in turn."""
    one = parser(tools)
    pieces: list[Piece] = []
    at = number = 0
    while at < len(text):
        size = sizes[number % len(sizes)]
        pieces += one.push(text[at : at + size])
        at, number = at + size, number + 1
    pieces += one.finish()
    calls: list[tuple[str, str, str | None]] = []
    for piece in pieces:
        match piece:
            case ToolCallStart(index, name, id):
                assert index == len(calls)
                calls.append((name, "", id))
            case Arguments(index, part):
                assert index == len(calls) - 1, "arguments come behind their name"
                calls[index] = (calls[index][0], calls[index][1] + part, calls[index][2])
    assert one.num_calls == len(calls)
    thought = "".join(piece.text for piece in pieces if isinstance(piece, Thought))
    return thought, "".join(piece.text for piece in pieces if isinstance(piece, Text)), calls


PARIS = '{"city": "Paris \\"}]\\""}'
V3 = "<｜tool▁call▁begin｜>function<｜tool▁sep｜>{}\n```json\n{}\n```<｜tool▁call▁end｜>"
V32 = '<｜DSML｜parameter name="{}" string="{}">{}</｜DSML｜parameter>\n'
CASES: list[tuple[str, str, str, list[tuple[str, str]]]] = [
    (
        "qwen3_coder",
        "So.\n<tool_call>\n<function=weather>\n<parameter=city>\nnew\n\nYork </p>\n</parameter>\n<parameter=days>\n3\n"
        "</parameter>\n<parameter=note>\nnull\n</parameter>\n</function>\n</tool_call>",
        "So.\n",
        [("weather", '{"city": "new\\n\\nYork </p>", "days": 3, "note": null}')],
    ),
    ("qwen3_xml", "<tool_call>\n<function=g>\n</function>\n</tool_call> and", " and", [("g", "{}")]),
    ("qwen3_coder", "<function=g>\n<parameter=a>1</parameter>\n</function>", "", [("g", '{"a": "1"}')]),
    ("qwen3_coder", "<tool_call>\n<function=weather>\n<parameter=city>\nPar", "", [("weather", '{"city": "Par')]),
    ("qwen3_coder", "<tool_call>\n<function=g></tool_call> so", " so", [("g", "{}")]),
    ("qwen3_coder", "<tool_call> of nature", "<tool_call> of nature", []),
    ("qwen3_coder", "<tool_call>\n<functio", "<tool_call>\n<functio", []),
    ("qwen3_coder", "<function=a\nb>", "<function=a\nb>", []),
    (
        "qwen3_coder",
        '<tool_call>\n<function=weather>\n{"city": "a</function>"}\n</function>\n</tool_call>',
        "",
        [("weather", '{"city": "a</function>"}')],
    ),
    (
        "seed_oss",
        "<seed:tool_call>\n<function=weather>\n<parameter=tags>['a', True]</parameter>\n</function>\n</seed:tool_call>",
        "",
        [("weather", '{"tags": ["a", true]}')],
    ),
    (
        "minimax_m2",
        '<minimax:tool_call>\n<invoke name="weather">\n<parameter name="city">x</parameter>\n</invoke>\n'
        '<invoke name="g">\n</invoke>\n</minimax:tool_call>',
        "",
        [("weather", '{"city": "x"}'), ("g", "{}")],
    ),
    (
        "glm45",
        "Well.<tool_call>weather\n<arg_key>city</arg_key>\n<arg_value> a\n</arg_value>\n<arg_key>days</arg_key>\n"
        "<arg_value>many</arg_value>\n</tool_call>\n<tool_call>g\n</tool_call>",
        "Well.",
        [("weather", '{"city": " a\\n", "days": "many"}'), ("g", "{}")],
    ),
    ("glm47", "<tool_call>g</tool_call>", "", [("g", "{}")]),
    ("glm45", '<tool_call>{"name": 1}', '<tool_call>{"name": 1}', []),
    (
        "deepseek_v32",
        'Ok.<｜DSML｜function_calls>\n<｜DSML｜invoke name="weather">\n'
        + V32.format("city", "true", "5")
        + V32.format("days", "false", "5")
        + "</｜DSML｜invoke>\n</｜DSML｜function_calls>",
        "Ok.",
        [("weather", '{"city": "5", "days": 5}')],
    ),
    (
        "deepseek_v3",
        "<｜tool▁calls▁begin｜>" + V3.format("weather", PARIS) + "\n" + V3.format("g", "{}") + "<｜tool▁calls▁end｜>",
        "",
        [("weather", PARIS), ("g", "{}")],
    ),
    ("deepseek_v3", "<｜tool▁calls▁begin｜>" + V3.format("", "{}"), "<｜tool▁calls▁begin｜>" + V3.format("", "{}"), []),
    (
        "deepseek_v31",
        "a <｜tool▁calls▁begin｜><｜tool▁call▁begin｜>weather<｜tool▁sep｜>"
        + PARIS
        + "<｜tool▁call▁end｜><｜tool▁calls▁end｜> b",
        "a  b",
        [("weather", PARIS)],
    ),
    (
        "deepseek_v31",
        "<｜tool▁calls▁begin｜><｜tool▁call▁begin｜>g<｜tool▁sep｜><｜tool▁call▁end｜><｜tool▁calls▁end｜>",
        "",
        [("g", "{}")],
    ),
    ("deepseek_v31", "<｜tool▁calls▁begin｜> what", "<｜tool▁calls▁begin｜> what", []),
    (
        "granite",
        'Now <|tool_call|> [{"name": "weather", "arguments": ' + PARIS + "}] <tool_call>[",
        "Now <tool_call>[",
        [("weather", PARIS)],
    ),
    ("granite", '<tool_call>[{"name": "g", "arguments": {}}]', "", [("g", "{}")]),
    ("granite", "<tool_call>[3]", "<tool_call>[3]", []),
    ("granite4", '<tool_call>{"name": "g", "arguments": {}}</tool_call>', "", [("g", "{}")]),
    (
        "internlm",
        'I look.<|action_start|><|plugin|>\n{"name": "weather", "parameters": ' + PARIS + "}<|action_end|>\n",
        "I look.",
        [("weather", PARIS)],
    ),
    (
        "jamba",
        '<tool_calls>[\n  {"name": "weather", "arguments": '
        + PARIS
        + '},\n {"name": "g", "arguments": {}}]</tool_calls>',
        "",
        [("weather", PARIS), ("g", "{}")],
    ),
    ("hunyuan_a13b", '<tool_calls>[{"name": "g", "arguments": {}}]\n</tool_ca', "", [("g", "{}")]),
    ("jamba", '<tool_calls>[{"name": "g", "arguments": {}}] so', " so", [("g", "{}")]),
    ("phi4_mini_json", 'functools[{"name": "weather", "arguments": ' + PARIS + "}]", "", [("weather", PARIS)]),
    ("phi4_mini_json", "functools is a module, functools[0] is not", "functools is a module, functools[0] is not", []),
    ("openai", "plain <|channel|>", "plain <|channel|>", []),
    ("openai", "<|channel|>final<|message|>Hello.<|return|>", "Hello.", []),
    ("openai", " to=functions.g<|channel|>commentary json<|message|><|call|>", "", [("g", "{}")]),
]


@pytest.mark.parametrize(
    ("name", "text", "told", "calls"), CASES, ids=[f"{case[0]} {case[1][:30]!a}" for case in CASES]
)
def test_calls_are_found_whatever_the_pieces_are(name: str, text: str, told: str, calls: list[tuple[str, str]]) -> None:
    parser = parser_named(name, [])
    for size in (len(text), 1, 2, 3, 7):
        _, got, found = read(parser, text, [size])
        assert [call[:2] for call in found] == calls
        assert got.rstrip() == told.rstrip()
        if not calls:
            assert got == told


ANSWERS = json.loads(Path(__file__).with_name("vllm_calls.json").read_text())["cases"]


@pytest.mark.parametrize("case", ANSWERS, ids=[f"{case['parser']} {number}" for number, case in enumerate(ANSWERS)])
def test_calls_are_those_that_vllm_finds(case: dict[str, Any]) -> None:
    """Its answers are kept (vllm_calls.py). Space around text is left aside, and of arguments their value counts."""
    for size in (len(case["text"]), 2):
        _, text, calls = read(parser_named(case["parser"], []), case["text"], [size], VLLM_TOOLS)
        assert text.strip() == (case["content"] or "").strip()
        assert [(name, json.loads(arguments)) for name, arguments, _ in calls] == [
            (name, json.loads(arguments)) for name, arguments in case["calls"]
        ]
        assert calls


def test_kimi_calls_keep_the_id_of_the_model() -> None:
    call = "<|tool_call_begin|>functions.weather:{0}<|tool_call_argument_begin|>{1}<|tool_call_end|>"
    text = "<|tool_calls_section_begin|>" + call.format(0, PARIS) + call.format(1, "{}") + "<|tool_calls_section_end|>"
    calls = [("weather", PARIS, "functions.weather:0"), ("weather", "{}", "functions.weather:1")]
    for size in (len(text), 1, 5):
        assert read(parser_named("kimi_k2", []), text, [size]) == ("", "", calls)


def test_harmony_has_thoughts_text_and_calls() -> None:
    text = (
        "<|channel|>analysis<|message|>Hm < 3.<|end|><|start|>assistant<|channel|>commentary<|message|>I look.<|end|>"
        "<|start|>assistant<|channel|>commentary to=functions.weather <|constrain|>json<|message|>" + PARIS + "<|call|>"
        "<|start|>assistant<|channel|>final<|message|>Done"
    )
    for size in (len(text), 1, 4):
        told = read(parser_named("openai", []), text, [size])
        assert told == ("Hm < 3.", "I look.Done", [("weather", PARIS, None)])


WORDS = (
    *(
        "g",
        "weather",
        "days",
        "note",
        "city",
        "null",
        "3",
        "tags",
        "word",
        "é",
        "`",
        "```",
        "function",
        "functions.g:0",
    ),
    *(
        "[",
        "]",
        "{",
        "}",
        '{"a": 1}',
        '[{"name": "g", "arguments": {}}]',
        '"',
        "\\",
        "\n",
        " ",
        "<",
        "</",
        '" string="true',
    ),
)
HARMONY = (
    "<|channel|>",
    "<|message|>",
    "<|start|>",
    "<|end|>",
    "<|call|>",
    "final",
    "analysis",
    " to=functions.g",
    "assistant",
)


def marks_of(parser: type[ToolParser]) -> list[str]:
    """What its format is made of."""
    found = {
        value
        for one in parser.__mro__
        for name, value in vars(one).items()
        if name.isupper() and isinstance(value, str)
    }
    return sorted(found - {""}) or list(HARMONY)


@st.composite
def answers(draw: st.DrawFn) -> tuple[str, str]:
    """A format, and a text of its marks and of words."""
    name = draw(st.sampled_from(sorted({*FORMATS} - {"qwen3_xml", "glm47", "hunyuan_a13b"})))
    marks = marks_of(parser_named(name, []))
    return name, "".join(draw(st.lists(st.sampled_from(marks) | st.sampled_from(WORDS), max_size=16)))


@given(answers(), st.lists(st.integers(1, 9), min_size=1))
@settings(deadline=None, max_examples=examples(67, 200))
def test_a_stream_tells_what_the_whole_answer_tells(answer: tuple[str, str], sizes: list[int]) -> None:
    name, text = answer
    parser = parser_named(name, [])
    whole = read(parser, text, [len(text) or 1])
    assert read(parser, text, sizes) == whole
    is_empty = re.search(re.escape(parser.MARKER) + r"\s*" + re.escape(getattr(parser, "END", "") or "$"), text)
    if not whole[2] and name != "openai" and not is_empty:
        assert whole[1] == text


@pytest.mark.parametrize(
    "name", sorted({*PARSERS, *FORMATS} - {"qwen3_json", "qwen3_xml", "glm47", "hunyuan_a13b", "granite4"})
)
def test_what_is_held_back_is_bounded(name: str) -> None:
    """What a model begins and never ends comes out when it is too long to be held back."""
    parser = parser_named(name, [])
    marker = parser.MARKER or {"openai": "<|channel|>"}.get(name, "[f(a='")
    begins = ("", " ", '{"name": "', "<function=g>\n<parameter=tags>[", "[")
    for begin, filler in [*((marker + begin, "a ") for begin in begins), (marker + "[", "  ")]:
        text = begin + filler * 2 * MAX_HELD
        one = parser({"f": {}, **TOOLS})
        num_told = 0
        for at in range(0, len(text), 997):
            num_told += sum(len(piece.text) for piece in one.push(text[at : at + 997]) if isinstance(piece, Text))
            assert len(getattr(one, "_buffer", "")) <= MAX_HELD
        assert num_told > 0 or one.num_calls or name == "openai"
        assert read(parser, text, [len(text)]) == read(parser, text, [9973, 3])


def test_a_value_that_is_too_long_goes_on_as_a_string() -> None:
    text = "<tool_call><function=weather><parameter=tags>[" + "1," * MAX_HELD + "]</parameter></function></tool_call>"
    _, _, [(_, arguments, _)] = read(parser_named("qwen3_coder", []), text, [1000])
    assert json.loads(arguments)["tags"].startswith("[1,1,")


def test_a_list_of_calls_that_is_too_long_is_text() -> None:
    text = "[f(a='" + "x" * 2 * MAX_HELD + "')]"
    one = PythonicParser({"f": {}})
    pieces = [*one.push(text), *one.finish()]
    assert "".join(piece.text for piece in pieces if isinstance(piece, Text)) == text


@pytest.mark.parametrize("name", sorted({*FORMATS.values()}))
@pytest.mark.parametrize("is_single", [True, False])
def test_what_is_demanded_can_be_read(storyteller: Tokenizer, name: str, is_single: bool) -> None:
    """What the grammar of a demand begins with and lets through, the parser of the same model finds."""
    parser = parser_named(name, [])
    tag = parser.tag([Tool("g", {"type": "object", "properties": {"a": {"type": "integer"}}})], is_single=is_single)
    compiler = GrammarCompiler(storyteller, 4096, [0])
    matcher = compiler.compile({"kind": "structural_tag", "text": json.dumps({"format": tag})})
    calls = tag["elements"][0] if tag["type"] == "or" else tag
    text = calls["tags"][0]["begin"] + '{"a": 1}' + calls["tags"][0]["end"]
    matcher.push(storyteller.encode(text, add_special_tokens=False).tolist())
    _, is_last = compiler.masks([matcher])
    assert (matcher.is_over or is_last[0]) == is_single
    for size in (len(text), 3):
        assert [call[:2] for call in read(parser, text, [size])[2]] == [("g", '{"a": 1}')]


@pytest.fixture(scope="module")
def storyteller() -> Tokenizer:
    return Tokenizer(BUNDLED_MODELS["storyteller"])


@pytest.mark.parametrize(
    ("text", "schema", "value"),
    [
        (" 3 ", {"type": "integer"}, 3),
        ("3.5", {"type": "number"}, 3.5),
        ("True", {"type": "boolean"}, True),
        ("1", {"type": "boolean"}, "1"),
        ("true", {"type": "integer"}, "true"),
        ("NaN", {"type": "number"}, "NaN"),
        ("9" * 5000, {"type": "integer"}, "9" * 5000),
        ("[" * 5000, {"type": "array"}, "[" * 5000),
        ("{'a': None}", {"type": "object"}, {"a": None}),
        ("null", {"type": ["string", "null"]}, None),
        ("3", {"enum": [1, 2, 3]}, 3),
        ("3", {"enum": ["3"]}, "3"),
        ("3", {"oneOf": [{"type": "string"}, {"const": 3}]}, 3),
        ("3", {"anyOf": 3}, "3"),
        ("3", None, "3"),
    ],
    ids=str,
)
def test_values_are_what_the_schema_says(text: str, schema: Any, value: Any) -> None:
    assert json.loads(value_of(text, kinds_of(schema))) == value


@pytest.mark.parametrize(
    ("template", "name"),
    [
        ("<tool_call>\n<function={{ name }}>", "qwen3_coder"),
        ("<tool_call>{{ name }}<arg_key>", "glm45"),
        ("<minimax:tool_call>", "minimax_m2"),
        ("<|tool_calls_section_begin|>", "kimi_k2"),
        ("<｜tool▁calls▁begin｜><｜tool▁call▁begin｜>function<｜tool▁sep｜>", "deepseek_v3"),
        ("<｜tool▁calls▁begin｜><｜tool▁call▁begin｜>' + name + '<｜tool▁sep｜>", "deepseek_v31"),
        ("assistant to=functions.", "openai"),
        ("<|action_start|><|plugin|>", "internlm"),
        ("<tool_call>\\n{'name'", "hermes"),
    ],
)
def test_the_parser_is_that_of_the_template(template: str, name: str) -> None:
    assert parser_named(None, [template]) is parser_named(name, [])


class ShoutingParser(HermesParser):
    """Of a model that shouts."""

    MARKER = "CALL!"
    END = "OVER!"


def test_a_parser_of_ones_own() -> None:
    name = f"{__name__}:ShoutingParser"
    found = parser_named(name, [])
    assert found.MARKER == "CALL!"
    assert read(found, 'CALL!{"name": "g", "arguments": {}}OVER!', [2]) == ("", "", [("g", "{}", None)])
    for wrong, match in (
        ("no_such_module:Parser", "cannot be loaded: ModuleNotFoundError"),
        (f"{__name__}:Missing", "cannot be loaded: AttributeError"),
        (f"{__name__}:Tool", "must be a subclass of ToolParser"),
        ("qwen3_code", "did you mean 'qwen3_coder'"),
    ):
        with pytest.raises(ConfigError, match=match):
            parser_named(wrong, [])
