"""Logits processors of the application on the emulated device: the tokens are those of the CPU."""

from __future__ import annotations

from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import torch

from actorllm import SamplingParams
from actorllm.model.processors import told_of
from actorllm.types.logits_processors.travel import encode_params, encode_rows
from tests.model.cuda.rules import rules_of
from tests.model.cuda.twins import Twins

PATH = "tests.api.logits_processors.changers"


def processed(slots: dict[int, dict[str, Any]], **more: Any) -> dict[str, Any]:
    """The field of a plan with parameters for some new slots."""
    texts = {slot: encode_params(SamplingParams(extra_args=extra, **more)) for slot, extra in slots.items()}
    return {"new_processed": encode_rows(texts.items())}


def test_the_device_gives_the_tokens_of_the_cpu(make_twins: Callable[..., Twins]) -> None:
    """With a row that fails, one that nothing is left for, other rules, log-probabilities, and a row that they do not see."""
    twins = make_twins(logits_processors=[f"{PATH}:NoRepeats", f"{PATH}:Target"])
    prompt = [3, 1, 4, 1, 5]
    twins.add(0, prompt, temperature=0.9, seed=1)
    twins.add(1, prompt, temperature=0.0)
    twins.add(2, prompt, temperature=1.0, seed=2)
    extras: dict[int, dict[str, Any]] = {0: {"no_repeats": True}, 1: {"target": 42}}
    rules = rules_of(1, num_logprobs=2, repetition_penalty=1.3)
    result = twins.step({0: 5, 1: 5, 2: 5}, decode=[], **processed(extras), **rules)
    assert not result.nonfinite_rows.size
    twins.add(3, prompt, temperature=0.5, seed=9)
    twins.add(4, prompt)
    twins.step(
        {3: 5, 4: 5},
        decode=[0, 1, 2],
        **processed({3: {"target": -1}, 4: {"target": 7}}),
        **rules_of(4, allowed_ids=(8, 9)),
    )
    tokens = []
    for _ in range(2):
        result = twins.step(decode=[0, 1, 2, 3, 4])
        tokens.append(result.tokens.tolist())
    assert tokens[0][1] == 42
    assert result.nonfinite_rows.tolist() == [4], "the two rules of this row leave nothing"
    twins.remove(4)
    twins.step(decode=[0, 1, 2, 3])
    result = twins.step(decode=[0, 1, 2, 3])
    assert result.nonfinite_rows.tolist() == [3]
    assert b"no token -1" in result.errors.tobytes()
    twins.remove(3)
    assert not twins.step(decode=[0, 1, 2]).nonfinite_rows.size


def test_a_runner_without_processors_has_none(make_twins: Callable[..., Twins]) -> None:
    twins = make_twins()
    assert twins.runner.processors is None
    assert twins.cpu_runner.processors is None


def test_what_an_object_of_the_application_is_told(make_twins: Callable[..., Twins]) -> None:
    twins = make_twins(logits_processors=[f"{PATH}:NoRepeats"], max_num_seqs=5)
    assert twins.runner.processors is not None
    told: SimpleNamespace = told_of(twins.runner.config, torch.float32)
    assert told.model_config.get_vocab_size() == 300
    assert told.scheduler_config.max_num_seqs == 5
