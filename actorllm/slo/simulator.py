"""The engine in virtual time: the real scheduler, policy and KV tables around workers that only take time.

    run = simulate(workload, EngineShape(num_blocks=8192), cost_model.preset("a100-llama-3-8b"), policy="fcfs", seed=1)
    print(run.evaluate().summary["actorllm_goodput_deadline"])

A `SimulatedReplica` turns the same loop as `SchedulerActor.turn`: take what has arrived, plan while there is room, apply a result.
So up to `depth` steps are in flight, and a step is planned while the one before it runs. A request that is aborted has
tokens computed in vain. Runs of decode steps in which nothing happens are made by one `Scheduler.advance`. Their times
and everything after them are the same to the last bit as step by step (`skip=False`).

Replicas do not know of each other. Requests reach them in the order of arrival, by a `Router` that sees views of them. The
same arguments give the same run: residuals of the step-time model and routers draw from streams of the seed.

`rerun` is the other way round. A recording of a live scheduler (`scheduling.telemetry.recording`) gives the times of
everything, and the replica's own loop must come to the same plans.
"""

from __future__ import annotations

import bisect
import heapq
import math
from array import array
from collections import deque
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from itertools import pairwise
from typing import Any, Protocol, TypeVar

import numpy as np
from numpy.typing import NDArray

from actorllm.config import EngineConfig
from actorllm.errors import ConfigError
from actorllm.kvcache.block_hash_table import BlockHashTable, num_words
from actorllm.messages import F64, I32, I64, NO_I32, NO_U8, U8, StepFailed, StepPlan, StepResult, Submit
from actorllm.scheduling.admission_policy import AdmissionGate, AdmissionPolicy, load_admission
from actorllm.scheduling.autoscaler import Autoscaler
from actorllm.scheduling.batch import Batch, Rows
from actorllm.scheduling.cost_model import StepDetail, StepModel
from actorllm.scheduling.events import End
from actorllm.scheduling.ledger import StepRecord
from actorllm.scheduling.loading import load_policy
from actorllm.scheduling.policy import PlanPolicy
from actorllm.scheduling.policy_monitor import STARVED_S, WakeTimer, patience
from actorllm.scheduling.role_router import RoleRouter
from actorllm.scheduling.router import VIEW_AGE_S, ReplicaView, Routable, Router, StepSeconds, make_router
from actorllm.scheduling.scheduler import Scheduler
from actorllm.scheduling.sequence import Key
from actorllm.scheduling.sequence import Sequence as Request
from actorllm.scheduling.step_time import features_of
from actorllm.scheduling.telemetry.recording import Entry
from actorllm.scheduling.telemetry.statistics import SchedulerStatistics
from actorllm.slo.closed_loop import ClosedLoop, Contexts
from actorllm.slo.delays import ClientDelays, SubmitLine, check_deliver
from actorllm.slo.failures import FailureDriver, FailureNote, Failures, check_failures
from actorllm.slo.metrics import RunMetrics, evaluate, told_of_cut
from actorllm.slo.policy_cost import CostedPolicy, PolicyCost
from actorllm.slo.rescheduling import Move, Rescheduler, Rescheduling
from actorllm.slo.residual_memory import SlowUniforms
from actorllm.slo.roles import RoleMoves, SimulatedRoles, SimulatedTable, TransferShape, hashes_of_its_own
from actorllm.slo.scaling import SimulatedScaling
from actorllm.slo.stages import StageClocks
from actorllm.slo.tiers import SimulatedTiers, TierMoves, TierShape
from actorllm.slo.timeline import ABORTED, FAILED, FINISHED, UNFINISHED, RunTimeline, Spans
from actorllm.slo.unattainable import unattainable
from actorllm.slo.workload import Workload, seed_stream
from actorllm.types.drafter import Ranges
from actorllm.types.objective import SLO
from actorllm.types.roles import Role, read_roles

T = TypeVar("T")

VOCAB_SIZE = 1 << 16
END_OF_TEXT = VOCAB_SIZE - 1
"""The last token of a request that ends before its `max_tokens`."""
MAX_IDLE_WAKES = 100_000
"""A policy that is woken so often in a row without planning a step has stalled."""

MAX_SKIP = 4096
"""Decode steps that are made at once at most."""
MAX_FORESEEN = 32
"""Decode steps that a replica may be behind what is looked at."""


@dataclass(frozen=True, slots=True)
class SimulatedDrafts:
    """Drafts of simulated requests: how many a step checks, and how many of them are right."""

    ranges: Ranges
    """As `num_speculative_tokens_per_batch_size` of the engine."""
    acceptance: tuple[float, ...]
    """By position: the share of rows whose draft is right there, among those whose drafts before it are; the last one counts for
    all further positions."""

    def __post_init__(self) -> None:
        if not self.acceptance or not all(0 <= share <= 1 for share in self.acceptance):
            raise ConfigError(
                f"acceptance={self.acceptance!r:.80} must be shares from 0 to 1, by position, at least one"
            )

    @property
    def most(self) -> int:
        """Drafts of a row in a step."""
        return max((drafts for _, _, drafts in self.ranges), default=0)

    @classmethod
    def of(cls, ranges: Ranges, num_drafts: int, num_accepted_per_pos: Sequence[int]) -> SimulatedDrafts:
        """As an engine was seen to do it (`SpeculationStatistics`): num_drafts, and num_accepted_tokens_per_pos."""
        reached = [num_drafts, *num_accepted_per_pos]
        shares = [right / before for before, right in pairwise(reached) if before]
        return cls(ranges, tuple(shares) or (0.0,))

    def draw(self, rng: np.random.Generator, num_rows: int, num_drafts: int) -> I32:
        """How many drafts of each row are right."""
        shares = [self.acceptance[min(i, len(self.acceptance) - 1)] for i in range(num_drafts)]
        is_right = rng.random((num_rows, num_drafts)) < np.array(shares)
        found: I32 = np.logical_and.accumulate(is_right, axis=1).sum(axis=1).astype(np.int32)
        return found


@dataclass(frozen=True, slots=True)
class EngineShape:
    """What of an engine's configuration its scheduler depends on; every replica has its own of it."""

    num_blocks: int
    block_size: int = 16
    max_num_seqs: int = 256
    max_num_batched_tokens: int = 2048
    max_model_len: int = 32_768
    depth: int = 2
    prefill_chunk: int | None = None
    """At most this many tokens of one prompt in a step."""
    max_num_partial_prefills: int = 1
    watermark: float = 0.0
    enable_prefix_caching: bool = True
    """Without effect for a workload in which no two prompts begin alike."""
    admission: str | None = None
    """The admission policy, as `admission_policy=` of the engine."""
    drafts: SimulatedDrafts | None = None
    """How many drafts steps check, and how many are right; None: there are none."""
    stages: tuple[float, ...] = ()
    """Of a pipeline, the share of a step's seconds that each stage takes (`slo.stages`); none: there is one stage."""
    hop_s: float = 0.0
    """What the hidden states of a step take from one stage to the next."""
    window: int | None = None
    """Tokens that a token sees in the layers of a second KV group (`types.kv_groups`); None: there is one group."""
    snapshots: int = 0
    """States of recurrent layers that are kept behind prefixes (`scheduling.snapshots`); 0: no layer is recurrent."""
    tiers: tuple[TierShape, ...] = ()
    """Where KV is kept besides (`slo.tiers`), the fastest first. Without effect where prefixes are not cached."""

    @classmethod
    def of(cls, config: EngineConfig) -> EngineShape:
        """That of a live engine, without its KV tiers. Its KV blocks must be known, which they are once it has started."""
        if config.cache.num_blocks is None:
            raise ConfigError("the engine's number of KV blocks is not known yet: start it, or give num_blocks")
        return cls(
            config.cache.num_blocks,
            config.cache.block_size,
            config.scheduler.max_num_seqs,
            config.scheduler.max_num_batched_tokens,
            config.model.max_model_len,
            config.scheduler.depth,
            config.scheduler.long_prefill_token_threshold or None,
            config.scheduler.max_num_partial_prefills,
            config.scheduler.watermark,
            config.cache.enable_prefix_caching,
            config.scheduler.admission,
            stages=tuple(layers / sum(config.stages) for layers in config.stages),
            window=config.cache.window,
            snapshots=config.cache.snapshots or 0,
        )

    def scheduler_arguments(self) -> dict[str, Any]:
        """Of `Scheduler`, but for the policy."""
        return {
            "num_blocks": self.num_blocks,
            "block_size": self.block_size,
            "max_num_seqs": self.max_num_seqs,
            "max_num_batched_tokens": self.max_num_batched_tokens,
            "max_model_len": self.max_model_len,
            "vocab_size": VOCAB_SIZE,
            "eos_token_ids": (),
            "depth": self.depth,
            "prefill_chunk": self.prefill_chunk,
            "enable_prefix_caching": self.enable_prefix_caching,
            "max_num_partial_prefills": self.max_num_partial_prefills,
            "watermark": self.watermark,
            "num_lookahead_tokens": 0 if self.drafts is None else self.drafts.most,
            "draft_ranges": () if self.drafts is None else self.drafts.ranges,
            "num_lanes": len(self.stages) or 1,
            **({} if self.window is None else {"window": self.window}),
            **({"snapshots": self.snapshots} if self.snapshots else {}),
        }

    def scheduler(
        self,
        policy: PlanPolicy,
        *,
        has_plans: bool = True,
        tiers: SimulatedTiers | None = None,
        lends: SimulatedTable | None = None,
    ) -> Scheduler:
        """For simulated requests: they end by their length, so that token ids and what ends a text do not matter.

        has_plans: False: the simulation does not look at its plans, which makes it faster. tiers: of its replica. lends:
        where others see what they may copy of it.
        """
        is_simulated = not has_plans and tiers is None and lends is None
        return Scheduler(
            policy=policy, is_simulated=is_simulated, tiers=tiers, lends=lends, **self.scheduler_arguments()
        )


