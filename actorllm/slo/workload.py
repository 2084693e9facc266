"""`Workload`: which requests come when, as columns; and how one is made.

A workload is put together from independent parts, each a function of its own seed stream: arrivals, lengths, shared
prefixes, and classes with their objectives. So the same seed at another rate gives the same requests, only closer
together (common random numbers). Another mix of objectives changes nothing but the objectives.

    workload = synthetic(10_000, rate=4.0, seed=1)                       # or traces.load_trace(path).workload
    workload = assign_classes(workload, parse_mix("ls:0.5:ttft=0.5+p/4000,tpot=0.05 be:0.5:e2e=120"), seed=1)

Token ids do not matter here, only how many there are and which prompts begin alike: `Prefixes`.
"""

from __future__ import annotations

import hashlib
import math
import re
from collections import Counter
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace
from typing import Any, TypeAlias

import numpy as np
from numpy.typing import NDArray

from actorllm.errors import InvalidParameterError, nearest_name
from actorllm.messages import F64, I32, I64, NO_U8, U8
from actorllm.slo.objectives import Promises
from actorllm.slo.turns import Turns
from actorllm.types.objective import SLO, RequestClass


def _mixed(values: NDArray[np.uint64]) -> NDArray[np.uint64]:
    """Every bit of the result depends on every bit of the value (the finalizer of SplitMix64)."""
    values = (values + np.uint64(0x9E3779B97F4A7C15)) * np.uint64(0xBF58476D1CE4E5B9)
    values = (values ^ (values >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
    return values ^ (values >> np.uint64(31))


@dataclass(frozen=True, slots=True, eq=False)
class Prefixes:
    """Which prompts begin alike, as in the traces of Mooncake (FAST 2025).

    Request i has the ids ids[starts[i]:starts[i + 1]], one for each `block_tokens` tokens of its prompt; the last one may
    stand for fewer. Two prompts with the same k first ids begin with the same k * block_tokens tokens.
    """

    ids: I64
    starts: I64
    block_tokens: int

    def of(self, request: int) -> I64:
        return self.ids[self.starts[request] : self.starts[request + 1]]

    def block_hashes(self, request: int, num_prompt: int, block_size: int) -> U8:
        """What `Submit.block_hashes` carries for this request in an engine with blocks of block_size tokens.

        As real ones, each covers everything before its block.
        """
        ids = self.of(request)
        num_blocks = min(num_prompt, ids.size * self.block_tokens) // block_size
        if not num_blocks:
            return NO_U8
        ends = np.arange(1, num_blocks + 1) * block_size - 1
        at = ends // self.block_tokens
        so_far = np.cumsum(_mixed(ids.astype(np.uint64) + _mixed(np.arange(ids.size, dtype=np.uint64))))
        words = np.zeros((num_blocks, 4), np.uint64)
        words[:, 0] = _mixed(so_far[at] + (ends % self.block_tokens).astype(np.uint64))  # routers read these alone
        words[:, 1] = ends % self.block_tokens
        words[:, 2] = ids[at]
        words[:, 3] = 0x5EED  # not what hashing token ids gives
        return words.view(np.uint8).ravel()

    def regrouped(self, block_tokens: int, num_prompt: I32) -> Prefixes:
        """The same prompts with ids for so many tokens each: a multiple of today's, or a divisor of it.

        With a multiple, prompts that share less than a whole block share nothing of it any more. Raises
        InvalidParameterError for any other size.
        """
        if block_tokens == self.block_tokens:
            return self
        if block_tokens < 1 or max(block_tokens, self.block_tokens) % min(block_tokens, self.block_tokens):
            raise InvalidParameterError(
                f"block_tokens={block_tokens}: hash ids that stand for {self.block_tokens} tokens each can be regrouped to a "
                f"multiple or a divisor of {self.block_tokens} only"
            )
        ids: list[int] = []
        starts = [0]
        known: dict[tuple[int, ...], int] = {}
        dense = {old: new for new, old in enumerate(np.unique(self.ids).tolist())}
        for request, size in enumerate(num_prompt.tolist()):
            own = [dense[old] for old in self.of(request).tolist()]
            if block_tokens < self.block_tokens:
                parts = self.block_tokens // block_tokens
                finer = [old * parts + part for old in own for part in range(parts)]
                ids += finer[: -(-size // block_tokens)]
            else:
                of_each, before = block_tokens // self.block_tokens, -1
                for at in range(0, len(own), of_each):
                    before = known.setdefault((before, *own[at : at + of_each]), len(known))
                    ids.append(before)
            starts.append(len(ids))
        return Prefixes(np.array(ids, np.int64), np.array(starts, np.int64), block_tokens)

    def select(self, rows: NDArray[np.intp]) -> Prefixes:
        counts = np.diff(self.starts)[rows]
        starts = np.concatenate(([0], np.cumsum(counts))).astype(np.int64)
        within = np.arange(starts[-1]) - np.repeat(starts[:-1], counts)
        return Prefixes(self.ids[np.repeat(self.starts[:-1][rows], counts) + within], starts, self.block_tokens)


@dataclass(frozen=True, slots=True, eq=False)
class Workload:
    """One row per request, in the order of arrival."""

    arrival: F64
    """Seconds; the first one is what it is, 0 or later."""
    num_prompt: I32
    num_output: I32
    """Tokens after which a request ends; at least 1."""
    class_ids: I32
    """Into `classes`."""
    classes: tuple[RequestClass, ...] = (RequestClass("all"),)
    tenant_ids: I32 | None = None
    """Into `tenants`; None: no tenants."""
    tenants: tuple[str, ...] = ()
    prefixes: Prefixes | None = None
    """None: no two prompts begin alike."""
    name: str = "workload"
    max_tokens: I32 | None = None
    """What requests ask for at most. None: exactly what they get, which schedulers that look at it then know beforehand."""
    own_promises: Promises | None = None
    """What each request is promised, where not all of a class are promised the same. None: what its class is."""
    turns: Turns | None = None
    """Which requests wait for others; None: none does. Arrivals of those that do are nominal."""

    def __post_init__(self) -> None:
        size = self.arrival.size
        for label in ("num_prompt", "num_output", "class_ids", "tenant_ids", "max_tokens"):
            column = getattr(self, label)
            if column is not None and column.size != size:
                raise InvalidParameterError(f"workload {self.name!r}: {label} has {column.size} rows, arrival {size}")
        if self.own_promises is not None and len(self.own_promises) != size:
            raise InvalidParameterError(
                f"workload {self.name!r}: own_promises has {len(self.own_promises)} rows, arrival {size}"
            )
        if self.turns is not None:
            self.turns.check(size, self.name)
        if not size:
            return
        if not np.isfinite(self.arrival).all() or self.arrival[0] < 0 or (np.diff(self.arrival) < 0).any():
            raise InvalidParameterError(f"workload {self.name!r}: arrivals must be 0 or later and in order")
        for label in ("num_prompt", "num_output"):
            least = int(getattr(self, label).min())
            if least < 1:
                raise InvalidParameterError(f"workload {self.name!r}: {label}={least} of a request must be at least 1")
        if int(self.class_ids.min()) < 0 or int(self.class_ids.max()) >= len(self.classes):
            raise InvalidParameterError(f"workload {self.name!r}: a class id is outside of {len(self.classes)} classes")

    def __len__(self) -> int:
        return self.arrival.size

    @property
    def promises(self) -> Promises:
        """What every request is promised."""
        return Promises.of_classes(self.classes, self.class_ids) if self.own_promises is None else self.own_promises

    @property
    def promised(self) -> set[str]:
        """The classes in which any request is promised something."""
        made = self.promises.made
        return {kind.name for number, kind in enumerate(self.classes) if made[self.class_ids == number].any()}

    @property
    def has_shared_prompts(self) -> bool:
        """Whether prompts may begin alike."""
        return self.prefixes is not None or self.turns is not None

    def kind(self, row: int) -> RequestClass:
        """The class of a request, with what this one is promised."""
        kind = self.classes[int(self.class_ids[row])]
        return kind if self.own_promises is None else replace(kind, slo=self.own_promises.slo(row))

    @property
    def rate(self) -> float:
        """Requests per second, over the time in which they arrive; of sessions, over the time in which these begin."""
        arrival = self.arrival if self.turns is None else self.arrival[self.turns.begins]
        span = float(arrival[-1] - arrival[0]) if arrival.size else 0.0
        return (arrival.size - 1) / span * (len(self) / arrival.size) if span else math.inf

    @property
    def cv(self) -> float:
        """Coefficient of variation of the gaps between arrivals: 1 for Poisson arrivals, more when they are bursty."""
        gaps = np.diff(self.arrival)
        return float(gaps.std() / gaps.mean()) if gaps.size and gaps.any() else 0.0

    def select(self, rows: NDArray[Any]) -> Workload:
        """These rows (indices in order, or a mask) with their arrivals."""
        index = np.flatnonzero(rows) if rows.dtype == np.bool_ else rows.astype(np.intp)
        return self.sent_at(index, self.arrival[index])

    def sent_at(self, index: NDArray[np.intp], arrival: F64) -> Workload:
        """These rows, in this order, at these times."""
        return replace(
            self,
            arrival=arrival,
            num_prompt=self.num_prompt[index],
            num_output=self.num_output[index],
            class_ids=self.class_ids[index],
            tenant_ids=None if self.tenant_ids is None else self.tenant_ids[index],
            prefixes=None if self.prefixes is None else self.prefixes.select(index),
            max_tokens=None if self.max_tokens is None else self.max_tokens[index],
            own_promises=None if self.own_promises is None else self.own_promises.select(index),
            turns=None if self.turns is None else self.turns.select(index),
        )

    def arriving(self, arrival: F64) -> Workload:
        """The same requests at other times, in the order of these. Of sessions only the times of their beginnings count."""
        if self.turns is None:
            return replace(self, arrival=arrival)
        nominal = self.turns.nominal(arrival)
        order = np.argsort(nominal, kind="stable")  # a parent comes before its children, also at the same time
        return self.sent_at(order, nominal[order])

    def head(self, num: int) -> Workload:
        return self.select(np.arange(min(num, len(self))))

    def before(self, until: float) -> Workload:
        """Without those that come at this time or later."""
        return self if until == math.inf else self.head(int(np.searchsorted(self.arrival, until)))

    def fitting(self, max_model_len: int) -> Workload:
        """Without the requests that a model of this length would refuse."""
        return self.select(self.num_prompt.astype(np.int64) + self.num_output <= max_model_len)

    def asking_for(self, max_tokens: int) -> Workload:
        """The same requests, which ask for so many tokens and end earlier by themselves (or are cut off there)."""
        if not isinstance(max_tokens, int) or max_tokens < 1:
            raise InvalidParameterError(f"max_tokens={max_tokens!r} must be a number of tokens, 1 or more")
        return replace(self, max_tokens=np.full(len(self), max_tokens, np.int32))

    def at_rate(self, rate: float) -> Workload:
        """The same requests, so much closer together or further apart that they come at this rate."""
        _check_positive("rate", rate)
        return self.scaled(self.rate / rate)

    def scaled(self, factor: float) -> Workload:
        """All gaps times a factor; the first request comes at 0."""
        _check_positive("factor", factor)
        return self.arriving((self.arrival - self.arrival[:1]) * factor)

    def repeated(self, num: int) -> Workload:
        """So many requests: this workload again and again, one mean gap apart. Each round has prefixes of its own."""
        rounds = -(-num // len(self)) if len(self) else 0
        if rounds <= 1:
            return self.head(num)
        span = float(self.arrival[-1] - self.arrival[0]) + (1 / self.rate if self.rate < math.inf else 1.0)
        rows = np.tile(np.arange(len(self)), rounds)[:num]
        number = np.arange(num) // len(self)
        many = replace(self.select(rows[: len(self)]), name=f"{self.name} x{rounds}")
        prefixes = self.prefixes
        if prefixes is not None:
            prefixes = prefixes.select(rows)
            counts = np.diff(prefixes.starts)
            prefixes = replace(prefixes, ids=prefixes.ids + np.repeat(number, counts) * (self.prefixes_end() + 1))
        return replace(
            many,
            arrival=self.arrival[rows] + number * span,
            num_prompt=self.num_prompt[rows],
            num_output=self.num_output[rows],
            class_ids=self.class_ids[rows],
            tenant_ids=None if self.tenant_ids is None else self.tenant_ids[rows],
            prefixes=prefixes,
            max_tokens=None if self.max_tokens is None else self.max_tokens[rows],
            own_promises=None if self.own_promises is None else self.own_promises.select(rows),
            turns=None if self.turns is None else self.turns.repeated(rounds).select(np.arange(num)),
        )

    def prefixes_end(self) -> int:
        """The largest prefix id; -1 without any."""
        return -1 if self.prefixes is None or not self.prefixes.ids.size else int(self.prefixes.ids.max())

    def warnings(self) -> list[str]:
        """Objectives that no engine could keep, with the reason."""
        if self.own_promises is not None:
            return self._own_contradictions(self.own_promises)
        return [
            f"class {kind.name!r}: {reason}"
            for kind in self.classes
            if kind.slo is not None and (reason := kind.slo.contradiction()) is not None
        ]

    def _own_contradictions(self, promises: Promises) -> list[str]:
        """For each class and reason: how many requests, and the first of them."""
        suspects = (promises.e2e < promises.ttft) & np.isfinite(promises.ttft)
        suspects |= np.isinf(promises.ttft) & (promises.ttft_per_prompt_token > 0)
        found = []
        for number in np.unique(self.class_ids[suspects]).tolist():
            rows = np.flatnonzero(suspects & (self.class_ids == number))
            slo = promises.slo(int(rows[0]))
            reason = None if slo is None else slo.contradiction()
            found.append(f"class {self.classes[number].name!r}: {rows.size} requests, as {int(rows[0])}: {reason}")
        return found


def _check_positive(name: str, value: float) -> None:
    if not (isinstance(value, int | float) and math.isfinite(value) and value > 0):
        raise InvalidParameterError(f"{name}={value!r} must be a positive number")


def seed_stream(seed: int, purpose: str) -> np.random.Generator:
    """Random numbers for one purpose: what others draw with the same seed does not move them."""
    if seed < 0:
        raise InvalidParameterError(f"seed={seed} must be 0 or more")
    digest = hashlib.sha256(purpose.encode()).digest()
    return np.random.Generator(np.random.Philox(np.random.SeedSequence([seed, int.from_bytes(digest[:8], "little")])))


# Arrivals: seconds, increasing, `num` of them ---------------------------------------------------------------------------


def poisson_arrivals(num: int, rate: float, seed: int = 0) -> F64:
    """Independent of each other, `rate` per second."""
    _check_positive("rate", rate)
    return np.cumsum(seed_stream(seed, "arrivals").exponential(1.0, num)) / rate


def gamma_arrivals(num: int, rate: float, cv: float, seed: int = 0) -> F64:
    """Gaps with a gamma distribution: burstier than Poisson arrivals for cv > 1, more regular for cv < 1."""
    _check_positive("rate", rate)
    _check_positive("cv", cv)
    shape = cv**-2
    return np.cumsum(seed_stream(seed, "arrivals").gamma(shape, 1 / shape, num)) / rate


def constant_arrivals(num: int, rate: float) -> F64:
    _check_positive("rate", rate)
    return np.arange(num) / rate


def bursty_arrivals(
    num: int, rate: float, *, peak: float = 4.0, share: float = 0.2, period_s: float = 60.0, seed: int = 0
) -> F64:
    """On and off: Poisson arrivals at peak * rate for a share of the time, and at what is left of the rate otherwise.

    On and off phases have exponential lengths; one of each takes period_s on average. Needs peak * share <= 1.
    """
    for name, value in (("rate", rate), ("peak", peak), ("share", share), ("period_s", period_s)):
        _check_positive(name, value)
    if peak * share > 1 or share >= 1:
        raise InvalidParameterError(
            f"peak={peak} x share={share} must be at most 1, or more than all requests come then"
        )
    off = (1 - peak * share) / (1 - share)
    rng = seed_stream(seed, "arrivals")
    demand = np.cumsum(rng.exponential(1.0, num))  # arrivals of a unit process, to be stretched by the rate of the time
    phases = seed_stream(seed, "phases")
    num_periods = int(num / rate / period_s * 1.5) + 20
    while True:
        lengths = phases.exponential((share * period_s, (1 - share) * period_s), (num_periods, 2)).ravel()
        arrived = np.cumsum(lengths * np.tile((peak * rate, off * rate), num_periods))
        if arrived[-1] > demand[-1]:
            break
        num_periods *= 2
    ends = np.cumsum(lengths)
    return np.interp(demand, np.concatenate(([0.0], arrived)), np.concatenate(([0.0], ends)))


def diurnal_arrivals(num: int, rate: float, *, swing: float = 0.8, num_periods: float = 2.0, seed: int = 0) -> F64:
    """Poisson arrivals whose rate goes up and down as a sine, from (1 - swing) to (1 + swing) times `rate`.

    num_periods: so many of its periods are in the run, whatever its length. Needs 0 <= swing < 1.
    """
    _check_positive("rate", rate)
    _check_positive("num_periods", num_periods)
    if not 0 <= swing < 1:
        raise InvalidParameterError(f"swing={swing} must be 0 or more and below 1")
    demand = np.cumsum(seed_stream(seed, "arrivals").exponential(1.0, num))
    if not num:
        return demand
    # Arrivals by a time, at a unit rate: the time plus a sine's integral. It is inverted on a fine grid.
    period = num / num_periods
    times = np.linspace(0.0, float(demand[-1]) + period, 64 * int(num_periods + 2) + 4 * num)
    arrived = times + swing * period / (2 * math.pi) * (1 - np.cos(2 * math.pi * times / period))
    return np.interp(demand, arrived, times) / rate


# Lengths: prompt and output tokens ---------------------------------------------------------------------------------------


def fixed_lengths(num: int, num_prompt: int, num_output: int) -> tuple[I32, I32]:
    return np.full(num, num_prompt, np.int32), np.full(num, num_output, np.int32)


def lognormal_lengths(
    num: int, prompt: tuple[int, int], output: tuple[int, int], *, longest: int = 1 << 20, seed: int = 0
) -> tuple[I32, I32]:
    """prompt and output: (median, 99th percentile) of tokens; longest bounds both."""
    rng = seed_stream(seed, "lengths")

    def draw(median: int, p99: int) -> I32:
        if not 0 < median <= p99:
            raise InvalidParameterError(f"lengths: median={median} must be positive and at most p99={p99}")
        values = median * np.exp(rng.standard_normal(num) * math.log(p99 / median) / 2.3263478740408408)
        tokens: I32 = np.clip(np.rint(values), 1, longest).astype(np.int32)
        return tokens

    return draw(*prompt), draw(*output)


# Workloads ---------------------------------------------------------------------------------------------------------------


def make_workload(arrival: F64, lengths: tuple[I32, I32], name: str = "workload") -> Workload:
    return Workload(arrival, *lengths, class_ids=np.zeros(arrival.size, np.int32), name=name)


def synthetic(num: int, rate: float, *, seed: int = 0, cv: float = 1.0) -> Workload:
    """Conversations: lengths like those of the Azure conversation trace of 2023 (median and 99th percentile)."""
    lengths = lognormal_lengths(num, (1020, 4142), (129, 601), longest=16_384, seed=seed)
    return make_workload(gamma_arrivals(num, rate, cv, seed), lengths, "synthetic")


def sample() -> Workload:
    """What `traces.SAMPLE` holds."""
    mix = parse_mix("ls:0.5:ttft=0.5+p/4000,tpot=0.05 be:0.5:e2e=120")
    workload = share_prefixes(
        synthetic(200, 2.0, seed=7, cv=2.0), num_groups=4, num_tokens=512, block_tokens=512, seed=7
    )
    return assign_classes(workload, mix, seed=7)


def share_prefixes(
    workload: Workload, *, num_groups: int, num_tokens: int, block_tokens: int = 64, skew: float = 1.0, seed: int = 0
) -> Workload:
    """Prompts of the same group begin with the same num_tokens tokens (system prompts, few-shot examples).

    Groups are drawn with a Zipf law of exponent `skew`. At least one token of a prompt is its own.
    """
    weights = np.arange(1, num_groups + 1, dtype=float) ** -skew
    groups = seed_stream(seed, "prefixes").choice(num_groups, len(workload), p=weights / weights.sum())
    num_shared_ids = num_tokens // block_tokens
    counts = -(-workload.num_prompt.astype(np.int64) // block_tokens)
    starts = np.concatenate(([0], np.cumsum(counts))).astype(np.int64)
    position = np.arange(starts[-1]) - np.repeat(starts[:-1], counts)
    num_shared = np.minimum(num_shared_ids, (workload.num_prompt - 1) // block_tokens)
    is_shared = position < np.repeat(num_shared, counts)
    shared = np.repeat(groups, counts) * num_shared_ids + position
    own = num_groups * num_shared_ids + np.arange(starts[-1])
    return replace(workload, prefixes=Prefixes(np.where(is_shared, shared, own), starts, block_tokens))


Share: TypeAlias = float | tuple[float, ...]
"""Of a class in a mix; several: one for each of so many equal parts of the time in which requests arrive."""


def assign_classes(workload: Workload, mix: Iterable[tuple[RequestClass, Share]], seed: int = 0) -> Workload:
    """Give every request a class, drawn independently with these shares (they are normalized).

    Raises InvalidParameterError for shares that are not positive, and for classes with different numbers of them.
    """
    pairs = list(mix)
    if not pairs:
        raise InvalidParameterError("a mix of classes needs at least one class")
    names = [kind.name for kind, _ in pairs]
    if len(set(names)) < len(names):
        raise InvalidParameterError(f"a mix names a class twice: {', '.join(names)}")
    parts = _parts_of(pairs)
    # One uniform number per request: a larger share of one class moves as few requests as can be.
    drawn = seed_stream(seed, "classes").random(len(workload))
    at = workload.arrival - workload.arrival[:1]
    part = np.clip((at / (float(at.max(initial=0.0)) or 1.0) * len(parts)).astype(np.int64), 0, len(parts) - 1)
    ids = np.zeros(len(workload), np.int32)
    for number, shares in enumerate(parts):
        mine = part == number
        ids[mine] = np.searchsorted(np.cumsum(shares / shares.sum())[:-1], drawn[mine], side="right")
    classes = tuple(kind for kind, _ in pairs)
    return replace(workload, class_ids=ids, classes=classes, own_promises=None)


def _parts_of(pairs: Sequence[tuple[RequestClass, Share]]) -> list[F64]:
    """For each part of the time the shares of all classes; a class with one share has it in all of them."""
    most = max((len(share) for _, share in pairs if isinstance(share, tuple)), default=1)
    columns = []
    for kind, share in pairs:
        own = share if isinstance(share, tuple) else (share,) * most
        if len(own) != most:
            raise InvalidParameterError(
                f"a mix: class {kind.name!r} has {len(own)} shares and another one {most}; give each class one share, or as many"
            )
        for one in own:
            _check_positive(f"share of class {kind.name!r}", one)
        columns.append(own)
    return [np.array(shares) for shares in zip(*columns, strict=True)]


def classes_of(
    kinds: Sequence[tuple[str | None, SLO | None, bool, int, float | None]],
) -> tuple[tuple[RequestClass, ...], I32, Promises | None]:
    """Classes of requests that tell of themselves: (type_info, slo, is_latency_sensitive, priority, patience).

    A class is the requests that share all but the objective. Returns the classes in order of their first request, the class of each
    request, and what each is promised unless all of every class are promised the same.
    """
    numbers: dict[tuple[str | None, bool, int, float | None], int] = {}
    ids = np.array([numbers.setdefault((k[0], k[2], k[3], k[4]), len(numbers)) for k in kinds], np.int32)
    slos: list[set[SLO | None]] = [set() for _ in numbers]
    for number, kind in zip(ids.tolist(), kinds, strict=True):
        slos[number].add(kind[1])
    # Names tell classes of one type_info apart by what differs, and at last by a number.
    num_of = Counter(key[0] for key in numbers)
    classes = []
    names: set[str] = set()
    for (info, is_sensitive, priority, patience), promised in zip(numbers, slos, strict=True):
        name = info if info is not None else "all" if len(numbers) == 1 else "unlabelled"
        if num_of[info] > 1:
            name += ", latency sensitive" if is_sensitive else ""
            name += f", priority {priority}" if priority else ""
            name += f", patience {patience:g} s" if patience is not None else ""
        plain, again = name, 1
        while name in names:  # a request's type_info may read like that
            again += 1
            name = f"{plain} ({again})"
        names.add(name)
        slo = next(iter(promised)) if len(promised) == 1 else None
        carried = None if name == info or (info is None and name == "all") else info or ""
        classes.append(RequestClass(name, slo, is_sensitive, priority, patience, carried))
    own = None if all(len(promised) == 1 for promised in slos) else Promises.of(kind[1] for kind in kinds)
    return tuple(classes), ids, own


def assign_tenants(workload: Workload, shares: Sequence[float], seed: int = 0) -> Workload:
    """Give every request one of len(shares) tenants, named tenant-0 and so on."""
    for number, share in enumerate(shares):
        _check_positive(f"share of tenant {number}", share)
    weights = np.cumsum(np.array(shares) / sum(shares))
    ids = np.searchsorted(weights[:-1], seed_stream(seed, "tenants").random(len(workload)), side="right")
    return replace(workload, tenant_ids=ids.astype(np.int32), tenants=tuple(f"tenant-{i}" for i in range(len(shares))))


_TTFT = re.compile(r"(?P<fixed>[^+]+)(?:\+p/(?P<rate>.+))?")
MIX_KEYS = ("ttft", "tpot", "e2e", "priority", "patience", "sensitive")


def parse_mix(text: str) -> list[tuple[RequestClass, Share]]:
    """Classes as one writes them on a command line: name:share[:key=value,...], separated by blanks.

    `ls:0.5:ttft=0.5+p/4000,tpot=0.05 be:0.5:e2e=120` has half of the requests latency sensitive, with half a second and one
    for every 4000 prompt tokens until the first token. Keys: ttft, tpot, e2e and patience in seconds, priority, and
    sensitive (0 or 1; without it, a class that has a ttft or a tpot is).

    `ls:0.8/0.2 be:0.2/0.8` has another mix in the second half of the time than in the first; any number of parts will do.
    """
    found: list[tuple[RequestClass, Share]] = []
    for entry in text.split():
        name, _, rest = entry.partition(":")
        share, _, settings = rest.partition(":")
        values: dict[str, float] = {}
        per_prompt_token = 0.0
        for setting in filter(None, settings.split(",")):
            key, _, value = setting.partition("=")
            if key not in MIX_KEYS:
                raise InvalidParameterError(f"mix {entry!r}: {key!r} is not known{nearest_name(key, MIX_KEYS)}")
            matched = _TTFT.fullmatch(value) if key == "ttft" else None
            if matched is not None and matched["rate"] is not None:
                value = matched["fixed"]
                per_prompt_token = 1 / _number(entry, "ttft", matched["rate"])
            values[key] = _number(entry, key, value)
        promises = {key: values[key] for key in ("ttft", "tpot", "e2e") if key in values}
        slo = SLO(**promises, ttft_per_prompt_token=per_prompt_token) if promises else None
        kind = RequestClass(
            name,
            slo,
            is_latency_sensitive=bool(values.get("sensitive", "ttft" in values or "tpot" in values)),
            priority=int(values.get("priority", 0)),
            patience=values.get("patience"),
        )
        shares = tuple(_number(entry, "share", part) for part in share.split("/"))
        found.append((kind, shares if len(shares) > 1 else shares[0]))
    if not found:
        raise InvalidParameterError("a mix of classes needs at least one class: name:share[:key=value,...]")
    _parts_of(found)
    return found


def _number(entry: str, name: str, text: str) -> float:
    try:
        value = float(text)
    except ValueError:
        value = math.nan
    if not math.isfinite(value) or (name in ("share", "ttft") and value <= 0):
        raise InvalidParameterError(
            f"mix {entry!r}: {name}={text!r} must be a {'positive ' * (name != 'priority')}number"
        )
    return value
