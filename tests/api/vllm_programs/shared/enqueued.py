"""Requests are given first and awaited later."""

import sys

from vllm import LLM, SamplingParams


def main(model: str) -> None:
    llm = LLM(model=model, dtype="float32", max_model_len=256)
    ids = llm.enqueue(["The dog", "The cat"], SamplingParams(temperature=0, max_tokens=4), use_tqdm=False)
    outputs = llm.wait_for_completion(use_tqdm=False)
    print(len(ids), sorted(output.outputs[0].text for output in outputs))


if __name__ == "__main__":
    main(sys.argv[1])
