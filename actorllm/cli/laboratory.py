"""`actorllm simulate`, `sweep`, `report` and `explain`: the latency laboratory on the command line.

What is simulated is said by the same options everywhere (`ScenarioOptions`). Policies are written as `Variant.parse` reads them:
`edf`, `fcfs@512`, `qoserve,anchor=first@2048`, `edf+past-future`. `my_module:MyPolicy` is one from a file, also of the folder
that one is in. Called by the command line.
"""

from __future__ import annotations

import sys
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, NamedTuple

import orjson
from cyclopts import Parameter

from actorllm.cli.options import check_writable, see_own_folder
from actorllm.errors import ConfigError

if TYPE_CHECKING:
    from actorllm.config import EngineConfig
    from actorllm.slo.energy import PowerModel
    from actorllm.slo.experiments import Point, Scenario, SweepResults
    from actorllm.slo.journal import RecordedRun
    from actorllm.slo.simulator import SimulatedRun

Many = Parameter(consume_multiple=True)


@Parameter(name="*")
@dataclass(frozen=True, kw_only=True)
class ScenarioOptions:
    """What is simulated."""

    workload: str = "sample"
    """sample (bundled), synthetic, sessions, agents, or the path of a trace (Azure, Mooncake, BurstGPT, ServeGen, Vidur, TraceLab,
    timed)."""
    format: str | None = None
    """Of the trace: azure, vidur, burstgpt, mooncake, timed, tracelab, servegen; seen from the file if not given."""
    block_tokens: int | None = None
    """For how many tokens a hash id of the trace stands; what is usual in the format if not given."""
    num_requests: int = 2000
    """A trace is repeated as often as need be."""
    arrivals: str = "trace"
    """trace: its own, stretched to the rate; or poisson, gamma:CV, bursty, diurnal[:SWING], constant."""
    mix: str | None = None
    """Classes: name:share:ttft=S[+p/TOKENS_PER_S],tpot=S,e2e=S,priority=N,patience=S; shares A/B/C are those of parts of the time;
    trace: those that the trace has."""
    tenants: Annotated[list[float] | None, Many] = None
    """Shares of tenants."""
    model: str = "a100-llama-3-8b"
    """Step times: a preset, or a file that `actorllm calibrate` wrote."""
    num_blocks: int = 25_000
    """KV blocks of the engine."""
    block_size: int = 16
    max_num_seqs: int = 256
    max_num_batched_tokens: int = 512
    max_model_len: int = 32_768
    enable_prefix_caching: bool = False
    kv_tiers: Annotated[list[str] | None, Many] = None
    """Where KV is kept besides, the fastest first: BLOCKS:LOAD_S:STORE_S[:LATENCY_S], in seconds of a block."""
    num_replicas: int = 1
    router: str = "round-robin"
    view_interval: float = 0.005
    """How old what a router knows may be, in seconds; that of an engine if not given. 0: it is exact."""
    max_concurrency: int | None = None
    """Requests under way at a time; others are sent when one has ended."""

    def scenario(self) -> Scenario:
        """Tells of the rows of the trace that cannot be used. Raises ConfigError naming what is wrong."""
        from actorllm.slo.experiments.point import MIX, Scenario
        from actorllm.slo.simulator import EngineShape
        from actorllm.slo.tiers import read_tiers

        see_own_folder()
        if self.kv_tiers and not self.enable_prefix_caching:
            raise ConfigError(
                f"kv_tiers={self.kv_tiers!r:.80} keep what a prefix cache finds: --enable-prefix-caching, too"
            )
        for name in ("num_blocks", "block_size", "max_num_seqs", "max_num_batched_tokens", "max_model_len"):
            if getattr(self, name) < 1:
                raise ConfigError(f"{name}={getattr(self, name)} must be at least 1")
        if self.num_blocks * self.block_size < self.max_model_len:
            raise ConfigError(
                f"{self.num_blocks} blocks of {self.block_size} hold less than max_model_len={self.max_model_len}"
            )
        scenario = Scenario(
            workload=self.workload,
            trace_format=self.format,
            block_tokens=self.block_tokens,
            num_requests=self.num_requests,
            arrivals=self.arrivals,
            mix=MIX if self.mix is None else None if self.mix == "trace" else self.mix,
            tenants=tuple(self.tenants or ()),
            model=self.model,
            shape=EngineShape(
                num_blocks=self.num_blocks,
                block_size=self.block_size,
                max_num_seqs=self.max_num_seqs,
                max_num_batched_tokens=self.max_num_batched_tokens,
                max_model_len=self.max_model_len,
                enable_prefix_caching=self.enable_prefix_caching,
                tiers=read_tiers(self.kv_tiers or ()),
            ),
            num_replicas=self.num_replicas,
            router=self.router,
            view_interval_s=self.view_interval,
            max_concurrency=self.max_concurrency,
        )
        scenario.check_files()
        read = scenario.trace_report()
        if read is not None and read.num_skipped:
            print(read, file=sys.stderr)
        return scenario


