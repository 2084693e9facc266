"""The page on one run, and what a page on a sweep shows of it as well: tables by class, and its course over time."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from html import escape
from typing import Any

import numpy as np
from numpy.typing import NDArray

from actorllm.messages import F64
from actorllm.scheduling.cost_model import FEATURES, StepModel
from actorllm.slo.experiments.record import OUTPUT_EDGES, PROMPT_EDGES, figures_of
from actorllm.slo.experiments.stationarity import backlog
from actorllm.slo.fairness import Fairness, fairness_of
from actorllm.slo.journal import Journal, StepTable
from actorllm.slo.metrics import good, latency_figures
from actorllm.slo.report.charts import Series, heat, legend, lines, number, over_time, percent
from actorllm.slo.report.lead import READS
from actorllm.slo.report.page import Section, figure, grid, page, table
from actorllm.slo.step_fit import KINDS, errors_by_kind, errors_by_size, of_each_kind, told_by_size
from actorllm.slo.timeline import RunTimeline
from actorllm.slo.workload import Workload
from actorllm.types.objective import READINGS, SLO, Reading, RequestClass

NUM_BINS = 220
MAX_STEPS = 1500
"""Of each kind that are held against a model of step times."""


def run_page(
    title: str,
    timeline: RunTimeline,
    workload: Workload,
    journal: Journal | None = None,
    model: StepModel | None = None,
    stamp: Mapping[str, Any] | None = None,
    *,
    notes: Sequence[str] = (),
    more: Mapping[str, Any] | None = None,
    due: F64 | None = None,
    fitted: str = "",
) -> str:
    """HTML. journal: without it (a run that was only watched from outside) steps and KV are not shown. model: shows how well
    it predicts the steps. more: of how it was made, besides the stamp: seed, configuration. due: of a run with a bound on the
    requests under way, as in `figures_of`. fitted: what is to be known of a model that was fitted to these very steps."""
    figures = figures_of(timeline, workload, with_gaps=True, due=due)
    summary, verdict = figures["summary"], figures["stationarity"]
    worst = summary["actorllm_worst_class"]
    kept = f"Of the class that is worst off, {_share(worst['tpot'])} kept their promise by the mean gap and "
    kept += f"{_share(worst['deadline'])} by due dates."
    lead = [
        f"{summary['completed']:,} of {len(timeline):,} requests ran to their end. "
        f"{kept if workload.promised else 'Nothing was promised to any of them.'}",
        f"{verdict['verdict'].capitalize()}: {verdict['message']}.",
        *notes,
    ]
    sections = [promises(timeline, workload, summary), class_section(summary, timeline, workload)]
    distribution = Section("How latencies are distributed")
    distribution.add(grid(distributions(timeline, workload)))
    sections.append(distribution)
    lengths = Section("Which lengths miss")
    if workload.promised:
        lengths.add(grid([length_heat(figures["lengths"], r, READS[r]) for r in READINGS]))
    else:
        lengths.paragraph("Nothing was promised to any of them.", "none")
    sections.append(lengths)
    over = Section("How the run went")
    over.blocks += [*timelines(timeline, workload, journal)]
    sections.append(over)
    fair = fairness_of(timeline, workload)
    if fair is not None:
        sections.append(fairness_section([("this run", fair)]))
    if journal is not None and model is not None:
        sections.append(predictor(journal, timeline, model, fitted))
    made = {"workload": workload.name, "requests": len(timeline), **(more or {})}
    sections.append(provenance(stamp or {}, made))
    return page(title, f"{workload.name}: {len(timeline):,} requests", lead, sections)


def _share(value: float | None) -> str:
    return "none" if value is None else percent(value)


# Classes -----------------------------------------------------------------------------------------------------------------


def promise(slo: SLO | None) -> str:
    """In words."""
    if slo is None:
        return "nothing"
    parts = []
    if slo.ttft is not None:
        more = f" + 1 s per {1 / slo.ttft_per_prompt_token:,.0f} prompt tokens" if slo.ttft_per_prompt_token else ""
        parts.append(f"first token in {number(slo.ttft)} s{more}")
    if slo.tpot is not None:
        parts.append(f"{number(1000 * slo.tpot)} ms per token")
    if slo.e2e is not None:
        parts.append(f"end in {number(slo.e2e)} s")
    return ", ".join(parts)


def promise_of(workload: Workload, kind: RequestClass) -> str:
    return promise(kind.slo) if workload.own_promises is None or kind.slo is not None else "what each request says"


def promises(timeline: RunTimeline, workload: Workload, summary: Mapping[str, Any]) -> Section:
    section = Section("What was promised, and what was kept")
    found, promised = summary["actorllm_classes"], workload.promised
    rows = []
    for kind in workload.classes:
        if kind.name not in found:
            continue
        mine = found[kind.name]
        share = [_share(mine["attainment"][r]) if kind.name in promised else "–" for r in READINGS]
        fluid = "–" if mine["fluidity"] is None or kind.name not in promised else percent(mine["fluidity"])
        rate, drained = (
            " / ".join("–" if (rate := mine[kind][r]) is None else number(rate) for r in READINGS)
            for kind in ("window_goodput", "goodput")
        )
        worst = "–" if mine["worst_miss"] <= 1 else f"{mine['worst_miss']:.3g} x"
        about = [escape(kind.name), escape(promise_of(workload, kind)), f"{mine['requests']:,}"]
        rows.append([*about, *share, rate, drained, fluid, worst])
    head = [
        "class",
        "promise",
        "requests",
        "kept, mean gap",
        "kept, due dates",
        "goodput of the window",
        "goodput with the drain",
        "fluidity",
        "worst miss",
    ]
    section.add(table(head, rows))
    section.paragraph(
        "Mean gap: (last token - first token) / (tokens - 1), as vllm bench serve counts; every pause is minded. Due dates: "
        "token i is due at the promised first token + i times the promise per token; what came early may be late later. "
        "Fluidity: share of tokens that met a due date which carries slack. Goodput: requests per second that kept their "
        "promise, by mean gap / by due dates. Of the window: of those that arrived after the first fifth of the time of arrivals. "
        "With the drain: of all, from the first arrival to the last end, as vllm bench serve counts. "
        "Worst miss: how many times as long as promised the worst request took.",
        "note",
    )
    return section


def class_section(summary: Mapping[str, Any], timeline: RunTimeline, workload: Workload) -> Section:
    section = Section("Latencies by class")
    section.add(class_table(summary, timeline, workload))
    return section


def class_table(summary: Mapping[str, Any], timeline: RunTimeline | None, workload: Workload | None) -> str:
    """TTFT, TPOT and end-to-end percentiles of every class; gaps and queue time where the run is at hand."""
    rows = []
    everybody = {**summary["actorllm_classes"], "all": summary["actorllm_overall"]}
    for name, mine in everybody.items():
        cells = [escape(name), f"{mine['requests']:,}"]
        has_gaps = "p99_itl_p99_ms" in mine
        for label in ("ttft", "tpot", "e2el", *(("itl", "itl_p99") if has_gaps else ())):
            values = [mine.get(f"p{p}_{label}_ms") for p in (50, 90, 99)]
            cells.append(" / ".join("–" if v is None else _ms(v) for v in values))
        if timeline is not None and workload is not None:
            mask = np.ones(len(timeline), np.bool_)
            for i, kind in enumerate(workload.classes):
                if kind.name == name:
                    mask = workload.class_ids == i
            queue = (timeline.scheduled - timeline.arrival)[mask]
            found = latency_figures("queue", queue[np.isfinite(queue)])
            cells.append(" / ".join(_ms(found[f"p{p}_queue_ms"]) for p in (50, 90, 99)))
        rows.append(cells)
    head = ["class", "requests", "TTFT p50 / p90 / p99", "TPOT p50 / p90 / p99", "end p50 / p90 / p99"]
    if "p99_itl_p99_ms" in summary["actorllm_overall"]:
        head += ["gaps p50 / p90 / p99", "p99 gap of a request p50 / p90 / p99"]
    itl = " / ".join(_ms(summary[f"p{p}_itl_ms"]) for p in (50, 90, 99) if summary.get(f"p{p}_itl_ms") is not None)
    more = [] if timeline is None else ["queue p50 / p90 / p99"]
    return (
        table(head + more, rows) + f'<p class="note">Gaps between tokens of all requests, p50 / p90 / p99: {itl}.</p>'
    )


def _ms(value: float) -> str:
    if not math.isfinite(value):
        return "–"
    return f"{value / 1000:.3g} s" if value >= 1000 else f"{value:.3g} ms"


def distributions(timeline: RunTimeline, workload: Workload) -> list[str]:
    """Share of requests within a latency, by class: TTFT, mean gap, and the 99th percentile of a request's gaps."""
    found = []
    names = [kind.name for kind in workload.classes]
    for label, values, unit in (
        ("time to first token", timeline.ttft, 1.0),
        ("mean gap", timeline.tpot, 1000.0),
        ("p99 gap of a request", timeline.pauses, 1000.0),
    ):
        series = []
        for i, name in enumerate(names):
            mine = np.sort(values[(workload.class_ids == i) & np.isfinite(values)]) * unit
            if mine.size:
                shares = np.linspace(0, 1, 101)
                series.append(Series(name, np.quantile(mine, shares).tolist(), shares.tolist(), colour=i))
        chart = lines(
            series,
            f"distribution of the {label}",
            "seconds" if unit == 1 else "milliseconds",
            "share of requests",
            y_range=(0, 1),
            y_format=percent,
            has_markers=False,
        )
        found.append(figure(legend(names) + chart, label.capitalize()))
    return found


