"""Beam search of two widths."""

import sys

from vllm import LLM
from vllm.sampling_params import BeamSearchParams


def main(model: str) -> None:
    llm = LLM(model=model, dtype="float32", max_model_len=256)
    for width in (1, 3):
        (output,) = llm.beam_search([{"prompt": "Once upon"}], BeamSearchParams(beam_width=width, max_tokens=5))
        for sequence in output.sequences:
            print(width, sequence.text, round(sequence.cum_logprob, 1))


if __name__ == "__main__":
    main(sys.argv[1])