# Workers -----------------------------------------------------------------------------------------------------------------


class Worker(Protocol):
    """What a replica sends its steps to: it says when which result is there."""

    next_result_at: float
    """When the oldest step in flight is done; infinity when none is in flight."""

    def launch(self, record: StepRecord, scheduler: Scheduler, now: float) -> None: ...

    def pop(self) -> StepResult | StepFailed:
        """The result of the oldest step in flight."""
        ...

    def lose(self) -> None:
        """What is in flight has no result."""
        ...

    def turn_after(self, at: float) -> float:
        """When the scheduler gets to plan after something happened at this time."""
        ...

    def skip(self, scheduler: Scheduler, now: float, horizon: float) -> list[float]:
        """Advance the scheduler over steps of which nothing but decoding is to be told; the ends of them.

        All of them lie before the horizon. Empty: the next step is to be planned.
        """
        ...

    def foresee(self, scheduler: Scheduler, now: float) -> tuple[list[float], list[int]]:
        """As `skip`, which is not done yet: when the next steps end in which nothing happens but decoding, those in flight first,
        and how many blocks the first 0, 1 ... of those planned from now on take. Empty: the next step is to be planned."""
        ...


def output_id(number: int) -> int:
    """The id of all tokens that a request puts out; number: of the request, in the order of their arrival."""
    return number * 40_503 & ((VOCAB_SIZE >> 1) - 1)


class ModelledWorker:
    """Steps take what a step-time model says, times a residual that is drawn for each step in order."""

    def __init__(
        self,
        model: StepModel,
        rng: np.random.Generator,
        *,
        has_tokens: bool,
        ends: I64 | None = None,
        drafts: SimulatedDrafts | None = None,
        draft_rng: np.random.Generator | None = None,
        stages: StageClocks | None = None,
    ) -> None:
        """ends: by rid, with how many tokens a request is at its end; None: at its limit. drafts: of decode rows, drawn by
        draft_rng. stages: of a pipeline; None: there is one."""
        self.stages = stages
        self._drafts, self._draft_rng = drafts, draft_rng
        self._right: dict[int, tuple[I32, int]] = {}
        """By step in flight with drafts: how many are right of each decode row, and how many each has."""
        self._batch: Batch | None = None
        self.next_result_at = math.inf
        self._model = model
        self._seconds_of: Callable[[StepDetail], float] | None = getattr(model, "seconds_of", None)
        self._gap_s = model.gap_s
        self._launch_s = model.launch_s
        self._in_flight: deque[tuple[int, Rows, float, float, Any]] = (
            deque()
        )  # step, rows, start, end, rows at their end
        self._free_at = -math.inf
        self._residuals = np.array(model.residuals) if model.residuals else None
        memory = getattr(model, "residual_memory", 0.0)
        self._uniforms = rng.random if not memory else SlowUniforms(rng, memory).random
        self._factors: list[float] = []
        self._has_tokens = has_tokens
        self._no_tokens: I32 = NO_I32
        # Of the newest step, if it was one of nothing but decode rows:
        self._rows: Rows | None = None
        self._context = 0
        self._left = 0
        """How many tokens the row that is closest to its end can still be given."""
        self._tokens_of: Rows | None = None
        self._ids: I32 = NO_I32
        self._skipped_s: list[float] = []
        """What the steps take that were skipped last, and perhaps some more."""
        self._ends = ends
        self._ends_of: Rows | None = None
        self._row_ends: I64 = np.zeros(0, np.int64)

    def _ends_by_row(self, rows: Rows) -> I64:
        if self._ends is None:
            return rows.limits.astype(np.int64)
        if self._ends_of is not rows:
            self._ends_of = rows
            self._row_ends = self._ends[np.fromiter((s.key[1] for s in rows.sequences), np.intp, len(rows))]
        return self._row_ends

    def launch(self, record: StepRecord, scheduler: Scheduler, now: float) -> None:
        rows, d = record.rows, record.num_decode
        computed = scheduler.batch.num_computed
        before = pairs = 0
        if not record.prefills:
            if rows is self._rows:
                self._context += d
                self._left -= 1
            else:
                reached = computed[rows.index]
                ends = rows.limits if self._ends is None else self._ends_by_row(rows)
                self._rows, self._context = rows, int(np.add.reduce(reached))
                self._left = int(np.minimum.reduce(ends - reached))
            context = self._context
        else:
            self._rows = None
            _, _, context, before, pairs = features_of(record, scheduler)
        num_checked, self._batch = 0, scheduler.batch
        if self._drafts is not None and self._draft_rng is not None and record.max_drafts and d:
            num_checked = d * record.max_drafts  # each takes what a decode row does
            right = self._drafts.draw(self._draft_rng, d, record.max_drafts)
            self._right[record.step] = right, record.max_drafts
        if self._seconds_of is None:
            took = self._model.seconds(record.num_tokens - d, d + num_checked, context, before, pairs)
        else:
            longest = int(computed[rows.index[:d]].max(initial=0))
            p = record.num_tokens - d
            took = self._seconds_of(
                StepDetail(p, d + num_checked, context, before, pairs, len(record.prefills), longest)
            )
        if self._residuals is not None:
            took *= self._draw(1)[0]
            del self._factors[:1]
        if self.stages is None:
            start = max(now + self._launch_s, self._free_at + self._gap_s)
            self._free_at = start + took
        else:
            start, self._free_at = self.stages.place(now + self._launch_s, took)
        stops = None
        if self._ends is not None:
            stops = np.flatnonzero(computed[rows.index] + 1 >= self._ends_by_row(rows))
        self._in_flight.append((record.step, rows, start, self._free_at, stops))
        if len(self._in_flight) == 1:
            self.next_result_at = self._free_at

    def _draw(self, num: int) -> list[float]:
        """The next residuals; the caller deletes those that it uses from `_factors`."""
        assert self._residuals is not None
        while len(self._factors) < num:
            at = self._uniforms(1024) * (self._residuals.size - 1)
            self._factors += np.interp(at, np.arange(self._residuals.size), self._residuals).tolist()
        return self._factors

    def pop(self) -> StepResult:
        step, rows, start, end, stops = self._in_flight.popleft()
        self.next_result_at = self._in_flight[0][3] if self._in_flight else math.inf
        tokens = self._tokens(rows)
        if self._drafts is not None:  # where a row stands is known only now
            return self._with_drafts(StepResult(step=step, tokens=tokens, started=start, ended=end), rows)
        if stops is not None and stops.size:
            tokens = tokens.copy()
            tokens[stops] = END_OF_TEXT
        return StepResult(step=step, tokens=tokens, started=start, ended=end)

    def _with_drafts(self, result: StepResult, rows: Rows) -> StepResult:
        """The result with the tokens of right drafts."""
        right, num_drafts = self._right.pop(result.step, (NO_I32, 0))
        counts = np.ones(len(rows), np.int32)
        counts[: right.size] += right
        drafted = np.zeros(len(rows), np.int32)
        drafted[: right.size] = num_drafts
        tokens = np.repeat(result.tokens, counts)
        if self._ends is not None and self._batch is not None:
            known = self._batch.num_known[rows.index]
            moved = np.flatnonzero(self._batch.generation[rows.index] != rows.generations)
            known[moved] = [sequence.known.size for sequence in rows.sequences[moved]]
            left = np.maximum(self._ends_by_row(rows) - known, 1)
            is_end = counts >= left
            tokens[(np.cumsum(counts) - counts + left - 1)[is_end]] = END_OF_TEXT
        if not right.size:
            return replace(result, tokens=tokens)
        return replace(result, tokens=tokens, counts=counts, num_drafted=drafted)

    def _tokens(self, rows: Rows) -> I32:
        """Ids of sampled tokens: any will do, unless requests may find the KV of each other's output."""
        num = len(rows)
        if not self._has_tokens:
            if self._no_tokens.size < num:
                self._no_tokens = np.zeros(2 * num, np.int32)
            return self._no_tokens[:num]
        if self._tokens_of is not rows:
            self._tokens_of = rows
            self._ids = np.array([output_id(s.key[1]) for s in rows.sequences.tolist()], np.int32)
        return self._ids

    def lose(self) -> None:
        """What is in flight is lost, and the next step starts on an idle worker."""
        self._in_flight.clear()
        self._right.clear()
        self._rows = None
        self._free_at = -math.inf
        self.next_result_at = math.inf

    def turn_after(self, at: float) -> float:
        return at

    def _may_skip(self, scheduler: Scheduler) -> bool:
        rows = self._rows
        if self._seconds_of is not None:
            return False  # the longest row is asked for in every step
        if rows is None or self._left <= 3 or len(self._in_flight) != scheduler.ledger.depth - 1:
            return False
        return not (scheduler.num_waiting or scheduler.prefilling or scheduler.batch.rows() is not rows)

    def foresee(self, scheduler: Scheduler, now: float) -> tuple[list[float], list[int]]:
        if not self._may_skip(scheduler) or self._rows is None or scheduler.steady_rows() is not self._rows:
            return [], []
        most, d = min(self._left - 2, MAX_FORESEEN), len(self._rows)
        blocks, kv = scheduler.blocks_of_steps(most), scheduler.kv
        num_free = kv.num_free  # which also gives back what slots were emptied of
        if blocks[-1] > (num_free if kv.index is None else kv.pool.num_unkept):
            return [], []  # beyond these, prefixes are evicted, which views tell of
        seconds = self._model.decode_run(d, self._context + d, most).tolist()
        if self._residuals is not None:
            seconds = [s * f for s, f in zip(seconds, self._draw(most), strict=False)]
        ends = [end for _, _, _, end, _ in self._in_flight]
        planned, free_at = now, self._free_at
        for number, second in enumerate(seconds):
            free_at = max(planned + self._launch_s, free_at + self._gap_s) + second
            ends.append(free_at)
            planned = ends[number]
        return ends[:most], blocks

    def skip(self, scheduler: Scheduler, now: float, horizon: float) -> list[float]:
        rows, flying = self._rows, len(self._in_flight)
        if rows is None or (flying and self.next_result_at >= horizon) or not self._may_skip(scheduler):
            return []
        starts = [start for _, _, start, _, _ in self._in_flight]
        ends = [end for _, _, _, end, _ in self._in_flight]
        most = min(self._left - 2, MAX_SKIP)
        d = len(rows)
        if horizon < math.inf:
            typical = self._model.seconds(0, d, self._context + d) + self._gap_s
            most = min(most, int((horizon - now) / typical * 1.2) + 3)
        took = self._model.decode_run(d, self._context + d, most)
        seconds = took.tolist()
        if self._residuals is not None:
            factors = self._draw(most)
            seconds = [s * f for s, f in zip(seconds, factors, strict=False)]
        planned, free_at, launch_s, gap_s = now, self._free_at, self._launch_s, self._gap_s
        num = 0
        for second in seconds:  # one more step is planned whenever one is done
            start = max(planned + launch_s, free_at + gap_s)
            free_at = start + second
            starts.append(start)
            ends.append(free_at)
            if ends[num] >= horizon:
                break
            planned = ends[num]
            num += 1
        if num < 2:
            return []
        done = scheduler.advance(num, ends[num - 1], self._tokens(rows) if self._has_tokens else None)
        if not done:
            return []
        self._skipped_s = seconds
        del self._factors[:done]
        self._context += d * done
        self._left -= done
        self._in_flight = deque(
            (step + done, rows, starts[done + i], ends[done + i], None) for i, (step, *_) in enumerate(self._in_flight)
        )
        self._free_at = ends[done + flying - 1]
        self.next_result_at = self._in_flight[0][3] if flying else math.inf
        return ends[:done]


