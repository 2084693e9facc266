"""Step 1: continuous batching. A request joins the batch as soon as another one has left it."""

from __future__ import annotations

import zlib
from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import NamedTuple


@dataclass(eq=False)
class Request:
    name: str
    prompt: list[int]
    max_tokens: int
    output: list[int] = field(default_factory=list)
    num_computed: int = 0

    @property
    def tokens(self) -> list[int]:
        return self.prompt + self.output

    @property
    def num_missing(self) -> int:
        """Known tokens that the model has not computed: the whole prompt at first, one token from then on."""
        return len(self.prompt) + len(self.output) - self.num_computed


class Row(NamedTuple):
    """One request's part of a step: `count` of its tokens are computed, from `start`."""

    name: str
    tokens: list[int]
    num_outputs: int
    start: int
    count: int
    blocks: tuple[int, ...] = ()  # from step 2 on

    @property
    def samples(self) -> bool:
        """The row ends with the last known token, so the model says what comes next."""
        return self.start + self.count == len(self.tokens)


Model = Callable[[list[Row]], Sequence[int | None]]


class Scheduler:
    """Plans steps and takes their results. It knows nothing of the model and does no I/O."""

    def __init__(self, max_seqs: int) -> None:
        self.max_seqs = max_seqs
        self.waiting: deque[Request] = deque()
        self.running: list[Request] = []

    def add(self, request: Request) -> None:
        self.waiting.append(request)

    def schedule(self) -> list[Row]:
        self.admit()
        return [self.row(request, request.num_missing) for request in self.running]

    def admit(self) -> None:
        while self.waiting and len(self.running) < self.max_seqs and self.fits(self.waiting[0]):
            self.running.append(self.waiting.popleft())
            self.start(self.running[-1])

    def row(self, request: Request, count: int) -> Row:
        return Row(request.name, request.tokens, len(request.output), request.num_computed, count)

    def update(self, rows: list[Row], sampled: Sequence[int | None]) -> list[Request]:
        """Take the result of a step. Returns the requests that have ended."""
        of_name = {request.name: request for request in self.running}
        for row, token in zip(rows, sampled, strict=True):
            request = of_name[row.name]
            request.num_computed += row.count
            if token is not None:
                request.output.append(token)
        ended = [request for request in self.running if len(request.output) == request.max_tokens]
        for request in ended:
            self.running.remove(request)
            self.release(request)
        return ended

    def fits(self, request: Request) -> bool:
        return True

    def start(self, request: Request) -> None:
        """The request is admitted. Step 2 gives it memory here, and takes it back in `release`."""

    def release(self, request: Request) -> None:
        pass


def scripted(rows: list[Row]) -> list[int | None]:
    """A model for tests: the next token is a checksum of all tokens before it."""
    return [next_token(row.tokens) if row.samples else None for row in rows]


def next_token(tokens: list[int]) -> int:
    return zlib.crc32(repr(tokens).encode()) % 1000


def run(scheduler: Scheduler, model: Model) -> int:
    """The loop of the engine. Returns the number of steps."""
    num_steps = 0
    while rows := scheduler.schedule():
        scheduler.update(rows, model(rows))
        num_steps += 1
    return num_steps


def main() -> None:
    lengths = {"a": 3, "b": 9, "c": 4, "d": 2, "e": 5}
    requests = [Request(name, [ord(name), 1, 2], length) for name, length in lengths.items()]
    chart = dict.fromkeys(lengths, "")

    def model(rows: list[Row]) -> list[int | None]:
        names = {row.name for row in rows}
        for name in chart:
            chart[name] += "#" if name in names else "."
        return scripted(rows)

    scheduler = Scheduler(max_seqs=2)
    for request in requests:
        scheduler.add(request)
    num_steps = run(scheduler, model)
    for name, steps in chart.items():
        print(name, steps)
    pairs = [list(lengths.values())[i : i + 2] for i in range(0, len(lengths), 2)]
    print(f"{num_steps} steps; batches that wait for their longest request: {sum(map(max, pairs))}")


if __name__ == "__main__":
    main()
