"""An evaluation harness: which of several continuations is likelier, with every argument handed on, said or not."""

import sys
from typing import Any

from vllm import LLM, SamplingParams, TokensPrompt
from vllm.tokenizers import get_tokenizer


class Harness:
    def __init__(
        self, pretrained: str, max_length: int | None = None, batch_size: int | None = None, **more: Any
    ) -> None:
        self.model_args = {
            "model": pretrained,
            "gpu_memory_utilization": 0.3,
            "revision": None,
            "dtype": "float32",
            "tokenizer": None,
            "tokenizer_mode": "auto",
            "tokenizer_revision": None,
            "trust_remote_code": False,
            "tensor_parallel_size": 1,
            "max_model_len": max_length,
            "max_num_seqs": batch_size,
            "quantization": None,
            "seed": 1234,
            "enable_lora": False,
            "max_lora_rank": 16,
            **more,
        }
        self.model = LLM(**self.model_args)
        self.tokenizer = get_tokenizer(pretrained, tokenizer_mode="auto", trust_remote_code=False, revision=None)

    @property
    def max_length(self) -> int:
        return self.model.llm_engine.model_config.max_model_len

    def loglikelihood(self, context: str, continuation: str) -> tuple[float, bool]:
        start = self.tokenizer.encode(context, add_special_tokens=False)
        whole = (start + self.tokenizer.encode(continuation, add_special_tokens=False))[-self.max_length + 1 :]
        params = SamplingParams(temperature=0, prompt_logprobs=1, max_tokens=1, detokenize=False)
        (output,) = self.model.generate([TokensPrompt(prompt_token_ids=whole)], params, use_tqdm=False)
        pairs = list(zip(whole, output.prompt_logprobs, strict=True))[len(start) :]
        values = [{token: entry.logprob for token, entry in entries.items()} for _, entries in pairs]
        is_greedy = all(max(found, key=found.get) == token for (token, _), found in zip(pairs, values, strict=True))
        return sum(found[token] for (token, _), found in zip(pairs, values, strict=True)), is_greedy


def main(model: str) -> None:
    harness = Harness(model)
    print(harness.max_length)
    for context, choices in (
        ("Once upon", [" a time", " the moon", " dogs"]),
        ("The king lived in a", [" castle", " shoe"]),
    ):
        found = [harness.loglikelihood(context, choice) for choice in choices]
        best = max(range(len(choices)), key=lambda i: found[i][0])
        print(choices[best], [(round(value, 1), is_greedy) for value, is_greedy in found])


if __name__ == "__main__":
    main(sys.argv[1])
