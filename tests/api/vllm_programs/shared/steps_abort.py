"""The engine by hand: a request is taken back."""

import sys

from vllm import EngineArgs, LLMEngine, SamplingParams


def main(model: str) -> None:
    engine = LLMEngine.from_engine_args(EngineArgs(model=model, dtype="float32", max_model_len=256))
    engine.add_request("long", "The dog", SamplingParams(temperature=0, max_tokens=200, ignore_eos=True))
    engine.add_request("short", "The cat", SamplingParams(temperature=0, max_tokens=3))
    finished = []
    while engine.has_unfinished_requests():
        for output in engine.step():
            if output.finished:
                finished.append((output.request_id, output.outputs[0].finish_reason))
                engine.abort_request(["long"])
    print([pair for pair in finished if pair[0] == "short"], engine.has_unfinished_requests())


if __name__ == "__main__":
    main(sys.argv[1])