DEFAULT = ScenarioOptions()


def simulate(
    *,
    policy: str = "fcfs",
    rate: float = 2.0,
    seed: int = 0,
    scale: float = 1.0,
    options: ScenarioOptions = DEFAULT,
    failures: str | None = None,
    policy_cost: str | None = None,
    power: str | None = None,
    roles: str | None = None,
    kv_copy: str | None = None,
    output_json: Path | None = None,
    csv: Path | None = None,
    report: Path | None = None,
    timeline: Path | None = None,
) -> None:
    """Simulate one run and print its figures.

    Parameters
    ----------
    policy
        NAME[,knob=value...][@tokens per step][+admission].
    rate
        Requests per second.
    scale
        Every objective so many times as loose.
    failures
        What ends and comes back: KIND:MEAN_S:DOWN_S with kind workers, scheduler or replica; or a JSON file with a list of them.
    policy_cost
        What the policy takes: measured, measured:FACTOR, or PLAN_S[:WAITING_S[:EVENT_S]] in seconds.
    power
        Of a replica: IDLE_W:BUSY_W[:PRICE_PER_HOUR[:PRICE_PER_KWH]]; energy and cost are printed.
    roles
        How many replicas compute prompts and how many decode, such as 1P2D.
    kv_copy
        What a copy of KV between them takes: BLOCK_S[:LATENCY_S] in seconds.
    output_json
        Write the figures to this file, with the keys of `vllm bench serve`.
    csv
        Write every request as a row to this file.
    report
        Write a page with figures and timelines to this file.
    timeline
        Write a Chrome trace of requests and steps to this file (open it in Perfetto).
    """
    from actorllm.slo.experiments.record import figures_of
    from actorllm.slo.experiments.stamp import stamp
    from actorllm.slo.report import bench_json, chrome_trace, requests_csv, run_page

    point = _point(options, policy, rate, seed, scale)
    check_apart(output_json=output_json, csv=csv, report=report, timeline=timeline)
    check_writable(output_json=output_json, csv=csv, report=report, timeline=timeline)
    more, watts = _costs(failures, policy_cost, power)
    more |= _roles(roles, kv_copy)
    if report is not None or timeline is not None:
        run, journal = _watched(point, **more)
    else:
        run, journal = point.run(**more), None
    figures = figures_of(run.timeline, run.workload, with_gaps=output_json is not None, due=run.due)
    for warning in run.warnings:
        print(f"warning: {warning}", file=sys.stderr)
    _print_run(point, figures, run.workload.promised)
    _print_transfers(run)
    if roles is not None:
        print(f"roles: {run.num_handed_off} requests were handed off")
    if watts is not None:
        _print_energy(run, watts)
    if output_json is not None:
        model_name, warnings = point.scenario.model, run.warnings
        told = bench_json(run.timeline, run.workload, figures["summary"], model=model_name, warnings=warnings)
        told["actorllm_made"] = _made(point)
        output_json.write_bytes(orjson.dumps(told))
    if csv is not None:
        csv.write_text(requests_csv(run.timeline, run.workload), encoding="utf-8")
    if timeline is not None:
        timeline.write_bytes(orjson.dumps(chrome_trace(run.timeline, run.workload, journal)))
    if report is not None:
        model = _model(point)
        model = model if model.residuals else None  # without them every step takes just what is predicted
        more = {"seed": seed, "configuration": point.key, "scenario": point.scenario.to_dict()}
        html = run_page(
            str(point), run.timeline, run.workload, journal, model, stamp(), notes=run.warnings, more=more, due=run.due
        )
        report.write_text(html, encoding="utf-8")
        print(f"report: {report}")


