"""What do the kernels and the engine reach on this GPU, and are they right?

    python bench/gpu.py [--stage hour|next|all|NAME] [--work DIR] [--json FILE] [--models NAME,...] [--limit SECONDS]
                        [--cases PART,...] [--write-configs] [--write-readme] [--cpu-check]
    python bench/gpu.py --predict H200|H100 [--json FILE] [--models NAME,...]

Without --stage, the stages of a first hour are run (FIRST_HOUR), and a verdict says what they have shown and what to do next.
--predict needs no GPU: it prints what the model of bytes and latency says of steps, prompts and filters.

The protocol is fixed. Kernels are checked first. Each time has its interval (95 %, of the median) and the verdict of what was
checked of it. What is compared takes turns, in an order that changes with every round. Measured steps stand beside predicted ones.

Stages, in this order, each in a process of its own that is ended after --limit seconds. Each leaves DIR/STAGE.json and is not
run again with the same GPU, sources and models. One that fails says why in its file, and the others go on; but the ceilings
come first, since every share is one of them, and then whether the kernels are right: if one is wrong, the stages after it are
not run unless they are asked for by name. --stage next runs the first that has not been run, so that a measurement may be taken
in several calls. Every call puts the results so far together as JSON (--json, default bench/results/gpu.json) and as Markdown
beside it.

--write-configs puts the configurations that the searches found best into the table of the kernels (configs.json); run
`python -m actorllm_kernels.gates` afterwards, and this again. --write-readme puts the measured figures into the
table of kernels/README.md. --cpu-check walks through everything on a CPU in tiny sizes, in Triton's interpreter: whether the
script runs, not how fast anything is. That needs Triton 3.9, or 3.6 with numpy before 2.4.
"""

from __future__ import annotations

import argparse
import contextlib
import os
import signal
import subprocess
import sys
import tempfile
import time
import traceback
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

if "--cpu-check" in sys.argv:
    os.environ["TRITON_INTERPRET"] = "1"  # before Triton is imported

# A machine that is lent for minutes has the sources, and nothing installed.
sys.path.insert(0, str(Path(__file__).resolve().parents[1] / "kernels"))
sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

import numpy as np
import torch
import triton
import triton.language as tl
from gpu_stages import (
    attention,
    capabilities,
    ceilings,
    correctness,
    engine,
    head,
    peers,
    prediction,
    products,
    quantized,
    small,
    steps,
)
from gpu_stages.clock import Bench
from gpu_stages.models import MODELS, TINY, Shape
from gpu_stages.readme import write_readme
from gpu_stages.record import ROOT, Results, Work, configurations, sources
from gpu_stages.tables import markdown, predicted, write_configs
from gpu_stages.targets import verdicts
from gpu_stages.verdict import verdict
from report import environment, write_json
from triton.runtime.interpreter import InterpretedFunction

RESULTS = ROOT / "bench" / "results"
LIMIT_S = 900.0


@dataclass(frozen=True)
class Stage:
    """run: with the results of the stages before it. depends_on: what its figures hold for."""

    run: Callable[[Bench, list[Shape], Results], dict[str, Any]]
    depends_on: tuple[str, ...] = ("machine", "sources", "table", "models")


