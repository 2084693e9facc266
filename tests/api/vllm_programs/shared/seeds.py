"""The same seed draws the same text."""

import sys

from vllm import LLM, SamplingParams


def main(model: str) -> None:
    llm = LLM(model=model, dtype="float32", max_model_len=256)

    def text(seed: int) -> str:
        params = SamplingParams(temperature=1.0, top_p=0.95, top_k=50, seed=seed, max_tokens=20)
        return llm.generate("A bird", params, use_tqdm=False)[0].outputs[0].text

    print(text(1) == text(1), text(1) == text(2))


if __name__ == "__main__":
    main(sys.argv[1])
