"""Words that do not appear."""

import sys

from vllm import LLM, SamplingParams


def main(model: str) -> None:
    llm = LLM(model=model, dtype="float32", max_model_len=256)
    for words in (None, ["little"], ["there", "was"]):
        params = SamplingParams(temperature=0, max_tokens=10, bad_words=words)
        print(words, llm.generate("Once upon a time", params, use_tqdm=False)[0].outputs[0].text)


if __name__ == "__main__":
    main(sys.argv[1])
