"""How much faster is a stream with drafts, where text repeats itself, and what do drafts cost where it does not?

A logits processor forces the text, so that every side makes the same tokens: models with random weights copy nothing. All sides
stand in one process and take turns, request by request, so that what else the machine does falls on all of them.
Times are medians of rounds; ratios are of two sides of one round. A head with random weights shows what wrong drafts cost.
Run: python bench/speculation.py [--json FILE] [--threads 2] [--models 135M] [--rounds 5] [--tokens 128] [--quantizations none,int8]
[--batches 1,4,16,64]. In pieces, each of some minutes: `--parts scheduler,stories`, then `--parts models`, all with --keep, which
leaves the rows of FILE that a run does not measure.
"""

from __future__ import annotations

import argparse
import dataclasses
import inspect
import json
import os
import re
import statistics
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

from model import SHAPES
from report import command, environment

HERE = Path(__file__).resolve().parent
if str(HERE.parent) not in sys.path:
    sys.path.append(str(HERE.parent))

import numpy as np  # noqa: E402

from actorllm.types.logits_processors import LogitsProcessor  # noqa: E402

PROMPT = 384
NGRAM = {"method": "ngram", "prompt_lookup_min": 2, "prompt_lookup_max": 4}
SIDES: dict[str, dict[str, Any] | None] = {
    "none": None,
    "k=3": {**NGRAM, "num_speculative_tokens": 3},
    "k=7": {**NGRAM, "num_speculative_tokens": 7},
}
BATCHES = (1, 4, 16, 64)
HEAD = "eagle, k=3"
"""The side with an EAGLE head, whose random weights are drawn as those of its target."""
FASTER, FASTER_INT8, NO_SLOWER, SCHEDULER_COST, FASTER_STORIES = 1.8, 2.0, 0.97, 1.5, 1.3
OPENINGS = ("Once upon a time there was", "The old king called his three sons", "One evening in winter the fox")
DRAFTS, STORY_DTYPE = 3, "float32"


def texts(vocab_size: int, length: int) -> dict[str, list[int]]:
    """Token ids that repeat themselves as code and JSON do, and some that do not: one id for each word or sign."""
    names = ("mill", "fox", "river", "hen", "night", "bread", "road", "king")
    random = np.random.default_rng(0)
    records = [
        {
            "id": number,
            "name": names[number % 8],
            "size": int(random.integers(10, 99)),
            "tags": ["new", names[number % 5]],
        }
        for number in range(400)
    ]
    sources = {"code": inspect.getsource(dataclasses), "JSON": json.dumps(records, indent=1)}
    ids: dict[str, list[int]] = {}
    for name, source in sources.items():
        words = re.findall(r"\w+|[^\w\s]|\n *", source)[4000 if name == "code" else 0 :][:length]
        known = {word: 100 + place for place, word in enumerate(dict.fromkeys(words))}
        ids[name] = [known[word] for word in words]
    ids["no repeats"] = random.permutation(vocab_size)[:length].tolist()
    return ids


class Forced(LogitsProcessor):
    """Leaves one token to choose: the next one of the text that the request names."""

    texts: dict[str, list[int]] = {}  # noqa: RUF012

    def __init__(self, config: Any, device: Any, is_pin_memory: bool) -> None:
        self._rows: dict[int, tuple[list[int], int, list[int]]] = {}

    def is_argmax_invariant(self) -> bool:
        return False

    def update_state(self, batch_update: Any) -> None:
        if batch_update is None:
            return
        for index in batch_update.removed:
            self._rows.pop(index, None)
        for index, params, prompt, output in batch_update.added:
            self._rows[index] = (
                self.texts[params.extra_args["text"]],
                params.extra_args["start"] + len(prompt or ()),
                output,
            )
        for source, target, _ in batch_update.moved:
            self._rows[target] = self._rows.pop(source)

    def apply(self, logits: Any) -> Any:
        for index, (text, start, output) in self._rows.items():
            token = text[(start + len(output)) % len(text)]
            kept = logits[index, token].clone()
            logits[index] = -np.inf
            logits[index, token] = kept
        return logits


