"""`SamplingParams`: what they accept, and what they do to the tokens and the text of a request."""

from __future__ import annotations

import math
import shutil
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import anyio
import numpy as np
import orjson
import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st

from actorllm import AsyncLLM, CompletionOutput, RequestOutputKind, SamplingParams
from actorllm.config import BUNDLED_MODELS
from actorllm.errors import InvalidParameterError, UnknownParameterError
from actorllm.types.params import VLLM_PARAMETERS, RepetitionDetectionParams
from actorllm.types.structured_outputs import GuidedDecodingParams, StructuredOutputsParams
from tests.effort import examples

PROMPT = "Once upon a time"

# What is accepted -----------------------------------------------------------------------------------------------------


def test_defaults_are_those_of_vllm() -> None:
    params = SamplingParams()
    assert (params.temperature, params.top_p, params.top_k, params.min_p) == (1.0, 1.0, 0, 0.0)
    assert (params.max_tokens, params.min_tokens, params.seed, params.n) == (16, 0, None, 1)
    assert (params.stop, params.stop_token_ids, params.ignore_eos) == ([], [], False)
    assert (params.detokenize, params.skip_special_tokens, params.include_stop_str_in_output) == (True, True, False)
    assert params.output_kind is RequestOutputKind.CUMULATIVE
    assert (params.spaces_between_special_tokens, params.stream_interval, params.truncate_prompt_tokens) == (
        True,
        None,
        None,
    )
    assert (params.presence_penalty, params.frequency_penalty, params.repetition_penalty) == (0.0, 0.0, 1.0)
    assert (params.logit_bias, params.allowed_token_ids, params.bad_words) == (None, None, [])
    assert (params.logprobs, params.prompt_logprobs, params.skip_reading_prefix_cache) == (None, None, None)
    assert params.repetition_detection is None
    assert RepetitionDetectionParams() == RepetitionDetectionParams(0, 0, 0)


def test_numbers_of_numpy_are_numbers() -> None:
    """Sweeps over parameters make them so."""
    params = SamplingParams(
        temperature=np.float32(0.5), top_p=np.float64(0.9), top_k=np.int64(3), max_tokens=np.int32(4), seed=np.int64(1)
    )
    assert (params.temperature, params.top_p, params.top_k, params.max_tokens, params.seed) == (0.5, 0.9, 3, 4, 1)
    assert {type(params.temperature), type(params.top_k)} == {float, int}
    with pytest.raises(InvalidParameterError, match="temperature"):
        SamplingParams(temperature=np.bool_(True))


def test_guided_decoding_is_what_older_releases_call_structured_outputs() -> None:
    form = GuidedDecodingParams(choice=["a", "b"], backend="outlines")
    params = SamplingParams(guided_decoding=form)
    assert isinstance(params.structured_outputs, StructuredOutputsParams)
    assert params.structured_outputs.to_fields() == StructuredOutputsParams(choice=["a", "b"]).to_fields()
    assert SamplingParams(guided_decoding=None).structured_outputs is None
    params = SamplingParams()
    params.guided_decoding = GuidedDecodingParams('{"type": "object"}')
    checked = params.checked_copy().guided_decoding
    assert isinstance(checked, StructuredOutputsParams)
    assert checked.json == '{"type": "object"}'
    assert GuidedDecodingParams.from_optional(backend="auto") is None
    with pytest.raises(InvalidParameterError, match="guided_decoding and structured_outputs are one parameter"):
        SamplingParams(guided_decoding=form, structured_outputs={"regex": "a"})
    with pytest.raises(InvalidParameterError, match="needs exactly one of"):
        SamplingParams(guided_decoding={})


@pytest.mark.parametrize(
    ("given_as", "meant"),
    [
        ({"temperature": 0}, {"temperature": 0.0}),
        ({"top_p": 1}, {"top_p": 1.0}),
        ({"stop": "."}, {"stop": ["."]}),
        ({"stop": (".", "!")}, {"stop": [".", "!"]}),
        ({"stop_token_ids": (3, 4)}, {"stop_token_ids": [3, 4]}),
        ({"stop_token_ids": [5, 3, 5] * 2000}, {"stop_token_ids": [5, 3]}),
        ({"stop_token_ids": range(1024)}, {"stop_token_ids": list(range(1024))}),
        ({"stop": ["b", "a", "b"] * 100}, {"stop": ["b", "a"]}),
        ({"stop": ["x" * 1024]}, {"stop": ["x" * 1024]}),
        ({"seed": -1}, {"seed": None}),
        ({"seed": -2}, {"seed": 2**64 - 2}),
        ({"seed": 2**64 + 5}, {"seed": 5}),
        ({"max_tokens": None}, {"max_tokens": None}),
        ({"logprobs": True, "prompt_logprobs": True}, {"logprobs": 1, "prompt_logprobs": 1}),
        ({"logprobs": -1, "prompt_logprobs": 0}, {"logprobs": -1, "prompt_logprobs": 0}),
        ({"logit_bias": {"17": 1, 3: -2}}, {"logit_bias": {17: 1.0, 3: -2.0}}),
        ({"allowed_token_ids": (5, 3, 5)}, {"allowed_token_ids": [5, 3]}),
        ({"allowed_token_ids": range(200_000)}, {"allowed_token_ids": list(range(200_000))}),
        ({"bad_words": ("a", "b", "a")}, {"bad_words": ["a", "b"]}),
        ({"bad_words": None}, {"bad_words": []}),
        (
            {"repetition_detection": {"max_pattern_size": 4, "min_count": 3}},
            {"repetition_detection": RepetitionDetectionParams(max_pattern_size=4, min_count=3)},
        ),
    ],
)
def test_equivalent_forms(given_as: dict[str, Any], meant: dict[str, Any]) -> None:
    params = SamplingParams(**given_as)
    assert {name: getattr(params, name) for name in meant} == meant


