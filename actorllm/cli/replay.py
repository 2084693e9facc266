"""`actorllm replay`: a trace in real time against an engine in this process, or a server. Called by the command line."""

from __future__ import annotations

import os
import sys
import tempfile
from pathlib import Path
from typing import TYPE_CHECKING, Any

from actorllm.cli.options import EngineFlags, check_writable
from actorllm.errors import ConfigError, EngineError

if TYPE_CHECKING:
    from actorllm.slo.live.embedded import EmbeddedTarget
    from actorllm.slo.live.replay import LiveRun, Target
    from actorllm.slo.live.steps import RecordedSteps
    from actorllm.slo.metrics import RunMetrics
    from actorllm.slo.workload import Workload


def replay(
    trace: str | None = None,
    /,
    *,
    engine_options: EngineFlags = EngineFlags(),  # noqa: B008 - frozen
    url: str | None = None,
    served_model_name: str | None = None,
    vocab_size: int | None = None,
    format: str | None = None,
    block_tokens: int | None = None,
    num_requests: int | None = None,
    rate: float | None = None,
    time_scale: float | None = None,
    length_scale: float | None = None,
    mix: str | None = None,
    seed: int = 0,
    until: float | None = None,
    max_concurrency: int | None = None,
    num_warmups: int = 1,
    output_json: Path | None = None,
    save_detailed: bool = False,
    report: Path | None = None,
    timeline: Path | None = None,
) -> None:
    """Send the requests of TRACE when they are due, whatever becomes of those before, and say how they fared.

    Latencies count from when a request was due, so a client that is late hides nothing. Requests that are too long for the
    model are left out, unless their lengths are scaled.

    Parameters
    ----------
    trace
        A file, or the name of a public trace that was downloaded (`actorllm trace`); default: the sample that comes along.
    url
        A server with the OpenAI API, instead of an engine in this process.
    served_model_name
        What that server calls the model; default: the first one that it lists.
    vocab_size
        Prompts are random token ids below this; default: the model's, of a server 4000.
    format
        azure, vidur, burstgpt, mooncake, timed, tracelab or servegen; default: seen from the file.
    block_tokens
        Tokens that one hash id stands for.
    num_requests
        The first so many of them.
    rate
        Requests per second to which the gaps are scaled.
    time_scale
        Gaps are so many times as long; below 1 the requests come faster.
    length_scale
        Prompts and outputs are so many times as long.
    mix
        Classes with their objectives, drawn by the seed: "ls:0.5:ttft=0.5+p/4000,tpot=0.05 be:0.5:e2e=120".
    until
        Cut the run off so many seconds after the first arrival.
    max_concurrency
        Requests under way at a time; others are due when one has ended.
    num_warmups
        Requests before the first one.
    output_json
        Write the figures to this file, with the keys of `vllm bench serve`.
    save_detailed
        Also those of every request.
    report
        Write a page with figures and timelines to this file, as of a simulated run.
    timeline
        Write a Chrome trace of the requests to this file (open it in Perfetto).
    """
    import anyio
    import orjson

    check_writable(output_json=output_json, report=report, timeline=timeline)
    if until is not None and not until > 0:
        raise ConfigError(f"until={until} must be a positive number of seconds after the first arrival")
    if num_warmups < 0:
        raise ConfigError(f"num_warmups={num_warmups} must be 0 or more")
    workload = _workload(trace, format, block_tokens, num_requests, rate, time_scale, length_scale, mix, seed)
    if url is not None:
        given = engine_options.changed()
        if given:
            raise ConfigError(f"the server has its own engine: {', '.join(given)} cannot be given with --url")
    elif served_model_name is not None or vocab_size is not None:
        raise ConfigError("--served-model-name and --vocab-size are for a server (--url)")
    steps: RecordedSteps | None = None
    arguments = {
        "seed": seed,
        "until": float("inf") if until is None else until,
        "num_warmups": num_warmups,
        "max_concurrency": max_concurrency,
    }

    async def run() -> LiveRun:
        nonlocal steps
        if url is not None:
            try:
                from actorllm.slo.live.openai import VOCAB_SIZE, OpenAITarget
            except ModuleNotFoundError as error:
                raise ConfigError(str(error)) from error
            key = os.environ.get("OPENAI_API_KEY")
            async with OpenAITarget(url, served_model_name, api_key=key, vocab_size=vocab_size or VOCAB_SIZE) as server:
                return await _replayed(workload, server, length_scale is None, arguments)
        from actorllm.api.async_llm import AsyncLLM
        from actorllm.slo.live.embedded import EmbeddedTarget

        with tempfile.TemporaryDirectory(prefix="actorllm-replay-") as folder:
            record = Path(folder) / "run.bin" if report is not None or timeline is not None else None
            async with AsyncLLM(engine_options.model, record=record, **engine_options.arguments()) as llm:
                target = EmbeddedTarget(llm)
                found = await _replayed(workload, target, length_scale is None, arguments)
                told = (await llm.stats())["scheduler"]
                for name in ("policy_failure", "admission_failure", "step_model"):
                    if told[name] is not None:
                        print(f"{name.replace('_', ' ')}: {told[name]}", file=sys.stderr)
            if record is not None:
                if (stopped := told["recording"]["stopped"]) is None:
                    steps = _steps(record, found, target)
                else:
                    print(
                        f"note: steps are left out of report and timeline: their recording stopped: {stopped}",
                        file=sys.stderr,
                    )
            return found

    found = anyio.run(run)
    _print(found)
    if output_json is not None:
        result = found.to_dict(is_detailed=save_detailed)
        output_json.write_bytes(orjson.dumps(result, option=orjson.OPT_INDENT_2))
    if timeline is not None:
        from actorllm.slo.report import chrome_trace

        known = (None, None) if steps is None else (steps.journal, steps.keys)
        timeline.write_bytes(orjson.dumps(chrome_trace(found.timeline, found.workload, *known)))
    if report is not None:
        from actorllm.slo.experiments.stamp import stamp
        from actorllm.slo.report import run_page

        title = f"{found.workload.name} on {found.model}, live"
        journal, model = (None, None) if steps is None else (steps.journal, steps.model)
        more = {"seed": seed, "policy": engine_options.scheduling_policy if url is None else None, "server": url}
        html = run_page(
            title,
            found.timeline,
            found.workload,
            journal,
            model,
            stamp(),
            notes=found.warnings,
            more=more,
            due=found.due,
        )
        report.write_text(html, encoding="utf-8")
        print(f"report: {report}")
    if all(found.errors):
        raise EngineError(f"every request failed, the first with: {found.errors[0]}")


