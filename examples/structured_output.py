"""Output in a form: a JSON schema, a regular expression, a choice. Needs `pip install 'actorllm[structured]'`.

python examples/structured_output.py
"""

import asyncio
import json

from actorllm import AsyncLLM, SamplingParams, StructuredOutputsParams

ANIMAL = {
    "type": "object",
    "properties": {
        "kind": {"enum": ["fox", "bear", "owl"]},
        "name": {"type": "string", "pattern": "^[A-Z][a-z]{2,7}$"},
        "age": {"type": "integer", "minimum": 1, "maximum": 20},
    },
    "required": ["kind", "name", "age"],
    "additionalProperties": False,
}
FORMS = {
    "schema": StructuredOutputsParams(json=ANIMAL, disable_any_whitespace=True),
    "regex": StructuredOutputsParams(regex=r"In (spring|summer|autumn), at [1-9] o'clock\."),
    "choice": StructuredOutputsParams(choice=["happy", "sad"]),
}


async def main() -> None:
    async with AsyncLLM("storyteller") as llm:

        async def ask(form: str) -> str:
            params = SamplingParams(max_tokens=80, seed=4, structured_outputs=FORMS[form])
            output = (await llm.complete("Once upon a time, in a forest,", params)).outputs[0]
            assert output.finish_reason == "stop"
            return output.text

        answers = await asyncio.gather(*map(ask, FORMS))
    for form, answer in zip(FORMS, answers, strict=True):
        print(f"{form}: {answer}")
    animal = json.loads(answers[0])
    print(f"{animal['name']} is a {animal['kind']} of {animal['age']}")


if __name__ == "__main__":
    asyncio.run(main())
