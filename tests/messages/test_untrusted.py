"""What an attached frontend may send: all that a frontend does send, and nothing impossible."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import numpy as np
import orjson
import pytest

from actorllm.messages import Abort, Ask, Message, Outputs, Reply, StepResult, Submit, Unblock
from actorllm.messages.untrusted import check_foreign
from tests.messages.hostile_frontend import Engine

VOCAB = 100
PROMPT = np.array([1, 2], np.int32)
NESTED = orjson.loads("[" * 1000 + "]" * 1000)
"""As deep as a reader of JSON goes; writing or printing it overruns the stack."""
SUBMIT = Submit(rid=1, arrival=0.5, prompt=PROMPT, max_tokens=8)


@pytest.mark.parametrize(
    "message",
    [
        SUBMIT,
        replace(
            SUBMIT,
            seed=2**64 - 1,
            stop_token_ids=[99],
            stop=["a"],
            slo=[0.5, None, None, None],
            tenant="me",
            priority=-(2**40),
            block_hashes=np.zeros(32, np.uint8),
        ),
        replace(SUBMIT, siblings=np.array([2, 3], np.int32)),
        replace(SUBMIT, fork_of=7),
        replace(SUBMIT, grammar={"kind": "regex", "text": "a+"}),
        Abort(rids=PROMPT),
        Unblock(rid=1),
        Ask(id=1, verb="ping"),
        Reply(id=1 << 32, value={"a": 1}),
    ],
)
def test_what_a_frontend_sends(message: Message) -> None:
    check_foreign(message, VOCAB)


@pytest.mark.parametrize(
    "wrong",
    [
        {"rid": "1"},
        {"rid": True},
        {"rid": 2**31},
        {"arrival": None},
        {"arrival": float("nan")},
        {"max_tokens": 0},
        {"max_tokens": 1.5},
        {"temperature": -1.0},
        {"temperature": float("inf")},
        {"top_p": 0.0},
        {"top_k": 2**40},
        {"min_p": 2},
        {"seed": 2**64},
        {"seed": -1},
        {"adapter": "1"},
        {"adapter": 1},
        {"adapter": "A" * 64},
        {"adapter_path": "p" * 5000},
        {"temperature": 1e39},
        {"stop_token_ids": [100]},
        {"stop_token_ids": 3},
        {"fork_of": "1"},
        {"siblings": np.arange(16_384, dtype=np.int32)},
        {"stop": ["a", 1]},
        {"stop": "text"},
        {"slo": ["fast"]},
        {"slo": [0.5]},
        {"slo": [-1.0, None, None, None]},
        {"sample_index": 2**31 - 1},
        {"ignore_eos": 1},
        {"tenant": 5},
        {"pooling": []},
        {"grammar": "a+"},
        {"block_hashes": np.zeros(31, np.uint8)},
    ],
    ids=str,
)
def test_impossible_values(wrong: dict[str, Any]) -> None:
    with pytest.raises(ValueError, match=next(iter(wrong))):
        check_foreign(replace(SUBMIT, **wrong), VOCAB)


@pytest.mark.parametrize("message", [StepResult(step=1), Outputs(rids=PROMPT, index=PROMPT, tokens=PROMPT)])
def test_messages_that_are_not_its_own(message: Message) -> None:
    with pytest.raises(ValueError, match="not for a frontend to send"):
        check_foreign(message, VOCAB)


@pytest.mark.parametrize(
    "message",
    [
        Reply(id="1"),  # type: ignore[arg-type]
        Reply(id=[1]),  # type: ignore[arg-type]
        Ask(id={}, verb="ping"),  # type: ignore[arg-type]
        Ask(id=1, verb=["ping"]),  # type: ignore[arg-type]
        replace(SUBMIT, temperature=1e308),
        replace(SUBMIT, slo=[0.5]),
        replace(SUBMIT, sample_index=2**31 - 2, siblings=np.array([2, 3], np.int32)),
        replace(SUBMIT, tenant=NESTED),
        replace(SUBMIT, grammar={"kind": "json", "text": NESTED}),
        replace(SUBMIT, rules={"allowed_ids": NESTED}),
        Ask(id=1, verb="pause_generation", arguments={"mode": NESTED}),
        Reply(id=1, value=NESTED),
        StepResult(step=1),
    ],
    ids=lambda message: type(message).__name__,
)
def test_who_sends_it_loses_his_link_and_nobody_notices(message: Message) -> None:
    """Asks and replies too, which the actor itself never sees."""
    engine = Engine()
    visitor = engine.visitor
    engine.deliver(visitor, message)
    assert not visitor.is_open
    assert visitor.sent == []
    engine.honest_stream(1)


@pytest.mark.parametrize(
    "rules", [{"allowed_ids": 7}, {"bias_ids": [1], "biases": [1e39]}, {"bad_words": [7]}, {"allowed_ids": [[1]]}]
)
def test_rules_that_no_frontend_would_make_end_their_request(rules: dict[str, Any]) -> None:
    engine = Engine()
    engine.deliver(engine.visitor, replace(SUBMIT, rules=rules))
    engine.turn()
    ((_, reason, _, error, *_),) = [end for outputs in engine.visitor.sent for end in outputs.ends]
    assert (reason, "sampling rules" in error) == ("error", True)
    engine.honest_stream(1)
