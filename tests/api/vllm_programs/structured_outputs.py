"""Structured outputs, offline: a choice, a regular expression, a JSON schema, a grammar."""

import json
import sys

from vllm import LLM, SamplingParams
from vllm.sampling_params import StructuredOutputsParams

CAR = {
    "type": "object",
    "properties": {
        "brand": {"type": "string", "maxLength": 12},
        "car_type": {"type": "string", "enum": ["sedan", "SUV", "Truck", "Coupe"]},
    },
    "required": ["brand", "car_type"],
}

GRAMMAR = """
root ::= select_statement
select_statement ::= "SELECT " column " from " table
column ::= "col_1 " | "col_2 "
table ::= "table_1 " | "table_2 "
"""


def main() -> None:
    llm = LLM(model=sys.argv[1])

    def generate(structured_outputs: StructuredOutputsParams) -> str:
        params = SamplingParams(structured_outputs=structured_outputs, max_tokens=100, seed=3)
        return llm.generate("Answer:", sampling_params=params)[0].outputs[0].text

    print("choice", generate(StructuredOutputsParams(choice=["Positive", "Negative"])) in ("Positive", "Negative"))
    print("regex", generate(StructuredOutputsParams(regex=r"\w{3,9}@\w{3,9}\.com\n")).endswith(".com\n"))
    car = json.loads(generate(StructuredOutputsParams(json=CAR, disable_additional_properties=True)))
    print("json", sorted(car))
    print("grammar", generate(StructuredOutputsParams(grammar=GRAMMAR)).split()[0])


if __name__ == "__main__":
    main()
