"""Prompts that were tokenized before, alone and as dictionaries."""

import sys

from vllm import LLM, SamplingParams, TokensPrompt


def main(model: str) -> None:
    llm = LLM(model=model, dtype="float32", max_model_len=256)
    ids = llm.get_tokenizer().encode("Once upon a time")
    params = SamplingParams(temperature=0.0, max_tokens=8)
    outputs = llm.generate([TokensPrompt(prompt_token_ids=ids), {"prompt_token_ids": ids[:2]}], params, use_tqdm=False)
    for output in outputs:
        print(output.prompt_token_ids, output.outputs[0].token_ids, output.outputs[0].text)


if __name__ == "__main__":
    main(sys.argv[1])
