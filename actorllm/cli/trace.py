"""`actorllm trace`: public traces and files of one's own: list, fetch, show, convert, sample. Called by the command line."""

from __future__ import annotations

import math
import sys
from pathlib import Path
from typing import TYPE_CHECKING

from cyclopts import App

from actorllm.cli.options import check_writable
from actorllm.errors import ConfigError

if TYPE_CHECKING:
    from actorllm.messages import I32
    from actorllm.slo.traces import Trace
    from actorllm.slo.workload import Workload

trace = App(name="trace", help="Traces to replay and to simulate: public ones, and files of your own.")


@trace.command(name="list")
def list_traces() -> None:
    """List the public traces that can be downloaded, with their licences."""
    from actorllm.slo.live.catalogue import TRACES, traces_folder

    for entry in TRACES.values():
        path = traces_folder() / entry.file_name
        size = f"{entry.size:,} bytes" if entry.size is not None else "size not known here"
        print(f"{entry.name}  ({entry.licence}, {size}){'  downloaded: ' + str(path) if path.exists() else ''}")
        print(f"    {entry.about}")
        print(f"    {entry.url}")
        print(f"    SHA-256 {entry.sha256 or 'not known here: only the transfer can be checked'}")


@trace.command
def fetch(name: str, /, *, output: Path | None = None) -> None:
    """Download the public trace NAME. Started again after an interruption it goes on where it was.

    By downloading it you agree to its licence.

    Parameters
    ----------
    output
        To this file; default: $XDG_CACHE_HOME/actorllm/traces, where every command finds it by its name.
    """
    from tqdm import tqdm

    from actorllm.slo.live import catalogue

    wanted = catalogue.public_trace(name)
    path = output if output is not None else catalogue.traces_folder() / wanted.file_name
    with tqdm(total=wanted.size, desc=name, unit="B", unit_scale=True, dynamic_ncols=True, leave=False) as bar:

        def progress(done: int, total: int | None) -> None:
            bar.total = total
            bar.update(done - bar.n)

        found = catalogue.fetch(wanted, path, progress)
    print(path)
    if wanted.sha256 is None:
        print(f"SHA-256 {found}; none is known to compare it with", file=sys.stderr)


@trace.command
def show(
    file: str,
    /,
    *,
    format: str | None = None,
    block_tokens: int | None = None,
) -> None:
    """Say what is in FILE: how many requests, how long, how bursty; and which rows cannot be used.

    Parameters
    ----------
    file
        A file, a ServeGen folder, or the name of a public trace that was downloaded.
    format
        azure, vidur, burstgpt, mooncake, timed, tracelab or servegen; default: seen from the file.
    block_tokens
        Tokens that one hash id stands for; default: what its rows say, else 512 (Mooncake) or 16 (timed).
    """
    found = _load(file, format, block_tokens)
    for label, value in _statistics(found.workload).items():
        print(f"{label:>16}  {value}")
    print()
    print(found.report)


@trace.command
def convert(
    file: str,
    output: Path,
    /,
    *,
    format: str | None = None,
    block_tokens: int | None = None,
    num_requests: int | None = None,
    rate: float | None = None,
    mix: str | None = None,
    output_block_tokens: int | None = None,
    seed: int = 0,
) -> None:
    """Write the requests of FILE to OUTPUT as JSON lines, which every command reads.

    Parameters
    ----------
    file
        A file, a ServeGen folder, or the name of a public trace that was downloaded.
    output
        JSON lines with the keys of Mooncake's traces, and slo, type_info, tenant, priority.
    format
        azure, vidur, burstgpt, mooncake, timed, tracelab or servegen; default: seen from the file.
    block_tokens
        Tokens that one hash id of FILE stands for; default: what its rows say, else 512 (Mooncake) or 16 (timed).
    num_requests
        The first so many of them.
    rate
        Requests per second to which the gaps are scaled.
    mix
        Classes with their objectives, drawn by the seed: "ls:0.5:ttft=0.5+p/4000,tpot=0.05 be:0.5:e2e=120".
    output_block_tokens
        Regroup the hash ids to stand for so many tokens each, a multiple or a divisor of those of FILE; 512 for programs
        that read Mooncake's traces. Default: as they are; rows say how many unless it is 512.
    """
    from actorllm.slo.traces import write_trace
    from actorllm.slo.workload import assign_classes, parse_mix

    check_writable(output=output)
    found = _load(file, format, block_tokens)
    workload = found.workload if num_requests is None else found.workload.head(num_requests)
    workload = workload if rate is None else workload.at_rate(rate)
    workload = workload if mix is None else assign_classes(workload, parse_mix(mix), seed)
    if output_block_tokens is not None and workload.prefixes is None:
        raise ConfigError(
            f"output_block_tokens={output_block_tokens}: the requests of {file} have no hash ids to regroup"
        )
    write_trace(workload, output, block_tokens=output_block_tokens)
    print(f"{len(workload)} requests in {output}")
    before = None if workload.prefixes is None else workload.prefixes.block_tokens
    after = output_block_tokens or before
    if before is not None and after is not None and after > before:
        told = (
            f"hash ids stand for {after} tokens now instead of {before}: what prompts share ends at a multiple of that"
        )
        print(f"note: {told}", file=sys.stderr)
    if found.report.num_skipped:
        print(found.report, file=sys.stderr)


