"""The engine by hand: add, step, read."""

import sys

from vllm import EngineArgs, LLMEngine, SamplingParams


def main(model: str) -> None:
    engine = LLMEngine.from_engine_args(EngineArgs(model=model, dtype="float32", max_model_len=256))
    for number, prompt in enumerate(["The dog", "The cat"]):
        engine.add_request(str(number), prompt, SamplingParams(temperature=0, max_tokens=4 + number))
    texts = {}
    while engine.has_unfinished_requests():
        for output in engine.step():
            if output.finished:
                texts[output.request_id] = output.outputs[0].text
    print(sorted(texts.items()), engine.get_num_unfinished_requests())


if __name__ == "__main__":
    main(sys.argv[1])
