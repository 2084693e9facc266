"""Structured answers: a schema, several prompts."""

import json
import sys

from vllm import LLM, SamplingParams
from vllm.sampling_params import StructuredOutputsParams

SCHEMA = {
    "type": "object",
    "properties": {"name": {"enum": ["Tim", "Lily"]}, "is_happy": {"type": "boolean"}},
    "required": ["name", "is_happy"],
    "additionalProperties": False,
}


def main(model: str) -> None:
    llm = LLM(model=model, dtype="float32", max_model_len=256)
    params = SamplingParams(temperature=0, max_tokens=80, structured_outputs=StructuredOutputsParams(json=SCHEMA))
    for output in llm.generate(["Tim ran. ", "Lily smiled. "], params, use_tqdm=False):
        found = json.loads(output.outputs[0].text)
        print(sorted(found), type(found["is_happy"]).__name__, found["name"] in ("Tim", "Lily"))


if __name__ == "__main__":
    main(sys.argv[1])
