"""An agent: it chooses a tool, its argument is written by a pattern, and what the tool says goes back into the conversation."""

import sys

from vllm import LLM, SamplingParams
from vllm.sampling_params import StructuredOutputsParams

TEMPLATE = "{% for m in messages %}{{ m.role }}: {{ m.content }}\n{% endfor %}assistant:"
TOOLS = {"weather": lambda city: f"It rains in {city}.", "clock": lambda hour: f"It is {hour} o'clock."}


def main(model: str) -> None:
    llm = LLM(model=model, dtype="float32", max_model_len=512)

    def ask(messages: list[dict[str, str]], form: StructuredOutputsParams | None, limit: int = 12) -> str:
        params = SamplingParams(temperature=0, max_tokens=limit, structured_outputs=form)
        (output,) = llm.chat(messages, params, use_tqdm=False, chat_template=TEMPLATE)
        return output.outputs[0].text

    messages = [{"role": "system", "content": "Use a tool."}, {"role": "user", "content": "How is the weather?"}]
    for _ in range(2):
        name = ask(messages, StructuredOutputsParams(choice=sorted(TOOLS)))
        argument = ask(
            [*messages, {"role": "assistant", "content": name}], StructuredOutputsParams(regex="[0-9]{1,2}"), 4
        )
        told = TOOLS[name](argument)
        print(name in TOOLS, argument.isdigit(), told.startswith("It "))
        messages += [{"role": "assistant", "content": f"{name} {argument}"}, {"role": "user", "content": told}]
    print(len(messages), ask(messages[:2], None))


if __name__ == "__main__":
    main(sys.argv[1])
