"""Vectors and priorities of an engine that the program steps."""

import sys

from vllm import EngineArgs, LLMEngine, PoolingParams


def main(model: str) -> None:
    engine = LLMEngine.from_engine_args(EngineArgs(model=model, dtype="float32", max_model_len=256, runner="pooling"))
    for number, text in enumerate(("One", "Two dogs", "Three old kings")):
        engine.add_request(str(number), text, PoolingParams(task="embed"))
    found = {}
    while engine.has_unfinished_requests():
        for output in engine.step():
            if output.finished:
                found[output.request_id] = tuple(output.outputs.data.shape), len(output.prompt_token_ids)
    print(sorted(found.items()))


if __name__ == "__main__":
    main(sys.argv[1])
