"""Requests that end at a string, with it and without it."""

import sys

from vllm import LLM, SamplingParams


def main(model: str) -> None:
    llm = LLM(model=model, dtype="float32", max_model_len=256)
    for keeps in (False, True):
        params = SamplingParams(temperature=0, max_tokens=60, stop=[".", "!"], include_stop_str_in_output=keeps)
        (output,) = llm.generate("Once upon a time", params, use_tqdm=False)
        first = output.outputs[0]
        print(repr(first.text), first.finish_reason, first.stop_reason, first.finished())


if __name__ == "__main__":
    main(sys.argv[1])
