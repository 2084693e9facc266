"""One answer of the answers of several replicas. Pure."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import Any

SAME = frozenset(("block_size", "name", "rank", "generation", "peer"))
"""Of these the first replica's value is the engine's."""
LARGEST = frozenset(("max_recovery_s", "fill", "fill_received", "longest_aside_s"))
"""And of these the largest one."""
MEAN = frozenset(("usage", "load_s_per_block", "load_overhead_s", "compute_s_per_token"))
TRACKS = 100
"""Numbers of tracks that a replica may have in a timeline."""


def merged(verb: str, answers: Mapping[int, Any]) -> Any:
    """What the engine answers, of what its replicas answer, by number.

    Counters and gauges are added up, and `replicas` has what each of them says.
    """
    values = list(answers.values())
    match verb:
        case "statistics":
            return {**_sum(values), "replicas": dict(answers)}
        case "statistics of frontends":
            return _sum(values)
        case "worker_statistics":
            return [
                {**worker, "replica": number}
                for number, workers in answers.items()
                for worker in (workers if isinstance(workers, list) else [workers])
            ]
        case "start_profile" | "stop_profile":
            return [path for value in values for path in (value if isinstance(value, list) else [value])]
        case "take_timeline":
            return [event for number, events in answers.items() for event in _of_replica(events, number)]
        case "list_adapters":
            return list(dict.fromkeys(digest for value in values for digest in value))
        case "call_workers":
            return values
        case "transfer_weights":  # of ranks
            return [answer for value in values for answer in value]
        case "request_log":
            return dict(answers)
        case "sleep":  # bytes
            return sum(values)
        case "wake_up":  # what sleeps on
            return list(dict.fromkeys(tag for value in values for tag in value))
        case "remove_adapter":  # some had it
            return any(values)
        case "live":
            return _live(answers)
        case _:  # done everywhere, or true everywhere
            return all(values) if all(isinstance(value, bool) for value in values) else values[0]


def by_this_clock(verb: str, answer: Any, offset_s: float) -> Any:
    """An answer of a replica, with its points in time by the clock here, so that those of several can be shown beside each other.

    offset_s: what its clock shows minus what this one shows, in seconds.
    """
    if not offset_s:
        return answer
    match verb:
        case "take_timeline":  # microseconds
            return [{**event, "ts": event["ts"] - 1e6 * offset_s} if "ts" in event else event for event in answer]
        case "live":  # of a step: its number, and four points in time
            steps = [[step[0], *(at - offset_s for at in step[1:5]), *step[5:]] for step in answer["steps"]]
            return {**answer, "now": answer["now"] - offset_s, "steps": steps}
    return answer


def _sum(trees: Sequence[Any], key: str = "") -> Any:
    """Numbers are added, however deep; texts and what only one has are kept."""
    known = [tree for tree in trees if tree is not None]
    if not known:
        return None
    first = known[0]
    if isinstance(first, Mapping):
        keys = dict.fromkeys(name for tree in known for name in tree)
        return {name: _sum([tree[name] for tree in known if name in tree], name) for name in keys}
    if isinstance(first, list) and all(_is_number(one) for tree in known for one in tree):
        return [sum(column) for column in _columns(known)]
    return _sum_of_numbers(known, key) if _is_number(first) else first


def _is_number(value: object) -> bool:
    return isinstance(value, int | float) and not isinstance(value, bool)


def _sum_of_numbers(values: Sequence[float], key: str) -> float:
    if key in SAME:
        return values[0]
    if key in LARGEST:
        return max(values)
    total = sum(values)
    return total / len(values) if key in MEAN else total


def _columns(rows: Sequence[Sequence[float]]) -> list[list[float]]:
    width = max(len(row) for row in rows)
    return [[row[at] for row in rows if at < len(row)] for at in range(width)]


def _of_replica(events: Sequence[Mapping[str, Any]], number: int) -> Iterator[dict[str, Any]]:
    """Events of a trace, on tracks of their own."""
    for event in events:
        own = {**event, **{key: TRACKS * number + event[key] for key in ("pid", "tid") if key in event}}
        if event.get("name") == "process_name":
            own["args"] = {"name": f"replica {number} {event['args']['name']}"}
        yield own


def _live(answers: Mapping[int, Any]) -> Any:
    """What all replicas do now: their requests and steps, each with the number of its own."""
    trees = list(answers.values())
    requests = {
        kind: [{**one, "replica": number} for number, tree in answers.items() for one in tree["requests"][kind]]
        for kind in trees[0]["requests"]
    }
    steps = [[*step, number] for number, tree in answers.items() for step in tree["steps"]]
    return {
        **trees[0],
        "steps": sorted(steps, key=lambda step: step[2]),
        "num_steps": {str(number): tree["counts"]["num_steps"] for number, tree in answers.items()},
        "counts": _sum([tree["counts"] for tree in trees]),
        "kv_usage": sum(tree["kv_usage"] for tree in trees) / len(trees),
        "slo": _sum([tree["slo"] for tree in trees]),
        "speculation": _sum([tree.get("speculation") for tree in trees]),
        "requests": requests,
    }
