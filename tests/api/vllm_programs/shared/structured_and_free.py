"""Structured and free requests in one batch."""

import sys

from vllm import LLM, SamplingParams
from vllm.sampling_params import StructuredOutputsParams


def main(model: str) -> None:
    llm = LLM(model=model, dtype="float32", max_model_len=256)
    yes_or_no = StructuredOutputsParams(choice=["yes", "no"])
    params = [
        SamplingParams(temperature=0, max_tokens=8),
        SamplingParams(temperature=0, max_tokens=8, structured_outputs=yes_or_no),
    ]
    for output in llm.generate(["The dog said", "The dog said"], params, use_tqdm=False):
        print(output.outputs[0].text)


if __name__ == "__main__":
    main(sys.argv[1])
