"""Speculation: what `speculative_config` says, with vLLM's names. Drafts are checked by exact match, so they change no token.

Read where the configuration is made, by the scheduler (how many drafts a step may have) and by the worker (which drafter). Free
of torch.
"""

from __future__ import annotations

import json
from bisect import bisect_left
from collections.abc import Mapping, Sequence
from dataclasses import replace
from itertools import accumulate
from typing import Any

import numpy as np

from actorllm.errors import ConfigError, nearest_name
from actorllm.types.drafter import DEFAULT_LOOKUP, Costs, Drafter, Ranges, Speculation
from actorllm.types.named_class import named_class

NGRAM, SUFFIX, DRAFT_MODEL, EAGLE, EAGLE3, MTP = "ngram", "suffix", "draft_model", "eagle", "eagle3", "mtp"

HEADS = (EAGLE, EAGLE3, MTP)
"""What reads states of the target. Those of 'mtp' are in its checkpoint."""
WITH_MODEL = (DRAFT_MODEL, *HEADS)
"""What computes beside the target."""
WITH_FOLDER = (DRAFT_MODEL, EAGLE, EAGLE3)
"""What needs a folder of its own."""
MTP_ENDING = "_mtp"
"""Of names that vLLM has for "mtp", one for each family, such as "deepseek_mtp"."""

DRAFTERS = {
    NGRAM: "actorllm.model.speculation.ngram:NgramDrafter",
    SUFFIX: "actorllm.model.speculation.suffix:SuffixDrafter",
}
"""Where the built-in drafters are, by method."""

NOT_THERE = (
    *("medusa", "mlp_speculator", "dflash", "dspark", "ngram_gpu"),
    *("extract_hidden_states", "custom_class"),
)
"""Methods of vLLM that are refused by name."""

MAX_DRAFTS = 31
"""Most drafts of a row in a step."""
MAX_LOOKUP = 64
"""Most tokens of an n-gram that is looked up."""
MAX_CACHED = 10_000
"""Of suffix_decoding_max_cached_requests where it is not given, as in vLLM."""
SUFFIX_DRAFTS = 8
"""Of num_speculative_tokens with method 'suffix', where none is given."""
ROW_BOUNDS = (1, 2, 4, 8, 16, 32, 64)
"""Up to so many rows the same number of drafts is tried; more have none, unless the application says so."""
LIKELY_ACCEPTANCE = 0.7
"""Of a draft whose predecessors are right, where a row drafts at all: it rests where its drafts are wrong."""
LEAST_GAIN = 1.15
"""Of tokens a second, below which drafts are not tried: rows whose drafts are wrong pay for them."""
PAYING_GAIN = 1.05
"""Of tokens a second, below which a row whose own drafts have been checked goes without."""
ACCEPTANCES = 16
"""Shares of right drafts, between 0 and 1, for which the number that pays is known."""
MAX_ENTRIES = 64
"""Of num_speculative_tokens_per_batch_size."""

HARMLESS_VALUES: dict[str, tuple[Any, ...]] = {
    "rejection_sample_method": (None, "standard", "strict"),
    "disable_padded_drafter_batch": (None, False, True),
    "disable_log_stats": (None, False, True),
    "enforce_eager": (None, False, True),
    "draft_tensor_parallel_size": (None, 1),
    "use_local_argmax_reduction": (None, False, True),
    **dict.fromkeys(("parallel_drafting", "use_heterogeneous_vocab", "disable_eagle_block_drop"), (None, False)),
    **dict.fromkeys(("index_share_for_mtp_iteration", "enable_adaptive_verification"), (None, False)),
    **dict.fromkeys(("kv_cache_dtype", "moe_backend", "attention_backend"), (None, "auto")),
    **dict.fromkeys(("quantization", "max_model_len", "revision", "code_revision", "draft_load_config"), (None,)),
    **dict.fromkeys(("synthetic_acceptance_rates", "synthetic_acceptance_length", "dspark_draft_topk"), (None,)),
    **dict.fromkeys(("speculative_token_tree", "disable_by_batch_size"), (None,)),
}
"""Options of vLLM with the values that change nothing here; other values are refused."""

INSTEAD = {
    "disable_by_batch_size": "use num_speculative_tokens_per_batch_size, a list of [fewest rows, most rows, drafts]"
}
"""Of such options."""

