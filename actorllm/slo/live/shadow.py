"""`Shadow`: a second policy in the shadow of the one that decides, on the requests of a live engine.

    with Shadow(llm, "edf") as shadow:
        ...
        print(llm.stats()["shadow"])
        print(shadow.report())

The engine tells its requests once they have ended, with their lengths (`telemetry.request_log`). They are then scheduled again in
virtual time, by two schedulers of the engine's configuration: one with its own policy, one with the other. Steps take what a
model says, or what was learned of the engine's steps. So the shadow lags behind by as long as the oldest open request runs.

What it decides differently, and what becomes of promises, is told beside what was measured. The difference of the two simulations
is that of the policies. What the engine's own policy gives in the simulation differs from the measurement by the error of the
simulation.

Of several replicas each has two simulations of its own, on the requests that its router gave it: the router decides as it did.

A thread of this process does it, in at most `budget` of one core. It keeps MAX_PENDING requests of a replica; those beyond, and
failed ones, are left out and counted. Without a shadow the engine keeps nothing.
"""

from __future__ import annotations

import contextlib
import heapq
import math
import threading
import time
from collections import deque
from collections.abc import Iterable
from collections.abc import Sequence as Rows
from dataclasses import dataclass, field
from types import TracebackType
from typing import Any

import numpy as np
from numpy.typing import NDArray

from actorllm.client.engine import Engine
from actorllm.config import EngineConfig
from actorllm.errors import ActorLLMError, ConfigError, shown
from actorllm.messages import F64, I64, Submit
from actorllm.scheduling.cost_model import StepModel, from_json
from actorllm.scheduling.events import End
from actorllm.scheduling.loading import load_policies
from actorllm.scheduling.sequence import Sequence
from actorllm.scheduling.step_time import StepTime
from actorllm.scheduling.telemetry.request_log import COLUMNS, TOLD_BYTES
from actorllm.slo.simulator import END_OF_TEXT, EngineShape, ModelledWorker, SimulatedReplica
from actorllm.types.objective import READINGS, SLO

MAX_PENDING = 8192
"""Requests that wait to be simulated."""
MAX_NUMBERS = 1 << 15
"""Requests of a simulation that are under way at a time; the numbers of those that have ended are used again."""
MAX_TOLD = 32
"""Requests of which is told that a promise was kept under one policy only: the newest."""
STEP_COLUMNS = 7
"""Of a row of `StepHistory.newest`; of several replicas the number of the replica follows."""
SLICE_S = 0.05
"""Seconds of virtual time between two looks at the budget."""


class LearnedModel:
    """A `StepModel` of the engine's own steps, as far as they have been seen."""

    name = "learned from the engine's steps"
    launch_s = submit_s = deliver_s = 0.0
    residuals: tuple[float, ...] = ()

    def __init__(self) -> None:
        self.gap_s = 0.0
        self._time = StepTime()
        self._last_end = -math.inf

    @property
    def is_ready(self) -> bool:
        return self._time.num_steps >= StepTime.MIN_STEPS

    def observe(self, steps: list[list[float]]) -> None:
        """Rows of `StepHistory.newest`."""
        for _, planned, started, ended, _, num_decode, num_tokens in steps:
            self._time.observe(num_tokens - num_decode, num_decode, 0.0, ended - started)
            if planned < self._last_end:  # it waited for the one before it
                self.gap_s += 0.05 * (max(0.0, started - self._last_end) - self.gap_s)
            self._last_end = ended

    def seconds(
        self, p: float, d: float, decode_context: float, prefill_context: float = 0.0, prefill_pairs: float = 0.0
    ) -> float:
        return max(1e-5, self._time.seconds(p, d, 0.0))

    def decode_run(self, d: int, context: int, steps: int) -> F64:
        return np.full(steps, self.seconds(0, d, 0.0))


class _NoTokens:
    """In the place of the log of a simulated run, which would grow for ever."""

    num_repeated = 0

    def push(self, sequences: NDArray[Any], ends: Any) -> None: ...


