"""A token whose logit is lowered, and raised."""

import sys

from vllm import LLM, SamplingParams


def main(model: str) -> None:
    llm = LLM(model=model, dtype="float32", max_model_len=256)
    (plain,) = llm.generate("Once upon a time", SamplingParams(temperature=0, max_tokens=6), use_tqdm=False)
    first = plain.outputs[0].token_ids[0]
    for bias in (-100.0, 100.0):
        params = SamplingParams(temperature=0, max_tokens=6, logit_bias={first: bias})
        print(llm.generate("Once upon a time", params, use_tqdm=False)[0].outputs[0].text)


if __name__ == "__main__":
    main(sys.argv[1])
