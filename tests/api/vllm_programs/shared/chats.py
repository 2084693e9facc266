"""Several chats at once."""

import sys

from vllm import LLM, SamplingParams


def main(model: str) -> None:
    llm = LLM(model=model, dtype="float32", max_model_len=256)
    chats = [[{"role": "user", "content": f"Tell me of a {animal}."}] for animal in ("dog", "cat", "bird")]
    for output in llm.chat(chats, SamplingParams(temperature=0, max_tokens=8), use_tqdm=False):
        print(len(output.prompt_token_ids), output.outputs[0].text)


if __name__ == "__main__":
    main(sys.argv[1])