@dataclass(slots=True)
class _Told:
    """Sums over requests that have ended, of one way to serve them."""

    num_ended: int = 0
    num_promised: int = 0
    num_kept: dict[str, int] = field(default_factory=lambda: dict.fromkeys(READINGS, 0))
    ttft_s: float = 0.0
    e2e_s: float = 0.0
    num_with_token: int = 0

    def add(self, row: dict[str, Any], first: float | None, last: float | None, is_whole: bool) -> bool | None:
        """Whether it kept its promise, by due dates; None: there is none to judge."""
        self.num_ended += 1
        if first is not None and last is not None:
            self.num_with_token += 1
            self.ttft_s += first - row["arrival"]
            self.e2e_s += last - row["arrival"]
        slo = SLO.from_fields(row["slo"])
        if slo is None or row["reason"] == "abort":
            return None
        self.num_promised += 1
        kept = False
        for reading in READINGS:
            kept = (
                is_whole
                and first is not None
                and last is not None
                and slo.is_met(
                    arrival=row["arrival"],
                    first_token=first,
                    last_token=last,
                    num_prompt=row["num_prompt"],
                    num_output=row["num_output"],
                    reading=reading,
                )
            )
            self.num_kept[reading] += kept
        return kept

    @classmethod
    def of(cls, parts: Iterable[_Told]) -> _Told:
        """Their sum."""
        total = cls()
        for part in parts:
            for name in ("num_ended", "num_promised", "ttft_s", "e2e_s", "num_with_token"):
                setattr(total, name, getattr(total, name) + getattr(part, name))
            for reading in READINGS:
                total.num_kept[reading] += part.num_kept[reading]
        return total

    def statistics(self) -> dict[str, Any]:
        num = max(1, self.num_with_token)
        return {
            "num_ended": self.num_ended,
            "num_promised": self.num_promised,
            "num_kept": dict(self.num_kept),
            "mean_ttft_s": self.ttft_s / num,
            "mean_e2e_s": self.e2e_s / num,
        }


class _Lane:
    """One of the two simulations."""

    def __init__(self, config: EngineConfig, policy: str, admission: str | None, model: StepModel) -> None:
        self.name = policy if admission is None else f"{policy}+{admission}"
        self.told = _Told()
        self.ended: dict[int, tuple[float | None, bool | None]] = {}
        """By number: when it was started, and whether it kept its promise; of requests that the other has not told."""
        shape = EngineShape.of(config)
        self._has_hashes = shape.enable_prefix_caching
        self._ends: I64 = np.zeros(MAX_NUMBERS, np.int64)
        self._rows: dict[int, tuple[int, dict[str, Any]]] = {}
        scheduler = shape.scheduler(load_policies(policy, admission), has_plans=False)
        worker = ModelledWorker(model, np.random.default_rng(0), has_tokens=self._has_hashes, ends=self._ends)
        self.replica = SimulatedReplica(scheduler, worker, on_ends=self._note)
        self.replica.tokens = _NoTokens()  # type: ignore[assignment]

    @property
    def has_room(self) -> bool:
        return len(self._rows) < MAX_NUMBERS // 2

    def submit(self, number: int, row: dict[str, Any]) -> None:
        """As the scheduler heard of it."""
        rid = number % MAX_NUMBERS
        self._rows[rid] = number, row
        is_aborted = row["reason"] == "abort"
        self._ends[rid] = row["num_prompt"] + (row["max_tokens"] if is_aborted else max(1, row["num_output"]))
        hashes = b"".join(one.to_bytes(TOLD_BYTES).ljust(32, b"\0") for one in row["hashes"])
        self.replica.submit(
            0,
            Submit(
                rid=rid,
                arrival=row["arrival"],
                prompt=np.zeros(row["num_prompt"], np.int32),
                max_tokens=row["max_tokens"],
                stop_token_ids=(END_OF_TEXT,),
                ignore_eos=True,
                detokenize=False,
                priority=row["priority"],
                slo=row["slo"],
                is_latency_sensitive=row["is_latency_sensitive"],
                type_info=row["type_info"],
                tenant=row["tenant"],
                block_hashes=np.frombuffer(hashes if self._has_hashes else b"", np.uint8),
                cache_salt=str(number),
            ),
            row["queued"],
        )
        if is_aborted:
            self.replica.abort_at(max(row["ended"], row["queued"]), (0, rid))

    def _note(self, replica: int, ends: Any) -> None:
        for end in ends:
            found = self._rows.pop(end.sequence.key[1], None)
            if found is not None:
                number, row = found
                self.ended[number] = self._judge(row, end)

    def _judge(self, row: dict[str, Any], end: End) -> tuple[float | None, bool | None]:
        sequence: Sequence = end.sequence
        is_whole = end.reason in ("stop", "length")
        kept = self.told.add(row, sequence.first_token, sequence.last_token, is_whole)
        return sequence.scheduled, kept

    @staticmethod
    def statistics(lanes: Rows[_Lane]) -> dict[str, Any] | None:
        """Of the lanes of one policy, one for each replica; None if there is none yet."""
        if not lanes:
            return None
        counts = [lane.replica.scheduler.statistics() for lane in lanes]
        return {
            "policy": lanes[-1].name,
            **_Told.of(lane.told for lane in lanes).statistics(),
            **{
                name: sum(getattr(each, name) for each in counts)
                for name in ("num_steps", "num_preemptions", "num_rejected")
            },
        }


