"""Does a mixture of experts decode at the speed of its active weights?

    python bench/experts.py [--threads 1,2] [--rounds 40] [--models "experts;dense"] [--peer-python-other PYTHON] [--json FILE]

Models with random weights in one process, step by step in turns: a mixture of experts by its fused forward, the same one through
transformers, and a dense model with as many weights as a token of the mixture reads. Each of the fused ones in bfloat16 and in
int8. Times are medians of decode steps.

With an interpreter that has xllamacpp, whole engines are compared as well: actorllm and llama.cpp with the same weights, as
bfloat16 and as int8 (Q8_0 there). Each is a process tree of its own that is stopped while the other is measured. A decode step
is (t64 - t1) / 63, from the wall times of calls that make 64 tokens and one.
"""

from __future__ import annotations

import argparse
import json
import math
import os
import random
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

from report import compared, finish
from sides import Side, SideError, exit_on_sigterm
from weights import BF16_TENSOR, MIXTURES, Q8_0_TENSOR, make_folder, make_gguf

ROOT = Path(__file__).resolve().parent.parent

SHAPE = MIXTURES["qwen3-moe"]
MIXTURE: dict[str, Any] = {**SHAPE, "architectures": ["Qwen3MoeForCausalLM"]}
DENSE: dict[str, Any] = {
    **{name: value for name, value in SHAPE.items() if "expert" not in name and not name.startswith(("moe", "norm"))},
    "architectures": ["Qwen3ForCausalLM"],
    "model_type": "qwen3",
}

MODELS: dict[str, tuple[dict[str, Any], dict[str, Any]]] = {
    "experts": (MIXTURE, {}),
    "experts, int8": (MIXTURE, {"quantization": "int8"}),
    "experts, hf": (MIXTURE, {"model_impl": "transformers"}),
    "dense": (DENSE, {}),
    "dense, int8": (DENSE, {"quantization": "int8"}),
}
BATCHES = (1, 4, 16)
PROMPT, STEPS = 64, 40
PROMPT_ROUNDS, WARM_STEPS = 5, 4
PEER_PROMPT, PEER_OUTPUT, PEER_ROUNDS = 128, 64, 3
OF_DENSE, OF_HF, OF_PEER = 1.3, 0.5, 1.25
"""Times that a decode step at batch 1 may take: of those of the dense model, of the hf path, and of llama.cpp."""
GGUF = {"bfloat16": BF16_TENSOR, "int8": Q8_0_TENSOR}


