"""The shortest program: prompts in, texts out."""

import sys

from vllm import LLM, SamplingParams


def main(model: str) -> None:
    llm = LLM(model=model, dtype="float32", max_model_len=256)
    params = SamplingParams(temperature=0.0, max_tokens=16)
    for output in llm.generate(["Once upon a time", "The sun was", "A dog"], params):
        print(f"Prompt: {output.prompt!r}, Generated text: {output.outputs[0].text!r}")


if __name__ == "__main__":
    main(sys.argv[1])
