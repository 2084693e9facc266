"""Log-probabilities as columns instead of as a dictionary for each position."""

import sys

from vllm import LLM, SamplingParams
from vllm.logprobs import FlatLogprobs


def main(model: str) -> None:
    llm = LLM(model=model, dtype="float32", max_model_len=256)
    params = SamplingParams(temperature=0, max_tokens=3, logprobs=2, flat_logprobs=True)
    (output,) = llm.generate("A little", params, use_tqdm=False)
    found = output.outputs[0].logprobs
    print(isinstance(found, FlatLogprobs), len(found), len(found.token_ids), found.start_indices[0])
    for position in found:
        print({token: (entry.rank, entry.decoded_token) for token, entry in position.items()})


if __name__ == "__main__":
    main(sys.argv[1])
