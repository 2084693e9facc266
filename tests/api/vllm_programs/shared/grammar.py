"""A structured answer: a grammar."""

import sys

from vllm import LLM, SamplingParams
from vllm.sampling_params import StructuredOutputsParams

GRAMMAR = 'root ::= animal " and " animal\nanimal ::= "dog" | "cat" | "bird"\n'


def main(model: str) -> None:
    llm = LLM(model=model, dtype="float32", max_model_len=256)
    params = SamplingParams(temperature=0, max_tokens=20, structured_outputs=StructuredOutputsParams(grammar=GRAMMAR))
    (output,) = llm.generate("I see a ", params, use_tqdm=False)
    print(output.outputs[0].text, list(output.outputs[0].token_ids))


if __name__ == "__main__":
    main(sys.argv[1])