def measure(model: str, quantization: str | None, arguments: argparse.Namespace) -> list[dict[str, Any]]:
    """Rows of seconds per token by side, and the ratios."""
    from actorllm import LLM, SamplingParams

    rows: list[dict[str, Any]] = []
    with tempfile.TemporaryDirectory() as folder, tempfile.TemporaryDirectory() as head:
        (Path(folder) / "config.json").write_text(json.dumps(SHAPES[model]))
        (Path(head) / "config.json").write_text(json.dumps(SHAPES[model] | {"num_hidden_layers": 1}))
        sides = SIDES | {HEAD: {"method": "eagle", "model": head, "num_speculative_tokens": 3}}
        sys.modules.setdefault("speculation", sys.modules[__name__])
        Forced.texts = texts(SHAPES[model]["vocab_size"], 64 * (PROMPT + arguments.tokens))
        engines = {
            side: LLM(
                folder,
                load_format="dummy",
                skip_tokenizer_init=True,
                topology="inline",
                max_model_len=PROMPT + arguments.tokens,
                max_num_seqs=max(BATCHES),
                num_threads=arguments.threads,
                logits_processors=["speculation:Forced"],
                quantization=quantization,
                speculative_config=config,
            )
            for side, config in sides.items()
        }
        cells = [(name, 1) for name in Forced.texts] + [("no repeats", batch) for batch in BATCHES[1:]]
        cells = [(name, batch) for name, batch in cells if batch in arguments.batches]
        for name, batch in cells:
            text = Forced.texts[name]
            starts = [number * PROMPT % (len(text) - PROMPT) for number in range(batch)]
            prompts = [{"prompt_token_ids": text[start : start + PROMPT]} for start in starts]
            params = [
                SamplingParams(
                    max_tokens=arguments.tokens,
                    ignore_eos=True,
                    temperature=0.0,
                    extra_args={"text": name, "start": start},
                )
                for start in starts
            ]
            seconds: dict[str, list[float]] = {side: [] for side in sides}
            tokens: dict[str, Any] = {}
            accepted = dict.fromkeys(sides, 0.0)
            for turn in range(arguments.rounds + 1):
                for side, llm in engines.items():
                    before = llm.stats()["scheduler"]["scheduler"]
                    outputs = llm.generate(prompts, params, use_tqdm=False)
                    after = llm.stats()["scheduler"]["scheduler"]
                    tokens[side] = [output.outputs[0].token_ids for output in outputs]
                    metrics = [output.metrics for output in outputs]
                    spent = max(m.last_token_ts for m in metrics) - min(m.first_token_ts for m in metrics)
                    if turn:  # the first time makes oneDNN's kernels for these shapes, and fills the prefix cache
                        seconds[side].append(spent)
                    accepted[side] = batch * arguments.tokens / (after["num_steps"] - before["num_steps"])
            assert all(made == tokens["none"] for made in tokens.values()), "drafts changed a token"
            for side in list(sides)[1:]:
                ratios = [off / on for off, on in zip(seconds["none"], seconds[side], strict=True)]
                per_token = {s: 1e3 * statistics.median(seconds[s]) / (arguments.tokens - 1) for s in ("none", side)}
                faster = FASTER if quantization is None else FASTER_INT8
                target = faster if name == "JSON" and side == "k=7" else NO_SLOWER if name == "no repeats" else None
                shape = model if quantization is None else f"{model} {quantization}"
                row = {
                    "figure": f"{shape}, {name}, batch {batch}, {side}",
                    "without ms": per_token["none"],
                    "with ms": per_token[side],
                    "tokens a step": accepted[side],
                    "times": statistics.median(ratios),
                    "target": target,
                }
                rows.append(row)
                show(row)
        for llm in engines.values():
            llm.shutdown()
    return rows


def stories(arguments: argparse.Namespace) -> list[dict[str, Any]]:
    """The storyteller with the draft model that ships, at temperature 0.8: its own text, which nothing forces."""
    from actorllm import LLM, SamplingParams

    drafts = {"method": "draft_model", "model": "storyteller-draft", "num_speculative_tokens": DRAFTS}
    sides = {"none": None, "draft model": drafts}
    engines = {
        side: LLM(
            "storyteller",
            topology="inline",
            dtype=STORY_DTYPE,
            num_threads=arguments.threads,
            max_num_seqs=max(BATCHES),
            speculative_config=config,
        )
        for side, config in sides.items()
    }
    rows: list[dict[str, Any]] = []
    for batch in arguments.batches:
        prompts = [OPENINGS[number % len(OPENINGS)] for number in range(batch)]
        params = [
            SamplingParams(max_tokens=arguments.tokens, temperature=0.8, top_p=0.95, seed=number, ignore_eos=True)
            for number in range(batch)
        ]
        seconds: dict[str, list[float]] = {side: [] for side in sides}
        tokens: dict[str, Any] = {}
        kept = 0.0
        for turn in range(arguments.rounds + 1):
            for side, llm in engines.items():
                before = llm.stats()["scheduler"]["scheduler"]["num_steps"]
                outputs = llm.generate(prompts, params, use_tqdm=False)
                steps = llm.stats()["scheduler"]["scheduler"]["num_steps"] - before
                metrics = [output.metrics for output in outputs]
                spent = max(m.last_token_ts for m in metrics) - min(m.first_token_ts for m in metrics)
                tokens[side] = [output.outputs[0].token_ids for output in outputs]
                if turn:
                    seconds[side].append(spent)
                kept = batch * arguments.tokens / steps
        assert STORY_DTYPE != "float32" or tokens["none"] == tokens["draft model"], "drafts changed a token"
        ratios = [off / on for off, on in zip(*seconds.values(), strict=True)]
        without, with_ = (1e3 * statistics.median(found) / (arguments.tokens - 1) for found in seconds.values())
        row = {
            "figure": f"storyteller, temperature 0.8, batch {batch}, draft model",
            "without ms": without,
            "with ms": with_,
            "tokens a step": kept,
            "times": statistics.median(ratios),
            "target": FASTER_STORIES if batch == 1 else NO_SLOWER,
        }
        rows.append(row)
        show(row)
    for llm in engines.values():
        llm.shutdown()
    return rows


