"""A prompt that does not fit, and a program that goes on."""

import sys

from vllm import LLM, SamplingParams
from vllm.exceptions import VLLMValidationError


def main(model: str) -> None:
    llm = LLM(model=model, dtype="float32", max_model_len=256)
    params = SamplingParams(temperature=0, max_tokens=3)
    try:
        llm.generate({"prompt_token_ids": [5] * 300}, params, use_tqdm=False)
    except VLLMValidationError as error:
        print("refused", "256" in str(error))
    print(llm.generate("The", params, use_tqdm=False)[0].outputs[0].text)


if __name__ == "__main__":
    main(sys.argv[1])
