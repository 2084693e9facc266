"""Log-probabilities of tokens that the program names."""

import sys

from vllm import LLM, SamplingParams


def main(model: str) -> None:
    llm = LLM(model=model, dtype="float32", max_model_len=256)
    params = SamplingParams(temperature=0, max_tokens=2, logprob_token_ids=[5, 7, 300])
    (output,) = llm.generate("The", params, use_tqdm=False)
    for position in output.outputs[0].logprobs:
        print({token: round(entry.logprob, 1) for token, entry in sorted(position.items())})


if __name__ == "__main__":
    main(sys.argv[1])
