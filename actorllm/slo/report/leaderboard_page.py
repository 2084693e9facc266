"""The leaderboard: policies in the order of the rate that each sustains, with ranks that only the paired bands decide.

A policy has the rank of one more than the number of policies that are shown to sustain more, or more than one of these. So of one
rank no policy is shown to sustain more than another one. A rate at which the backlog grows does not count.
"""

from __future__ import annotations

import inspect
from collections.abc import Sequence
from dataclasses import dataclass
from html import escape

from actorllm.errors import ConfigError
from actorllm.slo.experiments.comparison import Sustained, is_better, sustained
from actorllm.slo.experiments.point import Variant
from actorllm.slo.experiments.sweep import SweepResults
from actorllm.slo.report.lead import READS, figure_of, lead
from actorllm.slo.report.page import Section, page, table
from actorllm.slo.report.sweep_page import provenance_section, rates_section
from actorllm.types.objective import READINGS, Reading

NOT_SHOWN = "is not shown to sustain more or less than another one of the same rank"


@dataclass(frozen=True, slots=True, eq=False)
class Place:
    """Of a policy."""

    rank: int
    found: Sustained

    @property
    def label(self) -> str:
        return self.found.label


def places(results: SweepResults, target: float, reading: Reading) -> list[Place]:
    """All variants of which anything was simulated, the best first; of one rank, by the lower bound of the rate."""
    found = [one for x in results.labels() if (one := sustained(results, x, target, reading)) is not None]
    better = [{at for at, other in enumerate(found) if other is not one and is_better(other, one)} for one in found]
    ranked = [Place(1 + len(_above(number, better)), one) for number, one in enumerate(found)]
    return sorted(ranked, key=lambda place: (place.rank, -place.found.least, place.label))


def _above(number: int, better: Sequence[set[int]]) -> set[int]:
    """Those that are better than this one, those that are better than these, and so on: each step may be shown, and not all at
    once."""
    found: set[int] = set()
    left = [number]
    while left:
        further = better[left.pop()] - found
        found |= further
        left += further
    return found - {number}


def about(variant: Variant) -> str:
    """The first sentence of the module of its policy, which names the paper."""
    try:
        policy = variant.build_policy(None)
    except ConfigError:  # of results whose policy is not here any more
        return ""
    cls = type(getattr(policy, "policy", policy))
    cls = cls.__mro__[1] if variant.knobs and cls.__module__ == Variant.__module__ else cls  # knobs make a class of it
    text = inspect.getdoc(inspect.getmodule(cls)) or inspect.getdoc(cls) or ""
    return " ".join(text.split("\n\n")[0].split())


def leaderboard_page(results: SweepResults, title: str = "Leaderboard of policies") -> str:
    """HTML, of what was simulated; nothing is simulated again."""
    if not results.records:
        return page(title, results.scenario.describe(), ["No point was simulated."], [])
    targets = results.targets or (0.9,)
    sections = [_ranking(results, target, reading) for target in targets for reading in READINGS]
    sections += [_policies(results.variants), rates_section(results), provenance_section(results)]
    subtitle = f"{results.describe()}, {results.describe_seeds()}, {len(results.records)} simulated runs"
    told = lead(results, results.records[0]["rate"], results.labels()[0])
    told += [f"Failed and left out: {failure}" for failure in results.failures] + list(results.notes)
    told += [f"Left out: {text}." for text in results.incomplete()]
    return page(title, subtitle, told, sections)


def _ranking(results: SweepResults, target: float, reading: Reading) -> Section:
    section = Section(f"{100 * target:g} % of the worst class, by {READS[reading]}")
    rows = []
    for place in places(results, target, reading):
        one = place.found
        grows = "" if one.grows_from is None else f"{one.grows_from:.2f}"
        name = f'<span class="name">{escape(place.label)}</span>'
        rows.append([str(place.rank), name, escape(figure_of(one)), one.verdict, grows])
    section.paragraph(f"Requests per second with 95 % bands. A policy {NOT_SHOWN}.")
    section.add(table(["rank", "policy", "sustains", "run at that rate", "backlog grows from"], rows))
    return section


def _policies(variants: Sequence[Variant]) -> Section:
    section = Section("What they are")
    section.add(table(["policy", "by"], [[escape(one.label), escape(about(one))] for one in variants]))
    return section
