"""How much faster is a stream with drafts, where text repeats itself, and what do drafts cost where it does not?

A logits processor forces the text of models with random weights, so that every side makes the same tokens: such models copy
nothing. A small model that is trained here copies on its own (`copying.py`), and the storyteller writes its own text. All sides
stand in one process and take turns, request by request, so that what else the machine does falls on all of them.
Times are medians of rounds; ratios are of two sides of one round. A head with random weights shows what wrong drafts cost.

The peer is llama.cpp's server (xllamacpp; llama-cpp-python has no wheel for this Python) with its prompt lookups `ngram-simple` and
`ngram-cache`, on a model of the same shape. A grammar forces its text. A server without drafts shows what its lookups gain, and
what the grammar costs. The text is that of JSON.

    python bench/speculation.py [--json FILE] [--threads 2] [--models 135M] [--rounds 5] [--tokens 128]
        [--quantizations none,int8] [--batches 1,4,16,64] [--models-folder DIR] [--peer-python PYTHON]

In pieces, each of some minutes: `--parts scheduler,stories,copies`, `--parts peer`, then `--parts models` with one batch at a
time, all with --keep, which leaves the rows of FILE that a run does not measure. --models-folder keeps what is made for a run.
--clock cpu counts processor time in place of time, on a machine that does other things.
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
from contextlib import ExitStack
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from copying import VOCAB_SIZE, make_copying_model
from model import SHAPES
from report import command, environment
from sides import Side, SideError, exit_on_sigterm
from weights import make_folder, make_gguf

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
FASTER, FASTER_INT8, NO_SLOWER, SCHEDULER_COST, FASTER_STORIES, AS_FAST_AS_PEER = 1.8, 2.0, 0.97, 1.5, 1.3, 1.0
OPENINGS = ("Once upon a time there was", "The old king called his three sons", "One evening in winter the fox")
DRAFTS, STORY_DTYPE = 3, "float32"
COPIED_PERIOD, COPIED_PROMPT, COPIED_SHARE = 24, 60, 0.95
"""Of prompts of the copying model: tokens that repeat themselves, of all; and the share of its text that must be copies."""
PEER_SHAPES = {"135M": "llama-135M", "0.6B": "qwen3-0.6B"}
"""Names of the same shapes in `weights.py`."""
PEER_LOOKUP, PEER_DRAFTS = 4, 7
PEER_KINDS = {"NGRAM_SIMPLE": "ngram-simple", "NGRAM_CACHE": "ngram-cache"}
"""Of llama.cpp's prompt lookups; the faster one is compared."""


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


@dataclass
class Turns:
    """What the sides have made of the same requests."""

    seconds: dict[str, list[float]]
    """By side, of each round: from the first token of a request to the last of all."""
    tokens: dict[str, list[list[int]]] = field(default_factory=dict)
    per_step: dict[str, float] = field(default_factory=dict)
    """Tokens of a step, of all requests together."""

    def check(self) -> None:
        first = next(iter(self.tokens.values()))
        assert all(made == first for made in self.tokens.values()), "drafts changed a token"

    def row(self, figure: str, side: str, num_tokens: int, target: float | None) -> dict[str, Any]:
        """side: compared with the one without drafts."""
        off, on = self.seconds["none"], self.seconds[side]
        without, with_ = (1e3 * statistics.median(found) / (num_tokens - 1) for found in (off, on))
        return {
            "figure": f"{figure}, {side}",
            "without ms": without,
            "with ms": with_,
            "tokens a step": self.per_step[side],
            "times": statistics.median(a / b for a, b in zip(off, on, strict=True)),
            "target": target,
        }


