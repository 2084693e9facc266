"""The three penalties, alone and together."""

import sys

from vllm import LLM, SamplingParams


def main(model: str) -> None:
    llm = LLM(model=model, dtype="float32", max_model_len=256)
    cases = [
        {"presence_penalty": 1.5},
        {"frequency_penalty": 2.0},
        {"repetition_penalty": 1.5},
        {"presence_penalty": 0.5, "frequency_penalty": 0.5, "repetition_penalty": 1.2},
    ]
    params = [SamplingParams(temperature=0, max_tokens=24, **case) for case in cases]
    for case, output in zip(cases, llm.generate(["The dog and the dog"] * 4, params, use_tqdm=False), strict=True):
        print(sorted(case), output.outputs[0].text)


if __name__ == "__main__":
    main(sys.argv[1])