NO_MODEL = (None, "ngram", "[ngram]")
"""What `model` may be with every other method than 'draft_model'; the names are vLLM's older way to say 'ngram'."""

KNOWN = (
    *("method", "model", "draft_sample_method", "num_speculative_tokens", "prompt_lookup_min"),
    *(
        "prompt_lookup_max",
        "suffix_decoding_max_tree_depth",
        "suffix_decoding_max_spec_factor",
        "suffix_decoding_min_token_prob",
    ),
    *("suffix_decoding_max_cached_requests", "num_speculative_tokens_per_batch_size"),
)


def make_drafter(options: Speculation, vocab_size: int) -> Drafter:
    """A new drafter. Raises ConfigError for a class that cannot be loaded or built."""
    found = drafter_class(options.method)
    try:
        return found(options, vocab_size)
    except Exception as error:  # of a class of the application
        raise ConfigError(
            f"speculative_config: method={options.method!r:.120} cannot be built: {type(error).__name__}: {error}"
        ) from error


def drafter_class(method: str) -> type[Drafter]:
    """The class of a method. Raises ConfigError, naming the method, where there is none."""
    if method in NOT_THERE:
        raise ConfigError(
            f"speculative_config: method={method!r} is not supported; use {NGRAM!r}, or a drafter of yours as 'module:Class'"
        )
    return named_class("speculative_config: method", method, Drafter, DRAFTERS, (*WITH_FOLDER, MTP))  # type: ignore[type-abstract]


def default_ranges(most: int) -> Ranges:
    """Fewer drafts in larger batches.

    A decode step for one row mostly waits for the weights, and drafts ride along. From about eight rows on, a draft costs as
    much as a row, and a rejected one is lost. Until a worker has measured what steps take (`with_costs`).
    """
    wanted = ((1, 2, most), (3, 4, min(most, 3)), (5, 8, min(most, 1)))
    return tuple(entry for entry in wanted if entry[2])


def with_costs(speculation: Speculation, steps: Costs, drafts: Costs) -> Speculation:
    """The same with the ranges that pay, where the application has given none.

    Arguments:
        steps: what steps take, (tokens, seconds).
        drafts: what passes of the draft model take, (rows, seconds); empty: drafts cost nothing beside the step.
    """
    if not speculation.goes_by_costs or not steps:
        return speculation
    most = speculation.num_speculative_tokens
    ranges = paying_ranges(most, steps, drafts)
    return replace(speculation, num_speculative_tokens_per_batch_size=ranges, step_costs=steps, draft_costs=drafts)


def draft_costs_of(facts: Mapping[str, Mapping[str, Any]]) -> tuple[Costs, Costs]:
    """What the first worker has measured of steps and of drafts; empty: nothing."""
    for fact in facts.values():
        if "step_costs" in fact:
            steps, drafts = (tuple((int(n), float(s)) for n, s in fact[name]) for name in ("step_costs", "draft_costs"))
            return steps, drafts
    return (), ()


def paying_ranges(most: int, steps: Costs, drafts: Costs) -> Ranges:
    """For numbers of rows, the drafts that make most tokens a second where each is right with `LIKELY_ACCEPTANCE`."""
    ranges: list[tuple[int, int, int]] = []
    first = 1
    for last in ROW_BOUNDS:
        best, gain = best_number(most, last, LIKELY_ACCEPTANCE, steps, drafts)
        if gain < LEAST_GAIN:
            break
        ranges.append((first, last, best))
        first = last + 1
    return tuple(ranges)


def best_number(most: int, rows: int, acceptance: float, steps: Costs, drafts: Costs) -> tuple[int, float]:
    """The number of drafts that makes most tokens a second, and how many times as many as without.

    Arguments:
        most: drafts of a row.
        rows: of the step; each has as many drafts.
        acceptance: how often a draft is right if those before it are, 0 to 1.
        steps, drafts: as of `with_costs`.
    """
    without = seconds_of(steps, rows)
    gains, tokens = {}, 1.0
    for number in range(1, most + 1):
        tokens += acceptance**number
        spent = seconds_of(steps, rows * (1 + number)) + number * seconds_of(drafts, rows)
        gains[number] = tokens * without / spent
    best = max(gains, key=lambda number: gains[number])
    return best, gains[best]


