"""How fast streams that move are sent on: the tightest objective first, and no faster than the promises of others allow.

A stream that moves is computed again elsewhere. In a step that computes its prompt and its tokens, the others of that replica
wait. So what moves is sent bit by bit. The replica's own step times tell how many tokens a step may have without a broken
promise of those that are there. Without promises everything is sent at once.

After a death it is the same. The suspects that were sent are probed in groups (`supervision.blame.scheduler_deaths`), in the same
order. A replica of a trial that dies is sent all that is left with its next life, since nothing runs there by then.
"""

from __future__ import annotations

import math
from collections.abc import Iterable

from actorllm.actors.frontend import JournalEntry
from actorllm.scheduling.router import ReplicaView, Seconds
from actorllm.types.objective import SLO


def slo_of(entry: JournalEntry) -> SLO | None:
    """What its caller was promised."""
    return None if entry.submit.slo is None else SLO.from_fields(entry.submit.slo)


def due(entry: JournalEntry) -> float:
    """When its next token is due, or it has to be at its end, in monotonic seconds; infinity: nothing is promised."""
    submit, slo = entry.submit, slo_of(entry)
    times = [math.inf if submit.deadline is None else submit.deadline]
    if slo is not None:
        if slo.e2e is not None:
            times.append(submit.arrival + slo.e2e)
        if entry.first_token is None and slo.ttft is not None:
            times.append(submit.arrival + slo.ttft_limit(submit.prompt.size))
        if entry.first_token is not None and slo.tpot is not None:
            times.append(entry.first_token + slo.tpot * len(entry.emitted))
    return min(times)


def urgency(entry: JournalEntry) -> tuple[float, int, float]:
    """The tightest first: by what is due, by priority, by arrival."""
    return due(entry), entry.submit.priority, entry.submit.arrival


def size(entry: JournalEntry) -> int:
    """Tokens that are computed again when it moves."""
    return entry.submit.prompt.size + len(entry.emitted)


def room(view: ReplicaView, survivors: Iterable[JournalEntry], at: float) -> float:
    """How many tokens a replica may compute at a time beside these requests, so that their promises are kept.

    at: in monotonic seconds. Infinity: nothing is promised, or the replica's step times are not known.
    """
    seconds = view.step_seconds
    if seconds is None:
        return math.inf
    pause_s = slack_s = end_slack_s = math.inf
    step_s, wait_s = seconds(0, view.num_running, view.num_context), Seconds.costs_s(view, 0)[0]
    for entry in survivors:
        slo = slo_of(entry)
        if slo is None:
            continue
        if entry.first_token is not None and slo.tpot is not None:
            pause_s = min(pause_s, slo.tpot)
        if entry.first_token is None and slo.ttft is not None:
            left_s = entry.submit.arrival + slo.ttft_limit(entry.submit.prompt.size) - at
            if left_s > 0:  # a promise that is broken already holds nothing up
                slack_s = min(slack_s, left_s)
        if slo.e2e is not None:
            to_compute_s = step_s * (entry.submit.max_tokens - len(entry.emitted))
            if entry.first_token is None:
                to_compute_s += wait_s
            left_s = entry.submit.arrival + slo.e2e - at - to_compute_s
            if left_s > 0:  # how long its output gets is not known: one that is kept at its longest is not broken here
                end_slack_s = min(end_slack_s, left_s)
    if slack_s < math.inf:  # those that wait have what is before them to wait for, too
        slack_s -= wait_s
    limit_s = min(pause_s, max(0.0, slack_s), end_slack_s)
    most = view.max_num_batched_tokens
    if seconds(most, view.num_running, view.num_context) <= limit_s:
        return math.inf
    low, high = 0, most  # a step of `low` tokens keeps the promises
    while high - low > 1:
        middle = (low + high) // 2
        if seconds(middle, view.num_running, view.num_context) <= limit_s:
            low = middle
        else:
            high = middle
    return low