class MeteredWorker(ModelledWorker):
    """Also adds up how long it computed."""

    busy_s = 0.0

    def launch(self, record: StepRecord, scheduler: Scheduler, now: float) -> None:
        super().launch(record, scheduler, now)
        _, _, start, end, _ = self._in_flight[-1]
        self.busy_s += end - start

    def skip(self, scheduler: Scheduler, now: float, horizon: float) -> list[float]:
        ends = super().skip(scheduler, now, horizon)
        self.busy_s += math.fsum(self._skipped_s[: len(ends)])
        return ends


class WaitingWorker(MeteredWorker):
    """Also waits for a policy that takes time to decide (`slo.policy_cost`)."""

    policy: CostedPolicy
    """That of its scheduler."""
    _decided_at = -math.inf

    def launch(self, record: StepRecord, scheduler: Scheduler, now: float) -> None:
        self._decided_at = max(now, self._decided_at) + self.policy.take()
        super().launch(record, scheduler, self._decided_at)

    def turn_after(self, at: float) -> float:
        return max(at, self._decided_at)

    def skip(self, scheduler: Scheduler, now: float, horizon: float) -> list[float]:
        return []  # its policy is asked for every step

    def foresee(self, scheduler: Scheduler, now: float) -> tuple[list[float], list[int]]:
        return [], []


class NoWorker:
    """In the place of workers that are started again: nothing is planned meanwhile."""

    next_result_at = math.inf

    def launch(self, record: StepRecord, scheduler: Scheduler, now: float) -> None:
        raise AssertionError("a step was planned without a worker")

    def pop(self) -> StepResult:
        raise AssertionError("there is no step in flight")

    def lose(self) -> None: ...

    def turn_after(self, at: float) -> float:
        return math.inf

    def skip(self, scheduler: Scheduler, now: float, horizon: float) -> list[float]:
        return []

    def foresee(self, scheduler: Scheduler, now: float) -> tuple[list[float], list[int]]:
        return [], []


class ScriptedWorker:
    """Results and times as a recording has them."""

    def __init__(self, results: dict[int, tuple[float, StepResult | StepFailed]], turns: Sequence[float]) -> None:
        self.next_result_at = math.inf
        self._results = results
        self._turns = turns
        self._in_flight: deque[int] = deque()

    def launch(self, record: StepRecord, scheduler: Scheduler, now: float) -> None:
        self._in_flight.append(record.step)
        self._look()

    def _look(self) -> None:
        """A step without a result was in flight when the recording ended."""
        at = self._results.get(self._in_flight[0], (math.inf, None))[0] if self._in_flight else math.inf
        self.next_result_at = at

    def lose(self) -> None:
        self._in_flight.clear()
        self._look()

    def pop(self) -> StepResult | StepFailed:
        _, result = self._results[self._in_flight.popleft()]
        if isinstance(result, StepFailed):  # the steps behind it are void, and may be launched again
            self._in_flight.clear()
        self._look()
        return result

    def turn_after(self, at: float) -> float:
        number = bisect.bisect_left(self._turns, at)
        return self._turns[number] if number < len(self._turns) else math.inf

    def skip(self, scheduler: Scheduler, now: float, horizon: float) -> list[float]:
        return []

    def foresee(self, scheduler: Scheduler, now: float) -> tuple[list[float], list[int]]:
        return [], []


# A replica ---------------------------------------------------------------------------------------------------------------


class Aside(Protocol):
    """What happens at a replica beside its steps."""

    @property
    def next_at(self) -> float:
        """When something happens next."""
        ...

    @property
    def next_deadline(self) -> float:
        """When the scheduler is to look again at the latest."""
        ...

    def before_plan(self, now: float) -> None: ...

    def happen(self) -> float:
        """Let happen what is next. Returns when it does."""
        ...


