"""A document longer than the model: parts of so many tokens with an overlap, a line of each, and a line of all lines."""

import sys

from vllm import LLM, SamplingParams


def parts(tokens: list[int], size: int, overlap: int) -> list[list[int]]:
    return [tokens[i : i + size] for i in range(0, max(1, len(tokens) - overlap), size - overlap)]


def main(model: str) -> None:
    llm = LLM(model=model, dtype="float32", max_model_len=256, max_num_batched_tokens=256)
    tokenizer = llm.get_tokenizer()
    document = " ".join(
        f"The {who} went to the {where}." for who in ("dog", "king", "cat") for where in ("hill", "river") * 12
    )
    tokens = tokenizer.encode(document, add_special_tokens=False)
    pieces = parts(tokens, 120, 20)
    print(len(tokens) > 256, len(pieces), tokenizer.decode(pieces[1][:8]))
    params = SamplingParams(temperature=0, max_tokens=8, stop=["."], include_stop_str_in_output=True)
    lines = [
        output.outputs[0].text.strip()
        for output in llm.generate([{"prompt_token_ids": piece} for piece in pieces], params, use_tqdm=False)
    ]
    print(lines)
    (whole,) = llm.generate(" ".join(lines), params, use_tqdm=False)
    print(whole.outputs[0].text, whole.outputs[0].finish_reason)


if __name__ == "__main__":
    main(sys.argv[1])
