"""Filters that leave one token draw what the greedy choice takes."""

import sys

from vllm import LLM, SamplingParams


def main(model: str) -> None:
    llm = LLM(model=model, dtype="float32", max_model_len=256)
    cases = [{"top_k": 1}, {"top_p": 1e-6}, {"min_p": 1.0}]
    params = [SamplingParams(temperature=1.3, max_tokens=10, **case) for case in cases]
    greedy = llm.generate("The moon", SamplingParams(temperature=0, max_tokens=10), use_tqdm=False)[0]
    for output in llm.generate(["The moon"] * 3, params, use_tqdm=False):
        print(output.outputs[0].token_ids == greedy.outputs[0].token_ids, output.outputs[0].text)


if __name__ == "__main__":
    main(sys.argv[1])
