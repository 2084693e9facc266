"""Requests with other salts share nothing."""

import sys

from vllm import LLM, SamplingParams


def main(model: str) -> None:
    llm = LLM(model=model, dtype="float32", max_model_len=256)
    text = "There was a boat and a sea and a fish in the big sea. " * 14
    params = SamplingParams(temperature=0, max_tokens=3)
    for salt in ("one", "two", "one"):
        (output,) = llm.generate({"prompt": text, "cache_salt": salt}, params, use_tqdm=False)
        print(salt, output.num_cached_tokens > 0, output.outputs[0].text)


if __name__ == "__main__":
    main(sys.argv[1])
