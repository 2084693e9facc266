"""What an engine counts as metrics, each with all of its samples: `families_of` makes them of `stats()`.

Names are vLLM's core names. `VLLM_NAMES` are those that mean the same in vLLM. The server writes them down for Prometheus
(`server.metrics`), and `get_metrics` returns them as objects (`metrics_of`). Pure; keeps nothing.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import Any, NamedTuple

from actorllm.actors.topology import ATTACHED
from actorllm.scheduling.telemetry.request_counters import BOUNDS, OF_REQUESTS
from actorllm.scheduling.telemetry.step_history import STEP_BOUNDS
from actorllm.types.engine_metrics import Counter, Gauge, Histogram, Metric

PREFIX = "actorllm:"
VLLM_PREFIX = "vllm:"
ENGINE = "engine"
"""A label that vLLM's metrics have beside the model's: the number of the replica."""

VLLM_NAMES = frozenset(
    (
        *("num_requests_running", "num_requests_waiting", "num_requests_waiting_by_reason", "kv_cache_usage_perc"),
        *("cache_config_info", "prefix_cache_queries", "prefix_cache_hits", "prompt_tokens", "prompt_tokens_cached"),
        *("prompt_tokens_by_source", "generation_tokens", "num_preemptions", "corrupted_requests", "request_success"),
        *("iteration_tokens_total", "inter_token_latency_seconds"),
        *("spec_decode_num_drafts", "spec_decode_num_draft_tokens", "spec_decode_num_accepted_tokens"),
        "spec_decode_num_accepted_tokens_per_pos",
        *(name for name in BOUNDS if name != "request_intake_time_seconds"),
    )
)
"""Families that vLLM has under the same name, with the same meaning."""

STEPS = {
    "iteration_tokens_total": "Tokens of a step.",
    "inter_token_latency_seconds": "Between a token and the next one of its sequence.",
    "step_duration_seconds": "What a step took in the worker.",
}

Sample = tuple[str, Mapping[str, str], float]
"""What follows the name, the labels beside the model's, and the value."""


class Family(NamedTuple):
    """A metric with all of its samples."""

    kind: str
    name: str
    """Without prefix, and of a counter without `_total`."""
    told: str
    samples: Sequence[Sample]


def as_vllm(family: Family, families: Sequence[Family]) -> Family:
    """As vLLM counts it: its tokens of prompts are all of them, from wherever their KV came."""
    if family.name != "prompt_tokens":
        return family
    (by_source,) = (one for one in families if one.name == "prompt_tokens_by_source")
    number = sum(value for _, _, value in by_source.samples)
    return family._replace(told="Prompt tokens of requests.", samples=[("", {}, number)])


def replicas_of(stats: Mapping[str, Any]) -> dict[str, Mapping[str, Any]]:
    """The `stats()` of each replica, by its number as text; those of the engine if it is no fleet."""
    scheduler = stats["scheduler"]
    if scheduler is None or "replicas" not in scheduler:
        return {"0": stats}
    workers = stats["workers"] or ()
    return {
        str(number): {
            "supervisor": {},
            "scheduler": of_replica,
            "workers": [worker for worker in workers if worker["replica"] == number],
        }
        for number, of_replica in scheduler["replicas"].items()
    }


def labels_of(model: str, more: Mapping[str, str]) -> dict[str, str]:
    """All labels of a sample, in vLLM's order: the replica, the model, and what else there is."""
    return {**({ENGINE: more[ENGINE]} if ENGINE in more else {}), "model_name": model, **more}


def vllm_families(stats: Mapping[str, Any], max_model_len: int) -> list[Family]:
    """What vLLM has under the same name, as vLLM counts it: each sample has the label of its replica."""
    found: dict[str, Family] = {}
    for number, of_replica in replicas_of(stats).items():
        families = families_of(of_replica, max_model_len)
        for family in (as_vllm(one, families) for one in families if one.name in VLLM_NAMES):
            samples = [(part, {ENGINE: number, **more}, value) for part, more, value in family.samples]
            known = found.setdefault(family.name, family._replace(samples=[]))
            found[family.name] = known._replace(samples=[*known.samples, *samples])
    return list(found.values())


