"""A classifier without a head: the log-probabilities of the labels."""

import sys

from vllm import LLM, SamplingParams


def main(model: str) -> None:
    llm = LLM(model=model, dtype="float32", max_model_len=256)
    tokenizer = llm.get_tokenizer()
    labels = {word: tokenizer.encode(" " + word, add_special_tokens=False)[0] for word in ("happy", "sad", "dog")}
    params = SamplingParams(
        temperature=0, max_tokens=1, logprobs=len(labels), allowed_token_ids=sorted(labels.values())
    )
    for output in llm.generate(["She smiled. She was very", "He cried. He was very"], params, use_tqdm=False):
        token = output.outputs[0].token_ids[0]
        print(output.prompt, [word for word, known in labels.items() if known == token])


if __name__ == "__main__":
    main(sys.argv[1])
