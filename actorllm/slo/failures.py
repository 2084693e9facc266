"""Failures in virtual time: what ends when, and how it goes on, with the scheduler of the engine.

    workers     the KV is gone, and what was computed since the last result; the same scheduler goes on from the known tokens
    scheduler   the KV is gone as well; a fresh scheduler and policy take the requests again, as a frontend sends them again
    replica     the whole engine is gone; its requests move to the other replicas, or wait for it where there is none

Each comes back after `down_s`. A script says when (`FailureEvent`), or rates do (`FailureRates`). `FailureDriver` makes them happen
between two events of the simulation. Pure.
"""

from __future__ import annotations

import heapq
import json
import math
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, fields, replace
from pathlib import Path
from typing import Any, Literal, NamedTuple, Protocol, get_args

import numpy as np

from actorllm.errors import ConfigError, nearest_name, shown
from actorllm.messages import Submit
from actorllm.scheduling.scheduler import Scheduler
from actorllm.scheduling.sequence import Key
from actorllm.scheduling.sequence import Sequence as Request
from actorllm.slo.workload import seed_stream

FailureKind = Literal["workers", "scheduler", "replica"]
KINDS: tuple[FailureKind, ...] = get_args(FailureKind)


def _check_number(name: str, value: object, *, is_positive: bool) -> None:
    is_number = isinstance(value, int | float) and not isinstance(value, bool) and math.isfinite(value)
    if not is_number or value < 0 or (is_positive and not value):  # type: ignore[operator]
        least = "more than 0" if is_positive else "0 or more"
        raise ConfigError(f"failure: {name}={shown(value)} must be a number of seconds, {least}")


def _check_kind(kind: object) -> None:
    if kind not in KINDS:
        raise ConfigError(
            f"failure: kind={shown(kind)} must be one of {', '.join(KINDS)}{nearest_name(str(kind), KINDS)}"
        )


@dataclass(frozen=True, slots=True)
class FailureEvent:
    """One failure. Raises ConfigError for values that make no sense."""

    at: float
    """Seconds from the start of the run."""
    kind: FailureKind = "workers"
    replica: int = 0
    down_s: float = 5.0
    """Until it is back."""

    def __post_init__(self) -> None:
        _check_kind(self.kind)
        _check_number("at", self.at, is_positive=False)
        _check_number("down_s", self.down_s, is_positive=True)
        if isinstance(self.replica, bool) or not isinstance(self.replica, int) or self.replica < 0:
            raise ConfigError(f"failure: replica={shown(self.replica)} must be the number of a replica, from 0")


@dataclass(frozen=True, slots=True)
class FailureRates:
    """Failures of each replica at random, independent of each other and of what came before (exponential times)."""

    mean_s: float
    """Between two failures of one replica, the time that it is down left out."""
    kind: FailureKind = "workers"
    down_s: float = 5.0

    def __post_init__(self) -> None:
        _check_kind(self.kind)
        _check_number("mean_s", self.mean_s, is_positive=True)
        _check_number("down_s", self.down_s, is_positive=True)

    def of_replica(self, number: int, seed: int) -> Iterator[FailureEvent]:
        """Without an end."""
        rng = seed_stream(seed, f"failures of replica {number}")
        at = 0.0
        while True:
            at += float(rng.exponential(self.mean_s))
            yield FailureEvent(at, self.kind, number, self.down_s)
            at += self.down_s


Failures = Sequence[FailureEvent] | FailureRates


def parse_failures(text: str) -> Failures:
    """`KIND:MEAN_S:DOWN_S`, such as workers:600:5; or the path of a JSON file with a list of failures.

    Raises ConfigError naming what is wrong.
    """
    if text.count(":") == 2 and not Path(text).exists():
        kind, mean_s, down_s = text.split(":")
        try:
            numbers = float(mean_s), float(down_s)
        except ValueError:
            raise ConfigError(f"failures={text!r:.80} must be KIND:MEAN_S:DOWN_S, such as workers:600:5") from None
        _check_kind(kind)
        return FailureRates(numbers[0], kind, numbers[1])  # type: ignore[arg-type]
    try:
        given = json.loads(Path(text).read_text())
    except OSError as error:
        raise ConfigError(
            f"failures={text!r:.80} must be KIND:MEAN_S:DOWN_S, such as workers:600:5, or a file: {error.strerror}"
        ) from error
    except ValueError as error:
        raise ConfigError(f"failures={text!r:.80} must be JSON: {error}") from error
    if not isinstance(given, list) or not all(isinstance(one, dict) for one in given):
        raise ConfigError(f"failures={text!r:.80} must be a list of objects, such as {{'at': 60, 'kind': 'workers'}}")
    known = [field.name for field in fields(FailureEvent)]
    for number, one in enumerate(given):
        for name in one:
            if name not in known:
                raise ConfigError(f"failures[{number}]: {name!r:.80} is not known{nearest_name(name, known)}")
        if "at" not in one:
            raise ConfigError(f"failures[{number}] needs 'at', in seconds from the start of the run")
    return [FailureEvent(**one) for one in given]


class FailureNote(NamedTuple):
    """What came of a failure."""

    at: float
    kind: FailureKind
    replica: int
    back_at: float
    num_requests: int
    """That were there, and go on or start later for it."""
    num_moved: int
    """To other replicas."""


class MortalReplica(Protocol):
    """What fails (`simulator.SimulatedReplica`)."""

    number: int
    scheduler: Scheduler

    def run_until(self, until: float) -> None: ...
    def submit(self, frontend: int, submit: Submit, now: float) -> None: ...
    def lose_workers(self, error: str, now: float, *, is_scheduler_lost: bool = False) -> None: ...
    def workers_are_back(self, now: float, scheduler: Scheduler | None = None) -> None: ...
    def take_out(self, key: Key, now: float) -> None: ...


