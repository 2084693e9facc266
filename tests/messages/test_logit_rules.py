"""Sampling rules: made from parameters, checked against the model, and the same after each way they travel."""

from __future__ import annotations

from typing import Any

import numpy as np
import orjson
import pytest
from hypothesis import given
from hypothesis import strategies as st

from actorllm import SamplingParams
from actorllm.config import BUNDLED_MODELS
from actorllm.errors import InvalidParameterError
from actorllm.messages.logit_rules import SamplingRules, decode_rules, encode_rules, rules_of
from actorllm.text.tokenizer import Tokenizer

VOCAB = 4096


@pytest.fixture(scope="module")
def tokenizer() -> Tokenizer:
    return Tokenizer(BUNDLED_MODELS["storyteller"])


def made(tokenizer: Tokenizer | None = None, limit: int = 20, **arguments: Any) -> SamplingRules | None:
    def get() -> Tokenizer:
        assert tokenizer is not None, "nobody needs a tokenizer without bad words"
        return tokenizer

    return rules_of(SamplingParams(**arguments), VOCAB, limit, get)


@pytest.mark.parametrize(
    "arguments",
    [
        {},
        {"temperature": 0.3, "top_k": 5, "min_tokens": 3, "stop_token_ids": [4]},
        {"presence_penalty": 0.0, "frequency_penalty": -0.0, "repetition_penalty": 1.0},
        {"logit_bias": {}, "bad_words": []},
        {"repetition_detection": {"max_pattern_size": 0, "min_count": 7}},
    ],
)
def test_who_asks_for_nothing_has_no_rules(arguments: dict[str, Any]) -> None:
    assert made(**arguments) is None


def test_every_parameter_makes_a_rule(tokenizer: Tokenizer) -> None:
    rules = made(
        tokenizer,
        presence_penalty=0.5,
        frequency_penalty=-1,
        repetition_penalty=1.25,
        logit_bias={7: 2, 3: -1},
        allowed_token_ids=[9, 8],
        bad_words=["man"],
        logprobs=0,
        prompt_logprobs=3,
        repetition_detection={"max_pattern_size": 5, "min_count": 2},
    )
    assert rules == SamplingRules(
        presence_penalty=0.5,
        frequency_penalty=-1.0,
        repetition_penalty=1.25,
        bias_ids=(7, 3),
        biases=(2.0, -1.0),
        allowed_ids=(9, 8),
        bad_words=rules.bad_words if rules is not None else (),
        num_logprobs=0,
        num_prompt_logprobs=3,
        repetition=(5, 1, 2),
    )
    assert made(limit=-1, logprobs=-1) == SamplingRules(num_logprobs=VOCAB)


def test_bad_words_with_and_without_a_space(tokenizer: Tokenizer) -> None:
    def ids(text: str) -> tuple[int, ...]:
        return tuple(tokenizer.encode(text, add_special_tokens=False).tolist())

    def words(*bad: str) -> tuple[tuple[int, ...], ...]:
        rules = made(tokenizer, bad_words=list(bad))
        assert rules is not None
        return rules.bad_words

    assert len(ids(" man")) == 1
    for word in ("man", " man", "   man"):
        expected = [ids("man")]
        if len(ids("man")) == 1:
            expected.append(ids(" man"))
        assert list(words(word)) == expected, "a space in front of a word makes no difference"
    assert len(ids("a")) == len(ids(" a")) == 1
    assert words("a") == (ids("a"), ids(" a"))
    long = "once upon a castle"
    assert ids(long) in words(long)
    assert words("a", "b") == words("a") + words("b")


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"logit_bias": {VOCAB: 1}}, r"logit_bias: 4096 is outside the vocabulary of 4096"),
        ({"allowed_token_ids": [1, 2**40]}, r"allowed_token_ids: 1099511627776 is outside the vocabulary"),
        ({"logprobs": 21}, r"logprobs=21 asks for 21 log-probabilities .* limit is 20; .* max_logprobs"),
        ({"prompt_logprobs": -1}, r"prompt_logprobs=-1 asks for 4096 .* limit is 20"),
        ({"bad_words": ["  "]}, r"bad_words: '  ' has no token"),
        (
            {"bad_words": [chr(97 + i) for i in range(26)] + [str(i) for i in range(100)]},
            r"bad_words are 1\d\d .* limit is 128",
        ),
    ],
)
def test_what_the_model_cannot_do_is_refused(tokenizer: Tokenizer, arguments: dict[str, Any], message: str) -> None:
    with pytest.raises(InvalidParameterError, match=message):
        made(tokenizer, **arguments)


def test_the_vocabulary_is_the_limit_of_all(tokenizer: Tokenizer) -> None:
    with pytest.raises(InvalidParameterError, match="the limit is the vocabulary of 4096"):
        made(limit=-1, logprobs=5000)


floats = st.floats(-2, 2, width=32)
ids = st.lists(st.integers(0, VOCAB - 1), max_size=5).map(tuple)


@st.composite
def any_rules(draw: Any) -> SamplingRules:
    bias_ids = draw(ids)
    return SamplingRules(
        presence_penalty=draw(floats),
        frequency_penalty=draw(floats),
        repetition_penalty=draw(st.floats(0.125, 4, width=32)),
        bias_ids=bias_ids,
        biases=tuple(draw(floats) for _ in bias_ids),
        allowed_ids=draw(ids),
        bad_words=tuple(draw(st.lists(ids.filter(bool), max_size=4))),
        num_logprobs=draw(st.integers(-1, 20)),
        num_prompt_logprobs=draw(st.integers(-1, 20)),
    )


@given(st.lists(any_rules(), max_size=4))
def test_rules_are_the_same_where_they_arrive(rules: list[SamplingRules]) -> None:
    for one in rules:
        assert SamplingRules.from_fields(orjson.loads(orjson.dumps(one.to_fields()))) == one
        one.check(VOCAB)
    rows = [(7 * i, i + 1, one) for i, one in enumerate(rules)]
    assert list(decode_rules(*encode_rules(rows))) == rows


@pytest.mark.parametrize(
    "fields",
    [
        {"bias_ids": [VOCAB], "biases": [1.0]},
        {"bias_ids": [1], "biases": []},
        {"allowed_ids": [-1]},
        {"allowed_ids": [1.5]},
        {"bad_words": [[]]},
        {"bad_words": [[VOCAB]]},
        {"repetition_penalty": 0},
        {"presence_penalty": "x"},
        {"num_logprobs": VOCAB + 1},
        {"repetition": [1, 2, 3]},
        {"repetition": [1, 1]},
        {"unknown": 1},
    ],
)
def test_rules_that_no_front_door_makes(fields: dict[str, Any]) -> None:
    with pytest.raises((ValueError, TypeError)):
        SamplingRules.from_fields(fields).check(VOCAB)


def test_damaged_records_are_no_rules() -> None:
    integers, numbers = encode_rules(
        [(3, 1, SamplingRules(bad_words=((1, 2),), allowed_ids=(4, 5), presence_penalty=1))]
    )
    assert len(list(decode_rules(integers, numbers))) == 1
    for cut in range(1, len(integers)):
        with pytest.raises(ValueError, match="rules"):
            list(decode_rules(integers[:cut], numbers))
    with pytest.raises(ValueError, match="rules"):
        list(decode_rules(integers, numbers[:-1]))
    with pytest.raises(ValueError, match="belong to no record"):
        list(decode_rules(integers, np.append(numbers, np.float32(1))))
