"""A dialogue: each answer goes into the next question."""

import sys

from vllm import LLM, SamplingParams


def main(model: str) -> None:
    llm = LLM(model=model, dtype="float32", max_model_len=256)
    history = []
    for question in ("Who are you?", "What do you see?", "Where is it?"):
        history.append({"role": "user", "content": question})
        (output,) = llm.chat(history, SamplingParams(temperature=0, max_tokens=6), use_tqdm=False)
        history.append({"role": "assistant", "content": output.outputs[0].text})
        print(history[-1]["content"])


if __name__ == "__main__":
    main(sys.argv[1])
