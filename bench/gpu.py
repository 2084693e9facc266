"""What do the kernels and the engine reach on this GPU, and are they right?

    python bench/gpu.py [--stage next|all|NAME] [--work DIR] [--json FILE] [--models NAME,...] [--write-configs] [--cpu-check]

Stages, in this order, each of less than ten minutes on an H200; each leaves DIR/STAGE.json and is not run again. The ceilings of
this machine come first, since every share is one of them, and then whether the kernels are right: if one is wrong, the
stages after it are not run unless they are asked for by name. --stage next runs the first that is missing, so that a
measurement may be taken in several calls, or go on after one that broke off. At the end, or at any time, the results so far
are put together as JSON and as Markdown beside it.

--write-configs puts the configurations that the searches found best into the table of the kernels (configs.json); run
`python -m actorllm_kernels.resources --write` afterwards. --cpu-check walks through everything on a CPU in tiny sizes, in
Triton's interpreter: whether the script runs, not how fast anything is.
"""

from __future__ import annotations

import argparse
import json
import os
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

if "--cpu-check" in sys.argv:
    os.environ["TRITON_INTERPRET"] = "1"  # before anybody imports Triton

import torch
from gpu_stages import attention, ceilings, correctness, engine, head, peers, products, steps
from gpu_stages.clock import Bench
from gpu_stages.models import MODELS, TINY, Shape
from gpu_stages.tables import markdown, write_configs
from report import environment, write_json

Results = dict[str, dict[str, Any]]
Stage = Callable[[Bench, list[Shape], Results], dict[str, Any]]


def _bandwidth(results: Results) -> float:
    """Bytes per second that the ceilings found."""
    return float(results["ceilings"]["read_bytes_per_s"])


def _flops(results: Results) -> float:
    """Of bfloat16 products per second."""
    return float(results["ceilings"]["flops"])


def _searched(shapes: list[Shape]) -> list[Shape]:
    """A small and a large model are enough to fill the table."""
    return [shapes[0], shapes[-1]] if len(shapes) > 1 else shapes


STAGES: dict[str, Stage] = {
    "ceilings": lambda bench, shapes, results: ceilings.run(bench),
    "correctness": lambda bench, shapes, results: correctness.run(bench),
    "products": lambda bench, shapes, results: products.run(bench, shapes, _bandwidth(results)),
    "decode": lambda bench, shapes, results: attention.decode(bench, _bandwidth(results)),
    "prefill": lambda bench, shapes, results: attention.prefill(bench),
    "head": lambda bench, shapes, results: head.run(bench, shapes, _bandwidth(results)),
    "steps": lambda bench, shapes, results: steps.decode(bench, shapes, _bandwidth(results), _flops(results)),
    "prompts": lambda bench, shapes, results: steps.prefill(bench, shapes, _flops(results)),
    "order": lambda bench, shapes, results: steps.order(bench, shapes[0]),
    "offline": lambda bench, shapes, results: engine.offline(bench, shapes),
    "latency": lambda bench, shapes, results: engine.latency(bench, _searched(shapes)),
    "idle": lambda bench, shapes, results: engine.idle(bench, shapes),
    "start": lambda bench, shapes, results: engine.start(bench, shapes),
    "ablations": lambda bench, shapes, results: steps.ablations(bench, _searched(shapes)),
    "peers": lambda bench, shapes, results: peers.run(bench, shapes),
    "descriptors": lambda bench, shapes, results: attention.descriptors(bench),
    "search-products": lambda bench, shapes, results: products.search_all(bench, _searched(shapes)),
    "search-decode": lambda bench, shapes, results: attention.search(bench),
}
"""In the order in which they are run."""


def main() -> int:
    arguments = parse()
    if not arguments.cpu_check and not torch.cuda.is_available():
        print(
            "this needs a GPU: torch.cuda.is_available() is false; --cpu-check walks through it without one",
            file=sys.stderr,
        )
        return 2
    if arguments.stage not in ("next", "all", *STAGES):
        print(f"--stage {arguments.stage} is none of next, all, {', '.join(STAGES)}", file=sys.stderr)
        return 2
    bench = Bench(torch.device("cpu" if arguments.cpu_check else "cuda"), arguments.cpu_check)
    known = TINY if arguments.cpu_check else MODELS
    names = arguments.models.split(",") if arguments.models else list(known)
    if unknown := [name for name in names if name not in known]:
        print(f"--models {', '.join(unknown)}: the models are {', '.join(known)}", file=sys.stderr)
        return 2
    shapes = [known[name] for name in names]
    with tempfile.TemporaryDirectory() as temporary:
        work = Path(arguments.work or temporary)
        work.mkdir(parents=True, exist_ok=True)
        status = run_stages(bench, shapes, work, arguments.stage)
        results = {name: json.loads(file.read_text()) for name in STAGES if (file := work / f"{name}.json").exists()}
    result = {"bench": "gpu", "environment": {**environment(), **chip(bench)}, "models": names, **results}
    missing = [name for name in STAGES if name not in results]
    print(markdown(result, missing))
    if arguments.json:
        write_json(arguments.json, result)
        Path(arguments.json).with_suffix(".md").write_text(markdown(result, missing))
    if arguments.write_configs:
        print("\n".join(write_configs(results)) or "no search has been run: nothing to write")
    return status


def run_stages(bench: Bench, shapes: list[Shape], work: Path, wanted: str) -> int:
    """0: all went well; 1: a kernel is wrong, or a stage did not end."""
    for name, stage in STAGES.items():
        file = work / f"{name}.json"
        if (wanted == name) or (wanted in ("all", "next") and not file.exists()):
            results = {n: json.loads(f.read_text()) for n in STAGES if (f := work / f"{n}.json").exists()}
            if name != "ceilings" and "ceilings" not in results:
                print(f"{name} needs the ceilings first: --stage ceilings", file=sys.stderr)
                return 1
            print(f"{name} ...", flush=True)
            began = time.perf_counter()
            found = stage(bench, shapes, results)
            found["seconds"] = time.perf_counter() - began
            file.write_text(json.dumps(found))
            print(f"{name}: {found['seconds']:.0f} s", flush=True)
            bench.empty_cache()
            if wanted != "all":
                break
        if name == "correctness" and wanted in ("all", "next") and file.exists():
            wrong = json.loads(file.read_text())["num_wrong"]
            if wrong:
                print(f"{wrong} kernels are wrong: no figure after this one would count", file=sys.stderr)
                return 1
    return 0


def chip(bench: Bench) -> dict[str, Any]:
    if bench.is_check:
        return {"chip": "none: a walk through the script on a CPU"}
    properties = torch.cuda.get_device_properties(0)
    return {
        "chip": properties.name,
        "multiprocessors": properties.multi_processor_count,
        "memory, GB": round(properties.total_memory / 1e9, 1),
        "capability": ".".join(map(str, torch.cuda.get_device_capability())),
        "cuda": torch.version.cuda,
    }


def parse() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--stage", default="all")
    parser.add_argument(
        "--work", help="where the stages leave their files; default: nowhere, everything is measured now"
    )
    parser.add_argument("--json")
    parser.add_argument("--models", help="default: all five")
    parser.add_argument("--write-configs", action="store_true")
    parser.add_argument("--cpu-check", action="store_true")
    return parser.parse_args()


if __name__ == "__main__":
    sys.exit(main())