# Lengths -----------------------------------------------------------------------------------------------------------------


def length_heat(lengths: Mapping[str, Any], reading: Reading, title: str, about: str = "") -> str:
    """Attainment by prompt and output length; columns and rows without requests at the rim are left out."""
    num, good = np.array(lengths["n"]), np.array(lengths[reading])
    rows, columns = _span(num.sum(axis=1)), _span(num.sum(axis=0))
    missed: list[list[float | None]] = []
    notes: list[list[str]] = []
    for r in rows:
        cells = [(int(num[r, c]), int(good[r, c])) for c in columns]
        missed.append([1 - g / n if n else None for n, g in cells])
        notes.append([f"{g} of {n} requests kept their promise" for n, g in cells])
    chart = heat(
        missed,
        notes,
        [_range(PROMPT_EDGES, r) for r in rows],
        [_range(OUTPUT_EDGES, c) for c in columns],
        f"attainment by length, {title}",
        "prompt tokens",
        "output tokens",
    )
    return figure(chart, title, about or "% of requests that kept their promise, by length")


def _span(counts: NDArray[Any]) -> range:
    there = np.flatnonzero(counts)
    return range(int(there[0]), int(there[-1]) + 1) if there.size else range(1)


def _range(edges: Sequence[int], i: int) -> str:
    def short(value: int) -> str:
        return f"{value // 1024}k" if value >= 1024 else str(value)

    return f"{short(edges[i])}+" if i == len(edges) - 1 else f"<{short(edges[i + 1])}"


