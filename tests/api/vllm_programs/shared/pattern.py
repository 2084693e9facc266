"""A structured answer: a regular expression."""

import re
import sys

from vllm import LLM, SamplingParams
from vllm.sampling_params import StructuredOutputsParams


def main(model: str) -> None:
    llm = LLM(model=model, dtype="float32", max_model_len=256)
    pattern = r"[0-9]{4}-[0-9]{2}-[0-9]{2}"
    params = SamplingParams(temperature=0, max_tokens=40, structured_outputs=StructuredOutputsParams(regex=pattern))
    text = llm.generate("The day is ", params, use_tqdm=False)[0].outputs[0].text
    print(re.fullmatch(pattern, text) is not None)


if __name__ == "__main__":
    main(sys.argv[1])