class SimulatedReplica:
    """The loop of `SchedulerActor` in virtual time. `run_until` does everything that happens before a time."""

    def __init__(
        self,
        scheduler: Scheduler,
        worker: Worker,
        *,
        number: int = 0,
        on_ends: Callable[[int, Iterable[End]], None] | None = None,
        on_plan: Callable[[StepPlan], None] | None = None,
        skip: bool = True,
        step_seconds: StepSeconds | None = None,
    ) -> None:
        self.number = number
        self.role: Role | None = None
        """What it is for; None: everything."""
        self._step_seconds = step_seconds
        self._hashes: BlockHashTable | None = None
        self.scheduler = scheduler
        self.tokens = TokenLog()
        self.num_steps_skipped = 0
        self.is_stalled = False
        self.horizon = math.inf
        """`run_until` stops here at the latest; what is told of ends may bring it forward."""
        self._worker = worker
        self._lost_worker: Worker | None = None
        self.aside: Aside | None = None
        """None: nothing happens beside its steps."""
        self.on_ends = on_ends
        self._on_plan = on_plan
        self._can_skip = skip and on_plan is None
        self._turn_at = math.inf
        self._timer_at = math.inf
        self._timer = WakeTimer()
        self.complaint: str | None = None
        """What is wrong with the timers of its policy."""
        self._num_idle_wakes = 0
        self._aborts: list[tuple[float, Key]] = []
        self._finishes: dict[int, list[tuple[Key, Any, Any]]] = {}
        self._num_happened = 0
        """Changes of its scheduler: while there is none, its load stays what it is."""
        self._load_of, self._load = -1, (0, 0, 0, 0, 0)
        self._foreseen_of = -1
        self._foreseen: tuple[list[float], list[int]] = [], []
        """Of its worker, after so many changes."""

    # What reaches it

    def submit(self, frontend: int, submit: Submit, now: float) -> None:
        """A request arrives. Whatever happens before `now` has been run."""
        end = self.scheduler.submit(frontend, submit, now)
        if end is not None:
            self._tell([end])
        self._happened(now)

    def abort(self, keys: list[Key], now: float) -> None:
        self._tell(self.scheduler.abort(keys, now))
        self._happened(now)

    def unblock(self, key: Key, error: str | None, now: float, adapter_slot: int = 0) -> None:
        end = self.scheduler.unblock(key, error, now, adapter_slot)
        if end is not None:
            self._tell([end])
        self._happened(now)

    def expire(self, now: float) -> None:
        """Requests whose deadline has passed end."""
        self._tell(self.scheduler.expire(now))
        self._happened(now)

    def give_up_policy(self, reason: str, now: float) -> None:
        """It stalls, and is replaced."""
        self.scheduler.give_up_policy(reason, now)
        self._happened(now)

    def change_policy(self, policy: str, admission: str | None, now: float) -> None:
        """Others decide from now on. No step is in flight."""
        self.scheduler.change_policy(policy, admission, now)
        self._happened(now)

    def lose_workers(self, error: str, now: float, *, is_scheduler_lost: bool = False) -> None:
        """They are gone with their KV, until `workers_are_back`. is_scheduler_lost: with what this scheduler knew as well."""
        self._worker.lose()
        self._num_happened += 1
        self._lost_worker, self._worker = self._worker, NoWorker()
        self._turn_at = self._timer_at = math.inf
        if not is_scheduler_lost:
            self._tell(self.scheduler.lose_workers(error, now))

    def workers_are_back(self, now: float, scheduler: Scheduler | None = None) -> None:
        """scheduler: one that takes the place of another, with no request; None: it stays."""
        assert self._lost_worker is not None
        self._worker, self._lost_worker = self._lost_worker, None
        if scheduler is not None:
            self.scheduler = scheduler
            if self._hashes is not None:
                self.show_cache()
        self._happened(now)

    def take_out(self, key: Key, now: float) -> None:
        """A request leaves for another replica: for its client it does not end."""
        self.scheduler.abort([key], now)
        self._happened(now)

    def aborts_of(self, key: Key) -> list[float]:
        """When the client of this request gives up."""
        return [at for at, other in self._aborts if other == key]

    def abort_at(self, at: float, key: Key) -> None:
        """The request's client will give up then, if it is not done by then."""
        heapq.heappush(self._aborts, (at, key))

    def finish_after(self, step: int, stops: list[tuple[Key, Any, Any]]) -> None:
        """What the text layer found in the result of a step (of a recording)."""
        self._finishes[step] = stops

    def view(self, now: float) -> ReplicaView:
        """What a router may know of it, as of now; everything before now has been run."""
        view = ReplicaView(
            self.number,
            block_size=self.scheduler.kv.block_size,
            max_num_batched_tokens=self.scheduler.limits.max_tokens,
            max_num_seqs=self.scheduler.limits.max_seqs,
            step_seconds=self._step_seconds,
            role=self.role,
        )
        self.refresh(view, now)
        return view

    def refresh(self, view: ReplicaView, now: float) -> None:
        """Bring a view of it up to date."""
        if self._load_of != self._num_happened or self.aside is not None:  # others may take blocks of a lender
            self._load_of, self._load = self._num_happened, self._count_load()
        view.num_running, view.num_waiting, view.num_waiting_tokens, context, num_free = self._load
        if self._turn_at < now and self._foreseen_of == self._num_happened:  # it is behind, and only decoded since
            ends, blocks = self._foreseen
            num_planned = 1 + bisect.bisect_left(ends, now)
            context += num_planned * view.num_running
            num_free -= blocks[num_planned]
        view.num_context, view.num_free_blocks = context, num_free
        view.find = None if self._hashes is None else self._hashes.find
        view.seen = now

    def _count_load(self) -> tuple[int, int, int, int, int]:
        """Sequences that run and that wait, prompt tokens to be computed, context of those that run, and free blocks."""
        scheduler, kv, batch = self.scheduler, self.scheduler.kv, self.scheduler.batch
        num_waiting = scheduler.num_waiting
        num_tokens = sum(sequence.submit.prompt.size for sequence in scheduler.waiting())
        slots = kv.num_blocks.nonzero()[0]  # whatever has a slot has blocks
        computed = batch.num_computed[slots]
        left = batch.num_prompt[slots] - computed
        num_running, context = slots.size, int(np.add.reduce(computed))
        waits = left > 0
        if num_prefilling := int(np.count_nonzero(waits)):
            num_running -= num_prefilling
            num_waiting += num_prefilling
            num_tokens += int(left[waits].sum())
            context -= int(computed[waits].sum())
        return num_running, num_waiting, num_tokens, context, kv.num_free

    def show_cache(self) -> None:
        """From here on views tell what the prefix cache has, as that of a live replica does."""
        kv = self.scheduler.kv
        if kv.index is not None:
            words = bytearray(8 * num_words(2 * kv.pool.num_blocks))
            self._hashes = kv.index.observer = BlockHashTable(memoryview(words).cast("Q"))
            self._hashes.begin(kv.pool.num_blocks)

    # The loop

    def _happened(self, now: float) -> None:
        self._num_happened += 1
        if self._turn_at == math.inf:
            self._turn_at = self._worker.turn_after(now)

    def run_until(self, until: float, *, for_views: bool = False) -> None:
        """Everything that happens before this time. for_views: the caller only looks at it (`refresh`), so that decode steps in
        which nothing happens may be left for later."""
        worker, aborts, latest = self._worker, self._aborts, until
        while True:
            until = min(latest, self.horizon)
            at = worker.next_result_at
            turn_at = min(self._turn_at, self._timer_at)
            if self.aside is not None and self.aside.next_at <= min(at, turn_at, self._next_abort()):
                if self.aside.next_at >= until:
                    return
                self._happened(self.aside.happen())
            elif aborts and aborts[0][0] <= min(at, turn_at):
                if aborts[0][0] >= until:
                    return
                when, key = heapq.heappop(aborts)
                self.abort([key], when)
            elif turn_at <= at:
                if turn_at >= until or (for_views and self._only_decodes(turn_at, until)):
                    return
                self._turn(turn_at, until)
            elif at < until:
                self._complete(at)
            else:
                return

    def _only_decodes(self, turn_at: float, until: float) -> bool:
        """Whether nothing happens but decoding from this turn on until then."""
        if self._foreseen_of != self._num_happened:
            self._foreseen_of = self._num_happened
            may_skip = self._can_skip and self.aside is None and self._timer_at == math.inf
            self._foreseen = self._worker.foresee(self.scheduler, turn_at) if may_skip else ([], [])
        ends, _ = self._foreseen
        return bool(ends) and until <= ends[-1] and until <= self._next_abort()

    @property
    def next_event_at(self) -> float:
        """When something happens next, if nothing arrives."""
        aborted_at = self._aborts[0][0] if self._aborts else math.inf
        aside_at = math.inf if self.aside is None else self.aside.next_at
        return min(self._worker.next_result_at, self._turn_at, self._timer_at, aborted_at, aside_at)

    def _turn(self, now: float, until: float) -> None:
        """Plan what there is room for."""
        scheduler, worker = self.scheduler, self._worker
        self._num_happened += 1
        is_timer = self._timer_at <= self._turn_at
        self._turn_at = self._timer_at = math.inf
        if self.aside is not None:
            self.aside.before_plan(now)
        # Steady decode steps in one call, up to the next event that may change them.
        if self._can_skip and not scheduler.num_waiting:
            ends = worker.skip(scheduler, now, min(until, self._next_abort()))
            if ends:
                self.tokens.push(scheduler.batch.rows().sequences, ends)
                self.num_steps_skipped += len(ends)
                now = ends[-1]
        has_launched = False
        while scheduler.may_plan:
            plan = scheduler.schedule(now)
            if scheduler.rejected:
                self._tell(scheduler.take_rejected())
            if plan is None:
                if scheduler.wake_at < math.inf:
                    self._timer_at = worker.turn_after(self._timer.next(scheduler))
                    self.complaint = self.complaint or self._timer.complaint(scheduler)
                break
            worker.launch(scheduler.ledger.newest, scheduler, now)
            has_launched = True
            if self._on_plan is not None:
                self._on_plan(plan)
        if self.aside is not None:
            self._timer_at = min(self._timer_at, self.aside.next_deadline)
        # A policy that only asks to be woken would make virtual time stand still.
        self._num_idle_wakes = self._num_idle_wakes + 1 if is_timer and not has_launched else 0
        if self._num_idle_wakes > MAX_IDLE_WAKES:
            self.is_stalled = True
            self._timer_at = math.inf

    def _next_abort(self) -> float:
        """When the client of a request that is still there gives up."""
        aborts = self._aborts
        while aborts and self.scheduler.sequence(aborts[0][1]) is None:
            heapq.heappop(aborts)
        return aborts[0][0] if aborts else math.inf

    def _complete(self, now: float) -> None:
        """Apply the oldest result."""
        scheduler = self.scheduler
        self._num_happened += 1
        result = self._worker.pop()
        if isinstance(result, StepFailed):
            events = scheduler.fail(result, now)
        else:
            events = scheduler.update(result, now)
        self.tokens.push(events.sequences, (now,))
        if events.counts.size:
            for more in range(1, int(events.counts.max())):  # further tokens of the same step
                self.tokens.push(events.sequences[events.counts > more], (now,))
                self.tokens.num_repeated += 1
        if events.ends:
            self._tell(events.ends)
        if self._finishes and (stops := self._finishes.pop(result.step, None)):
            named = [(scheduler.sequence(key), reason, stop) for key, reason, stop in stops]
            self._tell(scheduler.finish([(s, reason, stop) for s, reason, stop in named if s is not None], now))
        self._turn_at = min(self._turn_at, self._worker.turn_after(now))

    def _tell(self, ends: Iterable[End]) -> None:
        if self.on_ends is not None:
            self.on_ends(self.number, ends)


class TokenLog:
    """When tokens came: the end of every step, and for every request the steps that gave it one (`timeline.Spans`)."""

    def __init__(self) -> None:
        self.step_ends = array("d")
        self.num_repeated = 0
        """Of them, those that stand for further tokens of a step."""
        self._streaming: dict[Request, int] = {}  # what got a token in the last step, and since which step in a row
        self._last: Any = None
        self._request = array("i")
        self._first_step = array("q")
        self._count = array("i")

    def push(self, sequences: NDArray[Any], ends: Sequence[float]) -> None:
        """Steps that ended then gave each of these a token."""
        if sequences is not self._last:  # the same array as long as none joins or leaves
            self._last = sequences
            step = len(self.step_ends)
            streaming, got = self._streaming, sequences.tolist()
            joined = [sequence for sequence in got if sequence not in streaming]
            if len(joined) != len(got) - len(streaming):
                there = set(got)
                for sequence in [sequence for sequence in streaming if sequence not in there]:
                    self._add(sequence, streaming.pop(sequence), step)
            for sequence in joined:
                streaming[sequence] = step
        self.step_ends.extend(ends)

    def _add(self, sequence: Request, first_step: int, stop: int) -> None:
        self._request.append(sequence.key[1])
        self._first_step.append(first_step)
        self._count.append(stop - first_step)

    def take_ends(self) -> F64:
        """The ends of all steps. The log has no steps afterwards: those of a long run take a hundred megabytes."""
        ends: F64 = np.array(self.step_ends, np.float64)
        self.step_ends = array("d")
        return ends

    def columns(self) -> tuple[I32, I64, I32]:
        """Request, first step and count of every span so far."""
        stop = len(self.step_ends)
        now = [(s.key[1], first, stop - first) for s, first in self._streaming.items()]
        request, first, count = (np.array(column) for column in zip(*now, strict=True)) if now else (NO_I32,) * 3
        return (
            np.concatenate((np.array(self._request, np.int32), request)).astype(np.int32),
            np.concatenate((np.array(self._first_step, np.int64), first)).astype(np.int64),
            np.concatenate((np.array(self._count, np.int32), count)).astype(np.int32),
        )


