"""Several texts of one prompt, with their places."""

import sys

from vllm import LLM, SamplingParams


def main(model: str) -> None:
    llm = LLM(model=model, dtype="float32", max_model_len=256)
    (output,) = llm.generate("Once", SamplingParams(n=4, temperature=1.0, seed=11, max_tokens=12), use_tqdm=False)
    print([sample.index for sample in output.outputs], [len(sample.token_ids) <= 12 for sample in output.outputs])
    print(len({sample.text for sample in output.outputs}) > 1)


if __name__ == "__main__":
    main(sys.argv[1])
