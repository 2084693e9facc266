"""Perplexities of two texts: from the log-probabilities of the prompts."""

import math
import sys

from vllm import LLM, SamplingParams


def main(model: str) -> None:
    llm = LLM(model=model, dtype="float32", max_model_len=256)
    texts = ["Once upon a time there was a little girl.", "Girl little a was there time a upon once."]
    for output in llm.generate(texts, SamplingParams(max_tokens=1, temperature=0, prompt_logprobs=0), use_tqdm=False):
        assert output.prompt_logprobs[0] is None
        chosen = [
            position[token].logprob
            for token, position in zip(output.prompt_token_ids[1:], output.prompt_logprobs[1:], strict=True)
        ]
        print(len(chosen), math.exp(-sum(chosen) / len(chosen)) < 10)


if __name__ == "__main__":
    main(sys.argv[1])
