"""Only some tokens may follow."""

import sys

from vllm import LLM, SamplingParams


def main(model: str) -> None:
    llm = LLM(model=model, dtype="float32", max_model_len=256)
    digits = [llm.get_tokenizer().convert_tokens_to_ids(digit) for digit in "0123456789"]
    allowed = sorted({token for token in digits if token is not None})
    params = SamplingParams(temperature=0, max_tokens=5, allowed_token_ids=allowed)
    (output,) = llm.generate("I count:", params, use_tqdm=False)
    print(set(output.outputs[0].token_ids) <= set(allowed), repr(output.outputs[0].text))


if __name__ == "__main__":
    main(sys.argv[1])
