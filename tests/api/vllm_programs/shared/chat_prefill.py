"""The answer begins with words of the program."""

import sys

from vllm import LLM, SamplingParams


def main(model: str) -> None:
    llm = LLM(model=model, dtype="float32", max_model_len=256)
    messages = [{"role": "user", "content": "Tell me."}, {"role": "assistant", "content": "There was"}]
    (output,) = llm.chat(
        messages,
        SamplingParams(temperature=0, max_tokens=6),
        use_tqdm=False,
        add_generation_prompt=False,
        continue_final_message=True,
    )
    print(repr(output.prompt), output.outputs[0].text)


if __name__ == "__main__":
    main(sys.argv[1])
