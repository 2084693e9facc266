"""What do the parameters that act on logits, and log-probabilities, cost? At batch 16, side by side with plain requests.

One engine of the 135M shape with dummy weights and a tokenizer of as many words. Rounds take turns: plain requests, then
each feature alone, then all of them together; the figure of a round is output tokens per second of the whole batch, prompts
included. The ratio by CPU time says how much of it was other programs on the machine. Every run has prompts of its own:
repeated ones would be in the prefix cache, where requests with prompt_logprobs do not look, and the difference would be
that of the cache.

The log-probabilities of a prompt need the LM head for every token of it, where plain requests need it for the last one
only. What this product alone would cost is told beside the rest: no implementation can be cheaper, and the share grows with
the length of the prompt. Sizes are those of bench/model.py, and all features together also with prompts half as long.

    python bench/parameters.py [--json FILE] [--rounds N] [--tokens N] [--prompt N]
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import tempfile
import time
from collections import defaultdict
from pathlib import Path
from typing import Any

from model import OUTPUT, PROMPT, SHAPES
from report import command, environment, print_table, write_json
from sides import cpu_seconds, process_tree

BATCH = 16
AT_LEAST = 0.85
"""Of the throughput of plain requests, with everything on."""

NOTE = (
    "Targets hold each round against the plain requests right before and behind it, and take the median of these ratios. "
    "The second table has medians over all rounds: a machine that gets slower meanwhile shows there as well."
)

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


class Runs:
    """Batches of one engine, no two with the same prompts."""

    def __init__(self, llm: Any) -> None:
        self._llm = llm
        self._count = 0

    def speeds(self, arguments: dict[str, Any], num_prompt: int, num_tokens: int) -> tuple[float, float]:
        """Output tokens of one batch: per second, and per second of CPU time of all processes."""
        from actorllm import SamplingParams

        self._count += 1
        params = [
            SamplingParams(
                **{"max_tokens": num_tokens, "min_tokens": num_tokens, "ignore_eos": True, "seed": i} | arguments
            )
            for i in range(BATCH)
        ]
        prompts = [[(17 * i + 31 * j + 977 * self._count) % 49152 for j in range(num_prompt)] for i in range(BATCH)]
        began, before = time.perf_counter(), cpu_seconds(process_tree(os.getpid()))[1]
        outputs = self._llm.generate(prompts, params, use_tqdm=False)
        seconds, cpu = time.perf_counter() - began, cpu_seconds(process_tree(os.getpid()))[1] - before
        assert all(len(output.outputs[0].token_ids) == num_tokens for output in outputs)
        assert not any(output.num_cached_tokens for output in outputs)
        return BATCH * num_tokens / seconds, BATCH * num_tokens / cpu


def head_seconds(num_prompt: int) -> float:
    """The LM head for all tokens of a batch of prompts whose logits plain requests do not need, in one product."""
    import torch

    from actorllm.model.cpu.layers import PackedLinear

    shape = SHAPES["135M"]
    with torch.inference_mode():
        head = PackedLinear(torch.randn(shape["vocab_size"], shape["hidden_size"]).bfloat16())
        states = torch.randn(BATCH * (num_prompt - 1), shape["hidden_size"]).bfloat16()
        times = []
        for _ in range(7):
            began = time.perf_counter()
            head(states)
            times.append(time.perf_counter() - began)
    return min(times)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--json", type=Path)
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--tokens", type=int, default=OUTPUT)
    parser.add_argument("--prompt", type=int, default=PROMPT)
    arguments = parser.parse_args()
    from actorllm import LLM

    sides = dict(FEATURES)
    sides["everything"] = {name: value for feature in FEATURES.values() for name, value in feature.items()}
    size, half = (arguments.prompt, arguments.tokens), (arguments.prompt // 2, arguments.tokens)
    speeds: dict[tuple[str, tuple[int, int]], list[float]] = defaultdict(list)
    by_cpu: dict[str, list[float]] = defaultdict(list)
    with tempfile.TemporaryDirectory() as folder:
        make_model(Path(folder))
        with LLM(folder, load_format="dummy", max_num_seqs=BATCH, max_model_len=1024) as llm:
            runs = Runs(llm)
            for side in sides.values():
                runs.speeds(side, arguments.prompt, 8)  # kernels for these shapes, texts of tokens
            for _ in range(arguments.rounds):
                for name in [*sides, "plain"]:  # so that everything has plain requests on both sides
                    speed, speed_by_cpu = runs.speeds(sides[name], *size)
                    speeds[name, size].append(speed)
                    by_cpu[name].append(speed_by_cpu)
                for name in ("plain", "everything", "plain"):
                    speeds[name, half].append(runs.speeds(sides[name], *half)[0])
    targets = []
    for num_prompt, num_tokens in (size, half):
        plain, everything = speeds["plain", (num_prompt, num_tokens)], speeds["everything", (num_prompt, num_tokens)]
        ratio = statistics.median(
            2 * value / (before + after)
            for value, before, after in zip(everything, plain[::2], plain[1::2], strict=True)
        )
        seconds = BATCH * num_tokens / statistics.median(plain)
        targets.append(
            {
                "measure": f"everything / plain, {num_prompt} tokens in, {num_tokens} out",
                "ratio": ratio,
                "target": f">= {AT_LEAST}",
                "met": ratio >= AT_LEAST,
                "plain + LM head of the prompts / plain": seconds / (seconds + head_seconds(num_prompt)),
            }
        )
    plain_speed = statistics.median(speeds["plain", size])
    rows = [
        {
            "requests": name,
            "tokens/s": statistics.median(speeds[name, size]),
            "ratio to plain": statistics.median(speeds[name, size]) / plain_speed,
            "ratio by CPU time": statistics.median(by_cpu[name]) / statistics.median(by_cpu["plain"]),
        }
        for name in sides
    ]
    print_table(f"Parameters, 135M, batch {BATCH}, {arguments.prompt} tokens in, {arguments.tokens} out", rows)
    print_table("Targets", targets)
    if arguments.json is not None:
        write_json(
            arguments.json,
            {
                "command": command(),
                "environment": environment(),
                "configuration": {"batch": BATCH, "prompt": arguments.prompt, "tokens": arguments.tokens}
                | {"rounds": arguments.rounds},
                "targets": targets,
                "rows": rows,
                "note": NOTE,
                "rounds": {f"{name}, {n} in": values for (name, (n, _)), values in speeds.items()},
            },
        )


if __name__ == "__main__":
    main()
