"""`Autoscaler`: how many replicas a fleet should have. Pure: no clock, no I/O. The engine and the simulator run the same object.

It hears of each request that arrives, and a few times a minute or a second it sees the routers' views of the replicas. Their own
step times turn tokens into seconds of work. A replica does one second of work in a second, at the most decode rows with which
it still keeps the promises.

What arrives within some seconds has these seconds to be done, and its slack. A prompt has it until its first token is due, and an
answer for as long as answers take. So each second of the window needs the number of replicas that does the work of the worst
stretch which ends there. A fleet of n keeps the promises of the requests whose seconds need no more than n. Wanted is the least
n with which `target_attainment` of the window's requests have theirs kept.

More are wanted at once. A smaller number is wanted when the window has forgotten what needed more, by a margin, and one at a
time. The replicas that stay must be able to take the streams of the one that goes, and keep what is promised.
"""

from __future__ import annotations

import math
import sys
from collections import deque
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, fields, replace
from typing import Any, NamedTuple

import numpy as np

from actorllm.errors import ConfigError, nearest_name, shown
from actorllm.messages import F64
from actorllm.scheduling.router import ReplicaView, Routable, Seconds, StepSeconds
from actorllm.scheduling.window_quantile import WindowQuantile

UNKNOWN_OUTPUT, UNKNOWN_WEIGHT = 128.0, 16.0
"""Tokens of an answer, as long as none has ended; and of how many ended answers that counts as the mean."""
NUM_GROUPS = 128
"""Of more periods several count as one, where a step is told from a slope."""
MAX_ENDS = 4096.0
"""Of more answers, the older half counts half."""


@dataclass(frozen=True, slots=True)
class ScalingPolicy:
    """When the number changes. All of it is data: `autoscaling={"window_s": 60}` of an engine replaces single fields."""

    period_s: float = 1.0
    """Between two decisions, and the length of a bucket of arrivals."""
    window_s: float = 300.0
    """How long a burst is remembered: replicas that it needed are kept for so long."""
    utilization: float = 0.85
    """How much of a replica's time is planned with."""
    margin: float = 0.15
    """A smaller number has to suffice with so much to spare."""
    grow_after_s: float = 2.0
    """How long too much has to wait, before that alone asks for more replicas."""
    shrink_pause_s: float = 30.0
    """After each change, and at the beginning, until one replica less may be wanted."""
    lead_s: float = 20.0
    """How far ahead a demand that rises is looked for: what a start takes."""
    patience_s: float = 2.0
    """What a first token may take of requests without a promise."""

    def __post_init__(self) -> None:
        for field in fields(self):
            value = getattr(self, field.name)
            is_number = isinstance(value, int | float) and not isinstance(value, bool)
            if not is_number or not 0 <= value <= sys.float_info.max:
                raise ConfigError(f"autoscaling: {field.name}={shown(value)} must be a number, 0 or more")
        if not (0.01 <= self.period_s <= self.window_s <= 1e4 * self.period_s):
            raise ConfigError(
                f"autoscaling: period_s={self.period_s:g} must be from 0.01 to window_s={self.window_s:g}, and no less than a "
                f"ten-thousandth of it"
            )
        if not (0 < self.utilization <= 1 and self.margin < 1 and self.patience_s > 0):
            raise ConfigError(
                f"autoscaling: utilization={self.utilization:g} must be above 0 and at most 1, margin={self.margin:g} below 1, "
                f"and patience_s={self.patience_s:g} above 0"
            )

    @classmethod
    def of(cls, given: Mapping[str, Any] | None) -> ScalingPolicy:
        """The default one with these fields. Raises ConfigError, with the nearest name of an unknown one."""
        known = [field.name for field in fields(cls)]
        for name in given or {}:
            if name not in known:
                raise ConfigError(
                    f"autoscaling: {shown(name)} is none of {', '.join(known)}{nearest_name(str(name), known)}"
                )
        return replace(cls(), **dict(given or {}))


@dataclass(slots=True)
class Bucket:
    """What came in one period."""

    number: int
    num_sequences: int = 0
    num_prompt: int = 0
    """Tokens."""
    num_new: int = 0
    """Those of them that no cache had."""
    num_rows: int = 0
    """Sequences that had not ended at its end, on all replicas that took requests."""
    num_ready: int = 0
    """Those replicas."""


class WorkingPoint(NamedTuple):
    """The most that one replica can do at a time with the promises kept, of requests as they come."""

    num_rows: float
    prompt_s: float
    """What a new token of a prompt costs."""
    token_s: float
    """What a token of an answer costs."""
    step_s: float
    """What a step takes, which is the time between two tokens of a stream."""
    ttft_s: float
    tpot_s: float
    """What is promised to all but the strictest, of which there are fewer than may be failed. No less than a request takes that has
    a replica to itself: what no number of replicas keeps asks for none."""