KERNELS = ("machine", "sources", "table")
SEARCHES = ("machine", "sources", "models")
"""Not the table, which is made of what they find."""


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
    "ceilings": Stage(lambda bench, shapes, results: ceilings.run(bench), ("machine",)),
    "correctness": Stage(lambda bench, shapes, results: correctness.run(bench), KERNELS),
    "order": Stage(lambda bench, shapes, results: steps.order(bench, shapes)),
    "steps": Stage(lambda bench, shapes, results: steps.decode(bench, shapes, _bandwidth(results), _flops(results))),
    "ablations": Stage(lambda bench, shapes, results: steps.ablations(bench, _searched(shapes))),
    "latency": Stage(lambda bench, shapes, results: engine.latency(bench, _searched(shapes))),
    "capabilities": Stage(lambda bench, shapes, results: capabilities.run(bench), KERNELS),
    "small": Stage(lambda bench, shapes, results: small.run(bench, _bandwidth(results)), KERNELS),
    "products": Stage(lambda bench, shapes, results: products.run(bench, shapes, _bandwidth(results))),
    "quantized": Stage(lambda bench, shapes, results: quantized.run(bench, _searched(shapes))),
    "decode": Stage(lambda bench, shapes, results: attention.decode(bench, _bandwidth(results)), KERNELS),
    "prefill": Stage(lambda bench, shapes, results: attention.prefill(bench, _flops(results)), KERNELS),
    "head": Stage(lambda bench, shapes, results: head.run(bench, shapes, _bandwidth(results))),
    "prompts": Stage(lambda bench, shapes, results: steps.prefill(bench, shapes, _flops(results))),
    "offline": Stage(lambda bench, shapes, results: engine.offline(bench, shapes)),
    "idle": Stage(lambda bench, shapes, results: engine.idle(bench, shapes)),
    "start": Stage(lambda bench, shapes, results: engine.start(bench, _searched(shapes))),
    "sleep": Stage(lambda bench, shapes, results: engine.sleep(bench, _searched(shapes))),
    "peers": Stage(lambda bench, shapes, results: peers.run(bench, _searched(shapes))),
    "descriptors": Stage(lambda bench, shapes, results: attention.descriptors(bench), KERNELS),
    "search-products": Stage(
        lambda bench, shapes, results: products.search(bench, _searched(shapes), _bandwidth(results)), SEARCHES
    ),
    "search-one-row": Stage(lambda bench, shapes, results: products.search_one_row(bench, _searched(shapes)), SEARCHES),
    "search-decode": Stage(lambda bench, shapes, results: attention.search_decode(bench), SEARCHES),
    "search-prefill": Stage(lambda bench, shapes, results: attention.search_prefill(bench), SEARCHES),
    "search-head": Stage(lambda bench, shapes, results: head.search(bench, _searched(shapes)), SEARCHES),
    "search-norm": Stage(lambda bench, shapes, results: small.search_norm(bench), SEARCHES),
}
"""In the order in which they are run."""

FIRST_HOUR = ("ceilings", "correctness", "order", "steps", "ablations", "latency")
"""What an hour on a GPU is for: whether all is right, how long steps take and why, and a serving run."""

GATES = ("correctness", "order")
"""If one of these finds something wrong, no figure of a stage after it counts."""

Launch = Callable[[list[str]], str]
"""Runs some stages; says why it ended before they did, or nothing."""


@triton.jit
def count_kernel(n_ptr):
    for _ in range(tl.load(n_ptr)):
        pass


def interpreter_problem() -> str:
    """Why kernels cannot be interpreted here, and the way out; nothing if they can.

    The bounds of a loop are arrays with one number there. Triton 3.6 makes integers of them in a way that numpy 2.4 refuses.
    """
    try:
        InterpretedFunction(count_kernel.fn)[(1,)](torch.ones(1, dtype=torch.int32))
    except Exception as problem:  # whatever it raises, --cpu-check cannot go on
        return (
            f"the interpreter of Triton {triton.__version__} does not run with numpy {np.__version__}: {problem}; "
            "install triton>=3.9, or numpy<2.4"
        )
    return ""