# Over time ---------------------------------------------------------------------------------------------------------------


def timelines(timeline: RunTimeline, workload: Workload, journal: Journal | None) -> list[Any]:
    """Blocks: requests in the system, tokens per second, and with a journal what steps held, how long they took, KV."""
    section = Section("")
    if not len(timeline):
        section.paragraph("there were no requests", "none")
        return section.blocks
    end = float(np.nanmax(np.where(np.isfinite(timeline.end), timeline.end, timeline.arrival)))
    begin = float(timeline.arrival[0])
    edges = np.linspace(begin, max(end, begin + 1e-3), NUM_BINS + 1)
    middle = (edges[1:] + edges[:-1]) / 2
    started = np.where(np.isfinite(timeline.scheduled), timeline.scheduled, np.inf)
    left = np.where(np.isfinite(timeline.end), timeline.end, np.inf)
    has_starts = bool(np.isfinite(timeline.scheduled).any())
    present = backlog(timeline, middle)
    misses = _misses_over_time(timeline, workload)
    shown = (edges - begin).tolist()
    if has_starts:
        waiting = _count(timeline.arrival, np.minimum(started, left), middle)
        layers = [("waiting", waiting.tolist(), "fill2"), ("running", (present - waiting).tolist(), "fill1")]
    else:
        layers = [("in the system", present.tolist(), "fill1")]
    section.add(_key([(layers[0][2], layers[0][0]), *([(layers[1][2], layers[1][0])] if len(layers) > 1 else [])]))
    first_at = [(at - begin, note) for at, note in misses]
    section.figure(
        over_time(shown, layers, "requests over time", is_stacked=True, instants=first_at),
        "Requests in the engine",
        "red marks: a request that missed its promise came",
    )
    preempted, given_up = ([], []) if journal is None else _instants(journal, begin)
    if preempted or given_up:
        counts = np.histogram(preempted, shown)[0].astype(float).tolist()
        section.figure(
            over_time(shown, [("preemptions", counts, "area2")], "preemptions over time", instants=given_up),
            "Preemptions",
            f"{len(preempted)} in all; red marks: {len(given_up)} requests that started although they could not be in time "
            f"any more, behind all that could",
        )
    for replica in range(len(timeline.step_ends)) if journal is not None else ():
        assert journal is not None
        section.blocks += _steps(journal.table(timeline, replica), edges, shown, replica, len(timeline.step_ends))
    if journal is None:
        section.paragraph("What single steps held is not known of this run: it was watched from outside.", "note")
    return section.blocks


