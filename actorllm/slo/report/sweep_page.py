"""The page on a sweep: which policy keeps its promises up to which rate, how sure that is, and what happens beyond it."""

from __future__ import annotations

import json
from collections.abc import Sequence
from html import escape
from typing import Any

import numpy as np
from markupsafe import Markup

from actorllm.errors import ConfigError
from actorllm.scheduling.cost_model import load_model
from actorllm.slo.experiments.bands import AGGREGATES, Aggregate, Band
from actorllm.slo.experiments.comparison import standing, sustained, sustained_rate, sustained_ratio
from actorllm.slo.experiments.point import Point, watched_run
from actorllm.slo.experiments.sweep import TARGETS, MaxRate, Record, SweepResults
from actorllm.slo.explanation import explain, worst_request
from actorllm.slo.fairness import Fairness, fairness_of
from actorllm.slo.report.charts import ChartLine, Range, Series, legend, lines, number, percent, ranges
from actorllm.slo.report.lead import READS, lead, promises_nothing
from actorllm.slo.report.page import Section, figure, grid, page, table
from actorllm.slo.report.run_page import (
    class_table,
    fairness_section,
    length_heat,
    predictor,
    promise,
    promise_of,
    provenance,
    timelines,
)
from actorllm.slo.workload import parse_mix
from actorllm.types.objective import READINGS, Reading

MARKS = {"stationary": "●", "growing": "▲", "short": "○"}
CAVEATS = {"growing": "without rates at which the backlog grew", "short": "too short to see whether its backlog grows"}
MAX_RUN = 20_000
"""Requests of a point up to which it is simulated again, to show how it went."""
MAX_COLUMNS = 20


def sweep_page(results: SweepResults, title: str = "Which policy keeps its promises") -> str:
    """HTML. Simulates one point of each variant again, to show how its run went; the results file has no timelines."""
    if not results.records:
        return page(title, results.scenario.describe(), ["No point was simulated."], [])
    rate = _telling_rate(results)
    sections = [rates_section(results), _by_rate(results)]
    if any(len(results.scales(label, r)) > 2 for label in results.labels() for r in results.rates(label)):
        sections.append(_by_scale(results))
    sections += [_by_length(results, rate), _by_class(results, rate)]
    runs, fair = _runs(results, rate)
    sections.append(runs)
    if fair:
        sections.append(fairness_section(fair))
    sections += [_verdicts(results), provenance_section(results)]
    return page(title, _subtitle(results), _lead(results), sections)


def _subtitle(results: SweepResults) -> str:
    return f"{results.describe()}, {results.describe_seeds()}, {len(results.records)} simulated runs"


def _shared_rates(results: SweepResults) -> set[float]:
    """Those that all were simulated at, of which anything is said."""
    there = [set(results.rates(label)) for label in results.labels() if results.rates(label)]
    return set.intersection(*there) if there else set()


def _at(results: SweepResults, label: str, rate: float) -> list[Record]:
    """The points of all seeds; none if some are missing there: what the others would show is of other requests."""
    return results.points(label, rate) if rate in results.rates(label) else []


def _telling_rate(results: SweepResults, *, is_sustained: bool = False) -> float:
    """Of the rates that all were simulated at, the one at which they differ most. is_sustained: of those at which no backlog
    grows, as far as there are any."""
    there = [label for label in results.labels() if results.rates(label)]
    shared = _shared_rates(results)
    if not shared:
        return max(results.rates(there[0])) if there else results.records[0]["rate"]
    if is_sustained:
        growing = {rate for rate in shared if any(results.verdict(label, rate)[0] == "growing" for label in there)}
        shared = shared - growing or shared

    def spread(rate: float) -> float:
        values = [results.band(label, rate, "deadline").value for label in there]
        return max(values) - min(values)

    return max(sorted(shared), key=lambda rate: round(spread(rate), 3))


