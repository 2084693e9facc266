"""What papers claim of their policies, beside what the simulator measures on the kind of workload that each paper has.

    python bench/policies.py [--traces FOLDER] [--seeds N] [--requests N] [--only NAME ...] [--processes N] [--json FILE]

Llama 3 8B on an A100 (published step times); the engine's own scheduler and the policies that ship, in virtual time. Each seed
has a part of the trace of its own, and gives every policy the same requests. A figure is the mean over the seeds of a ratio to
the paper's baseline, seed by seed, with the interval that holds it at 95 % (Student's t on logarithms). Capacities are highest
rates at which 90 % of all requests are on time and no backlog grows, with paired bootstrapped bands. "yes": the mean is in the
published range. "within the band": only a part of the interval is. "not told apart": the interval holds 1, the baseline itself.
Where a paper says "up to", the best of several loads counts, and the range begins at a twentieth.

--only measures some of the claims; --json keeps its rows of the others. So the table can be made in parts.

A claim is about a system, and what is simulated is its scheduling. So "less" is no verdict on the paper: the row says what differs.
"""

from __future__ import annotations

import argparse
import json
import math
import os
import re
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
from report import command, environment, print_table, versions, write_json
from routers import band

from actorllm.scheduling.cost_model import preset
from actorllm.scheduling.policy import KeyPolicy, PlanPolicy
from actorllm.scheduling.step_packing import KeyPlanner
from actorllm.slo.experiments import Ladder, Scenario, Sweep, SweepResults, Variant, sustained, sustained_ratio
from actorllm.slo.fairness import fairness_of
from actorllm.slo.metrics import experience, good
from actorllm.slo.simulator import EngineShape, SimulatedRun, simulate
from actorllm.slo.timeline import FINISHED
from actorllm.slo.traces import load_trace
from actorllm.slo.workload import (
    Workload,
    assign_classes,
    assign_tenants,
    bursty_arrivals,
    fixed_lengths,
    lognormal_lengths,
    make_workload,
    parse_mix,
    poisson_arrivals,
)

MODEL = preset("a100-llama-3-8b")
SHAPE = EngineShape(num_blocks=25_000, block_size=16, max_model_len=16_384, enable_prefix_caching=False)
MIX = "ls:0.5:ttft=0.5+p/4000,tpot=0.05,priority=0 be:0.5:e2e=120,priority=1"
READER = "all:1:ttft=1,tpot=0.2"
"""What readers expect in the paper on Andes: a second, then about five tokens a second."""
TOKENS = 512
"""Of a step."""


class ShortestRemaining(KeyPolicy):
    """Shortest remaining processing time with perfect knowledge of lengths: the baseline of the paper on UniBoost."""

    name = "srpt"

    def key(self, sequence: Any, view: Any) -> Any:
        known = view.batch.num_known.item(sequence.slot) if sequence.slot >= 0 else sequence.known.size
        return (view.remaining(sequence) + sequence.limit - known,)

    def preempt_for(self, sequence: Any, victim: Any, view: Any) -> bool:
        if view.batch.num_free_slots > 0 and view.kv.num_free >= view.admission_blocks(sequence):
            return False
        return bool(self.key(sequence, view) < self.key(victim, view))


def shortest_remaining() -> PlanPolicy:
    return KeyPlanner(ShortestRemaining())


@dataclass(frozen=True)
class Claim:
    """Of a paper. measure: the ratio on one seed at one load."""

    name: str
    paper: str
    sentence: str
    published: tuple[float, float]
    """The ratio that the sentence means: from, to."""
    measured: str
    """What the ratio is of."""
    workload: str
    differs: str
    loads: tuple[float, ...]
    measure: Callable[[float, int, argparse.Namespace], float]
    is_gain: bool = True
    """Whether more is better; off: the ratio is of a cost."""


def conversations(rate: float, seed: int, arguments: argparse.Namespace, mix: str) -> Workload:
    trace = load_trace(Path(arguments.traces) / "AzureLLMInferenceTrace_conv.csv").workload.fitting(8192)
    size = len(trace) // max(arguments.seeds, 1)
    num = min(arguments.requests, size)
    rows = np.arange(seed * size, seed * size + num)
    return assign_classes(trace.select(rows).at_rate(rate), parse_mix(mix), seed)