class PayingDrafts:
    """Which drafts pay, by how often those of each row have been right.

    Arguments:
        speculation: with what steps take.
    """

    def __init__(self, speculation: Speculation) -> None:
        most, steps, drafts = speculation.num_speculative_tokens, speculation.step_costs, speculation.draft_costs
        self._steps, self._drafts = steps, drafts
        self.has_passes = bool(drafts)
        """A draft model computes, for all rows of a step at about the cost of one."""
        self._table: list[list[int]] = []
        """By the index of the row bound and by acceptance; 0: none pays."""
        for rows in ROW_BOUNDS:
            found = [best_number(most, rows, share / ACCEPTANCES, steps, drafts) for share in range(ACCEPTANCES + 1)]
            self._table.append([number if gain >= PAYING_GAIN else 0 for number, gain in found])

    def number(self, acceptance: float, rows: int) -> int:
        """How many drafts of a row pay if all rows of the step have as many; 0: none."""
        bound = min(bisect_left(ROW_BOUNDS, rows), len(ROW_BOUNDS) - 1)
        return self._table[bound][round(ACCEPTANCES * acceptance)]

    def is_worth(self, rows: int, wanted: Sequence[int], acceptances: Sequence[float]) -> bool:
        """Whether a step makes more tokens a second with these drafts than without: few rows pay for whole passes of a draft model.

        Arguments:
            rows: of the step.
            wanted: of the rows that draft, how many, at least 1 each.
            acceptances: of the same rows.
        """
        right = sum(a**place for number, a in zip(wanted, acceptances, strict=True) for place in range(1, number + 1))
        passes = max(wanted) * seconds_of(self._drafts, len(wanted))
        spent = seconds_of(self._steps, rows + sum(wanted)) + passes
        return (1 + right / rows) * seconds_of(self._steps, rows) > PAYING_GAIN * spent


def seconds_of(costs: Costs, size: int) -> float:
    """By lines between what was measured. Beyond it every token costs what one of the largest step does."""
    if not costs:
        return 0.0
    # What is measured under load may seem to cost less than a smaller step does.
    rising = list(accumulate((seconds for _, seconds in costs), max))
    sizes = [measured for measured, _ in costs]
    return float(np.interp(size, sizes, rising)) * max(1.0, size / sizes[-1])


def read_speculation(given: Any) -> Speculation | None:
    """Of the argument `speculative_config`.

    Arguments:
        given: a mapping, the same as JSON, or None.

    Raises:
        ConfigError: names the option, its value and the fix.
    """
    tree = _tree(given)
    if tree is None:
        return None
    for name in tree:
        if name not in KNOWN and name not in HARMLESS_VALUES:
            known = [*KNOWN, *HARMLESS_VALUES]
            raise ConfigError(f"speculative_config: there is no {name!r:.80}{nearest_name(str(name), known)}")
    for name, values in HARMLESS_VALUES.items():
        if tree.get(name) not in values:
            fix = INSTEAD.get(name, "leave it out")
            raise ConfigError(f"speculative_config: {name}={tree[name]!r:.80} is not supported; {fix}")
    method, model = _method(tree)
    drawn = tree.get("draft_sample_method") or "probabilistic"
    if drawn not in ("greedy", "probabilistic"):
        raise ConfigError(f"speculative_config: draft_sample_method={drawn!r:.80} must be 'probabilistic' or 'greedy'")
    most = tree.get("num_speculative_tokens")
    if most is None:
        most = {SUFFIX: SUFFIX_DRAFTS, MTP: 1}.get(method)
    if most is None:
        raise ConfigError(
            "speculative_config: num_speculative_tokens is missing; give the most drafts of a step, like 4"
        )
    most = _count("num_speculative_tokens", most, MAX_DRAFTS)
    least_lookup, most_lookup = _lookup(tree)
    cached = tree.get("suffix_decoding_max_cached_requests")
    cached = MAX_CACHED if cached is None else _count("suffix_decoding_max_cached_requests", cached, 2**31 - 1, 0)
    return Speculation(
        method,
        most,
        least_lookup,
        most_lookup,
        _count("suffix_decoding_max_tree_depth", tree.get("suffix_decoding_max_tree_depth", 24), MAX_LOOKUP),
        _share("suffix_decoding_max_spec_factor", tree.get("suffix_decoding_max_spec_factor", 1.0), 100),
        _share("suffix_decoding_min_token_prob", tree.get("suffix_decoding_min_token_prob", 0.1), 1),
        model,
        drawn,
        _ranges(tree, most),
        cached,
        tree.get("num_speculative_tokens_per_batch_size") is None,
    )


