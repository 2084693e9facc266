"""Lines of a file in, lines out."""

import io
import json
import sys

from vllm import LLM, SamplingParams

LINES = '{"id": 1, "text": "The dog"}\n{"id": 2, "text": "The cat"}\n'


def main(model: str) -> None:
    llm = LLM(model=model, dtype="float32", max_model_len=256)
    rows = [json.loads(line) for line in io.StringIO(LINES)]
    outputs = llm.generate([row["text"] for row in rows], SamplingParams(temperature=0, max_tokens=5))
    for row, output in zip(rows, outputs, strict=True):
        print(json.dumps(row | {"answer": output.outputs[0].text, "reason": output.outputs[0].finish_reason}))


if __name__ == "__main__":
    main(sys.argv[1])