NUMBERS_NOT = [True, "1", None, math.nan, math.inf, -math.inf, 10**400, [1.0], 1j]
INTEGERS_NOT = [True, "1", 1.0, math.nan, [1]]
BAD: dict[str, list[Any]] = {
    "temperature": [*NUMBERS_NOT, -1e-9, 2.0001, 1e39],
    "top_p": [*NUMBERS_NOT, 0, -0.5, 1.0001],
    "min_p": [*NUMBERS_NOT, -0.1, 1.1],
    "top_k": [*INTEGERS_NOT, None, -2],
    "seed": INTEGERS_NOT,
    "max_tokens": [*INTEGERS_NOT, 0, -3],
    "min_tokens": [*INTEGERS_NOT, None, -1, 17],
    "n": [*INTEGERS_NOT, None, 0, -1, 16_385],
    "best_of": [*INTEGERS_NOT, 0, 2],
    "stop": [3, ["a", 3], [None], b"a", "", ["a", ""], {"a"}],
    "stop_token_ids": ["", "12", 7, np.arange(2), [1.5], ["a"], [True], [-1], [None], [[1]], {1}],
    "ignore_eos": [1, 0, "yes", None],
    "detokenize": [1, "no", None],
    "skip_special_tokens": [0, "no", None],
    "include_stop_str_in_output": [1, None],
    "spaces_between_special_tokens": [1, None],
    "stream_interval": [*INTEGERS_NOT, 0, -1, 2**31, 2**64],
    "truncate_prompt_tokens": [*INTEGERS_NOT, 0, -2],
    "thinking_token_budget": [*INTEGERS_NOT, -1],
    "output_kind": [0, "DELTA", None],
    "presence_penalty": [*NUMBERS_NOT, -2.1, 2.1],
    "frequency_penalty": [*NUMBERS_NOT, -2.1, 2.1],
    "repetition_penalty": [*NUMBERS_NOT, 0, -1],
    "logit_bias": [3, [1], {1.5: 1}, {-1: 1}, {True: 1}, {"x": 1}, {1: math.nan}, {1: "a"}, {1: None}, np.zeros(2)],
    "allowed_token_ids": ["", "12", 7, [], (), np.arange(2), [1.5], [True], [-1], [None], {1}],
    "bad_words": ["a", 3, [3], [None], [""], ["\ud800"], [b"a"], ["x" * 2000], {"a"}],
    "logprobs": ["1", 1.0, -2, False, [1]],
    "prompt_logprobs": ["1", 1.0, -2, False, [1]],
    "logprob_token_ids": ["", 7, np.arange(2), [1.5], ["a"], [True], [-1], [None], {1}, [1] * 129],
    "flat_logprobs": [1, "no", None],
    "skip_reading_prefix_cache": [1, 0, "yes"],
    "repetition_detection": [3, "x", [1], {"max_pattern_sizes": 3}, {"max_pattern_size": 3}, {"max_pattern_size": -1}],
}