def _instants(journal: Journal, begin: float) -> tuple[list[float], list[tuple[float, str]]]:
    """When requests were preempted, and when those started that could not be in time any more (relegation)."""
    preempted = [event.at - begin for event in journal.events if event.kind == "preempt"]
    given_up = [(e.at - begin, f"started {e.at - begin:.1f} s") for e in journal.events if e.why == "relegated"]
    return preempted, given_up


def _count(arrive: F64, leave: F64, at: F64) -> F64:
    found = np.searchsorted(np.sort(arrive), at, "right") - np.searchsorted(np.sort(leave), at, "right")
    counts: F64 = found.astype(np.float64)
    return counts


def _misses_over_time(timeline: RunTimeline, workload: Workload) -> list[tuple[float, str]]:
    rows = np.flatnonzero(~good(timeline, workload.promises, "deadline"))
    rows = rows[:: max(1, rows.size // 300)]
    return [
        (float(timeline.arrival[i]), f"request {i} ({workload.classes[int(workload.class_ids[i])].name})")
        for i in rows.tolist()
    ]


def _key(entries: Sequence[tuple[str, str]]) -> str:
    items = "".join(
        f'<li><svg class="swatch" viewBox="0 0 14 12" aria-hidden="true"><rect width="14" height="12" class="{kind}"/></svg>'
        f"{escape(name)}</li>"
        for kind, name in entries
    )
    return f'<ul class="legend">{items}</ul>'


def _steps(steps: StepTable, edges: F64, shown: list[float], replica: int, num_replicas: int) -> list[Any]:
    section = Section("")
    of = f"Replica {replica}: " if num_replicas > 1 else ""
    if not len(steps):
        return []
    at = np.clip(np.searchsorted(edges, steps.end, "right") - 1, 0, edges.size - 2)
    took = steps.end - steps.start
    width = np.diff(edges)

    def per_second(values: NDArray[Any]) -> list[float]:
        found: list[float] = (np.bincount(at, values, edges.size - 1) / width).tolist()
        return found

    layers = [
        ("decode, latency sensitive", per_second(steps.num_decode_sensitive), "fill0"),
        ("decode, other", per_second(steps.num_decode - steps.num_decode_sensitive), "fill1"),
        ("prompt, latency sensitive", per_second(steps.num_prompt_sensitive), "fill2"),
        ("prompt, other", per_second(steps.num_prompt - steps.num_prompt_sensitive), "fill3"),
    ]
    section.add(_key([(kind, name) for name, _, kind in layers]))
    section.figure(
        over_time(shown, layers, "tokens per second over time", is_stacked=True),
        f"{of}What steps computed",
        "tokens per second, by kind",
    )
    longest = np.zeros(edges.size - 1)
    np.maximum.at(longest, at, took)
    num = np.bincount(at, minlength=edges.size - 1)
    mean = np.bincount(at, took, edges.size - 1) / np.maximum(num, 1)
    section.figure(
        over_time(
            shown,
            [("longest", (1000 * longest).tolist(), "area2"), ("mean", (1000 * mean).tolist(), "area")],
            "step time over time",
        ),
        f"{of}How long steps took",
        "milliseconds: mean (heavy) and longest of each interval",
    )
    usage = np.interp((edges[1:] + edges[:-1]) / 2, steps.end, steps.kv_usage)
    section.figure(
        over_time(
            shown,
            [("KV", usage.tolist(), "area")],
            "KV usage",
            y_format=percent,
            y_max=1.0 if usage.max() > 0.5 else None,
            has_x=True,
        ),
        f"{of}KV cache in use",
        "share of the blocks",
    )
    return section.blocks


# Fairness, predictions, provenance ---------------------------------------------------------------------------------------


def fairness_section(found: Sequence[tuple[str, Fairness]]) -> Section:
    section = Section("How evenly tenants are served")
    rows = []
    for label, fair in found:
        served = ", ".join(
            f"{name}: {number(service / 1000)}k ({'–' if math.isnan(queue) else number(queue) + ' s'})"
            for name, service, queue in zip(fair.tenants, fair.service, fair.queue_p99_s, strict=True)
        )
        gap = number(fair.gap) if fair.num_windows else "no tenant waited beside another"
        rows.append([escape(label), f"{fair.jain:.3f}", escape(gap), escape(served)])
    section.add(table(["", "Jain's index", "largest gap in service", "service (queue p99) by tenant"], rows))
    section.paragraph(
        "Service counts a prompt token once and an output token twice, as VTC does. Jain's index is of what each tenant got "
        "for what it asked: 1 is even. The gap is the most by which two tenants differed while requests of both waited.",
        "note",
    )
    return section


def predictor(journal: Journal, timeline: RunTimeline, model: StepModel, note: str = "") -> Section:
    """How well a step-time model predicts the steps of a run, by kind and by size. note: where the model is from."""
    section = Section("How well step times are predicted")
    steps = journal.table(timeline, 0)
    # A mean over all would be of the kind that is frequent: each is looked at for itself.
    rows = of_each_kind(steps.num_prompt > 0, MAX_STEPS)
    measured = (steps.end - steps.start)[rows]
    predicted = np.array(
        [
            model.seconds(
                float(steps.num_prompt[i]),
                float(steps.num_decode[i]),
                float(steps.decode_context[i]),
                float(steps.prefill_context[i]),
                float(steps.prefill_pairs[i]),
            )
            for i in rows.tolist()
        ]
    )
    usable = measured > 0
    if not usable.any():
        section.paragraph("no step was measured", "none")
        return section
    rows, measured, predicted = rows[usable], measured[usable], predicted[usable]
    features = np.zeros((rows.size, len(FEATURES)))
    features[:, FEATURES.index("p")], features[:, FEATURES.index("d")] = steps.num_prompt[rows], steps.num_decode[rows]
    errors = errors_by_kind(features, measured, predicted)
    told = " and ".join(f"{percent(error)} of {KINDS[kind]}" for kind, error in errors.items())
    section.paragraph(f"{model.name}: mean absolute error {told}, over {rows.size:,} steps.")
    if note:
        section.paragraph(note, "note")
    sizes = [[escape(cell) for cell in row] for row in told_by_size(errors_by_size(features, measured, predicted))]
    section.add(table(["steps", "looked at", "error", "bias"], sizes))
    most = 1000 * float(max(measured.max(), predicted.max()))
    order = np.argsort(measured)
    dots = Series(
        "steps",
        (1000 * measured[order]).tolist(),
        (1000 * predicted[order]).tolist(),
        notes=[
            f"{1000 * m:.2f} ms measured, {1000 * p:.2f} predicted" for m, p in zip(measured, predicted, strict=True)
        ],
    )
    section.add(grid([figure(_parity(dots, most), "Parity", "each dot is a step; on the line they would be equal")]))
    return section


def _parity(dots: Series, most: float) -> str:
    from actorllm.slo.report.charts import Plot, path

    plot = Plot((0.0, 1.03 * most), (0.0, 1.03 * most), 480, 380)
    plot.axes("measured, ms", "predicted, ms")
    plot.add(f'<path d="{path([(plot.x(0), plot.y(0)), (plot.x(most), plot.y(most))])}" class="target"/>')
    for x, y in zip(dots.x, dots.y, strict=True):
        plot.add(f'<circle cx="{plot.x(x)}" cy="{plot.y(y)}" r="1.8" class="m0" fill-opacity="0.35" stroke="none"/>')
    return plot.svg("predicted against measured step times")


def provenance(stamp: Mapping[str, Any], more: Mapping[str, Any]) -> Section:
    section = Section("How this was made")
    versions = ", ".join(f"{name} {version}" for name, version in stamp.get("versions", {}).items())
    rows = {
        "date": stamp.get("date"),
        "versions": versions,
        "code": stamp.get("code"),
        "machine": stamp.get("machine"),
        "system": stamp.get("system"),
        **more,
    }
    items = "".join(f"<dt>{escape(k)}</dt><dd>{escape(str(v))}</dd>" for k, v in rows.items() if v not in (None, ""))
    section.add(f"<dl>{items}</dl>")
    return section
