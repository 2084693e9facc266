"""A template of the program's own, with variables."""

import sys

from vllm import LLM, SamplingParams

TEMPLATE = "{{ greeting }}{% for message in messages %} {{ message['content'] }}{% endfor %}"


def main(model: str) -> None:
    llm = LLM(model=model, dtype="float32", max_model_len=256)
    (output,) = llm.chat(
        [{"role": "user", "content": "there was a"}],
        SamplingParams(temperature=0, max_tokens=6),
        use_tqdm=False,
        chat_template=TEMPLATE,
        chat_template_kwargs={"greeting": "Once"},
    )
    print(output.prompt, "|", output.outputs[0].text)


if __name__ == "__main__":
    main(sys.argv[1])
