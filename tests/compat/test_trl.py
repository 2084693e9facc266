"""An engine as what TRL's `GRPOTrainer` samples with: its weights at each step, its prompts in groups, its log-probabilities."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from transformers import AutoModelForCausalLM

from actorllm import LLM
from actorllm.compat.trl import Rollouts
from actorllm.config import BUNDLED_MODELS
from actorllm.errors import InvalidParameterError

pytestmark = pytest.mark.usefixtures("computed_as_asked")

ROOT = Path(__file__).parents[2]
TEMPERATURE = 0.7


class Trainer:
    """What a `GRPOTrainer` has that is used, of its release 1.16."""

    def __init__(self) -> None:
        self.model = AutoModelForCausalLM.from_pretrained(BUNDLED_MODELS["storyteller"], dtype=torch.float32).eval()
        self.accelerator = SimpleNamespace(unwrap_model=lambda model: model)
        self.state = SimpleNamespace(global_step=0)
        self.args = SimpleNamespace(
            max_completion_length=8, temperature=TEMPERATURE, top_p=1.0, top_k=0, min_p=None, repetition_penalty=1.0,
            generation_kwargs={"seed": 3},
        )  # fmt: skip

    def learn(self) -> None:
        """A step that changes all weights."""
        generator = torch.Generator().manual_seed(self.state.global_step)
        with torch.no_grad():
            for parameter in self.model.parameters():
                parameter.mul_(1 + 0.05 * torch.randn(parameter.shape, generator=generator))
        self.state.global_step += 1

    def logprobs(self, prompt: list[int], completion: list[int]) -> list[float]:
        """As the trainer computes them."""
        with torch.no_grad():
            logits = self.model(torch.tensor([prompt + completion])).logits[0, len(prompt) - 1 : -1] / TEMPERATURE
        return logits.log_softmax(-1).gather(1, torch.tensor(completion)[:, None])[:, 0].tolist()


@pytest.fixture(scope="module")
def llm() -> Iterator[LLM]:
    with LLM(
        "storyteller", dtype="float32", topology="inline", num_threads=1, logprobs_mode="processed_logprobs"
    ) as one:
        yield one


def assert_fits(found: dict[str, list[Any]], trainer: Trainer) -> None:
    """Importance ratios are 1: what was sampled is of the weights that the trainer has."""
    for prompt, completion, told in zip(*(found[k] for k in ("prompt_ids", "completion_ids", "logprobs")), strict=True):
        assert len(told) == len(completion) == 8
        assert told == pytest.approx(trainer.logprobs(prompt, completion), abs=2e-4)


def test_samples_are_of_the_weights_that_the_trainer_has(llm: LLM) -> None:
    trainer, rollouts = Trainer(), Rollouts(llm, ignore_eos=True)
    prompts = ["Once upon a time"] * 4 + ["The cat"] * 4
    first = rollouts(prompts, trainer)
    assert llm.weight_version == "step-0"
    assert [len(ids) for ids in first.values()] == [8, 8, 8]
    assert first["prompt_ids"][0] == first["prompt_ids"][3] != first["prompt_ids"][4]
    assert len({tuple(ids) for ids in first["completion_ids"][:4]}) == 4, "each draws for itself"
    assert_fits(first, trainer)
    again = rollouts(prompts, trainer)
    assert again["completion_ids"] == first["completion_ids"]
    trainer.learn()
    second = rollouts(prompts, trainer)
    assert llm.weight_version == "step-1"
    assert second["completion_ids"] != first["completion_ids"]
    assert_fits(second, trainer)


def test_another_trainer_at_the_same_step_brings_its_weights(llm: LLM) -> None:
    first, other, rollouts = Trainer(), Trainer(), Rollouts(llm, ignore_eos=True)
    rollouts(["Once upon a time"], first)
    other.learn()
    other.state.global_step = 0
    assert_fits(rollouts(["Once upon a time"], other), other)
    assert rollouts([], other) == {"prompt_ids": [], "completion_ids": [], "logprobs": []}


def test_conversations_are_rendered(llm: LLM) -> None:
    conversation = [{"role": "user", "content": "Tell me of a cat."}]
    rollouts = Rollouts(llm, ignore_eos=True)
    found = rollouts([conversation] * 2, Trainer())
    (output,) = llm.chat([conversation], use_tqdm=False)
    assert found["prompt_ids"] == [output.prompt_token_ids] * 2


def test_what_a_trainer_cannot_bring_is_told_by_name(llm: LLM) -> None:
    rollouts, sharded, adapted = Rollouts(llm), Trainer(), Trainer()
    sharded.model = SimpleNamespace(state_dict=lambda: {"model.norm.weight": torch.zeros(0)})
    with pytest.raises(InvalidParameterError, match=r"model\.norm\.weight is in parts"):
        rollouts(["The cat"], sharded)
    adapted.model = SimpleNamespace(merge_adapter=None)
    with pytest.raises(InvalidParameterError, match="adapters of peft"):
        rollouts(["The cat"], adapted)


def test_logprobs_before_temperature_are_refused() -> None:
    with (
        LLM("storyteller", topology="inline", num_threads=1) as raw,
        pytest.raises(InvalidParameterError, match="build the engine with logprobs_mode='processed_logprobs'"),
    ):
        Rollouts(raw)


@pytest.mark.slow(reason="imports TRL, and trains")
@pytest.mark.timeout(600)
def test_trl_trains_by_it() -> None:
    pytest.importorskip("trl", reason="TRL is not installed (pip install trl)")
    result = subprocess.run(
        [sys.executable, str(ROOT / "examples" / "trl_grpo.py"), "12"],
        capture_output=True,
        text=True,
        timeout=550,
        check=False,
        env=os.environ | {"PYTHONPATH": str(ROOT)},
    )
    assert result.returncode == 0, result.stderr
    found = re.search(r"^step-11 sampled last; rewards: ([\d. ]+)$", result.stdout, re.MULTILINE)
    assert found is not None, result.stdout
    rewards = [float(reward) for reward in found[1].split()]
    assert len(rewards) == 12
    assert min(rewards[-3:]) > max(rewards[:3])
