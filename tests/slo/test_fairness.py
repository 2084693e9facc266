"""How evenly tenants are served counts only windows in which they wait, and waits that are known."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest

from actorllm.slo.fairness import Fairness, fairness_of
from actorllm.slo.report.run_page import fairness_section
from actorllm.slo.timeline import timeline_of_streams
from actorllm.slo.workload import make_workload

NEVER = float("nan")


def fairness(**tenants: list[tuple[float, float, float]]) -> Fairness:
    """Of each tenant when its requests came, started and ended. One that starts has a token a tenth of a second later."""
    rows = sorted(
        ((*times, name) for name, of_it in tenants.items() for times in of_it), key=lambda row: (row[0], row[3])
    )
    arrival, start, end = (np.array([row[column] for row in rows], float) for column in range(3))
    names = tuple(sorted(tenants))
    workload = make_workload(arrival, (np.full(len(rows), 100, np.int32), np.full(len(rows), 1, np.int32)))
    ids = np.array([names.index(row[3]) for row in rows], np.int32)
    streams = [np.zeros(0) if np.isnan(at) else np.array([at + 0.1]) for at in start.tolist()]
    timeline = timeline_of_streams(arrival, workload.num_prompt, streams, scheduled=start, end=end)
    found = fairness_of(timeline, replace(workload, tenant_ids=ids, tenants=names))
    assert found is not None
    return found


ALWAYS = [(float(at), at + 1.5, at + 1.6) for at in range(61)]
"""One of these waits at every moment of the sixty windows of a second."""


def test_tenants_wait_beside_each_other_only_if_both_do_so_all_the_time() -> None:
    at_edges = [(at - 0.1, at + 0.1, at + 0.2) for at in range(1, 60)]
    assert fairness(a=ALWAYS, b=ALWAYS).num_windows == 60
    assert fairness(a=ALWAYS, b=at_edges).num_windows == 0, (
        "at every edge between two windows one waits, in between none"
    )


def test_a_request_that_never_starts_waits_until_it_ends() -> None:
    turned_away = [(float(at), NEVER, at + 2.0) for at in range(30)]
    found = fairness(a=ALWAYS, b=turned_away)
    assert found.num_windows == 30, "in the second half none of b is there"
    assert found.queue_p99_s == (pytest.approx(1.5), pytest.approx(2.0))


def test_where_starts_are_not_known_no_wait_is_told() -> None:
    """A run that was watched from outside. As far as anything tells, its requests wait until their first tokens."""
    arrival = np.arange(61.0)
    workload = make_workload(arrival, (np.full(61, 100, np.int32), np.full(61, 1, np.int32)))
    workload = replace(workload, tenant_ids=(np.arange(61) % 2).astype(np.int32), tenants=("a", "b"))
    streams = [np.array([at + 0.3]) for at in arrival.tolist()]
    fair = fairness_of(timeline_of_streams(arrival, workload.num_prompt, streams), workload)
    assert fair is not None
    assert fair.num_windows == 0
    assert np.isnan(fair.queue_p99_s).all()
    told = "".join(fairness_section([("live", fair)]).blocks)
    assert "no tenant waited beside another" in told
    assert "a: 3.16k (–), b: 3.06k (–)" in told