def surge(rate: float, seed: int, arguments: argparse.Namespace, mix: str) -> Workload:
    """The lengths of conversations, in bursts."""
    drawn = conversations(rate, seed, arguments, mix)
    return drawn.arriving(bursty_arrivals(len(drawn), rate, seed=seed))


def served(workload: Workload, policy: Any, seed: int, shape: EngineShape = SHAPE, **more: Any) -> SimulatedRun:
    return simulate(workload, replace(shape, max_num_batched_tokens=TOKENS), MODEL, policy=policy, seed=seed, **more)


def fairness(load: float, seed: int, arguments: argparse.Namespace) -> float:
    """Two clients that send 90 and 180 requests a minute of 256 tokens each way: the gap as a share of the paper's bound."""
    num = min(arguments.requests, 600)
    drawn = make_workload(poisson_arrivals(num, load * 4.5, seed), fixed_lengths(num, 256, 256))
    workload = assign_tenants(drawn, (1 / 3, 2 / 3), seed)
    shape = replace(SHAPE, num_blocks=640, max_model_len=4096)  # as in the paper, memory for 10,000 tokens
    run = served(workload, "vtc", seed, shape)
    fair = fairness_of(run.timeline, run.workload)
    assert fair is not None
    return fair.gap / (2 * max(256, 2 * shape.num_blocks * shape.block_size)) if fair.num_windows else math.nan


def fair_to_fcfs(load: float, seed: int, arguments: argparse.Namespace) -> float:
    """The 99th percentile of waiting of the client that sends a tenth, under vtc and under fcfs."""
    workload = assign_tenants(conversations(load, seed, arguments, READER), (0.9, 0.1), seed)
    waits = []
    for policy in ("vtc", "sarathi"):
        run = served(workload, policy, seed)
        fair = fairness_of(run.timeline, run.workload)
        assert fair is not None
        waits.append(fair.queue_p99_s[1])
    return waits[0] / max(waits[1], 1e-3)


def tail(policy: str, load: float, seed: int, arguments: argparse.Namespace) -> float:
    """The 99th percentile of the time to the last token, to that of SRPT that knows all lengths."""
    num = arguments.requests
    lengths = lognormal_lengths(num, (400, 3000), (350, 4000), longest=6000, seed=seed)
    workload = make_workload(bursty_arrivals(num, load, seed=seed), lengths, "reasoning")
    shape = replace(SHAPE, num_blocks=6000, max_model_len=12_288)
    times = [
        float(np.nanquantile(served(workload, one, seed, shape).timeline.e2e, 0.99))
        for one in (policy, shortest_remaining)
    ]
    return times[0] / times[1]


def first_tokens(policy: str, load: float, seed: int, arguments: argparse.Namespace) -> float:
    """The 95th percentile of the time to the first token, to that of first come, first served."""
    workload = conversations(load, seed, arguments, READER)
    times = [float(np.nanquantile(served(workload, one, seed).timeline.ttft, 0.95)) for one in (policy, "sarathi")]
    return times[0] / times[1]


def mean_experience(run: SimulatedRun) -> float:
    timeline, workload = run.timeline, run.workload
    found = []
    for row in range(len(timeline)):
        slo = workload.kind(row).slo
        assert slo is not None
        times = timeline.token_times(row)
        found.append(experience(times, slo, float(timeline.arrival[row]), int(timeline.num_prompt[row])))
    return float(np.mean(found))


def quality(load: float, seed: int, arguments: argparse.Namespace) -> float:
    """The mean quality of experience, to that of first come, first served; memory for a fifth of the usual."""
    workload, shape = surge(load, seed, arguments, READER), replace(SHAPE, num_blocks=5000, max_model_len=8192)
    return mean_experience(served(workload, "andes", seed, shape)) / mean_experience(
        served(workload, "sarathi", seed, shape)
    )


def effective(load: float, seed: int, arguments: argparse.Namespace) -> float:
    """Requests on time (a second to the first token, a second at most between two as the mean), to first come, first served."""
    workload = surge(load, seed, arguments, "all:1:ttft=1,tpot=1")
    shape = replace(SHAPE, num_blocks=5000, max_model_len=8192)
    counts = []
    for policy in ("apt-serve", "sarathi"):
        run = served(workload, policy, seed, shape)
        counts.append(
            int((good(run.timeline, run.workload.promises, "tpot") & (run.timeline.outcome == FINISHED)).sum())
        )
    return counts[0] / max(1, counts[1])