class Autoscaler:
    """See the module docstring.

    Arguments:
        min_replicas, max_replicas: the bounds of what is wanted.
        target_attainment: the share of requests whose promises are to be kept.
        policy: when the number changes.
        num_replicas: how many there are; None: min_replicas.

    Raises:
        ConfigError: these are no bounds, or no share.
    """

    def __init__(
        self,
        min_replicas: int,
        max_replicas: int,
        target_attainment: float = 0.99,
        policy: ScalingPolicy | None = None,
        num_replicas: int | None = None,
    ) -> None:
        if not 1 <= min_replicas <= max_replicas:
            raise ConfigError(f"min_replicas={min_replicas} must be from 1 to max_replicas={max_replicas}")
        if not 0 < target_attainment < 1:
            raise ConfigError(
                f"target_attainment={target_attainment:g} must be a share of requests, above 0 and below 1"
            )
        self.min_replicas, self.max_replicas = min_replicas, max_replicas
        self.target_attainment = target_attainment
        self.policy = policy or ScalingPolicy()
        self.wanted = min(max(num_replicas or min_replicas, min_replicas), max_replicas)
        """The last decision."""
        self.needed = 0.0
        """How many replicas the target needs, before rounding and margins."""
        self.predicted_attainment = 1.0
        """The share of the window's requests whose promises the wanted number keeps."""
        self._buckets: deque[Bucket] = deque()
        self._ttfts, self._tpots = WindowQuantile(self.policy.window_s), WindowQuantile(self.policy.window_s)
        """What was promised to the requests of the window."""
        self._num_ends = self._num_output = self._num_running_tokens = 0.0
        self._late: deque[tuple[float, float]] = deque()
        self._changed_at = -math.inf
        self._complete_at = -math.inf
        """When all wanted replicas took requests last."""

    # What it hears

    def note(self, request: Routable, views: Iterable[ReplicaView], at: float) -> None:
        """A request arrived. views: of replicas that may have a part of its prompt in their caches."""
        bucket = self._bucket(at)
        found = max((view.find(request.block_hashes) * view.block_size for view in views if view.find), default=0)
        bucket.num_sequences += request.num_sequences
        bucket.num_prompt += request.num_prompt * request.num_sequences
        bucket.num_new += max(1, request.num_prompt - found)
        slo = request.slo
        ttft = tpot = math.inf
        if slo is not None:
            ttft, tpot = slo.ttft_limit(request.num_prompt), slo.tpot or math.inf
            if slo.e2e is not None:
                ttft = min(ttft, slo.e2e / 2)
                tpot = min(tpot, slo.e2e / 2 / max(1.0, self.mean_output))
        self._ttfts.note(ttft, at)
        self._tpots.note(tpot, at)

    def note_ends(self, num_sequences: int, num_tokens: int) -> None:
        """So many sequences have ended, with so many tokens in all."""
        if self._num_ends > MAX_ENDS:
            self._num_ends, self._num_output = self._num_ends / 2, self._num_output / 2
        self._num_ends += num_sequences
        self._num_output += num_tokens

    @property
    def mean_output(self) -> float:
        """Tokens of an answer."""
        # The first that end are the short ones. The tokens of those that run count too, as of lengths that are cut off.
        tokens = self._num_output + self._num_running_tokens + UNKNOWN_WEIGHT * UNKNOWN_OUTPUT
        return max(1.0, tokens / (self._num_ends + UNKNOWN_WEIGHT))

    def _bucket(self, at: float) -> Bucket:
        number = math.floor(at / self.policy.period_s)
        if not self._buckets or self._buckets[-1].number < number:
            self._buckets.append(Bucket(number))
            oldest = number - math.ceil(self.policy.window_s / self.policy.period_s)
            while self._buckets[0].number <= oldest:
                self._buckets.popleft()
        return self._buckets[-1]

    # What it decides

    def decide(self, views: Sequence[ReplicaView], at: float, *, keeps_all: bool = False) -> int:
        """How many replicas are wanted now. views: of the replicas that take requests. at: in seconds of their clock.

        keeps_all: the one with the highest number has what cannot move, so no smaller number is wanted.
        """
        newest = self._bucket(at)
        if self._changed_at == -math.inf:
            self._changed_at = self._complete_at = at
        if len(views) >= self.wanted:
            self._complete_at = at
        newest.num_rows, newest.num_ready = sum(view.load for view in views), len(views)
        num = max(1, sum(bucket.num_sequences for bucket in self._buckets))
        mean_prompt = sum(bucket.num_prompt for bucket in self._buckets) / num
        self._num_running_tokens = sum(max(0.0, view.num_context - view.num_running * mean_prompt) for view in views)
        point = self._working_point(views)
        if point is None:  # no replica knows its step times yet
            return self.wanted
        needs, weights = self._needs(point)
        self.needed = needed = max(quantile(needs, weights, self.target_attainment), self._ahead(needs))
        wanted = self._bounded(needed / self.policy.utilization)
        wanted = max(wanted, self._bounded(self._late_for(views, point, at)))
        if wanted > self.wanted:
            self._change(wanted, at)
        elif not keeps_all and self._may_shrink(needed, views, point, at):
            self._change(self.wanted - 1, at)
        within = weights[needs <= self.wanted + 1e-9].sum()
        self.predicted_attainment = float(within / weights.sum()) if weights.sum() else 1.0
        return self.wanted

    def _bounded(self, number: float) -> int:
        return math.ceil(min(max(number - 1e-9, self.min_replicas), self.max_replicas))

    def _change(self, wanted: int, at: float) -> None:
        self.wanted, self._changed_at = wanted, at
        self._late.clear()

    def set_wanted(self, number: int, at: float) -> None:
        """The application has set the number itself; decisions go on from there."""
        self._change(number, at)

    def _working_point(self, views: Sequence[ReplicaView]) -> WorkingPoint | None:
        known = [view for view in views if view.step_seconds is not None]
        if not known:
            return None
        view = known[0]
        step = view.step_seconds
        assert step is not None
        ttft_s, tpot_s = self._promised()
        # The mean request, and the mixed steps of a replica that has so many of them that as many end as arrive.
        num = max(1, sum(bucket.num_sequences for bucket in self._buckets))
        output = self.mean_output
        new_per_row = sum(bucket.num_new for bucket in self._buckets) / num / output
        context = sum(bucket.num_prompt for bucket in self._buckets) / num + output / 2

        def mixed(rows: float) -> float:
            return step(rows * new_per_row, rows, rows * context)

        most = min(float(view.max_num_seqs), view.max_num_batched_tokens / max(new_per_row, 1e-9))
        if view.num_free_blocks is not None:
            room = view.num_free_blocks * view.block_size + view.num_context
            most = min(most, max(1.0, room / max(1.0, context)))
        alone_s = step(0, 1, context)
        ttft_s, tpot_s = max(ttft_s, alone_s), max(tpot_s, alone_s)
        rows = most
        if mixed(most) > tpot_s:
            low, high = min(1.0, most), most  # the largest number whose steps are short enough, or one row
            while high - low > 0.5:
                middle = (low + high) / 2
                low, high = (middle, high) if mixed(middle) <= tpot_s else (low, middle)
            rows = low
        pure, whole = step(0, rows, rows * context), mixed(rows)
        prompt_s = max(0.0, (whole - pure) / (rows * new_per_row)) if new_per_row > 0 else 0.0
        ttft_s = max(ttft_s, alone_s + new_per_row * output * prompt_s)
        return WorkingPoint(rows, prompt_s, pure / rows, max(whole, 1e-9), ttft_s, tpot_s)

    def _promised(self) -> tuple[float, float]:
        """Times to the first token and between tokens that all but a share of the requests have as long or longer."""
        share = 1.0 - self.target_attainment
        ttft, tpot = self._ttfts.at(share, math.inf), self._tpots.at(share, math.inf)
        return (self.policy.patience_s if ttft == math.inf else ttft), tpot

    def _needs(self, point: WorkingPoint) -> tuple[F64, F64]:
        """By second of the window: how many replicas it needs, and for how many sequences."""
        first, last = self._buckets[0].number, self._buckets[-1].number
        columns = np.zeros((4, last - first + 1))
        for bucket in self._buckets:
            columns[:, bucket.number - first] = (
                bucket.num_new,
                bucket.num_sequences,
                bucket.num_rows,
                bucket.num_ready,
            )
        output, period_s = self.mean_output, self.policy.period_s
        prompts, answers, rows = columns[0] * point.prompt_s, columns[1] * output * point.token_s, columns[2]
        num_new = columns[0].sum() / max(1.0, columns[1].sum())
        slack_s = max(point.ttft_s - num_new * point.prompt_s - point.step_s, 0.1 * point.ttft_s)
        answer_s = output * point.step_s
        # What others sent, and answers longer than expected, show in the rows. Beyond all that there was, they are a queue.
        needs: F64 = np.minimum(rows / point.num_rows, columns[3])
        length = 1
        while length <= columns.shape[1]:
            stretch_s = length * period_s
            worst = stretch(prompts, length) / (stretch_s + slack_s) + stretch(answers, length) / (stretch_s + answer_s)
            needs = np.maximum(needs, worst)
            length *= 2
        weights: F64 = np.maximum(columns[1], rows * min(1.0, period_s / answer_s))
        return needs, weights

    def _ahead(self, needs: F64) -> float:
        """What is needed when a replica that is wanted now has started, if the demand rises by more than chance."""
        length = round(self.policy.lead_s / self.policy.period_s)
        if not 0 < 2 * length < needs.size:
            return 0.0
        newest = self._buckets[-1].number  # which has just begun
        counts = np.zeros(2 * length)
        for bucket in self._buckets:
            if 0 < (age := newest - bucket.number) <= 2 * length:
                counts[-age] = bucket.num_sequences
        before, now = float(counts[:length].sum()), float(counts[length:].sum())
        if now - before <= 2.0 * math.sqrt(now + before) or is_step(counts):
            return 0.0
        return float(needs[-1 - length : -1].mean()) * (1.0 + 1.5 * (now - before) / now)

    def _late_for(self, views: Sequence[ReplicaView], point: WorkingPoint, at: float) -> float:
        """How many replicas would compute all prompts that wait in time; the least of the last `grow_after_s`."""
        if len(views) < self.wanted:  # some start, for these
            self._late.clear()
            return 0.0
        waits = (Seconds.costs_s(view, 0)[0] for view in views if view.step_seconds and view.num_waiting_tokens)
        self._late.append((at, sum(waits) / point.ttft_s))
        first = at - self.policy.grow_after_s
        while len(self._late) > 1 and self._late[1][0] <= first:
            self._late.popleft()
        return min(late for _, late in self._late) if self._late[0][0] <= first else 0.0

    def _may_shrink(self, needed: float, views: Sequence[ReplicaView], point: WorkingPoint, at: float) -> bool:
        policy, fewer = self.policy, self.wanted - 1
        num_left = sum(view.number < fewer for view in views)
        # One that is missing for a moment has streams that are not seen. One that never starts must not keep the others.
        return (
            fewer >= self.min_replicas
            and (len(views) >= self.wanted or at - self._complete_at >= policy.shrink_pause_s)
            and at - self._changed_at >= policy.shrink_pause_s
            and needed <= num_left * policy.utilization * (1.0 - policy.margin)
            and survivors_keep(views, fewer, point.ttft_s, point.tpot_s)
        )