def _steps(record: Path, run: LiveRun, target: EmbeddedTarget) -> RecordedSteps | None:
    """What steps held; None where that is not known: no request got so far, or the scheduler died on the way."""
    from actorllm.slo.live.steps import recorded_steps

    if len(list(record.parent.iterdir())) != 1:
        return None
    steps = recorded_steps(record, run, target)
    if steps.deviation is None:
        return steps
    print(f"note: steps are left out of report and timeline: {steps.deviation}", file=sys.stderr)
    return None


def _workload(
    trace: str | None,
    format: str | None,
    block_tokens: int | None,
    num_requests: int | None,
    rate: float | None,
    time_scale: float | None,
    length_scale: float | None,
    mix: str | None,
    seed: int,
) -> Workload:
    from actorllm.slo.live.catalogue import find_trace
    from actorllm.slo.live.prompts import with_lengths_scaled
    from actorllm.slo.traces import SAMPLE, load_trace
    from actorllm.slo.workload import assign_classes, parse_mix

    if rate is not None and time_scale is not None:
        raise ConfigError(f"rate={rate} and time_scale={time_scale} both say how fast requests come; give one of them")
    if length_scale is not None and length_scale <= 0:
        raise ConfigError(f"length_scale={length_scale} must be positive")
    if num_requests is not None and num_requests < 1:
        raise ConfigError(f"num_requests={num_requests} must be at least 1")
    read = load_trace(SAMPLE if trace is None else find_trace(trace), format, block_tokens=block_tokens)
    if read.report.num_skipped:
        print(read.report, file=sys.stderr)
    workload = read.workload
    if num_requests is not None:
        workload = workload.head(num_requests)
    if length_scale is not None:
        workload = with_lengths_scaled(workload, length_scale)
    if rate is not None:
        workload = workload.at_rate(rate)
    if time_scale is not None:
        workload = workload.scaled(time_scale)
    return workload if mix is None else assign_classes(workload, parse_mix(mix), seed)


async def _replayed(workload: Workload, target: Target, is_fitted: bool, arguments: dict[str, Any]) -> LiveRun:
    from tqdm import tqdm

    from actorllm.slo.live.replay import replay as send_all

    await target.prepare()
    longest = target.max_model_len
    if is_fitted and longest is not None:
        fitting = workload.fitting(longest)
        if len(fitting) < len(workload):
            num = len(workload) - len(fitting)
            print(f"{num} of {len(workload)} requests are left out: longer than {longest} tokens", file=sys.stderr)
        workload = fitting
    with tqdm(total=len(workload), desc="Requests", dynamic_ncols=True) as progress:
        return await send_all(workload, target, on_end=lambda row: progress.update(), **arguments)


def _print(run: LiveRun) -> None:
    metrics = run.evaluate(with_fluidity=True)
    lag = run.lag[run.lag == run.lag]
    figures = metrics.summary
    rows = {
        "requests": f"{len(run.workload)} in {figures['duration']:.1f} s; {figures['completed']} finished, "
        f"{figures['actorllm_num_failed']} failed, {figures['actorllm_num_aborted']} aborted",
        "throughput": f"{figures['request_throughput']:.3g} requests/s, {figures['output_throughput']:.4g} output tokens/s",
        "sent late by": f"{1e3 * float(lag.mean()):.2f} ms on average, {1e3 * float(lag.max()):.2f} ms at most"
        if lag.size
        else "nothing was sent",
    }
    for label, value in rows.items():
        print(f"{label:>13}  {value}")
    print()
    _print_table(metrics, run.workload.promised)
    for warning in run.warnings:
        print(f"warning: {warning}", file=sys.stderr)


def _print_table(metrics: RunMetrics, promised: set[str]) -> None:
    header = (
        "class",
        "requests",
        "TTFT p50",
        "p99 ms",
        "TPOT p50",
        "p99 ms",
        "E2E p50",
        "p99 ms",
        "good: tpot",
        "deadline",
    )
    from actorllm.types.objective import READINGS

    rows = [list(header)]
    for part in (*metrics.classes, *([metrics.overall] if len(metrics.classes) > 1 else [])):
        latencies = [f"{part.latency_ms[f'p{p}_{name}_ms']:.4g}" for name in ("ttft", "tpot", "e2el") for p in (50, 99)]
        is_promised = part.name in promised or (part is metrics.overall and bool(promised))
        shares = [f"{part.attainment[reading]:.1%}" if is_promised else "-" for reading in READINGS]
        rows.append([part.name, str(part.num_requests), *latencies, *shares])
    widths = [max(len(row[column]) for row in rows) for column in range(len(header))]
    for row in rows:
        print("  ".join(text.rjust(width) for text, width in zip(row, widths, strict=True)))
