"""A structured answer: one of some words."""

import sys

from vllm import LLM, SamplingParams
from vllm.sampling_params import StructuredOutputsParams


def main(model: str) -> None:
    llm = LLM(model=model, dtype="float32", max_model_len=256)
    choice = StructuredOutputsParams(choice=["happy", "sad"])
    params = SamplingParams(temperature=0, max_tokens=10, structured_outputs=choice)
    for output in llm.generate(["She smiled. She was", "He cried. He was"], params, use_tqdm=False):
        print(output.prompt, output.outputs[0].text, output.outputs[0].finish_reason)


if __name__ == "__main__":
    main(sys.argv[1])
