"""A small benchmark: tokens are counted."""

import sys
import time

from vllm import LLM, SamplingParams


def main(model: str) -> None:
    llm = LLM(model=model, dtype="float32", max_model_len=256)
    began = time.perf_counter()
    params = SamplingParams(temperature=1.0, ignore_eos=True, max_tokens=8)
    outputs = llm.generate([{"prompt_token_ids": [i] * 16} for i in range(1, 7)], params, use_tqdm=False)
    tokens = sum(len(output.outputs[0].token_ids) for output in outputs)
    print(tokens, sum(len(output.prompt_token_ids) for output in outputs), time.perf_counter() > began)


if __name__ == "__main__":
    main(sys.argv[1])
