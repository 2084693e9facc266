"""Step 8: a policy with an objective. Requests say when their first token is due, and a key orders them."""

from __future__ import annotations

from collections import deque
from dataclasses import dataclass

from step01_scheduler import Request, Row
from step02_blocks import PagedModel, streams_of
from step03_chunked_prefill import step_ms
from step05_prefix_cache import CachingScheduler


@dataclass(eq=False, kw_only=True)
class TimedRequest(Request):
    arrival: float
    ttft: float
    """The objective: ms from the arrival to the first token."""
    first_token: float = float("inf")

    @property
    def is_met(self) -> bool:
        return self.first_token <= self.arrival + self.ttft


class FirstComeFirstServed(CachingScheduler):
    def key(self, request: TimedRequest) -> float:
        """Lower is sooner."""
        return request.arrival

    def schedule(self) -> list[Row]:
        self.waiting = deque(sorted(self.waiting, key=self.key))
        self.running.sort(key=self.key)  # stable under step 3's sort, so decode rows still come first
        return super().schedule()


class EarliestDeadlineFirst(FirstComeFirstServed):
    def key(self, request: TimedRequest) -> float:
        return request.arrival + request.ttft


def some_requests() -> list[TimedRequest]:
    """Long prompts that may take a second, and short ones that are wanted at once."""
    long = [TimedRequest(f"long{i}", [i] * 200, 8, arrival=20.0 * i, ttft=1000) for i in range(8)]
    short = [TimedRequest(f"short{i}", [i] * 12, 8, arrival=10 + 40.0 * i, ttft=100) for i in range(8)]
    return sorted(long + short, key=lambda request: request.arrival)


def simulate(scheduler: CachingScheduler, requests: list[TimedRequest]) -> None:
    """The scheduler itself under a clock that steps move: no request is computed, and no time passes."""
    model, now, pending = PagedModel(scheduler.num_blocks), 0.0, deque(requests)
    while pending or scheduler.running or scheduler.waiting:
        if not (scheduler.running or scheduler.waiting):
            now = max(now, pending[0].arrival)
        while pending and pending[0].arrival <= now:
            scheduler.add(pending.popleft())
        rows = scheduler.schedule()
        now += step_ms(rows)
        scheduler.update(rows, model(rows))
        for request in requests:
            if request.output:
                request.first_token = min(request.first_token, now)


def main() -> None:
    streams = []
    for kind in (FirstComeFirstServed, EarliestDeadlineFirst):
        requests = some_requests()
        simulate(kind(max_seqs=4, num_blocks=256, max_step_tokens=64), requests)
        met = {name: sum(r.is_met for r in requests if r.name.startswith(name)) for name in ("short", "long")}
        print(f"{kind.__name__}: {met['short']} of 8 short and {met['long']} of 8 long prompts in time")
        streams.append(streams_of(requests))
    print(f"the same tokens: {streams[0] == streams[1]}")


if __name__ == "__main__":
    main()
