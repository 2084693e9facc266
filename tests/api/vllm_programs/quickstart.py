"""Batched offline generation."""

import sys

from vllm import LLM, SamplingParams

prompts = ["Once upon a time", "The little dog", "One day a girl named Lily", "The sun was"]
sampling_params = SamplingParams(temperature=0.8, top_p=0.95)


def main() -> None:
    llm = LLM(model=sys.argv[1])
    outputs = llm.generate(prompts, sampling_params)
    print("-" * 60)
    for output in outputs:
        prompt = output.prompt
        generated_text = output.outputs[0].text
        print(f"Prompt:    {prompt!r}\nOutput:    {generated_text!r}")
        print("-" * 60)


if __name__ == "__main__":
    main()
