"""Prompts that are pooled on a device: without a head for text, and with heads for labels."""

from __future__ import annotations

import weakref
from collections.abc import Callable
from typing import Any

import pytest
import torch

from actorllm.errors import EngineError
from actorllm.messages import POOLING_CODES
from tests.model.cuda.twins import Twins, prompt

HEADS: dict[str, dict[str, Any]] = {
    "Qwen3ForCausalLM": {},
    "Qwen3ForSequenceClassification": {"id2label": {"0": "a", "1": "b", "2": "c"}},
    "Qwen3ForTokenClassification": {"num_labels": 5},
    "Qwen2ForProcessRewardModel": {},
}
SIZES = (64, 3, 5, 2)
"""Of the vectors or scores of each."""


@pytest.mark.parametrize(("architecture", "size"), list(zip(HEADS, SIZES, strict=True)))
def test_vectors_and_scores_are_the_cpus(make_twins: Callable[..., Twins], architecture: str, size: int) -> None:
    twins = make_twins({"architectures": [architecture], **HEADS[architecture]}, runner="pooling")
    twins.add(0, prompt(70, 1), pooling=POOLING_CODES["last"])
    twins.add(1, prompt(9, 2), pooling=POOLING_CODES["all"])
    twins.add(2, prompt(5, 3), pooling=POOLING_CODES["mean"])
    twins.step({0: 40, 1: 9}, decode=[])
    result = twins.step({0: 30, 2: 5}, decode=[])
    assert result.vector_rows.tolist() == [0, 1]
    assert result.vectors.size == 2 * size
    assert result.tokens.size == 0
    twins.remove(0, 1, 2)
    twins.add(3, prompt(3, 4), pooling=POOLING_CODES["all"])
    assert twins.step({3: 3}, decode=[]).vectors.size == 3 * size


def test_a_model_that_pools_has_no_head_for_text_and_checks_its_states(make_twins: Callable[..., Twins]) -> None:
    twins = make_twins({"architectures": ["Qwen3ForSequenceClassification"]}, runner="pooling")
    runner = twins.runner
    decoder: Any = runner.model
    assert decoder.lm_head is None
    assert runner.weight_bytes < make_twins().runner.weight_bytes
    assert not runner.wants_to_record
    assert runner._logprobs_bytes == 0
    runner.warm_up()
    runner.check_itself()
    with torch.inference_mode():
        decoder.layers[0].down.weight.fill_(torch.nan)
    with pytest.raises(EngineError, match="states are not finite, whatever the tokens"):
        runner.check_itself()


def test_a_head_goes_with_its_runner(make_twins: Callable[..., Twins]) -> None:
    runner = make_twins({"architectures": ["Qwen2ForProcessRewardModel"]}, runner="pooling").runner
    assert runner._label_head is not None
    head = weakref.ref(runner._label_head)
    runner.close()
    assert head() is None
