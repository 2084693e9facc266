"""`hf_overrides`: the model is the one of the changed config.json, as transformers computes it."""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch
from transformers import AutoConfig, AutoModelForCausalLM

from actorllm import LLM, SamplingParams
from actorllm.config import BUNDLED_MODELS

IDS = list(range(5, 60))
YARN = {"rope_type": "yarn", "factor": 2.0, "original_max_position_embeddings": 512, "rope_theta": 10_000.0}
LINEAR = {"rope_type": "linear", "factor": 2.0, "rope_theta": 10_000.0}


def logprobs_of_transformers(rope: dict[str, Any] | None) -> list[float]:
    """Of every token of IDS after the first, given those before it."""
    folder = BUNDLED_MODELS["storyteller"]
    config = AutoConfig.from_pretrained(folder)
    if rope is not None:
        config = type(config).from_dict(config.to_dict() | {"rope_parameters": copy.deepcopy(rope)})
    model = AutoModelForCausalLM.from_pretrained(folder, config=config, dtype=torch.float32).eval()
    with torch.inference_mode():
        rows = model(torch.tensor([IDS])).logits[0].log_softmax(-1)
    return [float(rows[i, token]) for i, token in enumerate(IDS[1:])]


def logprobs_of_engine(**arguments: Any) -> list[float]:
    with LLM(
        "storyteller", topology="inline", num_threads=1, max_num_seqs=2, dtype="float32", max_model_len=128, **arguments
    ) as llm:
        params = SamplingParams(max_tokens=1, prompt_logprobs=0, temperature=0)
        (output,) = llm.generate({"prompt_token_ids": IDS}, params, use_tqdm=False)
    assert output.prompt_logprobs is not None
    rows = output.prompt_logprobs[1:]
    return [row[token].logprob for row, token in zip(rows, IDS[1:], strict=True) if row is not None]


@pytest.mark.parametrize(
    ("rope", "overrides"),
    [
        (YARN, {"rope_parameters": YARN}),
        (YARN, {"rope_scaling": YARN}),
        (LINEAR, {"rope_parameters": LINEAR}),
        (LINEAR, {"rope_scaling": {"type": "linear", "rope_type": "linear", "factor": 2.0}}),
    ],
    ids=["yarn", "yarn by its older name", "linear", "linear by its older name"],
)
def test_rope_scaling(rope: dict[str, Any], overrides: dict[str, Any]) -> None:
    expected = logprobs_of_transformers(rope)
    assert logprobs_of_engine(hf_overrides=overrides) == pytest.approx(expected, abs=2e-4)
    assert logprobs_of_transformers(None) != pytest.approx(expected, abs=2e-2)  # the change is seen
