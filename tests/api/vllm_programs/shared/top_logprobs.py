"""The five likeliest tokens at each position."""

import sys

from vllm import LLM, SamplingParams


def main(model: str) -> None:
    llm = LLM(model=model, dtype="float32", max_model_len=256)
    (output,) = llm.generate("Once upon", SamplingParams(temperature=0, max_tokens=4, logprobs=5), use_tqdm=False)
    for position in output.outputs[0].logprobs:
        ranked = sorted(position.values(), key=lambda entry: entry.rank)
        print([(entry.rank, entry.decoded_token, round(entry.logprob, 1)) for entry in ranked])
    print(round(output.outputs[0].cumulative_logprob, 1))


if __name__ == "__main__":
    main(sys.argv[1])