LONG = 2048
"""What each request asks for at most; nearly all end earlier by themselves."""
TIGHT_AND_LOOSE = "tight:0.5:ttft=0.5+p/4000,tpot=0.05 loose:0.5:ttft=5+p/4000,tpot=0.2"


def goodput(run: SimulatedRun) -> float:
    """Requests that kept both promises, per second of arrivals; those that were turned away did not."""
    kept = good(run.timeline, run.workload.promises, "tpot") & (run.timeline.outcome == FINISHED)
    return max(1.0, float(kept.sum())) / float(run.workload.arrival[-1])


def foreseen(load: float, seed: int, arguments: argparse.Namespace) -> float:
    """Goodput with admission by past-future, to the better of a scheduler that admits what fits now and one that admits only
    what fits at its longest. Memory for 40,000 tokens; lengths are not known."""
    workload = surge(load, seed, arguments, "all:1:ttft=10,tpot=0.1").asking_for(LONG)
    shape = replace(SHAPE, num_blocks=2500, max_model_len=12_288)
    mine, aggressive, conservative = (
        goodput(served(workload, "sarathi", seed, shape, admission=admission))
        for admission in ("past-future", None, "worst-case")
    )
    return mine / max(aggressive, conservative)


def guarded(policy: str, admission: str, load: float, seed: int, arguments: argparse.Namespace) -> float:
    """Goodput with one of the guards, to that of first come, first served, with tight and loose promises."""
    workload = surge(load, seed, arguments, TIGHT_AND_LOOSE)
    return goodput(served(workload, policy, seed, admission=admission)) / goodput(served(workload, "sarathi", seed))


SCORPIO = "SCORPIO improves system goodput by up to 14.4X and SLO adherence by up to 46.5% compared to state-of-the-art baselines"
CLAIMS = (
    Claim(
        "vtc, bound", "VTC, OSDI 2024",
        "We prove a 2x tight upper bound on the service difference between two backlogged clients, adhering to the requirement "
        "of work-conserving.",
        (0.0, 1.0), "gap in service within a window / bound of the paper",
        "two clients, 256 tokens each way, beyond what the engine can take", "windows of a sixtieth of the run",
        (1.0, 1.5), fairness, False,
    ),
    Claim(
        "vtc, isolation", "VTC, OSDI 2024",
        "Through extensive experiments, we demonstrate the superior performance of VTC in ensuring fairness",
        (0.0, 1.0), "p99 of waiting of the light client / that under fcfs",
        "Azure conversations, one client sends nine tenths", "no figure is in the sentence: less than 1 is superior",
        (4.5, 5.5), fair_to_fcfs, False,
    ),
    Claim(
        "uniboost, tail", "UniBoost, ICML 2026",
        "our method reduces P99 TTLT by up to 35-50% relative to SRPT with perfect length knowledge",
        (0.5, 0.95), "p99 of the time to the last token / that of SRPT that knows all lengths",
        "reasoning: lognormal outputs, median 350 and p99 4,000; bursts; memory for 96,000 tokens",
        "the authors' code was not there: boosts as published, the rest from the description",
        (5.0, 6.5), partial(tail, "uniboost"), False,
    ),
    Claim(
        "uniboost, first token", "UniBoost, ICML 2026", "reduces TTFT by 34-47% across workloads", (0.53, 0.66),
        "p95 of the time to the first token / that under fcfs", "Azure conversations",
        "the paper's baseline is not in the sentence; it is vLLM's fcfs here", (3.0, 4.0), partial(first_tokens, "uniboost"),
        False,
    ),
    Claim(
        "andes, experience", "Andes, arXiv 2404.16283",
        "Andes improves the average QoE by up to 4.7x given the same GPU resource", (1.05, 4.7),
        "mean quality of experience / that under fcfs", "the lengths of Azure conversations in bursts; memory for 80,000 tokens",
        "preempted requests are computed again, never swapped", (4.0, 5.0, 6.0), quality,
    ),
    Claim(
        "apt-serve, effective throughput", "Apt-Serve, SIGMOD 2025",
        "Apt-Serve achieves up to 8.8x improvement in effective throughput compared to the state-of-the-art inference serving "
        "systems", (1.05, 8.8), "requests on time / those under fcfs",
        "the lengths of Azure conversations in bursts; memory for 80,000 tokens", "no cache of hidden states",
        (4.0, 5.0, 6.0), effective,
    ),
    Claim(
        "past-future, goodput", "Past-Future, ASPLOS 2025",
        "LightLLM demonstrates superior goodput, achieving up to 2-3x higher goodput than other schedulers under heavy loads",
        (1.05, 3.0), "goodput / that of the better of aggressive and conservative admission",
        "the lengths of Azure conversations in bursts, of which 2,048 tokens are asked; memory for 40,000 tokens",
        "one engine under all three; 10 s to the first token, 0.1 s between two", (3.0, 4.0, 5.0), foreseen,
    ),
    Claim(
        "ttft-reject, goodput", "SCORPIO, arXiv 2505.23022", SCORPIO, (1.05, 14.4), "goodput / that under fcfs",
        "the lengths of Azure conversations in bursts, half of the promises tight and half loose",
        "the guard of first tokens alone: earliest deadline first, and what cannot be in time is turned away", (4.0, 5.0, 6.0),
        partial(guarded, "edf", "ttft-reject"),
    ),
    Claim(
        "credit, goodput", "SCORPIO, arXiv 2505.23022", SCORPIO, (1.05, 14.4), "goodput / that under fcfs",
        "the lengths of Azure conversations in bursts, half of the promises tight and half loose",
        "the guard of later tokens alone: credits in batches of earliest deadline first", (4.0, 5.0, 6.0),
        partial(guarded, "edf", "credit"),
    ),
)  # fmt: skip

