"""How long calls take on a GPU: from CUDA events around replays of a graph, so that Python is not in it.

A `Bench` is what every stage gets: the device, a clock, and whether this is only a walk through the script on a CPU, in which
sizes are tiny and no time means anything.
"""

from __future__ import annotations

import gc
import math
import statistics
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch

Call = Callable[[], Any]

ROUNDS = 15
MIN_GRAPH_S = 0.0015
"""A graph shorter than this is measured with its calls in it several times over: events tell half a microsecond."""


@dataclass(frozen=True)
class Bench:
    """device: where tensors go. is_check: on a CPU, in Triton's interpreter, in tiny sizes.

    only: of `capabilities`, the cases whose names have one of these parts; empty: all.
    """

    device: torch.device
    is_check: bool
    only: tuple[str, ...] = ()

    @property
    def pdl(self) -> bool:
        """Whether kernels are launched as dependents of each other; the interpreter cannot."""
        return not self.is_check

    @property
    def chip(self) -> str:
        """The name of the GPU."""
        return "" if self.is_check else str(torch.cuda.get_device_name())

    def pick(self, real: Any, tiny: Any) -> Any:
        """The sizes of this run."""
        return tiny if self.is_check else real

    def seconds(self, calls: Sequence[Call] | Call) -> float:
        """The median time of one of the calls, all of them in one graph, one behind the other.

        Several calls on different data keep the second-level cache from holding what is to come from memory.
        """
        calls = [calls] if callable(calls) else list(calls)
        if self.is_check:
            began = time.perf_counter()
            calls[0]()
            return time.perf_counter() - began
        for call in calls:  # compiles, and lets libraries make their choices
            call()
        graph = captured(calls)
        total = statistics.median(replayed(graph, 3))
        if total < MIN_GRAPH_S:
            times = min(1000, max(1, round(MIN_GRAPH_S / max(total, 1e-6))))
            calls = calls * times
            graph = captured(calls)
        return statistics.median(replayed(graph, ROUNDS)) / len(calls)

    def eager_seconds(self, call: Call, rounds: int = ROUNDS, before: Call = lambda: None) -> float:
        """The same without a graph, one call a round: for what cannot be captured. before: comes first, and is not timed."""
        return statistics.median(self.samples(call, rounds, before))

    def samples(self, call: Call, rounds: int = ROUNDS, before: Call = lambda: None) -> list[float]:
        """The time of every round, behind one that is not counted."""
        self.once(call, before)
        return [self.once(call, before) for _ in range(1 if self.is_check else rounds)]

    def paired(self, ways: tuple[Call, Call], befores: tuple[Call, Call], rounds: int = ROUNDS) -> list[float]:
        """The second way's time by the first's, round by round; the order changes with every round, so that drift cancels."""
        for call, before in zip(ways, befores, strict=True):
            self.once(call, before)
        ratios = []
        for i in range(1 if self.is_check else rounds):
            times = {way: self.once(ways[way], befores[way]) for way in ((0, 1) if i % 2 == 0 else (1, 0))}
            ratios.append(times[1] / times[0])
        return ratios

    def once(self, call: Call, before: Call = lambda: None) -> float:
        """Seconds of one call."""
        before()
        if self.is_check:
            began = time.perf_counter()
            call()
            return time.perf_counter() - began
        torch.cuda.synchronize()
        start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        start.record()
        call()
        end.record()
        end.synchronize()
        return float(start.elapsed_time(end)) * 1e-3

    def synchronize(self) -> None:
        """Wait for the GPU. Raises where it is lost to this process, as it is after an illegal access."""
        if not self.is_check:
            torch.cuda.synchronize()

    def held_bytes(self) -> int:
        """Of the GPU's memory, by all programs."""
        if self.is_check:
            return 0
        free, total = torch.cuda.mem_get_info()
        return total - free

    def empty_cache(self) -> None:
        """Give back the memory of tensors that nothing holds, those that hold each other included."""
        gc.collect()
        if not self.is_check:
            torch.cuda.synchronize()
            torch.cuda.empty_cache()


def interval(samples: Sequence[float]) -> tuple[float, float]:
    """Between which two samples the median lies with 95 %, whatever the distribution."""
    ordered, count = sorted(samples), len(samples)
    below = max(0, int((count - 1.96 * math.sqrt(count)) / 2))
    return ordered[below], ordered[count - 1 - below]


def captured(calls: Sequence[Call]) -> Any:
    """A CUDA graph of the calls."""
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        for call in calls:
            call()
    graph.replay()
    torch.cuda.synchronize()
    return graph


def replayed(graph: Any, rounds: int) -> list[float]:
    """The time of every replay, seconds. One more goes before it: an idle GPU would wait for the launch between the events."""
    times = []
    for _ in range(rounds):
        start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        graph.replay()
        start.record()
        graph.replay()
        end.record()
        end.synchronize()
        times.append(start.elapsed_time(end) * 1e-3)
    return times
