"""Tokens only: a program that decodes by itself."""

import sys

from vllm import LLM, SamplingParams


def main(model: str) -> None:
    llm = LLM(model=model, dtype="float32", max_model_len=256)
    (output,) = llm.generate("Once", SamplingParams(temperature=0, max_tokens=9, detokenize=False), use_tqdm=False)
    print(repr(output.outputs[0].text), llm.get_tokenizer().decode(output.outputs[0].token_ids))


if __name__ == "__main__":
    main(sys.argv[1])
