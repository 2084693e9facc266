"""`actorllm leaderboard`: all policies on one workload, in the order of what each sustains."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Annotated

from actorllm.cli.laboratory import DEFAULT, Many, ScenarioOptions, check_apart, print_rows, progress
from actorllm.cli.options import check_writable
from actorllm.errors import ConfigError

ENTRIES = {
    "andes": "andes,step_time=model@512",
    "apt-serve": "apt-serve@512",
    "cohost": "cohost,step_time=model@2048",
    "edf": "edf@512",
    "fairbatch": "fairbatch,step_time=model@2048",
    "fcfs": "fcfs@512",
    "hrrn": "hrrn@2048",
    "priority": "priority@512",
    "qoserve": "qoserve,step_time=model@2048",
    "sarathi": "sarathi@512",
    "slidingserve": "slidingserve,step_time=model@2048",
    "srpf": "srpf@2048",
    "uniboost": "uniboost@512",
    "vtc": "vtc@512",
    "edf+slos-serve": "edf@512+slos-serve",
    "edf+ttft-reject": "edf@512+ttft-reject",
    "edf+credit": "edf@512+credit",
}
"""Every policy that ships, with the chunk at which it does well on conversations; and admission policies for the pace."""


def leaderboard(
    *,
    policies: Annotated[list[str] | None, Many] = None,
    also: Annotated[list[str] | None, Many] = None,
    rate: float = 2.5,
    targets: Annotated[list[float] | None, Many] = None,
    seeds: int = 12,
    options: ScenarioOptions = DEFAULT,
    results: Path = Path("leaderboard.jsonl"),
    report: Path = Path("leaderboard.html"),
    num_processes: int | None = None,
) -> None:
    """Find the highest rate that each policy sustains, and write a page with their ranks.

    A command that was killed goes on where it was: what RESULTS has is not simulated again.

    Parameters
    ----------
    policies
        NAME[,knob=value...][@tokens per step][+admission], several; every policy that ships if not given.
    also
        More of them, beside those that ship.
    rate
        Requests per second at which searches begin.
    targets
        Shares of requests that must keep their promises; 0.9 if not given.
    seeds
        How many; the same requests for every policy. Of fewer than 12, bands of bursty arrivals are too narrow.
    results
        Every point is added to this file.
    report
        Write the page to this file.
    num_processes
        As many as there are cores if not given; 0: only this one.
    """
    from actorllm.slo.experiments import Ladder, Sweep, Variant
    from actorllm.slo.report.lead import READS, figure_of
    from actorllm.slo.report.leaderboard_page import leaderboard_page, places
    from actorllm.types.objective import READINGS

    scenario = options.scenario()
    texts = [*(ENTRIES.values() if policies is None else policies), *(also or ())]
    variants = [Variant.parse(text) for text in dict.fromkeys(texts)]
    if not variants:
        raise ConfigError("policies is empty: name at least one, or leave it out for every policy that ships")
    if seeds < 1:
        raise ConfigError(f"seeds={seeds} must be at least 1")
    check_apart(results=results, report=report)
    check_writable(report=report)
    wanted = targets or [0.9]
    with progress() as tell:
        found = Sweep(scenario, variants, range(seeds)).run(
            targets=wanted,
            aggregates=("worst",),
            ladder=Ladder(rate),
            store=results,
            num_processes=num_processes,
            on_progress=tell,
        )
    for note in found.notes:
        print(f"note: {note}", file=sys.stderr)
    for target in wanted:
        for reading in READINGS:
            rows = [("RANK", f"{100 * target:g}% by {READS[reading]}", "REQUESTS/S")]
            rows += [(str(place.rank), place.label, figure_of(place.found)) for place in places(found, target, reading)]
            print_rows(rows)
            print()
    report.write_text(leaderboard_page(found), encoding="utf-8")
    print(f"results: {results}")
    print(f"report: {report}")
    if found.failures:
        for failure in found.failures:
            print(f"failed: {failure}", file=sys.stderr)
        raise SystemExit(1)
