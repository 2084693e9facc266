"""What an engine counts, by vLLM's names."""

import sys

from vllm import LLM, SamplingParams
from vllm.v1.metrics.reader import Counter, Gauge, Histogram


def main(model: str) -> None:
    llm = LLM(model=model, dtype="float32", max_model_len=256, disable_log_stats=False)
    llm.generate(["The dog", "The cat"], SamplingParams(temperature=0, max_tokens=5), use_tqdm=False)
    found = {metric.name: metric for metric in llm.get_metrics()}
    for name in ("vllm:prompt_tokens", "vllm:generation_tokens"):
        print(name, isinstance(found[name], Counter), found[name].value)
    running, first = found["vllm:num_requests_running"], found["vllm:time_to_first_token_seconds"]
    print(isinstance(running, Gauge), running.value, isinstance(first, Histogram), first.count)


if __name__ == "__main__":
    main(sys.argv[1])
