"""Tools in the prompt."""

import sys

from vllm import LLM, SamplingParams

TOOL = {"type": "function", "function": {"name": "find", "description": "finds", "parameters": {"type": "object"}}}
TEMPLATE = "{% for tool in tools %}{{ tool['function']['name'] }} {% endfor %}{{ messages[-1]['content'] }}"


def main(model: str) -> None:
    llm = LLM(model=model, dtype="float32", max_model_len=256)
    params = SamplingParams(temperature=0, max_tokens=5)
    (output,) = llm.chat(
        [{"role": "user", "content": "the dog"}], params, use_tqdm=False, tools=[TOOL], chat_template=TEMPLATE
    )
    print(output.prompt, "|", output.outputs[0].text)


if __name__ == "__main__":
    main(sys.argv[1])
