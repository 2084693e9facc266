"""The tokenizer's template, and generate."""

import sys

from vllm import LLM, SamplingParams


def main(model: str) -> None:
    llm = LLM(model=model, dtype="float32", max_model_len=256)
    text = llm.get_tokenizer().apply_chat_template(
        [{"role": "user", "content": "Hello"}], tokenize=False, add_generation_prompt=True
    )
    print(
        repr(text), llm.generate(text, SamplingParams(temperature=0, max_tokens=6), use_tqdm=False)[0].outputs[0].text
    )


if __name__ == "__main__":
    main(sys.argv[1])
