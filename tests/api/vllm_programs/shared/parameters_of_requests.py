"""Parameters read, copied and changed."""

import sys

from vllm import SamplingParams


def main(model: str) -> None:
    params = SamplingParams(n=2, temperature=0.5, top_p=0.9, stop="x", max_tokens=7, seed=3)
    copy = params.clone()
    copy.max_tokens = 9
    print(params.n, params.temperature, params.top_p, params.top_k, params.stop, params.seed)
    print(params.max_tokens, copy.max_tokens, params.logprobs, params.min_tokens, params.output_kind.name)


if __name__ == "__main__":
    main(sys.argv[1])
