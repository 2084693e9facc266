"""An engine whose worker has an emulated device, with requests of many kinds; and without it, on the CPU."""

from __future__ import annotations

from typing import Any

from actorllm import LLM, SamplingParams
from actorllm.actors.worker import WorkerActor
from actorllm.config import EngineConfig
from actorllm.model.cuda.runner import CudaRunner
from tests.model.cuda.host_engine import CountingRunner, LaggingDevice

ARGUMENTS: dict[str, Any] = {
    "dtype": "float32",
    "device": "cpu",
    "num_threads": 1,
    "topology": "inline",
    "max_num_seqs": 8,
    "block_size": 64,
    "max_model_len": 320,
}
SCHEMA = {
    "type": "object",
    "properties": {"name": {"type": "string", "maxLength": 12}, "colour": {"enum": ["red", "green", "greenish"]}},
    "required": ["name", "colour"],
    "additionalProperties": False,
}
KINDS: list[dict[str, Any]] = [
    {"temperature": 1.0, "seed": 1},
    {"temperature": 0.0, "logprobs": 2},
    {"temperature": 0.8, "seed": 2, "top_p": 0.95, "repetition_penalty": 1.2, "min_tokens": 20, "ignore_eos": False},
    {"temperature": 0.0, "stop": ["ing ", ". "]},
    {"temperature": 1.0, "seed": 3, "structured_outputs": {"json": SCHEMA}},
    {"temperature": 0.0, "structured_outputs": {"regex": "(ab){30}"}},
    {"temperature": 0.9, "seed": 4, "n": 2, "bad_words": [" the", " said the"]},
]
PROMPT = "The fox and the hen. The fox and the hen. The fox and the"


def load(self: WorkerActor, config: EngineConfig) -> CudaRunner:
    runner = CountingRunner(config, self.rank, show_progress=False, device=LaggingDevice())
    runner.load()
    return runner


def run(num_kinds: int = len(KINDS), **arguments: Any) -> tuple[list[Any], dict[str, Any]]:
    params = [SamplingParams(**({"max_tokens": 50, "ignore_eos": True} | kind)) for kind in KINDS[:num_kinds]]
    with LLM("storyteller", **(ARGUMENTS | arguments)) as llm:
        outputs = llm.generate([PROMPT] * len(params), params, use_tqdm=False)
        statistics = llm.stats()["scheduler"]["scheduler"]
    told = [
        (c.token_ids, c.text, c.finish_reason, c.stop_reason, [sorted(step) for step in c.logprobs or ()])
        for output in outputs
        for c in output.outputs
    ]
    return told, statistics


def config(method: str, most: int) -> dict[str, Any]:
    lookup = {"prompt_lookup_min": 1, "prompt_lookup_max": 3} if method == "ngram" else {}
    ranges = {"num_speculative_tokens_per_batch_size": [[1, 1000, most]]}
    return {"method": method, "num_speculative_tokens": most, **lookup, **ranges}