def _baseline(results: SweepResults) -> str:
    """What others are compared with: the best first come, first served there is; else the first variant."""
    plain = [v.label for v in results.variants if v.policy == "fcfs" and results.rates(v.label)]
    if not plain:
        return results.labels()[0]

    target = results.targets[0] if results.targets else 0.9

    def best(label: str) -> float:
        found = sustained(results, label, target, "deadline")
        return found.as_rival if found else 0.0

    return max(plain, key=best)


def _lead(results: SweepResults) -> list[str]:
    """What one would say to a reader who has a minute: without a search, of a rate at which no backlog grows if there is one."""
    told = lead(results, _telling_rate(results, is_sustained=True), _baseline(results))
    failed = [f"Failed and left out: {failure}" for failure in results.failures]
    return told + failed + [f"Left out: {text}." for text in results.incomplete()] + list(results.notes)


def _targets(results: SweepResults) -> tuple[float, ...]:
    """Those that were searched for; without a search, those that some policy attains at the rates of the grid."""
    if results.targets:
        return results.targets
    return tuple(t for t in TARGETS if any(results.max_rate(x, t, r) for x in results.labels() for r in READINGS))


# Rates -------------------------------------------------------------------------------------------------------------------


def rates_section(results: SweepResults) -> Section:
    section = Section("How much each policy sustains")
    targets = _targets(results)
    if not any(results.max_rate(x, t, r) for x in results.labels() for t in targets for r in READINGS):
        told = f"{100 * targets[-1]:g} %" if targets else "half"
        section.paragraph(f"At no rate that was tried did any policy keep {told} of its promises.", "none")
        return section
    kinds = [(t, r) for t in targets[:2] for r in READINGS]
    rows = []
    for label in results.labels():
        marks = []
        for colour, (target, reading) in enumerate(kinds):
            found = sustained_rate(results, label, target, reading)
            note = f"{label}, {target:.0%} by {READS[reading]}: "
            marks.append((colour, None if found is None else Range(found.rate, found.low, found.high,
                          note + _told(found), bool(found.caveats))))  # fmt: skip
        rows.append((label, marks))
    section.paragraph(
        "The highest rate at which the worst class keeps its promises, with 95 % bands over seeds and requests. Outlined "
        "marks: without rates at which the backlog grew, or the runs were too short to see that."
    )
    section.add(legend([f"{target:.0%}, {READS[reading]}" for target, reading in kinds]))
    section.figure(ranges(rows, "maximum rates", "requests per second"))
    section.add(_rate_table(results, targets[:2], ("worst",)))
    section.add(
        f'<p class="note">The last column is at {targets[0]:.0%} of the worst class by due dates, without rates at which a backlog '
        f'grew; its bands pair the same requests. <span class="growing">▲</span> without rates at which the backlog grew, '
        f'<span class="short">○</span> the run was too short to tell. &lt; and &gt;: the band ends beyond the rates that were '
        f"simulated; &lt; alone: at the lowest rate that was tried the target is not kept, or the backlog grows. Bold: not shown "
        f"to be worse than another one by the paired bands, with the rates left out at which the backlog grew.</p>"
    )
    more = _rate_table(results, targets, AGGREGATES)
    section.add(f"<details><summary>Other targets, and all requests together</summary>{more}</details>")
    return section


def _told(found: MaxRate) -> str:
    more = "" if found.is_bounded else "at least "
    told = [CAVEATS[caveat] for caveat in found.caveats] or [found.verdict]
    return ", ".join([f"{more}{number(found.rate)} requests/s [{_ends(found.band)}]", *told])


def _ends(band: Band) -> str:
    return ", ".join(band.ends(number))


def _small(band: Band) -> str:
    return f"<small>{escape('–'.join(band.ends()))}</small>"


