"""Parameters of a request over HTTP, where None means the default."""

import sys

from vllm import SamplingParams


def main(model: str) -> None:
    params = SamplingParams.from_optional(n=None, temperature=0.2, top_p=None, logit_bias={"5": 1.5}, max_tokens=3)
    print(params.n, params.temperature, params.top_p, params.logit_bias, params.max_tokens)


if __name__ == "__main__":
    main(sys.argv[1])
