"""An engine as TRL's `rollout_func`: the weights are the trainer's, and completions come in the order of their prompts."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from transformers import AutoModelForCausalLM, AutoTokenizer

from actorllm import LLM
from actorllm.training.trl_rollouts import TRLRollouts
from tests.model.updates.weight_folders import ENGINE, PROMPT, STORYTELLER, changed

OTHER = "One day a little girl named"


@pytest.fixture(scope="module")
def llm() -> Iterator[LLM]:
    with LLM("storyteller", topology="inline", **ENGINE) as engine:
        yield engine


def trainer_of(model: Any, step: int, **arguments: Any) -> Any:
    """What of a trainer is looked at."""
    args = {"max_completion_length": 6, "temperature": 1.0, "top_p": 1.0, "top_k": 0, "seed": 3, **arguments}
    state = SimpleNamespace(global_step=step)
    return SimpleNamespace(
        model=model, state=state, args=SimpleNamespace(**args), accelerator=SimpleNamespace(unwrap_model=lambda m: m)
    )


def test_completions_are_of_the_weights_of_the_step_and_tell_their_log_probabilities(llm: LLM) -> None:
    model = AutoModelForCausalLM.from_pretrained(STORYTELLER, dtype=torch.float32)
    rollouts = TRLRollouts(llm, ignore_eos=True)
    prompts = [PROMPT, PROMPT, PROMPT, OTHER, OTHER]
    first = rollouts(prompts, trainer_of(model, 0))
    assert llm.weight_version == "0"
    again = rollouts(prompts, trainer_of(model, 0))
    assert first["completion_ids"] == again["completion_ids"], "one step is one draw"
    model.load_state_dict({**model.state_dict(), **changed(1)}, strict=False)
    told = rollouts(prompts, trainer_of(model, 1))
    assert llm.weight_version == "1"
    assert told["completion_ids"] != first["completion_ids"]
    encoded = [AutoTokenizer.from_pretrained(STORYTELLER)(prompt)["input_ids"] for prompt in prompts]
    assert told["prompt_ids"] == encoded
    assert len({tuple(ids) for ids in told["completion_ids"][:3]}) > 1, "siblings differ"
    for prompt, ids, logprobs in zip(told["prompt_ids"], told["completion_ids"], told["logprobs"], strict=True):
        assert len(ids) == len(logprobs) == 6
        with torch.no_grad():
            logits = model(torch.tensor([[*prompt, *ids]])).logits[0, len(prompt) - 1 : -1]
        wanted = logits.log_softmax(-1)[torch.arange(6), torch.tensor(ids)]
        torch.testing.assert_close(torch.tensor(logprobs), wanted, atol=1e-3, rtol=1e-3)


def test_conversations_are_rendered_and_arguments_count(llm: LLM) -> None:
    model = AutoModelForCausalLM.from_pretrained(STORYTELLER, dtype=torch.float32)
    chats = [[{"role": "user", "content": text}] for text in ("dog", "dog", "cat")]
    told = TRLRollouts(llm)(chats, trainer_of(model, 0, generation_kwargs={"max_tokens": 2}, min_p=0.1))
    assert [len(ids) <= 2 for ids in told["completion_ids"]] == [True] * 3
    assert told["prompt_ids"][0] == told["prompt_ids"][1] != told["prompt_ids"][2]


@pytest.mark.slow(reason="two steps of TRL, where it is installed")
def test_a_trainer_of_trl_trains_with_it(llm: LLM, tmp_path: Path) -> None:
    trl = pytest.importorskip("trl")
    datasets = pytest.importorskip("datasets")
    model = AutoModelForCausalLM.from_pretrained(STORYTELLER, dtype=torch.float32)
    tokenizer = AutoTokenizer.from_pretrained(STORYTELLER)
    if tokenizer.pad_token is None:
        tokenizer.pad_token = tokenizer.eos_token
    before = model.model.norm.weight.detach().clone()
    arguments = trl.GRPOConfig(
        output_dir=str(tmp_path),
        per_device_train_batch_size=8,
        num_generations=4,
        max_completion_length=8,
        max_steps=3,
        learning_rate=1e-3,
        logging_steps=1,
        report_to=[],
        use_cpu=True,
        bf16=False,
        save_strategy="no",
    )
    trainer = trl.GRPOTrainer(
        model=model,
        reward_funcs=lambda completions, **_: [float(text.count("a")) for text in completions],
        args=arguments,
        train_dataset=datasets.Dataset.from_list([{"prompt": PROMPT}, {"prompt": OTHER}] * 8),
        processing_class=tokenizer,
        rollout_func=TRLRollouts(llm),
    )
    trainer.train()
    assert trainer.state.global_step == 3
    assert llm.weight_version == "2", "the last step was sampled with what two steps have made"
    assert not torch.equal(model.model.norm.weight, before)