def _rate_table(results: SweepResults, targets: Sequence[float], aggregates: Sequence[Aggregate]) -> str:
    columns = [(t, r, w) for w in aggregates for r in READINGS for t in targets]
    found = {(x, c): sustained_rate(results, x, *c) for x in results.labels() for c in columns}
    best = {c: _best(results, *c) for c in columns}
    other = _baseline(results)
    rows = []
    for label in results.labels():
        cells = [escape(label)]
        for column in columns:
            one = found[label, column]
            if one is None:
                rates = results.rates(label)
                cells.append(f"&lt; {rates[0]:.2f}" if rates else "–")
                continue
            # A rate may be an artefact of a short run, or only a lower bound; the cell says so.
            mark = "".join(f' <span class="{caveat}">{MARKS[caveat]}</span>' for caveat in one.caveats)
            text = f"{'' if one.is_bounded else '≥ '}{one.rate:.2f}{mark}"
            text = f"<b>{text}</b>" if label in best[column] else text
            cells.append(f"{text}<br>{_small(one.band)}")
        cells.append(_times(results, label, other, targets[0]))
        rows.append(cells)
    names = [f"{'' if len(aggregates) == 1 else w + ', '}{READS[r]}, {t:.0%}" for t, r, w in columns]
    head = ["requests/s", *names, f"times {other}"]
    return table(head, rows)


def _times(results: SweepResults, label: str, other: str, target: float) -> str:
    """How many times the rate that `other` sustains; rates at which a backlog grows do not count, as in the lead."""
    mine, theirs = (sustained(results, one, target, "deadline") for one in (label, other))
    ratio = None if label == other or mine is None or theirs is None else sustained_ratio(mine, theirs)
    if ratio is None or mine is None or theirs is None:
        return ""
    is_growing = mine.grows_from is not None or theirs.grows_from is not None
    mark = f' <span class="growing">{MARKS["growing"]}</span>' if is_growing else ""
    return f"{'' if theirs.is_known else '&gt; '}{ratio.value:.2f}{mark}<br>{_small(ratio)}"


def _best(results: SweepResults, target: float, reading: Reading, aggregate: Aggregate) -> set[str]:
    """The labels that no other one is shown to surpass; none, if that is all of them."""
    found = standing(results, results.labels(), target, reading, aggregate)
    return set() if found is None or not found.worse else {found.best.label, *(one.label for one in found.equal)}


def _by_rate(results: SweepResults) -> Section:
    section = Section("Attainment and goodput by rate")
    section.add(legend(results.labels()))
    targets = [ChartLine(0.99, "99 %"), ChartLine(0.9, "90 %")]
    charts = []
    for reading in READINGS:
        series = [_attainment(results, label, reading, "worst", i) for i, label in enumerate(results.labels())]
        chart = lines(
            series,
            f"attainment of the worst class by {READS[reading]}",
            "requests per second",
            "of the worst class",
            y_range=(0.0, 1.0),
            y_format=percent,
            targets=targets,
        )
        charts.append(figure(chart, f"Kept by {READS[reading]}", "worst class; outlined: not stationary"))
    for reading in READINGS:
        series = []
        for i, label in enumerate(results.labels()):
            rates = results.rates(label)
            bands = [results.goodput(label, rate, reading) for rate in rates]
            series.append(
                Series(
                    label,
                    rates,
                    [b.value for b in bands],
                    [b.low for b in bands],
                    [b.high for b in bands],
                    i,
                    is_large=[_is_of_grid(results, rate) for rate in rates],
                )
            )
        chart = lines(series, f"goodput by {READS[reading]}", "requests per second", "good requests per second")
        charts.append(
            figure(
                chart,
                f"Goodput by {READS[reading]}",
                "all classes; share kept times the rate at which requests were sent",
            )
        )
    section.add(grid(charts))
    overall = []
    for reading in READINGS:
        series = [_attainment(results, label, reading, "overall", i) for i, label in enumerate(results.labels())]
        overall.append(
            figure(
                lines(
                    series,
                    f"overall attainment by {READS[reading]}",
                    "requests per second",
                    "of all requests",
                    y_range=(0.0, 1.0),
                    y_format=percent,
                    targets=targets,
                ),
                f"All requests, {READS[reading]}",
            )
        )
    section.add(f"<details><summary>Of all requests instead of the worst class</summary>{grid(overall)}</details>")
    return section


