"""Step 2: KV memory in blocks. A block table says where a request's tokens lie, so memory is taken as it is needed."""

from __future__ import annotations

from collections import deque

from step01_scheduler import Request, Row, Scheduler, next_token, run, scripted

BLOCK = 4
"""Token positions of a block."""


def num_blocks_of(num_tokens: int) -> int:
    return -(-num_tokens // BLOCK)


class PagedScheduler(Scheduler):
    def __init__(self, max_seqs: int, num_blocks: int) -> None:
        super().__init__(max_seqs)
        self.num_blocks = num_blocks
        self.free = deque(range(num_blocks))
        self.tables: dict[str, list[int]] = {}

    def add(self, request: Request) -> None:
        needed = num_blocks_of(len(request.prompt) + request.max_tokens)
        if needed > self.num_blocks:
            raise ValueError(f"{request.name} needs {needed} blocks of {self.num_blocks}; lower max_tokens")
        super().add(request)

    def fits(self, request: Request) -> bool:
        """All that the running requests may still need is promised to them."""
        promised = [num_blocks_of(len(r.prompt) + r.max_tokens) for r in (*self.running, request)]
        return sum(promised) <= self.num_blocks

    def schedule(self) -> list[Row]:
        self.admit()
        return [self.row(r, r.num_missing) for r in self.running if self.reserve(r, r.num_missing)]

    def reserve(self, request: Request, count: int) -> bool:
        """Take the blocks that `count` more tokens need, all or none."""
        table = self.tables[request.name]
        missing = num_blocks_of(request.num_computed + count) - len(table)
        if missing > len(self.free):
            return False
        table += [self.take() for _ in range(missing)]
        return True

    def row(self, request: Request, count: int) -> Row:
        return super().row(request, count)._replace(blocks=tuple(self.tables[request.name]))

    def start(self, request: Request) -> None:
        self.tables[request.name] = []

    def release(self, request: Request) -> None:
        for block in reversed(self.tables.pop(request.name)):
            self.give(block)

    def take(self) -> int:
        return self.free.popleft()

    def give(self, block: int) -> None:
        self.free.append(block)


class PagedModel:
    """Knows the tokens from its memory alone: a wrong block table would give other tokens."""

    def __init__(self, num_blocks: int) -> None:
        self.memory = [-1] * (num_blocks * BLOCK)

    def __call__(self, rows: list[Row]) -> list[int | None]:
        for row in rows:
            for i in range(row.start, row.start + row.count):
                self.memory[self.cell(row, i)] = row.tokens[i]
        return [
            next_token([self.memory[self.cell(row, i)] for i in range(len(row.tokens))]) if row.samples else None
            for row in rows
        ]

    def cell(self, row: Row, position: int) -> int:
        return row.blocks[position // BLOCK] * BLOCK + position % BLOCK


def some_requests() -> list[Request]:
    return [Request(f"r{i}", list(range(i, i + 5 + 4 * i)), 6 + 5 * (i % 3)) for i in range(5)]


def streams_of(requests: list[Request]) -> dict[str, list[int]]:
    return {request.name: request.output for request in requests}


def main() -> None:
    expected, requests = some_requests(), some_requests()
    plain, paged = Scheduler(max_seqs=3), PagedScheduler(max_seqs=3, num_blocks=18)
    for one, other in zip(expected, requests, strict=True):
        plain.add(one)
        paged.add(other)
    run(plain, scripted)
    model, tables, most = PagedModel(18), {}, 0

    def watched(rows: list[Row]) -> list[int | None]:
        nonlocal most
        most = max(most, sum(len(table) for table in paged.tables.values()))
        tables.update({row.name: row.blocks for row in rows})
        return model(rows)

    run(paged, watched)
    for name, table in tables.items():
        print(name, "blocks", *table)
    print(f"the same tokens as without blocks: {streams_of(requests) == streams_of(expected)}")
    longest = max(num_blocks_of(len(r.prompt) + r.max_tokens) for r in requests)
    print(f"{most} blocks at most; one piece of the longest length for each of 3 requests: {3 * longest}")


if __name__ == "__main__":
    main()
