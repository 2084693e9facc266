"""Routers: which replica a request goes to. Pure: no clock, no I/O. The engine and the simulator run the same objects.

A router sees the replicas that take requests (`ReplicaView`) and the request (`Routable`), and names a replica. It is asked once
for each request, all of its sequences together, and once for each request that moves. A view has counted what was sent since it
was taken, so a router keeps no load of its own. `make_router` knows them by name; `module:Class` is a router of the
application's own, built without arguments.
"""

from __future__ import annotations

import importlib
import inspect
import math
import operator
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import lru_cache
from operator import itemgetter
from typing import NamedTuple, Protocol

import numpy as np

from actorllm.errors import ConfigError, nearest_name, shown
from actorllm.types.import_path import is_import_path
from actorllm.types.objective import SLO
from actorllm.types.roles import Role

MAX_REPLICAS = 64
"""Of one engine."""
HASH_BYTES = 32
"""Of one block in `Routable.block_hashes`."""
VIEW_AGE_S = 0.005
"""How old views may be that routers are given, in seconds. What was sent since is counted in them."""

StepSeconds = Callable[[float, float, float], float]
"""What a step of so many prompt tokens and decode rows takes, which attend to so many tokens of context."""


@dataclass(frozen=True, slots=True)
class LinearSteps:
    """What steps take, as a sum: fixed, for a prompt token, for a decode row, for a token of context. In seconds."""

    weights: tuple[float, float, float, float]

    def __call__(self, num_prompt: float, num_rows: float, num_context: float) -> float:
        fixed, prompt, decode, context = self.weights
        seconds = fixed + prompt * num_prompt + decode * num_rows + context * num_context
        return seconds if seconds > 0.0 else 0.0


class LearntSteps(NamedTuple):
    """What a replica has learnt of its steps."""

    weights: tuple[float, ...]
    """As of LinearSteps. Each alone may be far off, even negative: rows and context come and go together."""
    rates: tuple[float, ...]
    """Means of what its last steps did in a second: steps, prompt tokens, decode rows, tokens of context."""


SAME_SPEED = 1.4
"""Replicas whose speeds differ by less, as a factor, are taken to be equally quick (`steps_alike`)."""


def steps_alike(learnt: Sequence[LearntSteps]) -> list[LinearSteps]:
    """What steps of replicas of one model take: of one shape, the mean of what they have learnt, each at its own speed.

    With weights of its own, a replica would seem to be quick at what it has seldom done. A burst would go there, for the errors of
    weights are large beside what a short prompt takes. The speed is what its last steps took, as a multiple of that shape.

    Speeds of equal replicas differ too, by what else a machine does. A replica that ends its part of a burst first leaves its core
    to the other one, which then looks quicker, and is sent more of the next burst. So small differences do not count.
    """
    shape = [max(0.0, sum(column) / len(learnt)) for column in zip(*[one.weights for one in learnt], strict=True)]
    slowness = []
    for one in learnt:
        expected = sum(weight * rate for weight, rate in zip(shape, one.rates, strict=True))
        slowness.append(1.0 / expected if expected > 0.0 else 1.0)
    return [
        LinearSteps((shape[0] * times, shape[1] * times, shape[2] * times, shape[3] * times))
        for times in without_noise(slowness)
    ]


def without_noise(slowness: Sequence[float]) -> list[float]:
    """Of each group of replicas that are about equally quick, the mean. A group spans a factor of `SAME_SPEED` at most."""
    found = list(slowness)
    group: list[int] = []

    def close() -> None:
        mean = sum(slowness[at] for at in group) / len(group)
        for at in group:
            found[at] = mean

    for at in sorted(range(len(slowness)), key=slowness.__getitem__):
        if group and slowness[at] > SAME_SPEED * slowness[group[0]]:
            close()
            group.clear()
        group.append(at)
    if group:
        close()
    return found


@dataclass(slots=True)
class ReplicaView:
    """A replica that takes requests, as it was a moment ago, with what it was sent since."""

    number: int
    num_running: int = 0
    """Sequences that have had a token."""
    num_waiting: int = 0
    """Sequences that have had none."""
    num_waiting_tokens: int = 0
    """Prompt tokens that are to be computed."""
    num_context: int = 0
    """Tokens that the running sequences attend to."""
    num_free_blocks: int | None = None
    """Of the KV cache; None: not known."""
    block_size: int = 32
    """Tokens of a block."""
    max_num_batched_tokens: int = 2048
    """Of a step."""
    max_num_seqs: int = 256
    """Sequences that run at a time."""
    step_seconds: StepSeconds | None = None
    """None: not known yet."""
    find: Callable[[bytes], int] | None = None
    """How many blocks of a prompt its prefix cache has, by their hashes; None: not known, routers remember what they sent."""
    seen: float = 0.0
    """When it was like this, in seconds of the clock of its engine or of the simulated run."""
    role: Role | None = None
    """What it is for; None: everything."""
    is_on_trial: bool = False
    """It looks for the request that other schedulers died of, and holds back what is new."""

    @property
    def load(self) -> int:
        """Sequences that have not ended."""
        return self.num_running + self.num_waiting

    def add(self, request: Routable) -> None:
        """It was sent this request."""
        self.num_waiting += request.num_sequences
        self.num_waiting_tokens += request.num_prompt