def _attainment(results: SweepResults, label: str, reading: Reading, aggregate: Aggregate, colour: int) -> Series:
    rates = results.rates(label)
    bands = [results.band(label, rate, reading, aggregate) for rate in rates]
    verdicts = [results.verdict(label, rate)[0] for rate in rates]
    notes = [
        f"{label} at {number(rate)} requests/s: {percent(band.value)} [{percent(band.low)}, {percent(band.high)}], {verdict}"
        for rate, band, verdict in zip(rates, bands, verdicts, strict=True)
    ]
    return Series(
        label,
        rates,
        [b.value for b in bands],
        [b.low for b in bands],
        [b.high for b in bands],
        colour,
        [verdict != "stationary" for verdict in verdicts],
        notes,
        [_is_of_grid(results, rate) for rate in rates],
    )


def _is_of_grid(results: SweepResults, rate: float) -> bool:
    """Whether every policy was simulated at it; the others are steps of one policy's search."""
    return all(rate in results.rates(label) for label in results.labels() if results.rates(label))


def _by_scale(results: SweepResults) -> Section:
    section = Section("How strict the promise is")
    rates = sorted({r["rate"] for r in results.records if r["scale"] != 1})
    rate = rates[len(rates) // 2]
    section.paragraph(
        f"At {number(rate)} requests/s, with every objective made stricter or looser by a factor; policies see the factor."
    )
    section.add(legend(results.labels()))
    charts = []
    for reading in READINGS:
        series = []
        for i, label in enumerate(results.labels()):
            scales = results.scales(label, rate)
            bands = [results.band(label, rate, reading, "worst", scale) for scale in scales]
            series.append(
                Series(label, scales, [b.value for b in bands], [b.low for b in bands], [b.high for b in bands], i)
            )
        chart = lines(
            series,
            f"attainment by scale, {READS[reading]}",
            "objectives, times",
            "of the worst class",
            y_range=(0.0, 1.0),
            y_format=percent,
            is_log_x=True,
            targets=[ChartLine(0.9, "90 %")],
        )
        charts.append(figure(chart, f"By {READS[reading]}"))
    section.add(grid(charts))
    return section


# One rate in detail ------------------------------------------------------------------------------------------------------


def _by_length(results: SweepResults, rate: float) -> Section:
    section = Section(f"Which lengths miss at {number(rate)} requests/s")
    if promises_nothing(results):
        section.paragraph("Nothing was promised to any request.", "none")
        return section
    section.paragraph("Per cent of requests that kept their promise, by prompt and output length, all seeds together.")
    for reading in ("deadline", "tpot"):
        charts = []
        for label in results.labels():
            points = _at(results, label, rate)
            if points:
                lengths = {k: np.sum([p["lengths"][k] for p in points], axis=0).tolist() for k in ("n", reading)}
                charts.append(length_heat(lengths, reading, label, " "))
        if reading == "deadline":
            section.paragraph(f"By {READS[reading]}:")
            section.add(grid(charts, "three"))
        else:
            section.add(f"<details><summary>By {READS[reading]}</summary>{grid(charts, 'three')}</details>")
    return section


def _by_class(results: SweepResults, rate: float) -> Section:
    section = Section(f"Classes at {number(rate)} requests/s")
    rows = []
    promised = _promised(results)
    for label in results.labels():
        for name in _names(results):
            points = _at(results, label, rate)
            if not points:
                continue
            # Of small runs a seed may have no request of a class.
            found = [p["summary"]["actorllm_classes"].get(name) for p in points]
            there = [f for f in found if f is not None]
            if not there:
                continue
            kept = [percent(float(np.mean([f["attainment"][reading] for f in there]))) for reading in READINGS]
            keys = ("p50_ttft_ms", "p99_ttft_ms", "p50_tpot_ms", "p99_tpot_ms", "p99_e2el_ms")
            times = [_mean([f[key] for f in there], lambda v: f"{v:,.0f}") for key in keys]
            fluid = _mean([f["fluidity"] for f in there], percent)
            if name not in promised:
                kept, fluid = ["–"] * len(READINGS), "–"
            rows.append([escape(label), escape(name), *kept, fluid, *times])
    head = ["policy", "class", "kept, mean gap", "kept, due dates", "fluidity", "TTFT p50", "TTFT p99", "TPOT p50"]
    section.add(table([*head, "TPOT p99", "end p99"], rows))
    section.paragraph("Latencies in milliseconds, means over the seeds.", "note")
    # All that is known of one seed, folded.
    tables = "".join(
        f"<h3>{escape(label)}</h3>{class_table(points[0]['summary'], None, None)}"
        for label in results.labels()
        if (points := _at(results, label, rate))
    )
    section.add(f"<details><summary>More percentiles <small>first seed</small></summary>{tables}</details>")
    return section


def _promised(results: SweepResults) -> set[str]:
    """The classes that are promised something: others keep nothing. All of a trace that is not here any more, which alone knows."""
    scenario = results.scenario
    if scenario.mix is not None:
        return {kind.name for kind, _ in parse_mix(scenario.mix) if kind.slo is not None}
    if promises_nothing(results):
        return set()
    return scenario.trace().workload.promised if _why_not_again(results) is None else set(_names(results))


def _names(results: SweepResults) -> list[str]:
    names: dict[str, None] = {}
    for record in results.records:
        names |= dict.fromkeys(record["classes"])
    return list(names)


def _mean(values: Sequence[float | None], told: Any) -> str:
    there = [v for v in values if v is not None]
    return told(float(np.mean(there))) if there else "–"


def _runs(results: SweepResults, rate: float) -> tuple[Section, list[tuple[str, Fairness]]]:
    """One point of every variant, simulated again: the same requests under each policy."""
    section = Section(f"How runs went at {number(rate)} requests/s")
    fair: list[tuple[str, Fairness]] = []
    parity: Section | None = None
    if results.scenario.num_requests > MAX_RUN:
        section.paragraph(
            f"Runs of more than {MAX_RUN:,} requests are not simulated again for their timelines.", "none"
        )
        return section, fair
    if (why_not := _why_not_again(results)) is not None:
        section.paragraph(f"The runs are not simulated again for their timelines: {why_not}.", "none")
        return section, fair
    seed = results.seeds[0]
    model = load_model(results.scenario.model)
    section.paragraph(f"The same requests under every policy (seed {seed}). Open one to see it.")
    best = max(
        results.labels(), key=lambda x: results.band(x, rate, "deadline").value if _at(results, x, rate) else -1.0
    )
    for variant in results.variants:
        if not _at(results, variant.label, rate):
            continue
        point = Point(scenario=results.scenario, variant=variant, rate=rate, seed=seed)
        try:
            variant.build_gated(model)
        except ConfigError as error:  # its results stand; only it is not here any more
            section.paragraph(f"{variant.label} is not simulated again for its timelines: {error}", "none")
            continue
        run, journal = watched_run(point)
        row = worst_request(run.timeline, run.workload)
        again, watching = watched_run(point, (row,))
        given = again.workload
        why = explain(row, again.timeline, given.classes, given.class_ids, watching, model, promises=given.own_promises)
        band = results.band(variant.label, rate, "deadline")
        blocks = "".join(timelines(run.timeline, run.workload, journal))
        is_open = " open" if variant.label == best else ""
        preempted = int(run.timeline.num_preemptions.sum())
        section.add(
            f"<details{is_open}><summary>{escape(variant.label)} <small>{percent(band.value)} of the worst class on time, "
            f"{preempted} preemptions</small></summary>{blocks}<h3>Why request {row} was the latest</h3>"
            f"<pre>{escape(str(why))}</pre></details>"
        )
        found = fairness_of(run.timeline, run.workload)
        if found is not None:
            fair.append((variant.label, found))
        if getattr(model, "residuals", ()) and parity is None:  # without them a step takes just what is predicted
            parity = predictor(journal, run.timeline, model)
    section.blocks += [] if parity is None else [Markup("<h3>How well step times are predicted</h3>"), *parity.blocks]
    return section, fair


def _why_not_again(results: SweepResults) -> str | None:
    """Why simulating again would not give the runs that the results are of; None: it would."""
    try:
        is_same = results.scenario.digest == results.records[0]["scenario"]
    except OSError as error:
        return f"{str(error.filename)!r} cannot be read ({error.strerror})"
    return None if is_same else f"{results.scenario.workload!r} or the step-time model has changed since"


# What to believe, and how to make it again -------------------------------------------------------------------------------


def _verdicts(results: SweepResults) -> Section:
    section = Section("Is it stationary?")
    section.paragraph(
        "A run in which the backlog grows shows how long it was, and not what its rate does in the long run. ● nothing piled "
        "up; ▲ the backlog grew; ○ too short to tell. Of all seeds together; the reason is under the mouse."
    )
    rates = sorted({rate for label in results.labels() for rate in results.rates(label)})
    grid_rates = sorted(_shared_rates(results))
    shown = rates if len(rates) <= MAX_COLUMNS else grid_rates or rates[:: len(rates) // MAX_COLUMNS + 1]
    rows = []
    for label in results.labels():
        cells = [escape(label)]
        for rate in shown:
            if not _at(results, label, rate):
                cells.append("")
                continue
            verdict, why = results.verdict(label, rate)
            cells.append(f'<span class="{verdict}" title="{escape(why, quote=True)}">{MARKS[verdict]}</span>')
        edge = _edge(results, label)
        cells.append(edge)
        rows.append(cells)
    section.add(table(["requests/s", *(number(rate) for rate in shown), "backlog grows from"], rows))
    return section


def _edge(results: SweepResults, label: str) -> str:
    """The lowest rate from which on every run grows."""
    rates = results.rates(label)
    verdicts = [results.verdict(label, rate)[0] for rate in rates]
    if not rates or verdicts[-1] != "growing":
        return "–"
    at = len(rates) - 1
    while at and verdicts[at - 1] == "growing":
        at -= 1
    return number(rates[at])


def provenance_section(results: SweepResults) -> Section:
    scenario = results.scenario
    codes = sorted({record["code"] for record in results.records})
    section = provenance(
        results.stamp,
        {
            "configuration": results.records[0]["scenario"],
            "seeds": ", ".join(map(str, results.seeds)),
            "policies": "; ".join(variant.text for variant in results.variants),
            "code of the points": ", ".join(codes),
        },
    )
    rows: list[list[str]] = []
    if scenario.mix is not None:
        rows = [[escape(kind.name), escape(promise(kind.slo))] for kind, _ in parse_mix(scenario.mix)]
    elif _why_not_again(results) is None:  # only the trace knows them
        workload = Point(scenario=scenario, variant=results.variants[0], rate=1.0).workload()
        rows = [[escape(kind.name), escape(promise_of(workload, kind))] for kind in workload.classes]
    if rows:
        section.add(table(["class", "promise"], rows))
    if warnings := results.warnings():
        items = "".join(f"<li>{escape(warning)}</li>" for warning in warnings)
        section.add(f"<details><summary>{len(warnings)} warnings</summary><ul>{items}</ul></details>")
    values = escape(json.dumps(scenario.to_dict(), indent=1))
    section.add(f"<details><summary>The whole scenario</summary><pre>{values}</pre></details>")
    return section
