"""Requests that end at tokens, and not before a least length."""

import sys

from vllm import LLM, SamplingParams


def main(model: str) -> None:
    llm = LLM(model=model, dtype="float32", max_model_len=256)
    (plain,) = llm.generate("The sun", SamplingParams(temperature=0, max_tokens=12), use_tqdm=False)
    stop = plain.outputs[0].token_ids[3]
    for least in (0, 6):
        params = SamplingParams(temperature=0, max_tokens=12, stop_token_ids=[stop], min_tokens=least)
        (output,) = llm.generate("The sun", params, use_tqdm=False)
        print(list(output.outputs[0].token_ids), output.outputs[0].stop_reason)


if __name__ == "__main__":
    main(sys.argv[1])
