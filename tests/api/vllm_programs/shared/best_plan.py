"""Beams from a conversation's prompt, and a choice among them."""

import sys

from vllm import LLM
from vllm.sampling_params import BeamSearchParams


def main(model: str) -> None:
    llm = LLM(model=model, dtype="float32", max_model_len=256)
    tokenizer = llm.get_tokenizer()
    prompts = [{"prompt": "The king"}, {"prompt_token_ids": tokenizer.encode("The dog", add_special_tokens=False)}]
    params = BeamSearchParams(beam_width=4, max_tokens=5, temperature=0.0, length_penalty=0.5, ignore_eos=True)
    for output in llm.beam_search(prompts, params):
        best = output.sequences[0]
        print(len(output.sequences), best.text, len(best.tokens), round(best.cum_logprob, 1), best.finish_reason)


if __name__ == "__main__":
    main(sys.argv[1])
