"""Mistakes are errors before anything runs."""

import sys

from vllm import SamplingParams
from vllm.exceptions import VLLMValidationError


def main(model: str) -> None:
    for wrong in (
        {"temperature": -1},
        {"top_p": 0},
        {"n": 0},
        {"max_tokens": 0},
        {"logprobs": -5},
        {"stop": ["a", ""]},
    ):
        try:
            SamplingParams(**wrong)
        except VLLMValidationError:
            print(wrong, "refused")


if __name__ == "__main__":
    main(sys.argv[1])