@pytest.mark.parametrize(("name", "value"), [(name, value) for name, values in BAD.items() for value in values])
def test_a_bad_value_is_named(name: str, value: Any) -> None:
    with pytest.raises(InvalidParameterError) as caught:
        SamplingParams(**{name: value})
    assert name.removesuffix("_token_ids") in str(caught.value)


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        ({"temperature": -0.5}, ["temperature=-0.5", ">= 0"]),
        ({"temperature": math.nan}, ["temperature=nan", "finite"]),
        ({"temperature": 2.5}, ["temperature=2.5", "<= 2"]),
        ({"top_p": 1.5}, ["top_p=1.5", "> 0 and <= 1"]),
        ({"top_k": 1.5}, ["top_k=1.5", "integer"]),
        ({"max_tokens": 0}, ["max_tokens=0", ">= 1"]),
        ({"max_tokens": 4, "min_tokens": 5}, ["min_tokens=5", "max_tokens=4"]),
        ({"stop": ["a", ""]}, ["empty stop string", "remove it"]),
        ({"stop": "a", "detokenize": False}, ["stop strings", "detokenize=True"]),
        ({"stop_token_ids": [3, -1]}, ["stop_token_ids=-1", ">= 0"]),
        ({"ignore_eos": "yes"}, ["ignore_eos='yes'", "True or False"]),
        ({"n": 3, "temperature": 0}, ["n=3 with temperature=0", "same text 3 times", "set n=1"]),
        ({"n": 20_000}, ["n=20000", "limit of 16384"]),
        ({"n": 2, "best_of": 3}, ["best_of=3", "must equal n=2"]),
        ({"stop": [str(i) for i in range(65)]}, ["65 strings", "limit is 64"]),
        ({"stop": "x" * 1025}, ["1025 characters", "limit is 1024"]),
        ({"stop": [c * 1024 for c in "abcde"]}, ["5120 characters together", "limit is 4096"]),
        ({"stop_token_ids": list(range(1025))}, ["1025 ids", "limit is 1024"]),
        ({"stop_token_ids": range(10**12)}, ["1000000000000 ids", "limit is 1024"]),
        ({"presence_penalty": 2.5}, ["presence_penalty=2.5", ">= -2 and <= 2"]),
        ({"frequency_penalty": -3}, ["frequency_penalty=-3", ">= -2 and <= 2"]),
        ({"repetition_penalty": 0}, ["repetition_penalty=0", "> 0"]),
        ({"repetition_penalty": math.inf}, ["repetition_penalty=inf", "finite number"]),
        ({"logprobs": -2}, ["logprobs=-2", ">= 0, or -1 for those of all tokens"]),
        ({"prompt_logprobs": "all"}, ["prompt_logprobs='all'", "integer"]),
        ({"logit_bias": {"x": 1}}, ["logit_bias", "'x' is no token id"]),
        ({"logit_bias": {7: math.inf}}, ["logit_bias[7]=inf", "finite number"]),
        ({"allowed_token_ids": []}, ["allowed_token_ids is empty", "None allows all"]),
        ({"allowed_token_ids": [1, -4]}, ["allowed_token_ids=-4", ">= 0"]),
        ({"allowed_token_ids": range(10**12)}, ["1000000000000 ids"]),
        ({"bad_words": "word"}, ["bad_words='word'", "list of strings"]),
        ({"bad_words": ["a", ""]}, ["bad_words", "empty string", "remove it"]),
        ({"bad_words": [str(i) for i in range(129)]}, ["129 words", "limit is 128"]),
        ({"repetition_detection": {"max_pattern_size": 3}}, ["min_count=0", ">= 2", "max_pattern_size=0"]),
        (
            {"repetition_detection": {"max_pattern_size": 3, "min_pattern_size": 4, "min_count": 2}},
            ["min_pattern_size=4", "max_pattern_size=3"],
        ),
        ({"repetition_detection": {"max_patern_size": 3}}, ["'max_patern_size'", "did you mean 'max_pattern_size'"]),
        ({"prompt_logprob_token_ids": [[1]]}, ["prompt_logprob_token_ids=[[1]]", "leave it at None"]),
        ({"logit_bias": np.zeros(3)}, ["logit_bias=array", "must map token ids to numbers"]),
    ],
)
def test_the_message_names_the_value_and_the_fix(arguments: dict[str, Any], words: list[str]) -> None:
    with pytest.raises(InvalidParameterError) as caught:
        SamplingParams(**arguments)
    for word in words:
        assert word in str(caught.value)
    assert isinstance(caught.value, ValueError), "what a program written for vLLM catches"


@pytest.mark.parametrize(
    ("name", "nearest"),
    [
        ("max_token", "max_tokens"),
        ("temprature", "temperature"),
        ("topk", "top_k"),
        ("presence_penality", "presence_penalty"),
    ],
)
def test_an_unknown_parameter_brings_the_nearest(name: str, nearest: str) -> None:
    with pytest.raises(UnknownParameterError, match=f"{name!r}; did you mean {nearest!r}") as caught:
        SamplingParams(**{name: 1})
    assert isinstance(caught.value, TypeError)


def test_parameters_of_vllm_that_ask_for_nothing() -> None:
    for name, values in VLLM_PARAMETERS.items():
        for value in values:
            assert SamplingParams(**{name: value}) == SamplingParams()


def test_an_output_has_the_fields_that_programs_for_vllm_read() -> None:
    output = CompletionOutput(0, "a", [1])
    assert not output.finished()
    assert (output.cumulative_logprob, output.logprobs) == (None, None)
    output.finish_reason = "stop"
    assert output.finished()


