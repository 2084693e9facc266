"""A judge: marks of answers as what is expected of the likelihoods of the digits, not as the likeliest digit."""

import math
import sys

from vllm import LLM, SamplingParams

RUBRIC = "Question: {question}\nAnswer: {answer}\nMark from 1 to 5:"


def main(model: str) -> None:
    llm = LLM(model=model, dtype="float32", max_model_len=256)
    tokenizer = llm.get_tokenizer()
    digits = {tokenizer.encode(str(mark), add_special_tokens=False)[-1]: mark for mark in range(1, 6)}
    params = SamplingParams(
        temperature=0, max_tokens=1, logprob_token_ids=sorted(digits), allowed_token_ids=sorted(digits)
    )
    prompts = [
        RUBRIC.format(question="Who lives in a castle?", answer=answer) for answer in ("The king.", "A fish.", "")
    ]
    for output in llm.generate(prompts, params, use_tqdm=False):
        (entries,) = output.outputs[0].logprobs
        weights = {digits[token]: math.exp(entry.logprob) for token, entry in entries.items() if token in digits}
        total = sum(weights.values())
        print(sorted(weights), round(sum(mark * weight for mark, weight in weights.items()) / total, 2))


if __name__ == "__main__":
    main(sys.argv[1])
