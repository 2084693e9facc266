"""Log-probabilities of what tokens were drawn from, as trainers want them for importance weights."""

import math
import sys

from vllm import LLM, SamplingParams


def main(model: str) -> None:
    llm = LLM(model=model, dtype="float32", max_model_len=256, logprobs_mode="processed_logprobs")
    greedy = SamplingParams(temperature=0, max_tokens=4, logprobs=0)
    for output in llm.generate(["Once upon a time", "The king"], greedy, use_tqdm=False):
        own = [
            step[token].logprob
            for token, step in zip(output.outputs[0].token_ids, output.outputs[0].logprobs, strict=True)
        ]
        print(output.outputs[0].token_ids, [round(value, 2) for value in own])
    # The only token that is left is certain, and what is taken out cannot come.
    narrow = SamplingParams(temperature=0.7, top_k=1, max_tokens=3, logprobs=2)
    (output,) = llm.generate("Once upon a time", narrow, use_tqdm=False)
    for step in output.outputs[0].logprobs:
        print(sorted((round(entry.logprob, 3), math.isinf(entry.logprob)) for entry in step.values())[-1])
    pair = SamplingParams(temperature=0.5, max_tokens=1, logprobs=2, allowed_token_ids=[300, 301], seed=1)
    (output,) = llm.generate("Once upon a time", pair, use_tqdm=False)
    print({token: round(entry.logprob, 2) for token, entry in sorted(output.outputs[0].logprobs[0].items())})


if __name__ == "__main__":
    main(sys.argv[1])