def take_turns(engines: dict[str, Any], prompts: list[Any], params: list[Any], arguments: argparse.Namespace) -> Turns:
    found = Turns({side: [] for side in engines})
    for turn in range(arguments.rounds + 1):
        for side, llm in engines.items():
            before, began = llm.stats()["scheduler"]["scheduler"]["num_steps"], time.process_time()
            outputs = llm.generate(prompts, params, use_tqdm=False)
            used = time.process_time() - began
            steps = llm.stats()["scheduler"]["scheduler"]["num_steps"] - before
            metrics = [output.metrics for output in outputs]
            spent = max(m.last_token_ts for m in metrics) - min(m.first_token_ts for m in metrics)
            if turn:  # the first time makes oneDNN's kernels for these shapes, and fills the prefix cache
                found.seconds[side].append(used if arguments.clock == "cpu" else spent)
            found.tokens[side] = [output.outputs[0].token_ids for output in outputs]
            found.per_step[side] = sum(map(len, found.tokens[side])) / steps
    return found


def measure(model: str, quantization: str | None, arguments: argparse.Namespace) -> list[dict[str, Any]]:
    """Rows of milliseconds per token by side, and the ratios."""
    from actorllm import SamplingParams

    rows: list[dict[str, Any]] = []
    with ExitStack() as stack:
        folder, head = (Path(stack.enter_context(tempfile.TemporaryDirectory())) for _ in range(2))
        (folder / "config.json").write_text(json.dumps(SHAPES[model]))
        (head / "config.json").write_text(json.dumps(SHAPES[model] | {"num_hidden_layers": 1}))
        sides = SIDES | {HEAD: {"method": "eagle", "model": str(head), "num_speculative_tokens": 3}}
        force_texts(model, arguments)
        engines = {
            side: forced_engine(stack, folder, quantization, config, arguments) for side, config in sides.items()
        }
        cells = [(name, 1) for name in Forced.texts] + [("no repeats", batch) for batch in BATCHES[1:]]
        for name, batch in [(name, batch) for name, batch in cells if batch in arguments.batches]:
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
            found = take_turns(engines, prompts, params, arguments)
            found.check()
            faster = FASTER if quantization is None else FASTER_INT8
            shape = model if quantization is None else f"{model} {quantization}"
            for side in list(sides)[1:]:
                target = faster if name == "JSON" and side == "k=7" else NO_SLOWER
                rows.append(found.row(f"{shape}, {name}, batch {batch}", side, arguments.tokens, target))
                show(rows[-1])
    return rows


def force_texts(model: str, arguments: argparse.Namespace) -> None:
    """What `Forced` leaves to choose, in this process."""
    sys.modules.setdefault("speculation", sys.modules[__name__])
    Forced.texts = texts(SHAPES[model]["vocab_size"], 64 * (PROMPT + arguments.tokens))