ANYTHING = st.one_of(
    st.none(),
    st.booleans(),
    st.integers(),
    st.sampled_from([0, 1, -1, 2**31, 2**63, 2**64, 10**400, 10**5000]),
    st.floats(),
    st.text(max_size=5),
    st.binary(max_size=3),
    st.lists(st.one_of(st.integers(), st.text(max_size=3), st.none()), max_size=3),
    st.sets(st.integers(), max_size=2),
    st.complex_numbers(),
    st.sampled_from(list(RequestOutputKind)),
    st.builds(object),
)
SENSIBLE = {
    "temperature": st.floats(0, 2),
    "top_p": st.floats(0.01, 1),
    "top_k": st.integers(-1, 100),
    "min_p": st.floats(0, 1),
    "seed": st.integers() | st.none(),
    "max_tokens": st.integers(1, 100) | st.none(),
    "min_tokens": st.integers(0, 100),
    "stop": st.text(max_size=3) | st.lists(st.text(min_size=1, max_size=3), max_size=3),
    "stop_token_ids": st.lists(st.integers(0, 2**40), max_size=3),
    "ignore_eos": st.booleans(),
    "detokenize": st.booleans(),
    "skip_special_tokens": st.booleans(),
    "spaces_between_special_tokens": st.booleans(),
    "stream_interval": st.integers(1, 100) | st.none(),
    "truncate_prompt_tokens": st.integers(1, 100) | st.just(-1) | st.none(),
    "thinking_token_budget": st.none(),
    "include_stop_str_in_output": st.booleans(),
    "output_kind": st.sampled_from(list(RequestOutputKind)),
    "n": st.integers(1, 5),
    "best_of": st.none() | st.integers(1, 5),
    "presence_penalty": st.floats(-2, 2),
    "frequency_penalty": st.floats(-2, 2),
    "repetition_penalty": st.floats(0.1, 10),
    "logit_bias": st.dictionaries(st.integers(0, 2**40) | st.text(max_size=3), st.floats(), max_size=3) | st.none(),
    "allowed_token_ids": st.lists(st.integers(0, 2**40), max_size=3) | st.none(),
    "bad_words": st.lists(st.text(max_size=3), max_size=3) | st.none(),
    "logprobs": st.integers(-1, 20) | st.none(),
    "prompt_logprobs": st.integers(-1, 20) | st.none(),
    "logprob_token_ids": st.lists(st.integers(0, 2**40), max_size=3) | st.none(),
    "flat_logprobs": st.booleans(),
    "skip_reading_prefix_cache": st.booleans() | st.none(),
    "repetition_detection": st.none()
    | st.dictionaries(st.sampled_from(["max_pattern_size", "min_pattern_size", "min_count", "x"]), st.integers()),
    "structured_outputs": st.none()
    | st.dictionaries(st.sampled_from(["json", "regex", "choice", "grammar", "x"]), st.text(max_size=3), max_size=2),
    "extra_args": st.none()
    | st.dictionaries(st.text(max_size=3) | st.integers(), st.floats() | st.text(max_size=3), max_size=2),
}
assert set(SENSIBLE) == set(SamplingParams.__dataclass_fields__)


@settings(max_examples=examples(133, 400), deadline=None)
@given(st.fixed_dictionaries({}, optional={name: sane | ANYTHING for name, sane in SENSIBLE.items()}))
def test_whatever_is_given_is_taken_or_refused(arguments: dict[str, Any]) -> None:
    params, message = None, ""
    try:
        params = SamplingParams(**arguments)
    except InvalidParameterError as error:
        message = str(error)
    if params is None:
        assert 0 < len(message) < 500
        return
    assert 0 <= params.temperature < math.inf
    assert 0 < params.top_p <= 1
    assert 0 <= params.min_p <= 1
    assert params.top_k >= 0
    assert params.seed is None or 0 <= params.seed < 2**64
    assert params.max_tokens is None or params.min_tokens <= params.max_tokens
    assert params.checked_copy() == params


@settings(max_examples=examples(67, 200), deadline=None)
@given(st.sampled_from(sorted(SENSIBLE)), ANYTHING)
@example("structured_outputs", 10**5000)  # Python does not write so many digits out
def test_a_field_assigned_later_is_checked_when_it_is_used(name: str, value: Any) -> None:
    params = SamplingParams()
    setattr(params, name, value)
    try:
        expected: SamplingParams | None = SamplingParams(**{name: value})
    except InvalidParameterError:
        expected = None
    if expected is None:
        with pytest.raises(InvalidParameterError):
            params.checked_copy()
    else:
        assert params.checked_copy() == expected


# What they do ---------------------------------------------------------------------------------------------------------

GREEDY = [443, 1135, 259, 433, 415, 339]
"""How the storyteller goes on from PROMPT: " there lived a man who had", one token a word."""
EOS = 415
SPECIAL = 259


@pytest.fixture
def anyio_backend() -> str:
    return "asyncio"