# A run -------------------------------------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True, eq=False)
class SimulatedRun:
    """What `simulate` returns."""

    workload: Workload
    timeline: RunTimeline
    statistics: tuple[SchedulerStatistics, ...]
    """Of the scheduler of every replica, at the end."""
    num_steps: int
    num_steps_skipped: int
    """Those of them that were made without being planned one by one."""
    warnings: tuple[str, ...]
    bubbles: tuple[tuple[float, ...], ...] = ()
    """By replica and stage, the share of the time in which a stage of a pipeline waited (`slo.stages`)."""
    sizes: tuple[tuple[float, int], ...] = ()
    """With an autoscaler: when it wanted how many replicas."""
    replica_seconds: float = math.nan
    """How long replicas were there, all together."""
    busy_s: tuple[float, ...] = ()
    """By replica, how long its worker computed; of runs with `metered` or a policy cost."""
    policy_s: tuple[float, ...] = ()
    """By replica, what its policy took; of runs with a policy cost."""
    failures: tuple[FailureNote, ...] = ()
    """What failed, and what came of it."""
    moves: tuple[Move, ...] = ()
    """Requests that went to another replica, with rescheduling."""
    num_handed_off: int = 0
    """Requests whose prompt another replica computed than the one that decoded, with roles."""
    due: F64 | None = None
    """With `max_concurrency`: when each request would have been sent without that bound, by row."""

    def __repr__(self) -> str:
        """Short: a notebook shows what its last line gives."""
        num_finished = int((self.timeline.outcome == FINISHED).sum())
        warnings = f", {len(self.warnings)} warnings" if self.warnings else ""
        return f"<SimulatedRun: {num_finished} of {len(self.timeline)} requests finished, {self.num_steps} steps{warnings}>"

    def evaluate(self, **arguments: Any) -> RunMetrics:
        """The figures of the run; arguments as in `metrics.evaluate`."""
        workload = self.workload
        arguments |= {"promises": workload.own_promises, "tenants": workload.tenant_ids, "wanted": workload.num_output}
        return evaluate(self.timeline, workload.classes, workload.class_ids, **arguments)


class _Outcomes:
    """What became of every request, written when it ends."""

    def __init__(self, num: int) -> None:
        self.scheduled = np.full(num, np.nan)
        self.first_token = np.full(num, np.nan)
        self.last_token = np.full(num, np.nan)
        self.end = np.full(num, np.nan)
        self.outcome = np.full(num, UNFINISHED, np.int8)
        self.replica = np.full(num, -1, np.int32)
        self.num_preemptions = np.zeros(num, np.int32)
        self.num_cached = np.zeros(num, np.int32)
        self.num_wasted = np.zeros(num, np.int32)
        self.relegated = np.zeros(num, np.bool_)
        """Whether its policy had given it up when it started."""
        self.error: str | None = None
        """The first one that failed a request."""
        self.num_failed = 0
        self.now: Callable[[int], float] = lambda replica: math.nan
        self.on_ends: Callable[[Iterable[End]], None] = lambda ends: None

    def cut(self, num: int) -> None:
        """Only so many requests were sent."""
        for name, column in vars(self).items():
            if isinstance(column, np.ndarray):
                setattr(self, name, column[:num])

    def add_before(self, first_scheduled: Mapping[int, float], num_preemptions: Mapping[int, int]) -> None:
        """Of requests whose scheduler was lost, by row: when that had started them, and how often it preempted them."""
        for row, at in first_scheduled.items():
            if row < self.scheduled.size:
                self.scheduled[row] = at
                self.num_preemptions[row] += num_preemptions[row]

    def write(self, replica: int, ends: Iterable[End]) -> None:
        ends = list(ends)
        self.on_ends(ends)
        for end in ends:
            sequence = end.sequence
            row = sequence.key[1]
            reason = end.reason
            if reason == "error":
                self.outcome[row] = FAILED
                self.num_failed += 1
                self.error = self.error or end.error
            else:
                self.outcome[row] = ABORTED if reason == "abort" else FINISHED
            self.end[row] = self.now(replica)
            self.relegated[row] = bool(sequence.policy_state.get("relegated"))
            if sequence.num_wasted_tokens:
                self.num_wasted[row] = sequence.num_wasted_tokens
            self.write_times(row, sequence)

    def write_times(self, row: int, sequence: Request) -> None:
        if sequence.scheduled is not None:
            self.scheduled[row] = sequence.scheduled
            if sequence.num_preemptions:
                self.num_preemptions[row] = sequence.num_preemptions
            if sequence.num_cached_tokens:
                self.num_cached[row] = sequence.num_cached_tokens


def simulate(
    workload: Workload,
    shape: EngineShape | Sequence[EngineShape],
    model: StepModel | Sequence[StepModel],
    *,
    policy: str | Callable[[], PlanPolicy] = "fcfs",
    admission: str | Callable[[], AdmissionPolicy] | None = None,
    num_replicas: int = 1,
    router: str | Router = "round-robin",
    view_interval_s: float = VIEW_AGE_S,
    seed: int = 0,
    until: float = math.inf,
    skip: bool = True,
    on_plan: Callable[[int, StepPlan], None] | None = None,
    make_scheduler: Callable[[int, PlanPolicy], Scheduler] | None = None,
    max_concurrency: int | None = None,
    autoscaler: Autoscaler | None = None,
    start_s: float = 60.0,
    failures: Failures = (),
    policy_cost: PolicyCost | None = None,
    delays: ClientDelays | None = None,
    metered: bool = False,
    rescheduling: Rescheduling | None = None,
    roles: str | None = None,
    transfer: TransferShape | None = None,
) -> SimulatedRun:
    """Run a workload through `num_replicas` engines.

    shape, model: of all replicas, or a sequence with one for each.

    policy: as `scheduling_policy=` of the engine, or what builds a fresh one; every replica has its own. admission: as
    `admission_policy=`, likewise; None: that of the shape. view_interval_s: how old the router's views may get, by default
    as they do live; 0: they are exact. until: cut the run off at this time; what comes later is left out. skip: make steady
    decode steps many at a time; not with on_plan(replica, plan), which gets every plan. make_scheduler(replica, policy): instead of
    `EngineShape.scheduler` (a `RecordedScheduler`, say). max_concurrency: requests under way at a time; others are sent,
    and arrive, when one has ended. autoscaler: decides how many replicas there are, num_replicas being 1 then; each
    takes requests start_s after it was wanted (`slo.scaling`).

    failures: what ends and comes back (`slo.failures`). policy_cost: what policies take (`slo.policy_cost`). delays: between
    client and scheduler (`slo.delays`); None: the constants of the model. metered: tell how long workers computed, for
    `slo.energy`. rescheduling: requests move between replicas (`slo.rescheduling`). roles: as `roles=` of the engine; they are the
    replicas then. transfer: what a hand-off between them takes (`slo.roles`); None: nothing. Raises what a policy raises, with its
    name.

    Of a workload with turns, requests arrive when they are sent, and are numbered in that order. Those whose turn never came
    are in no row of the run.
    """
    # What is simulated: the requests that come in time, and the client that sends those which wait for others.
    # With roles these are the replicas, and the router is asked first whether a request is handed off.
    route = make_router(router, seed) if isinstance(router, str) else router
    apart = _apart(roles, transfer, route, num_replicas, autoscaler, failures, rescheduling, make_scheduler)
    if apart is not None:
        num_replicas, route = len(apart.roles), apart.router
    num_replicas = most_replicas(num_replicas, autoscaler)
    shapes, models = _one_each(shape, num_replicas, "shape"), _one_each(model, num_replicas, "model")
    shape, model = shapes[0], models[0]
    check_failures(failures, autoscaler, rescheduling)
    num_given, workload = len(workload), workload.before(until)
    outcomes = _Outcomes(len(workload))
    ends = None if workload.max_tokens is None else np.zeros(len(workload), np.int64)
    client = None
    if workload.turns is not None or max_concurrency is not None:
        if apart is not None:  # what a client sends next would depend on replicas that are behind
            raise ConfigError("roles are not simulated with turns or max_concurrency yet; leave roles out")
        client = ClosedLoop(workload, max_concurrency)
        check_deliver(delays)
    # Prompts that do not begin alike need no hashes, however the engine is configured; but what is copied is found by them.
    has_prefixes = (workload.has_shared_prompts and shape.enable_prefix_caching) or apart is not None
    shapes = [replace(one, enable_prefix_caching=has_prefixes) for one in shapes]
    built = _Built(
        shapes,
        models,
        _policies(policy, admission, shapes, policy_cost),
        make_scheduler,
        seed,
        ends=ends,
        on_ends=outcomes.write,
        on_plan=on_plan,
        skip=skip,
        metered=metered,
        apart=apart,
    )
    replicas = built.replicas
    # Around the replicas: the router, the number of replicas, the ways to them, and what fails.
    # Requests with turns are sent when others end, all others when they are due.
    outcomes.now = lambda replica: replicas[replica].scheduler.now
    scaling = SimulatedScaling.of(autoscaler, replicas, start_s)
    line = None if delays is None else SubmitLine(delays, seed_stream(seed, "ways to the scheduler"))
    sender = _Sender(
        workload, shape, replicas, route, outcomes, view_interval_s, has_prefixes, model.submit_s, ends, scaling, line
    )
    if apart is not None:
        sender.share_out(apart)
    if failures:
        sender.faults = FailureDriver(failures, replicas, built.new_scheduler, sender.send_on, seed)
    elif rescheduling is not None:
        sender.faults = Rescheduler(rescheduling, replicas, sender.send_on)
    # The run itself. What a policy raises goes through, with its name.
    num_unsent = 0
    due: F64 | None = None
    try:
        if client is None:
            sender.may_lag = True
            for row, at in enumerate(workload.arrival.tolist()):
                sender.send(row, row, at)
            sender.run_to_end(until)
        else:
            deliver_s = model.deliver_s if delays is None else delays.deliver[0]
            sent, arrival, wanted = _run_closed_loop(workload, client, sender, replicas, outcomes, until, deliver_s)
            num_unsent = 0 if until < math.inf else len(workload) - sent.size
            workload = workload.sent_at(sent, arrival)
            outcomes.cut(sent.size)
            due = wanted if max_concurrency is not None else None
    except Exception as error:
        gate = shape.admission if admission is None else admission
        beside = "" if gate is None else f" and the admission policy {gate!r}"
        error.add_note(f"while simulating {workload.name!r} with the policy {policy!r}{beside}")
        raise
    # What came of it. A request may have had a scheduler before that was lost.
    if apart is not None:  # each request that was handed off had a scheduler before
        outcomes.add_before(apart.first_scheduled, apart.num_preemptions)
    if sender.faults is not None:
        outcomes.add_before(sender.faults.first_scheduled, sender.faults.num_preemptions)
    ways = None if delays is None else (delays, [seed_stream(seed, f"ways back of {r.number}") for r in replicas])
    run = _collect(workload, replicas, outcomes, models, policy, ways, sender.faults is not None or apart is not None)
    cut = told_of_cut(run.timeline, workload.promises, num_given - num_unsent - len(workload), until)
    if num_unsent:
        cut = [*cut, f"{num_unsent} requests were never sent: what they were to continue did not finish"]
    faults = sender.faults
    told = faults.told() if isinstance(faults, FailureDriver) else []
    told += [f"policy {policy!r}: {one.told()}" for one in built.costed[:1]]
    run = replace(
        run,
        warnings=(*cut, *told, *run.warnings),
        bubbles=tuple(one.stages.bubbles for one in built.workers if one.stages is not None),
        busy_s=tuple(one.busy_s for one in built.workers if isinstance(one, MeteredWorker)),
        policy_s=tuple(one.total for one in built.costed),
        failures=tuple(faults.notes) if isinstance(faults, FailureDriver) else (),
        moves=tuple(faults.moves) if isinstance(faults, Rescheduler) else (),
        num_handed_off=0 if apart is None else apart.num_handed_off,
        due=due,
    )
    # What it cost: replicas count while they start, and those that always are to the last end.
    last = float(np.nanmax(run.timeline.end, initial=0.0))
    if scaling is None:
        return replace(run, replica_seconds=num_replicas * last)
    return replace(run, sizes=tuple(scaling.decisions), replica_seconds=scaling.replica_seconds(last))


