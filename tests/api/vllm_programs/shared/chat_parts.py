"""Messages whose content is a list of texts."""

import sys

from vllm import LLM, SamplingParams


def main(model: str) -> None:
    llm = LLM(model=model, dtype="float32", max_model_len=256)
    parts = [{"type": "text", "text": "Once upon"}, {"type": "text", "text": "a time"}]
    (output,) = llm.chat(
        [{"role": "user", "content": parts}], SamplingParams(temperature=0, max_tokens=6), use_tqdm=False
    )
    print(repr(output.prompt), output.outputs[0].text)


if __name__ == "__main__":
    main(sys.argv[1])
