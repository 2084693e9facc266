"""What do the parameters that act on logits, and log-probabilities, cost? At batch 16, side by side with plain requests.

One engine of the 135M shape with dummy weights and a tokenizer of as many words. Rounds take turns: plain requests, then
each feature alone, then all of them together; the figure of a round is output tokens per second of the whole batch, prompts
included. The ratio by CPU time says how much of it was other programs on the machine. The log-probabilities of a prompt
cost what its logits cost (the LM head for every token of it, where plain requests need it for the last one only), so their
share grows with the length of the prompt.

    python bench/parameters.py [--json FILE] [--rounds N] [--tokens N]
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import tempfile
import time
from pathlib import Path
from typing import Any

from model import SHAPES
from report import command, environment, print_table, write_json
from sides import cpu_seconds, process_tree

BATCH, PROMPT = 16, 64
AT_LEAST = 0.85
"""Of the throughput of plain requests, with everything on."""

FEATURES: dict[str, dict[str, Any]] = {
    "plain": {},
    "penalties": {"presence_penalty": 0.5, "frequency_penalty": 0.5, "repetition_penalty": 1.1},
    "logit_bias": {"logit_bias": dict.fromkeys(range(0, 3000, 10), -1.0)},
    "allowed_token_ids": {"allowed_token_ids": list(range(100, 5_000))},
    "bad_words": {"bad_words": [f"w{i} w{i + 1}" for i in range(40)] + [f"w{i}" for i in range(500, 510)]},
    "min_tokens": {"stop_token_ids": list(range(20, 40))},
    "repetition_detection": {"repetition_detection": {"max_pattern_size": 20, "min_count": 5}},
    "logprobs": {"logprobs": 5},
    "prompt_logprobs": {"prompt_logprobs": 1},
}


def make_model(folder: Path) -> None:
    """A configuration, and a tokenizer whose words are w0, w1 ..."""
    import tokenizers

    shape = SHAPES["135M"]
    (folder / "config.json").write_text(json.dumps(shape))
    words = tokenizers.models.WordLevel({f"w{i}": i for i in range(shape["vocab_size"])}, unk_token="w0")
    tokenizer = tokenizers.Tokenizer(words)
    tokenizer.pre_tokenizer = tokenizers.pre_tokenizers.WhitespaceSplit()
    tokenizer.save(str(folder / "tokenizer.json"))


def run(llm: Any, arguments: dict[str, Any], num_tokens: int) -> tuple[float, float]:
    """Output tokens of one batch: per second, and per second of CPU time of all processes."""
    from actorllm import SamplingParams

    params = [
        SamplingParams(
            **{"max_tokens": num_tokens, "min_tokens": num_tokens, "ignore_eos": True, "seed": i} | arguments
        )
        for i in range(BATCH)
    ]
    prompts = [[(17 * i + 31 * j) % 49152 for j in range(PROMPT)] for i in range(BATCH)]
    began, before = time.perf_counter(), cpu_seconds(process_tree(os.getpid()))[1]
    outputs = llm.generate(prompts, params, use_tqdm=False)
    seconds, cpu = time.perf_counter() - began, cpu_seconds(process_tree(os.getpid()))[1] - before
    assert all(len(output.outputs[0].token_ids) == num_tokens for output in outputs)
    return BATCH * num_tokens / seconds, BATCH * num_tokens / cpu


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--json", type=Path)
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--tokens", type=int, default=128)
    arguments = parser.parse_args()
    from actorllm import LLM

    sides = dict(FEATURES)
    sides["everything"] = {name: value for feature in FEATURES.values() for name, value in feature.items()}
    speeds: dict[str, list[float]] = {name: [] for name in sides}
    by_cpu: dict[str, list[float]] = {name: [] for name in sides}
    ratios: list[float] = []
    with tempfile.TemporaryDirectory() as folder:
        make_model(Path(folder))
        with LLM(folder, load_format="dummy", max_num_seqs=BATCH, max_model_len=1024) as llm:
            for side in sides.values():
                run(llm, side, 8)  # kernels for these shapes, texts of tokens
            for _ in range(arguments.rounds):
                for name, side in [*sides.items(), ("plain", {})]:  # so that everything has plain requests beside it
                    speed, speed_by_cpu = run(llm, side, arguments.tokens)
                    speeds[name].append(speed)
                    by_cpu[name].append(speed_by_cpu)
                ratios.append(speeds["everything"][-1] / speeds["plain"][-1])
    plain = statistics.median(speeds["plain"])
    rows = [
        {
            "requests": name,
            "tokens/s": statistics.median(values),
            "ratio to plain": statistics.median(values) / plain,
            "ratio by CPU time": statistics.median(by_cpu[name]) / statistics.median(by_cpu["plain"]),
        }
        for name, values in speeds.items()
    ]
    ratio = statistics.median(ratios)
    target = {"measure": "everything / plain", "ratio": ratio, "target": f">= {AT_LEAST}", "met": ratio >= AT_LEAST}
    print_table(f"Parameters, 135M, batch {BATCH}", rows)
    print_table("Target", [target])
    if arguments.json is not None:
        write_json(
            arguments.json,
            {
                "command": command(),
                "environment": environment(),
                "configuration": {"batch": BATCH, "tokens": arguments.tokens, "rounds": arguments.rounds},
                "targets": [target],
                "rows": rows,
            },
        )


if __name__ == "__main__":
    main()
