"""Requests with priorities all end; the answers come in the order of the prompts."""

import sys

from vllm import LLM, SamplingParams


def main(model: str) -> None:
    llm = LLM(model=model, dtype="float32", max_model_len=256)
    params = SamplingParams(temperature=0, max_tokens=5)
    prompts = ["One", "Two", "Three"]
    for output in llm.generate(prompts, params, use_tqdm=False, priority=[2, 1, 0]):
        print(output.prompt, output.outputs[0].text)


if __name__ == "__main__":
    main(sys.argv[1])
