"""A long beginning that requests share is computed once."""

import sys

from vllm import LLM, SamplingParams


def main(model: str) -> None:
    llm = LLM(model=model, dtype="float32", max_model_len=256)
    llm.reset_prefix_cache()
    beginning = "There was a dog and a cat and a bird in the big house. " * 14
    params = SamplingParams(temperature=0, max_tokens=5)
    for end in ("The dog", "The cat"):
        (output,) = llm.generate(beginning + end, params, use_tqdm=False)
        print(output.num_cached_tokens > 0, output.outputs[0].text)


if __name__ == "__main__":
    main(sys.argv[1])