@pytest.fixture(scope="module")
def llm(tmp_path_factory: pytest.TempPathFactory) -> Iterator[AsyncLLM]:
    """The storyteller, for which " who" also ends the text and " a" is a special token."""
    folder = tmp_path_factory.mktemp("model")
    for file in BUNDLED_MODELS["storyteller"].iterdir():
        if file.suffix == ".safetensors":
            (folder / file.name).symlink_to(file)
        elif file.suffix == ".json":
            shutil.copy(file, folder)
    (folder / "generation_config.json").write_bytes(orjson.dumps({"eos_token_id": [0, EOS]}))
    tokens = orjson.loads((folder / "tokenizer_config.json").read_bytes())
    tokens["additional_special_tokens"] = ["Ġa"]
    (folder / "tokenizer_config.json").write_bytes(orjson.dumps(tokens))
    engine = AsyncLLM(folder, dtype="float32", num_threads=1)
    anyio.run(engine.start)
    yield engine
    engine.shutdown()


async def complete(llm: AsyncLLM, **arguments: Any) -> CompletionOutput:
    params = {"max_tokens": 40, "ignore_eos": True, "seed": 11, "skip_special_tokens": False} | arguments
    return (await llm.complete(PROMPT, SamplingParams(**params))).outputs[0]


async def texts_of(llm: AsyncLLM, kind: RequestOutputKind, **arguments: Any) -> list[CompletionOutput]:
    params = {"max_tokens": 40, "ignore_eos": True, "seed": 11, "skip_special_tokens": False} | arguments
    stream = llm.generate(PROMPT, SamplingParams(output_kind=kind, **params))
    return [output.outputs[0] async for output in stream]


@pytest.mark.parametrize(
    "sharp",
    [{"temperature": 0}, {"top_k": 1}, {"top_p": 1e-9}, {"min_p": 1.0}, {"temperature": 1e-6}, {"temperature": 5e-324}],
    ids=str,
)
async def test_everything_sharp_is_greedy(llm: AsyncLLM, sharp: dict[str, Any]) -> None:
    for seed in (1, 2):
        assert (await complete(llm, max_tokens=6, seed=seed, **sharp)).token_ids == GREEDY


@pytest.mark.parametrize(
    "idle", [{"top_k": 2**40}, {"top_k": -1}, {"top_k": 4096}, {"top_p": 1.0}, {"min_p": 0.0}], ids=str
)
async def test_a_filter_that_keeps_everything_changes_nothing(llm: AsyncLLM, idle: dict[str, Any]) -> None:
    assert (await complete(llm, **idle)).token_ids == (await complete(llm)).token_ids


async def test_the_highest_temperature_ends_and_fails_nothing(llm: AsyncLLM) -> None:
    hot = [await complete(llm, max_tokens=8, temperature=2, **more) for more in ({}, {"top_k": 5})]
    assert {len(output.token_ids) for output in hot} == {8}
    assert hot[0].token_ids != GREEDY


async def test_max_tokens_none_goes_to_the_length_of_the_model(llm: AsyncLLM) -> None:
    prompt = [2721] * 1000
    for max_tokens in (None, 5000):
        output = await llm.complete(prompt, SamplingParams(max_tokens=max_tokens, ignore_eos=True))
        assert len(prompt) + len(output.outputs[0].token_ids) == llm.config.model.max_model_len == 1024
        assert output.outputs[0].finish_reason == "length"
    longest = await llm.complete([2721] * 1023, SamplingParams(ignore_eos=True))
    assert len(longest.outputs[0].token_ids) == 1


async def test_the_models_own_end(llm: AsyncLLM) -> None:
    output = await complete(llm, temperature=0, ignore_eos=False)
    assert output.token_ids == GREEDY[:5], "the token that ends it is part of the tokens"
    assert (output.finish_reason, output.stop_reason) == ("stop", EOS), "only the tokenizer's own is no stop_reason"
    with_end = await complete(llm, temperature=0, ignore_eos=False, include_stop_str_in_output=True)
    assert with_end.text == output.text + " who"
    assert (await complete(llm, temperature=0, max_tokens=6)).token_ids == GREEDY


async def test_the_end_of_text_of_the_tokenizer_is_no_stop_reason(llm: AsyncLLM) -> None:
    only_end = SamplingParams(allowed_token_ids=[0], max_tokens=3, seed=1)
    output = (await llm.complete(PROMPT, only_end)).outputs[0]
    assert (output.token_ids, output.finish_reason, output.stop_reason) == ([0], "stop", None)
    only_end.ignore_eos, only_end.stop_token_ids = True, [0]
    output = (await llm.complete(PROMPT, only_end)).outputs[0]
    assert (output.token_ids, output.finish_reason, output.stop_reason) == ([0], "stop", 0)


async def test_stop_token_ids(llm: AsyncLLM) -> None:
    output = await complete(llm, temperature=0, stop_token_ids=[7, 433, 1135])
    assert output.token_ids == GREEDY[:2]
    assert output.text == " there"
    assert (output.finish_reason, output.stop_reason) == ("stop", 1135)
    both = await complete(llm, temperature=0, stop_token_ids=[EOS], ignore_eos=False)
    assert both.token_ids == GREEDY[:5]


