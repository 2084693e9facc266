"""Parameters kept as dictionaries, and answers turned into rows."""

import json
import sys

from vllm import LLM, SamplingParams

CASES = '[{"temperature": 0, "max_tokens": 4}, {"temperature": 0, "max_tokens": 6, "stop": [" a"]}]'


def main(model: str) -> None:
    llm = LLM(model=model, dtype="float32", max_model_len=256)
    params = [SamplingParams(**case) for case in json.loads(CASES)]
    for number, output in enumerate(llm.generate(["There was"] * 2, params, use_tqdm=False)):
        first = output.outputs[0]
        print(
            json.dumps(
                {"row": number, "text": first.text, "reason": first.finish_reason, "tokens": len(first.token_ids)}
            )
        )


if __name__ == "__main__":
    main(sys.argv[1])
