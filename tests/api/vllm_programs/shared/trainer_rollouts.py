"""A trainer of policies: groups of completions with the log-probabilities that their weights are made of."""

import sys

from vllm import LLM, SamplingParams


def main(model: str) -> None:
    llm = LLM(
        model=model,
        dtype="float32",
        max_model_len=256,
        max_num_batched_tokens=512,
        model_impl="auto",
        seed=0,
        logprobs_mode="processed_logprobs",
        quantization=None,
    )
    prompts = ["Once upon a time", "The dog", "A little girl"]
    params = SamplingParams(
        n=3, repetition_penalty=1.0, temperature=0.9, top_p=0.95, top_k=50, max_tokens=6, logprobs=0, min_p=0.0
    )
    params.seed, params.ignore_eos = 7, True
    outputs = llm.generate(prompts, sampling_params=params, use_tqdm=False)
    completion_ids = [one.token_ids for output in outputs for one in output.outputs]
    prompt_ids = [output.prompt_token_ids for output in outputs for _ in output.outputs]
    logprobs = [
        [next(iter(step.values())).logprob for step in one.logprobs] for output in outputs for one in output.outputs
    ]
    print(len(completion_ids), [len(ids) for ids in completion_ids], [len(ids) for ids in prompt_ids])
    print(all(value <= 0 for row in logprobs for value in row))
    sums = [one.cumulative_logprob for output in outputs for one in output.outputs]
    print(all(abs(sum(row) - whole) < 1e-3 for row, whole in zip(logprobs, sums, strict=True)))
    # A group's advantages, of a reward that is as long as the text.
    rewards = [len(one.text) for output in outputs for one in output.outputs]
    groups = [rewards[i : i + 3] for i in range(0, len(rewards), 3)]
    print([round(sum(value - sum(group) / 3 for value in group), 6) == 0 for group in groups])
    print(llm.reset_prefix_cache(), llm.llm_engine.model_config.logprobs_mode)


if __name__ == "__main__":
    main(sys.argv[1])