def forced_engine(
    stack: ExitStack,
    folder: Path,
    quantization: str | None,
    config: dict[str, Any] | None,
    arguments: argparse.Namespace,
) -> Any:
    """Of random weights, whose text is forced; it is closed with the stack."""
    from actorllm import LLM

    llm = LLM(
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
    stack.callback(llm.shutdown)
    return llm


def stories(arguments: argparse.Namespace) -> list[dict[str, Any]]:
    """The storyteller with the draft model that ships, at temperature 0.8: its own text, which nothing forces."""
    from actorllm import LLM, SamplingParams

    drafts = {"method": "draft_model", "model": "storyteller-draft", "num_speculative_tokens": DRAFTS}
    rows: list[dict[str, Any]] = []
    with ExitStack() as stack:
        engines = {}
        for side, config in {"none": None, "draft model": drafts}.items():
            engines[side] = LLM(
                "storyteller",
                topology="inline",
                dtype=STORY_DTYPE,
                num_threads=arguments.threads,
                max_num_seqs=max(BATCHES),
                speculative_config=config,
            )
            stack.callback(engines[side].shutdown)
        for batch in arguments.batches:
            prompts = [OPENINGS[number % len(OPENINGS)] for number in range(batch)]
            params = [
                SamplingParams(max_tokens=arguments.tokens, temperature=0.8, top_p=0.95, seed=number, ignore_eos=True)
                for number in range(batch)
            ]
            found = take_turns(engines, prompts, params, arguments)
            found.check()
            figure = f"storyteller, temperature 0.8, batch {batch}"
            target = FASTER_STORIES if batch == 1 else NO_SLOWER
            rows.append(found.row(figure, "draft model", arguments.tokens, target))
            show(rows[-1])
    return rows


def copies(arguments: argparse.Namespace) -> list[dict[str, Any]]:
    """A model that copies, with drafts of n-grams and of suffixes: text that repeats itself, which nothing forces."""
    from actorllm import LLM, SamplingParams

    suffix = {"method": "suffix", "num_speculative_tokens": 7, "suffix_decoding_max_cached_requests": 0}
    rows: list[dict[str, Any]] = []
    random = np.random.default_rng(2)
    with ExitStack() as stack:
        folder = make_copying_model(models_folder(stack, arguments) / "copying", arguments.threads)
        engines = {}
        for side, config in (SIDES | {"suffix": suffix}).items():
            engines[side] = LLM(
                folder,
                skip_tokenizer_init=True,
                topology="inline",
                dtype="float32",
                num_threads=arguments.threads,
                max_num_seqs=max(BATCHES),
                speculative_config=config,
            )
            stack.callback(engines[side].shutdown)
        params = SamplingParams(max_tokens=arguments.tokens, temperature=0.0, ignore_eos=True)
        for batch in arguments.batches:
            periods = [random.permutation(VOCAB_SIZE)[:COPIED_PERIOD].tolist() for _ in range(batch)]
            num_times = -(-(COPIED_PROMPT + arguments.tokens) // COPIED_PERIOD)
            prompts = [{"prompt_token_ids": (period * num_times)[:COPIED_PROMPT]} for period in periods]
            found = take_turns(engines, prompts, [params] * batch, arguments)
            found.check()
            pairs = [
                (token, expected)
                for period, made in zip(periods, found.tokens["none"], strict=True)
                for token, expected in zip(made, (period * num_times)[COPIED_PROMPT:], strict=False)
            ]
            share = statistics.mean(token == expected for token, expected in pairs)
            assert share >= COPIED_SHARE, f"{share:.2f} of the text are copies"
            for side in list(engines)[1:]:
                target = FASTER if batch == 1 and side != "k=3" else NO_SLOWER
                rows.append(found.row(f"copying model, batch {batch}", side, arguments.tokens, target))
                show(rows[-1])
    return rows


def models_folder(stack: ExitStack, arguments: argparse.Namespace) -> Path:
    """Where models are kept, or one that goes with the stack."""
    if arguments.models_folder is None:
        return Path(stack.enter_context(tempfile.TemporaryDirectory()))
    arguments.models_folder.mkdir(parents=True, exist_ok=True)
    kept: Path = arguments.models_folder
    return kept


def against_peer(model: str, arguments: argparse.Namespace) -> list[dict[str, Any]]:
    """The same forced text by llama.cpp, with and without its prompt lookup, in turns with this engine. In bfloat16."""
    from actorllm import SamplingParams

    rows: list[dict[str, Any]] = []
    with ExitStack() as stack:
        made = make_folder(models_folder(stack, arguments), PEER_SHAPES[model])
        options = {
            "gguf": str(make_gguf(made)),
            "threads": arguments.threads,
            "context": PROMPT + arguments.tokens + PEER_DRAFTS + 1,
            "lookup": PEER_LOOKUP,
        }
        peers: dict[str, Side] = {}
        for name in ("plain", *PEER_KINDS):
            given = options | {"drafts": PEER_DRAFTS if name in PEER_KINDS else 0, "kind": name}
            peers[name] = Side("llama.cpp", arguments.peer_python, "speculation_peer.py", given)
            stack.callback(peers[name].close)
            peers[name].start()
        force_texts(model, arguments)
        folder = Path(stack.enter_context(tempfile.TemporaryDirectory()))
        (folder / "config.json").write_text(json.dumps(SHAPES[model]))
        engine = forced_engine(stack, folder, None, SIDES["k=7"], arguments)
        for name in ("JSON",):
            prompt = Forced.texts[name][:PROMPT]
            text = Forced.texts[name][PROMPT : PROMPT + arguments.tokens]
            params = SamplingParams(
                max_tokens=arguments.tokens, ignore_eos=True, temperature=0.0, extra_args={"text": name, "start": 0}
            )
            ours: list[float] = []
            theirs: dict[str, list[float]] = {peer: [] for peer in ("plain", *PEER_KINDS, "unforced")}
            for turn in range(arguments.rounds + 1):
                (output,) = engine.generate([{"prompt_token_ids": prompt}], [params], use_tqdm=False)
                assert output.outputs[0].token_ids == text
                spent = output.metrics.last_token_ts - output.metrics.first_token_ts
                answers = {
                    peer: peers["plain" if peer == "unforced" else peer].call(
                        "generate",
                        prompt=prompt,
                        text=None if peer == "unforced" else text,
                        tokens=arguments.tokens,
                    )
                    for peer in theirs
                }
                made_by_peer = [answers[peer]["tokens"] for peer in peers]
                assert all(tokens == text for tokens in made_by_peer), "the peer's text was not forced"
                if turn:
                    ours.append(1e3 * spent / (arguments.tokens - 1))
                    for peer, answer in answers.items():
                        theirs[peer].append(answer["ms"])
            figure = f"{model}, {name}, batch 1, llama.cpp"
            best = min(PEER_KINDS, key=lambda kind: statistics.median(theirs[kind]))
            for told, peer, side, target in (
                (f"{figure}'s {PEER_KINDS[best]} against k=7", theirs[best], ours, AS_FAST_AS_PEER),
                *(
                    (f"{figure} without drafts against {PEER_KINDS[kind]}", theirs["plain"], theirs[kind], None)
                    for kind in PEER_KINDS
                ),
                (f"{figure} free against forced", theirs["unforced"], theirs["plain"], None),
            ):
                row = {
                    "figure": told,
                    "without ms": statistics.median(peer),
                    "with ms": statistics.median(side),
                    "times": statistics.median(a / b for a, b in zip(peer, side, strict=True)),
                    "target": target,
                }
                rows.append(row)
                show(row)
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
        f"{row['figure']:62}{row['without ms']:9.3f}{row['with ms']:9.3f} ms {kept}  {row['times']:.2f} times{goal}",
        flush=True,
    )


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--json", type=Path)
    parser.add_argument("--threads", type=int, default=2)
    parser.add_argument("--models", default="135M")
    parser.add_argument("--quantizations", default="none,int8")
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--tokens", type=int, default=128)
    parser.add_argument("--batches", type=lambda text: [int(number) for number in text.split(",")], default=BATCHES)
    parser.add_argument("--parts", default="scheduler,stories,copies,peer,models")
    parser.add_argument("--models-folder", type=Path, help="where the copying model and the peer's are kept")
    parser.add_argument("--peer-python", help="an interpreter that has xllamacpp; none: the peer is not measured")
    parser.add_argument("--clock", choices=("wall", "cpu"), default="wall")
    parser.add_argument("--keep", action="store_true")
    arguments = parser.parse_args()
    exit_on_sigterm()
    before, parts = list(os.getloadavg()), arguments.parts.split(",")
    rows: list[dict[str, Any]] = []
    if "scheduler" in parts:
        rows.append(scheduler_cost(arguments.rounds))
        show(rows[0])
    if "stories" in parts:
        rows += stories(arguments)
    if "copies" in parts:
        rows += copies(arguments)
    if "peer" in parts and arguments.peer_python is not None:
        for model in arguments.models.split(","):
            try:
                rows += against_peer(model, arguments)
            except SideError as error:
                print(f"{model}: the peer did not run: {error}", flush=True)
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
            "configuration": {
                "shapes": SHAPES,
                "threads": arguments.threads,
                "clock": arguments.clock,
                "prompt": PROMPT,
                "sides": SIDES,
            },
            "rows": rows,
        }
        arguments.json.write_text(json.dumps(data, indent=1) + "\n")


if __name__ == "__main__":
    main()