def _policies(
    policy: str | Callable[[], PlanPolicy],
    admission: str | Callable[[], AdmissionPolicy] | None,
    shapes: Sequence[EngineShape],
    cost: PolicyCost | None,
) -> Callable[[int], PlanPolicy]:
    """What builds fresh policies for a replica, by its number."""

    def build(number: int) -> PlanPolicy:
        own = load_policy(policy) if isinstance(policy, str) else policy()
        gate = shapes[number].admission if admission is None else admission
        if gate is not None:
            own = AdmissionGate(own, load_admission(gate) if isinstance(gate, str) else gate())
        return own if cost is None else CostedPolicy(own, cost)

    return build


class _Built:
    """The replicas of a run, each with a scheduler, a policy and random numbers of its own."""

    def __init__(
        self,
        shapes: Sequence[EngineShape],
        models: Sequence[StepModel],
        new_policy: Callable[[int], PlanPolicy],
        make_scheduler: Callable[[int, PlanPolicy], Scheduler] | None,
        seed: int,
        *,
        ends: I64 | None,
        on_ends: Callable[[int, Iterable[End]], None],
        on_plan: Callable[[int, StepPlan], None] | None,
        skip: bool,
        metered: bool,
        apart: SimulatedRoles | None = None,
    ) -> None:
        """Arguments as of `simulate` and `ModelledWorker`. apart: the roles of the replicas."""
        self._apart = apart
        self.workers: list[ModelledWorker] = []
        self.replicas: list[SimulatedReplica] = []
        self.costed: list[CostedPolicy] = []
        """Of all schedulers, those that were lost included."""
        self._shapes = shapes
        self._new_policy = new_policy
        self._make_scheduler = make_scheduler
        self._has_plans = on_plan is not None
        self._tiers = [
            SimulatedTiers(one.tiers) if apart or (one.tiers and one.enable_prefix_caching) else None for one in shapes
        ]
        for number, (shape, model) in enumerate(zip(shapes, models, strict=True)):
            policy = new_policy(number)
            kind = MeteredWorker if metered else ModelledWorker
            worker = (WaitingWorker if isinstance(policy, CostedPolicy) else kind)(
                model,
                seed_stream(seed, f"steps of replica {number}"),
                has_tokens=shape.enable_prefix_caching,
                ends=ends,
                drafts=shape.drafts,
                draft_rng=seed_stream(seed, f"drafts of replica {number}"),
                stages=StageClocks(shape.stages, model.gap_s, shape.hop_s) if shape.stages else None,
            )
            self.workers.append(worker)
            tell = None if on_plan is None else (lambda plan, number=number: on_plan(number, plan))
            self.replicas.append(
                SimulatedReplica(
                    self._scheduler(number, policy),
                    worker,
                    number=number,
                    on_ends=on_ends,
                    on_plan=tell,
                    skip=skip and shape.drafts is None and not shape.tiers and apart is None,
                    step_seconds=model.seconds,
                )
            )
            tiers = self._tiers[number]
            if tiers is not None and apart is not None:
                self.replicas[-1].aside = RoleMoves(tiers, partial(self._scheduler_of, number), number, apart)
            elif tiers is not None:
                self.replicas[-1].aside = TierMoves(tiers, partial(self._scheduler_of, number))

    def _scheduler_of(self, number: int) -> Scheduler:
        return self.replicas[number].scheduler

    def new_scheduler(self, number: int) -> Scheduler:
        """With a fresh policy, for the worker that is there."""
        return self._scheduler(number, self._new_policy(number))

    def _scheduler(self, number: int, policy: PlanPolicy) -> Scheduler:
        worker = self.workers[number]
        if isinstance(policy, CostedPolicy) and isinstance(worker, WaitingWorker):
            self.costed.append(policy)
            worker.policy = policy
        if self._make_scheduler is not None:
            return self._make_scheduler(number, policy)
        lends = None if self._apart is None else self._apart.tables[number]
        return self._shapes[number].scheduler(policy, has_plans=self._has_plans, tiers=self._tiers[number], lends=lends)


def _one_each(given: T | Sequence[T], num: int, name: str) -> list[T]:
    """Of every replica its own. Raises ConfigError for another number of them."""
    if not isinstance(given, Sequence):
        return [given] * num
    if len(given) != num:
        raise ConfigError(f"{len(given)} {name}s for {num} replicas: give one, or as many")
    found = list(given)
    if isinstance(found[0], EngineShape) and len({one.block_size for one in found}) > 1:
        raise ConfigError("shapes of replicas must have one block_size, by which routers and prompts are counted")
    return found


def _apart(
    roles: str | None, transfer: TransferShape | None, router: Router, num_replicas: int, *others: object
) -> SimulatedRoles | None:
    """What replicas with roles have in common; None: they have none. others: what roles are not simulated with.

    Raises ConfigError.
    """
    given = read_roles(roles)
    if not given:
        return None
    if num_replicas not in (1, len(given)):
        raise ConfigError(f"num_replicas={num_replicas} and roles={roles!r} both say how many there are; give one")
    if any(others):
        raise ConfigError(
            f"roles={roles!r} are not simulated with an autoscaler, failures, rescheduling or a report yet; leave one out"
        )
    return SimulatedRoles(given, transfer or TransferShape(), RoleRouter(router))


def most_replicas(num_replicas: int, autoscaler: Autoscaler | None) -> int:
    """How many replicas there may be. Raises ConfigError."""
    if num_replicas < 1:
        raise ConfigError(f"num_replicas={num_replicas} must be at least 1")
    if autoscaler is None:
        return num_replicas
    if num_replicas != 1:
        raise ConfigError(
            f"num_replicas={num_replicas} and an autoscaler both say how many there are; give one of them"
        )
    return autoscaler.max_replicas


