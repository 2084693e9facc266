"""Does output that must match a schema always match it, and what does it cost? Random schemas, and batch 16 side by side.

First, so many random schemas of bounded values, each with a request of its own, on a model with random weights: every answer
must end with finish_reason "stop" and match its schema. Then speed at batch 16 in two engines, the storyteller's shape and
the 135M shape with a byte-level vocabulary of 49,152: rounds take turns between plain requests and such that write lists of
records without end. Every run has prompts of its own. The ratio by CPU time says how much of it was other programs on
the machine.

    python bench/structured.py [--json FILE] [--schemas N] [--rounds N] [--tokens N]
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import sys
import tempfile
import time
from collections import defaultdict
from itertools import islice, product
from pathlib import Path
from typing import Any

from model import OUTPUT, SHAPES
from report import command, environment, print_table, write_json
from sides import cpu_seconds, process_tree

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))
from tests.random_schemas import matches, random_schema

BATCH = 16
PROMPT = 32
AT_LEAST = 0.85
"""Of the throughput of plain requests."""

RECORD = {
    "type": "object",
    "properties": {
        "name": {"type": "string", "maxLength": 40},
        "age": {"type": "integer", "minimum": 0, "maximum": 120},
        "tags": {"type": "array", "items": {"enum": ["red", "green", "blue"]}, "maxItems": 4},
        "note": {"anyOf": [{"type": "null"}, {"type": "string", "pattern": "^[a-z ]{1,60}$"}]},
    },
    "required": ["name", "age", "tags", "note"],
    "additionalProperties": False,
}
KINDS: dict[str, dict[str, Any] | None] = {
    "plain": None,
    "json": {"json": {"type": "array", "items": RECORD, "minItems": 1000}},
    "regex": {"regex": "([a-z]{2,9} ){1000}"},
}


def make_model(folder: Path) -> None:
    """The 135M shape, and a vocabulary of bytes and of short words with and without a space before them."""
    import tokenizers
    from tokenizers import decoders, models, pre_tokenizers

    shape = SHAPES["135M"]
    (folder / "config.json").write_text(json.dumps(shape))
    letters = "abcdefghijklmnopqrstuvwxyz"
    merges: list[tuple[str, str]] = [("Ġ", letter) for letter in letters]
    for head in ("", "Ġ"):
        merges += [(head + a, b) for a, b in product(letters, letters)]
        merges += [(head + a + b, c) for a, b, c in product(letters, letters, letters)]
    merges += islice(((a + b + c, d) for a, b, c, d in product(letters, repeat=4)), 20_000)
    names = ["<|end|>", *sorted(pre_tokenizers.ByteLevel.alphabet()), *(a + b for a, b in merges)]
    vocabulary = {name: id for id, name in enumerate(names[: shape["vocab_size"]])}
    kept = [(a, b) for a, b in merges if a + b in vocabulary]
    tokenizer = tokenizers.Tokenizer(models.BPE(vocabulary, kept))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    tokenizer.add_special_tokens(["<|end|>"])
    tokenizer.save(str(folder / "tokenizer.json"))
    (folder / "tokenizer_config.json").write_text(json.dumps({"eos_token": "<|end|>"}))


def random_schemas(count: int) -> dict[str, Any]:
    """How many answers ended and matched, and how long compiling took in all."""
    from actorllm import LLM, SamplingParams

    schemas = [random_schema(number) for number in range(count)]
    params = [
        SamplingParams(max_tokens=None, seed=number, structured_outputs={"json": schema})
        for number, schema in enumerate(schemas)
    ]
    with LLM("storyteller", load_format="dummy", max_num_seqs=64) as llm:
        outputs = llm.generate([[5, 6, 7]] * count, params, use_tqdm=False)
    ended = [output.outputs[0].finish_reason == "stop" for output in outputs]
    good = [
        is_over and matches(json.loads(output.outputs[0].text), schema)
        for is_over, output, schema in zip(ended, outputs, schemas, strict=True)
    ]
    return {"schemas": count, "ended by themselves": sum(ended), "match their schema": sum(good)}


class Runs:
    """Batches of one engine, no two with the same prompts."""

    def __init__(self, llm: Any, vocab_size: int) -> None:
        self._llm = llm
        self._vocab_size = vocab_size
        self._count = 0

    def speeds(self, structured: dict[str, Any] | None, num_tokens: int) -> tuple[float, float]:
        """Output tokens of one batch: per second, and per second of CPU time of all processes."""
        from actorllm import SamplingParams

        self._count += 1
        params = [
            SamplingParams(max_tokens=num_tokens, ignore_eos=True, seed=i, structured_outputs=structured)
            for i in range(BATCH)
        ]
        prompts = [
            [1 + (17 * i + 31 * j + 977 * self._count) % (self._vocab_size - 1) for j in range(PROMPT)]
            for i in range(BATCH)
        ]
        began, before = time.perf_counter(), cpu_seconds(process_tree(os.getpid()))[1]
        outputs = self._llm.generate(prompts, params, use_tqdm=False)
        seconds, cpu = time.perf_counter() - began, cpu_seconds(process_tree(os.getpid()))[1] - before
        assert all(len(output.outputs[0].token_ids) == num_tokens for output in outputs)
        return BATCH * num_tokens / seconds, BATCH * num_tokens / cpu


def measure(name: str, llm: Any, vocab_size: int, rounds: int, num_tokens: int) -> tuple[list[Any], list[Any]]:
    """Targets and rows of one engine."""
    runs = Runs(llm, vocab_size)
    speeds: dict[str, list[float]] = defaultdict(list)
    by_cpu: dict[str, list[float]] = defaultdict(list)
    for structured in KINDS.values():
        runs.speeds(structured, 8)  # the vocabulary is read, the grammar is compiled
    for _ in range(rounds):
        for kind in [kind for other in KINDS if other != "plain" for kind in ("plain", other, "plain")]:
            speed, speed_by_cpu = runs.speeds(KINDS[kind], num_tokens)
            speeds[kind].append(speed)
            by_cpu[kind].append(speed_by_cpu)
    targets, rows = [], []
    num_kinds = len(KINDS) - 1
    for position, kind in enumerate(KINDS):
        if kind == "plain":
            ratio = cpu_ratio = 1.0
        else:
            first = 2 * (position - 1)
            ratios = [
                2 * speed / sum(speeds["plain"][2 * num_kinds * i + first : 2 * num_kinds * i + first + 2])
                for i, speed in enumerate(speeds[kind])
            ]
            ratio = statistics.median(ratios)
            cpu_ratio = statistics.median(by_cpu[kind]) / statistics.median(by_cpu["plain"])
            measure = f"{name}: {kind} / plain, batch {BATCH}"
            targets.append({"measure": measure, "value": ratio, "target": f">= {AT_LEAST}", "met": ratio >= AT_LEAST})
        row = {"model": name, "requests": kind, "tokens/s": statistics.median(speeds[kind])}
        rows.append(row | {"ratio to plain": ratio, "ratio by CPU time": cpu_ratio})
    return targets, rows


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--json", type=Path)
    parser.add_argument("--schemas", type=int, default=500)
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--tokens", type=int, default=OUTPUT)
    arguments = parser.parse_args()
    from actorllm import LLM

    parsed = random_schemas(arguments.schemas)
    good = parsed["match their schema"]
    targets = [
        {
            "measure": f"random schemas on random weights that are matched, of {arguments.schemas}",
            "value": good,
            "target": f"= {arguments.schemas}",
            "met": good == arguments.schemas,
        }
    ]
    rows: list[dict[str, Any]] = []
    with LLM("storyteller", load_format="dummy", max_num_seqs=BATCH) as llm:
        found = measure("storyteller", llm, 4096, arguments.rounds, 4 * arguments.tokens)
        targets, rows = targets + found[0], rows + found[1]
    with tempfile.TemporaryDirectory() as folder:
        make_model(Path(folder))
        with LLM(folder, load_format="dummy", max_num_seqs=BATCH, max_model_len=1024) as llm:
            found = measure("135M", llm, SHAPES["135M"]["vocab_size"], arguments.rounds, arguments.tokens)
            targets, rows = targets + found[0], rows + found[1]
    print_table(f"Structured output, batch {BATCH}", rows)
    print_table("Targets", targets)
    if arguments.json is not None:
        configuration = {"batch": BATCH, "prompt": PROMPT, "tokens": arguments.tokens, "rounds": arguments.rounds}
        result = {"command": command(), "environment": environment(), "configuration": configuration | parsed}
        write_json(arguments.json, result | {"targets": targets, "rows": rows})


if __name__ == "__main__":
    main()
