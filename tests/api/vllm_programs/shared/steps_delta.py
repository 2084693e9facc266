"""The engine by hand: only what is new."""

import sys

from vllm import EngineArgs, LLMEngine, SamplingParams
from vllm.sampling_params import RequestOutputKind


def main(model: str) -> None:
    engine = LLMEngine.from_engine_args(EngineArgs(model=model, dtype="float32", max_model_len=256))
    params = SamplingParams(temperature=0, max_tokens=6, output_kind=RequestOutputKind.DELTA)
    engine.add_request("one", "The bird", params)
    tokens, text = [], ""
    while engine.has_unfinished_requests():
        for output in engine.step():
            tokens += output.outputs[0].token_ids
            text += output.outputs[0].text
    print(tokens, text)


if __name__ == "__main__":
    main(sys.argv[1])
