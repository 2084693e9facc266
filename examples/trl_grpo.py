"""Train the storyteller to write longer words, by TRL's GRPOTrainer: the engine samples (`actorllm.compat.trl`), TRL learns.

Needs TRL (`pip install trl`). Prints the reward of each step, and which version of the weights sampled it.

    python examples/trl_grpo.py [number of steps]
"""

from __future__ import annotations

import os
import sys
import tempfile
from typing import Any

os.environ.setdefault("TRL_EXPERIMENTAL_SILENCE", "1")  # TRL may change the argument that is used here

from datasets import Dataset
from transformers import AutoModelForCausalLM, AutoTokenizer
from trl import GRPOConfig, GRPOTrainer

from actorllm import LLM
from actorllm.compat.trl import Rollouts
from actorllm.config import BUNDLED_MODELS

FOLDER = BUNDLED_MODELS["storyteller"]
PROMPTS = ["Once upon a time there was a", "One day a little girl named", "The dog and the cat", "In the forest"]


def mean_length(completions: list[str], **_: Any) -> list[float]:
    """The reward of each text: letters of a word."""
    return [sum(map(len, text.split())) / max(1, len(text.split())) for text in completions]


def main(num_steps: int = 12) -> list[float]:
    """The mean reward of each step."""
    with tempfile.TemporaryDirectory() as folder:
        config = GRPOConfig(
            folder, max_steps=num_steps, learning_rate=3e-4, lr_scheduler_type="constant", beta=0.0, use_cpu=True, bf16=False,
            per_device_train_batch_size=32, num_generations=16, max_completion_length=24,
            report_to=[], save_strategy="no", logging_steps=1, disable_tqdm=True,
        )  # fmt: skip
        with LLM(str(FOLDER), dtype="float32", topology="inline", logprobs_mode="processed_logprobs") as llm:
            trainer = GRPOTrainer(
                AutoModelForCausalLM.from_pretrained(FOLDER, dtype="float32"), mean_length, config,
                train_dataset=Dataset.from_dict({"prompt": PROMPTS * num_steps}),
                processing_class=AutoTokenizer.from_pretrained(FOLDER), rollout_func=Rollouts(llm, ignore_eos=True),
            )  # fmt: skip
            trainer.train()
            rewards = [one["reward"] for one in trainer.state.log_history if "reward" in one]
            print(f"{llm.weight_version} sampled last; rewards: {' '.join(f'{reward:.2f}' for reward in rewards)}")
    return rewards


if __name__ == "__main__":
    main(*map(int, sys.argv[1:]))