class _Replica:
    """What is known of one replica: its requests that wait to be simulated, and its two simulations."""

    def __init__(self, model: StepModel) -> None:
        self.model = model
        self.pending: list[tuple[float, int, dict[str, Any]]] = []
        self.lanes: tuple[_Lane, _Lane] | None = None
        self.live = _Told()
        self.simulated_until = -math.inf
        self.now = math.nan
        self.oldest: float | None = None
        self.active: tuple[str, str | None] | None = None
        self.last_step = self.num_left_out = self.num_dropped = self._number = 0

    @property
    def is_ready(self) -> bool:
        """Whether it is known what a step takes."""
        return not isinstance(self.model, LearnedModel) or self.model.is_ready

    @property
    def lag_s(self) -> float | None:
        return None if self.simulated_until == -math.inf else max(0.0, self.now - self.simulated_until)

    def take(self, answer: dict[str, Any]) -> None:
        self.now, self.oldest, self.num_dropped = answer["now"], answer["oldest"], answer["num_dropped"]
        active = answer["policy"]["scheduling"], answer["policy"]["admission"]
        if active != self.active:  # at the first look, and after `set_policy`: what was before is of another policy
            self.active = active
            self.lanes = None
            self.live = _Told()
        for values in answer["rows"]:
            row = dict(zip(COLUMNS, values, strict=True))
            if row["reason"] == "error" or len(self.pending) >= MAX_PENDING or row["queued"] < self.simulated_until:
                self.num_left_out += 1
                continue
            self._number += 1
            heapq.heappush(self.pending, (row["queued"], self._number, row))

    def submit_next(self) -> None:
        """To both simulations, which have come to the time at which it came."""
        assert self.lanes is not None
        _, number, row = heapq.heappop(self.pending)
        if not all(lane.has_room for lane in self.lanes):
            self.num_left_out += 1
            return
        for lane in self.lanes:
            lane.submit(number, row)
        self.live.add(row, row["first_token"], row["last_token"], row["reason"] in ("stop", "length"))

    def statistics(self) -> dict[str, Any]:
        own, shadow = ([], []) if self.lanes is None else ([self.lanes[0]], [self.lanes[1]])
        return {
            "live": self.live.statistics(),
            "own": _Lane.statistics(own),
            "shadow": _Lane.statistics(shadow),
            "lag_s": self.lag_s,
            "num_pending": len(self.pending),
        }