def families_of(stats: Mapping[str, Any], max_model_len: int) -> list[Family]:
    """stats: of `AsyncLLM.stats`; of an engine that has not started yet there is little to tell."""
    families: list[Family] = []

    def write(kind: str, name: str, told: str, samples: Iterable[Sample]) -> None:
        families.append(Family(kind, name, told, list(samples)))

    def gauge(name: str, told: str, value: float, **labels: str) -> None:
        write("gauge", name, told, [("", labels, value)])

    def counter(name: str, told: str, value: float) -> None:
        write("counter", name, told, [("", {}, value)])

    supervisor = stats["supervisor"]
    if "num_recoveries" in supervisor:  # else the owner counts them and did not answer, and 0 would be a reset
        counter("recoveries", "Times that a process of the engine died and ran again.", supervisor["num_recoveries"])
        counter("recovery_seconds", "From those deaths until everything ran again.", supervisor["recovery_s"])
    if (scaling := supervisor.get("scaling")) is not None:
        gauge("replicas_wanted", "Replicas that the demand asks for, within their bounds.", scaling["num_wanted"])
        gauge("replicas_needed", "Of them, the part of each that the target needs.", scaling["num_needed"])
        told = "Share of requests whose promises the wanted number keeps."
        gauge("replicas_predicted_attainment", told, scaling["predicted_attainment"])
    if stats["scheduler"] is None:
        return families
    scheduler, requests = stats["scheduler"]["scheduler"], stats["scheduler"]["requests"]
    links = stats["scheduler"]["links"]
    kv, cache = scheduler["kv"], scheduler["prefix_cache"]
    gauge("num_requests_running", "Requests in the batch.", scheduler["num_running"])
    gauge("num_requests_waiting", "Requests that wait for a place in it.", scheduler["num_waiting"])
    samples: list[Sample]
    reasons = {"capacity": scheduler["num_waiting"], "deferred": scheduler["num_blocked"]}
    told = "Requests that wait for room, and those that wait for something else (a grammar)."
    samples = [("", {"reason": reason}, number) for reason, number in reasons.items()]
    write("gauge", "num_requests_waiting_by_reason", told, samples)
    gauge("num_tokens_waiting", "Prompt tokens of those that have not started.", scheduler["num_waiting_tokens"])
    gauge("kv_cache_usage_perc", "Share of the KV cache in use, 0 to 1.", kv["usage"])
    facts = {"block_size": str(kv["block_size"]), "num_gpu_blocks": str(kv["num_blocks"])}
    gauge("cache_config_info", "The KV cache.", 1, **facts)
    if cache is not None:
        counter("prefix_cache_queries", "Tokens looked up in the prefix cache.", cache["queries"])
        counter("prefix_cache_hits", "Those of them that were found.", cache["hits"])
        counter("prompt_tokens_cached", "Prompt tokens that need not be computed.", cache["hits"])
    if (moved := scheduler.get("transfers")) is not None:
        gauge("kv_tier_requests_waiting", "Requests that wait for KV from a tier.", moved["num_waiting"])
        counter("kv_tier_loads", "Loads of KV blocks from a tier.", moved["num_loads"])
        counter("kv_tier_loaded_blocks", "KV blocks that were loaded.", moved["num_loaded_blocks"])
        counter("kv_tier_short_loads", "Loads that found less than was there.", moved["num_short_loads"])
        counter("kv_tier_load_seconds", "Time that loads took.", moved["load_s"])
        counter("kv_tier_given_up", "Requests that computed what they had waited for.", moved["num_given_up"])
        counter("kv_tier_stored_blocks", "KV blocks that were stored in a tier.", moved["num_stored_blocks"])
        counter("kv_tier_store_seconds", "Time that stores took.", moved["store_s"])
    counter("num_preemptions", "Times that a request lost its place to another one.", scheduler["num_preemptions"])
    counter(
        "prompt_tokens", "Prompt tokens computed; those found in the cache are not.", scheduler["num_prefill_tokens"]
    )
    sources = {"local_compute": scheduler["num_prefill_tokens"], "local_cache_hit": cache["hits"] if cache else 0}
    samples = [("", {"source": source}, number) for source, number in sources.items()]
    write("counter", "prompt_tokens_by_source", "Prompt tokens, by where their KV came from.", samples)
    counter("generation_tokens", "Tokens sampled.", scheduler["num_output_tokens"])
    counter("wasted_tokens", "Tokens sampled for requests that had ended by then.", scheduler["num_wasted_tokens"])
    if (drafts := scheduler.get("speculation")) is not None:
        families += _of_drafts(drafts)
    counter("engine_steps", "Steps of the model.", scheduler["num_steps"])
    counter("failed_steps", "Steps that raised.", scheduler["num_failed_steps"])
    counter("worker_losses", "Times that workers died.", scheduler["num_worker_losses"])
    counter("recovered_requests", "Times that a request went on after that.", scheduler["num_recovered"])
    counter("corrupted_requests", "Ended because values were not finite.", scheduler["num_corrupted_requests"])
    write(
        "counter",
        "admission_rejections",
        "Requests that were refused.",
        [
            ("", {"reason": "overloaded"}, scheduler["num_overloaded"]),
            ("", {"reason": "policy"}, scheduler.get("num_rejected", 0)),
        ],
    )
    finished = {"stop": 0, "length": 0, "abort": 0, "error": 0, **requests["finished"]}
    samples = [("", {"finished_reason": reason}, number) for reason, number in finished.items()]
    write("counter", "request_success", "Sequences that ended, by why.", samples)
    counter("slo_requests", "Sequences with an objective that ended, and not by an abort.", requests["slo_promised"])
    samples = [("", {"reading": reading}, number) for reading, number in requests["slo_kept"].items()]
    write("counter", "slo_attained", "Those that kept it, in both readings of a promise per token.", samples)
    busy = sum(worker.get("busy_s", 0.0) for worker in stats["workers"] or ())
    counter("worker_busy_seconds", "Time that workers spent in steps, all ranks together.", busy)
    replaced = max((worker.get("num_replaced_kernels", 0) for worker in stats["workers"] or ()), default=0)
    gauge("replaced_kernels", "Kernels that torch has taken the place of, since they are wrong on this GPU.", replaced)
    fullest: dict[tuple[str, str], float] = {}
    for peer, link in links.items():
        name = ATTACHED if peer.startswith(ATTACHED) else peer  # programs come and go: a label of each has no end
        for direction, key in (("sent", "fill"), ("received", "fill_received")):
            fullest[name, direction] = max(link[key], fullest.get((name, direction), 0.0))
    fills = [("", {"peer": peer, "direction": direction}, fill) for (peer, direction), fill in fullest.items()]
    write(
        "gauge",
        "link_fill_perc",
        "Share of the scheduler's rings in use, 0 to 1; of attached programs, the fullest.",
        fills,
    )
    for name, histogram in stats["scheduler"]["steps"].items():
        write("histogram", name, STEPS[name], buckets_of(STEP_BOUNDS[name], histogram))
    for name, histogram in requests["histograms"].items():
        bounds = [bound for bound in BOUNDS[name] if not (name.endswith("_tokens") and bound > max_model_len)]
        write("histogram", name, OF_REQUESTS.get(name, "Of sequences that ended."), buckets_of(bounds, histogram))
    return families