CAPACITIES = (
    (
        "slidingserve, capacity", "SlidingServe, arXiv 2606.05933",
        "SlidingServe can improve service capacity by up to 30% compared to advanced scheduling systems under various load "
        "conditions", (1.05, 1.3), "slidingserve,step_time=model@2048", "qoserve,alpha=0.0005,step_time=model@2048",
        "from its abstract: no code is public",
    ),
    (
        "slos-serve, capacity", "SLOs-Serve, arXiv 2504.08784",
        "SLOs-Serve improves per-GPU serving capacity by 2.2x on average compared to prior state-of-the-art systems",
        (2.2, 2.2), "edf@512+slos-serve", "sarathi@512",
        "one application, one replica: what is turned away counts as missed; no drafts",
    ),
)  # fmt: skip
"""Name, paper, sentence, ratio, variant, baseline, what differs."""


def row_of(claim: Claim, arguments: argparse.Namespace) -> dict[str, Any]:
    best: tuple[float, float, float, float] | None = None
    for load in claim.loads:
        ratios = [claim.measure(load, seed, arguments) for seed in range(arguments.seeds)]
        mean, low, high = band([max(ratio, 1e-6) for ratio in ratios])
        print(f"{claim.name} at {load:g}: {mean:.3f} [{low:.3f}, {high:.3f}]", flush=True)
        if best is None or math.isnan(best[1]) or (not math.isnan(mean) and (mean > best[1]) == claim.is_gain):
            best = load, mean, low, high
    assert best is not None
    workload = f"{claim.workload}; at {best[0]:g} a second"
    return told(claim.paper, claim.sentence, claim.published, claim.measured, workload, best[1:], claim.differs)


def verdict_on(published: tuple[float, float], found: tuple[float, float, float]) -> str:
    """Whether what was found, a mean and its interval, is what was published. A bound of the paper begins at 0."""
    mean, low, high = found
    least, most = published
    if math.isnan(mean):
        return "not tested"
    if low <= 1.0 <= high and not least <= 1.0 <= most:
        return "not told apart"
    if high < least:
        return "less"
    if low > most:
        return "no" if least <= 0.0 else "more"
    return "yes" if least <= mean <= most and high < math.inf else "within the band"


def told(
    paper: str,
    sentence: str,
    published: tuple[float, float],
    measured: str,
    workload: str,
    found: tuple[float, float, float],
    differs: str,
) -> dict[str, Any]:
    mean, low, high = found
    low_end, high_end = published
    verdict = verdict_on(published, found)
    ends = f"{low_end:g}" if low_end == high_end else f"{low_end:g} to {high_end:g}"
    here = f"> {low:.2f}" if math.isinf(high) else f"{mean:.2f} ({low:.2f} to {high:.2f})"
    here = "not known" if math.isnan(mean) else here
    return {
        "paper": paper, "sentence": f'"{sentence}"', "ratio": measured, "workload": workload, "published": ends,
        "here": here, "reproduced": verdict, "what differs": differs,
    }  # fmt: skip


