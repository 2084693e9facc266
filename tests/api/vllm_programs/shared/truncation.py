"""Prompts that are cut to what is asked for."""

import sys

from vllm import LLM, SamplingParams


def main(model: str) -> None:
    llm = LLM(model=model, dtype="float32", max_model_len=256)
    params = SamplingParams(temperature=0, max_tokens=4)
    for kwargs in ({"truncate_prompt_tokens": 3}, {"truncate_prompt_tokens": 3, "truncation_side": "right"}):
        (output,) = llm.generate("Once upon a time there was", params, use_tqdm=False, tokenization_kwargs=kwargs)
        print(len(output.prompt_token_ids), output.outputs[0].text)


if __name__ == "__main__":
    main(sys.argv[1])