def survivors_keep(views: Sequence[ReplicaView], num_left: int, ttft_s: float, tpot_s: float) -> bool:
    """Whether the replicas with the first numbers can take the streams of the others, and keep the promises.

    Prompts are computed again. A replica that has done too few steps to know their times takes as long as another one.
    """
    kept = [view for view in views if view.number < num_left]
    gone = [view for view in views if view.number >= num_left]
    known = next((view.step_seconds for view in views if view.step_seconds is not None), None)
    if not kept or known is None:
        return False
    num_rows = sum(view.load for view in gone) / len(kept)
    num_context = sum(view.num_context for view in gone) / len(kept)
    num_tokens = num_context + sum(view.num_waiting_tokens for view in gone) / len(kept)
    for view in kept:  # each gets an even share of what the others have
        step: StepSeconds = view.step_seconds or known
        if view.load + num_rows > view.max_num_seqs:
            return False
        if view.num_free_blocks is not None and num_tokens > view.num_free_blocks * view.block_size:
            return False
        if step(0, view.load + num_rows, view.num_context + num_context) > tpot_s:
            return False
        if view.num_waiting_tokens or num_tokens:
            wait_s, _ = Seconds.costs_s(replace(view, step_seconds=step), math.ceil(num_tokens))
            if wait_s > ttft_s:
                return False
    return True