async def test_min_tokens_keeps_every_end_away(llm: AsyncLLM) -> None:
    for ends in ({"ignore_eos": False}, {"stop_token_ids": [EOS]}):
        output = await complete(llm, temperature=0, min_tokens=20, max_tokens=24, **ends)
        assert EOS not in output.token_ids[:20]
        assert len(output.token_ids) >= 20
    output = await complete(llm, temperature=0, min_tokens=5, ignore_eos=False)
    assert output.token_ids[:4] == GREEDY[:4]
    assert output.token_ids[4] == EOS or len(output.token_ids) > 5
    whole = await complete(llm, temperature=0, max_tokens=12, min_tokens=6)
    assert EOS in GREEDY[:6]
    assert EOS not in whole.token_ids[:6], "as in vLLM: not even where it would not end the request"
    text = whole.text
    stopped = await complete(llm, temperature=0, max_tokens=12, stop=" ", min_tokens=6)
    assert len(stopped.token_ids) == 7
    assert text.startswith(stopped.text)


@pytest.mark.parametrize("is_included", [False, True])
async def test_a_stop_string_across_tokens_never_shows(llm: AsyncLLM, is_included: bool) -> None:
    whole = await complete(llm)
    pieces = [await complete(llm, max_tokens=n) for n in range(1, 13)]
    borders = [len(output.text) for output in pieces]
    num_tested = 0
    for border in borders[3:]:
        stop = whole.text[border - 2 : border + 2]
        at = whole.text.find(stop)
        if at != border - 2:
            continue  # it is found earlier
        num_tested += 1
        expected = whole.text[: at + len(stop)] if is_included else whole.text[:at]
        arguments = {"stop": ["never to be seen", stop], "include_stop_str_in_output": is_included}
        cumulative = await texts_of(llm, RequestOutputKind.CUMULATIVE, **arguments)
        for output in cumulative:
            assert expected.startswith(output.text), "a part of the stop string was shown"
        final = cumulative[-1]
        assert final.text == expected
        assert (final.finish_reason, final.stop_reason) == ("stop", stop)
        assert final.token_ids == whole.token_ids[: len(final.token_ids)]
        deltas = await texts_of(llm, RequestOutputKind.DELTA, **arguments)
        assert "".join(output.text for output in deltas) == expected
        assert [i for output in deltas for i in output.token_ids] == final.token_ids
    assert num_tested >= 3


async def test_what_was_held_back_comes_when_no_stop_string_does(llm: AsyncLLM) -> None:
    whole = await complete(llm, max_tokens=8)
    outputs = await texts_of(llm, RequestOutputKind.CUMULATIVE, max_tokens=8, stop=[whole.text[-6:] + "\0"])
    assert outputs[-1].text == whole.text
    assert outputs[-1].finish_reason == "length"
    assert outputs[-1].stop_reason is None


async def test_the_stop_string_that_is_complete_first_counts(llm: AsyncLLM) -> None:
    output = await complete(llm, temperature=0, stop=["a man", "lived a", "there lived a man"])
    assert (output.text, output.stop_reason) == (" there ", "lived a")


async def test_a_stop_string_and_a_stop_token_in_one_step(llm: AsyncLLM) -> None:
    """The text of the token that ends a request is searched only where it is part of the output."""
    ends = {"stop_token_ids": [433], "stop": ["man"]}  # the token is " man"
    output = await complete(llm, temperature=0, **ends)
    assert (output.text, output.stop_reason) == (" there lived a", 433)
    output = await complete(llm, temperature=0, include_stop_str_in_output=True, **ends)
    assert (output.text, output.stop_reason) == (" there lived a man", "man")
    output = await complete(llm, temperature=0, **(ends | {"stop": ["ved"]}))
    assert (output.text, output.stop_reason) == (" there li", "ved")
    output = await complete(llm, temperature=0, ignore_eos=False, stop=["a man who"])
    assert (output.text, output.stop_reason) == (" there lived a man", EOS)
    output = await complete(llm, temperature=0, max_tokens=4, stop=["man"])
    assert (output.text, output.finish_reason, output.stop_reason) == (" there lived a ", "stop", "man")


@pytest.mark.parametrize("kind", [RequestOutputKind.DELTA, RequestOutputKind.CUMULATIVE])
async def test_stream_interval(llm: AsyncLLM, kind: RequestOutputKind) -> None:
    whole = await complete(llm, max_tokens=24)
    outputs = await texts_of(llm, kind, max_tokens=24, stream_interval=7)
    # A consumer that is late finds two outputs in one; no output is smaller than it was asked for.
    sizes = [len(output.token_ids) for output in outputs]
    if kind is RequestOutputKind.CUMULATIVE:
        sizes = [size - before for size, before in zip(sizes, [0, *sizes], strict=False)]
        assert outputs[-1].text == whole.text
    else:
        assert "".join(output.text for output in outputs) == whole.text
    assert sum(sizes) == 24
    ends = [sum(sizes[: i + 1]) for i in range(len(sizes))]
    assert set(ends) <= {1, 8, 15, 22, 24}
    assert ends[-1] == 24
    stopped = await texts_of(llm, kind, temperature=0, stream_interval=50, stop=["man"])
    assert "".join(o.text for o in stopped if kind is RequestOutputKind.DELTA or o is stopped[-1]) == " there lived a "


