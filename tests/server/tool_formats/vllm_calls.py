"""What vLLM's own parsers find in answers with calls or thoughts. It is a program for an environment with vLLM 0.32.

`python tests/server/tool_formats/vllm_calls.py` writes vllm_calls.json, which test_tool_formats.py holds ours against. Answers are
such as models write them.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

FILE = Path(__file__).with_suffix(".json")
CITY = {"type": "string"}
TOOLS: dict[str, Any] = {
    "weather": {
        "type": "object",
        "properties": {"city": CITY, "days": {"type": "integer"}, "hot": {"type": "boolean"}},
    },
    "now": {"type": "object", "properties": {}},
}
ARGUMENTS = '{"city": "São Paulo", "days": 3}'
JSON = '{"name": "weather", "arguments": ' + ARGUMENTS + "}"
QWEN = (
    "<function=weather>\n<parameter=city>\nSão\nPaulo\n</parameter>\n<parameter=days>\n3\n</parameter>\n</function>\n"
)
INVOKE = '<invoke name="weather">\n<parameter name="city">São Paulo</parameter>\n'
INVOKE += '<parameter name="hot">true</parameter>\n</invoke>\n'
GLM = "<arg_key>city</arg_key>\n<arg_value>São Paulo</arg_value>\n<arg_key>days</arg_key>\n<arg_value>3</arg_value>\n"
V3 = "<｜tool▁call▁begin｜>function<｜tool▁sep｜>weather\n```json\n" + ARGUMENTS + "\n```<｜tool▁call▁end｜>"
V31 = "<｜tool▁call▁begin｜>weather<｜tool▁sep｜>" + ARGUMENTS + "<｜tool▁call▁end｜>"
V32 = '<｜DSML｜parameter name="city" string="true">São Paulo</｜DSML｜parameter>\n<｜DSML｜parameter name="days" string="false">3'
KIMI = "<|tool_call_begin|>functions.weather:{}<|tool_call_argument_begin|>" + ARGUMENTS.replace("{", "{{").replace(
    "}", "}}"
)
CASES = [
    ("hermes", "<tool_call>\n" + JSON + "\n</tool_call>"),
    ("hermes", "I look.\n<tool_call>\n" + JSON + "\n</tool_call>\n<tool_call>\n" + JSON + "\n</tool_call>"),
    ("qwen3_coder", "I look.\n<tool_call>\n" + QWEN + "</tool_call>"),
    ("qwen3_xml", "<tool_call>\n" + QWEN + "</tool_call>\n<tool_call>\n<function=now>\n</function>\n</tool_call>"),
    ("seed_oss", "<seed:tool_call>\n" + QWEN.replace("\nSão\nPaulo\n", "São Paulo") + "</seed:tool_call>"),
    ("minimax_m2", "I look.<minimax:tool_call>\n" + INVOKE * 2 + "</minimax:tool_call>"),
    ("glm45", "<tool_call>weather\n" + GLM + "</tool_call>\n<tool_call>now\n</tool_call>"),
    ("deepseek_v3", "<｜tool▁calls▁begin｜>" + V3 + "\n" + V3 + "<｜tool▁calls▁end｜>"),
    ("deepseek_v31", "I look.<｜tool▁calls▁begin｜>" + V31 * 2 + "<｜tool▁calls▁end｜>"),
    (
        "deepseek_v32",
        '<｜DSML｜function_calls>\n<｜DSML｜invoke name="weather">\n'
        + V32
        + "</｜DSML｜parameter>\n</｜DSML｜invoke>\n</｜DSML｜function_calls>",
    ),
    (
        "kimi_k2",
        "<|tool_calls_section_begin|>"
        + "".join(KIMI.format(number) + "<|tool_call_end|>" for number in range(2))
        + "<|tool_calls_section_end|>",
    ),
    ("granite", "<|tool_call|>[" + JSON + "]"),
    ("granite4", "<tool_call>\n" + JSON + "\n</tool_call>"),
    ("internlm", "I look.<|action_start|><|plugin|>\n" + JSON.replace("arguments", "parameters") + "<|action_end|>\n"),
    ("jamba", "<tool_calls>[\n    " + JSON + ",\n    " + JSON + "\n]</tool_calls>"),
    ("phi4_mini_json", "functools[" + JSON + "]"),
    ("llama3_json", JSON.replace("arguments", "parameters")),
    ("pythonic", '[weather(city="São Paulo", days=3), now()]'),
]
THOUGHTS = [
    *((name, "<think>\nHm. 1 < 2\n</think>\n\nYes.") for name in ("deepseek_r1", "qwen3", "glm45", "kimi_k2")),
    *((name, "Hm.</think>Yes.") for name in ("deepseek_r1", "minimax_m2", "step3")),
    ("deepseek_r1", "Hm. And"),
    ("qwen3", "<think>Hm. And"),
    ("seed_oss", "<seed:think>Hm.</seed:think>Yes."),
    ("granite", "Here is my thought process: Hm. Here is my response: Yes."),
    ("kimi_k2", "<think>Hm.<|tool_calls_section_begin|><|tool_call_begin|>"),
]
MARKS = (
    *("<tool_call>", "</tool_call>", "<think>", "</think>", "<seed:think>", "</seed:think>", "<seed:tool_call>"),
    *(
        "</seed:tool_call>",
        "<minimax:tool_call>",
        "</minimax:tool_call>",
        "<｜tool▁calls▁begin｜>",
        "<｜tool▁call▁begin｜>",
    ),
    *(
        "<｜tool▁sep｜>",
        "<｜tool▁call▁end｜>",
        "<｜tool▁calls▁end｜>",
        "<|tool_calls_section_begin|>",
        "<|tool_call_begin|>",
    ),
    *(
        "<|tool_calls_section_end|>",
        "<|tool_call_argument_begin|>",
        "<|tool_call_end|>",
        "<|tool_call|>",
        "<tool_calls>",
    ),
    *("</tool_calls>", "<|action_start|>", "<|action_end|>", "<|plugin|>", "<arg_key>", "</arg_key>", "<arg_value>"),
    *("</arg_value>", "<|python_tag|>"),
)
"""Tokens of their own in the vocabularies of these models."""


def tokenizer() -> Any:
    """Of bytes, and of the marks."""
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers
    from transformers import PreTrainedTokenizerFast

    vocabulary = {character: number for number, character in enumerate(pre_tokenizers.ByteLevel.alphabet())}
    made = Tokenizer(models.BPE(vocab=vocabulary, merges=[]))
    made.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    made.decoder = decoders.ByteLevel()
    made.add_tokens(list(MARKS))
    return PreTrainedTokenizerFast(tokenizer_object=made)


def main() -> None:
    import vllm
    from vllm.entrypoints.openai.chat_completion.protocol import ChatCompletionRequest
    from vllm.reasoning import ReasoningParserManager
    from vllm.tool_parsers import ToolParserManager

    tools = [{"type": "function", "function": {"name": name, "parameters": TOOLS[name]}} for name in TOOLS]
    request = ChatCompletionRequest(model="m", messages=[{"role": "user", "content": "?"}], tools=tools)
    found = []
    for name, text in CASES:
        parser = ToolParserManager.get_tool_parser(name)(tokenizer(), request.tools)
        answer = parser.extract_tool_calls(text, request)
        calls = [[call.function.name, call.function.arguments] for call in answer.tool_calls]
        found.append({"parser": name, "text": text, "content": answer.content, "calls": calls})
    thoughts = []
    for name, text in THOUGHTS:
        thought, said = ReasoningParserManager.get_reasoning_parser(name)(tokenizer()).extract_reasoning(text, request)
        thoughts.append({"parser": name, "text": text, "reasoning": thought, "content": said})
    told = {"version": vllm.__version__, "cases": found, "thoughts": thoughts}
    FILE.write_text(json.dumps(told, indent=1, ensure_ascii=False) + "\n")


if __name__ == "__main__":
    main()
