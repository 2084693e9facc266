"""`Sequence` as a policy's author reads it: what the caller said of a request, in the types of the front doors."""

from __future__ import annotations

from typing import Any

import numpy as np

from actorllm import SLO
from actorllm.messages import Submit
from actorllm.scheduling.sequence import Sequence


def sequence_of(**said: Any) -> Sequence:
    prompt = np.arange(5, dtype=np.int32)
    submit = Submit(rid=1, arrival=10.0, prompt=prompt, max_tokens=9, seed=0, **said)
    return Sequence((0, 1), submit, 0, prompt, 14, frozenset(), frozenset())


def test_what_was_promised_is_an_objective_made_once() -> None:
    slo = SLO(ttft=0.5, tpot=0.05, ttft_per_prompt_token=0.001)
    sequence = sequence_of(slo=slo.to_fields())
    assert sequence.slo == slo
    assert sequence.slo is sequence.slo
    assert sequence.submit.slo == slo.to_fields()
    assert sequence_of(slo=[None, 0.05, None, None]).slo == SLO(tpot=0.05)
    assert sequence_of().slo is None


def test_what_the_caller_said_is_read_without_the_message() -> None:
    sequence = sequence_of(priority=-3, tenant="a", is_latency_sensitive=True, type_info="chat")
    assert (sequence.priority, sequence.tenant, sequence.arrival) == (-3, "a", 10.0)
    assert (sequence.is_latency_sensitive, sequence.type_info) == (True, "chat")
    silent = sequence_of()
    assert (silent.priority, silent.tenant, silent.is_latency_sensitive, silent.type_info) == (0, None, False, None)