async def test_an_aborted_request_gives_out_what_it_held_back(llm: AsyncLLM) -> None:
    params = {"max_tokens": 900, "ignore_eos": True, "seed": 3}
    whole = await llm.complete(PROMPT, SamplingParams(**params))  # type: ignore[arg-type]
    for more in ({"output_kind": RequestOutputKind.FINAL_ONLY}, {"stream_interval": 1000}):
        stream = llm.generate(PROMPT, SamplingParams(**params, **more), request_id="long")  # type: ignore[arg-type]
        if "stream_interval" in more:
            assert len((await anext(stream)).outputs[0].token_ids) == 1
        while not (await llm.stats())["scheduler"]["scheduler"]["num_running"]:
            pass
        await llm.abort("long")
        (final,) = [output.outputs[0] async for output in stream]
        assert final.finish_reason == "abort"
        assert final.token_ids == whole.outputs[0].token_ids[: len(final.token_ids)]
        assert whole.outputs[0].text.startswith(final.text)


async def test_an_engines_stream_interval_holds_for_all(tmp_path: Path) -> None:
    async with AsyncLLM("storyteller", topology="inline", num_threads=1, stream_interval=5) as llm:
        for asked in (None, 2):
            params = SamplingParams(max_tokens=12, ignore_eos=True, stream_interval=asked)
            sizes = [len(output.outputs[0].token_ids) async for output in llm.generate(PROMPT, params)]
            assert set(sizes) <= {1, 6, 11, 12}


async def test_truncate_prompt_tokens_keeps_the_end(llm: AsyncLLM) -> None:
    ids = [*range(100, 150)]
    for prompt in (ids, {"prompt_token_ids": ids}):
        for count in (1, 7, 49, 50, 51, 1024):
            output = await llm.complete(prompt, SamplingParams(max_tokens=2, truncate_prompt_tokens=count))
            assert output.prompt_token_ids == ids[-count:]
        output = await llm.complete(
            prompt, SamplingParams(max_tokens=1), tokenization_kwargs={"truncate_prompt_tokens": 3}
        )
        assert output.prompt_token_ids == ids[-3:]
    output = await llm.complete(list(range(2000)), SamplingParams(truncate_prompt_tokens=-1))
    assert output.prompt_token_ids == list(range(2000))[-1023:]
    assert len(output.outputs[0].token_ids) == 1
    output = await llm.complete(PROMPT, SamplingParams(max_tokens=1, truncate_prompt_tokens=2))
    assert output.prompt == PROMPT
    (start, *_, end) = (await llm.complete(PROMPT, SamplingParams(max_tokens=1))).prompt_token_ids
    assert output.prompt_token_ids == [start, end], "what the model puts before a text stays"
    for side, kept in (("left", ids[-3:]), ("right", ids[:3])):
        cut = {"truncate_prompt_tokens": 3, "truncation_side": side}
        assert (await llm.complete(ids, SamplingParams(max_tokens=1), tokenization_kwargs=cut)).prompt_token_ids == kept
    with pytest.raises(InvalidParameterError, match="truncation_side='middle' must be 'left' or 'right'"):
        await llm.complete(PROMPT, tokenization_kwargs={"truncation_side": "middle"})
    with pytest.raises(InvalidParameterError, match="truncate_prompt_tokens=1025 is more than max_model_len=1024"):
        await llm.complete(PROMPT, SamplingParams(truncate_prompt_tokens=1025))


async def test_add_special_tokens(llm: AsyncLLM) -> None:
    both = [
        (await llm.complete(PROMPT, SamplingParams(max_tokens=1), tokenization_kwargs={"add_special_tokens": is_on}))
        for is_on in (True, False)
    ]
    assert both[0].prompt_token_ids == [0, *both[1].prompt_token_ids]
    for wrong in ({"add_special_token": True}, {"add_special_tokens": 1}, {"truncate_prompt_tokens": 0}):
        with pytest.raises(InvalidParameterError, match=r"add_special_tokens|truncate_prompt_tokens"):
            llm.generate(PROMPT, tokenization_kwargs=wrong)


async def test_without_detokenizing_there_are_tokens_and_no_text(llm: AsyncLLM) -> None:
    output = await complete(llm, temperature=0, max_tokens=6, detokenize=False)
    assert output.token_ids == GREEDY
    assert output.text == ""
    parts = await texts_of(llm, RequestOutputKind.DELTA, detokenize=False, max_tokens=3)
    assert [i for part in parts for i in part.token_ids] == (await complete(llm, max_tokens=3)).token_ids
    assert not any(part.text for part in parts)