def _tree(given: Any) -> Mapping[Any, Any] | None:
    if isinstance(given, str):
        try:
            given = json.loads(given)
        except (ValueError, RecursionError) as error:
            raise ConfigError(f"speculative_config is not valid JSON: {error}") from error
    if given is None or isinstance(given, Mapping):
        return given
    raise ConfigError(f"speculative_config={given!r:.80} must be a mapping, the same as JSON, or None")


def _method(tree: Mapping[Any, Any]) -> tuple[str, str | None]:
    """The method, and the folder of its model where it needs one."""
    method, model = tree.get("method"), tree.get("model")
    if method is None and model is not None:  # as in vLLM
        method = NGRAM if model in NO_MODEL else _method_of(str(model))
    if not isinstance(method, str) or not method:
        known = ", ".join(map(repr, (*DRAFTERS, *WITH_FOLDER, MTP)))
        raise ConfigError(f"speculative_config: method={method!r:.80} must be {known}, or a class as 'module:Class'")
    if method.endswith(MTP_ENDING) and ":" not in method:
        method = MTP
    if method in WITH_FOLDER:
        if not isinstance(model, str) or not model:
            what = "draft model" if method == DRAFT_MODEL else "head"
            raise ConfigError(
                f"speculative_config: model={model!r:.80} must be the name or the folder of the {what} (method={method!r})"
            )
        return method, model
    if model not in NO_MODEL:
        raise ConfigError(
            f"speculative_config: model={model!r:.80} is not supported with method={method!r:.80}; leave it out, or use "
            f"{DRAFT_MODEL!r}"
        )
    if method != MTP:
        drafter_class(method)
    return method, None


def _method_of(model: str) -> str:
    """By the name of the checkpoint, as in vLLM."""
    name = model.lower()
    return EAGLE if "eagle-" in name else EAGLE3 if "eagle3" in name else DRAFT_MODEL


def _count(name: str, value: Any, most: int, least: int = 1) -> int:
    if isinstance(value, bool) or not isinstance(value, int) or not least <= value <= most:
        raise ConfigError(f"speculative_config: {name}={value!r:.80} must be an integer from {least} to {most}")
    return value


def _share(name: str, value: Any, most: float) -> float:
    if isinstance(value, bool) or not isinstance(value, int | float) or not 0 <= value <= most:
        raise ConfigError(f"speculative_config: {name}={value!r:.80} must be a number from 0 to {most:g}")
    return float(value)


def _lookup(tree: Mapping[Any, Any]) -> tuple[int, int]:
    """prompt_lookup_min and prompt_lookup_max; where one is missing, it is the other."""
    sizes = [
        None if tree.get(name) is None else _count(name, tree[name], MAX_LOOKUP)
        for name in ("prompt_lookup_min", "prompt_lookup_max")
    ]
    least = sizes[0] or sizes[1] or DEFAULT_LOOKUP
    most = sizes[1] or least
    if least > most:
        raise ConfigError(
            f"speculative_config: prompt_lookup_min={least} is more than prompt_lookup_max={most}; lower the one or raise the other"
        )
    return least, most


def _ranges(tree: Mapping[Any, Any], most: int) -> Ranges:
    name = "num_speculative_tokens_per_batch_size"
    given = tree.get(name)
    if given is None:
        return default_ranges(most)
    if not isinstance(given, list | tuple) or len(given) > MAX_ENTRIES:
        raise ConfigError(
            f"speculative_config: {name}={given!r:.80} must be a list of [fewest rows, most rows, drafts], with {MAX_ENTRIES} "
            f"entries at most"
        )
    ranges: list[tuple[int, int, int]] = []
    before = 0
    for entry in given:
        if not isinstance(entry, list | tuple) or len(entry) != 3:
            raise ConfigError(f"speculative_config: {name}: {entry!r:.80} must be [fewest rows, most rows, drafts]")
        first, last = (_count(name, value, 2**31 - 1) for value in entry[:2])
        drafts = _count(name, entry[2], most, 0)
        if not before < first <= last:
            raise ConfigError(
                f"speculative_config: {name}: {list(entry)!r:.80} does not begin behind {before} rows, or ends before it "
                f"begins; list the ranges in rising order"
            )
        before = last
        ranges.append((first, last, drafts))
    return tuple(ranges)