class _Sender:
    """Sends requests of a workload to the replicas that the router chooses."""

    def __init__(
        self,
        workload: Workload,
        shape: EngineShape,
        replicas: list[SimulatedReplica],
        router: Router,
        outcomes: _Outcomes,
        view_interval_s: float,
        has_prefixes: bool,
        submit_s: float,
        ends: I64 | None,
        scaling: SimulatedScaling | None,
        line: SubmitLine | None = None,
    ) -> None:
        """ends: is filled with how many tokens a request has at its end, by its number. scaling: says which replicas there are;
        None: all. line: the way of requests to the scheduler; None: each takes submit_s."""
        self.faults: FailureDriver | Rescheduler | None = None
        """What fails on the way, or moves requests; None: nothing."""
        self._apart: SimulatedRoles | None = None
        self.may_lag = False
        """Nothing but arrivals looks at replicas, so that they may be behind."""
        self._line = line
        self._scaling = scaling
        if scaling is not None:
            outcomes.on_ends = scaling.note_ends
        self._replicas = replicas
        self._router = router
        self._outcomes = outcomes
        self._view_interval_s = view_interval_s
        self._submit_s = submit_s
        self._patience = [math.inf if kind.patience is None else kind.patience for kind in workload.classes]
        self._class_ids = workload.class_ids.tolist()
        self._num_prompt = workload.num_prompt.tolist()
        self._num_output = workload.num_output.tolist()
        asked = workload.max_tokens
        self._lengths = self._num_output if asked is None else np.minimum(workload.num_output, asked).tolist()
        self._make = _submits(workload, self._num_prompt, self._num_output)
        self._slos = [kind.slo for kind in workload.classes]
        # A router looks at hashes also where engines do not.
        needs_hashes = has_prefixes or len(replicas) > 1
        self._prefixes = workload.prefixes if needs_hashes else None
        self._block_size = shape.block_size
        self.contexts = Contexts(workload, shape.block_size) if needs_hashes and workload.turns is not None else None
        self._has_prefixes = has_prefixes
        self._needs_views = getattr(router, "needs_views", True) or scaling is not None
        self._views: list[ReplicaView] = []
        self._view_of_each: dict[int, ReplicaView] = {}
        self._next_view_at = -math.inf
        self._ends = ends
        if len(replicas) > 1 and self._needs_views:
            for replica in replicas:
                replica.show_cache()
        if workload.max_tokens is not None:
            asked = np.minimum(workload.num_output, workload.max_tokens)
            self._last = (workload.num_prompt.astype(np.int64) + asked).tolist()

    def share_out(self, apart: SimulatedRoles) -> None:
        """The replicas have roles."""
        self._apart = apart

        def moved(number: int, target: int, at: float) -> None:
            self._outcomes.replica[number] = target
            self._next_view_at = -math.inf

        apart.begin(self._replicas, moved)

    def _view_of(self, replica: SimulatedReplica, at: float) -> ReplicaView:
        view = self._view_of_each.get(replica.number)
        if view is None:
            view = self._view_of_each[replica.number] = replica.view(at)
        else:
            replica.refresh(view, at)
        return view

    def _run_all(self, until: float) -> None:
        """Everything that happens at all replicas before this time."""
        if self._apart is not None:
            self._apart.run_until(until)
        for replica in self._replicas:
            replica.run_until(until)

    def _look_at_all(self, at: float) -> None:
        """As `_run_all`, as far as views tell."""
        if not self.may_lag or self._apart is not None or self._scaling is not None or self.faults is not None:
            self._run_all(at)
            return
        for replica in self._replicas:
            replica.run_until(at, for_views=True)

    @property
    def next_tick(self) -> float:
        """When the number of replicas is decided next, or something fails or comes back."""
        if self.faults is not None:
            return self.faults.next_at
        return math.inf if self._scaling is None else self._scaling.next_tick

    @property
    def is_waiting(self) -> bool:
        """Something is down, and will be back."""
        return self.faults is not None and self.faults.is_waiting

    def run_to_end(self, until: float) -> None:
        """All requests were sent: run the replicas to their end, or up to this time."""
        if self._scaling is not None:
            self._scaling.run_to_end(until)
        while self.faults is not None and self.faults.next_at < until:
            for replica in self._replicas:
                replica.run_until(self.faults.next_at)
            if not self.faults.is_waiting and all(replica.next_event_at == math.inf for replica in self._replicas):
                break
            self.faults.apply()
        self._run_all(until)

    def tick(self) -> None:
        """Let happen what is due at `next_tick`."""
        if self.faults is not None:
            self.faults.apply()
        else:
            assert self._scaling is not None
            self._scaling.tick()
        self._next_view_at = -math.inf

    def send_on(self, number: int, submit: Submit, others: list[int], at: float) -> None:
        """A request that a replica has lost goes to one of these others."""
        views = [self._replicas[other].view(at) for other in others]
        slo = None if submit.slo is None else SLO.from_fields(submit.slo)
        request = Routable(submit.prompt.size, submit.block_hashes.tobytes(), max_tokens=submit.max_tokens, slo=slo)
        chosen = self._replicas[self._router.route(request, views)]
        before = self._replicas[self._outcomes.replica[number]]
        self._outcomes.replica[number] = chosen.number
        chosen.submit(0, submit, at)
        for when in before.aborts_of((0, number)):
            chosen.abort_at(max(when, at), (0, number))
        self._next_view_at = -math.inf

    def send(self, row: int, number: int, at: float) -> None:
        """Send a request; number: by which the replicas know it."""
        # When it is with a scheduler; what fails until then comes first.
        replicas, faults = self._replicas, self.faults
        there = at + self._submit_s if self._line is None else self._line.there(at, self._num_prompt[row])
        up: list[int] = []
        if faults is not None:
            while faults.next_at <= there:
                self.tick()
            up = faults.up()
        hashes, salt = NO_U8, None
        if self.contexts is not None:
            hashes, salt = np.frombuffer(self.contexts.hashes(row, number), np.uint8), self.contexts.salt(row)
        elif self._prefixes is not None:
            hashes, salt = self._prefixes.block_hashes(row, self._num_prompt[row], self._block_size), str(row)
        elif self._apart is not None:
            hashes, salt = hashes_of_its_own(row, self._num_prompt[row] // self._block_size), str(row)
        if self._ends is not None:
            self._ends[number] = self._last[row]
        # Where it goes, by views that may be old.
        chosen = 0
        if (len(replicas) > 1 or self._scaling is not None) and (up or faults is None):
            if self._scaling is not None and self._scaling.run_before(at):
                self._next_view_at = -math.inf  # there may be others now
            # Replicas are independent between arrivals, so each runs only as far as its state is needed.
            if at >= self._next_view_at and (self._needs_views or not self._views or faults is not None):
                self._look_at_all(at)
                ready = replicas if self._scaling is None else self._scaling.ready(at)
                numbers = [replica.number for replica in ready] if faults is None else up
                self._views = [self._view_of(replicas[number], at) for number in numbers]
                self._next_view_at = at + self._view_interval_s
            request = Routable(
                self._num_prompt[row],
                hashes.tobytes(),
                max_tokens=self._num_output[row],
                slo=self._slos[self._class_ids[row]],
            )
            if self._scaling is not None:
                self._scaling.note(number, self._lengths[row], request, self._views, at)
            chosen = self._router.route(request, self._views)
            view = next((view for view in self._views if view.number == chosen), None)
            if view is None:
                raise ConfigError(
                    f"router {type(self._router).__name__} sent a request to replica {chosen} of {len(self._views)}"
                )
            view.add(request)
        # The replica has come to that time. Where its scheduler is down, the request waits for the next one.
        replica = replicas[chosen]
        if self._apart is not None:
            self._apart.run_until(there)
        replica.run_until(there)
        self._outcomes.replica[number] = chosen
        if not self._has_prefixes:
            hashes, salt = NO_U8, None
        if faults is None or chosen in up:
            submit = self._make(row, at, number, hashes, salt)
            if replica.role == "prefill":
                submit = replace(submit, hands_off=True)
            replica.submit(0, submit, there)
        else:
            faults.hold(chosen, self._make(row, at, number, hashes, salt))
        limit = self._patience[self._class_ids[row]]
        if limit < math.inf:
            replica.abort_at(max(at + limit, there), (0, number))


def _run_closed_loop(
    workload: Workload,
    client: ClosedLoop,
    sender: _Sender,
    replicas: list[SimulatedReplica],
    outcomes: _Outcomes,
    until: float,
    deliver_s: float,
) -> tuple[NDArray[np.intp], F64, F64]:
    """Send requests when the client does. Returns the rows that were sent, in this order, when they were, and when they would have
    been without a bound on those under way."""
    sent: list[int] = []
    arrival: list[float] = []
    wanted: list[float] = []
    is_waiting = False

    def on_ends(replica: int, ends: Iterable[End]) -> None:
        ends = list(ends)
        outcomes.write(replica, ends)
        at = outcomes.now(replica) + deliver_s
        for end in ends:
            number = end.sequence.key[1]
            row = sent[number]
            if sender.contexts is not None:
                num_output = int(workload.num_output[row])
                if workload.max_tokens is not None:
                    num_output = min(num_output, int(workload.max_tokens[row]))
                sender.contexts.on_end(row, output_id(number), num_output)
            client.on_end(row, at, is_finished=end.reason not in ("error", "abort"))
        if is_waiting:
            replicas[replica].horizon = client.next_at

    for replica in replicas:
        replica.on_ends = on_ends
    while True:
        due = min(client.next_at, until, sender.next_tick)
        is_waiting = True
        # The replica at which something happens next runs alone, up to what happens at another one.
        while (first := min(replicas, key=lambda replica: replica.next_event_at)).next_event_at < due:
            others = min((r.next_event_at for r in replicas if r is not first), default=math.inf)
            first.horizon = math.inf
            first.run_until(min(due, max(others, math.nextafter(first.next_event_at, math.inf))))
            due = min(client.next_at, until, sender.next_tick)
        is_waiting = False
        for replica in replicas:
            replica.horizon = math.inf
        is_over = client.next_at == math.inf and all(replica.next_event_at == math.inf for replica in replicas)
        is_over = is_over and not sender.is_waiting
        if due >= until or is_over:
            break
        if due < client.next_at:
            sender.tick()
            continue
        row, since = client.pop()
        sent.append(row)
        arrival.append(due)
        wanted.append(since)
        sender.send(row, len(sent) - 1, due)
    return np.array(sent, np.intp), np.array(arrival, np.float64), np.array(wanted, np.float64)


def _submits(
    workload: Workload, num_prompt: list[int], num_output: list[int]
) -> Callable[[int, float, int, U8, str | None], Submit]:
    """Makes the message of a request. Prompts are zeros: only their number and, if any, their block hashes matter.

    num_prompt, num_output: of the workload, which the caller has as lists.
    """
    zeros = np.zeros(int(workload.num_prompt.max(initial=1)), np.int32)
    max_tokens = num_output if workload.max_tokens is None else workload.max_tokens.tolist()
    stop_token_ids = () if workload.max_tokens is None else (END_OF_TEXT,)
    class_ids, kinds = workload.class_ids.tolist(), workload.classes
    slos = [_fields(kind.slo) for kind in kinds]
    own = workload.own_promises
    tenant_ids = None if workload.tenant_ids is None else workload.tenant_ids.tolist()

    def make(row: int, at: float, rid: int, block_hashes: U8, salt: str | None) -> Submit:
        number = class_ids[row]
        kind = kinds[number]
        return Submit(
            rid=rid,
            arrival=at,
            prompt=zeros[: num_prompt[row]],
            max_tokens=max_tokens[row],
            stop_token_ids=stop_token_ids,
            ignore_eos=True,
            detokenize=False,
            priority=kind.priority,
            slo=slos[number] if own is None else _fields(own.slo(row)),
            is_latency_sensitive=kind.is_latency_sensitive,
            type_info=kind.label or None,
            tenant=None if tenant_ids is None else workload.tenants[tenant_ids[row]],
            deadline=None if kind.patience is None else at + kind.patience,
            block_hashes=block_hashes,
            # A prompt that is shorter than a block has no hash of its own to tell it from others.
            cache_salt=salt,
        )

    return make


def _fields(slo: SLO | None) -> tuple[float | None, ...] | None:
    return None if slo is None else tuple(slo.to_fields())


def _collect(
    workload: Workload,
    replicas: list[SimulatedReplica],
    outcomes: _Outcomes,
    models: list[StepModel],
    policy: object,
    ways: tuple[ClientDelays, list[np.random.Generator]] | None,
    has_moved: bool,
) -> SimulatedRun:
    """What came of a run. models: by replica. ways: delays, and by replica what they are drawn by; None: the constants of
    the models. has_moved: whether a request may have got tokens from several replicas."""
    # Spans of all replicas, in the order of requests.
    num = len(workload)
    columns = [replica.tokens.columns() for replica in replicas]
    number = [
        np.full(request.size, replica.number, np.int32)
        for replica, (request, _, _) in zip(replicas, columns, strict=True)
    ]
    spans = Spans.sorted(
        np.concatenate([request for request, _, _ in columns]),
        np.concatenate(number),
        np.concatenate([first for _, first, _ in columns]),
        np.concatenate([count for _, _, count in columns]),
    )
    # What the client sees: the steps end earlier, by the time that their tokens are on the way.
    ends = [replica.tokens.take_ends() for replica in replicas]
    if ways is None:
        step_ends = tuple(np.add(one, model.deliver_s, out=one) for one, model in zip(ends, models, strict=True))
    else:
        step_ends = tuple(ways[0].delivered(one, rng) for one, rng in zip(ends, ways[1], strict=True))
    if has_moved:
        spans = spans.by_time(step_ends)
    num_output = np.bincount(spans.request, spans.count, num).astype(np.int32)
    _write_token_times(outcomes, spans, step_ends)
    # What one should know of it.
    distinct = {id(model): model for model in models}.values()
    warnings = [*workload.warnings(), *(told for model in distinct for told in unattainable(workload, model))]
    deliver_s = max(model.deliver_s for model in models) if ways is None else ways[0].deliver[0]
    if outcomes.num_failed:
        warnings.append(f"{outcomes.num_failed} requests failed, the first with: {outcomes.error}")
    # What is left when nothing happens any more waits for a policy that stalls.
    for replica in replicas:
        left = replica.scheduler.statistics()
        for sequence in replica.scheduler.running():
            outcomes.write_times(sequence.key[1], sequence)
        if left.num_refused_decisions:
            warnings.append(
                f"policy {policy!r}: {left.num_refused_decisions} parts of its decisions did not fit and were left out"
            )
        if left.num_waiting and not left.num_in_flight:
            why = "asks again and again to be woken and plans nothing" if replica.is_stalled else "plans nothing"
            warnings.append(
                f"policy {policy!r} {why}: {left.num_waiting} requests of replica {replica.number} wait for ever"
            )
        if replica.complaint is not None:
            warnings.append(f"policy {policy!r}: {replica.complaint}")
    # A request that starves is told of last: others explain it.
    warnings += _starvation(workload, outcomes, policy)
    timeline = RunTimeline(
        arrival=workload.arrival,
        num_prompt=workload.num_prompt,
        num_output=num_output,
        scheduled=outcomes.scheduled,
        first_token=outcomes.first_token,
        last_token=outcomes.last_token,
        end=np.where(np.isnan(outcomes.end), np.nan, np.fmax(outcomes.end + deliver_s, outcomes.last_token)),
        outcome=outcomes.outcome,
        replica=outcomes.replica,
        num_preemptions=outcomes.num_preemptions,
        num_cached=outcomes.num_cached,
        num_wasted=outcomes.num_wasted,
        spans=spans,
        step_ends=step_ends,
        deliver_s=deliver_s,
    )
    return SimulatedRun(
        workload,
        timeline,
        tuple(replica.scheduler.statistics() for replica in replicas),
        sum(ends.size for ends in step_ends) - sum(replica.tokens.num_repeated for replica in replicas),
        sum(replica.num_steps_skipped for replica in replicas),
        tuple(warnings),
    )


def _starvation(workload: Workload, outcomes: _Outcomes, policy: object) -> list[str]:
    """Requests that waited longer than can be expected of them while others that came later were started."""
    scheduled = np.where(np.isfinite(outcomes.scheduled), outcomes.scheduled, np.inf)
    last = np.nanmax(np.concatenate((outcomes.end, outcomes.scheduled, workload.arrival)), initial=0.0)
    until = np.minimum(np.where(np.isfinite(outcomes.end), outcomes.end, last), scheduled)
    waited = until - workload.arrival
    is_overtaken = np.zeros(len(workload), np.bool_)
    for replica in np.unique(outcomes.replica[outcomes.replica >= 0]):
        mine = np.flatnonzero(outcomes.replica == replica)
        later = np.minimum.accumulate(np.append(scheduled[mine][1:], np.inf)[::-1])[::-1]
        is_overtaken[mine] = later < until[mine]
    limit = np.full(len(workload), STARVED_S)
    own = workload.own_promises
    for number, kind in enumerate(workload.classes):
        if own is None and kind.slo is not None:
            mine = workload.class_ids == number
            fields = kind.slo.to_fields()
            limit[mine] = [patience(fields, size) for size in workload.num_prompt[mine].tolist()]
    for row in np.flatnonzero(is_overtaken & (waited > STARVED_S)).tolist():
        if own is not None and (slo := own.slo(row)) is not None:
            limit[row] = patience(slo.to_fields(), int(workload.num_prompt[row]))
    starved = is_overtaken & (waited > limit)
    if not starved.any():
        return []
    given_up = int((starved & outcomes.relegated).sum())
    meant = f"; {given_up} of them it had given up, because they could not be in time any more" if given_up else ""
    return [
        f"policy {policy!r}: {int(starved.sum())} requests starved: they waited for longer than they were promised to, and "
        f"than {STARVED_S:.0f} s, up to {float(waited[starved].max()):.0f} s, while others that came later were started{meant}"
    ]


def _write_token_times(outcomes: _Outcomes, spans: Spans, step_ends: tuple[F64, ...]) -> None:
    """First and last token of every request, from its first and last span."""
    if not spans.request.size:
        return
    is_first = np.concatenate(([True], spans.request[1:] != spans.request[:-1]))
    is_last = np.concatenate((is_first[1:], [True]))
    for replica, ends in enumerate(step_ends):
        mine = spans.replica == replica
        first, last = mine & is_first, mine & is_last
        outcomes.first_token[spans.request[first]] = ends[spans.first_step[first]]
        outcomes.last_token[spans.request[last]] = ends[spans.first_step[last] + spans.count[last] - 1]


# Recordings --------------------------------------------------------------------------------------------------------------


def rerun(entries: Iterable[Entry], scheduler: Scheduler) -> list[StepPlan]:
    """Drive a fresh scheduler by a replica's loop, with the times and results of a recording; its plans in order.

    The recording says when what arrived, when which result was there and when the scheduler came to plan; what is called
    then, and how often, is up to the loop. So equal plans show that the simulator turns as the engine does.
    """
    results: dict[int, tuple[float, StepResult | StepFailed]] = {}
    arrivals: list[tuple[float, str, Any]] = []
    finishes: dict[int, list[tuple[Key, Any, Any]]] = {}
    turns: list[float] = []
    last_step = 0
    has_planned = False
    for call, now, argument in entries:
        verb = call.partition(" ")[0]
        if verb in ("update", "fail"):
            last_step = argument.step
            results[last_step] = (now, argument)
            has_planned = False
        elif verb == "schedule":
            if not has_planned:  # one turn plans until there is no room
                turns.append(now)
            has_planned = True
        elif verb == "finish":
            finishes.setdefault(last_step, []).extend(((f, rid), reason, stop) for (f, rid), reason, stop in argument)
        elif verb in ("submit", "abort", "unblock", "expire", "give_up", "change_policy"):
            arrivals.append((now, call, argument))
            has_planned = False
        elif verb != "decide":
            raise ValueError(f"a simulation has no {verb}: only recordings without it can be run again")
    plans: list[StepPlan] = []
    replica = SimulatedReplica(scheduler, ScriptedWorker(results, turns), on_plan=plans.append)
    for step, stops in finishes.items():
        replica.finish_after(step, stops)
    for now, call, argument in arrivals:
        replica.run_until(now)
        verb, _, frontend = call.partition(" ")
        match verb:
            case "submit":
                replica.submit(int(frontend), argument, now)
            case "abort":
                replica.abort([(f, rid) for f, rid in argument], now)
            case "expire":
                replica.expire(now)
            case "give_up":
                replica.give_up_policy(argument, now)
            case "change_policy":
                replica.change_policy(argument[0], argument[1], now)
            case _:
                replica.unblock((argument[0][0], argument[0][1]), argument[1], now, *argument[2:])
    replica.run_until(math.inf)
    return plans
