"""A logits processor of a request: a function that sees the output and one row."""

import sys
from typing import Any

import torch
from vllm import LLM, SamplingParams
from vllm.v1.sample.logits_processor import AdapterLogitsProcessor


class OnlyFrom:
    def __init__(self, least: int) -> None:
        self.least = least

    def __call__(self, output_ids: list[int], logits: torch.Tensor) -> torch.Tensor:
        logits[: self.least + len(output_ids)] = float("-inf")
        return logits


class Processor(AdapterLogitsProcessor):
    def is_argmax_invariant(self) -> bool:
        return False

    def new_req_logits_processor(self, params: SamplingParams) -> Any:
        least = params.extra_args and params.extra_args.get("least")
        return OnlyFrom(least) if least else None


def main(model: str) -> None:
    llm = LLM(model=model, dtype="float32", max_model_len=256, logits_processors=[Processor])
    for least in (None, 1000, 4090):
        params = SamplingParams(temperature=0, max_tokens=5, extra_args=least and {"least": least})
        print(least, list(llm.generate("The dog", params, use_tqdm=False)[0].outputs[0].token_ids))


if __name__ == "__main__":
    main(sys.argv[1])
