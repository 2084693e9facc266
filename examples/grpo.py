"""Train the storyteller to say a word more often, by GRPO: the engine samples, transformers learns.

After each step the engine gets the new weights through shared memory. Prints the reward, which rises.

    python examples/grpo.py [word] [number of steps]
"""

from __future__ import annotations

import sys

import torch
from torch.nn.functional import cross_entropy
from transformers import AutoModelForCausalLM

from actorllm import LLM, RequestOutput, SamplingParams
from actorllm.config import BUNDLED_MODELS

PROMPTS = ["Once upon a time there was a", "One day a little girl named", "The dog and the cat"]
GROUP, NUM_TOKENS = 24, 32
"""Stories of each prompt, and tokens of a story."""


def learn(policy: torch.nn.Module, optimizer: torch.optim.Optimizer, outputs: list[RequestOutput], word: str) -> float:
    """One step of GRPO: stories with more of the word than others of their group become likelier. Returns the mean reward."""
    rewards = torch.tensor([[float(one.text.lower().count(word)) for one in output.outputs] for output in outputs])
    advantages = (rewards - rewards.mean(1, keepdim=True)) / (rewards.std(1, keepdim=True) + 1e-4)
    optimizer.zero_grad()
    for output, advantage in zip(outputs, advantages, strict=True):
        start = len(output.prompt_token_ids)
        ids = torch.tensor([[*output.prompt_token_ids, *one.token_ids] for one in output.outputs])
        logits = policy(ids).logits[:, start - 1 : -1]
        loss = cross_entropy(logits.transpose(1, 2), ids[:, start:], reduction="none").mean(1)
        (loss * advantage).mean().backward()
    torch.nn.utils.clip_grad_norm_(policy.parameters(), 1.0)
    optimizer.step()
    return float(rewards.mean())


def main(word: str = "happy", num_steps: int = 12) -> list[float]:
    """The mean reward of each step."""
    policy = AutoModelForCausalLM.from_pretrained(BUNDLED_MODELS["storyteller"], dtype=torch.float32)
    optimizer = torch.optim.AdamW(policy.parameters(), lr=2e-4, weight_decay=0.0)
    rewards = []
    with LLM("storyteller", dtype="float32", topology="inline") as llm:
        for step in range(num_steps):
            params = SamplingParams(n=GROUP, temperature=1.0, max_tokens=NUM_TOKENS, ignore_eos=True, seed=step)
            outputs = llm.generate(PROMPTS, params, use_tqdm=False)
            rewards.append(learn(policy, optimizer, outputs, word))
            print(f"weights {llm.weight_version}: {rewards[-1]:.2f} times {word!r} in a story", flush=True)
            llm.update_weights_from_tensors(policy.state_dict(), version=str(step + 1))
    return rewards


if __name__ == "__main__":
    main(*sys.argv[1:2], *map(int, sys.argv[2:3]))
