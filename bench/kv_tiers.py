"""How soon has a prompt its first token if its KV is on a disk, beside computing it; and what do tiers cost without reuse?

A first engine computes a prefix twice, so that it is stored, and ends. A second engine finds the file of the first, which the
system has no longer in memory. A third engine has no tiers. Both are asked for the prefix with another end. Each length is
measured so once in a round, with random weights. The second part has two engines with a cache of few blocks, one of them with a
disk tier, and prompts that share nothing. Rounds alternate between the two. All times are medians of rounds.
Beside the clock, what all processes and the scheduler have used of the cores is compared: it differs less between rounds.
The second part takes a smaller model: what tiers cost is paid for each request and each step, and steps of that one are short.
Run: python bench/kv_tiers.py [--json FILE] [--model 0.6B] [--threads 2] [--rounds 3] [--lengths 2048 8192]
                              [--model-without-reuse 135M] [--rounds-without-reuse 12]
"""

from __future__ import annotations

import argparse
import json
import os
import random
import statistics
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

from model import SHAPES
from report import environment, write_json
from sides import cpu_seconds, process_tree
from weight_updates import tensors_of

ROOT = Path(__file__).resolve().parent.parent
sys.path.insert(0, str(ROOT))

LOADED, SLOWDOWN = 0.1, 0.01
"""Targets: time to the first token, of that of computing; and of a run without reuse."""
DISK_GIB = 8.0
PROMPTS, PROMPT, OUTPUT = 24, 256, 8
"""Of a round without reuse."""


def prompt_of(seed: int, length: int, end: int) -> Any:
    tokens = random.Random(seed).choices(range(100, 40000), k=length)
    return {"prompt_token_ids": [*tokens, 7, end]}


def first_token_s(llm: Any, prompt: Any) -> float:
    from actorllm import SamplingParams

    began = time.perf_counter()
    llm.generate(prompt, SamplingParams(max_tokens=1, detokenize=False), use_tqdm=False)
    return time.perf_counter() - began


def transfers(llm: Any) -> dict[str, Any]:
    told: dict[str, Any] = llm.stats()["scheduler"]["scheduler"]["transfers"]
    return told


def drop_from_memory(folder: str) -> None:
    """What the system has of the files there in memory is written, and given up."""
    for path in Path(folder).iterdir():
        fd = os.open(path, os.O_RDWR)
        os.fsync(fd)
        os.posix_fadvise(fd, 0, 0, os.POSIX_FADV_DONTNEED)
        os.close(fd)


def prefix(model: str, length: int, options: dict[str, Any], seed: int) -> dict[str, float]:
    from actorllm import LLM

    options = options | {"max_model_len": length + 256, "max_num_seqs": 4}
    with tempfile.TemporaryDirectory() as folder:
        tier = {"kv_disk_path": folder, "kv_disk_size": DISK_GIB}
        with LLM(model, **options | tier) as llm:
            for end in (1, 2):
                first_token_s(llm, prompt_of(seed, length, end))
            while transfers(llm)["num_stored_blocks"] < length // 32:
                time.sleep(0.05)
            store_s = transfers(llm)["store_s"]
        drop_from_memory(folder)
        with LLM(model, **options | tier) as llm:
            first_token_s(llm, prompt_of(seed + 1, 8, 3))
            loaded_s = first_token_s(llm, prompt_of(seed, length, 3))
            told = transfers(llm)
            if told["num_loaded_blocks"] < length // 32:
                raise SystemExit(f"the prefix was not loaded: {told}")
    with LLM(model, **options) as llm:
        first_token_s(llm, prompt_of(seed + 1, 8, 3))
        computed_s = first_token_s(llm, prompt_of(seed, length, 3))
    found = {"loaded_s": loaded_s, "load_s": told["load_s"], "computed_s": computed_s, "store_s": store_s}
    return found | {"ratio": loaded_s / computed_s}


