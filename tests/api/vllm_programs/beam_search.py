"""Beam search, offline."""

import sys

from vllm import LLM, TextPrompt
from vllm.sampling_params import BeamSearchParams


def main() -> None:
    llm = LLM(model=sys.argv[1])
    params = BeamSearchParams(beam_width=3, max_tokens=8)
    for output in llm.beam_search([TextPrompt(prompt="Once upon a time"), TextPrompt(prompt="The dog")], params):
        for sequence in output.sequences:
            print(round(sequence.cum_logprob, 3), repr(sequence.text))
        assert len(output.sequences) == 3
        assert sorted((s.cum_logprob for s in output.sequences), reverse=True) == [
            s.cum_logprob for s in output.sequences
        ]


if __name__ == "__main__":
    main()
