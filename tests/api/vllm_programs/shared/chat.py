"""A chat with a system prompt."""

import sys

from vllm import LLM, SamplingParams


def main(model: str) -> None:
    llm = LLM(model=model, dtype="float32", max_model_len=256)
    conversation = [{"role": "system", "content": "Be kind."}, {"role": "user", "content": "Tell me a story."}]
    (output,) = llm.chat(conversation, SamplingParams(temperature=0, max_tokens=10), use_tqdm=False)
    print(repr(output.prompt), output.outputs[0].text)


if __name__ == "__main__":
    main(sys.argv[1])