def without_reuse(model: str, options: dict[str, Any], rounds: int) -> dict[str, float]:
    from actorllm import LLM, SamplingParams

    params = SamplingParams(max_tokens=OUTPUT, ignore_eos=True, detokenize=False)
    few = options | {"max_model_len": 512, "max_num_seqs": 8, "num_gpu_blocks_override": 160}
    seconds: dict[str, list[float]] = {"with": [], "without": []}
    cpu: dict[str, list[float]] = {"with": [], "without": []}
    planning: dict[str, list[float]] = {"with": [], "without": []}
    with tempfile.TemporaryDirectory() as folder:
        tier = {"kv_disk_path": folder, "kv_disk_size": DISK_GIB}
        with LLM(model, **few | tier) as tiered, LLM(model, **few) as plain:
            for number in range(rounds + 1):
                order = [("with", tiered), ("without", plain)]
                for name, llm in order if number % 2 else order[::-1]:
                    prompts = [prompt_of(1000 * number + i, PROMPT, 1) for i in range(PROMPTS)]
                    pids: Any = llm._engine.pids
                    began, used = time.perf_counter(), cpu_seconds(process_tree(os.getpid()))[1]
                    planned = cpu_seconds([pids["scheduler"]])[1]
                    llm.generate(prompts, params, use_tqdm=False)
                    if number:  # the first round is not counted
                        seconds[name].append(time.perf_counter() - began)
                        cpu[name].append(cpu_seconds(process_tree(os.getpid()))[1] - used)
                        planning[name].append(cpu_seconds([pids["scheduler"]])[1] - planned)
            stored = transfers(tiered)["num_stored_blocks"]
    ratios = [a / b for a, b in zip(seconds["with"], seconds["without"], strict=True)]
    return {
        "with_s": statistics.median(seconds["with"]),
        "without_s": statistics.median(seconds["without"]),
        "ratio": statistics.median(ratios),
        "cpu_ratio": statistics.median(a / b for a, b in zip(cpu["with"], cpu["without"], strict=True)),
        "scheduler_us_of_a_request": 1e6 * statistics.median(planning["with"]) / PROMPTS,
        "scheduler_us_of_a_request_without": 1e6 * statistics.median(planning["without"]) / PROMPTS,
        "stored_blocks": stored,
    }


def write_model(folder: str, name: str, longest: int) -> None:
    """With random weights, for sequences of up to so many tokens."""
    from safetensors.torch import save_file

    shape = SHAPES[name]
    config = shape | {"max_position_embeddings": max(longest, shape.get("max_position_embeddings", 0))}
    (Path(folder) / "config.json").write_text(json.dumps(config))
    tensors = tensors_of(shape)
    if shape.get("tie_word_embeddings"):
        tensors.pop("lm_head.weight", None)
    save_file({name: one.contiguous() for name, one in tensors.items()}, Path(folder) / "model.safetensors")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--json", type=Path)
    parser.add_argument("--model", default="0.6B", choices=SHAPES)
    parser.add_argument("--threads", type=int, default=2)
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--lengths", type=int, nargs="*", default=[2048, 8192])
    parser.add_argument("--model-without-reuse", default="135M", choices=SHAPES)
    parser.add_argument("--rounds-without-reuse", type=int, default=12)
    arguments = parser.parse_args()
    before = list(os.getloadavg())
    rows: list[dict[str, Any]] = []
    options: dict[str, Any] = {"dtype": "bfloat16", "num_threads": arguments.threads, "skip_tokenizer_init": True}
    if arguments.lengths:
        with tempfile.TemporaryDirectory() as folder:
            write_model(folder, arguments.model, max(arguments.lengths) + 256)
            for length in arguments.lengths:
                found = [prefix(folder, length, options, 10 * number) for number in range(arguments.rounds)]
                row = {key: statistics.median(one[key] for one in found) for key in found[0]}
                rows.append({"figure": f"prefix of {length} tokens", "model": arguments.model, **row})
                print(
                    f"{length} tokens: {row['loaded_s']:.2f} s from the disk ({row['load_s']:.2f} s of reading), "
                    f"{row['computed_s']:.2f} s computed: {row['ratio']:.3f} (target {LOADED:g}); stored in "
                    f"{row['store_s']:.2f} s"
                )
    if arguments.rounds_without_reuse:
        with tempfile.TemporaryDirectory() as folder:
            write_model(folder, arguments.model_without_reuse, 512)
            row = without_reuse(folder, options, arguments.rounds_without_reuse)
        rows.append({"figure": "without reuse", "model": arguments.model_without_reuse, **row})
        print(
            f"without reuse: {row['with_s']:.2f} s with tiers, {row['without_s']:.2f} s without: {row['ratio']:.3f}, of "
            f"processor time {row['cpu_ratio']:.3f} (target {1 + SLOWDOWN:g}); {row['stored_blocks']:.0f} blocks stored"
        )
        with_tiers, plain = row["scheduler_us_of_a_request"], row["scheduler_us_of_a_request_without"]
        print(f"the scheduler took {with_tiers:.0f} µs of a request with tiers, {plain:.0f} without")
    if arguments.json is not None:
        names = ("model", "threads", "rounds", "model_without_reuse", "rounds_without_reuse")
        data = {
            "environment": environment(),
            "load_before": before,
            "configuration": {name: getattr(arguments, name) for name in names},
            "rows": rows,
        }
        write_json(arguments.json, data)


if __name__ == "__main__":
    main()
