"""What programs ask of the tokenizer and of the model's length."""

import sys

from vllm import LLM


def main(model: str) -> None:
    llm = LLM(model=model, dtype="float32", max_model_len=256)
    tokenizer = llm.get_tokenizer()
    ids = tokenizer.encode("A little dog")
    print(ids, tokenizer.decode(ids, skip_special_tokens=True), tokenizer.eos_token)
    print(llm.llm_engine.model_config.max_model_len, len(tokenizer))


if __name__ == "__main__":
    main(sys.argv[1])
