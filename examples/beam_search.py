"""The most likely ways to go on, and several drawn ones beside them.

python examples/beam_search.py [PROMPT]
"""

import sys

from actorllm import LLM, BeamSearchParams, SamplingParams


def main(prompt: str) -> None:
    with LLM("storyteller") as llm:
        (found,) = llm.beam_search(prompt, BeamSearchParams(beam_width=3, max_tokens=12))
        for sequence in found.sequences:
            assert sequence.text is not None
            print(
                f"{sequence.cum_logprob:7.2f}  {sequence.text.partition(prompt)[2]!r}"
            )  # its text begins with the prompt
        (drawn,) = llm.generate(prompt, SamplingParams(n=3, max_tokens=12, seed=1), use_tqdm=False)
        for completion in drawn.outputs:
            print(f"  drawn  {completion.text!r}")


if __name__ == "__main__":
    main(" ".join(sys.argv[1:]) or "Once upon a time, in a forest,")