@dataclass(frozen=True, slots=True)
class Routable:
    """A request, as a router sees it."""

    num_prompt: int
    """Tokens of the prompt."""
    block_hashes: bytes = b""
    """One hash of 32 bytes for each whole block of the prompt; each covers everything before its block, and the salt."""
    num_sequences: int = 1
    max_tokens: int = 0
    priority: int = 0
    slo: SLO | None = None


class Router(Protocol):
    """See the module docstring."""

    def route(self, request: Routable, views: Sequence[ReplicaView]) -> int:
        """The number of one of these replicas. views: at least one, in the order of their numbers."""
        ...


def number_of(answer: object, views: Sequence[ReplicaView]) -> int:
    """The replica that a router names, also by an integer of NumPy. views: those that it was shown.

    Raises ValueError: it is none of them.
    """
    try:
        number = operator.index(answer)  # type: ignore[arg-type]
    except TypeError:
        number = -1
    if not any(view.number == number for view in views):
        known = ", ".join(str(view.number) for view in views)
        raise ValueError(f"route() returned {shown(answer)}; return the number of a replica in views: {known}")
    return number


class RoundRobin:
    """One after the other."""

    needs_views = False

    def __init__(self, seed: int = 0) -> None:
        self._last = -1

    def route(self, request: Routable, views: Sequence[ReplicaView]) -> int:
        self._last = next((view.number for view in views if view.number > self._last), views[0].number)
        return self._last


class LeastLoad:
    """Where the fewest sequences run and wait; of equals, the one that was chosen least recently."""

    def __init__(self, seed: int = 0) -> None:
        self._turn = 0
        self._chosen: dict[int, int] = {}

    def route(self, request: Routable, views: Sequence[ReplicaView]) -> int:
        return self.choose(self.least(views).number)

    def least(self, views: Sequence[ReplicaView]) -> ReplicaView:
        """The least loaded one."""
        return min(views, key=lambda view: (view.load, self.order(view)))

    def order(self, view: ReplicaView) -> int:
        """When it was chosen last, among others."""
        return self._chosen.get(view.number, 0)

    def choose(self, number: int) -> int:
        """Note that this one was chosen now."""
        self._turn += 1
        self._chosen[number] = self._turn
        return number


class PowerOfTwo:
    """The less loaded of two drawn at random (Mitzenmacher 2001): nearly as good, and stale views do less harm."""

    def __init__(self, seed: int = 0) -> None:
        self._draws = np.random.default_rng(seed)

    def route(self, request: Routable, views: Sequence[ReplicaView]) -> int:
        drawn: list[int] = self._draws.integers(0, len(views), 2).tolist()
        less = min((views[at] for at in drawn), key=lambda view: view.load)
        return less.number


@lru_cache(maxsize=1024)
def looked_at(num_blocks: int) -> tuple[int, ...]:
    """Which blocks of so many routers look at: all of the first, then every fourth, then every sixteenth.

    Long prompts cost little so, and the same blocks of two prompts are looked at, whatever their lengths are.
    """
    return (*range(min(num_blocks, 16)), *range(19, min(num_blocks, 128), 4), *range(143, num_blocks, 16))


