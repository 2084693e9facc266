"""Workloads of sessions: conversations with think time, and agents whose tools take time.

    workload = conversations(10_000, rate=4.0, seed=1)   # of requests; sessions begin as Poisson arrivals
    workload = agents(10_000, rate=4.0, seed=1)          # longer, with calls of tools that go on at the same time

The prompt of a turn is the prompt and the output of the turn before it, and what is new (`turns.Turns`). A session ends before it
is longer than `longest` tokens.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, replace

import numpy as np

from actorllm.errors import InvalidParameterError
from actorllm.messages import F64
from actorllm.slo.turns import Turns
from actorllm.slo.workload import Workload, make_workload, seed_stream

Z99 = 2.3263478740408408
"""The 99th percentile of a standard normal distribution."""


@dataclass(frozen=True, slots=True)
class SessionShape:
    """What sessions are like. Pairs are (median, 99th percentile) of a lognormal distribution."""

    mean_turns: float = 4.0
    """Of a geometric distribution; at least 1."""
    first_prompt: tuple[float, float] = (400, 3000)
    """Tokens."""
    new_tokens: tuple[float, float] = (60, 800)
    """Of each later turn, besides what was said before."""
    output: tuple[float, float] = (180, 900)
    think_s: tuple[float, float] = (12.0, 120.0)
    """Seconds from the end of a turn to the next one."""
    branching: float = 0.0
    """The share of turns after which `width` requests go on at once; the turn after these waits for all of them."""
    width: int = 3
    longest: int = 16_384
    """Tokens of a prompt with its output."""

    def __post_init__(self) -> None:
        if not (math.isfinite(self.mean_turns) and self.mean_turns >= 1):
            raise InvalidParameterError(f"mean_turns={self.mean_turns!r} must be a number, 1 or more")
        for name in ("first_prompt", "new_tokens", "output", "think_s"):
            median, p99 = getattr(self, name)
            if not 0 < median <= p99 < math.inf:
                raise InvalidParameterError(f"{name}: median={median} must be positive and at most p99={p99}")
        if not 0 <= self.branching <= 1:
            raise InvalidParameterError(f"branching={self.branching!r} must be a share, 0 to 1")
        if self.width < 2:
            raise InvalidParameterError(f"width={self.width!r} must be at least 2")
        if self.longest < 2:
            raise InvalidParameterError(f"longest={self.longest!r} must be at least 2 tokens")


CONVERSATIONS = SessionShape()
AGENTS = SessionShape(
    mean_turns=9.0,
    first_prompt=(2500, 9000),
    new_tokens=(350, 4000),
    output=(120, 800),
    think_s=(1.5, 30.0),
    branching=0.15,
    longest=32_768,
)


def conversations(num: int, rate: float, *, seed: int = 0, shape: SessionShape = CONVERSATIONS) -> Workload:
    """So many requests in sessions, at a rate of requests per second; the last sessions are cut off."""
    return _sessions(num, rate, seed, shape, "sessions")


def agents(num: int, rate: float, *, seed: int = 0, shape: SessionShape = AGENTS) -> Workload:
    """As `conversations`: agents, whose tools answer sooner than people, with more, and several at a time."""
    return _sessions(num, rate, seed, shape, "agents")


SESSION_WORKLOADS = {"sessions": conversations, "agents": agents}
"""By the names that the command line has for them."""


def _sessions(num: int, rate: float, seed: int, shape: SessionShape, name: str) -> Workload:
    if num < 1:
        raise InvalidParameterError(f"num={num!r} must be a number of requests, 1 or more")
    rng = seed_stream(seed, "sessions")
    parents: list[list[int]] = []
    prompts: list[int] = []
    outputs: list[int] = []
    think_s: list[float] = []
    begins: list[int] = []

    def draw(pair: tuple[float, float]) -> float:
        median, p99 = pair
        return float(median * math.exp(rng.standard_normal() * math.log(p99 / median) / Z99))

    def add(before: list[int], context: int, new: float, pause: float) -> int | None:
        """A turn; None if it would be longer than a session may be."""
        prompt = context + max(1, round(new))
        if prompt >= shape.longest:
            if before:
                return None
            prompt = shape.longest - 1
        parents.append(before)
        prompts.append(prompt)
        outputs.append(min(max(1, round(draw(shape.output))), shape.longest - prompt))
        think_s.append(pause)
        return len(prompts) - 1

    while len(prompts) < num:
        begins.append(len(prompts))
        turn = add([], 0, draw(shape.first_prompt), 0.0)
        for _ in range(int(rng.geometric(1 / shape.mean_turns)) - 1):
            if turn is None:
                break
            context = prompts[turn] + outputs[turn]
            is_branching = rng.random() < shape.branching
            width = shape.width if is_branching else 1
            calls = [add([turn], context, draw(shape.new_tokens), draw(shape.think_s)) for _ in range(width)]
            there = [call for call in calls if call is not None]
            if not is_branching or not there:
                turn = there[0] if there else None
                continue
            first = there[0]
            joined = sum(outputs[call] for call in there[1:])  # it reads what all of them said
            turn = add(there, prompts[first] + outputs[first], draw(shape.new_tokens) + joined, draw(shape.think_s))
    # Sessions begin as Poisson arrivals, whatever they are like: so the same seed gives the same sessions at any rate.
    arrival: F64 = np.zeros(len(prompts), np.float64)
    arrival[begins] = np.cumsum(seed_stream(seed, "arrivals").exponential(1.0, len(begins)))
    turns = Turns.of(parents, think_s)
    nominal = turns.nominal(arrival)
    order = np.argsort(nominal, kind="stable")
    lengths = np.array(prompts, np.int32)[order], np.array(outputs, np.int32)[order]
    made = replace(make_workload(nominal[order], lengths, name), turns=turns.select(order))
    return made.head(num).at_rate(rate)