def main() -> int:
    arguments = parse()
    if arguments.predict:
        return predict(arguments.predict, arguments.models, arguments.json)
    if not arguments.cpu_check and not torch.cuda.is_available():
        print(
            "this needs a GPU: torch.cuda.is_available() is false; --cpu-check walks through it without one",
            file=sys.stderr,
        )
        return 2
    if arguments.cpu_check and (problem := interpreter_problem()):
        print(problem, file=sys.stderr)
        return 2
    if arguments.stage not in ("hour", "next", "all", *STAGES):
        print(f"--stage {arguments.stage} is none of hour, next, all, {', '.join(STAGES)}", file=sys.stderr)
        return 2
    only = tuple(arguments.cases.split(",")) if arguments.cases else ()
    bench = Bench(torch.device("cpu" if arguments.cpu_check else "cuda"), arguments.cpu_check, only)
    known = TINY if arguments.cpu_check else MODELS
    names = arguments.models.split(",") if arguments.models else list(known)
    if unknown := [name for name in names if name not in known]:
        print(f"--models {', '.join(unknown)}: the models are {', '.join(known)}", file=sys.stderr)
        return 2
    with contextlib.ExitStack() as stack:
        folder = Path(arguments.work or RESULTS / "gpu-work")
        if arguments.cpu_check and not arguments.work:
            folder = Path(stack.enter_context(tempfile.TemporaryDirectory()))
        folder.mkdir(parents=True, exist_ok=True)
        work = Work(folder, here(bench, names), {name: stage.depends_on for name, stage in STAGES.items()})
        if arguments.run:
            return run_here(arguments.run.split(","), bench, [known[name] for name in names], work)

        def launch(stages: list[str]) -> str:
            command = [
                sys.executable,
                __file__,
                "--run",
                ",".join(stages),
                "--work",
                str(folder),
                "--models",
                ",".join(names),
                *(["--cases", arguments.cases] if arguments.cases else []),
            ]
            return run_apart(command + ["--cpu-check"] * arguments.cpu_check, arguments.limit * len(stages))

        status = run_stages(arguments.stage, work, launch, together=arguments.cpu_check)
        records, results = work.records(), work.results()
    chip_name = chip(bench)["chip"]
    beside = prediction.beside(results, chip_name)
    problems = {record.stage: record.complaint for record in records if record.complaint}
    result = {
        "bench": "gpu",
        "command": "python bench/gpu.py",
        "environment": {**environment(), **chip(bench)},
        "models": names,
        "verdict": verdict(results, beside, problems, chip_name),
        "beside": beside,
        "targets": verdicts(results, chip_name),
        "stages": [
            {"stage": record.stage, "seconds": record.seconds, "date": record.date, "problem": record.complaint}
            for record in records
        ],
        **results,
    }
    page = markdown(result, [name for name in STAGES if name not in results])
    print(page)
    file = Path(arguments.json or RESULTS / "gpu.json")
    if arguments.json or not arguments.cpu_check:
        write_json(file, result)
        file.with_suffix(".md").write_text(page)
    if arguments.write_configs:
        print("\n".join(write_configs(results)) or "no search has found anything better: nothing to write")
    if arguments.write_readme:
        print(
            "\n".join(write_readme(results, chip(bench)["chip"])) or "nothing has been measured of it: nothing to write"
        )
    return status


def predict(name: str, models: str | None, file: str | None) -> int:
    """Print what the model of bytes and latency says of this GPU."""
    if name not in prediction.MACHINES:
        print(f"--predict {name} is none of {', '.join(prediction.MACHINES)}", file=sys.stderr)
        return 2
    wanted = models.split(",") if models else list(MODELS)
    if unknown := [one for one in wanted if one not in MODELS]:
        print(f"--models {', '.join(unknown)}: the models are {', '.join(MODELS)}", file=sys.stderr)
        return 2
    found = prediction.table(prediction.MACHINES[name], wanted)
    print(predicted(name, found))
    if file:
        write_json(Path(file), {"bench": "gpu-predicted", "machine": name, **found})
    return 0


def run_stages(wanted: str, work: Work, launch: Launch, *, together: bool = False) -> int:
    """0: all went well; 1: something is wrong, or a stage did not end. together: in one process, which is faster."""
    names = FIRST_HOUR if wanted == "hour" else tuple(STAGES)
    again = wanted in ("all", "hour")
    pending = [name for name in names if (record := work.read(name)) is None or (again and record.problem)]
    if wanted not in ("all", "hour", "next"):
        pending = [wanted]
    elif wanted == "next":
        pending = pending[:1]
    is_well = True
    for batch in [pending] if together else [[name] for name in pending]:
        if not batch:
            break
        if batch[0] != "ceilings" and "ceilings" not in work.results():
            print(f"{batch[0]} needs the ceilings first: --stage ceilings", file=sys.stderr)
            return 1
        if wanted in ("all", "hour", "next") and (why := complaint_before(batch[0], work)):
            print(f"{why}: no figure after this one would count", file=sys.stderr)
            return 1
        for name in batch:
            work.forget(name)
        problem = launch(batch)
        for name in batch:
            record = work.read(name) or work.write(name, {}, problem or "it left no result")
            is_well = is_well and not record.complaint
            print(f"{name}: {record.complaint or f'{record.seconds:.0f} s'}", flush=True)
    return 0 if is_well else 1