def scheduler_cost(rounds: int) -> dict[str, Any]:
    """Time of a step of the pure scheduler, 64 rows: without drafts, and with three of which none to all are right.

    The sides take turns, burst by burst, and their quickest bursts are compared, by the median of the steps: what else runs
    on the machine only adds. A look at the clock of processor time takes longer than such a step on some machines.
    """
    from actorllm.messages import StepPlan, StepResult, Submit
    from actorllm.scheduling.loading import load_policy
    from actorllm.scheduling.scheduler import Scheduler

    num_rows, bursts, steps, most = 64, 6, 50, 3

    class Side:
        def __init__(self, drafts: int) -> None:
            self.drafts = drafts
            self.random = np.random.default_rng(1)
            self.pending: list[StepPlan] = []
            self.scheduler = scheduler = Scheduler(
                num_blocks=8000,
                block_size=32,
                max_num_seqs=num_rows,
                max_num_batched_tokens=2048,
                max_model_len=4000,
                vocab_size=50_000,
                eos_token_ids=(2,),
                policy=load_policy("fcfs"),
                num_lookahead_tokens=drafts,
                draft_ranges=((1, 1000, drafts),) if drafts else (),
            )
            for rid in range(num_rows):
                prompt = np.full(16 + rid % 32, 7, np.int32)  # so that rows do not get their blocks in the same steps
                scheduler.submit(0, Submit(rid=rid, arrival=0.0, prompt=prompt, max_tokens=3900), 0.0)

        def step(self) -> float:
            began = time.perf_counter()
            while (plan := self.scheduler.schedule(0.0)) is not None:
                self.pending.append(plan)
            spent = time.perf_counter() - began
            plan = self.pending.pop(0)
            if plan.max_drafts:
                counts = self.random.integers(1, self.drafts + 2, num_rows).astype(np.int32)
                drafted = np.full(num_rows, self.drafts, np.int32)
                tokens = np.full(counts.sum(), 9, np.int32)
                result = StepResult(step=plan.step, tokens=tokens, counts=counts, num_drafted=drafted)
            else:
                result = StepResult(step=plan.step, tokens=np.full(num_rows, 9, np.int32))
            began = time.perf_counter()
            self.scheduler.update(result, 0.0)
            return spent + time.perf_counter() - began

    medians: tuple[list[float], list[float]] = ([], [])
    for _ in range(4 * rounds):
        sides = Side(0), Side(most)
        for side in sides:
            for _ in range(20):
                side.step()
        for _ in range(bursts):
            for side, found in zip(sides, medians, strict=True):
                found.append(statistics.median(side.step() for _ in range(steps)))
    without, with_ = (1e3 * min(found) for found in medians)
    return {
        "figure": "scheduler, a step of 64 rows, k=3",
        "without ms": without,
        "with ms": with_,
        "times": with_ / without,
        "target": SCHEDULER_COST,
    }


def show(row: dict[str, Any]) -> None:
    goal = "" if row["target"] is None else f"   target {row['target']:g}"
    kept = f"{row['tokens a step']:6.2f} tokens a step" if "tokens a step" in row else " " * 20
    print(
        f"{row['figure']:38}{row['without ms']:9.3f}{row['with ms']:9.3f} ms {kept}  {row['times']:.2f} times{goal}",
        flush=True,
    )


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--json", type=Path)
    parser.add_argument("--threads", type=int, default=2)
    parser.add_argument("--models", default="135M")
    parser.add_argument("--quantizations", default="none,int8")
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--tokens", type=int, default=128)
    parser.add_argument("--batches", type=lambda text: [int(number) for number in text.split(",")], default=BATCHES)
    parser.add_argument("--parts", default="scheduler,stories,models")
    parser.add_argument("--keep", action="store_true")
    arguments = parser.parse_args()
    before, parts = list(os.getloadavg()), arguments.parts.split(",")
    rows: list[dict[str, Any]] = []
    if "scheduler" in parts:
        rows.append(scheduler_cost(arguments.rounds))
        show(rows[0])
    if "stories" in parts:
        rows += stories(arguments)
    for model in arguments.models.split(",") if "models" in parts else ():
        for quantization in arguments.quantizations.split(","):
            rows += measure(model, None if quantization == "none" else quantization, arguments)
    if arguments.json is not None:
        if arguments.keep and arguments.json.exists():
            measured = {row["figure"] for row in rows}
            kept = json.loads(arguments.json.read_text())["rows"]
            rows = [row for row in kept if row["figure"] not in measured] + rows
        data = {
            "command": command(),
            "environment": environment(),
            "load_before": before,
            "configuration": {"shapes": SHAPES, "threads": arguments.threads, "prompt": PROMPT, "sides": SIDES},
            "rows": rows,
        }
        arguments.json.write_text(json.dumps(data, indent=1) + "\n")


if __name__ == "__main__":
    main()
