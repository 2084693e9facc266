"""A text that repeats itself is ended."""

import sys

from vllm import LLM, SamplingParams
from vllm.sampling_params import RepetitionDetectionParams


def main(model: str) -> None:
    llm = LLM(model=model, dtype="float32", max_model_len=256)
    circles = RepetitionDetectionParams(max_pattern_size=4, min_count=3)
    params = SamplingParams(temperature=0, max_tokens=40, allowed_token_ids=[300], repetition_detection=circles)
    (output,) = llm.generate("Once", params, use_tqdm=False)
    print(len(output.outputs[0].token_ids), output.outputs[0].finish_reason, output.outputs[0].stop_reason)


if __name__ == "__main__":
    main(sys.argv[1])