def complaint_before(stage: str, work: Work) -> str:
    """What the gates before this stage have found wrong."""
    order = list(STAGES)
    for gate in GATES:
        if order.index(gate) < order.index(stage) and (record := work.read(gate)) is not None and record.complaint:
            return f"{gate}: {record.complaint}"
    return ""


def run_here(names: list[str], bench: Bench, shapes: list[Shape], work: Work) -> int:
    """The stages themselves; what ends one is in its record."""
    for name in names:
        print(f"{name} ...", flush=True)
        found: dict[str, Any] = {}
        began, problem = time.perf_counter(), ""
        try:
            found = STAGES[name].run(bench, shapes, work.results())
        except Exception as error:
            traceback.print_exc()
            problem = f"{type(error).__name__}: {str(error).splitlines()[0] if str(error) else ''}"
        work.write(name, found, problem, time.perf_counter() - began)
        if not problem:
            bench.empty_cache()
    return 0


def run_apart(command: list[str], limit_s: float) -> str:
    """A process with all its children, which are ended with it. Why it ended badly, or nothing."""
    process = subprocess.Popen(command, start_new_session=True)
    try:
        code = process.wait(limit_s)
    except subprocess.TimeoutExpired:
        return f"it was ended after {limit_s:g} s"
    finally:
        with contextlib.suppress(ProcessLookupError):
            os.killpg(process.pid, signal.SIGKILL)
        process.wait()
    return f"its process ended with {code}" if code else ""


def here(bench: Bench, models: list[str]) -> dict[str, Any]:
    """What figures may depend on, as it is now."""
    machine = f"{chip(bench)['chip']}, torch {torch.__version__}, Triton {triton.__version__}"
    return {"machine": machine, "sources": sources(), "table": configurations(), "models": models}


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
        **nvidia_smi(f"GPU-{properties.uuid}"),
    }


SMI_FIELDS = (
    "driver_version", "clocks.sm", "clocks.max.sm", "clocks.mem", "power.limit", "ecc.mode.current", "temperature.gpu",
)  # fmt: skip


def nvidia_smi(gpu: str) -> dict[str, str]:
    """What decides how fast it runs today; nothing where the driver's program does not say."""
    command = ["nvidia-smi", "-i", gpu, f"--query-gpu={','.join(SMI_FIELDS)}", "--format=csv,noheader"]
    try:
        done = subprocess.run(command, capture_output=True, text=True, check=True, timeout=60)
    except (OSError, subprocess.SubprocessError):
        return {}
    return dict(zip(SMI_FIELDS, done.stdout.strip().split(", "), strict=True))


def parse() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--stage", default="hour", help="default: %(default)s")
    parser.add_argument("--predict", metavar="H200", help=f"one of {', '.join(prediction.MACHINES)}; needs no GPU")
    parser.add_argument("--work", help="where the stages leave their files; default: bench/results/gpu-work")
    parser.add_argument("--json", help="default: bench/results/gpu.json; none with --cpu-check")
    parser.add_argument("--models", help="default: all five")
    parser.add_argument(
        "--limit", type=float, default=LIMIT_S, help="seconds after which a stage is ended; default: %(default)g"
    )
    parser.add_argument("--cases", help="of capabilities: those whose names have one of these parts; default: all")
    parser.add_argument("--write-configs", action="store_true")
    parser.add_argument("--write-readme", action="store_true")
    parser.add_argument("--cpu-check", action="store_true")
    parser.add_argument("--run", help=argparse.SUPPRESS)  # these stages, in this process
    return parser.parse_args()


if __name__ == "__main__":
    # Processes that an engine starts look there, too. Not where this is imported: it would change what others start.
    paths = [str(ROOT), str(ROOT / "kernels"), os.environ.get("PYTHONPATH", "")]
    os.environ["PYTHONPATH"] = os.pathsep.join(paths).rstrip(os.pathsep)
    sys.exit(main())
