"""Texts and tokens in one call; each request is sampled in its own way."""

import sys

from vllm import LLM, SamplingParams, TextPrompt


def main(model: str) -> None:
    llm = LLM(model=model, dtype="float32", max_model_len=256)
    prompts = ["The cat", TextPrompt(prompt="The dog"), {"prompt": "The bird"}]
    params = [SamplingParams(temperature=0.0, max_tokens=n) for n in (2, 5, 9)]
    for output in llm.generate(prompts, params, use_tqdm=False):
        print(output.prompt, "->", output.outputs[0].text, len(output.outputs[0].token_ids))


if __name__ == "__main__":
    main(sys.argv[1])
