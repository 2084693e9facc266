"""`SamplingParams.extra_args`: what may be in it, and that it travels."""

from __future__ import annotations

from dataclasses import fields, replace
from typing import Any

import numpy as np
import pytest

from actorllm import SamplingParams
from actorllm.errors import InvalidParameterError
from actorllm.messages import Submit, pack, unpack
from actorllm.messages.untrusted import check_foreign
from actorllm.types.logits_processors.travel import NOT_CARRIED, decode_params, decode_rows, encode_params, encode_rows
from actorllm.types.params import MAX_EXTRA_ARGS, settled

GOOD = {"a": 1, "b": [1.5, None, True, {"c": "é"}], "big": 2**63}


def test_it_is_a_copy_as_json_makes_it() -> None:
    given: dict[str, Any] = {"pair": (1, 2)}
    params = SamplingParams(extra_args=given)
    given["more"] = 1
    assert params.extra_args == {"pair": [1, 2]}
    assert SamplingParams(extra_args={}).extra_args == {}


nested: list[Any] = []
nested.append(nested)
often: list[Any] = []
for _ in range(12):  # the same list again and again: few objects, and endless work for a look at every path
    often = [often] * 1000


@pytest.mark.parametrize(
    ("given", "words"),
    [
        ([1], "must be a mapping"),
        ("text", "must be a mapping"),
        ({1: 2}, "has the key 1, which must be a string"),
        ({"a": {"b": object()}}, r"extra_args\['a'\]\['b'\]=<object .* is no value that JSON has"),
        ({"a": float("nan")}, r"extra_args\['a'\]=nan is no value"),
        ({"a": 2**64}, "is no value that JSON has"),
        ({"a": b"bytes"}, "is no value that JSON has"),
        ({"a": "\ud800"}, "is no value that JSON has"),
        ({"a": nested}, "nested more than 16 levels"),
        ({"a": "x" * MAX_EXTRA_ARGS}, r"more than 65536 bytes of JSON at extra_args\['a'\]"),
        ({"a": "é" * (MAX_EXTRA_ARGS // 4)}, "bytes of JSON, and the limit is 65536"),
        ({"a": range(3)}, "is no value that JSON has"),
        ({"a": [0] * (MAX_EXTRA_ARGS + 1)}, "more than 65536 bytes"),
        ({"a": often}, "more than 65536 bytes"),
    ],
)
def test_what_cannot_travel_is_refused(given: Any, words: str) -> None:
    with pytest.raises(InvalidParameterError, match=words):
        SamplingParams(extra_args=given)


def test_it_is_checked_again_where_it_was_assigned() -> None:
    params = SamplingParams()
    params.extra_args = {"a": object()}  # type: ignore[dict-item]
    with pytest.raises(InvalidParameterError, match="no value that JSON has"):
        params.checked_copy()


def test_parameters_are_the_same_behind_the_way_to_a_worker() -> None:
    params = SamplingParams(
        extra_args=GOOD, temperature=0.3, seed=4, stop=["x"], max_tokens=None, top_k=3, n=2, logprobs=1
    )
    found = decode_params(encode_params(params))
    assert {f.name: getattr(found, f.name) for f in fields(SamplingParams)} == {
        f.name: getattr(params, f.name) for f in fields(SamplingParams)
    }
    ((slot, again),) = decode_rows(encode_rows([(3, encode_params(params))]))
    assert (slot, again) == (3, params)


def test_what_is_large_and_applied_elsewhere_does_not_travel() -> None:
    params = SamplingParams(logit_bias={1: 2.0}, allowed_token_ids=[1], bad_words=["x"], extra_args={"a": 1})
    assert decode_params(encode_params(params)) == SamplingParams(extra_args={"a": 1})
    assert {f.name for f in fields(SamplingParams)} >= NOT_CARRIED


def test_a_message_carries_it_and_one_of_a_strange_program_is_looked_at() -> None:
    data = encode_params(SamplingParams(extra_args=GOOD))
    submit = Submit(rid=1, arrival=0.0, prompt=np.ones(2, np.int32), max_tokens=3, processor_params=data)
    again = unpack(*pack(submit))
    assert isinstance(again, Submit)
    assert again.processor_params.tobytes() == data.tobytes()
    check_foreign(again, 10)
    for wrong in (b"{", b"[]", b"\xff", b'{"extra_args": 3}', b'{"nothing": 1}', b'{"logit_bias": {}}', b"[" * 5000):
        message = replace(submit, processor_params=np.frombuffer(wrong, np.uint8))
        with pytest.raises(ValueError, match="processor_params"):
            check_foreign(message, 10)


def test_what_was_checked_once_for_many_requests_has_extra_args_for_each() -> None:
    once = settled(SamplingParams(extra_args={"a": [1]}))
    first, second = once.checked_copy(), once.checked_copy()
    assert first.extra_args is not None
    first.extra_args["b"] = first.extra_args.pop("a")
    assert second.extra_args == once.extra_args == {"a": [1]}
    plain = settled(SamplingParams())
    assert plain.checked_copy() is plain