class LostRequests:
    """What was known of requests that another scheduler takes over."""

    def __init__(self) -> None:
        self.first_scheduled: dict[int, float] = {}
        """By number, of those that had started: when they did so first."""
        self.num_preemptions: dict[int, int] = {}
        """Likewise: how often they had been preempted."""

    def as_sent_again(self, request: Request, scheduler: Scheduler) -> Submit:
        """As a frontend tells the next scheduler of a request."""
        row, submit = request.key[1], request.submit
        known = int(scheduler.batch.num_known[request.slot]) if request.slot >= 0 else int(request.known.size)
        if request.scheduled is not None:
            self.first_scheduled.setdefault(row, request.scheduled)
            self.num_preemptions[row] = self.num_preemptions.get(row, 0) + request.num_preemptions
        output = np.zeros(known - request.num_prompt, np.int32)
        return replace(
            submit, output=output, is_resumed=True, had_slot=request.has_started, first_token=request.first_token
        )


class FailureDriver(LostRequests):
    """See the module docstring.

    Arguments:
        failures: what happens.
        replicas: by number.
        restart: builds the scheduler of a replica anew.
        route: sends a request on to one of these replicas, as if it came now: (number, submit, replicas, at).
        seed: of the rates.

    Raises ConfigError for a replica that there is not.
    """

    def __init__(
        self,
        failures: Failures,
        replicas: Sequence[MortalReplica],
        restart: Callable[[int], Scheduler],
        route: Callable[[int, Submit, list[int], float], None],
        seed: int = 0,
    ) -> None:
        super().__init__()
        self.notes: list[FailureNote] = []
        self._replicas = replicas
        self._restart = restart
        self._route = route
        self._back: list[tuple[float, int, FailureKind]] = []
        self._down: dict[int, FailureKind] = {}
        self._held: dict[int, list[Submit]] = {}
        """By replica: what waits for its scheduler."""
        self._script: Iterator[FailureEvent]
        if isinstance(failures, FailureRates):
            each = [failures.of_replica(number, seed) for number in range(len(replicas))]
            self._script = heapq.merge(*each, key=lambda failure: failure.at)
        else:
            for failure in failures:
                if failure.replica >= len(replicas):
                    raise ConfigError(
                        f"failure: replica={failure.replica} is not there; there are {len(replicas)}, from 0 on"
                    )
            self._script = iter(sorted(failures, key=lambda failure: failure.at))
        self._next = next(self._script, None)

    @property
    def next_at(self) -> float:
        """When something fails or comes back next; infinity: never."""
        fails_at = math.inf if self._next is None else self._next.at
        return min(fails_at, self._back[0][0] if self._back else math.inf)

    @property
    def is_waiting(self) -> bool:
        """Something is down."""
        return bool(self._down)

    def up(self) -> list[int]:
        """The replicas that take requests: workers that are started again are waited for, schedulers are not."""
        return [r.number for r in self._replicas if self._down.get(r.number, "workers") == "workers"]

    def hold(self, number: int, submit: Submit) -> None:
        """A request waits for the scheduler of this replica."""
        self._held[number].append(submit)

    def apply(self) -> None:
        """Let happen what is next. All replicas have been run up to then, or are run here."""
        at = self.next_at
        for replica in self._replicas:
            replica.run_until(at)
        if self._back and self._back[0][0] == at:
            _, number, kind = heapq.heappop(self._back)
            del self._down[number]
            self._come_back(self._replicas[number], kind, at)
            return
        failure, self._next = self._next, next(self._script, None)
        assert failure is not None
        if failure.replica not in self._down:  # what is down does not fail
            self._fail(self._replicas[failure.replica], failure)

    def _fail(self, replica: MortalReplica, failure: FailureEvent) -> None:
        at, number = failure.at, replica.number
        alive = list(replica.scheduler.alive())
        moved = 0
        replica.lose_workers(
            f"{failure.kind} failed in the simulation", at, is_scheduler_lost=failure.kind != "workers"
        )
        self._down[number] = failure.kind
        heapq.heappush(self._back, (at + failure.down_s, number, failure.kind))
        if failure.kind != "workers":
            self._held[number] = []
            submits = [self.as_sent_again(one, replica.scheduler) for one in alive]
            others = [other for other in self.up() if other != number]
            if failure.kind == "replica" and others:
                moved = len(submits)
                for submit in submits:
                    self._route(submit.rid, submit, others, at)
            else:
                self._held[number] += submits
        back_at = at + failure.down_s
        self.notes.append(FailureNote(at, failure.kind, number, back_at, len(alive), moved))

    def _come_back(self, replica: MortalReplica, kind: FailureKind, at: float) -> None:
        fresh = None if kind == "workers" else self._restart(replica.number)
        replica.workers_are_back(at, fresh)
        for submit in self._held.pop(replica.number, ()):
            replica.submit(0, submit, at)

    def told(self) -> list[str]:
        """For the warnings of a run."""
        if not self.notes:
            return []
        requests, moved = (sum(getattr(note, name) for note in self.notes) for name in ("num_requests", "num_moved"))
        return [f"{len(self.notes)} failures met {requests} requests, of which {moved} moved to other replicas"]


def check_failures(failures: Any, autoscaler: object, rescheduling: object) -> None:
    """Raises ConfigError unless it is what `simulate` takes."""
    if bool(failures) + (autoscaler is not None) + (rescheduling is not None) > 1:
        raise ConfigError("failures, an autoscaler and rescheduling are not simulated together; give one of them")
    if not isinstance(failures, FailureRates) and not all(isinstance(one, FailureEvent) for one in failures):
        raise ConfigError("failures must be FailureRates, or a list of FailureEvent")