class Shadow:
    """See the module docstring. All methods may be called from any thread.

    Arguments:
        llm: an `AsyncLLM` or `LLM` of this process that has started.
        policy: a scheduling policy by name, or "module:Class".
        admission: an admission policy likewise; None: none.
        step_model: what steps take; None: the engine's own (`step_model=`), or what is learned of its steps.
        budget: the share of one core that the simulation may take, above 0 and at most 1.
        interval_s: between two looks at the engine.

    Raises ConfigError for an argument that has no such value, and while the engine has another one; EngineError for an engine of
    another process.
    """

    def __init__(
        self,
        llm: Any,
        policy: str,
        admission: str | None = None,
        *,
        step_model: StepModel | None = None,
        budget: float = 0.05,
        interval_s: float = 0.5,
    ) -> None:
        for name, value, most in (("budget", budget, 1.0), ("interval_s", interval_s, threading.TIMEOUT_MAX)):
            if isinstance(value, bool) or not isinstance(value, int | float) or not 0 < value <= most:
                raise ConfigError(f"shadow: {name}={shown(value)} must be a number above 0 and at most {most:g}")
        for name, path in (("policy", policy), ("admission", admission)):
            if not isinstance(path, str) and (path is not None or name == "policy"):
                raise ConfigError(f"shadow: {name}={shown(path)} must be the name of a policy or 'module:Class'")
        engine: Engine = llm._engine
        config = engine.config
        if engine.stepper is not None:
            raise ConfigError("a shadow policy needs an engine on a thread of its own; LLMEngine steps on the caller's")
        if "shadow" in engine.watchers:
            raise ConfigError("this engine has a shadow policy, which is told its requests; close that one first")
        load_policies(policy, admission)
        given = config.scheduler.step_model
        self._model: StepModel | None = step_model or (None if given is None else from_json(given))
        self._engine = engine
        self._names = policy, admission
        self._budget, self._interval_s = budget, interval_s
        self._lock = threading.Lock()
        self._replicas: dict[int, _Replica] = {}
        self._cpu_s = 0.0
        self._began = time.monotonic()
        self._num_started = {"sooner": 0, "later": 0, "alike": 0}
        self._num_kept_by_one = {"own": 0, "shadow": 0}
        self._examples: deque[dict[str, Any]] = deque(maxlen=MAX_TOLD)
        self.failure: str | None = None
        """Why it goes on no more."""
        self._is_over = threading.Event()
        self._thread = threading.Thread(target=self._run, name="shadow policy", daemon=True)
        engine.watchers["shadow"] = self.statistics
        self._thread.start()

    def close(self) -> None:
        """Let the engine keep nothing any more. Idempotent; the statistics stay."""
        self._is_over.set()
        self._thread.join()
        if self._engine.watchers.get("shadow") == self.statistics:  # not that of a later one
            del self._engine.watchers["shadow"]

    def __enter__(self) -> Shadow:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    # The thread

    def _run(self) -> None:
        try:
            while not self._is_over.wait(self._interval_s):
                self._look()
        except ActorLLMError as error:  # the engine has ended
            self.failure = f"{type(error).__name__}: {error}"
        except (Exception, SystemExit) as error:  # of a policy of the user's own: anything; the engine goes on
            self.failure = f"policy {self._names[0]!r} in the shadow: {type(error).__name__}: {error}"
        with contextlib.suppress(ActorLLMError):
            if self._engine.is_running:
                self._ask("request_log", is_on=False)

    def _ask(self, verb: str, **arguments: Any) -> Any:
        return self._engine.ask_scheduler(verb, timeout=math.inf, **arguments).result()

    def _look(self) -> None:
        """Take what the engine tells, and simulate as far as it is known."""
        answer = self._ask("request_log", is_on=True)
        answers: dict[int, Any] = {0: answer} if "rows" in answer else answer
        with self._lock:
            self._replicas = {number: self._replicas.get(number) or self._new() for number in sorted(answers)}
        self._learn()
        for number, replica in self._replicas.items():
            with self._lock:
                replica.take(answers[number])
            if replica.is_ready:
                self._simulate(replica)

    def _new(self) -> _Replica:
        return _Replica(LearnedModel() if self._model is None else self._model)

    def _learn(self) -> None:
        """What the steps of each replica took since the last look."""
        if self._model is not None:
            return
        after = {number: replica.last_step for number, replica in self._replicas.items()}
        rows: dict[int, list[list[float]]] = {number: [] for number in after}
        for row in self._engine.look(after, at_most=0).result()["steps"]:
            number = int(row[STEP_COLUMNS]) if len(row) > STEP_COLUMNS else 0
            if number in rows:
                rows[number].append(row[:STEP_COLUMNS])
        for number, steps in rows.items():
            replica = self._replicas[number]
            assert isinstance(replica.model, LearnedModel)
            replica.model.observe(steps)
            replica.last_step = int(steps[-1][0]) if steps else replica.last_step

    def _simulate(self, replica: _Replica) -> None:
        """Up to the oldest request that is not known yet."""
        until = replica.now if replica.oldest is None else replica.oldest
        if replica.lanes is None and replica.active is not None:
            config, model = self._engine.config, replica.model
            replica.lanes = _Lane(config, *replica.active, model), _Lane(config, *self._names, model)
        while replica.pending and replica.pending[0][0] < until and not self._is_over.is_set():
            self._advance(replica, replica.pending[0][0])
            with self._lock:
                replica.submit_next()
        self._advance(replica, until)

    def _advance(self, replica: _Replica, until: float) -> None:
        """Run both simulations up to a time, no faster than the budget allows."""
        lanes = replica.lanes
        assert lanes is not None
        at = max(replica.simulated_until, min(lane.replica.next_event_at for lane in lanes))
        while at < until and not self._is_over.is_set():
            at = min(until, at + SLICE_S)
            began = time.thread_time()
            with self._lock:
                for lane in lanes:
                    lane.replica.run_until(at)
                self._compare(lanes)
            took = time.thread_time() - began
            self._cpu_s += took
            at = max(at, min(until, min(lane.replica.next_event_at for lane in lanes)))
            self._is_over.wait(took / self._budget - took)
        replica.simulated_until = until

    def _compare(self, lanes: tuple[_Lane, _Lane]) -> None:
        """Requests that have ended in both simulations."""
        own, other = (lane.ended for lane in lanes)
        for number in [number for number in own if number in other]:
            (at, kept), (other_at, other_kept) = own.pop(number), other.pop(number)
            moved = (math.inf if other_at is None else other_at) - (math.inf if at is None else at)
            key = "alike" if math.isnan(moved) or abs(moved) < 1e-3 else "later" if moved > 0 else "sooner"
            self._num_started[key] += 1
            if kept is not other_kept and None not in (kept, other_kept):
                by = "own" if kept else "shadow"
                self._num_kept_by_one[by] += 1
                self._examples.append({"number": number, "kept_by": by, "starts_later_by_s": moved})

    # What it found

    def statistics(self) -> dict[str, Any]:
        """Also `llm.stats()["shadow"]`.

        live: as measured; own, shadow: as simulated; decisions: how many requests the shadow starts sooner and later than the
        engine's own policy does, and whose promise only one of them keeps. lag_s: how far the simulation is behind.
        With several replicas these are sums, and `replicas` has each of them.
        """
        with self._lock:
            replicas = self._replicas
            lanes = [replica.lanes for replica in replicas.values() if replica.lanes is not None]
            lags = [replica.lag_s for replica in replicas.values() if replica.lag_s is not None]
            elapsed = time.monotonic() - self._began
            return {
                "policy": self._names[0],
                "admission": self._names[1],
                "step_model": LearnedModel.name if self._model is None else self._model.name,
                "live": _Told.of(replica.live for replica in replicas.values()).statistics(),
                "own": _Lane.statistics([own for own, _ in lanes]),
                "shadow": _Lane.statistics([shadow for _, shadow in lanes]),
                "decisions": {
                    "num_started": dict(self._num_started),
                    "num_kept_by_one": dict(self._num_kept_by_one),
                    "examples": list(self._examples),
                },
                "lag_s": max(lags, default=None),
                "num_pending": sum(len(replica.pending) for replica in replicas.values()),
                "num_left_out": sum(replica.num_left_out + replica.num_dropped for replica in replicas.values()),
                "cpu_s": self._cpu_s,
                "cpu_share": self._cpu_s / elapsed if elapsed else 0.0,
                "failure": self.failure,
                "replicas": {number: replica.statistics() for number, replica in replicas.items()},
            }

    def report(self) -> str:
        """A table of the same."""
        told = self.statistics()
        lines = [
            f"{'':24}{'REQUESTS':>10}{'TPOT':>9}{'DEADLINE':>10}{'TTFT':>10}{'E2E':>10}{'PREEMPTED':>11}{'REJECTED':>10}"
        ]
        for title, one in (("measured", told["live"]), ("own, simulated", told["own"]), ("shadow", told["shadow"])):
            if one is None:
                continue
            promised = one["num_promised"]
            shares = [f"{one['num_kept'][reading] / promised:.1%}" if promised else "-" for reading in READINGS]
            name = title if "policy" not in one else f"{one['policy']} ({title})"
            counts = [str(one[key]) if key in one else "" for key in ("num_preemptions", "num_rejected")]
            lines.append(
                f"{name:24.24}{one['num_ended']:>10}{shares[0]:>9}{shares[1]:>10}"
                f"{one['mean_ttft_s']:>8.3f} s{one['mean_e2e_s']:>8.3f} s{counts[0]:>11}{counts[1]:>10}"
            )
        started, kept = told["decisions"]["num_started"], told["decisions"]["num_kept_by_one"]
        lines.append(
            f"the shadow starts {started['sooner']} requests sooner, {started['later']} later, {started['alike']} alike; "
            f"{kept['shadow']} promises only it would keep, {kept['own']} only the engine's own policy"
        )
        lines.append(
            f"{told['num_left_out']} requests left out; {told['cpu_share']:.2%} of a core; step times: {told['step_model']}"
        )
        return "\n".join(lines)