@trace.command
def sample(
    output: Path,
    /,
    *,
    num_requests: int = 200,
    rate: float = 2.0,
    cv: float = 2.0,
    mix: str | None = "ls:0.5:ttft=0.5+p/4000,tpot=0.05 be:0.5:e2e=120",
    num_prefixes: int = 4,
    seed: int = 7,
) -> None:
    """Write synthetic requests to OUTPUT: conversations with lengths like those of the Azure trace of 2023.

    With nothing else said it is the sample that comes with the package.

    Parameters
    ----------
    rate
        Requests per second.
    cv
        How bursty they come; 1: Poisson.
    mix
        Classes with their objectives.
    num_prefixes
        How many system prompts of 512 tokens they share; 0: nothing is shared.
    """
    from actorllm.slo.traces import MOONCAKE_BLOCK_TOKENS, write_trace
    from actorllm.slo.workload import assign_classes, parse_mix, share_prefixes, synthetic

    check_writable(output=output)
    workload = synthetic(num_requests, rate, seed=seed, cv=cv)
    if num_prefixes:
        size = MOONCAKE_BLOCK_TOKENS
        workload = share_prefixes(workload, num_groups=num_prefixes, num_tokens=size, block_tokens=size, seed=seed)
    workload = workload if mix is None else assign_classes(workload, parse_mix(mix), seed)
    write_trace(workload, output)
    print(f"{len(workload)} requests in {output}")


def _load(file: str, format: str | None, block_tokens: int | None) -> Trace:
    from actorllm.slo.live.catalogue import find_trace
    from actorllm.slo.traces import load_trace

    return load_trace(find_trace(file), format, block_tokens=block_tokens)


def _statistics(workload: Workload) -> dict[str, str]:
    import numpy as np

    from actorllm.types.objective import RequestClass

    span = float(workload.arrival[-1] - workload.arrival[0])
    minutes = np.bincount(((workload.arrival - workload.arrival[0]) // 60).astype(int))
    peak = f"; the busiest minute has {minutes.max() / 60:.2f}" if minutes.size > 2 else ""
    rate = f"{workload.rate:.3g} per second{peak}" if math.isfinite(workload.rate) else "all at once"

    def spread(values: I32) -> str:
        p50, p90, p99 = np.percentile(values, (50, 90, 99))
        return f"{int(values.sum()):,} tokens; median {p50:.0f}, p90 {p90:.0f}, p99 {p99:.0f}, most {int(values.max())}"

    rows = {
        "requests": f"{len(workload):,} in {span:,.1f} s",
        "arrivals": f"{rate}; CV {workload.cv:.2f} (1: Poisson)",
        "prompts": spread(workload.num_prompt),
        "outputs": spread(workload.num_output),
    }
    if workload.prefixes is not None:
        ids = workload.prefixes.ids
        first_seen = np.unique(ids).size
        known = 1 - first_seen / max(ids.size, 1)
        rows["prefixes"] = f"blocks of {workload.prefixes.block_tokens} tokens; {known:.0%} of them were there before"
    if workload.classes != (RequestClass("all"),):
        counts = np.bincount(workload.class_ids, minlength=len(workload.classes)).tolist()
        rows["classes"] = ", ".join(f"{kind.name} {num}" for kind, num in zip(workload.classes, counts, strict=True))
    if workload.tenants:
        rows["tenants"] = str(len(workload.tenants))
    return rows