def told_apart(row: dict[str, Any]) -> tuple[str, str, str]:
    """Of which claim a row is; the load is no part of it."""
    differs = re.split("; (?:without rates at which )?the backlog ", row["what differs"])[0]
    return row["sentence"], differs, row["workload"].partition("; at ")[0]


def capacity_ratio(results: SweepResults, mine: str, other: str) -> tuple[tuple[float, float, float], list[str]]:
    """Of the rates that both sustain at 90 %, with its band; and those whose backlog grows at higher ones, which do not count."""
    both = [one for x in (mine, other) if (one := sustained(results, x, 0.9, "deadline", "overall")) is not None]
    grows = [one.label for one in both if one.grows_from is not None]
    ratio = sustained_ratio(*both) if len(both) == 2 else None
    if ratio is None:
        return (math.nan, math.nan, math.nan), grows
    return (ratio.value, ratio.low, math.inf if ratio.high_is_open else ratio.high), grows


def capacities(arguments: argparse.Namespace, wanted: Sequence[str]) -> list[dict[str, Any]]:
    """Of both traces, each a row."""
    rows = []
    chosen = [one for one in CAPACITIES if not wanted or one[0] in wanted]
    variants = list(dict.fromkeys(text for one in chosen for text in one[4:6]))
    if not variants:
        return rows
    for trace, start in (("conv", 3.0), ("code", 0.5)):
        path = Path(arguments.traces) / f"AzureLLMInferenceTrace_{trace}.csv"
        num = min(arguments.requests, len(load_trace(path).workload) // arguments.seeds)
        scenario = Scenario(workload=str(path), num_requests=num, mix=MIX, shape=SHAPE)
        results = Sweep(scenario, [Variant.parse(text) for text in variants], range(arguments.seeds)).run(
            targets=(0.9,), readings=("deadline",), aggregates=("overall",), ladder=Ladder(start, step=0.04),
            num_processes=arguments.processes,
            on_progress=lambda done, known, point: print(f"{done}/{known} {point}", flush=True),
        )  # fmt: skip
        for _, paper, sentence, published, mine, other, differs in chosen:
            found, grows = capacity_ratio(results, mine, other)
            more = f"; without rates at which the backlog of {' and '.join(grows)} grows" if grows else ""
            rows.append(
                told(
                    paper, sentence, published, f"highest rate / that of {other}", f"Azure {trace}, its own arrivals", found,
                    differs + more,
                )
            )  # fmt: skip
    return rows


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--traces", default=".", help="the folder of the Azure traces of 2023")
    parser.add_argument("--seeds", type=int, default=5)
    parser.add_argument("--requests", type=int, default=1200, help="of each seed")
    names = [claim.name for claim in CLAIMS] + [one[0] for one in CAPACITIES]
    parser.add_argument("--only", nargs="*", default=[], choices=names)
    parser.add_argument("--processes", type=int, default=None)
    parser.add_argument("--json", type=Path)
    arguments = parser.parse_args()
    load_before = os.getloadavg()
    rows = [row_of(claim, arguments) for claim in CLAIMS if not arguments.only or claim.name in arguments.only]
    rows += capacities(arguments, arguments.only)
    print_table("what papers claim, and what is simulated", rows)
    if arguments.json is None:
        return
    made = {
        "bench": "policies",
        "command": command(),
        "environment": environment(),
        "load_before": [round(x, 2) for x in load_before],
        "configuration": {
            "requests per seed": arguments.requests,
            "seeds": arguments.seeds,
            "step times": MODEL.name,
            "versions": versions(),
        },
        "claims": rows,
    }
    if arguments.only and arguments.json.exists():
        # Rows of other claims are kept, so that the table may be made in parts; the note says how these were made.
        known = json.loads(arguments.json.read_text())
        kept = [row for row in known["claims"] if all(told_apart(row) != told_apart(new) for new in rows)]
        how = f"{', '.join(arguments.only)}: {arguments.requests} requests per seed, {arguments.seeds} seeds."
        made = known | {"claims": kept + rows, "note": " ".join(filter(None, (known.get("note"), how)))}
    write_json(arguments.json, made)


if __name__ == "__main__":
    main()