async def test_special_tokens_are_text_on_demand(llm: AsyncLLM) -> None:
    assert SPECIAL in GREEDY
    skipped = await complete(llm, temperature=0, max_tokens=6, skip_special_tokens=True)
    shown = await complete(llm, temperature=0, max_tokens=6, skip_special_tokens=False)
    assert skipped.token_ids == shown.token_ids == GREEDY
    assert skipped.text.replace(" ", "") == "therelivedmanwhohad"
    assert len(shown.text) > len(skipped.text)


async def test_requests_of_every_kind_in_one_batch_keep_to_their_own(llm: AsyncLLM) -> None:
    variants: list[dict[str, Any]] = [
        {"temperature": 0, "max_tokens": 6},
        {"max_tokens": 9},
        {"top_k": 3, "max_tokens": 7},
        {"temperature": 0, "stop": "man"},
        {"temperature": 0, "stop_token_ids": [433]},
        {"temperature": 0, "ignore_eos": False},
        {"seed": 5, "max_tokens": 8, "top_p": 0.5},
    ]
    alone = [await complete(llm, **variant) for variant in variants]
    together: dict[int, CompletionOutput] = {}

    async def one(number: int) -> None:
        together[number] = await complete(llm, **variants[number])

    async with anyio.create_task_group() as tasks:
        for number in range(len(variants)):
            tasks.start_soon(one, number)
    assert [together[number] for number in range(len(variants))] == alone


def test_arguments_without_a_name_come_in_the_order_of_vllm() -> None:
    params = SamplingParams(2, 0.1, 0.2, 1.3, 0.4, None, 0.5, 6, 0.07, 8, ["stop"])
    assert params == SamplingParams(
        n=2,
        presence_penalty=0.1,
        frequency_penalty=0.2,
        repetition_penalty=1.3,
        temperature=0.4,
        top_p=0.5,
        top_k=6,
        min_p=0.07,
        seed=8,
        stop="stop",
    )
    with pytest.raises(InvalidParameterError, match="watermarking=True is not supported"):
        SamplingParams(1, 0.0, 0.0, 1.0, 1.0, True)
    with pytest.raises(InvalidParameterError, match="SamplingParams got n twice: 1, and 2"):
        SamplingParams(1, n=2)
    with pytest.raises(InvalidParameterError, match="takes 28 arguments without a name, not 29"):
        SamplingParams(*[None] * 29)


def test_from_optional_takes_none_for_defaults_and_brings_biases_within_bounds() -> None:
    params = SamplingParams.from_optional(
        n=None, temperature=None, top_p=None, presence_penalty=None, frequency_penalty=None, repetition_penalty=None
    )
    assert params == SamplingParams()
    params = SamplingParams.from_optional(max_tokens=None, stop="x", logit_bias={"3": 400, 4: -101.0, 5: 1})
    assert params == SamplingParams(max_tokens=None, stop="x", logit_bias={3: 100.0, 4: -100.0, 5: 1.0})
    with pytest.raises(UnknownParameterError, match="did you mean 'temperature'"):
        SamplingParams.from_optional(temprature=1.0)
    with pytest.raises(InvalidParameterError, match="min_p=None"):
        SamplingParams.from_optional(min_p=None)


def test_what_was_checked_before_is_checked_again() -> None:
    """The same ids are common, and recognised; what only equals them is not taken for them."""
    ids = [5, 1, 1000, 5]
    first, second = SamplingParams(allowed_token_ids=ids), SamplingParams(allowed_token_ids=[5, 1, 1000])
    assert first.allowed_token_ids == second.allowed_token_ids == [5, 1, 1000]
    assert isinstance(first.allowed_token_ids, list)
    first.allowed_token_ids.append(7)
    assert second.allowed_token_ids == SamplingParams(allowed_token_ids=[5, 1, 1000]).allowed_token_ids == [5, 1, 1000]
    for wrong in ([5, True, 1000], [5, 1.0, 1000], [5, -1, 1000]):
        with pytest.raises(InvalidParameterError, match="allowed_token_ids"):
            SamplingParams(allowed_token_ids=wrong)  # type: ignore[arg-type]
    assert SamplingParams(logit_bias={3: 1, 4: -0.5}).logit_bias == {3: 1.0, 4: -0.5}
    assert SamplingParams(logit_bias={"3": 1, 4: -0.5}).logit_bias == {3: 1.0, 4: -0.5}
    for bias in ({3: float("nan")}, {3: True}, {3: 1e39}, {-3: 1.0}, {True: 1.0}, {3: 10**400}):
        with pytest.raises(InvalidParameterError, match="logit_bias"):
            SamplingParams(logit_bias=bias)