@lru_cache(maxsize=1024)
def words_looked_at(num_blocks: int) -> Callable[[memoryview], tuple[int, ...]]:
    """Gets the first word of each of their hashes, of the words of 8 bytes that all hashes of the prompt are."""
    indices = [at * HASH_BYTES // 8 for at in looked_at(num_blocks)]
    if len(indices) > 1:
        return itemgetter(*indices)
    return lambda words: tuple(words[at] for at in indices)


class SentPrefixes:
    """Which replicas were sent which beginnings of prompts. What was evicted there it does not know.

    A beginning is known by the first 8 bytes of its hash: a collision costs a longer prefill, and nothing else.
    """

    max_beginnings = 65_536
    """So many are remembered; then the oldest are forgotten."""
    least_s = 1.0
    """How long what was sent counts at least, for a router that forgets what has been computed (`forget_old`)."""

    def __init__(self) -> None:
        self._replicas: dict[int, int] = {}  # a bit for each replica
        self._older: dict[int, int] = {}
        self._lifetime_s = self.least_s
        self._turns_at = math.inf

    @staticmethod
    def keys(request: Routable) -> tuple[int, ...]:
        """Those of the beginnings of the prompt that are looked at, the shortest first (`looked_at`)."""
        hashes = request.block_hashes
        return words_looked_at(len(hashes) // HASH_BYTES)(memoryview(hashes).cast("Q"))

    def find(self, keys: Sequence[int], num_blocks: int) -> dict[int, int]:
        """How many blocks of a prompt each replica was sent before; of the others it is 0. num_blocks: of the prompt."""
        found: dict[int, int] = {}
        known, older = self._replicas, self._older
        alive = known.get(keys[0], 0) | older.get(keys[0], 0) if keys else 0
        if not alive:
            return found
        lengths = looked_at(num_blocks)
        if known.get(keys[-1], 0) | older.get(keys[-1], 0) == alive:  # all of them had all of it
            self._note(found, alive, lengths[-1] + 1)
            return found
        length = 0
        for at, key in zip(lengths, keys, strict=True):
            still = alive & (known.get(key, 0) | older.get(key, 0))
            if still != alive:
                self._note(found, alive & ~still, length)
            alive, length = still, at + 1
            if not alive:
                return found
        self._note(found, alive, length)
        return found

    @staticmethod
    def _note(found: dict[int, int], bits: int, num_blocks: int) -> None:
        while bits:
            lowest = bits & -bits
            found[lowest.bit_length() - 1] = num_blocks
            bits ^= lowest

    def add(self, keys: Sequence[int], number: int) -> None:
        """A replica was sent this prompt."""
        known, bit = self._replicas, 1 << number
        if not keys or known.get(keys[-1], 0) & bit:
            return  # so it was, not long ago
        for key in keys:
            known[key] = known.get(key, 0) | bit
        while len(known) > self.max_beginnings:
            del known[next(iter(known))]

    def forget(self, number: int) -> None:
        """A replica lost its cache."""
        for known in (self._replicas, self._older):
            for key in known:
                known[key] &= ~(1 << number)

    def expect(self, wait_s: float) -> None:
        """What is sent now will be computed in so many seconds."""
        self._lifetime_s = max(self._lifetime_s, 2 * wait_s)

    def forget_old(self, at: float) -> None:
        """Forget what was sent so long ago that it has been computed by now, or never will be. at: in seconds."""
        if self._turns_at == math.inf:
            self._turns_at = at + self._lifetime_s
        elif at >= self._turns_at:
            self._older, self._replicas = self._replicas, {}
            self._turns_at = at + self._lifetime_s
            self._lifetime_s = self.least_s


class PrefixAware(LeastLoad):
    """To the replica that was sent the longest part of the prompt's beginning, unless it is much busier than the least busy one.

    As the router of SGLang does.
    """

    imbalance = 1.5
    slack = 4
    """Too busy: a load over imbalance times the least one, plus slack."""

    def __init__(self, seed: int = 0) -> None:
        super().__init__()
        self._sent = SentPrefixes()

    def route(self, request: Routable, views: Sequence[ReplicaView]) -> int:
        keys = self._sent.keys(request)
        found = self._sent.find(keys, len(request.block_hashes) // HASH_BYTES)
        least = self.least(views)
        limit = self.imbalance * least.load + self.slack
        homes = [view for view in views if found.get(view.number, 0) and view.load <= limit]
        chosen = max(homes, key=lambda view: (found[view.number], -view.load, -self.order(view)), default=least)
        self._sent.add(keys, chosen.number)
        return self.choose(chosen.number)

    def forget(self, number: int) -> None:
        """A replica lost its cache."""
        self._sent.forget(number)


class Seconds(LeastLoad):
    """Where the first token is soonest, in seconds that are predicted from the replica's own step times.

    The wait is that for the steps which compute the prompts before this one, and what of this one no cache has; then that for
    free blocks. What a request has computed delays others that come after it, so that time counts as well (`later`). Of the
    replicas that keep the promise of a request, it takes the one with the least to compute: that keeps caches warm, and the
    quicker ones free for tighter requests. Cached tokens, queues and promises are in one unit. As long as some replica's step
    times are not known, all waits are counted in tokens.

    A cache has what its replica says (`ReplicaView.find`), and what was sent there and is not computed yet. Where replicas do
    not say, it is all that was sent.
    """

    later = 2.0
    """How long work delays later requests in all, as a multiple of itself: load / (1 - load) in a queue, at two thirds."""
    row_tokens = 16.0
    """What a decode row counts while step times are not known, in prompt tokens."""

    def __init__(self, seed: int = 0) -> None:
        super().__init__()
        self._sent = SentPrefixes()

    def route(self, request: Routable, views: Sequence[ReplicaView]) -> int:
        keys = self._sent.keys(request)
        if None not in [view.find for view in views]:
            self._sent.forget_old(views[0].seen)
        num_blocks = len(request.block_hashes) // HASH_BYTES
        sent = self._sent.find(keys, num_blocks)
        has_times = None not in [view.step_seconds for view in views]
        has_promise = has_times and request.slo is not None
        best: tuple[float, ...] = (math.inf,)
        best_wait, later, costs_s = 0.0, self.later, self.costs_s
        number, num_prompt, hashes, chosen = views[0].number, request.num_prompt, request.block_hashes, self._chosen
        for view in views:
            candidate, find = view.number, view.find
            num_found = sent.get(candidate, 0) if sent else 0
            if num_found < num_blocks and find is not None and (in_cache := find(hashes)) > num_found:
                num_found = in_cache
            num_new = num_prompt - num_found * view.block_size
            if num_new < 1:
                num_new = 1
            if has_times:
                wait, work = costs_s(view, num_new)
            else:
                wait, work = self._wait_tokens(view, num_new), 0.0
            # First those that keep the promise, by what they have to compute; without a promise, all by their wait.
            if has_promise and self._keeps(request, view, wait):
                key: tuple[float, ...] = (0.0, num_new, wait, chosen.get(candidate, 0))
            else:
                key = (1.0, wait + later * work, num_new, chosen.get(candidate, 0))
            if key < best:
                best, number, best_wait = key, candidate, wait
        if has_times:
            self._sent.expect(best_wait)
        self._sent.add(keys, number)
        return self.choose(number)

    def forget(self, number: int) -> None:
        """A replica lost its cache."""
        self._sent.forget(number)

    def _wait_tokens(self, view: ReplicaView, num_new: int) -> float:
        return view.num_waiting_tokens + num_new + self.row_tokens * view.num_running

    @staticmethod
    def costs_s(view: ReplicaView, num_new: int) -> tuple[float, float]:
        """Until a replica whose step times are known has computed so many tokens more; and how much of that is theirs."""
        seconds, rows, num_context = view.step_seconds, view.num_running, view.num_context
        assert seconds is not None
        room = view.max_num_batched_tokens - rows
        if room < 1:
            room = 1
        num_tokens = view.num_waiting_tokens + num_new
        full_step = seconds(room, rows, num_context)
        rest = num_tokens % room
        wait = num_tokens // room * full_step
        if rest:
            wait += seconds(rest, rows, num_context)
        if rows and (num_free := view.num_free_blocks) is not None:
            missing = -(-num_tokens // view.block_size) - num_free
            if missing > 0:  # until rows have ended; each is about as long as the mean
                tokens = missing * view.block_size / max(1.0, num_context / rows)
                wait += tokens * seconds(0, rows, num_context)
        return wait, num_new / room * full_step

    @staticmethod
    def _keeps(request: Routable, view: ReplicaView, wait_s: float) -> bool:
        """Whether a promise is kept here, as far as it is one of first tokens and of pauses."""
        slo = request.slo
        if slo is None or view.step_seconds is None:
            return False
        if wait_s > slo.ttft_limit(request.num_prompt):
            return False
        step_s = view.step_seconds(0, view.num_running + 1, view.num_context + request.num_prompt)
        return not (slo.tpot is not None and step_s > slo.tpot)


ROUTERS: dict[str, Callable[[int], Router]] = {
    "seconds": Seconds,
    "round-robin": RoundRobin,
    "least-load": LeastLoad,
    "power-of-two": PowerOfTwo,
    "prefix-aware": PrefixAware,
}
DEFAULT_ROUTER = "seconds"


def make_router(name: str, seed: int = 0) -> Router:
    """The router of this name, or of this path 'module:Class'. seed: of those that draw.

    Raises ConfigError with the nearest name, or the reason.
    """
    if is_import_path(name):
        module, _, cls = name.partition(":")
        try:
            router = getattr(importlib.import_module(module), cls)()
        except Exception as error:  # of the application's own code, at the start: the caller is told
            raise ConfigError(f"router={name!r} cannot be made: {type(error).__name__}: {error}") from error
        if not callable(getattr(router, "route", None)):
            raise ConfigError(f"router={name!r} has no method route(request, views)")
        if inspect.iscoroutinefunction(router.route):
            raise ConfigError(f"router={name!r} has an async route(); nothing awaits it, so write `def route`")
        made: Router = router
        return made
    if name not in ROUTERS:
        known = ", ".join(map(repr, ROUTERS))
        raise ConfigError(f"router={name!r} is none of {known} and no 'module:Class'{nearest_name(name, ROUTERS)}")
    return ROUTERS[name](seed)