def is_step(values: F64) -> bool:
    """Whether one step explains the values better than a constant that becomes a slope, and so rises further."""
    length = -(-values.size // NUM_GROUPS)
    groups = values[values.size % length :].reshape(-1, length).mean(axis=1)
    number, places = groups.size, np.arange(groups.size)
    # The slope has lasted for a quarter at least. A shorter one would be what a step of a moment ago looks like.
    steps = [(places >= first).astype(float) for first in range(1, number)]
    slopes = [np.maximum(0.0, places - first) for first in range(number - number // 4)]

    def misfit(shapes: list[F64]) -> float:
        rest = groups - groups.mean()
        explained = [float(rest @ shape) ** 2 / float(((shape - shape.mean()) ** 2).sum()) for shape in shapes]
        return float(rest @ rest) - max(explained)

    return number < 4 or misfit(steps) <= misfit(slopes)


def stretch(values: F64, length: int) -> F64:
    """The sum of so many values up to each one."""
    sums = np.concatenate((np.zeros(length), np.cumsum(values)))
    found: F64 = sums[length:] - sums[:-length]
    return found


def quantile(values: F64, weights: F64, share: float) -> float:
    """The least value that is no less than those of this share of the weight; 0.0 without weight."""
    total = float(weights.sum())
    if total <= 0.0:
        return 0.0
    order = np.argsort(values)
    reached = np.cumsum(weights[order])
    return float(values[order][min(int(np.searchsorted(reached, share * total - 1e-9)), values.size - 1)])