class Model:
    """A runner, and its next step."""

    def __init__(
        self,
        shape: dict[str, Any],
        arguments: dict[str, Any],
        num_threads: int,
        dtype: str,
        max_tokens: int,
    ) -> None:
        """shape: its config.json. arguments: of the engine. max_tokens: of a step."""
        import numpy as np

        from actorllm.config import EngineConfig
        from actorllm.model.cpu.runner import CpuRunner

        with tempfile.TemporaryDirectory() as folder:
            (Path(folder) / "config.json").write_text(json.dumps(shape))
            config = EngineConfig.from_arguments(
                folder,
                load_format="dummy",
                dtype=dtype,
                skip_tokenizer_init=True,
                max_num_seqs=32,
                max_num_batched_tokens=max_tokens,
                num_threads=num_threads,
                **arguments,
            )
            self.runner = CpuRunner(config, show_progress=False)
            self.runner.load()
        self.vocab_size, self.block_size = shape["vocab_size"], config.cache.block_size
        self._random = np.random.default_rng(0)

    def add(self, batch: int, prompt: int, steps: int) -> None:
        """Rows with a prompt of their own, and room for so many steps."""
        import numpy as np

        from actorllm.messages import NewRow, StepPlan, pack_rows

        per_row = -(-(prompt + steps + 1) // self.block_size)
        self.runner.allocate(batch * per_row)
        self.rows, self.prompt = np.arange(batch, dtype=np.int32), prompt
        plan = StepPlan(
            step=0,
            new_rows=pack_rows(NewRow(row, prompt, seed=row, temperature=0.8) for row in range(batch)),
            new_tokens=self._random.integers(0, self.vocab_size, batch * prompt).astype(np.int32),
            new_num_blocks=np.full(batch, per_row, np.int32),
            new_blocks=self._random.permutation(batch * per_row).astype(np.int32),
        )
        self.runner.execute(plan)

    def prefill(self) -> float:
        """Compute the prompts. Returns milliseconds."""
        import numpy as np

        from actorllm.messages import StepPlan

        counts = np.full(len(self.rows), self.prompt, np.int32)
        began = time.perf_counter()
        self.runner.step(StepPlan(step=1, prefill_slots=self.rows, prefill_counts=counts))
        took = time.perf_counter() - began
        self._plan = StepPlan(step=2, decode_slots=self.rows)
        return took * 1e3

    def decode(self) -> float:
        """One step. Returns milliseconds."""
        from actorllm.messages import StepPlan

        began = time.perf_counter()
        self.runner.sample(self.runner.execute(self._plan))
        took = time.perf_counter() - began
        self._plan = StepPlan(step=3)
        return took * 1e3

    def free(self) -> None:
        from actorllm.messages import StepPlan

        self.runner.execute(StepPlan(step=4, decode_slots=self.rows[:0], freed=self.rows))


def step_times(
    shape: dict[str, Any],
    arguments: dict[str, Any],
    num_threads: int,
    dtype: str,
    batches: tuple[int, ...],
    prompt: int,
) -> dict[str, float]:
    """Milliseconds of a step of a model with this config.json, after prompts of so many tokens, by what it does."""
    model = Model(shape, arguments, num_threads, dtype, max(2048, max(batches) * prompt))
    times: dict[str, float] = {}
    for batch in batches:
        model.add(batch, prompt, STEPS)
        times[f"prompts of {batch}"] = model.prefill()
        times[f"decode {batch}"] = statistics.median([model.decode() for _ in range(STEPS)][5:])
        model.free()
    return times


def measure(names: list[str], num_threads: int, dtype: str, rounds: int) -> dict[str, dict[str, list[float]]]:
    """Of every figure the milliseconds of each model in every round, in this process."""
    models = {name: Model(*MODELS[name], num_threads, dtype, max(2048, max(BATCHES) * PROMPT)) for name in names}
    found: dict[str, dict[str, list[float]]] = {}

    def in_turns(figure: str, count: int, do: Callable[[Model], float]) -> None:
        times: dict[str, list[float]] = {name: [] for name in names}
        for round_ in range(count):
            first = round_ % len(names)
            for name in names[first:] + names[:first]:
                times[name].append(do(models[name]))
        found[figure] = times

    def prompts(model: Model) -> float:
        model.add(BATCHES[-1], PROMPT, STEPS)
        took = model.prefill()
        model.free()
        return took

    for batch in BATCHES:
        for model in models.values():
            model.add(batch, PROMPT, rounds + WARM_STEPS)
            model.prefill()
            for _ in range(WARM_STEPS):
                model.decode()
        in_turns(f"decode {batch}", rounds, Model.decode)
        for model in models.values():
            model.free()
    in_turns(f"prompts of {BATCHES[-1]}", PROMPT_ROUNDS, prompts)
    return found


def rows_of(num_threads: str, dtype: str, found: dict[str, dict[str, list[float]]]) -> list[dict[str, Any]]:
    """The part of the table with so many threads."""
    rows = []
    for figure, times in found.items():
        what = f"{num_threads} thread{'s' * (num_threads != '1')}: {figure.replace('decode', 'decode step, batch')}, ms"
        is_target = figure == "decode 1"
        for name, kind in (("experts", dtype), ("experts, int8", "int8")):
            if name not in times:
                continue
            dense, hf = times.get(name.replace("experts", "dense")), times.get("experts, hf")
            at_most = {"at_most": OF_DENSE} if is_target else {}
            rows.append(compared(f"{kind}, {what}", times[name], f"dense, {kind}", dense, **at_most))
            at_most = {"at_most": OF_HF} if is_target else {}
            rows.append(compared(f"{kind}, {what}", times[name], f"hf, {dtype}", hf, **at_most))
    return rows


def against_peer(python: str, threads: int) -> tuple[list[dict[str, Any]], dict[str, Any]]:
    """The part of the table with whole engines beside llama.cpp, and what was measured of it."""
    rows, measured = [], {}
    source = random.Random(0)
    with tempfile.TemporaryDirectory() as directory:
        folder = make_folder(Path(directory), "qwen3-moe")
        for kind, tensor in GGUF.items():
            options: dict[str, Any] = {"folder": str(folder), "threads": threads}
            method = None if kind == "bfloat16" else kind
            sides = {
                "actorllm": Side("actorllm", sys.executable, "models.py", options | {"quantization": method}),
                "llama.cpp": Side("xllamacpp", python, "models.py", options | {"file": str(make_gguf(folder, tensor))}),
            }
            steps: dict[str, list[float]] = {name: [] for name in sides}
            try:
                for side in sides.values():
                    side.start()
                for round_ in range(-1, PEER_ROUNDS):  # the first does everything once, before it counts
                    turns = list(sides)[round_ % 2 :] + list(sides)[: round_ % 2]
                    for name in turns:
                        times = {1: math.inf, PEER_OUTPUT: math.inf}
                        for output in (1, 1, PEER_OUTPUT, PEER_OUTPUT):
                            prompt = [source.randrange(1, SHAPE["vocab_size"]) for _ in range(PEER_PROMPT)]
                            answer = sides[name].call("generate", prompts=[prompt], output=output)
                            times[output] = min(times[output], answer["seconds"])
                        if round_ >= 0:
                            steps[name].append(1e3 * (times[PEER_OUTPUT] - times[1]) / (PEER_OUTPUT - 1))
                measured[kind] = {"steps": steps, "sides": {name: side.hello for name, side in sides.items()}}
            except SideError as error:
                print(f"{kind}: not measured: {error}", file=sys.stderr)
                measured[kind] = {"not measured": str(error).splitlines()[0]}
            finally:
                for side in sides.values():
                    side.close()
            what = f"{kind}, {threads} threads: decode step, batch 1, ms, whole engine"
            if steps["actorllm"]:
                rows.append(compared(what, steps["actorllm"], "llama.cpp", steps["llama.cpp"] or None, at_most=OF_PEER))
    return rows, measured


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--json", type=Path)
    parser.add_argument("--threads", default="1,2")
    parser.add_argument("--dtype", default="bfloat16")
    parser.add_argument("--rounds", type=int, default=40)
    parser.add_argument("--models", default=";".join(MODELS))
    parser.add_argument("--peer-python-other", help="an interpreter that has xllamacpp")
    parser.add_argument("--measure", help=argparse.SUPPRESS)
    arguments = parser.parse_args()
    names = arguments.models.split(";")
    if arguments.measure is not None:
        print(json.dumps(measure(names, int(arguments.measure), arguments.dtype, arguments.rounds)))
        return
    exit_on_sigterm()
    from actorllm.config import EngineConfig
    from actorllm.model.threads import worker_environment

    load_before = os.getloadavg()
    rows: list[dict[str, Any]] = []
    rounds: dict[str, Any] = {}
    for num_threads in arguments.threads.split(","):
        given = ["--models", arguments.models, "--dtype", arguments.dtype, "--rounds", str(arguments.rounds)]
        config = EngineConfig.from_arguments("storyteller", num_threads=int(num_threads))
        path = os.pathsep.join((str(ROOT), str(ROOT / "kernels")))
        run = subprocess.run(
            [sys.executable, __file__, "--measure", num_threads, *given],
            stdout=subprocess.PIPE,
            text=True,
            check=True,
            env={**os.environ, **worker_environment(config), "PYTHONPATH": path},
        )
        rounds[num_threads] = json.loads(run.stdout.splitlines()[-1])
        rows += rows_of(num_threads, arguments.dtype, rounds[num_threads])
    peer: dict[str, Any] = {}
    if arguments.peer_python_other:
        more, peer = against_peer(arguments.peer_python_other, max(map(int, arguments.threads.split(","))))
        rows += more
    finish(
        "experts",
        f"{SHAPE['num_experts']} experts of which a token takes {SHAPE['num_experts_per_tok']}, random weights",
        rows,
        arguments.json,
        load_before,
        configuration={"shape": SHAPE, "dtype": arguments.dtype, "prompt": PROMPT, "rounds": arguments.rounds},
        rounds=rounds,
        engines=peer,
    )


if __name__ == "__main__":
    main()
