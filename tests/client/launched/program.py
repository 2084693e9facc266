"""What each rank runs under a launcher: `python program.py FILE`, which gets what this rank's calls have returned, as JSON."""

from __future__ import annotations

import json
import sys
from typing import Any

from actorllm import LLM, SamplingParams
from actorllm.errors import EngineError, InvalidPromptError

PROMPT = "Once upon a time there was a girl"


def calls(llm: LLM) -> list[Any]:
    """What they return, as JSON values."""
    told: list[Any] = []
    params = [
        SamplingParams(seed=1, max_tokens=16, logprobs=2),
        SamplingParams(seed=2, max_tokens=12, n=2, temperature=1.0),
        SamplingParams(seed=3, max_tokens=16, structured_outputs={"regex": "[a-z ]{4,12}"}),
        SamplingParams(temperature=0.0, max_tokens=16, stop=["."]),
    ]
    outputs = llm.generate([f"{PROMPT} {i}" for i in range(4)], params, use_tqdm=False)
    print("begun", flush=True)
    for output in outputs:
        told += [[one.text, list(one.token_ids), one.finish_reason] for one in output.outputs]
    told.append([sorted(at) for at in outputs[0].outputs[0].logprobs or []])
    try:
        llm.generate([[]], use_tqdm=False)
    except InvalidPromptError as error:  # of every rank
        told.append(str(error))
    messages: list[Any] = [{"role": "user", "content": "Tell me a story."}]
    template = "{% for message in messages %}{{ message.content }} {% endfor %}"
    (answer,) = llm.chat(messages, SamplingParams(seed=4, max_tokens=8), use_tqdm=False, chat_template=template)
    told.append(answer.outputs[0].text)
    return told


def main() -> None:
    arguments: dict[str, Any] = {"dtype": "float32", "num_threads": 1, "max_num_seqs": 3, "max_model_len": 128}
    launched: dict[str, Any] = {"tensor_parallel_size": 2, "distributed_executor_backend": "external_launcher"}
    launched["speculative_config"] = {"method": "ngram", "num_speculative_tokens": 2, "prompt_lookup_max": 2}
    if sys.argv[2:] == ["alone"]:
        launched = {"topology": "inline"}
    llm = LLM("storyteller", **arguments, **launched)
    told = calls(llm)
    refused = None
    if "topology" not in launched:
        try:
            llm.enqueue(PROMPT)
        except EngineError as error:
            refused = str(error)
    llm.shutdown()
    with open(sys.argv[1], "w") as file:
        json.dump([told, refused], file)


if __name__ == "__main__":
    main()
