"""A request among others, and its stream with log-probabilities, which show every bit."""

from __future__ import annotations

from actorllm import LLM, SamplingParams

PROMPT = (
    "Once upon a time there was a king who had three sons, and the youngest of them was so clever that all the people of the land "
    "spoke of him, and one day the king said to him that he should go out into the world and"
)
OTHERS = [
    "The",
    "A little girl went into the forest and",
    "He said: I will not",
    "There lived a fox",
    "Once upon a time " * 9,
]
PARAMS = SamplingParams(temperature=0.8, max_tokens=20, seed=11, logprobs=1, ignore_eos=True)

Stream = list[tuple[int, float]]

DRAFTS = {"method": "ngram", "num_speculative_tokens": 3, "prompt_lookup_max": 2, "prompt_lookup_min": 1}


def streams(llm: LLM, prompts: list[str]) -> list[Stream]:
    """Of each prompt the tokens, with their log-probabilities."""
    found = []
    for output in llm.generate(prompts, PARAMS, use_tqdm=False):
        (one,) = output.outputs
        assert one.logprobs is not None
        found.append([(token, at[token].logprob) for token, at in zip(one.token_ids, one.logprobs, strict=True)])
    return found
