"""Step 6: a real model. Rows become the plans of the engine's own runner, which computes and samples."""

from __future__ import annotations

import zlib

import numpy as np
from step01_scheduler import Request, Row, run
from step02_blocks import BLOCK
from step05_prefix_cache import CachingScheduler

from actorllm import LLM, SamplingParams
from actorllm.config import EngineConfig
from actorllm.messages import NewRow, StepPlan, pack_rows
from actorllm.model.cpu.runner import CpuRunner
from actorllm.text.tokenizer import Tokenizer

ARGUMENTS = {"dtype": "float32", "device": "cpu", "block_size": BLOCK, "num_threads": 1}


def seed_of(name: str) -> int:
    return zlib.crc32(name.encode())


class Storyteller:
    """A runner keeps its rows from step to step, and a plan says what is different (`actorllm.messages.StepPlan`)."""

    def __init__(self, num_blocks: int) -> None:
        self.runner = CpuRunner(EngineConfig.from_arguments("storyteller", **ARGUMENTS), show_progress=False)
        self.runner.load()
        self.runner.allocate(num_blocks)
        self.slots: dict[str, int] = {}
        self.last: dict[str, Row] = {}
        self.num_steps = 0

    def __call__(self, rows: list[Row]) -> list[int | None]:
        ended = {name for name in self.last if name not in {row.name for row in rows}}
        ended |= {row.name for row in rows if row.name in self.last and not self.continues(row)}
        freed = [self.slots.pop(name) for name in ended]
        new = [row for row in rows if row.name not in self.slots]
        for row in new:
            self.slots[row.name] = min(set(range(len(self.slots) + 1)) - set(self.slots.values()))
        old = [row for row in rows if row not in new]
        decode = [row for row in old if self.last[row.name].samples]
        prefill = [row for row in rows if row not in decode]
        extended = [(row, block) for row in old for block in row.blocks[len(self.last[row.name].blocks) :]]
        self.num_steps += 1
        plan = StepPlan(
            step=self.num_steps,
            freed=int32(freed),
            new_rows=pack_rows(
                NewRow(
                    self.slots[row.name],
                    len(row.tokens),
                    seed=seed_of(row.name),
                    num_outputs=row.num_outputs,
                    num_computed=row.start,
                    temperature=0.8,
                )
                for row in new
            ),
            new_tokens=int32([token for row in new for token in row.tokens]),
            new_num_blocks=int32([len(row.blocks) for row in new]),
            new_blocks=int32([block for row in new for block in row.blocks]),
            extended_slots=int32([self.slots[row.name] for row, _ in extended]),
            extended_blocks=int32([block for _, block in extended]),
            decode_slots=int32([self.slots[row.name] for row in decode]),
            prefill_slots=int32([self.slots[row.name] for row in prefill]),
            prefill_counts=int32([row.count for row in prefill]),
        )
        sampling = decode + [row for row in prefill if row.samples]  # the order of a result
        tokens = self.runner.step(plan).tokens.tolist()
        of_name = {row.name: token for row, token in zip(sampling, tokens, strict=True)}
        self.last = {row.name: row for row in rows}
        return [of_name.get(row.name) for row in rows]

    def continues(self, row: Row) -> bool:
        """False: it was preempted meanwhile, and begins again with other blocks."""
        last = self.last[row.name]
        return row.start == last.start + last.count and row.blocks[: len(last.blocks)] == last.blocks


def int32(values: list[int]) -> np.ndarray:
    return np.array(values, np.int32)


PROMPTS = {
    "king": "Once upon a time there was a king who had three sons.",
    "fox": "Once upon a time there was a fox",
    "mill": "A miller lived beside the wood",
}


def story_requests(tokenizer: Tokenizer, max_tokens: int = 32) -> list[Request]:
    return [Request(name, tokenizer.encode(prompt).tolist(), max_tokens) for name, prompt in PROMPTS.items()]


def expected_streams(max_tokens: int = 32) -> dict[str, list[int]]:
    """What the engine makes of the same prompts and seeds."""
    params = [
        SamplingParams(temperature=0.8, seed=seed_of(name), max_tokens=max_tokens, ignore_eos=True) for name in PROMPTS
    ]
    with LLM("storyteller", topology="inline", **ARGUMENTS) as llm:
        outputs = llm.generate(list(PROMPTS.values()), params, use_tqdm=False)
    return {name: list(output.outputs[0].token_ids) for name, output in zip(PROMPTS, outputs, strict=True)}


def main() -> None:
    model = Storyteller(num_blocks=64)
    tokenizer = Tokenizer(model.runner.config.model.path)
    requests = story_requests(tokenizer)
    scheduler = CachingScheduler(max_seqs=4, num_blocks=64, max_step_tokens=16)
    for request in requests:
        scheduler.add(request)
    num_steps = run(scheduler, model)
    for request in requests:
        print(f"{request.name}: {PROMPTS[request.name]}{tokenizer.decode(request.output)!r}")
    same = {request.name: request.output for request in requests} == expected_streams()
    print(f"{num_steps} steps; the same tokens as from actorllm.LLM: {same}")


if __name__ == "__main__":
    main()