def buckets_of(bounds: Sequence[float], histogram: Mapping[str, Any]) -> Iterator[Sample]:
    """Of all its bounds, or of those that there can be anything below."""
    total = 0
    for bound, count in zip(bounds, histogram["counts"], strict=False):
        total += count
        yield "_bucket", {"le": number_text(bound)}, total
    total = sum(histogram["counts"])
    yield "_bucket", {"le": "+Inf"}, total
    yield "_sum", {}, histogram["sum"]
    yield "_count", {}, total


def number_text(value: float) -> str:
    """As Prometheus writes it."""
    return repr(float(value))


def metrics_of(stats: Mapping[str, Any], model: str, max_model_len: int) -> list[Metric]:
    """As `LLM.get_metrics` returns them: under vLLM's names what vLLM has, all else under ours.

    stats, max_model_len: as for `families_of`. model: what the label model_name says.
    """
    theirs = {family.name: family for family in vllm_families(stats, max_model_len)}
    metrics: list[Metric] = []
    for family in families_of(stats, max_model_len):
        told = theirs.get(family.name, family)
        name = f"{VLLM_PREFIX if family.name in theirs else PREFIX}{told.name}"
        if told.kind == "histogram":
            metrics += _histograms(name, model, told.samples)
        elif told.kind == "gauge":
            metrics += [Gauge(name, labels_of(model, more), float(value)) for _, more, value in told.samples]
        else:  # times are counted in parts of a second
            metrics += [Counter(name, labels_of(model, more), value) for _, more, value in told.samples]
    return metrics


def _histograms(name: str, model: str, samples: Sequence[Sample]) -> list[Histogram]:
    """One for each replica, or one for all."""
    found: list[Histogram] = []
    for engine in dict.fromkeys(more.get(ENGINE) for _, more, _ in samples):
        own = [sample for sample in samples if sample[1].get(ENGINE) == engine]
        buckets = {more["le"]: int(value) for part, more, value in own if part == "_bucket"}
        values = {part: value for part, _, value in own if part != "_bucket"}
        labels = labels_of(model, {} if engine is None else {ENGINE: engine})
        found.append(Histogram(name, labels, int(values["_count"]), values["_sum"], buckets))
    return found


def _of_drafts(drafts: Mapping[str, Any]) -> list[Family]:
    """Under vLLM's names, with the drafter as a label."""
    drafter = {"drafter": drafts["drafter"]}
    found = [
        Family("counter", f"spec_decode_{name}", told, [("", drafter, drafts[name])])
        for name, told in (
            ("num_drafts", "Times that a sequence had drafts in a step."),
            ("num_draft_tokens", "Drafts that were checked."),
            ("num_accepted_tokens", "Drafts that were right."),
        )
    ]
    by_position = enumerate(drafts["num_accepted_tokens_per_pos"])
    samples: list[Sample] = [("", {"position": str(position), **drafter}, number) for position, number in by_position]
    return [*found, Family("counter", "spec_decode_num_accepted_tokens_per_pos", "Right drafts, by position.", samples)]