def sweep(
    *,
    policies: Annotated[list[str], Many] = ["fcfs@512", "edf@512", "qoserve@2048"],  # noqa: B006 - read only
    rates: Annotated[list[float] | None, Many] = None,
    seeds: int = 12,
    scales: Annotated[list[float] | None, Many] = None,
    targets: Annotated[list[float] | None, Many] = None,
    options: ScenarioOptions = DEFAULT,
    results: Path = Path("sweep.jsonl"),
    report: Path | None = None,
    num_processes: int | None = None,
) -> None:
    """Simulate policies at several rates, find the highest rate at which each keeps its promises, and write a report.

    Parameters
    ----------
    policies
        NAME[,knob=value...][@tokens per step][+admission], several.
    rates
        Requests per second, several; searches begin at the middle one.
    seeds
        How many; the same requests for every policy and rate. Of fewer than 12, bands of bursty arrivals are too narrow.
    scales
        Also with every objective so many times as loose, at the middle rate.
    targets
        Shares of requests that must keep their promises, such as 0.99; 0: no search.
    results
        Every point is added to this file; what it has is not simulated again.
    report
        Write the report to this file.
    num_processes
        As many as there are cores if not given; 0: only this one.
    """
    from actorllm.slo.experiments import Sweep, Variant
    from actorllm.slo.report import sweep_page

    scenario = options.scenario()
    variants = [Variant.parse(text) for text in policies]
    check_apart(results=results, report=report)
    check_writable(report=report)
    if seeds < 1:
        raise ConfigError(f"seeds={seeds} must be at least 1")
    grid = [1.0, 2.0, 3.0, 4.0] if rates is None else rates
    if not grid:
        raise ConfigError("rates is empty: name at least one rate, in requests per second")
    wanted = [0.99, 0.9] if targets is None else [target for target in targets if target]
    middle = sorted(grid)[len(grid) // 2]
    with progress(is_search=bool(wanted)) as tell:
        found = Sweep(scenario, variants, range(seeds)).run(
            rates=grid,
            scales=[1.0, *(scales or ())],
            scale_rates=[middle],
            targets=wanted,
            aggregates=("worst",),
            store=results,
            num_processes=num_processes,
            on_progress=tell,
        )
    for note in found.notes:
        print(f"note: {note}", file=sys.stderr)
    for text in found.incomplete():
        print(f"note: {text}", file=sys.stderr)
    for warning in found.warnings():
        print(f"warning: {warning}", file=sys.stderr)
    _print_sweep(found, wanted)
    print(f"results: {results}")
    if report is not None:
        report.write_text(sweep_page(found), encoding="utf-8")
        print(f"report: {report}")
    if found.failures:
        for failure in found.failures:
            print(f"failed: {failure}", file=sys.stderr)
        raise SystemExit(1)


def report(
    results: Path,
    /,
    *,
    output: Path = Path("report.html"),
    scenario: str | None = None,
    csv: Path | None = None,
    parquet: Path | None = None,
    latex: Path | None = None,
    figures: Path | None = None,
    formats: Annotated[list[str], Many] = ["svg"],  # noqa: B006 - read only
    timeline: Path | None = None,
    shadow: str | None = None,
) -> None:
    """Write a page of the results of a sweep, or of the recording of an engine.

    Parameters
    ----------
    results
        What `actorllm sweep` wrote, or an engine that ran with record=FILE.
    scenario
        The hash, or the beginning of it, when the file has results of several configurations; the last one otherwise.
    csv
        Also write every point, or every request of a recording, as a row to this file.
    parquet
        The same as Parquet (`actorllm[lab]`).
    latex
        Of a sweep: write a table of the highest rates to this file, for booktabs.
    figures
        Write every figure of the page to this folder.
    formats
        Of the figures: svg, pdf (`actorllm[lab]`), or both.
    timeline
        Of a recording: write a Chrome trace of requests and steps to this file (open it in Perfetto).
    shadow
        Of a recording: also say what another policy would have done with its requests: NAME[+admission], or module:Class.
    """
    from actorllm.actors.record_file import is_recording
    from actorllm.slo.experiments import SweepResults, read_results
    from actorllm.slo.report import results_csv, sweep_page

    see_own_folder()
    if is_recording(results):
        if scenario is not None:
            raise ConfigError(f"scenario={scenario!r} is for the results of a sweep: {str(results)!r} is a recording")
        if latex is not None:
            raise ConfigError(f"latex={str(latex)!r} is for the results of a sweep: {str(results)!r} is a recording")
        _report_recording(results, output, csv, timeline, Exports(parquet, figures, tuple(formats)), shadow)
        return
    if shadow is not None:
        raise ConfigError(f"shadow={shadow!r} is for a recording: {str(results)!r} has the results of a sweep")
    if timeline is not None:
        raise ConfigError(f"timeline={str(timeline)!r} is for a recording: {str(results)!r} has the results of a sweep")
    found = SweepResults.of_records(*read_results(results, scenario))
    exports = Exports(parquet, figures, tuple(formats))
    exports.check()
    check_apart(results=results, output=output, csv=csv, parquet=parquet, latex=latex)
    check_writable(output=output, csv=csv, parquet=parquet, latex=latex)
    for note in found.notes:
        print(f"note: {note}", file=sys.stderr)
    for text in found.incomplete():
        print(f"note: {text}", file=sys.stderr)
    html = sweep_page(found)
    output.write_text(html, encoding="utf-8")
    print(f"report: {output}")
    if csv is not None:
        csv.write_text(results_csv(found), encoding="utf-8")
        print(f"table: {csv}")
    if latex is not None:
        from actorllm.slo.report.export import latex_table

        latex.write_text(latex_table(found), encoding="utf-8")
        print(f"table: {latex}")
    exports.write(html, lambda: results_csv(found))


class Exports(NamedTuple):
    """Files for other programs, as far as they are asked for."""

    parquet: Path | None
    figures: Path | None
    formats: tuple[str, ...]

    def check(self) -> None:
        """Raises ConfigError for a format that there is not, and for packages that are not installed."""
        from actorllm.slo.report.export import check_installed

        for one in self.formats:
            if one not in ("svg", "pdf"):
                raise ConfigError(f"formats={one!r:.80} must be svg, pdf, or both")
        check_installed(
            has_pdf=self.figures is not None and "pdf" in self.formats, has_parquet=self.parquet is not None
        )

    def write(self, html: str, csv: Callable[[], str]) -> None:
        from actorllm.slo.report.export import figures_of, parquet_of, pdf_of

        if self.parquet is not None:
            self.parquet.write_bytes(parquet_of(csv()))
            print(f"table: {self.parquet}")
        if self.figures is None:
            return
        self.figures.mkdir(parents=True, exist_ok=True)
        num = 0
        for name, svg in figures_of(html):
            num += 1
            if "svg" in self.formats:
                (self.figures / f"{name}.svg").write_text(svg, encoding="utf-8")
            if "pdf" in self.formats:
                (self.figures / f"{name}.pdf").write_bytes(pdf_of(svg))
        print(f"figures: {num} in {self.figures}")


def _report_recording(
    recording: Path, output: Path, csv: Path | None, timeline: Path | None, exports: Exports, shadow: str | None
) -> None:
    from actorllm.slo.experiments.stamp import stamp
    from actorllm.slo.report import chrome_trace, requests_csv, run_page
    from actorllm.slo.shadow_run import shadow_notes, told_policies

    check_apart(recording=recording, output=output, csv=csv, timeline=timeline, parquet=exports.parquet)
    check_writable(output=output, csv=csv, timeline=timeline, parquet=exports.parquet)
    exports.check()
    found = _recorded_run(recording)
    config = found.config
    about = f"{config.model.name}, {told_policies(found.run, config)}"
    notes = [] if found.run.deviation is None else [f"This is not what the engine did: {found.run.deviation}."]
    run = found.run
    if shadow is not None:
        told = shadow_notes(run, config, shadow)
        print(*told, sep="\n")
        notes += told
    html = run_page(
        f"{recording.name}: {about}", run.timeline, run.workload, run.journal, run.model, stamp(), notes=notes,
        more={"recording": recording, "seed": config.seed},
        fitted="" if run.step_fit is None else f"By cross-validation: {'; '.join(run.step_fit.told())}.",
    )  # fmt: skip
    output.write_text(html, encoding="utf-8")
    print(f"report: {output}")
    if csv is not None:
        csv.write_text(requests_csv(run.timeline, run.workload, run.names), encoding="utf-8")
        print(f"table: {csv}")
    exports.write(html, lambda: requests_csv(run.timeline, run.workload, run.names))
    if timeline is not None:
        timeline.write_bytes(orjson.dumps(chrome_trace(run.timeline, run.workload, run.journal, run.keys)))


def explain(
    request_id: int | str,
    /,
    *,
    policy: str | None = None,
    rate: float = 2.0,
    seed: int = 0,
    scale: float = 1.0,
    options: ScenarioOptions = DEFAULT,
    recording: Path | None = None,
) -> None:
    """Say why a request of a simulated run, or of a recorded engine, took as long as it did and missed its objective.

    Parameters
    ----------
    request_id
        Its number in the run, from 0, or of a recording the id that its caller knows; worst (or -1): the one that overran
        a promise by most, relative to it; ttft, tpot, e2e: the one with the longest.
    policy
        NAME[,knob=value...][@tokens per step][+admission]; fcfs if not given.
    recording
        What an engine wrote that ran with record=FILE. It says how its engine was built, so no other options are needed.
    """
    from actorllm.slo.explanation import chosen_request
    from actorllm.slo.explanation import explain as explained

    if recording is not None:
        _check_of_recording(recording, policy, options, {"rate": (rate, 2.0), "seed": (seed, 0), "scale": (scale, 1.0)})
        print(_explain_recording(recording, request_id, options.model))
        return
    point = _point(options, policy or "fcfs", rate, seed, scale)
    if not str(request_id).isdecimal():
        run = point.run()
        request_id = chosen_request(request_id, run.timeline, run.workload)
    row = int(request_id)
    run, journal = _watched(point, row)
    for warning in run.warnings:
        print(f"warning: {warning}", file=sys.stderr)
    workload = run.workload
    told = explained(
        row,
        run.timeline,
        workload.classes,
        workload.class_ids,
        journal,
        _model(point),
        promises=workload.own_promises,
    )
    print(told)


def _explain_recording(recording: Path, request_id: int | str, model: str) -> str:
    """model: the default: the recording's own step times, never those of another machine."""
    from actorllm.scheduling.cost_model import load_model
    from actorllm.slo.explanation import UNSEEN_BY_A_RECORDING, chosen_request
    from actorllm.slo.explanation import explain as explained

    is_number = str(request_id).isdecimal()
    choose = int(request_id) if is_number else partial(chosen_request, request_id)
    found = _recorded_run(recording, choose).run
    is_own = model == DEFAULT.model
    notes = [] if is_own else [f"step times are those of {model!r}, not fitted to this recording"]
    workload = found.workload
    return str(
        explained(
            found.row,
            found.timeline,
            workload.classes,
            workload.class_ids,
            found.journal,
            found.step_fit if is_own else load_model(model),
            keys=found.keys,
            promises=workload.own_promises,
            notes=(*notes, UNSEEN_BY_A_RECORDING),
        )
    )


class _Recorded(NamedTuple):
    run: RecordedRun
    config: EngineConfig


def _recorded_run(recording: Path, choose: Any = None) -> _Recorded:
    """Tells where going through it again does not give what happened."""
    from actorllm.actors.record_file import read_recording, recorded_arguments, recorded_configuration, recorded_policy
    from actorllm.slo.journal import run_of_recording

    see_own_folder()
    config = recorded_configuration(recording)
    entries = list(read_recording(recording))
    found = run_of_recording(entries, recorded_arguments(recording), recorded_policy(recording), choose)
    if found.deviation is not None:
        print(
            f"warning: this is not what the engine did: {found.deviation}. Its scheduler was another version, or its policy "
            f"{config.scheduler.policy!r} has changed since; from there on, nothing below is sure",
            file=sys.stderr,
        )
    return _Recorded(found, config)


def _check_of_recording(
    recording: Path, policy: str | None, options: ScenarioOptions, of_run: dict[str, tuple[Any, Any]]
) -> None:
    """Raises ConfigError for options that contradict what a recording says of itself. of_run: values and their defaults."""
    from actorllm.actors.record_file import recorded_configuration
    from actorllm.slo.experiments import Variant
    from actorllm.slo.simulator import EngineShape

    if not recording.exists():
        raise ConfigError(f"there is no recording {str(recording)!r}; an engine with record='run.bin' writes one")
    config = recorded_configuration(recording)
    shape = EngineShape.of(config)
    given = {name: (getattr(options, name), getattr(DEFAULT, name)) for name in ScenarioOptions.__dataclass_fields__}
    del given["model"]  # short recordings have no step times of their own: a file of the same machine may be named
    for name, (value, default) in (given | of_run).items():
        if value == default:
            continue
        if not hasattr(shape, name):
            raise ConfigError(f"{name}={value!r} is of a simulation: a recording has its own requests; leave it out")
        if value != getattr(shape, name):
            _refuse(recording, name, value, getattr(shape, name))
    if policy is None:
        return
    variant, scheduler = Variant.parse(policy), config.scheduler
    if variant.knobs:
        raise ConfigError(
            f"policy={policy!r}: a recording is explained with the policy that its engine had, without knobs"
        )
    if variant.policy != scheduler.policy:
        _refuse(recording, "policy", variant.policy, scheduler.policy)
    if variant.tokens not in (None, scheduler.max_num_batched_tokens):
        _refuse(recording, "max_num_batched_tokens", variant.tokens, scheduler.max_num_batched_tokens)
    if variant.admission not in (None, scheduler.admission):
        _refuse(recording, "admission", variant.admission, scheduler.admission)


def _refuse(recording: Path, name: str, given: Any, recorded: Any) -> None:
    raise ConfigError(
        f"{name}={given!r} contradicts the recording {str(recording)!r}, whose engine had {recorded!r}; leave it out"
    )


# What they share ---------------------------------------------------------------------------------------------------------


def _point(options: ScenarioOptions, policy: str, rate: float, seed: int, scale: float) -> Point:
    from actorllm.slo.experiments import Point, Variant

    scenario = options.scenario()
    return Point(scenario=scenario, variant=Variant.parse(policy), rate=rate, seed=seed, scale=scale)


def _made(point: Point) -> dict[str, Any]:
    """All that it takes to make a run again, and where it was made."""
    from actorllm.slo.experiments.stamp import stamp

    return stamp() | {"point": point.to_dict(), "configuration": point.key}


def check_apart(**paths: Path | None) -> None:
    """No file is written over another one of the same command."""
    names: dict[Path, str] = {}
    for name, path in paths.items():
        if path is not None and (other := names.setdefault(path.resolve(), name)) != name:
            raise ConfigError(f"{name}={str(path)!r} is also {other}: name another file")


def _model(point: Point) -> Any:
    from actorllm.scheduling.cost_model import load_model

    return load_model(point.scenario.model)


def _watched(point: Point, request_id: int | None = None, **more: Any) -> Any:
    """The run of a point with its journal."""
    from actorllm.slo.experiments.point import watched_run

    return watched_run(point, () if request_id is None else (request_id,), **more)


def _costs(
    failures: str | None, policy_cost: str | None, power: str | None
) -> tuple[dict[str, Any], PowerModel | None]:
    """What `simulate` takes of these options. Raises ConfigError."""
    from actorllm.slo.energy import PowerModel
    from actorllm.slo.failures import parse_failures
    from actorllm.slo.policy_cost import parse_policy_cost

    more: dict[str, Any] = {}
    if failures is not None:
        more["failures"] = parse_failures(failures)
    if policy_cost is not None:
        more["policy_cost"] = parse_policy_cost(policy_cost, time.thread_time)
    if power is None:
        return more, None
    return {**more, "metered": True}, PowerModel.parse(power)


def _roles(roles: str | None, kv_copy: str | None) -> dict[str, Any]:
    """What `simulate` takes of these options. Raises ConfigError."""
    from actorllm.slo.roles import TransferShape, read_transfer

    if roles is None:
        if kv_copy is not None:
            raise ConfigError(f"kv_copy={kv_copy!r:.80} is between replicas with roles: --roles 1P1D, too")
        return {}
    return {"roles": roles, "transfer": TransferShape() if kv_copy is None else read_transfer(kv_copy)}


def _print_transfers(run: SimulatedRun) -> None:
    found = [one.transfers for one in run.statistics if one.transfers is not None]
    if found:
        stored, loaded, given_up = (
            sum(getattr(one, name) for one in found)
            for name in ("num_stored_blocks", "num_loaded_blocks", "num_given_up")
        )
        print(f"KV tiers: {stored} blocks stored, {loaded} loaded; {given_up} requests waited for a load in vain")


def _print_energy(run: SimulatedRun, power: PowerModel) -> None:
    from actorllm.slo.energy import energy_of

    use = energy_of(run, power)
    print(
        f"energy by {power.idle_w:g} W idle and {power.busy_w:g} W busy: {use.joules / 3.6e6:.4g} kWh, "
        f"{use.joules_per_request:.4g} J a request, {use.joules_per_output_token:.4g} J an output token; "
        f"busy for {use.utilization:.1%} of the time"
    )
    if use.cost:
        print(f"cost: {use.cost:.4g}, {use.cost_per_million_output_tokens:.4g} a million output tokens")


@contextmanager
def progress(*, is_search: bool = True) -> Iterator[Any]:
    """is_search: what has been found decides how many runs there will be, so no share of them is known."""
    from tqdm import tqdm

    with tqdm(unit=" runs", dynamic_ncols=True) as bar:

        def tell(num_done: int, num_known: int, point: Point) -> None:
            if is_search:
                bar.set_postfix_str(f"at least {num_known - num_done} to come", refresh=False)
            else:
                bar.total = num_known
            bar.set_description_str(str(point), refresh=False)
            bar.update(num_done - bar.n)

        yield tell


def _print_run(point: Point, figures: dict[str, Any], promised: set[str]) -> None:
    """promised: the classes that are promised something; of others there is nothing to keep."""
    summary, verdict = figures["summary"], figures["stationarity"]
    print(f"{point}: {point.scenario.describe(summary['actorllm_overall']['requests'])}")
    rows = [("CLASS", "REQUESTS", "TPOT", "DEADLINE", "TTFT P50", "TTFT P99", "TPOT P99", "E2E P99")]
    for name, kind in [*summary["actorllm_classes"].items(), ("all", summary["actorllm_overall"])]:
        is_promised = name in promised or (name == "all" and bool(promised))
        share = [f"{kind['attainment'][reading]:.1%}" if is_promised else "-" for reading in ("tpot", "deadline")]
        times = [_ms(kind[key]) for key in ("p50_ttft_ms", "p99_ttft_ms", "p99_tpot_ms", "p99_e2el_ms")]
        rows.append((name, str(kind["requests"]), *share, *times))
    print_rows(rows)
    window, drained = (
        " / ".join(f"{_rate(summary[key])} ({reading})" for reading, key in keys)
        for keys in (
            [(reading, f"actorllm_goodput_window_{reading}") for reading in ("tpot", "deadline")],
            [("tpot", "request_goodput"), ("deadline", "actorllm_goodput_deadline")],
        )
    )
    print(f"goodput in requests/s: {window} of the window without warm-up and drain; {drained} with the drain")
    print(f"{summary['output_throughput']:.0f} tokens/s, {summary['actorllm_num_preemptions']} preemptions")
    if unfinished := summary["actorllm_num_unfinished"]:
        print(f"{unfinished} requests never ended")
    print(f"{verdict['verdict']}: {verdict['message']}")


def _print_sweep(found: SweepResults, searched: Sequence[float]) -> None:
    """The headline: the highest rates by policy, reading and target; without a search those that the rates show."""
    from actorllm.slo.experiments.comparison import sustained_rate
    from actorllm.types.objective import READINGS

    targets = sorted(searched, reverse=True) or [
        t for t in (0.99, 0.9) if any(found.max_rate(x, t, r) for x in found.labels() for r in READINGS)
    ]
    heads = [f"{reading} @{100 * target:g}%" for reading in READINGS for target in targets]
    rows: list[tuple[str, ...]] = [("MAX RATE", *heads)]
    flagged = is_open = False
    for label in found.labels():
        cells = []
        for reading in READINGS:
            for target in targets:
                best = sustained_rate(found, label, target, reading)
                if best is None:
                    rates = found.rates(label)
                    cells.append(f"< {rates[0]:.2f}" if rates else "failed")
                    is_open |= bool(rates)
                    continue
                # Footnotes are printed only if a cell refers to them.
                mark = "".join({"growing": "*", "short": "~"}.get(caveat, "") for caveat in best.caveats)
                flagged |= bool(mark)
                is_open |= best.band.low_is_open or best.band.high_is_open
                more = "" if best.is_bounded else ">"
                cells.append(f"{more}{best.rate:.2f}{mark} [{', '.join(best.band.ends())}]")
        rows.append((label, *cells))
    print(f"requests/s at which the worst class keeps its promises, with 95 % bands; {found.describe()}")
    print_rows(rows)
    if is_open:
        print("< > beyond the rates that were simulated: the end of a band, or the figure itself")
    if flagged:
        print("* without rates at which the backlog grew   ~ the run was too short to see whether it did")


def _rate(value: float | None) -> str:
    return "-" if value is None else f"{value:.3g}"


def _ms(value: float | None) -> str:
    return "-" if value is None else f"{value:,.0f} ms"


def print_rows(rows: list[Any]) -> None:
    widths = [max(len(row[column]) for row in rows) for column in range(len(rows[0]))]
    for row in rows:
        first = row[0].ljust(widths[0])
        print("  ".join([first, *(text.rjust(width) for text, width in zip(row[1:], widths[1:], strict=True))]))
